"""How many bytes of request bodies are held while they come, and which may go on coming. Thread: loop.

Once too much is held, the oldest body alone goes on: bodies are completed in their order, so that what is held becomes
less, and no two wait for each other. It stops nobody from reading: connections ask, and shut their windows.
"""

from collections.abc import Callable


class HeldBody:
    """One body that is being read, until it is complete or given up.

    Attributes:
        num_bytes: held.
        on_room: called when more may come that was told to wait; perhaps for others of its connection.
        break_down: called in the handling of what on_room has raised: it costs the body's connection, and not the one
            that made room.
    """

    __slots__ = ("break_down", "num_bytes", "on_room")

    def __init__(self, on_room: Callable[[], None], break_down: Callable[[], None]) -> None:
        self.num_bytes = 0
        self.on_room = on_room
        self.break_down = break_down


class BodyRoom:
    """The bodies of a listener, or of one connection, in the order in which their reading began.

    Attributes:
        num_held: bytes, of all of them.
    """

    __slots__ = ("_bodies", "_limit_bytes", "_whole", "num_held")

    def __init__(self, limit_bytes: int, whole: "BodyRoom | None" = None) -> None:
        """
        Args:
            limit_bytes: beyond it only the oldest may grow.
            whole: that this is a part of: what is held here is held there.
        """
        self.num_held = 0
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._bodies: dict[HeldBody, None] = {}

    @property
    def is_full(self) -> bool:
        return self.num_held > self._limit_bytes

    @property
    def is_shut(self) -> bool:
        """Nothing may grow here: the whole is full, and its oldest is elsewhere."""
        whole = self._whole
        return whole is not None and whole.is_full and whole._oldest not in self._bodies

    def may_grow(self, body: HeldBody) -> bool:
        if self.is_full and self._oldest is not body:
            return False
        return self._whole is None or self._whole.may_grow(body)

    def open(self, body: HeldBody) -> None:
        self._bodies[body] = None
        if self._whole is not None:
            self._whole.open(body)

    def add(self, body: HeldBody, num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self.num_held += num_bytes
        if self._whole is not None:
            self._whole.num_held += num_bytes

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

    @property
    def _oldest(self) -> HeldBody | None:
        return next(iter(self._bodies), None)

    def _take_out(self, body: HeldBody) -> dict[Callable[[], None], Callable[[], None]]:
        """Returns whom to tell, each once, and what to call where that fails."""
        was_full, was_oldest = self.is_full, self._oldest is body
        del self._bodies[body]
        self.num_held -= body.num_bytes
        if not was_full:
            return {}
        if not self.is_full:
            return {other.on_room: other.break_down for other in self._bodies}
        oldest = self._oldest
        return {oldest.on_room: oldest.break_down} if was_oldest and oldest is not None else {}
