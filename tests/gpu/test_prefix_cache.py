"""Through scheduler, engine and runner: what is cached, shared or computed again says what the plain oracle says."""

import random

import pytest

from core.plan import RunnerLimits
from core.types import Request, SamplingParams, Submit
from gpu.runner import ModelRunner
from tests.fakes import engine_over
from tests.oracle import KINDS, Oracle

NUM_TOKENS = 12
SYSTEM = random.Random(7).choices(range(3, 300), k=40)


def greedy(name: str, prompt: list[int], arrival_s: float = 0.0) -> Request:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, arrival_s=arrival_s)


@pytest.mark.parametrize("family", KINDS, scope="session")
def test_greedy_tokens_equal_the_oracles_cached_chunked_batched_and_preempted(
    runner: ModelRunner, oracle: Oracle
) -> None:
    limits = runner.limits
    num_kept_states = None if limits.num_kept_states is None else 4
    runner.limits = RunnerLimits(
        num_blocks=7,
        block_size=limits.block_size,
        max_sequences=limits.max_sequences,
        max_batch_tokens=24,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        num_kept_states=num_kept_states,
    )
    scheduler, engine, inbox, log = engine_over(runner)

    def run(*requests: Request) -> None:
        inbox.extend(map(Submit, requests))
        while engine.step():
            pass

    prompts = [SYSTEM + random.Random(i).choices(range(3, 300), k=k) for i, k in enumerate((8, 9, 24))]
    run(*(greedy(f"a{i}", prompt, i) for i, prompt in enumerate(prompts)))
    answers = [log.tokens(f"a{i}") for i in range(len(prompts))]
    turns = [prompt + answer + [5, 6, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    run(*(greedy(f"b{i}", turn, i) for i, turn in enumerate(turns)))
    run(*(greedy(f"c{i}", prompt, i) for i, prompt in enumerate(prompts)))
    stats = scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_cache_evictions > 0
    assert stats.num_cache_hits > stats.num_cache_queries / 3
    assert (
        answers
        == [oracle.greedy(prompt, NUM_TOKENS, said) for prompt, said in zip(prompts, answers, strict=True)]
        == [log.tokens(f"c{i}") for i in range(len(prompts))]
    )
    for i, turn in enumerate(turns):
        assert (said := log.tokens(f"b{i}")) == oracle.greedy(turn, NUM_TOKENS, said)
