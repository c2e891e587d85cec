"""Products with a prepacked weight: the kernel. Thread: any, without the GIL.

Reads the memory that oneDNN packed (packed_product.py): see layout.py. A piece of work is some blocks: each is read
from memory once, a part of its inputs at a time, and multiplied with all rows while that part lies in a core's cache;
the next part is fetched meanwhile. Sums are float32, and rounded once.
"""

import ctypes

import numpy as np
from numba import cfunc, njit, types

from gpu.cpu_kernels.blocks import (
    SHAPES_BYTES,
    clear_sums,
    multiply_part,
    part_pairs,
    release_tiles,
    shape_tiles,
    write_block,
)
from gpu.cpu_kernels.emit import REGISTER_BYTES
from gpu.cpu_kernels.layout import BLOCK_OUTPUTS, PAIR_BYTES, SUM_ROW_BYTES
from gpu.cpu_kernels.vectors import keep, load_integer, take_next


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("x", ctypes.c_int64),  # bf16 [rows, 2 * num_pairs]
        ("x_stride", ctypes.c_int64),  # bytes from row to row
        ("weights", ctypes.c_int64),  # bf16 [blocks, num_pairs, 64, 2]
        ("bias", ctypes.c_int64),  # bf16 [blocks * 64]; 0: none
        ("out", ctypes.c_int64),  # bf16 [rows, blocks * 64]
        ("num_rows", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("piece_blocks", ctypes.c_int64),  # blocks that are computed together: a part of x is read once for all
        ("num_threads", ctypes.c_int64),  # that take pieces: they mostly do so in turn
    )


@njit(cache=True)
def _multiply_blocks(x, x_stride, weights, num_blocks, num_pairs, num_rows, sums, shapes, next_piece):
    """Sums of some blocks.

    Args:
        sums: float32 [blocks, rows, 64], zeros.
        next_piece: address of the weights that this thread will probably read next.
    """
    most = part_pairs(num_rows)
    for first in range(0, num_pairs, most):
        some = min(most, num_pairs - first)
        for block in range(num_blocks):
            at = weights + (block * num_pairs + first) * PAIR_BYTES
            if block + 1 < num_blocks:
                following = at + num_pairs * PAIR_BYTES
            elif first + some < num_pairs:
                following = weights + (first + some) * PAIR_BYTES
            else:
                following = next_piece
            into = sums + block * num_rows * SUM_ROW_BYTES
            multiply_part(x + 4 * first, x_stride, at, some, num_rows, into, shapes, following)


@cfunc(types.void(types.int64), cache=True)
def multiply_rows(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    x, x_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    weights, bias, out = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    num_rows, num_pairs = load_integer(arguments + 48), load_integer(arguments + 56)
    num_blocks, piece_blocks = load_integer(arguments + 64), load_integer(arguments + 72)
    num_threads = load_integer(arguments + 80)
    of_block = num_rows * SUM_ROW_BYTES
    memory = np.empty(piece_blocks * of_block + SHAPES_BYTES + REGISTER_BYTES, dtype=np.uint8)
    sums = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    shapes = sums + piece_blocks * of_block
    shape_tiles(shapes, num_rows)
    first = take_next(arguments) * piece_blocks
    while first < num_blocks:
        some = min(piece_blocks, num_blocks - first)
        clear_sums(sums, some * num_rows)
        at, block_bytes = weights + first * num_pairs * PAIR_BYTES, num_pairs * PAIR_BYTES
        next_piece = at + num_threads * piece_blocks * block_bytes
        _multiply_blocks(x, x_stride, at, some, num_pairs, num_rows, sums, shapes, next_piece)
        for block in range(some):
            offset = 2 * (first + block) * BLOCK_OUTPUTS
            into = out + offset
            write_block(
                sums + block * of_block, num_rows, bias + offset if bias else 0, into, 2 * num_blocks * BLOCK_OUTPUTS
            )
        first = take_next(arguments) * piece_blocks
    release_tiles()
    keep(memory)
