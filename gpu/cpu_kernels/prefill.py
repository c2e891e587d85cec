"""Attention of a row of many new tokens, straight over its block table: the kernel. Thread: any, without the GIL.

A piece of work is one KV head of some tokens: their query heads share each key and value. Scores, and sums of values,
are products of few rows with a matrix in blocks of 64 outputs (products.py), which keys and values are brought into,
64 tokens at a time, next to the core. Sums are rescaled when a larger score comes (online softmax, arXiv:1805.02867).
"""

import ctypes

import numpy as np
from numba import cfunc, njit, types

from core.config import BLOCK_SIZE
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.exponent import exp2
from gpu.cpu_kernels.products import BLOCK_OUTPUTS, PAIR_BYTES, SUM_ROW_BYTES, clear_sums, multiply_part
from gpu.cpu_kernels.vectors import (
    add,
    clear_outside,
    first_lane,
    hide_outside,
    interleave_high,
    interleave_low,
    larger,
    load_float,
    load_floats,
    load_integer,
    load_pairs,
    multiply,
    multiply_add,
    spread,
    spread_largest,
    store_floats,
    store_pairs,
    store_rounded,
    subtract,
    take_next,
    total,
    transpose_pairs,
    zeros,
)

CHUNK_TOKENS = BLOCK_OUTPUTS  # of context
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE
CHUNK_PAIRS = CHUNK_TOKENS // 2
SHARE_ROW_BYTES = 2 * CHUNK_TOKENS
WANTED_ROWS = 96  # query heads of a piece: what is kept of them lies in a second-level cache
TOP_ROW_BYTES = 2 * REGISTER_BYTES
MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("query", ctypes.c_int64),  # bf16 [tokens, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # bytes from token to token
        ("keys", ctypes.c_int64),  # bf16 [blocks * 16, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("table", ctypes.c_int64),  # int64 [blocks of the context]
        ("start", ctypes.c_int64),  # position of the first token
        ("num_tokens", ctypes.c_int64),
        ("window", ctypes.c_int64),  # tokens that one sees, itself counted in
        ("out", ctypes.c_int64),  # bf16 [tokens, heads * head_dim]
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),  # a multiple of 64
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


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
    """A chunk's values to [head_dim / 64, pairs of tokens, 64, 2]; zeros where there is no block."""
    if num_blocks < CHUNK_BLOCKS:
        _clear(paired, head_dim // BLOCK_OUTPUTS * CHUNK_PAIRS * PAIR_BYTES)
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
def _share_row(scores, scale, first, end, top, share_sum, shares):
    """One head's scores to exp2(score * scale - largest), as bf16; returns what earlier sums must be multiplied by.

    Args:
        scores: float32 [64]; those outside first..end are not seen.
        top, share_sum: float32 [16]: the largest so far, in every lane; sums of the shares, of each lane.
    """
    by = spread(scale)
    s0, s1 = multiply(load_floats(scores), by), multiply(load_floats(scores + REGISTER_BYTES), by)
    s2 = multiply(load_floats(scores + 2 * REGISTER_BYTES), by)
    s3 = multiply(load_floats(scores + 3 * REGISTER_BYTES), by)
    if first > 0 or end < CHUNK_TOKENS:
        s0, s1 = hide_outside(s0, first, end), hide_outside(s1, first - LANES, end - LANES)
        s2 = hide_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = hide_outside(s3, first - 3 * LANES, end - 3 * LANES)
    before = load_floats(top)
    now = larger(spread_largest(larger(larger(s0, s1), larger(s2, s3))), before)
    s0, s1, s2, s3 = exp2(subtract(s0, now)), exp2(subtract(s1, now)), exp2(subtract(s2, now)), exp2(subtract(s3, now))
    if first > 0 or end < CHUNK_TOKENS:  # not the least that exp2 gives: nothing
        s0, s1 = clear_outside(s0, first, end), clear_outside(s1, first - LANES, end - LANES)
        s2 = clear_outside(s2, first - 2 * LANES, end - 2 * LANES)
        s3 = clear_outside(s3, first - 3 * LANES, end - 3 * LANES)
    store_rounded(shares, s0)
    store_rounded(shares + 2 * LANES, s1)
    store_rounded(shares + 4 * LANES, s2)
    store_rounded(shares + 6 * LANES, s3)
    summed = add(add(s0, s1), add(s2, s3))
    factor = spread(ONE)
    if first_lane(now) > first_lane(before):
        factor = exp2(subtract(before, now))
        store_floats(top, now)
    store_floats(share_sum, multiply_add(load_floats(share_sum), factor, summed))
    return factor


@njit(cache=True)
def _rescale(sums, num_parts, part_bytes, factor):
    for part in range(num_parts):
        for index in range(0, SUM_ROW_BYTES, REGISTER_BYTES):
            at = sums + part * part_bytes + index
            store_floats(at, multiply(load_floats(at), factor))


@njit(cache=True)
def _share_chunk(scores, shares, sums, tops, scale, chunk, position, num_tokens, per_kv, window, num_parts):
    """All rows of a piece: scores to shares, and what was summed before rescaled.

    Args:
        chunk: position of its first token of context.
        position: of the first token of the piece.
        tops: float32 [rows, top and share_sum, 16].
    """
    part_bytes = num_tokens * per_kv * SUM_ROW_BYTES
    for token in range(num_tokens):
        end = position + token + 1 - chunk
        if end <= 0 or end - window >= CHUNK_TOKENS:  # it sees nothing here
            _clear(shares + token * per_kv * SHARE_ROW_BYTES, per_kv * SHARE_ROW_BYTES)
            continue
        for row in range(token * per_kv, (token + 1) * per_kv):
            top = tops + row * TOP_ROW_BYTES
            of_row, into = scores + row * SUM_ROW_BYTES, shares + row * SHARE_ROW_BYTES
            factor = _share_row(of_row, scale, end - window, end, top, top + REGISTER_BYTES, into)
            if first_lane(factor) != ONE:
                _rescale(sums + row * SUM_ROW_BYTES, num_parts, part_bytes, factor)


@njit(cache=True)
def _clear_tops(tops, num_rows):
    for row in range(num_rows):
        store_floats(tops + row * TOP_ROW_BYTES, spread(MINUS_INFINITY))
        store_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES, zeros())


