"""Draws a token per row: @triton.jit. Thread: engine.

A row is read once for the largest logit of each of its segments. From these alone follows, mostly, which few segments
hold what top_k and top_p keep, and only those are read again: nothing is sorted. Either one program does all of a row
(`sample_rows`), or several read it, a range of segments each (`scan_rows`), and one ends it (`end_rows`): the tokens
are the same. Nothing depends on the host: what slots ask for, positions and all results are on the device.

Of every kernel: slots are those of requests, < 0: a row that is padding; `scratch` holds a row's adjusted logits.
"""

import triton
import triton.language as tl

from gpu.kernels.sampling_rules import (
    key_of,
    largest_reaching,
    most_noise_of,
    needed_of,
    noise_of,
    number_of,
    ordered_of,
    uniforms_of,
    weigh,
)
from gpu.sampling_slots import ADJUSTED as _ADJUSTED
from gpu.sampling_slots import Factor, Feature, Number

SEGMENT = tl.constexpr(128)  # tokens
NOISE, FILTERS, PENALTIES = (tl.constexpr(int(f)) for f in (Feature.NOISE, Feature.FILTERS, Feature.PENALTIES))
BIAS, MIN_TOKENS = tl.constexpr(int(Feature.BIAS)), tl.constexpr(int(Feature.MIN_TOKENS))
LOGPROBS, ADJUSTED = tl.constexpr(int(Feature.LOGPROBS)), tl.constexpr(int(_ADJUSTED))
FEATURES, TOP_K, SEED, FREE_FROM, NUM_BIASES, NUM_STOP_IDS = (tl.constexpr(int(n)) for n in Number)
INVERSE, SLOPE, TOP_P, LEAST, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(int(f)) for f in Factor)
NUM_NUMBERS, NUM_FACTORS = tl.constexpr(len(Number)), tl.constexpr(len(Factor))
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load(logits, scratch, is_adjusted, tokens, mask):
    """Of a row, adjusted or as it is, as float32; -inf where masked."""
    if is_adjusted:
        value = tl.load(scratch + tokens, mask=mask, other=MINUS_INFINITY)
    else:
        value = tl.load(logits + tokens, mask=mask, other=MINUS_INFINITY).to(tl.float32)
    return value


