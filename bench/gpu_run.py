"""One part of bench.gpu_check: its workers, started again behind a case that took one down, and the results they bring.

The parent never touches the device. It reads the workers' news, gives up a case that takes longer than it may, and
writes what there is every few seconds. Cases that time nothing run in several workers at once, each with its share.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import torch

from bench.gpu_parts import FAILED, LEFT_OUT, Case, Job, Row
from bench.gpu_results import Results
from bench.gpu_worker import MORE_TO_DO, PARTS, News, cases_of, run_cases
from bench.kit import bound
from bench.results import RESULTS_DIR, command_line

CEILINGS = "ceilings"  # the case that every part begins with
POLL_S = 0.5
READ_BYTES = 1 << 16
START_LIMIT_S = 120.0  # of a worker, which imports torch first
END_GRACE_S = 5.0  # of the case that runs when the part's time is up
MAX_AT_ONCE = 8  # workers: each has the device's libraries in its memory
TOO_LONG, TIME_UP, BROKEN_OFF = "given up: it took longer than it may", "the part's time was up", "broken off"


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for; see gpu_check.main.

    Args:
        limit_s: for the whole part: what has not ended by then is left out, and said to be.
        is_here: in this process: a test's, which needs no protection and has torch imported.
    """

    part: str
    is_quick: bool
    device: str
    only: str | None
    limit_s: float
    out: Path | None
    is_here: bool = False


def run_part(run: Run, argv: Sequence[str]) -> int:
    """Run, show, write. Returns the exit code."""
    end_s = time.monotonic() + run.limit_s
    device = ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device
    if device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_check: there is no CUDA device\nFix: --device cpu, for tiny shapes", file=sys.stderr)
        return 2
    job = Job(PARTS[run.part], device, run.is_quick)
    cases = [case for case in cases_of(job) if run.only is None or run.only in case.name or case.name == CEILINGS]
    if run.only and all(case.name == CEILINGS for case in cases):
        print(f"bench.gpu_check: no case of --part {run.part} has {run.only!r} in its name", file=sys.stderr)
        return 2
    is_kept = run.out is not None or (device == "cuda" and not run.is_quick)
    path = (run.out or RESULTS_DIR) / f"gpu-{run.part}" if is_kept else None
    results = Results(run.part, command_line("python -m bench.gpu_check", argv), path)
    if run.is_here:
        Turn(cases, results, end_s).run(job, here)
    else:
        run_all(job, cases, results, end_s, num_at_once())
    results.write()
    results.show()
    return 1 if results.faults else 0


def num_at_once() -> int:
    """Workers that share the device, two cores each at least: Triton compiles, and the references run on the CPU."""
    return max(1, min(MAX_AT_ONCE, len(os.sched_getaffinity(0)) // 2))


def run_all(job: Job, cases: Sequence[Case], results: Results, end_s: float, num_workers: int = 1) -> None:
    """In their order, but for cases that may share the device: those that follow each other run at once."""
    for is_shared, following in groupby(cases, lambda case: case.is_shared):
        group = list(following)
        num_turns = min(num_workers, len(group)) if is_shared else 1
        turns = [Turn(group[first::num_turns], results, end_s, num_turns) for first in range(num_turns)]
        with ThreadPoolExecutor(num_turns) as pool:
            running = [pool.submit(turn.run, job, in_worker) for turn in turns]
            try:
                for future in running:
                    future.result()
            except BaseException:  # Ctrl-C above all: leave no process on the device
                for turn in turns:
                    turn.is_broken_off.set()
                raise


class Turn:
    """Cases that run one after the other, and what has become of them.

    Args:
        end_s: of the part, by the monotonic clock.
        num_turns: that run at once.
    """

    def __init__(self, cases: Sequence[Case], results: Results, end_s: float, num_turns: int = 1) -> None:
        self._left = {case.name: case for case in cases}
        self._results, self._end_s, self.num_turns = results, end_s, num_turns
        self._running: Case | None = None
        self._until_s = 0.0
        self.is_broken_off = threading.Event()

    def run(self, job: Job, send: "Send") -> None:
        """One worker after the other, until each case has ended in some way."""
        while self._left and time.monotonic() < self._end_s and not self.is_broken_off.is_set():
            num_left = len(self._left)
            self._until_s = time.monotonic() + START_LIMIT_S
            why = send(msgspec.structs.replace(job, cases=tuple(self._left), state=dict(self._results.state)), self)
            if self._running is not None:
                self._add(self._running, LEFT_OUT if why == TIME_UP else FAILED, why or "its process ended")
                self._running = None
            elif len(self._left) == num_left and why != TIME_UP:  # it never began: nor will the next
                self._end_all(FAILED, why or "the worker did not start")
        self._end_all(LEFT_OUT, BROKEN_OFF if self.is_broken_off.is_set() else TIME_UP)

    def take(self, news: News) -> None:
        if news.began is not None:
            self._running = self._left.pop(news.began)
            self._until_s = time.monotonic() + self._running.limit_s
        if news.row is not None:
            self._results.add(news.row)
        if news.state is not None:
            self._results.learn(news.state)
        if news.ended is not None:
            self._running = None
            self._until_s = time.monotonic() + START_LIMIT_S
            self._results.write_now_and_then()

    def why_over(self) -> str | None:
        """Why the worker is to be ended; None: it is not."""
        now_s = time.monotonic()
        if self.is_broken_off.is_set():
            return BROKEN_OFF
        if now_s > self._end_s + END_GRACE_S:
            return TIME_UP
        return TOO_LONG if now_s > self._until_s else None

    def _end_all(self, verdict: str, why: str) -> None:
        for case in self._left.values():
            self._add(case, verdict, why)
        self._left.clear()

    def _add(self, case: Case, verdict: str, why: str) -> None:
        self._results.add(Row(case.table, {"case": case.name}, verdict, why))


Send = Callable[[Job, Turn], str | None]
"""(job, whose cases they are) -> why it ended before its time; None: it did not"""


def here(job: Job, turn: Turn) -> str | None:
    run_cases(job, turn.take)
    return None


def in_worker(job: Job, turn: Turn) -> str | None:
    """Returns why it ended before all cases had: None where it has run them all, or given up the device itself."""
    reader, writer = os.pipe()
    environment = dict(os.environ)
    if job.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"  # said before triton is imported
    if turn.num_turns > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // turn.num_turns))
    with subprocess.Popen(
        bound([sys.executable, "-m", "bench.gpu_worker", "--news", str(writer)]),
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=(writer,),
        start_new_session=True,
        env=environment,
        cwd=Path(__file__).parent.parent,
    ) as worker:
        os.close(writer)
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit code says more
            worker.stdin.write(msgspec.json.encode(job))
            worker.stdin.close()
        why: str | None = BROKEN_OFF
        try:
            why = _follow(reader, turn)
        finally:
            if why is not None:
                os.killpg(worker.pid, signal.SIGKILL)
            os.close(reader)
        code = worker.wait()
    if why is not None or code in (0, MORE_TO_DO):
        return why
    return f"its process ended with {_ending(code)}"


def _follow(reader: int, turn: Turn) -> str | None:
    """Take the news until the other end is closed. Returns why it is to be ended before that."""
    buffer = b""
    while True:
        if not select.select([reader], [], [], POLL_S)[0]:
            why = turn.why_over()
            if why is not None:
                return why
            continue
        found = os.read(reader, READ_BYTES)
        if not found:
            return None
        *lines, buffer = (buffer + found).split(b"\n")
        for line in lines:
            turn.take(msgspec.json.decode(line, type=News))


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
