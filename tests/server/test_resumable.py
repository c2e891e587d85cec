"""Streams whose clients come back: every event once, nobody else's, and none kept for long."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from server import resumable
from server.resumable import GRACE_S
from tests.server.simulated_server import (
    STREAM,
    SimulatedServer,
    answers,
    as_caller,
    chat,
    keyed_tenant,
    refusal_of,
    request,
    serving,
)

RESUMABLE = STREAM | {"resumable": True, "max_tokens": 40}
Transport = Any


def events_of(transport: Transport) -> list[bytes]:
    """The whole events that have come, without comments."""
    body = b"".join(one.body for one in answers(bytes(transport.received)))
    return [one for one in body.split(b"\n\n")[:-1] if not one.startswith(b":")]


@contextmanager
def keeping(**arguments: Any) -> Iterator[SimulatedServer]:
    """A server that at its end keeps nothing more."""
    with serving(**arguments) as server:
        yield server
        server.run_for(GRACE_S + 1)
        assert (server.generations.resumable._num_bytes, len(server.generations.resumable._logs)) == (0, 0)


def id_of(event: bytes) -> int:
    return int(event.partition(b"\n")[0].removeprefix(b"id: "))


def back(request_id: str, last_id: int | None = None, key: str | None = None) -> bytes:
    lines = [] if last_id is None else [f"Last-Event-ID: {last_id}"]
    asked = request("GET", f"/v1/requests/chatcmpl-{request_id}/stream")
    return as_caller(asked, key or "none", *lines)


def whole_stream(**fields: Any) -> list[bytes]:
    """Of a client that stays, without ids."""
    with serving() as server:
        answer = server.ask(chat(**STREAM | {"max_tokens": 40} | fields))
        return answer.body.split(b"\n\n")[:-1]


def read_in_pieces(
    server: SimulatedServer, rng: random.Random, most_pauses: int = 2, **fields: Any
) -> tuple[list[bytes], int]:
    """Of a client that is cut off and comes back, again and again, and may have lost what came last.

    Args:
        most_pauses: of the longest kind, within the time that a stream is kept.

    Returns: what it has read, and how often it was cut off.
    """
    transport, seen, num_cuts = server.send(chat(**RESUMABLE | fields)), list[bytes](), 0
    while True:
        for _ in range(rng.randrange(12)):
            server.step()
        if rng.random() < 0.1:
            server.run()
        new = events_of(transport)
        seen += new[: len(new) if rng.random() < 0.5 else rng.randint(0, len(new))]
        if seen and seen[-1].endswith(b"[DONE]"):
            return seen, num_cuts
        if rng.random() < 0.7:  # otherwise the client comes back before its connection has broken
            rng.choice([transport.reset, transport.feed_eof])()
            server.loop.settle()
        server.run_for(rng.choice([0, 0.05, GRACE_S / most_pauses]))
        transport, num_cuts = server.send(back("r1", id_of(seen[-1]) if seen else None)), num_cuts + 1


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True, "stop": ["e"]}, {"timings": {"queue": True}}])
def test_a_client_that_comes_back_has_every_event_once(fields: dict[str, Any]) -> None:
    is_plain, expected = "timings" not in fields, whole_stream(**fields)
    for seed in range(15):
        with keeping() as server:
            events, _ = read_in_pieces(server, random.Random(seed), **fields)
            assert [id_of(one) for one in events] == list(range(1, len(events) + 1))
            found = [one.partition(b"\n")[2] for one in events]
            assert not is_plain or found == expected
            assert server.metrics.num_disconnects == 0
            server.run_for(GRACE_S + 1)
            assert refusal_of(server.ask(back("r1"), "GET")) == (404, "stream_not_kept")


@pytest.mark.slow
def test_hundreds_of_random_cuts_lose_and_double_nothing() -> None:
    expected, num_cuts, seeds = whole_stream(), 0, itertools.count(1000)
    while num_cuts < 300:
        with keeping() as server:
            events, more = read_in_pieces(server, random.Random(next(seeds)), most_pauses=100)
            assert [one.partition(b"\n")[2] for one in events] == expected
            num_cuts += more


def test_nobody_who_stays_away_is_waited_for_longer() -> None:
    with keeping() as server:
        transport = server.send(chat(**RESUMABLE))
        server.step()
        transport.reset()
        server.loop.settle()
        assert server.generations.active
        server.run_for(GRACE_S - 1)
        assert events_of(server.send(back("r1")))[-1].endswith(b"[DONE]")  # it went on to its end meanwhile


def test_an_answer_that_takes_longer_than_its_client_may_stay_away_is_cancelled() -> None:
    with keeping() as server:
        transport = server.send(chat(**RESUMABLE))
        server.step()
        transport.reset()
        server.loop.settle()
        server.loop.advance(GRACE_S + 1)  # the engine computes nothing meanwhile
        server.run()
        assert server.metrics.num_disconnects == 1
        assert not server.generations.active


def test_only_its_tenant_finds_a_stream_and_only_where_it_was_asked_for() -> None:
    tenants = tuple(keyed_tenant(name, name) for name in ("mine", "others"))
    with keeping(tenants=tenants) as server:
        for request_id, fields in (("r1", RESUMABLE), ("r2", STREAM)):
            transport = server.send(as_caller(chat(**fields), "mine"))
            server.run()
            assert events_of(transport)[-1].endswith(b"[DONE]")
            for key in ("mine", "others"):
                answer = server.ask(back(request_id, None, key), "GET")
                is_found = (request_id, key) == ("r1", "mine")
                assert is_found or refusal_of(answer) == (404, "stream_not_kept")
                assert not is_found or answer.body == answers(bytes(transport.received))[0].body
        last = id_of(events_of(server.send(back("r1", None, "mine")))[-1])
        assert server.ask(back("r1", last, "mine"), "GET").status == 204
        assert server.ask(back("r1", last + 1, "mine"), "GET").status == 400


@pytest.mark.parametrize(
    ("path", "fields", "begin"),
    [
        ("/v1/chat/completions", {"max_tokens": 40}, b'data: {"error":{'),
        ("/v1/messages", {"max_tokens": 40}, b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", {"max_output_tokens": 40}, b'event: error\ndata: {"type":"error","sequence_number":'),
    ],
)
def test_who_read_it_before_gets_the_surfaces_error(path: str, fields: dict[str, Any], begin: bytes) -> None:
    text = "input" if "responses" in path else "messages"
    body = fields | {text: [{"role": "user", "content": "step"}], "stream": True, "resumable": True}
    with keeping() as server:
        transport = server.send(request("POST", path, body))
        while not events_of(transport):
            server.step()
        server.send(back("r1"))
        last = events_of(transport)[-1]
        assert last.startswith(begin)
        assert b'"stream_taken"' in last
        server.run()


def test_an_answer_whose_events_show_no_id_has_it_as_x_request_id() -> None:
    with keeping() as server:
        asked = {"prompt": "step", "n_predict": 40, "stream": True, "resumable": True}
        transport = server.send(request("POST", "/completion", asked))
        server.run()
        (answer,) = answers(bytes(transport.received))
        again = server.ask(request("GET", f"/v1/requests/{answer.headers['x-request-id']}/stream"), "GET")
        assert (again.status, again.body) == (200, answer.body)
        assert b"id: 1\n" in again.body


def test_a_head_takes_the_stream_from_nobody() -> None:
    with keeping() as server:
        transport = server.send(chat(**RESUMABLE))
        while not events_of(transport):
            server.step()
        looked = server.ask(back("r1").replace(b"GET", b"HEAD", 1), "HEAD")
        assert (looked.status, looked.headers["content-type"][:17], looked.body) == (200, "text/event-stream", b"")
        server.run()
        assert events_of(transport)[-1].endswith(b"[DONE]")
        assert server.ask(back("r2").replace(b"GET", b"HEAD", 1), "HEAD").status == 404


def test_it_is_of_streams_of_events() -> None:
    with serving() as server:
        for asked in (chat(resumable=True), request("POST", "/api/generate", {"prompt": "a", "resumable": True})):
            answer = server.ask(asked)
            assert (answer.status, "resumable" in str(answer.json["error"])) == (400, True)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest events of a stream go first; of all streams those that have ended."""
    with keeping() as server:
        monkeypatch.setattr(resumable, "MOST_BYTES", 2000)
        server.generations.resumable._most_bytes = 5000
        for _ in range(5):
            server.ask(chat(**RESUMABLE))
            logs = server.generations.resumable._logs.values()
            assert sum(log.num_bytes for log in logs) == server.generations.resumable._num_bytes <= 5000
        assert refusal_of(server.ask(back("r1"), "GET")) == (404, "stream_not_kept")
        assert refusal_of(server.ask(back("r5"), "GET")) == (404, "events_not_kept")
        assert server.ask(back("r5", 37), "GET").body.startswith(b"id: 38\n")
