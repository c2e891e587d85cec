"""What the scheduler and the runner exchange: StepPlan (columns) out, StepOutput back. Thread: engine.

A step's rows are sequences, each with some new tokens to compute; prefill and decode are the same thing. A sequence
lives in a *slot* of the runner (0..max_sequences-1) from its SequenceStart until the slot is started anew. The runner
keeps what is constant or grows there (sampling parameters, block table, token counts), so a plan carries differences.

A sequence counts the steps it is in (num_in_flight) and the tokens that these sample for it (num_pending): the next
plan continues after those tokens before they are known. Its slot and blocks stay until the last of its steps is back.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from core.kv_cache import BlockCopies
from core.repetition import TokenPenalties
from core.sequence import ALL_SCORED, Sequence
from core.step_cost import PROMPT_TILE, StepWork
from core.types import Adapter, Pooling, SamplingParams, StoreState, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

PENDING = -1  # in place of a token id: see StepPlan


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A slot's new occupant.

    Args:
        token_ids: all tokens known so far: the prompt, and after a preemption also what was generated.
        seed: 64-bit key of its counter-based noise, which depends on (seed, position) alone.
        stop_ids: ids that may not be sampled before min_tokens. Under a grammar none: its masks leave them out.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Asks a row of a prompt how likely the tokens are that follow its own.

    Args:
        row: of the plan.
        first: index among the row's tokens of the first one whose successor is asked about.
        token_ids: the successors of that token and of those after it, all of the prompt.
        num_top: how many of the likeliest to report beside each.
    """

    row: int
    first: int
    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class StateSave:
    """A sequence's recurrent state after its first `position` tokens goes to this place among those kept.

    Its row starts at this position, a block border, or comes past it within the prompt.
    """

    row: int
    position: int
    kept: int


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A row of a prompt that ends with a vector. is_last: with this row, which then fails or has it in the output."""

    row: int
    pooling: Pooling
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """What to compute in one step.

    Row i, in [0, num_rows): the sequence in slots[i] computes its tokens at positions starts[i] up to
    starts[i] + lengths[i] - 1. Their ids are in token_ids, one row after the other. Where samples[i], the row reaches
    the sequence's last token, and a token is sampled from its last logits. PENDING in token_ids is the token that was
    sampled last for this slot, by a step whose result was not read yet when this plan was made.
    Order of effects: sequence_starts reset their slots, blocks are copied out to the host, back from it, then from
    block to block, block tables grow, the rows are computed.
    """

    slots: Int32Array  # [rows]
    starts: Int32Array  # [rows]
    lengths: Int32Array  # [rows], >= 1
    samples: BoolArray  # [rows]
    token_ids: Int32Array  # [sum(lengths)]
    table_slots: Int32Array  # [new blocks]: block table of this slot ...
    table_positions: Int32Array  # [new blocks]: ... at this index ...
    # [new blocks]: ... holds this block from now on; num_blocks: none, it is not read again. ~b: window block b, in the
    # table of the layers with windows; ~num_window_blocks: none. So in copies, too.
    table_blocks: Int32Array
    copy_sources: Int32Array  # [copies]: block whose content ...
    copy_targets: Int32Array  # [copies]: ... is copied to this block first (copy on write)
    sequence_starts: list[SequenceStart] = field(default_factory=list)
    host_copies: BlockCopies | None = None
    prompt_targets: list[PromptTargets] = field(default_factory=list)  # at most one per row, in the rows' order
    masked_rows: list[int] = field(default_factory=list)  # that sample under a grammar, ascending
    penalties: list[TokenPenalties] = field(default_factory=list)  # of rows that sample
    # Row -> how many of its last tokens are drafts: a token is sampled after each of them, too, and all are reported.
    num_drafts: dict[int, int] = field(default_factory=dict)
    # Slot -> the recurrent state that its row starts from: a kept one, or ~slot: that of this slot at the row's start.
    # By default it is the slot's own, or zeros at position 0.
    state_reads: dict[int, int] = field(default_factory=dict)
    state_saves: list[StateSave] = field(default_factory=list)
    pooled_rows: list[PooledRow] = field(default_factory=list)  # ascending; they sample nothing

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def drafts_of(self, row: int) -> list[int]:
        num_drafts = self.num_drafts.get(row, 0)
        if not num_drafts:
            return []
        end = int(self.lengths[: row + 1].sum())
        found: list[int] = self.token_ids[end - num_drafts : end].tolist()
        return found


def make_plan(
    rows: Seq[tuple[int, int, Seq[int], bool]],
    tables: Iterable[tuple[int, int, int]] = (),
    copies: Iterable[tuple[int, int]] = (),
    **columns: Any,
) -> StepPlan:
    """A plan of a few rows; others are a PlanBuilder's.

    Args:
        rows: (slot, start, ids of the tokens to compute, whether it samples).
        tables: (slot, index, block): what is new in block tables.
        copies: (source, target): blocks that are copied.
        columns: the others, by name; those left out are empty.
    """
    return StepPlan(
        _int32([slot for slot, _, _, _ in rows]),
        _int32([start for _, start, _, _ in rows]),
        _int32([len(token_ids) for _, _, token_ids, _ in rows]),
        np.array([samples for _, _, _, samples in rows], np.bool_),
        _int32([token_id for _, _, token_ids, _ in rows for token_id in token_ids]),
        *np.array([*tables], np.int32).reshape(-1, 3).T.copy(),
        *np.array([*copies], np.int32).reshape(-1, 2).T.copy(),
        **columns,
    )


@dataclass(slots=True)
class StepOutput:
    """What was sampled. A row with drafts appears several times, in order; one that only prefilled not at all.

    Where a draft led to logits that are not finite, its row ends before that.
    """

    rows: Int32Array  # [tokens]: row of the plan
    token_ids: Int32Array  # [tokens]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index into token_ids -> its logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> of its PromptTargets
    failed_rows: dict[int, str] = field(default_factory=dict)  # row -> cause (e.g. logits not finite); samples nothing
    pooled: dict[int, bytes] = field(default_factory=dict)  # row that ends a pooled prompt -> its vector, float32
    host_copy_s: float = 0.0  # the part of the step's time that its host copies took


@dataclass(frozen=True, slots=True)
class TimedRow:
    """A step of one row that was timed at start: positions `start` to `end` - 1 (StepWork.add)."""

    start: int
    end: int
    num_prompt_tokens: int
    took_s: float


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a runner has room for, and what its steps cost."""

    num_blocks: int
    block_size: int  # tokens
    max_sequences: int
    max_batch_tokens: int
    max_model_len: int  # tokens
    vocab_size: int  # the logits' width
    num_host_blocks: int = 0  # host slots
    block_bytes: int = 0
    host_copy_s: float = 0.0  # of one block to the host or back, as measured at start
    max_in_flight: int = 1  # steps; with 2 the next one is sent before this one's tokens are read
    prompt_tile: int = 64  # prompt tokens that attend together: a started tile costs as much as a full one
    few_tokens: int = 0  # about so many tokens of a step are multiplied in the time that reading the weights takes
    max_drafts: int = 0  # tokens of a step
    num_kept_states: int | None = None  # of recurrent layers, at block borders; None: the model has no such layers
    window: int | None = None  # tokens that a token sees in all layers, itself included; None: in some, all before it
    num_window_blocks: int | None = None  # of layers with windows, up to `window`; others see all. None: one table
    shares_answers: bool = True  # False: the cache keeps blocks of prompts alone: what it samples may round otherwise
    takes_whole_prompts: bool = False  # a prompt is one row of one step, of max_batch_tokens at most
    timed_rows: tuple[TimedRow, ...] = ()  # so that the first requests' steps are predicted


