"""Servers that are killed under load, and what their ledgers then say: bench/crash.py, each in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def kills(count: int) -> None:
    """The bench forks: it must be the only thread of its process."""
    command = [sys.executable, "-m", "bench.crash", "--kills", str(count)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert re.match(rf".* {count} kills, .* none lost, none doubled, no orphan$", ended.stdout), ended.stdout


def test_ledger_keeps_its_word_when_the_server_is_killed() -> None:
    kills(6)


@pytest.mark.slow
def test_ledger_keeps_its_word_over_a_hundred_kills() -> None:
    kills(100)
