"""The block formats' numbers and scales in registers: of GGUF's, and of int8 and int4. Kernels: any thread, no GIL.

A format is a Unit, which emits its numbers as unsigned bytes, and how its scales and minima become float32:
decode_scales. gpu/blocks.py says how blocks lie; block_matmul.py multiplies them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.blocks import BLOCK_OUTPUTS, FORMATS, INT4_FORMATS, IQ4_NUMBERS, MXFP4_NUMBERS
from gpu.cpu_kernels.compiled import carray, cgutils, intrinsic, ir, njit, types
from gpu.cpu_kernels.vectors import (
    FLOATS,
    HAS_AVX512,
    INT32,
    LANES,
    PAIRS,
    REGISTER_BYTES,
    address,
    broadcast,
    call,
    constant,
    floats,
    load,
    load_pairs,
    nothing,
    offset,
    operation,
    pairs,
    pointer,
    shuffle,
    spread,
    store,
    store_floats,
    zeros,
)

COLUMNS = BLOCK_OUTPUTS // LANES
QUAD_BYTES = 4 * BLOCK_OUTPUTS  # of four inputs, all outputs of a block
SUM_ROW_BYTES = 4 * BLOCK_OUTPUTS
NIBBLES, TWOS, SIXES, ONES = 0x0F0F0F0F, 0x03030303, 0x3F3F3F3F, 0x01010101
CODES = {name: code for code, name in enumerate(FORMATS)}
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = (CODES[name] for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
IQ4_XS, MXFP4 = CODES["IQ4_XS"], CODES["MXFP4"]
SPREAD_BITS = 0x00204081  # times four bits: one at the foot of each byte


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


@operation(pairs, address)
def load_shorts(builder, at):
    """Unsigned 16 bits [16], each widened to 32."""
    return builder.zext(load(builder, at, ir.VectorType(ir.IntType(16), LANES)), PAIRS)


@operation(floats, address)
def load_halves(builder, at):
    """float16 [16] as float32."""
    return builder.fpext(load(builder, at, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


@operation(pairs, address)
def load_bytes(builder, at):
    """Unsigned bytes [16], each widened to 32 bits."""
    return builder.zext(load(builder, at, ir.VectorType(ir.IntType(8), LANES)), PAIRS)


@operation(floats, address)
def load_signed(builder, at):
    """int8 [16] as float32."""
    return builder.sitofp(load(builder, at, ir.VectorType(ir.IntType(8), LANES)), FLOATS)


@operation(floats, pairs)
def converted(builder, x):
    """int32 [16] as float32."""
    return builder.sitofp(x, FLOATS)


def _looked_up(builder, nibbles, table):
    """Of each byte, 0 to 15, the table's number."""
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


@dataclass(frozen=True, slots=True)
class Unit:
    """How a format's numbers lie in a stored block, as often as they fill it.

    Args:
        numbers: emits (quad of four inputs of the unit, their unsigned bytes of 16 outputs). It takes the builder,
            word(stream, n): a word of four bytes of these outputs, and the unit's index in the block.
        num_quads: of a unit.
        streams: (first byte in the stored block, words that a unit has of its own).
    """

    numbers: Callable[[Any, Callable[[int, int], Any], Any], Iterator[tuple[int, Any]]]
    num_quads: int
    streams: tuple[tuple[int, int], ...]


def _masked(builder, x, by, mask, to=0):
    """x shifted right by a number or a value, of it what the mask leaves, shifted left."""
    x = right.emit(builder, x, constant(by) if isinstance(by, int) else by)
    return left.emit(builder, and_.emit(builder, x, constant(mask)), constant(to))


def _bytes(builder, word, index):
    for quad in range(8):
        yield quad, word(0, quad)


def _nibbles(num_words):
    """Words whose low halves are so many quads, and whose high halves are the next."""

    def numbers(builder, word, index):
        for quad in range(num_words):
            both = word(0, quad)
            yield quad, _masked(builder, both, 0, NIBBLES)
            yield num_words + quad, _masked(builder, both, 4, NIBBLES)

    return numbers


