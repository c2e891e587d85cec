"""Streams, events, pinned memory and clocks of a device, and the copies that run beside its work. Thread: engine.

Code that overlaps copies with work asks for `Streams`: a GPU's, a CPU's (what it is asked is done at once), or the
tests' fake, which does late what a device may do late (tests/gpu/late_streams.py).
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
    """A point in the work of a stream: on a CPU it has come."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Have the host wait for it."""

    def seconds_since(self, earlier: Self) -> float:
        """What the device was at between two that were recorded as timed; waits for this one."""
        return self.at_s - earlier.at_s


class Stream:
    """Work of a device, in order; that of two streams is in no order but by events."""

    def run(self, work: Callable[[], object]) -> None:
        """Start what this starts on the device: operators, and copies to and from pinned memory that do not block."""
        work()

    def record(self, is_timed: bool = False) -> Event:
        """After all that was started so far."""
        return Event()

    def wait(self, event: Event) -> None:
        """Have what is started from now on wait for it; the host does not."""


class Streams:
    """A CPU's: what they are asked to do is done when they are asked.

    Args:
        is_host: the device is the host: what it writes is there at once.
        current: where operators of torch run.
        side: where copies run beside them.
    """

    is_host = True
    current: Stream
    side: Stream

    def __init__(self) -> None:
        self.current = self.side = Stream()

    def pinned(self, size_bytes: int) -> Tensor:
        """Memory of the host that a device copies from and to by itself: bytes. For small ones, that may go again."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        """The same of exactly so many bytes, until the process ends.

        Raises:
            OSError, RuntimeError: it cannot be had.
        """
        return self.pinned(size_bytes)

    def on_device(self, size_bytes: int) -> Tensor:
        """Memory of the device: bytes. What was sent to `current` before may still use it, for whoever had it."""
        return torch.empty(size_bytes, dtype=torch.uint8)


class CudaEvent(Event):
    """event: recorded."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def synchronize(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for it."""
        stream.wait_event(self._event)


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
        event.hold(self._stream)


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
    """Host memory that a CUDA device copies from and to by itself: bytes, zero at first.

    Torch's own allocator of it rounds up to a power of two, as suits small buffers that come and go: of 70 GiB it makes
    128. This is ordinary memory that the driver is told to pin, and stays until the process ends.

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
BUFFER_BYTES = 64 * 1024**2  # of a slice: a link of 50 GB/s takes 1.3 ms for it, a thousand times what starts a copy

Fill = Callable[[Target, Tensor], None]
"""Puts a tensor of the host into its target."""


@dataclass(slots=True)
class _Buffer:
    """
    Args:
        used: by what was sent to read it; at first by whoever had that memory before.
        copied: out of the pinned bytes; None: never yet.
    """

    pinned: Tensor
    on_device: Tensor
    used: Event
    copied: Event | None = None


class StagedCopies:
    """Copies from the host that run beside the device's work: one is written while the one before it is on its way.

    Two buffers take turns, on the host and on the device, each used anew once what reads it is done. Nothing is
    allocated on the way, but where a copy is larger than any before: the buffers are enlarged for good.

    Args:
        buffer_bytes: of a usual copy.
    """

    def __init__(self, streams: Streams, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._buffers = [] if streams.is_host else self._make_buffers()

    def send(self, size_bytes: int, write: Callable[[Tensor], object], use: Callable[[Tensor], object]) -> None:
        """Copy what `write` puts into pinned bytes, and send `use`, which gets them on the device and keeps nothing."""
        if size_bytes > self._buffer_bytes:
            self._enlarge(1 << (size_bytes - 1).bit_length())
        self._buffers.reverse()
        buffer, side, current = self._buffers[0], self._streams.side, self._streams.current
        if buffer.copied is not None:
            buffer.copied.synchronize()  # what it held before has left for the device
        source, target = buffer.pinned[:size_bytes], buffer.on_device[:size_bytes]
        write(source)
        side.wait(buffer.used)
        side.run(lambda: target.copy_(source, non_blocking=True))
        buffer.copied = side.record()
        current.wait(buffer.copied)
        current.run(lambda: use(target))
        buffer.used = current.record()

    def send_integers(self, parts: Sequence[Int32Array], use: Callable[[list[Tensor]], object]) -> None:
        """What a step changes: `use` gets the parts on the device, flat. On a CPU they are there."""
        sizes = [part.size for part in parts]
        found = np.concatenate([part.reshape(-1) for part in parts])
        if self._streams.is_host:
            use(list(torch.split(torch.from_numpy(found), sizes)))
            return

        def write(pinned: Tensor) -> None:
            pinned.numpy().view(np.int32)[:] = found

        self.send(found.nbytes, write, lambda sent: use(list(torch.split(sent.view(torch.int32), sizes))))

    def fill(self, target: Target, tensor: Tensor) -> None:
        """See Target.fill: a slice of rows at a time, which is read from its file while another is copied.

        What is started may still be on its way afterwards, which the current stream waits for.
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
        """The smaller ones may go once nothing reads them any more: before the others are there."""
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
    """How targets on this device are filled: on a CPU straight from the files."""
    return StagedCopies(CudaStreams(device)).fill if device.type == "cuda" else Target.fill


def staged_bytes(device: torch.device) -> int:
    """What this takes of the device's memory, beside the weights and until they are there."""
    return NUM_BUFFERS * BUFFER_BYTES if device.type == "cuda" else 0


def _as(buffer: Tensor, rows: Tensor) -> Tensor:
    """Bytes as rows of that shape and format."""
    return buffer.view(rows.dtype).view(rows.shape)


logger = logging.getLogger(__name__)

TIMED_ROUNDS = 3
NEVER_S = math.inf  # what a way takes that fails

Timer = Callable[[Callable[[], object]], float]
"""Some work on the device, which it may do several times -> the seconds it takes"""


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """torch.cuda.graph, which leaves more behind where the work cannot be captured.

    By itself its own stream would be the current one afterwards, and the allocator as in a capture that goes on: it
    would give no memory back to the device any more, and refuse the pool.

    Args:
        pool: a graph_pool_handle. Where this raises, another is to take its place: pinned memory's allocator, which
            nobody can tell, refuses it still.
        stream: None: torch's own.
    """
    before = torch.cuda.stream(torch.cuda.current_stream())
    try:
        # Another thread may use the driver meanwhile: it is none of the graph's.
        with before, torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        with suppress(RuntimeError):  # the capture has ended as it should: it is the work that failed
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise


def graph_seconds(work: Callable[[], object]) -> float:
    """The best round on a CUDA device, of a graph as decode replays it: what the host takes to launch is not in it."""
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
    """What the clock says, or NEVER_S where the work fails there.

    Args:
        name: of the way, for the log.

    Raises:
        torch.AcceleratorError: the device is lost.
    """
    try:
        return clock(work)
    except Exception as error:  # whatever a compiler, a library or a driver makes of a device that it does not know
        synchronize(device)
        logger.warning("%s does not serve here: %s: %s", name, type(error).__name__, error)
        return NEVER_S
