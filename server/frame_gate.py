"""Guards on raw HTTP/2 frame headers, ahead of h2. Thread: loop. Sans-io; time is an argument.

h2 4.4 holds 15 MiB sent as one frame before it complains, and counts nothing. Here each frame is judged by its nine
bytes of header, before its payload is let through. Verdicts and bytes are the same however the input is split. The
client's GOAWAY is kept from h2, which would take it for the end of everything (THREATS: h2 cannot drain).
"""

import struct
from dataclasses import dataclass

from h2.errors import ErrorCodes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113 §3.4

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FRAME_HEADER = struct.Struct(">BHBBL")  # RFC 9113 §4.1: length in 24 bits, type, flags, stream
HEADER_BYTES = FRAME_HEADER.size

_END_HEADERS = 0x4
_PADDED = 0x8
_ACK = 0x1
_MAX_PADDING_BYTES = 256
_SETTING_BYTES = 6
_GOAWAY_BYTES = 8
_STREAM_MASK = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Rate:
    """So many at once, and so many more a second."""

    burst: int
    per_s: float


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What the frames of one connection may be.

    Args:
        header_block_bytes: of a HEADERS frame and its CONTINUATIONs together.
        resets: RST_STREAM from the peer, and those it makes us send.
        num_overhead_frames: those that carry nothing, beyond one for each bytes_per_overhead_frame of content in either
            direction; content earns at most so many in advance.
    """

    frame_bytes: int = 16_384  # RFC 9113 §4.2: the least that must be taken
    header_block_bytes: int = 32 * 1024
    num_continuations: int = 8
    resets: Rate = Rate(200, 20)
    pings: Rate = Rate(100, 10)
    settings: Rate = Rate(100, 10)
    num_settings: int = 32
    num_overhead_frames: int = 1000
    bytes_per_overhead_frame: int = 64


class Refusal(Exception):
    """The connection is to end with a GOAWAY of this code."""

    def __init__(self, code: ErrorCodes, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Budget:
    """A token bucket."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._level = float(rate.burst)
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Spend one; False: there is none left."""
        rate = self._rate
        self._level = min(rate.burst, self._level + (now - self._at) * rate.per_s)
        self._at = now
        if self._level < 1:
            return False
        self._level -= 1
        return True


class FrameGate:
    """Lets frames through to h2, until it refuses one.

    Attributes:
        refusal: why the connection is to end; nothing is let through from then on.
        goaway_code: of the client's GOAWAY, once it has come.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self.refusal: Refusal | None = None
        self.goaway_code: int | None = None
        self._limits = limits
        self._preface = PREFACE  # what is still to come of it
        self._header = bytearray()
        self._remaining = 0  # of the payload
        self._goaway: bytearray | None = None  # its payload, while it comes
        self._has_settings = False
        self._is_head = False  # the frame that comes is HEADERS or CONTINUATION
        self._block_stream = 0  # whose header block is not complete
        self._block_bytes = 0
        self._num_blocks = 0
        self._num_continuations = 0
        self._overhead = limits.num_overhead_frames * limits.bytes_per_overhead_frame  # in bytes of content
        self._resets = Budget(limits.resets)
        self._pings = Budget(limits.pings)
        self._settings = Budget(limits.settings)

    @property
    def pending_head(self) -> int | None:
        """Which header block has begun and is not complete, counted from 1; 0: the connection's beginning."""
        if not self._has_settings:
            return 0
        is_pending = self._block_stream != 0 or (self._is_head and self._remaining > 0)
        return self._num_blocks if is_pending else None

    def receive(self, data: bytes, now: float) -> bytes:
        """The bytes that h2 may have: of a refused frame none, of those before it all."""
        passed: list[bytes] = []
        position = 0
        while position < len(data) and self.refusal is None:
            if self._remaining:
                piece = data[position : position + self._remaining]
                self._remaining -= len(piece)
                if self._goaway is None:
                    passed.append(piece)
                else:
                    self._take_goaway(piece)
            elif self._preface:
                piece = data[position : position + len(self._preface)]
                if not self._preface.startswith(piece):
                    self.refusal = Refusal(ErrorCodes.PROTOCOL_ERROR, "This is not HTTP/2's connection preface.")
                    break
                self._preface = self._preface[len(piece) :]
                passed.append(piece)
            else:
                piece = data[position : position + HEADER_BYTES - len(self._header)]
                self._header += piece
                if len(self._header) == HEADER_BYTES:
                    self._take_header(passed, now)
            position += len(piece)
        return passed[0] if len(passed) == 1 else b"".join(passed)

    def count_reset(self, now: float) -> None:
        """We are made to reset a stream (CVE-2025-8671)."""
        if not self._resets.take(now):
            self.refuse_flood("RST_STREAM")

    def refuse_flood(self, name: str) -> None:
        """Nothing is let through any more."""
        self.refusal = self.refusal or Refusal(ErrorCodes.ENHANCE_YOUR_CALM, f"Too many {name} frames.")

    def count_content(self, num_bytes: int) -> None:
        """So much of a response has been sent: WINDOW_UPDATEs may answer it."""
        limits = self._limits
        most = limits.num_overhead_frames * limits.bytes_per_overhead_frame
        self._overhead = min(most, self._overhead + num_bytes)

    def _take_header(self, passed: list[bytes], now: float) -> None:
        header = bytes(self._header)
        self._header.clear()
        high, low, kind, flags, stream_id = FRAME_HEADER.unpack(header)
        length = high << 16 | low
        try:
            self._check(length, kind, flags, stream_id & _STREAM_MASK, now)
        except Refusal as refusal:
            self.refusal = refusal
            return
        self._remaining = length
        if kind == GOAWAY:
            self._goaway = bytearray()
        else:
            passed.append(header)

    def _check(self, length: int, kind: int, flags: int, stream_id: int, now: float) -> None:
        if length > self._limits.frame_bytes:
            raise Refusal(ErrorCodes.FRAME_SIZE_ERROR, f"The frame is {length} bytes long.")
        if not self._has_settings:
            # RFC 9113 §3.4: the preface MUST be followed by a SETTINGS frame
            if kind != SETTINGS or flags & _ACK:
                raise Refusal(ErrorCodes.PROTOCOL_ERROR, "The first frame is not SETTINGS.")
            self._has_settings = True
        self._is_head = kind in (HEADERS, CONTINUATION)
        if self._block_stream:
            self._check_continuation(length, kind, flags, stream_id)
        elif kind == HEADERS:
            self._begin_block(length, flags, stream_id)
        elif kind == DATA:
            self._check_data(length, flags)
        elif kind == RST_STREAM:
            self._spend(self._resets, "RST_STREAM", now)
        elif kind == PING:
            self._spend(self._pings, "PING", now)
        elif kind == SETTINGS:
            self._spend(self._settings, "SETTINGS", now)
            if length > self._limits.num_settings * _SETTING_BYTES:
                raise Refusal(ErrorCodes.ENHANCE_YOUR_CALM, "There are too many settings in one frame.")
        elif kind == PUSH_PROMISE:
            raise Refusal(ErrorCodes.PROTOCOL_ERROR, "A client cannot push.")  # RFC 9113 §8.4
        else:  # PRIORITY, WINDOW_UPDATE, GOAWAY, CONTINUATION without HEADERS (h2 refuses it), unknown types
            self._charge_overhead()
            if kind == GOAWAY:
                _check_goaway(length, stream_id)

    def _begin_block(self, length: int, flags: int, stream_id: int) -> None:
        self.count_content(length)
        self._num_blocks += 1
        if not flags & _END_HEADERS:
            self._block_stream = stream_id
            self._block_bytes = length
            self._num_continuations = 0

    def _check_continuation(self, length: int, kind: int, flags: int, stream_id: int) -> None:
        # RFC 9113 §6.10: any other frame within a header block is a connection error of type PROTOCOL_ERROR
        if kind != CONTINUATION or stream_id != self._block_stream:
            raise Refusal(ErrorCodes.PROTOCOL_ERROR, "A header block is interrupted.")
        self._block_bytes += length
        self._num_continuations += 1
        if (
            self._num_continuations > self._limits.num_continuations
            or self._block_bytes > self._limits.header_block_bytes
        ):
            raise Refusal(ErrorCodes.ENHANCE_YOUR_CALM, "The header block is too large.")  # CVE-2024-27316
        if flags & _END_HEADERS:
            self._block_stream = 0

    def _check_data(self, length: int, flags: int) -> None:
        self.count_content(max(0, length - _MAX_PADDING_BYTES) if flags & _PADDED else length)
        self._charge_overhead()

    def _charge_overhead(self) -> None:
        self._overhead -= self._limits.bytes_per_overhead_frame
        if self._overhead < 0:
            raise Refusal(ErrorCodes.ENHANCE_YOUR_CALM, "Too many frames carry nothing.")

    def _spend(self, budget: Budget, name: str, now: float) -> None:
        if not budget.take(now):
            raise Refusal(ErrorCodes.ENHANCE_YOUR_CALM, f"Too many {name} frames.")

    def _take_goaway(self, piece: bytes) -> None:
        assert self._goaway is not None
        self._goaway += piece[: _GOAWAY_BYTES - len(self._goaway)]
        if not self._remaining:
            self.goaway_code = int.from_bytes(self._goaway[4:8], "big")
            self._goaway = None


def _check_goaway(length: int, stream_id: int) -> None:
    """What h2 would have checked (RFC 9113 §6.8)."""
    if stream_id:
        raise Refusal(ErrorCodes.PROTOCOL_ERROR, "GOAWAY is of the connection, not of a stream.")
    if length < _GOAWAY_BYTES:
        raise Refusal(ErrorCodes.FRAME_SIZE_ERROR, "GOAWAY is too short.")
