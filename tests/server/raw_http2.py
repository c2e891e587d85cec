"""HTTP/2 by hand: frames and header blocks, right or wrong, and what a server answers to them. Without h2."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import hpack
from h2.errors import ErrorCodes

from server.wire.http2_frames import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)

END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
RESERVED = 0x80000000
HIGHEST_STREAM_ID = 2**31 - 1
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_LIST = range(1, 7)

Field = tuple[bytes, bytes]


@dataclass(frozen=True)
class Frame:
    """One frame, sent or received.

    Args:
        payload: bytes, or what makes them of the stream's real id.
        stream: to be sent: counted from the first that is free (`encode`); received: the real id.
        length: said in the header, if that is not the payload's.
        reserved: the bit that means nothing.
    """

    kind: int
    payload: bytes | Callable[[int], bytes] = b""
    flags: int = 0
    stream: int = 0
    length: int | None = None
    reserved: bool = False

    @property
    def content(self) -> bytes:
        assert isinstance(self.payload, bytes)
        return self.payload

    @property
    def number(self) -> int:
        """The last 32 bits of the payload: an error code, an increment."""
        return int.from_bytes(self.content[-4:], "big")

    def encode(self, base: int) -> bytes:
        """
        Args:
            base: the last stream id in use, even.
        """
        stream = self.stream + base if 0 < self.stream < HIGHEST_STREAM_ID else self.stream
        payload = self.payload if isinstance(self.payload, bytes) else self.payload(stream)
        length = len(payload) if self.length is None else self.length
        header = length.to_bytes(3, "big") + bytes((self.kind, self.flags))
        return header + (stream | (RESERVED if self.reserved else 0)).to_bytes(4, "big") + payload


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream_id: int = 0) -> bytes:
    """One frame of the stream with this id, as it is sent."""
    return Frame(kind, payload, flags, stream_id).encode(0)


def wire(frames: Iterable[Frame], base: int = 0) -> bytes:
    return b"".join(frame.encode(base) for frame in frames)


# Header blocks (RFC 7541).


def integer(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """RFC 7541 §5.1, behind the bits of `first`."""
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes((first | value,))
    out, value = bytearray((first | limit,)), value - limit
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(value: bytes) -> bytes:
    return integer(len(value), 7) + value


def literal(name: bytes, value: bytes, form: int = 0x10) -> bytes:
    """RFC 7541 §6.2: 0x40 indexes it, 0x00 does not, 0x10 never does."""
    return bytes((form,)) + text(name) + text(value)


def indexed(index: int) -> bytes:
    return integer(index, 7, 0x80)


def table_size(size: int) -> bytes:
    return integer(size, 5, 0x20)


def block(*fields: Field, path: bytes = b"/now", without: bytes = b"", **changes: bytes) -> bytes:
    """A request's header block, which leaves the dynamic table alone.

    Args:
        fields: after the pseudo-fields.
        without: the pseudo-field to leave out.
        changes: of pseudo-fields.
    """
    pseudo = {b"method": b"GET", b"scheme": b"http", b"authority": b"a", b"path": path}
    pseudo |= {name.encode(): value for name, value in changes.items()}
    kept = [(b":" + name, value) for name, value in pseudo.items() if name != without]
    return b"".join(literal(name, value) for name, value in [*kept, *fields])


# Frames.


def headers(payload: bytes | Callable[[int], bytes], flags: int = END_HEADERS | END_STREAM, stream: int = 1) -> Frame:
    return Frame(HEADERS, payload, flags, stream)


def get(path: bytes = b"/now", stream: int = 1, *fields: Field) -> Frame:
    return headers(block(*fields, path=path), stream=stream)


def post(path: bytes = b"/read", stream: int = 1, *fields: Field) -> Frame:
    """A request whose body is still to come."""
    return headers(block(*fields, path=path, method=b"POST"), END_HEADERS, stream)


def continuation(payload: bytes, flags: int = END_HEADERS, stream: int = 1) -> Frame:
    return Frame(CONTINUATION, payload, flags, stream)


def data(payload: bytes = b"", flags: int = 0, stream: int = 1) -> Frame:
    return Frame(DATA, payload, flags, stream)


def rst(code: int = ErrorCodes.CANCEL, stream: int = 1) -> Frame:
    return Frame(RST_STREAM, code.to_bytes(4, "big"), 0, stream)


def priority(depends_on: int = 0, stream: int = 1) -> Frame:
    return Frame(PRIORITY, depends_on.to_bytes(4, "big") + b"\x0f", 0, stream)


def settings(*pairs: tuple[int, int], flags: int = 0) -> Frame:
    payload = b"".join(code.to_bytes(2, "big") + value.to_bytes(4, "big") for code, value in pairs)
    return Frame(SETTINGS, payload, flags)


def ping(payload: bytes = bytes(8), flags: int = 0) -> Frame:
    return Frame(PING, payload, flags)


def goaway(code: int = 0, last: int = 0, debug: bytes = b"") -> Frame:
    return Frame(GOAWAY, last.to_bytes(4, "big") + code.to_bytes(4, "big") + debug)


def window_update(increment: int, stream: int = 0) -> Frame:
    return Frame(WINDOW_UPDATE, increment.to_bytes(4, "big"), 0, stream)


START = PREFACE + settings().encode(0)


# What comes back.


@dataclass
class Seen:
    """What a server has said on one connection.

    Attributes:
        frames: whole ones, in order.
        base: see Frame.encode; all that is asked for by stream is counted from there.
    """

    frames: list[Frame] = field(default_factory=list)
    base: int = 0
    _rest: bytes = b""
    _decoder: hpack.Decoder = field(default_factory=hpack.Decoder)
    _statuses: dict[int, int] = field(default_factory=dict)

    def add(self, received: bytes) -> None:
        data, start = self._rest + received, 0
        while len(data) >= start + 9 and len(data) >= (
            end := start + 9 + int.from_bytes(data[start : start + 3], "big")
        ):
            stream = int.from_bytes(data[start + 5 : start + 9], "big")
            self._take(Frame(data[start + 3], data[start + 9 : end], data[start + 4], stream))
            start = end
        self._rest = data[start:]

    def _take(self, frame: Frame) -> None:
        self.frames.append(frame)
        if frame.kind == HEADERS:
            assert frame.flags & END_HEADERS
            fields = self._decoder.decode(frame.content, raw=True)
            self._statuses.setdefault(frame.stream, int(dict(fields).get(b":status", 0)))

    def of(self, kind: int, stream: int | None = None) -> list[Frame]:
        """The frames of this kind; of a stream, when it is said, counted from the base."""
        real = None if stream is None else stream + self.base
        return [frame for frame in self.frames if frame.kind == kind and real in (None, frame.stream)]

    @property
    def goaway(self) -> ErrorCodes | None:
        """The code of the connection error, if there was one."""
        codes = [ErrorCodes(frame.number) for frame in self.of(GOAWAY)]
        return next((code for code in codes if code is not ErrorCodes.NO_ERROR), None)

    @property
    def resets(self) -> dict[int, ErrorCodes]:
        """By stream, the first code each; NO_ERROR only says that a body is not wanted (RFC 9113 §8.1)."""
        codes: dict[int, ErrorCodes] = {}
        for frame in self.of(RST_STREAM):
            if frame.number:
                codes.setdefault(frame.stream - self.base, ErrorCodes(frame.number))
        return codes

    @property
    def statuses(self) -> dict[int, int]:
        return {stream - self.base: status for stream, status in self._statuses.items()}

    def body(self, stream: int = 1) -> bytes:
        return b"".join(frame.content for frame in self.of(DATA, stream))

    def has_ended(self, stream: int = 1) -> bool:
        """The response is complete."""
        return any(frame.flags & END_STREAM for kind in (DATA, HEADERS) for frame in self.of(kind, stream))

    def has_pong(self, payload: bytes) -> bool:
        return any(frame.flags & ACK and frame.content == payload for frame in self.of(PING))
