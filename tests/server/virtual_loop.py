"""An asyncio loop whose time jumps to the next timer when nothing is ready: nobody sleeps, every run is the same.

Its timers are uvloop's, which the server runs on: delays are whole milliseconds, and one that rounds to 0 is a plain
callback of the next turn, whose handle has no `when()`.
"""

import asyncio
import collections
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing is ready and no timer is set: what is awaited would never come."""


class _NoFiles:
    """Stands where a selector is: there are no files, and waiting is a jump in time."""

    def __init__(self, loop: "VirtualTimeLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        if timeout > 0:
            self._loop.jump()
        return []

    def close(self) -> None:
        pass


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Run what is awaited with run_until_complete, or drive it from outside with settle and advance."""

    _ready: collections.deque[asyncio.Handle]  # BaseEventLoop's own
    _scheduled: list[asyncio.TimerHandle]
    _run_once: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = _NoFiles(self)

    def time(self) -> float:
        return self._now

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        delay_ms = round(max(delay, 0.0) * 1000)
        if delay_ms == 0:
            return self.call_soon(callback, *args, context=context)
        return super().call_at(self._now + delay_ms / 1000, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_later(when - self._now, callback, *args, context=context)

    def next_timer(self) -> float | None:
        """When the next timer fires."""
        timers = self._scheduled  # a heap
        if timers and timers[0].cancelled():  # until the loop's next turn takes it away
            return min((timer.when() for timer in timers if not timer.cancelled()), default=None)
        return timers[0].when() if timers else None

    def jump(self) -> None:
        """Go to the next timer."""
        when = self.next_timer()
        if when is not None:
            self._now = max(self._now, when)

    def settle(self) -> None:
        """Run until nothing is ready; time stands still."""
        if self._ready:
            self._run_while_ready()

    def advance(self, seconds: float) -> None:
        """Let time pass, and everything happen that it brings."""
        target = self._now + seconds
        self.settle()
        while (when := self.next_timer()) is not None and when <= target:
            self._now = max(self._now, when)
            self._run_while_ready()
        self._now = target

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.run_until_complete(coroutine)

    def _run_while_ready(self) -> None:
        """At least once. As run_forever, which prepares and clears up as much as most of these turns take."""
        assert asyncio._get_running_loop() is None, "driven from within itself"
        asyncio._set_running_loop(self)
        try:
            self._run_once()
            while self._ready:
                self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
