"""A model that several ranks share says what it says on one; what cannot be shared is refused with what can."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ExpertsConfig
from core.config_json import parse_model_config
from core.errors import StartupError
from core.plan import PromptTargets, make_plan
from core.prequantized import Fp8Config, PackedConfig
from gpu.checkpoint import open_checkpoint
from gpu.memory_plan import MemoryPlan
from gpu.parallel.ranks import Shard, check_shards, part_of
from gpu.parallel.runner import find_room, plan_rank
from gpu.parameters import ModelWeights
from gpu.quant import dequantize, quantize
from gpu.weights import AS_THEY_ARE, MatrixForm
from tests import fp8_files, packed_files
from tests.gpu.conftest import ENGINE, load_whole, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.gpu.parallel.lockstep import Lockstep
from tests.gpu.test_memory_plan import MODEL
from tests.gpu.test_model import make_prompt
from tests.gpu.test_weights import every_tensor
from tests.oracle import FAMILIES, read_config, save_random_model

NUM_TOKENS = 12
PROMPTS = (make_prompt(1, 37), make_prompt(2, 1))
UNSHARED = {"qwen2": "7 heads", "qwen3": "5 heads"}
ALIKE = {  # split as one of the others
    *(
        "gemma",
        "olmo3",
        "seed_oss",
        "ernie4_5",
        "glm",
        "gemma3_vision",
        "mistral3",
        "qwen2_5_vl",
        "qwen3_vl",
        "ernie4_5_moe",
    ),
}
RECURRENT = {"lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "granite_hybrid", "granite_hybrid_dense"}
RECURRENT |= {"bamba", "falcon_h1", "falcon_h1_normed", "nemotron_h"}
DIFFERING = {"gemma3n", "gemma4", "gemma4_moe"}  # these two are not split
SHARED = [family for family in FAMILIES if family not in {*UNSHARED, *ALIKE, *RECURRENT, *DIFFERING}]


def tokens_of(runner: object) -> list[list[int]]:
    driver = Driver(runner)
    return driver.generate(NUM_TOKENS, *(driver.add(prompt) for prompt in PROMPTS))


@pytest.mark.parametrize("family", SHARED)
def test_two_ranks_say_what_one_says(family: str, model_directory: Callable[[str], Path]) -> None:
    directory = model_directory(family)
    two = Lockstep(directory, 2)
    assert tokens_of(two) == tokens_of(open_runner(directory))
    config = two.runners[0].config
    num_sums = 3 if family == "olmo2" else 2  # of a layer: attention, MLP, and squares where heads are normed together
    assert two.meeting.num_sums == num_sums * config.num_layers * NUM_TOKENS  # the first step computes the prompts


def test_two_ranks_say_how_likely_a_prompt_is_as_one_does(model_directory: Callable[[str], Path]) -> None:
    directory, told = model_directory("llama3"), []
    targets = [PromptTargets(row=0, first=3, token_ids=tuple(PROMPTS[0][4:]), num_top=2)]
    for runner in (open_runner(directory), Lockstep(directory, 2)):
        tables = [(0, index, index) for index in range(3)]
        plan = make_plan([(0, 0, PROMPTS[0], True)], tables=tables, prompt_targets=targets)
        told.append(runner.collect(runner.forward(plan)).prompt_logprobs[0])
    one, two = told
    assert [entry.token_id for entry in two] == PROMPTS[0][4:]
    assert [[name for name, _ in entry.top] for entry in two] == [[name for name, _ in entry.top] for entry in one]
    assert [entry.logprob for entry in two] == pytest.approx([entry.logprob for entry in one], abs=1e-4)


@pytest.mark.parametrize("family", ["llama2", "gemma3"])
def test_four_ranks_say_what_one_says(family: str, model_directory: Callable[[str], Path]) -> None:
    """Of gemma3 all share one KV head."""
    directory = model_directory(family)
    assert tokens_of(Lockstep(directory, 4)) == tokens_of(open_runner(directory))


def test_a_vocabulary_that_does_not_split_evenly_is_whole_again(model_directory: Callable[[str], Path]) -> None:
    config = parse_model_config(read_config(model_directory("llama3")))
    rows = [Shard(config, rank, 7).head_rows for rank in range(7)]
    assert [row.stop - row.start for row in rows] == [43] * 6 + [42]
    assert rows[-1].stop == config.vocab_size == 300


def plan_of(directory: Path, engine: EngineConfig = ENGINE) -> MemoryPlan:
    """Of each of two ranks."""
    engine = replace(engine, tensor_parallel=2)
    room = find_room(directory, parse_model_config(read_config(directory)), engine, 0)
    return plan_rank(room, 1 << 30)


def loaded(directory: Path, shard: Shard | None, form: MatrixForm = AS_THEY_ARE) -> ModelWeights:
    config = parse_model_config(read_config(directory))
    checkpoint = open_checkpoint(directory, config.packing)
    return load_whole(checkpoint, config, torch.float32, torch.device("cpu"), no_progress, form, shard=shard)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_each_rank_quantises_its_own_part(scheme: str, model_directory: Callable[[str], Path]) -> None:
    """Rows' scales are those of one rank where outputs are split, and no larger where inputs are."""
    directory = model_directory("llama2")
    config = parse_model_config(read_config(directory))
    form = MatrixForm(lambda weight: quantize(weight, scheme))
    whole = loaded(directory, None, form).layers[0]
    parts = [loaded(directory, Shard(config, rank, 2), form).layers[0] for rank in range(2)]
    for name, rows in (("values", whole.mlp.gate_up.values), ("scales", whole.mlp.gate_up.scales)):
        halves = zip(*(getattr(part.mlp.gate_up, name).chunk(2) for part in parts), strict=True)
        assert torch.equal(torch.cat([torch.cat(half).float() for half in halves]), rows.float())
    scales = torch.cat([part.output.scales for part in parts], 1)
    of_rows = scales if scheme == "int8" else scales.amax(1, keepdim=True)  # int8 has one for 32 inputs
    assert torch.equal(of_rows, whole.output.scales)
    engine = replace(ENGINE, quantize=scheme)
    assert plan_of(directory, engine).weights_bytes < plan_of(directory).weights_bytes


