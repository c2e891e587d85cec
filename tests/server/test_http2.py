"""HTTP/2's reading side: whatever comes, it answers with events or a GOAWAY, however the input is split."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.http2 import check
from server.wire.http2 import Http2Protocol
from server.wire.http2_frames import CONTINUATION, DATA, GOAWAY, HEADERS, PRIORITY, WINDOW_UPDATE
from server.wire.http2_heads import read_request
from server.wire.limits import FrameLimits, HeadLimits, Http2Limits
from server.wire.messages import Event, Http2ErrorCode, HttpRequest, ResponseHead
from tests.server.http2_client import fields
from tests.server.raw_http2 import END_HEADERS, HAS_PRIORITY, PADDED, START, block, data, frame, get, post, rst, wire

CALM = Http2ErrorCode.ENHANCE_YOUR_CALM
ONE = b"\0\0\0\1"
OPEN = START + post().encode(0)  # stream 1


def new_protocol(frames_at_once: int = 2**31, **limits: int) -> Http2Protocol:
    return Http2Protocol(
        HeadLimits(), Http2Limits(FrameLimits(**limits)), lambda: b"now", frames_at_once=frames_at_once
    )


def protocol_after(*said: bytes, **limits: int) -> Http2Protocol:
    protocol = new_protocol(**limits)
    for read in said:
        protocol.receive(read, 0.0)
    return protocol


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_no_input_is_more_than_a_refusal(data: bytes) -> None:
    """Arbitrary frames behind a good beginning, whole and split, read and answered: events, or a GOAWAY."""
    check(data)


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.one_of(st.binary(max_size=40), st.sampled_from([block(), bytes(4), bytes(5), ONE + b"\0", bytes(6), bytes(8)])),
    st.sampled_from([0, 1, 5, END_HEADERS, PADDED, END_HEADERS | HAS_PRIORITY, END_HEADERS | PADDED | HAS_PRIORITY]),
    st.integers(0, 3),
)


def reading(protocol: Http2Protocol, pieces: Iterable[bytes]) -> tuple[object, ...]:
    """What came of them: events, frames sent, and how the connection stands."""
    events: list[Event] = []
    for piece in pieces:
        events += protocol.receive(piece, 0.0)
        while protocol.has_more:
            events += protocol.receive(b"", 0.0)
    told = () if protocol.has_failed else (events, protocol.pending_head)
    return (protocol.failed_with, protocol.has_peer_left, b"".join(protocol.take_control()), *told)


@given(st.lists(FRAMES, max_size=30), st.binary(max_size=20))
def test_whole_input_is_byte_by_byte_and_turn_by_turn_input(frames: list[bytes], rest: bytes) -> None:
    data = OPEN + b"".join(frames) + rest
    whole = reading(new_protocol(num_overhead_frames=8), [data])
    assert reading(new_protocol(num_overhead_frames=8), (bytes((octet,)) for octet in data)) == whole
    assert reading(new_protocol(1, num_overhead_frames=8), [data]) == whole


# Limits beside those of test_attacks and test_limits.


def test_frame_is_refused_by_its_header_before_its_payload() -> None:
    protocol = protocol_after(OPEN, frame(DATA, bytes(2**20), stream_id=1)[:9])
    assert protocol.failed_with is Http2ErrorCode.FRAME_SIZE_ERROR
    assert protocol.receive(b"anything", 0.0) == []


@pytest.mark.parametrize(("num_bytes", "is_refused"), [(32_768, False), (32_769, True)])
def test_header_block_is_as_limited_in_one_large_frame(num_bytes: int, is_refused: bool) -> None:
    begun = frame(HEADERS, bytes(num_bytes), END_HEADERS, 1)[:9]
    assert protocol_after(START, begun, frame_bytes=65_536).has_failed is is_refused


def test_content_in_either_direction_pays_for_overhead() -> None:
    update = frame(WINDOW_UPDATE, ONE, stream_id=1)
    protocol = protocol_after(OPEN, update * 1000)
    protocol._earn(640)
    protocol.receive(update * 10, 0.0)
    protocol.receive(frame(DATA, bytes(128), stream_id=1) + update, 0.0)
    assert not protocol.has_failed
    protocol.receive(update, 0.0)
    assert protocol.failed_with is CALM


def test_content_is_not_saved_up_without_bound() -> None:
    protocol = protocol_after(OPEN)
    protocol._earn(2**40)
    protocol.receive(frame(PRIORITY, bytes(5), stream_id=1) * 1001, 0.0)
    assert protocol.failed_with is CALM


@pytest.mark.parametrize("preface", [b"PRI * HTTP/2.0\r\n\r\nXX", b"GET / HTTP/1.1\r\n"])
def test_wrong_preface_is_a_connection_error(preface: bytes) -> None:
    """RFC 9113 §3.4, where ALPN has chosen HTTP/2."""
    assert protocol_after(preface).failed_with is Http2ErrorCode.PROTOCOL_ERROR


def test_error_of_the_clients_goaway_is_told() -> None:
    assert not protocol_after(START, frame(GOAWAY, bytes(8))).has_peer_left
    assert protocol_after(START, frame(GOAWAY, bytes(4) + b"\0\0\0\x0b" + b"debug data")).has_peer_left


def test_head_is_pending_until_its_block_is_complete() -> None:
    protocol = new_protocol()
    assert protocol.pending_head == 0
    protocol.receive(START, 0.0)
    assert protocol.pending_head is None
    for number in (1, 2):
        begun = frame(HEADERS, block()[:9], stream_id=2 * number - 1)
        for piece in (begun[:-1], begun[-1:]):
            protocol.receive(piece, 0.0)
            assert protocol.pending_head == number
        protocol.receive(frame(CONTINUATION, block()[9:], END_HEADERS, 2 * number - 1), 0.0)
        assert protocol.pending_head is None


def test_bodies_that_nobody_has_read_do_not_shut_the_connection_once_their_streams_are_reset() -> None:
    protocol = protocol_after(START)
    for stream in range(1, 101, 2):  # 800 KiB, where the connection's window is 512
        protocol.receive(wire([post(stream=stream), data(bytes(16_384), 0, stream), rst(stream=stream)]), 0.0)
    assert not protocol.has_failed


def test_head_of_a_stream_weighs_nothing_once_its_response_has_ended() -> None:
    protocol = Http2Protocol(HeadLimits(), Http2Limits(heads_bytes=2000), lambda: b"now")
    protocol.receive(START + get(stream=1).encode(0), 0.0)  # stays open: an only request is never refused
    for stream in range(3, 43, 2):
        assert [type(event) for event in protocol.receive(get(stream=stream).encode(0), 0.0)] == [HttpRequest]
        protocol.responses.send_head(stream, ResponseHead(200, ()))
        protocol.responses.send_end(stream)
        protocol.take_data(2**30)


# Requests.


def query_of(path: str) -> str:
    pairs = [(name.encode(), value.encode()) for name, value in fields(path=path)]
    return read_request(1, pairs, False, HeadLimits()).query


def test_a_path_that_is_said_again_takes_no_more_room_until_others_have_come() -> None:
    first = query_of("/read?asked")
    assert query_of("/read?asked") is first
    for number in range(100):
        query_of(f"/read?{number}")
    assert query_of("/read?asked") is not first
