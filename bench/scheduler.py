"""The scheduler's own time: `python -m bench.scheduler`. Python per step, without a model and without HTTP.

Steps in which every sequence decodes one token, by the number of sequences, with one step in flight and with two, and
by the length of their prompts; and what a queue costs, by the number of tenants that wait in it. CPU time of the
thread, so that other processes hardly matter.
"""

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from bench.kit import Found, bench
from bench.results import Cell, Plot, Table, table_of
from core.plan import RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
STEP_S = 0.02  # what the scheduler is told that a step took
WARM_STEPS = 40


def measure(
    num_running: int, prompt: int, num_steps: int, num_waiting: int = 0, deadline_s: float | None = None, depth: int = 1
) -> dict[str, Cell]:
    """Decode steps of sequences that have the engine to themselves, each of a tenant of its own.

    Args:
        num_waiting, deadline_s: requests in the queue behind them, one per tenant.
        depth: steps in flight.
    """
    length = prompt + WARM_STEPS + num_steps + 3 * BLOCK_SIZE
    num_blocks, most_tokens = num_running * (length // BLOCK_SIZE + 2), num_running * (prompt + BLOCK_SIZE)
    limits = RunnerLimits(num_blocks, BLOCK_SIZE, num_running, most_tokens, 2 * length, VOCAB_SIZE, max_in_flight=depth)
    scheduler, in_flight = Scheduler(limits, (), lambda: 0), deque[StepPlan]()

    def submit(number: int, num_tokens: int, max_tokens: int, deadline_s: float | None = None) -> None:
        prompt_ids = tuple((number * 7919 + i) % VOCAB_SIZE for i in range(num_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        asked = {"prompt_ids": prompt_ids, "sampling": sampling, "arrival_s": 0.0, "deadline_s": deadline_s}
        scheduler.submit(Request(request_id=str(number), tenant=str(number), **asked))  # type: ignore[arg-type]

    def plan(number: int) -> float:
        started_s = time.thread_time()
        step = scheduler.plan(number * STEP_S)
        taken_s = time.thread_time() - started_s
        assert step is not None, "every step decodes"
        in_flight.append(step)
        return taken_s

    def apply(number: int) -> float:
        step = in_flight.popleft()
        rows = np.flatnonzero(step.samples).astype(np.int32)
        output = StepOutput(rows, np.full(len(rows), number % VOCAB_SIZE, np.int32))
        started_s = time.thread_time()
        scheduler.apply(step, output, (number + 1) * STEP_S)
        return time.thread_time() - started_s

    for number in range(num_running):  # of different lengths, so that not all need a block in the same step
        submit(number, prompt + number % BLOCK_SIZE, 2 * length)
    for number in range(depth):  # the first computes all prompts
        plan(number)
    apply(0)
    for number in range(num_waiting):
        submit(num_running + number, prompt, 1, deadline_s)
    times = [(plan(number), apply(number)) for number in range(1, WARM_STEPS + num_steps)][WARM_STEPS - 1 :]
    both_ms = [1e3 * (plan_s + apply_s) for plan_s, apply_s in times]
    plan_ms, apply_ms = (1e3 * statistics.median(pair[i] for pair in times) for i in (0, 1))
    return {
        "plan ms": plan_ms,
        "apply ms": apply_ms,
        "both, mean ms": statistics.mean(both_ms),
        "p95 ms": float(np.percentile(both_ms, 95)),
        "us per sequence": 1e3 * (plan_ms + apply_ms) / num_running,
    }


def measure_all(is_quick: bool) -> list[Table]:
    batches, prompts, tenants = (32, 64, 128, 256, 512), (128, 1024, 4096), (1, 10, 100, 1000)
    batch, prompt, steps = 256, 512, 300
    if is_quick:
        batches, prompts, tenants, batch, prompt, steps = (2, 4), (32,), (1, 3), 4, 32, 4  # type: ignore[assignment]

    def table(title: str, name: str, cases: Iterable[tuple[int, dict[str, Cell]]]) -> Table:
        rows = [{name: size} | cells for size, cells in cases]
        return table_of(title, rows, Plot(name, "both, mean ms"))

    late = f"The same, all of them late for their deadlines, {batch} sequences"
    return [
        table(f"By sequences, prompts of {prompt}", "sequences", ((n, measure(n, prompt, steps)) for n in batches)),
        table(
            "The same with two steps in flight", "sequences", ((n, measure(n, prompt, steps, depth=2)) for n in batches)
        ),
        table(f"By prompt, {batch} sequences", "prompt tokens", ((n, measure(batch, n, steps)) for n in prompts)),
        table(
            f"By tenants that wait, {batch} sequences",
            "waiting",
            ((n, measure(batch, prompt, steps, n)) for n in tenants),
        ),
        table(late, "waiting", ((n, measure(batch, prompt, steps, n, 0.0)) for n in tenants)),
    ]


main = bench("scheduler", __doc__, lambda arguments: Found(measure_all(arguments.quick)))

if __name__ == "__main__":
    sys.exit(main())
