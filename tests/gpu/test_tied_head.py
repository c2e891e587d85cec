"""Tied embeddings: the rows that are gathered are the matrix's, bit by bit, whether or not it is kept."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from gpu.linear import PackedRows, can_pack, make_tied, packed_linear

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="needs a torch with oneDNN's packed products"
)
TOKENS = torch.tensor([0, 127, 63, 64, 5, 5])


def make_matrix(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).bfloat16()


@needs_packing
@pytest.mark.parametrize(("num_rows", "width"), [(128, 64), (5056, 192), (300, 64), (128, 72)])
def test_rows_and_products_are_the_matrixs(num_rows: int, width: int) -> None:
    matrix, x = make_matrix(num_rows, width), make_matrix(3, width)
    embed, head = make_tied(matrix, packed_linear)
    assert torch.equal(embed(TOKENS), F.embedding(TOKENS, matrix))
    assert torch.allclose(head(x).float(), F.linear(x, matrix).float(), rtol=0.02, atol=0.1)


@needs_packing
def test_a_matrix_that_can_be_read_from_its_packed_form_is_let_go() -> None:
    matrix = make_matrix(128, 64)
    kept = weakref.ref(matrix)
    embed, head = make_tied(matrix, packed_linear)
    assert isinstance(embed, PackedRows)
    assert head(make_matrix(1, 64)).shape == (1, 128)
    del matrix
    gc.collect()
    assert kept() is None


@needs_packing
def test_another_layout_than_the_one_known_keeps_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "__call__", lambda self, rows: torch.zeros(len(rows), 64).bfloat16())
    matrix = make_matrix(128, 64)
    embed, _ = make_tied(matrix, packed_linear)
    assert torch.equal(embed(TOKENS), F.embedding(TOKENS, matrix))


def test_what_is_not_packed_is_one_matrix() -> None:
    matrix, x = make_matrix(128, 64), make_matrix(2, 64)
    embed, head = make_tied(matrix, None)
    assert torch.equal(embed(TOKENS), matrix[TOKENS])
    assert torch.equal(head(x), F.linear(x, matrix))
