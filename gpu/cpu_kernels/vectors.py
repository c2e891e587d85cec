"""Registers of 64 bytes as numba values: 16 float32 (`Floats`), or 16 pairs of bf16 (`Pairs`), one in each 32 bits.

Addresses are integers. Each operation compiles to few LLVM instructions on a CPU with AVX2; without avx512_bf16 the dot
product of pairs is two of float32, and numbers are rounded to bf16 as integers. Python's operators add, subtract,
multiply and divide Floats, and round each result. Larger intrinsics are written with the operations' `emit`, which
takes LLVM's builder and values. Thread: any, without the GIL.

numba's cache does not notice a change here: it looks only at the files of the functions that it compiles.
"""

import functools
import inspect
import operator
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu.cpu_kernels.compiled import (
    ConcreteTemplate,
    cgutils,
    infer_global,
    intrinsic,
    ir,
    lower_builtin,
    models,
    njit,
    register_model,
    signature,
    types,
)
from gpu.device import cpu_flags

LANES = 16
REGISTER_BYTES = 64

INT32, INT64, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, PAIRS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_ALIGNMENT = 2  # bytes: of a bf16; nothing more is assumed

MOST_EXPONENT = np.float32(126.0)
ROUNDER = np.float32(1.5 * 2**23)  # added to a small number it leaves the nearest integer in the low bits
ONE = np.float32(1)
# 2 ** x for x in -0.5..0.5 to 5e-6, a thousandth of bf16's rounding; 1 for x = 0. By weighted least squares.
EXP2 = tuple(np.float32(value) for value in (0.69312419, 0.24024099, 0.05590642, 0.00958285))


class _BFloat(ir.Type):
    """llvmlite has no bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


HAS_AVX512, HAS_BF16 = "avx512bw" in cpu_flags(), "avx512_bf16" in cpu_flags()
HAS_VNNI = "avx512_vnni" in cpu_flags()
NEAR_PAIRS = 64  # of four columns: half of a first-level cache
COLUMNS_AT_ONCE = (0, 4, 2, 2, 1, 1, 1)  # by rows: with AVX2, up to 12 registers of sums
BFLOATS, HALF_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES), ir.VectorType(_BFloat(), LANES)


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
        super().__init__(manager, numba_type, FLOATS)


@register_model(Pairs)
class _PairsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, PAIRS)


def _define(symbol: Any, instruction: str) -> None:
    """Make a Python operator of two Floats an LLVM instruction."""
    infer_global(symbol)(type("_OfFloats", (ConcreteTemplate,), {"cases": [signature(floats, floats, floats)]}))
    lower_builtin(symbol, floats, floats)(lambda context, builder, _, values: getattr(builder, instruction)(*values))


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_symbol, _instruction)


def operation(result, *taken):
    """Make a function of (builder, values) an intrinsic of these types; it returns the value, or None for nothing.

    The intrinsic's `emit` is the function itself.
    """

    def decorate(emit_value):
        def definition(typing_context: Any, *arguments: Any) -> Any:
            def generate(context, builder, signature, values):
                found = emit_value(builder, *values)
                return context.get_dummy_value() if found is None else found

            return result(*taken), generate

        functools.update_wrapper(definition, emit_value)
        # numba passes arguments by name: emit_value's, with the typing context in the place of its builder
        definition.__signature__ = inspect.signature(emit_value)  # type: ignore[attr-defined]
        found = intrinsic(definition)
        found.emit = emit_value
        return found

    return decorate


def load(builder: Any, at: Any, llvm_type: Any) -> Any:
    """Emit a load from an address."""
    return builder.load(builder.inttoptr(at, llvm_type.as_pointer()), align=_ALIGNMENT)


def store(builder: Any, at: Any, value: Any) -> None:
    """Emit a store to an address."""
    builder.store(value, builder.inttoptr(at, value.type.as_pointer()), align=_ALIGNMENT)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Emit a call of LLVM's own intrinsic."""
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def constant(value: int) -> Any:
    """An address, or a part of one."""
    return ir.Constant(INT64, value)


def offset(builder: Any, at: Any, num_bytes: int) -> Any:
    """Emit an address plus so many bytes."""
    return builder.add(at, constant(num_bytes))


