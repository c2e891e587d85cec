"""Streams, events, pinned memory and clocks of a device, and copies that overlap its work. Thread: engine.

Code that overlaps copies with work asks for `Streams`: a GPU's, a CPU's (which does at once what it is asked), or the
tests' fake, which does everything as late as a device may (tests/gpu/late_streams.py).
"""

import logging
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array
from gpu.device import synchronize
from gpu.parameters import Target


class Event:
    """A point in a stream's work: on a CPU it has passed."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""

    def seconds_since(self, earlier: Self) -> float:
        """Device time between two events that were recorded as timed; waits for this one."""
        return self.at_s - earlier.at_s


class Stream:
    """Work of a device, in order; two streams are ordered by events only."""

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`, which starts operators and non-blocking copies to and from pinned memory."""
        work()

    def record(self, is_timed: bool = False) -> Event:
        """An event after all work started so far."""
        return Event()

    def wait(self, event: Event) -> None:
        """Make work started from now on wait for the event; the host does not wait."""


class Streams:
    """A CPU's: work is done when it is started.

    Args:
        is_host: the device is the host: what it writes is there at once.
        current: where torch's operators run.
        side: where copies run beside them.
    """

    is_host = True
    current: Stream
    side: Stream

    def __init__(self) -> None:
        self.current = self.side = Stream()

    def pinned(self, size_bytes: int) -> Tensor:
        """Bytes of host memory that the device copies from and to by itself, for small buffers that may be freed."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        """The same, exactly so many bytes, until the process ends.

        Raises:
            OSError, RuntimeError: there is not so much.
        """
        return self.pinned(size_bytes)

    def on_device(self, size_bytes: int) -> Tensor:
        """Bytes of the device's memory. Earlier work on `current` may still use them, for their former owner."""
        return torch.empty(size_bytes, dtype=torch.uint8)


class CudaEvent(Event):
    def __init__(self, event: Any) -> None:
        self.recorded = event

    def synchronize(self) -> None:
        self.recorded.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        self.recorded.synchronize()
        return float(earlier.recorded.elapsed_time(self.recorded)) / 1e3


class CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self, is_timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]  # torch's stubs leave it out
        event.record(self._stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.recorded)


class CudaStreams(Streams):
    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current = CudaStream(torch.cuda.current_stream(device))
        self.side = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        return pinned_for_good(size_bytes)

    def on_device(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)


def open_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()


def pinned_for_good(size_bytes: int) -> Tensor:
    """Host memory that a CUDA device copies from and to by itself: bytes, zero at first, until the process ends.

    Torch's own pinned allocator rounds up to a power of two, which suits small buffers: of 70 GiB it makes 128. This
    is ordinary memory that the driver is told to pin.

    Raises:
        OSError: the system has no such memory.
        RuntimeError: the driver does not pin it.
    """
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not Linux, or without large pages: pinning takes longer
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size_bytes, 0))
    return memory


NUM_BUFFERS = 2
BUFFER_BYTES = 64 * 1024**2  # a link of 50 GB/s takes 1.3 ms for it, a thousand times what starting a copy takes

Fill = Callable[[Target, Tensor], None]
"""Copies a tensor of the host into its target."""


@dataclass(slots=True)
class _Buffer:
    """
    Args:
        used: the device has read its half, or the memory's former owner is done with it.
        copied: the copy out of the pinned half; None: there was none yet.
    """

    pinned: Tensor
    on_device: Tensor
    used: Event
    copied: Event | None = None


