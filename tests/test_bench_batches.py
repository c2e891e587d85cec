"""A batch whose server is killed again and again: bench/batches.py, in a process of its own, since it forks."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_batch_outlives_its_servers() -> None:
    command = [sys.executable, "-m", "bench.batches", "--quick"]
    ended = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "1500 lines over" in ended.stdout
    assert "each answered once, billed once" in ended.stdout
