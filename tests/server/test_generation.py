"""Generations of the whole server: what they say, how they end, and what becomes of those that do not go their way."""

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ErrorKind, ServiceError
from core.simulation import CostModel
from core.types import Cancel, FinishReason, Pause, Submit
from server.generation import KEEP_ALIVE_S, OFFLOAD_BYTES, TABLE, Event, Generation, State
from server.observing.timing import Stage
from server.output import StreamedOutput, WholeOutput
from server.prompts import IDENTITY
from tests.server.inline_ledger import rows
from tests.server.simulated_engine import Schedule, at_once, late_by, token_by_token
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    SimulatedServer,
    answers,
    chat,
    completion,
    refusal_of,
    request,
    serving,
    the_answer,
)

# The table


def test_every_state_has_its_row_and_every_action_is_a_method() -> None:
    cells = [cell for row in TABLE.values() for cell in row.values()]
    assert set(TABLE) == set(State)
    assert all(action is None or callable(getattr(Generation, action)) for _, action in cells)
    assert {next_state for next_state, _ in TABLE[State.DONE].values()} == {State.DONE}
    assert all(Event.CLOSED in row for row in TABLE.values())


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.PREPARING, Event.PREPARED),
        (State.RESERVING, Event.RESERVED),
        (State.QUEUED, Event.FIRST_TOKEN),
        (State.STREAMING, Event.ENGINE_DONE),
        (State.SETTLING, Event.SETTLED),
    ],
)
@pytest.mark.parametrize("fields", [{}, STREAM])
def test_event_that_its_state_does_not_know_is_logged_and_ends_that_generation(
    server: SimulatedServer,
    state: State,
    event: Event,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(TABLE[state], event)
        transport = server.send(chat(**fields))
        server.run()
        (answer,) = answers(bytes(transport.received))
    assert answer.status == 500 or not answer.is_complete
    assert f"{event} in {state}" in caplog.text
    server.check_idle()
    assert server.ask(chat()).status == 200


def leave(server: SimulatedServer, data: bytes) -> None:
    """Have a client reset its connection once its stream has begun."""
    transport = server.send(data)
    server.run_until(lambda: bool(transport.received))
    transport.reset()
    server.run()


def generations_alive() -> list[object]:
    return [one for one in gc.get_objects() if type(one) in (Generation, StreamedOutput, WholeOutput)]


@pytest.mark.parametrize(
    "happens",
    [
        lambda server: server.ask(completion(max_tokens=5)),
        lambda server: server.ask(completion(max_tokens=5, logprobs=3, n=2, **STREAM)),
        lambda server: server.ask(chat(guided_choice=["a", "b"])),
        lambda server: server.ask(chat(guided_regex="(")),
        lambda server: server.ask(chat(temperature=9)),
        lambda server: leave(server, completion(max_tokens=90, **STREAM)),
        lambda server: server.ask(chat(max_tokens=100, deadlines={"total_ms": 300})),
        lambda server: server.ask(chat(max_tokens=100, deadlines={"total_ms": 300}, **STREAM)),
    ],
    ids=["whole", "streamed", "constrained", "refused constraint", "refused", "client left", "late", "late stream"],
)
@pytest.mark.parametrize("has_ledger", [False, True], ids=["", "ledger"])
def test_what_a_generation_held_is_free_once_it_is_over(
    has_ledger: bool, happens: Callable[[SimulatedServer], object], tmp_path: Path
) -> None:
    """Without the garbage collector, which looks at old objects seldom."""
    with serving(ledger=tmp_path / "ledger.db" if has_ledger else None) as server:
        gc.collect()
        gc.disable()
        try:
            others = set(map(id, generations_alive()))  # of servers that other tests of this process have left
            happens(server)
            alive = [one for one in generations_alive() if id(one) not in others]
        finally:
            gc.enable()
        assert alive == []


# What is said


@pytest.mark.parametrize("lines", [(), ("Idempotency-Key: once",)])
def test_ollamas_body_with_nothing_to_answer_loads_or_unloads_and_the_only_model_stays(
    lines: tuple[str, ...], tmp_path: Path
) -> None:
    empty = {"role": "assistant", "content": ""}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("generate", {}, {"response": "", "done_reason": "load"}),
        ("generate", {"prompt": "", "keep_alive": 0}, {"response": "", "done_reason": "unload"}),
        ("chat", {"messages": [], "keep_alive": "5m"}, {"message": empty, "done_reason": "load"}),
        ("chat", {"keep_alive": "0s"}, {"message": empty, "done_reason": "unload"}),
    ]
    for path, fields, said in cases:
        with serving(ledger=tmp_path / "ledger.db") as server:
            answer = server.ask(request("POST", f"/api/{path}", {"model": "small:latest"} | fields, *lines))
            told = answer.json
            assert (answer.status, told.pop("created_at")[-1]) == (200, "Z")
            assert told == {"model": "small", "done": True} | said
            assert server.posted == []
            server.check_idle()
            bad = server.ask(request("POST", f"/api/{path}", {"keep_alive": "soon"}))
            assert (bad.status, "keep_alive" in bad.json["error"]) == (400, True)
    assert rows(tmp_path / "ledger.db") == []


