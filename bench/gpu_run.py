"""One part of bench.gpu_check: cases, the processes that run them, targets, and the results that they bring.

A part is a list of cases, what matters most first. They run one after the other in a process of their own, which is
started anew behind one that has taken the device down with it: a kernel that reads what it may not breaks its process's
device for good, and one that waits for ever cannot be stopped from within. Cases that time nothing run in several
processes at once. The parent never touches the device: it takes the news, gives up a case that takes longer than it
may, and writes what there is every few seconds. A case leans on no other but through Context.state.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.gpu_check import ALWAYS, NEEDED, missing_packages
from bench.limits import Speed, measure_device_limits
from bench.report import result_markdown
from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result

T = TypeVar("T")

OK, BELOW, WRONG, FAILED, SKIPPED, LEFT_OUT = "ok", "below target", "wrong", "failed", "skipped", "left out"
FAULTS = (WRONG, FAILED, BELOW, LEFT_OUT)  # what makes the check fail; skipped is what cannot be here
TOO_LONG, TIME_UP, BROKEN_OFF = "given up: it took longer than it may", "the part's time was up", "broken off"

MODULES = {part: f"bench.gpu_{part}" for part in NEEDED} | {"environment": "bench.gpu_run"}
CEILINGS = "ceilings"  # the case that every part begins with
POLL_S = 0.5
START_LIMIT_S = 120.0  # of a process, which imports torch first
END_GRACE_S = 5.0  # of the case that runs when the part's time is up
MAX_AT_ONCE = 8  # processes: each has the device's libraries in its memory
WRITE_EVERY_S = 2.0  # most cases are shorter than it takes to write all that there is
GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table.

    Args:
        table: its title.
        cells: by column; the tables' columns are those that their rows have, in the order of their coming.
        verdict: of those above; "" where nothing is judged.
        note: of a fault its last line, otherwise what explains a figure.
    """

    table: str
    cells: dict[str, Cell]
    verdict: str = ""
    note: str = ""

    def told(self) -> str:
        """In a line."""
        shown = {name: f"{cell:.4g}" if isinstance(cell, float) else cell for name, cell in self.cells.items()}
        figures = "  ".join(f"{name} {cell}" for name, cell in shown.items() if cell not in (None, ""))
        return f"{figures}  {self.note}".rstrip()


@dataclass(slots=True)
class Context:
    """What a case is given.

    Args:
        state: plain values for the cases behind this one: it outlives the process.
    """

    device: torch.device
    is_quick: bool
    state: dict[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)

    @property
    def is_device(self) -> bool:
        return self.device.type == "cuda"

    def of_size(self, tiny: T, quick: T, full: T) -> T:
        """Of three sizes that of this run: tiny on a CPU."""
        return tiny if not self.is_device else quick if self.is_quick else full

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_device else "cpu"

    @property
    def speed(self) -> Speed | None:
        """The ceilings of this run: its first case's. None: it has found none."""
        found = self.state.get("speed")
        return None if found is None else Speed(**found)

    @property
    def known_speed(self) -> Speed:
        """
        Raises:
            LookupError: no ceilings were measured in this run.
        """
        if self.speed is None:
            raise LookupError("no ceilings were measured in this run")
        return self.speed

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What is made by the first case that asks for it, and kept until another key is asked for: models are big."""
        if key not in self._kept:
            self.drop()
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    def drop(self) -> None:
        """Give back what is kept."""
        self._kept.clear()
        gc.collect()
        if self.is_device:
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Case:
    """
    Args:
        run: gives rows; what it raises is a row as well.
        limit_s: after which it is given up.
        table: of a row that tells how it failed.
        is_alone: no other runs in its process after it: it leaves memory behind that nobody can give back.
        is_shared: it times nothing and needs little memory: others may use the device beside it.
    """

    name: str
    run: Callable[[Context], Iterable[Row]]
    limit_s: float
    table: str
    is_alone: bool = False
    is_shared: bool = False


def last_line(error: BaseException) -> str:
    """What an error says, in a line: the last one, which of CUDA's and of the compilers' tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


# Targets.

