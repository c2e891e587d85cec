"""The ledger's writer: one thread that owns the database and the spill file. Thread: ledger; at start, main.

It shares no mutable state with the loop: frozen writes come through a queue, one transaction has all that wait, and one
call_soon_threadsafe reports the outcomes. A settlement is always durable in one of the two files: while the database
cannot be written (a full disk, another process's lock), settlements go to the spill file and nothing else is written. A
probe tries the database again, and then moves the spilled settlements there.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import math
import os
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import msgspec

from core.errors import ExitCode, StartupError
from server.ledger.store import (
    Amend,
    Connect,
    LedgerRow,
    LedgerStore,
    Probe,
    Prune,
    Settle,
    Write,
    connect,
    is_damaged,
    primary_code,
)

logger = logging.getLogger(__name__)

ROOM_AFTER_FULL_BYTES = 4 * 1024**2  # must be free again before a disk that was full is used
DURABLE_S = 0.005  # from submission to durable, if the disk can; meanwhile writes gather; a lone one is sooner
FEW_WRITES = 8  # in DURABLE_S: no more are not worth gathering, as each commit then rests as long as it takes
SLOW_KEPT = 0.998  # of the slowest commit's duration, per later commit: the one in a hundred counts
CLOSE_S = 5.0
DIRECTORY_MODE = 0o750  # like the service's
BAD_WRITE = (sqlite3.IntegrityError, sqlite3.ProgrammingError, OverflowError)  # the write's fault, not the disk's
RECORD_BYTES = 2048  # at most: ids, names and stages are bounded
_HEAD = struct.Struct("<II")  # length, CRC-32 of the payload
_decoder = msgspec.msgpack.Decoder(LedgerRow)


class Spill:
    """A file for settlements while the database cannot be written, allocated in full at start.

    Records follow one another, each with its length and CRC-32; a length of 0 or a wrong sum ends them. Replaying one
    twice changes nothing. The file's lock keeps a second server from the ledger.

    Args:
        num_records: capacity: as many as can be in progress.
    """

    def __init__(self, path: Path, num_records: int) -> None:
        """Raises BlockingIOError if another process has it open; OSError if it cannot be made or the disk is full."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size_bytes = max(num_records * RECORD_BYTES, os.fstat(self._file).st_size)
            self._fill_up()
            self._rows, self._end = self._read()
        except BaseException:
            os.close(self._file)
            raise

    @property
    def rows(self) -> tuple[LedgerRow, ...]:
        """Not in the database yet, in order."""
        return tuple(self._rows)

    def append(self, rows: list[LedgerRow]) -> None:
        """Write all of them durably; or none, and raise OSError."""
        data = b"".join(map(_encode, rows))
        if self._end + len(data) > self._size_bytes:
            raise OSError(f"the spill file's {self._size_bytes} bytes are full")
        _write_all(self._file, data, self._end)
        os.fdatasync(self._file)
        self._end += len(data)
        self._rows += rows

    def clear(self) -> None:
        """The database has them durably. If it raises OSError, they may be replayed once more."""
        _write_all(self._file, bytes(self._end), 0)
        os.fdatasync(self._file)
        self._rows, self._end = [], 0

    def close(self) -> None:
        os.close(self._file)

    def _fill_up(self) -> None:
        """Allocate by writing: space that is only reserved may need more when it is written to."""
        missing = self._size_bytes - os.fstat(self._file).st_size
        if missing:
            _write_all(self._file, bytes(missing), self._size_bytes - missing)
            os.fsync(self._file)

    def _read(self) -> tuple[list[LedgerRow], int]:
        data = os.pread(self._file, self._size_bytes, 0)
        rows, start = [], 0
        while start + _HEAD.size <= len(data):
            length, crc = _HEAD.unpack_from(data, start)
            payload = data[start + _HEAD.size : start + _HEAD.size + length]
            if length == 0 or len(payload) < length or zlib.crc32(payload) != crc:
                break  # the end, or a record cut by a power failure, which was never acknowledged
            rows.append(_decoder.decode(payload))
            start += _HEAD.size + length
        return rows, start


