"""Matmuls straight from a file's quantised blocks, on any CPU with AVX2. Kernels: any thread, no GIL; classes: engine.

Rows of x become 8-bit integers, a scale for 32 of them, and are multiplied as integers: with AVX-512 VNNI four products
in one lane of one instruction. A format is a decoder: of 256 inputs of 64 outputs to unsigned bytes, and float32 scales
(and minima) for each 16 or 32 inputs; one tile multiplies them all. A row's result does not depend on its company:
integers are exact, and floats are added in one order however many rows there are.

    x[i] ~ scale_x * q[i],  weight[i] = scale * (u[i] - offset) - minimum
    sum of a group = scale_x * (scale * (sum(u * q) - offset * sum(q)) - minimum * sum(q))

One Zen 5 core, a busy neighbour: one row read blocks from memory at 24 (Q4_K) to 29 GB/s (Q8_0); 256 rows took as long
as bf16's kernel takes, with Q6_K a fifth longer.

The blocks lie as gpu/blocks.py packs them: as stored, each field 64 times, once for each output.
"""

import ctypes
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from torch import Tensor

from gpu.blocks import BLOCK_OUTPUTS, FORMATS, IQ4_NUMBERS, PART_INPUTS, BlockWeight, PackedBlocks
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    FLOAT,
    FLOATS,
    HALF_BFLOATS,
    INT32,
    LANES,
    PAIRS,
    REGISTER_BYTES,
    address,
    broadcast,
    call,
    constant,
    emit_by_count,
    first_lane,
    floats,
    keep,
    larger,
    load,
    load_floats,
    load_pairs,
    load_widened,
    multiply_add,
    nothing,
    offset,
    operation,
    pairs,
    pointer,
    prefetch,
    shuffle,
    spread,
    spread_largest,
    store,
    store_floats,
    store_pairs,
    take_next,
    total,
    zeros,
)
from gpu.device import cpu_flags, use_huge_pages

COLUMNS = BLOCK_OUTPUTS // LANES
QUAD_BYTES = 4 * BLOCK_OUTPUTS  # of four inputs, all outputs of a block
SUM_ROW_BYTES = 4 * BLOCK_OUTPUTS
GROUP = 32  # inputs of x that share a scale
HAS_VNNI = "avx512_vnni" in cpu_flags()
HAS_AVX512 = "avx512bw" in cpu_flags()
HAS_BF16 = "avx512_bf16" in cpu_flags()
MOST_TILE_ROWS = 6 if HAS_AVX512 else 2  # with 4 registers of sums each
PANEL_ROWS = 256  # at a time: their integers and sums stay in a second-level cache
FEW_ROWS = 2  # that each thread quantises for itself
# A row's 32 inputs: as many integers, then a float32 scale, and int32 sums: of all, of the first and the last half.
SUM_AT, GROUP_BYTES = GROUP + 4, GROUP + 16
PART_BYTES = PART_INPUTS * BLOCK_OUTPUTS  # decoded
PART_SCALES = PART_INPUTS // 16 * SUM_ROW_BYTES
NUMBERS_PER_THREAD = 1 << 14  # that are quantised: a thread is woken for so many

