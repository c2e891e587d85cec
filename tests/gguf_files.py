"""GGUF files as llama.cpp's converter makes them, from Hugging Face directories and tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from core.gguf import GgufFile, parse_gguf

Q = gguf.GGMLQuantizationType
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    directory: Path,
    file: Path,
    quantisation: Q = Q.F32,
    metadata: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray | None = None,
) -> Path:
    """Convert a directory's config.json and safetensors.

    Args:
        quantisation: of the matrices whose rows come in its blocks; vectors stay F32, as in llama.cpp.
        metadata: fields beside the architecture's.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, config)
    ends = {f"tokenizer.ggml.{key}": config.get(key) for key in ("bos_token_id", "eos_token_id")}
    for key, value in {**{key: end for key, end in ends.items() if end is not None}, **(metadata or {})}.items():
        _write_field(writer, key, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        rows = tensor.float().numpy()
        if architecture == "llama":
            heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            rows = _permute(rows, heads) if "q_proj" in name or "k_proj" in name else rows
        _write_tensor(writer, _name(name), rows, quantisation)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def parsed(file: Path) -> GgufFile:
    return parse_gguf(memoryview(file.read_bytes()), file.name)


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """The tokenizer of GPT-2's kind as metadata."""
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        **_tokens(tokenizer),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece_metadata(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The tokenizer of Llama 2's kind as metadata; the earlier a piece was made, the better its score."""
    found = _tokens(tokenizer)
    return {
        "tokenizer.ggml.model": "llama",
        **found,
        "tokenizer.ggml.scores": [-float(token_id) for token_id in range(tokenizer.get_vocab_size())],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def _tokens(tokenizer: Tokenizer) -> dict[str, Any]:
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    assert [token_id for _, token_id in by_id] == list(range(len(by_id)))
    added = tokenizer.get_added_tokens_decoder()
    types = [
        BYTE
        if token.startswith("<0x")
        else NORMAL
        if token_id not in added
        else CONTROL
        if added[token_id].special
        else USER_DEFINED
        for token, token_id in by_id
    ]
    return {"tokenizer.ggml.tokens": [token for token, _ in by_id], "tokenizer.ggml.token_type": types}


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(head_dim)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _write_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _write_tensor(writer: gguf.GGUFWriter, name: str, rows: np.ndarray, quantisation: Q) -> None:
    block_elements = gguf.GGML_QUANT_SIZES[quantisation][0]
    if rows.ndim == 1 or rows.shape[-1] % block_elements:
        writer.add_tensor(name, rows)
    else:
        writer.add_tensor(name, gguf.quantize(rows, quantisation), raw_dtype=quantisation)


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.permute."""
    parted = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(parted.swapaxes(1, 2).reshape(rows.shape))


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def quantised_numbers(tensor: torch.Tensor, quantisation: Q) -> torch.Tensor:
    """What is left of a tensor once it was stored so."""
    if tensor.ndim == 1 or tensor.shape[-1] % gguf.GGML_QUANT_SIZES[quantisation][0]:
        return tensor.float()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), quantisation), quantisation))
