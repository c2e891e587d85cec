"""CUDA graphs: work that was sent once, to be sent again as one. Thread: engine.

A replay launches the same kernels, on the same addresses, with the same numbers of the host: what a step reads and
writes has to lie in buffers that stay, and what depends on the step is read there, on the device. On a CPU a twin
behaves alike (twin_graphs.py).
"""

from collections.abc import Callable
from typing import Protocol

import torch


class CaptureError(Exception):
    """No graph can hold this work. What it was to compute can be computed without."""


class Graph(Protocol):
    def replay(self) -> None:
        """Send the work again, behind what was sent before."""
        ...


class GraphRecorder(Protocol):
    """Makes graphs that share their memory: of two, one is replayed after the other."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Hold what this sends. It is done once, for what it loads, compiles and allocates: it must do no harm.

        What it reads and writes must stay where it is; what it allocates is another graph's between replays.

        Raises:
            CaptureError: it waits for the device, or what it sends depends on what was computed.
        """
        ...


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
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Another thread may use the driver meanwhile: it is none of the graph's.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # raises where the device itself is lost
            raise CaptureError(str(error)) from error
        return graph


def open_recorder(device: torch.device) -> GraphRecorder:
    if device.type == "cuda":
        return CudaRecorder(device)
    from gpu.twin_graphs import TwinRecorder

    return TwinRecorder()
