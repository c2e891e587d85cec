"""Rows times a part of a block by avx512_bf16: up to six rows' sums lie in registers. Thread: any, without the GIL.

Where the CPU has no tiles (tiles.py).
"""

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import REGISTER_BYTES
from gpu.cpu_kernels.layout import BLOCK_REGISTERS, PAIR_BYTES, SUM_ROW_BYTES
from gpu.cpu_kernels.vectors import store_floats, zeros

MOST_TILE_ROWS = 6  # with 4 registers of sums each, and 4 of weights: of 32 registers
PART_PAIRS = 512  # of inputs: 128 KiB of weights, an eighth of a second-level cache
# Of a few tiles of rows: weights stay in half of a first-level cache from tile to tile, so that what is asked for
# meanwhile has the buffers of that cache's misses for itself.
NEAR_PAIRS, NEAR_ROWS = 64, 48
SHAPES_BYTES = 0
GROUP_ROWS = ATTENTION_ROWS = 96  # what is kept of them lies in a second-level cache
STREAM_AHEAD = 4096  # bytes: how far ahead the one tile of few rows asks for weights
PAIR_LINES = PAIR_BYTES // REGISTER_BYTES
SHARED_LINES = 2  # that each pair asks for where several tiles share that: of at least two tiles, enough


def _make_tile(most_lines):
    """Add the products of up to MOST_TILE_ROWS with a part of a block to their sums.

    Args:
        most_lines: that are asked for while a pair of inputs is multiplied.
    """

    @intrinsic
    def tile(typing_context, num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters):
        """
        Args:
            x: address of bf16 [num_rows, 2 * num_pairs], rows x_stride bytes apart.
            weights: address of bf16 [num_pairs, 64, 2].
            sums: address of float32 [num_rows, 64].
            wanted: address of lines that are asked for meanwhile; num_quarters: so many by four pairs.
        """

        def generate(context, builder, signature, arguments):
            emit.emit_by_count(
                builder, arguments[0], MOST_TILE_ROWS, lambda rows: _emit_tile(builder, rows, arguments[1:], most_lines)
            )
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return tile


def _emit_tile(builder, num_rows, arguments, most_lines):
    x, x_stride, weights, num_pairs, sums, wanted, num_quarters = arguments

    def constant(value):
        return ir.Constant(ir.IntType(64), value)

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
        line = builder.lshr(builder.mul(loop.index, num_quarters), constant(2))
        asked = builder.add(wanted, builder.mul(line, constant(REGISTER_BYTES)))
        for index in range(most_lines):
            emit.prefetch(builder, builder.add(asked, constant(index * REGISTER_BYTES)))
        columns = [
            emit.load(builder, builder.add(at, constant(column * REGISTER_BYTES)), emit.PAIRS)
            for column in range(BLOCK_REGISTERS)
        ]
        offset = builder.mul(loop.index, constant(4))
        for row in range(num_rows):
            pair = emit.spread_pair(builder, builder.add(rows[row], offset))
            for column in range(BLOCK_REGISTERS):
                room = kept[row * BLOCK_REGISTERS + column]
                added = emit.add_products(builder, builder.load(room), columns[column], pair)
                builder.store(added, room)
    for room, (place, _, _) in zip(kept, places, strict=True):
        emit.store(builder, place, builder.load(room))


_shared_tile, _lone_tile = _make_tile(SHARED_LINES), _make_tile(PAIR_LINES)


@njit(cache=True)
def part_pairs(num_rows):
    """Of the parts that so many rows are multiplied with: sums are the same to the last bit whatever they are."""
    return NEAR_PAIRS if MOST_TILE_ROWS < num_rows <= NEAR_ROWS else PART_PAIRS


@njit(cache=True)
def _multiply_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters):
    _shared_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, num_quarters)


@njit(cache=True)
def _stream_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted):
    """Asks for as much as it reads."""
    _lone_tile(num_rows, x, x_stride, weights, num_pairs, sums, wanted, 4 * PAIR_LINES)


@njit(cache=True)
def _stream_part(x, x_stride, weights, num_pairs, num_rows, sums, following):
    """Few rows: lines are asked for a little ahead of their use, at the end those of what follows."""
    num_last = min(num_pairs, STREAM_AHEAD // PAIR_BYTES)
    num_first = num_pairs - num_last
    _stream_tile(num_rows, x, x_stride, weights, num_first, sums, weights + STREAM_AHEAD)
    _stream_tile(num_rows, x + 4 * num_first, x_stride, weights + num_first * PAIR_BYTES, num_last, sums, following)


@njit(cache=True)
def multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, shapes, following):
    """All rows with a part of a block: tiles of about equally many rows, each of which asks for a share of the next.

    So memory is read all the while, and not in the first tile's time alone.

    Args:
        num_pairs: a multiple of STEP_PAIRS.
        shapes: of no use here; see tiles.py.
        following: address of the part that comes next from memory, supposed to be as long; 0: nothing is asked for.
    """
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    if following and num_tiles == 1:
        _stream_part(x, x_stride, weights, num_pairs, num_rows, sums, following)
        return
    first, num_quarters = 0, 0
    wanted = following if following else x  # which lies in a cache
    for tile in range(num_tiles):
        end = (tile + 1) * num_rows // num_tiles
        if following:
            num_quarters = (tile + 1) * 4 * PAIR_LINES // num_tiles - tile * 4 * PAIR_LINES // num_tiles
        into, of_rows = sums + first * SUM_ROW_BYTES, x + first * x_stride
        _multiply_tile(end - first, of_rows, x_stride, weights, num_pairs, into, wanted, num_quarters)
        wanted += num_quarters * num_pairs // 4 * REGISTER_BYTES
        first = end


@njit(cache=True)
def multiply_group(x, x_stride, weights, num_pairs, num_rows, sums, is_new):
    """Up to GROUP_ROWS with a part of a block that lies in a cache; is_new: there are no sums yet."""
    if is_new:
        for index in range(0, num_rows * SUM_ROW_BYTES, REGISTER_BYTES):
            store_floats(sums + index, zeros())
    multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, 0, 0)


@njit(cache=True)
def choose_shape(shapes, num_rows):
    """See shape_tiles."""


@njit(cache=True)
def shape_tiles(shapes, num_rows):
    """Nothing is to be told: see tiles.py."""


@njit(cache=True)
def release_tiles():
    """See shape_tiles."""
