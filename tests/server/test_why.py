"""GET /v1/requests/ID/why: staged incidents on the simulated server, and who may ask about what."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.incident import _WHAT, Cause
from core.plan import RunnerLimits, StepOutput, StepPlan
from core.simulation import CostModel, SimulatedRunner, timed_rows
from server.gate.tenants import Limits
from tests.server.fakes import OPERATOR, MemoryTransport
from tests.server.simulated_engine import late_by
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    Answer,
    SimulatedServer,
    as_caller,
    completion,
    keyed_tenant,
    refusal_of,
    request,
    serving,
    the_answer,
)

KEY = "s3cret"

COST = CostModel(fixed_s=0.01, token_s=0.001)
LIMITS = RunnerLimits(
    num_blocks=400, block_size=16, max_sequences=16, max_batch_tokens=256, max_model_len=1600,
    vocab_size=TOKENIZER.vocab_size,
    timed_rows=timed_rows(lambda work: COST.fixed_s + COST.token_s * (work.prompt_tokens + work.own_tokens)),
)  # fmt: skip
DRAFTS = replace(LIMITS, max_drafts=32)
FEW_BLOCKS = replace(LIMITS, num_blocks=48)
ONE_SLOT = replace(LIMITS, max_sequences=1)


def prompt(num_tokens: int, first: int = 20) -> list[int]:
    """Of its own, by its first token."""
    return [first, *(30 + (7 * i) % 60 for i in range(num_tokens - 1))]


def say(num_prompt: int, max_tokens: int, first: int = 20, key: str = "", **fields: Any) -> bytes:
    data = completion(prompt=prompt(num_prompt, first), max_tokens=max_tokens, **STREAM, **fields)
    return as_caller(data, key) if key else data


def why(server: SimulatedServer, request_id: str = "r1", key: str = "") -> Any:
    data = request("GET", f"/v1/requests/{request_id}/why")
    return server.ask(as_caller(data, key) if key else data, "GET")


def after(server: SimulatedServer, num_tokens: int) -> None:
    """Run until the first request has so many tokens."""

    def has_them() -> bool:
        return sum(delivery.request_ids.count("r1") for delivery in server.delivered) >= num_tokens

    server.run_until(has_them)


def say_three(server: SimulatedServer, num_prompt: int, max_tokens: int) -> None:
    for first in (101, 102, 103):
        server.send(say(num_prompt, max_tokens, first))


# The incidents: each asks r1, and what else there was.


def prompts_beside_its_decode(server: SimulatedServer) -> None:
    server.send(say(30, 60))
    after(server, 10)
    for first in range(100, 106):
        server.send(say(700, 1, first))


def prompts_before_its_own(server: SimulatedServer) -> str:
    for first in range(100, 104):
        server.send(say(1000, 1, first))
    server.send(say(200, 8))
    return "r5"


def outranked(server: SimulatedServer) -> None:
    server.send(say(300, 30, key="low"))
    after(server, 10)
    server.send(say(16, 60, 101, key="high"))


def out_of_blocks(server: SimulatedServer) -> str:
    say_three(server, 150, 200)
    server.run_for(0.5)
    server.send(say(150, 60))
    return "r4"


def quota_that_runs_dry(server: SimulatedServer) -> None:
    server.send(say(20, 900, key="bounded"))


def quota_of_two(server: SimulatedServer) -> str:
    server.send(say(20, 200, 101, key="shared"))
    server.send(say(20, 900, key="shared"))
    return "r2"


def reads_late(server: SimulatedServer, transport: MemoryTransport, pause_s: float) -> None:
    server.run_for(pause_s)
    transport.peer_reads = True
    transport.peer_read()


def reader_that_stops(server: SimulatedServer) -> None:
    reads_late(server, server.send(say(20, 600), peer_reads=False), 20.0)


def reader_that_stops_beside_others(server: SimulatedServer) -> str:
    for first in (101, 102):
        server.send(say(100, 400, first))
    reads_late(server, server.send(say(20, 500), peer_reads=False), 15.0)
    return "r3"


def cleared_cache(server: SimulatedServer) -> str:
    server.ask(say(1200, 4))
    server.network.peer, peer = OPERATOR, server.network.peer
    assert server.ask(request("POST", "/admin/cache/clear", {})).status == 200
    server.network.peer = peer
    server.ask(say(1200, 20))
    return "r3"


def evicted_cache(server: SimulatedServer) -> str:
    server.ask(say(600, 4))
    for first in (101, 102):
        server.ask(say(600, 4, first))
    server.ask(say(600, 12))
    return "r4"


def grammar_that_takes_long_to_compile(server: SimulatedServer) -> None:
    async def offload(work: Callable[[], Any]) -> Any:
        is_done = server.loop.create_future()
        server.loop.call_later(2.0, is_done.set_result, None)
        await is_done
        return work()

    assert server.app.generations is not None
    server.app.generations.offload_compiling = offload
    server.send(say(20, 20, guided_regex="[a-z]{20}"))


def long_answer(server: SimulatedServer) -> None:
    server.ask(say(20, 300))


def long_new_prompt_in_company(server: SimulatedServer) -> str:
    say_three(server, 16, 250)
    server.run_for(0.2)
    server.send(say(1200, 30))
    return "r4"


def answer_that_is_drafted(server: SimulatedServer) -> str:
    for name in ("r1", "r2"):
        server.ask(say(20, 300, seed=1))
        spared = server.generations.ended[-1].step_tokens
        assert (spared > 2) == (name == "r2"), "it repeats the first answer"
    return "r2"


def answer_that_is_forced_beside_prompts(server: SimulatedServer) -> None:
    server.send(say(20, 900, guided_regex="[a-z](this text leaves no choice at all){25}"))
    after(server, 200)
    for first in range(100, 106):
        server.send(say(700, 1, first))


TENANTS = (
    keyed_tenant("low", tenant_class="batch"),
    keyed_tenant("high", tenant_class="interactive"),
    keyed_tenant("bounded", limits=Limits(tokens_per_minute=1200, burst_tokens=600)),
    keyed_tenant("shared", limits=Limits(tokens_per_minute=1200, burst_tokens=760)),
)
INCIDENTS: dict[Callable[[SimulatedServer], str | None], tuple[Cause | None, RunnerLimits, str]] = {
    prompts_beside_its_decode: (Cause.NEIGHBOURS_PROMPTS, LIMITS, ""),
    prompts_before_its_own: (Cause.NEIGHBOURS_PROMPTS, LIMITS, ""),
    outranked: (Cause.PREEMPTION, ONE_SLOT, "low"),
    out_of_blocks: (Cause.PREEMPTION, FEW_BLOCKS, ""),
    quota_that_runs_dry: (Cause.QUOTA_PAUSES, LIMITS, "bounded"),
    quota_of_two: (Cause.QUOTA_PAUSES, LIMITS, "shared"),
    reader_that_stops: (Cause.SLOW_READER, LIMITS, ""),
    reader_that_stops_beside_others: (Cause.SLOW_READER, LIMITS, ""),
    cleared_cache: (Cause.COLD_CACHE, LIMITS, ""),
    evicted_cache: (Cause.COLD_CACHE, FEW_BLOCKS, ""),
    grammar_that_takes_long_to_compile: (Cause.GRAMMAR, LIMITS, ""),
    long_answer: (None, LIMITS, ""),
    answer_that_is_drafted: (None, DRAFTS, ""),
    answer_that_is_forced_beside_prompts: (Cause.NEIGHBOURS_PROMPTS, LIMITS, ""),
    long_new_prompt_in_company: (None, LIMITS, ""),
}


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda one: one.__name__)
def test_verdict_names_what_was_staged(incident: Callable[[SimulatedServer], str | None]) -> None:
    expected, limits, key = INCIDENTS[incident]
    with serving(limits=limits, cost=COST, tenants=TENANTS if key else ()) as server:
        name = incident(server) or "r1"
        server.run_until(lambda: not server.app.exchanges)
        found = why(server, name, key).json
        assert (found["has_verdict"], found["cause"]) == (True, expected), found
        assert found["simulated_ms"] == pytest.approx(found["time_ms"], rel=0.1)
        costs = {one["cause"]: one["cost_ms"] for one in found["causes"]}
        assert set(costs) == set(Cause)
        assert found["without_all_ms"] <= found["simulated_ms"] - max(costs.values()) + 1
        words = "No cause took" if expected is None else f"went to {_WHAT[expected]}"
        assert words in found["verdict"]
        assert expected is None or costs.pop(expected) >= 3 * max(costs.values())


class HeldUpRunner(SimulatedRunner):
    """Another process holds its 30th step up for a second."""

    num_steps = 0

    def collect(self, ticket: StepPlan) -> StepOutput:
        self.num_steps += 1
        if self.num_steps == 30:
            self._clock.advance(1.0)
        return super().collect(ticket)


def test_steps_that_were_held_up_are_a_cause_of_their_own() -> None:
    with serving(limits=LIMITS, cost=COST, runner=HeldUpRunner) as server:
        server.ask(say(20, 60))
        found = why(server).json
        assert (found["has_verdict"], found["cause"]) == (True, Cause.SLOW_STEPS)
        assert found["causes"][0]["cost_ms"] == pytest.approx(1000, rel=0.1)


def test_what_is_not_simulated_gets_no_verdict() -> None:
    with serving(limits=LIMITS, cost=COST, schedule=late_by(1.0)) as server:
        server.send(say(20, 60))
        server.run_until(lambda: not server.app.exchanges)
        found = why(server).json
        assert (found["has_verdict"], found["cause"], found["causes"]) == (False, None, [])
        assert found["verdict"].startswith("No verdict: it took 1.68 s, and 679 ms by simulation.")


def test_who_may_ask_about_what() -> None:
    with serving(
        limits=LIMITS, cost=COST, tenants=(keyed_tenant("acme"), keyed_tenant("other")), keys=(KEY,)
    ) as server:
        server.send(say(20, 30, key="acme"))
        after(server, 3)
        assert refusal_of(why_now(server, "acme")) == (409, "request_in_progress")
        server.run()
        assert refusal_of(why(server, key="other")) == (404, "request_not_found")
        assert refusal_of(why(server, "r9", key="acme")) == (404, "request_not_found")
        assert [why(server, key=key).json["id"] for key in ("acme", KEY)] == ["r1", "r1"]
        server.generations.ended.clear()
        assert refusal_of(why(server, key="acme")) == (404, "request_not_kept")
        server.send(say(1600 - 1, 1, 101, key="acme")).feed_eof()  # its client leaves before its first token
        server.run()
        found = why(server, "r8", key="acme").json
        assert found["verdict"] == "No verdict: it ended before its first token."


def why_now(server: SimulatedServer, key: str) -> Answer:
    """While all else stands still."""
    return the_answer(server.send(as_caller(request("GET", "/v1/requests/r1/why"), key)))


def test_a_course_has_counts_and_digests_of_its_prompt() -> None:
    with serving(limits=LIMITS, cost=COST) as server:
        for _ in range(2):
            server.ask(say(200, 5))
        first, second = server.generations.ended
        assert first.prefixes == second.prefixes
        assert len(first.prefixes) == 200 // 64
        counts = [(one.num_prompt_tokens, one.num_cached_tokens, one.num_tokens) for one in (first, second)]
        assert counts == [(200, 0, 5), (200, 192, 5)]


@pytest.mark.parametrize("seed", range(4))
def test_any_history_is_explained(seed: int) -> None:
    """Most of them; the others have no verdict."""
    rng = random.Random(seed)
    limits = (LIMITS, FEW_BLOCKS, replace(LIMITS, max_in_flight=2), replace(LIMITS, num_blocks=110, max_sequences=6))
    with serving(limits=limits[seed], cost=COST) as server:
        peers: list[MemoryTransport] = []
        for _ in range(10):
            fields = {"n": rng.choice([1, 1, 1, 2]), "priority": rng.choice([0, 0, 1, -1])}
            data = say(rng.randrange(2, 500), rng.randrange(1, 120), rng.randrange(100, 103), **fields)
            peers.append(server.send(data, peer_reads=rng.random() > 0.15))
            server.run_for(rng.choice([0, 0.05, 0.3, 1.0]))
            if rng.random() < 0.15:
                rng.choice(peers).feed_eof()
        for peer in peers:
            server.run_for(0.5)
            reads_late(server, peer, 0)
        server.run_until(lambda: not server.app.exchanges)
        found = [why(server, f"r{i}").json for i in range(1, 11)]
        assert sum(one["has_verdict"] for one in found) >= 7
        assert all(one["verdict"] for one in found)
