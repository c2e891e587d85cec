"""Random histories, each from a seed of its own: `python -m tests.simulate`, or `make simulate`, for over an hour.

First the scheduler's machine over its block pool and prefix cache (tests/core/test_scheduler_machine.py), with one step
in flight and with two, without host memory and with it (tests/core/test_offload_machine.py), in turn by seed; then the
whole server with every fault (tests/server/fault_history.py), on all cores. A failing seed is printed, with how to
run it again.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from tests.core.test_offload_machine import CrampedOffloadMachine, OffloadMachine, OverlapOffloadMachine
from tests.core.test_scheduler_machine import OverlapMachine, SchedulerMachine, run_machine
from tests.server.fault_history import FaultHistory, Tally

T = TypeVar("T")

REQUESTS_PER_HISTORY = 100
HISTORIES_PER_JOB = 10
GC_THRESHOLD = 50_000  # objects: a server of a hundred requests is all garbage at its end, and hardly any before
MACHINE_STEPS = 10_000_000
HISTORIES = 2_000
MACHINES = (SchedulerMachine, OverlapMachine, OffloadMachine, CrampedOffloadMachine, OverlapOffloadMachine)  # by seed


def run_fault_histories(seeds: Iterable[int]) -> Tally:
    """A history for each seed. What fails is raised, with the seed in a note."""
    tally = Tally()
    for seed in seeds:
        tally.add(_noted(seed, "faults", lambda seed: FaultHistory(seed).run(REQUESTS_PER_HISTORY)))
    return tally


def run_fault_jobs(first_seed: int, num_histories: int, num_processes: int) -> Tally:
    """As run_fault_histories, in so many processes at once."""
    end = first_seed + num_histories
    jobs = [range(seed, min(seed + HISTORIES_PER_JOB, end)) for seed in range(first_seed, end, HISTORIES_PER_JOB)]
    tally = Tally()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_prepare) as executor:
        try:
            for part in executor.map(run_fault_histories, jobs):
                tally.add(part)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
    return tally


def _prepare() -> None:
    """Of a process: faults are logged with their tracebacks, and what is loaded now is no garbage."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def run_machine_histories(num_steps: int, first_seed: int) -> int:
    """Histories of the scheduler's machines until they have made so many steps. Returns how many seeds that took."""
    seed = first_seed
    while num_steps > 0:
        num_steps -= _noted(seed, "machine", _run_machine_of)
        seed += 1
    return seed - first_seed


def _run_machine_of(seed: int) -> int:
    return run_machine(seed, MACHINES[seed % len(MACHINES)])


def _noted(seed: int, kind: str, run: Callable[[int], T]) -> T:
    try:
        return run(seed)
    except BaseException as error:
        error.add_note(f'run it again: make simulate ARGS="--only {kind} --seed {seed}"')
        raise


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--only", choices=("machine", "faults"), help="one of the two; default: both")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--first-seed", type=int, default=1_000_000, help="of those that are run without --seed")
    parser.add_argument("--steps", type=int, default=MACHINE_STEPS, help="of the machine (default: %(default)s)")
    parser.add_argument("--histories", type=int, default=HISTORIES, help="of faults (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="for faults (default: one a core)")
    arguments = parser.parse_args(argv)
    _prepare()
    started_s = time.monotonic()
    if arguments.only != "faults":
        _run_machine(arguments)
    if arguments.only != "machine":
        _run_faults(arguments)
    print(f"{time.monotonic() - started_s:.0f} s")
    return 0


def _run_machine(arguments: argparse.Namespace) -> None:
    if arguments.seed is None:
        num_seeds = run_machine_histories(arguments.steps, arguments.first_seed)
        print(f"the scheduler's machine: {arguments.steps} steps and more, of {num_seeds} seeds, hold")
    else:
        num_steps = _noted(arguments.seed, "machine", _run_machine_of)
        print(f"the scheduler's machine, seed {arguments.seed}: {num_steps} steps hold")


def _run_faults(arguments: argparse.Namespace) -> None:
    first, num = arguments.first_seed, arguments.histories
    if arguments.seed is not None:
        first, num = arguments.seed, 1
    started_s = time.monotonic()
    if num == 1:
        tally = run_fault_histories(range(first, first + 1))
    else:
        tally = run_fault_jobs(first, num, arguments.processes)
    per_s = tally.num_requests / (time.monotonic() - started_s)
    print(
        f"{num} histories of faults: {tally.num_requests} requests, {tally.num_steps} steps hold;"
        f" {per_s:.0f} requests a second in {arguments.processes} processes"
    )
    for event, count in tally.events.most_common():
        print(f"{count:9} {event}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
