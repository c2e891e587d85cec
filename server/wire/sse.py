"""Server-sent events as bytes, ready to write: framing, and JSON that stays on its one line. Thread: loop.

A data line ends at the first CR or LF, so what goes into it is JSON, whose escapes leave neither. U+2028, U+2029 and
U+0085 are escaped too: JSON allows them, but clients that split lines by Unicode's rules would break an event.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # parsers skip it, proxies see traffic
EVENT_END = b"\n\n"

# The texts of a vocabulary are sent again and again
_REMEMBERED_CHARS = 32
_NUM_REMEMBERED = 64 * 1024

_encode = msgspec.json.encode  # 40 ns where json.dumps takes 260 and orjson 50
_needs_care = re.compile("[\x85\u2028\u2029\ud800-\udfff]").search  # faster than searching the bytes
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event_head(name: str | None = None) -> bytes:
    """The bytes before an event's JSON; EVENT_END follows it."""
    return b"data: " if name is None else f"event: {name}\ndata: ".encode("ascii")


def event(line: bytes, name: str | None = None) -> bytes:
    """One whole event. `line` is from json_line: an event's data must not contain a line break."""
    return event_head(name) + line + EVENT_END


def comment(text: str) -> bytes:
    """A line that event parsers skip. `text` has no line breaks."""
    return b": " + text.encode() + EVENT_END


def json_string(text: str) -> bytes:
    """`text` as a JSON string with its quotes, on one line. Lone surrogates become U+FFFD."""
    if text.isascii() or not _needs_care(text):
        return _encode(text)
    return json_line(text)


class _JsonStrings(dict[str, bytes]):
    """json_string as a mapping, cached for short texts."""

    def __missing__(self, text: str) -> bytes:
        encoded = json_string(text)
        if len(text) <= _REMEMBERED_CHARS:
            if len(self) >= _NUM_REMEMBERED:
                self.clear()
            self[text] = encoded
        return encoded


json_strings = _JsonStrings()


def json_line(value: Any) -> bytes:
    """`value` (dicts, lists, strings, numbers) as JSON in UTF-8, on one line. Lone surrogates become U+FFFD."""
    try:
        line = _encode(value)
    except UnicodeEncodeError:
        line = _without_surrogates(json.dumps(value, ensure_ascii=False, separators=(",", ":"))).encode()
    if b"\xe2\x80" in line or b"\xc2\x85" in line:
        for bare, escaped in _SEPARATORS:
            line = line.replace(bare, escaped)
    return line


def with_fields(line: bytes, fields: Mapping[str, Any]) -> bytes:
    """A JSON object that has fields, with others."""
    return line[:-1] + b"," + json_line(fields)[1:] if fields else line


def _without_surrogates(text: str) -> str:
    """Pairs joined, lone ones replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
