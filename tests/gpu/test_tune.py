"""What computes what: known for a machine and a model, or measured, kept and served; and its description."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ModelConfig, RopeConfig
from core.plan import TimedRow
from gpu import device, tune
from gpu.cache_files import measured_file
from gpu.cpu_kernels import support
from gpu.device import DeviceChoice
from gpu.linear import MOST_FEW_ROWS, Linear, MatmulChoices, Served, make_linear
from gpu.operators import Operators
from gpu.tune import (
    IDLE_LOOKS,
    LOOKS,
    MEASURED_FEW,
    MEASURED_MANY,
    PREFILL_TOKENS,
    Look,
    Measured,
    Measurement,
    StepThreads,
    Tuning,
    at_once,
    choose_matmuls,
    describe_attention,
    describe_matmuls,
    fewest,
    find_operators,
    find_sampler,
    forget_measured,
    measure_threads,
    measured_here,
    read_measured,
    seconds_of,
    timed_steps,
    why_no_kernels,
    why_no_sampling_kernel,
)

TWO_CORES = DeviceChoice(torch.device("cpu"), "", torch.float32, "", 2, "")
CPU = dataclasses.replace(TWO_CORES, dtype=torch.bfloat16)
CUDA = dataclasses.replace(CPU, device=torch.device("cuda", 0), threads=3)
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
VAST = dataclasses.replace(LARGE, vocab_size=2_000_000)
PROBES = [(make_linear(torch.ones(8, 4), None), 4), (make_linear(torch.ones(4, 8), None), 8)]
FEW_THEN_ALL = StepThreads(((1, 1), (8, 2)))
ONE_THREAD = StepThreads(((1, 1), (PREFILL_TOKENS, 2)))


TORCHS = Operators(torch.float32, torch.device("cpu"), 1e-6)
SIZE = (6, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return measured_file()


def tuning(config: ModelConfig = LARGE, choice: DeviceChoice = TWO_CORES) -> Tuning:
    return Tuning(config, choice, TORCHS, PROBES)


def in_a_slice(*seconds: float) -> Measurement[tuple[list[float], float]]:
    yield
    return list(seconds), 0.0


Measure = Callable[..., list[int]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Have looks find these, the last one again and again; the list returned has an item for each look."""

    def found(*threads: StepThreads, is_clear: bool = True, are_quiet: Sequence[bool] = (True,)) -> list[int]:
        calls: list[int] = []

        def measure_threads(probes: object, max_threads: int, dtype: torch.dtype) -> Measurement[Look[StepThreads]]:
            calls.append(max_threads)
            yield
            of_threads, of_quiet = (min(len(calls), len(each)) - 1 for each in (threads, are_quiet))
            return Look(threads[of_threads], is_clear, are_quiet[of_quiet])

        monkeypatch.setattr(tune, "measure_threads", measure_threads)
        return calls

    return found


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (7, 1), (8, 2), (2048, 2)])
def test_a_step_has_the_threads_of_the_largest_bound_below_it(tokens: int, count: int) -> None:
    assert FEW_THEN_ALL.of(tokens) == count


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


def test_what_was_asked_for_holds_for_every_step_and_a_small_model_is_not_measured(
    measure: Measure, cache: Path
) -> None:
    calls = measure(FEW_THEN_ALL)
    asked = dataclasses.replace(TWO_CORES, threads=5, are_threads_asked=True)
    assert tuning(choice=asked).measured == Measured(StepThreads(((1, 5),)))
    assert tuning(SMALL).measured == Measured(StepThreads(((1, 1), (tune.SMALL_MODEL_TOKENS, 2))))
    assert (calls, cache.exists()) == ([], False)


