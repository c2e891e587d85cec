"""The kernels in the place of torch's operators, on a CUDA device. Thread: engine.

What they do not know (rows that are not contiguous, formats that differ) torch computes: each is asked in its turn.
"""

from functools import partial

import torch
from torch import Tensor

from core.config import ExpertsConfig, ModelConfig
from gpu.attention import AttentionKernels
from gpu.expert_weights import ExpertWeights
from gpu.kernels.block_sizes import (
    COLUMN_WARPS,
    COLUMNS,
    HEAD_WARPS,
    heads_at_once,
    next_power_of_two,
    row_warps,
)
from gpu.kernels.device_rows import embed_rows
from gpu.kernels.elementwise import add_and_norm, gate, rotate_and_store
from gpu.kernels.experts import GroupedExperts, can_group
from gpu.kernels.product import Product, can_multiply, stored_as
from gpu.kv_cache import LayerKV
from gpu.layers import SWIGLU_LIMIT, SWIGLU_SLOPE, Block, Gated
from gpu.linear import Embed, Linear, MatmulChoices, make_linear
from gpu.operators import HeadNorms, Operators
from gpu.quantize import QuantizedWeight, Weight
from gpu.quantized_linear import SlabLinear

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}  # as elementwise.gate numbers them


class TritonOperators(Operators):
    """Of a model whose shapes support.why_not_this_model knows.

    Args:
        attention: kernels that know the model; None: torch attends.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionKernels | None = None,
    ) -> None:
        super().__init__(dtype, device, config.rms_norm_eps)
        self.attention = attention
        self.has_device_rows = attention is not None
        self.matmuls: MatmulChoices = MatmulChoices()

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        if isinstance(weight, QuantizedWeight):
            return self.quantized_linear(weight, bias)
        return self._chosen(weight, bias, make_linear(weight, bias, None))

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        return self._chosen(weight, bias, SlabLinear(weight, bias))

    def _chosen(self, weight: Weight, bias: Tensor | None, torchs: Linear) -> Linear:
        """By the kernel or as torch does, as is measured."""
        if not can_multiply(weight):
            return torchs
        num_out, num_in = weight.shape
        name, size_bytes = stored_as(weight)
        return self.matmuls.make(name, Product(weight, bias), torchs, (num_out, num_in), size_bytes)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated) -> Block:
        if not can_group(weights):
            return super().experts(config, weights, gated)
        return GroupedExperts(config, weights, gated, self.linear(weights.router, weights.router_bias))

    def tied(self, embedding: Tensor) -> tuple[Embed, Linear]:
        return self.embedding(embedding), self.linear(embedding, None)

    def embedding(self, table: Tensor) -> Embed:
        return partial(embed_rows, table) if table.is_contiguous() else super().embedding(table)

    def gated(self, activation: str) -> Gated:
        return partial(self._gated, activation)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() != 1 or not _are_contiguous(x, weight):
            return super().norm(x, weight)
        return self._add_norm(x, None, 1.0, weight)[1]

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        is_known = weight is None or (weight.dim() == 1 and weight.is_contiguous())
        if not is_known or not _are_contiguous(x, added) or added.dtype != x.dtype:
            return super().add_norm(x, added, scale, weight)
        return self._add_norm(x, added, scale, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        is_known = _are_contiguous(qkv, kv.keys, kv.values, slots) and kv.keys.dtype == qkv.dtype
        if not is_known or (rotation is not None and not rotation.is_contiguous()):
            return super().rotate_and_store(qkv, norms, rotation, kv, slots)
        num_tokens, num_all, head_dim = qkv.shape
        num_kv_heads = kv.keys.shape[1]
        num_heads = num_all - 2 * num_kv_heads
        query = qkv.new_empty((num_tokens, num_heads, head_dim))
        norm_kind = 0 if norms is None else norms[0].dim()
        heads = heads_at_once(num_heads, num_kv_heads, head_dim, norm_kind == 2)
        num_parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
        query_norm, key_norm = (qkv, qkv) if norms is None else norms  # what is not read is still an address
        rotate_and_store[(num_tokens, num_parts)](
            qkv,
            query,
            kv.keys,
            kv.values,
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
            HEADS=heads,
            BLOCK=next_power_of_two(head_dim),
            num_warps=HEAD_WARPS,
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
        """See Operators.add_norm; nothing added: the sum is x."""
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
