"""The scheduler's machine, with one step in flight and with two, with host memory for evicted blocks and without it."""

from hypothesis import settings
from hypothesis.stateful import invariant

from core.kv_cache import HostBlocks, least_window_blocks
from tests.core.scheduler_machine import SHORT_HISTORIES, OverlapMachine, SchedulerMachine


def assert_slots_are_conserved(host: HostBlocks) -> None:
    """Each slot is free, can be found, is about to be, or is only busy with a copy: one of these."""
    leaving = [slot for slot, label in enumerate(host._labels) if label is None and host._num_copies[slot]]
    places = [*host._free, *host._slots.values(), *host._coming.values(), *leaving]
    assert sorted(places) == list(range(host.num_slots))
    assert host.num_used == host.num_slots - len(host._free)


class OffloadMachine(SchedulerMachine):
    num_host_blocks = 6

    @invariant()
    def everything_holds(self) -> None:
        super().everything_holds()
        assert_slots_are_conserved(self.scheduler.host)
        self.a_serial_names_one_content()

    def a_serial_names_one_content(self) -> None:
        """On the device and on the host: a hit on either goes on with the same blocks."""
        cache, host = self.scheduler.pool, self.scheduler.host
        for key in host._slots:
            block = cache._blocks.get(key)
            assert block is None or cache._serials[block] == host.serial_of(key)


class CrampedOffloadMachine(OffloadMachine):
    """Most of what is copied out is soon forgotten."""

    num_host_blocks = 2


class OverlapOffloadMachine(OffloadMachine):
    """Copies of two steps are on their way."""

    num_host_blocks = 4
    max_in_flight = 2


class RecurrentMachine(SchedulerMachine):
    """With recurrent layers, whose states are kept in fewer places than there are blocks."""

    num_kept_states = 3

    @invariant()
    def kept_states_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        kept, pool = self.scheduler.states.kept, self.scheduler.pool
        assert kept is not None
        written = [save.kept for sent in self.in_flight for save in sent.plan.state_saves]
        assert sorted([*kept._free, *kept._blocks, *kept._dropped, *written]) == list(range(kept.num_places))
        assert kept._places == {block: place for place, block in kept._blocks.items()}
        assert all(pool.is_published(block) for block in kept._places)
        sources = [s.state_source for s in self.present if s.state_source is not None and s.state_source >= 0]
        assert kept._num_readers == [sources.count(place) for place in range(kept.num_places)]


class RecurrentOverlapMachine(RecurrentMachine):
    max_in_flight = 2


class WindowMachine(OffloadMachine):
    """All layers see few tokens: blocks are given back while their sequence runs."""

    window = 3

    @invariant()
    def what_is_dropped_is_behind_the_window(self) -> None:
        for table in (s.table for s in getattr(self, "present", ())):
            no_blocks = [index for index, block in enumerate(table.blocks) if block == self.scheduler.pool.no_block]
            assert no_blocks == list(range(table.num_dropped))


class WindowOverlapMachine(WindowMachine):
    num_host_blocks = 0
    max_in_flight = 2


class MixedWindowMachine(SchedulerMachine):
    """Some layers see few tokens, others all: they have window blocks, too few for all that run."""

    window, num_spare_windows = 3, 2

    @invariant()
    def few_window_blocks_are_held(self) -> None:
        limits = getattr(self, "limits", None)
        if limits is not None and self.max_in_flight == 1:
            most = least_window_blocks(self.window, limits.max_batch_tokens, limits.block_size)
            assert all(sequence.table.num_seen <= most for sequence in self.present)


class WideMixedWindowMachine(MixedWindowMachine):
    window, num_spare_windows = 6, 12


class MixedWindowOverlapMachine(MixedWindowMachine):
    max_in_flight = 2


class PromptCacheMixedWindowMachine(MixedWindowMachine):
    window, max_in_flight, shares_answers = 5, 2, False


class PromptCacheMachine(OffloadMachine):
    """The cache keeps blocks of prompts alone: what is found in it was computed as prompts are."""

    shares_answers = False

    @invariant()
    def no_answer_is_shared(self) -> None:
        for sequence in getattr(self, "present", ()):
            assert sequence.table.num_published <= sequence.num_prompt_tokens // self.limits.block_size


class PromptCacheWindowMachine(PromptCacheMachine):
    window, max_in_flight = 3, 2


class PromptCacheRecurrentMachine(RecurrentMachine):
    shares_answers = False


MACHINES = (SchedulerMachine, OverlapMachine, OffloadMachine, CrampedOffloadMachine, OverlapOffloadMachine)  # by seed
MACHINES += (RecurrentMachine, RecurrentOverlapMachine, WindowMachine, WindowOverlapMachine)
MACHINES += (MixedWindowMachine, WideMixedWindowMachine, MixedWindowOverlapMachine, PromptCacheMixedWindowMachine)
MACHINES += (PromptCacheMachine, PromptCacheWindowMachine, PromptCacheRecurrentMachine)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SHORT_HISTORIES
TestOverlap = OverlapMachine.TestCase
TestOverlap.settings = SHORT_HISTORIES
TestOverlapOffload = OverlapOffloadMachine.TestCase
TestOverlapOffload.settings = settings(SHORT_HISTORIES, max_examples=50)
TestOffload = OffloadMachine.TestCase
TestOffload.settings = settings(SHORT_HISTORIES, max_examples=50)
TestCrampedOffload = CrampedOffloadMachine.TestCase
TestCrampedOffload.settings = settings(SHORT_HISTORIES, max_examples=25)
TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = settings(SHORT_HISTORIES, max_examples=60)
TestRecurrentOverlap = RecurrentOverlapMachine.TestCase
TestRecurrentOverlap.settings = settings(SHORT_HISTORIES, max_examples=40)
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(SHORT_HISTORIES, max_examples=50)
TestWindowOverlap = WindowOverlapMachine.TestCase
TestWindowOverlap.settings = settings(SHORT_HISTORIES, max_examples=50)
TestMixedWindow = MixedWindowMachine.TestCase
TestMixedWindow.settings = settings(SHORT_HISTORIES, max_examples=80)
TestWideMixedWindow = WideMixedWindowMachine.TestCase
TestWideMixedWindow.settings = settings(SHORT_HISTORIES, max_examples=60)
TestMixedWindowOverlap = MixedWindowOverlapMachine.TestCase
TestMixedWindowOverlap.settings = settings(SHORT_HISTORIES, max_examples=60)
TestPromptCacheMixedWindow = PromptCacheMixedWindowMachine.TestCase
TestPromptCacheMixedWindow.settings = settings(SHORT_HISTORIES, max_examples=40)
TestPromptCache = PromptCacheMachine.TestCase
TestPromptCache.settings = settings(SHORT_HISTORIES, max_examples=40)
TestPromptCacheWindow = PromptCacheWindowMachine.TestCase
TestPromptCacheWindow.settings = settings(SHORT_HISTORIES, max_examples=40)
TestPromptCacheRecurrent = PromptCacheRecurrentMachine.TestCase
TestPromptCacheRecurrent.settings = settings(SHORT_HISTORIES, max_examples=40)
