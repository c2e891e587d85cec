"""A model with random weights, to measure with: `python -m bench.make_model qwen2.5-0.5b DIR`.

Writes a Hugging Face directory: config.json, safetensors (in shards when large), tokenizer.json with a chat template,
generation_config.json. Names and shapes are transformers' own, so that every server reads the same files; `write_gguf`
gives llama.cpp the same numbers. The same preset and seed give the same weights. The vocabularies of the small presets
are smaller than the originals': what is measured is the body.

Special tokens have rows of zeros in the output head: their logit is 0 where the greatest of the others is far above,
so a greedy answer never ends by itself, and all servers generate as many tokens as they are asked for.
"""

import argparse
import itertools
import json
import math
import string
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from core.config_json import parse_model_config
from core.gguf import BLOCKS
from gpu.checkpoint import Checkpoint, open_checkpoint
from gpu.parameters import EMBEDDING, HEAD, empty_weights, interleave_halves

SHARD_BYTES = 1000**3  # one shard at a time is in memory
SCALE = 0.02
BF16_BYTES = 2

Named = tuple[str, tuple[int, ...]]


def _preset(
    architecture: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], **more: Any
) -> dict[str, Any]:
    """A config.json. heads: of queries, of keys and values."""
    usual = {"vocab_size": 32_000, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0}
    common = {"hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0, "dtype": "bfloat16"}
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return {
        **common,
        "use_cache": True,
        "architectures": [architecture],
        **usual,
        **sizes,
        "tie_word_embeddings": True,
        **more,
    }


_QWEN: dict[str, Any] = {"attention_bias": False, "use_sliding_window": False, "head_dim": 128}
QWEN2_05B = _preset("Qwen2ForCausalLM", 896, 4864, 24, (14, 2), model_type="qwen2", use_sliding_window=False)
QWEN2_15B = _preset(
    *("Qwen2ForCausalLM", 1536, 8960, 28, (12, 2)), model_type="qwen2", use_sliding_window=False, vocab_size=151_936
)
_QWEN3 = {**_QWEN, "model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960}
QWEN3_06B = _preset("Qwen3ForCausalLM", 1024, 3072, 28, (16, 8), **_QWEN3)
QWEN3_17B = _preset("Qwen3ForCausalLM", 2048, 6144, 28, (16, 8), **_QWEN3)
MOE_1B = _preset(  # 1.03G parameters, of which a token uses 0.24G: 4 of 32 experts in each layer
    *("Qwen3MoeForCausalLM", 1024, 3072, 18, (16, 4)),
    **{**_QWEN, "model_type": "qwen3_moe", "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4},
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_8B = _preset(
    *("LlamaForCausalLM", 4096, 14_336, 32, (32, 8)),
    model_type="llama",
    vocab_size=128_256,
    head_dim=128,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=False,
    rope_scaling={**_LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    attention_bias=False,
    mlp_bias=False,
)
# Three layers of eighteen see all before a token, the others 512 tokens.
GEMMA3_03B = _preset(
    *("Gemma3ForCausalLM", 640, 2048, 18, (4, 1)),
    model_type="gemma3_text",
    vocab_size=262_144,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=512,
    sliding_window_pattern=6,
    rope_local_base_freq=10_000.0,
)
# One layer of four attends; the others are recurrent.
QWEN35_08B = _preset(
    *("Qwen3_5ForCausalLM", 1024, 3584, 24, (8, 2)),
    model_type="qwen3_5_text",
    vocab_size=151_936,
    head_dim=256,
    full_attention_interval=4,
    partial_rotary_factor=0.25,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
)
LFM2_12B = _preset(
    *("Lfm2ForCausalLM", 2048, 12_288, 16, (32, 8)),
    model_type="lfm2",
    vocab_size=65_536,
    norm_eps=1e-5,
    conv_L_cache=3,
    block_auto_adjust_ff_dim=True,
    block_multiple_of=256,
    block_ffn_dim_multiplier=1.0,
    full_attn_idxs=[2, 5, 8, 10, 12, 14],
)
# Four layers of forty attend; the others are Mamba-2's.
GRANITE4_H_1B = _preset(
    *("GraniteMoeHybridForCausalLM", 1536, 4096, 40, (12, 4)),
    model_type="granitemoehybrid",
    vocab_size=100_352,
    shared_intermediate_size=4096,
    num_local_experts=0,
    layer_types=["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    position_embedding_type="nope",
    mamba_n_heads=48,
    mamba_d_head=64,
    mamba_n_groups=1,
    mamba_d_state=128,
    mamba_d_conv=4,
    mamba_expand=2,
    attention_multiplier=0.0078125,
    embedding_multiplier=12,
    residual_multiplier=0.22,
    logits_scaling=6,
)
PRESETS = {
    "qwen2.5-0.5b": QWEN2_05B,
    "qwen2.5-1.5b": QWEN2_15B,
    "qwen3-0.6b": QWEN3_06B,
    "qwen3-1.7b": QWEN3_17B,
    "moe-1b": MOE_1B,
    "gemma3-0.3b": GEMMA3_03B,
    "qwen3.5-0.8b": QWEN35_08B,
    "lfm2-1.2b": LFM2_12B,
    "granite4-h-1b": GRANITE4_H_1B,
    "llama-8b": LLAMA_8B,
}

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[Named]:
    """Every tensor of a checkpoint of this configuration, by which it is loaded: (name, shape)."""
    _, targets = empty_weights(parse_model_config(dict(config)), torch.bfloat16, torch.device("meta"))
    return ((name, target.shape) for name, target in targets.items())


def num_parameters(config: Mapping[str, Any]) -> int:
    """All of them, those that a token does not use too."""
    return sum(math.prod(shape) for _, shape in tensor_shapes(config))


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids, the same every time.

    Beside bytes and special tokens the ids are pairs of letters, and then pairs of such pairs.

    Raises:
        ValueError: fewer ids than bytes and special tokens, or more than there are such pairs.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {MIN_VOCAB_SIZE} bytes and special tokens")
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    space, letters = "Ġ", string.ascii_lowercase  # of byte-level BPE: a word begins with its space
    pairs = list(itertools.product(space + letters, letters))
    heads, tails = (["".join(pair) for pair in pairs if keeps(pair)] for keeps in (bool, lambda pair: pair[0] != space))
    every = itertools.chain(pairs, itertools.product(heads, tails))
    merges = list(itertools.islice(every, vocab_size - len(tokens)))
    tokens += ["".join(merge) for merge in merges]
    if len(tokens) != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} is more than the {len(tokens)} there can be")
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_model(config: Mapping[str, Any], directory: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model of this configuration into `directory`.

    Args:
        shard_bytes: a file has at most so many, unless one tensor is larger.

    Raises:
        ValueError: the vocabulary's size; see make_tokenizer.
        OSError: the files.
    """
    make_model_files(config, directory)
    shards = list(_shards(tensor_shapes(config), shard_bytes))
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor, _ in shard}
        index = {"metadata": {"total_size": num_parameters(config) * BF16_BYTES}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: draw_tensor(name, shape, torch.bfloat16, torch.device("cpu"), seed) for name, shape in shard}
        save_file(tensors, directory / file, {"format": "pt"})


def make_model_files(config: Mapping[str, Any], directory: Path) -> None:
    """Write all but the weights; see make_model."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    end, pad = SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)
    ids = {"eos_token_id": end, "pad_token_id": pad}
    _write_json(directory / "config.json", {**config, "bos_token_id": None, **ids})
    _write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": [end], "pad_token_id": pad})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def draw_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """The numbers of a tensor, which depend on its name and the seed alone.

    Norms are ones, all else is normal; special tokens have zeros, so that no greedy answer ends by itself.
    """
    if "norm" in name:
        return torch.ones(shape, dtype=dtype, device=device)
    source = torch.Generator(device).manual_seed(name_hash(name) ^ seed)
    drawn = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, SCALE, generator=source)
    if name in (EMBEDDING, HEAD):
        drawn[: len(SPECIAL_TOKENS)] = 0
    return drawn


def name_hash(name: str) -> int:
    """63 bits of a tensor's name, the same in every process (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value >> 1


def _shards(tensors: Iterator[Named], shard_bytes: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    size_bytes = 0
    for name, shape in tensors:
        tensor_bytes = math.prod(shape) * BF16_BYTES
        if shard and size_bytes + tensor_bytes > shard_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append((name, shape))
        size_bytes += tensor_bytes
    yield shard


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


GGUF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
REORDERED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


class CannotConvert(Exception):
    """Not a model that this writes, or the package `gguf` is missing."""


def write_gguf(directory: Path, path: Path, mix: str = "BF16") -> None:
    """Write a dense model's weights as one GGUF file, tensor by tensor.

    Vectors become float32, as llama.cpp wants them. Source: llama.cpp's conversion scripts: Llama's q and k are
    reordered for its RoPE, Qwen's are not.

    Args:
        mix: formats of the matrices, of MIXES. BF16 are the directory's numbers; in the others blocks are drawn, with
            scales that give them about the same size.

    Raises:
        CannotConvert: the model, or the package gguf.
        BadCheckpoint, OSError: the files.
    """
    try:
        import gguf
    except ImportError as error:
        raise CannotConvert("the package gguf is not installed: pip install gguf") from error
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    architecture = GGUF_ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        raise CannotConvert(f"{config['architectures'][0]} is none of {', '.join(GGUF_ARCHITECTURES)}")
    writer: Any = gguf.GGUFWriter(None, architecture)
    _add_shape(writer, config, getattr(gguf.LlamaFileType, f"MOSTLY_{mix}"))
    _add_tokenizer(writer, directory, config, gguf)
    checkpoint = open_checkpoint(directory)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    formats = {
        name: _format_in(mix, name, config) if len(header.shape) > 1 else "F32"
        for name, header in checkpoint.tensors.items()
    }
    for name, header in checkpoint.tensors.items():
        number_type = getattr(gguf.GGMLQuantizationType, formats[name])
        elements, size_bytes = BLOCKS[formats[name]]
        if header.shape[-1] % elements:
            raise CannotConvert(f"{name}: rows of {header.shape[-1]} are not of whole {formats[name]} blocks")
        # a row's bytes, where the shape is that of numbers: how the package takes formats that numpy lacks
        shape = (*header.shape[:-1], header.shape[-1] // elements * size_bytes)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor_info(gguf_name, shape, np.dtype(np.uint8), math.prod(shape), number_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, header in checkpoint.tensors.items():
        if formats[name] in ("BF16", "F32"):
            writer.write_tensor_data(_gguf_bytes(checkpoint, name, config, architecture))
        else:
            writer.write_tensor_data(draw_blocks(name, header.shape, formats[name]))
    writer.close()


MIXES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")


def _format_in(mix: str, name: str, config: Mapping[str, Any]) -> str:
    """Source: llama.cpp, src/llama-quant.cpp: Q4_K_M has Q6_K in the head, and in half of the v and down matrices."""
    if mix != "Q4_K_M":
        return mix if mix != "Q4_0" or name != (EMBEDDING if config["tie_word_embeddings"] else HEAD) else "Q6_K"
    num_layers = config["num_hidden_layers"]
    if name == (EMBEDDING if config["tie_word_embeddings"] else HEAD):
        return "Q6_K"
    if name.endswith((".v_proj.weight", ".down_proj.weight")):
        index, eighth = int(name.split(".")[2]), num_layers // 8
        if index < eighth or index >= 7 * num_layers // 8 or (index - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def stored_bytes_a_weight(directory: Path, mix: str) -> float:
    """Of the matrices that a step reads: all but an embedding that is not the head."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    num_weights = size_bytes = 0.0
    for name, shape in tensor_shapes(config):
        if len(shape) > 1 and (name != EMBEDDING or config["tie_word_embeddings"]):
            elements, block_bytes = BLOCKS[_format_in(mix, name, config)]
            num_weights, size_bytes = (
                num_weights + math.prod(shape),
                size_bytes + math.prod(shape) / elements * block_bytes,
            )
    return size_bytes / num_weights


# Where a block's float16 scales lie, and the largest number that one multiplies: K formats' scales have scales.
_SCALES = {"Q8_0": ((0, 127),), "Q4_0": ((0, 8),), "Q4_K": ((0, 63 * 8), (2, 63)), "Q6_K": ((208, 128 * 32),)}


def draw_blocks(name: str, shape: tuple[int, ...], number_format: str, seed: int = 0) -> Any:
    """Random blocks of numbers of about SCALE, as bytes; special tokens have zeros: see draw_tensor."""
    elements, size_bytes = BLOCKS[number_format]
    source = np.random.default_rng(name_hash(name) ^ seed)
    blocks = source.integers(0, 256, (math.prod(shape) // elements, size_bytes), np.uint8)
    for offset, most in _SCALES[number_format]:
        blocks[:, offset : offset + 2] = np.full((1, 1), 2 * SCALE / most, np.float16).view(np.uint8)
    if name in (EMBEDDING, HEAD):
        per_row = shape[-1] // elements
        for offset, _ in _SCALES[number_format]:
            blocks[: len(SPECIAL_TOKENS) * per_row, offset : offset + 2] = 0
    return blocks


def _add_shape(writer: Any, config: Mapping[str, Any], file_type: int) -> None:
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
    writer.add_file_type(file_type)
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


def _gguf_bytes(checkpoint: Checkpoint, name: str, config: Mapping[str, Any], architecture: str) -> Any:
    with safe_open(checkpoint.tensors[name].file, framework="pt") as reader:
        tensor = reader.get_tensor(name)
    if architecture == "llama" and name.endswith(REORDERED):
        num_heads = config["num_attention_heads"]
        tensor = interleave_halves(tensor, config.get("head_dim") or config["hidden_size"] // num_heads)
    tensor = tensor.to(torch.bfloat16 if tensor.dim() > 1 else torch.float32).contiguous()
    return tensor.view(torch.uint8).numpy()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 when the directory holds something already, or cannot be written."""
    parser = argparse.ArgumentParser(prog="python -m bench.make_model", description=__doc__)
    parser.add_argument("preset", choices=tuple(PRESETS))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the preset's")
    arguments = parser.parse_args(argv)
    directory: Path = arguments.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        print(f"bench.make_model: {directory} is not empty\nFix: name a new directory", file=sys.stderr)
        return 2
    config = dict(PRESETS[arguments.preset])
    if arguments.layers is not None:
        config |= {"num_hidden_layers": arguments.layers}
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][: arguments.layers]
    try:
        make_model(config, directory, arguments.seed)
    except OSError as error:
        print(f"bench.make_model: {error}\nFix: name a directory that can be written", file=sys.stderr)
        return 2
    print(f"{directory}: {num_parameters(config) / 1e6:,.0f}M parameters, bfloat16, random (seed {arguments.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
