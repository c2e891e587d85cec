"""Schemas that contradict themselves: told where some answer cannot be, never where one can."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from core.constraints import GrammarSpec, json_schema
from core.errors import InvalidRequest
from core.grammar import GrammarCompiler, Vocabulary
from core.shortest_answer import shortest_answer
from tests.core.random_schemas import SchemaMaker

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
VALUES = [None, True, 0, 1, 2, 1.5, "", "a", "abc", [], [1], [1, "a"], {}, {"": 1}, {"a": 1}, {"a": "abc", "b": None}]


def required(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}


@pytest.mark.parametrize(
    ("schema", "path", "why"),
    [
        (required({"$ref": "#"}), ".properties.x", "it requires itself within itself"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ".items", "it requires itself within itself"),
        ({"anyOf": [{"$ref": "#/$defs/node"}, False], "$defs": {"node": NODE}}, ".properties.next", "within itself"),
        (required({"anyOf": [{"$ref": "#"}, {"type": "array", "minItems": 1, "items": False}]}), ".x", "alternatives"),
        (required(False), ".properties.x", "its schema is false"),
        (required({}, additionalProperties=False, required=["y"]), ".properties.y", "its schema is false"),
        (required({"type": "integer", "minimum": 5, "maximum": 1}), ".properties.x", "its minimum (5)"),
        (required({"type": "string", "const": 3}), ".properties.x", "its enum or const"),
        (required({"const": "abc", "maxLength": 2}), ".properties.x", "its enum or const"),
        ({"enum": [1, 2], "minimum": 3}, "", "its enum or const"),
        ({"enum": [1, "a"], "const": True}, "", "its enum or const"),
        ({"allOf": [{"type": "string"}, {"type": ["null", "integer"]}]}, "", "no type"),
        ({"allOf": [required({"type": "null"}), required({"type": "string"})]}, "", ".properties.x cannot be"),
        ({"type": "integer", "multipleOf": 10, "minimum": 11, "maximum": 19}, "", "no multiple of 10"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "", "minItems (2)"),
        ({"type": "string", "minLength": 2, "allOf": [{"maxLength": 1}]}, "", "minLength (2)"),
        (required({}, maxProperties=0), "", "maxProperties"),
    ],
)
def test_a_contradiction_is_refused_with_its_path(schema: Any, path: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(why)) as refused:
        json_schema(schema, "schema")
    assert re.match(rf"schema\S*{re.escape(path)} cannot be satisfied", refused.value.message)


def test_no_schema_that_an_answer_satisfies_is_refused() -> None:
    """Of random combinations of keywords that exclude one another often."""
    rng, num_refused = random.Random(0), 0
    for _ in range(800):
        schema = combined(rng, 2)
        shortest = shortest_answer(schema, "schema", lambda _, root=schema: root).num_characters
        validator = jsonschema.Draft202012Validator(schema)
        lengths = [len(json.dumps(value, separators=(",", ":"))) for value in VALUES if validator.is_valid(value)]
        assert shortest <= min(lengths, default=shortest), schema
        num_refused += shortest == float("inf")
    assert num_refused > 80


def combined(rng: random.Random, depth: int) -> dict[str, Any]:
    def one() -> Any:
        leaves = [True, False, {"type": "string"}, {"required": ["a"], "properties": {"a": {"$ref": "#"}}}]
        return combined(rng, depth - 1) if depth else rng.choice(leaves)

    made: dict[str, Any] = {}
    for _ in range(rng.randrange(1, 4)):
        made |= rng.choice(
            [
                {"type": rng.choice(["string", "integer", "number", "array", "object", ["null", "boolean"]])},
                {"enum": rng.sample(VALUES, 3)},
                {"const": rng.choice(VALUES)},
                {rng.choice(["minimum", "exclusiveMinimum"]): rng.choice([1, 2]), "type": "number"},
                {rng.choice(["maximum", "exclusiveMaximum"]): rng.choice([1, 2]), "multipleOf": 2},
                {"minLength": 2, "maxLength": rng.choice([1, 3])},
                {"minItems": rng.choice([1, 2]), "items": one()},
                {"prefixItems": [one()], "maxItems": 1},
                {"properties": {"a": one()}, "required": rng.choice([["a"], ["a", "b"], []])},
                {"additionalProperties": one(), "minProperties": 1, "maxProperties": rng.choice([1, 2])},
                {rng.choice(["allOf", "anyOf"]): [one(), one()]},
            ]
        )
    return made


def test_the_shortest_is_no_longer_than_what_the_model_may_say() -> None:
    class Longest(GrammarCompiler):
        def _compile(self, spec: GrammarSpec) -> Any:
            return None

    compiler = Longest(Vocabulary([b"a", b"abc", b""], [2], [2]), lambda text: [0], most_tokens=100)
    for schema, path in (
        ({"type": "array", "items": {"type": "integer"}, "minItems": 10**15}, "schema"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 10**400}, "schema"),
        (required({"type": "string", "minLength": 294}), "schema"),
        (required({"type": "string", "minLength": 299}), "schema.properties.x"),
    ):
        with pytest.raises(InvalidRequest, match=rf"^{path} cannot be satisfied within this model"):
            compiler.compile(json_schema(schema, "schema"))
    compiler.compile(json_schema(required({"type": "string", "minLength": 292}), "schema"))
    for seed in range(300):
        json_schema(SchemaMaker(random.Random(seed), is_bounded=seed % 2 == 0).schema(), "schema")
