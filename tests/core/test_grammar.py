"""Grammars: whatever a model samples, a finished answer is valid; what cannot be held is refused by name."""

import contextlib
import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import numpy as np
import orjson
import pytest

from core.client_grammars import MAX_GRAMMAR_BYTES, client_grammar, repeats
from core.constraints import (
    FORMATS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_SOURCE_BYTES,
    MAX_TOTAL_DEPTH,
    GrammarKind,
    GrammarSpec,
    choice,
    json_schema,
    regex,
)
from core.errors import InvalidRequest
from core.grammar import MAX_DIGITS, Grammar, GrammarCompiler, NumberBounds, Vocabulary
from core.shortest_answer import shortest_answer
from tests.call_counter import InstructionCounter
from tests.core.grammars import compiler, tokenizer
from tests.core.random_schemas import SchemaMaker

PARAM = "response_format"
UUID4 = "0b0f3f6e-93a5-4a53-8b2c-3f6e93a5aa53"
Validator = jsonschema.Draft202012Validator


def sampled(grammar: Grammar, rng: random.Random, most: int = 600, preferred: Sequence[int] = ()) -> str | None:
    """An answer of which every token that may come is as likely; None: it is longer than `most` tokens.

    Args:
        preferred: the first of these that may come does.
    """
    state = grammar.start()
    mask = np.zeros(grammar.num_words, np.int32)
    token_ids: list[int] = []
    while len(token_ids) < most:
        state.fill_mask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        first = (one for one in preferred if mask[one >> 5] >> (one & 31) & 1)
        token_id = next(first, int(allowed[rng.randrange(len(allowed))]))
        if token_id == tokenizer().eos_id:
            assert state.is_complete
            return tokenizer().decode(token_ids)
        token_ids.append(token_id)
        state.accept(token_id)
    return None


