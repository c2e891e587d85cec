"""Guards on raw HTTP/2 frames, ahead of h2. Thread: loop. Sans-io; time is an argument.

h2 4.4 holds 15 MiB sent as one frame before it complains, and counts nothing. Here each frame is judged by its nine
bytes of header before its payload is buffered, and by its payload before it is let through. Verdicts and bytes are
the same however the input is split. h2 sees of them what it takes as RFC 9113 does: no GOAWAY (h2 would end all
streams), no PRIORITY and no padding of header blocks, no unknown frames. Of settings it sees each known one once, at
its last value: it would not judge the others, and keeps unknown ones for good.
"""

import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple

from h2.errors import ErrorCodes

from server.wire.limits import FrameLimits, TokenBucket

_SETTING = struct.Struct(">HL")  # RFC 9113 §6.5.1
_TABLE_SIZE = 1
_ANY = range(2**32)
_IS = range(2)
# RFC 9113 §6.5.2, RFC 8441 §3: the values that each may have, and the error of those that it may not
_KNOWN = {
    _TABLE_SIZE: (_ANY, ErrorCodes.NO_ERROR),
    2: (_IS, ErrorCodes.PROTOCOL_ERROR),  # ENABLE_PUSH
    3: (_ANY, ErrorCodes.NO_ERROR),  # MAX_CONCURRENT_STREAMS
    4: (range(2**31), ErrorCodes.FLOW_CONTROL_ERROR),  # INITIAL_WINDOW_SIZE
    5: (range(2**14, 2**24), ErrorCodes.PROTOCOL_ERROR),  # MAX_FRAME_SIZE
    6: (_ANY, ErrorCodes.NO_ERROR),  # MAX_HEADER_LIST_SIZE
    8: (_IS, ErrorCodes.PROTOCOL_ERROR),  # ENABLE_CONNECT_PROTOCOL
}


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113 §3.4

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FRAME_HEADER = struct.Struct(">BHBBL")  # RFC 9113 §4.1: length in 24 bits, type, flags, stream
HEADER_BYTES = FRAME_HEADER.size

END_STREAM = 0x1
END_HEADERS = 0x4
_PADDED = 0x8
_HAS_PRIORITY = 0x20
_ACK = 0x1
_MAX_PADDING_BYTES = 256
_SETTING_BYTES = 6
_PRIORITY_BYTES = 5
_GOAWAY_BYTES = 8
# Frames of other kinds that cost as much as a request's head: 0.1 ms with h2, more with the handler that begins; and
# bytes of its block that cost as much as one: up to 2 µs each, in indices of one byte and names in Huffman's code
_FRAMES_PER_HEAD = 4
_BLOCK_BYTES_PER_FRAME = 64
_MOST = 2**24 - 1
# RFC 9113 §6: whether a frame is of a stream (None: of either), and how long it may be. Another length of PRIORITY is a
# stream error (§6.3).
_SHAPES = {
    DATA: (True, 0, _MOST),
    HEADERS: (True, 0, _MOST),
    PRIORITY: (True, 0, _MOST),
    RST_STREAM: (True, 4, 4),
    SETTINGS: (False, 0, _MOST),
    PUSH_PROMISE: (True, 0, _MOST),
    PING: (False, 8, 8),
    GOAWAY: (False, _GOAWAY_BYTES, _MOST),
    WINDOW_UPDATE: (None, 4, 4),
}
_ANY_SHAPE = (None, 0, _MOST)
_PASSED_AS_THEY_ARE = frozenset((DATA, RST_STREAM, PING, CONTINUATION))
_OF_HEADS = frozenset((HEADERS, CONTINUATION))
_31_BITS = 0x7FFFFFFF  # RFC 9113 §4.1, §6.3, §6.9: the bit before them is reserved