def test_a_large_model_is_measured_once_per_machine_and_shape_until_it_is_forgotten(
    measure: Measure, cache: Path
) -> None:
    calls = measure(FEW_THEN_ALL)
    assert [tuning(LARGE).measured for _ in range(2)] == [Measured(FEW_THEN_ALL)] * 2
    assert len(calls) == LOOKS
    other = dataclasses.replace(LARGE, intermediate_size=4096)
    tuning(other)
    tuning(choice=dataclasses.replace(TWO_CORES, threads=4))
    assert calls == [2] * 2 * LOOKS + [4] * LOOKS
    assert len(measured_here(TWO_CORES, None)) == 2
    assert list(measured_here(TWO_CORES, LARGE).values()) == [Measured(FEW_THEN_ALL)]
    assert not measured_here(TWO_CORES, dataclasses.replace(LARGE, hidden_size=LARGE.hidden_size * 10))
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]
    forget_measured(TWO_CORES, LARGE)
    assert measured_here(TWO_CORES, LARGE) == {}
    assert len(measured_here(TWO_CORES, other)) == 1
    tuning(LARGE)
    assert len(calls) == 4 * LOOKS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"machine": 3}',
        b'{"machine": {"shape": [[1, 2]]}}',
        b'{"machine": {"shape": {"threads": [[1, 2]]}}}',
        b'{"machine": {"shape": {"threads": [[8, 2]], "is_settled": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 0]], "is_settled": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 2], [1]], "is_settled": true}}}',
        b'{"machine": {"shape": {"threads": [[1, 2]], "is_settled": "yes"}}}',
        b'{"machine": {"shape": {"few": 1, "many": false}}}',
        b'{"machine": {"shape": {"few": true}}}',
        b'{"machine": {"shape": {"rows": [[0, 8, 8, 0.0]]}}}',
        b'{"machine": {"shape": {"rows": [[0, 8, 0.1]]}}}',
    ],
)
def test_a_broken_file_is_ignored_and_replaced(content: bytes, measure: Measure, cache: Path) -> None:
    measure(FEW_THEN_ALL)
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert read_measured() == {}
    assert tuning(LARGE).measured == Measured(FEW_THEN_ALL)
    assert list(measured_here(TWO_CORES, None).values()) == [Measured(FEW_THEN_ALL)]


