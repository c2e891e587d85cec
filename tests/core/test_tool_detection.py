"""A model's format of tool calls is found from its template."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pytest

from core.chat_template import ChatTemplate
from core.marked_text import MarkedText, Origin
from core.tool_detection import ThoughtStyle, ToolStyle, detect
from core.tool_formats import FORMATS, with_calls
from server.loaded_engine import thought_style_of
from tests.core.answer_texts import RENDER, Call, dumped
from tests.core.chat_templates import CHATML, LLAMA2, QWEN3
from tests.core.tool_templates import GRANITE33, TOOL_TEMPLATES


def style_of(source: str, known: str | None = None) -> ToolStyle | None:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, context_limit=4096)

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        return template.render(messages, now=datetime(2026, 1, 1), tools=tools, add_generation_prompt=False)

    return detect(render, known)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_format_is_found(name: str) -> None:
    style = style_of(TOOL_TEMPLATES[name])
    assert style is not None
    assert style.format == name.partition(",")[0]
    assert style.has_text_arguments == (name == "mistral")
    assert style.most_calls == (1 if name in ("llama", "harmony") else 2)


def test_the_format_is_found_where_the_template_names_it_and_renders_no_calls() -> None:
    """Calls of a history are written for it, their marks as the template's own, their arguments as text."""
    style = style_of(GRANITE33)
    assert style == style_of(GRANITE33, "granite") == ToolStyle("granite", True, 2, is_left_out=True)
    assert style_of(GRANITE33, "hermes") == ToolStyle("hermes", False, 2)
    calls: list[Call] = [("probe_one", {"a": "<|tool_call|>", "b": [True, None, "é\n'"]}), ("now", {})]
    made = [{"function": {"name": name, "arguments": dumped(arguments)}} for name, arguments in calls]
    text = with_calls("Look.", made, FORMATS["granite"])
    assert isinstance(text, MarkedText)
    assert text == "Look." + RENDER["granite"](calls)
    num_marks = len("<|tool_call|>")
    origins = [Origin.MODEL] * 5 + [Origin.TEMPLATE] * num_marks + [Origin.CALL] * (len(text) - 5 - num_marks)
    assert [*text.origins] == origins
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    shown = ChatTemplate({"default": GRANITE33}, {}, 4096).render(messages, now=datetime(2026, 1, 1))
    assert isinstance(shown, MarkedText)
    assert (at := str.find(shown, text)) > 0
    assert shown.origins[at : at + len(text)] == text.origins


# Of the last user's turn on, as vendors write them
_SWITCHED = "{%- if thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}"
_GRANITE = "{%- if thinking %}{{- 'Write Here is my thought process: and Here is my response:' }}{%- endif %}"
_LOOP = "{% for m in messages %}{{ m.role + m.content.split('</think>')[-1] }}{% endfor %}"
_MAGISTRAL = "{{ 'Think first: [THINK]...[/THINK]' }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
_EFFORT = "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}" + TOOL_TEMPLATES["harmony"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN3, ThoughtStyle("think", "enable_thinking", False)),
        (_LOOP, ThoughtStyle("think", None, False)),
        (_LOOP + "<think>\n", ThoughtStyle("think", None, False)),
        (_LOOP + _SWITCHED, ThoughtStyle("think", "thinking", False)),
        (CHATML + _GRANITE, ThoughtStyle("granite", "thinking", False)),
        (_MAGISTRAL, ThoughtStyle("mistral", None, False)),
        (_EFFORT, ThoughtStyle("harmony", None, True)),
        (CHATML, None),
        (LLAMA2, None),
        ("{{ raise_exception('No.') }}", None),
    ],
)
def test_the_form_of_thoughts_is_found(source: str, expected: ThoughtStyle | None) -> None:
    assert thought_style_of(ChatTemplate({"default": source}, {"eos_token": "</s>"}, context_limit=4096)) == expected


@pytest.mark.parametrize("source", [CHATML, LLAMA2])
def test_a_template_without_calls_has_none(source: str) -> None:
    assert style_of(source) is None


def test_a_format_that_is_not_known_is_none() -> None:
    calls = "{% for call in m.tool_calls %}CALL {{ call.function.name }}{% endfor %}"
    assert style_of("{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}") is None


def test_the_operator_may_name_the_format() -> None:
    """The template still says how arguments and calls come."""
    assert style_of(CHATML, "xml") == ToolStyle("xml", False, 2)
    assert style_of(TOOL_TEMPLATES["mistral"], "hermes") == ToolStyle("hermes", True, 2)
    assert style_of(TOOL_TEMPLATES["llama"], "pythonic") == ToolStyle("pythonic", False, 1)
