"""Fields that ask for an answer in a form and take long to check, to compile or to follow, for their length."""

from collections.abc import Iterator
from typing import Any

OBJECT = "object"


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        made = {"type": OBJECT, "properties": {"a": made}, "required": ["a"]}
    return made


def counted(depth: int) -> dict[str, Any]:
    """Objects that count their optional properties, each within one of the last."""
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        properties = {f"p{i}": made if i == 0 else {"type": "integer"} for i in range(7)}
        made = {"type": OBJECT, "properties": properties, "maxProperties": 3, "additionalProperties": False}
    return made


def crossed(size: int) -> dict[str, Any]:
    """Definitions that refer to one another."""
    parts = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{j}"} for j in range(size) if j != i]} for i in range(size)}
    return {"$defs": parts, "$ref": "#/$defs/a0"}


def combined(size: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]} for _ in range(size)]}


def wide(size: int) -> dict[str, Any]:
    return {"type": OBJECT, "properties": {f"p{i}": {"type": "string"} for i in range(size)}}


def tools(size: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"t{i}", "parameters": wide(2)}} for i in range(size)]


def hostile_forms(scale: int = 1, number: int = 0) -> dict[str, dict[str, Any]]:
    """
    Args:
        scale: 1: each body is shorter than 8 KiB.
        number: of another one, other forms.
    """
    names = [f"x{number}_{i}" for i in range(350 * scale)]
    own = {"const": number}
    return {
        "deep": {"guided_json": {"anyOf": [nested(60), own]}},
        "wide": {"guided_json": {"anyOf": [wide(240), own]}},
        "counted": {"guided_json": {"anyOf": [counted(2 + scale), own]}},
        "crossed": {"response_format": {"type": "json_schema", "json_schema": {"schema": crossed(12 + 4 * scale)}}},
        "combined": {"guided_json": {"anyOf": [combined(12), own]}},
        "constants": {"guided_json": {"oneOf": [{"const": name} for name in names]}},
        "enum": {"guided_json": {"allOf": [{"enum": names}, {"enum": [*names, None]}]}},
        "required": {"guided_json": {"type": OBJECT, "required": names}},
        "choices": {"guided_choice": names},
        "regex": {"guided_regex": "(a{1,2}|b?)" * 500 * scale + str(number)},
        "hungry regex": {"guided_regex": f"(a|b)*a(a|b){{14}}{number}"},
        "ambiguous": {"guided_grammar": f'start: e\ne: e e | /[a-z]/ | "{number}"'},
        "words": {"guided_grammar": "start: " + " | ".join(f'"{name}"' for name in names)},
        "texts": {"guided_grammar": '"' * 3500 * scale},
        "brackets": {"guided_grammar": "root ::= " + "[" * 6000 * scale},
        "tools": {"tools": tools(30 if scale == 1 else 200), "tool_choice": "required"},
        "escaped": {"gu\\u0069ded_json": {"anyOf": [combined(12), own]}},
    }


def largest_schemas(number: int = 0) -> Iterator[dict[str, Any]]:
    """Of 100 KB to 8 MB, some of them over the limits. Args: number: of another one, others."""
    names = [f"x{number}_{i}" for i in range(30_000)]
    parts = {
        name: {"type": OBJECT, "properties": {"a": {"type": "string", "pattern": f"^{name}[a-z]{{1,9}}$"}}}
        for name in names[:3000]
    }
    yield {"enum": names}
    yield {"$defs": parts, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names[:30]]}
    yield {"oneOf": [{"const": name} for name in names[:7000]]}
    yield {"type": OBJECT, "properties": {name: {"type": "integer"} for name in names[:3000]}, "required": names[:3000]}
    yield {"const": number, "description": "a" * 8_000_000}
    yield {"const": number, "description": "\n" * 4_000_000}
    yield {"const": number, "default": [[[1, "a"]] * 20_000]}
    yield {"anyOf": [{"const": number}, {"enum": [[[1.5] * 9] * 9] * 400}]}