def test_steps_of_a_model_are_timed_once_per_settings(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def start(config: ModelConfig = LARGE, **settings: Any) -> int:
        rows.append(TimedRow(0, 8, 8, 0.5 + len(rows)))
        engine = EngineConfig(**settings)
        (row,) = timed_steps(config, engine, TWO_CORES, TORCHS, "BF16", lambda: (rows[-1],))
        return rows.index(row)

    rows = list[TimedRow]()
    monkeypatch.setattr(tune, "MOST_TIMED_MODELS", 2)
    assert [start(), start(), start(quantize="int8"), start()] == [0, 0, 2, 0]
    assert [start(max_model_len=9), start()] == [4, 5]  # the oldest is forgotten
    assert [start(SMALL), start(SMALL)] == [6, 7]
    forget_measured(TWO_CORES, LARGE)
    assert start() == 8


def test_a_cache_that_cannot_be_written_is_done_without(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measure(FEW_THEN_ALL)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tuning(LARGE).measured == Measured(FEW_THEN_ALL)
    assert calls == [2] * LOOKS


def test_what_two_looks_do_not_agree_on_delays_no_later_start(measure: Measure) -> None:
    calls = measure(FEW_THEN_ALL, ONE_THREAD)
    assert [tuning(LARGE).measured for _ in range(2)] == [Measured(FEW_THEN_ALL, is_settled=False)] * 2
    assert len(calls) == LOOKS
    later = tuning(LARGE)
    assert len(list(later.look_again())) == 2
    assert later.measured == tuning(LARGE).measured == Measured(ONE_THREAD)


def test_threads_that_two_looks_agree_on_while_idle_serve_at_once(measure: Measure) -> None:
    measure(FEW_THEN_ALL, ONE_THREAD, FEW_THEN_ALL, ONE_THREAD)
    measuring_again = tuning()
    assert len(list(measuring_again.look_again())) == 3
    assert measuring_again.measured == Measured(ONE_THREAD)
    assert list(measured_here(TWO_CORES, LARGE).values()) == [Measured(ONE_THREAD)]
    assert list(measuring_again.look_again()) == []


def test_what_stays_within_noise_is_not_measured_for_ever(measure: Measure) -> None:
    calls = measure(FEW_THEN_ALL, is_clear=False)
    measuring_again = tuning()
    assert len(list(measuring_again.look_again())) == IDLE_LOOKS
    assert list(measuring_again.look_again()) == []
    assert len(calls) == LOOKS + IDLE_LOOKS
    assert measuring_again.measured == Measured(FEW_THEN_ALL, is_settled=False)


def test_a_look_that_a_request_interrupts_goes_on_in_the_next_idle_phase(measure: Measure) -> None:
    calls, threads = measure(FEW_THEN_ALL, ONE_THREAD, FEW_THEN_ALL), torch.get_num_threads()
    measuring_again = tuning()
    for _ in range(3 * IDLE_LOOKS):
        interrupted = measuring_again.look_again()
        if next(interrupted, True) is True:
            break
        torch.set_num_threads(threads + 1)  # as a measurement does
        interrupted.close()
        assert torch.get_num_threads() == threads
    assert measuring_again.measured == Measured(FEW_THEN_ALL)
    assert len(calls) == LOOKS + 2


def test_beside_others_nothing_settles_and_looks_become_rare(measure: Measure) -> None:
    calls = measure(ONE_THREAD, ONE_THREAD, FEW_THEN_ALL, are_quiet=[False] * 6 + [True])
    measuring_again = tuning()
    num_phases = [sum(len(list(measuring_again.look_again())) for _ in range(phases)) for phases in (1, 2, 4, 8)]
    assert num_phases == [1, 1, 1, 1]
    assert measuring_again.measured == Measured(ONE_THREAD, is_settled=False)
    for _ in range(16):
        assert list(measuring_again.look_again()) == [] or len(calls) >= LOOKS + 5
    assert measuring_again.measured == Measured(FEW_THEN_ALL)  # the first quiet look's serves, the next settles it


def test_the_first_quiet_look_replaces_what_was_found_beside_others(measure: Measure) -> None:
    measure(ONE_THREAD, ONE_THREAD, FEW_THEN_ALL, are_quiet=[False, False, True])
    measuring_again = tuning()
    looks = measuring_again.look_again()
    next(looks), next(looks)
    assert measuring_again.measured == Measured(FEW_THEN_ALL, is_settled=False)


@pytest.mark.parametrize(("two_threads_s", "is_clear"), [(1.0, True), (0.99, True), (0.95, False), (0.9, True)])
def test_a_thread_that_hardly_repays_itself_is_within_noise(
    monkeypatch: pytest.MonkeyPatch, two_threads_s: float, is_clear: bool
) -> None:
    monkeypatch.setattr(tune, "seconds_of", lambda probes, tokens, counts, dtype: in_a_slice(1.0, two_threads_s))
    assert at_once(measure_threads(PROBES, 2, torch.float32)).is_clear is is_clear


def test_matmuls_that_take_long_are_timed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "SLICE_S", 0.0)
    slices = seconds_of(PROBES, 1, [1, 2], torch.float32)
    assert sum(1 for _ in slices) == tune.ROUNDS * 2 * len(PROBES) + 1


def test_counts_of_threads_take_turns_and_waiting_for_a_core_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s, counts = 0.0, list[int]()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        nonlocal waited_s
        counts.append(torch.get_num_threads())
        waited_s += 1000.0
        return x

    monkeypatch.setattr(tune, "waited_s", lambda: waited_s)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    )
    look = at_once(measure_threads([(multiply, 4)], 2, torch.float32))
    assert counts == [1, 2] * tune.ROUNDS * len(tune.MEASURED_TOKENS)
    assert not look.is_quiet
    monkeypatch.setattr(tune, "waited_s", lambda: 0.0)
    assert at_once(measure_threads([(multiply, 4)], 2, torch.float32)).is_quiet


