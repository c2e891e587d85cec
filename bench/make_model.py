"""A model with random weights, to measure with: `python -m bench.make_model qwen2.5-0.5b DIR`.

Writes a Hugging Face directory: config.json, safetensors (in shards when large), tokenizer.json with a chat template,
generation_config.json. The same preset and seed give the same weights. Tensors are written one after the other, in
pieces: memory stays bounded whatever the model's size.

Special tokens have rows of zeros in the output head: their logit is 0 where the greatest of the others is far above,
so a greedy answer never ends by itself, and all servers generate as many tokens as they are asked for.
"""

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from bench.model_presets import PRESETS, num_parameters, tensor_shapes
from bench.model_tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS, make_tokenizer

SHARD_BYTES = 4 * 1000**3
PIECE_NUMBERS = 16 * 1024**2  # drawn at once: 32 MiB of bfloat16
SCALE = 0.02
BF16_BYTES = 2

Named = tuple[str, tuple[int, ...]]


def make_model(config: Mapping[str, Any], directory: Path, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model of this configuration (of bench/model_presets.py's families) into `directory`.

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
