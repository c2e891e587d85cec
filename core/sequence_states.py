"""Moves sequences between their states, with the slots and blocks that they hold. Thread: engine.

They wait, run, fork, give way, are computed again, and end. They end in one place (finish), and blocks are released in
one place (give_back).
"""

import heapq

from core.charges import Charges
from core.fairness import TenantShares
from core.outbox import Outbox
from core.sequence import NO_SLOT, Sequence, SequenceGroup, SequenceState
from core.sequence_blocks import SequenceBlocks
from core.types import Cost, FinishReason, TokenChunk, TokenLogprobs, Usage
from core.waiting import WaitingQueue


class SequenceStates:
    """All live sequences.

    Args:
        num_slots: sequences that can run at once.
        groups: live requests, by id.
        waiting: neither paused ones nor unforked siblings.
        running: as they were admitted: a set in order, as unsettled.
        num_paused: requests.
        occupants: by slot; free_slots: a heap: low slots first keep the runner's rows dense.
        unsettled: cancelled, lost or ended in flight.
        suspects: were in a step that raised, and were not seen to be innocent since.
        now_s: when the last plan was made: from then on ages whoever begins to wait, or to run.
    """

    def __init__(
        self, num_slots: int, blocks: SequenceBlocks, charges: Charges, shares: TenantShares, outbox: Outbox
    ) -> None:
        self.blocks, self.charges, self.shares, self.outbox = blocks, charges, shares, outbox
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        self.num_paused = 0
        self.occupants: list[Sequence | None] = [None] * num_slots
        self.free_slots = list(range(num_slots))
        self.unsettled: dict[Sequence, None] = {}
        self.suspects: set[Sequence] = set()
        self.now_s = 0.0

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
        group = self.groups[sequence.request_id]
        self._leave_siblings(group, sequence)
        self.waiting.remove(sequence)
        self.stop_running(sequence)
        self.suspects.discard(sequence)
        sequence.state = SequenceState.FINISHED
        if sequence.num_in_flight:
            self.unsettled[sequence] = None
        self.give_back(sequence)
        group.num_live -= 1
        is_last = group.num_live == 0
        self.outbox.chunks.append(
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

    def _end_group(self, group: SequenceGroup) -> Usage:
        del self.groups[group.request.request_id]
        self.shares.leave(group.tenant)
        self.num_paused -= group.is_paused
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
                self.fork(sequence, heir)
            elif not group.is_paused:
                self.waiting.add(heir, self.now_s)

    def stop_running(self, sequence: Sequence) -> None:
        """It is no longer charged, nor preempted. It still holds what it has."""
        if sequence.state is SequenceState.RUNNING:
            del self.running[sequence]
            sequence.tenant.num_running -= 1
            self.charges.refund(sequence)
            sequence.plain_end = 0

    def give_back(self, sequence: Sequence) -> None:
        """The one place where a sequence loses its slot and its blocks: after its end, or when it is preempted.

        Idempotent, and nothing is done while it is in flight: apply() comes back to it.
        """
        if sequence.num_in_flight or sequence.slot == NO_SLOT:
            return
        self.blocks.publish(sequence, min(sequence.num_computed_tokens, len(sequence.token_ids)))
        self.blocks.pool.release(sequence.table.take())
        self.occupants[sequence.slot] = None
        heapq.heappush(self.free_slots, sequence.slot)
        sequence.slot = NO_SLOT

    def occupy_slot(self, sequence: Sequence) -> None:
        """Give it the lowest free one; the runner has to be told of it anew."""
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.is_started = False
        self.occupants[sequence.slot] = sequence

    def start_running(self, sequence: Sequence) -> None:
        """It has its slot and its blocks: from now on it is charged for them, and may have to give way."""
        sequence.state = SequenceState.RUNNING
        sequence.progress_s = self.now_s
        self.running[sequence] = None
        sequence.tenant.num_running += 1
        self.charges.bounds.include(sequence)

    def joining(self, sequence: Sequence) -> list[Sequence]:
        """Who needs a slot when this one is admitted."""
        group = self.groups[sequence.request_id]
        return [sequence, *group.unforked.values()] if sequence is group.leader else [sequence]

    def leads(self, sequence: Sequence) -> bool:
        """Whether siblings wait for it."""
        group = self.groups[sequence.request_id]
        return sequence is group.leader and bool(group.unforked)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that has a slot go on where its parent is."""
        self.blocks.fork(parent, child)
        child.level = parent.level
        self.start_running(child)

    def requeue(self, sequence: Sequence) -> None:
        """Take its slot and blocks; it computes all its tokens again when its old place in the queue comes."""
        self.stop_running(sequence)
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

    def forget(self, sequence: Sequence) -> None:
        """Let nobody use what it has computed, itself included."""
        self.blocks.cache.forget(
            sequence.table.blocks
        )  # some may have been computed in chunks whose fault shows only now
        sequence.num_computed_tokens = 0  # a sibling that takes over goes on from nothing of this
        sequence.plain_end = 0

    def compute_again(self, sequence: Sequence) -> None:
        """All of it: what it has computed so far cannot be used."""
        self.forget(sequence)
        sequence.is_lost = sequence.state is SequenceState.RUNNING
        if sequence.is_in_flight:
            self.unsettled[sequence] = None
        elif sequence.is_lost and sequence.cancel_reason is None:
            self.requeue(sequence)

    def settle(self) -> None:
        """After a step: end those who were cancelled meanwhile, and let go of what nothing in flight needs any more."""
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
