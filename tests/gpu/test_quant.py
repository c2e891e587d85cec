"""Integers come back within half a scale, whatever the weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import QUANTIZE_SCHEMES
from core.errors import BadCheckpoint
from gpu.quant import can_quantize, dequantize, pack_nibbles, quantize, round_up_to_bfloat16, unpack_nibbles


def weight_of(seed: int, size: float, offset: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 192, generator=generator) * size + offset


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.02, 1.0, 300.0]), st.sampled_from([0.0, 0.5, -20.0]))
def test_an_int8_weight_moves_by_at_most_half_its_scale(seed: int, size: float, offset: float) -> None:
    weight = weight_of(seed, size, offset)
    quantized = quantize(weight, "int8")
    moved = (dequantize(quantized, torch.float32) - weight).abs()
    assert (moved <= quantized.scales.float() * 0.5001).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.02, 1.0, 300.0]), st.sampled_from([0.0, 0.5, -20.0]))
def test_an_fp8_weight_moves_by_at_most_a_sixteenth_of_itself(seed: int, size: float, offset: float) -> None:
    """Half a step of three bits of mantissa; near zero half a step of what has no exponent left, 2 ** -9."""
    weight = weight_of(seed, size, offset)
    quantized = quantize(weight, "fp8")
    moved = (dequantize(quantized, torch.float32) - weight).abs()
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert (moved <= weight.abs() / 16 * 1.0001 + quantized.scales.float() * 2**-10).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-6, 0.02, 1.0, 300.0]), st.sampled_from([0.0, 0.5, -20.0]))
def test_an_int4_weight_moves_by_at_most_half_its_scale_and_its_zeros_rounding(
    seed: int, size: float, offset: float
) -> None:
    weight = weight_of(seed, size, offset)
    quantized = quantize(weight, "int4")
    assert quantized.zeros is not None
    moved = (dequantize(quantized, torch.float32) - weight).abs().view(5, 3, 64).amax(-1)
    assert (moved <= quantized.scales.float() * 0.5001 + quantized.zeros.float().abs() / 256).all()


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("value", [0.0, 0.75])
def test_weights_that_are_all_alike_come_back_exactly(scheme: str, value: float) -> None:
    weight = torch.full((3, 64), value)
    assert torch.allclose(dequantize(quantize(weight, scheme), torch.float32), weight, rtol=0.004)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
def test_a_stack_is_quantised_as_its_matrices_are(scheme: str) -> None:
    stack = torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(0))
    whole, one = quantize(stack, scheme), quantize(stack[1], scheme)
    assert whole.shape == (3, 4, 96)
    assert torch.equal(whole[1].values, one.values)
    assert torch.equal(whole[1].scales, one.scales)


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused(scheme: str, bad: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = bad
    with pytest.raises(BadCheckpoint, match="not a finite number"):
        quantize(weight, scheme)


def test_rows_that_no_group_divides_cannot_be_int4() -> None:
    assert [can_quantize("int4", size) for size in (32, 48, 96, 896)] == [True, False, True, True]
    assert can_quantize("int8", 7)
    assert can_quantize("fp8", 7)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=2, max_size=2), st.integers(1, 9))
def test_nibbles_come_back(pair: list[int], count: int) -> None:
    values = torch.tensor(pair * count, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(values)), values)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 2.0**90, width=32))
def test_a_scale_is_rounded_up_by_less_than_a_bfloat16_step(value: float) -> None:
    rounded = round_up_to_bfloat16(torch.tensor([value])).double().item()
    assert value <= rounded <= value * (1 + 2**-7) + 1e-39
