"""Products with int4 and int8 weights, of any number of rows: the kernel. Thread: any, without the GIL.

Integers become bf16 in registers, exactly, and are multiplied so; scales and zeros come in once a group of inputs, on
float32 sums: sum(x * ((v - 8) * scale + zero)) = scale * sum(x * (v - 8)) + zero * sum(x). A piece of work is some
blocks of 64 outputs, read from memory once: tiles of rows find a block in the second-level cache.
"""

import ctypes

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.blocks import (
    ARE_TILES,
    PART_PAIRS,
    SHAPES_BYTES,
    clear_sums,
    multiply_part,
    release_tiles,
    shape_tiles,
    write_block,
)
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.lanes import MOST_TILE_ROWS, STREAM_AHEAD
from gpu.cpu_kernels.layout import BLOCK_OUTPUTS, BLOCK_REGISTERS, PAIR_BYTES, SUM_ROW_BYTES
from gpu.cpu_kernels.vectors import (
    keep,
    load_floats,
    load_integer,
    load_widened,
    multiply,
    multiply_add,
    prefetch,
    spread,
    store_floats,
    take_next,
)
from gpu.quantize import MIDDLE_INT4

INT4_AHEAD = 4096  # bytes: how far ahead values are asked for
GROUP_BYTES = 2 * 2 * BLOCK_OUTPUTS  # of a group's scales and zeros, bf16, of a block
INT4_PAIR_BYTES, INT8_PAIR_BYTES = REGISTER_BYTES, 2 * REGISTER_BYTES  # of a pair of inputs, a block's outputs


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("x", ctypes.c_int64),  # bf16 [rows, 2 * num_pairs]
        ("x_stride", ctypes.c_int64),  # bytes from row to row
        ("values", ctypes.c_int64),  # [blocks, num_pairs, 64 (int4) or 128 (int8) bytes]
        ("scales", ctypes.c_int64),  # bf16 [blocks, groups, scale and zero, 64]
        ("bias", ctypes.c_int64),  # bf16 [blocks * 64]; 0: none
        ("out", ctypes.c_int64),  # bf16 [rows, blocks * 64]
        ("num_rows", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("is_int4", ctypes.c_int64),  # or int8
        ("piece_blocks", ctypes.c_int64),  # that a thread reads one after the other
    )


