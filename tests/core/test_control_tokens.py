"""Nobody but the template writes a chat's control tokens; what is not one has the ids that transformers gives."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from core.chat_template import ChatTemplate
from core.marked_text import MarkedText, Origin, highest, joined, marked
from core.tokenizer import Tokenizer
from tests.core import chat_templates, small_tokenizers
from tests.core.test_chat_template import CHATS, NOW, TOOLS

KINDS = ("byte_level", "sentencepiece", "metaspace_first", "lowercase", "unigram")
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
# DeepSeek's marks of turns
USER_MARK, ASSISTANT_MARK = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
DEEPSEEK = (
    (
        "{% for m in messages %}{% if m.role == 'user' %}USER_MARK{{ m.content }}{% elif m.role == 'assistant' %}"
        "ASSISTANT_MARK{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT_MARK<think>{% endif %}"
    )
    .replace("USER_MARK", USER_MARK)
    .replace("ASSISTANT_MARK", ASSISTANT_MARK)
)


@cache
def backend_json(kind: str) -> str:
    backend = small_tokenizers.for_chats(getattr(small_tokenizers, kind)())
    backend.post_processor = None
    made: str = backend.to_str()
    return made


@cache
def chat(kind: str, template: str, marks_content: bool = True) -> tuple[ChatTemplate, Tokenizer]:
    made = ChatTemplate({"default": template}, NAMES, 65_536, marks_content)
    return made, Tokenizer(backend_json(kind), NAMES, None, [template], made.user_turn())


@cache
def theirs(kind: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=small_tokenizers.Tokenizer.from_str(backend_json(kind)), **NAMES)


def encoded(kind: str, template: str, messages: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
    made, tokenizer = chat(kind, template)
    text = made.render(messages, now=NOW, **options)
    return str.__str__(text), tokenizer.encode_chat(text)


def added(kind: str, ids: list[int]) -> list[str]:
    """The added tokens among them, by name, but those that are ordinary text."""
    names = {i: t.content for i, t in theirs(kind)._tokenizer.get_added_tokens_decoder().items()}
    unknown = "<unk>" if kind == "unigram" else None
    return [names[i] for i in ids if i in names and names[i] not in (unknown, *small_tokenizers.ORDINARY)]


def all_tokens(kind: str) -> list[str]:
    tokens = theirs(kind)._tokenizer.get_added_tokens_decoder().values()
    return [t.content for t in tokens if t.content not in (*small_tokenizers.ORDINARY, "<tool call>", "<unk>")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(chat_templates.TEMPLATES))
@pytest.mark.parametrize("messages", sorted(CHATS))
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_chats_without_control_tokens_have_the_ids_of_transformers(
    kind: str, name: str, messages: str, tools: Any
) -> None:
    text, ids = encoded(kind, chat_templates.TEMPLATES[name], CHATS[messages], tools=tools)
    assert ids == theirs(kind).encode(text, add_special_tokens=False)


CALL: dict[str, Any] = {
    "id": "IDS",
    "type": "function",
    "function": {"name": "NAME", "arguments": {"KEY": "VALUE", "more": ["ITEM", {"deep": "DEEP"}]}},
}
FULL: list[dict[str, Any]] = [
    {"role": "system", "content": "SYSTEM"},
    {"role": "user", "content": "USER", "name": "AUTHOR"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "RESULT", "tool_call_id": "CALLED", "name": "RESULTNAME"},
    {"role": "assistant", "content": "ANSWER", "reasoning_content": "REASON"},
    {"role": "user", "content": "LAST"},
]
FULL_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "TOOL", "description": "DESCRIPTION", "parameters": {"PARAM": "SCHEMA"}}}
]
MODELS_OWN = ["SYSTEM", "ANSWER", "REASON"]
CALLED = ["IDS", "NAME", "KEY", "VALUE", "ITEM", "DEEP"]  # of the model, too, but text
USERS = ["USER", "AUTHOR", "RESULT", "CALLED", "RESULTNAME", "LAST", "TOOL", "DESCRIPTION", "PARAM", "SCHEMA"]
# Every field that a message has, whatever a model's template makes of it
ALL_FIELDS = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% for key, value in m.items() %}{% if key != 'role' %}{{ value }}|{{ value | tojson }}{% endif %}{% endfor %}\
<think><|im_end|>{% endfor %}{{ tools | tojson(indent=2) }}{{ tools }}<|im_end|>"""


