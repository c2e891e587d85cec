"""What tests of connections in memory share: handlers, requests, and what their clients read of the answers."""

import asyncio
import json
from collections.abc import Callable

import h11

from core.errors import ErrorKind, ServiceError
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer, MemoryTransport

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
STREAMED = ResponseHead(200, ((b"content-type", b"text/event-stream"),))
STATUSES = {ErrorKind.BODY_TOO_LARGE: 413, ErrorKind.REQUEST_TIMEOUT: 408}


def post(body: bytes, *lines: bytes, path: bytes = b"/") -> bytes:
    fields = [b"POST " + path + b" HTTP/1.1", b"Host: a", b"Content-Length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(fields) + body


def answer(stream: HttpStream, status: int, body: bytes) -> None:
    stream.send_head(ResponseHead(status, ((b"content-length", b"%d" % len(body)),)))
    stream.send(body)
    stream.end()


async def echo(stream: HttpStream) -> None:
    """Answer with path and body."""
    try:
        body = await stream.read_body(1000)
    except ServiceError as error:
        answer(stream, STATUSES[error.kind], error.message.encode())
    else:
        answer(stream, 200, stream.request.path.encode() + body)


async def stream_back(stream: HttpStream) -> None:
    """Answer with the body, in a stream of pieces."""
    body = await stream.read_body(10_000)
    stream.send_head(STREAMED)
    for start in range(0, len(body), 1000):
        stream.send(body[start : start + 1000])
        await asyncio.sleep(0.001)
    stream.end()


MIB = 1024 * 1024


class Hold:
    """A handler that starts a streamed answer and leaves the rest to the test."""

    def __init__(self) -> None:
        self.streams: list[HttpStream] = []
        self.told: list[str] = []
        self._done: list[asyncio.Future[None]] = []

    async def __call__(self, stream: HttpStream) -> None:
        await stream.read_body(1000)
        done = asyncio.get_running_loop().create_future()

        def on_disconnect() -> None:
            self.told.append("gone")
            done.set_result(None)

        stream.on_disconnect = on_disconnect
        stream.on_blocked = lambda: self.told.append("blocked")
        stream.on_unblocked = lambda: self.told.append("unblocked")
        stream.send_head(STREAMED)
        self.streams.append(stream)
        self._done.append(done)
        await done

    def end(self, index: int) -> None:
        """Complete the answer, and return from its handler."""
        self.streams[index].end()
        self._done[index].set_result(None)


Serve = Callable[..., MemoryServer]


def responses(received: bytes, num_requests: int = 1, method: str = "GET") -> list[tuple[int, bytes]]:
    """Status and body of each response, as h11's client reads them off one connection."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(received)
    found: list[tuple[int, bytes]] = []
    for _ in range(num_requests):
        client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            assert isinstance(event, h11.Response | h11.Data | h11.InformationalResponse), event
            if isinstance(event, h11.Response):
                found.append((event.status_code, b""))
            elif isinstance(event, h11.Data):
                found[-1] = (found[-1][0], found[-1][1] + event.data)
        if client.our_state is not h11.MUST_CLOSE:
            client.start_next_cycle()
    return found


def error_of(transport: MemoryTransport) -> tuple[int, str]:
    """Status and code of the one answer."""
    ((status, body),) = responses(bytes(transport.received))
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return status, error["code"]
