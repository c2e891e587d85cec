"""Writes the grammar of tool calls from a format's description, in llguidance's Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. Whatever the grammar takes, core/answer_parts.py
reads as calls whose arguments fit the functions' schemas. No I/O. Thread: any.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from core.answer_parts import NAME, parameter_types, typed
from core.constraints import ANNOTATIONS, escapes_in, in_ascii, json_text, pointed
from core.errors import InvalidRequest
from core.shortest_answer import fitting_values
from core.tool_formats import JsonArguments, JsonCall, LiteralArguments, NamedCall, TaggedArguments, ToolFormat

Schema = Mapping[str, Any]
WrittenOut = TaggedArguments | LiteralArguments  # each parameter by itself

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# What can be held of a value that is not written as JSON: other types' keywords say nothing of it
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LENGTHS = {"minLength", "maxLength"}
_KEYWORDS: Mapping[str, set[str]] = {
    "string": _LENGTHS | {"pattern"},
    "integer": _BOUNDS | {"multipleOf"},
    "number": _BOUNDS | {"multipleOf"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
_HELD_KEYWORDS = {"type"}.union(*_KEYWORDS.values())
_BESIDE_VALUES = {"type", "enum", "const", "minItems", "maxItems", "required", *_LENGTHS, *_BOUNDS}
_ANY: Schema = {}
_TEXT: Schema = {"type": "string"}
_MOST = 10**18 - 1  # of INTEGER
# What a parameter's bare text may not be, by the other types that it may have: it would be read as one of them
_READ_AS = {
    "null": "[Nn](one|ull)",
    "boolean": "[Tt]rue|[Ff]alse",
    "integer": r"-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "number": r"-?[0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
_BARE_SCALARS = {"null": '"null"', "boolean": '"true" | "false"', "integer": "INTEGER", "number": "NUMBER"}
MAX_JOINED = 16  # schemas that hold together
MAX_ALTERNATIVES = 128  # of a value
_TERMINALS = r"""
TEXT: /(?s:.*)/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
PARAMETER: /[A-Za-z_][A-Za-z0-9_.\-]{0,63}/
PYTHON_STRING: /"([^"\\\x00-\x1f]|\\["'\\nrt])*"|'([^'\\\x00-\x1f]|\\["'\\nrt])*'/
"""

# What begins an answer that core/answer_parts.py reads as a call, with bounded white space where the model may write it
_ANY_BLANK, _BLANK = r"[ \t\r\n]*", r"[ \t\r\n]{0,12}"
_TYPED_HEAD = rf'\{{{_BLANK}("type"{_BLANK}:{_BLANK}"function"{_BLANK},{_BLANK})?'
_JSON_BEGINS = (
    rf'{_ANY_BLANK}\{{{_ANY_BLANK}"([^"\\]*\\|type"{_ANY_BLANK}:{_ANY_BLANK}"([^"\\]*\\|function")'
    rf'|name"{_ANY_BLANK}:{_ANY_BLANK}"([^"\\]*\\|(NAMES)"))'
)
_LIST_BEGINS = rf"{_ANY_BLANK}\[{_ANY_BLANK}(NAMES){_ANY_BLANK}\("
# Of Harmony; marks that are spelled in other tokens would be read as such
_MESSAGE_TEXT = r"MESSAGE_TEXT: /(?s:.*)/ & ~/(?s:.*)<\|(start|end|call|return)\|>(?s:.*)/"
HARMONY_TEXT = f"%llguidance {{}}\nstart: MESSAGE_TEXT\n{_MESSAGE_TEXT}"


class CannotHold(Exception):
    """The format cannot hold a model to this keyword of a schema.

    Args:
        path: of the schema, in the request.
        why: what can be done, or what stands against it.
    """

    def __init__(self, path: str, keyword: str, why: str = "Leave it out") -> None:
        super().__init__(f"{path} has the keyword {keyword!r}. {why}")
        self.param = path


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a request offers.

    Args:
        schema: of its parameters, which are an object.
        is_strict: all of the schema is held; otherwise what can be.
        place: of the schema in the request.
    """

    name: str
    schema: Schema
    is_strict: bool = True
    place: str = "parameters"


def required_calls(
    form: ToolFormat,
    tools: Sequence[Tool],
    special: Mapping[str, int] = MappingProxyType({}),
    most_calls: int | None = None,
    instead: Schema | None = None,
) -> str:
    """The grammar of answers that are calls and nothing else, at least one.

    Args:
        special: the ids of the format's marks that are special tokens of the model.
        most_calls: None: any number.
        instead: the schema of an answer that may come in the place of calls.

    Raises:
        CannotHold
    """
    writer = _Writer(form, special, most_calls)
    call = writer.call(tools)
    calls = writer.section(call, "" if form.opens_answer else writer.begin)
    return writer.grammar(calls if instead is None else f"{calls} | {inline_json(instead)}")


def allowed_calls(
    form: ToolFormat,
    tools: Sequence[Tool],
    special: Mapping[str, int] = MappingProxyType({}),
    most_calls: int | None = None,
    free_ids: Sequence[int] = (),
) -> str:
    """The grammar of answers that are text until the model begins a call.

    Args:
        free_ids: of special tokens that the text may have; none where calls may open the answer without a mark.

    Further Args, Raises: as required_calls.
    """
    writer = _Writer(form, special, most_calls)
    if form.opens_answer:
        return writer.opened(tools)
    call = writer.call(tools)
    free = f"TEXT | <[{','.join(map(str, free_ids))}]>" if free_ids else "TEXT"
    text = writer.rule("text", f"({free})*") if free_ids else "TEXT"
    if writer.begin in special:
        lead = f"{text} {writer.literal(writer.begin)}"
    else:
        lead = f"{text} " * bool(free_ids) + writer.rule("lead[lazy]", f"TEXT {json_text(writer.begin)}")
    return writer.grammar(f"{text} | {lead} {writer.section(call, '')}")


def harmony_answers(
    tools: Sequence[Tool],
    special: Mapping[str, int],
    eos_ids: Collection[int] = (),
    is_required: bool = False,
    final: str | None = None,
    param: str = "tools",
) -> str:
    """The grammar of gpt-oss's whole answers, behind `<|start|>assistant`: thoughts, then a call, or text where none
    is required. A call ends the answer.

    Args:
        special: the ids of the model's special tokens, its marks among them.
        eos_ids: those that end an answer.
        final: what the text is, in Lark; None: it is free.
        param: the request's field that asks for it.

    Raises:
        InvalidRequest: a mark of messages is no special token, or one that ends an answer.
    """
    ids = {name: special.get(f"<|{name}|>") for name in ("start", "channel", "constrain", "message", "end", "call")}
    start, channel, constrain, message, end, call_end = (f"<[{token_id}]>" for token_id in ids.values())
    for name, token_id in ids.items():
        if token_id is None or (token_id in eos_ids and name != "call"):
            words = f"{param} cannot be enforced: <|{name}|> is not a special token of this model, or ends its answers."
            raise InvalidRequest(f"{words} Leave it out.", param, "unsupported_parameter")
    rules = []
    for i, tool in enumerate(tools):
        recipient, arguments = json_text(f" to=functions.{tool.name}"), inline_json(tool.schema, tool.is_strict)
        header = f'({recipient} {channel} "commentary" | {channel} "commentary" {recipient}) kind'
        rules.append(f"call_{i}: {header} {message} {arguments}{'' if ids['call'] in eos_ids else ' ' + call_end}")
    next_message = f'{message} MESSAGE_TEXT {end} {start} "assistant"'
    answers, before = [f"call_{i}" for i in range(len(tools))], ["analysis"]
    if not is_required:
        before += ["preamble"] if final is None else []  # it would be text before what is held
        free = f'{channel} ("final" | "commentary") {message} MESSAGE_TEXT'
        answers.append(free if final is None else f'{channel} "final" kind {message} {final}')
    rules += [
        f'kind: (" "? {constrain} "json" | " json")?',
        f'analysis: {channel} "analysis" {next_message}',
        *([f'preamble: {channel} "commentary" {next_message}'] if "preamble" in before else []),
        _MESSAGE_TEXT,
    ]
    return "\n".join(["%llguidance {}", f"start: ({' | '.join(before)})* ({' | '.join(answers)})", *rules])


class _Writer:
    def __init__(self, form: ToolFormat, special: Mapping[str, int], most_calls: int | None) -> None:
        self.begin = next((one for one in form.begins if one in special), form.begins[0])
        self._form = form
        self._special = special
        self._marks = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})")
        self._most_calls = most_calls
        self._rules: list[str] = []
        self._values: dict[int, tuple[Schema, str]] = {}  # the rule of each schema that a literal has

    def grammar(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, _TERMINALS])

    def rule(self, head: str, body: str) -> str:
        """Its name."""
        self._rules.append(f"{head}: {body}")
        return head.partition("[")[0]

    def literal(self, text: str) -> str:
        """Special tokens are no text to the grammar."""
        parts = filter(None, self._marks.split(text)) if self._special else [text]
        written = (f"<[{self._special[part]}]>" if part in self._special else json_text(part) for part in parts)
        return " ".join(written) or '""'

    def section(self, call: str, begin: str) -> str:
        form = self._form
        end = f"{json_text(form.pad)} {self.literal(form.end)}" if form.end and not form.opens_answer else '""'
        if form.brackets is None:
            body = f"{json_text(form.pad)} {call} {end}"
            more = self._more(f"{json_text(form.before)} {self.literal(self.begin)} {body}")
            return f"{self.literal(begin)} {body} {more}"
        marks = form.brackets
        more = self._more(f"{json_text(marks.separator and marks.separator + ' ')} {call}")
        return f"{self.literal(begin)} {json_text(form.pad + marks.begin)} {call} {more} {json_text(marks.end)} {end}"

    def opened(self, tools: Sequence[Tool]) -> str:
        """Calls that open the answer, or text that does not begin as they do, perhaps with calls behind a mark.

        A call is told from text by one lexeme of each function, up to where nothing else can be meant.
        """
        form, call = self._form, self.call(tools)
        assert form.brackets is not None, "they divide the calls of an answer that they open"
        names = "|".join(re.escape(tool.name) for tool in tools)
        firsts = []
        for i, tool in enumerate(tools):
            if isinstance(form.call, JsonCall):
                head = f'{_BLANK}{_TYPED_HEAD}{_key("name")}"{re.escape(tool.name)}"{_BLANK},{_BLANK}'
                head += f"{_key(form.call.arguments_key)}"
                rest = f"{inline_json(tool.schema, tool.is_strict)} {json_text('}')}"
            else:
                head = f"{_BLANK}\\[{_BLANK}{re.escape(tool.name)}{_BLANK}\\("
                rest = self._arguments(tool)
            self._rules.append(f"HEAD_{i}: /{head}/")
            firsts.append(self.rule(f"first_{i}", f"HEAD_{i} {rest}"))
        mark, more = re.escape(form.begins[0]), self._more(f"{json_text(form.brackets.separator + ' ')} {call}")
        begins = _JSON_BEGINS if isinstance(form.call, JsonCall) else _LIST_BEGINS
        excluded = begins.replace("NAMES", names)
        self._rules.append(f"FREE: /(?s:.*)/ & ~/{excluded}(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/")
        calls = f"({' | '.join(firsts)}) {more} {json_text(form.brackets.end)}"
        marked = f"FREE {self.literal(self.begin)} {self.section(call, '')}" if self.begin in self._special else ""
        return self.grammar(" | ".join(filter(None, (calls, "FREE", marked))))

    def _more(self, call: str) -> str:
        """Behind the first."""
        if self._most_calls == 1:
            return ""
        return f"({call})*" if self._most_calls is None else f"({call}){{0,{self._most_calls - 1}}}"

    def call(self, tools: Sequence[Tool]) -> str:
        """The rule of any call of any of the tools."""
        return self.rule("call", " | ".join(self.rule(f"call_{i}", self._call(one)) for i, one in enumerate(tools)))

    def _call(self, tool: Tool) -> str:
        call = self._form.call
        if isinstance(call, JsonCall):
            head = f'{{"name": {json_text(tool.name)}, "{call.arguments_key}": '
            return f"{json_text(head)} {inline_json(tool.schema, tool.is_strict)} {json_text('}')}"
        return f"{self.literal(call.begin + tool.name)} {self.literal(call.name_end)} {self._arguments(tool)}"

    def _arguments(self, tool: Tool) -> str:
        """What follows a named call's name, with its end."""
        call = self._form.call
        assert isinstance(call, NamedCall), "it names the function first"
        if isinstance(call.arguments, JsonArguments):
            return f"{inline_json(tool.schema, tool.is_strict)} {self.literal(call.end)}"
        try:
            schemas = _objects(tool.schema, tool.place)
            if not tool.is_strict:
                schemas = [reduced_schema(one) for one in schemas]
            arguments = [self._properties_of(call.arguments, tool, one) for one in schemas]
        except CannotHold:
            if tool.is_strict:
                raise
            least = reduced_schema(tool.schema)
            names = [one for one in least.get("properties", ()) if _spelled(call.arguments, one) is not None]
            least["properties"] = dict.fromkeys(names, _ANY)
            least["required"] = [one for one in least.get("required", ()) if one in names]
            arguments = [self._properties_of(call.arguments, tool, least)]
        return f"({' | '.join(arguments)}) {self.literal(call.end)}"

    def _properties_of(self, form: WrittenOut, tool: Tool, parameters: Schema) -> str:
        """Args: parameters: an alternative of the tool's."""
        more = parameters.get("additionalProperties", not tool.is_strict)
        is_open = more is not False and not parameters.get("properties") and not parameters.get("required")
        if isinstance(form, TaggedArguments):
            return self._tagged(form, tool, parameters, more if is_open else False)
        if is_open:
            value = self._literal_value(form, more, f"{tool.place}.additionalProperties", tool.schema)
            pairs = _listed(f"PARAMETER {json_text(form.assign)} {value}", _separator(form), _ANY)
        else:
            pairs = self._pairs(form, parameters, tool.place, tool.schema, form.assign)
        return f"{pairs} {json_text(form.end)}"

    def _tagged(self, form: TaggedArguments, tool: Tool, parameters: Schema, more: Schema | bool) -> str:
        """Args: more: of parameters that have any names."""
        required = parameters.get("required", ())
        gap = "\n" if form.has_newlines else ""
        before = form.key_end + (f"\n{form.value_begin}" if form.value_begin else "") + gap
        end = gap + form.value_end + "\n"
        if more is not False:
            path, types = f"{tool.place}.additionalProperties", parameter_types(tool.schema, "")
            value = self._tagged_value(_TEXT if more is True else more, end, path, tool.schema, types)
            return f"({json_text(form.key_begin)} PARAMETER {json_text(before)} {value})*"
        parts = []
        for name, schema in _properties(form, parameters, tool.place).items():
            path, types = f"{tool.place}.properties.{name}", parameter_types(tool.schema, name)
            value = self._tagged_value(schema, end, path, tool.schema, types)
            parts.append(f"({json_text(form.key_begin + name + before)} {value}){'' if name in required else '?'}")
        return " ".join(parts)

    def _tagged_value(self, schema: Schema, end: str, path: str, root: Schema, types: frozenset[str]) -> str:
        """Strings are written bare, other types as JSON."""
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        if not types or "string" in types:
            return self._bare_value(_alternatives(schema, path, root), end, path, definitions, types)
        for keyword in {"anyOf", "oneOf"} & schema.keys():
            if any(not parameter_types({**root, "properties": {"": one}}, "") for one in schema[keyword]):
                raise CannotHold(path, keyword)  # JSON of any type, which is read as a string
        return f"{inline_json({**definitions, **schema})} {json_text(end)}"

    def _bare_value(
        self, schemas: Sequence[Schema], end: str, path: str, definitions: Schema, types: frozenset[str]
    ) -> str:
        """One lexeme of all that is bare text or a scalar; arrays and objects, which begin as no such text does."""
        blank = r"[\s\x1c-\x1f]*"
        read = "|".join(sorted({_READ_AS[one] for one in types if one in _READ_AS}))
        texts, others = [], []
        for schema in schemas:
            kind = schema.get("type", "string")
            if (values := _values(schema, path, end.strip())) is not None:
                bare = [(one, one if isinstance(one, str) else json_text(one)) for one in values]
                texts += [json_text(text) for one, text in bare if typed(text, types) == json_text(one)]
            elif kind == "string":
                _check(schema, path)
                text = _string_regex(schema, end, path)
                texts.append(f"({text} & ~/{blank}({read}){blank}/)" if read and schema else text)
            elif kind in _BARE_SCALARS:
                _check(schema, path)
                is_bounded = kind in _KEYWORDS and bool(_KEYWORDS[kind] & schema.keys())
                texts.append(f"/{_number_regex(schema, path)}/" if is_bounded else _BARE_SCALARS[kind])
            elif kind in ("array", "object"):
                others.append(f"{inline_json({**definitions, **schema})} {json_text(end)}")
            else:
                raise CannotHold(path, next(iter(schema), "type"))
        if texts:
            name = f"VALUE_{len(self._rules)}"
            self._rules.append(f"{name}: {' | '.join(texts)}")
            others.append(self.rule(f"text_{len(self._rules)}[suffix={json_text(end)}]", name))
        if not others:
            raise CannotHold(path, "enum", "Each of its texts is read as another value")
        return f"({' | '.join(others)})"

    def _pairs(
        self, form: LiteralArguments, schema: Schema, path: str, root: Schema, assign: str, is_inner: bool = False
    ) -> str:
        """The properties in the schema's order: `first` of those that begin there, `rest` behind another.

        Args:
            is_inner: they are of an object within the arguments.
        """
        required = schema.get("required", ())
        separator = _separator(form)
        first = rest = '""'
        for name, one in reversed(_properties(form, schema, path, is_inner).items()):
            value = self._literal_value(form, one, f"{path}.properties.{name}", root)
            head = f"{_spelled(form, name, is_inner)}{assign}"
            pair = self.rule(f"pair_{len(self._rules)}", f"{self.literal(head)} {value}")
            is_required = name in required
            first = f"{pair} {rest}" + ("" if is_required else f" | {first}")
            rest = f"{separator} {pair} {rest}" if is_required else f"({separator} {pair})? {rest}"
            first, rest = (self.rule(f"pairs_{len(self._rules)}", one) for one in (first, rest))
        return first

    def _literal_value(self, form: LiteralArguments, schema: Schema | bool, path: str, root: Schema) -> str:
        """Its rule, which may need itself."""
        if isinstance(schema, bool):
            if not schema:
                raise CannotHold(path, "false")
            schema = _ANY
        is_new = id(schema) not in self._values
        _, name = self._values.setdefault(id(schema), (schema, f"value_{len(self._values)}"))
        if is_new:
            if not {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
                schema = {**schema, "type": ["string", "number", "boolean", "null"]}
            found = _alternatives(schema, path, root)
            self.rule(name, " | ".join(self._literal_of_type(form, one, path, root) for one in found))
        return name

    def _literal_of_type(self, form: LiteralArguments, schema: Schema, path: str, root: Schema) -> str:
        kind = schema.get("type")
        quote, separator = form.quotes[-1], _separator(form)
        if (values := _values(schema, path, "" if form.has_escapes else quote)) is not None:
            return f"({' | '.join(self.literal(_literal(form, one)) for one in values)})"
        _check(schema, path)
        own = schema.keys() & _KEYWORDS.get(str(kind), set())
        if own and (kind in ("integer", "number") or (kind == "string" and form.has_escapes)):  # Python's are JSON's
            return inline_json({key: schema[key] for key in ("type", *sorted(own))})
        match kind:
            case "string" if form.has_escapes:
                return "PYTHON_STRING"
            case "string":
                text = "TEXT"
                if own:
                    self._rules.append(f"{(text := f'VALUE_{len(self._rules)}')}: {_string_regex(schema, quote, path)}")
                if quote in self._special:
                    return f"{self.literal(quote)} {text} {self.literal(quote)}"
                return f"{json_text(quote)} {self.rule(f'text_{len(self._rules)}[suffix={json_text(quote)}]', text)}"
            case "integer" | "number":
                return str(kind).upper()
            case "boolean" | "null":
                values = [True, False] if kind == "boolean" else [None]
                return f"({' | '.join(json_text(_literal(form, one)) for one in values)})"
            case "array":
                item = self._literal_value(form, schema.get("items", {}), f"{path}.items", root)
                return f"{json_text('[')} {_listed(item, separator, schema)} {json_text(']')}"
            case "object":
                assign = ": " if form.has_escapes else ":"
                more = schema.get("additionalProperties", True)
                if schema.get("properties") or schema.get("required") or more is False:
                    pairs = self._pairs(form, schema, path, root, assign, is_inner=True)
                else:  # names are free
                    name = self._literal_value(form, _TEXT, path, root)
                    value = self._literal_value(form, more, path, root)
                    pairs = _listed(f"({name} {json_text(assign)} {value})", separator, _ANY)
                return f"{json_text('{')} {pairs} {json_text('}')}"
            case _:
                raise CannotHold(path, min(schema, default="anyOf"))


def _alternatives(schema: Any, path: str, root: Schema) -> list[Schema]:
    """Schemas of one type each, or of values, of which a value fits any. Raises CannotHold: it says more than that."""
    found, waiting = list[Schema](), [schema]
    for each in waiting:
        one = _merged(each, path, root)
        if keyword := next((key for key in ("anyOf", "oneOf") if one.keys() == {key}), None):
            waiting += one[keyword]
            if len(waiting) > MAX_ALTERNATIVES:
                raise CannotHold(path, keyword, f"It has more than {MAX_ALTERNATIVES} alternatives")
            if keyword == "oneOf":  # of which one alone may fit
                kinds = [parameter_types({**root, "properties": {"": branch}}, "") for branch in one[keyword]]
                merged = {"number" if kind == "integer" else kind for types in kinds for kind in types}
                if sum(map(len, kinds)) != len(merged):
                    raise CannotHold(path, keyword)
        elif isinstance(types := one.get("type"), list) and not {"enum", "const"} & one.keys():
            found += [{**one, "type": kind} for kind in types]
        else:
            found.append(one)
    return found


def _merged(schema: Any, path: str, root: Schema) -> dict[str, Any]:
    """A schema, what it refers to, and what holds together with it, as one. Raises CannotHold: they say different."""
    found, waiting = dict[str, Any](), [("anyOf", schema)]
    for keyword, part in waiting:
        if not (part is True or isinstance(part, Mapping)) or len(waiting) > MAX_JOINED:
            raise CannotHold(path, keyword)
        for key, one in () if part is True else part.items():
            if key == "allOf":
                waiting += [(key, each) for each in one]
            elif key == "$ref":
                waiting.append((key, pointed(root, str(one))))
            elif key not in ANNOTATIONS and found.setdefault(key, one) != one:
                raise CannotHold(path, keyword)
    return found


def _values(schema: Schema, path: str, mark: str) -> list[Any] | None:
    """Those of its enum and const that fit what stands beside them; None: it has neither.

    Raises:
        CannotHold: more stands beside them than is understood here; none fits; or one has the mark that would end it.
    """
    if not (found := {"enum", "const"} & schema.keys()):
        return None
    keyword, values = min(found), fitting_values([schema])
    if others := schema.keys() - _BESIDE_VALUES:
        raise CannotHold(path, min(others))
    if not values:
        raise CannotHold(path, keyword, "None of its values fits the keywords beside it")
    _check_mark(json_text(values), mark, path, keyword)
    return values


def _check_mark(text: str, mark: str, path: str, keyword: str) -> None:
    """Args: mark: ends a value; "": nothing in it does. Raises CannotHold: the text has it."""
    if mark and mark in text:
        raise CannotHold(path, keyword, f"It has {mark!r}, which ends a value in this format")


def _listed(item: str, separator: str, schema: Schema) -> str:
    """As many as the schema's minItems and maxItems say."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    more = f"({separator} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}" if most != 1 else ""
    return '""' if most == 0 else f"({item} {more}){'' if least else '?'}"


def _objects(schema: Schema, path: str) -> Sequence[Schema]:
    """The alternatives of a function's parameters. Raises CannotHold: they are bound by more than their names."""
    whole = _merged(schema, path, schema)
    branches = [_merged(one, path, schema) for one in whole.pop("anyOf", ())]
    if others := whole.keys() - {"type"} if branches else ():
        raise CannotHold(path, min(others))
    for one in branches or [whole]:
        others = one.keys() - _KEYWORDS["object"] - {"type"}
        if one.get("minProperties", 0) <= len(set(one.get("required", ()))):
            others -= {"minProperties"}
        if others or one.get("type") != "object":
            raise CannotHold(path, min(others, default="anyOf"))
    return branches or [whole]


def _properties(form: WrittenOut, schema: Schema, path: str, is_inner: bool = False) -> dict[str, Schema]:
    """Raises CannotHold: the format cannot write one of them, or they lack what is required."""
    properties = dict(schema.get("properties", {}))
    if False in properties.values():
        raise CannotHold(path, "false")
    for name in schema.get("required", ()):
        if name not in properties:
            raise CannotHold(path, "required", f"{name!r} is not among its properties")
    for name in properties:
        if _spelled(form, name, is_inner) is None:
            raise CannotHold(path, "properties", f"{name!r} cannot be written as a name in this format")
    return {name: {} if one is True else one for name, one in properties.items()}


def _spelled(form: WrittenOut, name: str, is_inner: bool = False) -> str | None:
    """A parameter's name, or a property's of an object within; None: it would be read as something else."""
    if isinstance(form, TaggedArguments):
        return name if name == name.strip() and form.key_end not in name else None
    if not is_inner:
        return name if NAME.fullmatch(name) else None
    if form.has_escapes:
        return repr(name)
    return None if form.quotes[0] in name else form.quotes[0] + name + form.quotes[0]


def _check(schema: Schema, path: str) -> None:
    if others := schema.keys() - _HELD_KEYWORDS:
        raise CannotHold(path, min(others))


def _string_regex(schema: Schema, end: str, path: str) -> str:
    """In Lark; what ends the text is not within it."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts = [str(schema["pattern"])] if "pattern" in schema else []
    _check_mark("".join(parts).replace("\\", ""), end.strip(), path, "pattern")
    parts = [in_ascii(one) for one in parts]
    if not parts or least or most != "":
        parts.append(f"(?s:.{{{least},{most}}})")
    held, marks = (" & ".join(f"/{one}/" for one in _escaped(*parts)), *_escaped(re.escape(end.strip())))
    return f"({held} & ~/(?s:.*){marks}(?s:.*)/)"


def _number_regex(schema: Schema, path: str) -> str:
    """Of an integer, or a number between whole bounds."""
    is_whole = schema["type"] == "integer"
    for keyword in _KEYWORDS["number"] & schema.keys():
        if keyword == "multipleOf" or not (is_whole or float(schema[keyword]).is_integer()):
            raise CannotHold(path, keyword)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    low = math.ceil(max(-_MOST, schema.get("minimum", -_MOST), above))
    high = math.floor(min(_MOST, schema.get("maximum", _MOST), below))
    found = _whole_numbers(low + (low == above), high - (high == below))
    if not is_whole:  # whole ones as well, and between each and the next
        fraction = "[.][0-9]{0,8}[1-9][0-9]{0,8}"
        found = [f"({'|'.join(found)})([.]0{{1,8}})?"] if found else []
        found += [f"({one}){fraction}" for one in _whole_numbers(max(low, 0), high - 1)]
        found += [f"-({one}){fraction}" for one in _whole_numbers(max(-high, 0), -low - 1)]
    if not found:
        raise CannotHold(path, min(_BOUNDS & schema.keys()))
    return f"({'|'.join(found)})"


def _whole_numbers(low: int, high: int) -> list[str]:
    """Expressions of those from low to high: one for each number of digits."""
    if low > high:
        return []
    if low < 0:
        return [f"-({'|'.join(_whole_numbers(max(1, -high), -low))})", *_whole_numbers(0, high)]
    most = min(high, 10 ** len(str(low)) - 1)
    return [_digits(str(low), str(most)), *_whole_numbers(most + 1, high)]


def _digits(low: str, high: str) -> str:
    """Numbers of as many digits."""
    if low[:1] == high[:1]:
        return low[:1] + _digits(low[1:], high[1:]) if low else ""
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if int(low[1:] or 0) == 0 and int(high[1:] or 0) == 10**rest - 1:
        return f"[{first}-{last}][0-9]{{{rest}}}"
    parts = [low[0] + _digits(low[1:], "9" * rest), high[0] + _digits("0" * rest, high[1:])]
    parts += [f"[{first + 1}-{last - 1}][0-9]{{{rest}}}"] if last - first > 1 else []
    return f"({'|'.join(parts)})"


def _escaped(*regexes: str) -> list[str]:
    return [one.replace("/", r"\/") for one in regexes]


def _separator(form: LiteralArguments) -> str:
    return json_text(", " if form.has_escapes else ",")


def _literal(form: LiteralArguments, value: Any) -> str:
    if form.has_escapes:
        return json_text(value) if isinstance(value, str) else repr(value)
    quote = form.quotes[0]
    match value:
        case str():
            return quote + value + quote
        case list():
            return f"[{','.join(_literal(form, one) for one in value)}]"
        case dict():
            return f"{{{','.join(f'{_literal(form, key)}:{_literal(form, one)}' for key, one in value.items())}}}"
        case _:
            return json_text(value)


def inline_json(schema: Schema, is_strict: bool = True) -> str:
    options = {**JSON_STYLE, "lenient": not is_strict, "json_allowed_escapes": escapes_in(json_text(schema))}
    return f"%json {json_text({**schema, 'x-guidance': options})}"


def reduced_schema(schema: Any) -> Any:
    """What any format can hold of a schema."""
    if not isinstance(schema, Mapping):
        return {}
    made = {key: value for key, value in schema.items() if key in ("type", "enum", "const")}
    if {"enum", "const"} & made.keys():
        return made
    if "properties" in schema:
        made["properties"] = {name: reduced_schema(one) for name, one in schema["properties"].items()}
        made["required"] = [name for name in schema.get("required", ()) if name in made["properties"]]
    if "additionalProperties" in schema:
        more = schema["additionalProperties"]
        made["additionalProperties"] = reduced_schema(more) if isinstance(more, Mapping) else more is not False
    if "items" in schema:
        made["items"] = reduced_schema(schema["items"])
    return made


def _key(name: str) -> str:
    """The expression of a JSON object's key."""
    return f'"{name}"{_BLANK}:{_BLANK}'
