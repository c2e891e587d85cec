"""Fake device streams that do everything as late as a device may: when the host waits for it.

What nobody has waited for has not happened yet, and reads what its sources hold by the time it does. The device's
memory is the host's, and comes as an allocator that caches gives it: whoever had it before may still be writing to it,
on the current stream.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gpu.streams import Event, Stream, Streams


@dataclass(frozen=True)
class LateEvent(Event):
    stream: "LateStream"
    number: int  # of the stream's work, how much comes before it

    def synchronize(self) -> None:
        self.stream.run_until(self.number)

    def seconds_since(self, earlier: Self) -> float:
        """Of each piece of work, work_s."""
        self.synchronize()
        return self.stream.work_s * (self.number - earlier.number)


class LateStream(Stream):
    def __init__(self, work_s: float = 1.0) -> None:
        self.work_s = work_s
        self._late: deque[Callable[[], object]] = deque()
        self._num_done = 0
        self.num_started = 0  # not waits
        self.most_late = 0

    def run(self, work: Callable[[], object]) -> None:
        self._late.append(work)
        self.num_started += 1

    def leave(self, work: Callable[[], object]) -> None:
        """Work that somebody else has started."""
        self._late.append(work)

    def record(self, is_timed: bool = False) -> LateEvent:
        return LateEvent(self, self._num_done + len(self._late))

    def wait(self, event: Event) -> None:
        self._late.append(event.synchronize)

    def run_until(self, number: int) -> None:
        self.most_late = max(self.most_late, self.num_late)
        while self._num_done < number:
            self._num_done += 1
            self._late.popleft()()

    @property
    def num_late(self) -> int:
        return len(self._late)


@dataclass
class LateStreams(Streams):
    """Lists the sizes of what was allocated.

    Args:
        work_s: that each piece of work takes.
    """

    is_host = False
    work_s: float = 1.0
    current: LateStream = field(init=False)
    side: LateStream = field(init=False)
    pinned_bytes: list[int] = field(default_factory=list)
    for_good_bytes: list[int] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current, self.side = LateStream(self.work_s), LateStream(self.work_s)

    def pinned(self, size_bytes: int) -> Tensor:
        self.pinned_bytes.append(size_bytes)
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)

    def pinned_for_good(self, size_bytes: int) -> Tensor:
        self.for_good_bytes.append(size_bytes)
        return torch.full((size_bytes,), 0xFF, dtype=torch.uint8)

    def on_device(self, size_bytes: int) -> Tensor:
        self.device_bytes.append(size_bytes)
        found = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
        self.current.leave(partial(found.fill_, 0xEE))
        return found

    def finish(self) -> None:
        """Have all of the current stream's work done, and what it waits for."""
        self.current.record().synchronize()
