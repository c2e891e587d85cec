"""Rows with adapters compute what the model does with the adapters' products added to its weights."""

import dataclasses
import json
import random
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.errors import BadAdapter, StartupError
from core.types import Adapter, Request, SamplingParams
from gpu.adapters import adapter_bytes
from gpu.cpu_kernels import support
from gpu.loading import load_runner
from gpu.runner import ModelRunner
from server.model_files import read_model_config
from tests import fp8_files
from tests.adapter_files import EVERYWHERE, save_adapter, save_merged
from tests.gguf_files import write_gguf
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.driver import Driver
from tests.gpu.test_overlap import draw_workload
from tests.gpu.test_speculation import run
from tests.oracle import read_config, save_random_model
from tests.workload import Names, Workload

LORAS = dataclasses.replace(ENGINE, max_loras=16, max_lora_rank=16)
PROMPT = list(range(40, 75))
SCORED = SamplingParams(max_tokens=1000, temperature=0.0, num_logprobs=8)
# rank-stabilised, and of other ranks and alphas in places
PATTERNS: dict[str, Any] = {
    "use_rslora": True,
    "lora_alpha": 4,
    "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 5, "^model.layers.0.self_attn.o_proj": 16},
    "alpha_pattern": {"v_proj": 9, "qkv_proj": 2.5},
}
# Of families that have others than EVERYWHERE, or experts. Falcon's factors multiply what adapters add, too
TARGETS: dict[str, tuple[str, ...]] = {
    "qwen3_moe": ("q_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
    "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    "qwen3_5": (*EVERYWHERE, *(f"in_proj_{name}" for name in ("qkv", "z", "a", "b")), "out_proj"),
    "qwen3_next": ("q_proj", "v_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    "granite_hybrid": ("q_proj", "in_proj", "out_proj"),
    "falcon_h1": (*EVERYWHERE, "in_proj", "out_proj"),
    "nemotron_h": ("v_proj", "o_proj", "in_proj", "out_proj"),
}
# Sizes, and matrices that files have otherwise
GGUF_MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama2": ({}, EVERYWHERE),
    "qwen3_5": ({}, TARGETS["qwen3_5"]),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
        TARGETS["qwen3_next"],
    ),
    "granite_hybrid_dense": ({}, ("q_proj", "in_proj", "input_linear", "output_linear")),
}
MODELS = Callable[[str], Path]


def says(runner: ModelRunner, adapter: Any = None, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after PROMPT, and the logprobs of each step's likeliest."""
    driver = Driver(runner)
    sequence = driver.add(PROMPT, SCORED, adapter=adapter)
    told = [driver.step({sequence.slot: 11}, sequence) for _ in range(3)]
    told += [driver.step(None, sequence) for _ in range(num_tokens)]
    entries = [entry for output in told for entry in output.logprobs.values()]
    return sequence.output_ids, torch.tensor([[logprob for _, logprob in entry.top] for entry in entries])


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama3", {"lora_alpha": 8}), *((name, PATTERNS) for name in ("llama3", "gemma2", "phi3", "glm4", *TARGETS))],
    ids=lambda value: value if isinstance(value, str) else "patterns" if value is PATTERNS else "plain",
)
def test_an_adapter_adds_what_merged_weights_have(
    family: str, settings: dict[str, Any], model_directory: MODELS, tmp_path: Path
) -> None:
    model = model_directory(family)
    runner = open_runner(model, LORAS)
    path = save_adapter(tmp_path / "adapter", model, targets=TARGETS.get(family, EVERYWHERE), **settings)
    adapter = runner.load_adapter(path)
    ids, logprobs = says(runner, adapter)
    merged_ids, merged_logprobs = says(open_runner(save_merged(tmp_path / "merged", model, path)))
    assert ids == merged_ids
    torch.testing.assert_close(logprobs, merged_logprobs, atol=2e-4, rtol=1e-4)
    assert ids != says(runner)[0]
    assert adapter.size_bytes <= adapter_bytes(runner.config, torch.float32, 16)


def open_gguf(file: Path, engine: EngineConfig = LORAS) -> ModelRunner:
    return load_runner(file, parse_model_config(read_model_config(file)), engine, no_progress)


