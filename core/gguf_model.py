"""Translates a GGUF file to Hugging Face's terms: config.json's fields, the names of tensors, the tokenizer.

Any thread. Source: llama.cpp, conversion/*.py (what it writes), src/models/*.cpp (what it computes where a file is
silent) and src/llama-vocab.cpp (names of pre-tokenizers, defaults); the tokenizers that models came with.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

from core.errors import BadCheckpoint, UnsupportedModel
from core.families import GGUF_FAMILIES, GgufFamily, find_family
from core.gguf import GgufFile, GgufTensor
from core.tokenizer import METASPACE

ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling: the divisor of each frequency
# Of every Llama 3.1 to 3.3; they differ in `factor`, which is the last divisor
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MOST_DRAFT_LAYERS = 64
SCORINGS = ("softmax", "sigmoid")  # expert_gating_func, from 1 on
_TOLERANCE = 1e-4  # relative; the factors were computed in float32

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Of a layer that predicts later tokens, beside what every layer has
_DRAFT_NAMES = {
    f"nextn.{name}.weight": f"{own}.weight"
    for name, own in {
        **{name: name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"shared_head_{name}": f"shared_head.{name}" for name in ("norm", "head")},
    }.items()
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# config.json field -> metadata key, after the architecture's name: required ones, and optional ones
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
    """Fields of config.json and of generation_config.json -> the metadata keys that they are read from."""
    family = find_family(metadata)
    fields = {**_NEEDED, **_OPTIONAL, **({} if family is None else family.fields)}
    prefix = metadata.get("general.architecture")
    return {
        **{name: f"{prefix}.{key}" for name, key in fields.items()},
        **{name: f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id")},
        **{name: key for key, name in _SAMPLING.items()},
    }


def hugging_face_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """The file's tensors by their names in a Hugging Face checkpoint; an unknown tensor keeps its name.

    A tensor that holds all experts becomes one tensor per expert.

    Raises:
        UnsupportedModel: the architecture is not supported.
    """
    family, drafts = _family(file), _draft_layers(file.metadata)
    found: dict[str, GgufTensor] = {}
    for name, stored in file.tensors.items():
        match, tensor = _LAYER_NAME.fullmatch(name), replace(stored, shape=_shape(name, stored.shape))
        _, index, within = (*name.split(".", 2), "", "")[:3]
        if name == ROPE_FACTORS:
            continue
        if match is not None and match[2] in family.expert_names and len(tensor.shape) == 3:
            stem = f"model.layers.{match[1]}.{family.expert_names[match[2]]}.{match[3]}"
            num_experts, *shape = tensor.shape
            size = tensor.size_bytes // max(1, num_experts)  # of whole rows of blocks
            for number in range(num_experts):
                offset = tensor.offset + number * size
                found[stem.format(number)] = GgufTensor(tuple(shape), tensor.format, offset, size)
        elif within in family.whole_names:
            found[f"model.layers.{index}.{family.whole_names[within]}"] = tensor
        elif match is not None and match[2] in family.layer_names:
            found[f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"] = tensor
        elif name.startswith("blk.") and index in drafts:
            found[f"model.layers.{index}.{_DRAFT_NAMES.get(within, within)}"] = tensor
        else:
            name = _NAMES.get(name, name)
            for usual, own in family.family.renamed:
                name = name.replace(usual, own)
            found[name] = tensor
    return found


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """What Hugging Face's tensor has; a file leaves out dimensions of 1, or has more of them."""
    kind = (*name.split("."), "", "", "")[2]
    if kind == "ffn_gate_inp_shexp" and len(shape) == 1:
        return 1, *shape
    if kind == "ssm_conv1d" and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (math.prod(shape),) if kind in ("ssm_a", "ssm_d", "ssm_norm") else shape


def _draft_layers(metadata: Mapping[str, Any]) -> set[str]:
    """Numbers of the layers that predict later tokens, which count among the others, behind them."""
    prefix = metadata["general.architecture"]
    end, count = (metadata.get(f"{prefix}.{key}", 0) for key in ("block_count", "nextn_predict_layers"))
    if not (isinstance(end, int) and isinstance(count, int) and 0 <= count <= MOST_DRAFT_LAYERS and count < end):
        return set()  # config_of refuses it where it is not 0
    return {str(index) for index in range(end - count, end)}


def num_turned_heads(name: str, metadata: Mapping[str, Any]) -> int | None:
    """Heads of a tensor whose rows llama.cpp has reordered (rotary pairs side by side); None: it has not.

    Args:
        name: Hugging Face's.
    """
    family = find_family(metadata)
    if family is None or not family.are_heads_turned:
        return None
    prefix = metadata["general.architecture"]
    heads = metadata.get(f"{prefix}.attention.head_count")
    if ".q_proj." in name:
        return heads
    return _common(metadata.get(f"{prefix}.attention.head_count_kv", heads)) if ".k_proj." in name else None


