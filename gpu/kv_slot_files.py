"""The files of a KV directory by slots of host memory: placed, written, dropped, and which gives way. Thread: one."""

import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from gpu.kv_file import SUFFIX

PART_SUFFIX = ".kv.part"
DATE_STEP_NS = 1_000_000  # file systems that keep coarser times are not worth an order
RETRY_S = 60.0  # after a write that failed

logger = logging.getLogger(__name__)


class SlotFiles:
    """Which slot has which file: each file is one slot's. Thread: the writer, after the start; counts are read by any.

    Args:
        limit_bytes: of all files together; the least recently used go first. None: as many as there are slots.
        clock: monotonic seconds.

    Attributes:
        num_unwritten: that could not be written, since the start.
    """

    def __init__(self, path: Path, limit_bytes: int | None, clock: Callable[[], float]) -> None:
        self.num_unwritten = 0
        self._path = path
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._num_bytes = 0
        self._names: dict[int, str] = {}  # by slot
        self._slots: dict[str, int] = {}  # by name
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._undeleted: set[str] = set()  # files that are nobody's, and still there
        self._retry_s: float | None = None  # the disk takes nothing before then; None: it did the last time

    @property
    def num_undeleted(self) -> int:
        """Files of what was dropped that could not be deleted: another process would find them."""
        return len(self._undeleted)

    def take(self, slot: int, name: str) -> None:
        """A file that is there already."""
        self._add(slot, name, self._file(name).stat().st_size)
        self._sizes.move_to_end(name, last=False)  # the newest are loaded first

    def place(self, slot: int, name: str, size_bytes: int) -> None:
        """This file is the slot's from now on, last used; it is yet to be written."""
        self.drop(slot)
        if name in self._slots:  # the block had given way here, and is copied out again from the device
            self.drop(self._slots[name])
        self._add(slot, name, size_bytes)

    def write(self, name: str, content: bytes) -> bool:
        """Unless it had to give way, or was dropped, since it was placed. False: it has no file, and should have one.

        After a failure nothing is tried for RETRY_S: a disk that is full, or gone, may come back.
        """
        if name not in self._slots:
            return True
        if self._retry_s is not None and self._clock() < self._retry_s:
            self.num_unwritten += 1
            return False
        aside = self._path / f"{name}{PART_SUFFIX}"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as writer:
                writer.write(content)
            os.replace(aside, self._file(name))
        except OSError as error:
            self._stop_writing(error)
            with contextlib.suppress(OSError):  # where nothing can be written, nothing can be deleted
                aside.unlink(missing_ok=True)
            return False
        self._undeleted.discard(name)
        if self._retry_s is not None:
            self._retry_s = None
            logger.info("keys and values are written to %s again", self._path)
        return True

    def retry_now(self) -> None:
        """Whatever failed before, the next write is tried."""
        if self._retry_s is not None:
            self._retry_s = self._clock()

    def _stop_writing(self, error: OSError) -> None:
        self.num_unwritten += 1
        if self._retry_s is None:
            message = "keys and values are not written to %s: %s; tried again every %g s"
            logger.warning(message, self._path, error, RETRY_S)
        self._retry_s = self._clock() + RETRY_S

    def drop(self, slot: int) -> None:
        """Delete its file, if it has one."""
        name = self._names.pop(slot, None)
        if name is None:
            return
        del self._slots[name]
        self._num_bytes -= self._sizes.pop(name)
        self._delete(name)

    def _delete(self, name: str) -> None:
        try:
            self._file(name).unlink(missing_ok=True)
            self._undeleted.discard(name)
        except OSError as error:
            if name not in self._undeleted:
                self._undeleted.add(name)
                logger.warning("%s cannot be deleted: %s", self._file(name), error)

    def drop_for_good(self, slots: list[int]) -> None:
        """Also if the machine stops; and what could not be deleted before, if it can be now."""
        for name in [name for name in self._undeleted if name not in self._slots]:
            self._delete(name)
        for slot in slots:
            self.drop(slot)
        try:
            directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            logger.warning("deletions in %s may be undone by a power failure: %s", self._path, error)

    def use(self, slots: list[int]) -> None:
        for slot in slots:
            if slot in self._names:
                self._sizes.move_to_end(self._names[slot])

    def trim(self) -> None:
        while self._limit_bytes is not None and self._num_bytes > self._limit_bytes:
            self.drop(self._slots[next(iter(self._sizes))])

    def date_by_use(self) -> None:
        """Let the files' times say which was used last: the next process takes those first."""
        now_ns = time.time_ns()
        for age, name in enumerate(reversed(self._sizes)):
            with contextlib.suppress(OSError):  # not written
                os.utime(self._file(name), ns=(now_ns - age * DATE_STEP_NS,) * 2)

    def _add(self, slot: int, name: str, size_bytes: int) -> None:
        self._names[slot], self._slots[name], self._sizes[name] = name, slot, size_bytes
        self._num_bytes += size_bytes

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{SUFFIX}"
