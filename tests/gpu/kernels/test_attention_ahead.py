"""Attention's kernels compiled for a device, in the formats and shapes of heads that serve, without one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gpu.kernels.attention_tiles import KernelShape, kernel_shape, tiles_for
from gpu.scores import PLAIN, Scores
from tests.gpu.kernels.ahead import Case, Compiled, assert_fits, compile_ahead, pointer

SINKS = Scores(sinks=torch.zeros(1))
CAPPED = Scores(cap=50.0)
# A number or two, used once, may lie aside where registers are so few that more programs share a multiprocessor.
MOST_STACK_BYTES = 16
# (heads, KV heads, head_dim), format, windowed, scores
SERVED: list[tuple[tuple[int, int, int], torch.dtype, bool, Scores]] = [
    ((32, 8, 128), torch.bfloat16, False, PLAIN),  # Llama 3 8B
    ((32, 8, 128), torch.float32, False, PLAIN),
    ((28, 4, 128), torch.bfloat16, True, PLAIN),  # Qwen 2.5 7B
    ((64, 8, 64), torch.bfloat16, True, SINKS),  # gpt-oss
    ((8, 4, 256), torch.bfloat16, True, CAPPED),  # Gemma 2 2B
    ((32, 32, 80), torch.float16, False, PLAIN),  # Phi 2's heads
]
INTEGERS = ("num_rows", "num_decodes", "num_programs", "query_stride", "table_stride", "window")
TABLES = ("tables", "ends", "offsets", "tiles", "num_tiles", "splits", "split_offsets")


def arguments(dtype: torch.dtype) -> dict[str, str]:
    """Of all the kernels: types by name."""
    rows = dict.fromkeys(("query", "keys", "values", "sinks", "out"), pointer(dtype))
    parts = dict.fromkeys(("part_outs", "part_tops", "part_totals"), "*fp32")
    tables = dict.fromkeys(TABLES, "*i32")
    return rows | parts | tables | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(("scale", "factor", "cap"), "fp32")


def cases_of(shape: KernelShape, is_windowed: bool, scores: Scores) -> list[Case]:
    constants = shape.constants(is_windowed, scores)
    if scores.sinks is None:
        constants["sinks"] = None

    def case(kernel: str, constants: dict[str, Any], launch: dict[str, int]) -> Case:
        return Case(
            f"gpu.kernels.{kernel}", arguments(shape.dtype), constants, **launch, multiples_of_16=("query_stride",)
        )

    found = [
        case("decode_attention:decode", constants | shape.decode_constants, shape.launch),
        case("extend_attention:extend_and_decode", constants | shape.extend_constants, shape.launch),
    ]
    if shape.head_dim == 128 and shape.dtype == torch.bfloat16:  # they depend on little
        schedule = shape.schedule_constants | {"HAS_WINDOW": is_windowed}
        found.append(case("decode_attention:merge", shape.merge_constants, {}))
        found.append(case("attention_schedule:lay_out_step", schedule, {}))
    return found


CASES = [
    case
    for heads, dtype, is_windowed, scores in SERVED
    for case in cases_of(kernel_shape(*heads, dtype), is_windowed, scores)
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_ahead(CASES, tmp_path_factory.mktemp("ahead"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_they_compile_for_a_device_and_keep_their_numbers_in_registers(index: int, compiled: list[Compiled]) -> None:
    found = compiled[index]
    if found.error is None and found.stack_bytes <= MOST_STACK_BYTES:
        found = replace(found, stack_bytes=0)
    assert_fits(found)


def test_heads_that_shared_memory_does_not_hold_are_refused() -> None:
    assert tiles_for(256, torch.float32).decode_tokens == 16
    with pytest.raises(ValueError, match="heads of 300: at most 256"):
        tiles_for(300, torch.float32)
