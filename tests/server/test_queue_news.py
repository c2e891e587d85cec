"""Streams that tell where they stand in the queue, and how far their prompt is."""

import json
from typing import Any

import pytest

from core.plan import RunnerLimits
from core.types import Cancel
from server.gate.admission import Place, QueueView
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    chat,
    completion,
    request,
    serving,
    the_answer,
)

ONE_AT_A_TIME = RunnerLimits(64, 4, 1, 16, 200, TOKENIZER.vocab_size)
NEWS: dict[str, Any] = {"timings": {"queue": True}, **STREAM}


def told(answer: Answer, kind: str) -> list[dict[str, int]]:
    """What the comments of a kind say."""
    comments = [event for event in answer.events if isinstance(event, str) and event.startswith(f": {kind} ")]
    return [json.loads(comment.removeprefix(f": {kind} ")) for comment in comments]


def without_comments(answer: Answer) -> bytes:
    blocks = answer.body.split(b"\n\n")
    return b"\n\n".join(block for block in blocks if not block.startswith(b":"))


def test_stream_tells_its_position_and_its_wait_and_then_its_prefill() -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        server.ask(completion(max_tokens=30))  # the cost model learns
        for _ in range(3):
            server.send(completion(max_tokens=40))
            server.step()
        asked = server.send(completion(prompt=[5] * 190, max_tokens=2, **NEWS))
        server.run()
        answer = the_answer(asked)
        positions = [news["position"] for news in told(answer, "queue")]
        assert positions[0] == 2
        assert positions == sorted(positions, reverse=True)
        assert set(positions) == {0, 1, 2}
        assert all(news["expected_ms"] > 0 for news in told(answer, "queue"))
        done = [news["tokens"] for news in told(answer, "prefill")]
        assert done == sorted(set(done))
        assert done
        assert {news["of"] for news in told(answer, "prefill")} == {190}
        assert answer.finish_reason() == "length"


def test_news_come_at_most_ten_times_a_second_and_end_with_the_first_token() -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        server.ask(completion(max_tokens=30))  # the cost model learns
        for _ in range(4):
            server.send(completion(max_tokens=8))
            server.step()
        began_s = server.loop.time()
        asked = server.send(completion(max_tokens=12, **NEWS))
        server.run_until(lambda: b'"text"' in asked.received)
        num_tenths = round((server.loop.time() - began_s) * 10)
        server.run()
        answer = the_answer(asked)
        num_told = len(told(answer, "queue"))
        assert 3 <= num_told <= num_tenths
        assert not any(event.startswith(": queue") for event in answer.events[num_told:] if isinstance(event, str))


@pytest.mark.parametrize("make", [chat, completion])
def test_events_are_the_same_with_news_and_without(make: Any) -> None:
    bodies = []
    for fields in (STREAM, NEWS | {"timings": {"queue": True}}):
        server = SimulatedServer(limits=ONE_AT_A_TIME)
        server.send(completion(max_tokens=60))
        server.step()
        asked = server.send(make(**fields))
        server.run()
        bodies.append(the_answer(asked))
        server.close()
    assert not told(bodies[0], "queue")
    assert told(bodies[1], "queue")
    last = json.loads(without_comments(bodies[1]).split(b"\n\n")[-3].removeprefix(b"data: "))
    assert last.pop("timings")  # {} or {"queue": ...} asks for what true asks for
    assert bodies[0].text() == bodies[1].text()
    assert len(bodies[0].events) == len(bodies[1].events) - len(told(bodies[1], "queue"))


def test_what_has_been_told_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        views = iter([QueueView(2, 1.5), QueueView(2, 1.5), QueueView(1, 1.5), QueueView(1, 1.5), QueueView(1, 0.5)])
        monkeypatch.setattr(Place, "view", lambda place: next(views, None))
        server.send(completion(max_tokens=80))
        server.step()
        asked = server.send(completion(prompt=[5] * 40, **NEWS))
        server.run()
        assert told(the_answer(asked), "queue") == [
            {"position": 2, "expected_ms": 1500},
            {"position": 1, "expected_ms": 1500},
            {"position": 1, "expected_ms": 500},
        ]


def test_who_need_not_wait_and_who_does_not_stream_are_told_nothing(server: SimulatedServer) -> None:
    assert not told(server.ask(completion(**NEWS)), "queue")
    assert server.ask(completion(timings={"queue": True})).json["timings"]


def test_client_that_leaves_while_it_is_told_takes_the_news_with_it() -> None:
    with serving(limits=ONE_AT_A_TIME) as server:
        server.send(completion(max_tokens=60))
        server.step()
        asked = server.send(completion(**NEWS))
        server.run_until(lambda: b": queue" in asked.received)
        asked.feed_eof()
        server.loop.settle()
        num_told = bytes(asked.received).count(b": queue")
        server.run()
        assert bytes(asked.received).count(b": queue") == num_told
        assert [message for message in server.posted if isinstance(message, Cancel)]


@pytest.mark.parametrize("timings", [{"queue": 1}, {"prefill": True}, "queue"])
def test_what_timings_does_not_know_is_refused(server: SimulatedServer, timings: Any) -> None:
    answer = server.ask(completion(timings=timings, **STREAM))
    assert answer.status == 400
    assert answer.json["error"]["param"].startswith("timings")
    body = {"model": "small", "input": "step", "max_output_tokens": 2, "ignore_eos": True, "timings": {"queue": False}}
    assert server.ask(request("POST", "/v1/responses", body)).status == 200