@triton.jit
def _adjust(
    logits, scratch, seen, numbers, factors, position, biases, bias_ids, stop_ids, first, end,
    HAS_SEEN: tl.constexpr, MAX_BIASES: tl.constexpr, MAX_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties, logit_bias and min_tokens, of tokens first..end - 1, to scratch. See sampler._adjust."""
    features = tl.load(numbers + FEATURES)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_inside = tokens < end
        value = tl.load(logits + tokens, mask=is_inside).to(tl.float32)
        if HAS_SEEN:
            if features & PENALTIES:
                repetition, presence = tl.load(factors + REPETITION), tl.load(factors + PRESENCE)
                known = tl.load(seen + tokens, mask=is_inside, other=0)
                count = (known >> 1).to(tl.float32)
                repeated = tl.where(value > 0, tl.math.div_rn(value, repetition), value * repetition)
                value = tl.where(known > 0, repeated, value)
                value = value - tl.load(factors + FREQUENCY) * count - presence * (count > 0).to(tl.float32)
        tl.store(scratch + tokens, value, mask=is_inside)
    tl.debug_barrier()
    if features & BIAS:
        places = tl.arange(0, MAX_BIASES)
        ids = tl.load(bias_ids + places, mask=places < tl.load(numbers + NUM_BIASES), other=-1)
        is_here = (ids >= first) & (ids < end)
        value = tl.load(scratch + ids, mask=is_here) + tl.load(biases + places, mask=is_here)
        tl.store(scratch + ids, value, mask=is_here)
        tl.debug_barrier()
    if features & MIN_TOKENS:
        if position < tl.load(numbers + FREE_FROM):
            places = tl.arange(0, MAX_STOP_IDS)
            ids = tl.load(stop_ids + places, mask=places < tl.load(numbers + NUM_STOP_IDS), other=-1)
            tl.store(scratch + ids, MINUS_INFINITY, mask=(ids >= first) & (ids < end))
        tl.debug_barrier()


@triton.jit
def _sum_exponentials(logits, first, end, BLOCK: tl.constexpr):
    """(largest, sum of exp(logit - largest)) of raw logits first..end - 1, for logprobs."""
    tops, sums = tl.full([BLOCK], MINUS_INFINITY, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        value = tl.load(logits + tokens, mask=tokens < end, other=MINUS_INFINITY).to(tl.float32)
        larger = tl.maximum(tops, value)
        safe = tl.where(larger == MINUS_INFINITY, 0.0, larger)
        sums = sums * tl.exp(tops - safe) + tl.exp(value - safe)
        tops = larger
    top = tl.max(tops, 0)
    safe_top = tl.where(top == MINUS_INFINITY, 0.0, top)  # a range behind the vocabulary's end is empty
    return top, tl.sum(sums * tl.exp(tops - safe_top), 0)


@triton.jit
def _scan(
    logits, scratch, maxima, numbers, factors, position, first, end,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Segments' maxima, of tokens first..end - 1, first a segment's; what is drawn of them where nothing filters.

    Returns:
        (the largest sum with noise, or logit; its token, of equals the first; how many logits are not finite)
    """
    features = tl.load(numbers + FEATURES)
    is_adjusted, is_noisy = (features & ADJUSTED) != 0, (features & NOISE) != 0
    key, inverse = key_of(tl.load(numbers + SEED), position), tl.load(factors + INVERSE)
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    bests = tl.full([GROUP, SEGMENT], MINUS_INFINITY, tl.float32)
    drawn = tl.full([GROUP, SEGMENT], NO_TOKEN, tl.int32)
    broken = tl.zeros([GROUP, SEGMENT], tl.int32)
    least = tl.full([], MINUS_INFINITY, tl.float32)  # what the largest sum is at least
    for start in range(first, end, GROUP * SEGMENT):
        tokens = start + rows[:, None] * SEGMENT + columns[None, :]
        is_inside = tokens < end
        raw = tl.load(logits + tokens, mask=is_inside, other=0.0).to(tl.float32)
        broken += tl.where(tl.abs(raw) < float("inf"), 0, 1)  # not of a NaN either
        if is_adjusted:
            value = tl.load(scratch + tokens, mask=is_inside, other=MINUS_INFINITY)
        else:
            value = tl.where(is_inside, raw, MINUS_INFINITY)
        segments = start // SEGMENT + rows
        tl.store(maxima + segments, tl.max(value, 1), mask=segments * SEGMENT < end)
        if features & FILTERS == 0:
            may_win = True
            if is_noisy:
                value *= inverse
                uniforms = uniforms_of(key, tokens)
                may_win = tl.max(tl.max(value + most_noise_of(uniforms), 1), 0) >= least
                if may_win:
                    value += noise_of(uniforms)
            if may_win:
                is_better = value > bests
                bests = tl.where(is_better, value, bests)
                drawn = tl.where(is_better, tokens, drawn)
                if is_noisy:
                    least = tl.max(tl.max(bests, 1), 0)
    best = tl.max(tl.max(bests, 1), 0)
    token = tl.min(tl.min(tl.where(bests == best, drawn, NO_TOKEN), 1), 0)
    return best, token, tl.sum(tl.sum(broken, 1), 0)


@triton.jit
def _total_weight(logits, scratch, maxima, is_adjusted, top, slope, vocab_size, GROUP: tl.constexpr):
    """The sum of a row's weights."""
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    sums = tl.zeros([GROUP, SEGMENT], tl.int64)
    num_segments = tl.cdiv(vocab_size, SEGMENT)
    for segment in range(0, num_segments, GROUP):
        tops = tl.load(maxima + segment + rows, mask=segment + rows < num_segments, other=MINUS_INFINITY)
        if tl.max(weigh(tops, top, slope), 0) > 0:
            tokens = (segment + rows[:, None]) * SEGMENT + columns[None, :]
            value = _load(logits, scratch, is_adjusted, tokens, tokens < vocab_size)
            sums += weigh(value, top, slope)
    return tl.sum(tl.sum(sums, 1), 0)


@triton.jit
def _load_segments(
    logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, GROUP: tl.constexpr
):  # fmt: skip
    """(logits, tokens) of some listed segments, ascending; -inf and -1 where there is none."""
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    segments = tl.load(listed + start + rows, mask=start + rows < num_listed, other=0)
    tokens = segments[:, None] * SEGMENT + columns[None, :]
    is_inside = (tokens < vocab_size) & (start + rows < num_listed)[:, None]
    value = _load(logits, scratch, is_adjusted, tokens, is_inside)
    tokens = tl.where(is_inside, tokens, -1)
    return tl.reshape(value, [GROUP * SEGMENT]), tl.reshape(tokens, [GROUP * SEGMENT])


@triton.jit
def _list_segments(maxima, bound, num_segments, listed, SEGMENTS: tl.constexpr):
    """The segments that have a logit not below the bound, ascending, to memory; returns how many."""
    segments = tl.arange(0, SEGMENTS)
    is_inside = segments < num_segments
    is_listed = is_inside & (tl.load(maxima + segments, mask=is_inside, other=MINUS_INFINITY) >= bound)
    counts = is_listed.to(tl.int32)
    tl.store(listed + tl.cumsum(counts, 0) - 1, segments, mask=is_listed)
    tl.debug_barrier()
    return tl.sum(counts, 0)


@triton.jit
def _gather(
    logits, scratch, is_adjusted, listed, num_listed, bound, vocab_size, values, tokens_kept, GROUP: tl.constexpr
):  # fmt: skip
    """Logits not below the bound, and their tokens, ascending, to memory, as many as it takes; returns how many."""
    num_found = 0
    for start in range(0, num_listed, GROUP):
        value, tokens = _load_segments(logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, GROUP)
        is_found = (value >= bound) & (tokens >= 0)
        counts = is_found.to(tl.int32)
        places = num_found + tl.cumsum(counts, 0) - 1
        has_room = is_found & (places < GROUP * SEGMENT)
        tl.store(values + places, value, mask=has_room)
        tl.store(tokens_kept + places, tokens, mask=has_room)
        num_found += tl.sum(counts, 0)
    tl.debug_barrier()
    return num_found


@triton.jit
def _load_gathered(
    logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, values, tokens_kept, num_values,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(logits, tokens) of what was gathered, where it had room; else of some of the segments that it comes from."""
    if num_values <= GROUP * SEGMENT:
        places = tl.arange(0, GROUP * SEGMENT)
        value = tl.load(values + places, mask=places < num_values, other=MINUS_INFINITY)
        tokens = tl.load(tokens_kept + places, mask=places < num_values, other=-1)
    else:
        value, tokens = _load_segments(logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, GROUP)
    return value, tokens


@triton.jit
def _weights_of(value, tokens, limit, top, slope, BY_MASS: tl.constexpr):
    """1 each, or filters.weigh, of those that are not below the limit; 0 of others."""
    is_counted = (tokens >= 0) & (value >= limit)
    if BY_MASS:
        return tl.where(is_counted, weigh(value, top, slope), 0)
    return is_counted.to(tl.int64)


@triton.jit
def _weigh_gathered(
    logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values, limit, top, slope,
    BY_MASS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of what was gathered and is not below the limit."""
    sums = tl.zeros([GROUP * SEGMENT], tl.int64)
    end = tl.where(num_values <= GROUP * SEGMENT, 1, num_listed)
    for start in range(0, end, GROUP):
        value, tokens = _load_gathered(
            logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, values, tokens_kept, num_values, GROUP
        )
        sums += _weights_of(value, tokens, limit, top, slope, BY_MASS)
    return tl.sum(sums, 0)


@triton.jit
def _reaching(
    logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values, limit, top, slope,
    needed, BY_MASS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """largest_reaching of what was gathered and is not below the limit: in registers, where it fits."""
    if num_values <= GROUP * SEGMENT:
        value, tokens = _load_gathered(
            logits, scratch, is_adjusted, listed, 0, num_listed, vocab_size, values, tokens_kept, num_values, GROUP
        )
        weights = _weights_of(value, tokens, limit, top, slope, BY_MASS)
        found = largest_reaching(ordered_of(value), weights, needed)
    else:
        # All not below the limit are enough; where there is none, those not below the lowest float32 are as good.
        low = ordered_of(tl.maximum(limit, LOWEST)).to(tl.int64)
        high = ordered_of(top).to(tl.int64)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            weight = _weigh_gathered(
                logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values,
                number_of(middle), top, slope, BY_MASS, GROUP,
            )  # fmt: skip
            is_enough = weight >= needed
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        found = number_of(low)
    return found


@triton.jit
def _draw_filtered(
    logits, scratch, maxima, numbers, factors, position, vocab_size, listed, values, tokens_kept,
    GROUP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """A token of what top_k, top_p and min_p keep."""
    is_adjusted = (tl.load(numbers + FEATURES) & ADJUSTED) != 0
    top_k, top_p, slope = tl.load(numbers + TOP_K), tl.load(factors + TOP_P), tl.load(factors + SLOPE)
    has_top_k, is_by_mass = top_k < vocab_size, top_p < 1
    num_segments = tl.cdiv(vocab_size, SEGMENT)
    segments = tl.arange(0, SEGMENTS)
    tops = tl.load(maxima + segments, mask=segments < num_segments, other=MINUS_INFINITY)
    top = tl.max(tops, 0)
    limit = top + tl.load(factors + LEAST)
    # Below the bound nothing is kept, nor counts in a share.
    bound = tl.where(has_top_k & is_by_mass, MINUS_INFINITY, limit)
    needed = top_k
    if has_top_k:
        if top_k <= num_segments:  # as many segments, at least as many tokens
            ones = (segments < num_segments).to(tl.int64)
            bound = tl.maximum(bound, largest_reaching(ordered_of(tops), ones, top_k))
    else:
        if is_by_mass:
            total = _total_weight(logits, scratch, maxima, is_adjusted, top, slope, vocab_size, GROUP)
            needed = needed_of(total, top_p)
            weights = tl.where(segments < num_segments, weigh(tops, top, slope), 0)
            if tl.sum(weights, 0) >= needed:
                bound = tl.maximum(bound, largest_reaching(ordered_of(tops), weights, needed))
    num_listed = _list_segments(maxima, bound, num_segments, listed, SEGMENTS)
    num_values = _gather(
        logits, scratch, is_adjusted, listed, num_listed, bound, vocab_size, values, tokens_kept, GROUP
    )
    limit_k = bound
    if has_top_k:
        if top_k < num_values:
            limit_k = _reaching(
                logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values,
                bound, top, slope, top_k, False, GROUP,
            )  # fmt: skip
    limit = tl.maximum(limit, limit_k)
    if is_by_mass:
        weight = _weigh_gathered(
            logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values,
            limit_k, top, slope, True, GROUP,
        )  # fmt: skip
        if has_top_k:
            needed = needed_of(weight, top_p)
        if weight >= needed:  # otherwise min_p keeps less
            reached = _reaching(
                logits, scratch, is_adjusted, listed, num_listed, vocab_size, values, tokens_kept, num_values,
                limit_k, top, slope, needed, True, GROUP,
            )  # fmt: skip
            limit = tl.maximum(limit, reached)
    key, inverse = key_of(tl.load(numbers + SEED), position), tl.load(factors + INVERSE)
    bests = tl.full([GROUP * SEGMENT], MINUS_INFINITY, tl.float32)
    drawn = tl.full([GROUP * SEGMENT], NO_TOKEN, tl.int32)
    end = tl.where(num_values <= GROUP * SEGMENT, 1, num_listed)
    for start in range(0, end, GROUP):
        value, tokens = _load_gathered(
            logits, scratch, is_adjusted, listed, start, num_listed, vocab_size, values, tokens_kept, num_values, GROUP
        )
        sums = value * inverse + noise_of(uniforms_of(key, tokens))
        is_better = (tokens >= 0) & (value >= limit) & (sums > bests)
        bests = tl.where(is_better, sums, bests)
        drawn = tl.where(is_better, tokens, drawn)
    return tl.min(tl.where(bests == tl.max(bests, 0), drawn, NO_TOKEN), 0)


@triton.jit
def _finish(
    row, slot, token, num_broken, logits, vocab_size, features, top, total, seen,
    token_ids, is_finite, logprobs, last_tokens,
    HAS_SEEN: tl.constexpr,
):  # fmt: skip
    """What is told of a row."""
    token = tl.where((num_broken == 0) & (token < vocab_size), token, 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(last_tokens + slot, token.to(tl.int64))
    tl.store(is_finite + row, (num_broken == 0).to(tl.int8))
    if features & LOGPROBS:
        tl.store(logprobs + row, tl.load(logits + token).to(tl.float32) - top - tl.log(total))
    if HAS_SEEN:
        if features & PENALTIES:
            place = seen + token
            tl.store(place, tl.load(place) + 2)


@triton.jit
def sample_rows(
    logits,  # [rows, vocab]
    slots,  # int64 [rows]
    positions,  # int64 [rows], of the tokens to draw
    numbers,  # int64 [slots, Number]
    factors,  # float32 [slots, Factor]
    biases,  # float32 [slots, MAX_BIASES]
    bias_ids,  # int32 [slots, MAX_BIASES]
    stop_ids,  # int32 [slots, MAX_STOP_IDS]
    seen,  # int32 [slots, vocab], written; see SamplingSlots; not read without HAS_SEEN
    scratch,  # float32 [rows, vocab]
    maxima,  # float32 [rows, segments]
    listed,  # int32 [rows, segments]
    values,  # float32 [rows, GROUP * SEGMENT]
    tokens_kept,  # int32 [rows, GROUP * SEGMENT]
    token_ids,  # int64 [rows], written
    is_finite,  # int8 [rows], written
    logprobs,  # float32 [rows]: written where the slot asks
    last_tokens,  # int64 [slots], written: what the slot drew last
    vocab_size,
    HAS_SEEN: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    GROUP: tl.constexpr,  # segments read at once
    SEGMENTS: tl.constexpr,  # >= those of a row
):
    """Program: a row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        position = tl.load(positions + row)
        numbers += slot * NUM_NUMBERS
        factors += slot * NUM_FACTORS
        seen += slot * vocab_size
        logits += row * vocab_size
        scratch += row * vocab_size
        maxima += row * num_segments
        features = tl.load(numbers + FEATURES)
        top, total = 0.0, 1.0
        if features & LOGPROBS:
            top, total = _sum_exponentials(logits, 0, vocab_size, GROUP * SEGMENT)
        if features & ADJUSTED:
            _adjust(
                logits, scratch, seen, numbers, factors, position, biases + slot * MAX_BIASES,
                bias_ids + slot * MAX_BIASES, stop_ids + slot * MAX_STOP_IDS, 0, vocab_size,
                HAS_SEEN, MAX_BIASES, MAX_STOP_IDS, GROUP * SEGMENT,
            )  # fmt: skip
        _, token, num_broken = _scan(logits, scratch, maxima, numbers, factors, position, 0, vocab_size, GROUP)
        tl.debug_barrier()
        if (features & FILTERS != 0) & (num_broken == 0):
            token = _draw_filtered(
                logits, scratch, maxima, numbers, factors, position, vocab_size, listed + row * num_segments,
                values + row * GROUP * SEGMENT, tokens_kept + row * GROUP * SEGMENT, GROUP, SEGMENTS,
            )  # fmt: skip
        _finish(
            row, slot, token, num_broken, logits, vocab_size, features, top, total, seen,
            token_ids, is_finite, logprobs, last_tokens, HAS_SEEN,
        )  # fmt: skip


@triton.jit
def scan_rows(
    logits, slots, positions, numbers, factors, biases, bias_ids, stop_ids, seen, scratch, maxima,
    found,  # float32 [rows, splits, 3], written: the range's best, the largest raw logit and its sum of exponentials
    found_tokens,  # int32 [rows, splits, 2], written: the best's token, and how many logits are not finite
    vocab_size,
    range_size,  # tokens of a split, whole groups of segments
    HAS_SEEN: tl.constexpr,
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program: a row, and a range of its tokens. Others: see sample_rows."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        numbers += slot * NUM_NUMBERS
        factors += slot * NUM_FACTORS
        logits += row * vocab_size
        scratch += row * vocab_size
        maxima += row * tl.cdiv(vocab_size, SEGMENT)
        first = split * range_size
        end = tl.minimum(first + range_size, vocab_size)
        features = tl.load(numbers + FEATURES)
        top, total = 0.0, 1.0
        if features & LOGPROBS:
            top, total = _sum_exponentials(logits, first, end, GROUP * SEGMENT)
        if features & ADJUSTED:
            _adjust(
                logits, scratch, seen + slot * vocab_size, numbers, factors, position, biases + slot * MAX_BIASES,
                bias_ids + slot * MAX_BIASES, stop_ids + slot * MAX_STOP_IDS, first, end,
                HAS_SEEN, MAX_BIASES, MAX_STOP_IDS, GROUP * SEGMENT,
            )  # fmt: skip
        best, token, num_broken = _scan(logits, scratch, maxima, numbers, factors, position, first, end, GROUP)
        place = row * tl.num_programs(1) + split
        tl.store(found + place * 3, best)
        tl.store(found + place * 3 + 1, top)
        tl.store(found + place * 3 + 2, total)
        tl.store(found_tokens + place * 2, token)
        tl.store(found_tokens + place * 2 + 1, num_broken)


@triton.jit
def end_rows(
    logits, slots, positions, numbers, factors, seen, scratch, maxima, listed, values, tokens_kept,
    found, found_tokens, token_ids, is_finite, logprobs, last_tokens,
    vocab_size,
    num_splits,
    HAS_SEEN: tl.constexpr,
    SPLITS: tl.constexpr,  # >= num_splits
    GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Program: a row, whose ranges scan_rows has read; what it found is put together in their order."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        numbers += slot * NUM_NUMBERS
        factors += slot * NUM_FACTORS
        logits += row * vocab_size
        features = tl.load(numbers + FEATURES)
        splits = tl.arange(0, SPLITS)
        places, is_inside = row * num_splits + splits, splits < num_splits
        bests = tl.load(found + places * 3, mask=is_inside, other=MINUS_INFINITY)
        tops = tl.load(found + places * 3 + 1, mask=is_inside, other=MINUS_INFINITY)
        totals = tl.load(found + places * 3 + 2, mask=is_inside, other=0.0)
        drawn = tl.load(found_tokens + places * 2, mask=is_inside, other=NO_TOKEN)
        num_broken = tl.sum(tl.load(found_tokens + places * 2 + 1, mask=is_inside, other=0), 0)
        token = tl.min(tl.where(bests == tl.max(bests, 0), drawn, NO_TOKEN), 0)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        if (features & FILTERS != 0) & (num_broken == 0):
            token = _draw_filtered(
                logits, scratch + row * vocab_size, maxima + row * num_segments, numbers, factors,
                tl.load(positions + row), vocab_size, listed + row * num_segments,
                values + row * GROUP * SEGMENT, tokens_kept + row * GROUP * SEGMENT, GROUP, SEGMENTS,
            )  # fmt: skip
        _finish(
            row, slot, token, num_broken, logits, vocab_size, features, top, total, seen + slot * vocab_size,
            token_ids, is_finite, logprobs, last_tokens, HAS_SEEN,
        )  # fmt: skip
