"""The simulator itself, and with it the scheduler's central property: nobody's tokens depend on their company."""

import pytest

from core.simulation import CostModel, SimulatedClock, SimulatedRunner, Simulation
from tests.fakes import EngineUnderTest, make_request, small_limits


def test_simulated_time_is_the_sum_of_the_steps_costs() -> None:
    requests = [make_request(num_prompt_tokens=20, max_tokens=3)]
    (trace,) = Simulation(small_limits(), CostModel(fixed_s=1.0, token_s=0.01), requests).run()
    assert trace.first_token_s == pytest.approx(1.16 + 1.04)
    assert trace.end_s == pytest.approx(1.16 + 1.04 + 1.01 + 1.01)


def test_gaps_are_the_steps_between_a_sequences_tokens() -> None:
    requests = [make_request("a", 20, 3), make_request("b", 4, 1, arrival_s=2.5)]
    (trace, lone) = Simulation(small_limits(), CostModel(fixed_s=1.0, token_s=0.01), requests).run()
    assert trace.gaps_s == pytest.approx([1.01, 1.05])  # the prompt of the other is in the second
    assert lone.gaps_s == []


def test_idle_time_is_jumped_over() -> None:
    requests = [make_request("a", 4, 1), make_request("b", 4, 1, arrival_s=100.0)]
    traces = Simulation(small_limits(), CostModel(1.0, 0.0), requests).run()
    assert [trace.end_s for trace in traces] == [1.0, 101.0]


def test_gate_lets_in_as_many_as_it_says() -> None:
    requests = [make_request(name, 4, 1) for name in "abc"]
    simulation = Simulation(
        small_limits(), CostModel(1.0, 0.0), requests, num_may_enter=lambda num_inside: 0 if num_inside else 2
    )
    assert [trace.end_s for trace in simulation.run()] == [1.0, 1.0, 2.0]


def test_runner_notices_a_row_without_a_block() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.scheduler.submit(make_request())
    made = under_test.scheduler.plan(0.0)
    assert made is not None
    made.table_slots, made.table_positions, made.table_blocks = (
        column[:1] for column in (made.table_slots, made.table_positions, made.table_blocks)
    )
    with pytest.raises(ValueError, match="no block"):
        SimulatedRunner(under_test.limits, CostModel(), SimulatedClock()).forward(made)
