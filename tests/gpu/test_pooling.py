"""Vectors of prompts on the real runner: as transformers' hidden states give them, however the prompts are computed."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from core.plan import PooledRow, make_plan
from core.types import Pooling, Submit
from gpu.runner import NOT_FINITE, ModelRunner
from tests.fakes import engine_over, make_request
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.driver import Driver
from tests.oracle import Oracle

LAST, MEAN = Pooling("last"), Pooling("mean")
CHOSEN = Pooling("last", token_ids=(17, 4))


def make_prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 300), k=num_tokens))


ASKED: dict[str, tuple[tuple[int, ...], Pooling | None]] = {
    "answers": (make_prompt(1, 70), None),  # leaves blocks in the cache
    "last": (make_prompt(1, 70), LAST),
    "mean": (make_prompt(1, 70), MEAN),
    "chosen": (make_prompt(2, 33), CHOSEN),
    "short": (make_prompt(3, 1), MEAN),
    "shortest": (make_prompt(3, 1), LAST),
    "block": (make_prompt(4, 32), LAST),
}


def run(runner: ModelRunner, max_batch_tokens: int, max_in_flight: int, num_blocks: int = 64) -> dict[str, bytes]:
    _, engine, inbox, log = engine_over(
        runner, max_batch_tokens=max_batch_tokens, max_in_flight=max_in_flight, num_blocks=num_blocks
    )
    for priority, (name, (prompt, pooling)) in enumerate(ASKED.items()):
        given = {"max_tokens": 6 if pooling is None else 0, "temperature": 0.0, "pooling": pooling}
        inbox.append(Submit(make_request(name, prompt_ids=prompt, priority=priority % 3, **given)))
        engine.step()
    while engine.step():
        pass
    usages = {name: log.terminal(name).usage for name in ASKED}
    assert all(usage is not None and usage.num_prompt_tokens == len(ASKED[name][0]) for name, usage in usages.items())
    assert usages["mean"] is not None
    assert usages["mean"].num_cached_tokens == 0
    assert len(log.tokens("answers")) == 6
    return {name: log.terminal(name).pooled for name, (_, pooling) in ASKED.items() if pooling is not None}


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen2_late_window_dynamic", "gemma3"], scope="session")
def test_vectors_agree_with_the_oracle(runner: ModelRunner, oracle: Oracle) -> None:
    """Whole and in chunks, beside an answer, from the cache, with a step in flight, and after preemptions."""
    wanted: dict[str, torch.Tensor] = {}
    for name, (prompt, pooling) in ASKED.items():
        if pooling is not None and pooling.token_ids:
            wanted[name] = oracle.logits(list(prompt))[-1, list(pooling.token_ids)].double()
        elif pooling is not None:
            states = oracle.states(list(prompt)).double()
            wanted[name] = states.mean(0) if pooling.kind == "mean" else states[-1]
    for max_batch_tokens, max_in_flight, num_blocks in ((256, 1, 64), (7, 1, 64), (16, 2, 64), (24, 2, 8)):
        for name, vector in run(runner, max_batch_tokens, max_in_flight, num_blocks).items():
            found = torch.from_numpy(np.frombuffer(vector, np.float32).copy()).double()
            assert float((found - wanted[name]).norm() / wanted[name].norm()) < 1e-4, name


def test_chunks_and_company_change_no_bit_in_bfloat16(model_directory) -> None:
    runner = open_runner(model_directory("llama3"), dataclasses.replace(ENGINE, dtype="bfloat16"))
    whole = run(runner, 256, 1)
    assert run(runner, 7, 1) == whole
    assert run(runner, 24, 2, num_blocks=8) == whole


def test_a_prompt_whose_vector_is_not_finite_fails_alone(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    good, bad = driver.add(list(make_prompt(5, 40))), driver.add(list(make_prompt(6, 40)))
    driver.step({good.slot: 20, bad.slot: 20}, good, bad)
    with torch.inference_mode():
        llama_runner._cache.tensors[0][0, 1, bad.blocks[0]] = math.nan
    rows = [(one.slot, 20, one.token_ids[20:30], False) for one in (good, bad)]
    output = driver.run(make_plan(rows, pooled_rows=[PooledRow(row, LAST, is_last=True) for row in (0, 1)]))
    assert output.failed_rows == {1: NOT_FINITE}
    assert list(output.pooled) == [0]
    assert llama_runner._cache.tensors[0].isfinite().all()
