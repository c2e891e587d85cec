"""Text rules: what they find, what they hold back, and what becomes of prompts and answers that break them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ExitCode, StartupError
from core.types import Cancel, FinishReason
from server.config import ServerConfig
from server.gate.tenants import Tenant, parse_tenants
from server.gate.text_rules import HELD_CHARS, TextRule, TextScreen, rule_book
from tests.call_counter import CallCounter
from tests.server.simulated_engine import Schedule, at_once, late_by, token_by_token
from tests.server.simulated_server import (
    STREAM,
    TOKENIZER,
    SimulatedServer,
    as_caller,
    chat,
    completion,
    keyed_tenant,
    request,
)

pieces = st.lists(st.text(alphabet="abcß X", max_size=4), max_size=12)
rules = st.lists(
    st.one_of(
        st.builds(TextRule, phrase=st.text(alphabet="abcX", min_size=1, max_size=4), ignore_case=st.booleans()),
        st.sampled_from(["ab+c", r"\bab$", "a[^x]c", "(?i)x+ b", "b{2,}"]).map(lambda one: TextRule(pattern=one)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


def screen(texts: Sequence[str], *forbidden: TextRule) -> tuple[list[str], bool]:
    """What comes out with each text, and at last; and whether a rule was broken."""
    tested = TextScreen(rule_book(tuple(forbidden)).on_answer)
    shown = [tested.push(text) for text in texts]
    return [*shown, tested.finish()], tested.is_hit


@given(texts=pieces, forbidden=rules)
def test_nothing_forbidden_is_shown_and_nothing_else_is_kept(texts: list[str], forbidden: tuple[TextRule, ...]) -> None:
    text = "".join(texts)
    shown, is_hit = screen(texts, *forbidden)
    out = "".join(shown)
    matchers = rule_book(forbidden).on_answer
    assert text.startswith(out)
    found = [span for matcher in matchers if (span := matcher.find(text, 0))]
    if found:
        assert is_hit
        assert len(out) <= min(begin for begin, _ in found)
    elif not is_hit:
        assert out == text


def said_until_a_match(texts: Sequence[str], *patterns: str) -> str:
    """What the screen has to let out, for matches of less than HELD_CHARS: all is searched anew with each text."""
    import re2

    text, compiled = "", [re2.compile(one) for one in patterns]
    for piece in texts:
        text += piece
        spans = [match.span() for one in compiled if (match := one.search(text))]
        if any(end < len(text) for _, end in spans):  # one at the very end may yet be none
            return text[: min(spans)[0]]
    return text[: min(spans)[0]] if texts and spans else text


@given(texts=pieces, phrases=st.lists(st.text(alphabet="abX ", min_size=1, max_size=4), min_size=1, max_size=6))
def test_phrases_hold_and_end_as_their_patterns_would(texts: list[str], phrases: list[str]) -> None:
    rules = [TextRule(phrase=one, ignore_case=i % 2 == 1) for i, one in enumerate(phrases)]
    patterns = [f"(?i){one}" if rule.ignore_case else one for one, rule in zip(phrases, rules, strict=True)]
    shown, _ = screen(texts, *rules)
    assert "".join(shown) == said_until_a_match(texts, *patterns)


def test_a_token_costs_no_more_calls_for_many_phrases_than_for_one() -> None:
    def calls(num_phrases: int) -> Counter[str]:
        rules = tuple(TextRule(phrase=f"zq {i:02}", ignore_case=True) for i in range(num_phrases))
        tested = TextScreen(rule_book(rules).on_answer)
        with CallCounter(lambda path: path.endswith("text_rules.py")) as counter:
            for word in (" a", " plain", " text"):
                tested.push(word)
        return counter.calls

    assert calls(64) == calls(1)
    assert calls(1)["TextScreen.push"] == 3


ODD_PATTERNS = (
    r"\Bfoo", r"\bfoo", r"(?:\Bx|yz)foo", r"(?:\b-x|yz)", r"(?m)^foo", r"^foo", r"foo$", r"foo\b", r"(?i)straße",
    r"fo+bar", r"[a-z]{3}\d", r"a|abcd", r"x*yz", r".foo", r"\d{3}-\d{4}", r"é+x", r"(?i)k", r"\W\Bfoo", r"[^a]foo",
    r"foo(bar)?\z", r"\Q\b\Efoo|\\bar", r"\B{2}foo|z\B*x",
)  # fmt: skip
ODD_WORDS = st.sampled_from(
    [*"xyzé1-. \nakK\\", "foo", "bar", "yz", "fo", "123", "1234", "\\b", "STRASSE", "straße", "\u212a"]
)


@settings(derandomize=True, max_examples=500)
@given(texts=st.lists(ODD_WORDS, max_size=9), patterns=st.lists(st.sampled_from(ODD_PATTERNS), min_size=1, max_size=2))
def test_patterns_hold_and_end_as_if_all_were_held(texts: list[str], patterns: list[str]) -> None:
    shown, _ = screen(texts, *(TextRule(pattern=one) for one in patterns))
    assert "".join(shown) == said_until_a_match(texts, *patterns)


def test_text_is_held_only_while_it_may_be_a_match() -> None:
    shown, is_hit = screen(["the se", "cond", " sec", "ret", " is"], TextRule(phrase="secret"))
    assert (shown, is_hit) == (["the ", "second", " ", "", "", ""], True)
    assert screen(["a sk", "y, sk-", "1"], TextRule(pattern="sk-[a-z]{3}"))[0] == ["a ", "sky, ", "sk-1", ""]


def test_case_is_ignored_where_a_rule_says_so() -> None:
    assert screen(["My SeCr", "ET"], TextRule(phrase="secret", ignore_case=True)) == (["My ", "", ""], True)
    assert screen(["My SeCr", "ET"], TextRule(phrase="secret")) == (["My SeCr", "ET", ""], False)
    assert screen(["AB", "C!"], TextRule(pattern="abc", ignore_case=True))[1]


def test_patterns_hold_no_more_than_their_bound() -> None:
    shown, is_hit = screen(["(" + "x" * (HELD_CHARS - 1), "y" * 10, ")"], TextRule(pattern=r"\([^)]*\)"))
    assert not is_hit
    assert shown[0] == ""
    assert len("".join(shown[:2])) == 10
    assert screen(["x" * 50, "(" + "y" * 200, ") "], TextRule(pattern=r"\([^)]*\)"))[1]


# Configuration


def tenants_of(rules: str) -> tuple[Tenant, ...]:
    import tomllib

    text = f'[[tenants]]\nname = "acme"\ntext_rules = {rules}'
    return parse_tenants(tomllib.loads(text)["tenants"], Path("steploop.toml"))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("[{phrase = 'a', pattern = 'b'}]", ["either a phrase or a pattern"]),
        ("[{ignore_case = true}]", ["either a phrase or a pattern"]),
        ("[{phrase = ''}]", ["phrase"]),
        ("[{pattern = '(a'}]", ["acme", "'(a'", "missing )", "re2/wiki/Syntax"]),
        ("[{pattern = '(a)\\1'}]", ["acme", "re2/wiki/Syntax"]),
        ("[{pattern = 'a*'}]", ["matches the empty string"]),
        (r"[{pattern = '\b'}]", ["matches the empty string"]),
        ("[{words = 'a'}]", ["unknown field `words`", "phrase, pattern, ignore_case, on"]),
        ("[{phrase = 'a', on = 'answers'}]", ["answers"]),
    ],
)
def test_bad_rules_stop_the_start_with_what_is_wrong(rules: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as caught:
        tenants_of(rules)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIGURATION


# The whole server


@contextmanager
def serving(*rules: TextRule, schedule: Schedule = at_once) -> Iterator[SimulatedServer]:
    tenant = keyed_tenant("acme", text_rules=rules)
    with closing(SimulatedServer(tenants=(tenant,), schedule=schedule)) as server:
        yield server


def as_acme(data: bytes) -> bytes:
    return as_caller(data, "acme")


def free_text(data: bytes) -> str:
    with serving() as server:
        return server.ask(as_acme(data)).text()


def word_within(text: str) -> str:
    """Three characters from the middle, of which the first stands there only."""
    return next(text[i : i + 3] for i in range(len(text) // 2, len(text)) if text.count(text[i : i + 3]) == 1)


@pytest.mark.parametrize("schedule", [at_once, token_by_token, late_by(0.035)])
@pytest.mark.parametrize("how", [{}, STREAM])
@pytest.mark.parametrize("make", [chat, completion])
def test_answer_ends_before_what_it_must_not_say(make: Any, how: dict[str, Any], schedule: Schedule) -> None:
    text = free_text(make(max_tokens=40))
    word = word_within(text)
    with serving(TextRule(phrase=word), schedule=schedule) as server:
        answer = server.ask(as_acme(make(max_tokens=40, **how)))
        assert answer.text() == text[: text.index(word)]
        assert answer.finish_reason() == "content_filter"
        assert answer.usage["completion_tokens"] < 40
        assert server.metrics.finished == {FinishReason.CONTENT_FILTER: 1}
        (cancel,) = [message for message in server.posted if isinstance(message, Cancel)]
        assert cancel.reason is FinishReason.CONTENT_FILTER


def test_rule_that_is_broken_by_the_last_token_counts() -> None:
    text = free_text(completion())
    with serving(TextRule(phrase=text[-3:] if text.count(text[-3:]) == 1 else text[-6:])) as server:
        answer = server.ask(as_acme(completion(**STREAM)))
        assert answer.finish_reason() == "content_filter"
        assert text.startswith(answer.text())
        assert len(answer.text()) < len(text)


def test_other_choices_go_on() -> None:
    with serving() as server:
        free = server.ask(as_acme(completion(max_tokens=30, n=2)))
        texts = [free.text(0), free.text(1)]
    word = next(texts[0][i : i + 3] for i in range(len(texts[0])) if texts[0][i : i + 3] not in texts[1])
    with serving(TextRule(phrase=word)) as server:
        answer = server.ask(as_acme(completion(max_tokens=30, n=2, **STREAM)))
        assert [answer.finish_reason(i) for i in range(2)] == ["content_filter", "length"]
        assert answer.text(1) == texts[1]


def test_responses_are_incomplete_by_the_filter() -> None:
    body = {"model": "small", "input": "step", "seed": 7, "max_output_tokens": 40, "ignore_eos": True}
    with serving() as server:
        text = server.ask(as_acme(request("POST", "/v1/responses", body))).json["output"][0]["content"][0]["text"]
    with serving(TextRule(phrase=word_within(text))) as server:
        answer = server.ask(as_acme(request("POST", "/v1/responses", body))).json
        assert answer["incomplete_details"] == {"reason": "content_filter"}


@pytest.mark.parametrize(
    "data",
    [
        chat(messages=[{"role": "user", "content": "the magic word"}]),
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a magic one"}]}]),
        chat(messages=[{"role": "user", "content": "fine", "name": "magic"}]),
        chat(messages=[{"role": "assistant", "reasoning": "magic"}, {"role": "user", "content": "fine"}]),
        chat(messages=[{"role": "assistant", "reasoning_content": "magic"}, {"role": "user", "content": "fine"}]),
        chat(messages=[{"role": "system", "content": "the magic word"}, {"role": "user", "content": "fine"}]),
        completion(prompt="some magic"),
        completion(prompt=list(TOKENIZER.encode("magic"))),
        completion(prompt=["fine", "Magic magic"]),
    ],
)
def test_prompt_that_breaks_a_rule_is_a_400(data: bytes) -> None:
    with serving(TextRule(phrase="magic", on="prompt")) as server:
        answer = server.ask(as_acme(data))
        assert (answer.status, answer.json["error"]["code"]) == (400, "content_filter"), answer.json
        assert answer.json["error"]["param"]
        assert not server.posted
        assert server.metrics.refused == {"content_filter": 1}


def test_rules_count_where_they_say() -> None:
    text = free_text(completion())
    with serving(TextRule(phrase=text[2:5], on="prompt"), TextRule(phrase="The engine", on="answer")) as server:
        assert server.ask(as_acme(completion())).text() == text


def test_prompt_that_is_echoed_is_part_of_the_answer() -> None:
    with serving(TextRule(phrase="magic", on="answer")) as server:
        answer = server.ask(as_acme(completion(prompt=["fine", "some magic"], echo=True)))
        assert (answer.status, answer.json["error"]["code"]) == (400, "content_filter")
        assert answer.json["error"]["param"] == "prompt[1]"
        assert server.ask(as_acme(completion(prompt="some magic"))).status == 200
        assert server.ask(as_acme(completion(prompt="fine", echo=True))).status == 200


def test_roles_are_no_words_of_the_prompt() -> None:
    with serving(TextRule(phrase="user", on="prompt")) as server:
        assert server.ask(as_acme(chat())).status == 200


def test_logprobs_must_not_tell_what_is_held_back() -> None:
    with serving(TextRule(phrase="magic", on="answer")) as server:
        answer = server.ask(as_acme(completion(logprobs=1)))
        assert (answer.status, answer.json["error"]["param"]) == (400, "logprobs")
    with serving(TextRule(phrase="magic", on="prompt")) as server:
        assert server.ask(as_acme(completion(logprobs=1))).status == 200


def test_stop_string_that_comes_first_ends_the_text_as_without_rules() -> None:
    text = free_text(chat(max_tokens=40))
    stop = word_within(text)
    with serving(TextRule(phrase="never said at all")) as server:
        answer = server.ask(as_acme(chat(max_tokens=40, stop=stop, **STREAM)))
        assert (answer.text(), answer.finish_reason()) == (text[: text.index(stop)], "stop")


def test_reload_puts_new_rules_in_force() -> None:
    with serving() as server:
        assert server.ask(as_acme(completion(prompt="some magic"))).status == 200
        (tenant,) = server.gate.directory.tenants.values()
        changed = msgspec.structs.replace(tenant, text_rules=(TextRule(pattern="m[aeiou]gic"),))
        server.gate.prepare(ServerConfig(tenants=(changed,)))()
        assert server.ask(as_acme(completion(prompt="some magic"))).status == 400
