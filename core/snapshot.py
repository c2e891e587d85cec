"""The engine at one moment, for an operator who asks. Any thread.

Frozen, so that it crosses from the engine to the loop. No prompt and no text is in it.
"""

import msgspec


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks by state: held + cached + empty = all.

    Args:
        num_shared: of the held ones, those that more than one sequence holds.
        num_cached: held by nobody, kept in case that somebody asks for their content.
    """

    num_tokens_each: int
    num_all: int
    num_held: int
    num_shared: int
    num_cached: int
    num_empty: int


class WaitingLine(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences of one class and tenant that wait for their blocks."""

    priority: int
    tenant: str
    num_sequences: int
    num_tokens: int  # that they have still to compute before they decode
    oldest_s: float  # since the first of their requests has come


class LiveSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that holds blocks."""

    request_id: str
    index: int
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_tokens: int  # the prompt's and its own
    num_computed_tokens: int  # those that a step under way computes too
    num_blocks: int
    is_paused: bool


class StepComposition(msgspec.Struct, frozen=True, kw_only=True):
    """The last step, as it was planned.

    Args:
        predicted_s: by the step-cost model as it is now; None: too few steps were measured yet.
    """

    num_prompt_tokens: int
    num_prompt_kv_tokens: int  # read by them
    num_decoded_tokens: int
    num_decoded_kv_tokens: int  # read by them
    predicted_s: float | None
    measured_s: float


class StepCostFit(msgspec.Struct, frozen=True, kw_only=True):
    """The step-cost model: seconds of a step, of which each coefficient makes a part."""

    is_ready: bool
    fixed_s: float
    prompt_token_s: float
    prompt_kv_token_s: float
    decoded_token_s: float
    decoded_kv_token_s: float
    error_p50: float  # of the last steps: |predicted - measured| / measured
    error_p90: float


class TenantCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has had. Who has nothing and is not ahead of the others is forgotten."""

    name: str
    share: int
    counter_s: float  # engine seconds by its share, the least goes first
    served_s: float  # engine seconds, in all
    num_requests: int
    num_running: int  # sequences that hold blocks


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of the blocks that are kept beyond the end of the process.

    Args:
        is_deleting: some that were forgotten are still to be deleted.
        num_undeleted: that were forgotten and could not be deleted: a restarted server may find them.
        num_unwritten: that could not be written, since the start.
    """

    is_deleting: bool = False
    num_undeleted: int = 0
    num_unwritten: int = 0


NO_STORE = StoreState()


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to Inspect.

    Args:
        serial: of the Inspect; of several that were answered together, the last.
    """

    serial: int
    queues: tuple[WaitingLine, ...]
    running: tuple[LiveSequence, ...]
    last_step: StepComposition
    blocks: BlockCounts
    step_cost: StepCostFit
    tenants: tuple[TenantCounters, ...]
    store: StoreState
