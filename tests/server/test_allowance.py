"""Quotas on the whole simulated server: refusals, what answers bear, streams whose quota runs dry, and exact ends."""

import itertools
import random
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from core.plan import RunnerLimits
from core.types import Pause, Request, Resume, SamplingParams, Usage
from server.config import ServerConfig
from server.gate.identity import Caller
from server.gate.quota import (
    AHEAD_TOKENS,
    FIRST_TOKENS,
    MAX_WAIT_S,
    NEVER,
    S_NS,
    TOP_UP_TOKENS,
    Allowance,
    Moment,
    PeriodPool,
    Quotas,
    Ticket,
)
from server.gate.tenants import Limits, Tenant
from tests.server.fakes import MemoryTransport
from tests.server.simulated_engine import Schedule, at_once, late_by
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    answers,
    as_caller,
    completion,
    keyed_tenant,
    request,
)
from tests.server.virtual_loop import VirtualTimeLoop

LONG = RunnerLimits(
    num_blocks=1200, block_size=4, max_sequences=8, max_batch_tokens=64, max_model_len=2000,
    vocab_size=TOKENIZER.vocab_size,
)  # fmt: skip
PROMPT = [7] * 18
MIDNIGHT_S = 6_400  # from the simulated server's start: 1,700,000,000 is 22:13:20 UTC


def server_of(quota: Limits, key_quota: Limits | None = None, discount: int = 0, **fields: Any) -> SimulatedServer:
    more = {"key_limits": key_quota or Limits(), "cached_token_discount": discount}
    tenant = keyed_tenant("acme", "a", "b", limits=quota, **more)
    return SimulatedServer(tenants=(tenant,), **{"limits": LONG, **fields})


def keyed(data: bytes, key: str = "a") -> bytes:
    return as_caller(data, key)


def say(max_tokens: int = 12, **fields: Any) -> bytes:
    return keyed(completion(prompt=PROMPT, max_tokens=max_tokens, **fields))


def fields_of(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith(("x-ratelimit", "retry-after"))}


def holds(server: SimulatedServer) -> list[str]:
    return [type(message).__name__ for message in server.posted if isinstance(message, (Pause, Resume))]


def day_used(server: SimulatedServer) -> int:
    (pool,) = [
        pool for account in server.gate.quotas.accounts for pool in account.tokens if isinstance(pool, PeriodPool)
    ]
    return pool._taken


def test_an_answer_bears_what_is_left_of_the_tightest_limit() -> None:
    with closing(
        server_of(
            Limits(requests_per_minute=60, tokens_per_minute=60, burst_tokens=6_000),
            Limits(requests_per_minute=30, burst_requests=5),
        )
    ) as server:
        assert fields_of(server.ask(say())) == {
            "x-ratelimit-limit-requests": "5",
            "x-ratelimit-remaining-requests": "4",
            "x-ratelimit-reset-requests": "2s",
            "x-ratelimit-limit-tokens": "6000",
            "x-ratelimit-remaining-tokens": str(6_000 - 30),
            "x-ratelimit-reset-tokens": "30s",
        }


@pytest.mark.parametrize("fields", [{}, STREAM])
def test_an_answer_bears_what_is_left_when_its_head_is_written(fields: dict[str, Any]) -> None:
    with closing(server_of(Limits(tokens_per_day=1_000))) as server:
        answer = server.ask(say(stop=unlimited_text(12)[4:6], **fields))
        num_used = answer.usage["total_tokens"]
        assert num_used < 18 + 12
        num_taken = 18 + 12 if fields else num_used  # a stream still holds what it reserved
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1_000 - num_taken)


