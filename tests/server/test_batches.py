"""Files and batches: what is taken, what each line is answered, and what is left after a crash."""

import asyncio
import codecs
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from core.errors import StartupError
from server.batches.runner import LINGER_S, MOST_HELD_S, request_id_of
from server.batches.store import FileLimits, Quota, Store
from server.config import ServerConfig
from server.gate.tenants import Limits
from server.ledger.store import RowState
from server.observing.metrics import OTHER_FIELDS
from tests.server.inline_ledger import rows
from tests.server.simulated_server import (
    MODEL,
    Answer,
    SimulatedServer,
    as_caller,
    chat,
    keyed_tenant,
    refusal_of,
    request,
    serving,
)

CHAT = "/v1/chat/completions"


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], "max_tokens": 5, "ignore_eos": True}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked | body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)


def upload(content: bytes, name: str = "in.jsonl", **fields: str) -> bytes:
    parts = [f'name="{key}"\r\n\r\n{value}' for key, value in ({"purpose": "batch"} | fields).items() if value]
    head = "".join(f"--mark\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
    head += f'--mark\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    body = head.encode() + content + b"\r\n--mark--\r\n"
    return request("POST", "/v1/files", body, "Content-Type: multipart/form-data; boundary=mark")


def create(file_id: str, **fields: Any) -> bytes:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return request("POST", "/v1/batches", body | fields)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[SimulatedServer]:
    with serving(files=tmp_path / "files", ledger=tmp_path / "ledger.db") as server:
        yield server


Ask = Callable[..., Answer]


def asker(server: SimulatedServer, key: str = "") -> Ask:
    def ask(data: bytes, method: str = "POST") -> Answer:
        return server.ask(as_caller(data, key) if key else data, method)

    return ask


def get(ask: Ask, path: str) -> Any:
    return ask(request("GET", path), "GET").json


def begun(ask: Ask, *lines: Any, **fields: Any) -> Any:
    file = ask(upload(jsonl(*lines)))
    assert file.status == 200, file.body
    made = ask(create(file.json["id"], **fields))
    assert made.status == 200, made.body
    return made.json


def finished(server: SimulatedServer, batch: Any, ask: Ask | None = None) -> Any:
    """The batch, once it is over."""
    ask = ask or asker(server)
    server.run_until(lambda: batch["id"] not in server.batches._running, server.loop.time() + 1e6)
    server.run()
    return get(ask, f"/v1/batches/{batch['id']}")


def output(ask: Ask, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    content = ask(request("GET", f"/v1/files/{file_id}/content"), "GET")
    return [json.loads(text) for text in content.body.splitlines()]


def test_lines_are_answered_as_requests_from_a_socket(served: SimulatedServer) -> None:
    ask = asker(served)
    asked = [line("a", seed=1), line("b", temperature=-1), line("c", seed=2, n=2)]
    batch = begun(ask, *asked, b"\n", metadata={"k": "v"})
    assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"k": "v"})
    batch = finished(served, batch)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    assert batch["completed_at"] >= batch["finalizing_at"] >= batch["in_progress_at"] >= batch["created_at"]
    good, bad = output(ask, batch["output_file_id"]), output(ask, batch["error_file_id"])
    assert [one["custom_id"] for one in good] == ["a", "c"]
    for asked_line, told in ((asked[0], good[0]), (asked[2], good[1])):
        alone = ask(request("POST", CHAT, asked_line["body"])).json
        assert told["response"]["status_code"] == 200
        for field in ("choices", "object", "model"):
            assert told["response"]["body"][field] == alone[field]
    assert (bad[0]["custom_id"], bad[0]["response"]["status_code"]) == ("b", 400)
    assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
    found = {row.client_id: row for row in rows_of(served)}
    assert found["a"].request_id == good[0]["response"]["request_id"] == request_id_of(batch["id"], 0)


def rows_of(server: SimulatedServer) -> list[Any]:
    assert server.ledger_writer is not None
    return server.ledger_writer.journal.store.rows()


