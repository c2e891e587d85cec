"""Graphs of what steps compute, by what they hold and by what they are padded to. Thread: engine.

Captured at start, the largest of each kind first: what a smaller one allocates fits in what the larger one left. Or one
by one, as steps come that need them. Where one cannot be captured, steps of its kind go on without; where memory ends,
those that were captured stay.
"""

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpu.graphs import CaptureError, Graph, GraphRecorder, NoRoomForGraph
from gpu.step_shapes import StepShape, StepShapes

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(graphs captured, of how many)"""


class Part(enum.Enum):
    """Of a step, what a graph holds: all of it, or one of two parts."""

    STEP = "step"  # from the rows to the drawn tokens
    FORWARD = "forward"  # from the rows to their logits
    DRAW = "draw"  # from the logits to the drawn tokens


Compute = Callable[[Part, StepShape], None]
"""Sends a part of a step of this shape."""


class StepGraphs:
    """
    Args:
        compute: what graphs hold; it is called whenever there is none.
        pad: fills all of a shape with padding: what is captured may be computed.
        usual: what a graph of a step holds, but for rows that ask for more.

    recorder: None, as it is at first: nothing is captured.
    most_graphs: that may be there: what memory was counted for; None: any number.
    """

    def __init__(
        self, compute: Compute, pad: Callable[[StepShape], None], shapes: StepShapes, usual: Part = Part.STEP
    ) -> None:
        self._compute, self._pad, self.shapes, self._usual = compute, pad, shapes, usual
        self.recorder: GraphRecorder | None = None
        self.most_graphs: int | None = None
        self._graphs: dict[tuple[Part, StepShape], Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_of_prompts(self) -> int:
        """Captured, of steps with prompts."""
        return sum(shape.num_prompts > 0 for _, shape in self._graphs)

    @property
    def size_bytes(self) -> int:
        """Of the device's memory, that they have taken."""
        return sum(graph.size_bytes for graph in self._graphs.values())

    @property
    def is_full(self) -> bool:
        return self.most_graphs is not None and len(self._graphs) >= self.most_graphs

    def of_decodes(self, num_rows: int) -> StepShape:
        """What a step of so many is computed as: without a graph, as it is."""
        if self.recorder is None:
            return StepShape(num_rows)
        shape = self.shapes.of_decodes(num_rows)
        return shape if self._may_serve(shape) else StepShape(num_rows)

    def of_chunks(self, step: StepShape, num_drawn: int) -> StepShape | None:
        """What a step with prompts is computed as; None: there is no graph for it."""
        if self.recorder is None:
            return None
        shape = self.shapes.of_chunks(step, num_drawn)
        return shape if shape is not None and self._may_serve(shape) else None

    def _may_serve(self, shape: StepShape) -> bool:
        return not self.is_full or (Part.STEP, shape) in self._graphs or (Part.FORWARD, shape) in self._graphs

    def capture_all(self, progress: Progress) -> None:
        """As many as there may be, in order."""
        self.capture(self.shapes.in_order[: self.most_graphs], progress)

    def capture(self, shapes: Sequence[StepShape], progress: Progress = lambda done, total: None) -> None:
        """Until all are there, or there may be no more."""
        for number, shape in enumerate(shapes):
            if self.recorder is None or self.is_full:
                return
            self.prepare(self._usual, shape)
            progress(number + 1, len(shapes))

    def prepare(self, part: Part, shape: StepShape) -> None:
        """Have a graph, if there may be any. What was filled in before is padding afterwards."""
        if self.recorder is None or self.is_full or (part, shape) in self._graphs:
            return
        if shape.num_prompts and not self.shapes.chunks:
            return
        self._pad(shape)
        try:
            self._graphs[part, shape] = self.recorder.capture(lambda: self._compute(part, shape))
        except NoRoomForGraph as error:
            self.most_graphs = len(self._graphs)
            logger.warning("no more CUDA graphs than %d: no memory for %s: %s", self.most_graphs, shape, error)
        except CaptureError as error:
            self._give_up(part, shape, error)

    def _give_up(self, part: Part, shape: StepShape, error: CaptureError) -> None:
        """All graphs, or those of chunks alone."""
        kind = "CUDA graphs of prompts" if shape.num_prompts else "CUDA graphs"
        logger.warning("no %s: a %s of %s cannot be captured: %s", kind, part.value, shape, error)
        if shape.num_prompts:
            self.shapes = replace(self.shapes, chunks=())
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1].num_prompts}
        else:
            self.recorder = None
            self._graphs.clear()

    def drop(self) -> None:
        """Give their memory back."""
        self._graphs.clear()

    def run(self, part: Part, shape: StepShape) -> None:
        """Send it: as it was captured, or by Python."""
        graph = self._graphs.get((part, shape))
        if graph is None:
            self._compute(part, shape)
        else:
            graph.replay()
