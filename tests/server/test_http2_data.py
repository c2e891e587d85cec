"""DATA framed by hand: it is h2's own, and so is what it leaves of h2's windows."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.stream import H2Stream
from hypothesis import given
from hypothesis import strategies as st

from server.wire.h2_connection import OutgoingBody, h2_is_as_known, last_frame
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
