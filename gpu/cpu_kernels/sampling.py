"""Adjusts, filters and samples rows of logits, each while it lies in a core's cache: the kernel. Thread: any, no GIL.

A piece of work is a row. One pass finds the largest logit of each segment of tokens; from these alone follows, mostly,
which few segments can hold what top_k and top_p keep, or a token that noise lets win, and only those are looked at
again. What is kept and sampled is what gpu/sampling_rules.py says, to the bit.

What top_k and top_p keep is one question: the largest number such that those not below it weigh enough, each 1 or what
weigh() says. It is answered without sorting, by histograms of the numbers' bits, eight at a time, each over those in
the bin that decides; weights are whole numbers, so that sums are exact.
"""

import ctypes

import numpy as np
import torch
from numba import carray, cfunc, njit, types
from torch import Tensor

from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.team import Kernel
from gpu.cpu_kernels.vectors import (
    first_lane,
    larger,
    load_floats,
    load_integer,
    multiply_add,
    pointer,
    spread_largest,
    take_next,
    total,
    zeros,
)
from gpu.sampler import ADJUSTED, Address, Factor, Feature, IntArray, Number, SamplingSlots
from gpu.sampling_rules import (
    EXP2_TERMS,
    GOLDEN,
    LARGEST_UNIFORM,
    LEAST_POWER,
    LN_2,
    LN_TERMS,
    MIX_1,
    MIX_2,
    MOST_NOISE,
    ROUNDER,
    THREE_QUARTERS,
    UNIFORM_BITS,
    WEIGHT_BITS,
)

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
    """sampling_rules.weigh of at most SEGMENT numbers, as float32 in series; bits: series' own."""
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
    """sampling_rules.weigh of each; returns their sum."""
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
    """See sampling_rules.needed_of."""
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


HALF, ONE, TWO = np.float32(0.5), np.float32(1), np.float32(2)
UNIT = np.float32(2.0**-UNIFORM_BITS)
LARGEST = np.float32(LARGEST_UNIFORM)
MOST = np.float32(MOST_NOISE)
BOUND_SLACK = np.float32(1e-3)  # beyond what rounding makes of a bound
_LN_2 = np.float32(LN_2)
_LN_TERMS = tuple(np.float32(term) for term in LN_TERMS)
_THREE_QUARTERS = np.int32(THREE_QUARTERS)
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_30, _27, _31, _REST = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(64 - UNIFORM_BITS)
_EXPONENT = np.uint32(23)

_FEATURES, _TOP_K, _SEED, _FREE_FROM, _NUM_BIASES, _NUM_STOP_IDS = (int(column) for column in Number)
_INVERSE, _SLOPE, _TOP_P, _LEAST, _REPETITION, _PRESENCE, _FREQUENCY = (int(column) for column in Factor)
_BIAS_IDS, _BIASES, _STOP_IDS, _KNOWN_IDS, _NUM_KNOWN, _KNOWN_ROOM = (int(column) for column in Address)
_NOISE, _FILTERS, _PENALTIES = int(Feature.NOISE), int(Feature.FILTERS), int(Feature.PENALTIES)
_BIAS, _MIN_TOKENS, _ADJUSTED = int(Feature.BIAS), int(Feature.MIN_TOKENS), int(ADJUSTED)
_NUM_NUMBERS, _NUM_FACTORS, _NUM_ADDRESSES = len(Number), len(Factor), len(Address)


class Arguments(ctypes.Structure):
    """What the kernel is told, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("next_scratch", ctypes.c_int64),  # 0
        ("logits", ctypes.c_int64),  # float32 [rows, vocab]; changed for a while, and restored
        ("slots", ctypes.c_int64),  # int64 [rows]
        ("positions", ctypes.c_int64),  # int64 [rows]
        ("numbers", ctypes.c_int64),  # int64 [slots, Number]
        ("factors", ctypes.c_int64),  # float32 [slots, Factor]
        ("addresses", ctypes.c_int64),  # int64 [slots, Address]; NUM_KNOWN is written
        ("seen", ctypes.c_int64),  # int32 [slots, vocab], written; not read without penalties
        ("token_ids", ctypes.c_int64),  # int64 [rows], written
        ("is_finite", ctypes.c_int64),  # uint8 [rows], written
        ("scratch", ctypes.c_int64),  # [threads, scratch_bytes(vocab)]
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
    )


@njit(cache=True)
def scratch_bytes(vocab_size):
    """What a thread needs: segments' maxima, then weights, values, tokens and keys of all that may be gathered."""
    num_segments = (vocab_size + SEGMENT - 1) // SEGMENT
    return (4 * num_segments + 20 * vocab_size + 127) // 64 * 64