def check(text: str, schema: Any) -> None:
    Validator(schema, format_checker=Validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("is_bounded", [True, False])
def test_every_finished_answer_is_valid(is_bounded: bool) -> None:
    """500 schemas; of those whose answers are bounded nearly all finish."""
    num_finished = 0
    for seed in range(250):
        rng = random.Random(seed)
        schema = SchemaMaker(rng, is_bounded).schema()
        text = sampled(compiler().compile(json_schema(schema, PARAM)), rng)
        if text is not None:
            num_finished += 1
            check(text, schema)
            shortest = shortest_answer(schema, PARAM, lambda pointer: schema["$defs"][pointer[8:]]).num_characters  # noqa: B023
            assert shortest <= len(json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")))
    assert num_finished >= (248 if is_bounded else 200)


def optional(count: int) -> dict[str, Any]:
    """An object of so many properties that may be left out."""
    names = {f"a{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


def test_how_many_of_the_optional_properties_there_are_is_held() -> None:
    for bounds in (
        {"minProperties": 2},
        {"maxProperties": 1},
        {"required": ["a2"], "minProperties": 3, "maxProperties": 3},
    ):
        grammar = compiler().compile(json_schema({**optional(4), **bounds}, PARAM))
        for seed in range(10):
            check(sampled(grammar, random.Random(seed)) or "{}", {**optional(4), **bounds})


def test_answers_of_one_grammar_do_not_count_against_one_another() -> None:
    """Copies of a matcher share their lexer's states, which the limits count together."""
    hungry = regex(r"(.|\n)*[a-m](.|\n){60}c", PARAM)
    shared = compiler().compile(hungry)

    def walked(grammar: Grammar, seed: int) -> list[int]:
        state, rng, mask, token_ids = grammar.start(), random.Random(seed), np.zeros(grammar.num_words, np.int32), []
        for _ in range(50):
            state.fill_mask(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
            token_ids.append(int(allowed[rng.randrange(len(allowed))]))
            state.accept(token_ids[-1])
        assert state.fault is None
        return token_ids

    assert [walked(shared, seed) for seed in range(8)] == [walked(compiler().compile(hungry), s) for s in range(8)]


def test_a_control_token_s_name_is_text_where_an_answer_has_to_have_it() -> None:
    name = tokenizer().str_of(tokenizer().eos_id)
    for spec, text in ((json_schema({"const": f"a{name}b"}, PARAM), f'"a{name}b"'), (choice([name], PARAM), name)):
        grammar = compiler().compile(spec)
        assert sampled(grammar, random.Random(1)) == text
        assert tokenizer().eos_id not in grammar.start().forced()


def test_constants_that_differ_are_apart_and_items_may_be_equal() -> None:
    schema = {"type": "array", "items": {"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, "minItems": 1, "maxItems": 3}
    grammar = compiler().compile(json_schema({**schema, "uniqueItems": False}, PARAM))
    check(sampled(grammar, random.Random(1)) or "", schema)


def test_a_union_is_checked_in_time_that_grows_with_it() -> None:
    counts = []
    for num_members in (250, 500):
        with InstructionCounter(lambda path: path.endswith("constraints.py")) as counter:
            json_schema({"oneOf": [{"const": f"word {index}"} for index in range(num_members)]}, PARAM)
        counts.append(counter.num_instructions)
    assert counts[1] < 2.2 * counts[0]  # it grew as its square


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


PETS = {
    "cat": _object(id={"type": "integer"}, kind={"const": "cat"}),
    "dog": _object(kind={"enum": ["dog", "pup"]}, b={}),
}
NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "answers", "others"),
    [
        (  # as pydantic writes unions with a discriminator
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}], "$defs": PETS},
            ['{"id":1,"kind":"cat"}', '{"kind":"pup","b":[]}', "null"],
            ['{"id":1,"kind":"dog"}', '{"kind":"cat","b":1}'],
        ),
        ({**NUMBERS, "propertyNames": {"type": "string"}}, ['{"a":1}', "{}"], ['{"a":"b"}']),  # as zod writes them
        ({**NUMBERS, "propertyNames": {"enum": ["a", "b"]}}, ['{"b":1}', "{}"], ['{"c":1}', '{"a":"b"}']),
        (
            {**NUMBERS, "propertyNames": {"$ref": "#/$defs/e"}, "$defs": {"e": {"type": "string", "const": "a"}}},
            ['{"a":1}'],
            ['{"c":1}'],
        ),
        ({**NUMBERS, "propertyNames": {"pattern": "^a"}}, ['{"ab":1}'], ['{"ba":1}', '{"a":"b"}']),
        ({**NUMBERS, "propertyNames": {"format": "date"}}, ['{"2026-11-28":1}'], ['{"2026-11-31":1}']),
        ({"type": ["string", "null"], "pattern": "b", "format": "email"}, ["null", '"b@c.d"'], ['"a@c.d"', '"b"']),
        ({"type": "string", "format": "path"}, ['"/a"'], ["1"]),
        ({"type": "string", "format": "uuid4"}, [f'"{UUID4}"'], [f'"{UUID4.replace("-4", "-1")}"']),
        ({"type": "string", "contentMediaType": "application/json", "contentSchema": {}}, ['"[]"'], ["[]"]),
    ],
)
def test_what_libraries_write_of_types_is_held(schema: dict[str, Any], answers: list[str], others: list[str]) -> None:
    grammar = compiler().compile(json_schema(schema, PARAM))
    assert [text for text in [*answers, *others] if taken(grammar, text)] == answers


def test_what_openapi_adds_is_taken() -> None:
    schema = {"type": "integer", "minimum": 3, "maximum": 4, "nullable": True, "x-order": 3, "example": 4}
    grammar = compiler().compile(json_schema(schema, PARAM))
    assert {sampled(grammar, random.Random(seed)) for seed in range(40)} == {"3", "4", "null"}


@pytest.mark.parametrize(
    "pattern",
    [
        *(f"^{one}$" for one in (r'[^"]{3,6}', r"[^\\]{3,6}", r'[^"\\]+', r"[^]-a]{2}", r"[^-\"]", r"[\x00-!#-~]{2}")),
        *(f"^{one}$" for one in (r"[[a]]", r"[[:alpha:]]", r"[a&&b~~]{3}", r'[^[\]"]{3}', r"[^\n\"a]{2,}")),
    ],
)
def test_expressions_are_read_as_json_schema_has_them(pattern: str) -> None:
    texts = [
        json.dumps(one)
        for one in ('aaa"', 'b"b', "b\\b", "bbb", "[]", "a]", "a", "[", "]", "-", '"', "&&b", "~b", "l]")
    ]
    grammar = compiler().compile(json_schema({"type": "string", "pattern": pattern}, PARAM))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for text in texts:
            assert taken(grammar, text) == (re.search(pattern, json.loads(text)) is not None), text


NUMBERS: list[tuple[dict[str, Any], Sequence[str]]] = [
    ({"type": "number"}, ("9",)),
    ({"type": "number"}, ("E", "+", "9", "1")),
    ({}, ("9", "E", "+")),
    ({"type": "number", "title": "n"}, ("512", "256", "e", "1")),
    ({"type": "integer", "multipleOf": 7}, ("9", "5", "3")),
    ({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}, ("[", "1", "e", "9")),
]


@pytest.mark.parametrize(("schema", "preferred"), NUMBERS)
def test_numbers_are_finite_for_those_who_read_them(schema: dict[str, Any], preferred: Sequence[str]) -> None:
    """Though models would go on with them: JSON has no bound on digits."""
    grammar = compiler().compile(json_schema(schema, PARAM))
    token_ids = [tokenizer().encode(text, False)[-1] for text in preferred]
    for chosen in (token_ids, token_ids[::-1], ()):
        for seed in range(40):
            if (answer := sampled(grammar, random.Random(seed), preferred=chosen)) is not None:
                orjson.loads(answer)  # refuses 1e999
                Validator(schema).validate(json.loads(answer))
                assert len(answer) < 2 * MAX_DIGITS + 40
            else:
                assert not chosen


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (["1", "e"], ["1", "23", "e", "+", ","]),
        (["1", "e", "+", "1"], ["1", "e", "+", ","]),
        (["1", "e", "+", "23"], ["e", "+", ","]),
        ([",", "-", "23", "e", "1", "1"], ["e", "+", ","]),
        (["23"] * 110, ["e", "+", ","]),
        (["q", "1", "e", "23"], ["1", "23", "456", "e", "+", ","]),  # of a text, as far as can be told
        (["1"], ["1", "23", "456", "e", "+", ","]),
    ],
)
def test_tokens_of_many_digits_are_bounded_as_single_ones_are(text: list[str], allowed: list[str]) -> None:
    tokens = ["q", "1", "23", "456", "e", "+", "e789", ",", "-"]
    mask = np.full(1, 0b11111110 if text == ["1"] else 0b10111110, np.int32)  # neither q, which no number has, nor -
    NumberBounds([one.encode() for one in tokens], 1).narrow(mask, [tokens.index(one) for one in text])
    assert mask[0] == sum(1 << tokens.index(one) for one in allowed)


