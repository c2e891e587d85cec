"""Gated DeltaNet, and Mamba-2's state space, on a CPU, between a layer's two matmuls, for bf16. Thread: engine.

A delta net's piece of work is a key head with the value heads that share it, for all tokens of a step: its channels'
convolution and its memories are no other's, so that threads never wait for one another. A state space's heads are many
more than its key heads, and a norm joins them: three kernels follow one another, over channels, heads and tokens.
A prompt's 16 tokens are a few small matmuls, of tiles of 8 rows and 32 columns whose sums lie in registers. Memories
are float32, as is all between the convolution, rounded to bf16 where torch rounds, and the output.

A layer of Qwen3.5-0.8B on one Zen 5 core, with this kernel and with torch's operators: a prompt of 512 tokens 10.2 and
52 ms, decode of 1 row 0.08 and 0.35 ms, of 8 rows 0.93 and 2.5.

A layer of Granite-4-H-1B, without its two matmuls, with this kernel, torch's operators and transformers' layer (CPU
time of one thread): a prompt of 512 tokens 7, 49 and 147 ms, decode of 1 row 0.4, 1.1 and 2.1, of 8 rows 1.5, 4.3, 11.
"""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, RecurrentConfig
from gpu.attention import IntArray
from gpu.cpu_kernels.compiled import carray, kernel, njit
from gpu.cpu_kernels.matmul import FLOAT_TILE_ROWS, make_float_tile
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    LANES,
    MOST_EXPONENT,
    ONE,
    REGISTER_BYTES,
    ROUNDER,
    add_exponents,
    clear_outside,
    exp2,
    keep,
    larger,
    load_floats,
    load_integer,
    load_widened,
    multiply_add,
    pointer,
    smaller,
    spread,
    spread_float,
    store_floats,
    store_rounded,
    take_next,
    total,
    widened,
    zeros,
)
from gpu.parameters import RecurrentWeights
from gpu.recurrence import DELTA_EPS, DeltaNet, RecurrentRows, StateSpace

PANEL_REGISTERS = 2
PANEL_COLUMNS, PANEL_BYTES = PANEL_REGISTERS * LANES, PANEL_REGISTERS * REGISTER_BYTES
ROW_BYTES = 4 * BLOCK_SIZE  # of a block's numbers for one of its tokens, or of one dimension's for all of them
CHANNELS_PER_PIECE, HEADS_PER_PIECE = 256, 8
NUMBERS_PER_THREAD = 1 << 18  # of memories: they take a core 20 to 80 us
MINUS_LOG2_E, LOG2_E = np.float32(-math.log2(math.e)), np.float32(math.log2(math.e))
ZERO = np.float32(0)
EPS = np.float32(DELTA_EPS)
# 2 ** x for x in -0.5..0.5, to float32's rounding: Taylor's series
EXACT_EXP2 = tuple(np.float32(math.log(2) ** power / math.factorial(power)) for power in range(8))

assert BLOCK_SIZE == LANES, "a register has a number of each of a block's tokens"


class Arguments(ctypes.Structure):
    """Of delta_net; or of convolve_channels, state_space and gate_and_norm, in this order: * theirs alone.

    Addresses are of first elements.
    """

    _fields_ = (
        *integers(
            "next_piece",  # 0
            "taken",  # bf16 [tokens, taken_size]: channels, gates of the output, strengths, steps; *: channels
            "gates",  # *: bf16 [tokens, taken_size]
            "steps",  # *: bf16 [tokens, taken_size]
            "convolved",  # *: float32 [tokens, channels]: values, keys, queries
            "found",  # *: float32 [tokens, num_heads * value_dim]: what is read of the memories, and beside them
            "out",  # bf16 [tokens, num_heads * value_dim]
            "inputs",  # bf16 [states, taps - 1, channels]
            "memory",  # float32 [states, num_heads, key_dim, value_dim]
            "convolution",  # float32 [taps, channels]
            "bias",  # float32 [channels]; 0: there is none
            "rate",  # float64 [num_heads]
            "step_bias",  # float64 [num_heads]
            "skip",  # *: float32 [num_heads]
            "norm",  # float32 [value_dim]; *: [num_heads * value_dim], 0: there is none
            "runs",  # int64 [num_runs, 5]: first, end, start, read, write
            "saves",  # int64 [num_saves, 3]: run, position, state
            "singles",  # int64 [num_singles, 3]: token, read, write; each is computed after those before it
            "num_runs",
            "num_saves",
            "num_singles",
            "num_tokens",
            "taken_size",
            "taps",
            "channels",
            "num_key_heads",
            "num_heads",
            "key_dim",
            "value_dim",
            "is_tiled",  # see RecurrentConfig
            "heads_per_piece",  # *
            "is_normed_first",  # *
        ),
        ("eps", ctypes.c_float),
    )


_ARGUMENTS = np.dtype(Arguments)


