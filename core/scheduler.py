"""Decides what each step computes, and what its result means. Thread: engine. No I/O; time and seeds are arguments.

A step lets sequences catch up on their tokens: running decodes first, then, as far as the inter-token target allows,
prompts: those that run and those that wait, in one order. Every submitted request ends with exactly one terminal
TokenChunk, from the last of its sequences. Sequences end in one place (finish), and blocks are released in one place
(_give_back).
"""

import heapq
import math
from collections.abc import Callable, Iterable
from itertools import groupby

from core.blocks import num_blocks_for
from core.charges import Charges
from core.config import INTER_TOKEN_TARGET
from core.counts import Counts, mark_of_chunk
from core.fairness import TenantShares
from core.in_flight import Flight, InFlight, blocks_reached
from core.inspection import SchedulerView
from core.intake import Intake
from core.outbox import Outbox
from core.plan import BlockCopies, BlockLabel, RunnerLimits, StepOutput, StepPlan
from core.plan_builder import PlanBuilder, restart_rows, rows_misled
from core.preemption import enough_of, outranked, victim_order
from core.sequence import ALL_SCORED, NO_SLOT, Sequence, SequenceGroup, SequenceState
from core.sequence_blocks import SequenceBlocks
from core.step_cost import PrefillAllowance, StepCostModel, StepWork, allow_prefill
from core.types import (
    Admitted,
    Cost,
    EngineStats,
    FinishReason,
    Request,
    StepDelivery,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from core.waiting import Rank, WaitingQueue, aged_class, rank


class Scheduler:
    """Sequences, their slots and their blocks, between the inbox and the runner.

    Args:
        limits: what the runner has room for.
        eos_ids: the model's own ends.
        seeds: draws a 64-bit seed for a request that names none.
        has_prefix_cache: requests use what others of their domain have computed.
        inter_token_target: see EngineConfig.
        stored: see HostBlocks.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: tuple[int, ...],
        seeds: Callable[[], int],
        has_prefix_cache: bool = True,
        inter_token_target: float | None = INTER_TOKEN_TARGET,
        stored: Iterable[tuple[int, BlockLabel]] = (),
    ) -> None:
        self.limits = limits
        num_slots = min(limits.max_sequences, limits.max_batch_tokens)  # so that every running decode has its token
        self._intake = Intake(limits, num_slots, eos_ids, seeds)
        self._free_slots = list(range(num_slots))  # a heap: low slots first keep the runner's rows dense
        self._occupants: list[Sequence | None] = [None] * num_slots
        self._groups: dict[str, SequenceGroup] = {}
        self.step_cost = StepCostModel()
        self.shares = TenantShares()
        self._charges = Charges(self.step_cost, limits.num_blocks)
        self._blocks = SequenceBlocks(limits, has_prefix_cache, self._charges.prefill_s, stored)
        self.cache, self.pool, self.host = self._blocks.cache, self._blocks.pool, self._blocks.host
        self._inter_token_target = inter_token_target
        self._waiting = WaitingQueue()  # neither paused ones nor unforked siblings
        self._running: dict[Sequence, None] = {}  # as they were admitted
        self._num_paused = 0
        self._planned_s = 0.0
        self._in_flight = InFlight(limits.max_in_flight)
        self._is_short = False  # of blocks or slots that those in flight may have to give up
        self._last_work = StepWork()  # of the step that came back last
        self._counts = Counts()
        self._outbox = Outbox(self.stats())

    # What the loop asks

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run is refused with a terminal ERROR chunk."""
        assert request.request_id not in self._groups, f"request {request.request_id} was submitted twice"
        cause = self._intake.cause_of_refusal(request)
        if cause is not None:
            self._outbox.chunks.append(
                TokenChunk(
                    request_id=request.request_id,
                    index=0,
                    finish_reason=FinishReason.ERROR,
                    usage=Usage(num_prompt_tokens=0, num_completion_tokens=0),
                    error=cause,
                )
            )
            return
        group = self._make_group(request)
        self._groups[request.request_id] = group
        assert group.leader is not None, "a request has a sequence"
        self._waiting.add(group.leader, request.arrival_s)

    def cancel(
        self, request_id: str, reason: FinishReason, index: int | None = None, num_tokens_kept: int | None = None
    ) -> None:
        """End a request, or one of its sequences. What is in flight is marked, and apply() finishes it.

        A sequence that has ended is not ended again, but until its request's terminal chunk its usage is still cut.
        Without an index, num_tokens_kept holds for each of the request's sequences.
        """
        group = self._groups.get(request_id)
        if group is None or (index is not None and not 0 <= index < len(group.sequences)):
            return
        chosen = group.sequences if index is None else [group.sequences[index]]
        for sequence in chosen:  # all before the first ends: the terminal chunk counts them all
            sequence.keep(num_tokens_kept)
        for sequence in reversed(chosen):  # the leader last, so that it is not handed on among those who leave too
            if not sequence.is_in_flight:
                self.finish(sequence, reason)
            elif sequence.cancel_reason is None:
                sequence.cancel_reason = reason

    def pause(self, request_id: str) -> None:
        """Leave the request out of the next plans. It keeps its blocks as long as nobody else needs them."""
        group = self._groups.get(request_id)
        if group is None or group.is_paused:
            return
        group.is_paused = True
        self._num_paused += 1
        for sequence in group.sequences:
            sequence.is_paused = True
            self._waiting.remove(sequence)

    def resume(self, request_id: str) -> None:
        """Let a paused request go on, from its old place in the queue."""
        group = self._groups.get(request_id)
        if group is None or not group.is_paused:
            return
        group.is_paused = False
        self._num_paused -= 1
        for sequence in group.sequences:
            sequence.is_paused = False
            if sequence.state is SequenceState.WAITING and sequence.index not in group.unforked:
                self._waiting.add(sequence, self._planned_s)

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed now. Every plan must come back to apply(), in order.

        With a step in flight, None too where it has to come back first: somebody may have to give way, and whoever it
        is may be in it.
        """
        has_flights = bool(self._in_flight)  # a step that has not come back
        if has_flights and (self._is_short or self._in_flight.has_suspects):
            return None
        self._planned_s = now
        self._is_short = False
        builder = PlanBuilder(self.limits.max_batch_tokens)
        self._make_room(builder, now)
        decodes, behind = self._ready()
        if has_flights and len([s for s in decodes if s.num_computed_tokens >= s.plain_end]) > self.pool.num_free:
            return None
        if has_flights or len(decodes) <= self.pool.num_free:
            self._add_decodes(builder, decodes)
        else:  # some may have to give way: in turn, so that they are not in the plan before those who need blocks
            in_turn = sorted(decodes, key=victim_order(self.shares.least_s()))
            for _, siblings in groupby(in_turn, key=lambda sequence: sequence.request_id):
                self._add_decodes(builder, list(siblings))
        num_coming = len(behind) + min(len(self._waiting), len(self._free_slots))
        allowance = allow_prefill(self.step_cost, self._inter_token_target, builder.work, num_coming)
        num_reserved = len(builder.sequences)  # blocks, which the decodes need within 16 steps
        self._catch_up(builder, allowance, behind, num_reserved, now)
        plan = builder.build()
        if plan is not None:
            plan.host_copies = self.host.take_copies()
            self._in_flight.send(plan, builder, now)
        return plan

    def _ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Who can compute something now: those that need their last token alone, and those that are behind."""
        decodes: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in self._running:
            if sequence.is_paused or (sequence.num_in_flight and self._has_to_land(sequence)):
                continue
            is_decode = len(sequence.token_ids) + sequence.num_pending == sequence.num_computed_tokens + 1
            (decodes if is_decode else behind).append(sequence)
        return decodes, behind

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
        return sequence.num_computed_tokens == sequence.num_prompt_tokens and self._leads(sequence)

    def _leads(self, sequence: Sequence) -> bool:
        """Whether siblings wait for it."""
        group = self._groups[sequence.request_id]
        return sequence is group.leader and bool(group.unforked)

    def offload_kept(self) -> BlockCopies | None:
        """No more steps come: what has to be copied out for all that nobody holds to be on the host."""
        self.cache.offload_kept()
        return self.host.take_copies()

    def restart(self, plan: StepPlan, rows: range) -> StepPlan:
        """These rows of a plan whose step failed, to be computed anew whatever the failed step has left behind.

        Args:
            plan: the only one in flight: what has been made behind it would have read what it did not write.
        """
        assert len(self._in_flight) == 1, "a later step is in flight"
        restarted = restart_rows(plan, rows, self._in_flight.find(plan).sequences[rows.start : rows.stop])
        restarted.host_copies = self.host.on_restart()
        return restarted

    def apply(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        """Take in what the oldest step in flight gave: tokens, forks, ends. Returns all news since the last delivery.

        What it computed for those who have ended or were lost since it was planned counts for nobody.
        """
        flight, step_s = self._in_flight.land(now)
        assert flight.plan is plan, "an older step has to come back first"
        sequences = flight.sequences
        misled, bystanders = set[int](), list[Sequence]()
        if output.failed_rows:
            misled, unwritten = rows_misled(plan, sequences, output.failed_rows, self.limits.block_size)
            bystanders = self._bystanders_misled(sequences, unwritten)
        lost = misled.union(output.failed_rows)
        self.host.on_applied(len(output.failed_rows) < len(sequences), output.host_copy_s)
        self._account(flight, step_s - output.host_copy_s)
        self._take_prompt_logprobs(flight, output, lost)
        self._advance(flight, lost, now)
        self._take_tokens(output, sequences, lost)
        for row in sorted(lost):
            self._lose_row(sequences[row], None if row in misled else output.failed_rows[row])
        for bystander in bystanders:
            self._compute_again(bystander)
        if flight.has_suspects:
            for row in set(output.rows.tolist()) - lost:
                sequences[row].is_suspect = False
        self._settle(sequences)
        return self._outbox.take(self.stats())

    def lose_in_flight(self, now: float) -> StepDelivery:
        """A step raised when its result was read, with another one behind it: neither is known to have done anything.

        Their sequences compute all again. From now on each step with one of them in it has to come back before the
        next is sent, until it has drawn a token: if one raises again, its rows can be computed one by one.
        """
        unwritten = self._in_flight.written_blocks(self.limits.block_size)
        for _ in self._in_flight:
            self.host.on_applied(is_computed=False, copy_s=0.0)
        lost = self._in_flight.abandon(now)
        for sequence in (*lost, *self._bystanders_misled(lost, unwritten)):
            sequence.is_suspect = True
            self._compute_again(sequence)
        self._settle(lost)
        return self._outbox.take(self.stats())

    def _settle(self, sequences: list[Sequence]) -> None:
        """After a step: end those who were cancelled meanwhile, and let go of what nothing in flight needs any more."""
        for sequence in sequences:
            if sequence.cancel_reason is not None:
                self.finish(sequence, sequence.cancel_reason)
            if sequence.num_in_flight:
                continue
            if sequence.state is SequenceState.FINISHED:
                self._give_back(sequence)
            elif sequence.is_lost:
                self._requeue(sequence)

    def flush(self) -> StepDelivery | None:
        """News that no step will bring: ends of what was not in flight, who is paused. None when there are none."""
        stats = self.stats()
        return self._outbox.take(stats) if self._outbox.has_news(stats) else None

    def stats(self) -> EngineStats:
        """A snapshot. Waiting is the queue's length, running are sequences that hold blocks, paused are requests."""
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_paused=self._num_paused,
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_used,
            num_cached_blocks=self.pool.num_kept,
            num_steps=self._counts.num_steps,
            num_rows=self._counts.num_rows,
            num_prefill_rows=self._counts.num_prefill_rows,
            num_prompt_tokens=self._counts.num_prompt_tokens,
            num_generated_tokens=self._counts.num_generated_tokens,
            num_preemptions=self._counts.num_preemptions,
            num_cache_queries=self._counts.num_cache_queries,
            num_cache_hits=self._counts.num_cache_hits,
            num_cache_evictions=self.pool.num_evictions,
            num_host_blocks=self.host.num_slots,
            num_used_host_blocks=self.host.num_used,
            num_offloaded_blocks=self.host.num_offloaded,
            num_restored_blocks=self.host.num_restored,
            num_recomputed_blocks=self.host.num_recomputed,
            block_bytes=self.limits.block_bytes,
            step_s=self._counts.step_s,
            step_cost_s=self.step_cost.rough_s,
            device_s=self._counts.device_s,
            kv_block_s=self._counts.kv_block_s,
            step_cost_error_p50=self.step_cost.error_p50,
            step_cost_error_p90=self.step_cost.error_p90,
        )

    def view(self) -> SchedulerView:
        """Its insides, to be looked at between two calls."""
        return SchedulerView(
            groups=self._groups,
            running=self._running,
            num_waiting=len(self._waiting),
            num_paused=self._num_paused,
            occupants=self._occupants,
            free_slots=self._free_slots,
            cache=self.cache,
            block_size=self.limits.block_size,
            last_work=self._last_work,
            last_step_s=self._counts.step_s,
            step_cost=self.step_cost,
            tenants=self.shares.tenants(),
        )

    def is_waiting(self, tenant: str) -> bool:
        """Whether a tenant has a sequence in the queue."""
        return self._waiting.is_waiting(tenant)

    # Ends

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        stop_logprobs: TokenLogprobs | None = None,
    ) -> None:
        """End a sequence and give back all it holds; the last of its request brings the terminal chunk. Idempotent.

        Whoever is in a step that has not come back keeps slot and blocks until then.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        group = self._groups[sequence.request_id]
        self._leave_siblings(group, sequence)
        self._waiting.remove(sequence)
        self._stop_running(sequence)
        sequence.state = SequenceState.FINISHED
        self._give_back(sequence)
        group.num_live -= 1
        is_last = group.num_live == 0
        self._outbox.chunks.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=sequence.index,
                stop_logprobs=stop_logprobs,
                finish_reason=reason,
                num_sequence_tokens=sequence.num_billed_tokens,
                usage=self._end_group(group) if is_last else None,
                cost=group.cost if is_last else Cost(),
                error=error if reason is FinishReason.ERROR else None,
            )
        )

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, those of steps that will never come back too."""
        abandoned = self._in_flight.abandon(self._planned_s)
        for group in list(self._groups.values()):
            for sequence in reversed(group.sequences):
                self.finish(sequence, sequence.cancel_reason or reason, error)
        for sequence in abandoned:  # some had ended before
            self._give_back(sequence)

    def _end_group(self, group: SequenceGroup) -> Usage:
        del self._groups[group.request.request_id]
        self.shares.leave(group.tenant)
        self._num_paused -= group.is_paused
        return Usage(
            num_prompt_tokens=group.num_prompt_tokens_done,
            num_completion_tokens=sum(sequence.num_billed_tokens for sequence in group.sequences),
            num_cached_tokens=group.num_cached_tokens,
        )

    def _leave_siblings(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Before a sequence ends: the siblings that count on it get another leader."""
        if group.unforked.pop(sequence.index, None) is None and sequence is group.leader and group.unforked:
            group.leader = heir = group.unforked.pop(next(iter(group.unforked)))
            heir.num_scored_tokens = sequence.num_scored_tokens
            if sequence.state is SequenceState.RUNNING:
                self._fork(sequence, heir)
            elif not group.is_paused:
                self._waiting.add(heir, self._planned_s)

    def _stop_running(self, sequence: Sequence) -> None:
        """It is no longer charged, nor preempted. It still holds what it has."""
        if sequence.state is SequenceState.RUNNING:
            del self._running[sequence]
            sequence.tenant.num_running -= 1
            self._charges.refund(sequence)
            sequence.plain_end = 0

    def _give_back(self, sequence: Sequence) -> None:
        """The one place where a sequence loses its slot and its blocks: after its end, or when it is preempted.

        Idempotent, and nothing is done while it is in flight: apply() comes back to it.
        """
        if sequence.num_in_flight or sequence.slot == NO_SLOT:
            return
        self._blocks.publish(sequence, min(sequence.num_computed_tokens, len(sequence.token_ids)))
        self.pool.release(sequence.table.take())
        self._occupants[sequence.slot] = None
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = NO_SLOT

    # Beginnings

    def _make_group(self, request: Request) -> SequenceGroup:
        latest_start_s = math.inf
        if request.deadline_s is not None:
            num_tokens = len(request.prompt_ids)
            latest_start_s = request.deadline_s - self._charges.prefill_s(0, num_tokens, num_tokens)
        tenant = self.shares.enter(request.tenant, request.share)
        return self._intake.make_group(request, tenant, latest_start_s)

    def _occupy_slot(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.is_started = False
        self._occupants[sequence.slot] = sequence

    def _start_running(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        sequence.progress_s = self._planned_s
        self._running[sequence] = None
        sequence.tenant.num_running += 1

    def _joining(self, sequence: Sequence) -> list[Sequence]:
        """Who needs a slot when this one is admitted."""
        group = self._groups[sequence.request_id]
        return [sequence, *group.unforked.values()] if sequence is group.leader else [sequence]

    def _admit(self, builder: PlanBuilder, sequence: Sequence, level: int, num_reserved: int) -> bool:
        """Give the queue's head its slots, and blocks for all its tokens and the next. False: not yet.

        The blocks are taken at once so that no prefill waits for blocks halfway.

        Args:
            level: its class, aged.
            num_reserved: blocks that others will need soon.
        """
        joining = self._joining(sequence)
        while len(joining) > len(self._free_slots) or not self._blocks.admit(sequence, num_reserved):
            if not self._preempt_paused(builder):
                return False
        self._waiting.admit(sequence, self._planned_s)
        for member in joining:
            self._occupy_slot(member)
        sequence.level = level
        self._start_running(sequence)
        self._charges.prepay(sequence)
        group = self._groups[sequence.request_id]
        if not group.is_admitted:
            group.is_admitted = True
            self._outbox.marks.append(Admitted(sequence.request_id, self._planned_s))
        return True

    def _make_room(self, builder: PlanBuilder, now: float) -> None:
        """Preempt those whom the queue's head outranks, if that is what it takes to admit it."""
        found = self._waiting.head(now)
        if found is None:
            return
        head, level = found
        num_slots = len(self._joining(head)) - len(self._free_slots)
        num_blocks = self._blocks.num_to_admit(head) - self.pool.num_free
        if num_slots <= 0 and num_blocks <= 0:
            return
        candidates = outranked(self._running, head, level, self.shares.least_s(), now)
        giving_way = enough_of(candidates, num_slots, num_blocks, lambda s: len(self._joining(s)))
        if self._in_flight:
            self._is_short = bool(giving_way)
            return
        for sequence in giving_way:
            self._preempt(builder, sequence)

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that has a slot go on where its parent is."""
        self._blocks.fork(parent, child)
        child.level = parent.level
        self._start_running(child)

    # Rows and their blocks

    def _catch_up(
        self, builder: PlanBuilder, allowance: PrefillAllowance, behind: list[Sequence], num_reserved: int, now: float
    ) -> None:
        """Add chunks of those that are behind and of those that wait, the first in rank first, as far as allowed."""

        def rank_of(sequence: Sequence) -> Rank:
            return rank(sequence, aged_class(sequence.level, now - sequence.progress_s), now)

        behind.sort(key=rank_of, reverse=True)
        is_admitting = True
        while builder.budget > 0 and not allowance.is_spent:
            found = self._waiting.head(now) if is_admitting else None
            if found is not None and (not behind or rank(*found, now) < rank_of(behind[-1])):
                head, level = found
                copying_s = self.host.planned_s
                is_admitting = self._admit(builder, head, level, num_reserved)
                allowance.spend(self.host.planned_s - copying_s)
                if is_admitting:
                    self._add_row(builder, head, allowance)
            elif behind:
                self._add_row(builder, behind.pop(), allowance)
            else:
                return

    def _add_decodes(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Add a row for each, in as few operations as can be where it only goes on within a block of its own.

        Those go first, for the others may read what they fill now. Of siblings that share a block, the last writes in
        place what the others copied: the one that is furthest, so that it writes nothing that they have to copy again
        if the step is restarted.
        """
        plain: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in sequences:
            position = sequence.num_computed_tokens
            if position < sequence.plain_end:
                plain.append(sequence)
                if position + 1 == sequence.plain_end:
                    self._blocks.publish(sequence, min(sequence.plain_end, len(sequence.token_ids)))
            else:
                others.append(sequence)
        builder.add_decodes(plain)
        for sequence in sorted(others, key=lambda sequence: sequence.num_computed_tokens):
            self._add_row(builder, sequence)

    def _add_row(self, builder: PlanBuilder, sequence: Sequence, allowance: PrefillAllowance | None = None) -> None:
        """
        Args:
            allowance: bounds how much it catches up; None: it needs one token.
        """
        if sequence.state is not SequenceState.RUNNING:  # preempted while this plan was made
            return
        start, length = sequence.num_computed_tokens, 1
        self._blocks.publish(sequence, start)  # a block that was filled with a token which nobody knew then
        if allowance is not None or self._blocks.is_behind(sequence, start):
            start = self._blocks.skip_cached(sequence)
        if allowance is not None:
            length = allowance.chunk(start, len(sequence.token_ids), sequence.num_prompt_tokens, builder.budget)
            if length == 0:
                return
            sequence.progress_s = self._planned_s
        end = start + length
        if self._secure_blocks(builder, sequence, end):
            builder.add_row(sequence, start, length)
            self._blocks.publish(sequence, min(end, len(sequence.token_ids)))
            sequence.plain_end = num_blocks_for(end, self.limits.block_size) * self.limits.block_size

    def _secure_blocks(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Let the sequence own all blocks it writes up to position `end`; False if it cannot yet or gave up its own."""
        while not self._blocks.own(builder, sequence, end):
            if self._in_flight:
                self._is_short = True
                return False
            order = victim_order(self.shares.least_s())
            victim = max((candidate for candidate in self._running if not candidate.is_in_flight), key=order)
            self._preempt(builder, victim)
            if victim is sequence:
                return False
        return True

    def _preempt_paused(self, builder: PlanBuilder) -> bool:
        if self._num_paused == 0:
            return False
        paused = [sequence for sequence in self._running if sequence.is_paused and not sequence.is_in_flight]
        if paused:
            self._preempt(builder, max(paused, key=victim_order(self.shares.least_s())))
        return bool(paused)

    def _preempt(self, builder: PlanBuilder, victim: Sequence) -> None:
        """Take a sequence's slot and blocks; it computes all its tokens again when its old place in the queue comes."""
        self._counts.num_preemptions += 1
        # nobody else may get a copy's source in this plan: restart() may have to copy it once more
        assert not any(block in builder.sources and not self.pool.is_shared(block) for block in victim.table.blocks)
        self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._give_back(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.is_lost = False
        group = self._groups[sequence.request_id]
        if sequence is group.leader:
            for sibling in group.unforked.values():
                self._give_back(sibling)
        if not sequence.is_paused:
            self._waiting.add(sequence, self._planned_s)

    # Results

    def _account(self, flight: Flight, step_s: float) -> None:
        """Learn from a step's duration, and charge for it."""
        self._last_work = flight.work
        self.step_cost.observe(flight.work, step_s)
        num_held = self._charges.charge_step(flight.plan, flight.sequences, self._running, flight.work, step_s)
        self._counts.add_step(len(flight.sequences), step_s, num_held)

    def _advance(self, flight: Flight, lost: set[int], now: float) -> None:
        """Count what was computed of prompts, and fork those who waited for theirs.

        Args:
            lost: rows that computed nothing that can be used.
        """
        starts = flight.plan.starts.tolist()
        for row, (sequence, start) in enumerate(zip(flight.sequences, starts, strict=True)):
            if start < sequence.num_prompt_tokens and row not in lost and not sequence.is_lost:
                self._advance_prompt(sequence, start, start + int(flight.plan.lengths[row]), now)

    def _advance_prompt(self, sequence: Sequence, before: int, end: int, now: float) -> None:
        num_computed = min(end, sequence.num_prompt_tokens)
        self._counts.num_prefill_rows += 1
        self._counts.num_prompt_tokens += num_computed - before
        group = self._groups.get(sequence.request_id)
        if group is None or group.sequences[sequence.index] is not sequence:
            return  # the request ended while this was computed
        is_looked_up = self.cache.is_enabled and sequence.sampling.num_prompt_logprobs is None
        self._counts.add_prompt(group, before, num_computed, is_looked_up)
        if sequence.state is SequenceState.FINISHED:
            return
        if not group.is_prefilled and (mark := mark_of_chunk(group, num_computed, now)) is not None:
            self._outbox.marks.append(mark)
        if num_computed == sequence.num_prompt_tokens and sequence is group.leader:
            for sibling in group.unforked.values():
                self._fork(sequence, sibling)
            group.unforked = {}

    def _take_prompt_logprobs(self, flight: Flight, output: StepOutput, lost: set[int]) -> None:
        """Tell what was asked of prompts: each position once, however often it is computed."""
        for targets in flight.plan.prompt_targets:
            row = targets.row
            sequence = flight.sequences[row]
            if row in lost or sequence.is_lost or sequence.state is SequenceState.FINISHED:
                continue
            end = sequence.end_of_scores(int(flight.plan.starts[row] + flight.plan.lengths[row]))
            num_new = end - sequence.num_scored_tokens
            if num_new <= 0:
                continue
            told = output.prompt_logprobs[row]
            assert num_new <= len(told), "a position was left out"
            self._outbox.add_prompt_logprobs(sequence, told[-num_new:])
            sequence.num_scored_tokens = end if end < sequence.num_prompt_tokens - 1 else ALL_SCORED

    def _lose_row(self, sequence: Sequence, cause: str | None) -> None:
        """A row failed, or (None) read what a failed one should have written: then its sequence computes it itself."""
        if cause is None:
            self._compute_again(sequence)
        else:
            self._forget(sequence)
            self.finish(sequence, sequence.cancel_reason or FinishReason.ERROR, cause)

    def _compute_again(self, sequence: Sequence) -> None:
        """All of it: what it has computed so far cannot be used."""
        self._forget(sequence)
        sequence.is_lost = sequence.state is SequenceState.RUNNING
        if sequence.is_lost and not sequence.is_in_flight and sequence.cancel_reason is None:
            self._requeue(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence.table.blocks)  # some may have been computed in chunks whose fault shows only now
        sequence.num_computed_tokens = 0  # a sibling that takes over goes on from nothing of this

    def _bystanders_misled(self, sequences: list[Sequence], unwritten: set[int]) -> list[Sequence]:
        """Who counts on these blocks without a row in the plan: admitted with it or after it.

        Args:
            sequences: of the plan.
        """
        reached, in_plan = blocks_reached(self._in_flight, unwritten), set(sequences)
        return [s for s in self._running if s not in in_plan and not reached.isdisjoint(s.table.blocks)]

    def _take_tokens(self, output: StepOutput, sequences: list[Sequence], lost: set[int]) -> None:
        """Give sequences the tokens they have drawn, but those that ended before it or are about to be cancelled."""
        told: list[Sequence] = []
        told_ids: list[int] = []
        logprobs, finished = output.logprobs, SequenceState.FINISHED
        for i, (row, token_id) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            sequence = sequences[row]
            if sequence.cancel_reason is not None or sequence.state is finished or row in lost or sequence.is_lost:
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if token_id in sequence.stop_ids or len(token_ids) >= sequence.max_length or i in logprobs:
                self._take_notable_token(sequence, token_id, logprobs.get(i))
            else:
                told.append(sequence)
                told_ids.append(token_id)
        self._counts.num_generated_tokens += len(told)
        self._outbox.add_tokens(told, told_ids)

    def _take_notable_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Tell a token that has logprobs, or may end its sequence, which it has been appended to."""
        if len(sequence.token_ids) > sequence.max_length:  # max_tokens is 0
            sequence.token_ids.pop()
            self.finish(sequence, FinishReason.LENGTH)
            return
        self._counts.num_generated_tokens += 1
        reason = sequence.end_after_last_token()
        if reason is not FinishReason.STOP:
            self._outbox.add_token(sequence, token_id, logprobs)
        if reason is not None:
            self.finish(sequence, reason, stop_logprobs=logprobs if reason is FinishReason.STOP else None)
