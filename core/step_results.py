"""Takes in what a step gave: tokens, forks, ends, rows that are lost, what it cost. Thread: engine."""

from core.counts import Counts, mark_of_chunk
from core.plan import Flight, InFlight, StepOutput, StepPlan, blocks_reached, rows_misled
from core.sequence import ALL_SCORED, Sequence, SequenceState
from core.sequence_states import SequenceStates
from core.step_cost import StepCostModel, StepWork
from core.types import FinishReason, TokenLogprobs


class StepResults:
    """What came of the steps, and what has been counted of them.

    Args:
        block_size: tokens.
        last_work: of the step that came back last.
    """

    def __init__(self, states: SequenceStates, in_flight: InFlight, step_cost: StepCostModel, block_size: int) -> None:
        self.counts = Counts()
        self.last_work = StepWork()
        self._states = states
        self._in_flight = in_flight
        self._step_cost = step_cost
        self._block_size = block_size

    def take_in(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Of the oldest step in flight: tokens, forks, ends."""
        flight, step_s = self._in_flight.land(now)
        assert flight.plan is plan, "an older step has to come back first"
        sequences = flight.sequences
        misled, lost, bystanders = set[int](), set[int](), list[Sequence]()
        if output.failed_rows:
            misled, unwritten = rows_misled(plan, sequences, output.failed_rows, self._block_size)
            lost = misled.union(output.failed_rows)
            bystanders = self._bystanders_misled([sequences[row] for row in lost], unwritten)
        self._states.blocks.host.on_applied(len(output.failed_rows) < len(sequences), output.host_copy_s)
        self._account(flight, step_s - output.host_copy_s)
        self._take_prompt_logprobs(flight, output, lost)
        self._advance(flight, lost, now)
        self._take_tokens(output, sequences, lost)
        for row in sorted(lost):
            self._lose_row(sequences[row], None if row in misled else output.failed_rows[row])
        for bystander in bystanders:
            self._states.compute_again(bystander)
        if flight.has_suspects:
            self._states.suspects.difference_update(sequences[row] for row in output.rows.tolist() if row not in lost)
        self._states.settle()

    def lose_in_flight(self, now: float) -> None:
        """All that is in flight is to be computed anew: see Scheduler."""
        unwritten = self._in_flight.written_blocks(self._block_size)
        for _ in self._in_flight:
            self._states.blocks.host.on_lost()
        lost = self._in_flight.abandon(now)
        for sequence in (*lost, *self._bystanders_misled(lost, unwritten)):
            self._states.suspects.add(sequence)
            self._states.compute_again(sequence)
        self._states.settle()

    def _account(self, flight: Flight, step_s: float) -> None:
        """Learn from a step's duration, and charge for it."""
        self.last_work = flight.work
        self._step_cost.observe(flight.work, step_s)
        num_held = self._states.charges.charge_step(flight, self._states.running, step_s)
        self.counts.add_step(len(flight.sequences), step_s, num_held)

    def _advance(self, flight: Flight, lost: set[int], now: float) -> None:
        """Count what was computed of prompts, and fork those who waited for theirs.

        Args:
            lost: rows that computed nothing that can be used.
        """
        for row in flight.other_rows:
            sequence, start = flight.sequences[row], int(flight.plan.starts[row])
            if start < sequence.num_prompt_tokens and row not in lost and not sequence.is_lost:
                self._advance_prompt(sequence, start, start + int(flight.plan.lengths[row]), now)

    def _advance_prompt(self, sequence: Sequence, before: int, end: int, now: float) -> None:
        num_computed = min(end, sequence.num_prompt_tokens)
        self.counts.num_prefill_rows += 1
        self.counts.num_prompt_tokens += num_computed - before
        group = self._states.groups.get(sequence.request_id)
        if group is None or group.sequences[sequence.index] is not sequence:
            return  # the request ended while this was computed
        is_looked_up = self._states.blocks.cache.is_enabled and sequence.sampling.num_prompt_logprobs is None
        self.counts.add_prompt(group, before, num_computed, is_looked_up)
        if sequence.state is SequenceState.FINISHED:
            return
        if not group.is_prefilled and (mark := mark_of_chunk(group, num_computed, now)) is not None:
            self._states.outbox.marks.append(mark)
        if num_computed == sequence.num_prompt_tokens and sequence is group.leader:
            for sibling in group.unforked.values():
                self._states.fork(sequence, sibling)
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
            self._states.outbox.add_prompt_logprobs(sequence, told[-num_new:])
            sequence.num_scored_tokens = end if end < sequence.num_prompt_tokens - 1 else ALL_SCORED

    def _lose_row(self, sequence: Sequence, cause: str | None) -> None:
        """A row failed, or (None) read what a failed one should have written: then its sequence computes it itself."""
        if cause is None:
            self._states.compute_again(sequence)
        else:
            self._states.forget(sequence)
            self._states.finish(sequence, sequence.cancel_reason or FinishReason.ERROR, cause)

    def _bystanders_misled(self, lost: list[Sequence], unwritten: set[int]) -> list[Sequence]:
        """Who counts on these blocks beside the sequences that are lost: admitted with the step or after it.

        Or in the step itself, with a block of its own that one of these has taken the place of since.
        """
        reached, known = blocks_reached(self._in_flight, unwritten), set(lost)
        return [s for s in self._states.running if s not in known and not reached.isdisjoint(s.table.blocks)]

    def _take_tokens(self, output: StepOutput, sequences: list[Sequence], lost: set[int]) -> None:
        """Give sequences the tokens they have drawn, but those that ended before it or are about to be cancelled."""
        told: list[Sequence] = []
        told_ids: list[int] = []
        logprobs, finished = output.logprobs, SequenceState.FINISHED
        for i, (row, token_id) in enumerate(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True)):
            sequence = sequences[row]
            if row in lost:
                continue
            if not sequence.plain_end and (
                sequence.cancel_reason is not None or sequence.state is finished or sequence.is_lost
            ):
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if token_id in sequence.stop_ids or len(token_ids) >= sequence.max_length or i in logprobs:
                self._take_notable_token(sequence, token_id, logprobs.get(i))
            else:
                told.append(sequence)
                told_ids.append(token_id)
        self.counts.num_generated_tokens += len(told)
        self._states.outbox.add_tokens(told, told_ids)

    def _take_notable_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Tell a token that has logprobs, or may end its sequence, which it has been appended to."""
        if len(sequence.token_ids) > sequence.max_length:  # max_tokens is 0
            sequence.token_ids.pop()
            self._states.finish(sequence, FinishReason.LENGTH)
            return
        self.counts.num_generated_tokens += 1
        reason = sequence.end_after_last_token()
        if reason is not FinishReason.STOP:
            self._states.outbox.add_token(sequence, token_id, logprobs)
        if reason is not None:
            self._states.finish(sequence, reason, stop_logprobs=logprobs if reason is FinishReason.STOP else None)
