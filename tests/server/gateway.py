"""A gateway and its upstreams, each a server of its own on real sockets, on one loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from server.process import Server
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
