from collections.abc import Generator

import pytest

from core.engine import IDLE_S, Engine, EngineBroken
from core.plan import DeviceError, RunnerLimits, StepPlan
from core.simulation import SimulatedRunner
from core.types import Cancel, ClearCache, FinishReason, Inspect, Message, Pause, Request, Submit, Usage
from tests.fakes import EngineUnderTest, FakeClock, FaultyRunner, make_request, raising_runner, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")

GUILTY = 999  # stands in prompts only


def faulty(error: Exception | None = None, fails: bool = False) -> tuple[EngineUnderTest, FaultyRunner]:
    """An engine whose runner raises at GUILTY, or reports the row."""
    limits = small_limits(vocab_size=999)
    raises_at = {} if error is None else {GUILTY: error}
    runner = FaultyRunner(limits, FakeClock(), raises_at, frozenset({GUILTY}) if fails else frozenset())
    return EngineUnderTest(limits, runner=runner), runner


def innocent_and_guilty() -> list[Request]:
    requests = [make_request(name, 4, arrival_s=i, max_tokens=6) for i, name in enumerate("abc")]
    return [*requests, make_request("guilty", prompt_ids=(5, GUILTY, 6), arrival_s=1.5)]


def test_request_is_generated_from_submit_to_its_terminal_chunk() -> None:
    under_test = EngineUnderTest(small_limits())
    request = make_request(num_prompt_tokens=40, max_tokens=7)
    under_test.send(Submit(request))
    under_test.run()
    assert under_test.log.tokens("a") == under_test.reference(request)
    assert under_test.log.terminal("a").usage == Usage(40, 7)


def test_step_without_work_says_so_and_delivers_nothing() -> None:
    under_test = EngineUnderTest(small_limits())
    assert under_test.step() is False
    assert under_test.log.deliveries == []


def test_end_without_a_step_is_delivered_at_once() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Submit(make_request()), Cancel("a", FinishReason.CANCELLED))
    assert under_test.step() is False
    assert under_test.log.terminal("a").finish_reason is FinishReason.CANCELLED


class SendingRunner(SimulatedRunner):
    """Puts a message into the inbox while its second step is computed."""

    def __init__(self, limits: RunnerLimits, message: Message) -> None:
        super().__init__(limits, clock=FakeClock(), cost=EngineUnderTest.cost)
        self.message = message
        self.under_test = EngineUnderTest(limits, runner=self)
        self.num_forwards = 0

    def forward(self, plan: StepPlan) -> StepPlan:
        self.num_forwards += 1
        if self.num_forwards == 2:
            self.under_test.send(self.message)
        return super().forward(plan)


@pytest.mark.parametrize("steps_in_flight", [1], indirect=True)
def test_cancel_that_arrives_during_the_step_ends_it_with_that_step() -> None:
    under_test = SendingRunner(small_limits(), Cancel("a", FinishReason.CANCELLED)).under_test
    under_test.send(Submit(make_request(num_prompt_tokens=6)))
    under_test.step(2)
    assert under_test.log.terminal("a").usage == Usage(6, 1)
    assert under_test.scheduler.pool.num_used == 0


def test_step_that_raises_fails_only_its_guilty_row() -> None:
    under_test, _ = faulty(ValueError("shape"))
    requests = innocent_and_guilty()
    under_test.send(*map(Submit, requests))
    under_test.run()
    terminal = under_test.log.terminal("guilty")
    assert (terminal.finish_reason, terminal.usage) == (FinishReason.ERROR, Usage(0, 0))
    assert "shape" not in (terminal.error or "")  # our insides are not the client's
    for request in requests[:3]:
        assert under_test.log.tokens(request.request_id) == under_test.reference(request)
    assert under_test.scheduler.pool.num_used == 0


