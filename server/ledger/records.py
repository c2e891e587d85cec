"""What the ledger knows of a request, and what it is asked to write down. Frozen: crosses from loop to ledger thread.

Whole numbers throughout: microseconds since 1970 in UTC, tokens, millionths of the currency.
"""

from enum import StrEnum

import msgspec


class State(StrEnum):
    """RESERVED: in progress. SETTLED: ended, with its true usage. ABORTED: the server ended before it did."""

    RESERVED = "reserved"
    SETTLED = "settled"
    ABORTED = "aborted"


class Grouping(StrEnum):
    """What makes a line of a report of usage."""

    DAY = "day"
    MODEL = "model"
    KEY = "key"
    TENANT = "tenant"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Args:
        request_id: ours.
        client_id: its x-request-id; others may have sent the same.
        key_id: see Caller; None: it showed no key.
        created_us: when it was accepted.
        updated_us: when this was last known to be true: at its end, its last checkpoint, or its beginning.
        reserved_tokens: what was held for it at first; nobody pays for that.
        counted_tokens: against quotas, the tenant's discount on cached ones taken off.
        finish_reason: of its choices, each once, parted by commas.
        status: as the client was told, or 499 where it had gone.
        stages_ms: durations of its stages, a JSON object.
        device_us, kv_block_us: see core.types.Cost.
    """

    request_id: str
    client_id: str | None
    tenant: str
    key_id: str | None
    model: str
    path: str
    created_us: int
    updated_us: int
    state: State = State.RESERVED
    reserved_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    counted_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error_code: str | None = None
    stages_ms: str | None = None
    device_us: int = 0
    kv_block_us: int = 0
    price_micro: int = 0


class Progress(msgspec.Struct, frozen=True):
    """How far a running request has come: what it is billed for if the server ends before it does."""

    request_id: str
    updated_us: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    counted_tokens: int
    price_micro: int


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request with an Idempotency-Key was answered, to be said again.

    Args:
        digest: SHA-256 of what was asked.
        headers: of the answer, without those that each response gets of its own.
    """

    tenant: str
    key: str
    request_id: str
    digest: bytes
    stored_us: int
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.key) + sum(len(name) + len(value) for name, value in self.headers)


class Reserve(msgspec.Struct, frozen=True):
    """A request begins."""

    row: LedgerRow


class Checkpoint(msgspec.Struct, frozen=True):
    """What is running has come so far."""

    progress: tuple[Progress, ...]


class Settle(msgspec.Struct, frozen=True):
    """A request has ended. Once it is settled, nothing changes it."""

    row: LedgerRow


class Amend(msgspec.Struct, frozen=True):
    """A request that is settled, or being settled, ended for its client otherwise. What it is billed stays."""

    row: LedgerRow


class Keep(msgspec.Struct, frozen=True):
    """An answer that may be replayed."""

    answer: StoredAnswer


class Forget(msgspec.Struct, frozen=True):
    """Answers that are no longer replayed: (tenant, key)."""

    keys: tuple[tuple[str, str], ...]


class Prune(msgspec.Struct, frozen=True):
    """Delete some of the requests that ended before this, the oldest first."""

    before_us: int


class Probe(msgspec.Struct, frozen=True):
    """See whether the database takes writes again."""


Write = Reserve | Checkpoint | Settle | Amend | Keep | Forget | Prune | Probe
