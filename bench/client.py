"""A client of HTTP/1.1 and server-sent events that times one streamed generation. Thread: the load generator's loop.

A connection is an asyncio.Protocol with one exchange at a time; each arriving piece of bytes is stamped once, and every
event in it costs one framing and one JSON decode. Connections are kept and used again; one that the server closed while
it was idle is replaced, and the request repeated once (counted), as any HTTP client does.
"""

import asyncio
import ssl
import sys
import time
from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

MAX_HEAD_BYTES = 16_384
MAX_LINE_BYTES = 4_096
MAX_EVENT_BYTES = 1_048_576
MAX_ERROR_BODY_BYTES = 65_536

CONNECT_FAILED = "connect"
CERTIFICATE_REFUSED = "certificate"
CONNECTION_CLOSED = "connection_closed"
TIMEOUT = "timeout"
BAD_RESPONSE = "bad_response"
ERROR_EVENT = "error_event"
NO_END = "stream_without_end"


class BadResponse(Exception):
    """The peer's bytes are not HTTP/1.1, not SSE, or longer than any sane server's."""


class ResponseHead(msgspec.Struct, frozen=True):
    """Status and fields, names in lower case; of repeated fields the last."""

    status: int
    headers: dict[bytes, bytes]
    keeps_alive: bool