@njit(cache=True)
def _write(sums, tops, num_tokens, per_kv, head_dim, out, out_stride):
    """Sums over the sums of shares, rounded. out: of this KV head's first query head."""
    part_bytes = num_tokens * per_kv * SUM_ROW_BYTES
    for row in range(num_tokens * per_kv):
        by = spread(ONE / total(load_floats(tops + row * TOP_ROW_BYTES + REGISTER_BYTES)))
        target = out + row // per_kv * out_stride + row % per_kv * 2 * head_dim
        for index in range(0, head_dim, LANES):
            source = sums + index // BLOCK_OUTPUTS * part_bytes + row * SUM_ROW_BYTES + 4 * (index % BLOCK_OUTPUTS)
            store_rounded(target + 2 * index, multiply(load_floats(source), by))


@njit(cache=True)
def _copy_query(query, stride, num_tokens, row_bytes, target):
    for token in range(num_tokens):
        for index in range(0, row_bytes, REGISTER_BYTES):
            store_pairs(target + token * row_bytes + index, load_pairs(query + token * stride + index))


@njit(cache=True)
def _attend_piece(query, keys, values, stride, table, position, num_tokens, shape, window, scale, room, tops):
    """Some tokens' heads of one KV head, chunk by chunk of what they see.

    Args:
        query: bf16 [tokens * per_kv, head_dim].
        keys, values: of this KV head in the cache's first slot; stride: bytes from slot to slot.
        position: of the first of the tokens.
        shape: (per_kv, head_dim)
        room: (turned keys, paired values, scores, shares, sums)
    """
    per_kv, head_dim = shape
    turned, paired, scores, shares, sums = room
    num_rows, num_parts = num_tokens * per_kv, head_dim // BLOCK_OUTPUTS
    part_bytes = num_rows * SUM_ROW_BYTES
    clear_sums(sums, num_rows * num_parts)
    _clear_tops(tops, num_rows)
    end = position + num_tokens
    end_block = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
    for chunk in range(max(0, position + 1 - window) // CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS):
        blocks = table + 8 * (chunk // BLOCK_SIZE)
        num_blocks = min(CHUNK_BLOCKS, end_block - chunk // BLOCK_SIZE)
        _bring_keys(keys, stride, blocks, num_blocks, head_dim, turned)
        clear_sums(scores, num_rows)
        multiply_part(query, 2 * head_dim, turned, head_dim // 2, num_rows, scores)
        _share_chunk(scores, shares, sums, tops, scale, chunk, position, num_tokens, per_kv, window, num_parts)
        _bring_values(values, stride, blocks, num_blocks, head_dim, paired)
        for part in range(num_parts):
            some = paired + part * CHUNK_PAIRS * PAIR_BYTES
            multiply_part(shares, SHARE_ROW_BYTES, some, CHUNK_PAIRS, num_rows, sums + part * part_bytes)


@cfunc(types.void(types.int64), cache=True)
def attend_many(arguments):
    """Take pieces until none is left, the longest first: any number of threads at once.

    arguments: the address of Arguments.
    """
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values, table = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    start, num_tokens = load_integer(arguments + 48), load_integer(arguments + 56)
    window, out, num_kv_heads = load_integer(arguments + 64), load_integer(arguments + 72), load_integer(arguments + 80)
    per_kv, head_dim = load_integer(arguments + 88), load_integer(arguments + 96)
    scale = load_float(arguments + 104)
    most_tokens = max(1, WANTED_ROWS // per_kv)
    most_rows = most_tokens * per_kv
    sizes = (
        2 * most_rows * head_dim,
        head_dim // 2 * PAIR_BYTES,
        head_dim // BLOCK_OUTPUTS * CHUNK_PAIRS * PAIR_BYTES,
        most_rows * SUM_ROW_BYTES,
        most_rows * SHARE_ROW_BYTES,
        4 * most_rows * head_dim,
        most_rows * TOP_ROW_BYTES,
    )
    size = sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + sizes[5] + sizes[6]
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    copied = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    turned = copied + sizes[0]
    paired = turned + sizes[1]
    scores = paired + sizes[2]
    shares = scores + sizes[3]
    sums = shares + sizes[4]
    room, tops = (turned, paired, scores, shares, sums), sums + sizes[5]
    width = 2 * per_kv * head_dim
    num_tiles = (num_tokens + most_tokens - 1) // most_tokens
    piece = take_next(arguments)
    while piece < num_tiles * num_kv_heads:
        first, head = (num_tiles - 1 - piece // num_kv_heads) * most_tokens, piece % num_kv_heads
        some = min(most_tokens, num_tokens - first)
        _copy_query(query + first * query_stride + head * width, query_stride, some, width, copied)
        _attend_piece(
            copied,
            keys + 2 * head * head_dim,
            values + 2 * head * head_dim,
            2 * num_kv_heads * head_dim,
            table,
            start + first,
            some,
            (per_kv, head_dim),
            window,
            scale,
            room,
            tops,
        )
        _write(
            room[4],
            tops,
            some,
            per_kv,
            head_dim,
            out + first * num_kv_heads * width + head * width,
            num_kv_heads * width,
        )
        piece = take_next(arguments)