def test_quantised_ranks_compute_about_what_one_computes(model_directory: Callable[[str], Path]) -> None:
    engine = replace(ENGINE, quantize="int8")
    directory = model_directory("llama2")
    two, one = Lockstep(directory, 2, engine), open_runner(directory, engine)
    plan = make_plan([(0, 0, PROMPTS[0], True)], tables=[(0, index, index) for index in range(3)])
    got, want = two.forward(plan).sent.logits, one.forward(plan).sent.logits
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("family", ["llama_biased_yarn", "phi3", "mixtral", "gpt_oss"])
def test_the_parts_of_all_ranks_are_the_whole(family: str, model_directory: Callable[[str], Path]) -> None:
    directory = model_directory(family)
    config = parse_model_config(read_config(directory))
    whole = loaded(directory, None).layers[0]
    parts = [loaded(directory, Shard(config, rank, 2)).layers[0] for rank in range(2)]
    assert torch.equal(torch.cat([part.output for part in parts], 1), whole.output)
    assert torch.equal(torch.cat([part.mlp.down for part in parts], -1), whole.mlp.down)
    sizes = [config.query_size // 2, config.kv_size // 2, config.kv_size // 2]
    heads = [torch.cat(of_all) for of_all in zip(*(part.qkv.split(sizes) for part in parts), strict=True)]
    assert torch.equal(torch.cat(heads), whole.qkv)
    halves = zip(*(part.mlp.gate_up.chunk(2, -2) for part in parts), strict=True)
    assert torch.equal(torch.cat([torch.cat(half, -2) for half in halves], -2), whole.mlp.gate_up)
    for bias in ("output_bias", "attention_norm"):
        one, other, both = (getattr(each, bias) for each in (*parts, whole))
        assert (both is None) or torch.equal(one, both)
        assert (both is None) or (not other.any() if bias == "output_bias" else torch.equal(other, both))
    if parts[0].mlp.down_bias is not None:
        assert torch.equal(parts[0].mlp.down_bias, whole.mlp.down_bias)
        assert not parts[1].mlp.down_bias.any()


def test_a_rank_has_its_part_of_the_memory(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("llama3")
    config = parse_model_config(read_config(directory))
    size = {rank: sum(map(torch.numel, every_tensor(loaded(directory, Shard(config, rank, 2))))) for rank in (0, 1)}
    whole = sum(map(torch.numel, every_tensor(loaded(directory, None))))
    replicated = config.vocab_size * config.hidden_size + (2 * config.num_layers + 1) * config.hidden_size
    assert size[0] == size[1] == (whole - replicated) // 2 + replicated
    assert plan_of(directory).weights_bytes == 4 * size[0]
    assert plan_of(directory).num_parameters == whole


@pytest.mark.parametrize(("family", "why"), UNSHARED.items())
def test_families_that_two_ranks_cannot_share_are_refused(
    family: str, why: str, model_directory: Callable[[str], Path]
) -> None:
    config = parse_model_config(read_config(model_directory(family)))
    with pytest.raises(StartupError, match=why):
        check_shards(config, 2, is_prequantized=False)


@pytest.mark.parametrize(
    ("fields", "num_ranks", "message"),
    [
        ({}, 3, r"--tensor-parallel 3: 32 heads do not split into 3 parts. Fix: --tensor-parallel 1, or 2, or 4, or 8"),
        ({"num_kv_heads": 12, "num_heads": 48}, 8, "12 KV heads neither split into 8 parts nor"),
        (
            {"intermediate_size": 14_334},
            4,
            "an MLP of 14334 does not split into 4 parts. Fix: --tensor-parallel 1, or 2",
        ),
    ],
)
def test_sizes_that_do_not_split_are_refused_with_those_that_do(
    fields: dict[str, int], num_ranks: int, message: str
) -> None:
    model = replace(MODEL, **fields)
    with pytest.raises(StartupError, match=message) as caught:
        check_shards(model, num_ranks, is_prequantized=False)
    for count in caught.value.fix.removeprefix("--tensor-parallel ").removesuffix(".").split(", or "):
        check_shards(model, int(count), is_prequantized=False)


def test_experts_split_by_their_width() -> None:
    experts = ExpertsConfig(8, 2, 192, "gpt_oss", is_mxfp4=True)
    layers = (replace(MODEL.layer(0), is_sparse=True),) * MODEL.num_layers
    model = replace(MODEL, experts=experts, layers=layers, intermediate_size=101)
    check_shards(model, 2, is_prequantized=False)
    assert part_of(model, 2).experts.intermediate_size == 96
    with pytest.raises(StartupError, match="whole blocks of 32"):
        check_shards(model, 4, is_prequantized=False)
    with pytest.raises(StartupError, match="experts of 98 do not split into 4 parts"):
        check_shards(replace(model, experts=replace(experts, intermediate_size=98)), 4, is_prequantized=False)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_norms_over_all_heads_are_those_of_one_rank(num_ranks: int, tmp_path: Path) -> None:
    """Of two KV heads four ranks have a copy each of one."""
    directory = save_random_model("olmo2", tmp_path)
    assert tokens_of(Lockstep(directory, num_ranks)) == tokens_of(open_runner(directory))


PACKED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False},
    "gptq whole rows": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}


