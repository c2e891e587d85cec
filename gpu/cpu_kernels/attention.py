"""Attention straight over block tables, of rows of one new token and of many, by avx512_bf16.

Kernels: any thread, without the GIL; classes: engine. The context is taken in chunks of 64 tokens of one KV head.
Scores, and sums of values, are matmuls of few rows with a matrix in blocks of 64 outputs (matmul.py), which keys and
values are brought into next to the core; the next chunk's are asked for meanwhile. A row here is one query head of one
token. Sums are rescaled when a larger score comes (online softmax, arXiv:1805.02867).

One new token: a piece of work is some KV heads of a row, as many as it takes to read a few whole cache lines of each
token: their query heads share each key and value that is read. The context is taken in splits, which are merged in
their order: a piece is all of a row's splits, or, where rows do not divide evenly among the threads, one of them (flash
decoding), and who ends the last merges them. Sums are the same to the last bit either way.

Many new tokens: a piece of work is one KV head of some tokens.
"""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch
from numba import cfunc, njit, types
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import RaggedRows
from gpu.cpu_kernels.emit import LANES, REGISTER_BYTES
from gpu.cpu_kernels.matmul import PAIR_BYTES, SUM_ROW_BYTES, clear_sums, multiply_part
from gpu.cpu_kernels.team import Kernel
from gpu.cpu_kernels.vectors import (
    add,
    clear_outside,
    exp2_to_126,
    first_lane,
    hide_outside,
    interleave_high,
    interleave_low,
    keep,
    larger,
    load_float,
    load_floats,
    load_integer,
    load_pairs,
    multiply,
    multiply_subtract,
    prefetch,
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
from gpu.kv_cache import LayerKV
from gpu.linear import BLOCK_OUTPUTS
from gpu.scores import Scores

CHUNK_TOKENS = BLOCK_OUTPUTS  # of context
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_SIZE
CHUNK_PAIRS = CHUNK_TOKENS // 2
SHARE_ROW_BYTES = 2 * CHUNK_TOKENS
TOP_ROW_BYTES = 2 * REGISTER_BYTES
SPLIT_TOKENS = 512  # of context
PROMPT_ROWS = 96  # of a piece: what is kept of them lies in a second-level cache
PIECE_BYTES = 256  # of a token's keys that are read together: what lies beside a line is fetched with it
SHARED_ROWS = 4  # for each thread: with so many, one that is left over keeps the others waiting for little
MINUS_INFINITY = np.float32(-np.inf)
ONE = np.float32(1)
LOG2_E = math.log2(math.e)
NO_WINDOW = 1 << 62


@njit(cache=True)
def num_parts_of(head_dim):
    """Of 64 dimensions, the last of which may not be whole."""
    return (head_dim + BLOCK_OUTPUTS - 1) // BLOCK_OUTPUTS


@njit(cache=True)
def chunk_room(head_dim, num_rows):
    """Bytes that attend_chunk works in: of (turned keys, paired values, scores, shares), whole registers each."""
    return (
        head_dim // 2 * PAIR_BYTES,
        num_parts_of(head_dim) * CHUNK_PAIRS * PAIR_BYTES,
        num_rows * SUM_ROW_BYTES,
        num_rows * SHARE_ROW_BYTES,
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
        top: see _share.
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
def _share(scores, shares, sums, tops, scale, place, shape, window, num_parts, part_bytes):
    """All rows' scores to shares, and what was summed before rescaled.

    First all the largest scores, then all the shares: a row's own is a chain of which each step waits for the last,
    and rows that do little each overlap.

    Args:
        tops: float32 [rows, 2, 16]: the largest score so far, times scale, in every lane; sums of shares, of each lane.
        place, shape: see attend_chunk.
        part_bytes: of all rows' sums of 64 dimensions.
    """
    num_tokens, per_kv, _ = shape
    seen = place[1] + 1 - place[0]  # of the chunk, by the first token
    for row in range(num_tokens * per_kv):
        of_row = seen + row // per_kv
        if of_row > 0 and of_row - window < CHUNK_TOKENS:
            top = tops + row * TOP_ROW_BYTES
            factor = _raise_top(scores + row * SUM_ROW_BYTES, scale, of_row - window, of_row, top)
            if first_lane(factor) != ONE:
                _rescale(sums + row * SUM_ROW_BYTES, num_parts, part_bytes, factor)
    for row in range(num_tokens * per_kv):
        of_row, target = seen + row // per_kv, shares + row * SHARE_ROW_BYTES
        if of_row <= 0 or of_row - window >= CHUNK_TOKENS:  # it sees nothing here
            _clear(target, SHARE_ROW_BYTES)
            continue
        source, top = scores + row * SUM_ROW_BYTES, tops + row * TOP_ROW_BYTES
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
def attend_chunk(query, keys, values, stride, blocks, counts, place, shape, window, scale, room, sums, tops):
    """Take a chunk's tokens into the sums of some rows of one KV head.

    The next chunk is asked for a block at a time, between the parts of the work: all at once it would be waited for.

    Args:
        query: bf16 [tokens * per_kv, head_dim].
        keys, values: of this KV head in the cache's first slot; stride: bytes from slot to slot.
        blocks: address of the chunk's part of the block table: int64 each, then the next chunk's.
        counts: blocks of this chunk, and of the next.
        place: positions of the chunk's first token and of the rows' first token.
        shape: (tokens, per_kv, head_dim)
        room: addresses of what chunk_room says.
        sums: float32 [parts, rows, 64]; tops: see _share.
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
    clear_sums(scores, num_rows)
    multiply_part(query, 2 * head_dim, turned, head_dim // 2, num_rows, scores, 0)
    _fetch(keys, stride, next_blocks, 2, num_next, head_dim)
    _share(scores, shares, sums, tops, scale, place, shape, window, num_parts, part_bytes)
    _fetch(values, stride, next_blocks, 0, min(2, num_next), head_dim)
    for part in range(num_parts):
        pairs = paired + part * CHUNK_PAIRS * PAIR_BYTES
        multiply_part(shares, SHARE_ROW_BYTES, pairs, CHUNK_PAIRS, num_rows, sums + part * part_bytes, 0)
    _fetch(values, stride, next_blocks, 2, num_next, head_dim)


@njit(cache=True)
def head_bytes(num_rows, head_dim):
    """Of what is found for one KV head: sums, and then tops, as of attend_chunk."""
    return sums_bytes(head_dim, num_rows) + num_rows * TOP_ROW_BYTES


@njit(cache=True)
def _attend_span(query, keys, values, stride, table, seen, end_block, shape, position, window, scale, room, found):
    """Some tokens' heads of some KV heads over some of the context, chunk by chunk.

    Args:
        query: bf16 [KV heads, tokens * per_kv, head_dim].
        keys, values: of the first of these KV heads in the cache's first slot; stride: bytes from slot to slot.
        table: int64 [blocks]; seen: first and end of the positions.
        end_block: up to which blocks are read, by this piece: the next chunk's are asked for.
        shape: (KV heads, tokens, per_kv, head_dim)
        position: of the first of the tokens.
        room: see attend_chunk; found: head_bytes for each KV head.
    """
    num_heads, num_tokens, per_kv, head_dim = shape
    num_rows = num_tokens * per_kv
    of_sums, of_head = sums_bytes(head_dim, num_rows), head_bytes(num_rows, head_dim)
    for head in range(num_heads):
        clear_sums(found + head * of_head, num_rows * num_parts_of(head_dim))
        clear_tops(found + head * of_head + of_sums, num_rows)
    for chunk in range(seen[0] // CHUNK_TOKENS * CHUNK_TOKENS, seen[1], CHUNK_TOKENS):
        num_left = end_block - chunk // BLOCK_SIZE
        for head in range(num_heads):
            attend_chunk(
                query + head * 2 * num_rows * head_dim,
                keys + head * 2 * head_dim,
                values + head * 2 * head_dim,
                stride,
                table + 8 * (chunk // BLOCK_SIZE),
                (min(CHUNK_BLOCKS, num_left), max(0, min(CHUNK_BLOCKS, num_left - CHUNK_BLOCKS))),
                (chunk, position),
                (num_tokens, per_kv, head_dim),
                window,
                scale,
                room,
                found + head * of_head,
                found + head * of_head + of_sums,
            )


class DecodeArguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("query", ctypes.c_int64),  # bf16 [rows, heads, head_dim]
        ("query_stride", ctypes.c_int64),  # bytes from row to row
        ("keys", ctypes.c_int64),  # bf16 [blocks * 16, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("tables", ctypes.c_int64),  # int64 [rows, table_width]
        ("table_width", ctypes.c_int64),
        ("ends", ctypes.c_int64),  # int64 [rows]: one past the last position
        ("window", ctypes.c_int64),  # tokens that one sees, itself counted in
        ("out", ctypes.c_int64),  # bf16 [rows, heads * head_dim]
        ("num_rows", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("per_kv", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("piece_heads", ctypes.c_int64),  # KV heads, a divisor of theirs
        ("first_splits", ctypes.c_int64),  # int64 [rows + 1]: splits of the rows before; 0: a piece is all of a row's
        ("found", ctypes.c_int64),  # [splits, kv_heads] x head_bytes, where pieces are splits
        ("counts", ctypes.c_int64),  # int64 [rows, kv_heads / piece_heads], there: how many have ended, 0 at first
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def _attend_splits(query, keys, values, stride, table, seen, splits, shape, scale, room, found, of_split):
    """One token's heads of some KV heads over some splits of the context, which are merged.

    Args:
        seen: first and end of the positions, of all splits; splits: first and end of those to attend to.
        shape: (KV heads, per_kv, head_dim)
        of_split: head_bytes for each head, of use here.
        others: see _attend_span.
    """
    end_block = (min(seen[1], splits[1] * SPLIT_TOKENS) + BLOCK_SIZE - 1) // BLOCK_SIZE
    of_span = (shape[0], 1, shape[1], shape[2])
    for split in range(splits[0], splits[1]):
        into = found if split == splits[0] else of_split
        first, end = max(seen[0], split * SPLIT_TOKENS), min(seen[1], (split + 1) * SPLIT_TOKENS)
        _attend_span(
            query,
            keys,
            values,
            stride,
            table,
            (first, end),
            end_block,
            of_span,
            end - 1,
            end - first,
            scale,
            room,
            into,
        )
        if split > splits[0]:
            _merge_heads(found, of_split, shape)


@njit(cache=True)
def _merge_heads(found, other, shape):
    num_heads, per_kv, head_dim = shape
    of_sums, of_head = sums_bytes(head_dim, per_kv), head_bytes(per_kv, head_dim)
    for at in range(0, num_heads * of_head, of_head):
        merge(found + at, found + at + of_sums, other + at, other + at + of_sums, per_kv, head_dim)


@njit(cache=True)
def _write_heads(found, shape, out):
    num_heads, per_kv, head_dim = shape
    of_sums, of_head = sums_bytes(head_dim, per_kv), head_bytes(per_kv, head_dim)
    for head in range(num_heads):
        at = found + head * of_head
        write(at, at + of_sums, 1, per_kv, head_dim, out + head * 2 * per_kv * head_dim, 0)


@njit(cache=True)
def _row_of(first_splits, split):
    row = 0
    while load_integer(first_splits + 8 * (row + 1)) <= split:
        row += 1
    return row


@cfunc(types.void(types.int64), cache=True)
def attend_decodes(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of DecodeArguments."""
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values = load_integer(arguments + 24), load_integer(arguments + 32)
    tables, table_width = load_integer(arguments + 40), load_integer(arguments + 48)
    ends, window = load_integer(arguments + 56), load_integer(arguments + 64)
    out, num_rows = load_integer(arguments + 72), load_integer(arguments + 80)
    num_kv_heads, per_kv = load_integer(arguments + 88), load_integer(arguments + 96)
    head_dim, piece_heads = load_integer(arguments + 104), load_integer(arguments + 112)
    first_splits, found = load_integer(arguments + 120), load_integer(arguments + 128)
    counts, scale = load_integer(arguments + 136), load_float(arguments + 144)
    of_head, sizes = head_bytes(per_kv, head_dim), chunk_room(head_dim, per_kv)
    size = sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * piece_heads * of_head
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    turned = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    paired = turned + sizes[0]
    scores = paired + sizes[1]
    shares = scores + sizes[2]
    of_piece = shares + sizes[3]
    of_split = of_piece + piece_heads * of_head
    shape, room, width = (piece_heads, per_kv, head_dim), (turned, paired, scores, shares), 2 * per_kv * head_dim
    num_groups, split_bytes = num_kv_heads // piece_heads, num_kv_heads * of_head
    num_units = load_integer(first_splits + 8 * num_rows) if first_splits else num_rows
    piece = take_next(arguments)
    while piece < num_units * num_groups:
        unit, group = piece // num_groups, piece % num_groups
        row = _row_of(first_splits, unit) if first_splits else unit
        first_head, end = group * piece_heads, load_integer(ends + 8 * row)
        first = max(0, end - window)
        split, end_split, into = first // SPLIT_TOKENS, (end + SPLIT_TOKENS - 1) // SPLIT_TOKENS, of_piece
        num_splits, first_unit = end_split - split, unit
        if first_splits:
            first_unit = load_integer(first_splits + 8 * row)
            split += unit - first_unit
            end_split = split + 1
            into = found + unit * split_bytes + first_head * of_head
        _attend_splits(
            query + row * query_stride + first_head * width,
            keys + 2 * first_head * head_dim,
            values + 2 * first_head * head_dim,
            2 * num_kv_heads * head_dim,
            tables + 8 * row * table_width,
            (first, end),
            (split, end_split),
            shape,
            scale,
            room,
            into,
            of_split,
        )
        if first_splits == 0:
            _write_heads(into, shape, out + (row * num_kv_heads + first_head) * width)
        elif take_next(counts + 8 * (row * num_groups + group)) == num_splits - 1:
            into = found + first_unit * split_bytes + first_head * of_head
            for number in range(1, num_splits):
                _merge_heads(into, into + number * split_bytes, shape)
            _write_heads(into, shape, out + (row * num_kv_heads + first_head) * width)
        piece = take_next(arguments)
    keep(memory)


class PromptArguments(ctypes.Structure):
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
        ("head_dim", ctypes.c_int64),
        ("scale", ctypes.c_float),  # of scores, log2(e) counted in
    )


@njit(cache=True)
def _copy_query(query, stride, num_tokens, row_bytes, target):
    for token in range(num_tokens):
        for index in range(0, row_bytes, REGISTER_BYTES):
            store_pairs(target + token * row_bytes + index, load_pairs(query + token * stride + index))


@cfunc(types.void(types.int64), cache=True)
def attend_prompt(arguments):
    """Take pieces until none is left, the longest first: any number of threads at once.

    arguments: the address of PromptArguments.
    """
    query, query_stride = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values, table = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    start, num_tokens = load_integer(arguments + 48), load_integer(arguments + 56)
    window, out, num_kv_heads = load_integer(arguments + 64), load_integer(arguments + 72), load_integer(arguments + 80)
    per_kv, head_dim = load_integer(arguments + 88), load_integer(arguments + 96)
    scale = load_float(arguments + 104)
    most_tokens = max(1, PROMPT_ROWS // per_kv)
    most_rows = most_tokens * per_kv
    sizes, copy_bytes = chunk_room(head_dim, most_rows), 2 * most_rows * head_dim
    size = copy_bytes + sizes[0] + sizes[1] + sizes[2] + sizes[3] + head_bytes(most_rows, head_dim)
    memory = np.empty(size + REGISTER_BYTES, dtype=np.uint8)
    copied = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    turned = copied + copy_bytes
    paired = turned + sizes[0]
    scores = paired + sizes[1]
    shares = scores + sizes[2]
    room, found = (turned, paired, scores, shares), shares + sizes[3]
    width = 2 * per_kv * head_dim
    num_tiles = (num_tokens + most_tokens - 1) // most_tokens
    piece = take_next(arguments)
    while piece < num_tiles * num_kv_heads:
        first, head = (num_tiles - 1 - piece // num_kv_heads) * most_tokens, piece % num_kv_heads
        some = min(most_tokens, num_tokens - first)
        position, end = start + first, start + first + some
        _copy_query(query + first * query_stride + head * width, query_stride, some, width, copied)
        _attend_span(
            copied,
            keys + 2 * head * head_dim,
            values + 2 * head * head_dim,
            2 * num_kv_heads * head_dim,
            table,
            (max(0, position + 1 - window), end),
            (end + BLOCK_SIZE - 1) // BLOCK_SIZE,
            (1, some, per_kv, head_dim),
            position,
            window,
            scale,
            room,
            found,
        )
        into = out + first * num_kv_heads * width + head * width
        tops = found + sums_bytes(head_dim, some * per_kv)
        write(found, tops, some, per_kv, head_dim, into, num_kv_heads * width)
        piece = take_next(arguments)
    keep(memory)


class PagedAttention:
    """AttentionKernels with as many threads as torch has. Not for two threads at once: the arguments are its own."""

    index_dtype = torch.int64
    are_own_tokens_alone = True
    prompt_tile = 1  # it computes the new tokens alone

    def __init__(self) -> None:
        self._decode, self._decode_arguments = Kernel(attend_decodes), DecodeArguments()
        self._prompt, self._prompt_arguments = Kernel(attend_prompt), PromptArguments()

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See AttentionKernels: a step's room is its own."""

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. query: bf16; a token's heads lie together. scores: are plain."""
        num_tokens, num_heads, head_dim = query.shape
        out = query.new_empty((num_tokens, num_heads * head_dim))
        scale = (head_dim**-0.5 if scores.scale is None else scores.scale) * LOG2_E
        if rows.num_decodes:
            self._attend_decodes(query, kv, rows, scale, out)
        if len(rows.ends) > rows.num_decodes:
            self._attend_prompts(query, kv, rows, scale, out)
        return out

    def _attend_decodes(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scale: float, out: Tensor) -> None:
        _, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        per_kv, num_threads = num_heads // num_kv_heads, torch.get_num_threads()
        pieces = rows.layout
        if not isinstance(pieces, Pieces):
            ends = rows.ends[: rows.num_decodes].tolist()
            pieces = rows.layout = divide(ends, rows.window, num_kv_heads, per_kv, head_dim, num_threads)
        told = self._decode_arguments
        told.next_piece = 0
        told.query, told.query_stride = query.data_ptr(), query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.tables, told.table_width = rows.tables.data_ptr(), rows.tables.shape[1]
        told.ends, told.window = rows.ends.data_ptr(), NO_WINDOW if rows.window is None else rows.window
        told.out, told.num_rows = out.data_ptr(), rows.num_decodes
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, per_kv, head_dim
        told.scale, told.piece_heads = scale, pieces.num_heads
        splits = pieces.splits
        if splits is None:
            told.first_splits = 0
        else:
            splits.counts.zero_()
            told.first_splits, told.found = splits.first_splits.data_ptr(), splits.found.data_ptr()
            told.counts = splits.counts.data_ptr()
        self._decode(told, num_threads)

    def _attend_prompts(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scale: float, out: Tensor) -> None:
        """Row by row: threads share each."""
        _, num_heads, head_dim = query.shape
        num_kv_heads = kv.keys.shape[1]
        told = self._prompt_arguments
        told.query_stride = query.stride(0) * query.element_size()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.window = NO_WINDOW if rows.window is None else rows.window
        told.num_kv_heads, told.per_kv, told.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        told.scale = scale
        tables, table_bytes = rows.tables.data_ptr(), rows.tables.stride(0) * rows.tables.element_size()
        ends, offsets = rows.ends.tolist(), rows.offsets.tolist()
        for row in range(rows.num_decodes, len(ends)):
            first, num_tokens = offsets[row], offsets[row + 1] - offsets[row]
            told.next_piece = 0
            told.query, told.table = query.data_ptr() + first * told.query_stride, tables + row * table_bytes
            told.start, told.num_tokens = ends[row] - num_tokens, num_tokens
            told.out = out.data_ptr() + first * out.stride(0) * out.element_size()
            self._prompt(told, torch.get_num_threads())


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Where pieces are splits of a row's context.

    Args:
        first_splits: int64 [rows + 1]: splits of the rows before.
        found: bytes: what each split of each KV head has found, until it is merged.
        counts: int64 [rows, KV heads / those of a piece]: splits that have ended; zeros before each use.
    """

    first_splits: Tensor
    found: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What a thread takes at a time of rows of one token; the same in all layers of a step that see as far.

    Args:
        num_heads: KV heads, a divisor of theirs.
        splits: None: all of a row's context.
    """

    num_heads: int
    splits: Splits | None


def divide(
    ends: list[int], window: int | None, num_kv_heads: int, per_kv: int, head_dim: int, num_threads: int
) -> Pieces:
    """Whole rows, where the longest is a small part of a thread's share; otherwise their splits.

    KV heads: as many as PIECE_BYTES hold, unless few pieces would not divide evenly among the threads.
    """
    lengths = [end if window is None else min(end, window) for end in ends]
    wanted = min(num_kv_heads, max(1, PIECE_BYTES // (2 * head_dim)))
    num_heads = next(count for count in range(wanted, 0, -1) if num_kv_heads % count == 0)
    is_even = max(lengths) * num_threads * SHARED_ROWS <= sum(lengths)
    if num_threads == 1 or is_even or max(ends) <= SPLIT_TOKENS:
        is_shared = len(ends) % num_threads == 0 or len(ends) >= SHARED_ROWS * num_threads
        return Pieces(num_heads if is_shared else 1, None)
    firsts = [0]
    for end, length in zip(ends, lengths, strict=True):
        firsts.append(firsts[-1] + -(-end // SPLIT_TOKENS) - (end - length) // SPLIT_TOKENS)
    if firsts[-1] < SHARED_ROWS * num_threads:
        num_heads = 1
    found = torch.empty(firsts[-1] * num_kv_heads * head_bytes(per_kv, head_dim), dtype=torch.uint8)
    counts = torch.empty((len(ends), num_kv_heads // num_heads), dtype=torch.int64)
    return Pieces(num_heads, Splits(torch.tensor(firsts), found, counts))
