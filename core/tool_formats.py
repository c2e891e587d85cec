"""How models write tool calls: one description per format, for the parser (core/answer_parts.py) and the grammar.

A format is found from what the model's chat template renders for a call. No I/O; frozen: any thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.marked_text import Origin, joined, marked


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """`{"a": 1}`: passed on as written."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument between markers. Strings are written bare; other types as JSON or Python literals.

    Args:
        has_newlines: values stand on lines of their own.
    """

    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    has_newlines: bool


@dataclass(frozen=True, slots=True)
class LiteralArguments:
    """`a=1, b="x"`, in Python's or Gemma's notation.

    Args:
        end: after the last of them.
        assign: between key and value.
        quotes: any of which begins and ends a string.
        has_escapes: backslashes in strings mean what they mean in Python.
    """

    end: str
    assign: str
    quotes: tuple[str, ...]
    has_escapes: bool


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": "f", "arguments": {...}}`, keys in any order.

    Args:
        arguments_key: as the model's template writes it; the parser takes "arguments" and "parameters".
    """

    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The function's name, then its arguments.

    Args:
        begin: before the name.
        name_end: after the name, or after the id.
        end: after the arguments.
        id_begin: between name and id; None: calls have no ids.
    """

    begin: str
    name_end: str
    arguments: JsonArguments | TaggedArguments | LiteralArguments
    end: str = ""
    id_begin: str | None = None


@dataclass(frozen=True, slots=True)
class Brackets:
    """Around the calls of a section, and between them; no separator: what begins a call divides them."""

    begin: str
    separator: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Args:
        begins: each begins a section of calls.
        pad: what the model writes after that, and before `end`.
        end: of the section.
        before: what the template writes between text and a section.
        brackets: None: one call a section.
        opens_answer: where the answer begins with the call of a known function, the section needs nothing to begin it.
        is_hinted: a template that renders no calls names what begins them where it shows the tools.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    call: JsonCall | NamedCall
    before: str = ""
    pad: str = ""
    brackets: Brackets | None = None
    opens_answer: bool = False
    is_hinted: bool = False


_XML = TaggedArguments("<parameter=", ">", "", "</parameter>", has_newlines=True)
_XML_CALL = NamedCall("<function=", ">\n", _XML, "</function>")
_GLM = TaggedArguments("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", has_newlines=False)
_PYTHON = LiteralArguments(")", "=", ('"""', "'''", '"', "'"), has_escapes=True)
_PYTHON_CALL = NamedCall("", "(", _PYTHON)
_GEMMA = LiteralArguments("}", ":", ("<escape>",), has_escapes=False)
_GEMMA4 = LiteralArguments("}", ":", ('<|"|>',), has_escapes=False)
_BAR = "\uff5c"  # DeepSeek's
_SECTION, _SECTION_END, _CALL, _NAME_END, _CALL_END = (
    f"<{_BAR}tool▁{one}{_BAR}>" for one in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
_DEEPSEEK_CALL = NamedCall(_CALL, _NAME_END, JsonArguments(), _CALL_END)
_LIST, _SERIES = Brackets("[", ",", "]"), Brackets("", "", "")

FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", ("<tool_call>",), "</tool_call>", JsonCall(), before="\n", pad="\n"),
        ToolFormat("xml", ("<tool_call>", "<function="), "</tool_call>", _XML_CALL, before="\n", pad="\n"),
        ToolFormat("glm", ("<tool_call>",), "</tool_call>", NamedCall("", "\n", _GLM), before="\n"),
        ToolFormat(
            "llama", ("<|python_tag|>",), "", JsonCall("parameters"), brackets=Brackets("", ";", ""), opens_answer=True
        ),
        ToolFormat(
            "pythonic", ("<|python_start|>",), "<|python_end|>", _PYTHON_CALL, brackets=_LIST, opens_answer=True
        ),
        ToolFormat("lfm", ("<|tool_call_start|>",), "<|tool_call_end|>", _PYTHON_CALL, brackets=_LIST),
        ToolFormat("mistral-list", ("[TOOL_CALLS]",), "", JsonCall(), pad=" ", brackets=_LIST),
        ToolFormat("mistral", ("[TOOL_CALLS]",), "", NamedCall("", "[ARGS]", JsonArguments(), id_begin="[CALL_ID]")),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "", JsonCall(), brackets=_LIST, is_hinted=True),
        ToolFormat("phi4", ("<|tool_call|>",), "<|/tool_call|>", JsonCall(), brackets=_LIST),
        ToolFormat("nemotron", ("<TOOLCALL>",), "</TOOLCALL>", JsonCall(), brackets=_LIST),
        ToolFormat("apriel", ("<tool_calls>",), "</tool_calls>", JsonCall(), before="\n", brackets=_LIST),
        ToolFormat("gemma", ("<start_function_call>",), "<end_function_call>", NamedCall("call:", "{", _GEMMA)),
        ToolFormat("gemma4", ("<|tool_call>",), "<tool_call|>", NamedCall("call:", "{", _GEMMA4)),
        ToolFormat("deepseek", (_SECTION,), _SECTION_END, _DEEPSEEK_CALL, brackets=_SERIES),
    )
}


HARMONY = "harmony"  # gpt-oss's messages: calls, thoughts and text in channels
ANY_FORMAT = "auto"  # as the chat template has it
_HARMONY_MARKERS = frozenset(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call"))


def with_calls(text: str, calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """An assistant's text, and behind it its calls as a list of JSON, for a template that renders none.

    Args:
        calls: as templates take them, with arguments as JSON.
    """
    called = [(json.dumps(call["function"]["name"]), call["function"]["arguments"]) for call in calls]
    listed = ", ".join(f'{{"name": {name}, "arguments": {arguments}}}' for name, arguments in called)
    return joined((marked(text, Origin.MODEL), form.begins[0], marked(f"[{listed}]", Origin.CALL), form.end))


def markers_of(name: str) -> frozenset[str]:
    """What begins, divides and ends calls in a format. In some models these are special tokens."""
    if name == HARMONY:
        return _HARMONY_MARKERS
    form = FORMATS[name]
    parts: list[Any] = [*form.begins, form.end]
    if isinstance(form.call, NamedCall):
        parts += [form.call.begin, form.call.name_end, form.call.end, form.call.id_begin]
        match form.call.arguments:
            case TaggedArguments(key_begin, key_end, value_begin, value_end):
                parts += [key_begin, key_end, value_begin, value_end]
            case LiteralArguments(quotes=quotes):
                parts += quotes
    return frozenset(part.strip() for part in parts if part and part.strip())


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """Around a model's thought."""

    begin: str
    end: str


THOUGHTS = {
    "think": ThoughtMarkers("<think>", "</think>"),
    "granite": ThoughtMarkers("Here is my thought process:", "Here is my response:"),
    "mistral": ThoughtMarkers("[THINK]", "[/THINK]"),
    "seed": ThoughtMarkers("<seed:think>", "</seed:think>"),
}


def thought_markers_of(name: str) -> frozenset[str]:
    """What begins and ends a thought. In some models these are special tokens."""
    return _HARMONY_MARKERS if name == HARMONY else frozenset((THOUGHTS[name].begin, THOUGHTS[name].end))
