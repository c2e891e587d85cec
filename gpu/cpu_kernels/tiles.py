"""Rows times a part of a block by AMX: sixteen rows with sixteen outputs at a time. Thread: any, without the GIL.

A tile is up to sixteen rows of 64 bytes. How tall each of the eight is, is told to the thread before (`shape_tiles`),
and taken back afterwards (`release_tiles`). The CPU adds up a step of 32 inputs, those of even places and of odd ones
apart, then adds both to the sum: a row's sums are the same to the last bit however many rows there are.
Source: Intel's Architecture Instruction Set Extensions Programming Reference, LDTILECFG and TDPBF16PS.
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import REGISTER_BYTES
from gpu.cpu_kernels.layout import BLOCK_REGISTERS, PAIR_BYTES, STEP_PAIRS, SUM_ROW_BYTES
from gpu.cpu_kernels.vectors import store_integer

TILE_ROWS = 16
SHAPE_BYTES = 64
SHAPES_BYTES = 2 * SHAPE_BYTES  # for 32 rows, and for what is left of them
PART_PAIRS = 256  # of inputs: 64 KiB of weights; with 32 rows of x they lie in a second-level cache
GROUP_ROWS = 2 * TILE_ROWS  # that are multiplied together
ATTENTION_ROWS = 256  # of prompts: a group's scores and shares lie in a first-level cache, all rows' sums in a second
STREAM_AHEAD = 8192  # bytes: how far ahead the one step of few rows asks for weights
PALETTE = 1
WIDTHS = 64 * 0x0001_0001_0001_0001  # of four tiles, bytes
# Tiles 0 to 3 are sums; 4 and 5 rows of x, 6 and 7 weights; where there is one tile of rows, 5 is weights, too.
ROWS, MORE_ROWS = 4, 5
SQUARE_WEIGHTS = (6, 7)
WIDE_WEIGHTS = (5, 6, 7)


def _emit(builder, instruction, *arguments):
    emit.call(builder, f"llvm.x86.{instruction}", ir.VoidType(), *arguments)


def _tile(number):
    return ir.Constant(ir.IntType(8), number)


def _constant(value):
    return ir.Constant(ir.IntType(64), value)


def _address(builder, address):
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _load(builder, tile, address, stride):
    _emit(builder, "tileloadd64", _tile(tile), _address(builder, address), stride)


def _store(builder, tile, address, stride):
    _emit(builder, "tilestored64", _tile(tile), _address(builder, address), stride)


def _add_products(builder, sums, rows, weights):
    _emit(builder, "tdpbf16ps", _tile(sums), _tile(rows), _tile(weights))


@intrinsic
def _load_shape(typing_context, address):
    def generate(context, builder, signature, arguments):
        _emit(builder, "ldtilecfg", _address(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release_tiles(typing_context):
    """Leave the thread's tiles as if they had never been used."""

    def generate(context, builder, signature, arguments):
        _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@njit(cache=True)
def _write_shape(address, num_rows):
    """How tall tiles are for up to 32 rows."""
    first = min(TILE_ROWS, num_rows)
    second = num_rows - first
    heights = first * 0x0101 + (second if second else first) * 0x0101_0000  # sums
    heights += (first << 32) + ((second if second else TILE_ROWS) << 40) + (TILE_ROWS << 48) + (TILE_ROWS << 56)
    for place in range(0, SHAPE_BYTES, 8):
        store_integer(address + place, 0)
    store_integer(address, PALETTE)
    store_integer(address + 16, WIDTHS)
    store_integer(address + 24, WIDTHS)
    store_integer(address + 48, heights)


@njit(cache=True)
def shape_tiles(shapes, num_rows):
    """Get ready for multiply_part with so many rows. shapes: address of SHAPES_BYTES."""
    rest = num_rows % (GROUP_ROWS)
    _write_shape(shapes, GROUP_ROWS)
    if rest:
        _write_shape(shapes + SHAPE_BYTES, rest)
    _load_shape(shapes + SHAPE_BYTES if 0 < num_rows < GROUP_ROWS else shapes)


