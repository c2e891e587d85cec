"""Which graphs are captured, when, and what becomes of steps where none can be."""

import logging
from collections.abc import Callable

import pytest

from gpu.step_graphs import CaptureError, NoRoomForGraph, StepGraphs
from gpu.step_shapes import StepShape, StepShapes

CHUNKS = (StepShape(0, 1, 16), StepShape(4, 1, 28))


class Recorded:
    size_bytes = 5

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def replay(self) -> None:
        self._log.append("replay")


class LoggingRecorder:
    """Refuses work whose log ends with one of these.

    Args:
        room: graphs that there is memory for.
    """

    def __init__(self, log: list[str], fails: tuple[str, ...] = (), room: int = 99) -> None:
        self._log, self._fails, self.room = log, fails, room

    def capture(self, work: Callable[[], None]) -> Recorded:
        work()
        if self._log[-1].endswith(self._fails):
            raise CaptureError("a host reads")
        self.room -= 1
        if self.room < 0:
            raise NoRoomForGraph("memory has ended")
        return Recorded(self._log)

    def give_back(self) -> None:
        """There is nothing."""


def make_graphs(
    sizes: tuple[int, ...],
    fails: tuple[str, ...] = (),
    is_on: bool = True,
    chunks: tuple[StepShape, ...] = (),
    room: int = 99,
) -> tuple[StepGraphs, list[str]]:
    log: list[str] = []
    graphs = StepGraphs(
        lambda shape: log.append(f"step {shape}"),
        lambda shape: log.append(f"pad {shape}"),
        StepShapes(sizes, chunks),
    )
    graphs.recorder = LoggingRecorder(log, fails, room) if is_on else None
    return graphs, log


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def nothing(done: int, total: int) -> None:
    """For those who do not look."""


def test_the_largest_are_captured_first_then_small_ones_on_rows_that_are_padding() -> None:
    graphs, log = make_graphs((1, 2, 4), chunks=CHUNKS)
    told: list[tuple[int, int]] = []
    graphs.capture_all(lambda done, total: told.append((done, total)))
    chunks = [f"{tokens} tokens of prompts beside {rows} rows" for tokens, rows in ((28, 4), (16, 0))]
    shapes = [chunks[0], "4 rows", "1 rows", "2 rows", chunks[1]]
    assert log == [f"{what} {shape}" for shape in shapes for what in ("pad", "step")]
    assert told == [(number, 5) for number in range(1, 6)]
    assert graphs.size_bytes == 25
    assert [graphs.of(StepShape(count)) for count in (1, 2, 3, 4)] == [StepShape(count) for count in (1, 2, 4, 4)]


def test_a_graph_is_captured_once_and_replayed() -> None:
    graphs, log = make_graphs((1, 2))
    for _ in range(2):
        graphs.prepare(StepShape(2))
        assert graphs.replay(StepShape(2))
    assert log == ["pad 2 rows", "step 2 rows", "replay", "replay"]
    assert graphs.num_captured == 1


def test_without_graphs_no_step_has_one() -> None:
    graphs, log = make_graphs((1, 4), is_on=False, chunks=CHUNKS)
    graphs.capture_all(lambda done, total: pytest.fail("nothing is captured"))
    graphs.prepare(StepShape(4))
    assert not graphs.replay(StepShape(4))
    assert log == []
    assert (graphs.of(StepShape(3)), graphs.of(CHUNKS[0])) == (None, None)


@pytest.mark.parametrize("fails", [4, 1])
def test_where_decodes_cannot_be_captured_all_goes_on_without(fails: int, caplog: pytest.LogCaptureFixture) -> None:
    graphs, log = make_graphs((1, 4), (f"step {fails} rows",), chunks=CHUNKS)
    with caplog.at_level(logging.WARNING):
        graphs.capture_all(nothing)
    assert messages(caplog) == [f"no CUDA graphs: a step of {fails} rows cannot be captured: a host reads"]
    assert graphs.num_captured == 0
    log.clear()
    graphs.prepare(StepShape(4))
    assert graphs.of(StepShape(3)) is None
    assert not graphs.replay(StepShape(4))
    assert log == []


def test_where_chunks_cannot_be_captured_decodes_are(caplog: pytest.LogCaptureFixture) -> None:
    graphs, _ = make_graphs((1, 4), ("beside 0 rows",), chunks=CHUNKS)
    with caplog.at_level(logging.WARNING):
        graphs.capture_all(nothing)
    why = "no CUDA graphs of prompts: a step of 16 tokens of prompts beside 0 rows cannot be captured: a host reads"
    assert messages(caplog) == [why]
    assert graphs.num_captured == 2
    assert graphs.of(CHUNKS[0]) is None
    graphs.prepare(CHUNKS[0])
    assert graphs.num_captured == 2


@pytest.mark.parametrize("is_told", [True, False])
def test_where_memory_ends_those_that_are_there_serve(is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it was counted before, or the device says so."""
    graphs, log = make_graphs((1, 2, 4, 8), chunks=CHUNKS, room=99 if is_told else 4)
    graphs.most_graphs = 4 if is_told else None
    with caplog.at_level(logging.WARNING):
        graphs.capture_all(nothing)
    assert graphs.num_captured == 4  # the two largest, and of one and two rows
    expected = "no more CUDA graphs than 4: no memory for 4 rows: memory has ended"
    assert messages(caplog) == ([] if is_told else [expected])
    served = [graphs.of(StepShape(count)) for count in (1, 2, 3, 4, 6)]
    assert served == [StepShape(1), StepShape(2), None, None, StepShape(8)]
    assert graphs.of(StepShape(0, 1, 9)) is None
    assert graphs.of(StepShape(2, 1, 20)) == CHUNKS[1]
    log.clear()
    graphs.prepare(StepShape(4))
    assert not graphs.replay(StepShape(4))
    assert graphs.replay(StepShape(8))
    assert log == ["replay"]


def test_dropped_graphs_leave_room_for_others() -> None:
    graphs, _ = make_graphs((1, 2))
    graphs.most_graphs = 2
    graphs.capture_all(nothing)
    assert graphs.is_full
    graphs.drop()
    assert (graphs.num_captured, graphs.size_bytes, graphs.is_full) == (0, 0, False)
