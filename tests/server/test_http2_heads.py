"""Response heads in HPACK: hpack's decoder understands them. What requests' heads may be is tabled in http2_cases."""

import pytest
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple
from hypothesis import example, given
from hypothesis import strategies as st

from server.wire.http2_heads import _VARYING, FieldDecoder, FieldEncoder
from server.wire.messages import ConnectionFault

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
SIZES = st.lists(st.sampled_from([0, 60, 200, 1000, TABLE_BYTES, 2**32 - 1]), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.one_of(FIELDS, SIZES), max_size=30))
def test_decoder_understands_every_history(steps: list[list[tuple[bytes, bytes]] | tuple[int, ...]]) -> None:
    """A step is a field section, or sizes of the table, as SETTINGS name them."""
    encoder, decoder = FieldEncoder(), Decoder()
    for step in steps:
        if isinstance(step, tuple):
            encoder.resize(step)
        else:
            assert decoder.decode(encoder.encode(step), raw=True) == step
            assert encoder.table.dynamic_entries == decoder.header_table.dynamic_entries
            assert encoder.table.maxsize == decoder.header_table.maxsize <= TABLE_BYTES


def test_varying_fields_are_not_put_into_the_table() -> None:
    encoder = FieldEncoder()
    block = encoder.encode([(name, b"1") for name in _VARYING])
    assert not encoder.table.dynamic_entries
    assert Decoder().decode(block, raw=True) == [(name, b"1") for name in _VARYING]


def test_field_that_moves_in_the_table_is_looked_up_again() -> None:
    encoder, decoder = FieldEncoder(), Decoder()
    for second in range(3):
        head = [(name, b"%d" % second if name == b"date" else value) for name, value in HEAD]
        for _ in range(3):
            assert decoder.decode(encoder.encode(head), raw=True) == head


@pytest.mark.parametrize("size", [1, 126, 127, 128, 20_000])
def test_literals_of_any_length_are_as_hpack_writes_them(size: int) -> None:
    fields = [(b"server-timing", b"x" * size), (b"content-length", b"1" * size)]
    ours = FieldEncoder().encode(fields)
    theirs = Encoder().encode([(*field, True) for field in fields], huffman=False)
    assert ours == theirs
    assert Decoder(10**6).decode(ours, raw=True) == fields


PIECES = st.one_of(
    FIELDS.map(lambda fields: FieldEncoder().encode(fields)),
    FIELDS.map(lambda fields: Encoder().encode([NeverIndexedHeaderTuple(*field) for field in fields])),
    st.sampled_from([b"\x80", b"\xbe", b"\xbf", b"\xff\x00", b"\x20", b"\x3f\xe1\x1f", b"\x0f\x01\x01v"]),
    st.binary(max_size=4),
)


@example([b"\x10\x01a\x05v"])  # cut off
@example([b"\x10\x01a\x7f\xe9\x01" + b"v" * 360])  # 32 bytes for a field, its name and value: one more than 392
@given(st.lists(st.lists(PIECES, max_size=4).map(b"".join), max_size=4))
def test_any_blocks_of_one_connection_are_decoded_as_hpack_decodes_them(blocks: list[bytes]) -> None:
    ours, hpacks = FieldDecoder(392), Decoder(392)
    for block in blocks:
        try:
            expected = [tuple(one) for one in hpacks.decode(block, raw=True)]
        except (HPACKError, IndexError, TypeError):
            with pytest.raises(ConnectionFault):
                ours.decode(block)
            return
        try:
            assert ours.decode(block) == expected
        except ConnectionFault:  # more changes of the table's size than RFC 7541 has
            assert bytes((block[0] & 0xE0,)) == b"\x20"
            return
