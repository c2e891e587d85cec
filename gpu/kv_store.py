"""Blocks of keys and values beyond the device: slots of host memory, and files that outlive the process.

core/kv_cache.py decides which block is copied where. Copies run on the stream of the steps, between pinned memory and
the device: each is done before the next step's rows, and none holds the host up. Thread: engine; files have one of
their own, so that no step waits for a disk.

The directory follows the host memory: a file for each slot that is filled, gone when the slot is used for another. A
file names the model that computed it (fingerprint), its tokens, and the file of the block before it in its chain, by
names that are given once and for ever. What is torn, of another model, or of a chain whose beginning is gone is
deleted, never served. Files are readable for their owner alone: they hold prompts.
"""

import contextlib
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
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import ExitCode, StartupError
from core.kv_cache import BlockCopies, BlockKey, BlockLabel
from core.types import NO_STORE, StoreState
from gpu.checkpoint import Checkpoint
from gpu.device import DeviceChoice, free_memory_bytes, to_device
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.memory_plan import offload_slots
from gpu.streams import Event, Streams

logger = logging.getLogger(__name__)


SUFFIX = ".kv"
MAGIC = b"steploop kv 1\n"  # another format, another number
DIGEST_BYTES = 32  # SHA-256
LENGTH = struct.Struct("<I")  # of the header
MAX_HEADER_BYTES = 64 * 1024


class BadFile(Exception):
    """Not a whole file of this model's."""


@dataclass(frozen=True, slots=True)
class Header:
    """
    Args:
        name: of the file itself, without its suffix.
        parent: the name of the block before it; None: the first of its chain, which has a domain.
        content: its token ids, as in a BlockKey, in hexadecimal digits.
    """

    fingerprint: str
    name: str
    parent: str | None
    domain: tuple[str, str] | None
    content: str


def encode(header: Header, content: bytes) -> bytes:
    """The whole file, its digest last."""
    raw = encode_header(header) + content
    return raw + hashlib.sha256(raw).digest()


def encode_header(header: Header) -> bytes:
    """All that comes before the content."""
    head = json.dumps(asdict(header)).encode()
    return MAGIC + LENGTH.pack(len(head)) + head


def read_header(file: Path) -> tuple[Header, int]:
    """What a file says of itself, which its digest is yet to bear out, and when it was last used, in ns.

    Raises:
        OSError: it cannot be read.
        BadFile: it is no regular file, its header cannot be one, or it names another file.
    """
    with _open_regular(file) as reader:
        header = _decode_header(reader.read(len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES))[0]
        used_ns = os.fstat(reader.fileno()).st_mtime_ns
    if f"{header.name}{SUFFIX}" != file.name:
        raise BadFile("it has another name than it claims")
    return header, used_ns


def read_content(file: Path, header: Header, block_bytes: int) -> bytes:
    """The keys and values behind a header that was read before.

    Raises:
        OSError: it cannot be read.
        BadFile: it is not whole, or not what its header has said before.
    """
    with _open_regular(file) as reader:
        raw = reader.read(len(MAGIC) + LENGTH.size + MAX_HEADER_BYTES + block_bytes + DIGEST_BYTES + 1)
    if hashlib.sha256(raw[:-DIGEST_BYTES]).digest() != raw[-DIGEST_BYTES:]:
        raise BadFile("its content has another digest than it claims")
    found, end = _decode_header(raw)
    content = raw[end:-DIGEST_BYTES]
    if found != header or len(content) != block_bytes:
        raise BadFile("it is not of this size, or has changed meanwhile")
    return content


