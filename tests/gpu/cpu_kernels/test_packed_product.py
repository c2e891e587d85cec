"""The kernel's products are F.linear's, whatever the rows, and of layouts that it does not know oneDNN's."""

import pytest
import torch
import torch.nn.functional as F

from gpu.device import cpu_flags
from gpu.linear import ProductChoice, can_pack, make_linear, pack, packed_linear

pytest.importorskip("numba", reason="needs numba: pip install 'steploop[cpu]'")
if "avx512_bf16" not in cpu_flags() or not can_pack(torch.bfloat16, torch.device("cpu")):
    pytest.skip("needs a CPU with avx512_bf16, and a torch with oneDNN's packed products", allow_module_level=True)

from gpu.cpu_kernels.packed_product import PackedProduct, PackedProducts, is_layout_known


@pytest.fixture(scope="module")
def make() -> PackedProducts:
    return PackedProducts(ProductChoice(uses_kernel=True))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 32, 96, 97, 193])
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 64), (192, 1024), (128, 2176), (320, 1088)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_torchs(
    make: PackedProducts,
    monkeypatch: pytest.MonkeyPatch,
    num_threads: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    has_bias: bool,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    weight, x = noise(num_out, num_in), noise(num_rows, num_in)
    bias = noise(num_out) if has_bias else None
    product = make_linear(weight, bias, make)
    assert isinstance(product, PackedProduct)
    want = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert torch.allclose(product(x).float(), want, rtol=2.0**-8, atol=1e-3)


def test_a_row_is_rounded_the_same_in_any_company(make: PackedProducts) -> None:
    product = make_linear(noise(192, 2176), None, make)
    x = noise(200, 2176)
    whole = product(x)
    for first, end in ((0, 1), (3, 10), (90, 200), (199, 200)):
        assert torch.equal(product(x[first:end]), whole[first:end])


def test_onednn_multiplies_where_it_is_chosen() -> None:
    weight, x = noise(128, 1024), noise(40, 1024)
    product = make_linear(weight, None, PackedProducts(ProductChoice(uses_kernel=False)))
    assert torch.equal(product(x), make_linear(weight, None, packed_linear)(x))


def test_rows_may_lie_apart(make: PackedProducts) -> None:
    weight, x = noise(64, 128), noise(5, 192)[:, 64:]
    assert torch.equal(make_linear(weight, None, make)(x), make_linear(weight, None, make)(x.contiguous()))


@pytest.mark.parametrize(("num_out", "num_in"), [(48, 72), (64, 72), (100, 64)])
def test_a_matrix_that_is_padded_is_left_to_onednn(make: PackedProducts, num_out: int, num_in: int) -> None:
    weight, x = noise(num_out, num_in), noise(3, num_in)
    product = make_linear(weight, None, make)
    assert not isinstance(product, PackedProduct)
    assert torch.allclose(product(x).float(), F.linear(x, weight).float(), rtol=0.02, atol=0.05)


def test_another_layout_than_the_one_known_is_noticed() -> None:
    weight = noise(128, 64)
    assert is_layout_known(pack(weight), weight)
    assert not is_layout_known(pack(weight.flip(0)), weight)
    weight[127, 63] += 1
    assert not is_layout_known(pack(noise(128, 64)), weight)
