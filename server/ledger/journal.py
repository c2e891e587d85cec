"""Database and spill journal as one: what is settled is durable in one of them. Thread: ledger; at start, main.

While the database takes no writes (the disk is full, someone holds its lock), settlements go to the spill journal and
nothing else is written. A probe tries again: it puts down in the database what was spilled, once, and goes on there.
"""

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from core.errors import ExitCode, StartupError
from server.ledger.records import Amend, Probe, Prune, Settle, StoredAnswer, Write
from server.ledger.spill import Spill
from server.ledger.store import Connect, LedgerStore, connect, is_damaged

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o750  # as the service's own
BAD_WRITE = (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError)  # the write's fault, not the disk's


class Disk(NamedTuple):
    """What a file system has for whoever is not root."""

    free_bytes: int
    size_bytes: int


class Written(NamedTuple):
    """What became of a batch.

    Args:
        are_durable: of each of its writes.
        fault: what is wrong with the database; None: nothing.
        has_more: there is more to prune.
        disk: of the database.
    """

    are_durable: list[bool]
    fault: str | None
    has_more: bool = False
    disk: Disk | None = None


class Journal:
    """The ledger as it is written. Owned by one thread at a time."""

    def __init__(self, store: LedgerStore, spill: Spill, directory: Path) -> None:
        self._store = store
        self._directory = directory
        self._spill = spill
        self._fault: str | None = None

    def recover(self) -> int:
        """Put down what the last process spilled, and close what it left in progress. Returns how many it closed.

        Raises:
            sqlite3.Error, OSError: it cannot be written to.
        """
        self._replay()
        return self._store.close_orphans()

    def used_since(self, since_us: int) -> dict[tuple[str, str | None], int]:
        return self._store.used_since(since_us)

    def answers(self) -> list[StoredAnswer]:
        return self._store.answers()

    def write(self, writes: Sequence[Write]) -> Written:
        """Make them durable, all in one transaction, as far as possible. Never raises for the disk's sake."""
        return self._write(writes)._replace(disk=self.disk())

    def disk(self) -> Disk | None:
        """None: nobody knows."""
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return None
        return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def _write(self, writes: Sequence[Write]) -> Written:
        if self._fault is None or any(isinstance(write, Probe) for write in writes):
            try:
                self._replay()
                are_durable = self._commit(writes)
                self._fault = None
                limits = [write.before_us for write in writes if isinstance(write, Prune)]
                return Written(are_durable, None, any(map(self._store.has_older, limits)))
            except (sqlite3.Error, OSError) as error:
                self._fault = str(error)
        has_spilled = self._try_spill([write for write in writes if isinstance(write, Settle | Amend)])
        return Written([has_spilled and isinstance(write, Settle | Amend) for write in writes], self._fault)

    def tidy(self) -> None:
        """What may wait until those are told whose writes are durable. Never raises."""
        if self._fault is None:
            self._store.checkpoint()

    def close(self) -> None:
        self._store.close()
        self._spill.close()

    def _commit(self, writes: Sequence[Write]) -> list[bool]:
        """In one transaction; where one of them cannot be taken by any database, the others without it."""
        try:
            self._store.commit(writes)
        except Exception as error:
            if isinstance(error, (sqlite3.Error, OSError)) and not isinstance(error, BAD_WRITE):
                raise  # the disk's, and so of all of them
            is_ours = not isinstance(error, BAD_WRITE)
            if is_ours or len(writes) == 1:
                kinds = ", ".join(sorted({type(write).__name__ for write in writes}))
                logger.error("the ledger cannot take %s: %s", kinds, error, exc_info=is_ours)
            return [False] if len(writes) == 1 else [self._commit([write])[0] for write in writes]
        return [True] * len(writes)

    def _replay(self) -> None:
        rows = self._spill.rows
        if rows:
            # Of a request that was spilled twice, the later row says how it ended
            self._store.commit([write for row in rows for write in (Settle(row), Amend(row))])
            self._spill.clear()

    def _try_spill(self, settlements: Sequence[Settle | Amend]) -> bool:
        try:
            if settlements:
                self._spill.append([one.row for one in settlements])
            return True
        except OSError as error:
            self._fault = f"{self._fault}; and {error}"
            return False


def open_journal(path: Path, num_records: int, open_database: Connect = connect) -> Journal:
    """Open a ledger, or make one.

    Args:
        num_records: requests that can be in progress at once.

    Raises:
        StartupError: it cannot be written to, another server does, or the file is something else.
    """
    made: list[Callable[[], None]] = []
    try:
        _make_directory(path.absolute().parent)
        spill = Spill(path.with_name(path.name + "-spill"), num_records)
        made.append(spill.close)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # who asked what is nobody else's
        store = LedgerStore(path, open_database)
        made.append(store.close)
        _sync_directory(path.parent)
        journal = Journal(store, spill, path.absolute().parent)
        num_closed = journal.recover()
    except BaseException as error:
        for close in made:
            close()
        if isinstance(error, (sqlite3.Error, OSError)):
            raise _not_opened(path, error) from error
        raise
    if num_closed:
        logger.warning("%d requests were in progress when the last server ended: closed as aborted", num_closed)
    return journal


def _not_opened(path: Path, error: sqlite3.Error | OSError) -> StartupError:
    reason = getattr(error, "strerror", None) or error
    if isinstance(error, BlockingIOError):
        cause, fix = f"another server writes to the ledger {path}", "stop it, or give this one its own: --ledger FILE"
        return StartupError(cause, fix, ExitCode.TRANSIENT)
    if is_damaged(path, error):
        fix = "put a backup in its place (docs/ledger.md, The way back), or begin another: --ledger FILE"
        return StartupError(f"{path} is damaged, or not a ledger: {reason}", fix, ExitCode.CONFIGURATION)
    cause = f"the ledger {path} cannot be opened: {reason}"
    directory = path.absolute().parent
    if isinstance(error, OSError):
        is_full, is_locked = error.errno in (errno.ENOSPC, errno.EDQUOT), False
    else:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its extended part
        is_full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # the latter where its -shm finds no room
        is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    if is_full:
        return StartupError(cause, f"make room in {directory}, or name another: --ledger FILE", ExitCode.TRANSIENT)
    if is_locked:
        return StartupError(cause, f"end what holds its lock, as a backup does: fuser {path}", ExitCode.TRANSIENT)
    fix = f"make {directory} writable, or name another: --ledger FILE"
    return StartupError(cause, fix, ExitCode.CONFIGURATION)


def _make_directory(path: Path) -> None:
    """And those above it that are missing: others have no business in them. Durably."""
    if not path.exists():
        _make_directory(path.parent)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """So that the new file's name outlives a power failure too."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