_tile, _add_tile, _narrow_tile = (
    make_float_tile(PANEL_REGISTERS, False),
    make_float_tile(PANEL_REGISTERS, True),
    make_float_tile(1, False),
)


@njit(cache=True)
def _exp(x):
    """exp(x) for x up to 0, to float32's rounding; what is below 2 ** -126 is about that."""
    x = larger(smaller(x, zeros()) * spread(LOG2_E), spread(-MOST_EXPONENT))
    whole = x + spread(ROUNDER)
    part = x - (whole - spread(ROUNDER))
    value = spread(EXACT_EXP2[7])
    value = multiply_add(value, part, spread(EXACT_EXP2[6]))
    value = multiply_add(value, part, spread(EXACT_EXP2[5]))
    value = multiply_add(value, part, spread(EXACT_EXP2[4]))
    value = multiply_add(value, part, spread(EXACT_EXP2[3]))
    value = multiply_add(value, part, spread(EXACT_EXP2[2]))
    value = multiply_add(value, part, spread(EXACT_EXP2[1]))
    return add_exponents(multiply_add(value, part, spread(EXACT_EXP2[0])), whole)


@njit(cache=True)
def _silu(x):
    return x / (spread(ONE) + exp2(x * spread(MINUS_LOG2_E)))


@njit(cache=True)
def _seen(args, read, first, token):
    """Where the inputs of a run's token lie; `token` counts from the run's first one, and is negative before it."""
    if token < 0:
        return args.inputs + 2 * (read * (args.taps - 1) + args.taps - 1 + token) * args.channels
    return args.taken + 2 * (first + token) * args.taken_size


@njit(cache=True)
def _convolve(args, read, first, token, channel, num_channels, spare, out):
    """A token's channels, convolved and activated, to float32 [num_channels]. spare: bf16 [16]."""
    for index in range(channel, channel + num_channels, LANES):
        value = zeros()
        for tap in range(args.taps):
            seen = load_widened(_seen(args, read, first, token + tap - args.taps + 1) + 2 * index)
            value = multiply_add(seen, load_floats(args.convolution + 4 * (tap * args.channels + index)), value)
        if args.bias:
            value = value + load_floats(args.bias + 4 * index)
        store_rounded(spare, value)
        store_rounded(spare, _silu(load_widened(spare)))
        store_floats(out + 4 * (index - channel), load_widened(spare))


@njit(cache=True)
def _norm(x, width, scale):
    """Divide float32 [width] by its length, and multiply it."""
    squares = zeros()
    for at in range(x, x + 4 * width, REGISTER_BYTES):
        squares = multiply_add(load_floats(at), load_floats(at), squares)
    by = spread(scale / np.sqrt(total(squares) + EPS))
    for at in range(x, x + 4 * width, REGISTER_BYTES):
        store_floats(at, load_floats(at) * by)


@njit(cache=True)
def _key_and_query(args, key_head, read, first, token, spare, key, query):
    """A token's, normed: float32 [key_dim]."""
    key_dim = args.key_dim
    _convolve(args, read, first, token, key_head * key_dim, key_dim, spare, query)
    _convolve(args, read, first, token, (args.num_key_heads + key_head) * key_dim, key_dim, spare, key)
    _norm(query, key_dim, ONE / np.sqrt(np.float32(key_dim)))
    _norm(key, key_dim, ONE)


@njit(cache=True)
def _strength_and_decay(args, token, head):
    """Of a token of the step; the decay is a logarithm."""
    at = args.taken + 2 * (token * args.taken_size + args.channels + args.num_heads * args.value_dim + head)
    rate = carray(pointer(args.rate), args.num_heads, np.float64)[head]
    step = widened(at + 2 * args.num_heads) + carray(pointer(args.step_bias), args.num_heads, np.float64)[head]
    softened = max(step, 0.0) + math.log1p(math.exp(-abs(step)))
    return np.float32(1 / (1 + math.exp(-np.float64(widened(at))))), np.float32(-rate * softened)


@njit(cache=True)
def _store_out(args, token, head, values):
    """Norm and gate a token's head. values: float32 [value_dim]."""
    width, squares = args.value_dim, zeros()
    for at in range(values, values + 4 * width, REGISTER_BYTES):
        squares = multiply_add(load_floats(at), load_floats(at), squares)
    by = spread(ONE / np.sqrt(total(squares) / np.float32(width) + args.eps))
    gate = args.taken + 2 * (token * args.taken_size + args.channels + head * width)
    target = args.out + 2 * (token * args.num_heads + head) * width
    for index in range(0, width, LANES):
        value = load_floats(values + 4 * index) * by * load_floats(args.norm + 4 * index)
        store_rounded(target + 2 * index, value * _silu(load_widened(gate + 2 * index)))


@njit(cache=True)
def _run_of(args, run):
    """First and end among the step's tokens, the first one's position, and the states that are read and written."""
    row = args.runs + 40 * run
    return (
        load_integer(row),
        load_integer(row + 8),
        load_integer(row + 16),
        load_integer(row + 24),
        load_integer(row + 32),
    )


