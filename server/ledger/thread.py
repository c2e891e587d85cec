"""The thread that writes the ledger: one transaction for all that has come meanwhile.

The third thread beside loop and engine. It shares no mutable state with them: frozen writes go in through a queue, and
what became of them goes back by one call_soon_threadsafe per transaction. It alone has the Journal until it ends.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from server.ledger.journal import Journal, Written
from server.ledger.records import Write

logger = logging.getLogger(__name__)

DURABLE_S = 0.005  # after it came a write is durable, where the disk can: a lone one sooner, others are gathered
SLOW_KEPT = 0.998  # of how long the slowest commit took, at each that follows: those that count are one in a hundred
CLOSE_S = 5.0

Tell = Callable[[bool, Written], None]
Item = tuple[Write, Tell]


class Writer(Protocol):
    """Takes writes, in order, and tells on the loop what became of each. Thread: loop."""

    def submit(self, write: Write, tell: Tell) -> None:
        """
        Args:
            tell: gets whether it is durable, and what became of all that was written with it.
        """
        ...

    def close(self) -> None:
        """Write what has been submitted, and close the ledger. Nobody is told any more."""
        ...


class CommitPace:
    """When the next commit begins: as late as what came right after the last one began can wait.

    It is expected to take as long as the last one, or the slowest of late, so that it is late but seldom; for the
    slowest's sake no more than half of the time is given up in which writes gather.
    """

    def __init__(self) -> None:
        self._next_s = -math.inf
        self._slowest_s = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)

    def note(self, began_s: float, ended_s: float) -> None:
        """A commit took so long."""
        took_s = ended_s - began_s
        self._slowest_s = min(max(took_s, SLOW_KEPT * self._slowest_s), DURABLE_S / 2)
        self._next_s = began_s + DURABLE_S - max(took_s, self._slowest_s)


class LedgerThread:
    """Implements Writer."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        # daemon: a disk that hangs must not keep the process from its end
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, write: Write, tell: Tell) -> None:
        self._queue.put((write, tell))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Thread: ledger."""
        pace, is_open = CommitPace(), True
        while is_open:
            items = [self._queue.get()]
            time.sleep(pace.wait_s(time.monotonic()))
            began_s = time.monotonic()
            while not self._queue.empty():
                items.append(self._queue.get())
            is_open = None not in items
            batch = [item for item in items if item is not None]
            if batch:
                written = write_batch(self._journal, batch)
                pace.note(began_s, time.monotonic())
                with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to be told
                    self._loop.call_soon_threadsafe(tell_batch, batch, written)
                self._journal.tidy()
        self._journal.close()


def write_batch(journal: Journal, batch: Sequence[Item]) -> Written:
    """A fault of ours is a fault of the ledger: nothing of the batch is durable, and the thread goes on."""
    try:
        return journal.write([write for write, _ in batch])
    except Exception as error:
        logger.exception("the ledger cannot write")
        return Written([False] * len(batch), f"{type(error).__name__}: {error}")


def tell_batch(batch: Sequence[Item], written: Written) -> None:
    """Thread: loop."""
    for (_, tell), is_durable in zip(batch, written.are_durable, strict=True):
        try:
            tell(is_durable, written)
        except Exception:  # a fault of ours: the others of the transaction wait for word as well
            logger.exception("who waits for the ledger cannot be told")
