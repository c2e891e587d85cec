"""Ten thousand clients that leave a real server with a real model: sockets, threads, kernels' buffers and all.

The server runs in this process, so that its tasks and its file descriptors can be counted.
"""

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from core.types import Cancel, FinishReason, Message
from server.config import ServerConfig
from server.engine_loader import engine_loader
from server.engine_thread import EngineThread
from server.process import Server
from server.wire.frame_gate import DATA, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS
from tests.e2e.raw_http import post_bytes, request_bytes
from tests.server.cancel_storm import END_HEADERS, END_STREAM, HEAD
from tests.server.raw_http2 import frame
from tests.server.tiny_model import write_tiny_model

MODEL = "tiny"  # its directory's name
NUM_CANCELS = 10_000
NUM_CLIENTS = 32
STREAMS_PER_CONNECTION = 100  # within the reset budget of a connection: burst 200
LIMIT_S = 600  # for what hangs
CANCEL_CODE = (8).to_bytes(4, "big")


class Storm:
    """Clients on the server's own loop."""

    def __init__(self, server: Server, num_cancels: int) -> None:
        self.server = server
        self.done: Counter[str] = Counter()
        self._left = num_cancels
        self._random = random.Random(5)
        self._ways: list[Callable[[], Awaitable[str]]] = [
            self._leave_http1,
            self._leave_http1,
            self._delete,
            self._stop_string,
            self._reset_streams,
        ]

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(NUM_CLIENTS)))

    async def _client(self) -> None:
        while self._left > 0:
            self._left -= 1
            way = await self._random.choice(self._ways)()
            self.done[way] += 1

    def _body(self, **fields: Any) -> dict[str, Any]:
        prompt = [5] * self._random.choice((1, 20, 50))
        return {"model": MODEL, "prompt": prompt, "stream": True, "ignore_eos": True, "max_tokens": 200} | fields

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.listener.port)

    async def _read_some(self, reader: asyncio.StreamReader) -> bytes:
        """Up to a few tokens of an answer: the moment to leave."""
        received = b""
        for _ in range(self._random.randrange(4)):
            received += await reader.read(65_536)
        return received

    async def _leave_http1(self) -> str:
        reader, writer = await self._connect()
        data = post_bytes("/v1/completions", self._body(n=self._random.choice((1, 1, 3))))
        is_cut = self._random.random() < 0.1
        writer.write(data[: self._random.randrange(len(data))] if is_cut else data)
        if not is_cut:
            await self._read_some(reader)
        way = self._random.choice(("end of connection", "TCP reset"))
        await leave(writer, is_reset=way == "TCP reset")
        return way

    async def _delete(self) -> str:
        reader, writer = await self._connect()
        writer.write(post_bytes("/v1/completions", self._body()))
        head = await reader.readuntil(b"\r\n\r\n")
        request_id = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
        other_reader, other = await self._connect()
        other.write(request_bytes("DELETE", f"/v1/requests/{request_id}", headers=("connection: close",)))
        assert (await other_reader.read()).startswith(b"HTTP/1.1 200")
        assert b"request_cancelled" in await reader.readuntil(b"0\r\n\r\n")
        await leave(other)
        await leave(writer)
        return "DELETE"

    async def _stop_string(self) -> str:
        reader, writer = await self._connect()
        writer.write(post_bytes("/v1/completions", self._body(stop=["e", "t", "a", " "])))
        await reader.readuntil(b"0\r\n\r\n")
        await leave(writer)
        return "stop string"

    async def _reset_streams(self) -> str:
        """Streams of one connection, each reset; then the connection ends too, in one way or another."""
        reader, writer = await self._connect()
        windows = (4).to_bytes(2, "big") + (2**30).to_bytes(4, "big")
        writer.write(PREFACE + frame(SETTINGS, windows) + frame(8, (2**30).to_bytes(4, "big")))
        for stream_id in range(1, 2 * self._random.randrange(1, STREAMS_PER_CONNECTION), 2):
            body = post_bytes("/v1/completions", self._body()).partition(b"\r\n\r\n")[2]
            writer.write(frame(HEADERS, HEAD, END_HEADERS, stream_id) + frame(DATA, body, END_STREAM, stream_id))
            await self._read_some(reader)
            if self._random.random() < 0.8:  # the others end with their connection
                writer.write(frame(RST_STREAM, CANCEL_CODE, 0, stream_id))
            self._left -= 1
            self.done["RST_STREAM or its connection"] += 1
        if self._random.random() < 0.5:
            writer.write(frame(GOAWAY, bytes(4) + CANCEL_CODE))
            with suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
        await leave(writer)
        return "GOAWAY or end of an HTTP/2 connection"


async def leave(writer: asyncio.StreamWriter, is_reset: bool = False) -> None:
    if is_reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def wait_quiet(server: Server) -> None:
    """The listener knows of nobody, and the engine has told the end of everybody."""
    generations, client = server._app.state.generations, server._client
    assert generations is not None
    assert client is not None
    while server.listener.num_open or server.listener.num_handlers or generations.active or client._handles:
        await asyncio.sleep(0)


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
        await Storm(server, 100).run()  # pools, caches, the executor's threads: what is made once
        await wait_quiet(server)
        tasks, descriptors = asyncio.all_tasks(), num_descriptors()
        storm = Storm(server, NUM_CANCELS)
        await storm.run()
        await wait_quiet(server)
        assert server._client is not None
        assert server._client.stats.num_used_blocks == 0
        assert (server._client.stats.num_running, server._client.stats.num_waiting) == (0, 0)
        assert asyncio.all_tasks() == tasks
        assert num_descriptors() == descriptors
        assert sum(storm.done.values()) >= NUM_CANCELS
        assert len(storm.done) == 6
        server.stop(0)
        await serving

    uvloop.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert posted[FinishReason.CANCELLED] > NUM_CANCELS / 2
    assert posted[FinishReason.STOP] > NUM_CANCELS / 100  # a fifth of the clients, and of them one in 50 has streams
