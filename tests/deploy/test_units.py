"""The units as systemd itself reads them, and the words in them that are ours."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from server.config_sources import load_config
from tests.server.given_settings import typed

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICE = DEPLOY / "steploop.service"
MAX_EXPOSURE = 1.3
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze: apt-get install systemd"
)


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", SERVICE.read_text(), re.MULTILINE)
    return str(value)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with a program that is there."""
    text = SERVICE.read_text().replace("/opt/steploop/bin/steploop", "/bin/true")
    (tmp_path / SERVICE.name).write_text(text)
    shutil.copy(DEPLOY / "steploop.socket", tmp_path)
    return tmp_path


def add_gpu(directory: Path) -> None:
    (directory / "steploop.service.d").mkdir()
    shutil.copy(DEPLOY / "gpu.conf", directory / "steploop.service.d")


def analyze(*arguments: str | Path) -> str:
    result = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


@needs_systemd
@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_units_are_clean(installed: Path, has_gpu: bool) -> None:
    if has_gpu:
        add_gpu(installed)
    analyze("verify", "--man=no", installed / "steploop.service", installed / "steploop.socket")


@needs_systemd
@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_service_is_hardly_exposed(installed: Path, has_gpu: bool) -> None:
    if has_gpu:
        add_gpu(installed)
    report = analyze("security", "--offline=true", "--no-pager", installed / "steploop.service")
    level = re.search(r"Overall exposure level for steploop.service: ([\d.]+)", report)
    assert level is not None, report
    assert float(level[1]) <= MAX_EXPOSURE, report
    assert ("PrivateDevices=" in re.findall(r"^✗ (\S+)", report, re.MULTILINE)) == has_gpu, "the drop-in was read"


@needs_systemd
def test_user_of_the_service_is_the_one_that_sysusers_makes(tmp_path: Path) -> None:
    command = ["systemd-sysusers", "--dry-run", f"--root={tmp_path}", str(DEPLOY / "steploop.sysusers")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"Creating user '{setting('User')}'" in result.stdout + result.stderr


def test_command_line_and_configuration_are_taken() -> None:
    program, *words = shlex.split(setting("ExecStart"))
    assert program.endswith("/steploop")
    installed = [word.replace("/etc/steploop", str(DEPLOY)) for word in words]
    assert load_config(typed(*installed), {}).log_format == "json"


def test_settings_that_are_commented_out_are_known(tmp_path: Path) -> None:
    text = (DEPLOY / "steploop.toml").read_text()
    file = tmp_path / "file"
    file.touch()
    example = tmp_path / "steploop.toml"
    settings = re.findall(r'^# (\w+ = "[^"]*")', text, re.MULTILINE)
    assert len(settings) == 6
    there = [re.sub(r'"/[^"]*"', f'"{tmp_path if line.startswith("model") else file}"', line) for line in settings]
    example.write_text("\n".join(there))
    assert len(load_config({"config_file": str(example)}, {}).origins) == 7, "and where the file is"


def test_no_limit_takes_service_or_socket_down_and_no_exit_code_is_final() -> None:
    socket = (DEPLOY / "steploop.socket").read_text()
    assert setting("StartLimitIntervalSec") == "0"
    assert {"StartLimitIntervalSec=0", "TriggerLimitIntervalSec=0"} <= set(socket.splitlines())
    assert setting("Restart") == "on-failure"
    assert "RestartPreventExitStatus" not in SERVICE.read_text()
