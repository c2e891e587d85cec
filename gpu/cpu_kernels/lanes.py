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
SHAPES_BYTES = 0
GROUP_ROWS = ATTENTION_ROWS = 96  # what is kept of them lies in a second-level cache
STREAM_AHEAD = 4096  # bytes: how far ahead the one tile of few rows asks for weights


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
def multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, shapes, is_streamed):
    """All rows with a part of a block: tiles of about equally many rows, each of which fetches some of the next part.

    What follows a part in memory is the next: of this block, or of the next block, which is as good a guess.

    Args:
        shapes: of no use here; see tiles.py.
        is_streamed: whether weights come from memory.
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
def multiply_group(x, x_stride, weights, num_pairs, num_rows, sums, is_new):
    """Up to GROUP_ROWS with a part of a block that lies in a cache; is_new: there are no sums yet."""
    if is_new:
        for index in range(0, num_rows * SUM_ROW_BYTES, REGISTER_BYTES):
            store_floats(sums + index, zeros())
    multiply_part(x, x_stride, weights, num_pairs, num_rows, sums, 0, False)


@njit(cache=True)
def choose_shape(shapes, num_rows):
    """See shape_tiles."""


@njit(cache=True)
def shape_tiles(shapes, num_rows):
    """Nothing is to be told: see tiles.py."""


@njit(cache=True)
def release_tiles():
    """See shape_tiles."""
