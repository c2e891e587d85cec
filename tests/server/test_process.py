"""The whole process but for its model: a real thread, real sockets, ports that the system chooses."""

import asyncio
import errno
import gc
import json
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from core.chat_template import ChatTemplate
from core.engine import Engine
from core.errors import BadCheckpoint, ExitCode, StartupError
from core.plan import BlockLabel, DeviceError, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import StepDelivery
from server import __version__, process
from server.commands.model_files import GenerationDefaults, ModelFiles
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.ledger.prices import ModelPrice, Prices
from server.process import EngineFacts, LoadedEngine, LoadEngine, Server
from server.supervision import EngineLost
from tests.core.chat_templates import CHATML
from tests.server.raw_http2 import START, Seen, post
from tests.server.simulated_server import EOS_ID, MODEL, STREAM, TOKENIZER, Answer, answers, chat, request
from tests.server.test_metrics import samples_of

LIMIT_S = 60  # for what hangs; nothing waits so long
LIMITS = RunnerLimits(1024, 16, 8, 64, 10_000, TOKENIZER.vocab_size)
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FOREVER = {"max_tokens": 9_000, **STREAM}


@pytest.fixture(autouse=True)
def _keep_interpreter_settings() -> Iterator[None]:
    """A server sets these for its whole process."""
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


class GatedRunner(SimulatedRunner):
    """Computes a step for each permit; or as many as there are to compute, where there is no gate."""

    gate: threading.Semaphore | None = None

    def collect(self, ticket: StepPlan) -> StepOutput:
        if self.gate is not None:
            self.gate.acquire()
        return super().collect(ticket)


class DeadDevice(SimulatedRunner):
    def collect(self, ticket: StepPlan) -> StepOutput:
        raise DeviceError("gone")


class CrashingEngine(Engine):
    """A bug of ours after some steps: no request is told of its end."""

    num_steps = 0

    def step(self) -> bool:
        self.num_steps += 1
        if self.num_steps == 20:
            raise AssertionError("impossible")
        return super().step()


def load_with(
    runner_type: type[SimulatedRunner] = SimulatedRunner,
    engine_type: Callable[..., Engine] = Engine,
    limits: RunnerLimits = LIMITS,
    stored: Iterable[tuple[int, BlockLabel]] = (),
) -> LoadEngine:
    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        report_stage("making it up")
        clock = SimulatedClock()
        runner = runner_type(limits, CostModel(), clock)
        template = ChatTemplate({"default": CHATML}, {}, limits.max_model_len)
        files = ModelFiles(Path("/"), CONFIG, TOKENIZER, template, GenerationDefaults(temperature=0.5), (EOS_ID,))
        facts = EngineFacts(MODEL, True, 1000, "float32", "cpu", "simulated", 4096, "the model's own", limits)
        scheduler = Scheduler(limits, (EOS_ID,), lambda: 1, stored=stored)
        engine = engine_type(scheduler, runner, clock, inbox, deliver)
        return LoadedEngine(engine, files, facts, scheduler.stats())

    return load


class Running:
    """A server that runs as a task."""

    def __init__(self, load: LoadEngine, **settings: Any) -> None:
        self.banner: list[str] = []
        self.server = Server(ServerConfig(port=0, **settings), load, self.banner.extend)
        self.exit: asyncio.Task[ExitCode] = asyncio.create_task(self.server.run())


async def ask(server: Server, data: bytes) -> Answer:
    """The answer to one request, read to the connection's end."""
    reader, writer = await open_with(server, data)
    return await read_answer(reader, writer)


