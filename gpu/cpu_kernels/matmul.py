"""Matmuls with a prepacked bf16 matrix on a CPU, by AVX2. Kernels: any thread, without the GIL; classes: engine.

A matrix lies in blocks of 64 outputs, pairs of inputs side by side; a pair's 64 outputs are 256 bytes. It is packed
once its layer has been read, onto large pages; oneDNN packs alike, onto small ones. Where 64 does not divide outputs
and inputs, oneDNN serves if it has bf16; else they are padded.

A piece of work is some blocks: each is read from memory once, a part of its inputs at a time, and multiplied with all
rows while that part lies in a core's cache; the next part is prefetched meanwhile. Up to six rows' sums lie in
registers. Sums are float32, a row's 64 side by side, and rounded once.

A 0.6B model's decode step, two Zen 5 cores, with this kernel and with oneDNN: 1 row 20.6 and 23.8 ms, 4 rows 25.5 and
33.8, 16 rows 42 and 49.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from gpu.cpu_kernels.compiled import carray, cgutils, kernel, njit, types
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    FLOAT,
    FLOATS,
    HAS_AVX512,
    LANES,
    NEAR_PAIRS,
    PAIRS,
    REGISTER_BYTES,
    broadcast,
    constant,
    emit_by_count,
    emit_products,
    keep,
    load,
    load_floats,
    load_widened,
    multiply_add,
    nothing,
    offset,
    operation,
    pointer,
    prefetch,
    store,
    store_floats,
    store_rounded,
    take_next,
    zeros,
)
from gpu.linear import BLOCK_OUTPUTS

BLOCK_REGISTERS = BLOCK_OUTPUTS // LANES
PAIR_BYTES = BLOCK_REGISTERS * REGISTER_BYTES  # of a pair of inputs, all outputs of a block
SUM_ROW_BYTES = 4 * BLOCK_OUTPUTS
MOST_TILE_ROWS = 6 if HAS_AVX512 else 5  # with 4 registers of sums each, and 4 of weights: of 32 registers
PART_PAIRS = 512  # of inputs: 128 KiB of weights, an eighth of a second-level cache
# Of a few tiles of rows: weights stay in half of a first-level cache from tile to tile, so that prefetches have that
# cache's miss buffers to themselves.
NEAR_ROWS = 48
STREAM_AHEAD = 4096  # bytes: how far ahead a single tile of rows prefetches weights
PAIR_LINES = PAIR_BYTES // REGISTER_BYTES
SHARED_LINES = 2  # prefetched per pair where at least two tiles share the prefetching
PANEL_ROWS = 256  # at a time
# So much of a panel's x stays in a second-level cache from block to block. Of a larger one a part does, and is read for
# all blocks of a piece.
CACHED_BYTES = 768 * 1024
MOST_PIECE_BLOCKS = 8
FLOAT_TILE_ROWS = 8


def make_tile(most_lines, num_registers=BLOCK_REGISTERS):
    """Add the products of up to MOST_TILE_ROWS with a part of a block to their sums.

    Args:
        most_lines: prefetched while a pair of inputs is multiplied.
        num_registers: of a block's outputs, 16 in each.
    """

    @operation(nothing, *[types.int64] * 8)
    def tile(builder, num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters):
        """
        Args:
            x: address of bf16 [num_rows, 2 * num_pairs], rows x_stride bytes apart.
            weights: address of bf16 [num_pairs, 64, 2].
            sums: address of float32 [num_rows, 64].
            wanted: address of the lines to prefetch; num_quarters: how many per four pairs.
        """
        arguments = (x, x_stride, weights, num_pairs, sums, wanted, num_quarters)
        emit_by_count(
            builder,
            num_rows,
            MOST_TILE_ROWS,
            lambda rows: _emit_tile(builder, rows, arguments, most_lines, num_registers),
        )

    return tile


def _emit_tile(builder, num_rows, arguments, most_lines, num_registers):
    x, x_stride, weights, num_pairs, sums, wanted, num_quarters = arguments
    pair_bytes = num_registers * REGISTER_BYTES  # a row's sums take as many

    def columns_of(index, columns):
        line = builder.lshr(builder.mul(index, num_quarters), constant(2))
        lines = builder.add(wanted, builder.mul(line, constant(REGISTER_BYTES)))
        first, end = (most_lines * column // num_registers for column in (columns.start, columns.stop))
        for number in range(first, end):
            prefetch.emit(builder, offset(builder, lines, number * REGISTER_BYTES))
        at = builder.add(weights, builder.mul(index, constant(pair_bytes)))
        return [load(builder, offset(builder, at, n * REGISTER_BYTES), PAIRS) for n in columns]

    rows = [builder.add(x, builder.mul(x_stride, constant(row))) for row in range(num_rows)]
    places = [
        [offset(builder, sums, row * pair_bytes + column * REGISTER_BYTES) for column in range(num_registers)]
        for row in range(num_rows)
    ]
    emit_products(builder, num_pairs, rows, places, columns_of)


_shared_tile, _lone_tile = make_tile(SHARED_LINES), make_tile(PAIR_LINES)


@njit(cache=True)
def _multiply_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters):
    _shared_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters)


@njit(cache=True)
def _stream_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted):
    """Prefetches as much as it reads."""
    _lone_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, 4 * PAIR_LINES)


@njit(cache=True)
def _stream_part(x, x_stride, weights, num_pairs, num_rows, sums, following):
    """Few rows: prefetches lines a little ahead of their use, at the end those of what follows."""
    num_last = min(num_pairs, STREAM_AHEAD // PAIR_BYTES)
    num_first = num_pairs - num_last
    _stream_tile(num_rows, x, x_stride, weights, num_first, sums, weights + STREAM_AHEAD)
    _stream_tile(num_rows, x + 4 * num_first, x_stride, weights + num_first * PAIR_BYTES, num_last, sums, following)


@njit(cache=True)
def multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, following):
    """Multiply all rows with a part of a block, in tiles of about equally many rows.

    Each tile prefetches a share of the next part, so that memory is read all the time and not only in the first tile. A
    row's sums are the same to the last bit however many rows there are, and however long the parts.

    Args:
        following: address of the part that is read next, assumed to be as long; 0: nothing is prefetched.
    """
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    if following and num_tiles == 1:
        _stream_part(x, x_stride, weights, num_pairs, num_rows, sums, following)
        return
    first, num_quarters = 0, 0
    wanted = following if following else x  # in a cache: prefetching it costs nothing
    for tile in range(num_tiles):
        end = (tile + 1) * num_rows // num_tiles
        if following:
            num_quarters = (tile + 1) * 4 * PAIR_LINES // num_tiles - tile * 4 * PAIR_LINES // num_tiles
        into, of_rows = sums + first * SUM_ROW_BYTES, x + first * x_stride
        _multiply_tile(end - first, of_rows, x_stride, weights, num_pairs, into, wanted, num_quarters)
        wanted += num_quarters * num_pairs // 4 * REGISTER_BYTES
        first = end


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
                value = value + load_widened(bias + 2 * index)
            store_rounded(out + row * out_stride + 2 * index, value)


class Arguments(ctypes.Structure):
    """Of multiply_rows. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # bf16 [rows, 2 * num_pairs]
        "x_stride",  # bytes from row to row
        "weights",  # bf16 [blocks, num_pairs, 64, 2]
        "bias",  # bf16 [blocks * 64]; 0: none
        "out",  # bf16 [rows, blocks * 64]
        "num_rows",
        "num_pairs",
        "num_blocks",
        "piece_blocks",  # blocks that are computed together: a part of x is read once for all
        "num_threads",  # that take pieces, mostly in turn
    )


