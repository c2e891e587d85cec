"""Request bodies of an HTTP/2 connection: what is held of them, and what may still come. Thread: loop.

What a handler does not read is not acknowledged: the peer's windows shut, and nothing but them holds it back. Of what
is read, too much at once shuts the streams' windows, all but the oldest's (body_room); the connection's stays open for
that one, unless the oldest of the server is on another connection.
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
        clock: likewise.
        num_unread: bytes not acknowledged; num_shut: acknowledged for the connection alone.
    """

    __slots__ = ("clock", "held", "is_complete", "num_shut", "num_unread", "stream")

    def __init__(self, stream: HttpStream, clock: BodyClock) -> None:
        self.stream = stream
        self.clock = clock
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
    """

    def __init__(
        self,
        protocol: Http2Protocol,
        limits: ConnectionLimits,
        room: BodyRoom,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._protocol = protocol
        self._limits = limits
        self._room = room
        self._clock = clock
        self._changed = changed
        self._awaited: dict[int, Upload] = {}  # whose handlers wait for them

    def open(self, stream: HttpStream) -> Upload:
        return Upload(stream, BodyClock(self._limits, self._clock()))

    def await_body(self, upload: Upload) -> None:
        """Its handler begins to read it; it is not complete."""
        self._awaited[upload.stream_id] = upload
        upload.clock = BodyClock(self._limits, self._clock())
        held = upload.held = HeldBody(self._let_on)
        self._room.open(held)
        if upload.num_unread:
            self._room.add(held, upload.num_unread)
            self._acknowledge(upload, held)

    def receive(self, upload: Upload, data: bytes) -> None:
        upload.stream.receive_body(data)
        if upload.held is not None:
            upload.clock.receive(len(data), self._clock())
        upload.num_unread += len(data)
        if upload.stream.is_reading_body and upload.held is not None:
            self._room.add(upload.held, len(data))
            self._acknowledge(upload, upload.held)

    def complete(self, upload: Upload) -> None:
        upload.is_complete = True
        self._end(upload)
        upload.stream.complete_body()

    def forget(self, upload: Upload) -> None:
        """Its stream is not ours any more: the peer may send what it likes on it."""
        self._end(upload)
        if upload.num_shut:
            self._protocol.reopen(upload.stream_id, upload.num_shut)
        if upload.num_unread:
            self._protocol.acknowledge(upload.stream_id, upload.num_unread)

    @property
    def first_due(self) -> tuple[float, Upload] | None:
        """Until when one has to go on, and which; those that wait for us have time."""
        is_shut = bool(self._awaited) and self._room.is_shut
        first = None
        for stream_id, upload in self._awaited.items():
            if (upload.num_shut or is_shut) and not self._protocol.may_send(stream_id):
                continue
            if first is None or upload.clock.due < first.clock.due:
                first = upload
        return None if first is None else (first.clock.due, first)

    def fail(self, upload: Upload) -> None:
        """It was too slow."""
        self._end(upload)
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
        waiting = [upload for stream_id, upload in self._awaited.items() if not self._protocol.may_send(stream_id)]
        for upload in waiting:
            upload.clock = BodyClock(self._limits, self._clock())
        for upload in self._awaited.values():
            if upload.held is not None and upload.stream.is_reading_body:
                self._acknowledge(upload, upload.held)
        self._changed()

    def _end(self, upload: Upload) -> None:
        """It is complete, or nobody waits for it any more."""
        held, upload.held = upload.held, None
        if held is not None:
            del self._awaited[upload.stream_id]
            if upload.num_unread:
                self._protocol.acknowledge(upload.stream_id, upload.num_unread)
                upload.num_unread = 0
            self._room.close(held)
