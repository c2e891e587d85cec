"""Decides what a step computes. Thread: engine.

Running decodes first, then, as far as the inter-token target allows, prompts: those that run and those that wait, in
one order. Who has to give way for it does: the paused, then those whom the queue's head outranks, then the least.
"""

import math
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter

from core.kv_cache import num_blocks_for
from core.plan import InFlight, PlanBuilder, RunnerLimits, StepPlan
from core.queue import Burst, Rank, aged_class, enough_of, outranked, rank, victim_order
from core.sequence import Sequence, SequenceState
from core.sequence_states import SequenceStates
from core.step_cost import PrefillAllowance, StepCostModel, allow_prefill
from core.types import Admitted

_NUM_COMPUTED_TOKENS: Callable[[Sequence], int] = attrgetter("num_computed_tokens")


class Planner:
    """Makes the plans, and counts whom it had to preempt for them.

    Args:
        inter_token_target: see EngineConfig.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        states: SequenceStates,
        in_flight: InFlight,
        step_cost: StepCostModel,
        inter_token_target: float | None,
    ) -> None:
        self.num_preemptions = 0
        self._limits = limits
        self._states = states
        self._in_flight = in_flight
        self._step_cost = step_cost
        self._inter_token_target = inter_token_target
        self._burst = Burst()
        self._burst_allowance = PrefillAllowance(step_cost, math.inf)
        self._is_short = False  # of blocks or slots that those in flight may have to give up

    def plan(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed now. Every plan must come back to apply(), in order.

        With a step in flight, None too where it has to come back first: somebody may have to give way, and whoever it
        is may be in it.
        """
        has_flights = bool(self._in_flight)  # a step that has not come back
        if has_flights and (self._is_short or self._in_flight.has_suspects):
            return None
        self._states.now_s = now
        self._is_short = False
        builder = PlanBuilder(self._limits.max_batch_tokens, self._limits.prompt_tile)
        self._make_room(builder, now)
        plain, others, behind = self._ready()
        if len(others) <= self._states.blocks.pool.num_free:  # each needs a block at most
            self._add_decodes(builder, plain, others)
        elif has_flights:
            return None
        else:  # some may have to give way: in turn, so that they are not in the plan before those who need blocks
            self._add_decodes_in_turn(builder, [*plain, *others])
        num_coming = len(behind) + min(len(self._states.waiting), len(self._states.free_slots))
        allowance = allow_prefill(self._step_cost, self._inter_token_target, builder.work, num_coming)
        if self._burst.is_on or (self._inter_token_target is not None and not builder.work.own_tokens):
            self._burst.look(builder.sequences if builder.work.own_tokens else (), now)
        num_reserved = len(builder.sequences)  # blocks, which the decodes need within 16 steps
        self._catch_up(builder, allowance, behind, num_reserved, now)
        plan = builder.build()
        if plan is not None:
            plan.host_copies = self._states.blocks.host.take_copies()
            self._in_flight.send(plan, builder, now, self._states.suspects)
        return plan

    def _ready(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """Who can compute something now: those that decode on, others that need one token alone, and those behind."""
        plain: list[Sequence] = []
        others: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in self._states.running:
            if sequence.num_computed_tokens < sequence.plain_end:
                plain.append(sequence)
            elif not (sequence.is_paused or (sequence.num_in_flight and self._has_to_land(sequence))):
                is_decode = len(sequence.token_ids) + sequence.num_pending == sequence.num_computed_tokens + 1
                (others if is_decode else behind).append(sequence)
        return plain, others, behind

    def _has_to_land(self, sequence: Sequence) -> bool:
        """Whether a sequence in flight is not to be computed further yet.

        It ends with what is in flight, or computes it again, or its siblings fork from it where it is now: what it
        writes next is not theirs.
        """
        if sequence.is_lost or sequence.cancel_reason is not None:
            return True
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return False
        if len(sequence.token_ids) + sequence.num_pending >= sequence.max_length:
            return True
        return sequence.num_computed_tokens == sequence.num_prompt_tokens and self._states.leads(sequence)

    def _make_room(self, builder: PlanBuilder, now: float) -> None:
        """Preempt those whom the queue's head outranks, if that is what it takes to admit it."""
        found = self._states.waiting.head(now)
        if found is None:
            return
        head, level = found
        num_slots = len(self._states.joining(head)) - len(self._states.free_slots)
        num_blocks = self._states.blocks.num_to_admit(head) - self._states.blocks.pool.num_free
        if (num_slots <= 0 and num_blocks <= 0) or self._states.charges.bounds.rule_out(head, level):
            return
        self._states.charges.bounds.fit(self._states.running)
        candidates = outranked(self._states.running, head, level, self._states.shares.least_s(), now)
        giving_way = enough_of(candidates, num_slots, num_blocks, lambda s: len(self._states.joining(s)))
        if self._in_flight:
            self._is_short = bool(giving_way)
            return
        for sequence in giving_way:
            self._preempt(builder, sequence)

    def _admit(self, builder: PlanBuilder, sequence: Sequence, level: int, num_reserved: int) -> bool:
        """Give the queue's head its slots, and blocks for all its tokens and the next. False: not yet.

        The blocks are taken at once so that no prefill waits for blocks halfway.

        Args:
            level: its class, aged.
            num_reserved: blocks that others will need soon.
        """
        joining = self._states.joining(sequence)
        while len(joining) > len(self._states.free_slots) or not self._states.blocks.admit(sequence, num_reserved):
            if not self._preempt_paused(builder):
                return False
        self._states.waiting.admit(sequence, self._states.now_s)
        for member in joining:
            self._states.occupy_slot(member)
        sequence.level = level
        self._states.charges.prepay(sequence)
        self._states.start_running(sequence)
        group = self._states.groups[sequence.request_id]
        if not group.is_admitted:
            group.is_admitted = True
            self._states.outbox.marks.append(Admitted(sequence.request_id, self._states.now_s))
        return True

    def _preempt_paused(self, builder: PlanBuilder) -> bool:
        if self._states.num_paused == 0:
            return False
        paused = [sequence for sequence in self._states.running if sequence.is_paused and not sequence.is_in_flight]
        if paused:
            self._preempt(builder, max(paused, key=victim_order(self._states.shares.least_s())))
        return bool(paused)

    def _preempt(self, builder: PlanBuilder, victim: Sequence) -> None:
        """Let a sequence give way."""
        self.num_preemptions += 1
        # nobody else may get a copy's source in this plan: restart() may have to copy it once more
        assert not any(
            block in builder.sources and not self._states.blocks.pool.is_shared(block) for block in victim.table.blocks
        )
        self._states.requeue(victim)

    def _catch_up(
        self, builder: PlanBuilder, allowance: PrefillAllowance, behind: list[Sequence], num_reserved: int, now: float
    ) -> None:
        """Add chunks of those that are behind and of those that wait, the first in rank first, as far as allowed."""

        def rank_of(sequence: Sequence) -> Rank:
            return rank(sequence, aged_class(sequence.level, now - sequence.progress_s), now)

        behind.sort(key=rank_of, reverse=True)
        is_admitting = True
        while builder.budget > 0 and (self._burst.is_on or not allowance.is_spent):
            found = self._states.waiting.head(now) if is_admitting else None
            if found is not None and behind and rank(*found, now) >= rank_of(behind[-1]):
                found = None
            if found is None and not behind:
                return
            sequence = behind[-1] if found is None else found[0]
            is_of_burst = self._burst.has(sequence)
            if allowance.is_spent and not is_of_burst:
                return
            if found is None:
                behind.pop()
            else:
                copying_s = self._states.blocks.host.planned_s
                is_admitting = self._admit(builder, *found, num_reserved)
                allowance.spend(self._states.blocks.host.planned_s - copying_s)
                if not is_admitting:
                    continue
            self._add_row(builder, sequence, self._burst_allowance if is_of_burst else allowance)
            if is_of_burst:  # all that the streams leave, and more
                self._burst.compute()
                allowance.use_up()

    def _add_decodes(self, builder: PlanBuilder, plain: list[Sequence], others: list[Sequence]) -> None:
        """Add a row for each, in as few operations as can be for those that have nothing to be looked at.

        Of siblings that share a block, the last writes in place what the others copied: the one that is furthest, so
        that it writes nothing that they have to copy again if the step is restarted.
        """
        builder.add_decodes(plain)
        if others:
            others.sort(key=_NUM_COMPUTED_TOKENS)
        for sequence in others:
            self._add_row(builder, sequence)

    def _add_decodes_in_turn(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """As _add_decodes, request by request, those that give way last first."""
        in_turn = sorted(sequences, key=victim_order(self._states.shares.least_s()))
        for _, siblings in groupby(in_turn, key=lambda sequence: sequence.request_id):
            plain: list[Sequence] = []
            others: list[Sequence] = []
            for sequence in siblings:
                (plain if sequence.num_computed_tokens < sequence.plain_end else others).append(sequence)
            self._add_decodes(builder, plain, others)

    def _add_row(self, builder: PlanBuilder, sequence: Sequence, allowance: PrefillAllowance | None = None) -> None:
        """
        Args:
            allowance: bounds how much it catches up; None: it needs one token.
        """
        if sequence.state is not SequenceState.RUNNING:  # preempted while this plan was made
            return
        start, length = sequence.num_computed_tokens, 1
        is_published = self._states.blocks.publish(
            sequence, start
        )  # the block that was filled since this was last asked
        if allowance is not None or not is_published:
            start = self._states.blocks.skip_cached(sequence)
        if allowance is not None:
            length = allowance.chunk(start, len(sequence.token_ids), sequence.num_prompt_tokens, builder.budget)
            if length == 0:
                return
            sequence.progress_s = self._states.now_s
        end = start + length
        if self._secure_blocks(builder, sequence, end):
            builder.add_row(sequence, start, length)
            if allowance is not None:
                self._states.blocks.publish(sequence, end)
            elif end > sequence.num_prompt_tokens:
                block_end = num_blocks_for(end, self._limits.block_size) * self._limits.block_size
                sequence.plain_end = min(block_end, sequence.max_length - 1)

    def _secure_blocks(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Let the sequence own all blocks it writes up to position `end`; False if it cannot yet or gave up its own."""
        while not self._states.blocks.own(builder, sequence, end):
            if self._in_flight:
                self._is_short = True
                return False
            order = victim_order(self._states.shares.least_s())
            victim = max((candidate for candidate in self._states.running if not candidate.is_in_flight), key=order)
            self._preempt(builder, victim)
            if victim is sequence:
                return False
        return True
