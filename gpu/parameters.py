"""A model's parameters, fused as they are computed with, and which tensors of a checkpoint fill them.

Where one tensor goes, and what is rearranged on the way; how the families name and store layers and experts.
Thread: engine (at start).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config import ExpertsConfig, ModelConfig
from gpu.quant import Weight, floats

MXFP4_BLOCK = 32  # numbers that share a scale
# OCP Microscaling Formats 1.0, section 5.3.3: E2M1, sign last
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_SCALE_BIAS = 127  # a scale is 2 ** (byte - 127): section 5.4.1, E8M0
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
Empty = Callable[[tuple[int, ...]], Tensor]

# family -> the router, and of each expert gate, up and down
_NAMES = {
    "mixtral": (
        "block_sparse_moe.gate",
        tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
    ),
    "qwen3_moe": ("mlp.gate", tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of the checkpoint goes.

    Args:
        into: rows of a parameter.
        head_dim: reorder the rows within heads of this size; None: as they are.
        rotary_dim: of each head, so many are reordered; None: all.
        num_reordered: of the rows, so many are; None: all.
        offset: what is added to each number.
        write: how a tensor of another shape or format goes into `into`, or some of its first dimension into the same
            of `into`; None: by copying.
        stored_shape: of the checkpoint's tensor; None: as `into`.
        is_packed: it is stored as bytes, not as floats.
        is_scale: it multiplies what another tensor has written: read last.
    """

    into: Tensor
    head_dim: int | None = None
    rotary_dim: int | None = None
    num_reordered: int | None = None
    offset: float = 0.0
    write: Callable[[Tensor, Tensor], None] | None = None
    stored_shape: tuple[int, ...] | None = None
    is_packed: bool = False
    is_scale: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.into.shape) if self.stored_shape is None else self.stored_shape

    def fill(self, tensor: Tensor) -> None:
        """tensor: of the shape above, in any float format, or bytes."""
        self.write_rows(0, tensor)
        self.finish()

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Some of the tensor's rows, from this one on; finish() is for once all are there."""
        into = self.into[first : first + len(rows)]
        if self.write is not None:
            self.write(into, rows)
        else:
            into.copy_(rows)

    def finish(self) -> None:
        """What is done to all rows together."""
        if self.offset:
            self.into.add_(self.offset)
        if self.head_dim is not None:
            rows = self.into[: self.num_reordered]
            rows.copy_(interleave_halves(rows, self.head_dim, self.rotary_dim))


