"""Steps through the runner: isolation of rows, copies, logprobs, and what load_runner refuses."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import count, repeat
from random import Random

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.errors import BadCheckpoint, NotEnoughMemory
from core.plan import SequenceStart, make_plan
from core.types import SamplingParams, TokenLogprobs
from gpu.loading import load_runner
from gpu.memory_plan import estimate
from gpu.runner import NOT_FINITE, ModelRunner
from tests.gpu.conftest import ENGINE, no_progress, open_runner
from tests.gpu.driver import GREEDY, DrivenSequence, Driver
from tests.oracle import KINDS, read_config

PROMPT = list(range(10, 45))
Said = list[TokenLogprobs]


def test_limits_are_those_planned(llama_runner: ModelRunner) -> None:
    limits = llama_runner.limits
    assert (limits.block_size, limits.max_sequences, limits.max_model_len, limits.vocab_size) == (16, 16, 256, 300)
    assert limits.num_blocks == llama_runner.memory.num_blocks > 100


def test_a_step_without_sampling_rows_draws_nothing(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    sequence = driver.add(PROMPT)
    output = driver.step({sequence.slot: 5}, sequence)
    assert (output.rows.tolist(), output.token_ids.tolist(), output.failed_rows) == ([], [], {})


def test_tokens_come_in_the_order_of_the_plans_rows(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    sequences = [driver.add(PROMPT[:length]) for length in (3, 30, 1)]
    output = driver.step(None, *sequences)
    assert output.rows.tolist() == [0, 1, 2]
    assert output.rows.dtype == output.token_ids.dtype == np.int32


def test_a_copied_block_carries_a_sequence_on(llama_runner: ModelRunner) -> None:
    """Copy on write: slot 1 goes on from slot 0's 20 tokens with a copy of the partial block, then both differ."""
    driver = Driver(llama_runner)
    rows = [(0, 0, PROMPT[:20], True)]
    starts = [SequenceStart(slot, (1,), 1, GREEDY, 0, ()) for slot in range(3)]
    driver.run(make_plan(rows, tables=[(0, 0, 3), (0, 1, 5)], sequence_starts=starts))
    both = make_plan([(0, 20, [7], True), (1, 20, [8], True)], tables=[(1, 0, 3), (1, 1, 9)], copies=[(5, 9)])
    got = driver.run(both).token_ids.tolist()
    want = []
    for last in (7, 8):
        whole = make_plan([(2, 0, [*PROMPT[:20], last], True)], tables=[(2, 0, 20), (2, 1, 21)])
        want.append(driver.run(whole).token_ids.item())
    assert got == want


def test_a_row_that_is_not_finite_fails_alone_and_leaves_its_blocks_finite(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    want = driver.generate(30, driver.add(PROMPT))
    good, bad = driver.add(PROMPT), driver.add(PROMPT[:20])
    driver.step(None, good, bad)
    with torch.inference_mode():
        llama_runner._cache.tensors[0][0, 1, bad.blocks[0]] = math.nan
    output = driver.step(None, bad, good)
    assert output.failed_rows == {0: NOT_FINITE}
    assert output.rows.tolist() == [1]
    assert llama_runner._cache.tensors[0].isfinite().all()
    assert driver.generate(30, good) == want


def test_nan_left_in_free_blocks_reaches_nobody(llama_runner: ModelRunner) -> None:
    """A cancelled prefill may leave NaN that no logits ever showed."""
    before = Driver(llama_runner)
    want = before.generate(40, before.add(PROMPT))
    with torch.inference_mode():
        llama_runner._cache.tensors[0][:, :, : llama_runner.limits.num_blocks] = math.nan
    driver = Driver(llama_runner)
    sequences = [driver.add(PROMPT), driver.add(PROMPT[:3])]
    driver.generate(40, *sequences)
    assert sequences[0].output_ids == want[0]


def test_logprobs_belong_to_their_tokens(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    plain = driver.add(PROMPT[:9])
    asked = driver.add(PROMPT, SamplingParams(max_tokens=9, temperature=0.0, num_logprobs=3))
    output = driver.step(None, plain, asked)
    assert list(output.logprobs) == [1]
    logprobs = output.logprobs[1]
    assert logprobs.token_id == output.token_ids[1] == logprobs.top[0][0]
    assert logprobs.logprob == logprobs.top[0][1] < 0
    assert len(logprobs.top) == 3


SEEDED = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, presence_penalty=0.3, num_logprobs=3)


def say(driver: Driver, sequence: DrivenSequence, steps: Iterator[tuple[dict[int, int], list[DrivenSequence]]]) -> Said:
    """Its next 30 tokens and their logprobs; a step is the lengths of prompts' chunks, and who shares it."""
    said: Said = []
    while len(said) < 30:
        lengths, beside = next(steps)
        output = driver.step(lengths, *beside, sequence)
        said += [output.logprobs[i] for i, row in enumerate(output.rows.tolist()) if row == len(beside)]
    return said


def crowded(driver: Driver, sequence: DrivenSequence) -> Iterator[tuple[dict[int, int], list[DrivenSequence]]]:
    """Chunks of any length, neighbours that come and sit out, and a preemption now and then."""
    random = Random(1)
    others = [driver.add(PROMPT[: 3 + index], SamplingParams(max_tokens=9), seed=index) for index in range(9)]
    while True:
        if random.random() < 0.1:
            driver.preempt(sequence)
        chunk = random.choice((1, 3, 16, 17, 50, 100))
        yield {sequence.slot: chunk}, random.sample(others, random.randrange(9))


IN_BFLOAT16 = ("llama3", "gemma2", "gpt_oss", "qwen3_moe")  # a plain one, windows and caps, sinks and biases, experts


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "float32") for name in KINDS), *((name, "bfloat16") for name in IN_BFLOAT16)]
)
def test_a_seeded_request_says_the_same_alone_and_in_a_crowd(family: str, dtype: str, model_directory) -> None:
    """Logprobs, too, to the last bit."""
    engine = dataclasses.replace(ENGINE, dtype=dtype)
    prompt = [(7 * i * i + 3) % 290 for i in range(120)]
    alone = Driver(open_runner(model_directory(family), engine))
    want = say(alone, alone.add(prompt, SEEDED, seed=5), repeat(({}, [])))
    crowd = Driver(open_runner(model_directory(family), engine))
    sequence = crowd.add(prompt, SEEDED, seed=5)
    got = say(crowd, sequence, crowded(crowd, sequence))
    assert got == want


