"""The functions that a request offers, which of them the model may call, and the calls of earlier turns.

Thread: loop, or wherever a long body is parsed.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core.answer_parts import AnswerParser
from core.constraints import (
    TYPES,
    Allowance,
    GrammarKind,
    GrammarSpec,
    check_answerable,
    check_depth,
    json_schema,
    well_formed,
)
from core.errors import InvalidRequest
from core.marked_text import JsonText
from core.tool_detection import ToolStyle
from core.tool_formats import FORMATS, HARMONY, JsonArguments, NamedCall, markers_of
from core.tool_grammar import (
    HARMONY_TEXT,
    CannotHold,
    Tool,
    allowed_calls,
    harmony_answers,
    inline_json,
    reduced_schema,
    required_calls,
)
from server.api.decoding import parse_object
from server.values import UNREADABLE

MAX_TOOLS = 128
NO_TOOLS = "This model's chat template does not support tools. Leave tools out, or send tool_choice none."
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Meta(min_length=1, max_length=128)]
_NAME = re.compile(r"[\w.\-]+")
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_LISTS = _SCHEMA_LISTS | {"enum", "required"}
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMAS = frozenset({"items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"})
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """Chat's form of a tool."""

    type: Literal["function"]
    function: Function


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: FunctionName
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


class ToolWishes(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        functions: that the model may call, and sees in its prompt.
        places: of their parameters in the request.
        held: what holds each function's arguments; None: it is not strict.
        is_required: the answer is calls, at least one, and no text.
        most_calls: of one answer; None: any number.
        is_old: the request has `functions`: an answer has one call, as function_call.
    """

    functions: tuple[Function, ...]
    places: tuple[str, ...]
    held: tuple[GrammarSpec | None, ...]
    style: ToolStyle
    is_required: bool = False
    most_calls: int | None = None
    is_old: bool = False

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        return {one.name: _parameters(one) for one in self.functions}

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": one.name,
                    "description": one.description or "",
                    "parameters": dict(one.parameters or _NO_PARAMETERS),
                },
            }
            for one in self.functions
        ]


def old_wishes(functions: list[Function], choice: Any, style: ToolStyle | None) -> ToolWishes | None:
    """What `functions` and `function_call` say, which `tools` and `tool_choice` have replaced.

    Raises:
        InvalidRequest: as tool_wishes.
    """
    match choice:
        case None | "auto" | "none":
            pass
        case {"name": str(name)} if any(one.name == name for one in functions):
            choice = {"type": "function", "name": name}
        case _:
            message = 'function_call must be "none", "auto", or {"name": "..."} of one of functions.'
            raise InvalidRequest(message, "function_call")
    wishes = tool_wishes(functions, choice, False, style, "functions[{}]")
    return None if wishes is None else msgspec.structs.replace(wishes, is_old=True)


def tool_wishes(
    functions: list[Function],
    choice: Any,
    is_parallel: bool | None,
    style: ToolStyle | None,
    where: str = "tools[{}].function",
    most_calls: int | None = None,
    parameters: str = "parameters",
) -> ToolWishes | None:
    """What a request's fields say about tools; None: the model is offered none.

    Args:
        choice: tool_choice: "none", "auto", "required", a function by name, or {"type": "allowed_tools", ...}.
        where: a tool's place in the request.
        most_calls: of one answer, as the request says beside is_parallel.
        parameters: the name of a tool's schema.

    Raises:
        InvalidRequest: a field contradicts another, or the model's template has no form for tools.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice also needs tools.", "tool_choice")
        return None
    if len(functions) > MAX_TOOLS:
        param = where.partition("[")[0]
        raise InvalidRequest(f"{param} must have at most {MAX_TOOLS} entries.", param)
    by_name: dict[str, Function] = {}
    held: dict[str, GrammarSpec] = {}
    allowance = Allowance()
    for i, one in enumerate(functions):
        param = where.format(i)
        if _NAME.fullmatch(one.name) is None:
            message = f"{param}.name must have letters, digits, underscores, dots and hyphens only."
            raise InvalidRequest(message, f"{param}.name")
        if one.name in by_name:
            raise InvalidRequest(f"{param}.name is {one.name!r}, as that of an earlier tool.", f"{param}.name")
        place = f"{param}.{parameters}"
        if one.parameters is not None and one.parameters.get("type", "object") != "object":
            raise InvalidRequest(f'{place} must have "type": "object".', place)
        if one.strict:
            held[one.name] = json_schema(_parameters(one), place, allowance)
        else:
            check_depth(one.parameters, place, allowance)
            _check_schema(one.parameters or {}, place)
            check_answerable(_parameters(one), place, allowance)
        by_name[one.name] = one
    mode, names = _chosen(choice, by_name)
    if mode == "none":
        return None
    if style is None:
        raise InvalidRequest(NO_TOOLS, "tools", "unsupported_parameter")
    offered = {where.format(i): one for i, one in enumerate(functions) if names is None or one.name in names}
    return ToolWishes(
        functions=tuple(offered.values()),
        places=tuple(f"{place}.{parameters}" for place in offered),
        held=tuple(held.get(one.name) for one in offered.values()),
        style=style,
        is_required=mode == "required",
        most_calls=1 if is_parallel is False or style.most_calls == 1 else most_calls,
    )


def _check_schema(schema: Any, param: str) -> None:
    """Raises InvalidRequest: it is no JSON schema, whose depth is bounded."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param} must be a schema: an object, true or false.", param)
    for name, value in schema.items():
        where = f"{param}.{name}"
        if name == "type" and not all(str(one) in TYPES for one in (value if isinstance(value, list) else [value])):
            raise InvalidRequest(f"{where} must be of {', '.join(sorted(TYPES))}.", where)
        if name in _LISTS and not isinstance(value, list):
            raise InvalidRequest(f"{where} must be an array.", where)
        if name == "$ref" and not str(value).startswith("#"):
            raise InvalidRequest(f"{where} must point into the same schema: '#/$defs/NAME'.", where)
        if name in _SCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise InvalidRequest(f"{where} must be an object of schemas.", where)
            for key, inner in value.items():
                _check_schema(inner, f"{where}.{key}")
        elif name in _SCHEMA_LISTS or (name == "items" and isinstance(value, list)):
            for i, inner in enumerate(value):
                _check_schema(inner, f"{where}[{i}]")
        elif name in _SCHEMAS:
            _check_schema(value, where)


def _parameters(function: Function) -> Mapping[str, Any]:
    """Where no parameter is named, none is meant."""
    schema = {"type": "object", **(function.parameters or _NO_PARAMETERS)}
    schema.pop("nullable", None)  # arguments are an object
    is_open = schema.keys() & {"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"}
    named = schema.get("properties") or schema.get("required")
    return schema if named or is_open else {**schema, **_NO_PARAMETERS}


def _chosen(choice: Any, known: Mapping[str, Function]) -> tuple[str, set[str] | None]:
    """(none, auto or required; the names of the functions that may be called, None: all)."""
    match choice:
        case None | "auto" | "none" | "required":
            return choice or "auto", None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", _checked({name}, known)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": [*tools]}} | {
            "type": "allowed_tools",
            "mode": ("auto" | "required") as mode,
            "tools": [*tools],
        }:
            return str(mode), _checked({_name_in(tool) for tool in tools}, known)
        case _:
            message = (
                'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": "..."}}'
                ' or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}.'
            )
            raise InvalidRequest(message, "tool_choice")


def _name_in(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return str(name)
        case _:
            raise InvalidRequest("Each of tool_choice's tools needs a name.", "tool_choice")


def _checked(names: set[str], known: Mapping[str, Function]) -> set[str]:
    if unknown := sorted(names - known.keys()):
        raise InvalidRequest(f"tool_choice names {unknown[0]!r}, which is not among tools.", "tool_choice")
    if not names:
        raise InvalidRequest("tool_choice allows no tool.", "tool_choice")
    return names


def call_constraint(
    wishes: ToolWishes,
    special: Mapping[str, int],
    eos_ids: Collection[int],
    text: GrammarSpec | None = None,
    continues_text: bool = False,
) -> GrammarSpec:
    """What holds an answer to its calls.

    Args:
        special: the model's control tokens.
        eos_ids: those that end an answer.
        text: what holds an answer without calls.
        continues_text: the answer goes on with a message.

    Raises:
        InvalidRequest: a strict schema cannot be held in the model's format of calls, or calls and text not together.
    """
    if continues_text:
        if wishes.is_required:
            message = "tool_choice requires a tool call, which cannot continue a message. Leave one of them out."
            raise InvalidRequest(message, "tool_choice")
        if text is not None:
            return text
        if wishes.style.format == HARMONY:
            return GrammarSpec(GrammarKind.LARK, HARMONY_TEXT, "tools")
    if text is not None and not wishes.is_required and text.kind is not GrammarKind.JSON_SCHEMA:
        message = f"{text.param} and tools cannot be combined. Leave one out, or send tool_choice."
        raise InvalidRequest(message, text.param)
    tools = [
        Tool(one.name, json.loads(held.source) if held else well_formed(_parameters(one)), held is not None, place)
        for one, held, place in zip(wishes.functions, wishes.held, wishes.places, strict=True)
    ]
    spec = _call_spec(wishes, tools, special, eos_ids, text)
    if all(tool.is_strict for tool in tools):
        return spec
    # Of tools that are not strict what can be held is: less, where the library refuses a schema
    reduced = [tool if tool.is_strict else replace(tool, schema=reduced_schema(tool.schema)) for tool in tools]
    return replace(spec, fallback=_call_spec(wishes, reduced, special, eos_ids, text))


def _call_spec(
    wishes: ToolWishes,
    tools: list[Tool],
    special: Mapping[str, int],
    eos_ids: Collection[int],
    text: GrammarSpec | None,
) -> GrammarSpec:
    instead = None if text is None or wishes.is_required else json.loads(text.source)
    form = FORMATS.get(wishes.style.format)
    marks = {mark: special[mark] for mark in markers_of(wishes.style.format) if mark in special}
    try:
        if form is None:
            final = None if instead is None else inline_json(instead)
            source = harmony_answers(tools, special, eos_ids, wishes.is_required, final)
        elif wishes.is_required or instead is not None:
            source = required_calls(form, tools, marks, wishes.most_calls, instead)
        else:
            free = sorted({*special.values()} - {*eos_ids} - {special[one] for one in form.begins if one in special})
            source = allowed_calls(form, tools, marks, wishes.most_calls, free)
    except CannotHold as error:
        message = f"A strict tool's parameters cannot be enforced in this model's tool call format: {error}."
        raise InvalidRequest(message, error.param) from None
    schemas = tuple(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(one.schema), one.place) for one in tools)
    return GrammarSpec(GrammarKind.TAGGED, source, "tools", schemas=schemas)


def id_of(reply_id: str, choice: int, index: int) -> str:
    """A call's id where the model writes none: letters and digits alone, as some templates want them."""
    return hashlib.sha256(f"{reply_id} {choice} {index}".encode()).hexdigest()[:9]


def arguments_of(text: str) -> dict[str, Any] | None:
    """A call's arguments as a model wrote them; None: no object, or one that was cut short or is too deep to read."""
    try:
        found = msgspec.json.decode(text or "{}")
    except UNREADABLE:
        return None
    return found if isinstance(found, dict) else None


def is_old(wishes: ToolWishes | None) -> bool:
    """The request has `functions`."""
    return wishes is not None and wishes.is_old


def reason_of(reason: str | None, parser: AnswerParser, wishes: ToolWishes | None) -> str | None:
    """The finish reason of an answer that may have calls."""
    if reason != "stop" or not parser.has_complete_calls:
        return reason
    return "function_call" if is_old(wishes) else "tool_calls"


def template_calls(calls: list[ToolCall], style: ToolStyle | None, param: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message as the chat template takes them.

    Arguments that are no JSON object, as of a call that was cut off, stay the text that they are.

    Raises:
        InvalidRequest: the template has no form for calls.
    """
    if style is None:
        raise InvalidRequest(NO_TOOLS, param, "unsupported_parameter")
    return [
        {
            "type": "function",
            **({"id": template_id(call.id, style)} if call.id else {}),
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, style)},
        }
        for call in calls
    ]


def template_id(call_id: str, style: ToolStyle | None) -> str:
    """A call's id as the chat template takes it: Mistral's want nine letters and digits."""
    if style is None or style.format not in ("mistral", "mistral-list") or _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _arguments(given: str | dict[str, Any] | None, style: ToolStyle) -> Any:
    if not isinstance(given, str) or not given.strip():
        return json.dumps(given or {}, ensure_ascii=False) if style.has_text_arguments else given or {}
    if style.has_text_arguments:
        return given
    try:
        return parse_object(given.encode("utf-8", "surrogatepass"))
    except InvalidRequest:
        call = None if style.format == HARMONY else FORMATS[style.format].call
        names_each = isinstance(call, NamedCall) and not isinstance(call.arguments, JsonArguments)
        return {"arguments": given} if names_each else JsonText(given) if given.lstrip().startswith("{") else given
