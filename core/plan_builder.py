"""Collects the rows of one step and makes the plan's columns of them. Thread: engine."""

from collections.abc import Iterable

import numpy as np

from core.plan import PENDING, Int32Array, PromptTargets, SequenceStart, StepPlan
from core.sequence import ALL_SCORED, Sequence
from core.step_cost import PROMPT_TILE, StepWork


class PlanBuilder:
    """One plan in the making. Rows stand in the order in which they were added.

    Args:
        budget: tokens that may still be added.
        prompt_tile: see RunnerLimits.
        other_rows: those that are no plain decodes (Sequence.plain_end).
    """

    def __init__(self, budget: int, prompt_tile: int = PROMPT_TILE) -> None:
        self.budget = budget
        self.work = StepWork(tile=prompt_tile)
        self.sequences: list[Sequence] = []
        self.other_rows: list[int] = []
        self.sources: set[int] = set()  # of copies
        self._copy_sources: list[int] = []
        self._copy_targets: list[int] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._samples: list[bool] = []
        self._token_ids: list[int] = []
        self._table_slots: list[int] = []
        self._table_positions: list[int] = []
        self._table_blocks: list[int] = []
        self._sequence_starts: list[SequenceStart] = []
        self._prompt_targets: list[PromptTargets] = []

    def add_row(self, sequence: Sequence, start: int, length: int) -> None:
        """Compute `length` tokens from position `start` on; tell the runner what it does not know of the sequence."""
        end = start + length
        samples = end == len(sequence.token_ids) + sequence.num_pending
        self._add(sequence, start, length, samples)
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        sequence.num_pending += samples

    def add_again(self, sequence: Sequence, start: int, length: int, samples: bool) -> None:
        """A row of a plan that failed, once more."""
        self._add(sequence, start, length, samples)

    def _add(self, sequence: Sequence, start: int, length: int, samples: bool) -> None:
        token_ids = sequence.token_ids[start : start + length]
        self.other_rows.append(len(self.sequences))
        if sequence.num_scored_tokens != ALL_SCORED:
            self._ask_of_prompt(sequence, start, start + length)
        self.sequences.append(sequence)
        self._starts.append(start)
        self._lengths.append(length)
        self._samples.append(samples)
        self._token_ids += token_ids
        if len(token_ids) < length:
            self._token_ids += [PENDING] * (length - len(token_ids))
        self.work.add(start, start + length, sequence.num_prompt_tokens)
        self.budget -= length
        if not sequence.is_started:
            self._start(sequence)
        if sequence.table.num_sent < len(sequence.table.blocks):
            self._send_table(sequence)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Compute the last token of each, one that it has drawn itself; the runner knows all else of them.

        As add_row would, column by column: most rows of most steps are these.
        """
        num_rows, positions = len(sequences), [sequence.num_computed_tokens for sequence in sequences]
        self.sequences += sequences
        self._starts += positions
        self._lengths += [1] * num_rows
        self._samples += [True] * num_rows
        self._token_ids += [PENDING if sequence.num_pending else sequence.token_ids[-1] for sequence in sequences]
        self.budget -= num_rows
        self.work.own_tokens += num_rows
        self.work.own_kv += sum(positions) + num_rows
        for sequence in sequences:
            sequence.num_computed_tokens += 1
            sequence.num_in_flight += 1
            sequence.num_pending += 1

    def add_copy(self, source: int, target: int) -> None:
        self.sources.add(source)
        self._copy_sources.append(source)
        self._copy_targets.append(target)

    def replace_block(self, sequence: Sequence, position: int, block: int) -> None:
        """Copy on write: `block` takes the place of the shared one at this index of the sequence's table."""
        self.add_copy(sequence.table.blocks[position], block)
        sequence.table.blocks[position] = block
        if position < sequence.table.num_sent:
            self._send_block(sequence.slot, position, block)

    def build(self) -> StepPlan | None:
        """The plan, None if it has no rows."""
        if not self.sequences:
            return None
        return StepPlan(
            slots=_int32([sequence.slot for sequence in self.sequences]),
            starts=_int32(self._starts),
            lengths=_int32(self._lengths),
            samples=np.fromiter(self._samples, np.bool_, len(self._samples)),
            token_ids=_int32(self._token_ids),
            table_slots=_int32(self._table_slots) if self._table_slots else _NONE,
            table_positions=_int32(self._table_positions) if self._table_positions else _NONE,
            table_blocks=_int32(self._table_blocks) if self._table_blocks else _NONE,
            copy_sources=_int32(self._copy_sources) if self._copy_sources else _NONE,
            copy_targets=_int32(self._copy_targets) if self._copy_targets else _NONE,
            sequence_starts=self._sequence_starts,
            prompt_targets=self._prompt_targets,
        )

    def _ask_of_prompt(self, sequence: Sequence, start: int, end: int) -> None:
        """The row that is added next: what it is to tell of the tokens that follow its own."""
        first, last = max(start, sequence.num_scored_tokens), sequence.end_of_scores(end)
        if first < last:
            num_top = sequence.sampling.num_prompt_logprobs or 0
            token_ids = tuple(sequence.token_ids[first + 1 : last + 1])
            self._prompt_targets.append(PromptTargets(len(self.sequences), first - start, token_ids, num_top))

    def _start(self, sequence: Sequence) -> None:
        sequence.is_started = True
        sequence.table.num_sent = 0
        self._sequence_starts.append(
            SequenceStart(
                slot=sequence.slot,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=sequence.sampling,
                seed=sequence.seed,
                stop_ids=sequence.stop_ids,
            )
        )

    def _send_table(self, sequence: Sequence) -> None:
        table = sequence.table
        new = table.blocks[table.num_sent :]
        self._table_slots += [sequence.slot] * len(new)
        self._table_positions += range(table.num_sent, len(table.blocks))
        self._table_blocks += new
        table.num_sent = len(table.blocks)

    def _send_block(self, slot: int, position: int, block: int) -> None:
        self._table_slots.append(slot)
        self._table_positions.append(position)
        self._table_blocks.append(block)


