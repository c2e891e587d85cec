"""The tokens that slots drew last: on the device for the next step, and on their way to the host. Thread: engine.

The next step's batch takes them where its plan says PENDING, so that it can be sent before they are read. They come
down into one of two buffers in turn, behind an event: who waits for step N does not wait for N+1, which was sent after
it. On a CPU all is done when it is asked for, and there is nothing to wait for.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.batch import DeviceBatch
from gpu.sampler import Drawn, RowLogprobs

IntArray = npt.NDArray[np.signedinteger[Any]]

NUM_BUFFERS = 2  # steps whose tokens may be on their way


@dataclass(slots=True)
class OnTheirWay:
    """What one step drew, on the host once the event has come."""

    token_ids: Tensor  # [rows], int64
    is_finite: Tensor  # [rows]
    logprobs: RowLogprobs | None
    event: torch.cuda.Event | None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class DrawnTokens:
    """
    Args:
        num_slots: rows of a step, at most.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)  # [slots]
        self._buffers = [
            (self._host(num_slots, torch.int64), self._host(num_slots, torch.bool)) for _ in range(NUM_BUFFERS)
        ]

    def fill_pending(self, batch: DeviceBatch) -> None:
        """Put the tokens that slots drew last where the plan asked for them."""
        if batch.pending is not None:
            last = self._last[batch.pending.slots].to(batch.token_ids.dtype)
            batch.token_ids.index_copy_(0, batch.pending.tokens, last)

    def send(self, drawn: Drawn, slots: IntArray) -> OnTheirWay:
        """Keep what these slots have drawn, and start its way to the host.

        Args:
            slots: [rows], each once.
        """
        index = torch.from_numpy(slots.astype(np.int64)).to(self._device, non_blocking=True)
        self._last.index_copy_(0, index, drawn.token_ids)
        self._buffers.reverse()
        token_ids, is_finite = (buffer[: len(slots)] for buffer in self._buffers[0])
        token_ids.copy_(drawn.token_ids, non_blocking=True)
        is_finite.copy_(drawn.is_finite, non_blocking=True)
        logprobs = None if drawn.logprobs is None else self._sent(drawn.logprobs)
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stubs leave it out
            event.record()
        return OnTheirWay(token_ids, is_finite, logprobs, event)

    def _sent(self, logprobs: RowLogprobs) -> RowLogprobs:
        drawn, top, top_ids = (
            self._host(tuple(found.shape), found.dtype).copy_(found, non_blocking=True)
            for found in (logprobs.drawn, logprobs.top, logprobs.top_ids)
        )
        return RowLogprobs(logprobs.rows, logprobs.num_top, drawn, top, top_ids)

    def _host(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_cuda)
