"""Made-up models to measure with: preset shapes, the directory that is written, and who can read it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from bench.make_model import (
    MOE_1B,
    PRESETS,
    QWEN2_05B,
    SPECIAL_TOKENS,
    main,
    make_model,
    make_tokenizer,
    num_parameters,
    tensor_shapes,
)
from core.config import EngineConfig
from core.config_json import parse_model_config
from gpu.loading import load_runner
from server.model_files import read_model_files
from tests.gpu.driver import Driver

TINY: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 56,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
ENGINE = EngineConfig(device="cpu", dtype="float32", max_sequences=2, kv_memory_bytes=2**20, threads=1)


def tiny(preset: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**preset, **TINY, **changes}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model(tiny(QWEN2_05B), directory)
    return directory


def test_presets_have_the_size_that_their_name_says_and_count_as_the_server_counts() -> None:
    millions = {"qwen2.5-0.5b": 387, "qwen3-0.6b": 596, "qwen3-1.7b": 1721, "moe-1b": 1034, "llama-8b": 8030}
    millions |= {"qwen2.5-1.5b": 1544, "qwen3.5-0.8b": 654, "lfm2-1.2b": 1170, "granite4-h-1b": 1462}
    millions |= {"gemma3-0.3b": 268}
    assert {name: round(num_parameters(config) / 1e6) for name, config in PRESETS.items()} == millions
    for name in ("qwen2.5-0.5b", "qwen3-0.6b", "llama-8b", "granite4-h-1b"):
        assert num_parameters(PRESETS[name]) == parse_model_config(PRESETS[name]).num_parameters
    names = [name for name, _ in tensor_shapes(MOE_1B)]
    assert len(names) == len(set(names))
    experts = [name for name in names if ".mlp.experts." in name]
    assert len(experts) == MOE_1B["num_hidden_layers"] * MOE_1B["num_experts"] * 3


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("qwen2.5-0.5b", {}),
        ("qwen3-0.6b", {"head_dim": 16}),
        ("llama-8b", {"head_dim": 8}),
        ("moe-1b", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_transformers_finds_every_tensor_and_no_other(preset: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    make_model(tiny(PRESETS[preset], **changes), tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_the_runner_and_transformers_agree_on_a_generated_model(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt_ids = list(range(40, 60))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = model.generate(torch.tensor([prompt_ids]), max_new_tokens=8, do_sample=False)[0, 20:].tolist()
    config = parse_model_config(json.loads((tiny_model / "config.json").read_text()))
    threads = torch.get_num_threads()
    try:
        driver = Driver(load_runner(tiny_model, config, ENGINE, lambda done, total: None))
    finally:
        torch.set_num_threads(threads)
    assert driver.generate(8, driver.add(prompt_ids)) == [expected]
    assert not set(expected) & set(range(len(SPECIAL_TOKENS)))


def test_the_server_reads_template_and_ends_and_special_tokens_alone_are_zero(tiny_model: Path) -> None:
    assert read_model_files(tiny_model).eos_ids == (SPECIAL_TOKENS.index("<|im_end|>"),)
    assert (tiny_model / "chat_template.jinja").read_text().startswith("{% for message in messages %}")
    with safe_open(tiny_model / "model.safetensors", framework="pt") as reader:
        is_zero = (reader.get_tensor("model.embed_tokens.weight") == 0).all(dim=1)
    assert is_zero.nonzero().flatten().tolist() == list(range(len(SPECIAL_TOKENS)))


def test_shards_hold_the_same_numbers_as_one_file(tiny_model: Path, tmp_path: Path) -> None:
    make_model(tiny(QWEN2_05B), tmp_path, shard_bytes=40_000)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    assert list(weight_map) == [name for name, _ in tensor_shapes(tiny(QWEN2_05B))]
    with safe_open(tiny_model / "model.safetensors", framework="pt") as whole:
        for name, file in weight_map.items():
            with safe_open(tmp_path / file, framework="pt") as shard:
                assert torch.equal(shard.get_tensor(name), whole.get_tensor(name)), name


def test_seeds_give_their_own_weights_again_and_again(tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((0, 0, 1)):
        make_model(tiny(QWEN2_05B), tmp_path / str(number), seed)
        digests.append(hashlib.sha256((tmp_path / str(number) / "model.safetensors").read_bytes()).digest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_tokenizers_have_exactly_the_ids_asked_for_and_give_text_back(vocab_size: int) -> None:
    tokenizer: Tokenizer = make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    text = "Wie viele Blöcke? 16 → fast, schedulerblocks\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        make_tokenizer(200)


def test_a_directory_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("here")
    assert main(["qwen2.5-0.5b", str(tmp_path)]) == 2
    assert "Fix: name a new directory" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