@njit(cache=True)
def _single_of(args, single):
    """Token, and the states that are read and written."""
    row = args.singles + 24 * single
    return load_integer(row), load_integer(row + 8), load_integer(row + 16)


@njit(cache=True)
def _clear(at, num_bytes):
    for place in range(at, at + num_bytes, REGISTER_BYTES):
        store_floats(place, zeros())


@njit(cache=True)
def _copy(source, target, num_bytes):
    for at in range(0, num_bytes, REGISTER_BYTES):
        store_floats(target + at, load_floats(source + at))


@njit(cache=True)
def _keep_channels(args, channel, num_channels, read, first, num_tokens, state):
    """Write the convolution's state after so many of a run's tokens, of some channels."""
    for place in range(args.taps - 1):  # upwards: where a state is its own source, it is read further up
        source = _seen(args, read, first, num_tokens - args.taps + 1 + place)
        target = args.inputs + 2 * (state * (args.taps - 1) + place) * args.channels
        for index in range(channel, channel + num_channels, LANES):
            store_rounded(target + 2 * index, load_widened(source + 2 * index))


@njit(cache=True)
def _sharing(args, key_head):
    """The heads that share a key head."""
    shared, step = args.num_heads // args.num_key_heads, args.num_key_heads if args.is_tiled else 1
    first = key_head if args.is_tiled else key_head * shared
    return range(first, first + step * shared, step)


@njit(cache=True)
def _keep_inputs(args, key_head, read, first, num_tokens, state):
    """The same of the key head's channels."""
    keys, query = args.num_key_heads * args.key_dim, key_head * args.key_dim
    _keep_channels(args, query, args.key_dim, read, first, num_tokens, state)
    _keep_channels(args, keys + query, args.key_dim, read, first, num_tokens, state)
    for head in _sharing(args, key_head):
        _keep_channels(args, 2 * keys + head * args.value_dim, args.value_dim, read, first, num_tokens, state)


@njit(cache=True)
def _memory(args, state, head):
    return args.memory + 4 * (state * args.num_heads + head) * args.key_dim * args.value_dim


@njit(cache=True)
def _score(args, reading, turned, scores):
    """Products of a block's keys, and queries, with its keys.

    Args:
        reading: float32 [32, key_dim]: keys, then queries.
        turned: float32 [key_dim, 16], for the keys.
        scores: float32 [32, 16].
    """
    for index in range(BLOCK_SIZE):
        numbers = carray(pointer(reading + 4 * index * args.key_dim), args.key_dim, np.float32)
        into = carray(pointer(turned), (args.key_dim, BLOCK_SIZE), np.float32)
        for dim in range(args.key_dim):
            into[dim, index] = numbers[dim]
    for row in range(0, 2 * BLOCK_SIZE, FLOAT_TILE_ROWS):
        rows = reading + 4 * row * args.key_dim
        _narrow_tile(rows, 4 * args.key_dim, args.key_dim, turned, ROW_BYTES, scores + row * ROW_BYTES, ROW_BYTES, ZERO)


@njit(cache=True)
def _solve(scores, strengths, decays, inverse, within):
    """What connects a block's tokens: float32 [16, 16] each.

    Args:
        strengths, decays: float32 [16]; a decay is the logarithm since the block's start.
        inverse: of the triangular matrix by which the values that tokens add depend on one another.
        within: how a token reads what tokens up to it add.
    """
    for row in range(BLOCK_SIZE):
        at = row * ROW_BYTES
        pairs = _exp(spread_float(decays + 4 * row) - load_floats(decays))
        own = clear_outside(pairs * load_floats(scores + at) * spread_float(strengths + 4 * row), 0, row)
        read = pairs * load_floats(scores + BLOCK_SIZE * ROW_BYTES + at)
        store_floats(within + at, own)
        value = clear_outside(spread(ONE), row, row + 1)
        for before in range(row):
            by = zeros() - spread_float(within + at + 4 * before)
            value = multiply_add(by, load_floats(inverse + before * ROW_BYTES), value)
        store_floats(inverse + at, value)
        store_floats(within + at, clear_outside(read, 0, row + 1))


