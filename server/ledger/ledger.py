"""The loop's side of the ledger: one entry per request, reserved as it begins, settled as it ends. Thread: loop.

    reserve ── durable ──▶ the answer's first byte        settle ── durable ──▶ its final event

What runs is checkpointed every five seconds, so that a crash bills what was said until then. Nothing here waits: who is
told when a write is durable goes on then. While the database takes no writes, no request is let in, and those that run
settle into the spill file.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

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
    LedgerRow,
    Probe,
    Progress,
    Prune,
    Reserve,
    RowState,
    Settle,
    StoredAnswer,
    Write,
)
from server.ledger.usage import Prices

logger = logging.getLogger(__name__)

CHECKPOINT_S = 5.0
PROBE_S = 1.0  # while the database takes no writes
HEARTBEAT_S = 15.0  # at most, without a commit: a fault is known before a request meets it
STUCK_S = 5.0  # without word of any write: a disk that hangs takes none
PRUNE_S = 3600.0  # and again at once while there is more
MAX_SPILLED = 32_768  # requests that the spill file has room for: 64 MiB
SHUTDOWN = "shutdown"


def _ignore(is_durable: bool) -> None:
    pass


class Subject(NamedTuple):
    """Whose request it is, and for what.

    Args:
        count: what a usage counts against the quotas.
    """

    request_id: str
    client_id: str | None
    tenant: str
    key_id: str | None
    model: str
    path: str
    count: Callable[[Usage], int]


class End(NamedTuple):
    """How a request ended.

    Args:
        stages_ms: durations of its stages.
    """

    usage: Usage
    cost: Cost
    finish_reason: str | None
    status: int
    error_code: str | None
    stages_ms: Mapping[str, float]


class EntryState(StrEnum):
    """What is known of an entry's writes."""

    OPEN = "open"  # nothing has been written
    RESERVING = "reserving"
    RESERVED = "reserved"  # durably; its settlement may be on its way
    UNRESERVED = "unreserved"  # that could not be written: nothing else is, either
    SETTLED = "settled"  # what became of its settlement is known


@dataclass(slots=True, eq=False)
class Entry:
    """One request in the ledger: reserved once, settled once.

    It is settled after its reservation is known to be durable, and not at all if it is not: what was refused because
    it could not be written down is not billed.

    Args:
        row: as it was reserved.
        progress: what it has come to: prompts of which it says something, tokens that it has said.
        end: how it ended, once it has.
    """

    ledger: "Ledger"
    subject: Subject
    row: LedgerRow
    progress: Callable[[], Usage] | None = None
    end: End | None = None
    state: EntryState = EntryState.OPEN
    _on_settled: Callable[[bool], None] = _ignore

    def reserve(self, num_tokens: int, progress: Callable[[], Usage], on_reserved: Callable[[bool], None]) -> None:
        """Write it down as begun.

        Args:
            num_tokens: held for it.
            on_reserved: told whether that is durable.

        Raises:
            ServiceError: unavailable; nothing is written.
        """
        self.ledger.check()
        self.row = msgspec.structs.replace(self.row, reserved_tokens=num_tokens)
        self.progress = progress
        self.state = EntryState.RESERVING
        self.ledger.begin(self, lambda is_durable: self._note_reserved(is_durable, on_reserved))

    def settle(self, end: End, on_settled: Callable[[bool], None]) -> None:
        """Write down its true usage. Of what could not be reserved nothing is written, and nobody told."""
        self.end, self._on_settled = end, on_settled
        if self.state in (EntryState.OPEN, EntryState.RESERVED):
            self._write_end(end)

    def retell(self, end: End) -> None:
        """The client was told this end instead, before word of the settlement came: the row shall say so too."""
        self.end = end
        if self.state in (EntryState.OPEN, EntryState.RESERVED):
            self.ledger.write(Amend(self.settled_row(end)))  # billed as before

    def _note_reserved(self, is_durable: bool, on_reserved: Callable[[bool], None]) -> None:
        self.state = EntryState.RESERVED if is_durable else EntryState.UNRESERVED
        end_before = self.end
        if not is_durable:
            del self.ledger.entries[self]
        try:
            on_reserved(is_durable)
        finally:
            if is_durable and end_before is not None and self.end is not None:
                self._write_end(self.end)

    def _write_end(self, end: End) -> None:
        self.ledger.entries.pop(self, None)
        self.ledger.write(Settle(self.settled_row(end)), self._note_settled)

    def _note_settled(self, is_durable: bool) -> None:
        self.state = EntryState.SETTLED
        self._on_settled(is_durable)

    def last_row(self) -> LedgerRow:
        """As it is where the server ends: settled if it has ended, otherwise broken off."""
        if self.end is not None:
            return self.settled_row(self.end)
        assert self.progress is not None, "it has been reserved"
        end = End(self.progress(), Cost(), RowState.ABORTED, 503, SHUTDOWN, {})
        return msgspec.structs.replace(self.settled_row(end), state=RowState.ABORTED)

    def settled_row(self, end: End) -> LedgerRow:
        return msgspec.structs.replace(
            self.row,
            updated_us=self.ledger.now_us(),
            state=RowState.SETTLED,
            prompt_tokens=end.usage.num_prompt_tokens,
            cached_tokens=end.usage.num_cached_tokens,
            completion_tokens=end.usage.num_completion_tokens,
            counted_tokens=self.subject.count(end.usage),
            finish_reason=end.finish_reason,
            status=end.status,
            error_code=end.error_code,
            stages_ms=msgspec.json.encode(end.stages_ms).decode(),
            device_us=round(end.cost.device_s * MICRO),
            kv_block_us=round(end.cost.kv_block_s * MICRO),
            price_micro=self.ledger.prices.cost_micro(self.subject.model, end.usage),
        )

    def current_progress(self) -> Progress:
        assert self.progress is not None, "it has been reserved"
        usage = self.progress()
        return Progress(
            self.row.request_id,
            self.ledger.now_us(),
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_completion_tokens,
            self.subject.count(usage),
            self.ledger.prices.cost_micro(self.subject.model, usage),
        )


