"""CUDA's recorder, as far as it can be told without a device."""

import pytest
import torch

from gpu.graphs import CaptureError, CudaRecorder
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
