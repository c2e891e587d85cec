"""HTTP/2 as prepared bytes, for clients that send the same few frames over and over (RFC 9113)."""

from hpack import Encoder, NeverIndexedHeaderTuple

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
FRAME_HEADER_BYTES = 9
REFUSED_STREAM, CANCEL = 7, 8  # error codes
MAX_STREAM_ID = 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_INITIAL_WINDOW_SIZE = 4
_WINDOW = (2**30).to_bytes(4, "big")  # more than any answer here


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


# What a client says first: windows that never fill up
OPENING = PREFACE + frame(SETTINGS, _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + _WINDOW) + frame(WINDOW_UPDATE, _WINDOW)


def request_head(method: str, path: str) -> bytes:
    """A header block that is the same on every connection: it puts nothing into its table."""
    fields = ((":method", method), (":scheme", "http"), (":authority", "a"), (":path", path))
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in fields])


def request(stream_id: int, head: bytes, body: bytes) -> bytes:
    """A whole request: the head from request_head, the body in one frame."""
    return frame(HEADERS, head, END_HEADERS, stream_id) + frame(DATA, body, END_STREAM, stream_id)
