"""Attention over block tables by Triton's kernels, and their launches. Thread: engine.

One launch per layer serves all rows of a step, and a second one merges where contexts may be split. A row's result does
not depend on the others: its own length decides where it is split (sizes.py), and the step's load decides only which
program computes a split.

Rows of one new token: a program has the query heads of one KV head and reads their keys and values once; several
programs share a long context, and merge() adds their results in order. Splits depend on a row's own length and on
constants alone, so its sums are the same to the last bit whoever shares the step. That costs one float32 sum of values
per split and query head, written and read again: 3 to 6 % of the bytes of the split's keys and values, for 4 to 8 query
heads a KV head.

Rows of several: a program has a tile: as many tokens of a row, with the query heads of one KV head, as fill M rows of a
matmul. It passes over the row's keys in order, from the first that one of its tokens sees; keys that all of them see
are not masked. Wherever a chunk begins, a token's keys come to it in the same tiles of KV_TOKENS and in the same order,
and keys it does not see change nothing: its sums are the same to the last bit however its prompt is cut.

Over a cache in 8 bits decodes multiply integers: queries and shares in 16 bits, as two of 8 bits, so that neither keys
nor values are converted: compiled for an H100, a tile takes half the instructions, and reading needs but half the time.
Prompts convert a tile for many rows at once. Scales, one for a head of a token, multiply scores and shares.

Sums are float32; scores stay as they leave the matmul and are scaled in the exponent, so that masked and unmasked
passes round alike. Sources: online softmax, arXiv:1805.02867; Flash-Decoding (Dao et al., 2023); FlashAttention-2,
arXiv:2307.08691, the causal forward pass.
"""

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, RaggedRows, Scores
from gpu.kernels.sizes import KernelShape, Tiles, kernel_shape
from gpu.kv_cache import LayerKV

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_DECODES = 1 << 16  # of a launch, unless there is room for fewer
PROGRAMS_PER_MULTIPROCESSOR = 2  # that decode: registers leave room for two, 85 in each of 256 threads
MOST_OF_TWO_BYTES = tl.constexpr(127.0 * 256 + 127)
LEAST_LARGEST = tl.constexpr(1e-30)  # of numbers: what is smaller becomes 0
TO_INTEGER, INTEGER_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)  # added, it rounds to an integer
# Of shares that scales multiply: float16 has few numbers near 0. The scale of its largest numbers is 516, and 64 times
# that is still one of its numbers.
LIFT = tl.constexpr(64.0)


class Cache(NamedTuple):
    """A layer's keys and values, and the model's heads. No field is `values`, which Triton's own tuples have.

    Args:
        key_cache, value_cache: [slots, KV_HEADS, HEAD_DIM]; IN_8_BITS: int8 [blocks, KV_HEADS, BLOCK, HEAD_DIM] and
            [blocks, KV_HEADS, HEAD_DIM, BLOCK], with the head's scales behind each [BLOCK, HEAD_DIM].
        key_scales, value_scales: float32, those of the first block's first head; read where IN_8_BITS.
        tables: [rows, blocks], rows table_stride apart.
        PER_KV: query heads of a KV head.
        D_PAD: HEAD_DIM's next power of two.
        BLOCK: slots of a block.
    """

    key_cache: Any
    value_cache: Any
    key_scales: Any
    value_scales: Any
    tables: Any
    table_stride: Any
    KV_HEADS: Any
    PER_KV: Any
    HEAD_DIM: Any
    D_PAD: Any
    BLOCK: Any
    IN_8_BITS: Any


class Scoring(NamedTuple):
    """How the results of matmuls become scores.

    Args:
        window: the latest tokens that a token sees, itself among them; read where HAS_WINDOW.
        scale: of the scores, before a cap.
        factor: of the scores, in the exponent of 2.
        cap: read where HAS_CAP.
        sinks: [heads]; read where HAS_SINKS.
        PRECISION: of matmuls.
    """

    window: Any
    scale: Any
    factor: Any
    cap: Any
    sinks: Any
    HAS_WINDOW: Any
    HAS_CAP: Any
    HAS_SINKS: Any
    PRECISION: Any


