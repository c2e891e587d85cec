"""The ledger through the whole server: what is written when, and what waits for it."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.simulation import CostModel
from core.types import Cost, FinishReason, Usage
from server.gate.quota import Moment
from server.gate.tenants import Limits, Tenant
from server.ledger.ledger import CHECKPOINT_S, PRUNE_S, End, Ledger
from server.ledger.store import PRUNED_ROWS, Checkpoint, LedgerRow, Prune, RowState
from server.ledger.usage import ModelPrice, Prices
from tests.server.fakes import MemoryTransport
from tests.server.inline_ledger import COMMIT_S, InlineWriter, rows
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    UNIX_S,
    Answer,
    SimulatedServer,
    answers,
    as_caller,
    chat,
    completion,
    keyed_tenant,
    serving,
    with_lines,
)
from tests.server.virtual_loop import VirtualTimeLoop

PRICES = Prices(((MODEL, ModelPrice(prompt=2_000_000, cached=500_000, completion=10_000_000)),))


def row_of(request_id: str) -> LedgerRow:
    return LedgerRow(request_id, None, "local", None, MODEL, "/v1/completions")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_row_says_whose_it_was_what_it_took_and_what_it_cost(path: Path, fields: dict[str, Any]) -> None:
    with serving(ledger=path, prices=PRICES, keys=("secret",)) as server:
        head = ("Authorization: Bearer secret", "X-Request-Id: theirs")
        answer = server.ask(with_lines(chat(**fields), *head))
    (row,) = rows(path)
    usage = answer.usage
    assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row.price_micro == 2 * row.prompt_tokens + 10 * row.completion_tokens
    assert (row.request_id, row.client_id, row.tenant, row.model) == ("r1", "theirs", "local", MODEL)
    assert (row.path, row.finish_reason, row.status, row.state) == (
        "/v1/chat/completions",
        "length",
        200,
        RowState.SETTLED,
    )
    assert row.key_id is not None
    assert row.device_us > 0
    assert row.kv_block_us > 0


def test_no_byte_goes_out_before_the_request_is_in_the_ledger(path: Path) -> None:
    server = SimulatedServer(ledger=path)
    assert server.ledger_writer is not None
    server.ledger_writer.is_stuck = True
    transport = server.send(chat(**STREAM))
    server.run_for(10.0)
    assert transport.received == b""
    assert rows(path) == []
    server.ledger_writer.is_stuck = False
    server.ledger_writer.commit()
    server.run()
    (answer,) = answers(bytes(transport.received))
    assert answer.finish_reason() == "length"
    server.close()
    plain = SimulatedServer()
    assert answer.text() == plain.ask(chat(**STREAM)).text()
    plain.close()


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_end_waits_until_it_is_settled(path: Path, fields: dict[str, Any]) -> None:
    with serving(ledger=path) as server:
        assert server.ledger_writer is not None
        transport = server.send(chat(**fields))
        server.run_for(0.02)  # reserved; the first token has come
        server.ledger_writer.is_stuck = True
        server.run_for(10.0)
        assert not any(answer.is_complete for answer in answers(bytes(transport.received)))
        assert [row.state for row in rows(path)] == [RowState.RESERVED]
        server.ledger_writer.is_stuck = False
        server.ledger_writer.commit()
        assert [row.state for row in rows(path)] == [RowState.SETTLED]
        server.run()
        (answer,) = answers(bytes(transport.received))
        assert answer.is_complete
        assert answer.usage["completion_tokens"] == 12


def stream_until_first_byte(server: SimulatedServer, **fields: Any) -> MemoryTransport:
    transport = server.send(chat(**{**STREAM, "max_tokens": 60} | fields))
    server.run_until(lambda: bool(transport.received))
    return transport


def leave(server: SimulatedServer, transport: MemoryTransport) -> None:
    transport.feed_eof()


def cancel(server: SimulatedServer, transport: MemoryTransport) -> None:
    assert server.generations.cancel("r1", "local")


def crash(server: SimulatedServer, transport: MemoryTransport) -> None:
    server.shut_engine_down(FinishReason.ERROR, "It broke.")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (leave, (499, "cancelled", None)),
        (cancel, (499, "cancelled", "request_cancelled")),
        (crash, (500, "error", "engine_error")),
    ],
)
def test_stream_that_is_broken_off_is_billed_for_what_was_said(
    path: Path, end: Callable[[SimulatedServer, MemoryTransport], None], told: tuple[int, str, str | None]
) -> None:
    with serving(ledger=path, prices=PRICES) as server:
        end(server, stream_until_first_byte(server))
    (row,) = rows(path)
    assert row.state is RowState.SETTLED
    assert (row.status, row.finish_reason, row.error_code) == told
    assert 0 < row.completion_tokens < 60
    assert row.price_micro == 2 * row.prompt_tokens + 10 * row.completion_tokens


def test_refused_requests_leave_no_row(path: Path) -> None:
    tenants = (Tenant(name="local", limits=Limits(tokens_per_minute=20)),)
    with serving(ledger=path, tenants=tenants, keys=("k",)) as server:
        answer = server.ask(as_caller(chat(), "k"))
        assert answer.status == 429
        assert server.ask(chat(temperature=-1)).status == 401
    assert rows(path) == []


def test_running_requests_are_checkpointed_in_one_transaction(path: Path) -> None:
    slow = CostModel(fixed_s=1.0, token_s=0.0)
    with serving(ledger=path, cost=slow, prices=PRICES) as server:
        assert server.ledger_writer is not None
        for _ in range(3):
            server.send(chat(max_tokens=30, **STREAM))
        server.run_for(3 * CHECKPOINT_S + 1)
        checkpoints = [write for write in server.ledger_writer.writes if isinstance(write, Checkpoint)]
        assert [len(one.rows) for one in checkpoints] == [3, 3, 3]
        told = [row.completion_tokens for row in rows(path)]
        assert told == [one.completion_tokens for one in checkpoints[-1].rows]
        assert min(told) >= CHECKPOINT_S
        assert rows(path)[0].price_micro == 2 * rows(path)[0].prompt_tokens + 10 * told[0]
        server.run()
        server.run_for(2 * CHECKPOINT_S)
        assert (
            sum(isinstance(write, Checkpoint) for write in server.ledger_writer.writes) <= 7
        )  # none once all is quiet
    assert [row.completion_tokens for row in rows(path)] == [30, 30, 30]


def test_what_runs_at_shutdown_is_closed_where_it_is(path: Path) -> None:
    loop = VirtualTimeLoop()
    ledger = Ledger(path, InlineWriter(path, loop), PRICES, lambda: UNIX_S, loop)
    entry = ledger.open(row_of("r1"), lambda usage: usage.num_completion_tokens)
    entry.reserve(500, lambda: Usage(10, 3), lambda is_durable: None)
    ledger.close()
    loop.close()
    (row,) = rows(path)
    assert (row.state, row.status, row.error_code) == (RowState.ABORTED, 503, "shutdown")
    assert (row.prompt_tokens, row.completion_tokens, row.counted_tokens, row.price_micro) == (10, 3, 3, 50)


def test_request_whose_progress_cannot_be_told_keeps_no_other_from_its_row(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = VirtualTimeLoop()
    writer = InlineWriter(path, loop)
    ledger = Ledger(path, writer, PRICES, lambda: UNIX_S, loop)

    def progress(number: int) -> Usage:
        return Usage(10 // number, 3)

    for number in range(3):
        ledger.open(row_of(f"r{number}"), lambda usage: 3).reserve(
            500, partial(progress, number), lambda is_durable: None
        )
    for _ in range(2):
        loop.advance(CHECKPOINT_S + COMMIT_S)
        *_, checkpoint = writer.writes
        assert isinstance(checkpoint, Checkpoint)
        assert [one.request_id for one in checkpoint.rows] == ["r1", "r2"]
    ledger.close()
    loop.close()
    assert {one.request_id: one.state for one in rows(path)} == {
        "r0": RowState.RESERVED,  # the next process closes it
        "r1": RowState.ABORTED,
        "r2": RowState.ABORTED,
    }
    assert caplog.text.count("ZeroDivisionError") == 3


def test_days_pools_go_on_from_the_ledger(path: Path) -> None:
    limits = {"limits": Limits(tokens_per_day=1000), "key_limits": Limits(tokens_per_day=700)}
    tenants = (keyed_tenant("acme", "k1", "k2", cached_token_discount=50, **limits),)

    def ask(server: SimulatedServer, key: str, **fields: Any) -> Answer:
        return server.ask(as_caller(chat(**fields), key))

    def left(server: SimulatedServer) -> list[int]:
        now = Moment(0, int(UNIX_S))
        return sorted(pool.available(now) for account in server.gate.quotas.accounts for pool in account.tokens)

    first = SimulatedServer(ledger=path, tenants=tenants)
    for key in ("k1", "k1", "k2"):
        assert ask(first, key, max_tokens=40).status == 200
    left_first = left(first)
    first.close()
    second = SimulatedServer(ledger=path, tenants=tenants, first_id=10)
    ask(second, "k1", temperature=-1)
    ask(second, "k2", temperature=-1)  # both accounts are there, and nothing was used
    assert left(second) == left_first
    assert max(left_first) < 1000
    second.close()


def test_device_time_and_blocks_add_up_to_what_was_measured(path: Path) -> None:
    with serving(ledger=path) as server:
        for i in range(6):
            server.send(
                completion(prompt=[5 + i] * (3 + 7 * i), max_tokens=10 + i, n=1 + i % 2, **(STREAM if i % 2 else {}))
            )
        leaver = server.send(chat(max_tokens=100, **STREAM))
        server.run_until(lambda: bool(leaver.received))
        leaver.feed_eof()
        server.run()
        stats = server.stats
    found = rows(path)
    assert len(found) == 7
    assert sum(row.device_us for row in found) == pytest.approx(stats.device_s * 1e6, abs=len(found))
    assert sum(row.kv_block_us for row in found) == pytest.approx(stats.kv_block_s * 1e6, abs=len(found))
    assert stats.device_s > 0


@pytest.mark.parametrize("seed", range(25))
def test_every_request_is_settled_once_whatever_becomes_of_it(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with serving(ledger=path) as server:
        assert server.ledger_writer is not None
        leavers = []
        for _ in range(12):
            fields = {"max_tokens": rng.randint(1, 30), "n": rng.choice([1, 1, 2]), **rng.choice([{}, STREAM])}
            transport = server.send(rng.choice([chat, completion])(**fields))
            if rng.random() < 0.4:
                leavers.append(transport)
            server.ledger_writer.is_stuck = rng.random() < 0.3
            server.run_for(rng.random() * 0.05)
            if leavers and rng.random() < 0.5:
                leavers.pop().feed_eof()
            elif rng.random() < 0.3 and server.generations.active:
                server.generations.cancel(rng.choice(list(server.generations.active)), "local")
        server.ledger_writer.is_stuck = False
        server.ledger_writer.commit()
    found = {row.request_id: row for row in rows(path)}
    usages = {chunk.request_id: chunk.usage for step in server.delivered for chunk in step.chunks if chunk.is_terminal}
    assert found.keys() == usages.keys()
    for request_id, row in found.items():
        usage = usages[request_id]
        assert usage is not None
        assert row.state is RowState.SETTLED
        assert (row.prompt_tokens, row.cached_tokens) == (usage.num_prompt_tokens, usage.num_cached_tokens)
        assert row.completion_tokens <= usage.num_completion_tokens
        assert row.status != 200 or row.completion_tokens == usage.num_completion_tokens


def test_old_requests_are_deleted_bit_by_bit_and_every_hour(path: Path) -> None:
    loop = VirtualTimeLoop()
    writer = InlineWriter(path, loop)
    ledger = Ledger(path, writer, PRICES, lambda: UNIX_S + loop.time(), loop, keep_s=2 * PRUNE_S)
    end = End(Usage(1, 1), Cost(), "stop", 200, None, {})
    for number in range(PRUNED_ROWS + 20):
        ledger.open(row_of(str(number)), lambda usage: 0).settle(end, lambda is_durable: None)
    ledger.start()
    loop.advance(2 * PRUNE_S - 1)
    assert len(rows(path)) == PRUNED_ROWS + 20
    loop.advance(PRUNE_S)
    assert rows(path) == []
    assert sum(isinstance(write, Prune) for write in writer.writes) == 4  # at the start, each hour, and once more
    ledger.close()
    loop.close()
