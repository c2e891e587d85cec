"""A packed product is F.linear's."""

import pytest
import torch
import torch.nn.functional as F

from gpu.linear import can_pack, has_onednn, make_linear, packed_linear

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


@pytest.mark.parametrize(("dtype", "is_packed"), [("bfloat16", True), ("bfloat16", False), ("float32", False)])
def test_a_rows_product_is_the_same_to_the_last_bit_however_many_there_are(dtype: str, is_packed: bool) -> None:
    """4,096 inputs: from about 2,048 on oneDNN adds a lone row's products in another order."""
    number = getattr(torch, dtype)
    if not has_onednn(number, CPU):
        pytest.skip("needs a torch with oneDNN's products")
    torch.manual_seed(0)
    linear = make_linear(torch.randn(256, 4096).to(number), None, packed_linear if is_packed else None)
    x = torch.randn(70, 4096).to(number)
    whole = linear(x)
    for num_rows in (1, 2, 3, 5, 16, 33, 64):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
