"""The text of a sequence: whole characters, held-back stop strings, the same however its tokens are grouped."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.detokenizer import Detokenizer, TokenTable

BYTES = TokenTable([bytes([value]) for value in range(256)])  # one id per byte: a token may end anywhere
SPACED = TokenTable([bytes([value]) for value in range(256)], strip_start=1)

short_texts = st.text(alphabet=st.sampled_from("ab é你😀\N{COMBINING ACUTE ACCENT}"), max_size=12)
stops = st.lists(st.text(alphabet=st.sampled_from("abé😀"), min_size=1, max_size=4), max_size=4).map(tuple)


def reference(data: bytes, stop: tuple[str, ...], num_free: int = 0) -> str:
    """The complete text, character by character, until one of the stop strings is there, which num_free do not end."""
    text = data.decode("utf-8", errors="replace")
    for end in range(num_free + 1 if num_free else 0, len(text) + 1):
        completed = [string for string in stop if text[:end].endswith(string)]
        if completed:
            return text[: end - max(map(len, completed))]
    return text


def push(detokenizer: Detokenizer, token_ids: Iterable[int]) -> str:
    return "".join(map(detokenizer.push_token, token_ids))


def run(table: TokenTable, groups: list[list[int]], stop: tuple[str, ...] = ()) -> tuple[str, Detokenizer]:
    detokenizer = Detokenizer(table, stop)
    text = "".join([push(detokenizer, group) for group in groups])
    return text + detokenizer.finish(), detokenizer


def cut(data: bytes, marks: set[int]) -> list[bytes]:
    edges = [0, *sorted(mark for mark in marks if mark < len(data)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("text", ["é", "你", "😀", "a😀b", "👩‍👩‍👧", "\N{COMBINING ACUTE ACCENT}", "�"])
def test_character_split_at_every_byte_comes_whole(text: str) -> None:
    data = text.encode()
    for at in range(len(data) + 1):
        table = TokenTable([data[:at], data[at:]])
        detokenizer = Detokenizer(table)
        first, second = push(detokenizer, [0]), push(detokenizer, [1])
        assert first == data[:at].decode("utf-8", errors="ignore")
        assert first + second + detokenizer.finish() == text


@given(st.text(max_size=20) | short_texts, st.sets(st.integers(1, 80)), st.sets(st.integers(1, 80)), stops)
def test_text_does_not_depend_on_tokens_or_groups(
    text: str, marks: set[int], joins: set[int], stop: tuple[str, ...]
) -> None:
    tokens = cut(text.encode(), marks)
    table, ids = TokenTable(tokens), list(range(len(tokens)))
    groups = [ids[a:b] for a, b in zip([0, *sorted(joins)], [*sorted(joins), len(ids)], strict=True)]
    expected = reference(text.encode(), stop)
    assert run(table, [ids], stop)[0] == expected
    assert run(table, [[token_id] for token_id in ids], stop)[0] == expected
    assert run(table, groups, stop)[0] == expected


@given(st.binary(max_size=16), st.sets(st.integers(1, 16)))
def test_any_bytes_decode_as_the_whole_would(data: bytes, marks: set[int]) -> None:
    groups = [list(part) for part in cut(data, marks)]
    assert run(BYTES, groups)[0] == data.decode("utf-8", errors="replace")
    assert run(BYTES, groups, ("�",))[0] == reference(data, ("�",))


@given(short_texts, stops)
def test_emitted_text_is_never_taken_back(text: str, stop: tuple[str, ...]) -> None:
    detokenizer = Detokenizer(BYTES, stop)
    emitted = ""
    for value in text.encode():
        emitted += push(detokenizer, [value])
        assert reference(text.encode(), stop).startswith(emitted)


@given(short_texts, stops)
def test_kept_tokens_end_with_the_one_that_completes_the_stop_string(text: str, stop: tuple[str, ...]) -> None:
    data = text.encode()
    completing = [n for n in range(len(data) + 1) if any(s.encode() in data[:n] for s in stop)]
    for groups in ([list(data)], [[value] for value in data]):
        _, detokenizer = run(BYTES, groups, stop)
        assert detokenizer.is_stopped == bool(completing)
        assert detokenizer.num_tokens_kept == (completing[0] if completing else len(data))


@given(short_texts, stops, st.booleans())
def test_plain_texts_are_what_the_next_token_says(text: str, stop: tuple[str, ...], is_spaced: bool) -> None:
    """Whoever reads them instead of pushing gets the same text, stop and count."""
    table = SPACED if is_spaced else BYTES
    read, pushed = Detokenizer(table, stop), Detokenizer(table, stop)
    for token_id in text.encode():
        plain = read.plain_texts[token_id] if read.is_plain else None
        if plain is not None:
            read.num_tokens_kept += 1
        assert push(pushed, [token_id]) == (push(read, [token_id]) if plain is None else plain)
        assert (read.is_stopped, read.num_tokens_kept) == (pushed.is_stopped, pushed.num_tokens_kept)
    assert read.finish() == pushed.finish()


@given(st.text(alphabet="ab", max_size=12), stops, st.integers(0, 8), st.lists(st.integers(1, 3), max_size=6))
def test_stop_strings_that_the_first_tokens_complete_do_not_stop(
    text: str, stop: tuple[str, ...], min_tokens: int, sizes: list[int]
) -> None:
    """min_tokens' tokens are exempt: one that begins in them and is completed later stops."""
    data = text.encode()
    expected = reference(data, stop, min(min_tokens, len(data)))
    for groups in ([[token] for token in data], cut(data, set(itertools.accumulate(sizes)))):
        detokenizer = Detokenizer(BYTES, stop, min_tokens=min_tokens)
        emitted = "".join([push(detokenizer, list(group)) for group in groups]) + detokenizer.finish()
        assert emitted == expected
        completing = [
            n for n in range(min_tokens + 1, len(data) + 1) if any(data[:n].endswith(s.encode()) for s in stop)
        ]
        assert detokenizer.is_stopped == bool(completing)
        assert detokenizer.num_tokens_kept == (completing[0] if completing else len(data))


