"""What is chosen by measuring, kept per machine and shape: threads by a step's tokens, who multiplies."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig, RopeConfig
from gpu import measured as measuring
from gpu.device import DeviceChoice
from gpu.elementwise_speed import ElementwiseProbe, find_elementwise
from gpu.linear import ProductChoice, make_linear
from gpu.measured import (
    LOOKS,
    Measured,
    cache_file,
    choose_measured,
    forget_measured,
    measure_drawing,
    measure_elementwise,
    measure_products,
    measured_here,
    read_measured,
)
from gpu.operators import ElementwiseChoice, Operators
from gpu.sampler import SamplerChoice
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
    assert str(Measured(FEW_THEN_ALL, True)) == "threads 1; 2 from 8 tokens a step; products by numba's kernel"


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_kernel_multiplies_where_its_best_rounds_are_the_faster(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    product = ProductChoice(uses_kernel=True)
    tried: list[tuple[int, bool]] = []

    def seconds_of(probes: object, num_tokens: int, threads: int, dtype: torch.dtype) -> float:
        is_disturbed = len(tried) < 4
        tried.append((num_tokens, product.uses_kernel))
        return (1.0 if product.uses_kernel != is_faster else 0.9 if num_tokens <= 32 else 1.1) + is_disturbed

    monkeypatch.setattr(measuring, "seconds_of", seconds_of)
    assert measure_products(PROBES, 2, torch.float32, product) is is_faster
    assert product.uses_kernel is is_faster
    one_look = [(rows, form) for rows in measuring.MEASURED_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)  # that it is slower has to be seen twice


def test_a_kernel_that_was_held_up_in_all_its_turns_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    product = ProductChoice(uses_kernel=True)
    tried: list[bool] = []

    def seconds_of(probes: object, num_tokens: int, threads: int, dtype: torch.dtype) -> float:
        tried.append(product.uses_kernel)
        is_first_look = len(tried) <= 2 * 3 * len(measuring.MEASURED_ROWS)
        return (2.0 if is_first_look else 0.5) if product.uses_kernel else 1.0

    monkeypatch.setattr(measuring, "seconds_of", seconds_of)
    assert measure_products(PROBES, 2, torch.float32, product)
    assert product.uses_kernel


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_kernel_draws_where_its_best_rounds_are_the_faster(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    sampler = SamplerChoice(never_called)
    tried: list[tuple[int, bool]] = []

    def seconds_of(choice: SamplerChoice, num_rows: int, vocab_size: int) -> float:
        is_disturbed = len(tried) < 4
        tried.append((num_rows, choice.uses_kernel))
        return (1.0 if choice.uses_kernel != is_faster else 0.9) + is_disturbed

    monkeypatch.setattr(measuring, "seconds_of_drawing", seconds_of)
    before = torch.get_num_threads()
    assert measure_drawing(sampler, 32_000, 2) is is_faster
    assert sampler.uses_kernel is is_faster
    assert torch.get_num_threads() == before
    one_look = [(rows, form) for rows in measuring.DRAWN_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)


@pytest.mark.usefixtures("measured")
def test_drawing_is_measured_once_and_set_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(sampler: SamplerChoice, vocab_size: int, threads: int) -> bool:
        calls.append(vocab_size)
        return False

    monkeypatch.setattr(measuring, "measure_drawing", measure)
    for _ in range(2):
        sampler = SamplerChoice(never_called)
        found = choose_measured(LARGE, TWO_CORES, PROBES, sampler=sampler)
        assert found == Measured(FEW_THEN_ALL, draws_by_kernel=False)
        assert not sampler.uses_kernel
    assert str(found) == "threads 1; 2 from 8 tokens a step; sampling by torch"
    choose_measured(dataclasses.replace(LARGE, vocab_size=64_000), TWO_CORES, PROBES, sampler=sampler)
    assert calls == [32_000] * LOOKS + [64_000] * LOOKS


@pytest.mark.parametrize("is_faster", [True, False])
def test_kernels_norm_turn_and_gate_where_their_best_rounds_are_the_faster(
    monkeypatch: pytest.MonkeyPatch, is_faster: bool
) -> None:
    probe, tried = elementwise_probe(), []

    def seconds(probe: ElementwiseProbe, num_rows: int) -> float:
        is_disturbed = len(tried) < 4
        tried.append((num_rows, probe.choice.uses_kernel))
        return (1.0 if probe.choice.uses_kernel != is_faster else 0.9) + is_disturbed

    monkeypatch.setattr(ElementwiseProbe, "seconds", seconds)
    assert measure_elementwise(probe, 2) is is_faster
    assert probe.choice.uses_kernel is is_faster
    one_look = [(rows, form) for rows in measuring.ELEMENTWISE_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)


@pytest.mark.usefixtures("measured")
def test_norms_are_measured_once_and_set_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(elementwise: ElementwiseProbe, threads: int) -> bool:
        calls.append(threads)
        return False

    monkeypatch.setattr(measuring, "measure_elementwise", measure)
    for _ in range(2):
        probe = elementwise_probe()
        found = choose_measured(LARGE, TWO_CORES, PROBES, elementwise=probe)
        assert found == Measured(FEW_THEN_ALL, norms_by_kernel=False)
        assert not probe.choice.uses_kernel
    assert str(found) == "threads 1; 2 from 8 tokens a step; norms, RoPE, gates by torch"
    assert calls == [2] * LOOKS


def test_a_layers_norms_turns_and_gates_are_timed_by_what_is_chosen() -> None:
    calls: list[str] = []

    class Counting(Operators):
        elementwise_choice = ElementwiseChoice()

        def add_norm(self, *arguments: Any) -> Any:
            calls.append("norm")
            return super().add_norm(*arguments)

        def rotate_and_store(self, *arguments: Any) -> Any:
            calls.append("rotate")
            return super().rotate_and_store(*arguments)

    operators = Counting(torch.bfloat16, torch.device("cpu"), 1e-6)
    probe = find_elementwise(SMALL, operators)
    assert probe is not None
    assert probe.seconds(3) > 0
    assert sorted(set(calls)) == ["norm", "rotate"]
    assert calls.count("norm") == 2 * calls.count("rotate")
    assert find_elementwise(SMALL, Operators(torch.bfloat16, torch.device("cpu"), 1e-6)) is None


def elementwise_probe() -> ElementwiseProbe:
    operators = Operators(torch.bfloat16, torch.device("cpu"), 1e-6)
    return ElementwiseProbe(ElementwiseChoice(), operators, LARGE)


def never_called(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("nothing is drawn here")


def test_products_are_measured_once_and_set_at_every_start(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_products", lambda probes, threads, dtype, product: False)
    for _ in range(2):
        product = ProductChoice(uses_kernel=True)
        assert choose_measured(LARGE, TWO_CORES, PROBES, product) == Measured(FEW_THEN_ALL, False)
        assert not product.uses_kernel
    choose_measured(LARGE, TWO_CORES, PROBES)  # without the kernel it is another case
    assert len(measured) == 2 * LOOKS


def test_where_onednn_is_no_choice_the_kernel_multiplies_unmeasured(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("there is nothing to choose")

    monkeypatch.setattr(measuring, "measure_products", refuse)
    product = ProductChoice(uses_kernel=True, is_open=False)
    assert choose_measured(LARGE, TWO_CORES, PROBES, product) == Measured(FEW_THEN_ALL, True)
    assert next(iter(measured_here(TWO_CORES, LARGE))).endswith("numba alone")
    assert product.uses_kernel


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
    assert len(measured) == LOOKS
    choose_measured(dataclasses.replace(LARGE, intermediate_size=4096), TWO_CORES, PROBES)
    choose_measured(LARGE, dataclasses.replace(TWO_CORES, threads=4), PROBES)
    assert measured == [2] * 2 * LOOKS + [4] * LOOKS
    assert len(measured_here(TWO_CORES, None)) == 2
    assert list(measured_here(TWO_CORES, LARGE).values()) == [Measured(FEW_THEN_ALL)]
    assert not measured_here(TWO_CORES, dataclasses.replace(LARGE, hidden_size=LARGE.hidden_size * 10))
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
        b'{"machine": {"shape": {"threads": [[8, 2]], "uses_kernel": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 0]], "uses_kernel": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 2], [1]], "uses_kernel": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 2]], "uses_kernel": "few"}}}',
        b'{"machine": {"shape": {"threads": [[1, 2]], "uses_kernel": true, "draws_by_kernel": []}}}',
        b'{"machine": {"shape": {"threads": [[1, 2]], "uses_kernel": true, "norms_by_kernel": 3}}}',
    ],
)
def test_a_broken_file_is_as_none_and_is_replaced(content: bytes, measured: list[int], cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert read_measured(cache) == {}
    assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(FEW_THEN_ALL)
    assert list(measured_here(TWO_CORES, None).values()) == [Measured(FEW_THEN_ALL)]


def test_a_cache_that_cannot_be_written_is_done_without(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(FEW_THEN_ALL)
    assert measured == [2] * LOOKS


def test_what_was_measured_beside_others_is_not_kept(
    measured: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "load_average", lambda: 2.1)
    assert [choose_measured(LARGE, TWO_CORES, PROBES) for _ in range(2)] == [Measured(FEW_THEN_ALL)] * 2
    assert len(measured) == 2 * LOOKS
    assert not cache.exists()


def test_what_two_looks_do_not_agree_on_is_not_kept_but_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one_thread = StepThreads(((1, 1), (PREFILL_TOKENS, 2)))
    looks = [FEW_THEN_ALL, one_thread, one_thread, one_thread]
    monkeypatch.setattr(measuring, "measure_threads", lambda *_: looks.pop(0))
    assert choose_measured(LARGE, TWO_CORES, PROBES).threads == FEW_THEN_ALL
    assert measured_here(TWO_CORES, LARGE) == {}
    for _ in range(2):
        assert choose_measured(LARGE, TWO_CORES, PROBES).threads == one_thread
    assert looks == []


def test_what_is_forgotten_of_a_model_is_measured_anew(measured: list[int]) -> None:
    other = dataclasses.replace(LARGE, hidden_size=1024, intermediate_size=8192)
    for config in (LARGE, other):
        choose_measured(config, TWO_CORES, PROBES)
    forget_measured(TWO_CORES, LARGE)
    assert measured_here(TWO_CORES, LARGE) == {}
    assert len(measured_here(TWO_CORES, other)) == 1
    choose_measured(LARGE, TWO_CORES, PROBES)
    assert len(measured) == 3 * LOOKS