def test_texts_of_digits_are_free() -> None:
    schema = {"type": "string", "pattern": "^5e(123456-|9{300})$"}
    grammar = compiler().compile(json_schema(schema, PARAM))
    for text in ("5e123456-", "5e" + "9" * 300):
        assert taken(grammar, f'"{text}"')


def test_no_escape_in_a_name_gets_round_its_schema() -> None:
    for named in ({"properties": {"ab": {"type": "integer"}}}, {"patternProperties": {"^a": {"type": "integer"}}}):
        schema = {"type": "object", **named, "additionalProperties": {"type": "string"}}
        grammar = compiler().compile(json_schema(schema, PARAM))
        assert not taken(grammar, r'{"\u0061b": "x"}')
        assert taken(grammar, '{"b": "x"}')
        assert taken(grammar, '{"ab": 1}')
    grammar = compiler().compile(json_schema({"enum": ["a\x01", "b\x7f"]}, PARAM))
    assert {json.loads(sampled(grammar, random.Random(seed)) or "") for seed in range(20)} == {"a\x01", "b\x7f"}


def taken(grammar: Grammar, text: str) -> bool:
    """Whether the text is an answer."""
    state = grammar.start()
    for token_id in tokenizer().encode(text, add_special_tokens=False):
        state.accept(token_id)
    return state.fault is None and state.is_complete


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_held(name: str) -> None:
    for extra in ({}, {"maxLength": 40, "pattern": "[0-9a-zA-Z]$"}):
        schema = {"type": "string", "format": name, **extra}
        grammar = compiler().compile(json_schema(schema, PARAM))
        for seed in range(30):
            if (text := sampled(grammar, random.Random(seed))) is not None:
                check(text, schema)


def test_json_is_not_filled_with_blanks() -> None:
    grammar = compiler().compile(json_schema({"type": "object", "properties": {"a": {}}, "required": ["a"]}, PARAM))
    state = grammar.start()
    for token_id in tokenizer().encode("{" + "\n" + " " * 24, False):
        state.accept(token_id)
    assert state.fault is None
    (blank,) = tokenizer().encode(" ", False)
    state.accept(blank)
    assert state.fault is not None


