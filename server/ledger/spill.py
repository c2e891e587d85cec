"""Where settlements go while the database takes none: a file whose room was taken when the disk still had some.

Thread: ledger; at start, main. Records follow one another from the file's beginning, each with its length and CRC-32;
a length of 0, or a sum that is wrong, ends them. Replaying one twice changes nothing: what is settled stays as it is.
The file also bears the lock that keeps a second server from the ledger.
"""

import fcntl
import os
import struct
import zlib
from pathlib import Path

import msgspec

from server.ledger.records import LedgerRow

RECORD_BYTES = 2048  # at most: ids, names and stages are bounded
_HEAD = struct.Struct("<II")  # length, CRC-32 of the payload
_decoder = msgspec.msgpack.Decoder(LedgerRow)


class SpillFull(OSError):
    """There is no room for another record."""


class Spill:
    """The open file.

    Args:
        num_records: that must fit: as many as can be in progress.
    """

    def __init__(self, path: Path, num_records: int) -> None:
        """
        Raises:
            BlockingIOError: another process has it open.
            OSError: it cannot be made, or found no room.
        """
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
        """Those that are in no database yet, in order."""
        return tuple(self._rows)

    def append(self, rows: list[LedgerRow]) -> None:
        """Write them down, durably, all or none.

        Raises:
            OSError: it cannot be.
        """
        data = b"".join(map(_encode, rows))
        if self._end + len(data) > self._size_bytes:
            raise SpillFull(f"the spill journal's {self._size_bytes} bytes are full")
        _write_all(self._file, data, self._end)
        os.fdatasync(self._file)
        self._end += len(data)
        self._rows += rows

    def clear(self) -> None:
        """Forget them: the database has them, durably.

        Raises:
            OSError: they are still there, and may be replayed once more.
        """
        _write_all(self._file, bytes(self._end), 0)
        os.fdatasync(self._file)
        self._rows, self._end = [], 0

    def close(self) -> None:
        os.close(self._file)

    def _fill_up(self) -> None:
        """Take all its room now. Written, not reserved: reserved room may still need some when it is written to."""
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
                break  # the end, or what was being written when the power went: it was acknowledged to nobody
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