H200 = "H200"
SINGLE_STREAM = "single stream, tokens/s"
TAIL_BESIDE_PROMPTS = "inter-token p99 / median beside arriving prompts"
IDLE = "device idle between decode steps, share"
FULL_SERVER = "http, as many clients as have room x 128/1024, tokens/s"
BESIDE_ENGINE = "http / the engine alone, tokens/s of both"
CANCEL_STEPS = "steps from cancel to the last news"
DECODE_ATTENTION = "decode_attention: sequences 64, context 4096, heads 32, kv_heads 8, head_dim 128; bfloat16"


@dataclass(frozen=True, slots=True)
class Target:
    """
    Args:
        least, most: the figure is to be in between; None: that end is open.
        least_share: of the limit.
        is_for_h200: least and most mean something there alone (141 GB, 4.8 TB/s).
    """

    least: float | None = None
    most: float | None = None
    least_share: float | None = None
    is_for_h200: bool = False

    @property
    def shown(self) -> str:
        ends = [f">= {self.least:g}"] if self.least is not None else []
        ends += [f"<= {self.most:g}"] if self.most is not None else []
        if ends and self.is_for_h200:
            ends[-1] += f" on an {H200}"
        return " and ".join(ends + ([f"share >= {self.least_share:g}"] if self.least_share is not None else []))

    def verdict(self, figure: float, share: float | None, context: Context) -> str:
        """ "" where nothing of it means something on this device: on a CPU nothing does."""
        found = [share is not None and share >= self.least_share] if self.least_share is not None else []
        if not self.is_for_h200 or H200 in context.device_name:
            found += [figure >= self.least] if self.least is not None else []
            found += [figure <= self.most] if self.most is not None else []
        if not context.is_device or not found:
            return ""
        return OK if all(found) else BELOW


def first_token_of(num_tokens: int) -> str:
    return f"time to first token of {num_tokens}, ms"


# (preset, measure) -> its target; preset "": of every model, and of kernels. A figure of another device than an H200 is
# shown beside its limit, and judged by its share alone.
TARGETS: Mapping[tuple[str, str], Target] = {
    ("llama-8b", SINGLE_STREAM): Target(least=240, least_share=0.85, is_for_h200=True),
    ("qwen3-0.6b", SINGLE_STREAM): Target(least=1190, is_for_h200=True),
    ("llama-8b", first_token_of(1024)): Target(most=24, is_for_h200=True),
    ("", TAIL_BESIDE_PROMPTS): Target(most=2),
    ("", f"http {TAIL_BESIDE_PROMPTS}"): Target(most=2),
    ("", IDLE): Target(most=0.05),
    ("llama-8b", FULL_SERVER): Target(least_share=0.80),
    ("", BESIDE_ENGINE): Target(least=0.98),
    ("", CANCEL_STEPS): Target(most=1),
    ("", DECODE_ATTENTION): Target(least_share=0.85),
}


def target_of(preset: str, measure: str) -> Target | None:
    return TARGETS.get((preset, measure), TARGETS.get(("", measure)))


def judged(
    context: Context, table: str, model: str, measure: str, figure: float, limit: float | None = None, note: str = ""
) -> Row:
    """A figure's row, beside its limit, its share of that, and its target.

    Args:
        measure: ends with its unit where it has one; of what is given per second the share is figure / limit, of times
            limit / figure.
        limit: that the device's ceilings allow.
    """
    target, share = target_of(model, measure), None
    if limit is not None and figure:
        share = figure / limit if measure.endswith("/s") else limit / figure
    cells: dict[str, Cell] = {"measure": measure, "figure": figure, "limit": limit, "share": share}
    cells["target"] = "" if target is None else target.shown
    return Row(table, cells, "" if target is None else target.verdict(figure, share, context), note)


# The environment: versions, the device, and its ceilings, which every part measures first.


def cases(is_quick: bool, is_device: bool) -> list[Case]:
    """Of --part environment."""
    return [ceilings_case(), Case("versions", _versions, 60.0, "Versions"), Case("parts", _parts, 30.0, "Parts")]