def test_retry_after_is_exact_to_the_second() -> None:
    with closing(server_of(Limits(requests_per_minute=10, burst_requests=1))) as server:
        assert server.ask(say(max_tokens=1)).status == 200
        refused = server.ask(say(max_tokens=1))
        error = refused.json["error"]
        assert (refused.status, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert "requests_per_minute" in error["message"]
        assert fields_of(refused)["x-ratelimit-remaining-requests"] == "0"
        wait_s = int(refused.headers["retry-after"])
        assert (wait_s - 1) * 1000 < int(refused.headers["retry-after-ms"]) <= wait_s * 1000
        server.loop.advance(wait_s - 1)
        assert server.ask(say(max_tokens=1)).status == 429
        server.loop.advance(1)
        assert server.ask(say(max_tokens=1)).status == 200


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(requests_per_minute=1), b"this needs 1, and 0 of 1 are left"),
        (Limits(tokens_per_minute=60, burst_tokens=30), b"this needs at least 2, and 0 of 30 are left"),
    ],
)
def test_who_is_over_a_limit_is_refused_before_the_body_is_read_until_a_reload_gives_more(
    limits: Limits, why: bytes
) -> None:
    with closing(server_of(limits)) as server:
        assert server.ask(say(max_tokens=12)).status == 200
        transport = server.send(keyed(request("POST", "/v1/completions", None, "Content-Length: 50000")))
        assert transport.received.startswith(b"HTTP/1.1 429 ")
        assert why in transport.received
        server.gate.prepare(ServerConfig(tenants=(keyed_tenant("acme", "a"),)))()
        assert fields_of(server.ask(say(max_tokens=1))) == {}  # without limits, there is nothing to tell


def test_a_prompt_that_is_too_long_for_the_tokens_left_is_refused_and_one_that_fits_is_not() -> None:
    with closing(server_of(Limits(tokens_per_day=100))) as server:
        refused = server.ask(say(max_tokens=90))
        assert refused.status == 429
        assert "at most 100 at once (tokens_per_day), and this needs 108" in refused.json["error"]["message"]
        assert "retry-after" not in refused.headers
        assert server.ask(say(max_tokens=80)).usage["completion_tokens"] == 80
        later = server.ask(say(max_tokens=1))
        assert later.status == 429
        assert int(later.headers["retry-after"]) == -int(-(MIDNIGHT_S - int(server.loop.time())) // 1)


@pytest.mark.parametrize("ends", ["answer", "client", "delete"])
def test_a_place_is_free_again_when_its_request_has_ended_in_whatever_way(ends: str) -> None:
    with closing(server_of(Limits(concurrent_requests=1))) as server:
        running = server.send(say(max_tokens=100, **STREAM))
        server.step()
        assert server.send(say()).received.startswith(b"HTTP/1.1 429 ")
        if ends == "client":
            running.feed_eof()
            running.close()
            server.loop.settle()
        elif ends == "delete":
            server.send(keyed(request("DELETE", "/v1/requests/r1")))
        server.run()
        assert server.ask(say()).status == 200


def test_listing_models_and_cancelling_count_for_nothing() -> None:
    with closing(server_of(Limits(requests_per_minute=1, concurrent_requests=1))) as server:
        for _ in range(3):
            assert server.ask(keyed(request("GET", "/v1/models")), "GET").status == 200
        assert server.ask(keyed(request("POST", "/tokenize", {"prompt": "a"}))).status == 200
        assert server.ask(keyed(request("POST", "/tokenize", {"prompt": "a"}))).status == 429


def test_who_has_no_tokens_left_may_count_them_and_read_its_usage() -> None:
    with closing(server_of(Limits(tokens_per_day=30, requests_per_minute=4))) as server:
        assert server.ask(say(max_tokens=12)).status == 200
        assert server.ask(say(max_tokens=1)).status == 429
        usage = keyed(request("GET", "/v1/usage"))
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [7]})):
            assert server.ask(keyed(request("POST", path, body))).status == 200
        assert {server.ask(usage, "GET").json["error"]["code"] for _ in range(5)} == {"no_ledger"}  # read, not counted
        assert server.ask(keyed(request("POST", "/tokenize", {"prompt": "a"}))).status == 200


@pytest.mark.parametrize("refused", [say(), say(deadlines={"ttft_ms": 20}), keyed(request("POST", "/tokenize", {}))])
def test_who_is_sent_away_for_want_of_room_has_asked_for_nothing(refused: bytes) -> None:
    with closing(server_of(Limits(requests_per_minute=3), max_requests=2)) as server:
        server.ask(say(max_tokens=30))  # the cost model learns
        server.loop.advance(60)
        running = [server.send(say(max_tokens=100)) for _ in range(2 if b"ttft" not in refused else 1)]
        server.step()
        (answer,) = answers(bytes(server.send(refused).received))
        assert answer.status == 503
        assert answer.headers["x-ratelimit-remaining-requests"] == str(3 - len(running))
        server.run()
        assert server.ask(say(max_tokens=1)).status == 200


