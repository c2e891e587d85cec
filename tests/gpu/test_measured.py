"""What is chosen by measuring, kept per machine and shape: threads by a step's tokens, who multiplies."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig, RopeConfig
from gpu import measured as measuring
from gpu import threads
from gpu.device import DeviceChoice
from gpu.elementwise_speed import ElementwiseProbe, find_elementwise
from gpu.linear import ProductChoice, make_linear
from gpu.measured import (
    IDLE_LOOKS,
    LOOKS,
    Measured,
    Measuring,
    cache_file,
    forget_measured,
    measure_drawing,
    measure_elementwise,
    measure_products,
    measured_here,
    read_measured,
)
from gpu.operators import ElementwiseChoice, Operators
from gpu.sampler import SamplerChoice
from gpu.threads import PREFILL_TOKENS, Look, Measurement, StepThreads, at_once, fewest, measure_threads, seconds_of

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
ONE_THREAD = StepThreads(((1, 1), (PREFILL_TOKENS, 2)))


def choose_measured(*arguments: Any, **named: Any) -> Measured:
    """What serves after a start."""
    return Measuring(*arguments, **named).measured


def look(found: Any, is_clear: bool = True) -> Measurement[Look[Any]]:
    """A measurement of one slice."""
    yield
    return Look(found, is_clear)


def in_a_slice(seconds: float) -> Measurement[float]:
    yield
    return seconds


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "load_average", lambda: 1.5)
    return cache_file()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every measurement gives FEW_THEN_ALL; the list has an item for each."""
    calls: list[int] = []

    def measure(probes: object, max_threads: int, dtype: torch.dtype) -> Measurement[Look[StepThreads]]:
        calls.append(max_threads)
        return look(FEW_THEN_ALL)

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

    def timed(probes: object, num_tokens: int, threads: int, dtype: torch.dtype) -> Measurement[float]:
        is_disturbed = len(tried) < 4
        tried.append((num_tokens, product.uses_kernel))
        return in_a_slice(
            (1.0 if product.uses_kernel != is_faster else 0.8 if num_tokens <= 32 else 1.1) + is_disturbed
        )

    monkeypatch.setattr(measuring, "seconds_of", timed)
    assert at_once(measure_products(PROBES, 2, torch.float32, product)) == Look(is_faster, is_clear=True)
    assert product.uses_kernel  # as before
    one_look = [(rows, form) for rows in measuring.MEASURED_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)  # that it is slower has to be seen twice


def test_a_kernel_that_was_held_up_in_all_its_turns_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    product = ProductChoice(uses_kernel=True)
    tried: list[bool] = []

    def timed(probes: object, num_tokens: int, threads: int, dtype: torch.dtype) -> Measurement[float]:
        tried.append(product.uses_kernel)
        is_first_look = len(tried) <= 2 * 3 * len(measuring.MEASURED_ROWS)
        return in_a_slice((2.0 if is_first_look else 0.5) if product.uses_kernel else 1.0)

    monkeypatch.setattr(measuring, "seconds_of", timed)
    assert at_once(measure_products(PROBES, 2, torch.float32, product)).found
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
    assert at_once(measure_drawing(sampler, 32_000, 2)) == Look(is_faster, is_clear=True)
    assert sampler.uses_kernel  # as before
    assert torch.get_num_threads() == before
    one_look = [(rows, form) for rows in measuring.DRAWN_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)


@pytest.mark.usefixtures("measured")
def test_drawing_is_measured_once_and_set_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(sampler: SamplerChoice, vocab_size: int, threads: int) -> Measurement[Look[bool]]:
        calls.append(vocab_size)
        return look(False)

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
    assert at_once(measure_elementwise(probe, 2)) == Look(is_faster, is_clear=True)
    assert probe.choice.uses_kernel  # as before
    one_look = [(rows, form) for rows in measuring.ELEMENTWISE_ROWS for _ in range(3) for form in (True, False)]
    assert tried == one_look * (1 if is_faster else 2)


@pytest.mark.usefixtures("measured")
def test_norms_are_measured_once_and_set_at_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def measure(elementwise: ElementwiseProbe, threads: int) -> Measurement[Look[bool]]:
        calls.append(threads)
        return look(False)

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
    monkeypatch.setattr(measuring, "measure_products", lambda *_: look(False))
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
    found = at_once(measure_threads(PROBES, 2, torch.float32)).found
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
        b'{"machine": {"shape": {"threads": [[1, 2]], "uses_kernel": true, "unsettled": ["all"]}}}',
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


def test_what_was_measured_beside_others_is_not_settled(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "load_average", lambda: 2.1)
    unsettled = Measured(FEW_THEN_ALL, unsettled=("threads",))
    assert [choose_measured(LARGE, TWO_CORES, PROBES) for _ in range(2)] == [unsettled] * 2
    assert len(measured) == 2 * LOOKS
    assert list(measured_here(TWO_CORES, LARGE).values()) == [unsettled]
    assert str(unsettled).endswith("; not settled yet (threads)")


def test_what_two_looks_do_not_agree_on_is_measured_again_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [FEW_THEN_ALL, ONE_THREAD, ONE_THREAD, ONE_THREAD]
    monkeypatch.setattr(measuring, "measure_threads", lambda *_: look(looks.pop(0)))
    assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(FEW_THEN_ALL, unsettled=("threads",))
    for _ in range(2):
        assert choose_measured(LARGE, TWO_CORES, PROBES) == Measured(ONE_THREAD)
    assert looks == []


