"""A model's parameters, fused as they are computed with, and which tensors of a checkpoint fill them.

Thread: engine (at start).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.expert_weights import Empty, ExpertWeights, empty_experts, expert_targets
from gpu.parallel.ranks import HEAD
from gpu.quantize import Weight, floats
from gpu.targets import Target

EMBEDDING = "model.embed_tokens.weight"


@dataclass(slots=True)
class MlpWeights:
    """One gated MLP; None where the family has no bias."""

    gate_up: Weight  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Weight  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(slots=True)
class LayerWeights:
    """One layer; None where the family has no such parameter. Rows of q and k are reordered: see interleave_halves.

    Norms are float32 where the checkpoint's numbers are offsets from 1, which a shorter format would round.
    """

    attention_norm: Tensor | None  # [hidden]
    qkv: Weight  # [query + 2 * kv, hidden]
    qkv_bias: Tensor | None  # [query + 2 * kv]
    query_norm: Tensor | None  # [head_dim], or [heads, head_dim] over all heads at once
    key_norm: Tensor | None  # [head_dim], or [kv_heads, head_dim]
    sinks: Tensor | None  # [heads]
    output: Weight  # [hidden, query]
    output_bias: Tensor | None  # [hidden]
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    mlp: MlpWeights | ExpertWeights
    mlp_post_norm: Tensor | None  # [hidden]


@dataclass(slots=True)
class ModelWeights:
    """All parameters, allocated and not yet filled, or loaded; the layers' matrices as they are, or quantised."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]; see LayerWeights
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Allocate all parameters."""
    weights = empty_ends(config, dtype, device, config.vocab_size)
    weights.layers.extend(empty_layer(config, index, dtype, device) for index in range(config.num_layers))
    return weights


def empty_ends(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_head_rows: int) -> ModelWeights:
    """All but the layers."""
    empty = partial(torch.empty, dtype=dtype, device=device)
    embedding = empty((config.vocab_size, config.hidden_size))
    lm_head = embedding if config.tie_embeddings else empty((num_head_rows, config.hidden_size))
    norm = empty((config.hidden_size,), dtype=_norm_dtype(config, dtype))
    return ModelWeights(embedding, [], norm, lm_head)


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.has_norm_offset else dtype


def empty_layer(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    empty = partial(torch.empty, dtype=dtype, device=device)
    return layer_of(config, index, empty, partial(torch.empty, dtype=_norm_dtype(config, dtype), device=device))


def layer_of(config: ModelConfig, index: int, empty: Empty, empty_norm: Empty) -> LayerWeights:
    def bias(exists: bool, size: int) -> Tensor | None:
        return empty((size,)) if exists else None

    def norm(exists: bool, *shape: int) -> Tensor | None:
        return empty_norm(shape) if exists else None

    hidden, qkv = config.hidden_size, config.query_size + 2 * config.kv_size
    query_heads, kv_heads = ((config.num_heads,), (config.num_kv_heads,)) if config.qk_norm == "all" else ((), ())
    return LayerWeights(
        attention_norm=norm(config.has_pre_norm, hidden),
        qkv=empty((qkv, hidden)),
        qkv_bias=bias(config.qkv_bias, qkv),
        query_norm=norm(config.qk_norm != "none", *query_heads, config.head_dim),
        key_norm=norm(config.qk_norm != "none", *kv_heads, config.head_dim),
        sinks=empty((config.num_heads,)) if config.has_sinks else None,
        output=empty((hidden, config.query_size)),
        output_bias=bias(config.output_bias, hidden),
        attention_post_norm=norm(config.has_post_norm, hidden),
        mlp_norm=norm(config.has_pre_norm, hidden),
        mlp=_empty_mlp(config, config.layer(index).is_sparse, empty),
        mlp_post_norm=norm(config.has_post_norm, hidden),
    )


def _empty_mlp(config: ModelConfig, is_sparse: bool, empty: Empty) -> MlpWeights | ExpertWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    if is_sparse:
        assert config.experts is not None
        return empty_experts(config.experts, hidden, empty)
    return MlpWeights(
        gate_up=empty((2 * intermediate, hidden)),
        gate_up_bias=empty((2 * intermediate,)) if config.mlp_bias else None,
        down=empty((hidden, intermediate)),
        down_bias=empty((hidden,)) if config.mlp_bias else None,
    )


def targets(config: ModelConfig, weights: ModelWeights) -> dict[str, Target]:
    """The checkpoint's tensor names, and where each goes."""
    found = end_targets(config, weights)
    for index, layer in enumerate(weights.layers):
        found.update(layer_targets(config, index, layer))
    return found


