"""Beam search on the real runner: transformers' answers, also where blocks are short, beside others, and cancelled."""

import random
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from core.engine import Engine, check_conservation
from core.plan import StepOutput
from core.scheduler import Scheduler
from core.types import (
    Beams,
    Cancel,
    FinishReason,
    Message,
    Pause,
    Request,
    Resume,
    SamplingParams,
    Submit,
    TokenLogprobs,
)
from gpu.runner import ModelRunner, StepTicket
from tests.fakes import DeliveryLog, FakeClock
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.test_overlap import draw_workload
from tests.oracle import FAMILIES, Oracle, save_random_model
from tests.workload import Workload, WorkloadRun

EMBEDDED = Path(__file__).parents[2] / "gpu/demo/model"
EOS = 2
ENDS = tuple(range(2, 60, 3))  # of random models, one of these comes soon
Answers = list[tuple[list[int], str]]


def theirs(oracle: Oracle, request: Request) -> Answers:
    """Each answer's tokens, and why it ended."""
    beams, sampling, prompt = request.beams, request.sampling, list(request.prompt_ids)
    assert beams is not None
    ends = [EOS, *sampling.stop_token_ids]
    found = oracle.generate(
        prompt,
        num_beams=beams.width,
        num_return_sequences=beams.width,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
    )
    answers: Answers = []
    for ids in found:
        end = next((place for place, token_id in enumerate(ids) if token_id in ends), None)
        answers.append((ids[:end], "length" if end is None else "stop"))
    return answers


def ours(runner: ModelRunner, workload: Workload, **limits: Any) -> tuple[dict[str, Answers], Scheduler]:
    runner.limits = replace(runner.limits, **limits)
    scheduler = Scheduler(runner.limits, (EOS,), seeds=lambda: 0)
    outcomes = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
    assert scheduler.pool.num_used == 0
    found = {
        name: [(ending.token_ids, str(ending.reason)) for ending in outcome.endings]
        for name, outcome in outcomes.items()
    }
    return found, scheduler


def draw_request(rng: random.Random, name: str, longest: int = 60) -> Request:
    width = rng.choice((1, 2, 3, 4, 8))
    stops = ENDS[: rng.choice((0, 1, 6, 19))]
    return Request(
        request_id=name,
        prompt_ids=tuple(rng.choices(range(60, 300), k=rng.randint(1, longest))),
        sampling=SamplingParams(max_tokens=rng.randint(1, 24), stop_token_ids=stops, min_tokens=rng.choice((0, 0, 1))),
        arrival_s=0.0,
        num_sequences=width,
        beams=Beams(width, rng.choice((1.0, 1.0, 0.0, -0.5, 2.0)), rng.choice((False, False, True, "never"))),
    )


