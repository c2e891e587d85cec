"""What long bodies, long chat templates and reconnects cost everybody else: `python -m bench.lag`.

In milliseconds: p50, p99, most.

One server with a null runner decodes STREAMS streams, a step every STEP_S; beside it others post one body after the
other, each of which is parsed, rendered and refused or answered. Measured in the server's process:

- gil_wait: the engine thread sleeps until a step is due, and notes how late it runs: the time to wake up, and the wait
  for the interpreter, which other threads hold. Without others it is the machine's own lateness.
- loop lag: a timer of the event loop notes how late it fires.
"""

import argparse
import asyncio
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

import numpy as np
import uvloop

from bench import null_server
from bench.kit import MODEL, Flag, Found, run_bench
from bench.raw_clients import Load, run
from bench.results import Cell, Table
from core.types import StepDelivery
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from server.observing.logs import configure_logging
from server.process import SWITCH_INTERVAL_S, Server
from server.wire.http2_frames import PREFACE

STREAMS = 64
STEP_S = 0.02
PROBE_S = 0.005
BODY_BYTES = 8 * 1024 * 1024
WARM_UP_S = 1.0


@dataclass(slots=True)
class Lateness:
    """How late a thread was, in seconds; of the time in which it is noted."""

    is_noted: bool = False
    seconds: list[float] = field(default_factory=list)

    def note(self, due_s: float) -> None:
        if self.is_noted:
            self.seconds.append(time.monotonic() - due_s)

    def figures_ms(self) -> tuple[float, float, float]:
        """Median, 99th percentile, most."""
        values = self.seconds or [0.0]
        return 1e3 * float(np.median(values)), 1e3 * float(np.percentile(values, 99)), 1e3 * max(values)


class NotedPace:
    """Steps every STEP_S; how late each is goes into `lateness`. Thread: engine."""

    def __init__(self, lateness: Lateness) -> None:
        self._lateness = lateness
        self._due_s = 0.0

    def wait(self) -> None:
        self._due_s = max(self._due_s + STEP_S, time.monotonic())
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        self._lateness.note(self._due_s)


def long_text() -> bytes:
    """One prompt that fills the body."""
    body = {"model": MODEL, "prompt": "", "max_tokens": 1}
    return json.dumps(body | {"prompt": "a" * (BODY_BYTES - len(json.dumps(body)))}).encode()


def long_ids() -> bytes:
    """A body of token ids, many more than the context takes."""
    return json.dumps({"model": MODEL, "prompt": [1234] * (BODY_BYTES // 6 - 100), "max_tokens": 1}).encode()


def many_messages() -> bytes:
    """A chat whose template renders thousands of messages, and that just fits the context."""
    messages = [{"role": "user", "content": "abcd"} for _ in range(null_server.MAX_MODEL_LEN // 4 - 16)]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


@dataclass(frozen=True, slots=True)
class Case:
    """What is posted beside the streams; None: nothing."""

    name: str
    path: str = ""
    make_body: Callable[[], bytes] | None = None
    reconnects: bool = False  # instead, HTTP/2 connections that each break the protocol, and are ended by GOAWAY


CASES = (
    Case("streams alone"),
    Case("8 MiB of text", "/v1/completions", long_text),
    Case("8 MiB of ids", "/v1/completions", long_ids),
    Case("4,080 messages", "/v1/chat/completions", many_messages),
    Case("reconnects ended by GOAWAY", reconnects=True),
)


def post_bodies(port: int, case: Case, duration_s: float) -> int:
    """Post one after the other for so long. Returns how many were answered. A process of its own runs this."""
    if case.reconnects:
        return reconnect(port, duration_s)
    if case.make_body is None:
        time.sleep(duration_s)
        return 0
    body, num, end_s = case.make_body(), 0, time.monotonic() + duration_s
    while time.monotonic() < end_s:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", case.path, body, {"content-type": "application/json"})
        connection.getresponse().read()
        connection.close()
        num += 1
    return num


def reconnect(port: int, duration_s: float) -> int:
    """Open HTTP/2 connections, a PING on a stream in each, and wait for their end. Returns how many there were."""
    num, end_s = 0, time.monotonic() + duration_s
    while time.monotonic() < end_s:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(PREFACE + bytes(3) + b"\x04" + bytes(5) + b"\0\0\x08\x06\0\0\0\0\x03" + bytes(8))
            while client.recv(4096):
                pass
        num += 1
    return num


async def probe_loop(lateness: Lateness) -> None:
    while True:
        due_s = time.monotonic() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lateness.note(due_s)


async def measure(case: Case, duration_s: float) -> tuple[Cell, ...]:
    """One row."""
    loop = asyncio.get_running_loop()
    gil, lag = Lateness(), Lateness()

    def load(inbox: Inbox, deliver: Callable[[StepDelivery], None], stage: Callable[[str], None]) -> LoadedEngine:
        return null_server.load(NotedPace(gil).wait, inbox, deliver, stage)

    server = Server(ServerConfig(port=0, log_level="warning", drain_timeout_s=0.0), load, lambda lines: None)
    await server.start()
    await server.wait_ready()
    probe = asyncio.create_task(probe_loop(lag))
    num_tokens = int((duration_s + 3 * WARM_UP_S + 2) / STEP_S)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        streams = Load(server.listener.port, False, STREAMS, STREAMS, num_tokens)
        reading = loop.run_in_executor(pool, run, streams)
        await asyncio.sleep(2 * WARM_UP_S)
        posting = loop.run_in_executor(pool, post_bodies, server.listener.port, case, duration_s)
        gil.is_noted = lag.is_noted = True
        num_posted = await posting
        gil.is_noted = lag.is_noted = False
        server.stop(0.0)
        await server.wait_stopped()
        await reading
    probe.cancel()
    return (case.name, num_posted / duration_s, *gil.figures_ms(), *lag.figures_ms())


def _measure(arguments: argparse.Namespace) -> Found:
    configure_logging("error", "text")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rows = tuple(uvloop.run(measure(case, arguments.seconds)) for case in CASES)
    waits = ("gil_wait p50 ms", "p99 ms", "most ms", "loop lag p50 ms", "p99 ms", "most ms")
    table = Table("What long bodies cost the others", ("beside 64 streams", "posted or opened/s", *waits), rows)
    return Found([table], {"streams": STREAMS, "step_s": STEP_S, "seconds": arguments.seconds})


if __name__ == "__main__":
    sys.exit(run_bench("lag", __doc__, _measure, (Flag("--seconds", 15.0, "of each case", 0.5),)))