def broadcast(builder: Any, value: Any, vector: Any) -> Any:
    """Emit a scalar in every lane of a vector type."""
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, ir.Constant(INT32, 0)), undefined, ir.Constant(PAIRS, [0] * LANES)
    )


def shuffle(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    """Emit the lanes of x and then y, in this order."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, len(order)), order))


def emit_by_count(builder: Any, count: Any, most: int, emit_one: Callable[[int], None]) -> None:
    """Emit code for each number up to `most`, and the jump to that of `count`, which is one of them."""
    after = builder.append_basic_block()
    blocks = [builder.append_basic_block() for _ in range(most)]
    choice = builder.switch(count, blocks[-1])
    for number, block in enumerate(blocks, 1):
        choice.add_case(ir.Constant(count.type, number), block)
        builder.position_at_end(block)
        emit_one(number)
        builder.branch(after)
    builder.position_at_end(after)


def emit_products(
    builder: Any,
    num_pairs: Any,
    rows: list[Any],
    sums: list[list[Any]],
    columns_of: Callable[[Any, range], list[Any]],
) -> None:
    """Emit the addition of rows times columns to sums, over pairs of inputs.

    Args:
        rows: addresses of bf16 [2 * num_pairs].
        sums: of each row, addresses of Floats for each column.
        columns_of: emits the registers of pairs of the index-th pair of inputs: those of these columns.
    """
    columns = range(len(sums[0]))
    if HAS_AVX512:
        with in_registers(builder, sums) as totals, cgutils.for_range(builder, num_pairs) as loop:
            place = builder.mul(loop.index, constant(4))
            x_pairs = [broadcast(builder, load(builder, builder.add(row, place), INT32), PAIRS) for row in rows]
            _emit_pair(builder, x_pairs, columns_of(loop.index, columns), totals)
        return
    # Sixteen registers of half a column: few columns at a time, of a part that a first-level cache keeps meanwhile, and
    # rows as float32 beside it, so that broadcasts are loads.
    floats_at = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(FLOAT, 2 * NEAR_PAIRS * len(rows))), INT64)
    near = [offset(builder, floats_at, 8 * NEAR_PAIRS * row) for row in range(len(rows))]
    num_parts = builder.udiv(offset(builder, num_pairs, NEAR_PAIRS - 1), constant(NEAR_PAIRS))
    some = COLUMNS_AT_ONCE[len(rows)]
    with cgutils.for_range(builder, num_parts) as parts:
        first = builder.mul(parts.index, constant(NEAR_PAIRS))
        left = builder.sub(num_pairs, first)
        size = builder.select(builder.icmp_signed("<", left, constant(NEAR_PAIRS)), left, constant(NEAR_PAIRS))
        for row, target in zip(rows, near, strict=True):
            _emit_widened(builder, builder.add(row, builder.mul(first, constant(4))), size, target)
        for some_columns in (columns[start : start + some] for start in columns[::some]):
            of_columns = [[of_row[column] for column in some_columns] for of_row in sums]
            with in_registers(builder, of_columns) as totals, cgutils.for_range(builder, size) as loop:
                found = columns_of(builder.add(first, loop.index), some_columns)
                place = builder.mul(loop.index, constant(8))
                for half, widen in enumerate((_first_halves, _second_halves)):
                    at = [offset(builder, builder.add(row, place), 4 * half) for row in near]
                    numbers = [broadcast(builder, load(builder, each, FLOAT), FLOATS) for each in at]
                    _emit_each(builder, numbers, [widen(builder, each) for each in found], totals, _add_product)


def emit_integer_products(
    builder: Any,
    num_pairs: Any,
    rows: list[Any],
    sums: list[list[Any]],
    columns_of: Callable[[Any, range], list[Any]],
) -> None:
    """The same of int16: rows and columns, with sums that are int32."""
    columns = range(len(sums[0]))
    some = len(columns) if HAS_AVX512 else COLUMNS_AT_ONCE[len(rows)]
    for some_columns in (columns[start : start + some] for start in columns[::some]):
        of_columns = [[of_row[column] for column in some_columns] for of_row in sums]
        with in_registers(builder, of_columns, PAIRS) as totals, cgutils.for_range(builder, num_pairs) as loop:
            place = builder.mul(loop.index, constant(4))
            x_pairs = [broadcast(builder, load(builder, builder.add(row, place), INT32), PAIRS) for row in rows]
            _emit_each(builder, x_pairs, columns_of(loop.index, some_columns), totals, _add_integers)


def _add_integers(builder, total, x, y):
    """total + x[0] * y[0] + x[1] * y[1], of pairs of int16."""
    if HAS_VNNI:
        return call(builder, "llvm.x86.avx512.vpdpwssd.512", PAIRS, total, x, y)
    x, y = (builder.bitcast(each, HALVES) for each in (x, y))
    if HAS_AVX512:
        return builder.add(total, call(builder, "llvm.x86.avx512.pmaddw.d.512", PAIRS, x, y))

    def half(first):
        both = (shuffle(builder, each, each, list(range(first, first + LANES))) for each in (x, y))
        return call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(INT32, LANES // 2), *both)

    return builder.add(total, shuffle(builder, half(0), half(LANES), list(range(LANES))))


@contextmanager
def in_registers(builder, places, llvm_type=FLOATS):
    """Memory that LLVM keeps in registers, with what is at these addresses, to which it is written at the end."""
    registers = [[cgutils.alloca_once(builder, llvm_type) for _ in of_row] for of_row in places]
    cells = [cell for both in zip(registers, places, strict=True) for cell in zip(*both, strict=True)]
    for register, place in cells:
        builder.store(load(builder, place, llvm_type), register)
    yield registers
    for register, place in cells:
        store(builder, place, builder.load(register))


def _emit_pair(builder, x_pairs, columns, totals):
    if HAS_BF16:
        dot = "llvm.x86.avx512bf16.dpbf16ps.512"  # total + column[0] * pair[0] + column[1] * pair[1]
        columns, x_pairs = ([builder.bitcast(each, BFLOATS) for each in both] for both in (columns, x_pairs))
        _emit_each(builder, x_pairs, columns, totals, lambda _, total, *both: call(builder, dot, FLOATS, total, *both))
        return
    for half in (_first_halves, _second_halves):  # so that few registers are in use
        firsts, seconds = ([half(builder, each) for each in both] for both in (x_pairs, columns))
        _emit_each(builder, firsts, seconds, totals, _add_product)


def _add_product(builder, total, x, y):
    return multiply_add.emit(builder, x, y, total)


def _emit_widened(builder, source, num_pairs, target):
    """Store pairs of bf16 as float32."""
    step = LANES // 2
    with cgutils.for_range(builder, builder.udiv(num_pairs, constant(step))) as loop:
        numbers = load_widened.emit(builder, builder.add(source, builder.mul(loop.index, constant(4 * step))))
        store(builder, builder.add(target, builder.mul(loop.index, constant(8 * step))), numbers)
    whole = builder.and_(num_pairs, constant(-step))
    with cgutils.for_range(builder, builder.shl(builder.sub(num_pairs, whole), constant(1))) as loop:
        number = builder.add(builder.shl(whole, constant(1)), loop.index)
        value = widened.emit(builder, builder.add(source, builder.shl(number, constant(1))))
        store(builder, builder.add(target, builder.shl(number, constant(2))), value)


def _emit_each(builder, x_pairs, columns, sums, add):
    for pair, of_row in zip(x_pairs, sums, strict=True):
        for total, column in zip(of_row, columns, strict=True):
            builder.store(add(builder, builder.load(total), pair, column), total)


def _first_halves(builder, x):
    """Of pairs of bf16, the first of each as float32."""
    return builder.bitcast(builder.shl(x, ir.Constant(PAIRS, [16] * LANES)), FLOATS)


def _second_halves(builder, x):
    return builder.bitcast(builder.and_(x, ir.Constant(PAIRS, [-(1 << 16)] * LANES)), FLOATS)


@operation(floats)
def zeros(builder):
    """Sixteen zeros."""
    return ir.Constant(FLOATS, [0.0] * LANES)


@operation(floats, address)
def load_floats(builder, at):
    """float32 [16]."""
    return load(builder, at, FLOATS)


@operation(pairs, address)
def load_pairs(builder, at):
    """bf16 [32]."""
    return load(builder, at, PAIRS)


@operation(pairs, address)
def load_integers(builder, at):
    """int8 [32] as int16 [32]."""
    values = load(builder, at, ir.VectorType(ir.IntType(8), 2 * LANES))
    return builder.bitcast(builder.sext(values, HALVES), PAIRS)


@operation(floats, address)
def load_sums(builder, at):
    """int32 [16] as float32."""
    return builder.sitofp(load(builder, at, PAIRS), FLOATS)


@operation(floats, address)
def load_widened(builder, at):
    """bf16 [16] as float32."""
    halves = load(builder, at, ir.VectorType(ir.IntType(16), LANES))
    sixteen = ir.Constant(PAIRS, [16] * LANES)
    return builder.bitcast(builder.shl(builder.zext(halves, PAIRS), sixteen), FLOATS)


@operation(types.int64, address)
def load_integer(builder, at):
    """int64"""
    return load(builder, at, INT64)


@operation(types.voidptr, address)
def pointer(builder, at):
    """An address for carray."""
    return builder.inttoptr(at, ir.IntType(8).as_pointer())


@operation(nothing, address, floats)
def store_floats(builder, at, value):
    """float32 [16]."""
    store(builder, at, value)


@operation(nothing, address, pairs)
def store_pairs(builder, at, value):
    """bf16 [32]."""
    store(builder, at, value)


@operation(nothing, address, floats)
def store_rounded(builder, at, value):
    """Sixteen float32 as bf16 [16], to the nearest, ties to even."""
    if HAS_BF16:
        store(builder, at, builder.fptrunc(value, HALF_BFLOATS))
        return
    bits = builder.bitcast(value, PAIRS)

    def every(number):
        return ir.Constant(PAIRS, [number] * LANES)

    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    bits = builder.lshr(builder.add(builder.add(bits, every(0x7FFF)), odd), every(16))
    store(builder, at, builder.trunc(bits, ir.VectorType(ir.IntType(16), LANES)))


@operation(floats, types.float32)
def spread(builder, value):
    """A float32 in every lane."""
    return broadcast(builder, value, FLOATS)


@operation(floats, address)
def spread_float(builder, at):
    """A float32 at an address, in every lane."""
    return broadcast(builder, load(builder, at, FLOAT), FLOATS)


@operation(types.float32, address)
def widened(builder, at):
    """A bf16 as float32."""
    bits = builder.zext(load(builder, at, ir.IntType(16)), INT32)
    return builder.bitcast(builder.shl(bits, ir.Constant(INT32, 16)), FLOAT)


@operation(pairs, floats)
def rounded(builder, x):
    """To the nearest integer, ties to even, for numbers below 2 ** 22: added to ROUNDER, it lies in the low bits."""
    bits = builder.bitcast(builder.fadd(x, spread.emit(builder, ir.Constant(FLOAT, float(ROUNDER)))), PAIRS)
    return builder.sub(bits, ir.Constant(PAIRS, [int(ROUNDER.view(np.int32))] * LANES))


@operation(nothing, address, pairs)
def store_bytes(builder, at, x):
    """int32 [16] as int8 [16]."""
    store(builder, at, builder.trunc(x, ir.VectorType(ir.IntType(8), LANES)))


@operation(nothing, address, pairs)
def store_halves(builder, at, x):
    """int32 [16] as int16 [16]."""
    store(builder, at, builder.trunc(x, ir.VectorType(ir.IntType(16), LANES)))


@operation(floats, floats, floats, floats)
def multiply_add(builder, x, y, z):
    """x * y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, x, y, z)


