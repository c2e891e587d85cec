"""Samples a token per row on a CUDA device: kernels, and DeviceSampler, which launches them. Thread: engine.

The stages and their arithmetic are gpu/sampling_rules.py's, operation by operation: divisions are rounded as IEEE 754
has it, and the kernels are launched with enable_fp_fusion=False, so that a token is torch's to the last bit.

`scan_rows` reads a row once, several programs a range of its segments each: adjusts it, sums it for logprobs, finds its
segments' maxima, and samples where nothing filters. `end_rows` puts the ranges together, and samples rows with filters:
from the maxima alone follows, mostly, which few segments hold what top-k, top-p and min-p keep, and only those are read
again; nothing is sorted. The tokens do not depend on how many programs share a row.

In every kernel: slots are those of requests, < 0: a row that is padding; `scratch` holds a row's adjusted logits.

A launch reads and writes only buffers that stay where they are, so that a CUDA graph may hold it. The slots' settings
lie in tables there, brought up to date as slots start: packed as int32, so that they go up in one piece with whatever
else a step sends.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from core.plan import Int32Array
from gpu import sampling_rules as rules
from gpu.kernels.rows import scatter_rows
from gpu.kernels.sizes import next_power_of_two
from gpu.rows import NO_SLOT
from gpu.sampler import ADJUSTED as _ADJUSTED
from gpu.sampler import Factor, Feature, IntArray, LaunchedSampler, Number, SamplingSlots

SEGMENT = tl.constexpr(128)  # tokens
NOISE, FILTERS, PENALTIES = (tl.constexpr(int(f)) for f in (Feature.NOISE, Feature.FILTERS, Feature.PENALTIES))
BIAS, MIN_TOKENS = tl.constexpr(int(Feature.BIAS)), tl.constexpr(int(Feature.MIN_TOKENS))
LOGPROBS, ADJUSTED = tl.constexpr(int(Feature.LOGPROBS)), tl.constexpr(int(_ADJUSTED))
FEATURES, TOP_K, SEED, STOP_FROM, NUM_BIASES, NUM_STOP_IDS = (tl.constexpr(int(n)) for n in Number)
INVERSE, SLOPE, TOP_P, MIN_P_OFFSET, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(int(f)) for f in list(Factor)[:7])
NUM_NUMBERS, NUM_FACTORS = tl.constexpr(len(Number)), tl.constexpr(len(Factor))
NUM_LOGPROBS = tl.constexpr(3)  # of a row: see sampler.LaunchedSampler
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))


class Row(NamedTuple):
    """A row of logits, and its slot's settings.

    Args:
        logits: [vocab], as the model gives them.
        scratch: float32 [vocab]: adjusted, where the slot asks for it.
        maxima: float32 [segments], of the logits that are sampled from.
        numbers, factors: [Number], [Factor], of the slot.
        features: Feature's bits, of the slot.
        position: of the token to sample.
        vocab_size: tokens.
    """

    logits: Any
    scratch: Any
    maxima: Any
    numbers: Any
    factors: Any
    features: Any
    position: Any
    vocab_size: Any


@triton.jit
def load_logits(row, tokens, mask):
    """The logits that are sampled from, as float32; -inf where masked."""
    if (row.features & ADJUSTED) != 0:
        value = tl.load(row.scratch + tokens, mask=mask, other=MINUS_INFINITY)
    else:
        value = tl.load(row.logits + tokens, mask=mask, other=MINUS_INFINITY).to(tl.float32)
    return value


GOLDEN, MIX_1, MIX_2 = tl.constexpr(rules.GOLDEN), tl.constexpr(rules.MIX_1), tl.constexpr(rules.MIX_2)
REST_BITS, UNIT = tl.constexpr(64 - rules.UNIFORM_BITS), tl.constexpr(2.0**-rules.UNIFORM_BITS)
LARGEST_UNIFORM = tl.constexpr(rules.LARGEST_UNIFORM)
LN_2, THREE_QUARTERS = tl.constexpr(rules.LN_2), tl.constexpr(rules.THREE_QUARTERS)
LN_0, LN_1, LN_2ND, LN_3, LN_4 = (tl.constexpr(term) for term in rules.LN_TERMS)
LEAST_POWER, ROUNDER = tl.constexpr(rules.LEAST_POWER), tl.constexpr(rules.ROUNDER)
WEIGHT_BITS = tl.constexpr(rules.WEIGHT_BITS)
EXP2_0, EXP2_1, EXP2_2, EXP2_3, EXP2_4, EXP2_5, EXP2_6 = (tl.constexpr(term) for term in rules.EXP2_TERMS)
BOUND_SLACK = tl.constexpr(1e-3)  # more than the rounding of a bound


@triton.jit
def _mix(x):
    """SplitMix64's finalizer, of uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def key_of(seed, position):
    """See sampling_rules.row_keys. seed, position: int64, scalars."""
    return _mix(seed.to(tl.uint64, bitcast=True) + _mix(position.to(tl.uint64, bitcast=True) * GOLDEN))


