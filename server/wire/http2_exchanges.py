"""HTTP/2 on a connection: many exchanges at once. Thread: loop.

Decisions:
- A stream is blocked while it has more than its share unsent (the peer's windows are shut), or while the transport's
  buffer is full; the other streams go on. A stream whose peer reads too little in stall_s is reset.
- A body that its handler does not read is not acknowledged: the peer's windows shut, and nothing else holds it back. Of
  bodies that are read, too much at once (BodyRoom) shuts the streams' windows, but not the oldest's; the connection's
  window stays open for that one, unless the bodies that may go on belong to other connections.
- A request that is answered before its end may go on for linger_s, and its bytes are dropped: clients that are sending
  read the answer when they are done.
- A client's GOAWAY says only that it takes no pushed streams; its requests go on. With an error, it has left.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from core.errors import ErrorKind, ServiceError
from server.wire.connection import SERVER_FAULT, SLOW_BODY, Connection, ConnectionContext, Exchanges, slow_head
from server.wire.http2 import Http2Protocol
from server.wire.http2_streams import PIECE_BYTES, Http2Stream
from server.wire.messages import (
    BodyChunk,
    BodyEnd,
    Event,
    Headers,
    Http2ErrorCode,
    HttpRequest,
    ProtocolViolation,
    ResponseError,
    ResponseHead,
    StreamReset,
    TextFrame,
    TextWriter,
)
from server.wire.stream import BodyRoom, HttpStream, IncomingBody

logger = logging.getLogger(__name__)

_FLUSH_BYTES = 64 * 1024  # of bodies, in one write
_UNSENT_BYTES = 512 * 1024  # of all streams: each may have its share, down to _LEAST_UNSENT_BYTES
_LEAST_UNSENT_BYTES = PIECE_BYTES
_ENDED_UNSENT_BYTES = 256 * 1024  # of complete answers: beyond it, no further handler begins


class Http2Exchanges(Exchanges):
    """The exchanges of one connection that speaks HTTP/2."""

    def __init__(self, connection: Connection, context: ConnectionContext, upgrade: bytes | None = None) -> None:
        """Raises what Http2Protocol does."""
        limits = context.limits
        super().__init__(connection, context, BodyRoom(limits.buffered_body_bytes, context.bodies))
        self._protocol = Http2Protocol(limits.head, limits.http2, context.date, upgrade, limits.pieces_per_turn)
        self._responses = self._protocol.responses
        self._exchanges: dict[int, HttpStream] = {}  # by stream id, while their handlers may write to them
        self._awaited: dict[int, IncomingBody] = {}  # by stream id: bodies that handlers wait for
        self._aside: set[int] = set()  # of these, the streams whose windows are kept shut
        # Streams with bytes that wait for a window, or for other streams -> since when the peer has had to take enough,
        # oldest first, and how much had been sent then
        self._held_back: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._blocked_since = 0.0
        self._over: set[int] = set()  # streams that have, or had, more than their share unsent
        self._num_ended = 0  # bytes of complete answers; may count some that have been sent since
        self._turns: list[asyncio.Future[None]] = []  # of handlers that wait to begin
        self._pending_head: int | None = 0
        self._head_since = self._idle_since = context.loop.time()
        self._has_peer = True
        self._drain_due: float | None = None  # when the second GOAWAY is sent, whether the peer has answered or not

    @property
    def has_streams(self) -> bool:
        return bool(self._exchanges)

    @property
    def has_more(self) -> bool:
        return self._protocol.has_more

    @property
    def holds_enough(self) -> bool:
        """The peer does not read the answers to its control frames."""
        return self._connection.is_writing_paused and self._connection.num_unwritten > self._limits.control_bytes

    def adopt(self, stream: HttpStream) -> None:
        """Answer a complete request that came by HTTP/1.1, and has no answer yet."""
        self._protocol.adopt(stream.request)
        self._exchanges[stream.request.stream_id] = stream
        stream.move_to(self)
        self._mark_dirty()

    def receive(self, data: bytes) -> None:
        now = self._loop.time()
        protocol = self._protocol
        if not protocol.pending_head:
            self._received_s = self._clock()
        self._handle_events(protocol.receive(data, now))
        if protocol.has_failed:
            self._log_refusal(protocol.failed_with, None)
            self._end()
            return
        if protocol.has_peer_left:
            self._abort()
            return
        if protocol.pending_head != self._pending_head:
            self._pending_head = protocol.pending_head
            self._head_since = now
        if self._turns:
            self._give_turns()
        self._mark_dirty()

    def _abort(self) -> None:
        self._connection.abort()
        self.end_of_peer()

    def _end(self) -> None:
        """The protocol's GOAWAY is the last to be written."""
        self.end_of_peer()
        self._out += self._protocol.take_control()
        self._connection.end_after_output()
        self._mark_dirty()

    def set_blocked(self, is_blocked: bool) -> None:
        """While the transport is full, the connection has a clock of its own, and the streams' stand still."""
        for stream_id, stream in tuple(self._exchanges.items()):
            if is_blocked or stream_id not in self._over:
                self._set_blocked(stream, is_blocked)
        if is_blocked:
            self._blocked_since = self._loop.time()
        else:
            pause_s = self._loop.time() - self._blocked_since
            held_back = self._held_back.items()
            self._held_back = OrderedDict((key, (since + pause_s, num_sent)) for key, (since, num_sent) in held_back)
            self._idle_since = self._loop.time()
            self.flush()

    def _set_blocked(self, stream: HttpStream, is_blocked: bool) -> None:
        try:
            stream.set_blocked(is_blocked)
        except Exception:  # its handler's bug costs no other stream
            logger.exception("a stream cannot be paused or resumed, and is reset")
            self._protocol.reset(stream.request.stream_id, Http2ErrorCode.INTERNAL_ERROR)
            self._mark_dirty()
            self._drop(stream.request.stream_id)

    def end_of_peer(self) -> None:
        for stream_id in tuple(self._exchanges):
            try:
                self._drop(stream_id)
            except Exception:
                logger.exception("a stream of a client that has gone cannot be dropped in order")
        self._has_peer = False
        self._tell_written()

    def _drop(self, stream_id: int) -> None:
        """The stream has lost its peer: tell its handler, or cancel it."""
        stream = self._exchanges.get(stream_id)
        if stream is not None:
            try:
                self._forget(stream_id)
            finally:
                stream.disconnect()

    def _forget(self, stream_id: int) -> None:
        del self._exchanges[stream_id]
        self._end_body(stream_id)
        self._protocol.acknowledge(stream_id)  # nobody reads it: what still comes is dropped
        if not self._exchanges:
            self._idle_since = self._loop.time()
            self._connection.adjust()  # the idle clock starts even if the peer sends nothing more

    # What the protocol reports.

    def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is HttpRequest:
                self._start_stream(event)
            elif type(event) is BodyChunk:
                self._take_body(event)
            elif type(event) is BodyEnd:
                stream = self._exchanges.get(event.stream_id)
                if stream is not None:
                    self._end_body(event.stream_id)
                    stream.complete_body()
            elif type(event) is StreamReset:
                if event.refused_with is not None:
                    self._log_refusal(event.refused_with, self._exchanges.get(event.stream_id))
                self._held_back.pop(event.stream_id, None)
                self._over.discard(event.stream_id)
                self._drop(event.stream_id)
                self._tell_written()
            elif type(event) is ProtocolViolation and self._protocol.is_open(event.stream_id):
                self._answer_error(event.stream_id, event.status, event.message, None)

    def _start_stream(self, request: HttpRequest) -> None:
        stream = HttpStream(request, self, self._received_s)
        self._exchanges[request.stream_id] = stream
        self._connection.serve(stream, self._wait_turn)
        if self._connection.closes_after_answer or self._protocol.num_requests >= self._limits.num_streams:
            self.drain()  # and not before: a peer would send no request, and not learn why

    async def _wait_turn(self) -> None:
        """A peer that keeps its windows shut gets no more answers made than _ENDED_UNSENT_BYTES."""
        while self._turns or self._has_too_many_answers():
            turn = self._loop.create_future()
            self._turns.append(turn)
            await turn

    def _has_too_many_answers(self) -> bool:
        if self._num_ended > _ENDED_UNSENT_BYTES:
            self._num_ended = self._responses.num_unsent_ending()
        return self._num_ended > _ENDED_UNSENT_BYTES

    def _give_turns(self) -> None:
        if self._has_too_many_answers():
            return
        turns, self._turns = self._turns, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    def _take_body(self, event: BodyChunk) -> None:
        stream_id = event.stream_id
        stream, body = self._exchanges.get(stream_id), self._awaited.get(stream_id)
        if stream is None:
            self._protocol.acknowledge(stream_id)
            return
        stream.receive_body(event.data)
        if body is not None:
            body.receive(len(event.data), self._loop.time())
            if stream.is_reading_body:
                self._room.add(body, len(event.data))
                self._let_go_on(stream_id, body)

    def _let_go_on(self, stream_id: int, body: IncomingBody) -> None:
        """Open the windows by what has come, as far as there is room for more."""
        if self._room.may_grow(body):
            self._aside.discard(stream_id)
            self._protocol.acknowledge(stream_id)
        elif not self._room.is_shut and self._protocol.acknowledge_aside(stream_id):
            self._aside.add(stream_id)

    def _on_room(self) -> None:
        """Bodies that had to wait for room may go on; their clocks begin again."""
        for stream_id, body in self._awaited.items():
            if not self._protocol.may_send(stream_id):
                body.restart(self._loop.time())
        for stream_id, body in self._awaited.items():
            if self._exchanges[stream_id].is_reading_body:
                self._let_go_on(stream_id, body)
        self._on_changed()

    def _end_body(self, stream_id: int) -> None:
        """The body is complete, or its handler no longer waits for it."""
        body = self._awaited.pop(stream_id, None)
        if body is not None:
            self._aside.discard(stream_id)
            self._protocol.acknowledge(stream_id)
            self._room.close(body)

    def _answer_error(self, stream_id: int, status: int, message: str, stream: HttpStream | None) -> None:
        since = self._head_since if stream_id == self._pending_head else self._loop.time()
        headers, body = self._context.refuse(status, message, self.peer, since, stream, None)
        self._responses.send_head(stream_id, ResponseHead(status, headers))
        self._responses.send_data(stream_id, body)
        self._responses.send_end(stream_id)
        self._mark_dirty()

    def _log_refusal(self, code: Http2ErrorCode, stream: HttpStream | None) -> None:
        """A request, or the connection, is answered by RST_STREAM or GOAWAY alone: it has its access line, too."""
        status = 400
        if code in (Http2ErrorCode.REFUSED_STREAM, Http2ErrorCode.ENHANCE_YOUR_CALM):
            status = 503 if self._protocol.is_draining else 429
        self._context.refuse(status, code.name, self.peer, self._clock(), stream, code)

    def abandon(self, stream: HttpStream, is_cancelled: bool) -> None:
        stream_id = stream.request.stream_id
        if stream.head_sent or is_cancelled:
            self._protocol.reset(stream_id, Http2ErrorCode.INTERNAL_ERROR)
            self._mark_dirty()
        else:
            self._answer_error(stream_id, 500, SERVER_FAULT, stream)
        self._drop(stream_id)

    # StreamCarrier.

    def start_body(self, stream: HttpStream) -> None:
        if stream.body_is_complete:
            return
        stream_id = stream.request.stream_id
        body = self._awaited[stream_id] = self._begin_body(stream, self._on_room)
        if stream.num_body_bytes:
            self._let_go_on(stream_id, body)
        elif stream.request.expects_continue:
            self._responses.send_continue(stream_id)
        self._on_changed()

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        try:
            self._responses.send_head(stream.request.stream_id, head)
        except ResponseError:  # nothing of it has been encoded
            raise
        except Exception:  # HPACK's table may hold fields that the peer will never receive
            self.break_down()
            raise
        self._mark_dirty()

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        stream_id = stream.request.stream_id
        if self._responses.send_data(stream_id, data) > _LEAST_UNSENT_BYTES:
            self._over.add(stream_id)
        self._call_flush()

    def text_writer(self, stream: HttpStream, frame: TextFrame) -> TextWriter:
        return self._responses.text_writer(stream.request.stream_id, frame, stream.send, self._call_flush)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        stream_id = stream.request.stream_id
        self._num_ended += self._responses.num_unsent(stream_id)
        self._responses.send_end(stream_id, trailers if stream.takes_trailers else ())
        self._forget(stream_id)
        self._mark_dirty()

    def _is_written(self, stream_id: int) -> bool:
        return not self._has_peer or self._responses.is_written(stream_id)

    def _on_changed(self) -> None:
        """There may be something to write, and another deadline."""
        self._mark_dirty()
        self._connection.adjust()

    def _mark_dirty(self) -> None:
        if not self._is_dirty and (self._protocol.has_output or self._out):
            self._flush_soon()

    def _call_flush(self) -> bool:
        """False: the flush will write no bodies."""
        if not self._is_dirty:
            self._flush_soon()
        return not self._connection.is_writing_paused

    def flush(self) -> None:
        self._is_dirty = False
        connection, protocol, out = self._connection, self._protocol, self._out
        if not connection.takes_output:
            out.clear()
            self._tell_written()
            return
        out += protocol.take_control()
        has_more = False
        if not connection.is_writing_paused and connection.is_open:
            output = protocol.take_data(_FLUSH_BYTES)
            out += output.frames
            has_more = output.has_more
            if self._held_back or output.held or has_more:
                self._watch_progress(output.sent, output.held)
                connection.adjust()
            for stream in output.ended:
                if not stream.has_read_request:
                    stream.early_since = self._loop.time()
                    connection.adjust()
        connection.write_out()
        if self._on_written:
            self._tell_written()
        if connection.is_writing_paused:
            if connection.num_unwritten > self._limits.max_control_bytes:
                self._abort()  # only answers to the peer's control frames can have become so much
                return
            connection.adjust()  # holds_enough may be true by now
        if self._over:
            self._judge_shares()
        if self._turns:
            self._give_turns()
        if protocol.has_drained and connection.is_open:
            connection.linger()
        elif has_more:
            self._mark_dirty()

    def _watch_progress(self, sent: Sequence[Http2Stream], held: Sequence[Http2Stream]) -> None:
        """Some streams have sent what they could, and others nothing."""
        now = self._idle_since = self._loop.time()  # the peer has something to read: it is not idle before
        held_back = self._held_back
        for stream in sent:
            if not stream.data:
                held_back.pop(stream.id, None)
                continue
            num_sent = stream.num_partly_sent
            _, num_before = held_back.setdefault(stream.id, (now, num_sent))
            if num_sent - num_before >= self._limits.stall_s * self._limits.stall_bytes_per_s:
                held_back[stream.id] = (now, num_sent)
                held_back.move_to_end(stream.id)
        for stream in held:
            held_back.setdefault(stream.id, (now, stream.num_partly_sent))

    def _judge_shares(self) -> None:
        """Block the streams with more than their share unsent, and unblock those with less than a quarter of it."""
        share = _UNSENT_BYTES // max(1, len(self._responses.streams))
        high = max(_LEAST_UNSENT_BYTES, min(self._limits.unsent_bytes, share))
        for stream_id in tuple(self._over):
            num_unsent = self._responses.num_unsent(stream_id)
            stream = self._exchanges.get(stream_id)
            if stream is None:
                self._over.discard(stream_id)
                continue
            is_over = num_unsent > (high // 4 if stream.is_blocked else high)
            if not is_over and num_unsent <= _LEAST_UNSENT_BYTES:
                self._over.discard(stream_id)
            self._set_blocked(stream, is_over or self._connection.is_writing_paused)

    # The end, and the deadlines.

    def drain(self) -> None:
        """Send two GOAWAYs: requests on their way when the first arrives are still taken (RFC 9113 §6.8)."""
        if not self._protocol.is_draining:
            self._protocol.start_drain()
            self._drain_due = self._loop.time() + self._limits.drain_round_trip_s
            self._on_changed()

    def next_due(self) -> float | None:
        return min((due for due, _ in self._deadlines()), default=None)

    def on_due(self) -> None:
        _, act = min(self._deadlines(), key=lambda deadline: deadline[0])
        act()
        self._mark_dirty()

    def _deadlines(self) -> Iterator[tuple[float, Callable[[], None]]]:
        """Each with what happens then."""
        limits = self._limits
        if self._pending_head is not None:
            yield self._head_since + limits.head_s, self._end_slow_head
        if self._drain_due is not None:
            yield self._drain_due, self._finish_drain
        elif not self._protocol.is_draining and not self._exchanges and not self._held_back:
            yield self._idle_since + limits.idle_s, self.drain
        if self._awaited:
            is_shut = self._room.is_shut
            for stream_id, body in self._awaited.items():
                waits_for_us = is_shut or stream_id in self._aside
                if not waits_for_us or self._protocol.may_send(stream_id):
                    yield body.due, partial(self._fail_body, stream_id)
        if early := self._protocol.early:
            first = next(iter(early.values()))
            yield first.early_since + limits.linger_s, partial(self._protocol.break_off, first.id)
        if self._held_back:
            stream_id, (since, _) = next(iter(self._held_back.items()))
            yield since + limits.stall_s, partial(self._end_stalled, stream_id)

    def _end_slow_head(self) -> None:
        if self._pending_head:  # a request's: log it; the peer gets no more than GOAWAY
            calm = Http2ErrorCode.ENHANCE_YOUR_CALM
            self._context.refuse(408, slow_head(self._limits.head_s), self.peer, self._head_since, None, calm)
        self._protocol.fail(Http2ErrorCode.ENHANCE_YOUR_CALM)
        self._end()

    def _finish_drain(self) -> None:
        self._drain_due = None
        self._protocol.finish_drain()

    def _fail_body(self, stream_id: int) -> None:
        self._end_body(stream_id)
        error = ServiceError(ErrorKind.REQUEST_TIMEOUT, SLOW_BODY, "request_timeout")
        self._exchanges[stream_id].fail_body(error)

    def _end_stalled(self, stream_id: int) -> None:
        del self._held_back[stream_id]
        self._protocol.reset(stream_id, Http2ErrorCode.CANCEL)
        self._drop(stream_id)
