"""A quantised product is the dequantised weight's, for any number of rows, by operator or by slabs."""

import pytest
import torch
import torch.nn.functional as F

from core.config import QUANTIZE_SCHEMES
from gpu import quant
from gpu.quant import Int4Linear, Int8Linear, SlabLinear, dequantize, make_quantized_linear, quantize

ROWS = (1, 4, 7, 8, 33)
TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}
needs_int4 = pytest.mark.skipif(
    not quant.has_int4_operator(torch.bfloat16), reason="needs torch's int4 operator, AVX-512"
)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(128, 192), (70, 96)])
def test_a_product_is_the_dequantised_weights(
    scheme: str, dtype: torch.dtype, rows: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(rows)
    quantized, bias = quantize(torch.randn(shape).to(dtype), scheme), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    want = F.linear(x.float(), dequantize(quantized, torch.float32), bias.float())
    got = make_quantized_linear(quantized, bias)(x)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]
    assert relative_error(SlabLinear(quantized, bias)(x), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", [1, 40])
def test_several_slabs_give_what_one_gives(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    quantized, x = quantize(torch.randn(300, 64), scheme), torch.randn(rows, 64)
    whole = make_quantized_linear(quantized, None)(x)
    monkeypatch.setattr(quant, "SLAB_BYTES", 64 * 64 * 4 * 2)  # two blocks
    assert torch.allclose(make_quantized_linear(quantized, None)(x), whole, atol=1e-4)


@needs_int4
def test_int4_serves_few_rows_by_the_operator() -> None:
    quantized = quantize(torch.randn(64, 64).bfloat16(), "int4")
    assert isinstance(make_quantized_linear(quantized, None), Int4Linear)


def test_an_operator_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Linear, "__call__", lambda self, x: x.new_ones((x.shape[0], 128)))
    monkeypatch.setattr(Int4Linear, "__call__", lambda self, x: x.new_ones((x.shape[0], 128)))
    assert not quant.has_int8_operator.__wrapped__(torch.float32)
    assert not quant.has_int4_operator.__wrapped__(torch.float32)
