"""Attention of one new token per row, straight over block tables: the kernel. Thread: any, without the GIL.

A piece of work is one KV head of one row: its query heads share each key and value that is read. Scores are computed
for sixteen tokens at a time, one in each lane, from keys transposed next to the core; values are read in pairs of
tokens. Sums are rescaled once in CHUNK_TOKENS (online softmax, arXiv:1805.02867).
"""

import ctypes

import numpy as np
from numba import cfunc, njit, types

from core.config import BLOCK_SIZE
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.exponent import exp2
from gpu.cpu_kernels.support import HEAD_DIM_STEP
from gpu.cpu_kernels.vectors import (
    add,
    add_products,
    hide_outside,
    interleave_high,
    interleave_low,
    larger,
    largest,
    load_float,
    load_floats,
    load_integer,
    load_pairs,
    load_widened,
    multiply,
    prefetch,
    spread,
    spread_pair,
    store_floats,
    store_rounded,
    take_next,
    total,
    transpose_pairs,
    zeros,
)

assert BLOCK_SIZE == LANES  # a block's scores are a register
CHUNK_TOKENS = 128
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE
HEADS_AT_ONCE = 4  # with two sums each, as many as hide the latency of a product
MINUS_INFINITY = np.float32(-np.inf)


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("query", ctypes.c_int64),  # bf16 [rows, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # bytes from row to row
        ("keys", ctypes.c_int64),  # bf16 [blocks * 16, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("tables", ctypes.c_int64),  # int64 [rows, table_width]
        ("table_width", ctypes.c_int64),
        ("firsts", ctypes.c_int64),  # int64 [rows]: the first position that is seen
        ("ends", ctypes.c_int64),
        ("out", ctypes.c_int64),  # bf16 [rows, heads * head_dim]
        ("num_rows", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("together", ctypes.c_int64),  # KV heads of a piece of work: 1, or all
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def _score_block(query, num_heads, num_pairs, keys, stride, seen, scale, turned, scores):
    """Scores of a block's tokens, times scale; -inf outside of seen.

    Args:
        query: bf16 [num_heads, head_dim], num_heads a multiple of HEADS_AT_ONCE.
        keys: bf16 [16, head_dim], `stride` bytes apart.
        seen: (first, end) of the block's tokens.
        turned: room for a block of keys.
        scores: float32, of head i from i * CHUNK_TOKENS on.
    """
    for part in range(num_pairs // LANES):
        transpose_pairs(keys + part * REGISTER_BYTES, stride, turned + part * LANES * REGISTER_BYTES, REGISTER_BYTES)
    row = 4 * num_pairs
    for head in range(0, num_heads, HEADS_AT_ONCE):
        q = query + head * row
        a0, a1, a2, a3 = zeros(), zeros(), zeros(), zeros()
        b0, b1, b2, b3 = zeros(), zeros(), zeros(), zeros()
        for pair in range(0, num_pairs, 2):
            at = q + 4 * pair
            k = load_pairs(turned + pair * REGISTER_BYTES)
            a0 = add_products(a0, k, spread_pair(at))
            a1 = add_products(a1, k, spread_pair(at + row))
            a2 = add_products(a2, k, spread_pair(at + 2 * row))
            a3 = add_products(a3, k, spread_pair(at + 3 * row))
            k = load_pairs(turned + (pair + 1) * REGISTER_BYTES)
            b0 = add_products(b0, k, spread_pair(at + 4))
            b1 = add_products(b1, k, spread_pair(at + 4 + row))
            b2 = add_products(b2, k, spread_pair(at + 4 + 2 * row))
            b3 = add_products(b3, k, spread_pair(at + 4 + 3 * row))
        s0, s1 = multiply(add(a0, b0), spread(scale)), multiply(add(a1, b1), spread(scale))
        s2, s3 = multiply(add(a2, b2), spread(scale)), multiply(add(a3, b3), spread(scale))
        if seen[0] > 0 or seen[1] < BLOCK_SIZE:
            s0, s1 = hide_outside(s0, seen[0], seen[1]), hide_outside(s1, seen[0], seen[1])
            s2, s3 = hide_outside(s2, seen[0], seen[1]), hide_outside(s3, seen[0], seen[1])
        target = scores + 4 * CHUNK_TOKENS * head
        store_floats(target, s0)
        store_floats(target + 4 * CHUNK_TOKENS, s1)
        store_floats(target + 8 * CHUNK_TOKENS, s2)
        store_floats(target + 12 * CHUNK_TOKENS, s3)


@njit(cache=True)
def _shares_of(scores, num_tokens, largest_before, shares):
    """One head's scores to exp2(score - largest), as bf16; returns (the largest so far, their sum)."""
    top = load_floats(scores)
    for token in range(LANES, num_tokens, LANES):
        top = larger(top, load_floats(scores + 4 * token))
    largest_now = max(largest_before, largest(top))
    below = spread(-largest_now)
    summed = zeros()
    for token in range(0, num_tokens, LANES):
        share = exp2(add(load_floats(scores + 4 * token), below))
        summed = add(summed, share)
        store_rounded(shares + 2 * token, share)
    return largest_now, total(summed)


@njit(cache=True)
def _rescale(sums, num_floats, factor):
    by = spread(factor)
    for index in range(0, num_floats, LANES):
        store_floats(sums + 4 * index, multiply(load_floats(sums + 4 * index), by))


@njit(cache=True)
def _add_block(shares, values, stride, head_dim, sums):
    """Add HEADS_AT_ONCE heads' shares of a block's values to their sums.

    Args:
        shares: bf16, of head i from i * CHUNK_TOKENS on.
        values: bf16 [16, head_dim], `stride` bytes apart.
        sums: float32 [heads, head_dim].
    """
    row = 4 * head_dim
    for dim in range(0, head_dim, HEAD_DIM_STEP):
        at = sums + 4 * dim
        a0, b0 = load_floats(at), load_floats(at + REGISTER_BYTES)
        a1, b1 = load_floats(at + row), load_floats(at + row + REGISTER_BYTES)
        a2, b2 = load_floats(at + 2 * row), load_floats(at + 2 * row + REGISTER_BYTES)
        a3, b3 = load_floats(at + 3 * row), load_floats(at + 3 * row + REGISTER_BYTES)
        for token in range(0, BLOCK_SIZE, 2):
            x = load_pairs(values + token * stride + 2 * dim)
            y = load_pairs(values + (token + 1) * stride + 2 * dim)
            low, high = interleave_low(x, y), interleave_high(x, y)
            share = spread_pair(shares + 2 * token)
            a0, b0 = add_products(a0, low, share), add_products(b0, high, share)
            share = spread_pair(shares + 2 * (token + CHUNK_TOKENS))
            a1, b1 = add_products(a1, low, share), add_products(b1, high, share)
            share = spread_pair(shares + 2 * (token + 2 * CHUNK_TOKENS))
            a2, b2 = add_products(a2, low, share), add_products(b2, high, share)
            share = spread_pair(shares + 2 * (token + 3 * CHUNK_TOKENS))
            a3, b3 = add_products(a3, low, share), add_products(b3, high, share)
        store_floats(at, a0)
        store_floats(at + REGISTER_BYTES, b0)
        store_floats(at + row, a1)
        store_floats(at + row + REGISTER_BYTES, b1)
        store_floats(at + 2 * row, a2)
        store_floats(at + 2 * row + REGISTER_BYTES, b2)
        store_floats(at + 3 * row, a3)
        store_floats(at + 3 * row + REGISTER_BYTES, b3)


@njit(cache=True)
def _copy_query(source, num_floats, target):
    for index in range(0, num_floats, LANES):
        store_rounded(target + 2 * index, load_widened(source + 2 * index))


@njit(cache=True)
def _prefetch(source, num_bytes):
    for line in range(0, num_bytes, REGISTER_BYTES):
        prefetch(source + line)


@njit(cache=True)
def _attend_chunk(query, keys, values, table, num_blocks, seen, shape, scale, room, tops):
    """Take a chunk of one KV head's tokens into its sums.

    Args:
        query: bf16 [num_heads, head_dim].
        keys, values: of this KV head in the cache's first slot.
        table: int64 [num_blocks], the chunk's; then the next chunk's.
        seen: (first, end) of the chunk's tokens.
        shape: (per_kv, num_heads, head_dim, bytes from slot to slot, bytes to prefetch of a block).
        room: (turned, scores, shares, sums, keys to prefetch, values to prefetch)
        tops: float32 [2, num_heads]: of each head the largest score, and the sum of the shares.
    """
    per_kv, num_heads, head_dim, stride, ahead_bytes = shape
    turned, scores, shares, sums, ahead_keys, ahead_values = room
    block_bytes = BLOCK_SIZE * stride
    for index in range(num_blocks):
        if ahead_bytes:
            block = load_integer(table + 8 * (index + CHUNK_BLOCKS)) * block_bytes
            _prefetch(ahead_keys + block, ahead_bytes)
        at = keys + load_integer(table + 8 * index) * block_bytes
        in_block = (seen[0] - index * BLOCK_SIZE, seen[1] - index * BLOCK_SIZE)
        into = scores + 4 * BLOCK_SIZE * index
        _score_block(query, num_heads, head_dim // 2, at, stride, in_block, scale, turned, into)
    for head in range(per_kv):
        before, offset = tops[0, head], head * CHUNK_TOKENS
        top, summed = _shares_of(scores + 4 * offset, num_blocks * BLOCK_SIZE, before, shares + 2 * offset)
        if top > before:
            factor = np.float32(2.0 ** (before - top))
            _rescale(sums + 4 * head * head_dim, head_dim, factor)
            tops[0, head], tops[1, head] = top, tops[1, head] * factor
        tops[1, head] += summed
    for head in range(0, num_heads, HEADS_AT_ONCE):
        for index in range(num_blocks):
            if head == 0 and ahead_bytes:
                _prefetch(ahead_values + load_integer(table + 8 * (index + CHUNK_BLOCKS)) * block_bytes, ahead_bytes)
            at = values + load_integer(table + 8 * index) * block_bytes
            of = shares + 2 * (head * CHUNK_TOKENS + index * BLOCK_SIZE)
            _add_block(of, at, stride, head_dim, sums + 4 * head * head_dim)


@njit(cache=True)
def _attend_piece(query, keys, values, table, first, end, num_kv_heads, shape, scale, out, room, tops):
    """Some KV heads of one row, chunk by chunk: a chunk's heads lie together in memory, and are read together.

    Args:
        query, out: bf16 [kv_heads, per_kv, head_dim].
        keys, values: of the first of these KV heads in the cache's first slot.
        table: int64 [blocks]; first, end: the positions that are seen.
        shape: (per_kv, num_heads, head_dim, bytes from slot to slot)
        room: (padded queries, turned keys, scores, shares, sums); of the queries, what pads a KV head's is zero.
        tops: float32 [kv_heads, 2, num_heads].
    """
    per_kv, num_heads, head_dim, stride = shape
    padded, turned, scores, shares, sums = room
    width = num_heads * head_dim
    for head in range(num_kv_heads):
        _copy_query(query + 2 * head * per_kv * head_dim, per_kv * head_dim, padded + 2 * head * width)
    for index in range(0, num_kv_heads * width, LANES):
        store_floats(sums + 4 * index, zeros())
    tops[:, 0], tops[:, 1] = MINUS_INFINITY, np.float32(0)
    end_block = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    slice_bytes = BLOCK_SIZE * stride // num_kv_heads
    for chunk in range(first // BLOCK_SIZE, end_block, CHUNK_BLOCKS):
        num_blocks = min(CHUNK_BLOCKS, end_block - chunk)
        ahead_bytes = slice_bytes if chunk + 2 * CHUNK_BLOCKS <= end_block else 0
        seen = (first - chunk * BLOCK_SIZE, end - chunk * BLOCK_SIZE)
        for head in range(num_kv_heads):
            _attend_chunk(
                padded + 2 * head * width,
                keys + 2 * head * head_dim,
                values + 2 * head * head_dim,
                table + 8 * chunk,
                num_blocks,
                seen,
                (per_kv, num_heads, head_dim, stride, ahead_bytes),
                scale,
                (
                    turned,
                    scores,
                    shares,
                    sums + 4 * head * width,
                    keys + head * slice_bytes,
                    values + head * slice_bytes,
                ),
                tops[head],
            )
    for head in range(num_kv_heads):
        for group in range(per_kv):
            by = spread(np.float32(1) / tops[head, 1, group])
            source = sums + 4 * (head * width + group * head_dim)
            target = out + 2 * (head * per_kv + group) * head_dim
            for index in range(0, head_dim, LANES):
                store_rounded(target + 2 * index, multiply(load_floats(source + 4 * index), by))


@cfunc(types.void(types.int64), cache=True)
def attend(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values = load_integer(arguments + 24), load_integer(arguments + 32)
    tables, table_width = load_integer(arguments + 40), load_integer(arguments + 48)
    firsts, ends = load_integer(arguments + 56), load_integer(arguments + 64)
    out, num_rows = load_integer(arguments + 72), load_integer(arguments + 80)
    num_kv_heads, per_kv = load_integer(arguments + 88), load_integer(arguments + 96)
    head_dim, together = load_integer(arguments + 104), load_integer(arguments + 112)
    scale = load_float(arguments + 120)
    num_heads = (per_kv + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE * HEADS_AT_ONCE
    sizes = (
        2 * together * num_heads * head_dim,
        2 * BLOCK_SIZE * head_dim,
        4 * num_heads * CHUNK_TOKENS,
        2 * num_heads * CHUNK_TOKENS,
        4 * together * num_heads * head_dim,
    )
    memory = np.zeros(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + REGISTER_BYTES, dtype=np.uint8)
    padded = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    turned = padded + sizes[0]
    scores = turned + sizes[1]
    shares = scores + sizes[2]
    room = (padded, turned, scores, shares, shares + sizes[3])
    tops = np.empty((together, 2, num_heads), dtype=np.float32)
    width = 2 * per_kv * head_dim
    shape = (per_kv, num_heads, head_dim, 2 * num_kv_heads * head_dim)
    per_row = num_kv_heads // together
    piece = take_next(arguments)
    while piece < num_rows * per_row:
        row, head = piece // per_row, piece % per_row * together
        _attend_piece(
            query + row * query_stride + head * width,
            keys + 2 * head * head_dim,
            values + 2 * head * head_dim,
            tables + 8 * row * table_width,
            load_integer(firsts + 8 * row),
            load_integer(ends + 8 * row),
            together,
            shape,
            scale,
            out + (row * num_kv_heads + head) * width,
            room,
            tops,
        )
        piece = take_next(arguments)
