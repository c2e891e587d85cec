"""Turns token ids into text that is safe to emit: whole characters, and nothing that may become a stop string.

One Detokenizer per sequence, one TokenTable per model. Thread: loop. It cuts stop strings; it does no I/O.
"""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from core.thoughts import ThoughtFollower
from core.token_bytes import TokenBytes
from core.types import FinishReason

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class PlainTexts(Protocol):
    def __getitem__(self, token_id: int, /) -> str | None: ...


class TokenTable:
    """The text of each id. Shared by all sequences of a model; its bytes by all tables of a model.

    Args:
        token_bytes: [vocab_size], the bytes of each id; empty for gaps.
        strip_start: how many leading spaces of a whole text the tokenizer adds (1 for Llama 2's, else 0).
        hidden: ids that are not shown (special tokens).
    """

    def __init__(self, token_bytes: Collection[bytes], strip_start: int = 0, hidden: Collection[int] = ()) -> None:
        self.token_bytes = TokenBytes.of(token_bytes)
        self.strip_start, self._hidden = strip_start, frozenset(hidden)
        self.texts: list[str | None] = [None] * len(self.token_bytes)  # what text_of has returned
        self._parts, self._known = set[int](), self.token_bytes.known  # of characters; objects

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id; none for an unknown id (logits are often padded)."""
        if not 0 <= token_id < len(self.texts) or token_id in self._hidden:
            return b""
        found = self._known[token_id]
        if found is None:
            found = self._known[token_id] = self.token_bytes[token_id]
        return found

    def text_of(self, token_id: int) -> str | None:
        """The text of one known id; None: it is not whole characters by itself."""
        text = self.texts[token_id]
        if text is None and token_id not in self._parts:
            try:
                self.texts[token_id] = text = self.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                self._parts.add(token_id)
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence of ids."""
        text = b"".join(map(self.bytes_of, token_ids)).decode("utf-8", errors="replace")
        return text[_num_leading_spaces(text, self.strip_start) :]


class _TextsWithout(dict[int, str | None]):
    """By id, the texts that can neither begin a stop string nor contain one; None: it may. Filled as needed."""

    def __init__(self, table: TokenTable, firsts: Sequence[str]) -> None:
        self._table = table
        self._firsts = firsts  # of the stop strings: their first characters

    def __missing__(self, token_id: int) -> str | None:
        text = self._table.text_of(token_id)
        if text is not None and any(first in text for first in self._firsts):
            text = None
        self[token_id] = text
        return text


