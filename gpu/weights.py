"""Safetensors of a Hugging Face directory, or a GGUF file, to the model's fused parameters. Thread: engine (at start).

Reads these only: no pickle, no code from the directory, no file outside it. Every tensor is accounted for:
missing, unexpected and misshaped ones are named.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.config import ModelConfig
from core.errors import BadCheckpoint
from core.gguf import SUFFIX as GGUF_SUFFIX
from gpu.expert_weights import Empty, ExpertWeights, empty_experts, expert_targets
from gpu.gguf import GgufReader
from gpu.targets import Target

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of the formats that convert to ours without loss of meaning
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
BYTES = "U8"
PACKED_SUFFIXES = ("_blocks", "_scales")  # mxfp4
# A buffer that old Llama checkpoints carry; computed here instead.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
NAMED_AT_MOST = 5  # tensors in one error message

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total), as loading goes."""


@dataclass(slots=True)
class MlpWeights:
    """One gated MLP; None where the family has no bias."""

    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(slots=True)
class LayerWeights:
    """One layer; None where the family has no such parameter. Rows of q and k are reordered: see interleave_halves.

    Norms are float32 where the checkpoint's numbers are offsets from 1, which a shorter format would round.
    """

    attention_norm: Tensor | None  # [hidden]
    qkv: Tensor  # [query + 2 * kv, hidden]
    qkv_bias: Tensor | None  # [query + 2 * kv]
    query_norm: Tensor | None  # [head_dim], or [heads, head_dim] over all heads at once
    key_norm: Tensor | None  # [head_dim], or [kv_heads, head_dim]
    sinks: Tensor | None  # [heads]
    output: Tensor  # [hidden, query]
    output_bias: Tensor | None  # [hidden]
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor | None  # [hidden]
    mlp: MlpWeights | ExpertWeights
    mlp_post_norm: Tensor | None  # [hidden]


@dataclass(slots=True)
class ModelWeights:
    """All parameters, allocated and not yet filled, or loaded."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]; see LayerWeights
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    format: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory's tensors, or a GGUF file's, by Hugging Face's names; nothing of their data read yet."""

    path: Path
    tensors: dict[str, TensorHeader] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def main_format(self) -> str:
        """What most of the bytes are stored as."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.format] += tensor.size_bytes
        return sizes.most_common(1)[0][0] if sizes else "nothing"


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Allocate all parameters."""
    empty = partial(torch.empty, dtype=dtype, device=device)
    empty_norm = partial(torch.empty, dtype=torch.float32 if config.has_norm_offset else dtype, device=device)
    layers = [
        _empty_layer(config, config.layer(index).is_sparse, empty, empty_norm) for index in range(config.num_layers)
    ]
    embedding = empty((config.vocab_size, config.hidden_size))
    lm_head = embedding if config.tie_embeddings else empty((config.vocab_size, config.hidden_size))
    return ModelWeights(embedding, layers, empty_norm((config.hidden_size,)), lm_head)


def _empty_layer(config: ModelConfig, is_sparse: bool, empty: Empty, empty_norm: Empty) -> LayerWeights:
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
        mlp=_empty_mlp(config, is_sparse, empty),
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
    found = {
        "model.embed_tokens.weight": Target(weights.embedding),
        "model.norm.weight": Target(weights.norm, offset=norm_offset(config)),
    }
    if not config.tie_embeddings:
        found["lm_head.weight"] = Target(weights.lm_head)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_targets(config, layer):
            found[f"model.layers.{index}.{name}"] = target
    return found