def test_a_model_that_prefers_blanks_finishes() -> None:
    """It takes a blank wherever one may come, and of the blanks the longest."""
    pieces = [tokenizer().decode([token_id]) for token_id in range(tokenizer().vocab_size)]
    blanks = sorted((i for i, one in enumerate(pieces) if one and not one.strip()), key=lambda i: -len(pieces[i]))
    for seed in range(50):
        schema = SchemaMaker(random.Random(seed), is_bounded=True).schema()
        grammar = compiler().compile(json_schema(schema, PARAM))
        text = sampled(grammar, random.Random(seed), most=1500, preferred=blanks)
        assert text is not None
        check(text, schema)


def test_expressions_choices_and_grammars_are_held() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        assert re.fullmatch(r"[a-c]{2,4}\d", sampled(compiler().compile(regex(r"[a-c]{2,4}\d", PARAM)), rng) or "")
        texts = ["yes", "no (a|b)", "ü.*", "a\nb"]
        assert sampled(compiler().compile(choice(texts, PARAM)), rng) in texts
        for source in ('start: "a" start | "b"', 'root ::= "a" root | "b"'):
            assert re.fullmatch("a*b", sampled(compiler().compile(client_grammar(source, PARAM)), rng) or "b")


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "null"}


def chain(num_links: int) -> dict[str, Any]:
    """Each definition holds the next."""
    links = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(num_links)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num_links}": {"type": "boolean"}}}


def _counted(one: Any) -> dict[str, Any]:
    """An object that has at most six of its seven optional properties."""
    nulls = {name: {"type": "null"} for name in "bcdefg"}
    return {"type": "object", "properties": {"a": one, **nulls}, "additionalProperties": False, "maxProperties": 6}


ITEMS = "response_format.properties.k.items cannot be satisfied: no value"


