"""Decodes request bodies: strict, unambiguous JSON into a struct; errors name the field's path.

Duplicate keys, NaN, lone surrogates and deep nesting are refused: two parsers may read them in two ways.
Thread: loop, or wherever a long body is offloaded to.
"""

import json
import json.decoder
import json.scanner
import logging
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta, inspect

from core.errors import InvalidRequest
from server.api.known_fields import Does, Known
from server.values import escape

logger = logging.getLogger(__name__)

MAX_DEPTH = 64
MAX_VALUES = 100_000  # in a long body, without those that _IDS matches; each takes a few microseconds
MAX_IDS = 2**20  # of a long body: what _IDS matches; more than contexts have. To free them all takes 8 ms, with the GIL
MAX_ESCAPES = 2**21  # json's scanner takes 3 ns for each, with the GIL
LONG_BYTES = 32 * 1024  # from this size on a body is parsed in steps; a shorter one holds the GIL for less than 5 ms
MAX_SHOWN_KEY = 32  # characters of a client's own word that a refusal or a warning repeats
MAX_SHOWN_KINDS = 8  # of tools, in one warning
FUNCTION_KIND = "function"  # the type of tools that are functions, but for messages
MAX_UNKNOWN_FIELDS = 16  # reported per request

T = TypeVar("T")
_Scan = Callable[[str, int], tuple[Any, int]]
_REFUSING = (Does.REFUSED, Does.CONTAINER)
Rules = Mapping[str, Known]  # by the field's name

_json_decoder: Any = json.decoder  # whose parts typeshed does not know
_SPACE = re.compile(r"[ \t\n\r]*+")
# Whole numbers that others follow, 1000 in a step of 0.1 ms; Python before 3.11.5 matches `}+` wrongly (gh-106052)
_IDS = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,17})[ \t\n\r]*+,[ \t\n\r]*+){1,1000}")
_LONG_NUMBER = re.compile(r"[-0-9.]{5000}")
_PIECE_BYTES = 2**20  # searched, or scanned, in one step: 1 ms
_PIECE_IDS = 2**16  # looked at in one step: 1 ms
_ESCAPE_CHARS = 12  # of the longest, a pair of surrogates
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# An escape: a pair of surrogates, one that is alone (group 1), or another
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F])|.)", re.DOTALL)
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
_BOUNDED_TYPES: dict[str, type] = {
    "int": inspect.IntType,
    "float": inspect.FloatType,
    "str": inspect.StrType,
    "array": inspect.ListType,
}


def decode(
    body: bytes | dict[str, Any], shape: type[T], rules: Rules, function_kind: str = FUNCTION_KIND
) -> tuple[T, tuple[str, ...]]:
    """The body as `shape`, and the names of its unknown top-level fields.

    Args:
        body: or the object in it, which is changed.
        rules: what becomes of fields that the shape does not have.
        function_kind: the `type` of tools that are functions.

    Raises:
        InvalidRequest: not JSON, a wrong type or range, or an unsupported field with a value that asks for something.
    """
    fields = parse_object(body) if isinstance(body, bytes) else body
    _drop_foreign_tools(fields, function_kind)
    _refuse_unsupported(fields, rules)
    renamed = _rename(fields, rules)
    value = convert(fields, shape, renamed)
    names = getattr(shape, "__struct_fields__", ())
    if "sent_as" in names:
        value = msgspec.structs.replace(value, sent_as=renamed)  # type: ignore[type-var]
    unknown = [name for name in fields if name not in names and name not in rules]
    return value, tuple(unknown[:MAX_UNKNOWN_FIELDS])


def convert(fields: dict[str, Any], shape: type[T], renamed: Mapping[str, str]) -> T:
    """
    Args:
        renamed: names of the shape, with those that the client has used for them.

    Raises:
        InvalidRequest: a wrong type or range.
    """
    shortened = {name: _shortened(value) for name, value in fields.items()}
    try:
        value = shaped(shortened, shape)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), fields, renamed, shape) from None
    names = getattr(shape, "__struct_fields__", ())
    whole = {name: fields[name] for name in names if shortened.get(name) is not fields.get(name)}
    return msgspec.structs.replace(value, **whole) if whole else value  # type: ignore[type-var]


def _shortened(value: Any, is_outer: bool = True) -> Any:
    """Without most of the ids of a list, or of lists in it: msgspec would look at millions, with the GIL."""
    if not isinstance(value, list):
        return value
    if len(value) > _PIECE_IDS:
        is_ids = all({*map(type, piece)} == {int} for piece in pieces(value))
        return value[:_PIECE_IDS] if is_ids else value
    made = [_shortened(one, False) for one in value] if is_outer else value
    return made if any(map(operator.is_not, made, value)) else value


