"""Registers whose lanes change places: transposed, interleaved, folded. See vectors.py. Thread: any, at compile."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpu.cpu_kernels import emit
from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.vectors import floats, pairs


@intrinsic
def spread_largest(typing_context, x):
    """The largest of the sixteen, in every lane."""

    def generate(context, builder, signature, arguments):
        value = arguments[0]
        for width in (8, 4, 2, 1):
            other = _shuffled(builder, value, [lane ^ width for lane in range(LANES)])
            value = builder.select(builder.fcmp_ordered(">", value, other), value, other)
        return value

    return floats(floats), generate


@intrinsic
def transpose_pairs(typing_context, source, stride, target, target_stride):
    """Sixteen rows of 16 pairs to 16 registers, of which the i-th has all rows' i-th pairs; strides are bytes."""

    def generate(context, builder, signature, arguments):
        source, stride, target, target_stride = arguments
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
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


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


@intrinsic
def interleave_low(typing_context, x, y):
    """Of two rows of bf16 [32], the first sixteen numbers of each as pairs (x, y)."""
    return pairs(pairs, pairs), _interleaving(0)


@intrinsic
def interleave_high(typing_context, x, y):
    """Of two rows of bf16 [32], the last sixteen numbers of each as pairs (x, y)."""
    return pairs(pairs, pairs), _interleaving(LANES)


def _interleaving(first: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y = (builder.bitcast(argument, emit.HALVES) for argument in arguments)
        order = [index for lane in range(first, first + LANES) for index in (lane, lane + 2 * LANES)]
        return builder.bitcast(builder.shuffle_vector(x, y, emit.indexes(order)), emit.PAIRS)

    return generate


@intrinsic
def first_of_pairs(typing_context, x):
    """x[0], x[0], x[2], x[2], ..."""

    def generate(context, builder, signature, arguments):
        return _shuffled(builder, arguments[0], [lane & ~1 for lane in range(LANES)])

    return floats(floats), generate


@intrinsic
def second_of_pairs(typing_context, x):
    """x[1], x[1], x[3], x[3], ..."""

    def generate(context, builder, signature, arguments):
        return _shuffled(builder, arguments[0], [lane | 1 for lane in range(LANES)])

    return floats(floats), generate


@intrinsic
def turned_pairs(typing_context, x):
    """-x[1], x[0], -x[3], x[2], ...: each pair, as a complex number, times i."""

    def generate(context, builder, signature, arguments):
        negative = builder.fneg(arguments[0])
        order = [lane + 1 + LANES if lane % 2 == 0 else lane - 1 for lane in range(LANES)]
        return builder.shuffle_vector(arguments[0], negative, emit.indexes(order))

    return floats(floats), generate


def _shuffled(builder: Any, x: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, x, emit.indexes(order))
