"""What holds an answer, as a request asks for it: a JSON schema, a regular expression, choices, or a grammar.

A constraint is checked here, so that a refusal names the path and the keyword, and compiled by core/grammar.py. No I/O;
frozen. Thread: any.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import combinations
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from core.errors import InvalidRequest
from core.shortest_answer import MAX_STEPS, MOST_CHARACTERS, shortest_answer

MAX_SOURCE_BYTES = 512 * 1024
MAX_DEPTH = 64
MAX_CHOICES = 4096
# The grammar library recurses as deep as schemas and grammars go, and its stack is not guarded: 1,000 references or
# 3,000 rules, each in the next, end the process
MAX_FOLLOWED = 200_000  # of a request's schemas together: 0.2 s
MAX_TOTAL_DEPTH = 256  # references followed
# It compares each of these with each: 1,000 patternProperties, or 32 patterns that hold together, take minutes
MAX_PATTERN_PROPERTIES = 64
MAX_INTERSECTED = 12  # schemas that hold together with another
MAX_OPTIONAL = 480  # properties of an object: any of them may be the next, and the library follows 2,000 rules at once
MAX_TAGS = 128
# Between the tokens of JSON: nothing, a blank, or a line break with its indentation. Models that loop would otherwise
# fill their context with blanks.
WHITESPACE = r"[ ]|\n[ ]{0,24}|\n\t{0,12}"
_CONTROLS = (r"\u000", r"\u001", "\x7f")  # in JSON
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WHOLE = 2**53  # beyond it the library rounds
ANNOTATIONS = frozenset(
    re.findall(
        r"\S+",
        "$schema $id $anchor $comment $defs definitions title description default examples deprecated readOnly"
        " writeOnly contentMediaType contentEncoding contentSchema discriminator example externalDocs xml",
    )
)
_TOLD = ANNOTATIONS - {"$schema", "$id", "$anchor", "$defs", "definitions"}  # to readers alone
ENFORCED = frozenset(
    re.findall(
        r"\S+",
        "type enum const anyOf oneOf allOf $ref items prefixItems minItems maxItems properties additionalProperties"
        " patternProperties propertyNames required minProperties maxProperties minLength maxLength pattern format"
        " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf nullable",
    )
)
MAX_REPEATED = 20_000  # characters of a regular expression, counts multiplied
_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{(?:\d*,)?(?P<most>\d+),?\}|.", re.DOTALL)
# Of JSON schema's expressions (ECMA 262): classes, which do not nest, and what is in one
_CLASSES = re.compile(r"\\P\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|^[\]-]|[\[&~]", re.DOTALL)
NO_CONTROL = r"\x01"
_ASCII = {"d": "0-9", "w": "0-9A-Z_a-z", "s": r"\t\n\x0b\x0c\r "}
_EXTENSION = re.compile(r"x-(?!guidance)")  # annotations of OpenAPI's; x-guidance has options for the library
_DRAFT = re.compile("https?://json-schema.org/")  # that the library knows
MAX_SHOWN = 200  # characters of what a refusal repeats
MAX_SUBSETS = 128  # of an object's properties, to hold how many of the optional ones there are
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATE = (
    r"[1-9][0-9]{3}-"
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_HEX = "[0-9a-fA-F]"
_IPV6 = "|".join(["(G:){7}(G|:)", *(f"(G(:G){{0,{n}}})?::(G(:G){{0,{5 - n}}})?" for n in range(6))]).replace(
    "G", f"{_HEX}{{1,4}}"
)
_ATOM, _LABEL = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]", "[a-zA-Z0-9]([a-zA-Z0-9-]{0,%d}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL % 61}(\.{_LABEL % 22}){{0,7}}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DAYS, _HOURS = (  # RFC 3339, appendix A
    "({n}{0}({n}{1}({n}{2})?)?|{n}{1}({n}{2})?|{n}{2})".format(*units, n="[0-9]{1,9}") for units in ("YMD", "HMS")
)
_EMAIL = rf"{_ATOM}{{1,40}}(\.{_ATOM}{{1,15}}){{0,3}}@{_LABEL % 61}(\.{_LABEL % 22}){{0,4}}"


def _uri(more: str, counts: str) -> str:
    """RFC 3986, 3.3: characters, and those written in hexadecimal."""
    return f"([{more}a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{{2}}){{{counts}}}"


_AUTHORITY = f"({_uri('', '0,200')}((:{_uri('', '0,64')})?@{_uri('', '0,200')})?|\\[({_IPV6})\\])(:[0-9]{{0,5}})?"
_PATH = f"//{_AUTHORITY}(/{_uri('/:@', '0,1000')})?|/?({_uri(':@', '1')}{_uri('/:@', '0,1000')})?"
_URI = f"[a-zA-Z][a-zA-Z0-9+.-]{{0,63}}:({_PATH})(\\?{_uri('/?:@', '0,300')})?(#{_uri('/?:@', '0,200')})?"
# The library's own dates have 29 February in any year, its times leap seconds at any hour, and some of its texts no
# limit. A limit beside an expression makes masks slow: it is within, part by part.
FORMATS: Mapping[str, str] = {
    name: f"^({pattern})$"
    for name, pattern in {
        "date": _DATE,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": f"P({_DAYS}(T{_HOURS})?|T{_HOURS}|[0-9]{{1,9}}W)",
        "email": _EMAIL,
        "hostname": _HOST,
        "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
        "ipv6": _IPV6,
        "time": _TIME,
        "uri": _URI,
        "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        **{f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}" for n in range(1, 9)},
    }.items()
}
ANY_TEXT = frozenset({"binary", "password", "path"})  # OpenAPI's and pydantic's formats that say nothing of a text
_TYPE_OF = {str: "string", int: "number", bool: "boolean", type(None): "null"}
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "propertyNames")


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "grammar"  # llguidance's notation
    GBNF = "gbnf"  # llama.cpp's
    TAGGED = "tagged"  # structural tags and calls, written here in Lark: refusals show none of it


def escapes_in(source: str) -> str:
    r"""Of JSON that a schema holds. \u may spell a property's name so that its schema is not held: none may, but where
    the schema itself has a control character.

    Args:
        source: the schema as JSON.
    """
    return r"nrbtf\"" + "u" * any(control in source for control in _CONTROLS)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What holds an answer, not compiled yet.

    Args:
        source: a JSON schema as canonical JSON, a regular expression, or a grammar.
        param: the request's field that it came in, for refusals.
        fallback: what holds less, and is used where this cannot be held.
        schemas: that the source has within it: a refusal names the one that cannot be held.
        frame: around it, in Lark with `@answer` in its place; "": it holds the whole answer.
    """

    kind: GrammarKind
    source: str
    param: str
    fallback: "GrammarSpec | None" = None
    schemas: "tuple[GrammarSpec, ...]" = ()
    frame: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Of one key, one grammar."""
        return self.kind, self.source, self.frame


_MAPS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_UNFOLLOWED = frozenset({"$defs", "definitions", "enum", "const", "default", "examples"})  # but where referred to
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(slots=True)
class Allowance:
    """What the checks of a request's schemas may still take, together: 128 tools take no longer than one.

    Args:
        num_parts: that references lead to.
        num_steps: to find the shortest answers; what takes more is not judged.
        num_bytes: of objects whose optional properties are counted: they are written out.
    """

    num_parts: int = MAX_FOLLOWED
    num_steps: int = MAX_STEPS
    num_bytes: int = MAX_SOURCE_BYTES

    def write(self, num_bytes: int, param: str) -> None:
        """Raises InvalidRequest: there is less."""
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            size = f"{MAX_SOURCE_BYTES // 1024} KiB"
            raise InvalidRequest(f"The request's schemas, expanded, are larger than {size} at {param}.", param)


def json_schema(schema: object, param: str, allowance: Allowance | None = None) -> GrammarSpec:
    """
    Args:
        allowance: of the request, where it may have several.

    Raises:
        InvalidRequest: it is no schema, is too large or too deep, or has a keyword that cannot be enforced.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a JSON schema: an object.", param)
    allowance = allowance or Allowance()
    check_depth(schema, param, allowance)
    for path, keyword, value in keywords_of(schema, param):
        _check_numbers(path, keyword, value, param)
        is_known = keyword in ANNOTATIONS | ENFORCED or (keyword == "uniqueItems" and value is False)
        if not is_known and not _EXTENSION.match(keyword):
            message = f"{path} has the keyword {keyword!r}, which cannot be enforced. Leave it out."
            raise InvalidRequest(message, param)
        if keyword == "$ref" and not (isinstance(value, str) and _is_of_schemas(value)):
            message = (
                f"{path}.$ref is {str(value)[:MAX_SHOWN]!r}. It must point to a schema in this one: '#/$defs/NAME'."
            )
            raise InvalidRequest(message, param)
        if keyword == "pattern":
            _check_repeats(value, f"{path}.pattern", param)
        if keyword == "patternProperties":
            for pattern in value:
                _check_repeats(pattern, f"{path}.patternProperties", param)
    check_answerable(schema, param, allowance)
    # json's encoder holds the GIL ten times as long
    source = msgspec.json.encode(_as_held(schema, param, allowance, schema)).decode()
    return bounded(GrammarSpec(GrammarKind.JSON_SCHEMA, source, param))


