"""Figures, tables and result files, in one form for all benches: what was measured, by which command, on which machine.

A table is columns and rows as they are shown; bench/report.py draws one that has a Plot, whatever bench it is of.
"""

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from server.commands.console import new_console

RESULTS_DIR = Path(__file__).parent / "results"

PACKAGES = (
    *("fastapi", "h11", "httptools", "msgspec", "numpy", "pydantic", "tokenizers", "torch", "transformers", "uvicorn"),
    "uvloop",
)
PLAIN_WIDTH = 140  # columns, where there is no terminal to ask
API_KEY_FLAG = "--api-key"

Cell = str | int | float | None


def percentile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float | None:
    """The value below which q percent of the values lie, linear between neighbours; None of no values.

    Args:
        q: in [0, 100].
    Source: Hyndman and Fan (1996), definition 7.
    """
    return None if len(values) == 0 else float(np.percentile(np.asarray(values, dtype=np.float64), q))


class Distribution(msgspec.Struct, frozen=True):
    """What is left of many samples; the unit is the samples'. None: there were none."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


def summarize(values: Sequence[float]) -> Distribution:
    """The figures of these samples."""
    if not values:
        return Distribution(0, None, None, None, None, None)
    samples = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (percentile(samples, q) for q in (50, 95, 99))
    return Distribution(len(samples), float(samples.mean()), p50, p95, p99, float(samples.max()))


class Plot(msgspec.Struct, frozen=True):
    """How a table becomes a picture: one line of y over x for each value of the series column."""

    x: str
    y: str
    series: str | None = None


class Table(msgspec.Struct, frozen=True):
    """Figures, units in the names of the columns.

    Args:
        note: what the figures do not say by themselves, in a sentence or two; "": nothing.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    plot: Plot | None = None
    note: str = ""


def table_of(title: str, rows: Sequence[Mapping[str, Cell]], plot: Plot | None = None, note: str = "") -> Table:
    """A table of rows that each name their cells; the columns are in the order in which rows first name them."""
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return Table(title, columns, tuple(tuple(row.get(name) for name in columns) for row in rows), plot, note)


class MachineFacts(msgspec.Struct, frozen=True):
    """What a figure depends on beside the code."""

    cpu: str
    num_cores: int  # that this process may use
    system: str
    load_average: float  # over the last minute: what else ran
    python: str
    packages: dict[str, str]
    git_commit: str


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one bench.

    Args:
        command: as it would be typed, without secrets.
        config, details: the bench's own; not shown by the report.
    """

    kind: str
    created: str  # UTC, ISO 8601
    command: str
    machine: MachineFacts
    tables: tuple[Table, ...]
    config: dict[str, Any] = {}
    details: dict[str, Any] = {}


def command_line(program: str, argv: Sequence[str]) -> str:
    """`program argv...`, quoted for a shell, the API key blanked."""
    shown = [f"{API_KEY_FLAG}=***" if argument.startswith(f"{API_KEY_FLAG}=") else argument for argument in argv]
    shown = [
        "***" if before == API_KEY_FLAG else argument for before, argument in zip(["", *shown], shown, strict=False)
    ]
    return f"{program} {shlex.join(shown)}".rstrip()


def write_result(
    path: Path,
    kind: str,
    command: str,
    tables: Sequence[Table],
    config: dict[str, Any] | None = None,
    details: dict[str, Any] | None = None,
) -> ResultFile:
    """Write one run to `path`, making its directory. The arguments are the fields of ResultFile."""
    machine = MachineFacts(
        cpu=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        load_average=round(os.getloadavg()[0], 2),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: _version(name) for name in PACKAGES},
        git_commit=_git_commit(),
    )
    result = ResultFile(
        kind=kind,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        machine=machine,
        tables=tuple(tables),
        config=config or {},
        details=details or {},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return result


def read_result(path: Path) -> ResultFile:
    """
    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the file is none of ours.
        OSError: it cannot be read.
    """
    return msgspec.json.decode(path.read_bytes(), type=ResultFile)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    """The commit of this source, with `+changes` where the tree is not clean."""

    def git(*words: str) -> str:
        command, here = ["git", *words], Path(__file__).parent
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def print_tables(tables: Sequence[Table]) -> None:
    """Show tables on the terminal."""
    from rich.table import Table as RichTable

    console = new_console(plain_width=PLAIN_WIDTH)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left")
        for i, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if i == 0 else "right")
        for row in table.rows:
            shown.add_row(*(format_cell(cell) for cell in row))
        console.print(shown)
        if table.note:
            console.print(table.note)


def format_cell(cell: Cell) -> str:
    """A figure with three or four digits that mean something."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 10 else f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else cell
