"""Launches kernels/sampling.py on a CUDA device. Thread: engine.

A launch reads nothing of the host, and all that it reads and writes lies in buffers that stay where they are, so that a
CUDA graph may hold it. The slots' settings lie in tables there, brought up to date as slots start: packed as int32, so
that they go up in one piece with whatever else a step sends.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import Int32Array
from gpu.kernels.rows import scatter_rows
from gpu.kernels.sampling import NUM_LOGPROBS, SEGMENT, end_rows, scan_rows
from gpu.kernels.sizes import next_power_of_two
from gpu.rows import NO_SLOT
from gpu.sampler import Factor, IntArray, LaunchedSampler, Number, SamplingSlots

MAX_BIASES = 512  # of a slot: more than requests may have by default
MAX_STOP_IDS = 64
SEGMENT_TOKENS: int = SEGMENT.value


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are read.

    Args:
        num_splits: programs that share a row, a range of its segments each.
        group: segments read at once.
        num_warps: of a program.
    """

    num_splits: int
    group: int
    num_warps: int


# By the most rows each is for: fewer rows than a device has multiprocessors are split. By arithmetic, for the 132 of
# an H200, not by measurement.
SHAPES: tuple[tuple[int, Shape], ...] = (
    (8, Shape(16, 16, 8)),
    (32, Shape(4, 16, 8)),
    (64, Shape(2, 16, 8)),
    (1 << 30, Shape(1, 16, 8)),
)
SPLIT_FROM = 1 << 14  # tokens: one program reads a row of a smaller vocabulary


def shape_of(num_rows: int, vocab_size: int) -> Shape:
    """The launch shape depends only on row count and vocabulary, so that a graph can hold it."""
    shape = next(shape for most, shape in SHAPES if num_rows <= most)
    return shape if vocab_size >= SPLIT_FROM else Shape(1, shape.group, shape.num_warps)


class DeviceSampler(LaunchedSampler):
    """
    Args:
        settings: read when slots have started since the last launch.
        max_rows: of a step; None: as many as there are slots.
        shape: None: as shape_of says.
    """

    def __init__(self, settings: SamplingSlots, max_rows: int | None = None, shape: Shape | None = None) -> None:
        self._settings, self._shape = settings, shape
        num_slots, vocab_size, device = len(settings.numbers), settings.vocab_size, settings.device
        max_rows = num_slots if max_rows is None else max_rows
        max_splits = max(shape.num_splits for _, shape in SHAPES) if shape is None else shape.num_splits
        max_group = max(shape.group for _, shape in SHAPES) if shape is None else shape.group
        num_segments, num_gathered = -(-vocab_size // SEGMENT_TOKENS), max_group * SEGMENT_TOKENS

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._numbers, self._factors = room(num_slots, len(Number), dtype=torch.int64), room(num_slots, len(Factor))
        self._biases, self._bias_ids = room(num_slots, MAX_BIASES), room(num_slots, MAX_BIASES, dtype=torch.int32)
        self._stop_ids = room(num_slots, MAX_STOP_IDS, dtype=torch.int32)
        self._seen = settings.reserve_seen()  # now: captured graphs hold its address
        self._rows = torch.full((2, max_rows), NO_SLOT, dtype=torch.int64, device=device)  # slots, positions
        self._scratch = room(max_rows, vocab_size)
        self._maxima, self._listed = room(max_rows, num_segments), room(max_rows, num_segments, dtype=torch.int32)
        self._values, self._tokens = room(max_rows, num_gathered), room(max_rows, num_gathered, dtype=torch.int32)
        self._found = room(max_rows, max_splits, 3)
        self._found_tokens = room(max_rows, max_splits, 2, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.is_finite = room(max_rows, dtype=torch.bool)
        self.logprobs = room(max_rows, NUM_LOGPROBS.value)

    def can_sample(self, slots: IntArray) -> bool:
        counts = self._settings.numbers[slots]
        has_room = counts[:, Number.NUM_BIASES] <= MAX_BIASES
        return bool((has_room & (counts[:, Number.NUM_STOP_IDS] <= MAX_STOP_IDS)).all())

    def take_started(self) -> list[Int32Array]:
        settings = self._settings
        slots, seen = sorted(settings.take_changed()), settings.take_seen()
        numbers, nothing = settings.numbers[slots], np.empty(0, dtype=np.int32)
        has_biases, has_stop_ids = numbers[:, Number.NUM_BIASES].any(), numbers[:, Number.NUM_STOP_IDS].any()
        # int32: of a table below 8 GiB
        places = [slot * settings.vocab_size + tokens.token_ids for slot, tokens in seen.items()]
        return [
            np.array(slots, dtype=np.int32),
            numbers.view(np.int32),
            settings.factors[slots].view(np.int32),
            _of_width(settings.biases[slots], MAX_BIASES).view(np.int32) if has_biases else nothing,
            _of_width(settings.bias_ids[slots], MAX_BIASES).astype(np.int32) if has_biases else nothing,
            _of_width(settings.stop_ids[slots], MAX_STOP_IDS).astype(np.int32) if has_stop_ids else nothing,
            np.array(list(seen), dtype=np.int32),
            np.concatenate([nothing, *places]).astype(np.int32),
            np.concatenate([nothing, *(tokens.counts for tokens in seen.values())]),
        ]

    def put_started(self, parts: list[Tensor]) -> None:
        slots, *rows = parts[:6]
        seen_slots, places, counts = parts[6:]
        tables = (self._numbers, self._factors, self._biases, self._bias_ids, self._stop_ids)
        for table, part in zip(tables, rows, strict=True):
            if len(part):
                scatter_rows(table.view(torch.int32), slots, part.view(len(slots), -1))
        if len(seen_slots):
            self._seen.index_fill_(0, seen_slots.long(), 0)
            scatter_rows(self._seen.view(-1), places, counts)

    def launch(self, logits: Tensor, rows: Tensor) -> None:
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        self._rows[:, : rows.shape[1]].copy_(rows)
        slots, positions = self._rows
        shape = self._shape or shape_of(num_rows, vocab_size)
        size = shape.group * SEGMENT_TOKENS
        range_size = -(-vocab_size // (shape.num_splits * size)) * size
        read = (logits, slots, positions, self._numbers, self._factors)
        lists, found = (self._biases, self._bias_ids, self._stop_ids), (self._found, self._found_tokens)
        results = (self.token_ids, self.is_finite.view(torch.int8), self.logprobs, self._settings.last_tokens)
        # Fused, a multiplication and an addition are rounded once, which torch and numba do not.
        options = {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        scan_rows[(num_rows, shape.num_splits)](
            *read, *lists, self._seen, self._scratch, self._maxima, *found, vocab_size, range_size,
            MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group, **options,
        )  # fmt: skip
        end_rows[(num_rows,)](
            *read, self._seen, self._scratch, self._maxima, self._listed, self._values, self._tokens, *found, *results,
            vocab_size, shape.num_splits, SPLITS=next_power_of_two(shape.num_splits), GROUP=shape.group,
            SEGMENTS=next_power_of_two(-(-vocab_size // SEGMENT_TOKENS)), **options,
        )  # fmt: skip


def _of_width(lists: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """[lists, width]: cut, or padded with zeros."""
    return np.pad(lists[:, :width], ((0, 0), (0, max(0, width - lists.shape[1]))))
