"""Blocks of keys and values in files, so that a restarted server finds the prompts of the one before. Thread: engine
for what is asked, one of its own for the files: no step waits for them.

The directory follows the host memory: a file for each slot that is filled, gone when the slot is used for another. A
file (gpu/kv_file.py) names the model that computed it (fingerprint), its tokens, and the file of the block before it in
its chain, by names that are given once and for ever. What is torn, of another model, or of a chain whose beginning is
gone is deleted, never served. Files are readable for their owner alone: they hold prompts.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from queue import SimpleQueue

from core.config import BLOCK_SIZE, ModelConfig
from core.kv_cache import BlockKey, BlockLabel
from core.types import StoreState
from gpu.checkpoint import Checkpoint
from gpu.kv_file import DIGEST_BYTES, SUFFIX, BadFile, Header, encode, encode_header, read_content, read_header
from gpu.kv_slot_files import PART_SUFFIX, SlotFiles

LOCK_NAME = "lock"
QUEUE_BYTES = 64 * 1024**2  # that wait for the disk; what comes on top is written at the end
SAVE_S = 8.0  # at the end: the process is given ten seconds

logger = logging.getLogger(__name__)


class KVDirectory:
    """The files of one process.

    Args:
        limit_bytes: of all files together; the least recently used go first. None: as many as there are slots.
        block_bytes: of each one's keys and values.
        clock: monotonic seconds.

    Raises:
        OSError: the directory cannot be used; BlockingIOError: another process uses it.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int | None,
        fingerprint: str,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        self._labels: dict[int, BlockLabel] = {}  # by slot: as it was put
        self._failed: dict[int, BlockLabel] = {}  # by slot: what the writer could not write
        self._num_drops = 0  # asked for ...
        self._num_dropped = 0  # ... and done, counted by the writer
        self._files = SlotFiles(path, limit_bytes, clock)
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
        self._labels[slot] = label
        if self._room.acquire(blocking=False):
            self._unwritten.pop(slot, None)
            self._queue_place(slot, self._header(label))
            self._queue.put(self._files.trim)
            self._queue_write(slot, label, content)
        else:
            self._queue.put(lambda: self._files.drop(slot))
            self._unwritten[slot] = label

    def drop(self, slots: Iterable[int]) -> None:
        """Have the files of these deleted, for good once the writer has come to it; and what could not be before."""
        slots = list(slots)
        for slot in slots:
            self._unwritten.pop(slot, None)
            self._labels.pop(slot, None)
        self._num_drops += 1
        self._queue.put(lambda: self._drop_for_good(slots))

    @property
    def state(self) -> StoreState:
        """What has become of the files, as far as the writer has come."""
        is_deleting = self._num_dropped < self._num_drops  # read first: what is counted now is in the counts below
        return StoreState(
            is_deleting=is_deleting,
            num_undeleted=self._files.num_undeleted,
            num_unwritten=self._files.num_unwritten,
        )

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
        failed = {slot: label for slot, label in self._failed.copy().items() if self._labels.get(slot) is label}
        labels = failed | self._unwritten | labels
        self._queue.put(self._files.retry_now)
        for slot, label in labels.items():
            self._queue_place(slot, self._header(label))
        self.use(used)
        self._queue.put(self._files.trim)
        for slot, label in reversed(labels.items()):
            if not self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                logger.warning("not all keys and values could be written to %s within %g s", self._path, SAVE_S)
                break
            self._queue_write(slot, label, read(slot))
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

    def _queue_write(self, slot: int, label: BlockLabel, content: bytes) -> None:
        header = self._header(label)

        def write() -> None:
            if not self._files.write(header.name, encode(header, content)):
                self._failed[slot] = label

        self._queue.put(write)
        self._queue.put(self._room.release)

    def _drop_for_good(self, slots: list[int]) -> None:
        self._files.drop_for_good(slots)
        self._num_dropped += 1

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