@njit(cache=True)
def _scan_block(args, memory, reading, turned, scores, values, strengths, decays, spare):
    """Sixteen tokens of a head; those that are not the run's have no strength and do not decay.

    Args:
        memory: float32 [key_dim, value_dim], as it is before and then after the block.
        reading, turned, scores: see _score.
        values: float32 [16, value_dim]; replaced by what the queries read.
        strengths, decays: see _solve.
        spare: float32 [32 * key_dim + 97 * 16].
    """
    key_dim, row_bytes = args.key_dim, 4 * args.value_dim
    queries, writing = spare, spare + key_dim * ROW_BYTES
    inverse = writing + key_dim * ROW_BYTES
    within, wanted = inverse + BLOCK_SIZE * ROW_BYTES, inverse + 2 * BLOCK_SIZE * ROW_BYTES
    added = wanted + BLOCK_SIZE * PANEL_BYTES
    since = added + BLOCK_SIZE * PANEL_BYTES
    _solve(scores, strengths, decays, inverse, within)
    store_floats(since, _exp(load_floats(decays)))
    left = _exp(spread_float(decays + 4 * (BLOCK_SIZE - 1)) - load_floats(decays))
    for at in range(0, key_dim * ROW_BYTES, ROW_BYTES):
        store_floats(writing + at, load_floats(turned + at) * left)
    for row in range(BLOCK_SIZE):
        by = spread_float(since + 4 * row)
        for at in range(4 * row * key_dim, 4 * (row + 1) * key_dim, REGISTER_BYTES):
            store_floats(queries + at, load_floats(reading + key_dim * ROW_BYTES + at) * by)
    scale = carray(pointer(since), BLOCK_SIZE, np.float32)[BLOCK_SIZE - 1]
    for column in range(0, row_bytes, PANEL_BYTES):
        for row in range(0, BLOCK_SIZE, FLOAT_TILE_ROWS):
            rows = reading + 4 * row * key_dim
            target = wanted + row * PANEL_BYTES
            _tile(rows, 4 * key_dim, key_dim, memory + column, row_bytes, target, PANEL_BYTES, ZERO)
        for row in range(BLOCK_SIZE):
            strength, minus = spread_float(strengths + 4 * row), zeros() - spread_float(since + 4 * row)
            for at in range(0, PANEL_BYTES, REGISTER_BYTES):
                found = load_floats(wanted + row * PANEL_BYTES + at)
                value = load_floats(values + row * row_bytes + column + at)
                store_floats(wanted + row * PANEL_BYTES + at, strength * multiply_add(minus, found, value))
        for row in range(0, BLOCK_SIZE, FLOAT_TILE_ROWS):
            rows, target = row * ROW_BYTES, added + row * PANEL_BYTES
            _tile(inverse + rows, ROW_BYTES, BLOCK_SIZE, wanted, PANEL_BYTES, target, PANEL_BYTES, ZERO)
        for row in range(0, BLOCK_SIZE, FLOAT_TILE_ROWS):
            rows, target = queries + 4 * row * key_dim, values + row * row_bytes + column
            _tile(rows, 4 * key_dim, key_dim, memory + column, row_bytes, target, row_bytes, ZERO)
            rows = within + row * ROW_BYTES
            _add_tile(rows, ROW_BYTES, BLOCK_SIZE, added, PANEL_BYTES, target, row_bytes, ONE)
        for row in range(0, key_dim, FLOAT_TILE_ROWS):
            target = memory + row * row_bytes + column
            _add_tile(writing + row * ROW_BYTES, ROW_BYTES, BLOCK_SIZE, added, PANEL_BYTES, target, row_bytes, scale)


@njit(cache=True)
def _remember(args, source, target, key, query, column, low, high, decays, out):
    """Add a panel's values by the key to what is left of a memory, and write what the query reads of it to `out`."""
    row_bytes = 4 * args.value_dim
    read_low, read_high = zeros(), zeros()
    for dim in range(args.key_dim):
        at, by = dim * row_bytes + column, spread_float(key + 4 * dim)
        new_low = multiply_add(by, low, decays * load_floats(source + at))
        new_high = multiply_add(by, high, decays * load_floats(source + at + REGISTER_BYTES))
        store_floats(target + at, new_low)
        store_floats(target + at + REGISTER_BYTES, new_high)
        by = spread_float(query + 4 * dim)
        read_low, read_high = multiply_add(by, new_low, read_low), multiply_add(by, new_high, read_high)
    store_floats(out + column, read_low)
    store_floats(out + column + REGISTER_BYTES, read_high)


@njit(cache=True)
def _recur(args, source, target, key, query, values, strength, decay):
    """One token of a head.

    Args:
        source, target: float32 [key_dim, value_dim], the memory before and after; they may be one.
        values: float32 [value_dim]; replaced by what the query reads.
    """
    row_bytes = 4 * args.value_dim
    strengths, decays = spread(strength), spread(decay)
    for column in range(0, row_bytes, PANEL_BYTES):
        low, high = zeros(), zeros()
        for dim in range(args.key_dim):
            at, by = source + dim * row_bytes + column, spread_float(key + 4 * dim)
            low, high = multiply_add(by, load_floats(at), low), multiply_add(by, load_floats(at + REGISTER_BYTES), high)
        low = strengths * (load_floats(values + column) - decays * low)
        high = strengths * (load_floats(values + column + REGISTER_BYTES) - decays * high)
        _remember(args, source, target, key, query, column, low, high, decays, values)


