"""What scheduler and runner exchange: StepPlan (columns) out, StepOutput back. Thread: engine.

A step's rows are sequences, each with some new tokens to compute: no prefill or decode, one rule. A sequence lives in
a *slot* of the runner (0..max_sequences-1) from its SequenceStart until the slot is started anew; the runner keeps
what is constant or grows there (sampling parameters, block table, counts of tokens): a plan carries differences only.

A sequence counts the steps that it is in (num_in_flight) and the tokens that these sample for it (num_pending): the
next plan goes on after them, before anybody knows them. What it holds it keeps until the last of its steps has landed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from core.kv_cache import BlockCopies
from core.sequence import ALL_SCORED, Sequence
from core.step_cost import PROMPT_TILE, StepWork
from core.types import SamplingParams, StoreState, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

PENDING = -1  # in place of a token id: see StepPlan


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A slot's new occupant.

    Args:
        token_ids: all tokens known so far: the prompt, and after a preemption also what was generated.
        num_prompt_tokens: how many of them are the prompt's.
        seed: 64-bit key of its counter-based noise; noise depends on (seed, position) alone.
        stop_ids: ids that may not be sampled before min_tokens: the model's ends (unless ignored) and the request's.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """What a row of a prompt is asked beside its keys and values: how likely the tokens are that follow its own.

    Args:
        row: of the plan.
        first: index among the row's tokens of the first one whose next is asked about.
        token_ids: what follows that one and those after it, all of the prompt.
        num_top: so many of the likeliest are told beside each.
    """

    row: int
    first: int
    token_ids: tuple[int, ...]
    num_top: int


@dataclass(slots=True)
class StepPlan:
    """What to compute in one step.

    Row i, in [0, num_rows): the sequence in slots[i] computes its tokens at positions starts[i] up to
    starts[i] + lengths[i] - 1. Their ids stand one row after the other in token_ids. Where samples[i], the row reaches
    the sequence's last token, and a token is sampled from its last logits. PENDING in token_ids is the token that
    was sampled last for this slot, by a step whose result had not been read when this plan was made.
    Order of effects: sequence_starts reset their slots, blocks are copied out to the host, then back from it, then from
    block to block, block tables grow, the rows are computed.
    """

    slots: Int32Array  # [rows]
    starts: Int32Array  # [rows]
    lengths: Int32Array  # [rows], >= 1
    samples: BoolArray  # [rows]
    token_ids: Int32Array  # [sum(lengths)]
    table_slots: Int32Array  # [new blocks]: block table of this slot ...
    table_positions: Int32Array  # [new blocks]: ... at this index ...
    table_blocks: Int32Array  # [new blocks]: ... holds this block from now on
    copy_sources: Int32Array  # [copies]: block whose content ...
    copy_targets: Int32Array  # [copies]: ... is copied to this block first (copy on write)
    sequence_starts: list[SequenceStart] = field(default_factory=list)
    host_copies: BlockCopies | None = None
    prompt_targets: list[PromptTargets] = field(default_factory=list)  # at most one of a row, in the rows' order

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class StepOutput:
    """What was sampled. A row may appear several times, in order (speculation), or not at all (it only prefilled)."""

    rows: Int32Array  # [tokens]: row of the plan
    token_ids: Int32Array  # [tokens]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index into token_ids -> its logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> of its PromptTargets
    failed_rows: dict[int, str] = field(default_factory=dict)  # row -> cause (e.g. logits not finite); samples nothing
    host_copy_s: float = 0.0  # of the step's time, what its copies from and to the host took


@dataclass(frozen=True, slots=True)
class TimedRow:
    """A step of one row that was timed at start, as StepWork.add() has rows: positions `start` to `end` - 1."""

    start: int
    end: int
    num_prompt_tokens: int
    took_s: float


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What a runner has room for, and what its steps take."""

    num_blocks: int
    block_size: int  # tokens
    max_sequences: int
    max_batch_tokens: int
    max_model_len: int  # tokens
    vocab_size: int  # the logits' width
    num_host_blocks: int = 0  # slots of host memory, of a block each
    block_bytes: int = 0
    host_copy_s: float = 0.0  # of one block to the host or back, as measured at start
    max_in_flight: int = 1  # steps; with 2 the next one is sent before this one's tokens are read
    prompt_tile: int = 64  # tokens of a prompt that attend together: for any of them all are computed
    few_tokens: int = 0  # of a step: about so many are multiplied in the time in which the weights are read
    timed_rows: tuple[TimedRow, ...] = ()  # so that the first requests' steps are predicted