def _as_read(pattern: str) -> str:
    """An expression of a schema in the library's notation, where classes nest.

    Of a class with all control characters the library takes JSON's escapes of quotes and backslashes, whether they are
    in it or not: each class loses one of them, which no answer has anyway.
    """

    def held(part: re.Match[str]) -> str:
        text = part[0]
        if text.startswith("\\P"):
            return f"[{text}&&[^{NO_CONTROL}]]"
        if not text.startswith("["):
            return text
        begin = 2 if text.startswith("[^") else 1
        body = _IN_CLASS.sub(lambda one: one[0] if one[0][0] == "\\" else "\\" + one[0], text[begin:-1])
        if begin == 2:
            return f"[^{NO_CONTROL}{body}]"
        return f"[[{body}]&&[^{NO_CONTROL}]]" if re.search(r"\\[xu]0|\\[Pc0]|[\0-\x1f]", body) else f"[{body}]"

    return _CLASSES.sub(held, pattern)


def in_ascii(pattern: str) -> str:
    r"""An expression with its \d, \w and \s written out: outside of schemas the library takes Unicode's."""

    def written(part: re.Match[str], is_outside: bool = True) -> str:
        text = part[0]
        if text.startswith("["):
            return re.sub(r"\\.", lambda one: written(one, is_outside=False), text, flags=re.DOTALL)
        if (characters := _ASCII.get(text[1:].lower())) is None:
            return text
        if text[1].isupper():
            return f"[^{characters}]"
        return f"[{characters}]" if is_outside else characters

    return _CLASSES.sub(written, pattern)


