"""The real connection on a virtual-time loop and a network in memory."""

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ErrorKind, ServiceError
from server.listening.refusals import SHUTDOWN
from server.wire.connection_limits import ConnectionLimits
from server.wire.frame_gate import PREFACE
from server.wire.messages import ResponseHead
from server.wire.stream import HttpStream
from tests.server.fakes import PEER, MemoryServer, MemoryTransport

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


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[MemoryServer] = []

    def start(handler: Callable[[HttpStream], object], limits: ConnectionLimits | None = None) -> MemoryServer:
        servers.append(MemoryServer(handler, limits))  # type: ignore[arg-type] # any handler, also a failing one
        return servers[-1]

    yield start
    for server in servers:
        server.close()


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


def test_kept_alive_connection_serves_one_after_the_other(serve: Serve) -> None:
    server = serve(echo)
    transport = server.exchange(post(b"one"), post(b"two"), GET)
    assert responses(bytes(transport.received), 3) == [(200, b"/one"), (200, b"/two"), (200, b"/")]
    assert len(transport.writes) == 3
    assert not transport.is_lost


def test_pipelined_requests_are_answered_in_order_one_at_a_time(serve: Serve) -> None:
    num_running = 0

    async def handler(stream: HttpStream) -> None:
        nonlocal num_running
        assert num_running == 0
        num_running += 1
        await asyncio.sleep(10 - stream.request.stream_id)  # virtual: the later would be the faster
        num_running -= 1
        answer(stream, 200, stream.request.path.encode())

    server = serve(handler)
    transport = server.exchange(b"".join(post(b"x" * 10, path=b"/%d" % n) for n in range(5)))
    server.loop.advance(60)
    assert responses(bytes(transport.received), 5) == [(200, b"/%d" % n) for n in range(5)]


def test_requests_pipelined_up_to_the_limit_are_answered_and_past_it_the_answer_is_the_last(serve: Serve) -> None:
    for num_past in (0, 1):
        hold = Hold()
        server = serve(hold)
        transport = server.exchange(GET, (GET * 3000)[: 64 * 1024 + num_past])
        assert not transport.is_reading_paused
        hold.end(0)
        server.loop.settle()
        assert len(hold.streams) == 2 - num_past
        assert transport.has_sent_eof == bool(num_past)
        assert b"0\r\n\r\n" in transport.received


def test_pipelined_flood_is_thrown_away_and_ends_the_connection(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET, *[bytes(MIB)] * 16)
    assert hold.told == []
    transport.feed(b"x")
    server.loop.settle()
    assert transport.was_aborted
    assert hold.told == ["gone"]


@pytest.mark.parametrize("num_bytes", [0, 20_000, 200_000])
def test_end_of_a_peer_that_has_pipelined_is_seen(serve: Serve, num_bytes: int) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET, b"x" * num_bytes)
    transport.feed_eof()
    server.loop.settle()
    assert hold.told == ["gone"]
    assert transport.is_lost


def test_pipelined_answers_wait_for_a_peer_that_does_not_read(serve: Serve) -> None:
    served: list[int] = []

    async def handler(stream: HttpStream) -> None:
        served.append(stream.request.stream_id)
        answer(stream, 200, b"x" * 20_000)

    server = serve(handler)
    transport = server.connect(peer_reads=False)
    transport.feed(GET * 3)
    server.loop.settle()
    assert served == [1]
    transport.peer_reads = True
    transport.peer_read()
    server.loop.settle()
    assert served == [1, 2, 3]