def _of_table(table):
    def numbers(builder, word, index):
        for quad, nibbles in _nibbles(4)(builder, word, index):
            yield quad, _looked_up(builder, nibbles, table)

    return numbers


def _q5(builder, word, index):
    """A word of 32 fifth bits, then as nibbles."""
    fifths = word(0, 0)
    for quad in range(8):
        spread_out = times.emit(builder, _masked(builder, fifths, 4 * quad, 15), constant(SPREAD_BITS))
        four = _masked(builder, word(0, 1 + quad % 4), quad // 4 * 4, NIBBLES)
        yield quad, builder.or_(four, _masked(builder, spread_out, 0, ONES, 4))


def _q5_k(builder, word, index):
    """As Q4_K's; of 8 words of fifth bits, bit n is part n's."""
    for quad in range(8):
        both, fifths = word(1, quad), word(0, quad)
        for part in range(2):
            bit = builder.add(builder.mul(index, constant(2)), constant(part))
            fifth = _masked(builder, fifths, bit, ONES, 4)
            yield 8 * part + quad, builder.or_(_masked(builder, both, 4 * part, NIBBLES), fifth)


def _q6_k(builder, word, index):
    """Of 8 quads, two words of nibbles and one of pairs of high bits. Source: ggml-quants.c, dequantize_row_q6_K."""
    for quad in range(8):
        *both, twos = (word(0, 3 * quad + n) for n in range(3))
        for part in range(4):
            four = _masked(builder, both[part % 2], part // 2 * 4, NIBBLES)
            yield 8 * part + quad, builder.or_(four, _masked(builder, twos, 2 * part, TWOS, 4))


def _q2_k(builder, word, index):
    """8 words of four pairs of bits. Source: ggml-quants.c, dequantize_row_q2_K."""
    for quad in range(8):
        twos = word(0, quad)
        for part in range(4):
            yield 8 * part + quad, _masked(builder, twos, 2 * part, TWOS)


def _q3_k(builder, word, index):
    """As Q2_K's; of 8 words of third bits, bit 4 * index + n is part n's."""
    for quad in range(8):
        thirds, twos = word(0, quad), word(1, quad)
        for part in range(4):
            bit = builder.add(builder.mul(index, constant(4)), constant(part))
            low, third = _masked(builder, twos, 2 * part, TWOS), _masked(builder, thirds, bit, ONES, 2)
            yield 8 * part + quad, builder.or_(low, third)


UNITS = {
    "Q8_0": Unit(_bytes, 8, ((2, 8),)),
    "Q4_0": Unit(_nibbles(4), 8, ((2, 4),)),
    "Q4_1": Unit(_nibbles(4), 8, ((4, 4),)),
    "Q5_0": Unit(_q5, 8, ((2, 5),)),
    "Q5_1": Unit(_q5, 8, ((4, 5),)),
    **{name: Unit(_nibbles(4), 8, ((4, 4),)) for name in INT4_FORMATS.values()},
    "MXFP4": Unit(_of_table([number + FORMATS["MXFP4"].middle for number in MXFP4_NUMBERS]), 8, ((1, 4),)),
    "IQ4_NL": Unit(_of_table([number + FORMATS["IQ4_NL"].middle for number in IQ4_NUMBERS]), 8, ((2, 4),)),
    "IQ4_XS": Unit(_of_table([number + FORMATS["IQ4_XS"].middle for number in IQ4_NUMBERS]), 8, ((8, 4),)),
    "Q2_K": Unit(_q2_k, 32, ((20, 8),)),
    "Q3_K": Unit(_q3_k, 32, ((14, 0), (46, 8))),
    "Q4_K": Unit(_nibbles(8), 16, ((16, 8),)),
    "Q5_K": Unit(_q5_k, 16, ((16, 0), (48, 8))),
    "Q6_K": Unit(_q6_k, 32, ((18, 24),)),
}
NAMES, SIGNED = tuple(FORMATS), tuple(found.signed is not None for found in FORMATS.values())
BYTES, ELEMENTS, MIDDLES, GROUPS, HAVE_MINIMA = (
    tuple(getattr(found, field) for found in FORMATS.values())
    for field in ("size_bytes", "elements", "middle", "group", "has_minima")
)


def of_format(emit):
    """Make a function of (builder, a format's name, addresses and numbers) an intrinsic; code: constant, of CODES."""

    def definition(typing_context: Any, code: Any, *arguments: Any) -> Any:
        if not isinstance(code, types.IntegerLiteral):
            return None
        name = NAMES[code.literal_value]

        def generate(context, builder, signature, values):
            emit(builder, name, *values[1:])
            return context.get_dummy_value()

        return nothing(code, *[types.int64] * len(arguments)), generate

    names = ["typing_context", "code", *list(inspect.signature(emit).parameters)[2:]]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    definition.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(prefer_literal=True)(definition)


def indexed(builder, base, *parts):
    """Emit base plus each index times its size."""
    for index, size in parts:
        base = builder.add(base, builder.mul(index, size if isinstance(size, ir.Value) else constant(size)))
    return base


@contextmanager
def units(builder, name, at, num_blocks):
    """Emit loops over the units of stored blocks: (index among all, index in its block, a word's address)."""
    unit, found = UNITS[name], FORMATS[name]
    per_block = found.elements // (4 * unit.num_quads)
    with cgutils.for_range(builder, num_blocks) as blocks, cgutils.for_range(builder, constant(per_block)) as inner:
        stored = indexed(builder, at, (blocks.index, found.size_bytes * BLOCK_OUTPUTS))

        def word_at(stream, n):
            first, step = unit.streams[stream]
            return offset(
                builder,
                indexed(builder, stored, (inner.index, step * QUAD_BYTES)),
                first * BLOCK_OUTPUTS + n * QUAD_BYTES,
            )

        yield indexed(builder, inner.index, (blocks.index, per_block)), inner.index, word_at


@of_format
def decode_numbers(builder, name, at, num_blocks, values):
    """Unsigned bytes of stored blocks, as [quads of inputs, 64 outputs, 4]."""
    unit = UNITS[name]
    with units(builder, name, at, num_blocks) as (number, index, word_at):
        target = indexed(builder, values, (number, unit.num_quads * QUAD_BYTES))
        with cgutils.for_range(builder, constant(COLUMNS)) as columns:
            place = builder.mul(columns.index, constant(REGISTER_BYTES))

            def word(stream, n):
                return load(builder, builder.add(word_at(stream, n), place), PAIRS)

            for quad, four in unit.numbers(builder, word, index):
                store(builder, offset(builder, builder.add(target, place), quad * QUAD_BYTES), four)


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
def _decode_exponents(at, scales):
    """Bytes e that stand for 2 ** (e - 128). Source: ggml-impl.h, ggml_e8m0_to_fp32_half."""
    exponents, out = carray(pointer(at), BLOCK_OUTPUTS, np.uint8), carray(pointer(scales), BLOCK_OUTPUTS, np.uint32)
    for output in range(BLOCK_OUTPUTS):
        exponent = np.uint32(exponents[output])
        out[output] = np.uint32(0x00200000) << exponent if exponent < 2 else (exponent - np.uint32(1)) << np.uint32(23)


@njit(cache=True)
def _decode_iq4_xs_scales(at, scales):
    """Scale, high pairs of bits of eight scales, a word of their low halves.

    Source: ggml-quants.c, dequantize_row_iq4_xs.
    """
    for column in range(0, QUAD_BYTES, REGISTER_BYTES):
        scale, pairs_ = load_halves(at + column // 2), load_shorts(at + 2 * BLOCK_OUTPUTS + column // 2)
        low = load_pairs(at + 4 * BLOCK_OUTPUTS + column)
        for part in range(8):
            number = or_(and_(right(low, 4 * part), 15), left(and_(right(pairs_, 2 * part), 3), 4))
            store_floats(scales + part * SUM_ROW_BYTES + column, (converted(number) - spread(np.float32(32))) * scale)


@njit(cache=True)
def _store_scaled(four, less, scale, target):
    """The bytes of each word less a number, times a scale, a row of float32 [64] for each."""
    for part in range(4):
        number = converted(and_(right(four, 8 * part), 255)) - spread(np.float32(less))
        store_floats(target + part * SUM_ROW_BYTES, number * scale)


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
        _store_scaled(and_(low, SIXES), 0, scale, scales + column)
        _store_scaled(and_(high, SIXES), 0, minimum, minima + column)
        lower = or_(and_(mixed, NIBBLES), and_(right(low, 2), TWOS << 4))
        _store_scaled(lower, 0, scale, scales + 4 * SUM_ROW_BYTES + column)
        upper = or_(and_(right(mixed, 4), NIBBLES), and_(right(high, 2), TWOS << 4))
        _store_scaled(upper, 0, minimum, minima + 4 * SUM_ROW_BYTES + column)


@njit(cache=True)
def _decode_q2_k_scales(at, scales, minima):
    """Scales of scales and of minima, then 16 bytes of both."""
    for column in range(COLUMNS):
        scale = load_halves(at + column * REGISTER_BYTES // 2)
        minimum = load_halves(at + 2 * BLOCK_OUTPUTS + column * REGISTER_BYTES // 2)
        for part in range(16):
            both = load_bytes(at + (4 + part) * BLOCK_OUTPUTS + column * LANES)
            target = part * SUM_ROW_BYTES + column * REGISTER_BYTES
            store_floats(scales + target, converted(and_(both, 15)) * scale)
            store_floats(minima + target, converted(right(both, 4)) * minimum)


@njit(cache=True)
def _decode_q3_k_scales(at, scales):
    """Scale of scales, then three words of sixteen scales in 6 bits, 32 is zero.

    Source: ggml-quants.c, dequantize_row_q3_K.
    """
    words = at + 2 * BLOCK_OUTPUTS
    for column in range(0, QUAD_BYTES, REGISTER_BYTES):
        scale = load_halves(at + column // 2)
        twos = load_pairs(words + 2 * QUAD_BYTES + column)
        for part in range(4):
            low = right(load_pairs(words + part % 2 * QUAD_BYTES + column), part // 2 * 4)
            four = or_(and_(low, NIBBLES), left(and_(right(twos, 2 * part), TWOS), 4))
            _store_scaled(four, 32, scale, scales + 4 * part * SUM_ROW_BYTES + column)


@njit(cache=True)
def _decode_q6_k_scales(at, scales):
    """Scale of scales, then 16 signed ones."""
    for column in range(COLUMNS):
        scale = load_halves(at + column * REGISTER_BYTES // 2)
        for part in range(16):
            sixteen = load_signed(at + (2 + part) * BLOCK_OUTPUTS + column * LANES)
            store_floats(scales + part * SUM_ROW_BYTES + column * REGISTER_BYTES, sixteen * scale)


@njit(cache=True)
def decode_scales(code, at, num_blocks, scales, minima):
    """Float32 scales and minima of stored blocks. scales, minima: addresses of room for a part's."""
    for _ in range(num_blocks):
        if code in (Q4_K, Q5_K):
            _decode_k_scales(at, scales, minima)
        elif code == Q6_K:
            _decode_q6_k_scales(at, scales)
        elif code == Q2_K:
            _decode_q2_k_scales(at, scales, minima)
        elif code == Q3_K:
            _decode_q3_k_scales(at, scales)
        elif code == IQ4_XS:
            _decode_iq4_xs_scales(at, scales)
        elif code == MXFP4:
            _decode_exponents(at, scales)
        else:
            for part in range(ELEMENTS[code] // GROUPS[code]):  # several only of int4, whose groups may be longer
                _decode_halves(at, scales + part * SUM_ROW_BYTES)
                if HAVE_MINIMA[code]:
                    _decode_minima(at + 2 * BLOCK_OUTPUTS, minima + part * SUM_ROW_BYTES)
        at += BYTES[code] * BLOCK_OUTPUTS
        scales += ELEMENTS[code] // GROUPS[code] * SUM_ROW_BYTES
        minima += ELEMENTS[code] // GROUPS[code] * SUM_ROW_BYTES
