"""A way that cannot be measured is none, and is said; a device that is lost is told apart."""

import logging

import pytest
import torch

from gpu.streams import NEVER_S, graph_seconds, seconds_or_never
from tests.gpu.fake_cuda import FakeCuda

CUDA = torch.device("cuda", 0)


class Capturable:
    """Works when it is called, and not in a capture."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls > 1:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def test_what_cannot_be_captured_does_not_serve_and_leaves_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert seconds_or_never(graph_seconds, Capturable(), "this way", CUDA) == NEVER_S
    assert cuda.current == "default"
    assert [record.getMessage()[:42] for record in caplog.records] == ["this way does not serve here: AcceleratorE"]


def test_an_error_that_costs_the_device_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(monkeypatch, lost_after=1)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        seconds_or_never(graph_seconds, Capturable(), "this way", CUDA)
    assert not caplog.records


def test_what_works_is_measured() -> None:
    assert seconds_or_never(lambda work: 0.25, lambda: None, "this way", CUDA) == 0.25
