"""The model: a decoder-only transformer, from token ids to logits. Thread: engine.

One file that reads as one model; the families differ by fields of ModelConfig and by parameters that a layer has or
has not. Norms and RoPE are computed in float32. Keys and values are written to the paged cache before attention
reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import LayerConfig, ModelConfig
from gpu.attention import DecodeKernel, paged_attention
from gpu.batch import DeviceBatch
from gpu.expert_weights import ExpertWeights
from gpu.kv_cache import KVCache, LayerKV
from gpu.linear import Linear, can_pack, make_linear
from gpu.mlp import GATED, Experts, Mlp
from gpu.rope import Rope, apply_rope
from gpu.scores import Scores
from gpu.tied_head import Embed, make_tied
from gpu.weights import LayerWeights, ModelWeights


@dataclass(slots=True)
class Layer:
    """One layer, ready to compute. A norm that the family has not is None."""

    rope: int | None  # index among the model's; None: q and k are not turned
    window: int | None
    attention_norm: Tensor | None  # [hidden]
    qkv: Linear  # hidden -> query + 2 * kv
    query_norm: Tensor | None  # [head_dim] or [heads, head_dim]
    key_norm: Tensor | None  # [head_dim] or [kv_heads, head_dim]
    scores: Scores
    output: Linear  # query -> hidden
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    mlp: Mlp | Experts
    mlp_post_norm: Tensor | None  # [hidden]


class Model:
    """Takes the weights over: layers and a tied embedding are gone afterwards, so that packed copies replace them.

    Args:
        decode_kernel: attends for rows of one new token; None: torch does.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, decode_kernel: DecodeKernel | None = None) -> None:
        self._decode_kernel = decode_kernel
        dtype, device = weights.embedding.dtype, weights.embedding.device
        is_packed = can_pack(dtype, device)
        self.config = config
        self.norm = weights.norm  # [hidden]
        self._embed, self.lm_head = _ends(weights, is_packed)
        turning = dict.fromkeys(config.layer(index).rope for index in range(config.num_layers))
        used = [rope for rope in turning if rope is not None]
        self.ropes = [Rope(rope, config.head_dim, device) for rope in used]
        self.layers = [
            _layer(config, weights.layers.pop(0), layer, used.index(layer.rope) if layer.rope else None, is_packed)
            for layer in map(config.layer, range(config.num_layers))
        ]
        scale = config.residual_scale
        self._add: Callable[..., Tensor] = torch.add if scale == 1 else partial(torch.add, alpha=scale)
        # Rounded to the weights' format, as the models were trained.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))

    def forward(self, batch: DeviceBatch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens, and the logits of the rows that sample: [sampled, vocab], float32."""
        x = self._embed(batch.token_ids)  # [tokens, hidden]
        if self._embedding_scale != 1:
            x = x.mul_(self._embedding_scale)
        rotations = [rope.rotation(batch.positions) for rope in self.ropes]  # [tokens, 1, head_dim / 2] each
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            normed = x if layer.attention_norm is None else self._norm(x, layer.attention_norm)
            added = self._attention(layer, normed, rotations, batch, kv)
            if layer.attention_post_norm is not None:
                added = self._norm(added, layer.attention_post_norm)
            x = self._add(x, added)
            normed = x if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
            added = layer.mlp(normed)
            if layer.mlp_post_norm is not None:
                added = self._norm(added, layer.mlp_post_norm)
            x = self._add(x, added)  # [tokens, hidden]
        if not len(batch.sampled_rows):
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return self._logits(x.index_select(0, batch.sampled_tokens))

    def probes(self, size_bytes: int) -> list[tuple[Linear, int]]:
        """Products of the first layers with the width of what goes in: at least so many bytes of weights, if it has."""
        config = self.config
        found: list[tuple[Linear, int]] = []
        size = 0
        for layer in self.layers:
            mlps = layer.mlp.experts if isinstance(layer.mlp, Experts) else [layer.mlp]
            width = config.intermediate_size
            if isinstance(layer.mlp, Experts) and config.experts is not None:
                width = config.experts.intermediate_size
            found += [(layer.qkv, config.hidden_size), (layer.output, config.query_size)]
            for mlp in mlps:
                found += [(mlp.gate_up, config.hidden_size), (mlp.down, width)]
            size += (
                2 * (config.query_size + config.kv_size) * config.hidden_size
                + 3 * len(mlps) * width * config.hidden_size
            )
            if size * self.norm.element_size() >= size_bytes:
                break
        return found

    def _attention(self, layer: Layer, x: Tensor, rotations: list[Tensor], batch: DeviceBatch, kv: LayerKV) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(x).view(x.shape[0], -1, config.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        query_key = qkv[:, :num_rotated]  # [tokens, heads + kv_heads, head_dim]
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = query_key.split_with_sizes([config.num_heads, config.num_kv_heads], 1)
            query_key = torch.cat([self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)], 1)
        if layer.rope is not None:
            query_key = apply_rope(query_key, rotations[layer.rope])
        kv.keys.index_copy_(0, batch.kv_slots, query_key[:, config.num_heads :])
        kv.values.index_copy_(0, batch.kv_slots, qkv[:, num_rotated:])
        query, groups = query_key[:, : config.num_heads], batch.groups[layer.window]
        return layer.output(paged_attention(query, kv, groups, layer.scores, self._decode_kernel))

    def _logits(self, x: Tensor) -> Tensor:
        """x: [sampled, hidden]; returns [sampled, vocab], float32."""
        logits = self.lm_head(self._norm(x, self.norm)).float()
        if self.config.logits_scale != 1:
            logits = logits.mul_(self.config.logits_scale)
        if self.config.logits_cap is not None:
            logits = logits.div_(self.config.logits_cap).tanh_().mul_(self.config.logits_cap)
        return logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the weight's dimensions, x's last; torch computes it in float32 whatever x is."""
        if weight.dtype != x.dtype:  # see LayerWeights
            return F.rms_norm(x.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _ends(weights: ModelWeights, is_packed: bool) -> tuple[Embed, Linear]:
    """Embedding and head; a tied one is let go of where it is read from the head."""
    embedding, lm_head = weights.embedding, weights.lm_head
    if lm_head is embedding:
        del weights.embedding, weights.lm_head
        return make_tied(embedding, is_packed)
    return partial(F.embedding, weight=embedding), make_linear(lm_head, None, is_packed)


def _layer(config: ModelConfig, weights: LayerWeights, layer: LayerConfig, rope: int | None, is_packed: bool) -> Layer:
    return Layer(
        rope=rope,
        window=layer.window,
        attention_norm=weights.attention_norm,
        qkv=make_linear(weights.qkv, weights.qkv_bias, is_packed),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        scores=Scores(config.attention_scale, config.attention_cap, weights.sinks),
        output=make_linear(weights.output, weights.output_bias, is_packed),
        attention_post_norm=weights.attention_post_norm,
        mlp_norm=weights.mlp_norm,
        mlp=_mlp(config, weights, is_packed),
        mlp_post_norm=weights.mlp_post_norm,
    )


def _mlp(config: ModelConfig, weights: LayerWeights, is_packed: bool) -> Mlp | Experts:
    gated = GATED[config.activation]
    if isinstance(weights.mlp, ExpertWeights):
        assert config.experts is not None
        return Experts(config.experts, weights.mlp, gated, is_packed)
    gate_up = make_linear(weights.mlp.gate_up, weights.mlp.gate_up_bias, is_packed)
    return Mlp(gate_up, make_linear(weights.mlp.down, weights.mlp.down_bias, is_packed), gated)
