"""HTTP/2 streams, flow-control windows, and sending: heads immediately, bodies as the windows allow.

Sans-io. Thread: loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

from server.wire.http2_frames import (
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    FRAME_HEADER,
    HEADER_BYTES,
    LEAST_FRAME_BYTES,
    frame,
    head_frames,
)
from server.wire.http2_heads import FieldEncoder
from server.wire.messages import (
    ConnectionFault,
    Headers,
    Http2ErrorCode,
    ResponseError,
    ResponseHead,
    TextFrame,
    TextWriter,
    check_fields,
)

PIECE_BYTES = 1024  # of a streamed text that is framed as it is written, at most: any frame has room for it
PIECES_BYTES = 64 * 1024  # of all streams' pieces, in one take_data

_LENGTH_BYTES = 3  # RFC 9113 §4.1: at the start of a frame's header


def _piece_start(stream_id: int) -> bytes:
    """The header of a DATA frame that does not end its stream, behind the length."""
    return FRAME_HEADER.pack(0, 0, DATA, 0, stream_id)[_LENGTH_BYTES:]


class ReceiveWindow:
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
    receive_window: ReceiveWindow | None  # of the request's body; None: it has none
    has_read_request: bool  # nothing of it is still to come
    num_awaited: int | None = None  # bytes of its body that may still come; None: any number
    is_head_sent: bool = False
    is_ending: bool = False  # nothing follows `data` but the trailers
    takes_pieces: bool = False  # the body has begun, has not ended, and its length was not declared
    remaining: int | None = None  # bytes of a counted body, not yet given to send_data
    data: bytearray = field(default_factory=bytearray)  # unsent; bounded, because it blocks its stream
    trailers: Headers = ()
    early_since: float = 0.0  # when its response had ended before its request
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
        """write: takes what goes out ahead of any DATA."""
        self.streams: dict[int, Http2Stream] = {}
        self.encoder = FieldEncoder()
        self.window = self.initial_window = DEFAULT_WINDOW
        self.max_frame_bytes = LEAST_FRAME_BYTES
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
        """take_data has given all that was sent so far, including the end of an ended response."""
        stream = self.streams.get(stream_id)
        return stream is None or not (stream.data or stream.is_ending)

    def num_unsent_ending(self) -> int:
        """Unsent bytes of all complete bodies."""
        return sum([len(stream.data) for stream in self.streams.values() if stream.is_ending])

    def wake(self, streams: Iterable[Http2Stream]) -> None:
        """Their windows may have opened."""
        for stream in streams:
            if stream.data or stream.is_ending:
                self._ready[stream.id] = stream

    def forget(self, stream_id: int) -> Http2Stream | None:
        """Send nothing more on it. Returns the stream if its response had not ended."""
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
        """Raises ResponseError: fields that the application must not send, or a head already sent."""
        stream = self.streams[stream_id]
        if stream.is_head_sent:
            raise ResponseError("A response has one head.")
        length = check_fields(head)
        stream.is_head_sent = True
        stream.sends_body &= head.status not in (204, 304)
        stream.remaining = length if stream.sends_body else None
        stream.takes_pieces = stream.sends_body and length is None
        status = _STATUS.get(head.status) or (b":status", b"%d" % head.status)
        self._write(self._head_frames(stream_id, (status, (b"date", self._date()), *head.headers)))

    def send_continue(self, stream_id: int) -> None:
        """Before the head: the client may send its body (RFC 9110 §15.2.1)."""
        self._write(self._head_frames(stream_id, (_STATUS[100],)))

    def _head_frames(self, stream_id: int, fields: Iterable[tuple[bytes, bytes]], flags: int = 0) -> bytes:
        return head_frames(self.encoder.encode(fields), stream_id, self.max_frame_bytes, flags)

    def send_data(self, stream_id: int, data: bytes) -> int:
        """Append to the body, for take_data and as the peer's windows let it. Returns num_unsent.

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
        self, stream_id: int, text_frame: TextFrame, send: Callable[[bytes], None], call_flush: Callable[[], bool]
    ) -> TextWriter:
        """The hot path: send_data of one stream for texts, each framed at once if it is a piece. The head is sent.

        Args:
            send: takes other texts: long ones, those without a window or after the body's end, and those that must wait
                for other streams.
            call_flush: called before the first piece since take_data, to schedule the next. False: not soon.
        """
        stream, pieces, (head, encoded, tail) = self.streams[stream_id], self._pieces, text_frame
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
        """End the body.

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
        """DATA frames and trailers, as the windows let them: one frame of each stream in turn.

        Args:
            limit_bytes: no frame begins beyond it.
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

    def write_pieces(self) -> None:
        """Send the pieces ahead of any other frame from now on."""
        frames: list[bytes] = []
        self._take_pieces(frames)
        self._write(b"".join(frames))

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
        """Append one DATA frame, as large as the windows and the frame size allow, and trailers behind the last.

        Returns their bytes; 0: none. RFC 9113 §6.9.1: an empty frame that ends the stream needs no window.
        """
        data = stream.data
        size = max(0, min(len(data), self.window, stream.window, self.max_frame_bytes))
        is_last = stream.is_ending and size == len(data)
        if not size and not is_last:
            return 0
        frames: list[bytes] = []
        if size or not stream.trailers:
            flags = END_STREAM if is_last and not stream.trailers else 0
            frames.append(frame(DATA, bytes(data[:size]), flags, stream.id))
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
