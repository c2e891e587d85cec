"""Registers of 64 bytes as numba values: 16 float32 (`Floats`), or 16 pairs of bf16 (`Pairs`), one in each 32 bits.

Addresses are integers. Each intrinsic compiles to few instructions; only the dot product of pairs needs avx512_bf16.
Thread: any, without the GIL.
"""

import functools
import inspect
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import LANES

MOST_EXPONENT = np.float32(126.0)
# Added to a small number it leaves the nearest integer in the low bits.
ROUNDER = np.float32(1.5 * 2**23)
ONE = np.float32(1)
# 2 ** x for x in -0.5..0.5 to 5e-6, a thousandth of bf16's rounding; 1 for x = 0. By weighted least squares.
EXP2 = tuple(np.float32(value) for value in (0.69312419, 0.24024099, 0.05590642, 0.00958285))


class Floats(types.Type):
    def __init__(self) -> None:
        super().__init__("Floats")


class Pairs(types.Type):
    def __init__(self) -> None:
        super().__init__("Pairs")


floats, pairs, address, nothing = Floats(), Pairs(), types.int64, types.void


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, emit.FLOATS)


@register_model(Pairs)
class _PairsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, emit.PAIRS)


def operation(result, *taken):
    """Make a function of (builder, values) an intrinsic of these types; it returns the value, or None for nothing."""

    def decorate(emit_value):
        def definition(typing_context: Any, *arguments: Any) -> Any:
            def generate(context, builder, signature, values):
                found = emit_value(builder, *values)
                return context.get_dummy_value() if found is None else found

            return result(*taken), generate

        functools.update_wrapper(definition, emit_value)
        # numba asks for arguments by name: those of emit_value, its builder in the place of the typing context
        definition.__signature__ = inspect.signature(emit_value)  # type: ignore[attr-defined]
        return intrinsic(definition)

    return decorate


@operation(floats)
def zeros(builder):
    """Sixteen zeros."""
    return ir.Constant(emit.FLOATS, [0.0] * LANES)


@operation(floats, address)
def load_floats(builder, at):
    """float32 [16]."""
    return emit.load(builder, at, emit.FLOATS)


@operation(pairs, address)
def load_pairs(builder, at):
    """bf16 [32]."""
    return emit.load(builder, at, emit.PAIRS)


@operation(floats, address)
def load_widened(builder, at):
    """bf16 [16] as float32."""
    return emit.load_widened(builder, at)


@operation(types.int64, address)
def load_integer(builder, at):
    """int64"""
    return emit.load(builder, at, ir.IntType(64))


@operation(types.float32, address)
def load_float(builder, at):
    """float32"""
    return emit.load(builder, at, ir.FloatType())


@operation(types.voidptr, address)
def pointer(builder, at):
    """An address for carray."""
    return builder.inttoptr(at, ir.IntType(8).as_pointer())


@operation(nothing, address, floats)
def store_floats(builder, at, value):
    """float32 [16]."""
    emit.store(builder, at, value)


@operation(nothing, address, pairs)
def store_pairs(builder, at, value):
    """bf16 [32]."""
    emit.store(builder, at, value)


@operation(nothing, address, floats)
def store_rounded(builder, at, value):
    """Sixteen float32 as bf16 [16], to the nearest, ties to even."""
    emit.store(builder, at, builder.fptrunc(value, emit.HALF_BFLOATS))


@operation(floats, types.float32)
def spread(builder, value):
    """A float32 in every lane."""
    return emit.spread(builder, value, emit.FLOATS)


@operation(floats, floats, floats, floats)
def multiply_add(builder, x, y, z):
    """x * y + z, rounded once."""
    return emit.multiply_add(builder, x, y, z)


@operation(floats, floats, floats, floats)
def multiply_subtract(builder, x, y, z):
    """x * y - z, rounded once."""
    return emit.multiply_add(builder, x, y, builder.fneg(z))


@operation(floats, floats, floats)
def add(builder, x, y):
    """x + y"""
    return builder.fadd(x, y)


@operation(floats, floats, floats)
def subtract(builder, x, y):
    """x - y"""
    return builder.fsub(x, y)


@operation(floats, floats, floats)
def multiply(builder, x, y):
    """x * y"""
    return builder.fmul(x, y)


@operation(floats, floats, floats)
def divide(builder, x, y):
    """x / y"""
    return builder.fdiv(x, y)


@operation(floats, floats, floats)
def larger(builder, x, y):
    """The larger of two, lane by lane; of a NaN and a number the second."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(floats, floats, floats)
def smaller(builder, x, y):
    """The smaller of two, lane by lane; of a NaN and a number the second."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@operation(floats, floats, floats)
def add_exponents(builder, x, exponents):
    """x * 2 ** n, where it is a normal number. exponents: bits whose low 9 are n."""
    bits, exponents = (builder.bitcast(argument, emit.PAIRS) for argument in (x, exponents))
    return builder.bitcast(builder.add(bits, builder.shl(exponents, emit.spread_constant(23))), emit.FLOATS)


@operation(types.float32, floats)
def first_lane(builder, x):
    """The first of the sixteen."""
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


@operation(types.float32, floats)
def total(builder, x):
    """Sum of the sixteen, in the order that is fastest."""
    return emit.total(builder, x)


