"""HTTP/2 without I/O, the server's side (RFC 9113): bytes to events, and answers to bytes. Thread: loop.

`Http2Protocol` reads. It judges each frame by its nine bytes of header before it buffers the payload, and by its
stream's state in the table `_VERDICTS`; what the peer makes it do is rationed by FrameLimits. `Responses` writes: heads
at once, bodies as the peer's windows let it. Time is an argument. Verdicts and events are the same however the input is
split into reads. Priorities are ignored; nothing is pushed.
"""

import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from server.wire.http2_heads import (
    SETTING_BYTES,
    Fields,
    Malformed,
    RequestDecoder,
    ResponseEncoder,
    check_trailers,
    content_length,
    read_request,
)
from server.wire.limits import HeadLimits, Http2Limits, TokenBucket
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    ConnectionFault,
    Event,
    Headers,
    HeadRefused,
    Http2ErrorCode,
    HttpRequest,
    ProtocolViolation,
    ResponseError,
    ResponseHead,
    StreamReset,
    TextFrame,
    TextWriter,
    check_fields,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # RFC 9113 §3.4
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
FRAME_HEADER = struct.Struct(">BHBBL")  # RFC 9113 §4.1: length in 24 bits, type, flags, stream
HEADER_BYTES = FRAME_HEADER.size
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20
MAX_STREAM_ID = 2**31 - 1
DRAIN_PING = b"steploop"
PIECE_BYTES = 1024  # of a streamed text that is framed as it is written, at most: any frame has room for it
PIECES_BYTES = 64 * 1024  # of all streams' pieces, in one take_data

_LENGTH_BYTES = 3  # RFC 9113 §4.1: at the start of a frame's header
_31_BITS = 0x7FFFFFFF  # RFC 9113 §4.1, §6.3, §6.9: the bit before them is reserved
_MOST = 2**24 - 1
_MAX_WINDOW = 2**31 - 1  # RFC 9113 §6.9.1
_DEFAULT_WINDOW = 65_535  # RFC 9113 §6.9.2
_LEAST_FRAME_BYTES = 16_384  # RFC 9113 §6.5.2: of SETTINGS_MAX_FRAME_SIZE, and its initial value
_PRIORITY_BYTES = 5
_MAX_PADDING_BYTES = 256
_NUM_CLOSED_KEPT = 1024  # streams whose end is remembered
_FIELD_BYTES = 100  # of memory for a field, beside its name and value, which HPACK's table may share
# In frames of other kinds that cost as much: the head of a request, with the handler that begins; and bytes of its
# block, each an index or a name in Huffman's code at worst
_FRAMES_PER_HEAD = 4
_BLOCK_BYTES_PER_FRAME = 64

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
    GOAWAY: (False, 8, _MOST),
    WINDOW_UPDATE: (None, 4, 4),
}
_ANY_SHAPE = (None, 0, _MOST)

_SETTING = struct.Struct(">HL")  # RFC 9113 §6.5.1
_TABLE_SIZE, _ENABLE_PUSH, _MAX_STREAMS, _INITIAL_WINDOW, _MAX_FRAME, _MAX_LIST = range(1, 7)
_ENABLE_CONNECT = 8  # RFC 8441 §3
# RFC 9113 §6.5.2: the least and the most that a setting may be, and the error beyond; others may be anything
_RANGES = {
    _ENABLE_PUSH: (0, 1, Http2ErrorCode.PROTOCOL_ERROR),
    _INITIAL_WINDOW: (0, _MAX_WINDOW, Http2ErrorCode.FLOW_CONTROL_ERROR),
    _MAX_FRAME: (_LEAST_FRAME_BYTES, _MOST, Http2ErrorCode.PROTOCOL_ERROR),
    _ENABLE_CONNECT: (0, 1, Http2ErrorCode.PROTOCOL_ERROR),
}


class _Verdict(NamedTuple):
    """What becomes of a frame. Without a code it is taken, or passed over."""

    name: str
    code: Http2ErrorCode = Http2ErrorCode.NO_ERROR


_TAKEN, _IGNORED = _Verdict("taken"), _Verdict("ignored")
_RESETS = _Verdict("resets its stream", Http2ErrorCode.STREAM_CLOSED)  # RFC 9113 §5.4.2
_ENDS, _ENDS_CLOSED = (  # RFC 9113 §5.4.1
    _Verdict("ends the connection", code) for code in (Http2ErrorCode.PROTOCOL_ERROR, Http2ErrorCode.STREAM_CLOSED)
)
# The states of a stream (RFC 9113 §5.1). IDLE and SERVERS (of an even id) have never been open. ENDED ones are complete
# both ways; CLOSED ones were passed over by a higher id, or ended too long ago to know how.
IDLE, SERVERS, OPEN, HALF_CLOSED_LOCAL, HALF_CLOSED_REMOTE, ENDED, RESET_BY_PEER, RESET_BY_US, CLOSED = range(9)
_LIVE = frozenset((OPEN, HALF_CLOSED_LOCAL, HALF_CLOSED_REMOTE))
# What a frame does in each of them, in their order. After our RST_STREAM, frames may still be on their way (§5.1).
_VERDICTS = {
    HEADERS: (_TAKEN, _ENDS, _TAKEN, _TAKEN, _RESETS, _ENDS_CLOSED, _RESETS, _IGNORED, _ENDS),
    DATA: (_ENDS, _ENDS, _TAKEN, _TAKEN, _RESETS, _RESETS, _RESETS, _IGNORED, _RESETS),
    RST_STREAM: (_ENDS, _ENDS, _TAKEN, _TAKEN, _TAKEN, _IGNORED, _IGNORED, _IGNORED, _IGNORED),
    WINDOW_UPDATE: (_ENDS, _ENDS, _TAKEN, _IGNORED, _TAKEN, _IGNORED, _IGNORED, _IGNORED, _IGNORED),
}


