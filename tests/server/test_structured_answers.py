"""Answers in a form, through the whole server: valid, compiled once and off the loop, refused without a trace."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest

from core.constraints import GrammarKind, GrammarSpec, regex
from core.grammar import Grammar, GrammarCache, GrammarCompiler
from server.api.known_fields import KNOWN, Does
from server.api.structured import ResponseFormat, StructuredFields, constraint_of
from server.generation import OFFLOAD_BYTES, weight_of
from tests.core.hostile_forms import hostile_forms
from tests.server.simulated_server import STREAM, TOKENIZER, SimulatedServer, chat, completion, refusal_of

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("ask", [chat, completion])
def test_whole_and_streamed_answers_are_the_same_and_valid(server: SimulatedServer, ask: Any) -> None:
    for seed in range(5):
        fields = {"seed": seed, "max_tokens": 60, "n": 2, "guided_json": SCHEMA}
        whole, streamed = server.ask(ask(**fields)), server.ask(ask(**fields, **STREAM))
        for choice in range(2):
            assert whole.finish_reason(choice) == streamed.finish_reason(choice) == "stop"
            assert whole.text(choice) == streamed.text(choice)
            found = json.loads(whole.text(choice))
            assert (0 <= found["id"] <= 99, found["kind"] in "ab", len(found)) == (True, True, 2)


def test_what_cannot_be_held_is_refused(server: SimulatedServer) -> None:
    scalar = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "strin"}}}
    for ask, param, words in (
        (completion(guided_regex="(a"), "guided_regex", "guided_regex cannot be used: line 1, column 1: unclosed"),
        (completion(regex="(a"), "regex", "regex cannot be used: line 1, column 1: unclosed"),
        (completion(ebnf='root ::= "a"\n  b ::= "'), "ebnf", "ebnf cannot be read as GBNF: line 2, column 9"),
        (completion(grammar="start: B"), "grammar", "grammar cannot be used: line 1, column 8"),
        (chat(response_format=scalar), "response_format.json_schema.schema", ".schema.type must be one of"),
        (chat(guided_json=scalar["json_schema"]["schema"]), "guided_json", "guided_json.type must be one of"),
    ):
        refused = server.ask(ask)
        assert refusal_of(refused)[0] == 400
        assert refused.json["error"]["param"] == param
        assert words in refused.json["error"]["message"]
        assert "%" not in refused.json["error"]["message"]
        assert "start: /" not in refused.json["error"]["message"]
    assert server.ask(completion(guided_regex="ab?")).text() in ("a", "ab")


def test_a_grammar_is_compiled_once_and_off_the_loop(server: SimulatedServer) -> None:
    offloaded: list[Callable[[], Any]] = []

    async def offload(work: Callable[[], Any]) -> Any:
        offloaded.append(work)
        return work()

    server.generations.offload_compiling = offload
    for _ in range(3):
        assert re.fullmatch("[ab]{3}", server.ask(completion(guided_regex="[ab]{3}")).text())
    assert len(offloaded) == 1
    server.ask(completion(guided_regex="[ab]{4}"))
    assert len(offloaded) == 2


FORMS = hostile_forms()
CHECKING = ("core/constraints.py", "core/shortest_answer.py", "core/tool_grammar.py")


@pytest.mark.parametrize("name", FORMS)
def test_nothing_of_a_form_is_checked_or_compiled_on_the_loop(server: SimulatedServer, name: str) -> None:
    """However short it is: 1 KB may take 100 ms. By counts of calls."""
    is_off, on_loop = False, Counter[str]()

    async def offload(work: Callable[[], Any]) -> Any:
        nonlocal is_off
        is_off = True
        try:
            return work()
        finally:
            is_off = False

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and not is_off:
            on_loop[code.co_qualname] += code.co_filename.endswith(CHECKING) or "Compiler" in code.co_qualname

    server.generations.offload = offload
    body = chat(max_tokens=4, **FORMS[name]).replace(b"gu\\\\u", b"gu\\u")
    head, _, text = body.partition(b"\r\n\r\n")
    assert len(text) < OFFLOAD_BYTES
    sys.setprofile(count)
    try:
        answer = server.ask(re.sub(rb"(?i)(content-length: )\d+", rb"\g<1>%d" % len(text), head) + b"\r\n\r\n" + text)
    finally:
        sys.setprofile(None)
    assert answer.status in (200, 400), answer.text()
    assert sum(on_loop.values()) < 20, on_loop.most_common(5)


def test_every_field_that_asks_for_a_form_is_known_by_its_name() -> None:
    asked = {name for name in StructuredFields.__struct_fields__ if name != "sent_as"} | {
        "response_format",
        "functions",
    }
    aliases = {
        known.name for rows in KNOWN.values() for known in rows if known.does is Does.ALIAS and known.target in asked
    }
    assert len(aliases) >= 5
    for name in asked | aliases | {"tools", "text.format", "output_config.format"}:
        assert weight_of(f'{{"{name}": 1}}'.encode()) == OFFLOAD_BYTES, name
    assert weight_of(b'{"messages": [{"role": "user", "content": "x"}]}') < 100


def test_a_tag_that_begins_is_held(server: SimulatedServer) -> None:
    tag = {"begin": "<f=x>", "schema": {"enum": [7, 8]}, "end": "</f>"}
    older = {"structures": [tag], "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": tag["schema"]}
    form = {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f=x>", "content": content, "end": "</f>"}],
    }
    newer = {"type": "structural_tag", "format": {**form, "at_least_one": True, "stop_after_first": True}}
    for seed in range(3):
        fields = {"seed": seed, "max_tokens": 40}
        free = server.ask(chat(**fields, structured_outputs={"structural_tag": older}))
        assert re.fullmatch(r"(?s:.*?)(<f=x>[78]</f>.*)?", free.text())
    grammar = server.generations.reader.make_compiler().compile(
        constraint_of(StructuredFields(), msgspec.convert(newer, ResponseFormat))
    )
    state = grammar.start()
    tokenizer = server.generations.reader.tokenizer
    for token_id in tokenizer.encode("Well, <f=x>", add_special_tokens=False):
        state.accept(token_id)
    assert state.fault is None
    assert not state.is_complete
    for token_id in tokenizer.encode("7</f>", add_special_tokens=False):
        state.accept(token_id)
    assert (state.fault, state.has_ended) == (None, True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"structures": [], "triggers": []}, "must have 1 to 128 tags and triggers"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]},
            "no tag begins with the trigger",
        ),
        (
            {"structures": [{"begin": x, "schema": {}, "end": ""} for x in "ab"], "triggers": ["a"]},
            "'b' begins with none of the triggers",
        ),
        (
            {"structures": [{"begin": "a", "schema": {"not": {}}, "end": ""}], "triggers": ["a"]},
            "schema has the keyword",
        ),
        (
            {
                "structures": [{"begin": "a", "schema": {"pattern": "(", "type": "string"}, "end": ""}],
                "triggers": ["a"],
            },
            "unclosed group",
        ),
        ({"format": {"type": "or", "elements": []}}, "format.type"),
    ],
)
def test_tags_that_cannot_be_held_are_refused(server: SimulatedServer, asked: Any, words: str) -> None:
    refused = server.ask(chat(structured_outputs={"structural_tag": asked}))
    assert refusal_of(refused)[0] == 400
    message = refused.json["error"]["message"]
    assert words in message
    assert "lead_0" not in message
    assert "TEXT" not in message


@pytest.mark.parametrize("asks", [chat, completion], ids=["chat", "completion"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "ended"),
    [
        ({"stop": ["b"]}, "aa", ("stop", "b")),
        ({"stop_token_ids": TOKENIZER.encode("b", add_special_tokens=False)}, "aa", ("stop", ...)),
        ({}, "aab", ("stop", None)),
        ({"stop": ["b"], "max_tokens": 1}, "a", ("length", None)),
    ],
)
def test_what_of_the_request_ends_a_held_answer_is_told(
    server: SimulatedServer, asks: Any, stream: bool, fields: dict[str, Any], text: str, ended: tuple[str, Any]
) -> None:
    answer = server.ask(asks(**{"guided_regex": "aab", "max_tokens": 20, "stream": stream} | fields))
    documents = answer.events[:-1] if stream else [answer.json]
    last = [one for document in documents for one in document["choices"]][-1]
    reason = fields["stop_token_ids"][0] if ended[1] is ... else ended[1]
    assert (answer.text(), last["finish_reason"], last["stop_reason"]) == (text, ended[0], reason)


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


def test_what_is_found_too_complex_in_mid_answer_is_refused(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarCompiler, "_probe", lambda *_: None)
    names = {f"a{i}": {"type": "integer"} for i in range(400)}
    schema = {"anyOf": [{"type": "object", "properties": {**names, name: {}}} for name in "bc"]}
    refused = server.ask(chat(guided_json=schema))
    assert (refusal_of(refused)[0], refused.json["error"]["code"]) == (400, "grammar_too_complex")
    streamed = server.ask(chat(guided_json=schema, **STREAM))
    assert b"grammar_too_complex" in streamed.body
    assert not server.generations.grammars._grammars  # they hold a hundred megabytes each
    assert server.ask(completion(guided_regex="ab?")).text() in ("a", "ab")


def test_documents_that_no_template_shows_are_refused(server: SimulatedServer) -> None:
    refused = server.ask(chat(documents=[{"text": "It is noon."}]))
    assert (refusal_of(refused)[0], refused.json["error"]["param"]) == (400, "documents")
    assert server.ask(chat(documents=[])).finish_reason() == "length"
