"""Where the kernels serve they give torch's tokens; where they cannot, the reason is told."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from core.config import EngineConfig, ModelConfig, RopeConfig
from gpu import linear
from gpu.cpu_kernels import support
from gpu.cpu_kernels.support import describe_attention, describe_products, why_no_attention, why_no_kernels
from gpu.device import DeviceChoice, cpu_flags
from gpu.kernel_choice import find_operators
from gpu.operators import Operators
from tests.gpu.conftest import open_runner
from tests.gpu.driver import Driver, make_plan

CPU = DeviceChoice(torch.device("cpu"), "", torch.bfloat16, "", 1, "")
QWEN_05B = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=32_000,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_position=32_768,
    rms_norm_eps=1e-6,
    rope=RopeConfig(1_000_000.0),
)


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=40,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    MistralForCausalLM(config).save_pretrained(directory)
    return directory


def logits(directory: Path, dtype: str) -> torch.Tensor:
    """Of rows of several lengths, decoded together with the same tokens whatever is drawn: [steps, rows, vocab]."""
    engine = EngineConfig(device="cpu", dtype=dtype, max_sequences=16, kv_memory_bytes=8 * 1024**2, threads=2)
    runner = open_runner(directory, engine)
    driver = Driver(runner)
    sequences = [driver.add([7 * index % 300 for index in range(1, length)]) for length in (4, 20, 39, 90)]
    driver.step(None, *sequences)
    found = []
    for step in range(30):
        rows, tables = [], []
        for sequence in sequences:
            position = len(sequence.token_ids) - 1
            if position // 16 == len(sequence.blocks):
                sequence.blocks.append(driver.free_blocks.pop())
                tables.append((sequence.slot, position // 16, sequence.blocks[-1]))
            sequence.token_ids[-1] = (11 * step + sequence.slot) % 300
            rows.append((sequence.slot, position, [sequence.token_ids[-1]], True))
            sequence.token_ids.append(0)
        ticket = runner.forward(make_plan(rows, tables=tables))
        found.append(ticket.sent.logits[torch.as_tensor(ticket.sent.sampled.rows.argsort())])
    return torch.stack(found)


@pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="needs a CPU with avx512_bf16")
def test_the_kernels_logits_are_as_near_to_float32_as_torchs(
    windowed_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, torchs = (logits(windowed_model, dtype) for dtype in ("float32", "bfloat16"))
    monkeypatch.setattr(support, "MIN_PARAMETERS", 0)
    kernels = logits(windowed_model, "bfloat16")
    assert not torch.equal(kernels, torchs)  # they were used
    assert (kernels - exact).abs().max() < 1.25 * (torchs - exact).abs().max()
    top = exact.topk(2).values
    is_clear = top[..., 0] - top[..., 1] > 0.15  # several times the error of bfloat16
    assert torch.equal(kernels.argmax(-1)[is_clear], exact.argmax(-1)[is_clear])
    assert is_clear.sum() > 60


@pytest.mark.parametrize(
    ("config", "device", "why"),
    [
        (QWEN_05B, dataclasses.replace(CPU, dtype=torch.float32), "float32 on cpu"),
        (dataclasses.replace(QWEN_05B, num_layers=1, vocab_size=300), CPU, "too small"),
    ],
    ids=["dtype", "size"],
)
def test_what_speaks_against_the_kernels_is_told(
    config: ModelConfig, device: DeviceChoice, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "cpu_flags", lambda: frozenset([support.NEEDED_FLAG]))
    assert why in (why_no_kernels(config, device) or "")
    assert type(find_operators(config, device)) is Operators


def test_without_the_instructions_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "cpu_flags", lambda: frozenset(["avx2"]))
    assert why_no_kernels(QWEN_05B, CPU) == "the CPU has no avx512_bf16"


def test_where_the_system_refuses_tiles_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached of the kernels was compiled for a CPU with tiles, and would die of them."""
    monkeypatch.setattr(support, "cpu_flags", lambda: frozenset([support.NEEDED_FLAG, support.TILE_FLAG]))
    monkeypatch.setattr(support, "may_use_tiles", lambda: False)
    assert why_no_kernels(QWEN_05B, CPU) == "the system does not let this process use AMX"
    monkeypatch.setattr(support, "may_use_tiles", lambda: True)
    assert why_no_kernels(QWEN_05B, CPU) is None


def test_who_multiplies_and_attends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, products, attends in (
        (set(), "numba's kernel or oneDNN, as measured", "numba's kernel over block tables"),
        ({support.TILE_FLAG}, "numba's kernel, by AMX", "numba's kernel over block tables, by AMX"),
    ):
        found = frozenset(flags | {support.NEEDED_FLAG})
        for module in (support, linear):
            monkeypatch.setattr(module, "cpu_flags", lambda found=found: found)
        monkeypatch.setattr(support, "may_use_tiles", lambda: True)
        assert describe_products(QWEN_05B, CPU).startswith(products)
        assert describe_attention(QWEN_05B, CPU) == attends
    assert "too small" in describe_products(dataclasses.replace(QWEN_05B, num_layers=1, vocab_size=300), CPU)


def test_what_speaks_against_the_kernel_for_attention_is_told() -> None:
    assert why_no_attention(QWEN_05B) is None
    assert "heads of 80" in (why_no_attention(dataclasses.replace(QWEN_05B, head_dim=80)) or "")
    assert "caps" in (why_no_attention(dataclasses.replace(QWEN_05B, attention_cap=50.0)) or "")
    assert "sinks" in (why_no_attention(dataclasses.replace(QWEN_05B, has_sinks=True)) or "")
