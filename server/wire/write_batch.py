"""Gathers what many connections have to send, so that each is written once per delivery. Thread: loop."""

import asyncio
from typing import Protocol


class Flushable(Protocol):
    def flush(self) -> None: ...

    def break_down(self) -> None:
        """What flush() has raised is being handled: it costs this connection alone."""
        ...


class WriteBatch:
    """The connections with bytes to write. Whoever delivers a step calls flush_all; otherwise the loop soon does.

    Attributes:
        num_writes: by connections so far: those that wait for flush_all, and those that were made without.
    """

    __slots__ = ("_dirty", "_is_expected", "_is_scheduled", "_loop", "num_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.num_writes = 0
        self._loop = loop
        self._dirty: list[Flushable] = []
        self._is_scheduled = False
        self._is_expected = False

    def add(self, connection: Flushable) -> None:
        """Flush it in the next flush_all. The connection sees to it that it is added once."""
        self.num_writes += 1
        self._dirty.append(connection)
        if not (self._is_expected or self._is_scheduled):
            self._is_scheduled = True
            self._loop.call_soon(self._flush_scheduled)

    def expect_flush(self) -> None:
        """Whoever says so calls flush_all before the loop goes on, whatever happens: the loop need not."""
        self._is_expected = True

    def flush_all(self) -> None:
        """Write now what has been sent so far."""
        self._is_expected = False
        dirty = self._dirty
        if dirty:
            self._dirty = []
            for connection in dirty:
                try:
                    connection.flush()
                except Exception:  # a fault of ours: those behind it in the list have done nothing
                    connection.break_down()

    def _flush_scheduled(self) -> None:
        self._is_scheduled = False
        self.flush_all()
