"""HTTP/2's frames (RFC 9113 §4, §6): types, flags, sizes and settings. Sans-io."""

import struct
from typing import NamedTuple

from server.wire.messages import ConnectionFault, Http2ErrorCode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113 §3.4
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FRAME_HEADER = struct.Struct(">BHBBL")  # RFC 9113 §4.1: length in 24 bits, type, flags, stream
HEADER_BYTES = FRAME_HEADER.size
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20
PRIORITY_BYTES = 5
MAX_PADDING_BYTES = 256
UNRESERVED = 0x7FFFFFFF  # RFC 9113 §4.1, §6.3, §6.9: the bit before them is reserved
MAX_STREAM_ID = 2**31 - 1
MAX_WINDOW = 2**31 - 1  # RFC 9113 §6.9.1
DEFAULT_WINDOW = 65_535  # RFC 9113 §6.9.2
LEAST_FRAME_BYTES = 16_384  # RFC 9113 §6.5.2: of SETTINGS_MAX_FRAME_SIZE, and its initial value

_MOST = 2**24 - 1
# RFC 9113 §6: whether a frame is of a stream (None: of either), and how long it may be. Another length of PRIORITY is a
# stream error (§6.3).
_SHAPES = {
    **dict.fromkeys((DATA, HEADERS, PRIORITY, PUSH_PROMISE), (True, 0, _MOST)),
    RST_STREAM: (True, 4, 4),
    SETTINGS: (False, 0, _MOST),
    PING: (False, 8, 8),
    GOAWAY: (False, 8, _MOST),
    WINDOW_UPDATE: (None, 4, 4),
}
_ANY_SHAPE = (None, 0, _MOST)

_SETTING = struct.Struct(">HL")  # RFC 9113 §6.5.1
SETTING_BYTES = _SETTING.size
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, MAX_LIST = range(1, 7)
_ENABLE_CONNECT = 8  # RFC 8441 §3
# RFC 9113 §6.5.2: the least and the most that a setting may be, and the error beyond; others may be anything
_RANGES = {
    ENABLE_PUSH: (0, 1, Http2ErrorCode.PROTOCOL_ERROR),
    INITIAL_WINDOW: (0, MAX_WINDOW, Http2ErrorCode.FLOW_CONTROL_ERROR),
    MAX_FRAME: (LEAST_FRAME_BYTES, _MOST, Http2ErrorCode.PROTOCOL_ERROR),
    _ENABLE_CONNECT: (0, 1, Http2ErrorCode.PROTOCOL_ERROR),
}


class Header(NamedTuple):
    """RFC 9113 §4.1."""

    length: int
    kind: int
    flags: int
    stream_id: int


def frame(kind: int, payload: bytes, flags: int = 0, stream_id: int = 0) -> bytes:
    size = len(payload)
    return FRAME_HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def head_frames(block: bytes, stream_id: int, most: int, flags: int = 0) -> bytes:
    """HEADERS, and CONTINUATION where the block is longer than a frame of `most` bytes."""
    if len(block) <= most:
        return frame(HEADERS, block, flags | END_HEADERS, stream_id)
    frames = [frame(HEADERS, block[:most], flags, stream_id)]
    for start in range(most, len(block), most):
        ends = END_HEADERS if start + most >= len(block) else 0
        frames.append(frame(CONTINUATION, block[start : start + most], ends, stream_id))
    return b"".join(frames)


def window_update(increment: int, stream_id: int = 0) -> bytes:
    return frame(WINDOW_UPDATE, increment.to_bytes(4, "big"), 0, stream_id)


def settings_frame(settings: dict[int, int]) -> bytes:
    return frame(SETTINGS, b"".join(_SETTING.pack(code, value) for code, value in settings.items()))


def check_shape(header: Header) -> None:
    """Check that a frame's stream and length fit its type. Raises ConnectionFault: they do not."""
    length, kind, flags, stream_id = header
    is_of_stream, least, most = _SHAPES.get(kind, _ANY_SHAPE)
    if is_of_stream is not None and is_of_stream != (stream_id > 0):
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"A frame of type {kind} cannot be of stream {stream_id}.")
    fits = least <= length <= most
    if kind == SETTINGS:  # RFC 9113 §6.5
        fits = not length if flags & ACK else length % SETTING_BYTES == 0
    elif kind in (DATA, HEADERS):
        fits = length >= bool(flags & PADDED) + num_priority_bytes(header)
    if not fits:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"A frame of type {kind} cannot be {length} bytes long.")


def num_priority_bytes(header: Header) -> int:
    return PRIORITY_BYTES if header.kind == HEADERS and header.flags & HAS_PRIORITY else 0


def unpadded(header: Header, payload: bytes) -> bytes:
    """The payload of DATA or HEADERS without its padding.

    Raises:
        ConnectionFault: there is more padding than frame (RFC 9113 §6.1, §6.2).
    """
    if not header.flags & PADDED:
        return payload
    end = len(payload) - payload[0]
    if end < 1 + num_priority_bytes(header):
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "There is more padding than frame.")
    return payload[1:end]


def depends_on(priority: bytes) -> int:
    """RFC 9113 §6.3: behind the bit that says exclusive."""
    return int.from_bytes(priority[:4], "big") & UNRESERVED


def read_settings(payload: bytes) -> tuple[dict[int, int], list[int]]:
    """The last value of each setting, and all of SETTINGS_HEADER_TABLE_SIZE.

    RFC 9113 §6.5.3: values are processed in their order.

    Raises:
        ConnectionFault: a setting has a value that it cannot have.
    """
    settings: dict[int, int] = {}
    table_sizes: list[int] = []
    for code, value in _SETTING.iter_unpack(payload):
        least, most, error = _RANGES.get(code, (0, value, Http2ErrorCode.NO_ERROR))
        if not least <= value <= most:
            raise ConnectionFault(error, f"Setting {code} cannot be {value}.")
        if code == TABLE_SIZE:
            table_sizes.append(value)
        settings[code] = value
    return settings, table_sizes
