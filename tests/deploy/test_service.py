"""The units under a systemd of the test's own, PID 1 of its own namespaces: a service comes back, whatever ended it.

Its files lie in tmpfs of that namespace, its processes in a cgroup below ours; the loopback alone is shared. The units
are those of deploy/, but for the port, where the log goes, and that tries are a second apart. The program is
`steploop serve`, but for its model.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import ExitCode
from tests.deploy.conftest import Knocking
from tests.e2e.polling import wait_for
from tests.e2e.raw_http import ask, post

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
SYSTEMD = Path("/lib/systemd/systemd")
NAMESPACES = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--uts", "--ipc", "--cgroup")
TARGETS = ("basic", "multi-user", "network-online", "shutdown", "sockets", "sysinit", "umount")
KEPT_OF_ETC = ("group", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "os-release", "passwd", "ssl")
NUM_RESTARTS = 7  # a start limit would be 5 in 10 s
DISK_BYTES = 16 * 2**20  # of the service's state: the ledger's spill journal takes 2 MiB
PROMPT = {"model": "small", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}

# PID 1 until it becomes systemd. /opt holds what runs, as the service sees it: no home, whoever's the checkout is
BOOT = f"""\
set -e
mount --make-rprivate /
umount --recursive /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for place in /run /opt /var; do mount -t tmpfs tmpfs $place; done
mkdir -p /run/etc/steploop /run/units /opt/python /opt/steploop/bin /opt/steploop/repository /opt/steploop/packages
mkdir -p /var/lib/steploop /var/cache /var/log /var/tmp
for name in {" ".join(KEPT_OF_ETC)}; do cp -aL /etc/$name /run/etc/ 2>/dev/null || true; done
mount -t tmpfs -o size={DISK_BYTES} tmpfs /var/lib/steploop
mount --bind "$BASE_PREFIX" /opt/python
mount --bind "$REPOSITORY" /opt/steploop/repository
mount --bind "$PACKAGES" /opt/steploop/packages
mount --bind /run/etc /etc
cp -r "$FILES"/units/* /run/units/
cp "$FILES/steploop" /opt/steploop/bin/steploop
cp "$REPOSITORY/deploy/steploop.toml" /etc/steploop/
systemd-sysusers "$REPOSITORY/deploy/steploop.sysusers"
export container=test SYSTEMD_UNIT_PATH=/run/units
exec {SYSTEMD} --system --unit=multi-user.target --log-target=console --show-status=no
"""
PROGRAM = f"""\
#!/bin/sh
export PYTHONPATH=/opt/steploop/repository:/opt/steploop/packages PYTHONDONTWRITEBYTECODE=1
export LD_LIBRARY_PATH=/opt/python/lib  # of a Python whose library is beside it
shift  # serve
cd /opt/steploop/repository
exec /opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor} \\
    -m tests.deploy.simulated_process /nowhere "$@"
"""


def _own_cgroup() -> Path | None:
    """Where cgroup2 is mounted, this process's group in it."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    place = next((Path(fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"), None)
    groups = [line.removeprefix("0::/") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((group for group in groups if ":" not in group), None)
    return None if place is None or own is None else place / own


def _why_not() -> str | None:
    """What a systemd of our own lacks here."""
    if os.geteuid() != 0:
        return "root"
    if not SYSTEMD.exists() or shutil.which("systemd-sysusers") is None:
        return "systemd: apt-get install systemd"
    group = _own_cgroup()
    if group is None or not os.access(group, os.W_OK):
        return "a cgroup2 mount that may be written to"
    try_out = ["sh", "-c", "umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup"]
    result = subprocess.run([*NAMESPACES, *try_out], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else f"namespaces to mount in: {result.stderr.strip()}"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((lacking := _why_not()) is not None, reason=f"a systemd of the test's own needs {lacking}"),
]


class Machine:
    """A booted systemd with the service installed, not yet started.

    Args:
        pid: of its PID 1, as it is here.
    """

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.port = port
        self._pid = pid
        self._log = log
        self.root = Path(f"/proc/{pid}/root")

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--uts", "--ipc", "--cgroup"]
        return subprocess.run([*inside, "systemctl", *words], capture_output=True, text=True, check=False, timeout=120)

    def checked(self, *words: str) -> str:
        done = self.systemctl(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.log_tail}"
        return done.stdout

    def state(self, unit: str = "steploop.service") -> dict[str, str]:
        shown = self.checked("show", unit, "--property=ActiveState,SubState,Result,NRestarts,ExecMainStatus,MainPID")
        return dict(line.split("=", 1) for line in shown.splitlines())

    def wait_for_restarts(self, num: int) -> None:
        wait_for(lambda: int(self.state()["NRestarts"]) >= num, lambda: f"{num} restarts\n{self.log_tail}")

    def wait_for_exit(self, code: ExitCode) -> None:
        """Seen between two tries."""
        wait_for(lambda: self.state()["ExecMainStatus"] == str(code.value), lambda: f"exit {code}\n{self.log_tail}")

    @property
    def service_log(self) -> str:
        file = self.root / "run" / "steploop.log"
        return file.read_text() if file.exists() else ""

    @property
    def log_tail(self) -> str:
        return "\n".join((self._log.read_text() + self.service_log).splitlines()[-60:])

    def fill_disk(self) -> Path:
        """Of the service's state, to the last block. Returns what fills it."""
        path = self.root / "var/lib/steploop/filler"
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return path


@contextmanager
def _booted(directory: Path) -> Iterator[Machine]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    units = directory / "units"
    units.mkdir()
    for name in TARGETS:
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
    for name in ("steploop.service", "steploop.socket"):
        shutil.copy(DEPLOY / name, units)
        (units / f"{name}.d").mkdir()
    output = "append:/run/steploop.log"
    service = f"[Service]\nRestartSec=1\nStandardOutput={output}\nStandardError={output}\n"
    (units / "steploop.service.d" / "test.conf").write_text(service)
    listen = f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n"
    (units / "steploop.socket.d" / "test.conf").write_text(listen)
    (directory / "steploop").write_text(PROGRAM)
    (directory / "steploop").chmod(0o755)
    parent = _own_cgroup()
    assert parent is not None
    group = parent / f"steploop-test-{os.getpid()}-{port}"
    group.mkdir()
    environment = {
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        "FILES": str(directory),
        "REPOSITORY": str(REPOSITORY),
        "BASE_PREFIX": sys.base_prefix,
        "PACKAGES": str(Path(pytest.__file__).parents[1]),
    }
    log = directory / "systemd.log"
    joined = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
    with log.open("wb") as out:
        command = ["sh", "-c", joined, "sh", *NAMESPACES, "sh", "-c", BOOT]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pid = wait_for(lambda: int(children.read_text() or 0), lambda: f"PID 1\n{log.read_text()}")
        machine = Machine(pid, port, log)
        wait_for(
            lambda: process.poll() is not None or machine.systemctl("is-active", "multi-user.target").returncode == 0,
            lambda: f"systemd\n{log.read_text()}",
        )
        assert process.poll() is None, log.read_text()
        yield machine
    finally:
        process.send_signal(signal.SIGKILL)  # PID 1 goes with it, and with that all that it has started
        process.wait()
        directories = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        for path in [*directories, group]:
            wait_for(lambda path=path: _is_removed(path), lambda path=path: f"the end of {path}")


def _is_removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # its processes are still ending
        return False
    return True


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with _booted(tmp_path) as booted:
        booted.checked("start", "steploop.socket")
        yield booted


def test_restarts_in_a_row_refuse_nobody(machine: Machine) -> None:
    machine.checked("start", "steploop.service")
    with Knocking(machine.port, PROMPT) as client:
        for _ in range(NUM_RESTARTS):
            client.wait_for_answers(1)
            machine.checked("restart", "steploop.service")
        client.wait_for_answers(1)
    assert set(client.outcomes) <= {200, 503}, f"{client.outcomes}; 503: while it loads"


def test_full_disk_that_gets_room_lets_the_service_start(machine: Machine) -> None:
    filler = machine.fill_disk()
    with Knocking(machine.port, PROMPT) as client:
        machine.wait_for_restarts(3)
        machine.wait_for_exit(ExitCode.TRANSIENT)
        filler.unlink()
        client.wait_for_answers(3)
    assert set(client.outcomes) <= {200, 503}, client.outcomes
    assert "free space in /var/lib/steploop" in machine.service_log


def test_full_disk_while_serving_is_told_and_mends_without_a_restart(machine: Machine) -> None:
    machine.checked("start", "steploop.service")
    assert post(machine.port, "/v1/completions", PROMPT).status == 200
    filler = machine.fill_disk()
    wait_for(lambda: ask(machine.port, "GET", "/ready").status == 503, lambda: f"the fault\n{machine.log_tail}")
    ready, refused = ask(machine.port, "GET", "/ready"), post(machine.port, "/v1/completions", PROMPT)
    assert (ready.code, refused.status, refused.code) == ("ledger_unavailable", 503, "ledger_unavailable")
    assert "full" in ready.error["message"]
    assert "steploop_ledger_up{" in (page := ask(machine.port, "GET", "/metrics").body.decode())
    assert 'reason="ledger_unavailable"} 1' in page
    told = ("show", "steploop.service", "--property=StatusText", "--value")
    wait_for(lambda: machine.checked(*told).startswith("Refusing requests: the ledger"), lambda: machine.checked(*told))
    filler.unlink()
    wait_for(lambda: ask(machine.port, "GET", "/ready").status == 200, lambda: f"its end\n{machine.log_tail}")
    assert post(machine.port, "/v1/completions", PROMPT).status == 200
    assert machine.state()["NRestarts"] == "0"


def test_ledger_that_another_holds_and_gives_up_lets_the_service_start(machine: Machine) -> None:
    with (
        (machine.root / "var/lib/steploop/ledger.db-spill").open("wb") as held,
        Knocking(machine.port, PROMPT) as client,
    ):
        os.fchmod(held.fileno(), 0o666)  # the service's user opens it too
        fcntl.flock(held, fcntl.LOCK_EX)
        machine.wait_for_restarts(3)
        machine.wait_for_exit(ExitCode.TRANSIENT)
        fcntl.flock(held, fcntl.LOCK_UN)
        client.wait_for_answers(3)
    assert set(client.outcomes) <= {200, 503}, client.outcomes
    assert "another server writes to the ledger" in machine.service_log


def test_typo_in_the_configuration_that_is_mended_lets_the_service_start(machine: Machine) -> None:
    file = machine.root / "etc/steploop/steploop.toml"
    right = file.read_text()
    file.write_text(right.replace("drain_timeout", "drian_timeout"))
    with Knocking(machine.port, PROMPT) as client:
        machine.wait_for_restarts(6)  # of which a start limit would take the socket too
        file.write_text(right)
        client.wait_for_answers(3)
    assert set(client.outcomes) <= {200, 503}, client.outcomes
    assert "did you mean drain_timeout?" in machine.service_log
