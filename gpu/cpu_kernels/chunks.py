"""Attention of some query heads over a chunk of 64 tokens of one KV head. Thread: any, without the GIL.

Scores, and sums of values, are products of few rows with a matrix in blocks of 64 outputs (products.py), which keys
and values are brought into next to the core; the next chunk's are asked for meanwhile. A row is one query head of one
token. Sums are rescaled when a larger score comes (online softmax, arXiv:1805.02867).
"""

import numpy as np
from numba import njit

from core.config import BLOCK_SIZE
from gpu.cpu_kernels.blocks import GROUP_ROWS, choose_shape, multiply_group
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.exponent import exp2_to_126
from gpu.cpu_kernels.layout import BLOCK_OUTPUTS, PAIR_BYTES, SUM_ROW_BYTES
from gpu.cpu_kernels.shuffles import interleave_high, interleave_low, spread_largest, transpose_pairs
from gpu.cpu_kernels.vectors import (
    add,
    clear_outside,
    first_lane,
    hide_outside,
    larger,
    load_floats,
    load_integer,
    load_pairs,
    multiply,
    multiply_subtract,
    prefetch,
    spread,
    store_floats,
    store_pairs,
    store_rounded,
    subtract,
    total,
    zeros,
)

CHUNK_TOKENS = BLOCK_OUTPUTS  # of context
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE
CHUNK_PAIRS = CHUNK_TOKENS // 2
SHARE_ROW_BYTES = 2 * CHUNK_TOKENS
TOP_ROW_BYTES = 2 * REGISTER_BYTES
MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)


