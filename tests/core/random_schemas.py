"""JSON schemas at random: nested, recursive, with every keyword that is enforced, and names that need escapes."""

import random
from typing import Any

NAMES = ["a", "id", "first name", "größe", "日本", 'q"uote', "back\\slash", "new\nline", "$ref", "😀", "x" * 30, ""]
FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = ["^[a-z]{1,8}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "^[A-F0-9]{2}(:[A-F0-9]{2}){2}$", '^ü?[^"]{0,5}$']
TEXTS = ["", "x", "two words", "ü", "\n", '"', "\\", "{}", "日本語", "null", "1"]


CLASSES = [
    "^[^a-z]{1,4}$",
    r"^\D\d?$",
    r"^[^ <>]{1,5}$",
    r"^[\w.-]+@x$",
    "a|b",
    "^é?x$",
    r"^(?:ab|[^\\/])+$",
    r"^[\]\[^-]{2}$",
]
VALUES = [
    "",
    "a",
    "1",
    "true",
    "None",
    "x y",
    "1.0",
    "[1]",
    "'q'",
    '"q"',
    "</x>",
    0,
    1,
    -3,
    2.5,
    None,
    True,
    [1],
    [],
    {},
]
BESIDE_VALUES: list[dict[str, Any]] = [
    {},
    {"type": "string"},
    {"type": ["string", "null"]},
    {"maxLength": 2},
    {"minimum": 1},
    {"minItems": 1},
]
SHARED: dict[str, Any] = {
    "e": {"enum": ["1", "x y", "true", "2", 5]},
    "i": {"type": "integer", "minimum": 1, "maximum": 30},
    "s": {"type": "string", "maxLength": 4},
    "o": {
        "type": "object",
        "properties": {"k": {"$ref": "#/$defs/i"}},
        "required": ["k"],
        "additionalProperties": False,
    },
}


