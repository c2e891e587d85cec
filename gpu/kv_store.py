"""Blocks of keys and values beyond the device: slots in host memory, and files that outlive the process.

core/kv_cache.py decides which block is copied where. Copies run on the stream of the steps, between pinned memory and
the device: each is done before the next step's rows are computed, and none blocks the host. Thread: engine. A thread of
their own writes and deletes the files, so that no step waits for a disk.

The directory mirrors the host memory: one file per filled slot, deleted when the slot gets another block. A file names
the model that computed it (the fingerprint), its tokens, and the file of the block before it in its chain; a name is
never used for another block. Files that are torn, of another model, or of a chain whose beginning is gone are deleted
and never served. Only their owner can read the files: they hold prompts.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import ExitCode, StartupError
from core.kv_cache import BlockCopies, BlockLabel
from core.types import NO_STORE, StoreState
from gpu.blocks import why_no_blocks, why_not_in_place
from gpu.cache_files import cache_home, read_kept, write_kept
from gpu.checkpoint import Checkpoint
from gpu.device import DeviceChoice, free_memory_bytes, to_device
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.memory_plan import offload_slots
from gpu.streams import Event, Streams

logger = logging.getLogger(__name__)


SUFFIX, PART_SUFFIX = ".kv", ".kv.part"
MAGIC = b"steploop kv 1\n"  # its number changes with the format
LENGTH = struct.Struct("<I")  # of the header
MAX_HEADER_BYTES = 64 * 1024
DIGEST_BYTES = 32  # SHA-256 of all before it, at the end of the file


class BadFile(Exception):
    """The file is not a whole file of this model."""


@dataclass(frozen=True, slots=True)
class Header:
    """
    Args:
        name: of the file, without its suffix.
        parent: name of the preceding block; None: the first of its chain, which has a domain instead.
        content: token ids as in a BlockKey, in hexadecimal.
    """

    fingerprint: str
    name: str
    parent: str | None
    domain: tuple[str, str] | None
    content: str


def encode_header(header: Header) -> bytes:
    """Everything before a file's keys and values."""
    head = json.dumps(asdict(header)).encode()
    return MAGIC + LENGTH.pack(len(head)) + head


def decode_header(raw: bytes) -> tuple[Header, int]:
    """The header at the beginning of a file, and where it ends.

    Raises:
        BadFile: there is none.
    """
    start = len(MAGIC) + LENGTH.size
    if not raw.startswith(MAGIC) or len(raw) < start:
        raise BadFile("it is of another format")
    end = start + LENGTH.unpack_from(raw, len(MAGIC))[0]
    try:
        match fields := json.loads(raw[start:end]):
            case {"parent": None, "domain": [str(tenant), str(salt)]}:
                header = Header(**fields | {"domain": (tenant, salt)})
            case {"parent": str(), "domain": None}:
                header = Header(**fields)
            case _:
                raise ValueError("neither the first of a chain nor the next")
        is_text = isinstance(header.fingerprint, str) and isinstance(header.name, str)
        if not is_text or len(bytes.fromhex(header.content)) != 4 * BLOCK_SIZE:
            raise ValueError("a field is of another type or size")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFile("its header cannot be read") from error
    return header, end


