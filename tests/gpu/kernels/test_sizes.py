"""Which models and devices the kernels know, what is told where they do not serve, and who serves which device."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig, ModelConfig
from gpu import PUTS_OFF
from gpu.attention import TorchAttention
from gpu.device import DeviceChoice
from gpu.kernels import matmul, sizes
from gpu.kernels.attention import PagedAttention
from gpu.kernels.operators import TritonOperators
from gpu.operators import Operators
from gpu.quant import quantize
from gpu.tune import (
    describe_attention,
    describe_graphs,
    describe_matmuls,
    find_operators,
    find_recorder,
    why_no_kernels,
)
from tests.gpu.kernels.test_operators import CONFIG

CUDA = DeviceChoice(torch.device("cuda", 0), "", torch.bfloat16, "", 1, "")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_a_device_with_triton_is_served_by_its_kernels() -> None:
    assert why_no_kernels(CONFIG, CUDA) is None
    found = find_operators(CONFIG, CUDA)
    assert type(found) is TritonOperators
    assert type(found.attention) is PagedAttention
    assert describe_matmuls(CONFIG, CUDA, EngineConfig()).startswith("Triton")
    assert describe_attention(CONFIG, CUDA) == "Triton's kernel over block tables"


@pytest.mark.parametrize(
    ("capability", "why"), [((7, 5), "compute capability 7.5: the kernels need 8.0"), ((8, 0), None), ((10, 0), None)]
)
def test_an_old_device_is_left_to_torch(
    capability: tuple[int, int], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert why_no_kernels(CONFIG, CUDA) == why
    assert (type(find_operators(CONFIG, CUDA)) is Operators) == (why is not None)
    assert describe_matmuls(CONFIG, CUDA, EngineConfig()) == (
        f"torch's operators: {why}" if why else "Triton's kernels or cuBLAS, as measured"
    )


@pytest.mark.parametrize(("capability", "is_known"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_8_bit_floats_are_left_to_torch_where_triton_converts_none(
    capability: tuple[int, int], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert sizes.knows_fp8(CUDA.device) is is_known
    assert sizes.knows_fp8(torch.device("cpu"))
    monkeypatch.setattr(matmul, "knows_fp8", lambda device: is_known)
    assert matmul.can_multiply(quantize(torch.ones(8, 32), "fp8")) is is_known
    assert matmul.can_multiply(quantize(torch.ones(8, 32), "int8"))


def test_without_triton_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "find_spec", lambda name: None)
    assert why_no_kernels(CONFIG, CUDA) == "triton is not installed"
    assert type(find_operators(CONFIG, CUDA)) is Operators


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (dataclasses.replace(CONFIG, head_dim=33), "heads of 33"),
        (dataclasses.replace(CONFIG, head_dim=1024), "heads of 1024"),
        (dataclasses.replace(CONFIG, hidden_size=131_072), "a width of 131,072"),
    ],
)
def test_a_model_that_they_do_not_know_is_left_to_torch(config: ModelConfig, why: str) -> None:
    assert (why_no_kernels(config, CUDA) or "").startswith(why)
    assert type(find_operators(config, CUDA)) is Operators


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (dataclasses.replace(CONFIG, head_dim=514), "heads of 514 in bfloat16: the kernels support up to 512"),
        (
            dataclasses.replace(CONFIG, num_heads=200, num_kv_heads=1),
            "200 heads share a key: the kernels support up to 128",
        ),
    ],
)
def test_heads_that_attention_does_not_know_are_left_to_torch(
    config: ModelConfig, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MAX_HEAD_DIM", 1024)
    found = find_operators(config, CUDA)
    assert type(found) is TritonOperators
    assert type(found.attention) is TorchAttention
    assert describe_attention(config, CUDA).startswith(f"torch's operators: {why}")


@pytest.mark.parametrize(
    ("mode", "on_device", "on_cpu"),
    [("auto", True, False), ("on", True, True), ("lazy", True, True), ("off", False, False)],
)
def test_graphs_are_a_devices_or_asked_for(
    mode: str, on_device: bool, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: device.type)
    engine, operators = EngineConfig(graphs=mode), find_operators(CONFIG, CUDA)
    cpu = dataclasses.replace(CUDA, device=torch.device("cpu"))
    found = [find_recorder(engine, choice, operators) for choice in (CUDA, cpu)]
    assert found == ["cuda" if on_device else None, "cpu" if on_cpu else None]
    operators.has_device_rows = False
    assert [find_recorder(engine, choice, operators) for choice in (CUDA, cpu)] == [None, None]


def test_what_sends_decodes_is_told() -> None:
    def told(choice: DeviceChoice = CUDA, config: ModelConfig = CONFIG, mode: str = "auto") -> str:
        return describe_graphs(config, choice, EngineConfig(graphs=mode))

    shapes = "11 sizes of decodes, 28 of prompts up to 512 tokens"
    assert told() == f"{shapes}, captured at start"
    assert told(mode="lazy") == f"{shapes}, captured as they are needed"
    assert told(mode="off") == "none: asked for"
    assert told(config=dataclasses.replace(CONFIG, head_dim=33)).startswith("none: heads of 33")
    assert told(dataclasses.replace(CUDA, device=torch.device("cpu"))) == "none: on cpu there is nothing to gain"


def test_a_cpu_has_its_own() -> None:
    cpu = dataclasses.replace(CUDA, device=torch.device("cpu"), dtype=torch.float32)
    assert "the kernels support bfloat16 on a CPU" in (why_no_kernels(CONFIG, cpu) or "")
    assert describe_matmuls(CONFIG, cpu, EngineConfig()).startswith("torch's operators: float32 on cpu")
    assert describe_attention(CONFIG, cpu).startswith("torch's operators: float32 on cpu")


LOADED = """
import sys

import gpu, torch

from core.config import EngineConfig
from gpu.loading import load_runner, warm_up
from server.engine_loader import DEMO_DIRECTORY
from server.model_files import parse_config, read_model_config

config = parse_config(DEMO_DIRECTORY, read_model_config(DEMO_DIRECTORY))
warm_up(load_runner(DEMO_DIRECTORY, config, EngineConfig(device="cpu"), lambda done, total: None))
in_vain = {"numba", "sympy", "torch._dynamo", "torch._refs", "torch.distributions.normal", "triton"}
print(sorted(in_vain & sys.modules.keys()))
print(torch.Generator().manual_seed(3).initial_seed())
"""
PUT_OFF = """
import sys

import gpu, torch

print(sys.modules["torch.export"] is torch.export)
import torch.export.graph_signature
from torch.export import Dim

print(Dim is torch.export.Dim, torch.distributions.Normal(0.0, 1.0).mean.item())
print(torch._meta_registrations.pooling_output_shape(8, 2, 0, 2, 1, False))
"""


@pytest.mark.skipif(not PUTS_OFF, reason="another build of torch")
@pytest.mark.parametrize(("program", "lines"), [(LOADED, ["[]", "3"]), (PUT_OFF, ["True", "True 0.0", "4"])])
def test_nothing_is_imported_in_vain_and_what_is_put_off_comes_when_it_is_used(program: str, lines: list[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == lines
