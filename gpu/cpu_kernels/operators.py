"""numba's kernels for what lies between a layer's matmuls (norms, RoPE, gates), for bf16 on a CPU. Thread: engine.

Each takes one pass over its rows: numbers are computed as float32 and rounded to bf16 where torch's operators round. A
piece of work is a token. Three times as fast as torch's operators with the shapes of a 0.5B model, on a Zen 5 core.
"""

import ctypes
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import BLOCK_SIZE, ModelConfig, RecurrentConfig
from gpu.cpu_kernels.attention import PagedAttention
from gpu.cpu_kernels.compiled import carray, kernel, njit
from gpu.cpu_kernels.matmul import PackedMatmul, multiply_rows
from gpu.cpu_kernels.recorded import RecordedLayers
from gpu.cpu_kernels.team import Kernel, integers
from gpu.cpu_kernels.vectors import (
    LANES,
    exp2,
    first_lane,
    first_of_pairs,
    keep,
    larger,
    load_floats,
    load_integer,
    load_widened,
    multiply_add,
    pointer,
    rotated_pairs,
    rounded,
    second_of_pairs,
    spread,
    spread_largest,
    store_bytes,
    store_rounded,
    take_next,
    total,
    zeros,
)
from gpu.device import cpu_flags
from gpu.kv_cache import INT8, SCALE_BYTES, LayerKV
from gpu.layers import Gated
from gpu.linear import BLOCK_OUTPUTS, Embed, Linear, PackedRows, can_gather, in_blocks
from gpu.operators import HeadNorms, Operators
from gpu.parameters import RecurrentWeights
from gpu.quant import Weight
from gpu.recurrence import Recurrence

if TYPE_CHECKING:
    from gpu.cpu_kernels.low_rank import LowRankKernel

GATES = {"silu": 0, "gelu_pytorch_tanh": 1}  # is_gelu
# A thread is woken for so many numbers: they take a core about as long as waking one.
NUMBERS_PER_THREAD = 1 << 16
ONE, MOST = np.float32(1), np.float32(127)
MINUS_LOG2_E = np.float32(-math.log2(math.e))
# GELU's tanh approximation is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3)): arXiv:1606.08415, section 2
GELU_SLOPE = np.float32(-2 * math.sqrt(2 / math.pi) * math.log2(math.e))
GELU_CUBE = np.float32(0.044715)