def _open_regular(file: Path) -> BinaryIO:
    """
    Raises:
        OSError: it cannot be read.
        BadFile: it is a directory, a pipe or a device, which may block, or never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile("it is not a regular file")
    return open(descriptor, "rb")


def _decode_header(raw: bytes) -> tuple[Header, int]:
    """The header that a file begins with, and where it ends.

    Raises:
        BadFile: there is none, or it says nothing that could be.
    """
    start = len(MAGIC) + LENGTH.size
    if not raw.startswith(MAGIC) or len(raw) < start:
        raise BadFile("it is of another format")
    end = start + LENGTH.unpack_from(raw, len(MAGIC))[0]
    try:
        header = _checked(json.loads(raw[start:end]))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFile("its header cannot be read") from error
    return header, end


def _checked(found: object) -> Header:
    """
    Raises:
        TypeError, ValueError: it is no header.
    """
    match found:
        case {
            "fingerprint": str(model),
            "name": str(name),
            "parent": parent,
            "domain": domain,
            "content": str(content),
            **more,
        } if not more:
            tokens = bytes.fromhex(content)
        case _:
            raise TypeError("a field is missing, too many, or of another type")
    match parent, domain:
        case None, [str(tenant), str(salt)]:
            header = Header(model, name, None, (tenant, salt), content)
        case str(), None:
            header = Header(model, name, parent, None, content)
        case _:
            raise TypeError("it begins a chain and goes on from another block, or neither")
    if len(tokens) != 4 * BLOCK_SIZE:
        raise ValueError("not the tokens of a block")
    return header


PART_SUFFIX = ".kv.part"
DATE_STEP_NS = 1_000_000  # file systems that keep coarser times are not worth an order
RETRY_S = 60.0  # after a write that failed


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


LOCK_NAME = "lock"
QUEUE_BYTES = 64 * 1024**2  # that wait for the disk; what comes on top is written at the end
SAVE_S = 8.0  # at the end: the process is given ten seconds


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


STAGING_BYTES = 64 * 1024**2  # on the device, of blocks that are copied at once
MEASURED_BLOCKS, NUM_MEASURES = 8, 3


class HostMemory:
    """Slots of one block each: the keys and values of all layers, together.

    Args:
        num_slots: at least one.
        cache: whose blocks are copied.
    """

    def __init__(self, config: ModelConfig, num_slots: int, cache: KVCache, streams: Streams) -> None:
        dtype = cache.tensor.dtype
        self.num_slots = num_slots
        self.block_bytes = bytes_per_block(config, dtype)
        self._num_staged = max(1, STAGING_BYTES // self.block_bytes)
        self._cache, self._stream = cache, streams.current
        shape = (num_slots, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        pinned = streams.pinned_for_good(num_slots * self.block_bytes)
        self.tensor = pinned.view(dtype).view(shape)  # [slots, layers, 2, 16, kv_heads, head_dim]

    def copy(self, copies: BlockCopies) -> "CopyTicket":
        """Start to copy out, then back: behind what was sent to the device, and before what will be."""
        started = self._stream.record(is_timed=True)
        for slots, blocks in self._staged(list(copies.offloads.items())):
            self._stream.run(partial(self._copy_out, blocks, slots))
        for blocks, slots in self._staged(list(copies.restores.items())):
            self._stream.run(partial(self._copy_back, blocks, slots))
        return CopyTicket(copies, started, self._stream.record(is_timed=True))

    def measure(self) -> float:
        """Seconds that one block takes to the host or back: the least of a few tries. Overwrites the first slots."""
        num_blocks = min(MEASURED_BLOCKS, self.num_slots, self._cache.num_blocks)
        same = {number: number for number in range(num_blocks)}
        took_s = [self.copy(BlockCopies(offloads=same, restores=same)).wait_s() for _ in range(NUM_MEASURES)]
        return min(took_s) / (2 * num_blocks)

    def read(self, slot: int) -> bytes:
        return self.tensor[slot].reshape(-1).view(torch.uint8).numpy().tobytes()

    def write(self, slot: int, content: bytes) -> None:
        """Fill a slot with what read() has given."""
        self.tensor[slot].reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _staged(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        for first in range(0, len(pairs), self._num_staged):
            part = pairs[first : first + self._num_staged]
            yield [pair[0] for pair in part], [pair[1] for pair in part]

    def _copy_out(self, blocks: list[int], slots: list[int]) -> None:
        found = self._cache.tensor.index_select(2, self._on_device(blocks))
        found = found.permute(2, 0, 1, 3, 4, 5).contiguous()  # [copies, layers, 2, 16, heads, dim]
        for i, slot in enumerate(slots):
            self.tensor[slot].copy_(found[i], non_blocking=True)

    def _copy_back(self, blocks: list[int], slots: list[int]) -> None:
        found = self._cache.tensor.new_empty((len(slots), *self.tensor.shape[1:]))
        for i, slot in enumerate(slots):
            found[i].copy_(self.tensor[slot], non_blocking=True)
        self._cache.tensor.index_copy_(2, self._on_device(blocks), found.permute(1, 2, 0, 3, 4, 5))

    def _on_device(self, blocks: list[int]) -> Tensor:
        return to_device(np.array(blocks), self._cache.tensor.device)


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """Copies on their way, between two points of the stream's work."""

    copies: BlockCopies
    started: Event
    done: Event

    def wait_s(self) -> float:
        """Seconds that they took, once they are done."""
        return self.done.seconds_since(self.started)


