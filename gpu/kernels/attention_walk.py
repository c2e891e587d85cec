"""What decodes and prompts have in common: a walk over the keys that some queries of one KV head see: @triton.jit.

Sums are float32; scores are kept as they leave the product and scaled in the exponent, so that masked and unmasked
passes round alike. Source: online softmax, arXiv:1805.02867. Thread: engine.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Cache(NamedTuple):
    """A layer's keys and values, and the model's heads. No field is `values`, which Triton's own tuples have.

    Args:
        key_cache, value_cache: [slots, KV_HEADS, HEAD_DIM].
        tables: [rows, blocks], rows table_stride apart.
        PER_KV: query heads of a KV head.
        D_PAD: HEAD_DIM's next power of two.
        BLOCK: slots of a block.
    """

    key_cache: Any
    value_cache: Any
    tables: Any
    table_stride: Any
    KV_HEADS: Any
    PER_KV: Any
    HEAD_DIM: Any
    D_PAD: Any
    BLOCK: Any


class Scoring(NamedTuple):
    """How scores are made of products.

    Args:
        window: the latest tokens that a token sees, itself among them; read where HAS_WINDOW.
        scale: of the scores, before a cap.
        factor: of the scores, in the exponent of 2.
        cap: read where HAS_CAP.
        sinks: [heads]; read where HAS_SINKS.
        PRECISION: of products.
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
    """(top, total, out) before any key: nothing, or a sink's share, which brings no value.

    Args:
        heads, is_real: [M].
        has_sink: whether this walk counts them in.
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
    """(keys, values), [KV_TOKENS, D_PAD], of one KV head at a row's positions; masked: zeros where they are not known.

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
def _add_tile(top, total, out, score, value, scoring):
    """(top, total, out) with a tile's values, [KV_TOKENS, D_PAD], by their scores, [M, KV_TOKENS]."""
    highest = tl.maximum(top, tl.max(score, 1))
    # nothing seen yet: any finite top gives shares of 0, and no NaN
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2((score - base[:, None]) * scoring.factor)
    shrink = tl.exp2((top - base) * scoring.factor)
    total = total * shrink + tl.sum(share, 1)
    out = tl.dot(share.to(value.dtype), value, out * shrink[:, None], input_precision=scoring.PRECISION)
    return highest, total, out


@triton.jit
def walk(
    query,  # [M, D_PAD], of the cache's type
    top,  # [M]: the highest score so far, unscaled
    total,  # [M]: sum of the shares so far, as multiples of the top's
    out,  # [M, D_PAD]: sum of the values so far, by their shares
    cache,
    row,
    kv_head,
    scoring,
    positions,  # [M]: of the queries' tokens; read where MASKED
    begin,  # of the positions that are passed over: a multiple of BLOCK
    first,  # no query sees anything before
    end,  # nor from here on; unmasked walks end where a tile does
    KV_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # and `first` does not say it of all queries
):
    """(top, total, out) after the keys at positions from begin to end, KV_TOKENS at a time.

    Masked: each query sees what its position and the window let it; otherwise every one sees them all.
    """
    keys, values = cache.key_cache + kv_head * cache.HEAD_DIM, cache.value_cache + kv_head * cache.HEAD_DIM
    table = cache.tables + row.to(tl.int64) * cache.table_stride
    places = tl.arange(0, KV_TOKENS)
    for tile in tl.range(begin, end, KV_TOKENS):
        seen = tile + places
        is_known = (seen >= first) & (seen < end)
        key, value = _load_tile(keys, values, table, cache, seen, is_known, MASKED)
        score = tl.dot(query, tl.trans(key), input_precision=scoring.PRECISION)  # [M, KV_TOKENS]
        if scoring.HAS_CAP:  # cap * tanh(score * scale / cap)
            score = scoring.cap * (2.0 * tl.sigmoid(score * (2.0 * scoring.scale / scoring.cap)) - 1.0)
        if MASKED:
            is_seen = is_known[None, :] & (seen[None, :] <= positions[:, None])
            if HAS_WINDOW:
                is_seen &= seen[None, :] > positions[:, None] - scoring.window
            score = tl.where(is_seen, score, float("-inf"))
        top, total, out = _add_tile(top, total, out, score, value, scoring)
    return top, total, out


@triton.jit
def shares_of(total, summed):
    """Values' sums as shares of the whole, [M, D_PAD]; zeros where nothing was seen."""
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]