def interleave_halves(rows: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder each head's rows from (first half, second half) to pairs: what RoPE turns lies side by side.

    Scores do not change: q and k are reordered alike. rows: [heads * head_dim, ...], also returned so; of each head
    the first rotary_dim rows are reordered, or all.
    """
    if rotary_dim is not None and rotary_dim != head_dim:
        heads = rows.view(-1, head_dim, *rows.shape[1:])
        turned = interleave_halves(heads[:, :rotary_dim].flatten(0, 1), rotary_dim)
        turned = turned.view(-1, rotary_dim, *rows.shape[1:])
        return torch.cat([turned, heads[:, rotary_dim:]], 1).view(rows.shape)
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def part_pairs(rows: Tensor) -> Tensor:
    """Reorder rows from pairs (gate, up) to all of gate and then all of up. rows: [2 * n, ...], also returned so."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def write_transposed(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """into: [experts, out, in]; tensor: [experts, in, out], its outputs in pairs or not."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert.T.contiguous()) if are_pairs else expert.T)


def write_paired(into: Tensor, tensor: Tensor) -> None:
    """Both: [experts, 2 * n]."""
    for rows, expert in zip(into, tensor, strict=True):
        rows.copy_(part_pairs(expert))


def write_mxfp4_blocks(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Unpack four-bit numbers, not scaled yet. into: [experts, out, in]; tensor: [experts, out, in / 32, 16], bytes.

    Of a byte the low half comes first.
    """
    values = torch.tensor(FP4_VALUES, dtype=into.dtype, device=into.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    for rows, expert in zip(into, tensor, strict=True):
        unpacked = pairs[expert.to(into.device).flatten(1).int()].view(rows.shape)
        rows.copy_(part_pairs(unpacked) if are_pairs else unpacked)


def write_mxfp4_scales(into: Tensor, tensor: Tensor, are_pairs: bool) -> None:
    """Multiply what is there by powers of two. into: [experts, out, in]; tensor: [experts, out, in / 32], bytes."""
    for rows, expert in zip(into, tensor, strict=True):
        exponents = expert.to(into.device).int() - MXFP4_SCALE_BIAS
        exponents = part_pairs(exponents) if are_pairs else exponents
        blocks = rows.view(*exponents.shape, MXFP4_BLOCK)
        blocks.copy_(torch.ldexp(blocks.float(), exponents.unsqueeze(-1)))


@dataclass(slots=True)
class ExpertWeights:
    """A router and its experts; biases are None where the family has none."""

    router: Tensor  # [experts, hidden]
    router_bias: Tensor | None  # [experts]
    gate_up: Weight  # [experts, 2 * width, hidden]
    gate_up_bias: Tensor | None  # [experts, 2 * width]
    down: Weight  # [experts, hidden, width]
    down_bias: Tensor | None  # [experts, hidden]


def empty_experts(config: ExpertsConfig, hidden_size: int, empty: Empty) -> ExpertWeights:
    num_experts, width = config.num_experts, config.intermediate_size
    return ExpertWeights(
        router=empty((num_experts, hidden_size)),
        router_bias=empty((num_experts,)) if config.has_bias else None,
        gate_up=empty((num_experts, 2 * width, hidden_size)),
        gate_up_bias=empty((num_experts, 2 * width)) if config.has_bias else None,
        down=empty((num_experts, hidden_size, width)),
        down_bias=empty((num_experts, hidden_size)) if config.has_bias else None,
    )


def expert_targets(config: ExpertsConfig, weights: ExpertWeights) -> Iterator[tuple[str, Target]]:
    """The layer's tensors by name."""
    if config.layout == "gpt_oss":
        yield from _gpt_oss_targets(config, weights)
        return
    router, names = _NAMES[config.layout]
    gate_up, down = floats(weights.gate_up), floats(weights.down)
    yield f"{router}.weight", Target(weights.router)
    for expert in range(config.num_experts):
        for name, rows in zip(names, (*gate_up[expert].chunk(2), down[expert]), strict=True):
            yield f"{name.format(expert)}.weight", Target(rows)


def _gpt_oss_targets(config: ExpertsConfig, weights: ExpertWeights) -> Iterator[tuple[str, Target]]:
    """All experts in one tensor, [in, out] or as blocks; rows of gate and up take turns."""
    yield "mlp.router.weight", Target(weights.router)
    if weights.router_bias is not None and weights.gate_up_bias is not None and weights.down_bias is not None:
        yield "mlp.router.bias", Target(weights.router_bias)
        yield "mlp.experts.gate_up_proj_bias", Target(weights.gate_up_bias, write=write_paired)
        yield "mlp.experts.down_proj_bias", Target(weights.down_bias)
    for name, into, are_pairs in (("gate_up", floats(weights.gate_up), True), ("down", floats(weights.down), False)):
        prefix, (num_experts, num_out, num_in) = f"mlp.experts.{name}_proj", into.shape
        if not config.is_mxfp4:
            write = partial(write_transposed, are_pairs=are_pairs)
            yield prefix, Target(into, write=write, stored_shape=(num_experts, num_in, num_out))
            continue
        blocks = (num_experts, num_out, num_in // MXFP4_BLOCK)
        write = partial(write_mxfp4_blocks, are_pairs=are_pairs)
        yield f"{prefix}_blocks", Target(into, write=write, stored_shape=(*blocks, MXFP4_BLOCK // 2), is_packed=True)
        write = partial(write_mxfp4_scales, are_pairs=are_pairs)
        yield f"{prefix}_scales", Target(into, write=write, stored_shape=blocks, is_packed=True, is_scale=True)


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
