"""Graphs of what steps compute, by what they are padded to. Thread: engine.

Captured at start, the largest of each kind first: what a smaller one allocates fits in what the larger one left. Or, if
that was asked for, one by one, as steps come that need them. Where one cannot be captured, steps of its kind go on
without; where memory ends, those that were captured stay.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpu.graphs import CaptureError, Graph, GraphRecorder, NoRoomForGraph
from gpu.step_shapes import StepShape, StepShapes

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(graphs captured, of how many)"""


Compute = Callable[[StepShape], None]
"""Sends a step of this shape, from its rows to what is drawn, or to their logits where torch draws."""


class StepGraphs:
    """
    Args:
        compute: what graphs hold.
        pad: fills all of a shape with padding: what is captured may be computed.

    recorder: None, as it is at first: nothing is captured.
    most_graphs: that may be there: what memory was counted for; None: any number.
    """

    def __init__(self, compute: Compute, pad: Callable[[StepShape], None], shapes: StepShapes) -> None:
        self._compute, self._pad, self.shapes = compute, pad, shapes
        self.recorder: GraphRecorder | None = None
        self.most_graphs: int | None = None
        self._graphs: dict[StepShape, Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_of_prompts(self) -> int:
        """Captured, of steps with prompts."""
        return sum(shape.num_prompts > 0 for shape in self._graphs)

    @property
    def size_bytes(self) -> int:
        """Of the device's memory, that they have taken."""
        return sum(graph.size_bytes for graph in self._graphs.values())

    @property
    def is_full(self) -> bool:
        return self.most_graphs is not None and len(self._graphs) >= self.most_graphs

    def of(self, step: StepShape) -> StepShape | None:
        """What a step is padded to; None: there is no graph for it, nor may there be."""
        if self.recorder is None:
            return None
        shape = self.shapes.of(step)
        return shape if shape is not None and (not self.is_full or shape in self._graphs) else None

    def capture_all(self, progress: Progress) -> None:
        """As many as there may be, in order."""
        self.capture(self.shapes.in_order[: self.most_graphs], progress)

    def capture(self, shapes: Sequence[StepShape], progress: Progress = lambda done, total: None) -> None:
        """Until all are there, or there may be no more."""
        for number, shape in enumerate(shapes):
            if self.recorder is None or self.is_full:
                return
            self.prepare(shape)
            progress(number + 1, len(shapes))

    def prepare(self, shape: StepShape) -> None:
        """Have a graph, if there may be any. What was filled in before is padding afterwards."""
        if self.recorder is None or self.is_full or shape in self._graphs:
            return
        if shape.num_prompts and not self.shapes.chunks:
            return
        self._pad(shape)
        try:
            self._graphs[shape] = self.recorder.capture(lambda: self._compute(shape))
        except NoRoomForGraph as error:
            self.most_graphs = len(self._graphs)
            logger.warning("no more CUDA graphs than %d: no memory for %s: %s", self.most_graphs, shape, error)
        except CaptureError as error:
            self._give_up(shape, error)

    def _give_up(self, shape: StepShape, error: CaptureError) -> None:
        """All graphs, or those of chunks alone."""
        kind = "CUDA graphs of prompts" if shape.num_prompts else "CUDA graphs"
        logger.warning("no %s: a step of %s cannot be captured: %s", kind, shape, error)
        if shape.num_prompts:
            self.shapes = replace(self.shapes, chunks=())
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key.num_prompts}
        else:
            self.recorder = None
            self._graphs.clear()

    def drop(self) -> None:
        """Give their memory back."""
        self._graphs.clear()

    def replay(self, shape: StepShape) -> bool:
        """Send it as it was captured; False: it was not."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
        return graph is not None