def _listed(items: dict[str, Any]) -> dict[str, Any]:
    listed = {"type": "array", "items": items, "minItems": 1}
    return {"type": "object", "properties": {"k": listed}, "required": ["k"]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "response_format.properties.a has the keyword 'not'"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "response_format.anyOf[1] has the keyword 'uniqueItems'"),
        ({"colour": "red"}, "response_format has the keyword 'colour'"),
        ({"$ref": "https://example.org/s.json"}, "response_format.$ref is 'https://example.org/s.json'. It must point"),
        ({"x-guidance": {"lenient": True}}, "response_format has the keyword 'x-guidance'"),
        ({"properties": {"a": {"required": None}}}, "response_format.properties.a.required must be a list of names"),
        ({"required": [1]}, "response_format.required must be a list of names"),
        ({"minItems": "1"}, "response_format.minItems must be a whole number, at least 0"),
        ({"maxLength": True}, "response_format.maxLength must be a whole number, at least 0"),
        ({"minimum": []}, "response_format.minimum must be a number"),
        ({"multipleOf": 0}, "response_format.multipleOf must be a number above 0"),
        ({"enum": []}, "response_format.enum must be a list of values"),
        ({"type": []}, "response_format.type must be one of array, boolean"),
        ({"type": ["string", {}]}, "response_format.type must be one of array, boolean"),
        *(
            (
                {
                    "properties": {
                        "a": {"$ref": f"#/properties/b/{way}"},
                        "b": {"const": {}, "enum": [{}], "default": {}},
                    }
                },
                f"response_format.properties.a.$ref is '#/properties/b/{way}'. It must point to a schema in this one",
            )
            for way in ("const", "enum/0", "default")
        ),
        ({"format": ["a"]}, "response_format.format must be one of"),
        ({"pattern": "(a{999}){99}"}, "response_format.pattern is longer than 20000 characters"),
        ({"pattern": 3}, "response_format.pattern must be a regular expression"),
        ({"nullable": "yes"}, "response_format.nullable must be true or false"),
        ({**optional(8), "minProperties": 2}, "can be enforced only with type object"),
        ({**optional(3), "maxProperties": 2, "additionalProperties": {}}, "can be enforced only with type object"),
        ({"type": "string", "format": "iban"}, "response_format.format must be one of date, date-time"),
        ({"items": {"type": "strin"}}, "response_format.items.type must be one of array, boolean"),
        ({"items": 3}, "response_format.items must be a schema"),
        ({"properties": []}, "response_format.properties must be an object of schemas"),
        ({"anyOf": []}, "response_format.anyOf must be a list of schemas"),
        ({"$ref": "#/$defs/none"}, "response_format.$ref is '#/$defs/none'"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        (
            {"items": {"type": "string", "pattern": "(?=a)b"}},
            "response_format.items.pattern cannot be used: line 1, column 1: look",
        ),
        ({"patternProperties": {"(": {}}}, "response_format.patternProperties cannot be used"),
        (nested(MAX_DEPTH + 1), f"deeper than {MAX_DEPTH} levels"),
        (
            {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "response_format.items.oneOf cannot be enforced, as more than one of its schemas may fit. Use anyOf",
        ),
        (
            {"items": {"oneOf": [_object(kind={"enum": ["a", "b"]}), _object(kind={"enum": ["b"]})]}},
            "response_format.items.oneOf cannot be enforced",
        ),
        ({"oneOf": [{"pattern": "^[^a]*$", "format": "email"}, {"type": "array"}]}, "response_format.oneOf cannot be"),
        (
            {"items": {"propertyNames": {"minLength": 3}}},
            "response_format.items.propertyNames can be enforced only as an enum",
        ),
        (
            {"properties": {"a": {}}, "propertyNames": {"enum": ["a"]}, "type": "object"},
            "response_format.propertyNames can be enforced only",
        ),
        (_counted(_counted(_counted({"type": "integer"}))), "The request's schemas, expanded, are larger than 512 KiB"),
        ({"enum": ["x" * MAX_SOURCE_BYTES]}, "is larger than 512 KiB"),
        (chain(MAX_TOTAL_DEPTH), f"nested deeper than {MAX_TOTAL_DEPTH} levels when its references are followed"),
        ({**chain(2000), "type": "array", "items": {"$ref": "#/$defs/d1"}}, "references are followed"),
        ({"patternProperties": {f"^{i}$": {} for i in range(65)}}, "more than 64 patternProperties"),
        (
            {"allOf": [{"type": "string", "pattern": f"a{{{i},}}b*"} for i in range(13)]},
            "more than 12 schemas with allOf",
        ),
        ({"$ref": "#"}, "cannot be"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "cannot be"),
        ({"type": "integer", "minimum": 2**63}, "response_format.minimum is beyond 2**53"),
        ({"properties": {"a": {"enum": [1, 10**22]}}}, "response_format.properties.a.enum is beyond 2**53"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, "less than 1 apart"),
        ({"type": "object", "minProperties": 3}, "response_format.minProperties is more than the number of required"),
        (
            {"required": ["a", "a"], "minProperties": 2},
            "response_format.minProperties is more than the number of required",
        ),
        ({"anyOf": [optional(481)]}, "response_format.anyOf[0] has more than 480 optional properties"),
        ({**optional(481), "required": [f"b{i}" for i in range(9)]}, "has more than 480 optional properties"),
        ({"type": "array", "minItems": 1, "items": {"anyOf": [optional(300), optional(400)]}}, "is too complex"),
        ({"const": [[10**30]]}, "response_format.const is beyond 2**53"),
        (_listed({"type": "string", "minLength": 5, "pattern": "^a{1,3}$"}), f"{ITEMS} fits its minLength and pattern"),
        (_listed({"type": "string", "format": "date", "maxLength": 5}), f"{ITEMS} fits its maxLength and format"),
        (_listed({"enum": ["a"], "pattern": "^b"}), f"{ITEMS} fits its enum and pattern"),
        (False, "must be a JSON schema"),
        ([], "must be a JSON schema"),
        (None, "must be a JSON schema"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        compiler().compile(json_schema(schema, PARAM))
    assert refused.value.param == PARAM


def rules(start: str, rule: str, count: int = 5000) -> str:
    return start + "".join(rule.format(i, i + 1) for i in range(count))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: regex("(a", PARAM), "unclosed group"),
        (lambda: regex("(?=a)b", PARAM), "look-around"),
        (lambda: regex("a{1000}{1000}", PARAM), "is longer than 20000 characters"),
        (lambda: regex("((b|[^]{9}]{100}){99,}c){1,100}", PARAM), "is longer than 20000 characters"),
        (
            lambda: client_grammar('start: "a" | b\nb: "<c>" <|im_end|> "d"', PARAM),
            "line 2, column 10: '<|im_end|>' cannot",
        ),
        (lambda: client_grammar('start: x\nx[temperature=2.0]: "y"', PARAM), "line 2, column 3: 'temperature=' cannot"),
        (lambda: choice([], PARAM), "must have 1 to 4096 choices"),
        (lambda: choice(["x"] * (MAX_CHOICES + 1), PARAM), "must have 1 to 4096 choices"),
        (lambda: client_grammar("start: (", PARAM), "1 | start: ("),
        (lambda: client_grammar("start: start", PARAM), "line 1, column 1: no text of the rule start has an end"),
        (
            lambda: client_grammar('start: a?\n?a: ("x" a | b)+ -> c\nb: "y" [a] b', PARAM),
            "line 2, column 2: no text of",
        ),
        (lambda: client_grammar('root ::= "a" | b\nb ::= "a" b', PARAM), "line 2, column 1: no text of the rule b has"),
        (lambda: client_grammar('start: a\na[capture]: "x"', PARAM), "line 2, column 3: 'capture' cannot"),
        (lambda: client_grammar('start: a\na[lazy, stop="x"]: /.*/', PARAM), "line 2, column 9: 'stop=' cannot"),
        (
            lambda: client_grammar('%llguidance {"no_forcing": true}\nstart: "a"', PARAM),
            "'{\"no_forcing\": true}' cannot",
        ),
        (lambda: client_grammar("start: @other", PARAM), "line 1, column 8: '@other' cannot"),
        (lambda: regex("ab\\", PARAM), "line 1, column 3: incomplete escape"),
        (lambda: regex("a\nb(", PARAM), "line 2, column 2: unclosed group"),
        (lambda: regex(r"[^\s\S]", PARAM), "cannot be"),
        (lambda: client_grammar(rules("start: r0\n", 'r{}: "x" r{}\n'), PARAM), "more than 500 rules"),
        (lambda: client_grammar(rules("root ::= r0\n", 'r{} ::= "x" r{}\n'), PARAM), "more than 500 rules"),
        (lambda: client_grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000, PARAM), "more than 64 brackets"),
        (
            lambda: client_grammar("start: %json {}", PARAM),
            "line 1, column 8: '%json' cannot be used: answers are text. Send a schema",
        ),
        (lambda: client_grammar("start: T\nT: " + " & ".join(["/a*/"] * 20), PARAM), "more than 12 of & and ~"),
        (lambda: client_grammar('start: "' + "a" * 200_000 + '"', PARAM), "is larger than 128 KiB"),
        # Brackets in texts close none
        (lambda: client_grammar("start: " + '("(" ")" ' * 65 + ")" * 65, PARAM), "more than 64 brackets"),
        (lambda: client_grammar("root ::= " + '("[" [)] ' * 65 + ")" * 65, PARAM), "more than 64 brackets"),
        (lambda: client_grammar('start: "a"\n  other', PARAM), "cannot be used: line 2, column"),
        (lambda: client_grammar("start: B\nB: /(?=a)/\n", PARAM), "cannot be used: line 2, column 4: invalid regex"),
        *(
            (lambda source=source: client_grammar(source, PARAM), f"cannot be read as GBNF: {words}")
            for source, words in {
                "root ::= (": "line 1, column 11: it ends where the ) of the ( at line 1, column 10 must be",
                'root ::= "a"\n\n b ::= c "a': "line 3, column 10: it has '\"', which is not closed",
                "root ::= a\na ::= b": "line 2, column 7: there is no rule b",
                r'root ::= "ab\q"': r"line 1, column 13: '\\q' does not begin with a character's escape",
                r"root ::= [\uD800]": "line 1, column 11: ",
                "root ::= [z-a]": "line 1, column 10: the range z-a ends below",
                "root ::= []": "line 1, column 10: no character",
                'root ::= "a"{3,2}': "line 1, column 13: {3,2} ends below",
                'root ::= ("a"{200}){200}': "line 1, column 20: more than 20000 characters",
                'root ::= "a"\nroot ::= "b"': "line 2, column 1: the rule root is defined twice",
                'root ::= "a" <think>': "line 1, column 14: it has '<'",
            }.items()
        ),
    ],
)
def test_a_broken_expression_or_grammar_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        compiler().compile(make())
    assert refused.value.param == PARAM