@pytest.mark.parametrize(
    ("lines", "code", "number", "param"),
    [
        ((line("a"), b"{]\n"), "invalid_json_line", 2, None),
        ((line("a"), b"\xff\n"), "invalid_json_line", 2, None),
        ((b'{"custom_id": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",), "invalid_json_line", 1, None),
        ((line("a"), line("a")), "invalid_line", 2, "custom_id"),
        ((line("a") | {"url": "/v1/completions"},), "invalid_line", 1, "url"),
        ((line("a") | {"method": "GET"},), "invalid_line", 1, "method"),
        ((line("a") | {"body": []},), "invalid_line", 1, None),
        ((line("a", stream=True),), "invalid_line", 1, "body.stream"),
        (({"custom_id": "a"},), "invalid_line", 1, None),
        ((line(""),), "invalid_line", 1, "custom_id"),
        ((b"\n\n",), "empty_file", None, None),
    ],
)
def test_bad_lines_fail_the_batch_and_are_named(
    served: SimulatedServer, lines: Any, code: str, number: int | None, param: str | None
) -> None:
    batch = finished(served, begun(asker(served), *lines))
    assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 0)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == (code, number, param)


def test_a_check_that_fails_ends_the_batch(
    served: SimulatedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("server.batches.store._line_error", fail)
    batch = finished(served, begun(asker(served), line("a")))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "server_error")
    assert "cannot be checked" in caplog.text


def test_a_byte_order_mark_is_no_part_of_the_first_line(served: SimulatedServer) -> None:
    batch = finished(served, begun(asker(served), codecs.BOM_UTF8, line("a"), line("b")))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_too_many_lines(served: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.batches.store.MOST_LINES", 2)
    batch = finished(served, begun(asker(served), line("a"), line("b"), line("c")))
    assert batch["errors"]["data"][0]["code"] == "too_many_lines"


def test_files_are_listed_read_and_deleted(served: SimulatedServer) -> None:
    ask = asker(served)
    names = ["passwd", "b.jsonl", "ünï.jsonl", 'a"b%41.jsonl']
    told = ["../../etc/passwd", "C:\\d\\b.jsonl", "ü\x1bnï.jsonl", "%00%0D%0aa%22b%41.jsonl"]
    made = [
        ask(upload(jsonl(line(name)), path, **{"expires_after[seconds]": "3600"})).json
        for name, path in zip(names, told, strict=True)
    ]
    assert [one["filename"] for one in made] == names
    assert [one["expires_at"] - one["created_at"] for one in made] == [3600] * 4
    listed = get(ask, "/v1/files?limit=2&purpose=batch")
    assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([made[3]["id"], made[2]["id"]], True)
    rest = get(ask, f"/v1/files?after={listed['last_id']}")
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[1]["id"], made[0]["id"]], False)
    assert output(ask, made[0]["id"]) == [line(names[0])]
    assert get(ask, f"/v1/files/{made[0]['id']}") == made[0]
    path = f"/v1/files/{made[0]['id']}"
    assert ask(request("DELETE", path), "DELETE").json["deleted"] is True
    assert refusal_of(ask(request("DELETE", path), "DELETE")) == (404, "file_not_found")
    served.run_for(3700)
    assert get(ask, "/v1/files")["data"] == []


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (upload(b"x", purpose="fine-tune"), 400, "purpose"),
        (upload(b"x", purpose=""), 400, "purpose"),
        (upload(b""), 400, "file"),
        (upload(b"x", "n" * 300), 400, "file"),
        (upload(b"x", "a/.."), 400, "file"),
        (upload(b"x", **{"expires_after[seconds]": "5"}), 400, "expires_after.seconds"),
        (upload(b"x" * 100_001), 413, "file"),
        (request("POST", "/v1/files", {"purpose": "batch"}), 400, "content-type"),
        (request("POST", "/v1/files", b"--m\r\n\r\n", "Content-Type: multipart/form-data; boundary=m"), 400, None),
        (create("file-none"), 404, "input_file_id"),
        (create("file-none", endpoint="/v1/messages"), 400, "endpoint"),
        (create("file-none", completion_window=7), 400, "completion_window"),
        (request("GET", "/v1/batches/batch_none"), 404, None),
        (request("POST", "/v1/batches/batch_none/cancel"), 404, None),
        (request("GET", "/v1/files?limit=0"), 400, "limit"),
        (request("GET", "/v1/files?order=newest"), 400, "order"),
        (request("GET", "/v1/files?after=file-none"), 400, "after"),
        (request("GET", "/v1/batches?after=batch_none"), 400, "after"),
    ],
)
def test_what_is_refused(served: SimulatedServer, data: bytes, status: int, param: str | None) -> None:
    answer = served.ask(data, data[:3].decode() if data.startswith(b"GET") else "POST")
    assert (answer.status, answer.json["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (f'--m\r\nA: b; name="file"; filename="{"n" * 5000}"\r\n\r\nx\r\n--m--', "a form field have 5,030 bytes"),
        ("--m\r\nA: b\r\n\r\nx\r\n--m--", 'has no name="..."'),
        ('--m\r\nA: b; name="file"\r\n\r\nx', "is incomplete. Send all of it"),
        ('--m\r\nA: b; name="file"\r\n--m--', "is incomplete. Send all of it"),
        ("".join(f'--m\r\nA: b; name="{i}"\r\n\r\nx\r\n' for i in range(17)) + "--m--", "over 16 fields"),
    ],
)
def test_a_form_that_is_none_is_told_why(served: SimulatedServer, form: str, told: str) -> None:
    fields = "Content-Type: multipart/form-data; boundary=m"
    answer = served.ask(request("POST", "/v1/files", form.encode(), fields))
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_form")
    assert told in answer.json["error"]["message"]


