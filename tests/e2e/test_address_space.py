"""An address space that is too small ends the start with exit code 5 and a fix, not with a traceback."""

import subprocess
import sys

import pytest

from core.errors import ExitCode


@pytest.mark.parametrize("limit_kib", [400_000, 600_000])  # torch cannot be mapped; it aborts
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("serve", "--estimate"), ("doctor",)])
def test_a_ulimit_that_is_too_small_is_named_with_a_fix(command: tuple[str, ...], limit_kib: int) -> None:
    run = subprocess.run(
        ["sh", "-c", f'ulimit -v {limit_kib}; exec "$@"', "sh", sys.executable, "-m", "server", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == ExitCode.MEMORY, run.stderr
    assert "ulimit -v" in run.stderr
    assert "fix: ulimit -v unlimited" in run.stderr
    assert "Traceback" not in run.stderr