def test_streamed_chunks_of_one_step_are_one_write(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transports = [server.exchange(GET) for _ in range(3)]
    for stream in hold.streams:
        stream.send(b"a")
        stream.send(b"b")
    server.listener.batch.flush_all()
    assert [transport.writes[1:] for transport in transports] == [[b"1\r\na\r\n1\r\nb\r\n"]] * 3
    for index, stream in enumerate(hold.streams):
        stream.send(b"c")
        hold.end(index)
    server.loop.settle()
    for transport in transports:
        assert transport.writes[2:] == [b"1\r\nc\r\n0\r\n\r\n"]
        assert responses(bytes(transport.received)) == [(200, b"abc")]
        transport.feed_eof()
    server.loop.settle()
    assert hold.told == []  # the answers were complete


@pytest.mark.parametrize("request_head", [b"GET / HTTP/1.0\r\n\r\n", GET[:-2] + b"Connection: close\r\n\r\n"])
def test_connection_closes_after_the_last_answer(serve: Serve, request_head: bytes) -> None:
    transport = serve(echo).exchange(request_head)
    assert b"connection: close" in transport.received
    assert transport.is_lost
    assert not transport.was_aborted


def test_connection_closes_after_its_last_request(serve: Serve) -> None:
    server = serve(echo, ConnectionLimits(num_requests=2))
    transport = server.exchange(GET, GET)
    assert transport.received.count(b"connection: close") == 1
    assert transport.is_lost


def test_continue_goes_out_when_the_body_is_wanted(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        await asyncio.sleep(5)
        await echo(stream)

    server = serve(handler)
    data = post(b"body", b"Expect: 100-continue")
    transport = server.exchange(data[:-4])
    assert transport.writes == []
    server.loop.advance(5)
    assert transport.writes == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    transport.feed(data[-4:])
    server.loop.settle()
    assert responses(bytes(transport.received)) == [(200, b"/body")]


def test_continue_is_left_out_when_the_body_is_refused_or_there(serve: Serve) -> None:
    server = serve(echo)
    refused = server.exchange(post(b"x" * 1001, b"Expect: 100-continue")[:-1001])
    assert responses(bytes(refused.received))[0][0] == 413
    assert b"100 Continue" not in refused.received
    assert b"connection: close" in refused.received
    there = server.exchange(post(b"body", b"Expect: 100-continue"))
    assert b"100 Continue" not in there.received
    begun = server.exchange(post(b"body", b"Expect: 100-continue")[:-1])
    assert begun.writes == []
    empty = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n0\r\n\r\n"
    assert b"100 Continue" not in server.exchange(empty).received


@pytest.mark.parametrize("size", [999, 1000, 1001])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_limit_holds_at_and_one_past(serve: Serve, size: int, is_chunked: bool) -> None:
    data = post(b"x" * size)
    if is_chunked:
        head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        data = head + b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)
    transport = serve(echo).exchange(data)
    assert responses(bytes(transport.received))[0][0] == (200 if size <= 1000 else 413)


def test_early_answer_survives_the_rest_of_the_body(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    server = serve(refuse)
    data = post(b"x" * 100_000)
    transport = server.exchange(data[:1000], data[1000:])
    assert responses(bytes(transport.received)) == [(401, b"no")]
    assert transport.has_sent_eof
    assert not transport.is_lost
    transport.feed_eof()
    server.loop.settle()
    assert transport.is_lost
    assert not transport.was_aborted


def test_early_answer_lets_go_of_a_body_that_was_held_back(serve: Serve) -> None:
    async def refuse_late(stream: HttpStream) -> None:
        await asyncio.sleep(1)
        answer(stream, 401, b"no")

    server = serve(refuse_late)
    transport = server.exchange(post(b"x" * 100_000)[:-1])
    assert transport.is_reading_paused
    transport.feed(b"x")
    transport.feed_eof()
    server.loop.advance(1)
    assert responses(bytes(transport.received)) == [(401, b"no")]
    assert transport.is_lost


def test_error_after_a_head_request_has_its_body(serve: Serve) -> None:
    transport = serve(echo).exchange(GET.replace(b"GET", b"HEAD"), b"x\n")
    assert b"malformed_request" in transport.received


def test_lingering_is_bounded_in_bytes_and_time(serve: Serve) -> None:
    server = serve(echo)
    flood, silent = server.exchange(b"x\n"), server.exchange(b"x\n")
    flood.feed(b"x" * 16 * MIB)
    server.loop.settle()
    assert not flood.is_lost
    flood.feed(b"x")
    server.loop.settle()
    assert flood.is_lost
    server.loop.advance(1.9)
    assert not silent.is_lost
    server.loop.advance(0.2)
    assert silent.is_lost


def test_connection_that_cannot_half_close_lingers_all_the_same(serve: Serve) -> None:
    server = serve(echo)
    silent, leaving = server.connect(), server.connect()
    for transport in (silent, leaving):
        transport.can_half_close = False
        transport.feed(b"x\n")
    server.loop.settle()
    leaving.feed(b"more")
    leaving.feed_eof()
    server.loop.advance(1.9)
    assert leaving.is_lost
    assert not silent.is_lost
    server.loop.advance(0.2)
    assert silent.is_lost
    assert error_of(silent) == error_of(leaving) == (400, "malformed_request")


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
        (b"G" * 9000, 414, "request_line_too_long"),
        (GET[:-2] + b"X: 1\r\n" * 100 + b"\r\n", 431, "headers_too_large"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501, "not_implemented"),
    ],
)
def test_broken_heads_are_answered_and_closed(serve: Serve, data: bytes, status: int, code: str) -> None:
    server = serve(echo)
    transport = server.exchange(data)
    assert error_of(transport) == (status, code)
    assert b"connection: close" in transport.received
    assert transport.has_sent_eof
    transport.feed(GET)
    transport.feed_eof()
    server.loop.settle()
    assert transport.is_lost
    assert len(transport.writes) == 1


