"""HTTP/2 without I/O: bytes to events, response heads and bodies to bytes. Thread: loop.

Raw frames pass the gate of frame_gate, then h2 understands them; heads are judged by http2_head, DATA is framed by
http2_data, GOAWAY is written by hand. Of streams that have ended nothing is kept here; h2 keeps how they ended.
"""

from collections.abc import Callable
from dataclasses import dataclass

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.stream import H2Stream
from hpack import HeaderTuple, NeverIndexedHeaderTuple

from server.connection_limits import Http2Limits
from server.frame_gate import FRAME_HEADER, GOAWAY, HEADER_BYTES, RST_STREAM, FrameGate
from server.h2_connection import clamp_encoder, code_of, new_h2_connection
from server.http1_prefilter import HeadLimits, HeadRefused
from server.http2_data import OutgoingBody, h2_is_as_known, last_frame, next_frame
from server.http2_head import Malformed, check_trailers, content_length, read_request
from server.messages import (
    BodyChunk,
    BodyEnd,
    Event,
    Headers,
    HttpRequest,
    ProtocolViolation,
    ResponseHead,
    StreamReset,
)
from server.response_fields import ResponseError, check_fields

MAX_STREAM_ID = 2**31 - 1
DRAIN_PING = b"steploop"

# Their values differ from answer to answer: in the peer's table they would only push out the others
_NEVER_INDEXED = frozenset((b"x-request-id", b"server-timing", b"content-length"))


class _Stream:
    """The response of one stream, and what is still to come of its request."""

    __slots__ = (
        "awaited",
        "body",
        "h2",
        "has_read_request",
        "is_head_request",
        "is_head_sent",
        "remaining",
        "sends_body",
        "trailers",
    )

    def __init__(self, stream: H2Stream, is_head_request: bool, has_read_request: bool) -> None:
        self.h2 = stream
        self.awaited: int | None = None  # bytes of a request's body that were declared, and have not come
        self.body = OutgoingBody()
        self.is_head_request = is_head_request
        self.has_read_request = has_read_request
        self.is_head_sent = False
        self.sends_body = True
        self.trailers: Headers = ()
        self.remaining: int | None = None  # of a counted body, not yet given to send_data


@dataclass(slots=True)
class DataOutput:
    """What take_data gives.

    Args:
        sent: ids of the streams whose frames these are; an id may be there twice.
        held: ids of those that have bytes, but no window.
        has_more: the limit has cut it short.
    """

    frames: list[bytes]
    sent: list[int]
    held: list[int]
    has_more: bool