@pytest.mark.parametrize("family", list(GGUF_MODELS))
def test_an_adapter_of_a_gguf_file_adds_what_merged_weights_have(family: str, tmp_path: Path) -> None:
    """As PEFT writes it for the safetensors, whatever order and parts the file's matrices have."""
    sizes, targets = GGUF_MODELS[family]
    model = save_random_model(family, tmp_path / "model", **sizes)
    path = save_adapter(tmp_path / "adapter", model, targets=targets, lora_alpha=8)
    merged = save_merged(tmp_path / "merged", model, path)
    runner = open_gguf(write_gguf(model, tmp_path / "model.gguf"))
    adapter = runner.load_adapter(path)
    ids, logprobs = says(runner, adapter)
    merged_ids, merged_logprobs = says(open_gguf(write_gguf(merged, tmp_path / "merged.gguf")))
    assert ids == merged_ids
    torch.testing.assert_close(logprobs, merged_logprobs, atol=2e-4, rtol=1e-4)
    assert ids != says(runner)[0]
    assert adapter.size_bytes <= adapter_bytes(runner.config, torch.float32, 16)


def test_a_gguf_file_with_factors_that_it_does_not_tell_takes_no_adapters(
    model_directory: MODELS, tmp_path: Path
) -> None:
    file = write_gguf(model_directory("falcon_h1"), tmp_path / "model.gguf")
    with pytest.raises(StartupError, match="--max-loras is not supported for this GGUF file: the model's multipliers"):
        open_gguf(file)
    open_gguf(file, ENGINE)


