"""What lies between a layer's products, each in one pass over its rows: kernels. Thread: any, without the GIL.

Numbers are computed as float32 and rounded to bf16 where torch's operators round. A piece of work is a token.
"""

import ctypes
import math

import numpy as np
from numba import cfunc, njit, types

from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.exponent import exp2
from gpu.cpu_kernels.shuffles import first_of_pairs, second_of_pairs, turned_pairs
from gpu.cpu_kernels.vectors import (
    add,
    divide,
    load_float,
    load_floats,
    load_integer,
    load_widened,
    multiply,
    multiply_add,
    spread,
    store_rounded,
    take_next,
    total,
    zeros,
)

ONE = np.float32(1)
MINUS_LOG2_E = np.float32(-math.log2(math.e))
# GELU's tanh approximation is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3)): arXiv:1606.08415, section 2
GELU_SLOPE = np.float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
GELU_CUBE = np.float32(0.044715)


class NormArguments(ctypes.Structure):
    """Of add_and_norm, in the order in which it reads. Addresses are of first elements."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("x", ctypes.c_int64),  # bf16 [tokens, width]
        ("added", ctypes.c_int64),  # as x; 0: nothing
        ("weight", ctypes.c_int64),  # [width]
        ("total", ctypes.c_int64),  # as x: x + scale * added; not written where nothing is added
        ("normed", ctypes.c_int64),  # as x
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("is_weight_float", ctypes.c_int64),  # 1: weight is float32, 0: bf16
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class RotateArguments(ctypes.Structure):
    """Of rotate_and_store, in the order in which it reads."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("qkv", ctypes.c_int64),  # bf16 [tokens, heads + 2 * kv_heads, head_dim]
        ("query", ctypes.c_int64),  # bf16 [tokens, heads, head_dim]
        ("keys", ctypes.c_int64),  # bf16 [slots, kv_heads, head_dim]
        ("values", ctypes.c_int64),
        ("slots", ctypes.c_int64),  # int64 [tokens]
        ("rotation", ctypes.c_int64),  # float32 [tokens, head_dim / 2, 2]; 0: nothing turns
        ("query_norm", ctypes.c_int64),  # [head_dim]; 0: there is no norm
        ("key_norm", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("is_weight_float", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class GateArguments(ctypes.Structure):
    """Of gate, in the order in which it reads."""

    _fields_ = (
        ("next_piece", ctypes.c_int64),  # 0
        ("gate_up", ctypes.c_int64),  # bf16 [tokens, 2 * width]
        ("out", ctypes.c_int64),  # bf16 [tokens, width]
        ("num_tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("is_gelu", ctypes.c_int64),
    )


@njit(cache=True)
def _load_weight(weight, index, is_float):
    if is_float:
        return load_floats(weight + 4 * index)
    return load_widened(weight + 2 * index)


@njit(cache=True)
def _norm(x, weight, is_float, width, eps, out):
    """RMSNorm of bf16 [width], which is a multiple of LANES; out may be x."""
    squares = zeros()
    for index in range(0, width, LANES):
        value = load_widened(x + 2 * index)
        squares = multiply_add(value, value, squares)
    by = spread(ONE / np.sqrt(total(squares) / np.float32(width) + eps))
    for index in range(0, width, LANES):
        value = multiply(load_widened(x + 2 * index), by)
        store_rounded(out + 2 * index, multiply(value, _load_weight(weight, index, is_float)))


@cfunc(types.void(types.int64), cache=True)
def add_and_norm(arguments):
    """Take tokens until none is left: any number of threads at once. arguments: the address of NormArguments."""
    x, added, weight = load_integer(arguments + 8), load_integer(arguments + 16), load_integer(arguments + 24)
    totals, normed = load_integer(arguments + 32), load_integer(arguments + 40)
    num_tokens, width = load_integer(arguments + 48), load_integer(arguments + 56)
    is_float, scale, eps = load_integer(arguments + 64), load_float(arguments + 72), load_float(arguments + 76)
    token = take_next(arguments)
    while token < num_tokens:
        offset = 2 * token * width
        row = x + offset
        if added:
            for index in range(0, width, LANES):
                value = multiply_add(
                    load_widened(added + offset + 2 * index), spread(scale), load_widened(row + 2 * index)
                )
                store_rounded(totals + offset + 2 * index, value)
            row = totals + offset
        _norm(row, weight, is_float, width, eps, normed + offset)
        token = take_next(arguments)


@njit(cache=True)
def _rotate(x, rotation, head_dim, out):
    """Pairs times the rotation's, as complex numbers; 0: as they are."""
    for index in range(0, head_dim, LANES):
        value = load_widened(x + 2 * index)
        if rotation:
            by = load_floats(rotation + 4 * index)
            value = multiply_add(value, first_of_pairs(by), multiply(turned_pairs(value), second_of_pairs(by)))
        store_rounded(out + 2 * index, value)


@njit(cache=True)
def _norm_and_rotate(x, weight, is_float, eps, rotation, num_heads, head_dim, out):
    for head in range(num_heads):
        source, target = x + 2 * head * head_dim, out + 2 * head * head_dim
        if weight:
            _norm(source, weight, is_float, head_dim, eps, target)
            source = target
        _rotate(source, rotation, head_dim, target)


@cfunc(types.void(types.int64), cache=True)
def rotate_and_store(arguments):
    """Take tokens until none is left: any number of threads at once. arguments: the address of RotateArguments."""
    qkv, query = load_integer(arguments + 8), load_integer(arguments + 16)
    keys, values, slots = load_integer(arguments + 24), load_integer(arguments + 32), load_integer(arguments + 40)
    rotations = load_integer(arguments + 48)
    query_norm, key_norm = load_integer(arguments + 56), load_integer(arguments + 64)
    num_tokens, num_heads = load_integer(arguments + 72), load_integer(arguments + 80)
    num_kv_heads, head_dim = load_integer(arguments + 88), load_integer(arguments + 96)
    is_float, eps = load_integer(arguments + 104), load_float(arguments + 112)
    query_width, kv_width = 2 * num_heads * head_dim, 2 * num_kv_heads * head_dim
    token = take_next(arguments)
    while token < num_tokens:
        source = qkv + token * (query_width + 2 * kv_width)
        slot = load_integer(slots + 8 * token) * kv_width
        rotation = rotations + 4 * token * head_dim if rotations else 0
        target = query + token * query_width
        _norm_and_rotate(source, query_norm, is_float, eps, rotation, num_heads, head_dim, target)
        source += query_width
        _norm_and_rotate(source, key_norm, is_float, eps, rotation, num_kv_heads, head_dim, keys + slot)
        _rotate(source + kv_width, 0, kv_width // 2, values + slot)
        token = take_next(arguments)


@njit(cache=True)
def _gated(gate, up, is_gelu):
    slope = multiply(gate, spread(MINUS_LOG2_E))
    if is_gelu:
        square = multiply(gate, gate)
        slope = multiply(multiply(gate, multiply_add(square, spread(GELU_CUBE), spread(ONE))), spread(GELU_SLOPE))
    return multiply(divide(gate, add(spread(ONE), exp2(slope))), up)


@cfunc(types.void(types.int64), cache=True)
def gate(arguments):
    """SiLU or GELU of the gate, times up. Take tokens until none is left: any number of threads at once.

    arguments: the address of GateArguments.
    """
    gate_up, out = load_integer(arguments + 8), load_integer(arguments + 16)
    num_tokens, width = load_integer(arguments + 24), load_integer(arguments + 32)
    is_gelu = load_integer(arguments + 40)
    token = take_next(arguments)
    while token < num_tokens:
        row, target = gate_up + 4 * token * width, out + 2 * token * width
        for index in range(0, width, LANES):
            value = _gated(load_widened(row + 2 * index), load_widened(row + 2 * (width + index)), is_gelu)
            store_rounded(target + 2 * index, value)
        token = take_next(arguments)