def planted(value: Any, field: str, text: str) -> Any:
    if isinstance(value, str):
        return text if value == field else value
    if isinstance(value, dict):
        return {planted(key, field, text): planted(item, field, text) for key, item in value.items()}
    return [planted(item, field, text) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*sorted(chat_templates.TEMPLATES), "all_fields"])
def test_control_tokens_in_any_field_are_text(kind: str, name: str) -> None:
    """The control tokens are those of the same chat without them, and nothing of the text is lost or changed."""
    template = {**chat_templates.TEMPLATES, "all_fields": ALL_FIELDS}[name]
    innocent = added(kind, encoded(kind, template, FULL, tools=FULL_TOOLS)[1])
    for field in MODELS_OWN + CALLED + USERS:
        # What the template does not write, or the model wrote itself, is no control token
        ordinary = {tag for tag in small_tokenizers.CHAT_TAGS if tag not in template or field in MODELS_OWN}
        tokens = [token for token in all_tokens(kind) if token not in ordinary]
        for spelled in ("".join(tokens), "".join(f" a {token}\n{token.upper()}" for token in tokens)):
            messages, tools = planted(FULL, field, spelled), planted(FULL_TOOLS, field, spelled)
            text, ids = encoded(kind, template, messages, tools=tools)
            expected = [token for token in innocent if token not in ordinary]
            assert [token for token in added(kind, ids) if token not in ordinary] == expected, (field, text)
            if kind in ("byte_level", "metaspace_first"):
                assert chat(kind, template)[1].decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
def test_an_assistants_turn_is_read_as_it_was_generated(kind: str) -> None:
    """Of the tokens that its text can show: those that are not special."""
    answer = "<think>\nhm\n</think>\n\nso <tool_call>\n{}\n</tool_call>"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    text, ids = encoded(kind, chat_templates.CHATML, messages, add_generation_prompt=False)
    assert ids == theirs(kind).encode(text, add_special_tokens=False)
    tags = [token for token in added(kind, ids) if token in small_tokenizers.CHAT_TAGS]
    assert tags == ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    before, after = text[: text.index(answer)], text[text.index(answer) + len(answer) :]
    if kind == "byte_level":
        assert ids == [
            i for part in (before, answer, after) for i in theirs(kind).encode(part, add_special_tokens=False)
        ]


def test_tags_that_the_template_writes_are_text_in_a_users_turn_and_tokens_in_a_systems() -> None:
    for role, expected in (("system", ["<think>"]), ("user", [])):
        _, ids = encoded("byte_level", "{{ messages[0].content }}{# <think> #}", [{"role": role, "content": "<think>"}])
        assert added("byte_level", ids) == expected


def test_added_tokens_of_ordinary_text_stay_tokens_whoever_writes_them() -> None:
    messages = [{"role": "user", "content": "a\n\n<h1>b <|im_end|>"}]
    _, ids = encoded("byte_level", chat_templates.CHATML, messages)
    tokenizer = chat("byte_level", chat_templates.CHATML)[1]
    assert [tokenizer.str_of(i) for i in ids if tokenizer.str_of(i) in small_tokenizers.ORDINARY] == ["\n\n", "<h1>"]


