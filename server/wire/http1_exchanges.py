"""HTTP/1.1 on a connection: one exchange at a time. Thread: loop.

While a request is answered, the connection reads on, whatever the peer pipelines: the peer's end must be seen, and must
not hide behind bytes left in the network. Pipelined requests beyond a limit are dropped, and the current answer is the
last (RFC 9112 §9.6: the client sends them again elsewhere). Reading pauses while a body waits that nobody reads, or
while a peer does not read its answers.
"""

import math
from functools import partial

from core.errors import ErrorKind, ServiceError
from server.wire.connection import SERVER_FAULT, SLOW_BODY, Connection, ConnectionContext, Exchanges, slow_head
from server.wire.http1 import CONTINUE, SWITCH_TO_HTTP2, Http1Protocol
from server.wire.http2_exchanges import Http2Exchanges
from server.wire.http2_heads import upgrade_settings
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    ConnectionFault,
    Event,
    Headers,
    Http2Preface,
    HttpRequest,
    ProtocolViolation,
    ResponseHead,
    TextFrame,
    TextWriter,
)
from server.wire.stream import HttpStream, IncomingBody

PLAIN_ON_TLS = "This port speaks TLS, and the request came in the clear. Ask by https."


def first_exchanges(connection: Connection, context: ConnectionContext) -> Exchanges:
    """HTTP/2 where ALPN says so, else HTTP/1.1, which may go on in HTTP/2."""
    return (Http2Exchanges if connection.speaks_http2 else Http1Exchanges)(connection, context)


