"""Prompts of chats, byte for byte as transformers renders them; templates that do too much are stopped."""

import itertools
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from core.chat_template import ChatTemplate, ChatTemplateSyntaxError
from core.errors import InvalidRequest
from tests.core import chat_templates
from tests.core.small_tokenizers import byte_level
from tests.core.tool_templates import TOOL_TEMPLATES

NOW = datetime(2026, 7, 4, 12, 30)
SPECIAL_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather\'s <now> & "then", in °C',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 2}}}
DOCUMENTS = [{"title": "A <b>", "text": " x\n"}, {"title": "B", "text": "<|eot_id|>", "id": 3}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi <there> & 'you'"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "  What?\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c 😀"},
    ],
    "tools": [
        {"role": "system", "content": "You know the weather."},
        {"role": "user", "content": "Weather in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1"},
        {"role": "tool", "content": "sunny", "tool_call_id": "c2"},
        {"role": "assistant", "content": "21 °C", "reasoning_content": "It says 21."},
        {"role": "user", "content": "Thanks"},
    ],
    "text arguments": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "c", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r", "name": "f"},
    ],
    "thinking": [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning": "easy"},
    ],
}


class _FrozenDatetime(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "_FrozenDatetime":
        return cls(2026, 7, 4, 12, 30)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL_TOKENS)


def theirs(monkeypatch: pytest.MonkeyPatch, template: str, chat: list[dict[str, Any]], **options: Any) -> str:
    monkeypatch.setattr(chat_template_utils, "datetime", _FrozenDatetime)
    rendered: str = tokenizer().apply_chat_template(chat, chat_template=template, tokenize=False, **options)
    return rendered


def ours(template: str, chat: list[dict[str, Any]], context_limit: int = 4096, **options: Any) -> str:
    return ChatTemplate({"default": template}, SPECIAL_TOKENS, context_limit).render(chat, now=NOW, **options)


def refusal(template: str, chat: list[dict[str, Any]] | None = None, context_limit: int = 4096) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ours(template, chat or CHATS["one"], context_limit)
    return caught.value


KWARGS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "custom_tools": TOOLS, "date_string": "1 Jan"},
    {"reasoning_effort": "high"},
]


@pytest.mark.parametrize("name", sorted(chat_templates.TEMPLATES | TOOL_TEMPLATES))
@pytest.mark.parametrize("chat", sorted(CHATS))
def test_renders_as_transformers(name: str, chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or refuses, as that does."""
    template = (chat_templates.TEMPLATES | TOOL_TEMPLATES)[name]
    for tools, begins, kwargs in itertools.product((None, TOOLS), (True, False), KWARGS):
        options: dict[str, Any] = {"tools": tools, "documents": DOCUMENTS, "add_generation_prompt": begins}
        try:
            expected = theirs(monkeypatch, template, CHATS[chat], **options, **kwargs)
        except (TemplateError, TypeError):
            with pytest.raises(InvalidRequest):
                ours(template, CHATS[chat], template_kwargs=kwargs, **options)
        else:
            assert ours(template, CHATS[chat], template_kwargs=kwargs, **options) == expected


def test_documents_render_as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "{% for d in documents %}{{ loop.index0 }}{{ d.title }}: {{ d['text'] | trim }}\n{% endfor %}{{ documents }}"
    )
    options: Any = {"documents": DOCUMENTS}
    assert ours(source, CHATS["one"], **options) == theirs(monkeypatch, source, CHATS["one"], **options)
    assert [ChatTemplate({"default": one}, {}, 99).shows_documents for one in (source, "{{ messages }}")] == [
        True,
        False,
    ]


@pytest.mark.parametrize("snippet", chat_templates.SNIPPETS)
def test_each_construct_renders_as_transformers(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for chat in (CHATS["turns"], CHATS["tools"]):
        assert ours(snippet, chat) == theirs(monkeypatch, snippet, chat, add_generation_prompt=True)


def test_template_kwargs_reach_the_template_and_win_over_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    template = chat_templates.TEMPLATES["qwen3"]
    extra = {"enable_thinking": False}
    expected = theirs(monkeypatch, template, CHATS["one"], add_generation_prompt=True, **extra)
    assert ours(template, CHATS["one"], template_kwargs=extra) == expected
    assert "<think>\n\n</think>" in expected
    assert ours("{{ bos_token }}", CHATS["one"], template_kwargs={"bos_token": "B"}) == "B"


def test_template_kwargs_may_not_replace_the_messages() -> None:
    with pytest.raises(InvalidRequest, match="may not set messages"):
        ours("{{ messages }}", CHATS["one"], template_kwargs={"messages": []})


def test_tool_use_template_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {}, 4096)
    assert template.render(CHATS["one"], now=NOW) == "plain"
    assert template.render(CHATS["one"], now=NOW, tools=TOOLS) == "tools"


def test_messages_are_not_changed_by_rendering() -> None:
    chat = [{"role": "user", "content": "x", "name": None, "reasoning": "r"}]
    assert ours("{{ messages[0].reasoning_content }}{{ messages[0].name is defined }}", chat) == "rFalse"
    assert chat == [{"role": "user", "content": "x", "name": None, "reasoning": "r"}]


def test_model_without_template_is_told_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match=r"/v1/completions.*--chat-template") as caught:
        ChatTemplate({}, {}, 4096).render(CHATS["one"], now=NOW)
    assert caught.value.code == "no_chat_template"


def test_empty_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        ours("x", [])


def test_broken_template_is_named_with_its_line() -> None:
    with pytest.raises(ChatTemplateSyntaxError, match="'default', line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, {}, 4096)


def test_template_refuses_in_its_own_words() -> None:
    error = refusal("{{ raise_exception('Roles must alternate, please.') }}")
    assert error.message.endswith("Roles must alternate, please.")
    assert error.param == "messages"


def test_failing_template_is_the_requests_error() -> None:
    assert "TypeError" in refusal("{{ messages[0].content + 1 }}").message
    assert "RecursionError" in refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").message
    assert "no attribute 'nothing'" in refusal("{{ messages[0].nothing.more }}").message


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace(__class__=1) }}",
        "{% include 'config.json' %}",
        "{{ 'a'.encode() }}",
    ],
)
def test_sandbox_keeps_templates_in(template: str) -> None:
    refusal(template)


def test_template_without_end_is_the_requests_error() -> None:
    loop = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    assert "too many operations" in refusal(loop).message
    assert "number of more than" in refusal("{{ 9 ** 99999 }}").message


def test_output_is_bounded_by_the_context() -> None:
    chat = [{"role": "user", "content": "x" * 200_000}]
    template = chat_templates.TEMPLATES["chatml"]
    assert refusal(template, chat, context_limit=4096).code == "context_length_exceeded"
    assert len(ours(template, chat, context_limit=32_768)) > 200_000


def test_long_honest_conversation_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = [{"role": "user", "content": "why? " * 40}, {"role": "assistant", "content": "<think>\nso\n</think>\n\nok"}]
    for name in sorted(chat_templates.TEMPLATES):
        template = chat_templates.TEMPLATES[name]
        expected = theirs(monkeypatch, template, turn * 500, tools=TOOLS, add_generation_prompt=True)
        assert ours(template, turn * 500, context_limit=131_072, tools=TOOLS) == expected
