"""What is expected of the scheduler: first tokens, and the ends of those that decode."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.outlook import Backlog, Outlook, tokens_left
from core.plan import TimedRow
from core.scheduler import Scheduler
from core.sequence_states import FIRST_GUESS_TOKENS
from core.step_cost import LEAST_STEPS
from core.types import Submit
from server.gate.admission import backlog_of
from tests.fakes import EngineUnderTest, make_request, small_limits

FIXED_S, PROMPT_TOKEN_S, OWN_TOKEN_S = 0.01, 0.001, 0.002
NOBODY = Backlog()


def expected(
    num_decoding: int = 0, ahead: Backlog = NOBODY, tokens: int = 50, kv_of_one: float = 0.0, miss_ratio: float = 1.0
) -> float:
    outlook = Outlook(
        step_cost_s=(FIXED_S, PROMPT_TOKEN_S, 0.0, OWN_TOKEN_S, 0.0),
        max_sequences=4,
        max_batch_tokens=100,
        num_kv_tokens=1600,
        inter_token_target=2.0,
        miss_ratio=miss_ratio,
        kv_of_one=kv_of_one,
        tokens_left=20.0,
        first_left=20.0,
    )
    return outlook.ttft_s(num_decoding, ahead, backlog_of(tokens, 1))


def test_idle_engine_computes_the_prompt_in_as_many_steps_as_it_takes() -> None:
    assert expected() == pytest.approx(0.05 + 1.5 * FIXED_S)
    assert expected(tokens=1000) == pytest.approx(1.0 + 11 * FIXED_S)


def test_what_is_ahead_is_computed_first() -> None:
    assert expected(ahead=backlog_of(200, 1)) == pytest.approx(expected() + 0.2 + 2 * FIXED_S)


def test_beside_decodes_a_prompt_gets_what_the_inter_token_target_leaves() -> None:
    """Two decode, in 14 ms; with the one that comes a step may take twice 16 ms, of which 18 are the prompt's."""
    num_steps = 0.05 / 0.018
    assert expected(2, kv_of_one=64) == pytest.approx(0.05 + num_steps * 0.014)


def test_steps_that_cost_nothing_take_no_time() -> None:
    outlook = Outlook(
        step_cost_s=(0.0, 0.0, 0.0, 0.0, 0.0),
        max_sequences=4,
        max_batch_tokens=100,
        num_kv_tokens=1600,
        inter_token_target=2.0,
        miss_ratio=1.0,
        kv_of_one=16.0,
        tokens_left=20.0,
        first_left=20.0,
    )
    assert outlook.ttft_s(2, NOBODY, backlog_of(50, 1)) == 0.0


def test_without_a_slot_it_waits_until_an_answer_ends() -> None:
    """Four decode 20 tokens each, in steps of twice 18 ms: one ends every 0.18 s."""
    assert expected(4, kv_of_one=32) - expected(3, kv_of_one=43) > 20 * 0.036 / 4


def test_a_rush_of_which_one_has_begun_waits_for_the_others_too() -> None:
    """They fill the slots: answers end as often as where all slots decode already, not as often as the one's."""
    rush, rest = Backlog(), Backlog()
    for _ in range(200):
        rush.add(backlog_of(1, 1))
    rest.add(rush, 197 / 200)
    begun, full = expected(1, rush, tokens=1, kv_of_one=32), expected(4, rest, tokens=1, kv_of_one=32)
    assert begun == pytest.approx(full, rel=0.05)


def test_without_blocks_it_waits_as_well() -> None:
    assert expected(3, tokens=100, kv_of_one=528) > 1.1 * expected(3, tokens=100, kv_of_one=267)


def test_what_is_cached_is_not_computed() -> None:
    assert expected(tokens=500, miss_ratio=0.2) == pytest.approx(0.1 + 2 * FIXED_S)


@given(
    num_decoding=st.integers(0, 4),
    num_blocks=st.integers(0, 100),
    prompts=st.lists(st.integers(1, 500), max_size=8),
    own=st.integers(1, 500),
)
def test_no_less_is_expected_than_what_the_prompts_cost(
    num_decoding: int, num_blocks: int, prompts: list[int], own: int
) -> None:
    ahead = Backlog()
    for prompt in prompts:
        ahead.add(backlog_of(prompt, 1))
    found_s = expected(num_decoding, ahead, own, kv_of_one=16 * num_blocks / max(1, num_decoding))
    assert (sum(prompts) + own) * PROMPT_TOKEN_S + FIXED_S <= found_s + 1e-9 < 1000


def test_an_answer_of_common_length_goes_on_for_the_mean_and_a_long_one_for_longer() -> None:
    assert tokens_left(20.0, 0, 1000) == tokens_left(20.0, 40, 1000) == 20
    assert tokens_left(20.0, 300, 1000) == 280
    assert tokens_left(20.0, 900, 1000) == 100
    assert tokens_left(20.0, 999, 1000) == 20


def test_the_scheduler_tells_what_those_that_run_have_left_once_steps_were_measured() -> None:
    under_test = EngineUnderTest(small_limits(num_blocks=2000, max_model_len=4000))

    def outlook() -> Outlook | None:
        return under_test.scheduler.stats().outlook

    def step_until(num_tokens: int) -> Outlook:
        while len(under_test.log.tokens("a")) < num_tokens:
            under_test.step()
        found = outlook()
        assert found is not None
        return found

    assert outlook() is None
    under_test.send(*(Submit(make_request(name, max_tokens=n)) for name, n in (("a", 2000), ("b", 2500))))
    assert step_until(40).tokens_left == FIRST_GUESS_TOKENS
    middle = step_until(1000)
    assert middle.tokens_left == pytest.approx(1000 - FIRST_GUESS_TOKENS, abs=20)
    assert middle.first_left == pytest.approx(1000, abs=20)
    assert middle.kv_of_one == pytest.approx(1000, rel=0.05)
    last = step_until(1985)  # the first has as many as it may, but for these
    assert 1 <= last.first_left <= 35
    assert last.end_s(2) == pytest.approx(last.first_left * last.step_cost_s[0], rel=0.2)
    under_test.run()
    assert last.end_s(0) is None
    assert under_test.scheduler.states.mean_answer_tokens > 1.5 * FIRST_GUESS_TOKENS


def test_steps_that_were_timed_at_start_tell_before_any_was_computed() -> None:
    rows = [TimedRow(0, 8, 8, 0.03), TimedRow(8, 9, 8, 0.02)] * LEAST_STEPS
    scheduler = Scheduler(replace(small_limits(), timed_rows=tuple(rows)), (), lambda: 0)
    outlook = scheduler.stats().outlook
    assert outlook is not None
    assert outlook.ttft_s(0, NOBODY, backlog_of(8, 1)) == pytest.approx(0.03, rel=1.0)
    assert scheduler.flush() is None
