"""One part of bench.gpu_check: cases, the processes that run them, targets, and the results that they bring.

A part is a list of cases, what matters most first. They run one after the other in a process of their own, and behind
one that has taken the device down in a fresh one: a kernel that reads what it may not breaks its process's device for
good, and one that waits for ever cannot be stopped from within. Cases that time nothing run in several processes at
once. The parent never touches the device: it takes the news, gives up a case that takes too long, and writes what there
is every few seconds. Cases share nothing but Context.state.
"""

import argparse
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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from bench.gpu_check import ALWAYS, NEEDED
from bench.limits import UNITS, Speed, measure_limits
from bench.report import result_markdown
from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, table_of, write_result

T = TypeVar("T")

OK, BELOW, WRONG, FAILED, SKIPPED, LEFT_OUT = "ok", "below target", "wrong", "failed", "skipped", "left out"
FAULTS = (WRONG, FAILED, BELOW, LEFT_OUT)  # what makes the check fail; skipped is what cannot be here
TOO_LONG, TIME_UP, INTERRUPTED = "given up: it took longer than it may", "the part's time was up", "interrupted"

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
    def speed(self) -> Speed:
        """The ceilings of this run, which its first case measures.

        Raises:
            LookupError: it has not.
        """
        if "speed" not in self.state:
            raise LookupError("no ceilings were measured in this run")
        return Speed(**self.state["speed"])

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What is made by the first case that asks for it, and kept until another key is asked for: models are big."""
        if key not in self._kept:
            self.drop()
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    @contextlib.contextmanager
    def poisoned(self) -> Iterator[None]:
        """On a CPU unwritten memory is NaN: what padding leaves behind must not reach any row."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(before or not self.is_device, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

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
        is_shared: it times nothing and needs little memory: others may use the device beside it.
    """

    name: str
    run: Callable[[Context], Iterable[Row]]
    limit_s: float
    table: str
    is_shared: bool = False


def last_line(error: BaseException) -> str:
    """What an error says, in a line: the last one, which of CUDA's and of the compilers' tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


# Targets.

H200 = "H200"
SINGLE_STREAM = "single stream, tokens/s"
TAIL_BESIDE_PROMPTS = "http inter-token p99 / median beside arriving prompts"
IDLE = "device idle between decode steps, share"
FULL_SERVER = "http, as many clients as have room x 128/1024, tokens/s"
BESIDE_ENGINE = "http / the engine alone, tokens/s of both"
FASTER_DECODES = "time as the rows' format / time as int8"
CANCEL_STEPS = "steps from cancel to the last news"
DECODE_ATTENTION = "decode_attention: sequences 64, context 4096, heads 32, kv_heads 8, head_dim 128; bfloat16"
LONG_ATTENTION = "decode_attention: sequences 8, context 32768, heads 32, kv_heads 8, head_dim 128; bfloat16"


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
    ("", IDLE): Target(most=0.05),
    ("llama-8b", FULL_SERVER): Target(least_share=0.80),
    ("", BESIDE_ENGINE): Target(least=0.98),
    ("", CANCEL_STEPS): Target(most=1),
    ("", DECODE_ATTENTION): Target(least_share=0.85),
    ("", f"{LONG_ATTENTION}: {FASTER_DECODES}"): Target(least=1.3),
    ("llama-8b", FASTER_DECODES): Target(least=1.3),
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
    return [ceilings_case(), Case("packages", _packages, 60.0, "Packages")]


def ceilings_case() -> Case:
    """Measures what all shares of a run refer to, and tells which device it is."""
    return Case(CEILINGS, _ceilings, 120.0, "Ceilings")


def _ceilings(context: Context) -> Iterator[Row]:
    context.state["facts"] = device_facts(context.device)
    yield Row("Device", {name: str(value) for name, value in context.state["facts"].items()})
    dtype = torch.bfloat16 if context.is_device else torch.float32
    is_quick = context.is_quick or not context.is_device
    limits = measure_limits(context.device, dtype, is_quick, [1] if is_quick else None)
    context.state["speed"] = {"read_bytes_per_s": limits.speed.read_bytes_per_s, "flops": limits.speed.flops}
    for probe in limits.probes:
        cells: dict[str, Cell] = {"form": probe.form, "best": probe.per_s / 1e9, "unit": UNITS[probe.kind]}
        yield Row(f"Ceilings, {limits.dtype}", cells)


