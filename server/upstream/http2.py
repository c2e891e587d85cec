"""HTTP/2 without I/O, the client's side (RFC 9113): requests to bytes, and bytes to answers. Thread: loop.

Frames come from server/wire/http2_reading.py, as on the server's side. The connection's window is given back as bytes
come; a stream's, only as they are read: a reader that stops shuts its own stream, and no other.
"""

from collections.abc import Callable

from server.upstream.exchange import AnswerHead, Carrier, Exchange, Outgoing, Reader, UpstreamFault
from server.wire import http2_frames as wire
from server.wire.http2_frames import Header, frame
from server.wire.http2_heads import FieldEncoder, Fields
from server.wire.http2_reading import FrameReader
from server.wire.http2_streams import ReceiveWindow
from server.wire.limits import FrameLimits, Rate, TokenBucket
from server.wire.messages import ConnectionFault, Http2ErrorCode

STREAM_WINDOW_BYTES = 32 * 1024  # of an answer that is not read
CONNECTION_WINDOW_BYTES = 16 * 1024 * 1024  # only what its frames take to arrive: it is given back at once
LIST_BYTES = 64 * 1024  # of a response's head
OUR_RESETS = Rate(100, 10)  # then a connection takes no more requests: servers end it at some 200 (CVE-2023-44487)
NO_STREAM_LIMIT = 2**31 - 1  # RFC 9113 §6.5.2: until the peer's SETTINGS
# Some servers write a token in several frames, and answers of few bytes; and one request's flood ends before that
LIMITS = FrameLimits(header_block_bytes=LIST_BYTES, num_overhead_frames=4000, bytes_per_overhead_frame=16)
REQUEST_CREDIT = 256  # bytes: an answer's frames that carry nothing


class _Stream(Exchange):
    """
    Attributes:
        window: bytes that the peer takes of the request's body; may be negative.
        body: of the request, unsent.
        receive_window: that the peer has for the answer.
    """

    def __init__(self, carrier: Carrier, reader: Reader, number: int, window: int, body: bytes) -> None:
        super().__init__(carrier, reader)
        self.id = number
        self.window = window
        self.body = memoryview(body)
        self.receive_window = ReceiveWindow(STREAM_WINDOW_BYTES)


