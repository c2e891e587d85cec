"""Grammars of tool calls: whatever a model samples is read as calls that fit their functions' schemas."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from core.answer_parts import Arguments, CallBegin, Text, ToolCallParser
from core.constraints import GrammarKind, GrammarSpec, json_schema
from core.errors import InvalidRequest
from core.grammar import Grammar
from core.tokenizer import Tokenizer
from core.tool_formats import FORMATS as TOOL_FORMATS
from core.tool_formats import markers_of
from core.tool_grammar import CannotHold, Tool, allowed_calls, required_calls
from server.loaded_engine import compiler_of
from tests.core.answer_texts import RENDER
from tests.core.grammars import compiler, tokenizer
from tests.core.random_schemas import SchemaMaker
from tests.core.small_tokenizers import byte_level, for_chats
from tests.core.test_grammar import Validator, check, sampled, taken

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "x"},
            "days": {"type": "integer"},
            "scale": {"enum": ["C", "F", 3, None]},
            "exact": {"type": "boolean"},
            "hours": {"type": "array", "items": {"type": "number"}},
            "where": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "name": {"type": "string"}},
                "required": ["lat"],
                "additionalProperties": False,
            },
        },
        "required": ["city", "exact"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "integer"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
}
TOOLS = [Tool(name, schema) for name, schema in SCHEMAS.items()]


def calls_in(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(TOOL_FORMATS[form], SCHEMAS)
    names: list[str] = []
    arguments: list[str] = []
    said = ""
    for event in parser.feed(text) + parser.close():
        match event:
            case CallBegin():
                names.append(event.name)
                arguments.append("")
            case Arguments():
                arguments[event.index] += event.text
            case Text():
                said += event.text
    return said, [(name, json.loads(one)) for name, one in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_required_calls_are_read_as_calls_that_fit_their_schemas(form: str) -> None:
    source = required_calls(TOOL_FORMATS[form], TOOLS, most_calls=3)
    grammar = compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
    num_calls = 0
    for seed in range(40):
        text = sampled(grammar, random.Random(seed), most=300)
        if text is None:
            continue
        said, calls = calls_in(form, text)
        assert said == ""
        assert 1 <= len(calls) <= 3
        for name, arguments in calls:
            Validator(SCHEMAS[name]).validate(arguments)
        num_calls += len(calls)
    assert num_calls > 10


@pytest.mark.parametrize("form", ["hermes", "gemma", "gemma4", "deepseek", "lfm"])
def test_marks_within_calls_are_their_special_tokens(form: str) -> None:
    """Where the model has such: spelled in other tokens they are refused, and the values that they enclose are free."""
    backend = for_chats(byte_level())
    marks = sorted(mark for mark in markers_of(form) if mark[0] == "<")
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    made = Tokenizer(backend.to_str())
    special = {made.str_of(token_id): token_id for token_id in made.special_ids}
    assert special.keys() >= set(marks)
    source = required_calls(TOOL_FORMATS[form], TOOLS, special)
    grammar = compiler_of(made, [special["<|im_end|>"]]).compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
    text = RENDER[form]([("get_weather", {"city": "Kö<ln", "exact": True}), ("now", {})])
    named = made.encode(text, add_special_tokens=False)
    spelled = [one for char in text for one in made.encode(char, add_special_tokens=False)]
    assert len(set(named) & {special[mark] for mark in marks}) > 1
    for ids, is_taken in ((named, True), (spelled, False)):
        state = grammar.start()
        for token_id in ids:
            state.accept(token_id)
        assert (state.fault is None and state.is_complete) is is_taken


@pytest.mark.parametrize("form", [name for name, one in TOOL_FORMATS.items() if not one.opens_answer])
def test_a_call_that_the_model_begins_is_held_and_text_is_free(form: str) -> None:
    source = allowed_calls(TOOL_FORMATS[form], TOOLS, most_calls=1)
    grammar = compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
    for lead in ("", "Let me see. <"):
        whole = sampled_behind(grammar, lead + TOOL_FORMATS[form].begins[0])
        said, calls = calls_in(form, whole)
        assert said == lead
        for name, arguments in calls:
            Validator(SCHEMAS[name]).validate(arguments)
        assert len(calls) == 1
    assert calls_in(form, sampled_behind(grammar, "No call"))[1] == []


@pytest.mark.parametrize(
    ("form", "begins", "texts"),
    [
        (
            "llama",
            ['{"name": "f"', ' {\n "type": "function"', '{"name": "g", "parameters": '],
            ["No call", '{"a": 1', '{"name": "other', '{"type": "object", "name": "f', '["f'],
        ),
        ("pythonic", ["[f(", " [ g (", "[f"], ["No call", "[1, 2", "[other(", "f("]),
    ],
)
def test_calls_that_no_mark_begins_are_told_from_text(form: str, begins: list[str], texts: list[str]) -> None:
    tools = [Tool(name, SCHEMAS["now"]) for name in "fg"]
    source = allowed_calls(TOOL_FORMATS[form], tools, most_calls=2)
    grammar = compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
    for begin in begins + texts:
        for seed in range(4):
            whole = sampled_behind(grammar, begin, seed)
            parser = ToolCallParser(TOOL_FORMATS[form], {tool.name: tool.schema for tool in tools})
            parts = [*parser.feed(whole), *parser.close()]
            num_calls = sum(isinstance(part, CallBegin) for part in parts)
            if begin in begins[:2]:
                assert 1 <= num_calls <= 2, whole
            if num_calls:
                assert begin in begins
                assert num_calls <= 2
                assert parser.num_complete == num_calls
                assert not any(isinstance(part, Text) for part in parts)


def sampled_behind(grammar: Grammar, begin: str, first_seed: int = 0) -> str:
    """An answer that begins so, once one of them is short enough."""
    for seed in range(first_seed, 200):
        state = grammar.start()
        token_ids = tokenizer().encode(begin, False)
        for token_id in token_ids:
            state.accept(token_id)
        rng, mask = random.Random(seed), np.zeros(grammar.num_words, np.int32)
        for _ in range(200):
            state.fill_mask(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            token_id = int(allowed[rng.randrange(len(allowed))])
            if token_id == tokenizer().eos_id:
                return tokenizer().decode(token_ids)
            token_ids.append(token_id)
            state.accept(token_id)
    raise AssertionError("none ends")


UNIONS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string", "enum": ["aa", "b"]}, {"type": "null"}]},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
    {"anyOf": [{"type": "string", "minLength": 3, "maxLength": 9}, {"type": "array", "items": {"type": "boolean"}}]},
    {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "boolean"}, {"const": 4}]},
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    {"type": ["string", "null"], "maxLength": 2},
    {"type": ["string", "integer"], "maxLength": 3},
    {"maxLength": 3},
    {"pattern": "^ab?$", "minimum": 5},
    {"type": ["string", "integer"], "minimum": -7, "exclusiveMaximum": 105, "maxLength": 1},
    {"anyOf": [{"enum": ["x"]}, {"type": "integer", "minimum": 0.5, "maximum": 1234}]},
    {"anyOf": [{"enum": ["x"]}, {"type": "number", "exclusiveMinimum": -2, "maximum": 11}]},
    {"anyOf": [{"enum": ["x"]}, {"type": "number", "exclusiveMinimum": 3}]},
    {"enum": ["1", 1, "true", None]},
    {"enum": ["1", 2]},
    {"type": "string", "enum": [1, "a", None]},
    {"type": ["string", "null"], "enum": [1, "a", None]},
    {"enum": ["a", "abc", 7, 9], "maxLength": 2, "minimum": 8},
    {"enum": ["a", [1, "b"]], "minItems": 2},
    {"type": ["integer", "null"], "multipleOf": 3, "minimum": 4},
    {"type": "number", "minimum": 0.25, "maximum": 0.75},
    {"allOf": [{"$ref": "#/$defs/e"}], "maxLength": 3},
    {"$ref": "#/$defs/e", "type": "string", "minLength": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    {"type": "string", "pattern": r"^\d[\w][^\W\d]\s?$"},
    {"const": {"a b'": [1, "x"], "c": {"d\\": None}}},
    {
        "type": "object",
        "properties": {"it's": {"type": "array", "items": True, "maxItems": 2}, "b\\": {"type": "null"}},
        "required": ["it's", "b\\"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"const": "a</parameter></arg_value>"}, "minItems": 1, "maxItems": 2},
    *({"type": ["string", "null"], "format": name} for name in ("duration", "hostname", "ipv4", "ipv6", "uuid")),
    {"type": "string", "pattern": "[a-c]*", "minLength": 2, "maxLength": 3},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
    {
        "type": ["object", "null"],
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
]


LIST = {  # which may hold itself
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 3},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]},
    },
    "required": ["n", "next"],
    "additionalProperties": False,
}


def strict(schema: dict[str, Any]) -> Tool:
    return Tool("f", json.loads(json_schema(schema, "parameters").source))


@pytest.mark.parametrize("union", UNIONS, ids=json.dumps)
@pytest.mark.parametrize("form", ["xml", "glm", "gemma", "pythonic"])
def test_a_string_or_something_else_is_held_as_it_is_read(form: str, union: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"g": union}, "required": ["g"], "additionalProperties": False}
    schema["$defs"] = {"e": {"enum": ["1", "x y", "true", "2"]}, "list": LIST}
    source = required_calls(TOOL_FORMATS[form], [strict(schema)], most_calls=1)
    grammar = compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
    num_calls = 0
    for seed in range(15):
        if (text := sampled(grammar, random.Random(seed), most=200)) is not None:
            parser = ToolCallParser(TOOL_FORMATS[form], {"f": schema})
            parts = [*parser.feed(text), *parser.close()]
            assert not any(isinstance(part, Text) for part in parts)
            Validator(schema).validate(json.loads("".join(one.text for one in parts if isinstance(one, Arguments))))
            num_calls += 1
    assert num_calls


END = "which ends a value"
LITERAL = ("pythonic", "gemma")


@pytest.mark.parametrize(
    ("form", "schema", "words"),
    [
        ("pythonic", {"type": "object", "patternProperties": {"a": {}}}, " has the keyword 'patternProperties'"),
        (
            "gemma",
            {"type": "array", "items": {"type": ["object", "null"], "minProperties": 1}},
            ".items has the keyword",
        ),
        ("xml", {"type": ["string", "integer"], "multipleOf": 3}, " has the keyword 'multipleOf'"),
        ("glm", {"enum": ["a"], "pattern": "a"}, " has the keyword 'pattern'"),
        (
            "xml",
            {"anyOf": [{"$ref": "#/$defs/x0"}, {"type": "string"}]},
            " has the keyword 'anyOf'. It has more than 128",
        ),
        ("pythonic", {"anyOf": [{"$ref": "#/$defs/x0"}]}, " has the keyword 'anyOf'. It has more than 128"),
        ("gemma", {"type": "array", "items": False, "minItems": 0}, ".items has the keyword 'false'"),
        (
            "pythonic",  # no object has two properties of one
            {
                "type": "array",
                "items": {"type": "object", "properties": {"b": {}}, "additionalProperties": False, "minProperties": 2},
            },
            ".items has the keyword 'false'",
        ),
        ("gemma", {"enum": [{"a": 1}], "properties": {"a": {"minimum": 2}}}, " has the keyword 'properties'"),
        ("xml", {"anyOf": [{"type": "integer"}, {"maxLength": 3}]}, " has the keyword 'anyOf'"),
        ("xml", {"const": "x\n</parameter>"}, f" has the keyword 'const'. It has '</parameter>', {END}"),
        (
            "xml",
            {"type": "string", "pattern": r"^a<\/parameter>$"},
            f" has the keyword 'pattern'. It has '</parameter>', {END}",
        ),
        ("glm", {"enum": ["a</arg_value>", "b"]}, f" has the keyword 'enum'. It has '</arg_value>', {END}"),
        (
            "gemma",
            {"type": "array", "items": {"const": "<escape>"}},
            f".items has the keyword 'const'. It has '<escape>', {END}",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_named(form: str, schema: dict[str, Any], words: str) -> None:
    doubled = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 8} for i in range(40)} | {"x40": {"type": "string"}}
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    tool = strict({**whole, "$defs": doubled})
    required_calls(TOOL_FORMATS["hermes"], [tool])
    with pytest.raises(CannotHold, match=re.escape(f"parameters.properties.a{words}")):
        required_calls(TOOL_FORMATS[form], [tool])
    required_calls(TOOL_FORMATS[form], [Tool("f", tool.schema, is_strict=False)])


INNER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a%62", "$defs": {"ab": INNER}},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INNER}},
        {"anyOf": [{"$ref": "#/$defs/a"}, {**INNER, "required": []}], "$defs": {"a": INNER}},
        {"additionalProperties": True},
        {"additionalProperties": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer", "minimum": 7}}},
        {"additionalProperties": {"anyOf": [{"type": "string", "maxLength": 2}, {"enum": [None, 7, [1]]}]}},
        {"additionalProperties": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("form", ["xml", "glm", "gemma", "pythonic", "hermes"])
def test_parameters_are_read_through_what_their_schema_refers_to(
    form: str, schema: dict[str, Any], is_strict: bool
) -> None:
    whole = {"type": "object", **schema}
    tool = strict(whole) if is_strict else Tool("f", whole, is_strict=False)
    grammar = compiler().compile(
        GrammarSpec(GrammarKind.TAGGED, required_calls(TOOL_FORMATS[form], [tool], most_calls=1), "tools")
    )
    call = RENDER[form]([("f", {"n": [7] if "array" in str(schema) else 7})])
    assert taken(grammar, call)
    is_reduced = isinstance(schema.get("additionalProperties"), dict) and not is_strict
    for text in (call, *(sampled(grammar, random.Random(seed), most=100) for seed in range(8))):
        if text is not None:
            parser = ToolCallParser(TOOL_FORMATS[form], {"f": whole})
            parts = [*parser.feed(text), *parser.close()]
            assert not any(isinstance(part, Text) for part in parts)
            arguments = "".join(one.text for one in parts if isinstance(one, Arguments))
            check(arguments, {"type": "object"} if is_reduced else whole)


@pytest.mark.parametrize(
    ("form", "names"),
    [("xml", ["a>b", " a", "a\n"]), ("glm", ["a</arg_key>b", "a "]), *((one, ["a b", "a=b", ""]) for one in LITERAL)],
)
def test_a_name_that_a_format_cannot_write_is_refused(form: str, names: list[str]) -> None:
    for name in names:
        schema = {
            "type": "object",
            "properties": {name: {}, "b": {}},
            "required": [name],
            "additionalProperties": False,
        }
        with pytest.raises(CannotHold, match=f"{re.escape(repr(name))} cannot be written as a name"):
            required_calls(TOOL_FORMATS[form], [strict(schema)])
        required_calls(TOOL_FORMATS[form], [Tool("f", schema, is_strict=False)])
    missing = {"type": "object", "properties": {}, "required": ["z"], "additionalProperties": {"type": "integer"}}
    with pytest.raises(CannotHold, match="'z' is not among its properties"):
        required_calls(TOOL_FORMATS[form], [strict(missing)])


def test_a_refused_tool_is_named_by_its_keyword() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a"}}, "required": ["a"]}
    source = required_calls(TOOL_FORMATS["hermes"], [TOOLS[1], Tool("f", schema)])
    schemas = tuple(
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(one), f"tools[{i}].function.parameters")
        for i, one in enumerate([*SCHEMAS.values(), schema])
    )
    with pytest.raises(InvalidRequest) as refused:
        compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools", schemas=schemas))
    place = f"tools[{len(SCHEMAS)}].function.parameters"
    assert str(refused.value).startswith(f"{place}.properties.a.pattern cannot be used: line 1, column 1: unclosed")
    assert (refused.value.param, "call_0" in str(refused.value)) == (place, False)


NUM_COMBINATIONS = 60


@pytest.mark.parametrize("form", ["hermes", "xml", "glm", "gemma", "pythonic"])
def test_combinations_of_keywords_are_held_or_refused(form: str) -> None:
    """Strict functions' arguments are valid by jsonschema; lenient ones' are read, whatever their schema says."""
    num_valid = num_refused = 0
    for seed in range(NUM_COMBINATIONS):
        rng = random.Random(seed)
        schema, is_strict = SchemaMaker(rng, is_bounded=True).parameters(), rng.random() < 0.75
        try:
            tool = strict(schema) if is_strict else Tool("f", schema, is_strict=False)
            source = required_calls(TOOL_FORMATS[form], [tool], most_calls=1)
            grammar = compiler().compile(GrammarSpec(GrammarKind.TAGGED, source, "tools"))
        except (CannotHold, InvalidRequest):
            num_refused += 1
            continue
        if (text := sampled(grammar, rng, most=200)) is not None:
            parser = ToolCallParser(TOOL_FORMATS[form], {"f": schema})
            parts = [*parser.feed(text), *parser.close()]
            assert not any(isinstance(part, Text) for part in parts), (seed, text)
            arguments = "".join(one.text for one in parts if isinstance(one, Arguments))
            check(arguments, schema if is_strict else {"type": "object"})
            num_valid += 1
    assert num_valid > NUM_COMBINATIONS // 4
    assert num_refused < NUM_COMBINATIONS // 2
