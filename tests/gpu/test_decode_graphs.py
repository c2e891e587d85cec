"""Which graphs are captured, when, and what becomes of steps where none can be."""

import logging

import pytest

from core.config import EngineConfig
from gpu.decode_graphs import DecodeGraphs, Part, graph_sizes, max_decodes
from gpu.graphs import CaptureError


class Recorded:
    def __init__(self, work: object, log: list[str]) -> None:
        self._log = log

    def replay(self) -> None:
        self._log.append("replay")


class LoggingRecorder:
    """Refuses work whose log ends with one of these sizes."""

    def __init__(self, log: list[str], fails: tuple[int, ...] = ()) -> None:
        self._log = log
        self.fails = fails

    def capture(self, work: object) -> Recorded:
        assert callable(work)
        work()
        if any(self._log[-1].endswith(f" {size}") for size in self.fails):
            raise CaptureError("a host reads")
        return Recorded(work, self._log)


def make_graphs(
    sizes: tuple[int, ...], fails: tuple[int, ...] = (), is_on: bool = True
) -> tuple[DecodeGraphs, list[str]]:
    log: list[str] = []
    graphs = DecodeGraphs(lambda part, size: log.append(f"{part.value} {size}"), lambda: log.append("pad"), sizes)
    graphs.recorder = LoggingRecorder(log, fails) if is_on else None
    return graphs, log


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (24, (1, 2, 4, 8, 16, 24)),
    ],
)
def test_sizes_end_with_the_most_rows(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_sizes_are_eights_up_to_256_and_then_sixteens() -> None:
    sizes = graph_sizes(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[sizes.index(248) :] == (248, 256, *range(272, 513, 16))
    assert len(sizes) == 51


def test_rows_are_those_that_a_step_has_room_for() -> None:
    assert max_decodes(EngineConfig(max_sequences=64, max_batch_tokens=512)) == 64
    assert max_decodes(EngineConfig(max_sequences=600, max_batch_tokens=512)) == 512


def test_the_largest_is_captured_first_on_rows_that_are_padding() -> None:
    graphs, log = make_graphs((1, 2, 4))
    told: list[tuple[int, int]] = []
    graphs.capture_all(Part.STEP, lambda done, total: told.append((done, total)))
    assert log == ["pad", "step 4", "pad", "step 2", "pad", "step 1"]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [graphs.size_for(num_rows) for num_rows in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_a_graph_is_captured_once_and_replayed() -> None:
    graphs, log = make_graphs((1, 2))
    for _ in range(2):
        graphs.prepare(Part.DRAW, 2)
        graphs.run(Part.DRAW, 2)
    assert log == ["pad", "draw 2", "replay", "replay"]
    assert graphs.num_captured == 1


def test_without_graphs_a_step_has_as_many_rows_as_it_has() -> None:
    graphs, log = make_graphs((1, 4), is_on=False)
    graphs.capture_all(Part.STEP, lambda done, total: pytest.fail("nothing is captured"))
    graphs.prepare(Part.STEP, 3)
    graphs.run(Part.STEP, graphs.size_for(3))
    assert log == ["step 3"]


@pytest.mark.parametrize("fails", [(4,), (1,)])
def test_where_one_cannot_be_captured_all_goes_on_without(
    fails: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    graphs, log = make_graphs((1, 4), fails)
    with caplog.at_level(logging.WARNING):
        graphs.capture_all(Part.STEP, lambda done, total: None)
    assert [record.getMessage() for record in caplog.records] == [
        f"no CUDA graphs: a step of {fails[0]} rows cannot be captured: a host reads"
    ]
    assert graphs.num_captured == 0
    log.clear()
    graphs.prepare(Part.STEP, 3)
    graphs.run(Part.STEP, graphs.size_for(3))
    assert log == ["step 3"]