def test_parameters_of_a_query_that_are_unknown_are_counted(served: SimulatedServer) -> None:
    for path in ("/v1/files?limit=2&foo=1", "/v1/files?purpose=batch&foo=", "/v1/models?limit=1&include[]=a"):
        assert served.ask(request("GET", path), "GET").status == 200
    assert served.metrics.unknown_fields == {OTHER_FIELDS: 3}


def test_a_window_that_is_none(served: SimulatedServer) -> None:
    file = served.ask(upload(jsonl(line("a")))).json["id"]
    for window in ("24", "0h", "31d", "1x"):
        assert served.ask(create(file, completion_window=window)).json["error"]["param"] == "completion_window"


def test_a_tenant_has_its_quota_and_sees_its_own(tmp_path: Path) -> None:
    with serving(files=tmp_path, tenants=(keyed_tenant("one"), keyed_tenant("two"))) as server:
        one, two = asker(server, "one"), asker(server, "two")
        batch = finished(server, begun(one, line("a")), one)
        paths = [
            f"/v1/batches/{batch['id']}",
            *(f"/v1/files/{batch[name]}" for name in ("input_file_id", "output_file_id")),
        ]
        for path in (*paths, f"{paths[1]}/content"):
            assert two(request("GET", path), "GET").status == 404
        assert two(create(batch["input_file_id"])).status == 404
        assert [get(two, path)["data"] for path in ("/v1/files", "/v1/batches")] == [[], []]
        while (answer := two(upload(b"x" * 50_000))).status == 200:
            assert len(get(two, "/v1/files")["data"]) <= 4
        assert refusal_of(answer) == (429, "files_quota_exceeded")
        assert one(upload(b"x")).status == 200


def test_none_begins_where_others_have_written_more_than_the_quota(served: SimulatedServer) -> None:
    ask = asker(served)
    batch = finished(served, begun(ask, line("a")), ask)
    sizes = [get(ask, f"/v1/files/{batch[name]}")["bytes"] for name in ("input_file_id", "output_file_id")]
    for spare, expected in ((0, (200, None)), (-1, (429, "files_quota_exceeded"))):
        served.batches.limits = FileLimits(100_000, Quota(10, sum(sizes) + spare))
        answer = ask(create(batch["input_file_id"]))
        assert (answer.status, answer.json.get("error", {}).get("code")) == expected
        if not spare:
            sizes.append(get(ask, f"/v1/files/{finished(served, answer.json, ask)['output_file_id']}")["bytes"])


def test_without_the_setting_the_routes_name_it(server: SimulatedServer) -> None:
    for data, method in ((upload(b"x"), "POST"), (request("GET", "/v1/batches"), "GET")):
        answer = server.ask(data, method)
        assert refusal_of(answer) == (404, "files_disabled")
        assert "--files" in answer.json["error"]["message"]


