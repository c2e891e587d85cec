"""A GGUF file's model in Hugging Face's words: config.json's fields, and the names of tensors. Any thread.

Source: llama.cpp's convert_hf_to_gguf.py, read backwards.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from core.errors import BadCheckpoint, UnsupportedModel
from core.gguf import GgufFile

# general.architecture -> config.json's model_type and architecture
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hugging_face_name(name: str) -> str:
    """The tensor's name in a Hugging Face checkpoint; one that is not known here stays as it is."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return _NAMES.get(name, name)
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def num_permuted_heads(name: str, metadata: Mapping[str, Any]) -> int | None:
    """Heads of a tensor whose rows lie as llama.cpp turns them (pairs side by side); None: rows are as they were.

    Args:
        name: as Hugging Face has it.
    """
    if metadata.get("general.architecture") != "llama":
        return None
    heads = metadata.get("llama.attention.head_count")
    if ".q_proj." in name:
        return heads
    return metadata.get("llama.attention.head_count_kv", heads) if ".k_proj." in name else None


def config_of(file: GgufFile, rope_factors: tuple[float, ...] | None) -> dict[str, Any]:
    """What config.json would say.

    Args:
        rope_factors: the numbers of ROPE_FACTORS, where the file has it.

    Raises:
        UnsupportedModel: an architecture, or a field that would change the output, that is not computed here.
        BadCheckpoint: a field or a tensor that every model has is missing.
    """
    architecture = _architecture(file)
    fields = {key.removeprefix(f"{architecture}."): value for key, value in file.metadata.items()}
    _refuse_output_changing(fields)
    heads = _need(fields, "attention.head_count")
    head_dim = fields.get("attention.key_length", fields.get("rope.dimension_count"))
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": _vocab_size(file),
        "hidden_size": _need(fields, "embedding_length"),
        "intermediate_size": _need(fields, "feed_forward_length"),
        "num_hidden_layers": _num_layers(file, fields),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _need(fields, "context_length"),
        "rms_norm_eps": _need(fields, "attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(fields, rope_factors, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    return {name: value for name, value in config.items() if value is not None}


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say of sampling, where the file recommends anything."""
    return {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}


def _architecture(file: GgufFile) -> str:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported.", f"use a model of one of: {', '.join(ARCHITECTURES)}."
        )
    return str(name)


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise _bad("token_embd.weight is missing")
    return embedding.shape[0]


def _num_layers(file: GgufFile, fields: Mapping[str, Any]) -> int:
    """Held against the tensors that are there: whatever is made per layer is bounded by the file."""
    num_layers = _need(fields, "block_count")
    if not isinstance(num_layers, int) or num_layers > len(file.tensors):
        raise _bad(f"it has {num_layers!r} layers and {len(file.tensors)} tensors")
    return num_layers


def _refuse_output_changing(fields: Mapping[str, Any]) -> None:
    """Fields of an architecture under which its models are computed in another way than here."""
    key_length = fields.get("attention.key_length", fields.get("rope.dimension_count"))
    holds: dict[str, Callable[[Any], bool]] = {
        "expert_count": lambda value: value == 0,
        "rope.scaling.type": lambda value: value in ("none", "linear"),
        "rope.dimension_count": lambda value: value == key_length,
        "attention.value_length": lambda value: value == key_length,
        "attention.sliding_window": lambda value: value == 0,
        "attention.clamp_kqv": lambda value: value == 0,
        "use_parallel_residual": lambda value: not value,
        "logit_scale": lambda value: value in (0, 1),
        "embedding_scale": lambda value: value in (0, 1),
        "residual_scale": lambda value: value in (0, 1),
        "attention.scale": lambda value: value == 0,
        "rope.scaling.attn_factor": lambda value: value == 1,
    }
    for name, is_neutral in holds.items():
        if name in fields and not is_neutral(fields[name]):
            raise UnsupportedModel(
                f"GGUF: {name}={fields[name]!r} of {fields['general.architecture']} is not supported.",
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
    if fields.get("rope.scaling.type") == "linear":
        return {"rope_type": "linear", "factor": _need(fields, "rope.scaling.factor")}
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
        raise _bad(f"the metadata has no {name}")
    return fields[name]


def _bad(cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file is not complete: {cause}.", "download it again, or name another.")
