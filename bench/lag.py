"""What long bodies, long chat templates, forms and reconnects cost all other clients: `python -m bench.lag`.

One server with a null runner decodes STREAMS streams, a step every STEP_S; beside it others post one body after the
other, each of which is parsed, rendered and refused or answered. Measured in the server's process, in milliseconds:

- gil_wait: the engine thread sleeps until a step is due, and notes how late it runs: the time to wake up, and the wait
  for the interpreter, which other threads hold. Without others it is the machine's own lateness.
- loop lag: a timer of the event loop notes how late it fires;
- of it computed: without its thread's own waits for a CPU, and no more than that and the busiest other thread have
  computed meanwhile. What other processes of the machine cost is not in it.
"""

import argparse
import asyncio
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count, repeat
from multiprocessing import get_context
from pathlib import Path

import uvloop

from bench import null_server
from bench.kit import MODEL, Flag, Found, bench
from bench.raw_clients import Load, frame, run
from bench.results import Cell, percentile, table_of
from core.types import StepDelivery
from server.api.decoding import MAX_IDS
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from server.observing.logs import configure_logging
from server.process import SWITCH_INTERVAL_S, Server
from server.wire.http2_frames import PING, PREFACE, SETTINGS
from tests.core.hostile_forms import hostile_forms, largest_schemas

STREAMS = 64
STEP_S = 0.02
PROBE_S = 0.002
BODY_BYTES = 8 * 1024 * 1024
WARM_UP_S = 1.0
BROKEN = PREFACE + frame(SETTINGS) + frame(PING, bytes(8), 0, 3)  # a PING belongs to no stream: GOAWAY


@dataclass(slots=True)
class Lateness:
    """How late a thread was, in seconds, while `is_noted`."""

    is_noted: bool = False
    seconds: list[float] = field(default_factory=list)

    def note(self, late_s: float) -> None:
        if self.is_noted:
            self.seconds.append(late_s)

    def figures(self, name: str) -> dict[str, Cell]:
        values = self.seconds or [0.0]
        p50, p99 = (percentile(values, q) or 0.0 for q in (50, 99))
        return {f"{name} p50 ms": p50 * 1e3, f"{name} p99 ms": p99 * 1e3, f"{name} max ms": max(values) * 1e3}


def long_text() -> bytes:
    """One prompt that fills the body."""
    body = {"model": MODEL, "prompt": "", "max_tokens": 1}
    return json.dumps(body | {"prompt": "a" * (BODY_BYTES - len(json.dumps(body)))}).encode()


def long_ids() -> bytes:
    """A body of as many token ids as are read, many more than the context takes."""
    return json.dumps({"model": MODEL, "prompt": [1234] * MAX_IDS, "max_tokens": 1}).encode()