class DeviceError(Exception):
    """The device itself is broken: nothing after it can succeed. The engine ends every request and stops."""


class BlockStore(Protocol):
    """Keeps host blocks beyond the end of the process."""

    def drop(self, slots: list[int]) -> None:
        """Make what was copied out to these slots unfindable, also after a restart of the process.

        Returns at once; later copies to the slots are kept. Earlier failed deletions are tried again.
        """

    @property
    def state(self) -> StoreState: ...

    def keep(self, copies: BlockCopies | None) -> None:
        """After the last step: copy these out, and return once everything copied out is stored, or time is up."""


Ticket = TypeVar("Ticket")
T = TypeVar("T")


class Runner(Protocol[Ticket]):
    """Computes steps. The three calls of step N come in order, and steps in the order of their forward().

    With limits.max_in_flight of 2, forward and sample of N+1 come before collect of N, and N+1 may use N's tokens.
    """

    limits: RunnerLimits

    def forward(self, plan: StepPlan) -> Ticket:
        """Start the step: reset slots, copy blocks, write KV, compute logits of rows that sample and of targets."""

    def sample(self, ticket: Ticket, masks: Int32Array | None = None) -> None:
        """Sample tokens from the ticket's logits; they stay on the device.

        Args:
            masks: [tokens that masked rows sample, words]: which each may be, a bit each, the lowest of the first word
                is token 0's. In the order of the plan's masked_rows; of one with drafts first the token after none of
                them, then that after each. None: the plan has none.
        """

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the step and bring its tokens to the host.

        Raises:
            DeviceError: the device is lost. Any other exception concerns this plan alone.
        """


class PlanBuilder:
    """One plan in the making.

    Args:
        budget: tokens that may still be added.
        prompt_tile: see RunnerLimits.

    Attributes:
        sequences: of the rows, in order.
        other_rows: rows that are not plain decodes (Sequence.plain_end).
        sources: blocks that are copied on write.
        state_reads, state_saves: see StepPlan.
    """

    def __init__(self, budget: int, prompt_tile: int = PROMPT_TILE) -> None:
        self.budget = budget
        self.work = StepWork(tile=prompt_tile)
        self.sequences: list[Sequence] = []
        self.other_rows: list[int] = []
        self.sources: set[int] = set()
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._samples: list[bool] = []
        self._token_ids: list[int] = []
        self._table_slots: list[int] = []
        self._table_positions: list[int] = []
        self._table_blocks: list[int] = []
        self._copy_sources: list[int] = []
        self._copy_targets: list[int] = []
        self._sequence_starts: list[SequenceStart] = []
        self._prompt_targets: list[PromptTargets] = []
        self._masked_rows: list[int] = []
        self._penalties: list[TokenPenalties] = []
        self._num_drafts: dict[int, int] = {}
        self.state_reads: dict[int, int] = {}
        self.state_saves: list[StateSave] = []
        self._pooled_rows: list[PooledRow] = []

    def add_row(self, sequence: Sequence, start: int, length: int, drafts: Seq[int] = ()) -> None:
        """Compute `length` tokens from position `start` on, and tell the runner what it lacks of the sequence.

        Args:
            drafts: the last of these tokens, which may not be the sequence's. It sits out while they are in flight.
        """
        end = start + length
        samples = sequence.pooling is None and end - len(drafts) == len(sequence.token_ids) + sequence.num_pending
        self.repeat_row(sequence, start, length, samples, drafts)
        if sequence.state_source is not None:
            self.state_reads[sequence.slot], sequence.state_source = sequence.state_source, None
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        sequence.num_pending += samples

    def repeat_row(self, sequence: Sequence, start: int, length: int, samples: bool, drafts: Seq[int] = ()) -> None:
        """Compute a row of a failed plan again: the sequence's state does not change."""
        token_ids = [*sequence.token_ids[start : start + length - len(drafts)], *drafts]
        row = len(self.sequences)
        if drafts:
            self._num_drafts[row] = len(drafts)
        self.other_rows.append(row)
        if samples and sequence.grammar is not None:
            self._masked_rows.append(row)
        if samples and sequence.repetition is not None:
            self._penalties.append(sequence.repetition.penalties(sequence.slot, sequence.token_ids))
        self.sequences.append(sequence)
        self._starts.append(start)
        self._lengths.append(length)
        self._samples.append(samples)
        self._token_ids += token_ids
        if len(token_ids) < length:
            self._token_ids += [PENDING] * (length - len(token_ids))
        self.work.add(start, start + length, sequence.num_prompt_tokens)
        self.budget -= length
        if sequence.num_scored_tokens != ALL_SCORED:
            self._add_prompt_targets(sequence, row, start, start + length)
        if sequence.pooling is not None and (sequence.pools_all or start + length == sequence.num_prompt_tokens):
            self._pooled_rows.append(PooledRow(row, sequence.pooling, start + length == sequence.num_prompt_tokens))
        if not sequence.is_started:
            self._start(sequence)
        table = sequence.table
        if table.num_sent < len(table.blocks):
            first, table.num_sent = table.num_sent, len(table.blocks)
            self.resend(sequence, first, table.num_sent)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Compute the last, sampled token of each; the runner knows everything else about them.

        Equivalent to add_row, but column by column, as most rows of most steps are these.
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

    def resend(self, sequence: Sequence, first: int, end: int) -> None:
        """These entries of the sequence's table have changed; the runner knows the first num_sent."""
        table = sequence.table
        end = end if end < table.num_sent else table.num_sent
        positions, own = range(first, end), table.blocks[first:end]
        for blocks in (own, [~one for one in table.windows[first:end]]) if table.windows else (own,):
            self._table_slots += [sequence.slot] * len(blocks)
            self._table_positions += positions
            self._table_blocks += blocks

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
            masked_rows=self._masked_rows,
            penalties=self._penalties,
            num_drafts=self._num_drafts,
            state_reads=self.state_reads,
            state_saves=self.state_saves,
            pooled_rows=self._pooled_rows,
        )

    def _add_prompt_targets(self, sequence: Sequence, row: int, start: int, end: int) -> None:
        first, last = max(start, sequence.num_scored_tokens), sequence.end_of_scores(end)
        if first < last:
            num_top = sequence.sampling.num_prompt_logprobs or 0
            token_ids = tuple(sequence.token_ids[first + 1 : last + 1])
            self._prompt_targets.append(PromptTargets(row, first - start, token_ids, num_top))

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
                stop_ids=sequence.stop_ids if sequence.grammar is None else (),
                adapter=sequence.adapter,
            )
        )