def ceilings_case() -> Case:
    """Measures what all shares of a run refer to, and tells which device it is."""
    return Case(CEILINGS, _ceilings, 120.0, "Ceilings")


def _ceilings(context: Context) -> Iterator[Row]:
    context.state["facts"] = device_facts(context.device)
    yield Row("Device", {name: str(value) for name, value in context.state["facts"].items()})
    dtype = torch.bfloat16 if context.is_device else torch.float32
    limits = measure_device_limits(context.device, dtype, context.is_quick or not context.is_device)
    context.state["speed"] = {"read_bytes_per_s": limits.speed.read_bytes_per_s, "flops": limits.speed.flops}
    for probe in limits.probes:
        scale, unit = (1e9, "GB/s") if probe.kind == "read" else (1e12, "TFLOP/s")
        cells: dict[str, Cell] = {"kind": probe.kind, "form": probe.form, "threads": probe.num_threads}
        yield Row(f"Ceilings, {limits.dtype}", cells | {"best": probe.per_s / scale, "unit": unit})


def device_facts(device: torch.device) -> dict[str, Cell]:
    """What a figure depends on beside the code, and bench.results.MachineFacts do not tell."""
    facts: dict[str, Cell] = {"device": "cpu", "torch": str(torch.__version__), "python": platform.python_version()}
    facts["triton"] = _version("triton")
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    asked = {"driver": "driver_version", "clock MHz": "clocks.sm", "power limit W": "power.limit"}
    return facts | {
        "device": properties.name,
        "memory GiB": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "level-2 cache MiB": getattr(properties, "L2_cache_size", 0) // 1024**2,
        "compute capability": f"{properties.major}.{properties.minor}",
        "CUDA of torch": torch.version.cuda,
        **{name: _asked_of_driver(question) for name, question in asked.items()},
    }


def _asked_of_driver(question: str) -> str:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={question}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version" if find_spec(package) else "not installed"


def _versions(context: Context) -> Iterator[Row]:
    for name in dict.fromkeys(name for part in NEEDED for name in (*ALWAYS, *NEEDED[part])):
        yield Row("Versions", {"package": name, "version": _version(name)}, OK if find_spec(name) else SKIPPED)


def _parts(context: Context) -> Iterator[Row]:
    """What can be run on this machine."""
    for part in NEEDED:
        missing = missing_packages(part)
        note = f"needs {', '.join(missing)}" if missing else ""
        yield Row("Parts", {"part": part}, SKIPPED if missing else OK, note)


# Results.


class Results:
    """Rows as they come: shown, and written as JSON and markdown. Any thread may call.

    Args:
        path: without a suffix; None: nothing is written.
    """

    def __init__(self, part: str, command: str, path: Path | None) -> None:
        self._part, self._command, self._path = part, command, path
        self._lock = threading.Lock()
        self._written_s = -WRITE_EVERY_S
        self.rows: list[Row] = []
        self.state: dict[str, Any] = {}

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            print(f"{row.verdict or '-':12} {row.told()}", file=sys.stderr, flush=True)

    def learn(self, state: Mapping[str, Any]) -> None:
        """What a case leaves to those behind it."""
        with self._lock:
            self.state |= state

    @property
    def faults(self) -> list[Row]:
        return [row for row in self.rows if row.verdict in FAULTS]

    def tables(self) -> list[Table]:
        """The verdicts' counts, what makes the part fail, and a table for each title."""
        by_title: dict[str, list[Row]] = {}
        counts: dict[str, int] = {}
        for row in self.rows:
            by_title.setdefault(row.table, []).append(row)
            counts[row.verdict or "not judged"] = counts.get(row.verdict or "not judged", 0) + 1
        found = [Table(f"Verdicts: {self._part}", tuple(counts) or ("none",), (tuple(counts.values()) or (0,),))]
        if self.faults:
            lines = tuple((row.verdict, row.table, row.told()) for row in self.faults)
            found.append(Table(f"What fails: {self._part}", ("verdict", "table", "row"), lines))
        return found + [_table(title, rows) for title, rows in by_title.items()]

    def write(self, every_s: float = 0.0) -> None:
        """Unless that was done within `every_s`: whoever ends us before our end shall find something."""
        if self._path is None or time.monotonic() < self._written_s + every_s:
            return
        with self._lock:
            facts: dict[str, Any] = {name: self.state[name] for name in ("facts", "speed") if name in self.state}
            json_path = self._path.with_suffix(".json")
            result = write_result(json_path, f"gpu_check {self._part}", self._command, self.tables(), facts)
            page = result_markdown(result, [None] * len(result.tables))
            self._path.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
            self._written_s = time.monotonic()

    def show(self) -> None:
        """All tables; last what makes the part fail, so that a terminal ends with it."""
        print_tables([table for table in self.tables() if not table.title.startswith("What fails")])
        for row in self.faults:
            print(f"{row.verdict}: {row.table}: {row.told()}")
        if self._path is not None:
            print(f"written to {self._path.with_suffix('.json')} and .md")
        print(f"gpu_check {self._part}: " + (f"rows that fail: {len(self.faults)}" if self.faults else "nothing fails"))


