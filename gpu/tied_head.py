"""Tied embeddings kept once: rows are gathered from the prepacked head. Thread: engine.

oneDNN packs a matrix for products of bfloat16 in blocks of 64 outputs, of which pairs of inputs lie side by side. That
is its own affair: where what is gathered is not, bit by bit, what was packed, the plain embedding is kept as well.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.linear import Linear, MakeProduct, make_linear, pack

BLOCK_OUTPUTS = 64
CHECKED_ROWS = 4096  # at a time

Embed = Callable[[Tensor], Tensor]
"""token ids [tokens] -> [tokens, hidden]"""


def make_tied(embedding: Tensor, product: MakeProduct | None) -> tuple[Embed, Linear]:
    """Embedding and head of one matrix [vocab, hidden]; packed, it is kept no more where it can be read so, too.

    Args:
        product: see make_linear.
    """
    if product is None:
        return _plain(embedding), make_linear(embedding, None, None)
    packed = pack(embedding)
    rows = PackedRows(packed, embedding.shape) if is_whole(packed, embedding.shape) else None
    is_same = rows is not None and all(
        torch.equal(
            rows(torch.arange(first, min(first + CHECKED_ROWS, len(embedding)))), embedding[first:][:CHECKED_ROWS]
        )
        for first in range(0, len(embedding), CHECKED_ROWS)
    )
    return rows if rows is not None and is_same else _plain(embedding), product(packed, embedding, None)


def can_gather(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether a matrix [out, in] can be packed without padding: rows may be found in it then."""
    return shape[0] % BLOCK_OUTPUTS == 0 and shape[1] % BLOCK_OUTPUTS == 0


def is_whole(packed: Tensor, shape: torch.Size) -> bool:
    """Whether a packed matrix of a shape has no padding, and may lie as blocks_of has it: oneDNN does as it likes."""
    return can_gather(shape) and torch.ops.mkldnn._nbytes(packed) == shape.numel() * 2


def blocks_of(packed: Tensor, shape: torch.Size) -> Tensor:
    """The memory of a packed matrix that is_whole, as [out / 64, in / 2, 64, 2]; the matrix must outlive it."""
    size_bytes = shape.numel() * 2
    memory = (ctypes.c_uint8 * size_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(
        shape[0] // BLOCK_OUTPUTS, shape[1] // 2, BLOCK_OUTPUTS, 2
    )


class PackedRows:
    """Rows of a prepacked matrix that is_whole. shape: (out, in)."""

    def __init__(self, packed: Tensor, shape: torch.Size) -> None:
        self._packed = packed  # owns the memory
        self._blocks = blocks_of(packed, shape)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [n], integers; returns [n, in]."""
        return self._blocks[rows // BLOCK_OUTPUTS, :, rows % BLOCK_OUTPUTS].flatten(1)


def _plain(embedding: Tensor) -> Embed:
    return lambda token_ids: F.embedding(token_ids, embedding)
