"""Owns all live sequences and their states, slots and blocks. Thread: engine.

Sequences wait, run, fork, are preempted, recomputed, and end. They end in one place (finish), and blocks are released
in one place (give_back). A sequence's blocks come from the prefix cache, from host copies, from a parent, or are new. A
sequence that needs more than are free gets none; the scheduler decides which one to preempt.
"""

import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterable

from core.drafter import RecentAnswers
from core.kv_cache import (
    BlockLabel,
    BlockPool,
    HostBlocks,
    KeptStates,
    WindowBlocks,
    least_window_blocks,
    num_blocks_for,
    num_seen_blocks,
)
from core.plan import PlanBuilder, RunnerLimits, StateSave
from core.queue import Charges, TenantShares, WaitingQueue
from core.sequence import ALL_SCORED, NO_SLOT, Sequence, SequenceGroup, SequenceState
from core.step_cost import StepCostModel
from core.types import (
    Cost,
    EngineMark,
    EngineStats,
    FinishReason,
    Request,
    StepDelivery,
    TokenChunk,
    TokenLogprobs,
    Usage,
)

FIRST_GUESS_TOKENS = 128.0  # of an answer, until some have ended
ANSWER_RATE = 1 / 32  # weight of the newest answer in their mean length


class Outbox:
    """Output for the loop, until the next delivery."""

    def __init__(self) -> None:
        self._told: EngineStats | None = None
        self._request_ids: list[str] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self.chunks: list[TokenChunk] = []
        self.marks: list[EngineMark] = []

    def add_tokens(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """One token of each, without logprobs."""
        self._request_ids += [sequence.request_id for sequence in sequences]
        self._indexes += [sequence.index for sequence in sequences]
        self._token_ids += token_ids

    def add_notable(self, sequence: Sequence, tokens: tuple[TokenLogprobs, ...], tells_logprobs: bool = True) -> None:
        """Some of one, with their logprobs or without."""
        name, logprobs = sequence.request_id, tokens if tells_logprobs else None
        token_ids = tuple([token.token_id for token in tokens])
        self.chunks.append(TokenChunk(request_id=name, index=sequence.index, token_ids=token_ids, logprobs=logprobs))

    def has_news(self, stats: EngineStats) -> bool:
        """Whether anything must be delivered although no step ran: an end, or changed stats."""
        return bool(self.chunks) or stats != self._told

    def take(self, stats: EngineStats) -> StepDelivery:
        self._told = stats
        delivery = StepDelivery(self._request_ids, self._indexes, self._token_ids, self.chunks, stats, self.marks)
        self._request_ids, self._indexes, self._token_ids, self.chunks, self.marks = [], [], [], [], []
        return delivery


class SequenceStates:
    """All live sequences.

    Args:
        num_slots: number of sequences that can run at once.
        stored: see HostBlocks.

    Attributes:
        groups: live requests, by id.
        waiting: without paused ones and unforked siblings.
        running: an ordered set, in order of admission; so is unsettled.
        num_paused: requests.
        occupants: by slot; free_slots: a heap, because low slots first keep the runner's rows dense.
        unsettled: cancelled, lost or finished while in flight.
        recent: answers, for drafts.
        suspects: sequences of a step that raised, which have not sampled since.
        now_s: when the last plan was made; sequences that begin to wait or run age from then on.
        mean_answer_tokens: of finished sequences.
        kept: recurrent states; None: the model has no recurrent layers.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        num_slots: int,
        step_cost: StepCostModel,
        has_prefix_cache: bool,
        stored: Iterable[tuple[int, BlockLabel]],
    ) -> None:
        self.host = HostBlocks(limits.num_host_blocks, limits.host_copy_s, stored)
        self.kept = None if limits.num_kept_states is None else KeptStates(limits.num_kept_states)
        windows = None if limits.num_window_blocks is None else WindowBlocks(limits.num_window_blocks)
        sizes, window = (limits.num_blocks, limits.block_size), limits.window or 1
        self.pool = BlockPool(*sizes, has_prefix_cache, self.host, self.kept, windows, window)
        self._most_seen = num_seen_blocks(window, limits.block_size)
        self._least_windows = least_window_blocks(window, limits.max_batch_tokens, limits.block_size)
        if windows is not None:
            assert windows.num_blocks >= self._least_windows, "any sequence can run alone"
            assert not limits.num_host_blocks, "host copies have no window blocks"
        self.charges = Charges(step_cost, limits.num_blocks)
        self.shares = TenantShares()
        self.outbox = Outbox()
        self.recent = RecentAnswers()
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        self.num_paused = 0
        self.occupants: list[Sequence | None] = [None] * num_slots
        self.free_slots = list(range(num_slots))
        self.unsettled: dict[Sequence, None] = {}
        self.suspects: set[Sequence] = set()
        self.now_s = 0.0
        self.mean_answer_tokens = FIRST_GUESS_TOKENS
        self._step_cost = step_cost
        self._limits, self._block_size = limits, limits.block_size

    # Waiting and running

    def joining(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that need a slot when this one is admitted: itself, and siblings that wait for it."""
        group = self.groups[sequence.request_id]
        return [sequence, *group.unforked.values()] if sequence is group.leader else [sequence]

    def admit(self, sequence: Sequence, level: int) -> None:
        """Let the queue's head, which has its blocks, run; its siblings get their slots with it.

        Args:
            level: its aged class.
        """
        self.waiting.admit(sequence, self.now_s)
        for member in self.joining(sequence):
            member.slot = heapq.heappop(self.free_slots)
            member.is_started = False
            self.occupants[member.slot] = member
        sequence.level = level
        self.charges.prepay(sequence)
        self._start_running(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a child that has a slot at its parent's position, except for the last token, which it computes itself.

        They share the parent's blocks; the first to write into a shared one copies it. A full block is never written
        to: where the last token fills one, the child computes that block's tokens again. The child also computes the
        positions whose prompt logprobs have not been told, and with recurrent layers those after the last kept state.
        """
        assert not parent.plain_end, "it would continue in a block that is no longer its own"
        child.num_scored_tokens = parent.num_scored_tokens
        if self.kept is not None:
            child.level, child.num_computed_tokens = parent.level, 0
            self._start_running(child)
            return
        child.num_computed_tokens = min(
            parent.num_computed_tokens, child.num_prompt_tokens, len(child.token_ids) - 1, child.num_scored_tokens
        )
        if len(child.token_ids) % self._block_size == 0 or child.num_scored_tokens != ALL_SCORED:
            child.num_computed_tokens -= child.num_computed_tokens % self._block_size
        self._share_blocks(parent, child)
        child.level = parent.level
        self._start_running(child)

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Continue a sequence that has a slot from a sibling's tokens, with its blocks; its own are released.

        Prompt blocks that both have stay as they are: there may be thousands, and this is done each step.
        """
        num_prompt, one, other = child.num_prompt_tokens, child.table, parent.table
        num_kept = min(num_prompt, parent.num_computed_tokens) // self._block_size
        if one.num_dropped or other.num_dropped or one.blocks[:num_kept] != other.blocks[:num_kept]:
            num_kept = 0
        self.pool.empty(one, num_kept)
        child.token_ids[num_prompt:] = parent.token_ids[num_prompt:]
        child.num_computed_tokens, child.num_scored_tokens = parent.num_computed_tokens, ALL_SCORED
        self._share_blocks(parent, child, num_kept)
        if self.kept is not None:
            self._start_from(child, ~parent.slot)
        child.is_started = False
        if child.state is SequenceState.WAITING:
            child.level = parent.level
            self._start_running(child)

    def _share_blocks(self, parent: Sequence, child: Sequence, num_held: int = 0) -> None:
        """Give a child the parent's blocks of the tokens that it counts as computed; it holds the first num_held."""
        source, table, num_tokens = parent.table, child.table, child.num_computed_tokens
        table.blocks = source.blocks[: num_blocks_for(num_tokens, self._block_size)]
        table.num_published = min(source.num_published, num_tokens // self._block_size)
        # A parent that was lost has dropped blocks, but counts no token as computed: the child begins with none
        table.num_dropped, table.dropped = min(source.num_dropped, len(table)), source.dropped[:]
        self.pool.share(table.held[num_held:])
        self.pool.share_windows(source, table)

    def fork_siblings(self, group: SequenceGroup) -> None:
        """Its leader has the prompt: let the others share it."""
        assert group.leader is not None, "a request has a sequence"
        for sibling in group.unforked.values():
            self.fork(group.leader, sibling)
        group.unforked = {}

    def gather(self, group: SequenceGroup) -> None:
        """Preempt all beams of a group together if one must wait: none can continue alone, and each has blocks."""
        assert group.search is not None, "it has beams"
        for sequence in group.sequences:
            if sequence.state is SequenceState.RUNNING:
                self.requeue(sequence)
            self.waiting.remove(sequence)
        group.search.told.clear()
        group.leader, *others = [group.sequences[index] for index in group.search.beams]
        group.unforked = {sequence.index: sequence for sequence in others}
        if not group.is_paused:
            self.waiting.add(group.leader, self.now_s)

    def requeue(self, sequence: Sequence) -> None:
        """Take away its slot and blocks; it recomputes all its tokens when its old place in the queue comes up."""
        self._stop_running(sequence)
        self.give_back(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed_tokens = 0
        sequence.is_lost = False
        group = self.groups[sequence.request_id]
        if sequence is group.leader:
            for sibling in group.unforked.values():
                self.give_back(sibling)
        if not sequence.is_paused:
            self.waiting.add(sequence, self.now_s)

    def _start_running(self, sequence: Sequence) -> None:
        """Note that it has its slot and blocks: from now on it is charged for them and may be preempted."""
        sequence.state = SequenceState.RUNNING
        sequence.progress_s = self.now_s
        self.running[sequence] = None
        sequence.tenant.num_running += 1

    def _stop_running(self, sequence: Sequence) -> None:
        """It is no longer charged or preempted, but still holds its slot and blocks."""
        if sequence.state is SequenceState.RUNNING:
            del self.running[sequence]
            sequence.tenant.num_running -= 1
            self.charges.refund(sequence)
            sequence.plain_end = 0

    # Its end

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        stop_logprobs: TokenLogprobs | None = None,
        pooled: bytes = b"",
    ) -> None:
        """End a sequence and release its resources; a request's last one sends the terminal chunk. Idempotent.

        A sequence in flight keeps its slot and blocks until its step comes back.
        """
        if sequence.state is SequenceState.FINISHED:
            return
        group = self.groups[sequence.request_id]
        self._leave_siblings(group, sequence)
        self.waiting.remove(sequence)
        self._stop_running(sequence)
        self.suspects.discard(sequence)
        sequence.state = SequenceState.FINISHED
        if sequence.num_in_flight:
            self.unsettled[sequence] = None
        self.give_back(sequence)
        if sequence.drafter is not None and sequence.num_own_tokens:
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            self.recent.add(domain_of(group.request), answer[: sequence.num_billed_tokens])
        if sequence.num_own_tokens:
            self.mean_answer_tokens += ANSWER_RATE * (max(1, sequence.num_billed_tokens) - self.mean_answer_tokens)
        group.num_live -= 1
        is_last = group.num_live == 0
        answer_ids = tuple(sequence.answer_ids)
        has_stopped = len(answer_ids) < sequence.num_own_tokens
        self.outbox.chunks.append(
            TokenChunk(
                request_id=sequence.request_id,
                index=sequence.index,
                stop_logprobs=stop_logprobs,
                answer_ids=answer_ids if group.request.tells_answer else (),
                stop_id=sequence.token_ids[-1] if has_stopped else None,
                pooled=pooled,
                finish_reason=reason,
                num_sequence_tokens=sequence.num_billed_tokens,
                usage=self._end_group(group) if is_last else None,
                cost=group.cost if is_last else Cost(),
                error=error if reason is FinishReason.ERROR else None,
            )
        )

    def give_back(self, sequence: Sequence) -> None:
        """The one place where a sequence loses its slot and blocks: after its end, or when it is preempted.

        Idempotent, and without effect while the sequence is in flight: settle() calls it again.
        """
        if sequence.num_in_flight or sequence.slot == NO_SLOT:
            return
        end = min(sequence.num_computed_tokens, len(sequence.token_ids))
        if not self.publish(sequence, end) and self.pool.windows is not None:
            if not self._limits.shares_answers:
                end = min(end, sequence.num_prompt_tokens)
            self.pool.extend(sequence.table, sequence.token_ids[: end + 1], end)  # equal blocks get its window blocks
        self._start_from(sequence, None)
        self.pool.empty(sequence.table)
        self.occupants[sequence.slot] = None
        heapq.heappush(self.free_slots, sequence.slot)
        sequence.slot = NO_SLOT

    def _end_group(self, group: SequenceGroup) -> Usage:
        del self.groups[group.request.request_id]
        self.shares.leave(group.tenant)
        self.num_paused -= group.is_paused
        return Usage(
            num_prompt_tokens=group.num_prompt_tokens_done,
            num_completion_tokens=(
                sum(sequence.num_billed_tokens for sequence in group.sequences)
                if group.search is None
                else group.search.num_tokens
            ),
            num_cached_tokens=group.num_cached_tokens,
            num_predicted_tokens=sum(bisect_left(one.predicted, one.num_billed_tokens) for one in group.sequences),
            num_mispredicted_tokens=sum(sequence.num_mispredicted_tokens for sequence in group.sequences),
        )

    def _leave_siblings(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Before a sequence ends: siblings that wait for it get another leader."""
        if group.unforked.pop(sequence.index, None) is None and sequence is group.leader and group.unforked:
            group.leader = heir = group.unforked.pop(next(iter(group.unforked)))
            heir.num_scored_tokens = sequence.num_scored_tokens
            if sequence.state is SequenceState.RUNNING:
                self.fork(sequence, heir)
            elif not group.is_paused:
                self.waiting.add(heir, self.now_s)

    # What is lost, and what is in flight

    def forget(self, sequence: Sequence) -> None:
        """Discard everything it has computed, for itself too: chunks before the failed one may be wrong."""
        self.pool.forget_table(sequence.table)
        sequence.num_computed_tokens = 0  # a sibling that takes over starts from nothing
        sequence.plain_end = 0

    def compute_again(self, sequence: Sequence) -> None:
        """Recompute all of it, once it is not in flight."""
        self.forget(sequence)
        sequence.is_lost = sequence.state is SequenceState.RUNNING
        if sequence.num_in_flight:
            self.unsettled[sequence] = None
        elif sequence.is_lost and sequence.cancel_reason is None:
            self.requeue(sequence)

    def settle(self) -> None:
        """After a step: finish what was cancelled meanwhile, and release what no step in flight still needs."""
        for sequence in list(self.unsettled):
            if sequence.cancel_reason is not None:
                self.finish(sequence, sequence.cancel_reason)
            if sequence.num_in_flight:
                continue
            del self.unsettled[sequence]
            if sequence.state is SequenceState.FINISHED:
                self.give_back(sequence)
            elif sequence.is_lost:
                self.requeue(sequence)

    # Its blocks

    def num_blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks of all its tokens and the next, if there will be one."""
        return num_blocks_for(min(len(sequence.token_ids) + 1, sequence.max_length), self._block_size)

    def num_windows_short(self, sequence: Sequence, num_reserved: int = 0) -> int:
        """Window blocks that are missing for a waiting sequence and one step, beside what running ones will hold."""
        windows = self.pool.windows
        if windows is None:
            return 0
        found = (sequence, *self.running)
        num_seen = {one: self.num_windows_of(self.num_blocks_to_admit(one)) for one in found}
        num_coming = sum(max(0, num - one.table.num_seen) for one, num in num_seen.items())
        return num_coming + self._least_windows - self._most_seen + num_reserved - windows.num_free

    def most_own_blocks(self, num_sequences: int) -> int:
        """Blocks that each of so many sequences may have beside shared ones, so that all their window blocks fit."""
        windows = self.pool.windows
        if windows is not None:
            num_each = (windows.num_blocks - self._least_windows) // num_sequences
            if num_each < self._most_seen:
                return num_each
        return self._limits.num_blocks

    def num_windows_of(self, num_blocks: int) -> int:
        """Window blocks that a sequence with so many blocks holds between steps."""
        return 0 if self.pool.windows is None else min(num_blocks, self._most_seen)

    def take_blocks(self, sequence: Sequence, num_reserved: int, num_windows_reserved: int = 0) -> bool:
        """Give a waiting sequence the blocks that are cached and new ones for the rest, or nothing and return False.

        Blocks on the host are copied into the first new ones, if that is cheaper than recomputing them.

        Args:
            num_reserved: free blocks to leave for running sequences; num_windows_reserved: of window blocks.
        """
        table, num_free = sequence.table, self.pool.num_free
        if num_free - num_reserved < sequence.num_free_blocks_needed:  # do not look a long prompt up in each step
            return False
        if self.num_windows_short(sequence, num_windows_reserved) > 0:
            return False
        self.pool.extend(table, self._cacheable(sequence))
        num_new = self.num_blocks_to_admit(sequence) - len(table)
        if num_new > self.pool.num_free - num_reserved:
            sequence.num_free_blocks_needed = num_new + num_free - self.pool.num_free
            self.pool.empty(table)
            return False
        self._restore(sequence)
        self.skip_cached(sequence)
        self.pool.grow(table, self.num_blocks_to_admit(sequence) - len(table))
        sequence.num_free_blocks_needed = 0
        return True

    def _restore(self, sequence: Sequence) -> None:
        keys = self.pool.find_on_host(sequence.table, self._cacheable(sequence))
        start = len(sequence.table) * self._block_size
        end = start + len(keys) * self._block_size
        if keys and self.host.is_cheaper(len(keys), self._step_cost.prefill_s(start, end, sequence.num_prompt_tokens)):
            self.pool.restore(sequence.table, keys)

    def _cacheable(self, sequence: Sequence) -> list[int]:
        """The tokens that the cache may give it, and one more: logits and hidden states are not cached."""
        if sequence.pools_all:
            return []
        if sequence.num_scored_tokens != ALL_SCORED:
            return sequence.token_ids[: sequence.num_scored_tokens + 1]
        return (
            sequence.token_ids if self._limits.shares_answers else sequence.token_ids[: sequence.num_prompt_tokens + 1]
        )

    def skip_cached(self, sequence: Sequence) -> int:
        """Advance it past blocks that others have published meanwhile. Returns its first position to compute."""
        table, num_computed = sequence.table, sequence.num_computed_tokens
        num_cached_tokens = self.pool.extend(table, self._cacheable(sequence), num_computed)
        if self.kept is not None and num_cached_tokens > num_computed:
            self._start_from(sequence, self.kept.read(table.blocks[table.num_published - 1]))
        sequence.num_computed_tokens = max(num_computed, num_cached_tokens)
        return sequence.num_computed_tokens

    # Recurrent states

    def _start_from(self, sequence: Sequence, source: int | None) -> None:
        """Where its next row reads its state (Sequence.state_source)."""
        if self.kept is not None and sequence.state_source is not None and sequence.state_source >= 0:
            self.kept.done(sequence.state_source)
        sequence.state_source = source

    def save_states(self, builder: PlanBuilder, sequence: Sequence, start: int, end: int) -> None:
        """Keep states of the row that was added last.

        Those at the last block border of its prompt, where the row's lookup has left the path of other prompts (at its
        start, if it has found none), and of an answer at its latest border.
        """
        if self.kept is None:
            return
        size, blocks, num_prompt_tokens = self._block_size, sequence.table.blocks, sequence.num_prompt_tokens
        if start < num_prompt_tokens:
            found = {(num_prompt_tokens - 1) // size * size, sequence.table.num_matched * size}
            borders = [border for border in found if max(start, 1) <= border < min(end, num_prompt_tokens)]
        else:
            borders = [start] if start % size == 0 and self._limits.shares_answers else []
            before = start // size - 2
            if borders and start - size >= num_prompt_tokens and not self.pool.is_shared(blocks[before]):
                self.kept.drop(blocks[before])
        for border in sorted(borders):
            if border == start and self.kept.has(blocks[border // size - 1]):
                continue
            if (place := self.kept.take()) is not None:
                builder.state_saves.append(StateSave(len(builder.sequences) - 1, border, place))

    def keep_saved(self, sequence: Sequence, save: StateSave, are_all_written: bool) -> None:
        """The step that writes this state has come back: from now on others find it, until its block is forgotten.

        Args:
            are_all_written: no row failed. Otherwise equal blocks of others may be what it should have written.
        """
        assert self.kept is not None, "plans save states of recurrent layers alone"
        table, position = sequence.table, save.position // self._block_size
        is_valid = sequence.num_computed_tokens >= save.position  # it was not forgotten meanwhile
        if is_valid and are_all_written and table.num_published < position:  # equal blocks of others are published
            self.pool.extend(table, sequence.token_ids[: save.position + 1], save.position)
            self.publish(sequence, save.position)
            if table.num_sent < len(table):
                sequence.plain_end = 0
        if is_valid and table.num_published >= position and self.pool.is_published(table.blocks[position - 1]):
            self.kept.keep(save.kept, table.blocks[position - 1])
        else:
            self.kept.give_back(save.kept)

    def publish(self, sequence: Sequence, end: int) -> bool:
        """Publish the blocks that its first `end` tokens fill. False: an equal block of another is published."""
        if not self._limits.shares_answers:
            end = min(end, sequence.num_prompt_tokens)
        return self.pool.publish(sequence.table, sequence.token_ids, end)

    def drop_unseen(self, builder: PlanBuilder, sequence: Sequence, start: int) -> None:
        """Give back the blocks, or window blocks, behind the window of the tokens from `start` on.

        One more block stays for children, which may start earlier by so much, and those stay that rows in flight may
        have to write again, that the plan copies, or, of blocks, that others cannot find yet.
        """
        limits, table, windows = self._limits, sequence.table, self.pool.windows
        if limits.window is None or (windows is None and sequence.num_scored_tokens != ALL_SCORED):
            return
        num_settled = start - sequence.num_in_flight * limits.max_batch_tokens
        if windows is not None:
            num_settled = min(num_settled, sequence.num_scored_tokens)
        end = (num_settled + 1 - limits.window) // self._block_size - 1
        is_prompt_published = table.num_published >= sequence.num_prompt_tokens // self._block_size
        if windows is None and self.pool.has_prefix_cache and (limits.shares_answers or not is_prompt_published):
            end = min(end, table.num_published - 1)
        first = table.num_dropped if windows is None else table.num_unseen
        if end > first and builder.sources.isdisjoint(table.blocks[first:end]):
            self.pool.drop(table, end)
            builder.resend(sequence, first, end)

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks after that of its next token: their drafts were rejected."""
        table = sequence.table
        num_needed = num_blocks_for(sequence.num_computed_tokens + 1, self._block_size)
        if len(table.blocks) > num_needed:
            self.pool.cut(table, num_needed)

    def own(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Make all blocks that it writes up to position `end` its own: a shared one copied, new ones for the rest.

        False, and nothing is done, if too few are free.
        """
        table, pool, blocks = sequence.table, self.pool, sequence.table.blocks
        first = sequence.num_computed_tokens // self._block_size  # only this one can be shared: later ones are new
        last = num_blocks_for(end, self._block_size)
        is_shared = first < len(blocks) and pool.is_shared(blocks[first])
        num_new = max(0, last - len(blocks))
        if num_new + is_shared > pool.num_free:
            return False
        if pool.windows is not None:
            num_windows = pool.num_windows_needed(table, first, last) + is_shared
            if num_windows > pool.windows.num_free:  # others may hold some that they will drop with their next rows
                for other in self.running:
                    self.drop_unseen(builder, other, other.num_computed_tokens)
            if num_windows > pool.windows.num_free:
                return False
        if is_shared:
            for source, target in pool.replace_shared(table, first):
                builder.add_copy(source, target)
            builder.resend(sequence, first, first + 1)
        if num_new:
            blocks += pool.allocate(num_new)
        if pool.windows is not None:
            pool.hold_windows(table, range(first, last))
            builder.resend(sequence, first, last)
        return True


def domain_of(request: Request) -> Hashable:
    """The domain whose recent answers it may use as drafts."""
    return request.tenant, request.cache_root
