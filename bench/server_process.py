"""A server as a process of ours, on a free loopback port, until the measurement is over: or we are, in whatever way."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from bench.bound_process import bound
from bench.client import ConnectionPool, Exchange, Recorder
from bench.load_run import CannotRun, run_on_fast_loop
from bench.wire import encode_request

STOP_TIMEOUT_S = 10.0
POLL_S = 0.05


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DidNotStart(CannotRun):
    """The server ended, or never answered."""


@contextlib.contextmanager
def running(
    command: Sequence[str],
    port: int,
    ready_path: str = "/v1/models",
    start_timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    errors: IO[bytes] | int | None = None,
) -> Iterator[int]:
    """Start a server, wait until it answers 200 on `ready_path`, give its process id, and end it.

    Args:
        environment: beside this process's own.
        errors: where its stderr goes; None: to ours.

    Raises:
        DidNotStart: it did not come up.
    """
    merged = {**os.environ, **(environment or {})}
    process = subprocess.Popen(
        bound(command), stdout=subprocess.DEVNULL, stderr=errors, env=merged, start_new_session=True
    )
    try:
        _wait_ready(process, command, port, ready_path, start_timeout_s)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # workers that it left behind
            os.killpg(process.pid, signal.SIGKILL)


def _wait_ready(
    process: "subprocess.Popen[bytes]", command: Sequence[str], port: int, path: str, timeout_s: float
) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise DidNotStart(f"{command!r} ended with {process.returncode}.", "run it alone and look")
        if run_on_fast_loop(_answers(port, path)):
            return
        time.sleep(POLL_S)
    raise DidNotStart(f"{command!r} was not ready within {timeout_s:g} s.", "run it alone and look")


async def _answers(port: int, path: str) -> bool:
    pool = ConnectionPool("127.0.0.1", port, Recorder(), 5.0)
    exchange = Exchange(time.monotonic())
    try:
        await pool.perform(encode_request("GET", path, f"127.0.0.1:{port}", {}), exchange)
    finally:
        await pool.close()
    return exchange.failure is None
