"""Files and batches on the disk: contents in a directory, all else in one SQLite database beside them. Thread: files.

    DIR/files.db        files, batches, and the answers of batches in progress
    DIR/contents/ID     one file's bytes

Ids are made here, and are the only names on the disk; what users call their files is data. A file is there once its row
is: contents without one are removed at the next start. One server works in a directory.
"""

import codecs
import contextlib
import fcntl
import os
import secrets
import sqlite3
from array import array
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from core.errors import ErrorKind, InvalidRequest, ServiceError, StartupError
from server.ledger.store import connect, transaction
from server.values import UNREADABLE

MOST_LINES = 50_000  # of a batch
MOST_ERRORS = 100  # of an invalid file, that are told
MOST_ID_CHARS = 512  # of a custom_id
SCHEMA_VERSION = 1
APPLICATION_ID = 0x53544C46  # "STLF"
_SCHEMA = f"""
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX files_by_tenant ON files (tenant, bytes);
CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, is_over INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX batches_by_tenant ON batches (tenant);
CREATE TABLE answers (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


class Purpose(StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


OVER = (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)


class File(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class Credential(msgspec.Struct, frozen=True):
    """With what a batch was made: its lines are asked with it again.

    Args:
        digest: of the key, in hex; None: it was another credential, or none.
    """

    tenant: str
    digest: str | None = None
    key_id: str | None = None
    subject: str | None = None


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, by OpenAI's names; times in seconds since 1970."""

    id: str
    credential: Credential
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = Status.VALIDATING
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def tenant(self) -> str:
        return self.credential.tenant

    def entering(self, status: Status, now_s: int, **fields: Any) -> "Batch":
        return msgspec.structs.replace(self, status=status, **{f"{status}_at": now_s}, **fields)


class Line(msgspec.Struct, frozen=True):
    """A line of a batch's file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class Answer(NamedTuple):
    """A line's, as its file gets it."""

    batch_id: str
    line: int
    is_error: bool
    body: bytes


class Quota(NamedTuple):
    """A tenant's."""

    files: int
    bytes: int


class FileLimits(NamedTuple):
    max_file_bytes: int
    quota: Quota


class Scan(NamedTuple):
    """A batch's file.

    Args:
        places: of its lines: where each begins and ends, in turns.
    """

    places: "array[int]"
    errors: tuple[LineError, ...]

    @property
    def num_lines(self) -> int:
        return len(self.places) // 2


_FILE_COLUMNS = File.__struct_fields__


class _Body(msgspec.Struct, frozen=True):
    stream: bool | None = None


_line_decoder, _body_decoder = msgspec.json.Decoder(Line), msgspec.json.Decoder(_Body)
_pack, _unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(Batch).decode


