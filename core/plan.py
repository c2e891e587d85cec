"""One step, as columns: what the scheduler asks of a runner, and what it gets back. Thread: engine.

A step's rows are sequences, each with some new tokens to compute: no prefill or decode, one rule. A sequence lives in
a *slot* of the runner (0..max_sequences-1) from its SequenceStart until the slot is started anew; the runner keeps
what is constant or grows there (sampling parameters, block table, counts of tokens): a plan carries differences only.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from core.blocks import BlockKey
from core.snapshot import StoreState
from core.types import SamplingParams, TokenLogprobs

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
        stop_ids: ids that may not be drawn before min_tokens: the model's ends (unless ignored) and the request's.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """What a full block holds, exactly: two blocks with the same label hold the same.

    Args:
        serial: names the block in the keys of those that follow it. Never used for another content.
    """

    serial: int
    key: BlockKey


@dataclass(slots=True)
class BlockCopies:
    """Whole blocks, between the device and slots of host memory. All that goes out is read before anything is written.

    Args:
        offloads: slot -> block that is copied out to it.
        labels: by slot, of what is copied out.
        restores: block -> slot that is copied back to it.
        used: slots that were copied to or asked for, least recently used first: a set in order.
    """

    offloads: dict[int, int] = field(default_factory=dict)
    labels: dict[int, BlockLabel] = field(default_factory=dict)
    restores: dict[int, int] = field(default_factory=dict)
    used: dict[int, None] = field(default_factory=dict)

    @property
    def num_copies(self) -> int:
        return len(self.offloads) + len(self.restores)

    @property
    def is_empty(self) -> bool:
        return not (self.offloads or self.restores or self.used)


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
    the sequence's last token, and a token is drawn from its last logits. PENDING in token_ids is the token that this
    slot drew last: a plan before this one has asked for it, and it was still on the device when this one was made.
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
    """What was drawn. A row may appear several times, in order (speculation), or not at all (it only prefilled)."""

    rows: Int32Array  # [tokens]: row of the plan
    token_ids: Int32Array  # [tokens]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # index into token_ids -> its logprobs
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # row -> of its PromptTargets
    failed_rows: dict[int, str] = field(default_factory=dict)  # row -> cause (e.g. logits not finite); draws nothing
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
