"""The limit on open files, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT = """
import resource, sys
from server.listening.sockets import allow_connections
soft, hard, number = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
allow_connections(number)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "number", "limit", "warns"),
    [
        (256, 4096, 1024, "1280 4096", False),
        (2048, 4096, 1024, "2048 4096", False),
        (256, 1024, 1024, "1024 1024", True),
    ],
)
def test_limit_is_raised_as_far_as_is_needed_and_allowed(
    soft: int, hard: int, number: int, limit: str, warns: bool
) -> None:
    command = [sys.executable, "-c", LIMIT, str(soft), str(hard), str(number)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == limit, run.stderr
    assert ("may open 1024 files, too few for 1024 connections" in run.stderr) == warns