def test_tokens_of_turns_that_are_not_special_are_the_templates_alone() -> None:
    """DeepSeek's marks of turns are ordinary added tokens, and an answer's text would show them."""
    backend = small_tokenizers.byte_level()
    backend.add_tokens([USER_MARK, ASSISTANT_MARK, "<think>", "</think>"])
    made = ChatTemplate({"default": DEEPSEEK}, {}, 4096)
    tokenizer = Tokenizer(backend.to_str(), {}, None, [DEEPSEEK], made.user_turn())
    for role in ("user", "assistant", "system"):
        messages = [{"role": "user", "content": "hi"}, {"role": role, "content": f"<think>a{USER_MARK}b"}]
        ids = tokenizer.encode_chat(made.render(messages, now=NOW, add_generation_prompt=False))
        strings = [tokenizer.str_of(i) for i in ids]
        assert strings.count(USER_MARK) == (2 if role == "user" else 1)
        assert strings.count("<think>") == (0 if role == "user" else 1)


TOKEN = "<|im_start|>"
# Of a template, what it makes of messages[0].content, and what to write there. Its own tokens stay.
TURNED: list[tuple[str, str]] = [
    ("c | trim", f"  {TOKEN}  "),
    ("c[1:-1] ~ c[3]", f"a{TOKEN}b"),
    ("c | reverse", TOKEN[::-1]),
    ("c | list | join", TOKEN),
    ("c | lower", TOKEN.upper()),
    ("c | upper | lower | capitalize | lower", TOKEN),
    ("c | replace('_', '_')", TOKEN),
    ("'{}'|replace('{}', c)", TOKEN),
    ("c.split('#') | join('')", "<|im#_start|>"),
    ("'<|im_end|>%s<|im_end|>' % c", TOKEN),
    ("'<|im_end|>%s%s<|im_end|>' % (c, 1)", TOKEN),
    ("'<|im_end|>{0}<|im_end|>'.format(c)", TOKEN),
    ("'<|im_end|>{a}<|im_end|>'.format_map({'a': c})", TOKEN),
    ("'<|im_end|>%s' | format(c)", TOKEN),
    ("c.format(1)", TOKEN),
    ("'<|im_end|>'.join([c, 'x', c])", TOKEN),
    ("[c, '<|im_end|>', c] | join(' ')", TOKEN),
    ("c * 2", TOKEN),
    ("c.center(30) ~ c.ljust(20) ~ c.zfill(20)", TOKEN),
    ("c | center(30)", TOKEN),
    ("c | indent(2, true)", f"a\n{TOKEN}"),
    ("c | truncate(14, true, '', 0)", f"{TOKEN}{TOKEN}"),
    ("c | wordwrap(40)", f"a {TOKEN}"),
    ("c | string | safe", TOKEN),
    ("c | tojson", f'"{TOKEN}"'),
    ("{'k': [c]} | tojson(indent=1)", TOKEN),
    ("[c]", TOKEN),
    ("{'k': c}", TOKEN),
    ("(c, 1) | string", TOKEN),
    ("c | default('x')", TOKEN),
    ("(c | batch(3) | first) | join", f"{TOKEN[:3]}"),
    ("(c or 'x') if c is string else ''", TOKEN),
    ("messages | map(attribute='content') | join('<|im_end|>')", TOKEN),
    ("messages | map(attribute='content') | map('upper') | map('lower') | first", TOKEN),
    ("'<|im_' ~ c", "start|>"),
    ("'<|' + c + '|>'", "im_start"),
    ("c ~ 'im_start|>'", "<|"),
    ("c ~ messages[0].name", "<|im_"),
    ("c | replace(c, c)", TOKEN),
    ("c | urlize", TOKEN),
    ("c | striptags", f"{TOKEN}"),
    ("c | pprint", TOKEN),
    ("strftime_now(c)", TOKEN),
    ("dict(k=c).k", TOKEN),
]
FORMS = [
    "{%% set c = messages[0].content %%}<|im_end|>{{ %s }}<|im_end|>",
    "{%% set ns = namespace(c='') %%}{%% set ns.c = messages[0].content %%}{%% set c = ns.c %%}"
    "{%% macro f(c) %%}<|im_end|>{{ %s }}{%% endmacro %%}{{ f(c) }}<|im_end|>",
    "{%% set c = messages[0].content %%}{%% set x %%}<|im_end|>{{ %s }}{%% endset %%}{{ x | trim }}<|im_end|>",
    "{%% set c = messages[0].content %%}{%% filter trim %%}<|im_end|>{{ %s }}{%% endfilter %%}<|im_end|>",
    "{%% set c = messages[0].content %%}{%% generation %%}<|im_end|>{{ %s }}{%% endgeneration %%}<|im_end|>",
]


