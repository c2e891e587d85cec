"""Stages of a request, as durations."""

from server.timing import Timings


def test_stages_not_passed_are_left_out() -> None:
    timings = Timings(head_s=10.0)
    assert (timings.stages_ms(), timings.server_timing(), timings.ttft_s) == ({}, b"", None)
    assert timings.elapsed_s == 0.0
    timings.body_s = 10.25
    assert timings.elapsed_s == 0.25
    assert timings.server_timing() == b"receive;dur=250.0"


def test_stages_follow_one_another_and_sum_to_the_total() -> None:
    timings = Timings(head_s=1.0, body_s=1.5, submitted_s=1.75, first_token_s=2.0, end_s=4.0)
    stages = timings.stages_ms()
    assert list(stages) == ["receive", "prepare", "first_token", "generate", "total"]
    assert sum(stages.values()) == 2 * stages["total"] == 6000
    assert timings.elapsed_s == 3.0
    assert timings.ttft_s == 1.0


def test_generation_that_ended_without_a_token_has_a_total_all_the_same() -> None:
    timings = Timings(head_s=1.0, body_s=1.0, submitted_s=1.0, end_s=1.1234567)
    assert timings.stages_ms() == {"receive": 0.0, "prepare": 0.0, "total": 123.457}
