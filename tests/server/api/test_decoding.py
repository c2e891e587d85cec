import json
import subprocess
import sys
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ErrorKind, InvalidRequest
from server.api.decoding import MAX_DEPTH, decode, parse_object
from server.api.known_fields import CHAT, Does, Known

LONG, CUT = "k" * 40, "k" * 32


class Inner(msgspec.Struct):
    name: str
    size: int | None = None


class Shape(msgspec.Struct):
    inner: list[Inner]
    weights: dict[str, float] | None = None
    flag: bool = False


RULES = {
    row.name: row
    for row in (
        Known("tools", CHAT, Does.REFUSED, neutral=([],), unless=("mode", "plain")),
        Known("mode", CHAT, Does.REFUSED, neutral=("plain",)),
        Known("size", CHAT, Does.REFUSED, neutral=(0,)),
        Known("outer.mode", CHAT, Does.REFUSED, neutral=("plain",)),
        Known("box", CHAT, Does.CONTAINER),
        Known("heavy", CHAT, Does.ALIAS, "weights", ({},)),
        Known("known", CHAT, Does.IGNORED),
    )
}


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, Shape, RULES)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    return caught.value


SCALARS = st.none() | st.booleans() | st.text(max_size=9) | st.integers()


@given(st.dictionaries(st.text(max_size=9), SCALARS | st.lists(SCALARS, max_size=3), max_size=4))
def test_an_ordinary_object_is_read_as_json_says(value: dict[str, object]) -> None:
    assert parse_object(json.dumps(value).encode()) == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=60) | st.text('[]{}",:\\u d8e1-.N', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(body: bytes) -> None:
    try:
        value = parse_object(body)
    except InvalidRequest:
        return
    assert value == json.loads(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "Expecting value at line 1, column 1"),
        (b'{"inner": ]}', "line 1, column 11"),
        (b'{"inner": []} x', "Extra data"),
        (b"\xff\xfe{\x00}\x00", "byte 0 is not UTF-8"),
        (b'{"a": "\xc3"}', "not UTF-8"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too long"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a": "\\udc00\\ud800"}', "surrogate"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' appears twice"),
        (b'{"a": "\x01"}', "Invalid control character"),
    ],
)
def test_what_is_not_strict_json_is_refused_with_the_reason(body: bytes, says: str) -> None:
    error = refusal(body)
    assert says in error.message
    assert error.code == "invalid_json"


def test_surrogate_pairs_and_escaped_backslashes_are_fine() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00", "b": "\\\\ud800"}') == {"a": "😀", "b": "\\ud800"}


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_ends_at_the_limit() -> None:
    assert parse_object(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 5000, 100_000):
        assert "nested deeper" in refusal(nested(depth)).message
    assert "nested deeper" in refusal(b"[" * 5000).message


def test_brackets_within_strings_are_not_nesting() -> None:
    text = "[{" * 500 + '\n"\\' + "[{" * 100
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}


def test_unclosed_strings_are_refused_in_linear_time() -> None:
    assert refusal(b'{"a": "' + b"[" * 100 + b'\\"' * 100_000).code == "invalid_json"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "inner", "inner is missing."),
        ({"inner": 3}, "inner", "inner must be an array, not an integer."),
        ({"inner": [{"name": "a"}, {}]}, "inner[1].name", "inner[1].name is missing."),
        ({"inner": [{"name": 1}]}, "inner[0].name", "inner[0].name must be a string, not an integer."),
        (
            {"inner": [{"name": "a", "size": 1.5}]},
            "inner[0].size",
            "inner[0].size must be an integer or null, not a number.",
        ),
        ({"inner": [], "weights": {"a": 1, "k": "v"}}, "weights[k]", "weights[k] must be a number, not a string."),
        ({"inner": [], "weights": {LONG: None}}, f"weights[{CUT}]", f"weights[{CUT}] must be a number, not null."),
        ({"inner": [], "flag": None}, "flag", "flag must be true or false, not null."),
    ],
)
def test_a_wrong_field_is_named_by_its_path(body: object, param: str, message: str) -> None:
    error = refusal(json.dumps(body).encode())
    assert (error.param, error.message) == (param, message)


def test_unknown_fields_are_ignored_and_named() -> None:
    body = b'{"inner": [{"name": "a", "more": 1}], "zeal": 1, "known": 2, "tools": []}'
    value, unknown = decode(body, Shape, RULES)
    assert value == Shape([Inner("a")])
    assert unknown == ("zeal",)


def test_an_unsupported_field_is_refused_unless_it_asks_for_nothing() -> None:
    for harmless in (
        b'"tools": []',
        b'"tools": null',
        b'"mode": "plain"',
        b'"mode": "plain", "tools": [1]',
        b'"outer": {"mode": "plain"}',
        b'"outer": 3',
        b'"box": {"mode": "plain", "size": 0.0, "known": 1, "more": null}',
    ):
        decode(b'{"inner": [], ' + harmless + b"}", Shape, RULES)
    error = refusal(b'{"inner": [], "mode": "fancy"}')
    assert (error.param, error.code) == ("mode", "unsupported_parameter")
    assert refusal(b'{"inner": [], "tools": [{}]}').param == "tools"
    assert refusal(b'{"inner": [], "outer": {"mode": 1}}').param == "outer.mode"
    assert refusal(b'{"inner": [], "box": {"size": 0, "flag": true}}').param == "box.flag"
    assert refusal(b'{"inner": [], "box": 3}').param == "box"


def test_an_alias_is_the_field_that_it_stands_for() -> None:
    for body in (b'{"inner": [], "heavy": {"a": 1}}', b'{"inner": [], "heavy": {"a": 1}, "weights": {"a": 1}}'):
        assert decode(body, Shape, RULES) == (Shape([], {"a": 1}), ())
    assert decode(b'{"inner": [], "heavy": {}, "weights": {"a": 1}}', Shape, RULES) == (Shape([], {"a": 1}), ())
    assert refusal(b'{"inner": [], "heavy": {"a": 1}, "weights": {"b": 1}}').param == "heavy"
    error = refusal(b'{"inner": [], "heavy": 3}')
    assert (error.param, error.message) == ("heavy", "heavy must be an object or null, not an integer.")


class _Counted(msgspec.Struct):
    num: Annotated[int, msgspec.Meta(ge=1)]


def test_a_bound_on_one_side_is_told_alone() -> None:
    with pytest.raises(InvalidRequest, match="num must be at least 1"):
        decode(b'{"num": 0}', _Counted, {})


def test_threads_decode_types_that_none_has_used_before() -> None:
    """In a process of its own: msgspec alone crashes here, as it builds what it knows of a type at its first use."""
    program = """
import sys, threading
import msgspec
from server.api.decoding import convert
sys.setswitchinterval(1e-6)
inner = [msgspec.defstruct(f"Inner{i}", [("a", "int | None")], namespace={}) for i in range(200)]
shapes = [msgspec.defstruct(f"Shape{i}", [("x", one), ("y", "tuple[int, ...]", ())]) for i, one in enumerate(inner)]
together = threading.Barrier(4)
found = []
def work():
    for shape in shapes:
        together.wait()
        found.append(convert({"x": {"a": 1}, "y": [1]}, shape, {}).x.a)
threads = [threading.Thread(target=work) for _ in range(4)]
for one in threads: one.start()
for one in threads: one.join()
print(sum(found))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "800\n"), ended.stderr
