"""One TCP connection: bytes to streams, streams to bytes, and the clocks that end it. Thread: loop.

Decisions a reader may look for:
- EOF from the peer means that it has left, and cancels its request. HTTP/1.1 allows a client to close its sending side
  and read on, but a client that closes everything sends the very same FIN, and its KV blocks must be free at once.
- While more than a head's worth of pipelined bytes waits, or a body nobody reads, reading is paused. The end of such a
  peer is seen at the next write.
- After an answer to a broken request, or to one whose body was not read, the sending side is closed and what still
  comes is thrown away for a while: closing with unread bytes sends RST, which would destroy the answer on its way.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from core.errors import ErrorKind, ServiceError
from server.connection_limits import ConnectionLimits
from server.deadline import DeadlineTimer
from server.http1 import CONTINUE, Http1Protocol
from server.messages import BodyChunk, BodyEnd, Event, Headers, HttpRequest, ProtocolViolation, ResponseHead
from server.stream import ClientDisconnected, HttpStream
from server.write_batch import WriteBatch

logger = logging.getLogger(__name__)

Handler = Callable[[HttpStream], Awaitable[None]]
# (status, message, client, the stream whose body or handler failed, if any) -> what ends the connection
Refuse = Callable[[int, str, str, HttpStream | None], tuple[Headers, bytes]]


class ConnectionRegistry(Protocol):
    """Who knows all connections, and all handlers."""

    def admit(self, connection: "Connection") -> bool:
        """Count the connection in; False refuses it, and it is closed at once."""
        ...

    def forget(self, connection: "Connection") -> None:
        """An admitted connection is lost."""
        ...

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Hold the handler's task until it is done: it may outlive its connection."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionContext:
    """What all connections of a listener share."""

    handler: Handler
    refuse: Refuse
    limits: ConnectionLimits
    registry: ConnectionRegistry
    loop: asyncio.AbstractEventLoop
    batch: WriteBatch
    date: Callable[[], bytes]


class _Closing(enum.Enum):
    """How far the end of the connection has come."""

    NO = enum.auto()
    REFUSED = enum.auto()  # an error is the last to be written
    LINGERING = enum.auto()
    CLOSED = enum.auto()  # by us; the transport may still have bytes to write


class Connection(asyncio.Protocol):
    """Serves HTTP/1.1 on one transport, one exchange at a time."""

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._limits = context.limits
        self._loop = context.loop
        self._batch = context.batch
        self._protocol = Http1Protocol(context.limits.head, context.date)
        self._timer = DeadlineTimer(context.loop, self._next_due, self._on_due)
        self._transport: asyncio.Transport
        self.client = ""  # the peer's address, once there is one
        self._is_admitted = False
        self._stream: HttpStream | None = None
        self._task: asyncio.Task[None] | None = None  # of the stream's handler
        self._out: list[bytes] = []
        self._is_dirty = False
        self._closing = _Closing.NO
        self._is_reading_paused = False
        self._is_writing_paused = False
        self._body_is_awaited = False
        self._exchange_is_over = False  # and the next one has not begun
        self._num_lingered = 0
        self._waiting_since = 0.0  # for a request, its head, its body or the end, whichever it is now
        self._stalled_since: float | None = None
        self._num_stalled = 0  # bytes unsent then

    @property
    def is_busy(self) -> bool:
        """A request is being received or answered, or its answer is not yet written."""
        return self._stream is not None or bool(self._out) or not self._protocol.is_idle

    # The transport's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.client = _shown_address(transport.get_extra_info("peername"))
        self._is_admitted = self._context.registry.admit(self)
        if not self._is_admitted:
            self.abort()
            return
        high = self._limits.unsent_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self._waiting_since = self._loop.time()
        self._timer.arm()

    def data_received(self, data: bytes) -> None:
        if self._closing is not _Closing.NO:
            self._throw_away(data)
            return
        if self._protocol.is_idle:
            self._waiting_since = self._loop.time()
        self._handle_events(self._protocol.receive(data))

    def eof_received(self) -> bool:
        """The peer has left. False: the transport closes itself."""
        if self._stream is not None:
            self.abort()
        else:
            self._write_out()
            self._close()
        self._end_of_peer()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = _Closing.CLOSED
        self._stalled_since = None  # or a late word of the transport's would set the clock again
        self._timer.cancel()
        self._out.clear()
        if self._is_admitted:
            self._context.registry.forget(self)
        self._end_of_peer()

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self._watch_stall()
        if self._stream is not None:
            self._stream.set_blocked(True)

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._closing is not _Closing.CLOSED:
            self._stalled_since = None
        if self._stream is not None:
            self._stream.set_blocked(False)
        else:
            self._go_on()
        self._timer.arm()

    # What the protocol says.

    def _handle_events(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is HttpRequest:
                self._start_stream(event)
            elif type(event) is BodyChunk:
                if self._stream is not None:
                    self._stream.receive_body(event.data)
            elif type(event) is BodyEnd:
                if self._stream is not None:
                    self._stream.complete_body()
            elif type(event) is ProtocolViolation:
                self._refuse(event.status, event.message)
        self._adjust_reading()
        self._timer.arm()

    def _start_stream(self, request: HttpRequest) -> None:
        if request.stream_id >= self._limits.num_requests:
            self._protocol.keep_alive = False
        self._body_is_awaited = False
        stream = self._stream = HttpStream(request, self)
        self._task = self._loop.create_task(self._serve(stream))
        self._context.registry.keep_task(self._task)

    async def _serve(self, stream: HttpStream) -> None:
        """Run the handler, and see that the exchange ends with it. Nothing it raises is lost."""
        try:
            await self._context.handler(stream)
        except ClientDisconnected:
            logger.debug("the client left before its request was read")
        except asyncio.CancelledError:
            if stream.is_open:  # it was not we who cancelled: something that the handler awaited was cancelled
                self.abort()
            raise
        except Exception:
            logger.exception("the handler of %s %s failed", stream.request.method, stream.request.path)
        else:
            if stream.is_open:
                logger.error("the handler of %s %s left its response open", stream.request.method, stream.request.path)
        if stream.is_open:
            self._task = None  # it ends by itself
            self._refuse(500, "The server failed to answer. The fault is not in the request; try again later.")

    def _refuse(self, status: int, message: str) -> None:
        """End the connection with an error; without one where another head has gone out already."""
        stream = self._stream
        if stream is not None and stream.head_sent:
            self.abort()
            return
        self._protocol.stop_reading()
        headers, body = self._context.refuse(status, message, self.client, stream)
        self._append(self._protocol.send_head(ResponseHead(status, headers)))
        self._append(self._protocol.send_data(body))
        self._closing = _Closing.REFUSED
        self._end_of_peer()

    def _end_of_peer(self) -> None:
        """There is nobody to answer any more: tell the stream, or cancel its handler. Idempotent."""
        self._protocol.receive_eof()
        stream, task = self._stream, self._task
        self._stream = self._task = None
        if stream is not None and not stream.disconnect() and task is not None:
            task.cancel()

    # What the stream asks (StreamCarrier).

    def start_body(self, stream: HttpStream) -> None:
        self._body_is_awaited = True
        self._waiting_since = self._loop.time()
        # RFC 9110 §10.1.1: 100 may be left out once content has come
        if stream.request.expects_continue and not stream.num_body_bytes and not self._protocol.has_read_request:
            self._append(CONTINUE)
        self._adjust_reading()
        self._timer.arm()

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self._append(self._protocol.send_head(head))

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self._out.append(self._protocol.send_data(data))
        if not self._is_dirty:
            self._is_dirty = True
            self._batch.add(self)

    def write_end(self, stream: HttpStream) -> None:
        self._append(self._protocol.send_end())
        self._stream = self._task = None
        self._exchange_is_over = True
        self._waiting_since = self._loop.time()

    def _append(self, data: bytes) -> None:
        self._out.append(data)
        if not self._is_dirty:
            self._is_dirty = True
            self._batch.add(self)

    def flush(self) -> None:
        """Write what has been sent, at once. Then the next request, or the end."""
        self._is_dirty = False
        self._write_out()
        if self._stream is None:
            self._go_on()

    def _write_out(self) -> None:
        out = self._out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            if data and not self._transport.is_closing():
                self._transport.write(data)

    def _go_on(self) -> None:
        """No exchange is under way: serve the next request, or end the connection."""
        if self._closing is _Closing.REFUSED:
            self._linger()
        if self._closing is not _Closing.NO or not self._exchange_is_over or self._out:
            return
        if not self._protocol.keep_alive:
            has_read_all = self._protocol.has_read_request and not self._protocol.num_buffered
            self._close() if has_read_all else self._linger()
        elif not self._is_writing_paused:
            # A peer that pipelines and does not read gets no further answers to hold for it
            self._exchange_is_over = False
            self._handle_events(self._protocol.next_request())

    # The end.

    def close_after_answer(self) -> None:
        """Take one more request at most: the answer under way, or the first to come, is the last."""
        self._protocol.keep_alive = False

    def drain(self) -> None:
        """Take no further request: close now when idle, else after the response that is under way."""
        self.close_after_answer()
        if not self.is_busy:
            self._close()

    def abort(self) -> None:
        """Close now; what is unsent is lost."""
        self._closing = _Closing.CLOSED
        self._out.clear()
        self._transport.abort()

    def _close(self) -> None:
        """Close once what is written has been read; a peer that does not read it is given stall_s."""
        self._closing = _Closing.CLOSED
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._watch_stall()

    def _linger(self) -> None:
        self._closing = _Closing.LINGERING
        self._waiting_since = self._loop.time()
        if self._transport.is_closing():
            return
        if not self._transport.can_write_eof():
            self._close()
            return
        self._transport.write_eof()
        self._adjust_reading()
        self._timer.arm()

    def _throw_away(self, data: bytes) -> None:
        self._num_lingered += len(data)
        if self._num_lingered > self._limits.linger_bytes:
            self.abort()

    # Reading's brake, and the clocks.

    def _adjust_reading(self) -> None:
        """Pause reading while enough is held unread."""
        stream = self._stream
        has_enough = self._closing is _Closing.NO and (
            self._protocol.num_buffered > self._limits.head.head_bytes
            or (
                stream is not None
                and not self._protocol.has_read_request
                and not stream.is_reading_body
                and stream.num_body_bytes > self._limits.unread_body_bytes
            )
        )
        if has_enough == self._is_reading_paused or self._transport.is_closing():
            return
        self._is_reading_paused = has_enough
        if has_enough:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _watch_stall(self) -> None:
        self._stalled_since = self._loop.time()
        self._num_stalled = self._transport.get_write_buffer_size()
        self._timer.arm()

    def _next_due(self) -> float | None:
        limits = self._limits
        if self._stalled_since is not None:
            return self._stalled_since + limits.stall_s
        if self._closing is _Closing.LINGERING:
            return self._waiting_since + limits.linger_s
        if self._closing is not _Closing.NO:
            return None
        if self._stream is not None:
            if not self._body_is_awaited or self._protocol.has_read_request:
                return None
            return self._waiting_since + limits.body_s + self._stream.num_body_bytes / limits.body_bytes_per_s
        return self._waiting_since + (limits.idle_s if self._protocol.is_idle else limits.head_s)

    def _on_due(self) -> None:
        if self._stalled_since is not None:
            if self._transport.get_write_buffer_size() < self._num_stalled:
                self._watch_stall()  # it reads, if slowly
            else:
                self.abort()
        elif self._closing is _Closing.LINGERING:
            self._close()
        elif self._stream is not None:
            self._body_is_awaited = False
            slow = "The body came too slowly. Send it again, faster."
            self._stream.fail_body(ServiceError(ErrorKind.REQUEST_TIMEOUT, slow, "request_timeout"))
        elif self._protocol.is_idle:
            self._close()
        else:
            self._refuse(408, f"The request's head took longer than {self._limits.head_s:g} s.")


def _shown_address(address: Any) -> str:
    """`192.0.2.1:5000` or `[::1]:5000`; nothing where the peer has none that could be told."""
    if not isinstance(address, tuple):
        return ""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