class SchemaMaker:
    """
    Args:
        is_bounded: every answer has a longest one: no recursion, every string, list and object has its limit.
    """

    def __init__(self, rng: random.Random, is_bounded: bool) -> None:
        self.rng = rng
        self.is_bounded = is_bounded
        self.definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """Of an object or a list, with what it refers to."""
        made = self.object(0) if self.rng.random() < 0.8 else self.array(0)
        return {**made, "$defs": self.definitions} if self.definitions else made

    def any(self, depth: int) -> Any:
        kinds = [self.string, self.number, self.enum, self.constant, self.boolean, self.null]
        if depth < 3:
            kinds += [self.object, self.object, self.array, self.union, self.reference]
        return self.rng.choice(kinds)(depth)

    def string(self, depth: int) -> dict[str, Any]:
        match self.rng.randrange(4):
            case 0:
                return {"type": "string", "format": self.rng.choice(FORMATS)}
            case 1:
                pattern = {"pattern": self.rng.choice(PATTERNS)}
                return {"type": "string", **pattern, **({"maxLength": 12} if self.is_bounded else {})}
            case _:
                least = self.rng.randrange(4)
                bounds = {"minLength": least, "maxLength": least + self.rng.randrange(12)}
                if not self.is_bounded and self.rng.random() < 0.5:
                    del bounds["maxLength"]
                return {"type": "string", **bounds}

    def number(self, depth: int) -> dict[str, Any]:
        kind = self.rng.choice(["integer", "number"])
        low = self.rng.choice([-1000, -3, 0, 1, 17])
        bounds = {
            self.rng.choice(["minimum", "exclusiveMinimum"]): low,
            self.rng.choice(["maximum", "exclusiveMaximum"]): low + self.rng.choice([2, 10, 10**6]),
        }
        if kind == "integer" and self.rng.random() < 0.2:
            return {"type": kind, "multipleOf": self.rng.choice([2, 5, 10]), "minimum": 0, "maximum": 1000}
        return {"type": kind} if self.rng.random() < 0.2 else {"type": kind, **bounds}

    def enum(self, depth: int) -> dict[str, Any]:
        return {
            "enum": self.rng.sample([*TEXTS, 0, -1, 2.5, None, True, [1, "x"], {"k": []}], self.rng.randrange(1, 5))
        }

    def constant(self, depth: int) -> dict[str, Any]:
        return {"const": self.rng.choice([*TEXTS, 7, None, False])}

    def boolean(self, depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def null(self, depth: int) -> dict[str, Any]:
        return {"type": "null", "title": "nothing", "description": "at all"}

    def union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth + 1) for _ in range(self.rng.randrange(2, 4))]}

    def array(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "array", "items": self.any(depth + 1)}
        if self.is_bounded or self.rng.random() < 0.7:
            made["maxItems"] = self.rng.randrange(1, 4)
            made["minItems"] = self.rng.randrange(made["maxItems"] + 1)
        if self.rng.random() < 0.2:
            made["prefixItems"] = [self.any(depth + 1)]
        return made

    def object(self, depth: int) -> dict[str, Any]:
        names = self.rng.sample(NAMES, self.rng.randrange(5 - depth))
        made: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth + 1) for name in names}}
        made["required"] = [name for name in names if self.rng.random() < 0.6]
        match self.rng.randrange(4):
            case 0 if not self.is_bounded:
                made["additionalProperties"] = self.any(depth + 1)
            case 1 if not names:
                made = {"type": "object", "patternProperties": {"^k[0-9]$": self.any(depth + 1)}, "maxProperties": 2}
                made["additionalProperties"] = False
            case _:
                made["additionalProperties"] = False
        return made

    def reference(self, depth: int) -> dict[str, Any]:
        """To a definition made before, or to one that may hold itself."""
        name = f"part-{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.any(depth + 1)
        if not self.is_bounded and self.rng.random() < 0.5:
            self.definitions[name] = {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}

    def parameters(self) -> dict[str, Any]:
        """Of a function: keywords beside one another that have little to do with each other."""
        names = self.rng.sample(
            ["a", "b_2", "with space", "größe", "a-b", "x.y", "1st", "a:b"], self.rng.randrange(1, 4)
        )
        made: dict[str, Any] = {"type": "object", "properties": {name: self.combined(0) for name in names}}
        made["required"] = [name for name in names if self.rng.random() < 0.6]
        if self.rng.random() < 0.2:
            del made["properties"], made["required"]
            made["additionalProperties"] = self.combined(0)
        elif self.rng.random() < 0.8:
            made["additionalProperties"] = self.rng.choice([False, False, {"type": "integer"}])
        return {**made, "$defs": {**SHARED, **self.definitions}}

    def combined(self, depth: int) -> Any:
        rng = self.rng
        if depth > 2:
            return self.any(3)
        match rng.randrange(11):
            case 0:
                return {"enum": rng.sample(VALUES, rng.randrange(1, 6)), **rng.choice(BESIDE_VALUES)}
            case 1:
                return {"const": rng.choice(VALUES), **rng.choice(BESIDE_VALUES)}
            case 2:
                kind = rng.choice(["string", ["string", "null"], ["string", "integer"]])
                return {"type": kind, "pattern": rng.choice(CLASSES), **rng.choice([{}, {"maxLength": 9}])}
            case 3:
                beside: dict[str, Any] = rng.choice(
                    [{}, {"title": "x"}, {"type": "string"}, {"maxLength": 2}, {"enum": ["1", "x y", 5]}]
                )
                return {"$ref": f"#/$defs/{rng.choice('eiso')}"} | beside
            case 4:
                more: list[dict[str, Any]] = rng.choice(
                    [[], [{"type": "string"}], [{"maxLength": 3}], [{"enum": ["x y", "2", 4]}]]
                )
                return {"allOf": [{"$ref": f"#/$defs/{rng.choice('eiso')}"}, *more]}
            case 5:
                items = rng.choice([True, {}, {"const": "a,b"}, self.combined(depth + 1)])
                return {"type": "array", "items": items, "maxItems": rng.randrange(3)}
            case 6:
                kind = rng.choice(["integer", "number", ["integer", "null"], ["number", "string"]])
                return {"type": kind, "multipleOf": rng.choice([2, 0.5, 7]), "minimum": 0, "maximum": 100}
            case 7:
                some = [self.combined(depth + 1) for _ in range(rng.randrange(1, 4))]
                return {rng.choice(["anyOf", "anyOf", "oneOf"]): [*some, {"type": rng.choice(["null", "string"])}]}
            case 8:
                others: Any = rng.choice([True, False, {"type": "integer"}, self.combined(depth + 1)])
                named: dict[str, Any] = rng.choice([{}, {"properties": {rng.choice(NAMES): self.combined(depth + 1)}}])
                return {"type": "object", "additionalProperties": others, **named}
            case 9:
                return {"type": ["string", "null"], "format": rng.choice(FORMATS)}
            case _:
                return self.any(2)
