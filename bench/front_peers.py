"""Front ends that bench/frontend.py compares with: `python -m bench.front_peers --server hypercorn --port 8001`.

FastAPI is the front end most inference servers have: a queue per stream, an async generator that makes a pydantic chunk
of each token, `data: ` and model_dump_json, as vLLM's and SGLang's do it. Its engine is a task of the same loop that
gives each stream one token per step, without planning or threads, so that what it costs is the front end alone. Plain
requests do not measure it: /health is answered below it, by the least that ASGI allows.

The floor under every HTTP/1.1 front end is an asyncio.Protocol on uvloop that writes prepared bytes: it parses just
enough to know how many tokens are wanted, and each step writes one prepared chunk to each stream. It checks nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import uvloop
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench.kit import MODEL, PIECES

SERVERS = ("floor", "uvicorn", "uvicorn-h11", "hypercorn", "granian")
NUM_STREAMS = 256  # on one connection, at least
_STEP_INTERVAL = "BENCH_STEP_INTERVAL"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_HEALTH_FIELDS = [(b"content-type", b"application/json"), (b"content-length", b"15")]
_HEALTH = (
    {"type": "http.response.start", "status": 200, "headers": _HEALTH_FIELDS},
    {"type": "http.response.body", "body": b'{"status":"ok"}'},
)


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


@dataclass(slots=True, eq=False)
class TokenStream:
    """One request's tokens on their way."""

    num_remaining: int
    queue: "asyncio.Queue[int]" = field(default_factory=asyncio.Queue)


class TokenSource:
    """The engine's place: each step gives every stream one token.

    Args:
        step_interval_s: 0: the next step comes when all tokens of the last were taken.
    """

    def __init__(self, step_interval_s: float) -> None:
        self._step_interval_s = step_interval_s
        self._streams: set[TokenStream] = set()
        self._num_untaken = 0
        self._wake = asyncio.Event()

    def open(self, num_tokens: int) -> TokenStream:
        stream = TokenStream(num_tokens)
        self._streams.add(stream)
        self._wake.set()
        return stream

    def close(self, stream: TokenStream) -> None:
        self._streams.discard(stream)
        self._num_untaken -= stream.queue.qsize()
        self._wake.set()

    async def take(self, stream: TokenStream) -> int:
        token_id = await stream.queue.get()
        self._num_untaken -= 1
        if not self._num_untaken:
            self._wake.set()
        return token_id

    async def run(self) -> None:
        for step in itertools.count():
            self._wake.clear()
            if not self._streams or (self._num_untaken and not self._step_interval_s):
                await self._wake.wait()
                continue
            for stream in [stream for stream in self._streams if stream.num_remaining]:
                stream.queue.put_nowait(step % len(PIECES))
                self._num_untaken += 1
                stream.num_remaining -= 1
            if self._step_interval_s:
                await asyncio.sleep(self._step_interval_s)


def chunk_line(chunk: StreamChunk) -> str:
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


async def stream_chat(request: ChatRequest, reply_id: str, source: TokenSource) -> AsyncIterator[str]:
    """The events of one answer."""
    created = int(time.time())

    def chunk_of(delta: DeltaMessage, finish_reason: str | None = None) -> StreamChunk:
        choice = StreamChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
        return StreamChunk(id=reply_id, object="chat.completion.chunk", created=created, model=MODEL, choices=[choice])

    stream = source.open(request.max_tokens)
    try:
        yield chunk_line(chunk_of(DeltaMessage(role="assistant", content="")))
        for _ in range(request.max_tokens):
            token_id = await source.take(stream)
            yield chunk_line(chunk_of(DeltaMessage(content=PIECES[token_id])))
        last, num_tokens = chunk_of(DeltaMessage(), "length"), request.max_tokens
        yield chunk_line(last)
        usage = UsageInfo(prompt_tokens=1, completion_tokens=num_tokens, total_tokens=num_tokens + 1)
        yield chunk_line(last.model_copy(update={"choices": [], "usage": usage}))
        yield "data: [DONE]\n\n"
    finally:
        source.close(stream)


