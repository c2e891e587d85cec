"""A packed matmul is F.linear's, and rows gathered from a packed head are the embedding's, bit by bit."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from gpu.device import cpu_flags
from gpu.linear import PackedRows, can_pack, has_onednn, make_linear, make_tied

CPU = torch.device("cpu")
TOKENS = torch.tensor([0, 127, 63, 64, 5, 5])
needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, CPU), reason="needs a torch with oneDNN's packed matmuls"
)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_matmuls_equal_plain_ones(rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 72).bfloat16(), torch.randn(rows, 72).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    got, want = make_linear(weight, bias, is_packed=True)(x), F.linear(x, weight, bias)
    assert torch.allclose(got.float(), want.float(), rtol=0.02, atol=0.05)


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
    linear = make_linear(torch.randn(num_out, num_in).to(number), None, is_packed=is_packed)
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


def make_matrix(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).bfloat16()


@needs_packing
@pytest.mark.parametrize(("num_rows", "width"), [(128, 64), (5056, 192), (300, 64), (128, 72)])
def test_rows_and_products_are_the_matrixs(num_rows: int, width: int) -> None:
    matrix, x = make_matrix(num_rows, width), make_matrix(3, width)
    embed, head = make_tied(matrix, is_packed=True)
    assert torch.equal(embed(TOKENS), F.embedding(TOKENS, matrix))
    assert torch.allclose(head(x).float(), F.linear(x, matrix).float(), rtol=0.02, atol=0.1)


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs a CPU with avx512_bf16, whose layout is known")
@needs_packing
def test_a_matrix_that_can_be_read_from_its_packed_form_is_let_go() -> None:
    matrix = make_matrix(128, 64)
    kept = weakref.ref(matrix)
    embed, head = make_tied(matrix, is_packed=True)
    assert isinstance(embed, PackedRows)
    assert head(make_matrix(1, 64)).shape == (1, 128)
    del matrix
    gc.collect()
    assert kept() is None


@needs_packing
def test_another_layout_than_the_one_known_keeps_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "__call__", lambda self, rows: torch.zeros(len(rows), 64).bfloat16())
    matrix = make_matrix(128, 64)
    embed, _ = make_tied(matrix, is_packed=True)
    assert torch.equal(embed(TOKENS), F.embedding(TOKENS, matrix))


def test_what_is_not_packed_is_one_matrix() -> None:
    matrix, x = make_matrix(128, 64), make_matrix(2, 64)
    embed, head = make_tied(matrix, is_packed=False)
    assert torch.equal(embed(TOKENS), matrix[TOKENS])
    assert torch.equal(head(x), F.linear(x, matrix))
