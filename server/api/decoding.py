"""Bodies to structs: strict JSON (RFC 8259 without its liberties), types checked, the wrong field named by its path.

Duplicate keys, NaN, lone surrogates and deep nesting are refused: two parsers may read them in two ways.
Thread: loop, or wherever a long body is offloaded to.
"""

import json
import logging
import re
from _json import scanstring  # json.decoder's
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
import orjson

from core.errors import InvalidRequest
from server.values import escape

logger = logging.getLogger(__name__)

LONG_BYTES = 32 * 1024  # a body from this size on is parsed in steps: up to it, no other thread waits for 5 ms
MAX_SHOWN_KEY = 32  # characters of a client's own word, in a refusal or a warning
MAX_SHOWN_KINDS = 8  # of tools, in one warning
MAX_UNKNOWN_FIELDS = 16  # reported per request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that is known and not supported. null always asks for nothing.

    Args:
        neutral: other values that ask for nothing.
        unless: (a field, its value) beside which it asks for nothing, whatever its value.
        is_container: an object of fields that would belong outside of it: whatever it holds is refused by its own name.
    """

    neutral: tuple[Any, ...] = ()
    unless: tuple[str, Any] | None = None
    is_container: bool = False


@dataclass(frozen=True, slots=True)
class FieldRules:
    """What becomes of fields that a shape does not have.

    Args:
        refused: by name, dotted where one lies in another.
        aliases: name -> (the shape's name for it, values that ask for nothing).
        ignored: known, and without effect.
    """

    refused: Mapping[str, Refusal] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    _refused_within: dict[str, list[str]] = field(default_factory=dict)  # a field -> what is refused of those in it

    def __post_init__(self) -> None:
        for path in self.refused:
            outer, _, name = path.partition(".")
            if name:
                self._refused_within.setdefault(outer, []).append(name)

    def refusals(self, fields: dict[str, Any]) -> Iterator[tuple[str, Any, Refusal]]:
        """Of what is there of these fields and has a refusal: its path, its value."""
        for name, value in fields.items():
            if name in self.refused:
                yield name, value, self.refused[name]
            if name in self._refused_within and isinstance(value, dict):
                for inner in self._refused_within[name]:
                    yield f"{name}.{inner}", value.get(inner), self.refused[f"{name}.{inner}"]


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # never backtracks, never fails: linear on any bytes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = [1 if byte in b"[{" else -1 for byte in range(256)]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_VALIDATION = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?", re.DOTALL)
# How JSON's types are called by Python, and by msgspec
_KINDS = {str: "str", int: "int", float: "float", bool: "bool", list: "array", dict: "object", type(None): "null"}
_TYPE_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode(body: bytes, shape: type[T], rules: FieldRules) -> tuple[T, tuple[str, ...]]:
    """The body as `shape`, and the names of the top-level fields that nobody knows.

    Raises:
        InvalidRequest: not JSON, a wrong type, or an unsupported field with a value that asks for something.
    """
    fields = parse_object(body)
    _drop_foreign_tools(fields)
    _refuse_unsupported(fields, rules)
    renamed = _rename(fields, rules)
    try:
        value = msgspec.convert(fields, shape)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), fields, renamed, shape) from None
    shaped, refused, ignored = getattr(shape, "__struct_fields__", ()), rules.refused, rules.ignored
    unknown = [name for name in fields if name not in shaped and name not in refused and name not in ignored]
    return value, tuple(unknown[:MAX_UNKNOWN_FIELDS])


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, strictly.

    Raises:
        InvalidRequest: it is not one; the message says where it breaks.
    """
    is_long = len(body) >= LONG_BYTES
    if not is_long:
        _check_nesting(body)
    try:
        value = LongJson(body.decode(), _finite).parse() if is_long else _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnfitJson as error:
        raise _bad_json(str(error)) from None
    except TooMuchJson as error:
        raise _too_much(str(error)) from None
    except ValueError:  # int() of over 4,300 digits
        raise _bad_json("it has a number that is too long") from None
    if not is_long:
        _check_surrogates(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def _check_nesting(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise _too_much(f"is nested deeper than {MAX_DEPTH}")


def _check_surrogates(body: bytes) -> None:
    if _SURROGATE.search(body):
        try:
            orjson.loads(body)  # the body is JSON by now: what this parser still refuses are lone surrogates
        except orjson.JSONDecodeError:
            raise _bad_json("a \\u escape is half of a surrogate pair") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _bad_json(f"the key {key[:64]!r} appears twice in one object")
        seen.add(key)
    raise AssertionError("fewer keys than pairs, and none twice")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _bad_json("it has a number that is too large")
    return value


def _not_a_number(word: str) -> NoReturn:
    raise _bad_json(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_not_a_number)


def _bad_json(cause: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not valid JSON: {cause}.", code="invalid_json")


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body is more than the server reads: its JSON {what}.", code="json_too_large")


def _drop_foreign_tools(fields: dict[str, Any]) -> None:
    """Leave functions alone among the tools. The others (web_search, ...) only widen what an answer may use."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return
    kept = [tool for tool in tools if not _is_foreign(tool)]
    if len(kept) < len(tools):
        kinds = list(dict.fromkeys(escape(tool["type"][:MAX_SHOWN_KEY]) for tool in tools if _is_foreign(tool)))
        logger.warning("tools that are not functions were dropped: %s", ", ".join(kinds[:MAX_SHOWN_KINDS]))
        fields["tools"] = kept


def _is_foreign(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function"


def _refuse_unsupported(fields: dict[str, Any], rules: FieldRules) -> None:
    for name, value, rule in rules.refusals(fields):
        if value is None or value in rule.neutral or (rule.unless and fields.get(rule.unless[0]) == rule.unless[1]):
            continue
        if rule.is_container and isinstance(value, dict):
            _refuse_contents(name, value, rules)
        else:
            supported = "".join(f", or send {json.dumps(one)}" for one in rule.neutral)
            this = " with this value" if rule.neutral else ""
            message = f"This server does not support {name}{this}. Leave it out{supported}."
            raise InvalidRequest(message, name, "unsupported_parameter")


def _refuse_contents(name: str, contents: dict[str, Any], rules: FieldRules) -> None:
    for key, value in contents.items():
        rule = rules.refused.get(key, Refusal())
        if value is not None and value not in rule.neutral and key not in rules.ignored:
            param = f"{name}.{key[:MAX_SHOWN_KEY]}"
            message = (
                f"{param} is not supported: nothing is read from {name}. Send what you need beside it, or leave it out."
            )
            raise InvalidRequest(message, param, "unsupported_parameter")


def _rename(fields: dict[str, Any], rules: FieldRules) -> dict[str, str]:
    """Give aliases their names here.

    Returns: by name, the alias that it came under.
    """
    renamed: dict[str, str] = {}
    for alias in [name for name in fields if name in rules.aliases]:
        name, neutral = rules.aliases[alias]
        value = fields.pop(alias)
        if value is None or value in neutral:
            continue
        if fields.get(name) is not None and fields[name] != value:
            message = f"{alias} is another name of {renamed.get(name, name)} here. Send one of them."
            raise InvalidRequest(message, alias)
        fields[name] = value
        renamed[name] = alias
    return renamed


def _field_error(message: str, fields: dict[str, Any], renamed: dict[str, str], shape: type) -> InvalidRequest:
    """msgspec's "Expected `str`, got `int` - at `$.messages[0].role`", in the words and the path of the API."""
    match = _VALIDATION.fullmatch(message)
    what, path = (match["what"], (match["path"] or "").lstrip(".")) if match else (message, "")
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    path = renamed.get(name, name) + path[len(name) :]
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)`", what)
    if wrong:
        path = _with_key(path, wrong[2], fields)
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")
    if wrong:
        allowed = " or ".join(_TYPE_WORDS.get(word, word) for word in wrong[1].split(" | "))
        return InvalidRequest(
            f"{path} must be {allowed}, not {_TYPE_WORDS.get(wrong[2], wrong[2])}.", path, "invalid_type"
        )
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        param = f"{path}.{unknown[1][:MAX_SHOWN_KEY]}"
        known = [
            one for kind in get_args(get_type_hints(shape)[path]) for one in getattr(kind, "__struct_fields__", ())
        ]
        return InvalidRequest(f"There is no {param}. {path} may have {', '.join(known)}.", param)
    return InvalidRequest(f"{path}: {what}.", path)


def _with_key(path: str, kind: str, fields: dict[str, Any]) -> str:
    """The path of a value in a top-level object: "logit_bias[...]", where msgspec leaves out the key, is completed.

    Args:
        kind: msgspec's word for what the value is; the first such value is the one it stopped at.
    """
    name = path.removesuffix("[...]")
    values = fields.get(name)
    if name == path or not isinstance(values, dict):
        return path
    key = next((key for key, value in values.items() if _KINDS[type(value)] == kind), "...")
    return f"{name}[{key[:MAX_SHOWN_KEY]}]"


MAX_DEPTH = 64
MAX_VALUES = 100_000  # those of _IDS aside: a few microseconds, and up to 60 bytes for two on the wire

_RUN = 1000  # numbers that are taken in one step: some 0.1 ms
_SPACE = re.compile(r"[ \t\n\r]*+")
# Whole numbers that others follow; no `}+`, which Python before 3.11.5 matches wrongly (gh-106052)
_IDS = re.compile(rf"(?:-?(?:0|[1-9][0-9]{{0,17}})[ \t\n\r]*+,[ \t\n\r]*+){{1,{_RUN}}}")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*+))(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"true|false|null|NaN|-?Infinity")


class UnfitJson(Exception):
    """What may not stand in a body, though it is JSON, or near it; str() says what."""


class TooMuchJson(Exception):
    """It is more than is read of one body; str() says in what."""


class LongJson:
    """One text on its way to values."""

    def __init__(self, text: str, finite: Callable[[str], float]) -> None:
        """
        Args:
            finite: reads a number that is no integer.
        """
        self._text = text
        self._finite = finite
        self._num_values = 0

    def parse(self) -> Any:
        """
        Raises:
            json.JSONDecodeError: it is no JSON.
            UnfitJson: it could be read in two ways, or not at all.
            TooMuchJson: it has too many values, or is nested too deep.
            ValueError: it has an integer of thousands of digits.
        """
        value, at = self._value(self._after_space(0), 0)
        at = self._after_space(at)
        if at < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _after_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match is not None
        return match.end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends."""
        text = self._text
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TooMuchJson(f"has more than {MAX_VALUES} values, whole numbers in arrays not counted")
        char = text[at : at + 1]
        if char == '"':
            return self._string(at + 1)
        if char == "{":
            return self._object(at + 1, depth + 1)
        if char == "[":
            return self._array(at + 1, depth + 1)
        if number := _NUMBER.match(text, at):
            integer, fraction, exponent = number.groups("")
            is_integer = not fraction and not exponent
            return int(integer) if is_integer else self._finite(number[0]), number.end()
        word = _WORD.match(text, at)
        if word is None:
            raise json.JSONDecodeError("Expecting value", text, at)
        if word[0] not in _WORDS:
            raise UnfitJson(f"{word[0]} is not a JSON number")
        return _WORDS[word[0]], word.end()

    def _string(self, at: int) -> tuple[str, int]:
        value, end = scanstring(self._text, at, True)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UnfitJson("a \\u escape is half of a surrogate pair") from None
        return value, end

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text, result = self._text, dict[str, Any]()
        _check_depth(depth)
        at = self._after_space(at)
        if text.startswith("}", at):
            return result, at + 1
        while True:
            if not text.startswith('"', at):
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = self._string(at + 1)
            at = self._after_space(at)
            if not text.startswith(":", at):
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            if key in result:
                raise UnfitJson(f"the key {key[:64]!r} appears twice in one object")
            result[key], at = self._value(self._after_space(at + 1), depth)
            is_over, at = self._next(at, "}")
            if is_over:
                return result, at

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        text, result = self._text, list[Any]()
        _check_depth(depth)
        at = self._after_space(at)
        if text.startswith("]", at):
            return result, at + 1
        while True:
            while run := _IDS.match(text, at):
                result += map(int, run[0].split(",")[:-1])
                at = run.end()
            value, at = self._value(at, depth)
            result.append(value)
            is_over, at = self._next(at, "]")
            if is_over:
                return result, at

    def _next(self, at: int, end: str) -> tuple[bool, int]:
        """Behind a value: whether its array or object is over, and what comes after that, or after the comma."""
        at = self._after_space(at)
        char = self._text[at : at + 1]
        if char == ",":
            return False, self._after_space(at + 1)
        if char == end:
            return True, at + 1
        raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooMuchJson(f"is nested deeper than {MAX_DEPTH}")
