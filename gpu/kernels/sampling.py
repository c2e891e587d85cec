"""Draws a token per row: @triton.jit. Thread: engine.

A row is read once (row_scan.py), and again in part where filters ask for it (filtered_draw.py). Either one program does
all of a row (`sample_rows`), or several read it, a range of segments each (`scan_rows`), and one ends it (`end_rows`):
the tokens are the same. Nothing depends on the host: what slots ask for, positions and all results are on the device.

Of every kernel: slots are those of requests, < 0: a row that is padding; `scratch` holds a row's adjusted logits.
"""

import triton
import triton.language as tl

from gpu.kernels.filtered_draw import draw_filtered
from gpu.kernels.row_scan import adjust, scan, sum_exponentials
from gpu.kernels.sampling_layout import (
    ADJUSTED,
    FEATURES,
    FILTERS,
    LOGPROBS,
    MINUS_INFINITY,
    NO_TOKEN,
    NUM_FACTORS,
    NUM_LOGPROBS,
    NUM_NUMBERS,
    PENALTIES,
    SEGMENT,
    Row,
)


@triton.jit
def _finish(
    row, index, slot, token, num_broken, top, total, seen, token_ids, is_finite, logprobs, last_tokens
):  # fmt: skip
    """What is told of a row, the index-th."""
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
def sample_rows(
    logits,  # [rows, vocab]
    slots,  # int64 [rows]
    positions,  # int64 [rows], of the tokens to draw
    numbers,  # int64 [slots, Number]
    factors,  # float32 [slots, Factor]
    biases,  # float32 [slots, MAX_BIASES]
    bias_ids,  # int32 [slots, MAX_BIASES]
    stop_ids,  # int32 [slots, MAX_STOP_IDS]
    seen,  # int32 [slots, vocab], written; see SamplingSlots
    scratch,  # float32 [rows, vocab]
    maxima,  # float32 [rows, segments]
    listed,  # int32 [rows, segments]
    values,  # float32 [rows, GROUP * SEGMENT]
    tokens_kept,  # int32 [rows, GROUP * SEGMENT]
    token_ids,  # int64 [rows], written
    is_finite,  # int8 [rows], written
    logprobs,  # float32 [rows, NUM_LOGPROBS]: written where the slot asks; see sampler.DrawRows
    last_tokens,  # int64 [slots], written: what the slot drew last
    vocab_size,
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    GROUP: tl.constexpr,  # segments read at once
    SEGMENTS: tl.constexpr,  # >= those of a row
):
    """Program: a row."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index)
    if slot >= 0:
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        numbers += slot * NUM_NUMBERS
        row = Row(
            logits + index * vocab_size, scratch + index * vocab_size, maxima + index * num_segments, numbers,
            factors + slot * NUM_FACTORS, tl.load(numbers + FEATURES), tl.load(positions + index), vocab_size,
        )  # fmt: skip
        seen += slot * vocab_size
        top, total = 0.0, 1.0
        if row.features & LOGPROBS:
            top, total = sum_exponentials(row.logits, 0, vocab_size, GROUP * SEGMENT)
        if row.features & ADJUSTED:
            adjust(
                row, seen, biases + slot * MAX_BIASES, bias_ids + slot * MAX_BIASES, stop_ids + slot * MAX_STOP_IDS,
                0, vocab_size, MAX_BIASES, MAX_STOP_IDS, GROUP * SEGMENT,
            )  # fmt: skip
        _, token, num_broken = scan(row, 0, vocab_size, GROUP)
        tl.debug_barrier()
        if (row.features & FILTERS != 0) & (num_broken == 0):
            token = draw_filtered(
                row, listed + index * num_segments, values + index * GROUP * SEGMENT,
                tokens_kept + index * GROUP * SEGMENT, GROUP, SEGMENTS,
            )  # fmt: skip
        _finish(row, index, slot, token, num_broken, top, total, seen, token_ids, is_finite, logprobs, last_tokens)


@triton.jit
def scan_rows(
    logits, slots, positions, numbers, factors, biases, bias_ids, stop_ids, seen, scratch, maxima,
    found,  # float32 [rows, splits, 3], written: the range's best, the largest raw logit and its sum of exponentials
    found_tokens,  # int32 [rows, splits, 2], written: the best's token, and how many logits are not finite
    vocab_size,
    range_size,  # tokens of a split, whole groups of segments
    MAX_BIASES: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Program: a row, and a range of its tokens. Others: see sample_rows."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(slots + index)
    if slot >= 0:
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        numbers += slot * NUM_NUMBERS
        row = Row(
            logits + index * vocab_size, scratch + index * vocab_size, maxima + index * num_segments, numbers,
            factors + slot * NUM_FACTORS, tl.load(numbers + FEATURES), tl.load(positions + index), vocab_size,
        )  # fmt: skip
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
    logits, slots, positions, numbers, factors, seen, scratch, maxima, listed, values, tokens_kept,
    found, found_tokens, token_ids, is_finite, logprobs, last_tokens,
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,  # >= num_splits
    GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Program: a row, whose ranges scan_rows has read; what it found is put together in their order."""
    index = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + index)
    if slot >= 0:
        num_segments = tl.cdiv(vocab_size, SEGMENT)
        numbers += slot * NUM_NUMBERS
        row = Row(
            logits + index * vocab_size, scratch + index * vocab_size, maxima + index * num_segments, numbers,
            factors + slot * NUM_FACTORS, tl.load(numbers + FEATURES), tl.load(positions + index), vocab_size,
        )  # fmt: skip
        splits = tl.arange(0, SPLITS)
        places, is_inside = index * num_splits + splits, splits < num_splits
        bests = tl.load(found + places * 3, mask=is_inside, other=MINUS_INFINITY)
        tops = tl.load(found + places * 3 + 1, mask=is_inside, other=MINUS_INFINITY)
        totals = tl.load(found + places * 3 + 2, mask=is_inside, other=0.0)
        drawn = tl.load(found_tokens + places * 2, mask=is_inside, other=NO_TOKEN)
        num_broken = tl.sum(tl.load(found_tokens + places * 2 + 1, mask=is_inside, other=0), 0)
        token = tl.min(tl.where(bests == tl.max(bests, 0), drawn, NO_TOKEN), 0)
        top = tl.max(tops, 0)
        total = tl.sum(totals * tl.exp(tops - top), 0)
        if (row.features & FILTERS != 0) & (num_broken == 0):
            token = draw_filtered(
                row, listed + index * num_segments, values + index * GROUP * SEGMENT,
                tokens_kept + index * GROUP * SEGMENT, GROUP, SEGMENTS,
            )  # fmt: skip
        _finish(
            row, index, slot, token, num_broken, top, total, seen + slot * vocab_size, token_ids, is_finite, logprobs,
            last_tokens,
        )  # fmt: skip
