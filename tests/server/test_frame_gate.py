"""Raw frames ahead of h2: what is refused, what is kept from it; whole input = byte by byte."""

import pytest
from h2.errors import ErrorCodes
from hypothesis import given
from hypothesis import strategies as st

from server.wire.frame_gate import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    SETTINGS,
    WINDOW_UPDATE,
    FrameGate,
    FrameRefused,
    StreamFault,
    read_settings,
)
from server.wire.limits import FrameLimits
from tests.server.raw_http2 import (
    ENABLE_PUSH,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_LIST,
    MAX_STREAMS,
    TABLE_SIZE,
    frame,
    settings,
)

START = PREFACE + frame(SETTINGS)
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20
UNKNOWN = 0x42
ONE = b"\0\0\0\1"


def gate_after(data: bytes, now: float = 0.0) -> FrameGate:
    """The gate of a connection with stream 1 in use, after these frames."""
    gate = FrameGate(FrameLimits(), highest_stream_id=1)
    assert gate.receive(START, now) == START
    gate.receive(data, now)
    return gate


def passed_by(data: bytes) -> bytes:
    gate = FrameGate(FrameLimits(), highest_stream_id=1)
    gate.receive(START, 0.0)
    passed = gate.receive(data, 0.0)
    assert gate.refusal is None
    return passed


CALM = ErrorCodes.ENHANCE_YOUR_CALM
PROTOCOL = ErrorCodes.PROTOCOL_ERROR
SIZE = ErrorCodes.FRAME_SIZE_ERROR


def test_frame_is_refused_by_its_header_before_its_payload() -> None:
    gate = gate_after(b"")
    assert gate.receive(frame(DATA, bytes(2**20), stream_id=1)[:9], 0.0) == b""
    assert gate.refusal is not None
    assert gate.receive(b"anything", 0.0) == b""


@pytest.mark.parametrize(("num_bytes", "code"), [(32_768, None), (32_769, CALM)])
def test_header_block_is_as_limited_in_one_large_frame(num_bytes: int, code: ErrorCodes | None) -> None:
    gate = FrameGate(FrameLimits(frame_bytes=65_536))
    gate.receive(START + frame(HEADERS, bytes(num_bytes), END_HEADERS, 1), 0.0)
    assert (gate.refusal and gate.refusal.code) == code


def test_content_in_either_direction_pays_for_overhead() -> None:
    update = frame(WINDOW_UPDATE, ONE, stream_id=1)
    gate = gate_after(update * 1000)
    gate.count_content(640)
    gate.receive(update * 10, 0.0)
    assert gate.refusal is None
    gate.receive(frame(DATA, bytes(128), stream_id=1) + update, 0.0)
    assert gate.refusal is None
    gate.receive(update, 0.0)
    assert gate.refusal is not None


def test_content_is_not_saved_up_without_bound() -> None:
    gate = gate_after(b"")
    gate.count_content(2**40)
    gate.receive(frame(PRIORITY, bytes(5), stream_id=1) * 1001, 0.0)
    assert gate.refusal is not None


def test_goaway_is_kept_from_h2_and_its_code_told() -> None:
    gate = gate_after(b"")
    ping = frame(PING, bytes(8))
    goaway = frame(GOAWAY, bytes(4) + b"\0\0\0\x0b" + b"debug data")
    assert gate.receive(ping + goaway + ping, 0.0) == ping * 2
    assert gate.goaway_code == CALM


@pytest.mark.parametrize("kind", [PRIORITY, UNKNOWN, 10])
def test_frames_without_a_meaning_are_kept_from_h2(kind: int) -> None:
    ping = frame(PING, bytes(8))
    assert passed_by(ping + frame(kind, bytes(5), stream_id=1) + ping) == ping * 2


def test_of_headers_h2_sees_the_block_alone() -> None:
    flags = END_HEADERS | PADDED | HAS_PRIORITY
    padded = frame(HEADERS, b"\3" + b"\0\0\0\0\x0f" + b"block" + bytes(3), flags, 3)
    assert passed_by(padded) == frame(HEADERS, b"block", END_HEADERS, 3)


def test_of_settings_h2_sees_the_known_ones_once() -> None:
    wire = b"\0\4\0\0\0\5" + b"\xff\xff\0\0\0\1" + b"\0\4\0\0\0\6"
    assert passed_by(frame(SETTINGS, wire)) == frame(SETTINGS, b"\0\4\0\0\0\6")


def test_table_size_that_is_replaced_in_its_frame_is_told() -> None:
    sizes = b"".join(b"\0\1" + size.to_bytes(4, "big") for size in (50, 20, 4096))
    gate = gate_after(frame(SETTINGS, sizes))
    assert gate.least_table_size == 20


