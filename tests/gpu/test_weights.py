"""Every tensor of a checkpoint is accounted for, from one file or many; what is wrong is named."""

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.errors import BadCheckpoint
from gpu import checkpoint
from gpu.checkpoint import INDEX_FILE, SINGLE_FILE, open_checkpoint
from gpu.memory_plan import estimate
from gpu.parameters import ModelWeights, interleave_halves
from gpu.weights import check_checkpoint, load_weights
from tests.gpu.conftest import load_whole, no_progress
from tests.oracle import read_config, save_random_model

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32, progress: Any = no_progress) -> ModelWeights:
    checkpoint = open_checkpoint(directory)
    config = check_checkpoint(checkpoint, parse_model_config(read_config(directory)))
    return load_whole(checkpoint, config, dtype, CPU, progress)


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model's directory with its tensors changed."""
    tensors = load_file(source / SINGLE_FILE)
    change(tensors)
    target.mkdir(exist_ok=True)
    save_file(tensors, target / SINGLE_FILE)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_interleaving_puts_the_halves_of_a_head_side_by_side() -> None:
    assert interleave_halves(torch.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    rows = torch.arange(8).unsqueeze(1).expand(8, 3)
    assert interleave_halves(rows, 4)[:, 2].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_shards_give_the_same_parameters_as_one_file(tmp_path: Path, model_directory) -> None:
    one = load(model_directory("qwen2"))
    sharded = load(save_random_model("qwen2", tmp_path, max_shard_size="60KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(one.embedding, sharded.embedding)
    for layer, other in zip(one.layers, sharded.layers, strict=True):
        assert torch.equal(layer.qkv, other.qkv)
        assert torch.equal(layer.qkv_bias, other.qkv_bias)
        assert torch.equal(layer.mlp.down, other.mlp.down)


def test_parameters_are_converted_and_fused(model_directory) -> None:
    tensors = load_file(model_directory("llama3") / SINGLE_FILE)
    layer = load(model_directory("llama3"), torch.bfloat16).layers[1]
    prefix = "model.layers.1."
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up, torch.cat(gate_up).bfloat16())
    assert torch.equal(layer.qkv[-32:], tensors[f"{prefix}self_attn.v_proj.weight"].bfloat16())


def test_the_configuration_counts_the_parameters_that_are_loaded(family: str, model_directory) -> None:
    config = parse_model_config(read_config(model_directory(family)))
    weights = load(model_directory(family))
    found = {id(tensor): tensor.numel() for tensor in every_tensor(weights)}
    assert config.num_parameters == sum(found.values())


def every_tensor(weights: object) -> list[torch.Tensor]:
    """Of a tree of dataclasses and lists."""
    if isinstance(weights, torch.Tensor):
        return [weights]
    if isinstance(weights, list | tuple):
        return [tensor for item in weights for tensor in every_tensor(item)]
    if not dataclasses.is_dataclass(weights):
        return []
    return [t for field in dataclasses.fields(weights) for t in every_tensor(getattr(weights, field.name))]


def test_norms_that_are_offsets_from_1_are_not_rounded(model_directory) -> None:
    tensors = load_file(model_directory("gemma2") / SINGLE_FILE)
    weights = load(model_directory("gemma2"), torch.bfloat16)
    assert torch.equal(weights.norm, 1 + tensors["model.norm.weight"])
    assert torch.equal(weights.layers[0].mlp_norm, 1 + tensors["model.layers.0.pre_feedforward_layernorm.weight"])


def test_mxfp4_blocks_are_what_transformers_makes_of_them(tmp_path: Path, model_directory) -> None:
    """In shards that hold the scales before the blocks."""
    directory = tmp_path / "mxfp4"
    tensors, packed = load_file(model_directory("gpt_oss") / SINGLE_FILE), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        shape = (num_experts, num_out, num_in // 32)
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape, generator=generator, dtype=torch.uint8)
    directory.mkdir()
    save_file(tensors, directory / "1.safetensors")
    save_file(packed, directory / "2.safetensors")
    weight_map = {**dict.fromkeys(tensors, "1.safetensors"), **dict.fromkeys(packed, "2.safetensors")}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    config = read_config(model_directory("gpt_oss")) | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config))
    layer = load(directory, torch.bfloat16).layers[1].mlp
    for name, got in (("gate_up", layer.gate_up), ("down", layer.down)):
        name = f"model.layers.1.mlp.experts.{name}_proj"
        want = convert_moe_packed_tensors(packed[f"{name}_blocks"], tensors[f"{name}_scales"]).transpose(1, 2)
        want = torch.cat([want[:, ::2], want[:, 1::2]], 1) if "gate_up" in name else want
        assert torch.equal(got, want)
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"tensors are missing: .*down_proj"):
        load(directory)


