"""Deadlines on the whole simulated server: what is told, what is kept, and that one cancel path frees the blocks."""

from collections.abc import Callable
from typing import Any

import pytest

from core.plan import RunnerLimits
from core.types import Cancel, FinishReason, Submit
from server.gate.tenants import Deadlines, DeadlineTable
from tests.server.http2_client import Http2Client, fields
from tests.server.simulated_server import (
    COST,
    STREAM,
    TOKENIZER,
    SimulatedServer,
    as_caller,
    chat,
    completion,
    keyed_tenant,
    request,
    serving,
    the_answer,
)

POST = fields(method="POST", path="/v1/completions")
ONE_AT_A_TIME = RunnerLimits(64, 4, 1, 16, 200, TOKENIZER.vocab_size)
STEP_S = COST.fixed_s + COST.token_s  # of one sequence that decodes


def send_http1(server: SimulatedServer, data: bytes) -> object:
    return server.send(data)


def send_http2(server: SimulatedServer, data: bytes) -> object:
    client = Http2Client(server.network)
    client.request(POST, data.partition(b"\r\n\r\n")[2])
    return client


def cancels(server: SimulatedServer) -> list[Cancel]:
    return [message for message in server.posted if isinstance(message, Cancel)]


@pytest.mark.parametrize("how", [{}, STREAM])
def test_first_token_that_does_not_come_in_time_is_a_504(how: dict[str, Any]) -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        first = server.send(completion(max_tokens=40))
        server.step()
        late = server.send(completion(deadlines={"ttft_ms": 100}, **how))
        server.run_for(0.1 + 2 * STEP_S)
        answer = the_answer(late)
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
        assert "within 0.1 s" in answer.json["error"]["message"]
        assert server.stats.num_waiting == 0
        assert [message.reason for message in cancels(server)] == [FinishReason.DEADLINE]
        server.run()
        assert the_answer(first).status == 200


def test_stream_that_takes_too_long_keeps_what_was_said_and_ends_with_an_error_event(server: SimulatedServer) -> None:
    alone = server.ask(chat(max_tokens=100)).text()
    answer = server.ask(chat(max_tokens=100, deadlines={"total_ms": 300}, **STREAM))
    assert (answer.status, answer.is_complete) == (200, True)
    assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
    assert answer.text()
    assert alone.startswith(answer.text())
    (cancel,) = cancels(server)
    assert cancel.reason is FinishReason.DEADLINE
    assert cancel.num_tokens_kept is not None
    assert 10 < cancel.num_tokens_kept < 100


def test_gap_between_tokens_ends_the_stream(server: SimulatedServer) -> None:
    answer = server.ask(chat(deadlines={"inter_token_ms": 500 * STEP_S}, **STREAM))
    assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
    assert "next token" in answer.events[-1]["error"]["message"]
    assert len(answer.text()) > 0
    assert server.ask(chat(deadlines={"inter_token_ms": 1500 * STEP_S}, **STREAM)).finish_reason() == "length"


@pytest.mark.parametrize("send", [send_http1, send_http2])
@pytest.mark.parametrize("fields", [{"deadlines": {"total_ms": 305}}, {"deadlines": {"ttft_ms": 15}}])
def test_blocks_are_free_with_the_step_that_runs_when_the_deadline_passes(
    server: SimulatedServer, fields: dict[str, Any], send: Callable[[SimulatedServer, bytes], object]
) -> None:
    send(server, completion(prompt=[5] * 40, n=2, max_tokens=100, **STREAM, **fields))
    while not cancels(server):
        assert server.step()
    server.check_idle()
    assert {message.reason for message in cancels(server)} == {FinishReason.DEADLINE}


def test_waiting_request_has_the_slot_in_the_next_plan() -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        server.send(completion(max_tokens=100, deadlines={"total_ms": 105}, **STREAM))
        server.step()
        server.send(completion(prompt=[6], max_tokens=3, **STREAM))
        while not cancels(server):
            server.step()
        server.step()
        assert server.delivered[-1].request_ids == ["r2"]


def test_time_that_the_reader_takes_is_not_counted_between_tokens() -> None:
    limits = RunnerLimits(600, 4, 1, 64, 2000, TOKENIZER.vocab_size)
    with serving(limits=limits) as server:
        gap_ms = 1500 * STEP_S
        data = completion(max_tokens=1900, deadlines={"inter_token_ms": gap_ms}, **STREAM)
        transport = server.send(data, peer_reads=False)
        server.run_until(lambda: server.stats.num_paused == 1)
        server.run_for(20 * gap_ms / 1e3)
        assert not cancels(server)
        transport.peer_reads = True
        transport.peer_read()
        server.run()
        assert the_answer(transport).finish_reason() == "length"