class Http2(FrameReader):
    """One connection's protocol: a `Carrier`.

    Attributes:
        is_ready: the peer's SETTINGS have come.
        is_closing: no more requests can be sent on it.
        max_streams: that the peer takes at once.
    """

    is_multiplexed = True

    def __init__(self, write: Callable[[bytes], None], now: Callable[[], float], origin: Fields) -> None:
        """origin: the pseudo-fields of every request: scheme and authority."""
        super().__init__(LIMITS, LIST_BYTES, CONNECTION_WINDOW_BYTES)
        self.is_ready = self.is_closing = False
        self._send_bytes, self._clock, self._origin = write, now, origin
        self.max_streams = NO_STREAM_LIMIT
        advertised = {wire.ENABLE_PUSH: 0, wire.INITIAL_WINDOW: STREAM_WINDOW_BYTES, wire.MAX_LIST: LIST_BYTES}
        self._out += [
            wire.PREFACE,
            wire.settings_frame(advertised),
            wire.window_update(CONNECTION_WINDOW_BYTES - wire.DEFAULT_WINDOW),
        ]
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1
        self._encoder = FieldEncoder()
        self._send_window = self._initial_window = wire.DEFAULT_WINDOW  # for requests' bodies
        self._max_frame_bytes = wire.LEAST_FRAME_BYTES
        self._resets = TokenBucket(OUR_RESETS)
        self.flush()

    @property
    def num_open(self) -> int:
        return len(self._streams)

    @property
    def room(self) -> int:
        return 0 if self.is_closing else max(0, self.max_streams - len(self._streams))

    def flush(self) -> None:
        if self._out:
            self._send_bytes(b"".join(self._out))
            self._out.clear()

    # Requests.

    def send(self, outgoing: Outgoing, reader: Reader) -> Exchange:
        number, self._next_id = self._next_id, self._next_id + 2
        self.is_closing |= self._next_id > wire.MAX_STREAM_ID  # RFC 9113 §5.1.1
        stream = self._streams[number] = _Stream(self, reader, number, self._initial_window, outgoing.body)
        pseudo = ((b":method", outgoing.method), *self._origin, (b":path", outgoing.path))
        block = self._encoder.encode((*pseudo, *outgoing.fields, *outgoing.length))
        self._out.append(
            wire.head_frames(block, number, self._max_frame_bytes, 0 if outgoing.body else wire.END_STREAM)
        )
        self._earn(REQUEST_CREDIT + len(outgoing.body))
        self._send_body(stream)
        self.flush()
        return stream

    def _send_body(self, stream: _Stream) -> None:
        """As much as the windows let."""
        while stream.body:
            size = min(len(stream.body), self._send_window, stream.window, self._max_frame_bytes)
            if size <= 0:
                return
            self._send_window -= size
            stream.window -= size
            data, stream.body = bytes(stream.body[:size]), stream.body[size:]
            self._out.append(frame(wire.DATA, data, 0 if stream.body else wire.END_STREAM, stream.id))

    def acknowledge(self, exchange: Exchange, num_bytes: int) -> None:
        assert isinstance(exchange, _Stream)
        if increment := exchange.receive_window.give_back(num_bytes):
            self._out.append(wire.window_update(increment, exchange.id))

    def set_paused(self, exchange: Exchange, is_paused: bool) -> None:
        """Its window does it, which is open again."""
        self.flush()

    def cancel(self, exchange: Exchange) -> None:
        assert isinstance(exchange, _Stream)
        self._reset(exchange, Http2ErrorCode.CANCEL)
        self.flush()

    def _reset(self, stream: _Stream, code: Http2ErrorCode) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self.is_closing |= not self._resets.take(self._clock())
            self._write_reset(stream.id, code)

    def fail(self, fault: UpstreamFault) -> None:
        self.is_closing = True
        while self._streams:
            self._streams.popitem()[1].take_end(fault)

    # What the peer sends.

    def receive(self, data: bytes) -> None:
        if not data:
            raise ConnectionFault(Http2ErrorCode.NO_ERROR, "It has closed the connection.")
        self._buffer += data
        self._now = self._clock()
        try:
            self._read_frames()
        except ConnectionFault as fault:
            self.is_closing = True
            self._write_goaway(0, fault.code)
            raise
        finally:
            self.flush()

    def _stream(self, header: Header) -> _Stream | None:
        """None: it has ended, or we have reset it."""
        stream_id = header.stream_id
        if stream_id % 2 == 0 or stream_id >= self._next_id:  # RFC 9113 §5.1: idle
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, f"Stream {stream_id} was never opened.")
        return self._streams.get(stream_id)

    def _end(self, stream: _Stream) -> None:
        """The answer is complete."""
        if stream.body:  # RFC 9113 §8.1: it does not want the rest
            self._reset(stream, Http2ErrorCode.NO_ERROR)
        self._streams.pop(stream.id, None)
        stream.take_end()

    def _fail(self, stream: _Stream, why: str, reset: Http2ErrorCode | None = None, is_untouched: bool = False) -> None:
        if reset is not None:
            self._reset(stream, reset)
        self._streams.pop(stream.id, None)
        stream.take_end(UpstreamFault(why, is_untouched))

    # One method for each type of frame.

    def _take_fields(self, begun: Header, fields: Fields) -> None:
        stream, ends = self._stream(begun), bool(begun.flags & wire.END_STREAM)
        if stream is None:
            return
        if not stream.has_head:
            self._take_head(stream, fields)
        elif not ends:  # RFC 9113 §8.1: trailers end their stream
            self._fail(stream, "its answer has two heads", Http2ErrorCode.PROTOCOL_ERROR)
        if ends and stream.id in self._streams:
            if stream.has_head:
                self._end(stream)
            else:
                self._fail(stream, "its answer has no head")

    def _take_head(self, stream: _Stream, fields: Fields) -> None:
        statuses = [value for name, value in fields if name == b":status"]
        if len(statuses) != 1 or not (statuses[0].isdigit() and len(statuses[0]) == 3):
            self._fail(stream, "its answer has no status", Http2ErrorCode.PROTOCOL_ERROR)
        elif statuses[0][:1] == b"1":  # RFC 9113 §8.1: interim
            self._charge_overhead()
        else:
            stream.take_head(AnswerHead(int(statuses[0]), tuple(fields)))

    def _take_data(self, header: Header, payload: bytes) -> None:
        self._window.take(header.length)
        if increment := self._window.give_back(header.length):
            self._out.append(wire.window_update(increment))
        stream = self._stream(header)
        if stream is None:
            return
        if not stream.has_head:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "A body comes before its head.")
        stream.receive_window.take(header.length)
        data, ends = wire.unpadded(header, payload), bool(header.flags & wire.END_STREAM)
        if len(data) < header.length:
            self.acknowledge(stream, header.length - len(data))
        if data:
            stream.take_data(data)
        if ends:
            self._end(stream)

    def _take_reset(self, header: Header, payload: bytes) -> None:
        stream = self._stream(header)
        if stream is not None:
            code = int.from_bytes(payload, "big")
            why = f"it has reset the stream, with code {code}"
            self._fail(stream, why, is_untouched=code == Http2ErrorCode.REFUSED_STREAM)  # RFC 9113 §8.7

    def _apply_settings(self, payload: bytes) -> None:
        self.is_ready = True
        settings, table_sizes = wire.read_settings(payload)
        if table_sizes:
            self._encoder.resize(table_sizes)
        self._max_frame_bytes = settings.get(wire.MAX_FRAME, self._max_frame_bytes)
        self.max_streams = settings.get(wire.MAX_STREAMS, self.max_streams)
        growth = settings.get(wire.INITIAL_WINDOW, self._initial_window) - self._initial_window
        self._initial_window += growth
        for stream in self._streams.values():
            self._grow(stream, growth)

    def _take_goaway(self, header: Header, payload: bytes) -> None:
        self.is_closing = True
        last_id = int.from_bytes(payload[:4], "big") & wire.UNRESERVED
        for stream in [one for one in self._streams.values() if one.id > last_id]:
            self._fail(stream, "it accepts no more requests on this connection", is_untouched=True)  # RFC 9113 §6.8

    def _take_window_update(self, header: Header, payload: bytes) -> None:
        increment = int.from_bytes(payload, "big") & wire.UNRESERVED
        if not increment:  # RFC 9113 §6.9
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "The window grows by nothing.")
        if header.stream_id:
            stream = self._stream(header)
            if stream is not None:
                self._grow(stream, increment)
            return
        self._send_window += increment
        if self._send_window > wire.MAX_WINDOW:  # RFC 9113 §6.9.1
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "The connection's window is too large.")
        for stream in self._streams.values():
            self._send_body(stream)

    def _grow(self, stream: _Stream, increment: int) -> None:
        stream.window += increment
        if stream.window > wire.MAX_WINDOW:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "A stream's window is too large.")
        self._send_body(stream)


Http2.takers = {
    wire.DATA: Http2._take_data,
    wire.HEADERS: Http2._take_headers,
    wire.CONTINUATION: Http2._take_fragment,
    wire.RST_STREAM: Http2._take_reset,
    wire.SETTINGS: Http2._take_settings,
    wire.PING: Http2._take_ping,
    wire.GOAWAY: Http2._take_goaway,
    wire.WINDOW_UPDATE: Http2._take_window_update,
}