def pieces(ids: list[int]) -> Iterator[list[int]]:
    """Which C walks through in 1 ms each: it keeps the GIL."""
    return (ids[at : at + _PIECE_IDS] for at in range(0, len(ids), _PIECE_IDS))


_built: set[Any] = set()
BUILDING = threading.Lock()  # what msgspec knows of a type: see shaped()


def shaped(value: Any, shape: type[T]) -> T:
    """msgspec.convert, on any thread.

    msgspec builds what it knows of a type at its first use, and kills the process where two threads do so at once.

    Raises:
        msgspec.ValidationError: see there.
    """
    if shape not in _built:
        with BUILDING:
            msgspec.json.Decoder(shape)
            _built.add(shape)
    return msgspec.convert(value, shape)


PAGE = {"after": str, "limit": Annotated[int, Meta(ge=1, le=100)], "order": Literal["asc", "desc"]}  # a list's query


def page_of(query: Mapping[str, list[str]], most: int = 100, default: int = 20) -> tuple[str | None, int]:
    """`after` and `limit` of a list's query. Raises InvalidRequest: limit is not 1 to `most`."""
    limit = query.get("limit", [str(default)])[0]
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise InvalidRequest(f"limit must be 1 to {most}.", "limit")
    return query.get("after", [None])[0], int(limit)


def is_ascending(query: Mapping[str, list[str]]) -> bool:
    """By `order` of a list's query. Raises InvalidRequest."""
    order = query.get("order", ["desc"])[0]
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", "order")
    return order == "asc"


