"""Request bodies of an HTTP/2 connection: what is held of them, and what may still come. Thread: loop.

What a handler does not read is not acknowledged: the peer's windows shut, and nothing but them holds it back. Of what
is read, too much at once shuts the streams' windows, all but the oldest's (body_room); the connection's stays open for
that one, unless those that the server lets go on are on other connections.
"""

from collections.abc import Callable

from core.errors import ErrorKind, ServiceError
from server.wire.body_clock import BodyClock
from server.wire.body_room import BodyRoom, HeldBody
from server.wire.connection_limits import ConnectionLimits
from server.wire.exchanges import SLOW_BODY
from server.wire.http2 import Http2Protocol
from server.wire.stream import HttpStream


class Upload:
    """The body of one stream's request.

    Attributes:
        held: while the handler waits for it.
        num_unread: bytes not acknowledged; num_shut: acknowledged for the connection alone.
    """

    __slots__ = ("held", "is_complete", "num_shut", "num_unread", "stream")

    def __init__(self, stream: HttpStream) -> None:
        self.stream = stream
        self.held: HeldBody | None = None
        self.num_unread = 0
        self.num_shut = 0
        self.is_complete = not stream.request.has_body

    @property
    def stream_id(self) -> int:
        return self.stream.request.stream_id


class Http2Uploads:
    """Those of one connection.

    Args:
        room: of this connection.
        clock: monotonic seconds.
        changed: called when windows were opened, or clocks set, without the peer's doing.
        break_down: called in the handling of what is a fault of ours here, but not of whoever called.

    Attributes:
        awaited: those whose handlers wait for them.
    """

    def __init__(
        self,
        protocol: Http2Protocol,
        limits: ConnectionLimits,
        room: BodyRoom,
        clock: Callable[[], float],
        changed: Callable[[], None],
        break_down: Callable[[], None],
    ) -> None:
        self._protocol = protocol
        self._limits = limits
        self._room = room
        self._clock = clock
        self._changed = changed
        self._break_down = break_down
        self.awaited: dict[Upload, BodyClock] = {}

    def await_body(self, upload: Upload) -> None:
        """Its handler begins to read it; it is not complete."""
        self.awaited[upload] = BodyClock(self._limits, self._clock())
        held = upload.held = HeldBody(upload.stream.body_client, self._let_on, self._break_down)
        self._room.open(held)
        if upload.num_unread:
            self._room.add(held, upload.num_unread)
            self._acknowledge(upload, held)

    def receive(self, upload: Upload, data: bytes) -> None:
        upload.stream.receive_body(data)
        if upload.held is not None:
            self.awaited[upload].receive(len(data), self._clock())
        upload.num_unread += len(data)
        if upload.stream.is_reading_body and upload.held is not None:
            self._room.add(upload.held, len(data))
            self._acknowledge(upload, upload.held)

    def complete(self, upload: Upload) -> None:
        upload.is_complete = True
        if upload.held is not None:
            self._end(upload, upload.held)
        upload.stream.complete_body()

    def forget(self, upload: Upload) -> None:
        """Its stream is not ours any more: the peer may send what it likes on it."""
        if upload.held is not None:
            self._end(upload, upload.held)
        if upload.num_shut:
            self._protocol.reopen(upload.stream_id, upload.num_shut)
        if upload.num_unread:
            self._protocol.acknowledge(upload.stream_id, upload.num_unread)

    @property
    def first_due(self) -> tuple[float, Upload] | None:
        """Until when one has to go on, and which; those that wait for us have time."""
        is_shut = bool(self.awaited) and self._room.is_shut
        first = None
        for upload, clock in self.awaited.items():
            if (upload.num_shut or is_shut) and not self._protocol.may_send(upload.stream_id):
                continue
            if first is None or clock.due < first[0]:
                first = clock.due, upload
        return first

    def fail(self, upload: Upload) -> None:
        """It was too slow."""
        if upload.held is not None:
            self._end(upload, upload.held)
        upload.stream.fail_body(ServiceError(ErrorKind.REQUEST_TIMEOUT, SLOW_BODY, "request_timeout"))

    def _acknowledge(self, upload: Upload, held: HeldBody) -> None:
        """Let the peer send as much again as it has sent, as far as there is room for it."""
        if self._room.may_grow(held):
            if upload.num_shut:
                self._protocol.reopen(upload.stream_id, upload.num_shut)
                upload.num_shut = 0
            if upload.num_unread:
                self._protocol.acknowledge(upload.stream_id, upload.num_unread)
                upload.num_unread = 0
        elif upload.num_unread and not self._room.is_shut:
            self._protocol.acknowledge_aside(upload.num_unread)
            upload.num_shut += upload.num_unread
            upload.num_unread = 0

    def _let_on(self) -> None:
        """There may be room: for those that had to wait for it, the clock begins again."""
        for upload in self.awaited:
            if not self._protocol.may_send(upload.stream_id):
                self.awaited[upload] = BodyClock(self._limits, self._clock())
        for upload in self.awaited:
            if upload.held is not None and upload.stream.is_reading_body:
                self._acknowledge(upload, upload.held)
        self._changed()

    def _end(self, upload: Upload, held: HeldBody) -> None:
        """It is complete, or nobody waits for it any more."""
        upload.held = None
        del self.awaited[upload]
        if upload.num_unread:
            self._protocol.acknowledge(upload.stream_id, upload.num_unread)
            upload.num_unread = 0
        self._room.close(held)
