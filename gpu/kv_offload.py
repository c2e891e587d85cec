"""Blocks of keys and values in host memory, and the copies between it and the device. Thread: engine.

Which block is copied where is core/kv_cache.py's to decide. On a GPU the memory is pinned and the copies run on the
stream of the steps: each is done before the next step's rows, and none holds the host up.
"""

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import ExitCode, StartupError
from core.kv_cache import BlockCopies, BlockLabel
from core.types import NO_STORE, StoreState
from gpu.checkpoint import Checkpoint
from gpu.device import DeviceChoice, free_memory_bytes, to_device
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.kv_directory import SAVE_S, KVDirectory, model_fingerprint
from gpu.memory_plan import offload_slots
from gpu.streams import Event, Streams

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
        stored: slots that were filled from the directory, see core.host_blocks.HostBlocks.
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
