"""The clock, passed in so that tests control it, and a timer that serves many deadlines. Threads: loop, main."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

RESOLUTION_S = 0.001  # uvloop's timers count whole milliseconds, and may fire half of one early


@dataclass(frozen=True, slots=True)
class Clock:
    """monotonic() for durations, unix() for what clients see; both in seconds."""

    monotonic: Callable[[], float]
    unix: Callable[[], float]


def _never() -> None:
    """No deadline."""


@dataclass(slots=True, eq=False, repr=False)
class DeadlineTimer:
    """One loop timer for an owner with many deadlines: calls `on_due` once the first of them has passed.

    When the first deadline may have become earlier, or one is new, the owner calls `arm`. One that moves later needs no
    call, since the timer looks again when it fires: a deadline that is pushed back a thousand times costs one timer.

    Args:
        next_due: the first deadline in the loop's seconds, or None.
    """

    _loop: asyncio.AbstractEventLoop
    _next_due: Callable[[], float | None]
    _on_due: Callable[[], None]
    # Where uvloop's delay rounds to 0 ms this is a plain Handle without when(): hence _armed_for
    _handle: asyncio.Handle | None = None
    _armed_for: float = 0.0

    def arm(self) -> None:
        due = self._next_due()
        if due is None or (self._handle is not None and self._armed_for <= due):
            return
        self.cancel()
        self._armed_for = due
        self._handle = self._loop.call_at(due, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        """Never fire again, and let the owner go."""
        self.cancel()
        self._next_due, self._on_due = _never, _never

    def _fire(self) -> None:
        self._handle = None
        due = self._next_due()
        if due is not None and due <= self._loop.time() + RESOLUTION_S:
            self._on_due()
        self.arm()
