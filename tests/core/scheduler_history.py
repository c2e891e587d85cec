"""A scheduler whose history is driven from outside, and what must hold after each call of it and at the end.

Drawn by tests/core/scheduler_machine.py.
"""

from collections import Counter, deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from core.blocks import Domain
from core.plan import RunnerLimits, SequenceStart, StepPlan
from core.preemption import RunningBounds, outranked
from core.scheduler import Scheduler
from core.sequence import Sequence, SequenceState
from core.simulation import CostModel, SimulatedClock, continuation, logprobs_after
from core.types import FinishReason, Request, Usage
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
        self.paused: set[str] = set()
        self.in_flight: deque[Sent] = deque()

    def all_sequences(self) -> list[Sequence]:
        return [sequence for sequences in self.sequences.values() for sequence in sequences]

    # After each call

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.scheduler.pool
        held = Counter(block for sequence in self.all_sequences() for block in sequence.table.blocks)
        assert all(pool._references[block] == held[block] for block in range(pool.num_blocks))
        assert len(pool._empty) + pool.num_kept + len(held) == pool.num_blocks
        assert set(pool._empty).isdisjoint(pool._kept)
        assert held.keys().isdisjoint(pool._kept)

    @invariant()
    def slots_are_conserved(self) -> None:
        occupied = [sequence.slot for sequence in self.all_sequences() if sequence.slot >= 0]
        assert sorted(occupied + self.scheduler._states.free_slots) == list(
            range(len(self.scheduler._states.occupants))
        )

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        live = [s for s in self.all_sequences() if s.state is not SequenceState.FINISHED]
        assert set(self.scheduler._states.running) == {s for s in live if s.state is SequenceState.RUNNING}
        unforked = {s for group in self.scheduler._states.groups.values() for s in group.unforked.values()}
        waiting = {s for s in live if s.state is SequenceState.WAITING and not s.is_paused} - unforked
        queues = self.scheduler._states.waiting._classes
        assert waiting == {s for queue in queues.values() for line in queue.tenants.values() for s in line}
        assert len(self.scheduler._states.waiting) == len(waiting)
        for queue in queues.values():
            due = {name: sorted(filter(_HAS_DEADLINE, line), key=_DUE_ORDER) for name, line in queue.tenants.items()}
            assert queue._due.tenants == {name: line for name, line in due.items() if line}
            assert queue._due._firsts == sorted((line[0] for line in due.values() if line), key=_DUE_ORDER)

    @invariant()
    def accounts_add_up(self) -> None:
        for tenant in self.scheduler.shares.tenants():
            requests = [g.request for g in self.scheduler._states.groups.values() if g.tenant is tenant]
            assert tenant.num_live == len(requests)
            running = [s for s in self.scheduler._states.running if s.tenant is tenant]
            assert tenant.num_running == len(running)
            assert abs(tenant.prepaid_s - sum(s.prepaid_s for s in running)) < 1e-9
            assert tenant.credit_s >= 0

    @invariant()
    def bounds_hold_for_all_that_run(self) -> None:
        bounds, exact = self.scheduler._states.charges.bounds, RunningBounds()
        exact.fit(self.scheduler._states.running)
        assert bounds.most_s >= exact.most_s - 1e-9
        assert bounds.most_running >= exact.most_running
        for priority, level in exact.least_levels.items():
            assert bounds.least_levels[priority] <= level
        found = self.scheduler._states.waiting.head(self.clock())
        if found is not None and bounds.rule_out(*found):
            assert not outranked(self.scheduler._states.running, *found, 0.0, self.clock())

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        holders = [s for s in self.all_sequences() if s.table.blocks]
        assert all(s.state is SequenceState.RUNNING or s.is_in_flight for s in holders)

    @invariant()
    def everyone_knows_what_is_in_flight(self) -> None:
        flights = list(self.scheduler._in_flight)
        assert [flight.plan for flight in flights] == [sent.plan for sent in self.in_flight]
        for sequence in self.all_sequences():
            rows = [
                (flight.plan, flight.sequences.index(sequence)) for flight in flights if sequence in flight.sequences
            ]
            assert sequence.num_in_flight == len(rows)
            assert sequence.num_pending == sum(bool(plan.samples[row]) for plan, row in rows)
            if sequence.state is not SequenceState.FINISHED:
                most = max(sequence.max_length, sequence.num_prompt_tokens + 1)  # max_tokens may be 0
                assert len(sequence.token_ids) + sequence.num_pending <= most

    @invariant()
    def no_parent_is_evicted_before_its_children(self) -> None:
        cache = self.scheduler.cache
        assert {cache._keys[block]: block for block in cache._blocks.values()} == cache._blocks
        evictable = list(cache.pool._kept)
        block_of = {serial: block for block, serial in enumerate(cache._serials) if serial}
        for i, block in enumerate(evictable):
            key = cache._keys[block]
            assert key is not None
            parent = key[0]
            if isinstance(parent, int) and parent in block_of:  # else it was forgotten: nobody finds the child either
                assert block_of[parent] not in evictable[:i]

    @invariant()
    def no_two_domains_share_a_block(self) -> None:
        for sequence in self.all_sequences():
            for block in sequence.table.blocks[: sequence.table.num_published]:
                serial = self.scheduler.cache._serials[block]
                if serial:
                    assert self.domains.setdefault(serial, sequence.table.domain) == sequence.table.domain

    # At the end

    def check_answer(self, request: Request) -> None:
        terminal = self.log.terminal(request.request_id)
        sequences = self.sequences[request.request_id]
        ends = Counter(c.index for c in self.log.chunks if c.request_id == request.request_id and c.finish_reason)
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
        ends = {c.finish_reason for c in self.log.chunks if c.request_id == request.request_id}
        if any(s.num_own_tokens for s in self.sequences[request.request_id]) or FinishReason.LENGTH in ends:
            assert len(told) == len(wanted)
