"""A client that reads streams and does next to nothing with them, so that what is measured is the server.

It looks at its sockets every POLL_S and reads what is there: a peer behind a network costs a server no wake-up of a
local process per token, and a client that sleeps in epoll would. Every server is read in this one way. Events are
counted, not parsed; a stream that ends without its end mark, or with too few or too many events, has failed.
"""

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import hpack
import msgspec

from bench.peer import MODEL
from bench.wire import encode_request

POLL_S = 0.002
READ_BYTES = 1 << 18
MAX_OTHER_EVENTS = 5  # the role, the finish reason, the usage, the end mark
MAX_WINDOW = 2**31 - 1

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
HEADER_BYTES = 9

_EVENT_END = b"\n\n"
_END_MARK = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """So many streams at once, shared evenly by the connections. HTTP/1.1 has as many connections as streams."""

    port: int
    is_http2: bool
    num_connections: int
    num_streams: int
    num_tokens: int  # of each stream
    stall_s: float = 5.0  # without a byte from any of them: those that have not ended have failed


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

    @property
    def has_end_mark(self) -> bool:
        return _END_MARK in self.tail


class Client(Protocol):
    """One connection's side. `streams` are those that it carries."""

    streams: list[_Stream]

    def opening(self) -> bytes: ...

    def receive(self, data: bytes) -> bytes:
        """What there is to answer."""
        ...

    @property
    def is_done(self) -> bool: ...


class Http1Client:
    """One stream on its connection."""

    def __init__(self, load: StreamLoad) -> None:
        stream = _Stream()
        self.streams = [stream]
        self._stream = stream
        self._load = load

    def opening(self) -> bytes:
        headers = {"content-type": "application/json"}
        return encode_request("POST", "/v1/chat/completions", "127.0.0.1", headers, _body(self._load))

    def receive(self, data: bytes) -> bytes:
        stream = self._stream
        stream.feed(data)
        if data.endswith(_LAST_CHUNK) or stream.tail.endswith(_LAST_CHUNK):
            stream.is_complete = stream.has_end_mark
        return b""

    @property
    def is_done(self) -> bool:
        return self._stream.is_complete


class Http2Client:
    """Many streams on one connection, whose windows never shut."""

    def __init__(self, load: StreamLoad) -> None:
        self._load = load
        self._by_id = {2 * i + 1: _Stream() for i in range(load.num_streams // load.num_connections)}
        self.streams = list(self._by_id.values())
        self._num_open = len(self.streams)
        self._rest = b""

    def opening(self) -> bytes:
        encoder = hpack.Encoder()
        body = _body(self._load)
        out = [PREFACE, OPENING_SETTINGS]
        for stream_id in self._by_id:
            out.append(frame(HEADERS, END_HEADERS, stream_id, encoder.encode(request_fields("POST", CHAT_PATH))))
            out.append(frame(DATA, END_STREAM, stream_id, body))
        return b"".join(out)

    def receive(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
        answer = b""
        position = 0
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == DATA:
                self._by_id[stream_id].feed(data[start:end])
                if flags & END_STREAM:
                    self._end(stream_id)
            elif kind == HEADERS and flags & END_STREAM:  # trailers
                self._end(stream_id)
            elif kind == RST_STREAM:
                self._num_open -= 1
            else:
                answer += control_answer(kind, flags, data[start:end])
        self._rest = data[position:]
        return answer

    def _end(self, stream_id: int) -> None:
        stream = self._by_id[stream_id]
        stream.is_complete = stream.has_end_mark
        self._num_open -= 1

    @property
    def is_done(self) -> bool:
        return not self._num_open


CHAT_PATH = "/v1/chat/completions"


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """RFC 9113 §4.1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


# SETTINGS_ENABLE_PUSH 0, SETTINGS_INITIAL_WINDOW_SIZE as large as it may be, and the connection's window likewise
OPENING_SETTINGS = frame(SETTINGS, 0, 0, b"\0\2" + bytes(4) + b"\0\4" + MAX_WINDOW.to_bytes(4, "big")) + frame(
    WINDOW_UPDATE, 0, 0, (MAX_WINDOW - 65_535).to_bytes(4, "big")
)


def frames(data: bytes) -> Iterator[tuple[int, int, int, int, int]]:
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
    if kind == SETTINGS and not flags & ACK:
        return frame(SETTINGS, ACK, 0, b"")
    if kind == PING and not flags & ACK:
        return frame(PING, ACK, 0, payload)
    return b""


def request_fields(method: str, path: str) -> list[tuple[str, str]]:
    """A request's field section."""
    pseudo = [(":method", method), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path)]
    return pseudo + ([("content-type", "application/json")] if method == "POST" else [])


def _body(load: StreamLoad) -> bytes:
    fields = {
        "model": MODEL,
        "max_tokens": load.num_tokens,
        "stream": True,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Say something."}],
    }
    return json.dumps(fields).encode()


def drain(load: StreamLoad) -> Came:
    """Open the streams and read them to their ends."""
    clients: dict[int, Client] = {}
    sockets: dict[int, socket.socket] = {}
    poll = select.epoll()
    start_s, cpu_start_s = time.monotonic(), time.process_time()
    try:
        for _ in range(load.num_connections):
            client: Client = Http2Client(load) if load.is_http2 else Http1Client(load)
            connection = socket.create_connection(("127.0.0.1", load.port))
            connection.sendall(client.opening())
            connection.setblocking(False)
            clients[connection.fileno()], sockets[connection.fileno()] = client, connection
            poll.register(connection.fileno(), select.EPOLLIN)
        duration_s = _read_all(poll, clients, sockets, load.stall_s) - start_s
        cpu_s = time.process_time() - cpu_start_s
    finally:
        poll.close()
        for connection in sockets.values():
            connection.close()
    streams = [stream for client in clients.values() for stream in client.streams]
    most = load.num_tokens + MAX_OTHER_EVENTS
    sound = [stream for stream in streams if stream.is_complete and load.num_tokens <= stream.num_events <= most]
    return Came(
        num_done=sum(min(stream.num_events, load.num_tokens) for stream in streams),
        num_failed=len(streams) - len(sound),
        duration_s=duration_s,
        client_cpu=cpu_s / duration_s,
    )


def _read_all(
    poll: select.epoll, clients: dict[int, Client], sockets: dict[int, socket.socket], stall_s: float
) -> float:
    """Until all have ended, or nothing comes. Returns when the last bytes came."""
    num_open = len(clients)
    last_s = time.monotonic()
    while num_open and time.monotonic() < last_s + stall_s:
        time.sleep(POLL_S)
        for number, _ in poll.poll(0):
            client, connection = clients[number], sockets[number]
            data = connection.recv(READ_BYTES)
            last_s = time.monotonic()
            answer = client.receive(data)
            if answer:
                connection.sendall(answer)
            if not data or client.is_done:
                poll.unregister(number)
                num_open -= 1
    return last_s
