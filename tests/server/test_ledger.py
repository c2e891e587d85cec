"""The ledger through the whole server: what is written when, and what waits for it."""

from pathlib import Path
from typing import Any

import pytest

from server.ledger_records import LedgerRow, State
from server.ledger_store import LedgerStore
from server.prices import ModelPrice, Prices
from tests.server.simulated_server import MODEL, STREAM, SimulatedServer, answers, chat

PRICES = Prices(((MODEL, ModelPrice(prompt=2_000_000, cached=500_000, completion=10_000_000)),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def rows(path: Path) -> list[LedgerRow]:
    """What the file has, as another process would read it."""
    store = LedgerStore(path)
    try:
        return store.rows()
    finally:
        store.close()


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_row_says_whose_it_was_what_it_took_and_what_it_cost(path: Path, fields: dict[str, Any]) -> None:
    server = SimulatedServer(ledger=path, prices=PRICES, keys=("secret",))
    head = ("Authorization: Bearer secret", "X-Request-Id: theirs")
    data = chat(**fields).replace(b"Host: a", b"Host: a\r\n" + "\r\n".join(head).encode())
    answer = server.ask(data)
    server.close()
    (row,) = rows(path)
    usage = answer.usage
    assert (row.prompt_tokens, row.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert row.price_micro == 2 * row.prompt_tokens + 10 * row.completion_tokens
    assert (row.request_id, row.client_id, row.tenant, row.model) == ("r1", "theirs", "local", MODEL)
    assert (row.path, row.finish_reason, row.status, row.state) == (
        "/v1/chat/completions",
        "length",
        200,
        State.SETTLED,
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
    server = SimulatedServer(ledger=path)
    assert server.ledger_writer is not None
    transport = server.send(chat(**fields))
    server.run_for(0.02)  # reserved; the first token has come
    server.ledger_writer.is_stuck = True
    server.run_for(10.0)
    assert not any(answer.is_complete for answer in answers(bytes(transport.received)))
    assert [row.state for row in rows(path)] == [State.RESERVED]
    server.ledger_writer.is_stuck = False
    server.ledger_writer.commit()
    assert [row.state for row in rows(path)] == [State.SETTLED]
    server.run()
    (answer,) = answers(bytes(transport.received))
    assert answer.is_complete
    assert answer.usage["completion_tokens"] == 12
    server.close()
