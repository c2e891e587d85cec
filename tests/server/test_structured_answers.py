"""Answers in a form, through the whole server: valid, compiled once and off the loop, refused without a trace."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from core.constraints import GrammarKind, GrammarSpec, regex
from core.grammar import Grammar, GrammarCache
from tests.server.simulated_server import STREAM, SimulatedServer, chat, completion, refusal_of

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


def test_whole_and_streamed_answers_are_the_same_and_valid(server: SimulatedServer) -> None:
    for seed in range(5):
        fields = {"seed": seed, "max_tokens": 60, "n": 2, "guided_json": SCHEMA}
        whole, streamed = server.ask(chat(**fields)), server.ask(chat(**fields, **STREAM))
        for choice in range(2):
            assert whole.finish_reason(choice) == streamed.finish_reason(choice) == "stop"
            assert whole.text(choice) == streamed.text(choice)
            found = json.loads(whole.text(choice))
            assert (0 <= found["id"] <= 99, found["kind"] in "ab", len(found)) == (True, True, 2)


def test_what_cannot_be_held_is_refused(server: SimulatedServer) -> None:
    refused = server.ask(completion(guided_regex="(a"))
    assert refusal_of(refused)[0] == 400
    assert refused.json["error"]["param"] == "guided_regex"
    assert server.ask(completion(guided_regex="ab?")).text() in ("a", "ab")


def test_a_grammar_is_compiled_once_and_off_the_loop(server: SimulatedServer) -> None:
    offloaded: list[Callable[[], Any]] = []

    async def offload(work: Callable[[], Any]) -> Any:
        offloaded.append(work)
        return work()

    server.generations.offload = offload
    for _ in range(3):
        assert re.fullmatch("[ab]{3}", server.ask(completion(guided_regex="[ab]{3}")).text())
    assert len(offloaded) == 1
    server.ask(completion(guided_regex="[ab]{4}"))
    assert len(offloaded) == 2


@pytest.mark.parametrize("stop", [["b"], []])
def test_a_stop_string_ends_a_held_answer_too(server: SimulatedServer, stop: list[str]) -> None:
    answer = server.ask(completion(guided_regex="aab", stop=stop, max_tokens=20))
    assert (answer.text(), answer.finish_reason()) == ("aa" if stop else "aab", "stop")


def test_a_tenant_that_fills_the_cache_loses_its_own_grammars() -> None:
    made = Grammar(matcher=None, num_words=1)  # type: ignore[arg-type]
    cache = GrammarCache(capacity=8)

    def spec(name: str) -> GrammarSpec:
        return regex(name, "p")

    for name in ("x", "y"):
        cache.keep(spec(name), "light", made)
    for i in range(100):
        cache.keep(spec(f"f{i}"), "flood", made)
    assert cache.find(spec("x")) is cache.find(spec("y")) is made
    assert [i for i in range(100) if cache.find(spec(f"f{i}"))] == [94, 95, 96, 97, 98, 99]
    assert cache.find(GrammarSpec(GrammarKind.LARK, "x", "p")) is None


def test_variables_of_the_template_reach_it(server: SimulatedServer) -> None:
    refused = server.ask(chat(chat_template_kwargs={"messages": []}))
    assert refusal_of(refused)[0] == 400
    assert refused.json["error"]["param"] == "chat_template_kwargs"
    plain, without = (server.ask(chat(chat_template_kwargs=one)) for one in ({}, {"bos_token": "<s>"}))
    assert (plain.status, without.status) == (200, 200)


def test_documents_that_no_template_shows_are_refused(server: SimulatedServer) -> None:
    refused = server.ask(chat(documents=[{"text": "It is noon."}]))
    assert (refusal_of(refused)[0], refused.json["error"]["param"]) == (400, "documents")
    assert server.ask(chat(documents=[])).finish_reason() == "length"
