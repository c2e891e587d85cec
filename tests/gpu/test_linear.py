"""A packed product is F.linear's."""

import pytest
import torch
import torch.nn.functional as F

from gpu.linear import can_pack, make_linear, packed_linear

CPU = torch.device("cpu")


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="needs a torch with oneDNN's packed products")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_products_equal_plain_ones(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 72).bfloat16(), torch.randn(rows, 72).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    got, want = make_linear(weight, bias, packed_linear)(x), F.linear(x, weight, bias)
    assert torch.allclose(got.float(), want.float(), rtol=0.02, atol=0.05)
