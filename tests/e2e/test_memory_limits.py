"""Too little memory for torch ends the start with exit code 5 and a fix, not with a traceback or a SIGKILL."""

import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import ExitCode


@pytest.mark.parametrize("limit_kib", [400_000, 600_000])  # torch cannot be mapped; it aborts
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("serve", "--estimate"), ("doctor",)])
def test_a_ulimit_that_is_too_small_is_named_with_a_fix(command: tuple[str, ...], limit_kib: int) -> None:
    run = subprocess.run(
        ["sh", "-c", f'ulimit -v {limit_kib}; exec "$@"', "sh", sys.executable, "-m", "server", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == ExitCode.MEMORY, run.stderr
    assert "ulimit -v" in run.stderr
    assert "fix: ulimit -v unlimited" in run.stderr
    assert "Traceback" not in run.stderr


IN_CONTROL_GROUP = """
import sys
from pathlib import Path
from gpu import host_memory
from server.cli import main
host_memory.PROCESS_CGROUPS, host_memory.CGROUP = Path(sys.argv[1]) / "own", Path(sys.argv[1])
code = main(sys.argv[2:])
print("torch" in sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("serve", "--estimate"), ("doctor",)])
def test_a_control_group_without_room_for_torch_is_told_before_the_kernel_kills(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text("0::/unit\n")
    (tmp_path / "unit").mkdir()
    for name, content in (("max", 120 * 1024**2), ("current", 16 * 1024**2), ("stat", "inactive_file 0")):
        (tmp_path / "unit" / f"memory.{name}").write_text(f"{content}\n")
    run = subprocess.run(
        [sys.executable, "-c", IN_CONTROL_GROUP, str(tmp_path), *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == ExitCode.MEMORY, run.stderr
    assert "104 MiB of memory are left" in run.stderr
    assert "fix: raise the limit of its control group" in run.stderr
    assert run.stdout.splitlines()[-1] == "False", "torch is imported"
