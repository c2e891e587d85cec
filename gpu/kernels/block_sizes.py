"""How the kernels' work is cut, as data: bench/ tunes these on a device. Imports nothing that computes. Any thread.

Nothing here depends on how many rows a step has, but for the two sizes of a product's tile, and nothing on the device:
a row's sums are cut in the same way in any company, and on any machine.
"""

from dataclasses import dataclass

LAST = 1 << 30

# Widths up to which a row has so many warps: 8 to 16 numbers a thread
ROW_WARPS = ((256, 1), (1024, 2), (2048, 4), (8192, 8), (LAST, 16))
COLUMNS = 1024  # of a row, at a time, where its columns are independent of each other
COLUMN_WARPS = 4
HEAD_NUMBERS = 1024  # of heads that one program norms and turns, at most, unless they are normed together
HEAD_WARPS = 4


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Of a product: rows, outputs and inputs that a program multiplies at a time.

    Args:
        num_warps, num_stages: of the compiled kernel; a stage holds a tile of both operands in shared memory.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


SMALL_ROWS = 16  # the least that a matrix instruction takes
# By bits of a weight: few rows are bound by reading it, many by arithmetic.
SMALL_TILES = {
    32: ProductTile(SMALL_ROWS, 32, 64, 4, 3),
    16: ProductTile(SMALL_ROWS, 64, 128, 4, 4),
    8: ProductTile(SMALL_ROWS, 64, 128, 4, 4),
    4: ProductTile(SMALL_ROWS, 64, 128, 4, 4),
}
LARGE_TILES = {
    32: ProductTile(32, 32, 32, 4, 2),
    16: ProductTile(128, 128, 64, 8, 3),
    8: ProductTile(128, 128, 64, 8, 3),
    4: ProductTile(64, 64, 64, 8, 3),  # wider ones want more registers than a thread has
}
# Of 8 bits with scales of groups: beside the sums a group's own are held, which a wider one has no registers for.
LARGE_GROUPED_TILE = ProductTile(128, 64, 64, 8, 3)
# Programs that keep the largest device served (132 multiprocessors) busy twice over. A product with fewer tiles of
# outputs is cut along its inputs as well, into MAX_SPLITS parts at most, of MIN_SPLIT_INPUTS each at least.
WANTED_PROGRAMS = 264
MAX_SPLITS = 16
MIN_SPLIT_INPUTS = 256


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def row_warps(width: int) -> int:
    """Of a program that sums over a row."""
    return next(warps for most, warps in ROW_WARPS if width <= most)


def heads_at_once(num_heads: int, num_kv_heads: int, head_dim: int, are_together: bool) -> int:
    """A power of two. are_together: their norm is one, over all of them."""
    most = next_power_of_two(max(num_heads, num_kv_heads))
    return most if are_together else min(most, max(1, HEAD_NUMBERS // next_power_of_two(head_dim)))


def splits_for(num_out: int, num_in: int, tile: ProductTile) -> int:
    """Parts that a product's inputs are cut into, by the matrix's shape alone: a power of two."""
    num_tiles = -(-num_out // tile.outputs)
    splits = 1
    while (
        splits < MAX_SPLITS
        and num_tiles * splits * 2 <= WANTED_PROGRAMS * 3 // 2
        and num_in >= splits * 2 * MIN_SPLIT_INPUTS
    ):
        splits *= 2
    return splits


def split_inputs(num_in: int, splits: int, tile: ProductTile) -> int:
    """Inputs of one part: whole tiles of them."""
    return -(-num_in // (splits * tile.inputs)) * tile.inputs