@pytest.mark.parametrize("name", PACKED)
def test_ranks_share_packed_matrices(name: str, tmp_path: Path) -> None:
    """Groups of 64 inputs, of which a rank has 32 in attention, are cut into two."""
    directory, floats = packed_files.save_pair(tmp_path, PACKED[name])
    two = Lockstep(directory, 2)
    assert tokens_of(two) == tokens_of(open_runner(floats))
    assert_parts_are_the_whole(directory)
    assert plan_of(directory).weights_bytes < plan_of(floats).weights_bytes


@pytest.mark.parametrize("scheme", ["blocks", "blocks of 128", "whole", "compressed channels"])
def test_ranks_share_8_bit_floats(scheme: str, tmp_path: Path) -> None:
    _, plain = packed_files.save_pair(tmp_path / "plain", PACKED["awq"])
    directory, floats = fp8_files.save_pair(plain, tmp_path, fp8_files.SCHEMES[scheme])
    engine, want = replace(ENGINE, quantize="fp8"), tokens_of(open_runner(floats))
    assert tokens_of(Lockstep(directory, 2, engine)) == want
    assert tokens_of(Lockstep(directory, 2)) == want
    assert_parts_are_the_whole(directory)
    assert plan_of(directory, engine).weights_bytes < plan_of(directory).weights_bytes


def assert_parts_are_the_whole(directory: Path) -> None:
    config = parse_model_config(read_config(directory))
    form = MatrixForm(serves_prequantized=True)
    whole = loaded(directory, None).layers[0]
    parts = [loaded(directory, Shard(config, rank, 2), form).layers[0] for rank in range(2)]
    outputs, downs = (
        [dequantize(getattr(owner, name), torch.float32) for owner in owners]
        for owners, name in ((parts, "output"), ([part.mlp for part in parts], "down"))
    )
    assert torch.allclose(torch.cat(outputs, 1), whole.output, atol=1e-6)
    assert torch.allclose(torch.cat(downs, 1), whole.mlp.down, atol=1e-6)


def test_8_bit_floats_of_fused_and_of_experts_matrices_are_shared(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    for family in ("phi3", "mixtral"):
        directory, floats = fp8_files.save_pair(
            model_directory(family), tmp_path / family, fp8_files.SCHEMES["compressed channels"]
        )
        two = Lockstep(directory, 2, replace(ENGINE, quantize="fp8"))
        assert tokens_of(two) == tokens_of(open_runner(floats))


def test_groups_that_ranks_cannot_share_are_refused_with_what_can() -> None:
    model = replace(MODEL, intermediate_size=9728, packing=PackedConfig("gptq", 4, 128, has_order=False, zero_offset=1))
    for packed in (model, replace(model, packing=Fp8Config((128, 128)))):
        check_shards(packed, 4, is_prequantized=True)
        with pytest.raises(
            StartupError, match=r"rows of 9728 .* by 128 do not split into 32 .*Fix: .* 2, or 4"
        ) as caught:
            check_shards(replace(packed, num_kv_heads=32), 32, is_prequantized=True)
        assert "32" not in caught.value.fix
        check_shards(replace(packed, num_kv_heads=32), 32, is_prequantized=False)
    check_shards(replace(model, packing=Fp8Config(None)), 8, is_prequantized=True)
