"""HTTP/2 without I/O: bytes to events; heads, bodies and the connection's own frames to bytes. Thread: loop.

Raw frames pass the gate of frame_gate, then h2 understands them. h2's own checks of header lists are switched off: they
go through each byte in Python, let pass what HTTP/1.1 here refuses, and end the connection where RFC 9113 §8.1.1 has
only the stream at fault. Responses are framed by h2_connection, GOAWAY is written by hand, trailers by h2. Of streams
that have ended nothing is kept here; h2 keeps how they ended.
"""

import base64
import binascii
import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus

import h2.events
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.stream import H2Stream

from server.wire.frame_gate import (
    FRAME_HEADER,
    GOAWAY,
    FrameGate,
)
from server.wire.h2_connection import (
    OutgoingBody,
    PieceFrames,
    clamp_encoder,
    code_of,
    frame_head,
    frame_next,
    h2_is_as_known,
    last_frame,
    new_h2_connection,
)
from server.wire.limits import HeadLimits, Http2Limits
from server.wire.messages import (
    CONTENT_LENGTH,
    FIELD_NAME,
    FIELD_VALUE,
    BodyChunk,
    BodyEnd,
    Event,
    Headers,
    HeadRefused,
    HttpRequest,
    ProtocolViolation,
    ResponseError,
    ResponseHead,
    StreamReset,
    TextFrame,
    TextWriter,
    check_fields,
    is_authority,
)

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH = re.compile(rb"/[\x21-\x22\x24-\x7e]*")  # no fragment
_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
# RFC 9113 §8.2.2: connection-specific fields MUST be treated as malformed
_OF_CONNECTION = frozenset((b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"))
# Host is put first. Cookies mean nothing here, and put together (RFC 9113 §8.2.3) they would weigh more than was sent
_NOT_KEPT = frozenset((b"host", b"cookie"))
_OF_UPGRADE = (b"connection", b"upgrade", b"http2-settings")
_OF_PROXIES = frozenset((b"forwarded", b"via", b"x-forwarded-for"))
_SETTING_BYTES = 6
_NUM_PATHS_KEPT = 32
_FIELD_OVERHEAD_BYTES = 32  # RFC 9113 §6.5.2, SETTINGS_MAX_HEADER_LIST_SIZE


class Malformed(Exception):
    """RFC 9113 §8.1.1: a stream error of type PROTOCOL_ERROR."""


def read_request(
    stream_id: int, fields: Iterable[tuple[bytes, bytes]], has_body: bool, limits: HeadLimits
) -> HttpRequest:
    """The request that a header list says.

    Raises:
        Malformed: it is not a request.
        HeadRefused: it is one, and is answered with an error.
    """
    fields = list(fields)
    pseudo, headers = _split(fields)
    _check_fields(headers)
    _check_size(fields, limits)
    method, path = _target(pseudo)
    length = content_length(headers)
    if length and not has_body:
        raise Malformed  # RFC 9113 §8.1.1: the DATA frames must add up to it
    rest = (field for field in headers if field[0] not in _NOT_KEPT)
    headers = ((b"host", _authority(pseudo.get(b":authority"), headers)), *rest)
    route, query = _route_and_query(path)
    return HttpRequest(
        stream_id=stream_id,
        method=method.decode("ascii"),
        path=route,
        query=query,
        headers=headers,
        has_body=has_body,
        expects_continue=has_body
        and any(key == b"expect" and value.lower() == b"100-continue" for key, value in headers),
    )


@functools.lru_cache(_NUM_PATHS_KEPT)
def _route_and_query(path: bytes) -> tuple[str, str]:
    """The same strings, where an index of one byte says the path on each of many streams.

    Not sys.intern, which in Python 3.12.0 to 3.12.5 keeps them for ever (CPython issue 113993).
    """
    route, _, query = path.decode("ascii").partition("?")
    return route, query


def _target(pseudo: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """Method and path (RFC 9113 §8.3.1)."""
    method, path = pseudo.get(b":method"), pseudo.get(b":path")
    if method is None or _METHOD.fullmatch(method) is None:
        raise Malformed
    if method == b"CONNECT":
        if pseudo.keys() != {b":method", b":authority"}:
            raise Malformed  # RFC 9113 §8.5
        raise HeadRefused(501, "CONNECT is not supported.")
    if path is None or not pseudo.get(b":scheme"):
        raise Malformed
    if _PATH.fullmatch(path) is None and not (path == b"*" and method == b"OPTIONS"):
        raise Malformed
    return method, path


def upgrade_settings(request: HttpRequest, max_settings: int) -> bytes | None:
    """The HTTP2-Settings of an HTTP/1.1 request that may be answered in HTTP/2, padded; None: it may not be.

    RFC 7540 §3.2, which RFC 9113 drops and stock Java clients send: `Upgrade: h2c`, and exactly one HTTP2-Settings.
    Not what shows that it has come through a proxy: one that hands the upgrade on (haproxy 2.6) would no longer see
    what its client asks for, and its rules would not hold. A proxy need not show itself: see --h2c-upgrade.
    """
    if any(name in _OF_PROXIES for name, _ in request.headers):
        return None
    fields = {name: [value for key, value in request.headers if key == name] for name in _OF_UPGRADE}
    tokens = {part.strip(b" \t") for value in fields[b"connection"] for part in value.lower().split(b",")}
    settings = fields[b"http2-settings"]
    if fields[b"upgrade"] != [b"h2c"] or len(settings) != 1 or not tokens >= {b"upgrade", b"http2-settings"}:
        return None
    padded = settings[0] + b"=" * (-len(settings[0]) % 4)
    try:
        payload = base64.b64decode(padded, altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    return padded if len(payload) % _SETTING_BYTES == 0 and len(payload) <= max_settings * _SETTING_BYTES else None


def check_trailers(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """
    Raises:
        Malformed: pseudo-fields, or what is no field, stand among them.
    """
    pseudo, headers = _split(fields)
    if pseudo:
        raise Malformed  # RFC 9113 §8.1
    _check_fields(headers)


def _split(fields: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], Headers]:
    """The pseudo-fields, each once and all before the others (RFC 9113 §8.3), and the others."""
    pseudo: dict[bytes, bytes] = {}
    headers: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name not in _PSEUDO:
            headers.append((name, value))
        elif headers or name in pseudo:
            raise Malformed
        else:
            pseudo[name] = value
    return pseudo, tuple(headers)


def _check_fields(headers: Headers) -> None:
    """RFC 9113 §8.2.1, and as strictly as on HTTP/1.1: no control characters in values."""
    for name, value in headers:
        if FIELD_NAME.fullmatch(name) is None or name in _OF_CONNECTION:
            raise Malformed
        if FIELD_VALUE.fullmatch(value) is None or value != value.strip(b" \t"):
            raise Malformed
        if name == b"te" and value.lower() != b"trailers":  # RFC 9113 §8.2.2
            raise Malformed


def _check_size(fields: list[tuple[bytes, bytes]], limits: HeadLimits) -> None:
    size = sum(len(name) + len(value) + _FIELD_OVERHEAD_BYTES for name, value in fields)
    if size > limits.head_bytes:
        raise HeadRefused(431, f"The header fields are larger than {limits.head_bytes} bytes.")
    if len(fields) > limits.num_fields:
        raise HeadRefused(431, f"There are more than {limits.num_fields} header fields.")


def content_length(headers: Headers) -> int | None:
    """How long the body is said to be.

    Raises:
        Malformed: that is no number, or more than one.
    """
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return None
    if len(lengths) > 1 or CONTENT_LENGTH.fullmatch(lengths[0]) is None:
        raise Malformed
    return int(lengths[0])


def _authority(authority: bytes | None, headers: Headers) -> bytes:
    """RFC 9113 §8.3.1: what :authority and Host say must be the same, and one of them must say it."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (authority is not None and hosts and hosts[0] != authority):
        raise Malformed
    value = authority if authority is not None else hosts[0] if hosts else b""
    if not value or not is_authority(value):
        raise Malformed
    return value


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
        self._pieces = PieceFrames(connection, PIECES_BYTES)

    @property
    def has_some(self) -> bool:
        """take_data may have something."""
        return bool(self._ready or self._pieces.frames)

    def num_unsent(self, stream_id: int) -> int:
        """Bytes of the stream's body that take_data has not given; 0 when it is gone."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else len(stream.data)

    def is_written(self, stream_id: int) -> bool:
        """All that was sent so far has been taken, with the end of a response that has ended."""
        stream = self.streams.get(stream_id)
        return stream is None or not (stream.data or stream.is_ending)

    def num_partly_sent(self, stream_id: int) -> int:
        """Bytes of the stream's body that went while more was there: how far a peer is that never takes all."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else stream.num_partly_sent

    def num_unsent_ending(self) -> int:
        """Bytes unsent of all bodies to which nothing will be added."""
        return sum(len(stream.data) for stream in self.streams.values() if stream.is_ending)

    def wake(self, stream_id: int) -> None:
        """Its window may have opened."""
        stream = self.streams.get(stream_id)
        if stream is not None and (stream.data or stream.is_ending):
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
            stream.data += data
            self._ready[stream_id] = stream
        return len(stream.data)

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
                    if size and stream.data:
                        self._ready[stream_id] = stream
                if size:
                    sent.append(stream_id)
                    num_bytes += size
                    if num_bytes >= limit_bytes:
                        self._ready = dict(turn) | self._ready
                        break
                elif stream.data:
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
            last = b"" if stream.data else self._trailers(stream_id, stream)
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
        if data:
            self._out.append(data)
            for stream_id in self._h2.new_resets:
                if stream_id != ours:
                    self._gate.count_reset(self._now)
            self._h2.new_resets.clear()

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