class Detokenizer:
    """The text of one sequence, as its tokens come. It does not depend on how the tokens are grouped.

    A text ends before the stop string that is completed first; of two completed by the same character, before the
    longer one. Bytes that are not UTF-8 become U+FFFD as in `bytes.decode("utf-8", "replace")` of the whole.

    Args:
        stop: strings that end the text and are not part of it; none of them empty.
        min_tokens: a stop string within so many tokens does not end the text, and is part of it.
        continues_text: the tokens continue a text (raw completions) and keep their leading space; a text of its own (a
            chat's answer) loses the space that the tokenizer adds.
        thought: that the answer begins with, or may: stop strings are searched behind it.

    Attributes:
        is_plain: nothing is held or to be stripped: the next token's text is its entry in plain_texts.
        plain_texts: by id, texts that depend on no other token; None or IndexError: call push_token.
        num_tokens_kept: tokens up to the one that completed the stop string. Readers of plain_texts must count here.
        stopped_by: the stop string that was completed.
        cut_text: of the kept tokens, from that string on: what it has cut off.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_is_in_character",
        "_min_tokens",
        "_num_to_strip",
        "_stop",
        "_stop_firsts",
        "_table",
        "_thought",
        "cut_text",
        "is_plain",
        "is_stopped",
        "num_tokens_kept",
        "plain_texts",
        "stopped_by",
    )

    stop_reason = FinishReason.STOP  # of a sequence whose text is stopped

    def __init__(
        self,
        table: TokenTable,
        stop: tuple[str, ...] = (),
        continues_text: bool = False,
        min_tokens: int = 0,
        thought: ThoughtFollower | None = None,
    ) -> None:
        self.is_stopped = False
        self.stopped_by: str | None = None
        self.cut_text = ""
        self.num_tokens_kept = 0
        self._min_tokens = min_tokens
        self._table = table
        self._stop = stop
        self._stop_firsts = tuple({string[0] for string in stop})
        self._is_in_character = False  # the decoder holds the first bytes of a character
        self._held = ""  # decoded, but may yet become a stop string
        self._num_to_strip = 0 if continues_text else table.strip_start
        self._decoder = _new_utf8_decoder(errors="replace")
        self._thought = thought
        self.is_plain = not self._num_to_strip and thought is None
        self.plain_texts: PlainTexts = _TextsWithout(table, self._stop_firsts) if stop else table.texts

    @property
    def num_thought_tokens(self) -> int:
        """Of the tokens kept."""
        return 0 if self._thought is None else self._thought.num_tokens

    def push_token(self, token_id: int) -> str:
        """Take the sequence's next token; return the text that is safe to emit now. Empty once it is stopped."""
        if self.is_plain:
            try:
                text = self.plain_texts[token_id]
            except IndexError:
                text = ""
            if text is not None:
                self.num_tokens_kept += 1
                return text
        return self._take(token_id)

    def finish(self) -> str:
        """The text that was held back, when no more tokens come. Empty for a stopped text."""
        if self.is_stopped:
            return ""
        rest = self._strip(self._decoder.decode(b"", final=True))
        if not self._stop:
            return rest
        if self._thought is not None and (self._thought.is_header or not self._thought.is_over):
            rest, self._held = self._held + rest, ""
            if self._thought.is_header or self._thought.is_inside:
                return rest
        text = self._emit(rest) + self._held
        self._held = ""
        return text

    def _take(self, token_id: int) -> str:
        if self.is_stopped:
            return ""
        self.num_tokens_kept += 1
        text = self._decode(token_id)
        if self._num_to_strip:
            text = self._strip(text)
        if self._thought is not None and (self._thought.is_header or not self._thought.is_over):
            text = self._follow(token_id, text)
        else:
            if self._thought is not None and not self._thought.is_last:
                self._thought.push(token_id)
            text = self._emit(text) if self._stop and text else text
        is_held = self._num_to_strip or self._is_in_character or self._held or self.is_stopped
        self.is_plain = not (is_held or (self._thought is not None and not self._thought.is_last))
        return text

    def _follow(self, token_id: int, text: str) -> str:
        """The text of a token of the thought or of a message's header, or of one that may begin them."""
        assert self._thought is not None, "there is one"
        after = self._thought.push(token_id)
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        if self._thought.is_over and not self._thought.is_header:
            end = max(0, len(text) - len(after.decode("utf-8", "ignore")))
            return text[:end] + (self._emit(text[end:]) if end < len(text) else "")
        if not (self._thought.is_inside or self._thought.is_over):  # it may be the answer
            text, self._held = "", text
        return text

    def _decode(self, token_id: int) -> str:
        if not self._is_in_character and 0 <= token_id < len(self._table.texts):
            text = self._table.text_of(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._table.bytes_of(token_id))
        self._is_in_character = bool(self._decoder.getstate()[0])
        return text

    def _strip(self, text: str) -> str:
        num_spaces = _num_leading_spaces(text, self._num_to_strip)
        self._num_to_strip = self._num_to_strip - num_spaces if num_spaces == len(text) else 0
        return text[num_spaces:]

    def _emit(self, text: str) -> str:
        num_held = len(self._held)
        if num_held:
            text = self._held + text
        elif not any(first in text for first in self._stop_firsts):
            return text
        found = _first_stop(text, self._stop, num_held) if self.num_tokens_kept > self._min_tokens else None
        if found is not None:
            end, self.stopped_by = found
            self.is_stopped = True
            self._held, self.cut_text = "", text[end:]
            return text[:end]
        num_safe = len(text) - max(_num_begun(text, string) for string in self._stop)
        self._held = text[num_safe:]
        return text[:num_safe]


def _num_leading_spaces(text: str, limit: int) -> int:
    return min(limit, len(text) - len(text.lstrip(" ")))


def _first_stop(text: str, stop: tuple[str, ...], num_old: int) -> tuple[int, str] | None:
    """Where the stop string begins that is completed first, the longest of several, and which; None without one.

    Args:
        num_old: leading characters in which no stop string is completed.
    """
    starts = ((string, text.find(string, max(0, num_old - len(string) + 1))) for string in stop)
    found = [(at + len(string), at, string) for string, at in starts if at >= 0]
    return min(found)[1:] if found else None


def _num_begun(text: str, string: str) -> int:
    """The length of the longest end of text that is the beginning of a stop string."""
    at = text.find(string[0], max(0, len(text) - len(string) + 1))
    while at >= 0:
        if string.startswith(text[at:]):
            return len(text) - at
        at = text.find(string[0], at + 1)
    return 0