def test_wide_objects_are_held_with_many_words_and_ambiguous_grammars_end_early() -> None:
    """By counts of the parser's items: what costs more with a longer vocabulary, and what does with a longer answer."""
    letters = [bytes([one]) for one in range(97, 123)]
    words = [a + b + c for a in letters for b in letters for c in letters]
    vocabulary = Vocabulary(
        [*(bytes([byte]) for byte in range(256)), *words, b"<end>"], [256 + len(words)], [256 + len(words)]
    )
    wordy = GrammarCompiler(vocabulary, lambda text: list(text.encode()))
    state = wordy.compile(json_schema(optional(480), PARAM)).start()
    mask = np.zeros(wordy.compile(regex("a", PARAM)).num_words, np.int32)
    for token_id in b'{"a400":1':
        state.fill_mask(mask)
        state.accept(token_id)
    assert state.fault is None
    for source in ("start: e\ne: e e | /[a-z]/", 'start: e\ne: e e e | e e | "a" | "ab" | /[a-z]{1,4}/'):
        state = compiler().compile(client_grammar(source, PARAM)).start()
        mask = np.zeros(compiler().compile(regex("a", PARAM)).num_words, np.int32)
        while state.fault is None:
            state.fill_mask(mask)
            state.accept(tokenizer().encode("a", add_special_tokens=False)[0])
        assert state.num_accepted < 300
        assert state.is_too_complex


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('start: a\na: "x" a | b | c\nb: "y" (a | "z")\nc: "x" [c] "y"', "xxyz"),
        ('%llguidance {}\nstart: "a" start? // start: start\n  | start~0', "aaa"),
        ('start: (a)* "b"\na: "/:" start\n%ignore / /', "/:bb"),
        ('start: t::0\nt::_: "a" t::incr([0:2]) %if lt([0:2], 2) | "b"', "aab"),
        ('start: "a" [capture]\ncapture: "b"', "ab"),
        ('start: "%json <x> @y capture" | e\ne: ', "%json <x> @y capture"),
        ('root ::= a b?\na ::= ("x" root){0,2} | a "y"\nb ::= "(" [^(]', "x(y"),
    ],
)
def test_a_grammar_whose_texts_end_is_held(source: str, text: str) -> None:
    state = compiler().compile(client_grammar(source, PARAM)).start()
    for token_id in tokenizer().encode(text, add_special_tokens=False):
        state.accept(token_id)
    assert (state.fault, state.is_complete) == (None, True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('start: /[^x]{5,40}/ "x*"', False),
        ('start: a | T b?\na: "+" b\nb: T\nT: /a*/ "b"+', False),
        ("start: a*\na: /x/", True),
        ("start: (a a)+\na: /x/", True),
        ("start: a{2,}\na: /x/", True),
        ("start: a\na: b\nb: /x/ | a b", True),
        ("start: a -> b\na: /x/ /y/ # a*", False),
        ('start: a\na: %regex {"pattern": "x"}', True),  # not understood
    ],
)
def test_grammars_that_repeat_nothing_have_more_room(source: str, expected: bool) -> None:
    assert repeats(source) == expected


