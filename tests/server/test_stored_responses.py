"""--store-responses: what goes on from an answer, who may see it, and until when."""

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from server.ledger.journal import Spill
from server.ledger.ledger import PROBE_S
from server.ledger.responses import Responses
from server.ledger.store import LedgerStore, RowState, Write
from tests.server.gateway import ASKED, relaying
from tests.server.inline_ledger import rows
from tests.server.simulated_server import (
    MODEL,
    Answer,
    SimulatedServer,
    as_caller,
    keyed_tenant,
    refusal_of,
    request,
    serving,
)
from tests.server.test_ledger_faults import go_on, hang, told, writer_of

DAY_S = 86_400


def respond(text: Any, **fields: Any) -> bytes:
    body = {"model": MODEL, "input": text, "max_output_tokens": 6, "seed": 7, "ignore_eos": True}
    return request("POST", "/v1/responses", body | fields)


def document(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json if answer.headers["content-type"] == "application/json" else answer.events[-1]["response"]


def get(response_id: str, more: str = "", method: str = "GET") -> bytes:
    return request(method, f"/v1/responses/{response_id}{more}")


@pytest.fixture
def storing(tmp_path: Path) -> Any:
    with serving(ledger=tmp_path / "ledger.db", store_responses_s=30 * DAY_S) as server:
        yield server


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_goes_on_from_another_as_from_its_whole_history(storing: SimulatedServer, is_stream: bool) -> None:
    first = document(storing.ask(respond("What is a block?", stream=is_stream)))
    second = document(storing.ask(respond("And a page?", stream=is_stream, previous_response_id=first["id"])))
    third = document(storing.ask(respond("Go on.", stream=is_stream, previous_response_id=second["id"])))
    assert (first["store"], first["previous_response_id"]) == (True, None)
    assert (third["store"], third["previous_response_id"]) == (True, second["id"])
    told: list[Any] = []
    for text, one in (("What is a block?", first), ("And a page?", second)):
        told += [{"role": "user", "content": text}, *one["output"]]
    whole = document(storing.ask(respond([*told, {"role": "user", "content": "Go on."}], store=False)))
    assert whole["output"][0]["content"] == third["output"][0]["content"]
    assert whole["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    # The prompt begins with all that was computed before, in whole blocks
    before = second["usage"]["total_tokens"]
    assert third["usage"]["input_tokens_details"]["cached_tokens"] > before - 2 * storing.limits.block_size
    count = request("POST", "/v1/responses/input_tokens", {"input": "Go on.", "previous_response_id": second["id"]})
    assert storing.ask(count).json["input_tokens"] == third["usage"]["input_tokens"]


def test_stored_responses_are_read_and_deleted(storing: SimulatedServer) -> None:
    made = document(storing.ask(respond([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])))
    shown = storing.ask(get(made["id"]), "GET").json
    assert shown == made
    page = storing.ask(get(made["id"], "/input_items?limit=1"), "GET").json
    assert ([one["content"] for one in page["data"]], page["has_more"]) == (["b"], True)
    for param in ("order", "after"):
        bad = storing.ask(get(made["id"], f"/input_items?{param}=x"), "GET")
        assert (bad.status, bad.json["error"]["param"]) == (400, param)
    rest = storing.ask(get(made["id"], f"/input_items?after={page['last_id']}"), "GET").json
    assert ([one["content"] for one in rest["data"]], rest["has_more"]) == (["a"], False)
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    for one in (reference, {"id": reference["id"]}):
        assert storing.ask(respond([one, {"role": "user", "content": "c"}])).status == 200
    assert storing.ask(get(made["id"], method="DELETE"), "DELETE").json["deleted"] is True
    for again in (get(made["id"]), get(made["id"], method="DELETE"), respond("c", previous_response_id=made["id"])):
        assert refusal_of(storing.ask(again)) == (404, "response_not_found")
    refused = storing.ask(respond([reference, {"role": "user", "content": "c"}]))
    assert refusal_of(refused) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "a"}, {"role": "nobody", "content": "b"}]}, "input[1].role"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "1"}]}, "input[0].call_id"),
        ({"input": 3}, "input"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, None),  # of a response that is not stored
    ],
)
def test_errors_name_what_the_client_sent(storing: SimulatedServer, fields: dict[str, Any], param: str | None) -> None:
    first = document(storing.ask(respond("What is a block?")))
    refused = storing.ask(respond("", **{"previous_response_id": first["id"]} | fields))
    status = 404 if param in (None, "previous_response_id") and fields != {"previous_response_id": 3} else 400
    assert (refused.status, refused.json["error"]["param"]) == (status, param)
    assert all(place in (param or "") for place in re.findall(r"input\[\d+\]", refused.json["error"]["message"]))