class DeviceError(Exception):
    """The device itself is broken: nothing after it can succeed. The engine ends every request and stops."""


class BlockStore(Protocol):
    """Keeps blocks beyond the end of the process."""

    def drop(self, slots: list[int]) -> None:
        """What was copied out to these nobody may find any more, after a restart of the process neither. Returns at
        once; what is copied out from now on is kept. What could not be deleted before is tried again.
        """
        ...

    @property
    def state(self) -> StoreState: ...

    def keep(self, copies: BlockCopies | None) -> None:
        """After the last step: copy these out, and return once all that was copied out is kept, or time is up."""
        ...


Ticket = TypeVar("Ticket")
T = TypeVar("T")


class Runner(Protocol[Ticket]):
    """Computes steps. The three calls of step N come in order, and steps in the order of their forward().

    With limits.max_in_flight of 2, forward and sample of N+1 come before collect of N, whose tokens N+1 may ask for.
    """

    limits: RunnerLimits

    def forward(self, plan: StepPlan) -> Ticket:
        """Start the step: reset slots, copy blocks, write KV, compute logits of rows that sample and of targets."""
        ...

    def sample(self, ticket: Ticket) -> None:
        """Draw tokens from the ticket's logits; they stay on the device."""
        ...

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the step and bring its tokens to the host.

        Raises:
            DeviceError: the device is lost. Any other exception is this plan's alone.
        """
        ...


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
        self.repeat_row(sequence, start, length, samples)
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        sequence.num_pending += samples

    def repeat_row(self, sequence: Sequence, start: int, length: int, samples: bool) -> None:
        """A row of a plan that failed, once more: nothing of the sequence changes."""
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
        """Compute the last token of each, one that was sampled for it; the runner knows all else of them.

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
            self._table_slots.append(sequence.slot)
            self._table_positions.append(position)
            self._table_blocks.append(block)

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
            pending are known, but those of a row that failed: what is sampled here for that one's sequence is not used.
    """
    builder = PlanBuilder(budget=plan.num_tokens)
    copies = dict(zip(plan.copy_targets.tolist(), plan.copy_sources.tolist(), strict=True))
    starts, lengths, samples = plan.starts.tolist(), plan.lengths.tolist(), plan.samples.tolist()
    for row, sequence in zip(rows, sequences, strict=True):
        sequence.is_started = False
        builder.repeat_row(sequence, starts[row], lengths[row], samples[row])
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


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step under way.

    Args:
        sequences: of the plan's rows, in order.
        other_rows: those that are no plain decodes (PlanBuilder).
        planned_s: monotonic.
        has_suspects: some of them were lost with a step that raised: nothing is sent behind this one, so that its rows
            can be computed again one by one.
    """

    plan: StepPlan
    sequences: list[Sequence]
    other_rows: list[int]
    work: StepWork
    planned_s: float
    has_suspects: bool


_FORMATS: dict[Any, type[np.generic]] = {Int32Array: np.int32, BoolArray: np.bool_}


def encode(value: object) -> bytes:
    """As msgpack, never pickle: for processes that compute together, on machines of one byte order.

    Args:
        value: a dataclass of what core's are made of: plain values, tuples, others like it, and columns of a StepPlan.
    """
    return _ENCODER.encode(value)


def decode(content: bytes, kind: type[T]) -> T:
    """What was encoded; its columns cannot be written to.

    Raises:
        msgspec.DecodeError: it is none of that kind.
    """
    hashable: Any = kind
    decoder: msgspec.msgpack.Decoder[T] = _decoder(hashable)
    return decoder.decode(content)


@cache
def _decoder(kind: Any) -> Any:
    return msgspec.msgpack.Decoder(kind, dec_hook=_column)


def _column(kind: Any, content: Any) -> Any:
    return np.frombuffer(content, dtype=_FORMATS[kind])


def _bytes_of(column: Any) -> bytes:
    if isinstance(column, np.ndarray):
        return column.tobytes()
    raise NotImplementedError(f"{type(column).__name__} in what is encoded")  # as msgspec asks for


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
