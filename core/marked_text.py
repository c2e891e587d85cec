"""A str that records which characters a request wrote, so that users cannot inject a chat's control tokens.

Requests' strings enter a chat template as MarkedText. They behave like any str and keep their marks when templates
join, cut, split, replace, format or upper-case them. The result of an operation that is not known here is marked whole.
No I/O. Thread: the one that renders.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, SupportsIndex


class Origin(IntEnum):
    """Who wrote a character. The highest of several counts."""

    TEMPLATE = 0
    MODEL = 1  # assistants' turns, which the model wrote, and system texts, which instruct it
    CALL = 2  # within an assistant's calls: arguments are text, whatever they spell
    USER = 3  # everything else in a request


# Replace an origin's characters when an operation is tried out: noncharacters, which no template writes
_SHADOWS = {Origin.MODEL: "\U0010fffe", Origin.CALL: "\U000fffff", Origin.USER: "\U0010ffff"}
_SHADOWED = {shadow: origin for origin, shadow in _SHADOWS.items()}
_SHADOW_RUNS = re.compile("|".join(f"{shadow}+" for shadow in _SHADOWED))


class MarkedText(str):
    """A text with an Origin for each character.

    Args:
        origins: [characters]; None: all are a user's.
    """

    __slots__ = ("origins",)

    origins: bytes

    def __new__(cls, text: str, origins: bytes | None = None) -> "MarkedText":
        made = super().__new__(cls, text)
        made.origins = bytes((Origin.USER,)) * len(text) if origins is None else origins
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> "MarkedText":
        origins = self.origins[key]
        return MarkedText(super().__getitem__(key), bytes((origins,)) if isinstance(origins, int) else origins)

    def __iter__(self) -> Iterator["MarkedText"]:
        return (self[at] for at in range(len(self)))

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def strip(self, chars: str | None = None, /) -> "MarkedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "MarkedText":
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> "MarkedText":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "MarkedText":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), "" if sep is None else sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts: list[str] = []
        end = len(self)
        for part in reversed(super().rsplit(sep, maxsplit)):
            at = self.rfind(part, 0, end)
            parts.append(self[at : at + len(part)])
            end = at - len(sep or "")
        return parts[::-1]

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        at = self.find(sep)
        return (self, "", "") if at < 0 else (self[:at], self[at : at + len(sep)], self[at + len(sep) :])

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        at = self.rfind(sep)
        return ("", "", self) if at < 0 else (self[:at], self[at : at + len(sep)], self[at + len(sep) :])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return _all_marked(super().replace(old, new, count), highest((self, new)))
        first, *rest = self.split(old, count)
        return joined([first, *(piece for part in rest for piece in (new, part))])

    def _located(self, parts: list[str], sep: str = "") -> list[str]:
        """Mark the parts, which follow each other in this text with `sep` between them."""
        found: list[str] = []
        end = 0
        for part in parts:
            at = self.find(part, end)
            found.append(self[at : at + len(part)])
            end = at + len(part) + len(sep)
        return found


class JsonText(str):
    """A call's arguments that were cut off, so that they are no JSON value: tojson writes them as they are."""

    __slots__ = ()


class _MarkedJson(MarkedText, JsonText):
    __slots__ = ()


def marked(value: Any, origin: Origin) -> Any:
    """A JSON value with every string marked, names included; those that are marked already stay as they are."""
    if isinstance(value, MarkedText):
        return value
    if isinstance(value, str):
        kind = _MarkedJson if isinstance(value, JsonText) else MarkedText
        return kind(value, bytes((origin,)) * len(value))
    if isinstance(value, dict):
        return {marked(name, origin): marked(item, origin) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [marked(item, origin) for item in value]
    return value


def json_texts(value: Any) -> Iterator[JsonText]:
    """Those in a JSON value."""
    if isinstance(value, JsonText):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from json_texts(one)


def unmarked(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, MarkedText) else value


def joined(pieces: Iterable[str]) -> str:
    """ "".join, keeping marks."""
    texts = list(pieces)
    plain = "".join(texts)
    if not any(isinstance(text, MarkedText) for text in texts):
        return plain
    return MarkedText(
        plain, b"".join(text.origins if isinstance(text, MarkedText) else bytes(len(text)) for text in texts)
    )


def written(value: Any) -> str:
    """str(), keeping marks; a written list or dict is marked whole."""
    if isinstance(value, str):
        return str(value)
    return _all_marked(str(value), highest(value))


def highest(value: Any) -> int:
    """The highest origin of all characters in a value."""
    if isinstance(value, MarkedText):
        return max(value.origins, default=0)
    if isinstance(value, dict):
        return max(highest(tuple(value.keys())), highest(tuple(value.values())))
    if isinstance(value, list | tuple):
        return max(map(highest, value), default=0)
    return 0


def tracked(result: Any, inputs: tuple[Any, ...], again: Callable[..., Any] | None = None) -> Any:
    """Mark what an operation made of its inputs.

    Args:
        again: the operation. It is repeated with every marked character replaced by one that stands for its origin: if
            that gives a text of the same shape, it shows where each origin went. Otherwise, or without it, the whole
            result is marked.
    """
    if not isinstance(result, str) or isinstance(result, MarkedText) or not (origin := highest(inputs)):
        return result
    if again is not None:
        try:
            shadow = again(*map(_shadowed, inputs))
        except Exception:  # the operation depends on the text's content
            shadow = None
        if isinstance(shadow, str) and (origins := _origins_by(shadow, result)) is not None:
            return MarkedText(result, origins)
    return _all_marked(result, origin)


def _all_marked(text: str, origin: int) -> str:
    return MarkedText(text, bytes((origin,)) * len(text)) if origin else text


def _shadowed(value: Any) -> Any:
    if isinstance(value, MarkedText):
        pairs = zip(str.__iter__(value), value.origins, strict=True)
        text = "".join(_SHADOWS[Origin(origin)] if origin else character for character, origin in pairs)
        return JsonText(text) if isinstance(value, JsonText) else text
    if isinstance(value, dict):
        return {_shadowed(name): _shadowed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_shadowed, value))
    return value


def _origins_by(shadow: str, text: str) -> bytes | None:
    """None: the shadow has another shape than the text."""
    if len(shadow) != len(text):
        return None
    origins = bytearray(len(text))
    end = 0
    for match in _SHADOW_RUNS.finditer(shadow):
        origins[match.start() : match.end()] = bytes((_SHADOWED[match[0][0]],)) * len(match[0])
        if shadow[end : match.start()] != text[end : match.start()]:
            return None
        end = match.end()
    return bytes(origins) if shadow[end:] == text[end:] else None
