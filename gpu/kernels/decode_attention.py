"""Attention of rows of one new token over a paged cache, in splits of the context: @triton.jit. Thread: engine.

A program keeps the query heads of one KV head and reads their keys and values once; a long context is shared among
programs, and merge() adds what they have found. Where splits begin depends on a row's own length and on constants
alone, and they are added in order: a row's sums are the same to the last bit whoever shares the step.
Source: Flash-Decoding (Dao et al., 2023).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu.kernels.attention_walk import Cache, Scoring, shares_of, starting_sums, walk


class Splits(NamedTuple):
    """How contexts are cut, and what was found in the parts of those that are cut in several.

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
    """Tokens of each split of a context, the last one's fewer: LEAST, or what leaves MOST_SPLITS of them."""
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
    positions = tl.zeros([M], tl.int32) + (end - 1)  # `first` says what the window lets the only token see
    top, total, summed = walk(
        vectors, top, total, summed, cache, row, kv_head, scoring, positions, begin, first,
        tl.minimum(begin + size, end), KV_TOKENS, True, False,
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
    ends,  # [rows]: one past the row's token; 0: it sees nothing, and gets zeros
    splits,
    out,  # [tokens, heads, HEAD_DIM]: of rows of one split
    scoring,
    M: tl.constexpr,  # >= PER_KV
    KV_TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """One program's share of all splits of all rows: every num_programs-th."""
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
    num_rows, num_programs, query, query_stride, keys, values, tables, table_stride, ends, splits, split_offsets,
    sinks, part_outs, part_tops, part_totals, out, window, scale, factor, cap,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, KV_TOKENS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All splits of all rows. Program: one of num_programs; see decode_share, Cache, Scoring and Splits."""
    decode_share(
        tl.program_id(0), num_rows, num_programs, query, query_stride,
        Cache(keys, values, tables, table_stride, KV_HEADS, PER_KV, HEAD_DIM, D_PAD, BLOCK),
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
    """Add what the splits of a row have found. Program: a row, and the query heads of a KV head."""
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
