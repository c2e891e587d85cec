"""How HTTP/2 connections end: idle, drained, or left by their client."""

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from server.wire.http2_frames import GOAWAY
from server.wire.limits import ConnectionLimits
from server.wire.stream import HttpStream
from tests.server.http2_client import POST, Http2Client, fields, without_goaways
from tests.server.memory_connection import Hold, Serve, answer, echo
from tests.server.raw_http2 import INITIAL_WINDOW, frame, get, settings, window_update, wire
from tests.server.raw_peer import MemoryPeer


def test_idle_connection_is_told_and_closed(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    client.request()
    client.advance(74.9)
    assert client.goaways == []
    client.advance(0.2)
    assert client.goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1), (ErrorCodes.NO_ERROR, 1)]
    client.transport.feed_eof()
    client.exchange()
    assert client.transport.is_lost
    assert not client.transport.was_aborted


def test_connection_whose_last_clock_ran_out_is_idle_from_then_on(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    client.request(POST, b"x", end=False)
    server.loop.advance(30.1)
    client.read()
    assert client.responses[1].status == 408
    server.loop.advance(74.8)
    client.read()
    assert client.goaways == []
    server.loop.advance(0.2)
    client.read()
    assert client.goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1)]


def test_busy_connection_is_not_idle(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    client.request()
    client.advance(1000)
    assert client.goaways == []


async def answer_60_kb(stream: HttpStream) -> None:
    answer(stream, 200, b"x" * 60_000)


def check_idle_from_now_on(peer: MemoryPeer) -> None:
    assert peer.seen.has_ended(1)
    peer.advance(74.9)
    assert not peer.seen.of(GOAWAY)
    peer.advance(0.2)
    assert peer.seen.of(GOAWAY)


def test_connection_whose_windows_opened_slowly_is_idle_once_the_answer_has_gone(serve: Serve) -> None:
    peer = MemoryPeer(serve(answer_60_kb))
    peer.feed(wire([settings((INITIAL_WINDOW, 0)), get()]))
    for _ in range(4):
        peer.advance(25)
        peer.feed(window_update(15_000, 1).encode(0))
    check_idle_from_now_on(peer)


def test_connection_whose_socket_was_read_slowly_is_idle_once_the_answer_has_gone(serve: Serve) -> None:
    peer = MemoryPeer(serve(answer_60_kb), reads=False)
    peer.feed(get().encode(0))
    for _ in range(4):
        peer.advance(25)
        peer.transport.peer_read(15_000)
        peer.look()
    peer.transport.peer_reads = True
    peer.transport.peer_read()
    peer.look()
    check_idle_from_now_on(peer)


def test_drain_takes_what_is_on_its_way_and_refuses_what_comes_later(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    client = Http2Client(server)
    first = client.request()
    drain = server.loop.create_task(server.listener.drain(60))
    server.loop.settle()
    on_its_way = client.begin()
    client.exchange()  # the PING is answered after it
    assert client.goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1), (ErrorCodes.NO_ERROR, on_its_way)]
    late = client.request()
    assert client.responses[late].reset is ErrorCodes.REFUSED_STREAM
    for index in (0, 1):
        hold.streams[index].send(b"last words")
        hold.end(index)
    client.exchange()
    for stream_id in (first, on_its_way):
        assert client.responses[stream_id].body == b"last words"
        assert client.responses[stream_id].is_complete
    assert client.transport.has_sent_eof
    client.transport.feed_eof()
    server.loop.settle()
    assert drain.done()


def test_drain_does_not_wait_for_a_peer_that_does_not_hear(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    drain = server.loop.create_task(server.listener.drain(60))
    server.loop.advance(3.1)
    assert client.transport.is_lost
    assert drain.done()


def test_preface_that_was_sent_before_the_drain_and_is_read_after_it_is_answered(serve: Serve) -> None:
    server = serve(echo)
    wire = H2Connection(H2Configuration(client_side=True))
    wire.initiate_connection()
    wire.send_headers(1, fields(), end_stream=True)
    transport = server.connect()
    drain = server.loop.create_task(server.listener.drain(60))
    server.loop.settle()
    transport.feed(wire.data_to_send())
    server.loop.advance(ConnectionLimits().drain_round_trip_s + 0.1)
    goaways: list[tuple[ErrorCodes | int, int]] = []
    received = without_goaways(bytes(transport.received), goaways)
    assert goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1), (ErrorCodes.NO_ERROR, 1)]
    assert any(frame_[3] == 1 and frame_[5:9] == b"\0\0\0\1" for frame_ in received), "no answer to stream 1"
    transport.feed_eof()
    server.loop.settle()
    assert drain.done()


def test_connection_that_comes_during_a_drain_is_answered_and_told_of_the_end(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    Http2Client(server).request()
    draining = server.loop.create_task(server.listener.drain(60))
    server.loop.settle()
    late = Http2Client(server)
    assert late.goaways == [], "it may still ask"
    stream_id = late.request()
    assert late.goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1), (ErrorCodes.NO_ERROR, stream_id)]
    hold.end(1)
    late.exchange()
    assert late.responses[stream_id].is_complete
    assert late.transport.has_sent_eof
    assert not draining.done()


def test_connection_ends_after_its_last_stream(serve: Serve) -> None:
    client = Http2Client(serve(echo, ConnectionLimits(num_streams=2)))
    ids = [client.request() for _ in range(2)]
    assert [client.responses[i].status for i in ids] == [200, 200]
    assert client.goaways == [(ErrorCodes.NO_ERROR, 2**31 - 1), (ErrorCodes.NO_ERROR, 3)]
    assert client.transport.has_sent_eof


def test_clients_goaway_leaves_its_requests(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    stream_id = client.request()
    client.send(frame(GOAWAY, bytes(8)))
    hold.streams[0].send(b"still here")
    hold.end(0)
    client.exchange()
    assert client.responses[stream_id].body == b"still here"


def test_clients_goaway_with_an_error_is_its_end(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    client.request()
    client.send(frame(GOAWAY, b"\0\0\0\0\0\0\0\2"))
    assert hold.told == ["gone"]
    assert client.transport.was_aborted
