"""Prompts that come together, and the streams that they become. In steps and tokens of the simulated runner."""

import pytest

from core.plan import RunnerLimits
from core.queue import LONGEST_S, WINDOW_S
from core.simulation import CostModel
from core.types import Pause, Resume, Submit
from tests.fakes import EngineUnderTest, make_request

pytestmark = pytest.mark.usefixtures("steps_in_flight")

MAX_BATCH_TOKENS = 512
NUM_PROMPT = 253  # tokens: two of them fill a step
BOUND = 64  # tokens: beside a few streams, by the target
IDLE_S = 100.0


class BurstBench:
    """An engine whose step-cost model predicts, and in which nothing runs at first."""

    def __init__(
        self,
        max_sequences: int = 16,
        inter_token_target: float | None = 1.6,
        engine: type[EngineUnderTest] = EngineUnderTest,
    ) -> None:
        limits = RunnerLimits(1200, 16, max_sequences, MAX_BATCH_TOKENS, 5000, 1000)
        self.engine = engine(limits, has_prefix_cache=False, inter_token_target=inter_token_target)
        for number in range(12):
            self.engine.send(Submit(make_request(f"w{number}", 10 + 7 * number, 3)))
            self.engine.step(2)
        self.engine.run()
        assert self.engine.scheduler.step_cost.is_ready
        self.engine.clock.advance(IDLE_S)
        self.start_s = self.engine.clock()

    def send(
        self,
        name: str,
        num_prompt: int = NUM_PROMPT,
        max_tokens: int = 200,
        after_s: float = 0.0,
        priority: int = 0,
        num_sequences: int = 1,
    ) -> None:
        """A request that arrived so long after the engine was ready."""
        arrival_s = self.start_s + after_s
        request = make_request(
            name, num_prompt, max_tokens, arrival_s=arrival_s, priority=priority, num_sequences=num_sequences
        )
        self.engine.send(Submit(request))

    def step(self) -> int:
        """Returns how many tokens of prompts it computed."""
        before = self.engine.scheduler.stats().num_prompt_tokens
        self.engine.step()
        return self.engine.scheduler.stats().num_prompt_tokens - before

    def steps_to_first_tokens(self, names: list[str]) -> list[int]:
        found: dict[str, int] = {}
        for number in range(1, 1000):
            self.step()
            found.update({name: number for name in names if name not in found and self.engine.log.tokens(name)})
            if len(found) == len(names):
                return [found[name] for name in names]
        raise AssertionError(f"only {found} had a token")

    def stream(self, name: str) -> None:
        """Let this become a stream, and its burst be over."""
        self.send(name, num_prompt=20)
        while not self.engine.log.tokens(name):
            self.step()
        self.engine.clock.advance(2 * WINDOW_S)
        self.step()

    def prompt_tokens(self, num_steps: int) -> list[int]:
        return [self.step() for _ in range(num_steps)]


def test_burst_is_computed_in_as_many_steps_as_its_prompts_fill() -> None:
    bench = BurstBench()
    names = [f"b{number}" for number in range(8)]
    for number, name in enumerate(names):
        bench.send(name, after_s=number * WINDOW_S / 8)
    assert bench.steps_to_first_tokens(names) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_streams_of_a_burst_have_a_token_in_each_of_its_steps() -> None:
    bench = BurstBench()
    for number in range(8):
        bench.send(f"b{number}")
    bench.steps_to_first_tokens([f"b{number}" for number in range(8)])
    assert [len(bench.engine.log.tokens(f"b{number}")) for number in (0, 2, 4, 6)] == [4, 3, 2, 1]


def test_requests_of_several_sequences_are_a_burst_too() -> None:
    bench = BurstBench()
    names = [f"b{number}" for number in range(6)]
    for name in names:
        bench.send(name, num_sequences=2)
    assert max(bench.steps_to_first_tokens(names)) <= 4


def test_prompt_that_came_later_is_bound_by_the_burst() -> None:
    bench = BurstBench()
    bench.send("first")
    bench.step()
    bench.send("late", num_prompt=1000, after_s=1.1 * WINDOW_S)
    assert 0 < max(bench.prompt_tokens(10)) <= BOUND


def test_prompt_of_long_before_is_bound_by_the_stream_that_went_before_it() -> None:
    bench = BurstBench()
    bench.send("long", num_prompt=4000)
    bench.step()
    bench.send("short", num_prompt=20, after_s=1.5 * WINDOW_S)
    while not bench.engine.log.tokens("short"):
        assert bench.step() > BOUND
    bench.step()  # was sent before that token was read, where two are in flight
    assert 0 < max(bench.prompt_tokens(10)) <= BOUND


def test_stream_that_is_there_already_is_protected_from_a_burst() -> None:
    bench = BurstBench()
    bench.stream("old")
    for number in range(8):
        bench.send(f"b{number}", after_s=IDLE_S)
    assert 0 < max(bench.prompt_tokens(40)) <= 2 * BOUND  # for nine are about to decode


def test_stream_that_is_resumed_is_protected_from_the_burst_that_came_meanwhile() -> None:
    bench = BurstBench()
    bench.stream("old")
    bench.engine.send(Pause("old"))
    bench.step()
    bench.step()
    for number in range(8):
        bench.send(f"b{number}", after_s=IDLE_S)
    bench.step()
    assert bench.step() > BOUND
    bench.engine.send(Resume("old"))
    bench.step()
    assert 0 < max(bench.prompt_tokens(10)) <= 2 * BOUND


def test_who_came_together_but_waits_for_a_slot_is_bound_by_those_that_hold_them() -> None:
    bench = BurstBench(max_sequences=3)
    bench.send("b0", max_tokens=8)
    for number in range(1, 5):
        bench.send(f"b{number}")
    assert bench.steps_to_first_tokens(["b0", "b1", "b2"]) == [1, 1, 2]
    bench.engine.clock.advance(2 * WINDOW_S)
    later = []
    while not bench.engine.log.tokens("b3"):
        later.append(bench.step())
    assert sum(later) == NUM_PROMPT
    assert max(later) <= BOUND


class SlowEngine(EngineUnderTest):
    cost = CostModel(fixed_s=LONGEST_S / 100, token_s=LONGEST_S / 4 / MAX_BATCH_TOKENS)


def test_streams_give_way_for_a_bounded_time() -> None:
    bench = BurstBench(engine=SlowEngine)
    bench.send("short", num_prompt=20)
    bench.send("long", num_prompt=4900)
    chunks = bench.prompt_tokens(10)
    assert min(chunks[:4]) > BOUND
    assert 0 < max(chunks[6:]) <= BOUND


@pytest.mark.parametrize(("priority", "is_bound"), [(-1, True), (0, False), (1, False)])
def test_streams_give_way_to_no_lower_class(priority: int, is_bound: bool) -> None:
    bench = BurstBench()
    bench.send("stream", num_prompt=20)
    bench.step()
    bench.step()
    bench.send("other", num_prompt=2000, after_s=WINDOW_S / 2, priority=priority)
    bench.step()
    assert (bench.step() <= BOUND) is is_bound


def test_without_a_target_prompts_that_came_later_share_the_steps_of_a_burst() -> None:
    bench = BurstBench(inter_token_target=None)
    for number in range(3):
        bench.send(f"b{number}")
    bench.send("late", num_prompt=2000, after_s=10 * WINDOW_S)
    assert min(bench.prompt_tokens(4)) > BOUND
