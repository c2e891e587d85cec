"""What steps are padded to."""

import dataclasses

import pytest

from bench.make_model import PRESETS
from core.config import EngineConfig, ModelConfig
from core.config_json import parse_model_config
from gpu.step_shapes import (
    StepShape,
    StepShapes,
    chunk_shapes,
    decode_sizes,
    max_decodes,
    most_chunk_tokens,
    multiplied_parameters,
    step_shapes,
)

WIDE = EngineConfig(max_batch_tokens=8192)


def config_of(preset: str) -> ModelConfig:
    return parse_model_config(dict(PRESETS[preset]))


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (24, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_sizes_end_with_the_most_rows(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert decode_sizes(max_rows) == sizes


def test_sizes_are_eights_up_to_256_and_then_sixteens() -> None:
    sizes = decode_sizes(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[sizes.index(248) :] == (248, 256, *range(272, 513, 16))
    assert len(sizes) == 51


def test_rows_are_those_that_a_step_has_room_for() -> None:
    assert max_decodes(EngineConfig(max_sequences=64, max_batch_tokens=512)) == 64
    assert max_decodes(EngineConfig(max_sequences=600, max_batch_tokens=512)) == 512


def test_chunks_are_powers_of_two_beside_a_few_numbers_of_decodes() -> None:
    shapes = chunk_shapes(64, 130)
    beside = [0, 4, 12, 32, 60]
    assert [(shape.num_decodes, shape.num_prompt_tokens) for shape in shapes[:3]] == [(0, 16), (4, 12), (12, 4)]
    found = {(shape.num_decodes, shape.num_prompt_tokens) for shape in shapes[3:]}
    assert found == {(count, size) for count in beside for size in (32, 64, 128)}
    assert {shape.num_prompts for shape in shapes} == {4}
    assert [shape.num_tokens for shape in shapes] == sorted(shape.num_tokens for shape in shapes)
    assert all(shape.num_rows <= min(64, shape.num_tokens) for shape in shapes)


def test_few_tokens_or_rows_have_few_shapes() -> None:
    assert chunk_shapes(64, 15) == ()
    assert chunk_shapes(1, 31) == (StepShape(0, 1, 16),)
    assert chunk_shapes(3, 16) == (StepShape(0, 1, 16), StepShape(2, 1, 14))
    assert max(shape.num_decodes for shape in chunk_shapes(512, 64)) == 128


def test_the_ladder_ends_where_the_device_takes_as_long_as_sending() -> None:
    small, large = config_of("qwen3-0.6b"), config_of("llama-8b")
    assert most_chunk_tokens(small, WIDE) == 1024
    assert most_chunk_tokens(small, EngineConfig(max_batch_tokens=48)) == 48
    assert multiplied_parameters(large) == 218_103_808
    assert most_chunk_tokens(large, WIDE) == 165
    assert step_shapes(large, WIDE).chunks[-1].num_prompt_tokens == 128
    assert step_shapes(dataclasses.replace(large, hidden_size=65_536), WIDE).chunks == ()


def test_of_experts_those_count_that_a_token_goes_through() -> None:
    config = config_of("moe-1b")
    assert config.experts is not None
    dense = dataclasses.replace(
        config, experts=None, intermediate_size=config.experts.num_active * config.experts.intermediate_size
    )
    assert multiplied_parameters(config) == multiplied_parameters(dense)


SHAPES = StepShapes(decode_sizes(64), chunk_shapes(64, 256))


@pytest.mark.parametrize(
    ("step", "padded"),
    [
        ((0, 1, 9), (0, 4, 16)),
        ((0, 1, 16), (0, 4, 16)),
        ((0, 1, 17), (0, 4, 32)),
        ((3, 2, 12), (4, 4, 12)),
        ((12, 1, 64), (12, 4, 64)),
        ((20, 1, 65), (32, 4, 128)),
        ((40, 3, 20), (60, 4, 32)),
        ((0, 4, 256), (0, 4, 256)),
        ((5, 0, 0), (8, 0, 0)),
    ],
)
def test_a_step_is_padded_to_the_least_that_holds_it(step: tuple[int, int, int], padded: tuple[int, int, int]) -> None:
    assert SHAPES.of(StepShape(*step)) == StepShape(*padded)


@pytest.mark.parametrize(
    "step",
    [
        (0, 5, 20),  # too many prompts
        (61, 1, 20),  # too many decodes
        (0, 1, 257),  # too many tokens
        (2, 1, 14),  # 16 tokens in products of few rows, and no such shape has room for them
        (14, 1, 40),  # 15 rows in the head's product, of few rows; and 36 if it were padded
    ],
)
def test_a_step_that_would_be_computed_otherwise_has_no_shape(step: tuple[int, int, int]) -> None:
    assert SHAPES.of(StepShape(*step)) is None


def test_they_are_captured_from_the_largest_of_each_kind_and_then_upwards() -> None:
    shapes = StepShapes((1, 2, 40), chunk_shapes(3, 32))
    order = [(shape.num_decodes, shape.num_prompt_tokens) for shape in shapes.in_order]
    assert order == [(2, 32), (40, 0), (1, 0), (2, 0), (0, 16), (2, 14), (0, 32)]
