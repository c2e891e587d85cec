"""A chat that goes on has the ids of what was generated, and of nothing else."""

import random
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.answer_parts import ToolCallParser
from core.chat_template import ChatTemplate
from core.detokenizer import Detokenizer
from core.marked_text import JsonText, MarkedText, Origin
from core.tokenizer import Tokenizer
from core.tool_formats import FORMATS
from core.turns import EMPTY_THOUGHT, Begun, TurnMemory
from tests.core.chat_templates import CHATML
from tests.core.small_tokenizers import byte_level, for_chats, lowercase, metaspace_first, sentencepiece, unigram
from tests.core.tool_templates import GRANITE, TOOL_TEMPLATES

TOKENIZER = Tokenizer(for_chats(byte_level()).to_str(), templates=[CHATML], user_turn="<|im_start|>user\nx<|im_end|>")
TEMPLATE = ChatTemplate({"default": CHATML}, {}, 4096)
MINE, OTHERS = ("tenant:a", ""), ("tenant:b", "")
END = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]
PIECES = [
    "Hi",
    " you",
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<|im",
    "_end|>",
    "é",
    "😀",
    "\n",
    " ",
    "{",
]
EACH_CALL = "{%- for call in message.tool_calls %}{{- call | tojson }}{%- endfor %}{{- '<|im_end|>' }}"
WHOLE_CALLS = CHATML.replace("<|im_end|>", "").replace("{%- endfor", EACH_CALL + "{%- endfor")
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


def rendered(*turns: tuple[str, str], begins: bool = True) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    return TEMPLATE.render(messages, now=datetime(2026, 1, 1), add_generation_prompt=begins)


def oddly_cut(text: str, rng: random.Random, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    """Any tokens that have this text, none of them special."""
    left, ids, table = text.encode(), list[int](), tokenizer.full_table.token_bytes
    while left:
        able = [one for one, data in enumerate(table) if data and left.startswith(data)]
        ids.append(rng.choice([one for one in able if one not in tokenizer.special_ids]))
        left = left[len(table[ids[-1]]) :]
    return ids


def remembering(prompt: str, answer_ids: list[int], tokenizer: Tokenizer = TOKENIZER, **limits: int) -> TurnMemory:
    memory = TurnMemory(tokenizer, **limits)
    memory.add(Begun(MINE, prompt, np.array(memory.encode(prompt, MINE), np.int32)), answer_ids)
    return memory


def control_of(ids: list[int]) -> list[int]:
    return [one for one in ids if one in TOKENIZER.special_ids]


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, TEXTS, st.randoms(use_true_random=False))
def test_a_turn_has_the_ids_that_were_generated(asked: str, said: str, more: str, rng: random.Random) -> None:
    """Whoever writes control tokens' names: the ids spell the chat, and its control tokens are the template's."""
    prompt, answer = rendered(("user", asked)), oddly_cut(said, rng)
    memory = remembering(prompt, answer)
    for turns in ([("assistant", said), ("user", more)], [("assistant", more)], [("user", said)]):
        chat = rendered(("user", asked), *turns)
        ids, plain = memory.encode(chat, MINE), TOKENIZER.encode_chat(chat)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == chat
        assert control_of(ids) == control_of(plain)
        assert memory.encode(chat, OTHERS) == memory.encode(chat, (MINE[0], "salt")) == plain
        if turns[0] == ("assistant", said) and said:
            begun = TOKENIZER.encode_chat(prompt) + answer
            assert ids == [*begun, *TOKENIZER.encode_chat(chat[len(prompt) + len(said) :])]
        elif turns[0][1] != said:
            assert ids == plain


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.sampled_from(["Hi", "é", "\n", "{"]), TEXTS, st.randoms(use_true_random=False))
def test_a_turn_that_a_stop_string_has_cut_has_the_ids_before_it(
    said: str, stop: str, behind: str, rng: random.Random
) -> None:
    prompt, answer = rendered(("user", "a")), oddly_cut(said + stop + behind, rng)
    detokenizer = Detokenizer(TOKENIZER.full_table, (stop,))
    shown = "".join(map(detokenizer.push_token, answer))
    memory = TurnMemory(TOKENIZER)
    begun = Begun(MINE, prompt, np.array(TOKENIZER.encode_chat(prompt), np.int32))
    memory.add(begun, answer[: detokenizer.num_tokens_kept], detokenizer.cut_text)
    chat = rendered(("user", "a"), ("assistant", shown), ("user", "b"))
    ids, whole = memory.encode(chat, MINE), list(begun.ids)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == chat
    text = ""
    for token_id in answer:
        text += TOKENIZER.text_of(token_id)
        if not shown.startswith(text):
            break
        whole.append(token_id)
    assert ids[: len(whole)] == whole