def test_who_was_admitted_beside_a_guilty_row_does_not_count_on_what_it_should_have_written() -> None:
    limits = small_limits(max_batch_tokens=32, vocab_size=999)
    clock = FakeClock()
    runner = FaultyRunner(limits, clock, {GUILTY: ValueError("shape")})
    under_test = EngineUnderTest(limits, runner=runner, clock=clock)
    under_test.send(Submit(make_request("decodes", 4, 100)))
    for number in range(9):  # so that the step-cost model bounds what a step may compute beside it
        under_test.send(Submit(make_request(f"warm{number}", 8 + 3 * number, 1)))
        under_test.step(4)
    shared = (5, 6, 7, 8)
    sharing = make_request("shares", prompt_ids=(*shared, *range(40, 70)))
    under_test.send(Submit(make_request("guilty", prompt_ids=(*shared, GUILTY, *range(20)))), Submit(sharing))
    under_test.step()
    assert under_test.scheduler.step_cost.is_ready
    under_test.run()
    assert under_test.log.finish_reason("guilty") is FinishReason.ERROR
    assert under_test.log.tokens("shares") == under_test.reference(sharing)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_fault_that_does_not_return_fails_nobody(num_sequences: int) -> None:
    limits, runner = small_limits(), raising_runner(RuntimeError("passing trouble"), at=3)
    under_test = EngineUnderTest(limits, runner=runner(limits, EngineUnderTest.cost, FakeClock()))
    request = make_request("a", 5, num_sequences=num_sequences, max_tokens=6)
    under_test.send(Submit(request))
    under_test.run()
    for index in range(num_sequences):
        assert under_test.log.tokens("a", index) == under_test.reference(request, index)


def test_lost_device_answers_every_request_and_breaks_the_engine() -> None:
    under_test, _ = faulty(DeviceError("gone"))
    requests = innocent_and_guilty()
    under_test.send(*map(Submit, requests), Submit(make_request("queued", 30, arrival_s=9.0)))
    with pytest.raises(EngineBroken):
        under_test.run()
    for request_id in ("a", "b", "c", "guilty", "queued"):
        terminal = under_test.log.terminal(request_id)
        assert terminal.finish_reason is FinishReason.ERROR
        assert terminal.error
    assert under_test.scheduler.pool.num_used == 0


def test_a_device_that_is_lost_while_nothing_is_computed_breaks_the_engine() -> None:
    """It is looked for only then: while there are steps, they tell."""
    under_test = EngineUnderTest(small_limits())
    checks: list[int] = []

    def check() -> None:
        checks.append(len(under_test.log.tokens("a")))
        if len(checks) > 1:
            raise DeviceError("gone")

    scheduler, clock = under_test.scheduler, under_test.clock
    under_test.engine = Engine(scheduler, under_test.runner, clock, under_test.inbox, under_test.log, check=check)
    under_test.send(Submit(make_request("a", max_tokens=4)))
    under_test.run()
    assert checks == [4]
    with pytest.raises(EngineBroken):
        under_test.step()
    under_test.send(Submit(make_request("late")))
    with pytest.raises(EngineBroken):
        under_test.step()
    assert under_test.log.terminal("late").finish_reason is FinishReason.ERROR


def test_shutdown_ends_what_runs_what_waits_and_what_is_in_the_inbox() -> None:
    under_test = EngineUnderTest(small_limits(max_sequences=2))
    under_test.send(Submit(make_request("runs", num_sequences=2)), Submit(make_request("waits", arrival_s=1.0)))
    under_test.step(2)
    under_test.send(Submit(make_request("arrives")))
    under_test.engine.shutdown(FinishReason.CANCELLED)
    assert {under_test.log.terminal(name).finish_reason for name in ("runs", "waits", "arrives")} == {
        FinishReason.CANCELLED
    }
    assert under_test.scheduler.pool.num_used == 0


def test_idle_engine_whose_accounting_is_inconsistent_is_broken_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Submit(make_request("paused")), Pause("paused"))
    assert under_test.step() is False
    under_test.scheduler.pool.allocate(2)  # and nobody has them
    with pytest.raises(EngineBroken):
        under_test.step()
    assert under_test.log.terminal("paused").finish_reason is FinishReason.ERROR
    assert "blocks that are used, and held by sequences: 2 and 0" in caplog.text


@pytest.mark.parametrize("steps_in_flight", [1], indirect=True)
def test_inspection_is_answered_with_the_news_of_the_step_it_came_in() -> None:
    under_test = SendingRunner(small_limits(), Inspect(7)).under_test
    under_test.send(Submit(make_request(num_prompt_tokens=6)))
    under_test.run()
    snapshots = [delivery.snapshot for delivery in under_test.log.deliveries]
    assert [snapshot.serial for snapshot in snapshots if snapshot is not None] == [7]
    assert snapshots[1] is not None
    (live,) = snapshots[1].state["running"]
    assert (live["request_id"], live["num_tokens"], live["num_computed_tokens"]) == ("a", 8, 7)


