"""JSON schemas at random: nested, recursive, with every keyword that is enforced, and names that need escapes."""

import random
from typing import Any

NAMES = ["a", "id", "first name", "größe", "日本", 'q"uote', "back\\slash", "new\nline", "$ref", "😀", "x" * 30, ""]
FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
PATTERNS = ["^[a-z]{1,8}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "^[A-F0-9]{2}(:[A-F0-9]{2}){2}$", '^ü?[^"]{0,5}$']
TEXTS = ["", "x", "two words", "ü", "\n", '"', "\\", "{}", "日本語", "null", "1"]


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
