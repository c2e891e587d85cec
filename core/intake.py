"""Adds a step's results to its sequences and reports them: prompts, sampled and forced tokens. Thread: engine.

core/scheduler.py decides which results count, core/drafts.py which tokens follow a rejected draft.
"""

import logging
from dataclasses import dataclass

from core.config import BLOCK_SIZE
from core.drafts import Drafts
from core.plan import Flight, StepOutput
from core.sequence import ALL_SCORED, Sequence, SequenceGroup, SequenceState
from core.sequence_states import SequenceStates
from core.types import FinishReason, Prefilled, Prefilling, TokenChunk, TokenLogprobs

logger = logging.getLogger(__name__)

GRAMMAR_FAILED = "The server failed to enforce this answer's grammar. The fault is not in the request."
MOST_FORCED = BLOCK_SIZE  # tokens of a sequence in one step: what a slow reader is given at once stays bounded


@dataclass
class Counts:
    """Counters since the start, as in EngineStats."""

    num_steps: int = 0
    num_rows: int = 0
    num_prefill_rows: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_forced_tokens: int = 0
    num_preemptions: int = 0
    num_cache_queries: int = 0
    num_cache_hits: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    busy_s: float = 0.0
    predicted_s: float = 0.0
    kv_block_s: float = 0.0