class Store:
    """The open directory."""

    def __init__(self, directory: Path) -> None:
        """Raises StartupError: it cannot be used."""
        self._contents = directory / "contents"
        try:
            self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = directory / "files.db"
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._database = connect(path)
            self._prepare(path)
        except BlockingIOError as error:
            raise _unusable(f"another server works in {directory}") from error
        except (OSError, sqlite3.Error) as error:
            raise _unusable(f"{directory} cannot be used for files: {error}") from error
        known = {row[0] for row in self._database.execute("SELECT id FROM files")}
        for orphan in self._contents.iterdir():
            if orphan.name not in known:
                orphan.unlink()

    def _prepare(self, path: Path) -> None:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            self._database.execute(f"PRAGMA {pragma}").fetchall()
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if found not in (0, SCHEMA_VERSION):
            raise _unusable(f"{path} is of version {found}, not {SCHEMA_VERSION}")
        if not found:
            self._database.executescript(f"BEGIN;{_SCHEMA}COMMIT;")

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    # Files.

    def path_of(self, file: File) -> Path:
        return self._contents / file.id

    def add_file(self, file: File, content: memoryview, quota: Quota) -> None:
        """Raises ServiceError: the tenant's quota is full, or the disk."""
        self._check_room(file.tenant, quota, 1, file.bytes)
        try:
            self._write(file, [content])
            with transaction(self._database):
                self._insert(file)
        except (OSError, sqlite3.Error) as error:
            self.path_of(file).unlink(missing_ok=True)
            message = f"The server cannot store the file: {getattr(error, 'strerror', None) or error}. Try again later."
            raise ServiceError(ErrorKind.UNAVAILABLE, message, "files_unavailable") from error

    def _check_room(self, tenant: str, quota: Quota, num_more: int, more_bytes: int) -> None:
        """Raises ServiceError."""
        num, size = self._database.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        if num + num_more > quota.files or size + more_bytes > quota.bytes:
            message = (
                f"You have {num:,} files of at most {quota.files:,}, and {size:,} bytes of at most {quota.bytes:,}."
                " Delete some that you no longer need."
            )
            raise ServiceError(ErrorKind.RATE_LIMITED, message, "files_quota_exceeded", "file")

    def _write(self, file: File, pieces: Iterable[bytes | memoryview]) -> None:
        with open(self.path_of(file), "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
            opened.writelines(pieces)
            opened.flush()
            os.fsync(opened.fileno())

    def _insert(self, file: File) -> None:
        places = ", ".join("?" * len(_FILE_COLUMNS))
        self._database.execute(f"INSERT INTO files VALUES ({places})", msgspec.structs.astuple(file))

    def file(self, tenant: str, file_id: str, param: str | None = None) -> File:
        """Raises ServiceError: the tenant has no such file."""
        row = self._database.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        if row is None:
            message = f"There is no file {file_id[:100]!r}: it was deleted, has expired, or is not yours."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "file_not_found", param)
        return _file(row)

    def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, is_ascending: bool
    ) -> tuple[list[File], bool]:
        """A page of the tenant's, and whether there are more. Raises InvalidRequest."""
        self._check_listed("files", tenant, after)
        order, past = ("ASC", ">") if is_ascending else ("DESC", "<")
        rows = self._database.execute(
            "SELECT * FROM files WHERE tenant = :tenant AND (:purpose IS NULL OR purpose = :purpose)"
            f" AND (:after IS NULL OR rowid {past} (SELECT rowid FROM files WHERE id = :after AND tenant = :tenant))"
            f" ORDER BY rowid {order} LIMIT :limit",
            {"tenant": tenant, "purpose": purpose, "after": after, "limit": limit + 1},
        )
        found = [_file(row) for row in rows]
        return found[:limit], len(found) > limit

    def _check_listed(self, table: str, tenant: str, after: str | None) -> None:
        query = f"SELECT 1 FROM {table} WHERE id = ? AND tenant = ?"
        if after is not None and self._database.execute(query, (after, tenant)).fetchone() is None:
            raise InvalidRequest(f"after is no id of this list: {after[:100]!r}.", "after")

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises ServiceError: the tenant has no such file, or a batch that is not over reads it."""
        file = self.file(tenant, file_id)
        if any(batch.input_file_id == file_id for batch in self.unfinished()):
            message = f"An unfinished batch reads {file_id}. Cancel the batch first, or wait for its end."
            raise ServiceError(ErrorKind.CONFLICT, message, "file_in_use")
        self._remove([file])

    def remove_expired(self, now_s: int) -> None:
        rows = self._database.execute("SELECT * FROM files WHERE expires_at <= ?", (now_s,)).fetchall()
        used = {batch.input_file_id for batch in self.unfinished()} if rows else set()
        files = [_file(row) for row in rows]
        self._remove([file for file in files if file.id not in used])

    def _remove(self, files: list[File]) -> None:
        with transaction(self._database):
            self._database.executemany("DELETE FROM files WHERE id = ?", [(file.id,) for file in files])
        for file in files:
            self.path_of(file).unlink(missing_ok=True)

    # Batches.

    def add_batch(self, batch: Batch, most_unfinished: int, quota: Quota) -> None:
        """
        Raises:
            ServiceError: the tenant has too many, or its files are more than the quota already: those that batches
                write are not refused.
        """
        if sum(one.tenant == batch.tenant for one in self.unfinished()) >= most_unfinished:
            message = f"You have {most_unfinished} unfinished batches. Wait for one of them, or cancel one."
            raise ServiceError(ErrorKind.RATE_LIMITED, message, "too_many_batches")
        self.file(batch.tenant, batch.input_file_id, "input_file_id")
        self._check_room(batch.tenant, quota, 0, 0)
        values = batch.id, batch.tenant, False, _pack(batch)
        self._database.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", values)

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises ServiceError: the tenant has no such batch."""
        found = self._database.execute("SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant))
        if (row := found.fetchone()) is None:
            message = f"There is no batch {batch_id[:100]!r}."
            raise ServiceError(ErrorKind.NOT_FOUND, message, "batch_not_found")
        return _unpack(row[0])

    def batches(self, tenant: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """A page of the tenant's, the latest first, and whether there are more. Raises InvalidRequest."""
        self._check_listed("batches", tenant, after)
        rows = self._database.execute(
            "SELECT record FROM batches WHERE tenant = :tenant AND (:after IS NULL OR rowid <"
            " (SELECT rowid FROM batches WHERE id = :after AND tenant = :tenant)) ORDER BY rowid DESC LIMIT :limit",
            {"tenant": tenant, "after": after, "limit": limit + 1},
        )
        found = [_unpack(record) for (record,) in rows]
        return found[:limit], len(found) > limit

    def unfinished(self) -> list[Batch]:
        """Of all tenants, the oldest first."""
        rows = self._database.execute("SELECT record FROM batches WHERE NOT is_over ORDER BY rowid")
        return [_unpack(record) for (record,) in rows]

    def update(self, batch: Batch) -> None:
        change = "UPDATE batches SET record = ?, is_over = ? WHERE id = ?"
        self._database.execute(change, (_pack(batch), batch.status in OVER, batch.id))

    def scan(self, batch: Batch) -> Scan:
        """Read and check the lines of a batch's file."""
        places, errors, seen = array("q"), list[LineError](), set[str]()
        path, start, number = self._contents / batch.input_file_id, 0, 0
        with path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if number == 1 and text.startswith(codecs.BOM_UTF8):
                    start, text = len(codecs.BOM_UTF8), text[len(codecs.BOM_UTF8) :]
                end = start + len(text)
                if text.strip():
                    error = _line_error(text, number, batch.endpoint, seen)
                    if error is None and len(places) == 2 * MOST_LINES:
                        error = LineError(
                            "too_many_lines", f"A batch has at most {MOST_LINES:,} lines. Split the file."
                        )
                    if error is not None:
                        errors.append(error)
                        if len(errors) == MOST_ERRORS or error.line is None:
                            break
                    places.extend((start, end))
                start = end
        if not places and not errors:
            errors.append(LineError("empty_file", "The file has no lines."))
        return Scan(places, tuple(errors))

    def line(self, batch: Batch, scan: Scan, number: int) -> Line:
        start, end = scan.places[2 * number : 2 * number + 2]
        with (self._contents / batch.input_file_id).open("rb") as opened:
            return _line_decoder.decode(os.pread(opened.fileno(), end - start, start))

    def add_answers(self, answers: Iterable[Answer]) -> None:
        with transaction(self._database):
            self._database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", answers)

    def answered(self, batch: Batch) -> dict[int, bool]:
        """The lines that have been answered, and whether by an error."""
        rows = self._database.execute("SELECT line, is_error FROM answers WHERE batch_id = ?", (batch.id,))
        return {line: bool(is_error) for line, is_error in rows}

    def finish(self, batch: Batch, now_s: int) -> Batch:
        """Write its files, in its lines' order, and end it, with the status that it has."""
        with contextlib.ExitStack() as undo:
            batch = self._finish(batch, now_s, undo)
            undo.pop_all()
        return batch

    def _finish(self, batch: Batch, now_s: int, undo: contextlib.ExitStack) -> Batch:
        files: dict[bool, File] = {}
        for is_error, name in ((False, "output"), (True, "error")):
            which = "FROM answers WHERE batch_id = ? AND is_error = ?"
            size = self._database.execute(f"SELECT coalesce(sum(length(body) + 1), 0) {which}", (batch.id, is_error))
            if not (num_bytes := size.fetchone()[0]):
                continue
            rows = self._database.execute(f"SELECT body {which} ORDER BY line", (batch.id, is_error))
            file = files[is_error] = File(
                id=new_file_id(),
                tenant=batch.tenant,
                purpose=Purpose.BATCH_OUTPUT,
                filename=f"{batch.id}_{name}.jsonl",
                bytes=num_bytes,
                created_at=now_s,
                expires_at=None if batch.output_expires_s is None else now_s + batch.output_expires_s,
            )
            undo.callback(self.path_of(file).unlink, missing_ok=True)
            self._write(file, (body + b"\n" for (body,) in rows))
        ids = {is_error: file.id for is_error, file in files.items()}
        batch = msgspec.structs.replace(batch, output_file_id=ids.get(False), error_file_id=ids.get(True))
        with transaction(self._database):
            for file in files.values():
                self._insert(file)
            self.update(batch)
            self._database.execute("DELETE FROM answers WHERE batch_id = ?", (batch.id,))
        return batch


def _file(row: tuple[Any, ...]) -> File:
    return File(**dict(zip(_FILE_COLUMNS, row, strict=True)))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _line_error(text: bytes, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    try:
        line = _line_decoder.decode(text)
        if _body_decoder.decode(line.body).stream:
            raise InvalidRequest("a batch does not stream. Leave stream out.", "body.stream")
        if line.method != "POST":
            raise InvalidRequest("method must be POST.", "method")
        if line.url != endpoint:
            raise InvalidRequest(f"url is {line.url[:64]!r}, and the batch's endpoint {endpoint!r}.", "url")
        if not 0 < len(line.custom_id) <= MOST_ID_CHARS:
            raise InvalidRequest(f"custom_id must have 1 to {MOST_ID_CHARS} characters.", "custom_id")
        if line.custom_id in seen:
            raise InvalidRequest(f"custom_id {line.custom_id[:64]!r} is that of an earlier line.", "custom_id")
    except msgspec.ValidationError as error:
        return LineError("invalid_line", f"Line {number} is not a batch request: {error}", number)
    except UNREADABLE as error:
        return LineError("invalid_json_line", f"Line {number} is not JSON: {error}", number)
    except InvalidRequest as error:
        return LineError("invalid_line", f"Line {number}: {error.message}", number, error.param)
    seen.add(line.custom_id)
    return None


def _unusable(cause: str) -> StartupError:
    return StartupError(cause, "--files DIR, a directory of its own that this user can write")