def test_time_that_the_reader_takes_is_counted_in_the_whole_and_is_no_failure_of_ours() -> None:
    limits = RunnerLimits(600, 4, 1, 64, 2000, TOKENIZER.vocab_size)
    with serving(limits=limits, deadlines=Deadlines(total_s=25)) as server:
        data = completion(max_tokens=1900, **STREAM)
        transport = server.send(data, peer_reads=False)
        server.run_until(lambda: bool(cancels(server)))
        assert cancels(server)[0].reason is FinishReason.DEADLINE
        transport.peer_reads = True
        transport.peer_read()
        server.run()
        assert the_answer(transport).events[-1]["error"]["code"] == "deadline_exceeded"
        assert server.metrics.slo.states(0, 0)["error_rate"].value == 0.0


def test_choice_that_has_ended_owes_no_token(server: SimulatedServer) -> None:
    texts = [server.ask(completion(max_tokens=60, n=2)).text(i) for i in range(2)]
    stop = next(text for text in texts[0][3:] if text not in texts[1])
    answer = server.ask(
        completion(max_tokens=60, n=2, stop=stop, deadlines={"inter_token_ms": 1500 * STEP_S}, **STREAM)
    )
    assert [answer.finish_reason(i) for i in range(2)] == ["stop", "length"]


def test_choice_that_waits_for_another_tenants_turn_is_no_gap_while_its_siblings_go_on() -> None:
    limits = RunnerLimits(4000, 4, 4, 64, 2000, TOKENIZER.vocab_size)
    with serving(limits=limits, tenants=(keyed_tenant("one"), keyed_tenant("many"))) as server:
        one = server.send(as_caller(completion(max_tokens=1900, **STREAM), "one"))
        server.run_until(lambda: bool(one.received))
        fields = {"n": 4, "max_tokens": 600, "deadlines": {"inter_token_ms": 50_000 * STEP_S}, **STREAM}
        many = server.send(as_caller(completion(**fields), "many"))
        server.run()
        assert [the_answer(many).finish_reason(i) for i in range(4)] == ["length"] * 4
        assert the_answer(one).finish_reason() == "length"


def test_request_asks_for_less_than_the_server_gives_never_for_more() -> None:
    with serving(deadlines=Deadlines(total_s=0.3)) as server:
        for asked, is_own in ((None, False), ({"total_ms": 10_000}, False), ({}, False), ({"total_ms": 200}, True)):
            answer = server.ask(chat(max_tokens=100, deadlines=asked))
            assert answer.status == 504
            assert answer.headers.get("x-should-retry") == ("false" if is_own else None)
        assert server.ask(chat(max_tokens=3)).status == 200


def test_tenants_deadlines_stand_in_place_of_the_servers() -> None:
    tenant = keyed_tenant("acme", deadlines=DeadlineTable(total_ms=60_000, ttft_ms=5000))
    with serving(deadlines=Deadlines(total_s=0.3), tenants=(tenant,)) as server:
        assert server.ask(as_caller(chat(max_tokens=100), "acme")).status == 200
        (submitted,) = [message.request for message in server.posted if isinstance(message, Submit)]
        assert submitted.deadline_s == submitted.arrival_s + 5


@pytest.mark.parametrize(
    ("asked", "error_rate"),
    [({}, 1.0), ({"total_ms": 200}, 0.0), ({"total_ms": 300}, 0.0), ({"total_ms": 400}, 1.0), ({"ttft_ms": 200}, 1.0)],
)
@pytest.mark.parametrize("how", [{}, STREAM])
@pytest.mark.parametrize("is_tenants", [False, True])
def test_only_a_deadline_that_the_client_did_not_ask_for_is_our_failure(
    asked: dict[str, int], error_rate: float, how: dict[str, Any], is_tenants: bool
) -> None:
    table = DeadlineTable(total_ms=300) if is_tenants else DeadlineTable()
    tenant = keyed_tenant("acme", deadlines=table)
    ours = Deadlines(total_s=9 if is_tenants else 0.3)
    with serving(deadlines=ours, tenants=(tenant,)) as server:
        data = completion(max_tokens=100, deadlines=asked, **how)
        answer = server.ask(as_caller(data, "acme"))
        error = answer.events[-1]["error"] if how else answer.json["error"]
        assert error["code"] == "deadline_exceeded"
        assert server.metrics.slo.states(0, 0)["error_rate"].value == error_rate


def test_only_what_a_request_or_its_tenant_asks_for_moves_it_in_the_queue() -> None:
    with serving(deadlines=Deadlines(ttft_s=9)) as server:
        server.ask(chat())
        server.ask(chat(deadlines={"ttft_ms": 500}))
        due = [message.request.deadline_s for message in server.posted if isinstance(message, Submit)]
        assert due[0] is None
        assert due[1] is not None


def test_deadlines_are_the_same_on_responses() -> None:
    body = {"model": "small", "input": "step", "max_output_tokens": 100, "ignore_eos": True}
    with serving() as server:
        data = request("POST", "/v1/responses", body | {"deadlines": {"total_ms": 300}, "stream": True})
        last = server.ask(data).events[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "not complete after 0.3 s" in last["response"]["error"]["message"]
