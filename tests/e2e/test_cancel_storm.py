"""Thousands of clients that leave a real server with a real model: sockets, threads, kernels' buffers and all.

The server runs in this process, so that its tasks and its file descriptors can be counted. The clients leave in seven
ways at random moments.
"""

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench.raw_clients import OPENING, frame, http1_request, http2_request, request_head
from core.types import Cancel, FinishReason, Message
from server.config import ServerConfig
from server.engine_loader import engine_loader
from server.engine_thread import EngineThread
from server.process import Server
from server.wire.http2_frames import GOAWAY, RST_STREAM
from tests.server.tiny_model import write_tiny_model

MODEL = "tiny"  # its directory's name
NUM_PER_KIND = 500
LIMIT_S = 600  # for what hangs
NUM_AT_ONCE = 32
PATH = "/v1/completions"
HTTP2_HEAD = request_head("POST", PATH)
CANCEL_CODE = (8).to_bytes(4, "big")
RESET_ON_CLOSE = b"\1\0\0\0\0\0\0\0"  # SO_LINGER of no time
WAYS = ("end", "TCP reset", "DELETE", "stop string", "RST_STREAM", "GOAWAY", "end of HTTP/2")


class Clients:
    """Clients that take turns in the ways of leaving.

    Attributes:
        num_left: by the way.
    """

    def __init__(self, port: int, num_per_way: int) -> None:
        self.num_left: Counter[str] = Counter()
        self._port, self._random = port, random.Random(3)
        self._turns = [way for way in WAYS for _ in range(num_per_way)]
        self._random.shuffle(self._turns)

    async def run(self) -> None:
        async def take_turns() -> None:
            while self._turns:
                way = self._turns.pop()
                await (self._leave_http2(way) if way in WAYS[4:] else self._leave_http1(way))
                self.num_left[way] += 1

        await asyncio.gather(*(take_turns() for _ in range(NUM_AT_ONCE)))

    def _body(self, **fields: object) -> bytes:
        prompt = [5] * (50 if self._random.random() < 0.25 else 5)
        body = {"model": MODEL, "prompt": prompt, "stream": True, "ignore_eos": True, "max_tokens": 200}
        return json.dumps(body | fields).encode()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        try:
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _wait_moment(self, reader: asyncio.StreamReader) -> None:
        """A few tokens, or a few milliseconds: while the prompt is computed, or before."""
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.random() * 0.02)
            return
        for _ in range(self._random.randrange(1, 12)):
            await reader.read(65_536)

    async def _leave_http1(self, way: str) -> None:
        async with self._connected() as (reader, writer):
            stops = {"stop": ["7", "e", "a", "t"]} if way == "stop string" else {}
            writer.write(http1_request("POST", PATH, self._body(**stops)))
            if way == "stop string":
                await reader.readuntil(b"0\r\n\r\n")
                return
            if way == "DELETE":
                head = await reader.readuntil(b"\r\n\r\n")
                request_id = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
                async with self._connected() as (other_reader, other):
                    other.write(http1_request("DELETE", f"/v1/requests/{request_id}"))
                    await other_reader.readuntil(b"cancelled")
                return
            await self._wait_moment(reader)
            if way == "TCP reset":
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    async def _leave_http2(self, way: str) -> None:
        async with self._connected() as (reader, writer):
            writer.write(OPENING + http2_request(1, HTTP2_HEAD, self._body()))
            await self._wait_moment(reader)
            if way == "RST_STREAM":
                writer.write(frame(RST_STREAM, CANCEL_CODE, 0, 1))
                await asyncio.sleep(0.1)  # or the connection's end would do it
            elif way == "GOAWAY":
                writer.write(frame(GOAWAY, bytes(4) + CANCEL_CODE))
                with suppress(ConnectionError):
                    while await reader.read(65_536):
                        pass


async def start_grammar_processes(port: int) -> None:
    """What tries grammars out is started by the first one, or some seconds after the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"model": MODEL, "prompt": [5], "max_tokens": 1, "guided_choice": ["a"]}
    writer.write(http1_request("POST", PATH, json.dumps(body).encode()))
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


async def storm(server: Server, num_per_kind: int) -> Clients:
    """Until the listener knows of nobody, and the engine has told the end of everybody."""
    clients = Clients(server.listener.port, num_per_kind)
    await clients.run()
    generations, client = server._app.generations, server._client
    assert generations is not None
    assert client is not None
    while server.listener.num_open or server.listener.num_handlers or generations.active or client._handles:
        await asyncio.sleep(0)
    return clients


@pytest.mark.slow
def test_thousands_of_cancels_leave_no_block_stream_task_or_descriptor(
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
        await start_grammar_processes(server.listener.port)
        await storm(server, 15)  # pools, caches, the executor's threads: what is made once
        tasks, descriptors = asyncio.all_tasks(), len(os.listdir("/proc/self/fd"))
        clients = await storm(server, NUM_PER_KIND)
        assert server._client is not None
        stats = server._client.stats
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert asyncio.all_tasks() == tasks
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert clients.num_left == dict.fromkeys(WAYS, NUM_PER_KIND)
        server.stop(0)
        await serving

    uvloop.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert posted[FinishReason.CANCELLED] > 3 * NUM_PER_KIND
    assert posted[FinishReason.STOP] > NUM_PER_KIND / 2
