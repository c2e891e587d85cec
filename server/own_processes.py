"""Processes that this server starts, and how it watches those of local models. Thread: loop; `start_module`: any.

    LocalModels ─ plan, serve ─▶ Processes ─ Order ─▶ server/fork_server.py ─ fork ─▶ a process per model
                ◀─ ProcessEvents ────────── ◀─ News ──────────────────────── News ─┘

The fork server begins with torch imported, and ends with us, as all that it has forked.
"""

import asyncio
import logging
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from core.errors import StartupError

if TYPE_CHECKING:  # the processes that try grammars out have no use for the settings
    from server.config import ServerConfig

logger = logging.getLogger(__name__)

RESEND_S = 0.1
NEWS_BYTES = 64 * 1024
DEVICES = ("cpu", "cuda")
# Of the news that the fork server takes orders, and of orders that bring no news; others are positive.
READY_SERIAL, KEEP_SERIAL = 0, -1
MAX_HOME_BYTES = 90  # unix(7): a socket's path has 107
_OWN_VARIABLES = ("STEPLOOP_", "LISTEN_", "NOTIFY_", "WATCHDOG_")  # the settings, keys among them, and systemd's


def start_module(
    module: str, passed: int, *arguments: str, stdin: int, stdout: int, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module of this checkout in a process of its own.

    Args:
        passed: a file descriptor, which it inherits: its number is the first argument.

    Raises:
        OSError: there can be no more processes.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
    return subprocess.Popen(
        [sys.executable, "-m", module, str(passed), *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        bufsize=0,
        pass_fds=(passed,),
        env=environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        start_new_session=True,  # a terminal's Ctrl-C is for the server
    )


class Plan(NamedTuple):
    """What a model's process needs.

    Args:
        device: cpu or cuda.
        needed_bytes: of the device's memory, KV included.
        free_bytes: on the device when the plan was made.
    """

    device: str
    needed_bytes: int
    kv_bytes: int
    max_model_len: int
    free_bytes: int


class Refusal(NamedTuple):
    """Why a model cannot be served, and what to do.

    Args:
        kind: of the cause, without paths, names and settings: for clients; empty: the cause itself has none.
    """

    cause: str
    fix: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.cause.rstrip('.')}. Fix: {self.fix.rstrip('.')}."


class Order(NamedTuple):
    """To the fork server: plan or serve a model, or keep its files for when it is served again.

    Args:
        bounds: for planning: bytes for all models together, by device; of others, what is free. None: not planned.
    """

    serial: int
    config: "ServerConfig"
    bounds: Mapping[str, int] | None = None


class News(NamedTuple):
    """From the fork server or the process itself, on the order of that serial number.

    Args:
        told: its process's id; or a plan; or why there is none, or why it cannot be served.
        status: its process has ended, as os.waitpid has it.
        stage: of its process, as systemd would show it.
        is_ready: its process serves.
    """

    serial: int
    told: int | Plan | Refusal | None = None
    status: int | None = None
    stage: str | None = None
    is_ready: bool = False


class ProcessEvents(Protocol):
    def on_news(self, news: News) -> None: ...

    def on_lost(self) -> None:
        """The fork server has ended, and with it all processes."""


class Processes:
    """The fork server, and what its processes tell. It is started again when it is needed and has ended.

    Args:
        home: the directory of their sockets, which the fork server removes.
    """

    def __init__(self, home: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.home = home
        self._loop = loop
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None  # to the fork server
        self._listener: ProcessEvents | None = None
        self._begun_s = 0.0
        self.is_ready = False  # the fork server takes orders

    def start(self, listener: "ProcessEvents") -> None:
        """Start the fork server, so that it has imported what processes need when the first model is asked for."""
        self._listener = listener
        self.home.mkdir(mode=0o700)
        self._start_server()

    def plan(self, serial: int, config: "ServerConfig", bounds: Mapping[str, int]) -> None:
        self._send(Order(serial, config, bounds))

    def serve(self, serial: int, config: "ServerConfig") -> None:
        self._send(Order(serial, config))

    def keep(self, config: "ServerConfig") -> None:
        """Read what its next process needs beside weights, now that one has been able to."""
        self._send(Order(KEEP_SERIAL, config))

    def kill(self, pid: int, number: signal.Signals) -> None:
        """To be called until its end is told: then it is reaped."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill_server(self) -> None:
        """It hangs; `on_lost` follows."""
        if self._server is not None:
            self._server.kill()

    async def close(self) -> None:
        """End the fork server at once, also while it compiles, and with it what is left of its processes."""
        self._hang_up()
        if self._server is not None:
            self._server.kill()
            await self._loop.run_in_executor(None, self._server.wait)
        shutil.rmtree(self.home, ignore_errors=True)  # where it was killed

    def _start_server(self) -> None:
        logger.info(
            "starting the process that starts models; the first time on a machine it compiles kernels, for minutes"
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nothing = subprocess.DEVNULL
        with theirs:
            self._server = start_module(
                f"{__package__}.fork_server", theirs.fileno(), str(self.home), stdin=nothing, stdout=nothing
            )
        ours.setblocking(False)
        self._line, self._begun_s, self.is_ready = ours, self._loop.time(), False
        Context().run(self._loop.add_reader, ours, self._on_line)  # not in that of a request, whose id is logged

    def _send(self, order: Order) -> None:
        if self._line is None:
            self.home.mkdir(mode=0o700, exist_ok=True)
            self._start_server()
        assert self._line is not None
        try:
            self._line.send(pickle.dumps(order))
        except BlockingIOError:  # it still imports, and many models are wanted
            self._loop.call_later(RESEND_S, self._send, order)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended, which is told next, and this order is lost with the others

    def _hang_up(self) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line)
            self._line.close()
            self._line, self.is_ready = None, False

    def _on_line(self) -> None:
        assert self._line is not None
        assert self._listener is not None
        try:
            data = self._line.recv(NEWS_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if data:
            news: News = pickle.loads(data)
            if news.serial == READY_SERIAL:
                self.is_ready = True
                logger.info("the process that starts models is ready: %.1f s", self._loop.time() - self._begun_s)
            else:
                self._listener.on_news(news)
            return
        self._hang_up()
        assert self._server is not None
        logger.error("the process that starts models has ended, with the status %d", self._server.wait())
        self._listener.on_lost()


def home_of_sockets() -> Path:
    """Raises StartupError: a socket's path there would be too long."""
    runtime = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]  # of a systemd unit with RuntimeDirectory=
    home = Path(runtime or tempfile.gettempdir()) / f"steploop-{secrets.token_hex(8)}"
    if len(os.fsencode(home)) > MAX_HOME_BYTES:
        cause = f"the directory for the sockets of models, {home}, has too long a name for Unix sockets"
        raise StartupError(cause, "TMPDIR=/tmp")
    return home


def fix_of_entry(fix: str) -> str:
    """The fix of an error of a model's process, as its entry of [[models]] has it: without the flag --model."""
    return re.sub(r"(?<!serve )--model (\S+)", r'path = "\1"', fix)


def shown_end(status: int) -> str:
    """Of a process, as os.waitpid has it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = " (the kernel does that when memory runs out)" if number == signal.SIGKILL else ""
        return f"signal {number}{why}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