def ask(data: bytes, schedule: Schedule = at_once) -> Any:
    with serving(schedule=schedule) as server:
        return server.ask(data)


def essence(answer: Any, num_choices: int = 1) -> list[Any]:
    """What does not depend on how the answer is sent."""
    return [(answer.text(i), answer.finish_reason(i)) for i in range(num_choices)] + [answer.usage]


@pytest.mark.parametrize("make", [chat, completion])
def test_streamed_and_whole_say_the_same(make: Any) -> None:
    whole = ask(make(n=3))
    streamed = ask(make(n=3, **STREAM))
    assert (whole.status, streamed.status) == (200, 200)
    assert whole.headers["cache-control"] == streamed.headers["cache-control"] == "no-store"
    assert streamed.headers["x-accel-buffering"] == "no"
    assert streamed.events[-1] == "[DONE]"
    assert essence(whole, 3) == essence(streamed, 3)
    assert len({whole.text(i) for i in range(3)}) == 3
    assert whole.usage["completion_tokens"] == 36


def test_responses_stream_ends_with_the_whole_answer() -> None:
    body = {"model": "small", "input": "step", "seed": 7, "max_output_tokens": 12, "ignore_eos": True}
    whole = ask(request("POST", "/v1/responses", body)).json
    *events, last = ask(request("POST", "/v1/responses", body | {"stream": True})).events
    assert [event["sequence_number"] for event in (*events, last)] == list(range(len(events) + 1))
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert last["response"]["usage"] == whole["usage"]
    assert whole["usage"]["output_tokens"] == 12


def test_several_prompts_are_answered_in_their_order() -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 20]
    together = ask(completion(prompt=prompts, n=2))
    for i, prompt in enumerate(prompts):
        alone = ask(completion(prompt=prompt, n=2))
        assert essence(together, 6)[2 * i : 2 * i + 2] == essence(alone, 2)[:2]
    assert together.usage["prompt_tokens"] == 25
    assert essence(together, 6) == essence(ask(completion(prompt=prompts, n=2, **STREAM)), 6)


