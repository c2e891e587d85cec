"""Steps launched by Python, by graphs and overlapped sample the same tokens, whatever rows share them."""

import dataclasses
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from core.config import BLOCK_SIZE, EngineConfig
from core.config_json import parse_model_config
from core.kv_cache import least_window_blocks
from core.plan import PENDING, StepOutput, StepPlan, make_plan
from core.scheduler import Scheduler
from core.types import Request, SamplingParams
from gpu.kernels.rows import DeviceRows
from gpu.loading import load_runner
from gpu.memory_plan import MemoryPlan
from gpu.rows import StepInputs, StepTokens
from gpu.runner import ModelRunner
from gpu.step_graphs import CaptureError, CountedGraphs, Graph, count_graphs
from gpu.step_shapes import StepShape, step_shapes
from gpu.steps import Steps
from tests.fakes import FakeClock
from tests.gpu.conftest import ENGINE, no_progress
from tests.gpu.driver import GREEDY, DrivenSequence, Driver
from tests.gpu.fake_cuda_graphs import FakeRecorder
from tests.gpu.kernels.interpreted import find_interpreted
from tests.gpu.test_overlap import draw_sampling, run
from tests.oracle import Oracle, read_config, save_random_model
from tests.workload import Names, Workload, WorkloadRun

PROMPTS = ([5, 17, 101, 9], [250], [(37 * place) % 290 + 3 for place in range(20)])
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("wide_tiles"),
]
# Graphs are captured on rows that nobody has written: the interpreter warns of what has no integer.
OF_NAN = pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")
Directory = Callable[[str], Path]