@njit(cache=True)
def _scan(args, key_head, run, spare):
    """A run of a key head and the heads that share it."""
    first, end, start, read, write = _run_of(args, run)
    key_dim, value_dim = args.key_dim, args.value_dim
    memory_bytes, saves = 4 * key_dim * value_dim, carray(pointer(args.saves), (args.num_saves, 3), np.int64)
    reading = spare
    turned = reading + 2 * key_dim * ROW_BYTES
    scores = turned + key_dim * ROW_BYTES
    values = scores + 2 * BLOCK_SIZE * ROW_BYTES
    strengths = values + value_dim * ROW_BYTES
    decays, rest = strengths + REGISTER_BYTES, strengths + 2 * REGISTER_BYTES
    if read != write:
        for head in _sharing(args, key_head):
            _copy(_memory(args, read, head), _memory(args, write, head), memory_bytes)
    strength_of, decay_of = carray(pointer(strengths), LANES, np.float32), carray(pointer(decays), LANES, np.float32)
    for border in range(start - start % BLOCK_SIZE + BLOCK_SIZE, start + end - first + BLOCK_SIZE, BLOCK_SIZE):
        shift = border - BLOCK_SIZE - start  # the run's token that is the block's first
        num_tokens = end - first
        for index in range(BLOCK_SIZE):
            key = reading + 4 * index * key_dim
            query = key + key_dim * ROW_BYTES
            if 0 <= shift + index < num_tokens:
                _key_and_query(args, key_head, read, first, shift + index, rest, key, query)
            else:
                _clear(key, 4 * key_dim)
                _clear(query, 4 * key_dim)
        _score(args, reading, turned, scores)
        for head in _sharing(args, key_head):
            channel, decay = 2 * args.num_key_heads * key_dim + head * value_dim, ZERO
            for index in range(BLOCK_SIZE):
                token, value = shift + index, values + 4 * index * value_dim
                if 0 <= token < num_tokens:
                    _convolve(args, read, first, token, channel, value_dim, rest, value)
                    strength_of[index], step = _strength_and_decay(args, first + token, head)
                    decay += step
                else:
                    strength_of[index] = ZERO
                    _clear(value, 4 * value_dim)
                decay_of[index] = decay
            memory = _memory(args, write, head)
            _scan_block(args, memory, reading, turned, scores, values, strengths, decays, rest)
            for index in range(max(0, -shift), min(BLOCK_SIZE, num_tokens - shift)):
                _store_out(args, first + shift + index, head, values + 4 * index * value_dim)
        for save in range(args.num_saves):
            if saves[save, 0] == run and saves[save, 1] == border:
                state = saves[save, 2]
                _keep_inputs(args, key_head, read, first, border - start, state)
                for head in _sharing(args, key_head):
                    _copy(_memory(args, write, head), _memory(args, state, head), memory_bytes)
    _keep_inputs(args, key_head, read, first, end - first, write)


@kernel()
def delta_net(arguments):
    """Take key heads until none is left: any number of threads at once. arguments: the address of DeltaArguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    key_dim, value_dim = args.key_dim, args.value_dim
    spare = np.empty((5 * key_dim + value_dim + 131) * LANES, dtype=np.float32)
    scratch = spare.ctypes.data  # as _scan divides it
    key, query, values = scratch, scratch + 4 * key_dim, scratch + 8 * key_dim
    rest = values + 4 * value_dim
    key_head = take_next(arguments)
    while key_head < args.num_key_heads:
        for run in range(args.num_runs):
            _scan(args, key_head, run, scratch)
        for single in range(args.num_singles):
            token, read, write = _single_of(args, single)
            _key_and_query(args, key_head, read, token, 0, rest, key, query)
            for head in _sharing(args, key_head):
                channel = 2 * args.num_key_heads * key_dim + head * value_dim
                _convolve(args, read, token, 0, channel, value_dim, rest, values)
                strength, decay = _strength_and_decay(args, token, head)
                decay = np.float32(math.exp(np.float64(decay)))
                source, target = _memory(args, read, head), _memory(args, write, head)
                _recur(args, source, target, key, query, values, strength, decay)
                _store_out(args, token, head, values)
            _keep_inputs(args, key_head, read, token, 1, write)
        key_head = take_next(arguments)
    keep(spare)


@kernel()
def convolve_channels(arguments):
    """Take some channels of all tokens until none are left: any number of threads at once."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    saves = carray(pointer(args.saves), (args.num_saves, 3), np.int64)
    rounded_ones = np.empty(LANES, dtype=np.float32)
    spare = rounded_ones.ctypes.data
    channel = take_next(arguments) * CHANNELS_PER_PIECE
    while channel < args.channels:
        num_channels, target = min(CHANNELS_PER_PIECE, args.channels - channel), args.convolved + 4 * channel
        for run in range(args.num_runs):
            first, end, start, read, write = _run_of(args, run)
            for token in range(end - first):
                at = target + 4 * (first + token) * args.channels
                _convolve(args, read, first, token, channel, num_channels, spare, at)
            for save in range(args.num_saves):
                if saves[save, 0] == run:
                    _keep_channels(args, channel, num_channels, read, first, saves[save, 1] - start, saves[save, 2])
            _keep_channels(args, channel, num_channels, read, first, end - first, write)
        for single in range(args.num_singles):
            token, read, write = _single_of(args, single)
            at = target + 4 * token * args.channels
            _convolve(args, read, token, 0, channel, num_channels, spare, at)
            _keep_channels(args, channel, num_channels, read, token, 1, write)
        channel = take_next(arguments) * CHANNELS_PER_PIECE
    keep(rounded_ones)


