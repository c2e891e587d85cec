"""Attention of rows of several new tokens over a paged cache, and of decodes beside them: @triton.jit. Thread: engine.

A program keeps a tile: as many tokens of a row, with the query heads of one KV head, as fill M rows of a product. It
passes over the row's keys in order, from the first that one of its tokens sees; those that all of them see are not
masked. Wherever a chunk begins, a token's keys come to it in the same tiles of KV_TOKENS and in the same order, and
those it does not see change nothing: its sums are the same to the last bit however its prompt is cut.
Source: FlashAttention-2, arXiv:2307.08691, the causal forward pass.
"""

import triton
import triton.language as tl

from gpu.kernels.decode_attention import attend_range, decode_split, starting_sums


@triton.jit
def extend_tile(
    tile,
    kv_head,
    query,  # [tokens, heads, HEAD_DIM]
    query_stride,
    keys,  # [slots, kv_heads, HEAD_DIM]
    values,
    tables,  # [rows, blocks]
    table_stride,
    ends,  # [rows]
    offsets,  # [rows + 1]
    tiles,  # row | index of the tile << 16
    sinks,
    out,  # [tokens, heads, HEAD_DIM]
    window,
    scale,
    factor,
    cap,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    M: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # M // PER_KV
    KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
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

    members, dims = tl.arange(0, M), tl.arange(0, D_PAD)
    tokens = tile_start + members // PER_KV
    heads = kv_head * PER_KV + members % PER_KV
    is_real = tokens < tile_end
    is_read = is_real[:, None] & (dims[None, :] < HEAD_DIM)
    address = (offset + tokens).to(tl.int64) * query_stride + heads * HEAD_DIM
    vectors = tl.load(query + address[:, None] + dims[None, :], mask=is_read, other=0.0)
    top, total, summed = starting_sums(sinks, heads, is_real, True, factor, D_PAD, M, HAS_SINKS)
    table = tables + row.to(tl.int64) * table_stride
    key_head, value_head = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    first = 0
    masked = (begin + 1) // KV_TOKENS * KV_TOKENS  # before it lies what every token of the tile sees
    if HAS_WINDOW:
        first = tl.maximum(begin + 1 - window, 0)
        masked = first // KV_TOKENS * KV_TOKENS
    else:
        top, total, summed = attend_range(
            vectors,
            top,
            total,
            summed,
            key_head,
            value_head,
            KV_HEADS * HEAD_DIM,
            table,
            start + tokens,
            0,
            0,
            masked,
            window,
            scale,
            factor,
            cap,
            HEAD_DIM,
            D_PAD,
            KV_TOKENS,
            BLOCK,
            False,
            False,
            HAS_CAP,
            PRECISION,
        )
    top, total, summed = attend_range(
        vectors,
        top,
        total,
        summed,
        key_head,
        value_head,
        KV_HEADS * HEAD_DIM,
        table,
        start + tokens,
        masked,
        first,
        end,
        window,
        scale,
        factor,
        cap,
        HEAD_DIM,
        D_PAD,
        KV_TOKENS,
        BLOCK,
        True,
        HAS_WINDOW,
        HAS_CAP,
        PRECISION,
    )
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    address = ((offset + tokens).to(tl.int64) * (KV_HEADS * PER_KV) + heads) * HEAD_DIM
    tl.store(out + address[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_read)


@triton.jit(
    do_not_specialize=["num_decodes", "num_programs", "table_stride", "window"],
    do_not_specialize_on_alignment=["tables", "ends", "offsets"],
)
def extend_and_decode(
    num_decodes,
    num_programs,
    query,
    query_stride,
    keys,
    values,
    tables,
    table_stride,
    ends,
    offsets,
    tiles,
    num_tiles,
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
    TILE_TOKENS: tl.constexpr,
    KV_TOKENS: tl.constexpr,
    DECODE_M: tl.constexpr,
    DECODE_KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles are bound by products, splits by reading: they start in turn, so that both go on at once.

    Program: a KV head of a tile, or nothing; or one of num_programs, as decode(): in even shares.
    """
    program = tl.program_id(0)
    num_before = program * num_programs // tl.num_programs(0)  # that decode
    if (program + 1) * num_programs // tl.num_programs(0) == num_before:
        piece = program - num_before
        if piece // KV_HEADS < tl.load(num_tiles):
            extend_tile(
                piece // KV_HEADS,
                piece % KV_HEADS,
                query,
                query_stride,
                keys,
                values,
                tables,
                table_stride,
                ends,
                offsets,
                tiles,
                sinks,
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
                TILE_TOKENS,
                KV_TOKENS,
                BLOCK,
                HAS_WINDOW,
                HAS_CAP,
                HAS_SINKS,
                PRECISION,
            )
    else:
        num_items = tl.load(split_offsets + num_decodes) * KV_HEADS
        for item in range(num_before, num_items, num_programs):
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
                DECODE_M,
                DECODE_KV_TOKENS,
                BLOCK,
                LEAST,
                MOST_SPLITS,
                HAS_WINDOW,
                HAS_CAP,
                HAS_SINKS,
                PRECISION,
            )