def test_broken_body_is_answered_and_its_handler_told(serve: Serve) -> None:
    server = serve(echo)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    transport = server.exchange(head, b"x\r\n")
    assert error_of(transport) == (400, "malformed_request")
    assert server.listener.num_handlers == 0


def test_broken_body_after_the_head_aborts(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        stream.send_head(STREAMED)
        await stream.read_body(10)

    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    transport = serve(handler).exchange(head, b"x\r\n")
    assert transport.was_aborted
    assert len(transport.writes) == 1


# Clocks: DESIGN's table, in virtual time.


def test_slow_head_gets_408_at_its_absolute_deadline(serve: Serve) -> None:
    server = serve(echo)
    transport = server.connect()
    server.loop.advance(70)
    for byte in GET[:9]:
        transport.feed(bytes([byte]))
        server.loop.advance(1)
    server.loop.advance(0.9)
    assert transport.writes == []
    server.loop.advance(0.2)
    assert error_of(transport) == (408, "request_timeout")


def test_half_a_preface_of_http2_is_a_slow_head_of_http1(serve: Serve) -> None:
    """Nobody knows yet which it would have been."""
    server = serve(echo)
    transport = server.exchange(PREFACE[:10])
    server.loop.advance(10)
    assert error_of(transport) == (408, "request_timeout")


def test_head_clock_starts_anew_with_each_request(serve: Serve) -> None:
    server = serve(echo)
    transport = server.exchange(GET)
    server.loop.advance(60)
    transport.feed(GET[:5])
    server.loop.advance(9.9)
    transport.feed(GET[5:])
    server.loop.settle()
    assert len(responses(bytes(transport.received), 2)) == 2


def test_idle_connection_closes_without_a_word(serve: Serve) -> None:
    server = serve(echo)
    silent, used = server.connect(), server.connect()
    server.loop.advance(50)
    used.feed(GET)
    server.loop.advance(25.1)
    assert silent.is_lost
    assert silent.writes == []
    assert not used.is_lost
    server.loop.advance(50)
    assert used.is_lost
    assert not used.was_aborted


def test_slow_body_gets_408_from_its_handler(serve: Serve) -> None:
    server = serve(echo)
    transport = server.exchange(post(b"x" * 900)[:-900])
    server.loop.advance(29.9)
    assert transport.writes == []
    server.loop.advance(0.2)
    assert responses(bytes(transport.received))[0][0] == 408
    assert b"connection: close" in transport.received


def test_body_at_the_minimal_rate_may_take_longer(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        answer(stream, 200, b"%d" % len(await stream.read_body(100_000)))

    server = serve(handler)
    transport = server.exchange(post(b"x" * 20_000)[:-20_000])
    for _ in range(40):
        server.loop.advance(1)
        transport.feed(b"x" * 500)
    server.loop.settle()
    assert responses(bytes(transport.received)) == [(200, b"20000")]


def test_running_handler_has_no_clock_here(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET)
    server.loop.advance(10_000)
    hold.end(0)
    server.loop.advance(74)  # the idle clock starts with the end
    assert responses(bytes(transport.received)) == [(200, b"")]
    assert not transport.is_lost


# Slow readers.


def test_slow_reader_blocks_its_stream_alone(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    slow, quick = server.connect(peer_reads=False), server.connect()
    slow.feed(GET)
    quick.feed(GET)
    server.loop.settle()
    for stream in hold.streams:
        stream.send(b"x" * 17_000)
    server.loop.settle()
    assert hold.told == ["blocked"]
    assert [stream.is_blocked for stream in hold.streams] == [True, False]
    slow.peer_read(10_000)
    server.loop.settle()
    assert hold.told == ["blocked"]
    slow.peer_read(5_000)
    server.loop.settle()
    assert hold.told == ["blocked", "unblocked"]


@pytest.mark.parametrize(("num_read", "is_enough"), [(15_000, True), (14_999, False)])
def test_reader_that_takes_less_than_500_bytes_per_second_is_aborted(
    serve: Serve, num_read: int, is_enough: bool
) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.connect(peer_reads=False)
    transport.feed(GET)
    server.loop.settle()
    hold.streams[0].send(b"x" * 40_000)
    server.loop.advance(29)
    transport.peer_read(num_read)
    server.loop.advance(30.9)
    assert transport.was_aborted is not is_enough
    server.loop.advance(29.2)
    assert transport.was_aborted
    assert hold.told == ["blocked", "gone"]


def test_closing_connection_does_not_wait_for_ever_for_its_reader(serve: Serve) -> None:
    server = serve(echo)
    transport = server.connect(peer_reads=False)
    transport.feed(b"GET / HTTP/1.0\r\n\r\n")
    server.loop.advance(29)
    assert not transport.is_lost
    server.loop.advance(2)
    assert transport.was_aborted


def test_closing_connection_whose_reader_stops_halfway_is_aborted(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        answer(stream, 200, b"x" * 20_000)

    server = serve(handler)
    transport = server.connect(peer_reads=False)
    transport.feed(b"GET / HTTP/1.0\r\n\r\n")
    server.loop.advance(20)
    transport.peer_read(19_000)
    server.loop.advance(45)
    assert transport.was_aborted


def test_peer_is_listened_to_while_its_large_request_is_answered(serve: Serve) -> None:
    told: list[str] = []

    async def handler(stream: HttpStream) -> None:
        await stream.read_body(10**6)
        stream.on_disconnect = lambda: told.append("gone")
        await asyncio.sleep(10)

    server = serve(handler)
    transport = server.exchange(post(b"x" * 200_000), GET)
    transport.feed_eof()
    server.loop.settle()
    assert told == ["gone"]
    server.loop.advance(10)


def test_body_nobody_reads_is_left_in_the_network(serve: Serve) -> None:
    async def late(stream: HttpStream) -> None:
        await asyncio.sleep(1)
        answer(stream, 200, b"%d" % len(await stream.read_body(10**6)))

    server = serve(late)
    data = post(b"x" * 200_000)
    transport = server.exchange(data[:100_000], data[100_000:])
    assert transport.is_reading_paused
    server.loop.advance(1)
    assert responses(bytes(transport.received)) == [(200, b"200000")]


# Handlers that fail.


async def raise_before_the_head(stream: HttpStream) -> None:
    raise RuntimeError("broken")


async def forget_to_answer(stream: HttpStream) -> None:
    pass


async def send_a_split_head(stream: HttpStream) -> None:
    stream.send_head(ResponseHead(200, ((b"x", b"a\r\nb"),)))


async def raise_in_mid_stream(stream: HttpStream) -> None:
    stream.send_head(STREAMED)
    raise RuntimeError("broken")


async def forget_to_end(stream: HttpStream) -> None:
    stream.send_head(STREAMED)


async def fall_short(stream: HttpStream) -> None:
    stream.send_head(ResponseHead(200, ((b"content-length", b"2"),)))
    stream.send(b"a")
    stream.end()


@pytest.mark.parametrize("handler", [raise_before_the_head, forget_to_answer, send_a_split_head])
def test_failed_handler_is_answered_with_500_and_logged(
    serve: Serve, handler: Callable[[HttpStream], object], caplog: pytest.LogCaptureFixture
) -> None:
    transport = serve(handler).exchange(GET)
    assert error_of(transport) == (500, "internal_error")
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_handler_that_awaits_something_cancelled_aborts(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        cancelled = asyncio.get_running_loop().create_future()
        cancelled.cancel()
        await cancelled

    assert serve(handler).exchange(GET).was_aborted


@pytest.mark.parametrize("handler", [raise_in_mid_stream, forget_to_end, fall_short])
def test_handler_that_fails_after_its_head_aborts(
    serve: Serve, handler: Callable[[HttpStream], object], caplog: pytest.LogCaptureFixture
) -> None:
    transport = serve(handler).exchange(GET)
    assert transport.was_aborted
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_failing_handler_is_told_of_the_end_once(serve: Serve) -> None:
    told: list[str] = []

    async def handler(stream: HttpStream) -> None:
        stream.on_disconnect = lambda: told.append("gone")
        raise RuntimeError("broken")

    serve(handler).exchange(GET)
    assert told == ["gone"]


# Peers that leave.

REQUEST = b"POST /v HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize("leave", [MemoryTransport.feed_eof, MemoryTransport.reset])
def test_peer_that_leaves_at_any_byte_of_its_request(serve: Serve, leave: Callable[[MemoryTransport], None]) -> None:
    for cut in range(len(REQUEST) + 1):
        hold = Hold()
        server = serve(hold)
        transport = server.exchange(REQUEST[:cut])
        leave(transport)
        server.loop.settle()
        assert transport.is_lost
        assert hold.told == (["gone"] if cut == len(REQUEST) else [])
        assert server.is_quiet()


@pytest.mark.parametrize("leave", [MemoryTransport.feed_eof, MemoryTransport.reset])
def test_peer_that_leaves_at_any_byte_of_the_response(serve: Serve, leave: Callable[[MemoryTransport], None]) -> None:
    size = 150  # of the whole response
    for cut in range(size):
        hold = Hold()
        server = serve(hold)
        transport = server.connect(peer_reads=False)
        transport.feed(GET)
        server.loop.settle()
        (stream,) = hold.streams
        while len(transport.received) < cut:
            transport.peer_read(1)
            if not transport.get_write_buffer_size():
                stream.send(b"abc")
                server.loop.settle()
        leave(transport)
        server.loop.settle()
        assert transport.is_lost
        assert hold.told == ["gone"]
        assert server.is_quiet()
        assert not stream.is_open
        stream.send(b"late")
        stream.end()
        server.loop.settle()
        assert transport.is_lost


@pytest.mark.parametrize("leave", [MemoryTransport.feed_eof, MemoryTransport.reset])
def test_handler_without_on_disconnect_is_cancelled(serve: Serve, leave: Callable[[MemoryTransport], None]) -> None:
    cancelled: list[bool] = []

    async def handler(stream: HttpStream) -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(stream.is_open)
            raise

    server = serve(handler)
    leave(server.exchange(GET))
    server.loop.settle()
    assert cancelled == [False]


def test_peer_that_leaves_after_its_answer_disturbs_nobody(serve: Serve) -> None:
    settled: list[str] = []

    async def handler(stream: HttpStream) -> None:
        stream.on_disconnect = lambda: settled.append("gone")
        answer(stream, 200, b"ok")
        await asyncio.sleep(5)  # what comes after the answer is not the client's to cancel
        settled.append("settled")

    server = serve(handler)
    transport = server.exchange(GET)
    transport.feed_eof()
    server.loop.advance(6)
    assert settled == ["settled"]


def test_answer_on_its_way_is_written_before_the_close(serve: Serve) -> None:
    server = serve(echo)
    transport = server.connect()
    transport.feed(b"x\n")
    transport.feed_eof()
    server.loop.settle()
    assert error_of(transport)[0] == 400
    assert transport.is_lost


@pytest.mark.parametrize("has_hook", [False, True])
def test_request_and_end_in_one_read_leave_nothing(serve: Serve, has_hook: bool) -> None:
    hold = Hold()
    server = serve(hold if has_hook else echo)
    transport = server.connect()
    transport.feed(GET)
    transport.feed_eof()
    server.loop.settle()
    assert transport.is_lost
    assert hold.told == []  # the handler never began
    assert server.is_quiet()


# Draining.


def start_drain(server: MemoryServer, grace_s: float) -> "asyncio.Task[None]":
    task = server.loop.create_task(server.listener.drain(grace_s))
    server.loop.settle()
    return task


def test_drain_closes_idle_connections_and_lets_busy_ones_finish(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    idle = server.exchange(GET)
    hold.end(0)
    server.loop.settle()
    streaming, in_head = server.exchange(GET), server.exchange(GET[:5])
    draining = start_drain(server, 60)
    assert [t.is_lost for t in (idle, streaming, in_head)] == [True, False, False]
    in_head.feed(GET[5:])
    server.loop.settle()
    assert b"connection: close" in in_head.received
    assert not draining.done()
    for index, stream in enumerate(hold.streams[1:], 1):
        stream.send(b"x")
        hold.end(index)
    server.loop.settle()
    for transport in (streaming, in_head):
        assert responses(bytes(transport.received)) == [(200, b"x")]
        assert transport.is_lost
    assert hold.told == []
    assert draining.done()


def test_drain_answers_the_first_request_of_a_new_connection_and_waits_for_it_for_a_second(serve: Serve) -> None:
    server = serve(echo)
    asking, silent = server.connect(), server.connect()
    draining = start_drain(server, 60)
    server.loop.advance(0.9)
    assert not asking.is_lost
    asking.feed(GET + GET)
    server.loop.settle()
    assert [status for status, _ in responses(bytes(asking.received))] == [200]
    assert b"connection: close" in asking.received
    assert not silent.is_lost
    server.loop.advance(0.2)
    assert silent.is_lost
    server.loop.advance(3)
    assert draining.done()


def test_drain_between_answer_and_flush_closes_after_the_answer(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET + GET)
    draining = server.loop.create_task(server.listener.drain(60))
    hold.end(0)  # the drain runs next, and only then the flush
    server.loop.settle()
    assert responses(bytes(transport.received)) == [(200, b"")]
    assert len(hold.streams) == 1
    assert transport.has_sent_eof  # the second request is thrown away, the answer survives it
    server.loop.advance(3)
    assert draining.done()


def test_connection_that_comes_during_a_drain_gets_one_answer_and_prolongs_nothing(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    server.exchange(GET)
    draining = start_drain(server, 60)
    late, silent = server.exchange(GET + GET), server.connect()
    hold.end(1)
    server.loop.settle()
    assert responses(bytes(late.received)) == [(200, b"")]
    assert b"connection: close" in late.received
    assert len(hold.streams) == 2
    assert not silent.is_lost
    hold.end(0)
    server.loop.settle()
    server.loop.advance(1)
    assert silent.is_lost
    assert draining.done()
    assert server.listener.num_open == 0


def test_connection_accepted_after_the_drain_is_refused(serve: Serve) -> None:
    server = serve(echo)
    assert start_drain(server, 60).done()
    assert server.listener.admit(PEER) is None
    assert (server.listener.num_accepted, server.listener.refusals.counts[SHUTDOWN]) == (1, 1)


def test_drain_aborts_what_outlives_its_grace_and_tells_the_handler(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET)
    draining = start_drain(server, 60)
    server.loop.advance(59)
    assert not transport.is_lost
    server.loop.advance(2)
    assert transport.was_aborted
    assert hold.told == ["gone"]
    assert draining.done()


@pytest.mark.parametrize("is_before", [True, False])
def test_drain_that_is_hurried_waits_no_longer_than_it_may_then(serve: Serve, is_before: bool) -> None:
    server = serve(Hold())
    reading, in_head = server.exchange(GET), server.exchange(GET[:5])
    if is_before:
        server.listener.hurry(1)
    draining = start_drain(server, 60)
    if not is_before:
        server.listener.hurry(1)
    server.loop.advance(0.9)
    assert [transport.is_lost for transport in (reading, in_head)] == [False, False]
    server.loop.advance(0.2)
    assert [transport.was_aborted for transport in (reading, in_head)] == [True, True]
    assert draining.done()


def test_drain_cancels_a_handler_that_does_not_listen(serve: Serve) -> None:
    async def deaf(stream: HttpStream) -> None:
        stream.on_disconnect = lambda: None
        await asyncio.sleep(1000)

    server = serve(deaf)
    server.exchange(GET)
    draining = start_drain(server, 10)
    server.loop.advance(12)
    assert draining.done()
    assert server.listener.num_handlers == 0


# Any history.

STEPS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=5), cuts=STEPS, reads=STEPS, pauses_ms=STEPS)
def test_any_timing_of_reads_and_writes_gives_the_same_bytes(
    sizes: list[int], cuts: list[int], reads: list[int], pauses_ms: list[int]
) -> None:
    """Pipelined requests, cut and read at random, answered in streams: the same responses, in the same order."""

    async def stream_back(stream: HttpStream) -> None:
        body = await stream.read_body(10_000)
        stream.send_head(STREAMED)
        for start in range(0, len(body), 1000):
            stream.send(body[start : start + 1000])
            await asyncio.sleep(0.001)
        stream.end()

    with contextlib.closing(MemoryServer(stream_back, ConnectionLimits(unsent_bytes=1024))) as server:
        transport = server.connect(peer_reads=False)
        wire = b"".join(post(bytes([65 + n]) * size) for n, size in enumerate(sizes))
        for turn in itertools.count():
            transport.feed(wire[: cuts[turn % len(cuts)] * 20])
            wire = wire[cuts[turn % len(cuts)] * 20 :]
            transport.peer_read(reads[turn % len(reads)] * 50)
            server.loop.advance(pauses_ms[turn % len(pauses_ms)] / 1000)
            if not wire:
                break
        transport.peer_reads = True
        transport.peer_read()
        server.loop.advance(1)
        expected = [(200, bytes([65 + n]) * size) for n, size in enumerate(sizes)]
        assert responses(bytes(transport.received), len(sizes)) == expected