def regex(pattern: str, param: str) -> GrammarSpec:
    """The whole answer matches. Raises InvalidRequest: it is too long, or repeats too much."""
    spec = bounded(GrammarSpec(GrammarKind.REGEX, pattern, param))
    _check_repeats(pattern, param, param)
    return spec


def _check_repeats(pattern: str, path: str, param: str) -> None:
    """Raises InvalidRequest: what the counts in its braces repeat, one within the other, comes to too much."""
    sizes, last = [0], 0  # of the groups that are open, and of what came last
    for part in _REGEX_PARTS.finditer(pattern):
        text = part[0]
        if text == "\\":  # the library takes it for the end of a text
            raise InvalidRequest(f"{path} is not valid: {place_in(pattern, part.start())}: incomplete escape.", param)
        if text == "(":
            sizes.append(0)
            last = 0
            continue
        if text == ")" and len(sizes) > 1:
            last = sizes.pop()
        elif part["most"]:
            sizes[-1] -= last
            last *= max(1, int(part["most"][:9]))
        elif text not in "*+?|":
            last = 1
        else:
            continue
        sizes[-1] += last
        if last > MAX_REPEATED:
            why = f"is longer than {MAX_REPEATED} characters with its repetitions expanded"
            raise InvalidRequest(f"{path} {why}, {place_in(pattern, part.start())}.", param)