@njit(cache=True)
def _step_and_decay(args, token, head):
    """Of a token of the step; the decay is a logarithm."""
    step = widened(args.steps + 2 * (token * args.taken_size + head))
    step += carray(pointer(args.step_bias), args.num_heads, np.float64)[head]
    step = max(step, 0.0) + math.log1p(math.exp(-abs(step)))
    return np.float32(step), np.float32(-carray(pointer(args.rate), args.num_heads, np.float64)[head] * step)


@njit(cache=True)
def _value_of(args, token, head):
    """Where a token's convolved value lies, and where what it finds."""
    at = args.convolved + 4 * (token * args.channels + head * args.value_dim)
    return at, args.found + 4 * (token * args.num_heads + head) * args.value_dim


@njit(cache=True)
def _mix_block(args, memory, reading, turned, scores, values, found, decays, spare):
    """Sixteen tokens of a head; see _scan_block.

    Args:
        found: float32 [16, value_dim]: what the queries read.
        spare: float32 [(32 + 2 * key_dim) * 16].
    """
    key_dim, row_bytes = args.key_dim, 4 * args.value_dim
    within, queries = spare, spare + 2 * BLOCK_SIZE * ROW_BYTES
    writing = queries + key_dim * ROW_BYTES
    since, left = within + BLOCK_SIZE * ROW_BYTES, _exp(spread_float(decays + 4 * BLOCK_SIZE - 4) - load_floats(decays))
    store_floats(since, _exp(load_floats(decays)))
    for row in range(BLOCK_SIZE):
        pairs = _exp(spread_float(decays + 4 * row) - load_floats(decays))
        read = pairs * load_floats(scores + (BLOCK_SIZE + row) * ROW_BYTES)
        store_floats(within + row * ROW_BYTES, clear_outside(read, 0, row + 1))
        by = spread_float(since + 4 * row)
        for at in range(4 * row * key_dim, 4 * (row + 1) * key_dim, REGISTER_BYTES):
            store_floats(queries + at, load_floats(reading + key_dim * ROW_BYTES + at) * by)
    for at in range(0, key_dim * ROW_BYTES, ROW_BYTES):
        store_floats(writing + at, load_floats(turned + at) * left)
    scale = carray(pointer(since), BLOCK_SIZE, np.float32)[BLOCK_SIZE - 1]
    for column in range(0, row_bytes, PANEL_BYTES):
        for row in range(0, BLOCK_SIZE, FLOAT_TILE_ROWS):
            rows, target = queries + 4 * row * key_dim, found + row * row_bytes + column
            _tile(rows, 4 * key_dim, key_dim, memory + column, row_bytes, target, row_bytes, ZERO)
            rows = within + row * ROW_BYTES
            _add_tile(rows, ROW_BYTES, BLOCK_SIZE, values + column, row_bytes, target, row_bytes, ONE)
        for row in range(0, key_dim, FLOAT_TILE_ROWS):
            rows, target = writing + row * ROW_BYTES, memory + row * row_bytes + column
            _add_tile(rows, ROW_BYTES, BLOCK_SIZE, values + column, row_bytes, target, row_bytes, scale)