class Bench:
    """Matmuls that note who multiplied how many rows, and a clock for which a row costs each of them its price."""

    def __init__(self, kernel_price: Callable[[int], float]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.num_measured = 0
        self._kernel_price = kernel_price

    def matmul(self, name: str) -> Linear:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            self.calls.append((name, x.shape[0]))
            return x.new_zeros(x.shape[0], SIZE[0])

        return multiply

    def clock(self, work: Callable[[], object]) -> float:
        before = len(self.calls)
        work()
        self.num_measured += 1
        return sum(self._kernel_price(rows) if name.startswith("kernel") else 1.0 for name, rows in self.calls[before:])

    def who(self, matmul: Linear, num_rows: int) -> str:
        matmul(torch.zeros(num_rows, SIZE[1]))
        return self.calls[-1][0]


def make(bench: Bench, choices: MatmulChoices, name: str, size_bytes: int = 24) -> Linear:
    return choices.make(name, bench.matmul(f"kernel {name}"), bench.matmul("torch"), SIZE, size_bytes)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("many", [True, False])
def test_the_faster_serves_its_rows(few: bool, many: bool) -> None:
    bench = Bench(lambda rows: 0.5 if (few if rows <= MOST_FEW_ROWS else many) else 1.5)
    choices = MatmulChoices()
    plain, packed = make(bench, choices, "bfloat16"), make(bench, choices, "int4 by 64")
    assert choose_matmuls(choices, TWO_CORES, bench.clock) == {
        "bfloat16 6 x 4": Served(few, False),
        "int4 by 64 6 x 4": Served(few, many),
    }
    names = {True: "kernel int4 by 64", False: "torch"}
    for num_rows in (1, MOST_FEW_ROWS):
        assert bench.who(plain, num_rows) == ("kernel bfloat16" if few else "torch")
        assert bench.who(packed, num_rows) == names[few]
    assert bench.who(plain, MOST_FEW_ROWS + 1) == "torch"
    assert bench.who(packed, MOST_FEW_ROWS + 1) == names[many]


@pytest.mark.parametrize("failing", ["kernel int8", "torch"])
def test_one_that_fails_is_struck_and_the_start_goes_on(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(lambda rows: 1.5 if failing == "torch" else 0.5)
    choices = MatmulChoices()

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    ways = {name: fail if name == failing else bench.matmul(name) for name in ("kernel int8", "torch")}
    choices.make("int8", ways["kernel int8"], ways["torch"], SIZE, 24)
    is_kernel = failing == "torch"
    assert choose_matmuls(choices, TWO_CORES, bench.clock) == {"int8 6 x 4": Served(is_kernel, is_kernel)}
    assert [" does not serve here: " in record.getMessage() for record in caplog.records] == [True, True]


def test_all_of_a_shapes_rows_decide_together() -> None:
    """Twice as fast for one row, and a little slower for others: the geometric mean counts. Before, torch serves."""
    bench = Bench(lambda rows: 0.5 if rows == 1 else 1.3)
    choices = MatmulChoices()
    plain, packed = make(bench, choices, "bfloat16"), make(bench, choices, "int8")
    assert {bench.who(plain, rows) for rows in (1, 100)} == {"torch"}
    assert {bench.who(packed, rows) for rows in (1, 100)} == {"kernel int8"}  # which torch knows only dequantised
    bench.calls.clear()
    assert choose_matmuls(choices, TWO_CORES, bench.clock)["bfloat16 6 x 4"].few
    assert [rows for name, rows in bench.calls if rows in MEASURED_FEW] == [
        rows for _ in range(2) for rows in MEASURED_FEW for _ in range(2)
    ]


def test_matrices_of_a_shape_are_measured_in_turn_up_to_what_a_cache_keeps() -> None:
    bench = Bench(lambda rows: 0.5)
    choices = MatmulChoices()
    for _ in range(5):
        make(bench, choices, "int8", 100 * 1024**2)
    choose_matmuls(choices, TWO_CORES, bench.clock)
    assert bench.calls.count(("kernel int8", MEASURED_MANY[0])) == 3


def test_a_shape_is_measured_once_per_device(cache: Path) -> None:
    first, second = Bench(lambda rows: 0.5), Bench(lambda rows: 2.0)
    for bench in (first, second):
        choices = MatmulChoices()
        matmul = make(bench, choices, "bfloat16")
        assert choose_matmuls(choices, TWO_CORES, bench.clock) == {"bfloat16 6 x 4": Served(True, False)}
        assert bench.who(matmul, 1) == "kernel bfloat16"
    assert first.num_measured == 2 * len(MEASURED_FEW)
    assert second.num_measured == 0
    assert measured_here(TWO_CORES, None) == {"bfloat16 6 x 4": Served(True, False)}
    other = MatmulChoices()
    make(second, other, "float16")
    choose_matmuls(other, TWO_CORES, second.clock)
    assert set(measured_here(TWO_CORES, None)) == {"bfloat16 6 x 4", "float16 6 x 4"}


def test_what_was_measured_reads_as_a_phrase() -> None:
    assert str(Measured(FEW_THEN_ALL)) == "threads 1; 2 from 8 tokens a step"
    assert str(Measured(ONE_THREAD, is_settled=False)).endswith("; not settled yet: measured again while idle")
    assert str(Served(True, False)) == "kernel up to 16 rows, torch beyond"


@pytest.mark.parametrize(("config", "is_measured"), [(LARGE, True), (SMALL, False)], ids=["large", "small"])
def test_a_large_models_start_chooses(config: ModelConfig, is_measured: bool) -> None:
    bench, operators = Bench(lambda rows: 0.5), Operators(torch.float32, torch.device("cpu"), 1e-6)
    operators.matmuls = MatmulChoices()
    make(bench, operators.matmuls, "bfloat16")
    Tuning(config, TWO_CORES, operators, PROBES, bench.clock)
    assert (bench.num_measured > 0) == is_measured


@pytest.mark.parametrize(
    ("config", "device", "flags", "why"),
    [
        (LARGE, TWO_CORES, support.NEEDED_FLAGS, "float32 on cpu"),
        (SMALL, CPU, support.NEEDED_FLAGS, "too small"),
        (LARGE, CPU, {"avx2"}, "the CPU has not all of avx2, f16c, fma"),
    ],
    ids=["dtype", "size", "flags"],
)
def test_torch_serves_where_the_kernels_cannot(
    config: ModelConfig, device: DeviceChoice, flags: set[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "cpu_flags", lambda: frozenset(flags))
    assert why in (why_no_kernels(config, device) or "")
    assert type(find_operators(config, device)) is Operators


@pytest.mark.parametrize(
    ("config", "asked", "flags", "dtype"),
    [
        (LARGE, "auto", "avx2 fma f16c", torch.bfloat16),
        (LARGE, "float32", "avx2 fma f16c", torch.float32),
        (LARGE, "auto", "avx", torch.float32),
        (SMALL, "auto", "avx2 fma f16c", torch.float32),
        (dataclasses.replace(LARGE, has_sinks=True), "auto", "avx2 fma f16c", torch.float32),
        (SMALL, "auto", "avx512bw avx512_bf16", torch.bfloat16),
    ],
    ids=["kernels", "asked", "older", "small", "sinks", "native"],
)
def test_a_cpu_without_bf16_serves_in_it_what_kernels_compute_whole(
    config: ModelConfig, asked: str, flags: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device, support):
        monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags.split()))
    assert support.choose_for(config, EngineConfig(device="cpu", dtype=asked)).dtype == dtype


@pytest.mark.parametrize(
    ("changed", "why"),
    [({}, ""), ({"head_dim": 80}, "heads of 80"), ({"attention_cap": 50.0}, "caps"), ({"has_sinks": True}, "sinks")],
)
def test_why_the_cpus_attention_kernel_cannot_serve(changed: dict[str, Any], why: str) -> None:
    found = support.why_no_attention(dataclasses.replace(LARGE, **changed))
    assert why in found if found is not None else not changed


@pytest.mark.parametrize(
    ("others", "multiplies"),
    [((), "numba's kernel"), (("amx_bf16",), "oneDNN, by AMX; int8 and int4 by numba's kernel")],
)
def test_what_multiplies_and_attends_is_described(
    others: tuple[str, ...], multiplies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tune, support):
        monkeypatch.setattr(module, "cpu_flags", lambda: frozenset([*support.NEEDED_FLAGS, *others]))
    assert describe_matmuls(LARGE, CPU, EngineConfig()) == multiplies
    assert describe_attention(LARGE, CPU) == "numba's kernel over block tables"
    assert "too small" in describe_matmuls(SMALL, CPU, EngineConfig())


@pytest.mark.parametrize(
    ("config", "device", "missing", "capability", "why"),
    [
        (LARGE, CPU, "triton", (9, 0), None),
        (SMALL, CPU, "triton", (9, 0), "the model is too small to repay loading the kernel"),
        (LARGE, CPU, "numba", (9, 0), "numba is not installed"),
        (LARGE, CUDA, "numba", (9, 0), None),
        (LARGE, CUDA, "triton", (9, 0), "triton is not installed"),
        (VAST, CUDA, "numba", (9, 0), "a vocabulary of 2,000,000: the kernel supports up to 1,048,576"),
        (LARGE, CUDA, "numba", (7, 5), "the device is older than compute capability 8.0"),
    ],
)
def test_why_the_sampling_kernel_cannot_serve(
    config: ModelConfig,
    device: DeviceChoice,
    missing: str,
    capability: tuple[int, int],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (tune, support):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert why_no_sampling_kernel(config, device) == why
    if device is CPU:
        found = find_sampler(config, device)
        assert getattr(found, "__name__", None) == (None if why else "RowSampler")