@triton.jit
def starting_sums(scoring, heads, is_real, has_sink, M: tl.constexpr, D_PAD: tl.constexpr):
    """(top, total, out) before any key: nothing, or a sink's share, which adds no value.

    Args:
        heads, is_real: [M].
        has_sink: whether this walk includes the sinks.
    """
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if scoring.HAS_SINKS:
        sink = tl.load(scoring.sinks + heads, mask=is_real, other=0.0).to(tl.float32) * LOG2_E / scoring.factor
        top = tl.where(has_sink, sink, top)
        total = tl.where(has_sink, total + 1.0, total)
    return top, total, tl.zeros([M, D_PAD], tl.float32)


@triton.jit
def _load_tile(keys, values, table, cache, seen, is_known, MASKED: tl.constexpr):
    """(keys, values), [KV_TOKENS, D_PAD], of one KV head at a row's positions; masked: zeros unless is_known.

    Args:
        keys, values: of the KV head, in the first slot.
        table: [blocks], of the row.
    """
    if MASKED:
        block = tl.load(table + seen // cache.BLOCK, mask=is_known, other=0)
    else:
        block = tl.load(table + seen // cache.BLOCK)
    slot = block.to(tl.int64) * cache.BLOCK + seen % cache.BLOCK
    dims = tl.arange(0, cache.D_PAD)
    address = slot[:, None] * (cache.KV_HEADS * cache.HEAD_DIM) + dims[None, :]
    is_read = (dims < cache.HEAD_DIM)[None, :]
    if MASKED:
        is_read = is_known[:, None] & is_read
    if MASKED or cache.D_PAD != cache.HEAD_DIM:
        key = tl.load(keys + address, mask=is_read, other=0.0)
        value = tl.load(values + address, mask=is_read, other=0.0)
    else:
        key = tl.load(keys + address)
        value = tl.load(values + address)
    return key, value


@triton.jit
def _load_integers(cache, table, kv_head, seen, is_known, end, MASKED: tl.constexpr):
    """(keys, values, their scales), int8 [KV_TOKENS, D_PAD] and float32 [KV_TOKENS], of one KV head.

    Masked: scales are 0 unless is_known; integers of a block that begins before `end` are those that lie there.
    """
    head_bytes: tl.constexpr = cache.BLOCK * (cache.HEAD_DIM + 4)
    dims, place = tl.arange(0, cache.D_PAD), seen % cache.BLOCK
    is_begun, is_inside = seen // cache.BLOCK * cache.BLOCK < end, dims < cache.HEAD_DIM
    if MASKED:
        block = tl.load(table + seen // cache.BLOCK, mask=is_begun, other=0)
    else:
        block = tl.load(table + seen // cache.BLOCK)
    block = block.to(tl.int64)
    start = block * (cache.KV_HEADS * head_bytes)
    keys = cache.key_cache + kv_head * head_bytes + (start + place * cache.HEAD_DIM)[:, None] + dims[None, :]
    # a block's tokens lie side by side
    by_dims = tl.max_contiguous(tl.multiple_of(start + place, cache.BLOCK), cache.BLOCK)
    values = cache.value_cache + kv_head * head_bytes + by_dims[None, :] + (dims * cache.BLOCK)[:, None]
    scales = block * (cache.KV_HEADS * head_bytes // 4) + place
    key_scales = cache.key_scales + kv_head * (head_bytes // 4) + scales
    value_scales = cache.value_scales + kv_head * (head_bytes // 4) + scales
    if MASKED:
        key_scale = tl.load(key_scales, mask=is_known, other=0.0)
        value_scale = tl.load(value_scales, mask=is_known, other=0.0)
    else:
        key_scale, value_scale = tl.load(key_scales), tl.load(value_scales)
    if MASKED or cache.D_PAD != cache.HEAD_DIM:
        key = tl.load(keys, mask=is_begun[:, None] & is_inside[None, :], other=0)
        value = tl.trans(tl.load(values, mask=is_begun[None, :] & is_inside[:, None], other=0))
    else:
        key, value = tl.load(keys), tl.trans(tl.load(values))
    return key, value, key_scale, value_scale


@triton.jit
def _two_bytes(x):
    """(high, low), int8: x, float32 of up to MOST_OF_TWO_BYTES, rounded, is 256 * high + low."""
    whole = (x + TO_INTEGER).to(tl.int32, bitcast=True) - INTEGER_BITS
    high = (whole + 128) >> 8
    return high.to(tl.int8), (whole - (high << 8)).to(tl.int8)


@triton.jit
def _multiply(high, low, integers):
    """(256 * high + low) @ integers, exactly, as float32."""
    of_high = tl.dot(high, integers, out_dtype=tl.int32)
    return tl.dot(low, integers, acc=of_high << 8, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def walk_integers(
    query,  # [M, D_PAD]
    top,  # top, total, out, cache, row, kv_head, scoring, begin, first, end, KV_TOKENS: see walk()
    total,
    out,
    cache,
    row,
    kv_head,
    scoring,
    begin,
    first,
    end,
    KV_TOKENS: tl.constexpr,
):
    """As walk() of queries that see all from first to end, over integers."""
    query = query.to(tl.float32)
    largest = tl.max(tl.abs(query), 1)
    high, low = _two_bytes(query * (1.0 / tl.maximum(largest, LEAST_LARGEST) * MOST_OF_TWO_BYTES)[:, None])
    query_scale = largest / MOST_OF_TWO_BYTES + tl.sum(query * 0.0, 1)  # not finite where a number is not
    table = cache.tables + row.to(tl.int64) * cache.table_stride
    places = tl.arange(0, KV_TOKENS)
    for tile in tl.range(begin, end, KV_TOKENS):
        seen = tl.multiple_of(tile, cache.BLOCK) + places
        is_known = (seen >= first) & (seen < end)
        key, value, key_scale, value_scale = _load_integers(cache, table, kv_head, seen, is_known, end, True)
        key_scale += value_scale * 0.0  # shares are sums of integers: what is not finite is told by the score
        score = _multiply(high, low, tl.trans(key)) * query_scale[:, None] * key_scale[None, :]
        if scoring.HAS_CAP:
            score = scoring.cap * (2.0 * tl.sigmoid(score * (2.0 * scoring.scale / scoring.cap)) - 1.0)
        score = tl.where(is_known[None, :], score, float("-inf"))
        # The tile's own highest score is the base of its shares: in 16 bits, the small would be 0 beside an earlier one
        own_top = tl.max(score, 1)
        highest = tl.maximum(top, own_top)
        base = tl.where(highest == float("-inf"), 0.0, highest)  # see _add_tile
        own_base = tl.where(own_top == float("-inf"), 0.0, own_top)
        grow, shrink = tl.exp2((own_top - base) * scoring.factor), tl.exp2((top - base) * scoring.factor)
        share = tl.exp2((score - own_base[:, None]) * scoring.factor)
        total = total * shrink + tl.sum(share, 1) * grow
        largest_scale = tl.max(value_scale, 0)
        by = 1.0 / tl.maximum(largest_scale, LEAST_LARGEST) * MOST_OF_TWO_BYTES
        high_share, low_share = _two_bytes(share * (value_scale * by)[None, :])
        grow *= largest_scale / MOST_OF_TWO_BYTES
        out = out * shrink[:, None] + _multiply(high_share, low_share, value) * grow[:, None]
        top = highest
    return top, total, out


@triton.jit
def _add_tile(top, total, out, score, value, value_scale, scoring):
    """(top, total, out) with a tile's values, [KV_TOKENS, D_PAD], by their scores, [M, KV_TOKENS].

    value_scale: [KV_TOKENS], or None.
    """
    highest = tl.maximum(top, tl.max(score, 1))
    # nothing seen yet: a finite base gives shares of 0 instead of NaN
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2((score - base[:, None]) * scoring.factor)
    shrink = tl.exp2((top - base) * scoring.factor)
    total = total * shrink + tl.sum(share, 1)
    if value_scale is not None:
        share *= (value_scale * LIFT)[None, :]
    out = tl.dot(share.to(value.dtype), value, out * shrink[:, None], input_precision=scoring.PRECISION)
    return highest, total, out


@triton.jit
def walk(
    query,  # [M, D_PAD]
    top,  # [M]: the highest score so far, unscaled
    total,  # [M]: sum of the shares so far, as multiples of the top's
    out,  # [M, D_PAD]: sum of the values so far, by their shares; IN_8_BITS: LIFT times that
    cache,
    row,
    kv_head,
    scoring,
    positions,  # [M]: of the queries' tokens; read where MASKED
    begin,  # of the positions that are read: a multiple of BLOCK
    first,  # no query sees anything before
    end,  # nor from here on; a multiple of KV_TOKENS unless masked
    KV_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # and `first` does not cover it for all queries
):
    """(top, total, out) after the keys at positions from begin to end, KV_TOKENS at a time.

    Masked: each query sees what its position and the window allow; otherwise all queries see all keys.
    """
    keys, values = cache.key_cache + kv_head * cache.HEAD_DIM, cache.value_cache + kv_head * cache.HEAD_DIM
    table = cache.tables + row.to(tl.int64) * cache.table_stride
    places = tl.arange(0, KV_TOKENS)
    for tile in tl.range(begin, end, KV_TOKENS):
        seen = tile + places
        is_known = (seen >= first) & (seen < end)
        if cache.IN_8_BITS:
            key, value, key_scale, value_scale = _load_integers(cache, table, kv_head, seen, is_known, end, MASKED)
            key, value = key.to(query.dtype), value.to(query.dtype)
        else:
            key, value = _load_tile(keys, values, table, cache, seen, is_known, MASKED)
            key_scale, value_scale = None, None
        score = tl.dot(query, tl.trans(key), input_precision=scoring.PRECISION)  # [M, KV_TOKENS]
        if cache.IN_8_BITS:
            score *= key_scale[None, :]
        if scoring.HAS_CAP:  # cap * tanh(score * scale / cap)
            score = scoring.cap * (2.0 * tl.sigmoid(score * (2.0 * scoring.scale / scoring.cap)) - 1.0)
        if MASKED:
            is_seen = is_known[None, :] & (seen[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen &= seen[None, :] > positions[:, None] - scoring.window
            score = tl.where(is_seen, score, float("-inf"))
        top, total, out = _add_tile(top, total, out, score, value, value_scale, scoring)
    return top, total, out


@triton.jit
def shares_of(total, summed):
    """Sums of values over the sums of shares, [M, D_PAD]; zeros where nothing was seen."""
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]


class Splits(NamedTuple):
    """How contexts are cut, and the partial results of those that are cut into several splits.

    Args:
        items: [splits]: row | index of the split << 16.
        offsets: [rows + 1]: where a row's splits begin.
        outs: [splits, heads, HEAD_DIM], float32: sums of values, as walk() leaves them.
        tops, totals: [splits, heads], float32: likewise.
    """

    items: Any
    offsets: Any
    outs: Any
    tops: Any
    totals: Any


@triton.jit
def split_tokens(num_seen, KV_TOKENS: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Tokens of each split of a context (the last may have fewer): LEAST, or what makes MOST_SPLITS splits."""
    shared = tl.cdiv(tl.cdiv(num_seen, MOST_SPLITS), KV_TOKENS) * KV_TOKENS
    return tl.maximum(shared, LEAST)


@triton.jit
def first_seen(end, window, BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """(the first position that the last token before `end` sees, the first one of its block)"""
    first = end * 0
    if HAS_WINDOW:
        first = tl.maximum(end - window, 0)
    return first, first // BLOCK * BLOCK


@triton.jit
def _decode_split(
    item,  # of the splits
    kv_head,
    query,
    query_stride,
    cache,
    ends,
    splits,
    out,
    scoring,
    M: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """One KV head's query heads over one split of a row."""
    packed = tl.load(splits.items + item)
    row, index = packed & 0xFFFF, packed >> 16
    num_splits = tl.load(splits.offsets + row + 1) - tl.load(splits.offsets + row)
    end = tl.load(ends + row).to(tl.int32)
    first, begin = first_seen(end, scoring.window, cache.BLOCK, scoring.HAS_WINDOW)
    size = split_tokens(end - begin, KV_TOKENS, LEAST, MOST_SPLITS)
    begin += index * size

    num_heads: tl.constexpr = cache.KV_HEADS * cache.PER_KV
    members, dims = tl.arange(0, M), tl.arange(0, cache.D_PAD)
    heads, is_real = kv_head * cache.PER_KV + members, members < cache.PER_KV
    is_read = is_real[:, None] & (dims[None, :] < cache.HEAD_DIM)
    address = row.to(tl.int64) * query_stride + heads[:, None] * cache.HEAD_DIM + dims[None, :]
    vectors = tl.load(query + address, mask=is_read, other=0.0)
    top, total, summed = starting_sums(scoring, heads, is_real, index == 0, M, cache.D_PAD)
    positions = tl.zeros([M], tl.int32) + (end - 1)  # the window is in `first`, as there is one token
    last = tl.minimum(begin + size, end)
    if cache.IN_8_BITS:
        top, total, summed = walk_integers(
            vectors, top, total, summed, cache, row, kv_head, scoring, begin, first, last, KV_TOKENS
        )  # fmt: skip
    else:
        top, total, summed = walk(
            vectors, top, total, summed, cache, row, kv_head, scoring, positions, begin, first, last,
            KV_TOKENS, True, False,
        )  # fmt: skip
    if num_splits == 1:
        address = (row * num_heads + heads)[:, None].to(tl.int64) * cache.HEAD_DIM + dims[None, :]
        tl.store(out + address, shares_of(total, summed).to(out.dtype.element_ty), mask=is_read)
    else:
        place = item * num_heads + heads
        tl.store(splits.tops + place, top, mask=is_real)
        tl.store(splits.totals + place, total, mask=is_real)
        address = place[:, None].to(tl.int64) * cache.HEAD_DIM + dims[None, :]
        tl.store(splits.outs + address, summed, mask=is_read)


@triton.jit
def decode_share(
    first,  # of the programs that decode
    num_rows,
    num_programs,
    query,  # [tokens, heads, HEAD_DIM]
    query_stride,  # numbers from token to token
    cache,
    ends,  # [rows]: one past the row's token; 0: the row sees nothing, and its output is zeros
    splits,
    out,  # [tokens, heads, HEAD_DIM]: of rows of one split
    scoring,
    M: tl.constexpr,  # >= PER_KV
    KV_TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """One program's share of the splits of all rows: every num_programs-th."""
    num_items = tl.load(splits.offsets + num_rows) * cache.KV_HEADS
    for item in range(first, num_items, num_programs):
        _decode_split(
            item // cache.KV_HEADS, item % cache.KV_HEADS, query, query_stride, cache, ends, splits, out, scoring,
            M, KV_TOKENS, LEAST, MOST_SPLITS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_programs", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "ends"],
)
def decode(
    num_rows, num_programs, query, query_stride, keys, values, key_scales, value_scales, tables, table_stride, ends,
    splits, split_offsets, sinks, part_outs, part_tops, part_totals, out, window, scale, factor, cap,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, KV_TOKENS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    IN_8_BITS: tl.constexpr,
):  # fmt: skip
    """All splits of all rows. Program: one of num_programs; see decode_share, Cache, Scoring and Splits."""
    decode_share(
        tl.program_id(0), num_rows, num_programs, query, query_stride,
        Cache(
            keys, values, key_scales, value_scales, tables, table_stride, KV_HEADS, PER_KV, HEAD_DIM, D_PAD, BLOCK,
            IN_8_BITS,
        ),
        ends, Splits(splits, split_offsets, part_outs, part_tops, part_totals), out,
        Scoring(window, scale, factor, cap, sinks, HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
        M, KV_TOKENS, LEAST, MOST_SPLITS,
    )  # fmt: skip


@triton.jit
def merge(
    split_offsets,  # [rows + 1]
    part_outs,  # [splits, heads, HEAD_DIM]
    part_tops,  # [splits, heads]
    part_totals,  # [splits, heads]
    out,  # [tokens, heads, HEAD_DIM]
    factor,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    HEADS_PAD: tl.constexpr,  # >= PER_KV
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,  # >= the most splits of a row
    AT_A_TIME: tl.constexpr,  # splits
):
    """Add the results of a row's splits. Program: a row, and the query heads of a KV head."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    base = tl.load(split_offsets + row)
    num_splits = tl.load(split_offsets + row + 1) - base
    if num_splits > 1:
        members, dims = tl.arange(0, HEADS_PAD), tl.arange(0, D_PAD)
        heads, is_real = kv_head * PER_KV + members, members < PER_KV
        indexes = tl.arange(0, SPLITS_PAD)
        places = (base + indexes)[:, None] * (KV_HEADS * PER_KV) + heads[None, :]
        is_split = (indexes < num_splits)[:, None] & is_real[None, :]
        tops = tl.load(part_tops + places, mask=is_split, other=float("-inf"))
        totals = tl.load(part_totals + places, mask=is_split, other=0.0)
        top = tl.where(is_real, tl.max(tops, 0), 0.0)
        total = tl.sum(totals * tl.exp2((tops - top[None, :]) * factor), 0)
        summed = tl.zeros([HEADS_PAD, D_PAD], tl.float32)
        is_read = is_real[:, None] & (dims[None, :] < HEAD_DIM)
        for first in range(0, num_splits, AT_A_TIME):
            some = first + tl.arange(0, AT_A_TIME)
            some_places = (base + some)[:, None] * (KV_HEADS * PER_KV) + heads[None, :]
            is_some = (some < num_splits)[:, None] & is_real[None, :]
            some_tops = tl.load(part_tops + some_places, mask=is_some, other=float("-inf"))
            weights = tl.exp2((some_tops - top[None, :]) * factor)
            parts = tl.load(
                part_outs + some_places[:, :, None].to(tl.int64) * HEAD_DIM + dims[None, None, :],
                mask=is_some[:, :, None] & is_read[None, :, :],
                other=0.0,
            )
            summed += tl.sum(parts * weights[:, :, None], 0)
        address = (row * KV_HEADS * PER_KV + heads)[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
        result = summed / tl.where(is_real, total, 1.0)[:, None]
        tl.store(out + address, result.to(out.dtype.element_ty), mask=is_read)


@triton.jit
def _extend_tile(
    tile,
    kv_head,
    query,  # [tokens, heads, HEAD_DIM]
    query_stride,
    cache,
    ends,  # [rows]
    offsets,  # [rows + 1]
    tiles,  # row | index of the tile << 16
    out,  # [tokens, heads, HEAD_DIM]
    scoring,
    M: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # M // PER_KV
    KV_TOKENS: tl.constexpr,
):
    """The query heads of one KV head, of one tile of a row's tokens."""
    packed = tl.load(tiles + tile)
    row, index = packed & 0xFFFF, packed >> 16
    offset = tl.load(offsets + row).to(tl.int32)
    num_new = tl.load(offsets + row + 1).to(tl.int32) - offset
    start = tl.load(ends + row).to(tl.int32) - num_new
    tile_start = index * TILE_TOKENS
    tile_end = tl.minimum(tile_start + TILE_TOKENS, num_new)  # among the row's new tokens
    begin, end = start + tile_start, start + tile_end  # positions

    members, dims = tl.arange(0, M), tl.arange(0, cache.D_PAD)
    tokens = tile_start + members // cache.PER_KV
    heads = kv_head * cache.PER_KV + members % cache.PER_KV
    is_real = tokens < tile_end
    is_read = is_real[:, None] & (dims[None, :] < cache.HEAD_DIM)
    address = (offset + tokens).to(tl.int64) * query_stride + heads * cache.HEAD_DIM
    vectors = tl.load(query + address[:, None] + dims[None, :], mask=is_read, other=0.0)
    top, total, summed = starting_sums(scoring, heads, is_real, True, M, cache.D_PAD)
    first = 0
    masked = (begin + 1) // KV_TOKENS * KV_TOKENS  # every token of the tile sees what lies before
    if scoring.HAS_WINDOW:
        first = tl.maximum(begin + 1 - scoring.window, 0)
        masked = first // KV_TOKENS * KV_TOKENS
    else:
        top, total, summed = walk(
            vectors, top, total, summed, cache, row, kv_head, scoring, start + tokens, 0, 0, masked,
            KV_TOKENS, False, False,
        )  # fmt: skip
    top, total, summed = walk(
        vectors, top, total, summed, cache, row, kv_head, scoring, start + tokens, masked, first, end,
        KV_TOKENS, True, scoring.HAS_WINDOW,
    )  # fmt: skip
    if cache.IN_8_BITS:
        summed *= 1.0 / LIFT
    address = ((offset + tokens).to(tl.int64) * (cache.KV_HEADS * cache.PER_KV) + heads) * cache.HEAD_DIM
    result = shares_of(total, summed).to(out.dtype.element_ty)
    tl.store(out + address[:, None] + dims[None, :], result, mask=is_read)


@triton.jit
def _extend_or_decode(
    num_decodes,
    num_programs,
    query,
    query_stride,
    cache,
    ends,
    offsets,
    tiles,
    num_tiles,
    splits,
    out,
    scoring,
    M: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    DECODE_M: tl.constexpr,
    DECODE_KV_TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """One program of extend_and_decode."""
    program = tl.program_id(0)
    num_before = program * num_programs // tl.num_programs(0)  # that decode
    if (program + 1) * num_programs // tl.num_programs(0) == num_before:
        piece = program - num_before
        if piece // cache.KV_HEADS < tl.load(num_tiles):
            _extend_tile(
                piece // cache.KV_HEADS, piece % cache.KV_HEADS, query, query_stride, cache, ends, offsets, tiles, out,
                scoring, M, TILE_TOKENS, KV_TOKENS,
            )  # fmt: skip
    else:
        decode_share(
            num_before, num_decodes, num_programs, query, query_stride, cache, ends, splits, out, scoring,
            DECODE_M, DECODE_KV_TOKENS, LEAST, MOST_SPLITS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_decodes", "num_programs", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "ends", "offsets"],
)
def extend_and_decode(
    num_decodes, num_programs, query, query_stride, keys, values, key_scales, value_scales, tables, table_stride, ends,
    offsets, tiles, num_tiles, splits, split_offsets, sinks, part_outs, part_tops, part_totals, out,
    window, scale, factor, cap,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, TILE_TOKENS: tl.constexpr, KV_TOKENS: tl.constexpr,
    DECODE_M: tl.constexpr, DECODE_KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    IN_8_BITS: tl.constexpr,
):  # fmt: skip
    """Prompts and decodes. Tiles are bound by arithmetic, splits by reading: programs alternate, so that both go on.

    Program: a KV head of a tile, or nothing; or one of num_programs that decode. See _extend_tile and decode_share.
    """
    _extend_or_decode(
        num_decodes, num_programs, query, query_stride,
        Cache(
            keys, values, key_scales, value_scales, tables, table_stride, KV_HEADS, PER_KV, HEAD_DIM, D_PAD, BLOCK,
            IN_8_BITS,
        ),
        ends, offsets, tiles, num_tiles, Splits(splits, split_offsets, part_outs, part_tops, part_totals), out,
        Scoring(window, scale, factor, cap, sinks, HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
        M, TILE_TOKENS, KV_TOKENS, DECODE_M, DECODE_KV_TOKENS, LEAST, MOST_SPLITS,
    )  # fmt: skip


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
    """Cut decodes into splits of their context, and the other rows into tiles of their tokens. One program.

    It runs once per step and window, for all layers, and reads the rows' lengths on the device, so that a CUDA graph of
    a fixed grid serves rows of any length.
    """
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


@dataclass(slots=True)
class _Layout:
    """How a step's rows are divided: made for its first layer.

    Args:
        most_tiles: upper bound of all tiles.
        most_splits: upper bound of one row's splits.
    """

    splits: Tensor  # int32
    split_offsets: Tensor  # int32 [decodes + 1]
    tiles: Tensor  # int32
    num_tiles: Tensor  # int32 [1]
    most_tiles: int
    most_splits: int


@dataclass(slots=True)
class _Parts:
    """Results of splits until they are merged: float32."""

    outs: Tensor  # [splits * heads * head_dim]
    tops: Tensor  # [splits * heads]
    totals: Tensor  # [splits * heads]


class PagedAttention:
    """AttentionKernels of a CUDA device. Not for two streams at once: they share the splits' results.

    Args:
        num_programs: that decode, at most; None: as many as the device runs at once.
        tiles: None: as sizes.py says.
    """

    index_dtype = torch.int32
    are_own_tokens_alone = False  # several tokens of a row share its keys
    prompt_tile = TILE_TOKENS

    def __init__(self, num_programs: int | None = None, tiles: Tiles | None = None) -> None:
        self._num_programs = num_programs
        self._tiles = tiles
        self._shape: KernelShape | None = None
        self._parts: list[_Parts] = []
        self._most_decodes = MOST_DECODES

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """See AttentionKernels."""
        self._most_decodes = num_decodes
        dtype = torch.bfloat16 if kv.is_int8 else kv.keys.dtype  # of queries of any format, splits are as many
        shape = kernel_shape(num_heads, kv.keys.shape[1], kv.head_dim, dtype, self._tiles, kv.is_int8)
        self._parts_for(num_decodes * shape.splits_of(context) * num_heads, shape, kv.keys.device)

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """See AttentionKernels. query: of the cache's format, unless that is int8; a token's heads lie together."""
        if rows.num_decodes > self._most_decodes:
            return self._attend_in_parts(query, kv, rows, scores)
        shape = self._shape_of(query, kv)
        layout = rows.layout
        if not isinstance(layout, _Layout):
            layout = rows.layout = _lay_out(rows, shape, query.shape[0] - rows.num_decodes)
        parts = self._parts_for(rows.num_decodes * layout.most_splits * shape.num_heads, shape, query.device)
        out = query.new_empty((query.shape[0], shape.num_heads * shape.head_dim))
        scale = shape.head_dim**-0.5 if scores.scale is None else scores.scale
        factor = (scale if scores.cap is None else 1.0) * math.log2(math.e)  # what a cap leaves is already scaled
        num_items = rows.num_decodes * layout.most_splits * shape.num_kv_heads
        num_programs = min(num_items, self._programs(query.device))
        cached = (kv.keys, kv.values, kv.key_scales, kv.value_scales)
        inputs = (query, query.stride(0), *cached, rows.tables, rows.tables.stride(0), rows.ends)
        found = (layout.splits, layout.split_offsets, scores.sinks, parts.outs, parts.tops, parts.totals, out)
        numbers = (rows.window or 0, scale, factor, scores.cap or 0.0)
        constants = shape.constants(rows.window is not None, scores)
        if layout.most_tiles:
            counts = (rows.num_decodes, num_programs)
            tiles = (rows.offsets, layout.tiles, layout.num_tiles)
            extend_and_decode[(layout.most_tiles * shape.num_kv_heads + num_programs,)](
                *counts, *inputs, *tiles, *found, *numbers, **constants, **shape.extend_constants, **shape.launch
            )
        else:
            decode[(num_programs,)](
                rows.num_decodes,
                num_programs,
                *inputs,
                *found,
                *numbers,
                **constants,
                **shape.decode_constants,
                **shape.launch,
            )
        if rows.num_decodes and layout.most_splits > 1:
            merge[(rows.num_decodes, shape.num_kv_heads)](
                layout.split_offsets, parts.outs, parts.tops, parts.totals, out, factor, **shape.merge_constants
            )
        return out

    def _attend_in_parts(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """As many decodes at a time as there is room for; prompts with the last."""
        if not isinstance(rows.layout, list):
            firsts, parts = range(0, rows.num_decodes, self._most_decodes), []
            for first in firsts:
                end = len(rows.ends) if first == firsts[-1] else first + self._most_decodes
                num_decodes = min(self._most_decodes, rows.num_decodes - first)
                columns = rows.tables[first:end], rows.ends[first:end], rows.offsets[first : end + 1] - first
                parts.append(RaggedRows(*columns, num_decodes, rows.window))
            rows.layout = parts
        counts = [part.num_decodes for part in rows.layout]
        counts[-1] += len(query) - rows.num_decodes
        queries = query.split(counts)
        return torch.cat([self.attend(*one, scores) for one in zip(queries, repeat(kv), rows.layout)])

    def _parts_for(self, size: int, shape: KernelShape, device: torch.device) -> _Parts:
        """size: splits of all rows, times heads. Smaller buffers are kept: captured graphs hold their addresses."""
        known = 0 if not self._parts else self._parts[-1].tops.numel()
        if not self._parts or known < size:
            size = max(size, 2 * known, 1)
            widths = (shape.head_dim, 1, 1)
            self._parts.append(_Parts(*(torch.empty(size * n, dtype=torch.float32, device=device) for n in widths)))
        return self._parts[-1]

    def _shape_of(self, query: Tensor, kv: LayerKV) -> KernelShape:
        heads = (query.shape[1], kv.keys.shape[1], query.shape[2])
        if self._shape is None or (self._shape.heads, self._shape.in_8_bits) != (heads, kv.is_int8):
            self._shape = kernel_shape(*heads, query.dtype, self._tiles, kv.is_int8)
        return self._shape

    def _programs(self, device: torch.device) -> int:
        if self._num_programs is None:
            properties = torch.cuda.get_device_properties(device)
            self._num_programs = PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
        return self._num_programs


def _lay_out(rows: RaggedRows, shape: KernelShape, num_new: int) -> _Layout:
    """num_new: tokens of the rows that do not decode."""
    num_rows, width = rows.tables.shape
    num_extends = num_rows - rows.num_decodes
    num_blocks = width if rows.window is None else min(width, rows.window // BLOCK_SIZE + 2)
    most_splits = shape.splits_of(num_blocks * BLOCK_SIZE)
    most_tiles = num_new // shape.tile_tokens + num_extends

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=rows.ends.device)

    layout = _Layout(
        splits=empty(max(1, rows.num_decodes * most_splits)),
        split_offsets=empty(rows.num_decodes + 1),
        tiles=empty(max(1, most_tiles)),
        num_tiles=empty(1),
        most_tiles=most_tiles,
        most_splits=most_splits,
    )
    lay_out_step[(1,)](
        rows.ends,
        rows.offsets,
        layout.splits,
        layout.split_offsets,
        layout.tiles,
        layout.num_tiles,
        rows.num_decodes,
        num_rows,
        rows.window or 0,
        HAS_WINDOW=rows.window is not None,
        **shape.schedule_constants,
    )
    return layout