def encode_request(method: str, path: str, host: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """Head and body of one request, ready to be written; content-length is added."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


class ResponseParser:
    """The bytes of one response, framed (RFC 9112 §6.3): strict, and cheap enough not to be what is measured.

    `head` is there once it was read, `is_complete` once the body ended; `surplus` is what came after it.
    """

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.surplus = b""
        self.is_complete = False
        self._data, self._position = b"", 0
        self._body: list[bytes] = []
        self._ends_with_connection = False
        self._steps = self._read()

    @property
    def has_started(self) -> bool:
        return self.head is not None or bool(self._data)

    def feed(self, data: bytes) -> bytes:
        """The body bytes that `data` brings.

        Raises:
            BadResponse: the peer cannot be understood from here on.
        """
        self._data, self._position = self._data[self._position :] + data, 0
        if next(self._steps, True):
            self.is_complete = True
            self.surplus += self._data[self._position :]
            self._position = len(self._data)
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def feed_eof(self) -> None:
        """The peer closed. Ends a body that has no other end.

        Raises:
            BadResponse: the body was to be longer.
        """
        if not self._ends_with_connection and not self.is_complete:
            raise BadResponse("the connection closed in the middle of the response")
        self.is_complete = True

    def _read(self) -> Iterator[None]:
        """The response from its first byte to its last; yields where it needs more bytes."""
        head = _parse_head((yield from self._until(b"\r\n\r\n", MAX_HEAD_BYTES, "head")))
        while head.status < 200:  # RFC 9110 §15.2: interim responses come before the final one
            head = _parse_head((yield from self._until(b"\r\n\r\n", MAX_HEAD_BYTES, "head")))
        self.head = head
        coding, length = head.headers.get(b"transfer-encoding"), head.headers.get(b"content-length")
        if head.status in (204, 304):
            return
        if coding is not None:
            if coding.lower() != b"chunked":
                raise BadResponse(f"unknown transfer coding {coding!r}")
            while size := _chunk_size((yield from self._until(b"\r\n", MAX_LINE_BYTES, "chunk size line"))):
                yield from self._take(size)
                if (yield from self._until(b"\r\n", 1, "chunk")):
                    raise BadResponse("a chunk is longer than its size line says")
            while (yield from self._until(b"\r\n", MAX_HEAD_BYTES, "trailer")):
                pass
        elif length is None:
            self._ends_with_connection = True
            yield from self._take(sys.maxsize)
        elif length.isdigit():
            yield from self._take(int(length))
        else:
            raise BadResponse(f"bad content-length {length!r}")

    def _until(self, mark: bytes, limit: int, name: str) -> Generator[None, None, bytes]:
        """What comes before the mark, which is passed over."""
        while (end := self._data.find(mark, self._position)) < 0:
            if len(self._data) - self._position > limit:
                raise BadResponse(f"the response's {name} is longer than {limit} bytes")
            yield
        start, self._position = self._position, end + len(mark)
        return self._data[start:end]

    def _take(self, size: int) -> Iterator[None]:
        """So many bytes of the body."""
        while True:
            piece = self._data[self._position : self._position + size]
            self._body.append(piece)
            self._position += len(piece)
            size -= len(piece)
            if not size:
                return
            yield


def _chunk_size(line: bytes) -> int:
    text = line.partition(b";")[0].strip()
    try:
        size = int(text, 16)
    except ValueError:
        size = -1
    if size < 0:
        raise BadResponse(f"bad chunk size {text[:20]!r}")
    return size


def _parse_head(data: bytes) -> ResponseHead:
    status_line, *lines = data.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not rest[:3].isdigit():
        raise BadResponse(f"not an HTTP/1 status line: {status_line[:60]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise BadResponse(f"not a header field: {line[:60]!r}")
        headers[name.lower()] = value.strip()
    connection = headers.get(b"connection", b"keep-alive" if version == b"HTTP/1.1" else b"close")
    return ResponseHead(int(rest[:3]), headers, b"close" not in connection.lower())


class SseParser:
    """The `data` of each server-sent event (WHATWG HTML §9.2.6). Names, ids and comments are passed over."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """
        Raises:
            BadResponse: an event longer than MAX_EVENT_BYTES.
        """
        if self._pending:
            data = self._pending + data
        held = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # half of a CRLF, perhaps
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        parts = data.split(b"\n\n")
        self._pending = parts.pop() + held
        if len(self._pending) > MAX_EVENT_BYTES:
            raise BadResponse(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for part in parts:
            if part.startswith(b"data: ") and b"\n" not in part:  # nearly all
                events.append(part[6:])
                continue
            fields = [line.partition(b":")[::2] for line in part.split(b"\n")]
            values = [value.removeprefix(b" ") for name, value in fields if name == b"data"]
            events += [b"\n".join(values)] if values else []
        return events


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.reasoning_content)


class _Choice(msgspec.Struct):
    delta: _Text | None = None  # chat
    text: str | None = None  # completions
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None  # of any form: it is only shown


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Exchange:
    """What became of one request. Times are of the loop's monotonic clock, in seconds.

    Args:
        intended_s: when it was to be sent; latencies count from here, however late it went out.
        num_tokens: of the output, as the server's usage says, or else the events that bore text.
        failure: None, or a kind: "http_503", "timeout", ...
    """

    intended_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    end_s: float = 0.0
    num_events: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    has_finish: bool = False
    failure: str | None = None
    message: str = ""

    def fail(self, kind: str, message: str) -> None:
        self.failure, self.message = kind, message[:300]


@dataclass(slots=True)
class Recorder:
    """What all exchanges of a run add up to. Eight bytes per streamed event, one array slot per request and latency."""

    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    inter_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_to_end_s: "array[float]" = field(default_factory=lambda: array("d"))
    send_delay_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_done: int = 0
    num_events: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_repeated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, exchange: Exchange) -> None:
        """Count a finished exchange; what a failed one streamed counts as tokens, its latencies do not."""
        self.num_events += exchange.num_events
        self.num_tokens += exchange.num_tokens
        self.num_prompt_tokens += exchange.num_prompt_tokens
        if exchange.sent_s:
            self.send_delay_s.append(exchange.sent_s - exchange.intended_s)
        if exchange.failure is not None:
            self.failures[exchange.failure] += 1
            self.examples.setdefault(exchange.failure, exchange.message)
            return
        self.num_done += 1
        if exchange.first_s is not None:
            self.ttft_s.append(exchange.first_s - exchange.intended_s)
        self.end_to_end_s.append(exchange.end_s - exchange.intended_s)


class Connection(asyncio.Protocol):
    """A kept connection: sends one request, reads its stream into the exchange and the recorder's gaps."""

    def __init__(self, pool: "ConnectionPool") -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._finished: asyncio.Future[None] | None = None
        self._parser = ResponseParser()
        self._sse: SseParser | None = None
        self._body = bytearray()  # of a response that is no stream
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_reusable = True

    @property
    def response(self) -> ResponseParser:
        return self._parser

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    async def perform(self, request: bytes, exchange: Exchange, timeout_s: float) -> None:
        """Send `request` and wait for the end of its answer. What goes wrong is written to the exchange."""
        assert self._transport is not None
        assert self._finished is None
        loop = asyncio.get_running_loop()
        self._exchange, self._parser, self._sse = exchange, ResponseParser(), None
        self._body.clear()
        self._finished = loop.create_future()
        timer = loop.call_later(timeout_s, self._break_off, TIMEOUT, f"not finished after {timeout_s:g} s")
        exchange.sent_s = time.monotonic()
        self._transport.write(request)
        try:
            await self._finished
        finally:
            timer.cancel()
            self._finished = self._exchange = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # bytes without a request
            self.close()
            return
        try:
            body = self._parser.feed(data)
            if body:
                self._take_body(body, exchange)
        except BadResponse as error:
            self._break_off(BAD_RESPONSE, str(error))
            return
        if self._parser.is_complete:
            self._end_response(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._pool.open.discard(self)
        self.lost.set_result(None)
        if self._exchange is None or self._finished is None or self._finished.done():
            return
        try:
            self._parser.feed_eof()
        except BadResponse as error:
            self._break_off(CONNECTION_CLOSED, str(error))
        else:
            self._end_response(self._exchange)

    def _take_body(self, body: bytes, exchange: Exchange) -> None:
        if self._sse is None:
            head = self._parser.head
            assert head is not None
            if not head.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                if len(self._body) + len(body) > MAX_ERROR_BODY_BYTES:
                    raise BadResponse(f"an answer that is no stream is longer than {MAX_ERROR_BODY_BYTES} bytes")
                self._body += body
                return
            self._sse = SseParser()
        now_s = time.monotonic()
        for event in self._sse.feed(body):
            if event != b"[DONE]":
                self._take_event(event, exchange, now_s)

    def _take_event(self, event: bytes, exchange: Exchange, now_s: float) -> None:
        try:
            chunk = _decode_chunk(event)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BadResponse(f"an event is not a chunk of chat or completions: {error}") from error
        if chunk.error is not None:
            exchange.fail(ERROR_EVENT, str(chunk.error))
        if chunk.usage is not None:
            exchange.num_prompt_tokens = chunk.usage.prompt_tokens
            exchange.num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                exchange.has_finish = True
            if choice.text or (choice.delta is not None and not choice.delta.is_empty()):
                if exchange.first_s is None:
                    exchange.first_s = now_s
                else:
                    self._pool.recorder.inter_token_s.append(now_s - exchange.last_s)
                exchange.last_s = now_s
                exchange.num_events += 1

    def _end_response(self, exchange: Exchange) -> None:
        head = self._parser.head
        assert head is not None
        if not head.keeps_alive or self._parser.surplus:
            self.close()
        if head.status != 200:
            exchange.fail(f"http_{head.status}", self._body.decode(errors="replace"))
        elif self._sse is not None and exchange.failure is None and not exchange.has_finish:
            exchange.fail(NO_END, "the stream ended without a finish_reason")
        self._finish(exchange)

    def _break_off(self, kind: str, message: str) -> None:
        if self._exchange is not None and self._exchange.failure is None:
            self._exchange.fail(kind, message)
        self.close()
        if self._exchange is not None:
            self._finish(self._exchange)

    def _finish(self, exchange: Exchange) -> None:
        exchange.end_s = time.monotonic()
        exchange.num_tokens = exchange.num_tokens or exchange.num_events
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)


@dataclass(slots=True)
class ConnectionPool:
    """Connections to one server, the one that was idle last first. As many are open as requests are at once."""

    host: str
    port: int
    recorder: Recorder
    timeout_s: float
    tls: ssl.SSLContext | None = None
    server_name: str | None = None  # with tls: that the certificate must be for
    idle: list[Connection] = field(default_factory=list)
    open: set[Connection] = field(default_factory=set)

    async def perform(self, request: bytes, exchange: Exchange) -> Connection | None:
        """Send over a kept connection or a new one; returns the one that was used, None when none could be made."""
        while True:
            is_kept = bool(self.idle)
            connection = self.idle.pop() if is_kept else await self._connect(exchange)
            if connection is None or not connection.is_reusable:
                if connection is None:
                    return None
                continue
            await connection.perform(request, exchange, self.timeout_s)
            if is_kept and exchange.failure == CONNECTION_CLOSED and not connection.response.has_started:
                exchange.failure = None  # RFC 9112 §9.3.1: closed while it was idle
                self.recorder.num_repeated += 1
                continue
            if connection.is_reusable:
                self.idle.append(connection)
            return connection

    async def close(self) -> None:
        """Close every connection and wait until the sockets are gone; exchanges under way fail."""
        for connection in self.open:
            connection.close()
        await asyncio.gather(*(connection.lost for connection in self.open))
        self.idle.clear()

    async def _connect(self, exchange: Exchange) -> Connection | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self.tls, server_hostname=self.server_name
                )
                return connection
        except ssl.SSLCertVerificationError as error:
            exchange.fail(CERTIFICATE_REFUSED, error.verify_message)
        except (OSError, TimeoutError) as error:
            exchange.fail(CONNECT_FAILED, str(error) or "timed out")
        exchange.end_s = time.monotonic()
        return None
