"""Logprobs of prompts on the real runner: as transformers has them, however the prompts are computed."""

import dataclasses
import math
import random

import pytest
import torch

import gpu.sampler
from core.plan import PromptTargets, make_plan
from core.types import Request, SamplingParams, Submit, TokenLogprobs
from gpu.runner import NOT_FINITE, ModelRunner
from tests.fakes import engine_over
from tests.gpu.conftest import ENGINE, open_runner
from tests.gpu.driver import Driver
from tests.oracle import KINDS, Oracle

Told = dict[str, list[TokenLogprobs]]


def make_prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 300), k=num_tokens))


def ask(name: str, prompt_ids: tuple[int, ...], num_top: int | None, max_tokens: int = 5, priority: int = 0) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, num_logprobs=num_top, num_prompt_logprobs=num_top, seed=1
    )
    return Request(request_id=name, prompt_ids=prompt_ids, sampling=sampling, arrival_s=0.0, priority=priority)


REQUESTS = (
    ask("plain", make_prompt(1, 70), None),  # leaves in the cache what the next one must not take from there
    ask("long", make_prompt(1, 70), 3),
    ask("unsaid", make_prompt(3, 33), 0, max_tokens=0, priority=5),
    ask("alone", make_prompt(2, 1), 2),
    ask("most", make_prompt(4, 16), 20),
)


def run(runner: ModelRunner, max_batch_tokens: int, max_in_flight: int, num_blocks: int = 64) -> Told:
    scheduler, engine, inbox, log = engine_over(
        runner, max_batch_tokens=max_batch_tokens, max_in_flight=max_in_flight, num_blocks=num_blocks
    )
    is_crowded = num_blocks < 10  # then the long one gives way to the next in mid-prompt
    for request in (*REQUESTS[1:], REQUESTS[0]) if is_crowded else REQUESTS:
        inbox.append(Submit(request))
        engine.step()
    while engine.step():
        pass
    assert all(len(log.tokens(request.request_id)) == request.sampling.max_tokens for request in REQUESTS)
    assert (scheduler.stats().num_preemptions > 0) is is_crowded
    return {request.request_id: log.prompt_logprobs(request.request_id) for request in REQUESTS}


@pytest.mark.parametrize("family", KINDS, scope="session")
def test_logprobs_of_prompts_agree_with_the_oracle(runner: ModelRunner, oracle: Oracle) -> None:
    """Whole and in chunks, beside others, with a step in flight, and computed anew after preemptions."""
    wanted = {
        request.request_id: oracle.logits(list(request.prompt_ids)).log_softmax(-1)[:-1]
        for request in REQUESTS
        if request.sampling.num_prompt_logprobs is not None
    }
    for max_batch_tokens, max_in_flight, num_blocks in ((256, 1, 64), (7, 1, 64), (16, 2, 64), (24, 2, 6)):
        told = run(runner, max_batch_tokens, max_in_flight, num_blocks)
        assert told.pop("plain") == []
        for request in REQUESTS[1:]:
            check(told[request.request_id], request, wanted[request.request_id])


def check(told: list[TokenLogprobs], request: Request, logprobs: torch.Tensor) -> None:
    """
    Args:
        logprobs: [prompt's tokens - 1, vocab]
    """
    tolerance = 1e-4 * float(logprobs.abs().max()) if len(logprobs) else 0.0
    assert [one.token_id for one in told] == list(request.prompt_ids[1:])
    for one, row in zip(told, logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=tolerance)
        best = row.sort(descending=True).values[: request.sampling.num_prompt_logprobs].tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best, abs=tolerance)
        assert all(logprob == pytest.approx(float(row[token_id]), abs=tolerance) for token_id, logprob in one.top)


def test_chunks_and_company_change_no_bit_in_bfloat16(model_directory) -> None:
    engine = dataclasses.replace(ENGINE, dtype="bfloat16")
    runner = open_runner(model_directory("llama3"), engine)
    whole = run(runner, 256, 1)
    assert run(runner, 7, 1) == whole
    assert run(runner, 24, 2, num_blocks=6) == whole


def test_logits_are_there_a_piece_at_a_time(llama_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(llama_runner, 256, 1)
    sizes: list[int] = []
    logits = llama_runner.model.logits

    def counted(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(len(x))
        return logits(x, out)

    monkeypatch.setattr(llama_runner.model, "logits", counted)
    monkeypatch.setattr(gpu.sampler, "PIECE_BYTES", 4 * 300 * 9)
    assert run(llama_runner, 256, 1) == whole
    assert max(sizes) == 9
    assert sizes.count(9) > 69 // 9


def test_a_chunk_whose_logits_are_not_finite_fails_at_once_and_alone(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    good, bad = driver.add(list(make_prompt(5, 40))), driver.add(list(make_prompt(6, 40)))
    driver.step({good.slot: 20, bad.slot: 20}, good, bad)
    with torch.inference_mode():
        llama_runner._cache.tensors[0][0, 1, bad.blocks[0]] = math.nan
    rows = [(one.slot, 20, one.token_ids[20:30], False) for one in (good, bad)]
    targets = [PromptTargets(row, 2, tuple(one.token_ids[23:31]), 1) for row, one in enumerate((good, bad))]
    output = driver.run(make_plan(rows, prompt_targets=targets))
    assert output.failed_rows == {1: NOT_FINITE}
    assert [one.token_id for one in output.prompt_logprobs.pop(0)] == good.token_ids[23:31]
    assert output.prompt_logprobs == {}
    assert llama_runner._cache.tensors[0].isfinite().all()
