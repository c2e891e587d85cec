"""The ledger's file: rows, the kinds of writes, and the SQLite database that takes them.

Thread: ledger; any at start and for reading. The structs are frozen: they cross from the loop. A commit that returns is
on the disk: WAL with synchronous=FULL. Whole numbers throughout: microseconds since 1970 in UTC, tokens, millionths of
the currency.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from core.errors import StartupError

MICRO = 10**6  # of a second, and of the currency
APPLICATION_ID = 0x53544C47  # "STLG", in the file's header: what `file` shows
SCHEMA_VERSION = 3
BUSY_MS = 250  # to wait for a lock that another process holds for a moment, as a backup does
PRUNED_ROWS = 500  # at once: 5 ms
PAGE_BYTES = 4096  # SQLite's default
CHECKPOINT_WRITES = 2000  # between checkpoints: some 32 MiB of write-ahead log, to be read again after a crash


class RowState(StrEnum):
    RESERVED = "reserved"  # in progress
    SETTLED = "settled"  # ended, with its true usage
    ABORTED = "aborted"  # the server ended first


class Grouping(StrEnum):
    """What a line of a usage report sums up."""

    DAY = "day"
    MODEL = "model"
    KEY = "key"
    TENANT = "tenant"


class LedgerRow(msgspec.Struct, frozen=True):
    """One request.

    Args:
        request_id: ours.
        client_id: its x-request-id; others may have sent the same.
        key_id: see Caller; None: it had no key.
        created_us: when it was accepted.
        updated_us: of its end, its last checkpoint, or its beginning.
        reserved_tokens: held for it at first; not billed.
        counted_tokens: against quotas, less the tenant's discount on cached ones.
        finish_reason: of its choices, each once, separated by commas.
        status: as the client was told, or 499 where it had left.
        stages_ms: durations of its stages, a JSON object.
        device_us, kv_block_us: see core.types.Cost.
        context: what was left out of its prompt, a JSON object; None: no policy asked for that.
    """

    request_id: str
    client_id: str | None
    tenant: str
    key_id: str | None
    model: str
    path: str
    created_us: int = 0
    updated_us: int = 0
    state: RowState = RowState.RESERVED
    reserved_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    counted_tokens: int = 0
    finish_reason: str | None = None
    status: int | None = None
    error_code: str | None = None
    stages_ms: str | None = None
    device_us: int = 0
    kv_block_us: int = 0
    price_micro: int = 0
    context: str | None = None


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request with an Idempotency-Key, to be replayed.

    Args:
        digest: SHA-256 of the request.
        headers: without those that every response has of its own.
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


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that previous_response_id may name.

    Args:
        previous_id: of the response that it goes on from.
        input: its own items, a JSON list.
        document: the whole response, a JSON object.
    """

    tenant: str
    id: str
    previous_id: str | None
    created_us: int
    input: bytes
    document: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.input) + len(self.document)


class Reserve(msgspec.Struct, frozen=True):
    """A request has begun.

    Args:
        is_again: perhaps: a line of a batch has one id whenever it is asked.
    """

    row: LedgerRow
    is_again: bool = False


class Checkpoint(msgspec.Struct, frozen=True):
    """How far running requests have come: what they are billed for if the server ends first."""

    rows: tuple[LedgerRow, ...]


class Settle(msgspec.Struct, frozen=True):
    """A request has ended. Only an Amend changes a settled row.

    Args:
        kept: its response, in the same transaction; a spilled row goes without.
    """

    row: LedgerRow
    kept: "KeepResponse | None" = None


class Amend(msgspec.Struct, frozen=True):
    """The client of a settled request was told another end. What is billed stays."""

    row: LedgerRow


class Withdraw(msgspec.Struct, frozen=True):
    """A request that had been reserved was refused, and nothing of it computed: its row goes."""

    request_id: str


class Keep(msgspec.Struct, frozen=True):
    """Store an answer that may be replayed."""

    answer: StoredAnswer


class Forget(msgspec.Struct, frozen=True):
    """Delete answers: (tenant, key)."""

    keys: tuple[tuple[str, str], ...]


class KeepResponse(msgspec.Struct, frozen=True):
    """Store a response; beyond most_bytes of all, the tenant that has most of them loses its oldest."""

    response: StoredResponse
    most_bytes: int


class ForgetResponse(msgspec.Struct, frozen=True):
    """Delete one."""

    tenant: str
    id: str


class Prune(msgspec.Struct, frozen=True):
    """Delete PRUNED_ROWS requests that ended before this, the oldest first, and as many older responses."""

    before_us: int
    responses_before_us: int = 0