@njit(cache=True)
def _key(seed, position):
    """See sampling_rules.row_keys."""
    return _mix(np.uint64(seed) + _mix(np.uint64(position) * _GOLDEN))


@njit(cache=True)
def _mix(x):
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@njit(cache=True)
def _uniform(key, token):
    bits = _mix(key + np.uint64(token) * _GOLDEN) >> _REST
    return min((np.float32(np.int64(bits)) + HALF) * UNIT, LARGEST)


@njit(cache=True)
def _ln(exponent, part):
    """See sampling_rules._ln."""
    ratio = part / (part + TWO)
    square = ratio * ratio
    series = square * _LN_TERMS[4]
    series = (series + _LN_TERMS[3]) * square
    series = (series + _LN_TERMS[2]) * square
    series = (series + _LN_TERMS[1]) * square
    return (series + _LN_TERMS[0]) * ratio + np.float32(exponent) * _LN_2


@njit(cache=True)
def _exponent_of(x):
    return (np.float32(x).view(np.int32) - _THREE_QUARTERS) >> np.int32(23)


@njit(cache=True)
def _part_of(x, exponent):
    return np.int32(np.float32(x).view(np.int32) - (exponent << np.int32(23))).view(np.float32) - ONE


@njit(cache=True)
def _noise(uniform):
    """See sampling_rules.gumbel_noise."""
    rest = ONE - uniform
    exponent = np.int32(_exponent_of(rest))
    part = -uniform if exponent == 0 else _part_of(rest, exponent)
    rate = -_ln(exponent, part)
    exponent = np.int32(_exponent_of(rate))
    return -_ln(exponent, _part_of(rate, exponent))


@njit(cache=True)
def _bound_segment(logits, first, end, key, inverse, best, uniforms, bits, bounds):
    """Uniform numbers of some tokens, and what their sums with noise stay below; returns how many may reach the best.

    The noise is -log(E) of an exponential number E, which is at least the uniform number u it is made of, and u's
    exponent bounds -log(u) without a logarithm: few tokens need theirs computed.
    """
    for index in range(first, end):
        x = _mix(key + np.uint64(index) * _GOLDEN)
        uniform = (np.float32(np.int64(x >> _REST)) + HALF) * UNIT
        uniforms[index - first] = uniform if uniform < LARGEST else LARGEST
    num_found = np.int32(0)
    for index in range(end - first):
        exponent = np.float32(127) - np.float32(np.int32(bits[index] >> _EXPONENT))
        bounds[index] = logits[first + index] * inverse + (exponent * _LN_2 + BOUND_SLACK)
        num_found += np.int32(bounds[index] >= best)
    return num_found


@njit(cache=True)
def _draw_from_all(logits, maxima, top_segment, key, inverse):
    """The token whose logit * inverse + noise is the largest; of equals the first."""
    uniforms, bounds = np.empty(SEGMENT, np.float32), np.empty(SEGMENT, np.float32)
    bits = uniforms.view(np.uint32)
    best, token = MINUS_INFINITY, np.int64(0)
    for turn in range(len(maxima) + 1):
        segment = top_segment if turn == 0 else turn - 1  # first the likeliest: it rules most others out
        if turn and (segment == top_segment or maxima[segment] * inverse + MOST < best):
            continue
        first, end = segment * SEGMENT, min((segment + 1) * SEGMENT, len(logits))
        if _bound_segment(logits, first, end, key, inverse, best, uniforms, bits, bounds) == 0:
            continue
        for index in range(end - first):
            if bounds[index] >= best:
                value = logits[first + index] * inverse + _noise(uniforms[index])
                if value > best or (value == best and first + index < token):
                    best, token = value, np.int64(first + index)
    return token


@njit(cache=True)
def _draw_from_some(values, tokens, num_gathered, limit, key, inverse):
    """As _draw_from_all, of those gathered that are not below the limit. tokens ascend."""
    best, token = MINUS_INFINITY, np.int64(0)
    for index in range(num_gathered):
        if values[index] >= limit:
            value = values[index] * inverse + _noise(_uniform(key, tokens[index]))
            if value > best:
                best, token = value, np.int64(tokens[index])
    return token


@njit(cache=True)
def _largest_token(logits, maxima, top_segment):
    """The first that has its segment's largest logit."""
    first, end = top_segment * SEGMENT, min((top_segment + 1) * SEGMENT, len(logits))
    for index in range(first, end):
        if logits[index] == maxima[top_segment]:
            return np.int64(index)
    return np.int64(first)


