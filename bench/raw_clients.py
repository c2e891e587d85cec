"""Clients that send prepared bytes and only count what comes back, so that a bench measures the server and not them.

`run` opens streams, or keeps plain requests under way. It reads streams every POLL_S, as a peer behind a network does:
a client that sleeps in epoll would cost the server a wake-up of a local process per token. It counts events and does
not parse them; a stream has failed that ends without its end mark, or with too few or too many events.
"""

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import hpack
import msgspec

from bench.client import encode_request
from bench.kit import MODEL
from server.wire.http2_frames import DATA, GOAWAY, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, WINDOW_UPDATE

POLL_S = 0.002
READ_BYTES = 1 << 18
MAX_OTHER_EVENTS = 5  # the role, the finish reason, the usage, the end mark
NUM_PER_CONNECTION = 900  # steploop ends an HTTP/1.1 connection after 1,000 requests
CHAT_PATH, HEALTH_PATH = "/v1/chat/completions", "/health"
STREAM_END, HEALTH_END = b"data: [DONE]\n\n", b'{"status":"ok"}'
LAST_CHUNK = b"0\r\n\r\n"

END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
HEADER_BYTES = 9
MAX_WINDOW = 2**31 - 1


def http1_request(method: str, path: str, body: bytes = b"") -> bytes:
    """A request with a body of JSON."""
    return encode_request(method, path, "127.0.0.1", {"content-type": "application/json"}, body)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    """RFC 9113 §4.1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


# What a client sends first: SETTINGS_ENABLE_PUSH 0, and stream and connection windows that never fill up
_SETTINGS = b"\0\2" + bytes(4) + b"\0\4" + MAX_WINDOW.to_bytes(4, "big")
OPENING = PREFACE + frame(SETTINGS, _SETTINGS) + frame(WINDOW_UPDATE, (MAX_WINDOW - 65_535).to_bytes(4, "big"))


def request_head(method: str, path: str) -> bytes:
    """A header block that is the same on every connection: it adds nothing to the compression table."""
    fields = [(":method", method), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path)]
    fields += [("content-type", "application/json")] if method == "POST" else []
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(name, value) for name, value in fields])


def http2_request(stream_id: int, head: bytes, body: bytes = b"") -> bytes:
    """A whole request: the head from request_head, the body in one frame."""
    if not body:
        return frame(HEADERS, head, END_HEADERS | END_STREAM, stream_id)
    return frame(HEADERS, head, END_HEADERS, stream_id) + frame(DATA, body, END_STREAM, stream_id)


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


class Came(msgspec.Struct, frozen=True):
    """What came back.

    Args:
        num_done: tokens of streams, or answered plain requests.
        num_failed: streams, or plain requests.
        client_cpu: share of one core that this client used: near 1, it was the bottleneck.
    """

    num_done: int
    num_failed: int
    duration_s: float
    client_cpu: float


@dataclass(frozen=True, slots=True)
class Load:
    """Streams that each run once, or plain requests of which a number is always under way.

    Args:
        num_streams: at once, spread evenly over the connections; on HTTP/1.1 one per connection.
        num_tokens: of each stream; 0: GET /health instead, for duration_s.
        stall_s: without a byte from any stream: those that have not ended have failed.
    """

    port: int
    is_http2: bool
    num_connections: int
    num_streams: int
    num_tokens: int = 0
    duration_s: float = 0.0
    stall_s: float = 5.0

    @property
    def body(self) -> bytes:
        if not self.num_tokens:
            return b""
        fields = {"model": MODEL, "max_tokens": self.num_tokens, "stream": True, "ignore_eos": True}
        return json.dumps(fields | {"messages": [{"role": "user", "content": "Say something."}]}).encode()


class _Answer:
    """Counts the events of one answer and keeps its tail."""

    __slots__ = ("num_events", "tail")

    def __init__(self) -> None:
        self.num_events = 0
        self.tail = b""

    def feed(self, data: bytes) -> None:
        if self.tail[-1:] == b"\n" and data[:1] == b"\n":
            self.num_events += 1  # the blank line was cut in two
        self.num_events += data.count(b"\n\n")
        self.tail = data[-64:] if len(data) >= 64 else (self.tail + data)[-64:]


class _Connection:
    """One socket and the answers under way on it.

    Attributes:
        num_tokens, num_sound, num_failed: so far; num_sound counts whole answers.
    """

    def __init__(self, load: Load) -> None:
        self.socket = socket.create_connection(("127.0.0.1", load.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.num_tokens = self.num_sound = self.num_failed = 0
        self._load, self._body, self._rest = load, load.body, b""
        self._num_at_once = load.num_streams // load.num_connections
        self._most = self._num_at_once if load.num_tokens else NUM_PER_CONNECTION
        self._num_begun = 0
        self._open: dict[int, _Answer] = {}  # by stream id
        self._end = LAST_CHUNK if load.num_tokens else HEALTH_END  # of an answer over HTTP/1.1
        if load.num_tokens:
            self._http1, self._head = http1_request("POST", CHAT_PATH, self._body), request_head("POST", CHAT_PATH)
        else:
            self._http1 = encode_request("GET", HEALTH_PATH, "127.0.0.1", {})
            self._head = request_head("GET", HEALTH_PATH)
        self.socket.sendall((OPENING if load.is_http2 else b"") + self._requests())

    @property
    def is_done(self) -> bool:
        return self._num_begun >= self._most and not self._open

    def receive(self) -> bool:
        """Read, and send what that calls for. False: the server has closed."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            return False
        reply = self._read_http2(self._rest + data) if self._load.is_http2 else self._read_http1(data)
        if out := reply + self._requests():
            self.socket.sendall(out)
        return True

    def close(self) -> None:
        """Answers that have not ended have failed, unless they are plain requests that the time cut off."""
        for stream_id in list(self._open) if self._load.num_tokens else ():
            self._finish(stream_id)
        self.socket.close()

    def _requests(self) -> bytes:
        """As many new ones as may be begun."""
        requests = b""
        while len(self._open) < self._num_at_once and self._num_begun < self._most:
            stream_id = 2 * self._num_begun + 1
            self._open[stream_id] = _Answer()
            self._num_begun += 1
            requests += http2_request(stream_id, self._head, self._body) if self._load.is_http2 else self._http1
        return requests

    def _read_http1(self, data: bytes) -> bytes:
        ((stream_id, answer),) = self._open.items()
        answer.feed(data)
        if answer.tail.endswith(self._end):
            self._finish(stream_id)
        return b""

    def _read_http2(self, data: bytes) -> bytes:
        """Returns the control frames to answer with."""
        reply, position = b"", 0
        for kind, flags, stream_id, start, end in frames(data):
            position = end
            if kind == DATA:
                self._open[stream_id].feed(data[start:end])
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self._finish(stream_id)
            elif kind == GOAWAY:
                self._num_begun = self._most
            elif kind in (SETTINGS, PING) and not flags & ACK:
                reply += frame(kind, data[start:end] if kind == PING else b"", ACK)
        self._rest = data[position:]
        return reply

    def _finish(self, stream_id: int) -> None:
        answer, num_wanted = self._open.pop(stream_id), self._load.num_tokens
        is_sound = (STREAM_END if num_wanted else HEALTH_END) in answer.tail
        if num_wanted:
            is_sound &= num_wanted <= answer.num_events <= num_wanted + MAX_OTHER_EVENTS
            self.num_tokens += min(answer.num_events, num_wanted)
        self.num_sound += is_sound
        self.num_failed += not is_sound