def _make_wide(is_fetching, is_new=False):
    """Add the products of a tile of rows with a part of a block to their sums: four tiles of sums.

    Args:
        is_new: there are no sums yet.
    """

    @intrinsic
    def wide(typing_context, x, x_stride, weights, num_steps, sums, ahead):
        """
        Args:
            x: address of bf16 [rows, 32 * num_steps], rows x_stride bytes apart.
            weights: address of bf16 [16 * num_steps, 64, 2].
            sums: address of float32 [rows, 64].
            ahead: bytes before which lines are asked for.
        """

        def generate(context, builder, signature, arguments):
            x, x_stride, weights, num_steps, sums, ahead = arguments
            columns = [_constant(column * REGISTER_BYTES) for column in range(BLOCK_REGISTERS)]
            for column, offset in enumerate(columns):
                if is_new:
                    _emit(builder, "tilezero", _tile(column))
                else:
                    _load(builder, column, builder.add(sums, offset), _constant(SUM_ROW_BYTES))
            with cgutils.for_range(builder, num_steps) as loop:
                _load(builder, ROWS, builder.add(x, builder.mul(loop.index, _constant(REGISTER_BYTES))), x_stride)
                at = builder.add(weights, builder.mul(loop.index, _constant(STEP_PAIRS * PAIR_BYTES)))
                for column, offset in enumerate(columns):
                    tile = WIDE_WEIGHTS[column % len(WIDE_WEIGHTS)]
                    _load(builder, tile, builder.add(at, offset), _constant(PAIR_BYTES))
                    if is_fetching:
                        first = builder.add(builder.add(at, ahead), _constant(column * STEP_PAIRS * REGISTER_BYTES))
                        for line in range(STEP_PAIRS):
                            emit.prefetch(builder, builder.add(first, _constant(line * REGISTER_BYTES)))
                    _add_products(builder, column, ROWS, tile)
            for column, offset in enumerate(columns):
                _store(builder, column, builder.add(sums, offset), _constant(SUM_ROW_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return wide


def _make_square(is_fetching, is_new=False):
    """Add the products of two tiles of rows with half of a part of a block to their sums: two by two tiles of sums.

    Args:
        is_new: there are no sums yet.
    """

    @intrinsic
    def square(typing_context, x, x_stride, weights, num_steps, sums, ahead):
        """
        Args:
            x, ahead: see wide.
            weights: address of bf16 [16 * num_steps, 64, 2], at the first of 32 outputs.
            sums: address of float32 [rows, 64], at the first of 32 outputs.
        """

        def generate(context, builder, signature, arguments):
            x, x_stride, weights, num_steps, sums, ahead = arguments
            places = [
                builder.add(sums, _constant(row * TILE_ROWS * SUM_ROW_BYTES + column * REGISTER_BYTES))
                for row in range(2)
                for column in range(2)
            ]
            for tile, place in enumerate(places):
                if is_new:
                    _emit(builder, "tilezero", _tile(tile))
                else:
                    _load(builder, tile, place, _constant(SUM_ROW_BYTES))
            more = builder.add(x, builder.mul(x_stride, _constant(TILE_ROWS)))
            with cgutils.for_range(builder, num_steps) as loop:
                offset = builder.mul(loop.index, _constant(REGISTER_BYTES))
                at = builder.add(weights, builder.mul(loop.index, _constant(STEP_PAIRS * PAIR_BYTES)))
                _load(builder, ROWS, builder.add(x, offset), x_stride)
                for column, tile in enumerate(SQUARE_WEIGHTS):
                    _load(builder, tile, builder.add(at, _constant(column * REGISTER_BYTES)), _constant(PAIR_BYTES))
                    if is_fetching:
                        first = builder.add(builder.add(at, ahead), _constant(column * REGISTER_BYTES))
                        for pair in range(STEP_PAIRS):
                            emit.prefetch(builder, builder.add(first, _constant(pair * PAIR_BYTES)))
                    _add_products(builder, column, ROWS, tile)
                _load(builder, MORE_ROWS, builder.add(more, offset), x_stride)
                for column, tile in enumerate(SQUARE_WEIGHTS):
                    _add_products(builder, 2 + column, MORE_ROWS, tile)
            for tile, place in enumerate(places):
                _store(builder, tile, place, _constant(SUM_ROW_BYTES))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return square


_wide, _wide_fetching, _wide_new = _make_wide(False), _make_wide(True), _make_wide(False, is_new=True)
_square, _square_fetching, _square_new = _make_square(False), _make_square(True), _make_square(False, is_new=True)


@njit(cache=True)
def _multiply_rows(x, x_stride, weights, num_steps, num_rows, sums, ahead):
    """Up to 32 rows, as the tiles are shaped. ahead: see wide; 0: nothing is asked for."""
    if num_rows <= TILE_ROWS:
        if ahead:
            _wide_fetching(x, x_stride, weights, num_steps, sums, ahead)
        else:
            _wide(x, x_stride, weights, num_steps, sums, 0)
        return
    for half in range(0, PAIR_BYTES, 2 * REGISTER_BYTES):
        if ahead:
            _square_fetching(x, x_stride, weights + half, num_steps, sums + half, ahead)
        else:
            _square(x, x_stride, weights + half, num_steps, sums + half, 0)


@njit(cache=True)
def choose_shape(shapes, num_rows):
    """Get ready for multiply_group with so many rows, after shape_tiles: GROUP_ROWS, or what is left of them."""
    _load_shape(shapes if num_rows == GROUP_ROWS else shapes + SHAPE_BYTES)


@njit(cache=True)
def multiply_group(x, x_stride, weights, num_pairs, num_rows, sums, is_new):
    """Up to GROUP_ROWS with a part of a block that lies in a cache; is_new: there are no sums yet."""
    num_steps = num_pairs // STEP_PAIRS
    if not is_new:
        _multiply_rows(x, x_stride, weights, num_steps, num_rows, sums, 0)
    elif num_rows <= TILE_ROWS:
        _wide_new(x, x_stride, weights, num_steps, sums, 0)
    else:
        for half in range(0, PAIR_BYTES, 2 * REGISTER_BYTES):
            _square_new(x, x_stride, weights + half, num_steps, sums + half, 0)


@njit(cache=True)
def part_pairs(num_rows):
    """Of the parts that so many rows are multiplied with."""
    return PART_PAIRS


@njit(cache=True)
def multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, shapes, following):
    """All rows with a part of a block, after shape_tiles.

    The first rows ask for what comes next: few rows a little ahead, many the next part.

    Args:
        num_pairs: a multiple of STEP_PAIRS.
        shapes: as shape_tiles wrote them, for as many rows.
        following: address of the part that comes next from memory, supposed to be as long; 0: nothing is asked for.
    """
    num_steps = num_pairs // STEP_PAIRS
    end = num_rows // (GROUP_ROWS) * (GROUP_ROWS)
    has_both = 0 < end < num_rows
    ahead = 0
    if following:
        ahead = STREAM_AHEAD if num_rows <= TILE_ROWS else following - weights
    if has_both:
        _load_shape(shapes)
    for first in range(0, end, GROUP_ROWS):
        _multiply_rows(
            x + first * x_stride, x_stride, weights, num_steps, GROUP_ROWS, sums + first * SUM_ROW_BYTES, ahead
        )
        ahead = 0
    if has_both:
        _load_shape(shapes + SHAPE_BYTES)
    if end < num_rows:
        _multiply_rows(
            x + end * x_stride, x_stride, weights, num_steps, num_rows - end, sums + end * SUM_ROW_BYTES, ahead
        )
