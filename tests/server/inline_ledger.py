"""The ledger's thread, without a thread: a batch is written when its time has come on the virtual loop."""

import asyncio
from pathlib import Path

from server.ledger.journal import Item, Journal, Tell, open_journal, tell_batch, write_batch
from server.ledger.store import LedgerRow, LedgerStore, Write

NUM_RECORDS = 100
COMMIT_S = 0.003


class InlineWriter:
    """Implements server.ledger_thread.Writer.

    Attributes:
        journal: the real one.
        writes: all that was submitted.
        is_stuck: the disk hangs; commit() goes on after it.
    """

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.journal: Journal = open_journal(path, NUM_RECORDS)
        self.writes: list[Write] = []
        self.is_stuck = False
        self._loop = loop
        self._batch: list[Item] = []
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, write: Write, tell: Tell) -> None:
        self.writes.append(write)
        self._batch.append((write, tell))
        if len(self._batch) == 1:
            self._timer = self._loop.call_later(COMMIT_S, self.commit)

    @property
    def is_writing(self) -> bool:
        """Something will be written."""
        return bool(self._batch) and not self.is_stuck

    def commit(self) -> None:
        """Write what there is, unless the disk hangs."""
        if self._batch and not self.is_stuck:
            batch, self._batch = self._batch, []
            tell_batch(batch, write_batch(self.journal, batch))

    def close(self) -> None:
        """As the process ends: what was submitted is written, and nobody is told."""
        if self._timer is not None:
            self._timer.cancel()
        if self._batch:
            write_batch(self.journal, self._batch)
            self._batch = []
        self.journal.close()


def rows(path: Path) -> list[LedgerRow]:
    """What the file has, as another process would read it."""
    store = LedgerStore(path)
    try:
        return store.rows()
    finally:
        store.close()
