"""The model: a decoder-only transformer, from token ids to logits. Thread: engine.

One file that reads as one model; the families differ by three flags of ModelConfig. Norms and RoPE are computed in
float32. Keys and values are written to the paged cache before attention reads it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import ModelConfig, RopeConfig
from gpu.attention import paged_attention
from gpu.batch import DeviceBatch
from gpu.kv_cache import KVCache, LayerKV
from gpu.linear import Linear, can_pack, make_linear
from gpu.weights import LayerWeights, ModelWeights


@dataclass(slots=True)
class Layer:
    """One layer, ready to compute."""

    attention_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> query + 2 * kv
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Linear  # query -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


class Model:
    """Takes the weights over: its list of layers is empty afterwards, so that a packed copy replaces the plain one."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        dtype, device = weights.embedding.dtype, weights.embedding.device
        is_packed = can_pack(dtype, device)
        self.config = config
        self.embedding = weights.embedding  # [vocab, hidden]
        self.norm = weights.norm  # [hidden]
        self.lm_head = make_linear(weights.lm_head, None, is_packed)
        self.layers = [_layer(weights.layers.pop(0), is_packed) for _ in range(config.num_layers)]
        self.inv_freq = rope_frequencies(config.rope, config.head_dim).to(device)  # [head_dim / 2]

    def forward(self, batch: DeviceBatch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens, and the logits of the rows that sample: [sampled, vocab], float32."""
        x = F.embedding(batch.token_ids, self.embedding)  # [tokens, hidden]
        rotation = rope_rotation(batch.positions, self.inv_freq)  # [tokens, 1, head_dim / 2]
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            x = x + self._attention(layer, self._norm(x, layer.attention_norm), rotation, batch, kv)
            x = x + _mlp(layer, self._norm(x, layer.mlp_norm))  # [tokens, hidden]
        if not len(batch.sampled_rows):
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        x = self._norm(x.index_select(0, batch.sampled_tokens), self.norm)  # [sampled, hidden]
        return self.lm_head(x).float()  # [sampled, vocab]

    def _attention(self, layer: Layer, x: Tensor, rotation: Tensor, batch: DeviceBatch, kv: LayerKV) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        query_key = qkv[:, :num_rotated]  # [tokens, heads + kv_heads, head_dim]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split_with_sizes([config.num_heads, config.num_kv_heads], 1)
            query_key = torch.cat([self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)], 1)
        query_key = apply_rope(query_key, rotation)
        kv.keys.index_copy_(0, batch.kv_slots, query_key[:, config.num_heads :])
        kv.values.index_copy_(0, batch.kv_slots, qkv[:, num_rotated:])
        return layer.output(paged_attention(query_key[:, : config.num_heads], kv, batch.groups))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension; torch computes it in float32 whatever x is."""
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _mlp(layer: Layer, x: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202). x: [tokens, hidden], normed; also returned so."""
    gate, up = layer.gate_up(x).chunk(2, -1)  # [tokens, intermediate] each
    return layer.down(F.silu(gate).mul_(up))


def apply_rope(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head of x by its token's position, in float32.

    Args:
        x: [tokens, heads, head_dim]; a pair that turns lies side by side (weights.interleave_halves).
        rotation: [tokens, 1, head_dim / 2], complex: what to multiply the pairs by.
    Source: RoFormer (arXiv:2104.09864), section 3.4.2.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))  # [tokens, heads, head_dim / 2]
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def rope_rotation(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """The complex number of modulus 1 for each token and frequency: [tokens, 1, head_dim / 2], complex64.

    Args:
        positions: [tokens], float32, absolute index in the sequence, from 0.
        inv_freq: [head_dim / 2], radians per token.
    """
    angles = torch.outer(positions, inv_freq).unsqueeze(1)  # [tokens, 1, head_dim / 2]
    return torch.polar(torch.ones_like(angles), angles)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per token, float32: [head_dim / 2].

    Source: "llama3" as in Llama 3.1's reference code (apply_scaling): wavelengths beyond original / low_freq_factor
    are stretched by factor, those below original / high_freq_factor kept, and in between blended.
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _layer(weights: LayerWeights, is_packed: bool) -> Layer:
    return Layer(
        attention_norm=weights.attention_norm,
        qkv=make_linear(weights.qkv, weights.qkv_bias, is_packed),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        output=make_linear(weights.output, None, is_packed),
        mlp_norm=weights.mlp_norm,
        gate_up=make_linear(weights.gate_up, None, is_packed),
        down=make_linear(weights.down, None, is_packed),
    )