def choice(texts: Sequence[str], param: str) -> GrammarSpec:
    """The answer is one of the texts. Raises InvalidRequest: there is none, or too many."""
    if not texts or len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"{param} must have 1 to {MAX_CHOICES} choices.", param)
    return bounded(GrammarSpec(GrammarKind.REGEX, "|".join(map(_escaped, texts)), param))


@dataclass(frozen=True, slots=True)
class Tag:
    """Args: content: a checked JSON schema's source; or a text, which is as it is."""

    begin: str
    content: GrammarSpec | str
    end: str


def tagged_text(
    triggers: Sequence[str], tags: Sequence[Tag], param: str, at_least_one: bool = False, stops: bool = False
) -> GrammarSpec:
    """Text that is free until one of the triggers comes; then one of the tags that begin with it follows whole.

    Args:
        stops: the first tag ends the answer.

    Raises:
        InvalidRequest: there is no tag or trigger, or too many; a tag begins with no trigger; a trigger begins no tag.
    """
    if not 0 < len(tags) <= MAX_TAGS or not 0 < len(triggers) <= MAX_TAGS or not all(triggers):
        raise InvalidRequest(f"{param} must have 1 to {MAX_TAGS} tags and triggers, none of them empty.", param)
    lines, tagged = ["%llguidance {}", "TEXT: /(?s:.*)/"], []
    left = set(range(len(tags)))
    for i, trigger in enumerate(triggers):
        begun = [number for number, tag in enumerate(tags) if tag.begin.startswith(trigger)]
        if not begun:
            raise InvalidRequest(f"{param}: no tag begins with the trigger {trigger[:MAX_SHOWN]!r}.", param)
        left -= set(begun)
        whole = " | ".join(_tag_in_lark(tags[number], len(trigger)) for number in begun)
        lines += [f"lead_{i}[lazy]: TEXT {json_text(trigger)}", f"tagged_{i}: lead_{i} ({whole})"]
        tagged.append(f"tagged_{i}")
    for number in left:
        raise InvalidRequest(f"{param}: {tags[number].begin[:MAX_SHOWN]!r} begins with none of the triggers.", param)
    one = f"({' | '.join(tagged)})"
    some = one if stops else f"{one}+ TEXT"
    lines.append(f"start: {some}" if at_least_one else f"start: TEXT | {some}")
    schemas = tuple(tag.content for tag in tags if isinstance(tag.content, GrammarSpec))
    return bounded(GrammarSpec(GrammarKind.TAGGED, "\n".join(lines), param, schemas=schemas))


def _tag_in_lark(tag: Tag, num_begun: int) -> str:
    content = tag.content
    if isinstance(content, GrammarSpec):
        options = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": escapes_in(content.source)}
        schema = {**json.loads(content.source), "x-guidance": options}
        inner = f"%json {json_text(schema)}"
    else:
        inner = json_text(content)
    return f"({json_text(tag.begin[num_begun:])} {inner} {json_text(tag.end)})"


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def place_in(source: str, offset: int) -> str:
    return f"line {source.count(chr(10), 0, offset) + 1}, column {offset - source.rfind(chr(10), 0, offset)}"


