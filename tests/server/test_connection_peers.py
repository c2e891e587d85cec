"""Peers of the real connection that read slowly, or leave at any byte."""

import asyncio
from collections.abc import Callable

import pytest

from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer, MemoryTls, MemoryTransport
from tests.server.memory_connection import (
    GET,
    Hold,
    Serve,
    answer,
    echo,
    error_of,
    post,
    responses,
)

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


def connect_by_tls(server: MemoryServer) -> MemoryTransport:
    transport = server.dial(peer_reads=False)
    transport.tls = MemoryTls()
    transport.can_half_close = False
    server.loop.settle()
    return transport


def test_tls_that_is_closed_waits_for_its_peers_farewell_for_two_seconds(serve: Serve) -> None:
    server = serve(echo)
    transport = connect_by_tls(server)
    transport.peer_reads = True
    transport.feed(b"GET / HTTP/1.0\r\n\r\n")
    server.loop.advance(1.9)
    assert not transport.is_lost
    server.loop.advance(0.2)
    assert transport.was_aborted
    assert responses(bytes(transport.received)) == [(200, b"/")]


def test_tls_that_is_closed_lets_a_slow_reader_read_to_the_end(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        answer(stream, 200, b"x" * 60_000)

    server = serve(handler)
    transport = connect_by_tls(server)
    transport.feed(b"GET / HTTP/1.0\r\n\r\n")
    for _ in range(4):
        server.loop.advance(25)
        transport.peer_read(15_000)
    assert not transport.was_aborted
    transport.peer_read()
    server.loop.advance(2.1)
    assert transport.was_aborted
    assert responses(bytes(transport.received)) == [(200, b"x" * 60_000)]


def test_tls_that_is_closed_and_not_read_is_given_no_longer_than_any_other(serve: Serve) -> None:
    server = serve(echo)
    transport = connect_by_tls(server)
    transport.feed(b"GET / HTTP/1.0\r\n\r\n")
    server.loop.advance(29.9)
    assert not transport.is_lost
    server.loop.advance(2)
    assert transport.was_aborted


@pytest.mark.parametrize(("sent_behind", "limit_s"), [(b"", 75), (GET[:9], 10)])
def test_clock_of_the_next_request_begins_once_the_answer_before_it_is_read(
    serve: Serve, sent_behind: bytes, limit_s: int
) -> None:
    async def handler(stream: HttpStream) -> None:
        answer(stream, 200, b"x" * 60_000)

    server = serve(handler)
    transport = server.connect(peer_reads=False)
    transport.feed(GET + sent_behind)
    for _ in range(4):
        server.loop.advance(25)
        transport.peer_read(15_000)
    transport.peer_reads = True
    transport.peer_read()
    server.loop.advance(limit_s - 0.1)
    assert not transport.has_sent_eof
    assert not transport.is_lost
    server.loop.advance(0.2)
    assert transport.has_sent_eof or transport.is_lost


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
