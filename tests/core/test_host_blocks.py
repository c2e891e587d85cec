"""Evicted blocks on the host: what is copied when, found by whom, and what a failing step leaves of it."""

import struct
from dataclasses import replace

import pytest

from core.engine import Engine
from core.kv_cache import BlockCopies, BlockLabel, HostBlocks
from core.plan import StepPlan
from core.scheduler import Scheduler
from core.simulation import SimulatedRunner
from core.types import ClearCache, Message, StoreState, Usage
from tests.core.kv_oracle import ChainCheckingRunner, ask, checked_engine, usage
from tests.core.test_scheduler_machine import assert_slots_are_conserved
from tests.fakes import EngineUnderTest, FakeClock, FaultyRunner, small_limits

pytestmark = pytest.mark.usefixtures("steps_in_flight")

GUILTY = 999
A, B, C = (tuple(range(start, start + 22)) for start in (100, 200, 300))  # 22 tokens: 5 blocks and a half
SMALL = small_limits(num_blocks=7, num_host_blocks=30, max_batch_tokens=64)  # one of them at a time
KEY = ("", ""), b"tokens"


def make_engine(runner: SimulatedRunner | None = None) -> EngineUnderTest:
    return EngineUnderTest(SMALL, runner=runner or ChainCheckingRunner(SMALL, EngineUnderTest.cost, FakeClock()))


def run(under_test: EngineUnderTest, *messages: Message) -> None:
    for message in messages:
        under_test.send(message)
        under_test.run()
    assert_slots_are_conserved(under_test.scheduler.host)


def test_evicted_prompt_comes_back_from_the_host_with_the_same_tokens() -> None:
    under_test = make_engine()
    run(under_test, ask("a", A), ask("b", B), ask("c", A))
    assert under_test.log.tokens("a") == under_test.log.tokens("c") == under_test.reference(ask("c", A).request)
    assert usage(under_test, "c") == Usage(22, 5, 20)
    stats = under_test.scheduler.stats()
    assert (stats.num_restored_blocks, stats.num_recomputed_blocks, stats.num_host_blocks) == (5, 0, 30)
    assert stats.num_used_host_blocks == stats.num_offloaded_blocks


def test_what_was_restored_is_not_copied_out_again() -> None:
    under_test = make_engine()
    run(under_test, ask("a", A), ask("b", B))
    before = under_test.scheduler.stats().num_offloaded_blocks
    run(under_test, ask("c", A, max_tokens=1), ask("d", B, max_tokens=1), ask("e", A, max_tokens=1))
    assert under_test.scheduler.stats().num_offloaded_blocks - before <= 6  # what the first two had not lost yet


def test_blocks_that_are_dearer_to_copy_than_to_compute_are_computed_and_counted() -> None:
    limits = replace(SMALL, host_copy_s=1.0)
    under_test = checked_engine(limits)
    run(under_test, ask("a", A), ask("b", B), ask("c", A))
    assert under_test.log.tokens("c") == under_test.log.tokens("a")
    stats = under_test.scheduler.stats()
    assert (stats.num_restored_blocks, stats.num_recomputed_blocks) == (0, 5)
    assert usage(under_test, "c").num_cached_tokens == 0


def test_cleared_cache_is_not_found_on_the_host_either() -> None:
    under_test = make_engine()
    run(under_test, ask("a", A), ask("b", B), ClearCache(), ask("c", A))
    assert usage(under_test, "c").num_cached_tokens == 0
    run(under_test, ask("d", B))
    assert usage(under_test, "d").num_cached_tokens == 0


