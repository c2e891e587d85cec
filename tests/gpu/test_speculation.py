"""Drafts on the real runner: tokens, logprobs, reasons and usage are those of steps without drafts, to the bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from core.constraints import json_schema, regex
from core.drafter import Acceptance, Draft, DraftBudget, Drafter
from core.grammar import Grammar, GrammarCompiler, Vocabulary
from core.scheduler import Scheduler
from core.types import EngineStats, Request, SamplingParams
from gpu.draft_model import DraftRunner
from gpu.runner import ModelRunner
from tests.fakes import FakeClock, make_request
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.test_overlap import EOS, draw_workload
from tests.workload import Names, Outcome, Workload, WorkloadRun

NUM_BLOCKS = 6
VOCABULARY = 300
Answers = dict[tuple[str, int], list[int]]


class Replay(Drafter):
    """Proposes what the sequence is known to say, with some tokens wrong."""

    def __init__(self, token_ids: list[int], num_prompt_tokens: int, answer: list[int], rng: random.Random) -> None:
        super().__init__(token_ids, Acceptance())
        self._token_ids, self._num_prompt_tokens, self._answer, self._rng = token_ids, num_prompt_tokens, answer, rng

    def propose(self, most: int, forced: Sequence[int] = ()) -> Draft | None:
        if forced:
            return super().propose(most, forced)
        num_own = len(self._token_ids) - self._num_prompt_tokens
        coming = self._answer[num_own : num_own + most]
        some = [token_id if self._rng.random() < 0.8 else self._rng.randrange(3, 300) for token_id in coming]
        self.last = Draft(some, 0.9, "suffix", 0, len(self._token_ids)) if some else None
        return self.last


class ReplayingScheduler(Scheduler):
    """Its sequences' drafts are made of what they said in another run."""

    answers: Answers

    def submit(self, request: Request) -> None:
        super().submit(request)
        for sequence in self.states.groups[request.request_id].sequences:
            if sequence.drafter is not None:
                answer = self.answers[request.request_id, sequence.index]
                rng = random.Random(request.request_id)
                sequence.drafter = Replay(sequence.token_ids, sequence.num_prompt_tokens, answer, rng)


def run(runner: ModelRunner, workload: Workload, answers: Answers | None) -> tuple[dict[str, Outcome], EngineStats]:
    runner.limits = replace(runner.limits, num_blocks=NUM_BLOCKS, max_batch_tokens=48, timed_rows=())  # any draft pays
    scheduler = ReplayingScheduler(runner.limits, (EOS,), seeds=lambda: 0, speculates=answers is not None)
    scheduler.answers = answers or {}
    outcomes = WorkloadRun(workload, scheduler, runner, FakeClock()).run()
    return outcomes, scheduler.stats()


