"""LLVM instructions on registers of 64 bytes, which the kernels' intrinsics emit. Thread: any, at compile time.

numba's cache does not notice a change here: it looks only at the files of the functions that it compiles.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16
REGISTER_BYTES = 64

FLOATS = ir.VectorType(ir.FloatType(), LANES)
PAIRS = ir.VectorType(ir.IntType(32), LANES)
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_ALIGNMENT = 2  # bytes: of a bf16; nothing more is assumed


class _BFloat(ir.Type):
    """llvmlite has no bfloat."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)
HALF_BFLOATS = ir.VectorType(_BFloat(), LANES)


def load(builder: Any, address: Any, llvm_type: Any) -> Any:
    return builder.load(builder.inttoptr(address, llvm_type.as_pointer()), align=_ALIGNMENT)


def store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=_ALIGNMENT)


def spread(builder: Any, value: Any, vector: Any) -> Any:
    """A scalar in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def indexes(values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(values)), values)


def spread_constant(value: int) -> Any:
    return ir.Constant(PAIRS, [value] * LANES)


def spread_pair(builder: Any, address: Any) -> Any:
    """bf16 [2], in every lane."""
    return spread(builder, load(builder, address, ir.IntType(32)), PAIRS)


def add_products(builder: Any, sums: Any, x: Any, y: Any) -> Any:
    """sums + x[0] * y[0] + x[1] * y[1], lane by lane, of two registers of pairs."""
    x, y = builder.bitcast(x, BFLOATS), builder.bitcast(y, BFLOATS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, x, y)


def prefetch(builder: Any, address: Any) -> None:
    byte = builder.inttoptr(address, ir.IntType(8).as_pointer())
    is_read, nearest, is_data = (ir.Constant(ir.IntType(32), value) for value in (0, 2, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), byte, is_read, nearest, is_data)


def load_widened(builder: Any, address: Any) -> Any:
    """bf16 [16] as float32."""
    halves = load(builder, address, ir.VectorType(ir.IntType(16), LANES))
    return builder.bitcast(builder.shl(builder.zext(halves, PAIRS), spread_constant(16)), FLOATS)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, x, y, z)


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


def total(builder: Any, value: Any) -> Any:
    """Sum of the sixteen, in the order that is fastest."""
    width = LANES
    while width > 1:  # halves, one on the other
        width //= 2
        low, high = (indexes(list(range(start, start + width))) for start in (0, width))
        value = builder.fadd(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))