class Intake:
    """
    Args:
        forces_tokens: see Scheduler.

    Attributes:
        counts: the scheduler's, too.
    """

    def __init__(self, states: SequenceStates, drafts: Drafts, forces_tokens: bool) -> None:
        self.counts = Counts()
        self._states, self._drafts, self._forces_tokens = states, drafts, forces_tokens

    def take_prompt_logprobs(self, flight: Flight, output: StepOutput, lost: set[int]) -> None:
        """Report requested prompt logprobs: each position once, however often it is computed."""
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
            self._states.outbox.chunks.append(
                TokenChunk(request_id=sequence.request_id, index=sequence.index, prompt_logprobs=tuple(told[-num_new:]))
            )
            sequence.num_scored_tokens = end if end < sequence.num_prompt_tokens - 1 else ALL_SCORED

    def advance_prompts(self, flight: Flight, lost: set[int], now: float) -> None:
        """Count computed prompt tokens, and fork the siblings of leaders whose prompt is complete.

        Args:
            lost: rows whose result cannot be used.
        """
        for row in flight.other_rows:
            sequence, start = flight.sequences[row], int(flight.plan.starts[row])
            if start < sequence.num_prompt_tokens and row not in lost and not sequence.is_lost:
                end = min(start + int(flight.plan.lengths[row]), sequence.num_prompt_tokens)
                self._advance_prompt(sequence, start, end, now)

    def _advance_prompt(self, sequence: Sequence, start: int, end: int, now: float) -> None:
        """Positions `start` to `end` - 1 of its prompt are computed now; earlier ones were before, or cached."""
        counts = self.counts
        counts.num_prefill_rows += 1
        counts.num_prompt_tokens += end - start
        group = self._states.groups.get(sequence.request_id)
        if group is None or group.sequences[sequence.index] is not sequence:
            return  # the request ended while this was computed
        is_looked_up = self._states.pool.has_prefix_cache and sequence.sampling.num_prompt_logprobs is None
        is_looked_up &= not sequence.pools_all
        if group.num_prompt_tokens_done == 0 and is_looked_up:
            counts.num_cache_queries += sequence.num_prompt_tokens
        num_cached = max(0, start - group.num_prompt_tokens_done)  # not computed by this request
        group.num_cached_tokens += num_cached
        counts.num_cache_hits += num_cached
        group.num_prompt_tokens_done = max(group.num_prompt_tokens_done, end)
        if sequence.state is SequenceState.FINISHED:
            return
        if not group.is_prefilled:
            self._tell_prefill(group, end, now)
        if end == sequence.num_prompt_tokens and sequence is group.leader and group.search is None:
            self._states.fork_siblings(group)

    def _tell_prefill(self, group: SequenceGroup, end: int, now: float) -> None:
        """A chunk has computed the prompt up to position `end` for the first time."""
        request_id, marks = group.request.request_id, self._states.outbox.marks
        group.num_prompt_chunks += 1
        if end == len(group.request.prompt_ids):
            group.is_prefilled = True
            marks.append(Prefilled(request_id, now, group.num_prompt_chunks, group.num_cached_tokens))
        elif group.request.tells_progress:
            marks.append(Prefilling(request_id, end))

    def take_tokens(self, output: StepOutput, sequences: list[Sequence], lost: set[int], refused: set[int]) -> None:
        """Append the sampled tokens to their sequences, except those that ended, were lost or are being cancelled.

        Args:
            refused: indexes of tokens to leave out.
        """
        told: list[Sequence] = []
        told_ids: list[int] = []
        logprobs, finished = output.logprobs, SequenceState.FINISHED
        rows = output.rows.tolist()
        for i, (row, token_id) in enumerate(zip(rows, output.token_ids.tolist(), strict=True)):
            sequence = sequences[row]
            if row in lost or i in refused:
                continue
            if not sequence.plain_end and (
                sequence.cancel_reason is not None or sequence.state is finished or sequence.is_lost
            ):
                continue
            token_ids = sequence.token_ids
            if sequence.search is not None:
                sequence.search.told[sequence.index] = logprobs[i]
                self.counts.num_generated_tokens += 1
                continue
            token_ids.append(token_id)
            if (
                token_id in sequence.stop_ids
                or len(token_ids) >= sequence.max_length
                or i in logprobs
                or sequence.grammar is not None
            ):
                if told:  # some may be of this sequence
                    self._tell(told, told_ids)
                    told, told_ids = [], []
                self._take_notable_token(sequence, token_id, logprobs.get(i))
                if sequence.grammar is not None and self._forces_tokens:
                    is_last = rows[i + 1 : i + 2] != [row] or i + 1 in refused
                    self._take_forced(sequence, MOST_FORCED if is_last else 0)
            else:
                told.append(sequence)
                told_ids.append(token_id)
        self._tell(told, told_ids)

    def _tell(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        self.counts.num_generated_tokens += len(sequences)
        self._states.outbox.add_tokens(sequences, token_ids)

    def _take_notable_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Report an appended token that has logprobs or may end its sequence."""
        grammar = sequence.grammar
        if len(sequence.token_ids) > sequence.max_length:  # max_tokens is 0
            sequence.token_ids.pop()
            self._states.finish(sequence, FinishReason.LENGTH)
            return
        reason = sequence.end_after_last_token()
        if grammar is not None and reason is not FinishReason.STOP:
            grammar.accept(token_id)
        if grammar is not None and grammar.fault is not None:
            sequence.token_ids.pop()
            logger.error("%s: its grammar failed: %s", sequence.request_id, grammar.fault)
            failed = FinishReason.TOO_COMPLEX if grammar.is_too_complex else FinishReason.ERROR
            self._states.finish(sequence, failed, GRAMMAR_FAILED)
            return
        if grammar is not None and grammar.is_free and sequence.num_own_tokens >= sequence.sampling.min_tokens:
            sequence.grammar = None
        self.counts.num_generated_tokens += 1
        if grammar is not None and token_id in sequence.model_ends and grammar.has_ended:  # before min_tokens
            reason = FinishReason.STOP
        if reason is FinishReason.STOP:
            self._states.finish(sequence, reason, stop_logprobs=logprobs)
            return
        if logprobs is None:
            self._states.outbox.add_tokens([sequence], [token_id])
        else:
            self._states.outbox.add_notable(sequence, (logprobs,))
        if grammar is not None and grammar.has_ended and reason is None:
            reason = FinishReason.STOP
        if reason is not None:
            self._states.finish(sequence, reason)

    def _take_forced(self, sequence: Sequence, most: int) -> None:
        """After a token, append the tokens that the grammar now forces, without sampling them.

        The output does not depend on load: a token not appended here is sampled later, as the only allowed one.

        Args:
            most: 0: the step has sampled the next ones.
        """
        forced, grammar, num_taken = sequence.forced, sequence.grammar, 0
        assert grammar is not None
        while sequence.state is SequenceState.RUNNING and sequence.cancel_reason is None:
            self._drafts.next_forced(forced, grammar)
            if not forced or num_taken == most or not sequence.takes_forced:
                return
            sequence.token_ids.append(forced[0])
            self._take_notable_token(sequence, forced[0], None)
            self.counts.num_forced_tokens += 1
            sequence.num_spared_steps += 1
            num_taken += 1