class Http1Exchanges(Exchanges):
    """The exchanges of one connection that speaks HTTP/1.1."""

    def __init__(self, connection: Connection, context: ConnectionContext) -> None:
        super().__init__(connection, context, context.bodies)
        self._protocol = Http1Protocol(context.limits.head, context.date, context.limits.pieces_per_turn)
        self._stream: HttpStream | None = None
        self._upgrade: bytes | None = None  # the settings of a request that asks for HTTP/2
        self._body: IncomingBody | None = None  # while the handler waits for it
        self._exchange_is_over = False  # and the next one has not begun
        self._num_refused: int | None = None  # bytes thrown away, once too many have been pipelined
        self._drain_due = math.inf  # for a connection that has asked for nothing yet
        self._waiting_since = context.loop.time()  # for a request, or for the rest of its head

    @property
    def has_streams(self) -> bool:
        return self._stream is not None

    @property
    def has_more(self) -> bool:
        return self._protocol.has_more

    @property
    def holds_enough(self) -> bool:
        stream = self._stream
        if self._body is not None and not self._room.may_grow(self._body):
            return True
        if stream is None:
            return self._protocol.num_buffered > self._limits.head.head_bytes
        return (
            self._protocol.is_reading_body
            and not stream.is_reading_body
            and stream.num_body_bytes > self._limits.unread_body_bytes
        )

    def receive(self, data: bytes) -> None:
        if self._connection.is_misdirected:
            self._refuse(400, PLAIN_ON_TLS)
            return
        if self._num_refused is not None:
            self._refuse_pipelined(len(data))
            return
        if self._protocol.is_idle:
            self._waiting_since = self._loop.time()
            self._received_s = self._clock()
        self._handle_events(self._protocol.receive(data))
        num_pipelined = 0 if self._protocol.has_more else self._protocol.num_buffered
        if self._stream is not None and num_pipelined > self._limits.pipelined_bytes:
            self._protocol.stop_reading()
            self._refuse_pipelined(num_pipelined)

    def _refuse_pipelined(self, num_bytes: int) -> None:
        """Drop them; a flood that goes on ends the connection."""
        self._num_refused = (self._num_refused or 0) + num_bytes
        if self._num_refused > self._limits.linger_bytes:
            self._connection.abort()

    def set_blocked(self, is_blocked: bool) -> None:
        if self._stream is not None:
            self._stream.set_blocked(is_blocked)
        elif not is_blocked:
            self._go_on()

    def end_of_peer(self) -> None:
        stream, self._stream = self._stream, None
        try:
            self._protocol.leave()
            self._tell_written()
            self._end_body()
        finally:
            if stream is not None:
                stream.disconnect()

    # What the protocol reports.

    def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is HttpRequest:
                self._start_stream(event)
            elif type(event) is BodyChunk:
                if self._stream is not None:
                    self._stream.receive_body(event.data)
                    if self._body is not None:
                        self._room.add(self._body, len(event.data))
                        self._body.receive(len(event.data), self._loop.time())
            elif type(event) is BodyEnd:
                self._end_body()
                if self._stream is not None:
                    self._stream.complete_body()
            elif type(event) is ProtocolViolation:
                self._refuse(event.status, event.message)
            elif type(event) is Http2Preface:
                self._speak_http2(event.data)
        if self._upgrade is not None:
            self._switch()

    def _switch(self) -> None:
        """RFC 7540 §3.2: answer a request that asks for HTTP/2 there, if it is complete before its answer begins."""
        stream, protocol = self._stream, self._protocol
        if stream is None or stream.head_sent or not protocol.keep_alive:
            self._upgrade = None
        elif protocol.has_read_request:
            settings, self._upgrade = self._upgrade, None
            assert settings is not None
            try:
                exchanges = Http2Exchanges(self._connection, self._context, settings)
            except ConnectionFault:  # its settings are invalid: it is answered here
                return
            self._out.append(SWITCH_TO_HTTP2)
            self._connection.go_on_with(exchanges)
            exchanges.adopt(stream)
            self._stream = None
            if rest := protocol.leave():
                exchanges.receive(rest)

    def _speak_http2(self, data: bytes) -> None:
        """data: all that was received."""
        exchanges = Http2Exchanges(self._connection, self._context)
        self._connection.go_on_with(exchanges)
        exchanges.receive(data)
        if self._connection.is_draining:
            exchanges.drain()

    def _start_stream(self, request: HttpRequest) -> None:
        if self._connection.closes_after_answer or request.stream_id >= self._limits.num_requests:
            self._protocol.keep_alive = False
        stream = self._stream = HttpStream(request, self, self._received_s)
        self._connection.serve(stream)
        may_upgrade = self._context.takes_upgrade and not self._connection.is_secure and not self.peer.is_proxy
        if may_upgrade and request.stream_id == 1:
            self._upgrade = upgrade_settings(request, self._limits.http2.frames.num_settings)

    def abandon(self, stream: HttpStream, is_cancelled: bool) -> None:
        if is_cancelled:
            self._connection.abort()
        else:
            self._refuse(500, SERVER_FAULT)

    def _refuse(self, status: int, message: str) -> None:
        """End the connection with an error; without one if another head has been sent already."""
        if self._stream is not None and self._stream.head_sent:
            self._connection.abort()
            return
        self._protocol.stop_reading()
        headers, body = self._context.refuse(
            status, message, self._connection.peer, self._waiting_since, self._stream, None
        )
        self._append(self._protocol.send_head(ResponseHead(status, headers)))
        self._append(self._protocol.send_data(body))
        self._connection.end_after_output()
        self.end_of_peer()

    def _end_body(self) -> None:
        """The body is complete, or its handler no longer waits for it."""
        body, self._body = self._body, None
        if body is not None:
            self._room.close(body)

    def _let_body_on(self) -> None:
        if self._body is not None:
            self._body.restart(self._loop.time())
        self._connection.adjust()

    # StreamCarrier.

    def start_body(self, stream: HttpStream) -> None:
        if not self._protocol.has_read_request:
            self._body = self._begin_body(stream, self._let_body_on)
            # RFC 9110 §10.1.1: 100 may be left out once content has come
            if stream.request.expects_continue and not stream.num_body_bytes:
                self._append(CONTINUE)
        self._connection.adjust()

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self._append(self._protocol.send_head(head))

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self._append(self._protocol.send_data(data))

    def text_writer(self, stream: HttpStream, frame: TextFrame) -> TextWriter:
        if not self._protocol.is_sending_chunks:
            return partial(stream.send_text, frame)
        batch, encoded, transport = self._batch, frame.encoded, self._connection.transport
        is_closing, write_out = transport.is_closing, transport.write
        head, tail = frame.head, frame.tail
        num_more = len(head) + len(tail)

        def write(text: str) -> None:
            if not stream.is_open:
                return
            content = encoded[text]
            data = b"%x\r\n%b%b%b\r\n" % (len(content) + num_more, head, content, tail)
            if self._is_dirty:
                self._out.append(data)
            elif not is_closing():
                batch.num_writes += 1
                write_out(data)  # at once: mostly it is the only text of the step

        return write

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self._append(self._protocol.send_end())
        self._end_body()
        self._stream = None
        self._exchange_is_over = True
        self._waiting_since = self._loop.time()

    def _append(self, data: bytes) -> None:
        self._out.append(data)
        if not self._is_dirty:
            self._flush_soon()

    def _is_written(self, stream_id: int) -> bool:
        return True

    def flush(self) -> None:
        self._is_dirty = False
        self._connection.write_out()
        if self._on_written:
            self._tell_written()
        if self._stream is None:
            self._go_on()

    def _go_on(self) -> None:
        """No exchange is in progress: serve the next request, or end the connection."""
        connection = self._connection
        if not connection.is_open or not self._exchange_is_over or self._out:
            return
        if not self._protocol.keep_alive:
            has_read_all = self._protocol.has_read_request and not self._protocol.num_buffered
            connection.close() if has_read_all else connection.linger()
        elif not connection.is_writing_paused:
            # Otherwise a peer that pipelines and does not read would make us hold its answers
            self._exchange_is_over = False
            self._waiting_since = self._loop.time()  # however long it took to read the answer before
            self._received_s = self._clock()  # of one that was pipelined: its turn
            self._handle_events(self._protocol.next_request())
            connection.adjust()

    def drain(self) -> None:
        self._protocol.keep_alive = False
        if self._stream is not None or self._out or not self._protocol.is_idle:
            return
        if self._protocol.num_requests:
            self._connection.close()
        else:  # its first request may be on its way, and is to be answered
            self._drain_due = self._loop.time() + self._limits.drain_round_trip_s
            self._connection.adjust()

    # The clocks.

    def next_due(self) -> float | None:
        limits = self._limits
        if self._stream is not None:
            body = self._body
            if body is None or not self._protocol.is_reading_body or not self._room.may_grow(body):
                return None  # the body waits for us
            return body.due
        if self._protocol.is_idle:
            return min(self._waiting_since + limits.idle_s, self._drain_due)
        return self._waiting_since + limits.head_s

    def on_due(self) -> None:
        if self._stream is not None:
            self._end_body()
            self._stream.fail_body(ServiceError(ErrorKind.REQUEST_TIMEOUT, SLOW_BODY, "request_timeout"))
        elif self._protocol.is_idle:
            self._connection.close()
        else:
            self._refuse(408, slow_head(self._limits.head_s))
