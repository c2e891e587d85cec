"""What the encoder says, hpack's decoder understands, whatever becomes of the table; nothing is worked out twice."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from server.wire.h2_connection import _VARYING, ResponseEncoder

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