def stop_within(text: str) -> str:
    """Three characters from the middle, of which the first stands there only."""
    return next(text[i : i + 3] for i in range(len(text) // 2, len(text)) if text.count(text[i : i + 3]) == 1)


SCHEDULES = [at_once, token_by_token, late_by(0.005), late_by(0.035), late_by(1.0)]


@pytest.mark.parametrize("fields", [{}, STREAM])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stop_string_cuts_text_and_usage_whatever_the_timing(schedule: Schedule, fields: dict[str, Any]) -> None:
    text = ask(chat(max_tokens=40)).text()
    stop = stop_within(text)
    answer = ask(chat(max_tokens=40, stop=[stop, "never said"], **fields), schedule)
    assert answer.text() == text[: text.index(stop)]
    assert answer.finish_reason() == "stop"
    assert answer.usage == ask(chat(max_tokens=40, stop=stop)).usage
    assert answer.usage["completion_tokens"] < 40


def test_stop_id_counts_in_the_usage_and_says_nothing() -> None:
    ids = ask(completion(return_token_ids=True)).json["choices"][0]["token_ids"]
    stop_id = next(one for one in ids[5:] if one not in ids[:5])
    num_before = ids.index(stop_id)
    answer = ask(completion(stop_token_ids=[stop_id], **STREAM))
    assert answer.finish_reason() == "stop"
    assert answer.text() == TOKENIZER.decode(ids[:num_before])
    assert answer.usage["completion_tokens"] == num_before + 1


@pytest.mark.parametrize("schedule", [at_once, token_by_token])
def test_logprobs_stand_beside_every_token_of_the_text(schedule: Schedule) -> None:
    text = ask(chat(max_tokens=40)).text()
    fields = {"max_tokens": 40, "stop": stop_within(text), "logprobs": True, "top_logprobs": 2}
    whole = ask(chat(**fields), schedule)
    entries = whole.json["choices"][0]["logprobs"]["content"]
    assert len(entries) == whole.usage["completion_tokens"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    streamed = ask(chat(**fields, **STREAM), schedule)
    chunks = [c for e in streamed.events[:-1] for c in e["choices"] if c["logprobs"]]
    assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == entries
    assert streamed.text() == whole.text()


def test_timings_have_what_repeats_the_answer() -> None:
    def answer(seed: int) -> Any:
        return ask(chat(timings=True, temperature=1.0, max_tokens=8, seed=seed)).json

    first, other = answer(-1), answer(-1)
    again = answer(first["timings"]["seed"])
    assert first["timings"]["fingerprint"] == first["system_fingerprint"]
    assert other["timings"]["seed"] != again["timings"]["seed"] == first["timings"]["seed"]
    assert again["choices"] == first["choices"] != other["choices"]


def test_timings_are_told_when_asked_for() -> None:
    answer = ask(chat(timings=True))
    told = answer.json["timings"]
    assert told["total"] > told["ttft"] >= told["prefill"] > 0
    stages = dict(stage.split(";")[:2] for stage in answer.headers["server-timing"].split(", "))
    assert {name: float(ms.removeprefix("dur=")) for name, ms in stages.items()}.items() <= told.items()
    others = {"ttft", "prefill_chunks", "cached_tokens", "seed", "fingerprint", *IDENTITY}
    assert told.keys() - stages.keys() == others


def test_silent_stream_gets_its_head_and_a_comment_every_15_seconds(server: SimulatedServer) -> None:
    other = server.send(b"")
    transport = server.send(chat(**STREAM))
    server.loop.advance(KEEP_ALIVE_S - 0.1)  # the engine is not stepped
    assert not transport.received
    server.loop.advance(0.2)
    (begun,) = answers(bytes(transport.received))
    assert begun.status == 200
    assert begun.events[-1] == ": keep-alive"
    server.step()  # two chunks of the prompt, then the first token
    server.step()
    server.loop.advance(KEEP_ALIVE_S - 0.1)
    assert bytes(transport.received).count(b": keep-alive") == 1
    server.loop.advance(0.2)
    assert bytes(transport.received).count(b": keep-alive") == 2
    server.run()
    (answer,) = answers(bytes(transport.received))
    assert answer.text() == ask(chat()).text()
    num_bytes = len(transport.received)
    server.loop.advance(60)
    assert len(transport.received) == num_bytes
    assert not other.received


def slow_reader(server: SimulatedServer) -> Any:
    """A stream whose reader has stopped reading until the engine was told to pause it."""
    transport = server.send(chat(max_tokens=150, n=4, **STREAM), peer_reads=False)
    server.run()
    assert [type(message) for message in server.posted[1:]] == [Pause]
    return transport


def test_paused_stream_gets_no_keep_alives(server: SimulatedServer) -> None:
    transport = slow_reader(server)
    server.loop.advance(29)
    assert b"keep-alive" not in b"".join(transport.writes)


def test_delete_of_a_paused_stream_ends_it(server: SimulatedServer) -> None:
    transport = slow_reader(server)
    assert server.ask(request("DELETE", "/v1/requests/chatcmpl-r1")).status == 200
    transport.peer_read()
    (answer,) = answers(bytes(transport.received))
    assert answer.events[-1]["error"]["code"] == "request_cancelled"
    server.check_idle()


def test_end_that_the_wire_has_no_word_for_is_told_as_an_error(server: SimulatedServer) -> None:
    streamed, whole = server.send(chat(**STREAM)), server.send(chat())
    for _ in range(6):
        server.step()
    server.shut_engine_down(FinishReason.DEADLINE, None)
    (broken,) = answers(bytes(streamed.received))
    assert broken.text()
    assert broken.events[-1]["error"]["code"] == "deadline_exceeded"
    (refused,) = answers(bytes(whole.received))
    assert (refused.status, refused.json["error"]["code"]) == (504, "deadline_exceeded")


def test_engine_refusal_before_the_first_token_keeps_its_status(server: SimulatedServer) -> None:
    transport = server.send(chat(**STREAM))
    server.shut_engine_down(FinishReason.ERROR, "No more.")
    (answer,) = answers(bytes(transport.received))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "No more.")


STAGES = "head auth quota body offload validate template tokenize queue prefill first_token"


@pytest.mark.parametrize(
    ("fields", "rest"), [({}, "decode detokenize settle"), (STREAM, "first_flush decode detokenize settle")]
)
def test_every_stage_of_a_generation_is_told_and_together_they_are_its_time(fields: dict[str, Any], rest: str) -> None:
    answer = ask(chat(timings=True, **fields), late_by(0.005))
    told = (answer.events[-2] if fields else answer.json)["timings"]
    stages = list(told)[: list(told).index("total")]
    assert stages == [*STAGES.split(), *rest.split()]
    assert sum(told[stage] for stage in stages) == pytest.approx(told["total"], abs=0.001 * len(stages))
    assert told["first_token"] == 5.0  # its news were on their way for so long
    assert (told["prefill_chunks"], told["cached_tokens"]) == (2, 0)


def test_stream_is_decoding_as_soon_as_its_first_byte_is_out(server: SimulatedServer) -> None:
    transport = server.send(chat(**STREAM))
    server.run_until(lambda: b"data:" in transport.received)
    (exchange,) = server.app.exchanges.values()
    assert exchange.timings.stage is Stage.DECODE


def test_head_that_a_keep_alive_has_opened_leaves_nothing_to_flush_first() -> None:
    server = SimulatedServer(cost=CostModel(fixed_s=KEEP_ALIVE_S + 1.0))
    answer = server.ask(chat(timings=True, max_tokens=2, **STREAM))
    told = answer.events[-2]["timings"]
    assert "first_flush" not in told
    assert told["decode"] > 1000 * KEEP_ALIVE_S
    server.close()


# Clients that leave


@pytest.mark.parametrize("data", [chat(max_tokens=3), chat(max_tokens=3, **STREAM)])
def test_client_may_leave_before_any_byte_of_its_request(data: bytes) -> None:
    for num_bytes in range(len(data)):
        with serving() as server:
            transport = server.send(data[:num_bytes])
            transport.feed_eof()
            server.run()
            server.check_idle()
            assert not [message for message in server.posted if isinstance(message, Submit)]


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_client_may_leave_after_any_byte_of_its_answer(fields: dict[str, Any]) -> None:
    data = chat(max_tokens=4, **fields)
    with serving() as server:
        transport = server.send(data)
        server.run()
        num_bytes = len(transport.received)
    for num_read in (*range(250), *range(250, num_bytes + 1, 13)):
        with serving() as server:
            transport = server.send(data, peer_reads=False)
            while server.step():
                transport.peer_read(max(0, num_read - len(transport.received)))
                if len(transport.received) == num_read:
                    transport.reset()
            server.run()
            server.check_idle()


def test_client_that_leaves_while_its_prompt_is_tokenized_elsewhere_is_not_submitted(server: SimulatedServer) -> None:
    gate: asyncio.Future[None] = server.loop.create_future()

    async def offload(work: Callable[[], Any]) -> Any:
        await gate
        return work()

    server.generations.offload = offload
    transport = server.send(completion(prompt="x", stop="y" * 1024, user="z" * OFFLOAD_BYTES))
    assert not server.posted
    transport.feed_eof()
    server.loop.settle()
    assert server.network.listener.num_handlers == 0
    assert not server.posted


def test_task_that_is_cancelled_lets_go_of_its_request(server: SimulatedServer) -> None:
    server.send(chat(**STREAM))
    for _ in range(4):
        server.step()
    server.loop.run(_drain_at_once(server))
    server.run()
    server.check_idle()


async def _drain_at_once(server: SimulatedServer) -> None:
    """As Listener.drain does with handlers that outlive everything."""
    tasks = [task for task in asyncio.all_tasks(server.loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# DELETE


@pytest.mark.parametrize(("num_steps", "fields"), [*((num, {}) for num in range(6)), (0, STREAM)])
@pytest.mark.parametrize("prefix", ["", "chatcmpl-"])
def test_deleted_answer_of_which_nothing_is_out_is_a_499(
    server: SimulatedServer, num_steps: int, fields: dict[str, Any], prefix: str
) -> None:
    transport = server.send(chat(**fields))
    for _ in range(num_steps):
        server.step()
    deleted = server.send(request("DELETE", f"/v1/requests/{prefix}r1"))
    assert the_answer(deleted).status == 200
    server.step()
    server.check_idle()
    answer = the_answer(transport)
    assert (answer.status, answer.json["error"]["code"]) == (499, "request_cancelled")
    again = server.ask(request("DELETE", "/v1/requests/r1"))
    assert (again.status, again.json["error"]["code"]) == (404, "request_not_found")


def test_deleted_stream_keeps_what_was_said_and_ends_with_an_error_event(server: SimulatedServer) -> None:
    transport = server.send(chat(max_tokens=100, **STREAM))
    for _ in range(8):
        server.step()
    server.send(request("DELETE", "/v1/requests/r1"))
    answer = the_answer(transport)
    assert answer.is_complete
    assert answer.events[-1]["error"]["code"] == "request_cancelled"
    server.step()
    server.check_idle()
    assert answer.text()
    assert ask(chat(max_tokens=100)).text().startswith(answer.text())
    (kept,) = [message.num_tokens_kept for message in server.posted if isinstance(message, Cancel)]
    assert server.metrics.num_generation_tokens == kept == 7


@pytest.mark.parametrize("asked", [{}, {"n": 3}, {"prompt": ["One", "Two"]}])
@pytest.mark.parametrize("num_steps", [0, 8])
def test_second_delete_finds_no_request_though_the_engine_has_not_heard_of_the_first(
    server: SimulatedServer, asked: dict[str, Any], num_steps: int
) -> None:
    transport = server.send(completion(max_tokens=100, **asked, **STREAM))
    for _ in range(num_steps):
        server.step()
    delete = request("DELETE", "/v1/requests/r1")
    assert [the_answer(server.send(delete)).status for _ in range(3)] == [200, 404, 404]
    server.run()
    assert b"request_cancelled" in transport.received


# The queue


def test_full_queue_refuses_before_the_body_is_read() -> None:
    with serving(max_requests=2) as server:
        first = [server.send(chat()), server.send(chat(**STREAM))]
        refused = server.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 90000\r\n\r\n")
        answer = the_answer(refused)
        assert (answer.status, answer.json["error"]["code"]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        server.run()
        assert [the_answer(transport).status for transport in first] == [200, 200]
        assert server.ask(chat()).status == 200


def test_bodies_that_come_together_do_not_pass_the_queues_limit() -> None:
    data = chat()
    with serving(max_requests=2) as server:
        transports = [server.send(data[:-1]) for _ in range(5)]
        for transport in transports:
            transport.feed(data[-1:])
        server.run()
        assert sorted(the_answer(transport).status for transport in transports) == [200, 200, 503, 503, 503]


def test_all_that_is_in_progress_when_the_process_ends_is_told_so() -> None:
    """A stream by an event, a whole answer and a body that comes later by a status."""
    with serving() as server:
        streamed, whole, uploading = server.send(chat(**STREAM)), server.send(chat()), server.send(chat(**STREAM)[:-1])
        for _ in range(4):
            server.step()
        server.generations.fail_all(ServiceError(ErrorKind.UNAVAILABLE, "Ending.", "draining", retry_after_s=5))
        uploading.feed(chat(**STREAM)[-1:])
        server.run()
        assert len([message for message in server.posted if isinstance(message, Submit)]) == 2
        assert the_answer(streamed).events[-1]["error"]["code"] == "draining"
        for answer in (the_answer(whole), the_answer(uploading)):
            assert (refusal_of(answer), answer.headers["retry-after"]) == ((503, "draining"), "5")


def test_cancel_reasons_tell_the_engine_who_ended_it(server: SimulatedServer) -> None:
    text = ask(completion(max_tokens=40)).text()
    server.ask(completion(max_tokens=40, stop=text[5:8]))
    transport = server.send(chat(**STREAM))
    server.step()
    transport.feed_eof()
    server.run()
    reasons = [message.reason for message in server.posted if isinstance(message, Cancel)]
    assert reasons == [FinishReason.STOP, FinishReason.CANCELLED]
