"""The messages between the loop and the engine thread: frozen, with tuples inside. Any thread.

Loop to engine, through the inbox: Submit, Cancel, Pause, Resume, ClearCache, Inspect, Watch.
Engine to loop, through the outbox, once per step: StepDelivery (columns of tokens, TokenChunks, EngineStats), with an
EngineSnapshot as the answer to an Inspect.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypedDict

import msgspec

from core.outlook import Outlook

if TYPE_CHECKING:
    from core.grammar import Grammar
    from core.repetition import Breakers
    from core.thought_grammar import AfterThought

LOWEST_CLASS, TOP_CLASS = -4, 4  # of Request.priority
BANNED = -5e29  # a logit_bias that keeps a token out, unless a grammar allows nothing else (gpu/sampler.py's FORBIDDEN)


class FinishReason(enum.StrEnum):
    """Why a sequence ended. The first four go to clients as they are; the API maps the rest to errors."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    TOO_COMPLEX = "too_complex"  # what holds the answer, for the grammar's limits
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled. Validated where it is built (server/api), trusted by the engine.

    Args:
        seed: sampling noise depends only on it and the position; None: the engine chooses one. In bfloat16 and
            float32 on a CPU, the same seed and request give the same tokens whatever runs in the same steps, because
            sums round alike in any batch; so do int8, fp8, int4 and GGUF. GPUs guarantee only the noise.
        max_tokens: 0: the prompt is computed, and no token is returned.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # at most 0: all
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0  # 0: no DRY
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # of prompt and output; -1: all
    dry_sequence_breakers: tuple[str, ...] = ()
    repeat_last_n: int = -1  # penalties count the last tokens of prompt and output alike; -1: as each says
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # before that no stop id is sampled, and no stop string ends the text
    seed: int | None = None
    stop: tuple[str, ...] = ()  # matched on the loop's side, by the detokenizer
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None: none; k: the sampled token's and the k likeliest
    skip_special_tokens: bool = True  # in the text, by the detokenizer
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompt's tokens except the first; only beside it


class Beams(msgspec.Struct, frozen=True):
    """A beam search like that of transformers' generate: the answers are the likeliest that it finds.

    Args:
        width: number of beams and of answers.
        length_penalty: an answer's score is the sum of its logprobs divided by length ** this.
        early_stopping: True: end once there are as many answers as beams; False: once the current beams look no better;
            "never": once none can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


PoolingKind = Literal["last", "mean", "cls"]


class Pooling(msgspec.Struct, frozen=True):
    """A request for a vector of the prompt, float32, instead of an answer: an embedding, or scores.

    Args:
        kind: the tokens whose last hidden state, after the final norm, is used; "mean" of all.
        token_ids: the logits of these tokens after the last one, instead.
        second_from: start of a pair's second text, for encoders that distinguish the two; 0: there is none.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()
    second_from: int = 0


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded LoRA adapter. Requests reference it while they run; its weights are in gpu/adapters.py.

    Args:
        digest: of its content; adapters with different digests share no cached blocks.
    """

    digest: str
    size_bytes: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One generation, of 1..k sequences over the same prompt.

    Args:
        tenant: whose engine time it uses; "" is a tenant like any other.
        share: the tenant's weight: 2 gets twice the engine time of 1, while both have work.
        priority: its class, from LOWEST_CLASS to TOP_CLASS (core/queue.py); higher goes first.
        deadline_s: when its first token is due, monotonic. It only affects the queue's order, and cancels nothing.
        tells_progress: each computed chunk of its prompt is reported (Prefilling).
        cache_domain: requests share cached prompts within a domain ...
        cache_salt: ... and with the same salt and adapter.
        adapter: None: the model as it is.
        grammar: each of its answers follows it.
        breakers: DRY's sequence breakers.
        beams: its sequences are the results of a beam search, best first; all come at its end.
        speculates: speculative decoding is allowed. The tokens stay the same.
        prediction_ids: the client's predicted answer, used as a draft.
        tells_answer: a sequence's end includes all its token ids.
        pooling: its one sequence ends with a vector after the prompt, and samples nothing.
    """

    request_id: str  # ours, never the client's
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float  # monotonic; when the head was parsed: its place in the queue
    num_sequences: int = 1
    tenant: str = "local"
    share: int = 1
    priority: int = 0
    deadline_s: float | None = None
    tells_progress: bool = False
    cache_domain: str = ""
    cache_salt: str = ""
    adapter: Adapter | None = None
    grammar: "Grammar | AfterThought | None" = None
    breakers: "Breakers | None" = None
    beams: Beams | None = None
    speculates: bool = True
    prediction_ids: tuple[int, ...] = ()
    tells_answer: bool = False
    pooling: Pooling | None = None

    @property
    def counts_late(self) -> bool:
        return self.beams is not None

    @property
    def cache_root(self) -> tuple[str, str]:
        """Where its chains of cached blocks begin: requests with different roots share no blocks."""
        domain = self.cache_domain if self.adapter is None else f"{self.cache_domain}\0{self.adapter.digest}"
        return domain, self.cache_salt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens


