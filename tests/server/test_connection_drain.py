"""The real connection while its server drains."""

import asyncio

import pytest

from server.listening.clients import SHUTDOWN
from server.wire.stream import HttpStream
from tests.server.fakes import PEER, MemoryServer
from tests.server.memory_connection import (
    GET,
    Hold,
    Serve,
    echo,
    responses,
)


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
