"""Blocks of keys and values in files, so that a restarted server finds the prompts of the one before. Thread: engine
for what is asked, one of its own for the files: no step waits for them.

The directory follows the host memory: a file for each slot that is filled, gone when the slot is used for another. A
file (gpu/kv_file.py) names the model that computed it (fingerprint), its tokens, and the file of the block before it in
its chain, by names that are given once and for ever. What is torn, of another model, or of a chain whose beginning is
gone is deleted, never served. Files are readable for their owner alone: they hold prompts.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from queue import SimpleQueue

from core.blocks import BlockKey
from core.config import BLOCK_SIZE, ModelConfig
from core.plan import BlockLabel
from gpu.checkpoint import Checkpoint
from gpu.kv_file import DIGEST_BYTES, SUFFIX, BadFile, Header, encode, encode_header, read_content, read_header

PART_SUFFIX, LOCK_NAME = ".kv.part", "lock"
QUEUE_BYTES = 64 * 1024**2  # that wait for the disk; what comes on top is written at the end
DATE_STEP_NS = 1_000_000  # file systems that keep coarser times are not worth an order
SAVE_S = 8.0  # at the end: the process is given ten seconds

logger = logging.getLogger(__name__)


class KVDirectory:
    """The files of one process.

    Args:
        limit_bytes: of all files together; the least recently used go first. None: as many as there are slots.
        block_bytes: of each one's keys and values.

    Raises:
        OSError: the directory cannot be used; BlockingIOError: another process uses it.
    """

    def __init__(self, path: Path, limit_bytes: int | None, fingerprint: str, block_bytes: int) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise
        self._path = path
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._run = secrets.token_hex(16)
        self._loaded_names: dict[int, str] = {}  # by serial
        self._unwritten: dict[int, BlockLabel] = {}  # by slot: there was no room in the queue
        self._files = _Files(path, limit_bytes)
        self._unused = _Unused()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._room = threading.Semaphore(max(1, QUEUE_BYTES // block_bytes))
        self._writer = threading.Thread(target=self._write_queued, name="kv-directory", daemon=True)
        self._writer.start()

    def load(self, num_slots: int, fill: Callable[[int, bytes], None]) -> list[tuple[int, BlockLabel]]:
        """Fill slots from 0 on with the newest chains; delete whatever is not loaded, and log that. Before any put().

        Returns:
            The slots filled and what they hold, oldest first; serials from 1 on.
        """
        stored: list[tuple[int, BlockLabel]] = []
        serials: dict[str, int] = {}  # by name
        for header in self._newest_chains(num_slots):
            parent = None if header.parent is None else serials.get(header.parent)
            if header.parent is None or parent is not None:
                content = self._read(header)
                if content is not None:
                    slot, serial = len(stored), len(stored) + 1
                    fill(slot, content)
                    self._loaded_names[serial] = header.name
                    self._files.take(slot, header.name)
                    serials[header.name] = serial
                    stored.append((slot, BlockLabel(serial, _key(header, parent))))
        num_deleted = self._delete_all_but(serials)
        self._unused.log(self._path)
        logger.info("%d blocks read from %s, %d files deleted there", len(stored), self._path, num_deleted)
        self._queue.put(self._files.trim)
        return stored[::-1]

    def put(self, slot: int, label: BlockLabel, content: bytes) -> None:
        """Have a slot's content written, in place of what it held before; later, when too much waits already."""
        if self._room.acquire(blocking=False):
            self._unwritten.pop(slot, None)
            header = self._header(label)
            self._queue_place(slot, header)
            self._queue.put(self._files.trim)
            self._queue_write(header, content)
        else:
            self._queue.put(lambda: self._files.drop(slot))
            self._unwritten[slot] = label

    def drop(self, slots: Iterable[int]) -> None:
        """Have the files of these deleted, for good once the writer has come to it."""
        slots = list(slots)
        for slot in slots:
            self._unwritten.pop(slot, None)
        self._queue.put(lambda: self._files.drop_for_good(slots))

    def use(self, slots: Iterable[int]) -> None:
        """These are used now, the last of them last."""
        slots = list(slots)
        self._queue.put(lambda: self._files.use(slots))

    def save(self, labels: dict[int, BlockLabel], used: Iterable[int], read: Callable[[int], bytes]) -> None:
        """Write these slots, and what there was no room for, the last first; end the writing, all within SAVE_S.

        Args:
            labels: by slot, children before their parents.
            used: as for use(), these among them: what has no room goes by this order, not by that of the writing.
        """
        deadline_s = time.monotonic() + SAVE_S
        labels = self._unwritten | labels
        for slot, label in labels.items():
            self._queue_place(slot, self._header(label))
        self.use(used)
        self._queue.put(self._files.trim)
        for slot, label in reversed(labels.items()):
            if not self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                logger.warning("not all keys and values could be written to %s within %g s", self._path, SAVE_S)
                break
            self._queue_write(self._header(label), read(slot))
        self._queue.put(self._files.date_by_use)
        self.close(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Write what is queued and stop. What is not written by then is lost."""
        self._queue.put(None)
        self._writer.join(max(0.0, deadline_s - time.monotonic()))
        if not self._writer.is_alive():
            os.close(self._lock)

    def _queue_place(self, slot: int, header: Header) -> None:
        beside_bytes = self._block_bytes + DIGEST_BYTES
        self._queue.put(lambda: self._files.place(slot, header.name, len(encode_header(header)) + beside_bytes))

    def _queue_write(self, header: Header, content: bytes) -> None:
        self._queue.put(lambda: self._files.write(header.name, encode(header, content)))
        self._queue.put(self._room.release)

    def _header(self, label: BlockLabel) -> Header:
        parent, tokens = label.key
        return Header(
            self._fingerprint,
            self._name(label.serial),
            self._name(parent) if isinstance(parent, int) else None,
            None if isinstance(parent, int) else parent,
            tokens.hex(),
        )

    def _name(self, serial: int) -> str:
        """Of a block, wherever and whenever it is written."""
        return self._loaded_names.get(serial) or f"{self._run}-{serial:x}"

    def _write_queued(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _delete_all_but(self, names: Container[str]) -> int:
        """Delete all files of blocks but these; returns how many that were."""
        num_deleted = 0
        for file in self._path.iterdir():
            is_kept = file.name.removesuffix(SUFFIX) in names
            if file.name.endswith((SUFFIX, PART_SUFFIX)) and not is_kept and not file.is_dir():
                file.unlink(missing_ok=True)
                num_deleted += 1
        return num_deleted

    def _newest_chains(self, num_slots: int) -> list[Header]:
        """Headers of whole chains, newest first, parents before children, as many as there are slots."""
        headers = {header.name: header for header in self._headers()}
        chosen: dict[str, Header] = {}
        for header in headers.values():
            chain: dict[str, Header] = {}
            link: Header | None = header
            while link is not None and link.name not in chosen and link.name not in chain:
                chain[link.name] = link
                link = headers.get(link.parent) if link.parent is not None else None
            if len(chosen) + len(chain) <= num_slots:
                chosen.update(reversed(chain.items()))
        return list(chosen.values())

    def _headers(self) -> list[Header]:
        """Of all files that may be this model's, newest first."""
        found = []
        for file in self._path.glob(f"*{SUFFIX}"):
            try:
                header, used_ns = read_header(file)
                if header.fingerprint != self._fingerprint:
                    raise BadFile("it is of another model, dtype or quantisation")
                found.append((used_ns, header))
            except (OSError, BadFile) as error:
                self._unused.add(file, error)
        found.sort(key=lambda entry: (entry[0], entry[1].name), reverse=True)
        return [header for _, header in found]

    def _read(self, header: Header) -> bytes | None:
        """The file's keys and values; None: it is not whole, or not what its header has said before."""
        file = self._path / f"{header.name}{SUFFIX}"
        try:
            return read_content(file, header, self._block_bytes)
        except (OSError, BadFile) as error:
            self._unused.add(file, error)
            return None


class _Unused:
    """Files that were not read, by the reason: a line of the log for each, however many files have it."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}  # by reason

    def add(self, file: Path, error: OSError | BadFile) -> None:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._files.setdefault(reason, []).append(file.name)

    def log(self, path: Path) -> None:
        for reason, names in self._files.items():
            which = f"{path / min(names)}{f' and {len(names) - 1} more are' if len(names) > 1 else ' is'}"
            logger.warning("%s not used: %s", which, reason)


class _Files:
    """Which slot has which file: each file is one slot's. Thread: the writer, after load()."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._names: dict[int, str] = {}  # by slot
        self._slots: dict[str, int] = {}  # by name
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._is_writable = True

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

    def write(self, name: str, content: bytes) -> None:
        """Unless it had to give way, or was dropped, since it was placed."""
        if not self._is_writable or name not in self._slots:
            return
        aside = self._path / f"{name}{PART_SUFFIX}"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as writer:
                writer.write(content)
            os.replace(aside, self._file(name))
        except OSError as error:
            self._is_writable = False
            logger.warning("keys and values are written to %s no more: %s", self._path, error)
            aside.unlink(missing_ok=True)

    def drop(self, slot: int) -> None:
        """Delete its file, if it has one."""
        name = self._names.pop(slot, None)
        if name is None:
            return
        del self._slots[name]
        self._num_bytes -= self._sizes.pop(name)
        try:
            self._file(name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", self._file(name), error)

    def drop_for_good(self, slots: list[int]) -> None:
        """Also if the machine stops."""
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


def model_fingerprint(checkpoint: Checkpoint, config: ModelConfig, dtype_name: str, quantize: str | None) -> str:
    """Of all that keys and values depend on: the weights' files, how they are computed, and how blocks are laid out."""
    found = hashlib.sha256(f"{config!r} {dtype_name} {quantize} {BLOCK_SIZE}\0".encode())
    headers = checkpoint.tensors.values()
    files = {header.file for header in headers} | {part.file for header in headers for part in header.parts.values()}
    for file in sorted(files):
        with open(file, "rb") as reader:
            found.update(hashlib.file_digest(reader, "sha256").digest())
    return found.hexdigest()


def _key(header: Header, parent: int | None) -> BlockKey:
    domain = header.domain
    if parent is not None:
        return parent, bytes.fromhex(header.content)
    assert domain is not None, "checked by _decode_header"
    return domain, bytes.fromhex(header.content)