def check(directory: Path, num_requests: int, seed: int = 0) -> int:
    """At once, in a pool that some of them may have to leave; returns how often sequences did."""
    rng = random.Random(seed)
    runner, oracle = open_runner(directory), Oracle(directory)
    requests = [draw_request(rng, f"r{number}") for number in range(num_requests)]
    workload = Workload([(number // 2, request) for number, request in enumerate(requests)])
    found, scheduler = ours(runner, workload, num_blocks=24, max_batch_tokens=48)
    for request in requests:
        assert found[request.request_id] == theirs(oracle, request), msgspec.json.encode(request)
    return scheduler.stats().num_preemptions


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe"])
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert check(save_random_model(name, tmp_path), 16) > 0


def test_answers_of_recurrent_layers_are_those_of_transformers(tmp_path: Path) -> None:
    check(save_random_model("lfm2", tmp_path), 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES)[::10])
def test_answers_of_other_families_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(save_random_model(name, tmp_path), 14, seed=1)


def mixed_workload(rng: random.Random) -> Workload:
    """Beams beside sampled answers; some are paused, some leave."""
    workload = draw_workload(rng)
    beams = [(rng.randrange(12), draw_request(rng, f"b{number}", 40)) for number in range(6)]
    pauses = {f"b{number}": (4 + number, 9 + number) for number in range(2)}
    return replace(workload, requests=[*workload.requests, *beams], pauses={**workload.pauses, **pauses})


def test_beams_beside_others_are_the_same_whatever_the_timing(llama_runner: ModelRunner) -> None:
    """Alone; beside sampled answers in few blocks; with two steps in flight."""
    num_preemptions = 0
    for seed in range(3):
        workload = mixed_workload(random.Random(seed))
        alone = [Workload([(0, request)]) for _, request in workload.requests if request.beams is not None]
        found = [
            ours(llama_runner, workload, num_blocks=14, max_batch_tokens=32, max_in_flight=count) for count in (1, 2)
        ]
        assert found[0][0] == found[1][0]
        num_preemptions += sum(scheduler.stats().num_preemptions for _, scheduler in found)
        for one in alone:
            expected, _ = ours(llama_runner, one, num_blocks=14, max_batch_tokens=32, max_in_flight=1)
            assert {name: found[0][0][name] for name in expected} == expected
    assert num_preemptions > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["embedded", "llama3"])
def test_equal_sums_rank_the_same_in_any_company(name: str, dtype: str, tmp_path: Path) -> None:
    """Order and logprobs too, beside requests that ask for more of the likeliest: torch orders equal ones by that."""
    directory = EMBEDDED if name == "embedded" else save_random_model(name, tmp_path)
    runner = open_runner(directory, replace(ENGINE, dtype=dtype, kv_memory_bytes=2**25))
    for seed in range(1):
        rng = random.Random(seed)
        shown = SamplingParams(max_tokens=30, num_logprobs=3)
        asked = [structs.replace(draw_request(rng, f"r{number}", 20), sampling=shown) for number in range(6)]
        greedy = structs.replace(shown, temperature=0.0)
        asked.append(Request(request_id="greedy", prompt_ids=(70, 80, 90), sampling=greedy, arrival_s=0.0))
        other = structs.replace(asked[-1], request_id="other", sampling=structs.replace(greedy, num_logprobs=20))
        company = answers_of(runner, [*asked, other])
        for one in asked:
            assert answers_of(runner, [one])[one.request_id] == company[one.request_id], msgspec.json.encode(one)


def answers_of(runner: ModelRunner, requests: list[Request]) -> dict[str, list[list[TokenLogprobs]]]:
    """By request: each answer's tokens, and the likeliest beside them."""
    log, scheduler = DeliveryLog(), Scheduler(runner.limits, (EOS,), seeds=lambda: 0)
    engine = Engine(scheduler, runner, FakeClock(), deque(map(Submit, requests)), log)
    while engine.step():
        pass
    answers: dict[str, list[list[TokenLogprobs]]] = {}
    for one in requests:
        answers[one.request_id] = [[] for _ in range(one.num_sequences)]
        for chunk in log.chunks_of(one.request_id):
            answers[one.request_id][chunk.index] += chunk.logprobs or ()
    return answers


def test_beams_that_leave_give_all_back(llama_runner: ModelRunner) -> None:
    """Cancelled, paused, resumed at any step: one terminal chunk each, nothing lost, and what they computed counts."""
    llama_runner.limits = replace(llama_runner.limits, num_blocks=18, max_batch_tokens=32)
    for seed in range(6):
        rng, inbox, log = random.Random(seed), deque[Message](), DeliveryLog()
        scheduler = Scheduler(llama_runner.limits, (EOS,), seeds=lambda: 0)
        engine = Engine(scheduler, llama_runner, FakeClock(), inbox, log)
        requests = [draw_request(rng, f"b{number}", 40) for number in range(8)]
        inbox.extend(map(Submit, requests))
        for _ in range(150):
            name = f"b{rng.randrange(8)}"
            inbox.extend(rng.choice(([], [], [Pause(name)], [Resume(name)], [Resume(name)])))
            if rng.random() < 0.05:
                inbox.append(Cancel(name, FinishReason.CANCELLED, rng.choice((None, 0, 1)), 0))
            engine.step()
            check_conservation(scheduler)
        inbox.extend(Resume(request.request_id) for request in requests)
        while engine.step():
            check_conservation(scheduler)
        for request in requests:
            usage = log.terminal(request.request_id).usage
            assert usage is not None
            shown = sum(len(log.tokens(request.request_id, index)) for index in range(request.num_sequences))
            assert shown <= usage.num_completion_tokens <= request.num_sequences * request.max_tokens
            if log.finish_reason(request.request_id) is not FinishReason.CANCELLED:
                assert usage.num_completion_tokens > 0


def test_a_beam_that_breaks_ends_its_request_alone(llama_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, log = deque[Message](), DeliveryLog()
    scheduler = Scheduler(llama_runner.limits, (), seeds=lambda: 0)
    engine = Engine(scheduler, llama_runner, FakeClock(), inbox, log)
    sampling = SamplingParams(max_tokens=9)
    make = partial(Request, sampling=sampling, arrival_s=0.0, num_sequences=3, beams=Beams(3))
    inbox.extend(Submit(make(request_id=name, prompt_ids=(70 + ord(name), 80, 90))) for name in "ab")
    for _ in range(4):
        engine.step()
    collect = llama_runner.collect

    def collect_broken(ticket: StepTicket) -> StepOutput:
        output = collect(ticket)
        kept = output.rows != 1
        logprobs = [output.logprobs[i] for i in range(len(output.rows)) if kept[i]]
        named = dict(enumerate(logprobs))
        return StepOutput(output.rows[kept], output.token_ids[kept], named, failed_rows={1: "not finite"})

    monkeypatch.setattr(llama_runner, "collect", collect_broken)
    engine.step()
    monkeypatch.undo()
    while engine.step():
        check_conservation(scheduler)
    reasons = sorted(str(log.finish_reason(name, index)) for name in "ab" for index in range(3))
    assert reasons == ["error"] * 3 + ["length"] * 3
