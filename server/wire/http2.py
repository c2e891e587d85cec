"""HTTP/2 without I/O: bytes to events, and the connection's own frames. Thread: loop.

Raw frames pass the gate of frame_gate, then h2 understands them; heads are judged by http2_head, responses are
http2_response's, GOAWAY is written by hand. Of streams that have ended nothing is kept here; h2 keeps how they ended.
"""

import sys
from collections.abc import Callable

import h2.events
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError

from server.wire.connection_limits import Http2Limits
from server.wire.frame_gate import FRAME_HEADER, GOAWAY, HEADER_BYTES, RST_STREAM, FrameGate
from server.wire.h2_connection import clamp_encoder, code_of, new_h2_connection
from server.wire.http1_prefilter import HeadLimits, HeadRefused
from server.wire.http2_head import Malformed, check_trailers, content_length, read_request
from server.wire.http2_response import DataOutput, Http2Stream, Responses
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    Event,
    HttpRequest,
    ProtocolViolation,
    StreamReset,
)

MAX_STREAM_ID = 2**31 - 1
DRAIN_PING = b"steploop"
_FIELD_BYTES = 100  # that a field takes, beside its name and value, which the table may have as well


class Http2Protocol:
    """One connection's protocol. What is to be written is taken with take_control, then take_data.

    Attributes:
        has_failed: the connection ends with the GOAWAY that take_control gives; no event comes any more.
        failed_with: the code of that GOAWAY.
        num_requests: whose heads have been taken.
        responses: of the open streams.
        early: streams whose answers have ended before their requests, oldest first, and how much may still come.
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
            frames_at_once: that one call of receive understands.
            upgrade: the HTTP2-Settings field of the HTTP/1.1 request that asked for HTTP/2 (`upgrade_settings`); it has
                been read to its end and becomes stream 1, by `adopt`.

        Raises:
            h2.exceptions.ProtocolError: a setting in it has a value that it cannot have.
        """
        self.has_failed = False
        self.failed_with = ErrorCodes.NO_ERROR
        self.num_requests = 0
        self._head_limits = head
        self._limits = limits
        self._gate = FrameGate(limits.frames, 0 if upgrade is None else 1, frames_at_once)
        self._out: list[bytes] = []
        self._num_refused = 0
        self._head_bytes = 0  # of open streams; those of some that have ended may be among them
        self._last_stream_id = 0  # whose request was taken
        self._is_draining = False
        self._goaway_id = MAX_STREAM_ID  # above which streams are refused
        self._now = 0.0
        self._h2, opening = new_h2_connection(head, limits, upgrade)
        self._out.append(opening)
        self.responses = Responses(self._h2, self._out.append, date)
        self._streams = self.responses.streams
        self.early: dict[int, int] = {}

    @property
    def has_output(self) -> bool:
        """take_control or take_data may have something."""
        return bool(self._out) or self.responses.has_some

    @property
    def has_more(self) -> bool:
        """receive has understood as much at once as it may: receive(b"", now) goes on."""
        return self._gate.has_more and not self.has_failed

    @property
    def pending_head(self) -> int | None:
        """The preface (0), or a request's head (from 1), that has begun and is not complete."""
        return self._gate.pending_head

    @property
    def has_peer_left(self) -> bool:
        """The client sent a GOAWAY that is an error: it wants no answer any more."""
        return bool(self._gate.goaway_code)

    def is_open(self, stream_id: int) -> bool:
        """Its response can be sent: no later frame, perhaps of the same read, has ended it."""
        return stream_id in self._streams

    def adopt(self, request: HttpRequest) -> None:
        """The request that came by HTTP/1.1 is answered here."""
        assert request.stream_id == 1
        clamp_encoder(self._h2)
        self._streams[1] = Http2Stream(self._h2.streams[1], request.method == "HEAD", has_read_request=True)
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
        self._gate.block_bytes.clear()
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
        self.failed_with = code
        self.responses.clear()
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
            self.responses.wake(event.stream_id)
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self.responses.wake_all()
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
        fields = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        num_bytes = _weight(fields, self._gate.block_bytes.get(stream_id, 0))
        has_room = len(self._streams) + len(self.early) < self._limits.num_streams and self._has_room_for(num_bytes)
        if not has_room or stream_id > self._goaway_id:
            self._refuse(stream_id)
            events.append(StreamReset(stream_id, ErrorCodes.REFUSED_STREAM))
            return
        self._num_refused = 0
        has_body = event.stream_ended is None
        stream = Http2Stream(h2_stream, (b":method", b"HEAD") in fields, not has_body)
        try:
            request = read_request(stream_id, fields, has_body, self._head_limits)
            stream.awaited = content_length(request.headers)
        except Malformed:
            self.reset(stream_id, ErrorCodes.PROTOCOL_ERROR, is_their_fault=True)
            events.append(StreamReset(stream_id, ErrorCodes.PROTOCOL_ERROR))
            return
        except HeadRefused as refusal:
            events.append(ProtocolViolation(stream_id, refusal.status, refusal.message))
        else:
            events.append(request)
        stream.head_bytes = num_bytes
        self._head_bytes += num_bytes
        self._streams[stream_id] = stream
        self._last_stream_id = stream_id
        self.num_requests += 1

    def _has_room_for(self, num_bytes: int) -> bool:
        """The open streams' heads leave room for one more, of this weight."""
        if self._head_bytes + num_bytes > self._limits.heads_bytes:  # those that have ended are in it, perhaps
            self._head_bytes = sum(stream.head_bytes for stream in self._streams.values())
        return not self._streams or self._head_bytes + num_bytes <= self._limits.heads_bytes

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
            self._pass_over(event.stream_id, len(data))
        elif data:
            events.append(BodyChunk(event.stream_id, data))
        if padding:
            self.acknowledge(event.stream_id, padding)

    def _end_request(self, stream_id: int, events: list[Event]) -> None:
        self.early.pop(stream_id, None)
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
        self._forget(stream_id, events, code)
        self.reset(stream_id, code, is_their_fault=True)

    def _forget(self, stream_id: int | None, events: list[Event], refused_with: ErrorCodes | None = None) -> None:
        assert stream_id is not None
        self.early.pop(stream_id, None)
        if self.responses.forget(stream_id):
            events.append(StreamReset(stream_id, refused_with))

    # What the connection says.

    def acknowledge(self, stream_id: int, num_bytes: int) -> None:
        """So much of the stream's body has been read: the peer may send as much again."""
        if not self.has_failed:
            self._h2.acknowledge_received_data(num_bytes, stream_id)
            self._collect()

    def acknowledge_aside(self, num_bytes: int) -> None:
        """As acknowledge, for the other streams alone: this one's window stays shut until reopen."""
        if not self.has_failed:
            self._h2.increment_flow_control_window(num_bytes)
            self._collect()

    def reopen(self, stream_id: int, num_bytes: int) -> None:
        """Let the stream send so much again that was acknowledged aside."""
        stream = self._h2.streams.get(stream_id)
        if not self.has_failed and stream is not None and not stream.closed:
            self._h2.increment_flow_control_window(num_bytes, stream_id)
            self._collect()

    def may_send(self, stream_id: int) -> bool:
        """The windows let the peer send more of the open stream's body."""
        return self._h2.remote_flow_control_window(stream_id) > 0

    def reset(self, stream_id: int, code: ErrorCodes, is_their_fault: bool = False) -> None:
        """End the stream, both ways. What is unsent is lost."""
        self.responses.forget(stream_id)
        stream = self._h2.streams.get(stream_id)
        if self.has_failed or stream is None or stream.closed:
            return
        self._h2.reset_stream(stream_id, code)
        self._collect(0 if is_their_fault else stream_id)

    # Requests that are answered before their end. RFC 9113 §8.1: RST_STREAM with NO_ERROR may tell that no more of them
    # is wanted. But clients that are busy sending (curl 7.88, httpx) take it for their stream's end, without an answer.

    def _pass_over(self, stream_id: int, num_bytes: int) -> None:
        left = self.early.get(stream_id, num_bytes) - num_bytes
        if left < 0:
            self.break_off(stream_id)
        elif stream_id in self.early:
            self.early[stream_id] = left

    def break_off(self, stream_id: int) -> None:
        """It has been given its time. Idempotent."""
        if self.early.pop(stream_id, None) is not None:
            self.reset(stream_id, ErrorCodes.NO_ERROR)

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
        out = self._out.copy()
        self._out.clear()
        return out

    def take_data(self, limit_bytes: int) -> DataOutput:
        """See Responses.take_data: what it gives is the content that the peer may acknowledge."""
        output = self.responses.take_data(limit_bytes)
        self._gate.count_content(output.num_bytes)
        if self.responses.early:
            self.early |= dict.fromkeys(self.responses.early, self._limits.early_bytes)
            self.responses.early.clear()
        return output


def _weight(fields: list[tuple[bytes, bytes]], num_block_bytes: int) -> int:
    """Bytes that a request's head makes us hold: the table's are shared, the path is decoded anew for each."""
    num_path_bytes = sum(len(value) for name, value in fields if name == b":path")
    return _FIELD_BYTES * len(fields) + num_block_bytes + num_path_bytes