@njit(cache=True)
def _mix_run(args, head, end_head, run, spare):
    """Some heads of a group, of a run."""
    first, end, start, read, write = _run_of(args, run)
    num_tokens = end - first
    key_dim, value_dim, group = args.key_dim, args.value_dim, head // (args.num_heads // args.num_key_heads)
    saves = carray(pointer(args.saves), (args.num_saves, 3), np.int64)
    memory_bytes, keys = 4 * (end_head - head) * key_dim * value_dim, args.num_heads * value_dim + group * key_dim
    reading = spare
    turned = reading + 2 * key_dim * ROW_BYTES
    scores = turned + key_dim * ROW_BYTES
    values = scores + 2 * BLOCK_SIZE * ROW_BYTES
    found = values + value_dim * ROW_BYTES
    decays = found + value_dim * ROW_BYTES
    rest, decay_of = decays + REGISTER_BYTES, carray(pointer(decays), LANES, np.float32)
    if read != write:
        _copy(_memory(args, read, head), _memory(args, write, head), memory_bytes)
    for border in range(start - start % BLOCK_SIZE + BLOCK_SIZE, start + num_tokens + BLOCK_SIZE, BLOCK_SIZE):
        shift = border - BLOCK_SIZE - start  # the run's token that is the block's first
        for index in range(BLOCK_SIZE):
            key = reading + 4 * index * key_dim
            at = args.convolved + 4 * ((first + shift + index) * args.channels + keys)
            if 0 <= shift + index < num_tokens:
                _copy(at, key, 4 * key_dim)
                _copy(at + 4 * args.num_key_heads * key_dim, key + key_dim * ROW_BYTES, 4 * key_dim)
            else:
                _clear(key, 4 * key_dim)
                _clear(key + key_dim * ROW_BYTES, 4 * key_dim)
        _score(args, reading, turned, scores)
        for one in range(head, end_head):
            decay = ZERO
            for index in range(BLOCK_SIZE):
                value = values + 4 * index * value_dim
                if 0 <= shift + index < num_tokens:
                    step, forgets = _step_and_decay(args, first + shift + index, one)
                    decay += forgets
                    at, _ = _value_of(args, first + shift + index, one)
                    for place in range(0, 4 * value_dim, REGISTER_BYTES):
                        store_floats(value + place, load_floats(at + place) * spread(step))
                else:
                    _clear(value, 4 * value_dim)
                decay_of[index] = decay
            _mix_block(args, _memory(args, write, one), reading, turned, scores, values, found, decays, rest)
            for index in range(max(0, -shift), min(BLOCK_SIZE, num_tokens - shift)):
                _add_skipped(args, first + shift + index, one, found + 4 * index * value_dim)
        for save in range(args.num_saves):
            if saves[save, 0] == run and saves[save, 1] == border:
                _copy(_memory(args, write, head), _memory(args, saves[save, 2], head), memory_bytes)


@njit(cache=True)
def _add_skipped(args, token, head, found):
    """Write what a token has read of a head's memory, and its own value's part. found: float32 [value_dim]."""
    at, target = _value_of(args, token, head)
    skip = spread_float(args.skip + 4 * head)
    for place in range(0, 4 * args.value_dim, REGISTER_BYTES):
        store_floats(target + place, load_floats(found + place) + load_floats(at + place) * skip)


@njit(cache=True)
def _mix_single(args, head, token, read, write, spare):
    """One token of a head."""
    row_bytes, group = 4 * args.value_dim, head // (args.num_heads // args.num_key_heads)
    key = args.convolved + 4 * (token * args.channels + args.num_heads * args.value_dim + group * args.key_dim)
    query = key + 4 * args.num_key_heads * args.key_dim
    source, target = _memory(args, read, head), _memory(args, write, head)
    at, _ = _value_of(args, token, head)
    step, decay = _step_and_decay(args, token, head)
    steps, decays = spread(step), spread(np.float32(math.exp(np.float64(decay))))
    for column in range(0, row_bytes, PANEL_BYTES):
        low, high = load_floats(at + column) * steps, load_floats(at + column + REGISTER_BYTES) * steps
        _remember(args, source, target, key, query, column, low, high, decays, spare)
    _add_skipped(args, token, head, spare)


@kernel()
def state_space(arguments):
    """Take some heads of a group, of all tokens, until none are left: any number of threads at once."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    spare = np.empty((5 * args.key_dim + 2 * args.value_dim + 65) * LANES, dtype=np.float32)
    scratch, shared = spare.ctypes.data, args.num_heads // args.num_key_heads
    per_group = (shared + args.heads_per_piece - 1) // args.heads_per_piece
    piece = take_next(arguments)
    while piece < args.num_key_heads * per_group:
        first = piece // per_group * shared
        head = first + piece % per_group * args.heads_per_piece
        end_head = min(head + args.heads_per_piece, first + shared)
        for run in range(args.num_runs):
            _mix_run(args, head, end_head, run, scratch)
        for single in range(args.num_singles):
            token, read, write = _single_of(args, single)
            for one in range(head, end_head):
                _mix_single(args, one, token, read, write, scratch)
        piece = take_next(arguments)
    keep(spare)


@kernel()
def gate_and_norm(arguments):
    """Take tokens until none is left: any number of threads at once."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    size = args.num_heads * args.value_dim
    width, token = size // args.num_key_heads, take_next(arguments)
    while token < args.num_tokens:
        found, out = args.found + 4 * token * size, args.out + 2 * token * size
        gates = args.gates + 2 * token * args.taken_size
        for first in range(0, size, width):
            squares = zeros()
            for index in range(first, first + width, LANES):
                value = load_floats(found + 4 * index)
                if not args.is_normed_first:
                    value = value * _silu(load_widened(gates + 2 * index))
                    store_floats(found + 4 * index, value)
                squares = multiply_add(value, value, squares)
            by = spread(ONE / np.sqrt(total(squares) / np.float32(width) + args.eps))
            for index in range(first, first + width, LANES):
                value = load_floats(found + 4 * index)
                if args.norm:
                    value = value * by * load_floats(args.norm + 4 * index)
                if args.is_normed_first:
                    value = value * _silu(load_widened(gates + 2 * index))
                store_rounded(out + 2 * index, value)
        token = take_next(arguments)


