"""Answers that must not say what their tenant's rules forbid: held back while they may, ended where they do.

Thread: loop. A text rule ends an answer as a stop string does, before its match begins, with the finish reason
content_filter. What may be the beginning of a match is held back until that is seen, and of a pattern's no more than
HELD_CHARS: longer matches are not found.
"""

from collections.abc import Sequence

from core.detokenizer import Detokenizer, PlainTexts
from core.types import FinishReason
from server.gate.text_rules import Matcher

HELD_CHARS = 256


class TextScreen:
    """The text of one sequence, as it comes.

    Attributes:
        is_hit: it has said what it must not: nothing more comes of it.
    """

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self.is_hit = False
        self._matchers = matchers
        self._text = ""  # one character that is out, as context of what is held; and what is held
        self._num_out = 0  # 0 or 1: of these characters, those that are out

    def push(self, text: str) -> str:
        """What is safe to show now."""
        if not text or self.is_hit:
            return ""
        self._text += text
        length = len(self._text)
        hits = [span for matcher in self._matchers if (span := matcher.find(self._text, self._num_out)) is not None]
        # A match at the very end may be none once more has come ($, \b): it is held, as far as that may be
        if any(end < length or length - begin >= HELD_CHARS for begin, end in hits):
            return self._end_before(min(hits)[0])
        num_begun = max(matcher.num_begun(self._text, self._num_out) for matcher in self._matchers)
        return self._release(length - max(min(num_begun, HELD_CHARS), *(length - begin for begin, _ in hits), 0))

    def finish(self) -> str:
        """What was held, when no more comes; or what of it is before a match."""
        if self.is_hit:
            return ""
        hits = [span for matcher in self._matchers if (span := matcher.find(self._text, self._num_out)) is not None]
        if hits:
            return self._end_before(min(hits)[0])
        return self._release(len(self._text))

    def _end_before(self, begin: int) -> str:
        self.is_hit = True
        return self._text[self._num_out : begin]

    def _release(self, end: int) -> str:
        safe = self._text[self._num_out : end]
        if safe:
            self._text, self._num_out = self._text[end - 1 :], 1
        return safe


class ScreenedDetokenizer:
    """A detokenizer whose text passes a screen. A stop string or a rule stops it, whichever is complete first.

    Attributes: as Detokenizer's. What is held back counts among the tokens kept: they were drawn.
    """

    __slots__ = ("_inner", "_screen", "is_stopped", "stop_reason")

    is_plain = False  # every text passes the screen
    plain_texts: PlainTexts = ()

    def __init__(self, inner: Detokenizer, screen: TextScreen) -> None:
        self.is_stopped = False
        self.stop_reason = FinishReason.STOP
        self._inner = inner
        self._screen = screen

    @property
    def num_tokens_kept(self) -> int:
        return self._inner.num_tokens_kept

    @num_tokens_kept.setter
    def num_tokens_kept(self, num_tokens: int) -> None:
        self._inner.num_tokens_kept = num_tokens

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push_token, token_ids))

    def push_token(self, token_id: int) -> str:
        if self.is_stopped:
            return ""
        text = self._screen.push(self._inner.push_token(token_id))
        if self._inner.is_stopped:
            text += self._screen.finish()
        self._note_stop()
        return text

    def finish(self) -> str:
        if self.is_stopped:
            return ""
        text = self._screen.push(self._inner.finish()) + self._screen.finish()
        self._note_stop()
        return text

    def _note_stop(self) -> None:
        self.is_stopped = self._inner.is_stopped or self._screen.is_hit
        if self._screen.is_hit:
            self.stop_reason = FinishReason.CONTENT_FILTER
