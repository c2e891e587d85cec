"""The kernels in the place of torch's operators, for bf16 on a CPU. Thread: engine."""

from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.cpu_kernels.elementwise import (
    GateArguments,
    NormArguments,
    RotateArguments,
    add_and_norm,
    gate,
    rotate_and_store,
)
from gpu.cpu_kernels.emit import LANES
from gpu.cpu_kernels.packed_product import PackedProducts
from gpu.cpu_kernels.paged_attention import PagedAttention
from gpu.cpu_kernels.team import Kernel
from gpu.kv_cache import LayerKV
from gpu.layers import Gated
from gpu.linear import Linear, ProductChoice, keeps_rows
from gpu.operators import ElementwiseChoice, HeadNorms, Operators
from gpu.quantize import QuantizedWeight

GATES = {"silu": 0, "gelu_pytorch_tanh": 1}  # is_gelu
# A second thread is woken for so many numbers: they take a core about as long as waking one.
NUMBERS_PER_THREAD = 1 << 16


class KernelOperators(Operators):
    """Not for two threads at once: the kernels' arguments are its own.

    Args:
        has_attention: its kernel knows the model; False: torch attends.
    """

    def __init__(self, config: ModelConfig, has_attention: bool) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"), config.rms_norm_eps)
        self.attention = PagedAttention() if has_attention else None
        self.product_choice = ProductChoice(uses_kernel=True, is_open=keeps_rows())
        self.elementwise_choice: ElementwiseChoice = ElementwiseChoice()
        self._products = PackedProducts(self.product_choice)
        self._norm, self._norm_arguments = Kernel(add_and_norm), NormArguments(eps=config.rms_norm_eps)
        self._rotate, self._rotate_arguments = Kernel(rotate_and_store), RotateArguments(eps=config.rms_norm_eps)
        self._gate, self._gate_arguments = Kernel(gate), GateArguments()

    def packed_linear(self, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Linear:
        return self._products(packed, weight, bias)

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        from gpu.cpu_kernels.quantized_product import can_multiply, make_product  # compiles for seconds, once

        return make_product(weight, bias) if can_multiply(weight) else super().quantized_linear(weight, bias)

    def gated(self, activation: str) -> Gated:
        if activation not in GATES:
            return super().gated(activation)
        return partial(self._gated, activation)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dim() != 2 or not self._is_known(x, weight):
            return super().norm(x, weight)
        return self._add_norm(x, None, 1.0, weight)[1]

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight is None or not self._is_known(x, weight) or not added.is_contiguous():
            return super().add_norm(x, added, scale, weight)
        return self._add_norm(x, added, scale, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        num_tokens, num_all, head_dim = qkv.shape
        is_known = self.elementwise_choice.uses_kernel and head_dim % LANES == 0 and qkv.is_contiguous()
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
        if not self.elementwise_choice.uses_kernel or width % LANES or not gate_up.is_contiguous():
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

    def _is_known(self, x: Tensor, weight: Tensor) -> bool:
        is_chosen = self.elementwise_choice.uses_kernel
        return is_chosen and x.is_contiguous() and weight.dim() == 1 and x.shape[-1] % LANES == 0


def _threads_for(num_numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), num_numbers // NUMBERS_PER_THREAD))
