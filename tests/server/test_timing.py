"""A request's clock: whatever it is told, and in whichever order, its stages are its time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types import Admitted, Prefilled
from server.observing.timing import Stage, StageClock, StageMarks

SECONDS = st.floats(0, 1e7, allow_nan=False)
ENTERED = st.sampled_from([stage for stage in Stage if stage is not Stage.DETOKENIZE])  # which is a share of DECODE
MARKS = st.one_of(
    st.builds(Admitted, st.just("r"), SECONDS),
    st.builds(Prefilled, st.just("r"), SECONDS, st.integers(1, 9), st.integers(0, 99)),
)


@given(SECONDS, st.lists(st.one_of(st.tuples(ENTERED, SECONDS), MARKS)), SECONDS, st.floats(0, 1e3))
def test_stages_are_the_whole_time_whatever_it_is_told(
    accepted_s: float, events: list[object], end_s: float, detokenize_s: float
) -> None:
    clock = StageClock(accepted_s)
    for event in events:
        if isinstance(event, tuple):
            clock.enter(*event)
        else:
            assert isinstance(event, Admitted | Prefilled)
            clock.on_engine_mark(event)
        assert sum(clock.stages_ns().values()) == clock.total_ns
    clock.detokenize_s = detokenize_s
    clock.finish(end_s)
    stages = clock.stages_ns()
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == clock.total_ns
    assert clock.stage is None
    clock.enter(Stage.SETTLE, end_s + 1)  # its engine ends later than its account, which is kept
    assert clock.stages_ns() == stages


def test_a_stage_entered_twice_is_told_once_with_both_times() -> None:
    clock = StageClock(1.0)
    for stage, at_s in ((Stage.QUOTA, 1.5), (Stage.BODY, 1.75), (Stage.QUOTA, 2.0), (Stage.QUEUE, 2.5)):
        clock.enter(stage, at_s)
    assert clock.stages_ms() == {"head": 500.0, "quota": 750.0, "body": 250.0}
    assert clock.stage is Stage.QUEUE


def test_marks_of_the_engine_part_queue_and_prefill() -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.QUEUE, 1.0)
    clock.on_engine_mark(Admitted("r", 3.0))
    clock.on_engine_mark(Prefilled("r", 3.5, num_chunks=2, num_cached_tokens=16))
    clock.enter(Stage.FIRST_FLUSH, 3.6)
    clock.first_token_s = 3.6
    assert clock.stages_ms() == {"head": 1000.0, "queue": 2000.0, "prefill": 500.0, "first_token": 100.0}
    assert b'prefill;dur=500.000;desc="chunks=2 cached=16"' in clock.server_timing()
    assert clock.details().items() >= {"ttft": 3600.0, "prefill_chunks": 2, "cached_tokens": 16}.items()


@pytest.mark.parametrize(("is_told", "stages"), [(True, {"first_token": 2.5, "decode": 0.5}), (False, {"decode": 3.0})])
def test_tokens_that_are_told_at_the_end_were_decoded_before(is_told: bool, stages: dict[str, float]) -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.QUEUE, 0.0)
    clock.on_engine_mark(Admitted("r", 0.0))
    clock.on_engine_mark(Prefilled("r", 1.0, num_chunks=1, num_cached_tokens=0))
    clock.begin_decode(Stage.DECODE, 3.5, is_told)
    clock.finish(4.0)
    found = {stage: ms / 1e3 for stage, ms in clock.stages_ms().items()}
    assert found == {"head": 0.0, "queue": 0.0, "prefill": 1.0, "detokenize": 0.0} | stages
    assert clock.first_token_s == (3.5 if is_told else 1.0)


def test_mark_of_a_request_that_has_been_given_up_changes_no_stage() -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.QUEUE, 1.0)
    clock.enter(Stage.SETTLE, 2.0)
    clock.on_engine_mark(Admitted("r", 2.5))
    clock.on_engine_mark(Prefilled("r", 2.75, 1, 0))
    assert clock.stage is Stage.SETTLE


def test_work_of_another_thread_is_taken_over_as_it_was_marked() -> None:
    times = iter((2.0, 2.25, 3.0))
    marks = StageMarks(lambda: next(times))
    for stage in (Stage.VALIDATE, Stage.TOKENIZE, Stage.OFFLOAD):
        marks.enter(stage)
    clock = StageClock(0.0)
    clock.enter(Stage.OFFLOAD, 1.0)
    clock.take_over(marks)
    clock.enter(Stage.QUOTA, 3.5)
    assert clock.stages_ms() == {"head": 1000.0, "offload": 1500.0, "validate": 250.0, "tokenize": 750.0}


def test_detokenize_is_a_part_of_the_decode() -> None:
    clock = StageClock(0.0)
    clock.enter(Stage.DECODE, 1.0)
    clock.enter(Stage.SETTLE, 2.0)
    clock.detokenize_s = 0.25
    assert clock.stages_ms() == {"head": 1000.0, "decode": 750.0, "detokenize": 250.0}
    clock.detokenize_s = 9.0
    assert clock.stages_ms() == {"head": 1000.0, "decode": 0.0, "detokenize": 1000.0}


def test_the_total_is_told_once_the_answer_is_ready() -> None:
    clock = StageClock(10.0)
    assert clock.server_timing() == b""
    clock.enter(Stage.ANSWER, 10.25)
    assert clock.server_timing() == b"head;dur=250.000"
    clock.enter(Stage.LAST_FLUSH, 11.1234567)
    assert clock.server_timing() == b"head;dur=250.000, answer;dur=873.457, total;dur=1123.457"