@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_sixteen_mixed_say_what_each_says_alone(
    by: str, model_directory: MODELS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and adapters in one batch, in chunks and decodes; the same bits as alone in both formats."""
    model = model_directory("llama3")
    if by == "kernels":
        if not support.has_needed_flags():
            pytest.skip("needs a CPU with AVX2")
        monkeypatch.setattr(support, "MIN_PARAMETERS", 0)
        model = save_random_model("llama2", tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    paths = [save_adapter(tmp_path / str(i), model, seed=i, r=1 + i % 9, size=0.4) for i in range(16)]
    for dtype in ("float32", "bfloat16") if by == "torch" else ("bfloat16",):
        runner = open_runner(model, dataclasses.replace(LORAS, dtype=dtype, max_sequences=18))
        adapters = [None, *map(runner.load_adapter, paths), None]
        assert all(bool(one.packed) == (by == "kernels") for one in adapters if one is not None)
        alone = [says(runner, adapter) for adapter in adapters]
        driver = Driver(runner)
        crowd = [driver.add(PROMPT, SCORED, adapter=adapter) for adapter in adapters]
        chunks = {one.slot: 1 + i % 13 for i, one in enumerate(crowd)}
        told: dict[int, list[list[float]]] = {one.slot: [] for one in crowd}
        while running := [one for one in crowd if len(one.output_ids) < len(alone[0][0])]:
            output = driver.step(chunks, *running)
            for index, entry in output.logprobs.items():
                told[running[output.rows[index]].slot].append([logprob for _, logprob in entry.top])
        for one, (ids, logprobs) in zip(crowd, alone, strict=True):
            assert one.output_ids == ids
            assert torch.equal(torch.tensor(told[one.slot]), logprobs)
        assert len({tuple(ids) for ids, _ in alone}) == 17, "each adapter has something else to say"


@pytest.mark.parametrize(("family", "dtype"), [("llama3", "float32"), ("falcon_h1", "bfloat16")])
def test_histories_say_what_each_request_says_alone(
    family: str, dtype: str, model_directory: MODELS, tmp_path: Path
) -> None:
    """With drafts, shared prompts, chunks, preemptions, pauses and clients that leave; base and adapters mixed."""
    model = model_directory(family)
    runner = open_runner(model, dataclasses.replace(LORAS, dtype=dtype))
    loaded = [runner.load_adapter(save_adapter(tmp_path / str(i), model, seed=i, size=0.4)) for i in range(3)]
    num_accepted = num_preempted = num_hits = 0
    for seed in range(2):
        rng = random.Random(seed)
        drawn = draw_workload(rng)
        requests = [
            (step, msgspec.structs.replace(one, adapter=rng.choice([None, *loaded]))) for step, one in drawn.requests
        ]
        workload = dataclasses.replace(drawn, requests=requests)
        alone = {}
        for _, one in requests:
            leaves = {name: num for name, num in drawn.leaves_after.items() if name[0] == one.request_id}
            stops = {name: num for name, num in drawn.stops_after.items() if name[0] == one.request_id}
            alone |= run(runner, Workload([(0, one)], stops, leaves), None)[0]
        said, _ = run(runner, Workload(requests, Names(), Names(), {}), None)
        answers = {(name, i): ending.token_ids for name, one in said.items() for i, ending in enumerate(one.endings)}
        outcomes, stats = run(runner, workload, answers)
        assert outcomes == alone, f"seed {seed}"
        num_accepted += stats.num_accepted_tokens
        num_preempted += stats.num_preemptions
        num_hits += stats.num_cache_hits
    assert min(num_accepted, num_preempted, num_hits) > 0


def test_what_an_adapter_has_computed_is_found_by_its_content(model_directory: MODELS, tmp_path: Path) -> None:
    model = model_directory("llama3")
    runner = open_runner(model, LORAS)
    path, same, other = (save_adapter(tmp_path / str(i), model, seed=i // 2) for i in range(3))
    adapters = [None, *map(runner.load_adapter, (path, same, other))]
    roots = [root_of(adapter) for adapter in adapters]
    assert roots[1] == roots[2]
    assert len(set(roots)) == 3


def root_of(adapter: Adapter | None) -> tuple[str, str]:
    asked = Request(request_id="a", prompt_ids=(1,), sampling=SCORED, arrival_s=0.0, cache_domain="d", adapter=adapter)
    return asked.cache_root


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_quantised_base_keeps_its_rounding(scheme: str, model_directory: MODELS, tmp_path: Path) -> None:
    """The products are added in floats, to what the quantised matrix gives: an adapter of nothing changes nothing."""
    model = model_directory("qwen2")
    runner = open_runner(model, dataclasses.replace(LORAS, quantize=scheme))
    nothing = runner.load_adapter(save_adapter(tmp_path / "nothing", model, size=0.0))
    something = runner.load_adapter(save_adapter(tmp_path / "something", model))
    ids, logprobs = says(runner)
    assert torch.equal(says(runner, nothing)[1], logprobs)
    assert says(runner, something)[0] != ids


def test_a_delta_net_that_is_quantised_in_part_takes_adapters_everywhere(
    model_directory: MODELS, tmp_path: Path
) -> None:
    scheme, steps = fp8_files.SCHEMES["compressed channels"], r"in_proj_ba\.weight"
    stored, floats = fp8_files.save_pair(model_directory("qwen3_next"), tmp_path, scheme, steps)
    path = save_adapter(tmp_path / "adapter", floats, targets=TARGETS["qwen3_next"], lora_alpha=8)
    (ids, logprobs), (wanted_ids, wanted) = (
        says(runner, runner.load_adapter(path)) for runner in (open_runner(one, LORAS) for one in (stored, floats))
    )
    assert ids == wanted_ids
    torch.testing.assert_close(logprobs, wanted, atol=2e-4, rtol=1e-4)


def test_rows_without_an_adapter_cost_no_operation_more(model_directory: MODELS, tmp_path: Path) -> None:
    """In steps with none: beside 16 that are loaded, and after one that was computed."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = Counter[str]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls[str(func)] += 1
            return func(*args, **(kwargs or {}))

    model = model_directory("llama3")
    found = []
    for engine in (ENGINE, LORAS):
        runner = open_runner(model, engine)
        if engine is LORAS:
            adapters = [runner.load_adapter(save_adapter(tmp_path / str(i), model, seed=i)) for i in range(16)]
            says(runner, adapters[0])
        with Counted() as counted:
            says(runner)
        found.append(counted.calls)
    assert found[0] == found[1]
    assert found[0].total() > 100


def test_a_slot_forgets_the_adapter_of_the_sequence_before(model_directory: MODELS, tmp_path: Path) -> None:
    runner = open_runner(model_directory("llama3"), LORAS)
    ids, _ = says(runner)
    adapter = runner.load_adapter(save_adapter(tmp_path / "adapter", model_directory("llama3")))
    with_adapter, _ = says(runner, adapter)
    assert says(runner)[0] == ids != with_adapter
    seen = weakref.ref(adapter)
    del adapter
    assert seen() is None, "the last request has ended, and its slot may stay empty for ever"
    assert says(runner)[0] == ids


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    settings, tensors = (
        json.loads((path / "adapter_config.json").read_text()),
        load_file(path / "adapter_model.safetensors"),
    )
    change(settings, tensors)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "adapter_model.safetensors")
    return path


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s, t: s.update(use_dora=True), "use_dora is true: DoRA is not supported"),
        (lambda s, t: s.update(bias="all"), 'bias is "all"'),
        (lambda s, t: s.update(peft_type="IA3"), "only LORA is supported"),
        (lambda s, t: s.update(modules_to_save=["lm_head"]), "modules_to_save is .*lm_head"),
        (lambda s, t: s.update(init_lora_weights="pissa_niter_4"), "it changes the base's weights"),
        (lambda s, t: s.update(layer_replication=[[0, 1]]), "layer_replication .* this is not served"),
        (lambda s, t: s.update(rank_pattern={"(a+)+b": 4}), "is not a module name"),
        (lambda s, t: s.update(r=0), "a rank below 1"),
        (lambda s, t: s.update(lora_alpha="much"), "cannot be read"),
        (lambda s, t: s.pop("r"), "cannot be read"),
        (lambda s, t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(4)}), "lora_magnitude_vector is DoRA's"),
        (lambda s, t: t.update({f"{Q}.lora_B.bias": torch.ones(4)}), "lora_B.bias is a bias"),
        (
            lambda s, t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 4)}),
            "embedding",
        ),
        (lambda s, t: t.update({"base_model.model.lm_head.weight": torch.ones(4, 4)}), "lm_head.weight is no lora_A"),
        (
            lambda s, t: t.update({f"base_model.model.lm_head.lora_{p}.weight": torch.ones(8, 8) for p in "AB"}),
            "lm_head",
        ),
        (lambda s, t: t.pop(f"{Q}.lora_B.weight"), "has lora_A.weight alone"),
        (
            lambda s, t: t.update({f"{Q}.lora_B.weight": torch.ones(50, 8)}),
            r"q_proj.lora_B.weight has the shape \[50, 8\]",
        ),
        (lambda s, t: s.update(r=4), r"lora_A.weight has the shape \[8, .* tests/base"),
        (lambda s, t: s.update(r=4), "The adapter was made for tests/base"),
        (lambda s, t: t.update({f"{Q}.lora_A.weight": t[f"{Q}.lora_A.weight"].int()}), "stored as torch.int32"),
        (lambda s, t: t.clear(), "contains no lora_A and lora_B"),
        (
            lambda s, t: t.update({f"{Q.replace('.0.', '.77.')}.lora_{p}.weight": torch.ones(8, 8) for p in "AB"}),
            "layers.77.self_attn.q_proj: this server's model has no such matrix. The adapter was made for tests/base",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    change: Any, says: str, llama_runner: ModelRunner, model_directory: MODELS, tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "adapter", model_directory("llama3"))
    with pytest.raises(BadAdapter, match=says):
        llama_runner.load_adapter(changed(path, change))