def test_what_is_wrong_with_a_request_makes_it_no_cheaper() -> None:
    with closing(server_of(Limits(requests_per_minute=2))) as server:
        answer = server.ask(say(max_tokens=-1))
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (400, "1")


# In mid-stream.


def ask_long(server: SimulatedServer, data: bytes) -> Answer:
    """The answer to a request that may be held on its way."""
    transport = server.send(data)
    server.run_until(lambda: not server.network.listener.num_handlers)
    (answer,) = answers(bytes(transport.received))
    assert answer.is_complete
    return answer


def unlimited_text(max_tokens: int) -> str:
    server = server_of(Limits())
    text = server.ask(say(max_tokens)).text()
    server.close()
    return text


def test_a_long_answer_is_topped_up_as_it_goes_on_and_nobody_waits() -> None:
    with closing(server_of(Limits(tokens_per_day=10_000))) as server:
        server.send(say(max_tokens=1_000, **STREAM))
        (account,) = [one for one in server.gate.quotas.accounts if one.tokens]
        steps = []
        while not steps or server.stats.num_running:
            server.step()
            steps.append(account.num_reserved)
        held = list(dict.fromkeys(steps))
        assert held == [18 + FIRST_TOKENS, 18 + FIRST_TOKENS + 256, 18 + 1_000, 0]
        assert holds(server) == []
        assert day_used(server) == 1_018


def test_a_stream_waits_for_its_quota_to_fill_and_says_the_same_as_without() -> None:
    with closing(server_of(Limits(tokens_per_minute=1_200, burst_tokens=540))) as server:
        answer = ask_long(server, say(max_tokens=700, **STREAM))
        assert holds(server) == ["Pause", "Resume"]
        assert (answer.finish_reason(), answer.usage["completion_tokens"]) == ("length", 700)
        assert answer.text() == unlimited_text(700)
        assert not any("steploop" in event for event in answer.events if isinstance(event, dict))


def test_a_fault_while_it_waits_for_its_quota_ends_a_stream_that_nobody_else_would_let_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Allowance, "_go_on_if_possible", lambda self: 1 // 0)
    with closing(server_of(Limits(tokens_per_minute=1_200, burst_tokens=540))) as server:
        answer = ask_long(server, say(max_tokens=700, **STREAM))
        assert holds(server) == ["Pause"]
        assert (answer.finish_reason(), answer.usage["completion_tokens"] < 700) == ("length", True)
        assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("fields", [STREAM, {}, {"n": 2}, {"n": 2, **STREAM}, {"logprobs": 1}])
def test_a_stream_whose_quota_stays_empty_says_all_that_is_left_ends_and_says_why(fields: dict[str, Any]) -> None:
    n = fields.get("n", 1)
    num_left = 18 + n * FIRST_TOKENS + 100
    with closing(server_of(Limits(tokens_per_minute=6, burst_tokens=num_left))) as server:
        answer = ask_long(server, say(max_tokens=1_500, **fields))
        assert answer.status == 200
        last = answer.events[-2] if "stream" in fields else answer.json
        why = last["steploop"]
        assert why["ended_by"] == "tokens_per_minute"
        assert "acme has used up its tokens_per_minute" in why["message"]
        for choice in range(n):
            assert answer.finish_reason(choice) == "length"
            assert unlimited_text(1_500).startswith(answer.text(0))
        num_filled = 6 * server.loop.time() // 60
        num_cut = 0 if n == 1 else 4  # the others' last, when the first has none left
        assert num_left - num_cut <= answer.usage["total_tokens"] <= num_left + num_filled
        assert holds(server) == ["Pause", "Resume"]
        (pool,) = [pool for account in server.gate.quotas.accounts for pool in account.tokens]
        wait_ns = pool.wait_ns(TOP_UP_TOKENS, Moment(round(server.loop.time() * S_NS), 0))
        assert wait_ns is not None
        assert why["retry_after_s"] - 2 < wait_ns / S_NS <= why["retry_after_s"]  # now, a moment after it was told
        paused_s = server.loop.time()
        assert paused_s >= MAX_WAIT_S


