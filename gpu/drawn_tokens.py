"""The tokens that slots drew last: on the device for the next step, and on their way to the host. Thread: engine.

The next step's batch takes them where its plan says PENDING, so that it can be sent before they are read. They come
down into one of two buffers in turn, behind an event: who waits for step N does not wait for N+1, which was sent after
it. On a CPU all is done when it is asked for, and there is nothing to wait for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.batch import DeviceBatch
from gpu.sampler import AskedLogprobs, Drawn, RowLogprobs
from gpu.streams import Event, Streams

NUM_BUFFERS = 2  # steps whose tokens may be on their way


@dataclass(slots=True)
class OnTheirWay:
    """What one step drew, on the host once the event has come."""

    token_ids: Tensor  # [rows], int64
    is_finite: Tensor  # [rows]
    logprobs: RowLogprobs | None
    event: Event

    def wait(self) -> None:
        self.event.synchronize()


class DrawnTokens:
    """
    Args:
        num_slots: rows of a step, at most.
        last_tokens: what each slot drew last, on the device: int64 [slots].
    """

    def __init__(self, num_slots: int, streams: Streams, last_tokens: Tensor) -> None:
        self._streams = streams
        self._last_tokens = last_tokens
        self._buffers = [
            (self._host(num_slots, torch.int64), self._host(num_slots, torch.bool)) for _ in range(NUM_BUFFERS)
        ]

    def fill_pending(self, batch: DeviceBatch) -> None:
        """Put the tokens that slots drew last where the plan asked for them."""
        if batch.pending is not None:
            last = self._last_tokens[batch.pending.slots].to(batch.token_ids.dtype)
            batch.token_ids.index_copy_(0, batch.pending.tokens, last)

    def send(self, drawn: Drawn) -> OnTheirWay:
        """Start the way of what was drawn to the host."""
        self._buffers.reverse()
        token_ids, is_finite = (buffer[: len(drawn.token_ids)] for buffer in self._buffers[0])
        self._send(drawn.token_ids, token_ids)
        self._send(drawn.is_finite, is_finite)
        logprobs = None if drawn.logprobs is None else self._sent(drawn.logprobs)
        return OnTheirWay(token_ids, is_finite, logprobs, self._streams.current.record())

    def _sent(self, asked: AskedLogprobs) -> RowLogprobs:
        num_rows, size = len(asked.rows), len(asked.rows) * asked.most
        drawn, top = self._host(num_rows, torch.float32), self._host(size, torch.float32).view(num_rows, -1)
        kept = (drawn, top, self._host(size, torch.int64).view(num_rows, -1))

        def send() -> None:
            for source, target in zip(asked.find(), kept, strict=True):
                target.copy_(source, non_blocking=True)

        self._streams.current.run(send)
        return RowLogprobs(asked.rows, asked.num_top, *kept)

    def _send(self, source: Tensor, target: Tensor) -> None:
        self._streams.current.run(lambda: target.copy_(source, non_blocking=True))

    def _host(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._streams.pinned(num_elements * dtype.itemsize).view(dtype)