def test_files_that_cannot_be_read_are_named(
    llama_runner: ModelRunner, model_directory: MODELS, tmp_path: Path
) -> None:
    with pytest.raises(BadAdapter, match=r"adapter_config.json cannot be read: No such file"):
        llama_runner.load_adapter(tmp_path)
    path = save_adapter(tmp_path / "adapter", model_directory("llama3"))
    (path / "adapter_model.safetensors").write_bytes(b"not this")
    with pytest.raises(BadAdapter, match="is not a whole safetensors file"):
        llama_runner.load_adapter(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(BadAdapter, match=r"Pickled weights .* are not read"):
        llama_runner.load_adapter(path)
    (path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(BadAdapter, match="is not JSON"):
        llama_runner.load_adapter(path)
    with pytest.raises(BadAdapter, match="has rank 64; --max-lora-rank 16"):
        llama_runner.load_adapter(save_adapter(tmp_path / "large", model_directory("llama3"), r=64))
    experts = save_adapter(tmp_path / "experts", model_directory("qwen3_moe"), targets=["gate"])
    with pytest.raises(BadAdapter, match=r"mlp.gate: adapters of this matrix are not supported: .* not of experts"):
        open_runner(model_directory("qwen3_moe"), LORAS).load_adapter(experts)


def test_the_plan_counts_adapters_and_one_that_is_replaced(model_directory: MODELS) -> None:
    model = model_directory("llama3")
    config = parse_model_config(read_config(model))
    plain, planned = open_runner(model).memory, open_runner(model, LORAS).memory
    assert planned.total_bytes - plain.total_bytes == 17 * adapter_bytes(config, torch.float32, 16)