@operation(floats, floats)
def spread_largest(builder, x):
    """The largest of the sixteen, in every lane."""
    for width in (8, 4, 2, 1):
        other = _shuffled(builder, x, [lane ^ width for lane in range(LANES)])
        x = builder.select(builder.fcmp_ordered(">", x, other), x, other)
    return x


def _replace_outside(builder: Any, numbers: Any, first: Any, end: Any, value: float) -> Any:
    lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
    first, end = (emit.spread(builder, bound, lanes.type) for bound in (first, end))
    is_seen = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
    return builder.select(is_seen, numbers, ir.Constant(emit.FLOATS, [value] * LANES))


@operation(floats, floats, types.int64, types.int64)
def hide_outside(builder, scores, first, end):
    """-inf in the lanes before `first` and from `end` on."""
    return _replace_outside(builder, scores, first, end, float("-inf"))


@operation(floats, floats, types.int64, types.int64)
def clear_outside(builder, shares, first, end):
    """0 in the lanes before `first` and from `end` on."""
    return _replace_outside(builder, shares, first, end, 0.0)


@operation(nothing, address, types.int64, address, types.int64)
def transpose_pairs(builder, source, stride, target, target_stride):
    """Sixteen rows of 16 pairs to 16 registers, of which the i-th has all rows' i-th pairs; strides are bytes."""
    rows = []
    for row in range(LANES):
        offset = builder.mul(stride, ir.Constant(stride.type, row))
        rows.append(emit.load(builder, builder.add(source, offset), emit.PAIRS))
    width = 1
    while width < LANES:  # exchange the off-diagonal squares: of 1, 2, 4, 8 pairs
        rows = _exchanged(builder, rows, width)
        width *= 2
    for index, row in enumerate(rows):
        offset = builder.mul(target_stride, ir.Constant(target.type, index))
        emit.store(builder, builder.add(target, offset), row)


def _exchanged(builder: Any, rows: list[Any], width: int) -> list[Any]:
    found = list(rows)
    low, high = [], []
    for lane in range(LANES):
        is_second = lane // width % 2
        low.append(lane - width + LANES if is_second else lane)
        high.append(lane + LANES if is_second else lane + width)
    for row in range(LANES):
        if row // width % 2 == 0:
            upper, lower = rows[row], rows[row + width]
            found[row] = builder.shuffle_vector(upper, lower, emit.indexes(low))
            found[row + width] = builder.shuffle_vector(upper, lower, emit.indexes(high))
    return found


def _interleaved(builder: Any, x: Any, y: Any, first: int) -> Any:
    x, y = (builder.bitcast(argument, emit.HALVES) for argument in (x, y))
    order = [index for lane in range(first, first + LANES) for index in (lane, lane + 2 * LANES)]
    return builder.bitcast(builder.shuffle_vector(x, y, emit.indexes(order)), emit.PAIRS)


@operation(pairs, pairs, pairs)
def interleave_low(builder, x, y):
    """Of two rows of bf16 [32], the first sixteen numbers of each as pairs (x, y)."""
    return _interleaved(builder, x, y, 0)


@operation(pairs, pairs, pairs)
def interleave_high(builder, x, y):
    """Of two rows of bf16 [32], the last sixteen numbers of each as pairs (x, y)."""
    return _interleaved(builder, x, y, LANES)


@operation(floats, floats)
def first_of_pairs(builder, x):
    """x[0], x[0], x[2], x[2], ..."""
    return _shuffled(builder, x, [lane & ~1 for lane in range(LANES)])


@operation(floats, floats)
def second_of_pairs(builder, x):
    """x[1], x[1], x[3], x[3], ..."""
    return _shuffled(builder, x, [lane | 1 for lane in range(LANES)])


@operation(floats, floats)
def turned_pairs(builder, x):
    """-x[1], x[0], -x[3], x[2], ...: each pair, as a complex number, times i."""
    order = [lane + 1 + LANES if lane % 2 == 0 else lane - 1 for lane in range(LANES)]
    return builder.shuffle_vector(x, builder.fneg(x), emit.indexes(order))


def _shuffled(builder: Any, x: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, x, emit.indexes(order))


@operation(nothing, address)
def prefetch(builder, at):
    """Prefetch a cache line without waiting; an unmapped address does no harm."""
    emit.prefetch(builder, at)


@operation(types.int64, address)
def take_next(builder, at):
    """The int64 at address, which is then incremented, atomically: each number goes to one thread.

    A thread sees what the threads that took earlier numbers had written before they took them.
    """
    counter = builder.inttoptr(at, ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")


@intrinsic
def keep(typing_context, array):
    """Keep an array alive until here: numba frees it after its last use, and does not see uses of its address."""
    return types.void(array), lambda context, builder, signature, arguments: context.get_dummy_value()


@njit(cache=True)
def exp2_to_126(x):
    """2 ** x for x up to 126; below -126 as for -126, which rounds to nothing beside any other share."""
    x = larger(x, spread(-MOST_EXPONENT))
    whole = add(x, spread(ROUNDER))
    part = subtract(x, subtract(whole, spread(ROUNDER)))
    value = multiply_add(spread(EXP2[3]), part, spread(EXP2[2]))
    value = multiply_add(value, part, spread(EXP2[1]))
    value = multiply_add(value, part, spread(EXP2[0]))
    return add_exponents(multiply_add(value, part, spread(ONE)), whole)


@njit(cache=True)
def exp2(x):
    """2 ** x; beyond -126..126 as for those bounds."""
    return exp2_to_126(smaller(x, spread(MOST_EXPONENT)))
