"""The ledger's real thread: order, being told on the loop, and the end."""

import asyncio
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.clock import Clock
from server.config import ServerConfig
from server.gate.tenants import Limits, Tenant
from server.ledger.journal import (
    DURABLE_S,
    FEW_WRITES,
    CommitPace,
    Item,
    LedgerThread,
    Written,
    open_journal,
    tell_batch,
)
from server.ledger.store import LedgerStore, Reserve, RowState, Settle, Write
from server.process import open_ledger
from tests.server.test_ledger_journal import row, settled


def states(path: Path) -> dict[str, RowState]:
    store = LedgerStore(path)
    found = {one.request_id: one.state for one in store.rows()}
    store.close()
    return found


async def test_each_is_told_on_the_loop_in_order_once_it_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    told: list[tuple[int, bool, int]] = []
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    writer = LedgerThread(open_journal(path, 10), loop)

    def tell(number: int, is_durable: bool) -> None:
        told.append((number, is_durable, threading.get_ident()))
        if len(told) == 1:
            assert states(path)["r0"] is RowState.RESERVED
        if number == 49:
            done.set_result(None)

    for number in range(50):
        writer.submit(Reserve(row(f"r{number}")), lambda is_durable, _, number=number: tell(number, is_durable))
    await done
    writer.close()
    assert told == [(number, True, threading.get_ident()) for number in range(50)]


async def test_what_has_been_told_is_not_held(tmp_path: Path) -> None:
    """While the thread waits for the next write: outcomes refer to requests, and those to what they ran with."""
    told = asyncio.Event()

    def tell(is_durable: bool, written: Written) -> None:
        told.set()

    ref = weakref.ref(tell)
    writer = LedgerThread(open_journal(tmp_path / "ledger.db", 10), asyncio.get_running_loop())
    writer.submit(Reserve(row("r0")), tell)
    del tell
    await told.wait()
    async with asyncio.timeout(10):
        while ref() is not None:  # its thread may still checkpoint
            await asyncio.sleep(0)
    writer.close()


def test_one_that_cannot_be_told_keeps_word_from_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def tell(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError
        told.append(number)

    batch: list[Item] = [(Reserve(row(f"r{i}")), lambda is_durable, _, i=i: tell(i)) for i in range(4)]
    tell_batch(batch, Written([True] * 4, None))
    assert told == [0, 2, 3]
    assert "ZeroDivisionError" in caplog.text


def latencies_s(took_s: Sequence[float]) -> list[float]:
    """Of writes that come right after each commit has begun, until the next, which takes so long, has ended."""
    pace, began_s, now_s, found = CommitPace(), 0.0, 0.0, []
    for took in took_s:
        next_s = now_s + pace.wait_s(now_s)
        now_s = next_s + took
        found.append(now_s - began_s)
        pace.note(next_s, now_s, FEW_WRITES + 1)
        began_s = next_s
    return found


def test_what_comes_as_a_commit_begins_is_durable_in_time_though_one_in_a_hundred_is_slow() -> None:
    found = latencies_s([0.002 if i % 100 == 50 else 0.0005 for i in range(1000)])
    assert found[0] == 0.0005  # nobody waits for others where none came
    late = [latency for latency in found[51:] if latency > DURABLE_S + 0.0005]
    assert not late
    assert min(found[51:]) > DURABLE_S / 2  # they gather still


def test_commits_gather_writes_again_after_the_disk_has_hung() -> None:
    found = latencies_s([0.0005, 0.5, *[0.0005] * 1000])
    assert all(latency >= DURABLE_S / 2 for latency in found[3:])
    assert found[-1] > 0.9 * DURABLE_S


def test_few_writes_wait_for_no_others() -> None:
    pace = CommitPace()
    for i in range(100):
        assert pace.wait_s(i * 0.003) == 0
        pace.note(i * 0.003, i * 0.003 + 0.0005, 1)
    for i in range(50):  # as soon as the last is over: at some 2,000 in a second they gather
        pace.note(1 + i * 0.0005, 1.0002 + i * 0.0005, 1)
    assert pace.wait_s(1.025) > DURABLE_S / 2


async def test_close_writes_what_was_submitted_and_lets_the_next_server_in(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    writer = LedgerThread(open_journal(path, 10), asyncio.get_running_loop())
    for number in range(20):
        writer.submit(settled(f"r{number}"), lambda is_durable, written: None)
    writer.close()
    open_journal(path, 10).close()
    assert set(states(path).values()) == {RowState.SETTLED}
    assert len(states(path)) == 20


async def test_fault_of_ours_is_told_and_the_thread_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.db"
    journal = open_journal(path, 10)
    write = journal.write

    def fail_once(writes: Sequence[Write]) -> Written:
        monkeypatch.setattr(journal, "write", write)
        raise ZeroDivisionError

    monkeypatch.setattr(journal, "write", fail_once)
    writer = LedgerThread(journal, asyncio.get_running_loop())

    async def ask(write: Settle) -> tuple[bool, str | None]:
        told: asyncio.Future[tuple[bool, str | None]] = asyncio.get_running_loop().create_future()
        writer.submit(write, lambda is_durable, written: told.set_result((is_durable, written.fault)))
        return await told

    assert await ask(settled("a")) == (False, "ZeroDivisionError: ")
    assert await ask(settled("b")) == (True, None)
    writer.close()
    assert states(path).keys() == {"b"}


async def test_outcomes_do_not_wait_for_the_tidying_after_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, journal = threading.Event(), open_journal(tmp_path / "ledger.db", 10)
    monkeypatch.setattr(journal, "tidy", lambda: may_end.wait(30))
    writer = LedgerThread(journal, asyncio.get_running_loop())
    told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    writer.submit(settled("a"), lambda is_durable, written: told.set_result(is_durable))
    assert await told
    assert not may_end.is_set()
    may_end.set()
    writer.close()


def test_without_a_ledger_limits_of_days_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(lambda: 0.0, lambda: 0.0)
    loop = asyncio.new_event_loop()
    assert open_ledger(ServerConfig(), clock, loop).ledger is None
    assert caplog.text == ""
    bounded = (Tenant(name="acme", key_limits=Limits(tokens_per_day=5)),)
    assert open_ledger(ServerConfig(tenants=bounded), clock, loop).used == {}
    assert "--ledger" in caplog.text
    loop.close()