MOST = np.float32(127)
ROUNDER = np.float32(1.5 * 2**23)
NIBBLES, TWOS, SIXES, ONES = 0x0F0F0F0F, 0x03030303, 0x3F3F3F3F, 0x01010101
SIGNS = np.int32(-0x7F7F7F80)  # 0x80 in each byte
CODES = {name: code for code, name in enumerate(FORMATS)}
Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 = (CODES[name] for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"))
Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS = (CODES[name] for name in ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"))
SPREAD_BITS = 0x00204081  # times four bits: one at the foot of each byte


class Arguments(ctypes.Structure):
    """Of multiply_blocks. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # GROUP_BYTES [rows, inputs / 32]; 0: to be made of source
        "source",  # see RowArguments
        "blocks",  # int64 [blocks, 4]: address, format, first output, outputs
        "bias",  # as out [outputs]; 0: none
        "out",  # [rows, outputs]
        "num_rows",
        "num_inputs",
        "num_blocks",
        "num_outputs",
        "is_bf16",  # out and bias, or float32
    )


class RowArguments(ctypes.Structure):
    """Of quantize_rows."""

    _fields_ = integers(
        "next_piece",  # 0
        "source",  # bf16 or float32 [rows, inputs]
        "stride",  # bytes from row to row
        "is_bf16",
        "x",  # see Arguments
        "num_rows",
        "num_inputs",
    )


class GatherArguments(ctypes.Structure):
    """Of gather_rows."""

    _fields_ = integers(
        "next_piece",  # 0
        "rows",  # int64 [rows]
        "blocks",  # see Arguments
        "out",  # float32 [rows, inputs]
        "num_rows",
        "num_inputs",
    )


class PackArguments(ctypes.Structure):
    """Of pack."""

    _fields_ = integers(
        "next_piece",  # 0
        "stored",  # bytes [outputs, bytes of a row]
        "row_bytes",
        "fields",  # int64 [fields, 2]: bytes, how many
        "num_fields",
        "block_bytes",
        "signed",  # where signed bytes begin in a block; -1: there are none
        "packed",  # see PackedBlocks
        "num_outputs",
    )


_ARGUMENTS, _ROWS, _GATHER = np.dtype(Arguments), np.dtype(RowArguments), np.dtype(GatherArguments)
_PACK = np.dtype(PackArguments)


def _scalar(builder, value):
    return builder.trunc(value, INT32)


@operation(pairs, pairs, types.int64)
def and_(builder, x, mask):
    """x & mask in each 32 bits."""
    return builder.and_(x, broadcast(builder, _scalar(builder, mask), PAIRS))


@operation(pairs, pairs, types.int64)
def right(builder, x, by):
    """Each 32 bits shifted right; zeros come in."""
    return builder.lshr(x, broadcast(builder, _scalar(builder, by), PAIRS))


@operation(pairs, pairs, types.int64)
def left(builder, x, by):
    """Each 32 bits shifted left."""
    return builder.shl(x, broadcast(builder, _scalar(builder, by), PAIRS))


@operation(pairs, pairs, pairs)
def or_(builder, x, y):
    """x | y"""
    return builder.or_(x, y)


@operation(pairs, pairs, types.int64)
def times(builder, x, by):
    """The low 32 bits of each product."""
    return builder.mul(x, broadcast(builder, _scalar(builder, by), PAIRS))


@operation(pairs, pairs)
def iq4_numbers(builder, nibbles):
    """Of each byte, 0 to 15, the table's number plus 128."""
    table = [number + 128 for number in IQ4_NUMBERS]
    if HAS_AVX512:
        octets = ir.VectorType(ir.IntType(8), REGISTER_BYTES)
        found = call(
            *(builder, "llvm.x86.avx512.pshuf.b.512", octets, ir.Constant(octets, 4 * table)),
            builder.bitcast(nibbles, octets),
        )
        return builder.bitcast(found, PAIRS)
    octets, half = ir.VectorType(ir.IntType(8), REGISTER_BYTES // 2), ir.VectorType(INT32, LANES // 2)
    parts = []
    for first in (0, LANES // 2):
        part = builder.bitcast(shuffle(builder, nibbles, nibbles, [*range(first, first + LANES // 2)]), octets)
        found = call(builder, "llvm.x86.avx2.pshuf.b", octets, ir.Constant(octets, 2 * table), part)
        parts.append(builder.bitcast(found, half))
    return shuffle(builder, parts[0], parts[1], [*range(LANES)])


@operation(pairs, address)
def load_shorts(builder, at):
    """Unsigned 16 bits [16], each widened to 32."""
    return builder.zext(load(builder, at, ir.VectorType(ir.IntType(16), LANES)), PAIRS)


@operation(floats, address)
def load_halves(builder, at):
    """float16 [16] as float32."""
    return builder.fpext(load(builder, at, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


@operation(floats, address)
def load_signed(builder, at):
    """int8 [16] as float32."""
    return builder.sitofp(load(builder, at, ir.VectorType(ir.IntType(8), LANES)), FLOATS)


@operation(floats, pairs)
def converted(builder, x):
    """int32 [16] as float32."""
    return builder.sitofp(x, FLOATS)


@operation(pairs, floats)
def rounded(builder, x):
    """To the nearest integer, ties to even, for numbers below 2 ** 22: added to ROUNDER, it lies in the low bits."""
    bits = builder.bitcast(builder.fadd(x, spread.emit(builder, ir.Constant(FLOAT, float(ROUNDER)))), PAIRS)
    return builder.sub(bits, ir.Constant(PAIRS, [int(ROUNDER.view(np.int32))] * LANES))


@operation(nothing, address, pairs)
def store_bytes(builder, at, x):
    """int32 [16] as int8 [16]."""
    store(builder, at, builder.trunc(x, ir.VectorType(ir.IntType(8), LANES)))


@operation(types.int32, pairs)
def sum_integers(builder, x):
    """Sum of the sixteen."""
    width = LANES
    while width > 1:
        width //= 2
        x = builder.add(shuffle(builder, x, x, [*range(width)]), shuffle(builder, x, x, [*range(width, 2 * width)]))
    return builder.extract_element(x, ir.Constant(INT32, 0))


@operation(nothing, address, floats)
def store_half_floats(builder, at, value):
    """Sixteen float32 as bf16, to the nearest, ties to even."""
    if HAS_BF16:
        store(builder, at, builder.fptrunc(value, HALF_BFLOATS))
        return
    bits = builder.bitcast(value, PAIRS)

    def every(number):
        return ir.Constant(PAIRS, [number] * LANES)

    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    bits = builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))
    store(builder, at, builder.trunc(bits, ir.VectorType(ir.IntType(16), LANES)))


def _multiplied(builder, sums, weights, x):
    """sums + the four products of unsigned bytes of weights and signed bytes of x, in each 32 bits, exactly."""
    if HAS_VNNI:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", PAIRS, sums, weights, x)
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    eight = ir.Constant(shorts, [8] * 2 * LANES)
    weights, x = builder.bitcast(weights, shorts), builder.bitcast(x, shorts)
    even = builder.and_(weights, ir.Constant(shorts, [255] * 2 * LANES)), builder.ashr(builder.shl(x, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(x, eight)
    return builder.add(builder.add(sums, _pair_sums(builder, *even)), _pair_sums(builder, *odd))


def _pair_sums(builder, x, y):
    """Sums of two neighbours' products: int16 [32] to int32 [16]."""
    if HAS_AVX512:
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", PAIRS, x, y)
    half = ir.VectorType(INT32, LANES // 2)
    parts = []
    for first in (0, LANES):
        low, high = (shuffle(builder, value, value, [*range(first, first + LANES)]) for value in (x, y))
        parts.append(call(builder, "llvm.x86.avx2.pmadd.wd", half, low, high))
    return shuffle(builder, parts[0], parts[1], [*range(LANES)])


def _make_tile(has_halves, has_minima):
    """Add the products of up to MOST_TILE_ROWS with a part of a block to their sums."""

    @operation(nothing, *[types.int64] * 12)
    def tile(
        builder,
        num_rows,
        x,
        x_stride,
        values,
        values_stride,
        scales,
        minima,
        middle,
        num_groups,
        sums,
        wanted,
        num_lines,
    ):
        """
        Args:
            x: address of the rows' groups: see Arguments; rows are x_stride bytes apart.
            values: address of bytes [groups, quads of inputs, 64 outputs, 4], groups values_stride bytes apart.
            scales, minima: addresses of float32 [groups, 64], of half groups where the format has_halves.
            middle: the byte that stands for 0.
            sums: address of float32 [num_rows, 64].
            wanted: address of what is prefetched meanwhile; num_lines: how much for a quad.
        """
        given = (x, x_stride, values, values_stride, scales, minima, middle, num_groups, sums, wanted, num_lines)
        emit_by_count(
            builder,
            num_rows,
            MOST_TILE_ROWS,
            lambda rows: _emit_tile(builder, rows, has_halves, has_minima, *given),
        )

    return tile


def _at(builder, base, *parts):
    """Emit base plus each index times its size."""
    for index, size in parts:
        base = builder.add(base, builder.mul(index, size if isinstance(size, ir.Value) else constant(size)))
    return base


def _emit_tile(
    builder,
    num_rows,
    has_halves,
    has_minima,
    x,
    x_stride,
    values,
    values_stride,
    scales,
    minima,
    middle,
    num_groups,
    sums,
    wanted,
    num_lines,
):
    registers = [[cgutils.alloca_once(builder, PAIRS) for _ in range(COLUMNS)] for _ in range(num_rows)]
    negative = builder.trunc(builder.neg(middle), INT32)
    num_parts = 2 if has_halves else 1
    num_quads = GROUP // 4 // num_parts
    with cgutils.for_range(builder, num_groups) as groups:
        rows = [_at(builder, x, (constant(row), x_stride), (groups.index, GROUP_BYTES)) for row in range(num_rows)]
        for part in range(num_parts):
            of_sum = SUM_AT if not has_halves else SUM_AT + 4 * (1 + part)
            x_sums = [load(builder, offset(builder, row, of_sum), INT32) for row in rows]
            for x_sum, of_row in zip(x_sums, registers, strict=True):
                first = broadcast(builder, builder.mul(x_sum, negative), PAIRS)
                for register in of_row:
                    builder.store(first, register)
            first_values = _at(builder, values, (groups.index, values_stride))
            with cgutils.for_range(builder, constant(num_quads)) as quads:
                quad = builder.add(quads.index, constant(part * num_quads))
                done = builder.add(builder.mul(groups.index, constant(GROUP // 4)), quad)
                ahead = _at(builder, wanted, (builder.mul(done, num_lines), REGISTER_BYTES))
                with cgutils.for_range(builder, num_lines) as lines:
                    prefetch.emit(builder, _at(builder, ahead, (lines.index, REGISTER_BYTES)))
                place = _at(builder, first_values, (quad, QUAD_BYTES))
                weights = [load(builder, offset(builder, place, n * REGISTER_BYTES), PAIRS) for n in range(COLUMNS)]
                for row, of_row in zip(rows, registers, strict=True):
                    four = broadcast(builder, load(builder, _at(builder, row, (quad, 4)), INT32), PAIRS)
                    for register, weight in zip(of_row, weights, strict=True):
                        builder.store(_multiplied(builder, builder.load(register), weight, four), register)
            x_scales = [load(builder, offset(builder, row, GROUP), FLOAT) for row in rows]
            totals = [
                builder.fmul(builder.sitofp(x_sum, FLOAT), builder.fneg(by))
                for x_sum, by in zip(x_sums, x_scales, strict=True)
            ]
            group = builder.add(builder.mul(groups.index, constant(num_parts)), constant(part))
            for column in range(COLUMNS):
                place = offset(builder, _at(builder, scales, (group, SUM_ROW_BYTES)), column * REGISTER_BYTES)
                scale = load(builder, place, FLOATS)
                place = offset(builder, _at(builder, minima, (group, SUM_ROW_BYTES)), column * REGISTER_BYTES)
                minimum = load(builder, place, FLOATS) if has_minima else None
                for row in range(num_rows):
                    place = offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES)
                    scaled = builder.fmul(builder.sitofp(builder.load(registers[row][column]), FLOATS), scale)
                    by = broadcast(builder, x_scales[row], FLOATS)
                    found = multiply_add.emit(builder, scaled, by, load(builder, place, FLOATS))
                    if minimum is not None:
                        found = multiply_add.emit(builder, minimum, broadcast(builder, totals[row], FLOATS), found)
                    store(builder, place, found)


_plain_tile, _minima_tile = _make_tile(False, False), _make_tile(False, True)
_halves_tile = _make_tile(True, False)


@njit(cache=True)
def _multiply_tile(
    group, has_minima, num_rows, x, x_stride, values, stride, scales, minima, middle, num_groups, sums, wanted, lines
):
    if group == GROUP:
        if has_minima:
            _minima_tile(num_rows, x, x_stride, values, stride, scales, minima, middle, num_groups, sums, wanted, lines)
        else:
            _plain_tile(num_rows, x, x_stride, values, stride, scales, minima, middle, num_groups, sums, wanted, lines)
    else:
        _halves_tile(num_rows, x, x_stride, values, stride, scales, minima, middle, num_groups, sums, wanted, lines)


@njit(cache=True)
def _decode_halves(at, scales):
    for column in range(COLUMNS):
        store_floats(scales + column * REGISTER_BYTES, load_halves(at + column * REGISTER_BYTES // 2))


@njit(cache=True)
def _decode_minima(at, minima):
    """What is added, with its sign turned."""
    for column in range(COLUMNS):
        store_floats(minima + column * REGISTER_BYTES, zeros() - load_halves(at + column * REGISTER_BYTES // 2))


@njit(cache=True)
def _decode_nibbles(at, values, is_iq4):
    """Four words whose low halves are 16 inputs and whose high halves are the next."""
    for place in range(0, 4 * QUAD_BYTES, REGISTER_BYTES):
        both = load_pairs(at + place)
        low, high = and_(both, NIBBLES), and_(right(both, 4), NIBBLES)
        if is_iq4:
            low, high = iq4_numbers(low), iq4_numbers(high)
        store_pairs(values + place, low)
        store_pairs(values + 4 * QUAD_BYTES + place, high)


@njit(cache=True)
def _decode_fives(at, values):
    """A word of 32 fifth bits, four words of halves as above."""
    for column in range(0, QUAD_BYTES, REGISTER_BYTES):
        fifths = load_pairs(at + column)
        for quad in range(4):
            both, shift = load_pairs(at + (1 + quad) * QUAD_BYTES + column), 4 * quad
            low = left(and_(times(and_(right(fifths, shift), 15), SPREAD_BITS), ONES), 4)
            high = left(and_(times(and_(right(fifths, 16 + shift), 15), SPREAD_BITS), ONES), 4)
            store_pairs(values + quad * QUAD_BYTES + column, or_(and_(both, NIBBLES), low))
            store_pairs(values + (4 + quad) * QUAD_BYTES + column, or_(and_(right(both, 4), NIBBLES), high))


@njit(cache=True)
def _decode_iq4_xs(at, values, scales):
    """Scale, high pairs of bits of eight scales, a word of their low halves, 32 words of numbers.

    Source: ggml-quants.c, dequantize_row_iq4_xs.
    """
    for column in range(0, QUAD_BYTES, REGISTER_BYTES):
        scale, pairs_ = load_halves(at + column // 2), load_shorts(at + 2 * BLOCK_OUTPUTS + column // 2)
        low = load_pairs(at + 4 * BLOCK_OUTPUTS + column)
        for part in range(8):
            number = or_(and_(right(low, 4 * part), 15), left(and_(right(pairs_, 2 * part), 3), 4))
            store_floats(scales + part * SUM_ROW_BYTES + column, (converted(number) - spread(np.float32(32))) * scale)
    for part in range(8):
        source = at + 8 * BLOCK_OUTPUTS + part * 4 * QUAD_BYTES
        _decode_nibbles(source, values + part * 8 * QUAD_BYTES, True)


@njit(cache=True)
def _decode_q5_k(at, values):
    """8 words of fifth bits, whose bit n is part n's, then halves as Q4_K's."""
    for place in range(0, 8 * QUAD_BYTES, REGISTER_BYTES):
        fifths = load_pairs(at + place)
        for chunk in range(4):
            both = load_pairs(at + (8 + chunk * 8) * QUAD_BYTES + place)
            target = values + chunk * 16 * QUAD_BYTES + place
            low = left(and_(right(fifths, 2 * chunk), ONES), 4)
            high = left(and_(right(fifths, 2 * chunk + 1), ONES), 4)
            store_pairs(target, or_(and_(both, NIBBLES), low))
            store_pairs(target + 8 * QUAD_BYTES, or_(and_(right(both, 4), NIBBLES), high))


@njit(cache=True)
def _store_scaled(four, scale, target):
    """The bytes of each word times a scale, a row of float32 [64] for each."""
    for part in range(4):
        store_floats(target + part * SUM_ROW_BYTES, converted(and_(right(four, 8 * part), 255)) * scale)


@njit(cache=True)
def _decode_k_scales(at, scales, minima):
    """Scale of scales and of minima, three words of eight of each in 6 bits.

    Source: ggml-quants.c, get_scale_min_k4.
    """
    words, step = at + 4 * BLOCK_OUTPUTS, 4 * BLOCK_OUTPUTS
    for column in range(0, 4 * BLOCK_OUTPUTS, REGISTER_BYTES):
        scale = load_halves(at + column // 2)
        minimum = load_halves(at + 2 * BLOCK_OUTPUTS + column // 2)
        low, high = load_pairs(words + column), load_pairs(words + step + column)
        mixed = load_pairs(words + 2 * step + column)
        _store_scaled(and_(low, SIXES), scale, scales + column)
        _store_scaled(and_(high, SIXES), minimum, minima + column)
        lower = or_(and_(mixed, NIBBLES), and_(right(low, 2), TWOS << 4))
        _store_scaled(lower, scale, scales + 4 * SUM_ROW_BYTES + column)
        upper = or_(and_(right(mixed, 4), NIBBLES), and_(right(high, 2), TWOS << 4))
        _store_scaled(upper, minimum, minima + 4 * SUM_ROW_BYTES + column)


@njit(cache=True)
def _decode_k_nibbles(at, values):
    """32 words: of each eight the low halves are 32 inputs, the high halves the next 32."""
    for chunk in range(4):
        source, target = at + chunk * 8 * QUAD_BYTES, values + chunk * 16 * QUAD_BYTES
        for place in range(0, 8 * QUAD_BYTES, REGISTER_BYTES):
            both = load_pairs(source + place)
            store_pairs(target + place, and_(both, NIBBLES))
            store_pairs(target + 8 * QUAD_BYTES + place, and_(right(both, 4), NIBBLES))


@njit(cache=True)
def _decode_q6_k(at, values, scales):
    """32 words of low halves, 16 of pairs of bits, 16 signed scales, their scale.

    Source: ggml-quants.c, dequantize_row_q6_K.
    """
    for half in range(2):
        low, high = at + half * 16 * QUAD_BYTES, at + (32 + half * 8) * QUAD_BYTES
        target = values + half * 32 * QUAD_BYTES
        for place in range(0, 8 * QUAD_BYTES, REGISTER_BYTES):
            first, second = load_pairs(low + place), load_pairs(low + 8 * QUAD_BYTES + place)
            twos = load_pairs(high + place)
            store_pairs(target + place, or_(and_(first, NIBBLES), left(and_(twos, TWOS), 4)))
            store_pairs(target + 8 * QUAD_BYTES + place, or_(and_(second, NIBBLES), and_(left(twos, 2), TWOS << 4)))
            store_pairs(target + 16 * QUAD_BYTES + place, or_(and_(right(first, 4), NIBBLES), and_(twos, TWOS << 4)))
            third = or_(and_(right(second, 4), NIBBLES), and_(right(twos, 2), TWOS << 4))
            store_pairs(target + 24 * QUAD_BYTES + place, third)
    stored = at + 48 * QUAD_BYTES
    for column in range(COLUMNS):
        scale = load_halves(stored + 16 * BLOCK_OUTPUTS + column * REGISTER_BYTES // 2)
        for part in range(16):
            sixteen = load_signed(stored + part * BLOCK_OUTPUTS + column * LANES)
            store_floats(scales + part * SUM_ROW_BYTES + column * REGISTER_BYTES, sixteen * scale)


BYTES, ELEMENTS, MIDDLES, GROUPS, HAVE_MINIMA = (
    tuple(getattr(found, field) for found in FORMATS.values())
    for field in ("size_bytes", "elements", "middle", "group", "has_minima")
)


@njit(cache=True)
def _decode(code, at, num_inputs, values, scales, minima):
    """Decode some inputs of 64 outputs, up to a part; returns where the bytes lie, and how far apart groups are.

    Args:
        at: address of the first stored block.
        values, scales, minima: addresses of room for a part's.
    """
    if code == Q8_0:
        for group in range(num_inputs // GROUP):
            _decode_halves(at + group * BYTES[Q8_0] * BLOCK_OUTPUTS, scales + group * SUM_ROW_BYTES)
        return at + 2 * BLOCK_OUTPUTS, BYTES[Q8_0] * BLOCK_OUTPUTS
    if ELEMENTS[code] == GROUP:
        for group in range(num_inputs // GROUP):
            source, target = at + group * BYTES[code] * BLOCK_OUTPUTS, values + group * 8 * QUAD_BYTES
            _decode_halves(source, scales + group * SUM_ROW_BYTES)
            source += 2 * BLOCK_OUTPUTS
            if HAVE_MINIMA[code]:
                _decode_minima(source, minima + group * SUM_ROW_BYTES)
                source += 2 * BLOCK_OUTPUTS
            if code in (Q5_0, Q5_1):
                _decode_fives(source, target)
            else:
                _decode_nibbles(source, target, code == IQ4_NL)
    elif code == Q4_K:
        _decode_k_scales(at, scales, minima)
        _decode_k_nibbles(at + 16 * BLOCK_OUTPUTS, values)
    elif code == Q5_K:
        _decode_k_scales(at, scales, minima)
        _decode_q5_k(at + 16 * BLOCK_OUTPUTS, values)
    elif code == IQ4_XS:
        _decode_iq4_xs(at, values, scales)
    elif code == Q6_K:
        _decode_q6_k(at, values, scales)
    return values, GROUP * BLOCK_OUTPUTS


@njit(cache=True)
def _multiply_block(code, at, x, num_inputs, num_rows, memory, sums):
    """Sums of a block: a part is decoded once for all rows; the first of them prefetch the next part."""
    scales = memory + PART_BYTES
    minima = scales + PART_SCALES
    x_stride = num_inputs // GROUP * GROUP_BYTES
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    for start in range(0, num_inputs, PART_INPUTS):
        some = min(PART_INPUTS, num_inputs - start)
        values, stride = _decode(code, at, some, memory, scales, minima)
        at += some // ELEMENTS[code] * BYTES[code] * BLOCK_OUTPUTS
        num_lines = (4 * BYTES[code] + ELEMENTS[code] - 1) // ELEMENTS[code]  # of a quad's 64 outputs
        part_x, first = x + start // GROUP * GROUP_BYTES, 0
        for index in range(num_tiles):
            end = (index + 1) * num_rows // num_tiles
            _multiply_tile(
                GROUPS[code],
                HAVE_MINIMA[code],
                end - first,
                part_x + first * x_stride,
                x_stride,
                values,
                stride,
                scales,
                minima,
                MIDDLES[code],
                some // GROUP,
                sums + first * SUM_ROW_BYTES,
                at,
                num_lines,
            )
            first, num_lines = end, 0


@njit(cache=True)
def _write(sums, bias, out, num_outputs, is_bf16, spare):
    """One row's sums plus bias, as out has them. spare: address of a register, for the end of what is not whole."""
    size = 2 if is_bf16 else 4
    for index in range(0, num_outputs, LANES):
        value = load_floats(sums + 4 * index)
        if bias:
            value = value + (load_widened(bias + 2 * index) if is_bf16 else load_floats(bias + 4 * index))
        target, some = out + size * index, min(LANES, num_outputs - index)
        into = target if some == LANES else spare
        if is_bf16:
            store_half_floats(into, value)
        else:
            store_floats(into, value)
        if some < LANES:
            carray(pointer(target), size * some, np.uint8)[:] = carray(pointer(spare), size * some, np.uint8)


@njit(cache=True)
def _quantize_row(source, is_bf16, num_inputs, target):
    """A number that is not finite makes its group's scale NaN, and so its row."""
    for index in range(num_inputs // GROUP):
        if is_bf16:
            at = source + index * 2 * GROUP
            first, second = load_widened(at), load_widened(at + 2 * LANES)
        else:
            at = source + index * 4 * GROUP
            first, second = load_floats(at), load_floats(at + 4 * LANES)
        most = first_lane(spread_largest(larger(larger(first, zeros() - first), larger(second, zeros() - second))))
        by = spread(MOST / most if most > 0 else np.float32(0))
        first_integers, second_integers = rounded(first * by), rounded(second * by)
        group = target + index * GROUP_BYTES
        store_bytes(group, first_integers)
        store_bytes(group + LANES, second_integers)
        check = total(first + second) * np.float32(0)  # 0, or NaN
        carray(pointer(group + GROUP), 1, np.float32)[0] = most / MOST + check
        sums = carray(pointer(group + SUM_AT), 3, np.int32)
        sums[1], sums[2] = sum_integers(first_integers), sum_integers(second_integers)
        sums[0] = sums[1] + sums[2]


@cfunc(types.void(types.int64), cache=True)
def quantize_rows(arguments):
    """Take rows until none is left: any number of threads at once. arguments: the address of RowArguments."""
    args = carray(pointer(arguments), 1, _ROWS)[0]
    row = take_next(arguments)
    while row < args.num_rows:
        target = args.x + row * (args.num_inputs // GROUP * GROUP_BYTES)
        _quantize_row(args.source + row * args.stride, args.is_bf16, args.num_inputs, target)
        row = take_next(arguments)


@cfunc(types.void(types.int64), cache=True)
def multiply_blocks(arguments):
    """Take blocks until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    blocks = carray(pointer(args.blocks), (args.num_blocks, 4), np.int64)
    size, num_rows, x = 2 if args.is_bf16 else 4, args.num_rows, args.x
    row_bytes = args.num_inputs // GROUP * GROUP_BYTES
    sum_bytes, own_bytes = num_rows * SUM_ROW_BYTES, 0 if x else num_rows * row_bytes
    memory = np.empty(PART_BYTES + 2 * PART_SCALES + sum_bytes + own_bytes + REGISTER_BYTES, dtype=np.uint8)
    scratch = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    sums = scratch + PART_BYTES + 2 * PART_SCALES
    if not x:
        x = sums + sum_bytes
        for row in range(num_rows):
            source = args.source + size * row * args.num_inputs
            _quantize_row(source, args.is_bf16, args.num_inputs, x + row * row_bytes)
    block = take_next(arguments)
    while block < args.num_blocks:
        first_output = blocks[block, 2]
        bias = args.bias + size * first_output if args.bias else 0
        for index in range(0, num_rows * BLOCK_OUTPUTS, LANES):
            store_floats(sums + 4 * index, zeros())
        _multiply_block(blocks[block, 1], blocks[block, 0], x, args.num_inputs, num_rows, scratch, sums)
        for row in range(num_rows):
            out = args.out + size * (row * args.num_outputs + first_output)
            _write(sums + row * SUM_ROW_BYTES, bias, out, blocks[block, 3], args.is_bf16, scratch)
        block = take_next(arguments)
    keep(memory)


@cfunc(types.void(types.int64), cache=True)
def gather_rows(arguments):
    """Take rows until none is left: any number of threads at once. arguments: the address of GatherArguments."""
    args = carray(pointer(arguments), 1, _GATHER)[0]
    num_inputs = args.num_inputs
    rows = carray(pointer(args.rows), args.num_rows, np.int64)
    memory = np.empty(PART_BYTES + 2 * PART_SCALES + REGISTER_BYTES, dtype=np.uint8)
    scratch = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    scales_at, minima_at = scratch + PART_BYTES, scratch + PART_BYTES + PART_SCALES
    scales = carray(pointer(scales_at), (PART_INPUTS // 16, BLOCK_OUTPUTS), np.float32)
    minima = carray(pointer(minima_at), (PART_INPUTS // 16, BLOCK_OUTPUTS), np.float32)
    row = take_next(arguments)
    while row < args.num_rows:
        out = carray(pointer(args.out + row * num_inputs * 4), num_inputs, np.float32)
        block = carray(pointer(args.blocks + rows[row] // BLOCK_OUTPUTS * 32), 4, np.int64)
        at, code, output = block[0], block[1], rows[row] % BLOCK_OUTPUTS
        group, middle, has_minima = GROUPS[code], MIDDLES[code], HAVE_MINIMA[code]
        for start in range(0, num_inputs, PART_INPUTS):
            some = min(PART_INPUTS, num_inputs - start)
            values_at, stride = _decode(code, at, some, scratch, scales_at, minima_at)
            at += some // ELEMENTS[code] * BYTES[code] * BLOCK_OUTPUTS
            for index in range(some):
                within = index % GROUP
                place = values_at + index // GROUP * stride + within // 4 * QUAD_BYTES + output * 4 + within % 4
                number = np.float32(np.int64(carray(pointer(place), 1, np.uint8)[0]) - middle)
                value = scales[index // group, output] * number
                if has_minima:
                    value -= minima[index // group, output]
                out[start + index] = value
        row = take_next(arguments)
    keep(memory)


@cfunc(types.void(types.int64), cache=True)
def pack(arguments):
    """Take 64 outputs at a time until none is left: any number of threads at once. arguments: PackArguments'."""
    args = carray(pointer(arguments), 1, _PACK)[0]
    fields = carray(pointer(args.fields), (args.num_fields, 2), np.int64)
    per_row, wide = args.row_bytes // args.block_bytes, args.row_bytes * BLOCK_OUTPUTS
    piece = take_next(arguments)
    while piece * BLOCK_OUTPUTS < args.num_outputs:
        first = args.stored + piece * wide
        some = min(BLOCK_OUTPUTS, args.num_outputs - piece * BLOCK_OUTPUTS)
        if some < BLOCK_OUTPUTS:
            carray(pointer(args.packed + piece * wide), wide, np.uint8)[:] = 0
        for block in range(per_row):
            start = block * args.block_bytes
            target = args.packed + piece * wide + start * BLOCK_OUTPUTS
            for index in range(args.num_fields):
                width, count = fields[index, 0], fields[index, 1]
                for _ in range(count):
                    within = start - block * args.block_bytes
                    is_signed = args.signed >= 0 and within >= args.signed
                    for output in range(some):
                        source = first + output * args.row_bytes + start
                        if width == 4:
                            word = carray(pointer(source), 1, np.int32)[0]
                            if is_signed:
                                word ^= SIGNS
                            carray(pointer(target), BLOCK_OUTPUTS, np.int32)[output] = word
                        elif width == 2:
                            carray(pointer(target), BLOCK_OUTPUTS, np.int16)[output] = carray(
                                pointer(source), 1, np.int16
                            )[0]
                        else:
                            carray(pointer(target), BLOCK_OUTPUTS, np.int8)[output] = carray(
                                pointer(source), 1, np.int8
                            )[0]
                    start += width
                    target += width * BLOCK_OUTPUTS
        piece = take_next(arguments)


def pack_blocks(name: str, stored: Tensor) -> PackedBlocks:
    """Pack a file's blocks. stored: bytes [out, bytes of a row]."""
    found, (num_out, row_bytes) = FORMATS[name], stored.shape
    stored, fields = stored.contiguous(), torch.tensor(found.fields)
    per_row, num_wide = row_bytes // found.size_bytes, -(-num_out // BLOCK_OUTPUTS)
    packed = torch.empty((num_wide, per_row, BLOCK_OUTPUTS * found.size_bytes), dtype=torch.uint8)
    use_huge_pages(packed.data_ptr(), packed.nbytes)
    arguments = PackArguments(
        stored=stored.data_ptr(),
        row_bytes=row_bytes,
        fields=fields.data_ptr(),
        num_fields=len(fields),
        block_bytes=found.size_bytes,
        signed=-1 if found.signed is None else found.signed,
        packed=packed.data_ptr(),
        num_outputs=num_out,
    )
    _packer()(arguments, torch.get_num_threads())
    return PackedBlocks(name, packed, num_out)


class BlockMatmul:
    """A matmul with one matrix. Not for two threads at once.

    Args:
        weight: its blocks are kept.
        bias: [out], of the rows' format, or None.
    """

    def __init__(self, weight: BlockWeight, bias: Tensor | None) -> None:
        self._num_out, self._num_in = weight.shape
        self._dtype, self._is_bf16 = weight.dtype, weight.dtype == torch.bfloat16
        self._multiply, self._quantize, self._gather = _kernels()
        table, first = list[tuple[int, int, int, int]](), 0
        for part in weight.parts:
            step = part.block_bytes
            for start in range(0, part.num_out, BLOCK_OUTPUTS):
                some = min(BLOCK_OUTPUTS, part.num_out - start)
                table.append((part.packed.data_ptr() + start // BLOCK_OUTPUTS * step, CODES[part.format], first, some))
                first += some
        self._blocks = torch.tensor(table, dtype=torch.int64)
        bias = None if bias is None else F.pad(bias, (0, LANES))  # registers are read whole
        self._bias, self._weight = bias, weight
        self._arguments = Arguments(
            blocks=self._blocks.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_inputs=self._num_in,
            num_blocks=len(table),
            num_outputs=self._num_out,
            is_bf16=self._is_bf16,
        )
        self._row_arguments = RowArguments(
            stride=self._num_in * weight.dtype.itemsize, is_bf16=self._is_bf16, num_inputs=self._num_in
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        num_rows, panel, num_threads = x.shape[0], self._arguments, torch.get_num_threads()
        out = x.new_empty((num_rows, self._num_out))
        x = x.contiguous()
        panel.next_piece, panel.num_rows, panel.out, panel.x = 0, num_rows, out.data_ptr(), 0
        if num_rows <= FEW_ROWS:
            panel.source = x.data_ptr()
            self._multiply(panel, num_threads)
            return out
        row_bytes = self._num_in // GROUP * GROUP_BYTES
        quantized = torch.empty(num_rows * row_bytes, dtype=torch.uint8)
        rows = self._row_arguments
        rows.next_piece, rows.num_rows, rows.source, rows.x = 0, num_rows, x.data_ptr(), quantized.data_ptr()
        self._quantize(rows, max(1, min(num_threads, x.numel() // NUMBERS_PER_THREAD)))
        first_x, first_out, out_stride = quantized.data_ptr(), out.data_ptr(), self._num_out * out.element_size()
        for first in range(0, num_rows, PANEL_ROWS):
            panel.next_piece, panel.num_rows = 0, min(PANEL_ROWS, num_rows - first)
            panel.x, panel.out = first_x + first * row_bytes, first_out + first * out_stride
            self._multiply(panel, num_threads)
        return out

    def rows(self, indexes: Tensor) -> Tensor:
        """Rows of a matrix of one part, as an embedding takes them. indexes: [n]; returns [n, in]."""
        assert len(self._weight.parts) == 1
        indexes = indexes.long().contiguous()
        out = torch.empty((len(indexes), self._num_in))
        arguments = GatherArguments(
            rows=indexes.data_ptr(),
            blocks=self._blocks.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(indexes),
            num_inputs=self._num_in,
        )
        self._gather(arguments, min(torch.get_num_threads(), max(1, len(indexes))))
        return out.to(self._dtype)


@cache
def _packer() -> Kernel:
    return Kernel(pack)


@cache
def _kernels() -> tuple[Kernel, Kernel, Kernel]:
    return Kernel(multiply_blocks), Kernel(quantize_rows), Kernel(gather_rows)
