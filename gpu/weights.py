"""A checkpoint's tensors to the model's fused parameters. Thread: engine (at start).

Every tensor is accounted for: missing, unexpected and misshaped ones are named.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.config import ModelConfig
from gpu.checkpoint import (
    BYTES,
    IGNORED_SUFFIXES,
    Checkpoint,
    Progress,
    TensorSource,
    bad_checkpoint,
    named_tensors,
    open_safetensors,
)
from gpu.expert_weights import Empty, ExpertWeights, empty_experts, expert_targets
from gpu.parallel.shards import HEAD, Shard
from gpu.quantize import QuantizedWeight, Weight, floats, pack_nibbles, split_groups
from gpu.staged_copies import Fill
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


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """How the layers' matrices are kept.

    Args:
        convert: a matrix to what is kept of it, as soon as its layer is full; None: the matrix.
        is_packed_kept: a layer whose matrices are all packed in the way PackedConfig.is_kept says stays so.
    """

    convert: Callable[[Tensor], Weight] | None = None
    is_packed_kept: bool = False


AS_THEY_ARE = MatrixForm()


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Allocate all parameters."""
    weights = _empty_ends(config, dtype, device, config.vocab_size)
    weights.layers.extend(_empty_layer(config, index, dtype, device) for index in range(config.num_layers))
    return weights


def _empty_ends(config: ModelConfig, dtype: torch.dtype, device: torch.device, num_head_rows: int) -> ModelWeights:
    """All but the layers."""
    empty = partial(torch.empty, dtype=dtype, device=device)
    embedding = empty((config.vocab_size, config.hidden_size))
    lm_head = embedding if config.tie_embeddings else empty((num_head_rows, config.hidden_size))
    norm = empty((config.hidden_size,), dtype=_norm_dtype(config, dtype))
    return ModelWeights(embedding, [], norm, lm_head)


def _norm_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if config.has_norm_offset else dtype