def end_targets(config: ModelConfig, weights: ModelWeights) -> dict[str, Target]:
    found = {
        EMBEDDING: Target(weights.embedding),
        "model.norm.weight": Target(weights.norm, offset=norm_offset(config)),
    }
    if not config.tie_embeddings:
        found[HEAD] = Target(weights.lm_head)
    return found


def layer_targets(config: ModelConfig, index: int, layer: LayerWeights) -> dict[str, Target]:
    return {f"model.layers.{index}.{name}": target for name, target in _named_targets(config, layer)}


def _named_targets(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
    yield from _norm_targets(config, layer)
    for suffix, qkv in (("weight", floats(layer.qkv)), ("bias", layer.qkv_bias)):
        if qkv is not None:
            yield from _qkv_targets(config, qkv, suffix)
    for name, norm in (("q", layer.query_norm), ("k", layer.key_norm)):
        if norm is not None:
            rotary_dim = config.rope.rotary_dim(config.head_dim)
            yield (
                f"self_attn.{name}_norm.weight",
                Target(norm.view(-1), config.head_dim, rotary_dim, offset=norm_offset(config)),
            )
    yield "self_attn.o_proj.weight", Target(floats(layer.output))
    if layer.output_bias is not None:
        yield "self_attn.o_proj.bias", Target(layer.output_bias)
    if layer.sinks is not None:
        yield "self_attn.sinks", Target(layer.sinks)
    if isinstance(layer.mlp, ExpertWeights):
        assert config.experts is not None
        yield from expert_targets(config.experts, layer.mlp)
    else:
        yield from _mlp_targets(config, layer.mlp)


def _mlp_targets(config: ModelConfig, mlp: MlpWeights) -> Iterator[tuple[str, Target]]:
    for suffix, gate_up, down in (
        ("weight", floats(mlp.gate_up), floats(mlp.down)),
        ("bias", mlp.gate_up_bias, mlp.down_bias),
    ):
        if gate_up is None or down is None:
            continue
        if config.has_fused_weights:
            yield f"mlp.gate_up_proj.{suffix}", Target(gate_up)
        else:
            for name, rows in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                yield f"mlp.{name}_proj.{suffix}", Target(rows)
        yield f"mlp.down_proj.{suffix}", Target(down)


def _norm_targets(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
    """`post_attention_layernorm` is the MLP's norm in families without norms after the blocks."""
    mlp_norm = "pre_feedforward_layernorm" if config.has_post_norm else "post_attention_layernorm"
    for name, norm in (
        ("input_layernorm", layer.attention_norm),
        (mlp_norm, layer.mlp_norm),
        ("post_attention_layernorm", layer.attention_post_norm),
        ("post_feedforward_layernorm", layer.mlp_post_norm),
    ):
        if norm is not None:
            yield f"{name}.weight", Target(norm, offset=norm_offset(config))


def norm_offset(config: ModelConfig) -> float:
    return 1.0 if config.has_norm_offset else 0.0


def _qkv_targets(config: ModelConfig, qkv: Tensor, suffix: str) -> Iterator[tuple[str, Target]]:
    """RoPE turns q and k, not v. qkv: [query + 2 * kv, ...]"""
    head_dim, rotary_dim = config.head_dim, config.rope.rotary_dim(config.head_dim)
    if config.has_fused_weights:
        num_reordered = config.query_size + config.kv_size
        yield f"self_attn.qkv_proj.{suffix}", Target(qkv, head_dim, rotary_dim, num_reordered)
        return
    query, key, value = qkv.split_with_sizes([config.query_size, config.kv_size, config.kv_size])
    yield f"self_attn.q_proj.{suffix}", Target(query, head_dim, rotary_dim)
    yield f"self_attn.k_proj.{suffix}", Target(key, head_dim, rotary_dim)
    yield f"self_attn.v_proj.{suffix}", Target(value)


def matrices(layer: LayerWeights) -> list[tuple[LayerWeights | MlpWeights | ExpertWeights, str]]:
    """What may be quantised: owner and attribute. Not the router: what it chooses decides more than it costs."""
    return [(layer, "qkv"), (layer, "output"), (layer.mlp, "gate_up"), (layer.mlp, "down")]
