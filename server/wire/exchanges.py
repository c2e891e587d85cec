"""What a connection and the exchanges on it ask of each other, whichever protocol they speak. Thread: loop.

The connection has the transport, its end and its clock; the exchanges have the protocol, the streams and their rules.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from h2.errors import ErrorCodes

from server.wire.body_room import BodyRoom
from server.wire.connection_limits import ConnectionLimits
from server.wire.messages import Headers
from server.wire.peer import Peer
from server.wire.stream import HttpStream
from server.wire.write_batch import Flushable, WriteBatch

if TYPE_CHECKING:
    from server.wire.connection import Connection

Handler = Callable[[HttpStream], Awaitable[None]]
# (status, message, peer, when the first byte came by the loop's clock, the stream whose body or handler failed, if any,
# the code of HTTP/2 that is sent instead of an answer, if one is) -> what ends the exchange
Refuse = Callable[[int, str, Peer, float, HttpStream | None, ErrorCodes | None], tuple[Headers, bytes]]

SERVER_FAULT = "The server failed to answer. The fault is not in the request; try again later."
SLOW_BODY = "The body came too slowly. Send it again, faster."


def slow_head(head_s: float) -> str:
    return f"The request's head took longer than {head_s:g} s."


class ConnectionRegistry(Protocol):
    """Who knows all connections, and all handlers."""

    def opened(self, connection: "Connection") -> None:
        """The connection has its transport."""
        ...

    def forget(self, connection: "Connection") -> None:
        """The connection is lost."""
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
    bodies: BodyRoom
    clock: Callable[[], float]  # monotonic seconds, finer than the loop's
    takes_upgrade: bool = False  # from HTTP/1.1 to HTTP/2


class Exchanges(Flushable, Protocol):
    """The requests and responses of one connection. `flush` writes what there is, at once."""

    @property
    def has_streams(self) -> bool:
        """Somebody would miss the peer."""
        ...

    @property
    def has_more(self) -> bool:
        """Of what was received, some is left for the loop's next turn: receive(b"") goes on."""
        ...

    @property
    def holds_enough(self) -> bool:
        """No further byte is to be read from the peer for now."""
        ...

    def receive(self, data: bytes) -> None: ...

    def set_blocked(self, is_blocked: bool) -> None:
        """The transport takes nothing more for now, or takes again."""
        ...

    def end_of_peer(self) -> None:
        """There is nobody to answer any more: tell the streams, or cancel their handlers. Idempotent."""
        ...

    def close_after_answer(self) -> None:
        """Take one more request, and what is on its way when the peer hears of the end."""
        ...

    def drain(self) -> None:
        """Take no further request; close when those under way are answered."""
        ...

    def next_due(self) -> float | None:
        """The next deadline of a connection that is not about to end, in the loop's seconds."""
        ...

    def on_due(self) -> None: ...

    def fail(self, stream: HttpStream) -> None:
        """The stream's handler is done, and has left the response open."""
        ...

    def break_off(self, stream: HttpStream) -> None:
        """The stream's handler has been cancelled, by nobody here."""
        ...
