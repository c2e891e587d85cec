"""The limits that hold by default for HTTP/1.1, each kept and then passed by one: DESIGN's table, row by row.

Time is virtual, to the millisecond. What only a whole server knows (bodies, JSON) is in tests/e2e/test_http1_limits.py.
"""

import json
from collections.abc import Callable, Iterator

import pytest

from core.errors import ErrorKind, ServiceError
from server.connection_limits import ConnectionLimits
from server.messages import ResponseHead
from server.stream import HttpStream
from tests.server.fakes import MemoryServer, MemoryTransport

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
EMPTY = ((b"content-length", b"0"),)
OK = ResponseHead(200, EMPTY)
STATUSES = {ErrorKind.REQUEST_TIMEOUT: 408}
MOMENT_S = 0.001


@pytest.fixture
def server() -> Iterator[MemoryServer]:
    """The default limits, and a handler that wants the whole body."""

    async def read(stream: HttpStream) -> None:
        try:
            await stream.read_body(2**30)
        except ServiceError as error:
            stream.send_head(ResponseHead(STATUSES[error.kind], EMPTY))
        else:
            stream.send_head(OK)
        stream.end()

    server = MemoryServer(read, ConnectionLimits())
    yield server
    server.close()


def line_of(size: int) -> bytes:
    return (b"GET /" + b"a" * (size - len(b"GET / HTTP/1.1\r\n")) + b" HTTP/1.1\r\n") + HOST + b"\r\n"


def head_of(size: int) -> bytes:
    fill = size - len(GET) - len(b"X: \r\n")
    return GET[:-2] + b"X: " + b"a" * fill + b"\r\n\r\n"


def fields_of(count: int) -> bytes:
    return GET[:-2] + b"X: y\r\n" * (count - 1) + b"\r\n"


@pytest.mark.parametrize(
    ("head", "limit", "status"),
    [(line_of, 8 * 1024, 414), (head_of, 16 * 1024, 431), (fields_of, 100, 431)],
    ids=["request line", "head", "fields"],
)
@pytest.mark.parametrize("step", [1, 1000, 2**20])
def test_size_of_a_head(server: MemoryServer, head: Callable[[int], bytes], limit: int, status: int, step: int) -> None:
    def statuses(data: bytes) -> tuple[int, bool]:
        transport = server.exchange(*(data[start : start + step] for start in range(0, len(data), step)))
        return status_of(transport), transport.has_sent_eof

    assert statuses(head(limit)) == (200, False)
    assert statuses(head(limit + 1)) == (status, True)


def status_of(transport: MemoryTransport) -> int:
    """Of the only answer."""
    assert transport.received.count(b"HTTP/1.1 ") == 1
    return int(transport.received[9:12])


def code_of(transport: MemoryTransport) -> str:
    code: str = json.loads(transport.received.partition(b"\r\n\r\n")[2])["error"]["code"]
    return code


def test_time_for_a_head_is_absolute(server: MemoryServer) -> None:
    transport = server.connect()
    transport.feed(GET[:1])
    for start in range(1, 10):
        server.loop.advance(1)
        transport.feed(GET[start : start + 1])
    server.loop.advance(1 - MOMENT_S)
    assert transport.writes == []
    server.loop.advance(MOMENT_S)
    assert (status_of(transport), code_of(transport)) == (408, "request_timeout")
    assert transport.has_sent_eof


def test_head_that_comes_within_its_time_is_answered(server: MemoryServer) -> None:
    transport = server.exchange(GET[:-1])
    server.loop.advance(10 - MOMENT_S)
    transport.feed(GET[-1:])
    server.loop.settle()
    assert status_of(transport) == 200


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 30), (499, 30.998), (500, 31), (5_000, 40)])
def test_time_for_a_body_grows_by_a_second_each_500_bytes(server: MemoryServer, num_bytes: int, seconds: float) -> None:
    head = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 6000\r\n\r\n"
    transport = server.exchange(head + b"x" * num_bytes)
    server.loop.advance(seconds - MOMENT_S)
    assert transport.writes == []
    server.loop.advance(MOMENT_S)
    assert status_of(transport) == 408


@pytest.mark.parametrize("num_requests", [0, 1])
def test_idle_connection_is_closed_without_a_word(server: MemoryServer, num_requests: int) -> None:
    transport = server.exchange(GET * num_requests)
    answered = bytes(transport.received)
    server.loop.advance(75 - MOMENT_S)
    assert not transport.is_closing()
    server.loop.advance(MOMENT_S)
    assert transport.is_lost
    assert transport.received == answered


def test_connection_ends_with_its_thousandth_request(server: MemoryServer) -> None:
    transport = server.connect()
    for _ in range(999):
        transport.feed(GET)
        server.loop.settle()
    assert b"connection: close" not in transport.received
    assert not transport.is_closing()
    transport.feed(GET + GET)
    server.loop.settle()
    assert transport.received.count(b"HTTP/1.1 200 OK") == 1000
    assert transport.received.count(b"connection: close") == 1
    assert transport.has_sent_eof
