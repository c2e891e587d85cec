"""How long a request's body may take. Thread: loop. Time is an argument."""

from server.wire.connection_limits import ConnectionLimits


class BodyClock:
    """Runs while a handler waits for a body; each byte grants more time, and never more than body_s from now.

    So a body at body_bytes_per_s may take as long as it is, and what has come fast is no credit for silence.

    Attributes:
        due: when the body is too slow, in the loop's seconds. It never becomes earlier.
    """

    __slots__ = ("_limits", "due")

    def __init__(self, limits: ConnectionLimits, now: float) -> None:
        self._limits = limits
        self.due = now + limits.body_s

    def receive(self, num_bytes: int, now: float) -> None:
        limits = self._limits
        self.due = min(self.due + num_bytes / limits.body_bytes_per_s, now + limits.body_s)