def test_idle_work_settles_the_threads_of_the_next_step_and_gives_memory_back(
    model_directory, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real measurement, put down and begun anew, with a step in between."""
    waiting, trims = count(0, 1000), list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gpu.device.num_physical_cores", lambda: 2)
    monkeypatch.setattr("gpu.tune.MIN_PARAMETERS", 0)
    monkeypatch.setattr("gpu.tune.waited_s", lambda: next(waiting))
    monkeypatch.setattr("gpu.runner.trim_heap", lambda: trims.append("trimmed"))
    monkeypatch.setattr("gpu.tune.fewest", lambda counts, seconds, worth=1.0: 2)
    runner = open_runner(model_directory("llama3"), dataclasses.replace(ENGINE, threads=None))
    assert not runner.measured.is_settled
    driver = Driver(runner)
    sequence = driver.add(PROMPT)
    begun, waiting = runner.idle_work(), repeat(0)
    next(begun)
    begun.close()
    driver.step(None, sequence)
    assert (runner.measured.is_settled, trims) == (False, [])
    assert sum(1 for _ in runner.idle_work()) > 1
    assert (runner.measured.is_settled, trims) == (True, ["trimmed"])
    driver.step(None, sequence)
    assert torch.get_num_threads() == runner.measured.threads.of(1) == 2


@pytest.mark.parametrize("family", KINDS)
def test_bfloat16_follows_float32_closely(family: str, model_directory) -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16", kv_memory_bytes=2**22, threads=1)
    plan = make_plan([(0, 0, PROMPT, True)], tables=[(0, 0, 0), (0, 1, 1), (0, 2, 2)])
    exact = open_runner(model_directory(family)).forward(plan).sent.logits
    rounded = open_runner(model_directory(family), engine).forward(plan).sent.logits
    assert torch.corrcoef(torch.cat([exact, rounded]))[0, 1] > 0.995


def test_a_context_that_does_not_fit_names_one_that_does(model_directory) -> None:
    directory = model_directory("llama3")
    config = parse_model_config(read_config(directory))
    per_token = 2 * 2 * 32 * 4
    small = EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=130 * per_token)
    with pytest.raises(NotEnoughMemory, match=r"KV cache: need .* for 256 tokens") as caught:
        load_runner(directory, config, small, no_progress)
    assert caught.value.fix.startswith("--max-model-len 100, or --kv-memory ")
    engine = EngineConfig(device="cpu", dtype="float32", kv_memory_bytes=130 * per_token, max_model_len=100)
    assert estimate(directory, config, engine).kv_tokens == 112


def test_estimate_is_what_loading_takes(model_directory) -> None:
    directory = model_directory("qwen2")
    config = parse_model_config(read_config(directory))
    runner = load_runner(directory, config, ENGINE, no_progress)
    plan = estimate(directory, config, ENGINE)
    assert (plan.num_blocks, plan.kv_bytes) == (runner.limits.num_blocks, runner._cache.tensors[0].nbytes)
    assert plan.weights_bytes == plan.checkpoint_bytes == 4 * config.num_parameters


def test_estimate_of_a_directory_without_weights_is_refused(model_directory, tmp_path) -> None:
    config = parse_model_config(read_config(model_directory("qwen2")))
    with pytest.raises(BadCheckpoint):
        estimate(tmp_path, config, ENGINE)