def _int32(values: list[int]) -> Int32Array:
    return np.fromiter(values, np.int32, len(values))  # np.array takes twice as long: it looks for the shape first


_NONE = _int32([])
_NONE.flags.writeable = False


def restart_rows(plan: StepPlan, rows: range, sequences: list[Sequence]) -> StepPlan:
    """The plan of some rows of a failed plan, independent of what the failed step left in the runner.

    Every slot is started anew with its whole table. Blocks are copied again: their sources still hold what was shared,
    because the scheduler hands none of them out before the failed plan is applied.

    Args:
        sequences: of these rows, in order. All earlier plans have been applied, so that tokens that were pending are
            known, except those of a row that failed: what this plan samples for that sequence is not used.
    """
    builder = PlanBuilder(budget=plan.num_tokens)
    copies = dict(zip(plan.copy_targets.tolist(), plan.copy_sources.tolist(), strict=True))
    starts, lengths, samples = plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist()
    for row, sequence in zip(rows, sequences, strict=True):
        sequence.is_started = False
        if sequence.slot in plan.state_reads:
            builder.state_reads[sequence.slot] = plan.state_reads[sequence.slot]
        builder.state_saves += [replace(save, row=row - rows.start) for save in plan.state_saves if save.row == row]
        builder.repeat_row(sequence, starts[row], lengths[row], samples[row], plan.drafts_of(row))
        for block in (*sequence.table.blocks, *(~one for one in sequence.table.windows)):
            if block in copies:
                builder.add_copy(copies[block], block)
    restarted = builder.build()
    assert restarted is not None, "a restart needs rows"
    return restarted


