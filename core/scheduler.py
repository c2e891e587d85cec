"""Decides what each step computes, and what its result means. Thread: engine. No I/O; time and seeds are arguments.

A step lets sequences catch up on their tokens: running decodes first, then prefill chunks, then admissions from the
queue. Every submitted request ends with exactly one terminal TokenChunk, from the last of its sequences. Sequences end
in one place (finish), and blocks are released in one place (_give_back).
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from core.blocks import num_blocks_for
from core.outbox import Outbox
from core.plan import RunnerLimits, StepOutput, StepPlan
from core.plan_builder import PlanBuilder, restart_rows, rows_misled
from core.prefix_cache import PrefixCache
from core.sequence import NO_SLOT, Order, Sequence, SequenceGroup, SequenceState
from core.types import EngineStats, FinishReason, Request, StepDelivery, TokenChunk, TokenLogprobs, Usage

_ORDER: Callable[[Sequence], Order] = attrgetter("order")


class Scheduler:
    """Sequences, their slots and their blocks, between the inbox and the runner.

    Args:
        limits: what the runner has room for.
        eos_ids: the model's own ends.
        seeds: draws a 64-bit seed for a request that names none.
        has_prefix_cache: requests use what others of their domain have computed.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: tuple[int, ...],
        seeds: Callable[[], int],
        has_prefix_cache: bool = True,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(limits.num_blocks, limits.block_size, has_prefix_cache)
        self.pool = self.cache.pool
        self._eos_ids = eos_ids
        self._seeds = seeds
        self._max_length = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # a lone sequence fits
        num_slots = min(limits.max_sequences, limits.max_batch_tokens)  # so that every running decode has its token
        self._free_slots = list(range(num_slots))  # a heap: low slots first keep the runner's rows dense
        self._occupants: list[Sequence | None] = [None] * num_slots
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting: list[Sequence] = []  # by order; neither paused ones nor unforked siblings
        self._running: list[Sequence] = []  # by order
        self._num_submitted = 0
        self._num_paused = 0
        self._planned_s = 0.0
        self._counts = _Counts()
        self._outbox = Outbox()

    # What the loop asks

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run is refused with a terminal ERROR chunk."""
        assert request.request_id not in self._groups, f"request {request.request_id} was submitted twice"
        cause = self._cause_of_refusal(request)
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
        seed = request.sampling.seed
        group = SequenceGroup(request, self._num_submitted, self._seeds() if seed is None else seed)
        self._num_submitted += 1
        self._groups[request.request_id] = group
        for _ in range(request.num_sequences):
            self._add_sequence(group)
        leader, *siblings = group.sequences
        group.leader = leader
        group.unforked = {sibling.index: sibling for sibling in siblings}
        insort(self._waiting, leader, key=_ORDER)

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
            _remove(self._waiting, sequence)

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
                insort(self._waiting, sequence, key=_ORDER)

    # One step

    def plan(self, now: float) -> StepPlan | None:
        """The next step, None when nothing can be computed now. Every plan must come back to apply()."""
        self._planned_s = now
        builder = PlanBuilder(self.limits.max_batch_tokens)
        active = [sequence for sequence in self._running if not sequence.is_paused]
        for sequence in active:
            if sequence.num_uncomputed_tokens == 1:
                self._add_row(builder, sequence)
        for sequence in active:
            if builder.budget == 0:
                break
            if sequence.num_uncomputed_tokens > 1:
                self._add_row(builder, sequence)
        while builder.budget > 0 and self._waiting and self._admit(self._waiting[0], builder):
            pass
        return builder.build()

    def restart(self, plan: StepPlan, rows: range) -> StepPlan:
        """These rows of a plan whose step failed, to be computed anew whatever the failed step has left behind."""
        return restart_rows(plan, rows, [self._occupant(slot) for slot in plan.slots[rows.start : rows.stop].tolist()])

    def apply(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        """Take in a step's result: tokens, forks, ends. Returns all news since the last delivery."""
        sequences = [self._occupant(slot) for slot in plan.slots.tolist()]
        misled = set[int]()
        if output.failed_rows:
            misled = rows_misled(plan, sequences, output.failed_rows, self.limits.block_size)
        lost = misled.union(output.failed_rows)
        self._advance(plan, sequences, lost)
        for i, (row, token_id) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            if row not in lost:
                self._append(sequences[row], token_id, output.logprobs.get(i))
        for row in sorted(lost):
            self._lose_row(sequences[row], None if row in misled else output.failed_rows[row])
        for sequence in sequences:
            if sequence.cancel_reason is not None:
                self.finish(sequence, sequence.cancel_reason)
        self._counts.num_steps += 1
        self._counts.step_s = now - self._planned_s
        return self._outbox.take(self.stats())

    def flush(self) -> StepDelivery | None:
        """News that no step will bring: the ends of what was not in flight. None when there are none."""
        return self._outbox.take(self.stats()) if self._outbox.chunks else None

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
            num_prompt_tokens=self._counts.num_prompt_tokens,
            num_generated_tokens=self._counts.num_generated_tokens,
            num_preemptions=self._counts.num_preemptions,
            num_cache_queries=self._counts.num_cache_queries,
            num_cache_hits=self._counts.num_cache_hits,
            num_cache_evictions=self.pool.num_evictions,
            step_s=self._counts.step_s,
        )

    # Ends

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence and give back all it holds; the last of its request brings the terminal chunk. Idempotent."""
        if sequence.state is SequenceState.FINISHED:
            return
        assert not sequence.is_in_flight, "what is in flight is finished by apply()"
        group = self._groups[sequence.request_id]
        self._leave_siblings(group, sequence)
        _remove(self._waiting, sequence)
        self._give_back(sequence)
        sequence.state = SequenceState.FINISHED
        group.num_live -= 1
        self._outbox.chunks.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=sequence.index,
                finish_reason=reason,
                num_sequence_tokens=sequence.num_billed_tokens,
                usage=self._end_group(group) if group.num_live == 0 else None,
                error=error if reason is FinishReason.ERROR else None,
            )
        )

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, those of a step that will never come back too."""
        for group in list(self._groups.values()):
            for sequence in reversed(group.sequences):
                sequence.is_in_flight = False
                self.finish(sequence, sequence.cancel_reason or reason, error)

    def _end_group(self, group: SequenceGroup) -> Usage:
        del self._groups[group.request.request_id]
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
            if sequence.state is SequenceState.RUNNING:
                self._fork(sequence, heir)
            elif not group.is_paused:
                insort(self._waiting, heir, key=_ORDER)

    def _give_back(self, sequence: Sequence) -> None:
        """The one place where a sequence loses its slot and its blocks: at its end, or when it is preempted."""
        if sequence.state is SequenceState.RUNNING:
            _remove(self._running, sequence)
            self.pool.release(sequence.table.take())
        if sequence.slot != NO_SLOT:
            self._occupants[sequence.slot] = None
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = NO_SLOT

    # Beginnings

    def _cause_of_refusal(self, request: Request) -> str | None:
        num_tokens = len(request.prompt_ids)
        if num_tokens == 0:
            return "The prompt is empty."
        if num_tokens >= self._max_length:
            return (
                f"The prompt has {num_tokens} tokens; this server holds at most {self._max_length - 1}, and one more."
            )
        if request.num_sequences > len(self._occupants):
            return f"{request.num_sequences} sequences were asked for; this server runs {len(self._occupants)} at once."
        return None

    def _add_sequence(self, group: SequenceGroup) -> None:
        sampling = group.request.sampling
        stop_ids = sampling.stop_token_ids if sampling.ignore_eos else self._eos_ids + sampling.stop_token_ids
        max_length = min(len(group.request.prompt_ids) + sampling.max_tokens, self._max_length)
        group.add(stop_ids, max_length)

    def _occupy_slot(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.is_started = False
        self._occupants[sequence.slot] = sequence

    def _start_running(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self._running, sequence, key=_ORDER)

    def _admit(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give the queue's head its slots, blocks for all its tokens and the next, and its first chunk. False: not yet.

        The blocks are taken at once so that no prefill waits for blocks halfway.
        """
        group = self._groups[sequence.request_id]
        joining = [sequence, *group.unforked.values()] if sequence is group.leader else [sequence]
        while len(joining) > len(self._free_slots) or not self._take_blocks(sequence):
            if not self._preempt_paused(builder):
                return False
        self._waiting.pop(0)
        for member in joining:
            self._occupy_slot(member)
        self._start_running(sequence)
        self._add_row(builder, sequence)
        return True

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give a waiting sequence what is cached of it and new blocks for the rest, or nothing and False."""
        table, num_free = sequence.table, self.pool.num_free
        if num_free < sequence.num_free_blocks_needed:  # so that a long prompt is not looked up in each step
            return False
        num_cached_tokens = self.cache.extend(table, sequence.token_ids)
        num_new = num_blocks_for(len(sequence.token_ids) + 1, self.limits.block_size) - len(table)
        if num_new > self.pool.num_free:
            sequence.num_free_blocks_needed = num_new + num_free - self.pool.num_free
            self.pool.release(table.take())
            return False
        table.blocks += self.pool.allocate(num_new)
        sequence.num_computed_tokens = num_cached_tokens
        sequence.num_free_blocks_needed = 0
        return True

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that has a slot start where its parent is, but for its last token: that one it computes itself.

        They share the parent's blocks; whoever writes into a shared one first, copies it. Into a full one nobody
        writes: where the last token fills a block, the child computes that block's tokens.
        """
        child.num_computed_tokens = min(parent.num_computed_tokens, len(child.token_ids) - 1)
        if len(child.token_ids) % self.limits.block_size == 0:
            child.num_computed_tokens -= child.num_computed_tokens % self.limits.block_size
        num_blocks = num_blocks_for(child.num_computed_tokens, self.limits.block_size)
        child.table.blocks = parent.table.blocks[:num_blocks]
        child.table.num_published = min(parent.table.num_published, num_blocks)
        self.pool.share(child.table.blocks)
        self._start_running(child)

    # Rows and their blocks

    def _add_row(self, builder: PlanBuilder, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.RUNNING:  # preempted while this plan was made
            return
        table, cache = sequence.table, self.cache
        start = sequence.num_computed_tokens
        if start < len(sequence.token_ids) - 1 or cache.is_behind(table, start):
            start = sequence.num_computed_tokens = max(start, cache.extend(table, sequence.token_ids))
        length = min(len(sequence.token_ids) - start, builder.budget)
        end = start + length
        if self._secure_blocks(builder, sequence, end):
            builder.add_row(sequence, start, length)
            if cache.is_behind(table, end):
                cache.publish(table, sequence.token_ids, end)

    def _secure_blocks(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Let the sequence own all blocks it writes up to position `end`; False if it had to give up its own."""
        blocks = sequence.table.blocks
        num_blocks = num_blocks_for(end, self.limits.block_size)
        first = (
            sequence.num_computed_tokens // self.limits.block_size
        )  # only this one can be shared: later ones are new
        while True:
            is_shared = first < len(blocks) and self.pool.is_shared(blocks[first])
            num_missing = max(0, num_blocks - len(blocks)) + is_shared
            if num_missing <= self.pool.num_free:
                break
            if not self._preempt_paused(builder):
                victim = next(candidate for candidate in reversed(self._running) if not candidate.is_in_flight)
                self._preempt(builder, victim)
                if victim is sequence:
                    return False
        if is_shared:
            builder.replace_block(sequence, first, self.pool.take_for_shared(blocks[first]))
        if num_blocks > len(blocks):
            blocks += self.pool.allocate(num_blocks - len(blocks))
        return True

    def _preempt_paused(self, builder: PlanBuilder) -> bool:
        victim = next((candidate for candidate in reversed(self._running) if candidate.is_paused), None)
        if victim is not None:
            self._preempt(builder, victim)
        return victim is not None

    def _preempt(self, builder: PlanBuilder, victim: Sequence) -> None:
        """Take a sequence's slot and blocks; it computes all its tokens again when its old place in the queue comes."""
        self._counts.num_preemptions += 1
        # nobody else may get a copy's source in this plan: restart() may have to copy it once more
        assert not any(block in builder.sources and not self.pool.is_shared(block) for block in victim.table.blocks)
        self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        self._give_back(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        group = self._groups[sequence.request_id]
        if sequence is group.leader:
            for sibling in group.unforked.values():
                self._give_back(sibling)
        if not sequence.is_paused:
            insort(self._waiting, sequence, key=_ORDER)

    def _occupant(self, slot: int) -> Sequence:
        sequence = self._occupants[slot]
        assert sequence is not None, f"slot {slot} of the plan has no sequence"
        return sequence

    # Results

    def _advance(self, plan: StepPlan, sequences: list[Sequence], lost: set[int]) -> None:
        """Count what was computed, and fork those who waited for their prompt.

        Args:
            lost: rows that computed nothing that can be used.
        """
        ends = (plan.starts + plan.lengths).tolist()
        for row, sequence in enumerate(sequences):
            sequence.is_in_flight = False
            if row in lost:
                continue
            before, sequence.num_computed_tokens = sequence.num_computed_tokens, ends[row]
            if before < sequence.num_prompt_tokens:
                self._advance_prompt(sequence, before)

    def _advance_prompt(self, sequence: Sequence, before: int) -> None:
        num_computed = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self._counts.num_prompt_tokens += num_computed - before
        group = self._groups[sequence.request_id]
        if group.num_prompt_tokens_done == 0 and self.cache.is_enabled:
            self._counts.num_cache_queries += sequence.num_prompt_tokens
        num_cached = max(0, before - group.num_prompt_tokens_done)  # nobody of this request has computed these
        group.num_cached_tokens += num_cached
        self._counts.num_cache_hits += num_cached
        group.num_prompt_tokens_done = max(group.num_prompt_tokens_done, num_computed)
        if num_computed == sequence.num_prompt_tokens and sequence is group.leader:
            for sibling in group.unforked.values():
                self._fork(sequence, sibling)
            group.unforked = {}

    def _lose_row(self, sequence: Sequence, cause: str | None) -> None:
        """A row failed, or (None) read what a failed one should have written: then its sequence computes it itself."""
        self.cache.forget(sequence.table.blocks)  # some may have been computed in chunks whose fault shows only now
        sequence.num_computed_tokens = 0  # a sibling that takes over goes on from nothing of this
        if cause is not None:
            self.finish(sequence, sequence.cancel_reason or FinishReason.ERROR, cause)
        elif sequence.cancel_reason is None:
            self._requeue(sequence)

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Give a sequence the token it has drawn, unless it has ended before it or is about to be cancelled."""
        if sequence.state is SequenceState.FINISHED or sequence.cancel_reason is not None:
            return
        sequence.token_ids.append(token_id)
        self._counts.num_generated_tokens += 1
        reason = sequence.end_after_last_token()
        if reason is not FinishReason.STOP:
            self._outbox.add_token(sequence, token_id, logprobs)
        if reason is not None:
            self.finish(sequence, reason)


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a list by order, if it is in it; found by bisection."""
    i = bisect_left(ordered, sequence.order, key=_ORDER)
    if i < len(ordered) and ordered[i] is sequence:
        del ordered[i]


class _Counts:
    """Counters since the start."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_cache_queries = 0
        self.num_cache_hits = 0
        self.step_s = 0.0