def many_messages() -> bytes:
    """A chat whose template renders thousands of messages, and that just fits the context."""
    messages = [{"role": "user", "content": "abcd"} for _ in range(null_server.MAX_MODEL_LEN // 4 - 16)]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


def many_calls() -> bytes:
    """A chat with 3,000 calls and their results, 1 MB, that is longer than the context."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "x"}]
    for i in range(3000):
        function = {"name": "f", "arguments": json.dumps({"k": "v" * 60, "n": i, "l": [1, 2, {"a": i}]})}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": "result " * 8})
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()


def forms(scale: int) -> Iterator[bytes]:
    """Chats whose answers are to have forms that take long to check, and to compile, where each is new."""
    for number in count():
        for fields in hostile_forms(scale, number).values():
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 24, **fields}
            yield json.dumps(asked).replace("\\\\u", "\\u").encode()


def largest_forms() -> Iterator[bytes]:
    """Chats with forms of 100 KB to 8 MB, each of which is new."""
    for number in count():
        for schema in largest_schemas(number):
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 24}
            yield json.dumps(asked | {"guided_json": schema}).encode()


CASES: dict[str, tuple[str, Callable[[], Iterator[bytes]]] | None] = {
    "streams alone": None,
    "8 MiB of text": ("/v1/completions", lambda: repeat(long_text())),
    "a million ids": ("/v1/completions", lambda: repeat(long_ids())),
    "4,080 messages": ("/v1/chat/completions", lambda: repeat(many_messages())),
    "a history of 3,000 calls": ("/v1/chat/completions", lambda: repeat(many_calls())),
    "forms in 8 KiB": ("/v1/chat/completions", lambda: forms(1)),
    "larger forms": ("/v1/chat/completions", lambda: forms(20)),
    "forms of 100 KB to 8 MB": ("/v1/chat/completions", largest_forms),
    "reconnects ended by GOAWAY": ("", lambda: repeat(BROKEN)),
}


def send_bodies(port: int, name: str, duration_s: float) -> int:
    """Send one after the other for so long. Returns how many were answered. Runs in a process of its own."""
    if (case := CASES[name]) is None:
        time.sleep(duration_s)
        return 0
    (path, make_bodies), num = case, 0
    bodies, end_s = make_bodies(), time.monotonic() + duration_s
    for body in bodies:
        if time.monotonic() >= end_s:
            break
        if path:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", path, body, {"content-type": "application/json"})
            connection.getresponse().read()
            connection.close()
        else:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(body)
                while client.recv(4096):
                    pass
        num += 1
    return num


def computed_s() -> dict[int, float]:
    """By each thread so far."""
    threads = [one.ident for one in threading.enumerate() if one.ident is not None]
    return {one: time.clock_gettime(time.pthread_getcpuclockid(one)) for one in threads}


def waited_s() -> float:
    """For a CPU, by this thread so far."""
    return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9


async def probe_loop(lateness: Lateness, computed: Lateness) -> None:
    own = threading.get_ident()
    while True:
        before, before_s, due_s = computed_s(), waited_s(), time.monotonic() + PROBE_S
        await asyncio.sleep(PROBE_S)
        late_s = time.monotonic() - due_s
        spent_s = {one: now_s - before.get(one, 0.0) for one, now_s in computed_s().items()}
        lateness.note(late_s)
        without_waits_s = max(0.0, late_s - (waited_s() - before_s))
        computed.note(min(without_waits_s, spent_s.pop(own) + max(spent_s.values(), default=0.0)))


async def measure(name: str, duration_s: float) -> dict[str, Cell]:
    """One row, of CASES."""
    gil, lag, computed, due_s = Lateness(), Lateness(), Lateness(), 0.0

    def wait_step() -> None:
        nonlocal due_s
        due_s = max(due_s + STEP_S, time.monotonic())
        time.sleep(max(0.0, due_s - time.monotonic()))
        gil.note(time.monotonic() - due_s)

    def load(inbox: Inbox, deliver: Callable[[StepDelivery], None], stage: Callable[[str], None]) -> LoadedEngine:
        return null_server.load(wait_step, inbox, deliver, stage)

    server = Server(ServerConfig(port=0, log_level="warning", drain_timeout_s=0.0), load, lambda lines: None)
    await server.start()
    await server.wait_ready()
    loop, port = asyncio.get_running_loop(), server.listener.port
    probe = asyncio.create_task(probe_loop(lag, computed))
    num_tokens = int((3 * duration_s + 20) / STEP_S)  # the server's end is theirs
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        reading = loop.run_in_executor(pool, run, Load(port, False, STREAMS, STREAMS, num_tokens))
        generations = server._app.generations
        assert generations is not None, "the server is ready"
        while len(generations.active) < STREAMS:  # their requests come at once, which is no row's
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(WARM_UP_S)
        sending = loop.run_in_executor(pool, send_bodies, port, name, duration_s)
        gil.is_noted = lag.is_noted = computed.is_noted = True
        num_sent = await sending
        gil.is_noted = lag.is_noted = computed.is_noted = False
        server.stop(0.0)
        await server.wait_stopped()
        await reading
    probe.cancel()
    cells: dict[str, Cell] = {f"beside {STREAMS} streams": name, "posted or opened/s": num_sent / duration_s}
    return cells | gil.figures("gil_wait") | lag.figures("loop lag") | computed.figures("computed")


def _measure(arguments: argparse.Namespace) -> Found:
    configure_logging("error", "text")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rows = [uvloop.run(measure(name, arguments.seconds)) for name in arguments.cases]
    config = {"streams": STREAMS, "step_s": STEP_S, "seconds": arguments.seconds}
    return Found([table_of("What long bodies cost the others", rows)], config)


FLAGS = (
    Flag("--seconds", 15.0, "of each case", 0.5),
    Flag("--cases", tuple(CASES), "to measure", more={"nargs": "+"}),
)
main = bench("lag", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