class Probe(msgspec.Struct, frozen=True):
    """Find out whether the database takes writes."""


Write = Reserve | Checkpoint | Settle | Amend | Withdraw | Keep | Forget | KeepResponse | ForgetResponse | Prune | Probe


_RESPONSES = (
    """CREATE TABLE responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, previous_id TEXT, created_us INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    input BLOB NOT NULL, document BLOB NOT NULL, PRIMARY KEY (tenant, id)
)""",
    "CREATE INDEX responses_by_time ON responses (created_us)",
    "CREATE INDEX responses_by_tenant ON responses (tenant, created_us, size_bytes)",
)
_VERSION_3 = (*_RESPONSES, "ALTER TABLE requests ADD COLUMN context TEXT")
SCHEMA = f"""
CREATE TABLE requests (
    request_id TEXT NOT NULL UNIQUE, client_id TEXT, tenant TEXT NOT NULL, key_id TEXT, model TEXT NOT NULL,
    path TEXT NOT NULL, created_us INTEGER NOT NULL, updated_us INTEGER NOT NULL, state TEXT NOT NULL,
    reserved_tokens INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, counted_tokens INTEGER NOT NULL, finish_reason TEXT, status INTEGER,
    error_code TEXT, stages_ms TEXT, device_us INTEGER NOT NULL, kv_block_us INTEGER NOT NULL,
    price_micro INTEGER NOT NULL, reasoning_tokens INTEGER NOT NULL DEFAULT 0, context TEXT
);
CREATE INDEX requests_by_time ON requests (updated_us);
CREATE INDEX requests_in_progress ON requests (request_id) WHERE state = '{RowState.RESERVED}';
CREATE TABLE answers (
    tenant TEXT NOT NULL, key TEXT NOT NULL, request_id TEXT NOT NULL, digest BLOB NOT NULL,
    stored_us INTEGER NOT NULL, status INTEGER NOT NULL, headers BLOB NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (tenant, key)
);
{_RESPONSES[0]};
{_RESPONSES[1]};
{_RESPONSES[2]};
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""
# From version 1, and from 2
_UPGRADES = (("ALTER TABLE requests ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0",), _VERSION_3)
COLUMNS = LedgerRow.__struct_fields__
CHECKPOINTED = (
    "updated_us", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "counted_tokens",
    "price_micro",
)  # fmt: skip
_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
_REPLACE = f"{_INSERT} ON CONFLICT (request_id) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in COLUMNS if name != "request_id"
)
# What was cut short begins anew, and what was answered stays
_RESERVE_AGAIN = f"{_REPLACE} WHERE state != '{RowState.RESERVED}' AND coalesce(status, 0) != 200"
_SETTLE = f"{_REPLACE} WHERE state = '{RowState.RESERVED}'"
_WITHDRAW = f"DELETE FROM requests WHERE request_id = ? AND state = '{RowState.RESERVED}'"
_CHECKPOINT = (
    f"UPDATE requests SET {', '.join(f'{name} = ?' for name in CHECKPOINTED)}"
    f" WHERE request_id = ? AND state = '{RowState.RESERVED}'"
)
_AMEND = (
    "UPDATE requests SET finish_reason = ?, status = ?, error_code = ?"
    f" WHERE request_id = ? AND state = '{RowState.SETTLED}'"
)
_ABORT = (
    f"UPDATE requests SET state = '{RowState.ABORTED}', finish_reason = '{RowState.ABORTED}'"
    f" WHERE state = '{RowState.RESERVED}'"
)
_PRUNE = (
    "DELETE FROM requests WHERE rowid IN (SELECT rowid FROM requests WHERE updated_us < ?"
    f" AND state != '{RowState.RESERVED}' ORDER BY updated_us LIMIT {PRUNED_ROWS})"
)


_PRUNE_RESPONSES = (
    f"DELETE FROM responses WHERE rowid IN (SELECT rowid FROM responses WHERE created_us < ? LIMIT {PRUNED_ROWS})"
)
# The oldest of the tenant that has most
_OLDEST_RESPONSES = f"""
DELETE FROM responses WHERE rowid IN (SELECT rowid FROM responses WHERE tenant =
    (SELECT tenant FROM responses GROUP BY tenant ORDER BY sum(size_bytes) DESC LIMIT 1)
    ORDER BY created_us LIMIT {PRUNED_ROWS // 8})
"""


class Database(Protocol):
    """A connection: sqlite3's, or a test's. Raises sqlite3.Error."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Iterable[Any]: ...

    def close(self) -> None: ...


Connect = Callable[[Path], Database]


def connect(path: Path) -> sqlite3.Connection:
    """A connection that begins no transactions by itself, for one thread at a time."""
    return sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)


def open_to_read(path: Path) -> "contextlib.closing[sqlite3.Connection]":
    """A connection of its own to a ledger that is there. Raises sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    return contextlib.closing(sqlite3.connect(uri, timeout=BUSY_MS / 1000, uri=True))


def is_damaged(path: Path, error: BaseException) -> bool:
    """Whether opening or reading the path failed because it is not an intact database."""
    return primary_code(error) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) or path.is_dir()


def primary_code(error: BaseException) -> int:
    """SQLite's result code without its extended part; 0: the error is not SQLite's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


@contextlib.contextmanager
def transaction(database: Database) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite has rolled back by itself, as when the disk is full
            database.execute("ROLLBACK")
        raise


class LedgerStore:
    """The open file."""

    def __init__(self, path: Path, open_database: Connect = connect) -> None:
        """
        Raises:
            sqlite3.Error: it cannot be opened or written to.
            StartupError: it is another kind of database.
        """
        self._database = open_database(path)
        self._num_unchecked = 0  # writes since the last checkpoint, as _weight() has them
        self._response_bytes: int | None = None  # of all responses, at most; None: to be counted
        try:
            self._prepare(path)
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, path: Path) -> None:
        execute = self._database.execute
        is_new = not _value(execute("SELECT count(*) FROM sqlite_schema"))
        found = _value(execute("PRAGMA application_id")), _value(execute("PRAGMA user_version"))
        if found[0] == APPLICATION_ID and 0 < found[1] < SCHEMA_VERSION:
            with transaction(self._database):
                for statement in [one for upgrade in _UPGRADES[found[1] - 1 :] for one in upgrade]:
                    execute(statement)
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            found = APPLICATION_ID, SCHEMA_VERSION
        if not is_new and found != (APPLICATION_ID, SCHEMA_VERSION):
            is_other_version = found[0] == APPLICATION_ID
            kind = f"a ledger of version {found[1]}, not {SCHEMA_VERSION}" if is_other_version else "not a ledger"
            cause = f"{path} is {kind}"
            raise StartupError(cause, "--ledger FILE, with a name of its own")
        list(execute("PRAGMA journal_mode = WAL"))
        list(execute("PRAGMA synchronous = FULL"))
        list(execute("PRAGMA wal_autocheckpoint = 0"))  # a commit would wait for it: see checkpoint()
        if is_new:
            with transaction(self._database):
                for statement in SCHEMA.split(";\n"):
                    execute(statement)

    def commit(self, writes: Sequence[Write]) -> None:
        """Write all of it durably; or none, and raise sqlite3.Error."""
        # A lone statement is a transaction by itself: two calls less that give up the GIL and wait for it
        first = writes[0] if len(writes) == 1 else None
        is_statement = isinstance(first, Reserve) or (isinstance(first, Settle) and first.kept is None)
        with contextlib.nullcontext() if is_statement else transaction(self._database):
            for write in writes:
                self._apply(write)
                self._num_unchecked += _weight(write)

    def checkpoint(self) -> None:
        """Move a long write-ahead log into the database; if that fails, the next checkpoint tries again."""
        if self._num_unchecked >= CHECKPOINT_WRITES:
            self._num_unchecked = 0
            with contextlib.suppress(sqlite3.Error):
                list(self._database.execute("PRAGMA wal_checkpoint(PASSIVE)"))

    def close_orphans(self) -> int:
        """End what the last process left in progress, as of its last checkpoint. Returns how many."""
        with transaction(self._database):
            self._database.execute(_ABORT)
        return int(_value(self._database.execute("SELECT changes()")))

    def used_since(self, day_us: int, month_us: int) -> dict[str, dict[tuple[str, str | None], int]]:
        """Tokens counted against quotas since these times, and their price: by the limit's name, and by tenant and key.

        None for the key: all of the tenant's.
        """
        names = "tokens_per_day", "money_per_day", "tokens_per_month", "money_per_month"
        used: dict[str, dict[tuple[str, str | None], int]] = {name: {} for name in names}
        sums = (
            "SELECT tenant, key_id, sum(iif(updated_us >= ?1, counted_tokens, 0)),"
            " sum(iif(updated_us >= ?1, price_micro, 0)), sum(counted_tokens), sum(price_micro)"
            " FROM requests WHERE updated_us >= ?2 GROUP BY tenant, key_id"
        )
        for tenant, key_id, *found in self._database.execute(sums, (day_us, month_us)):
            for name, num in zip(names, found, strict=True):
                for place in {(tenant, key_id), (tenant, None)}:
                    used[name][place] = used[name].get(place, 0) + num
        return used

    def answers(self) -> list[StoredAnswer]:
        """The oldest first."""
        names = StoredAnswer.__struct_fields__
        found = self._database.execute(f"SELECT {', '.join(names)} FROM answers ORDER BY stored_us")
        rows = (dict(zip(names, row, strict=True)) for row in found)
        return [StoredAnswer(**row | {"headers": _unpack_headers(row["headers"])}) for row in rows]

    def rows(self) -> list[LedgerRow]:
        """All rows in the order of their beginning: for small ledgers; usage is summed up in SQL."""
        found = self._database.execute(f"SELECT {', '.join(COLUMNS)} FROM requests ORDER BY rowid")
        return [msgspec.convert(dict(zip(COLUMNS, row, strict=True)), LedgerRow) for row in found]

    def has_older(self, prune: Prune) -> bool:
        """Whether there is more to prune."""
        old = (
            f"SELECT EXISTS (SELECT 1 FROM requests WHERE updated_us < ? AND state != '{RowState.RESERVED}')"
            " OR EXISTS (SELECT 1 FROM responses WHERE created_us < ?)"
        )
        return bool(_value(self._database.execute(old, (prune.before_us, prune.responses_before_us))))

    def close(self) -> None:
        self._database.close()

    def _apply(self, write: Write) -> None:
        execute = self._database.execute
        match write:
            case Reserve(row, is_again):
                execute(_RESERVE_AGAIN if is_again else _INSERT, msgspec.structs.astuple(row))
            case Settle(row, kept):
                execute(_SETTLE, msgspec.structs.astuple(row))
                if kept is not None:
                    self._keep_response(kept.response, kept.most_bytes)
            case Amend(row):
                execute(_AMEND, (row.finish_reason, row.status, row.error_code, row.request_id))
            case Withdraw(request_id):
                execute(_WITHDRAW, (request_id,))
            case Keep(answer):
                packed = msgspec.msgpack.encode(answer.headers)
                self._insert("INSERT OR REPLACE INTO answers", msgspec.structs.asdict(answer) | {"headers": packed})
            case Checkpoint(rows):
                for row in rows:
                    execute(_CHECKPOINT, [getattr(row, name) for name in (*CHECKPOINTED, "request_id")])
            case Forget(keys):
                for key in keys:
                    execute("DELETE FROM answers WHERE tenant = ? AND key = ?", key)
            case KeepResponse(response, most_bytes):
                self._keep_response(response, most_bytes)
            case ForgetResponse(tenant, response_id):
                execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, response_id))
            case Prune(before_us, responses_before_us):
                execute(_PRUNE, (before_us,))
                execute(_PRUNE_RESPONSES, (responses_before_us,))
            case Probe():
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")  # changes nothing, and is a write

    def _insert(self, into: str, values: dict[str, Any]) -> None:
        names, places = ", ".join(values), ", ".join("?" * len(values))
        self._database.execute(f"{into} ({names}) VALUES ({places})", tuple(values.values()))

    def _keep_response(self, response: StoredResponse, most_bytes: int) -> None:
        values = msgspec.structs.asdict(response) | {"size_bytes": response.size_bytes}
        self._insert("INSERT OR IGNORE INTO responses", values)
        if self._response_bytes is not None:
            self._response_bytes += response.size_bytes
        while self._response_bytes is None or self._response_bytes > most_bytes:
            if self._response_bytes is not None:
                self._database.execute(_OLDEST_RESPONSES)
            found = self._database.execute("SELECT coalesce(sum(size_bytes), 0) FROM responses")
            self._response_bytes = int(_value(found))


def _weight(write: Write) -> int:
    """Room in the write-ahead log, in rows of a request."""
    match write:
        case Keep(stored) | KeepResponse(stored) | Settle(_, KeepResponse(stored)):
            return 1 + stored.size_bytes // PAGE_BYTES
        case Checkpoint(many) | Forget(many):
            return len(many)
        case Prune():
            return PRUNED_ROWS // 8  # neighbours share pages, except in the index by id
        case _:
            return 1


def _unpack_headers(packed: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return msgspec.msgpack.decode(packed, type=tuple[tuple[bytes, bytes], ...])


def _value(rows: Iterable[Any]) -> Any:
    return next(iter(rows))[0]
