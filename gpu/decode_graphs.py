"""Graphs of what steps of decodes compute, by what they hold and by how many rows they have. Thread: engine.

Captured at start, the largest first: what a smaller one allocates fits in what the larger one left. Or one by one, as
steps come that need them. Where one cannot be captured, all goes on without.
"""

import enum
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

from core.config import EngineConfig
from gpu.graphs import CaptureError, Graph, GraphRecorder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(graphs captured, of how many)"""


class Part(enum.Enum):
    """Of a step, what a graph holds: all of it, or one of two parts."""

    STEP = "step"  # from the rows to the drawn tokens
    FORWARD = "forward"  # from the rows to their logits
    DRAW = "draw"  # from the logits to the drawn tokens


Compute = Callable[[Part, int], None]
"""Sends a part of a step of so many rows."""


def max_decodes(engine: EngineConfig) -> int:
    """Rows of a step, at most."""
    return min(engine.max_sequences, engine.max_batch_tokens)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows that steps are padded to, ascending; the last one holds them all."""
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows + 1, 16)]
    return (*(size for size in ladder if size < max_rows), max_rows)


class DecodeGraphs:
    """
    Args:
        compute: what graphs hold; it is called whenever there is none.
        pad: fills all rows with padding: what is captured may be computed.
        sizes: see graph_sizes.

    recorder: None, as it is at first: nothing is captured.
    """

    def __init__(self, compute: Compute, pad: Callable[[], None], sizes: Sequence[int]) -> None:
        self._compute, self._pad, self._sizes = compute, pad, sizes
        self.recorder: GraphRecorder | None = None
        self._graphs: dict[tuple[Part, int], Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def size_for(self, num_rows: int) -> int:
        """Rows that a step of so many is computed with."""
        return num_rows if self.recorder is None else self._sizes[bisect_left(self._sizes, num_rows)]

    def capture_all(self, part: Part, progress: Progress) -> None:
        for number, size in enumerate(reversed(self._sizes)):
            self.prepare(part, size)
            if self.recorder is None:
                return
            progress(number + 1, len(self._sizes))

    def prepare(self, part: Part, size: int) -> None:
        """Have a graph, if there may be any. Rows that were filled in before are padding afterwards."""
        if self.recorder is None or (part, size) in self._graphs:
            return
        self._pad()
        try:
            self._graphs[part, size] = self.recorder.capture(lambda: self._compute(part, size))
        except CaptureError as error:
            logger.warning("no CUDA graphs: a %s of %d rows cannot be captured: %s", part.value, size, error)
            self.recorder = None
            self._graphs.clear()

    def run(self, part: Part, size: int) -> None:
        """Send it: as it was captured, or by Python."""
        graph = self._graphs.get((part, size))
        if graph is None:
            self._compute(part, size)
        else:
            graph.replay()