@njit(cache=True)
def _adjust(logits, numbers, factors, addresses, seen, position, saved, saved_ids):
    """Penalties, logit_bias and min_tokens, in place; returns how many logits were saved before. See Sampler."""
    num_saved = 0
    features = numbers[_FEATURES]
    if features & _PENALTIES:
        known_ids = carray(pointer(addresses[_KNOWN_IDS]), addresses[_NUM_KNOWN], np.int64)
        repetition, presence, frequency = factors[_REPETITION], factors[_PRESENCE], factors[_FREQUENCY]
        for index in range(len(known_ids)):
            token = known_ids[index]
            value, count = logits[token], np.float32(seen[token] >> 1)
            saved[num_saved], saved_ids[num_saved] = value, token
            num_saved += 1
            repeated = value / repetition if value > ZERO else value * repetition
            logits[token] = repeated - frequency * count - (presence if count > ZERO else ZERO)
    if features & _BIAS:
        bias_ids = carray(pointer(addresses[_BIAS_IDS]), numbers[_NUM_BIASES], np.int64)
        biases = carray(pointer(addresses[_BIASES]), numbers[_NUM_BIASES], np.float32)
        for index in range(len(bias_ids)):
            token = bias_ids[index]
            saved[num_saved], saved_ids[num_saved] = logits[token], token
            num_saved += 1
            logits[token] += biases[index]
    if features & _MIN_TOKENS and position < numbers[_FREE_FROM]:
        stop_ids = carray(pointer(addresses[_STOP_IDS]), numbers[_NUM_STOP_IDS], np.int64)
        for index in range(len(stop_ids)):
            token = stop_ids[index]
            saved[num_saved], saved_ids[num_saved] = logits[token], token
            num_saved += 1
            logits[token] = MINUS_INFINITY
    return num_saved


@njit(cache=True)
def _draw_filtered(logits, maxima, top_segment, numbers, factors, key, scratch):
    """Draw from what top_k, top_p and min_p keep. scratch: the address of room for as many tokens as there are."""
    vocab_size, num_segments = len(logits), len(maxima)
    weights = carray(pointer(scratch), vocab_size, np.int64)
    values = carray(pointer(scratch + 8 * vocab_size), vocab_size, np.float32)
    tokens = carray(pointer(scratch + 12 * vocab_size), vocab_size, np.int32)
    keys = carray(pointer(scratch + 16 * vocab_size), vocab_size, np.uint32)
    bins = np.empty(NUM_BINS, np.int64)
    top, slope, top_p, top_k = maxima[top_segment], factors[_SLOPE], np.float64(factors[_TOP_P]), numbers[_TOP_K]
    limit = top + factors[_LEAST]
    has_top_k, is_by_mass, needed = top_k < vocab_size, top_p < 1, np.int64(0)
    bound = MINUS_INFINITY if has_top_k and is_by_mass else limit  # below it nothing is kept, nor counts in a share
    if has_top_k and top_k <= num_segments:  # as many segments, at least as many tokens
        weights[:num_segments] = 1
        bound = max(bound, largest_reaching(maxima, weights, num_segments, top_k, keys, bins))
    elif is_by_mass and not has_top_k:
        needed = needed_of(total_weight(logits, maxima, top, slope), top_p)
        if weigh_all(maxima, num_segments, top, slope, weights) >= needed:
            bound = max(bound, largest_reaching(maxima, weights, num_segments, needed, keys, bins))
    num_values = gather(logits, maxima, bound, values, tokens)
    if has_top_k and top_k < num_values:
        weights[:num_values] = 1
        limit_k = largest_reaching(values, weights, num_values, top_k, keys, bins)
        num_values = keep_from(values, tokens, num_values, limit_k)
    if is_by_mass:
        gathered = weigh_all(values, num_values, top, slope, weights)
        if has_top_k:
            needed = needed_of(gathered, top_p)
        if gathered >= needed:  # otherwise min_p keeps less
            limit = max(limit, largest_reaching(values, weights, num_values, needed, keys, bins))
    return _draw_from_some(values, tokens, num_values, limit, key, factors[_INVERSE])


@njit(cache=True)
def _count(token, slot_addresses, seen):
    """One more of a drawn token."""
    num_known = slot_addresses[_NUM_KNOWN]
    if seen[token] == 0 and num_known < slot_addresses[_KNOWN_ROOM]:
        known_ids = carray(pointer(slot_addresses[_KNOWN_IDS]), num_known + 1, np.int64)
        known_ids[num_known] = token
        slot_addresses[_NUM_KNOWN] = num_known + 1
    seen[token] += 2