GBNF = {
    r'root ::= "\u000a\x0a" start' + "\n" + r"start ::= [\]a-]": r"\n\n[\]a-]",
    'root ::= ("a"{2}){3} ("b"?)* # a comment ( "': "a{6}b*",
    "root ::= [+--]{3} [&&b]{2,} [^]": r"[+,-]{3}[&b]{2,}[\s\S]",
    'root ::= "a" # one\n  | .{2}': r"a|[\s\S]{2}",
    'root ::= word "ab" ("/" [/"\\\\])?\nword ::= [a-z]{1,3}': r'[a-z]{1,3}ab(/[/"\\])?',
    'ROOT ::= "b"\nroot ::= ROOT a-b ws\na-b ::= a_b\na_b ::= "c"\nws ::= | " "': "bc ?",
    'root ::= "(" root ")" | |': r"\(*\)*",
    'root ::= "é" [^\\x00-\\U0010FFFE]': "é\U0010ffff",
}


@pytest.mark.parametrize("source", GBNF)
def test_what_llama_cpp_writes_is_held(source: str) -> None:
    grammar = compiler().compile(client_grammar(source, PARAM))
    found = [text for seed in range(8) if (text := sampled(grammar, random.Random(seed), 40)) is not None]
    assert found
    assert all(re.fullmatch(GBNF[source], text) for text in found)