@pytest.mark.usefixtures("measured")
def test_only_what_is_not_settled_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [look(True, is_clear=False), look(True), look(False), look(False)]
    monkeypatch.setattr(measuring, "measure_drawing", lambda *_: drawn.pop(0))
    first = choose_measured(LARGE, TWO_CORES, PROBES, sampler=SamplerChoice(never_called))
    assert first == Measured(FEW_THEN_ALL, draws_by_kernel=True, unsettled=("draws_by_kernel",))
    monkeypatch.setattr(measuring, "measure_threads", never_called)
    second = choose_measured(LARGE, TWO_CORES, PROBES, sampler=SamplerChoice(never_called))
    assert second == Measured(FEW_THEN_ALL, draws_by_kernel=False)


def test_threads_that_two_looks_agree_on_while_idle_serve_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [FEW_THEN_ALL, ONE_THREAD, FEW_THEN_ALL, ONE_THREAD, ONE_THREAD]
    monkeypatch.setattr(measuring, "measure_threads", lambda *_: look(looks.pop(0)))
    measuring_again = Measuring(LARGE, TWO_CORES, PROBES)
    assert len(list(measuring_again.look_again())) == 3
    assert measuring_again.measured == Measured(ONE_THREAD)
    assert list(measured_here(TWO_CORES, LARGE).values()) == [Measured(ONE_THREAD)]
    assert list(measuring_again.look_again()) == []


@pytest.mark.usefixtures("measured")
def test_a_kernel_that_rounds_otherwise_serves_from_the_next_start_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [True, False, False]
    monkeypatch.setattr(measuring, "measure_products", lambda *_: look(looks.pop(0)))
    product = ProductChoice(uses_kernel=True)
    measuring_again = Measuring(LARGE, TWO_CORES, PROBES, product)
    list(measuring_again.look_again())
    assert product.uses_kernel
    assert measuring_again.measured == Measured(FEW_THEN_ALL, uses_kernel=True)
    with_the_other = Measured(FEW_THEN_ALL, uses_kernel=False, unsettled=("threads",))
    assert list(measured_here(TWO_CORES, LARGE).values()) == [with_the_other]
    assert choose_measured(LARGE, TWO_CORES, PROBES, product) == Measured(FEW_THEN_ALL, uses_kernel=False)
    assert not product.uses_kernel


def test_what_stays_within_noise_is_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def measure(*_: object) -> Measurement[Look[StepThreads]]:
        calls.append(None)
        return look(FEW_THEN_ALL, is_clear=False)

    monkeypatch.setattr(measuring, "measure_threads", measure)
    measuring_again = Measuring(LARGE, TWO_CORES, PROBES)
    for _ in range(IDLE_LOOKS):
        interrupted = measuring_again.look_again()
        next(interrupted)
        interrupted.close()
    assert list(measuring_again.look_again()) == []
    assert len(calls) == LOOKS + IDLE_LOOKS
    assert measuring_again.measured == Measured(FEW_THEN_ALL, unsettled=("threads",))


def test_no_look_is_spent_on_a_machine_where_others_compute(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = 2.1
    monkeypatch.setattr(measuring, "load_average", lambda: load)
    measuring_again = Measuring(LARGE, TWO_CORES, PROBES)
    for _ in range(IDLE_LOOKS + 1):
        assert list(measuring_again.look_again()) == []
    assert len(measured) == LOOKS
    load = 1.9
    assert len(list(measuring_again.look_again())) == 1
    assert measuring_again.measured == Measured(FEW_THEN_ALL)


def test_a_measurement_that_is_put_down_leaves_what_serves_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "seconds_of", lambda *_: in_a_slice(1.0))
    product, before = ProductChoice(uses_kernel=True), torch.get_num_threads()
    measurement = measure_products(PROBES, before + 1, torch.float32, product)
    next(measurement), next(measurement)
    assert not product.uses_kernel
    assert torch.get_num_threads() == before + 1
    measurement.close()
    assert product.uses_kernel
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("kernel_s", "is_clear"), [(0.96, True), (0.98, False), (1.02, False), (1.04, True)])
def test_a_kernel_about_as_fast_is_within_noise(
    monkeypatch: pytest.MonkeyPatch, kernel_s: float, is_clear: bool
) -> None:
    product = ProductChoice(uses_kernel=True)
    monkeypatch.setattr(measuring, "seconds_of", lambda *_: in_a_slice(kernel_s if product.uses_kernel else 1.0))
    assert at_once(measure_products(PROBES, 1, torch.float32, product)) == Look(kernel_s < 1, is_clear)


@pytest.mark.parametrize(("two_threads_s", "is_clear"), [(1.0, True), (0.99, True), (0.95, False), (0.9, True)])
def test_a_thread_that_hardly_repays_itself_is_within_noise(
    monkeypatch: pytest.MonkeyPatch, two_threads_s: float, is_clear: bool
) -> None:
    monkeypatch.setattr(
        threads, "seconds_of", lambda probes, tokens, count, dtype: in_a_slice(1.0 if count == 1 else two_threads_s)
    )
    assert at_once(measure_threads(PROBES, 2, torch.float32)).is_clear is is_clear


def test_products_that_take_long_are_timed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "SLICE_S", 0.0)
    slices = seconds_of(PROBES, 1, torch.get_num_threads(), torch.float32)
    assert sum(1 for _ in slices) == threads.ROUNDS * len(PROBES) + 1


def test_what_is_forgotten_of_a_model_is_measured_anew(measured: list[int]) -> None:
    other = dataclasses.replace(LARGE, hidden_size=1024, intermediate_size=8192)
    for config in (LARGE, other):
        choose_measured(config, TWO_CORES, PROBES)
    forget_measured(TWO_CORES, LARGE)
    assert measured_here(TWO_CORES, LARGE) == {}
    assert len(measured_here(TWO_CORES, other)) == 1
    choose_measured(LARGE, TWO_CORES, PROBES)
    assert len(measured) == 3 * LOOKS
