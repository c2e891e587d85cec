"""The same numbers and the same tokens from a GGUF file as from the directory it was made of."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelConfig, RopeConfig
from core.config_json import parse_model_config
from core.errors import BadCheckpoint, StartupError
from core.gguf import BLOCKS, GgufFile, parse_gguf
from core.gguf_model import LONG_FACTORS, ROPE_FACTORS, config_of, hugging_face_tensors, num_turned_heads
from core.plan import SequenceStart, make_plan
from gpu import checkpoint as gpu_gguf
from gpu.blocks import STORED, dequantise
from gpu.checkpoint import GgufReader, open_checkpoint
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags
from gpu.loading import load_runner
from gpu.memory_plan import estimate
from gpu.quality import predict
from gpu.weights import load_weights
from server.model_files import parse_config, read_model_config, tasks_in
from tests.gguf_files import Q, parsed, quantised_numbers, random_blocks, with_split_keys, write_gguf
from tests.gpu.conftest import ENGINE, no_progress
from tests.gpu.driver import GREEDY, Driver
from tests.oracle import FAMILIES, Oracle, read_config, save_random_model

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79]
TEXT = [*PROMPT, *range(30, 60)]


def model_of(path: Path, factors: tuple[float, ...] | None = None) -> ModelConfig:
    return parse_model_config(
        config_of(parsed(path), {ROPE_FACTORS: factors} if factors else {}) if path.is_file() else read_config(path)
    )


def greedy(path: Path, factors: tuple[float, ...] | None = None) -> list[int]:
    driver = Driver(load_runner(path, model_of(path, factors), ENGINE, no_progress))
    return driver.generate(12, driver.add(PROMPT))[0]


def copied(source: Path, target: Path, change: Callable[[torch.Tensor], torch.Tensor], **fields: Any) -> Path:
    """A directory with each tensor changed, and fields of config.json; further layers and a tied head are left out."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    left_out = [f"model.layers.{index}." for index in range(fields.get("num_hidden_layers", 9), 10)]
    left_out += ["lm_head"] if fields.get("tie_word_embeddings") else []
    kept = {name: change(t) for name, t in tensors.items() if not name.startswith(tuple(left_out))}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(read_config(source) | fields))
    return target


def logits(path: Path, **settings: str) -> torch.Tensor:
    """Of TEXT, at every position: [tokens, vocab]."""
    runner = load_runner(path, model_of(path), replace(ENGINE, **settings), no_progress)
    start, tables = SequenceStart(0, tuple(TEXT), len(TEXT), GREEDY, 0, ()), [(0, index, index) for index in range(3)]
    return runner.logits(make_plan([(0, 0, TEXT, True)], tables=tables, sequence_starts=[start]))


def assert_close(found: torch.Tensor, expected: torch.Tensor, part: float) -> None:
    assert (found - expected).abs().max() <= part * expected.abs().max()


