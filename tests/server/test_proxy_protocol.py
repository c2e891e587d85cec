"""The PROXY protocol's header: what is read of it, what is refused, and where it ends."""

import struct
from ipaddress import IPv4Address, IPv6Address
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.listening.clients import MAX_BYTES, ProxyHeader, ProxyHeaderParser, ProxyProtocolError
from server.wire.messages import Peer

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
TCP4 = IPv4Address("192.0.2.7").packed + IPv4Address("198.51.100.1").packed + struct.pack(">HH", 4242, 443)
TCP6 = IPv6Address("2001:db8::7").packed + IPv6Address("2001:db8::1").packed + struct.pack(">HH", 4242, 443)
UNIX = b"/client".ljust(108, b"\0") + b"/server".ljust(108, b"\0")
TLVS = b"\x01\x00\x02h2" + b"\x03\x00\x04\0\0\0\0" + b"\x04\x00\x00"


def header(block: bytes, family: int, command: int = 0x21, length: int | None = None) -> bytes:
    return SIGNATURE + struct.pack(">BBH", command, family, len(block) if length is None else length) + block


# What a header is, and what is read of it
HEADERS = {
    "tcp4": (header(TCP4, 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
    "tcp6": (header(TCP6, 0x21), Peer(IPv6Address("2001:db8::7"), 4242)),
    "tcp4 in tcp6": (
        header(IPv6Address("::ffff:192.0.2.7").packed + TCP6[16:], 0x21),
        Peer(IPv4Address("192.0.2.7"), 4242),
    ),
    "unix": (header(UNIX, 0x31), Peer()),
    "unspecified": (header(b"", 0x00), None),
    "unspecified with what may be skipped": (header(TCP4, 0x00), None),
    "unspecified over streams": (header(b"", 0x01), None),
    "local": (header(b"", 0x00, 0x20), None),
    "local with addresses": (header(TCP4, 0x11, 0x20), None),
    "local of a family nobody knows": (header(b"xyz", 0xFF, 0x20), None),
    "tcp4 with tlvs": (header(TCP4 + TLVS, 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
    "tcp6 with tlvs": (header(TCP6 + TLVS, 0x21), Peer(IPv6Address("2001:db8::7"), 4242)),
    "longest": (header(TCP4.ljust(MAX_BYTES, b"\0"), 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
}
# What is refused, and after how many bytes of it
REFUSED = {
    "http": (b"GET / HTTP/1.1\r\n", 1),
    "version 1": (b"PROXY TCP4 192.0.2.7 ", 1),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 1),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdef", 1),
    "signature broken at its end": (SIGNATURE[:11] + b"\r" + b"\x21\x11\x00\x0c" + TCP4, 12),
    "version 3": (header(TCP4, 0x11, 0x31), 13),
    "version 1 in binary": (header(TCP4, 0x11, 0x11), 13),
    "another command": (header(TCP4, 0x11, 0x22), 13),
    "datagrams": (header(TCP4, 0x12), 14),
    "no transport": (header(TCP4, 0x10), 14),
    "a family nobody knows": (header(TCP4, 0x41), 14),
    "too long": (header(TCP4, 0x11, length=MAX_BYTES + 1), 16),
    "as long as can be": (header(TCP4, 0x11, length=65_535), 16),
    "local and too long": (header(b"", 0x00, 0x20, length=MAX_BYTES + 1), 16),
    "tcp4 cut short": (header(TCP4[:-1], 0x11), 16),
    "tcp6 with addresses of tcp4": (header(TCP4, 0x21), 16),
    "unix cut short": (header(UNIX[:-1], 0x31), 16),
}


def feed(data: bytes, sizes: list[int]) -> tuple[ProxyHeader | None, int]:
    """Feed pieces of at most these sizes, never more than wanted; the outcome, and how many bytes it took."""
    parser, position = ProxyHeaderParser(), 0
    sizes = sizes or [len(data)]
    for turn in range(len(data)):
        piece = data[position : position + min(parser.num_wanted, sizes[turn % len(sizes)])]
        position += len(piece)
        found = parser.receive(piece)
        if found is not None or position == len(data):
            return found, position
    return None, position


@pytest.mark.parametrize("name", HEADERS)
def test_header_says_who_the_client_is_and_ends_where_it_says(name: str) -> None:
    data, source = HEADERS[name]
    for sizes in ([len(data)], [1]):
        assert feed(data + b"GET / HTTP/1.1\r\n", sizes) == (ProxyHeader(source), len(data))
        assert feed(data[:-1], sizes)[0] is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_header_is_refused_at_the_byte_that_tells(name: str) -> None:
    data, num_bytes = REFUSED[name]
    with pytest.raises(ProxyProtocolError):
        feed(data, [len(data)])
    assert feed(data[: num_bytes - 1], [1]) == (None, num_bytes - 1)
    with pytest.raises(ProxyProtocolError):
        feed(data[:num_bytes], [1])


def outcome(data: bytes, sizes: list[int]) -> object:
    try:
        return feed(data, sizes)[0]
    except ProxyProtocolError:
        return ProxyProtocolError


GENERATED = st.one_of(
    st.binary(max_size=300),
    st.builds(
        header,
        st.binary(max_size=300),
        st.integers(0, 255),
        st.sampled_from([0x20, 0x21]) | st.integers(0, 255),
        st.none() | st.integers(0, 65_535),
    ),
)


@given(GENERATED, st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_bytes_mean_the_same_in_whatever_pieces_they_come(data: bytes, sizes: list[int]) -> None:
    if data:
        whole = outcome(data, [len(data)])
        assert outcome(data, [1]) == outcome(data, sizes) == whole


@given(GENERATED)
def test_never_more_than_the_bound_is_wanted(data: bytes) -> None:
    parser = ProxyHeaderParser()
    for end in accumulate([1] * len(data)):
        assert 0 < parser.num_wanted <= 16 + MAX_BYTES
        try:
            if parser.receive(data[end - 1 : end]) is not None:
                return
        except ProxyProtocolError:
            return
