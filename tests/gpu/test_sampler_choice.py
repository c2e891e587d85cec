"""Which kernel draws is told in words, and is loaded where nothing speaks against it."""

import dataclasses

import pytest
import torch

from gpu import sampler_choice
from gpu.device import DeviceChoice
from gpu.sampler_choice import find_sampler, why_no_sampling_kernel
from tests.gpu.test_measured import LARGE, SMALL

CPU = DeviceChoice(torch.device("cpu"), "", torch.float32, "", 1, "")
CUDA = dataclasses.replace(CPU, device=torch.device("cuda"), dtype=torch.bfloat16)


def without(missing: str) -> object:
    return lambda name: None if name == missing else object()


def test_a_cpu_needs_numba_and_a_model_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_choice, "find_spec", without("triton"))
    assert why_no_sampling_kernel(LARGE, CPU) is None
    assert why_no_sampling_kernel(SMALL, CPU) == "the model is too small to repay loading it"
    assert find_sampler(SMALL, CPU) is None
    monkeypatch.setattr(sampler_choice, "find_spec", without("numba"))
    assert why_no_sampling_kernel(LARGE, CPU) == "numba is not installed"


def test_a_cuda_device_needs_triton_and_a_vocabulary_that_one_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_choice, "find_spec", without("triton"))
    assert why_no_sampling_kernel(LARGE, CUDA) == "triton is not installed"
    monkeypatch.setattr(sampler_choice, "find_spec", without("numba"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_no_sampling_kernel(LARGE, CUDA) is None
    vast = dataclasses.replace(LARGE, vocab_size=2_000_000)
    assert why_no_sampling_kernel(vast, CUDA) == "a vocabulary of 2,000,000: it knows up to 1,048,576"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_no_sampling_kernel(LARGE, CUDA) == "the device is older than compute capability 8.0"


def test_the_kernel_of_a_cpu_is_numbas() -> None:
    choice = find_sampler(LARGE, CPU)
    assert choice is not None
    assert choice.make_kernel.__name__ == "RowSampler"  # type: ignore[attr-defined]
