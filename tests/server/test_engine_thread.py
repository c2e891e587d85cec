"""A real thread beside a real loop: what is posted is answered, and every way to end ends it. Nobody sleeps."""

import asyncio
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

import pytest

from core.engine import Engine, EngineBroken
from core.plan import DeviceError, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import Cancel, FinishReason, StepDelivery, Submit
from server.engine_thread import MAX_DELIVERIES, EngineThread, Inbox
from tests.fakes import DeliveryLog, make_request, raising_runner, small_limits

JOIN_S = 30  # for a thread that hangs; none waits so long


@dataclass
class Built:
    engine: Engine


class Events:
    """The thread's events, as futures on the loop.

    Args:
        on_delivered: called for each delivery.
    """

    on_delivered: Callable[[], None]

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Built] = loop.create_future()
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        self.on_ready, self.on_failed = self.ready.set_result, self.failed.set_result
        self.beat = asyncio.Event()
        self.log = DeliveryLog()
        self._ends: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def on_delivery(self, delivery: StepDelivery) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.log(delivery)
        for chunk in delivery.chunks:
            if chunk.is_terminal:
                self._ends[chunk.request_id].set()
        self.on_delivered()

    def on_beat(self, gil_wait_s: float) -> None:
        assert gil_wait_s >= 0
        assert threading.current_thread() is threading.main_thread()
        self.beat.set()

    async def wait_ended(self, request_id: str) -> None:
        await self._ends[request_id].wait()


def build_with(make_runner: Callable[..., SimulatedRunner] = SimulatedRunner) -> Callable[..., Built]:
    def build(inbox: Inbox, deliver: Callable[[StepDelivery], None]) -> Built:
        assert threading.current_thread().name == "engine"
        clock, limits = SimulatedClock(), small_limits()
        runner = make_runner(limits, CostModel(), clock)
        return Built(Engine(Scheduler(limits, (), lambda: 0), runner, clock, inbox, deliver))

    return build


def held(build: Callable[..., Built]) -> tuple[Callable[..., Built], threading.Event]:
    """A build that waits for the event."""
    may_build = threading.Event()

    def build_late(*args: Any) -> Built:
        may_build.wait()
        return build(*args)

    return build_late, may_build


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), JOIN_S))

    return run


def start(build: Callable[..., Built]) -> tuple[EngineThread, Events]:
    events = Events()
    thread = EngineThread(build, events, asyncio.get_running_loop())
    events.on_delivered = thread.on_delivered
    thread.start()
    return thread, events


def end(thread: EngineThread) -> None:
    thread.stop()
    assert thread.wait_stopped(JOIN_S)


@pytest.mark.parametrize("is_busy", [False, True])
@on_a_loop
async def test_requests_are_answered_and_stop_ends_a_thread_that_is_idle_or_busy(is_busy: bool) -> None:
    thread, events = start(build_with())
    await events.ready
    for name in "abcdefgh":
        thread.post(Submit(make_request(name)))
    for name in "abcdefgh":
        await events.wait_ended(name)
        assert events.log.terminal(name).finish_reason is FinishReason.LENGTH
    thread.post(Submit(make_request("late")))  # an idle engine wakes up
    await events.wait_ended("late")
    if is_busy:
        thread.post(Submit(make_request("long", max_tokens=190)))
    end(thread)
    assert not events.failed.done()


@on_a_loop
async def test_what_is_posted_before_it_is_built_is_answered_after() -> None:
    build, may_build = held(build_with())
    thread, events = start(build)
    thread.post(Submit(make_request("a")))
    thread.post(Submit(make_request("b", max_tokens=100)))
    thread.post(Cancel("b", FinishReason.CANCELLED))
    may_build.set()
    await events.wait_ended("a")
    await events.wait_ended("b")
    assert events.log.terminal("b").finish_reason is FinishReason.CANCELLED
    end(thread)


@on_a_loop
async def test_an_idle_thread_wakes_for_work_of_its_own_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.IDLE_S", 0.001)
    loop, slices, done = asyncio.get_running_loop(), list[str](), asyncio.Event()

    def work() -> Generator[None]:
        for _ in range(3):
            slices.append(threading.current_thread().name)
            yield
        loop.call_soon_threadsafe(done.set)

    def build(inbox: Inbox, deliver: Callable[[StepDelivery], None]) -> Built:
        limits = small_limits()
        runner = SimulatedRunner(limits, CostModel(), SimulatedClock())
        scheduler = Scheduler(limits, (), lambda: 0)
        return Built(Engine(scheduler, runner, time.monotonic, inbox, deliver, idle_work=work))

    thread, _ = start(build)
    await done.wait()
    assert slices == ["engine"] * 3
    end(thread)


