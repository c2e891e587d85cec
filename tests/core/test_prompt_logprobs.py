"""Logprobs of prompts: each position once and right, whatever happens to the steps that compute it."""

import numpy as np
import pytest

from core.simulation import logprobs_after
from core.types import Cancel, FinishReason, Request, Submit, TokenLogprobs
from tests.fakes import EngineUnderTest, make_request, small_limits

PROMPT = tuple((5 * i + 1) % 89 for i in range(30))


class Overlapped(EngineUnderTest):
    max_in_flight = 2


BOTH = pytest.mark.parametrize("engine_type", [EngineUnderTest, Overlapped])


def asking(request_id: str = "a", prompt_ids: tuple[int, ...] = PROMPT, num_top: int = 2, **fields: object) -> Request:
    return make_request(request_id, prompt_ids=prompt_ids, num_prompt_logprobs=num_top, **fields)  # type: ignore[arg-type]


def wanted(prompt_ids: tuple[int, ...] = PROMPT, num_top: int = 2) -> list[TokenLogprobs]:
    prompt = np.array(prompt_ids, np.int32)
    return [logprobs_after(prompt[:i].tobytes(), prompt_ids[i], num_top) for i in range(1, len(prompt_ids))]


@BOTH
def test_nothing_comes_from_the_cache_and_all_is_left_there(engine_type: type[EngineUnderTest]) -> None:
    under_test = engine_type(small_limits())
    for name, request in (("before", make_request), ("a", asking), ("after", make_request)):
        under_test.send(Submit(request(name, prompt_ids=PROMPT)))  # type: ignore[operator]
        under_test.run()
        if name == "before":
            under_test.scheduler.pool.clear()
            under_test.send(Submit(make_request("half", prompt_ids=PROMPT[:14])))
            under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()
    cached = {name: under_test.log.terminal(name).usage for name in ("half", "a", "after")}
    assert {name: usage and usage.num_cached_tokens for name, usage in cached.items()} == {
        "half": 0,
        "a": 0,
        "after": 28,
    }
    assert under_test.scheduler.stats().num_cache_queries == 30 + 14 + 30  # it was not looked up


@BOTH
def test_after_a_preemption_what_was_told_is_not_told_again(engine_type: type[EngineUnderTest]) -> None:
    """Nor computed again, where its blocks are still there: the one that took its place needed few."""
    under_test = engine_type(small_limits(num_blocks=10, max_sequences=2, max_batch_tokens=8))
    under_test.send(Submit(asking(priority=0)))
    under_test.step(3)
    told = under_test.log.prompt_logprobs("a")
    assert 0 < len(told) < len(PROMPT) - 1
    under_test.send(Submit(make_request("b", 9, priority=5)))
    under_test.run()
    assert under_test.scheduler.stats().num_preemptions == 1
    assert under_test.log.prompt_logprobs("a") == wanted()
    num_computed = under_test.scheduler.stats().num_prompt_tokens
    assert num_computed < len(PROMPT) + 9 + len(told)
    usage = under_test.log.terminal("a").usage
    assert usage is not None
    assert usage.num_cached_tokens == 0


@BOTH
def test_when_the_leader_leaves_another_tells_the_rest(engine_type: type[EngineUnderTest]) -> None:
    under_test = engine_type(small_limits(max_batch_tokens=7))
    request = asking(num_sequences=2)
    under_test.send(Submit(request))
    under_test.step(2)
    assert 0 < len(under_test.log.prompt_logprobs("a")) < len(PROMPT) - 1
    under_test.send(Cancel("a", FinishReason.CANCELLED, index=0))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()
    assert under_test.log.tokens("a", 1) == under_test.reference(request, 1)


@BOTH
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_without_room_for_a_token_the_prompt_is_computed_and_nothing_said(
    engine_type: type[EngineUnderTest], num_sequences: int
) -> None:
    under_test = engine_type(small_limits(max_batch_tokens=7))
    under_test.send(Submit(asking(max_tokens=0, num_sequences=num_sequences)))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()
    for index in range(num_sequences):
        assert under_test.log.tokens("a", index) == []
        assert under_test.log.finish_reason("a", index) is FinishReason.LENGTH
    usage = under_test.log.terminal("a").usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (len(PROMPT), 0)
    assert under_test.scheduler.stats().num_generated_tokens == 0