def _common(value: Any) -> Any:
    """Of a field with a number for each layer, 0 where the layer has no such part; a list where they differ."""
    found = [one for one in value if one != 0] if isinstance(value, list) else []
    return found[0] if found and found.count(found[0]) == len(found) else value


def is_decay(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the tensor is a logarithm, of which GGUF stores the exponential, negated. name: Hugging Face's."""
    family = find_family(metadata)
    return family is not None and bool(family.whole_names) and name.endswith(".A_log")


def is_norm_shifted(name: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the tensor is a norm of offsets from 1, which GGUF stores with 1 added. name: Hugging Face's."""
    family = find_family(metadata)
    return family is not None and family.family.has_norm_offset and name.endswith("norm.weight")


def config_of(file: GgufFile, rope_factors: tuple[float, ...] | None) -> dict[str, Any]:
    """The equivalent config.json.

    Args:
        rope_factors: the numbers of ROPE_FACTORS, if the file has it.

    Raises:
        UnsupportedModel: the architecture, or a field that would change the output, is not computed here.
        BadCheckpoint: a field or a tensor that every model has is missing.
    """
    family, prefix = _family(file), file.metadata["general.architecture"]
    fields = {key.removeprefix(f"{prefix}."): value for key, value in file.metadata.items()}
    head_dim, num_draft_layers = _head_dim(fields, family), len(_draft_layers(file.metadata))
    _refuse_output_changing(fields, family, head_dim, num_draft_layers)
    config = {
        "architectures": [family.family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(file),
        **{name: _common(_need(fields, key)) for name, key in _NEEDED.items()},
        "num_hidden_layers": _num_layers(file, fields) - num_draft_layers,
        "num_nextn_predict_layers": num_draft_layers,
        "num_key_value_heads": _common(fields.get("attention.head_count_kv", fields["attention.head_count"])),
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
    own = {usual: name for name, usual in family.family.aliases.items()}
    return {own.get(name, name): value for name, value in config.items() if value is not None}


def _head_dim(fields: Mapping[str, Any], family: GgufFamily) -> int | None:
    """Phi-3 and GLM rotate a part of a head, and their files may leave out a head's size."""
    if family.family.has_partial_rope and "attention.key_length" not in fields:
        return _count(fields, "embedding_length") // _count(fields, "attention.head_count")
    found: int | None = fields.get("attention.key_length", fields.get("rope.dimension_count"))
    return found


def _family_fields(
    file: GgufFile, family: GgufFamily, fields: Mapping[str, Any], head_dim: int | None
) -> dict[str, Any]:
    """Fields that an architecture derives from several keys."""
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
    if family.family.has_partial_rope:
        found["partial_rotary_factor"] = _count(fields, "rope.dimension_count") / (head_dim or 1)
    if family.family.qk_norm_field:
        found[family.family.qk_norm_field] = "blk.0.attn_q_norm.weight" in file.tensors
    if family.family.recurrence:
        found |= _space_fields(file, family, fields)
    biased = {"qkv": "attn_q", "output": "attn_output", "mlp": "ffn_down"}
    for name, parts in family.family.biases.items():
        if name:
            found[name] = f"blk.0.{biased[parts[-1]]}.bias" in file.tensors
    return found


def _space_fields(file: GgufFile, family: GgufFamily, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of models with state spaces, whose layers differ in what they have."""

    def of_layers(name: str) -> list[Any]:
        value, num_layers = fields.get(name), fields["block_count"]
        num_own = num_layers - len(_draft_layers(file.metadata))
        if isinstance(value, list) and len(value) != num_layers:
            raise _bad(f"{name} has {len(value)} numbers for {num_layers} layers")
        return value[:num_own] if isinstance(value, list) else [value] * num_own

    ends = {kind: f".{kind}.bias" for kind in ("ssm_in", "ssm_conv1d")}
    has_bias = {kind: any(name.endswith(end) for name in file.tensors) for kind, end in ends.items()}
    found: dict[str, Any] = {"mamba_proj_bias": has_bias["ssm_in"], "mamba_conv_bias": has_bias["ssm_conv1d"]}
    found["mamba_d_head"] = _count(fields, "ssm.inner_size") // _count(fields, "ssm.time_step_rank")
    if family.family.has_parallel_mixers:
        return {**found, "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in file.tensors)}
    attending, mlps = of_layers("attention.head_count_kv"), of_layers("feed_forward_length")
    if family.family.is_of_blocks:
        mlp = "moe" if fields.get("expert_count") else "mlp"
        layers = zip(attending, mlps, strict=True)
        kinds = ["full_attention" if kv else mlp if inner else "linear_attention" for kv, inner in layers]
        return {**found, "layer_types": kinds}
    kinds = ["full_attention" if num_kv_heads else "linear_attention" for num_kv_heads in attending]
    kind = "rope" if fields.get("rope.scaling.finetuned") else "nope"
    own = {"num_local_experts": fields.get("expert_count", 0), "position_embedding_type": kind}
    return {**found, **own, "layer_types": kinds}


def generation_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent generation_config.json: the file's recommended sampling, if any."""
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
    """Checked against the number of tensors, so that the file bounds whatever is made per layer."""
    num_layers = _need(fields, "block_count")
    if not isinstance(num_layers, int) or num_layers > len(file.tensors):
        raise _bad(f"{fields['general.architecture']}.block_count is {num_layers!r}, of {len(file.tensors)} tensors")
    return num_layers


def _refuse_output_changing(
    fields: Mapping[str, Any], family: GgufFamily, key_length: int | None, num_draft_layers: int
) -> None:
    """Refuse values of optional fields that would change the computation."""
    experts = family.family.experts
    holds: dict[str, Callable[[Any], bool]] = {
        "expert_count": lambda value: value == 0,
        "rope.scaling.type": lambda value: value in ("none", "linear"),
        "rope.dimension_count": lambda value: (
            value == key_length or family.family.has_partial_rope or family.family.rotates == "none"
        ),
        "moe_latent_size": lambda value: value == 0,
        "nextn_predict_layers": lambda value: value == num_draft_layers,
        "attention.value_length": lambda value: value == key_length,
        "attention.sliding_window": lambda value: value == 0,
        "attention.sliding_window_pattern": lambda value: not value,
        "expert_weights_scale": lambda value: value in (0, 1),
        "expert_shared_count": lambda value: value == 0,
        "expert_gating_func": lambda value: experts is None or value in (0, SCORINGS.index(experts.scoring) + 1),
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
    # llama.cpp's load_hparams: a factor without a type means linear; scale_linear is its older name
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    kind = fields.get("rope.scaling.type", None if factor is None else "linear")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _need(fields, "rope.scaling.factor") if factor is None else factor}
    return None


def _llama3_scaling(factors: tuple[float, ...], theta: float, head_dim: int | None) -> dict[str, Any]:
    """Llama 3's scaling parameters, checked against every factor."""
    width = 2 * len(factors)
    expected = [_llama3_factor(theta ** (2 * index / width), factors[-1]) for index in range(len(factors))]
    is_llama3 = all(map(lambda one, other: math.isclose(one, other, rel_tol=_TOLERANCE), expected, factors))
    if head_dim not in (width, None) or not is_llama3:
        raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} is not Llama 3's scaling.", "use a model without it.")
    return {"rope_type": "llama3", "factor": factors[-1], **_LLAMA3}


def _llama3_factor(tokens_per_radian: float, factor: float) -> float:
    """The divisor of a frequency. Source: Llama 3.1's reference code, apply_scaling."""
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


Item = TypeVar("Item")

# Token types: gguf.md, tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos", "eot", "eom")
# Control tokens that always end a turn: llama.cpp's special_eog_ids
_END_TOKENS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  (its own bars)
}

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
# Mistral's: a word's capitals, then its small letters
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_SPLIT = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# tokenizer.ggml.pre -> the patterns that split a text before BPE, in order
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT_SPLITS,
    "gpt-2": (_GPT2_SPLIT,),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "dbrx": (_LLAMA3_SPLIT,),
    "smaug-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "tekken": (_TEKKEN_SPLIT,),
    "glm4": (_LLAMA3_SPLIT,),
    "seed-coder": (_SEED_SPLIT,),
}
_KEEPS_WHOLE = ("llama-bpe", "tekken")  # what is a token as it is needs no merges; and a text begins with BOS
_ALIASES = {
    "chatglm-bpe": "glm4",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "pixtral": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "olmo": "gpt-2",
    "granite-docling": "gpt-2",
    "refact": "smollm",
}


def tokenizer_files(metadata: Mapping[str, Any], vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The contents of tokenizer.json and of tokenizer_config.json.

    Args:
        vocab_size: rows of the embedding, which limit the tokens.

    Raises:
        UnsupportedModel: the tokenizer or its pre-tokenizer is not supported.
        BadCheckpoint: its parts are missing or contradict each other.
    """
    tokens, types = _vocabulary(metadata, vocab_size)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            pre = _pre_tokenizer(metadata)
            content = _byte_level(metadata, tokens, types, pre)
            add_bos = pre in _KEEPS_WHOLE
        case "llama":
            content = _sentencepiece(metadata, tokens, types)
            add_bos = True
        case other:
            raise UnsupportedModel(
                f"GGUF tokenizer {other!r} is not supported.",
                "use a model with one of: gpt2 (BPE), llama (SentencePiece).",
            )
    config = _tokenizer_config(metadata, tokens)
    config["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    config["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    return json.dumps(content), config


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: those that the metadata names, and control tokens that can mean nothing else.

    Raises:
        BadCheckpoint: it names a token that does not exist.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    named = [_named_id(metadata, key, len(tokens)) for key in _END_KEYS]
    by_name = [
        token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _END_TOKENS
    ]
    return list(dict.fromkeys([*(token_id for token_id in named if token_id is not None), *by_name]))


def _named_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """The id that the metadata gives a named token."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < num_tokens):
        raise _bad_tokenizer(f"{key} is {token_id!r}, of {num_tokens} tokens")
    return token_id


def _vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _is_list_of(tokens, str) or not tokens:
        raise _bad_tokenizer("tokenizer.ggml.tokens is not a list of texts")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not _is_list_of(types, int) or len(types) != len(tokens):
        raise _bad_tokenizer("tokenizer.ggml.token_type does not give each token's")
    if len(tokens) > vocab_size:
        raise _bad_tokenizer(f"it has {len(tokens)} tokens, the embedding {vocab_size} rows")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, number in Counter(tokens).items() if number > 1)
        raise _bad_tokenizer(f"the token {twice!r} is there twice")
    return tokens, types


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    name = metadata.get("tokenizer.ggml.pre", "default")
    known = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known not in PRE_TOKENIZERS:
        supported = ", ".join([*PRE_TOKENIZERS, *_ALIASES])
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {name!r} is not supported.",
            f"use a file with one of: {supported}; or the model's Hugging Face directory.",
        )
    return str(known)


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], pre: str) -> dict[str, Any]:
    """A byte-level BPE, as GPT-2's. Unused tokens (padding of the vocabulary) are left out."""
    merges = metadata.get("tokenizer.ggml.merges")
    if not _is_list_of(merges, str):
        raise _bad_tokenizer("tokenizer.ggml.merges is not a list of texts")
    vocab = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] != UNUSED}
    pairs = [_merge(merge, vocab) for merge in merges]
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocab, types),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": pairs,
            "ignore_merges": pre in _KEEPS_WHOLE,
        },
    }


