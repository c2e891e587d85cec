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


@pytest.mark.bits
@pytest.mark.parametrize(("dtype", "is_packed"), [("bfloat16", True), ("bfloat16", False), ("float32", False)])
@pytest.mark.parametrize(("num_out", "num_in"), [(256, 4096), (896, 4864), (64, 1408), (1152, 896)])
def test_a_rows_product_is_the_same_to_the_last_bit_however_many_there_are(
    dtype: str, is_packed: bool, num_out: int, num_in: int
) -> None:
    """From about 2,048 inputs on oneDNN adds a lone row's products in another order, by AMX from 1,408 on several's."""
    number = getattr(torch, dtype)
    if not has_onednn(number, CPU):
        pytest.skip("needs a torch with oneDNN's products")
    torch.manual_seed(0)
    linear = make_linear(torch.randn(num_out, num_in).to(number), None, packed_linear if is_packed else None)
    x = torch.randn(100, num_in).to(number)
    before = torch.get_num_threads()
    try:
        whole = linear(x)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 96):
                assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
    finally:
        torch.set_num_threads(before)
