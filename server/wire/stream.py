"""One request's stream: its body in, its answer out, and news of a peer that leaves or reads slowly. Thread: loop.

A stream is the same for HTTP/1.1 and HTTP/2: its carrier frames and writes. Nothing here waits for the peer to read;
on_blocked tells the producer to stop, and on_unblocked to go on.

BodyRoom bounds what is buffered of all bodies. Once it is full, only the oldest body goes on, so that bodies complete
in their order and no two wait for each other; and the oldest of each client that holds less than an equal share, so
that bodies that fill the room and stop keep no other client out. Little more than twice the room is ever held. The room
itself pauses nothing: connections ask it, and shut their windows or stop reading.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Protocol

from core.errors import ErrorKind, ServiceError
from server.wire.limits import ConnectionLimits
from server.wire.messages import Headers, HttpRequest, Peer, ResponseHead, TextFrame, TextWriter

logger = logging.getLogger(__name__)


class ClientDisconnected(Exception):
    """The peer has gone before its request was read, or broke the protocol. Nobody is left to be answered."""


JSON_TYPE = b"application/json"

WrittenCallback = Callable[[float], None]  # called with the time, on the monotonic clock


class StreamCarrier(Protocol):
    """What a stream asks of its connection."""

    @property
    def peer(self) -> Peer: ...

    def start_body(self, stream: "HttpStream") -> None:
        """The handler wants the body: its clock starts, and a peer that waits for 100 Continue gets it."""

    def write_head(self, stream: "HttpStream", head: ResponseHead) -> None: ...

    def write_data(self, stream: "HttpStream", data: bytes) -> None: ...

    def text_writer(self, stream: "HttpStream", frame: TextFrame) -> TextWriter:
        """The stream's `send_text` in one call, once its head is sent."""
        return partial(stream.send_text, frame)

    def write_end(self, stream: "HttpStream", trailers: Headers) -> None: ...

    def call_once_written(self, stream: "HttpStream", callback: WrittenCallback) -> None:
        """Call it when the kernel has all that was sent on the stream so far, or never will."""


