import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import EngineStats
from server.gate.admission import (
    LEAST_MARGIN,
    MOST_MARGIN,
    Backlog,
    DrainMeter,
    EngineRoom,
    Margin,
    backlog_of,
    expected_ttft_s,
    tokens_left,
)

FIXED_S, PROMPT_TOKEN_S, OWN_TOKEN_S = 0.01, 0.001, 0.002
ROOM = EngineRoom(max_sequences=4, max_batch_tokens=100, num_kv_tokens=1600, inter_token_target=2.0)
NOBODY = Backlog()


def stats(num_running: int = 0, num_used_blocks: int = 0, **fields: int) -> EngineStats:
    return EngineStats(
        num_running=num_running,
        num_blocks=100,
        num_used_blocks=num_used_blocks,
        step_cost_s=(FIXED_S, PROMPT_TOKEN_S, 0.0, OWN_TOKEN_S, 0.0),
        **fields,
    )


def expected(engine: EngineStats, num_decoding: int = 0, ahead: Backlog = NOBODY, tokens: int = 50) -> float:
    found = expected_ttft_s(ROOM, engine, num_decoding, 20.0, ahead, backlog_of(tokens, 1))
    assert found is not None
    return found


def test_nothing_is_expected_before_steps_were_measured() -> None:
    assert expected_ttft_s(ROOM, EngineStats(), 0, 20.0, NOBODY, backlog_of(5, 1)) is None


def test_idle_engine_computes_the_prompt_in_as_many_steps_as_it_takes() -> None:
    assert expected(stats()) == pytest.approx(0.05 + 1.5 * FIXED_S)
    assert expected(stats(), tokens=1000) == pytest.approx(1.0 + 11 * FIXED_S)


def test_what_is_ahead_is_computed_first() -> None:
    ahead = backlog_of(200, 1)
    assert expected(stats(), ahead=ahead) == pytest.approx(expected(stats()) + 0.2 + 2 * FIXED_S)


def test_beside_decodes_a_prompt_gets_what_the_inter_token_target_leaves() -> None:
    """Two decode, in 14 ms; with the one that comes a step may take twice 16 ms, of which 18 are the prompt's."""
    num_steps = 0.05 / 0.018
    assert expected(stats(2, 8), num_decoding=2) == pytest.approx(0.05 + num_steps * 0.014)


def test_without_a_slot_it_waits_until_an_answer_ends() -> None:
    """Four decode 20 tokens each, in steps of twice 18 ms: one ends every 0.18 s."""
    waits_s = expected(stats(4, 8), num_decoding=4) - expected(stats(3, 8), num_decoding=3)
    assert waits_s > 20 * 0.036 / 4


def test_a_rush_of_which_one_has_begun_waits_for_the_others_too() -> None:
    """They fill the slots: answers end as often as where all slots decode already, not as often as the one's."""
    rush, rest = Backlog(), Backlog()
    for _ in range(200):
        rush.add(backlog_of(1, 1))
    rest.add(rush, 197 / 200)
    begun, full = expected(stats(1, 2), 1, rush, tokens=1), expected(stats(4, 8), 4, rest, tokens=1)
    assert begun == pytest.approx(full, rel=0.05)


def test_without_blocks_it_waits_as_well() -> None:
    full, half = stats(3, 99), stats(3, 50)
    assert expected(full, num_decoding=3, tokens=100) > 1.1 * expected(half, num_decoding=3, tokens=100)


def test_what_is_cached_is_not_computed() -> None:
    hits = stats(num_cache_queries=1000, num_cache_hits=800)
    assert expected(hits, tokens=500) == pytest.approx(0.1 + 2 * FIXED_S)


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
    found_s = expected(stats(num_decoding, num_blocks), num_decoding, ahead, own)
    assert (sum(prompts) + own) * PROMPT_TOKEN_S + FIXED_S <= found_s + 1e-9 < 1000


def test_an_answer_of_common_length_goes_on_for_the_mean_and_a_long_one_for_longer() -> None:
    assert tokens_left(20.0, 0, 1000) == tokens_left(20.0, 40, 1000) == 20
    assert tokens_left(20.0, 300, 1000) == 280
    assert tokens_left(20.0, 900, 1000) == 100
    assert tokens_left(20.0, 999, 1000) == 20


def test_drain_is_measured_while_somebody_waits() -> None:
    meter = DrainMeter()
    assert meter.seconds_for(5, 0.0) is None
    for i in range(11):
        meter.note(i * 0.5, is_empty=False)
    assert meter.seconds_for(8, 5.0) == pytest.approx(4.0)
    assert meter.seconds_for(8, 10.0) == pytest.approx(8.0)  # nobody has left since
    meter.note(11.0, is_empty=True)
    assert meter.seconds_for(8, 12.0) is None


def test_margin_settles_where_one_in_ten_is_late() -> None:
    """Of waits from 0.1 to 2 times the estimate, evenly: at 1.8 times, within the last step or two."""
    margin = Margin()
    for i in range(4000):
        margin.note(is_late=(i * 7 % 19 + 1) / 9.5 > margin.factor)
    assert 1.6 < margin.factor < 2.2


def test_margin_has_bounds() -> None:
    margin = Margin()
    for _ in range(1000):
        margin.note(is_late=True)
    assert margin.factor == MOST_MARGIN
    for _ in range(1000):
        margin.note(is_late=False)
    assert margin.factor == LEAST_MARGIN
