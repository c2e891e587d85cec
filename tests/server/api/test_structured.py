"""Fields that hold an answer to a form: each becomes its constraint, or is refused by name."""

from typing import Any

import pytest

from core.constraints import GrammarKind
from server.api import chat, completions, responses
from server.api.fields import GenerationCall
from tests.server.api import wire

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT_OF_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
ASK: Any = {"messages": [{"role": "user", "content": "Hi"}]}


def chat_call(**fields: Any) -> GenerationCall:
    return wire.parse(chat.SURFACE, **ASK, **fields)


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": NAMED}, "json_schema", TEXT_OF_SCHEMA, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}', "response_format"),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            "json_schema",
            TEXT_OF_SCHEMA,
            "response_format.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT_OF_SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT_OF_SCHEMA}}, "json_schema", TEXT_OF_SCHEMA, "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True}},
            "json_schema",
            '{"type":"object"}',
            "structured_outputs.json_object",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b.c"]}}, "regex", r"a|b\x{2e}c", "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"', "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT_OF_SCHEMA, "guided_json"),
        ({"json_schema": SCHEMA}, "json_schema", TEXT_OF_SCHEMA, "json_schema"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"guided_choice": ["x"]}, "regex", "x", "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"', "guided_grammar"),
    ],
)
def test_a_field_becomes_its_constraint(fields: dict[str, Any], kind: str, source: str, param: str) -> None:
    for surface, ask in ((chat.SURFACE, ASK), (completions.SURFACE, {"prompt": "Hi"})):
        found = wire.parse(surface, **ask, **fields).constraint
        assert found is not None
        assert (found.kind, found.source, found.param) == (GrammarKind(kind), source, param)


def test_responses_take_their_text_format_and_show_it() -> None:
    shape = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    call = wire.parse(responses.SURFACE, input="Hi", text={"format": shape})
    assert call.constraint is not None
    assert (call.constraint.source, call.constraint.param) == (TEXT_OF_SCHEMA, "text.format.schema")
    assert wire.whole(responses.SURFACE, call, (0, wire.say("{}", None)))["text"] == {
        "format": {"description": None} | shape
    }


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_what_asks_for_no_form_has_no_constraint(fields: dict[str, Any]) -> None:
    assert chat_call(**fields).constraint is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "one of json_object, json_schema"),
        ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
        ({"guided_json": "[" * 60_000}, "guided_json", "its JSON is nested deeper than 64"),
        ({"guided_json": 3}, "guided_json", "must be a JSON schema"),
        ({"structured_outputs": {"json": {"items": 3}}}, "structured_outputs.json", ".items must be a schema"),
        ({"json_schema": {"items": {"not": {}}}}, "json_schema", "json_schema.items has the keyword 'not'"),
        ({"regex": "a{99999}"}, "regex", "regex is longer than"),
        ({"grammar": "a" * 200_000, "guided_grammar": None}, "grammar", "grammar is larger than 128 KiB"),
        ({"ebnf": "a", "regex": "b"}, "ebnf", "regex and ebnf each constrain"),
        ({"guided_choice": []}, "guided_choice", "1 to 4096"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "is not valid JSON"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "Send one of them"),
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs.jsonn", "There is no structured_outputs.jsonn"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "Send one of them"),
        ({"guided_regex": "a", "response_format": NAMED}, "response_format", "Send one of them"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format.schema", "'not'"),
    ],
)
def test_a_form_that_cannot_be_held_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = wire.refusal(chat.SURFACE, **ASK, **fields)
    assert error.param == param
    assert words in error.message