def _empty_layer(config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    empty = partial(torch.empty, dtype=dtype, device=device)
    return _layer_of(config, index, empty, partial(torch.empty, dtype=_norm_dtype(config, dtype), device=device))


def _layer_of(config: ModelConfig, index: int, empty: Empty, empty_norm: Empty) -> LayerWeights:
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
    found = _end_targets(config, weights)
    for index, layer in enumerate(weights.layers):
        found.update(_layer_targets(config, index, layer))
    return found


def _end_targets(config: ModelConfig, weights: ModelWeights) -> dict[str, Target]:
    found = {
        EMBEDDING: Target(weights.embedding),
        "model.norm.weight": Target(weights.norm, offset=norm_offset(config)),
    }
    if not config.tie_embeddings:
        found[HEAD] = Target(weights.lm_head)
    return found


def _layer_targets(config: ModelConfig, index: int, layer: LayerWeights) -> dict[str, Target]:
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


def keeps_packed(config: ModelConfig, quantize: str | None) -> bool:
    """Whether packed integers are served as they are, with what the operator asks of --quantize."""
    return config.packed is not None and config.packed.is_kept and quantize in (None, "int4")


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Hold the headers against what the model needs; allocates nothing.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped.
    """
    weights = empty_weights(config, torch.float32, torch.device("meta"))
    _check(checkpoint, targets(config, weights), config)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    form: MatrixForm = AS_THEY_ARE,
    fill: Fill = Target.fill,
    shard: Shard | None = None,
) -> ModelWeights:
    """Fill the model's parameters from the checkpoint, one layer at a time, converting to dtype.

    Args:
        config: of all that the checkpoint holds.
        fill: see TensorSource.
        shard: load this part only; None: all.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped, told before any is read; or a stored head
            contradicts tied embeddings, told after.
    """
    expected = targets(config, empty_weights(config, dtype, torch.device("meta")))
    _check(checkpoint, expected, config)
    part = config if shard is None else shard.config
    head_rows = slice(0, config.vocab_size) if shard is None else shard.head_rows
    weights = _empty_ends(part, dtype, device, head_rows.stop - head_rows.start)
    with TensorSource(checkpoint, dtype, progress, fill, None if shard is None else shard.cut) as source:
        for name in _extra_biases(checkpoint, expected):
            if source.tensor(name).any():
                raise bad_checkpoint(f"{name} is not zero, and the architecture has no such parameter.")
        source.fill(_end_targets(part, weights))
        for index in range(part.num_layers):
            layer = _empty_layer(part, index, dtype, device)
            _load_layer(part, index, layer, source, form)
            weights.layers.append(layer)
        source.finish()
    _check_tied(checkpoint, config)
    if shard is not None and config.tie_embeddings:
        weights.lm_head = weights.embedding[head_rows]
    return weights


def _load_layer(config: ModelConfig, index: int, layer: LayerWeights, source: TensorSource, form: MatrixForm) -> None:
    wanted = _layer_targets(config, index, layer)
    packed = _packed_names(source.checkpoint, wanted)
    if form.is_packed_kept and _are_all_matrices(wanted, packed, layer):
        source.fill({name: target for name, target in wanted.items() if name not in packed})
        _keep_packed(config, index, layer, packed, source)
        return
    source.fill(wanted)
    if form.convert is not None:
        for owner, name in matrices(layer):
            setattr(owner, name, form.convert(floats(getattr(owner, name))))


def matrices(layer: LayerWeights) -> list[tuple[LayerWeights | MlpWeights | ExpertWeights, str]]:
    """What may be quantised: owner and attribute. Not the router: what it chooses decides more than it costs."""
    return [(layer, "qkv"), (layer, "output"), (layer.mlp, "gate_up"), (layer.mlp, "down")]


def _extra_biases(checkpoint: Checkpoint, wanted: dict[str, Target]) -> set[str]:
    """Early GPTQ tools gave each packed matrix a bias, of zeros where the model has none."""
    packed = {name.removesuffix("weight") + "bias" for name, header in checkpoint.tensors.items() if header.parts}
    return (packed & checkpoint.tensors.keys()) - wanted.keys()


def _packed_names(checkpoint: Checkpoint, wanted: dict[str, Target]) -> list[str]:
    """Those whose rows are whole groups."""
    packing = checkpoint.packing
    if packing is None:
        return []
    found = [name for name in wanted if checkpoint.tensors[name].parts]
    return [name for name in found if checkpoint.tensors[name].shape[1] % (packing.group_size or 1) == 0]


def _are_all_matrices(wanted: dict[str, Target], packed: list[str], layer: LayerWeights) -> bool:
    num_matrix = sum(floats(getattr(owner, name)).numel() for owner, name in matrices(layer))
    return sum(wanted[name].into.numel() for name in packed) == num_matrix


def _keep_packed(config: ModelConfig, index: int, layer: LayerWeights, packed: list[str], source: TensorSource) -> None:
    """Read integers, scales and zeros into layers of their own, with the same order of rows, and put them together."""
    assert config.packed is not None
    dtype, device = floats(layer.qkv).dtype, floats(layer.qkv).device
    group_size = config.packed.group_size

    def grouped(shape: tuple[int, ...]) -> Tensor:
        width = shape[-1] if len(shape) == 1 else 1 if group_size is None else shape[-1] // group_size
        return torch.empty((*shape[:-1], width), dtype=dtype, device=device)

    values = partial(torch.empty, dtype=torch.uint8, device=device)
    layers = [_layer_of(config, index, empty, empty) for empty in (values, grouped, grouped)]
    all_targets = [_layer_targets(config, index, part) for part in layers]
    source.fill_parts([{name: targets[name] for name in packed} for targets in all_targets])
    for (owner, name), *parts in zip(matrices(layer), *map(matrices, layers), strict=True):
        integers, scales, zeros = (floats(getattr(part, name)) for part, name in parts)
        setattr(owner, name, split_groups(QuantizedWeight(dtype, pack_nibbles(integers), scales, zeros)))


def _check(checkpoint: Checkpoint, wanted: dict[str, Target], config: ModelConfig) -> None:
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        raise bad_checkpoint(f"{len(missing)} tensors are missing: {named_tensors(missing)}.")
    tied = {HEAD} if config.tie_embeddings else set()
    unexpected = sorted(
        name
        for name in checkpoint.tensors.keys() - wanted.keys() - tied - _extra_biases(checkpoint, wanted)
        if not name.endswith(IGNORED_SUFFIXES)
    )
    if unexpected:
        raise bad_checkpoint(f"{len(unexpected)} tensors are not this architecture's: {named_tensors(unexpected)}.")
    for name, target in wanted.items():
        header = checkpoint.tensors[name]
        if header.shape != target.shape:
            raise bad_checkpoint(
                f"{name} has the shape {list(header.shape)}, config.json asks for {list(target.shape)}."
            )
        if (header.format == BYTES) != target.is_packed:
            raise bad_checkpoint(f"{name} is stored as {header.format}, which is not the format config.json says.")


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """A tied model may carry its head as well, but only as the same numbers."""
    if not config.tie_embeddings or HEAD not in checkpoint.tensors:
        return
    head, embedding = checkpoint.tensors[HEAD], checkpoint.tensors[EMBEDDING]
    with open_safetensors(head.file) as head_file, open_safetensors(embedding.file) as embedding_file:
        same = torch.equal(head_file.get_tensor(HEAD), embedding_file.get_tensor(EMBEDDING))
    if not same:
        raise bad_checkpoint("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight.")