def run(load: Load) -> Came:
    """Read all streams to their ends, or keep plain requests under way for the time given."""
    poll, connections, ended = select.epoll(), dict[int, _Connection](), list[_Connection]()

    def connect() -> None:
        connection = _Connection(load)
        connections[connection.socket.fileno()] = connection
        poll.register(connection.socket.fileno(), select.EPOLLIN)

    start_s, cpu_start_s = time.monotonic(), time.process_time()
    last_s = start_s
    try:
        for _ in range(load.num_connections):
            connect()
        while connections and time.monotonic() < (
            last_s + load.stall_s if load.num_tokens else start_s + load.duration_s
        ):
            time.sleep(POLL_S if load.num_tokens else 0.0)
            for number, _ in poll.poll(0.0 if load.num_tokens else 0.1):
                is_open, last_s = connections[number].receive(), time.monotonic()
                if is_open and not connections[number].is_done:
                    continue
                poll.unregister(number)
                ended.append(connections.pop(number))
                ended[-1].close()
                if not load.num_tokens:
                    ended[-1].num_failed += not is_open
                    connect()
        duration_s, cpu_s = last_s - start_s, time.process_time() - cpu_start_s
    finally:
        poll.close()
        ended += connections.values()
        for connection in connections.values():
            connection.close()
    num_done = sum(one.num_tokens if load.num_tokens else one.num_sound for one in ended)
    return Came(num_done, sum(one.num_failed for one in ended), duration_s, cpu_s / duration_s)
