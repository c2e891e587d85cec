"""A request's sequences as the engine holds them. Thread: engine.

State only: who may change it, and when, is the scheduler's.
"""

import enum
import math
import sys
from dataclasses import dataclass, field

from core.kv_cache import BlockTable
from core.types import Cost, FinishReason, Request, SamplingParams

NO_SLOT = -1
ALL_SCORED = sys.maxsize
_MASK_64 = (1 << 64) - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, SplitMix64's increment (Steele et al., OOPSLA 2014)

# Of engine time that one tenant has had more than another, before it gives way though it runs no more than one sequence
# more: less would have them take turns too often, each time computing anew what was in the blocks.
OVER_SHARE_S = 2.0
# A short prompt goes as if it had arrived earlier: by so much if it had no tokens, by nothing from so many on.
SHORT_PROMPT_BONUS_S = 2.0
LONG_PROMPT_TOKENS = 2048

Place = tuple[float, int, int]  # (arrival_s less the bonus, serial of the submit, index): smaller goes first
DueOrder = tuple[float, int, int]  # (when its prompt must start at the latest, serial, index): smaller goes first


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account.

    Args:
        share: weight against others: counter and credit count engine time divided by it.
        counter_s: engine time it has had, and lifts. Never falls, so that queues by it stay in order.
        served_s: engine time it has had, undivided.
        credit_s: was charged and not used: later charges take it first.
        prepaid_s: was charged and is not used yet, undivided.
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
        """The counter less what was charged ahead."""
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
        """Some of what was prepaid was not computed after all."""
        self.prepaid_s -= seconds
        self.served_s -= seconds
        self.credit_s += seconds / self.share

    def gives_way_to(self, other: "Tenant") -> bool:
        """Whether a running sequence of this tenant gives way to a waiting one of the other's.

        Where it runs at least two more, both come nearer to each other: they cannot take turns for nothing.
        """
        if self.num_running > other.num_running + 1:
            return self.counter_s > other.counter_s
        return self.had_s > other.counter_s + OVER_SHARE_S


