"""Launches the products of products.py: one matrix's, plain or quantised, for any number of rows. Thread: engine.

A row's sums depend on the matrix's shape and on the tile alone, and there are two tiles: of SMALL_ROWS, and a larger
one for more. So a row is rounded in one way among up to SMALL_ROWS, and perhaps in another among more: the instructions
of other tiles may add in another order. cuBLAS, which multiplies plain matrices for many rows, chooses its kernel, its
tiles and its splits anew for each number of rows. To be the same to the last bit in any company is therefore to have
the small tile for every token that a sequence draws itself and the large one for its prompt, whatever shares the step;
many rows then read the weights once for each SMALL_ROWS of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.kernels.block_sizes import (
    COLUMN_WARPS,
    COLUMNS,
    LARGE_GROUPED_TILE,
    LARGE_TILES,
    SMALL_ROWS,
    SMALL_TILES,
    ProductTile,
    split_inputs,
    splits_for,
)
from gpu.kernels.products import add_splits, multiply
from gpu.kernels.support import knows_fp8
from gpu.quantize import FP8, LEAST_GROUP, QuantizedWeight, Weight

PLAIN, SCALED, INT4, GROUPED = range(4)  # as products.py numbers them
PRECISION = "ieee"  # of float32: not rounded to fewer bits first


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight, or a stack of them, as the kernels read it.

    Args:
        form: PLAIN, SCALED, INT4 or GROUPED.
        values: [..., out, in], or as the form says; scales and zeros are values where the form has none.
        num_bits: of a weight.
        group: inputs that share a scale.
    """

    form: int
    values: Tensor
    scales: Tensor
    zeros: Tensor
    num_out: int
    num_in: int
    num_bits: int
    group: int

    @property
    def has_groups(self) -> bool:
        return self.form in (INT4, GROUPED)

    @property
    def group_constant(self) -> int:
        """What the kernels are compiled for."""
        return self.group if self.has_groups else 1

    def tile(self, num_rows: int) -> ProductTile:
        """For so many rows of a step."""
        found = (SMALL_TILES if num_rows <= SMALL_ROWS else LARGE_TILES)[self.num_bits]
        if not self.has_groups:
            return found
        if self.form == GROUPED and num_rows > SMALL_ROWS:
            found = LARGE_GROUPED_TILE
        inputs = found.inputs
        while self.group % inputs:
            inputs //= 2
        return ProductTile(found.rows, found.outputs, inputs, found.num_warps, found.num_stages)


def can_multiply(weight: Weight) -> bool:
    """Whether the kernels know how it is stored, on its device."""
    if isinstance(weight, Tensor):
        return weight.is_contiguous()
    if weight.values.dtype == FP8 and not knows_fp8(weight.values.device):
        return False
    parts = [part for part in (weight.values, weight.scales, weight.zeros) if part is not None]
    are_outputs_scaled = weight.zeros is None and weight.scales.shape[-1] == 1
    return all(part.is_contiguous() for part in parts) and (are_outputs_scaled or weight.group_size % LEAST_GROUP == 0)


def stored_as(weight: Weight) -> tuple[str, int]:
    """(how it is stored, in a word; bytes)."""
    if isinstance(weight, Tensor):
        return str(weight.dtype).removeprefix("torch."), weight.nbytes
    if weight.zeros is not None:
        return f"int4 by {weight.group_size}", weight.values.nbytes
    groups = "" if weight.scales.shape[-1] == 1 else f" by {weight.group_size}"
    return str(weight.values.dtype).removeprefix("torch.") + groups, weight.values.nbytes


def as_matrix(weight: Weight) -> Matrix:
    """Of one that it can_multiply; shares its memory."""
    num_out, num_in = weight.shape[-2:]
    if isinstance(weight, QuantizedWeight):
        if weight.zeros is None:
            form = SCALED if weight.scales.shape[-1] == 1 else GROUPED
            return Matrix(form, weight.values, weight.scales, weight.scales, num_out, num_in, 8, weight.group_size)
        return Matrix(INT4, weight.values, weight.scales, weight.zeros, num_out, num_in, 4, weight.group_size)
    return Matrix(PLAIN, weight, weight, weight, num_out, num_in, 8 * weight.element_size(), num_in)


class Product:
    """One matrix's.

    Args:
        weight: [out, in], one that it can_multiply.
        bias: [out], or None.
    """

    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self._matrix = as_matrix(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        matrix, num_rows = self._matrix, x.shape[0]
        out = x.new_empty((num_rows, matrix.num_out))
        if not num_rows:
            return out
        if x.stride(1) != 1:
            x = x.contiguous()
        tile = matrix.tile(num_rows)
        splits = splits_for(matrix.num_out, matrix.num_in, tile) if num_rows <= SMALL_ROWS else 1
        parts = out if splits == 1 else out.new_empty((splits, *out.shape), dtype=torch.float32)
        num_tiles = -(-num_rows // tile.rows) * -(-matrix.num_out // tile.outputs)
        bias = out if self._bias is None else self._bias  # what is not read is still an address
        multiply[(num_tiles, splits)](
            x,
            matrix.values,
            matrix.scales,
            matrix.zeros,
            bias,
            parts,
            num_rows,
            matrix.num_out,
            matrix.num_in,
            matrix.values.stride(-2),
            x.stride(0),
            split_inputs(matrix.num_in, splits, tile),
            FORM=matrix.form,
            HAS_BIAS=self._bias is not None,
            SPLITS=splits,
            GROUP=matrix.group_constant,
            IS_WHOLE=matrix.num_in % tile.inputs == 0,
            PRECISION=PRECISION,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.outputs,
            BLOCK_K=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if splits > 1:
            add_splits[(num_rows, -(-matrix.num_out // COLUMNS))](
                parts,
                bias,
                out,
                num_rows,
                matrix.num_out,
                HAS_BIAS=self._bias is not None,
                SPLITS=splits,
                BLOCK=COLUMNS,
                num_warps=COLUMN_WARPS,
            )
        return out
