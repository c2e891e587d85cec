"""HTTP/2 without I/O, the server's side (RFC 9113): bytes to events, and answers to bytes. Thread: loop.

Frames come from server/wire/http2_reading.py, and are judged by their streams' states in the table `_VERDICTS`. Time is
an argument. Verdicts and events are the same however the input is split into reads. Priorities are ignored; nothing is
pushed.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from server.wire.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    LEAST_FRAME_BYTES,
    MAX_FRAME,
    MAX_LIST,
    MAX_STREAM_ID,
    MAX_STREAMS,
    MAX_WINDOW,
    PING,
    PREFACE,
    PRIORITY,
    PRIORITY_BYTES,
    RST_STREAM,
    SETTINGS,
    UNRESERVED,
    WINDOW_UPDATE,
    Header,
    depends_on,
    read_settings,
    settings_frame,
    unpadded,
    window_update,
)
from server.wire.http2_heads import Fields, Malformed, check_trailers, content_length, read_request
from server.wire.http2_reading import FrameReader
from server.wire.http2_streams import DataOutput, Http2Stream, ReceiveWindow, Responses
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    ConnectionFault,
    Event,
    HeadRefused,
    Http2ErrorCode,
    HttpRequest,
    ProtocolViolation,
    StreamReset,
)

DRAIN_PING = b"steploop"

_NUM_CLOSED_KEPT = 1024  # streams whose end is remembered
_FIELD_BYTES = 100  # of memory for a field, beside its name and value, which HPACK's table may share


class _Verdict(NamedTuple):
    """What happens to a frame; `code` where its stream or the connection ends."""

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
#     IDLE, SERVERS, OPEN, HALF_CLOSED_LOCAL, HALF_CLOSED_REMOTE, ENDED, RESET_BY_PEER, RESET_BY_US, CLOSED
_VERDICTS = {
    HEADERS: (_TAKEN, _ENDS, _TAKEN, _TAKEN, _RESETS, _ENDS_CLOSED, _RESETS, _IGNORED, _ENDS),
    DATA: (_ENDS, _ENDS, _TAKEN, _TAKEN, _RESETS, _RESETS, _RESETS, _IGNORED, _RESETS),
    RST_STREAM: (_ENDS, _ENDS, _TAKEN, _TAKEN, _TAKEN, _IGNORED, _IGNORED, _IGNORED, _IGNORED),
    WINDOW_UPDATE: (_ENDS, _ENDS, _TAKEN, _IGNORED, _TAKEN, _IGNORED, _IGNORED, _IGNORED, _IGNORED),
}


class Http2Protocol(FrameReader):
    """One connection's protocol. What is to be written is taken with take_control, then take_data.

    Attributes:
        is_draining: the client has been told to open no more streams.
        has_failed: the connection ends with the GOAWAY that take_control gives; there are no more events.
        failed_with: the code of that GOAWAY.
        num_requests: whose heads have been taken.
        has_more: see FrameReader; receive(b"", now) goes on.
        responses: of the open streams.
        early: streams whose responses have ended before their requests, oldest first. RFC 9113 §8.1 allows RST_STREAM
            with NO_ERROR at once. But clients that are still sending (curl 7.88, httpx) would take it for the end and
            not read the answer; so they may go on for a while.
        has_peer_left: the client has sent a GOAWAY with an error: it wants no more answers.
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
            frames_at_once: that one call of receive parses; a request's head counts as several.
            upgrade: the settings of the HTTP/1.1 request that asked for HTTP/2 (`upgrade_settings`); it is complete and
                becomes stream 1, by `adopt`.

        Raises:
            ConnectionFault: a setting in it has a value that it cannot have.
        """
        frames = limits.frames
        super().__init__(frames, limits.list_bytes, limits.window_bytes, frames_at_once)
        self.has_failed = self.has_peer_left = False
        self.failed_with = Http2ErrorCode.NO_ERROR
        self.num_requests = 0
        self._head_limits = head
        self._limits = limits
        self.responses = Responses(self._out.append, date)
        self._streams = self.responses.streams
        self.early: dict[int, Http2Stream] = {}
        self._closed: dict[int, int] = {}  # the states of streams that were open, the last _NUM_CLOSED_KEPT
        self._highest_stream_id = 0 if upgrade is None else 1  # that has not been idle
        self._last_stream_id = 0  # whose request was taken
        self._head_bytes = 0  # of the open streams
        self._num_refused = 0  # streams in a row
        self.is_draining = False
        self._goaway_id = MAX_STREAM_ID  # above which streams are refused
        self._events: list[Event] = []
        self._has_preface = False
        advertised = {MAX_STREAMS: limits.num_streams, MAX_LIST: head.head_bytes}
        if frames.frame_bytes > LEAST_FRAME_BYTES:
            advertised[MAX_FRAME] = frames.frame_bytes
        self._out.append(settings_frame(advertised))
        self._out.append(window_update(limits.window_bytes - DEFAULT_WINDOW))
        if upgrade is not None:
            self._apply_settings(upgrade)

    @property
    def has_output(self) -> bool:
        """take_control or take_data may have something."""
        return bool(self._out) or self.responses.has_some

    @property
    def pending_head(self) -> int | None:
        """Which head is incomplete: 0 is the preface, requests are counted from 1; None: none."""
        if not self._has_settings:
            return 0
        is_coming = self._header is not None and self._header.kind in (HEADERS, CONTINUATION)
        return self._num_blocks if is_coming or self._block_header is not None else None

    def is_open(self, stream_id: int) -> bool:
        """Its response can be sent: no later frame, perhaps of the same read, has ended it."""
        return stream_id in self._streams

    def adopt(self, request: HttpRequest) -> None:
        """Answer the request that came by HTTP/1.1."""
        assert request.stream_id == 1
        window = self.responses.initial_window
        self._streams[1] = Http2Stream(1, window, request.method != "HEAD", 0, None, has_read_request=True)
        self._last_stream_id = self.num_requests = 1

    def receive(self, data: bytes, now: float) -> list[Event]:
        """The events in the bytes; none of the read with which the connection fails.

        Args:
            now: in seconds, never less than before.
        """
        if self.has_failed:
            return []
        self._now = now
        self._buffer += data
        self._num_left = self._frames_at_once
        self.has_more = False
        try:
            position = 0 if self._has_preface else self._take_preface()
            if self._has_preface:
                self._read_frames(position)
        except ConnectionFault as fault:
            self.fail(fault.code)
        events, self._events = self._events, []
        return events

    def fail(self, code: Http2ErrorCode) -> None:
        """End the connection, and all its streams."""
        self.has_failed = True
        self.has_more = False
        self.failed_with = code
        for stream_id in tuple(self._streams):
            self.responses.forget(stream_id)
        for storage in (self._buffer, self._events, self._block, self.early):
            storage.clear()
        self._write_goaway(self._last_stream_id, code)

    def _take_preface(self) -> int:
        begun = bytes(self._buffer[: len(PREFACE)])
        if not PREFACE.startswith(begun):
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "This is not HTTP/2's connection preface.")
        self._has_preface = begun == PREFACE
        return len(PREFACE) if self._has_preface else 0

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
        self._spend(RST_STREAM)

    def _reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        self._close(stream_id, RESET_BY_US)
        self._write_reset(stream_id, code)

    def _close(self, stream_id: int, state: int) -> None:
        """Forget the stream but for its state."""
        stream = self.responses.forget(stream_id) or self.early.pop(stream_id, None)
        if stream is not None:
            self._head_bytes -= stream.head_bytes
            if stream.receive_window is not None:
                self._give_back(stream.receive_window.num_unread)
        self._closed.pop(stream_id, None)
        self._closed[stream_id] = state
        if len(self._closed) > _NUM_CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]

    # One method for each type of frame.

    def _take_fields(self, begun: Header, fields: Fields) -> None:
        if not self._is_taken(HEADERS, begun.stream_id):
            return
        ends_stream = bool(begun.flags & END_STREAM)
        if begun.stream_id > self._highest_stream_id:
            self._open(begun.stream_id, fields, not ends_stream)
            return
        try:
            if not ends_stream:
                raise Malformed  # RFC 9113 §8.1: trailers end their stream
            if begun.stream_id in self._streams:
                check_trailers(fields)
        except Malformed:
            self._fail_stream(begun.stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        else:
            self._end_request(begun.stream_id)

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
        window = ReceiveWindow(DEFAULT_WINDOW) if has_body else None
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
        """RFC 9113 §5.1.2, §8.7: the client may try again elsewhere."""
        self._reset(stream_id, Http2ErrorCode.REFUSED_STREAM)
        self._events.append(StreamReset(stream_id, Http2ErrorCode.REFUSED_STREAM))
        self._num_refused += 1
        if self._num_refused > self._limits.num_refused:
            raise ConnectionFault(Http2ErrorCode.ENHANCE_YOUR_CALM, "Too many streams.")

    def _take_data(self, header: Header, payload: bytes) -> None:
        length, _, flags, stream_id = header
        data = unpadded(header, payload)
        self._window.take(length)
        if not self._is_taken(DATA, stream_id):
            self._give_back(length)
            return
        is_early = stream_id in self.early
        stream = self.early[stream_id] if is_early else self._streams[stream_id]
        window = stream.receive_window
        assert window is not None
        window.take(length)
        if stream.num_awaited is not None:
            stream.num_awaited -= len(data)
            if stream.num_awaited < 0:
                self._give_back(length)
                if is_early:
                    self.break_off(stream_id)
                else:  # RFC 9113 §8.1.1
                    self._fail_stream(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
                return
        num_kept = 0 if is_early else len(data)
        if num_kept:
            window.num_unread += num_kept
            self._events.append(BodyChunk(stream_id, data))
        self._give_back(length - num_kept, stream)
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

    def _take_priority(self, header: Header, payload: bytes) -> None:
        if header.length != PRIORITY_BYTES:  # RFC 9113 §6.3
            self._find_fault(header.stream_id, Http2ErrorCode.FRAME_SIZE_ERROR)
        elif depends_on(payload) == header.stream_id:  # RFC 7540 §5.3.1
            self._find_fault(header.stream_id, Http2ErrorCode.PROTOCOL_ERROR)

    def _take_reset(self, header: Header, payload: bytes) -> None:
        stream_id = header.stream_id
        if self._is_taken(RST_STREAM, stream_id):
            if stream_id in self._streams:
                self._events.append(StreamReset(stream_id))
            self._close(stream_id, RESET_BY_PEER)

    def _apply_settings(self, payload: bytes) -> None:
        settings, table_sizes = read_settings(payload)
        responses = self.responses
        if table_sizes:
            responses.encoder.resize(table_sizes)
        responses.max_frame_bytes = settings.get(MAX_FRAME, responses.max_frame_bytes)
        growth = settings.get(INITIAL_WINDOW, responses.initial_window) - responses.initial_window
        if growth < 0:
            responses.write_pieces()  # they are within the old windows, and so precede our acknowledgement
        if growth:
            responses.initial_window += growth
            for stream in self._streams.values():
                stream.window += growth
                if stream.window > MAX_WINDOW:  # RFC 9113 §6.9.2
                    raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "A stream's window is too large.")
        responses.wake(self._streams.values())

    def _take_ping(self, header: Header, payload: bytes) -> None:
        super()._take_ping(header, payload)
        if header.flags & ACK and payload == DRAIN_PING:
            self.finish_drain()

    def _take_goaway(self, header: Header, payload: bytes) -> None:
        self.has_peer_left = payload[4:8] != bytes(4)

    def _take_window_update(self, header: Header, payload: bytes) -> None:
        increment, stream_id = int.from_bytes(payload, "big") & UNRESERVED, header.stream_id
        if not stream_id:
            self.responses.window += increment
            if not increment:  # RFC 9113 §6.9
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "The window grows by nothing.")
            if self.responses.window > MAX_WINDOW:  # RFC 9113 §6.9.1
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "The connection's window is too large.")
        elif not increment:
            self._find_fault(stream_id, Http2ErrorCode.PROTOCOL_ERROR)
        elif self._is_taken(WINDOW_UPDATE, stream_id):
            stream = self._streams[stream_id]
            stream.window += increment
            if stream.window > MAX_WINDOW:
                self._fail_stream(stream_id, Http2ErrorCode.FLOW_CONTROL_ERROR)
            else:
                self.responses.wake((stream,))

    # Windows and resets.

    def acknowledge(self, stream_id: int) -> None:
        """What has come of the stream's body has been read: the peer may send as much again."""
        stream = self._live(stream_id)
        window = None if stream is None else stream.receive_window
        if window is not None:
            if window.num_aside:
                window.num_left += window.num_aside
                self._out.append(window_update(window.num_aside, stream_id))
            num_unread, window.num_unread, window.num_aside = window.num_unread, 0, 0
            self._give_back(num_unread, stream)

    def acknowledge_aside(self, stream_id: int) -> bool:
        """As acknowledge, for the other streams alone: this one's window stays shut until it is acknowledged.

        False: nothing had come of it.
        """
        stream = self._live(stream_id)
        window = None if stream is None else stream.receive_window
        if window is None or not window.num_unread:
            return False
        self._window.num_left += window.num_unread
        self._out.append(window_update(window.num_unread))
        window.num_aside += window.num_unread
        window.num_unread = 0
        return True

    def _live(self, stream_id: int) -> Http2Stream | None:
        return self._streams.get(stream_id) or self.early.get(stream_id)

    def _give_back(self, num_bytes: int, stream: Http2Stream | None = None) -> None:
        """So many bytes have been read: open the connection's window, and the stream's while its request goes on."""
        windows = [(self._window, 0)]
        if stream is not None and stream.receive_window is not None and not stream.has_read_request:
            windows.append((stream.receive_window, stream.id))
        for window, owner in windows:
            increment = window.give_back(num_bytes) if num_bytes else 0
            if increment:
                self._out.append(window_update(increment, owner))

    def may_send(self, stream_id: int) -> bool:
        """The windows let the peer send more of the open stream's body."""
        window = self._streams[stream_id].receive_window
        return self._window.num_left > 0 and window is not None and window.num_left > 0

    def reset(self, stream_id: int, code: Http2ErrorCode) -> None:
        """End the stream, both ways. What is unsent is lost."""
        if self._live(stream_id) is not None:
            self._reset(stream_id, code)

    def break_off(self, stream_id: int) -> None:
        """No more of an early stream is read. Idempotent."""
        if stream_id in self.early:
            self._reset(stream_id, Http2ErrorCode.NO_ERROR)

    # Drain.

    def start_drain(self) -> None:
        """Tell the client to open no more streams, and find out when it has heard (RFC 9113 §6.8). Idempotent."""
        if self.is_draining or self.has_failed:
            return
        self.is_draining = True
        self._write_goaway(MAX_STREAM_ID, Http2ErrorCode.NO_ERROR)
        self._write(PING, DRAIN_PING)

    def finish_drain(self) -> None:
        """Streams above the last one taken are refused from now on. Idempotent."""
        if self.is_draining and self._goaway_id == MAX_STREAM_ID and not self.has_failed:
            self._goaway_id = self._last_stream_id
            self._write_goaway(self._goaway_id, Http2ErrorCode.NO_ERROR)

    @property
    def has_drained(self) -> bool:
        """The last GOAWAY is written, and no stream is left."""
        return self._goaway_id != MAX_STREAM_ID and not self._streams

    # What goes out.

    def take_control(self) -> list[bytes]:
        """Frames to write before any DATA: heads, and answers to the peer's frames."""
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


Http2Protocol.takers = {
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