class _Common:
    """What both kinds of layers tell their kernels."""

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        self._own, self._weights = config, weights
        self._bias = None if weights.convolution_bias is None else weights.convolution_bias.float()

    def run(
        self, kernels: Sequence[Kernel], num_threads: int, given: Tensor, rows: RecurrentRows, layer: int, **more: int
    ) -> Tensor:
        """Run kernels in turn. given: [tokens, input_size]; more: the kind's own; returns [tokens, output_size]."""
        own, states = self._own, rows.states.layers[layer]
        runs = _table(5, [(run.first, run.end, run.start, run.read, run.write) for run in rows.runs])
        saves = _table(3, [(number, *save) for number, run in enumerate(rows.runs) for save in run.saves])
        singles = _table(3, rows.singles)
        out = given.new_empty((len(given), own.output_size))
        arguments = Arguments(
            **{"taken": given.data_ptr()} | more,
            out=out.data_ptr(),
            inputs=states.inputs.data_ptr(),
            memory=states.memory.data_ptr(),
            convolution=self._weights.convolution.data_ptr(),
            bias=0 if self._bias is None else self._bias.data_ptr(),
            runs=runs.ctypes.data,
            saves=saves.ctypes.data,
            singles=singles.ctypes.data,
            num_runs=len(runs),
            num_saves=len(saves),
            num_singles=len(singles),
            num_tokens=len(given),
            taken_size=own.input_size,
            taps=own.taps,
            channels=own.channels,
            num_key_heads=own.num_key_heads,
            num_heads=own.num_heads,
            key_dim=own.key_dim,
            value_dim=own.value_dim,
            eps=own.eps,
        )
        for run in kernels:
            arguments.next_piece = 0
            run(arguments, num_threads)
        return out


class KernelDeltaNet(DeltaNet):
    """config: `can_compute` it."""

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        super().__init__(config, weights)
        self._common, self._kernels = _Common(config, weights), (Kernel(delta_net),)

    def __call__(self, taken: Tensor, rows: RecurrentRows, layer: int) -> Tensor:
        own = self._config
        work = len(taken) * own.num_heads * own.key_dim * own.value_dim // NUMBERS_PER_THREAD
        return self._common.run(
            self._kernels,
            max(1, min(torch.get_num_threads(), own.num_key_heads, work)),
            taken.contiguous(),
            rows,
            layer,
            rate=self._rate.data_ptr(),
            step_bias=self._step_bias.data_ptr(),
            norm=self._norm.data_ptr(),
            is_tiled=own.is_tiled,
        )


class KernelStateSpace(StateSpace):
    """config: `can_compute` it."""

    def __init__(self, config: RecurrentConfig, weights: RecurrentWeights) -> None:
        super().__init__(config, weights)
        self._common = _Common(config, weights)
        self._kernels = Kernel(convolve_channels), Kernel(state_space), Kernel(gate_and_norm)

    def __call__(self, taken: Tensor, rows: RecurrentRows, layer: int) -> Tensor:
        own, taken = self._config, taken.contiguous()
        convolved = taken.new_empty((len(taken), own.channels), dtype=torch.float32)
        found = taken.new_empty((len(taken), own.output_size), dtype=torch.float32)
        num_threads = max(1, min(torch.get_num_threads(), found.numel() * own.key_dim // NUMBERS_PER_THREAD))
        first, shared = taken.data_ptr(), own.num_heads // own.num_key_heads
        return self._common.run(
            self._kernels,
            num_threads,
            taken,
            rows,
            layer,
            taken=first + 2 * own.output_size,
            gates=first,
            steps=first + 2 * (own.output_size + own.channels),
            convolved=convolved.data_ptr(),
            found=found.data_ptr(),
            rate=self._rate.data_ptr(),
            step_bias=self._step_bias.data_ptr(),
            skip=self._skip.data_ptr(),
            norm=0 if self._norm is None else self._norm.data_ptr(),
            heads_per_piece=max(1, min(HEADS_PER_PIECE, shared * own.num_key_heads // (2 * num_threads), shared)),
            is_normed_first=self._norm is not None and own.is_normed_first,
        )


def _table(width: int, rows: Sequence[tuple[int, ...]]) -> IntArray:
    return np.array(rows, np.int64).reshape(-1, width)


def can_compute(config: RecurrentConfig) -> bool:
    return config.kind in KINDS and config.key_dim % LANES == 0 and config.value_dim % PANEL_COLUMNS == 0


KINDS: dict[str, type[KernelDeltaNet | KernelStateSpace]] = {
    "linear_attention": KernelDeltaNet,
    "mamba": KernelStateSpace,
}
