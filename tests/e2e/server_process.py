"""A real server in a process of its own, and what it says of itself."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.polling import wait_for
from tests.e2e.raw_http import ConnectionEnded, ask

REPOSITORY = Path(__file__).parents[2]
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "steploop_kv_blocks_used")


@dataclass
class ServerProcess:
    """`steploop serve` on a free loopback port, its output in files."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    @property
    def log(self) -> str:
        return self.stderr.read_text()

    @property
    def log_tail(self) -> str:
        """The end of the log, without what polling wrote into it."""
        lines = [line for line in self.log.splitlines() if "GET /metrics 200" not in line]
        return "\n".join(lines[-40:])

    @property
    def port(self) -> int:
        # Its log is written by a thread of its own: others may hear of it first
        wait_for(lambda: self._has_ended() or LISTENING.search(self.log), lambda: f"the port\n{self.log_tail}")
        match = LISTENING.search(self.log)
        assert match is not None, self.log_tail
        return int(match[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_listening(self) -> None:
        wait_for(lambda: self._has_ended() or LISTENING.search(self.log), lambda: f"the port\n{self.log_tail}")
        assert not self._has_ended(), self.log_tail

    def wait_ready(self) -> None:
        """The banner comes last: once it is there, everything is."""
        self.wait_listening()
        wait_for(
            lambda: self._has_ended() or b"try " in self.stdout.read_bytes(), lambda: f"the banner\n{self.log_tail}"
        )
        assert not self._has_ended(), self.log_tail

    def wait_log(self, text: str) -> None:
        wait_for(lambda: text in self.log, lambda: f"{text!r} in the log\n{self.log_tail}")

    def wait_exit(self) -> int:
        """The exit code; a process that does not end is killed, and the test fails."""
        try:
            return self.process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server has not ended\n{self.log_tail}") from None

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def metrics(self, api_key: str | None = None) -> dict[str, float]:
        """The page's samples without labels of their own, by name."""
        answer = ask(self.port, "GET", "/metrics", api_key=api_key)
        assert answer.status == 200, answer
        samples = re.findall(r'^([\w:]+)\{model_name="[^"]*"\} (\S+)$', answer.body.decode(), re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def wait_quiet(self, api_key: str | None = None) -> None:
        """Nothing runs, nothing waits, no block is held, and the only connection is the one that asks."""
        shown: dict[str, float] = {}

        def is_quiet() -> bool:
            try:
                shown.update(self.metrics(api_key))
            except (ConnectionEnded, ConnectionError):  # there is no room yet even for the one that asks
                return False
            return not any(shown[name] for name in GAUGES) and shown["steploop_connections"] == 1

        wait_for(is_quiet, lambda: f"a quiet server, with {shown}\n{self.log_tail}")

    def wait_metric(self, name: str, value: float, api_key: str | None = None) -> None:
        wait_for(lambda: self.metrics(api_key)[name] == value, lambda: f"{name} {value:g}\n{self.log_tail}")

    def wait_running(self, num_sequences: int) -> None:
        self.wait_metric("vllm:num_requests_running", num_sequences)

    def _has_ended(self) -> bool:
        return self.process.poll() is not None


SMALL = ("--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-memory", "64MiB")


def start_server(directory: Path, model: Path | None, *flags: str) -> ServerProcess:
    """Start one; its output goes to files in `directory`. Whoever starts it ends it.

    Args:
        model: a small one, computed exactly; None: the embedded one, as users get it.
    """
    chosen = () if model is None else ("--model", str(model), *SMALL)
    return start_process(directory, "server", "serve", "--port", "0", *chosen, *flags)  # argparse takes the last


@contextmanager
def ready_server(directory: Path, model: Path | None, *flags: str) -> Iterator[ServerProcess]:
    """One that start_server() starts, from when it is ready."""
    server = start_server(directory, model, *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def start_process(
    directory: Path,
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    listening: socket.socket | None = None,
) -> ServerProcess:
    """Run a module that serves, as start_server() does.

    Args:
        environment: besides our own, which gives it no setting.
        listening: handed over as systemd does it: as descriptor 3, with LISTEN_FDS and LISTEN_PID.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stdout, stderr = directory / "stdout", directory / "stderr"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("STEPLOOP_")}
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            [*_activating(listening), sys.executable, "-m", module, *arguments],
            pass_fds=[] if listening is None else [listening.fileno()],
            cwd=REPOSITORY,
            env=inherited | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    return ServerProcess(process, stdout, stderr)


HAND_OVER = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


def _activating(listening: socket.socket | None) -> list[str]:
    """What stands before a command that is to get the socket, and becomes that command."""
    return [] if listening is None else [sys.executable, "-c", HAND_OVER, str(listening.fileno())]
