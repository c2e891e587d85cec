"""Fake CUDA graphs replay what was captured, and refuse what a capture on a device would get wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu.step_graphs import CaptureError, Graph, NoRoomForGraph, is_of_memory
from tests.gpu.fake_cuda_graphs import NODE_BYTES, FakeRecorder


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def capture(work: Callable[[], Any]) -> Graph:
    return FakeRecorder().capture(work)


def test_a_replay_computes_anew_from_the_same_tensors_without_python() -> None:
    given, out, calls = torch.arange(6.0).view(2, 3), torch.zeros(3, 2), []

    def work() -> None:
        calls.append("called")
        doubled = (given * 2).relu() + 1
        out.copy_(doubled.view(3, 2).sort(-1, descending=True).values)

    graph = capture(work)
    assert len(calls) == 2  # once to warm up
    given.copy_(torch.tensor([[4.0, 5.0, 1.0], [0.0, -1.0, 2.0]]))
    graph.replay()
    assert out.tolist() == [[11.0, 9.0], [3.0, 1.0], [5.0, 1.0]]
    assert len(calls) == 2


def test_numbers_and_tensors_of_the_host_are_those_of_the_capture() -> None:
    step = {"input": torch.ones(2), "scale": 3.0}
    out = torch.zeros(2)
    first = step["input"]
    graph = capture(lambda: out.copy_(step["input"] * step["scale"]))
    step |= {"input": torch.full((2,), 7.0), "scale": 5.0}
    graph.replay()
    assert out.tolist() == [3.0, 3.0]
    first.fill_(2.0)
    graph.replay()
    assert out.tolist() == [6.0, 6.0]


GIVEN = torch.arange(6.0).view(2, 3)
REFUSED: dict[str, Callable[[], Any]] = {
    "item": lambda: GIVEN.sum().item(),
    "float": lambda: float(GIVEN[0, 0]),
    "a branch": lambda: bool(GIVEN[0, 0] > 1),
    "tolist": lambda: GIVEN.tolist(),
    "numpy": lambda: GIVEN.numpy(),
    "array": lambda: np.asarray(GIVEN),
    "an address": lambda: GIVEN.data_ptr(),
    "cpu": lambda: GIVEN.cpu(),
    "nonzero": lambda: GIVEN.nonzero(),
    "bincount": lambda: GIVEN.long().flatten().bincount(),
    "unique": lambda: GIVEN.unique(),
    "a mask": lambda: GIVEN[GIVEN > 1],
    "random": lambda: torch.rand(3),
    "tensor": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor(np.ones(3)),
    "from_numpy": lambda: torch.zeros(3).copy_(torch.from_numpy(np.ones(3))),
    "a list of indexes": lambda: GIVEN[[0, 1]] * 2,
    "new_tensor": lambda: GIVEN + GIVEN.new_tensor([1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_device_would_get_wrong_is_refused(name: str) -> None:
    with pytest.raises(CaptureError):
        capture(REFUSED[name])


def test_rows_may_be_taken_by_their_numbers() -> None:
    index, out = torch.tensor([1, 0]), torch.zeros(2, 3)
    graph = capture(lambda: out.copy_(GIVEN[index]))
    index.copy_(torch.tensor([1, 1]))
    graph.replay()
    assert torch.equal(out, GIVEN[[1, 1]])


def test_memory_that_was_let_go_of_or_moved_is_told() -> None:
    kept = {"weight": torch.ones(3)}
    out = torch.zeros(3)
    graph = capture(lambda: out.copy_(kept["weight"].view(1, 3)[0] * 2))
    graph.replay()
    kept["weight"] = kept["weight"].clone()
    with pytest.raises(CaptureError, match="nobody keeps"):
        graph.replay()


def test_what_another_graph_alone_knows_is_kept_by_nobody() -> None:
    recorder, kept, out = FakeRecorder(), {"weight": torch.ones(3)}, torch.zeros(3)
    graphs = [recorder.capture(lambda: out.copy_(kept["weight"])) for _ in range(2)]
    kept["weight"] = kept["weight"].clone()
    for graph in graphs:
        with pytest.raises(CaptureError, match="nobody keeps"):
            graph.replay()


def test_a_graph_tells_what_it_takes_beside_the_others_and_is_refused_where_there_is_no_room() -> None:
    given, out = torch.ones(256), torch.zeros(256)
    recorder = FakeRecorder(room_bytes=2048 + 3 * NODE_BYTES)

    def add(num_rows: int) -> None:
        out[:num_rows].copy_(given[:num_rows] * 2)  # two calls, of which one allocates

    first = recorder.capture(lambda: add(256))
    assert first.size_bytes == 1024 + 2 * NODE_BYTES
    with pytest.raises(NoRoomForGraph):
        recorder.capture(lambda: add(128))
    del first
    second = recorder.capture(lambda: add(128))
    assert second.size_bytes == 512 + 2 * NODE_BYTES
    out.zero_()
    second.replay()
    assert out.sum() == 256


def test_what_one_graph_allocates_is_the_others() -> None:
    recorder, kept = FakeRecorder(), {}
    given, out = torch.ones(3), torch.zeros(3)

    def first() -> None:
        kept["first"] = given * 2

    graphs = [recorder.capture(first), recorder.capture(lambda: out.copy_(given * 3))]
    graphs[0].replay()
    assert kept["first"].tolist() == [2.0] * 3
    graphs[1].replay()
    assert kept["first"].isnan().all()
    assert out.tolist() == [3.0] * 3


def test_a_graph_that_reads_what_it_left_behind_gets_no_number() -> None:
    """As of a cache that is made when it is first needed, and kept in a graph's own memory."""
    kept: list[torch.Tensor] = []
    out = torch.zeros(3)

    def work() -> None:
        if len(kept) < 2:
            kept.append(GIVEN[0] * 2)
        out.copy_(kept[-1] + out)

    graph = capture(work)
    graph.replay()
    assert not out.isnan().any()  # it computes it anew, each time
    graphs = FakeRecorder()
    first, second = graphs.capture(lambda: kept.append(GIVEN[0] * 2)), graphs.capture(lambda: out.copy_(kept[-1]))
    first.replay()
    second.replay()
    assert out.isnan().all()


def test_memory_that_has_ended_is_told_from_what_else_ends_a_capture() -> None:
    """The capture's own end raises once more, and speaks of the capture alone."""
    assert is_of_memory(torch.OutOfMemoryError("tried to allocate"))
    assert is_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_of_memory(RuntimeError("operation not permitted when stream is capturing"))
    ended = RuntimeError("operation failed due to a previous error during capture")
    ended.__context__ = torch.OutOfMemoryError("tried to allocate")
    assert is_of_memory(ended)