class FrameRefused(Exception):
    """The connection is to end with a GOAWAY of this code."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_settings(payload: bytes) -> tuple[bytes, list[int]]:
    """The payload with each known setting once, at its last value, and the table sizes that were replaced in it.

    RFC 9113 §6.5.3: values are processed in their order; unknown settings are ignored.

    Args:
        payload: of whole settings.

    Raises:
        FrameRefused: a value is none that its setting may have.
    """
    settings: dict[int, int] = {}
    replaced: list[int] = []
    for code, value in _SETTING.iter_unpack(payload):
        if code not in _KNOWN:
            continue
        allowed, error = _KNOWN[code]
        if value not in allowed:
            raise FrameRefused(error, f"Setting {code} cannot be {value}.")
        if code == _TABLE_SIZE and code in settings:
            replaced.append(settings[code])
        settings[code] = value
    return b"".join(_SETTING.pack(code, value) for code, value in settings.items()), replaced


@dataclass(frozen=True, slots=True)
class StreamFault:
    """The stream is to be reset, and nothing else (RFC 9113 §5.4.2)."""

    stream_id: int
    code: ErrorCodes


class _Header(NamedTuple):
    """RFC 9113 §4.1."""

    length: int
    kind: int
    flags: int
    stream_id: int


class FrameGate:
    """Lets frames through to h2, until it refuses one.

    Attributes:
        refusal: why the connection is to end; nothing is let through from then on.
        faults: streams to be reset, once what was let through with them has been read; to be taken by whoever reads it.
        block_bytes: of each header block that is complete, by stream; to be emptied by whoever has read them.
        goaway_code: of the client's GOAWAY, once it has come.
        least_table_size: a SETTINGS_HEADER_TABLE_SIZE that its own frame replaced by another.
        has_more: the last call let through as much as it may: receive(b"", now) goes on.
    """

    def __init__(self, limits: FrameLimits, highest_stream_id: int = 0, frames_at_once: int = sys.maxsize) -> None:
        """
        Args:
            highest_stream_id: that is open already.
            frames_at_once: let through by one call; the head of a request is worth _FRAMES_PER_HEAD, or more.
        """
        self.refusal: FrameRefused | None = None
        self.faults: list[StreamFault] = []
        self.block_bytes: dict[int, int] = {}
        self.goaway_code: int | None = None
        self.least_table_size: int | None = None
        self._limits = limits
        self._frames_at_once = self._num_left = frames_at_once
        self._buffer = bytearray()  # received, and not let through
        self.has_more = False
        self._has_preface = False
        self._header: _Header | None = None  # of the frame that the buffer begins with, once judged
        self._has_settings = False
        self._is_head = False  # the frame that comes is HEADERS or CONTINUATION
        self._highest_stream_id = highest_stream_id
        self._block_stream = 0  # whose header block is not complete
        self._block_bytes = 0
        self._num_blocks = 0
        self._num_continuations = 0
        self._overhead = limits.num_overhead_frames * limits.bytes_per_overhead_frame  # in bytes of content
        self._resets = TokenBucket(limits.resets)
        self._pings = TokenBucket(limits.pings)
        self._settings = TokenBucket(limits.settings)

    @property
    def pending_head(self) -> int | None:
        """Which header block has begun and is not complete, counted from 1; 0: the connection's beginning."""
        if not self._has_settings:
            return 0
        is_pending = self._block_stream or (self._is_head and self._header is not None)
        return self._num_blocks if is_pending else None

    def receive(self, data: bytes, now: float) -> bytes:
        """The bytes that h2 may have: of a refused frame none, of those before it all."""
        if self.refusal is not None:
            return b""
        passed: list[bytes] = []
        self._buffer += data
        self._num_left = self._frames_at_once
        self.has_more = False
        try:
            if not self._has_preface:
                self._take_preface(passed)
            while len(self._buffer) >= HEADER_BYTES and self._has_preface:
                if self._num_left <= 0 and self._header is None:
                    self.has_more = True
                    break
                if not self._take_frame(passed, now):
                    break
        except FrameRefused as refusal:
            self.refusal = refusal
            self._buffer.clear()
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def _take_preface(self, passed: list[bytes]) -> None:
        begun = bytes(self._buffer[: len(PREFACE)])
        if not PREFACE.startswith(begun):
            raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "This is not HTTP/2's connection preface.")
        if begun == PREFACE:
            self._has_preface = True
            del self._buffer[: len(PREFACE)]
            passed.append(PREFACE)

    def _take_frame(self, passed: list[bytes], now: float) -> bool:
        """The first of the buffer, whose header is there; False: its payload is not."""
        header = self._header
        if header is None:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(self._buffer)
            header = _Header(high << 16 | low, kind, flags, stream_id & _31_BITS)
            self._check(header, now)
        end = HEADER_BYTES + header.length
        if len(self._buffer) < end:
            self._header = header
            return False
        self._header = None
        frame = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._pass_on(header, frame, passed)
        return True

    def count_reset(self, now: float) -> None:
        """We are made to reset a stream (CVE-2025-8671)."""
        if not self._resets.take(now):
            self.refuse_flood("RST_STREAM")

    def refuse_flood(self, name: str) -> None:
        """Nothing is let through any more."""
        self.refusal = self.refusal or FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, f"Too many {name} frames.")

    def count_content(self, num_bytes: int) -> None:
        """So much of a response has been sent: WINDOW_UPDATEs may answer it."""
        limits = self._limits
        most = limits.num_overhead_frames * limits.bytes_per_overhead_frame
        self._overhead = min(most, self._overhead + num_bytes)

    def _check(self, header: _Header, now: float) -> None:
        """What a frame's header tells."""
        kind, flags = header.kind, header.flags
        self._num_left -= _num_worth(header) if kind in _OF_HEADS else 1
        if header.length > self._limits.frame_bytes:
            raise FrameRefused(ErrorCodes.FRAME_SIZE_ERROR, f"The frame is {header.length} bytes long.")
        if not self._has_settings:
            # RFC 9113 §3.4: the preface MUST be followed by a SETTINGS frame
            if kind != SETTINGS or flags & _ACK:
                raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "The first frame is not SETTINGS.")
            self._has_settings = True
        self._is_head = kind in _OF_HEADS
        if self._block_stream or kind == CONTINUATION:
            self._check_continuation(header)
            return
        _check_shape(header)
        if kind == HEADERS:
            least = (flags & _PADDED and 1) + (flags & _HAS_PRIORITY and _PRIORITY_BYTES)
            if header.length < least:
                raise FrameRefused(ErrorCodes.FRAME_SIZE_ERROR, "The frame has no room for what its flags say.")
            self._begin_block(header)
        elif kind == DATA:
            self._check_data(header.length, flags)
        elif kind == RST_STREAM:
            self._spend(self._resets, "RST_STREAM", now)
            if self._is_idle(header.stream_id):  # RFC 9113 §6.4; h2 lets it pass
                raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "A stream that is not open cannot be reset.")
        elif kind == PING:
            self._spend(self._pings, "PING", now)
        elif kind == SETTINGS:
            self._spend(self._settings, "SETTINGS", now)
            if header.length > self._limits.num_settings * _SETTING_BYTES:
                raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "There are too many settings in one frame.")
        elif kind == PUSH_PROMISE:
            raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "A client cannot push.")  # RFC 9113 §8.4
        else:  # PRIORITY, WINDOW_UPDATE, GOAWAY, unknown types
            self._charge_overhead()

    def _pass_on(self, header: _Header, frame: bytes, passed: list[bytes]) -> None:
        """Let a frame through, or part of it, or nothing, after a look at its payload."""
        kind, payload = header.kind, frame[HEADER_BYTES:]
        if kind in _PASSED_AS_THEY_ARE:
            passed.append(frame)
        elif kind == HEADERS:
            self._pass_head(header, payload, passed)
        elif kind == SETTINGS:
            passed.append(self._settings_frame(header, payload))
        elif kind == PRIORITY:
            self._check_priority(header, payload)
        elif kind == GOAWAY:
            self.goaway_code = int.from_bytes(payload[4:8], "big")
        elif kind == WINDOW_UPDATE:
            self._pass_window_update(header, int.from_bytes(payload, "big") & _31_BITS, passed)
        # RFC 9113 §5.5: unknown types are ignored

    def _pass_head(self, header: _Header, payload: bytes, passed: list[bytes]) -> None:
        """Of a HEADERS frame the header block alone. h2 is wrong on padding that leaves nothing of it."""
        is_padded, has_priority = bool(header.flags & _PADDED), bool(header.flags & _HAS_PRIORITY)
        start, padding = is_padded + _PRIORITY_BYTES * has_priority, payload[0] if is_padded else 0
        if padding > len(payload) - start:  # RFC 9113 §6.2
            raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "There is more padding than frame.")
        if has_priority and _depends_on(payload[start - _PRIORITY_BYTES :]) == header.stream_id:
            # RFC 7540 §5.3.1; RFC 9113 §5.4.1: a stream error may be treated as the connection's
            raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "A stream cannot depend on itself.")
        block = payload[start : len(payload) - padding]
        flags = header.flags & ~(_PADDED | _HAS_PRIORITY)
        passed.append(
            FRAME_HEADER.pack(len(block) >> 16, len(block) & 0xFFFF, HEADERS, flags, header.stream_id) + block
        )

    def _pass_window_update(self, header: _Header, increment: int, passed: list[bytes]) -> None:
        """Without the reserved bit, which h2 takes for an error."""
        if increment or not header.stream_id:
            passed.append(FRAME_HEADER.pack(0, 4, WINDOW_UPDATE, 0, header.stream_id) + increment.to_bytes(4, "big"))
        else:  # RFC 9113 §6.9: a stream error; for h2 it is the connection's
            self._find_fault(header.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def _settings_frame(self, header: _Header, payload: bytes) -> bytes:
        known, passed_over = read_settings(payload)
        if self.least_table_size is not None:
            passed_over.append(self.least_table_size)
        self.least_table_size = min(passed_over, default=None)
        return FRAME_HEADER.pack(0, len(known), SETTINGS, header.flags, 0) + known

    def _check_priority(self, header: _Header, payload: bytes) -> None:
        if header.length != _PRIORITY_BYTES:  # RFC 9113 §6.3
            self._find_fault(header.stream_id, ErrorCodes.FRAME_SIZE_ERROR)
        elif _depends_on(payload) == header.stream_id:  # RFC 7540 §5.3.1
            self._find_fault(header.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def _find_fault(self, stream_id: int, code: ErrorCodes) -> None:
        """RFC 9113 §6.4: a stream that is idle cannot be reset; then the fault is the connection's."""
        if self._is_idle(stream_id):
            raise FrameRefused(code, "A frame of a stream that is not open is broken.")
        self.faults.append(StreamFault(stream_id, code))

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id > self._highest_stream_id or stream_id % 2 == 0

    def _begin_block(self, header: _Header) -> None:
        if header.length > self._limits.header_block_bytes:  # where larger frames are taken
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "The header block is too large.")
        self.count_content(header.length)
        self._num_blocks += 1
        self._highest_stream_id = max(self._highest_stream_id, header.stream_id)
        if header.flags & END_HEADERS:
            self.block_bytes[header.stream_id] = header.length
        else:
            self._block_stream = header.stream_id
            self._block_bytes = header.length
            self._num_continuations = 0

    def _check_continuation(self, header: _Header) -> None:
        # RFC 9113 §6.10: any other frame within a header block is a connection error of type PROTOCOL_ERROR
        if header.kind != CONTINUATION or not self._block_stream or header.stream_id != self._block_stream:
            raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, "A header block is interrupted, or continues none.")
        self._block_bytes += header.length
        self._num_continuations += 1
        if (
            self._num_continuations > self._limits.num_continuations
            or self._block_bytes > self._limits.header_block_bytes
        ):
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "The header block is too large.")  # CVE-2024-27316
        if header.flags & END_HEADERS:
            self.block_bytes[self._block_stream] = self._block_bytes
            self._block_stream = 0

    def _check_data(self, length: int, flags: int) -> None:
        if flags & _PADDED and not length:
            raise FrameRefused(ErrorCodes.FRAME_SIZE_ERROR, "The frame has no room for its padding's length.")
        self.count_content(max(0, length - _MAX_PADDING_BYTES) if flags & _PADDED else length)
        self._charge_overhead()

    def _charge_overhead(self) -> None:
        self._overhead -= self._limits.bytes_per_overhead_frame
        if self._overhead < 0:
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, "Too many frames carry nothing.")

    def _spend(self, budget: TokenBucket, name: str, now: float) -> None:
        if not budget.take(now):
            raise FrameRefused(ErrorCodes.ENHANCE_YOUR_CALM, f"Too many {name} frames.")


def _num_worth(header: _Header) -> int:
    """Of a block, in frames of other kinds that cost as much."""
    least = _FRAMES_PER_HEAD if header.kind == HEADERS else 1
    return max(least, header.length // _BLOCK_BYTES_PER_FRAME)


def _check_shape(header: _Header) -> None:
    """Whether the frame's stream and length are such as its type has."""
    length, kind, flags, stream_id = header
    is_of_stream, least, most = _SHAPES.get(kind, _ANY_SHAPE)
    if is_of_stream is not None and is_of_stream != (stream_id > 0):
        raise FrameRefused(ErrorCodes.PROTOCOL_ERROR, f"A frame of type {kind} cannot be of stream {stream_id}.")
    is_fit = least <= length <= most
    if kind == SETTINGS:  # RFC 9113 §6.5
        is_fit = not length if flags & _ACK else length % _SETTING_BYTES == 0
    if not is_fit:
        raise FrameRefused(ErrorCodes.FRAME_SIZE_ERROR, f"A frame of type {kind} cannot be {length} bytes long.")


def _depends_on(priority: bytes) -> int:
    """RFC 9113 §6.3: behind the bit that says exclusive."""
    return int.from_bytes(priority[:4], "big") & _31_BITS
