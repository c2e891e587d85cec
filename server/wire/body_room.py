"""How many bytes of request bodies are held while they come, and which may go on coming. Thread: loop.

Once too much is held, the oldest body goes on: bodies are completed in their order, so that what is held becomes less,
and no two wait for each other. Beside it goes the oldest of each client that holds less than its even part: bodies that
fill the room and stop keep no other client's out, and little more than twice the room is held. It stops nobody from
reading: connections ask, and shut their windows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


class HeldBody:
    """One body that is being read, until it is complete or given up.

    Attributes:
        client: whose it is.
        num_bytes: held.
        on_room: called when more may come that was told to wait; perhaps for others of its connection.
        break_down: called in the handling of what on_room has raised: it costs the body's connection, and not the one
            that made room.
    """

    __slots__ = ("break_down", "client", "num_bytes", "on_room")

    def __init__(self, client: str, on_room: Callable[[], None], break_down: Callable[[], None]) -> None:
        self.client = client
        self.num_bytes = 0
        self.on_room = on_room
        self.break_down = break_down


@dataclass(slots=True)
class _Part:
    """What one client has in a room: its bodies in order, and the bytes of all."""

    bodies: dict[HeldBody, None] = field(default_factory=dict)
    num_held: int = 0


class BodyRoom:
    """The bodies of a listener, or of one connection, in the order in which their reading began.

    Attributes:
        num_held: bytes, of all of them.
    """

    __slots__ = ("_bodies", "_limit_bytes", "_parts", "_whole", "num_held")

    def __init__(self, limit_bytes: int, whole: "BodyRoom | None" = None) -> None:
        """
        Args:
            limit_bytes: beyond it only the oldest may grow, and the oldest of each client that holds little of it.
            whole: that this is a part of: what is held here is held there.
        """
        self.num_held = 0
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._bodies: dict[HeldBody, None] = {}
        self._parts: dict[str, _Part] = {}  # by client

    @property
    def is_full(self) -> bool:
        return self.num_held > self._limit_bytes

    @property
    def is_shut(self) -> bool:
        """Nothing may grow here: the whole is full, and those that may go on in it are elsewhere."""
        whole = self._whole
        return whole is not None and whole.is_full and not any(whole.may_grow(body) for body in self._bodies)

    def may_grow(self, body: HeldBody) -> bool:
        if self.is_full and not self._goes_on(body):
            return False
        return self._whole is None or self._whole.may_grow(body)

    def _goes_on(self, body: HeldBody) -> bool:
        """Though the room is full."""
        if _oldest(self._bodies) is body:
            return True
        part = self._parts[body.client]
        return _oldest(part.bodies) is body and part.num_held * len(self._parts) < self._limit_bytes

    def open(self, body: HeldBody) -> None:
        self._bodies[body] = None
        self._parts.setdefault(body.client, _Part()).bodies[body] = None
        if self._whole is not None:
            self._whole.open(body)

    def add(self, body: HeldBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._hold(body, num_bytes)
        if self._whole is not None:
            self._whole._hold(body, num_bytes)

    def close(self, body: HeldBody) -> None:
        """It is complete, or will not be."""
        told = self._take_out(body)
        if self._whole is not None:
            told |= self._whole._take_out(body)
        for on_room, break_down in told.items():
            try:
                on_room()
            except Exception:
                break_down()

    def _hold(self, body: HeldBody, num_bytes: int) -> None:
        self.num_held += num_bytes
        self._parts[body.client].num_held += num_bytes

    def _take_out(self, body: HeldBody) -> dict[Callable[[], None], Callable[[], None]]:
        """Returns whom to tell, each once, and what to call where that fails."""
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


def _oldest(bodies: dict[HeldBody, None]) -> HeldBody | None:
    return next(iter(bodies), None)
