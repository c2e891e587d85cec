"""numba's kernels for what lies between a layer's matmuls (norms, RoPE, gates), for bf16 on a CPU.

Norms, RoPE with the writing of keys and values, and gates take one pass over their rows each: numbers are computed as
float32 and rounded to bf16 where torch's operators round. A piece of work is a token. Kernels: any thread, without the
GIL; classes: engine.
"""

import ctypes
import math
from functools import partial

import numpy as np
import torch
from numba import cfunc, njit, types
from torch import Tensor

from core.config import ModelConfig
from gpu.cpu_kernels.attention import PagedAttention
from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.matmul import PackedMatmuls
from gpu.cpu_kernels.team import Kernel
from gpu.cpu_kernels.vectors import (
    add,
    divide,
    exp2,
    first_of_pairs,
    load_float,
    load_floats,
    load_integer,
    load_widened,
    multiply,
    multiply_add,
    second_of_pairs,
    spread,
    store_rounded,
    take_next,
    total,
    turned_pairs,
    zeros,
)
from gpu.kv_cache import LayerKV
from gpu.layers import Gated
from gpu.linear import Linear, keeps_rows
from gpu.operators import HeadNorms, Operators
from gpu.quant import QuantizedWeight

GATES = {"silu": 0, "gelu_pytorch_tanh": 1}  # is_gelu
# A second thread is woken for so many numbers: they take a core about as long as waking one.
NUMBERS_PER_THREAD = 1 << 16
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


class KernelOperators(Operators):
    """Not for two threads at once: the kernels' arguments are its own.

    Args:
        has_attention: its kernel knows the model; False: torch attends.
    """

    def __init__(self, config: ModelConfig, has_attention: bool) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"), config.rms_norm_eps)
        if has_attention:
            self.attention = PagedAttention()
        self._make_matmul = PackedMatmuls()
        self._norm, self._norm_arguments = Kernel(add_and_norm), NormArguments(eps=config.rms_norm_eps)
        self._rotate, self._rotate_arguments = Kernel(rotate_and_store), RotateArguments(eps=config.rms_norm_eps)
        self._gate, self._gate_arguments = Kernel(gate), GateArguments()

    def packed_linear(self, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
        """By AMX, which oneDNN knows and the kernel does not, it serves: rows come in panels there (gpu/linear.py)."""
        return self._make_matmul(packed, weight, bias) if keeps_rows() else super().packed_linear(packed, weight, bias)

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        from gpu.cpu_kernels.quantized_matmul import can_multiply, make_quantized_matmul  # compiles for seconds, once

        return make_quantized_matmul(weight, bias) if can_multiply(weight) else super().quantized_linear(weight, bias)

    def gated(self, activation: str) -> Gated:
        if activation not in GATES:
            return super().gated(activation)
        return partial(self._gated, activation)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() != 2 or not _is_known(x, weight):
            return super().norm(x, weight)
        return self._add_norm(x, None, 1.0, weight)[1]

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight is None or not _is_known(x, weight) or not added.is_contiguous():
            return super().add_norm(x, added, scale, weight)
        return self._add_norm(x, added, scale, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        num_tokens, num_all, head_dim = qkv.shape
        is_known = head_dim % LANES == 0 and qkv.is_contiguous()
        if not is_known or (norms is not None and norms[0].dim() != 1):
            return super().rotate_and_store(qkv, norms, rotation, kv, slots)
        num_kv_heads = kv.keys.shape[1]
        num_heads = num_all - 2 * num_kv_heads
        query = qkv.new_empty((num_tokens, num_heads, head_dim))
        told = self._rotate_arguments
        told.next_piece, told.num_tokens = 0, num_tokens
        told.qkv, told.query, told.slots = qkv.data_ptr(), query.data_ptr(), slots.data_ptr()
        told.keys, told.values = kv.keys.data_ptr(), kv.values.data_ptr()
        told.rotation = 0 if rotation is None else rotation.data_ptr()
        told.query_norm = told.key_norm = 0
        if norms is not None:
            told.query_norm, told.key_norm = norms[0].data_ptr(), norms[1].data_ptr()
            told.is_weight_float = norms[0].dtype == torch.float32
        told.num_heads, told.num_kv_heads, told.head_dim = num_heads, num_kv_heads, head_dim
        self._rotate(told, _threads_for(qkv.numel()))
        return query

    def _gated(self, activation: str, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % LANES or not gate_up.is_contiguous():
            return super().gated(activation)(gate_up)
        out = gate_up.new_empty((num_tokens, width))
        told = self._gate_arguments
        told.next_piece, told.num_tokens, told.width, told.is_gelu = 0, num_tokens, width, GATES[activation]
        told.gate_up, told.out = gate_up.data_ptr(), out.data_ptr()
        self._gate(told, _threads_for(gate_up.numel()))
        return out

    def _add_norm(self, x: Tensor, added: Tensor | None, scale: float, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed = torch.empty_like(x)
        total = x if added is None else torch.empty_like(x)
        told = self._norm_arguments
        told.next_piece, told.num_tokens, told.width = 0, x.shape[0], x.shape[1]
        told.x, told.added = x.data_ptr(), 0 if added is None else added.data_ptr()
        told.total, told.normed = total.data_ptr(), normed.data_ptr()
        told.weight, told.is_weight_float = weight.data_ptr(), weight.dtype == torch.float32
        told.scale = scale
        self._norm(told, _threads_for(x.numel()))
        return total, normed


def _is_known(x: Tensor, weight: Tensor) -> bool:
    return x.is_contiguous() and weight.dim() == 1 and x.shape[-1] % LANES == 0


def _threads_for(num_numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), num_numbers // NUMBERS_PER_THREAD))
