"""Samples a step's tokens on a CUDA device: what launches kernels/sampling.py. Thread: engine.

All that a launch reads and writes lies in buffers that stay where they are, so that a CUDA graph may hold it, and it
reads nothing of the host. What slots ask for lies in tables, brought up to date as slots start: packed as int32, so
that it goes up in one piece with whatever else a step needs there.
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
from gpu.rows import NO_SLOT
from gpu.sampler import Factor, IntArray, LaunchedSampler, Number, SamplingSlots

MAX_BIASES = 512  # of a slot: more than requests may have by default
MAX_STOP_IDS = 64
SEGMENT_TOKENS: int = SEGMENT.value


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are read.

    Args:
        num_splits: programs that read a row, a range of its segments each.
        group: segments read at once.
        num_warps: of a program.
    """

    num_splits: int
    group: int
    num_warps: int


# By the most rows each holds for: fewer rows than a device has multiprocessors are split. By arithmetic, for the 132 of
# an H200, not by measurement.
SHAPES: tuple[tuple[int, Shape], ...] = (
    (8, Shape(16, 16, 8)),
    (32, Shape(4, 16, 8)),
    (64, Shape(2, 16, 8)),
    (1 << 30, Shape(1, 16, 8)),
)
SPLIT_FROM = 1 << 14  # tokens: a smaller vocabulary is read by one program


def shape_of(num_rows: int, vocab_size: int) -> Shape:
    """How so many rows are read: of nothing else, and never of what they ask for, so that a graph can be captured."""
    shape = next(shape for most, shape in SHAPES if num_rows <= most)
    return shape if vocab_size >= SPLIT_FROM else Shape(1, shape.group, shape.num_warps)


class DeviceSampler(LaunchedSampler):
    """
    Args:
        asked: kept, and read where slots have started since.
        max_rows: of a step; None: as many as there are slots.
        shape: None: as shape_of tells.
    """

    def __init__(self, asked: SamplingSlots, max_rows: int | None = None, shape: Shape | None = None) -> None:
        self._asked, self._shape = asked, shape
        num_slots, vocab_size, device = len(asked.numbers), asked.vocab_size, asked.device
        max_rows = num_slots if max_rows is None else max_rows
        max_splits = max(shape.num_splits for _, shape in SHAPES) if shape is None else shape.num_splits
        max_group = max(shape.group for _, shape in SHAPES) if shape is None else shape.group
        num_segments, kept = -(-vocab_size // SEGMENT_TOKENS), max_group * SEGMENT_TOKENS

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._numbers, self._factors = room(num_slots, len(Number), dtype=torch.int64), room(num_slots, len(Factor))
        self._biases, self._bias_ids = room(num_slots, MAX_BIASES), room(num_slots, MAX_BIASES, dtype=torch.int32)
        self._stop_ids = room(num_slots, MAX_STOP_IDS, dtype=torch.int32)
        self._seen = asked.reserve_seen()  # now: what is captured knows it
        self._rows = torch.full((2, max_rows), NO_SLOT, dtype=torch.int64, device=device)  # slots, positions
        self._scratch = room(max_rows, vocab_size)
        self._maxima, self._listed = room(max_rows, num_segments), room(max_rows, num_segments, dtype=torch.int32)
        self._values, self._tokens_kept = room(max_rows, kept), room(max_rows, kept, dtype=torch.int32)
        self._found = room(max_rows, max_splits, 3)
        self._found_tokens = room(max_rows, max_splits, 2, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.is_finite = room(max_rows, dtype=torch.bool)
        self.logprobs = room(max_rows, NUM_LOGPROBS.value)

    def can_sample(self, slots: IntArray) -> bool:
        counts = self._asked.numbers[slots]
        has_room = counts[:, Number.NUM_BIASES] <= MAX_BIASES
        return bool((has_room & (counts[:, Number.NUM_STOP_IDS] <= MAX_STOP_IDS)).all())

    def take_started(self) -> list[Int32Array]:
        asked = self._asked
        slots, seen = sorted(asked.take_changed()), asked.take_seen()
        places = [slot * asked.vocab_size + tokens.token_ids for slot, tokens in seen.items()]  # of a table below 8 GiB
        return [
            np.array(slots, dtype=np.int32),
            asked.numbers[slots].view(np.int32),
            asked.factors[slots].view(np.int32),
            _padded([asked.biases[slot] for slot in slots], MAX_BIASES).view(np.int32),
            _padded([asked.bias_ids[slot].astype(np.int32) for slot in slots], MAX_BIASES),
            _padded([asked.stop_ids[slot].astype(np.int32) for slot in slots], MAX_STOP_IDS),
            np.array(list(seen), dtype=np.int32),
            np.concatenate([NOTHING, *places]).astype(np.int32),
            np.concatenate([NOTHING, *(tokens.counts for tokens in seen.values())]),
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
        told = (self.token_ids, self.is_finite.view(torch.int8), self.logprobs, self._asked.last_tokens)
        # Fused, a multiplication and a sum are rounded once, and not as torch and numba round them.
        options = {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        scan_rows[(num_rows, shape.num_splits)](
            *read, *lists, self._seen, self._scratch, self._maxima, *found, vocab_size, range_size,
            MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group, **options,
        )  # fmt: skip
        end_rows[(num_rows,)](
            *read, self._seen, self._scratch, self._maxima, self._listed, self._values, self._tokens_kept, *found,
            *told,
            vocab_size, shape.num_splits, SPLITS=power_of_two(shape.num_splits), GROUP=shape.group,
            SEGMENTS=power_of_two(-(-vocab_size // SEGMENT_TOKENS)), **options,
        )  # fmt: skip


NOTHING = np.empty(0, dtype=np.int32)


def _padded(lists: list[npt.NDArray[Any]], width: int) -> npt.NDArray[Any]:
    """[lists, width], the first of each; empty where all are."""
    if not any(map(len, lists)):
        return NOTHING
    found = np.zeros((len(lists), width), dtype=lists[0].dtype)
    for row, values in zip(found, lists, strict=True):
        row[: len(values)] = values[:width]
    return found


def power_of_two(count: int) -> int:
    """The next one that is not smaller: what Triton has ranges of."""
    return 1 << (count - 1).bit_length()
