"""Triton's kernels between a layer's matmuls (norms, RoPE, gates) on a CUDA device, and TritonOperators. Thread:
engine.

Each takes one pass over its rows. Numbers are computed as float32 and rounded where torch's operators round. Rows are
of any width: a block is the next power of two, and what is beyond a row is masked. A row is summed in one order
whatever the other rows are. Addresses of rows are int64: a cache of keys has more than 2 ** 31 numbers. What the
kernels do not support (rows that are not contiguous, formats that differ) torch computes, call by call.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.config import BLOCK_SIZE, ExpertsConfig, ModelConfig
from gpu.attention import AttentionKernels
from gpu.blocks import BlockWeight
from gpu.kernels.matmul import BlockRows, DecodedMatmul, GroupedExperts, Matmul, can_group, can_multiply, stored_as
from gpu.kernels.rows import DeviceRows, embed_rows
from gpu.kernels.sizes import COLUMN_WARPS, COLUMNS, HEAD_WARPS, heads_at_once, next_power_of_two, row_warps
from gpu.kv_cache import LayerKV
from gpu.layers import SWIGLU_LIMIT, SWIGLU_SLOPE, Block, Gated
from gpu.linear import Embed, Linear, MatmulChoices, make_linear
from gpu.operators import HeadNorms, Operators, not_deterministic
from gpu.parameters import ExpertWeights
from gpu.quant import QuantizedWeight, SlabLinear, Weight, floats

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
CLAMPED_SWIGLU = tl.constexpr(2)
# GELU's tanh approximation is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x ** 3)): arXiv:1606.08415, section 2
GELU_SLOPE = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)
MOST_INTEGER = tl.constexpr(127.0)
LEAST_MOST = tl.constexpr(3.8e-37)  # of a head: the inverse of what is smaller is not finite
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # added, it rounds to an integer, ties to even
BLOCK_TOKENS = tl.constexpr(BLOCK_SIZE)
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}  # as above


@triton.jit
def add_and_norm(
    x,  # [rows, width]
    added,  # as x; read where HAS_ADDED
    weight,  # [width]
    total,  # as x: x + scale * added; written where HAS_ADDED
    normed,  # as x: written where HAS_NORM
    width,
    scale,
    eps,
    HAS_ADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,  # >= width
):
    """RMSNorm of a row, or of its sum with another. Program: a row. Source: arXiv:1910.07467, equation 4."""
    columns = tl.arange(0, BLOCK)
    is_inside = columns < width
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + row + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += scale * tl.load(added + row + columns, mask=is_inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + columns, rounded, mask=is_inside)
        value = rounded.to(tl.float32)
    if HAS_NORM:
        by = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        value = value * by * tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(normed + row + columns, value.to(normed.dtype.element_ty), mask=is_inside)


@triton.jit
def _norm_heads(value, weight, heads, columns, is_inside, head_dim, eps, NORM: tl.constexpr):
    """RMSNorm of float32 [heads, head_dim]: NORM 1 of each head, with a weight [head_dim]; 2 of all, [heads, head_dim].

    What is outside is 0.
    """
    squares = tl.sum(value * value, 1)
    if NORM == 1:
        by = tl.rsqrt(squares / head_dim + eps)[:, None]
        return value * by * tl.load(weight + columns, mask=columns < head_dim, other=0.0).to(tl.float32)[None, :]
    num_heads = tl.sum(tl.max(is_inside.to(tl.int32), 1), 0)
    by = tl.rsqrt(tl.sum(squares, 0) / (num_heads * head_dim) + eps)
    weights = tl.load(weight + heads[:, None] * head_dim + columns[None, :], mask=is_inside, other=0.0)
    return value * by * weights.to(tl.float32)


@triton.jit
def _store_heads(
    found, into, scales, slot, heads, columns, is_inside, num_kv_heads, head_dim,
    IN_8_BITS: tl.constexpr, IS_VALUE: tl.constexpr,
):  # fmt: skip
    """Write a token's keys or values, [heads, head_dim], where is_inside. into, scales: see rotate_and_store.

    In 8 bits as BlockwiseKV.write rounds, which needs every product and sum to be rounded.
    """
    if IN_8_BITS:
        numbers = found.to(tl.float32)
        most = tl.max(tl.abs(numbers), 1)
        by = tl.where(most > LEAST_MOST, tl.div_rn(MOST_INTEGER, tl.maximum(most, LEAST_MOST)), 0.0)
        integers = (numbers * by[:, None] + TO_INTEGER - TO_INTEGER).to(tl.int8)
        head_bytes, token = BLOCK_TOKENS * (head_dim + 4), slot % BLOCK_TOKENS
        places = slot // BLOCK_TOKENS * num_kv_heads + heads
        address = columns * BLOCK_TOKENS + token if IS_VALUE else token * head_dim + columns
        tl.store(into + (places * head_bytes)[:, None] + address[None, :], integers, mask=is_inside)
        scale = tl.div_rn(most, MOST_INTEGER) + tl.sum(numbers * 0.0, 1)  # not finite where a number is not
        tl.store(scales + places * (head_bytes // 4) + token, scale, mask=tl.max(is_inside.to(tl.int32), 1) > 0)
    else:
        place = slot * num_kv_heads * head_dim
        tl.store(into + place + heads[:, None] * head_dim + columns[None, :], found, mask=is_inside)


@triton.jit
def rotate_and_store(
    qkv,  # [tokens, heads + 2 * kv_heads, head_dim]
    query,  # [tokens, heads, head_dim]
    keys,  # [slots, kv_heads, head_dim]; IN_8_BITS: see BlockwiseKV
    values,
    key_scales,  # read where IN_8_BITS, as value_scales
    value_scales,
    slots,  # int64 [tokens]
    rotation,  # float32 [tokens, head_dim / 2, 2]: complex factors of the pairs
    query_norm,  # see NORM
    key_norm,
    num_heads,
    num_kv_heads,
    head_dim,
    eps,
    NORM: tl.constexpr,  # 0: none; 1: of a head, by [head_dim]; 2: of all heads of a token, by [heads, head_dim]
    HAS_ROTATION: tl.constexpr,
    IN_8_BITS: tl.constexpr,
    HEADS: tl.constexpr,  # at a time; NORM 2: all of them
    BLOCK: tl.constexpr,  # >= head_dim
):
    """Norm and rotate queries and keys, and write keys and values to the cache.

    Program: a token, and HEADS heads of its queries, then of its keys, then of its values.
    Source: RoFormer (arXiv:2104.09864), section 3.4.2; pairs lie side by side.
    """
    token = tl.program_id(0).to(tl.int64)
    num_query_parts = tl.cdiv(num_heads, HEADS)
    num_kv_parts = tl.cdiv(num_kv_heads, HEADS)
    part = tl.program_id(1)
    is_query = part < num_query_parts
    is_value = part >= num_query_parts + num_kv_parts
    kv_part = tl.where(is_value, part - num_query_parts - num_kv_parts, part - num_query_parts)
    heads = tl.where(is_query, part, kv_part) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    end_head = tl.where(is_query, num_heads, num_kv_heads)
    is_inside = (heads < end_head)[:, None] & (columns < head_dim)[None, :]
    first_head = tl.where(is_query, 0, tl.where(is_value, num_heads + num_kv_heads, num_heads))
    places = heads[:, None] * head_dim + columns[None, :]
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + first_head) * head_dim
    found = tl.load(source + places, mask=is_inside, other=0.0)
    if is_value:
        slot = tl.load(slots + token)
        _store_heads(
            found, values, value_scales, slot, heads, columns, is_inside, num_kv_heads, head_dim, IN_8_BITS, True
        )  # fmt: skip
    else:
        if NORM:
            value = found.to(tl.float32)
            if is_query:
                value = _norm_heads(value, query_norm, heads, columns, is_inside, head_dim, eps, NORM)
            else:
                value = _norm_heads(value, key_norm, heads, columns, is_inside, head_dim, eps, NORM)
            found = value.to(found.dtype)
        if HAS_ROTATION:
            factors = rotation + token * head_dim + columns
            by = tl.load(factors, mask=columns < head_dim, other=0.0)
            real, imaginary = tl.split(tl.reshape(by, [BLOCK // 2, 2]))
            even, odd = tl.split(tl.reshape(found.to(tl.float32), [HEADS, BLOCK // 2, 2]))
            rotated_even = even * real[None, :] - odd * imaginary[None, :]
            rotated_odd = even * imaginary[None, :] + odd * real[None, :]
            found = tl.reshape(tl.join(rotated_even, rotated_odd), [HEADS, BLOCK]).to(found.dtype)
        if is_query:
            tl.store(query + token * num_heads * head_dim + places, found, mask=is_inside)
        else:
            slot = tl.load(slots + token)
            _store_heads(
                found, keys, key_scales, slot, heads, columns, is_inside, num_kv_heads, head_dim, IN_8_BITS, False
            )  # fmt: skip


@triton.jit
def gate(
    gate_up,  # [rows, 2 * width], all of gate and then all of up
    out,  # [rows, width]
    width,
    slope,  # of CLAMPED_SWIGLU
    limit,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An MLP's gate, activated, times up. Program: a row, and BLOCK of its columns. Sources: see gpu/layers.py."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < width
    gates = tl.load(gate_up + row * 2 * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + (row * 2 + 1) * width + columns, mask=is_inside, other=0.0).to(tl.float32)
    if ACTIVATION == SILU:
        result = gates * tl.sigmoid(gates) * ups
    elif ACTIVATION == GELU_TANH:
        result = gates * tl.sigmoid(gates * GELU_SLOPE * (gates * gates * GELU_CUBE + 1)) * ups
    else:
        # NaN stays NaN: tl.minimum alone would return the other.
        gates = tl.minimum(gates, limit, propagate_nan=tl.PropagateNan.ALL)
        ups = tl.clamp(ups, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        result = gates * tl.sigmoid(slope * gates) * (ups + 1)
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=is_inside)


class TritonOperators(Operators):
    """For models that sizes.why_not_this_model supports.

    Args:
        attention: kernels that support the model; None: torch attends.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionKernels | None = None,
    ) -> None:
        super().__init__(dtype, device, config.rms_norm_eps)
        if attention is not None:
            self.attention, self.has_device_rows, self.make_rows = attention, True, DeviceRows
        self.matmuls: MatmulChoices = MatmulChoices()

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, BlockWeight):
            return self._chosen(weight, bias, DecodedMatmul(weight, bias))
        if isinstance(weight, QuantizedWeight):
            return self.quantized_linear(weight, bias)
        weight = floats(weight)
        return self._chosen(weight, bias, make_linear(weight, bias))

    def small(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return self.linear(weight, bias) if self.is_deterministic else super().small(weight, bias)

    def block_rows(self, weight: BlockWeight) -> Embed:
        return BlockRows(weight)

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self._chosen(weight, bias, SlabLinear(weight, bias))

    def _chosen(self, weight: Weight, bias: Tensor | None, by_torch: Linear) -> Linear:
        """By the kernel or by torch, as gpu/tune.py measures.

        Raises:
            StartupError: torch's would depend on the number of rows, and must not.
        """
        if not can_multiply(weight):
            if self.is_deterministic:
                raise not_deterministic(f"the kernels do not support a matrix of {list(weight.shape)} stored as it is")
            return by_torch
        if self.is_deterministic:
            return Matmul(weight, bias, is_fixed=True)
        num_out, num_in = weight.shape
        name, size_bytes = stored_as(weight)
        return self.matmuls.make(name, Matmul(weight, bias), by_torch, (num_out, num_in), size_bytes)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated) -> Block:
        if not can_group(weights) or config.scales_inputs:
            if self.is_deterministic:
                raise not_deterministic("the kernels do not support its experts")
            return super().experts(config, weights, gated)
        return GroupedExperts(config, weights, gated, self.router(config, weights), self.is_deterministic)

    def tied(self, embedding: Tensor) -> tuple[Embed, Linear]:
        return self.embedding(embedding), self.linear(embedding, None)

    def embedding(self, table: Tensor) -> Embed:
        return partial(embed_rows, table) if table.is_contiguous() else super().embedding(table)

    def gated(self, activation: str) -> Gated:
        if activation not in ACTIVATIONS:
            return super().gated(activation)
        return partial(self._gated, activation)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() != 1 or not _are_contiguous(x, weight):
            return super().norm(x, weight)
        return self._add_norm(x, None, 1.0, weight)[1]

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        is_supported = weight is None or (weight.dim() == 1 and weight.is_contiguous())
        if not is_supported or not _are_contiguous(x, added) or added.dtype != x.dtype:
            return super().add_norm(x, added, scale, weight)
        return self._add_norm(x, added, scale, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        is_stored = (kv.is_int8 and not kv.is_paired) or kv.keys.dtype == qkv.dtype
        is_supported = is_stored and _are_contiguous(qkv, kv.keys, kv.values, slots)
        if not is_supported or (rotation is not None and not rotation.is_contiguous()):
            return super().rotate_and_store(qkv, norms, rotation, kv, slots)
        num_tokens, num_all, head_dim = qkv.shape
        num_kv_heads = kv.keys.shape[1]
        num_heads = num_all - 2 * num_kv_heads
        query = qkv.new_empty((num_tokens, num_heads, head_dim))
        norm_kind = 0 if norms is None else norms[0].dim()
        heads = heads_at_once(num_heads, num_kv_heads, head_dim, norm_kind == 2)
        num_parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
        query_norm, key_norm = (qkv, qkv) if norms is None else norms  # an address even where it is not read
        rotate_and_store[(num_tokens, num_parts)](
            qkv,
            query,
            kv.keys,
            kv.values,
            kv.key_scales,
            kv.value_scales,
            slots,
            qkv if rotation is None else torch.view_as_real(rotation),
            query_norm,
            key_norm,
            num_heads,
            num_kv_heads,
            head_dim,
            self._eps,
            NORM=norm_kind,
            HAS_ROTATION=rotation is not None,
            IN_8_BITS=kv.is_int8,
            HEADS=heads,
            BLOCK=next_power_of_two(head_dim),
            num_warps=HEAD_WARPS,
            enable_fp_fusion=not kv.is_int8,
        )
        return query

    def _gated(self, activation: str, gate_up: Tensor) -> Tensor:
        if not gate_up.is_contiguous():
            return super().gated(activation)(gate_up)
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, width))
        gate[(num_rows, -(-width // COLUMNS))](
            gate_up,
            out,
            width,
            SWIGLU_SLOPE,
            SWIGLU_LIMIT,
            ACTIVATION=ACTIVATIONS[activation],
            BLOCK=COLUMNS,
            num_warps=COLUMN_WARPS,
        )
        return out

    def _add_norm(self, x: Tensor, added: Tensor | None, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """See Operators.add_norm; added None: the sum is x."""
        width = x.shape[-1]
        total = x if added is None else torch.empty_like(x)
        normed = total if weight is None else torch.empty_like(x)
        add_and_norm[(x.numel() // width,)](
            x,
            x if added is None else added,
            x if weight is None else weight,
            total,
            normed,
            width,
            scale,
            self._eps,
            HAS_ADDED=added is not None,
            HAS_NORM=weight is not None,
            BLOCK=next_power_of_two(width),
            num_warps=row_warps(width),
        )
        return total, normed


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
