"""Readers that stop, over real sockets and TLS: what kernels and TLS buffer is part of what a slow reader costs.

The server is whole and in this process, its engine on its thread; each step waits for a permit, so that steps are
counted and not timed. The neighbour's stream is read all the while.
"""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from core.plan import StepOutput, StepPlan
from core.simulation import SimulatedRunner
from core.types import Message, Pause
from server.engine_thread import EngineThread
from server.gate.tenants import Tenant
from server.process import Server
from server.wire.http2 import Http2Protocol
from server.wire.http2_frames import PREFACE
from tests.certificates import make_certificate, needs_openssl
from tests.server.raw_http2 import END_STREAM, INITIAL_WINDOW, data, post, settings
from tests.server.running_server import LIMIT_S, LIMITS, Running, load_with, read_answer
from tests.server.running_server import closing as closing_request
from tests.server.simulated_server import STREAM, answers, chat

SLOW, NEIGHBOUR = 7, 8  # their seeds, by which the runner knows their rows
NUM_STEPS = 2_000  # in which a mark must be passed, whatever is buffered below it
NUM_LATER_STEPS = 30
RECEIVE_BUFFER_BYTES = 4096
OPEN_WINDOW = 2**24
MOST_HELD_BYTES = 16 * 1024 + 8 * 1024  # the mark, and what two steps say
NEIGHBOUR_BYTES = 4 * 1024  # in flight to a reader that reads
LONG: dict[str, Any] = {"max_tokens": 400, "n": 4, **STREAM}  # 300 KB of events


class Steps:
    """What the engine computes, and when. Written by both threads, each to its own attributes."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.seeds: list[set[int]] = []  # of each step that has begun, whose rows it has
        self.num_collected = 0
        self.num_at_mark: int | None = None  # collected when the first Pause was posted

    def runner(self) -> type[SimulatedRunner]:
        steps = self

        class CountedRunner(SimulatedRunner):
            def forward(self, plan: StepPlan) -> StepPlan:
                ticket = super().forward(plan)
                steps.seeds.append({self._starts[slot].seed for slot in plan.slots.tolist()})
                return ticket

            def collect(self, ticket: StepPlan) -> StepOutput:
                steps.permits.acquire()
                output = super().collect(ticket)
                steps.num_collected += 1
                return output

        return CountedRunner

    def watch(self, message: Message) -> None:
        if isinstance(message, Pause) and self.num_at_mark is None:
            self.num_at_mark = self.num_collected

    def num_with(self, seed: int, since: int) -> int:
        return sum(seed in seeds for seeds in self.seeds[since:])


class Client:
    """One connection with blocking calls, each on a thread of its own. It is read when told, and not before.

    Not the loop's own streams: under TLS they would read 512 KiB ahead.

    Args:
        window: of each HTTP/2 stream; None: HTTP/1.1.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None, window: int | None) -> None:
        self._socket = socket.socket()
        self._socket.settimeout(LIMIT_S)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._socket.connect(("127.0.0.1", port))
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="127.0.0.1")
        self._h2: H2Connection | None = None
        if window is not None:
            self._h2 = H2Connection(H2Configuration(client_side=True))
            self._h2.local_settings.update({SettingCodes.INITIAL_WINDOW_SIZE: window})
            self._h2.local_settings.acknowledge()
            self._h2.initiate_connection()
            self._h2.increment_flow_control_window(OPEN_WINDOW)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
        self._socket.close()

    def ask(self, **fields: Any) -> None:
        data = chat(**fields)
        if self._h2 is not None:
            head = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/v1/chat/completions")]
            self._h2.send_headers(1, head)
            self._h2.send_data(1, data.partition(b"\r\n\r\n")[2], end_stream=True)
            data = self._h2.data_to_send()
        self._socket.sendall(data)

    def text(self) -> str:
        """Read on, to the stream's end: what all its choices say."""
        return _text_of(self._read_answer() if self._h2 is None else self._read_stream(self._h2))

    def _read_answer(self) -> bytes:
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += self._receive()
        (answer,) = answers(received)
        return answer.body

    def _read_stream(self, h2: H2Connection) -> bytes:
        h2.increment_flow_control_window(OPEN_WINDOW, 1)
        body = b""
        while True:
            self._socket.sendall(h2.data_to_send())
            for event in h2.receive_data(self._receive()):
                if isinstance(event, events.DataReceived):
                    body += event.data or b""
                elif isinstance(event, events.StreamEnded):
                    return body

    def _receive(self) -> bytes:
        data = self._socket.recv(65_536)
        if not data:
            raise ConnectionResetError
        return data


