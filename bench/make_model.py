"""A model with random weights, to measure with: `python -m bench.make_model qwen2.5-0.5b DIR`.

Writes a Hugging Face directory: config.json, safetensors (in shards when large), tokenizer.json with a chat template,
generation_config.json. Names and shapes are transformers' own, so that every server reads the same files. The same
preset and seed give the same weights. Tensors are written one after the other, in pieces: memory stays bounded whatever
the model's size. The vocabularies of the small presets are smaller than the originals': what is measured is the body.

Special tokens have rows of zeros in the output head: their logit is 0 where the greatest of the others is far above,
so a greedy answer never ends by itself, and all servers generate as many tokens as they are asked for.
"""

import argparse
import itertools
import json
import math
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bench.kit import ROOT

SHARD_BYTES = 4 * 1000**3
PIECE_NUMBERS = 16 * 1024**2  # drawn at once: 32 MiB of bfloat16
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
QWEN3_06B = _preset(
    *("Qwen3ForCausalLM", 1024, 3072, 28, (16, 8)),
    **{**_QWEN, "model_type": "qwen3", "vocab_size": 151_936, "max_position_embeddings": 40_960},
)
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
PRESETS = {"qwen2.5-0.5b": QWEN2_05B, "qwen3-0.6b": QWEN3_06B, "moe-1b": MOE_1B, "llama-8b": LLAMA_8B}

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_TRAINED = 8_000
MAX_TOKEN_CHARS = 24


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[Named]:
    """Every tensor of a checkpoint of this configuration, in the order of the model: (name, shape)."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{index}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def num_parameters(config: Mapping[str, Any]) -> int:
    """All of them, those that a token does not use too."""
    return sum(math.prod(shape) for _, shape in tensor_shapes(config))


def _layer_shapes(config: Mapping[str, Any]) -> Iterator[Named]:
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    widths = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }
    yield "input_layernorm.weight", (hidden,)
    for letter, width in widths.items():
        yield f"self_attn.{letter}_proj.weight", (width, hidden)
        if config["model_type"] == "qwen2":
            yield f"self_attn.{letter}_proj.bias", (width,)
    if config["model_type"] in ("qwen3", "qwen3_moe"):
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield "self_attn.o_proj.weight", (hidden, widths["q"])
    yield "post_attention_layernorm.weight", (hidden,)
    if "num_experts" not in config:
        yield from _mlp_shapes("mlp", hidden, config["intermediate_size"])
        return
    yield "mlp.gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from _mlp_shapes(f"mlp.experts.{expert}", hidden, config["moe_intermediate_size"])


def _mlp_shapes(prefix: str, hidden: int, intermediate: int) -> Iterator[Named]:
    yield f"{prefix}.gate_proj.weight", (intermediate, hidden)
    yield f"{prefix}.up_proj.weight", (intermediate, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, intermediate)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocab_size` ids, trained on this repository's own text; the same every time.

    That is enough for some thousand merges. The rest are merges of two words that exist already: rare in text, but each
    id the model samples says something, as with a real vocabulary.

    Raises:
        ValueError: fewer ids than bytes and special tokens, or more than there are pairs of words.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {MIN_VOCAB_SIZE} bytes and special tokens")
    fields = json.loads(_train(min(vocab_size, MAX_TRAINED)).to_str())
    _fill_up(fields["model"], vocab_size)
    return Tokenizer.from_str(json.dumps(fields))


def local_texts() -> Iterator[str]:
    """The demonstration corpus, the documents and the source of this repository."""
    for file in sorted((ROOT / "gpu" / "demo" / "corpus").glob("*.toml")):
        yield from _strings(tomllib.loads(file.read_text(encoding="utf-8")))
    documents = sorted(ROOT.glob("*.md"))
    sources = sorted(path for layer in ("bench", "core", "gpu", "server") for path in (ROOT / layer).rglob("*.py"))
    for file in [*documents, *sources]:
        yield file.read_text(encoding="utf-8")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(_strings(item) for item in value.values())
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(_strings(item) for item in value)


def _train(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(local_texts(), trainer)
    return tokenizer


def _fill_up(model: dict[str, Any], vocab_size: int) -> None:
    """Add merges of two known words until there are `vocab_size` ids."""
    vocab: dict[str, int] = model["vocab"]
    merges: list[list[str]] = model["merges"]
    tails = [token for token in vocab if token.isascii() and token.isalpha() and len(token) > 1]
    heads = [f"Ġ{token}" for token in tails if f"Ġ{token}" in vocab] + tails  # Ġ: a space, in byte-level BPE
    for distance, (index, head) in itertools.product(range(len(tails)), enumerate(heads)):
        if len(vocab) == vocab_size:
            return
        tail = tails[(index + distance) % len(tails)]
        if head + tail not in vocab and len(head + tail) <= MAX_TOKEN_CHARS:
            vocab[head + tail] = len(vocab)
            merges.append([head, tail])
    if len(vocab) != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} is more than the text here gives: {len(vocab)}")


def make_model(config: Mapping[str, Any], directory: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model of this configuration into `directory`.

    Args:
        shard_bytes: a file is at most so large, unless one tensor is larger.

    Raises:
        ValueError: the vocabulary's size; see make_tokenizer.
        OSError: the files.
    """
    make_model_files(config, directory)
    _write_weights(list(tensor_shapes(config)), directory, seed, shard_bytes)


