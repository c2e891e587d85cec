"""Plain requests as fast as a server answers them: GET /health, a fixed number under way, over HTTP/1.1 or HTTP/2.

One process, blocking in epoll. It parses what it must to know that an answer is whole and is a 200, and replaces its
connections before any server would end them (NUM_PER_CONNECTION).
"""

import select
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import hpack

from bench.load_run import CannotRun
from bench.reader import (
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    OPENING_SETTINGS,
    PREFACE,
    READ_BYTES,
    RST_STREAM,
    Came,
    control_answer,
    frame,
    frames,
    request_fields,
)
from bench.wire import encode_request

PATH = "/health"
PROBE_S = 0.004
NUM_PER_CONNECTION = 900  # steploop ends an HTTP/1.1 connection after 1,000 requests


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """So many requests under way at once: one on each HTTP/1.1 connection, or all on one HTTP/2 connection."""

    port: int
    is_http2: bool
    num_at_once: int
    duration_s: float


class _Answers(NamedTuple):
    """What a read brought.

    Args:
        num_sound, num_failed: answers that are whole.
        num_bytes: of what was read, that are done with.
        reply: to be sent.
        is_last: no more requests are taken.
    """

    num_sound: int
    num_failed: int
    num_bytes: int
    reply: bytes = b""
    is_last: bool = False


class _Speech(Protocol):
    """A protocol's bytes on one connection."""

    opening: bytes

    def request(self, number: int) -> bytes:
        """GET PATH; from 0, in their order."""
        ...

    def read(self, data: bytes) -> _Answers: ...


class _Connection:
    """A socket, and what is under way on it.

    Attributes:
        num_answered, num_failed: so far.
    """

    def __init__(self, port: int, num_at_once: int, speech: _Speech) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_answered = self.num_failed = 0
        self._speech = speech
        self._num_begun = 0
        self._num_open = 0
        self._rest = b""
        self._num_at_once = num_at_once

    @property
    def is_done(self) -> bool:
        return self._num_begun >= NUM_PER_CONNECTION and not self._num_open

    def receive(self, goes_on: bool = True) -> bool:
        """Read answers, and send the next requests. False: the server has closed."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            return False
        out = self._take(self._rest + data) + (self._requests() if goes_on else b"")
        if out:
            self.socket.sendall(out)
        return True

    def open(self) -> None:
        self.socket.sendall(self._speech.opening + self._requests())

    def _requests(self) -> bytes:
        """As many as may be begun."""
        num_new = min(self._num_at_once - self._num_open, NUM_PER_CONNECTION - self._num_begun)
        self._num_open += num_new
        self._num_begun += num_new
        return b"".join(self._speech.request(self._num_begun - num_new + i) for i in range(num_new))

    def _take(self, data: bytes) -> bytes:
        came = self._speech.read(data)
        self.num_answered += came.num_sound
        self.num_failed += came.num_failed
        self._num_open -= came.num_sound + came.num_failed
        if came.is_last:
            self._num_begun = NUM_PER_CONNECTION
        self._rest = data[came.num_bytes :]
        return came.reply


class _Http1:
    opening = b""
    _REQUEST = encode_request("GET", PATH, "127.0.0.1", {})

    def request(self, number: int) -> bytes:
        return self._REQUEST

    def read(self, data: bytes) -> _Answers:
        """One request is under way at a time, and its answer is all that comes."""
        body = data.find(b"\r\n\r\n") + 4
        if body >= 4:
            name = data.lower().find(b"content-length:", 0, body)
            end = body + int(data[name + 15 : data.find(b"\r\n", name)])
            if len(data) >= end:
                is_sound = data.startswith(b"HTTP/1.1 200")
                return _Answers(is_sound, not is_sound, end)
        return _Answers(0, 0, 0)


class _Http2:
    opening = PREFACE + OPENING_SETTINGS

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # so that every request is the same bytes
        fields = request_fields("GET", PATH)
        self._first = frame(HEADERS, END_STREAM | END_HEADERS, 1, encoder.encode(fields))
        self._block = encoder.encode(fields)
        self._failed: deque[int] = deque()

    def request(self, number: int) -> bytes:
        return self._first if not number else frame(HEADERS, END_STREAM | END_HEADERS, 2 * number + 1, self._block)

    def read(self, data: bytes) -> _Answers:
        reply = b""
        position = num_sound = num_failed = 0
        is_last = False
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == HEADERS and dict(self._decoder.decode(data[start:end], raw=True))[b":status"] != b"200":
                self._failed.append(stream_id)
            is_last |= kind == GOAWAY
            if kind == RST_STREAM:
                num_failed += 1
            elif stream_id and flags & END_STREAM:
                num_sound += stream_id not in self._failed
                num_failed += stream_id in self._failed
            elif not stream_id:
                reply += control_answer(kind, flags, data[start:end])
        return _Answers(num_sound, num_failed, position, reply, is_last)


def ask(load: RequestLoad) -> Came:
    """Keep requests under way for the time given."""
    poll = select.epoll()
    connections: dict[int, _Connection] = {}

    def connect() -> None:
        num_at_once = load.num_at_once if load.is_http2 else 1
        connection = _Connection(load.port, num_at_once, _Http2() if load.is_http2 else _Http1())
        connection.open()
        number = connection.socket.fileno()
        connections[number] = connection
        poll.register(number, select.EPOLLIN)

    num_answered = num_failed = 0
    start_s, cpu_start_s = time.monotonic(), time.process_time()
    try:
        for _ in range(1 if load.is_http2 else load.num_at_once):
            connect()
        while (duration_s := time.monotonic() - start_s) < load.duration_s:
            for number, _ in poll.poll(1.0):
                connection = connections[number]
                is_open = connection.receive()
                if not is_open or connection.is_done:
                    num_answered += connection.num_answered
                    num_failed += connection.num_failed + (not is_open)
                    poll.unregister(number)
                    connections.pop(number).socket.close()
                    connect()
        cpu_s = time.process_time() - cpu_start_s
    finally:
        poll.close()
        for connection in connections.values():
            num_answered += connection.num_answered
            num_failed += connection.num_failed
            connection.socket.close()
    return Came(num_answered, num_failed, duration_s, cpu_s / duration_s)


def latencies_s(port: int, duration_s: float) -> list[float]:
    """One request after the other, PROBE_S apart, each timed from its first byte out to its last byte in."""
    found: list[float] = []
    end_s = time.monotonic() + duration_s
    connection = _Connection(port, 1, _Http1())
    while time.monotonic() < end_s:
        num_answered = connection.num_answered
        start_s = time.monotonic()
        connection.open()
        while connection.num_answered == num_answered:
            if not connection.receive(goes_on=False):
                raise CannotRun("The server closed a connection in the middle.", "run it alone and look")
        found.append(time.monotonic() - start_s)
        if connection.is_done:
            connection.socket.close()
            connection = _Connection(port, 1, _Http1())
        time.sleep(PROBE_S)
    connection.socket.close()
    return found
