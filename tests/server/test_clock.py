"""One timer for many deadlines, in virtual time."""

import asyncio

import uvloop

from server.clock import DeadlineTimer
from tests.server.virtual_loop import VirtualTimeLoop


class Owner:
    """Has one deadline, and notes when it was told."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self.due: float | None = None
        self.told: list[float] = []
        self._loop = loop
        self.timer = DeadlineTimer(loop, lambda: self.due, self._on_due)

    def _on_due(self) -> None:
        self.told.append(self._loop.time())
        self.due = None


def test_deadline_moved_later_needs_no_new_timer(loop: VirtualTimeLoop) -> None:
    owner = Owner(loop)
    owner.due = 10.0
    owner.timer.arm()
    owner.due = 25.0
    owner.timer.arm()
    assert loop.next_timer() == 10.0
    loop.advance(24)
    assert owner.told == []
    loop.advance(5)
    assert owner.told == [25.0]
    assert loop.next_timer() is None


def test_deadline_moved_earlier_replaces_the_timer(loop: VirtualTimeLoop) -> None:
    owner = Owner(loop)
    owner.due = 10.0
    owner.timer.arm()
    owner.due = 3.0
    owner.timer.arm()
    loop.advance(20)
    assert owner.told == [3.0]


def test_deadline_that_is_gone_is_not_told(loop: VirtualTimeLoop) -> None:
    owner = Owner(loop)
    owner.due = 10.0
    owner.timer.arm()
    owner.due = None
    loop.advance(20)
    assert owner.told == []


def test_cancelled_timer_is_silent_until_armed_again(loop: VirtualTimeLoop) -> None:
    owner = Owner(loop)
    owner.due = 10.0
    owner.timer.arm()
    owner.timer.cancel()
    loop.advance(15)
    assert owner.told == []
    owner.timer.arm()
    loop.advance(0)
    assert owner.told == [15.0]


def test_timer_that_is_due_this_turn_may_be_armed_again(loop: VirtualTimeLoop) -> None:
    """As on uvloop, where the handle of a delay that rounds to 0 ms knows no time."""
    owner = Owner(loop)
    owner.due = loop.time() + 0.0003
    owner.timer.arm()
    owner.timer.arm()
    assert loop.next_timer() is None
    loop.settle()
    assert len(owner.told) == 1


def test_due_time_is_not_asked_of_the_loops_handle() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        due = loop.time()
        timer = DeadlineTimer(loop, lambda: None if told.done() else due, lambda: told.set_result(None))
        for _ in range(3):
            timer.arm()
        await told

    uvloop.run(scenario())