@njit(cache=True)
def num_parts_of(head_dim):
    """Of 64 dimensions, the last of which may not be whole."""
    return (head_dim + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS


@njit(cache=True)
def chunk_room(head_dim, num_rows):
    """Bytes that attend_chunk works in: of (turned keys, paired values, scores, shares), whole registers each."""
    most_rows = min(num_rows, GROUP_ROWS)
    return (
        head_dim // 2 * PAIR_BYTES,
        num_parts_of(head_dim) * CHUNK_PAIRS * PAIR_BYTES,
        most_rows * SUM_ROW_BYTES,
        most_rows * SHARE_ROW_BYTES,
    )


@njit(cache=True)
def sums_bytes(head_dim, num_rows):
    return num_rows * num_parts_of(head_dim) * SUM_ROW_BYTES


@njit(cache=True)
def _clear(target, num_bytes):
    for index in range(0, num_bytes, REGISTER_BYTES):
        store_floats(target + index, zeros())


@njit(cache=True)
def _bring_keys(keys, stride, table, num_blocks, head_dim, turned):
    """A chunk's keys to [head_dim / 2, 64 tokens, 2]; zeros where there is no block."""
    if num_blocks < CHUNK_BLOCKS:
        _clear(turned, head_dim // 2 * PAIR_BYTES)
    for block in range(num_blocks):
        source = keys + load_integer(table + 8 * block) * BLOCK_SIZE * stride
        for part in range(head_dim // 2 // LANES):
            target = turned + part * LANES * PAIR_BYTES + block * REGISTER_BYTES
            transpose_pairs(source + part * REGISTER_BYTES, stride, target, PAIR_BYTES)


@njit(cache=True)
def _bring_values(values, stride, table, num_blocks, head_dim, paired):
    """A chunk's values to [parts of 64 dimensions, pairs of tokens, 64, 2]; zeros where there is no block.

    Of a last part that is not whole the rest is what lay there: it ends in sums that nobody reads.
    """
    if num_blocks < CHUNK_BLOCKS:
        _clear(paired, num_parts_of(head_dim) * CHUNK_PAIRS * PAIR_BYTES)
    for block in range(num_blocks):
        source = values + load_integer(table + 8 * block) * BLOCK_SIZE * stride
        for token in range(0, BLOCK_SIZE, 2):
            pair = (block * BLOCK_SIZE + token) // 2
            for part in range(2 * head_dim // REGISTER_BYTES):
                at = source + token * stride + part * REGISTER_BYTES
                x, y = load_pairs(at), load_pairs(at + stride)
                target = paired + (part // 2 * CHUNK_PAIRS + pair) * PAIR_BYTES + part % 2 * 2 * REGISTER_BYTES
                store_pairs(target, interleave_low(x, y))
                store_pairs(target + REGISTER_BYTES, interleave_high(x, y))


@njit(cache=True)
def _raise_top(scores, scale, first, end, top):
    """Raise one row's largest score to that of a chunk, if it is; returns what earlier sums must be multiplied by.

    Args:
        scores: float32 [64], before they are multiplied by scale; those outside first..end are not seen.
        top: see _share_group.
    """
    s0, s1 = load_floats(scores), load_floats(scores + REGISTER_BYTES)
    s2, s3 = load_floats(scores + 2 * REGISTER_BYTES), load_floats(scores + 3 * REGISTER_BYTES)
    if first > 0 or end < CHUNK_TOKENS:
        s0, s1 = hide_outside(s0, first, end), hide_outside(s1, first - LANES, end - LANES)
        s2 = hide_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = hide_outside(s3, first - 3 * LANES, end - 3 * LANES)
    before = load_floats(top)
    now = larger(multiply(spread_largest(larger(larger(s0, s1), larger(s2, s3))), spread(scale)), before)
    factor = spread(ONE)
    if first_lane(now) > first_lane(before):
        factor = exp2_to_126(subtract(before, now))
        store_floats(top, now)
        share_sum = top + REGISTER_BYTES
        store_floats(share_sum, multiply(load_floats(share_sum), factor))
    return factor


@njit(cache=True)
def _share_row(scores, scale, first, end, top, shares):
    """One row's scores to exp2(score * scale - largest), as bf16; zero outside first..end."""
    by, now = spread(scale), load_floats(top)
    s0 = exp2_to_126(multiply_subtract(load_floats(scores), by, now))
    s1 = exp2_to_126(multiply_subtract(load_floats(scores + REGISTER_BYTES), by, now))
    s2 = exp2_to_126(multiply_subtract(load_floats(scores + 2 * REGISTER_BYTES), by, now))
    s3 = exp2_to_126(multiply_subtract(load_floats(scores + 3 * REGISTER_BYTES), by, now))
    if first > 0 or end < CHUNK_TOKENS:
        s0, s1 = clear_outside(s0, first, end), clear_outside(s1, first - LANES, end - LANES)
        s2 = clear_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = clear_outside(s3, first - 3 * LANES, end - 3 * LANES)
    store_rounded(shares, s0)
    store_rounded(shares + 2 * LANES, s1)
    store_rounded(shares + 4 * LANES, s2)
    store_rounded(shares + 6 * LANES, s3)
    share_sum = top + REGISTER_BYTES
    store_floats(share_sum, add(load_floats(share_sum), add(add(s0, s1), add(s2, s3))))


@njit(cache=True)
def _rescale(sums, num_parts, part_bytes, factor):
    for part in range(num_parts):
        for index in range(0, SUM_ROW_BYTES, REGISTER_BYTES):
            at = sums + part * part_bytes + index
            store_floats(at, multiply(load_floats(at), factor))


@njit(cache=True)
def _share_group(scores, shares, sums, tops, scale, place, rows, per_kv, window, num_parts, part_bytes):
    """Some rows' scores to shares, and what was summed before rescaled.

    First all the largest scores, then all the shares: a row's own is a chain of which each step waits for the last,
    and rows that do little each overlap.

    Args:
        scores, shares: of these rows.
        sums, tops: of all rows. tops: float32 [rows, 2, 16]: the largest score so far, times scale, in every lane; sums
            of shares, of each lane.
        place: see attend_chunk.
        rows: first and end.
        part_bytes: of all rows' sums of 64 dimensions.
    """
    first, end = rows
    seen = place[1] + 1 - place[0]  # of the chunk, by the first token
    for row in range(first, end):
        of_row = seen + row // per_kv
        if of_row > 0 and of_row - window < CHUNK_TOKENS:
            top = tops + row * TOP_ROW_BYTES
            factor = _raise_top(scores + (row - first) * SUM_ROW_BYTES, scale, of_row - window, of_row, top)
            if first_lane(factor) != ONE:
                _rescale(sums + row * SUM_ROW_BYTES, num_parts, part_bytes, factor)
    for row in range(first, end):
        of_row, target = seen + row // per_kv, shares + (row - first) * SHARE_ROW_BYTES
        if of_row <= 0 or of_row - window >= CHUNK_TOKENS:  # it sees nothing here
            _clear(target, SHARE_ROW_BYTES)
            continue
        source, top = scores + (row - first) * SUM_ROW_BYTES, tops + row * TOP_ROW_BYTES
        _share_row(source, scale, of_row - window, of_row, top, target)


@njit(cache=True)
def clear_tops(tops, num_rows):
    for row in range(num_rows):
        store_floats(tops + row * TOP_ROW_BYTES, spread(MINUS_INFINITY))
        store_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES, zeros())


@njit(cache=True)
def merge(sums, tops, other_sums, other_tops, num_rows, head_dim):
    """Take what was found for the same rows in other chunks into these sums and tops."""
    num_parts, part_bytes = num_parts_of(head_dim), num_rows * SUM_ROW_BYTES
    for row in range(num_rows):
        top, other = tops + row * TOP_ROW_BYTES, other_tops + row * TOP_ROW_BYTES
        before, came = load_floats(top), load_floats(other)
        now = larger(before, came)
        of_these, of_others = exp2_to_126(subtract(before, now)), exp2_to_126(subtract(came, now))
        store_floats(top, now)
        _add_scaled(top + REGISTER_BYTES, of_these, other + REGISTER_BYTES, of_others)
        for part in range(num_parts):
            at = part * part_bytes + row * SUM_ROW_BYTES
            for index in range(at, at + SUM_ROW_BYTES, REGISTER_BYTES):
                _add_scaled(sums + index, of_these, other_sums + index, of_others)


@njit(cache=True)
def _add_scaled(target, of_target, source, of_source):
    added = multiply(load_floats(source), of_source)
    store_floats(target, add(multiply(load_floats(target), of_target), added))


@njit(cache=True)
def write(sums, tops, num_tokens, per_kv, head_dim, out, out_stride):
    """Sums over the sums of shares, rounded. out: of this KV head's first query head."""
    part_bytes = num_tokens * per_kv * SUM_ROW_BYTES
    for row in range(num_tokens * per_kv):
        by = spread(ONE / total(load_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES)))
        target = out + row // per_kv * out_stride + row % per_kv * 2 * head_dim
        for index in range(0, head_dim, LANES):
            source = sums + index // BLOCK_OUTPUTS * part_bytes + row * SUM_ROW_BYTES + 4 * (index % BLOCK_OUTPUTS)
            store_rounded(target + 2 * index, multiply(load_floats(source), by))


@njit(cache=True)
def _fetch(source, stride, blocks, first, end, head_dim):
    """Ask for the keys, or values, of the blocks from `first` to `end`."""
    for block in range(first, end):
        at = source + load_integer(blocks + 8 * block) * BLOCK_SIZE * stride
        for token in range(BLOCK_SIZE):
            for line in range(0, 2 * head_dim, REGISTER_BYTES):
                prefetch(at + token * stride + line)


@njit(cache=True)
def attend_chunk(query, keys, values, stride, blocks, counts, place, shape, window, scale, room, sums, tops, shapes):
    """Take a chunk's tokens into the sums of some rows of one KV head.

    The next chunk is asked for a block at a time, between the parts of the work: all at once it would be waited for.

    Args:
        query: bf16 [tokens * per_kv, head_dim].
        keys, values: of this KV head in the cache's first slot; stride: bytes from slot to slot.
        blocks: address of the chunk's part of the block table: int64 each, then the next chunk's.
        counts: blocks of this chunk, and of the next.
        place: positions of the chunk's first token and of the rows' first token.
        shape: (tokens, per_kv, head_dim)
        room: addresses of what chunk_room says; scores and shares are those of a group of rows.
        sums: float32 [parts, rows, 64]; tops: see _share_group.
        shapes: for products of so many rows: see shape_tiles.
    """
    num_tokens, per_kv, head_dim = shape
    turned, paired, scores, shares = room
    num_rows, num_parts = num_tokens * per_kv, num_parts_of(head_dim)
    part_bytes = num_rows * SUM_ROW_BYTES
    next_blocks, num_next = blocks + 8 * CHUNK_BLOCKS, counts[1]
    _bring_keys(keys, stride, blocks, counts[0], head_dim, turned)
    _fetch(keys, stride, next_blocks, 0, min(1, num_next), head_dim)
    _bring_values(values, stride, blocks, counts[0], head_dim, paired)
    _fetch(keys, stride, next_blocks, 1, min(2, num_next), head_dim)
    for first in range(0, num_rows, GROUP_ROWS):
        some = min(GROUP_ROWS, num_rows - first)
        if num_rows > GROUP_ROWS and (first == 0 or some < GROUP_ROWS):
            choose_shape(shapes, some)
        multiply_group(query + 2 * first * head_dim, 2 * head_dim, turned, head_dim // 2, some, scores, True)
        if first == 0:
            _fetch(keys, stride, next_blocks, 2, num_next, head_dim)
        rows = first, first + some
        _share_group(scores, shares, sums, tops, scale, place, rows, per_kv, window, num_parts, part_bytes)
        if first == 0:
            _fetch(values, stride, next_blocks, 0, min(2, num_next), head_dim)
        for part in range(num_parts):
            pairs, into = paired + part * CHUNK_PAIRS * PAIR_BYTES, sums + part * part_bytes + first * SUM_ROW_BYTES
            multiply_group(shares, SHARE_ROW_BYTES, pairs, CHUNK_PAIRS, some, into, False)
        if first == 0:
            _fetch(values, stride, next_blocks, 2, num_next, head_dim)