def test_what_is_not_stored_is_not_found(storing: SimulatedServer) -> None:
    made = document(storing.ask(respond("a", store=False)))
    assert made["store"] is False
    assert storing.ask(get(made["id"]), "GET").status == 404


def test_without_the_setting_store_is_false_and_ids_are_refused() -> None:
    with serving() as server:
        made = document(server.ask(respond("a", store=True)))
        assert made["store"] is False
        refused = server.ask(respond("b", previous_response_id=made["id"]))
        assert (refused.status, refused.json["error"]["param"]) == (400, "previous_response_id")
        assert "--store-responses" in refused.json["error"]["message"]
        for method in ("GET", "DELETE"):
            assert refusal_of(server.ask(get(made["id"], method=method), method)) == (404, "responses_not_stored")


def test_a_tenant_sees_its_own_alone_and_only_as_long_as_they_are_kept(tmp_path: Path) -> None:
    tenants = (keyed_tenant("one"), keyed_tenant("two"))
    keeping: dict[str, Any] = {"ledger": tmp_path / "ledger.db", "store_responses_s": DAY_S, "tenants": tenants}
    with serving(**keeping) as server:
        made = document(server.ask(as_caller(respond("a"), "one")))
    with serving(**keeping, first_id=100) as server:
        assert server.ask(as_caller(get(made["id"]), "one"), "GET").json == made
        assert server.ask(as_caller(get(made["id"]), "two"), "GET").status == 404
        server.ask(as_caller(get(made["id"], method="DELETE"), "two"), "DELETE")
        assert server.ask(as_caller(get(made["id"]), "one"), "GET").status == 200
        server.run_for(DAY_S + 1)
        assert server.ask(as_caller(get(made["id"]), "one"), "GET").status == 404


def test_beyond_its_room_the_largest_tenant_loses_its_oldest(tmp_path: Path) -> None:
    tenants = (keyed_tenant("one"), keyed_tenant("two"))
    with serving(ledger=tmp_path / "ledger.db", store_responses_s=DAY_S, tenants=tenants) as server:
        store = server.app.responses
        assert isinstance(store, Responses)
        small = document(server.ask(as_caller(respond("a"), "two")))
        large = [document(server.ask(as_caller(respond("b", metadata={"k": "v" * 500}), "one"))) for _ in range(3)]
        store._most_bytes = 6_000
        large.append(document(server.ask(as_caller(respond("b"), "one"))))
        found = [server.ask(as_caller(get(one["id"]), "one"), "GET").status for one in large]
        assert found[0] == 404
        assert server.ask(as_caller(get(small["id"]), "two"), "GET").status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_another_server_answers_is_stored_here(tmp_path: Path, is_stream: bool) -> None:
    config = {"ledger": tmp_path / "ledger.db", "store_responses_s": 3600.0}
    async with relaying(config=config) as gateway:
        ask = {"model": ASKED, "stream": is_stream}
        first = document(await gateway.ask(respond("What is a block?", **ask)))
        second = document(await gateway.ask(respond("And a page?", previous_response_id=first["id"], **ask)))
        told = [{"role": "user", "content": "What is a block?"}, *first["output"]]
        whole = document(await gateway.ask(respond([*told, {"role": "user", "content": "And a page?"}], **ask)))
        assert second["output"][0]["content"] == whole["output"][0]["content"]
        assert [(one["store"], one["previous_response_id"]) for one in (first, second)] == [
            (True, None),
            (True, first["id"]),
        ]
        shown = (await gateway.ask(get(second["id"]))).json
        assert shown == second
        kept_out = document(await gateway.ask(respond("And data: a block?", store=False, **ask)))
        assert kept_out["store"] is False


