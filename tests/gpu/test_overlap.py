"""Two steps in flight on the real runner: the tokens, logprobs, reasons and usage of one.

On a CPU each step is done when it is sent; what a step asks of the one before it is the same as on a GPU.
"""

import random
from dataclasses import replace
from typing import Any

import torch

from core.plan import PENDING, Int32Array, SequenceStart, StepOutput, StepPlan, make_plan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.runner import ModelRunner, StepTicket, steps_in_flight
from tests.fakes import FakeClock
from tests.workload import Names, Outcome, Workload, WorkloadRun

EOS = 2
RARE: tuple[dict[str, Any], ...] = (
    *({},) * 4,
    {"repeat_last_n": 6},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"typical_p": 0.8, "top_n_sigma": 2.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
)


class CountingRunner:
    """Counts the tokens that are asked for before they were read."""

    def __init__(self, runner: ModelRunner) -> None:
        self.limits = runner.limits
        self._runner = runner
        self.num_pending = 0

    def forward(self, plan: StepPlan) -> StepTicket:
        self.num_pending += int((plan.token_ids == PENDING).sum())
        return self._runner.forward(plan)

    def sample(self, ticket: StepTicket, masks: Int32Array | None = None) -> None:
        self._runner.sample(ticket, masks)

    def collect(self, ticket: StepTicket) -> StepOutput:
        return self._runner.collect(ticket)


def draw_sampling(rng: random.Random, max_tokens: int) -> SamplingParams:
    seed = rng.randrange(100)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=rng.choice((0.0, 0.7, 2.0)),
        top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        frequency_penalty=rng.choice((0.0, 0.5)),
        min_tokens=rng.choice((0, 3)),
        stop_token_ids=tuple(rng.sample(range(3, 300), rng.choice((0, 40)))),
        num_logprobs=rng.choice((None, None, 2)),
        **RARE[seed % len(RARE)],
    )


def draw_workload(rng: random.Random) -> Workload:
    stems = [rng.choices(range(3, 300), k=40) for _ in range(2)]
    requests, pauses = [], {}
    stops, leaves = Names(), Names()
    for number in range(10):
        name, max_tokens = f"r{number}", rng.randint(1, 24)
        prompt = rng.choice(stems)[: rng.choice((0, 20, 40))] + rng.choices(range(3, 300), k=rng.randint(1, 12))
        request = Request(
            request_id=name,
            prompt_ids=tuple(prompt),
            sampling=draw_sampling(rng, max_tokens),
            arrival_s=number * 1e-3,
            num_sequences=rng.choice((1, 1, 2)),
        )
        requests.append((rng.randrange(12), request))
        if rng.random() < 0.3:
            rng.choice((stops, leaves))[name, 0] = rng.randint(1, max_tokens)
        if rng.random() < 0.2:
            start = rng.randrange(20)
            pauses[name] = (start, start + rng.randint(1, 8))
    return Workload(requests, stops, leaves, pauses)


def run(runner: ModelRunner, workload: Workload, max_in_flight: int) -> tuple[dict[str, Outcome], int, int]:
    """Returns what became of it, how many tokens were asked for before they were read, how many were preempted."""
    runner.limits = replace(runner.limits, num_blocks=6, max_batch_tokens=32, max_in_flight=max_in_flight)
    scheduler = Scheduler(runner.limits, (EOS,), seeds=lambda: 0)
    counting = CountingRunner(runner)
    outcomes = WorkloadRun(workload, scheduler, counting, FakeClock()).run()
    return outcomes, counting.num_pending, scheduler.stats().num_preemptions


def test_overlapped_steps_draw_the_same_tokens(llama_runner: ModelRunner) -> None:
    num_preemptions = 0
    for seed in range(4):
        workload = draw_workload(random.Random(seed))
        expected, num_pending, _ = run(llama_runner, workload, 1)
        assert num_pending == 0
        outcomes, num_pending, num_preempted = run(llama_runner, workload, 2)
        assert outcomes == expected, f"seed {seed}"
        assert num_pending > 30
        num_preemptions += num_preempted
    assert num_preemptions > 0


def test_pending_tokens_are_those_that_the_slots_drew_last(llama_runner: ModelRunner) -> None:
    """Of rows in another order, beside prompts whose tokens are known, with logits that tell them apart."""

    def start(pending: bool) -> tuple[list[int], list[float]]:
        runner = llama_runner
        prompts = {slot: [5 + slot, 60 + slot, 7] for slot in (2, 0, 1)}
        tables = [(slot, 0, slot) for slot in (0, 1, 2, 3)]
        starts = [
            SequenceStart(slot, tuple(ids), 3, SamplingParams(temperature=0.0, max_tokens=9), seed=0, stop_ids=())
            for slot, ids in {**prompts, 3: [9, 9]}.items()
        ]
        first = make_plan(
            [(slot, 0, ids, True) for slot, ids in prompts.items()], tables=tables, sequence_starts=starts
        )
        ticket = runner.forward(first)
        runner.sample(ticket)
        drawn = dict(zip(first.slots.tolist(), runner.collect(ticket).token_ids.tolist(), strict=True))
        rows = [(slot, 3, [PENDING if pending else drawn[slot]], True) for slot in (1, 2, 0)]
        second = make_plan([rows[0], (3, 0, [9, 9], True), *rows[1:]])
        ticket = runner.forward(second)
        runner.sample(ticket)
        logits = ticket.sent.logits.sum(-1).tolist()
        return runner.collect(ticket).token_ids.tolist(), logits

    assert start(pending=True) == start(pending=False)


def test_steps_overlap_on_a_gpu_unless_the_operator_says_otherwise() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [steps_in_flight(mode, device) for mode in ("auto", "on", "off") for device in (cpu, cuda)] == [
        *(1, 2),
        *(2, 2),
        *(1, 1),
    ]