@pytest.mark.parametrize("schedule", [at_once, late_by(2.0)])
def test_an_answer_whose_day_is_used_up_ends_at_once_and_says_no_more_than_was_reserved(schedule: Schedule) -> None:
    with closing(server_of(Limits(tokens_per_day=18 + FIRST_TOKENS), schedule=schedule)) as server:
        answer = ask_long(server, say(max_tokens=1_500, **STREAM))
        why = answer.events[-2]["steploop"]
        assert (answer.finish_reason(), answer.usage["completion_tokens"]) == ("length", FIRST_TOKENS)
        assert unlimited_text(1_500).startswith(answer.text())
        assert holds(server) == []
        assert why["ended_by"] == "tokens_per_day"
        assert 0 <= MIDNIGHT_S - int(server.loop.time()) - why["retry_after_s"] + 2 <= 4
        assert day_used(server) == 18 + FIRST_TOKENS


def test_an_answer_waits_for_the_next_day_where_it_begins_soon_enough() -> None:
    with closing(server_of(Limits(tokens_per_day=18 + FIRST_TOKENS + 300))) as server:
        server.ask(say(max_tokens=300 - 18))
        server.loop.advance(MIDNIGHT_S - MAX_WAIT_S - server.loop.time())
        answer = ask_long(server, say(max_tokens=700, **STREAM))
        assert holds(server) == ["Pause", "Resume"]
        assert answer.usage["completion_tokens"] == 700


def test_tokens_that_another_request_gives_back_let_a_stream_go_on() -> None:
    with closing(server_of(Limits(tokens_per_day=2 * 18 + 2 * FIRST_TOKENS))) as server:
        stream = server.send(say(max_tokens=700, **STREAM))
        server.run_for(4)
        other = server.send(say(max_tokens=FIRST_TOKENS, **STREAM))
        server.run_until(lambda: "Pause" in holds(server))
        other.feed_eof()
        other.close()
        server.run_until(lambda: not server.network.listener.num_handlers)
        (answer,) = answers(bytes(stream.received))
        assert answer.usage["completion_tokens"] == 700
        assert holds(server) == ["Pause", "Resume"]


class HeldAnswer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")

    def end_early(self) -> None:
        self.told.append("end")


def held_pair(held: HeldAnswer, loop: VirtualTimeLoop, num_left: int) -> tuple[Allowance, Ticket]:
    """Of two choices, by a limit that has so many tokens beside what they reserved, and gets none meanwhile."""
    limits = Limits(tokens_per_minute=6, burst_tokens=1 + 2 * FIRST_TOKENS + num_left)
    ticket = Quotas(lambda: Moment(0, 0)).ticket_for(Caller(Tenant(name="acme", limits=limits)))
    two = Request(
        request_id="r", prompt_ids=(7,), sampling=SamplingParams(max_tokens=900), arrival_s=0.0, num_sequences=2
    )
    ticket.reserve([two])
    return Allowance(held, ticket, [two], loop), ticket


def test_a_choice_that_ends_while_it_is_held_lets_the_others_go_on() -> None:
    loop, held = VirtualTimeLoop(), HeldAnswer()
    allowance, _ = held_pair(held, loop, 0)
    mark = FIRST_TOKENS - AHEAD_TOKENS
    assert [allowance.on_mark(choice, 0) for choice in range(2)] == [mark, mark]
    assert allowance.on_mark(0, mark) == FIRST_TOKENS
    allowance.drop(1)
    assert held.told == ["pause"]
    allowance.drop(0)
    assert held.told == ["pause", "resume"]
    loop.advance(2 * MAX_WAIT_S)
    assert held.told == ["pause", "resume"]
    assert allowance.extras == {}
    loop.close()


def test_what_is_left_is_taken_before_a_choice_is_held_and_what_is_reserved_is_said_before_it_ends() -> None:
    loop, held = VirtualTimeLoop(), HeldAnswer()
    allowance, ticket = held_pair(held, loop, 1)
    mark = FIRST_TOKENS - AHEAD_TOKENS
    assert allowance.on_mark(0, mark) == mark + 1
    assert held.told == []
    assert allowance.on_mark(0, mark + 1) == FIRST_TOKENS + 1
    assert held.told == ["pause"]
    loop.advance(MAX_WAIT_S)
    assert held.told == ["pause", "resume"]
    assert allowance.on_mark(1, mark) == FIRST_TOKENS  # it is not held a second time
    assert held.told == ["pause", "resume"]
    assert allowance.on_mark(0, FIRST_TOKENS + 1) == NEVER
    assert held.told == ["pause", "resume", "end"]
    ticket.settle(Usage(1, 0))  # all the others have given back
    assert allowance.extras["steploop"]["retry_after_s"] == 1
    loop.close()


