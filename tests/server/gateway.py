"""A gateway and its upstreams, each a server of its own on real sockets, on one loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from server.process import Server
from server.relay import Relay
from server.upstream.pool import Pool
from server.upstream.settings import ModelSettings, UpstreamSettings
from tests.server.running_server import Running, ask, closing, load_with, serving
from tests.server.simulated_server import MODEL, Answer, chat, completion, request

ASKED = "big"  # the name that clients of a gateway ask for


@dataclass
class Gateway:
    server: Server
    upstreams: list[Running]

    @property
    def pool(self) -> Pool:
        return self.server._pools[0]

    async def ask(self, data: bytes) -> Answer:
        return await ask(self.server, closing(data))

    @property
    def relay(self) -> Relay:
        relay = self.server._app.served.others[ASKED].reader
        assert isinstance(relay, Relay)
        return relay

    async def usage(self) -> dict[str, Any]:
        """The one line of it, once a settlement is in the file."""
        lines: list[dict[str, Any]] = []
        while not lines:
            lines = (await self.ask(request("GET", "/v1/usage?by=model"))).json["data"]
        (line,) = lines
        return line

    @property
    def num_active(self) -> list[int]:
        return [one.num_active for pool in self.server._pools for one in pool.upstreams]

    def num_running(self, upstream: int = 0) -> int:
        """Requests in progress at an upstream."""
        client = self.upstreams[upstream].server._client
        assert client is not None
        return len(client._handles)


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def url_of(upstream: Running, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{upstream.server.listener.port}"


def no_engine(*arguments: Any) -> Any:
    raise AssertionError("a gateway loads no engine")


def model(*urls: str, **fields: Any) -> ModelSettings:
    upstreams = tuple(UpstreamSettings(url=url) for url in urls)
    return ModelSettings(**{"name": ASKED, "upstream_model": MODEL, "upstreams": upstreams} | fields)


@asynccontextmanager
async def relaying(
    num_upstreams: int = 1, own: bool = False, upstream: dict[str, Any] | None = None, /, **fields: Any
) -> AsyncIterator[Gateway]:
    """
    Args:
        own: the gateway has an engine, too.
        upstream: settings of the upstreams.
        fields: of its model; those of ServerConfig in `config`.
    """
    config = fields.pop("config", {})
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(serving(**upstream or {})) for _ in range(num_upstreams)]
        settings = model(*map(url_of, running), **fields)
        load = load_with() if own else no_engine
        more: dict[str, Any] = {"model": "/"} if own else {}
        front = await stack.enter_async_context(serving(load, models=(settings,), **more, **config))
        yield Gateway(front.server, running)


def whole(content: Any, status: bytes = b"200 OK") -> bytes:
    """An answer over HTTP/1.1 of JSON, or of bytes as they are."""
    body = content if isinstance(content, bytes) else orjson.dumps(content)
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def saying(said: bytes | None, ends: bool = False, hangs: bool = False, again: bytes = b"") -> AsyncIterator[str]:
    """The URL of an upstream that is well, and answers each request so, in pieces; None: it listens no more then.

    Args:
        ends: it closes the connection then.
        hangs: it does neither, whatever it says, and is not well any more.
        again: what it says then, without end.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (head := await reader.readline()) and await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    if said is None:
                        listening.close()
                    writer.write(b"" if has_hung[0] else whole({}))
                    continue
                has_hung[0] = hangs
                text = said or b""
                size = max(7, len(text) // 100)
                for i in range(0, len(text), size):
                    writer.write(text[i : i + size])
                    await asyncio.sleep(0)
                while again:
                    writer.write(again * 100)
                    await writer.drain()
                if ends or not (said or hangs):
                    break
        writer.close()

    has_hung = [False]
    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


@asynccontextmanager
async def fronting(*models: ModelSettings, **config: Any) -> AsyncIterator[Gateway]:
    async with serving(no_engine, models=models, **config) as front:
        yield Gateway(front.server, [])


@asynccontextmanager
async def before(
    said: bytes | None, *others: str, speaks: dict[str, Any] | None = None, ledger: Path | None = None, **fields: Any
) -> AsyncIterator[Gateway]:
    """A gateway before an upstream that is `saying` so, over HTTP/1.1, and others behind it."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(saying(said, **speaks or {}))
        entry = model(url, *others, **{"protocol": "h1"} | fields)
        yield await stack.enter_async_context(fronting(entry, ledger=ledger))


SURFACES: dict[str, Callable[..., bytes]] = {
    "chat": lambda **fields: chat(**{"model": ASKED} | fields),
    "completions": lambda **fields: completion(**{"model": ASKED} | fields),
    "messages": lambda **fields: request(
        "POST",
        "/v1/messages",
        {"model": ASKED, "max_tokens": 12, "messages": [{"role": "user", "content": "step"}]} | fields,
    ),
    "responses": lambda **fields: request(
        "POST", "/v1/responses", {"model": ASKED, "input": "step", "max_output_tokens": 12, "seed": 7} | fields
    ),
}