@cache
def grammars() -> list[Grammar]:
    """Over tokens that are bytes: one that leaves much free, one that forces most, one that ends early."""
    words = [
        b"" if token_id < 3 else bytes([token_id - 3]) if token_id < 259 else b"ab" for token_id in range(VOCABULARY)
    ]
    compiler = GrammarCompiler(Vocabulary(words, [0, 1, EOS], [EOS]), lambda text: [3 + byte for byte in text.encode()])
    properties = {"the_name": {"enum": ["alpha", "beta"]}, "count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return [compiler.compile(one) for one in (regex(".{1,40}", "r"), json_schema(schema, "s"), regex("[a-f]{5}", "r"))]


def with_every_setting(workload: Workload, rng: random.Random) -> Workload:
    """Every third request under a grammar; some with biases and min_p beside what is drawn anyway."""
    requests = []
    for number, (step, request) in enumerate(workload.requests):
        biases = tuple((rng.randrange(3, 300), 5.0) for _ in range(rng.choice((0, 3))))
        min_p = rng.choice((0.0, 0.1))
        sampling = msgspec.structs.replace(request.sampling, logit_bias=biases, min_p=min_p)
        grammar = rng.choice(grammars()) if number % 3 == 0 else None
        if grammar is not None and number % 2:  # its forced tokens need not be sampled
            sampling = SamplingParams(max_tokens=60, seed=number, temperature=sampling.temperature)
        requests.append((step, msgspec.structs.replace(request, sampling=sampling, grammar=grammar)))
    return replace(workload, requests=requests)


def check(runner: ModelRunner, seeds: range) -> None:
    num_accepted = num_drafted = num_preempted = 0
    for seed in seeds:
        workload = with_every_setting(draw_workload(rng := random.Random(seed)), rng)
        expected, _ = run(runner, workload, None)
        whole = Workload(workload.requests, Names(), Names(), {})  # drafts go on where the client leaves
        said, _ = run(runner, whole, None)
        answers = {(name, i): ending.token_ids for name, one in said.items() for i, ending in enumerate(one.endings)}
        outcomes, stats = run(runner, workload, answers)
        assert outcomes == expected, f"seed {seed}"
        num_accepted += stats.num_accepted_tokens
        num_drafted += stats.num_draft_tokens
        num_preempted += stats.num_preemptions
    assert num_preempted > 0
    assert len(seeds) < num_accepted < num_drafted


def opened(directory: Path, dtype: str, quantize: str | None = None) -> ModelRunner:
    return open_runner(directory, replace(ENGINE, dtype=dtype, quantize=quantize))


@pytest.mark.parametrize(
    ("family", "dtype", "num_seeds"),
    [("llama3", "float32", 4), ("llama3", "bfloat16", 4), ("qwen3_5", "bfloat16", 2)],
)
def test_drafts_change_no_token(
    model_directory: Callable[[str], Path], family: str, dtype: str, num_seeds: int
) -> None:
    """Recurrent layers go back to where a row began."""
    check(opened(model_directory(family), dtype), range(num_seeds))


def check_model(directory: Path, drafting: Path, dtype: str, seeds: range) -> tuple[int, int]:
    """A draft model with room for few sequences changes nothing; returns how many tokens were right, of how many."""
    target, draft = opened(directory, dtype), opened(drafting, dtype)
    draft.limits = replace(draft.limits, num_blocks=9, max_sequences=3, max_batch_tokens=40)
    num_accepted = num_drafted = num_preempted = 0
    for seed in seeds:
        workload = with_every_setting(draw_workload(rng := random.Random(seed)), rng)
        expected, _ = run(target, workload, None)
        model = DraftRunner(draft, VOCABULARY)
        scheduler = Scheduler(target.limits, (EOS,), seeds=lambda: 0, draft_model=model)
        assert WorkloadRun(workload, scheduler, target, FakeClock()).run() == expected, f"seed {seed}"
        stats = scheduler.stats()
        num_accepted += stats.accepted_tokens["model"]
        num_drafted += stats.draft_tokens["model"]
        num_preempted += stats.num_preemptions
        held = {block for one in model._known.values() for block in one.blocks}
        assert held.isdisjoint(model._free_blocks)
        assert len(held) + len(model._free_blocks) == 9
        model.clear()
        assert (len(model._free_blocks), len(model._free_slots)) == (9, 3)
    assert num_preempted > 0
    return num_accepted, num_drafted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_draft_model_changes_no_token_and_the_model_itself_is_right_nearly_always(
    model_directory: Callable[[str], Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftBudget, "is_empty", False)
    monkeypatch.setattr(DraftBudget, "allows", lambda *_: True)
    directory = model_directory("llama3")
    num_accepted, num_drafted = check_model(directory, directory, dtype, range(3))
    assert 0 < num_accepted < num_drafted
    check_model(directory, model_directory("qwen2"), dtype, range(1))


def test_a_draft_model_samples_as_the_target_does_with_its_noise(model_directory: Callable[[str], Path]) -> None:
    """The model itself, for siblings that share their prompt, and one more of the same chat."""
    target, draft = (opened(model_directory("llama3"), "float32") for _ in range(2))
    target.limits = replace(target.limits, timed_rows=())
    model = DraftRunner(draft, VOCABULARY)
    scheduler = Scheduler(target.limits, (EOS,), seeds=lambda: 0, draft_model=model)
    prompt = tuple(random.Random(1).choices(range(3, 300), k=50))
    fields = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 40, "ignore_eos": True}
    requests = [
        (0, make_request("a", prompt_ids=prompt, num_sequences=3, seed=5, **fields)),
        (90, make_request("b", prompt_ids=(*prompt, 7, 8), seed=6, **fields)),
    ]
    num_computed: list[int] = []
    forward = draft.forward
    draft.forward = lambda plan: (num_computed.append(plan.num_tokens), forward(plan))[1]  # type: ignore[assignment,func-returns-value]
    WorkloadRun(Workload(requests, Names(), Names(), {}), scheduler, target, FakeClock()).run()
    stats = scheduler.stats()
    assert stats.accepted_tokens["model"] == stats.draft_tokens["model"] > 100
    assert num_computed[0] == 51
    assert max(num_computed[1:]) < 3 * 16  # the others copied what they share


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "quantize"),
    [
        ("llama3", "bfloat16", "int8"),
        ("llama3", "float32", "int4"),
        ("llama3", "bfloat16", "fp8"),
        ("qwen2_moe", "float32", None),
        ("qwen2_moe", "bfloat16", "int8"),
        ("lfm2", "float32", None),
        ("qwen3_next", "bfloat16", None),
    ],
)
def test_drafts_change_no_token_of_other_formats(
    model_directory: Callable[[str], Path], family: str, dtype: str, quantize: str | None
) -> None:
    num_seeds = 4 if family in ("lfm2", "qwen3_next") else 2  # whose drafts end at block borders: there are fewer
    check(opened(model_directory(family), dtype, quantize), range(200, 200 + num_seeds))


def test_a_draft_that_breaks_the_model_costs_nothing(model_directory: Callable[[str], Path]) -> None:
    """Logits that are not finite behind a wrong draft: what was sampled before it stands."""
    runner = opened(model_directory("llama3"), "float32")
    workload = draw_workload(random.Random(1))
    said, _ = run(runner, workload, None)
    spoken = {token_id for one in said.values() for ending in one.endings for token_id in ending.token_ids}
    spoken.update(token_id for _, request in workload.requests for token_id in request.prompt_ids)
    broken = next(token_id for token_id in range(3, 300) if token_id not in spoken)
    answers = {
        (name, i): [broken if place % 3 == 2 else token_id for place, token_id in enumerate(ending.token_ids)]
        for name, one in said.items()
        for i, ending in enumerate(one.endings)
    }
    forward = runner.model.forward

    def breaking(batch: object, cache: object) -> torch.Tensor:
        hidden = forward(batch, cache)  # type: ignore[arg-type]
        asked = batch.asked  # type: ignore[attr-defined]
        ids = batch.tokens.token_ids  # type: ignore[attr-defined]
        hidden[(ids if asked is None else ids[asked]) == broken] = torch.nan
        return hidden

    runner.model.forward = breaking  # type: ignore[method-assign,assignment]
    outcomes, stats = run(runner, workload, answers)
    assert outcomes == said
    assert stats.num_draft_tokens > stats.num_accepted_tokens