@pytest.fixture(autouse=True)
def on_a_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("needs a CPU: on a device, bench.gpu_check --part model does it")


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs take is found out elsewhere (tests/gpu/test_graph_memory.py): it would take most of the time here."""

    def count(_: Any, memory: MemoryPlan, recorder: Any) -> CountedGraphs:
        shapes = step_shapes(memory.model, memory.engine)
        planned = dataclasses.replace(memory, measured_graph_bytes=1 << 30)
        return CountedGraphs(planned, shapes, len(shapes.in_order) + 9)

    monkeypatch.setattr("gpu.runner.count_graphs", count)
    monkeypatch.setattr("gpu.loading.warm_up", lambda runner: None)  # tests/gpu/test_warm_up.py has these two
    monkeypatch.setattr("gpu.loading.time_rows", lambda runner: ())


def open_runner(directory: Path, graphs: str, max_sequences: int = 4, max_model_len: int = 64) -> ModelRunner:
    """Steps of 16 tokens, and of 32 of prompts, have graphs, beside two that decode or none."""
    sizes = {"max_sequences": max_sequences, "max_model_len": max_model_len, "max_batch_tokens": 32}
    return open_with(directory, dataclasses.replace(ENGINE, graphs=graphs, **sizes))


def open_with(directory: Path, engine: EngineConfig) -> ModelRunner:
    return load_runner(
        directory, parse_model_config(read_config(directory)), engine, no_progress, find=find_interpreted
    )


def steps_of(runner: ModelRunner) -> Steps:
    return runner._steps


def replays(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> list[StepShape]:
    """The graphs that are replayed from now on."""
    graphs, found = steps_of(runner).graphs, []
    inner = graphs.replay

    def noted(shape: StepShape) -> bool:
        is_replayed = inner(shape)
        found.extend([shape] * is_replayed)
        return is_replayed

    monkeypatch.setattr(graphs, "replay", noted)
    return found


def tokens_with_joins_and_leaves(runner: ModelRunner) -> list[list[int]]:
    """Three sequences, of which the second comes later, the first leaves early, and the third is preempted once."""
    driver = Driver(runner)
    first, third = (driver.add(list(PROMPTS[place])) for place in (0, 2))
    driver.generate(3, first, third)
    second = driver.add(list(PROMPTS[1]))
    driver.step(None, first, third, second)
    driver.remove(first)
    driver.step(None, second, third)
    driver.preempt(third)
    driver.generate(6, second, third)
    return [sequence.output_ids for sequence in (first, second, third)]


def assert_tokens_are_the_oracles(runner: ModelRunner, directory: Path) -> None:
    oracle = Oracle(directory)
    for found, prompt in zip(tokens_with_joins_and_leaves(runner), PROMPTS, strict=True):
        assert found == oracle.greedy(list(prompt), len(found), found)


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("llama3", "off"),
        ("llama3", "on"),
        ("llama3", "lazy"),
        pytest.param("gemma2", "on", marks=pytest.mark.slow),  # windows, caps
        pytest.param("gpt_oss", "on", marks=pytest.mark.slow),  # experts, sinks
    ],
)
def test_greedy_tokens_are_the_oracles(family: str, graphs: str, model_directory: Directory) -> None:
    runner = open_runner(model_directory(family), graphs)
    assert steps_of(runner).graphs.num_captured == {"off": 0, "lazy": 0, "on": 7}[graphs]
    assert_tokens_are_the_oracles(runner, model_directory(family))
    assert steps_of(runner).graphs.num_captured == {"off": 0, "lazy": 5, "on": 7}[graphs]


@OF_NAN
@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("gpt_oss", "off"),
        pytest.param("llama3", "on", marks=pytest.mark.slow),
        pytest.param("qwen3", "on", marks=pytest.mark.slow),  # norms of heads
        pytest.param("gemma2", "on", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_over_keys_and_values_in_8_bits_are_torchs(
    family: str, graphs: str, model_directory: Directory
) -> None:
    """Which stores the same integers and scales, and reads them as floats."""
    directory, sizes = model_directory(family), {"max_sequences": 4, "max_model_len": 64, "max_batch_tokens": 32}
    engine = dataclasses.replace(ENGINE, kv_dtype="int8", **sizes)  # type: ignore[arg-type]
    by_torch = load_runner(directory, parse_model_config(read_config(directory)), engine, no_progress)
    by_kernels = open_with(directory, dataclasses.replace(engine, graphs=graphs))
    assert steps_of(by_kernels)._cache.dtype == torch.int8
    assert tokens_with_joins_and_leaves(by_kernels) == tokens_with_joins_and_leaves(by_torch)


def draw_workload(rng: random.Random, num_requests: int, most_tokens: int) -> Workload:
    """Requests with all that can be asked of sampling, clients that leave, pauses; too few blocks for all."""
    requests, pauses, stops, leaves = [], {}, Names(), Names()
    for number in range(num_requests):
        name, max_tokens = f"r{number}", rng.randint(most_tokens // 2, most_tokens)
        prompt = tuple(rng.choices(range(3, 300), k=rng.randint(1, 20)))
        sampling = draw_sampling(rng, max_tokens)
        request = Request(
            request_id=name,
            prompt_ids=prompt,
            sampling=sampling,
            arrival_s=number * 1e-3,
            num_sequences=1 + number % 2,
        )
        requests.append((2 * number, request))
        if rng.random() < 0.4:
            rng.choice((stops, leaves))[name, 0] = rng.randint(1, max_tokens)
        if rng.random() < 0.3:
            pauses[name] = (rng.randrange(8), rng.randrange(9, 12))
    return Workload(requests, stops, leaves, pauses)


def compare(directory: Path, seed: int, num_requests: int, most_tokens: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Eager, graph, and graphs overlapped. Returns how many sequences were preempted."""
    workload = draw_workload(random.Random(seed), num_requests, most_tokens)
    expected, _, _ = run(open_runner(directory, "off"), workload, 1)
    runner = open_runner(directory, "on")
    replayed = replays(monkeypatch, runner)
    outcomes, _, num_preempted = run(runner, workload, 1)
    assert outcomes == expected
    overlapped, num_pending, _ = run(open_runner(directory, "lazy"), workload, 2)
    assert overlapped == expected
    assert num_pending > most_tokens
    assert len(replayed) > most_tokens
    assert {shape.num_decodes > 0 for shape in replayed if shape.num_prompts} == {False, True}
    return num_preempted