@dataclass(slots=True, eq=False, repr=False)
class HttpStream:
    """One request and its response. Thread: loop.

    Attributes:
        request: its head.
        body_client: the client to which BodyRoom counts its body.
        body_is_complete: nothing of the request is still to come.
        num_body_bytes: received, and held or dropped.
        task: of its handler; None: it is not to be cancelled.
        received_s: when its first byte came, on the monotonic clock.
        is_open: the response has not ended and the peer has not gone: what is sent now is on its way.
        has_lost_peer: the peer went before the response had ended.
        status: of the head, once it is sent.
        common_headers: added to the head, whatever it is.
        late_headers: asked for more headers when the head is written.
        is_blocked: the peer does not keep up: more than the high mark is unsent. `send` stays legal.
        on_disconnect: called once, when the peer goes before the response has ended. Without it, the handler's task is
            cancelled; with it, the handler ends by itself.
        on_peer_lost: called first when the peer goes; True: the answer goes on without it.
        on_blocked, on_unblocked: called when is_blocked changes.
    """

    request: HttpRequest
    _carrier: StreamCarrier
    received_s: float = 0.0
    is_open: bool = True
    has_lost_peer: bool = False
    status: int | None = None
    common_headers: Headers = ()
    late_headers: Callable[[], Headers] | None = None
    is_blocked: bool = False
    body_client: str = ""
    task: asyncio.Task[None] | None = None
    num_body_bytes: int = 0
    body_is_complete: bool = field(init=False)
    on_disconnect: Callable[[], None] | None = None
    on_peer_lost: Callable[[], bool] | None = None
    on_blocked: Callable[[], None] | None = None
    on_unblocked: Callable[[], None] | None = None
    _body: BytesIO = field(default_factory=BytesIO)  # not the pieces: many small ones would weigh more than they carry
    _body_error: ServiceError | None = None
    _is_reading: bool = False
    _waiter: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.body_is_complete = not self.request.has_body

    @property
    def peer(self) -> Peer:
        """The other end of the connection; a trusted proxy names its client in the head."""
        return self._carrier.peer

    @property
    def carrier(self) -> StreamCarrier:
        """For who wraps it (move_to)."""
        return self._carrier

    @property
    def head_sent(self) -> bool:
        return self.status is not None

    @property
    def is_reading_body(self) -> bool:
        """read_body waits for bytes that have not come."""
        return self._is_reading

    async def read_body(self, limit_bytes: int, client: str = "") -> bytes:
        """The whole body. Called at most once.

        Args:
            client: see body_client.

        Raises:
            ServiceError: BODY_TOO_LARGE, at once if content-length says so, else as soon as the limit is passed;
                REQUEST_TIMEOUT if it comes too slowly; or the error given to fail_body.
            ClientDisconnected: the peer left.
        """
        declared = self.request.header(b"content-length")
        if declared is not None and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
        self.body_client = client
        self._is_reading = True
        try:
            self._carrier.start_body(self)
            while not self.body_is_complete:  # checked after every wake-up
                self._check_body(limit_bytes)
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._check_body(limit_bytes)
        finally:
            self._is_reading = False
            self._waiter = None
        body = self._body.getvalue()  # not a copy
        self._body = BytesIO()
        return body

    def _check_body(self, limit_bytes: int) -> None:
        if not self.is_open:
            raise ClientDisconnected
        if self._body_error is not None:
            raise self._body_error
        if self.num_body_bytes > limit_bytes:
            self._body = BytesIO()
            raise _too_large(limit_bytes)

    def send_head(self, head: ResponseHead) -> None:
        """Send the status and the headers, once.

        Raises:
            ResponseError: the head cannot be sent (see Http1Protocol.send_head).
        """
        if self.is_open:
            late_headers = () if self.late_headers is None else self.late_headers()
            headers = head.headers + self.common_headers + late_headers
            self._carrier.write_head(self, ResponseHead(head.status, headers))
            self.status = head.status

    def send(self, data: bytes) -> None:
        """Append to the body. Written at the connection's next flush; dropped when the stream is not open."""
        if self.is_open:
            self._carrier.write_data(self, data)

    def send_text(self, frame: TextFrame, text: str) -> None:
        self.send(frame.around(text))

    def text_writer(self, frame: TextFrame) -> TextWriter:
        """The hot path: `send_text` of many texts. The head has been sent, so that the carrier no longer changes."""
        assert self.head_sent
        return self._carrier.text_writer(self, frame) if self.is_open else partial(self.send_text, frame)

    @property
    def takes_trailers(self) -> bool:
        """RFC 9110 §6.5.1: the client is known to take them. Over HTTP/1.1 none are sent."""
        return (self.request.header(b"te") or b"").lower() == b"trailers"

    def end(self, trailers: Headers = ()) -> None:
        """The response is complete.

        Args:
            trailers: for a client that takes them.
        """
        if self.is_open:
            self._carrier.write_end(self, trailers)
            self.is_open = False

    def send_document(self, status: int, body: bytes, headers: Headers = (), media_type: bytes = JSON_TYPE) -> None:
        """Answer with one document, whole."""
        self.send_head(ResponseHead(status, (*content_headers(body, media_type), *headers)))
        self.send(body)
        self.end()

    def call_once_written(self, callback: WrittenCallback) -> None:
        """Call it once, when the kernel has what was sent so far, or never will."""
        self._carrier.call_once_written(self, callback)

    # What follows is the connection's side.

    def move_to(self, carrier: StreamCarrier) -> None:
        """Replace the carrier (after an upgrade, or to record the answer) before anything has been sent."""
        assert not self.head_sent
        self._carrier = carrier

    def receive_body(self, data: bytes) -> None:
        self.num_body_bytes += len(data)
        self._body.write(data)
        self._wake()

    def complete_body(self) -> None:
        self.body_is_complete = True
        self._wake()

    def fail_body(self, error: ServiceError) -> None:
        """Wait no longer for the rest of the body: read_body raises the error."""
        self._body_error = error
        self._wake()

    def set_blocked(self, is_blocked: bool) -> None:
        if is_blocked == self.is_blocked:
            return
        self.is_blocked = is_blocked
        callback = self.on_blocked if is_blocked else self.on_unblocked
        if callback is not None:
            callback()

    def disconnect(self) -> None:
        """The peer has gone: tell the handler, or cancel it if it does not listen."""
        if self.on_peer_lost is not None and self.on_peer_lost():
            return
        self.has_lost_peer |= self.is_open
        self.is_open = False
        is_told = self._waiter is not None or self.on_disconnect is not None
        self._wake()
        if self.on_disconnect is not None:
            try:
                self.on_disconnect()
            except Exception:
                logger.exception("a handler cannot be told that its client has gone, and is cancelled")
                is_told = False
        if not is_told and self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def content_headers(body: bytes, media_type: bytes = JSON_TYPE) -> Headers:
    return ((b"content-type", media_type), (b"content-length", b"%d" % len(body)))


