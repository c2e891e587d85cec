"""The PROXY protocol's header: what is read of it, what is refused, and where it ends."""

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.proxy_protocol import check
from server.listening.clients import (
    MAX_PROXY_BYTES,
    PROXY_HEAD_BYTES,
    ProxyProtocolError,
    num_behind_proxy_head,
    proxied_client,
)
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
    "longest": (header(TCP4.ljust(MAX_PROXY_BYTES, b"\0"), 0x11), Peer(IPv4Address("192.0.2.7"), 4242)),
}
# What is refused, by its first PROXY_HEAD_BYTES
REFUSED = {
    "http": b"GET / HTTP/1.1\r\n",
    "version 1": b"PROXY TCP4 192.0.2.7 ",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03abcdef",
    "signature broken at its end": SIGNATURE[:11] + b"\r" + b"\x21\x11\x00\x0c" + TCP4,
    "version 3": header(TCP4, 0x11, 0x31),
    "version 1 in binary": header(TCP4, 0x11, 0x11),
    "another command": header(TCP4, 0x11, 0x22),
    "datagrams": header(TCP4, 0x12),
    "no transport": header(TCP4, 0x10),
    "a family nobody knows": header(TCP4, 0x41),
    "too long": header(TCP4, 0x11, length=MAX_PROXY_BYTES + 1),
    "as long as can be": header(TCP4, 0x11, length=65_535),
    "local and too long": header(b"", 0x00, 0x20, length=MAX_PROXY_BYTES + 1),
    "tcp4 cut short": header(TCP4[:-1], 0x11),
    "tcp6 with addresses of tcp4": header(TCP4, 0x21),
    "unix cut short": header(UNIX[:-1], 0x31),
}


def client_of(data: bytes) -> tuple[Peer | None, bytes]:
    """Whom the header names, and what comes behind it."""
    head = data[:PROXY_HEAD_BYTES]
    end = PROXY_HEAD_BYTES + num_behind_proxy_head(head)
    return proxied_client(head, data[PROXY_HEAD_BYTES:end]), data[end:]


@pytest.mark.parametrize("name", HEADERS)
def test_header_says_who_the_client_is_and_ends_where_it_says(name: str) -> None:
    data, client = HEADERS[name]
    assert client_of(data + b"GET / HTTP/1.1\r\n") == (client, b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_header_is_refused(name: str) -> None:
    with pytest.raises(ProxyProtocolError):
        num_behind_proxy_head(REFUSED[name][:PROXY_HEAD_BYTES])


@given(st.binary(min_size=4, max_size=400))
def test_any_header_is_refused_or_names_someone(data: bytes) -> None:
    check(SIGNATURE + data)
