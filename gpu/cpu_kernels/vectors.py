"""Registers of 64 bytes as numba values: 16 float32 (`Floats`), or 16 pairs of bf16 (`Pairs`), one in each 32 bits.

Addresses are integers. What is here compiles to an instruction or few; only avx512_bf16 has the dot product.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import LANES


class Floats(types.Type):
    def __init__(self) -> None:
        super().__init__("Floats")


class Pairs(types.Type):
    def __init__(self) -> None:
        super().__init__("Pairs")


floats, pairs = Floats(), Pairs()


@register_model(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, emit.FLOATS)


@register_model(Pairs)
class _PairsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, emit.PAIRS)


@intrinsic
def zeros(typing_context):
    """Sixteen zeros."""
    return floats(), lambda context, builder, signature, arguments: ir.Constant(emit.FLOATS, [0.0] * LANES)


@intrinsic
def load_floats(typing_context, address):
    """float32 [16]."""
    return floats(types.int64), lambda context, builder, signature, arguments: emit.load(
        builder, arguments[0], emit.FLOATS
    )


@intrinsic
def load_pairs(typing_context, address):
    """bf16 [32]."""
    return pairs(types.int64), lambda context, builder, signature, arguments: emit.load(
        builder, arguments[0], emit.PAIRS
    )


@intrinsic
def load_integer(typing_context, address):
    """int64"""

    def generate(context, builder, signature, arguments):
        return emit.load(builder, arguments[0], ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def pointer(typing_context, address):
    """An address for carray."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def store_integer(typing_context, address, value):
    """int64"""

    def generate(context, builder, signature, arguments):
        emit.store(builder, *arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_float(typing_context, address):
    """float32"""

    def generate(context, builder, signature, arguments):
        return emit.load(builder, arguments[0], ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def spread_pair(typing_context, address):
    """bf16 [2], in every lane."""

    def generate(context, builder, signature, arguments):
        return emit.spread_pair(builder, arguments[0])

    return pairs(types.int64), generate


@intrinsic
def spread(typing_context, value):
    """A float32 in every lane."""

    def generate(context, builder, signature, arguments):
        return emit.spread(builder, arguments[0], emit.FLOATS)

    return floats(types.float32), generate


@intrinsic
def load_widened(typing_context, address):
    """bf16 [16] as float32."""
    return floats(types.int64), lambda context, builder, signature, arguments: emit.load_widened(builder, *arguments)


@intrinsic
def store_floats(typing_context, address, value):
    """float32 [16]."""

    def generate(context, builder, signature, arguments):
        emit.store(builder, arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, floats), generate


@intrinsic
def store_pairs(typing_context, address, value):
    """bf16 [32]."""

    def generate(context, builder, signature, arguments):
        emit.store(builder, arguments[0], arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, pairs), generate


@intrinsic
def store_rounded(typing_context, address, value):
    """Sixteen float32 as bf16 [16], to the nearest, ties to even."""

    def generate(context, builder, signature, arguments):
        emit.store(builder, arguments[0], builder.fptrunc(arguments[1], emit.HALF_BFLOATS))
        return context.get_dummy_value()

    return types.void(types.int64, floats), generate


@intrinsic
def add_products(typing_context, sums, x, y):
    """sums + x[0] * y[0] + x[1] * y[1], lane by lane, of two registers of pairs."""

    def generate(context, builder, signature, arguments):
        return emit.add_products(builder, *arguments)

    return floats(floats, pairs, pairs), generate


@intrinsic
def multiply_add(typing_context, x, y, z):
    """x * y + z, rounded once."""
    return floats(floats, floats, floats), lambda context, builder, signature, arguments: emit.multiply_add(
        builder, *arguments
    )


@intrinsic
def multiply_subtract(typing_context, x, y, z):
    """x * y - z, rounded once."""

    def generate(context, builder, signature, arguments):
        x, y, z = arguments
        return emit.multiply_add(builder, x, y, builder.fneg(z))

    return floats(floats, floats, floats), generate


@intrinsic
def add(typing_context, x, y):
    """x + y"""
    return floats(floats, floats), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def subtract(typing_context, x, y):
    """x - y"""
    return floats(floats, floats), lambda context, builder, signature, arguments: builder.fsub(*arguments)


@intrinsic
def multiply(typing_context, x, y):
    """x * y"""
    return floats(floats, floats), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def divide(typing_context, x, y):
    """x / y"""
    return floats(floats, floats), lambda context, builder, signature, arguments: builder.fdiv(*arguments)


@intrinsic
def larger(typing_context, x, y):
    """The larger of two, lane by lane; of a NaN and a number the second."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return floats(floats, floats), generate


@intrinsic
def smaller(typing_context, x, y):
    """The smaller of two, lane by lane; of a NaN and a number the second."""

    def generate(context, builder, signature, arguments):
        x, y = arguments
        return builder.select(builder.fcmp_ordered("<", x, y), x, y)

    return floats(floats, floats), generate


@intrinsic
def add_exponents(typing_context, x, exponents):
    """x * 2 ** n, where it is a normal number. exponents: bits whose low 9 are n."""

    def generate(context, builder, signature, arguments):
        bits, exponents = (builder.bitcast(argument, emit.PAIRS) for argument in arguments)
        return builder.bitcast(builder.add(bits, builder.shl(exponents, emit.spread_constant(23))), emit.FLOATS)

    return floats(floats, floats), generate


@intrinsic
def first_lane(typing_context, x):
    """Of the sixteen."""

    def generate(context, builder, signature, arguments):
        return builder.extract_element(arguments[0], ir.Constant(ir.IntType(32), 0))

    return types.float32(floats), generate


@intrinsic
def total(typing_context, x):
    """Of the sixteen, in the order that is fastest."""
    return types.float32(floats), lambda context, builder, signature, arguments: emit.total(builder, *arguments)


def _replacing(value: float) -> Any:
    """The lanes before `first` and from `end` on by a value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, first, end = arguments
        lanes = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
        first, end = (emit.spread(builder, bound, lanes.type) for bound in (first, end))
        is_seen = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, end))
        return builder.select(is_seen, numbers, ir.Constant(emit.FLOATS, [value] * LANES))

    return generate


@intrinsic
def hide_outside(typing_context, scores, first, end):
    """-inf in the lanes before `first` and from `end` on."""
    return floats(floats, types.int64, types.int64), _replacing(float("-inf"))


@intrinsic
def clear_outside(typing_context, shares, first, end):
    """0 in the lanes before `first` and from `end` on."""
    return floats(floats, types.int64, types.int64), _replacing(0.0)


@intrinsic
def keep(typing_context, array):
    """Hold an array until here: numba frees it after its last use, and does not see what is done at its address."""
    return types.void(array), lambda context, builder, signature, arguments: context.get_dummy_value()


@intrinsic
def prefetch(typing_context, address):
    """Ask for a cache line, and wait for nothing; an address that is not there does no harm."""

    def generate(context, builder, signature, arguments):
        emit.prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def take_next(typing_context, address):
    """The int64 at address, and one more left there: whichever thread asks, each number is given once.

    Who is given a number sees what those before it had written when they asked.
    """

    def generate(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(types.int64), generate
