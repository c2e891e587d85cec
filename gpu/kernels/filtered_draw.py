"""Draws a token of what top_k, top_p and min_p keep of a row, whose segments' maxima are known: @triton.jit.

From the maxima alone follows, mostly, which few segments hold what is kept, and only those are read again: nothing is
sorted. Thread: engine.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu.kernels.sampling_layout import (
    INVERSE,
    LEAST,
    MINUS_INFINITY,
    NO_TOKEN,
    SEED,
    SEGMENT,
    SLOPE,
    TOP_K,
    TOP_P,
    load_logits,
)
from gpu.kernels.sampling_rules import (
    key_of,
    largest_reaching,
    needed_of,
    noise_of,
    number_of,
    ordered_of,
    uniforms_of,
    weigh,
)

LOWEST = tl.constexpr(-3.4028234663852886e38)


class Gathered(NamedTuple):
    """What of a row may be kept: in memory, where it had room, and the segments that it comes from.

    Args:
        listed: int32 [num_listed]: segments, ascending.
        logits, tokens: float32 and int32 [num_logits], ascending by token; all of them where num_logits is at most
            GROUP * SEGMENT.
    """

    listed: Any
    num_listed: Any
    logits: Any
    tokens: Any
    num_logits: Any


@triton.jit
def _total_weight(row, top, slope, GROUP: tl.constexpr):
    """The sum of a row's weights."""
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    sums = tl.zeros([GROUP, SEGMENT], tl.int64)
    num_segments = tl.cdiv(row.vocab_size, SEGMENT)
    for segment in range(0, num_segments, GROUP):
        tops = tl.load(row.maxima + segment + rows, mask=segment + rows < num_segments, other=MINUS_INFINITY)
        if tl.max(weigh(tops, top, slope), 0) > 0:
            tokens = (segment + rows[:, None]) * SEGMENT + columns[None, :]
            sums += weigh(load_logits(row, tokens, tokens < row.vocab_size), top, slope)
    return tl.sum(tl.sum(sums, 1), 0)


