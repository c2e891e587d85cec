"""Ten thousand clients that leave a real server with a real model: sockets, threads, kernels' buffers and all.

The server runs in this process, so that its tasks and its file descriptors can be counted. The clients are the
benchmark's of cancellation, which leave in seven ways at random moments.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench.cancel import Clients
from core.types import Cancel, FinishReason, Message
from server.config import ServerConfig
from server.engine_loader import engine_loader
from server.engine_thread import EngineThread
from server.process import Server
from tests.server.tiny_model import write_tiny_model

MODEL = "tiny"  # its directory's name
NUM_PER_KIND = 10_000 // 7 + 1
LIMIT_S = 600  # for what hangs


async def storm(server: Server, num_per_kind: int) -> Clients:
    """Until the listener knows of nobody, and the engine has told the end of everybody."""
    port = server.listener.port
    clients = Clients(port, num_per_kind, num_at_once=32, model=MODEL, prompts=(5, 50), max_tokens=200)
    await clients.run()
    generations, client = server._app.state.generations, server._client
    assert generations is not None
    assert client is not None
    while server.listener.num_open or server.listener.num_handlers or generations.active or client._handles:
        await asyncio.sleep(0)
    return clients


@pytest.mark.slow
def test_ten_thousand_cancels_leave_no_block_stream_task_or_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / MODEL
    write_tiny_model(model)
    posted: Counter[FinishReason] = Counter()
    post = EngineThread.post

    def counting_post(thread: Any, message: Message) -> None:
        if isinstance(message, Cancel):
            posted[message.reason] += 1
        post(thread, message)

    monkeypatch.setattr(EngineThread, "post", counting_post)

    async def scenario() -> None:
        config = ServerConfig(model=model, port=0, dtype="float32", threads=1, kv_memory_bytes=64 << 20)
        server = Server(config, engine_loader(config), lambda lines: None)
        serving = asyncio.create_task(server.run())
        await server.wait_ready()
        await storm(server, 15)  # pools, caches, the executor's threads: what is made once
        tasks, descriptors = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
        clients = await storm(server, NUM_PER_KIND)
        assert server._client is not None
        stats = server._client.stats
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert asyncio.all_tasks() == tasks
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert set(Counter(call_off.kind for call_off in clients.call_offs).values()) == {NUM_PER_KIND}
        server.stop(0)
        await serving

    uvloop.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert posted[FinishReason.CANCELLED] > 3 * NUM_PER_KIND
    assert posted[FinishReason.STOP] > NUM_PER_KIND / 2