def _too_large(limit_bytes: int) -> ServiceError:
    return ServiceError(
        ErrorKind.BODY_TOO_LARGE, f"The body is larger than {limit_bytes} bytes. Send less.", "body_too_large"
    )


@dataclass(slots=True, eq=False, repr=False)
class IncomingBody:
    """One request's body, from when its handler waits for it until it is complete or given up.

    Its clock: each byte grants more time, up to body_s from now. So a body at body_bytes_per_s may take as long as it
    is, and what came fast earns no credit for silence.

    Attributes:
        client: to which BodyRoom counts it.
        num_bytes: buffered.
        on_room: called when the body may grow that had to wait; it may belong to several bodies of a connection.
        break_down: called while an exception of on_room is handled; it ends the body's connection, and not the one that
            has made room.
        due: when it is too slow, in the loop's seconds.
    """

    client: str
    on_room: Callable[[], None]
    break_down: Callable[[], None]
    _limits: ConnectionLimits
    due: float  # at first: now
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.due += self._limits.body_s

    def receive(self, num_bytes: int, now: float) -> None:
        limits = self._limits
        self.due = min(self.due + num_bytes / limits.body_bytes_per_s, now + limits.body_s)

    def restart(self, now: float) -> None:
        """Until now it has waited for room."""
        self.due = now + self._limits.body_s


@dataclass(slots=True)
class _Part:
    """One client's bodies in a room, oldest first, and their bytes."""

    bodies: dict[IncomingBody, None] = field(default_factory=dict)
    num_buffered: int = 0


class BodyRoom:
    """The bodies of a listener, or of one connection, in the order in which their reading began."""

    __slots__ = ("_bodies", "_limit_bytes", "_parts", "_whole", "num_buffered")

    def __init__(self, limit_bytes: int, whole: "BodyRoom | None" = None) -> None:
        """
        Args:
            limit_bytes: beyond it only the oldest may grow, and the oldest of each client with less than its share.
            whole: the room that contains this one.
        """
        self.num_buffered = 0
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._bodies: dict[IncomingBody, None] = {}
        self._parts: dict[str, _Part] = {}  # by client

    @property
    def is_full(self) -> bool:
        return self.num_buffered > self._limit_bytes

    @property
    def is_shut(self) -> bool:
        """No body here may grow: the whole room is full, and the bodies that may grow belong to other connections."""
        whole = self._whole
        return whole is not None and whole.is_full and not any(whole.may_grow(body) for body in self._bodies)

    def may_grow(self, body: IncomingBody) -> bool:
        if self.is_full and not self._goes_on(body):
            return False
        return self._whole is None or self._whole.may_grow(body)

    def _goes_on(self, body: IncomingBody) -> bool:
        """It may grow though the room is full."""
        if _oldest(self._bodies) is body:
            return True
        part = self._parts[body.client]
        return _oldest(part.bodies) is body and part.num_buffered * len(self._parts) < self._limit_bytes

    def open(self, body: IncomingBody) -> None:
        self._bodies[body] = None
        self._parts.setdefault(body.client, _Part()).bodies[body] = None
        if self._whole is not None:
            self._whole.open(body)

    def add(self, body: IncomingBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._hold(body, num_bytes)
        if self._whole is not None:
            self._whole._hold(body, num_bytes)

    def close(self, body: IncomingBody) -> None:
        """It is complete, or given up."""
        told = self._take_out(body)
        if self._whole is not None:
            told |= self._whole._take_out(body)
        for on_room, break_down in told.items():
            try:
                on_room()
            except Exception:
                break_down()

    def _hold(self, body: IncomingBody, num_bytes: int) -> None:
        self.num_buffered += num_bytes
        self._parts[body.client].num_buffered += num_bytes

    def _take_out(self, body: IncomingBody) -> dict[Callable[[], None], Callable[[], None]]:
        """Returns on_room of the bodies that may grow now, each once, with its break_down."""
        waiting = [other for other in self._bodies if not self._goes_on(other)] if self.is_full else []
        self._hold(body, -body.num_bytes)
        del self._bodies[body]
        part = self._parts[body.client]
        del part.bodies[body]
        if not part.bodies:
            del self._parts[body.client]
        return {
            other.on_room: other.break_down
            for other in waiting
            if other is not body and (not self.is_full or self._goes_on(other))
        }


def _oldest(bodies: dict[IncomingBody, None]) -> IncomingBody | None:
    return next(iter(bodies), None)