@pytest.mark.slow
def test_eager_graph_and_overlapped_steps_draw_the_same(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sequences are preempted."""
    assert compare(one_layer, 3, num_requests=6, most_tokens=12, monkeypatch=monkeypatch) > 0


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("int8", marks=[pytest.mark.slow, OF_NAN])])
def test_window_blocks_change_no_token(kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By graphs, two steps in flight, in too few blocks: as one table gives them by Python."""
    directory, rng = save_random_model("gemma2", tmp_path, num_hidden_layers=2), random.Random(8)
    sizes: dict[str, Any] = {"max_sequences": 4, "max_model_len": 160, "max_batch_tokens": 32, "kv_dtype": kv_dtype}
    engine, stem = dataclasses.replace(ENGINE, graphs="off", **sizes), rng.choices(range(3, 300), k=50)
    drawn = draw_workload(rng, num_requests=3, most_tokens=16)
    requests = [(at, structs.replace(one, prompt_ids=(*stem, *one.prompt_ids))) for at, one in drawn.requests]
    workload = dataclasses.replace(drawn, requests=requests)
    found = []
    for settings in ({"has_window_blocks": False}, {"graphs": "lazy"}):
        runner = open_with(directory, dataclasses.replace(engine, **settings))
        limits, replayed = runner.limits, replays(monkeypatch, runner)
        window_blocks = limits.num_window_blocks
        if window_blocks is not None:
            assert limits.window == 25
            limits = dataclasses.replace(limits, num_window_blocks=least_window_blocks(25, 32, BLOCK_SIZE) + 1)
        limits = dataclasses.replace(limits, num_blocks=11, max_in_flight=1 if window_blocks is None else 2)
        scheduler = Scheduler(limits, (2,), seeds=lambda: 0)
        found.append(WorkloadRun(workload, scheduler, runner, FakeClock()).run())
        assert (len(replayed) > 12) == (window_blocks is not None)
    assert found[0] == found[1]
    assert scheduler.stats().num_preemptions > 0
    assert scheduler.stats().num_cache_hits > 0


def test_chunks_of_any_length_are_computed_by_graphs_of_a_few(one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, beside decodes, two prompts at once, and what a preempted one has drawn itself: the oracle's tokens."""
    runner, rng = open_runner(one_layer, "lazy"), random.Random(5)
    driver, replayed = Driver(runner), replays(monkeypatch, runner)
    first, second, third = (driver.add(rng.choices(range(3, 300), k=count)) for count in (41, 23, 9))
    for chunk in (7, 16, 3, 15):
        driver.step({first.slot: chunk}, first)
    driver.step({second.slot: 13}, first, second)
    driver.step({second.slot: 9, third.slot: 8}, second, first, third)
    driver.step(None, first, third, second)
    driver.preempt(second)
    driver.step({second.slot: 5}, second, first, third)
    driver.step(None, third, second)
    shapes = [(shape.num_decodes, shape.num_prompt_tokens) for shape in replayed]
    assert shapes == [(0, 16)] * 4 + [(2, 14), (2, 32), (2, 14), (2, 14), (2, 32)]
    oracle = Oracle(one_layer)
    for sequence in (first, second, third):
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert len(sequence.output_ids) > 1
        assert sequence.output_ids == oracle.greedy(prompt, len(sequence.output_ids), sequence.output_ids)


def test_own_tokens_that_are_computed_again_in_rows_of_their_own_sample_once(one_layer: Path) -> None:
    """As with --deterministic: a step of decodes of which the last of each sequence alone samples."""
    sizes: dict[str, Any] = {"max_sequences": 8, "max_model_len": 64, "max_batch_tokens": 32}
    driver = Driver(open_with(one_layer, dataclasses.replace(ENGINE, graphs="lazy", deterministic=True, **sizes)))
    sequences = first, second = [driver.add(list(prompt)) for prompt in PROMPTS[:2]]
    driver.generate(4, *sequences)
    driver.preempt(first)
    driver.step({first.slot: len(PROMPTS[0])}, first, second)
    driver.step(None, second, first)
    driver.step(None, first, second)
    oracle = Oracle(one_layer)
    for sequence, prompt, num in zip(sequences, PROMPTS, (6, 7), strict=False):
        assert sequence.output_ids == oracle.greedy(list(prompt), num)


def started(driver: Driver, prompts: tuple[list[int], ...], sampling: SamplingParams = GREEDY) -> list[DrivenSequence]:
    """Sequences that have drawn their first token."""
    sequences = [driver.add(list(prompt), sampling, seed=7) for prompt in prompts]
    driver.step(None, *sequences)
    return sequences


def test_padding_writes_to_a_block_of_its_own(one_layer: Path) -> None:
    """Everything that is not a row's own is poisoned, and stays so: whoever read it would draw a row that failed."""
    runner = open_runner(one_layer, "lazy")
    driver = Driver(runner)
    sequences = started(driver, PROMPTS)
    assert steps_of(runner).graphs.of(StepShape(len(sequences))) == StepShape(4)
    cache = runner._cache
    foreign = sorted(set(range(cache.num_blocks + 1)) - {block for one in sequences for block in one.blocks})
    with torch.inference_mode():
        cache.tensors[0][:, :, foreign] = torch.nan
    before = cache.tensors[0][:, :, : cache.num_blocks + 1].clone()
    output = driver.step(None, *sequences)
    assert not output.failed_rows
    assert cache.tensors[0][:, :, foreign].isnan().all()
    is_changed = (cache.tensors[0][:, :, : cache.num_blocks + 1] != before) & ~before.isnan()
    places = is_changed.any(-1).any(-1).any(1).any(0).nonzero().tolist()  # (block, place in it)
    ends = [sequence.num_computed - 1 for sequence in sequences]
    own = [[one.blocks[end // BLOCK_SIZE], end % BLOCK_SIZE] for one, end in zip(sequences, ends, strict=True)]
    assert sorted(places) == sorted(own)
    assert cache.tensors[0][:, :, cache.scratch_block + 1].any()


def test_padding_of_a_chunk_writes_to_that_block_too(one_layer: Path) -> None:
    runner = open_runner(one_layer, "lazy")
    driver = Driver(runner)
    (decoding,) = started(driver, PROMPTS[:1])
    chunked = driver.add(PROMPTS[2])
    driver.step({chunked.slot: 3}, decoding, chunked)
    cache = runner._cache
    with torch.inference_mode():
        cache.tensors[0][:, :, cache.scratch_block + 1] = torch.nan
        own = torch.tensor([*decoding.blocks, *chunked.blocks])
        foreign = torch.tensor(sorted(set(range(cache.num_blocks + 1)) - set(own.tolist())))
        cache.tensors[0][:, :, foreign] = torch.nan
    before = cache.tensors[0][:, :, own].clone()
    output = driver.step({chunked.slot: 5}, decoding, chunked)
    assert not output.failed_rows
    assert cache.tensors[0][:, :, foreign].isnan().all()
    is_changed = (cache.tensors[0][:, :, own] != before).any(-1).any(-1).any(0).any(0)  # [blocks, places]
    assert is_changed.nonzero().tolist() == [[0, decoding.num_computed - 1], *([1, place] for place in range(3, 8))]
    assert cache.tensors[0][:, :, cache.scratch_block + 1].isfinite().any()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_row_that_fails_costs_itself_alone_and_its_token_is_drawn_by_nobody(one_layer: Path) -> None:
    runner = open_runner(one_layer, "lazy")
    driver = Driver(runner)
    sequences = started(driver, PROMPTS)
    with torch.inference_mode():
        runner._cache.tensors[0][:, :, sequences[1].blocks[0]] = torch.nan
    output = driver.step(None, *sequences)
    assert list(output.failed_rows) == [1]
    assert output.rows.tolist() == [0, 2]
    assert runner._cache.tensors[0].isfinite().all()


MAX_BIASES = 8  # in the test that asks for these
ASKED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "top_p": 0.9},
    "logprobs": {"num_logprobs": 3},
    "penalties": {"frequency_penalty": 0.5, "temperature": 1.0},
    "others": {"logit_bias": ((7, 2.0),), "min_tokens": 5, "top_k": 9, "min_p": 0.1, "temperature": 1.0},
    "too many biases": {"logit_bias": tuple((token_id, 0.1) for token_id in range(MAX_BIASES + 1))},
}


class MaskingDriver(Driver):
    """Lets some rows of each step sample these tokens alone."""

    allowed: dict[int, list[int]]  # by row

    def run(self, plan: StepPlan) -> StepOutput:
        is_allowed = np.zeros((len(self.allowed), self.runner.limits.vocab_size + 31 & ~31), np.bool_)
        for row, ids in enumerate(self.allowed.values()):
            is_allowed[row, ids] = True
        ticket = self.runner.forward(dataclasses.replace(plan, masked_rows=[*self.allowed]))
        masks = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
        self.runner.sample(ticket, masks if self.allowed else None)
        return self.runner.collect(ticket)


def test_a_graph_computes_the_logits_of_rows_that_wait_for_masks(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logprobs are those without graphs; what rows sample is counted once."""
    asked: dict[str, Any] = {"temperature": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "num_logprobs": 2}
    told = []
    for graphs in ("off", "on"):
        runner = open_runner(one_layer, graphs)
        driver, replayed = MaskingDriver(runner), replays(monkeypatch, runner)
        driver.allowed = {}
        sequences = started(driver, PROMPTS, SamplingParams(max_tokens=30, **asked))
        replayed.clear()
        outputs = []
        for allowed in ({0: [5, 6, 7], 2: [299]}, {1: [*range(40, 80)]}, {0: [5, 6, 7]}, {}, {}):
            driver.allowed = allowed
            outputs.append(driver.step(None, *sequences))
            for row, ids in allowed.items():
                assert outputs[-1].token_ids[row] in ids
        told.append([(output.token_ids.tolist(), output.logprobs) for output in outputs])
        assert replayed == ([StepShape(4)] * 5 if graphs == "on" else [])
    assert told[0] == told[1]


def test_a_graph_draws_what_the_kernel_knows_and_torch_the_rest(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens and logprobs of a runner without graphs; none is captured while it serves."""
    monkeypatch.setattr("gpu.kernels.sampling.MAX_BIASES", MAX_BIASES)
    told: dict[str, list[Any]] = {name: [] for name in ASKED}
    for graphs in ("off", "on"):
        runner = open_runner(one_layer, graphs)
        driver, num_captured = Driver(runner), steps_of(runner).graphs.num_captured
        replayed = replays(monkeypatch, runner)
        for name, asked in ASKED.items():
            sequences = started(driver, PROMPTS, SamplingParams(**{"max_tokens": 9, "temperature": 0.0, **asked}))
            replayed.clear()
            outputs = [driver.step(None, *sequences) for _ in range(2)]
            told[name].append([(output.token_ids.tolist(), output.logprobs) for output in outputs])
            assert replayed == ([StepShape(4)] * 2 if graphs == "on" else []), name
            for sequence in sequences:
                driver.remove(sequence)
        assert steps_of(runner).graphs.num_captured == num_captured
    for name, (without, by_graphs) in told.items():
        assert by_graphs == without, name


def test_a_pending_token_is_what_the_slot_drew_last_by_whatever_drew_it(one_layer: Path) -> None:
    """A prompt's step draws the first, a graph's the second; neither was read by the host."""
    found = []
    for tokens in ([PENDING, PENDING], None):
        runner = open_runner(one_layer, "lazy")
        driver = Driver(runner)
        (sequence,) = started(driver, PROMPTS[:1])
        for place in range(2):
            token = sequence.token_ids[-1] if tokens is None else tokens[place]
            output = driver.run(make_plan([(sequence.slot, 4 + place, [token], True)]))
            sequence.token_ids.append(int(output.token_ids[0]))
        found.append(sequence.output_ids)
    assert found[0] == found[1]


class FailingRecorder(FakeRecorder):
    """Captures so many, then no more."""

    def __init__(self, num_captured: int) -> None:
        super().__init__()
        self._num_left = num_captured

    def capture(self, work: Callable[[], None]) -> Graph:
        self._num_left -= 1
        if self._num_left < 0:
            work()
            raise CaptureError("planted")
        return super().capture(work)


@pytest.mark.parametrize("graphs", ["on", "lazy"])
def test_where_capture_fails_steps_go_on_by_python(
    graphs: str, one_layer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: FailingRecorder(1))
    with caplog.at_level(logging.WARNING):
        runner = open_runner(one_layer, graphs)
        assert_tokens_are_the_oracles(runner, one_layer)
    assert [record.getMessage()[:14] for record in caplog.records] == ["no CUDA graphs"]
    assert steps_of(runner).graphs.num_captured == 0


def test_a_chunk_whose_length_the_host_reads_is_refused_and_decodes_are_not(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device it would be that of the capture for ever."""
    read_all = DeviceRows.tokens_of

    def read(rows: DeviceRows, inputs: StepInputs) -> StepTokens:
        (inputs.tokens[0] >= 0).sum().item()
        return read_all(rows, inputs)

    monkeypatch.setattr(
        DeviceRows, "tokens_of", lambda rows, inputs: (read if len(inputs.asked) else read_all)(rows, inputs)
    )
    with caplog.at_level(logging.WARNING):
        runner = open_runner(one_layer, "on")
    assert [record.getMessage()[:26] for record in caplog.records] == ["no CUDA graphs of prompts:"]
    assert (runner.captured.num_graphs, runner.captured.num_of_prompts) == (3, 0)
    replayed = replays(monkeypatch, runner)
    assert_tokens_are_the_oracles(runner, one_layer)
    assert {shape.num_prompts for shape in replayed} == {0}


def test_keys_and_values_are_sized_when_it_is_known_what_graphs_take(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And what was captured to know it is let go of again."""
    monkeypatch.setattr("gpu.runner.count_graphs", count_graphs)
    recorder = FakeRecorder()
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: recorder)
    runner = open_runner(one_layer, "lazy")
    assert len(recorder.graphs) == 0
    with torch.inference_mode():
        steps_of(runner).graphs.capture_all(no_progress)
    assert len(recorder.graphs) == 7
    assert 0 < steps_of(runner).graphs.size_bytes <= runner.memory.graph_bytes
    assert steps_of(runner).graphs.most_graphs == 7
    assert not caplog.records


def test_where_memory_ends_at_capture_steps_go_on_with_fewer_graphs(
    one_layer: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = FakeRecorder()
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: whole)
    room_bytes = open_runner(one_layer, "on").captured.size_bytes - 1
    monkeypatch.setattr("gpu.tune.CudaRecorder", lambda device: FakeRecorder(room_bytes))
    with caplog.at_level(logging.WARNING):
        runner = open_runner(one_layer, "on")
    assert runner.captured.num_graphs == 6
    told = "no more CUDA graphs than 6: no memory for 32 tokens of prompts beside 0 rows"
    assert [record.getMessage()[: len(told)] for record in caplog.records] == [told]
    assert_tokens_are_the_oracles(runner, one_layer)


def test_what_moves_after_its_capture_is_told(one_layer: Path) -> None:
    """On a device a graph would go on with what lies there now."""
    runner = open_runner(one_layer, "lazy")
    driver = Driver(runner)
    sequences = started(driver, PROMPTS[:1])
    driver.step(None, *sequences)
    runner.model.norm = runner.model.norm.clone()
    with pytest.raises(CaptureError, match="nobody keeps"):
        driver.step(None, *sequences)


def test_a_model_that_the_kernels_do_not_know_has_no_graphs(one_layer: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = dataclasses.replace(ENGINE, graphs="on")
    with caplog.at_level(logging.WARNING):
        runner = load_runner(one_layer, parse_model_config(read_config(one_layer)), engine, no_progress)
    assert runner.captured.num_graphs == 0
    assert "no CUDA graphs" in caplog.text
