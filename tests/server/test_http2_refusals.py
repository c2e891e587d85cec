"""What HTTP/2 exchanges refuse, with h2 as the peer: handlers that fail, malformed requests, and attacks."""

import asyncio
import json
from collections.abc import Callable

import pytest
from h2.errors import ErrorCodes

from server.wire.http2_frames import PING
from server.wire.limits import ConnectionLimits, FrameLimits, Http2Limits, Rate
from server.wire.stream import HttpStream
from tests.server.http2_client import Http2Client, fields
from tests.server.memory_connection import STREAMED, Hold, Serve, echo
from tests.server.raw_http2 import frame
from tests.server.simulated_server import SimulatedServer

# What goes wrong.


async def fail(stream: HttpStream) -> None:
    raise RuntimeError("a bug")


async def fail_late(stream: HttpStream) -> None:
    stream.send_head(STREAMED)
    stream.send(b"x")
    raise RuntimeError("a bug")


async def leave_open(stream: HttpStream) -> None:
    pass


async def be_cancelled(stream: HttpStream) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("handler", [fail, leave_open])
def test_handler_that_fails_is_answered_500(serve: Serve, handler: Callable[[HttpStream], object]) -> None:
    client = Http2Client(serve(handler))
    stream_id = client.request()
    assert client.responses[stream_id].status == 500
    assert json.loads(client.responses[stream_id].body)["error"]["code"] == "internal_error"
    assert client.responses[stream_id].is_complete
    assert client.responses[client.request()].status == 500, "the connection goes on"


@pytest.mark.parametrize("handler", [fail_late, be_cancelled])
def test_handler_that_fails_too_late_resets_its_stream(serve: Serve, handler: Callable[[HttpStream], object]) -> None:
    client = Http2Client(serve(handler))
    stream_id = client.request()
    assert client.responses[stream_id].reset is ErrorCodes.INTERNAL_ERROR
    assert client.goaways == []


def refused_stream(client: Http2Client) -> None:
    client.transport.feed(get_frame(1) + get_frame(3))  # h2 itself keeps to what is advertised


def malformed_head(client: Http2Client) -> None:
    client.h2.config.normalize_outbound_headers = False
    client.request([*fields(), ("connection", "close")])


def too_long_a_body(client: Http2Client) -> None:
    client.request([*fields(method="POST", path="/v1/completions"), ("content-length", "1")], b"xx")


def broken_connection(client: Http2Client) -> None:
    client.send(frame(PING, bytes(8), stream_id=3))


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (malformed_head, ("-", 400, "PROTOCOL_ERROR")),
        (too_long_a_body, ("/v1/completions", 400, "PROTOCOL_ERROR")),
        (refused_stream, ("-", 429, "REFUSED_STREAM")),
        (broken_connection, ("-", 400, "PROTOCOL_ERROR")),
    ],
)
def test_what_is_refused_without_an_answer_leaves_one_access_line(
    refused: Callable[[Http2Client], None], told: tuple[str, int, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer(connection_limits=ConnectionLimits(http2=Http2Limits(num_streams=1)))
    refused(Http2Client(server.network))
    server.network.loop.settle()
    records = [record.access for record in caplog.records if hasattr(record, "access")]
    assert [(one.path, one.status, one.http2_error) for one in records if one.path != "/"] == [told]
    server.network.listener.abort()
    server.run()
    server.close()


def test_request_that_is_refused_and_broken_in_one_read_is_reset(serve: Serve) -> None:
    """Its 431 comes too late."""
    client = Http2Client(serve(echo))
    client.h2.config.validate_outbound_headers = False
    client.h2.config.normalize_outbound_headers = False
    stream_id = client.begin([*fields(method="POST"), *[("x", "y")] * 97], end=False)
    client.h2.send_headers(stream_id, [("Connection", "close")], end_stream=True)
    client.exchange()
    assert client.responses[stream_id].reset is ErrorCodes.PROTOCOL_ERROR
    assert client.responses[client.request()].status == 200


# Attacks; the others are in test_attacks.

HEADERS_ONE_FIELD = b"\x82\x86\x84\x41\x01a"  # GET http / a, RFC 7541's static table
CALM = ErrorCodes.ENHANCE_YOUR_CALM


def get_frame(stream_id: int, flags: int = 0x5) -> bytes:
    return frame(1, HEADERS_ONE_FIELD, flags, stream_id)


def held(client: Http2Client) -> int:
    """Bytes that the server's side of the connection holds unsent, all together."""
    return client.transport.get_write_buffer_size()


def test_refused_streams_are_forgiven_once_one_is_taken_again(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    client.h2.remote_settings._settings[3][0] = 2**31
    for _ in range(2):
        for _ in range(400 - len(hold.streams)):
            client.begin()
        client.exchange()
        hold.end(0)
        client.exchange()
        hold.streams.pop(0)
        hold._done.pop(0)
        client.request()
    assert client.goaways == []


def test_control_frames_whose_answers_are_not_read_stop_being_read(serve: Serve) -> None:
    frames = FrameLimits(pings=Rate(10**6, 0))
    server = serve(echo, ConnectionLimits(http2=Http2Limits(frames=frames)))
    client = Http2Client(server)
    client.transport.peer_reads = False
    pings = frame(PING, bytes(8)) * 1000
    for _ in range(30):
        client.transport.feed(pings)
        server.loop.settle()
    assert client.transport.is_reading_paused
    assert held(client) < 300 * 1024
    client.transport.peer_reads = True
    client.transport.peer_read()
    client.exchange()
    assert not client.transport.is_reading_paused
    assert not client.transport.is_lost


def test_preface_alone_is_not_waited_for(serve: Serve) -> None:
    server = serve(echo)
    transport = server.exchange(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    server.loop.advance(12.2)
    assert transport.is_lost
