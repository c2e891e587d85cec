"""The floor under every HTTP/1.1 front end: an asyncio.Protocol on uvloop that writes prepared bytes, nothing else.

It parses just enough to know how many tokens are wanted, and each step writes one prepared chunk to each stream: one
write per event, which is what the protocol costs at the least. No checks: only for bench/frontend.py, on loopback.
"""

import asyncio
import json
from typing import cast

import msgspec
import uvloop

from bench.peer import MODEL, PIECES, peer_arguments


class _Wanted(msgspec.Struct):
    max_tokens: int = 16


_decode_wanted = msgspec.json.Decoder(_Wanted).decode


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[object], **extra: object) -> bytes:
    chunk = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": choices,
        **extra,
    }
    return _http_chunk(b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n")


def _choice(delta: dict[str, str], finish_reason: str | None = None) -> list[object]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    + _event(_choice({"role": "assistant", "content": ""}))
)
_TOKENS = tuple(_event(_choice({"content": piece})) for piece in PIECES)
_LAST_EVENT = _event(_choice({}, "length"))


def _stream_end(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}
    return _LAST_EVENT + _event([], usage=usage) + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _models_answer() -> bytes:
    body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


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
        self._num_wanted = 0
        self._num_written = 0

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
            self._transport.write(_models_answer())
            return
        self._num_wanted, self._num_written = _decode_wanted(body).max_tokens, 0
        self._transport.write(_STREAM_HEAD)
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
            self._steps.writable.discard(self)
            self._transport.write(_stream_end(self._num_wanted))


async def serve(port: int, step_interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    steps = StepLoop(loop, step_interval_s)
    server = await loop.create_server(lambda: Floor(steps), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    arguments = peer_arguments(__doc__)
    uvloop.run(serve(arguments.port, 1 / arguments.step_rate if arguments.step_rate else 0.0))


if __name__ == "__main__":
    main()
