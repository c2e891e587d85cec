"""What bench/cancel.py makes of a server's record, and one short run of it against the real server."""

import pytest

from bench import memory
from bench.cancel import CallOff, Outcome, measure, outcome_of, table_of
from bench.null_server import EngineRecord, RequestRecord, RowRecord, StepRecord

STEPS = [StepRecord(begin_s, begin_s + 0.01) for begin_s in (1.00, 1.01, 1.02, 1.03)]


def record_of(rows: list[RowRecord], end_s: float, reason: str, num_kept: int = 0) -> EngineRecord:
    return EngineRecord(STEPS, {7: RequestRecord(rows, end_s, reason, num_kept)})


def test_what_ends_after_the_call_is_wasted_and_the_longest_step_meanwhile_is_allowed_for() -> None:
    rows = [RowRecord(0, 5, True), RowRecord(1, 1, True), RowRecord(2, 1, True)]
    outcome = outcome_of(CallOff("x", 7, 1.015), record_of(rows, 1.031, "cancelled"))
    assert outcome is not None
    assert outcome.latency_s == pytest.approx(0.016)
    assert outcome.step_s == pytest.approx(0.01)
    assert outcome.excess_s == pytest.approx(0.006)
    assert (outcome.num_wasted, outcome.num_prompt_tokens) == (2, 0)


def test_chunks_of_a_prompt_are_no_tokens_drawn() -> None:
    rows = [RowRecord(0, 512, False), RowRecord(1, 512, False)]
    outcome = outcome_of(CallOff("x", 7, 1.012), record_of(rows, 1.02, "cancelled"))
    assert outcome is not None
    assert (outcome.num_wasted, outcome.num_prompt_tokens) == (0, 512)


def test_stop_string_is_timed_from_the_step_that_drew_its_last_token() -> None:
    rows = [RowRecord(i, 1, True) for i in range(4)]
    outcome = outcome_of(CallOff("stop string", 7, None), record_of(rows, 1.035, "stop", num_kept=3))
    assert outcome is not None
    assert outcome.latency_s == pytest.approx(0.005)
    assert outcome.num_wasted == 1


@pytest.mark.parametrize(("end_s", "reason"), [(1.001, "cancelled"), (1.03, "length"), (0.0, "")])
def test_what_had_ended_by_itself_is_not_counted(end_s: float, reason: str) -> None:
    assert outcome_of(CallOff("x", 7, 1.015), record_of([RowRecord(0, 1, True)], end_s, reason)) is None
    assert outcome_of(CallOff("x", 8, 1.015), record_of([], end_s, reason)) is None


def test_table_counts_those_that_keep_the_promise() -> None:
    outcomes = [Outcome("a", 0.05, 0.01, 2, 0), Outcome("a", 0.07, 0.01, 0, 0), Outcome("b", 0.01, 0.01, 3, 0)]
    table = table_of(outcomes, "t")
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("a", 2, "1 of 2"),
        ("b", 1, "0 of 1"),
        ("all", 3, "1 of 3"),
    ]


@pytest.mark.slow
def test_every_way_of_calling_off_is_measured() -> None:
    kinds = {outcome.kind for outcome in measure(None, 8)}
    assert kinds == {
        "HTTP/1.1 end of connection",
        "HTTP/1.1 TCP reset",
        "DELETE",
        "stop string",
        "HTTP/2 RST_STREAM",
        "HTTP/2 GOAWAY",
        "HTTP/2 end of connection",
    }


def test_memory_beyond_the_cache_and_the_promise_is_told() -> None:
    looks = [memory.Look(0, 0.0, 0.0, 250 * 10**6)]
    looks += [memory.Look(count, 1.0, 1.0, size * 10**6) for count, size in ((10, 656), (20, 657))]
    assert [row[0::5] for row in memory.table_of(looks, "t").rows] == [(0, "yes"), (10, "yes"), (20, "no")]


@pytest.mark.slow
def test_a_mixed_load_is_answered_and_its_memory_looked_at() -> None:
    looks = memory.measure(memory.DEMO_MODEL, 12, 60.0, None)
    assert [look.num_requests for look in looks] == [0, 2, 4, 6, 8, 10, 12]
    assert all(look.size_bytes > 10**7 for look in looks)
