"""What CUDA graphs take of a device's memory, found out before keys and values get theirs. Thread: engine (at start).

How much a driver keeps of a graph is not told anywhere, and what all graphs share depends on the kernels that were
chosen: so the largest of each kind are captured on a cache of a block, and a few of the others, and let go of again.
From what these have taken it is known what all will take. Where that leaves too little for the keys and values that the
operator asks for, there are fewer graphs.
"""

import gc
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from core.config import EngineConfig, ModelConfig
from core.errors import NotEnoughMemory
from gpu.attention import AttentionKernels
from gpu.block_tables import BlockTables
from gpu.graphs import GRANULE_BYTES, GraphRecorder
from gpu.kv_cache import KVCache, bytes_per_block
from gpu.memory_plan import MemoryPlan, plan_memory
from gpu.model import Model
from gpu.sampler import Sampler
from gpu.step_graphs import StepGraphs
from gpu.step_shapes import StepShape, StepShapes, max_decodes
from gpu.streams import Streams

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class TrialParts:
    """What a runner's steps are made of, but for their cache."""

    model: Model
    sampler: Sampler
    streams: Streams
    attention: AttentionKernels | None


def count_graphs(
    parts: TrialParts, engine: EngineConfig, memory: MemoryPlan, shapes: StepShapes, recorder: GraphRecorder
) -> CountedGraphs:
    """Capture a few on a cache that nobody uses, and plan anew with what all will take."""
    from gpu.device_steps import DeviceSteps  # imports triton

    device = memory.device
    cache = KVCache(parts.model.config, 1, device.dtype, device.device, has_padding=True)
    if parts.attention is not None:
        rows, heads = max_decodes(engine), parts.model.config.num_heads
        parts.attention.reserve(rows, memory.max_model_len, heads, cache.layers[0])
    tables = BlockTables(engine.max_sequences, memory.max_model_len, cache.scratch_block)
    steps = DeviceSteps(parts.model, cache, parts.sampler, tables, parts.streams, shapes, engine.max_batch_tokens)
    steps.graphs.recorder = recorder
    taken, shapes = measure_graphs(steps.graphs), steps.graphs.shapes
    steps.graphs.drop()
    del steps, cache
    gc.collect()  # steps and their graphs know each other
    recorder.give_back()
    if taken is None:
        return CountedGraphs(memory, shapes, 0)
    return plan_with(taken, parts.model.config, engine, memory, shapes)


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
