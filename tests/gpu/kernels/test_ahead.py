"""Kernels are compiled for a device, in the formats and shapes that serve, without one."""

import pytest

from tests.gpu.kernels.ahead import Compiled, assert_fits, compile_ahead
from tests.gpu.kernels.ahead_cases import (
    attention_cases,
    elementwise_cases,
    expert_cases,
    matmul_cases,
    row_cases,
    sampling_cases,
)

ATTENTION, SAMPLING = attention_cases(), sampling_cases()
CASES = [*ATTENTION, *elementwise_cases(), *matmul_cases(), *expert_cases(), *row_cases(), *SAMPLING]
# A few numbers, used once, may lie aside where registers are so few that more programs share a multiprocessor; of
# heads that are as large as the kernels know, a few more do.
MOST_STACK_BYTES, LARGEST_STACK_BYTES = 32, 512
SAMPLING_STACK_BYTES = 64  # Triton 3.7, which torch 2.13 brings for CUDA, lays 48 aside, and 3.9 none
LARGEST_HEAD_BYTES = 1024


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> list[Compiled]:
    """What has not changed since the last run is not compiled again: it takes minutes."""
    return compile_ahead(CASES, pytestconfig.cache.mkdir("ahead"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_they_compile_for_a_device_and_keep_their_numbers_in_registers(index: int, compiled: list[Compiled]) -> None:
    assert_fits(compiled[index], most_stack_bytes(index))


def most_stack_bytes(index: int) -> int:
    case = CASES[index]
    if index >= len(ATTENTION):
        decodes = case.constants.get("LAYOUT") is not None
        return SAMPLING_STACK_BYTES if case in SAMPLING else MOST_STACK_BYTES if decodes else 0
    number_bytes = 4 if case.arguments["query"] == "*fp32" else 2
    is_largest = case.constants.get("HEAD_DIM", 0) * number_bytes >= LARGEST_HEAD_BYTES
    return LARGEST_STACK_BYTES if is_largest else MOST_STACK_BYTES


def test_decoding_rounds_every_operation(compiled: list[Compiled]) -> None:
    """As a CPU does, to the same bits: a product and a sum are not one operation."""
    decoding = [found for found in compiled if found.case.constants.get("LAYOUT") is not None]
    assert decoding
    assert {found.num_fused for found in decoding} == {0}


def test_sampling_rounds_every_operation(compiled: list[Compiled]) -> None:
    for found in compiled[-len(SAMPLING) :]:
        assert (found.num_fused, found.num_near_divisions) == (0, 0)
