"""One TCP connection: its transport, its end, its clock, and its turn among the loop's writes. Thread: loop.

Requests and responses belong to its exchanges (http1_exchanges, http2_exchanges). Decisions:
- EOF means that the peer has left, and cancels its requests. A client may close its sending side and read on, but one
  that closes everything sends the very same FIN, and its KV blocks must be free at once.
- After an answer to a broken request, or to one whose body was not read, the connection lingers: it closes its sending
  side and drops what still comes. Closing with unread bytes sends RST, which would destroy the answer on its way.
- A bug in any callback costs its own connection: it is logged, and the requests end as if the peer had left. (The loop
  would log it, too, but keep a connection whose state is half changed.)
"""

import asyncio
import email.utils
import enum
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, Protocol, cast

from server.clock import DeadlineTimer
from server.wire.limits import ConnectionLimits
from server.wire.messages import Headers, Http2ErrorCode, Peer
from server.wire.stream import BodyRoom, ClientDisconnected, HttpStream, IncomingBody, WrittenCallback
from server.wire.tls import client_certificate

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class Flushable(Protocol):
    def flush(self) -> None: ...

    def break_down(self) -> None:
        """Called while an exception of flush() is handled."""


class WriteBatch:
    """The connections with bytes to write. flush_all writes them after an engine step; otherwise the loop soon does.

    Attributes:
        num_writes: so far, including those that connections made at once.
    """

    __slots__ = ("_dirty", "_is_scheduled", "_loop", "num_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_writes = 0
        self._loop = loop
        self._dirty: list[Flushable] = []
        self._is_scheduled = False

    def add(self, connection: Flushable) -> None:
        """Flush it in the next flush_all. The caller adds itself once until then."""
        self.num_writes += 1
        self._dirty.append(connection)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def flush_all(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            try:
                connection.flush()
            except Exception:  # a bug: the other connections go on
                connection.break_down()

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush_all()


Handler = Callable[[HttpStream], Awaitable[None]]
# (status, message, peer, when the first byte came by the loop's clock, the stream whose body or handler failed, if any,
# the HTTP/2 code that is sent instead of an answer, if one is) -> headers and body of the answer
Refuse = Callable[[int, str, Peer, float, HttpStream | None, Http2ErrorCode | None], tuple[Headers, bytes]]

SERVER_FAULT = "The server failed to answer. The fault is not in the request; try again later."
SLOW_BODY = "The body came too slowly. Send it again, faster."


def slow_head(head_s: float) -> str:
    return f"The request's head took longer than {head_s:g} s."


def http_date(wall_clock: Callable[[], float]) -> Callable[[], bytes]:
    """The Date field's value now. RFC 9110 §6.6.1: an origin server with a clock sends it.

    Args:
        wall_clock: seconds since the epoch.
    """
    return lambda: _format_date(int(wall_clock()))


@functools.lru_cache(1)
def _format_date(second: int) -> bytes:
    return email.utils.formatdate(second, usegmt=True).encode()


class ConnectionRegistry(Protocol):
    """The listener, as connections see it."""

    def opened(self, connection: "Connection") -> None:
        """The connection has its transport."""

    def forget(self, connection: "Connection") -> None:
        """The connection is lost."""

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Hold the handler's task until it is done: it may outlive its connection."""


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
    bodies: BodyRoom
    clock: Callable[[], float]  # monotonic seconds, finer than the loop's
    first_exchanges: "Callable[[Connection, ConnectionContext], Exchanges]"
    takes_upgrade: bool = False  # from HTTP/1.1 to HTTP/2


class Exchanges(ABC):
    """The requests and responses of one connection, in one protocol; the StreamCarrier of its streams."""

    def __init__(self, connection: "Connection", context: ConnectionContext, room: BodyRoom) -> None:
        """room: for the bodies of its requests."""
        self._connection = connection
        self._out = connection.out
        self._context = context
        self._limits = context.limits
        self._loop = context.loop
        self._clock = context.clock
        self._batch = context.batch
        self._room = room
        self._received_s = 0.0  # when the first byte of the current request came
        self._is_dirty = False  # flush() is going to be called
        self._on_written: list[tuple[int, WrittenCallback]] = []  # by stream id

    @property
    def peer(self) -> Peer:
        return self._connection.peer

    @property
    @abstractmethod
    def has_streams(self) -> bool:
        """A handler would miss the peer."""

    @property
    @abstractmethod
    def has_more(self) -> bool:
        """Received bytes are left for the loop's next turn: receive(b"") goes on."""

    @property
    @abstractmethod
    def holds_enough(self) -> bool:
        """Nothing more is to be read from the peer for now."""

    @abstractmethod
    def receive(self, data: bytes) -> None: ...

    @abstractmethod
    def set_blocked(self, is_blocked: bool) -> None:
        """The transport's buffer has become full, or has room again."""

    @abstractmethod
    def flush(self) -> None:
        """Write now what there is."""

    @abstractmethod
    def end_of_peer(self) -> None:
        """The peer has gone: tell the streams, or cancel their handlers. Idempotent."""

    @abstractmethod
    def drain(self) -> None:
        """Take no further request; close when those in progress are answered."""

    @abstractmethod
    def next_due(self) -> float | None:
        """The next deadline of an open connection, in the loop's seconds."""

    @abstractmethod
    def on_due(self) -> None: ...

    @abstractmethod
    def abandon(self, stream: HttpStream, is_cancelled: bool) -> None:
        """The stream's handler has left the response open: it returned, raised, or was cancelled from outside."""

    @abstractmethod
    def _is_written(self, stream_id: int) -> bool:
        """After a flush: nothing that was sent on the stream waits here, or the peer has gone."""

    def break_down(self) -> None:
        self._connection.break_down()

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        self._on_written.append((stream.request.stream_id, callback))
        if not self._is_dirty:  # there may be no flush
            self._tell_written()

    def _tell_written(self) -> None:
        waiting, self._on_written = self._on_written, []
        for stream_id, callback in waiting:
            if not self._is_written(stream_id):
                self._on_written.append((stream_id, callback))
                continue
            try:
                callback(self._clock())
            except Exception:  # too late for an answer
                logger.exception("an answer is written, and cannot be accounted for")

    def _flush_soon(self) -> None:
        """Only while it is not dirty."""
        self._is_dirty = True
        self._batch.add(self)

    def _begin_body(self, stream: HttpStream, on_room: Callable[[], None]) -> IncomingBody:
        """The stream's handler waits for its body from now on."""
        body = IncomingBody(stream.body_client, on_room, self.break_down, self._limits, self._loop.time())
        self._room.open(body)
        self._room.add(body, stream.num_body_bytes)
        return body


class _Closing(enum.Enum):
    """How far the end of the connection has come."""

    NO = enum.auto()
    LAST_WORDS = enum.auto()  # what is in `out` is the last to be written
    LINGERING = enum.auto()
    CLOSED = enum.auto()  # by us; the transport may still have bytes to write


_LAST_WORDS = _Closing.LAST_WORDS  # looked up at every write: a member of an enum costs 70 ns, a global 7


def _guarded(work: Callable[Concatenate["Connection", P], None]) -> Callable[Concatenate["Connection", P], None]:
    """For callbacks: an exception costs the connection, and not its caller."""

    @functools.wraps(work)
    def guarded(self: "Connection", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            work(self, *args, **kwargs)
        except Exception:
            self.break_down()

    return guarded


class _Drain(asyncio.Protocol):
    """Replaces TLS on its transport after the close_notify: drops what comes.

    Args:
        tls: hears when the connection is lost.
        throw_away: takes what comes.
    """

    def __init__(self, tls: asyncio.BaseProtocol, throw_away: Callable[[bytes], None]) -> None:
        self._tls = tls
        self._throw_away = throw_away

    def data_received(self, data: bytes) -> None:
        self._throw_away(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.connection_lost(exc)


class Connection(asyncio.Protocol):
    """Serves one transport.

    Attributes:
        out: what the exchanges want written at the next flush.
        is_writing_paused: the transport's buffer is full.
        is_secure: it is TLS.
        speaks_http2: by ALPN.
        is_misdirected: the peer speaks in the clear to a TLS port; every request is answered with that.
        is_draining: no further request is to be taken.
        closes_after_answer: set before connection_made: the first answer is the last. With HTTP/2, requests that are
            sent before the peer has heard of it are answered as well.
    """

    def __init__(self, context: ConnectionContext, peer: Peer) -> None:
        self.out: list[bytes] = []
        self.peer = peer
        self.is_writing_paused = self.is_secure = self.speaks_http2 = False
        self.is_misdirected = self.is_draining = self.closes_after_answer = False
        self._context = context
        self._limits = context.limits
        self._loop = context.loop
        self._exchanges: Exchanges
        self._timer = DeadlineTimer(context.loop, self._next_due, self._on_due)
        self._transport: asyncio.Transport
        self._lower: asyncio.Transport | None = None  # below TLS
        self._closing = _Closing.NO
        self._is_reading_paused = False
        self._waits_turn = False
        self._num_lingered = 0  # bytes thrown away
        self._lingering_since = 0.0
        self._stalled_since: float | None = None  # the peer reads nothing, or slowly
        self._num_stalled = 0  # bytes unsent then
        self._farewell_since: float | None = None  # TLS waits for the peer's close_notify

    # The transport's side.

    def tls_made(self, transport: asyncio.BaseTransport, lower: asyncio.Transport) -> None:
        """As connection_made.

        Args:
            lower: the transport that TLS writes to.
        """
        self._lower = lower
        self.connection_made(transport)

    @_guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._context.registry.opened(self)
        high = self._limits.unsent_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.is_secure = True
            self.peer = replace(self.peer, certificate=client_certificate(tls.getpeercert()))
            self.speaks_http2 = tls.selected_alpn_protocol() == "h2"
        self.go_on_with(self._context.first_exchanges(self, self._context))
        if self.speaks_http2:
            self._exchanges.receive(b"")  # RFC 9113 §3.4: the server's SETTINGS wait for nothing
        self._timer.arm()

    def data_received(self, data: bytes) -> None:
        if self._closing is not _Closing.NO:
            self._throw_away(data)
            return
        try:  # and not @_guarded: a call less for every read
            self._exchanges.receive(data)
            if len(data) >= self._limits.bytes_per_turn:
                self._wait_turn()
            self.adjust()
        except Exception:
            self.break_down()

    def _wait_turn(self) -> None:
        """Read and parse nothing until the loop has seen to other connections."""
        if not self._waits_turn:
            self._waits_turn = True
            self._loop.call_soon(self._take_turn)

    @_guarded
    def _take_turn(self) -> None:
        self._waits_turn = False
        if self._closing is _Closing.NO:
            if self._exchanges.has_more:
                self._exchanges.receive(b"")
            self.adjust()

    def eof_received(self) -> bool:
        """The peer has left. False: the transport closes itself."""
        self._end_with_peer()
        return False

    @_guarded
    def _end_with_peer(self) -> None:
        if self._exchanges.has_streams:
            self.abort()
        else:
            self.write_out()
            self.close()
        self._exchanges.end_of_peer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_clocks()
        self._timer.cancel()
        self.out.clear()
        try:
            self._context.registry.forget(self)
        finally:
            self._exchanges.end_of_peer()

    @_guarded
    def pause_writing(self) -> None:
        self.is_writing_paused = True
        self._watch_stall()
        self._exchanges.set_blocked(True)

    @_guarded
    def resume_writing(self) -> None:
        self.is_writing_paused = False
        if self._closing is not _Closing.CLOSED:
            self._stalled_since = None
        self._exchanges.set_blocked(False)
        self.adjust()

    # What the exchanges ask.

    @property
    def is_open(self) -> bool:
        """The end of the connection has not begun."""
        return self._closing is _Closing.NO

    @property
    def transport(self) -> asyncio.Transport:
        """For writes at once: `out` must be empty."""
        return self._transport

    @property
    def takes_output(self) -> bool:
        """`out` can still be written."""
        return self._closing in (_Closing.NO, _Closing.LAST_WORDS)

    @property
    def num_unwritten(self) -> int:
        """Bytes that the transport holds, and the one below it."""
        num_above = self._transport.get_write_buffer_size()
        return num_above if self._lower is None else num_above + self._lower.get_write_buffer_size()

    def serve(self, stream: HttpStream, wait_turn: Callable[[], Awaitable[None]] | None = None) -> None:
        """Start the stream's handler, once wait_turn has returned."""
        stream.task = self._loop.create_task(self._serve(stream, wait_turn))
        self._context.registry.keep_task(stream.task)

    async def _serve(self, stream: HttpStream, wait_turn: Callable[[], Awaitable[None]] | None) -> None:
        """Run the handler, and end the exchange if it has not. Log whatever it raises."""
        try:
            if wait_turn is not None:
                await wait_turn()
            await self._context.handler(stream)
        except ClientDisconnected:
            logger.debug("the client left before its request was read")
        except asyncio.CancelledError:
            if stream.is_open:  # not cancelled by us, but by something that the handler awaited
                stream.task = None
                self._abandon(stream, is_cancelled=True)
            raise
        except Exception:
            logger.exception("a request's handler failed")  # which: the record has its id, and a path may hold a key
        else:
            if stream.is_open:
                logger.error("a request's handler left its response open")
        if stream.is_open:
            stream.task = None  # it ends by itself
            self._abandon(stream, is_cancelled=False)

    @_guarded
    def _abandon(self, stream: HttpStream, is_cancelled: bool) -> None:
        self._exchanges.abandon(stream, is_cancelled)

    def go_on_with(self, exchanges: Exchanges) -> None:
        """They receive from now on."""
        self._exchanges = exchanges

    def write_out(self) -> None:
        """Write `out`."""
        out = self.out
        if out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            if data and not self._transport.is_closing():
                self._transport.write(data)
        if self._closing is _LAST_WORDS:
            self.linger()

    def end_after_output(self) -> None:
        """What is in `out` is the last to be written; the caller sees to it that it is."""
        self._closing = _Closing.LAST_WORDS

    def abort(self) -> None:
        """Close now; what is unsent is lost."""
        self._end_clocks()
        self.out.clear()
        self._transport.abort()

    def _end_clocks(self) -> None:
        self._closing = _Closing.CLOSED
        self._stalled_since = self._farewell_since = None  # a late callback of the transport must not start the clock

    def break_down(self) -> None:
        """Called while an exception, a bug of ours, is handled: it ends this connection and no other."""
        logger.exception("the connection from %s has failed, and is closed", self.peer)
        self.abort()

    def close(self) -> None:
        """Close once the peer has read what is written; one that does not read has stall_s.

        TLS waits for the peer's close_notify. A peer that keeps the connection in a pool may not look at it for hours:
        it has linger_s.
        """
        self._closing = _Closing.CLOSED
        self._adjust_reading()  # what still comes is to be thrown away
        self._transport.close()
        self._end_tls()
        if self.num_unwritten:
            self._watch_stall()
        if self.is_secure:
            self._farewell_since = self._loop.time()
            self._timer.arm()

    def linger(self) -> None:
        """Close the sending side, and throw away what still comes."""
        if self._transport.is_closing():
            self._closing = _Closing.CLOSED
        elif self._transport.can_write_eof():
            self._closing = _Closing.LINGERING
            self._lingering_since = self._loop.time()
            self._transport.write_eof()
            self.adjust()
        else:
            self.close()  # of TLS, whose close_notify ends the sending side alone

    def _end_tls(self) -> None:
        """Send FIN behind the close_notify, then throw away what comes without deciphering it.

        Not while TLS holds bytes that the transport below does not take: the close_notify is behind them.
        """
        lower = self._lower
        if lower is not None and not lower.is_closing() and not self._transport.get_write_buffer_size():
            lower.set_protocol(_Drain(lower.get_protocol(), self.data_received))
            lower.write_eof()

    def adjust(self) -> None:
        """Pause or resume reading, and set the clock; call it after any change that may concern them."""
        if self._exchanges.has_more and self._closing is _Closing.NO:
            self._wait_turn()
        self._adjust_reading()
        self._timer.arm()

    @_guarded
    def drain(self) -> None:
        """Close now when idle, else after the responses in progress. A new connection may still ask once."""
        self.is_draining = True
        if self._closing is _Closing.NO:
            self._exchanges.drain()

    # Reading's brake, and the clocks.

    def _throw_away(self, data: bytes) -> None:
        self._num_lingered += len(data)
        if self._num_lingered > self._limits.linger_bytes:
            self.abort()

    def _adjust_reading(self) -> None:
        has_enough = self._closing is _Closing.NO and (self._waits_turn or self._exchanges.holds_enough)
        if has_enough == self._is_reading_paused or self._transport.is_closing():
            return
        self._is_reading_paused = has_enough
        if has_enough:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _watch_stall(self) -> None:
        self._stalled_since = self._loop.time()
        self._num_stalled = self.num_unwritten
        self._timer.arm()

    def _next_due(self) -> float | None:
        if self._farewell_since is not None:
            return self._farewell_since + self._limits.linger_s
        if self._stalled_since is not None:
            return self._stalled_since + self._limits.stall_s
        if self._closing is _Closing.LINGERING:
            return self._lingering_since + self._limits.linger_s
        if self._closing is not _Closing.NO:
            return None
        return self._exchanges.next_due()

    @_guarded
    def _on_due(self) -> None:
        if self._farewell_since is not None:
            self._await_farewell(self._farewell_since + self._limits.linger_s)
        elif self._stalled_since is not None:
            self._judge_stall()
        elif self._closing is _Closing.LINGERING:
            self.close()
        else:
            self._exchanges.on_due()

    def _await_farewell(self, now: float) -> None:
        if not self.num_unwritten:
            self.abort()
            return
        self._farewell_since = now
        if self._stalled_since is not None and now >= self._stalled_since + self._limits.stall_s:
            self._judge_stall()

    def _judge_stall(self) -> None:
        num_read = self._num_stalled - self.num_unwritten
        if num_read >= self._limits.stall_s * self._limits.stall_bytes_per_s:
            self._watch_stall()  # it reads, if slowly
        else:
            self.abort()