@njit(cache=True)
def _sample_row(row, vocab_size, position, numbers, factors, addresses, seen, scratch):
    """(the token, whether the row's logits are finite). row: the address of float32 [vocab_size]."""
    logits = carray(pointer(row), vocab_size, np.float32)
    num_segments = (vocab_size + SEGMENT - 1) // SEGMENT
    maxima = carray(pointer(scratch), num_segments, np.float32)
    features = numbers[_FEATURES]
    top_segment, is_finite = scan_segments(row, vocab_size, maxima)
    top_segment, is_finite = scan_rest(logits, maxima, top_segment, is_finite)
    if not is_finite:
        return np.int64(0), False
    num_saved = 0
    if features & _ADJUSTED:
        most = addresses[_NUM_KNOWN] + numbers[_NUM_BIASES] + numbers[_NUM_STOP_IDS]
        saved, saved_ids = np.empty(most, np.float32), np.empty(most, np.int64)
        num_saved = _adjust(logits, numbers, factors, addresses, seen, position, saved, saved_ids)
        top_segment, _ = scan_segments(row, vocab_size, maxima)
        top_segment, _ = scan_rest(logits, maxima, top_segment, True)
    if features & _FILTERS:
        key = _key(numbers[_SEED], position)
        token = _draw_filtered(
            logits, maxima, top_segment, numbers, factors, key, scratch + (4 * num_segments + 63) // 64 * 64
        )
    elif features & _NOISE:
        token = _draw_from_all(logits, maxima, top_segment, _key(numbers[_SEED], position), factors[_INVERSE])
    else:
        token = _largest_token(logits, maxima, top_segment)
    if features & _ADJUSTED:
        for index in range(num_saved - 1, -1, -1):  # backwards: a token may have been adjusted twice
            logits[saved_ids[index]] = saved[index]
    if features & _PENALTIES:
        _count(token, addresses, seen)
    return token, True


@cfunc(types.void(types.int64), cache=True)
def sample_rows(arguments):
    """Take rows until none is left: any number of threads at once. arguments: the address of Arguments."""
    vocab_size, num_rows = load_integer(arguments + 104), load_integer(arguments + 96)
    num_slots = load_integer(arguments + 112)
    slots = carray(pointer(load_integer(arguments + 24)), num_rows, np.int64)
    positions = carray(pointer(load_integer(arguments + 32)), num_rows, np.int64)
    numbers = carray(pointer(load_integer(arguments + 40)), (num_slots, _NUM_NUMBERS), np.int64)
    factors = carray(pointer(load_integer(arguments + 48)), (num_slots, _NUM_FACTORS), np.float32)
    addresses = carray(pointer(load_integer(arguments + 56)), (num_slots, _NUM_ADDRESSES), np.int64)
    seen = carray(pointer(load_integer(arguments + 64)), (num_slots, vocab_size), np.int32)
    token_ids = carray(pointer(load_integer(arguments + 72)), num_rows, np.int64)
    finite = carray(pointer(load_integer(arguments + 80)), num_rows, np.uint8)
    scratch = load_integer(arguments + 88) + take_next(arguments + 8) * scratch_bytes(vocab_size)
    row = take_next(arguments)
    while row < num_rows:
        slot = slots[row]
        token, is_finite = _sample_row(
            load_integer(arguments + 16) + 4 * row * vocab_size,
            vocab_size,
            positions[row],
            numbers[slot],
            factors[slot],
            addresses[slot],
            seen[slot],
            scratch,
        )
        token_ids[row], finite[row] = token, is_finite
        row = take_next(arguments)


class RowSampler:
    """With as many threads as torch has, and there are rows. Not for two threads at once: the arguments are its own.

    A sampler.SampleRows.
    """

    def __init__(self, asked: SamplingSlots) -> None:
        self._asked = asked
        self._kernel, self._arguments = Kernel(sample_rows), Arguments()
        self._scratch = np.empty(0, dtype=np.uint8)

    def __call__(self, logits: Tensor, slots: IntArray, positions: IntArray) -> tuple[Tensor, Tensor]:
        """See SampleRows."""
        asked = self._asked
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        num_threads = max(1, min(torch.get_num_threads(), num_rows))
        needed = num_threads * scratch_bytes(vocab_size)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.uint8)
        slots, positions = np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(positions, np.int64)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        is_finite = torch.empty(num_rows, dtype=torch.bool)
        told = self._arguments
        told.next_piece, told.next_scratch = 0, 0
        told.logits, told.slots, told.positions = logits.data_ptr(), slots.ctypes.data, positions.ctypes.data
        told.numbers, told.factors = asked.numbers.ctypes.data, asked.factors.ctypes.data
        told.addresses = asked.addresses.ctypes.data
        has_penalties = asked.numbers[slots, Number.FEATURES] & Feature.PENALTIES
        told.seen = asked.write_seen().data_ptr() if has_penalties.any() else 0
        told.token_ids, told.is_finite = token_ids.data_ptr(), is_finite.data_ptr()
        told.scratch, told.num_rows, told.vocab_size = self._scratch.ctypes.data, num_rows, vocab_size
        told.num_slots = len(asked.numbers)
        self._kernel(told, num_threads)
        return token_ids, is_finite
