"""Tells whether any answer satisfies a JSON schema, and how short the shortest may be.

The answer's values are nodes of a graph; each way to satisfy a node costs characters and further values. The cheapest
ways are found from the values that hold no others (Knuth, A Generalization of Dijkstra's Algorithm, 1977). What is not
understood here (patterns, formats, what only some drafts have) counts as satisfied: a length is never too large, and
no schema is said to be impossible that is not. No I/O. Thread: any.
"""

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_CHARACTERS = 1e300  # of any answer
MAX_STEPS = 12_000  # some 30 ms
_WHOLE, _FRACTION = "integer", "fraction"
_TYPES: Mapping[str, frozenset[str]] = {
    **{name: frozenset({name}) for name in ("null", "boolean", "string", "array", "object", _WHOLE)},
    "number": frozenset({_WHOLE, _FRACTION}),
}
_ALL_TYPES = frozenset[str]().union(*_TYPES.values())
_Key = frozenset[int]  # ids of the schemas that hold a value together
_Parts = Sequence[tuple[str, Any]]  # (path, schema)


class _Conflict(Exception):
    """Schemas that exclude one another: why."""


class _TooMuch(Exception):
    """Not judged."""


@dataclass(frozen=True, slots=True)
class Shortest:
    """
    Args:
        num_characters: of the shortest answer, or fewer; infinite: there is none.
        path, why: where the schema says so.
        num_steps: that were taken.
    """

    num_characters: float
    path: str
    why: str
    num_steps: int


@dataclass(slots=True, eq=False)
class _Way:
    """One way to satisfy a node. Args: cost: characters, with those of the values within that are known."""

    node: "_Node"
    cost: float
    values: "list[tuple[int, _Node]]"  # with how many of each
    num_unknown: int


@dataclass(slots=True, eq=False)
class _Node:
    path: str
    parts: _Parts
    ways: list[_Way] = field(default_factory=list)
    conflict: str = ""
    least: float = math.inf


def shortest_answer(
    root: Any, path: str, target: Callable[[str], Any], most: float = MOST_CHARACTERS, most_steps: int = MAX_STEPS
) -> Shortest:
    """
    Args:
        path: of the schema, for what is told.
        target: the schema that a reference points to.
        most: characters; what is told is where it is exceeded.
        most_steps: a schema that takes more is not judged.
    """
    search = _Search(target, most_steps)
    try:
        node = search.node([(path, root)])
        search.read()
    except (_TooMuch, RecursionError):  # deep values of enum
        return Shortest(0, path, "", min(search.num_steps, most_steps))
    search.solve()
    return search.place(node, most)


