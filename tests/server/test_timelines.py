"""What went on, as the server shows it: /v1/requests/{id}, /admin/requests, and the trace that a request came with."""

import json
import logging

import pytest

from core.types import Admitted
from tests.server.fakes import OPERATOR
from tests.server.simulated_engine import MortalRunner
from tests.server.simulated_server import (
    STREAM,
    SimulatedServer,
    answers,
    as_caller,
    chat,
    request,
    serving,
    with_lines,
)
from tests.server.test_gate import ACME, THIRD

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def get(server: SimulatedServer, path: str) -> dict[str, object]:
    answer = server.ask(request("GET", path), "GET")
    assert answer.status == 200
    return dict(answer.json)


def test_timeline_of_a_request_that_is_over_tells_every_stage_in_order(server: SimulatedServer) -> None:
    shown_id = server.ask(chat(max_tokens=3)).json["id"]
    shown = get(server, f"/v1/requests/{shown_id}")
    assert (shown["id"], shown["state"], shown["status"], shown["num_completion_tokens"]) == ("r1", "done", 200, 3)
    stages = shown["stages"]
    assert isinstance(stages, list)
    assert stages[0]["stage"] == "head"
    assert stages[-1]["stage"] == "last_flush"
    ends = [round(stage["start_ms"] + stage["duration_ms"], 3) for stage in stages]
    assert [stage["start_ms"] for stage in stages[1:]] == pytest.approx(ends[:-1], abs=0.002)
    assert sum(stage["duration_ms"] for stage in stages) == pytest.approx(shown["duration_ms"], abs=0.001 * len(stages))


def test_timeline_of_a_request_that_runs_tells_how_far_it_is(server: SimulatedServer) -> None:
    server.send(chat(**STREAM, max_tokens=100))
    server.run_until(lambda: any(isinstance(mark, Admitted) for one in server.delivered for mark in one.marks))
    transport = server.send(request("GET", "/v1/requests/r1"))
    (answer,) = answers(bytes(transport.received), "GET")
    assert answer.json["state"] in ("prefill", "decode")
    assert "queue" in [stage["stage"] for stage in answer.json["stages"]]
    server.run()


def look_up(server: SimulatedServer, key: str) -> tuple[int, str]:
    """Status and state, or code, of request r1 as a key's owner sees it, while all else stands still."""
    transport = server.send(as_caller(request("GET", "/v1/requests/r1"), key))
    (answer,) = answers(bytes(transport.received), "GET")
    transport.feed_eof()
    return answer.status, answer.json["state"] if answer.status == 200 else answer.json["error"]["code"]


def test_other_tenants_requests_are_not_shown_running_or_over() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        server.send(as_caller(chat(**STREAM, max_tokens=50), "t"))
        assert look_up(server, "a") == (404, "request_not_found")
        assert look_up(server, "t") == (200, "queue")
        server.run()
        assert look_up(server, "a") == (404, "request_not_found")
        assert look_up(server, "t") == (200, "done")


def test_admin_sees_the_slowest_the_failed_and_those_that_run() -> None:
    with serving(runner=MortalRunner) as server:
        server.network.peer = OPERATOR
        server.ask(chat(max_tokens=1))
        server.ask(chat(**STREAM))
        shown = get(server, "/admin/requests?slowest=1")
        assert [len(shown[kind]) for kind in ("running", "slowest", "failed")] == [0, 1, 1]  # type: ignore[arg-type]
        (failed,) = shown["failed"]  # type: ignore[misc]
        assert (failed["id"], failed["state"], failed["error_code"]) == ("r2", "failed", "engine_error")


@pytest.mark.parametrize("query", ["slowest=0", "slowest=33", "slowest=x", "slowest=", "fastest=3"])
def test_admin_query_that_is_none_is_refused_with_what_may_be_asked(server: SimulatedServer, query: str) -> None:
    server.network.peer = OPERATOR
    answer = server.ask(request("GET", f"/admin/requests?{query}"), "GET")
    assert (answer.status, answer.json["error"]["param"]) == (400, "slowest")
    assert "from 1 to 32" in answer.json["error"]["message"]


def test_trace_goes_on_in_the_answer_and_in_every_log_record(
    server: SimulatedServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.access")
    answer = server.ask(with_lines(chat(max_tokens=1), f"traceparent: 00-{TRACE}-{PARENT}-01"))
    assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
    assert PARENT not in answer.headers["traceresponse"]
    assert f"trace={TRACE}" in caplog.records[-1].getMessage()
    assert get(server, "/v1/requests/r1")["trace_id"] == TRACE


def test_without_a_trace_none_is_told(server: SimulatedServer) -> None:
    answer = server.ask(with_lines(chat(max_tokens=1), "traceparent: nonsense"))
    assert "traceresponse" not in answer.headers
    assert "trace_id" not in json.dumps(get(server, "/v1/requests/r1"))


def test_client_finds_its_request_by_the_id_that_it_gave_it() -> None:
    with serving(tenants=(ACME, THIRD)) as server:
        server.ask(as_caller(chat(max_tokens=2), "a"))  # ours of that name is another tenant's
        server.send(as_caller(chat(max_tokens=2), "t", "x-request-id: r1"))
        assert look_up(server, "t") == (200, "queue")
        server.run()
        assert look_up(server, "t") == (200, "done")