def _layer_targets(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
    yield from _norm_targets(config, layer)
    for suffix, qkv in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if qkv is not None:
            yield from _qkv_targets(config, qkv, suffix)
    for name, norm in (("q", layer.query_norm), ("k", layer.key_norm)):
        if norm is not None:
            rotary_dim = config.rope.rotary_dim(config.head_dim)
            yield (
                f"self_attn.{name}_norm.weight",
                Target(norm.view(-1), config.head_dim, rotary_dim, offset=norm_offset(config)),
            )
    yield "self_attn.o_proj.weight", Target(layer.output)
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
    for suffix, gate_up, down in (("weight", mlp.gate_up, mlp.down), ("bias", mlp.gate_up_bias, mlp.down_bias)):
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


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a directory's safetensors, or of a GGUF file: names, shapes, formats, sizes.

    Raises:
        BadCheckpoint: no safetensors, a bad index, a file that is missing or malformed, a format that is not a float.
        UnsupportedModel: a GGUF file in a format that is not read.
    """
    return _open_gguf(path) if path.is_file() else _open_directory(path)


def _open_gguf(file: Path) -> Checkpoint:
    with GgufReader(file) as reader:
        headers = {
            name: TensorHeader(file, found.shape, found.format, found.size_bytes)
            for name, found in reader.tensors.items()
        }
    return Checkpoint(file, headers)


def _open_directory(directory: Path) -> Checkpoint:
    listed = _listed_tensors(directory)
    tensors: dict[str, TensorHeader] = {}
    for file in sorted(set(listed.values())) if listed else [directory / SINGLE_FILE]:
        with _open(file) as reader:
            for name in reader.keys():  # noqa: SIM118  (not a dict)
                if listed.get(name, file) == file:
                    tensors[name] = _header(reader, name, file)
    missing = sorted(listed.keys() - tensors.keys())
    if missing:
        raise _bad(f"{INDEX_FILE} lists tensors that their files do not hold: {_named(missing)}.")
    return Checkpoint(directory, tensors)


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Hold the headers against what the model needs; allocates nothing.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped.
    """
    weights = empty_weights(config, torch.float32, torch.device("meta"))
    _check(checkpoint, targets(config, weights), config)


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> ModelWeights:
    """Fill the model's parameters from the checkpoint, one tensor at a time, converting to dtype.

    Raises:
        BadCheckpoint: tensors are missing, unexpected or misshaped, told before any is read; or a stored head
            contradicts tied embeddings, told after.
    """
    weights = empty_weights(config, dtype, device)
    wanted = targets(config, weights)
    _check(checkpoint, wanted, config)
    done = 0
    progress(0, checkpoint.size_bytes)
    for file, names in _reading_order(checkpoint, wanted):
        with GgufReader(file, dtype) if file.suffix == GGUF_SUFFIX else _open(file) as reader:
            for name in names:
                if name in wanted:
                    wanted[name].fill(reader.get_tensor(name))
                done += checkpoint.tensors[name].size_bytes
                progress(done, checkpoint.size_bytes)
    _check_tied(checkpoint, config)
    return weights


def _reading_order(checkpoint: Checkpoint, wanted: dict[str, Target]) -> list[tuple[Path, list[str]]]:
    """Files, and of each the tensors; scales follow all that they multiply, in a second round."""
    by_file: dict[tuple[bool, Path], list[str]] = {}
    for name, header in checkpoint.tensors.items():
        is_scale = name in wanted and wanted[name].is_scale
        by_file.setdefault((is_scale, header.file), []).append(name)
    return [(file, names) for (_, file), names in sorted(by_file.items())]


def _check(checkpoint: Checkpoint, wanted: dict[str, Target], config: ModelConfig) -> None:
    missing = sorted(wanted.keys() - checkpoint.tensors.keys())
    if missing:
        raise _bad(f"{len(missing)} tensors are missing: {_named(missing)}.")
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    unexpected = sorted(
        name for name in checkpoint.tensors.keys() - wanted.keys() - tied if not name.endswith(IGNORED_SUFFIXES)
    )
    if unexpected:
        raise _bad(f"{len(unexpected)} tensors are not this architecture's: {_named(unexpected)}.")
    for name, target in wanted.items():
        header = checkpoint.tensors[name]
        if header.shape != target.shape:
            raise _bad(f"{name} has the shape {list(header.shape)}, config.json asks for {list(target.shape)}.")
        if (header.format == BYTES) != target.is_packed:
            raise _bad(f"{name} is stored as {header.format}, which is not the format config.json says.")


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """A tied model may carry its head as well, but only as the same numbers."""
    head = checkpoint.tensors.get("lm_head.weight")
    if not config.tie_embeddings or head is None:
        return
    with _open(head.file) as head_file, _open(checkpoint.tensors["model.embed_tokens.weight"].file) as embedding_file:
        same = torch.equal(
            head_file.get_tensor("lm_head.weight"), embedding_file.get_tensor("model.embed_tokens.weight")
        )
    if not same:
        raise _bad("tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight.")


def _listed_tensors(directory: Path) -> dict[str, Path]:
    """The index's tensors and their files; empty when the directory has the single file instead."""
    index_file = directory / INDEX_FILE
    if (directory / SINGLE_FILE).exists():
        return {}
    if not index_file.exists():
        others = sorted(path.name for path in directory.glob("*.safetensors")) + sorted(
            path.name for path in directory.glob("*.bin")
        )
        near = f"; it holds {_named(others)}" if others else ""
        raise _bad(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{near}.")
    try:
        weight_map = json.loads(index_file.read_bytes())["weight_map"]
        listed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _bad(f"{INDEX_FILE} is not an index with a weight_map ({error}).") from error
    for file in set(listed.values()):
        # A plain name: an index may not lead out of its directory.
        if file != Path(file).name or file in ("", ".", "..") or "\\" in file or not file.endswith(".safetensors"):
            raise _bad(f"{INDEX_FILE} names {file!r}, which is not a safetensors file of its own directory.")
    if not listed:
        raise _bad(f"{INDEX_FILE} lists no tensors.")
    return {name: directory / file for name, file in listed.items()}


def _open(file: Path) -> Any:  # safetensors ships no types
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise _bad(f"{file} is missing.") from error
    except (SafetensorError, OSError) as error:
        raise _bad(f"{file} is not a whole safetensors file ({error}).") from error


def _header(reader: Any, name: str, file: Path) -> TensorHeader:
    part = reader.get_slice(name)
    shape, number_format = tuple(part.get_shape()), str(part.get_dtype())
    is_packed = number_format == BYTES and name.endswith(PACKED_SUFFIXES)
    if number_format not in FLOAT_BYTES and not is_packed and not name.endswith(IGNORED_SUFFIXES):
        raise _bad(f"{name} is stored as {number_format}; supported are {', '.join(FLOAT_BYTES)}.")
    size_bytes = FLOAT_BYTES.get(number_format, int(is_packed)) * int(torch.Size(shape).numel())
    return TensorHeader(file, shape, number_format, size_bytes)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(cause, "download the model's directory again, or name another with --model.")
