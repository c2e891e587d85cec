"""The state of one request in the engine: its sequences, and its tenant's account. Thread: engine.

State only: the scheduler changes it.
"""

import enum
import math
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.kv_cache import BlockTable
from core.types import Adapter, Cost, FinishReason, Pooling, Request, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from core.beams import BeamSearch
    from core.drafter import Drafter
    from core.grammar import GrammarState
    from core.repetition import Repetition

NO_SLOT = -1
ALL_SCORED = sys.maxsize
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, SplitMix64's increment (Steele et al., OOPSLA 2014)

# How much more engine time a tenant may have had than another before it gives way although it runs at most one sequence
# more. With less they would take turns too often, each time recomputing what was in the blocks.
OVER_SHARE_S = 2.0
# A short prompt is queued as if it had arrived earlier: by so much if it were empty, by nothing from so many tokens on.
SHORT_PROMPT_BONUS_S = 2.0
LONG_PROMPT_TOKENS = 2048

Place = tuple[float, int, int]  # (arrival_s less the bonus, serial of the submit, index): smaller goes first
DueOrder = tuple[float, int, int]  # (latest start of its prompt, serial of the submit, index): smaller goes first


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account.

    Args:
        share: its weight: counter and credit count engine time divided by it.
        counter_s: engine time used, plus raises. Never falls, so that queues ordered by it stay in order.
        served_s: engine time used, undivided.
        credit_s: charged but never used; later charges consume it first.
        prepaid_s: charged but not used yet, undivided.
        num_live: requests that wait or run.
        num_running: sequences that hold blocks.
    """

    name: str
    share: int = 1
    counter_s: float = 0.0
    served_s: float = 0.0
    credit_s: float = 0.0
    prepaid_s: float = 0.0
    num_live: int = 0
    num_running: int = 0

    @property
    def had_s(self) -> float:
        """The counter without what was charged in advance."""
        return self.counter_s - self.credit_s - self.prepaid_s / self.share

    def charge(self, seconds: float) -> None:
        self.served_s += seconds
        seconds /= self.share
        if self.credit_s:
            used_s = min(self.credit_s, seconds)
            self.credit_s -= used_s
            seconds -= used_s
        self.counter_s += seconds

    def refund(self, seconds: float) -> None:
        """Refund prepaid time that was not computed."""
        self.prepaid_s -= seconds
        self.served_s -= seconds
        self.credit_s += seconds / self.share

    def gives_way_to(self, other: "Tenant") -> bool:
        """Whether to preempt a running sequence of this tenant for a waiting one of the other.

        Only if it runs at least two more: then the exchange brings both closer, and they do not preempt in turns.
        """
        if self.num_running > other.num_running + 1:
            return self.counter_s > other.counter_s
        return self.had_s > other.counter_s + OVER_SHARE_S


class SequenceState(enum.Enum):
    """WAITING: has no blocks. RUNNING: has blocks and a slot. FINISHED: has nothing, and never will."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One growing list of tokens. It catches up while num_computed_tokens is less than its tokens.

    Args:
        priority: its class; higher goes first.
        arrival_s: its request's, monotonic.
        place: in the order of its tenant's and class's sequences; fixed for life.
        due_order: its order by first-token deadline; infinite without one.
        stop_ids: ids that end it: the model's (unless ignored), then the request's.
        token_ids: the prompt's, then its own.
        max_length: number of tokens, prompt included, at which it ends.
        is_started: the runner has it in its slot.
        plain_end: up to this position it decodes without checks: in its own block that the runner knows, before its
            last token, neither paused nor cancelled nor lost. 0: check.
        num_computed_tokens: tokens whose keys and values are computed, or will be by a plan in flight.
        state_source: where its next row reads its recurrent state (StepPlan.state_reads); None: its slot's own.
        num_scored_tokens: number of leading prompt positions whose logprobs were reported, if they are requested: the
            cache may provide no more tokens than these. ALL_SCORED: all are reported.
        pooling: the vector it ends with; None: it generates an answer.
        num_in_flight: plans that include it and are not applied yet.
        num_pending: tokens that these plans sample; they follow token_ids and are not known yet.
        is_lost: its computed data cannot be used. It is recomputed once it is no longer in flight.
        cancel_reason: set while in flight: how to finish it when the step comes back.
        num_tokens_kept: how many of its own tokens the loop has used; None: all.
        num_free_blocks_needed: while it waits: with fewer free blocks it cannot be admitted.
        level: its aged class at admission.
        progress_s: when it was admitted or last computed prompt tokens; it ages from then on.
        prepaid_token_s: the charge to its tenant at admission, per token to compute ...
        prepaid_s: ... how much of that is unused ...
        prepaid_end: ... and up to which position it was charged.
        device_s, kv_block_s, num_spared_steps: as in Cost.
        grammar: its own tokens follow it.
        search: the beam search that chooses its next token; None: the sampler does.
        repetition: penalties on its next token by earlier ones; None: at most those of the runner.
        drafter: proposes its next tokens; None: no speculation.
        draft_masks: with a grammar: the masks before and after each of its drafts in flight.
        predicted: places among its own tokens of those that were taken from the prediction; some may be beyond its end.
        num_mispredicted_tokens: see Usage.
        forced: its next tokens, where the grammar allows only these; without those already appended.
    """

    request_id: str
    index: int
    tenant: Tenant
    priority: int
    arrival_s: float
    place: Place
    due_order: DueOrder
    sampling: SamplingParams
    adapter: Adapter | None
    seed: int
    stop_ids: tuple[int, ...]
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    table: BlockTable
    is_paused: bool
    num_scored_tokens: int
    pooling: Pooling | None
    num_computed_tokens: int = 0
    state_source: int | None = None
    state: SequenceState = SequenceState.WAITING
    slot: int = NO_SLOT
    is_started: bool = False
    plain_end: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    is_lost: bool = False
    cancel_reason: FinishReason | None = None
    num_tokens_kept: int | None = None
    num_free_blocks_needed: int = 0
    level: int = 0
    progress_s: float = 0.0
    prepaid_token_s: float = 0.0
    prepaid_s: float = 0.0
    prepaid_end: int = 0
    device_s: float = 0.0
    kv_block_s: float = 0.0
    num_spared_steps: int = 0
    grammar: "GrammarState | None" = None
    forced: deque[int] = field(default_factory=deque)
    search: "BeamSearch | None" = None
    repetition: "Repetition | None" = None
    drafter: "Drafter | None" = None
    draft_masks: "npt.NDArray[np.int32] | None" = None
    predicted: list[int] = field(default_factory=list)
    num_mispredicted_tokens: int = 0

    @property
    def has_deadline(self) -> bool:
        """Whether its first token is still to come and has a deadline."""
        return self.due_order[0] < math.inf and self.num_own_tokens == 0

    @property
    def takes_forced(self) -> bool:
        """Whether forced tokens may be appended now without being sampled.

        Not if their logprobs are requested, or the sampler counts them for penalties: then they are sampled, with
        nothing else allowed.
        """
        return not (self.num_in_flight or self.is_lost or self.has_penalties or self.sampling.num_logprobs is not None)

    @property
    def has_penalties(self) -> bool:
        sampling = self.sampling
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.dry_multiplier:
            return True
        return sampling.repetition_penalty != 1

    @property
    def pools_all(self) -> bool:
        """Its vector depends on all its tokens, so it computes each itself."""
        return self.pooling is not None and self.pooling.kind != "last"

    @property
    def num_own_tokens(self) -> int:
        """Tokens sampled for it, an ending stop id included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_billed_tokens(self) -> int:
        """Its own tokens that count in the usage."""
        if self.num_tokens_kept is None:
            return self.num_own_tokens
        return min(self.num_own_tokens, self.num_tokens_kept)

    @property
    def answer_ids(self) -> list[int]:
        """Its own tokens, without an ending stop id."""
        own = self.token_ids[self.num_prompt_tokens :]
        return own[:-1] if own and self.end_after_last_token() is FinishReason.STOP else own

    def end_of_scores(self, end: int) -> int:
        """How many of its first `end` tokens have logits for the prompt's logprobs."""
        return min(end, self.num_prompt_tokens - 1)

    def keep(self, num_tokens: int | None) -> None:
        """Limit billing to the loop's count. The smallest of several limits applies."""
        if num_tokens is not None:
            self.num_tokens_kept = min(self.num_billed_tokens, num_tokens)

    @property
    def model_ends(self) -> tuple[int, ...]:
        return self.stop_ids[: len(self.stop_ids) - len(self.sampling.stop_token_ids)]

    def end_after_last_token(self) -> FinishReason | None:
        """Why the newest token ends it, if it does. Stop ids apply from min_tokens on, as in the sampler."""
        if self.token_ids[-1] in self.stop_ids and self.num_own_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A live request: its sequences, finished ones included.

    Args:
        latest_start_s: when its prompt must start so that the first token is in time; infinite without a deadline.
        leader: computes the prompt for itself and the unforked.
        unforked: siblings that wait for the leader, by index. They have slots while it runs, never blocks.
        num_live: sequences not yet finished.
        num_prompt_tokens_done: the furthest prompt position of any of them.
        num_cached_tokens: how many of these came from the prefix cache.
        is_admitted: it has left the queue at least once.
        num_prompt_chunks: steps with prompt tokens, until the prompt was complete for the first time.
        is_prefilled: the prompt has been complete.
        search: its beam search.
    """

    request: Request
    tenant: Tenant
    serial: int
    seed: int
    latest_start_s: float
    sequences: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None
    unforked: dict[int, Sequence] = field(default_factory=dict)
    num_live: int = 0
    num_prompt_tokens_done: int = 0
    num_cached_tokens: int = 0
    is_paused: bool = False
    is_admitted: bool = False
    num_prompt_chunks: int = 0
    is_prefilled: bool = False
    search: "BeamSearch | None" = None

    @property
    def cost(self) -> Cost:
        return Cost(
            device_s=sum(sequence.device_s for sequence in self.sequences),
            kv_block_s=sum(sequence.kv_block_s for sequence in self.sequences),
            num_spared_steps=sum(sequence.num_spared_steps for sequence in self.sequences),
        )

    def add(self, stop_ids: tuple[int, ...], max_length: int) -> Sequence:
        """A new sequence with the next index and its own seed."""
        index, request = len(self.sequences), self.request
        num_prompt_tokens = len(request.prompt_ids)
        bonus_s = SHORT_PROMPT_BONUS_S * max(0.0, 1 - num_prompt_tokens / LONG_PROMPT_TOKENS)
        wants_scores = request.sampling.num_prompt_logprobs is not None and num_prompt_tokens > 1
        sequence = Sequence(
            request_id=request.request_id,
            index=index,
            tenant=self.tenant,
            priority=request.priority,
            arrival_s=request.arrival_s,
            place=(request.arrival_s - bonus_s, self.serial, index),
            due_order=(self.latest_start_s, self.serial, index),
            sampling=request.sampling,
            adapter=request.adapter,
            seed=sequence_seed(self.seed, index),
            stop_ids=stop_ids,
            token_ids=list(request.prompt_ids),
            num_prompt_tokens=num_prompt_tokens,
            max_length=max_length,
            table=BlockTable(request.cache_root),
            is_paused=self.is_paused,
            num_scored_tokens=0 if wants_scores else ALL_SCORED,
            pooling=request.pooling,
            grammar=None if request.grammar is None else request.grammar.start(),
        )
        self.sequences.append(sequence)
        self.num_live += 1
        return sequence


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit noise key of a request's index-th sequence: far apart for neighbours, the seed itself at index 0."""
    return (seed + index * _GOLDEN_64) & _MASK_64
