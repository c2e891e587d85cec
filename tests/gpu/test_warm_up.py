"""What is loaded and compiled at start is what the first requests need: nobody's stream waits for it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from core.plan import StepPlan
from core.scheduler import Scheduler
from gpu.linear import MOST_FEW_ROWS
from gpu.loading import TIMED_CHUNKS, time_rows, warm_up
from gpu.runner import StepTicket
from tests.gpu.conftest import ENGINE, open_runner


@pytest.mark.parametrize("max_model_len", [None, 9])
def test_products_of_many_rows_and_of_few_and_logprobs_are_computed_once(
    max_model_len: int | None, model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(model_directory("llama3"), dataclasses.replace(ENGINE, max_model_len=max_model_len))
    plans, forward = [], runner.forward

    def noted(plan: StepPlan) -> StepTicket:
        plans.append(plan)
        return forward(plan)

    monkeypatch.setattr(runner, "forward", noted)
    warm_up(runner)
    prompt, decode = plans
    assert prompt.num_tokens == (8 if max_model_len else 2 * MOST_FEW_ROWS)
    assert (decode.num_tokens, int(decode.starts[0])) == (1, prompt.num_tokens)
    assert prompt.sequence_starts[0].sampling.num_logprobs == 1
    assert len(prompt.table_blocks) * 16 > prompt.num_tokens


def test_timed_rows_make_the_first_requests_steps_predictable(model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory("llama3"), ENGINE)
    limits = dataclasses.replace(runner.limits, timed_rows=time_rows(runner))
    scheduler = Scheduler(limits, (), lambda: 0)
    assert scheduler.step_cost.is_ready
    assert {row.end - row.start for row in limits.timed_rows} == {1, *TIMED_CHUNKS}
    assert all(row.took_s > 0 for row in limits.timed_rows)


def test_only_as_many_tokens_are_timed_as_there_is_room_for(model_directory: Callable[[str], Path]) -> None:
    runner = open_runner(model_directory("llama3"), dataclasses.replace(ENGINE, max_model_len=9))
    assert {row.end for row in time_rows(runner)} == {8, 9}
