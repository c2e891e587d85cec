"""Rows times a block of 64 outputs, by the CPU's best instructions for it: tiles, or lanes. Thread: any.

Which of the two is decided as it is compiled: their sums are added up in another order each.
"""

from importlib import import_module
from typing import Any

from numba import njit

from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.layout import BLOCK_OUTPUTS, SUM_ROW_BYTES
from gpu.cpu_kernels.support import may_use_tiles
from gpu.cpu_kernels.vectors import add, load_floats, load_widened, store_floats, store_rounded, zeros

ARE_TILES = may_use_tiles()
_form: Any = import_module(f"gpu.cpu_kernels.{'tiles' if ARE_TILES else 'lanes'}")  # the other is not compiled

ATTENTION_ROWS: int = _form.ATTENTION_ROWS
GROUP_ROWS: int = _form.GROUP_ROWS
PART_PAIRS: int = _form.PART_PAIRS
SHAPES_BYTES: int = _form.SHAPES_BYTES
choose_shape, shape_tiles, release_tiles = _form.choose_shape, _form.shape_tiles, _form.release_tiles
multiply_group, multiply_part, part_pairs = _form.multiply_group, _form.multiply_part, _form.part_pairs


@njit(cache=True)
def clear_sums(sums, num_rows):
    for index in range(0, num_rows * BLOCK_OUTPUTS, LANES):
        store_floats(sums + 4 * index, zeros())


@njit(cache=True)
def write_block(sums, num_rows, bias, out, out_stride):
    """Sums plus bias, rounded. bias: of the block's outputs, or 0."""
    for row in range(num_rows):
        for index in range(0, BLOCK_OUTPUTS, LANES):
            value = load_floats(sums + row * SUM_ROW_BYTES + 4 * index)
            if bias:
                value = add(value, load_widened(bias + 2 * index))
            store_rounded(out + row * out_stride + 2 * index, value)
