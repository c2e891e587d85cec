"""The peer's frames on an HTTP/2 connection (RFC 9113), as either side reads them. Sans-io. Thread: loop.

Each frame is judged by its nine bytes of header before its payload is buffered; field sections are put together and
decoded; FrameLimits ration what the peer makes us do. What a frame means is its side's: server/wire/http2.py is the
server's, server/upstream/http2.py the client's.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from server.wire.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    FRAME_HEADER,
    GOAWAY,
    HEADER_BYTES,
    HEADERS,
    MAX_PADDING_BYTES,
    PADDED,
    PING,
    PUSH_PROMISE,
    RST_STREAM,
    SETTING_BYTES,
    SETTINGS,
    UNRESERVED,
    Header,
    check_shape,
    depends_on,
    frame,
    num_priority_bytes,
    unpadded,
)
from server.wire.http2_heads import FieldDecoder, Fields
from server.wire.http2_streams import ReceiveWindow
from server.wire.limits import FrameLimits, TokenBucket
from server.wire.messages import ConnectionFault, Http2ErrorCode

# In frames of other kinds that cost as much: a head, with what begins with it; and bytes of its block, each an index or
# a name in Huffman's code at worst
_FRAMES_PER_HEAD = 4
_BLOCK_BYTES_PER_FRAME = 64
NOTHING = "Too many frames carry nothing."


class FrameReader:
    """
    Attributes:
        has_more: receive has read as much at once as it may.
    """

    __slots__ = (  # with its sides', these are more attributes than a dict of shared keys takes: 30
        *("_block", "_block_header", "_buffer", "_budgets", "_credit", "_decoder", "_frame_limits", "_frames_at_once"),
        *("_has_settings", "_header", "_most_credit", "_now", "_num_block_bytes", "_num_blocks", "_num_left", "_out"),
        *("_window", "has_more"),
    )
    takers: ClassVar[Mapping[int, Callable[[Any, Header, bytes], None]]]  # by type of frame

    def __init__(
        self, limits: FrameLimits, list_bytes: int, window_bytes: int, frames_at_once: int = sys.maxsize
    ) -> None:
        """
        Args:
            list_bytes: of a decoded field section.
            window_bytes: of the connection, that the peer has.
            frames_at_once: that are parsed in one turn; a head counts as several.
        """
        self._frame_limits = limits
        self._out: list[bytes] = []
        self._now = 0.0
        self._buffer = bytearray()
        self._header: Header | None = None  # of the frame that the buffer begins with, once judged
        self._has_settings = self.has_more = False
        self._frames_at_once = self._num_left = frames_at_once
        self._block: list[bytes] = []  # of a field section: its HEADERS' and CONTINUATIONs' fragments
        self._block_header: Header | None = None  # of its HEADERS, until it is complete
        self._num_block_bytes = self._num_blocks = 0
        self._decoder = FieldDecoder(list_bytes)
        self._window = ReceiveWindow(window_bytes)
        # What the peer may make us do.
        self._most_credit = limits.num_overhead_frames * limits.bytes_per_overhead_frame
        self._credit = self._most_credit  # in bytes of content
        rates = {RST_STREAM: limits.resets, PING: limits.pings, SETTINGS: limits.settings}
        self._budgets = {kind: TokenBucket(rate) for kind, rate in rates.items()}

    def _read_frames(self, position: int = 0) -> None:
        """Those of the buffer from there on."""
        buffer = self._buffer
        while len(buffer) - position >= HEADER_BYTES:
            header, self._header = self._header, None
            if header is None:
                if self._num_left <= 0:
                    self.has_more = True
                    break
                high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(buffer, position)
                header = Header(high << 16 | low, kind, flags, stream_id & UNRESERVED)
                self._check_header(header)
            end = position + HEADER_BYTES + header.length
            if len(buffer) < end:
                self._header = header
                break
            take = self.takers.get(header.kind)
            if take is not None:  # RFC 9113 §5.5: unknown types are ignored
                take(self, header, bytes(buffer[position + HEADER_BYTES : end]))
            position = end
        del buffer[:position]

    def _check_header(self, header: Header) -> None:
        """Judge a frame by its header, and charge for it. Raises ConnectionFault: it is not to be read."""
        length, kind, flags, stream_id = header
        limits = self._frame_limits
        self._num_left -= 1
        if not self._has_settings:
            # RFC 9113 §3.4: the preface MUST be followed by a SETTINGS frame
            if kind != SETTINGS or flags & ACK:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "It does not begin with SETTINGS.")
            self._has_settings = True
        if length > limits.frame_bytes:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"The frame is {length} bytes long.")
        begun = self._block_header
        if begun is not None or kind == CONTINUATION:
            # RFC 9113 §6.10: any other frame within a header block is a connection error of type PROTOCOL_ERROR
            if begun is None or (kind, stream_id) != (CONTINUATION, begun.stream_id):
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A header block is interrupted, or not begun.")
            self._count_block(header)
            return
        if kind != DATA or flags & PADDED or not stream_id:  # most frames are DATA of any length
            check_shape(header)
        if kind == DATA:
            num_bytes = max(0, length - MAX_PADDING_BYTES) if flags & PADDED else length
            self._credit = min(self._most_credit, self._credit + num_bytes) - limits.bytes_per_overhead_frame
            if self._credit < 0:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, NOTHING)
        elif kind == HEADERS:
            self._block_header = header
            self._num_block_bytes = 0
            self._num_blocks += 1
            self._earn(length)
            self._count_block(header)
        elif kind in self._budgets:
            self._spend(kind)
            if kind == SETTINGS and length > limits.num_settings * SETTING_BYTES:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "There are too many settings in one frame.")
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "Nothing may be pushed.")  # RFC 9113 §6.6, §8.4
        else:  # PRIORITY, WINDOW_UPDATE, GOAWAY, unknown types
            self._charge_overhead()

    def _count_block(self, header: Header) -> None:
        """Another fragment of a field section (CVE-2024-27316)."""
        limits = self._frame_limits
        least = _FRAMES_PER_HEAD if header.kind == HEADERS else 1
        self._num_left -= max(least, header.length // _BLOCK_BYTES_PER_FRAME) - 1
        self._num_block_bytes += header.length
        if len(self._block) > limits.num_continuations or self._num_block_bytes > limits.header_block_bytes:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "The header block is too large.")

    def _earn(self, num_bytes: int) -> None:
        """Content, in either direction, pays for overhead."""
        self._credit = min(self._most_credit, self._credit + num_bytes)

    def _spend(self, kind: int) -> None:
        if not self._budgets[kind].take(self._now):
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, f"Too many frames of type {kind}.")

    def _charge_overhead(self) -> None:
        self._credit -= self._frame_limits.bytes_per_overhead_frame
        if self._credit < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, NOTHING)

    # Frames that mean the same to both sides.

    def _take_headers(self, header: Header, payload: bytes) -> None:
        fragment, num_bytes = unpadded(header, payload), num_priority_bytes(header)
        if num_bytes and depends_on(fragment) == header.stream_id:
            # RFC 7540 §5.3.1; RFC 9113 §5.4.1: a stream error may be treated as the connection's
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A stream cannot depend on itself.")
        self._take_fragment(header, fragment[num_bytes:])

    def _take_fragment(self, header: Header, fragment: bytes) -> None:
        self._block.append(fragment)
        if not header.flags & END_HEADERS:
            return
        begun, block = self._block_header, b"".join(self._block)
        assert begun is not None
        self._block_header = None
        self._block.clear()
        fields = self._decoder.decode(block)  # whatever the stream: the table is the connection's (RFC 9113 §4.3)
        self._take_fields(begun, fields)

    def _take_fields(self, begun: Header, fields: Fields) -> None:
        """A field section, with the header of its HEADERS."""
        raise NotImplementedError

    def _take_settings(self, header: Header, payload: bytes) -> None:
        if not header.flags & ACK:
            self._apply_settings(payload)
            self._write(SETTINGS, b"", ACK)

    def _apply_settings(self, payload: bytes) -> None:
        raise NotImplementedError

    def _take_ping(self, header: Header, payload: bytes) -> None:
        if not header.flags & ACK:
            self._write(PING, payload, ACK)

    # What goes out.

    def _write(self, kind: int, payload: bytes, flags: int = 0, stream_id: int = 0) -> None:
        self._out.append(frame(kind, payload, flags, stream_id))

    def _write_reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        self._write(RST_STREAM, code.to_bytes(4, "big"), 0, stream_id)

    def _write_goaway(self, last_stream_id: int, code: Http2ErrorCode) -> None:
        self._write(GOAWAY, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big"))
