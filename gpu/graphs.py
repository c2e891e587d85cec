"""CUDA graphs: work that was sent once, to be sent again as one. Thread: engine.

A replay launches the same kernels, on the same addresses, with the same numbers of the host: what a step reads and
writes has to lie in buffers that stay, and what depends on the step is read there, on the device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

GRANULE_BYTES = 2 * 1024**2  # what a driver gives of its memory at a time: less than that may not be seen


class CaptureError(Exception):
    """No graph can hold this work. What it was to compute can be computed without."""


class NoRoomForGraph(CaptureError):
    """There is no memory for one more graph; those that there are stay as they are."""


class Graph(Protocol):
    """
    Args:
        size_bytes: of the device's memory, what its capture has taken beside that of the recorder's other graphs.
    """

    size_bytes: int

    def replay(self) -> None:
        """Send the work again, behind what was sent before."""
        ...


class GraphRecorder(Protocol):
    """Makes graphs that share their memory: of two, one is replayed after the other."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Hold what this sends. It is done a few times, for what it loads, compiles and takes: it must do no harm.

        What it reads and writes must stay where it is; what it allocates is another graph's between replays.

        Raises:
            NoRoomForGraph: the device's memory has ended.
            CaptureError: it waits for the device, or what it sends depends on what was computed.
        """
        ...

    def give_back(self) -> None:
        """Let the device have what graphs that are gone have taken."""
        ...


@dataclass(slots=True)
class CudaGraph:
    """Implements Graph."""

    captured: torch.cuda.CUDAGraph
    size_bytes: int

    def replay(self) -> None:
        self.captured.replay()


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


class CudaRecorder:
    """Implements GraphRecorder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                work()
            free_bytes = self._free_bytes()
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self._pool, self._stream):
                work()
            graph.replay()  # the driver takes the rest of its part when a graph is first sent
            return CudaGraph(graph, max(0, free_bytes - self._free_bytes()))
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # raises where the device itself is lost
            self._pool = torch.cuda.graph_pool_handle()
            raise (NoRoomForGraph if is_of_memory(error) else CaptureError)(str(error)) from error

    def give_back(self) -> None:
        self._empty()
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses one that no graph has, and memory lies in yet

    def _empty(self) -> None:
        """All that torch keeps and does not use."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        """As the driver says."""
        self._empty()
        return int(torch.cuda.mem_get_info(self._device)[0])


def is_of_memory(error: BaseException | None) -> bool:
    """Whether memory that has ended is behind it: what ends a capture then speaks of the capture alone."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
