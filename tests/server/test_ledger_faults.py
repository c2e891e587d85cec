"""A ledger that takes no writes, or hangs: who is refused, who pays, what is told when, and what is made up for."""

import gc
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.gate.tenants import Limits
from server.ledger.ledger import HEARTBEAT_S, PROBE_S, STUCK_S
from server.ledger.store import LedgerRow, RowState
from server.observing.metrics import TenantCounts
from tests.server.inline_ledger import InlineWriter, rows
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    Answer,
    SimulatedServer,
    answers,
    as_caller,
    chat,
    keyed_tenant,
    request,
    serving,
)
from tests.server.test_generation import generations_alive
from tests.server.test_ledger import stream_until_first_byte
from tests.server.test_metrics import samples_of

ACME = keyed_tenant("acme", limits=Limits(tokens_per_day=1000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Someone else's."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


def test_what_could_not_be_written_is_free_without_the_garbage_collector(path: Path, lock: sqlite3.Connection) -> None:
    with serving(ledger=path) as server:
        gc.collect()
        gc.disable()
        try:
            others = set(map(id, generations_alive()))  # of servers that other tests of this process have left
            running = stream_until_first_byte(server)
            lock.execute("BEGIN IMMEDIATE")
            assert server.ask(chat()).status == 503  # its reservation fails, and the settlement of the other is spilled
            server.run()
            assert answers(bytes(running.received))[0].events[-1] == "[DONE]"
            assert [one for one in generations_alive() if id(one) not in others] == []
        finally:
            gc.enable()


def test_while_nothing_can_be_written_requests_are_refused_before_work(path: Path, lock: sqlite3.Connection) -> None:
    with serving(ledger=path) as server:
        running = stream_until_first_byte(server)
        lock.execute("BEGIN IMMEDIATE")
        first = server.ask(chat())  # it is the one that finds out
        assert (first.status, first.json["error"]["code"]) == (503, "ledger_unavailable")
        assert first.headers["retry-after"] == "1"
        num_submitted = len(server.posted)
        second = server.ask(chat())
        assert (second.status, second.json["error"]["code"]) == (503, "ledger_unavailable")
        assert len(server.posted) == num_submitted
        server.run()
        (answer,) = answers(bytes(running.received))
        assert answer.events[-1] == "[DONE]"  # what ran is settled all the same
        assert [row.state for row in rows(path)] == [RowState.RESERVED]
        ready = server.ask(request("GET", "/ready"), "GET")
        assert (ready.status, ready.json["error"]["code"]) == (503, "ledger_unavailable")
        assert "locked" in ready.json["error"]["message"]
        assert server.ask(request("GET", "/health"), "GET").status == 200
        lock.execute("ROLLBACK")
        server.run_for(2 * PROBE_S)
        assert server.ask(request("GET", "/ready"), "GET").status == 200
        assert server.ask(chat()).status == 200
        samples = samples_of(server.ask(request("GET", "/metrics"), "GET").body)
        promised = {name.split("{")[0]: value for name, value in samples.items() if 'slo="error_rate"' in name}
        assert promised == {"steploop_slo_value": 2 / 4}  # by our fault: those that were refused
        assert samples[f'steploop_requests_refused_total{{model_name="{MODEL}",reason="ledger_unavailable"}}'] == 1
        assert samples[f'steploop_requests_failed_total{{model_name="{MODEL}",reason="ledger_unavailable"}}'] == 1
    found = {row.request_id: row for row in rows(path)}
    assert (found["r1"].state, found["r1"].completion_tokens) == (RowState.SETTLED, 60)
    assert found.keys() == {"r1", "r7"}  # what was refused leaves no row


def test_fault_is_known_before_a_request_meets_it(path: Path, lock: sqlite3.Connection) -> None:
    with serving(ledger=path) as server:
        ledger = server.generations.ledger
        assert ledger is not None
        ledger.start()
        server.run_for(HEARTBEAT_S + 1)
        assert ledger.commit_age_s < HEARTBEAT_S
        assert ledger.disk is not None
        assert 0 < ledger.disk.free_bytes <= ledger.disk.size_bytes
        lock.execute("BEGIN IMMEDIATE")
        server.run_for(HEARTBEAT_S + 1)
        assert server.ask(request("GET", "/ready"), "GET").status == 503
        lock.execute("ROLLBACK")
        server.run_for(2 * PROBE_S)
        assert server.ask(request("GET", "/ready"), "GET").status == 200


def test_while_the_disk_hangs_requests_are_refused_before_work(path: Path) -> None:
    with serving(ledger=path) as server:
        assert server.ledger_writer is not None
        server.ledger_writer.is_stuck = True
        waiting = server.send(chat())
        server.run_for(STUCK_S + 1)
        num_submitted = len(server.posted)
        refused = server.send(chat())
        assert answers(bytes(refused.received))[0].json["error"]["code"] == "ledger_unavailable"
        assert len(server.posted) == num_submitted
        server.ledger_writer.is_stuck = False
        server.ledger_writer.commit()
        server.run()
        assert answers(bytes(waiting.received))[0].status == 200
        assert server.ask(chat()).status == 200


def writer_of(server: SimulatedServer) -> InlineWriter:
    assert server.ledger_writer is not None
    return server.ledger_writer


def hang(server: SimulatedServer) -> None:
    writer_of(server).is_stuck = True


def go_on(server: SimulatedServer) -> None:
    writer_of(server).is_stuck = False
    writer_of(server).commit()
    server.run()


def told(received: bytearray) -> Answer:
    (answer,) = answers(bytes(received))
    return answer


def the_row(path: Path) -> LedgerRow:
    (row,) = rows(path)
    return row


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("is_computed_before", [False, True])
def test_who_is_refused_because_nothing_can_be_written_pays_nothing(
    path: Path, lock: sqlite3.Connection, fields: dict[str, Any], is_computed_before: bool
) -> None:
    tenant = msgspec.structs.replace(ACME, limits=Limits(tokens_per_day=1000, requests_per_minute=3))
    with serving(ledger=path, tenants=(tenant,)) as server:
        if is_computed_before:
            hang(server)
        lock.execute("BEGIN IMMEDIATE")
        transport = server.send(as_caller(chat(**fields), "acme"))
        server.run()
        assert server.stats.num_generated_tokens or not is_computed_before
        go_on(server)
        refused = told(transport.received)
        assert (refused.status, refused.json["error"]["code"]) == (503, "ledger_unavailable")
        assert refused.headers["x-ratelimit-remaining-requests"] == "3"
        (account,) = [one for one in server.gate.quotas.accounts if one.tokens]
        assert account.tokens[0].available(server.gate.quotas._clock()) == 1000
        counts = server.metrics.tenants.get("acme", TenantCounts())
        assert (counts.num_prompt_tokens, counts.num_completion_tokens, server.metrics.finished.total()) == (0, 0, 0)
        lock.execute("ROLLBACK")
        server.run_for(2 * PROBE_S)
    assert rows(path) == []


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("deadlines", [{"ttft_ms": 1000}, {"total_ms": 1000}])
def test_deadlines_hold_while_the_reservation_hangs(
    path: Path, fields: dict[str, Any], deadlines: dict[str, int]
) -> None:
    with serving(ledger=path) as server:
        hang(server)
        transport = server.send(chat(deadlines=deadlines, **fields))
        server.run_for(0.9)
        assert server.stats.num_generated_tokens == 12
        assert not transport.received
        server.run_for(0.2)
        late = told(transport.received)
        assert (late.status, late.json["error"]["code"], late.is_complete) == (504, "deadline_exceeded", True)
        assert not server.generations.active
        go_on(server)
    row = the_row(path)
    assert (row.state, row.status, row.error_code) == (RowState.SETTLED, 504, "deadline_exceeded")
    assert row.completion_tokens == 12


def test_what_was_withheld_in_time_has_its_gaps_watched_from_then_on(path: Path) -> None:
    with serving(ledger=path) as server:
        hang(server)
        transport = server.send(chat(deadlines={"ttft_ms": 1000, "inter_token_ms": 500}, **STREAM))
        server.step()
        server.step()  # its first token
        writer_of(server).is_stuck = False
        writer_of(server).commit()
        server.loop.advance(0.4)
        assert not told(transport.received).is_complete
        server.loop.advance(0.2)  # the engine is not stepped
        server.run()
        assert "next token" in told(transport.received).events[-1]["error"]["message"]


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("is_spilled", [False, True])
def test_deadline_holds_while_the_settlement_hangs_and_its_row_tells_it(
    path: Path, lock: sqlite3.Connection, fields: dict[str, Any], is_spilled: bool
) -> None:
    with serving(ledger=path) as server:
        transport = server.send(chat(deadlines={"total_ms": 1000}, **fields))
        server.run_for(0.02)
        assert the_row(path).state is RowState.RESERVED
        hang(server)
        server.run_for(1.1)
        late = told(transport.received)
        error = late.events[-1]["error"] if fields else late.json["error"]
        assert (late.is_complete, error["code"]) == (True, "deadline_exceeded")
        assert not server.generations.active
        if is_spilled:
            lock.execute("BEGIN IMMEDIATE")
        go_on(server)
        if is_spilled:
            lock.execute("ROLLBACK")
        server.run_for(2 * PROBE_S)
    row = the_row(path)
    assert (row.state, row.status, row.error_code) == (RowState.SETTLED, 504, "deadline_exceeded")
    assert row.completion_tokens == 12


def test_client_that_goes_while_its_settlement_hangs_is_not_waited_for(path: Path) -> None:
    with serving(ledger=path) as server:
        transport = stream_until_first_byte(server, max_tokens=12)
        hang(server)
        server.run_for(1.0)
        transport.feed_eof()
        server.loop.settle()
        assert not server.generations.active
        go_on(server)
    row = the_row(path)
    assert (row.state, row.status, row.completion_tokens) == (RowState.SETTLED, 499, 12)


def ended_in_a_fault(path: Path, lock: sqlite3.Connection) -> tuple[SimulatedServer, bytes, Answer]:
    """A server whose database takes no writes since an answer was in progress; that one's request, and the answer."""
    server = SimulatedServer(ledger=path, tenants=(ACME,))
    asked = as_caller(chat(**STREAM), "acme", "Idempotency-Key: once")
    transport = server.send(asked)
    server.run_until(lambda: bool(transport.received))
    lock.execute("BEGIN IMMEDIATE")
    server.run()
    answer = told(transport.received)
    assert answer.events[-1] == "[DONE]"
    return server, asked, answer


@pytest.mark.parametrize("wait_s", [0.0, 2 * PROBE_S])
def test_answer_given_while_nothing_can_be_written_is_kept_once_it_can(
    path: Path, lock: sqlite3.Connection, wait_s: float
) -> None:
    server, asked, said = ended_in_a_fault(path, lock)
    lock.execute("ROLLBACK")
    server.run_for(wait_s)  # 0: nothing has been tried again when the server ends
    server.close()
    with serving(ledger=path, tenants=(ACME,), first_id=10) as after:
        again = after.ask(asked)
        assert (again.headers["idempotent-replayed"], again.body) == ("true", said.body)
    assert [row.request_id for row in rows(path)] == ["r1"]


def test_answer_that_is_written_is_not_written_again(path: Path, lock: sqlite3.Connection) -> None:
    server, *_ = ended_in_a_fault(path, lock)
    lock.execute("ROLLBACK")
    server.run_for(2 * PROBE_S)
    assert server.generations.ledger is not None
    assert not server.generations.ledger.unkept
    server.close()
