"""Plans each step and applies its result. Thread: engine. No I/O; time and seeds are arguments.

A step lets sequences catch up on their tokens. plan() takes running decodes first and then, as far as the inter-token
target allows, prompts, running and waiting ones in one order. If slots or blocks are short, paused sequences are
preempted first, then those that the queue's head outranks, then the least urgent. apply() handles tokens, forks, ends,
lost rows and the step's cost. Every submitted request ends with exactly one terminal TokenChunk, from the last of its
sequences (sequence_states.py).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from core.config import INTER_TOKEN_TARGET
from core.drafts import DraftModel, Drafts
from core.intake import MOST_FORCED, Intake
from core.kv_cache import BlockCopies, BlockLabel, num_blocks_for
from core.outlook import Outlook, tokens_left
from core.plan import Flight, PlanBuilder, RunnerLimits, StepOutput, StepPlan, restart_rows, rows_misled
from core.queue import Burst, Rank, aged_class, enough_of, outranked, rank, victim_order
from core.repetition import Breakers, Repetition, RepetitionRules
from core.searches import Searches
from core.sequence import Sequence, SequenceGroup, SequenceState
from core.sequence_states import SequenceStates
from core.step_cost import PrefillAllowance, StepCostModel, StepWork, allow_prefill
from core.types import (
    Admitted,
    EngineStats,
    FinishReason,
    PreemptionCause,
    Request,
    SamplingParams,
    StepDelivery,
    TokenChunk,
    Usage,
)
from core.watch import Watcher

ASK_EVERY_STEPS = 8  # whether a running sequence gives way to the queue's head: all of them are looked at
LOOK_EVERY_S = 0.25  # for the Outlook
_NUM_COMPUTED_TOKENS: Callable[[Sequence], int] = attrgetter("num_computed_tokens")


class Scheduler:
    """Plans steps for the runner and reports their results to the loop.

    Args:
        eos_ids: the model's end-of-sequence ids.
        seeds: returns a 64-bit seed for a request without one.
        has_prefix_cache: requests reuse blocks that others of their domain computed.
        inter_token_target: see EngineConfig.
        forces_tokens: if a grammar allows only one continuation, its tokens are appended without sampling.
        speculates: use drafts where the runner can verify them and the step-cost model predicts a gain.
        draft_model: None: drafts come only from text.
        stored: see HostBlocks.

    Attributes:
        in_flight: oldest first.
        last_work: work of the latest finished step.
        watcher: reports to the dashboard.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: tuple[int, ...],
        seeds: Callable[[], int],
        has_prefix_cache: bool = True,
        inter_token_target: float | None = INTER_TOKEN_TARGET,
        forces_tokens: bool = True,
        speculates: bool = True,
        draft_model: DraftModel | None = None,
        stored: Iterable[tuple[int, BlockLabel]] = (),
    ) -> None:
        self.limits = limits
        self.step_cost = StepCostModel(limits.prompt_tile, limits.few_tokens)
        for row in limits.timed_rows:
            self.step_cost.observe_row(row.start, row.end, row.num_prompt_tokens, row.took_s)
        num_slots = min(limits.max_sequences, limits.max_batch_tokens)  # so that every running decode has its token
        self.states = SequenceStates(limits, num_slots, self.step_cost, has_prefix_cache, stored)
        self.pool, self.host, self.shares = self.states.pool, self.states.host, self.states.shares
        self.in_flight: deque[Flight] = deque()
        self.last_work = StepWork()
        self.watcher = Watcher()
        self._max_length = min(limits.max_model_len, limits.num_blocks * limits.block_size)  # a lone sequence fits
        # Budget that is left over: recurrent layers need room for a block of a prompt, where decodes always leave some
        leaves_block = limits.max_batch_tokens >= limits.max_sequences + limits.block_size
        self._most_spare = limits.block_size - 1 if leaves_block and limits.num_kept_states is not None else 0
        self._eos_ids = eos_ids
        self._seeds = seeds
        self._num_groups = 0  # since the start
        self._inter_token_target = inter_token_target
        self._forces_tokens = forces_tokens
        self.drafts = Drafts(
            limits, self.states, self.step_cost, inter_token_target, forces_tokens, speculates, draft_model
        )
        self._intake = Intake(self.states, self.drafts, forces_tokens)
        self._counts = self._intake.counts
        self._searches = Searches(limits, self.states, self._max_length, self._stop_ids_of)
        self._burst = Burst()
        self._burst_allowance = PrefillAllowance(self.step_cost, math.inf)
        self._is_short = False  # of blocks or slots that sequences in flight may have to give up
        self._stuck: tuple[Sequence, int] | None = None  # a head of the queue, and its class, that none gave way to
        self._ask_again = 0  # from this step on
        self._landed_s = 0.0  # when the last step came back
        self._is_busy = False  # then: a sequence could go on
        self._outlook: Outlook | None = None
        self._looked_s = -math.inf
        self._look_ahead(-math.inf)  # where steps were timed at start
        self.states.outbox.take(self.stats())  # the loop starts with these

    # Messages of the loop

    def submit(self, request: Request) -> None:
        """Queue a request; if it can never run, refuse it with a terminal ERROR chunk."""
        states = self.states
        assert request.request_id not in states.groups, f"request {request.request_id} was submitted twice"
        cause = self._cause_of_refusal(request)
        if cause is not None:
            name, failed = request.request_id, FinishReason.ERROR
            usage = Usage(num_prompt_tokens=0, num_completion_tokens=0)
            chunk = TokenChunk(request_id=name, index=0, finish_reason=failed, usage=usage, error=cause)
            states.outbox.chunks.append(chunk)
            return
        group = self._make_group(request)
        states.groups[request.request_id] = group
        assert group.leader is not None, "a request has a sequence"
        states.waiting.add(group.leader, request.arrival_s)

    def _cause_of_refusal(self, request: Request) -> str | None:
        """Why a request can never run, for its user; None if it can."""
        num_tokens, num_sequences = len(request.prompt_ids), request.num_sequences
        if num_tokens == 0:
            return "The prompt is empty."
        if num_tokens > (most := self._max_length - (request.pooling is None)):  # an answer has one token at least
            return f"The prompt has {num_tokens} tokens; this server's memory fits at most {most}."
        if request.beams is not None:
            if self._searches.max_length_of(request) <= num_tokens:
                return f"{num_sequences} beams of {num_tokens} tokens do not fit into this server's memory."
            if self._searches.search_of(request).num_top > self.limits.vocab_size:
                return f"{num_sequences} beams have too few tokens to choose from: most are banned, or end the answer."
        if num_sequences > (num_slots := len(self.states.occupants)):
            return f"{num_sequences} sequences were requested; this server runs {num_slots} at once."
        return None

    def _make_group(self, request: Request) -> SequenceGroup:
        """The sequences of a request; the first one leads."""
        num_tokens, sampling = len(request.prompt_ids), request.sampling
        latest_start_s = math.inf
        if request.deadline_s is not None:
            latest_start_s = request.deadline_s - self.step_cost.prefill_s(0, num_tokens, num_tokens)
        tenant = self.shares.enter(request.tenant, request.share)
        seed = self._seeds() if sampling.seed is None else sampling.seed
        group = SequenceGroup(request, tenant, self._num_groups, seed, latest_start_s)
        self._num_groups += 1
        stop_ids = self._stop_ids_of(sampling)
        max_length = min(num_tokens + sampling.max_tokens, self._searches.max_length_of(request))
        group.leader, *siblings = [group.add(stop_ids, max_length) for _ in range(request.num_sequences)]
        group.unforked = {sibling.index: sibling for sibling in siblings}
        if request.beams is not None:
            self._searches.begin(group)
        if self._forces_tokens:
            for sequence in group.sequences:
                if sequence.grammar is not None:
                    sequence.forced.extend(sequence.grammar.forced())
        if sampling.dry_multiplier > 0 or sampling.repeat_last_n >= 0:
            names = [name for name in RepetitionRules.__slots__ if name != "breakers"]
            asked = {name: getattr(sampling, name) for name in names}
            rules = RepetitionRules(**asked, breakers=request.breakers or Breakers())
            for sequence in group.sequences:
                sequence.repetition = Repetition(rules)
        for sequence in group.sequences:
            sequence.drafter = self.drafts.drafter_of(sequence, request)
        return group

    def _stop_ids_of(self, sampling: SamplingParams) -> tuple[int, ...]:
        return sampling.stop_token_ids if sampling.ignore_eos else self._eos_ids + sampling.stop_token_ids

    def cancel(
        self, request_id: str, reason: FinishReason, index: int | None = None, num_tokens_kept: int | None = None
    ) -> None:
        """End a request, or one of its sequences. Sequences in flight are marked, and apply() finishes them.

        The usage of a sequence that has ended is still cut until its request's terminal chunk. Without an index,
        num_tokens_kept holds for each of the request's sequences.
        """
        group = self.states.groups.get(request_id)
        if group is None or (index is not None and not 0 <= index < len(group.sequences)):
            return
        if group.search is not None:  # its beams end together, and what they have computed counts
            index = num_tokens_kept = None
        chosen = group.sequences if index is None else [group.sequences[index]]
        for sequence in chosen:  # all before the first ends: the terminal chunk counts them all
            sequence.keep(num_tokens_kept)
        for sequence in reversed(chosen):  # the leader last, so that no cancelled sibling becomes leader
            if not sequence.num_in_flight:
                self.states.finish(sequence, reason)
            elif sequence.cancel_reason is None:
                sequence.cancel_reason = reason
                sequence.plain_end = 0
                self.states.unsettled[sequence] = None

    def pause(self, request_id: str) -> None:
        """Leave the request out of the next plans. It keeps its blocks until others need them."""
        group = self.states.groups.get(request_id)
        if group is None or group.is_paused:
            return
        group.is_paused = True
        self.states.num_paused += 1
        for sequence in group.sequences:
            sequence.is_paused = True
            sequence.plain_end = 0
            self.states.waiting.remove(sequence)

    def resume(self, request_id: str) -> None:
        """Resume a paused request, at its old place in the queue."""
        group = self.states.groups.get(request_id)
        if group is None or not group.is_paused:
            return
        group.is_paused = False
        self.states.num_paused -= 1
        for sequence in group.sequences:
            sequence.is_paused = False
            if sequence.state is SequenceState.WAITING and sequence.index not in group.unforked:
                self.states.waiting.add(sequence, self.states.now_s)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request, including those in steps that will never come back."""
        abandoned = self._abandon(self.states.now_s)
        for group in list(self.states.groups.values()):
            for sequence in reversed(group.sequences):
                self.states.finish(sequence, sequence.cancel_reason or reason, error)
        self.states.unsettled.clear()
        for sequence in abandoned:  # some had ended before
            self.states.give_back(sequence)

    # Planning a step

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can be computed now. Every plan must come back to apply(), in order.

        Also None while a step in flight must come back first: a sequence may have to be preempted, and may be in it.
        """
        states, has_flights = self.states, bool(self.in_flight)
        if has_flights and (self._is_short or any(flight.has_suspects for flight in self.in_flight)):
            return None
        states.now_s = now
        self._is_short = False
        if self._searches.groups:
            for sequence in self._searches.gather():
                self._count_preemption(sequence, PreemptionCause.BEAMS_APART, sequence.request_id)
        builder = PlanBuilder(self.limits.max_batch_tokens, self.limits.prompt_tile)
        self._make_room(builder, now)
        plain, others, behind = self._ready()
        forced = [s for s in others if len(s.token_ids) - s.num_computed_tokens > 1]
        drafts = self.drafts.plan(plain, others, bool(behind))
        num_long = len(forced) + 2 * len(drafts)  # a plain one needs no block
        if len(others) + num_long <= self.pool.num_free_pairs:  # each needs a block at most, with more tokens two
            if forced or drafts:
                plain = [s for s in plain if s not in drafts]
                others = [s for s in others if s not in drafts and s not in forced]
                forced = [s for s in forced if s not in drafts]
            self._add_decodes(builder, plain, others)
            for sequence, draft in drafts.items():
                num_behind = len(sequence.token_ids) - sequence.num_computed_tokens
                self._add_row(builder, sequence, length=num_behind, drafts=draft)
            self._add_forced(builder, forced)
        elif has_flights:
            return None
        else:  # likely victims last, so that they are not in the plan before the sequences that need their blocks
            self._add_decodes_in_turn(builder, [*plain, *others])
        num_coming = len(behind) + min(len(states.waiting), len(states.free_slots))
        allowance = allow_prefill(self.step_cost, self._inter_token_target, builder.work, num_coming)
        if self._burst.is_on or (self._inter_token_target is not None and not builder.work.own_tokens):
            self._burst.look(builder.sequences if builder.work.own_tokens else (), now)
        num_reserved = len(builder.sequences)  # blocks that the decodes need within 16 steps
        self._catch_up(builder, allowance, behind, num_reserved, now)
        if self.states.kept is not None:
            for source in builder.state_reads.values():
                if source >= 0:
                    self.states.kept.done(source)
        plan = builder.build()
        if plan is not None:
            assert len(self.in_flight) < self.limits.max_in_flight, "a step has to come back first"
            plan.host_copies = self.host.take_copies()
            if self._is_busy and not has_flights:
                self._counts.busy_s += now - self._landed_s
            has_suspects = bool(states.suspects) and not states.suspects.isdisjoint(builder.sequences)
            rows = builder.sequences, builder.other_rows, builder.work
            self.in_flight.append(Flight(plan, *rows, now, has_suspects, self.drafts.drafting_s))
        elif not has_flights:
            self._is_busy = False
        return plan

    def _ready(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """The sequences that can be computed now: plain decodes, other decodes, and those that are behind."""
        plain: list[Sequence] = []
        others: list[Sequence] = []
        behind: list[Sequence] = []
        for sequence in self.states.running:
            if sequence.num_computed_tokens < sequence.plain_end:
                plain.append(sequence)
            elif not (sequence.is_paused or (sequence.num_in_flight and self._has_to_land(sequence))):
                if sequence.search is not None and not sequence.search.waits_for(sequence.index):
                    continue
                num_behind = len(sequence.token_ids) + sequence.num_pending - sequence.num_computed_tokens
                (others if num_behind == 1 or self._is_forced(sequence) else behind).append(sequence)
        return plain, others, behind

    def _is_forced(self, sequence: Sequence) -> bool:
        """Whether it decodes several tokens: forced ones, or those before a rejected draft again."""
        num_behind = len(sequence.token_ids) - sequence.num_computed_tokens
        is_answering = sequence.num_computed_tokens >= sequence.num_prompt_tokens
        has_several = sequence.grammar is not None or self.states.kept is not None
        return has_several and is_answering and num_behind <= MOST_FORCED + 1

    def _has_to_land(self, sequence: Sequence) -> bool:
        """Whether a sequence in flight must come back before it is computed further.

        True if it ends with the steps in flight, or computes them again; if siblings fork from it at its current
        position; if the token being sampled and those after it are forced, so that they are computed together; if it
        has drafts to verify; or if its next token depends on this one not only through the model.
        """
        if sequence.is_lost or sequence.cancel_reason is not None or sequence.forced:
            return True
        if sequence.num_computed_tokens >= len(sequence.token_ids) + sequence.num_pending:
            return True
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return False
        if len(sequence.token_ids) + sequence.num_pending >= sequence.max_length:
            return True
        if sequence.search is not None or sequence.repetition is not None:
            return True
        return sequence.num_computed_tokens == sequence.num_prompt_tokens and len(self.states.joining(sequence)) > 1

    def _make_room(self, builder: PlanBuilder, now: float) -> None:
        """Preempt sequences that the queue's head outranks, if it needs their slots or blocks."""
        states = self.states
        found = states.waiting.head(now)
        if found is None:
            return
        head, level = found
        num_slots = len(states.joining(head)) - len(states.free_slots)
        num_blocks = states.num_blocks_to_admit(head) - self.pool.num_free
        num_windows = states.num_windows_short(head)
        if max(num_slots, num_blocks, num_windows) <= 0 or (
            found == self._stuck and self._counts.num_steps < self._ask_again
        ):
            return
        candidates = outranked(states.running, head, level, self.shares.least_s(), now)
        giving_way = enough_of(candidates, num_slots, num_blocks, num_windows, lambda s: len(states.joining(s)))
        if not giving_way:
            self._stuck, self._ask_again = found, self._counts.num_steps + ASK_EVERY_STEPS
        elif self.in_flight:
            self._is_short = True
        else:
            for sequence in giving_way:
                self._preempt(builder, sequence, PreemptionCause.OUTRANKED, head)

    def _add_decodes(self, builder: PlanBuilder, plain: list[Sequence], others: list[Sequence]) -> None:
        """Add a row for each, the plain ones without checks.

        Of siblings that share a block, the last one writes in place and the others copy it. The last is the furthest,
        so that it overwrites nothing that the others must copy again if the step is restarted.
        """
        builder.add_decodes(plain)
        if others:
            others.sort(key=_NUM_COMPUTED_TOKENS)
        for sequence in others:
            self._add_row(builder, sequence)

    def _add_forced(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Add a row for each, with as many forced tokens as the inter-token target allows beside the others."""
        decodes, num_neighbours = replace(builder.work), len(builder.sequences)
        for sequence in sequences:
            decodes.add(sequence.num_computed_tokens, sequence.num_computed_tokens + 1, 0)
        is_alone = num_neighbours + len(sequences) == 1
        allowance = allow_prefill(self.step_cost, None if is_alone else self._inter_token_target, decodes, 0)
        for waiting, sequence in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            start = sequence.num_computed_tokens
            most = min(len(sequence.token_ids) - start, builder.budget - waiting)
            if self.states.kept is not None:  # up to a block border, where its state may be kept
                most = min(most, self.limits.block_size - start % self.limits.block_size)
            self._add_row(builder, sequence, length=allowance.own_tokens(start, most))

    def _add_decodes_in_turn(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Like _add_decodes, request by request, the first candidates for preemption last."""
        in_turn = sorted(sequences, key=victim_order(self.shares.least_s()))
        for _, siblings in groupby(in_turn, key=lambda sequence: sequence.request_id):
            plain: list[Sequence] = []
            others: list[Sequence] = []
            for sequence in siblings:
                (plain if sequence.num_computed_tokens < sequence.plain_end else others).append(sequence)
            self._add_decodes(builder, plain, others)

    def _catch_up(
        self, builder: PlanBuilder, allowance: PrefillAllowance, behind: list[Sequence], num_reserved: int, now: float
    ) -> None:
        """Add chunks of running and waiting prompts, in order of rank, as far as the allowance goes."""

        def rank_of(sequence: Sequence) -> Rank:
            return rank(sequence, aged_class(sequence.level, now - sequence.progress_s), now)

        behind.sort(key=rank_of, reverse=True)
        is_admitting = True
        while builder.budget > self._most_spare and (self._burst.is_on or not allowance.is_spent):
            found = self.states.waiting.head(now) if is_admitting else None
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
                copying_s = self.host.planned_s
                is_admitting = self._admit(builder, *found, num_reserved)
                allowance.spend(self.host.planned_s - copying_s)
                if not is_admitting:
                    continue
            self._add_row(builder, sequence, self._burst_allowance if is_of_burst else allowance)
            if is_of_burst:  # it may exceed what the target allows; other prompts get nothing in this step
                self._burst.compute()
                allowance.use_up()

    def _admit(self, builder: PlanBuilder, sequence: Sequence, level: int, num_reserved: int) -> bool:
        """Give the queue's head its slots, and blocks for all its tokens and one more. False: not yet.

        It takes all blocks at once, so that no prefill stops halfway for lack of blocks.

        Args:
            level: its aged class.
            num_reserved: free blocks to leave for running sequences.
        """
        states = self.states
        num_joining, num_windows_reserved = len(states.joining(sequence)), num_reserved
        if sequence.search is not None:  # each sibling's own part
            size = self.limits.block_size
            num_blocks = num_blocks_for(len(sequence.token_ids) + 1, size) - sequence.num_prompt_tokens // size
            num_reserved += (num_joining - 1) * num_blocks
            num_windows_reserved += (num_joining - 1) * states.num_windows_of(num_blocks)
        while num_joining > len(states.free_slots) or not states.take_blocks(
            sequence, num_reserved, num_windows_reserved
        ):
            if not self._preempt_paused(builder, sequence):
                return False
        states.admit(sequence, level)
        group = states.groups[sequence.request_id]
        if not group.is_admitted:
            group.is_admitted = True
            states.outbox.marks.append(Admitted(sequence.request_id, states.now_s))
        return True

    def _preempt_paused(self, builder: PlanBuilder, head: Sequence) -> bool:
        if self.states.num_paused == 0:
            return False
        paused = [sequence for sequence in self.states.running if sequence.is_paused and not sequence.num_in_flight]
        if paused:
            victim = max(paused, key=victim_order(self.shares.least_s()))
            self._preempt(builder, victim, PreemptionCause.PAUSED, head)
        return bool(paused)

    def _count_preemption(self, victim: Sequence, cause: PreemptionCause, by: str) -> None:
        self._counts.num_preemptions += 1
        self.watcher.on_preempted(self.states.now_s, victim, cause, by)

    def _preempt(self, builder: PlanBuilder, victim: Sequence, cause: PreemptionCause, by: Sequence) -> None:
        self._count_preemption(victim, cause, by.request_id)
        # a copy's source must not be handed out in this plan: restart() may have to copy it once more
        assert not any(block in builder.sources and not self.pool.is_shared(block) for block in victim.table.held)
        self.states.requeue(victim)

    def _add_row(
        self,
        builder: PlanBuilder,
        sequence: Sequence,
        allowance: PrefillAllowance | None = None,
        length: int = 1,
        drafts: Seq[int] = (),
    ) -> None:
        """Add a row for as much of the sequence as the allowance and the free blocks permit.

        Args:
            allowance: tokens; None: all that it needs.
            drafts: tokens to compute after its own, if there are blocks for them.
        """
        if sequence.state is not SequenceState.RUNNING:  # preempted while this plan was made
            return
        start = sequence.num_computed_tokens
        is_published = self.states.publish(sequence, start)  # the block that it has filled since the last check
        if allowance is not None or not is_published:
            start = self.states.skip_cached(sequence)
            length = min(length, len(sequence.token_ids) + sequence.num_pending - start)
        if allowance is not None:
            length = allowance.chunk(start, len(sequence.token_ids), sequence.num_prompt_tokens, builder.budget)
            if self.limits.takes_whole_prompts:
                length = len(sequence.token_ids) if len(sequence.token_ids) <= builder.budget else 0
            if length == 0:
                return
            if self.states.kept is not None:
                length = self._to_border(start, length, len(sequence.token_ids), builder.budget)
            sequence.progress_s = self.states.now_s
        end = start + length + len(drafts)
        self.states.drop_unseen(builder, sequence, start)
        if self._secure_blocks(builder, sequence, end):
            builder.add_row(sequence, start, end - start, drafts)
            self.states.save_states(builder, sequence, start, end)
            if allowance is not None:
                self.states.publish(sequence, end)
            elif drafts:
                sequence.plain_end = 0
            elif end > sequence.num_prompt_tokens and end >= len(sequence.token_ids) and _is_plain(sequence):
                block_end = num_blocks_for(end, self.limits.block_size) * self.limits.block_size
                sequence.plain_end = min(block_end, sequence.max_length - 1)

    def _to_border(self, start: int, length: int, num_tokens: int, budget: int) -> int:
        """A chunk's length: all remaining tokens, or else up to a block boundary, if the budget permits.

        Recurrent layers compute whole blocks of a prompt; in parts of a block they round differently.
        """
        size = self.limits.block_size
        past = (start + length) % size
        if start + length == num_tokens or not past:
            return length
        longer = min(length - past + size, num_tokens - start)
        return length - past if length > past else min(longer, budget)

    def _secure_blocks(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Make all blocks that it writes up to position `end` its own. False: not yet, or it was preempted itself."""
        while not self.states.own(builder, sequence, end):
            if self.in_flight:
                self._is_short = True
                return False
            order = victim_order(self.shares.least_s())
            victim = max((candidate for candidate in self.states.running if not candidate.num_in_flight), key=order)
            cause = PreemptionCause.PAUSED if victim.is_paused else PreemptionCause.OUT_OF_BLOCKS
            self._preempt(builder, victim, cause, sequence)
            if victim is sequence:
                return False
        return True

    # Taking in a step's result

    def apply(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        """Apply the result of the oldest step in flight. Returns all output since the last delivery.

        Results for sequences that have ended or were lost since the step was planned are discarded.
        """
        flight, step_s = self._land(now)
        assert flight.plan is plan, "an older step has to come back first"
        sequences = flight.sequences
        misled, lost, bystanders = set[int](), set[int](), list[Sequence]()
        if output.failed_rows:
            misled, unwritten = rows_misled(plan, sequences, output.failed_rows, self.limits.block_size)
            lost = misled.union(output.failed_rows)
            bystanders = self._bystanders_misled([sequences[row] for row in lost], unwritten)
        self.host.on_applied(len(output.failed_rows) < len(sequences), output.host_copy_s)
        self._account(flight, step_s - output.host_copy_s)
        for save in plan.state_saves:
            self.states.keep_saved(sequences[save.row], save, not lost)
        self._intake.take_prompt_logprobs(flight, output, lost)
        self._intake.advance_prompts(flight, lost, now)
        refused = self.drafts.verify(flight, output, lost, step_s - output.host_copy_s)
        self._intake.take_tokens(output, sequences, lost, refused)
        for row, pooled in output.pooled.items():
            sequence = sequences[row]
            if row not in lost and not sequence.is_lost and sequence.cancel_reason is None:
                self.states.finish(sequence, FinishReason.STOP, pooled=pooled)
        for row in plan.num_drafts:
            if sequences[row].state is SequenceState.RUNNING and not sequences[row].is_lost:
                self.states.trim(sequences[row])
        for row in sorted(lost):
            self._lose_row(sequences[row], None if row in misled else output.failed_rows[row])
        for bystander in bystanders:
            self.states.compute_again(bystander)
        if self._searches.groups:
            self._searches.advance(sequences)
        if flight.has_suspects:
            self.states.suspects.difference_update(sequences[row] for row in output.rows.tolist() if row not in lost)
        self.states.settle()
        self._is_busy = len(self.states.running) > self.states.num_paused
        if now >= self._looked_s + LOOK_EVERY_S:
            self._look_ahead(now)
        return self.states.outbox.take(self.stats())

    def _land(self, now: float) -> tuple[Flight, float]:
        """Take the oldest step out of flight.

        Returns: it, and its duration since it was planned, or since the one before it came back.
        """
        flight = self.in_flight.popleft()
        for sequence, samples in zip(flight.sequences, flight.plan.samples.tolist(), strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
        step_s = now - max(flight.planned_s, self._landed_s)
        self._landed_s = now
        return flight, step_s

    def _account(self, flight: Flight, step_s: float) -> None:
        """Learn from a step's duration, and charge for it."""
        counts, self.last_work = self._counts, flight.work
        self.watcher.on_step(self._landed_s, flight.work, step_s, self.step_cost)
        counts.predicted_s += self.step_cost.observe(flight.work, step_s - flight.drafting_s)
        num_held = self.states.charges.charge_step(flight, self.states.running, step_s)
        counts.num_steps += 1
        counts.num_rows += len(flight.sequences)
        counts.step_s = step_s
        counts.device_s += step_s
        counts.busy_s += step_s
        counts.kv_block_s += num_held * step_s

    def _look_ahead(self, now: float) -> None:
        """Update the outlook, once enough steps were measured. Called rarely: it visits all running sequences."""
        cost_s, limits, running = self.step_cost.rough_s, self.limits, self.states.running
        if cost_s is None:
            return
        self._looked_s = now
        mean, counts = self.states.mean_answer_tokens, self._counts
        decoding = [  # of each: tokens generated, and its limit
            (num_own, sequence.max_length - sequence.num_prompt_tokens)
            for sequence in running
            if (num_own := len(sequence.token_ids) - sequence.num_prompt_tokens)
        ]
        rate = len(decoding) / mean  # of ends per token; less for those with over twice the mean
        rate += sum([1 / tokens_left(mean, *one) - 1 / mean for one in decoding if one[0] > 2 * mean])
        self._outlook = Outlook(
            step_cost_s=cost_s,
            fit=self.step_cost.fit,
            late_p90=self.step_cost.late_p90,
            max_sequences=limits.max_sequences,
            max_batch_tokens=limits.max_batch_tokens,
            num_kv_tokens=limits.num_blocks * limits.block_size,
            inter_token_target=self._inter_token_target,
            miss_ratio=1 - counts.num_cache_hits / max(1, counts.num_cache_queries),
            kv_of_one=self.pool.num_used * limits.block_size / max(1, len(running)),
            tokens_left=len(decoding) / rate if decoding else mean,
            first_left=max(1, min([limit - num_own for num_own, limit in decoding], default=1)),
        )

    # Steps and rows that fail

    def restart(self, plan: StepPlan, rows: range) -> StepPlan:
        """A plan that computes these rows of a failed step again, whatever that step has already written.

        Args:
            plan: of the failed step, the only one in flight: a later one would have read unwritten memory.
        """
        (flight,) = self.in_flight
        assert flight.plan is plan, "it is not in flight"
        restarted = restart_rows(plan, rows, flight.sequences[rows.start : rows.stop])
        restarted.host_copies = self.host.on_restart()
        return restarted

    def lose_in_flight(self, now: float) -> StepDelivery:
        """A step raised when its result was read, after another was sent: perhaps neither computed anything.

        Their sequences compute everything again. Until such a sequence has sampled a token, each step with it must come
        back before the next is sent, so that a step that raises again can be bisected.
        """
        unwritten: set[int] = set()  # the blocks that their rows write to, and later ones
        for flight in self.in_flight:
            self.host.on_lost()
            for start, sequence in zip(flight.plan.starts.tolist(), flight.sequences, strict=True):
                unwritten.update(sequence.table.blocks[start // self.limits.block_size :])
        lost = self._abandon(now)
        for sequence in (*lost, *self._bystanders_misled(lost, unwritten)):
            self.states.suspects.add(sequence)
            self.states.compute_again(sequence)
        self.states.settle()
        return self.states.outbox.take(self.stats())

    def _abandon(self, now: float) -> list[Sequence]:
        """None of the steps in flight will come back. Returns the sequences that were in them, each once."""
        self._landed_s = now
        found = dict.fromkeys(sequence for flight in self.in_flight for sequence in flight.sequences)
        for sequence in found:
            sequence.num_in_flight = sequence.num_pending = 0
        if self.states.kept is not None:
            for flight in self.in_flight:
                for save in flight.plan.state_saves:
                    self.states.kept.give_back(save.kept)
        self.in_flight.clear()
        return list(found)

    def _lose_row(self, sequence: Sequence, cause: str | None) -> None:
        """End the sequence of a failed row; without a cause, it only depended on a failed row and is computed again."""
        if cause is None:
            self.states.compute_again(sequence)
        else:
            self.states.forget(sequence)
            group = self.states.groups.get(sequence.request_id)
            ending = group.sequences if group is not None and sequence.search is not None else [sequence]
            for one in reversed(ending):
                self.states.finish(one, sequence.cancel_reason or FinishReason.ERROR, cause)

    def _bystanders_misled(self, lost: list[Sequence], unwritten: set[int]) -> list[Sequence]:
        """Running sequences, besides the lost ones, with unwritten blocks or copies of them.

        They were admitted with the step or after it, or were in it with a block that an unwritten one has replaced
        since. Steps in flight may have copied the blocks to others.
        """
        reached, known = set(unwritten), set(lost)
        for flight in self.in_flight:
            copies = zip(flight.plan.copy_sources.tolist(), flight.plan.copy_targets.tolist(), strict=True)
            reached |= {target for source, target in copies if source in reached}
        return [s for s in self.states.running if s not in known and not reached.isdisjoint(s.table.blocks)]

    # News for the loop

    def flush(self) -> StepDelivery | None:
        """Output without a step, such as ends of sequences that were not in flight. None: there is none."""
        stats = self.stats()
        return self.states.outbox.take(stats) if self.states.outbox.has_news(stats) else None

    def offload_kept(self) -> BlockCopies | None:
        """After the last step: the copies that bring all cached blocks to the host."""
        self.pool.offload_kept()
        return self.host.take_copies()

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended: running, waiting or paused."""
        return bool(self.states.groups)

    def stats(self) -> EngineStats:
        windows = self.pool.windows
        return EngineStats(
            num_waiting=len(self.states.waiting),
            num_running=len(self.states.running),
            num_paused=self.states.num_paused,
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_used,
            num_cached_blocks=self.pool.num_kept,
            num_cache_evictions=self.pool.num_evictions,
            num_window_blocks=0 if windows is None else windows.num_blocks,
            num_used_window_blocks=0 if windows is None else windows.num_used,
            num_cached_window_blocks=0 if windows is None else windows.num_kept,
            num_host_blocks=self.host.num_slots,
            num_used_host_blocks=self.host.num_used,
            num_offloaded_blocks=self.host.num_offloaded,
            num_restored_blocks=self.host.num_restored,
            num_recomputed_blocks=self.host.num_recomputed,
            block_bytes=self.limits.block_bytes,
            outlook=self._outlook,
            draft_tokens=dict(self.drafts.computed),
            accepted_tokens=dict(self.drafts.accepted),
            step_cost_error_p50=self.step_cost.error_p50,
            step_cost_error_p90=self.step_cost.error_p90,
            landed_s=self._landed_s,
            **vars(self._counts),
        )


def _is_plain(sequence: Sequence) -> bool:
    """Whether its next token depends on the last one only through the model."""
    return sequence.grammar is None and sequence.repetition is None and sequence.search is None