def test_a_cancelled_batch_keeps_what_was_answered(served: SimulatedServer) -> None:
    ask = asker(served)
    file = ask(upload(jsonl(*(line(f"l{i}") for i in range(12))))).json["id"]
    transport = served.send(create(file))
    served.run_until(lambda: any(one.batch.completed for one in served.batches._running.values()))
    batch_id = json.loads(bytes(transport.received).split(b"\r\n\r\n")[1])["id"]
    in_use = served.send(request("DELETE", f"/v1/files/{file}"))
    assert b"file_in_use" in bytes(in_use.received)
    answer = ask(request("POST", f"/v1/batches/{batch_id}/cancel"))
    assert answer.json["status"] in ("cancelling", "cancelled")
    batch = finished(served, {"id": batch_id})
    counts = batch["request_counts"]
    assert (batch["status"], 0 < counts["completed"] < 12) == ("cancelled", True)
    assert len(output(ask, batch["output_file_id"])) == counts["completed"]
    assert ask(request("POST", f"/v1/batches/{batch_id}/cancel")).json["status"] == "cancelled"


def test_what_is_left_at_the_end_of_its_window_expires(served: SimulatedServer) -> None:
    ask = asker(served)
    served.readiness.is_ready = False  # nothing is asked
    made = begun(ask, line("a"), line("b"), completion_window="1min")["id"]
    served.run_for(61)
    served.readiness.is_ready = True
    batch = get(ask, f"/v1/batches/{made}")
    assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 2, "completed": 0, "failed": 2})
    errors = [(one["custom_id"], one["error"]["code"]) for one in output(ask, batch["error_file_id"])]
    assert errors == [("a", "batch_expired"), ("b", "batch_expired")]


def test_a_batch_has_expired_once_its_files_are_written(served: SimulatedServer) -> None:
    ask = asker(served)
    served.send(create(ask(upload(jsonl(*(line(f"l{i}") for i in range(12))))).json["id"]))
    served.run_until(lambda: any(one.batch.completed for one in served.batches._running.values()))
    ((batch_id, running),) = served.batches._running.items()
    served.batches._expire(running)
    assert (served.batches.latest(running.batch).status, running.num_asked > 0) == ("finalizing", True)
    batch = finished(served, {"id": batch_id})
    counts = batch["request_counts"]
    assert (batch["status"], counts["completed"] + counts["failed"]) == ("expired", 12)
    assert 0 < len(output(ask, batch["output_file_id"])) == counts["completed"] < 12
    assert len(output(ask, batch["error_file_id"])) == counts["failed"]


def test_lines_of_a_revoked_key_fail_as_the_key_does(tmp_path: Path) -> None:
    with serving(files=tmp_path, tenants=(keyed_tenant("one", "k1", "k2"),)) as server:
        one, other = asker(server, "k1"), asker(server, "k2")
        server.readiness.is_ready = False
        batch = begun(one, line("a"))
        config = ServerConfig(tenants=(keyed_tenant("one", "k2"),))
        server.gate.prepare(config)()
        server.readiness.is_ready = True
        batch = finished(server, batch, other)
        (failed,) = output(other, batch["error_file_id"])
        assert (failed["response"]["status_code"], batch["request_counts"]["failed"]) == (401, 1)


def test_a_full_disk_delays_a_batch(served: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nums_failed = dict.fromkeys(("add_answers", "finish"), 2)

    def failing(name: str) -> Callable[..., Any]:
        work = getattr(served.batches.store, name)

        def run(*arguments: Any) -> Any:
            if nums_failed[name]:
                nums_failed[name] -= 1
                raise sqlite3.OperationalError("database or disk is full")
            return work(*arguments)

        return run

    for name in nums_failed:
        monkeypatch.setattr(served.batches.store, name, failing(name))
    batch = finished(served, begun(asker(served), line("a"), line("b")))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)


