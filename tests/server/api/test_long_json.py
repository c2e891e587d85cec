"""Long bodies are read as short ones are, and within bounds."""

import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.errors import InvalidRequest
from server.api.decoding import LONG_BYTES, MAX_DEPTH, MAX_ESCAPES, MAX_IDS, MAX_VALUES, decode, parse_object

PADDING = b" " * LONG_BYTES
PIECE = 2**20  # of a text: read in one step
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(st.integers(0, 10**19)) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
PIECES = (
    *b'{ } [ ] , : \x0c \xa0 \xff " "a": "b" "a\\" "\x01" 1 01 - -0 1. .5 1.5e3 1e999 12, 1_0 0 007, 12,3'.split(b" "),
    *b'true nul null NaN -Infinity Infinity truefalse "\\ud800" "\\ud83d\\ude00" "\\\\ud800" "\\x" "\\u12g4"'.split(
        b" "
    ),
    *(b" ", b"\n", b"12, 3", b"9" * 5000, "\u0661".encode(), "\u00e9".encode()),
)


def outcome(body: bytes) -> Any:
    """What it is read as, types included (1 == 1.0 == True); None: it is refused."""
    try:
        return repr(parse_object(body))
    except InvalidRequest as error:
        return None if error.code == "invalid_json" else error


@given(st.dictionaries(st.text(), VALUES), st.sampled_from([None, 2]))
def test_a_long_body_is_read_as_a_short_one(fields: dict[str, Any], indent: int | None) -> None:
    body = json.dumps(fields, indent=indent).encode()
    assert outcome(body + PADDING) == outcome(body) == repr(fields)


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
@example(b'"a":1, "a":2')
@example(b'"a":[1,2, 3 ,4,\n5]')
@example(b'"a":[1,]')
@example(b'"a":1,')
@example(b'"a" 1')
@example(b'"a":[1 2]')
@example(b'"\\ud800":1')
def test_what_a_short_body_is_refused_for_a_long_one_is(inside: bytes) -> None:
    for body in (inside, b"{" + inside + b"}", b'{"a":[' + inside + b"]}"):
        assert outcome(body + PADDING) == outcome(body)


@pytest.mark.parametrize("deep", [b"[" * MAX_DEPTH, b'{"b":' * MAX_DEPTH])
def test_a_long_body_is_as_deep_as_a_short_one_at_most(deep: bytes) -> None:
    with pytest.raises(InvalidRequest, match="nested deeper than 64"):
        parse_object(b'{"a":' + deep + PADDING)


@pytest.mark.parametrize("value", [b'"%d":0', b'"%d":[]', b'"%d":""'])
def test_a_body_has_a_bounded_number_of_values(value: bytes) -> None:
    def body(num: int) -> bytes:
        return b"{" + b",".join(value % i for i in range(num)) + b"}"

    assert len(parse_object(body(MAX_VALUES - 1))) == MAX_VALUES - 1  # the whole body is one
    with pytest.raises(InvalidRequest, match="its JSON has more than 100000 values") as caught:
        parse_object(body(MAX_VALUES))
    assert caught.value.code == "json_too_large"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b'"' + b"\\n" * (MAX_ESCAPES + 1) + b'"', f"has more than {MAX_ESCAPES} escaped characters"),
        (b"[0." + b"1" * LONG_BYTES + b"]", "it has a number that is too long"),
    ],
    ids=["escapes", "digits"],
)
def test_what_the_scanner_reads_in_one_step_is_bounded(value: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_object(b'{"a":' + value + b"}")


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ":"), (" ,", ":"), ("\n , ", ":")])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_prompt_of_ids_is_as_long_as_the_body_lets_it(separators: tuple[str, str], sign: int) -> None:
    ids = [sign * i for i in range(3 * MAX_VALUES)]
    assert parse_object(json.dumps({"prompt": ids}, separators=separators).encode()) == {"prompt": ids}


@pytest.mark.parametrize("end", ['"', "", '\\"', "\n", "\\x", '\\ud83d\\ude00"', "\\u12"])
@pytest.mark.parametrize("at", [*range(PIECE - 13, PIECE + 2), 2 * PIECE + 5])
def test_a_text_of_many_parts_is_read_as_one(at: int, end: str) -> None:
    """Escapes, the text's end, and what is wrong lie at the parts' borders."""
    before = ('\\"', "ü", "\\\\" * 9)[at % 3]
    body = f'{{"a":"{before.ljust(at, "x")}{end}, "b":"{"y" * PIECE}"}}'
    try:
        found = repr(parse_object(body.encode()))
    except InvalidRequest as error:
        found = error.message.removeprefix("The body is not valid JSON: ").removesuffix(".")
    assert found == read_at_once(body)


def read_at_once(body: str) -> str:
    """By the scanner in C: what `outcome` says, or where it breaks."""
    try:
        return repr(json.loads(body))
    except json.JSONDecodeError as error:
        return f"{error.msg} at line {error.lineno}, column {error.colno}"


class Ids(msgspec.Struct):
    prompt: str | list[str | int | list[int]]
    few: Annotated[list[int], msgspec.Meta(max_length=64)] = []


def test_a_million_ids_are_read_and_no_more() -> None:
    ids = [i % 1000 for i in range(MAX_IDS)]
    for prompt in (ids, [ids[9:], [7]], [*ids[9:], "a"]):
        assert decode({"prompt": prompt, "x": 1}, Ids, {}) == (Ids(prompt), ("x",))  # type: ignore[arg-type]
    for fields, words in (
        ({"prompt": 5}, "must be a string or an array"),
        ({"prompt": [*ids[9:], None]}, r"prompt\[\d+\] must be"),
        ({"prompt": [*ids[9:], True]}, r"prompt\[\d+\] must be"),
        ({"prompt": [[*ids[9:], 0.5]]}, r"prompt\[0\]\[\d+\] must be"),
        ({"prompt": "", "few": ids}, "few must have at most 64 items"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            decode(fields, Ids, {})
    with pytest.raises(InvalidRequest, match=f"has more than {MAX_IDS} whole numbers in arrays"):
        parse_object(json.dumps({"a": ids, "b": [1, 2, 3]}).encode())


def test_whole_numbers_of_over_18_digits_and_the_last_of_each_array_count() -> None:
    for value in ("1" * 19, "[1,2]"):
        with pytest.raises(InvalidRequest, match="more than 100000 values"):
            parse_object(f"[{','.join([value] * MAX_VALUES)}]".encode())
    assert parse_object(f'{{"a":[{",".join(["1" * 18] * MAX_VALUES)}]}}'.encode())


def test_a_short_body_has_less_values_than_the_bound() -> None:
    assert LONG_BYTES < 2 * MAX_VALUES  # a value and what parts it from the next are two bytes at least