class StagedCopies:
    """Copies from the host that overlap the device's work: the host writes one while another is under way.

    Two buffers take turns, on the host and on the device; each is reused once it has been read. A copy that is larger
    than any before enlarges them for good; nothing else allocates.

    Args:
        buffer_bytes: a usual copy's size.
    """

    def __init__(self, streams: Streams, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._buffers = [] if streams.is_host else self._make_buffers()

    def send(self, size_bytes: int, write: Callable[[Tensor], object], use: Callable[[Tensor], object]) -> None:
        """Copy what `write` puts into pinned bytes; `use` starts work on the device's bytes, and must not keep them."""
        if size_bytes > self._buffer_bytes:
            self._enlarge(1 << (size_bytes - 1).bit_length())
        self._buffers.reverse()
        buffer, side, current = self._buffers[0], self._streams.side, self._streams.current
        if buffer.copied is not None:
            buffer.copied.synchronize()
        source, target = buffer.pinned[:size_bytes], buffer.on_device[:size_bytes]
        write(source)
        side.wait(buffer.used)
        side.run(lambda: target.copy_(source, non_blocking=True))
        buffer.copied = side.record()
        current.wait(buffer.copied)
        current.run(lambda: use(target))
        buffer.used = current.record()

    def send_integers(self, parts: Sequence[Int32Array], use: Callable[[list[Tensor]], object]) -> None:
        """Copy a step's changes in one piece: `use` gets the parts on the device, flat."""
        sizes = [part.size for part in parts]
        found = np.concatenate([part.reshape(-1) for part in parts])
        if self._streams.is_host:
            use(list(torch.split(torch.from_numpy(found), sizes)))
            return

        def write(pinned: Tensor) -> None:
            pinned.numpy().view(np.int32)[:] = found

        self.send(found.nbytes, write, lambda sent: use(list(torch.split(sent.view(torch.int32), sizes))))

    def fill(self, target: Target, tensor: Tensor) -> None:
        """Target.fill, a slice of rows at a time: one is read from its file while another is copied.

        Copies may still be under way afterwards; the current stream waits for them.
        """
        if tensor.numel():
            step = max(1, self._buffer_bytes // tensor[0].nbytes)
            for first in range(0, len(tensor), step):
                self._fill_rows(target, first, tensor[first : first + step])
        self._streams.current.run(target.finish)

    def _fill_rows(self, target: Target, first: int, rows: Tensor) -> None:
        self.send(
            rows.nbytes,
            lambda pinned: _as(pinned, rows).copy_(rows),  # reads the file
            lambda sent: target.write_rows(first, _as(sent, rows)),
        )

    def _enlarge(self, buffer_bytes: int) -> None:
        """Replace the buffers once nothing reads them; the old are freed before the new are allocated."""
        for buffer in self._buffers:
            buffer.used.synchronize()
        self._buffers.clear()
        self._buffer_bytes = buffer_bytes
        self._buffers = self._make_buffers()

    def _make_buffers(self) -> list[_Buffer]:
        streams, size_bytes = self._streams, self._buffer_bytes
        buffers = [(streams.pinned(size_bytes), streams.on_device(size_bytes)) for _ in range(NUM_BUFFERS)]
        return [_Buffer(*buffer, streams.current.record()) for buffer in buffers]


def fill_on(device: torch.device) -> Fill:
    """How targets on this device are filled: on a CPU, straight from the files."""
    return StagedCopies(CudaStreams(device)).fill if device.type == "cuda" else Target.fill


def staged_bytes(device: torch.device) -> int:
    """Device memory that fill_on takes while weights load."""
    return NUM_BUFFERS * BUFFER_BYTES if device.type == "cuda" else 0


def _as(buffer: Tensor, rows: Tensor) -> Tensor:
    """Bytes as a tensor like `rows`."""
    return buffer.view(rows.dtype).view(rows.shape)


logger = logging.getLogger(__name__)

TIMED_ROUNDS = 3
NEVER_S = math.inf  # the time of an implementation that fails

Timer = Callable[[Callable[[], object]], float]
"""Work on the device, which may be repeated -> the seconds it takes"""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """torch.cuda.graph, with the cleaning up that it leaves out where the work cannot be captured.

    Without it, the capture's stream would stay the current one, and the allocator would behave as if the capture went
    on: it would return no memory to the device, and refuse the pool.

    Args:
        pool: a graph_pool_handle. Use another one after this raises: the allocator of pinned memory still refuses it.
        stream: None: torch's own.
    """
    before = torch.cuda.stream(torch.cuda.current_stream())
    try:
        # thread_local: other threads may use the driver meanwhile.
        with before, torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        with suppress(RuntimeError):  # the capture itself has ended properly: the work failed
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise


def graph_seconds(work: Callable[[], object]) -> float:
    """The best round of a CUDA graph of the work, as decode replays it: without the host's launch time."""
    work()  # compiles, and loads libraries
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with recording(graph, torch.cuda.graph_pool_handle()):
        work()
    graph.replay()
    best_ms = math.inf
    for _ in range(TIMED_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return best_ms / 1000


def seconds_or_never(clock: Timer, work: Callable[[], object], name: str, device: torch.device) -> float:
    """What the clock measures, or NEVER_S where the work fails on this device.

    Args:
        name: the implementation's, for the log.

    Raises:
        torch.AcceleratorError: the device is lost.
    """
    try:
        return clock(work)
    except Exception as error:  # a compiler, library or driver may fail in any way on a device it does not know
        synchronize(device)
        logger.warning("%s does not serve here: %s: %s", name, type(error).__name__, error)
        return NEVER_S
