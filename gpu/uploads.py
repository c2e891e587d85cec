"""Integers of the host that every step needs: one copy from pinned memory, beside the step before. Thread: engine.

Two buffers take turns, on the host and on the device, so that the copy for step N + 1 runs while step N still reads its
own. Nothing is allocated on the way, but where a step brings more than any before: a buffer is enlarged for good.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array
from gpu.streams import Event, Streams

NUM_BUFFERS = 2
INT_BYTES = 4


@dataclass(slots=True)
class _Buffer:
    """
    Args:
        used: by what was sent to read it; at first by whoever had that memory before.
        copied: out of the pinned one; None: never yet.
    """

    pinned: Tensor  # int32
    on_device: Tensor  # int32
    used: Event
    copied: Event | None = None


class Uploads:
    """
    Args:
        room: integers of a usual copy.
    """

    def __init__(self, streams: Streams, room: int) -> None:
        self._streams = streams
        self._buffers = [self._buffer(room) for _ in range(NUM_BUFFERS)]

    def send(self, parts: Sequence[Int32Array], use: Callable[[list[Tensor]], object]) -> None:
        """Copy the parts up, and send what uses them: it gets them on the device, flat, and must not keep them."""
        sizes = [part.size for part in parts]
        size = sum(sizes)
        buffer, side, current = self._next_buffer(size), self._streams.side, self._streams.current
        buffer.pinned.numpy()[:size] = np.concatenate([part.reshape(-1) for part in parts])
        source, target = buffer.pinned[:size], buffer.on_device[:size]
        side.wait(buffer.used)
        side.run(lambda: target.copy_(source, non_blocking=True))
        buffer.copied = side.record()
        current.wait(buffer.copied)
        current.run(lambda: use(list(torch.split(target, sizes))))
        buffer.used = current.record()

    def _next_buffer(self, size: int) -> _Buffer:
        """The one of two copies ago, or a larger one in its place; the host may write to it."""
        self._buffers.reverse()
        buffer = self._buffers[0]
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if buffer.pinned.numel() < size:
            self._buffers[0] = self._buffer(1 << (size - 1).bit_length())
        return self._buffers[0]

    def _buffer(self, room: int) -> _Buffer:
        streams, size_bytes = self._streams, room * INT_BYTES
        pinned, on_device = streams.pinned(size_bytes), streams.on_device(size_bytes)
        return _Buffer(pinned.view(torch.int32), on_device.view(torch.int32), streams.current.record())
