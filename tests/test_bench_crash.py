"""Servers that are killed under load, and what their ledgers then say: bench/crash.py, each in a process of its own.

`make crash` kills ten thousand.
"""

import re
import subprocess
import sys
from pathlib import Path

from bench.results import read_result

REPOSITORY = Path(__file__).parents[1]


def kills(count: int, *arguments: str) -> None:
    """The bench forks: it must be the only thread of its process."""
    command = [sys.executable, "-m", "bench.crash", "--kills", str(count), *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert re.match(rf".* {count} kills, .* none lost, none doubled, no orphan\n", ended.stdout), ended.stdout


def test_ledger_keeps_its_word_when_the_server_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "crash.json"
    kills(12, "--json", str(out))
    (table,) = read_result(out).tables
    (row,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert row["kills"] == 12
    assert row["lost"] == row["doubled"] == row["orphans"] == 0