def test_reserved_bit_of_an_increment_is_kept_from_h2() -> None:
    assert passed_by(frame(WINDOW_UPDATE, b"\x80\0\0\1")) == frame(WINDOW_UPDATE, ONE)


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (frame(PRIORITY, bytes(4), stream_id=1), SIZE),
        (frame(PRIORITY, bytes(6), stream_id=1), SIZE),
        (frame(PRIORITY, ONE + b"\0", stream_id=1), PROTOCOL),
        (frame(WINDOW_UPDATE, bytes(4), stream_id=1), PROTOCOL),
    ],
)
def test_fault_of_a_stream_is_told_and_the_next_frame_goes_through(broken: bytes, code: ErrorCodes) -> None:
    gate = gate_after(b"")
    ping = frame(PING, bytes(8))
    assert gate.receive(broken + ping, 0.0) == ping
    assert gate.faults == [StreamFault(1, code)]
    idle = gate_after(broken[:8] + b"\3" + broken[9:].replace(ONE, b"\0\0\0\3"))
    assert idle.refusal is not None
    assert idle.refusal.code is code


def test_head_is_pending_until_its_block_is_complete() -> None:
    gate = FrameGate(FrameLimits())
    assert gate.pending_head == 0
    gate.receive(START, 0.0)
    assert gate.pending_head is None
    for number in (1, 2):
        headers = frame(HEADERS, b"abc", stream_id=1)
        for piece in (headers[:-1], headers[-1:]):
            gate.receive(piece, 0.0)
            assert gate.pending_head == number
        gate.receive(frame(CONTINUATION, b"abc", END_HEADERS, 1), 0.0)
        assert gate.pending_head is None


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.one_of(st.binary(max_size=40), st.sampled_from([bytes(4), bytes(5), ONE + b"\0", bytes(6), bytes(8)])),
    st.sampled_from([0, 1, END_HEADERS, PADDED, END_HEADERS | HAS_PRIORITY, END_HEADERS | PADDED | HAS_PRIORITY]),
    st.integers(0, 3),
)


@given(st.lists(FRAMES, max_size=30), st.binary(max_size=20))
def test_whole_input_is_byte_by_byte_and_turn_by_turn_input(frames: list[bytes], rest: bytes) -> None:
    data = START + b"".join(frames) + rest
    limits = FrameLimits(num_overhead_frames=8)
    whole, bytewise, in_turns = FrameGate(limits), FrameGate(limits), FrameGate(limits, frames_at_once=1)
    passed = whole.receive(data, 0.0)
    assert b"".join(bytewise.receive(data[i : i + 1], 0.0) for i in range(len(data))) == passed
    pieces = [in_turns.receive(data, 0.0)]
    while in_turns.has_more:
        pieces.append(in_turns.receive(b"", 0.0))
    assert b"".join(pieces) == passed
    for other in (bytewise, in_turns):
        assert str(other.refusal) == str(whole.refusal)
        assert other.goaway_code == whole.goaway_code
        assert other.faults == whole.faults
        assert other.least_table_size == whole.least_table_size
        assert other.pending_head == whole.pending_head


ENABLE_CONNECT = 8


@pytest.mark.parametrize("code", [TABLE_SIZE, MAX_STREAMS, MAX_LIST])
def test_any_number_is_taken_for_a_size(code: int) -> None:
    payload = settings((code, 2**32 - 1)).content
    assert read_settings(payload) == (payload, [])


@pytest.mark.parametrize(
    ("code", "least", "most", "error"),
    [
        (ENABLE_PUSH, 0, 1, PROTOCOL),
        (INITIAL_WINDOW, 0, 2**31 - 1, ErrorCodes.FLOW_CONTROL_ERROR),
        (MAX_FRAME, 2**14, 2**24 - 1, PROTOCOL),
        (ENABLE_CONNECT, 0, 1, PROTOCOL),
    ],
)
def test_value_is_taken_at_the_ends_of_its_range_and_not_past_them(
    code: int, least: int, most: int, error: ErrorCodes
) -> None:
    for value in (least, most):
        payload = settings((code, value)).content
        assert read_settings(payload) == (payload, [])
    for value in {least - 1, most + 1} - {-1}:
        with pytest.raises(FrameRefused) as caught:
            read_settings(settings((code, value)).content)
        assert caught.value.code is error


def test_unknown_settings_are_left_out() -> None:
    known = settings((MAX_LIST, 5)).content
    assert read_settings(settings((0, 1), (7, 1), (MAX_LIST, 5), (9, 1), (0xFFFF, 1)).content) == (known, [])


def test_last_value_of_a_setting_holds_and_table_sizes_before_it_are_told() -> None:
    payload = settings((TABLE_SIZE, 7), (INITIAL_WINDOW, 1), (TABLE_SIZE, 5), (INITIAL_WINDOW, 2), (TABLE_SIZE, 9))
    assert read_settings(payload.content) == (settings((TABLE_SIZE, 9), (INITIAL_WINDOW, 2)).content, [7, 5])
