"""Clients that send prepared bytes and do next to nothing with what comes, so that what is measured is the server.

`drain` reads streams. It looks at its sockets every POLL_S and reads what is there: a peer behind a network costs a
server no wake-up of a local process per token, and a client that sleeps in epoll would. Events are counted, not parsed;
a stream that ends without its end mark, or with too few or too many events, has failed. `ask` sends GET /health with a
fixed number under way, and replaces its connections before any server would end them. HTTP/2 is RFC 9113's frames.
"""

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import hpack
import msgspec

from bench.client import ResponseParser, encode_request
from bench.kit import MODEL
from bench.load import CannotRun

POLL_S = 0.002
READ_BYTES = 1 << 18
MAX_OTHER_EVENTS = 5  # the role, the finish reason, the usage, the end mark
PROBE_S = 0.004
NUM_PER_CONNECTION = 900  # steploop ends an HTTP/1.1 connection after 1,000 requests
CHAT_PATH, HEALTH_PATH = "/v1/chat/completions", "/health"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
REFUSED_STREAM, CANCEL = 7, 8  # error codes
HEADER_BYTES = 9
MAX_STREAM_ID = MAX_WINDOW = 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_EVENT_END = b"\n\n"
_END_MARK = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


def http1_request(method: str, path: str, body: bytes = b"") -> bytes:
    """A request with a body of JSON."""
    return encode_request(method, path, "127.0.0.1", {"content-type": "application/json"}, body)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    """RFC 9113 §4.1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


# What a client says first: SETTINGS_ENABLE_PUSH 0, and windows, each stream's and the connection's, that never fill up
_SETTINGS = b"\0\2" + bytes(4) + b"\0\4" + MAX_WINDOW.to_bytes(4, "big")
OPENING = PREFACE + frame(SETTINGS, _SETTINGS) + frame(WINDOW_UPDATE, (MAX_WINDOW - 65_535).to_bytes(4, "big"))


def request_head(method: str, path: str) -> bytes:
    """A header block that is the same on every connection: it puts nothing into its table."""
    fields = [(":method", method), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path)]
    fields += [("content-type", "application/json")] if method == "POST" else []
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields])


def http2_request(stream_id: int, head: bytes, body: bytes = b"") -> bytes:
    """A whole request: the head from request_head, the body in one frame."""
    if not body:
        return frame(HEADERS, head, END_HEADERS | END_STREAM, stream_id)
    return frame(HEADERS, head, END_HEADERS, stream_id) + frame(DATA, body, END_STREAM, stream_id)


def frames(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int, int]]:
    """The whole frames in `data`: type, flags, stream, and where the payload begins and ends."""
    position, size = 0, len(data)
    while position + HEADER_BYTES <= size:
        start = position + HEADER_BYTES
        end = start + int.from_bytes(data[position : position + 3], "big")
        if end > size:
            return
        yield data[position + 3], data[position + 4], int.from_bytes(data[position + 5 : start], "big"), start, end
        position = end


def control_answer(kind: int, flags: int, payload: bytes) -> bytes:
    """What a control frame wants to be answered with."""
    if kind not in (SETTINGS, PING) or flags & ACK:
        return b""
    return frame(kind, payload if kind == PING else b"", ACK)


class Came(msgspec.Struct, frozen=True):
    """What came.

    Args:
        num_done: tokens that came, or requests that were answered.
        num_failed: streams, or requests.
        client_cpu: share of one core that this client used: near 1, it was the bottleneck.
    """

    num_done: int
    num_failed: int
    duration_s: float
    client_cpu: float


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """So many streams at once, shared evenly by the connections. HTTP/1.1 has as many connections as streams."""

    port: int
    is_http2: bool
    num_connections: int
    num_streams: int
    num_tokens: int  # of each stream
    stall_s: float = 5.0  # without a byte from any of them: those that have not ended have failed

    @property
    def body(self) -> bytes:
        messages = [{"role": "user", "content": "Say something."}]
        fields = {"model": MODEL, "max_tokens": self.num_tokens, "stream": True, "ignore_eos": True}
        return json.dumps(fields | {"messages": messages}).encode()


class _Stream:
    """One stream's events."""

    __slots__ = ("is_complete", "num_events", "tail")

    def __init__(self) -> None:
        self.num_events = 0
        self.is_complete = False
        self.tail = b""

    def feed(self, data: bytes) -> None:
        if self.tail[-1:] == b"\n" and data[:1] == b"\n":
            self.num_events += 1  # its end was cut in two
        self.num_events += data.count(_EVENT_END)
        self.tail = data[-64:] if len(data) >= 64 else (self.tail + data)[-64:]

    def end(self) -> None:
        self.is_complete = _END_MARK in self.tail


