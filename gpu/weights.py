"""Safetensors of a Hugging Face directory to the model's fused parameters. Thread: engine (at start).

Reads safetensors only: no pickle, no code from the directory, no file outside it. Every tensor is accounted for:
missing, unexpected and misshaped ones are named.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.config import ModelConfig
from core.errors import BadCheckpoint

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of the formats that convert to ours without loss of meaning
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# A buffer that old Llama checkpoints carry; computed here instead.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
NAMED_AT_MOST = 5  # tensors in one error message

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes total), as loading goes."""


@dataclass(slots=True)
class LayerWeights:
    """One layer. Rows of q and k are reordered within each head: see interleave_halves."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [query + 2 * kv, hidden]
    qkv_bias: Tensor | None  # [query + 2 * kv]
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, query]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


@dataclass(slots=True)
class ModelWeights:
    """All parameters, allocated and not yet filled, or loaded."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]; the embedding itself when tied


@dataclass(frozen=True, slots=True)
class Target:
    """Where one tensor of the checkpoint goes.

    Args:
        into: rows of a parameter, of the checkpoint tensor's shape.
        head_dim: reorder the rows within heads of this size; None: as they are.
    """

    into: Tensor
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    format: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory's tensors, by name; nothing of their data read yet."""

    directory: Path
    tensors: dict[str, TensorHeader] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def interleave_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (first half, second half) to pairs: what RoPE turns lies side by side.

    Scores do not change: q and k are reordered alike. rows: [heads * head_dim, ...], also returned so.
    """
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def empty_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Allocate all parameters."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    qkv = config.query_size + 2 * config.kv_size
    layers = [
        LayerWeights(
            attention_norm=empty(config.hidden_size),
            qkv=empty(qkv, config.hidden_size),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            query_norm=empty(config.head_dim) if config.qk_norm else None,
            key_norm=empty(config.head_dim) if config.qk_norm else None,
            output=empty(config.hidden_size, config.query_size),
            mlp_norm=empty(config.hidden_size),
            gate_up=empty(2 * config.intermediate_size, config.hidden_size),
            down=empty(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    embedding = empty(config.vocab_size, config.hidden_size)
    lm_head = embedding if config.tie_embeddings else empty(config.vocab_size, config.hidden_size)
    return ModelWeights(embedding, layers, empty(config.hidden_size), lm_head)


def targets(config: ModelConfig, weights: ModelWeights) -> dict[str, Target]:
    """The checkpoint's tensor names, and where each goes."""
    found = {
        "model.embed_tokens.weight": Target(weights.embedding),
        "model.norm.weight": Target(weights.norm),
    }
    if not config.tie_embeddings:
        found["lm_head.weight"] = Target(weights.lm_head)
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_targets(config, layer):
            found[f"model.layers.{index}.{name}"] = target
    return found


def _layer_targets(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Target]]:
    sizes = [config.query_size, config.kv_size, config.kv_size]
    head_dims = (config.head_dim, config.head_dim, None)  # RoPE turns q and k, not v
    yield "input_layernorm.weight", Target(layer.attention_norm)
    for name, rows, head_dim in zip("qkv", layer.qkv.split_with_sizes(sizes), head_dims, strict=True):
        yield f"self_attn.{name}_proj.weight", Target(rows, head_dim)
    if layer.qkv_bias is not None:
        for name, rows, head_dim in zip("qkv", layer.qkv_bias.split_with_sizes(sizes), head_dims, strict=True):
            yield f"self_attn.{name}_proj.bias", Target(rows, head_dim)
    if layer.query_norm is not None and layer.key_norm is not None:
        yield "self_attn.q_norm.weight", Target(layer.query_norm, config.head_dim)
        yield "self_attn.k_norm.weight", Target(layer.key_norm, config.head_dim)
    yield "self_attn.o_proj.weight", Target(layer.output)
    yield "post_attention_layernorm.weight", Target(layer.mlp_norm)
    gate, up = layer.gate_up.chunk(2)
    yield "mlp.gate_proj.weight", Target(gate)
    yield "mlp.up_proj.weight", Target(up)
    yield "mlp.down_proj.weight", Target(layer.down)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of a directory's safetensors: names, shapes, formats, sizes.

    Raises:
        BadCheckpoint: no safetensors, a bad index, a file that is missing or malformed, a format that is not a float.
    """
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
    by_file: dict[Path, list[str]] = {}
    for name in checkpoint.tensors:
        by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
    for file, names in by_file.items():
        with _open(file) as reader:
            for name in names:
                if name in wanted:
                    _fill(wanted[name], reader.get_tensor(name))
                done += checkpoint.tensors[name].size_bytes
                progress(done, checkpoint.size_bytes)
    _check_tied(checkpoint, config)
    return weights


def _fill(target: Target, tensor: Tensor) -> None:
    target.into.copy_(tensor if target.head_dim is None else interleave_halves(tensor, target.head_dim))


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
        found, expected = checkpoint.tensors[name].shape, tuple(target.into.shape)
        if found != expected:
            raise _bad(f"{name} has the shape {list(found)}, config.json asks for {list(expected)}.")


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
    if number_format not in FLOAT_BYTES and not name.endswith(IGNORED_SUFFIXES):
        raise _bad(f"{name} is stored as {number_format}; supported are {', '.join(FLOAT_BYTES)}.")
    size_bytes = FLOAT_BYTES.get(number_format, 0) * int(torch.Size(shape).numel())
    return TensorHeader(file, shape, number_format, size_bytes)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(cause, "download the model's directory again, or name another with --model.")
