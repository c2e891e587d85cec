"""Database and spill file: a full disk, a lock that someone holds, and what the next server finds."""

import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.errors import ExitCode, StartupError
from server.ledger.journal import RECORD_BYTES, ROOM_AFTER_FULL_BYTES, Disk, Journal, Spill, open_journal
from server.ledger.store import (
    CHECKPOINT_WRITES,
    PRUNED_ROWS,
    Amend,
    Checkpoint,
    Keep,
    LedgerRow,
    LedgerStore,
    Probe,
    Prune,
    Reserve,
    RowState,
    Settle,
    StoredAnswer,
    Write,
)

NUM_RECORDS = 8


def row(name: str = "a", **fields: object) -> LedgerRow:
    plain = LedgerRow(
        request_id=name,
        client_id=None,
        tenant="acme",
        key_id="sl-1",
        model="m",
        path="/v1/completions",
        created_us=1,
        updated_us=1,
        reserved_tokens=500,
    )
    return msgspec.structs.replace(plain, **fields)


def settled(name: str = "a", **fields: object) -> Settle:
    return Settle(row(name, **{"state": RowState.SETTLED, "completion_tokens": 7, "updated_us": 9} | fields))


def checkpoint(updated_us: int, num_tokens: int) -> Checkpoint:
    """Of "a"."""
    counts = {"prompt_tokens": 20, "cached_tokens": 16, "completion_tokens": num_tokens, "price_micro": 8 + num_tokens}
    return Checkpoint((row(updated_us=updated_us, counted_tokens=20 + num_tokens, **counts),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = open_journal(path, NUM_RECORDS)
    yield journal
    journal.close()


def rows(path: Path) -> dict[str, LedgerRow]:
    store = LedgerStore(path)
    found = store.rows()
    store.close()
    assert len({one.request_id for one in found}) == len(found)
    return {one.request_id: one for one in found}


def spilled(path: Path) -> bytes:
    """What the spill file has, without the room that is free."""
    return (path.parent / f"{path.name}-spill").read_bytes().rstrip(b"\0")


@pytest.fixture
def lock(path: Path, journal: Journal) -> Iterator[sqlite3.Connection]:
    """Someone else's, who writes for a long time."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def test_commits_leave_the_log_to_the_tidying_after_them(path: Path, journal: Journal) -> None:
    def write_many(prefix: str) -> None:
        for i in range(CHECKPOINT_WRITES // 4):
            journal.write([Reserve(row(f"{prefix}{i}-{part}", path="x" * 400)) for part in range(4)])

    journal.tidy()
    size_bytes, log = path.stat().st_size, path.with_name(path.name + "-wal")
    write_many("a")
    log_bytes = log.stat().st_size
    assert path.stat().st_size == size_bytes
    assert log_bytes > 2**20
    journal.tidy()
    assert path.stat().st_size > size_bytes
    journal.write([settled("a0-0")])
    write_many("b")
    assert log.stat().st_size < 1.5 * log_bytes  # it has begun anew


def test_log_of_large_answers_is_bounded(path: Path, journal: Journal) -> None:
    for i in range(CHECKPOINT_WRITES // 50):
        answer = StoredAnswer(
            tenant="acme", key=f"k{i}", request_id=f"r{i}", digest=b"d", stored_us=1, status=200, headers=(),
            body=b"x" * 2**20,
        )  # fmt: skip
        journal.write([Keep(answer)])
        journal.tidy()
    assert path.with_name(path.name + "-wal").stat().st_size < 16 * 2**20


def test_orphan_closes_at_its_last_checkpoint_and_not_at_its_reservation(path: Path) -> None:
    journal = open_journal(path, NUM_RECORDS)
    journal.write([Reserve(row("a")), Reserve(row("b"))])
    journal.write([checkpoint(5, 3)])
    journal.write([checkpoint(6, 4)])
    journal.close()
    open_journal(path, NUM_RECORDS).close()
    found = rows(path)
    a, b = found["a"], found["b"]
    assert (a.state, a.prompt_tokens, a.completion_tokens, a.counted_tokens) == (RowState.ABORTED, 20, 4, 24)
    assert (a.cached_tokens, a.price_micro, a.updated_us) == (16, 12, 6)
    assert (b.state, b.prompt_tokens, b.completion_tokens, b.price_micro) == (RowState.ABORTED, 0, 0, 0)


def test_what_is_settled_stays_as_it_is(path: Path, journal: Journal) -> None:
    journal.write([Reserve(row()), settled()])
    journal.write([settled(completion_tokens=8), checkpoint(5, 3)])
    assert rows(path) == {"a": settled().row}


def test_what_was_told_otherwise_is_amended_and_billed_as_before(path: Path, journal: Journal) -> None:
    journal.write([settled(status=200, price_micro=3), Reserve(row("b"))])
    late: dict[str, Any] = {"status": 504, "error_code": "deadline_exceeded", "price_micro": 9}
    journal.write([Amend(settled(**late).row), Amend(settled("b", **late).row)])
    a = settled(status=504, error_code="deadline_exceeded", price_micro=3).row
    assert rows(path) == {"a": a, "b": row("b")}


@pytest.mark.parametrize("bad", [Reserve(row("a")), settled("c", device_us=2**70)])
def test_write_that_no_database_takes_fails_alone(path: Path, journal: Journal, bad: Write) -> None:
    journal.write([Reserve(row("a"))])
    written = journal.write([Reserve(row("b")), bad, settled("b")])
    assert written[:3] == ([True, False, True], None, False)
    assert rows(path).keys() == {"a", "b"}


def test_while_someone_holds_the_lock_settlements_are_spilled(
    path: Path, journal: Journal, lock: sqlite3.Connection
) -> None:
    written = journal.write([Reserve(row("a")), settled("b")])
    assert written.are_durable == [False, True]
    assert "locked" in str(written.fault)
    assert journal.write([settled("c")]).are_durable == [True]
    assert journal.write([Probe()]).fault is not None
    lock.execute("ROLLBACK")
    assert spilled(path)
    assert journal.write([Probe()])[:3] == ([True], None, False)
    assert rows(path).keys() == {"b", "c"}
    assert spilled(path) == b""
    assert journal.write([Reserve(row("d"))]).are_durable == [True]


def test_full_disk_is_no_end_of_what_runs(path: Path, journal: Journal) -> None:
    journal.write([Reserve(row(f"r{i}")) for i in range(4)])
    store = journal.store._database
    num_pages = next(iter(store.execute("PRAGMA page_count")))[0]
    store.execute(f"PRAGMA max_page_count = {num_pages}")
    written = journal.write([Reserve(row(f"more{i}", path="x" * 500)) for i in range(100)])
    assert set(written.are_durable) == {False}
    assert "full" in str(written.fault)
    assert journal.write([settled(f"r{i}", stages_ms="y" * 1000) for i in range(4)]).are_durable == [True] * 4
    store.execute(f"PRAGMA max_page_count = {num_pages + 1000}")
    assert journal.write([Probe()]).fault is None
    assert [one.state for one in rows(path).values()] == [RowState.SETTLED] * 4


def test_disk_that_was_full_is_trusted_once_it_has_room_for_more_than_a_probe(
    path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = journal.store._database
    num_pages = next(iter(store.execute("PRAGMA page_count")))[0]
    store.execute(f"PRAGMA max_page_count = {num_pages}")
    assert "full" in str(journal.write([Reserve(row(f"r{i}", path="x" * 500)) for i in range(100)]).fault)
    store.execute(f"PRAGMA max_page_count = {num_pages + 1000}")
    free_bytes = ROOM_AFTER_FULL_BYTES - 1
    monkeypatch.setattr(Journal, "disk", lambda _: Disk(free_bytes, 100 * ROOM_AFTER_FULL_BYTES))
    assert "full" in str(journal.write([Probe()]).fault)
    assert journal.write([settled("a")]).are_durable == [True]  # what runs is spilled
    free_bytes += 1
    assert journal.write([Probe()]).fault is None
    assert rows(path).keys() == {"a"}


def test_next_server_puts_down_what_was_spilled_once(path: Path) -> None:
    journal = open_journal(path, NUM_RECORDS)
    journal.write([Reserve(row("a")), Reserve(row("b"))])
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    journal.write([settled("a")])
    lock.close()
    content = spilled(path)
    journal.close()
    open_journal(path, NUM_RECORDS).close()
    assert {name: one.state for name, one in rows(path).items()} == {"a": RowState.SETTLED, "b": RowState.ABORTED}
    spill = path.parent / f"{path.name}-spill"
    spill.write_bytes(content.ljust(spill.stat().st_size, b"\0"))  # killed before the journal was cleared
    before = rows(path)
    open_journal(path, NUM_RECORDS).close()
    assert rows(path) == before
    assert spilled(path) == b""


def test_torn_spill_record_ends_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    spill = Spill(path, NUM_RECORDS)
    spill.append([row("a"), row("b")])
    spill.close()
    content = bytearray(path.read_bytes())
    end = len(content.rstrip(b"\0"))
    for cut in range(end - 100, end):
        path.write_bytes(content[:cut].ljust(len(content), b"\0"))
        spill = Spill(path, NUM_RECORDS)
        assert [one.request_id for one in spill.rows] == ["a"]
        spill.append([row("c")])
        spill.close()
        spill = Spill(path, NUM_RECORDS)
        assert [one.request_id for one in spill.rows] == ["a", "c"]
        spill.close()


def test_spill_has_its_room_from_the_start_and_takes_no_more(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill", NUM_RECORDS)
    assert (tmp_path / "spill").stat().st_blocks * 512 >= NUM_RECORDS * RECORD_BYTES
    spill.append([row(str(i), stages_ms="x" * 1500) for i in range(NUM_RECORDS)])
    with pytest.raises(OSError, match="full"):
        spill.append([row("more", stages_ms="x" * 1500)] * 3)
    assert len(spill.rows) == NUM_RECORDS
    spill.clear()
    spill.append([row("more")])
    assert [one.request_id for one in spill.rows] == ["more"]
    spill.close()


def test_settlement_that_neither_takes_is_not_acknowledged(journal: Journal, lock: sqlite3.Connection) -> None:
    large = [settled(str(i), stages_ms="x" * 2 * RECORD_BYTES) for i in range(NUM_RECORDS)]
    written = journal.write(large)
    assert set(written.are_durable) == {False}
    assert "full" in str(written.fault)


def with_second_server(path: Path) -> Journal:
    return open_journal(path, NUM_RECORDS)


def with_lock(path: Path) -> sqlite3.Connection:
    open_journal(path, NUM_RECORDS).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    return holder


def with_damage(path: Path) -> None:
    open_journal(path, NUM_RECORDS).close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + os.urandom(len(content) - 4096))  # the header is whole: it is a database


def with_sql(path: Path, sql: str) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute(sql)
    return database


def of_another_version(path: Path) -> sqlite3.Connection:
    open_journal(path, NUM_RECORDS).close()
    return with_sql(path, "PRAGMA user_version = 7")


@pytest.mark.parametrize(
    ("arrange", "cause", "fix", "exit_code"),
    [
        (with_second_server, "another server writes to the ledger {0}", "--ledger FILE", ExitCode.TRANSIENT),
        (with_lock, "the ledger {0} cannot be opened: database is locked", "fuser", ExitCode.TRANSIENT),
        (with_damage, "{0} is damaged", "docs/ledger.md, Restoring a backup", ExitCode.CONFIGURATION),
        (of_another_version, "{0} is a ledger of version 7", "--ledger FILE", ExitCode.CONFIGURATION),
        (Path.mkdir, "{0} is damaged, or not a ledger", "--ledger FILE", ExitCode.CONFIGURATION),
        (lambda path: path.write_bytes(b"no database" * 99), "not a ledger", "--ledger FILE", ExitCode.CONFIGURATION),
        (lambda path: with_sql(path, "CREATE TABLE a (x)"), "not a ledger", "--ledger FILE", ExitCode.CONFIGURATION),
    ],
)
def test_what_cannot_be_opened_is_told_and_left_alone(
    path: Path, arrange: Callable[[Path], Any], cause: str, fix: str, exit_code: ExitCode
) -> None:
    arranged = arrange(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StartupError, match=cause.format(path)) as raised:
        open_journal(path, NUM_RECORDS)
    assert fix in raised.value.fix
    assert raised.value.exit_code == exit_code
    assert before == (path.read_bytes() if path.is_file() else None)
    if arranged is not None and not isinstance(arranged, int):
        arranged.close()


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be opened") as raised:
        open_journal(tmp_path / "file" / "ledger.db", NUM_RECORDS)
    assert str(tmp_path / "file") in raised.value.fix


def test_missing_directories_are_made_and_others_have_no_business_in_them(tmp_path: Path) -> None:
    open_journal(tmp_path / "a" / "b" / "ledger.db", NUM_RECORDS).close()
    assert [(tmp_path / name).stat().st_mode & 0o027 for name in ("a", "a/b")] == [0, 0]


def test_backup_put_beside_the_old_spill_journal_gets_its_settlements(path: Path) -> None:
    journal = open_journal(path, NUM_RECORDS)
    lock = sqlite3.connect(path, isolation_level=None)
    journal.write([Reserve(row())])
    backup = sqlite3.connect(path.with_name("backup"))
    lock.backup(backup)
    backup.close()
    lock.execute("BEGIN IMMEDIATE")
    assert journal.write([settled(), settled("b")]).are_durable == [True, True]
    lock.close()
    journal.close()
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):  # as docs/ledger.md says
        path.with_name(name).unlink(missing_ok=True)
    path.with_name("backup").rename(path)
    open_journal(path, NUM_RECORDS).close()
    assert rows(path) == {"a": settled().row, "b": settled("b").row}
    assert spilled(path) == b""


def test_old_requests_are_deleted_in_small_batches_and_running_ones_kept(path: Path, journal: Journal) -> None:
    journal.write([Reserve(row("running", updated_us=1))])
    journal.write([settled(f"old{i}", updated_us=i) for i in range(PRUNED_ROWS + 10)])
    journal.write([settled("new", updated_us=10_000)])
    assert journal.write([Prune(5_000)]).has_more
    assert len(rows(path)) == 12
    assert not journal.write([Prune(5_000)]).has_more
    assert rows(path).keys() == {"running", "new"}
