"""What graphs take is found out from a few, and keys and values get what is left."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from core.config import EngineConfig
from core.errors import NotEnoughMemory
from gpu.kv_cache import bytes_per_block
from gpu.memory_plan import GIB, MIB, OWN_MEMORY_SHARE, MemoryPlan, plan_memory
from gpu.step_graphs import (
    GRANULE_BYTES,
    CaptureError,
    CountedGraphs,
    GraphBytes,
    NoRoomForGraph,
    StepGraphs,
    evenly,
    measure_graphs,
    plan_graphs,
)
from gpu.step_shapes import StepShape, StepShapes, chunk_shapes, decode_sizes, step_shapes
from tests.gpu.test_memory_plan import CUDA, MODEL

SHAPES = StepShapes(decode_sizes(64), chunk_shapes(64, 128))
POOL_BYTES = 300 * MIB


class Taken:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def replay(self) -> None:
        raise AssertionError("it is measured, not used")


class MeasuredRecorder:
    """A driver that takes node_bytes for each graph, in granules; the first one brings the pool, too.

    Args:
        fails: of the captures, which, and how.
    """

    def __init__(self, node_bytes: int, fails: dict[int, type[CaptureError]] | None = None) -> None:
        self._node_bytes, self._fails = node_bytes, fails or {}
        self.num_captured = 0

    def capture(self, work: Callable[[], None]) -> Taken:
        if self.num_captured in self._fails:
            raise self._fails[self.num_captured]("planted")
        before, after = (
            -(-(number * self._node_bytes) // GRANULE_BYTES) * GRANULE_BYTES
            for number in (self.num_captured, self.num_captured + 1)
        )
        self.num_captured += 1
        return Taken(after - before + (POOL_BYTES if self.num_captured == 1 else 0))

    def give_back(self) -> None:
        """There is nothing."""


def graphs_of(recorder: MeasuredRecorder) -> StepGraphs:
    graphs = StepGraphs(lambda shape: None, lambda shape: None, SHAPES)
    graphs.recorder = recorder
    return graphs


@pytest.mark.parametrize("node_bytes", [0, 1000, 700_000, 1_500_000, GRANULE_BYTES, 5_000_000])
def test_what_all_take_is_never_less_than_a_few_have_told_and_little_more(node_bytes: int) -> None:
    recorder = MeasuredRecorder(node_bytes)
    taken = measure_graphs(graphs_of(recorder))
    assert taken is not None
    assert recorder.num_captured == 5
    everything = graphs_of(MeasuredRecorder(node_bytes))
    everything.capture_all(lambda done, total: None)
    num_graphs = len(SHAPES.in_order)
    assert everything.num_captured == num_graphs
    assert everything.size_bytes <= taken.of(num_graphs) <= everything.size_bytes + num_graphs * GRANULE_BYTES


def test_what_graphs_take_is_the_largest_and_as_many_others() -> None:
    found = GraphBytes(2, 100, 7)
    assert [found.of(count) for count in (0, 1, 2, 3, 10)] == [0, 100, 100, 107, 156]


def test_those_that_are_measured_are_spread_from_the_least_to_the_largest() -> None:
    shapes = [StepShape(size) for size in range(1, 10)]
    assert evenly(shapes, 3) == [StepShape(1), StepShape(5), StepShape(9)]
    assert evenly(shapes[:2], 3) == shapes[:2]
    assert evenly([], 3) == []


@pytest.mark.parametrize("how", [NoRoomForGraph, CaptureError])
def test_where_the_largest_cannot_be_captured_there_are_none(how: type[CaptureError]) -> None:
    assert measure_graphs(graphs_of(MeasuredRecorder(1000, {1: how}))) is None


def test_where_prompts_cannot_be_captured_decodes_are_measured() -> None:
    graphs = graphs_of(MeasuredRecorder(1000))
    recorder = MeasuredRecorder(1000)
    inner = recorder.capture

    def capture(work: Callable[[], None]) -> Taken:
        if recorder.num_captured == 0 and graphs.shapes.chunks:
            raise CaptureError("planted")
        return inner(work)

    recorder.capture = capture  # type: ignore[method-assign]
    graphs.recorder = recorder
    found = measure_graphs(graphs)
    assert found is not None
    assert found.num_largest == 1
    assert graphs.shapes == StepShapes(SHAPES.decodes)


def counted(taken: GraphBytes, free_gib: float = 100, **engine: Any) -> tuple[MemoryPlan, CountedGraphs]:
    """As it was planned before the start, and as it is with what graphs take."""
    config = EngineConfig(**{"max_model_len": 8192, **engine})
    memory = plan_memory(MODEL, config, CUDA, 0, int(free_gib * GIB))
    return memory, plan_graphs(taken, memory, step_shapes(MODEL, config))


@pytest.mark.parametrize("other_bytes", [MIB, 64 * MIB])
def test_keys_and_values_get_what_graphs_leave(other_bytes: int) -> None:
    taken = GraphBytes(2, POOL_BYTES, other_bytes)
    before, found = counted(taken, 60)
    block_bytes = bytes_per_block(MODEL, CUDA.dtype)
    num_graphs = len(found.shapes.in_order)
    assert found.most_graphs == num_graphs
    assert found.memory.graph_bytes == POOL_BYTES + (num_graphs - 2) * other_bytes + block_bytes
    more = OWN_MEMORY_SHARE * (before.graph_bytes - found.memory.graph_bytes)  # their part of what is left
    assert abs(found.memory.kv_bytes - before.kv_bytes - more) <= 2 * block_bytes
    assert found.memory.weights_bytes == before.weights_bytes


def test_where_the_operator_asks_for_more_keys_and_values_there_are_fewer_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = GraphBytes(2, POOL_BYTES, 256 * MIB)
    plain, _ = counted(taken)
    room = plain.free_bytes - plain.weights_bytes - plain.activation_bytes
    graph_bytes = taken.of(6) + 2 * MIB
    with caplog.at_level(logging.WARNING):
        before, found = counted(taken, kv_memory_bytes=room - graph_bytes)
    assert found.memory.kv_bytes == before.kv_bytes
    assert found.memory.total_bytes <= found.memory.free_bytes
    num_shapes = len(found.shapes.in_order)
    assert 0 < found.most_graphs < num_shapes
    told = f"there is memory for {found.most_graphs} of {num_shapes} CUDA graphs: other steps are sent without"
    assert [record.getMessage() for record in caplog.records] == [told]
    one_more = taken.of(found.most_graphs + 1) + bytes_per_block(MODEL, CUDA.dtype)
    engine = EngineConfig(max_model_len=8192, kv_memory_bytes=room - graph_bytes)
    with pytest.raises(NotEnoughMemory):
        plan_memory(MODEL, engine, CUDA, 0, before.free_bytes, before.weights_bytes, one_more)


def test_where_not_even_the_largest_have_room_there_are_none() -> None:
    plain, _ = counted(GraphBytes(2, 0, 0))
    room = plain.free_bytes - plain.weights_bytes - plain.activation_bytes
    _, found = counted(GraphBytes(2, 90 * GIB, MIB), kv_memory_bytes=room - plain.graph_bytes - GIB)
    assert found.most_graphs == 0
    assert found.memory.graph_bytes == 0
