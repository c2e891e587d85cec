"""How models write tool calls: one description per format, for the parser (core/answer_parts.py) and the grammar.

A format is found from what the model's chat template renders for a call. No I/O; frozen: any thread.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


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
    """Around the calls of a section, and between them."""

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
    """

    name: str
    begins: tuple[str, ...]
    end: str
    call: JsonCall | NamedCall
    before: str = ""
    pad: str = ""
    brackets: Brackets | None = None
    opens_answer: bool = False


_XML = TaggedArguments("<parameter=", ">", "", "</parameter>", has_newlines=True)
_GLM = TaggedArguments("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", has_newlines=False)
_PYTHON = LiteralArguments(")", "=", ('"""', "'''", '"', "'"), has_escapes=True)
_GEMMA = LiteralArguments("}", ":", ("<escape>",), has_escapes=False)
_LIST = Brackets("[", ",", "]")

HARMONY = "harmony"  # gpt-oss's messages: calls, thoughts and text in channels

FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", ("<tool_call>",), "</tool_call>", JsonCall(), before="\n", pad="\n"),
        ToolFormat(
            "xml",
            ("<tool_call>", "<function="),
            "</tool_call>",
            NamedCall("<function=", ">\n", _XML, "</function>"),
            before="\n",
            pad="\n",
        ),
        ToolFormat("glm", ("<tool_call>",), "</tool_call>", NamedCall("", "\n", _GLM), before="\n"),
        ToolFormat(
            "llama", ("<|python_tag|>",), "", JsonCall("parameters"), brackets=Brackets("", ";", ""), opens_answer=True
        ),
        ToolFormat(
            "pythonic",
            ("<|python_start|>",),
            "<|python_end|>",
            NamedCall("", "(", _PYTHON),
            brackets=_LIST,
            opens_answer=True,
        ),
        ToolFormat("mistral-list", ("[TOOL_CALLS]",), "", JsonCall(), pad=" ", brackets=_LIST),
        ToolFormat("mistral", ("[TOOL_CALLS]",), "", NamedCall("", "[ARGS]", JsonArguments(), id_begin="[CALL_ID]")),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "", JsonCall(), brackets=_LIST),
        ToolFormat("phi4", ("<|tool_call|>",), "<|/tool_call|>", JsonCall(), brackets=_LIST),
        ToolFormat("gemma", ("<start_function_call>",), "<end_function_call>", NamedCall("call:", "{", _GEMMA)),
    )
}


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


def marker_texts(thought: str | None, tools: str | None) -> list[str]:
    """What parsers look for in the answers of a model.

    Args:
        thought: a name of THOUGHTS, or HARMONY; None: it writes none.
        tools: a name of FORMATS, or HARMONY; None: it writes no calls.
    """
    if HARMONY in (thought, tools):
        return ["<|start|><|channel|><|constrain|><|message|><|end|><|call|><|return|>"]
    found = list[str]() if thought is None else list(_texts(THOUGHTS[thought]))
    return found if tools is None else found + list(_texts(FORMATS[tools]))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _texts(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
