"""Attention of rows of several new tokens over a paged cache, and of decodes beside them: @triton.jit. Thread: engine.

A program keeps a tile: as many tokens of a row, with the query heads of one KV head, as fill M rows of a product. It
passes over the row's keys in order, from the first that one of its tokens sees; those that all of them see are not
masked. Wherever a chunk begins, a token's keys come to it in the same tiles of KV_TOKENS and in the same order, and
those it does not see change nothing: its sums are the same to the last bit however its prompt is cut.
Source: FlashAttention-2, arXiv:2307.08691, the causal forward pass.
"""

import triton
import triton.language as tl

from gpu.kernels.attention_walk import Cache, Scoring, shares_of, starting_sums, walk
from gpu.kernels.decode_attention import Splits, decode_share


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
    masked = (begin + 1) // KV_TOKENS * KV_TOKENS  # before it lies what every token of the tile sees
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
    num_decodes, num_programs, query, query_stride, keys, values, tables, table_stride, ends,
    offsets, tiles, num_tiles, splits, split_offsets, sinks, part_outs, part_tops, part_totals, out,
    window, scale, factor, cap,
    KV_HEADS: tl.constexpr, PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    M: tl.constexpr, TILE_TOKENS: tl.constexpr, KV_TOKENS: tl.constexpr,
    DECODE_M: tl.constexpr, DECODE_KV_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, LEAST: tl.constexpr, MOST_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles are bound by products, splits by reading: they start in turn, so that both go on at once.

    Program: a KV head of a tile, or nothing; or one of num_programs that decode: in even shares. See _extend_tile and
    decode_share.
    """
    _extend_or_decode(
        num_decodes, num_programs, query, query_stride,
        Cache(keys, values, tables, table_stride, KV_HEADS, PER_KV, HEAD_DIM, D_PAD, BLOCK),
        ends, offsets, tiles, num_tiles, Splits(splits, split_offsets, part_outs, part_tops, part_totals), out,
        Scoring(window, scale, factor, cap, sinks, HAS_WINDOW, HAS_CAP, HAS_SINKS, PRECISION),
        M, TILE_TOKENS, KV_TOKENS, DECODE_M, DECODE_KV_TOKENS, LEAST, MOST_SPLITS,
    )  # fmt: skip