def test_tokens_that_cannot_begin_a_stop_string_are_plain_beside_one() -> None:
    detokenizer = Detokenizer(BYTES, ("END",))
    assert detokenizer.is_plain
    assert [detokenizer.plain_texts[value] for value in b"aE"] == ["a", None]
    push(detokenizer, list(b"E"))
    assert not detokenizer.is_plain  # it is held
    push(detokenizer, list(b"x"))
    assert detokenizer.is_plain


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(BYTES, ("END",))
    assert push(detokenizer, list(b"the E")) == "the "
    assert push(detokenizer, list(b"N")) == ""
    assert push(detokenizer, list(b"E")) == "EN"
    assert detokenizer.finish() == "E"
    assert not detokenizer.is_stopped


def test_nothing_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES, ("\n\n",))
    assert push(detokenizer, list(b"one\n\ntwo")) == "one"
    assert push(detokenizer, list(b"three")) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.is_stopped, detokenizer.num_tokens_kept) == (True, 5)


def test_long_stop_string_is_matched_across_many_tokens() -> None:
    stop = "a" * 3000 + "b"
    detokenizer = Detokenizer(BYTES, (stop,))
    assert push(detokenizer, list(b"x" + b"a" * 3001)) == "xa"
    assert push(detokenizer, list(b"b!")) == ""
    assert detokenizer.num_tokens_kept == 3003


def test_leading_space_of_the_tokenizer_is_stripped_from_a_text_of_its_own() -> None:
    assert run(SPACED, [[32], [32], [104], [32]])[0] == " h "
    assert run(SPACED, [[104], [32]])[0] == "h "
    assert run(SPACED, [])[0] == ""
    assert SPACED.decode(list(b"  h")) == " h"
    assert run(SPACED, [list(b" stop")], ("stop",))[0] == ""


def test_leading_space_stays_where_the_tokens_continue_a_text() -> None:
    assert push(Detokenizer(SPACED, continues_text=True), list(b" a time")) == " a time"


def test_ids_beyond_the_vocabulary_say_nothing() -> None:
    detokenizer = Detokenizer(BYTES)
    assert push(detokenizer, [999]) == ""
    assert push(detokenizer, [0xC3, 999, 0xA9]) == "é"
    assert detokenizer.num_tokens_kept == 4
    assert BYTES.decode([104, 999, 105]) == "hi"
