"""Finds how a model writes tool calls and thoughts from what its chat template renders. No I/O. Thread: any.

Two conversations that differ only in the assistant's turn, one with text and one with calls, differ in what the
template writes for the calls.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from core.answer_parts import Arguments, CallBegin, HarmonyParser, Parser, Text, ToolCallParser
from core.errors import InvalidRequest
from core.tool_formats import FORMATS, HARMONY, THOUGHTS

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]

_MARK = "Zq7"
_OPEN_MARK = re.compile(r"<[^<>\s]*\Z")
_ARGUMENTS = {"place": "Zq8 Zq9", "num_days": 3}
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "num_days": {"type": "integer"}},
    "required": ["place", "num_days"],
}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": _PARAMETERS}}
    for name in ("probe_one", "probe_two")
]


class ToolStyle(NamedTuple):
    """How a model's template writes calls.

    Args:
        format: a name of FORMATS, or HARMONY.
        has_text_arguments: the template wants a call's arguments as JSON text, not as an object.
        most_calls: of one turn, that the template renders: 1 or 2, which stands for any number.
        is_left_out: the template renders none: a history's are written into the content of its turns.
    """

    format: str
    has_text_arguments: bool
    most_calls: int
    is_left_out: bool = False


def detect(render: Render, known: str | None = None) -> ToolStyle | None:
    """
    Args:
        render: the prompt of messages and tools; raises InvalidRequest where the template refuses them.
        known: the format, where the operator names it.

    Returns:
        None: the template renders no calls, or in a way that is not known.
    """
    for most_calls in (2, 1):
        for has_text_arguments in (False, True):
            calls = [_call(name, has_text_arguments) for name in ("probe_one", "probe_two")[:most_calls]]
            region = _region(render, calls)
            if region is None or (known and _TOOLS[most_calls - 1]["function"]["name"] not in region):
                continue
            if (found := known or _format_of(region, most_calls)) is not None:
                return ToolStyle(found, has_text_arguments, most_calls)
    for form in FORMATS.values():
        if form.is_hinted and known in (None, form.name) and _shows(render, form.begins[0]):
            return ToolStyle(form.name, True, 2, is_left_out=True)
    return None if known is None else ToolStyle(known, False, 2)


def _shows(render: Render, mark: str) -> bool:
    """Whether the template writes it with the tools, and not without."""
    question = [{"role": "user", "content": "?"}]
    try:
        return mark in render(question, _TOOLS) and mark not in render(question, [])
    except InvalidRequest:
        return False


class ThoughtStyle(NamedTuple):
    """How a model thinks before it answers.

    Args:
        name: a name of THOUGHTS, or HARMONY.
        switch: the template's variable that turns thoughts on and off; None: it has none.
        takes_effort: the template reads reasoning_effort.
    """

    name: str
    switch: str | None
    takes_effort: bool


_SWITCHES = ("enable_thinking", "thinking")
Prompt = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]


def detect_thought(render: Prompt) -> ThoughtStyle | None:
    """
    Args:
        render: the prompt of messages under variables of the template; raises InvalidRequest where it refuses them.

    Returns:
        None: the template writes no thought, or in a way that is not known.
    """
    question = {"role": "user", "content": _MARK}
    answer = {"role": "assistant", "content": _MARK, "reasoning_content": "Zq8"}

    def prompt(*messages: Mapping[str, Any], **variables: Any) -> str:
        try:
            return render(messages or (question,), variables)
        except InvalidRequest:
            return ""

    switch = next((one for one in _SWITCHES if prompt(**{one: True}) != prompt(**{one: False})), None)
    switched = [prompt(**{switch: True}), prompt(**{switch: False})] if switch else []
    texts = "".join([prompt(), prompt(question, answer), *switched])
    takes_effort = prompt(reasoning_effort="low") != prompt(reasoning_effort="high")
    if "<|channel|>final<|message|>" in texts:
        return ThoughtStyle(HARMONY, switch, takes_effort)
    for name, markers in THOUGHTS.items():
        past = {"role": "assistant", "content": f"{markers.begin}Zq8{markers.end}Zq9"}
        history = prompt(question, past, question)  # templates leave out the thoughts of earlier turns
        if markers.begin in texts or markers.end in texts or ("Zq9" in history and "Zq8" not in history):
            return ThoughtStyle(name, switch, takes_effort)
    return None


def _call(name: str, has_text_arguments: bool) -> dict[str, Any]:
    arguments = json.dumps(_ARGUMENTS) if has_text_arguments else _ARGUMENTS
    return {
        "type": "function",
        "id": f"{name:a<9.9}".replace("_", "x"),
        "function": {"name": name, "arguments": arguments},
    }


def _region(render: Render, calls: list[dict[str, Any]]) -> str | None:
    """What the template writes for the calls, and after them."""
    question = {"role": "user", "content": "?"}
    try:
        with_text = render([question, {"role": "assistant", "content": _MARK}], _TOOLS)
        with_calls = render([question, {"role": "assistant", "content": "", "tool_calls": calls}], _TOOLS)
    except InvalidRequest:
        return None
    start = _num_equal(with_text, with_calls)
    mark = _OPEN_MARK.search(with_calls, 0, start)  # what ends a text begins as it does
    return str(with_calls[start if mark is None else mark.start() :])


def _num_equal(first: str, second: str) -> int:
    """Characters at the beginning."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _format_of(region: str, num_calls: int) -> str | None:
    schemas = dict.fromkeys(("probe_one", "probe_two"), _PARAMETERS)
    candidates: dict[str, Parser] = {name: ToolCallParser(form, schemas) for name, form in FORMATS.items()}
    candidates[HARMONY] = HarmonyParser()
    found: dict[str, int] = {}  # -> characters that are no part of the calls
    for name, parser in candidates.items():
        events = parser.feed(region) + parser.close()
        begun = [event.name for event in events if isinstance(event, CallBegin)]
        arguments = [
            "".join(event.text for event in events if isinstance(event, Arguments) and event.index == index)
            for index in range(len(begun))
        ]
        if begun == ["probe_one", "probe_two"][:num_calls] and all(map(_is_whole, arguments)):
            found[name] = sum(len(event.text) for event in events if isinstance(event, Text))
    return min(found, key=found.__getitem__, default=None)


def _is_whole(arguments: str) -> bool:
    try:
        return bool(json.loads(arguments) == _ARGUMENTS)
    except ValueError:
        return False
