"""DATA framed by hand: it is h2's own, and so is what it leaves of h2's windows."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.stream import H2Stream
from hypothesis import given
from hypothesis import strategies as st

from server.wire.h2_connection import OutgoingBody, frame_next, h2_is_as_known, last_frame
from server.wire.messages import ResponseHead
from tests.server.http2_client import fields
from tests.server.http2_pair import Pair

STREAM = H2Stream(1, H2Configuration(client_side=False), 65_535, 65_535)


def test_h2_here_is_the_h2_that_is_known() -> None:
    assert h2_is_as_known()


def test_h2_that_does_more_than_the_windows_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    send_data = H2Connection.send_data

    def counting(self: H2Connection, *arguments: object) -> None:
        send_data(self, *arguments)  # type: ignore[arg-type]
        self.max_outbound_frame_size += 1

    monkeypatch.setattr(H2Connection, "send_data", counting)
    assert not h2_is_as_known.__wrapped__()


def test_h2_that_writes_other_heads_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    send_headers = H2Connection.send_headers

    def counting(self: H2Connection, *arguments: object) -> None:
        send_headers(self, *arguments)  # type: ignore[arg-type]
        self.max_outbound_frame_size += not self.config.client_side

    monkeypatch.setattr(H2Connection, "send_headers", counting)
    assert not h2_is_as_known.__wrapped__()


@pytest.mark.parametrize("size", [10, 16_384, 40_000])
def test_head_by_hand_is_h2s_head(size: int) -> None:
    received = []
    for by_hand in (True, False):
        pair = Pair(by_hand)
        stream_id = pair.client.get_next_available_stream_id()
        pair.client.send_headers(stream_id, fields(), end_stream=True)
        pair.server.receive(pair.client.data_to_send(), 0.0)
        pair.server.take_control()
        pair.server.responses.send_head(stream_id, ResponseHead(103, ((b"link", b"x"),)))
        pair.server.responses.send_head(stream_id, ResponseHead(200, ((b"x-long", b"x" * size),)))
        received.append(b"".join(pair.server.take_control()))
    assert received[0] == received[1]
    assert len(received[0]) > size


@pytest.mark.parametrize("size", [1, 255, 16_384])
def test_frame_by_hand_is_h2s_frame(size: int) -> None:
    frames = []
    for by_hand in (True, False):
        pair = Pair()
        stream_id = pair.open()
        pair.exchange()
        stream = pair.server._h2.streams[stream_id]
        body = OutgoingBody(stream)
        body.data += b"x" * size
        pieces: list[bytes] = []
        assert frame_next(pair.server._h2, body, pieces, by_hand) == 9 + size
        assert stream.outbound_flow_control_window == 65_535 - size
        assert frame_next(pair.server._h2, body, pieces, by_hand) == 0
        frames.append(b"".join(pieces))
    assert frames[0] == frames[1]
    assert len(frames[0]) == 9 + size


@pytest.mark.parametrize("has_read_request", [True, False])
@pytest.mark.parametrize("size", [0, 1, 16_384])
def test_last_frame_by_hand_is_h2s_frame_and_leaves_h2_as_it_would_be(size: int, has_read_request: bool) -> None:
    frames, states = [], []
    for by_hand in (True, False):
        pair = Pair()
        stream_id = pair.client.get_next_available_stream_id()
        pair.client.send_headers(stream_id, fields(), end_stream=has_read_request)
        pair.exchange()
        pair.server.responses.send_head(stream_id, ResponseHead(200, ()))
        connection = pair.server._h2
        stream = connection.streams[stream_id]
        body = OutgoingBody(stream)
        body.data += b"x" * size
        frames.append(last_frame(connection, body, by_hand))
        states.append((connection.outbound_flow_control_window, vars(stream.state_machine), stream.closed))
        states[-1] += (stream.outbound_flow_control_window, connection.state_machine.state)
    assert frames[0] == frames[1]
    assert len(frames[0]) == 9 + size
    assert states[0] == states[1]


def test_last_frame_waits_for_a_window() -> None:
    pair = Pair()
    stream_id = pair.open()
    body = OutgoingBody(pair.server._h2.streams[stream_id])
    body.data += b"x" * 16_384
    body.h2.outbound_flow_control_window = 16_383
    assert last_frame(pair.server._h2, body, by_hand=True) == b""
    body.h2.outbound_flow_control_window = 16_384
    assert len(last_frame(pair.server._h2, body, by_hand=True)) == 9 + 16_384


@given(st.lists(st.binary(max_size=20), max_size=10), st.lists(st.integers(0, 30), max_size=20))
def test_body_is_taken_in_any_pieces(chunks: list[bytes], sizes: list[int]) -> None:
    body = OutgoingBody(STREAM)
    for chunk in chunks:
        body.data += chunk
    whole = b"".join(chunks)
    for size in sizes:
        taken = body.take(size)
        assert taken == whole[:size]
        whole = whole[size:]
        assert len(body.data) == len(whole)