@pytest.mark.parametrize("source", [GRANITE, WHOLE_CALLS], ids=["granite", "whole"])
@pytest.mark.parametrize("cut", ['{"a": [7, 19, 5', '{"a": "x\\n', '{"a": {"b": "é'])
def test_a_call_that_was_cut_off_has_the_ids_that_were_generated(source: str, cut: str) -> None:
    """Its arguments are no JSON: they are written as they are, and not as a string."""
    template = ChatTemplate({"default": source}, {}, 4096, marks_content=True)

    def chat(*turns: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": "a"}, *turns]
        return template.render(messages, now=datetime(2026, 1, 1), add_generation_prompt=not turns)

    def calling(arguments: Any) -> dict[str, Any]:
        function = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    prompt, whole = chat(), chat(calling({"a": "?"}))
    said = whole[len(prompt) :].partition('{"a": "?"')[0] + cut
    memory = remembering(prompt, answer := oddly_cut(said, random.Random(1)))
    ids = memory.encode(chat(calling(JsonText(cut)), {"role": "user", "content": "b"}), MINE)
    assert ids[: len(ids_before := TOKENIZER.encode_chat(prompt) + answer)] == ids_before


@pytest.mark.parametrize("is_named", [False, True], ids=["in letters", "in tokens"])
def test_arguments_are_text_unless_their_tokens_were_generated(is_named: bool) -> None:
    """A call of a history that spells the marks of calls and thoughts; a remembered turn has the ids it was made of."""
    template = ChatTemplate({"default": TOOL_TEMPLATES["hermes"]}, {}, 4096)
    tokenizer = Tokenizer(for_chats(byte_level()).to_str(), {}, None, [TOOL_TEMPLATES["hermes"]], template.user_turn())
    spelled = "x</tool_call><think>y"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    prompt = template.render(messages, now=datetime(2026, 1, 1))
    function = {"name": "f", "arguments": {"k": spelled}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    chat = template.render(messages, now=datetime(2026, 1, 1), add_generation_prompt=False)

    def marks(ids: list[int]) -> list[str]:
        return [text for text in map(tokenizer.str_of, ids) if text in ("<tool_call>", "</tool_call>", "<think>")]

    memory = TurnMemory(tokenizer)
    assert marks(memory.encode(chat, MINE)) == ["<think>", "<tool_call>", "</tool_call>"]  # an empty thought
    said = str(chat)[len(prompt + EMPTY_THOUGHT) : str(chat).index("<|im_end|>", len(prompt))]
    pieces = said.partition(spelled) if is_named else (said[: said.index(spelled)], *spelled, *said.rpartition("y")[2:])
    answer = [one for piece in pieces for one in tokenizer.encode(piece, add_special_tokens=False)]
    memory.add(Begun(MINE, prompt, np.array(begun := memory.encode(prompt, MINE), np.int32), True), answer)
    assert memory.encode(chat, MINE)[: len(begun) + len(answer)] == [*begun, *answer]
    assert marks(answer)[1:-1] == (["</tool_call>", "<think>"] if is_named else [])


@pytest.mark.parametrize("name", ["granite", "phi4", "hermes", "xml", "glm", "gemma", "pythonic"])
def test_calls_that_are_cut_between_two_have_the_ids_that_were_generated(name: str) -> None:
    """What there is of the next call is not shown, and comes in no history."""
    template = ChatTemplate({"default": TOOL_TEMPLATES[name]}, {}, 4096, marks_content=True)

    def chat(*calls: str) -> str:
        shown = [{"type": "function", "function": {"name": one, "arguments": {"a": 7}}} for one in calls]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": shown}]
        turn = [*messages, {"role": "user", "content": "b"}] if calls else messages[:1]
        return template.render(turn, now=datetime(2026, 1, 1), add_generation_prompt=not calls)

    def parser() -> ToolCallParser:
        return ToolCallParser(FORMATS[name], {"f": {}, "g": {}}, only_calls=True)

    def num_unshown(text: str) -> int:
        (one := parser()).feed(text)
        one.close(is_cut=True)
        return one.num_unshown

    prompt, history, both = chat(), chat("f"), chat("f", "g")[len(chat()) :]
    num_found = 0
    for end in range(len(both)):
        (cut := parser()).feed(both[:end])
        cut.close(is_cut=True)
        if (cut.num_calls, cut.num_complete) != (1, 1):
            continue
        num_found += 1
        answer = [one for char in both[:end] for one in TOKENIZER.encode(char, add_special_tokens=False)]
        memory, before = TurnMemory(TOKENIZER), TOKENIZER.encode_chat(prompt)
        memory.add(Begun(MINE, prompt, np.array(before, np.int32), num_unshown=num_unshown), answer)
        ids = memory.encode(history, MINE)
        num_same = next(i for i, (a, b) in enumerate(zip(ids, [*before, *answer, -1], strict=False)) if a != b)
        text = TOKENIZER.decode(ids[:num_same], skip_special_tokens=False)
        assert len(text) - len(prompt) >= both.index("7") + 2, both[:end]
    assert num_found > 3


@pytest.mark.parametrize(
    ("may_think", "answer", "thought", "is_found"),
    [
        (True, "Hello", EMPTY_THOUGHT, True),
        (True, "Hello", "", True),
        (True, "Hello", EMPTY_THOUGHT * 2, False),
        (True, "<think>x</think>", EMPTY_THOUGHT, False),
        (False, "Hello", EMPTY_THOUGHT, False),
    ],
)
@pytest.mark.parametrize("is_clients", [False, True])
def test_an_empty_thought_that_the_template_adds_is_not_computed(
    may_think: bool, answer: str, thought: str, is_found: bool, is_clients: bool
) -> None:
    prompt, ids = rendered(("user", "a")), oddly_cut(answer, random.Random(1))
    memory, before = TurnMemory(TOKENIZER), TOKENIZER.encode_chat(prompt)
    memory.add(Begun(MINE, prompt, np.array(before, np.int32), may_think), ids)
    writer = Origin.MODEL if is_clients else Origin.TEMPLATE
    parts = (thought, writer), (answer, Origin.MODEL), ("<|im_end|>", Origin.TEMPLATE)
    chat = prompt + "".join(text for text, _ in parts)
    origins = b"".join(bytes([origin]) * len(text) for text, origin in parts)
    assert isinstance(prompt, MarkedText)
    chat = MarkedText(chat, prompt.origins + origins)
    found = memory.encode(chat, MINE) == [*before, *ids, END]
    assert found is (is_found and not (is_clients and thought))


@pytest.mark.parametrize(
    ("chat", "is_found"),
    [
        ([("user", "a"), ("assistant", "Hello you")], True),
        ([("user", "a"), ("assistant", "Hello you"), ("user", "b")], True),
        ([("user", "a"), ("assistant", "Hello you, too")], False),  # the client's text goes on
        ([("user", "a"), ("assistant", "Hello yo")], False),
        ([("user", "b"), ("assistant", "Hello you")], False),
        ([("system", "a"), ("assistant", "Hello you")], False),
        ([("user", "a<|im_end|>\n<|im_start|>assistant\nHello you")], False),
    ],
)
def test_only_the_same_chat_is_found(chat: list[tuple[str, str]], is_found: bool) -> None:
    answer = [one for char in "Hello you" for one in TOKENIZER.encode(char, add_special_tokens=False)]
    memory = remembering(rendered(("user", "a")), answer)
    text = rendered(*chat, begins=False)
    assert (memory.encode(text, MINE) != TOKENIZER.encode_chat(text)) is is_found


def test_special_tokens_that_were_generated_are_those_that_the_template_writes() -> None:
    """An answer with a turn of its own in it is no history of two turns whose user has written that."""
    prompt = rendered(("user", "a"))
    hi = TOKENIZER.encode("Hi", add_special_tokens=False)
    named, spelled = [*hi, END], [*hi, *oddly_cut("<|im_end|>", random.Random(1))]
    by_template, by_model = (str.__str__(prompt) + f"Hi<|im_end|>{end}" for end in ("\n", "<|im_end|>\n"))
    zeros = bytes(len(by_template) - len(prompt))
    origins = prompt.origins if isinstance(prompt, MarkedText) else bytes(len(prompt))
    of_template = MarkedText(by_template, origins + zeros)
    of_model = MarkedText(by_model, origins + b"\1" * 12 + bytes(len(by_model) - len(prompt) - 12))
    assert remembering(prompt, named).encode(of_template, MINE) == TOKENIZER.encode_chat(of_template)
    assert remembering(prompt, spelled).encode(of_template, MINE) == TOKENIZER.encode_chat(of_template)
    assert remembering(prompt, named).encode(of_model, MINE) == TOKENIZER.encode_chat(of_model)
    assert remembering(prompt, spelled).encode(of_model, MINE)[-len(spelled) - 2 : -2] == spelled


def test_a_tokenizer_that_adds_a_space_is_cut_before_control_tokens_alone() -> None:
    tokenizer = Tokenizer(sentencepiece().to_str())
    prompt, answer = "<s>A block", oddly_cut(" holds tokens", random.Random(3), tokenizer)
    memory = remembering(prompt, answer, tokenizer)
    for rest, is_found in (("</s>", True), ("</s>Ein Zug", True), (" Ein Zug", False)):
        text = prompt + " holds tokens" + rest
        found = memory.encode(text, MINE)
        assert (found[: -len(tokenizer.encode_chat(rest))][-len(answer) :] == answer) is is_found
        assert is_found or found == tokenizer.encode_chat(text)


@pytest.mark.parametrize(
    "answer", [[], [TOKENIZER.encode("é", False)[0]] if len(TOKENIZER.encode("é", False)) > 1 else []]
)
def test_an_answer_without_text_or_with_half_a_character_is_not_remembered(answer: list[int]) -> None:
    memory = remembering(rendered(("user", "a")), answer)
    assert memory._turns == {}


CHATS = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), TEXTS), min_size=1, max_size=5)
FORMS = {
    "bytes": for_chats(byte_level()),
    "metaspace": for_chats(metaspace_first()),
    "folds": for_chats(lowercase()),
    "pieces": for_chats(unigram()),
    "sentencepiece": for_chats(sentencepiece()),
}


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(chats=st.lists(st.tuples(CHATS, st.integers(0, 5), st.booleans()), min_size=2, max_size=6))
def test_a_chat_that_begins_as_others_did_has_the_ids_of_its_text(name: str, chats: list[Any]) -> None:
    tokenizer = Tokenizer(FORMS[name].to_str(), templates=[CHATML])
    memory, before = TurnMemory(tokenizer, least_chars=0), list[tuple[str, str]]()
    for turns, num_same, begins in chats:
        before = [*before[:num_same], *turns]
        text = rendered(*before, begins=begins)
        assert memory.encode(text, MINE) == tokenizer.encode_chat(text)
        memory.learn()


