"""Attention of rows of one new token over a paged cache, in splits of the context: @triton.jit. Thread: engine.

A program keeps the query heads of one KV head and reads their keys and values once; a long context is shared among
programs, and merge() adds what they have found. Where splits begin depends on a row's own length and on constants
alone, and they are added in order: a row's sums are the same to the last bit whoever shares the step.
Sums are float32; scores are kept as they leave the product and scaled in the exponent, so that masked and unmasked
passes round alike. Source: Flash-Decoding (Dao et al., 2023); online softmax: arXiv:1805.02867.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
def attend_range(
    query,  # [M, D_PAD], of the cache's type
    top,  # [M]: the highest score so far, unscaled
    total,  # [M]: sum of the shares so far, as multiples of the top's
    out,  # [M, D_PAD]: sum of the values so far, by their shares
    keys,  # of one KV head in the cache's first slot
    values,
    token_stride,  # numbers from slot to slot
    table,  # [blocks] of the row
    positions,  # [M]: of the queries' tokens; read where MASKED
    begin,  # of the positions that are passed over: a multiple of BLOCK
    first,  # no query sees anything before
    end,  # nor from here on; unmasked passes end where a tile does
    window,
    scale,  # of the scores, before a cap
    factor,  # of the scores, in the exponent of 2
    cap,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(top, total, out) after the keys at positions from begin to end, KV_TOKENS at a time.

    Masked: each query sees what its position and the window let it; otherwise every one sees them all.
    """
    dims = tl.arange(0, D_PAD)
    places = tl.arange(0, KV_TOKENS)
    for tile in tl.range(begin, end, KV_TOKENS):
        seen = tile + places
        if MASKED:
            is_known = (seen >= first) & (seen < end)
            block = tl.load(table + seen // BLOCK, mask=is_known, other=0)
        else:
            block = tl.load(table + seen // BLOCK)
        slot = block.to(tl.int64) * BLOCK + seen % BLOCK
        address = slot[:, None] * token_stride + dims[None, :]
        if MASKED:
            is_read = is_known[:, None] & (dims[None, :] < HEAD_DIM)
            key = tl.load(keys + address, mask=is_read, other=0.0)
            value = tl.load(values + address, mask=is_read, other=0.0)
        elif D_PAD != HEAD_DIM:
            is_read = (dims < HEAD_DIM)[None, :]
            key = tl.load(keys + address, mask=is_read, other=0.0)
            value = tl.load(values + address, mask=is_read, other=0.0)
        else:
            key = tl.load(keys + address)
            value = tl.load(values + address)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)  # [M, KV_TOKENS]
        if HAS_CAP:  # cap * tanh(score * scale / cap)
            score = cap * (2.0 * tl.sigmoid(score * (2.0 * scale / cap)) - 1.0)
        if MASKED:
            is_seen = is_known[None, :] & (seen[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen &= seen[None, :] > positions[:, None] - window
            score = tl.where(is_seen, score, float("-inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        # nothing seen yet: any finite top gives shares of 0, and no NaN
        base = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp2((score - base[:, None]) * factor)
        shrink = tl.exp2((top - base) * factor)
        total = total * shrink + tl.sum(share, 1)
        out = tl.dot(share.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        top = highest
    return top, total, out


@triton.jit
def starting_sums(
    sinks,  # [heads]; read where HAS_SINKS
    heads,  # [M]
    is_real,  # [M]
    has_sink,  # whether this range counts them in
    factor,
    D_PAD: tl.constexpr,
    M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """(top, total, out) before any key: nothing, or a sink's share, which brings no value."""
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_real, other=0.0).to(tl.float32) * LOG2_E / factor
        top = tl.where(has_sink, sink, top)
        total = tl.where(has_sink, total + 1.0, total)
    return top, total, tl.zeros([M, D_PAD], tl.float32)


@triton.jit
def decode_split(
    item,  # of the splits
    kv_head,
    query,  # [tokens, heads, HEAD_DIM]
    query_stride,  # numbers from token to token
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    tables,  # [rows, blocks]
    table_stride,
    ends,  # [rows]: one past the row's token; 0: it sees nothing, and gets zeros
    splits,  # [splits]: row | index of the split << 16
    split_offsets,  # [rows + 1]: where a row's splits begin
    sinks,
    part_outs,  # [splits, heads, HEAD_DIM], float32: of rows of several splits
    part_tops,  # [splits, heads]
    part_totals,  # [splits, heads]
    out,  # [tokens, heads, HEAD_DIM]: of rows of one split
    window,
    scale,
    factor,
    cap,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    M: tl.constexpr,  # >= PER_KV
    KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One KV head's query heads over one split of a row."""
    packed = tl.load(splits + item)
    row, index = packed & 0xFFFF, packed >> 16
    num_splits = tl.load(split_offsets + row + 1) - tl.load(split_offsets + row)
    end = tl.load(ends + row).to(tl.int32)
    first, begin = first_seen(end, window, BLOCK, HAS_WINDOW)
    size = split_tokens(end - begin, KV_TOKENS, LEAST, MOST_SPLITS)
    begin += index * size

    members, dims = tl.arange(0, M), tl.arange(0, D_PAD)
    heads, is_real = kv_head * PER_KV + members, members < PER_KV
    is_read = is_real[:, None] & (dims[None, :] < HEAD_DIM)
    address = row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    vectors = tl.load(query + address, mask=is_read, other=0.0)
    top, total, summed = starting_sums(sinks, heads, is_real, index == 0, factor, D_PAD, M, HAS_SINKS)
    top, total, summed = attend_range(
        vectors,
        top,
        total,
        summed,
        keys + kv_head * HEAD_DIM,
        values + kv_head * HEAD_DIM,
        KV_HEADS * HEAD_DIM,
        tables + row.to(tl.int64) * table_stride,
        tl.zeros([M], tl.int32) + (end - 1),
        begin,
        first,
        tl.minimum(begin + size, end),
        window,
        scale,
        factor,
        cap,
        HEAD_DIM,
        D_PAD,
        KV_TOKENS,
        BLOCK,
        True,
        False,  # `first` says it of the only token
        HAS_CAP,
        PRECISION,
    )
    if num_splits == 1:
        result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
        address = (row * KV_HEADS * PER_KV + heads)[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
        tl.store(out + address, result.to(out.dtype.element_ty), mask=is_read)
    else:
        place = item * KV_HEADS * PER_KV + heads
        tl.store(part_tops + place, top, mask=is_real)
        tl.store(part_totals + place, total, mask=is_real)
        tl.store(part_outs + place[:, None].to(tl.int64) * HEAD_DIM + dims[None, :], summed, mask=is_read)


@triton.jit(
    do_not_specialize=["num_rows", "num_programs", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "ends"],
)
def decode(
    num_rows,
    num_programs,
    query,
    query_stride,
    keys,
    values,
    tables,
    table_stride,
    ends,
    splits,
    split_offsets,
    sinks,
    part_outs,
    part_tops,
    part_totals,
    out,
    window,
    scale,
    factor,
    cap,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    M: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All splits of all rows. Program: one of num_programs, takes every num_programs-th; see decode_split."""
    num_items = tl.load(split_offsets + num_rows) * KV_HEADS
    for item in range(tl.program_id(0), num_items, num_programs):
        decode_split(
            item // KV_HEADS,
            item % KV_HEADS,
            query,
            query_stride,
            keys,
            values,
            tables,
            table_stride,
            ends,
            splits,
            split_offsets,
            sinks,
            part_outs,
            part_tops,
            part_totals,
            out,
            window,
            scale,
            factor,
            cap,
            KV_HEADS,
            PER_KV,
            HEAD_DIM,
            D_PAD,
            M,
            KV_TOKENS,
            BLOCK,
            LEAST,
            MOST_SPLITS,
            HAS_WINDOW,
            HAS_CAP,
            HAS_SINKS,
            PRECISION,
        )


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