def make_app(step_interval_s: float) -> Application:
    """FastAPI, its token source running as long as it does; below it GET /health."""
    sources: list[TokenSource] = []
    reply_numbers = itertools.count()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        source = TokenSource(step_interval_s)
        sources.append(source)
        task = asyncio.create_task(source.run())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> StreamingResponse:
        events = stream_chat(request, f"chatcmpl-{next(reply_numbers):032x}", sources[0])
        return StreamingResponse(events, media_type="text/event-stream")

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/health":
            await app(scope, receive, send)
            return
        for message in _HEALTH:
            await send(dict(message))

    return handle


def make_served_app() -> Application:
    """The application of granian's worker."""
    return make_app(float(os.environ[_STEP_INTERVAL]))


def serve_granian(port: int, step_interval_s: float) -> None:
    """In a worker process, which makes the application: inside a loop of ours, granian loses wake-ups."""
    from granian.constants import Interfaces, Loops
    from granian.http import HTTP2Settings
    from granian.server import Server

    os.environ[_STEP_INTERVAL] = str(step_interval_s)
    Server(
        "bench.front_peers:make_served_app",
        factory=True,
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        http2_settings=HTTP2Settings(max_concurrent_streams=NUM_STREAMS),
        log_enabled=False,
    ).serve()


async def serve_hypercorn(port: int, step_interval_s: float) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = None
    config.loglevel = "ERROR"
    config.h2_max_concurrent_streams = NUM_STREAMS
    await serve(cast(Any, make_app(step_interval_s)), config)


def serve_uvicorn(port: int, step_interval_s: float, http: str) -> None:
    import uvicorn

    app = make_app(step_interval_s)
    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", http=http, access_log=False, log_level="error")


class _Wanted(msgspec.Struct):
    max_tokens: int = 16


_decode_wanted = msgspec.json.Decoder(_Wanted).decode


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str] | None, finish_reason: str | None = None, **extra: object) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 1_700_000_000}
    chunk |= {"model": MODEL, "choices": [] if delta is None else [choice], **extra}
    return _http_chunk(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_FIRST, _LAST = _HEAD + _event({"role": "assistant", "content": ""}), _event({}, "length")
_TOKENS = tuple(_event({"content": piece}) for piece in PIECES)
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
_MODELS_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_MODELS) + _MODELS
)


class StepLoop:
    """Gives every stream that can be written to one token per step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step_interval_s: float) -> None:
        self._loop = loop
        self._step_interval_s = step_interval_s
        self._is_scheduled = False
        self.writable: set[Floor] = set()

    def schedule(self) -> None:
        """Make sure that the next step comes, as long as somebody can take its tokens."""
        if self._is_scheduled or not self.writable:
            return
        self._is_scheduled = True
        if self._step_interval_s:
            self._loop.call_later(self._step_interval_s, self._step)
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._is_scheduled = False
        for stream in tuple(self.writable):
            stream.write_token()
        self.schedule()


class Floor(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._received = b""
        self._num_wanted = self._num_written = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.writable.discard(self)

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
        self._num_wanted, self._num_written = _decode_wanted(body).max_tokens, 0
        self._transport.write(_FIRST)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._steps.writable.discard(self)

    def resume_writing(self) -> None:
        if self._num_written < self._num_wanted:
            self._steps.writable.add(self)
            self._steps.schedule()

    def write_token(self) -> None:
        self._transport.write(_TOKENS[self._num_written % len(_TOKENS)])
        self._num_written += 1
        if self._num_written >= self._num_wanted:
            num = self._num_wanted
            self._steps.writable.discard(self)
            usage = {"prompt_tokens": 1, "completion_tokens": num, "total_tokens": num + 1}
            self._transport.write(_LAST + _event(None, usage=usage) + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve_floor(port: int, step_interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    steps = StepLoop(loop, step_interval_s)
    server = await loop.create_server(lambda: Floor(steps), "127.0.0.1", port, backlog=1024)
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
    elif arguments.server == "hypercorn":
        uvloop.run(serve_hypercorn(port, step_interval_s))
    elif arguments.server == "granian":
        serve_granian(port, step_interval_s)
    else:
        serve_uvicorn(port, step_interval_s, "h11" if arguments.server == "uvicorn-h11" else "httptools")


if __name__ == "__main__":
    main()