def rows_misled(
    plan: StepPlan, sequences: list[Sequence], failed_rows: Iterable[int], block_size: int
) -> tuple[set[int], set[int]]:
    """Rows that read blocks which a failed or misled row should have written, and all such unwritten blocks.

    Args:
        sequences: of all the plan's rows, in order; a row that shares a block comes after the row that writes it.
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


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step that was planned and has not come back.

    Args:
        sequences: of the plan's rows, in order.
        other_rows: rows that are not plain decodes (PlanBuilder).
        planned_s: monotonic.
        drafting_s: what a draft model took, before the step.
        has_suspects: a sequence in it was lost with a step that raised: nothing is sent behind this step, so that its
            rows can be computed again one by one.
    """

    plan: StepPlan
    sequences: list[Sequence]
    other_rows: list[int]
    work: StepWork
    planned_s: float
    has_suspects: bool
    drafting_s: float = 0.0


_FORMATS: dict[Any, type[np.generic]] = {Int32Array: np.int32, BoolArray: np.bool_}


def encode(value: object) -> bytes:
    """Msgpack (never pickle) of plans and outputs, for processes on machines of one byte order.

    Args:
        value: a dataclass of plain values, tuples, other dataclasses, and columns of a StepPlan.
    """
    return _ENCODER.encode(value)


def decode(content: bytes, kind: type[T]) -> T:
    """What encode() was given; its columns are read-only.

    Raises:
        msgspec.DecodeError: it is not of that kind.
    """
    hashable: Any = kind
    decoder: msgspec.msgpack.Decoder[T] = _decoder(hashable)
    return decoder.decode(content)


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda column, data: np.frombuffer(data, dtype=_FORMATS[column]))


def _bytes_of(column: Any) -> bytes:
    if isinstance(column, np.ndarray):
        return column.tobytes()
    raise NotImplementedError(f"cannot encode a {type(column).__name__}")  # as msgspec asks for


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