def _text_of(body: bytes) -> str:
    events_ = [json.loads(event[6:]) for event in body.decode().split("\n\n")[:-2]]
    choices = sorted((choice for event in events_ for choice in event["choices"]), key=lambda choice: choice["index"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def num_held(server: Server) -> int:
    """Bytes that the server itself holds unsent, for all its connections."""
    total = 0
    for connection in server.listener._connections:
        total += connection.num_unwritten
        protocol = connection._exchanges._protocol
        if isinstance(protocol, Http2Protocol):
            total += sum(protocol.responses.num_unsent(stream_id) for stream_id in protocol.responses.streams)
    return total


async def step_until(server: Server, steps: Steps, is_reached: Callable[[], bool], limit: int = NUM_STEPS) -> None:
    """Permit one step after the other, each when the loop has handled the last."""
    assert server._client is not None
    for _ in range(limit):
        if is_reached():
            return
        target = server._client.stats.num_steps + 1
        steps.permits.release()
        while server._client.stats.num_steps < target:
            await asyncio.sleep(0)


def client_context(certificate: Path, protocol: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    context.set_alpn_protocols([protocol])
    return context


@needs_openssl
@pytest.mark.parametrize("is_secure", [False, True], ids=["in the clear", "TLS"])
@pytest.mark.parametrize(
    "window", [None, OPEN_WINDOW, 0], ids=["HTTP/1.1 socket", "HTTP/2 socket", "HTTP/2 zero window"]
)
async def test_reader_that_stops_costs_two_steps_and_bounded_memory_and_reads_on_to_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None, is_secure: bool
) -> None:
    steps = Steps()
    post = EngineThread.post

    def watched_post(thread: Any, message: Message) -> None:
        post(thread, message)
        steps.watch(message)

    monkeypatch.setattr(EngineThread, "post", watched_post)
    settings: dict[str, Any] = {}
    tls = None
    if is_secure:
        certificate, key = make_certificate(tmp_path)
        settings = {"tls_cert": certificate, "tls_key": key}
        tls = client_context(certificate, "http/1.1" if window is None else "h2")
    running = Running(load_with(steps.runner()), **settings)
    await running.server.wait_ready()
    try:
        await stop_reading(running.server, steps, lambda: Client(running.server.listener.port, tls, window))
    finally:
        steps.permits.release(100_000)
        running.server.stop(0)
        await running.exit


async def stop_reading(server: Server, steps: Steps, connect: Callable[[], Client]) -> None:
    generations = server._app.generations
    assert generations is not None
    with ExitStack() as stack:
        slow, neighbour, again = [stack.enter_context(closing(await asyncio.to_thread(connect))) for _ in range(3)]
        slow.ask(**LONG, seed=SLOW)
        neighbour.ask(**LONG | {"max_tokens": 2000}, seed=NEIGHBOUR)
        reading = asyncio.create_task(asyncio.to_thread(neighbour.text))
        while len(generations.active) < 2:
            await asyncio.sleep(0)
        await step_until(server, steps, lambda: steps.num_at_mark is not None)
        mark = steps.num_at_mark
        assert mark is not None, "the mark was never passed"
        await step_until(server, steps, lambda: steps.num_collected >= mark + 3)
        held = num_held(server)
        await step_until(server, steps, lambda: steps.num_collected >= mark + NUM_LATER_STEPS)
        assert steps.num_with(SLOW, since=mark) <= 2
        assert steps.num_with(NEIGHBOUR, since=mark) >= NUM_LATER_STEPS
        assert held <= MOST_HELD_BYTES
        assert num_held(server) <= held + NEIGHBOUR_BYTES
        steps.permits.release(100_000)
        text = await asyncio.to_thread(slow.text)
        neighbour.close()
        await asyncio.wait([reading])
        assert reading.exception() is not None  # of whatever is left of a TLS record when its socket is closed
        again.ask(**LONG, seed=SLOW)
        assert text == await asyncio.to_thread(again.text)


NUM_CONNECTIONS, NUM_CHATS = 3, 40  # of the flood
MAX_QUEUE = 64


def zero_window_chats(key: bytes) -> bytes:
    """A connection's bytes: so many chats, none of which may send a byte of its body."""
    sent = PREFACE + settings((INITIAL_WINDOW, 0)).encode(0)
    for number in range(NUM_CHATS):
        stream = 2 * number + 1
        body = chat(**LONG, seed=stream).partition(b"\r\n\r\n")[2]
        sent += post(b"/v1/chat/completions", stream, (b"x-api-key", key)).encode(0)
        sent += data(body, END_STREAM, stream).encode(0)
    return sent


@pytest.mark.parametrize("has_keys", [True, False], ids=["tenants by keys", "by addresses"])
async def test_zero_windows_of_one_tenant_refuse_nobody_elses_requests(has_keys: bool) -> None:
    tenants = tuple(Tenant(name=name, key_sha256=(sha256(name.encode()).hexdigest(),)) for name in ("flood", "light"))
    running = Running(
        load_with(limits=replace(LIMITS, num_blocks=8192)), tenants=tenants if has_keys else (), max_queue=MAX_QUEUE
    )
    server = running.server
    await server.wait_ready()
    with ExitStack() as stack:
        stack.callback(server.stop, 0)
        flood = [await asyncio.open_connection("127.0.0.1", server.listener.port) for _ in range(NUM_CONNECTIONS)]
        for _, writer in flood:
            stack.callback(writer.close)
            writer.write(zero_window_chats(b"flood"))
        assert server._client is not None
        while server._client.stats.num_paused < MAX_QUEUE:
            await asyncio.sleep(0)
        for seed in range(6):
            light = await asyncio.open_connection("127.0.0.1", server.listener.port, local_addr=("127.0.0.2", 0))
            light[1].write(
                closing_request(chat(seed=seed, max_tokens=8).replace(b"\r\n", b"\r\nx-api-key: light\r\n", 1))
            )
            assert (await read_answer(*light)).status == 200
    await running.exit
