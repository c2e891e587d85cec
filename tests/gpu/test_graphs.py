"""CUDA's recorder and clock without a device: what they leave behind where work cannot be captured."""

import logging

import pytest
import torch

from gpu.step_graphs import CaptureError, CudaRecorder, NoRoomForGraph
from gpu.streams import NEVER_S, graph_seconds, seconds_or_never
from tests.gpu.fake_cuda import FakeCuda

CUDA = torch.device("cuda", 0)


def test_a_capture_that_fails_leaves_the_current_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else steps without graphs would go out on one stream, and what they read on another."""
    cuda = FakeCuda(monkeypatch)
    calls = []

    def work() -> None:
        calls.append(cuda.current)
        if len(calls) > 1:
            raise RuntimeError("it waits for the device")

    with pytest.raises(CaptureError):
        CudaRecorder(CUDA).capture(work)
    assert calls[0] == calls[1] != "default"
    assert cuda.current == "default"


def test_a_capture_is_sent_once_and_ends_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    CudaRecorder(CUDA).capture(lambda: None)
    assert (cuda.current, cuda.num_replays) == ("default", 1)


class FailsOnce:
    """Works when it is called, and not in the first capture."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            raise self._error


def test_after_a_capture_that_fails_the_next_one_succeeds_and_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's allocator gives nothing back while it believes that a capture goes on, nor takes its pool again."""
    cuda = FakeCuda(monkeypatch)
    recorder, work = CudaRecorder(CUDA), FailsOnce(RuntimeError("it waits for the device"))
    with pytest.raises(CaptureError):
        recorder.capture(work)
    assert not cuda.recorded
    assert cuda.uses.total() == 0
    recorder.capture(work)
    assert (cuda.num_replays, cuda.uses.total()) == (1, 1)


def test_a_capture_that_memory_was_missing_for_gives_its_pool_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the graph that was made: torch has ended the capture as it should."""
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(NoRoomForGraph):
        CudaRecorder(CUDA).capture(FailsOnce(torch.OutOfMemoryError("CUDA out of memory")))
    assert not cuda.recorded
    assert cuda.uses.total() == 1


def test_what_is_captured_after_all_was_given_back_has_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses one that no graph has any more, where something lies in it yet."""
    cuda = FakeCuda(monkeypatch)
    recorder = CudaRecorder(CUDA)
    recorder.capture(lambda: None)
    recorder.capture(lambda: None)
    assert list(cuda.uses.values()) == [2]  # graphs share their memory
    cuda.uses.subtract(list(cuda.uses.elements()))  # they are gone
    recorder.give_back()
    recorder.capture(lambda: None)
    assert list(cuda.uses.values()) == [0, 1]


UNCAPTURABLE = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def test_what_cannot_be_captured_does_not_serve_and_leaves_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert seconds_or_never(graph_seconds, FailsOnce(UNCAPTURABLE), "this way", CUDA) == NEVER_S
    assert cuda.current == "default"
    assert [record.getMessage()[:42] for record in caplog.records] == ["this way does not serve here: AcceleratorE"]


def test_an_error_that_costs_the_device_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(monkeypatch, lost_after=1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        seconds_or_never(graph_seconds, FailsOnce(UNCAPTURABLE), "this way", CUDA)
    assert not caplog.records


def test_what_works_is_measured() -> None:
    assert seconds_or_never(lambda work: 0.25, lambda: None, "this way", CUDA) == 0.25
