"""Matmuls straight from a file's quantised blocks, on any CPU with AVX2. Kernels: any thread, no GIL; classes: engine.

Rows of x become 8-bit integers, a scale for 32 of them, and are multiplied as integers: with AVX-512 VNNI four products
in one lane of one instruction, three times the speed of bf16's. A format is a decoder: of 256 inputs of 64 outputs to
unsigned bytes, and float32 scales (and minima) for each 16 or 32 inputs; one tile multiplies them all. A row's result
does not depend on its company: integers are exact, and floats are added in one order however many rows there are.

    x[i] ~ scale_x * q[i],  weight[i] = scale * (u[i] - offset) - minimum
    sum of a group = scale_x * (scale * (sum(u * q) - offset * sum(q)) - minimum * sum(q))

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

from gpu.blocks import BLOCK_OUTPUTS, FORMATS, PART_INPUTS, BlockWeight, PackedBlocks
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
STREAM_AHEAD = 4096  # bytes: how far ahead blocks are prefetched
PART_BYTES = PART_INPUTS * BLOCK_OUTPUTS  # decoded
PART_SCALES = PART_INPUTS // 16 * SUM_ROW_BYTES
NUMBERS_PER_THREAD = 1 << 14  # that are quantised: a thread is woken for so many

MOST = np.float32(127)
ROUNDER = np.float32(1.5 * 2**23)
NIBBLES, TWOS = 0x0F0F0F0F, 0x03030303
SIGNS = np.int32(-0x7F7F7F80)  # 0x80 in each byte
CODES = {name: code for code, name in enumerate(FORMATS)}
Q8_0, Q4_0, Q4_K, Q6_K = (CODES[name] for name in ("Q8_0", "Q4_0", "Q4_K", "Q6_K"))


class Arguments(ctypes.Structure):
    """Of multiply_blocks. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # int8 [rows, inputs]
        "x_scales",  # float32 [rows, inputs / 32]
        "x_sums",  # int32 [rows, inputs / 16 + inputs / 32]: of 16 numbers each, then of 32
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
        "x_scales",
        "x_sums",
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


@operation(nothing, *[types.int64] * 15)
def tile(
    builder,
    num_rows,
    x,
    x_stride,
    x_scales,
    x_scale_stride,
    x_sums,
    x_sum_stride,
    values,
    values_stride,
    scales,
    minima,
    middle,
    num_groups,
    group_quads,
    sums,
):
    """Add the products of up to MOST_TILE_ROWS with some groups of a block to their sums. Strides are bytes.

    Args:
        x: address of int8 [num_rows, inputs].
        x_scales: address of float32 [num_rows, groups of 32].
        x_sums: address of int32 [num_rows, groups].
        values: address of bytes [groups, quads, 64 outputs, 4 inputs].
        scales, minima: addresses of float32 [groups, 64]; minima 0: there are none.
        middle: the byte that stands for 0.
        group_quads: 8 or 4, of inputs.
        sums: address of float32 [num_rows, 64].
    """
    arguments = (
        *(x, x_stride, x_scales, x_scale_stride, x_sums, x_sum_stride),
        *(values, values_stride, scales, minima, middle, num_groups, group_quads, sums),
    )
    emit_by_count(builder, num_rows, MOST_TILE_ROWS, lambda rows: _emit_tile(builder, rows, *arguments))