@triton.jit
def _list_segments(row, bound, listed, SEGMENTS: tl.constexpr):
    """The segments that have a logit not below the bound, ascending, to memory; returns how many."""
    segments = tl.arange(0, SEGMENTS)
    is_inside = segments < tl.cdiv(row.vocab_size, SEGMENT)
    is_listed = is_inside & (tl.load(row.maxima + segments, mask=is_inside, other=MINUS_INFINITY) >= bound)
    counts = is_listed.to(tl.int32)
    tl.store(listed + tl.cumsum(counts, 0) - 1, segments, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(counts, 0)


@triton.jit
def _load_segments(row, listed, start, num_listed, GROUP: tl.constexpr):
    """(logits, tokens) of some listed segments, ascending; -inf and -1 where there is none."""
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    segments = tl.load(listed + start + rows, mask=start + rows < num_listed, other=0)
    tokens = segments[:, None] * SEGMENT + columns[None, :]
    is_inside = (tokens < row.vocab_size) & (start + rows < num_listed)[:, None]
    value = load_logits(row, tokens, is_inside)
    tokens = tl.where(is_inside, tokens, -1)
    return tl.reshape(value, [GROUP * SEGMENT]), tl.reshape(tokens, [GROUP * SEGMENT])


@triton.jit
def _gather(row, listed, num_listed, bound, logits, tokens_kept, GROUP: tl.constexpr):
    """Logits not below the bound, and their tokens, ascending, to memory, as many as it takes; returns how many."""
    num_found = 0
    for start in range(0, num_listed, GROUP):
        value, tokens = _load_segments(row, listed, start, num_listed, GROUP)
        is_found = (value >= bound) & (tokens >= 0)
        counts = is_found.to(tl.int32)
        places = num_found + tl.cumsum(counts, 0) - 1
        has_room = is_found & (places < GROUP * SEGMENT)
        tl.store(logits + places, value, mask=has_room)
        tl.store(tokens_kept + places, tokens, mask=has_room)
        num_found += tl.sum(counts, 0)
    tl.debug_barrier()
    return num_found


@triton.jit
def _end_of(gathered, GROUP: tl.constexpr):
    """Where a walk of GROUP segments at a time ends: after its first turn, where all had room."""
    return tl.where(gathered.num_logits <= GROUP * SEGMENT, 1, gathered.num_listed)


@triton.jit
def _load_gathered(row, gathered, start, GROUP: tl.constexpr):
    """(logits, tokens) of what was gathered, where it had room; else of some of the segments that it comes from."""
    if gathered.num_logits <= GROUP * SEGMENT:
        places = tl.arange(0, GROUP * SEGMENT)
        value = tl.load(gathered.logits + places, mask=places < gathered.num_logits, other=MINUS_INFINITY)
        tokens = tl.load(gathered.tokens + places, mask=places < gathered.num_logits, other=-1)
    else:
        value, tokens = _load_segments(row, gathered.listed, start, gathered.num_listed, GROUP)
    return value, tokens


@triton.jit
def _weights_of(value, tokens, limit, top, slope, BY_MASS: tl.constexpr):
    """1 each, or filters.weigh, of those that are not below the limit; 0 of others."""
    is_counted = (tokens >= 0) & (value >= limit)
    if BY_MASS:
        return tl.where(is_counted, weigh(value, top, slope), 0)
    return is_counted.to(tl.int64)


@triton.jit
def _weigh_gathered(row, gathered, limit, top, slope, BY_MASS: tl.constexpr, GROUP: tl.constexpr):
    """The sum of the weights of what was gathered and is not below the limit."""
    sums = tl.zeros([GROUP * SEGMENT], tl.int64)
    for start in range(0, _end_of(gathered, GROUP), GROUP):
        value, tokens = _load_gathered(row, gathered, start, GROUP)
        sums += _weights_of(value, tokens, limit, top, slope, BY_MASS)
    return tl.sum(sums, 0)


@triton.jit
def _reaching(row, gathered, limit, top, slope, needed, BY_MASS: tl.constexpr, GROUP: tl.constexpr):
    """largest_reaching of what was gathered and is not below the limit: in registers, where it fits."""
    if gathered.num_logits <= GROUP * SEGMENT:
        value, tokens = _load_gathered(row, gathered, 0, GROUP)
        weights = _weights_of(value, tokens, limit, top, slope, BY_MASS)
        found = largest_reaching(ordered_of(value), weights, needed)
    else:
        # All not below the limit are enough; where there is none, those not below the lowest float32 are as good.
        low = ordered_of(tl.maximum(limit, LOWEST)).to(tl.int64)
        high = ordered_of(top).to(tl.int64)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            is_enough = _weigh_gathered(row, gathered, number_of(middle), top, slope, BY_MASS, GROUP) >= needed
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        found = number_of(low)
    return found


@triton.jit
def _bound_of(row, top, GROUP: tl.constexpr, SEGMENTS: tl.constexpr):
    """(a logit that none below is kept, nor counts in a share; what of the weights top_p needs, as it has no top_k)."""
    top_k, top_p, slope = tl.load(row.numbers + TOP_K), tl.load(row.factors + TOP_P), tl.load(row.factors + SLOPE)
    has_top_k, is_by_mass = top_k < row.vocab_size, top_p < 1
    num_segments = tl.cdiv(row.vocab_size, SEGMENT)
    segments = tl.arange(0, SEGMENTS)
    tops = tl.load(row.maxima + segments, mask=segments < num_segments, other=MINUS_INFINITY)
    bound = tl.where(has_top_k & is_by_mass, MINUS_INFINITY, top + tl.load(row.factors + LEAST))
    needed = top_k
    if has_top_k:
        if top_k <= num_segments:  # as many segments, at least as many tokens
            ones = (segments < num_segments).to(tl.int64)
            bound = tl.maximum(bound, largest_reaching(ordered_of(tops), ones, top_k))
    else:
        if is_by_mass:
            needed = needed_of(_total_weight(row, top, slope, GROUP), top_p)
            weights = tl.where(segments < num_segments, weigh(tops, top, slope), 0)
            if tl.sum(weights, 0) >= needed:
                bound = tl.maximum(bound, largest_reaching(ordered_of(tops), weights, needed))
    return bound, needed


@triton.jit
def _limit_of(row, gathered, bound, needed, top, GROUP: tl.constexpr):
    """The least logit that is kept. bound, needed: of _bound_of."""
    top_k, top_p, slope = tl.load(row.numbers + TOP_K), tl.load(row.factors + TOP_P), tl.load(row.factors + SLOPE)
    has_top_k = top_k < row.vocab_size
    limit_k = bound
    if has_top_k:
        if top_k < gathered.num_logits:
            limit_k = _reaching(row, gathered, bound, top, slope, top_k, False, GROUP)
    limit = tl.maximum(top + tl.load(row.factors + LEAST), limit_k)
    if top_p < 1:
        weight = _weigh_gathered(row, gathered, limit_k, top, slope, True, GROUP)
        if has_top_k:
            needed = needed_of(weight, top_p)
        if weight >= needed:  # otherwise min_p keeps less
            limit = tl.maximum(limit, _reaching(row, gathered, limit_k, top, slope, needed, True, GROUP))
    return limit


@triton.jit
def draw_filtered(row, listed, logits, tokens_kept, GROUP: tl.constexpr, SEGMENTS: tl.constexpr):
    """A token of what top_k, top_p and min_p keep. listed, logits, tokens_kept: room for Gathered."""
    segments = tl.arange(0, SEGMENTS)
    is_inside = segments < tl.cdiv(row.vocab_size, SEGMENT)
    top = tl.max(tl.load(row.maxima + segments, mask=is_inside, other=MINUS_INFINITY), 0)
    bound, needed = _bound_of(row, top, GROUP, SEGMENTS)
    num_listed = _list_segments(row, bound, listed, SEGMENTS)
    num_logits = _gather(row, listed, num_listed, bound, logits, tokens_kept, GROUP)
    gathered = Gathered(listed, num_listed, logits, tokens_kept, num_logits)
    limit = _limit_of(row, gathered, bound, needed, top, GROUP)
    key, inverse = key_of(tl.load(row.numbers + SEED), row.position), tl.load(row.factors + INVERSE)
    bests = tl.full([GROUP * SEGMENT], MINUS_INFINITY, tl.float32)
    drawn = tl.full([GROUP * SEGMENT], NO_TOKEN, tl.int32)
    for start in range(0, _end_of(gathered, GROUP), GROUP):
        value, tokens = _load_gathered(row, gathered, start, GROUP)
        sums = value * inverse + noise_of(uniforms_of(key, tokens))
        is_better = (tokens >= 0) & (value >= limit) & (sums > bests)
        bests = tl.where(is_better, sums, bests)
        drawn = tl.where(is_better, tokens, drawn)
    return tl.min(tl.where(bests == tl.max(bests, 0), drawn, NO_TOKEN), 0)
