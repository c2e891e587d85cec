"""What slots ask of sampling, as tables on a device, brought up to date as slots start. Thread: engine.

What starts is packed as int32, so that it can go up in one piece with whatever else a step needs there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array
from gpu.kernels.device_rows import scatter_rows
from gpu.sampling_slots import Factor, Number, SamplingSlots

MAX_BIASES = 512  # of a slot: more than requests may have by default
MAX_STOP_IDS = 64


@dataclass(frozen=True, slots=True)
class StartedSlots:
    """
    Args:
        slots: all that have started; seen_slots: those whose row of the tokens seen is made anew.
        parts: what SlotTables.put needs of them on the device.
    """

    slots: list[int]
    seen_slots: list[int]
    parts: list[Int32Array]


class SlotTables:
    """
    Args:
        asked: kept, and read where slots have started since.
    """

    def __init__(self, asked: SamplingSlots) -> None:
        self._asked = asked
        num_slots, device = len(asked.numbers), asked.device
        self.numbers = torch.empty((num_slots, len(Number)), dtype=torch.int64, device=device)
        self.factors = torch.empty((num_slots, len(Factor)), device=device)
        self.biases = torch.empty((num_slots, MAX_BIASES), device=device)
        self.bias_ids = torch.empty((num_slots, MAX_BIASES), dtype=torch.int32, device=device)
        self.stop_ids = torch.empty((num_slots, MAX_STOP_IDS), dtype=torch.int32, device=device)
        self.seen = asked.reserve_seen()  # now: what is captured knows it
        self._written = (self.numbers, self.factors, self.biases, self.bias_ids, self.stop_ids)

    def take_started(self) -> StartedSlots:
        """Those that have started since it was asked before."""
        slots, seen = sorted(self._asked.take_changed()), self._asked.take_seen()
        parts = [
            np.array(slots, dtype=np.int32),
            *(column.view(np.int32).reshape(-1) for column in self._columns(slots)),
        ]
        for tokens in seen.values():
            parts += [tokens.token_ids.astype(np.int32), tokens.counts]
        return StartedSlots(slots, list(seen), parts)

    def put(self, started: StartedSlots, parts: list[Tensor]) -> None:
        """parts: those of it, on the device."""
        slots, num_slots = parts[0], len(started.slots)
        for table, part in zip(self._written, parts[1:], strict=False):
            if len(part):
                scatter_rows(table.view(torch.int32), slots, part.view(num_slots, -1))
        seen = iter(parts[1 + len(self._written) :])
        for slot, token_ids, counts in zip(started.seen_slots, seen, seen, strict=True):
            row = self.seen[slot].zero_()
            scatter_rows(row, token_ids, counts)

    def _columns(self, slots: list[int]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        """Of the tables that are written, in their order; lists that nobody has are left out."""
        asked = self._asked
        biases = _padded([asked.biases[slot] for slot in slots], MAX_BIASES, np.float32)
        bias_ids = _padded([asked.bias_ids[slot] for slot in slots], MAX_BIASES, np.int32)
        stop_ids = _padded([asked.stop_ids[slot] for slot in slots], MAX_STOP_IDS, np.int32)
        return [asked.numbers[slots], asked.factors[slots], biases, bias_ids, stop_ids]


def _padded(
    lists: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]], width: int, dtype: type[np.generic]
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """[lists, width], the first of each; empty where all are."""
    if not any(map(len, lists)):
        return np.empty(0, dtype=dtype)
    found = np.zeros((len(lists), width), dtype=dtype)
    for row, values in zip(found, lists, strict=True):
        row[: len(values)] = values[:width]
    return found
