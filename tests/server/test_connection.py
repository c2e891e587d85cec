"""The real connection on a virtual-time loop and a network in memory: its requests, its bodies and its clocks."""

import asyncio
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.memory_connection import (
    GET,
    MIB,
    STREAMED,
    Hold,
    Serve,
    answer,
    echo,
    error_of,
    post,
    responses,
    stream_back,
)


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


def test_broken_body_after_the_head_aborts(serve: Serve) -> None:
    async def handler(stream: HttpStream) -> None:
        stream.send_head(STREAMED)
        await stream.read_body(10)

    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    transport = serve(handler).exchange(head, b"x\r\n")
    assert transport.was_aborted
    assert len(transport.writes) == 1


# Clocks: docs/limits.md's table, in virtual time.


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


def test_running_handler_has_no_clock_here(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    transport = server.exchange(GET)
    server.loop.advance(10_000)
    hold.end(0)
    server.loop.advance(74)  # the idle clock starts with the end
    assert responses(bytes(transport.received)) == [(200, b"")]
    assert not transport.is_lost


# Any history.

STEPS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=5), cuts=STEPS, reads=STEPS, pauses_ms=STEPS)
def test_any_timing_of_reads_and_writes_gives_the_same_bytes(
    sizes: list[int], cuts: list[int], reads: list[int], pauses_ms: list[int]
) -> None:
    """Pipelined requests, cut and read at random, answered in streams: the same responses, in the same order."""

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
