"""CUDA graphs of what steps compute, by the shape that steps are padded to, and the memory they take. Thread: engine.

A replay launches the same kernels, on the same addresses, with the same numbers of the host: what a step reads and
writes lies in buffers that stay, and what depends on the step is read there, on the device.

Captured at start, the largest of each kind first: what a smaller one allocates fits in what the larger one left. Or, if
that was asked for, one by one, as steps come that need them. Where one cannot be captured, steps of its kind go on
without; where memory ends, those that were captured stay.

How much a driver keeps of a graph is not told anywhere, and what all graphs share depends on the kernels that were
chosen: so the largest of each kind are captured on a cache of a block, and a few of the others, and let go of again,
before keys and values get their memory. Where that leaves too little for the keys and values that the operator asks
for, there are fewer graphs.
"""

import gc
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import NotEnoughMemory
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.memory_plan import MemoryPlan, plan_memory
from gpu.step_shapes import StepShape, StepShapes, step_shapes
from gpu.streams import recording

logger = logging.getLogger(__name__)

GRANULE_BYTES = 2 * 1024**2  # what a driver gives of its memory at a time: less than that may not be seen


class CaptureError(Exception):
    """No graph can hold this work. What it was to compute can be computed without."""


class NoRoomForGraph(CaptureError):
    """There is no memory for one more graph; those that there are stay as they are."""


class Graph(Protocol):
    """
    Args:
        size_bytes: of the device's memory, what its capture has taken beside that of the recorder's other graphs.
    """

    size_bytes: int

    def replay(self) -> None:
        """Send the work again, behind what was sent before."""
        ...


class GraphRecorder(Protocol):
    """Makes graphs that share their memory: of two, one is replayed after the other."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Hold what this sends. It is done a few times, for what it loads, compiles and takes: it must do no harm.

        What it reads and writes must stay where it is; what it allocates is another graph's between replays.

        Raises:
            NoRoomForGraph: the device's memory has ended.
            CaptureError: it waits for the device, or what it sends depends on what was computed.
        """
        ...

    def give_back(self) -> None:
        """Let the device have what graphs that are gone have taken."""
        ...


@dataclass(slots=True)
class CudaGraph:
    """Implements Graph."""

    captured: torch.cuda.CUDAGraph
    size_bytes: int

    def replay(self) -> None:
        self.captured.replay()


class CudaRecorder:
    """Implements GraphRecorder."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                work()
            free_bytes = self._free_bytes()
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self._pool, self._stream):
                work()
            graph.replay()  # the driver takes the rest of its part when a graph is first sent
            return CudaGraph(graph, max(0, free_bytes - self._free_bytes()))
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # raises where the device itself is lost
            self._pool = torch.cuda.graph_pool_handle()
            raise (NoRoomForGraph if is_of_memory(error) else CaptureError)(str(error)) from error

    def give_back(self) -> None:
        self._empty()
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses one that no graph has, and memory lies in yet

    def _empty(self) -> None:
        """All that torch keeps and does not use."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        """As the driver says."""
        self._empty()
        return int(torch.cuda.mem_get_info(self._device)[0])


def is_of_memory(error: BaseException | None) -> bool:
    """Whether memory that has ended is behind it: what ends a capture then speaks of the capture alone."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


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


NUM_MEASURED = 3  # of those that are not the largest


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What graphs take.

    Args:
        largest_bytes: of the largest ones, num_largest, and with them what all share.
        other_bytes: of any other, at most.
    """

    num_largest: int
    largest_bytes: int
    other_bytes: int

    def of(self, num_graphs: int) -> int:
        """Of so many: the largest, and others; 0: none."""
        return self.largest_bytes + max(0, num_graphs - self.num_largest) * self.other_bytes if num_graphs else 0


@dataclass(frozen=True, slots=True)
class CountedGraphs:
    """
    Args:
        memory: the plan that holds them.
        shapes: that can be captured.
        most_graphs: that may be; 0: none.
    """

    memory: MemoryPlan
    shapes: StepShapes
    most_graphs: int


def count_graphs(
    open_graphs: Callable[[KVCache, StepShapes], StepGraphs],
    model: ModelConfig,
    engine: EngineConfig,
    memory: MemoryPlan,
    recorder: GraphRecorder,
) -> CountedGraphs:
    """Capture a few on a cache that nobody uses, and plan anew with what all will take.

    Args:
        open_graphs: those of steps over a cache.
    """
    cache = KVCache(model, 1, memory.device.dtype, memory.device.device, has_padding=True)
    graphs = open_graphs(cache, step_shapes(model, engine))
    graphs.recorder = recorder
    taken, shapes = measure_graphs(graphs), graphs.shapes
    graphs.drop()
    del graphs, cache
    gc.collect()  # steps and their graphs know each other
    recorder.give_back()
    return CountedGraphs(memory, shapes, 0) if taken is None else plan_with(taken, model, engine, memory, shapes)


def measure_graphs(graphs: StepGraphs) -> GraphBytes | None:
    """None: not even the largest can be captured, and it was said why."""
    graphs.capture(graphs.shapes.largest)
    shapes = graphs.shapes
    largest_bytes, num_largest = graphs.size_bytes, graphs.num_captured
    if num_largest < len(shapes.largest):
        return None
    some = evenly(shapes.in_order[num_largest:], NUM_MEASURED)
    graphs.capture(some)
    num_others = graphs.num_captured - num_largest
    return extrapolate(num_largest, largest_bytes, num_others, graphs.size_bytes - largest_bytes)


def evenly(shapes: Sequence[StepShape], num_wanted: int) -> list[StepShape]:
    """So many of them, the first and the last among them; or all."""
    if len(shapes) <= num_wanted:
        return list(shapes)
    return [shapes[place * (len(shapes) - 1) // (num_wanted - 1)] for place in range(num_wanted)]


def extrapolate(num_largest: int, largest_bytes: int, num_others: int, others_bytes: int) -> GraphBytes:
    """From what was seen: what others take is seen in granules, and part of one may have been there before."""
    other_bytes = -(-(others_bytes + GRANULE_BYTES) // num_others) if num_others else GRANULE_BYTES
    return GraphBytes(num_largest, largest_bytes, other_bytes)


def plan_with(
    taken: GraphBytes, model: ModelConfig, engine: EngineConfig, memory: MemoryPlan, shapes: StepShapes
) -> CountedGraphs:
    """With all graphs, or, where keys and values have no room beside them, with as many as leave it."""

    def planned(num_graphs: int) -> MemoryPlan:
        padding_bytes = bytes_per_block(model, memory.device.dtype) if num_graphs else 0
        graph_bytes = taken.of(num_graphs) + padding_bytes
        given = (memory.device, memory.checkpoint_bytes, memory.free_bytes, memory.weights_bytes)
        return plan_memory(model, engine, *given, graph_bytes)

    def is_too_much(num_graphs: int) -> bool:
        try:
            planned(num_graphs)
        except NotEnoughMemory:
            return True
        return False

    num_shapes = len(shapes.in_order)
    most = bisect_right(range(1, num_shapes + 1), False, key=is_too_much)
    if most < num_shapes:
        logger.warning("there is memory for %d of %d CUDA graphs: other steps are sent without", most, num_shapes)
    return CountedGraphs(planned(most), shapes, most)