def test_inspection_of_an_idle_engine_is_answered_at_once_and_after_what_was_asked_before_it() -> None:
    under_test = EngineUnderTest(small_limits())
    under_test.send(Submit(make_request(num_prompt_tokens=20)))
    under_test.run()
    under_test.send(Inspect(1))
    assert under_test.step() is False
    under_test.send(ClearCache(), Inspect(2), Inspect(3))
    assert under_test.step() is False
    before, after = (delivery.snapshot for delivery in under_test.log.deliveries[-2:])
    assert before is not None
    assert after is not None
    assert (before.serial, after.serial) == (1, 3)
    assert before.state["blocks"]["num_cached"] > after.state["blocks"]["num_cached"] == 0


class IdleWork:
    """Work of so many slices, that notes what becomes of it.

    Args:
        error: raised by the second slice.
    """

    def __init__(self, num_slices: int = 3, error: Exception | None = None) -> None:
        self.num_slices, self.error = num_slices, error
        self.told: list[str] = []

    def __call__(self) -> Generator[None]:
        try:
            for number in range(self.num_slices):
                if self.error is not None and number == 1:
                    raise self.error
                self.told.append(f"slice {number}")
                yield
            self.told.append("done")
        except GeneratorExit:
            self.told.append("closed")
            raise


def idle(work: IdleWork) -> EngineUnderTest:
    """An engine that has had a request, and none for just less than IDLE_S."""
    under_test = EngineUnderTest(small_limits())
    scheduler, clock = under_test.scheduler, under_test.clock
    under_test.engine = Engine(scheduler, under_test.runner, clock, under_test.inbox, under_test.log, idle_work=work)
    under_test.send(Submit(make_request("first")))
    under_test.run()
    assert under_test.engine.wait_s() == IDLE_S
    clock.now += IDLE_S - 1
    assert under_test.step() is False
    assert under_test.engine.wait_s() == pytest.approx(1)
    assert work.told == []
    return under_test


def test_an_idle_engine_does_its_own_work_once_after_each_busy_phase_and_is_quiet_then() -> None:
    work = IdleWork()
    under_test = idle(work)
    once = ["slice 0", "slice 1", "slice 2", "done"]
    for times in (1, 2):
        under_test.clock.now += IDLE_S
        assert [under_test.step() for _ in range(4)] == [True, True, True, False]
        assert work.told == once * times
        assert under_test.engine.wait_s() is None
        under_test.clock.now += 100 * IDLE_S
        under_test.send(Inspect(1))  # no request
        assert under_test.step() is False
        assert under_test.engine.wait_s() is None
        under_test.send(Submit(make_request(f"later{times}")))
        under_test.run()
    assert work.told == once * 2
    assert under_test.engine.wait_s() == IDLE_S


def test_a_request_that_comes_amid_idle_work_is_computed_at_the_next_step_and_ends_the_work() -> None:
    work = IdleWork()
    under_test = idle(work)
    under_test.clock.now += 1
    assert under_test.step() is True
    request = make_request("comes")
    under_test.send(Submit(request))
    under_test.step()
    assert work.told == ["slice 0", "closed"]
    under_test.run()
    assert under_test.log.tokens("comes") == under_test.reference(request)
    assert under_test.step() is False
    assert work.told == ["slice 0", "closed"]
    under_test.clock.now += IDLE_S
    under_test.run()
    assert work.told[2:] == ["slice 0", "slice 1", "slice 2", "done"]


def test_no_idle_work_is_done_beside_a_request_that_is_paused() -> None:
    work = IdleWork()
    under_test = idle(work)
    under_test.clock.now += 1
    assert under_test.step() is True
    under_test.send(Submit(make_request("paused")), Pause("paused"))
    assert under_test.step() is False
    assert work.told == ["slice 0", "closed"]
    under_test.clock.now += 10 * IDLE_S
    assert under_test.step() is False
    assert under_test.engine.wait_s() is None  # Resume or Cancel will come as a message
    under_test.send(Cancel("paused", FinishReason.CANCELLED))
    assert under_test.step() is False
    assert under_test.engine.wait_s() == IDLE_S
    assert work.told == ["slice 0", "closed"]


def test_idle_work_that_fails_is_logged_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    under_test = idle(IdleWork(error=ValueError("shape")))
    under_test.clock.now += 1
    assert [under_test.step() for _ in range(2)] == [True, False]
    assert "work of the idle engine failed" in caplog.text
    assert under_test.engine.wait_s() is None
    under_test.send(Submit(make_request("later")))
    under_test.run()
    assert under_test.log.finish_reason("later") is FinishReason.LENGTH


def test_a_device_that_is_lost_in_idle_work_breaks_the_engine() -> None:
    under_test = idle(IdleWork(error=DeviceError("gone")))
    under_test.clock.now += 1
    assert under_test.step() is True
    with pytest.raises(EngineBroken):
        under_test.step()
