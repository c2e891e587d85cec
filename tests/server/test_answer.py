"""Answers of the whole server: texts, ends, usage, keep-alives, slow readers."""

import json
from typing import Any

import pytest

from core.simulation import CostModel
from core.types import Cancel, FinishReason, Pause, Resume
from server.api.chat import ChatStream, ChatSurface
from server.generation import KEEP_ALIVE_S
from server.observing.timing import Stage
from tests.server.simulated_engine import Schedule, at_once, late_by, token_by_token
from tests.server.simulated_server import (
    COST,
    STREAM,
    TOKENIZER,
    SimulatedServer,
    answers,
    chat,
    completion,
    request,
)


def ask(data: bytes, schedule: Schedule = at_once) -> Any:
    server = SimulatedServer(schedule=schedule)
    answer = server.ask(data)
    server.close()
    return answer


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
    last = ask(request("POST", "/v1/responses", body | {"stream": True})).events[-1]
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


def test_held_back_text_comes_when_no_stop_string_follows() -> None:
    text = ask(chat()).text()
    answer = ask(chat(stop=text[-3:] + "!", **STREAM))
    assert answer.text() == text
    assert answer.finish_reason() == "length"


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


def test_timings_are_told_when_asked_for() -> None:
    answer = ask(chat(timings=True))
    told = answer.json["timings"]
    assert told["total"] > told["ttft"] >= told["prefill"] > 0
    stages = dict(stage.split(";")[:2] for stage in answer.headers["server-timing"].split(", "))
    assert {name: float(ms.removeprefix("dur=")) for name, ms in stages.items()}.items() <= told.items()
    assert told.keys() - stages.keys() == {"ttft", "prefill_chunks", "cached_tokens"}


def test_silent_stream_gets_its_head_and_a_comment_every_15_seconds() -> None:
    server = SimulatedServer()
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
    server.close()


def test_whole_answer_is_not_touched_by_silence() -> None:
    server = SimulatedServer()
    transport = server.send(chat())
    server.loop.advance(100)
    assert not transport.received
    server.run()
    assert answers(bytes(transport.received))[0].status == 200
    server.close()


def slow_reader(server: SimulatedServer) -> Any:
    """A stream whose reader has stopped reading until the engine was told to pause it."""
    transport = server.send(chat(max_tokens=150, n=4, **STREAM), peer_reads=False)
    server.run()
    assert [type(message) for message in server.posted[1:]] == [Pause]
    return transport


def test_slow_reader_stops_its_own_decode_and_nobody_elses() -> None:
    server = SimulatedServer()
    transport = slow_reader(server)
    num_generated = server.stats.num_generated_tokens
    assert 0 < num_generated < 600
    assert server.stats.num_paused == 1
    other = server.ask(chat())
    assert other.text() == ask(chat()).text()
    assert server.stats.num_generated_tokens == num_generated + 12
    transport.peer_reads = True
    transport.peer_read()
    server.run()
    assert [type(message) for message in server.posted if isinstance(message, Resume)] == [Resume]
    (answer,) = answers(bytes(transport.received))
    assert essence(answer, 4) == essence(ask(chat(max_tokens=150, n=4)), 4)
    server.close()


def test_reader_that_never_reads_again_is_cancelled() -> None:
    server = SimulatedServer()
    transport = slow_reader(server)
    server.run_for(31)
    assert transport.was_aborted
    assert server.metrics.num_disconnects == 1
    server.check_idle()
    server.close()


def test_paused_stream_gets_no_keep_alives() -> None:
    server = SimulatedServer()
    transport = slow_reader(server)
    server.loop.advance(29)
    assert b"keep-alive" not in b"".join(transport.writes)
    server.close()


def test_delete_of_a_paused_stream_ends_it() -> None:
    server = SimulatedServer()
    transport = slow_reader(server)
    assert server.ask(request("DELETE", "/v1/requests/chatcmpl-r1")).status == 200
    transport.peer_read()
    (answer,) = answers(bytes(transport.received))
    assert answer.events[-1]["error"]["code"] == "request_cancelled"
    server.check_idle()
    server.close()


