"""What HTTP/2 exchanges refuse, with h2 as the peer: handlers that fail, malformed requests, and attacks."""

import asyncio
import json
from collections.abc import Callable

import pytest
from h2.errors import ErrorCodes

from server.wire.http2 import PING, SETTINGS
from server.wire.limits import ConnectionLimits, FrameLimits, Http2Limits, Rate
from server.wire.stream import HttpStream
from tests.server.http2_client import POST, Http2Client, fields
from tests.server.memory_connection import STREAMED, Hold, Serve, answer, echo
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


@pytest.mark.parametrize(
    "headers",
    [
        fields(method=None),
        fields(scheme=None),
        fields(path=None),
        fields(path=""),
        fields(path="relative"),
        fields(path="/with#fragment"),
        fields(path="/with space"),
        fields(authority=None),
        fields(authority="user@a"),
        fields(authority=""),
        fields(method="G T"),
        [*fields(), (":path", "/again")],
        [*fields(), ("x", "1"), (":late", "1")],
        [*fields(), (":status", "200")],
        [("x", "1"), *fields()],
        [*fields(), ("Upper", "1")],
        [*fields(), ("", "1")],
        [*fields(), ("with space", "1")],
        [*fields(), ("x", "a\rb")],
        [*fields(), ("x", "a\nb")],
        [*fields(), ("x", "a\0b")],
        [*fields(), ("x", " a")],
        [*fields(), ("x", "a\t")],
        [*fields(), ("connection", "close")],
        [*fields(), ("transfer-encoding", "chunked")],
        [*fields(), ("upgrade", "h2c")],
        [*fields(), ("keep-alive", "1")],
        [*fields(), ("proxy-connection", "1")],
        [*fields(), ("te", "gzip")],
        [*fields(), ("host", "b")],
        [*fields(), ("host", "a"), ("host", "a")],
        [*fields(), ("content-length", "1")],
        [*fields(), ("content-length", "0"), ("content-length", "0")],
    ],
)
def test_malformed_request_resets_its_stream_alone(serve: Serve, headers: list[tuple[str, str]]) -> None:
    server = serve(echo)
    client = Http2Client(server)
    client.h2.config.normalize_outbound_headers = False
    other = client.request(POST, b"x", end=False)
    stream_id = client.request(headers)
    assert client.responses[stream_id].reset is ErrorCodes.PROTOCOL_ERROR
    client.h2.end_stream(other)
    client.exchange()
    assert client.responses[other].body == b"/x"


@pytest.mark.parametrize(
    "headers",
    [
        [*fields(), ("host", "a")],
        [*fields(authority=None), ("host", "a")],
        [*fields(), ("te", "trailers")],
        [*fields(), ("content-length", "0")],
        [*fields(), ("x", "")],
        [*fields(path="*", method="OPTIONS")],
        [*fields(), *[("cookie", f"{n}=1") for n in range(90)]],
    ],
)
def test_wellformed_request_is_taken(serve: Serve, headers: list[tuple[str, str]]) -> None:
    client = Http2Client(serve(echo))
    assert client.responses[client.request(headers)].status == 200


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


def test_handler_sees_one_host_and_no_cookie(serve: Serve) -> None:
    async def show(stream: HttpStream) -> None:
        answer(stream, 200, repr(stream.request.headers).encode())

    client = Http2Client(serve(show))
    stream_id = client.request([*fields(), ("cookie", "a=1"), ("x", "y"), ("cookie", "b=2")])
    expected = ((b"host", b"a"), (b"x", b"y"))
    assert client.responses[stream_id].body == repr(expected).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([*fields(), *[("x", "y")] * 96], 200),
        ([*fields(), *[("x", "y")] * 97], 431),
        ([*fields(), *[("cookie", "a=b")] * 97], 431),
        ([*fields(), ("x", "y" * 16_000)], 200),
        ([*fields(), ("x", "y" * 16_384)], 431),
        (fields(method="CONNECT", scheme=None, path=None), 501),
    ],
)
def test_head_past_a_limit_is_answered_and_the_connection_goes_on(
    serve: Serve, headers: list[tuple[str, str]], status: int
) -> None:
    client = Http2Client(serve(echo))
    assert client.responses[client.request(headers)].status == status
    assert client.responses[client.request()].status == 200


def test_body_of_a_head_request_is_not_sent(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    stream_id = client.request(fields(method="HEAD"))
    assert client.responses[stream_id].headers["content-length"] == "1"
    assert client.responses[stream_id].body == b""
    assert client.responses[stream_id].is_complete


# Attacks; the others are in test_attacks.

HEADERS_ONE_FIELD = b"\x82\x86\x84\x41\x01a"  # GET http / a, RFC 7541's static table
CALM = ErrorCodes.ENHANCE_YOUR_CALM


def get_frame(stream_id: int, flags: int = 0x5) -> bytes:
    return frame(1, HEADERS_ONE_FIELD, flags, stream_id)


def held(client: Http2Client) -> int:
    """Bytes that the server's side of the connection holds unsent, all together."""
    return client.transport.get_write_buffer_size()


def test_encoder_table_of_4_gib_is_clamped(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    client.send(frame(SETTINGS, b"\x00\x01\xff\xff\xff\xff"))
    client.h2.decoder.max_allowed_table_size = 2**32 - 1
    for _ in range(3):
        assert client.responses[client.request()].status == 200
    assert client.h2.decoder.header_table_size <= 4096


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