class SequenceState(enum.Enum):
    """WAITING: holds no blocks. RUNNING: holds blocks and a slot. FINISHED: holds nothing, for ever."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens that grows. It catches up when num_computed_tokens is less than its tokens.

    Args:
        tenant: whose account it is on.
        priority: its class, higher goes first.
        arrival_s: its request's, monotonic.
        place: among its tenant's and class's sequences, kept for life.
        due_order: among those whose first token is due at some time; infinite for others.
        stop_ids: ids that end it: the model's ends (unless ignored) and the request's.
        token_ids: the prompt's, then its own.
        max_length: tokens, prompt included, at which it ends.
        is_started: the runner has this sequence in its slot.
        plain_end: before this position it decodes on with nothing to look at: in a block that is its own and that the
            runner knows, not yet at its last token, and nobody has paused, cancelled or lost it. 0: look.
        num_computed_tokens: of its keys and values, those that are computed or that a plan with it computes.
        num_scored_tokens: the logits after its first so many tokens have been told, where its prompt's logprobs are
            asked for: no more than these may come from the cache. ALL_SCORED: nothing is left to tell.
        num_in_flight: plans with it that were made and not yet applied.
        num_pending: tokens that these sample: they follow token_ids, and nobody has read them yet.
        is_lost: what it computed cannot be used. It computes all again once it is no longer in flight.
        cancel_reason: set while in flight: what to finish it with when the step comes back.
        num_tokens_kept: of its own tokens, those the loop has used; None: all.
        num_free_blocks_needed: while it waits: with fewer free it cannot be admitted, as far as was seen.
        level: its class, aged, when it was admitted.
        progress_s: when it was admitted or last computed some of a prompt: from then on it ages.
        prepaid_token_s: its tenant was charged so much for each token to be computed when it was admitted ...
        prepaid_s: ... of which so much has not been used ...
        prepaid_end: ... for its positions up to this.
        device_s, kv_block_s: what it has taken, as Cost has it.
    """

    request_id: str
    index: int
    tenant: Tenant
    priority: int
    arrival_s: float
    place: Place
    due_order: DueOrder
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    token_ids: list[int]
    num_prompt_tokens: int
    max_length: int
    num_computed_tokens: int = 0
    num_scored_tokens: int = ALL_SCORED
    state: SequenceState = SequenceState.WAITING
    slot: int = NO_SLOT
    table: BlockTable = field(default_factory=BlockTable)
    is_started: bool = False
    is_paused: bool = False
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

    @property
    def has_deadline(self) -> bool:
        """Whether its first token is yet to come, and due at some time."""
        return self.due_order[0] < math.inf and self.num_own_tokens == 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_own_tokens(self) -> int:
        """Tokens sampled for it, an ending stop id included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_billed_tokens(self) -> int:
        """Of its own tokens, those that count in the usage."""
        if self.num_tokens_kept is None:
            return self.num_own_tokens
        return min(self.num_own_tokens, self.num_tokens_kept)

    def end_of_scores(self, end: int) -> int:
        """Of its first `end` tokens, the position after the last one whose logits its prompt's logprobs come from."""
        return min(end, self.num_prompt_tokens - 1)

    def keep(self, num_tokens: int | None) -> None:
        """Cut what is billed to the loop's count. Of several cuts the smallest holds."""
        if num_tokens is not None:
            self.num_tokens_kept = min(self.num_billed_tokens, num_tokens)

    def end_after_last_token(self) -> FinishReason | None:
        """Whether the newest token ends it. Stop ids count from min_tokens on, as in the sampler."""
        if self.token_ids[-1] in self.stop_ids and self.num_own_tokens > self.sampling.min_tokens:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request while it lives: its sequences, finished ones included.

    Args:
        latest_start_s: when its prompt must start to have the first token in time; infinite without a deadline.
        leader: computes the prompt for itself and the unforked.
        unforked: siblings that wait for it, by index. They hold slots while the leader runs, never blocks.
        num_live: sequences not yet finished.
        num_prompt_tokens_done: the furthest that any of them has come in the prompt.
        num_cached_tokens: of these, what came from the prefix cache.
        is_admitted: it has left the queue, be it that it was sent back there since.
        num_prompt_chunks: steps that computed some of the prompt, until it was done for the first time.
        is_prefilled: the prompt has been done.
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

    @property
    def cost(self) -> Cost:
        """What its sequences have taken."""
        return Cost(
            device_s=sum(sequence.device_s for sequence in self.sequences),
            kv_block_s=sum(sequence.kv_block_s for sequence in self.sequences),
        )

    def add(self, stop_ids: tuple[int, ...], max_length: int) -> Sequence:
        """A new sequence with the next index and its own seed."""
        index = len(self.sequences)
        asks = self.request.sampling.num_prompt_logprobs is not None
        sequence = Sequence(
            request_id=self.request.request_id,
            index=index,
            tenant=self.tenant,
            priority=self.request.priority,
            arrival_s=self.request.arrival_s,
            place=(self.request.arrival_s - _bonus_s(len(self.request.prompt_ids)), self.serial, index),
            due_order=(self.latest_start_s, self.serial, index),
            sampling=self.request.sampling,
            seed=sequence_seed(self.seed, index),
            stop_ids=stop_ids,
            token_ids=list(self.request.prompt_ids),
            num_prompt_tokens=len(self.request.prompt_ids),
            max_length=max_length,
            num_scored_tokens=0 if asks and len(self.request.prompt_ids) > 1 else ALL_SCORED,
            table=BlockTable((self.request.cache_domain, self.request.cache_salt)),
            is_paused=self.is_paused,
        )
        self.sequences.append(sequence)
        self.num_live += 1
        return sequence


def _bonus_s(num_prompt_tokens: int) -> float:
    return SHORT_PROMPT_BONUS_S * max(0.0, 1 - num_prompt_tokens / LONG_PROMPT_TOKENS)


def sequence_seed(seed: int, index: int) -> int:
    """The 64-bit noise key of a request's index-th sequence: far apart for neighbours, the seed itself at index 0."""
    return (seed + index * _GOLDEN_64) & _MASK_64
