"""torch's operators of a layer: the interface that kernels implement, and their test oracle. Thread: engine.

They serve on every device. The kernels of cpu_kernels/ and kernels/ replace them one by one, and are tested against
them. Norms and RoPE are computed in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import ExpertsConfig, RecurrentConfig
from core.errors import ExitCode, StartupError
from gpu.attention import AttentionKernels, TorchAttention
from gpu.blocks import BlockWeight
from gpu.kv_cache import LayerKV
from gpu.layers import GATED, Block, Experts, Gated, apply_rope
from gpu.linear import Embed, Linear, MatmulChoices, can_pack, make_linear, make_tied
from gpu.parallel.ranks import Ranks
from gpu.parameters import ExpertWeights, RecurrentWeights
from gpu.quant import QuantizedWeight, SlabLinear, Weight
from gpu.recurrence import Recurrence, make_recurrence
from gpu.rows import RowOperators
from gpu.sampler import MakeSampler

if TYPE_CHECKING:
    from gpu.cpu_kernels.block_matmul import BlockMatmul
    from gpu.cpu_kernels.low_rank import LowRankKernel


def not_deterministic(cause: str) -> StartupError:
    """--deterministic is refused. cause: a phrase."""
    fix = "start without --deterministic, or on a CPU with another --dtype or --quantize"
    return StartupError(f"--deterministic is not possible: {cause}.", fix, ExitCode.DEVICE)


HeadNorms = tuple[Tensor, Tensor]
"""Weights of the norms of queries and keys: [head_dim] each, or [heads, head_dim] and [kv_heads, head_dim]"""


class Operators:
    """Torch's operators.

    Args:
        dtype, device: of what they compute.
        eps: of norms.
    """

    matmuls: MatmulChoices | None = None  # None: there is no choice
    sampler: MakeSampler | None = None  # None: torch samples
    has_blocks = False  # whether int8 and int4 are multiplied as blocks
    few_layers: Callable[..., Tensor] | None = None  # runs the layers for few rows (RecordedLayers); None: Python does
    has_device_rows = False  # whether rows are read at fixed addresses, so that a graph may hold a step
    make_rows: type[RowOperators] = RowOperators
    ranks: Ranks | None = None  # None: this process computes the whole model
    is_deterministic = False  # whether a row's bits may not depend on its company, whatever that costs

    def __init__(self, dtype: torch.dtype, device: torch.device, eps: float) -> None:
        self._is_packed = can_pack(dtype, device)
        self._eps = eps
        self.attention: AttentionKernels = TorchAttention(dtype, device)

    def pairs_kv(self, dtype: torch.dtype) -> bool:
        """Whether the KV cache lies in pairs: see gpu/kv_cache.py. dtype: the cache's."""
        return False

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        """A matmul with weight [out, in], plus bias [out] or None."""
        if isinstance(weight, BlockWeight):
            return self.blocks(weight, bias)
        if isinstance(weight, QuantizedWeight):
            return self.quantized_linear(weight, bias)
        return make_linear(weight, bias, is_packed=self._is_packed)

    def small(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """The same with a few outputs, in the weight's own format, which may not be the others': a gate, or scores."""
        return make_linear(weight, bias)

    def quantized_linear(self, weight: QuantizedWeight, bias: Tensor | None) -> Linear:
        blocks = self._blocks_of(weight) if self.has_blocks else None
        return SlabLinear(weight, bias) if blocks is None else self.blocks(blocks, bias)

    def blocks(self, weight: BlockWeight, bias: Tensor | None) -> "BlockMatmul":
        """The same with blocks, on any CPU; its rows can be read as well."""
        from gpu.cpu_kernels.block_matmul import BlockMatmul  # compiles for seconds, once

        return BlockMatmul(weight, bias)

    def block_rows(self, weight: BlockWeight) -> Embed:
        """Rows of a matrix of a file's blocks, as an embedding takes them."""
        return self.blocks(weight, None).rows

    def _blocks_of(self, weight: QuantizedWeight) -> BlockWeight | None:
        from gpu.cpu_kernels.block_matmul import pack_quantized

        packed = pack_quantized(weight)
        return None if packed is None else BlockWeight(weight.dtype, (packed,))

    def tied(self, embedding: Tensor) -> tuple[Embed, Linear]:
        """Embedding and head that share one matrix."""
        return make_tied(embedding, is_packed=self._is_packed)

    def embedding(self, table: Tensor) -> Embed:
        """Embedding with a matrix [vocab, hidden] that is not the head's."""
        return partial(F.embedding, weight=table)

    def experts(self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated) -> Block:
        """A layer's experts, with their router."""
        return Experts(config, weights, gated, self.router(config, weights), self.linear)

    def router(self, config: ExpertsConfig, weights: ExpertWeights) -> Linear:
        """hidden -> experts."""
        if not config.is_router_float:
            return self.linear(weights.router, weights.router_bias)
        in_float = self.small(weights.router, weights.router_bias)
        return lambda x: in_float(x.float())

    def recurrence(self, config: RecurrentConfig, weights: RecurrentWeights) -> Recurrence:
        """What a recurrent layer computes between its matrices."""
        return make_recurrence(config, weights)

    def low_rank(self) -> "LowRankKernel | None":
        """What adds adapters' products; None: torch does."""
        return None

    def gated(self, activation: str) -> Gated:
        """An MLP's gate, activated, times up. activation: of GATED."""
        return GATED[activation]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the weight's dimensions, x's last; torch computes it in float32 whatever x is."""
        if weight.dtype != x.dtype:  # see LayerWeights
            return F.rms_norm(x.float(), weight.shape, weight.float(), self._eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def add_norm(self, x: Tensor, added: Tensor, scale: float, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """(x + scale * added, its norm); without a weight the sum twice. x and added: [tokens, hidden].

        Scaled sums are of floats: in bf16 torch rounds the product before it adds, or not, by an element's place.
        """
        x = x + added if scale == 1 else torch.add(x.float(), added.float(), alpha=scale).to(x.dtype)
        return x, x if weight is None else self.norm(x, weight)

    def rotate_and_store(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Tensor | None, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the cache; returns the queries.

        Args:
            qkv: [tokens, heads + 2 * kv_heads, head_dim].
            norms: None: no norms.
            rotation: see Rope; None: no RoPE.
            slots: [tokens], where each token's keys and values go.
        Returns:
            [tokens, heads, head_dim]
        """
        num_kv_heads = kv.keys.shape[1]
        num_rotated = qkv.shape[1] - num_kv_heads
        num_heads = num_rotated - num_kv_heads
        query_key = qkv[:, :num_rotated]  # [tokens, heads + kv_heads, head_dim]
        if norms is not None:
            query, key = query_key.split_with_sizes([num_heads, num_kv_heads], 1)
            query_key = torch.cat([self.norm(query, norms[0]), self.norm(key, norms[1])], 1)
        if rotation is not None:
            query_key = apply_rope(query_key, rotation)
        kv.write(slots, query_key[:, num_heads:], qkv[:, num_rotated:])
        return query_key[:, :num_heads]

    def rotated(self, query: Tensor, norm: Tensor | None, rotation: Tensor | None) -> Tensor:
        """Norm and rotate queries alone; see rotate_and_store. query: [tokens, heads, head_dim], also returned so."""
        if norm is not None:
            query = self.norm(query, norm)
        return query if rotation is None else apply_rope(query, rotation)
