"""Streams of a CPU: what they are asked to do is done when they are asked. Thread: engine."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gpu.streams import CudaStreams, Event, Stream, Streams


class HostEvent:
    """Implements Event."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        """It has come."""

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, HostEvent)
        return self.at_s - earlier.at_s


class HostStream:
    """Implements Stream."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self, is_timed: bool = False) -> Event:
        return HostEvent()

    def wait(self, event: Event) -> None:
        """It has come."""


class HostStreams:
    """Implements Streams."""

    def __init__(self) -> None:
        self.current: Stream = HostStream()
        self.side: Stream = HostStream()

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        return self.pinned(size_bytes)

    def on_device(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


def open_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