class Demand(Protocol):
    """What the gate needs to know of a request, whichever backend computes it: see Request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Counted, or estimated."""

    @property
    def max_tokens(self) -> int:
        """For each of its sequences."""

    @property
    def counts_late(self) -> bool:
        """All its tokens are counted at its end, not as they come."""

    @property
    def num_sequences(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def share(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def deadline_s(self) -> float | None: ...


class Submit(msgspec.Struct, frozen=True):
    """Queue a request. Exactly one terminal TokenChunk answers it, whatever happens."""

    request: Request


class Cancel(msgspec.Struct, frozen=True):
    """End a request, or one of its sequences. Unknown and finished ones are ignored.

    Args:
        index: the sequence; None for all of the request.
        num_tokens_kept: how many of that sequence's tokens the loop has used; the usage does not count later ones.
            None: all that were delivered. Without an index it applies to each sequence.
    """

    request_id: str
    reason: FinishReason
    index: int | None = None
    num_tokens_kept: int | None = None


class Pause(msgspec.Struct, frozen=True):
    """Leave the request out of the next plans; it keeps its KV blocks."""

    request_id: str


class Resume(msgspec.Struct, frozen=True):
    """Resume a paused request."""

    request_id: str


class ClearCache(msgspec.Struct, frozen=True):
    """Empty the prefix cache. Running requests keep their blocks."""


class Inspect(msgspec.Struct, frozen=True):
    """Deliver an EngineSnapshot, once the messages before this one have taken effect.

    Args:
        serial: larger than earlier ones; the snapshot repeats it.
    """

    serial: int


class Watch(msgspec.Struct, frozen=True):
    """Report steps and preemptions until a time, monotonic; and, if requested, the block map once."""

    until_s: float
    tells_blocks: bool = False


Message = Submit | Cancel | Pause | Resume | ClearCache | Inspect | Watch


class Usage(msgspec.Struct, frozen=True):
    """What a request cost, in tokens, over all its sequences.

    Args:
        num_prompt_tokens: computed or cached, counted once; less than the prompt if the request ended early.
        num_completion_tokens: sampled and kept, an ending stop id included.
        num_cached_tokens: prompt tokens that an earlier request had computed.
        num_thought_tokens: completion tokens of the reasoning, its markers included.
        num_predicted_tokens: completion tokens taken from the request's prediction ...
        num_mispredicted_tokens: ... and rejected ones, which the other counts leave out.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    num_thought_tokens: int = 0
    num_predicted_tokens: int = 0
    num_mispredicted_tokens: int = 0


class Cost(msgspec.Struct, frozen=True):
    """The machine resources of a request, over all its sequences. EngineStats has the totals under the same names.

    Args:
        device_s: its share of the steps it was part of, by the step-cost model.
        kv_block_s: its blocks times the duration of the steps meanwhile; a shared block counts for each request.
        num_spared_steps: tokens that needed no step of their own: accepted drafts and forced text.
    """

    device_s: float = 0.0
    kv_block_s: float = 0.0
    num_spared_steps: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of a sampled or prompt token's probabilities by the raw logits.

    Raw means before penalties, logit_bias, temperature, top-k, top-p and min-p.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), likeliest first


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """The rarer output of a sequence: tokens with logprobs, its end, and with `usage` its request's end.

    A chunk's tokens are not repeated in the columns of its StepDelivery. Exactly one chunk per request has `usage`: the
    terminal one, which is also the request's last output. A stop id that ends a sequence is not text: it counts in the
    usage but is neither in the columns nor in token_ids, and the sequence ends with FinishReason.STOP.

    Args:
        stop_logprobs: with finish_reason: of the stop id that ends it, if logprobs are requested.
        prompt_logprobs: the next ones of the request's prompt, whatever the index. All tokens except the first come
            once and in order, before any generated token, in chunks without anything else.
        answer_ids: with finish_reason: all ids of the sequence except the stop id, if requested.
        stop_id: with finish_reason: that id.
        pooled: with finish_reason: the requested vector, float32.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_sequence_tokens: int = 0  # with finish_reason: the sequence's part of the usage
    answer_ids: tuple[int, ...] = ()
    stop_id: int | None = None
    pooled: bytes = b""
    usage: Usage | None = None
    cost: Cost = Cost()  # with usage
    error: str | None = None  # with FinishReason.ERROR: the cause, for the client

    @property
    def is_terminal(self) -> bool:
        return self.usage is not None


class Admitted(msgspec.Struct, frozen=True):
    """A request has left the queue for the first time; at_s is monotonic."""

    request_id: str
    at_s: float


class Prefilled(msgspec.Struct, frozen=True):
    """A request's prompt is computed, and with it the first token; at_s is monotonic.

    Args:
        num_chunks: steps that computed some of the prompt.
        num_cached_tokens: prompt tokens from the prefix cache.
    """

    request_id: str
    at_s: float
    num_chunks: int
    num_cached_tokens: int


class Prefilling(msgspec.Struct, frozen=True):
    """How many tokens of an unfinished prompt are computed, if its request has tells_progress."""

    request_id: str
    num_tokens: int


EngineMark = Admitted | Prefilled | Prefilling


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state and counters, for metrics and estimates. Counters are since the start."""

    num_waiting: int = 0  # sequences in the queue
    num_running: int = 0  # sequences that hold blocks
    num_paused: int = 0  # requests
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0  # unused, with content that may be found again
    num_window_blocks: int = 0  # of layers with windows; 0: all layers have one table
    num_used_window_blocks: int = 0
    num_cached_window_blocks: int = 0
    num_steps: int = 0
    num_rows: int = 0  # of all steps
    num_prefill_rows: int = 0  # of these, those that computed some of a prompt
    num_prompt_tokens: int = 0  # computed in prefill
    num_generated_tokens: int = 0
    draft_tokens: dict[str, int] = msgspec.field(default_factory=dict)  # by drafter: computed, right or not
    accepted_tokens: dict[str, int] = msgspec.field(default_factory=dict)  # of these, right
    num_forced_tokens: int = 0  # of these, not sampled: a grammar left no choice
    num_preemptions: int = 0
    num_cache_queries: int = 0  # prompt tokens that were looked up in the prefix cache
    num_cache_hits: int = 0  # of these, found: the sum of Usage.num_cached_tokens
    num_cache_evictions: int = 0  # blocks
    num_host_blocks: int = 0  # host slots for evicted blocks
    num_used_host_blocks: int = 0
    num_offloaded_blocks: int = 0  # copied to the host
    num_restored_blocks: int = 0  # copied back
    num_recomputed_blocks: int = 0  # found on the host, but cheaper to compute
    num_unwritten_blocks: int = 0  # see StoreState
    num_undeleted_blocks: int = 0
    block_bytes: int = 0
    step_s: float = 0.0  # duration of the last step
    outlook: Outlook | None = None  # None: too few steps were measured
    device_s: float = 0.0  # of all steps
    busy_s: float = 0.0  # these, and the host's time between them while there was work
    predicted_s: float = 0.0  # of all steps, as the step-cost model predicted each
    landed_s: float = 0.0  # when the last step came back, monotonic
    kv_block_s: float = 0.0  # see Cost
    step_cost_error_p50: float = 0.0  # of the last steps: |predicted - measured| / measured; 0 before any prediction
    step_cost_error_p90: float = 0.0

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.draft_tokens.values())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_tokens.values())


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """The directory that keeps host blocks beyond the end of the process.

    Args:
        is_deleting: some dropped blocks are still to be deleted.
        num_undeleted: dropped blocks that could not be deleted; a restarted server may find them.
        num_unwritten: blocks that could not be written, since the start.
    """

    is_deleting: bool = False
    num_undeleted: int = 0
    num_unwritten: int = 0


NO_STORE = StoreState()


class QueueState(TypedDict):
    """The waiting sequences of a class and tenant.

    Args:
        num_tokens: to compute before decoding.
        oldest_s: since the first of their requests arrived.
    """

    priority: int
    tenant: str
    num_sequences: int
    num_tokens: int
    oldest_s: float


class RunningState(TypedDict):
    """A sequence with blocks.

    Args:
        num_tokens: the prompt's and its own.
        num_computed_tokens: including those of a step in flight.
    """

    request_id: str
    index: int
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int
    is_paused: bool


class StepState(TypedDict):
    """
    Args:
        num_prompt_kv_tokens, num_decoded_kv_tokens: read by them.
        predicted_s: by the current step-cost model; None: too few steps were measured.
    """

    num_prompt_tokens: int
    num_prompt_kv_tokens: int
    num_decoded_tokens: int
    num_decoded_kv_tokens: int
    predicted_s: float | None
    measured_s: float


class BlocksState(TypedDict):
    """held + cached + empty = all.

    Args:
        num_shared: held by more than one sequence.
        num_cached: not held, but found by later requests.
    """

    num_tokens_each: int
    num_all: int
    num_held: int
    num_shared: int
    num_cached: int
    num_empty: int


class StepCostState(TypedDict):
    """Coefficients of the model, in seconds.

    Args:
        error_p50, error_p90: of the last steps: |predicted - measured| / measured.
    """

    is_ready: bool
    fixed_s: float
    prompt_token_s: float
    prompt_kv_token_s: float
    decoded_token_s: float
    decoded_kv_token_s: float
    error_p50: float
    error_p90: float


class ShareState(TypedDict):
    """A tenant that is not idle, or is ahead of the others.

    Args:
        counter_s: engine seconds divided by its share; the lowest goes first.
        served_s: engine seconds in all.
        num_running: sequences that hold blocks.
    """

    name: str
    share: int
    counter_s: float
    served_s: float
    num_requests: int
    num_running: int


class EngineState(TypedDict):
    queues: list[QueueState]
    running: list[RunningState]
    last_step: StepState
    blocks: BlocksState
    step_cost: StepCostState
    tenants: list[ShareState]


class EngineSnapshot(msgspec.Struct, frozen=True):
    """The answer to Inspect.

    Args:
        serial: of the Inspect; of the last one, if several are answered together.
        state: never changed.
    """

    serial: int
    state: EngineState
    store: StoreState


class PreemptionCause(enum.StrEnum):
    """Why a sequence lost its blocks."""

    OUTRANKED = "outranked"  # by the queue's head
    PAUSED = "paused"  # it waited for its reader or a quota while others needed its blocks
    OUT_OF_BLOCKS = "out_of_blocks"  # a running sequence needed one more, and this was the least urgent
    BEAMS_APART = "beams_apart"  # beams of its request wait


class Preempted(msgspec.Struct, frozen=True):
    """
    Args:
        at_s: monotonic.
        by: the request that took its place; may be its own.
    """

    at_s: float
    request_id: str
    index: int
    cause: PreemptionCause
    by: str


class StepTrace(NamedTuple):
    """
    Args:
        at_s: when it came back, monotonic.
        num_prompt_tokens, num_own_tokens: computed in prefill, and in decode.
        predicted_s: by the step-cost model, before it learned of this step; None: too few steps were measured.
    """

    at_s: float
    num_prompt_tokens: int
    num_own_tokens: int
    took_s: float
    predicted_s: float | None


class BlockMap(msgspec.Struct, frozen=True):
    """
    Args:
        cells: by block, uint16, little-endian: an index into owners above the three bits of its state (core/watch.py).
        host_cells: of blocks copied to the host, in order of use.
        owners: the number of a prefix, or 0, and its tenant's name or cache domain.
    """

    cells: bytes
    host_cells: bytes
    num_host_slots: int
    owners: list[tuple[int, str]]


class Watched(msgspec.Struct, frozen=True):
    """Output for the dashboard."""

    steps: list[StepTrace]
    preempted: list[Preempted]
    blocks: BlockMap | None = None


class StepDelivery(msgspec.Struct, frozen=True):
    """One step's output for the loop. Row i of the columns: one token of sequence indexes[i] of request_ids[i].

    Marks precede columns in time, and columns precede chunks. A sequence's tokens are in order, within a delivery and
    over several.

    Args:
        snapshot: set if an Inspect has come since the last delivery.
    """

    request_ids: list[str]
    indexes: list[int]
    token_ids: list[int]
    chunks: list[TokenChunk]
    stats: EngineStats
    marks: list[EngineMark] = []  # at most two in a request's life, and one per chunk where a request tells progress
    snapshot: EngineSnapshot | None = None
    watched: Watched | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence's new text. The loop decodes it from tokens and withholds what may become a stop string.

    Plain text without anything else is passed on without a Delta.

    Args:
        logprobs: of this text's tokens, if requested.
        stop_logprobs: with finish_reason: of the ending id, which has no text, if requested.
        prompt_logprobs: of the prompt's next tokens, except its first, if requested; before any text.
        finish_reason: set on the sequence's last delta.
        stop_string: with finish_reason: the stop string that ends the text.
        stop_id: with finish_reason: the id that ends it.
        pooled: see TokenChunk.
    """

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_id: int | None = None
    pooled: bytes = b""