@triton.jit
def uniforms_of(key, tokens):
    """Above 0, below 1."""
    bits = _mix(key + tokens.to(tl.uint64) * GOLDEN) >> REST_BITS
    return tl.minimum((bits.to(tl.int64).to(tl.float32) + 0.5) * UNIT, LARGEST_UNIFORM)


@triton.jit
def _ln(exponent, part):
    """See sampling_rules._ln."""
    ratio = tl.math.div_rn(part, part + 2.0)
    square = ratio * ratio
    series = square * LN_4
    series = (series + LN_3) * square
    series = (series + LN_2ND) * square
    series = (series + LN_1) * square
    return (series + LN_0) * ratio + exponent.to(tl.float32) * LN_2


@triton.jit
def _exponent_of(x):
    return (x.to(tl.int32, bitcast=True) - THREE_QUARTERS) >> 23


@triton.jit
def _part_of(x, exponent):
    return (x.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def noise_of(uniforms):
    """See sampling_rules.gumbel_noise."""
    rest = 1.0 - uniforms
    exponent = _exponent_of(rest)
    part = tl.where(exponent == 0, -uniforms, _part_of(rest, exponent))
    rate = -_ln(exponent, part)
    exponent = _exponent_of(rate)
    return -_ln(exponent, _part_of(rate, exponent))


@triton.jit
def most_noise_of(uniforms):
    """A bound of noise_of without a logarithm: an exponential number is at least its uniform one."""
    exponent = 127 - (uniforms.to(tl.int32, bitcast=True) >> 23)
    return exponent.to(tl.float32) * LN_2 + BOUND_SLACK


@triton.jit
def weigh(logits, top, slope):
    """See sampling_rules.weigh."""
    power = (logits - top) * slope
    power = tl.where(power > LEAST_POWER, power, LEAST_POWER)
    whole = (power + ROUNDER) - ROUNDER
    part = power - whole
    series = part * EXP2_6
    series = (series + EXP2_5) * part
    series = (series + EXP2_4) * part
    series = (series + EXP2_3) * part
    series = (series + EXP2_2) * part
    series = (series + EXP2_1) * part
    series = series + EXP2_0
    exponents = (whole.to(tl.int32) + WEIGHT_BITS) << 23
    return (series.to(tl.int32, bitcast=True) + exponents).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def needed_of(weight, top_p):
    """See sampling_rules.needed_of. Scalars: int64, float32."""
    needed = tl.math.ceil(weight.to(tl.float64) * top_p.to(tl.float64))
    return tl.maximum(needed, 1.0).to(tl.int64)


@triton.jit
def ordered_of(x):
    """A float32 as an int32 in the same order; 0.0 and -0.0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number_of(ordered):
    """The float32 that ordered_of gave. A scalar, int64 of that range."""
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_reaching(ordered, weights, needed):
    """The largest number such that those not below it weigh at least `needed`; all of them together must.

    Args:
        ordered: int32 [some], of ordered_of.
        weights: int64 [some]; 0: there is no such number.
    """
    low = tl.min(tl.where(weights > 0, ordered, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(weights > 0, ordered, -0x7FFFFFFF), 0).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        is_enough = tl.sum(tl.where(ordered >= middle, weights, 0), 0) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return number_of(low)


@triton.jit
def _penalise(row, seen, first, end, BLOCK: tl.constexpr):
    """Logits first..end - 1 to scratch, with penalties where the slot asks for them."""
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_inside = tokens < end
        value = tl.load(row.logits + tokens, mask=is_inside).to(tl.float32)
        if row.features & PENALTIES:
            repetition, presence = tl.load(row.factors + REPETITION), tl.load(row.factors + PRESENCE)
            known = tl.load(seen + tokens, mask=is_inside, other=0)
            count = (known >> 1).to(tl.float32)
            repeated = tl.where(value > 0, tl.math.div_rn(value, repetition), value * repetition)
            value = tl.where(known > 0, repeated, value)
            value = value - tl.load(row.factors + FREQUENCY) * count - presence * (count > 0).to(tl.float32)
        tl.store(row.scratch + tokens, value, mask=is_inside)


@triton.jit
def adjust(
    row, seen, biases, bias_ids, stop_ids, first, end,
    MAX_BIASES: tl.constexpr, MAX_STOP_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stage 1 of the rules, of tokens first..end - 1, to scratch.

    Args:
        seen, biases, bias_ids, stop_ids: of the slot.
    """
    _penalise(row, seen, first, end, BLOCK)
    tl.debug_barrier()
    if row.features & BIAS:
        places = tl.arange(0, MAX_BIASES)
        ids = tl.load(bias_ids + places, mask=places < tl.load(row.numbers + NUM_BIASES), other=-1)
        is_here = (ids >= first) & (ids < end)
        value = tl.load(row.scratch + ids, mask=is_here) + tl.load(biases + places, mask=is_here)
        tl.store(row.scratch + ids, value, mask=is_here)
        tl.debug_barrier()
    if row.features & MIN_TOKENS:
        if row.position < tl.load(row.numbers + STOP_FROM):
            places = tl.arange(0, MAX_STOP_IDS)
            ids = tl.load(stop_ids + places, mask=places < tl.load(row.numbers + NUM_STOP_IDS), other=-1)
            tl.store(row.scratch + ids, MINUS_INFINITY, mask=(ids >= first) & (ids < end))
        tl.debug_barrier()


@triton.jit
def sum_exponentials(logits, first, end, BLOCK: tl.constexpr):
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
def scan(row, first, end, GROUP: tl.constexpr):
    """Segments' maxima, of tokens first..end - 1, where `first` begins a segment; samples them where nothing filters.

    Returns:
        (the largest sum with noise, or logit; its token, of equals the first; how many logits are not finite)
    """
    is_adjusted, is_noisy = (row.features & ADJUSTED) != 0, (row.features & NOISE) != 0
    key, inverse = key_of(tl.load(row.numbers + SEED), row.position), tl.load(row.factors + INVERSE)
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    bests = tl.full([GROUP, SEGMENT], MINUS_INFINITY, tl.float32)
    sampled = tl.full([GROUP, SEGMENT], NO_TOKEN, tl.int32)
    broken = tl.zeros([GROUP, SEGMENT], tl.int32)
    least = tl.full([], MINUS_INFINITY, tl.float32)  # a lower bound of the largest sum
    for start in range(first, end, GROUP * SEGMENT):
        tokens = start + rows[:, None] * SEGMENT + columns[None, :]
        is_inside = tokens < end
        raw = tl.load(row.logits + tokens, mask=is_inside, other=0.0).to(tl.float32)
        broken += tl.where(tl.abs(raw) < float("inf"), 0, 1)  # not of a NaN either
        if is_adjusted:
            value = tl.load(row.scratch + tokens, mask=is_inside, other=MINUS_INFINITY)
        else:
            value = tl.where(is_inside, raw, MINUS_INFINITY)
        segments = start // SEGMENT + rows
        tl.store(row.maxima + segments, tl.max(value, 1), mask=segments * SEGMENT < end)
        if row.features & FILTERS == 0:
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
                sampled = tl.where(is_better, tokens, sampled)
                if is_noisy:
                    least = tl.max(tl.max(bests, 1), 0)
    best = tl.max(tl.max(bests, 1), 0)
    token = tl.min(tl.min(tl.where(bests == best, sampled, NO_TOKEN), 1), 0)
    return best, token, tl.sum(tl.sum(broken, 1), 0)


LOWEST = tl.constexpr(-3.4028234663852886e38)


class Gathered(NamedTuple):
    """The logits of a row that filters may keep, and the segments that they come from.

    Args:
        listed: int32 [num_listed]: segments, ascending.
        logits, tokens: float32 and int32 [num_logits], ascending by token; where there are more than GROUP * SEGMENT,
            they are incomplete, and the listed segments are read instead.
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
def _gather(row, listed, num_listed, bound, logits, tokens_gathered, GROUP: tl.constexpr):
    """Logits not below the bound, and their tokens, ascending, to memory, as many as have room; returns how many."""
    num_found = 0
    for start in range(0, num_listed, GROUP):
        value, tokens = _load_segments(row, listed, start, num_listed, GROUP)
        is_found = (value >= bound) & (tokens >= 0)
        counts = is_found.to(tl.int32)
        places = num_found + tl.cumsum(counts, 0) - 1
        has_room = is_found & (places < GROUP * SEGMENT)
        tl.store(logits + places, value, mask=has_room)
        tl.store(tokens_gathered + places, tokens, mask=has_room)
        num_found += tl.sum(counts, 0)
    tl.debug_barrier()
    return num_found


@triton.jit
def _end_of(gathered, GROUP: tl.constexpr):
    """Where a loop over GROUP segments at a time ends: after its first turn, where all logits had room."""
    return tl.where(gathered.num_logits <= GROUP * SEGMENT, 1, gathered.num_listed)


@triton.jit
def _load_gathered(row, gathered, start, GROUP: tl.constexpr):
    """(logits, tokens) that were gathered, where they had room; otherwise of some of the segments they come from."""
    if gathered.num_logits <= GROUP * SEGMENT:
        places = tl.arange(0, GROUP * SEGMENT)
        value = tl.load(gathered.logits + places, mask=places < gathered.num_logits, other=MINUS_INFINITY)
        tokens = tl.load(gathered.tokens + places, mask=places < gathered.num_logits, other=-1)
    else:
        value, tokens = _load_segments(row, gathered.listed, start, gathered.num_listed, GROUP)
    return value, tokens


@triton.jit
def _weights_of(value, tokens, limit, top, slope, BY_MASS: tl.constexpr):
    """1 each, or sampling_rules.weigh, of those that are not below the limit; 0 of others."""
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
        # Those not below the limit reach it; without a limit, those not below the lowest float32.
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
    """(a bound below which no logit is kept or counts in a share; the weight that top-p needs, without a top-k)."""
    top_k, top_p, slope = tl.load(row.numbers + TOP_K), tl.load(row.factors + TOP_P), tl.load(row.factors + SLOPE)
    has_top_k, is_by_mass = top_k < row.vocab_size, top_p < 1
    num_segments = tl.cdiv(row.vocab_size, SEGMENT)
    segments = tl.arange(0, SEGMENTS)
    tops = tl.load(row.maxima + segments, mask=segments < num_segments, other=MINUS_INFINITY)
    bound = tl.where(has_top_k & is_by_mass, MINUS_INFINITY, top + tl.load(row.factors + MIN_P_OFFSET))
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
    """The smallest logit that is kept. bound, needed: of _bound_of."""
    top_k, top_p, slope = tl.load(row.numbers + TOP_K), tl.load(row.factors + TOP_P), tl.load(row.factors + SLOPE)
    has_top_k = top_k < row.vocab_size
    limit_k = bound
    if has_top_k:
        if top_k < gathered.num_logits:
            limit_k = _reaching(row, gathered, bound, top, slope, top_k, False, GROUP)
    limit = tl.maximum(top + tl.load(row.factors + MIN_P_OFFSET), limit_k)
    if top_p < 1:
        weight = _weigh_gathered(row, gathered, limit_k, top, slope, True, GROUP)
        if has_top_k:
            needed = needed_of(weight, top_p)
        if weight >= needed:  # otherwise min-p keeps less
            limit = tl.maximum(limit, _reaching(row, gathered, limit_k, top, slope, needed, True, GROUP))
    return limit


@triton.jit
def sample_filtered(row, listed, logits, tokens_gathered, GROUP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Stages 2 to 4 of the rules, of a row with filters. listed, logits, tokens_gathered: room for Gathered."""
    segments = tl.arange(0, SEGMENTS)
    is_inside = segments < tl.cdiv(row.vocab_size, SEGMENT)
    top = tl.max(tl.load(row.maxima + segments, mask=is_inside, other=MINUS_INFINITY), 0)
    bound, needed = _bound_of(row, top, GROUP, SEGMENTS)
    num_listed = _list_segments(row, bound, listed, SEGMENTS)
    num_logits = _gather(row, listed, num_listed, bound, logits, tokens_gathered, GROUP)
    gathered = Gathered(listed, num_listed, logits, tokens_gathered, num_logits)
    limit = _limit_of(row, gathered, bound, needed, top, GROUP)
    key, inverse = key_of(tl.load(row.numbers + SEED), row.position), tl.load(row.factors + INVERSE)
    bests = tl.full([GROUP * SEGMENT], MINUS_INFINITY, tl.float32)
    sampled = tl.full([GROUP * SEGMENT], NO_TOKEN, tl.int32)
    for start in range(0, _end_of(gathered, GROUP), GROUP):
        value, tokens = _load_gathered(row, gathered, start, GROUP)
        sums = value * inverse + noise_of(uniforms_of(key, tokens))
        is_better = (tokens >= 0) & (value >= limit) & (sums > bests)
        bests = tl.where(is_better, sums, bests)
        sampled = tl.where(is_better, tokens, sampled)
    return tl.min(tl.where(bests == tl.max(bests, 0), sampled, NO_TOKEN), 0)


@triton.jit
def _finish(
    row, index, slot, token, num_broken, top, total, seen, token_ids, is_finite, logprobs, last_tokens
):  # fmt: skip
    """Write the results of the index-th row."""
    token = tl.where((num_broken == 0) & (token < row.vocab_size), token, 0)
    tl.store(token_ids + index, token.to(tl.int64))
    tl.store(last_tokens + slot, token.to(tl.int64))
    tl.store(is_finite + index, (num_broken == 0).to(tl.int8))
    if row.features & LOGPROBS:
        place, log_total = logprobs + index * NUM_LOGPROBS, tl.log(total)
        tl.store(place, tl.load(row.logits + token).to(tl.float32) - top - log_total)
        tl.store(place + 1, top)
        tl.store(place + 2, log_total)
    if row.features & PENALTIES:
        tl.store(seen + token, tl.load(seen + token) + 2)


@triton.jit
def _row_at(index, slot, logits, positions, numbers, factors, scratch, maxima, vocab_size):
    """The index-th row of the step."""
    numbers += slot * NUM_NUMBERS
    return Row(
        logits + index * vocab_size, scratch + index * vocab_size, maxima + index * tl.cdiv(vocab_size, SEGMENT),
        numbers, factors + slot * NUM_FACTORS, tl.load(numbers + FEATURES), tl.load(positions + index), vocab_size,
    )  # fmt: skip


@triton.jit
def scan_rows(
    logits,  # [rows, vocab]
    slots,  # int64 [rows]
    positions,  # int64 [rows], of the tokens to sample
    numbers,  # int64 [slots, Number]
    factors,  # float32 [slots, Factor]
    biases,  # float32 [slots, MAX_BIASES]
    bias_ids,  # int32 [slots, MAX_BIASES]
    stop_ids,  # int32 [slots, MAX_STOP_IDS]
    seen,  # int32 [slots, vocab]; see SamplingSlots
    scratch,  # float32 [rows, vocab], written
    maxima,  # float32 [rows, segments], written
    found,  # float32 [rows, splits, 3], written: the range's best, the largest raw logit and its sum of exponentials
    found_tokens,  # int32 [rows, splits, 2], written: the best's token, and how many logits are not finite
    vocab_size,
    range_size,  # tokens of a split, whole groups of segments
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    GROUP: tl.constexpr,  # segments read at once
):
    """Program: a row, and a range of its tokens."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + index)
    if slot >= 0:
        row = _row_at(index, slot, logits, positions, numbers, factors, scratch, maxima, vocab_size)
        first = split * range_size
        end = tl.minimum(first + range_size, vocab_size)
        top, total = 0.0, 1.0
        if row.features & LOGPROBS:
            top, total = sum_exponentials(row.logits, first, end, GROUP * SEGMENT)
        if row.features & ADJUSTED:
            adjust(
                row, seen + slot * vocab_size, biases + slot * MAX_BIASES, bias_ids + slot * MAX_BIASES,
                stop_ids + slot * MAX_STOP_IDS, first, end, MAX_BIASES, MAX_STOP_IDS, GROUP * SEGMENT,
            )  # fmt: skip
        best, token, num_broken = scan(row, first, end, GROUP)
        place = index * tl.num_programs(1) + split
        tl.store(found + place * 3, best)
        tl.store(found + place * 3 + 1, top)
        tl.store(found + place * 3 + 2, total)
        tl.store(found_tokens + place * 2, token)
        tl.store(found_tokens + place * 2 + 1, num_broken)


@triton.jit
def end_rows(
    logits, slots, positions, numbers, factors, seen, scratch, maxima,
    listed,  # int32 [rows, segments], written
    values,  # float32 [rows, GROUP * SEGMENT], written
    tokens_gathered,  # int32 [rows, GROUP * SEGMENT], written
    found, found_tokens,
    token_ids,  # int64 [rows], written
    is_finite,  # int8 [rows], written
    logprobs,  # float32 [rows, NUM_LOGPROBS]: written where the slot asks; see sampler.LaunchedSampler
    last_tokens,  # int64 [slots], written: what the slot sampled last
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,  # >= num_splits
    GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,  # >= those of a row
):  # fmt: skip
    """Program: a row, whose ranges scan_rows has read: puts them together, in order."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index)
    if slot >= 0:
        row = _row_at(index, slot, logits, positions, numbers, factors, scratch, maxima, vocab_size)
        splits = tl.arange(0, SPLITS)
        places, is_inside = index * num_splits + splits, splits < num_splits
        bests = tl.load(found + places * 3, mask=is_inside, other=MINUS_INFINITY)
        tops = tl.load(found + places * 3 + 1, mask=is_inside, other=MINUS_INFINITY)
        totals = tl.load(found + places * 3 + 2, mask=is_inside, other=0.0)
        sampled = tl.load(found_tokens + places * 2, mask=is_inside, other=NO_TOKEN)
        num_broken = tl.sum(tl.load(found_tokens + places * 2 + 1, mask=is_inside, other=0), 0)
        token = tl.min(tl.where(bests == tl.max(bests, 0), sampled, NO_TOKEN), 0)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        if (row.features & FILTERS != 0) & (num_broken == 0):
            num_segments = tl.cdiv(vocab_size, SEGMENT)
            token = sample_filtered(
                row, listed + index * num_segments, values + index * GROUP * SEGMENT,
                tokens_gathered + index * GROUP * SEGMENT, GROUP, SEGMENTS,
            )  # fmt: skip
        _finish(
            row, index, slot, token, num_broken, top, total, seen + slot * vocab_size, token_ids, is_finite, logprobs,
            last_tokens,
        )  # fmt: skip


MAX_BIASES = 512  # of a slot: more than requests may have by default
MAX_STOP_IDS = 64
SEGMENT_TOKENS: int = SEGMENT.value


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are read.

    Args:
        num_splits: programs that share a row, a range of its segments each.
        group: segments read at once.
        num_warps: of a program.
    """

    num_splits: int
    group: int
    num_warps: int


# By the most rows each is for: fewer rows than a device has multiprocessors are split. By arithmetic, for the 132 of
# an H200, not by measurement.
SHAPES: tuple[tuple[int, Shape], ...] = (
    (8, Shape(16, 16, 8)),
    (32, Shape(4, 16, 8)),
    (64, Shape(2, 16, 8)),
    (1 << 30, Shape(1, 16, 8)),
)
SPLIT_FROM = 1 << 14  # tokens: one program reads a row of a smaller vocabulary


def shape_of(num_rows: int, vocab_size: int) -> Shape:
    """The launch shape depends only on row count and vocabulary, so that a graph can hold it."""
    shape = next(shape for most, shape in SHAPES if num_rows <= most)
    return shape if vocab_size >= SPLIT_FROM else Shape(1, shape.group, shape.num_warps)


class DeviceSampler(LaunchedSampler):
    """
    Args:
        settings: read when slots have started since the last launch.
        max_rows: of a step; None: as many as there are slots.
        shape: None: as shape_of says.
    """

    def __init__(self, settings: SamplingSlots, max_rows: int | None = None, shape: Shape | None = None) -> None:
        self._settings, self._shape = settings, shape
        num_slots, vocab_size, device = len(settings.numbers), settings.vocab_size, settings.device
        max_rows = num_slots if max_rows is None else max_rows
        max_splits = max(shape.num_splits for _, shape in SHAPES) if shape is None else shape.num_splits
        max_group = max(shape.group for _, shape in SHAPES) if shape is None else shape.group
        num_segments, num_gathered = -(-vocab_size // SEGMENT_TOKENS), max_group * SEGMENT_TOKENS

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._numbers, self._factors = room(num_slots, len(Number), dtype=torch.int64), room(num_slots, len(Factor))
        self._biases, self._bias_ids = room(num_slots, MAX_BIASES), room(num_slots, MAX_BIASES, dtype=torch.int32)
        self._stop_ids = room(num_slots, MAX_STOP_IDS, dtype=torch.int32)
        self._seen = settings.reserve_seen()  # now: captured graphs hold its address
        self._rows = torch.full((2, max_rows), NO_SLOT, dtype=torch.int64, device=device)  # slots, positions
        self._scratch = room(max_rows, vocab_size)
        self._maxima, self._listed = room(max_rows, num_segments), room(max_rows, num_segments, dtype=torch.int32)
        self._values, self._tokens = room(max_rows, num_gathered), room(max_rows, num_gathered, dtype=torch.int32)
        self._found = room(max_rows, max_splits, 3)
        self._found_tokens = room(max_rows, max_splits, 2, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.is_finite = room(max_rows, dtype=torch.bool)
        self.logprobs = room(max_rows, NUM_LOGPROBS.value)

    def can_sample(self, slots: IntArray) -> bool:
        counts = self._settings.numbers[slots]
        has_room = counts[:, Number.NUM_BIASES] <= MAX_BIASES
        has_room &= counts[:, Number.FEATURES] & Feature.RARE == 0
        return bool((has_room & (counts[:, Number.NUM_STOP_IDS] <= MAX_STOP_IDS)).all())

    def take_started(self) -> list[Int32Array]:
        settings = self._settings
        slots, seen = sorted(settings.take_changed()), settings.take_seen()
        numbers, nothing = settings.numbers[slots], np.empty(0, dtype=np.int32)
        has_biases, has_stop_ids = numbers[:, Number.NUM_BIASES].any(), numbers[:, Number.NUM_STOP_IDS].any()
        # int32: of a table below 8 GiB
        places = [slot * settings.vocab_size + tokens.token_ids for slot, tokens in seen.items()]
        return [
            np.array(slots, dtype=np.int32),
            numbers.view(np.int32),
            settings.factors[slots].view(np.int32),
            _of_width(settings.biases[slots], MAX_BIASES).view(np.int32) if has_biases else nothing,
            _of_width(settings.bias_ids[slots], MAX_BIASES).astype(np.int32) if has_biases else nothing,
            _of_width(settings.stop_ids[slots], MAX_STOP_IDS).astype(np.int32) if has_stop_ids else nothing,
            np.array(list(seen), dtype=np.int32),
            np.concatenate([nothing, *places]).astype(np.int32),
            np.concatenate([nothing, *(tokens.counts for tokens in seen.values())]),
        ]

    def put_started(self, parts: list[Tensor]) -> None:
        slots, *rows = parts[:6]
        seen_slots, places, counts = parts[6:]
        tables = (self._numbers, self._factors, self._biases, self._bias_ids, self._stop_ids)
        for table, part in zip(tables, rows, strict=True):
            if len(part):
                scatter_rows(table.view(torch.int32), slots, part.view(len(slots), -1))
        if len(seen_slots):
            self._seen.index_fill_(0, seen_slots.long(), 0)
            scatter_rows(self._seen.view(-1), places, counts)

    def launch(self, logits: Tensor, rows: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        self._rows[:, :num_rows].copy_(rows[:, :num_rows])
        slots, positions = self._rows
        shape = self._shape or shape_of(num_rows, vocab_size)
        size = shape.group * SEGMENT_TOKENS
        range_size = -(-vocab_size // (shape.num_splits * size)) * size
        read = (logits, slots, positions, self._numbers, self._factors)
        lists, found = (self._biases, self._bias_ids, self._stop_ids), (self._found, self._found_tokens)
        results = (self.token_ids, self.is_finite.view(torch.int8), self.logprobs, self._settings.last_tokens)
        # Fused, a multiplication and an addition are rounded once, which torch and numba do not.
        options = {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        scan_rows[(num_rows, shape.num_splits)](
            *read, *lists, self._seen, self._scratch, self._maxima, *found, vocab_size, range_size,
            MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group, **options,
        )  # fmt: skip
        end_rows[(num_rows,)](
            *read, self._seen, self._scratch, self._maxima, self._listed, self._values, self._tokens, *found, *results,
            vocab_size, shape.num_splits, SPLITS=next_power_of_two(shape.num_splits), GROUP=shape.group,
            SEGMENTS=next_power_of_two(-(-vocab_size // SEGMENT_TOKENS)), **options,
        )  # fmt: skip


def _of_width(lists: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """[lists, width]: cut, or padded with zeros."""
    return np.pad(lists[:, :width], ((0, 0), (0, max(0, width - lists.shape[1]))))
