"""Random histories, each from a seed of its own, on all cores: `python -m tests.simulate`, or `make simulate`.

First the scheduler's machine over its block pool and prefix cache (tests/core/scheduler_machine.py), with one step in
flight and with two, without host memory and with it (tests/core/test_scheduler_machine.py), in turn by seed; then the
whole server with every fault (tests/server/fault_history.py); then tool calls in every format, rendered, cut and parsed
(tests/core/test_answer_parts.py); then models that are loaded and give way (tests/server/test_local_models.py), and
the same with real processes (tests/e2e/test_local_models.py); then a day of a gateway before 64 upstreams
(tests/server/pool_day.py). A failing seed is printed, with how to run it again,
and how fast it all went.
"""

import argparse
import gc
import itertools
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from core.tool_formats import FORMATS, HARMONY
from server.upstream.pool import Pool
from tests.core.drawn_rules import run_seeded
from tests.core.test_answer_parts import check_random_calls
from tests.core.test_scheduler_machine import MACHINES
from tests.e2e.test_local_models import swap
from tests.server.fault_checks import Tally
from tests.server.fault_history import FaultHistory
from tests.server.pool_day import RoundRobin, run_day
from tests.server.test_local_models import run_history

J = TypeVar("J")
T = TypeVar("T")

REQUESTS_PER_HISTORY = 100
HISTORIES_PER_JOB = 10
GC_THRESHOLD = 50_000  # objects: a server of a hundred requests is all garbage at its end, and hardly any before
MACHINE_STEPS = 10_000_000
HISTORIES = 2_000
LOADS = 10_000  # of models on demand
SWAPS = 1_000  # of models' processes
CALLS = 10_000  # answers with calls, of each format


def run_fault_histories(seeds: Iterable[int]) -> Tally:
    """A history for each seed. What fails is raised, with the seed in a note."""
    tally = Tally()
    for seed in seeds:
        tally.add(_noted(seed, "faults", lambda seed: FaultHistory(seed).run(REQUESTS_PER_HISTORY)))
    return tally


def run_machine_of(seed: int) -> int:
    """Some histories of the machine whose turn it is. Returns how many steps they had."""
    return _noted(seed, "machine", lambda seed: run_seeded(seed, MACHINES[seed % len(MACHINES)]))


def run_calls(seeds: Sequence[int]) -> int:
    """An answer in every format for each seed. Returns how many."""
    for seed in seeds:
        for form in (*FORMATS, HARMONY):
            _noted(seed, "calls", partial(check_random_calls, form))
    return len(seeds) * (len(FORMATS) + 1)


def run_loads(seeds: Sequence[int]) -> Counter[str]:
    """A history of requests for models on demand for each seed."""
    return sum((_noted(seed, "loads", run_history) for seed in seeds), Counter())


def _noted(seed: int, kind: str, run: Callable[[int], T]) -> T:
    try:
        return run(seed)
    except BaseException as error:
        error.add_note(f'run it again: make simulate ARGS="--only {kind} --seed {seed}"')
        raise


def seeds_for(num_steps: int, steps_by_seed: Iterable[int]) -> int:
    """How many seeds it takes to make so many steps."""
    for num_seeds, num_made in enumerate(steps_by_seed, 1):
        num_steps -= num_made
        if num_steps <= 0:
            return num_seeds
    raise AssertionError("there are more seeds")


def in_processes(num_processes: int, job: Callable[[J], T], arguments: Iterable[J]) -> Generator[T, None, None]:
    """The job's results in order, in so many processes at once, hardly further ahead than somebody asks for them."""
    context, coming = multiprocessing.get_context("spawn"), iter(arguments)
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_prepare) as executor:
        try:
            futures = deque(executor.submit(job, argument) for argument in itertools.islice(coming, 2 * num_processes))
            while futures:
                yield futures.popleft().result()
                futures.extend(executor.submit(job, argument) for argument in itertools.islice(coming, 1))
        finally:
            executor.shutdown(cancel_futures=True)


