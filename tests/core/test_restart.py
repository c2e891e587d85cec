"""Rows of a step that raised are computed again, whatever the step has left behind in blocks that they share."""

import numpy as np
import pytest

from core.plan import StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock
from tests.core.kv_oracle import ChainCheckingRunner
from tests.fakes import make_request, sequences_of, small_limits


def make_pair(num_blocks: int) -> tuple[Scheduler, ChainCheckingRunner]:
    limits = small_limits(num_blocks=num_blocks, block_size=4, max_batch_tokens=12, vocab_size=30)
    runner = ChainCheckingRunner(limits, CostModel(), SimulatedClock())
    return Scheduler(limits, eos_ids=(), seeds=lambda: 0), runner


def compute(scheduler: Scheduler, runner: ChainCheckingRunner) -> StepPlan:
    made = scheduler.plan(0.0)
    assert made is not None
    runner.sample(runner.forward(made))
    return made


@pytest.mark.parametrize("num_blocks", [12, 5])  # room for all, and so few that rows are added in turn
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_no_sibling_reads_what_another_wrote_in_a_step_that_raised(num_blocks: int, failing: int) -> None:
    scheduler, runner = make_pair(num_blocks)
    scheduler.submit(make_request(prompt_ids=tuple(range(10)), max_tokens=2, num_sequences=3))
    first = compute(scheduler, runner)
    scheduler.apply(first, runner.collect(first), 0.0)
    if num_blocks == 5:
        assert scheduler.pool.num_free < len(scheduler.states.running)
    made = compute(scheduler, runner)
    assert made.num_rows == 3
    assert len(set(made.copy_sources.tolist())) == 1  # they fork in the middle of a block
    drawn = runner.collect(made).token_ids
    runner.spoil(made, failing)
    for row in range(made.num_rows):
        restarted = scheduler.restart(made, range(row, row + 1))
        runner.sample(runner.forward(restarted))
        assert not runner.misled_rows
        np.testing.assert_array_equal(runner.collect(restarted).token_ids, drawn[row : row + 1])


def test_the_sibling_that_is_furthest_keeps_the_block_that_all_share() -> None:
    scheduler, runner = make_pair(num_blocks=12)
    scheduler.submit(make_request(prompt_ids=tuple(range(10)), max_tokens=2, num_sequences=3))
    first = compute(scheduler, runner)
    scheduler.apply(first, runner.collect(first), 0.0)
    made = compute(scheduler, runner)
    assert made.starts.tolist() == [9, 9, 10]
    leader = sequences_of(scheduler, made)[-1]
    assert made.copy_sources.tolist() == [leader.table.blocks[2]] * 2
