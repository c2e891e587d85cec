"""A scheduler whose history is driven from outside, and what must hold after each call of it and at the end.

Drawn by tests/core/scheduler_machine.py.
"""

from collections import Counter, deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from core.kv_cache import Domain
from core.plan import RunnerLimits, SequenceStart, StepPlan
from core.scheduler import Scheduler
from core.sequence import Sequence, SequenceState
from core.simulation import CostModel, SimulatedClock, continuation, logprobs_after, pooled_vector
from core.types import FinishReason, Pooling, Request, TokenChunk, Usage
from tests.core.kv_oracle import ChainCheckingRunner
from tests.fakes import DeliveryLog

EOS = 3
_HAS_DEADLINE, _DUE_ORDER = attrgetter("has_deadline"), attrgetter("due_order")


@dataclass(slots=True, eq=False)
class Sent:
    """A step in flight.

    Args:
        has_raised: when it was sent.
        failing: row that will be reported as failed.
    """

    plan: StepPlan
    has_raised: bool
    failing: int | None = None


class SchedulerHistory(RuleBasedStateMachine):
    """A scheduler, a simulated runner, and all that was asked of them and came of it."""

    def start(self, limits: RunnerLimits, has_prefix_cache: bool) -> None:
        self.limits = limits
        self.clock = SimulatedClock()
        self.runner = ChainCheckingRunner(self.limits, CostModel(), self.clock)
        self.scheduler = Scheduler(self.limits, (EOS,), lambda: 0, has_prefix_cache)
        self.domains: dict[int, Domain] = {}  # by serial of a publication: of those who held its block
        self.log = DeliveryLog()
        self.requests: dict[str, Request] = {}
        self.starts: dict[tuple[str, int], SequenceStart] = {}
        self.sequences: dict[str, list[Sequence]] = {}
        self.present: list[Sequence] = []  # those that have not ended, or that hold something
        self.paused: set[str] = set()
        self.in_flight: deque[Sent] = deque()

    # After each call

    @invariant()
    def everything_holds(self) -> None:
        self._forget_the_gone()
        self.blocks_are_conserved()
        self.slots_are_conserved()
        self.everyone_is_in_one_place()
        self.accounts_add_up()
        self.only_running_sequences_hold_blocks()
        self.everyone_knows_what_is_in_flight()
        self.no_parent_is_evicted_before_its_children()
        self.no_two_domains_share_a_block()

    def _forget_the_gone(self) -> None:
        """Who has ended and holds nothing. What it took all the same would be seen as held by nobody."""
        self.present = [
            s
            for s in self.present
            if s.state is not SequenceState.FINISHED or s.table.blocks or s.slot >= 0 or s.num_in_flight
        ]

    def blocks_are_conserved(self) -> None:
        pool = self.scheduler.pool
        held = [0] * pool.num_blocks
        for sequence in self.present:
            for block in sequence.table.held:
                held[block] += 1
        assert pool._references == held
        free = {*pool._empty, *pool._kept}
        assert len(free) == len(pool._empty) + len(pool._kept)
        assert free == {block for block, num_holders in enumerate(held) if not num_holders}
        self.window_blocks_are_conserved()

    def window_blocks_are_conserved(self) -> None:
        pool, windows = self.scheduler.pool, self.scheduler.pool.windows
        if windows is None:
            return
        num_holders = dict.fromkeys(windows._kept, 0)  # by block
        for table in (sequence.table for sequence in self.present):
            assert len(table.windows) == len(table.blocks)
            found = [index for index, one in enumerate(table.windows) if one != windows.no_block]
            assert table.num_seen == len(found)
            assert table.num_unseen <= min(found, default=len(table))
            for index in found:
                assert table.windows[index] == windows._attached[table.blocks[index]]
                num_holders[table.blocks[index]] = num_holders.get(table.blocks[index], 0) + 1
        assert windows._num_holders == num_holders
        assert windows._kept.keys() == {block for block, number in num_holders.items() if not number}
        assert all(pool.is_published(block) for block in windows._kept)
        assert sorted([*windows._free, *windows._attached.values()]) == list(range(windows.num_blocks))

    def slots_are_conserved(self) -> None:
        states = self.scheduler.states
        occupied = [sequence.slot for sequence in self.present if sequence.slot >= 0]
        assert sorted(occupied + states.free_slots) == list(range(len(states.occupants)))

    def everyone_is_in_one_place(self) -> None:
        states = self.scheduler.states
        assert states.running.keys() == {s for s in self.present if s.state is SequenceState.RUNNING}
        unforked = {s for group in states.groups.values() for s in group.unforked.values()}
        waiting = {s for s in self.present if s.state is SequenceState.WAITING and not s.is_paused} - unforked
        queues = states.waiting._classes
        queued = [s for queue in queues.values() for line in queue.tenants.values() for s in line]
        assert len(states.waiting) == len(queued) == len(waiting)
        assert waiting == set(queued)
        for queue in queues.values():
            due = {name: sorted(filter(_HAS_DEADLINE, line), key=_DUE_ORDER) for name, line in queue.tenants.items()}
            assert queue._due._tenants == {name: line for name, line in due.items() if line}
            assert queue._due._firsts == sorted((line[0] for line in due.values() if line), key=_DUE_ORDER)

    def accounts_add_up(self) -> None:
        states = self.scheduler.states
        alive = [group.tenant for group in states.groups.values()]
        running = [sequence.tenant for sequence in states.running]
        for tenant in self.scheduler.shares.tenants():
            assert tenant.num_live == alive.count(tenant)
            assert tenant.num_running == running.count(tenant)
            prepaid_s = sum([s.prepaid_s for s in states.running if s.tenant is tenant])
            assert abs(tenant.prepaid_s - prepaid_s) < 1e-9
            assert tenant.credit_s >= 0

    def only_running_sequences_hold_blocks(self) -> None:
        for sequence in self.present:
            if sequence.table.blocks:
                assert sequence.state is SequenceState.RUNNING or sequence.num_in_flight

    def everyone_knows_what_is_in_flight(self) -> None:
        flights = list(self.scheduler.in_flight)
        assert [flight.plan for flight in flights] == [sent.plan for sent in self.in_flight]
        samples = dict[Sequence, list[int]]()  # of each of its rows
        for flight in flights:
            assert len(set(flight.sequences)) == len(flight.sequences)
            for sequence, num_samples in zip(flight.sequences, flight.plan.samples.tolist(), strict=True):
                samples.setdefault(sequence, []).append(num_samples)
        assert samples.keys() <= set(self.present)
        for sequence in self.present:
            if sequence in samples:
                assert sequence.num_in_flight == len(samples[sequence])
                assert sequence.num_pending == sum(samples[sequence])
            else:
                assert sequence.num_in_flight == sequence.num_pending == 0
            if sequence.state is not SequenceState.FINISHED:
                most = max(sequence.max_length, sequence.num_prompt_tokens + 1)  # max_tokens may be 0
                assert len(sequence.token_ids) + sequence.num_pending <= most

    def no_parent_is_evicted_before_its_children(self) -> None:
        cache = self.scheduler.pool
        assert all(cache._keys[block] == key for key, block in cache._blocks.items())
        assert cache.num_published == sum(key is not None for key in cache._keys)
        earlier = set[int]()  # serials
        for block in cache._kept:
            key = cache._keys[block]
            assert key is not None
            is_whole = self.limits.window is None or self.limits.num_window_blocks is not None
            assert not is_whole or key[0] not in earlier
            earlier.add(cache._serials[block])

    def no_two_domains_share_a_block(self) -> None:
        serials = self.scheduler.pool._serials
        for sequence in self.present:
            table = sequence.table
            for block in table.blocks[table.num_dropped : table.num_published]:
                if serials[block]:
                    assert self.domains.setdefault(serials[block], table.domain) == table.domain

    # At the end

    def check_answer(self, request: Request) -> None:
        terminal = self.log.terminal(request.request_id)
        sequences = self.sequences[request.request_id]
        ends = Counter(chunk.index for chunk in self.log.chunks_of(request.request_id) if chunk.finish_reason)
        assert ends == Counter(range(max(1, len(sequences))))
        num_billed = 0
        for sequence in sequences:
            start = self.starts[request.request_id, sequence.index]
            expected = continuation(start, self.limits)
            delivered = self.log.tokens(request.request_id, sequence.index)
            assert delivered == expected[: len(delivered)]
            reason = self.log.finish_reason(request.request_id, sequence.index)
            num_drawn = len(delivered)
            if reason is FinishReason.STOP and sequence.num_own_tokens > len(delivered):
                assert expected[len(delivered)] == EOS
                num_drawn += 1
            if reason is FinishReason.LENGTH or num_drawn > len(delivered):
                assert num_drawn == len(expected)
            num_billed += num_drawn if sequence.num_tokens_kept is None else min(num_drawn, sequence.num_tokens_kept)
        assert terminal.usage is not None
        num_prompt_tokens = terminal.usage.num_prompt_tokens
        num_cached_tokens = terminal.usage.num_cached_tokens
        assert terminal.usage == Usage(num_prompt_tokens, num_billed, num_cached_tokens)
        assert num_cached_tokens <= max(0, num_prompt_tokens - 1)
        assert num_prompt_tokens <= len(request.prompt_ids)
        if any(sequence.num_own_tokens for sequence in sequences):
            assert num_prompt_tokens == len(request.prompt_ids)
        self.check_prompt_logprobs(request)
        if request.pooling is not None:
            self.check_vector(request, terminal)

    def check_vector(self, request: Request, terminal: TokenChunk) -> None:
        """Whole, or none at all."""
        assert self.log.tokens(request.request_id) == []
        if terminal.finish_reason is FinishReason.STOP and terminal.pooled:
            assert terminal.pooled == pooled_vector(np.array(request.prompt_ids, np.int32).tobytes())
            assert terminal.usage is not None
            assert terminal.usage.num_prompt_tokens == len(request.prompt_ids)
            assert request.pooling == Pooling("last") or not terminal.usage.num_cached_tokens
        else:  # the machine cancels with STOP, too
            assert not terminal.pooled

    def check_prompt_logprobs(self, request: Request) -> None:
        """Each position once, in order, and none of what was lost; all of them before any token."""
        told = self.log.prompt_logprobs(request.request_id)
        num_top = request.sampling.num_prompt_logprobs
        prompt = np.array(request.prompt_ids, np.int32)
        wanted = (
            []
            if num_top is None
            else [
                logprobs_after(prompt[:i].tobytes(), token_id, num_top)
                for i, token_id in enumerate(request.prompt_ids)
                if i
            ]
        )
        assert told == wanted[: len(told)]
        ends = {chunk.finish_reason for chunk in self.log.chunks_of(request.request_id)}
        if any(s.num_own_tokens for s in self.sequences[request.request_id]) or FinishReason.LENGTH in ends:
            assert len(told) == len(wanted)