def check_depth(schema: Any, param: str, allowance: Allowance) -> None:
    """
    Raises:
        InvalidRequest: the schema is too deep, references followed, or has too much that is compared with one another.
    """
    num_patterns = num_intersected = 0
    unseen: list[Any] = [schema]
    while unseen:
        one = unseen.pop()
        if isinstance(one, list):
            unseen += one
        if not isinstance(one, dict):
            continue
        unseen += one.values()
        patterns, parts = one.get("patternProperties"), one.get("allOf")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        num_intersected += len(parts) if isinstance(parts, list) and len(parts) > 1 else 0
        num_intersected += bool({"allOf", "$ref"} & one.keys() and {"pattern", "format"} & one.keys())
    if num_patterns > MAX_PATTERN_PROPERTIES:
        raise InvalidRequest(f"{param} has more than {MAX_PATTERN_PROPERTIES} patternProperties.", param)
    if num_intersected > MAX_INTERSECTED:
        message = f"{param} has more than {MAX_INTERSECTED} schemas with allOf, or with a pattern next to $ref."
        raise InvalidRequest(message, param)
    seen: dict[str, int] = {}  # the level at which a reference was followed last

    def follow(one: Any, level: int, are_names: bool = False) -> None:
        """are_names: the keys are names that the schema gives, no keywords."""
        allowance.num_parts -= 1
        if level > MAX_TOTAL_DEPTH:
            message = f"{param} is nested deeper than {MAX_TOTAL_DEPTH} levels when its references are followed."
            raise InvalidRequest(message, param)
        if allowance.num_parts < 0:
            message = (
                f"The request's schemas up to {param} have more than {MAX_FOLLOWED} parts when their references are"
                " followed."
            )
            raise InvalidRequest(message, param)
        if isinstance(one, list):
            for item in one:
                follow(item, level + 1)
        if not isinstance(one, dict):
            return
        for name, item in one.items():
            if are_names or name not in _UNFOLLOWED:
                follow(item, level + 1, not are_names and name in _MAPS)
        pointer = None if are_names else one.get("$ref")
        if isinstance(pointer, str) and pointer.startswith("#") and seen.get(pointer, -1) < level:
            is_open = pointer in active
            seen[pointer] = level
            target = _target(schema, pointer, param)
            if not is_open:  # a schema that holds itself is unrolled as answers need it
                active.add(pointer)
                follow(target, level + 1)
                active.discard(pointer)

    active: set[str] = set()
    follow(schema, 0)


def check_answerable(schema: Any, param: str, allowance: Allowance, most_characters: float = MOST_CHARACTERS) -> None:
    """
    Args:
        schema: of bounded depth, its references within itself.
        most_characters: of an answer.

    Raises:
        InvalidRequest: the schema contradicts itself, or its shortest answer is longer.
    """
    target = partial(_target, schema, param=param)
    found = shortest_answer(schema, param, target, most_characters, allowance.num_steps)
    allowance.num_steps -= found.num_steps
    if found.num_characters == math.inf:
        raise InvalidRequest(f"{found.path} cannot be satisfied: {found.why}. Correct the schema.", param)
    if found.num_characters > most_characters:
        why = f"Its shortest answer has more than the {most_characters:.6g} characters that fit into the context"
        raise InvalidRequest(f"{found.path} cannot be satisfied within this model's length. {why}.", param)


def pointed(root: Any, pointer: str) -> Any:
    """What a reference within the schema points to (RFC 6901); None: nothing.

    The library follows more: anchors. They would lead past the bounds on depth.
    """
    first, *parts = unquote(pointer[1:]).split("/")
    found: Any = None if first else root
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and len(name) < 9 and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_of_schemas(pointer: str) -> bool:
    """Leads to what is held as a schema, if it leads anywhere: not into a value of enum, or an example."""
    first, *parts = unquote(pointer).split("/")
    rest = iter(parts)
    return first == "#" and all(
        part in _SCHEMAS or (part in (*_SCHEMAS_BY_NAME, *_SCHEMA_LISTS) and next(rest, None) is not None)
        for part in rest
    )


def _target(root: Any, pointer: str, param: str) -> Any:
    """Raises InvalidRequest: there is no such schema."""
    found = pointed(root, pointer)
    if not isinstance(found, dict | bool):
        shown = pointer[:MAX_SHOWN]
        place = _place_of(root, pointer, param)
        message = f"{place}.$ref is {shown!r}, which points to no schema. Write it as '#/$defs/NAME'."
        raise InvalidRequest(message, param)
    return found


def _place_of(root: Any, pointer: str, param: str) -> str:
    """The path of the outermost schema that has the reference; a schema may have any depth."""
    unseen = deque([(param, root, False)])
    while unseen:
        path, one, are_names = unseen.popleft()
        if isinstance(one, list):
            unseen += [(f"{path}[{i}]", item, False) for i, item in enumerate(one)]
        elif isinstance(one, dict):
            if one.get("$ref") == pointer and not are_names:
                return path
            followed = [name for name in one if are_names or name not in _UNFOLLOWED - {"$defs", "definitions"}]
            unseen += [(f"{path}.{name}", one[name], not are_names and name in _MAPS) for name in followed]
    return param


