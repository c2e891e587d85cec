"""Front ends that bench/frontend.py compares with: `python -m bench.front_peers --server granian --port 8001`.

FastAPI is the front end most inference servers have: a queue per stream and an async generator that makes a pydantic
chunk of each token, as vLLM and SGLang do it. Its engine is a task of the same loop that gives each stream one token
per step, so what it costs is the front end alone. Plain requests do not measure it: /health is answered below it, by
the least that ASGI allows.

The floor under every HTTP/1.1 front end is an asyncio.Protocol on uvloop that writes prepared bytes, one chunk per
stream and step, parses just enough to know how many tokens are wanted, and checks nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import uvloop
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench.kit import MODEL, PIECES

SERVERS = ("floor", "uvicorn", "granian")
NUM_STREAMS = 256  # on one connection, at least
_STEP_INTERVAL = "BENCH_STEP_INTERVAL"

Message = MutableMapping[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Any]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_HEALTH_FIELDS = [(b"content-type", b"application/json"), (b"content-length", b"15")]
_HEALTH = (
    {"type": "http.response.start", "status": 200, "headers": _HEALTH_FIELDS},
    {"type": "http.response.body", "body": b'{"status":"ok"}'},
)
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


class ChatRequest(BaseModel):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    stream: bool
    stream_options: dict[str, Any] | None = None
    ignore_eos: bool = False


class DeltaMessage(BaseModel):
    role: str | None = None
    content: str | None = None


class StreamChoice(BaseModel):
    index: int
    delta: DeltaMessage
    logprobs: None = None
    finish_reason: str | None = None


class UsageInfo(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class StreamChunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[StreamChoice]
    usage: UsageInfo | None = None


class TokenSource:
    """Stands in for the engine: each step puts one token into every stream's queue.

    Args:
        step_interval_s: 0: the next step comes when all tokens of the last were taken.
    """

    def __init__(self, step_interval_s: float) -> None:
        self._step_interval_s = step_interval_s
        self._num_left: dict[asyncio.Queue[int], int] = {}
        self._num_untaken = 0
        self._wake = asyncio.Event()

    async def tokens(self, num_tokens: int) -> AsyncGenerator[int]:
        """One stream's."""
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._num_left[queue] = num_tokens
        self._wake.set()
        try:
            for _ in range(num_tokens):
                yield await queue.get()
                self._num_untaken -= 1
                if not self._num_untaken:
                    self._wake.set()
        finally:
            del self._num_left[queue]
            self._num_untaken -= queue.qsize()
            self._wake.set()

    async def run(self) -> None:
        for step in itertools.count():
            self._wake.clear()
            if not self._num_left or (self._num_untaken and not self._step_interval_s):
                await self._wake.wait()
                continue
            for queue in [queue for queue, num_left in self._num_left.items() if num_left]:
                queue.put_nowait(step % len(PIECES))
                self._num_untaken += 1
                self._num_left[queue] -= 1
            if self._step_interval_s:
                await asyncio.sleep(self._step_interval_s)


async def stream_chat(request: ChatRequest, reply_id: str, source: TokenSource) -> AsyncIterator[str]:
    """The events of one answer."""
    created, num_tokens = int(time.time()), request.max_tokens

    def event(delta: DeltaMessage | None, finish_reason: str | None = None, **more: Any) -> str:
        choices = [StreamChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)] if delta else []
        fixed: Any = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": MODEL}
        return f"data: {StreamChunk(**fixed, choices=choices, **more).model_dump_json(exclude_unset=True)}\n\n"

    yield event(DeltaMessage(role="assistant", content=""))
    async with aclosing(source.tokens(num_tokens)) as token_ids:
        async for token_id in token_ids:
            yield event(DeltaMessage(content=PIECES[token_id]))
    yield event(DeltaMessage(), "length")
    usage = UsageInfo(prompt_tokens=1, completion_tokens=num_tokens, total_tokens=num_tokens + 1)
    yield event(None, usage=usage)
    yield "data: [DONE]\n\n"