def make_model_files(config: Mapping[str, Any], directory: Path) -> None:
    """Write all but the weights; see make_model."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", _full_config(config))
    end, pad = SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)
    _write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": [end], "pad_token_id": pad})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    end, pad = SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)
    return {**config, "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}


def _tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
    }


def _write_weights(tensors: Sequence[Named], directory: Path, seed: int, shard_bytes: int) -> None:
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        _write_shard(directory / "model.safetensors", shards[0], seed)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(directory / name, shard, seed)
        weight_map |= {tensor: name for tensor, _ in shard}
    total = sum(_size_bytes(shape) for _, shape in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _shards(tensors: Sequence[Named], shard_bytes: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    size_bytes = 0
    for name, shape in tensors:
        if shard and size_bytes + _size_bytes(shape) > shard_bytes:
            yield shard
            shard, size_bytes = [], 0
        shard.append((name, shape))
        size_bytes += _size_bytes(shape)
    yield shard


def _write_shard(path: Path, tensors: Sequence[Named], seed: int) -> None:
    """Source: the safetensors format: the header's length as u64, the header as JSON, the tensors' bytes in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + _size_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the tensors start aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in tensors:
            _write_tensor(file, name, shape, seed)


def _write_tensor(file: BinaryIO, name: str, shape: tuple[int, ...], seed: int) -> None:
    """Norms are ones, all else is drawn; a generator per tensor, so that shards do not change the numbers."""
    if "norm" in name:
        _write_numbers(file, torch.ones(shape, dtype=torch.bfloat16))
        return
    source = torch.Generator().manual_seed(name_hash(name) ^ seed)
    width = math.prod(shape[1:])
    step = max(1, PIECE_NUMBERS // width)
    is_vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
    for start in range(0, shape[0], step):
        rows = torch.empty(min(step, shape[0] - start), width, dtype=torch.bfloat16)
        rows.normal_(0.0, SCALE, generator=source)
        if is_vocabulary and start == 0:
            rows[: len(SPECIAL_TOKENS)] = 0
        _write_numbers(file, rows)


def name_hash(name: str) -> int:
    """63 bits of a tensor's name, the same in every process (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value >> 1


def _write_numbers(file: BinaryIO, numbers: Tensor) -> None:
    numbers.view(torch.uint8).numpy().tofile(file)


def _size_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BF16_BYTES


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
        config["num_hidden_layers"] = arguments.layers
    try:
        make_model(config, directory, arguments.seed)
    except OSError as error:
        print(f"bench.make_model: {error}\nFix: name a directory that can be written", file=sys.stderr)
        return 2
    print(f"{directory}: {num_parameters(config) / 1e6:,.0f}M parameters, bfloat16, random (seed {arguments.seed})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
