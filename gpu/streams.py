"""Streams, events and pinned memory of a device: what code that overlaps copies with work asks for. Thread: engine.

A seam, so that such code runs without a device as well: there a fake stands in that does late what a device may do late
(tests/gpu/late_streams.py).
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu.pinned_memory import pinned_for_good


class Event(Protocol):
    """A point in the work of a stream."""

    def synchronize(self) -> None:
        """Have the host wait for it."""
        ...

    def seconds_since(self, earlier: "Event") -> float:
        """What the device was at between two that were recorded as timed; waits for this one."""
        ...


class Stream(Protocol):
    """Work of a device, in order; that of two streams is in no order but by events."""

    def run(self, work: Callable[[], object]) -> None:
        """Start what this starts on the device: operators, and copies to and from pinned memory that do not block."""
        ...

    def record(self, is_timed: bool = False) -> Event:
        """After all that was started so far."""
        ...

    def wait(self, event: Event) -> None:
        """Have what is started from now on wait for it; the host does not."""
        ...


class Streams(Protocol):
    """
    Args:
        current: where operators of torch run.
        side: where copies run beside them.
    """

    current: Stream
    side: Stream

    def pinned(self, size_bytes: int) -> Tensor:
        """Memory of the host that a device copies from and to by itself: bytes. For small ones, that may go again."""
        ...

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        """The same of exactly so many bytes, until the process ends.

        Raises:
            OSError, RuntimeError: it cannot be had.
        """
        ...

    def on_device(self, size_bytes: int) -> Tensor:
        """Memory of the device: bytes. What was sent to `current` before may still use it, for whoever had it."""
        ...


class CudaEvent:
    """Implements Event. event: recorded."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """Implements Stream."""

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
        self._stream.wait_event(event.event)


class CudaStreams:
    """Implements Streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.current: Stream = CudaStream(torch.cuda.current_stream(device))
        self.side: Stream = CudaStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        return pinned_for_good(size_bytes)

    def on_device(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
