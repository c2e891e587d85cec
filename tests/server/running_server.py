"""A server that runs as a process does, but for its model: real threads and sockets. For tests that ask it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from core.chat_template import ChatTemplate
from core.engine import Engine
from core.errors import ExitCode
from core.kv_cache import BlockLabel
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import StepDelivery
from server.api.fields import PoolingStyle
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import EngineFacts, LoadedEngine, LoadEngine
from server.model_files import ModelFiles
from server.process import Server
from tests.core.chat_templates import CHATML
from tests.server.simulated_server import EOS_ID, MODEL, TOKENIZER, Answer, answers

LIMIT_S = 300  # for what hangs; nothing waits so long, on a slow machine with other work either
LIMITS = RunnerLimits(1024, 16, 8, 64, 10_000, TOKENIZER.vocab_size)
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def load_with(
    runner_type: type[SimulatedRunner] = SimulatedRunner,
    engine_type: Callable[..., Engine] = Engine,
    limits: RunnerLimits = LIMITS,
    stored: Iterable[tuple[int, BlockLabel]] = (),
    pooling: PoolingStyle | None = None,
) -> LoadEngine:
    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        report_stage("making it up")
        clock = SimulatedClock()
        runner = runner_type(limits, CostModel(), clock)
        template = ChatTemplate({"default": CHATML}, {}, limits.max_model_len)
        files = ModelFiles(Path("/"), CONFIG, TOKENIZER, template, {"temperature": 0.5}, (EOS_ID,), pooling)
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


@asynccontextmanager
async def serving(load: LoadEngine | None = None, **settings: Any) -> AsyncIterator[Running]:
    """A server that is ready; at the end it is stopped, unless it has been, and exits with OK."""
    running = Running(load or load_with(), **settings)
    await running.server.wait_ready()
    try:
        yield running
    finally:
        if not running.exit.done():
            running.server.stop(0)
        assert await running.exit is ExitCode.OK


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


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario(), LIMIT_S)

    uvloop.run(limited())