@dataclass(slots=True)
class KVOffload:
    """Host memory and, where one is given, the directory that outlives the process. A core.plan.BlockStore.

    Args:
        stored: slots that were filled from the directory, see core.kv_cache.HostBlocks.
    """

    memory: HostMemory
    directory: KVDirectory | None = None
    copy_s: float = 0.0
    stored: list[tuple[int, BlockLabel]] = field(default_factory=list)

    def start(self, copies: BlockCopies) -> CopyTicket:
        return self.memory.copy(copies)

    def finish(self, ticket: CopyTicket) -> float:
        """Wait for the copies, have the directory follow; returns the seconds that they took."""
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
        """Have the files of these deleted."""
        if self.directory is not None:
            self.directory.drop(slots)

    def keep(self, copies: BlockCopies | None) -> None:
        """No more steps come: copy these out, and let all that lies here be written, as far as time allows."""
        if self.directory is None:
            return
        if copies is None:
            copies = BlockCopies()
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
    """Host memory as the operator asks for it, filled with what the directory holds; None: none is asked for.

    Raises:
        StartupError: it does not fit, or the directory cannot be used.
    """
    if engine.kv_offload_bytes == 0:
        return None
    num_slots = offload_slots(config, engine, choice.dtype, free_memory_bytes(torch.device("cpu")))
    try:
        memory = HostMemory(config, num_slots, cache, streams)
    except (OSError, RuntimeError) as error:
        cause = f"Host memory of --kv-offload-memory cannot be pinned for the device: {error}."
        raise StartupError(cause, "less --kv-offload-memory.", ExitCode.MEMORY) from error
    offload = KVOffload(memory)
    offload.copy_s = memory.measure()
    if engine.kv_offload_dir is not None:
        fingerprint = model_fingerprint(checkpoint, config, choice.dtype_name, engine.quantize)
        path, limit_bytes = Path(engine.kv_offload_dir), engine.kv_offload_dir_bytes
        offload.directory = open_directory(path, limit_bytes, fingerprint, memory.block_bytes)
        offload.stored = load_directory(path, offload.directory, memory)
    return offload


def load_directory(path: Path, directory: KVDirectory, memory: HostMemory) -> list[tuple[int, BlockLabel]]:
    """
    Raises:
        StartupError: what lies there cannot be read or deleted.
    """
    try:
        return directory.load(memory.num_slots, memory.write)
    except OSError as error:
        directory.close(time.monotonic() + SAVE_S)
        raise StartupError(
            f"Keys and values cannot be read from {path}: {error.filename or path}: {error.strerror}.",
            "--kv-offload-dir with a directory whose files are all this server's own, or an empty one.",
        ) from error


def open_directory(path: Path, limit_bytes: int | None, fingerprint: str, block_bytes: int) -> KVDirectory:
    """
    Raises:
        StartupError: it cannot be made or written to, or another process uses it.
    """
    try:
        return KVDirectory(path, limit_bytes, fingerprint, block_bytes)
    except BlockingIOError:
        raise StartupError(
            f"Another process keeps its keys and values in {path}.",
            "--kv-offload-dir with a directory of its own.",
            ExitCode.TRANSIENT,
        ) from None
    except OSError as error:
        raise StartupError(
            f"Keys and values cannot be kept in {path}: {error.strerror}.",
            "--kv-offload-dir with one that can be.",
            ExitCode.TRANSIENT if error.errno in (errno.ENOSPC, errno.EDQUOT) else None,
        ) from error