class _Http1Streams:
    """One stream on its connection."""

    def __init__(self, load: StreamLoad) -> None:
        self.opening = http1_request("POST", CHAT_PATH, load.body)
        self.streams = [_Stream()]

    def receive(self, data: bytes) -> bytes:
        """What there is to answer."""
        (stream,) = self.streams
        stream.feed(data)
        if stream.tail.endswith(_LAST_CHUNK):
            stream.end()
        return b""

    @property
    def is_done(self) -> bool:
        return self.streams[0].is_complete


class _Http2Streams:
    """Many streams on one connection, whose windows never shut."""

    def __init__(self, load: StreamLoad) -> None:
        self._by_id = {2 * i + 1: _Stream() for i in range(load.num_streams // load.num_connections)}
        head, body = request_head("POST", CHAT_PATH), load.body
        self.opening = OPENING + b"".join(http2_request(stream_id, head, body) for stream_id in self._by_id)
        self.streams = list(self._by_id.values())
        self._num_open = len(self.streams)
        self._rest = b""

    def receive(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
        answer, position = b"", 0
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == DATA:
                self._by_id[stream_id].feed(data[start:end])
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self._by_id[stream_id].end()
                self._num_open -= 1
            elif kind == RST_STREAM:
                self._num_open -= 1
            elif not stream_id:
                answer += control_answer(kind, flags, data[start:end])
        self._rest = data[position:]
        return answer

    @property
    def is_done(self) -> bool:
        return not self._num_open


def drain(load: StreamLoad) -> Came:
    """Open the streams and read them to their ends."""
    clients: dict[int, tuple[_Http1Streams | _Http2Streams, socket.socket]] = {}
    poll = select.epoll()
    start_s, cpu_start_s = time.monotonic(), time.process_time()
    try:
        for _ in range(load.num_connections):
            client = _Http2Streams(load) if load.is_http2 else _Http1Streams(load)
            connection = socket.create_connection(("127.0.0.1", load.port))
            connection.sendall(client.opening)
            connection.setblocking(False)
            clients[connection.fileno()] = client, connection
            poll.register(connection.fileno(), select.EPOLLIN)
        num_open, last_s = len(clients), time.monotonic()
        while num_open and time.monotonic() < last_s + load.stall_s:
            time.sleep(POLL_S)
            for number, _ in poll.poll(0):
                client, connection = clients[number]
                data = connection.recv(READ_BYTES)
                last_s = time.monotonic()
                if answer := client.receive(data):
                    connection.sendall(answer)
                if not data or client.is_done:
                    poll.unregister(number)
                    num_open -= 1
        cpu_s = time.process_time() - cpu_start_s
    finally:
        poll.close()
        for _, connection in clients.values():
            connection.close()
    streams = [stream for client, _ in clients.values() for stream in client.streams]
    most = load.num_tokens + MAX_OTHER_EVENTS
    sound = [stream for stream in streams if stream.is_complete and load.num_tokens <= stream.num_events <= most]
    num_tokens = sum(min(stream.num_events, load.num_tokens) for stream in streams)
    return Came(num_tokens, len(streams) - len(sound), last_s - start_s, cpu_s / (last_s - start_s))


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """So many requests under way at once: one on each HTTP/1.1 connection, or all on one HTTP/2 connection."""

    port: int
    is_http2: bool
    num_at_once: int
    duration_s: float


class _Answers(NamedTuple):
    """What a read brought: whole answers, what is to be sent in return, and whether no more requests are taken."""

    num_sound: int = 0
    num_failed: int = 0
    reply: bytes = b""
    is_last: bool = False


class _Http1Requests:
    """One request is under way at a time, and its answer is all that comes."""

    opening = b""
    _REQUEST = encode_request("GET", HEALTH_PATH, "127.0.0.1", {})

    def __init__(self) -> None:
        self._parser = ResponseParser()

    def request(self, number: int) -> bytes:
        return self._REQUEST

    def read(self, data: bytes) -> _Answers:
        self._parser.feed(data)
        if not self._parser.is_complete or self._parser.head is None:
            return _Answers()
        is_sound = self._parser.head.status == 200
        self._parser = ResponseParser()
        return _Answers(is_sound, not is_sound)


class _Http2Requests:
    opening = OPENING
    _HEAD = request_head("GET", HEALTH_PATH)

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._rest = b""
        self._failed: set[int] = set()

    def request(self, number: int) -> bytes:
        return http2_request(2 * number + 1, self._HEAD)

    def read(self, data: bytes) -> _Answers:
        data = self._rest + data
        reply, is_last = b"", False
        position = num_sound = num_failed = 0
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == HEADERS and dict(self._decoder.decode(data[start:end], raw=True))[b":status"] != b"200":
                self._failed.add(stream_id)
            is_last |= kind == GOAWAY
            if kind == RST_STREAM:
                num_failed += 1
            elif stream_id and flags & END_STREAM:
                num_sound += stream_id not in self._failed
                num_failed += stream_id in self._failed
            elif not stream_id:
                reply += control_answer(kind, flags, data[start:end])
        self._rest = data[position:]
        return _Answers(num_sound, num_failed, reply, is_last)


class _Connection:
    """A socket, and what is under way on it.

    Attributes:
        num_answered, num_failed: so far.
    """

    def __init__(self, port: int, num_at_once: int, speech: _Http1Requests | _Http2Requests) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_answered = self.num_failed = 0
        self._speech, self._num_at_once = speech, num_at_once
        self._num_begun = self._num_open = 0

    @property
    def is_done(self) -> bool:
        return self._num_begun >= NUM_PER_CONNECTION and not self._num_open

    def open(self) -> None:
        self.socket.sendall(self._speech.opening + self._requests())

    def receive(self, goes_on: bool = True) -> bool:
        """Read answers, and send the next requests. False: the server has closed."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            return False
        came = self._speech.read(data)
        self.num_answered += came.num_sound
        self.num_failed += came.num_failed
        self._num_open -= came.num_sound + came.num_failed
        if came.is_last:
            self._num_begun = NUM_PER_CONNECTION
        if out := came.reply + (self._requests() if goes_on else b""):
            self.socket.sendall(out)
        return True

    def _requests(self) -> bytes:
        """As many as may be begun."""
        first = self._num_begun
        num_new = min(self._num_at_once - self._num_open, NUM_PER_CONNECTION - first)
        self._num_open += num_new
        self._num_begun += num_new
        return b"".join(map(self._speech.request, range(first, first + num_new)))


def ask(load: RequestLoad) -> Came:
    """Keep requests under way for the time given."""
    poll = select.epoll()
    connections: dict[int, _Connection] = {}
    ended: list[_Connection] = []
    num_cut = 0

    def connect() -> None:
        speech, num_at_once = (_Http2Requests(), load.num_at_once) if load.is_http2 else (_Http1Requests(), 1)
        connection = _Connection(load.port, num_at_once, speech)
        connection.open()
        connections[connection.socket.fileno()] = connection
        poll.register(connection.socket.fileno(), select.EPOLLIN)

    start_s, cpu_start_s = time.monotonic(), time.process_time()
    try:
        for _ in range(1 if load.is_http2 else load.num_at_once):
            connect()
        while (duration_s := time.monotonic() - start_s) < load.duration_s:
            for number, _ in poll.poll(1.0):
                is_open = connections[number].receive()
                if not is_open or connections[number].is_done:
                    num_cut += not is_open
                    poll.unregister(number)
                    ended.append(connections.pop(number))
                    ended[-1].socket.close()
                    connect()
        cpu_s = time.process_time() - cpu_start_s
    finally:
        poll.close()
        ended += connections.values()
        for connection in connections.values():
            connection.socket.close()
    num_answered = sum(connection.num_answered for connection in ended)
    num_failed = num_cut + sum(connection.num_failed for connection in ended)
    return Came(num_answered, num_failed, duration_s, cpu_s / duration_s)


def latencies_s(port: int, duration_s: float) -> list[float]:
    """One request after the other, PROBE_S apart, each timed from its first byte out to its last byte in."""
    found: list[float] = []
    end_s = time.monotonic() + duration_s
    connection = _Connection(port, 1, _Http1Requests())
    while time.monotonic() < end_s:
        num_answered, start_s = connection.num_answered, time.monotonic()
        connection.open()
        while connection.num_answered == num_answered:
            if not connection.receive(goes_on=False):
                raise CannotRun("The server closed a connection in the middle.", "run it alone and look")
        found.append(time.monotonic() - start_s)
        if connection.is_done:
            connection.socket.close()
            connection = _Connection(port, 1, _Http1Requests())
        time.sleep(PROBE_S)
    connection.socket.close()
    return found
