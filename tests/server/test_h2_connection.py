"""What is said instead of h2 and hpack: DATA framed by hand, and fields that hpack's decoder understands."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.stream import H2Stream
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from server.wire.h2_connection import _VARYING, OutgoingBody, ResponseEncoder, h2_is_as_known, last_frame
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


TABLE_BYTES = 4096  # RFC 9113 §6.5.2
HEAD = [
    (b":status", b"200"),
    (b"date", b"Fri, 31 Jan 2025 12:00:00 GMT"),
    (b"content-type", b"application/json"),
    (b"content-length", b"15"),
    (b"cache-control", b"no-store"),
    (b"x-request-id", b"5c1f"),
]
NAMES = st.sampled_from([b":status", b"date", b"content-type", b"x", b"x-long", *_VARYING])
VALUES = st.one_of(
    st.sampled_from([b"200", b"404", b"", b"application/json"]),
    st.binary(max_size=5),
    st.integers(100, 300).map(lambda size: b"v" * size),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=12)


@given(st.lists(st.one_of(FIELDS, st.sampled_from([0, 60, 200, 1000, TABLE_BYTES])), max_size=30))
def test_decoder_understands_whatever_was_said_before(steps: list[list[tuple[bytes, bytes]] | int]) -> None:
    """A step is a field section, or another size of the table."""
    encoder, decoder = ResponseEncoder(), Decoder()
    for step in steps:
        if isinstance(step, int):
            if step != encoder.header_table_size:  # hpack does not signal one that is said again: clamp_encoder's part
                encoder.header_table_size = step
                assert decoder.decode(encoder.encode([]), raw=True) == []
        else:
            assert decoder.decode(encoder.encode(step), raw=True) == step
        assert encoder.header_table.dynamic_entries == decoder.header_table.dynamic_entries


def test_what_varies_is_not_put_into_the_table() -> None:
    encoder = ResponseEncoder()
    block = encoder.encode([(name, b"1") for name in _VARYING])
    assert not encoder.header_table.dynamic_entries
    assert Decoder().decode(block, raw=True) == [(name, b"1") for name in _VARYING]


def test_what_moves_in_the_table_is_looked_for_again() -> None:
    encoder, decoder = ResponseEncoder(), Decoder()
    for second in range(3):
        head = [(name, b"%d" % second if name == b"date" else value) for name, value in HEAD]
        for _ in range(3):
            assert decoder.decode(encoder.encode(head), raw=True) == head


@pytest.mark.parametrize("size", [1, 126, 127, 128, 20_000])
def test_literals_of_any_length_are_as_hpack_writes_them(size: int) -> None:
    fields = [(b"server-timing", b"x" * size), (b"content-length", b"1" * size)]
    ours = ResponseEncoder().encode(fields)
    theirs = Encoder().encode([(*field, True) for field in fields], huffman=False)
    assert ours == theirs
    assert Decoder(10**6).decode(ours, raw=True) == fields