def _emit_tile(
    builder,
    num_rows,
    x,
    x_stride,
    x_scales,
    x_scale_stride,
    x_sums,
    x_sum_stride,
    values,
    values_stride,
    scales,
    minima,
    middle,
    num_groups,
    group_quads,
    sums,
):
    def at(base, *parts):
        for index, size in parts:
            base = builder.add(base, builder.mul(index, size if isinstance(size, ir.Value) else constant(size)))
        return base

    rows = range(num_rows)
    integers_ = [[cgutils.alloca_once(builder, PAIRS) for _ in range(COLUMNS)] for _ in rows]
    negative = builder.trunc(builder.neg(middle), INT32)
    has_halves = builder.icmp_signed("==", group_quads, constant(4))  # two groups share a scale of x
    with cgutils.for_range(builder, num_groups) as groups:
        group_x = at(x, (groups.index, builder.mul(group_quads, constant(4))))
        group_values = at(values, (groups.index, values_stride))
        group_sums = [
            load(builder, at(x_sums, (constant(row), x_sum_stride), (groups.index, 4)), INT32) for row in rows
        ]
        for row in rows:
            first = broadcast(builder, builder.mul(group_sums[row], negative), PAIRS)
            for register in integers_[row]:
                builder.store(first, register)
        with cgutils.for_range(builder, group_quads) as quads:
            place = at(group_values, (quads.index, QUAD_BYTES))
            weights = [load(builder, offset(builder, place, n * REGISTER_BYTES), PAIRS) for n in range(COLUMNS)]
            for row in rows:
                four = load(builder, at(group_x, (constant(row), x_stride), (quads.index, 4)), INT32)
                four = broadcast(builder, four, PAIRS)
                for register, weight in zip(integers_[row], weights, strict=True):
                    builder.store(_multiplied(builder, builder.load(register), weight, four), register)
        scale_index = builder.select(has_halves, builder.lshr(groups.index, constant(1)), groups.index)
        row_scales = [
            load(builder, at(x_scales, (constant(row), x_scale_stride), (scale_index, 4)), FLOAT) for row in rows
        ]
        for column in range(COLUMNS):
            place = offset(builder, at(scales, (groups.index, SUM_ROW_BYTES)), column * REGISTER_BYTES)
            scale = load(builder, place, FLOATS)
            for row in rows:
                place = offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES)
                scaled = builder.fmul(builder.sitofp(builder.load(integers_[row][column]), FLOATS), scale)
                by = broadcast(builder, row_scales[row], FLOATS)
                store(builder, place, multiply_add.emit(builder, scaled, by, load(builder, place, FLOATS)))
        with builder.if_then(builder.icmp_signed("!=", minima, constant(0))):
            totals = [
                builder.fmul(builder.sitofp(group_sums[row], FLOAT), builder.fneg(row_scales[row])) for row in rows
            ]
            for column in range(COLUMNS):
                place = offset(builder, at(minima, (groups.index, SUM_ROW_BYTES)), column * REGISTER_BYTES)
                minimum = load(builder, place, FLOATS)
                for row in rows:
                    place = offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES)
                    by = broadcast(builder, totals[row], FLOATS)
                    store(builder, place, multiply_add.emit(builder, minimum, by, load(builder, place, FLOATS)))


@njit(cache=True)
def _multiply_tile(
    num_rows, x, x_stride, x_scales, x_scale_stride, x_sums, x_sum_stride,
    values, values_stride, scales, minima, middle, num_groups, group_quads, sums,
):  # fmt: skip
    tile(
        num_rows, x, x_stride, x_scales, x_scale_stride, x_sums, x_sum_stride,
        values, values_stride, scales, minima, middle, num_groups, group_quads, sums,
    )  # fmt: skip


