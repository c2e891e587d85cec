"""Matmuls straight from quantised blocks, on any CPU with AVX2. Kernels: any thread, no GIL; classes: engine.

Rows of x become 8-bit integers, a scale for 32 of them, and are multiplied as integers: with AVX-512 VNNI four products
in one lane of one instruction. A format is how its scales are decoded, and a Unit that emits its numbers as unsigned
bytes: one row's to four rows' products take them in registers; for more rows they are stored once, a part of 256 inputs
at a time, for all tiles of rows. Code is compiled for the formats that a model has. A row's result does not depend on
its company: integers are exact, and floats are added in one order however many rows there are.

    x[i] ~ scale_x * q[i],  weight[i] = scale * (u[i] - offset) - minimum
    sum of a group = scale_x * (scale * (sum(u * q) - offset * sum(q)) - minimum * sum(q))

One Zen 4 core: one row takes blocks from memory at 25 (Q4_K, Q6_K) to 28 GB/s (Q8_0), where a dot product read 21 to
28. One Zen 5 core: 256 rows took as long as bf16's kernel takes, with Q6_K a fifth longer.

The blocks lie as gpu/blocks.py says: as stored, each field 64 times, once for each output. block_formats.py decodes
them. int8 and int4 (--quantize, GPTQ, AWQ) are packed as blocks while they load.
"""

import ctypes
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.blocks import BLOCK_OUTPUTS, FORMATS, INT4_FORMATS, PART_INPUTS, BlockWeight, PackedBlocks
from gpu.cpu_kernels.block_formats import (
    BYTES,
    CODES,
    COLUMNS,
    ELEMENTS,
    GROUPS,
    HAVE_MINIMA,
    MIDDLES,
    NAMES,
    QUAD_BYTES,
    SIGNED,
    SUM_ROW_BYTES,
    UNITS,
    decode_numbers,
    decode_scales,
    indexed,
    of_format,
    units,
)
from gpu.cpu_kernels.compiled import carray, cgutils, ir, kernel, njit, types
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    FLOAT,
    FLOATS,
    HAS_AVX512,
    HAS_VNNI,
    INT32,
    INT64,
    LANES,
    PAIRS,
    REGISTER_BYTES,
    broadcast,
    call,
    constant,
    emit_by_count,
    first_lane,
    in_registers,
    keep,
    larger,
    load,
    load_floats,
    load_widened,
    multiply_add,
    nothing,
    offset,
    operation,
    pairs,
    pointer,
    prefetch,
    rounded,
    shuffle,
    spread,
    spread_largest,
    store_bytes,
    store_floats,
    store_rounded,
    take_next,
    total,
    zeros,
)
from gpu.device import huge_pages, use_huge_pages
from gpu.quant import FP8, QuantizedWeight, unpack_nibbles

GROUP = 32  # inputs of x that share a scale
MOST_TILE_ROWS = 6 if HAS_AVX512 else 5  # with 4 registers of sums each; with AVX2 2, which are half as large
PANEL_ROWS = 256  # at a time: their integers and sums stay in a second-level cache
FEW_ROWS = 4  # multiplied by numbers in registers; each thread quantises them for itself
# Few rows read blocks from end to end, as hardware prefetches; one line of four is prefetched, so that it is not late.
# All of them, or to the first level, would occupy a core's miss buffers: one Zen 4 core then read 9 to 19 GB/s of 28.
# With AVX2, which reads a column of 16 outputs at a time, each column prefetches its share, line after line: of 17 GB/s
# one Zen 3 core read 9.6 (Q6_K) to 11.9 (Q8_0) with every line prefetched by each column, and 13.2 to 16.0 so.
AHEAD_LINES, AHEAD_BYTES = (4, 4096) if HAS_AVX512 else (1, 8192)
MOST_SUMS = 4  # of few rows at once with AVX2, of 16 outputs each: half of its registers
# A row's 32 inputs: as many integers, then a float32 scale, and int32 sums: of all, of the first and the last half.
SUM_AT, GROUP_BYTES = GROUP + 4, GROUP + 16
PART_BYTES = PART_INPUTS * BLOCK_OUTPUTS  # decoded
PART_SCALES = PART_INPUTS // 16 * SUM_ROW_BYTES
NUMBERS_PER_THREAD = 1 << 14  # that are quantised: a thread is woken for so many

