"""What a part of bench.gpu_check has found: rows as they come, their tables, and which of them make it fail."""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_parts import FAULTS, Row
from bench.report import result_markdown
from bench.results import Cell, Table, print_tables, write_result

WRITE_EVERY_S = 2.0  # most cases are shorter than it takes to write all that there is
FACTS = ("facts", "speed")  # of the state: what belongs into a result file


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
            print(f"{row.verdict or '-':12} {_told(row)}", file=sys.stderr, flush=True)

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
        for row in self.rows:
            by_title.setdefault(row.table, []).append(row)
        found = [self._summary(), *(_table(title, rows) for title, rows in by_title.items())]
        if self.faults:
            lines = tuple((row.verdict, row.table, _told(row)) for row in self.faults)
            found.insert(1, Table(f"What fails: {self._part}", ("verdict", "table", "row"), lines))
        return found

    def _summary(self) -> Table:
        counts: dict[str, int] = {}
        for row in self.rows:
            counts[row.verdict or "not judged"] = counts.get(row.verdict or "not judged", 0) + 1
        return Table(f"Verdicts: {self._part}", tuple(counts) or ("none",), (tuple(counts.values()) or (0,),))

    def write_now_and_then(self) -> None:
        """For whoever ends us before our end."""
        if time.monotonic() >= self._written_s + WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            facts: dict[str, Any] = {name: self.state[name] for name in FACTS if name in self.state}
            json_path = self._path.with_suffix(".json")
            result = write_result(json_path, f"gpu_check {self._part}", self._command, self.tables(), facts)
            page = result_markdown(result, [None] * len(result.tables))
            self._path.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
            self._written_s = time.monotonic()

    def show(self) -> None:
        """All tables; last what makes the part fail, so that a terminal ends with it."""
        print_tables([table for table in self.tables() if not table.title.startswith("What fails")])
        for row in self.faults:
            print(f"{row.verdict}: {row.table}: {_told(row)}")
        if self._path is not None:
            print(f"written to {self._path.with_suffix('.json')} and .md")
        print(f"gpu_check {self._part}: " + (f"rows that fail: {len(self.faults)}" if self.faults else "nothing fails"))


def _told(row: Row) -> str:
    """In a line."""
    figures = "  ".join(f"{name} {_short(cell)}" for name, cell in row.cells.items() if cell not in (None, ""))
    return f"{figures}  {row.note}".rstrip()


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