class NormArguments(ctypes.Structure):
    """Of add_and_norm. Addresses are of first elements."""

    _fields_ = (
        *integers(
            "next_piece",  # 0
            "x",  # bf16 [tokens, width]
            "added",  # as x; 0: nothing
            "weight",  # [width]; 0: the sum alone
            "total",  # as x: x + scale * added; not written where nothing is added
            "normed",  # as x
            "num_tokens",
            "width",
            "is_weight_float",  # 1: weight is float32, 0: bf16
        ),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class RotateArguments(ctypes.Structure):
    """Of rotate_and_store."""

    _fields_ = (
        *integers(
            "next_piece",  # 0
            "qkv",  # bf16 [tokens, heads + 2 * kv_heads, head_dim]
            "query",  # bf16 [tokens, heads, head_dim]
            "keys",  # bf16 [slots, kv_heads, head_dim], or see BlockwiseKV
            "values",
            "is_paired",
            "is_int8",
            "slots",  # int64 [tokens]
            "rotation",  # float32 [tokens, head_dim / 2, 2]; 0: no RoPE
            "query_norm",  # [head_dim]; 0: no norm
            "key_norm",
            "num_tokens",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "is_weight_float",
        ),
        ("eps", ctypes.c_float),
    )


class GateArguments(ctypes.Structure):
    """Of gate."""

    _fields_ = integers(
        "next_piece",  # 0
        "gate_up",  # bf16 [tokens, 2 * width]
        "out",  # bf16 [tokens, width]
        "num_tokens",
        "width",
        "is_gelu",
    )


_NORM, _ROTATE, _GATE = np.dtype(NormArguments), np.dtype(RotateArguments), np.dtype(GateArguments)


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
        store_rounded(out + 2 * index, load_widened(x + 2 * index) * by * _load_weight(weight, index, is_float))


@kernel()
def add_and_norm(arguments):
    """Take tokens until none is left: any number of threads at once. arguments: the address of NormArguments."""
    args = carray(pointer(arguments), 1, _NORM)[0]
    width, token = args.width, take_next(arguments)
    while token < args.num_tokens:
        offset = 2 * token * width
        row = args.x + offset
        if args.added:
            scale = spread(args.scale)
            for at in range(offset, offset + 2 * width, 2 * LANES):
                value = multiply_add(load_widened(args.added + at), scale, load_widened(args.x + at))
                store_rounded(args.total + at, value)
            row = args.total + offset
        if args.weight:
            _norm(row, args.weight, args.is_weight_float, width, args.eps, args.normed + offset)
        token = take_next(arguments)


@njit(cache=True)
def _rotate(x, rotation, head_dim, out):
    """Pairs times the rotation's, as complex numbers; rotation 0: copied."""
    for index in range(0, head_dim, LANES):
        value = load_widened(x + 2 * index)
        if rotation:
            by = load_floats(rotation + 4 * index)
            value = multiply_add(value, first_of_pairs(by), rotated_pairs(value) * second_of_pairs(by))
        store_rounded(out + 2 * index, value)


@njit(cache=True)
def _norm_and_rotate(x, weight, is_float, eps, rotation, num_heads, head_dim, out):
    for head in range(num_heads):
        source, target = x + 2 * head * head_dim, out + 2 * head * head_dim
        if weight:
            _norm(source, weight, is_float, head_dim, eps, target)
            source = target
        _rotate(source, rotation, head_dim, target)


@njit(cache=True)
def _store_integers(source, num_heads, head_dim, spare, into, slot, is_key):
    """A token's heads in 8 bits: see BlockwiseKV. source: bf16 [num_heads, head_dim]; spare: room for a head."""
    head_bytes, place = BLOCK_SIZE * (head_dim + SCALE_BYTES), slot % BLOCK_SIZE
    for head in range(num_heads):
        numbers, most, check = source + 2 * head * head_dim, zeros(), zeros()
        for index in range(0, head_dim, LANES):
            value = load_widened(numbers + 2 * index)
            most, check = larger(most, larger(value, zeros() - value)), check + value * zeros()
        largest = first_lane(spread_largest(most))
        by = spread(MOST / largest if largest > 0 else np.float32(0))
        for index in range(0, head_dim, LANES):
            store_bytes(spare + index, rounded(load_widened(numbers + 2 * index) * by))
        at = into + (slot // BLOCK_SIZE * num_heads + head) * head_bytes
        if is_key:
            _scatter(_halves(spare, head_dim // 2), _halves(at + 2 * place, BLOCK_SIZE * head_dim // 2), BLOCK_SIZE)
        else:
            start = at + place // 2 * 2 * head_dim + place % 2
            _scatter(_bytes(spare, head_dim), _bytes(start, 2 * head_dim), 2)
        scales = carray(pointer(at + head_dim * BLOCK_SIZE), BLOCK_SIZE, np.float32)
        scales[place] = largest / MOST + total(check)  # not finite where a number is not


@njit(cache=True)
def _store_pairs(source, num_heads, head_dim, into, slot, is_key):
    """A token's heads: see BlockwiseKV. source: bf16 [num_heads, head_dim]."""
    head_bytes, place = 2 * BLOCK_SIZE * head_dim, slot % BLOCK_SIZE
    for head in range(num_heads):
        numbers, at = source + 2 * head * head_dim, into + (slot // BLOCK_SIZE * num_heads + head) * head_bytes
        if is_key:
            found = carray(pointer(numbers), head_dim // 2, np.int32)
            _scatter(found, carray(pointer(at + 4 * place), BLOCK_SIZE * head_dim // 2, np.int32), BLOCK_SIZE)
        else:
            start = at + place // 2 * 4 * head_dim + place % 2 * 2
            _scatter(_halves(numbers, head_dim), _halves(start, 2 * head_dim), 2)


@njit(cache=True)
def _halves(at, count):
    return carray(pointer(at), count, np.int16)


@njit(cache=True)
def _bytes(at, count):
    return carray(pointer(at), count, np.int8)


@njit(cache=True)
def _scatter(numbers, into, step):
    for index in range(len(numbers)):
        into[index * step] = numbers[index]


@kernel()
def rotate_and_store(arguments):
    """Take tokens until none is left: any number of threads at once. arguments: the address of RotateArguments."""
    args = carray(pointer(arguments), 1, _ROTATE)[0]
    head_dim, is_float, eps = args.head_dim, args.is_weight_float, args.eps
    query_width, kv_width = 2 * args.num_heads * head_dim, 2 * args.num_kv_heads * head_dim
    memory = np.empty(kv_width + head_dim, dtype=np.uint8)
    rotated = memory.ctypes.data
    token = take_next(arguments)
    while token < args.num_tokens:
        source = args.qkv + token * (query_width + 2 * kv_width)
        slot = load_integer(args.slots + 8 * token)
        rotation = args.rotation + 4 * token * head_dim if args.rotation else 0
        target = args.query + token * query_width
        _norm_and_rotate(source, args.query_norm, is_float, eps, rotation, args.num_heads, head_dim, target)
        source += query_width
        target = rotated if args.is_paired else args.keys + slot * kv_width
        _norm_and_rotate(source, args.key_norm, is_float, eps, rotation, args.num_kv_heads, head_dim, target)
        values = source + kv_width
        if args.is_int8:
            spare = rotated + kv_width
            _store_integers(rotated, args.num_kv_heads, head_dim, spare, args.keys, slot, True)
            _store_integers(values, args.num_kv_heads, head_dim, spare, args.values, slot, False)
        elif args.is_paired:
            _store_pairs(rotated, args.num_kv_heads, head_dim, args.keys, slot, True)
            _store_pairs(values, args.num_kv_heads, head_dim, args.values, slot, False)
        else:
            _rotate(values, 0, kv_width // 2, args.values + slot * kv_width)
        token = take_next(arguments)
    keep(memory)


@njit(cache=True)
def _gated(gate, up, is_gelu):
    slope = gate * spread(MINUS_LOG2_E)
    if is_gelu:
        slope = gate * multiply_add(gate * gate, spread(GELU_CUBE), spread(ONE)) * spread(GELU_SLOPE)
    return gate / (spread(ONE) + exp2(slope)) * up


@kernel()
def gate(arguments):
    """SiLU or GELU of the gate, times up. Take tokens until none is left: any number of threads at once.

    arguments: the address of GateArguments.
    """
    args = carray(pointer(arguments), 1, _GATE)[0]
    width, token = args.width, take_next(arguments)
    while token < args.num_tokens:
        row, target = args.gate_up + 4 * token * width, args.out + 2 * token * width
        for at in range(0, 2 * width, 2 * LANES):
            store_rounded(target + at, _gated(load_widened(row + at), load_widened(row + 2 * width + at), args.is_gelu))
        token = take_next(arguments)


class KernelOperators(Operators):
    """Kernels where their shapes allow it. One row of wider ones is contiguous, several are not: that decides nothing.

    Args:
        has_attention: the attention kernel supports the model; False: torch attends.
    """

    def __init__(self, config: ModelConfig, has_attention: bool) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"), config.rms_norm_eps)
        if has_attention:
            self.attention = attention = PagedAttention()
            self.few_layers = RecordedLayers(attention)
        self._has_attention = has_attention
        self._multiply = Kernel(multiply_rows)
        self._norm, self._rotate, self._gate = Kernel(add_and_norm), Kernel(rotate_and_store), Kernel(gate)

    def pairs_kv(self, dtype: torch.dtype) -> bool:
        return self._has_attention or dtype == INT8

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if not isinstance(weight, Tensor) or not self._multiplies(weight):
            return super().linear(weight, bias)
        return self._matmul(_padded_blocks(weight), bias, weight.shape)

    def tied(self, embedding: Tensor) -> tuple[Embed, Linear]:
        if not self._multiplies(embedding) or embedding.shape[1] % BLOCK_OUTPUTS:
            return super().tied(embedding)
        blocks = _padded_blocks(embedding)
        return PackedRows(blocks), self._matmul(blocks, None, embedding.shape)

    def _multiplies(self, weight: Tensor) -> bool:
        """Not with AMX, which the kernel does not use, nor what blocks do not divide and oneDNN multiplies in bf16."""
        is_served = can_gather(weight.shape) or not self._is_packed
        return "amx_bf16" not in cpu_flags() and weight.dtype == torch.bfloat16 and is_served

    def _matmul(self, blocks: Tensor, bias: Tensor | None, shape: torch.Size) -> Linear:
        """shape: of the matrix that was padded."""
        if can_gather(shape):
            return PackedMatmul(self._multiply, blocks, bias)
        missing_out, missing_in = (-size % BLOCK_OUTPUTS for size in shape)
        padded = PackedMatmul(self._multiply, blocks, None if bias is None else F.pad(bias, (0, missing_out)))
        return lambda x: padded(F.pad(x, (0, missing_in)))[:, : shape[0]].contiguous()

    def recurrence(self, config: RecurrentConfig, weights: RecurrentWeights) -> Recurrence:
        from gpu.cpu_kernels.recurrence import KINDS, can_compute  # compiles for seconds, once

        if not can_compute(config):
            return super().recurrence(config, weights)
        return KINDS[config.kind](config, weights)

    def low_rank(self) -> "LowRankKernel":
        from gpu.cpu_kernels.low_rank import LowRankKernel  # compiles for seconds, once

        return LowRankKernel()

    def gated(self, activation: str) -> Gated:
        if activation not in GATES:
            return super().gated(activation)
        return partial(self._gated, activation)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() != 2 or not _is_supported(x, weight):
            return super().norm(x, weight)
        return self._add_norm(x.contiguous(), None, 1.0, weight)[1]

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if not _is_supported(x, weight):
            return super().add_norm(x, added, scale, weight)
        return self._add_norm(x.contiguous(), added.contiguous(), scale, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        num_tokens, num_all, head_dim = qkv.shape
        if head_dim % LANES or (norms is not None and norms[0].dim() != 1):
            return super().rotate_and_store(qkv, norms, rotation, kv, slots)
        qkv = qkv.contiguous()
        num_kv_heads = kv.keys.shape[1]
        num_heads = num_all - 2 * num_kv_heads
        query = qkv.new_empty((num_tokens, num_heads, head_dim))
        query_norm, key_norm = norms or (None, None)
        arguments = RotateArguments(
            qkv=qkv.data_ptr(),
            query=query.data_ptr(),
            keys=kv.keys.data_ptr(),
            values=kv.values.data_ptr(),
            is_paired=kv.is_paired,
            is_int8=kv.is_int8,
            slots=slots.data_ptr(),
            rotation=0 if rotation is None else rotation.data_ptr(),
            query_norm=0 if query_norm is None else query_norm.data_ptr(),
            key_norm=0 if key_norm is None else key_norm.data_ptr(),
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            is_weight_float=query_norm is not None and query_norm.dtype == torch.float32,
            eps=self._eps,
        )
        self._rotate(arguments, _threads_for(qkv.numel()))
        return query

    def _gated(self, activation: str, gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        if width % LANES:
            return super().gated(activation)(gate_up)
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty((num_tokens, width))
        arguments = GateArguments(
            gate_up=gate_up.data_ptr(),
            out=out.data_ptr(),
            num_tokens=num_tokens,
            width=width,
            is_gelu=GATES[activation],
        )
        self._gate(arguments, _threads_for(gate_up.numel()))
        return out

    def _add_norm(self, x: Tensor, added: Tensor | None, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        total = x if added is None else torch.empty_like(x)
        normed = total if weight is None else torch.empty_like(x)
        arguments = NormArguments(
            x=x.data_ptr(),
            added=0 if added is None else added.data_ptr(),
            weight=0 if weight is None else weight.data_ptr(),
            total=total.data_ptr(),
            normed=normed.data_ptr(),
            num_tokens=x.shape[0],
            width=x.shape[1],
            is_weight_float=weight is not None and weight.dtype == torch.float32,
            scale=scale,
            eps=self._eps,
        )
        self._norm(arguments, _threads_for(x.numel()))
        return total, normed


def _padded_blocks(weight: Tensor) -> Tensor:
    missing_out, missing_in = (-size % BLOCK_OUTPUTS for size in weight.shape)
    return in_blocks(F.pad(weight, (0, missing_in, 0, missing_out)))


def _is_supported(x: Tensor, weight: Tensor | None) -> bool:
    return (weight is None or weight.dim() == 1) and x.shape[-1] % LANES == 0


def _threads_for(num_numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), num_numbers // NUMBERS_PER_THREAD))
