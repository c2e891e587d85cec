"""CUDA graphs of steps, one per shape that steps are padded to, and the memory they take. Thread: engine.

A replay launches the same kernels on the same addresses with the same arguments: a step's inputs and outputs lie in
buffers that stay, and kernels read there, on the device, whatever depends on the step.

Graphs are captured at start, the largest of each kind first, so that the smaller ones reuse its memory; with --graphs
lazy, when the first step needs one. If one cannot be captured, steps of its kind run without graphs; if memory runs
out, the graphs captured so far stay.

Drivers do not tell how much memory a graph takes, and what graphs share depends on the chosen kernels. So before KV
gets its memory, the largest of each kind and a few others are captured on a cache of one block, measured, and freed.
Where that leaves too little for --kv-memory, there are fewer graphs.
"""

import gc
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from core.errors import NotEnoughMemory
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.memory_plan import MemoryPlan
from gpu.step_shapes import StepShape, StepShapes, step_shapes
from gpu.streams import recording

logger = logging.getLogger(__name__)

GRANULE_BYTES = 2 * 1024**2  # a driver allocates in such pieces: a graph that takes less may not show


class CaptureError(Exception):
    """The work cannot be captured; it can run without a graph."""


class NoRoomForGraph(CaptureError):
    """There is no memory for one more graph; the others stay."""


@dataclass(slots=True)
class Graph:
    """
    Args:
        size_bytes: device memory that it takes beside the recorder's other graphs.
    """

    captured: torch.cuda.CUDAGraph
    size_bytes: int

    def replay(self) -> None:
        """Send the work again, after all work sent before."""
        self.captured.replay()


class CudaRecorder:
    """Makes graphs that share memory, so that only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture the work; it is also run, to load and compile kernels, and must do no harm.

        Its inputs and outputs must stay where they are; other graphs overwrite its allocations between replays.

        Raises:
            NoRoomForGraph: the device is out of memory.
            CaptureError: the work waits for the device, or what it launches depends on computed values.
        """
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                work()
            free_bytes = self._free_bytes()
            graph = torch.cuda.CUDAGraph()
            with recording(graph, self._pool, self._stream):
                work()
            graph.replay()  # the driver allocates the rest when a graph is first launched
            return Graph(graph, max(0, free_bytes - self._free_bytes()))
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # raises where the device itself is lost
            self._pool = torch.cuda.graph_pool_handle()
            raise (NoRoomForGraph if is_of_memory(error) else CaptureError)(str(error)) from error

    def give_back(self) -> None:
        """Return the memory of deleted graphs to the device."""
        self._empty()
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool that still has memory but no graph

    def _empty(self) -> None:
        """Free what torch's allocator caches."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        self._empty()
        return int(torch.cuda.mem_get_info(self._device)[0])


def is_of_memory(error: BaseException | None) -> bool:
    """Whether the device was out of memory: the error that ends a capture may hide that in its context."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


Progress = Callable[[int, int], None]
"""(graphs captured, of how many)"""
Compute = Callable[[StepShape], None]
"""Sends a step of this shape, up to its sampled tokens, or up to its logits where torch samples."""