def _int4_columns(builder, at):
    """A pair of inputs' 64 outputs: of 32 bytes the low halves are 16 outputs, the high ones the next 16."""
    halves = ir.VectorType(ir.IntType(16), 2 * LANES)
    # An index counts modulo 32: with the table twice, what stands above the low half does no harm.
    table = [int.from_bytes(np.float32(n % 16 - MIDDLE_INT4).tobytes()[2:], "little") for n in range(2 * LANES)]
    table, four = ir.Constant(halves, table), ir.Constant(halves, [4] * 2 * LANES)
    columns = []
    for part in range(2):
        place = builder.add(at, ir.Constant(at.type, part * REGISTER_BYTES // 2))
        bytes_ = builder.zext(emit.load(builder, place, ir.VectorType(ir.IntType(8), 2 * LANES)), halves)
        for index in (bytes_, builder.lshr(bytes_, four)):
            column = emit.call(builder, "llvm.x86.avx512.permvar.hi.512", halves, table, index)
            columns.append(builder.bitcast(column, emit.PAIRS))
    return columns


def _int8_columns(builder, at):
    """A pair of inputs' 64 outputs, in order."""
    columns = []
    for part in range(BLOCK_REGISTERS):
        place = builder.add(at, ir.Constant(at.type, part * REGISTER_BYTES // 2))
        values = emit.load(builder, place, ir.VectorType(ir.IntType(8), 2 * LANES))
        numbers = builder.sitofp(values, ir.VectorType(ir.FloatType(), 2 * LANES))
        columns.append(builder.bitcast(builder.fptrunc(numbers, emit.BFLOATS), emit.PAIRS))
    return columns


def _make_tile(pair_bytes, columns_of):
    """Add the products of up to MOST_TILE_ROWS with a block to their sums."""

    @intrinsic
    def tile(typing_context, num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
        """
        Args:
            x: address of bf16 [num_rows, inputs], rows x_stride bytes apart.
            values, scales: the block's.
            group_pairs, num_groups: of inputs.
            x_sums: address of float32 [num_rows, num_groups].
            sums: address of float32 [num_rows, 64].
        """

        def generate(context, builder, signature, arguments):
            emit.emit_by_count(
                builder,
                arguments[0],
                MOST_TILE_ROWS,
                lambda rows: _emit_tile(builder, rows, arguments[1:], pair_bytes, columns_of),
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return tile


def _emit_tile(builder, num_rows, arguments, pair_bytes, columns_of):
    x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums = arguments

    def constant(value):
        return ir.Constant(ir.IntType(64), value)

    cells = [(row, column) for row in range(num_rows) for column in range(BLOCK_REGISTERS)]
    kept = {cell: cgutils.alloca_once(builder, emit.FLOATS) for cell in cells}
    nothing = ir.Constant(emit.FLOATS, [0.0] * LANES)
    rows = [builder.add(x, builder.mul(x_stride, constant(row))) for row in range(num_rows)]
    with cgutils.for_range(builder, num_groups) as groups:
        first = builder.mul(groups.index, group_pairs)
        for room in kept.values():
            builder.store(nothing, room)
        with cgutils.for_range(builder, group_pairs) as loop:
            pair = builder.add(first, loop.index)
            at = builder.add(values, builder.mul(pair, constant(pair_bytes)))
            for line in range(0, pair_bytes, REGISTER_BYTES):
                emit.prefetch(builder, builder.add(at, constant(STREAM_AHEAD + line)))
            columns = columns_of(builder, at)
            offset = builder.mul(pair, constant(4))
            for row in range(num_rows):
                spread = emit.spread_pair(builder, builder.add(rows[row], offset))
                for column in range(BLOCK_REGISTERS):
                    room = kept[row, column]
                    builder.store(emit.add_products(builder, builder.load(room), columns[column], spread), room)
        at = builder.add(scales, builder.mul(groups.index, constant(GROUP_BYTES)))
        for column in range(BLOCK_REGISTERS):
            place = builder.add(at, constant(column * REGISTER_BYTES // 2))
            scale = emit.load_widened(builder, place)
            zero = emit.load_widened(builder, builder.add(place, constant(GROUP_BYTES // 2)))
            for row in range(num_rows):
                of_row = builder.add(builder.mul(num_groups, constant(row)), groups.index)
                place = builder.add(x_sums, builder.mul(of_row, constant(4)))
                x_sum = emit.spread(builder, emit.load(builder, place, ir.FloatType()), emit.FLOATS)
                place = builder.add(sums, constant(row * SUM_ROW_BYTES + column * REGISTER_BYTES))
                total = emit.load(builder, place, emit.FLOATS)
                total = emit.multiply_add(builder, builder.load(kept[row, column]), scale, total)
                emit.store(builder, place, emit.multiply_add(builder, x_sum, zero, total))


_int4_columns_tile, _int8_columns_tile = (
    _make_tile(INT4_PAIR_BYTES, _int4_columns),
    _make_tile(INT8_PAIR_BYTES, _int8_columns),
)


@njit(cache=True)
def _int4_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
    _int4_columns_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums)


@njit(cache=True)
def _int8_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums):
    _int8_columns_tile(num_rows, x, x_stride, values, scales, group_pairs, num_groups, x_sums, sums)


@intrinsic
def _sum_of(typing_context, x, num_numbers):
    """float32: of bf16 [num_numbers], a multiple of LANES."""

    def generate(context, builder, signature, arguments):
        x, num_numbers = arguments
        kept = cgutils.alloca_once(builder, emit.FLOATS)
        builder.store(ir.Constant(emit.FLOATS, [0.0] * LANES), kept)
        steps = builder.udiv(num_numbers, ir.Constant(num_numbers.type, LANES))
        with cgutils.for_range(builder, steps) as loop:
            at = builder.add(x, builder.mul(loop.index, ir.Constant(x.type, 2 * LANES)))
            builder.store(builder.fadd(builder.load(kept), emit.load_widened(builder, at)), kept)
        return emit.total(builder, builder.load(kept))

    return types.float32(types.int64, types.int64), generate


@njit(cache=True)
def _sum_groups(x, x_stride, num_rows, num_groups, group_size, x_sums):
    for row in range(num_rows):
        for group in range(num_groups):
            x_sums[row, group] = _sum_of(x + row * x_stride + 2 * group * group_size, group_size)


@intrinsic
def _widen_int8(typing_context, source, target):
    """int8 [128] to bf16 [128]."""

    def generate(context, builder, signature, arguments):
        source, target = arguments
        for part, column in enumerate(_int8_columns(builder, source)):
            emit.store(builder, builder.add(target, ir.Constant(target.type, part * REGISTER_BYTES)), column)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _widen_int4(typing_context, source, target):
    """A pair of inputs' 64 outputs to bf16 [64, 2], less MIDDLE_INT4."""

    def generate(context, builder, signature, arguments):
        source, target = arguments
        for part, column in enumerate(_int4_columns(builder, source)):
            emit.store(builder, builder.add(target, ir.Constant(target.type, part * REGISTER_BYTES)), column)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(cache=True)
def _add_scaled(group_sums, num_rows, scales, x_sums, group, sums):
    """A group's sums, times its scales, and its zeros times the sums of x. scales: of the group: see Arguments."""
    for index in range(0, BLOCK_OUTPUTS, LANES):
        scale = load_widened(scales + 2 * index)
        zero = load_widened(scales + GROUP_BYTES // 2 + 2 * index)
        for row in range(num_rows):
            offset = row * SUM_ROW_BYTES + 4 * index
            value = multiply_add(load_floats(group_sums + offset), scale, load_floats(sums + offset))
            store_floats(sums + offset, multiply_add(spread(x_sums[row, group]), zero, value))


@njit(cache=True)
def _multiply_groups(x, x_stride, values, scales, group_pairs, num_groups, x_sums, num_rows, sums, room, shapes):
    """A block of int4: a group of inputs becomes bf16 once, for all rows.

    Args:
        room: addresses of bf16 [group_pairs, 64, 2], and of float32 [rows, 64].
    """
    widened, group_sums = room
    for group in range(num_groups):
        at = values + group * group_pairs * INT4_PAIR_BYTES
        for pair in range(group_pairs):
            prefetch(at + pair * INT4_PAIR_BYTES + INT4_AHEAD)
            _widen_int4(at + pair * INT4_PAIR_BYTES, widened + pair * PAIR_BYTES)
        clear_sums(group_sums, num_rows)
        some_x = x + 4 * group * group_pairs
        multiply_part(some_x, x_stride, widened, group_pairs, num_rows, group_sums, shapes, 0)
        _add_scaled(group_sums, num_rows, scales + group * GROUP_BYTES, x_sums, group, sums)


@njit(cache=True)
def _multiply_widened(x, x_stride, values, scales, num_pairs, num_rows, sums, widened, shapes):
    """A block of int8: a part of it becomes bf16 once, for all rows."""
    for first in range(0, num_pairs, PART_PAIRS):
        some = min(PART_PAIRS, num_pairs - first)
        for pair in range(some):
            _widen_int8(values + (first + pair) * INT8_PAIR_BYTES, widened + pair * PAIR_BYTES)
        multiply_part(x + 4 * first, x_stride, widened, some, num_rows, sums, shapes, 0)
    for index in range(0, BLOCK_OUTPUTS, LANES):
        scale = load_widened(scales + 2 * index)
        for row in range(num_rows):
            at = sums + row * SUM_ROW_BYTES + 4 * index
            store_floats(at, multiply(load_floats(at), scale))


@cfunc(types.void(types.int64), cache=True)
def multiply_quantized(arguments):
    """Take blocks until none is left: any number of threads at once. arguments: the address of Arguments."""
    x, x_stride, values = load_integer(arguments + 8), load_integer(arguments + 16), load_integer(arguments + 24)
    scales, bias, out = load_integer(arguments + 32), load_integer(arguments + 40), load_integer(arguments + 48)
    num_rows, num_pairs = load_integer(arguments + 56), load_integer(arguments + 64)
    num_blocks, num_groups = load_integer(arguments + 72), load_integer(arguments + 80)
    is_int4, piece_blocks = load_integer(arguments + 88), load_integer(arguments + 96)
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    group_pairs = num_pairs // num_groups
    is_widened = ARE_TILES or (not is_int4 and num_tiles > 1)  # by lanes few rows' sums are the same without
    widened_bytes = (group_pairs if is_int4 else PART_PAIRS) * PAIR_BYTES if is_widened else 0
    group_sums_bytes = num_rows * SUM_ROW_BYTES if is_widened and is_int4 else 0
    size = num_rows * SUM_ROW_BYTES + widened_bytes + group_sums_bytes + SHAPES_BYTES
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    widened = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    sums = widened + widened_bytes
    group_sums = sums + num_rows * SUM_ROW_BYTES
    shapes = group_sums + group_sums_bytes
    shape_tiles(shapes, num_rows)
    x_sums = np.zeros((num_rows, num_groups), dtype=np.float32)
    if is_int4:
        _sum_groups(x, x_stride, num_rows, num_groups, 2 * group_pairs, x_sums)
    block_bytes = num_pairs * (INT4_PAIR_BYTES if is_int4 else INT8_PAIR_BYTES)
    block = take_next(arguments) * piece_blocks
    while block < num_blocks:
        clear_sums(sums, num_rows)
        if is_widened:
            at, of = values + block * block_bytes, scales + block * num_groups * GROUP_BYTES
            if is_int4:
                room = (widened, group_sums)
                _multiply_groups(x, x_stride, at, of, group_pairs, num_groups, x_sums, num_rows, sums, room, shapes)
            else:
                _multiply_widened(x, x_stride, at, of, num_pairs, num_rows, sums, widened, shapes)
        first = 0
        for tile in range(0 if is_widened else num_tiles):
            end = (tile + 1) * num_rows // num_tiles
            some, tile_x, at = end - first, x + first * x_stride, values + block * block_bytes
            of = scales + block * num_groups * GROUP_BYTES
            tile_x_sums, tile_sums = x_sums.ctypes.data + 4 * first * num_groups, sums + first * SUM_ROW_BYTES
            if is_int4:
                _int4_tile(some, tile_x, x_stride, at, of, group_pairs, num_groups, tile_x_sums, tile_sums)
            else:
                _int8_tile(some, tile_x, x_stride, at, of, group_pairs, num_groups, tile_x_sums, tile_sums)
            first = end
        block_bias = bias + 2 * block * BLOCK_OUTPUTS if bias else 0
        write_block(sums, num_rows, block_bias, out + 2 * block * BLOCK_OUTPUTS, 2 * num_blocks * BLOCK_OUTPUTS)
        block += 1
        if block % piece_blocks == 0:
            block = take_next(arguments) * piece_blocks
    release_tiles()
    keep(memory)
    keep(x_sums)