class _Search:
    def __init__(self, target: Callable[[str], Any], most_steps: int) -> None:
        self._target = target
        self._most_steps = most_steps
        self._nodes: dict[_Key, _Node] = {}
        self._unread: list[_Node] = []
        self.num_steps = 0

    def node(self, parts: _Parts) -> _Node:
        for path, schema in parts:
            if schema is False:
                return _Node(path, parts, conflict="its schema is false")
        key = frozenset(id(schema) for _, schema in parts)
        if key not in self._nodes:
            self._nodes[key] = _Node(parts[0][0], parts)
            self._unread.append(self._nodes[key])
        return self._nodes[key]

    def read(self) -> None:
        """Find the ways of every node.

        Raises:
            _TooMuch
        """
        while self._unread:
            node = self._unread.pop()
            for parts in self._expanded(node):
                try:
                    for cost, values in self._ways(parts):
                        node.ways.append(_Way(node, cost, values, len(values)))
                except _Conflict as conflict:
                    node.conflict = node.conflict or str(conflict)

    def solve(self) -> None:
        users = defaultdict[_Node, list[tuple[int, _Way]]](list)
        ready: list[tuple[float, int, _Node]] = []
        for node in self._nodes.values():
            for way in node.ways:
                for count, value in way.values:
                    users[value].append((count, way))
                if not way.values:
                    ready.append((way.cost, id(node), node))
        heapq.heapify(ready)
        while ready:
            cost, _, node = heapq.heappop(ready)
            if node.least < math.inf:
                continue
            node.least = cost
            for count, way in users[node]:
                way.cost += count * cost
                way.num_unknown -= 1
                if not way.num_unknown:
                    heapq.heappush(ready, (way.cost, id(way.node), way.node))

    def place(self, node: _Node, most: float) -> Shortest:
        """The innermost value that says why a node takes more than that many characters."""
        num_characters, seen = node.least, {node}
        while len(node.ways) == 1:
            excessive = [value for _, value in node.ways[0].values if value.least > most]
            if any(value in seen for value in excessive):
                return Shortest(
                    num_characters, node.path, "it requires itself within itself, without end", self.num_steps
                )
            if not excessive:
                break
            node = excessive[0]
            seen.add(node)
        why = "each of its alternatives contradicts itself" if node.ways else node.conflict
        return Shortest(num_characters, node.path, why, self.num_steps)

    def _expanded(self, node: _Node) -> Iterator[_Parts]:
        """The schemas of a node without references and combinations: one list for each choice among alternatives."""
        waiting: list[tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = [([], list(node.parts))]
        while waiting:
            plain, unread = waiting.pop()
            while unread:
                self._count(1)
                path, one = unread.pop()
                if one is False:
                    node.conflict = node.conflict or "none of its alternatives may be"
                    break
                if isinstance(one, tuple):  # alternatives
                    waiting += [([*plain], [*unread, (f"{path}[{i}]", each)]) for i, each in enumerate(one)]
                    self._count(len(one) * (len(plain) + len(unread)) // 8)
                    break
                if isinstance(one, dict) and not any(one is known for _, known in plain):
                    plain.append((path, one))
                    unread += self._combined(path, one)
            else:
                yield plain

    def _combined(self, path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for i, each in enumerate(_list(schema, "allOf")):
            yield f"{path}.allOf[{i}]", each
        if isinstance(pointer := schema.get("$ref"), str):
            yield path, self._target(pointer)
        for keyword in ("anyOf", "oneOf"):
            if alternatives := _list(schema, keyword):
                yield f"{path}.{keyword}", tuple(alternatives)

    def _count(self, steps: int) -> None:
        self.num_steps += steps
        if self.num_steps > self._most_steps:
            raise _TooMuch

    def _ways(self, parts: _Parts) -> Iterator[tuple[float, list[tuple[int, _Node]]]]:
        """Raises _Conflict: one of the ways cannot be. The others were told, or will not be."""
        schemas = [schema for _, schema in parts]
        if given := _given(schemas):
            self._count(sum(map(len, given)) * len(schemas) // 2)
            if not (fitting := fitting_values(schemas)):
                raise _Conflict("no value of its enum or const fits the keywords beside it")
            yield min(map(_length, fitting)), []
            return
        types = frozenset.intersection(_ALL_TYPES, *map(_types, schemas))
        if not types:
            raise _Conflict("no type satisfies all of its schemas")
        conflict: _Conflict | None = None
        for name in types:
            self._count(1)
            try:
                match name:
                    case "array":
                        yield self._array(parts)
                    case "object":
                        yield self._object(parts)
                    case _:
                        yield _SCALARS[name](schemas), []
            except _Conflict as found:
                conflict = found
        if conflict is not None:
            raise conflict

    def _array(self, parts: _Parts) -> tuple[float, list[tuple[int, _Node]]]:
        least, _ = _bounds([schema for _, schema in parts], "Items")
        first = min(least, max((len(_list(schema, "prefixItems")) for _, schema in parts), default=0))
        values = []
        for i in range(first + (least > first)):
            self._count(1)
            found = []
            for path, schema in parts:
                prefix = _list(schema, "prefixItems")
                place = f"{path}.prefixItems[{i}]" if i < len(prefix) else f"{path}.items"
                found.append((place, prefix[i] if i < len(prefix) else schema.get("items", True)))
            values.append((1 if i < first else least - first, self._value(found)))
        return 1 + max(1, least), values

    def _object(self, parts: _Parts) -> tuple[float, list[tuple[int, _Node]]]:
        schemas = [schema for _, schema in parts]
        least, most = _bounds(schemas, "Properties")
        names = dict.fromkeys(name for one in schemas for name in _list(one, "required") if isinstance(name, str))
        if len(names) > most:
            raise _Conflict("it requires more properties than maxProperties allows")
        for schema in schemas:
            if _is_closed(schema) and len(schema.get("properties", ())) < least:
                raise _Conflict("it has fewer properties than minProperties")
        num_commas = max(0, len(names) - 1, least - 1)
        values, cost = [], 2 + num_commas + len('"":0') * max(0, least - len(names))
        for name in names:
            self._count(len(parts))
            cost += _length(name) + 1
            values.append((1, self._value([_property(path, schema, name) for path, schema in parts])))
        return cost, values

    def _value(self, parts: _Parts) -> _Node:
        """Of a value within another: `True` alone where anything may be."""
        return self.node([part for part in parts if part[1] is not True] or [(parts[0][0], True)])


def fitting_values(schemas: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Of the schemas' enum and const, of which there is one at least: the values that each schema takes.

    What is within objects and arrays, patterns and combinations are not looked at.
    """
    values, *rest = _given(schemas)
    for others in rest:
        known = set(map(_canonical, others))
        values = [value for value in values if _canonical(value) in known]
    return [value for value in values if all(_takes(schema, value) for schema in schemas)]


def _given(schemas: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The values of each enum and const."""
    given = [_list(one, "enum") for one in schemas if _list(one, "enum")]
    return given + [[one["const"]] for one in schemas if "const" in one]


def _property(path: str, schema: Mapping[str, Any], name: str) -> tuple[str, Any]:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return f"{path}.properties.{name}", properties[name]
    if schema.get("patternProperties"):
        return path, True
    return f"{path}.properties.{name}", schema.get("additionalProperties", True)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    has_properties = isinstance(schema.get("properties", {}), dict)
    return has_properties and schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _list(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if given is None:
        return _ALL_TYPES
    names = [*(given if isinstance(given, list) else [given]), *(["null"] if schema.get("nullable") is True else [])]
    known = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
    return frozenset[str]().union(*known) if len(known) == len(names) else _ALL_TYPES


def _numbers(schemas: Sequence[Mapping[str, Any]], keyword: str) -> list[float]:
    values = [schema.get(keyword) for schema in schemas]
    return [one for one in values if type(one) is int or (isinstance(one, float) and math.isfinite(one))]


def _bounds(schemas: Sequence[Mapping[str, Any]], what: str) -> tuple[int, float]:
    """Raises _Conflict: the least is more than the most."""
    least = max([0, *map(math.ceil, _numbers(schemas, f"min{what}"))])
    most = min([math.inf, *_numbers(schemas, f"max{what}")])
    if least > most:
        raise _Conflict(f"min{what} ({least}) is greater than max{what} ({most})")
    return least, most


def _string(schemas: Sequence[Mapping[str, Any]]) -> int:
    return 2 + _bounds(schemas, "Length")[0]


def _number(schemas: Sequence[Mapping[str, Any]], is_whole: bool) -> int:
    lows, highs = _numbers(schemas, "minimum"), _numbers(schemas, "maximum")
    above, below = _numbers(schemas, "exclusiveMinimum"), _numbers(schemas, "exclusiveMaximum")
    if is_whole:
        lows, highs = [*map(math.ceil, lows)], [*map(math.floor, highs)]
        lows += [math.floor(one) + 1 for one in above]
        highs += [math.ceil(one) - 1 for one in below]
        above = below = []
    low, high = max([-math.inf, *lows, *above]), min([math.inf, *highs, *below])
    if low > high or (low == high and (low in above or high in below)):
        raise _Conflict(f"no number is between its minimum ({low}) and its maximum ({high})")
    for step in _numbers(schemas, "multipleOf"):
        if is_whole and isinstance(step, int) and step > 0 and low > -math.inf and -(-low // step) * step > high:
            raise _Conflict(f"no multiple of {step} is between its minimum ({low}) and its maximum ({high})")
    return 1


_SCALARS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], int]] = {
    "null": lambda _: 4,
    "boolean": lambda _: 4,
    "string": _string,
    _WHOLE: lambda schemas: _number(schemas, True),
    _FRACTION: lambda schemas: _number(schemas, False),
}


def _takes(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the value satisfies what is understood of the schema, but for enum, const and the values within it."""
    kind = _type_of(value)
    if kind not in _types(schema):
        return False
    exactly: dict[str, Any] = {}
    match kind:
        case "string":
            exactly = {"minLength": len(value), "maxLength": len(value)}
        case "array":
            exactly = {"minItems": len(value), "maxItems": len(value)}
        case "object":
            exactly = {"minProperties": len(value), "maxProperties": len(value)}
            if not {name for name in _list(schema, "required") if isinstance(name, str)} <= value.keys():
                return False
        case "integer" | "fraction":
            exactly = {"minimum": value, "maximum": value}
    try:
        if kind in _SCALARS:
            _SCALARS[kind]([schema, exactly])
        else:
            _bounds([schema, exactly], "Items" if kind == "array" else "Properties")
    except _Conflict:
        return False
    return True


def _length(value: Any) -> int:
    return (
        1 if _type_of(value) in _TYPES["number"] else len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    )


def _canonical(value: Any) -> str:
    """Equal for equal values: 1.0 is 1, true is not."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    match value:
        case list():
            return [_normal(one) for one in value]
        case dict():
            return {name: _normal(one) for name, one in value.items()}
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return _WHOLE if value == value // 1 else _FRACTION
