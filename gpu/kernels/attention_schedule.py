"""Who computes what in one step's attention, laid out once a step and window for all layers: @triton.jit.

On the device, from the rows' lengths there, so that a CUDA graph of a fixed grid serves rows of any length.
Thread: engine.
"""

import triton
import triton.language as tl

from gpu.kernels.decode_attention import first_seen, split_tokens


@triton.jit(do_not_specialize=["num_decodes", "num_rows", "window"], do_not_specialize_on_alignment=["ends", "offsets"])
def lay_out_step(
    ends,  # [rows]: positions up to which a row's context goes after this step; 0: an empty row
    offsets,  # [rows + 1]: where a row's tokens begin
    splits,  # [...]: of the rows that decode, in order: row | index << 16
    split_offsets,  # [num_decodes + 1]
    tiles,  # [...]: of the other rows: row | index << 16
    num_tiles,  # [1]
    num_decodes,  # rows of one token: the first ones
    num_rows,
    window,
    TILE_TOKENS: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ROWS: tl.constexpr,  # at a time
):
    """Cut decodes into splits of their context, and the other rows into tiles of their tokens. One program."""
    some = tl.arange(0, ROWS)
    num_splits = 0
    for base in range(0, num_decodes, ROWS):
        rows = base + some
        is_row = rows < num_decodes
        end = tl.load(ends + rows, mask=is_row, other=0).to(tl.int32)
        _, begin = first_seen(end, window, BLOCK, HAS_WINDOW)
        size = split_tokens(end - begin, KV_TOKENS, LEAST, MOST_SPLITS)
        counts = tl.where(is_row, tl.maximum(tl.cdiv(end - begin, size), 1), 0)
        places = num_splits + tl.cumsum(counts, 0) - counts
        tl.store(split_offsets + rows, places, mask=is_row)
        for index in range(tl.max(counts, 0)):
            tl.store(splits + places + index, rows | (index << 16), mask=index < counts)
        num_splits += tl.sum(counts, 0)
    tl.store(split_offsets + num_decodes, num_splits)
    total = 0
    for base in range(num_decodes, num_rows, ROWS):
        rows = base + some
        is_row = rows < num_rows
        length = tl.load(offsets + rows + 1, mask=is_row, other=0) - tl.load(offsets + rows, mask=is_row, other=0)
        counts = tl.cdiv(length.to(tl.int32), TILE_TOKENS)
        places = total + tl.cumsum(counts, 0) - counts
        for index in range(tl.max(counts, 0)):  # a row's last tiles see the most: they start first
            tl.store(tiles + places + counts - 1 - index, rows | (index << 16), mask=index < counts)
        total += tl.sum(counts, 0)
    tl.store(num_tiles, total)