def test_lines_wait_for_quota_and_room(tmp_path: Path) -> None:
    tenant = keyed_tenant("one", limits=Limits(requests_per_minute=60, burst_requests=4))
    with serving(files=tmp_path, tenants=(tenant,)) as server:
        ask = asker(server, "one")
        began_s = server.loop.time()
        batch = finished(server, begun(ask, *(line(f"l{i}") for i in range(10))), ask)
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        assert server.loop.time() - began_s > 5


def test_lines_take_a_part_of_the_slots_and_give_way_to_who_waits(served: SimulatedServer) -> None:
    file = served.ask(upload(jsonl(*(line(f"l{i}", max_tokens=30) for i in range(9))))).json["id"]
    served.send(create(file))
    served.run_until(lambda: served.stats.num_running == 4)
    for _ in range(5):
        served.step()
    assert served.stats.num_running == served.limits.max_sequences // 2
    transport = served.send(chat(stream=True))
    served.step()
    assert served.stats.num_paused == 4
    served.run_until(lambda: b"[DONE]" in bytes(transport.received))
    ended_s = served.loop.time()
    served.run_until(lambda: served.stats.num_paused == 0)
    assert LINGER_S <= served.loop.time() - ended_s <= LINGER_S + 0.1
    transport.feed_eof()
    served.run()
    assert [one["request_counts"]["completed"] for one in get(asker(served), "/v1/batches")["data"]] == [9]


def test_lines_get_a_part_of_the_time_where_requests_never_cease(served: SimulatedServer) -> None:
    file = served.ask(upload(jsonl(line("a", max_tokens=60)))).json["id"]
    served.send(create(file))
    served.run_until(lambda: served.stats.num_running == 1)
    batch = next(iter(served.batches._running.values()))
    began_s = served.loop.time()
    while not batch.batch.completed:
        served.ask(chat(max_tokens=60))
    assert MOST_HELD_S < served.loop.time() - began_s < 5 * MOST_HELD_S


def test_after_a_crash_each_line_is_answered_and_billed_once(tmp_path: Path) -> None:
    places: dict[str, Any] = {"files": tmp_path / "files", "ledger": tmp_path / "ledger.db"}
    names = [f"l{i}" for i in range(20)]
    num_crashes, batch_id = 0, ""
    while True:
        server = SimulatedServer(**places, first_id=1 + 1000 * num_crashes)
        ask = asker(server)
        if not batch_id:
            file = ask(upload(jsonl(*map(line, names)))).json["id"]
            transport = server.send(create(file))
            server.loop.settle()
            batch_id = json.loads(bytes(transport.received).split(b"\r\n\r\n")[1])["id"]
        for _ in range(3 + num_crashes):  # a crash: what nobody has written is lost
            server.step()
            server.run_for(0.001)
        num_crashes += 1
        running = server.batches._running
        if batch_id not in running and num_crashes > 1:
            break
        crash(server)
    with closing(server):
        batch = get(ask, f"/v1/batches/{batch_id}")
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", len(names))
        assert [one["custom_id"] for one in output(ask, batch["output_file_id"])] == names
        used = {one["custom_id"]: one["response"]["body"]["usage"] for one in output(ask, batch["output_file_id"])}
    assert num_crashes > 3
    found = [row for row in rows(places["ledger"]) if row.client_id in names]
    assert sorted(row.client_id for row in found) == sorted(names)
    for row in found:
        told = used[row.client_id]["prompt_tokens"], used[row.client_id]["completion_tokens"]
        assert (row.state, row.prompt_tokens, row.completion_tokens) == (RowState.SETTLED, *told)


def crash(server: SimulatedServer) -> None:
    """What has not been written is lost, as at the end of a process."""
    server.batches.store.close()
    assert server.ledger_writer is not None
    server.ledger_writer.is_stuck = True
    server.ledger_writer.journal.close()
    server.batches._is_closed = True
    for task in asyncio.all_tasks(server.loop):
        task.cancel()
    server.loop.settle()
    server.loop.close()


def test_a_directory_has_one_server_and_orphans_go(tmp_path: Path) -> None:
    (tmp_path / "contents").mkdir()
    (tmp_path / "contents" / "file-1").write_bytes(b"x")
    store = Store(tmp_path)
    assert not list((tmp_path / "contents").iterdir())
    with pytest.raises(StartupError, match="another server"):
        Store(tmp_path)
    store.close()
