"""SQLite on a disk that forgets, when the power fails, what was not synced: a VFS of apsw's, in memory before the file.

As SQLite's own crash tests have it: of what was written since the last sync, the power failure keeps none, or any part.
"""

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

PAGE_BYTES = 512  # what a disk writes whole


class Disk:
    """The files of one machine.

    Attributes:
        synced: what outlives a power failure, by path.
        written: what a reader sees.
        left: what the power failure has left, once the operation has come before which it is to fail.
    """

    def __init__(self, fails_before: int = 0, rng: random.Random | None = None) -> None:
        """
        Args:
            fails_before: the power fails before that write or sync; 0: never.
        """
        self.synced: dict[str, bytearray] = {}
        self.written: dict[str, bytearray] = {}
        self.pending: dict[str, set[int]] = {}  # pages written since the last sync
        self.left: Disk | None = None
        self._num_left = fails_before
        self._rng = rng
        self._name = f"disk-{id(self)}"
        self._vfs = _Vfs(self, self._name)

    def connect(self, path: Path) -> "Database":
        # an exclusive lock keeps the WAL's index in memory: apsw has no shared memory for a VFS of Python's
        database = Database(apsw.Connection(str(path), vfs=self._name))
        list(database.execute("PRAGMA locking_mode = EXCLUSIVE"))
        return database

    def count(self) -> None:
        """A write or sync comes."""
        self._num_left -= 1
        if self._num_left == 0:
            assert self._rng is not None
            self.left = self.after_power_failure(self._rng)

    def after_power_failure(self, rng: random.Random) -> "Disk":
        """What a machine finds that is switched on again: of the pages not synced, any may have got there."""
        found = Disk()
        for path, synced in self.synced.items():
            content = bytearray(synced)
            for page in sorted(self.pending.get(path, ())):
                if rng.random() < 0.5:
                    _put(content, self.written[path][page * PAGE_BYTES : (page + 1) * PAGE_BYTES], page * PAGE_BYTES)
            found.synced[path], found.written[path] = content, bytearray(content)
        return found


def _put(content: bytearray, data: bytes, offset: int) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk, name: str) -> None:
        self._disk = disk
        super().__init__(name, "")

    def xOpen(self, name: Any, flags: list[int]) -> Any:  # noqa: N802
        flags[1] = flags[0]
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        return _File(self._disk, str(path))

    def xAccess(self, pathname: str, flags: int) -> bool:  # noqa: N802
        return pathname in self._disk.written

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._disk.written.pop(filename, None)
        self._disk.synced.pop(filename, None)


class _File:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        disk.written.setdefault(path, bytearray())
        disk.synced.setdefault(path, bytearray())
        disk.pending.setdefault(path, set())

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        return bytes(self._disk.written[self._path][offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self._disk.count()
        _put(self._disk.written[self._path], data, offset)
        self._disk.pending[self._path].update(range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES)))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.count()
        self._disk.synced[self._path] = bytearray(self._disk.written[self._path])
        self._disk.pending[self._path].clear()

    def xTruncate(self, size: int) -> None:  # noqa: N802
        del self._disk.written[self._path][size:]

    def xFileSize(self) -> int:  # noqa: N802
        return len(self._disk.written[self._path])

    def xLock(self, level: int) -> None: ...  # noqa: N802

    def xUnlock(self, level: int) -> None: ...  # noqa: N802

    def xCheckReservedLock(self) -> bool:  # noqa: N802
        return False

    def xFileControl(self, op: int, pointer: int) -> bool:  # noqa: N802
        return False

    def xSectorSize(self) -> int:  # noqa: N802
        return PAGE_BYTES

    def xDeviceCharacteristics(self) -> int:  # noqa: N802
        return 0

    def xClose(self) -> None: ...  # noqa: N802


class Database:
    """Implements server.ledger.store.Database over apsw's connection."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Sequence[Any]:
        with _errors():
            return list(self._connection.execute(sql, tuple(parameters)))

    def close(self) -> None:
        with _errors():
            self._connection.close()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except apsw.Error as error:
        raise sqlite3.OperationalError(str(error)) from error
