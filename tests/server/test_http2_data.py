"""DATA framed by hand: it is h2's own, and so is what it leaves of h2's windows."""

import pytest
from h2.connection import H2Connection
from hypothesis import given
from hypothesis import strategies as st

from server.http2_data import OutgoingBody, h2_is_as_known, next_frame
from tests.server.http2_pair import Pair


def test_h2_here_is_the_h2_that_is_known() -> None:
    assert h2_is_as_known()


def test_h2_that_does_more_than_the_windows_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    send_data = H2Connection.send_data

    def counting(self: H2Connection, *arguments: object) -> None:
        send_data(self, *arguments)  # type: ignore[arg-type]
        self.max_outbound_frame_size += 1

    monkeypatch.setattr(H2Connection, "send_data", counting)
    assert not h2_is_as_known.__wrapped__()


@pytest.mark.parametrize("size", [1, 255, 16_384])
def test_frame_by_hand_is_h2s_frame(size: int) -> None:
    frames = []
    for by_hand in (True, False):
        pair = Pair()
        stream_id = pair.open()
        pair.exchange()
        stream = pair.server._h2.streams[stream_id]
        body = OutgoingBody()
        body.append(b"x" * size)
        frames.append(next_frame(pair.server._h2, stream, body, by_hand))
        assert stream.outbound_flow_control_window == 65_535 - size
        assert next_frame(pair.server._h2, stream, body, by_hand) == b""
    assert frames[0] == frames[1]
    assert len(frames[0]) == 9 + size


@given(st.lists(st.binary(max_size=20), max_size=10), st.lists(st.integers(0, 30), max_size=20))
def test_body_is_taken_in_any_pieces(chunks: list[bytes], sizes: list[int]) -> None:
    body = OutgoingBody()
    for chunk in chunks:
        body.append(chunk)
    whole = b"".join(chunks)
    for size in sizes:
        taken = body.take(size)
        assert taken == whole[:size]
        whole = whole[size:]
        assert body.num_unsent == len(whole)
