"""Models in which some layers have windows: what these give back changes no token, and is given back."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.kv_cache import least_window_blocks, num_seen_blocks
from core.scheduler import Scheduler
from core.types import Beams, Request, SamplingParams
from gpu.memory_plan import plan_memory, why_one_table
from gpu.runner import ModelRunner
from tests.fakes import FakeClock
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.test_overlap import EOS, draw_workload
from tests.gpu.test_speculation import Answers, ReplayingScheduler, with_every_setting
from tests.oracle import Oracle, read_config
from tests.workload import Outcome, Workload, WorkloadRun

FAMILIES = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "qwen2_late_window_dynamic", "llama4_chunks")
SHORT_STEPS = replace(ENGINE, max_batch_tokens=24)
LONG = random.Random(3).choices(range(3, 300), k=150)  # some windows


def ask(request_id: str, prompt: list[int], num_tokens: int = 12, num_sequences: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(
        request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling, arrival_s=0.0, num_sequences=num_sequences
    )


def run(
    runner: ModelRunner, workload: Workload, answers: Answers | None = None, **limits: Any
) -> tuple[dict[str, Outcome], Scheduler]:
    """answers: what drafts are made of; None: suffixes."""
    if runner.limits.num_window_blocks is None:
        limits.pop("num_window_blocks", None)
    make = Scheduler if answers is None else ReplayingScheduler
    scheduler = make(replace(runner.limits, **limits), (EOS,), seeds=lambda: 0)
    if isinstance(scheduler, ReplayingScheduler):
        scheduler.answers = answers or {}
    found = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
    assert scheduler.pool.num_used == scheduler.stats().num_used_window_blocks == 0
    return found, scheduler


def fewest(runner: ModelRunner, max_batch_tokens: int, num_more: int = 0) -> int:
    assert runner.limits.window is not None
    return least_window_blocks(runner.limits.window, max_batch_tokens, 16) + num_more


def long_workload(rng: random.Random) -> Workload:
    """As draw_workload, with prompts of some windows."""
    drawn, stem = draw_workload(rng), rng.choices(range(3, 300), k=110)
    return replace(
        drawn,
        requests=[
            (step, structs.replace(request, prompt_ids=(*stem[: rng.choice((0, 70, 110))], *request.prompt_ids)))
            for step, request in drawn.requests
        ],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_say_what_the_oracle_says(family: str, model_directory: Callable[[str], Path]) -> None:
    """In chunks, found again whole and in part, forked, and beside others in too few window blocks."""
    runner, oracle = open_runner(model_directory(family), SHORT_STEPS), Oracle(model_directory(family))
    assert runner.limits.num_window_blocks
    limits = {"num_window_blocks": fewest(runner, 24, 4), "num_blocks": 40}
    scheduler = Scheduler(replace(runner.limits, **limits), (EOS,), seeds=lambda: 0)
    asked = {"a": (LONG, 1), "again": (LONG, 1), "fork": (LONG[:90] + [9] * 20, 3), "part": (LONG[:112], 1)}
    for name, (prompt, num_sequences) in asked.items():
        workload = Workload([(0, ask(name, prompt, num_sequences=num_sequences))])
        found = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
        said = [one.token_ids for one in found[name].endings]
        assert said == [oracle.greedy(prompt, 12, said[0])] * num_sequences
    assert scheduler.stats().num_cache_hits >= 144
    workload = Workload([(0, ask(name, prompt, num_sequences=num)) for name, (prompt, num) in asked.items()])
    found, _ = run(runner, workload, **limits)
    for name, (prompt, _) in asked.items():
        assert {one.token_ids == oracle.greedy(prompt, 12, one.token_ids) for one in found[name].endings} == {True}


@pytest.mark.parametrize(
    ("family", "settings", "max_in_flight"),
    [
        ("gemma3", {"dtype": "bfloat16"}, 1),
        ("gpt_oss", {"dtype": "bfloat16"}, 2),
        ("gemma2", {"dtype": "float32", "kv_dtype": "int8"}, 1),
    ],
)
def test_one_table_gives_the_same_tokens_and_logprobs(
    family: str, settings: dict[str, Any], max_in_flight: int, model_directory: Callable[[str], Path]
) -> None:
    """Of sequences that leave, pause, fork and are preempted, to the last bit."""
    engine = replace(SHORT_STEPS, deterministic=True, max_batch_tokens=40, **settings)
    runner = open_runner(model_directory(family), engine)
    whole = open_runner(model_directory(family), replace(engine, has_window_blocks=False))
    assert whole.limits.num_window_blocks is None
    assert runner.limits.num_window_blocks
    num_preemptions = num_hits = 0
    for seed in range(4):
        workload = (long_workload if seed % 2 else draw_workload)(random.Random(seed))
        limits: dict[str, Any] = {"num_blocks": 13 if seed % 2 else 6, "num_window_blocks": fewest(runner, 40, 2)}
        found, crowd = run(runner, workload, max_in_flight=max_in_flight, timed_rows=(), **limits)
        num_preemptions += crowd.stats().num_preemptions
        num_hits += crowd.stats().num_cache_hits
        for _, request in workload.requests:
            if (request.request_id, 0) not in {**workload.stops_after, **workload.leaves_after}:
                expected, _ = run(whole, Workload([(0, request)]), timed_rows=())
                assert found[request.request_id].endings == expected[request.request_id].endings, seed
    assert num_preemptions > 0
    assert num_hits > 0


def test_drafts_and_beams_change_no_token(model_directory: Callable[[str], Path]) -> None:
    """Under every setting, of sequences that leave, pause, fork and are preempted, to the last bit."""
    engine = replace(SHORT_STEPS, deterministic=True, max_batch_tokens=40)
    runner = open_runner(model_directory("gemma3"), engine)
    whole = open_runner(model_directory("gemma3"), replace(engine, has_window_blocks=False))
    limits = {"num_blocks": 13, "num_window_blocks": fewest(runner, 40, 4)}
    num_accepted = num_drafted = num_preemptions = num_hits = 0
    for seed in range(3):
        workload = with_every_setting(long_workload(rng := random.Random(seed)), rng)
        beams = structs.replace(ask("beams", LONG[: rng.choice((40, 90))], num_sequences=2), beams=Beams(2))
        workload = replace(workload, requests=[*workload.requests, (rng.randrange(12), beams)])
        expected, _ = run(whole, workload, timed_rows=())
        said, _ = run(whole, Workload(workload.requests), timed_rows=())
        answers = {(name, i): ending.token_ids for name, one in said.items() for i, ending in enumerate(one.endings)}
        found, crowd = run(runner, workload, answers, timed_rows=(), **limits)
        assert found == expected, f"seed {seed}"
        stats = crowd.stats()
        num_accepted, num_drafted = num_accepted + stats.num_accepted_tokens, num_drafted + stats.num_draft_tokens
        num_preemptions, num_hits = num_preemptions + stats.num_preemptions, num_hits + stats.num_cache_hits
    assert 50 < num_accepted < num_drafted
    assert num_preemptions > 0
    assert num_hits > 0


def test_a_long_sequence_holds_few_window_blocks(model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory("gemma3"), SHORT_STEPS)
    scheduler, window = Scheduler(runner.limits, (EOS,), seeds=lambda: 0), runner.limits.window
    assert window == 25
    most: dict[int, int] = {}  # by length

    class Counting:
        limits = runner.limits

        def forward(self, plan: Any) -> Any:
            for sequence in scheduler.states.running:
                most[sequence.num_computed_tokens] = scheduler.stats().num_used_window_blocks
            return runner.forward(plan)

        sample, collect = runner.sample, runner.collect

    WorkloadRun(Workload([(0, ask("a", LONG, 60))]), scheduler, Counting(), FakeClock()).run()
    assert max(most.values()) <= least_window_blocks(25, 24, 16)
    assert max(num for length, num in most.items() if length > 160) <= num_seen_blocks(25, 16)
    assert max(most) > 200


def test_a_row_that_fails_leaves_window_blocks_clean(model_directory: Callable[[str], Path]) -> None:
    runner, oracle = open_runner(model_directory("gemma3"), SHORT_STEPS), Oracle(model_directory("gemma3"))
    with torch.inference_mode():
        for tensor in (*runner._cache.tensors, *runner._cache.window_tensors):
            tensor[:, :, :-1] = torch.nan
    found, _ = run(runner, Workload([(0, ask("a", LONG))]))
    said = found["a"].endings[0].token_ids
    assert said == oracle.greedy(LONG, 12, said)
    (layer,) = {index for index, one in enumerate(runner._cache.layers) if not one.has_windows}
    assert layer == 2
    block = runner._cache.num_window_blocks - 1
    with torch.inference_mode():
        runner._cache.window_tensors[0][:, :, block] = torch.nan
        runner._cache.make_finite(torch.tensor([0, ~block]))
    assert runner._cache.window_tensors[0][:, :, block].isfinite().all()


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gemma3", {}, None),
        ("llama3", {}, "alike"),
        ("mistral", {}, "alike"),
        ("gemma3", {"has_window_blocks": False}, "drafts"),
        ("gemma3", {"kv_offload_bytes": 2**24}, "host memory"),
        ("gemma3", {"tensor_parallel": 2}, "ranks"),
        ("gemma3", {"max_model_len": 80}, "no more blocks"),
        ("gemma3", {"max_model_len": 16}, "alike"),
    ],
)
def test_where_window_blocks_do_not_help_or_are_not_supported_there_is_one_table(
    family: str, settings: dict[str, Any], why: str | None, model_directory: Callable[[str], Path]
) -> None:
    runner = open_runner(model_directory("gemma3"), SHORT_STEPS)
    model = parse_model_config(read_config(model_directory(family)), settings.get("max_model_len"))
    engine = replace(SHORT_STEPS, **settings)
    found = why_one_table(model, engine, runner.memory.device)
    assert found is why is None or (found is not None and why is not None and why in found)


def test_memory_goes_to_both_kinds_of_blocks(model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory("gemma3"), SHORT_STEPS)

    def planned(**settings: Any) -> Any:
        engine: EngineConfig = replace(SHORT_STEPS, **settings)
        return plan_memory(runner.config, engine, runner.memory.device, 0, 2**30, 2**20)

    for size_bytes in (2**20, 2**22, 2**24):
        made, whole = (planned(kv_memory_bytes=size_bytes, has_window_blocks=one) for one in (True, False))
        assert made.kv_bytes <= size_bytes < made.kv_bytes + made.block_bytes
        assert made.num_blocks > whole.num_blocks
        assert made.block_bytes + made.window_block_bytes == whole.block_bytes
        assert 2 * made.window_block_bytes == 4 * made.block_bytes  # two layers of three
        assert made.least_window_blocks <= made.num_window_blocks
    made, whole = (planned(kv_memory_bytes=None, has_window_blocks=one) for one in (True, False))
    assert made.num_blocks == whole.num_blocks == 16 * 16  # all sequences at full length
    assert made.kv_bytes < whole.kv_bytes
    assert made.least_kv_bytes < whole.least_kv_bytes