class DropLog:
    """A BlockStore that takes down what it has to drop, and keeps nothing."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def drop(self, slots: list[int]) -> None:
        self.slots += slots

    @property
    def state(self) -> StoreState:
        return StoreState(num_undeleted=len(self.slots), num_unwritten=2)

    def keep(self, copies: BlockCopies | None) -> None:
        """Nothing."""


def with_drop_log(under_test: EngineUnderTest) -> DropLog:
    store = DropLog()
    args = (under_test.scheduler, under_test.runner, under_test.clock, under_test.inbox, under_test.log)
    under_test.engine = Engine(*args, store)
    return store


def test_cleared_slots_are_dropped_at_once_though_no_step_comes() -> None:
    under_test = make_engine()
    store = with_drop_log(under_test)
    run(under_test, ask("a", A), ask("b", B))
    used = sorted(under_test.scheduler.host._slots.values())
    assert used
    under_test.send(ClearCache())
    assert not under_test.step()
    assert sorted(store.slots) == used


def test_slots_of_a_failed_row_are_dropped_with_its_step() -> None:
    under_test = make_engine(runner=FaultyRunner(SMALL, FakeClock(), fails_at=frozenset({GUILTY})))
    store = with_drop_log(under_test)
    run(under_test, ask("a", A), ask("b", B))
    assert not store.slots
    run(under_test, ask("c", (*A[:20], GUILTY)))
    assert store.slots


def test_slot_whose_copy_was_lost_is_dropped_for_it_had_held_another() -> None:
    host = offloaded(1)
    host.offload(6, BlockLabel(2, (("", ""), b"other")))
    host.take_copies()
    host.on_restart()
    assert host.take_dropped() == [0]
    host.on_applied(True, 0.0)
    assert host.num_used == 0


def test_block_forgotten_before_its_copy_was_planned_is_not_copied() -> None:
    host = HostBlocks(1)
    host.offload(0, BlockLabel(1, KEY))
    host.clear()
    assert host.take_copies() is None
    assert host.take_dropped() == [0]
    assert_slots_are_conserved(host)


def test_blocks_of_a_failed_row_are_forgotten_on_the_host_as_well() -> None:
    runner = FaultyRunner(SMALL, FakeClock(), fails_at=frozenset({GUILTY}))
    under_test = make_engine(runner=runner)
    run(under_test, ask("a", A), ask("b", B))
    run(under_test, ask("c", (*A[:20], GUILTY)))  # finds what a has left, and fails on it
    run(under_test, ask("d", B), ask("e", A))
    assert usage(under_test, "e").num_cached_tokens == 0


class FailingOnce(ChainCheckingRunner):
    """Raises in the given forward: before anything of it is done, or after all of it."""

    def __init__(self, num_before: int, is_done: bool) -> None:
        super().__init__(SMALL, EngineUnderTest.cost, FakeClock())
        self._num_before = num_before
        self._is_done = is_done
        self.failed: StepPlan | None = None

    def forward(self, plan: StepPlan) -> StepPlan:
        self._num_before -= 1
        if self._num_before != 0:
            return super().forward(plan)
        self.failed = plan
        if self._is_done:
            super().forward(plan)
        raise ValueError("shape")


@pytest.mark.parametrize("is_done", [True, False])
def test_step_that_fails_while_it_copies_out_loses_the_copies_alone(is_done: bool) -> None:
    runner = FailingOnce(6, is_done)  # five steps of a, then b's first
    under_test = make_engine(runner=runner)
    run(under_test, ask("a", A), ask("b", B), ask("c", A), ask("d", B))
    assert runner.failed is not None
    assert runner.failed.host_copies is not None
    for name, prompt in (("a", A), ("b", B), ("c", A), ("d", B)):
        assert under_test.log.tokens(name) == under_test.reference(ask(name, prompt).request)
    assert usage(under_test, "c").num_cached_tokens < 20  # its end was in the step that failed
    assert usage(under_test, "d").num_cached_tokens == 20


@pytest.mark.parametrize("is_done", [True, False])
def test_step_that_fails_while_it_copies_back_copies_again(is_done: bool) -> None:
    runner = FailingOnce(11, is_done)  # five steps of a, five of b, then c's first
    under_test = make_engine(runner=runner)
    run(under_test, ask("a", A), ask("b", B), ask("c", A))
    assert runner.failed is not None
    assert runner.failed.host_copies is not None
    assert len(runner.failed.host_copies.restores) == 5
    assert usage(under_test, "c").num_cached_tokens == 20
    assert under_test.log.tokens("c") == under_test.log.tokens("a")


def test_what_an_earlier_process_has_stored_is_found() -> None:
    stored: dict[int, BlockLabel] = {}

    class Recording(ChainCheckingRunner):
        def forward(self, plan: StepPlan) -> StepPlan:
            stored.update((plan.host_copies or BlockCopies()).labels)
            return super().forward(plan)

    runner = Recording(SMALL, EngineUnderTest.cost, FakeClock())
    first = make_engine(runner=runner)
    run(first, ask("a", A), ask("b", B))
    second = make_engine(runner=runner)
    second.scheduler = Scheduler(SMALL, (), lambda: 0, stored=list(stored.items()))
    second.engine._scheduler = second.scheduler
    run(second, ask("c", A), ask("d", C), ask("e", A))
    assert usage(second, "c").num_cached_tokens == usage(second, "e").num_cached_tokens == 20
    assert second.log.tokens("c") == second.log.tokens("e") == first.log.tokens("a")


def test_at_the_end_what_is_used_on_the_device_keeps_its_slot() -> None:
    limits = replace(SMALL, num_blocks=9, num_host_blocks=6)
    under_test = checked_engine(limits)
    run(under_test, ask("a", A[:9], max_tokens=1), ask("b", C, max_tokens=12), ask("c", A[:9], max_tokens=1))
    host = under_test.scheduler.host
    assert under_test.scheduler.stats().num_restored_blocks == 2  # the first two of A: they lie here and there
    run(under_test, ask("d", (*A[:8], *range(500, 508)), max_tokens=1))  # finds them on the device
    assert host.num_used == host.num_slots
    lying = dict(host._slots)
    copies = under_test.scheduler.offload_kept()
    assert copies is not None
    prefix = [key for key in lying if key[1] in (struct.pack("4i", *A[:4]), struct.pack("4i", *A[4:8]))]
    assert len(prefix) == 2
    assert not {lying[key] for key in prefix} & copies.labels.keys()  # nothing is copied over it
    assert not set(prefix) & {label.key for label in copies.labels.values()}  # nor it a second time
    assert copies.labels.keys() == set(lying.values()) - {lying[key] for key in prefix}  # all others make room
    assert_slots_are_conserved(host)


def test_least_recently_used_slot_is_taken_and_never_one_that_is_copied_back() -> None:
    host = HostBlocks(2)
    for block, name in enumerate((b"x", b"y")):
        host.offload(block, BlockLabel(block + 1, (("", ""), name)))
    host.take_copies()
    host.on_applied(True, 0.0)
    host.pin([(("", ""), b"x")])
    host.restore(7, (("", ""), b"x"))
    host.offload(8, BlockLabel(3, (("", ""), b"z")))
    host.offload(9, BlockLabel(4, (("", ""), b"w")))  # finds no slot
    copies = host.take_copies()
    assert copies is not None
    assert (copies.offloads, copies.restores) == ({1: 8}, {7: 0})
    host.on_applied(True, 0.0)
    assert [host.has((("", ""), name)) for name in (b"x", b"y", b"z", b"w")] == [True, False, True, False]


def offloaded(num_slots: int = 2) -> HostBlocks:
    host = HostBlocks(num_slots)
    host.offload(0, BlockLabel(1, KEY))
    host.take_copies()
    host.on_applied(True, 0.0)
    return host


def test_copies_back_of_a_step_whose_rows_all_failed_are_left_to_the_next() -> None:
    host = offloaded()
    host.pin([KEY])
    host.restore(5, KEY)
    host.take_copies()
    host.on_restart()
    host.on_applied(False, 0.0)
    assert host.num_restored == 0
    copies = host.take_copies()
    assert copies is not None
    assert copies.restores == {5: 0}


def test_block_that_is_given_away_before_it_was_restored_is_not_written() -> None:
    host = offloaded()
    host.pin([KEY])
    host.restore(5, KEY)
    host.reuse((5,))
    copies = host.take_copies()
    assert copies is not None
    assert (copies.num_copies, copies.used) == (0, {0: None})


def test_slot_forgotten_while_it_is_copied_back_is_free_only_after_it() -> None:
    host = offloaded(1)
    host.pin([KEY])
    host.restore(5, KEY)
    host.forget([KEY])
    host.offload(6, BlockLabel(2, (("", ""), b"other")))
    copies = host.take_copies()
    assert copies is not None
    assert (copies.restores, copies.offloads) == ({5: 0}, {})
    assert host.take_dropped() == [0]
    assert host.num_used == 1
    host.on_applied(True, 0.0)
    assert host.num_used == 0


def test_measured_copies_move_the_time_of_one() -> None:
    host = HostBlocks(2, copy_s=1.0)
    host.offload(0, BlockLabel(1, KEY))
    host.take_copies()
    host.on_applied(True, 2.0)
    assert host.copy_s == pytest.approx(1.1)
    host.take_copies()
    host.on_applied(True, 0.0)
    assert host.copy_s == pytest.approx(1.1)
