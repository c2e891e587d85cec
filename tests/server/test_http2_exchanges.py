"""HTTP/2 over the real connection, on a virtual-time loop and a network in memory, with h2 as the peer."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from ipaddress import ip_network

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from server.listening.client_gate import ClientRules
from server.wire.connection_limits import ConnectionLimits, Http2Limits
from server.wire.frame_limits import FrameLimits, Rate
from server.wire.stream import HttpStream
from tests.server.fakes import MemoryServer
from tests.server.http2_client import INITIAL_WINDOW, Http2Client, fields, without_goaways
from tests.server.http2_frames import frame
from tests.server.test_connection import STREAMED, Hold, Serve, answer, echo, serve

__all__ = ["serve"]  # the fixture

POST = fields(method="POST")
RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, PRIORITY, GOAWAY = 3, 4, 6, 8, 2, 7


def test_request_is_answered(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    first = client.request(fields(path="/one?query"))
    second = client.request(POST, b"body")
    assert client.responses[first].body == b"/one"
    assert client.responses[first].headers == {
        ":status": "200",
        "content-length": "4",
        "date": "Thu, 01 Jan 1970 00:00:00 GMT",
    }
    assert client.responses[second].body == b"/body"
    assert client.responses[second].is_complete
    assert client.goaways == []


def test_field_values_are_written_as_they_are(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    client.request(fields(path="/one"))
    assert b"Thu, 01 Jan 1970 00:00:00 GMT" in client.transport.received


def test_preface_is_recognised_byte_by_byte(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    wire = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS)
    transport = server.exchange(*(wire[i : i + 1] for i in range(len(wire))))
    assert bytes(transport.received[:5]) == bytes(client.transport.received[:5])
    assert not transport.is_lost


@pytest.mark.parametrize("wrong", [b"PRI / HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n"])
def test_wrong_preface_is_a_wrong_request(serve: Serve, wrong: bytes) -> None:
    assert serve(echo).exchange(wrong + b"\r\n").received.startswith(b"HTTP/1.1 400")


def test_all_streams_of_a_step_are_one_write(serve: Serve) -> None:
    hold = Hold()
    server = serve(hold)
    client = Http2Client(server)
    ids = [client.request() for _ in range(16)]
    num_writes = len(client.transport.writes)
    for stream in hold.streams:
        stream.send(b"token")
    server.listener.batch.flush_all()
    assert client.transport.writes[num_writes:] == [b"".join(frame(0, b"token", 0, stream_id) for stream_id in ids)]


def test_streams_take_turns_by_frames(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold, ConnectionLimits(unsent_bytes=2**20)))
    for _ in range(2):
        client.request()
    num_bytes = len(client.transport.received)
    for stream in hold.streams:
        stream.send(b"x" * 30_000)
    client.exchange()
    data = bytes(client.transport.received[num_bytes:])
    order = []
    while data:
        order.append(data[8])
        data = data[9 + int.from_bytes(data[:3], "big") :]
    assert order[:4] == [1, 3, 1, 3]


def test_reset_cancels_its_stream_only(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    first, second = client.request(), client.request()
    client.h2.reset_stream(first, ErrorCodes.CANCEL)
    client.exchange()
    assert hold.told == ["gone"]
    hold.streams[0].send(b"dropped")
    hold.streams[1].send(b"kept")
    hold.end(1)
    client.exchange()
    assert client.responses[second].body == b"kept"
    assert client.responses[second].is_complete
    assert hold.told == ["gone"]


def test_reset_before_the_handler_listens_cancels_it(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    stream_id = client.request(POST, b"x", end=False)
    assert server.listener.num_handlers == 1
    client.h2.reset_stream(stream_id)
    client.exchange()
    assert server.listener.num_handlers == 0


def test_end_of_connection_is_the_end_of_all_streams(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    for _ in range(3):
        client.request()
    client.transport.feed_eof()
    client.exchange()
    assert hold.told == ["gone"] * 3
    assert client.transport.is_lost


def test_shut_window_blocks_its_stream_alone(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), settings={INITIAL_WINDOW: 0})
    shut = client.request()
    hold.streams[0].send(b"x" * 20_000)
    client.exchange()
    assert hold.told == ["blocked"]
    client.h2.update_settings({INITIAL_WINDOW: 65_535})
    client.exchange()
    assert hold.told == ["blocked", "unblocked"]
    assert client.responses[shut].body == b"x" * 20_000


def test_stream_is_blocked_past_its_share_and_unblocked_below_a_quarter_of_it(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    other = client.request()
    hold.streams[0].send(b"x" * 16_384)
    client.exchange()
    assert hold.told == []
    hold.streams[0].send(b"x")
    client.exchange()
    assert hold.told == ["blocked"]
    client.h2.increment_flow_control_window(12_288, stream_id)
    client.exchange()
    assert hold.told == ["blocked"]
    client.h2.increment_flow_control_window(1, stream_id)
    client.exchange()
    assert hold.told == ["blocked", "unblocked"]
    hold.streams[1].send(b"y")
    client.h2.increment_flow_control_window(1, other)
    client.exchange()
    assert client.responses[other].body == b"y"


def test_share_shrinks_with_the_number_of_streams(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), settings={INITIAL_WINDOW: 0})
    for _ in range(256):
        client.request()
    for stream in hold.streams:
        stream.send(b"x" * 2049)
    client.exchange()
    assert hold.told == ["blocked"] * 256


def test_transport_that_takes_nothing_blocks_all_streams(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    ids = [client.request() for _ in range(2)]
    client.transport.peer_reads = False
    hold.streams[0].send(b"x" * 20_000)
    client.exchange()
    assert hold.told == ["blocked"] * 2
    hold.streams[1].send(b"y")
    client.exchange()
    client.transport.peer_reads = True
    client.transport.peer_read()
    client.exchange()
    assert hold.told == ["blocked"] * 2 + ["unblocked"] * 2
    assert [client.responses[i].body for i in ids] == [b"x" * 20_000, b"y"]


def test_stalled_stream_is_reset_and_the_others_go_on(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False)
    stalled, other = client.request(), client.request()
    hold.streams[0].send(b"x" * 70_000)
    client.exchange()
    client.h2.increment_flow_control_window(1000)
    client.exchange()
    client.advance(29.9)
    hold.streams[1].send(b"y")
    client.exchange()
    assert client.responses[stalled].reset is None
    client.advance(0.2)
    assert client.responses[stalled].reset is ErrorCodes.CANCEL
    assert "gone" in hold.told
    hold.end(1)
    client.exchange()
    assert client.responses[other].body == b"y"
    assert client.responses[other].is_complete


@pytest.mark.parametrize(("every_s", "num_bytes", "is_enough"), [(29, 15_000, True), (1.5, 1, False), (1, 499, False)])
def test_slow_reader_defers_the_stall_by_500_bytes_per_second(
    serve: Serve, every_s: float, num_bytes: int, is_enough: bool
) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    hold.streams[0].send(b"x" * 60_000)
    client.exchange()
    for _ in range(int(59 / every_s)):
        client.advance(every_s)
        if client.responses[stream_id].reset is None:
            client.h2.increment_flow_control_window(num_bytes, stream_id)
        client.exchange()
    assert client.responses[stream_id].reset is (None if is_enough else ErrorCodes.CANCEL)


def test_reader_of_the_last_bytes_has_read_enough(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold), reads=False, settings={INITIAL_WINDOW: 0})
    stream_id = client.request()
    for _ in range(3):
        hold.streams[0].send(b"x")
        client.exchange()
        client.advance(29)
        client.h2.increment_flow_control_window(1, stream_id)
        client.exchange()
    assert client.responses[stream_id].reset is None
    assert client.responses[stream_id].body == b"xxx"


def test_peer_that_reads_nothing_loses_its_connection(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    client.request()
    client.transport.peer_reads = False
    hold.streams[0].send(b"x" * 20_000)
    client.exchange()
    client.advance(30.1)
    assert client.transport.was_aborted
    assert "gone" in hold.told


# Bodies.


@pytest.mark.parametrize("size", [999, 1000, 1001])
def test_body_limit_holds_at_and_one_past(serve: Serve, size: int) -> None:
    client = Http2Client(serve(echo))
    stream_id = client.request(POST, b"x" * size)
    assert client.responses[stream_id].status == (200 if size <= 1000 else 413)


def test_body_of_many_windows_is_read(serve: Serve) -> None:
    async def count(stream: HttpStream) -> None:
        answer(stream, 200, b"%d" % len(await stream.read_body(2**23)))

    client = Http2Client(serve(count))
    stream_id = client.request(POST, b"x" * 16_384, end=False)
    num_sent = 16_384
    while num_sent < 1_000_000:
        size = min(16_384, client.h2.local_flow_control_window(stream_id))
        assert size > 0
        client.h2.send_data(stream_id, b"x" * size)
        num_sent += size
        client.exchange()
    client.h2.end_stream(stream_id)
    client.exchange()
    assert client.responses[stream_id].body == b"%d" % num_sent


def test_body_nobody_reads_shuts_the_window(serve: Serve) -> None:
    started = asyncio.Event()

    async def late(stream: HttpStream) -> None:
        await started.wait()
        answer(stream, 200, b"%d" % len(await stream.read_body(2**20)))

    client = Http2Client(serve(late))
    stream_id = client.request(POST, end=False)
    while size := min(16_384, client.h2.local_flow_control_window(stream_id)):
        client.h2.send_data(stream_id, b"x" * size)
        client.exchange()
    started.set()
    client.exchange()
    assert client.h2.local_flow_control_window(stream_id) == 65_535
    client.h2.end_stream(stream_id)
    client.exchange()
    assert client.responses[stream_id].body == b"65535"


def test_early_answer_ends_the_upload_without_an_error(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    client = Http2Client(serve(refuse))
    ids = []
    for _ in range(300):  # more than the budget of resets: these are not the peer's fault
        stream_id = client.begin(POST, b"x" * 1000, end=False)
        client.h2.send_data(stream_id, b"x" * 1000)
        ids.append(stream_id)
        client.exchange()
    assert all(client.responses[i].status == 401 for i in ids)
    assert all(client.responses[i].reset is ErrorCodes.NO_ERROR for i in ids)
    assert client.goaways == []


def test_frames_in_flight_after_an_early_answer_are_forgiven(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    client = Http2Client(serve(refuse))
    client.request(POST, end=False)
    client.send(frame(0, b"x" * 100, 0, 1) * 250)
    assert client.goaways == []
    assert client.responses[client.request()].status == 401


def test_slow_body_gets_408(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    stream_id = client.request(POST, b"x" * 500, end=False)
    client.advance(29.9)
    assert not client.responses[stream_id].headers
    client.advance(0.2)
    assert client.responses[stream_id].status == 408
    assert client.goaways == []


def test_continue_goes_out_when_the_body_is_wanted(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    stream_id = client.request([*POST, ("expect", "100-continue")], end=False)
    assert client.responses[stream_id].informational == [100]
    client.h2.send_data(stream_id, b"body", end_stream=True)
    client.exchange()
    assert client.responses[stream_id].body == b"/body"


def test_trailers_end_a_body(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    stream_id = client.request(POST, b"body", end=False)
    client.h2.send_headers(stream_id, [("x-sum", "1")], end_stream=True)
    client.exchange()
    assert client.responses[stream_id].body == b"/body"


async def add_up(stream: HttpStream) -> None:
    stream.send_head(STREAMED)
    stream.send(b"x" * 100_000)
    stream.end(((b"x-sum", b"1"),))


def test_trailers_follow_the_body_of_a_client_that_takes_them(serve: Serve) -> None:
    client = Http2Client(serve(add_up))
    stream_id = client.request([*fields(), ("te", "trailers")])
    response = client.responses[stream_id]
    assert (len(response.body), response.trailers, response.is_complete) == (100_000, {"x-sum": "1"}, True)


@pytest.mark.parametrize("headers", [fields(), [*fields(method="HEAD"), ("te", "trailers")]])
def test_trailers_are_kept_from_everyone_else(serve: Serve, headers: list[tuple[str, str]]) -> None:
    client = Http2Client(serve(add_up))
    response = client.responses[client.request(headers)]
    assert (response.trailers, response.is_complete) == (None, True)


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


def test_attacks_stay_within_their_budgets_at_the_limit(serve: Serve) -> None:
    server = serve(echo)
    client = Http2Client(server)
    resets = b"".join(get_frame(i, 0x4) + frame(RST_STREAM, bytes(4), 0, i) for i in range(1, 401, 2))
    client.send(resets)
    client.send(frame(PING, bytes(8)) * 100)
    assert client.goaways == []


def test_encoder_table_of_4_gib_is_clamped(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    client.send(frame(SETTINGS, b"\x00\x01\xff\xff\xff\xff"))
    client.h2.decoder.max_allowed_table_size = 2**32 - 1
    for _ in range(3):
        assert client.responses[client.request()].status == 200
    assert client.h2.decoder.header_table_size <= 4096


def test_streams_past_the_advertised_are_refused_and_past_twice_that_the_connection_ends(serve: Serve) -> None:
    hold = Hold()
    client = Http2Client(serve(hold))
    client.h2.remote_settings._settings[3][0] = 2**31  # a client that does not care what is advertised
    ids = [client.begin() for _ in range(512)]
    client.exchange()
    assert len(hold.streams) == 256
    assert [client.responses[i].reset for i in ids] == [None] * 256 + [ErrorCodes.REFUSED_STREAM] * 256
    assert client.goaways == []
    client.request()
    assert client.goaways == [(CALM, ids[255])]
    assert hold.told == ["gone"] * 256


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


def test_control_output_past_its_end_closes(serve: Serve) -> None:
    frames = FrameLimits(pings=Rate(10**6, 0))
    server = serve(echo, ConnectionLimits(http2=Http2Limits(frames=frames)))
    client = Http2Client(server)
    client.transport.peer_reads = False
    client.transport.feed(frame(PING, bytes(8)) * 61_000)
    server.loop.settle()
    assert not client.transport.was_aborted
    client.transport.peer_read()
    server.loop.settle()
    client.transport.feed(frame(PING, bytes(8)) * 62_000)
    server.loop.settle()
    assert client.transport.was_aborted


def test_slow_head_is_not_waited_for(serve: Serve) -> None:
    client = Http2Client(serve(echo))
    client.send(frame(1, HEADERS_ONE_FIELD, 0, 1))
    client.advance(9.9)
    assert client.goaways == []
    client.advance(0.2)
    assert client.goaways == [(CALM, 0)]


def test_preface_alone_is_not_waited_for(serve: Serve) -> None:
    server = serve(echo)
    transport = server.exchange(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    server.loop.advance(12.2)
    assert transport.is_lost


# Upgrade from HTTP/1.1.

UPGRADE = (
    b"%b / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: %b\r\n%b\r\n"
)
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n"


class UpgradingClient(Http2Client):
    """Begins in HTTP/1.1.

    Args:
        pieces: what follows the request's head, one read each.
    """

    def __init__(self, server: MemoryServer, method: bytes = b"GET", fields_: bytes = b"", *pieces: bytes) -> None:
        super().__init__(
            server, settings=None, upgrade=lambda settings: UPGRADE % (method, settings, fields_), pieces=pieces
        )


def test_upgrade_is_answered_in_http2(serve: Serve) -> None:
    client = UpgradingClient(serve(echo))
    assert client.transport.received.startswith(SWITCHED)
    assert client.responses[1].body == b"/"
    assert client.responses[1].is_complete
    assert client.responses[client.request()].body == b"/"
    assert client.goaways == []


@pytest.mark.parametrize("pieces", [(b"body",), (b"bo", b"dy")])
def test_upgrade_with_a_body_is_answered_in_http2(serve: Serve, pieces: tuple[bytes, ...]) -> None:
    client = UpgradingClient(serve(echo), b"POST", b"Content-Length: 4\r\n", *pieces)
    assert client.responses[1].body == b"/body"
    assert client.responses[client.request()].status == 200


def test_upgrade_that_a_trusted_proxy_hands_on_is_left() -> None:
    """Its client would speak to us unseen."""
    server = MemoryServer(echo, clients=ClientRules(trusted_proxies=(ip_network("192.0.2.0/24"),)))
    assert server.exchange(UPGRADE % (b"GET", b"AAMAAABk", b"")).received.startswith(b"HTTP/1.1 200")
    server.close()


def test_upgrade_comes_too_late_for_an_answer_that_has_begun(serve: Serve) -> None:
    async def refuse(stream: HttpStream) -> None:
        answer(stream, 401, b"no")

    head = UPGRADE % (b"POST", b"AAMAAABk", b"Content-Length: 4\r\n")
    transport = serve(refuse).exchange(head, b"body")
    assert transport.received.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "change",
    [
        (b"Upgrade: h2c", b"Upgrade: h2"),
        (b"Upgrade: h2c", b"Upgrade: websocket"),
        (b"Upgrade, HTTP2-Settings", b"Upgrade"),
        (b"Upgrade, HTTP2-Settings", b"HTTP2-Settings"),
        (b"Upgrade, HTTP2-Settings", b"Upgrade, HTTP2-Settings, close"),
        (b"AAMAAABk", b"AAMAAABk\r\nHTTP2-Settings: AAMAAABk"),
        (b"AAMAAABk", b"AAMAAAB"),
        (b"AAMAAABk", b"?"),
        (b"AAMAAABk", b"AAT_____"),
        (b"AAMAAABk", b"AAMAAABk" * 33),
        (b"HTTP2-Settings: AAMAAABk\r\n", b""),
    ],
)
def test_unfit_upgrade_is_answered_in_http11(serve: Serve, change: tuple[bytes, bytes]) -> None:
    head = UPGRADE % (b"GET", b"AAMAAABk", b"")
    assert head.replace(*change) != head
    server = serve(echo)
    assert server.exchange(head).received.startswith(SWITCHED)
    assert server.exchange(head.replace(*change)).received.startswith(b"HTTP/1.1 200")


def test_second_request_of_a_connection_is_not_upgraded(serve: Serve) -> None:
    transport = serve(echo).exchange(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", UPGRADE % (b"GET", b"AAMAAABk", b""))
    assert transport.received.count(b"HTTP/1.1 200") == 2


def test_upgraded_request_is_cancelled_by_its_reset(serve: Serve) -> None:
    hold = Hold()
    client = UpgradingClient(serve(hold))
    client.h2.reset_stream(1)
    client.exchange()
    assert hold.told == ["gone"]


# The end.


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


# Any history.


def sizes_within(window: int) -> st.SearchStrategy[tuple[int, list[int]]]:
    """(window, sizes of bodies): a window of one byte is an exchange for each."""
    most = 6000 if window > 1 else 1200  # more than the server sends at once
    return st.tuples(st.just(window), st.lists(st.integers(0, most), min_size=1, max_size=5))


@settings(deadline=None)
@given(
    window_and_sizes=st.sampled_from([1, 100, 65_535]).flatmap(sizes_within),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_any_cut_of_the_input_and_any_window_gives_the_same_bytes(
    window_and_sizes: tuple[int, list[int]], cuts: list[int]
) -> None:
    window, sizes = window_and_sizes

    async def stream_back(stream: HttpStream) -> None:
        body = await stream.read_body(10_000)
        stream.send_head(STREAMED)
        for start in range(0, len(body), 1000):
            stream.send(body[start : start + 1000])
            await asyncio.sleep(0.001)
        stream.end()

    limits = ConnectionLimits(http2=Http2Limits(frames=FrameLimits(num_overhead_frames=10**6)))
    with contextlib.closing(MemoryServer(stream_back, limits)) as server:
        client = Http2Client(server, settings={INITIAL_WINDOW: window})
        ids = [client.begin(POST, bytes([65 + n]) * size) for n, size in enumerate(sizes)]
        wire = client.h2.data_to_send()
        for turn in itertools.count():
            cut = cuts[turn % len(cuts)] * 20
            client.transport.feed(wire[:cut])
            server.loop.advance(0.0005)
            client.read()
            wire = wire[cut:] + client.h2.data_to_send()
            if not wire:
                break
        client.advance(1)
        got = [(client.responses[i].status, client.responses[i].body) for i in ids]
        assert got == [(200, bytes([65 + n]) * size) for n, size in enumerate(sizes)]
        assert all(client.responses[i].is_complete for i in ids)