def device_facts(device: torch.device) -> dict[str, Cell]:
    """What a figure depends on beside the code, and bench.results.MachineFacts do not tell."""
    facts: dict[str, Cell] = {"device": "cpu", "torch": str(torch.__version__), "triton": _version("triton")}
    facts["python"] = platform.python_version()
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    facts |= {"device": properties.name, "memory GiB": round(properties.total_memory / GIB, 1)}
    facts |= {"multiprocessors": properties.multi_processor_count, "CUDA of torch": torch.version.cuda}
    facts["compute capability"] = f"{properties.major}.{properties.minor}"
    asked = "driver_version,clocks.sm,power.limit"
    command = ["nvidia-smi", "--id=0", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        shown = "unknown"
    return facts | {asked: shown}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version" if find_spec(package) else "not installed"


def _packages(context: Context) -> Iterator[Row]:
    """Which parts can run on this machine."""
    for part, needed in NEEDED.items():
        for name in (*(ALWAYS if part == "environment" else ()), *needed):
            cells: dict[str, Cell] = {"part": part, "package": name, "version": _version(name)}
            yield Row("Packages", cells, OK if find_spec(name) else SKIPPED)


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

    @property
    def faults(self) -> list[Row]:
        return [row for row in self.rows if row.verdict in FAULTS]

    def tables(self) -> list[Table]:
        """The verdicts' counts, what makes the part fail, and a table for each title."""
        by_title: dict[str, list[dict[str, Cell]]] = {}
        for row in self.rows:
            judged: dict[str, Cell] = {"verdict": row.verdict} if row.verdict else {}
            judged |= {"note": row.note} if row.note else {}
            by_title.setdefault(row.table, []).append(row.cells | judged)
        counts = Counter(row.verdict or "not judged" for row in self.rows)
        found = [table_of(f"Verdicts: {self._part}", [dict(counts) or {"none": 0}])]
        if self.faults:
            lines = tuple((row.verdict, row.table, row.told()) for row in self.faults)
            found.append(Table(f"What fails: {self._part}", ("verdict", "table", "row"), lines))
        return found + [table_of(title, rows) for title, rows in by_title.items()]

    def write(self, every_s: float = 0.0) -> None:
        """Unless that was done within `every_s`, so that results are there even if this process is killed."""
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


# Running.

News = tuple[str, Any]  # of a process that runs cases: "began" or "ended" and a case's name, "row", "state"


@dataclass(frozen=True, slots=True)
class Job:
    """What a part runs on.

    Args:
        module: its cases(is_quick, is_device) lists the part's cases.
        device: "cpu" or "cuda".
        num_at_once: processes that share the machine.
    """

    module: str
    device: str
    is_quick: bool
    num_at_once: int = 1


def cases_of(job: Job) -> list[Case]:
    """All of the part's, in order."""
    found: list[Case] = importlib.import_module(job.module).cases(job.is_quick, job.device == "cuda")
    return found


def run_cases(job: Job, names: Collection[str], state: Mapping[str, Any], tell: Callable[[News], None]) -> None:
    """Run the cases of these names, up to one that needs a fresh process behind it."""
    context = Context(torch.device(job.device), job.is_quick, dict(state))
    for case in cases_of(job):
        if case.name not in names:
            continue
        tell(("began", case.name))
        is_lost = False
        try:
            for row in case.run(context):
                tell(("row", row))
            if context.is_device:
                torch.cuda.synchronize(context.device)  # the next call reports a fault: let that be in its own case
        except Exception as error:  # whatever is wrong with one case, the others are still to be tried
            tell(("row", Row(case.table, {"case": case.name}, FAILED, last_line(error))))
            is_lost = context.is_device and not _is_alive(context.device)
        tell(("state", context.state))
        tell(("ended", case.name))
        if is_lost:
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


def _be_worker(job: Job, names: Collection[str], state: Mapping[str, Any], pipe: Connection) -> None:
    """What the process does. It ends with its parent, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgid(0, 0)  # what it starts is ended with it
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if job.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if job.num_at_once > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.num_at_once))
    warnings.simplefilter("ignore")  # torch warns of deterministic fills, for each operator
    with contextlib.suppress(BrokenPipeError):
        run_cases(job, names, state, pipe.send)


class Turn:
    """Cases that run one after the other, and what has become of them.

    Args:
        end_s: of the part, by the monotonic clock.
    """

    def __init__(self, job: Job, cases: Sequence[Case], results: Results, end_s: float) -> None:
        self._job, self._results, self._end_s = job, results, end_s
        self._left = {case.name: case for case in cases}
        self._running: Case | None = None
        self._until_s = 0.0
        self.is_interrupted = threading.Event()

    def run(self, is_here: bool = False) -> None:
        """One process after the other, until each case has ended in some way. is_here: in this process."""
        why: str | None = None
        while self._left and why not in (TIME_UP, INTERRUPTED) and time.monotonic() < self._end_s:
            num_left, self._until_s = len(self._left), time.monotonic() + START_LIMIT_S
            asked, why = (self._job, tuple(self._left), dict(self._results.state)), None
            if is_here:
                run_cases(*asked, self._take)
            else:
                why = self._run_process(*asked)
            if self._running is not None:
                self._add(self._running, LEFT_OUT if why == TIME_UP else FAILED, why or "its process ended")
                self._running = None
            elif len(self._left) == num_left and why != TIME_UP:  # no case began: none will
                self._end_all(FAILED, why or "the process did not start")
        self._end_all(LEFT_OUT, INTERRUPTED if why == INTERRUPTED else TIME_UP)

    def _run_process(self, *asked: Any) -> str | None:
        """Returns why it ended early; None: it has run all cases, or given up the device itself."""
        context = get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_be_worker, args=(*asked, theirs))
        process.start()
        theirs.close()
        why: str | None = INTERRUPTED
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
        if why is None and code:
            why = f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
        return why

    def _follow(self, pipe: Connection) -> str | None:
        """Take the news until the other end is closed. Returns why it is to be ended before that."""
        while True:
            if pipe.poll(POLL_S):
                try:
                    self._take(pipe.recv())
                except EOFError:
                    return None
            elif self.is_interrupted.is_set():
                return INTERRUPTED
            elif time.monotonic() > self._end_s + END_GRACE_S:
                return TIME_UP
            elif time.monotonic() > self._until_s:
                return TOO_LONG

    def _take(self, news: News) -> None:
        kind, what = news
        if kind == "began":
            self._running = self._left.pop(what)
            self._until_s = time.monotonic() + self._running.limit_s
        elif kind == "row":
            self._results.add(what)
        elif kind == "state":
            self._results.state |= what
        else:
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
        shared = replace(job, num_at_once=num_turns)
        turns = [Turn(shared, group[first::num_turns], results, end_s) for first in range(num_turns)]
        with ThreadPoolExecutor(num_turns) as pool:
            running = [pool.submit(turn.run) for turn in turns]
            try:
                for future in running:
                    future.result()
            except BaseException:  # Ctrl-C above all: leave no process on the device
                for turn in turns:
                    turn.is_interrupted.set()
                raise


def run_part(arguments: argparse.Namespace, argv: Sequence[str], is_here: bool = False) -> int:
    """Run, show, write. Returns the exit code.

    Args:
        arguments: of gpu_check.main.
        is_here: in this process, as a test wants it.
    """
    part, end_s, device = arguments.part, time.monotonic() + arguments.limit, arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("bench.gpu_check: there is no CUDA device\nFix: --device cpu, for tiny shapes", file=sys.stderr)
        return 2
    job, only = Job(MODULES[part], device, arguments.quick), arguments.only
    chosen = [case for case in cases_of(job) if only is None or only in case.name or case.name == CEILINGS]
    if only and all(case.name == CEILINGS for case in chosen):
        print(f"bench.gpu_check: no case of --part {part} has {only!r} in its name", file=sys.stderr)
        return 2
    is_kept = arguments.out is not None or (device == "cuda" and not arguments.quick)
    path = (arguments.out or RESULTS_DIR) / f"gpu-{part}" if is_kept else None
    results = Results(part, command_line("python -m bench.gpu_check", argv), path)
    if is_here:
        Turn(job, chosen, results, end_s).run(is_here=True)
    else:
        # two cores each at least: Triton compiles, and the references run on the CPU
        run_all(job, chosen, results, end_s, max(1, min(MAX_AT_ONCE, len(os.sched_getaffinity(0)) // 2)))
    results.write()
    results.show()
    return 1 if results.faults else 0