_ARGUMENTS = np.dtype(Arguments)


@njit(cache=True)
def _multiply_blocks(x, x_stride, weights, num_blocks, num_pairs, num_rows, sums, next_piece):
    """Sums of some blocks.

    Args:
        sums: float32 [blocks, rows, 64], zeros.
        next_piece: address of the weights that this thread will probably read next.
    """
    most = NEAR_PAIRS if MOST_TILE_ROWS < num_rows <= NEAR_ROWS else PART_PAIRS
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
            multiply_part(
                x + 4 * first, x_stride, at, some, num_rows, sums + block * num_rows * SUM_ROW_BYTES, following
            )


def make_float_tile(num_registers, adds):
    """An operation: a small matmul in float32, whose sums lie in registers.

    Args:
        adds: to what the target has, scaled; False: the target is overwritten.
    """

    @operation(nothing, *[types.int64] * 7, types.float32)
    def tile(builder, rows, row_bytes, num_inner, columns, column_bytes, target, target_bytes, scale):
        """Eight rows [8, num_inner] times columns [num_inner, 16 * num_registers], float32.

        Args:
            row_bytes, column_bytes, target_bytes: from one row of each to the next.
        """
        places = []
        for row in range(FLOAT_TILE_ROWS):
            at = builder.add(target, builder.mul(target_bytes, constant(row)))
            places.append([offset(builder, at, REGISTER_BYTES * n) for n in range(num_registers)])
        sums = [[cgutils.alloca_once(builder, FLOATS) for _ in of_row] for of_row in places]
        scales = broadcast(builder, scale, FLOATS)
        for of_row, at_row in zip(sums, places, strict=True):
            for register, place in zip(of_row, at_row, strict=True):
                first = builder.fmul(load(builder, place, FLOATS), scales) if adds else zeros.emit(builder)
                builder.store(first, register)
        with cgutils.for_range(builder, num_inner) as loop:
            at = builder.add(columns, builder.mul(loop.index, column_bytes))
            column = [load(builder, offset(builder, at, REGISTER_BYTES * n), FLOATS) for n in range(num_registers)]
            place = builder.add(rows, builder.mul(loop.index, constant(4)))
            for row, of_row in enumerate(sums):
                number = load(builder, builder.add(place, builder.mul(row_bytes, constant(row))), FLOAT)
                number = broadcast(builder, number, FLOATS)
                for register, value in zip(of_row, column, strict=True):
                    builder.store(multiply_add.emit(builder, number, value, builder.load(register)), register)
        for of_row, at_row in zip(sums, places, strict=True):
            for register, place in zip(of_row, at_row, strict=True):
                store(builder, place, builder.load(register))

    return tile


