"""A model directory's weights as one GGUF file, the same numbers: what llama.cpp is given by bench/peers.py.

For the dense families of bench/make_model.py with a byte-level BPE tokenizer. Matrices stay bfloat16; vectors become
float32, as llama.cpp wants them. Tensor by tensor, so memory stays bounded. Source: llama.cpp's conversion scripts:
Llama's q and k are reordered for its RoPE, Qwen's are not.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gpu.checkpoint import Checkpoint, open_checkpoint
from gpu.parameters import interleave_halves

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
REORDERED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class CannotConvert(Exception):
    """Not a model that this writes, or the package `gguf` is missing."""


def write_gguf(directory: Path, path: Path) -> None:
    """
    Raises:
        CannotConvert: the model, or the package gguf.
        BadCheckpoint, OSError: the files.
    """
    try:
        import gguf
    except ImportError as error:
        raise CannotConvert("the package gguf is not installed: pip install gguf") from error
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise CannotConvert(f"{config['architectures'][0]} is none of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(None, architecture)
    _add_shape(writer, config, gguf)
    _add_tokenizer(writer, directory, config, gguf)
    checkpoint = open_checkpoint(directory)
    names = _gguf_names(checkpoint, architecture, config["num_hidden_layers"], gguf)
    for name, header in checkpoint.tensors.items():
        number_type, width = _number_type(header.shape, gguf)
        # a row's bytes, where the shape is that of numbers: how the package takes formats that numpy lacks
        shape = (*header.shape[:-1], header.shape[-1] * width)
        size_bytes = int(torch.Size(shape).numel())
        writer.add_tensor_info(names[name], shape, _uint8(), size_bytes, number_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in checkpoint.tensors:
        writer.write_tensor_data(_tensor_bytes(checkpoint, name, config, architecture))
    writer.close()


def _add_shape(writer: Any, config: Mapping[str, Any], gguf: Any) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config.get("rope_scaling"):
        raise CannotConvert(f"rope_scaling is not written: {config['rope_scaling']}")


def _add_tokenizer(writer: Any, directory: Path, config: Mapping[str, Any], gguf: Any) -> None:
    fields = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = fields["model"]["vocab"]
    added = {entry["id"]: entry["content"] for entry in fields["added_tokens"]}
    by_id = {number: token for token, number in vocab.items()} | added
    if len(by_id) != config["vocab_size"]:
        raise CannotConvert(f"the tokenizer has {len(by_id)} ids, the model {config['vocab_size']}")
    ids = range(len(by_id))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id[number] for number in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if number in added else gguf.TokenType.NORMAL for number in ids])
    writer.add_token_merges([" ".join(merge) for merge in fields["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text(encoding="utf-8"))


def _gguf_names(checkpoint: Checkpoint, architecture: str, num_layers: int, gguf: Any) -> dict[str, str]:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    mapping = gguf.get_tensor_name_map(kinds[architecture], num_layers)
    return {name: mapping.get_name(name, try_suffixes=(".weight", ".bias")) for name in checkpoint.tensors}


def _number_type(shape: Sequence[int], gguf: Any) -> tuple[Any, int]:
    """Format, and bytes of a number."""
    types = gguf.GGMLQuantizationType
    return (types.BF16, 2) if len(shape) > 1 else (types.F32, 4)


def _uint8() -> Any:
    return torch.empty(0, dtype=torch.uint8).numpy().dtype


def _tensor_bytes(checkpoint: Checkpoint, name: str, config: Mapping[str, Any], architecture: str) -> Any:
    with safe_open(checkpoint.tensors[name].file, framework="pt") as reader:
        tensor = reader.get_tensor(name)
    if architecture == "llama" and name.endswith(REORDERED):
        num_heads = config["num_attention_heads"]
        tensor = interleave_halves(tensor, config.get("head_dim") or config["hidden_size"] // num_heads)
    tensor = tensor.to(torch.bfloat16 if tensor.dim() > 1 else torch.float32).contiguous()
    return tensor.view(torch.uint8).numpy()