class StepGraphs:
    """The graphs captured so far.

    Args:
        compute: the work that graphs hold.
        pad: fills a shape with padding only, so that it may be computed.

    recorder: None at first: nothing is captured.
    most_graphs: how many memory was planned for; None: any number.
    """

    def __init__(self, compute: Compute, pad: Callable[[StepShape], None], shapes: StepShapes) -> None:
        self._compute, self._pad, self.shapes = compute, pad, shapes
        self.recorder: CudaRecorder | None = None
        self.most_graphs: int | None = None
        self._graphs: dict[StepShape, Graph] = {}

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @property
    def num_of_prompts(self) -> int:
        """Captured graphs of steps with prompts."""
        return sum(shape.num_prompts > 0 for shape in self._graphs)

    @property
    def size_bytes(self) -> int:
        """Device memory that the graphs take."""
        return sum(graph.size_bytes for graph in self._graphs.values())

    @property
    def is_full(self) -> bool:
        return self.most_graphs is not None and len(self._graphs) >= self.most_graphs

    def of(self, step: StepShape) -> StepShape | None:
        """The shape a step is padded to; None: it has no graph, and cannot get one."""
        if self.recorder is None:
            return None
        shape = self.shapes.of(step)
        return shape if shape is not None and (not self.is_full or shape in self._graphs) else None

    def capture_all(self, progress: Progress) -> None:
        """Capture as many as there may be, in order."""
        self.capture(self.shapes.in_order[: self.most_graphs], progress)

    def capture(self, shapes: Sequence[StepShape], progress: Progress = lambda done, total: None) -> None:
        """Capture these, or as many of them as there may be."""
        for number, shape in enumerate(shapes):
            if self.recorder is None or self.is_full:
                return
            self.prepare(shape)
            progress(number + 1, len(shapes))

    def prepare(self, shape: StepShape) -> None:
        """Capture a shape's graph, unless it exists or may not. Overwrites a step's inputs with padding."""
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
        """Do without graphs of this kind: with prompts, or all."""
        kind = "CUDA graphs of prompts" if shape.num_prompts else "CUDA graphs"
        logger.warning("no %s: a step of %s cannot be captured: %s", kind, shape, error)
        if shape.num_prompts:
            self.shapes = replace(self.shapes, chunks=())
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key.num_prompts}
        else:
            self.recorder = None
            self._graphs.clear()

    def drop(self) -> None:
        """Delete the graphs."""
        self._graphs.clear()

    def replay(self, shape: StepShape) -> bool:
        """Replay the shape's graph; False: there is none."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
        return graph is not None


NUM_MEASURED = 3  # beside the largest ones


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """What graphs take.

    Args:
        largest_bytes: the num_largest largest graphs, with what all graphs share.
        other_bytes: any other graph, at most.
    """

    num_largest: int
    largest_bytes: int
    other_bytes: int

    def of(self, num_graphs: int) -> int:
        """What the largest and others take, num_graphs in all."""
        return self.largest_bytes + max(0, num_graphs - self.num_largest) * self.other_bytes if num_graphs else 0


@dataclass(frozen=True, slots=True)
class CountedGraphs:
    """
    Args:
        memory: the plan that holds them.
        shapes: those that can be captured.
        most_graphs: 0: none.
    """

    memory: MemoryPlan
    shapes: StepShapes
    most_graphs: int


def count_graphs(
    open_graphs: Callable[[KVCache, StepShapes], StepGraphs], memory: MemoryPlan, recorder: CudaRecorder
) -> CountedGraphs:
    """Capture a few graphs on a cache that nothing else uses, and plan memory for all.

    Args:
        open_graphs: makes the graphs of steps over a cache.
    """
    kinds = memory.kv_dtype, memory.device.device, True, memory.windows
    cache = KVCache(memory.model, 1, *kinds, num_window_blocks=1)
    graphs = open_graphs(cache, step_shapes(memory.model, memory.engine))
    graphs.recorder = recorder
    taken, shapes = measure_graphs(graphs), graphs.shapes
    graphs.drop()
    del graphs, cache
    gc.collect()  # steps and their graphs refer to each other
    recorder.give_back()
    return CountedGraphs(memory, shapes, 0) if taken is None else plan_graphs(taken, memory, shapes)


def measure_graphs(graphs: StepGraphs) -> GraphBytes | None:
    """None: the largest cannot be captured, which has been logged."""
    graphs.capture(graphs.shapes.largest)
    shapes = graphs.shapes
    largest_bytes, num_largest = graphs.size_bytes, graphs.num_captured
    if num_largest < len(shapes.largest):
        return None
    graphs.capture(evenly(shapes.in_order[num_largest:], NUM_MEASURED))
    others_bytes, num_others = graphs.size_bytes - largest_bytes, graphs.num_captured - num_largest
    # Others show in whole granules, and part of one may have been there before.
    other_bytes = -(-(others_bytes + GRANULE_BYTES) // max(1, num_others))
    return GraphBytes(num_largest, largest_bytes, other_bytes)


def evenly(shapes: Sequence[StepShape], num_wanted: int) -> list[StepShape]:
    """So many, from the first to the last, or all."""
    if len(shapes) <= num_wanted:
        return list(shapes)
    return [shapes[place * (len(shapes) - 1) // (num_wanted - 1)] for place in range(num_wanted)]


def plan_graphs(taken: GraphBytes, memory: MemoryPlan, shapes: StepShapes) -> CountedGraphs:
    """Plan all graphs, or as many as leave room for KV."""

    def planned(num_graphs: int) -> MemoryPlan:
        padding_bytes = bytes_per_block(memory.model, memory.kv_dtype) if num_graphs else 0
        return memory.with_graphs(taken.of(num_graphs) + padding_bytes)

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
