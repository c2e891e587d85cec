"""Reads a row of logits once: adjusts it, sums it for logprobs, finds its segments' maxima, and draws: @triton.jit.

What filters keep is drawn afterwards, from few segments: filtered_draw.py. Thread: engine.
"""

import triton
import triton.language as tl

from gpu.kernels.sampling_layout import (
    ADJUSTED,
    BIAS,
    FILTERS,
    FREE_FROM,
    FREQUENCY,
    INVERSE,
    MIN_TOKENS,
    MINUS_INFINITY,
    NO_TOKEN,
    NOISE,
    NUM_BIASES,
    NUM_STOP_IDS,
    PENALTIES,
    PRESENCE,
    REPETITION,
    SEED,
    SEGMENT,
)
from gpu.kernels.sampling_rules import key_of, most_noise_of, noise_of, uniforms_of


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
    """Penalties, logit_bias and min_tokens, of tokens first..end - 1, to scratch. See sampler._adjust.

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
        if row.position < tl.load(row.numbers + FREE_FROM):
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
    """Segments' maxima, of tokens first..end - 1, first a segment's; what is drawn of them where nothing filters.

    Returns:
        (the largest sum with noise, or logit; its token, of equals the first; how many logits are not finite)
    """
    is_adjusted, is_noisy = (row.features & ADJUSTED) != 0, (row.features & NOISE) != 0
    key, inverse = key_of(tl.load(row.numbers + SEED), row.position), tl.load(row.factors + INVERSE)
    rows, columns = tl.arange(0, GROUP), tl.arange(0, SEGMENT)
    bests = tl.full([GROUP, SEGMENT], MINUS_INFINITY, tl.float32)
    drawn = tl.full([GROUP, SEGMENT], NO_TOKEN, tl.int32)
    broken = tl.zeros([GROUP, SEGMENT], tl.int32)
    least = tl.full([], MINUS_INFINITY, tl.float32)  # what the largest sum is at least
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
                drawn = tl.where(is_better, tokens, drawn)
                if is_noisy:
                    least = tl.max(tl.max(bests, 1), 0)
    best = tl.max(tl.max(bests, 1), 0)
    token = tl.min(tl.min(tl.where(bests == best, drawn, NO_TOKEN), 1), 0)
    return best, token, tl.sum(tl.sum(broken, 1), 0)
