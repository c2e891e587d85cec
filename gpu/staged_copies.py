"""Tensors of the host into parameters on a device, while the next are read. Thread: engine (at start).

A slice of rows at a time goes through one of two pinned buffers: while a side stream copies it, the next slice is read
from its file into the other. What becomes of it on the device (another format, another order) is the work of the
stream that computes. The host holds two slices, whatever the model's size, and so does the device beside its weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.streams import CudaStreams, Event, Streams
from gpu.targets import Target

BUFFER_BYTES = 64 * 1024**2  # of a slice: a link of 50 GB/s takes 1.3 ms for it, a thousand times what starts a copy
NUM_BUFFERS = 2

Fill = Callable[[Target, Tensor], None]
"""Puts a tensor of the host into its target."""


@dataclass(slots=True)
class _Stage:
    """
    Args:
        used: by what computes, on the device; at first by whoever had that memory before.
        copied: out of the pinned bytes; None: never yet.
    """

    pinned: Tensor
    on_device: Tensor
    used: Event
    copied: Event | None = None


class StagedCopies:
    """
    Args:
        buffer_bytes: of a slice at most, unless one row is larger.
    """

    def __init__(self, streams: Streams, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._streams = streams
        self._buffer_bytes = buffer_bytes
        self._stages = self._make_stages(buffer_bytes)

    def fill(self, target: Target, tensor: Tensor) -> None:
        """See Target.fill; what is started may still be on its way afterwards, which the current stream waits for."""
        if tensor.numel():
            row_bytes = tensor[0].nbytes
            if row_bytes > self._buffer_bytes:
                self._enlarge(row_bytes)
            step = self._buffer_bytes // row_bytes
            for first in range(0, len(tensor), step):
                self._write_rows(target, first, tensor[first : first + step])
        self._streams.current.run(target.finish)

    def _write_rows(self, target: Target, first: int, rows: Tensor) -> None:
        current, side = self._streams.current, self._streams.side
        self._stages.reverse()
        stage = self._stages[0]
        if stage.copied is not None:
            stage.copied.synchronize()  # its last slice has left for the device
        pinned, on_device = (_as(buffer, rows) for buffer in (stage.pinned, stage.on_device))
        pinned.copy_(rows)  # reads the file
        side.wait(stage.used)
        side.run(lambda: on_device.copy_(pinned, non_blocking=True))
        stage.copied = side.record()
        current.wait(stage.copied)
        current.run(lambda: target.write_rows(first, on_device))
        stage.used = current.record()

    def _enlarge(self, buffer_bytes: int) -> None:
        """The smaller ones may go once nothing reads them any more."""
        for stage in self._stages:
            stage.used.synchronize()
        self._stages.clear()  # before the others are there
        self._stages = self._make_stages(buffer_bytes)
        self._buffer_bytes = buffer_bytes

    def _make_stages(self, buffer_bytes: int) -> list[_Stage]:
        streams = self._streams
        buffers = [(streams.pinned(buffer_bytes), streams.on_device(buffer_bytes)) for _ in range(NUM_BUFFERS)]
        return [_Stage(*buffer, streams.current.record()) for buffer in buffers]


def fill_on(device: torch.device) -> Fill:
    """How targets on this device are filled: on a CPU straight from the files."""
    return StagedCopies(CudaStreams(device)).fill if device.type == "cuda" else Target.fill


def staged_bytes(device: torch.device) -> int:
    """What this takes of the device's memory, beside the weights and until they are there."""
    return NUM_BUFFERS * BUFFER_BYTES if device.type == "cuda" else 0


def _as(buffer: Tensor, rows: Tensor) -> Tensor:
    """The beginning of a buffer of bytes, as rows of that shape and format."""
    return buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
