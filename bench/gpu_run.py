"""One part of bench.gpu_check: its worker, started again behind a case that took it down, and the results as they come.

The parent never touches the device. It reads the worker's news, gives up a case that takes longer than it may, and
writes what there is after each one.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.gpu_parts import FAILED, FAULTS, SKIPPED, Case, Job, Row
from bench.gpu_worker import MORE_TO_DO, PARTS, News, cases_of, run_cases
from bench.report import result_markdown
from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result

CEILINGS = "ceilings"  # the case that every part begins with
POLL_S = 0.5
READ_BYTES = 1 << 16
START_LIMIT_S = 120.0  # of a worker, which imports torch first
END_GRACE_S = 5.0  # of the case that runs when the part's time is up


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for; see gpu_check.main.

    Args:
        limit_s: for the whole part: what has not begun by then is left out, and said to be.
        is_here: in this process: a test's, which needs no protection and has torch imported.
    """

    part: str
    is_quick: bool
    device: str
    only: str | None
    limit_s: float
    out: Path | None
    is_here: bool = False


class Results:
    """Rows as they come: shown, and written as JSON and markdown. path: without a suffix; None: not written."""

    def __init__(self, part: str, command: str, path: Path | None) -> None:
        self._part, self._command, self._path = part, command, path
        self.rows: list[Row] = []
        self.state: dict[str, Any] = {}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        figures = "  ".join(f"{name} {_short(cell)}" for name, cell in row.cells.items() if cell is not None)
        print(f"{row.verdict or '-':12} {figures}  {row.note}".rstrip(), file=sys.stderr, flush=True)

    def tables(self) -> list[Table]:
        """The verdicts' counts, and a table for each title."""
        by_title: dict[str, list[Row]] = {}
        for row in self.rows:
            by_title.setdefault(row.table, []).append(row)
        return [self._summary(), *(_table(title, rows) for title, rows in by_title.items())]

    def _summary(self) -> Table:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.verdict or "not judged"] = counts.get(row.verdict or "not judged", 0) + 1
        return Table(f"Verdicts: {self._part}", tuple(counts) or ("none",), (tuple(counts.values()) or (0,),))

    def write(self) -> None:
        if self._path is None:
            return
        facts: dict[str, Any] = {name: self.state[name] for name in ("facts", "speed") if name in self.state}
        json_path = self._path.with_suffix(".json")
        result = write_result(json_path, f"gpu_check {self._part}", self._command, self.tables(), facts)
        page = result_markdown(result, [None] * len(result.tables))
        self._path.with_suffix(".md").write_text(page + "\n", encoding="utf-8")


def _short(cell: Cell) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _table(title: str, rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    has_verdicts, has_notes = any(row.verdict for row in rows), any(row.note for row in rows)
    extra = [name for name, is_there in (("verdict", has_verdicts), ("note", has_notes)) if is_there]
    lines: list[tuple[Cell, ...]] = []
    for row in rows:
        told = {"verdict": row.verdict, "note": row.note}
        lines.append((*(row.cells.get(name) for name in columns), *(told[name] for name in extra)))
    return Table(title, (*columns, *extra), tuple(lines))


def run_part(run: Run, argv: Sequence[str]) -> int:
    """Run, show, write. Returns the exit code."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if run.device == "auto" else run.device
    if device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_check: there is no CUDA device\nFix: --device cpu, for tiny shapes", file=sys.stderr)
        return 2
    is_kept = run.out is not None or (device == "cuda" and not run.is_quick)
    path = (run.out or RESULTS_DIR) / f"gpu-{run.part}" if is_kept else None
    results = Results(run.part, command_line("python -m bench.gpu_check", argv), path)
    job = Job(PARTS[run.part], device, run.is_quick)
    cases = [case for case in cases_of(job) if run.only is None or run.only in case.name or case.name == CEILINGS]
    run_all(job, cases, results, time.monotonic() + run.limit_s, here if run.is_here else in_worker)
    results.write()
    print_tables(results.tables())
    if path is not None:
        print(f"written to {path.with_suffix('.json')} and .md")
    return 1 if any(row.verdict in FAULTS for row in results.rows) else 0


Take = Callable[[News], float]
"""Takes news; until which monotonic second to wait for the next"""
Send = Callable[[Job, Take, float], str | None]
"""(job, what takes its news, the part's end) -> why it ended before its time; None: it did not"""


def run_all(job: Job, cases: Sequence[Case], results: Results, end_s: float, send: Send) -> None:
    """One worker after the other, until each case has ended in some way."""
    left = {case.name: case for case in cases}
    running: list[Case] = []

    def take(news: News) -> float:
        if news.began is not None:
            running.append(left.pop(news.began))
        if news.row is not None:
            results.add(news.row)
        if news.state is not None:
            results.state = news.state
        if news.ended is not None:
            running.clear()
            results.write()
        return time.monotonic() + (running[0].limit_s if running else START_LIMIT_S)

    while left and time.monotonic() < end_s:
        num_left = len(left)
        why = send(msgspec.structs.replace(job, cases=tuple(left), state=results.state), take, end_s)
        if running:
            results.add(Row(running[0].table, {"case": running[0].name}, FAILED, why or "its process ended"))
            running.clear()
        elif len(left) == num_left:  # it never began: nor will the next
            for case in left.values():
                results.add(Row(case.table, {"case": case.name}, FAILED, why or "the worker did not start"))
            return
    for case in left.values():
        results.add(Row(case.table, {"case": case.name}, SKIPPED, "the part's time was up"))


def here(job: Job, take: Take, end_s: float) -> str | None:
    def tell(news: News) -> None:
        take(news)

    run_cases(job, tell)
    return None


def in_worker(job: Job, take: Take, end_s: float) -> str | None:
    """Returns why it ended before all cases had: None where it has run them all, or given up the device itself."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "bench.gpu_worker", "--news", str(writer)]
    is_interpreted = {"TRITON_INTERPRET": "1"} if job.device == "cpu" else {}  # said before triton is imported
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=(writer,),
        start_new_session=True,
        env={**os.environ, **is_interpreted},
        cwd=Path(__file__).parent.parent,
    ) as worker:
        os.close(writer)
        assert worker.stdin is not None
        worker.stdin.write(msgspec.json.encode(job))
        worker.stdin.close()
        why = None
        try:
            _follow(reader, take, end_s)
        except TimeoutError:
            why = "given up: it took longer than it may"
            os.killpg(worker.pid, signal.SIGKILL)
        except BaseException:  # Ctrl-C above all: leave no process on the device
            os.killpg(worker.pid, signal.SIGKILL)
            raise
        finally:
            os.close(reader)
        code = worker.wait()
    if why is not None or code in (0, MORE_TO_DO):
        return why
    return f"its process ended with {_ending(code)}"


def _follow(reader: int, take: Take, end_s: float) -> None:
    """Take the news until the other end is closed.

    Raises:
        TimeoutError: a case, or the part, is over its time.
    """
    buffer, until_s = b"", time.monotonic() + START_LIMIT_S
    while True:
        if not select.select([reader], [], [], POLL_S)[0]:
            if time.monotonic() > min(until_s, end_s + END_GRACE_S):
                raise TimeoutError
            continue
        found = os.read(reader, READ_BYTES)
        if not found:
            return
        *lines, buffer = (buffer + found).split(b"\n")
        for line in lines:
            until_s = take(msgspec.json.decode(line, type=News))


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