def _merge(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    space = merge.find(" ", 1)
    left, right = merge[:space], merge[space + 1 :]
    if space < 0 or left not in vocab or right not in vocab or left + right not in vocab:
        raise _bad_tokenizer(f"the merge {merge!r} is not of two tokens to a third")
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """A SentencePiece BPE, as Llama 2's; its scores become merges as in transformers."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not _is_list_of(scores, float) or len(scores) != len(tokens):
        raise _bad_tokenizer("tokenizer.ggml.scores does not give each token's")
    pieces = [  # added tokens are searched for in the text itself, which has spaces
        token.replace(METASPACE, " ") if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    mergeable = {piece: scores[token_id] for piece, token_id in vocab.items() if types[token_id] in (NORMAL, UNUSED)}
    unknown = _named_id(metadata, "unknown", len(tokens)) or 0
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
    unspaces = {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": METASPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocab, types),
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [unspaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": _merges_by_score(vocab, mergeable),
            "unk_token": pieces[unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
        },
    }


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to compose a piece of two others, the best pieces first.

    Source: transformers, convert_slow_tokenizer.py, generate_merges.
    """
    found = []
    for piece, score in scores.items():
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        ways = [(left, right) for left, right in splits if left in scores and right in scores]
        found += [(score, *way) for way in sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _added_tokens(vocab: Mapping[str, int], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are searched for in the text before it is split."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": token, **plain, "special": types[token_id] != USER_DEFINED}
        for token, token_id in vocab.items()
        if types[token_id] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, key in _NAMED_TOKENS.items():
        if (token_id := _named_id(metadata, key, len(tokens))) is not None:
            config[name] = tokens[token_id]
    named = [key for key in metadata if key.startswith("tokenizer.chat_template.")]
    default = metadata.get("tokenizer.chat_template")
    if named:
        sources = {key.removeprefix("tokenizer.chat_template."): metadata[key] for key in named}
        sources |= {} if default is None else {"default": default}
        config["chat_template"] = [{"name": name, "template": source} for name, source in sources.items()]
    elif default is not None:
        config["chat_template"] = default
    return config


def _is_list_of(value: Any, kind: type[Item]) -> TypeGuard[list[Item]]:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _bad_tokenizer(cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"The GGUF file's tokenizer is broken: {cause}.", "download it again, or name another.")
