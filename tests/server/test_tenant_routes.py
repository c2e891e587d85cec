"""Operators' routes for tenants and keys: what they show, what they change at once, and what they refuse."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from server.gate.identity import Scope, create_key, read_keys
from server.gate.tenants import Limits, Tenant
from server.ledger.usage import ModelPrice, Prices
from tests.server.simulated_server import (
    MODEL,
    STREAM,
    UNIX_S,
    Answer,
    SimulatedServer,
    as_caller,
    chat,
    refusal_of,
    request,
    serving,
    the_answer,
)

NOW = datetime.fromtimestamp(UNIX_S, UTC)
PRICES = Prices(((MODEL, ModelPrice(prompt=10**9, cached=10**9, completion=10**9)),))  # 0.001 a token
ACME, OTHER = Tenant(name="acme"), Tenant(name="other")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def admin_of(path: Path) -> str:
    return create_key(path, NOW, "other", scopes=(Scope.ADMIN, Scope.INFERENCE))[0]


def ask(server: SimulatedServer, key: str, method: str, path: str, body: Any = None) -> Answer:
    return server.ask(as_caller(request(method, path, body), key), method)


def test_a_key_is_created_used_listed_and_revoked_while_serving(keys_file: Path) -> None:
    admin = admin_of(keys_file)
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        made = ask(server, admin, "POST", "/admin/keys", {"tenant": "acme", "label": "ci", "expires": "90d"})
        assert made.status == 201
        key, prefix = made.json["key"], made.json["prefix"]
        assert (made.json["scopes"], made.json["state"]) == (["inference", "usage"], "valid")
        assert "sha256" not in made.json
        assert read_keys(keys_file)[-1].prefix == prefix
        assert server.ask(as_caller(chat(max_tokens=2), key)).status == 200
        assert refusal_of(ask(server, key, "GET", "/admin/keys")) == (403, "permission_denied")
        listed = ask(server, admin, "GET", "/admin/keys").json["data"]
        assert [(one["prefix"], one["label"]) for one in listed][1:] == [(prefix, "ci")]
        assert key[11:].encode() not in ask(server, admin, "GET", "/admin/keys").body
        running = server.send(as_caller(chat(**STREAM, max_tokens=100), key))
        server.step()
        assert ask(server, admin, "DELETE", f"/admin/keys/{prefix}").json["state"] == "revoked"
        assert b"invalid_api_key" in running.received
        assert refusal_of(server.ask(as_caller(chat(), key))) == (401, "invalid_api_key")
        assert read_keys(keys_file)[-1].revoked is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tenant"),
        ({"tenant": "nobody"}, "tenant"),
        ({"tenant": "acmes"}, "tenant"),
        ({"tenant": "acme", "label": "x" * 65}, "label"),
        ({"tenant": "acme", "label": "a\nb"}, "label"),
        ({"tenant": "acme", "expires": "yesterday"}, "expires"),
        ({"tenant": "acme", "expires": "2001-01-01"}, "expires"),
        ({"tenant": "acme", "scopes": []}, "scopes"),
        ({"tenant": "acme", "scopes": ["root"]}, "scopes[0]"),
        ({"tenant": "acme", "scope": ["admin"]}, "scope"),
    ],
)
def test_a_key_that_cannot_be_is_refused_with_the_field(keys_file: Path, body: Any, param: str) -> None:
    admin = admin_of(keys_file)
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        refused = ask(server, admin, "POST", "/admin/keys", body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)
        assert re.search(r"[^.?][.?]$", refused.json["error"]["message"])
        assert len(read_keys(keys_file)) == 1


def test_keys_need_a_file_that_can_be_had(keys_file: Path) -> None:
    with serving(keys=("s3cret",)) as server:
        assert refusal_of(ask(server, "s3cret", "GET", "/admin/keys")) == (404, "no_keys_file")
    admin = admin_of(keys_file)
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        assert refusal_of(ask(server, admin, "DELETE", "/admin/keys/sl-00000000")) == (404, "key_not_found")
        keys_file.write_text("{")
        assert refusal_of(ask(server, admin, "GET", "/admin/keys")) == (409, "keys_file_unusable")
        assert refusal_of(ask(server, admin, "POST", "/admin/keys", {"tenant": "acme"})) == (409, "keys_file_unusable")


def test_limits_are_changed_at_once_and_stay_when_keys_change(keys_file: Path) -> None:
    admin = admin_of(keys_file)
    key, _ = create_key(keys_file, NOW, "acme")
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        assert server.ask(as_caller(chat(max_tokens=2), key)).status == 200
        changed = ask(server, admin, "PATCH", "/admin/tenants/acme", {"limits": {"requests_per_minute": 1}})
        assert changed.json["limits"] == {"requests_per_minute": 1}
        ask(server, admin, "POST", "/admin/keys", {"tenant": "acme"})
        assert server.ask(as_caller(chat(max_tokens=2), key)).status == 200
        assert refusal_of(server.ask(as_caller(chat(max_tokens=2), key))) == (429, "rate_limit_exceeded")
        (shown, _) = ask(server, admin, "GET", "/admin/tenants").json["data"]
        assert shown["left"]["requests_per_minute"]["left"] == 0
        assert shown["used"]["tokens_per_day"] > 4
        assert [one["id"] for one in shown["keys"]] == [key[:11]]
        ask(server, admin, "PATCH", "/admin/tenants/acme", {"limits": {}})
        assert server.ask(as_caller(chat(max_tokens=2), key)).status == 200
        for name, body, expected in (
            ("nobody", {}, (404, "tenant_not_found")),
            ("acme", {"limits": {"requests_per_minute": 0}}, (400, "invalid_value")),
            ("acme", {"limits": {"requests": 1}}, (400, "invalid_value")),
            ("acme", {"limits": {"burst_tokens": 1}}, (400, "invalid_value")),
            ("acme", {"limits": {"money_per_day": 1}}, (400, "invalid_value")),  # nothing has a price
            ("acme", {"tokens_per_day": 1}, (400, "invalid_value")),
        ):
            refused = ask(server, admin, "PATCH", f"/admin/tenants/{name}", body)
            assert refused.status == expected[0], refused.body


def test_tenants_are_listed_by_pages_and_found_by_a_part_of_the_name(keys_file: Path) -> None:
    names = [f"{one}-{i}" for i in range(60) for one in ("Blue", "green")]
    admin = admin_of(keys_file)
    with serving(tenants=(ACME, OTHER, *(Tenant(name=one) for one in names)), keys_file=keys_file) as server:

        def page(**query: Any) -> tuple[list[str], bool]:
            answer = ask(server, admin, "GET", f"/admin/tenants?{urlencode(query)}")
            assert answer.status == 200, answer.body
            return [one["name"] for one in answer.json["data"]], answer.json["has_more"]

        first, has_more = page()
        assert (first, has_more) == ([ACME.name, OTHER.name, *names[:98]], True)
        assert page(after=first[-1]) == (names[98:], False)
        assert page(limit=1000) == (first + names[98:], False)
        assert page(find="BLUE-1", limit=3) == (["Blue-1", "Blue-10", "Blue-11"], True)
        assert page(find="BLUE-1", limit=3, after="Blue-17") == (["Blue-18", "Blue-19"], False)
        for query in ("limit=0", "limit=1001", "limit=x", "after=nobody"):
            assert ask(server, admin, "GET", f"/admin/tenants?{query}").status == 400


@pytest.mark.parametrize("is_keys", [False, True])
def test_a_budget_of_money_warns_ends_and_is_known_after_a_restart(
    tmp_path: Path, keys_file: Path, caplog: pytest.LogCaptureFixture, is_keys: bool
) -> None:
    key, _ = create_key(keys_file, NOW, "acme", scopes=(Scope.ADMIN, Scope.INFERENCE))
    bounds = Limits(money_per_day=0.1, money_per_month=1)  # 100 tokens today
    acme = Tenant(name="acme", key_limits=bounds) if is_keys else Tenant(name="acme", limits=bounds)
    settings: Any = {"tenants": (acme,), "keys_file": keys_file, "ledger": tmp_path / "ledger.db", "prices": PRICES}
    with serving(**settings) as server:
        first = server.ask(as_caller(chat(max_tokens=20), key))
        num_first = first.usage["total_tokens"]
        assert "x-budget-warning" not in first.headers
        second = server.ask(as_caller(chat(max_tokens=82 - 2 * num_first + 20), key))
        num_used = num_first + second.usage["total_tokens"]
        assert num_used == 82
        third = server.ask(as_caller(chat(max_tokens=1, temperature=-1), key))
        assert third.headers["x-budget-warning"].startswith("money_per_day=82%;reset=")
        assert caplog.text.count("has used 80 % of its money_per_day: 0.082 of 0.1") == 1
        place = ("acme", key[:11] if is_keys else "", "money_per_day")
        assert server.gate.quotas.budgets()[place] == 0.82
    with serving(**settings, first_id=10) as server:
        refused = server.ask(as_caller(chat(max_tokens=40), key))
        assert refusal_of(refused) == (429, "rate_limit_exceeded")
        assert "money_per_day" in refused.json["error"]["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        (shown,) = ask(server, key, "GET", "/admin/tenants").json["data"]
        assert (shown["used"]["money_per_day"], shown["used"]["tokens_per_month"]) == (0.082, 82)


def test_what_others_write_is_told_as_it_is_in_json(keys_file: Path) -> None:
    admin, label = admin_of(keys_file), "<img src=x onerror=alert(1)>"
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        made = ask(server, admin, "POST", "/admin/keys", {"tenant": "acme", "label": label})
        assert made.json["label"] == label
        assert made.headers["content-type"] == "application/json"


def test_the_answer_to_a_stream_is_told_no_key(keys_file: Path) -> None:
    admin = admin_of(keys_file)
    with serving(tenants=(ACME, OTHER), keys_file=keys_file) as server:
        viewer = server.send(as_caller(request("GET", "/dashboard/live"), admin))
        made = ask(server, admin, "POST", "/admin/keys", {"tenant": "acme"})
        server.run_for(1)
        assert made.json["key"].encode() not in viewer.received
        assert the_answer(viewer).status == 200
