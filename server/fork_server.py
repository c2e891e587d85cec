"""Forks the processes of local models. It imports once what they need, and stays single-threaded. Thread: main.

    server ─ Order ─▶ fork server ─ fork ─▶ a plan, or `serve` on a Unix socket
           ◀─ News ──────────────────────── News ─┘

It ends when the server closes its line, and removes the directory of sockets; its processes are killed when it ends:
nothing outlives `kill -9`.
server/own_processes.py is the other side. What passes are pickles, between our own processes, on a socket pair.
"""

import ctypes
import gc
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

from core.errors import ExitCode, StartupError
from server.cli import as_startup_error, run_server
from server.engine_loader import keep_files, local_plan, share_code_pages
from server.observing.logs import configure_logging, log_everything
from server.own_processes import KEEP_SERIAL, READY_SERIAL, News, Order, Refusal, fix_of_entry
from server.supervision import ServiceManager

ORDER_BYTES = 256 * 1024
_KINDS: dict[int, str] = {  # of causes, for clients
    ExitCode.CONFIGURATION: "its settings cannot be used",
    ExitCode.MODEL: "its files are missing, or cannot be used",
    ExitCode.MEMORY: "it does not fit into memory",
    ExitCode.DEVICE: "its device cannot be used",
}
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PRELOADED = ("uvloop", "server.process", "gpu.loading", "gpu.parallel.runner")
_KERNELS = ("gpu.cpu_kernels.operators", "gpu.cpu_kernels.sampling")


def preload(names: Sequence[str]) -> None:
    """Import what the models need; not an extra that is missing, nor kernels whose instructions this CPU lacks."""
    for name in names:
        with suppress(ImportError, RuntimeError):
            __import__(name)


def main(line: socket.socket) -> None:
    """Take orders until the line is closed."""
    preload(_PRELOADED + _KERNELS)
    share_code_pages()
    gc.collect()
    gc.freeze()  # pages stay shared
    woken, wake = socket.socketpair()
    for one in (woken, wake):
        one.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    serials: dict[int, int] = {}  # by process
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    line.send(pickle.dumps(News(READY_SERIAL)))
    while True:
        for key, _ in selector.select():
            if key.fileobj is woken:
                woken.recv(4096)
                _reap(line, serials)
                continue
            data = line.recv(ORDER_BYTES)
            if not data:
                return
            order: Order = pickle.loads(data)
            if order.serial == KEEP_SERIAL:
                with suppress(StartupError, OSError):  # told when it is served
                    keep_files(order.config)
                    gc.freeze()
                continue
            pid = _fork(partial(_serve if order.bounds is None else _plan, order, line))
            serials[pid] = order.serial
            line.send(pickle.dumps(News(order.serial, pid)))


def _reap(line: socket.socket, serials: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        line.send(pickle.dumps(News(serials.pop(pid), status=status)))


def _fork(run: Callable[[], int]) -> int:
    """Run it in a new process, which ends with this one."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # otherwise it has ended before
            code = run()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _plan(order: Order, line: socket.socket) -> int:
    try:
        line.send(pickle.dumps(News(order.serial, local_plan(order.config, order.bounds or {}))))
    except Exception as error:
        line.send(pickle.dumps(News(order.serial, _refusal(as_startup_error(error)))))
    return 0


class _Reports(ServiceManager):
    """What systemd would be told, for the server."""

    def __init__(self, serial: int, line: socket.socket) -> None:
        super().__init__({}, os.getpid())
        self._serial, self._line = serial, line

    def send(self, *lines: str, status: str | None = None) -> None:
        news = News(self._serial, stage=status, is_ready="READY=1" in lines)
        with suppress(OSError):  # it does not read: another stage follows, but nothing after the end of loading
            self._line.send(pickle.dumps(news), 0 if news.is_ready else socket.MSG_DONTWAIT)


def _serve(order: Order, line: socket.socket) -> int:
    config = order.config
    log = configure_logging(config.log_level, config.log_format)
    log_everything()
    try:
        return int(run_server(config, lambda finds_models: config, _Reports(order.serial, line)))
    except Exception as error:
        told = as_startup_error(error)
        line.send(pickle.dumps(News(order.serial, _refusal(told))))
        return int(told.exit_code)
    finally:
        log.close()


def _refusal(error: StartupError) -> Refusal:
    """On one line each."""
    kind = _KINDS.get(error.exit_code, "the server's log says why")
    return Refusal(" ".join(error.cause.split()), fix_of_entry(" ".join(error.fix.split())), kind)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as passed, suppress(ConnectionResetError, BrokenPipeError):
        main(passed)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    _leave(0)  # the processes end with it: the interpreter's own exit takes seconds on a busy machine