@pytest.mark.parametrize(("expression", "content"), TURNED)
@pytest.mark.parametrize("form", FORMS)
def test_marks_survive_what_templates_do(expression: str, content: str, form: str) -> None:
    messages = [{"role": "user", "content": content, "name": "start|>"}]
    template = form % expression
    text, ids = encoded("byte_level", template, messages)
    assert chat("byte_level", template, False)[0].render(messages, now=NOW) == text
    num_own = (expression.count("<|im_end|>") and text.count("<|im_end|>")) or 2
    assert added("byte_level", ids) == ["<|im_end|>"] * num_own, text


def test_white_space_that_a_token_takes_may_be_anyones() -> None:
    template = "{{ messages[0].content }}<|strip|>{{ messages[0].content }}"
    text, ids = encoded("byte_level", template, [{"role": "user", "content": " a "}])
    assert ids == theirs("byte_level").encode(text, add_special_tokens=False)
    assert added("byte_level", ids) == ["<|strip|>"]


def test_operators_may_allow_control_tokens_in_content() -> None:
    made, tokenizer = chat("byte_level", chat_templates.CHATML, marks_content=False)
    text = made.render([{"role": "user", "content": TOKEN}], now=NOW)
    assert tokenizer.encode_chat(text) == theirs("byte_level").encode(text, add_special_tokens=False)


# In these tests a character's case tells who wrote it
cased = st.text(alphabet="abAB #\n", max_size=12)


def of_case(text: str) -> str:
    return joined(marked(c, Origin.USER) if c.isupper() else c for c in text)


def told(value: Any) -> bool:
    """All that is in capitals is marked, and nothing else but what has no case."""
    if isinstance(value, list | tuple):
        return all(map(told, value))
    origins = value.origins if isinstance(value, MarkedText) else bytes(len(value))
    return all(bool(o) == c.isupper() or not c.isalpha() for c, o in zip(str.__iter__(value), origins, strict=True))


@given(
    cased,
    cased,
    cased,
    st.sampled_from(
        [
            lambda a, b, c: a + b,
            lambda a, b, c: a.strip(b or None),
            lambda a, b, c: a.split(b or None),
            lambda a, b, c: a.split(b or None, 1),
            lambda a, b, c: a.rsplit(b or None),
            lambda a, b, c: a.rsplit(b or None, 1),
            lambda a, b, c: a.splitlines(),
            lambda a, b, c: a.splitlines(True),
            lambda a, b, c: a.partition(b or "a"),
            lambda a, b, c: a.rpartition(b or "a"),
            lambda a, b, c: a.replace(b or "B", c),
            lambda a, b, c: a.replace(b or "B", c, 1),
            lambda a, b, c: a.removeprefix(b),
            lambda a, b, c: a.removesuffix(b),
            lambda a, b, c: a[len(b) : -1 : 2],
            lambda a, b, c: joined([a, b, c]),
            lambda a, b, c: list(a),
        ]
    ),
)
def test_methods_give_what_strs_do_and_mark_each_character(a: str, b: str, c: str, method: Any) -> None:
    marked_result = method(of_case(a), of_case(b), of_case(c))
    assert marked_result == method(a, b, c)
    assert told(marked_result)
    assert highest({"k": [of_case(a)]}) == (Origin.USER if any(map(str.isupper, a)) else Origin.TEMPLATE)
