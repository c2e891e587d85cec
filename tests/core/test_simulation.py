"""The simulator itself, and with it the scheduler's central property: nobody's tokens depend on their company."""

import random

import pytest

from core.plan import SequenceStart
from core.simulation import CostModel, SimulatedClock, SimulatedRunner, Simulation, continuation
from core.types import Request, Usage
from tests.fakes import EngineUnderTest, make_request, sequence_start, small_limits


def random_requests(seed: int, count: int = 60) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            f"r{i}",
            rng.randint(1, 40),
            rng.randint(1, 50),
            num_sequences=rng.choice((1, 1, 2, 4)),
            arrival_s=rng.uniform(0, 10),
            priority=rng.choice((0, 0, 0, 1)),
            min_tokens=rng.choice((0, 5)),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_chunked_batched_forked_and_preempted_requests_get_the_reference_tokens(seed: int) -> None:
    limits = small_limits(num_blocks=30, vocab_size=40)
    requests = random_requests(seed)
    simulation = Simulation(limits, CostModel(), requests, eos_ids=(7,))
    traces = {trace.request.request_id: trace for trace in simulation.run()}
    assert simulation.scheduler.stats().num_preemptions > 5
    for request in requests:
        starts = [sequence_start(request, (7,), i) for i in range(request.num_sequences)]
        drawn = [continuation(start, limits) for start in starts]
        trace = traces[request.request_id]
        texts = [without_end(tokens, start) for tokens, start in zip(drawn, starts, strict=True)]
        assert [trace.token_ids.get(i, []) for i in range(len(texts))] == texts
        assert trace.usage is not None
        num_cached = trace.usage.num_cached_tokens
        assert trace.usage == Usage(len(request.prompt_ids), sum(map(len, drawn)), num_cached)


def without_end(tokens: list[int], start: SequenceStart) -> list[int]:
    is_stopped = tokens[-1] in start.stop_ids and len(tokens) > start.sampling.min_tokens
    return tokens[:-1] if is_stopped else tokens


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


def test_same_seed_draws_the_same_and_another_seed_differs() -> None:
    limits = small_limits()
    same, other = make_request(max_tokens=20), make_request(max_tokens=20, seed=1)
    assert continuation(sequence_start(same), limits) == continuation(sequence_start(same), limits)
    assert continuation(sequence_start(same), limits) != continuation(sequence_start(other), limits)


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
