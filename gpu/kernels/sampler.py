"""Samples a step's tokens on a CUDA device: what launches kernels/sampling.py, and its tables. Thread: engine.

All that a launch reads and writes lies in buffers that stay where they are, so that a CUDA graph may hold it: `place`
copies the step's rows to them, and what requests ask for when some have started, unless both were put there on the
device; `launch` reads nothing of the host. What starts is packed as int32, so that it can go up in one piece with
whatever else a step needs there.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.plan import Int32Array
from gpu.device import to_device
from gpu.kernels.device_rows import scatter_rows
from gpu.kernels.sampling import NUM_LOGPROBS as _NUM_LOGPROBS
from gpu.kernels.sampling import SEGMENT as _SEGMENT
from gpu.kernels.sampling import end_rows, sample_rows, scan_rows
from gpu.sampler import Factor, Number, SamplingSlots

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


IntArray = npt.NDArray[np.integer]
SEGMENT: int = _SEGMENT.value  # tokens
NUM_LOGPROBS: int = _NUM_LOGPROBS.value
NO_SLOT = -1  # of rows that are padding


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are read.

    Args:
        num_splits: programs that read a row; 1: the one that ends it, too.
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


class DeviceSampler:
    """Sampling's state on a device, and its launches: a sampler.DrawRows.

    Args:
        asked: kept, and read where slots have started since.
        max_rows: of a step; None: as many as there are slots.
        shape: None: as shape_of tells.
    """

    keeps_last = True

    def __init__(self, asked: SamplingSlots, max_rows: int | None = None, shape: Shape | None = None) -> None:
        self._asked, self._shape, self._tables = asked, shape, SlotTables(asked)
        num_slots, vocab_size, device = len(asked.numbers), asked.vocab_size, asked.device
        max_rows = num_slots if max_rows is None else max_rows
        max_splits = max(shape.num_splits for _, shape in SHAPES) if shape is None else shape.num_splits
        max_group = max(shape.group for _, shape in SHAPES) if shape is None else shape.group
        num_segments = -(-vocab_size // SEGMENT)

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.rows = torch.full((2, max_rows), NO_SLOT, dtype=torch.int64, device=device)  # slots, positions
        self._scratch = room(max_rows, vocab_size)
        self._maxima, self._listed = room(max_rows, num_segments), room(max_rows, num_segments, dtype=torch.int32)
        self._values = room(max_rows, max_group * SEGMENT)
        self._tokens_kept = room(max_rows, max_group * SEGMENT, dtype=torch.int32)
        self._found = room(max_rows, max_splits, 3)
        self._found_tokens = room(max_rows, max_splits, 2, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.is_finite = room(max_rows, dtype=torch.bool)
        self.logprobs = room(max_rows, NUM_LOGPROBS)

    def can_draw(self, slots: IntArray) -> bool:
        """Whether the lists of all these have room; torch draws otherwise."""
        counts = self._asked.numbers[slots]
        return bool(
            (counts[:, Number.NUM_BIASES] <= MAX_BIASES).all()
            and (counts[:, Number.NUM_STOP_IDS] <= MAX_STOP_IDS).all()
        )

    def __call__(self, logits: Tensor, slots: IntArray, positions: IntArray) -> tuple[Tensor, Tensor]:
        """See DrawRows; the results are copies: the next step may be launched before they are read."""
        self.place(slots, positions)
        self.launch(logits)
        return self.token_ids[: len(slots)].clone(), self.is_finite[: len(slots)].clone()

    def place(self, slots: IntArray, positions: IntArray) -> None:
        """Put the step's rows where the next launch reads them; those behind them are padding."""
        self._start_slots()
        placed = np.full(self.rows.shape, NO_SLOT, dtype=np.int64)
        placed[:, : len(slots)] = slots, positions
        self.rows.copy_(to_device(placed, self.rows.device))

    def launch(self, logits: Tensor) -> None:
        """Draw the rows that were placed. May be captured in a CUDA graph.

        Args:
            logits: [rows, vocab], float32, bfloat16 or float16, contiguous; not changed.
        """
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        shape = self._shape or shape_of(num_rows, vocab_size)
        slots, positions = self.rows
        tables = self._tables
        read = (logits, slots, positions, tables.numbers, tables.factors)
        lists = (tables.biases, tables.bias_ids, tables.stop_ids)
        gathered = (self._listed, self._values, self._tokens_kept)
        told = (self.token_ids, self.is_finite.view(torch.int8), self.logprobs, self._asked.last_tokens)
        segments = power_of_two(-(-vocab_size // SEGMENT))
        # Fused, a product and a sum are rounded once, and not as torch and numba round them.
        options = {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        if shape.num_splits == 1:
            sample_rows[(num_rows,)](
                *read, *lists, tables.seen, self._scratch, self._maxima, *gathered, *told, vocab_size,
                MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group,
                SEGMENTS=segments, **options,
            )  # fmt: skip
            return
        size = shape.group * SEGMENT
        range_size = -(-vocab_size // (shape.num_splits * size)) * size
        scan_rows[(num_rows, shape.num_splits)](
            *read, *lists, tables.seen, self._scratch, self._maxima, self._found, self._found_tokens, vocab_size,
            range_size,
            MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group, **options,
        )  # fmt: skip
        end_rows[(num_rows,)](
            *read, tables.seen, self._scratch, self._maxima, *gathered, self._found, self._found_tokens, *told,
            vocab_size, shape.num_splits,
            SPLITS=power_of_two(shape.num_splits), GROUP=shape.group, SEGMENTS=segments, **options,
        )  # fmt: skip

    def take_started(self) -> StartedSlots:
        """What slots that have started since ask for, to be put on the device before the next launch."""
        return self._tables.take_started()

    def put_started(self, started: StartedSlots, parts: list[Tensor]) -> None:
        """See SlotTables.put."""
        self._tables.put(started, parts)

    def _start_slots(self) -> None:
        """Both at once: one copy."""
        started = self.take_started()
        if started.slots:
            piece = to_device(np.concatenate(started.parts), self.rows.device)
            self.put_started(started, list(torch.split(piece, [part.size for part in started.parts])))


def power_of_two(count: int) -> int:
    """The next one that is not smaller: what Triton has ranges of."""
    return 1 << (count - 1).bit_length()
