"""The kernel's matmuls with quantised matrices are the dequantised matrix's, whatever the rows."""

import pytest
import torch
import torch.nn.functional as F

from gpu.device import cpu_flags
from gpu.quant import QuantizedWeight, dequantize, quantize

if "avx512_bf16" not in cpu_flags():
    pytest.skip("needs a CPU with avx512_bf16", allow_module_level=True)

from gpu.cpu_kernels.quantized_matmul import QuantizedMatmul, can_multiply


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 13, 40])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 32), (64, 64), (192, 1120), (66 * 64, 64)])
def test_matmuls_are_the_dequantised_matrixs(
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int,
    scheme: str,
    num_rows: int,
    num_out: int,
    num_in: int,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    weight, x = quantize(noise(num_out, num_in) + 0.5, scheme), noise(num_rows, num_in)
    for bias in (None, noise(num_out)):
        want = F.linear(x.float(), dequantize(weight, torch.float32), None if bias is None else bias.float())
        assert torch.allclose(QuantizedMatmul(weight, bias)(x).float(), want, rtol=2.0**-8, atol=2e-3)


@pytest.mark.bits
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_a_row_is_rounded_the_same_in_any_company(scheme: str) -> None:
    matmul, x = QuantizedMatmul(quantize(noise(192, 1120) + 0.5, scheme), None), noise(600, 1120)
    whole = matmul(x)
    for first, end in ((0, 1), (3, 10), (90, 200), (500, 600), (599, 600), (0, 32), (0, 17)):
        assert torch.equal(matmul(x[first:end]), whole[first:end])


def test_each_integer_has_its_value() -> None:
    values = torch.arange(64 * 128).view(64, 128).remainder(256).sub(128).to(torch.int8)
    weight = QuantizedWeight(torch.bfloat16, values, torch.ones(64, 1).bfloat16())
    assert torch.equal(QuantizedMatmul(weight, None)(torch.eye(128).bfloat16()), values.T.bfloat16())
    values = torch.arange(64 * 64).view(64, 64).mul(7).remainder(256).to(torch.uint8)
    ones = torch.ones(64, 2).bfloat16()
    weight = QuantizedWeight(torch.bfloat16, values, ones, ones)
    want = dequantize(weight, torch.bfloat16)
    assert torch.equal(QuantizedMatmul(weight, None)(torch.eye(128).bfloat16()), want.T)


@pytest.mark.parametrize("shape", [(48, 64), (64, 36)])
def test_matrices_that_are_not_whole_blocks_are_left_to_others(shape: tuple[int, int]) -> None:
    assert not can_multiply(quantize(noise(*shape), "int8"))
    assert not can_multiply(quantize(torch.ones(64, 64), "int4"))  # float32