def stored_ids(path: Path) -> list[str]:
    """As another process reads them."""
    with closing(sqlite3.connect(path)) as database:
        return [found for (found,) in database.execute("SELECT id FROM responses")]


def told_end(received: bytearray) -> bool:
    return b'"output_tokens":' in received


def settled_ids(path: Path) -> list[str]:
    return [f"resp_{row.request_id}" for row in rows(path) if row.state is RowState.SETTLED]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_reserved_late", [False, True])
def test_no_commit_has_a_settled_request_without_its_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool, is_reserved_late: bool
) -> None:
    """Wherever the process is killed, what has been billed can be gone on from; and nobody hears of what can not."""
    path, found = tmp_path / "ledger.db", list[int]()
    commit = LedgerStore.commit
    with serving(ledger=path, store_responses_s=DAY_S) as server:

        def watched(store: LedgerStore, writes: Sequence[Write]) -> None:
            commit(store, writes)
            assert stored_ids(path) == settled_ids(path)
            found.append(len(stored_ids(path)))

        monkeypatch.setattr(LedgerStore, "commit", watched)
        hang(server)
        asked = server.send(respond("a", stream=is_stream))
        server.run_for(10.0 if is_reserved_late else 0.0)
        go_on(server)
        assert document(told(asked.received))["id"] == stored_ids(path)[0]
        asked = server.send(respond("b", stream=is_stream))
        server.run_until(lambda: len(writer_of(server).writes) > 3)  # its end is submitted
        assert not told_end(asked.received)
        server.run()
        assert told_end(asked.received)
    assert (found[0], found[-1]) == (0, 2)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_that_the_database_did_not_take_is_stored_once_it_does(tmp_path: Path, is_stream: bool) -> None:
    path = tmp_path / "ledger.db"
    with serving(ledger=path, store_responses_s=DAY_S) as server, closing(sqlite3.connect(path)) as lock:
        asked = server.send(respond("a", stream=is_stream, max_output_tokens=60))
        server.run_for(0.02)
        lock.execute("BEGIN IMMEDIATE")
        server.run()
        made = document(told(asked.received))
        assert server.ask(get(made["id"]), "GET").json == made
        lock.rollback()
        server.run_for(2 * PROBE_S)
        assert stored_ids(path) == [made["id"]]
        assert server.ask(get(made["id"]), "GET").json == made
        assert server.generations.ledger is not None
        assert not server.generations.ledger.unkept


def test_an_end_that_cannot_be_settled_is_an_error_event_with_the_next_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    with serving(ledger=path, store_responses_s=DAY_S) as server, closing(sqlite3.connect(path)) as lock:
        asked = server.send(respond("a", stream=True, max_output_tokens=60))
        server.run_until(lambda: bool(asked.received))

        def full(spill: Spill, rows: list[Any]) -> None:
            raise OSError("no room")

        monkeypatch.setattr(Spill, "append", full)
        lock.execute("BEGIN IMMEDIATE")
        server.run()
        events = told(asked.received).events
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["type"] == "ledger_unavailable"
        assert [one["sequence_number"] for one in events] == list(range(len(events)))
        lock.rollback()
        server.run_for(2 * PROBE_S)
    assert stored_ids(path) == []