def _prepare() -> None:
    """Of a process: faults are logged with their tracebacks, and what is loaded now is no garbage."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    only = ("machine", "faults", "calls", "loads", "swaps", "day")
    parser.add_argument("--only", choices=only, help="one of these; default: all")
    parser.add_argument("--seed", type=int, help="this one alone, in this process")
    parser.add_argument("--first-seed", type=int, default=1_000_000, help="of those that are run without --seed")
    parser.add_argument("--steps", type=int, default=MACHINE_STEPS, help="of the machine (default: %(default)s)")
    parser.add_argument("--histories", type=int, default=HISTORIES, help="of faults (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=CALLS, help="answers with calls, of each format")
    parser.add_argument("--loads", type=int, default=LOADS, help="of models on demand (default: %(default)s)")
    parser.add_argument("--swaps", type=int, default=SWAPS, help="of models' processes (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (default: one a core)")
    arguments = parser.parse_args(argv)
    _prepare()
    runs = (_run_machine, _run_faults, _run_calls, _run_loads, _run_swaps, _run_day)
    for kind, run in zip(only, runs, strict=True):
        if arguments.only in (None, kind):
            run(arguments)
    return 0


def _run_day(arguments: argparse.Namespace) -> None:
    run = partial(run_day, seed=arguments.first_seed if arguments.seed is None else arguments.seed)
    ours, other = in_processes(min(2, arguments.processes), run, [Pool, RoundRobin])
    print(f"a day of a gateway before 64 upstreams: {ours}; by round robin: {other}")
    assert ours.hit_ratio >= 0.9
    assert ours.median_ttft_s <= 0.5 * other.median_ttft_s


def _run_machine(arguments: argparse.Namespace) -> None:
    rate = Rate()
    if arguments.seed is not None:
        num_steps = run_machine_of(arguments.seed)
        print(f"the scheduler's machine, seed {arguments.seed}: {num_steps} steps hold; {rate.of(num_steps, 'steps')}")
        return
    results = in_processes(arguments.processes, run_machine_of, itertools.count(arguments.first_seed))
    num_seeds = seeds_for(arguments.steps, results)
    results.close()
    text = rate.of(arguments.steps, "steps")
    print(f"the scheduler's machine: {arguments.steps} steps and more, of {num_seeds} seeds, hold; {text}")


def _run_faults(arguments: argparse.Namespace) -> None:
    rate, tally = Rate(), Tally()
    results: Iterable[Tally]
    if arguments.seed is not None:
        num_histories, results = 1, iter([run_fault_histories([arguments.seed])])
    else:
        num_histories, end = arguments.histories, arguments.first_seed + arguments.histories
        starts = range(arguments.first_seed, end, HISTORIES_PER_JOB)
        jobs = (range(start, min(start + HISTORIES_PER_JOB, end)) for start in starts)
        results = in_processes(arguments.processes, run_fault_histories, jobs)
    for part in results:
        tally.add(part)
    asked = f"{tally.num_asked} requests, {tally.num_requests} of them for completions, in {tally.num_steps} steps"
    print(f"{num_histories} histories of faults: {asked} hold; {rate.of(tally.num_asked, 'requests')}")
    for event, count in tally.events.most_common():
        print(f"{count:9} {event}")


def _run_calls(arguments: argparse.Namespace) -> None:
    rate = Rate()
    if arguments.seed is not None:
        num_answers = run_calls([arguments.seed])
    else:
        end = arguments.first_seed + arguments.calls
        jobs = (range(start, min(start + 100, end)) for start in range(arguments.first_seed, end, 100))
        num_answers = sum(in_processes(arguments.processes, run_calls, jobs))
    print(f"{num_answers} answers with calls are parsed as they were written; {rate.of(num_answers, 'answers')}")


def _run_loads(arguments: argparse.Namespace) -> None:
    rate, tally = Rate(), Counter[str]()
    if arguments.seed is not None:
        tally = run_loads([arguments.seed])
    else:
        starts = itertools.count(arguments.first_seed, HISTORIES_PER_JOB)
        results = in_processes(arguments.processes, run_loads, (range(one, one + HISTORIES_PER_JOB) for one in starts))
        while tally["loads"] < arguments.loads:
            tally += next(results)
        results.close()
    told = ", ".join(f"{count} {end}" for end, count in tally.items() if end != "loads")
    print(f"{tally['loads']} loads of models on demand hold, requests: {told}; {rate.of(tally['loads'], 'loads')}")


def _run_swaps(arguments: argparse.Namespace) -> None:
    rate = Rate()
    with tempfile.TemporaryDirectory() as directory:
        swap(Path(directory), arguments.swaps)
    print(f"{arguments.swaps} swaps of models' processes leak and lose nothing; {rate.of(arguments.swaps, 'swaps')}")


class Rate:
    """How fast something goes from here on."""

    def __init__(self) -> None:
        self._started_s, self._cpu_s = time.monotonic(), _cpu_s()

    def of(self, count: int, what: str) -> str:
        taken_s, cpu_s = time.monotonic() - self._started_s, _cpu_s() - self._cpu_s
        return f"{count / taken_s:,.0f} {what} a second, {count / cpu_s:,.0f} a CPU second, in {taken_s:.0f} s"


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
