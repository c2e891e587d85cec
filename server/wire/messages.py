"""The messages between the parts of wire/, the same for both protocols: requests, response heads, peers. Thread: loop.

`stream_id` is 1, 2, 3... on HTTP/1.1 (the n-th request of the connection), the stream's own on HTTP/2.
"""

import enum
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, NamedTuple

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]  # names in lower case, in order of arrival
TextWriter = Callable[[str], None]  # writes a body's next text, see TextFrame


class TextFrame(NamedTuple):
    """How a body frames each of many texts: `head + encoded[text] + tail`, which is not empty."""

    head: bytes
    encoded: Mapping[str, bytes]
    tail: bytes

    def around(self, text: str) -> bytes:
        return self.head + self.encoded[text] + self.tail


class HttpRequest(msgspec.Struct, frozen=True):
    """A request's head."""

    stream_id: int
    method: str
    path: str  # without the query, still percent-encoded
    query: str
    headers: Headers
    has_body: bool
    expects_continue: bool = False
    is_http10: bool = False

    def header(self, name: bytes) -> bytes | None:
        """The first field of that name (lower case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class BodyChunk(msgspec.Struct, frozen=True):
    stream_id: int
    data: bytes


class BodyEnd(msgspec.Struct, frozen=True):
    stream_id: int


class Http2ErrorCode(enum.IntEnum):
    """RFC 9113 §7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):
    """RFC 9113 §5.4.1: the peer's bytes end the HTTP/2 connection, with a GOAWAY of this code."""

    def __init__(self, code: Http2ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamReset(msgspec.Struct, frozen=True):
    """The stream has ended, and no answer is wanted.

    Args:
        refused_with: the code of our RST_STREAM, for a stream error of the peer's or a stream that is not taken; None:
            the peer has reset it.
    """

    stream_id: int
    refused_with: Http2ErrorCode | None = None


class ProtocolViolation(msgspec.Struct, frozen=True):
    """The peer broke the protocol or a limit on heads: the stream is answered with `status`, if it can be.

    On HTTP/1.1 the connection ends with that answer; on HTTP/2 the stream does.
    """

    stream_id: int
    status: int
    message: str


class Http2Preface(msgspec.Struct, frozen=True):
    """A connection that began as HTTP/1.1 is HTTP/2, by prior knowledge (RFC 9113 §3.3).

    Args:
        data: all that was received.
    """

    data: bytes


Event = HttpRequest | BodyChunk | BodyEnd | StreamReset | ProtocolViolation | Http2Preface


class ResponseHead(msgspec.Struct, frozen=True):
    """A response's head. Without a content-length among the headers, the protocol frames the body by its own means."""

    status: int
    headers: Headers


FIELD_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
FIELD_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")  # RFC 9110 §5.5: no CTL except HTAB
CONTENT_LENGTH = re.compile(rb"[0-9]{1,19}")  # 19 digits: below 2**64


class HeadRefused(Exception):
    """The request is refused with `status`; on HTTP/1.1 the connection closes after that answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ResponseError(Exception):
    """The handler's answer cannot be sent: our own bug, never the peer's."""


def check_fields(head: ResponseHead) -> int | None:
    """Refuse fields that would break the framing or split the response; return the content-length.

    Raises:
        ResponseError: there is such a field.
    """
    if head.status < 200:
        raise ResponseError(f"Status {head.status} is not for handlers to send.")
    length: int | None = None
    for name, value in head.headers:
        if FIELD_NAME.fullmatch(name) is None or FIELD_VALUE.fullmatch(value) is None:
            raise ResponseError(f"The header {name!r} cannot be sent: its name or its value has bytes it must not.")
        if name in (b"transfer-encoding", b"connection"):
            raise ResponseError(f"The protocol sends {name.decode()}, and the handler does not.")
        if name == b"content-length":
            # RFC 9110 §8.6: none in 204
            if length is not None or not value.isdigit() or head.status == 204:
                raise ResponseError("This content-length cannot be sent.")
            length = int(value)
    return length


IpAddress = IPv4Address | IPv6Address

IPV6_SITE_BITS = 64  # of an address, which a site assigns as it likes: RFC 4291 §2.5.4
UNIX_CLIENT = "unix"  # in logs, a client over a Unix socket


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A client's certificate, verified by a configured CA.

    Args:
        subject: as RFC 4514 writes it: "CN=router,O=Example".
        names: subjectAltName, kind and value: ("DNS", "router.example"), ("URI", "spiffe://example/router").
    """

    subject: str
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """
    Args:
        address: None: a Unix socket's peer has none.
        port: 0 where it is not known.
        is_proxy: a trusted one: each request may name its client.
        certificate: None: the client showed none.
    """

    address: IpAddress | None = None
    port: int = 0
    is_proxy: bool = False
    certificate: ClientCertificate | None = None

    @property
    def network(self) -> str | None:
        """The address; of IPv6 its /64, of which one client may use any address; None: a Unix socket."""
        if self.address is None or self.address.version == 4:
            return None if self.address is None else str(self.address)
        return str(IPv6Network((int(self.address) >> IPV6_SITE_BITS << IPV6_SITE_BITS, 128 - IPV6_SITE_BITS)))

    def __str__(self) -> str:
        """`192.0.2.1:5000` or `[::1]:5000`; without the port where it is not known."""
        if self.address is None:
            return UNIX_CLIENT
        if not self.port:
            return str(self.address)
        return f"[{self.address}]:{self.port}" if self.address.version == 6 else f"{self.address}:{self.port}"


def socket_peer(family: int, address: Any) -> Peer:
    """The peer as accept(2) names it."""
    if family == socket.AF_UNIX:
        return Peer()
    return Peer(plain_address(ip_address(address[0].partition("%")[0])), address[1])


def plain_address(address: IpAddress) -> IpAddress:
    """IPv4 as IPv4, also where a dual-stack socket has it as an IPv6 address (RFC 4291 §2.5.5.2)."""
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_authority(value: bytes) -> bool:
    """Whether this is a host with an optional port, and no user info (RFC 9110 §7.2, §4.2.4)."""
    return _HOST.fullmatch(value) is not None