def page_behind(
    items: Sequence[dict[str, Any]], after: str | None, limit: int, param: str = "after"
) -> tuple[Sequence[dict[str, Any]], bool]:
    """A page of a list, behind the item of that id, and whether there are more.

    Raises:
        InvalidRequest: no item has the id.
    """
    start = 0
    if after is not None:
        start = next((i + 1 for i, item in enumerate(items) if item["id"] == after), 0)
        if not start:
            raise InvalidRequest(f"{param} is not an id of this list: {after[:100]!r}.", param)
    return items[start : start + limit], start + limit < len(items)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, strictly. Raises InvalidRequest: it is not one; the message says where it breaks."""
    if body.count(b"\\") > MAX_ESCAPES:
        raise _too_much(f"has more than {MAX_ESCAPES} escaped characters")
    in_steps = len(body) >= LONG_BYTES or body.count(b"[") + body.count(b"{") > MAX_DEPTH  # what may be deep, too
    decoder = _StepwiseDecoder() if in_steps else _DECODER
    try:
        value = decoder.decode(body.decode())
    except UnicodeDecodeError as error:
        raise _bad_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _bad_json(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError:  # int() of over 4,300 digits
        raise _bad_json("it has a number that is too long") from None
    may_be_half = any(_SURROGATE.search(body, at, at + _PIECE_BYTES + 5) for at in range(0, len(body), _PIECE_BYTES))
    if may_be_half and any(escape[1] for escape in _ESCAPE.finditer(body)):
        raise _bad_json("a \\u escape is half of a surrogate pair")
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A loop in Python, so that other threads run meanwhile: dict() of 90,000 pairs takes 10 ms."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _bad_json(f"the key {key[:64]!r} appears twice in one object")
        result[key] = value
    return result


def _ascii_int(digits: str) -> int:
    """int(), without the digits of other scripts, which the scanner in Python takes."""
    if not digits.isascii():
        raise _bad_json("it has a digit that is not ASCII")
    return int(digits)


def _finite(digits: str) -> float:
    if not digits.isascii():
        raise _bad_json("it has a digit that is not ASCII")
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _bad_json("it has a number that is too large")
    return value


def _not_a_number(word: str) -> NoReturn:
    raise _bad_json(f"{word} is not a JSON number")


_LIBERTIES: Any = {"object_pairs_hook": _unique_keys, "parse_float": _finite, "parse_constant": _not_a_number}
_DECODER = json.JSONDecoder(**_LIBERTIES)


class _StepwiseDecoder(json.JSONDecoder):
    """json's scanner in Python, for one body: it lets other threads run between values, and counts them.

    The scanner in C holds the GIL for a whole body: 0.4 s for 300,000 keys.
    """

    def __init__(self) -> None:
        super().__init__(**_LIBERTIES | {"parse_int": _ascii_int})
        self._depth = 0
        self._num_values = 1
        self._num_ids = 0
        self.parse_string = self._string
        self.parse_object = self._object
        self.parse_array = self._array
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # typeshed has no scanners

    def _object(self, place: tuple[str, int], strict: bool, scan: _Scan, *hooks: Any) -> tuple[Any, int]:
        self._enter()
        result: tuple[Any, int] = _json_decoder.JSONObject(place, strict, self._counted(scan), *hooks)
        self._depth -= 1
        return result

    def _string(self, text: str, at: int, strict: bool) -> tuple[str, int]:
        """In parts, where it is long."""
        parts: list[str] = []
        end = text.find('"', at, at + LONG_BYTES)
        is_short = end >= 0 and text[end - 1] != "\\"
        while not is_short and (cut := _cut(text, at)):
            try:
                part, end = _json_decoder.scanstring(text[at:cut] + '"', 0, strict)
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(error.msg, text, at + error.pos) from None
            parts.append(part)
            if end <= cut - at:
                return "".join(parts), at + end
            at = cut
        part, end = _json_decoder.scanstring(text, at, strict)
        return ("".join([*parts, part]) if parts else part), end

    def _array(self, place: tuple[str, int], scan: _Scan) -> tuple[list[Any], int]:
        self._enter()
        text, at = place
        ids: list[int] = []
        match = _SPACE.match(text, at)
        while match:
            at = match.end()
            if match := _IDS.match(text, at):
                some = match[0].split(",")[:-1]
                self._num_ids += len(some)
                if self._num_ids > MAX_IDS:
                    raise _too_much(f"has more than {MAX_IDS} whole numbers in arrays")
                ids += map(int, some)
        if ids and text.startswith("]", at):
            raise json.JSONDecodeError("Expecting value", text, at)
        values, at = _json_decoder.JSONArray((text, at), self._counted(scan))
        self._depth -= 1
        if not ids:
            return values, at
        ids += values  # the few that follow the last run: those before are not copied
        return ids, at

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _too_much(f"is nested deeper than {MAX_DEPTH}")

    def _counted(self, scan: _Scan) -> _Scan:
        def scan_counted(text: str, at: int) -> tuple[Any, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise _too_much(f"has more than {MAX_VALUES} values, whole numbers in arrays not counted")
            if _LONG_NUMBER.match(text, at):
                raise _bad_json("it has a number that is too long")
            return scan(text, at)

        return scan_counted


def _cut(text: str, at: int) -> int:
    """Where a part of the text behind `at` may end, as no escape spans it; 0: nowhere, or little is left."""
    last = at + _PIECE_BYTES
    places = range(last, last - _PIECE_BYTES // 2, -_ESCAPE_CHARS) if last < len(text) else ()
    return next((cut for cut in places if "\\" not in text[cut - _ESCAPE_CHARS : cut]), 0)


def _bad_json(cause: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not valid JSON: {cause}.", code="invalid_json")


def _too_much(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body is too complex: its JSON {what}.", code="json_too_large")


def _drop_foreign_tools(fields: dict[str, Any], function_kind: str) -> None:
    """Drop tools other than functions (web_search, ...): they only widen what an answer may use."""
    tools = fields.get("tools")
    if not isinstance(tools, list):
        return
    foreign = [tool for tool in tools if _is_foreign(tool, function_kind)]
    if foreign:
        kinds = list(dict.fromkeys(escape(tool["type"][:MAX_SHOWN_KEY]) for tool in foreign))
        logger.warning("tools that are not functions were dropped: %s", ", ".join(kinds[:MAX_SHOWN_KINDS]))
        fields["tools"] = [tool for tool in tools if not _is_foreign(tool, function_kind)]


def _is_foreign(tool: object, function_kind: str) -> bool:
    return isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != function_kind


def _refuse_unsupported(fields: dict[str, Any], rules: Rules) -> None:
    for name, value in fields.items():
        if name in rules:
            _refuse(name, value, fields, rules)
        if isinstance(value, dict):
            for inner in value:
                if (path := f"{name}.{inner}") in rules:
                    _refuse(path, value[inner], fields, rules)


def _refuse(name: str, value: Any, fields: dict[str, Any], rules: Rules) -> None:
    rule = rules[name]
    if value is None or rule.is_neutral(value):
        return
    if rule.does is Does.CONTAINER and isinstance(value, dict):
        _refuse_contents(name, value, rules)
    elif rule.does in _REFUSING and not (rule.unless and fields.get(rule.unless[0]) == rule.unless[1]):
        supported = "".join(f", or send {json.dumps(one)}" for one in rule.neutral)
        this = " with this value" if rule.neutral else ""
        message = f"This server does not support {name}{this}. Leave it out{supported}."
        raise InvalidRequest(message, name, "unsupported_parameter")


def _refuse_contents(name: str, contents: dict[str, Any], rules: Rules) -> None:
    for key, value in contents.items():
        rule = rules.get(key)
        is_neutral = rule is not None and rule.does in _REFUSING and rule.is_neutral(value)
        if value is not None and not is_neutral and not (rule is not None and rule.does is Does.IGNORED):
            param = f"{name}.{key[:MAX_SHOWN_KEY]}"
            message = f"{param} is not supported inside {name}. Send it in the request itself, or leave it out."
            raise InvalidRequest(message, param, "unsupported_parameter")


def _rename(fields: dict[str, Any], rules: Rules) -> dict[str, str]:
    """Rename aliases in place.

    Returns: name -> the alias that it came under.
    """
    renamed: dict[str, str] = {}
    for alias in [name for name in fields if name in rules and rules[name].does is Does.ALIAS]:
        rule = rules[alias]
        name, value = rule.target, fields.pop(alias)
        if value is None or rule.is_neutral(value):
            continue
        if fields.get(name) is not None and fields[name] != value:
            message = f"{alias} is an alias of {renamed.get(name, name)}. Send one of them."
            raise InvalidRequest(message, alias)
        fields[name] = value
        renamed[name] = alias
    return renamed


def _field_error(message: str, fields: dict[str, Any], renamed: Mapping[str, str], shape: type) -> InvalidRequest:
    """msgspec's "Expected `str`, got `int` - at `$.messages[0].role`", in the words and the path of the API."""
    match = _VALIDATION.fullmatch(message)
    what, inner = (match["what"], (match["path"] or "").lstrip(".")) if match else (message, "")
    name = re.split(r"[.\[]", inner, maxsplit=1)[0]
    path = renamed.get(name, name) + inner[len(name) :]
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{param} is missing.", param, "missing_required_parameter")
    if wrong := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what):
        path = _with_key(path, wrong[2], fields)
        allowed = " or ".join(_TYPE_WORDS.get(word, word) for word in wrong[1].split(" | "))
        return InvalidRequest(
            f"{path} must be {allowed}, not {_TYPE_WORDS.get(wrong[2], wrong[2])}.", path, "invalid_type"
        )
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        param = f"{path}.{unknown[1][:MAX_SHOWN_KEY]}"
        (known,) = (one for one in declared(shape, inner) if isinstance(one, inspect.StructType))
        names = ", ".join(field.encode_name for field in known.fields)
        return InvalidRequest(f"There is no {param}. {path} may have {names}.", param)
    if unknown := re.fullmatch(r"Invalid enum value (.*)", what, re.DOTALL):
        values = [str(value) for one in declared(shape, inner) for value in _values_of(one)]
        allowed, sent = f"{'one of ' * (len(values) > 1)}{', '.join(values)}", unknown[1].strip("'")[:MAX_SHOWN_KEY]
        return InvalidRequest(f"{path} must be {allowed}, not {sent!r}.", path)
    if bound := re.fullmatch(r"Expected `(.*?)` .*", what):
        kind = _BOUNDED_TYPES[bound[1]]
        (node,) = (one for one in declared(shape, inner) if isinstance(one, kind))
        return InvalidRequest(f"{path} must {_bounds_in_words(node)}.", path)
    return InvalidRequest(f"{path}: {what}.", path)


