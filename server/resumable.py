"""Streams that outlive their connection: their events are kept for a while, and a client that comes back has each once.

    generation ─▶ HttpStream ─▶ EventLog ─ numbers and keeps events ─▶ the connection that asked, or one that came back

Where the client goes, the answer goes on for GRACE_S; then it is cancelled as any other. Only its tenant finds it.
Thread: loop.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial

from core.errors import ErrorKind, InvalidRequest, ServiceError
from server.api.replies import EVENT_FIELDS
from server.wire.messages import Headers, Peer, ResponseHead
from server.wire.sse import EVENT_END
from server.wire.stream import HttpStream, StreamCarrier, WrittenCallback

GRACE_S = 60.0  # for a client to come back, and for an answer that has ended to be asked for again
MOST_BYTES = 4 * 2**20  # of one stream's events: the oldest go first
MOST_BYTES_IN_ALL = 64 * 2**20  # streams that have ended go first, the oldest of the tenant that has most

ErrorEvent = Callable[[ServiceError, str, int], bytes]  # see Surface.elsewhere


class EventLog(StreamCarrier):
    """One answer's events. Between its stream and whichever connection reads it.

    Attributes:
        num_bytes: kept.
        is_whole: the answer has ended.
    """

    def __init__(
        self, stream: HttpStream, owner: "ResumableStreams", place: tuple[str, str], elsewhere: ErrorEvent
    ) -> None:
        self.num_bytes = 0
        self.is_whole = False
        self._stream = stream
        self._owner = owner
        self._place = place
        self._elsewhere = elsewhere
        self._first: StreamCarrier | None = stream.carrier  # the connection that has asked, while it is there
        self._reader: HttpStream | None = None  # of a client that has come back
        self._left: asyncio.Future[None] | None = None  # ends its handler
        self._events: deque[bytes] = deque()
        self._num_events = 0  # ever: ids count from 1
        self._is_kept = True
        self._timer: asyncio.TimerHandle | None = None
        stream.move_to(self)
        stream.on_peer_lost = self._lose_peer

    @property
    def has_begun(self) -> bool:
        return self._stream.head_sent

    # What the stream asks of its carrier.

    @property
    def peer(self) -> Peer:
        assert self._first is not None, "the head is read while the connection that asked is there"
        return self._first.peer

    def start_body(self, stream: HttpStream) -> None:
        """It has been read."""

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        if self._first is not None:
            self._first.write_head(stream, head)

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        """Whole events. Comments have no ids, and are not kept."""
        numbered = bytearray()
        for block in data.split(EVENT_END)[:-1]:
            if not block.startswith(b":"):
                self._num_events += 1
                block = b"id: %d\n" % self._num_events + block
                if self._is_kept:
                    self._keep(block + EVENT_END)
            numbered += block + EVENT_END
        if self._first is not None:
            self._first.write_data(stream, bytes(numbered))
        elif self._reader is not None:
            self._reader.send(bytes(numbered))

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self._grow(len(event))
        while self.num_bytes > MOST_BYTES:
            self._grow(-len(self._events.popleft()))

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.is_whole = True
        if self._first is not None:
            self._first.write_end(stream, trailers)
        elif self._reader is not None:
            self._reader.end(trailers)
            self._let_reader_go()
        self._start_clock()

    def call_once_written(self, stream: HttpStream, callback: WrittenCallback) -> None:
        if self._first is not None:
            self._first.call_once_written(stream, callback)
        elif self._reader is not None:
            self._reader.call_once_written(callback)
        else:
            callback(self._owner.clock())

    # Its readers.

    async def send_to(self, reader: HttpStream, last_id: int) -> None:
        """Send what follows an event, and go on as the answer does, until it ends or the reader goes.

        A reader takes the place of whoever has read until now.

        Raises:
            ServiceError: these events are no longer kept, or there never was such an event.
        """
        if last_id > self._num_events:
            raise InvalidRequest(
                f"Last-Event-ID is {last_id}, and the last event is {self._num_events}.", "Last-Event-ID"
            )
        missing = self._num_events - last_id
        if missing > len(self._events):
            message = "The events after Last-Event-ID are no longer stored. Send the request again."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "events_not_kept", "Last-Event-ID")
        self._detach()
        if self.is_whole and not missing:
            reader.send_head(ResponseHead(204, ()))  # a browser's EventSource asks no more
            reader.end()
            return
        reader.send_head(ResponseHead(200, EVENT_FIELDS))
        reader.send(b"".join(list(self._events)[len(self._events) - missing :]))
        if self.is_whole:
            reader.end()
            return
        self._stop_clock()
        self._reader, self._left = reader, asyncio.get_running_loop().create_future()
        reader.on_disconnect = partial(self._lose_reader, reader)
        reader.on_blocked = partial(self._stream.set_blocked, True)
        reader.on_unblocked = partial(self._stream.set_blocked, False)
        self._stream.set_blocked(reader.is_blocked)
        await self._left

    def _lose_peer(self) -> bool:
        """The connection that asked has gone. Returns: the answer goes on."""
        self._first = None
        self._wait()
        return True

    def _lose_reader(self, reader: HttpStream) -> None:
        if reader is self._reader:
            self._let_reader_go()
            self._wait()

    def _detach(self) -> None:
        """Whoever reads now reads no more."""
        if self._first is not None:
            if not self.is_whole:
                self._first.write_data(self._stream, self._taken())
                self._first.write_end(self._stream, ())
            self._first = None
        elif self._reader is not None:
            self._reader.send(self._taken())
            self._reader.end()
            self._let_reader_go()

    def _taken(self) -> bytes:
        message = "Another connection has resumed this stream. It continues there."
        return self._elsewhere(
            ServiceError(ErrorKind.CONFLICT, message, "stream_taken"), self._place[1], self._num_events
        )

    def _let_reader_go(self) -> None:
        reader, left, self._reader, self._left = self._reader, self._left, None, None
        if reader is not None:
            reader.on_disconnect = reader.on_blocked = reader.on_unblocked = None
        if left is not None and not left.done():
            left.set_result(None)

    def _wait(self) -> None:
        self._stream.set_blocked(False)
        self._start_clock()

    # Its end, and its bounds.

    def _start_clock(self) -> None:
        self._stop_clock()
        self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._expire)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.is_whole or (self._first is None and self._reader is None):
            self.close()

    def close(self) -> None:
        """Keep nothing more. An answer that nobody reads is cancelled; one that somebody reads goes on."""
        self._stop_clock()
        self._owner.forget(self._place)
        self._is_kept = False
        self._events.clear()
        self._grow(-self.num_bytes)
        self._stream.on_peer_lost = None
        if self._first is None and self._reader is None and not self.is_whole:
            self._stream.disconnect()

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._owner.grow(num_bytes)


class ResumableStreams:
    """clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], most_bytes: int = MOST_BYTES_IN_ALL) -> None:
        self.clock = clock
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._logs: OrderedDict[tuple[str, str], EventLog] = OrderedDict()  # by tenant and request, oldest first

    def hold(self, stream: HttpStream, tenant: str, request_id: str, elsewhere: ErrorEvent) -> None:
        """Number and keep the events of an answer whose head has not been sent."""
        place = tenant, request_id
        self._logs[place] = EventLog(stream, self, place, elsewhere)

    def find(self, tenant: str, request_id: str) -> EventLog:
        """Raises ServiceError: there is none of the tenant's."""
        if (log := self._logs.get((tenant, request_id))) is not None and log.has_begun:
            return log
        message = (
            "There is no stream with this id. It was not requested with resumable: true, or nobody resumed it within "
            f"{GRACE_S:.0f} s, or it ended as long ago."
        )
        raise ServiceError(ErrorKind.NOT_FOUND, message, "stream_not_kept")

    def forget(self, place: tuple[str, str]) -> None:
        self._logs.pop(place, None)

    def grow(self, num_bytes: int) -> None:
        """One of them keeps so many bytes more."""
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes and self._logs:
            held = Counter[str]()
            for (tenant, _), log in self._logs.items():
                held[tenant] += log.num_bytes
            largest = held.most_common(1)[0][0]
            of_largest = [log for (tenant, _), log in self._logs.items() if tenant == largest]
            next((log for log in of_largest if log.is_whole), of_largest[0]).close()
