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


class DeadlineTimer:
    """One loop timer for an owner with many deadlines: calls `on_due` once the first of them has passed.

    When the first deadline may have become earlier, or one is new, the owner calls `arm`. One that moves later needs no
    call, since the timer looks again when it fires: a deadline that is pushed back a thousand times costs one timer.

    Args:
        next_due: the first deadline in the loop's seconds, or None.
    """

    __slots__ = ("_armed_for", "_handle", "_loop", "_next_due", "_on_due")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        next_due: Callable[[], float | None],
        on_due: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._next_due = next_due
        self._on_due = on_due
        # Where uvloop's delay rounds to 0 ms this is a plain Handle without when(): hence _armed_for
        self._handle: asyncio.Handle | None = None
        self._armed_for = 0.0

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
