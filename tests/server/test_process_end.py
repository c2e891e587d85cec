"""How a whole process ends: stops, drains, and engines that break. Real threads, real sockets."""

import asyncio
import logging
import signal
import socket
import struct
import threading
from typing import Any

import pytest

from core.engine import Engine
from core.errors import ExitCode
from core.plan import DeviceError, StepOutput, StepPlan
from core.simulation import SimulatedRunner
from server import process
from server.loaded_engine import LoadedEngine, LoadEngine
from tests.fakes import raising_runner
from tests.server.raw_http2 import START, Seen, post
from tests.server.running_server import (
    LIMIT_S,
    Running,
    ask,
    closing,
    load_with,
    open_with,
    read_answer,
    run,
    serving,
)
from tests.server.simulated_server import STREAM, answers, chat, request

pytestmark = pytest.mark.usefixtures("_keep_interpreter_settings", "_keep_signal_handlers")

DEAD_DEVICE = raising_runner(DeviceError("gone"))
FOREVER = {"max_tokens": 9_000, **STREAM}


class GatedRunner(SimulatedRunner):
    """Computes a step for each permit; or as many as there are to compute, where there is no gate."""

    gate: threading.Semaphore | None = None

    def collect(self, ticket: StepPlan) -> StepOutput:
        if self.gate is not None:
            self.gate.acquire()
        return super().collect(ticket)


class CrashingEngine(Engine):
    """A bug of ours after some steps: no request is told of its end."""

    num_steps = 0

    def step(self) -> bool:
        self.num_steps += 1
        if self.num_steps == 20:
            raise AssertionError("impossible")
        return super().step()


def test_signal_that_finds_the_process_at_its_end_changes_nothing() -> None:
    """The loop takes its handlers along when it closes: what SIGTERM does by default would be the exit code then."""

    async def scenario() -> None:
        running = Running(load_with())
        running.server.install_signal_handlers()
        await running.server.wait_ready()
        signal.raise_signal(signal.SIGTERM)
        assert await running.exit is ExitCode.OK

    run(scenario)
    signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_IGN


