"""Tool calls: what was rendered is what is parsed, whole or in pieces; broken calls lose no text."""

import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.answer_parts import (
    AnswerParser,
    Arguments,
    CallBegin,
    HarmonyParser,
    Part,
    Reasoning,
    Text,
    ThoughtParser,
    ToolCallParser,
)
from core.tool_formats import FORMATS, HARMONY, THOUGHTS
from tests.core.answer_texts import ENDS, RENDER, SCHEMAS, Call, dumped, random_call


def parsed(form: str, pieces: Sequence[str]) -> list[Part]:
    parser = ToolCallParser(FORMATS[form], SCHEMAS)
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def text_of(events: Sequence[Part]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def calls_of(events: Sequence[Part]) -> list[tuple[str, str]]:
    """Name and arguments of each; asserts that each begins once, and in order."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls


def cut(rng: random.Random, text: str) -> list[str]:
    """At random places, seldom or often."""
    chance = rng.choice([0.02, 0.2, 0.7])
    pieces = [""]
    for char in text:
        if rng.random() < chance:
            pieces.append("")
        pieces[-1] += char
    return pieces


def check_random_calls(form: str, seed: int) -> None:
    """They are parsed as they were rendered: whole, by characters, and in random pieces."""
    rng = random.Random(seed)
    if form == HARMONY:
        check_random_channels(rng)
        return
    calls = [random_call(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    lead = rng.choice(["", "Let me look.", "a < b\n\n"]) if not FORMATS[form].opens_answer else ""
    before = FORMATS[form].before if lead else ""
    tail = rng.choice(["", "", "\n", "\nDone."]) if FORMATS[form].end else ""
    text = lead + before + RENDER[form](calls) + tail
    for pieces in ([text], list(text), cut(rng, text)):
        events = parsed(form, pieces)
        assert [(name, json.loads(args)) for name, args in calls_of(events)] == calls, text
        assert text_of(events) == lead + (tail if tail.strip() else ""), text


def check_random_channels(rng: random.Random) -> None:
    calls = [random_call(rng) for _ in range(rng.choice([1, 1, 2]))]
    thought, lead = rng.choice(["", "hm", "a < b\n"]), rng.choice(["", "Let me look.", "a <| b"])
    messages = [f"<|channel|>analysis<|message|>{thought}<|end|>"] * bool(thought)
    messages += [f"<|channel|>commentary<|message|>{lead}<|end|>"] * bool(lead)
    headers = [" to=functions.{}<|channel|>commentary json", "<|channel|>commentary to=functions.{} <|constrain|>json"]
    messages += [f"{rng.choice(headers).format(name)}<|message|>{dumped(args)}<|call|>" for name, args in calls]
    text = "<|start|>assistant".join(messages)
    for pieces in ([text], list(text), cut(rng, text)):
        parser = HarmonyParser()
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
        assert [(name, json.loads(args)) for name, args in calls_of(events)] == calls, text
        assert "".join(event.text for event in events if isinstance(event, Reasoning)) == thought, text
        assert text_of(events) == lead, text


@pytest.mark.parametrize("form", [*FORMATS, HARMONY])
def test_what_is_rendered_is_parsed_whole_and_in_any_pieces(form: str) -> None:
    """`make simulate` tries more of them."""
    for seed in range(200):
        check_random_calls(form, seed)


@pytest.mark.parametrize("form", FORMATS)
def test_arguments_come_as_they_are_written(form: str) -> None:
    """A long string's characters are not held back."""
    calls: list[Call] = [("get_weather", {"city": "x" * 50})]
    text = RENDER[form](calls)
    parser = ToolCallParser(FORMATS[form], SCHEMAS)
    end = text.index("x" * 50) + 30
    events = parser.feed(text[:end])
    assert calls_of(events)[0][1].endswith("x" * 30)


CUT_MARKS = ("\n</parameter>", "</arg_value>", "<escape>", '<|"|>')  # begun, these may as well be text


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_that_is_cut_off_keeps_what_it_has(form: str) -> None:
    text = RENDER[form]([("get_weather", {"city": "Köln am Rhein"}), ("now", {})])
    for end in range(len(text)):
        events = parsed(form, [text[:end]])
        whole = calls_of(parsed(form, [text]))
        found = calls_of(events)
        assert len(found) <= len(whole)
        for (name, args), (whole_name, whole_args) in zip(found, whole, strict=False):
            assert name == whole_name
            marks = [mark[:num] for mark in CUT_MARKS for num in range(1, len(mark))]
            mark = max((one for one in marks if args.endswith(dumped(one)[1:-1])), key=len, default="")
            assert whole_args.startswith(args.removesuffix(dumped(mark)[1:-1]).rstrip('}"'))
        if not found:
            assert text_of(events) == text[:end]


@pytest.mark.parametrize("form", FORMATS)
def test_cut_arguments_are_a_beginning_of_the_whole_ones(form: str) -> None:
    """At every character, streamed or not: they grow, and are whole no sooner than the call is."""
    edge = {"city": "a\n</b", "note": None, "days": -12, "exact": True, "scale": 2.5, "hours": [1, f"x{ENDS[1]}"]}
    calls: list[Call] = [("get_weather", edge), ("now", {}), ("get_weather", {"where": {"k": None}, "city": ""})]
    rng = random.Random(0)
    for some in [calls, *([random_call(rng), random_call(rng)] for _ in range(3))]:
        text, before = RENDER[form](some), [""] * len(some)
        whole = [args for _, args in calls_of(parsed(form, [text]))]
        for end in range(len(text)):
            parser = ToolCallParser(FORMATS[form], SCHEMAS)
            streamed = [event for char in text[:end] for event in parser.feed(char)] + parser.close(is_cut=True)
            parser = ToolCallParser(FORMATS[form], SCHEMAS)
            events = parser.feed(text[:end]) + parser.close(is_cut=True)
            assert calls_of(streamed) == calls_of(events)
            found = [args for _, args in calls_of(events)]
            found += [""] * (len(some) - len(found))
            for args, last, full in zip(found, before, whole, strict=True):
                assert full.startswith(args), (text[:end], args)
                assert args.startswith(last), (text[:end], args)
            before = found


@pytest.mark.parametrize("form", FORMATS)
@given(data=st.data())
def test_broken_calls_raise_nothing_and_lose_no_text(form: str, data: st.DataObject) -> None:
    """And the pieces do not matter."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    text = "ab" * (not FORMATS[form].opens_answer) + RENDER[form]([random_call(rng), random_call(rng)])
    at, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    noise = data.draw(
        st.sampled_from(["", "}", '"', "\\", "<tool_call>", "{", "]", "(", "=", "\\u12", ",", "\n", "name"])
    )
    broken = text[:at] + noise + text[end:]
    whole = parsed(form, [broken])
    pieces = parsed(form, cut(rng, broken))
    assert calls_of(whole) == calls_of(pieces)
    assert text_of(whole) == text_of(pieces)
    if not calls_of(whole):
        assert text_of(whole) == broken


@pytest.mark.parametrize("form", ["xml", "glm"])
@pytest.mark.parametrize(
    "value",
    [
        *([f"a{end}b\\", "é"] for end in ENDS),
        {f'"{ENDS[0]}': [{"k": ENDS[2]}, [ENDS[1]]]},
        "[see this",
        '{"a": "it\'s',
        '["a", b]',
        "[1] or {}",
        "{'a': 1}",
    ],
    ids=repr,
)
def test_what_is_json_ends_where_its_value_does_and_other_text_at_the_first_mark(form: str, value: object) -> None:
    """At every split in two."""
    call = ("get_weather", {"hours": value, "city": "x"} if isinstance(value, list) else {"where": value, "city": "x"})
    text = RENDER[form]([call, ("now", {})]) + "\nDone."
    for at in range(len(text)):
        events = parsed(form, [text[:at], text[at:]])
        assert [(name, json.loads(args)) for name, args in calls_of(events)] == [call, ("now", {})], text[:at]
        assert text_of(events) == "\nDone."


@pytest.mark.parametrize("form", ["xml", "glm"])
@pytest.mark.parametrize("kinds", ["integer", ["string", "integer"], ["integer", "null"]])
@pytest.mark.parametrize("value", ["1e999", "-1E999", "NaN", "-Infinity", "9" * 5000, "[" * 50_000])
def test_a_value_that_no_integer_holds_stays_text(value: str, kinds: str | list[str], form: str) -> None:
    schemas = {"now": {"type": "object", "properties": {"at": {"type": kinds}}}}
    parser = ToolCallParser(FORMATS[form], schemas)
    events = parser.feed(RENDER[form]([("now", {"at": value})])) + parser.close()
    assert calls_of(events) == [("now", dumped({"at": value}))]


@given(st.text(), st.sampled_from(sorted(FORMATS)))
def test_text_without_calls_is_text(text: str, form: str) -> None:
    assert text_of(parsed(form, list(text))) == text or calls_of(parsed(form, [text]))


# Thoughts


def thought_and_text(text: str, is_open: bool, markers: str = "think") -> tuple[str, str]:
    found = set()
    for pieces in ([text], list(text), cut(random.Random(len(text)), text)):
        parser = ThoughtParser(THOUGHTS[markers], is_open)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        found.add((thought, text_of(events)))
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes.\n", False, ("hm\n\nso", "Yes.\n")),
        ("\n<think>hm</think>Yes", False, ("hm", "Yes")),
        ("<think>\n\n</think>\n\nYes", False, ("", "Yes")),
        ("hm\n</think>\n\nYes", True, ("hm", "Yes")),
        ("<think>\nhm\n</think>\n\nYes", True, ("hm", "Yes")),
        ("hm </thin", True, ("hm </thin", "")),
        ("hm\n\n", True, ("hm\n\n", "")),
        ("", True, ("", "")),
        ("<think>", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        (" \n ", False, ("", " \n ")),
        ("Yes, <think>no</think>", False, ("", "Yes, <think>no</think>")),
        ("  Yes", False, ("", "  Yes")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
    ],
)
def test_a_thought_is_told_from_the_text(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert thought_and_text(text, is_open) == expected


def test_a_call_within_the_thought_is_thought() -> None:
    call = RENDER["hermes"]([("now", {})])
    parser = AnswerParser(ThoughtParser(THOUGHTS["think"], True), ToolCallParser(FORMATS["hermes"], SCHEMAS))
    events = [event for piece in f"maybe {call}?</think>\n\n{call}" for event in parser.feed(piece)] + parser.close()
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == f"maybe {call}?"
    assert calls_of(events) == [("now", "{}")]


# Harmony


def harmony(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    found = []
    for pieces in ([text], list(text), cut(random.Random(len(text)), text)):
        parser = HarmonyParser()
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        found.append((thought, text_of(events), calls_of(events)))
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Yes<|return|>", ("", "Yes", [])),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
            ("hm", "Yes", []),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
            "<|constrain|>json<|message|>{}<|call|>",
            ("hm", "", [("now", "{}")]),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commen"
            'tary <|constrain|>json<|message|>{"city": "<b>"}<|call|>',
            ("", "I look.", [("get_weather", '{"city": "<b>"}')]),
        ),
        (
            ' to=functions.now<|channel|>commentary json<|message|>{"a": "\\"<|end|><|call|>"}<|call|>',
            ("", "", [("now", '{"a": "\\"<|end|><|call|>"}')]),
        ),
        (' to=functions.now<|channel|>commentary<|message|>{"a\\', ("", "", [("now", '{"a\\')])),
        ("<|channel|>commentary to=python<|message|>1+1<|call|>", ("1+1", "", [])),
        (" to=functions.now<|channel|>commentary<|message|>{", ("", "", [("now", "{")])),
        ("Just text", ("", "Just text", [])),
        ("<|channel|>fin", ("", "<|channel|>fin", [])),
    ],
)
def test_channels_become_parts(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert harmony(text) == expected


@given(st.data())
def test_broken_channels_raise_nothing_and_invent_nothing(data: st.DataObject) -> None:
    """And the pieces do not matter; what has no mark is text."""
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    (name, arguments), thought = random_call(rng), "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    header = rng.choice([" to=functions.{}<|channel|>commentary json", "<|channel|>commentary to=functions.{}"])
    text = f"{thought}{header.format(name)}<|message|>{dumped(arguments)}<|call|>"
    at, end = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
    noise = data.draw(st.sampled_from(["", "}", '"', "\\", "<|end|>", "<|message|>", "<|start|>", "<|", " to=", "\n"]))
    broken = text[:at] + noise + text[end:]
    found = harmony(broken)
    said = "".join((found[0], found[1], *(called for _, called in found[2])))
    assert not Counter(said) - Counter(broken)
    if not any(mark in broken for mark in ("<|", " to=")) and not broken.startswith("assistant"):
        assert found == ("", broken, [])


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_has_no_text_wherever_it_is_cut(name: str) -> None:
    said = RENDER[name]([("look", {"at": "x"})])
    for end in range(len(said) + 1):
        parser = AnswerParser(None, ToolCallParser(FORMATS[name], {"look": {}}, True), shows_text=False)
        parts = parser.feed(said[:end]) + parser.close(is_cut=True)
        assert not [part for part in parts if isinstance(part, Text)]
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["look"]
