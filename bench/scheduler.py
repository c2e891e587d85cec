"""The scheduler's own time: `python -m bench.scheduler`. Python per step, without a model and without HTTP.

Steps in which every sequence decodes one token, by the number of sequences, with one step in flight and with two, and
by the length of their prompts; and what a queue costs, by the number of tenants that wait in it. CPU time of the
thread: others' work hardly counts.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.kit import Found, run_bench
from bench.results import Plot, Table
from core.plan import RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
STEP_S = 0.02  # what the scheduler is told that a step took
WARM_STEPS = 40


@dataclass(frozen=True, slots=True)
class Cases:
    """What to measure.

    Args:
        batches: sequences that decode, with a prompt of `prompt` tokens each.
        prompts: their tokens, of `batch` sequences.
        tenants: that have a request in the queue behind `batch` running ones.
    """

    batches: Sequence[int] = (32, 64, 128, 256, 512)
    prompts: Sequence[int] = (128, 1024, 4096)
    tenants: Sequence[int] = (1, 10, 100, 1000)
    batch: int = 256
    prompt: int = 512
    num_steps: int = 300


QUICK = Cases(batches=(2, 4), prompts=(32,), tenants=(1, 3), batch=4, prompt=32, num_steps=4)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over the steps, in ms; of both together the mean and the 95th percentile."""

    plan_ms: float
    apply_ms: float
    mean_ms: float
    p95_ms: float


def measure(
    num_running: int,
    prompt: int,
    num_steps: int,
    num_waiting_tenants: int = 0,
    deadline_s: float | None = None,
    max_in_flight: int = 1,
) -> StepTime:
    """Decode steps of `num_running` sequences, each of a tenant of its own, that have the engine to themselves.

    Args:
        deadline_s: of those who wait.
    """
    length = prompt + WARM_STEPS + num_steps + 3 * BLOCK_SIZE
    num_blocks = num_running * (length // BLOCK_SIZE + 2)
    limits = RunnerLimits(
        num_blocks,
        BLOCK_SIZE,
        num_running,
        num_running * (prompt + BLOCK_SIZE),
        2 * length,
        VOCAB_SIZE,
        max_in_flight=max_in_flight,
    )
    scheduler, in_flight = Scheduler(limits, (), lambda: 0), deque[StepPlan]()
    for number in range(num_running):
        # of different lengths, so that not all need a block in the same step
        scheduler.submit(_request(number, prompt + number % BLOCK_SIZE, 2 * length))
    _plan(scheduler, in_flight, 0)  # all prompts
    for number in range(1, max_in_flight):
        _plan(scheduler, in_flight, number)
    _apply(scheduler, in_flight, 0)
    for number in range(num_waiting_tenants):
        scheduler.submit(_request(num_running + number, prompt, 1, deadline_s))
    times = []
    for number in range(1, WARM_STEPS + num_steps):
        plan_s = _plan(scheduler, in_flight, number)
        times.append((plan_s, _apply(scheduler, in_flight, number)))
    times = times[WARM_STEPS - 1 :]
    both = [plan_s + apply_s for plan_s, apply_s in times]
    plan_s, apply_s = (statistics.median(pair[i] for pair in times) for i in (0, 1))
    return StepTime(1e3 * plan_s, 1e3 * apply_s, 1e3 * statistics.mean(both), 1e3 * float(np.percentile(both, 95)))


def _plan(scheduler: Scheduler, in_flight: deque[StepPlan], number: int) -> float:
    """Plan a step: seconds."""
    started_s = time.thread_time()
    plan = scheduler.plan(number * STEP_S)
    taken_s = time.thread_time() - started_s
    assert plan is not None, "somebody must decode"
    in_flight.append(plan)
    return taken_s


def _apply(scheduler: Scheduler, in_flight: deque[StepPlan], number: int) -> float:
    """Apply the oldest step in flight: seconds."""
    plan = in_flight.popleft()
    rows = np.flatnonzero(plan.samples).astype(np.int32)
    output = StepOutput(rows, np.full(len(rows), number % VOCAB_SIZE, np.int32))
    started_s = time.thread_time()
    scheduler.apply(plan, output, (number + 1) * STEP_S)
    return time.thread_time() - started_s


def _request(number: int, prompt: int, max_tokens: int, deadline_s: float | None = None) -> Request:
    return Request(
        request_id=str(number),
        prompt_ids=tuple((number * 7919 + i) % VOCAB_SIZE for i in range(prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_s=0.0,
        tenant=str(number),
        deadline_s=deadline_s,
    )


def measure_all(cases: Cases) -> list[Table]:
    def table(title: str, name: str, sizes: Sequence[int], times: list[StepTime], batches: Sequence[int]) -> Table:
        rows = tuple(
            (size, t.plan_ms, t.apply_ms, t.mean_ms, t.p95_ms, 1e3 * (t.plan_ms + t.apply_ms) / batch)
            for size, t, batch in zip(sizes, times, batches, strict=True)
        )
        columns = (name, "plan ms", "apply ms", "both, mean ms", "p95 ms", "us per sequence")
        return Table(title, columns, rows, Plot(name, "both, mean ms"))

    by_batch = [measure(batch, cases.prompt, cases.num_steps) for batch in cases.batches]
    overlapped = [measure(batch, cases.prompt, cases.num_steps, max_in_flight=2) for batch in cases.batches]
    by_prompt = [measure(cases.batch, prompt, cases.num_steps) for prompt in cases.prompts]
    by_queue = [measure(cases.batch, cases.prompt, cases.num_steps, tenants) for tenants in cases.tenants]
    by_late_queue = [measure(cases.batch, cases.prompt, cases.num_steps, tenants, 0.0) for tenants in cases.tenants]
    return [
        table(f"By sequences, prompts of {cases.prompt}", "sequences", cases.batches, by_batch, cases.batches),
        table("The same with two steps in flight", "sequences", cases.batches, overlapped, cases.batches),
        table(
            f"By prompt, {cases.batch} sequences",
            "prompt tokens",
            cases.prompts,
            by_prompt,
            [cases.batch] * len(by_prompt),
        ),
        table(
            f"By tenants that wait, {cases.batch} sequences",
            "waiting",
            cases.tenants,
            by_queue,
            [cases.batch] * len(by_queue),
        ),
        table(
            f"The same, all of them late for their deadlines, {cases.batch} sequences",
            "waiting",
            cases.tenants,
            by_late_queue,
            [cases.batch] * len(by_late_queue),
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench(
        "scheduler", __doc__, lambda arguments: Found(measure_all(QUICK if arguments.quick else Cases())), argv=argv
    )


if __name__ == "__main__":
    sys.exit(main())