def _check_numbers(path: str, keyword: str, value: Any, param: str) -> None:
    """Raises InvalidRequest: the library would round a number."""
    unseen = [value] if keyword in ("enum", "const", "multipleOf") or keyword in _BOUNDS else []
    while unseen:
        one = unseen.pop()
        if isinstance(one, int | float) and abs(one) > MAX_WHOLE:
            raise InvalidRequest(f"{path}.{keyword} is beyond 2**53, and cannot be enforced exactly.", param)
        unseen += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return names != [] and _are_names(names) and TYPES.issuperset(names)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and value != [], "a list of values"),
    "required": (_are_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "nullable": (lambda value: isinstance(value, bool), "true or false"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(_SCHEMAS_BY_NAME, (lambda value: isinstance(value, dict), "an object of schemas")),
    **dict.fromkeys(_BOUNDS, (_is_number, "a number")),
    **{
        least + what: (_is_whole, "a whole number, at least 0")
        for least in ("min", "max")
        for what in ("Items", "Length", "Properties")
    },
}


def well_formed(schema: Any) -> Any:
    """What can be read of a schema whose depth is bounded: without keywords that have a value of the wrong type."""
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if key not in _VALUES or _VALUES[key][0](value)}
    for keyword, value in made.items():
        if keyword in _SCHEMAS_BY_NAME:
            made[keyword] = {name: well_formed(one) for name, one in value.items()}
        elif keyword in _SCHEMA_LISTS:
            made[keyword] = [well_formed(one) for one in value]
        elif keyword in _SCHEMAS:
            made[keyword] = well_formed(value)
    return made


def _check_object(path: str, schema: Mapping[str, Any], param: str) -> None:
    """Raises InvalidRequest: values of the wrong type, or bounds that the library does not hold."""
    for keyword in schema.keys() & _VALUES.keys():
        is_fit, what = _VALUES[keyword]
        if not is_fit(schema[keyword]):
            raise InvalidRequest(f"{path}.{keyword} must be {what}.", param)
    if "format" in schema and not (_is_of_numbers(schema) or str(schema["format"]) in FORMATS.keys() | ANY_TEXT):
        raise InvalidRequest(f"{path}.format must be one of {', '.join(sorted(FORMATS))}, or left out.", param)
    least, most = (schema.get(name, ()) for name in ("exclusiveMinimum", "exclusiveMaximum"))
    low, high = schema.get("minimum", least), schema.get("maximum", most)
    is_close = isinstance(low, int | float) and isinstance(high, int | float) and high - low < 1
    if (least != () or most != ()) and is_close:
        raise InvalidRequest(f"{path} has exclusive bounds less than 1 apart, which cannot be enforced.", param)
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if len(properties.keys() - required) > MAX_OPTIONAL:
        raise InvalidRequest(f"{path} has more than {MAX_OPTIONAL} optional properties.", param)
    if _counts_optional(schema):
        known = {"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"}
        is_closed = schema.get("type") == "object" and schema.get("additionalProperties") is False
        num_subsets = 2 ** (len(properties) - len(required))
        if not is_closed or schema.keys() - known - ANNOTATIONS or num_subsets > MAX_SUBSETS:
            message = (
                f"{path}.minProperties and .maxProperties can be enforced only with type object, no other names"
                " (additionalProperties: false) and at most 7 optional properties."
            )
            raise InvalidRequest(message, param)
        return
    if schema.get("minProperties", 0) > max(1, len(required)):
        message = (
            f"{path}.minProperties is more than the number of required properties. It cannot be enforced, because keys"
            " may repeat. Lower it, or add names to required."
        )
        raise InvalidRequest(message, param)


def _is_of_numbers(schema: Mapping[str, Any]) -> bool:
    """Its format, as OpenAPI's int32, says nothing: formats are of strings."""
    return schema.get("type") in ("integer", "number")