def test_a_client_that_leaves_while_its_stream_is_held_leaves_nothing() -> None:
    with closing(
        server_of(Limits(tokens_per_minute=6, burst_tokens=18 + FIRST_TOKENS, tokens_per_day=10_000))
    ) as server:
        stream = server.send(say(max_tokens=1_500, **STREAM))
        server.run_until(lambda: "Pause" in holds(server))
        stream.feed_eof()
        stream.close()
        server.loop.settle()
        server.run()
        assert day_used(server) == server.metrics.num_prompt_tokens + server.metrics.num_generation_tokens


def test_a_slow_reader_and_an_empty_quota_hold_a_stream_until_both_let_go() -> None:
    with closing(server_of(Limits(tokens_per_minute=1_200, burst_tokens=540))) as server:
        stream = server.send(say(max_tokens=700, **STREAM), peer_reads=False)
        server.run_for(7)
        stream.peer_reads = True
        stream.peer_read()
        server.run_until(lambda: not server.network.listener.num_handlers)
        (answer,) = answers(bytes(stream.received))
        assert answer.text() == unlimited_text(700)
        names = holds(server)
        assert names.count("Pause") == names.count("Resume")
        assert all(one != next_one for one, next_one in itertools.pairwise(names))


def test_cached_tokens_are_settled_at_the_tenants_discount() -> None:
    with closing(server_of(Limits(tokens_per_day=10_000), discount=50)) as server:
        first, second = (server.ask(say(max_tokens=2)).usage for _ in range(2))
        cached = second["prompt_tokens_details"]["cached_tokens"]
        assert cached == 16
        assert day_used(server) == first["total_tokens"] + second["total_tokens"] - cached // 2


# All at once.


class Crowd:
    """Clients of two keys that ask, leave, read slowly and cancel as chance has it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = server_of(
            Limits(tokens_per_day=10**6, tokens_per_minute=60_000, burst_tokens=5_000, requests_per_minute=6_000),
            Limits(concurrent_requests=12),
            limits=RunnerLimits(160, 4, 8, 64, 900, TOKENIZER.vocab_size),
        )
        self.streams: list[MemoryTransport] = []
        self.num_asked = 0

    def ask(self) -> None:
        self.num_asked += 1
        prompt = [7] * self.random.randrange(1, 60)
        max_tokens = self.random.choice((1, 5, 30, 100, 800))
        fields = self.random.choice((STREAM, {}, {"n": 2}, {"stop": "e"}))
        data = completion(prompt=prompt, max_tokens=max_tokens, seed=None, **fields)
        reads = self.random.random() < 0.9
        self.streams.append(self.server.send(keyed(data, self.random.choice("ab")), peer_reads=reads))

    def leave(self) -> None:
        if self.streams:
            stream = self.streams.pop(self.random.randrange(len(self.streams)))
            stream.feed_eof()
            stream.close()
            self.server.loop.settle()

    def cancel(self) -> None:
        self.server.send(keyed(request("DELETE", f"/v1/requests/r{self.random.randint(1, self.num_asked + 1)}")))

    def run(self, num_requests: int) -> None:
        while self.num_asked < num_requests:
            action: Callable[[], Any] = self.random.choice((self.ask, self.ask, self.ask, self.leave, self.cancel))
            action()
            for _ in range(self.random.randrange(4)):
                self.server.step()


def test_a_crowd_is_billed_what_it_was_served_to_the_token() -> None:
    crowd = Crowd(seed=1)
    crowd.run(1_200)
    crowd.server.close()
    metrics = crowd.server.metrics
    assert day_used(crowd.server) == metrics.num_prompt_tokens + metrics.num_generation_tokens > 1_000
    assert metrics.responses[429] > 0
    assert metrics.num_disconnects > 0