@operation(floats, floats, floats, floats)
def multiply_subtract(builder, x, y, z):
    """x * y - z, rounded once."""
    return multiply_add.emit(builder, x, y, builder.fneg(z))


@operation(floats, floats, floats)
def larger(builder, x, y):
    """The larger of two, lane by lane; of a NaN and a number the second."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(floats, floats, floats)
def smaller(builder, x, y):
    """The smaller of two, lane by lane; of a NaN and a number the second."""
    return builder.select(builder.fcmp_ordered("<", x, y), x, y)


@operation(floats, floats)
def absolute(builder, x):
    """Without the signs."""
    return call(builder, "llvm.fabs.v16f32", FLOATS, x)


@operation(floats, floats, floats)
def add_exponents(builder, x, exponents):
    """x * 2 ** n, where it is a normal number. exponents: bits whose low 9 are n."""
    bits, exponents = (builder.bitcast(argument, PAIRS) for argument in (x, exponents))
    return builder.bitcast(builder.add(bits, builder.shl(exponents, ir.Constant(PAIRS, [23] * LANES))), FLOATS)


@operation(types.float32, floats)
def first_lane(builder, x):
    """The first of the sixteen."""
    return builder.extract_element(x, ir.Constant(INT32, 0))


@operation(types.float32, floats)
def total(builder, x):
    """Sum of the sixteen, in the order that is fastest."""
    width = LANES
    while width > 1:  # halves, one on the other
        width //= 2
        x = builder.fadd(shuffle(builder, x, x, [*range(width)]), shuffle(builder, x, x, [*range(width, 2 * width)]))
    return builder.extract_element(x, ir.Constant(INT32, 0))


@operation(floats, floats)
def spread_largest(builder, x):
    """The largest of the sixteen, in every lane."""
    for width in (8, 4, 2, 1):
        x = larger.emit(builder, x, shuffle(builder, x, x, [lane ^ width for lane in range(LANES)]))
    return x


def _replace_outside(builder: Any, numbers: Any, first: Any, end: Any, value: float) -> Any:
    lanes = ir.Constant(ir.VectorType(INT64, LANES), list(range(LANES)))
    first, end = (broadcast(builder, bound, lanes.type) for bound in (first, end))
    is_seen = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
    return builder.select(is_seen, numbers, ir.Constant(FLOATS, [value] * LANES))


@operation(floats, floats, types.int64, types.int64)
def hide_outside(builder, scores, first, end):
    """-inf in the lanes before `first` and from `end` on."""
    return _replace_outside(builder, scores, first, end, float("-inf"))


@operation(floats, floats, types.int64, types.int64)
def clear_outside(builder, shares, first, end):
    """0 in the lanes before `first` and from `end` on."""
    return _replace_outside(builder, shares, first, end, 0.0)


@operation(floats, floats)
def first_of_pairs(builder, x):
    """x[0], x[0], x[2], x[2], ..."""
    return shuffle(builder, x, x, [lane & ~1 for lane in range(LANES)])


@operation(floats, floats)
def second_of_pairs(builder, x):
    """x[1], x[1], x[3], x[3], ..."""
    return shuffle(builder, x, x, [lane | 1 for lane in range(LANES)])


@operation(floats, floats)
def rotated_pairs(builder, x):
    """-x[1], x[0], -x[3], x[2], ...: each pair, as a complex number, times i."""
    order = [lane + 1 + LANES if lane % 2 == 0 else lane - 1 for lane in range(LANES)]
    return shuffle(builder, x, builder.fneg(x), order)


@operation(nothing, address)
def prefetch(builder, at):
    """Prefetch a cache line, to the second level, without waiting; an unmapped address does no harm."""
    byte = builder.inttoptr(at, ir.IntType(8).as_pointer())
    is_read, second_level, is_data = (ir.Constant(INT32, value) for value in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, is_read, second_level, is_data)


@operation(types.int64, address)
def take_next(builder, at):
    """The int64 at address, which is then incremented, atomically: each number goes to one thread.

    A thread sees what the threads that took earlier numbers had written before they took them.
    """
    counter = builder.inttoptr(at, INT64.as_pointer())
    return builder.atomic_rmw("add", counter, constant(1), "acq_rel")


@intrinsic
def keep(typing_context, array):
    """Keep an array alive until here: numba frees it after its last use, and does not see uses of its address."""
    return types.void(array), lambda context, builder, signature, arguments: context.get_dummy_value()


@njit(cache=True)
def exp2_to_126(x):
    """2 ** x for x up to 126; below -126 as for -126, which rounds to nothing beside any other share."""
    x = larger(x, spread(-MOST_EXPONENT))
    whole = x + spread(ROUNDER)
    part = x - (whole - spread(ROUNDER))
    value = multiply_add(spread(EXP2[3]), part, spread(EXP2[2]))
    value = multiply_add(value, part, spread(EXP2[1]))
    value = multiply_add(value, part, spread(EXP2[0]))
    return add_exponents(multiply_add(value, part, spread(ONE)), whole)


@njit(cache=True)
def exp2(x):
    """2 ** x; beyond -126..126 as for those bounds."""
    return exp2_to_126(smaller(x, spread(MOST_EXPONENT)))