def declared(shape: type, path: str) -> list[Any]:
    """How a shape declares what lies at a path such as "stop[...]": its possible types, as msgspec.inspect has them."""
    nodes: list[Any] = [inspect.type_info(shape)]
    for step in filter(None, re.split(r"[.\[\]]+", path)):
        inner: list[Any] = []
        for node in nodes:
            if isinstance(node, inspect.StructType):
                inner += [field.type for field in node.fields if field.encode_name == step]
            elif isinstance(node, inspect.ListType):
                inner.append(node.item_type)
            elif isinstance(node, inspect.DictType):
                inner.append(node.value_type)
        each = (one for node in inner for one in (node.types if isinstance(node, inspect.UnionType) else (node,)))
        nodes = [one.type if isinstance(one, inspect.Metadata) else one for one in each]  # without what is for schemas
    return nodes


def _values_of(node: Any) -> tuple[Any, ...]:
    if isinstance(node, inspect.LiteralType):
        return node.values
    if isinstance(node, inspect.BoolType):
        return "true", "false"
    return tuple(one.value for one in node.cls) if isinstance(node, inspect.EnumType) else ()


def range_of(shape: type, name: str) -> tuple[float, float]:
    """The declared range of a field that is a number."""
    (node,) = (one for one in declared(shape, name) if isinstance(one, (inspect.IntType, inspect.FloatType)))
    return node.ge, node.le  # type: ignore[return-value]  # the field has both


def _bounds_in_words(node: Any) -> str:
    if isinstance(node, (inspect.IntType, inspect.FloatType)):
        low = f"above {node.gt} and at most" if node.ge is None else f"from {node.ge} to"
        return f"be at least {node.ge}" if node.le is None else f"be {low} {node.le}"
    unit = "characters" if isinstance(node, inspect.StrType) else "items"
    if node.max_length is None:
        return "not be empty"
    return f"have {f'{node.min_length} to' if node.min_length else 'at most'} {node.max_length} {unit}"


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