@pytest.mark.parametrize(
    "part", ["\n", "a", '"', '"\\\\', "[", "[a", "[\\\\", "/", "/a", "root ::= [a", "{9", "(", "a\n"]
)
def test_what_is_long_and_unclosed_is_read_once(part: str) -> None:
    """Expressions that try its beginnings over and over would take minutes, with the GIL."""
    text = part * (MAX_GRAMMAR_BYTES // len(part) - 9)
    for read in (
        lambda: regex(text, PARAM),
        lambda: client_grammar(text, PARAM),
        lambda: compiler().compile(client_grammar(f"root ::= {text}", PARAM)),
    ):
        with contextlib.suppress(InvalidRequest):
            read()


def test_a_refused_grammar_shows_nothing_but_what_was_sent() -> None:
    doubled = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"'
    with pytest.raises(InvalidRequest, match="too big") as refused:
        compiler().compile(client_grammar(doubled, PARAM))
    assert "T13" not in str(refused.value)


def test_tokens_that_have_to_come_are_told() -> None:
    state = compiler().compile(json_schema({"const": "a long constant text"}, PARAM)).start()
    assert tokenizer().decode(state.forced()) == '"a long constant text"'


def test_where_a_token_has_to_come_the_mask_allows_it_alone() -> None:
    """So that it makes no difference to an answer whether forced tokens are sampled."""
    num_forced = 0
    for seed in range(20):
        rng = random.Random(seed)
        grammar = compiler().compile(json_schema(SchemaMaker(rng, is_bounded=True).schema(), PARAM))
        state, mask = grammar.start(), np.zeros(grammar.num_words, np.int32)
        while not state.has_ended:
            state.fill_mask(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
            if forced := state.forced():
                num_forced += 1
                assert allowed == forced[:1]
            state.accept(rng.choice(allowed))
    assert num_forced > 100


def test_a_token_is_taken_back() -> None:
    state = compiler().compile(choice(["ab", "cd"], PARAM)).start()
    (a,) = tokenizer().encode("a", False)
    (c,) = tokenizer().encode("c", False)
    state.accept(a)
    state.roll_back(1)
    state.accept(c)
    assert state.num_accepted == 1


# Tools


def test_what_is_as_deep_as_allowed_is_compiled() -> None:
    """Of a thread's stack the library needs the less."""
    deep = MAX_TOTAL_DEPTH // 4
    compiler().compile(json_schema(chain(deep), PARAM))
    compiler().compile(client_grammar(rules("start: r0\n", 'r{}: "x" r{}\n', 490) + 'r490: "x"', PARAM))


def test_what_holds_less_is_used_where_more_cannot_be_held() -> None:
    spec = GrammarSpec(GrammarKind.REGEX, "(?=a)b", PARAM, fallback=GrammarSpec(GrammarKind.REGEX, "b", PARAM))
    assert sampled(compiler().compile(spec), random.Random(1)) == "b"


def _chain(link: Callable[[str], dict[str, Any]], pointer: str = "#/$defs/a{}", num: int = 300) -> dict[str, Any]:
    """Schemas, each of which refers to the next."""
    links = {f"a{i}": link(pointer.format(i + 1)) for i in range(num)}
    return {"$defs": {**links, f"a{num}": {"type": "integer"}}, "$ref": pointer.format(0)}


def _property(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda pointer: {"type": "object", "properties": {name: {"$ref": pointer}}, "required": [name]}


@pytest.mark.parametrize(
    "schema",
    [
        *(_chain(_property(name)) for name in ("default", "enum", "const", "examples", "$defs")),
        _chain(lambda pointer: {"anyOf": [{"$ref": pointer}]}, "#/$defs/a{}"),
        {"anyOf": [*({"$ref": f"#/anyOf/{i + 1}"} for i in range(300)), {"type": "integer"}]},
        _chain(_property("x"), "#/%24defs/a{}"),
        {"$defs": {f"a{i}": {"$anchor": f"n{i}", **_property("x")(f"#n{i + 1}")} for i in range(300)}, "$ref": "#n0"},
        {"$defs": {"": _chain(_property("x"), "#/$defs//$defs/a{}")}, "$ref": "#/$defs//$defs/a0"},
        {"$ref": "#/$defs/none"},
        {"$defs": {"a": [5]}, "$ref": "#/$defs/a/0"},
    ],
)
def test_no_chain_of_references_gets_past_the_bounds(schema: dict[str, Any]) -> None:
    """The library recurses along them, without a guard of its stack."""
    with pytest.raises(InvalidRequest, match=r"levels when its references are followed|points to no schema"):
        json_schema(schema, "schema")


def test_references_into_arrays_and_recursion_are_held() -> None:
    json_schema({"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "integer"}]}, "schema")
    json_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}, "schema")
    for pointer in ("#/$defs/Größe [a|c]", "#/$defs/Gr%C3%B6%C3%9Fe%20%5Ba%7Cc%5D"):
        schema = {"$defs": {"Größe [a|c]": {"const": 7}}, "type": "array", "items": {"$ref": pointer}, "minItems": 1}
        assert taken(compiler().compile(json_schema(schema, PARAM)), "[7,7]")
