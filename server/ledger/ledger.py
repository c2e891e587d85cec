"""The loop's side of the ledger: one entry per request, reserved at its start, settled at its end. Thread: loop.

    reserve ── durable ──▶ the answer's first byte        settle ── durable ──▶ its final event

Running requests are checkpointed every five seconds, so that a crash bills what was generated until then. Nothing here
waits: callbacks report when a write is durable. While the database cannot be written, no request is admitted, and
running ones are settled into the spill file.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from core.errors import ErrorKind, ServiceError
from core.types import Cost, Usage
from server.ledger.journal import Disk, Writer, Written
from server.ledger.store import (
    MICRO,
    Amend,
    Checkpoint,
    Forget,
    Keep,
    KeepResponse,
    LedgerRow,
    Probe,
    Prune,
    Reserve,
    RowState,
    Settle,
    Withdraw,
    Write,
)
from server.ledger.usage import Prices

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kept = Keep | KeepResponse
Place = tuple[type[Kept], str, str]  # of what is kept: its kind, tenant, and key or id

CHECKPOINT_S = 5.0
PROBE_S = 1.0  # while the database takes no writes
HEARTBEAT_S = 15.0  # at most between commits: a fault is known before a request meets it
STUCK_S = 5.0  # without word of any write, the disk counts as hanging
PRUNE_S = 3600.0
PRUNE_MORE_S = 0.1  # while there is more to prune
MAX_SPILLED = 32_768  # requests that the spill file has room for: 64 MiB
SHUTDOWN = "shutdown"


def _ignore(is_durable: bool) -> None:
    pass


def _place_of(kept: Kept) -> Place:
    if isinstance(kept, Keep):
        return Keep, kept.answer.tenant, kept.answer.key
    return KeepResponse, kept.response.tenant, kept.response.id


class End(NamedTuple):
    """How a request ended.

    Args:
        stages_ms: durations of its stages.
        is_refused: by the backend, before anything was computed.
    """

    usage: Usage
    cost: Cost
    finish_reason: str | None
    status: int
    error_code: str | None
    stages_ms: Mapping[str, float]
    is_refused: bool = False


class EntryState(StrEnum):
    """The state of an entry's writes."""

    OPEN = "open"  # nothing has been written
    RESERVING = "reserving"
    RESERVED = "reserved"  # durably; its settlement may be on its way
    UNRESERVED = "unreserved"  # the reservation failed: nothing else is written either
    SETTLED = "settled"  # whether its settlement is durable is known


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the ledger: reserved once, settled once.

    It is settled only after its reservation is durable. A request whose reservation failed is not billed.

    Args:
        row: as it was reserved.
        count: returns the tokens of a usage that count against quotas.
        progress: returns its usage so far: prompts that are being answered, and tokens of their answers.
        end: how it ended, once it has.
        is_again: see Reserve.
        compose: makes the response that is stored with its end, if there is one.
    """

    ledger: "Ledger"
    row: LedgerRow
    count: Callable[[Usage], int]
    progress: Callable[[], Usage] | None = None
    end: End | None = None
    is_again: bool = False
    compose: Callable[[], KeepResponse | None] | None = None
    state: EntryState = EntryState.OPEN
    _on_settled: Callable[[bool], None] = _ignore

    def reserve(self, num_tokens: int, progress: Callable[[], Usage], on_reserved: Callable[[bool], None]) -> None:
        """Write the reservation. Raises ServiceError (unavailable), and writes nothing, if the ledger has failed.

        Args:
            on_reserved: called with whether it is durable.
        """
        self.ledger.check()
        self.row = msgspec.structs.replace(self.row, reserved_tokens=num_tokens)
        self.progress = progress
        self.state = EntryState.RESERVING
        self.ledger.begin(self, lambda is_durable: self._note_reserved(is_durable, on_reserved))

    def settle(self, end: End, on_settled: Callable[[bool], None]) -> None:
        """Write the true usage, or delete the row of a refused request.

        If the reservation failed, nothing is written and on_settled is not called.
        """
        self.end = end
        if self.state is not EntryState.UNRESERVED:
            self._on_settled = on_settled
        if self.state in (EntryState.OPEN, EntryState.RESERVED):
            self._write_end(end)

    def retell(self, end: End) -> None:
        """Correct the row: the client was told this end before the settlement was durable. It is billed as before."""
        self.end = end
        if self.state in (EntryState.OPEN, EntryState.RESERVED):
            self.ledger.write(Amend(self._settled(end)))

    def _note_reserved(self, is_durable: bool, on_reserved: Callable[[bool], None]) -> None:
        self.state = EntryState.RESERVED if is_durable else EntryState.UNRESERVED
        had_ended = self.end is not None
        if not is_durable:
            del self.ledger.entries[self]
            self._let_go()
        try:
            on_reserved(is_durable)
        finally:
            if is_durable and had_ended and self.end is not None:
                self._write_end(self.end)

    def _write_end(self, end: End) -> None:
        write = self._write_of(end)
        if self.compose is not None and isinstance(write, Settle):
            write = Settle(write.row, _made_or_none(self, self.compose))
        self.ledger.entries.pop(self, None)
        self.ledger.write(write, self._note_settled)

    def _write_of(self, end: End) -> Settle | Withdraw:
        return Withdraw(self.row.request_id) if end.is_refused else Settle(self._settled(end))

    def _note_settled(self, is_durable: bool) -> None:
        self.state = EntryState.SETTLED
        on_settled = self._on_settled
        self._let_go()
        on_settled(is_durable)

    def _let_go(self) -> None:
        """Drop references back to the request, so that its memory is freed without the garbage collector."""
        self.progress, self.compose, self._on_settled = None, None, _ignore

    def running_row(self) -> LedgerRow:
        """Its row with the usage so far."""
        assert self.progress is not None, "it has been reserved"
        return self._row_with(self.progress())

    def last_write(self) -> Settle | Withdraw:
        """Its row when the server ends: settled if the request has ended, otherwise aborted."""
        if self.end is not None:
            return self._write_of(self.end)
        ended = {"finish_reason": RowState.ABORTED, "status": 503, "error_code": SHUTDOWN, "stages_ms": "{}"}
        return Settle(msgspec.structs.replace(self.running_row(), state=RowState.ABORTED, **ended))

    def _settled(self, end: End) -> LedgerRow:
        return self._row_with(
            end.usage,
            state=RowState.SETTLED,
            finish_reason=end.finish_reason,
            status=end.status,
            error_code=end.error_code,
            stages_ms=msgspec.json.encode(end.stages_ms).decode(),
            device_us=round(end.cost.device_s * MICRO),
            kv_block_us=round(end.cost.kv_block_s * MICRO),
        )

    def _row_with(self, usage: Usage, **fields: Any) -> LedgerRow:
        return msgspec.structs.replace(
            self.row,
            updated_us=self.ledger.now_us(),
            prompt_tokens=usage.num_prompt_tokens,
            cached_tokens=usage.num_cached_tokens,
            completion_tokens=usage.num_completion_tokens,
            reasoning_tokens=usage.num_thought_tokens,
            counted_tokens=self.count(usage),
            price_micro=self.ledger.prices.cost_micro(self.row.model, usage),
            **fields,
        )


@dataclass(eq=False, repr=False)
class Ledger:
    """All entries in progress, and the way to the file.

    Args:
        path: of the file, for readers.
        unix: seconds since 1970.
        keep_s: older rows are deleted; None: none are.
        keep_responses_s: likewise of stored responses; 0: all are.

    Attributes:
        fault: why the database cannot be written; None: it can.
        disk: at the last write.
        entries: reserved and not settled.
        unkept: answers and responses not yet confirmed in the database; they are written again until they are.
    """

    path: Path
    _writer: Writer
    prices: Prices
    _unix: Callable[[], float]
    _loop: asyncio.AbstractEventLoop
    keep_s: float | None = None
    keep_responses_s: float = 0.0
    fault: str | None = None
    disk: Disk | None = None
    entries: dict[Entry, None] = field(default_factory=dict)
    unkept: dict[Place, Kept] = field(default_factory=dict)
    _committed_s: float = field(init=False)
    _num_pending: int = 0  # writes
    _pending_since_s: float | None = None  # without word of any of them
    _timers: dict[Callable[[], None], asyncio.TimerHandle] = field(default_factory=dict)  # by what they call

    def __post_init__(self) -> None:
        self._committed_s = self._loop.time()

    def start(self) -> None:
        """Prune and commit from now on, whether requests come or not. The loop runs."""
        self._beat()
        if self.keep_s is not None:
            self._prune()

    def check(self) -> None:
        """Raise ServiceError (unavailable) if requests cannot be recorded, and so not served."""
        if self.why_unavailable is not None:
            raise unavailable()

    @property
    def why_unavailable(self) -> str | None:
        """Why no request is admitted; None: requests are."""
        if self.fault is not None:
            return self.fault
        waited_s = 0.0 if self._pending_since_s is None else self._loop.time() - self._pending_since_s
        return f"no write has finished for {waited_s:.0f} s" if waited_s > STUCK_S else None

    @property
    def commit_age_s(self) -> float:
        """Seconds since the database was last written, or opened."""
        return self._loop.time() - self._committed_s

    def open(self, row: LedgerRow, count: Callable[[Usage], int], is_again: bool = False) -> Entry:
        """
        Args:
            row: whose request it is, and for what.
            count: what a usage counts against the quotas.
            is_again: see Reserve.
        """
        now_us = self.now_us()
        return Entry(self, msgspec.structs.replace(row, created_us=now_us, updated_us=now_us), count, is_again=is_again)

    def now_us(self) -> int:
        return round(self._unix() * MICRO)

    def begin(self, entry: Entry, on_reserved: Callable[[bool], None]) -> None:
        self.write(Reserve(entry.row, entry.is_again), on_reserved)
        self.entries[entry] = None
        self._later(CHECKPOINT_S, self._checkpoint)

    def forget(self, keys: tuple[tuple[str, str], ...]) -> None:
        """Delete stored answers, by tenant and key."""
        for key in keys:
            self.unkept.pop((Keep, *key), None)
        self.write(Forget(keys))

    def close(self) -> None:
        """End the requests that are still in progress, and close the file. Callbacks are no longer called."""
        for timer in self._timers.values():
            timer.cancel()
        if self.fault is not None:
            self.write(Probe())  # the database may take writes by now
        for entry in list(self.entries):
            write = _made_or_none(entry, entry.last_write)
            if write is not None:  # otherwise the next process closes it, as of its last checkpoint
                self.write(write)
        self._write_unkept()
        self._writer.close()

    def write(self, write: Write, tell: Callable[[bool], None] = _ignore) -> None:
        """Store an answer or a response now, or once the database can be written again."""
        kept = write.kept if isinstance(write, Settle) else write if isinstance(write, Kept) else None
        if kept is not None:
            self.unkept[_place_of(kept)] = kept

        def on_written(is_durable: bool, written: Written) -> None:
            # Without a fault, what the database has not taken it will not take the next time either
            is_over = written.fault is None or (isinstance(write, Settle) and not is_durable)
            if kept is not None and is_over and self.unkept.get(_place_of(kept)) is kept:
                del self.unkept[_place_of(kept)]
            self._num_pending -= 1
            self._pending_since_s = self._loop.time() if self._num_pending else None
            try:
                self._note(written)
            finally:
                tell(is_durable)

        self._num_pending += 1
        if self._pending_since_s is None:
            self._pending_since_s = self._loop.time()
        self._writer.submit(write, on_written)

    def _note(self, written: Written) -> None:
        self.disk = written.disk or self.disk
        if written.fault is None:
            self._committed_s = self._loop.time()
        if written.fault == self.fault:
            return
        if written.fault is None:
            logger.warning("the ledger can be written again")
            self._write_unkept()
        else:
            logger.error("the ledger cannot be written, so requests are refused: %s", written.fault)
            self._later(PROBE_S, self._probe)
        self.fault = written.fault

    def _write_unkept(self) -> None:
        for kept in list(self.unkept.values()):
            self.write(kept)

    # What is done now and then: one timer for each.

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Unless it is due already."""

        def run() -> None:
            del self._timers[action]
            action()

        if action not in self._timers:
            self._timers[action] = self._loop.call_later(delay_s, run)

    def _probe(self) -> None:
        def on_probed(is_durable: bool) -> None:
            if not is_durable:
                self._later(PROBE_S, self._probe)

        if self.fault is not None:
            self.write(Probe(), on_probed)

    def _checkpoint(self) -> None:
        if not self.entries:
            return
        self._later(CHECKPOINT_S, self._checkpoint)
        if self.fault is None:
            rows = (_made_or_none(entry, entry.running_row) for entry in self.entries)
            self.write(Checkpoint(tuple(row for row in rows if row is not None)))

    def _beat(self) -> None:
        self._later(HEARTBEAT_S / 2, self._beat)
        is_due = self.disk is None or self.commit_age_s > HEARTBEAT_S / 3
        if self.fault is None and not self._num_pending and is_due:
            self.write(Probe())

    def _prune(self) -> None:
        def on_pruned(is_durable: bool, written: Written) -> None:
            self._note(written)
            self._later(PRUNE_MORE_S if written.has_more else PRUNE_S, self._prune)

        assert self.keep_s is not None
        now_us = self.now_us()
        limits = (now_us - round(kept_s * MICRO) for kept_s in (self.keep_s, self.keep_responses_s))
        self._writer.submit(Prune(*limits), on_pruned)


def _made_or_none(entry: Entry, make: Callable[[], T]) -> T | None:
    """None: a bug in one request's progress, which must not prevent the others' rows."""
    try:
        return make()
    except Exception:
        extra = {"request_id": entry.row.request_id}
        logger.exception("the progress of a request cannot be recorded in the ledger", extra=extra)
        return None


def unavailable() -> ServiceError:
    message = "The billing ledger is unavailable. Retry."
    return ServiceError(ErrorKind.UNAVAILABLE, message, "ledger_unavailable", retry_after_s=PROBE_S)
