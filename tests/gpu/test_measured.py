"""What is chosen by measuring, kept per machine and shape: threads by a step's tokens, rows that kernels multiply."""

import dataclasses
from pathlib import Path

import pytest
import torch

from core.config import ModelConfig, RopeConfig
from gpu import measured as measuring
from gpu.device import DeviceChoice
from gpu.linear import RowLimit, make_linear
from gpu.measured import Measured, cache_file, choose_measured, measure_rows, measured_here, read_measured
from gpu.threads import PREFILL_TOKENS, StepThreads, fewest, measure_threads

TWO_CORES = DeviceChoice(torch.device("cpu"), "", torch.float32, "", 2, "")
LARGE = ModelConfig(
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
SMALL = dataclasses.replace(LARGE, num_layers=1, vocab_size=300)
PROBES = [(make_linear(torch.ones(8, 4), None, None), 4), (make_linear(torch.ones(4, 8), None, None), 8)]
FEW_THEN_ALL = StepThreads(((1, 1), (8, 2)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "load_average", lambda: 1.5)
    return cache_file()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every measurement gives FEW_THEN_ALL; the list has an item for each."""
    calls: list[int] = []

    def measure(probes: object, max_threads: int, dtype: torch.dtype) -> StepThreads:
        calls.append(max_threads)
        return FEW_THEN_ALL

    monkeypatch.setattr(measuring, "measure_threads", measure)
    return calls


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (7, 1), (8, 2), (2048, 2)])
def test_a_step_has_the_threads_of_the_largest_bound_below_it(tokens: int, count: int) -> None:
    assert FEW_THEN_ALL.of(tokens) == count


def test_they_read_as_a_phrase() -> None:
    assert str(Measured(FEW_THEN_ALL)) == "threads 1; 2 from 8 tokens a step"
    assert str(Measured(FEW_THEN_ALL, 64)) == "threads 1; 2 from 8 tokens a step; kernel up to 64 rows"


def test_the_kernel_multiplies_up_to_the_most_rows_at_which_its_best_round_is_the_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = RowLimit(1)
    tried: list[tuple[int, int]] = []

    def seconds_of(probes: object, num_tokens: int, threads: int, dtype: torch.dtype) -> float:
        is_disturbed = len(tried) < 4
        tried.append((num_tokens, limit.rows))
        return (1.0 if limit.rows == 0 else 0.9 if num_tokens <= 32 else 1.1) + is_disturbed

    monkeypatch.setattr(measuring, "seconds_of", seconds_of)
    assert measure_rows(PROBES, 2, torch.float32, limit) == 32
    assert limit.rows == 32
    turns = [(rows, kernel) for rows in measuring.MEASURED_ROWS for _ in range(3) for kernel in (rows, 0)]
    assert tried == turns


def test_rows_are_measured_once_and_set_at_every_start(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measure_rows", lambda probes, threads, dtype, limit: 16)
    for _ in range(2):
        limit = RowLimit(1)
        assert choose_measured(LARGE, TWO_CORES, PROBES, limit) == Measured(FEW_THEN_ALL, 16)
        assert limit.rows == 16
    choose_measured(LARGE, TWO_CORES, PROBES)  # without the kernel it is another case
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("seconds", "count"), [([1.0, 0.96, 0.97], 1), ([1.0, 0.6, 0.58], 2), ([3.0, 2.0, 1.0], 4), ([1.0, 2.0, 3.0], 1)]
)
def test_threads_that_gain_little_are_left_to_others(seconds: list[float], count: int) -> None:
    assert fewest([1, 2, 4], seconds) == count


def test_measuring_covers_every_step_and_leaves_torchs_threads() -> None:
    before = torch.get_num_threads()
    found = measure_threads(PROBES, 2, torch.float32)
    assert torch.get_num_threads() == before
    assert all(found.of(tokens) in (1, 2) for tokens in (1, 3, 8))
    assert found.of(PREFILL_TOKENS) == 2


@pytest.mark.usefixtures("measured")
def test_what_was_asked_for_holds_for_every_step() -> None:
    asked = dataclasses.replace(TWO_CORES, threads=5, are_threads_asked=True)
    assert choose_measured(LARGE, asked, PROBES) == Measured(StepThreads(((1, 5),)))


def test_a_small_model_is_not_measured(measured: list[int], cache: Path) -> None:
    assert choose_measured(SMALL, TWO_CORES, PROBES) == Measured(
        StepThreads(((1, 1), (measuring.SMALL_MODEL_TOKENS, 2)))
    )
    assert not measured
    assert not cache.exists()


def test_a_large_model_is_measured_once_per_machine_and_shape(measured: list[int], cache: Path) -> None:
    assert [choose_measured(LARGE, TWO_CORES, PROBES) for _ in range(2)] == [Measured(FEW_THEN_ALL)] * 2
    assert len(measured) == 1
    choose_measured(dataclasses.replace(LARGE, intermediate_size=4096), TWO_CORES, PROBES)
    choose_measured(LARGE, dataclasses.replace(TWO_CORES, threads=4), PROBES)
    assert measured == [2, 2, 4]
    assert len(measured_here(TWO_CORES)) == 2
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"machine": 3}',
        b'{"machine": {"shape": [[1, 2]]}}',
        b'{"machine": {"shape": {"threads": [[1, 2]]}}}',
        b'{"machine": {"shape": {"threads": [[8, 2]], "kernel_rows": 8}}}',
        b'{"machine": {"shape": {"threads": [[1, 0]], "kernel_rows": 8}}}',
        b'{"machine": {"shape": {"threads": [[1, 2], [1]], "kernel_rows": 8}}}',
        b'{"machine": {"shape": {"threads": [[1, 2]], "kernel_rows": "few"}}}',
    ],
)
def test_a_broken_file_is_as_none_and_is_replaced(content: bytes, measured: list[int], cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert read_measured(cache) == {}
    assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(FEW_THEN_ALL)
    assert list(measured_here(TWO_CORES).values()) == [Measured(FEW_THEN_ALL)]


def test_a_cache_that_cannot_be_written_is_done_without(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(FEW_THEN_ALL)
    assert measured == [2]


def test_what_was_measured_beside_others_is_not_kept(
    measured: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "load_average", lambda: 2.1)
    assert [choose_measured(LARGE, TWO_CORES, PROBES) for _ in range(2)] == [Measured(FEW_THEN_ALL)] * 2
    assert len(measured) == 2
    assert not cache.exists()