def _table(title: str, rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    lines: list[tuple[Cell, ...]] = [
        (*(row.cells.get(name) for name in columns), row.verdict, row.note) for row in rows
    ]
    has_verdicts, has_notes = any(row.verdict for row in rows), any(row.note for row in rows)
    kept = [*range(len(columns)), *([len(columns)] if has_verdicts else []), *([len(columns) + 1] if has_notes else [])]
    named = (*columns, "verdict", "note")
    return Table(title, tuple(named[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in lines))


# Running.


@dataclass(frozen=True, slots=True)
class Job:
    """What a part runs on.

    Args:
        module: its cases(is_quick, is_device) lists the part's cases.
        device: "cpu" or "cuda".
        cases: names of those that are still to be run.
        state: what earlier cases have left, as Context.state.
        num_at_once: processes that share the machine.
    """

    module: str
    device: str
    is_quick: bool
    cases: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    num_at_once: int = 1


@dataclass(frozen=True, slots=True)
class News:
    """Of a process that runs cases. began, ended: a case's name; state: for those who come later."""

    began: str | None = None
    ended: str | None = None
    row: Row | None = None
    state: Mapping[str, Any] | None = None


def cases_of(job: Job) -> list[Case]:
    """All of the part's, in order."""
    found: list[Case] = importlib.import_module(job.module).cases(job.is_quick, job.device == "cuda")
    return found


def run_cases(job: Job, tell: Callable[[News], None]) -> None:
    """Run the job's cases, up to one behind which another process is wanted."""
    context = Context(torch.device(job.device), job.is_quick, dict(job.state))
    for case in cases_of(job):
        if case.name not in job.cases:
            continue
        tell(News(began=case.name))
        is_lost = False
        try:
            for row in case.run(context):
                tell(News(row=row))
            if context.is_device:
                torch.cuda.synchronize(context.device)  # a fault is told by the next call: let that be its own case
        except Exception as error:  # whatever is wrong with one case, the others are still to be tried
            tell(News(row=Row(case.table, {"case": case.name}, FAILED, last_line(error))))
            is_lost = context.is_device and not _is_alive(context.device)
        tell(News(ended=case.name, state=context.state))
        if is_lost or case.is_alone:
            return
    context.drop()


def _is_alive(device: torch.device) -> bool:
    """A CUDA error is sticky: nothing on that device succeeds after it."""
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True


def _be_worker(job: Job, pipe: Connection) -> None:
    """What the process does. It ends with its parent, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgid(0, 0)  # what it starts is ended with it
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if job.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # said before triton is imported
    if job.num_at_once > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.num_at_once))
    warnings.simplefilter("ignore")  # torch's on deterministic fills, as many as there are operators
    with contextlib.suppress(BrokenPipeError):
        run_cases(job, pipe.send)


class Turn:
    """Cases that run one after the other, and what has become of them.

    Args:
        end_s: of the part, by the monotonic clock.
    """

    def __init__(self, cases: Sequence[Case], results: Results, end_s: float) -> None:
        self._left = {case.name: case for case in cases}
        self._results, self._end_s = results, end_s
        self._running: Case | None = None
        self._until_s = 0.0
        self.is_broken_off = threading.Event()

    def run(self, job: Job, is_here: bool = False) -> None:
        """One process after the other, until each case has ended in some way. is_here: in this one."""
        while self._left and time.monotonic() < self._end_s and not self.is_broken_off.is_set():
            num_left = len(self._left)
            self._until_s = time.monotonic() + START_LIMIT_S
            asked, why = replace(job, cases=tuple(self._left), state=dict(self._results.state)), None
            if is_here:
                run_cases(asked, self._take)
            else:
                why = self._run_process(asked)
            if self._running is not None:
                self._add(self._running, LEFT_OUT if why == TIME_UP else FAILED, why or "its process ended")
                self._running = None
            elif len(self._left) == num_left and why != TIME_UP:  # it never began: nor will the next
                self._end_all(FAILED, why or "the process did not start")
        self._end_all(LEFT_OUT, BROKEN_OFF if self.is_broken_off.is_set() else TIME_UP)

    def _run_process(self, job: Job) -> str | None:
        """Returns why it ended before its time; None: it has run all cases, or given up the device itself."""
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_be_worker, args=(job, theirs))
        process.start()
        theirs.close()
        why: str | None = BROKEN_OFF
        try:
            why = self._follow(ours)
        finally:
            if why is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGKILL)
                    os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            ours.close()
        code = process.exitcode or 0
        if why is not None or not code:
            return why
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def _follow(self, pipe: Connection) -> str | None:
        """Take the news until the other end is closed. Returns why it is to be ended before that."""
        while True:
            if pipe.poll(POLL_S):
                try:
                    self._take(pipe.recv())
                except EOFError:
                    return None
                continue
            if self.is_broken_off.is_set():
                return BROKEN_OFF
            if time.monotonic() > self._end_s + END_GRACE_S:
                return TIME_UP
            if time.monotonic() > self._until_s:
                return TOO_LONG

    def _take(self, news: News) -> None:
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
            self._results.write(every_s=WRITE_EVERY_S)

    def _end_all(self, verdict: str, why: str) -> None:
        for case in self._left.values():
            self._add(case, verdict, why)
        self._left.clear()

    def _add(self, case: Case, verdict: str, why: str) -> None:
        self._results.add(Row(case.table, {"case": case.name}, verdict, why))


def run_all(job: Job, cases: Sequence[Case], results: Results, end_s: float, num_at_once: int = 1) -> None:
    """In their order, but for cases that may share the device: those that follow each other run at once."""
    for is_shared, following in groupby(cases, lambda case: case.is_shared):
        group = list(following)
        num_turns = min(num_at_once, len(group)) if is_shared else 1
        turns = [Turn(group[first::num_turns], results, end_s) for first in range(num_turns)]
        with ThreadPoolExecutor(num_turns) as pool:
            running = [pool.submit(turn.run, replace(job, num_at_once=num_turns)) for turn in turns]
            try:
                for future in running:
                    future.result()
            except BaseException:  # Ctrl-C above all: leave no process on the device
                for turn in turns:
                    turn.is_broken_off.set()
                raise


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
    job = Job(MODULES[run.part], device, run.is_quick)
    chosen = [case for case in cases_of(job) if run.only is None or run.only in case.name or case.name == CEILINGS]
    if run.only and all(case.name == CEILINGS for case in chosen):
        print(f"bench.gpu_check: no case of --part {run.part} has {run.only!r} in its name", file=sys.stderr)
        return 2
    is_kept = run.out is not None or (device == "cuda" and not run.is_quick)
    path = (run.out or RESULTS_DIR) / f"gpu-{run.part}" if is_kept else None
    results = Results(run.part, command_line("python -m bench.gpu_check", argv), path)
    if run.is_here:
        Turn(chosen, results, end_s).run(job, is_here=True)
    else:
        # two cores each at least: Triton compiles, and the references run on the CPU
        run_all(job, chosen, results, end_s, max(1, min(MAX_AT_ONCE, len(os.sched_getaffinity(0)) // 2)))
    results.write()
    results.show()
    return 1 if results.faults else 0
