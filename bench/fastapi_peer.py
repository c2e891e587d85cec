"""The front end most inference servers have: FastAPI, a pydantic chunk per token. bench/asgi_peers.py serves it.

A queue per stream, an async generator that makes a chunk of each token, `data: ` and model_dump_json, as vLLM's and
SGLang's do it. The engine is a task of the same loop that gives each stream one token per step, without planning or
threads, so that what it costs is the front end alone.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench.peer import MODEL, PIECES


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
            self._give_step(step % len(PIECES))
            if self._step_interval_s:
                await asyncio.sleep(self._step_interval_s)

    def _give_step(self, token_id: int) -> None:
        for stream in [stream for stream in self._streams if stream.num_remaining]:
            stream.queue.put_nowait(token_id)
            self._num_untaken += 1
            stream.num_remaining -= 1


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
        last = chunk_of(DeltaMessage(), "length")
        yield chunk_line(last)
        num_tokens = request.max_tokens
        usage = UsageInfo(prompt_tokens=1, completion_tokens=num_tokens, total_tokens=num_tokens + 1)
        yield chunk_line(last.model_copy(update={"choices": [], "usage": usage}))
        yield "data: [DONE]\n\n"
    finally:
        source.close(stream)


def make_app(step_interval_s: float) -> FastAPI:
    """The application; its token source runs as long as it does."""
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

    return app