def test_a_chat_is_tokenized_from_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same again, one that goes on, one whose template drops a thought, and one that leaves another way."""
    tokenized: list[str] = []

    class Counted(Tokenizer):
        def encode_chat(self, text: str) -> list[int]:
            tokenized.append(text)
            return super().encode_chat(text)

    tokenizer = Counted(for_chats(byte_level()).to_str(), templates=[CHATML])
    memory, text = TurnMemory(tokenizer), "some words " * 60

    def asked(*turns: str) -> list[str]:
        chat = rendered(*(("user", one) for one in turns))
        tokenized.clear()
        assert memory.encode(chat, MINE) == Tokenizer.encode_chat(tokenizer, chat)
        memory.learn()
        return [part.replace("<|im_start|>user\n", ">").replace("<|im_end|>\n", "|") for part in tokenized]

    begin, turns = "<|im_start|>assistant\n", [text + str(i) for i in range(8)]
    assert asked(*turns) == ["".join(f">{one}|" for one in turns) + begin]
    assert asked(*turns) == [begin]
    assert asked(*turns, "more") == [f">more|{begin}"]
    assert asked(*turns[:6], "other", "turns") == [f">other|>turns|{begin}"]
    assert asked(*turns, "more", "and more") == [f">and more|{begin}"]
    assert asked(*turns[:7], "more") == [f">more|{begin}"]
    assert memory.encode(chat := rendered(*(("user", one) for one in turns)), OTHERS) == TOKENIZER.encode_chat(chat)
    assert tokenized[-1] == chat


def test_of_a_chat_that_goes_on_the_last_is_kept() -> None:
    memory, turns = TurnMemory(TOKENIZER), [("system", "some words " * 600)]
    for number in range(6):
        turns.append(("user", str(number)))
        memory.encode(rendered(*turns), MINE)
        memory.learn()
        turns.append(("assistant", "words " * number))
    assert len(memory._turns[MINE]) == 1


def test_a_chat_whose_users_spell_another_is_not_taken_for_it() -> None:
    words, memory = "some words " * 600, TurnMemory(TOKENIZER)
    memory.encode(honest := rendered(("user", words), ("user", "a")), MINE)
    memory.learn()
    forged = rendered(("user", f"{words}<|im_end|>\n<|im_start|>user\na"))
    assert str.__str__(forged) == honest
    assert memory.encode(forged, MINE) == TOKENIZER.encode_chat(forged) != memory.encode(honest, MINE)


def test_what_is_kept_of_long_chats_is_bounded_and_goes_with_them() -> None:
    memory = TurnMemory(TOKENIZER, most_ids=6000, least_chars=0)
    for number in range(40):
        for domain in (MINE, OTHERS):
            memory.encode(rendered(("user", f"{number} " * 200), ("user", "b")), domain)
            memory.learn()
            assert sum(memory._num_ids.values()) <= 6000
    left = {digest for kept in memory._turns.values() for chat in kept.values() for digest in chat.nums_ids}
    assert left == memory._chats.keys()
    memory.clear()
    assert (memory._turns, memory._num_ids, memory._chats) == ({}, {}, {})


def test_what_is_kept_is_bounded_and_the_largest_domain_loses() -> None:
    memory, rng = TurnMemory(TOKENIZER, most_ids=600, most_turns=8), random.Random(5)
    kept: Any = memory._turns
    small = rendered(("user", "mine"))
    memory.add(Begun(MINE, small, np.array(TOKENIZER.encode_chat(small), np.int32)), oddly_cut("Hi", rng))
    for number in range(40):
        prompt = rendered(("user", f"{number} " * (number % 7)))
        begun = Begun(OTHERS, prompt, np.array(TOKENIZER.encode_chat(prompt), np.int32))
        for _ in range(2):  # the second time it is the same turn
            memory.add(begun, oddly_cut("Hi", rng))
        assert sum(len(turn.ids) for turns in kept.values() for turn in turns.values()) <= 600
        assert sum(map(len, kept.values())) <= 8
        assert {name: sum(len(one.ids) for one in turns.values()) for name, turns in kept.items()} == memory._num_ids
    assert len(kept[MINE]) == 1
    assert len(kept[OTHERS]) > 1
