"""A quantised matrix's result is the dequantised weight's, for any number of rows, by slabs."""

import pytest
import torch
import torch.nn.functional as F

from core.config import QUANTIZE_SCHEMES
from gpu import quant
from gpu.quant import SlabLinear, dequantize, quantize

ROWS = (1, 4, 7, 8, 33)
TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", [(128, 192), (70, 96)])
def test_the_result_is_the_dequantised_weights(
    scheme: str, dtype: torch.dtype, rows: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(rows)
    quantized, bias = quantize(torch.randn(shape).to(dtype), scheme), torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    want = F.linear(x.float(), dequantize(quantized, torch.float32), bias.float())
    got = SlabLinear(quantized, bias)(x)
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("scheme", QUANTIZE_SCHEMES)
@pytest.mark.parametrize("rows", [1, 40])
def test_several_slabs_give_what_one_gives(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    quantized, x = quantize(torch.randn(300, 64), scheme), torch.randn(rows, 64)
    whole = SlabLinear(quantized, None)(x)
    monkeypatch.setattr(quant, "SLAB_BYTES", 64 * 64 * 4 * 2)
    assert torch.allclose(SlabLinear(quantized, None)(x), whole, atol=1e-4)
