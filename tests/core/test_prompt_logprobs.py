"""Logprobs of prompts: each position once and right, whatever happens to the steps that compute it."""

import numpy as np
import pytest

from core.plan import StepPlan
from core.simulation import logprobs_after
from core.types import Cancel, FinishReason, Request, Submit, TokenLogprobs
from tests.fakes import EngineUnderTest, FakeClock, FaultyRunner, make_request, small_limits

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
@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
def test_chunks_of_any_size_tell_the_same(engine_type: type[EngineUnderTest], max_batch_tokens: int) -> None:
    under_test = engine_type(small_limits(max_batch_tokens=max_batch_tokens))
    request = asking()
    under_test.send(Submit(request), Submit(make_request("b", 20)))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()
    assert under_test.log.prompt_logprobs("b") == []
    assert under_test.log.tokens("a") == under_test.reference(request)


def test_all_of_the_prompt_is_told_before_any_token() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Submit(asking()))
    while not under_test.log.tokens("a"):
        under_test.step()
    assert under_test.log.prompt_logprobs("a") == wanted()


def test_a_prompt_of_one_token_has_nothing_to_tell() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Submit(asking(prompt_ids=(7,))))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == []
    assert under_test.log.finish_reason("a") is FinishReason.LENGTH


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


class RaisingOnce(FaultyRunner):
    """The n-th step raises."""

    def __init__(self, raising: int) -> None:
        super().__init__(small_limits(max_batch_tokens=8), FakeClock())
        self._raising = raising

    def forward(self, plan: StepPlan) -> StepPlan:
        if self.num_forwards == self._raising:
            self.num_forwards += 1
            raise RuntimeError("this step alone")
        return super().forward(plan)


@pytest.mark.parametrize("raising", [0, 1, 2, 3])
def test_a_step_that_is_tried_again_tells_what_the_first_would_have(raising: int) -> None:
    runner = RaisingOnce(raising)
    under_test = EngineUnderTest(runner.limits, runner=runner)
    under_test.send(Submit(make_request("b", 3)), Submit(asking()))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()


def test_beside_a_row_that_makes_its_step_raise_the_others_tell_all() -> None:
    limits = small_limits(max_batch_tokens=64)
    runner = FaultyRunner(limits, FakeClock(), raises_at={88: RuntimeError("a token that the model cannot take")})
    under_test = EngineUnderTest(limits, runner=runner)
    guilty = make_request("b", prompt_ids=(1, 88))
    under_test.send(Submit(guilty), Submit(asking(prompt_ids=PROMPT[:17])))
    under_test.run()
    assert under_test.log.finish_reason("b") is FinishReason.ERROR
    assert under_test.log.prompt_logprobs("a") == wanted(PROMPT[:17])


@BOTH
def test_of_several_sequences_the_prompt_is_told_once(engine_type: type[EngineUnderTest]) -> None:
    under_test = engine_type(small_limits(max_batch_tokens=7))
    request = asking(num_sequences=3)
    under_test.send(Submit(request))
    under_test.run()
    assert under_test.log.prompt_logprobs("a") == wanted()
    assert [under_test.log.tokens("a", i) for i in range(3)] == [under_test.reference(request, i) for i in range(3)]


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