class _Header(NamedTuple):
    """RFC 9113 §4.1."""

    length: int
    kind: int
    flags: int
    stream_id: int


def _frame(kind: int, payload: bytes, flags: int = 0, stream_id: int = 0) -> bytes:
    size = len(payload)
    return FRAME_HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def _piece_start(stream_id: int) -> bytes:
    """The header of a DATA frame that does not end its stream, behind the length."""
    return FRAME_HEADER.pack(0, 0, DATA, 0, stream_id)[_LENGTH_BYTES:]


def _window_update(increment: int, stream_id: int = 0) -> bytes:
    return _frame(WINDOW_UPDATE, increment.to_bytes(4, "big"), 0, stream_id)


class _ReceiveWindow:
    """How much the peer may send, of one stream or of the connection.

    Attributes:
        num_left: bytes that it may send now.
        num_unread: of a stream's body, that nobody has read.
        num_aside: of a stream's body, that were given back to the connection's window, and not to this one.
    """

    __slots__ = ("_num_read", "_size", "num_aside", "num_left", "num_unread")

    def __init__(self, size: int) -> None:
        self.num_left = self._size = size
        self.num_unread = self.num_aside = 0
        self._num_read = 0  # and not yet given back

    def take(self, num_bytes: int) -> None:
        self.num_left -= num_bytes
        if self.num_left < 0:  # RFC 9113 §6.9.1
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "The peer has sent more than its window.")

    def give_back(self, num_bytes: int) -> int:
        """So much has been read. Returns by how much to open the window now: 0 until it is worth a frame."""
        self._num_read += num_bytes
        is_shut = self.num_left == 0 and self._num_read > min(1024, self._size // 4)
        if not is_shut and self._num_read < self._size // 2:
            return 0
        increment = min(self._num_read, self._size - self.num_left)
        self._num_read = 0
        self.num_left += increment
        return increment


@dataclass(slots=True, eq=False)
class Http2Stream:
    """One stream: its response, and what is still to come of its request."""

    id: int
    window: int  # that the peer leaves us for the response's body; may be negative (RFC 9113 §6.9.2)
    sends_body: bool  # not of HEAD, nor with 204 or 304
    head_bytes: int  # that the request's head weighs
    receive_window: _ReceiveWindow | None  # of the request's body; None: it has none
    has_read_request: bool  # nothing of it is still to come
    num_awaited: int | None = None  # bytes of its body that may still come; None: any number
    is_head_sent: bool = False
    is_ending: bool = False  # nothing follows `data` but the trailers
    takes_pieces: bool = False  # the body has begun, has not ended, and its length was not declared
    remaining: int | None = None  # bytes of a counted body, not yet given to send_data
    data: bytearray = field(default_factory=bytearray)  # unsent; bounded, because it blocks its stream
    trailers: Headers = ()
    num_partly_sent: int = 0  # bytes that were taken while more was there: the progress of a peer that never takes all


@dataclass(slots=True)
class DataOutput:
    """What take_data gives. A stream may be listed twice."""

    frames: list[bytes] = field(default_factory=list)  # to be joined
    sent: list[Http2Stream] = field(default_factory=list)  # whose frames these are, but for pieces
    held: list[Http2Stream] = field(default_factory=list)  # with bytes, but no window
    ended: list[Http2Stream] = field(default_factory=list)  # whose responses are complete
    num_bytes: int = 0
    has_more: bool = False  # the limit has cut it short


_STATUS = {status.value: (b":status", b"%d" % status.value) for status in HTTPStatus}
_LENGTHS = tuple(size.to_bytes(_LENGTH_BYTES, "big") for size in range(PIECE_BYTES + 1))
_PARTS = 4  # that a piece's frame is kept in until it is written


class Responses:
    """The open streams of one connection, and what is to be sent on them.

    Texts of a token or so are framed as they are written ("pieces"), one of each stream and step mostly; they wait for
    take_data, and go before what else the streams have to send.

    Attributes:
        streams: whose responses have not been sent to their end, by id; Http2Protocol opens and forgets them.
        encoder: of heads and trailers.
        window: the connection's, that the peer leaves us.
        initial_window: of a new stream.
        max_frame_bytes: that the peer takes.
    """

    def __init__(self, write: Callable[[bytes], None], date: Callable[[], bytes]) -> None:
        """
        Args:
            write: takes what goes out ahead of any DATA.
        """
        self.streams: dict[int, Http2Stream] = {}
        self.encoder = ResponseEncoder()
        self.window = self.initial_window = _DEFAULT_WINDOW
        self.max_frame_bytes = _LEAST_FRAME_BYTES
        self._write = write
        self._date = date
        self._ready: dict[int, Http2Stream] = {}  # may have something to send, in their turn
        self._has_left = False  # take_data has, some of these: their turn is before any piece's
        self._pieces: list[bytes] = []  # each a length, the rest of the frame's header with the text's head, text, tail
        self._knows_room = False  # of pieces until the next take_data
        self._room = self._most_room = 0  # bytes of it, now and at first; the window's are taken at take_data

    @property
    def has_some(self) -> bool:
        """take_data may have something."""
        return bool(self._ready or self._pieces)

    def num_unsent(self, stream_id: int) -> int:
        """Bytes of the stream's body that take_data has not given; 0 when it is gone."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else len(stream.data)

    def is_written(self, stream_id: int) -> bool:
        """All that was sent so far has been taken, with the end of a response that has ended."""
        stream = self.streams.get(stream_id)
        return stream is None or not (stream.data or stream.is_ending)

    def num_unsent_ending(self) -> int:
        """Bytes unsent of all bodies to which nothing will be added."""
        return sum([len(stream.data) for stream in self.streams.values() if stream.is_ending])

    def wake(self, streams: Iterable[Http2Stream]) -> None:
        """Their windows may have opened."""
        for stream in streams:
            if stream.data or stream.is_ending:
                self._ready[stream.id] = stream

    def forget(self, stream_id: int) -> Http2Stream | None:
        """Send nothing more of it. Returns the stream if there was something to be sent."""
        self._ready.pop(stream_id, None)
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return None
        stream.takes_pieces = False
        pieces, start = self._pieces, _piece_start(stream_id)
        for i in reversed(range(0, len(pieces), _PARTS)):
            if pieces[i + 1].startswith(start):
                self._room += int.from_bytes(pieces[i], "big")
                del pieces[i : i + _PARTS]
        return stream

    def send_head(self, stream_id: int, head: ResponseHead) -> None:
        """Send the head. A status below 200 is informational, and the head is still to come.

        Raises:
            ResponseError: fields that are not the application's to send, or a head already sent.
        """
        stream = self.streams[stream_id]
        if stream.is_head_sent or head.status == 101 or head.status < 100:
            raise ResponseError(f"A head with status {head.status} cannot be sent here and now.")
        length = check_fields(head)
        is_final = head.status >= 200
        stream.is_head_sent = is_final
        stream.sends_body &= head.status not in (204, 304)
        stream.remaining = length if stream.sends_body else None
        stream.takes_pieces = is_final and stream.sends_body and length is None
        fields = [_STATUS.get(head.status) or (b":status", b"%d" % head.status)]
        if is_final:
            fields.append((b"date", self._date()))
        # RFC 9113 §8.2.2: no connection-specific fields
        fields += [pair for pair in head.headers if pair[0] != b"connection"]
        self._write(self._head_frames(stream_id, fields))

    def _head_frames(self, stream_id: int, fields: Iterable[tuple[bytes, bytes]], flags: int = 0) -> bytes:
        """HEADERS, and CONTINUATION where they are longer than a frame."""
        block, most = self.encoder.encode(fields), self.max_frame_bytes
        if len(block) <= most:
            return _frame(HEADERS, block, flags | END_HEADERS, stream_id)
        pieces = [block[start : start + most] for start in range(0, len(block), most)]
        frames = [_frame(HEADERS, pieces[0], flags, stream_id)]
        frames += [_frame(CONTINUATION, piece, 0, stream_id) for piece in pieces[1:-1]]
        return b"".join((*frames, _frame(CONTINUATION, pieces[-1], END_HEADERS, stream_id)))

    def send_data(self, stream_id: int, data: bytes) -> int:
        """The body's next bytes; they wait for take_data, and for the peer's windows. Returns num_unsent.

        Raises:
            ResponseError: before the head, after the end, or beyond the content-length.
        """
        stream = self.streams[stream_id]
        if not stream.is_head_sent or stream.is_ending:
            raise ResponseError("A body is sent after its head and before its end.")
        if data and stream.sends_body:
            if stream.remaining is not None:
                stream.remaining -= len(data)
                if stream.remaining < 0:
                    raise ResponseError("The body is longer than its content-length.")
            stream.data += data
            self._ready[stream_id] = stream
        return len(stream.data)

    def text_writer(
        self, stream_id: int, frame: TextFrame, send: Callable[[bytes], None], call_flush: Callable[[], bool]
    ) -> TextWriter:
        """The hot path: send_data of one stream for texts, each framed at once if it is a piece. The head is sent.

        Args:
            send: takes what is no piece: it is long, has no window, follows the body's end, or has to wait its turn.
            call_flush: called before the first piece since take_data, and sees that there is another. False: not soon.
        """
        stream, pieces, (head, encoded, tail) = self.streams[stream_id], self._pieces, frame
        start, num_more = _piece_start(stream_id) + head, len(head) + len(tail)

        def write(text: str) -> None:
            if not self._knows_room:
                self._find_room(call_flush())
            content = encoded[text]
            size = len(content) + num_more
            window = stream.window
            if size > self._room or size > window or size > PIECE_BYTES or stream.data or not stream.takes_pieces:
                send(head + content + tail)
                return
            self._room -= size
            stream.window = window - size
            pieces.extend((_LENGTHS[size], start, content, tail))

        return write

    def _find_room(self, is_flushed_soon: bool) -> None:
        self._knows_room = True
        is_free = is_flushed_soon and not self._has_left
        self._room = self._most_room = max(0, min(self.window, PIECES_BYTES)) if is_free else 0

    def send_end(self, stream_id: int, trailers: Headers = ()) -> None:
        """Nothing follows in this body but the trailers.

        Raises:
            ResponseError: before the head, twice, or short of the content-length; trailers that cannot be sent.
        """
        stream = self.streams[stream_id]
        if not stream.is_head_sent or stream.is_ending:
            raise ResponseError("A response ends once, after its head.")
        if stream.remaining:
            raise ResponseError(f"The body is {stream.remaining} bytes shorter than its content-length.")
        if check_fields(ResponseHead(200, trailers)) is not None:
            raise ResponseError("A content-length comes too late in the trailers.")
        stream.trailers = trailers if stream.sends_body else ()
        stream.is_ending = True
        stream.takes_pieces = False
        self._ready[stream_id] = stream

    def take_data(self, limit_bytes: int) -> DataOutput:
        """DATA frames, and trailers, of all streams that have some and whose windows let them, one each in turn.

        Args:
            limit_bytes: no further frame begins past it.
        """
        output = DataOutput()
        output.num_bytes = self._take_pieces(output.frames)
        shut_out: dict[int, Http2Stream] = {}  # by the connection's window: their turn is kept
        while self._ready and output.num_bytes < limit_bytes:
            turn = iter(self._ready.items())
            self._ready = {}
            for stream_id, stream in turn:
                size = self._frame_next(stream, output)
                if size:
                    output.sent.append(stream)
                    output.num_bytes += size
                    if stream.data:
                        self._ready[stream_id] = stream
                    if output.num_bytes >= limit_bytes:
                        self._ready = dict(turn) | self._ready
                        break
                elif stream.data:
                    output.held.append(stream)
                    if stream.window > 0:
                        shut_out[stream_id] = stream
        output.has_more = bool(self._ready)
        self._ready.update(shut_out)
        self._has_left = bool(self._ready)
        return output

    def _take_pieces(self, frames: list[bytes]) -> int:
        """Append their frames; returns their bytes."""
        num_bytes = self._most_room - self._room
        self.window -= num_bytes
        self._knows_room = False
        self._room = self._most_room = 0
        num_bytes += HEADER_BYTES * (len(self._pieces) // _PARTS)
        frames += self._pieces
        self._pieces.clear()
        return num_bytes

    def _frame_next(self, stream: Http2Stream, output: DataOutput) -> int:
        """One frame of as much of the body as the windows and the frame size let through; its size, 0: none.

        RFC 9113 §6.9.1: an empty one that ends the stream needs no window. Trailers follow the last.
        """
        data = stream.data
        size = max(0, min(len(data), self.window, stream.window, self.max_frame_bytes))
        is_last = stream.is_ending and size == len(data)
        if not size and not is_last:
            return 0
        frames: list[bytes] = []
        if size or not stream.trailers:
            flags = END_STREAM if is_last and not stream.trailers else 0
            frames.append(_frame(DATA, bytes(data[:size]), flags, stream.id))
            self.window -= size
            stream.window -= size
            del data[:size]
            if data:
                stream.num_partly_sent += size
        if is_last:
            if stream.trailers:
                frames.append(self._head_frames(stream.id, stream.trailers, END_STREAM))
            del self.streams[stream.id]
            output.ended.append(stream)
        output.frames += frames
        return sum(map(len, frames))


class Http2Protocol:
    """One connection's protocol. What is to be written is taken with take_control, then take_data.

    Attributes:
        has_failed: the connection ends with the GOAWAY that take_control gives; no event comes any more.
        failed_with: the code of that GOAWAY.
        num_requests: whose heads have been taken.
        responses: of the open streams.
        early: streams whose responses have ended before their requests, oldest first. RFC 9113 §8.1: RST_STREAM with
            NO_ERROR may tell that no more of them is wanted. But clients that are busy sending (curl 7.88, httpx) take
            it for their stream's end, without an answer; so they may go on for a while.
        has_peer_left: the client has sent a GOAWAY that is an error: it wants no answer any more.
    """

    def __init__(
        self,
        head: HeadLimits,
        limits: Http2Limits,
        date: Callable[[], bytes],
        upgrade: bytes | None = None,
        frames_at_once: int = sys.maxsize,
    ) -> None:
        """
        Args:
            frames_at_once: that one call of receive understands; a request's head is worth several.
            upgrade: the settings of the HTTP/1.1 request that asked for HTTP/2 (`upgrade_settings`); it has been read
                to its end and becomes stream 1, by `adopt`.

        Raises:
            ConnectionFault: a setting in it has a value that it cannot have.
        """
        self.has_failed = self.has_peer_left = False
        self.failed_with = Http2ErrorCode.NO_ERROR
        self.num_requests = 0
        self._head_limits = head
        self._limits = limits
        self._out: list[bytes] = []
        self.responses = Responses(self._out.append, date)
        self._streams = self.responses.streams
        self.early: dict[int, Http2Stream] = {}
        self._closed: dict[int, int] = {}  # the states of streams that were open, the last _NUM_CLOSED_KEPT
        self._highest_stream_id = 0 if upgrade is None else 1  # that has not been idle
        self._last_stream_id = 0  # whose request was taken
        self._head_bytes = 0  # of the open streams
        self._num_refused = 0  # streams in a row
        self._is_draining = False
        self._goaway_id = MAX_STREAM_ID  # above which streams are refused
        # What is being read.
        self._events: list[Event] = []
        self._now = 0.0
        self._buffer = bytearray()
        self._header: _Header | None = None  # of the frame that the buffer begins with, once judged
        self._has_preface = self._has_settings = self._has_more = False
        self._frames_at_once = self._num_left = frames_at_once
        self._block: list[bytes] = []  # of a field section: its HEADERS' and CONTINUATIONs' fragments
        self._block_header: _Header | None = None  # of its HEADERS, until it is complete
        self._num_block_bytes = self._num_blocks = 0
        self._decoder = RequestDecoder(limits.list_bytes)
        self._window = _ReceiveWindow(limits.window_bytes)
        # What the peer may make us do.
        frames = limits.frames
        self._most_credit = frames.num_overhead_frames * frames.bytes_per_overhead_frame
        self._credit = self._most_credit  # in bytes of content
        self._resets = TokenBucket(frames.resets)
        self._pings = TokenBucket(frames.pings)
        self._settings = TokenBucket(frames.settings)
        advertised = {_MAX_STREAMS: limits.num_streams, _MAX_LIST: head.head_bytes}
        if frames.frame_bytes > _LEAST_FRAME_BYTES:
            advertised[_MAX_FRAME] = frames.frame_bytes
        self._write(SETTINGS, b"".join(_SETTING.pack(code, value) for code, value in advertised.items()))
        self._out.append(_window_update(limits.window_bytes - _DEFAULT_WINDOW))
        if upgrade is not None:
            self._apply_settings(upgrade)

    @property
    def has_output(self) -> bool:
        """take_control or take_data may have something."""
        return bool(self._out) or self.responses.has_some

    @property
    def has_more(self) -> bool:
        """receive has understood as much at once as it may: receive(b"", now) goes on."""
        return self._has_more and not self.has_failed

    @property
    def pending_head(self) -> int | None:
        """The preface (0), or a request's head (from 1), that has begun and is not complete."""
        if not self._has_settings:
            return 0
        is_coming = self._header is not None and self._header.kind in (HEADERS, CONTINUATION)
        return self._num_blocks if is_coming or self._block_header is not None else None

    def is_open(self, stream_id: int) -> bool:
        """Its response can be sent: no later frame, perhaps of the same read, has ended it."""
        return stream_id in self._streams

    def adopt(self, request: HttpRequest) -> None:
        """The request that came by HTTP/1.1 is answered here."""
        assert request.stream_id == 1
        window = self.responses.initial_window
        self._streams[1] = Http2Stream(1, window, request.method != "HEAD", 0, None, has_read_request=True)
        self._last_stream_id = self.num_requests = 1

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What the bytes mean. Of those with which the connection fails, nothing is told.

        Args:
            now: in seconds, never less than before.
        """
        if self.has_failed:
            return []
        self._now = now
        self._buffer += data
        self._num_left = self._frames_at_once
        self._has_more = False
        try:
            self._read_frames()
        except ConnectionFault as fault:
            self.fail(fault.code)
        events, self._events = self._events, []
        return events

    def fail(self, code: Http2ErrorCode) -> None:
        """End the connection, and all its streams."""
        self.has_failed = True
        self.failed_with = code
        for stream_id in tuple(self._streams):
            self.responses.forget(stream_id)
        for storage in (self._buffer, self._events, self._block, self.early):
            storage.clear()
        self._write_goaway(self._last_stream_id, code)

    # Frames.

    def _read_frames(self) -> None:
        buffer, position = self._buffer, 0
        if not self._has_preface:
            position = self._take_preface()
        while self._has_preface and len(buffer) - position >= HEADER_BYTES:
            header = self._header
            if header is None:
                if self._num_left <= 0:
                    self._has_more = True
                    break
                high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(buffer, position)
                header = self._header = _Header(high << 16 | low, kind, flags, stream_id & _31_BITS)
                self._check_header(header)
            end = position + HEADER_BYTES + header.length
            if len(buffer) < end:
                break
            self._header = None
            take = _TAKERS.get(header.kind)
            if take is not None:  # RFC 9113 §5.5: unknown types are ignored
                take(self, header, bytes(buffer[position + HEADER_BYTES : end]))
            position = end
        del buffer[:position]

    def _take_preface(self) -> int:
        begun = bytes(self._buffer[: len(PREFACE)])
        if not PREFACE.startswith(begun):
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "This is not HTTP/2's connection preface.")
        self._has_preface = begun == PREFACE
        return len(PREFACE) if self._has_preface else 0

    def _check_header(self, header: _Header) -> None:
        """Judge a frame by its header, and charge for it.

        Raises:
            ConnectionFault: it is not to be read.
        """
        length, kind, flags, stream_id = header
        limits = self._limits.frames
        self._num_left -= 1
        if length > limits.frame_bytes:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"The frame is {length} bytes long.")
        if not self._has_settings:
            # RFC 9113 §3.4: the preface MUST be followed by a SETTINGS frame
            if kind != SETTINGS or flags & ACK:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "The first frame is not SETTINGS.")
            self._has_settings = True
        begun = self._block_header
        if begun is not None or kind == CONTINUATION:
            # RFC 9113 §6.10: any other frame within a header block is a connection error of type PROTOCOL_ERROR
            if begun is None or (kind, stream_id) != (CONTINUATION, begun.stream_id):
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A header block is interrupted, or not begun.")
            self._count_block(header)
            return
        _check_shape(header)
        if kind == HEADERS:
            self._block_header = header
            self._num_block_bytes = 0
            self._num_blocks += 1
            self._earn(length)
            self._count_block(header)
        elif kind == DATA:
            self._earn(max(0, length - _MAX_PADDING_BYTES) if flags & PADDED else length)
            self._charge_overhead()
        elif kind == RST_STREAM:
            _spend(self._resets, "RST_STREAM", self._now)
        elif kind == PING:
            _spend(self._pings, "PING", self._now)
        elif kind == SETTINGS:
            _spend(self._settings, "SETTINGS", self._now)
            if length > limits.num_settings * SETTING_BYTES:
                raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "There are too many settings in one frame.")
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A client cannot push.")  # RFC 9113 §8.4
        else:  # PRIORITY, WINDOW_UPDATE, GOAWAY, unknown types
            self._charge_overhead()

    def _count_block(self, header: _Header) -> None:
        """Another fragment of a field section (CVE-2024-27316)."""
        limits = self._limits.frames
        least = _FRAMES_PER_HEAD if header.kind == HEADERS else 1
        self._num_left -= max(least, header.length // _BLOCK_BYTES_PER_FRAME) - 1
        self._num_block_bytes += header.length
        if len(self._block) > limits.num_continuations or self._num_block_bytes > limits.header_block_bytes:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "The header block is too large.")

    def _earn(self, num_bytes: int) -> None:
        """So much content has come, or has been sent: as much overhead may answer it."""
        self._credit = min(self._most_credit, self._credit + num_bytes)

    def _charge_overhead(self) -> None:
        self._credit -= self._limits.frames.bytes_per_overhead_frame
        if self._credit < 0:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "Too many frames carry nothing.")

    # Streams.

    def _state(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        if stream is not None:
            return HALF_CLOSED_REMOTE if stream.has_read_request else OPEN
        if stream_id in self.early:
            return HALF_CLOSED_LOCAL
        if stream_id % 2 == 0:
            return SERVERS
        return IDLE if stream_id > self._highest_stream_id else self._closed.get(stream_id, CLOSED)

    def _is_taken(self, kind: int, stream_id: int) -> bool:
        """Carry out the table's verdict on a frame. False: that was all."""
        verdict = _VERDICTS[kind][self._state(stream_id)]
        if verdict is _RESETS:
            self._fail_stream(stream_id, verdict.code)
        elif verdict.code:
            raise ConnectionFault(verdict.code, f"A frame of type {kind} cannot come on stream {stream_id} now.")
        return verdict is _TAKEN

    def _find_fault(self, stream_id: int, code: Http2ErrorCode) -> None:
        """A frame is malformed, and its stream alone is at fault."""
        state = self._state(stream_id)
        if state in _LIVE:
            self._fail_stream(stream_id, code)
        elif state in (IDLE, SERVERS):  # RFC 9113 §6.4: it cannot be reset
            raise ConnectionFault(code, "A frame of a stream that is not open is malformed.")

    def _fail_stream(self, stream_id: int, code: Http2ErrorCode) -> None:
        """RFC 9113 §5.4.2. It is the peer that makes us reset, which is counted as its own resets (CVE-2025-8671)."""
        if stream_id in self._streams:
            self._events.append(StreamReset(stream_id, code))
        self._reset(stream_id, code)
        _spend(self._resets, "RST_STREAM", self._now)

    def _reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        self._close(stream_id, RESET_BY_US)
        self._write(RST_STREAM, code.to_bytes(4, "big"), 0, stream_id)

    def _close(self, stream_id: int, state: int) -> None:
        """Forget the stream but for its state."""
        stream = self.responses.forget(stream_id) or self.early.pop(stream_id, None)
        if stream is not None:
            self._head_bytes -= stream.head_bytes
            if stream.receive_window is not None:
                self._give_back(None, stream.receive_window.num_unread)
        self._closed.pop(stream_id, None)
        self._closed[stream_id] = state
        if len(self._closed) > _NUM_CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    # What comes of each frame.

    def _take_headers(self, header: _Header, payload: bytes) -> None:
        start, end = int(bool(header.flags & PADDED)), len(payload)
        has_priority = bool(header.flags & HAS_PRIORITY)
        if end < start + _PRIORITY_BYTES * has_priority:
            raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "The frame has no room for what its flags say.")
        if start:
            end -= payload[0]
        if has_priority:
            if _depends_on(payload[start:]) == header.stream_id:
                # RFC 7540 §5.3.1; RFC 9113 §5.4.1: a stream error may be treated as the connection's
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A stream cannot depend on itself.")
            start += _PRIORITY_BYTES
        if end < start:  # RFC 9113 §6.2
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "There is more padding than frame.")
        self._take_fragment(header, payload[start:end])

    def _take_fragment(self, header: _Header, fragment: bytes) -> None:
        self._block.append(fragment)
        if not header.flags & END_HEADERS:
            return
        begun, block = self._block_header, b"".join(self._block)
        assert begun is not None
        self._block_header = None
        self._block.clear()
        fields = self._decoder.decode(block)  # whatever the stream: the table is the connection's (RFC 9113 §4.3)
        if not self._is_taken(HEADERS, begun.stream_id):
            return
        ends_stream = bool(begun.flags & END_STREAM)
        if begun.stream_id > self._highest_stream_id:
            self._open(begun.stream_id, fields, not ends_stream)
        elif not ends_stream:  # RFC 9113 §8.1
            self._fail_stream(begun.stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            self._take_trailers(begun.stream_id, fields)

    def _open(self, stream_id: int, fields: Fields, has_body: bool) -> None:
        """A request."""
        self._highest_stream_id = stream_id
        # the table's entries are shared; the path is decoded anew for each
        path_bytes = sum([len(value) for name, value in fields if name == b":path"])
        head_bytes = _FIELD_BYTES * len(fields) + self._num_block_bytes + path_bytes
        heads_fit = not self._streams or self._head_bytes + head_bytes <= self._limits.heads_bytes
        has_room = heads_fit and len(self._streams) + len(self.early) < self._limits.num_streams
        if not has_room or stream_id > self._goaway_id:
            self._refuse(stream_id)
            return
        self._num_refused = 0
        window = _ReceiveWindow(_DEFAULT_WINDOW) if has_body else None
        sends_body = (b":method", b"HEAD") not in fields
        initial_window = self.responses.initial_window
        stream = Http2Stream(stream_id, initial_window, sends_body, head_bytes, window, has_read_request=not has_body)
        self._streams[stream_id] = stream
        self._head_bytes += head_bytes
        try:
            request = read_request(stream_id, fields, has_body, self._head_limits)
            if has_body:
                stream.num_awaited = content_length(request.headers)
            self._events.append(request)
        except Malformed:
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
            return
        except HeadRefused as refusal:
            self._events.append(ProtocolViolation(stream_id, refusal.status, refusal.message))
        self._last_stream_id = stream_id
        self.num_requests += 1

    def _refuse(self, stream_id: int) -> None:
        """RFC 9113 §5.1.2 and §8.7: nothing has been done with it, and it may be tried again."""
        self._reset(stream_id, Http2ErrorCode.REFUSED_STREAM)
        self._events.append(StreamReset(stream_id, Http2ErrorCode.REFUSED_STREAM))
        self._num_refused += 1
        if self._num_refused > self._limits.num_refused:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "Too many streams.")

    def _take_trailers(self, stream_id: int, fields: Fields) -> None:
        try:
            if stream_id in self._streams:
                check_trailers(fields)
        except Malformed:
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            self._end_request(stream_id)

    def _take_data(self, header: _Header, payload: bytes) -> None:
        length, _, flags, stream_id = header
        data = payload
        if flags & PADDED:
            if not length:
                raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "There is no room for the padding's length.")
            if payload[0] >= length:  # RFC 9113 §6.1
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "There is more padding than frame.")
            data = payload[1 : length - payload[0]]
        self._window.take(length)
        if not self._is_taken(DATA, stream_id):
            self._give_back(None, length)
            return
        is_early = stream_id in self.early
        stream = self.early[stream_id] if is_early else self._streams[stream_id]
        window = stream.receive_window
        assert window is not None
        window.take(length)
        if stream.num_awaited is not None:
            stream.num_awaited -= len(data)
            if stream.num_awaited < 0:
                self._give_back(None, length)
                if is_early:
                    self.break_off(stream_id)
                else:  # RFC 9113 §8.1.1
                    self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
                return
        num_kept = 0 if is_early else len(data)
        if num_kept:
            window.num_unread += num_kept
            self._events.append(BodyChunk(stream_id, data))
        self._give_back(window, length - num_kept, stream_id)
        if flags & END_STREAM:
            self._end_request(stream_id)

    def _end_request(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            self._close(stream_id, ENDED)
        elif stream.num_awaited:  # RFC 9113 §8.1.1
            self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            stream.has_read_request = True
            self._events.append(BodyEnd(stream_id))

    def _take_priority(self, header: _Header, payload: bytes) -> None:
        if header.length != _PRIORITY_BYTES:  # RFC 9113 §6.3
            self._find_fault(header.stream_id, Http2ErrorCode.FRAME_SIZE_ERROR)
        elif _depends_on(payload) == header.stream_id:  # RFC 7540 §5.3.1
            self._find_fault(header.stream_id, Http2ErrorCode.PROTOCOL_ERROR)

    def _take_reset(self, header: _Header, payload: bytes) -> None:
        stream_id = header.stream_id
        if self._is_taken(RST_STREAM, stream_id):
            if stream_id in self._streams:
                self._events.append(StreamReset(stream_id))
            self._close(stream_id, RESET_BY_PEER)

    def _take_settings(self, header: _Header, payload: bytes) -> None:
        if not header.flags & ACK:
            self._apply_settings(payload)
            self._write(SETTINGS, b"", ACK)

    def _apply_settings(self, payload: bytes) -> None:
        """RFC 9113 §6.5.3: in their order, so that the last value of each holds; unknown ones are ignored."""
        settings: dict[int, int] = {}
        table_sizes: list[int] = []
        for code, value in _SETTING.iter_unpack(payload):
            least, most, error = _RANGES.get(code, (0, value, Http2ErrorCode.NO_ERROR))
            if not least <= value <= most:
                raise ConnectionFault(error, f"Setting {code} cannot be {value}.")
            if code == _TABLE_SIZE:
                table_sizes.append(value)
            settings[code] = value
        responses = self.responses
        if table_sizes:
            responses.encoder.resize(table_sizes)
        responses.max_frame_bytes = settings.get(_MAX_FRAME, responses.max_frame_bytes)
        growth = settings.get(_INITIAL_WINDOW, responses.initial_window) - responses.initial_window
        if growth:
            responses.initial_window += growth
            for stream in self._streams.values():
                stream.window += growth
                if stream.window > _MAX_WINDOW:  # RFC 9113 §6.9.2
                    raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "A stream's window is too large.")
        responses.wake(self._streams.values())

    def _take_ping(self, header: _Header, payload: bytes) -> None:
        if not header.flags & ACK:
            self._write(PING, payload, ACK)
        elif payload == DRAIN_PING:
            self.finish_drain()

    def _take_goaway(self, header: _Header, payload: bytes) -> None:
        self.has_peer_left = payload[4:8] != bytes(4)

    def _take_window_update(self, header: _Header, payload: bytes) -> None:
        increment, stream_id = int.from_bytes(payload, "big") & _31_BITS, header.stream_id
        if not stream_id:
            self.responses.window += increment
            if not increment:  # RFC 9113 §6.9
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "The window grows by nothing.")
            if self.responses.window > _MAX_WINDOW:  # RFC 9113 §6.9.1
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "The connection's window is too large.")
        elif not increment:
            self._find_fault(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        elif self._is_taken(WINDOW_UPDATE, stream_id):
            stream = self._streams[stream_id]
            stream.window += increment
            if stream.window > _MAX_WINDOW:
                self._fail_stream(stream_id, Http2ErrorCode.FLOW_CONTROL_ERROR)
            else:
                self.responses.wake((stream,))

    # What the connection says.

    def _write(self, kind: int, payload: bytes, flags: int = 0, stream_id: int = 0) -> None:
        self._out.append(_frame(kind, payload, flags, stream_id))

    def acknowledge(self, stream_id: int) -> None:
        """What has come of the stream's body has been read: the peer may send as much again."""
        window = self._window_of(stream_id)
        if window is not None:
            if window.num_aside:
                window.num_left += window.num_aside
                self._out.append(_window_update(window.num_aside, stream_id))
            num_unread, window.num_unread, window.num_aside = window.num_unread, 0, 0
            self._give_back(window, num_unread, stream_id)

    def acknowledge_aside(self, stream_id: int) -> bool:
        """As acknowledge, for the other streams alone: this one's window stays shut until it is acknowledged.

        False: nothing had come of it.
        """
        window = self._window_of(stream_id)
        if window is None or not window.num_unread:
            return False
        self._window.num_left += window.num_unread
        self._out.append(_window_update(window.num_unread))
        window.num_aside += window.num_unread
        window.num_unread = 0
        return True

    def _window_of(self, stream_id: int) -> _ReceiveWindow | None:
        """None: nothing more is to come of the stream."""
        stream = self._streams.get(stream_id) or self.early.get(stream_id)
        return None if stream is None else stream.receive_window

    def _give_back(self, window: _ReceiveWindow | None, num_bytes: int, stream_id: int = 0) -> None:
        """So many bytes are read, of the stream with this window and of the connection; of the latter alone: None."""
        for one, owner in ((self._window, 0), (window, stream_id)):
            increment = 0 if one is None or not num_bytes else one.give_back(num_bytes)
            if increment:
                self._out.append(_window_update(increment, owner))

    def may_send(self, stream_id: int) -> bool:
        """The windows let the peer send more of the open stream's body."""
        window = self._window_of(stream_id)
        return self._window.num_left > 0 and window is not None and window.num_left > 0

    def reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        """End the stream, both ways. What is unsent is lost."""
        if stream_id in self._streams or stream_id in self.early:
            self._reset(stream_id, code)

    def break_off(self, stream_id: int) -> None:
        """No more of an early stream is read. Idempotent."""
        if stream_id in self.early:
            self._reset(stream_id, Http2ErrorCode.NO_ERROR)

    # Drain.

    def start_drain(self) -> None:
        """Tell the client to open no more streams, and find out when it has heard (RFC 9113 §6.8). Idempotent."""
        if self._is_draining or self.has_failed:
            return
        self._is_draining = True
        self._write_goaway(MAX_STREAM_ID, Http2ErrorCode.NO_ERROR)
        self._write(PING, DRAIN_PING)

    def finish_drain(self) -> None:
        """Streams above the last one taken are refused from now on. Idempotent."""
        if self._is_draining and self._goaway_id == MAX_STREAM_ID and not self.has_failed:
            self._goaway_id = self._last_stream_id
            self._write_goaway(self._goaway_id, Http2ErrorCode.NO_ERROR)

    @property
    def has_drained(self) -> bool:
        """The last GOAWAY is written, and no stream is left."""
        return self._goaway_id != MAX_STREAM_ID and not self._streams

    def _write_goaway(self, last_stream_id: int, code: Http2ErrorCode) -> None:
        self._write(GOAWAY, last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big"))

    # What goes out.

    def take_control(self) -> list[bytes]:
        """What is to be written before any DATA: heads, answers to the peer's frames."""
        out = self._out.copy()
        self._out.clear()
        return out

    def take_data(self, limit_bytes: int) -> DataOutput:
        """See Responses.take_data."""
        output = self.responses.take_data(limit_bytes)
        self._earn(output.num_bytes)
        for stream in output.ended:
            self._head_bytes -= stream.head_bytes
            stream.head_bytes = 0
            if stream.has_read_request:
                self._close(stream.id, ENDED)
            else:
                self.early[stream.id] = stream
                stream.num_awaited = self._limits.early_bytes
        return output


_TAKERS: dict[int, Callable[[Http2Protocol, _Header, bytes], None]] = {
    DATA: Http2Protocol._take_data,
    HEADERS: Http2Protocol._take_headers,
    PRIORITY: Http2Protocol._take_priority,
    RST_STREAM: Http2Protocol._take_reset,
    SETTINGS: Http2Protocol._take_settings,
    PING: Http2Protocol._take_ping,
    GOAWAY: Http2Protocol._take_goaway,
    WINDOW_UPDATE: Http2Protocol._take_window_update,
    CONTINUATION: Http2Protocol._take_fragment,
}


def _check_shape(header: _Header) -> None:
    """Whether the frame's stream and length fit its type."""
    length, kind, flags, stream_id = header
    is_of_stream, least, most = _SHAPES.get(kind, _ANY_SHAPE)
    if is_of_stream is not None and is_of_stream != (stream_id > 0):
        raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"A frame of type {kind} cannot be of stream {stream_id}.")
    fits = least <= length <= most
    if kind == SETTINGS:  # RFC 9113 §6.5
        fits = not length if flags & ACK else length % SETTING_BYTES == 0
    if not fits:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, f"A frame of type {kind} cannot be {length} bytes long.")


def _spend(budget: TokenBucket, name: str, now: float) -> None:
    if not budget.take(now):
        raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, f"Too many {name} frames.")


def _depends_on(priority: bytes) -> int:
    """RFC 9113 §6.3: behind the bit that says exclusive."""
    return int.from_bytes(priority[:4], "big") & _31_BITS