class HeldRunner(SimulatedRunner):
    """Computes a step for each permit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_in_step = threading.Event()
        self.may_end = threading.Semaphore(0)

    def collect(self, ticket: StepPlan) -> StepOutput:
        self.is_in_step.set()
        self.may_end.acquire()
        return super().collect(ticket)


@on_a_loop
async def test_beat_is_given_at_once_by_an_idle_engine_and_after_its_step_by_a_busy_one() -> None:
    runners: list[HeldRunner] = []

    def make_runner(*args: Any) -> HeldRunner:
        runners.append(HeldRunner(*args))
        return runners[0]

    thread, events = start(build_with(make_runner))
    await events.ready
    thread.ask_for_beat()
    await events.beat.wait()
    events.beat.clear()
    thread.post(Submit(make_request("a", max_tokens=5)))
    await asyncio.to_thread(runners[0].is_in_step.wait)
    thread.ask_for_beat()
    assert not thread.wait_stopped(0)
    assert not events.beat.is_set()
    runners[0].may_end.release()  # one step of five: it is busy with the next
    await events.beat.wait()
    assert not events.log.terminals("a")
    runners[0].may_end.release(4)
    await events.wait_ended("a")
    end(thread)


@on_a_loop
async def test_engine_waits_for_a_loop_that_is_behind() -> None:
    """A step more than the loop has room for is computed, and none after it until a delivery has been handled."""
    loop, computed = asyncio.get_running_loop(), asyncio.Queue[int]()
    num_told = ahead = num_computed = 0

    class Counted(SimulatedRunner):
        num_steps = 0

        def collect(self, ticket: StepPlan) -> StepOutput:
            nonlocal ahead
            self.num_steps += 1
            ahead = max(ahead, self.num_steps - num_told)
            loop.call_soon_threadsafe(computed.put_nowait, self.num_steps)
            return super().collect(ticket)

    thread, events = start(build_with(Counted))
    events.on_delivered = lambda: None
    await events.ready
    thread.post(Submit(make_request("a", max_tokens=30)))
    while num_told < 30:
        while num_computed < min(num_told + MAX_DELIVERIES + 1, 30):
            num_computed = await computed.get()
        num_told += 1
        thread.on_delivered()
    await events.wait_ended("a")
    end(thread)
    assert ahead == MAX_DELIVERIES + 1


@on_a_loop
async def test_stop_while_it_is_built_ends_it_after() -> None:
    build, may_build = held(build_with())
    thread, events = start(build)
    thread.stop()
    assert not thread.wait_stopped(0)
    may_build.set()
    assert thread.wait_stopped(JOIN_S)
    await events.ready
    assert not events.log.deliveries


class StoppingEvent(threading.Event):
    """A wake-up before whose clearing a stop comes, as another thread's may at any time."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop = stop

    def clear(self) -> None:
        self._stop()
        super().clear()


@on_a_loop
async def test_stop_that_comes_just_before_the_wake_up_is_cleared_is_not_lost() -> None:
    thread = EngineThread(build_with(), Events(), asyncio.get_running_loop())
    thread._wake_up = StoppingEvent(thread.stop)
    thread.start()
    assert thread.wait_stopped(JOIN_S)


@on_a_loop
async def test_failure_to_build_is_told() -> None:
    def build(*args: Any) -> Built:
        raise FileNotFoundError("no weights")

    thread, events = start(build)
    assert isinstance(await events.failed, FileNotFoundError)
    assert thread.wait_stopped(JOIN_S)
    assert not events.ready.done()


@on_a_loop
async def test_broken_engine_ends_its_requests_before_its_failure_is_told() -> None:
    thread, events = start(build_with(raising_runner(DeviceError("gone"))))
    thread.post(Submit(make_request("a")))
    thread.post(Submit(make_request("b")))
    assert isinstance(await events.failed, EngineBroken)
    for name in "ab":
        assert events.log.terminal(name).finish_reason is FinishReason.ERROR
    assert thread.wait_stopped(JOIN_S)


def test_thread_ends_by_itself_when_the_loop_has_closed() -> None:
    build, may_build = held(build_with())
    threads: list[EngineThread] = []

    async def scenario() -> None:
        thread, _ = start(build)
        thread.post(Submit(make_request("a")))
        threads.append(thread)

    asyncio.run(scenario())
    may_build.set()
    assert threads[0].wait_stopped(JOIN_S)
