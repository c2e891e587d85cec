"""Idempotency-Key: in progress, with another body, again, after a day, after a restart."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from server.config import ServerConfig
from server.gate.text_rules import TextRule
from server.ledger import idempotency
from server.ledger.idempotency import KEPT_S
from tests.server.simulated_server import (
    STREAM,
    Answer,
    SimulatedServer,
    answers,
    chat,
    completion,
    keyed_tenant,
    serving,
    with_lines,
)


def keyed(data: bytes, key: str = "k1", *lines: str) -> bytes:
    """The request, with the key."""
    return with_lines(data, f"Idempotency-Key: {key}", *lines)


def content(answer: Answer) -> Any:
    return answer.status, answer.headers["content-type"], answer.body


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("make", [chat, completion])
def test_same_request_gets_the_same_bytes_and_computes_nothing(
    server: SimulatedServer, make: Any, fields: dict[str, Any]
) -> None:
    first = server.ask(keyed(make(**fields)))
    num_generated = server.stats.num_generated_tokens
    again = server.ask(keyed(make(**fields)))
    assert content(again) == content(first)
    assert first.status == 200
    assert again.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert again.headers["openai-processing-ms"].isdigit()
    assert "validate;dur=" in again.headers["server-timing"]
    assert again.headers["cache-control"] == "no-store"
    assert server.stats.num_generated_tokens == num_generated


def test_another_body_or_path_is_refused(server: SimulatedServer) -> None:
    server.ask(keyed(chat()))
    for data in (chat(max_tokens=13), completion()):
        answer = server.ask(keyed(data))
        assert (answer.status, answer.json["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_while_it_is_in_progress_another_is_refused(server: SimulatedServer, fields: dict[str, Any]) -> None:
    transport = server.send(keyed(chat(**fields)))
    server.step()
    second = server.send(keyed(chat(**fields)))
    (refused,) = answers(bytes(second.received))
    assert (refused.status, refused.json["error"]["code"]) == (409, "idempotency_key_in_use")
    assert refused.headers["retry-after"] == "1"
    other = server.send(keyed(chat(max_tokens=13)))
    assert answers(bytes(other.received))[0].status == 422
    server.run()
    assert answers(bytes(transport.received))[0].finish_reason() == "length"
    assert server.ask(keyed(chat(**fields))).headers["idempotent-replayed"] == "true"


def test_what_failed_may_be_sent_again(server: SimulatedServer) -> None:
    assert server.ask(keyed(chat(temperature=-1))).status == 400
    assert server.ask(keyed(chat())).status == 200


def test_what_its_client_left_may_be_sent_again(server: SimulatedServer) -> None:
    transport = server.send(keyed(chat(**STREAM)))
    server.step()
    transport.feed_eof()
    server.run()
    assert "idempotent-replayed" not in server.ask(keyed(chat(**STREAM))).headers


def test_stream_that_was_broken_off_is_not_kept(server: SimulatedServer) -> None:
    transport = server.send(keyed(chat(**STREAM)))
    while not transport.received:
        server.step()
    assert server.generations.cancel("r1", "local")
    server.run()
    assert "error" in answers(bytes(transport.received))[0].events[-1]
    again = server.ask(keyed(chat(**STREAM)))
    assert again.finish_reason() == "length"
    assert "idempotent-replayed" not in again.headers


def test_keys_are_their_tenants() -> None:
    tenants = tuple(keyed_tenant(name) for name in ("acme", "other"))
    with serving(tenants=tenants) as server:
        server.ask(keyed(chat(), "k1", "Authorization: Bearer acme"))
        assert "idempotent-replayed" not in server.ask(keyed(chat(), "k1", "Authorization: Bearer other")).headers
        assert "idempotent-replayed" in server.ask(keyed(chat(), "k1", "Authorization: Bearer acme")).headers


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"models": ("another",)}, 404, "model_not_found"),
        ({"text_rules": (TextRule(phrase="step", on="prompt"),)}, 400, "content_filter"),
    ],
)
def test_replay_keeps_to_what_a_reload_brought(changed: dict[str, Any], status: int, code: str) -> None:
    acme = keyed_tenant("acme")
    with serving(tenants=(acme,)) as server:
        asked = keyed(chat(), "k1", "Authorization: Bearer acme")
        said = server.ask(asked)
        server.gate.prepare(ServerConfig(tenants=(structs.replace(acme, **changed),)))()
        refused = server.ask(asked)
        assert (refused.status, refused.json["error"]["code"]) == (status, code)
        server.gate.prepare(ServerConfig(tenants=(acme,)))()
        assert content(server.ask(asked)) == content(said)


def test_after_a_day_the_key_is_free(server: SimulatedServer) -> None:
    server.ask(keyed(chat()))
    server.run_for(KEPT_S - 10)
    assert "idempotent-replayed" in server.ask(keyed(chat())).headers
    server.run_for(20)
    assert "idempotent-replayed" not in server.ask(keyed(chat(max_tokens=13))).headers


def test_oldest_answers_make_room(server: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(server.ask(keyed(chat(), "k1")).body)
    monkeypatch.setattr(idempotency, "MAX_KEPT_BYTES", size * 5 // 2)
    server.ask(keyed(chat(), "k2"))
    server.ask(keyed(chat(), "k3"))
    replayed = ["idempotent-replayed" in server.ask(keyed(chat(), key)).headers for key in ("k3", "k2", "k1")]
    assert replayed == [True, True, False]


def test_long_answer_is_given_and_not_kept(server: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.generation.MAX_ANSWER_BYTES", 100)
    for _ in range(2):
        answer = server.ask(keyed(chat(**STREAM)))
        assert answer.finish_reason() == "length"
        assert "idempotent-replayed" not in answer.headers


@pytest.mark.parametrize("key", ["", "two words", "x" * 256])
def test_key_that_is_none_is_refused(server: SimulatedServer, key: str) -> None:
    answer = server.ask(keyed(chat(), key))
    assert (answer.status, answer.json["error"]["param"]) == (400, "idempotency-key")


def test_answers_outlive_the_process_with_a_ledger(tmp_path: Path) -> None:
    first = SimulatedServer(ledger=tmp_path / "ledger.db")
    said = first.ask(keyed(chat(**STREAM)))
    first.close()
    second = SimulatedServer(ledger=tmp_path / "ledger.db", first_id=10)
    again = second.ask(keyed(chat(**STREAM)))
    assert content(again) == content(said)
    assert second.stats.num_generated_tokens == 0
    assert second.ask(keyed(chat(max_tokens=13))).status == 422
    second.run_for(KEPT_S + 10)
    assert second.ask(keyed(chat(max_tokens=13))).status == 200
    second.close()
    third = SimulatedServer(ledger=tmp_path / "ledger.db", first_id=20)
    assert third.ask(keyed(chat(max_tokens=13))).headers["idempotent-replayed"] == "true"
    third.close()
