"""Draws a step's tokens on a CUDA device: what launches gpu/kernels/sampling.py. Thread: engine.

All that a launch reads and writes lies in buffers that stay where they are, so that a CUDA graph may hold it: `place`
copies the step's rows to them, one pinned copy, and what requests ask for when some have started, another, unless the
rows were put there on the device; `launch` reads nothing of the host.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu.kernels.sampling import end_rows, sample_rows, scan_rows
from gpu.kernels.sampling_layout import SEGMENT as _SEGMENT
from gpu.sampling_slots import Factor, Number, SamplingSlots

IntArray = npt.NDArray[np.integer]
SEGMENT: int = _SEGMENT.value  # tokens
MAX_BIASES = 512  # of a slot: more than requests may have by default
MAX_STOP_IDS = 64
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
        self._asked, self._shape, self._is_cuda = asked, shape, asked.device.type == "cuda"
        num_slots, vocab_size, device = len(asked.numbers), asked.vocab_size, asked.device
        max_rows = num_slots if max_rows is None else max_rows
        max_splits = max(shape.num_splits for _, shape in SHAPES) if shape is None else shape.num_splits
        max_group = max(shape.group for _, shape in SHAPES) if shape is None else shape.group
        num_segments = -(-vocab_size // SEGMENT)

        def room(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._numbers, self._factors = room(num_slots, len(Number), dtype=torch.int64), room(num_slots, len(Factor))
        self._biases, self._bias_ids = room(num_slots, MAX_BIASES), room(num_slots, MAX_BIASES, dtype=torch.int32)
        self._stop_ids = room(num_slots, MAX_STOP_IDS, dtype=torch.int32)
        self.rows = torch.full((2, max_rows), NO_SLOT, dtype=torch.int64, device=device)  # slots, positions
        self._scratch = room(max_rows, vocab_size)
        self._maxima, self._listed = room(max_rows, num_segments), room(max_rows, num_segments, dtype=torch.int32)
        self._values = room(max_rows, max_group * SEGMENT)
        self._tokens_kept = room(max_rows, max_group * SEGMENT, dtype=torch.int32)
        self._found = room(max_rows, max_splits, 3)
        self._found_tokens = room(max_rows, max_splits, 2, dtype=torch.int32)
        self.token_ids = room(max_rows, dtype=torch.int64)
        self.is_finite = room(max_rows, dtype=torch.bool)
        self.logprobs = room(max_rows)  # of the drawn tokens, where they are asked for

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
        self.start_slots()
        # Anew each time: torch keeps pinned memory from being reused before it has been copied.
        staged = torch.full(self.rows.shape, NO_SLOT, dtype=torch.int64, pin_memory=self._is_cuda)
        staged.numpy()[:, : len(slots)] = slots, positions
        self.rows.copy_(staged, non_blocking=True)

    def launch(self, logits: Tensor) -> None:
        """Draw the rows that were placed. May be captured in a CUDA graph.

        A graph that was captured before a slot asked for penalties knows none: reserve_seen, and capture after it.

        Args:
            logits: [rows, vocab], float32, bfloat16 or float16, contiguous; not changed.
        """
        num_rows, vocab_size = logits.shape
        assert logits.is_contiguous()
        shape = self._shape or shape_of(num_rows, vocab_size)
        slots, positions = self.rows
        seen = self._asked.seen
        read = (logits, slots, positions, self._numbers, self._factors)
        lists = (self._biases, self._bias_ids, self._stop_ids)
        seen_or_any = self._listed if seen is None else seen
        gathered = (self._listed, self._values, self._tokens_kept)
        told = (self.token_ids, self.is_finite.view(torch.int8), self.logprobs, self._asked.last_tokens)
        has_seen, segments = seen is not None, power_of_two(-(-vocab_size // SEGMENT))
        # Fused, a product and a sum are rounded once, and not as torch and numba round them.
        options = {"num_warps": shape.num_warps, "enable_fp_fusion": False}
        if shape.num_splits == 1:
            sample_rows[(num_rows,)](
                *read, *lists, seen_or_any, self._scratch, self._maxima, *gathered, *told, vocab_size,
                HAS_SEEN=has_seen, MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group,
                SEGMENTS=segments, **options,
            )  # fmt: skip
            return
        size = shape.group * SEGMENT
        range_size = -(-vocab_size // (shape.num_splits * size)) * size
        scan_rows[(num_rows, shape.num_splits)](
            *read, *lists, seen_or_any, self._scratch, self._maxima, self._found, self._found_tokens, vocab_size,
            range_size,
            HAS_SEEN=has_seen, MAX_BIASES=MAX_BIASES, MAX_STOP_IDS=MAX_STOP_IDS, GROUP=shape.group, **options,
        )  # fmt: skip
        end_rows[(num_rows,)](
            *read, seen_or_any, self._scratch, self._maxima, *gathered, self._found, self._found_tokens, *told,
            vocab_size, shape.num_splits,
            HAS_SEEN=has_seen, SPLITS=power_of_two(shape.num_splits), GROUP=shape.group, SEGMENTS=segments, **options,
        )  # fmt: skip

    def start_slots(self) -> None:
        """Bring up what slots ask for that have started since: one pinned copy, then a scatter of each table."""
        changed = sorted(self._asked.take_changed())
        if not changed:
            return
        tables = (self._numbers, self._factors, self._biases, self._bias_ids, self._stop_ids)
        widths = [table.shape[1] * table.element_size() for table in tables]
        widths.append(-sum(widths) % 8)  # so that every row of all of them starts where an int64 may
        staged = torch.zeros((len(changed), 8 + sum(widths)), dtype=torch.uint8, pin_memory=self._is_cuda)
        parts = torch.split(staged, [8, *widths], 1)
        parts[0].copy_(torch.tensor(changed).unsqueeze(1).view(torch.uint8))
        for place, slot in enumerate(changed):
            columns = (
                self._asked.numbers[slot],
                self._asked.factors[slot],
                self._asked.biases[slot][:MAX_BIASES],
                self._asked.bias_ids[slot][:MAX_BIASES].astype(np.int32),
                self._asked.stop_ids[slot][:MAX_STOP_IDS].astype(np.int32),
            )
            for part, column in zip(parts[1:-1], columns, strict=True):
                part[place, : column.nbytes] = torch.from_numpy(column.view(np.uint8))
        index, *values, _ = torch.split(staged.to(self.rows.device, non_blocking=True), [8, *widths], 1)
        rows = index.contiguous().view(torch.int64).squeeze(1)
        for table, value in zip(tables, values, strict=True):
            table.index_copy_(0, rows, value.contiguous().view(table.dtype))


def power_of_two(count: int) -> int:
    """The next one that is not smaller: what Triton has ranges of."""
    return 1 << (count - 1).bit_length()
