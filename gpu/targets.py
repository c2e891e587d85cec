"""Where one tensor of a checkpoint goes, and what is rearranged on the way. Thread: engine (at start)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4_BLOCK = 32  # numbers that share a scale
# OCP Microscaling Formats 1.0, section 5.3.3: E2M1, sign last
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_SCALE_BIAS = 127  # a scale is 2 ** (byte - 127): section 5.4.1, E8M0


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of the checkpoint goes.

    Args:
        into: rows of a parameter.
        head_dim: reorder the rows within heads of this size; None: as they are.
        rotary_dim: of each head, so many are reordered; None: all.
        num_reordered: of the rows, so many are; None: all.
        offset: what is added to each number.
        write: how a tensor of another shape or format goes into `into`, or some of its first dimension into the same
            of `into`; None: by copying.
        stored_shape: of the checkpoint's tensor; None: as `into`.
        is_packed: it is stored as bytes, not as floats.
        is_scale: it multiplies what another tensor has written: read last.
    """

    into: Tensor
    head_dim: int | None = None
    rotary_dim: int | None = None
    num_reordered: int | None = None
    offset: float = 0.0
    write: Callable[[Tensor, Tensor], None] | None = None
    stored_shape: tuple[int, ...] | None = None
    is_packed: bool = False
    is_scale: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.into.shape) if self.stored_shape is None else self.stored_shape

    def fill(self, tensor: Tensor) -> None:
        """tensor: of the shape above, in any float format, or bytes."""
        self.write_rows(0, tensor)
        self.finish()

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Some of the tensor's rows, from this one on; finish() is for once all are there."""
        into = self.into[first : first + len(rows)]
        if self.write is not None:
            self.write(into, rows)
        else:
            into.copy_(rows)

    def finish(self) -> None:
        """What is done to all rows together."""
        if self.offset:
            self.into.add_(self.offset)
        if self.head_dim is not None:
            rows = self.into[: self.num_reordered]
            rows.copy_(interleave_halves(rows, self.head_dim, self.rotary_dim))


def interleave_halves(rows: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder each head's rows from (first half, second half) to pairs: what RoPE turns lies side by side.

    Scores do not change: q and k are reordered alike. rows: [heads * head_dim, ...], also returned so; of each head
    the first rotary_dim rows are reordered, or all.
    """
    if rotary_dim is not None and rotary_dim != head_dim:
        heads = rows.view(-1, head_dim, *rows.shape[1:])
        turned = interleave_halves(heads[:, :rotary_dim].flatten(0, 1), rotary_dim)
        turned = turned.view(-1, rotary_dim, *rows.shape[1:])
        return torch.cat([turned, heads[:, rotary_dim:]], 1).view(rows.shape)
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def part_pairs(rows: Tensor) -> Tensor:
    """Reorder rows from pairs (gate, up) to all of gate and then all of up. rows: [2 * n, ...], also returned so."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def write_transposed(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """into: [experts, out, in]; tensor: [experts, in, out], its outputs in pairs or not."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert.T.contiguous()) if are_pairs else expert.T)


def write_paired(into: Tensor, tensor: Tensor) -> None:
    """Both: [experts, 2 * n]."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert))


def write_mxfp4_blocks(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Unpack four-bit numbers, not scaled yet. into: [experts, out, in]; tensor: [experts, out, in / 32, 16], bytes.

    Of a byte the low half comes first.
    """
    values = torch.tensor(FP4_VALUES, dtype=into.dtype, device=into.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    for rows, expert in zip(into, tensor, strict=True):
        unpacked = pairs[expert.to(into.device).flatten(1).int()].view(rows.shape)
        rows.copy_(part_pairs(unpacked) if are_pairs else unpacked)


def write_mxfp4_scales(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Multiply what is there by powers of two. into: [experts, out, in]; tensor: [experts, out, in / 32], bytes."""
    for rows, expert in zip(into, tensor, strict=True):
        exponents = expert.to(into.device).int() - MXFP4_SCALE_BIAS
        exponents = part_pairs(exponents) if are_pairs else exponents
        blocks = rows.view(*exponents.shape, MXFP4_BLOCK)
        blocks.copy_(torch.ldexp(blocks.float(), exponents.unsqueeze(-1)))