class Ledger:
    """All entries in progress, and the way to the file.

    Args:
        path: of the file, for who reads it.
        unix: seconds since 1970.
        keep_s: rows older than that are deleted; None: none are.
    """

    def __init__(
        self,
        path: Path,
        writer: Writer,
        prices: Prices,
        unix: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
        keep_s: float | None = None,
    ) -> None:
        self.path = path
        self.prices = prices
        self.fault: str | None = None  # why the database takes no writes
        self.disk: Disk | None = None  # at the last write
        self._committed_s = loop.time()
        self._writer = writer
        self._unix = unix
        self._loop = loop
        self._keep_s = keep_s
        self.entries: dict[Entry, None] = {}
        self._unkept: dict[tuple[str, str], StoredAnswer] = {}  # by tenant and key: not known to be in the file yet
        self._num_untold = 0  # writes
        self._waits_since_s: float | None = None  # for word of any of them
        self._checkpoint: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._prune: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Delete what is too old, now and every hour; and commit now and then, whoever asks. The loop runs."""
        self._beat()
        if self._keep_s is not None:
            self._prune_old()

    def check(self) -> None:
        """
        Raises:
            ServiceError: unavailable: what is not written down is not served.
        """
        if self.why_unavailable is not None:
            raise unavailable()

    @property
    def why_unavailable(self) -> str | None:
        """What keeps requests from being let in; None: nothing."""
        if self.fault is not None:
            return self.fault
        waited_s = 0.0 if self._waits_since_s is None else self._loop.time() - self._waits_since_s
        return f"no word of a write for {waited_s:.0f} s" if waited_s > STUCK_S else None

    @property
    def commit_age_s(self) -> float:
        """Since the database last took a write, or was opened."""
        return self._loop.time() - self._committed_s

    def open(self, subject: Subject) -> Entry:
        now_us = self.now_us()
        row = LedgerRow(
            request_id=subject.request_id,
            client_id=subject.client_id,
            tenant=subject.tenant,
            key_id=subject.key_id,
            model=subject.model,
            path=subject.path,
            created_us=now_us,
            updated_us=now_us,
        )
        return Entry(self, subject, row)

    def now_us(self) -> int:
        return round(self._unix() * MICRO)

    def begin(self, entry: Entry, on_reserved: Callable[[bool], None]) -> None:
        self.write(Reserve(entry.row), on_reserved)
        self.entries[entry] = None
        if self._checkpoint is None:
            self._checkpoint = self._loop.call_later(CHECKPOINT_S, self._write_checkpoint)

    def keep(self, answer: StoredAnswer) -> None:
        """Store it with its key: now, or when the database takes writes again."""
        self._unkept[answer.tenant, answer.key] = answer
        self._write_answer(answer)

    def forget(self, keys: tuple[tuple[str, str], ...]) -> None:
        """Delete stored answers, by tenant and key."""
        for key in keys:
            self._unkept.pop(key, None)
        self.write(Forget(keys))

    def close(self) -> None:
        """Write all that is still in progress down as ended here, and close the file. Nobody is told any more."""
        for timer in (self._checkpoint, self._probe, self._prune, self._heartbeat):
            if timer is not None:
                timer.cancel()
        if self.fault is not None:
            self.write(Probe())  # perhaps it takes writes by now
        for entry in list(self.entries):
            self._settle_last(entry)
        self._write_unkept()
        self._writer.close()

    def _settle_last(self, entry: Entry) -> None:
        try:
            self.write(Settle(entry.last_row()))
        except Exception:  # the next process closes it, as it was last checkpointed
            logger.exception("a request that is in progress cannot be settled", extra=_extra(entry))

    def write(self, write: Write, tell: Callable[[bool], None] = _ignore) -> None:
        def on_written(is_durable: bool, written: Written) -> None:
            self._num_untold -= 1
            self._waits_since_s = self._loop.time() if self._num_untold else None
            try:
                self._note(written)
            finally:
                tell(is_durable)

        self._num_untold += 1
        if self._waits_since_s is None:
            self._waits_since_s = self._loop.time()
        self._writer.submit(write, on_written)

    def _note(self, written: Written) -> None:
        self.disk = written.disk or self.disk
        if written.fault is None:
            self._committed_s = self._loop.time()
        self._note_fault(written.fault)

    def _note_fault(self, fault: str | None) -> None:
        if fault == self.fault:
            return
        if fault is None:
            logger.warning("the ledger takes writes again")
            self._write_unkept()
        else:
            logger.error("the ledger takes no writes, requests are refused: %s", fault)
            if self._probe is None:
                self._probe = self._loop.call_later(PROBE_S, self._write_probe)
        self.fault = fault

    def _write_answer(self, answer: StoredAnswer) -> None:
        def on_written(is_durable: bool) -> None:
            place = answer.tenant, answer.key
            # One that no database takes is told so while there is no fault: to try it again is of no use
            if (is_durable or self.fault is None) and self._unkept.get(place) is answer:
                del self._unkept[place]

        self.write(Keep(answer), on_written)

    def _write_unkept(self) -> None:
        for answer in list(self._unkept.values()):
            self._write_answer(answer)

    def _write_probe(self) -> None:
        self._probe = None
        if self.fault is not None:
            self.write(Probe(), self._on_probed)

    def _on_probed(self, is_durable: bool) -> None:
        if not is_durable and self._probe is None:
            self._probe = self._loop.call_later(PROBE_S, self._write_probe)

    def _write_checkpoint(self) -> None:
        self._checkpoint = None
        if not self.entries:
            return
        self._checkpoint = self._loop.call_later(CHECKPOINT_S, self._write_checkpoint)
        if self.fault is None:
            self.write(Checkpoint(tuple(self._progress())))

    def _progress(self) -> Iterator[Progress]:
        """Of all that are in progress, but for those whose own cannot be told."""
        for entry in self.entries:
            try:
                yield entry.current_progress()
            except Exception:
                logger.exception("a request's progress cannot be written down", extra=_extra(entry))

    def _beat(self) -> None:
        self._heartbeat = self._loop.call_later(HEARTBEAT_S / 2, self._beat)
        is_due = self.disk is None or self.commit_age_s > HEARTBEAT_S / 3
        if self.fault is None and not self._num_untold and is_due:
            self.write(Probe())

    def _prune_old(self) -> None:
        assert self._keep_s is not None
        before_us = self.now_us() - round(self._keep_s * MICRO)
        self._writer.submit(Prune(before_us), self._on_pruned)

    def _on_pruned(self, is_durable: bool, written: Written) -> None:
        self._note(written)
        self._prune = self._loop.call_later(0.1 if written.has_more else PRUNE_S, self._prune_old)


def _extra(entry: Entry) -> Mapping[str, str]:
    """Of a log record that is the entry's."""
    return {"request_id": entry.row.request_id}


def unavailable() -> ServiceError:
    message = "The billing ledger is unavailable. Retry."
    return ServiceError(ErrorKind.UNAVAILABLE, message, "ledger_unavailable", retry_after_s=PROBE_S)
