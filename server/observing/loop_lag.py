"""How late the event loop is: what every stream waits for, whatever keeps it busy. Thread: loop."""

import asyncio
from collections.abc import Callable

from server.observing.exposition import Histogram

TICK_S = 0.25


class LoopLag:
    """Sets a timer again and again, from start() to close(), and notes how late it is called.

    Args:
        clock: monotonic seconds, finer than the loop's own milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], lags: Histogram) -> None:
        self._loop = loop
        self._clock = clock
        self._lags = lags
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        self._due_s = self._clock() + TICK_S
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        late_s = max(0.0, self._clock() - self._due_s)
        self.start()
        self._lags.observe(late_s)