FILES = (
    *("llama2", "llama_linear", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("gemma", "glm", "glm4", "ernie4_5", "seed_oss", "ministral3", "olmo3"),
)


@pytest.mark.parametrize("name", FILES)
def test_families_give_the_same_tokens_as_their_safetensors(name: str, tmp_path: Path, model_directory) -> None:
    directory = model_directory(name)
    file = write_gguf(directory, tmp_path / "model.gguf")
    assert model_of(file) == parse_model_config(read_config(directory) | {"dtype": None})
    assert tasks_in(file, None) == tasks_in(directory, None) == ("generate",)
    assert greedy(file) == greedy(directory)


@pytest.mark.parametrize("quantisation", [Q.F32, Q.Q8_0])
def test_heads_of_one_tensor_give_the_same_tokens_as_those_of_three(
    quantisation: Q, tmp_path: Path, model_directory
) -> None:
    apart, fused = (
        write_gguf(model_directory("glm"), tmp_path / f"{is_fused}.gguf", quantisation, is_fused=is_fused)
        for is_fused in (False, True)
    )
    assert parsed(fused).tensors["blk.0.attn_qkv.weight"].format == quantisation.name
    assert "blk.0.attn_qkv.bias" in parsed(fused).tensors
    assert model_of(fused) == model_of(apart)
    assert greedy(fused) == greedy(apart)


def test_a_file_is_read_whatever_its_name(tmp_path: Path, model_directory) -> None:
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf")
    other = file.rename(tmp_path / "sha256-8eeb52df")  # as Ollama names them
    assert read_model_config(other)["model_type"] == "llama"
    assert greedy(other) == greedy(model_directory("llama2"))


# What llama.cpp's files cannot say, and takes to be so.
AS_LLAMA_CPP_HAS_IT: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "sliding_window": None},
    "mixtral": {},
    "qwen3_moe": {"norm_topk_prob": True, "num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": None},
    "qwen2_moe": {"num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": None},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None},
    "granite": {},
    "glm4_moe": {},
    "olmo2": {},
    "phi3": {},
    "arcee": {},
    "ernie4_5_moe": {},
    "gpt_oss": {},
    "lfm2": {"block_auto_adjust_ff_dim": True},
    "lfm2_moe": {},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0]}
    | {"layer_types": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 24, "layer_types": None, "sliding_window_pattern": 6},
}


@pytest.mark.parametrize("name", list(AS_LLAMA_CPP_HAS_IT))
def test_newer_families_give_the_same_tokens_as_their_safetensors(name: str, tmp_path: Path, model_directory) -> None:
    source = copied(model_directory(name), tmp_path / "plain", lambda t: t, **AS_LLAMA_CPP_HAS_IT[name])
    file = write_gguf(source, tmp_path / "model.gguf")
    assert model_of(file) == parse_model_config(read_config(source) | {"dtype": None})
    assert greedy(file) == greedy(source)


def test_a_row_of_its_own_may_have_lost_its_dimension(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("ernie4_5_moe"), tmp_path / "model.gguf"))
    name, own = "blk.1.exp_probs_b.bias", "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    written = header.tensors[name].shape
    assert len(written) == 2
    header.tensors[name] = replace(header.tensors[name], shape=written[1:])  # as after llama-quantize
    assert hugging_face_tensors(header)[own].shape == written


def test_mistral_small_has_the_architecture_of_ministral_and_not_its_growing_queries(
    tmp_path: Path, model_directory
) -> None:
    file = write_gguf(model_directory("mistral3"), tmp_path / "model.gguf")
    assert parsed(file).metadata["general.architecture"] == "mistral3"
    assert greedy(file) == greedy(model_directory("mistral3"))


def test_queries_that_grow_without_yarn_are_refused_by_name(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("ministral3"), tmp_path / "model.gguf"))
    for name in [name for name in header.metadata if ".rope.scaling." in name]:
        del header.metadata[name]
    with pytest.raises(StartupError, match="llama_4_scaling_beta"):
        parse_model_config(config_of(header, {}))
    header = parsed(write_gguf(model_directory("qwen3"), tmp_path / "other.gguf"))
    header.metadata["qwen3.attention.temperature_scale"] = 0.1
    with pytest.raises(StartupError, match=r"qwen3\.attention\.temperature_scale=0\.1"):
        config_of(header, {})


def test_windows_lie_where_the_file_says_or_in_all_but_each_fourth_layer(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("olmo3"), tmp_path / "model.gguf"))
    key, expected = "olmo2.attention.sliding_window_pattern", [True, True, True, False]

    def windowed() -> list[bool]:
        return [layer.window == 21 for layer in parse_model_config(config_of(header, {})).layers]

    assert header.metadata[key] == expected
    del header.metadata[key]
    assert windowed() == expected
    header.metadata[key] = 2
    assert windowed() == [True, False, True, False]
    header.metadata[key] = [False, True, True, True]
    assert windowed() == header.metadata[key]
    header.metadata[key] = [True]
    with pytest.raises(BadCheckpoint, match="sliding_window_pattern"):
        config_of(header, {})