def _int32(values: list[int]) -> Int32Array:
    return np.fromiter(values, np.int32, len(values))  # np.array takes twice as long: it looks for the shape first


_NONE = _int32([])
_NONE.flags.writeable = False


def restart_rows(plan: StepPlan, rows: range, sequences: list[Sequence]) -> StepPlan:
    """The plan of some rows of a failed plan, which relies on nothing that the failed step left in the runner.

    Every slot is started anew with its whole table. Blocks are copied again: their sources still hold what was shared,
    because the scheduler hands none of them out before the failed plan is applied.

    Args:
        sequences: of these rows, in order. All plans before this one were applied since it was made: tokens that were
            pending are known, but those of a row that failed, and what that one's sequence draws here is not used.
    """
    builder = PlanBuilder(budget=plan.num_tokens)
    copies = dict(zip(plan.copy_targets.tolist(), plan.copy_sources.tolist(), strict=True))
    starts, lengths, samples = plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist()
    for row, sequence in zip(rows, sequences, strict=True):
        sequence.is_started = False
        builder.add_again(sequence, starts[row], lengths[row], samples[row])
        for block in sequence.table.blocks:
            if block in copies:
                builder.add_copy(copies[block], block)
    restarted = builder.build()
    assert restarted is not None, "a restart needs rows"
    return restarted


def rows_misled(
    plan: StepPlan, sequences: list[Sequence], failed_rows: Iterable[int], block_size: int
) -> tuple[set[int], set[int]]:
    """Rows of a plan that read blocks which failed rows should have written, or rows misled themselves.

    Args:
        sequences: of all its rows, in order; whoever shares a block in a plan comes after its writer.

    Returns: these rows, and the blocks that nobody has written.
    """
    unwritten: set[int] = set()  # blocks
    misled: set[int] = set()
    failed = set(failed_rows)
    for row, (start, sequence) in enumerate(zip(plan.starts.tolist(), sequences, strict=True)):
        num_read = start // block_size  # full blocks before its own
        if not unwritten.isdisjoint(sequence.table.blocks[:num_read]):
            misled.add(row)
        if row in failed or row in misled:
            unwritten.update(sequence.table.blocks[num_read:])
    return misled, unwritten