def test_inter_token_time_is_counted_per_choice() -> None:
    server = SimulatedServer()
    answer = server.ask(chat(n=2, **STREAM))
    pieces = [c for e in answer.events[:-1] for c in e["choices"] if c["delta"].get("content")]
    inter_token, ttft = server.metrics.inter_token, server.metrics.ttft
    assert sum(ttft.counts) == 1
    assert sum(inter_token.counts) == len(pieces) - 2 > 10
    assert inter_token.total / sum(inter_token.counts) >= COST.fixed_s
    server.close()


class FaultyStream(ChatStream):
    """A bug of ours."""

    __slots__ = ()

    def text(self, choice: int, text: str) -> bytes:
        raise ZeroDivisionError


def test_fault_in_writing_one_answer_ends_that_one_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ask(completion()).text()
    monkeypatch.setattr(ChatSurface, "stream_reply", lambda self, call, context: FaultyStream(call, context))
    server = SimulatedServer()
    faulty, sound = server.send(chat(**STREAM)), server.send(completion())
    server.run()
    (broken,) = answers(bytes(faulty.received))
    assert broken.events[-1]["error"]["code"] == "engine_error"
    assert answers(bytes(sound.received))[0].text() == expected
    assert "ZeroDivisionError" in caplog.text
    assert [m.reason for m in server.posted if isinstance(m, Cancel)] == [FinishReason.ERROR]
    server.close()


def test_fault_in_writing_a_whole_answer_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChatSurface, "whole_reply", lambda *args: 1 / 0)
    server = SimulatedServer()
    transport = server.send(chat())
    server.run()
    (answer,) = answers(bytes(transport.received))
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "r1"
    assert "total;dur=" in answer.headers["server-timing"]
    assert server.metrics.responses == {500: 1}
    assert "ZeroDivisionError" in caplog.text
    server.close()


def test_fault_in_writing_the_engines_error_breaks_the_stream_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChatStream, "error", lambda *args: 1 / 0)
    server = SimulatedServer()
    faulty, sound = server.send(chat(**STREAM)), server.send(completion())
    for _ in range(4):
        server.step()
    server.shut_engine_down(FinishReason.ERROR, "gone")
    assert not answers(bytes(faulty.received))[0].is_complete
    assert faulty.is_lost
    assert answers(bytes(sound.received))[0].json["error"]["message"] == "gone"
    assert "ZeroDivisionError" in caplog.text
    server.close()


def test_end_that_the_wire_has_no_word_for_is_told_as_an_error() -> None:
    server = SimulatedServer()
    streamed, whole = server.send(chat(**STREAM)), server.send(chat())
    for _ in range(6):
        server.step()
    server.shut_engine_down(FinishReason.DEADLINE, None)
    (broken,) = answers(bytes(streamed.received))
    assert broken.text()
    assert broken.events[-1]["error"]["code"] == "deadline_exceeded"
    (refused,) = answers(bytes(whole.received))
    assert (refused.status, refused.json["error"]["code"]) == (504, "deadline_exceeded")
    server.close()


def test_engine_refusal_before_the_first_token_keeps_its_status() -> None:
    server = SimulatedServer()
    transport = server.send(chat(**STREAM))
    server.shut_engine_down(FinishReason.ERROR, "No more.")
    (answer,) = answers(bytes(transport.received))
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "No more.")
    server.close()


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


def test_access_line_of_a_stream_is_written_when_its_last_byte_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "server.access")
    server = SimulatedServer()
    transport = server.send(chat(**STREAM))
    server.run_until(lambda: bool(caplog.records))
    assert b"[DONE]" in transport.received
    server.close()
    assert len(caplog.records) == 1


def test_stream_is_decoding_as_soon_as_its_first_byte_is_out() -> None:
    server = SimulatedServer()
    transport = server.send(chat(**STREAM))
    server.run_until(lambda: b"data:" in transport.received)
    (exchange,) = server.app.state.exchanges.values()
    assert exchange.timings.stage is Stage.DECODE
    server.close()


def test_head_that_a_keep_alive_has_opened_leaves_nothing_to_flush_first() -> None:
    server = SimulatedServer(cost=CostModel(fixed_s=KEEP_ALIVE_S + 1.0))
    answer = server.ask(chat(timings=True, max_tokens=2, **STREAM))
    told = answer.events[-2]["timings"]
    assert "first_flush" not in told
    assert told["decode"] > 1000 * KEEP_ALIVE_S
    server.close()