@pytest.mark.parametrize(("factor", "is_served"), [(0.1 * math.log(4) + 1, True), (1.0, True), (1.3, False)])
def test_yarn_may_state_the_factor_that_it_has_anyway(
    factor: float, is_served: bool, tmp_path: Path, model_directory
) -> None:
    header = parsed(write_gguf(model_directory("olmo3"), tmp_path / "model.gguf"))
    expected = config_of(header, {})
    header.metadata["olmo2.rope.scaling.yarn_attn_factor"] = factor
    if is_served:
        assert config_of(header, {}) == expected
        return
    with pytest.raises(StartupError, match=r"yarn_attn_factor=1\.3"):
        config_of(header, {})


@pytest.mark.parametrize("name", ["gemma3n", "gemma4", "gemma4_moe"])
def test_layers_that_differ_give_the_same_tokens_as_their_safetensors(
    name: str, tmp_path: Path, model_directory
) -> None:
    directory = model_directory(name)
    config, factors = read_config(directory), None
    if name != "gemma3n":
        head_dim = config["per_layer_config"]["1"]["head_dim"]
        num_turning = int(head_dim * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        factors = (1.0,) * num_turning + (float(np.float32(1e30)),) * (head_dim // 2 - num_turning)
    file = write_gguf(directory, tmp_path / "model.gguf", rope_factors=None if factors is None else np.array(factors))
    found, expected = model_of(file, factors), parse_model_config(config | {"dtype": None})
    assert [replace(layer, sparsity=round(layer.sparsity, 6)) for layer in found.layers] == list(expected.layers)
    assert replace(found, layers=expected.layers) == expected
    assert greedy(file, factors) == greedy(directory)


_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3": {"rope_parameters": {**_YARN, "beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | {"num_nextn_predict_layers": 0},  # which the converter leaves out
    "glm4_moe_lite": {},
}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", list(LATENT))
def test_latent_attention_gives_the_logits_of_transformers(
    name: str, is_old: bool, tmp_path: Path, model_directory
) -> None:
    source = copied(model_directory(name), tmp_path / "plain", lambda t: t, **LATENT[name])
    file = write_gguf(source, tmp_path / "model.gguf", is_old=is_old)
    expected = parse_model_config(read_config(source) | {"dtype": None})
    found = model_of(file)
    assert found.experts is not None
    assert expected.experts is not None
    if name == "glm4_moe_lite":
        experts = replace(found.experts, layout=expected.experts.layout)
        found = replace(found, architecture=expected.architecture, experts=experts)
    assert found == expected
    assert_close(logits(file), Oracle(source).logits(TEXT), 1e-4)


def test_latent_attention_in_blocks_gives_the_logits_of_what_they_stand_for(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32}
    source = save_random_model("deepseek_v2", tmp_path / "source", **sizes)
    file = write_gguf(source, tmp_path / "model.gguf", Q.Q8_0)
    config, tensors = read_config(source), load_file(source / "model.safetensors")
    parts = with_split_keys({name: t for name, t in tensors.items() if "kv_b_proj" in name}, config)
    assert {parsed(file).tensors[f"blk.1.attn_{name}_b.weight"].format for name in "kv"} == {"Q8_0"}
    rounded = {name: quantised_numbers(t.contiguous(), Q.Q8_0) for name, t in parts.items()}
    whole = {name: quantised_numbers(t, Q.Q8_0) for name, t in tensors.items() if "kv_b_proj" not in name}
    for name, keys in rounded.items():
        if "k_b_proj" in name:
            joined = torch.cat([keys.transpose(1, 2), rounded[name.replace("k_b_proj", "v_b_proj")]], 1)
            whole[name.replace("k_b_proj", "kv_b_proj")] = joined.flatten(0, 1).contiguous()
    save_file(whole, source / "model.safetensors", {"format": "pt"})
    reference = Oracle(source).logits(TEXT)
    assert_close(logits(file, activations="bf16"), reference, 1e-4)
    if cpu_flags() >= NEEDED_FLAGS:
        assert_close(logits(file, activations="int8"), reference, 0.05)


DELTA_NETS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    "qwen3_5_moe": {},
}


