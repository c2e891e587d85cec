"""Products with a prepacked weight: the kernel. Thread: any, without the GIL.

Reads the memory that oneDNN packed (packed_matrix.py): blocks of 64 outputs, pairs of inputs side by side. A piece of
work is a block: it is read from memory once, a part of its inputs at a time, and multiplied with all rows while that
part lies in a core's cache; the next part is fetched meanwhile. Sums are float32, and rounded once.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.vectors import (
    add,
    load_floats,
    load_integer,
    load_widened,
    store_floats,
    store_rounded,
    take_next,
    zeros,
)

BLOCK_OUTPUTS = 64
BLOCK_REGISTERS = BLOCK_OUTPUTS // LANES
PAIR_BYTES = BLOCK_REGISTERS * REGISTER_BYTES  # of a pair of inputs, all outputs of a block
MOST_TILE_ROWS = 6  # with 4 registers of sums each, and 4 of weights: of 32 registers
PART_PAIRS = 512  # of inputs: 128 KiB of weights, an eighth of a second-level cache
STREAM_AHEAD = 4096  # bytes: how far ahead the one tile of few rows asks for weights
SUM_ROW_BYTES = 4 * BLOCK_OUTPUTS


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
    )


def _make_tile(num_rows):
    """Add the products of so many rows with a part of a block to their sums."""

    @intrinsic
    def tile(typing_context, x, x_stride, weights, num_pairs, sums, ahead):
        """
        Args:
            x: address of bf16 [num_rows, 2 * num_pairs], rows x_stride bytes apart.
            weights: address of bf16 [num_pairs, 64, 2].
            sums: address of float32 [num_rows, 64].
            ahead: bytes before which lines are asked for.
        """

        def generate(context, builder, signature, arguments):
            x, x_stride, weights, num_pairs, sums, ahead = arguments
            number = ir.IntType(64)

            def constant(value):
                return ir.Constant(number, value)

            places = [
                (builder.add(sums, constant(row * SUM_ROW_BYTES + column * REGISTER_BYTES)), row, column)
                for row in range(num_rows)
                for column in range(BLOCK_REGISTERS)
            ]
            kept = [cgutils.alloca_once(builder, emit.FLOATS) for _ in places]
            for room, (place, _, _) in zip(kept, places, strict=True):
                builder.store(emit.load(builder, place, emit.FLOATS), room)
            rows = [builder.add(x, builder.mul(x_stride, constant(row))) for row in range(num_rows)]
            with cgutils.for_range(builder, num_pairs) as loop:
                at = builder.add(weights, builder.mul(loop.index, constant(PAIR_BYTES)))
                columns = []
                for column in range(BLOCK_REGISTERS):
                    place = builder.add(at, constant(column * REGISTER_BYTES))
                    emit.prefetch(builder, builder.add(place, ahead))
                    columns.append(emit.load(builder, place, emit.PAIRS))
                offset = builder.mul(loop.index, constant(4))
                for row in range(num_rows):
                    pair = emit.spread_pair(builder, builder.add(rows[row], offset))
                    for column in range(BLOCK_REGISTERS):
                        room = kept[row * BLOCK_REGISTERS + column]
                        added = emit.add_products(builder, builder.load(room), columns[column], pair)
                        builder.store(added, room)
            for room, (place, _, _) in zip(kept, places, strict=True):
                emit.store(builder, place, builder.load(room))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_make_tile(rows) for rows in range(1, MOST_TILE_ROWS + 1))


@njit(cache=True)
def _multiply_tile(num_rows, x, x_stride, weights, num_pairs, sums, ahead):
    if num_rows == 1:
        _tile_1(x, x_stride, weights, num_pairs, sums, ahead)
    elif num_rows == 2:
        _tile_2(x, x_stride, weights, num_pairs, sums, ahead)
    elif num_rows == 3:
        _tile_3(x, x_stride, weights, num_pairs, sums, ahead)
    elif num_rows == 4:
        _tile_4(x, x_stride, weights, num_pairs, sums, ahead)
    elif num_rows == 5:
        _tile_5(x, x_stride, weights, num_pairs, sums, ahead)
    else:
        _tile_6(x, x_stride, weights, num_pairs, sums, ahead)


@njit(cache=True)
def multiply_part(x, x_stride, weights, num_pairs, num_rows, sums):
    """All rows with a part of a block: tiles of about equally many rows, each of which fetches some of the next part.

    What follows a part in memory is the next: of this block, or of the next block, which is as good a guess.
    """
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    part_bytes = num_pairs * PAIR_BYTES
    first = 0
    for tile in range(num_tiles):
        end = (tile + 1) * num_rows // num_tiles
        ahead = STREAM_AHEAD if num_tiles == 1 else part_bytes
        _multiply_tile(
            end - first, x + first * x_stride, x_stride, weights, num_pairs, sums + first * SUM_ROW_BYTES, ahead
        )
        first = end


@njit(cache=True)
def write_block(sums, num_rows, bias, out, out_stride):
    """Sums plus bias, rounded. bias: of the block's outputs, or 0."""
    for row in range(num_rows):
        for index in range(0, BLOCK_OUTPUTS, LANES):
            value = load_floats(sums + row * SUM_ROW_BYTES + 4 * index)
            if bias:
                value = add(value, load_widened(bias + 2 * index))
            store_rounded(out + row * out_stride + 2 * index, value)


@njit(cache=True)
def clear_sums(sums, num_rows):
    for index in range(0, num_rows * BLOCK_OUTPUTS, LANES):
        store_floats(sums + 4 * index, zeros())


@cfunc(types.void(types.int64), cache=True)
def multiply_rows(arguments):
    """Take blocks until none is left: any number of threads at once. arguments: the address of Arguments."""
    x, x_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    weights, bias, out = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    num_rows, num_pairs = load_integer(arguments + 48), load_integer(arguments + 56)
    num_blocks = load_integer(arguments + 64)
    memory = np.empty(num_rows * SUM_ROW_BYTES + REGISTER_BYTES, dtype=np.uint8)
    sums = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    block = take_next(arguments)
    while block < num_blocks:
        at = weights + block * num_pairs * PAIR_BYTES
        clear_sums(sums, num_rows)
        for first in range(0, num_pairs, PART_PAIRS):
            some = min(PART_PAIRS, num_pairs - first)
            multiply_part(x + 4 * first, x_stride, at + first * PAIR_BYTES, some, num_rows, sums)
        block_bias = bias + 2 * block * BLOCK_OUTPUTS if bias else 0
        write_block(sums, num_rows, block_bias, out + 2 * block * BLOCK_OUTPUTS, 2 * num_blocks * BLOCK_OUTPUTS)
        block = take_next(arguments)