async def begun(running: Running, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A stream's connection, once its first event is there, and what has come of it."""
    reader, writer = await open_with(running.server, data)
    return reader, writer, await reader.readuntil(b"data: ")


@pytest.mark.parametrize("num_stops", [1, 2])
async def test_stop_without_grace_or_a_second_stop_ends_streams_with_an_error_event(num_stops: int) -> None:
    async with serving() as running:
        reader, writer, head = await begun(running, chat(**FOREVER))
        if num_stops == 2:
            running.server.stop(1000)
            while (late := await ask(running.server, closing(request("GET", "/ready")))).status == 200:
                pass  # until the stop has begun
            assert (late.status, late.json["error"]["code"]) == (503, "draining")
            assert not running.exit.done()
        running.server.stop(0)
        (answer,) = answers(head + await reader.read())
        writer.close()
        assert answer.is_complete
        assert answer.events[-1]["error"]["code"] == "draining"


@pytest.mark.parametrize("num_stops", [1, 2])
async def test_who_is_still_sending_when_the_grace_is_over_is_told(num_stops: int) -> None:
    """By HTTP/1.1 and HTTP/2, long before any clock of theirs runs out."""
    upload = START + post(b"/v1/chat/completions", 1, (b"content-type", b"application/json")).encode(0)
    async with serving(body_timeout_s=3600) as running:
        first = await open_with(running.server, chat(**STREAM)[:-1])
        second = await open_with(running.server, upload)
        while running.server.listener.num_handlers < 2:
            await asyncio.sleep(0)
        for grace_s in (1000, 0)[-num_stops:]:
            running.server.stop(grace_s)
        answer = await read_answer(*first)
        assert (answer.status, answer.json["error"]["code"]) == (503, "draining")
        assert answer.headers["connection"] == "close"
        seen = Seen()
        while not seen.has_ended():
            data = await second[0].read(65_536)
            assert data
            seen.add(data)
        second[1].close()
        assert seen.statuses == {1: 503}
        assert b'"draining"' in seen.body()


async def test_second_stop_waits_for_nobody_who_does_not_move() -> None:
    """Half a head, and a reader that has stopped: no clock but the stop's own ends them within the test's limit."""
    async with serving(head_timeout_s=3600, stall_timeout_s=3600) as running:
        server = running.server
        with socket.create_connection(("127.0.0.1", server.listener.port)) as in_head, socket.socket() as stalled:
            in_head.send(b"GET /hea")
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", server.listener.port))
            stalled.send(chat(**FOREVER))
            while not any(connection.is_writing_paused for connection in server.listener._connections):
                await asyncio.sleep(0)
            server.stop(1000)
            server.stop(1000)
            assert await running.exit is ExitCode.OK


class GatedStream:
    """A server in the midst of an answer, which goes on when it is let."""

    def __init__(self, **settings: Any) -> None:
        self._gate = GatedRunner.gate = threading.Semaphore(3)
        self.running = Running(load_with(GatedRunner), **settings)

    async def begin(self) -> None:
        await self.running.server.wait_ready()
        self._reader, self._writer, self._begun = await begun(self.running, chat(**STREAM))

    async def finish(self) -> None:
        """The answer comes to its own end, and the process with it."""
        self._gate.release(100)
        (answer,) = answers(self._begun + await self._reader.read())
        self._writer.close()
        assert answer.events[-1] == "[DONE]"
        assert answer.finish_reason() == "length"
        assert await self.running.exit is ExitCode.OK


async def test_graceful_stop_lets_an_answer_finish() -> None:
    stream = GatedStream()
    await stream.begin()
    stream.running.server.stop(1000)
    await stream.finish()


async def test_admin_drain_lets_an_answer_finish_and_ends_the_process_even_if_asked_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server")
    stream = GatedStream(drain_timeout_s=1000.0)
    await stream.begin()
    server = stream.running.server
    idle_reader, idle_writer = await open_with(server, b"POST /admin/drain HTTP/1.1\r\n")
    told = await ask(server, request("POST", "/admin/drain"))
    assert (told.status, told.json) == (202, {"status": "draining", "grace_s": 1000.0, "num_in_progress": 1})
    idle_writer.write(b"Host: localhost\r\n\r\n")  # a head that was on its way
    again = await read_answer(idle_reader, idle_writer)
    assert again.status == 202
    await stream.finish()
    assert caplog.text.count("by POST /admin/drain") == 1


@pytest.mark.parametrize("num_bytes", [20_000, 4_000_000])
@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
async def test_client_that_has_pipelined_and_leaves_frees_its_blocks_at_once(is_reset: bool, num_bytes: int) -> None:
    gate = GatedRunner.gate = threading.Semaphore(3)
    async with serving(load_with(GatedRunner)) as running:
        _, writer, _ = await begun(running, chat(**FOREVER))
        writer.write(request("GET", "/health").ljust(100) * (num_bytes // 100))
        await writer.drain()
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.write_eof()
        client = running.server._client
        assert client is not None
        while client.stats.num_used_blocks:
            num_steps = client.stats.num_steps
            gate.release()
            while client.stats.num_used_blocks and client.stats.num_steps == num_steps:
                await asyncio.sleep(0)
        assert client.stats.num_generated_tokens < 1_000
        gate.release(10_000)
        writer.close()


@pytest.mark.parametrize(
    ("load", "fields", "logged"),
    [
        (load_with(DEAD_DEVICE), {}, "gone"),
        (load_with(DEAD_DEVICE), STREAM, "gone"),
        (load_with(engine_type=CrashingEngine), FOREVER, "impossible"),
    ],
)
async def test_engine_that_fails_while_serving_ends_requests_and_process(
    load: LoadEngine, fields: dict[str, Any], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(load)
    await running.server.wait_ready()
    answer = await ask(running.server, chat(**fields))
    if fields is FOREVER:
        assert answer.text()
        assert answer.events[-1]["error"]["code"] == "engine_error"
    else:
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_error")
    assert await running.exit is ExitCode.ENGINE
    assert "the server ends" in caplog.text
    assert logged in caplog.text


async def test_stop_while_it_loads_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()
    monkeypatch.setattr(process, "ENGINE_STOP_S", 0.0)
    loop = asyncio.get_running_loop()
    is_loading = asyncio.Event()

    def load(*args: Any) -> LoadedEngine:
        loop.call_soon_threadsafe(is_loading.set)
        may_load.wait()
        return load_with()(*args)

    running = Running(load)
    await is_loading.wait()
    running.server.stop(0)
    assert await running.exit is ExitCode.OK
    may_load.set()
    assert running.server._engine_thread.wait_stopped(LIMIT_S)
    await asyncio.sleep(0)
    assert not running.banner
