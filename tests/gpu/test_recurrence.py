"""Models with recurrent layers: states are kept, found, forked and given back, and no answer depends on any of it."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import StartupError
from core.plan import make_plan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.recurrence import read_states
from gpu.runner import ModelRunner
from tests.fakes import FakeClock
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.operator_cases import noise
from tests.gpu.test_overlap import EOS, draw_workload
from tests.oracle import Oracle
from tests.workload import Outcome, Workload, WorkloadRun

FAMILIES = ("lfm2", "qwen3_5", "falcon_h1")
PARTS = ("gate", "up", "down")
SHARED = random.Random(3).choices(range(3, 300), k=50)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


def run(runner: ModelRunner, workload: Workload, **limits: Any) -> tuple[dict[str, Outcome], Scheduler]:
    scheduler = Scheduler(replace(runner.limits, **limits), (EOS,), seeds=lambda: 0)
    found = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
    assert scheduler.pool.num_used == 0
    kept = scheduler.states.kept
    assert kept is not None
    assert kept.num_used == len(kept._blocks)
    assert not any(kept._num_readers)
    return found, scheduler


def ask(request_id: str, prompt: list[int], num_tokens: int = 12, num_sequences: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling, arrival_s=0.0, num_sequences=num_sequences
    )


def test_tokens_and_logprobs_do_not_depend_on_what_else_is_computed(
    name: str, model_directory: Callable[[str], Path]
) -> None:
    """In few blocks and few places for states, with a step in flight or without, beside those that leave and pause."""
    runner = open_runner(model_directory(name), replace(ENGINE, dtype="bfloat16", deterministic=True))
    limits = {"num_kept_states": 2} if name == "lfm2" else {"num_kept_states": 12, "max_in_flight": 2}
    drawn = draw_workload(random.Random(13 if name == "lfm2" else 2))
    workload = replace(drawn, requests=drawn.requests[:7])
    found, crowd = run(runner, workload, num_blocks=6, max_batch_tokens=40, timed_rows=(), **limits)
    assert crowd.stats().num_preemptions > 0
    assert crowd.stats().num_cache_hits > 0
    for _, request in workload.requests:
        if (request.request_id, 0) not in {**workload.stops_after, **workload.leaves_after}:
            expected, _ = run(runner, Workload([(0, request)]), num_kept_states=0)
            assert found[request.request_id].endings == expected[request.request_id].endings


def test_float32_is_the_same_in_any_company_where_channels_fill_no_vectors(
    model_directory: Callable[[str], Path],
) -> None:
    runner = open_runner(model_directory("qwen3_5_moe"), replace(ENGINE, dtype="float32", deterministic=True))
    workload = draw_workload(random.Random(1))
    found, _ = run(runner, workload, num_blocks=6, max_batch_tokens=40, timed_rows=())
    for _, request in workload.requests:
        if (request.request_id, 0) not in {**workload.stops_after, **workload.leaves_after}:
            expected, _ = run(runner, Workload([(0, request)]), num_kept_states=0, timed_rows=())
            assert found[request.request_id].endings == expected[request.request_id].endings


@pytest.mark.parametrize("shape", [(3, 20, 26), (3, 20, 25), (3, 24, 26), (5, 11, 30), (2, 64, 32)])
def test_a_state_is_read_alike_at_any_place(shape: tuple[int, int, int]) -> None:
    heads, key_dim, value_dim = shape
    vectors, states = noise(24, heads, key_dim), noise(24, heads, key_dim, value_dim)
    together = read_states(vectors, states)
    torch.testing.assert_close(together, torch.einsum("thk,thkv->thv", vectors, states))
    for first in range(24):
        for num in (1, 2, 3, 7):
            rows = slice(first, first + num)
            assert torch.equal(read_states(vectors[rows].clone(), states[rows].clone()), together[rows])


def test_prompts_go_on_from_kept_states(name: str, model_directory: Callable[[str], Path]) -> None:
    """An equal prompt from its last block border; another one, the second time, from where it leaves the path."""
    runner, oracle = open_runner(model_directory(name)), Oracle(model_directory(name))
    prompts = {"first": SHARED, "equal": SHARED, "other": SHARED[:40] + [9] * 30, "third": SHARED[:40] + [8] * 30}
    cached, scheduler = {}, Scheduler(runner.limits, (EOS,), seeds=lambda: 0)
    for number, (one, prompt) in enumerate(prompts.items()):
        before = scheduler.stats().num_cache_hits
        found = WorkloadRun(Workload([(0, ask(one, prompt))]), scheduler, runner, FakeClock()).run()
        cached[one] = scheduler.stats().num_cache_hits - before
        said = found[one].endings[0].token_ids
        assert said == oracle.greedy(prompt, 12, said), number
    assert cached == {"first": 0, "equal": 48, "other": 0, "third": 32}
    turn = [*SHARED, *oracle.greedy(SHARED, 12), 5, 6]  # its answer filled a block, of which a state is kept
    WorkloadRun(Workload([(0, ask("turn", [*turn, 7, 8]))]), scheduler, runner, FakeClock()).run()
    WorkloadRun(Workload([(0, ask("turn", turn, 20))]), scheduler, runner, FakeClock()).run()
    before = scheduler.stats().num_cache_hits
    answer = oracle.greedy(turn, 20)
    WorkloadRun(Workload([(0, ask("next", [*turn, *answer, 5]))]), scheduler, runner, FakeClock()).run()
    assert scheduler.stats().num_cache_hits - before == (len(turn) + 19) // 16 * 16


def test_forks_say_what_the_oracle_says(name: str, model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory(name))
    oracle = Oracle(model_directory(name))
    for limits in ({}, {"num_kept_states": 0}, {"num_kept_states": 1, "num_blocks": 8}):
        found, _ = run(runner, Workload([(0, ask("r", SHARED, 16, num_sequences=3))]), **limits)
        said = [ending.token_ids for ending in found["r"].endings]
        assert said == [oracle.greedy(SHARED, 16, said[0])] * 3


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel"),
        ({"kv_offload_bytes": 2**20}, "--kv-offload-memory"),
        ({"kv_offload_dir": "kv"}, "--kv-offload-dir"),
        ({"deterministic": True, "max_batch_tokens": 20}, "--deterministic"),
    ],
)
def test_what_does_not_go_with_recurrent_layers_is_refused(
    settings: dict[str, Any], flag: str, model_directory: Callable[[str], Path]
) -> None:
    with pytest.raises(StartupError, match=flag):
        open_runner(model_directory("lfm2"), replace(ENGINE, **settings))


def test_experts_may_lie_in_one_tensor(model_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """As in the published checkpoints; transformers writes each into its own."""
    source = model_directory("qwen3_5_moe")
    tensors = load_file(source / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for part in PARTS] for i in range(6)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(part[:2]) for part in parts])
        tensors[f"{prefix}.down_proj"] = torch.stack([part[2] for part in parts])
    save_file(tensors, tmp_path / "model.safetensors")
    plan = make_plan([(0, 0, SHARED, True)], tables=[(0, index, index) for index in range(4)])
    apart, stacked = (open_runner(one).forward(plan).sent.logits for one in (source, tmp_path))
    assert torch.equal(apart, stacked)