def _read_start(file: Path, most_bytes: int) -> tuple[bytes, int]:
    """So many bytes of a file, and when it was last used, in ns.

    Raises:
        OSError: it cannot be read.
        BadFile: it is a directory, a pipe or a device: reading it may block, or never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise BadFile("it is not a regular file")
    with open(descriptor, "rb") as reader:
        return reader.read(most_bytes), found.st_mtime_ns


LOCK_NAME = "lock"
QUEUE_BYTES = 64 * 1024**2  # waiting for the disk; more is written when the process ends
SAVE_S = 8.0  # when the process ends: it is given ten seconds
RETRY_S = 60.0  # after a failed write
DATE_STEP_NS = 1_000_000  # between the times of two files; file systems with coarser times lose the order


@dataclass(slots=True)
class _File:
    """
    Args:
        is_written: or about to be; the writer clears it where writing failed.
    """

    header: Header
    size_bytes: int
    is_written: bool = False


class KVDirectory:
    """The files of one process: the engine thread decides which slot has which file, the writer thread follows.

    Args:
        limit_bytes: of all files together; the least recently used are deleted first. None: no limit but the slots.
        block_bytes: keys and values of one block.
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
        self._limit_bytes = limit_bytes
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._clock = clock
        self._run = secrets.token_hex(16)
        self._loaded_names: dict[int, str] = {}  # by serial
        self._files: OrderedDict[int, _File] = OrderedDict()  # by slot, least recently used first
        self._slots: dict[str, int] = {}  # by name
        self._num_bytes = 0
        self._num_drops = 0  # requested
        # The writer's own; the engine thread reads the counts.
        self._num_dropped = 0
        self._num_unwritten = 0
        self._undeleted: set[str] = set()
        self._retry_s: float | None = None  # nothing is written before then; None: the last write succeeded
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._room = threading.Semaphore(max(1, QUEUE_BYTES // block_bytes))
        self._writer = threading.Thread(target=self._work_queue, name="kv-directory", daemon=True)
        self._writer.start()

    def load(self, num_slots: int, fill: Callable[[int, bytes], None]) -> list[tuple[int, BlockLabel]]:
        """Fill slots from 0 on with the newest chains; delete the other files, and log that. Before any put().

        Returns:
            The filled slots and what they hold, oldest first; serials start at 1.

        Raises:
            OSError: the directory cannot be read, or a file cannot be deleted.
        """
        unused: defaultdict[str, list[str]] = defaultdict(list)  # reason -> file names
        stored: list[tuple[int, BlockLabel]] = []
        serials: dict[str, int] = {}  # by name
        for header in self._newest_chains(num_slots, unused):
            if header.parent is not None and header.parent not in serials:
                continue
            try:
                content = self._read_content(header)
            except (OSError, BadFile) as error:
                _note_unused(unused, self._path / f"{header.name}{SUFFIX}", error)
                continue
            slot, serial = len(stored), len(stored) + 1
            fill(slot, content)
            self._loaded_names[serial] = header.name
            serials[header.name] = serial
            parent = header.domain if header.parent is None else serials[header.parent]
            assert parent is not None, "checked by decode_header"
            stored.append((slot, BlockLabel(serial, (parent, bytes.fromhex(header.content)))))
        stored.reverse()
        for slot, label in stored:
            self._place(slot, label).is_written = True
        num_deleted = self._delete_all_but(serials)
        for reason, names in unused.items():
            which = f"{self._path / min(names)}{f' and {len(names) - 1} more are' if len(names) > 1 else ' is'}"
            logger.warning("%s not used: %s", which, reason)
        logger.info("%d blocks read from %s, %d files deleted there", len(stored), self._path, num_deleted)
        self._trim()
        return stored

    def put(self, slot: int, label: BlockLabel, content: bytes) -> None:
        """Write a slot's new content, and delete what it held before; save() writes it where the queue is full."""
        file = self._place(slot, label)
        self._trim()
        if slot in self._files and not file.is_written and self._room.acquire(blocking=False):
            self._queue_write(file, content)

    def drop(self, slots: Iterable[int]) -> None:
        """Delete the files of these slots, durably; retry earlier deletions that failed."""
        for slot in slots:
            self._forget(slot)
        self._num_drops += 1
        self._queue.put(self._finish_drop)

    @property
    def state(self) -> StoreState:
        """What has become of the files so far."""
        is_deleting = self._num_dropped < self._num_drops  # read first: the counts below include what it counts as done
        return StoreState(
            is_deleting=is_deleting, num_undeleted=len(self._undeleted), num_unwritten=self._num_unwritten
        )

    def use(self, slots: Iterable[int]) -> None:
        """These were used, the last of them last."""
        for slot in slots:
            if slot in self._files:
                self._files.move_to_end(slot)

    def save(self, labels: dict[int, BlockLabel], used: Iterable[int], read: Callable[[int], bytes]) -> None:
        """Write these slots and all that is not written yet, last used first, then stop writing, within SAVE_S.

        Args:
            labels: by slot.
            used: as for use(), these slots among them; children before their parents.
        """
        deadline_s = time.monotonic() + SAVE_S
        for slot, label in labels.items():
            self._place(slot, label)
        self.use(used)
        self._trim()
        self._queue.put(self._retry_now)
        for slot, file in reversed(self._files.items()):
            if file.is_written:
                continue
            if not self._room.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                logger.warning("not all keys and values could be written to %s within %g s", self._path, SAVE_S)
                break
            self._queue_write(file, read(slot))
        self._queue.put(partial(self._date, [file.header.name for file in reversed(self._files.values())]))
        self.close(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Write what is queued and stop; what is not written by the deadline is lost."""
        self._queue.put(None)
        self._writer.join(max(0.0, deadline_s - time.monotonic()))
        if not self._writer.is_alive():
            os.close(self._lock)

    def _place(self, slot: int, label: BlockLabel) -> _File:
        """Make the block's file the slot's, last used. A block that moves to another slot keeps its file."""
        parent, tokens = label.key
        file = _File(
            Header(
                self._fingerprint,
                self._name(label.serial),
                self._name(parent) if isinstance(parent, int) else None,
                None if isinstance(parent, int) else parent,
                tokens.hex(),
            ),
            size_bytes=self._block_bytes + DIGEST_BYTES,
        )
        file.size_bytes += len(encode_header(file.header))
        before = self._slots.get(file.header.name)
        if before is None:
            self._num_bytes += file.size_bytes
        else:
            file = self._files.pop(before)
        self._forget(slot)
        self._files[slot], self._slots[file.header.name] = file, slot
        return file

    def _name(self, serial: int) -> str:
        """A block's name, the same whenever it is written."""
        return self._loaded_names.get(serial) or f"{self._run}-{serial:x}"

    def _forget(self, slot: int) -> None:
        """Delete a slot's file, if it has one."""
        file = self._files.pop(slot, None)
        if file is not None:
            del self._slots[file.header.name]
            self._num_bytes -= file.size_bytes
            self._queue.put(partial(self._delete, file.header.name))

    def _trim(self) -> None:
        while self._limit_bytes is not None and self._num_bytes > self._limit_bytes:
            self._forget(next(iter(self._files)))

    def _queue_write(self, file: _File, content: bytes) -> None:
        file.is_written = True
        self._queue.put(partial(self._write, file, content))

    # From here to _finish_drop: on the writer thread.

    def _work_queue(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _write(self, file: _File, content: bytes) -> None:
        """After a failure nothing is tried for RETRY_S: a full or missing disk may come back."""
        name = file.header.name
        try:
            if self._retry_s is None or self._clock() >= self._retry_s:
                self._write_whole(name, encode_header(file.header) + content)
                self._undeleted.discard(name)
                if self._retry_s is not None:
                    logger.info("keys and values are written to %s again", self._path)
                self._retry_s = None
                return
        except OSError as error:
            if self._retry_s is None:
                message = "keys and values are not written to %s: %s; tried again every %g s"
                logger.warning(message, self._path, error, RETRY_S)
            self._retry_s = self._clock() + RETRY_S
        finally:
            self._room.release()
        self._num_unwritten += 1
        file.is_written = False

    def _write_whole(self, name: str, raw: bytes) -> None:
        """
        Raises:
            OSError: it was not written.
        """
        aside = self._path / f"{name}{PART_SUFFIX}"
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as writer:
                writer.write(raw)
                writer.write(hashlib.sha256(raw).digest())
            os.replace(aside, self._path / f"{name}{SUFFIX}")
        except OSError:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise

    def _retry_now(self) -> None:
        if self._retry_s is not None:
            self._retry_s = self._clock()

    def _delete(self, name: str) -> None:
        file = self._path / f"{name}{SUFFIX}"
        try:
            file.unlink(missing_ok=True)
            self._undeleted.discard(name)
        except OSError as error:
            if name not in self._undeleted:
                self._undeleted.add(name)
                logger.warning("%s cannot be deleted: %s", file, error)

    def _date(self, names: list[str]) -> None:
        """Set the files' times by when they were used, last used first: the next process loads the newest."""
        now_ns = time.time_ns()
        for age, name in enumerate(names):
            with suppress(OSError):  # it was not written
                os.utime(self._path / f"{name}{SUFFIX}", ns=(now_ns - age * DATE_STEP_NS,) * 2)

    def _finish_drop(self) -> None:
        """Retry what could not be deleted, and make deletions survive a power failure."""
        for name in list(self._undeleted):
            self._delete(name)
        try:
            directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            logger.warning("deletions in %s may be undone by a power failure: %s", self._path, error)
        self._num_dropped += 1

    # What load() reads.

    def _newest_chains(self, num_slots: int, unused: defaultdict[str, list[str]]) -> list[Header]:
        """Headers of whole chains, newest first, parents before children, as many as there are slots."""
        headers = {header.name: header for header in self._headers(unused)}
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

    def _headers(self, unused: defaultdict[str, list[str]]) -> list[Header]:
        """Of all files that may be this model's, newest first; their digests are not checked yet."""
        found = []
        for file in self._path.glob(f"*{SUFFIX}"):
            try:
                raw, used_ns = _read_start(file, len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES)
                header, _ = decode_header(raw)
                if f"{header.name}{SUFFIX}" != file.name:
                    raise BadFile("it has another name than it claims")
                if header.fingerprint != self._fingerprint:
                    raise BadFile("it is of another model, dtype or quantisation")
                found.append((used_ns, header.name, header))
            except (OSError, BadFile) as error:
                _note_unused(unused, file, error)
        return [header for *_, header in sorted(found, key=lambda entry: entry[:2], reverse=True)]

    def _read_content(self, header: Header) -> bytes:
        """The keys and values behind a header that was read before.

        Raises:
            OSError: the file cannot be read.
            BadFile: it is not whole, or not what its header has said.
        """
        most_bytes = len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES + self._block_bytes + DIGEST_BYTES + 1
        raw, _ = _read_start(self._path / f"{header.name}{SUFFIX}", most_bytes)
        if hashlib.sha256(raw[:-DIGEST_BYTES]).digest() != raw[-DIGEST_BYTES:]:
            raise BadFile("its content has another digest than it claims")
        found, end = decode_header(raw)
        content = raw[end:-DIGEST_BYTES]
        if found != header or len(content) != self._block_bytes:
            raise BadFile("its size is wrong, or it has changed meanwhile")
        return content

    def _delete_all_but(self, names: Container[str]) -> int:
        """Delete the files of all other blocks; returns how many there were."""
        num_deleted = 0
        for file in self._path.iterdir():
            is_kept = file.name.removesuffix(SUFFIX) in names
            if file.name.endswith((SUFFIX, PART_SUFFIX)) and not is_kept and not file.is_dir():
                file.unlink(missing_ok=True)
                num_deleted += 1
        return num_deleted


def _note_unused(unused: defaultdict[str, list[str]], file: Path, error: OSError | BadFile) -> None:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    unused[reason].append(file.name)


SETTLED_S = 2.0  # since a file's last change
MAX_DIGESTS = 255  # of files, beside the newest


def model_fingerprint(checkpoint: Checkpoint, config: ModelConfig, settings: tuple[object, ...]) -> str:
    """A digest of all that keys and values depend on: weight files, number formats, the layout of blocks."""
    found = hashlib.sha256(f"{config!r} {settings} {BLOCK_SIZE}\0".encode())
    for file in checkpoint.files:
        found.update(bytes.fromhex(_digest_of(file, cache_home() / "steploop" / "digests.json")))
    return found.hexdigest()


def _digest_of(file: Path, kept_in: Path) -> str:
    """The SHA-256 of its content, kept for the next start: it takes a second a gigabyte.

    It is told by the file's times, too: a write changes the ctime, which no user can set. One that changed only just
    might change again within the clock's resolution, and is not kept.
    """
    now = file.stat()
    stamp = f"{now.st_dev} {now.st_ino} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns}"
    kept = read_kept(kept_in, _as_digest)
    known = kept.get(str(file), {}).get(stamp)
    if known is not None:
        return known
    with file.open("rb") as reader:
        told = hashlib.file_digest(reader, "sha256").hexdigest()
    if time.time() > now.st_ctime + SETTLED_S:
        others = [(path, one) for path, one in kept.items() if path != str(file)]
        write_kept(kept_in, dict(others[-MAX_DIGESTS:]) | {str(file): {stamp: told}})
    return told


def _as_digest(found: Any) -> str:
    if len(bytes.fromhex(found)) != DIGEST_BYTES:
        raise ValueError("no digest")
    return str(found)


STAGING_BYTES = 64 * 1024**2  # of device memory, for blocks that are copied at once
MEASURED_BLOCKS, NUM_MEASURES = 8, 3


class HostMemory:
    """Slots of one block each: the keys and values of all layers.

    Args:
        num_slots: at least one.
        cache: whose blocks are copied.
    """

    def __init__(self, config: ModelConfig, num_slots: int, cache: KVCache, streams: Streams) -> None:
        self.num_slots = num_slots
        self.block_bytes = bytes_per_block(config, cache.dtype)
        self._num_staged = max(1, STAGING_BYTES // self.block_bytes)
        self._cache, self._stream = cache, streams.current
        pinned = streams.pinned_for_good(num_slots * self.block_bytes)
        self.tensor = pinned.view(cache.dtype).view(num_slots, -1)  # [slots, numbers of a block]
        # Without a device of its own there is nothing to stage: fresh pages for it take longer than the copy
        self._bytes: NDArray[np.uint8] = self.tensor.view(torch.uint8).numpy()
        is_host = cache.device.type == "cpu"
        self._device_bytes = [one.view(torch.uint8).numpy() for one in cache.tensors] if is_host else None

    def copy(self, copies: BlockCopies) -> "CopyTicket":
        """Start copying out, then back, on the stream: after all work sent so far, before any sent later."""
        started = self._stream.record(is_timed=True)
        for slots, blocks in self._staged(copies.offloads):
            self._stream.run(partial(self._copy_out, blocks, slots))
        for blocks, slots in self._staged(copies.restores):
            self._stream.run(partial(self._copy_back, blocks, slots))
        return CopyTicket(copies, started, self._stream.record(is_timed=True))

    def measure(self) -> float:
        """Seconds that one block takes to the host or back, the best of a few tries. Overwrites the first slots."""
        num_blocks = min(MEASURED_BLOCKS, self.num_slots, self._cache.num_blocks)
        same = {number: number for number in range(num_blocks)}
        took_s = [self.copy(BlockCopies(offloads=same, restores=same)).wait_s() for _ in range(NUM_MEASURES)]
        return min(took_s) / (2 * num_blocks)

    def read(self, slot: int) -> bytes:
        return self._bytes[slot : slot + 1].tobytes()

    def write(self, slot: int, content: bytes) -> None:
        """Fill a slot with what read() returned."""
        self._bytes[slot] = np.frombuffer(content, np.uint8).reshape(self._bytes.shape[1:])

    def _staged(self, pairs: dict[int, int]) -> Iterator[tuple[list[int], list[int]]]:
        """Keys and values of the pairs, as many at a time as may be staged."""
        keys, values = list(pairs), list(pairs.values())
        for first in range(0, len(keys), self._num_staged):
            yield keys[first : first + self._num_staged], values[first : first + self._num_staged]

    def _copy_out(self, blocks: list[int], slots: list[int]) -> None:
        if self._device_bytes is not None:
            for block, slot in zip(blocks, slots, strict=True):
                for on_device, on_host in self._parts(self._device_bytes, block, slot):
                    on_host[:] = on_device
            return
        found = self._cache.read_blocks(self._on_device(blocks))  # [copies, numbers of a block]
        for i, slot in enumerate(slots):
            self.tensor[slot].copy_(found[i], non_blocking=True)

    def _copy_back(self, blocks: list[int], slots: list[int]) -> None:
        if self._device_bytes is not None:
            for block, slot in zip(blocks, slots, strict=True):
                for on_device, on_host in self._parts(self._device_bytes, block, slot):
                    on_device[:] = on_host
            return
        found = self._cache.tensors[0].new_empty((len(slots), self.tensor.shape[1]))
        for i, slot in enumerate(slots):
            found[i].copy_(self.tensor[slot], non_blocking=True)
        self._cache.write_blocks(self._on_device(blocks), found)

    def _parts(
        self, tensors: list[NDArray[np.uint8]], block: int, slot: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Views of a block and of its slot, for each size of heads."""
        first = 0
        for tensor in tensors:
            part = tensor[:, :, block]
            yield part, self._bytes[slot, first : first + part.size].reshape(part.shape)
            first += part.size

    def _on_device(self, blocks: list[int]) -> Tensor:
        return to_device(np.array(blocks), self._cache.device)


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """Copies under way, between two points of the stream's work."""

    copies: BlockCopies
    started: Event
    done: Event

    def wait_s(self) -> float:
        """Wait for the copies; returns the seconds that they took."""
        return self.done.seconds_since(self.started)


@dataclass(slots=True)
class KVOffload:
    """Host memory and, where the operator names one, its directory. Implements core.plan.BlockStore.

    Args:
        copy_s: what one block takes; see HostMemory.measure.
        stored: slots that were filled from the directory; see core.kv_cache.HostBlocks.
    """

    memory: HostMemory
    copy_s: float
    directory: KVDirectory | None = None
    stored: list[tuple[int, BlockLabel]] = field(default_factory=list)

    def start(self, copies: BlockCopies) -> CopyTicket:
        return self.memory.copy(copies)

    def finish(self, ticket: CopyTicket) -> float:
        """Wait for the copies and pass them to the directory; returns the seconds that they took."""
        took_s = ticket.wait_s()
        if self.directory is not None:
            self.directory.use(ticket.copies.used)
            for slot, label in ticket.copies.labels.items():
                self.directory.put(slot, label, self.memory.read(slot))
        return took_s if ticket.copies.num_copies else 0.0

    @property
    def state(self) -> StoreState:
        return NO_STORE if self.directory is None else self.directory.state

    def drop(self, slots: list[int]) -> None:
        if self.directory is not None:
            self.directory.drop(slots)

    def keep(self, copies: BlockCopies | None) -> None:
        """After the last step: copy these out, and write whatever the host memory holds, as far as time allows."""
        if self.directory is None:
            return
        copies = copies or BlockCopies()
        with torch.inference_mode():
            self.start(copies).wait_s()
        self.directory.save(copies.labels, copies.used, self.memory.read)


def open_offload(
    config: ModelConfig,
    engine: EngineConfig,
    choice: DeviceChoice,
    cache: KVCache,
    checkpoint: Checkpoint,
    streams: Streams,
) -> KVOffload | None:
    """The host memory of --kv-offload-memory, filled from --kv-offload-dir; None: it is 0.

    Raises:
        StartupError: it does not fit, or the directory cannot be used.
    """
    if engine.kv_offload_bytes == 0:
        return None
    num_slots = offload_slots(config, engine, cache.dtype, free_memory_bytes(torch.device("cpu")))
    try:
        memory = HostMemory(config, num_slots, cache, streams)
    except (OSError, RuntimeError) as error:
        cause = f"Host memory of --kv-offload-memory cannot be pinned for the device: {error}."
        raise StartupError(cause, "less --kv-offload-memory.", ExitCode.MEMORY) from error
    offload = KVOffload(memory, memory.measure())
    if engine.kv_offload_dir is not None:
        path = Path(engine.kv_offload_dir)
        matrices = why_no_blocks(config, engine, choice.device, choice.dtype), why_not_in_place(config, engine, choice)
        formats = choice.dtype_name, engine.kv_dtype, cache.is_paired, engine.quantize, None in matrices
        fingerprint = model_fingerprint(checkpoint, config, (*formats, engine.deterministic))
        offload.directory = _open_directory(path, engine.kv_offload_dir_bytes, fingerprint, memory.block_bytes)
        try:
            offload.stored = offload.directory.load(num_slots, memory.write)
        except OSError as error:
            offload.directory.close(time.monotonic() + SAVE_S)
            raise StartupError(
                f"The KV cache cannot be read from {path}: {error.filename or path}: {error.strerror}.",
                "--kv-offload-dir with a directory whose files all belong to this server, or an empty one.",
            ) from error
    return offload


def _open_directory(path: Path, limit_bytes: int | None, fingerprint: str, block_bytes: int) -> KVDirectory:
    """
    Raises:
        StartupError: it cannot be made or written to, or another process uses it.
    """
    try:
        return KVDirectory(path, limit_bytes, fingerprint, block_bytes)
    except BlockingIOError:
        raise StartupError(
            f"Another process uses {path} for its KV cache.",
            "--kv-offload-dir with a directory of its own.",
            ExitCode.TRANSIENT,
        ) from None
    except OSError as error:
        raise StartupError(
            f"The KV cache cannot be stored in {path}: {error.strerror}.",
            "--kv-offload-dir with a writable directory.",
            ExitCode.TRANSIENT if error.errno in (errno.ENOSPC, errno.EDQUOT) else None,
        ) from error
