"""Two steps in flight give what one gives: tokens, usage, reasons. On simulated runners that fail as well."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from core.engine import EngineBroken
from core.plan import PENDING, DeviceError, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner, continuation
from core.types import Cancel, FinishReason, Submit, Usage
from tests.fakes import (
    EngineUnderTest,
    FakeClock,
    FaultyRunner,
    make_request,
    raising_runner,
    sequence_start,
    small_limits,
)
from tests.workload import Names, Outcome, Workload, WorkloadRun

EOS, RAISES, RAISES_LATE, FAILS = 3, 997, 998, 999  # the last three stand in prompts only
LIMITS = small_limits(num_blocks=22, max_sequences=6, max_batch_tokens=12, max_model_len=60, vocab_size=40)


class TroubledRunner(FaultyRunner):
    """Raises when a step with RAISES_LATE in it is collected, too; counts how it was used."""

    def __init__(self, limits: RunnerLimits, clock: SimulatedClock) -> None:
        super().__init__(limits, clock, {RAISES: ValueError("shape")}, frozenset({FAILS}))
        self.events: Counter[str] = Counter()
        self._num_sent = 0

    def forward(self, plan: StepPlan) -> StepPlan:
        ticket = super().forward(plan)
        self.events["pending"] += bool((plan.token_ids == PENDING).any())
        self.events["behind"] += self._num_sent > 0
        self._num_sent += 1
        return ticket

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._num_sent -= 1
        output = super().collect(ticket)
        if RAISES_LATE in ticket.token_ids:
            self.events["raised behind"] += self._num_sent
            raise RuntimeError("a result that cannot be read")
        return output


def draw_workload(rng: random.Random) -> Workload:
    """Shared prefixes, siblings, stop ids, readers that leave and stop, pauses, classes, guilty prompts."""
    stems = [[rng.randrange(4, 40) for _ in range(16)] for _ in range(3)]
    requests, pauses = [], {}
    stops, leaves = Names(), Names()
    for number in range(rng.randint(4, 24)):
        name = f"r{number}"
        prompt = stems[rng.randrange(3)][: rng.randint(0, 16)] + [
            rng.randrange(4, 40) for _ in range(rng.randint(1, 9))
        ]
        if rng.random() < 0.12:
            prompt.insert(rng.randrange(len(prompt) + 1), rng.choice((RAISES, RAISES_LATE, FAILS)))
        num_sequences, max_tokens = rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 25)
        request = make_request(
            name,
            max_tokens=max_tokens,
            prompt_ids=tuple(prompt),
            num_sequences=num_sequences,
            arrival_s=number * 1e-3,
            priority=rng.choice((0, 0, 0, 1, -2)),
            tenant=rng.choice("ab"),
            seed=rng.randrange(3),
            min_tokens=rng.choice((0, 0, 4)),
        )
        requests.append((rng.randrange(40), request))
        if rng.random() < 0.3:
            chosen = rng.choice((stops, leaves))
            chosen[name, rng.randrange(num_sequences)] = rng.randint(1, max_tokens)
        if rng.random() < 0.2:
            start = rng.randrange(60)
            pauses[name] = (start, start + rng.randint(1, 20))
    return Workload(requests, stops, leaves, pauses)


def run(workload: Workload, max_in_flight: int, events: Counter[str]) -> dict[str, Outcome]:
    clock = SimulatedClock()
    limits = replace(LIMITS, max_in_flight=max_in_flight)
    runner = TroubledRunner(limits, clock)
    scheduler = Scheduler(limits, (EOS,), lambda: 0)
    outcomes = WorkloadRun(workload, scheduler, runner, clock).run()
    assert scheduler.pool.num_used == 0
    events += runner.events
    events["preempted"] += scheduler.stats().num_preemptions
    return outcomes


def test_overlapped_steps_change_no_token_no_usage_and_no_reason() -> None:
    plain, overlapped = Counter[str](), Counter[str]()
    reasons = Counter[FinishReason | None]()
    for seed in range(60):
        workload = draw_workload(random.Random(seed))
        expected = run(workload, 1, plain)
        assert run(workload, 2, overlapped) == expected, f"seed {seed}"
        for _, request in workload.requests:
            for index, ending in enumerate(expected[request.request_id].endings):
                alone = continuation(sequence_start(request, (EOS,), index), LIMITS)
                assert ending.token_ids == alone[: len(ending.token_ids)]
                reasons[ending.reason] += 1
    assert plain["pending"] == plain["behind"] == 0
    assert min(plain["preempted"], overlapped["preempted"]) > 50
    assert overlapped["behind"] > 1000
    assert overlapped["pending"] > 1000
    assert overlapped["raised behind"] > 5
    assert min(reasons[reason] for reason in (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)) > 20


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineUnderTest, "max_in_flight", 2)


@pytest.mark.usefixtures("overlap")
class TestTwoInFlight:
    def test_second_step_is_sent_before_the_first_is_read_and_asks_for_its_token(self) -> None:
        scheduler = Scheduler(replace(small_limits(), max_in_flight=2), (), lambda: 0)
        scheduler.submit(make_request(prompt_ids=(10, 11, 12), max_tokens=3))
        first, second = scheduler.plan(0.0), scheduler.plan(0.0)
        assert first is not None
        assert second is not None
        assert (second.starts.tolist(), second.token_ids.tolist()) == ([3], [PENDING])
        assert second.samples.tolist() == [True]

    @pytest.mark.parametrize("num_prompt_tokens", [3, 4])  # its last token in a block of its own, or not
    def test_sequence_is_never_planned_past_its_last_token(self, num_prompt_tokens: int) -> None:
        under_test = EngineUnderTest(small_limits(block_size=4))
        request = make_request(num_prompt_tokens=num_prompt_tokens, max_tokens=2)
        under_test.send(Submit(request))
        under_test.run()
        assert under_test.scheduler.stats().num_rows == 2
        assert under_test.log.terminal("a").usage == Usage(num_prompt_tokens, 2)

    def test_row_past_a_stop_id_is_neither_told_nor_billed_and_its_tenant_pays_for_it(self) -> None:
        request = make_request(num_prompt_tokens=3, max_tokens=30)
        stop = continuation(sequence_start(request), small_limits())[2]
        under_test = EngineUnderTest(small_limits(), eos_ids=(stop,))
        under_test.send(Submit(request))
        under_test.step(3)
        terminal = under_test.log.terminal("a")  # told with the step that drew it
        assert terminal.usage == Usage(3, 3)
        assert under_test.scheduler.pool.num_used > 0  # which the row behind it still writes to
        (tenant,) = under_test.scheduler.shares.tenants()
        before_s = tenant.served_s
        under_test.run()
        stats = under_test.scheduler.stats()
        assert (stats.num_rows, stats.num_generated_tokens) == (4, 3)
        assert len(under_test.log.tokens("a")) == 2
        assert tenant.served_s > before_s
        assert terminal.cost.device_s < stats.device_s
        assert under_test.scheduler.pool.num_used == 0

    def test_cancel_ends_with_the_step_in_flight_and_frees_blocks_with_the_one_behind_it(self) -> None:
        under_test = EngineUnderTest(small_limits())
        under_test.send(Submit(make_request(num_prompt_tokens=6, max_tokens=50)))
        under_test.step(2)
        under_test.send(Cancel("a", FinishReason.CANCELLED))
        under_test.step()
        assert under_test.log.terminal("a").usage == Usage(6, 2)
        assert under_test.scheduler.pool.num_used == 0
        assert under_test.step() is False

    def test_device_lost_with_two_steps_in_flight_ends_everything_once(self) -> None:
        limits = small_limits()
        under_test = EngineUnderTest(
            limits, runner=raising_runner(DeviceError("gone"), 3)(limits, CostModel(), FakeClock())
        )
        under_test.send(*(Submit(make_request(name, 6, max_tokens=50)) for name in "abc"))
        under_test.step(2)
        with pytest.raises(EngineBroken):
            under_test.step()
        for name in "abc":
            assert under_test.log.terminal(name).finish_reason is FinishReason.ERROR
        assert under_test.scheduler.pool.num_used == 0
        with pytest.raises(EngineBroken):
            under_test.step()


def two_in_flight(**limits: int) -> Scheduler:
    return Scheduler(replace(small_limits(**limits), max_in_flight=2), (), lambda: 0)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def drew(*token_ids: int | None, failed: dict[int, str] | None = None) -> StepOutput:
    """What each row drew; None: nothing."""
    rows = [row for row, token_id in enumerate(token_ids) if token_id is not None]
    told = [token_id for token_id in token_ids if token_id is not None]
    return StepOutput(np.array(rows, np.int32), np.array(told, np.int32), failed_rows=failed or {})


def test_sequence_that_took_a_block_for_its_own_which_was_never_written_computes_all_again() -> None:
    """b is well in the step that fails for a; in the one behind it a's block has taken the place of b's own."""
    scheduler = two_in_flight(block_size=4, max_batch_tokens=4)
    scheduler.submit(make_request("a", prompt_ids=(10, 11, 12)))
    scheduler.apply(planned(scheduler), drew(7), 0.0)
    scheduler.submit(make_request("b", prompt_ids=(10, 11, 12, 7, 20)))
    first, second = planned(scheduler), planned(scheduler)
    assert (first.starts.tolist(), first.lengths.tolist()) == ([3, 0], [1, 3])
    assert (second.starts.tolist(), second.lengths.tolist()) == ([4, 4], [1, 1])
    scheduler.apply(first, drew(None, None, failed={0: "no logits"}), 0.0)
    assert scheduler.apply(second, drew(None, 9), 0.0).token_ids == []
    assert planned(scheduler).starts.tolist() == [0]


def test_block_that_ends_with_a_token_nobody_was_told_is_not_published() -> None:
    scheduler = two_in_flight(block_size=4)
    scheduler.submit(make_request("a", prompt_ids=(10, 11, 12)))
    first, second = planned(scheduler), planned(scheduler)  # the second fills the block
    scheduler.cancel("a", FinishReason.CANCELLED)
    scheduler.apply(first, drew(7), 0.0)
    scheduler.apply(second, drew(8), 0.0)
    assert (scheduler.pool.num_used, scheduler.pool.num_kept) == (0, 0)


def test_nothing_is_sent_behind_a_step_with_one_that_was_in_a_step_that_raised_until_it_has_drawn() -> None:
    scheduler = two_in_flight(max_batch_tokens=4)
    for name in "ab":
        scheduler.submit(make_request(name, num_prompt_tokens=4, max_tokens=9))
    assert [planned(scheduler).num_rows for _ in range(2)] == [1, 2]
    scheduler.lose_in_flight(0.0)
    alone = planned(scheduler)
    assert (alone.starts.tolist(), scheduler.plan(0.0)) == ([0], None)
    assert scheduler.apply(alone, drew(7), 0.0).token_ids == [7]
    both = planned(scheduler)  # a, which is innocent, and some of b, of which that is not known yet
    assert (both.starts.tolist(), scheduler.plan(0.0)) == ([4, 0], None)
    scheduler.apply(both, drew(8, None), 0.0)
    rest = planned(scheduler)
    scheduler.apply(rest, drew(9, 10), 0.0)
    assert planned(scheduler).num_rows == planned(scheduler).num_rows == 2


def test_sibling_that_copied_a_block_which_was_never_written_computes_all_again() -> None:
    """It forked from a leader that was cancelled in mid-prompt, and whose last chunk, still under way then, failed."""
    scheduler = two_in_flight(block_size=4, max_batch_tokens=8)
    scheduler.submit(make_request("a", prompt_ids=tuple(range(10, 20)), num_sequences=2))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.cancel("a", FinishReason.CANCELLED, index=0)
    scheduler.apply(first, drew(None), 0.0)
    third = planned(scheduler)
    assert (second.starts.tolist(), third.starts.tolist()) == ([8], [9])
    assert len(third.copy_sources) == 1  # of the block that the second is to write
    scheduler.apply(second, drew(None, failed={0: "no logits"}), 0.0)
    assert scheduler.apply(third, drew(7), 0.0).token_ids == []
    assert planned(scheduler).starts.tolist() == [0]


def test_device_never_waits_for_a_host_that_is_faster_than_it() -> None:
    """A step takes what the longer of both takes, not the sum."""
    cost, host_s, took_s = CostModel(fixed_s=0.010, token_s=0.0), 0.004, []
    for max_in_flight in (1, 2):
        clock = SimulatedClock()
        limits = replace(small_limits(), max_in_flight=max_in_flight)
        runner = SimulatedRunner(limits, cost, clock, host_s)
        request = make_request(num_prompt_tokens=3, max_tokens=50)
        WorkloadRun(Workload([(0, request)]), Scheduler(limits, (), lambda: 0), runner, clock).run()
        took_s.append(clock())
    assert took_s == pytest.approx([50 * 0.014, 0.004 + 50 * 0.010])