MOST = np.float32(127)
SIGNS = np.int32(-0x7F7F7F80)  # 0x80 in each byte


class Arguments(ctypes.Structure):
    """Of multiply_blocks. Addresses are of first elements."""

    _fields_ = integers(
        "next_piece",  # 0
        "x",  # GROUP_BYTES [rows, inputs / 32]; 0: to be made of source
        "source",  # see RowArguments
        "blocks",  # int64 [blocks, 4]: address, address of what multiplies it, first output, outputs
        "pieces",  # int64 [num_pieces + 1]: first blocks of what a thread takes at a time, and the end
        "num_pieces",
        "bias",  # as out [outputs]; 0: none
        "out",  # [rows, outputs]
        "num_rows",
        "num_inputs",
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
        "packed",  # see PackedBlocks
        "code",  # of the format
        "decode",  # address
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
        "fields",  # int64 [fields, 3]: bytes, how many, the first one's place in a stored block
        "num_fields",
        "block_bytes",
        "signed",  # where signed bytes begin in a block; -1: there are none
        "packed",  # see PackedBlocks
        "num_outputs",
    )


SHORTS, OCTETS = (ir.VectorType(ir.IntType(512 // count), count) for count in (2 * LANES, 4 * LANES))
_ARGUMENTS, _ROWS, _GATHER = np.dtype(Arguments), np.dtype(RowArguments), np.dtype(GatherArguments)
_PACK = np.dtype(PackArguments)


@operation(types.int32, pairs)
def sum_integers(builder, x):
    """Sum of the sixteen."""
    width = LANES
    while width > 1:
        width //= 2
        x = builder.add(shuffle(builder, x, x, [*range(width)]), shuffle(builder, x, x, [*range(width, 2 * width)]))
    return builder.extract_element(x, ir.Constant(INT32, 0))


def _summed_quads(name):
    """How many quads' products are summed in 16 bits: a power of two; 1: none are.

    Without VNNI, two products of unsigned and signed bytes have room in 16 bits for numbers below 128.
    """
    found = FORMATS[name]
    room = 1 if HAS_VNNI else 0x7FFF // (2 * int(MOST) * found.most)
    return min(1 << max(0, room.bit_length() - 1), found.group // 4)


def _emit_quad(builder, name, turn, shorts, counts, weights, x):
    """Add the products of unsigned bytes of weights and signed bytes of x to integer sums, exactly.

    Args:
        turn: which of a group's quads it is.
        shorts, counts: memory for sums in 16 bits, and in 32, by row and column.
        weights, x: the quad's registers, by column and by row.
    """
    summed = _summed_quads(name)
    ones = ir.Constant(SHORTS, [1] * SHORTS.count)
    for of_row, of_row_counts, four in zip(shorts, counts, x, strict=True):
        for short, count, weight in zip(of_row, of_row_counts, weights, strict=True):
            if HAS_VNNI:
                found = call(builder, "llvm.x86.avx512.vpdpbusd.512", PAIRS, builder.load(count), weight, four)
            elif FORMATS[name].most > 127:
                found = _in_halves(builder, builder.load(count), weight, four)
            else:
                both = (builder.bitcast(value, OCTETS) for value in (weight, four))
                products = _neighbours(builder, "pmaddubs.w.512", "pmadd.ub.sw", SHORTS, *both)
                if turn % summed:
                    products = builder.add(builder.load(short), products)
                if (turn + 1) % summed:
                    builder.store(products, short)
                    continue
                found = builder.add(builder.load(count), _pair_sums(builder, products, ones))
            builder.store(found, count)


def _in_halves(builder, sums, weights, x):
    """sums + the products, where two do not have room in 16 bits."""
    eight = ir.Constant(SHORTS, [8] * SHORTS.count)
    weights, x = builder.bitcast(weights, SHORTS), builder.bitcast(x, SHORTS)
    even = builder.and_(weights, ir.Constant(SHORTS, [255] * SHORTS.count)), builder.ashr(builder.shl(x, eight), eight)
    odd = builder.lshr(weights, eight), builder.ashr(x, eight)
    return builder.add(builder.add(sums, _pair_sums(builder, *even)), _pair_sums(builder, *odd))


def _pair_sums(builder, x, y):
    """Sums of two neighbours' products: int16 [32] to int32 [16]."""
    return _neighbours(builder, "pmaddw.d.512", "pmadd.wd", PAIRS, x, y)


def _neighbours(builder, of_avx512, of_avx2, result, x, y):
    """Sums of two neighbours' products, by an instruction of 512 bits or two of 256."""
    if HAS_AVX512:
        return call(builder, f"llvm.x86.avx512.{of_avx512}", result, x, y)
    half, size = ir.VectorType(result.element, result.count // 2), x.type.count // 2
    parts = []
    for first in (0, size):
        low, high = (shuffle(builder, value, value, [*range(first, first + size)]) for value in (x, y))
        parts.append(call(builder, f"llvm.x86.avx2.{of_avx2}", half, low, high))
    return shuffle(builder, parts[0], parts[1], [*range(result.count)])


@of_format
def few_tile(builder, name, num_rows, x, x_stride, at, scales, minima, sums):
    """Add the products of up to FEW_ROWS with a stored block to their sums: numbers stay in registers.

    Args:
        at: address of the stored block.
        x, x_stride, scales, minima, sums: see many_tile.
    """
    given = (x, x_stride, at, scales, minima, sums)
    emit_by_count(builder, num_rows, FEW_ROWS, lambda rows: _emit_few(builder, name, rows, *given))


def _emit_few(builder, name, num_rows, x, x_stride, at, scales, minima, sums):
    unit, found = UNITS[name], FORMATS[name]
    num_groups, num_parts = 4 * unit.num_quads // GROUP, GROUP // found.group
    row_numbers = range(num_rows)
    num_lines = found.size_bytes * 4 * unit.num_quads // found.elements
    shorts, counts = (
        [_room(builder, num_rows, kind) for _ in range(num_groups * num_parts)] for kind in (SHORTS, PAIRS)
    )
    sums_at = [
        [offset(builder, sums, row * SUM_ROW_BYTES + column * REGISTER_BYTES) for column in range(COLUMNS)]
        for row in row_numbers
    ]
    floats = in_registers(builder, sums_at) if HAS_AVX512 else nullcontext()
    with (
        floats as totals,
        units(builder, name, at, constant(1)) as (number, index, word_at),
        _columns(builder) as columns,
    ):
        total_of = _in_memory(builder, sums, columns) if totals is None else lambda row, column: totals[row][column]
        num_ahead = -(-num_lines * len(columns) // COLUMNS)  # of these columns: lines that follow one another
        ahead = indexed(
            builder, offset(builder, at, AHEAD_BYTES), (number, num_lines * REGISTER_BYTES), (columns[0], num_ahead)
        )
        rows = [
            indexed(builder, x, (constant(row), x_stride), (number, num_groups * GROUP_BYTES)) for row in row_numbers
        ]
        places = [_sum_at(part // num_parts, part % num_parts, num_parts) for part in range(len(counts))]
        x_sums = [[load(builder, offset(builder, row, place), INT32) for row in rows] for place in places]

        def word_of(column):
            return lambda stream, n: load(builder, builder.add(word_at(stream, n), column), PAIRS)

        turn, step = 0, len(counts) if HAS_AVX512 else max(1, MOST_SUMS // num_rows)
        for first in range(0, len(counts), step):
            turns = dict.fromkeys(range(first, min(first + step, len(counts))), 0)
            for part in turns:
                _emit_first_counts(builder, x_sums[part], found.middle, counts[part])
            numbers = zip(*(unit.numbers(builder, word_of(column), index) for column in columns), strict=True)
            for found_here in numbers:  # LLVM removes those of other parts
                quad = found_here[0][0]
                part = 4 * quad // found.group
                if part not in turns:
                    continue
                for line in range(turn * num_ahead // unit.num_quads, (turn + 1) * num_ahead // unit.num_quads):
                    if line % AHEAD_LINES == 0:
                        prefetch.emit(builder, offset(builder, ahead, line * REGISTER_BYTES))
                four_at = quad // (GROUP // 4) * GROUP_BYTES + quad % (GROUP // 4) * 4
                fours = [load(builder, offset(builder, row, four_at), INT32) for row in rows]
                x_here = [broadcast(builder, four, PAIRS) for four in fours]
                weights = [of_column for _, of_column in found_here]
                _emit_quad(builder, name, turns[part], shorts[part], counts[part], weights, x_here)
                turns[part] += 1
                turn += 1
            for part in turns:
                group = indexed(builder, constant(part), (number, num_groups * num_parts))
                scaled = [indexed(builder, base, (group, SUM_ROW_BYTES)) for base in (scales, minima)]
                scale_at = part // num_parts * GROUP_BYTES + GROUP
                x_scales = [load(builder, offset(builder, row, scale_at), FLOAT) for row in rows]
                given = (x_scales, x_sums[part], counts[part], columns, total_of)
                _emit_scaled(builder, scaled, found.has_minima, *given)


@contextmanager
def _columns(builder):
    """Emit what follows for all columns of 16 outputs; with AVX2, for one at a time. Yields their offsets."""
    if HAS_AVX512:
        yield [constant(column * REGISTER_BYTES) for column in range(COLUMNS)]
        return
    with cgutils.for_range(builder, constant(COLUMNS)) as loop:
        yield [builder.mul(loop.index, constant(REGISTER_BYTES))]


def _room(builder, num_rows, kind):
    """Memory that LLVM keeps in registers, by row and by column of those emitted at once."""
    return [[cgutils.alloca_once(builder, kind) for _ in range(COLUMNS if HAS_AVX512 else 1)] for _ in range(num_rows)]


def _sum_at(group, part, num_parts):
    """Where a row has the sum of a group's part, of so many."""
    return group * GROUP_BYTES + SUM_AT + (4 * (1 + part) if num_parts > 1 else 0)


def _emit_first_counts(builder, x_sums, middle, counts):
    """Set integer sums to what the middle makes of the sums of x. counts: registers by row and column."""
    for x_sum, of_row in zip(x_sums, counts, strict=True):
        first = broadcast(builder, builder.mul(x_sum, ir.Constant(INT32, -middle)), PAIRS)
        for register in of_row:
            builder.store(first, register)


def _emit_scaled(builder, places, has_minima, x_scales, x_sums, counts, columns, total_of):
    """Add integer sums times scales, less minima, to float sums. All tiles do so in this order.

    places: addresses of scales and minima. counts, columns: see _room and _columns. total_of(row, number): a pointer.
    """
    lowered = [
        builder.fmul(builder.sitofp(x_sum, FLOAT), builder.fneg(by)) for x_sum, by in zip(x_sums, x_scales, strict=True)
    ]
    for number, column in enumerate(columns):
        scale, minimum = (load(builder, builder.add(place, column), FLOATS) for place in places)
        for row, of_row in enumerate(counts):
            scaled = builder.fmul(builder.sitofp(builder.load(of_row[number]), FLOATS), scale)
            by, total = broadcast(builder, x_scales[row], FLOATS), total_of(row, number)
            found = multiply_add.emit(builder, scaled, by, builder.load(total, align=4))
            if has_minima:
                found = multiply_add.emit(builder, minimum, broadcast(builder, lowered[row], FLOATS), found)
            builder.store(found, total, align=4)


def _in_memory(builder, sums, columns):
    """Pointers to float sums, for _emit_scaled. sums: address of the rows'."""

    def total_of(row, number):
        place = offset(builder, builder.add(sums, columns[number]), row * SUM_ROW_BYTES)
        return builder.inttoptr(place, FLOATS.as_pointer())

    return total_of


@of_format
def many_tile(
    builder, name, num_rows, x, x_stride, values, values_stride, scales, minima, num_groups, sums, wanted, num_lines
):
    """Add the products of up to MOST_TILE_ROWS with a decoded part of a block to their sums.

    Args:
        x: address of the rows' groups: see Arguments; rows are x_stride bytes apart.
        values: address of bytes [groups, quads of inputs, 64 outputs, 4], groups values_stride bytes apart.
        scales, minima: addresses of float32 [groups, 64], of half groups where the format has them.
        sums: address of float32 [num_rows, 64].
        wanted: address of what is prefetched meanwhile; num_lines: how much for a group.
    """
    given = (x, x_stride, values, values_stride, scales, minima, num_groups, sums, wanted, num_lines)
    emit_by_count(builder, num_rows, MOST_TILE_ROWS, lambda rows: _emit_tile(builder, name, rows, *given))


def _emit_tile(
    builder, name, num_rows, x, x_stride, values, values_stride, scales, minima, num_groups, sums, wanted, num_lines
):
    found, row_numbers = FORMATS[name], range(num_rows)
    num_parts, summed = GROUP // found.group, _summed_quads(name)
    shorts, counts = _room(builder, num_rows, SHORTS), _room(builder, num_rows, PAIRS)
    num_quads = GROUP // 4 // num_parts
    with _columns(builder) as columns, cgutils.for_range(builder, num_groups) as groups:
        rows = [indexed(builder, x, (constant(row), x_stride), (groups.index, GROUP_BYTES)) for row in row_numbers]
        num_lines_here = builder.udiv(
            offset(builder, num_lines, COLUMNS // len(columns) - 1), constant(COLUMNS // len(columns))
        )
        ahead = indexed(
            builder, builder.add(wanted, columns[0]), (builder.mul(groups.index, num_lines), REGISTER_BYTES)
        )
        with cgutils.for_range(builder, num_lines_here) as lines:
            prefetch.emit(builder, indexed(builder, ahead, (lines.index, COLUMNS // len(columns) * REGISTER_BYTES)))
        for part in range(num_parts):
            x_sums = [load(builder, offset(builder, row, _sum_at(0, part, num_parts)), INT32) for row in rows]
            _emit_first_counts(builder, x_sums, found.middle, counts)
            first_values = indexed(builder, values, (groups.index, values_stride))
            with cgutils.for_range(builder, constant(num_quads // summed)) as quads:
                for turn in range(summed):
                    quad = indexed(builder, constant(part * num_quads + turn), (quads.index, summed))
                    place = indexed(builder, first_values, (quad, QUAD_BYTES))
                    weights = [load(builder, builder.add(place, column), PAIRS) for column in columns]
                    fours = [load(builder, indexed(builder, row, (quad, 4)), INT32) for row in rows]
                    x_here = [broadcast(builder, four, PAIRS) for four in fours]
                    _emit_quad(builder, name, turn, shorts, counts, weights, x_here)
            group = indexed(builder, constant(part), (groups.index, num_parts))
            _emit_scaled(
                builder,
                [indexed(builder, base, (group, SUM_ROW_BYTES)) for base in (scales, minima)],
                found.has_minima,
                [load(builder, offset(builder, row, GROUP), FLOAT) for row in rows],
                x_sums,
                counts,
                columns,
                _in_memory(builder, sums, columns),
            )


def _make_multiply(code):
    """Adds the products of rows with a block to their sums. x: see Arguments; scratch: a part, its scales and minima.

    Few rows multiply numbers in registers, block by block. For more a part is decoded once; its first tile prefetches
    the next part.
    """
    elements, stored_bytes = ELEMENTS[code], BYTES[code] * BLOCK_OUTPUTS
    is_plain = SIGNED[code]  # stored as it is multiplied
    part_lines = -(-PART_INPUTS // elements * stored_bytes // REGISTER_BYTES)
    group_lines = -(-part_lines // (PART_INPUTS // GROUP))

    def multiply(at, x, num_inputs, num_rows, scratch, sums):
        scales = scratch + PART_BYTES
        minima = scales + PART_SCALES
        x_stride = num_inputs // GROUP * GROUP_BYTES
        num_tiles = (num_rows + MOST_TILE_ROWS - 1) // MOST_TILE_ROWS
        if 0 < num_rows <= FEW_ROWS:
            for _ in range(num_inputs // elements):
                decode_scales(code, at, 1, scales, minima)
                few_tile(code, num_rows, x, x_stride, at, scales, minima, sums)
                at, x = at + stored_bytes, x + elements // GROUP * GROUP_BYTES
            return
        for start in range(0, num_inputs, PART_INPUTS):
            some, part_x = min(PART_INPUTS, num_inputs - start), x + start // GROUP * GROUP_BYTES
            num_blocks = some // elements
            decode_scales(code, at, num_blocks, scales, minima)
            values, stride = scratch, GROUP * BLOCK_OUTPUTS
            if is_plain:
                values, stride = at + 2 * BLOCK_OUTPUTS, stored_bytes
            else:
                decode_numbers(code, at, num_blocks, values)
            at += num_blocks * stored_bytes
            first, lines = 0, group_lines
            for index in range(num_tiles):
                end = (index + 1) * num_rows // num_tiles
                tile_x, tile_sums = part_x + first * x_stride, sums + first * SUM_ROW_BYTES
                groups, rows = some // GROUP, end - first
                many_tile(code, rows, tile_x, x_stride, values, stride, scales, minima, groups, tile_sums, at, lines)
                first, lines = end, 0

    return kernel(6, NAMES[code])(multiply)


def _make_decode(code):
    """Decodes stored blocks, up to a part. scratch: room for bytes [quads, 64 outputs, 4], scales, minima."""

    def decode(at, num_blocks, scratch):
        scales = scratch + PART_BYTES
        decode_scales(code, at, num_blocks, scales, scales + PART_SCALES)
        decode_numbers(code, at, num_blocks, scratch)

    return kernel(3, NAMES[code])(decode)


@operation(nothing, *[types.int64] * 7)
def call_multiply(builder, function, at, x, num_inputs, num_rows, scratch, sums):
    """See _make_multiply."""
    _call_at(builder, function, at, x, num_inputs, num_rows, scratch, sums)


@operation(nothing, *[types.int64] * 4)
def call_decode(builder, function, at, num_blocks, scratch):
    """See _make_decode."""
    _call_at(builder, function, at, num_blocks, scratch)


def _call_at(builder, function, *arguments):
    kind = ir.FunctionType(ir.VoidType(), [INT64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


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
            store_rounded(into, value)
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


@kernel()
def quantize_rows(arguments):
    """Take rows until none is left: any number of threads at once. arguments: the address of RowArguments."""
    args = carray(pointer(arguments), 1, _ROWS)[0]
    row = take_next(arguments)
    while row < args.num_rows:
        target = args.x + row * (args.num_inputs // GROUP * GROUP_BYTES)
        _quantize_row(args.source + row * args.stride, args.is_bf16, args.num_inputs, target)
        row = take_next(arguments)


@kernel()
def multiply_blocks(arguments):
    """Take pieces until none is left: any number of threads at once. arguments: the address of Arguments."""
    args = carray(pointer(arguments), 1, _ARGUMENTS)[0]
    pieces = carray(pointer(args.pieces), args.num_pieces + 1, np.int64)
    blocks = carray(pointer(args.blocks), (pieces[args.num_pieces], 4), np.int64)
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
    piece = take_next(arguments)
    while piece < args.num_pieces:
        for block in range(pieces[piece], pieces[piece + 1]):
            first_output = blocks[block, 2]
            bias = args.bias + size * first_output if args.bias else 0
            for index in range(0, num_rows * BLOCK_OUTPUTS, LANES):
                store_floats(sums + 4 * index, zeros())
            call_multiply(blocks[block, 1], blocks[block, 0], x, args.num_inputs, num_rows, scratch, sums)
            for row in range(num_rows):
                out = args.out + size * (row * args.num_outputs + first_output)
                _write(sums + row * SUM_ROW_BYTES, bias, out, blocks[block, 3], args.is_bf16, scratch)
        piece = take_next(arguments)
    keep(memory)


@kernel()
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
    code, row = args.code, take_next(arguments)
    elements, group, middle = ELEMENTS[code], GROUPS[code], MIDDLES[code]
    while row < args.num_rows:
        out = carray(pointer(args.out + row * num_inputs * 4), num_inputs, np.float32)
        at = args.packed + rows[row] // BLOCK_OUTPUTS * (num_inputs // elements * BYTES[code] * BLOCK_OUTPUTS)
        output = rows[row] % BLOCK_OUTPUTS
        for start in range(0, num_inputs, PART_INPUTS):
            some = min(PART_INPUTS, num_inputs - start)
            call_decode(args.decode, at, some // elements, scratch)
            at += some // elements * BYTES[code] * BLOCK_OUTPUTS
            for index in range(some):
                place = scratch + index // 4 * QUAD_BYTES + output * 4 + index % 4
                number = np.float32(np.int64(carray(pointer(place), 1, np.uint8)[0]) - middle)
                value = scales[index // group, output] * number
                if HAVE_MINIMA[code]:
                    value -= minima[index // group, output]
                out[start + index] = value
        row = take_next(arguments)
    keep(memory)


@njit(cache=True)
def _pack_words(source, row_bytes, num_outputs, num_words, flipped, target):
    """Words of four bytes of each output, side by side by output. flipped: bits that are turned."""
    for word in range(num_words):
        into = carray(pointer(target + word * QUAD_BYTES), BLOCK_OUTPUTS, np.int32)
        for output in range(num_outputs):
            into[output] = carray(pointer(source + output * row_bytes + 4 * word), 1, np.int32)[0] ^ flipped


@njit(cache=True)
def _pack_bytes(source, row_bytes, num_outputs, width, count, target):
    """As _pack_words, of one or two bytes each."""
    for field in range(count):
        for output in range(num_outputs):
            for byte in range(width):
                at = source + output * row_bytes + width * field + byte
                into = carray(pointer(target + width * (field * BLOCK_OUTPUTS + output) + byte), 1, np.uint8)
                into[0] = carray(pointer(at), 1, np.uint8)[0]


@kernel()
def pack(arguments):
    """Take 64 outputs at a time until none is left: any number of threads at once. arguments: PackArguments'."""
    args = carray(pointer(arguments), 1, _PACK)[0]
    fields = carray(pointer(args.fields), (args.num_fields, 3), np.int64)
    row_bytes, block_bytes, num_outputs, signed = args.row_bytes, args.block_bytes, args.num_outputs, args.signed
    stored, packed, wide = args.stored, args.packed, row_bytes * BLOCK_OUTPUTS
    piece = take_next(arguments)
    while piece * BLOCK_OUTPUTS < num_outputs:
        first, target = stored + piece * wide, packed + piece * wide
        some = min(BLOCK_OUTPUTS, num_outputs - piece * BLOCK_OUTPUTS)
        if some < BLOCK_OUTPUTS:
            carray(pointer(target), wide, np.uint8)[:] = 0
        for start in range(0, row_bytes, block_bytes):
            for index in range(len(fields)):
                width, count, place = fields[index]
                source = first + start + place
                if width == 4:
                    flipped = SIGNS if 0 <= signed <= place else np.int32(0)
                    _pack_words(source, row_bytes, some, count, flipped, target)
                else:
                    _pack_bytes(source, row_bytes, some, width, count, target)
                target += width * count * BLOCK_OUTPUTS
        piece = take_next(arguments)


def pack_blocks(name: str, stored: Tensor) -> PackedBlocks:
    """Pack a file's blocks. stored: bytes [out, bytes of a row]."""
    found, (num_out, row_bytes) = FORMATS[name], stored.shape
    stored, fields = stored.contiguous(), torch.tensor(found.fields)
    per_row, num_wide = row_bytes // found.size_bytes, -(-num_out // BLOCK_OUTPUTS)
    packed = huge_pages.empty((num_wide, per_row, BLOCK_OUTPUTS * found.size_bytes), torch.uint8)
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
    use_huge_pages(packed.data_ptr(), packed.nbytes)
    return PackedBlocks(name, packed, num_out)


def pack_quantized(weight: QuantizedWeight) -> PackedBlocks | None:
    """Pack a matrix of int8 or int4, whose numbers stay: only scales and zeros become half floats.

    None: 8-bit floats, groups that 32 does not divide, or scales beyond half floats.
    """
    is_int4, num_out = weight.zeros is not None, weight.shape[0]
    size = next((size for size in (INT4_FORMATS if is_int4 else (GROUP,)) if weight.group_size % size == 0), None)
    if size is None or weight.values.dtype == FP8:
        return None
    fields = [weight.scales]
    if weight.zeros is None:
        numbers = weight.values
    else:
        fields.append(weight.zeros)
        halves = unpack_nibbles(weight.values).view(-1, 2, GROUP // 2)  # of each 32 inputs
        numbers = halves[:, 0] | halves[:, 1] << 4
    found = torch.stack(fields, -1).half()  # [out, groups, 1 or 2]
    if not found.isfinite().all():
        return None
    scales = found.repeat_interleave(weight.group_size // size, 1).view(torch.uint8)
    stored = torch.cat([scales, numbers.view(torch.uint8).view(*scales.shape[:2], -1)], -1)
    return pack_blocks(INT4_FORMATS[size] if is_int4 else "Q8_0", stored.view(num_out, -1))


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
                at = part.packed.data_ptr() + start // BLOCK_OUTPUTS * step
                table.append((at, _multiplier(part.format).address, first, some))
                first += some
        self._blocks = torch.tensor(table, dtype=torch.int64)
        bias = None if bias is None else F.pad(bias, (0, LANES))  # registers are read whole
        self._bias, self._weight = bias, weight
        self._arguments = Arguments(
            blocks=self._blocks.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            num_inputs=self._num_in,
            num_outputs=self._num_out,
            is_bf16=self._is_bf16,
        )
        self._row_arguments = RowArguments(
            stride=self._num_in * weight.dtype.itemsize, is_bf16=self._is_bf16, num_inputs=self._num_in
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]; returns [tokens, out]."""
        num_rows, panel, num_threads = x.shape[0], self._arguments, torch.get_num_threads()
        pieces = divide(len(self._blocks), num_threads)
        panel.pieces, panel.num_pieces = pieces.data_ptr(), len(pieces) - 1
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
        (part,) = self._weight.parts
        indexes = indexes.long().contiguous()
        out = torch.empty((len(indexes), self._num_in))
        arguments = GatherArguments(
            rows=indexes.data_ptr(),
            packed=part.packed.data_ptr(),
            code=CODES[part.format],
            decode=_decoder(part.format).address,
            out=out.data_ptr(),
            num_rows=len(indexes),
            num_inputs=self._num_in,
        )
        self._gather(arguments, min(torch.get_num_threads(), max(1, len(indexes))))
        return out.to(self._dtype)


@cache
def divide(num_blocks: int, num_threads: int) -> Tensor:
    """Where pieces begin, and the last ends: half of what is left in a piece for each thread, then half of the rest.

    Blocks that follow one another are prefetched; at the end pieces are small, so that no thread waits long.
    """
    starts = [0]
    while (left := num_blocks - starts[-1]) > 0:
        some = max(1, left // (2 * num_threads))
        starts += [min(num_blocks, starts[-1] + some * number) for number in range(1, min(num_threads, left) + 1)]
    return torch.tensor(starts)


@cache
def _multiplier(name: str) -> Any:
    return _make_multiply(CODES[name])


@cache
def _decoder(name: str) -> Any:
    return _make_decode(CODES[name])


def compile_format(name: str) -> None:
    """Compile what multiplies and decodes a format's blocks, unless an earlier process did."""
    _multiplier(name)
    _decoder(name)


@cache
def _packer() -> Kernel:
    return Kernel(pack)


@cache
def _kernels() -> tuple[Kernel, Kernel, Kernel]:
    return Kernel(multiply_blocks), Kernel(quantize_rows), Kernel(gather_rows)