def _encode(row: LedgerRow) -> bytes:
    payload = msgspec.msgpack.encode(row)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _write_all(file: int, data: bytes, offset: int) -> None:
    while data:
        num_written = os.pwrite(file, data, offset)
        data, offset = data[num_written:], offset + num_written


class Disk(NamedTuple):
    """Space on a file system, for users other than root."""

    free_bytes: int
    size_bytes: int


class Written(NamedTuple):
    """The outcome of a batch.

    Args:
        are_durable: for each of its writes.
        fault: why the database cannot be written; None: it can.
        has_more: there is more to prune.
        disk: the database's, after the batch before.
    """

    are_durable: list[bool]
    fault: str | None
    has_more: bool = False
    disk: Disk | None = None


class Journal:
    """Writes to the database, or to the spill file while that fails. Owned by one thread at a time."""

    def __init__(self, store: LedgerStore, spill: Spill, directory: Path) -> None:
        self.store = store
        self._directory = directory
        self._spill = spill
        self._fault: str | None = None
        self._disk = self.disk()

    def recover(self) -> int:
        """Replay what the last process spilled, and close what it left in progress. Returns how many it closed."""
        self._replay()
        return self.store.close_orphans()

    def write(self, writes: Sequence[Write]) -> Written:
        """Make them durable in one transaction, as far as possible. Faults of the disk are returned, not raised."""
        return self._write(writes)._replace(disk=self._disk)

    def disk(self) -> Disk | None:
        """None: unknown."""
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return None
        return Disk(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def _write(self, writes: Sequence[Write]) -> Written:
        if self._fault is None or (any(isinstance(write, Probe) for write in writes) and not self._is_still_full()):
            try:
                self._replay()
                are_durable = self._commit(writes)
                self._fault = None
                prunes = [write for write in writes if isinstance(write, Prune)]
                return Written(are_durable, None, any(map(self.store.has_older, prunes)))
            except (sqlite3.Error, OSError) as error:
                self._fault = str(error)
        has_spilled = self._try_spill([write for write in writes if isinstance(write, Settle | Amend)])
        return Written([has_spilled and isinstance(write, Settle | Amend) for write in writes], self._fault)

    def _is_still_full(self) -> bool:
        """A disk that was full has space for a probe's page before it has space for a batch: wait for more."""
        disk = self.disk() if "full" in str(self._fault) else None
        return disk is not None and disk.free_bytes < min(ROOM_AFTER_FULL_BYTES, disk.size_bytes // 16)

    def tidy(self) -> None:
        """Work that may wait until outcomes are reported. Never raises."""
        self._disk = self.disk()
        if self._fault is None:
            self.store.checkpoint()

    def close(self) -> None:
        self.store.close()
        self._spill.close()

    def _commit(self, writes: Sequence[Write]) -> list[bool]:
        """In one transaction; if a write is bad in itself, each alone."""
        try:
            self.store.commit(writes)
        except Exception as error:
            if isinstance(error, (sqlite3.Error, OSError)) and not isinstance(error, BAD_WRITE):
                raise  # the disk's fault: it concerns all of them
            is_ours = not isinstance(error, BAD_WRITE)
            if is_ours or len(writes) == 1:
                kinds = ", ".join(sorted({type(write).__name__ for write in writes}))
                logger.error("the ledger cannot be written for %s: %s", kinds, error, exc_info=is_ours)
            return [False] if len(writes) == 1 else [self._commit([write])[0] for write in writes]
        return [True] * len(writes)

    def _replay(self) -> None:
        rows = self._spill.rows
        if rows:
            # Of a request that was spilled twice, the later row counts
            self.store.commit([write for row in rows for write in (Settle(row), Amend(row))])
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
    """Open a ledger, or create one.

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
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # private to its owner
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
        fix = "restore a backup (docs/ledger.md, Restoring a backup), or start a new one: --ledger FILE"
        return StartupError(f"{path} is damaged, or not a ledger: {reason}", fix)
    cause = f"the ledger {path} cannot be opened: {reason}"
    directory = path.absolute().parent
    if isinstance(error, OSError):
        is_full, is_locked = error.errno in (errno.ENOSPC, errno.EDQUOT), False
    else:
        code = primary_code(error)
        is_full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # the latter if its -shm finds no room
        is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    if is_full:
        return StartupError(cause, f"free space in {directory}, or name another: --ledger FILE", ExitCode.TRANSIENT)
    if is_locked:
        return StartupError(cause, f"end what holds its lock, as a backup does: fuser {path}", ExitCode.TRANSIENT)
    fix = f"make {directory} writable, or name another: --ledger FILE"
    return StartupError(cause, fix)


def _make_directory(path: Path) -> None:
    """And missing ones above it, durably; closed to other users."""
    if not path.exists():
        _make_directory(path.parent)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """So that a new file's name survives a power failure."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


Tell = Callable[[bool, Written], None]
Item = tuple[Write, Tell]


class Writer(Protocol):
    """Accepts writes in order, and reports the outcome of each on the loop. Thread: loop."""

    def submit(self, write: Write, tell: Tell) -> None:
        """`tell` gets whether the write is durable, and the outcome of its batch."""

    def close(self) -> None:
        """Write what has been submitted, and close the ledger. No more outcomes are reported."""


class CommitPace:
    """When the next commit begins: as late as writes submitted right after the last began can wait for DURABLE_S.

    A commit is expected to take as long as the slowest recent one; a slow disk takes at most half of the time in which
    writes gather. Where few come, none waits for others: an answer's first byte waits for its reservation.
    """

    def __init__(self) -> None:
        self._next_s = -math.inf
        self._slowest_s = self._began_s = 0.0
        self._num_lately = 0.0  # writes in DURABLE_S, as of the last commit

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_s - now_s)

    def note(self, began_s: float, ended_s: float, num_writes: int) -> None:
        took_s = ended_s - began_s
        self._num_lately = num_writes + self._num_lately * math.exp((self._began_s - began_s) / DURABLE_S)
        self._began_s = began_s
        self._slowest_s = min(max(took_s, SLOW_KEPT * self._slowest_s), DURABLE_S / 2)
        rest_s = math.inf if self._num_lately > FEW_WRITES else 2 * took_s
        self._next_s = began_s + min(rest_s, DURABLE_S - max(took_s, self._slowest_s))


class LedgerThread:
    """Implements Writer."""

    def __init__(self, journal: Journal, loop: asyncio.AbstractEventLoop) -> None:
        self._journal = journal
        self._loop = loop
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        # daemon: a hanging disk must not keep the process alive
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def submit(self, write: Write, tell: Tell) -> None:
        self._queue.put((write, tell))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Thread: ledger."""
        pace = CommitPace()
        while self._write_next(pace):
            pass
        self._journal.close()

    def _write_next(self, pace: CommitPace) -> bool:
        """A batch, once there is one, which is not held any longer. Returns False after the last. Thread: ledger."""
        items = [self._queue.get()]
        began_s = time.monotonic()
        if (wait_s := pace.wait_s(began_s)) > 0:
            time.sleep(wait_s)
            began_s = time.monotonic()
        while not self._queue.empty():
            items.append(self._queue.get())
        batch = [item for item in items if item is not None]
        if batch:
            written = write_batch(self._journal, batch)
            pace.note(began_s, time.monotonic(), len(batch))
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(tell_batch, batch, written)
            self._journal.tidy()
        return None not in items


def write_batch(journal: Journal, batch: Sequence[Item]) -> Written:
    """A bug counts as a fault of the ledger: nothing of the batch is durable, and the thread continues."""
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
        except Exception:  # a bug of ours: the others of the batch wait for their outcomes too
            logger.exception("a callback of the ledger failed")