@pytest.fixture
def delta_net(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Of a family and sizes: the directory of its model, with layers as llama.cpp can have them."""
    text = FAMILIES["qwen3_5"][2]["text_config"]
    monkeypatch.setitem(FAMILIES, "qwen3_5_text", ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", text))
    return lambda name, **sizes: save_random_model(name, tmp_path / "source", **DELTA_NETS[name], **sizes)


@pytest.mark.parametrize(
    ("name", "is_old"), [("qwen3_next", False), ("qwen3_next", True), ("qwen3_5_text", False), ("qwen3_5_moe", False)]
)
def test_delta_nets_give_the_logits_of_transformers(name: str, is_old: bool, tmp_path: Path, delta_net) -> None:
    source = delta_net(name)
    file = write_gguf(source, tmp_path / "model.gguf", is_old=is_old)
    found, expected = model_of(file), parse_model_config(read_config(source) | {"dtype": None})
    assert found.recurrence is not None
    assert found.recurrence.is_tiled == (name != "qwen3_next")
    if name == "qwen3_5_moe":  # neither file nor model has an MLP beside the experts
        expected = replace(expected, intermediate_size=found.intermediate_size)
    assert replace(found, recurrence=replace(found.recurrence, is_tiled=False)) == expected
    assert_close(logits(file), Oracle(source).logits(TEXT), 1e-4)


@pytest.mark.skipif(not cpu_flags() >= NEEDED_FLAGS, reason="needs a CPU with AVX2")
@pytest.mark.parametrize("name", list(DELTA_NETS))
def test_delta_nets_stay_in_blocks(name: str, tmp_path: Path, delta_net) -> None:
    """Heads are of 32, which blocks of 32 end with; the file's other order is computed, not undone."""
    experts = {} if name == "qwen3_5_text" else {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    source = delta_net(name, intermediate_size=96, **experts)
    file = write_gguf(source, tmp_path / "model.gguf", Q.Q8_0)
    tensors = load_file(source / "model.safetensors")
    rounded = {n: t if "shared_expert_gate" in n else quantised_numbers(t, Q.Q8_0) for n, t in tensors.items()}
    save_file(rounded, source / "model.safetensors", {"format": "pt"})
    reference = Oracle(source).logits(TEXT)
    assert_close(logits(file, activations="bf16"), reference, 1e-4)
    runner = load_runner(file, model_of(file), replace(ENGINE, activations="int8"), no_progress)
    stored_bytes = sum(one.size_bytes for one in parsed(file).tensors.values())
    assert stored_bytes <= runner.memory.weights_bytes < 1.02 * stored_bytes
    assert (logits(file, activations="int8") - reference).abs().mean() <= 0.15 * reference.abs().mean()


STATE_SPACES: dict[str, dict[str, Any]] = {
    "granite_hybrid": {},
    "granite_hybrid_dense": {},
    "falcon_h1": {},
    "falcon_h1_normed": {"mamba_norm_before_gate": False},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"]}
    | {"n_group": 1, "topk_group": 1},
}


@pytest.mark.parametrize("name", list(STATE_SPACES))
def test_state_spaces_give_the_same_tokens_as_their_safetensors(name: str, tmp_path: Path, model_directory) -> None:
    source = copied(model_directory(name), tmp_path / "plain", lambda t: t, **STATE_SPACES[name])
    tensors = load_file(source / "model.safetensors")
    if name == "nemotron_h":
        save_file({n: t for n, t in tensors.items() if ".layers.4." not in n}, source / "model.safetensors")
    assert greedy(write_gguf(source, tmp_path / "model.gguf")) == greedy(source)


def test_a_context_that_the_converter_made_up_is_served_on_request_alone(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("granite_hybrid"), tmp_path / "model.gguf"))
    header.metadata["granitehybrid.context_length"] = 2**20
    config = config_of(header, {})
    assert parse_model_config(config).max_position == 2**17
    assert parse_model_config(config, 4096).max_position == 2**20


def test_a_layer_that_predicts_later_tokens_is_none_of_those_with_states(tmp_path: Path, model_directory) -> None:
    file = parsed(write_gguf(model_directory("granite_hybrid"), tmp_path / "model.gguf"))
    expected, kv = config_of(file, {}), "granitehybrid.attention.head_count_kv"
    more = {"granitehybrid.block_count": len(file.metadata[kv]) + 1, "granitehybrid.nextn_predict_layers": 1}
    file.metadata.update(more | {kv: [*file.metadata[kv], 2]})
    assert config_of(file, {}) == expected | {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_scores_by_its_width(name: str, num_layers: int, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(num_layers)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_key_length(32)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    for index in range(num_layers):
        writer.add_tensor(
            "token_embd.weight" if not index else f"blk.{index}.attn_norm.weight", np.zeros((2, 96), np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config_of(parsed(file), {})["query_pre_attn_scalar"] == 96 // 4


@pytest.mark.parametrize("context", [None, 2048])
def test_longrope_has_the_factors_of_the_context(context: int | None, tmp_path: Path, model_directory) -> None:
    directory = model_directory("phi4_longrope")
    expected = parse_model_config(read_config(directory) | {"dtype": None}, context)
    file = write_gguf(directory, tmp_path / "model.gguf")
    found = parse_config(file, read_model_config(file), context)
    assert found.max_position == (context or 160)
    assert found.rope.factors == pytest.approx(expected.rope.factors)
    assert found.rope.attention_factor == pytest.approx(expected.rope.attention_factor)
    rope = replace(expected.rope, factors=found.rope.factors, attention_factor=found.rope.attention_factor)
    assert found == replace(expected, rope=replace(rope, factor=found.rope.factor), layers=found.layers)
    made = [Driver(load_runner(path, found, ENGINE, no_progress)) for path in (file, directory)]
    assert made[0].generate(12, made[0].add(PROMPT))[0] == made[1].generate(12, made[1].add(PROMPT))[0]


def test_factors_of_longrope_are_phis_alone(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("llama2"), tmp_path / "model.gguf"))
    with pytest.raises(StartupError, match=r"rope\.scaling\.type='longrope'"):
        config_of(header, {LONG_FACTORS["short_factor"]: (1.0,)})


def test_bamba_is_refused_by_name(tmp_path: Path, model_directory) -> None:
    header = parsed(write_gguf(model_directory("granite_hybrid"), tmp_path / "model.gguf"))
    del header.metadata["granitehybrid.attention.scale"]  # Bamba's files have none
    with pytest.raises(StartupError, match="Bamba"):
        config_of(header, {})


@pytest.mark.parametrize("quantisation", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_0])
def test_formats_give_the_same_tokens_as_what_they_stand_for(quantisation: Q, tmp_path: Path, model_directory) -> None:
    source = copied(model_directory("llama2"), tmp_path / "plain", lambda t: quantised_numbers(t, quantisation))
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", quantisation)
    assert {found.format for found in parsed(file).tensors.values()} == {"F32", quantisation.name}
    assert greedy(file) == greedy(source)


@pytest.mark.skipif(not cpu_flags() >= NEEDED_FLAGS, reason="needs a CPU with AVX2")
@pytest.mark.parametrize(
    ("name", "quantisation"), [("llama2", Q.Q8_0), ("qwen2", Q.Q4_0), ("mixtral", Q.Q8_0), ("falcon_h1", Q.Q8_0)]
)
def test_blocks_that_stay_as_stored_predict_about_the_same(
    name: str, quantisation: Q, tmp_path: Path, model_directory
) -> None:
    """Tied, with biases, with experts; the plan counts the bytes that are there."""
    source = copied(model_directory(name), tmp_path / "plain", lambda t: t, **AS_LLAMA_CPP_HAS_IT.get(name, {}))
    file = write_gguf(source, tmp_path / "model.gguf", quantisation)
    found = []
    for activations in ("bf16", "int8"):
        runner = load_runner(file, model_of(file), replace(ENGINE, activations=activations), no_progress)
        found.append(predict(runner, [*PROMPT, *range(40)]).surprises)
    assert float((found[0] - found[1]).abs().mean()) < 0.05
    stored_bytes = sum(one.size_bytes for one in parsed(file).tensors.values())
    assert stored_bytes <= runner.memory.weights_bytes < 1.01 * stored_bytes  # routers become floats


def test_llama_3_scaling_is_found_in_its_factors(tmp_path: Path, model_directory) -> None:
    rope = read_config(model_directory("llama3"))["rope_parameters"] | {"original_max_position_embeddings": 8192}
    source = copied(model_directory("llama3"), tmp_path / "8192", lambda t: t, rope_parameters=rope)
    factors = llama3_factors(rope, head_dim=16)
    file = write_gguf(source, tmp_path / "model.gguf", rope_factors=factors)
    found = tuple(factors.astype(np.float32).tolist())
    assert min(found) == 1
    assert any(1 < factor < 8 for factor in found)
    assert model_of(file, found) == parse_model_config(read_config(source) | {"dtype": None})
    assert greedy(file, found) == greedy(source)


@pytest.mark.parametrize("name", ["scaling.factor", "scale_linear"])
def test_a_factor_without_a_type_is_linear(name: str, tmp_path: Path, model_directory) -> None:
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", metadata={f"llama.rope.{name}": 4.0})
    assert model_of(file).rope == RopeConfig(10_000.0, "linear", 4.0)


def test_other_factors_are_refused(tmp_path: Path, model_directory) -> None:
    rope = read_config(model_directory("llama3"))["rope_parameters"]
    assert rope["original_max_position_embeddings"] == 64
    file = write_gguf(model_directory("llama3"), tmp_path / "model.gguf")
    for factors in (llama3_factors(rope, 16), llama3_factors(rope, 12), np.full(8, np.nan), np.zeros(8)):
        with pytest.raises(StartupError, match=r"rope_freqs\.weight"):
            model_of(file, tuple(factors.tolist()))


def test_llama_4_has_what_llama_cpp_takes_to_be_so(tmp_path: Path, model_directory) -> None:
    """Scout's scaling by its factors, Maverick's heads without norms, and no model without chunks."""
    header = parsed(write_gguf(model_directory("llama4"), tmp_path / "model.gguf"))
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192, "factor": 16.0}
    header.metadata["llama4.rope.freq_base"] = 500_000.0
    factors = tuple(llama3_factors(rope | {"rope_theta": 500_000.0}, head_dim=16).tolist())
    assert set(factors) == {1.0, 16.0}
    assert config_of(header, {ROPE_FACTORS: factors})["rope_scaling"] == {"rope_type": "llama3"} | rope
    assert config_of(header, {})["use_qk_norm"]
    header.metadata["llama4.expert_count"] = 128
    assert not config_of(header, {})["use_qk_norm"]
    header.metadata["llama4.attention.sliding_window"] = 0
    with pytest.raises(StartupError, match=r"llama4\.attention\.sliding_window=0"):
        config_of(header, {})


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors."""
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors)


@pytest.mark.parametrize("name", list(STORED))
def test_any_block_is_dequantised_as_the_gguf_package_does(name: str) -> None:
    blocks = random_blocks(name, 200, BLOCKS[name][0])
    assert torch.equal(dequantise(name, blocks), torch.from_numpy(gguf.dequantize(blocks.numpy(), Q[name])))


@pytest.mark.parametrize("name", list(STORED))
def test_a_tensor_of_many_slabs_is_read_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gguf, "GGUF_SLAB_BYTES", 3 * BLOCKS[name][1])
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen2")
    rows = random_blocks(name, 10, 2 * BLOCKS[name][0]).numpy()
    writer.add_tensor("output.weight", rows, raw_dtype=Q[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufReader(tmp_path / "one.gguf", torch.bfloat16).get_tensor("lm_head.weight")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(rows, Q[name])).bfloat16())


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("gemma4", "gemma4.feed_forward_length", None, r"no gemma4\.feed_forward_length"),
        ("gemma4", "gemma4.attention.shared_kv_layers", "x", r"gemma4\.attention\.shared_kv_layers is 'x'"),
        ("qwen2", "qwen2.rope.scaling.yarn_attn_factor", "x", r"qwen2\.rope\.scaling\.yarn_attn_factor is 'x'"),
        ("qwen2", "qwen2.embedding_length", None, r"no qwen2\.embedding_length"),
        ("falcon_h1", "falcon-h1.ssm.time_step_rank", [1], r"falcon-h1\.ssm\.time_step_rank is \[1\]"),
    ],
)
def test_a_value_that_is_missing_or_of_another_type_is_named(
    name: str, key: str, value: Any, says: str, tmp_path: Path, model_directory
) -> None:
    header = parsed(write_gguf(model_directory(name), tmp_path / "model.gguf"))
    header.metadata[key] = value
    if value is None:
        del header.metadata[key]
    with pytest.raises(BadCheckpoint, match=says):
        config_of(header, {})


def test_only_llamas_queries_and_keys_were_turned() -> None:
    llama = {"general.architecture": "llama", "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2}
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    assert [num_turned_heads(name, llama) for name in names] == [8, 2, None, None]
    assert [num_turned_heads(name, {"general.architecture": "qwen2"}) for name in names] == [None] * 4


def test_tensors_that_no_model_has_are_named(tmp_path: Path, model_directory) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(model_directory("llama2") / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_bytes((model_directory("llama2") / "config.json").read_bytes())
    file = write_gguf(source, tmp_path / "model.gguf")
    with pytest.raises(BadCheckpoint, match=r"not this architecture's: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_weights(open_checkpoint(file), model_of(file), torch.float32, torch.device("cpu"), no_progress)


def test_a_header_is_parsed_once_however_often_its_file_is_opened(
    tmp_path: Path, model_directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", Q.Q8_0)
    config, parsed_files = model_of(file), list[str]()

    def parse(content: memoryview, name: str, has_tokenizer: bool) -> GgufFile:
        parsed_files.append(name)
        return parse_gguf(content, name, has_tokenizer)

    monkeypatch.setattr("gpu.checkpoint.parse_gguf", parse)
    list(load_weights(open_checkpoint(file), config, torch.float32, torch.device("cpu"), no_progress).layers)
    assert parsed_files == [str(file)]


def test_progress_counts_the_files_bytes_and_the_plan_knows_them(tmp_path: Path, model_directory) -> None:
    file = write_gguf(model_directory("llama2"), tmp_path / "model.gguf", Q.Q8_0)
    total = sum(found.size_bytes for found in parsed(file).tensors.values())
    seen: list[tuple[int, int]] = []
    load_runner(file, model_of(file), ENGINE, lambda done, whole: seen.append((done, whole)))
    assert (seen[0], seen[-1]) == ((0, total), (total, total))
    assert estimate(file, model_of(file), ENGINE).checkpoint_bytes == total
