"""JSON of long bodies, in steps. Thread: wherever a long body is offloaded to.

json's own scanner takes a body in one call to C, and no other thread runs meanwhile: 0.4 s for 300,000 keys. Here
Python goes from value to value, and gives way between them; strings and numbers are still read by C. What is
taken and what is refused is the same (tests/server/api/test_long_json.py), and how many values there may be is bounded.
"""

import json
import re
from _json import scanstring  # json.decoder's
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
MAX_VALUES = 100_000  # those of _IDS aside: a few microseconds, and up to 60 bytes for two on the wire

_RUN = 1000  # numbers that are taken in one step: some 0.1 ms
_SPACE = re.compile(r"[ \t\n\r]*+")
# Whole numbers that others follow; no `}+`, which Python before 3.11.5 matches wrongly (gh-106052)
_IDS = re.compile(rf"(?:-?(?:0|[1-9][0-9]{{0,17}})[ \t\n\r]*+,[ \t\n\r]*+){{1,{_RUN}}}")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*+))(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_WORDS = {"true": True, "false": False, "null": None}
_WORD = re.compile(r"true|false|null|NaN|-?Infinity")


class UnfitJson(Exception):
    """What may not stand in a body, though it is JSON, or near it; str() says what."""


class TooMuchJson(Exception):
    """It is more than is read of one body; str() says in what."""


class LongJson:
    """One text on its way to values."""

    def __init__(self, text: str, finite: Callable[[str], float]) -> None:
        """
        Args:
            finite: reads a number that is no integer.
        """
        self._text = text
        self._finite = finite
        self._num_values = 0

    def parse(self) -> Any:
        """
        Raises:
            json.JSONDecodeError: it is no JSON.
            UnfitJson: it could be read in two ways, or not at all.
            TooMuchJson: it has too many values, or is nested too deep.
            ValueError: it has an integer of thousands of digits.
        """
        value, at = self._value(self._after_space(0), 0)
        at = self._after_space(at)
        if at < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _after_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        assert match is not None
        return match.end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins there, and where it ends."""
        text = self._text
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TooMuchJson(f"has more than {MAX_VALUES} values, whole numbers in arrays not counted")
        char = text[at : at + 1]
        if char == '"':
            return self._string(at + 1)
        if char == "{":
            return self._object(at + 1, depth + 1)
        if char == "[":
            return self._array(at + 1, depth + 1)
        if number := _NUMBER.match(text, at):
            integer, fraction, exponent = number.groups("")
            is_integer = not fraction and not exponent
            return int(integer) if is_integer else self._finite(number[0]), number.end()
        word = _WORD.match(text, at)
        if word is None:
            raise json.JSONDecodeError("Expecting value", text, at)
        if word[0] not in _WORDS:
            raise UnfitJson(f"{word[0]} is not a JSON number")
        return _WORDS[word[0]], word.end()

    def _string(self, at: int) -> tuple[str, int]:
        value, end = scanstring(self._text, at, True)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise UnfitJson("a \\u escape is half of a surrogate pair") from None
        return value, end

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        text, result = self._text, dict[str, Any]()
        _check_depth(depth)
        at = self._after_space(at)
        if text.startswith("}", at):
            return result, at + 1
        while True:
            if not text.startswith('"', at):
                raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
            key, at = self._string(at + 1)
            at = self._after_space(at)
            if not text.startswith(":", at):
                raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
            if key in result:
                raise UnfitJson(f"the key {key[:64]!r} appears twice in one object")
            result[key], at = self._value(self._after_space(at + 1), depth)
            is_over, at = self._next(at, "}")
            if is_over:
                return result, at

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        text, result = self._text, list[Any]()
        _check_depth(depth)
        at = self._after_space(at)
        if text.startswith("]", at):
            return result, at + 1
        while True:
            while run := _IDS.match(text, at):
                result += map(int, run[0].split(",")[:-1])
                at = run.end()
            value, at = self._value(at, depth)
            result.append(value)
            is_over, at = self._next(at, "]")
            if is_over:
                return result, at

    def _next(self, at: int, end: str) -> tuple[bool, int]:
        """Behind a value: whether its array or object is over, and what comes after that, or after the comma."""
        at = self._after_space(at)
        char = self._text[at : at + 1]
        if char == ",":
            return False, self._after_space(at + 1)
        if char == end:
            return True, at + 1
        raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise TooMuchJson(f"is nested deeper than {MAX_DEPTH}")
