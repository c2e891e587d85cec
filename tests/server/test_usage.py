"""`steploop usage` and GET /v1/usage: sums, groups, forms, and whose they are."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from server.cli import main
from server.ledger.usage import ModelPrice, Prices
from tests.server.simulated_server import MODEL, SimulatedServer, as_caller, chat, keyed_tenant, request, serving

PRICES = Prices(((MODEL, ModelPrice(prompt=1_000_000, cached=0, completion=3_000_000)),))
TENANTS = tuple(keyed_tenant(name, f"{name}-0", f"{name}-1") for name in ("acme", "other"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of seven requests: 12 tokens said in each, four of acme's on its first key, two on its second."""
    path = tmp_path / "ledger.db"
    server = SimulatedServer(ledger=path, tenants=TENANTS, prices=PRICES)
    for key in ("acme-0",) * 4 + ("acme-1",) * 2 + ("other-0",):
        assert server.ask(as_caller(chat(), key)).status == 200
    server.close()
    return path


def lines_of(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["usage", "--ledger", str(path), "--json", *flags]) == 0
    lines: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return lines


def test_usage_is_summed_by_tenant_key_model_and_day(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    acme, other = lines_of(path, capsys, "--by", "tenant")
    assert (acme["tenant"], acme["requests"], acme["completion_tokens"], acme["aborted"]) == ("acme", 6, 72, 0)
    assert (other["tenant"], other["requests"]) == ("other", 1)
    assert acme["price_micro"] == acme["prompt_tokens"] - acme["cached_tokens"] + 3 * 72
    keys = lines_of(path, capsys, "--by", "key", "--tenant", "acme")
    assert sorted(line["requests"] for line in keys) == [2, 4]
    assert [line["model"] for line in lines_of(path, capsys, "--by", "model")] == [MODEL]
    (day,) = lines_of(path, capsys)
    assert (day["day"], day["requests"]) == ("2023-11-14", 7)


def test_since_and_tenant_leave_out_the_others(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(path, capsys, "--since", "2023-11-15") == []
    assert len(lines_of(path, capsys, "--since", "2023-11-14")) == 1
    assert lines_of(path, capsys, "--tenant", "nobody") == []


def test_csv_has_a_head_and_whole_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--ledger", str(path), "--csv", "--by", "tenant"]) == 0
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [line["tenant"] for line in table] == ["acme", "other"]
    assert table[0]["completion_tokens"] == "72"
    assert table[0]["price_micro"].isdigit()


def test_table_shows_a_line_each_and_the_total(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--ledger", str(path), "--by", "tenant"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["acme", "6"], ["other", "1"], ["total", "7"]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["no ledger is named", "--ledger FILE"]),
        (["--ledger", "missing.db"], ["there is no ledger missing.db"]),
        (["--ledger", __file__], ["or not a ledger", "the one that the server has"]),
        (["--ledger", "x", "--since", "soon"], ["--since", "7d"]),
        (["--ledger", "x", "--by", "moon"], ["moon", "tenant"]),
    ],
)
def test_what_cannot_be_shown_says_why(flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", *flags]) != 0
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_tenant_sees_its_own_and_no_other(path: Path) -> None:
    with serving(ledger=path, tenants=TENANTS, first_id=100) as server:

        def ask(query: str, key: str = "acme-0") -> Any:
            return server.ask(as_caller(request("GET", f"/v1/usage{query}"), key), "GET")

        acme = ask("?by=key").json
        assert (acme["object"], acme["tenant"], acme["by"]) == ("usage", "acme", "key")
        assert sorted(line["requests"] for line in acme["data"]) == [2, 4]
        assert [line["requests"] for line in ask("", "other-0").json["data"]] == [1]
        assert ask("?since=2023-11-15").json["data"] == []
        for query, param in (("?by=tenant", "by"), ("?since=soon", "since"), ("?tenant=other", "tenant")):
            answer = ask(query)
            assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_without_a_ledger_there_is_none_to_show(server: SimulatedServer) -> None:
    answer = server.ask(request("GET", "/v1/usage"), "GET")
    assert (answer.status, answer.json["error"]["code"]) == (404, "no_ledger")