def bounded(spec: GrammarSpec) -> GrammarSpec:
    if len(spec.source.encode()) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{spec.param} is larger than {MAX_SOURCE_BYTES // 1024} KiB.", spec.param)
    return spec


def _escaped(text: str) -> str:
    return re.sub(r"[^\w ]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def keywords_of(schema: Any, path: str, depth: int = 0, param: str = "") -> Iterator[tuple[str, str, Any]]:
    """Each keyword of a schema and of those in it, with the path of the schema that has it.

    Args:
        param: the path of the outermost; "": this one is it.

    Raises:
        InvalidRequest: it is too deep, or no schema.
    """
    if isinstance(schema, bool):
        return
    param = param or path
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{path} is nested deeper than {MAX_DEPTH} levels.", param)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{path} must be a schema: an object, true or false.", param)
    _check_object(path, schema, param)
    for keyword, value in schema.items():
        yield path, keyword, value
        at = f"{path}.{keyword}"
        if keyword in _SCHEMAS_BY_NAME:
            for name, one in value.items():
                yield from keywords_of(one, f"{at}.{name}", depth + 1, param)
        elif keyword in _SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise InvalidRequest(f"{at} must be a list of schemas.", param)
            for i, one in enumerate(value):
                yield from keywords_of(one, f"{at}[{i}]", depth + 1, param)
        elif keyword in _SCHEMAS:
            yield from keywords_of(value, at, depth + 1, param)


def _as_held(schema: Any, param: str, allowance: Allowance, root: Mapping[str, Any]) -> Any:
    """The schema in the library's keywords: without annotations, each format as what it is held by.

    Annotations may be long, and answers that differ in nothing else share a grammar.

    Raises:
        InvalidRequest: it is larger than there is room for, or says of names what cannot be held.
    """
    if not isinstance(schema, dict):
        return schema
    made = {
        keyword: value for keyword, value in schema.items() if keyword not in _TOLD and not _EXTENSION.match(keyword)
    }
    made.pop("uniqueItems", None)  # false
    if not _DRAFT.match(str(made.get("$schema", ""))):
        made.pop("$schema", None)
    if _is_of_numbers(made) or made.get("format") in ANY_TEXT:
        made.pop("format", None)
    if "propertyNames" in made:
        made |= _named(made, made.pop("propertyNames"), param, root)
    if "$ref" in made:
        made["$ref"] = quote(unquote(made["$ref"]), safe="#/$~")
    if "pattern" in made:
        made["pattern"] = _as_read(made["pattern"])
    if "patternProperties" in made:
        made["patternProperties"] = {_as_read(name): one for name, one in made["patternProperties"].items()}
    for keyword, value in made.items():
        if keyword in _SCHEMAS_BY_NAME:
            made[keyword] = {name: _as_held(one, param, allowance, root) for name, one in value.items()}
        elif keyword in _SCHEMA_LISTS:
            made[keyword] = [_as_held(one, param, allowance, root) for one in value]
        elif keyword in _SCHEMAS:
            made[keyword] = _as_held(value, param, allowance, root)
    if _are_apart(made.get("oneOf", ()), root) and "anyOf" not in made:
        made["anyOf"] = made.pop("oneOf")
    if "format" in made:
        pattern = FORMATS[made.pop("format")]
        if "pattern" in made:
            made["allOf"] = [*made.get("allOf", ()), {"pattern": pattern}]
        else:
            made["pattern"] = pattern
    if _counts_optional(made):
        subsets = list(_subsets(made, param, allowance))
        return {"anyOf": subsets} if subsets else False
    if made.pop("nullable", False) and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def _named(schema: Mapping[str, Any], given: Any, param: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What propertyNames says, in an object's other keywords.

    Raises:
        InvalidRequest: it is more than constants, a pattern or a format, or stands beside other keywords on names.
    """
    names, more = _referred(given, root), schema.get("additionalProperties", True)
    said = [(key, one) for key, one in names.items() if key not in _TOLD] if isinstance(names, dict) else [("", names)]
    said = [one for one in said if one not in (("", True), ("type", "string"))]
    is_alone = not schema.keys() & {"properties", "patternProperties", "maxProperties"}
    match said:
        case []:
            return {}
        case [("enum" | "const" as keyword, value)] if is_alone and schema.get("minProperties", 0) < 2:
            texts = value if keyword == "enum" else [value]
            if len(texts) <= MAX_OPTIONAL and all(isinstance(one, str) for one in texts):
                return {"properties": dict.fromkeys(texts, more), "additionalProperties": False}
        case [("pattern" | "format" as keyword, value)] if is_alone and value not in ANY_TEXT:
            return {
                "patternProperties": {FORMATS[value] if keyword == "format" else value: more},
                "additionalProperties": False,
            }
    found = keywords_of(root, param)
    path = next(path for path, keyword, value in found if keyword == "propertyNames" and value is given)
    message = (
        f"{path}.propertyNames can be enforced only as an enum, a const, a pattern or a format, and only if no other"
        " keyword restricts the names or their number."
    )
    raise InvalidRequest(message, param)


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a schema that only refers, refers to."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema or {"type", "enum", "const"} & schema.keys():
            break
        schema = pointed(root, schema["$ref"])
    return schema


def _are_apart(schemas: Sequence[Any], root: Mapping[str, Any]) -> bool:
    """Whether at most one can hold: they differ in type, in constants, or in those of a property that they require."""
    found = [_referred(one, root) for one in schemas]
    first: Mapping[str, Any] = next((one for one in found if isinstance(one, dict) and "properties" in one), {})
    names = [name for name in first.get("required", ()) if ("object", "") not in _kinds(first, name, root)]
    return bool(found) and any(_differ([_kinds(one, name, root) for one in found]) for name in ("", *names[:8]))


def _differ(kinds: Sequence[set[tuple[str, str]]]) -> bool:
    taken, types = set[tuple[str, str]](), set[str]()
    for some in kinds:
        if not some or some & taken or any((kind, "") in taken or (not text and kind in types) for kind, text in some):
            return False
        taken |= some
        types.update(kind for kind, _ in some)
    return True


def _kinds(schema: Any, name: str, root: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(type, constant; "": any) of which its values are one; none: any may be.

    Args:
        name: of a property, whose constant stands for an object's.
    """
    if not isinstance(schema, dict) or schema.get("nullable"):
        return set()
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        if any(isinstance(value, float | list | dict) for value in values):
            return set()
        return {(_TYPE_OF[type(value)], json_text(value)) for value in values}
    types = schema.get("type", [])
    kinds = {("number" if one == "integer" else one, "") for one in ([types] if isinstance(types, str) else types)}
    if kinds == {("object", "")} and name in schema.get("required", ()):
        inner = _kinds(_referred(schema.get("properties", {}).get(name), root), "", root)
        kinds = {("object", text) for _, text in inner} if all(text for _, text in inner) else kinds
    return kinds


def _counts_optional(schema: Mapping[str, Any]) -> bool:
    """Whether it says how many of its optional properties there are, which the library cannot hold by itself."""
    num_optional = len(schema.get("properties", {})) - len(set(schema.get("required", ())))
    return num_optional > 0 and ("maxProperties" in schema or schema.get("minProperties", 0) > 1)


def _subsets(schema: Mapping[str, Any], param: str, allowance: Allowance) -> Iterator[Mapping[str, Any]]:
    """The same object with each choice of its optional properties."""
    required, properties = set(schema.get("required", ())), schema["properties"]
    sizes = {name: 2 * len(name) + len(msgspec.json.encode(one)) for name, one in properties.items()}
    optional = [name for name in properties if name not in required]
    least, most = (schema.get(name) for name in ("minProperties", "maxProperties"))
    for count in range(len(optional) + 1):
        if (least or 0) <= count + len(required) <= (len(properties) if most is None else most):
            for chosen in combinations(optional, count):
                names = [name for name in properties if name in required or name in chosen]
                kept = {keyword: schema[keyword] for keyword in ("type", "additionalProperties")}
                allowance.write(len(json_text(kept)) + sum(sizes[name] for name in names), param)
                yield {**kept, "properties": {name: properties[name] for name in names}, "required": names}
