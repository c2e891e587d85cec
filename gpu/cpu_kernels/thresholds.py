"""Searches for what top_k and top_p keep, without sorting: parts of sampling's kernel. Thread: any, without the GIL.

Both are one question: the largest number such that those not below it weigh enough, each 1 or what filters.weigh says.
It is answered by histograms of the numbers' bits, eight at a time, each over those in the bin that decides; weights
are whole numbers, so that sums are exact.
"""

import numpy as np
from numba import njit

from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.vectors import (
    first_lane,
    larger,
    load_floats,
    multiply_add,
    spread_largest,
    total,
    zeros,
)
from gpu.filters import EXP2_TERMS, LEAST_POWER, ROUNDER, WEIGHT_BITS

SEGMENT = 128  # tokens
BIN_BITS = 8
NUM_BINS = 1 << BIN_BITS
ZERO = np.float32(0)
MINUS_INFINITY = np.float32(-np.inf)
_LEAST_POWER, _ROUNDER = np.float32(LEAST_POWER), np.float32(ROUNDER)
_TERMS = tuple(np.float32(term) for term in EXP2_TERMS)
_POWER_OF_NOTHING = np.float32(-WEIGHT_BITS - 1)  # weights of less are 0
_SIGN = np.int64(1 << 31)


@njit(cache=True)
def scan_segments(row, num_tokens, maxima):
    """The largest logit of each segment; returns (the first segment that has the row's largest, whether all is finite).

    Args:
        row: address of float32 [num_tokens].
    """
    nothing, broken = zeros(), zeros()
    top, top_segment = MINUS_INFINITY, 0
    for segment in range(num_tokens // SEGMENT):
        at = row + 4 * segment * SEGMENT
        best = load_floats(at)
        broken = multiply_add(best, nothing, broken)  # what is not finite times 0 is NaN
        for index in range(LANES, SEGMENT, LANES):
            value = load_floats(at + 4 * index)
            best = larger(best, value)
            broken = multiply_add(value, nothing, broken)
        maxima[segment] = first_lane(spread_largest(best))
        if maxima[segment] > top:
            top, top_segment = maxima[segment], segment
    return top_segment, total(broken) == ZERO


@njit(cache=True)
def scan_rest(logits, maxima, top_segment, is_finite):
    """As scan_segments, whose answer it completes by the last segment, of less than SEGMENT tokens."""
    segment = len(logits) // SEGMENT
    if segment == len(maxima):
        return top_segment, is_finite
    best, broken = MINUS_INFINITY, ZERO
    for index in range(segment * SEGMENT, len(logits)):
        best = max(best, logits[index])
        broken += logits[index] * ZERO
    maxima[segment] = best
    if segment == 0 or best > maxima[top_segment]:
        top_segment = segment
    return top_segment, is_finite and broken == ZERO


@njit(cache=True)
def gather(logits, maxima, limit, values, tokens):
    """Logits that are not below the limit, and their tokens, ascending; returns how many. -0.0 becomes 0.0."""
    found = 0
    for segment in range(len(maxima)):
        if maxima[segment] >= limit:
            for index in range(segment * SEGMENT, min((segment + 1) * SEGMENT, len(logits))):
                value = logits[index] + ZERO
                values[found], tokens[found] = value, index
                found += value >= limit
    return found


@njit(cache=True)
def keep_from(values, tokens, num_values, limit):
    """Drop those below the limit; returns how many are left."""
    kept = 0
    for index in range(num_values):
        value = values[index]
        values[kept], tokens[kept] = value, tokens[index]
        kept += value >= limit
    return kept


@njit(cache=True)
def _weigh_some(values, top, slope, series, bits, exponents):
    """filters.weigh of at most SEGMENT numbers, as float32 in series; bits: series' own."""
    for index in range(len(values)):
        power = (values[index] - top) * slope
        power = power if power > _LEAST_POWER else _LEAST_POWER
        whole = (power + _ROUNDER) - _ROUNDER
        part = power - whole
        value = part * _TERMS[6]
        value = (value + _TERMS[5]) * part
        value = (value + _TERMS[4]) * part
        value = (value + _TERMS[3]) * part
        value = (value + _TERMS[2]) * part
        value = (value + _TERMS[1]) * part
        series[index] = value + _TERMS[0]
        exponents[index] = np.int32(whole)
    for index in range(len(values)):
        bits[index] += (exponents[index] + np.int32(WEIGHT_BITS)) << np.int32(23)


@njit(cache=True)
def weigh_all(values, num_values, top, slope, weights):
    """filters.weigh of each; returns their sum."""
    series, exponents = np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.int32)
    bits, added = series.view(np.int32), np.int64(0)
    for first in range(0, num_values, SEGMENT):
        end = min(first + SEGMENT, num_values)
        _weigh_some(values[first:end], top, slope, series, bits, exponents)
        for index in range(end - first):
            weight = np.int64(series[index])
            weights[first + index] = weight
            added += weight
    return added


@njit(cache=True)
def total_weight(logits, maxima, top, slope):
    """The sum of a row's weights."""
    series, exponents = np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.int32)
    bits, added = series.view(np.int32), np.int64(0)
    for segment in range(len(maxima)):
        if (maxima[segment] - top) * slope < _POWER_OF_NOTHING:
            continue
        first, end = segment * SEGMENT, min((segment + 1) * SEGMENT, len(logits))
        _weigh_some(logits[first:end], top, slope, series, bits, exponents)
        for index in range(end - first):
            added += np.int64(series[index])
    return added


@njit(cache=True)
def needed_of(weight, top_p):
    """See filters.needed_of."""
    return max(np.int64(np.ceil(np.float64(weight) * top_p)), np.int64(1))


@njit(cache=True)
def largest_reaching(values, weights, num_values, needed, keys, bins):
    """The largest number such that those not below it weigh at least as much as is needed; all together do.

    Args:
        weights: int64, changed.
        keys: uint32, room for num_values.
        bins: int64 [NUM_BINS]
    """
    patterns = values.view(np.uint32)
    base = _SIGN + _SIGN
    for index in range(num_values):  # a key grows as the number falls
        key = _turned(np.int64(patterns[index]))
        keys[index] = key
        base = min(base, key)
    most = np.int64(0)
    for index in range(num_values):
        keys[index] = np.int64(keys[index]) - base
        most = max(most, np.int64(keys[index]))
    left = num_values
    while most > 0:
        shift = 0
        while most >> shift >= NUM_BINS:
            shift += 1
        bins[:] = 0
        for index in range(left):
            bins[np.int64(keys[index]) >> shift] += weights[index]
        found = 0
        while found < NUM_BINS - 1 and bins[found] < needed:
            needed -= bins[found]
            found += 1
        base += found << shift
        if shift == 0:
            break
        kept, most = 0, np.int64(0)
        for index in range(left):
            key, weight = np.int64(keys[index]), weights[index]
            if key >> shift == found:
                key -= found << shift
                keys[kept], weights[kept] = key, weight
                most = max(most, key)
                kept += 1
        left = kept
    keys[0] = _turned(base)
    return keys[:1].view(np.float32)[0]


@njit(cache=True)
def _turned(pattern):
    """The bits of a float32 as a number that grows as it falls, and back."""
    return pattern if pattern >= _SIGN else _SIGN - 1 - pattern