async def open_with(server: Server, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
    writer.write(data)
    return reader, writer


async def read_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    received = await reader.read()
    writer.close()
    await writer.wait_closed()
    (answer,) = answers(received)
    return answer


def closing(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


@pytest.fixture(autouse=True)
def handlers_of_before() -> Iterator[None]:
    """A server that has ended leaves its signals ignored, and so would the processes that later tests start."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), LIMIT_S)

    uvloop.run(limited())


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


def test_it_serves_from_ready_to_stop() -> None:
    async def scenario() -> None:
        running = Running(load_with())
        server = running.server
        await server.wait_ready()
        assert (await ask(server, closing(request("GET", "/ready")))).status == 200
        whole = await ask(server, closing(chat()))
        streamed = await ask(server, closing(chat(**STREAM)))
        assert (whole.status, whole.text()) == (200, streamed.text())
        assert whole.usage is not None
        assert streamed.usage == whole.usage | {"prompt_tokens_details": {"cached_tokens": 16}}, "the first one's block"
        card = (await ask(server, closing(request("GET", "/v1/models")))).json["data"][0]
        assert card["id"] == MODEL
        assert "demonstration" in card["description"]
        assert any(f":{server.listener.port}" in line for line in running.banner)
        server.stop(5)
        assert await running.exit is ExitCode.OK
        assert not server._engine_thread._thread.is_alive()

    run(scenario)


def test_while_it_loads_the_port_answers_with_the_stage() -> None:
    may_load = threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loading = asyncio.Event()

        def load(*args: Any) -> LoadedEngine:
            args[2]("counting sheep")
            loop.call_soon_threadsafe(loading.set)
            may_load.wait()
            return load_with()(*args)

        running = Running(load)
        await loading.wait()
        assert (await ask(running.server, closing(request("GET", "/health")))).status == 200
        for data in (request("GET", "/ready"), chat()):
            answer = await ask(running.server, closing(data))
            assert (answer.status, answer.json["error"]["code"]) == (503, "loading")
            assert "counting sheep" in answer.json["error"]["message"]
        may_load.set()
        await running.server.wait_ready()
        assert (await ask(running.server, closing(chat()))).status == 200
        running.server.stop(0)
        assert await running.exit is ExitCode.OK

    run(scenario)


def test_stop_without_grace_ends_a_running_stream_with_an_error_event() -> None:
    async def scenario() -> None:
        running = Running(load_with())
        await running.server.wait_ready()
        reader, writer = await open_with(running.server, chat(**FOREVER))
        begun = await reader.readuntil(b"data: ")
        running.server.stop(0)
        received = begun + await reader.read()
        writer.close()
        (answer,) = answers(received)
        assert answer.is_complete
        assert answer.events[-1]["error"]["code"] == "draining"
        assert await running.exit is ExitCode.OK

    run(scenario)


def test_second_stop_ends_what_the_first_gave_time() -> None:
    async def scenario() -> None:
        running = Running(load_with())
        await running.server.wait_ready()
        reader, writer = await open_with(running.server, chat(**FOREVER))
        begun = await reader.readuntil(b"data: ")
        running.server.stop(1000)
        while (late := await ask(running.server, closing(request("GET", "/ready")))).status == 200:
            pass  # until the stop has begun
        assert (late.status, late.json["error"]["code"]) == (503, "draining")
        assert not running.exit.done()
        running.server.stop(1000)
        (answer,) = answers(begun + await reader.read())
        writer.close()
        assert answer.events[-1]["error"]["code"] == "draining"
        assert await running.exit is ExitCode.OK

    run(scenario)


@pytest.mark.parametrize("num_stops", [1, 2])
def test_who_is_still_sending_when_the_grace_is_over_is_told(num_stops: int) -> None:
    """By HTTP/1.1 and HTTP/2, long before any clock of theirs runs out."""
    upload = START + post(b"/v1/chat/completions", 1, (b"content-type", b"application/json")).encode(0)

    async def scenario() -> None:
        running = Running(load_with(), body_timeout_s=3600)
        await running.server.wait_ready()
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
        assert await running.exit is ExitCode.OK

    run(scenario)


def test_second_stop_waits_for_nobody_who_does_not_move() -> None:
    """Half a head, and a reader that has stopped: no clock but the stop's own ends them within the test's limit."""

    async def scenario() -> None:
        running = Running(load_with(), head_timeout_s=3600, stall_timeout_s=3600)
        server = running.server
        await server.wait_ready()
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

    run(scenario)


def test_graceful_stop_lets_an_answer_finish() -> None:
    async def scenario() -> None:
        gate = threading.Semaphore(3)
        GatedRunner.gate = gate
        running = Running(load_with(GatedRunner))
        await running.server.wait_ready()
        reader, writer = await open_with(running.server, chat(**STREAM))
        begun = await reader.readuntil(b"data: ")
        running.server.stop(1000)
        gate.release(100)
        (answer,) = answers(begun + await reader.read())
        writer.close()
        assert answer.events[-1] == "[DONE]"
        assert answer.finish_reason() == "length"
        assert await running.exit is ExitCode.OK

    run(scenario)


def test_admin_drain_lets_an_answer_finish_and_ends_the_process_even_if_asked_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "server")

    async def scenario() -> None:
        gate = threading.Semaphore(3)
        GatedRunner.gate = gate
        running = Running(load_with(GatedRunner), drain_timeout_s=1000.0)
        await running.server.wait_ready()
        reader, writer = await open_with(running.server, chat(**STREAM))
        begun = await reader.readuntil(b"data: ")
        idle_reader, idle_writer = await open_with(running.server, b"POST /admin/drain HTTP/1.1\r\n")
        told = await ask(running.server, request("POST", "/admin/drain"))
        assert (told.status, told.json) == (202, {"status": "draining", "grace_s": 1000.0, "num_in_progress": 1})
        idle_writer.write(b"Host: a\r\n\r\n")  # a head that was on its way
        again = await read_answer(idle_reader, idle_writer)
        assert again.status == 202
        gate.release(100)
        (answer,) = answers(begun + await reader.read())
        writer.close()
        assert answer.events[-1] == "[DONE]"
        assert answer.finish_reason() == "length"
        assert await running.exit is ExitCode.OK

    run(scenario)
    assert caplog.text.count("as /admin/drain asks") == 1


@pytest.mark.parametrize("num_bytes", [20_000, 4_000_000])
@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
def test_client_that_has_pipelined_and_leaves_frees_its_blocks_at_once(is_reset: bool, num_bytes: int) -> None:
    async def scenario() -> None:
        gate = threading.Semaphore(3)
        GatedRunner.gate = gate
        running = Running(load_with(GatedRunner))
        await running.server.wait_ready()
        reader, writer = await open_with(running.server, chat(**FOREVER))
        await reader.readuntil(b"data: ")
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
        running.server.stop(1000)
        assert await running.exit is ExitCode.OK

    run(scenario)


def test_model_that_cannot_be_loaded_is_a_start_up_error() -> None:
    async def scenario() -> None:
        def load(*args: Any) -> LoadedEngine:
            raise BadCheckpoint("There are no weights.", "bring some")

        running = Running(load)
        with pytest.raises(BadCheckpoint):
            await running.server.wait_ready()
        with pytest.raises(BadCheckpoint):
            await running.exit
        assert not running.banner

    run(scenario)


def test_fault_in_loading_is_an_engine_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        def load(*args: Any) -> LoadedEngine:
            raise ZeroDivisionError

        assert await Running(load).exit is ExitCode.ENGINE

    run(scenario)
    assert "ZeroDivisionError" in caplog.text


def test_address_in_use_is_a_start_up_error_before_anything_is_loaded() -> None:
    async def scenario() -> None:
        running = Running(load_with())
        await running.server.wait_ready()
        port = running.server.listener.port
        second = Server(ServerConfig(port=port), load_with(), print)
        with pytest.raises(StartupError):
            await second.run()
        running.server.stop(0)
        await running.exit

    run(scenario)


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_engine_that_breaks_while_serving_ends_requests_and_process(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        running = Running(load_with(DeadDevice))
        await running.server.wait_ready()
        answer = await ask(running.server, chat(**fields))
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_error")
        assert await running.exit is ExitCode.ENGINE

    run(scenario)
    assert "the server ends" in caplog.text


def test_engine_that_crashes_ends_its_streams_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        running = Running(load_with(engine_type=CrashingEngine))
        await running.server.wait_ready()
        answer = await ask(running.server, chat(**FOREVER))
        assert answer.text()
        assert answer.events[-1]["error"]["code"] == "engine_error"
        assert await running.exit is ExitCode.ENGINE

    run(scenario)
    assert "impossible" in caplog.text


def test_stop_while_it_loads_announces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    may_load = threading.Event()

    async def scenario() -> None:
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

    run(scenario)


def test_signals_stop_a_server() -> None:
    async def scenario() -> None:
        serving = asyncio.create_task(process.serve(ServerConfig(port=0), load_with()))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving is ExitCode.OK

    run(scenario)


def test_prices_of_a_model_that_is_not_served_are_told_at_start_and_at_each_reload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def num_told() -> int:
        return sum("[prices] has the model 'nope'" in record.getMessage() for record in caplog.records)

    async def scenario() -> None:
        running = Running(load_with(), api_keys=("k",), prices=Prices((("nope", ModelPrice()),)))
        running.server.install_signal_handlers()
        await running.server.wait_ready()
        assert num_told() == 1
        os.kill(os.getpid(), signal.SIGHUP)
        while num_told() < 2:
            await asyncio.sleep(0)
        running.server.stop(0)
        await running.exit
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    run(scenario)


def test_routers_are_told_what_is_served_and_how_much_of_it() -> None:
    async def scenario() -> None:
        running = Running(load_with())
        await running.server.wait_ready()
        model = (await ask(running.server, closing(request("GET", "/model_info")))).json
        server = (await ask(running.server, closing(request("GET", "/server_info")))).json
        running.server.stop(0)
        await running.exit
        assert (model["model_path"], model["tokenizer_path"], model["served_model_name"]) == (MODEL, MODEL, MODEL)
        assert (model["model_type"], model["architectures"]) == ("llama", ["LlamaForCausalLM"])
        assert (model["is_generation"], model["has_image_understanding"]) == (True, False)
        assert (server["served_model_name"], server["version"]) == (MODEL, __version__)
        assert model["max_model_len"] == server["max_model_len"] == server["context_length"] == LIMITS.max_model_len
        assert server["max_num_reqs"] == server["max_running_requests"] == LIMITS.max_sequences
        assert server["max_total_tokens"] == LIMITS.num_blocks * LIMITS.block_size
        assert server["max_prefill_tokens"] == LIMITS.max_batch_tokens
        assert server["binds"] == [f"http://127.0.0.1:{running.server.listener.port}"]

    run(scenario)


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
def test_routers_need_the_key_and_a_model_that_is_loaded(path: str) -> None:
    async def scenario() -> None:
        may_load = threading.Event()

        def load(*args: Any) -> LoadedEngine:
            may_load.wait()
            return load_with()(*args)

        running = Running(load, api_keys=("s3cret",))
        await asyncio.sleep(0)  # until it listens
        while not running.server.listener.port:
            await asyncio.sleep(0)
        assert (await ask(running.server, closing(request("GET", path)))).status == 401
        key = "Authorization: Bearer s3cret"
        assert (await ask(running.server, closing(request("GET", path, None, key)))).status == 503
        may_load.set()
        await running.server.wait_ready()
        assert (await ask(running.server, closing(request("GET", path, None, key)))).status == 200
        running.server.stop(0)
        await running.exit

    run(scenario)


def test_an_address_of_other_machines_without_keys_is_given_up_again() -> None:
    async def scenario() -> None:
        running = Running(load_with(), host="0.0.0.0")
        with pytest.raises(StartupError, match="nobody is asked who they are"):
            await running.exit
        with socket.socket() as probe:  # nobody listens there any more
            assert probe.connect_ex(("127.0.0.1", running.server.listener.port)) == errno.ECONNREFUSED

    run(scenario)


def test_page_of_metrics_knows_the_model_and_its_blocks_from_the_start() -> None:
    async def scenario() -> None:
        stored = [(slot, BlockLabel(slot + 1, (("", ""), bytes([slot])))) for slot in range(3)]
        running = Running(load_with(limits=replace(LIMITS, num_host_blocks=5), stored=stored))
        await running.server.wait_ready()
        page = await ask(running.server, closing(request("GET", "/metrics")))
        samples = samples_of(page.body)
        label = f'model_name="{MODEL}"'
        assert samples[f"steploop_kv_blocks{{{label}}}"] == LIMITS.num_blocks  # before anything was computed
        assert samples[f"steploop_kv_host_blocks{{{label}}}"] == 5
        assert samples[f"steploop_kv_host_blocks_used{{{label}}}"] == 3  # what the process before has left
        assert samples[f"steploop_steps_total{{{label}}}"] == 0
        for reason in ("engine_error", "internal_error"):  # alerts see a failure as the rise of its counter
            assert samples[f'steploop_requests_failed_total{{{label},reason="{reason}"}}'] == 0
        assert json.loads((await ask(running.server, closing(request("GET", "/health")))).body) == {"status": "ok"}
        running.server.stop(0)
        await running.exit

    run(scenario)


class HangingRunner(SimulatedRunner):
    """Hangs in its third step until the test lets go of it."""

    may_go_on = threading.Event()
    num_steps = 0

    def collect(self, ticket: StepPlan) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 3:
            self.may_go_on.wait()
        return super().collect(ticket)


def test_engine_that_hangs_is_not_ready_and_when_lost_ends_its_streams_and_the_process() -> None:
    HangingRunner.may_go_on.clear()

    async def scenario() -> None:
        running = Running(load_with(HangingRunner))
        server = running.server
        await server.wait_ready()
        reader, writer = await open_with(server, chat(**FOREVER))
        head = await reader.readuntil(b"data: ")
        server.on_silence(True)  # as supervision tells it (test_supervision.py)
        stalled = await ask(server, closing(request("GET", "/ready")))
        assert (stalled.status, stalled.json["error"]["code"]) == (503, "stalled")
        server.on_failed(EngineLost("busy with one step"))
        (answer,) = answers(head + await reader.read())
        assert answer.events[-1]["error"]["code"] == "engine_error"
        writer.close()
        await writer.wait_closed()
        assert await running.exit is ExitCode.ENGINE  # though its thread hangs still
        HangingRunner.may_go_on.set()
        assert server._engine_thread.wait_stopped(LIMIT_S)

    try:
        run(scenario)
    finally:
        HangingRunner.may_go_on.set()
