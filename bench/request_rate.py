"""Plain requests as fast as a server answers them: GET /health, a fixed number under way, over HTTP/1.1 or HTTP/2.

One process, blocking in epoll. It parses what it must to know that an answer is whole and is a 200, and replaces its
connections before any server would end them (NUM_PER_CONNECTION).
"""

import select
import socket
import time
from collections import deque
from dataclasses import dataclass

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


class _Connection:
    """A socket, and what is under way on it.

    Attributes:
        num_answered, num_failed: since the last take().
    """

    def __init__(self, port: int, num_at_once: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_answered = self.num_failed = 0
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
        out = self._answer(self._rest + data) + (self._requests() if goes_on else b"")
        if out:
            self.socket.sendall(out)
        return True

    def open(self) -> None:
        self.socket.sendall(self._requests())

    def _requests(self) -> bytes:
        """As many as may be begun."""
        num_new = min(self._num_at_once - self._num_open, NUM_PER_CONNECTION - self._num_begun)
        self._num_open += num_new
        self._num_begun += num_new
        return b"".join(self._request(self._num_begun - num_new + i) for i in range(num_new))

    def _ended(self, is_sound: bool) -> None:
        self._num_open -= 1
        self.num_answered += is_sound
        self.num_failed += not is_sound

    def _request(self, number: int) -> bytes:
        raise NotImplementedError

    def _answer(self, data: bytes) -> bytes:
        raise NotImplementedError


class _Http1(_Connection):
    _REQUEST = encode_request("GET", PATH, "127.0.0.1", {})

    def _request(self, number: int) -> bytes:
        return self._REQUEST

    def _answer(self, data: bytes) -> bytes:
        body = data.find(b"\r\n\r\n") + 4
        if body >= 4:
            name = data.lower().find(b"content-length:", 0, body)
            length = int(data[name + 15 : data.find(b"\r\n", name)])
            if len(data) >= body + length:
                self._ended(data.startswith(b"HTTP/1.1 200"))
                data = data[body + length :]
        self._rest = data
        return b""


class _Http2(_Connection):
    def __init__(self, port: int, num_at_once: int) -> None:
        super().__init__(port, num_at_once)
        self._decoder = hpack.Decoder()
        encoder = hpack.Encoder()
        encoder.header_table_size = 0  # so that every request is the same bytes
        fields = request_fields("GET", PATH)
        self.socket.sendall(PREFACE + OPENING_SETTINGS)
        self._opening = frame(HEADERS, END_STREAM | END_HEADERS, 1, encoder.encode(fields))
        self._block = encoder.encode(fields)
        self._failed: deque[int] = deque()

    def _request(self, number: int) -> bytes:
        return self._opening if not number else frame(HEADERS, END_STREAM | END_HEADERS, 2 * number + 1, self._block)

    def _answer(self, data: bytes) -> bytes:
        answer = b""
        position = 0
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == HEADERS and dict(self._decoder.decode(data[start:end], raw=True))[b":status"] != b"200":
                self._failed.append(stream_id)
            if kind == GOAWAY:
                self._num_begun = NUM_PER_CONNECTION
            if kind == RST_STREAM:
                self._ended(False)
            elif stream_id and flags & END_STREAM:
                self._ended(stream_id not in self._failed)
            elif not stream_id:
                answer += control_answer(kind, flags, data[start:end])
        self._rest = data[position:]
        return answer


def ask(load: RequestLoad) -> Came:
    """Keep requests under way for the time given."""
    poll = select.epoll()
    connections: dict[int, _Connection] = {}

    def connect() -> None:
        connection = _Http2(load.port, load.num_at_once) if load.is_http2 else _Http1(load.port, 1)
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
    connection = _Http1(port, 1)
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
            connection = _Http1(port, 1)
        time.sleep(PROBE_S)
    connection.socket.close()
    return found
