"""The responses of an HTTP/2 connection: heads and bodies to bytes, all streams in their turn. Thread: loop. Sans-io.

Heads and DATA are framed by http2_data, trailers by h2. Of streams that have ended nothing is kept here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from h2.connection import H2Connection
from h2.stream import H2Stream

from server.wire.http2_data import OutgoingBody, Pieces, frame_head, frame_next, h2_is_as_known, last_frame
from server.wire.messages import Headers, ResponseHead, TextFrame, TextWriter
from server.wire.response_fields import ResponseError, check_fields

PIECES_BYTES = 64 * 1024  # of all streams, in one take_data
_STATUS = {status.value: (b":status", b"%d" % status.value) for status in HTTPStatus}


class Http2Stream(OutgoingBody):
    """One stream: its response, and what is still to come of its request.

    Attributes:
        awaited: bytes of the request's body that were declared, and have not come.
        head_bytes: that the request's head weighs.
        has_read_request: nothing of it is still to come.
        remaining: of a counted body, not yet given to send_data.
    """

    __slots__ = (
        "awaited",
        "has_read_request",
        "head_bytes",
        "is_head_request",
        "is_head_sent",
        "remaining",
        "sends_body",
        "trailers",
    )

    def __init__(self, stream: H2Stream, is_head_request: bool, has_read_request: bool) -> None:
        super().__init__(stream)
        self.awaited: int | None = None
        self.head_bytes = 0
        self.is_head_request = is_head_request
        self.has_read_request = has_read_request
        self.is_head_sent = False
        self.sends_body = True
        self.trailers: Headers = ()
        self.remaining: int | None = None


@dataclass(slots=True)
class DataOutput:
    """What take_data gives.

    Args:
        sent: ids of the streams whose frames these are, but for pieces; an id may be there twice.
        held: ids of those that have bytes, but no window.
        num_bytes: of the frames.
        has_more: the limit has cut it short.
    """

    frames: list[bytes]
    sent: list[int]
    held: list[int]
    num_bytes: int
    has_more: bool


class Responses:
    """The open streams of one connection, and what is to be sent on them.

    Attributes:
        streams: whose responses have not been sent to their end, by id; http2 opens and forgets them.
        awaits_flush: take_data is going to be called. Its caller sets and clears it.
        early: streams that take_data has ended before their requests; to be taken by its caller.
    """

    def __init__(self, connection: H2Connection, write: Callable[[bytes], None], date: Callable[[], bytes]) -> None:
        """
        Args:
            write: takes what goes out ahead of any DATA.
        """
        self.streams: dict[int, Http2Stream] = {}
        self._h2 = connection
        self._write = write
        self._date = date
        self._by_hand = h2_is_as_known()
        self.awaits_flush = False
        self.early: list[int] = []
        self._ready: dict[int, Http2Stream] = {}  # may have something to send, in their turn
        self._has_left = False  # take_data has, some of these: their turn is before any piece's
        self._pieces = Pieces(connection, PIECES_BYTES)

    @property
    def has_some(self) -> bool:
        """take_data may have something."""
        return bool(self._ready or self._pieces.frames)

    def num_unsent(self, stream_id: int) -> int:
        """Bytes of the stream's body that take_data has not given; 0 when it is gone."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else stream.num_unsent

    def is_written(self, stream_id: int) -> bool:
        """All that was sent so far has been taken, with the end of a response that has ended."""
        stream = self.streams.get(stream_id)
        return stream is None or not (stream.num_unsent or stream.is_ending)

    def num_partly_sent(self, stream_id: int) -> int:
        """Bytes of the stream's body that went while more was there: how far a peer is that never takes all."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else stream.num_partly_sent

    def num_unsent_ending(self) -> int:
        """Bytes unsent of all bodies to which nothing will be added."""
        return sum(stream.num_unsent for stream in self.streams.values() if stream.is_ending)

    def wake(self, stream_id: int) -> None:
        """Its window may have opened."""
        stream = self.streams.get(stream_id)
        if stream is not None and (stream.num_unsent or stream.is_ending):
            self._ready[stream_id] = stream

    def wake_all(self) -> None:
        """Any window may have opened."""
        for stream_id in self.streams:
            self.wake(stream_id)

    def forget(self, stream_id: int) -> bool:
        """Send nothing more of it. Returns whether there was something to be sent."""
        self._ready.pop(stream_id, None)
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.takes_pieces = False
            self._pieces.forget(stream)
        return stream is not None

    def clear(self) -> None:
        """Forget them all."""
        for stream_id in tuple(self.streams):
            self.forget(stream_id)

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
        stream.sends_body = not (is_final and (stream.is_head_request or head.status in (204, 304)))
        stream.remaining = length if stream.sends_body else None
        stream.takes_pieces = is_final and stream.sends_body and length is None
        fields = [_STATUS.get(head.status) or (b":status", b"%d" % head.status)]
        if is_final:
            fields.append((b"date", self._date()))
        # RFC 9113 §8.2.2: no connection-specific fields
        fields += [field for field in head.headers if field[0] != b"connection"]
        if self._by_hand:
            self._write(frame_head(self._h2, stream.h2, fields, is_final))
        else:
            self._h2.send_headers(stream_id, fields)
            self._write(self._h2.data_to_send())

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
            if stream.num_unsent:
                stream.append(data)
            else:  # mostly: without a call for each token
                stream.data = data
                stream.num_unsent = len(data)
            self._ready[stream_id] = stream
        return stream.num_unsent

    def text_writer(
        self, stream_id: int, frame: TextFrame, send: Callable[[bytes], None], call_flush: Callable[[], bool]
    ) -> TextWriter:
        """send_data of one stream for texts, which are small pieces, one call each; its head has been sent.

        Args:
            send: takes what is no such piece, and data beyond the body's end.
            call_flush: makes that take_data is called. False: not soon.
        """
        if not self._by_hand:
            return lambda text: send(frame.around(text))

        def begin() -> bool:
            return call_flush() and not self._has_left

        return self._pieces.writer(self.streams[stream_id], frame, send, begin)

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
        """DATA frames of all streams that have some and whose windows let them, one frame each in turn.

        Args:
            limit_bytes: no further frame begins past it.
        """
        output = DataOutput([], [], [], 0, False)
        frames, sent, connection, by_hand = output.frames, output.sent, self._h2, self._by_hand
        shut_out: dict[int, Http2Stream] = {}  # by the connection's window: their turn is kept
        num_bytes = self._pieces.take(frames)
        while self._ready and num_bytes < limit_bytes:
            turn = iter(self._ready.items())
            self._ready = {}
            for stream_id, stream in turn:
                if stream.is_ending:
                    size = self._frame_ending(stream_id, stream, frames)
                else:
                    size = frame_next(connection, stream, frames, by_hand)
                    if size and stream.num_unsent:
                        self._ready[stream_id] = stream
                if size:
                    sent.append(stream_id)
                    num_bytes += size
                    if num_bytes >= limit_bytes:
                        self._ready = dict(turn) | self._ready
                        break
                elif stream.num_unsent:
                    output.held.append(stream_id)
                    if stream.h2.outbound_flow_control_window > 0:
                        shut_out[stream_id] = stream
        output.num_bytes = num_bytes
        output.has_more = bool(self._ready)
        self._ready.update(shut_out)
        self._has_left = bool(self._ready)
        return output

    def _frame_ending(self, stream_id: int, stream: Http2Stream, frames: list[bytes]) -> int:
        """Of a body to which nothing will be added: the last frame, or, where that has to wait, one more before it."""
        if not stream.trailers:
            last = last_frame(self._h2, stream, self._by_hand)
        else:
            last = b"" if stream.num_unsent else self._trailers(stream_id, stream)
        if last:
            del self.streams[stream_id]
            if not stream.has_read_request:
                self.early.append(stream_id)
            frames.append(last)
            return len(last)
        size = frame_next(self._h2, stream, frames, self._by_hand)
        if size:
            self._ready[stream_id] = stream
        return size

    def _trailers(self, stream_id: int, stream: Http2Stream) -> bytes:
        self._h2.send_headers(stream_id, stream.trailers, end_stream=True)
        return self._h2.data_to_send()