@kernel()
def multiply_rows(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    num_rows, num_pairs, num_blocks, piece_blocks = args.num_rows, args.num_pairs, args.num_blocks, args.piece_blocks
    sum_bytes, block_bytes, out_stride = (
        num_rows * SUM_ROW_BYTES,
        num_pairs * PAIR_BYTES,
        2 * num_blocks * BLOCK_OUTPUTS,
    )
    memory = np.empty(piece_blocks * sum_bytes + REGISTER_BYTES, dtype=np.uint8)
    sums = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    first = take_next(arguments) * piece_blocks
    while first < num_blocks:
        some = min(piece_blocks, num_blocks - first)
        clear_sums(sums, some * num_rows)
        at = args.weights + first * block_bytes
        next_piece = at + args.num_threads * piece_blocks * block_bytes
        _multiply_blocks(args.x, args.x_stride, at, some, num_pairs, num_rows, sums, next_piece)
        for block in range(some):
            offset = 2 * (first + block) * BLOCK_OUTPUTS
            bias = args.bias + offset if args.bias else 0
            write_block(sums + block * sum_bytes, num_rows, bias, args.out + offset, out_stride)
        first = take_next(arguments) * piece_blocks
    keep(memory)


class PackedMatmul:
    """A matmul with one matrix, some rows of x at a time. Not for two threads at once: the arguments are its own.

    Args:
        blocks: bf16 [out / 64, in / 2, 64, 2].
        bias: [out], or None.
    """

    def __init__(self, kernel: Kernel, blocks: Tensor, bias: Tensor | None) -> None:
        self._kernel, self._memory = kernel, (blocks, bias)
        self._num_blocks, num_pairs = blocks.shape[:2]
        self._num_out, self._num_in = self._num_blocks * BLOCK_OUTPUTS, 2 * num_pairs
        self._arguments = Arguments(
            weights=blocks.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_pairs=num_pairs,
            num_blocks=self._num_blocks,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        out = x.new_empty((x.shape[0], self._num_out))
        x_stride, out_stride = x.stride(0) * x.element_size(), self._num_out * x.element_size()
        panel, num_threads = self._arguments, torch.get_num_threads()
        panel.x_stride, panel.num_threads = x_stride, num_threads
        for first in range(0, x.shape[0], PANEL_ROWS):
            panel.next_piece, panel.num_rows = 0, min(PANEL_ROWS, x.shape[0] - first)
            panel.piece_blocks = self._piece_blocks(panel.num_rows, num_threads)
            panel.x, panel.out = x.data_ptr() + first * x_stride, out.data_ptr() + first * out_stride
            self._kernel(panel, num_threads)
        return out

    def _piece_blocks(self, num_rows: int, num_threads: int) -> int:
        """Blocks of outputs that a thread takes at a time: equally many for each."""
        if 2 * num_rows * self._num_in <= CACHED_BYTES:
            return 1
        rounds = -(-self._num_blocks // (num_threads * MOST_PIECE_BLOCKS))
        return -(-self._num_blocks // (num_threads * rounds))