class Http2Protocol:
    """One connection's protocol. What is to be written is taken with take_control, then take_data.

    Attributes:
        has_failed: the connection ends with the GOAWAY that take_control gives; no event comes any more.
        num_requests: whose heads have been taken.
    """

    def __init__(
        self, head: HeadLimits, limits: Http2Limits, date: Callable[[], bytes], upgrade: bytes | None = None
    ) -> None:
        """
        Args:
            upgrade: the HTTP2-Settings field of the HTTP/1.1 request that asked for HTTP/2 (`upgrade_settings`); it has
                been read to its end and becomes stream 1, by `adopt`.

        Raises:
            h2.exceptions.ProtocolError: a setting in it has a value that it cannot have.
        """
        self.has_failed = False
        self.num_requests = 0
        self._head_limits = head
        self._limits = limits
        self._date = date
        self._gate = FrameGate(limits.frames, highest_stream_id=0 if upgrade is None else 1)
        self._by_hand = h2_is_as_known()
        self._streams: dict[int, _Stream] = {}
        self._ready: dict[int, _Stream] = {}  # may have something to send, in their turn
        self._out: list[bytes] = []
        self._num_refused = 0
        self._last_stream_id = 0  # whose request was taken
        self._is_draining = False
        self._goaway_id = MAX_STREAM_ID  # above which streams are refused
        self._now = 0.0
        self._h2, opening = new_h2_connection(head, limits, upgrade)
        self._out.append(opening)

    @property
    def has_output(self) -> bool:
        """take_control or take_data may have something."""
        return bool(self._out or self._ready)

    @property
    def num_streams(self) -> int:
        """Whose responses have not been sent to their end."""
        return len(self._streams)

    @property
    def pending_head(self) -> int | None:
        """The preface (0), or a request's head (from 1), that has begun and is not complete."""
        return self._gate.pending_head

    @property
    def has_peer_left(self) -> bool:
        """The client sent a GOAWAY that is an error: it wants no answer any more."""
        return bool(self._gate.goaway_code)

    def num_unsent(self, stream_id: int) -> int:
        """Bytes of the stream's body that take_data has not given; 0 when it is gone."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.body.num_unsent

    def is_open(self, stream_id: int) -> bool:
        """Its response can be sent: no later frame, perhaps of the same read, has ended it."""
        return stream_id in self._streams

    def adopt(self, request: HttpRequest) -> None:
        """The request that came by HTTP/1.1 is answered here."""
        assert request.stream_id == 1
        clamp_encoder(self._h2)
        self._streams[1] = _Stream(self._h2.streams[1], request.method == "HEAD", has_read_request=True)
        self._last_stream_id = self.num_requests = 1

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What the bytes mean. Of those with which the connection fails, nothing is told.

        Args:
            now: in seconds, never less than before.
        """
        if self.has_failed:
            return []
        self._now = now
        events: list[Event] = []
        passed = self._gate.receive(data, now)
        try:
            for event in self._h2.receive_data(passed):
                self._take_event(event, events)
        except ProtocolError as error:
            self._collect()
            self.fail(code_of(error))
            return []
        for fault in self._gate.faults:
            self._end_malformed(fault.stream_id, events, fault.code)
        self._gate.faults.clear()
        clamp_encoder(self._h2, self._gate.least_table_size)
        self._gate.least_table_size = None
        self._collect()
        if self._gate.refusal is not None:
            self.fail(self._gate.refusal.code)
            return []
        return events

    def fail(self, code: ErrorCodes) -> None:
        """End the connection, and all its streams."""
        self.has_failed = True
        self._streams.clear()
        self._ready.clear()
        self._write_goaway(self._last_stream_id, code)

    def _collect(self, ours: int = 0) -> None:
        """Take what h2 has to say, and count the resets in it: they are the peer's doing.

        Args:
            ours: the stream whose reset is not.
        """
        data = self._h2.data_to_send()
        if not data:
            return
        self._out.append(data)
        position = 0
        while position < len(data):
            high, low, kind, _, stream_id = FRAME_HEADER.unpack_from(data, position)
            if kind == RST_STREAM and stream_id != ours:
                self._gate.count_reset(self._now)
            position += HEADER_BYTES + (high << 16 | low)

    # What h2 says.

    def _take_event(self, event: h2.events.Event, events: list[Event]) -> None:
        if isinstance(event, h2.events.DataReceived):
            self._take_data(event, events)
        elif isinstance(event, h2.events.RequestReceived):
            self._take_request(event, events)
        elif isinstance(event, h2.events.StreamEnded):
            self._end_request(event.stream_id, events)
        elif isinstance(event, h2.events.StreamReset):
            self._forget(event.stream_id, events)
        elif isinstance(event, h2.events.WindowUpdated):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                self._ready[event.stream_id] = stream
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self._ready.update(self._streams)
        elif isinstance(event, h2.events.TrailersReceived):
            self._take_trailers(event, events)
        elif isinstance(event, h2.events.PingAckReceived) and event.ping_data == DRAIN_PING:
            self.finish_drain()

    def _take_request(self, event: h2.events.RequestReceived, events: list[Event]) -> None:
        stream_id = event.stream_id
        assert stream_id is not None
        h2_stream = self._h2.streams.get(stream_id)
        if h2_stream is None or h2_stream.closed:
            return  # it was reset by a later frame of the same read
        if len(self._streams) >= self._limits.num_streams or stream_id > self._goaway_id:
            self._refuse(stream_id)
            return
        self._num_refused = 0
        has_body = event.stream_ended is None
        fields = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        stream = _Stream(h2_stream, (b":method", b"HEAD") in fields, not has_body)
        try:
            request = read_request(stream_id, fields, has_body, self._head_limits)
            stream.awaited = content_length(request.headers)
        except Malformed:
            self._end_malformed(stream_id, events)
            return
        except HeadRefused as refusal:
            events.append(ProtocolViolation(stream_id, refusal.status, refusal.message))
        else:
            events.append(request)
        self._streams[stream_id] = stream
        self._last_stream_id = stream_id
        self.num_requests += 1

    def _refuse(self, stream_id: int) -> None:
        """RFC 9113 §5.1.2 and §8.7: nothing has been done with it, and it may be tried again."""
        self.reset(stream_id, ErrorCodes.REFUSED_STREAM)
        self._num_refused += 1
        if self._num_refused > self._limits.num_refused and self._gate.refusal is None:
            self._gate.refuse_flood("streams")

    def _take_data(self, event: h2.events.DataReceived, events: list[Event]) -> None:
        assert event.stream_id is not None
        data = event.data or b""
        padding = (event.flow_controlled_length or 0) - len(data)
        stream = self._streams.get(event.stream_id)
        if stream is not None and stream.awaited is not None:
            stream.awaited -= len(data)
            if stream.awaited < 0:
                self._end_malformed(event.stream_id, events)
                stream = None
        if stream is None:
            padding += len(data)
        elif data:
            events.append(BodyChunk(event.stream_id, data))
        if padding:
            self.acknowledge(event.stream_id, padding)

    def _end_request(self, stream_id: int, events: list[Event]) -> None:
        stream = self._streams.get(stream_id)
        if stream is None or stream.has_read_request:
            return
        stream.has_read_request = True
        if stream.awaited:
            self._end_malformed(stream_id, events)
        else:
            events.append(BodyEnd(stream_id))

    def _take_trailers(self, event: h2.events.TrailersReceived, events: list[Event]) -> None:
        assert event.stream_id is not None
        try:
            check_trailers((bytes(name), bytes(value)) for name, value in event.headers or ())
        except Malformed:
            self._end_malformed(event.stream_id, events)

    def _end_malformed(self, stream_id: int, events: list[Event], code: ErrorCodes = ErrorCodes.PROTOCOL_ERROR) -> None:
        """RFC 9113 §8.1.1: the stream is at fault, and it alone."""
        self._forget(stream_id, events)
        self.reset(stream_id, code, is_their_fault=True)

    def _forget(self, stream_id: int | None, events: list[Event]) -> None:
        assert stream_id is not None
        if self._streams.pop(stream_id, None) is not None:
            self._ready.pop(stream_id, None)
            events.append(StreamReset(stream_id))

    # What the connection says.

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """So much of the stream's body has been read: the peer may send as much again."""
        if not self.has_failed:
            self._h2.acknowledge_received_data(num_bytes, stream_id)
            self._collect()

    def reset(self, stream_id: int, code: ErrorCodes, is_their_fault: bool = False) -> None:
        """End the stream, both ways. What is unsent is lost."""
        self._streams.pop(stream_id, None)
        self._ready.pop(stream_id, None)
        stream = self._h2.streams.get(stream_id)
        if self.has_failed or stream is None or stream.closed:
            return
        self._h2.reset_stream(stream_id, code)
        self._collect(0 if is_their_fault else stream_id)

    def send_head(self, stream_id: int, head: ResponseHead) -> None:
        """Send the head. A status below 200 is informational, and the head is still to come.

        Raises:
            ResponseError: fields that are not the application's to send, or a head already sent.
        """
        stream = self._streams[stream_id]
        if stream.is_head_sent or head.status == 101 or head.status < 100:
            raise ResponseError(f"A head with status {head.status} cannot be sent here and now.")
        length = check_fields(head)
        is_final = head.status >= 200
        stream.is_head_sent = is_final
        stream.sends_body = not (is_final and (stream.is_head_request or head.status in (204, 304)))
        stream.remaining = length if stream.sends_body else None
        fields = [HeaderTuple(b":status", b"%d" % head.status)]
        if is_final:
            fields.append(HeaderTuple(b"date", self._date()))
        # RFC 9113 §8.2.2: no connection-specific fields
        fields += [
            NeverIndexedHeaderTuple(*pair) if pair[0] in _NEVER_INDEXED else HeaderTuple(*pair)
            for pair in head.headers
            if pair[0] != b"connection"
        ]
        self._h2.send_headers(stream_id, fields)
        self._collect()

    def send_data(self, stream_id: int, data: bytes) -> int:
        """The body's next bytes; they wait for take_data, and for the peer's windows. Returns num_unsent.

        Raises:
            ResponseError: before the head, after the end, or beyond the content-length.
        """
        stream = self._streams[stream_id]
        body = stream.body
        if not stream.is_head_sent or body.is_ending:
            raise ResponseError("A body is sent after its head and before its end.")
        if data and stream.sends_body:
            if stream.remaining is not None:
                stream.remaining -= len(data)
                if stream.remaining < 0:
                    raise ResponseError("The body is longer than its content-length.")
            body.append(data)
            self._ready[stream_id] = stream
        return body.num_unsent

    def send_end(self, stream_id: int, trailers: Headers = ()) -> None:
        """Nothing follows in this body but the trailers.

        Raises:
            ResponseError: before the head, twice, or short of the content-length; trailers that cannot be sent.
        """
        stream = self._streams[stream_id]
        if not stream.is_head_sent or stream.body.is_ending:
            raise ResponseError("A response ends once, after its head.")
        if stream.remaining:
            raise ResponseError(f"The body is {stream.remaining} bytes shorter than its content-length.")
        if check_fields(ResponseHead(200, trailers)) is not None:
            raise ResponseError("A content-length comes too late in the trailers.")
        stream.trailers = trailers if stream.sends_body else ()
        stream.body.is_ending = True
        self._ready[stream_id] = stream

    # Drain.

    def start_drain(self) -> None:
        """Tell the client to open no more streams, and find out when it has heard (RFC 9113 §6.8). Idempotent."""
        if self._is_draining or self.has_failed:
            return
        self._is_draining = True
        self._write_goaway(MAX_STREAM_ID, ErrorCodes.NO_ERROR)
        self._h2.ping(DRAIN_PING)
        self._collect()

    def finish_drain(self) -> None:
        """Streams above the last one taken are refused from now on. Idempotent."""
        if self._is_draining and self._goaway_id == MAX_STREAM_ID and not self.has_failed:
            self._goaway_id = self._last_stream_id
            self._write_goaway(self._goaway_id, ErrorCodes.NO_ERROR)

    @property
    def has_drained(self) -> bool:
        """The last GOAWAY is written, and no stream is left."""
        return self._goaway_id != MAX_STREAM_ID and not self._streams

    def _write_goaway(self, last_stream_id: int, code: ErrorCodes) -> None:
        """By hand: h2 would let nothing follow it."""
        payload = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
        self._out.append(FRAME_HEADER.pack(0, len(payload), GOAWAY, 0, 0) + payload)

    # What goes out.

    def take_control(self) -> list[bytes]:
        """What is to be written before any DATA: heads, answers to the peer's frames."""
        out, self._out = self._out, []
        return out

    def take_data(self, limit_bytes: int) -> DataOutput:
        """DATA frames of all streams that have some and whose windows let them, one frame each in turn.

        Args:
            limit_bytes: no further frame begins past it.
        """
        output = DataOutput([], [], [], False)
        shut_out: dict[int, _Stream] = {}  # by the connection's window: their turn is kept
        num_bytes = 0
        while self._ready and num_bytes < limit_bytes:
            turn, self._ready = self._ready, {}
            waiting: dict[int, _Stream] = {}
            for stream_id, stream in turn.items():
                if num_bytes >= limit_bytes:
                    waiting[stream_id] = stream
                    continue
                body = stream.body
                if body.is_ending:
                    frame = self._ending_frame(stream_id, stream)
                else:
                    frame = next_frame(self._h2, stream.h2, body, self._by_hand)
                    if frame and body.num_unsent:
                        self._ready[stream_id] = stream
                if frame:
                    num_bytes += len(frame)
                    output.frames.append(frame)
                    output.sent.append(stream_id)
                elif body.num_unsent:
                    output.held.append(stream_id)
                    if stream.h2.outbound_flow_control_window > 0:
                        shut_out[stream_id] = stream
            if waiting:
                self._ready = waiting | self._ready
        output.has_more = bool(self._ready)
        self._ready.update(shut_out)
        self._gate.count_content(num_bytes)
        return output

    def _ending_frame(self, stream_id: int, stream: _Stream) -> bytes:
        """Of a body to which nothing will be added: the last frame, or, where that has to wait, one more before it."""
        body = stream.body
        if not stream.trailers:
            frame = last_frame(self._h2, stream.h2, body)
        else:
            frame = b"" if body.num_unsent else self._trailers(stream_id, stream)
        if frame:
            return frame + self._forget_ended(stream_id, stream)
        frame = next_frame(self._h2, stream.h2, body, self._by_hand)
        if frame:
            self._ready[stream_id] = stream
        return frame

    def _trailers(self, stream_id: int, stream: _Stream) -> bytes:
        fields = [NeverIndexedHeaderTuple(*pair) for pair in stream.trailers]
        self._h2.send_headers(stream_id, fields, end_stream=True)
        return self._h2.data_to_send()

    def _forget_ended(self, stream_id: int, stream: _Stream) -> bytes:
        """A request that has not been read to its end is broken off (RFC 9113 §8.1)."""
        del self._streams[stream_id]
        if stream.has_read_request:
            return b""
        self._h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)
        return self._h2.data_to_send()