@njit(cache=True)
def _decode_halves(at, scales):
    for column in range(COLUMNS):
        store_floats(scales + column * REGISTER_BYTES, load_halves(at + column * REGISTER_BYTES // 2))


@njit(cache=True)
def _decode_q4_0(at, values, scales):
    """A scale, four words whose low halves are the first 16 inputs and whose high halves are the others."""
    _decode_halves(at, scales)
    for place in range(0, 4 * QUAD_BYTES, REGISTER_BYTES):
        both = load_pairs(at + 2 * BLOCK_OUTPUTS + place)
        prefetch(at + STREAM_AHEAD + place)
        store_pairs(values + place, and_(both, NIBBLES))
        store_pairs(values + 4 * QUAD_BYTES + place, and_(right(both, 4), NIBBLES))


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
        for part in range(4):
            shift = 8 * part
            s, m = right(low, shift), right(high, shift)
            x = right(mixed, shift)
            target = part * SUM_ROW_BYTES + column
            store_floats(scales + target, converted(and_(s, 63)) * scale)
            store_floats(minima + target, converted(and_(m, 63)) * minimum)
            target += 4 * SUM_ROW_BYTES
            store_floats(scales + target, converted(or_(and_(x, 15), and_(right(s, 2), 48))) * scale)
            store_floats(minima + target, converted(or_(and_(right(x, 4), 15), and_(right(m, 2), 48))) * minimum)


@njit(cache=True)
def _decode_k_nibbles(at, values):
    """32 words: of each eight the low halves are 32 inputs, the high halves the next 32."""
    for chunk in range(4):
        source, target = at + chunk * 8 * QUAD_BYTES, values + chunk * 16 * QUAD_BYTES
        for place in range(0, 8 * QUAD_BYTES, REGISTER_BYTES):
            both = load_pairs(source + place)
            prefetch(source + STREAM_AHEAD + place)
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
            prefetch(low + STREAM_AHEAD + place)
            prefetch(low + 8 * QUAD_BYTES + STREAM_AHEAD + place)
            prefetch(high + STREAM_AHEAD + place)
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
    if code == Q4_0:
        for group in range(num_inputs // GROUP):
            source = at + group * BYTES[Q4_0] * BLOCK_OUTPUTS
            _decode_q4_0(source, values + group * 8 * QUAD_BYTES, scales + group * SUM_ROW_BYTES)
    elif code == Q4_K:
        _decode_k_scales(at, scales, minima)
        _decode_k_nibbles(at + 16 * BLOCK_OUTPUTS, values)
    elif code == Q6_K:
        _decode_q6_k(at, values, scales)
    return values, GROUPS[code] * BLOCK_OUTPUTS


@njit(cache=True)
def _multiply_block(code, at, args, num_rows, first_row, memory, sums):
    """Sums of a block: a part is decoded once for all rows."""
    scales = memory + PART_BYTES
    minima = scales + PART_SCALES
    num_inputs, group = args.num_inputs, GROUPS[code]
    scale_stride = num_inputs // GROUP * 4
    sum_stride = num_inputs // 16 * 4 + scale_stride
    num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
    has_minima = minima if HAVE_MINIMA[code] else 0
    for start in range(0, num_inputs, PART_INPUTS):
        some = min(PART_INPUTS, num_inputs - start)
        values, stride = _decode(code, at, some, memory, scales, minima)
        at += some // ELEMENTS[code] * BYTES[code] * BLOCK_OUTPUTS
        x_sums = args.x_sums + start // group * 4 + (num_inputs // 16 * 4 if group == GROUP else 0)
        first = 0
        for index in range(num_tiles):
            end = (index + 1) * num_rows // num_tiles
            row = first_row + first
            _multiply_tile(
                end - first,
                args.x + row * num_inputs + start,
                num_inputs,
                args.x_scales + row * scale_stride + start // GROUP * 4,
                scale_stride,
                x_sums + row * sum_stride,
                sum_stride,
                values,
                stride,
                scales,
                has_minima,
                MIDDLES[code],
                some // group,
                group // 4,
                sums + first * SUM_ROW_BYTES,
            )
            first = end


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


@cfunc(types.void(types.int64), cache=True)
def multiply_blocks(arguments):
    """Take blocks until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    blocks = carray(pointer(args.blocks), (args.num_blocks, 4), np.int64)
    size, num_rows = 2 if args.is_bf16 else 4, args.num_rows
    panel = min(num_rows, PANEL_ROWS)
    memory = np.empty(PART_BYTES + 2 * PART_SCALES + panel * SUM_ROW_BYTES + REGISTER_BYTES, dtype=np.uint8)
    scratch = (memory.ctypes.data + REGISTER_BYTES - 1) // REGISTER_BYTES * REGISTER_BYTES
    sums = scratch + PART_BYTES + 2 * PART_SCALES
    block = take_next(arguments)
    while block < args.num_blocks:
        first_output = blocks[block, 2]
        bias = args.bias + size * first_output if args.bias else 0
        for index in range(0, num_rows * BLOCK_OUTPUTS, LANES):
            store_floats(sums + 4 * index, zeros())
        _multiply_block(blocks[block, 1], blocks[block, 0], args, num_rows, 0, scratch, sums)
        for row in range(num_rows):
            out = args.out + size * (row * args.num_outputs + first_output)
            _write(sums + row * SUM_ROW_BYTES, bias, out, blocks[block, 3], args.is_bf16, scratch)
        block = take_next(arguments)
    keep(memory)


@njit(cache=True)
def _quantize_sixteen(first, by, target, sums):
    numbers = rounded(first * by)
    store_bytes(target, numbers)
    found = sum_integers(numbers)
    carray(pointer(sums), 1, np.int32)[0] = found
    return found


@cfunc(types.void(types.int64), cache=True)
def quantize_rows(arguments):
    """Take rows until none is left: any number of threads at once. arguments: the address of RowArguments.

    A number that is not finite makes its group's scale NaN, and so its row.
    """
    args = carray(pointer(arguments), 1, _ROWS)[0]
    num_inputs, is_bf16 = args.num_inputs, args.is_bf16
    scale_row, sixteens = num_inputs // GROUP, num_inputs // 16
    row = take_next(arguments)
    while row < args.num_rows:
        source, target = args.source + row * args.stride, args.x + row * num_inputs
        scales = carray(pointer(args.x_scales + row * scale_row * 4), scale_row, np.float32)
        sums = args.x_sums + row * (sixteens + scale_row) * 4
        wide_sums = carray(pointer(sums + sixteens * 4), scale_row, np.int32)
        for group in range(scale_row):
            if is_bf16:
                at = source + group * 2 * GROUP
                first, second = load_widened(at), load_widened(at + 2 * LANES)
            else:
                at = source + group * 4 * GROUP
                first, second = load_floats(at), load_floats(at + 4 * LANES)
            most = first_lane(spread_largest(larger(larger(first, zeros() - first), larger(second, zeros() - second))))
            check = total(first + second) * np.float32(0)  # 0, or NaN
            scales[group] = most / MOST + check
            by = spread(MOST / most if most > 0 else np.float32(0))
            place = sums + group * 8
            total_sum = _quantize_sixteen(first, by, target + group * GROUP, place)
            total_sum += _quantize_sixteen(second, by, target + group * GROUP + LANES, place + 4)
            wide_sums[group] = total_sum
        row = take_next(arguments)


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
                within = index % group
                place = values_at + index // group * stride + within // 4 * QUAD_BYTES + output * 4 + within % 4
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

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        num_rows, num_in = x.shape
        out = x.new_empty((num_rows, self._num_out))
        integers = torch.empty((num_rows, num_in), dtype=torch.int8)
        scales = torch.empty((num_rows, num_in // GROUP))
        sums = torch.empty((num_rows, num_in // 16 + num_in // GROUP), dtype=torch.int32)
        num_threads = torch.get_num_threads()
        rows = RowArguments(
            source=x.data_ptr(),
            stride=x.stride(0) * x.element_size(),
            is_bf16=self._is_bf16,
            x=integers.data_ptr(),
            x_scales=scales.data_ptr(),
            x_sums=sums.data_ptr(),
            num_rows=num_rows,
            num_inputs=num_in,
        )
        self._quantize(rows, max(1, min(num_threads, x.numel() // NUMBERS_PER_THREAD)))
        panel = self._arguments
        for first in range(0, num_rows, PANEL_ROWS):
            panel.next_piece, panel.num_rows = 0, min(PANEL_ROWS, num_rows - first)
            panel.x, panel.x_scales = integers[first:].data_ptr(), scales[first:].data_ptr()
            panel.x_sums, panel.out = sums[first:].data_ptr(), out[first:].data_ptr()
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
