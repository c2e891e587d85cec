"""Each rank's device, threads and memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.errors import DeviceUnavailable
from gpu.device import DeviceChoice
from gpu.memory_plan import estimate
from gpu.parallel.runner import estimate_ranks, least_room, rank_choice, rank_weights_bytes
from tests.gpu.conftest import ENGINE
from tests.gpu.test_memory_plan import BF16, MODEL
from tests.oracle import read_config

TWO = EngineConfig(tensor_parallel=2)
CUDA = DeviceChoice(torch.device("cuda", 0), "H200", torch.bfloat16, "", 8, "")
GPUS = replace(TWO, tensor_parallel=4)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [rank_choice(CUDA, GPUS, rank).device.index for rank in range(4)] == [0, 1, 2, 3]
    assert rank_choice(CUDA, GPUS, 1).device_reason.startswith("H200; 4 ranks")


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(DeviceUnavailable) as caught:
        rank_choice(CUDA, GPUS, 0)
    assert caught.value.cause == "--tensor-parallel 4: 3 CUDA devices were found."
    assert caught.value.fix == "--tensor-parallel 3, or less."


@pytest.mark.parametrize(("threads", "is_asked", "want"), [(8, False, 4), (1, False, 1), (3, True, 3)])
def test_ranks_on_a_cpu_share_its_threads_unless_asked(threads: int, is_asked: bool, want: int) -> None:
    choice = replace(BF16, threads=threads, are_threads_asked=is_asked)
    assert rank_choice(choice, TWO, 1).threads == want


def test_the_rank_with_the_least_room_decides() -> None:
    assert least_room(CUDA, [9, 5, 7]) == 5
    assert least_room(BF16, [9, 8]) == 4  # of the memory that they share


def test_a_rank_has_half_of_the_matrices_and_of_the_head() -> None:
    """Llama 3.1 8B."""
    embedding, norms = 128_256 * 4096, 65 * 4096
    rest = MODEL.num_parameters - 2 * embedding - norms
    assert rank_weights_bytes(MODEL, TWO, CUDA) == 2 * (rest // 2 + embedding + embedding // 2 + norms)


def test_an_estimate_is_of_each_rank(model_directory: Callable[[str], Path]) -> None:
    directory = model_directory("llama3")
    model, engine = parse_model_config(read_config(directory)), replace(ENGINE, tensor_parallel=2, kv_memory_bytes=None)
    one, each = estimate(directory, model, replace(engine, tensor_parallel=1)), estimate_ranks(directory, model, engine)
    assert each.device.device_reason == "asked for; 2 ranks, each with what is shown here"
    assert each.num_parameters == one.num_parameters
    assert each.kv_bytes_per_token == one.kv_bytes_per_token // 2
    assert each.weights_bytes < one.weights_bytes
    assert each.free_bytes < 0.6 * one.free_bytes


def test_of_a_tied_head_a_device_keeps_no_copy_and_a_packed_one_its_rows() -> None:
    model = replace(MODEL, tie_embeddings=True)
    plain = rank_weights_bytes(model, TWO, CUDA)
    assert plain == rank_weights_bytes(MODEL, TWO, CUDA) - 128_256 * 4096
    float32 = replace(BF16, dtype=torch.float32)
    assert rank_weights_bytes(model, TWO, float32) == 2 * plain
