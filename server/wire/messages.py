"""One vocabulary for HTTP/1.1 and HTTP/2: what a protocol tells the connection, and is told to send. Thread: loop.

`stream_id` is 1, 2, 3... on HTTP/1.1 (the n-th request of the connection), the stream's own on HTTP/2.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from h2.errors import ErrorCodes

Headers = tuple[tuple[bytes, bytes], ...]  # names in lower case, in order of arrival
TextWriter = Callable[[str], None]  # of what a body says next, see TextFrame


class TextFrame(NamedTuple):
    """What a body says of each of many texts: `head + encoded[text] + tail`, which is not empty."""

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


class StreamReset(msgspec.Struct, frozen=True):
    """No answer is wanted any more: RST_STREAM on HTTP/2, the end of the connection on HTTP/1.1.

    Args:
        refused_with: the code of our own RST_STREAM, to a request that is malformed or not taken; None: the peer's.
    """

    stream_id: int
    refused_with: ErrorCodes | None = None


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
    """A response's head. Without a content-length among the headers, the body is framed by the protocol's own means."""

    status: int
    headers: Headers