def test_floats_where_bytes_are_promised_are_refused(tmp_path: Path, model_directory) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            num_experts, num_in, num_out = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.zeros(num_experts, num_out, num_in // 32, 16)
            tensors[f"{name}_scales"] = torch.zeros(num_experts, num_out, num_in // 32)

    directory = rewrite(model_directory("gpt_oss"), tmp_path, change)
    config = read_config(directory) | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="stored as F32"):
        load(directory)


def test_only_what_turns_of_a_head_is_interleaved() -> None:
    assert interleave_halves(torch.arange(12), 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def test_progress_goes_from_nothing_to_all_bytes(model_directory) -> None:
    seen: list[tuple[int, int]] = []
    load(model_directory("llama3"), progress=lambda done, total: seen.append((done, total)))
    total = open_checkpoint(model_directory("llama3")).size_bytes
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_tied_embeddings_are_one_tensor(tmp_path: Path, model_directory) -> None:
    assert (weights := load(model_directory("qwen2"))).lm_head is weights.embedding


def test_a_tied_head_that_is_stored_as_other_numbers_is_untied(tmp_path: Path, model_directory, caplog) -> None:
    def add_same(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def add_other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    def add_rounded(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()

    for name, change in (("same", add_same), ("rounded", add_rounded)):
        weights = load(rewrite(model_directory("qwen2"), tmp_path / name, change))
        assert weights.lm_head is weights.embedding
    assert caplog.text == ""
    directory = rewrite(model_directory("qwen2"), tmp_path / "other", add_other)
    weights = load(directory)
    assert torch.equal(weights.lm_head, weights.embedding + 1)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    tied, config = (parse_model_config(read_config(path)) for path in (model_directory("qwen2"), directory))
    engine = EngineConfig(device="cpu", dtype="float32", max_model_len=64)
    one, both = estimate(model_directory("qwen2"), tied, engine), estimate(directory, config, engine)
    assert both.num_parameters - one.num_parameters == weights.embedding.numel()
    assert both.weights_bytes - one.weights_bytes == 4 * weights.embedding.numel()


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path, model_directory) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.ones(3, 4)

    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight has the shape \[3, 4\]"):
        load(rewrite(model_directory("qwen2"), tmp_path, add))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"1 tensors are missing: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "1 tensors are not this architecture's: extra"),
        (lambda t: t.update({"x.self_attn.bias": torch.ones(2)}), "1 tensors are not this architecture's: x.self_attn"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight has the shape \[3\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(72, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, model_directory, change, message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        load(rewrite(model_directory("llama3"), tmp_path, change))


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("self_attn.rotary_emb.inv_freq", torch.ones(8)),
        ("self_attn.masked_bias", torch.tensor(-1e9)),
        ("self_attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        ("self_attn.position_ids", torch.arange(8)),
    ],
)
def test_buffers_of_old_checkpoints_are_left_out(
    tmp_path: Path, model_directory, caplog, name: str, buffer: torch.Tensor
) -> None:
    caplog.set_level(logging.INFO)
    plain = load(model_directory("llama3"))
    changed = {f"model.layers.0.{name}": buffer}
    loaded = load(rewrite(model_directory("llama3"), tmp_path, lambda tensors: tensors.update(changed)))
    assert f"1 buffers of the checkpoint are left out: model.layers.0.{name}" in caplog.text
    assert torch.equal(loaded.embedding, plain.embedding)
    assert all(torch.equal(one.qkv, other.qkv) for one, other in zip(loaded.layers, plain.layers, strict=True))


def test_layers_that_predict_later_tokens_are_left_out(tmp_path: Path, model_directory) -> None:
    later = {"model.layers.2.eh_proj.weight": torch.ones(1)}
    directory = rewrite(model_directory("glm4_moe"), tmp_path, lambda tensors: tensors.update(later))
    config = parse_model_config(read_config(directory))
    assert check_checkpoint(open_checkpoint(directory), config) == config
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.eh_proj"):
        check_checkpoint(open_checkpoint(directory), dataclasses.replace(config, num_draft_layers=0))


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "x.bin", "a\\b.safetensors"]
)
def test_an_index_may_not_lead_out_of_its_directory(tmp_path: Path, file: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(BadCheckpoint, match="not a safetensors file of its own directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(BadCheckpoint, match=r"model-1\.safetensors is missing"):
        open_checkpoint(tmp_path)


def test_an_index_that_promises_more_than_its_files_hold_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(BadCheckpoint, match="lists tensors that their files do not contain: b"):
        open_checkpoint(tmp_path)


def test_a_directory_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadCheckpoint, match=r"it holds pytorch_model\.bin") as caught:
        open_checkpoint(tmp_path)
    assert f"save_pretrained({str(tmp_path)!r}, safe_serialization=True)" in caught.value.fix
    (tmp_path / "part.safetensors").touch()  # a download that stopped: its other half is no conversion
    with pytest.raises(BadCheckpoint, match=r"it holds part\.safetensors, pytorch_model\.bin") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.fix.startswith("download")


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / SINGLE_FILE)
    whole = (tmp_path / SINGLE_FILE).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SINGLE_FILE).write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint, match="not a whole safetensors file"):
            open_checkpoint(tmp_path)


def mapped_bytes(file: Path) -> int:
    """Of this file's pages, those resident in this process (proc(5), smaps)."""
    resident, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_file = line.endswith(str(file))
        elif is_of_file and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_pages_of_the_file_are_let_go_while_loading(
    model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "RELEASE_BYTES", 16 * 1024)
    directory = model_directory("llama2")
    file = directory / SINGLE_FILE
    seen: list[int] = []
    load(directory, progress=lambda done, total: seen.append(mapped_bytes(file)))
    assert seen[1:].count(0) >= 5


def test_a_file_that_is_cut_while_it_is_read_is_an_error(
    tmp_path: Path, model_directory: Callable[[str], Path]
) -> None:
    copy = rewrite(model_directory("llama3"), tmp_path, lambda tensors: None)
    weights = load_weights(
        open_checkpoint(copy), parse_model_config(read_config(copy)), torch.float32, CPU, no_progress
    )
    os.truncate(copy / SINGLE_FILE, (copy / SINGLE_FILE).stat().st_size // 2)
    with pytest.raises(BadCheckpoint, match="has changed"):
        list(weights.layers)