def make_app(step_interval_s: float | None = None) -> Application:
    """FastAPI with a token source for its lifetime, and GET /health below it.

    Args:
        step_interval_s: None: as the environment of granian's worker says.
    """
    sources: list[TokenSource] = []
    reply_numbers = itertools.count()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        source = TokenSource(float(os.environ[_STEP_INTERVAL]) if step_interval_s is None else step_interval_s)
        sources.append(source)
        task = asyncio.create_task(source.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return _MODELS

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> StreamingResponse:
        events = stream_chat(request, f"chatcmpl-{next(reply_numbers):032x}", sources[0])
        return StreamingResponse(events, media_type="text/event-stream")

    async def handle(scope: Message, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/health":
            await app(scope, receive, send)
            return
        for message in _HEALTH:
            await send(dict(message))

    return handle


def serve_granian(port: int, step_interval_s: float) -> None:
    """In a worker process that makes the application: inside a loop of ours, granian loses wake-ups."""
    from granian.constants import Interfaces, Loops
    from granian.http import HTTP2Settings
    from granian.server import Server

    os.environ[_STEP_INTERVAL] = str(step_interval_s)
    Server(
        "bench.front_peers:make_app",
        factory=True,
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        http2_settings=HTTP2Settings(max_concurrent_streams=NUM_STREAMS),
        log_enabled=False,
    ).serve()


def serve_uvicorn(port: int, step_interval_s: float) -> None:
    import uvicorn

    app = make_app(step_interval_s)
    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", access_log=False, log_level="error")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str] | None, finish_reason: str | None = None, **extra: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    fields = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1_700_000_000}
    fields |= {"model": MODEL, "choices": [] if delta is None else [choice], **extra}
    return _chunk(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")


_OK = b"HTTP/1.1 200 OK\r\ncontent-type: "
_FIRST = _OK + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_FIRST += _event({"role": "assistant", "content": ""})
_TOKENS = tuple(_event({"content": piece}) for piece in PIECES)
_MODELS_BODY = json.dumps(_MODELS).encode()
_MODELS_ANSWER = _OK + b"application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_MODELS_BODY), _MODELS_BODY)


class Floor(asyncio.Protocol):
    """One connection, one request at a time; a token every step_interval_s, or one each turn of the loop."""

    def __init__(self, step_interval_s: float) -> None:
        self._step_interval_s = step_interval_s
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._num_wanted = self._num_written = 0
        self._may_write, self._is_scheduled = True, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write = False

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        self._schedule()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._received = b""
        if head.startswith(b"GET "):
            self._transport.write(_MODELS_ANSWER)
            return
        self._num_wanted, self._num_written = json.loads(body)["max_tokens"], 0
        self._transport.write(_FIRST)
        self._schedule()

    def _schedule(self) -> None:
        if self._may_write and not self._is_scheduled and self._num_written < self._num_wanted:
            self._is_scheduled = True
            self._loop.call_later(self._step_interval_s, self._write_token)

    def _write_token(self) -> None:
        self._is_scheduled = False
        self._transport.write(_TOKENS[self._num_written % len(_TOKENS)])
        self._num_written += 1
        if self._num_written == self._num_wanted:
            num = self._num_wanted
            usage = {"prompt_tokens": 1, "completion_tokens": num, "total_tokens": num + 1}
            end = _event({}, "length") + _event(None, usage=usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self._transport.write(end)
        self._schedule()


async def serve_floor(port: int, step_interval_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Floor(step_interval_s), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.front_peers", description=__doc__)
    parser.add_argument("--server", choices=SERVERS, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-rate", type=float, default=0.0, help="steps/s; 0: as fast as it goes")
    arguments = parser.parse_args()
    port, step_interval_s = arguments.port, 1 / arguments.step_rate if arguments.step_rate else 0.0
    if arguments.server == "floor":
        uvloop.run(serve_floor(port, step_interval_s))
    elif arguments.server == "granian":
        serve_granian(port, step_interval_s)
    else:
        serve_uvicorn(port, step_interval_s)


if __name__ == "__main__":
    main()
