"""A model that numba's kernels compute says what it says by torch."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from core.config import EngineConfig
from core.plan import make_plan
from gpu.cpu_kernels import support
from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags, num_physical_cores
from tests.gpu.conftest import open_runner
from tests.gpu.driver import Driver

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.recorded import RecordedLayers


def windowed_model(directory: Path, inner: int) -> Path:
    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=inner,
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


def logits(directory: Path, dtype: str, is_recorded: bool = True) -> torch.Tensor:
    """Of rows of several lengths, decoded together with the same tokens whatever is drawn: [steps, rows, vocab]."""
    engine = EngineConfig(device="cpu", dtype=dtype, max_sequences=16, kv_memory_bytes=8 * 1024**2, threads=2)
    runner = open_runner(directory, engine)
    if not is_recorded:
        runner.operators.few_layers = None
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


def test_the_kernels_logits_are_as_near_to_float32_as_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed_model(tmp_path, 112)
    exact, torchs = (logits(model, dtype) for dtype in ("float32", "bfloat16"))
    monkeypatch.setattr(support, "MIN_PARAMETERS", 0)
    kernels = logits(model, "bfloat16")
    assert not torch.equal(kernels, torchs)  # they were used
    assert (kernels - exact).abs().max() < 1.25 * (torchs - exact).abs().max()
    top = exact.topk(2).values
    is_clear = top[..., 0] - top[..., 1] > 0.15  # several times the error of bfloat16
    assert torch.equal(kernels.argmax(-1)[is_clear], exact.argmax(-1)[is_clear])
    assert is_clear.sum() > 60


@pytest.mark.parametrize("num_threads", [1, 2 * num_physical_cores() + 1])  # some sleep until the others have come
def test_layers_that_are_recorded_compute_the_same_bits(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(support, "MIN_PARAMETERS", 0)
    started = list[int]()
    start = RecordedLayers.run
    monkeypatch.setattr(RecordedLayers, "run", lambda *given: started.append(1) or start(*given))
    model = windowed_model(tmp_path, 128)  # numba's kernels multiply all of its matrices
    recorded = logits(model, "bfloat16")
    assert len(started) >= 29  # all steps but the first
    assert torch.equal(recorded, logits(model, "bfloat16", is_recorded=False))
