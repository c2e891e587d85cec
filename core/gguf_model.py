"""A GGUF file's model in Hugging Face's words: config.json's fields, and the names of tensors. Any thread.

Source: llama.cpp's convert_hf_to_gguf.py, read backwards.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import BadCheckpoint, UnsupportedModel
from core.gguf import GgufFile, GgufTensor
from core.gguf_families import GGUF_FAMILIES, GgufFamily, find_family

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, spelled out: what divides each frequency
# Of every Llama 3.1 to 3.3; they differ in `factor`, which the lowest frequency shows.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_TOLERANCE = 1e-4  # relative; the factors were computed in float32

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# config.json's fields that every file says -> the metadata's, after the architecture's name; and those that it may say
_NEEDED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "partial_rotary_factor": "rope.dimension_count",
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def keys_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Fields of config.json and of generation_config.json -> the metadata's keys that they are read from."""
    family = find_family(metadata)
    fields = {**_NEEDED, **_OPTIONAL, **({} if family is None else family.fields)}
    prefix = metadata.get("general.architecture")
    return {
        **{name: f"{prefix}.{key}" for name, key in fields.items()},
        **{name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")},
        **{name: key for key, name in _SAMPLING.items()},
    }


def hugging_face_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """The file's tensors by their names in a Hugging Face checkpoint; one that is not known here keeps its own.

    Of a tensor that holds all experts one after the other each becomes a tensor.

    Raises:
        UnsupportedModel: an architecture that is not read.
    """
    family = _family(file)
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        match = _LAYER_NAME.fullmatch(name)
        if name == ROPE_FACTORS:
            continue
        if match is not None and match[2] in family.expert_names and len(tensor.shape) == 3:
            stem = f"model.layers.{match[1]}.{family.expert_names[match[2]]}.{match[3]}"
            found |= {stem.format(number): part for number, part in enumerate(_parts(tensor))}
        elif match is not None and match[2] in family.layer_names:
            found[f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"] = tensor
        else:
            found[_NAMES.get(name, name)] = tensor
    return found


def _parts(tensor: GgufTensor) -> list[GgufTensor]:
    """Along the first dimension; whole rows of blocks each."""
    count, *shape = tensor.shape
    size = tensor.size_bytes // max(1, count)
    return [GgufTensor(tuple(shape), tensor.format, tensor.offset + number * size, size) for number in range(count)]


def num_turned_heads(name: str, metadata: Mapping[str, Any]) -> int | None:
    """Heads of a tensor whose rows lie as llama.cpp turns them (pairs side by side); None: rows are as they were.

    Args:
        name: as Hugging Face has it.
    """
    family = find_family(metadata)
    if family is None or not family.are_heads_turned:
        return None
    prefix = metadata["general.architecture"]
    heads = metadata.get(f"{prefix}.attention.head_count")
    if ".q_proj." in name:
        return heads
    return metadata.get(f"{prefix}.attention.head_count_kv", heads) if ".k_proj." in name else None


def is_norm_shifted(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the tensor is stored plus 1. name: as Hugging Face has it."""
    family = find_family(metadata)
    return family is not None and family.has_norm_offset and name.endswith("norm.weight")


def config_of(file: GgufFile, rope_factors: tuple[float, ...] | None) -> dict[str, Any]:
    """What config.json would say.

    Args:
        rope_factors: the numbers of ROPE_FACTORS, where the file has it.

    Raises:
        UnsupportedModel: an architecture, or a field that would change the output, that is not computed here.
        BadCheckpoint: a field or a tensor that every model has is missing.
    """
    family, prefix = _family(file), file.metadata["general.architecture"]
    fields = {key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items()}
    head_dim = _head_dim(fields, family)
    _refuse_output_changing(fields, family, head_dim)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(file),
        **{name: _need(fields, key) for name, key in _NEEDED.items()},
        "num_hidden_layers": _num_layers(file, fields),
        "num_key_value_heads": fields.get("attention.head_count_kv", fields["attention.head_count"]),
        "head_dim": head_dim,
        "rope_theta": fields.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(fields, rope_factors, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        **family.constants,
        **{name: fields.get(key) for name, key in family.fields.items()},
        **_family_fields(file, family, fields, head_dim),
    }
    return {name: value for name, value in config.items() if value is not None}


def _head_dim(fields: Mapping[str, Any], family: GgufFamily) -> int | None:
    """Phi-3's rope turns a part of a head, and its files do not say a head's size."""
    if family.model_type == "phi3" and "attention.key_length" not in fields:
        return _count(fields, "embedding_length") // _count(fields, "attention.head_count")
    found: int | None = fields.get("attention.key_length", fields.get("rope.dimension_count"))
    return found


def _family_fields(
    file: GgufFile, family: GgufFamily, fields: Mapping[str, Any], head_dim: int | None
) -> dict[str, Any]:
    """What an architecture's computation takes from elsewhere."""
    num_layers = fields["block_count"]
    found: dict[str, Any] = {}
    if family.whole_width_layers is not None:
        found["query_pre_attn_scalar"] = head_dim
    if family.whole_width_layers == num_layers:
        per_head = _count(fields, "embedding_length") // _count(fields, "attention.head_count")
        found["query_pre_attn_scalar"] = per_head
    if family.model_type == "gemma3_text" and not fields.get("attention.sliding_window"):
        found |= {"sliding_window": None, "sliding_window_pattern": 1}  # every layer sees all
    if family.model_type == "phi3":
        found["sliding_window"] = fields.get("attention.sliding_window") or None
        found["partial_rotary_factor"] = _count(fields, "rope.dimension_count") / (head_dim or 1)
    if "blk.0.attn_output.bias" in file.tensors:
        found["attention_bias"] = True
    return found


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say of sampling, where the file recommends anything."""
    return {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}


def _family(file: GgufFile) -> GgufFamily:
    family = find_family(file.metadata)
    if family is None:
        name = file.metadata.get("general.architecture")
        known = f"{', '.join(GGUF_FAMILIES)}, with or without experts in llama"
        raise UnsupportedModel(f"GGUF architecture {name!r} is not supported.", f"use a model of one of: {known}.")
    longrope = [name for name in file.tensors if name.startswith("rope_factors_")]
    if longrope:
        raise UnsupportedModel(
            f"GGUF: longrope ({longrope[0]}) is not supported.", "use a file without it, or the model's safetensors."
        )
    return family


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _bad("token_embd.weight is missing")
    return embedding.shape[0]


def _num_layers(file: GgufFile, fields: Mapping[str, Any]) -> int:
    """Held against the tensors that are there: whatever is made per layer is bounded by the file."""
    num_layers = _need(fields, "block_count")
    if not isinstance(num_layers, int) or num_layers > len(file.tensors):
        raise _bad(f"{fields['general.architecture']}.block_count is {num_layers!r}, of {len(file.tensors)} tensors")
    return num_layers


def _refuse_output_changing(fields: Mapping[str, Any], family: GgufFamily, key_length: int | None) -> None:
    """Fields of an architecture under which its models are computed in another way than here."""
    holds: dict[str, Callable[[Any], bool]] = {
        "expert_count": lambda value: value == 0,
        "rope.scaling.type": lambda value: value in ("none", "linear"),
        "rope.dimension_count": lambda value: value == key_length or family.model_type == "phi3",
        "attention.value_length": lambda value: value == key_length,
        "attention.sliding_window": lambda value: value == 0,
        "attention.sliding_window_pattern": lambda value: not value,
        "expert_weights_scale": lambda value: value in (0, 1),
        "expert_shared_count": lambda value: value == 0,
        "attention.clamp_kqv": lambda value: value == 0,
        "attention.causal": bool,
        "use_parallel_residual": lambda value: not value,
        "logit_scale": lambda value: value in (0, 1),
        "embedding_scale": lambda value: value in (0, 1),
        "residual_scale": lambda value: value in (0, 1),
        "attention.scale": lambda value: value == 0,
        "rope.scaling.attn_factor": lambda value: value == 1,
    }
    for name, is_neutral in holds.items():
        if name in fields and name not in family.fields.values() and not is_neutral(fields[name]):
            raise UnsupportedModel(
                f"{fields['general.architecture']}.{name}={fields[name]!r} is not supported.",
                "use a model without it.",
            )


def _rope_scaling(
    fields: Mapping[str, Any], factors: tuple[float, ...] | None, head_dim: int | None
) -> dict[str, Any] | None:
    if factors is not None:
        theta = fields.get("rope.freq_base", 10_000.0)
        if not isinstance(theta, float) or not 0 < theta < math.inf or not 0 < factors[-1] < math.inf:
            raise _bad(f"{ROPE_FACTORS} ends in {factors[-1]!r}, rope.freq_base is {theta!r}")
        return _llama3_scaling(factors, theta, head_dim)
    # Source: llama.cpp's load_hparams: linear is what a factor means without a type; scale_linear is its older name.
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    kind = fields.get("rope.scaling.type", None if factor is None else "linear")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _need(fields, "rope.scaling.factor") if factor is None else factor}
    return None


def _llama3_scaling(factors: tuple[float, ...], theta: float, head_dim: int | None) -> dict[str, Any]:
    """Llama 3's scaling with its parameters back; checked against every one of the factors."""
    width = 2 * len(factors)
    expected = [_llama3_factor(theta ** (2 * index / width), factors[-1]) for index in range(len(factors))]
    is_llama3 = all(map(lambda one, other: math.isclose(one, other, rel_tol=_TOLERANCE), expected, factors))
    if head_dim not in (width, None) or not is_llama3:
        raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} is not Llama 3's scaling.", "use a model without it.")
    return {"rope_type": "llama3", "factor": factors[-1], **_LLAMA3}


def _llama3_factor(tokens_per_radian: float, factor: float) -> float:
    """What divides a frequency. Source: Llama 3.1's reference code, apply_scaling."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * tokens_per_radian)
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / ((1 - kept) / factor + kept)


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise _bad(f"the metadata has no {fields['general.architecture']}.{name}")
    return fields[name]


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = _need(fields, name)
    if not isinstance(value, int) or value < 1:
        raise _bad(f"{fields['general.architecture']}.{name} is {value!r}, which counts nothing")
    return value


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file is not complete: {cause}.", "download it again, or name another.")
