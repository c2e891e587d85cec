"""Text rules: what a tenant's prompts and answers must not contain, from [[tenants.text_rules]]. Thread: loop.

A phrase is literal. A pattern is RE2's, which never backtracks: its time is linear in the text.
A match ends an answer as a stop string does, where it begins, with the finish reason content_filter. Text that may be
the beginning of a match is withheld until that is known; of a pattern's at most HELD_CHARS: longer matches are missed.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from core.detokenizer import Detokenizer, PlainTexts
from core.errors import InvalidRequest, StartupError
from core.types import FinishReason

MAX_RULES = 256
HELD_CHARS = 256
RANGE_BYTES = 32  # of a match, by which its possible beginnings are recognized
PATTERN_MEMORY_BYTES = 1 << 20
# \b and \B, as against escaped letters and quoted text; in a class RE2 takes neither
_WORD_BOUNDARY = re.compile(r"\\Q.*?(?:\\E|\Z)|\\[bB]|\\.", re.DOTALL)

_Phrase = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class TextRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    Args:
        phrase, pattern: exactly one of them.
        on: where it applies.
    """

    phrase: _Phrase | None = None
    pattern: _Pattern | None = None
    ignore_case: bool = False
    on: Literal["prompt", "answer", "both"] = "both"

    def __post_init__(self) -> None:
        if (self.phrase is None) == (self.pattern is None):
            raise ValueError("a rule has either a phrase or a pattern")


class PhrasesMatcher:
    """All phrases of one case rule: a token's text is folded and scanned once for all of them."""

    def __init__(self, phrases: Iterable[str], ignores_case: bool) -> None:
        self._ignores_case = ignores_case
        self._phrases = [_folded(one) if ignores_case else one for one in phrases]
        self._longest = max(map(len, self._phrases))
        self._by_first: dict[str, list[str]] = {}
        for phrase in self._phrases:
            self._by_first.setdefault(phrase[0], []).append(phrase)

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        """Begin and end of the first match at or after `start`. The text before `start` is context."""
        text = _folded(text) if self._ignores_case else text
        found = None
        for phrase in self._phrases:
            at = text.find(phrase, start)
            if at >= 0 and (found is None or (at, at + len(phrase)) < found):
                found = at, at + len(phrase)
        return found

    def num_begun(self, text: str, start: int) -> int:
        """How many characters at the end of `text`, from `start` on, may be the beginning of a match."""
        start = max(start, len(text) - self._longest + 1)
        tail = _folded(text[start:]) if self._ignores_case else text[start:]
        for i, first in enumerate(tail):
            num = len(tail) - i
            for phrase in self._by_first.get(first, ()):
                if len(phrase) > num and phrase.startswith(tail[i:]):
                    return num
        return 0


class PatternMatcher:
    """Raises ValueError if RE2 does not accept the pattern."""

    def __init__(self, pattern: str, ignores_case: bool) -> None:
        import re2

        options = re2.Options()
        options.case_sensitive = not ignores_case
        options.log_errors = False
        options.max_mem = PATTERN_MEMORY_BYTES
        try:
            self._regexp: Any = re2.compile(pattern, options)
            # RE2 tells the range of matches at the beginning of a text. A word boundary may hold elsewhere though not
            # there: assume that every one holds
            unbounded: Any = re2.compile(_WORD_BOUNDARY.sub(_without_boundary, pattern), options)
        except re2.error as error:
            cause = error.args[0]
            raise ValueError(cause.decode() if isinstance(cause, bytes) else str(cause)) from None
        if unbounded.search("") is not None:
            raise ValueError("the pattern matches the empty string")
        try:
            low, high = unbounded.possiblematchrange(RANGE_BYTES)
        except re2.error:
            low = high = b""
        self._range = (low, high) if high else None  # None: unknown
        self._ascii_firsts = frozenset(map(chr, range(low[0] if low else 0, min(high[0], 127) + 1) if high else ()))

    def find(self, text: str, start: int) -> tuple[int, int] | None:
        match = self._regexp.search(text, start)
        return None if match is None else match.span()

    def num_begun(self, text: str, start: int) -> int:
        if self._range is None:
            return len(text) - start
        low, high = self._range
        for i in range(start, len(text)):
            if text[i] not in self._ascii_firsts and text[i].isascii():
                continue
            tail = text[i : i + RANGE_BYTES].encode("utf-8", "replace")[:RANGE_BYTES]
            if low.startswith(tail) or low <= tail <= high:
                return len(text) - i
        return 0


Matcher = PhrasesMatcher | PatternMatcher


class RuleBook:
    """A tenant's compiled rules, for prompts and for answers."""

    def __init__(self, rules: Sequence[TextRule]) -> None:
        self.on_prompt = _matchers([rule for rule in rules if rule.on != "answer"])
        self.on_answer = _matchers([rule for rule in rules if rule.on != "prompt"])

    def check_prompt(self, texts: Iterable[str], param: str, is_echoed: bool = False) -> None:
        """Raises InvalidRequest if one of the texts breaks a rule.

        Args:
            is_echoed: the answer repeats them.
        """
        matchers = (*self.on_prompt, *self.on_answer) if is_echoed else self.on_prompt
        for text in texts:
            if any(matcher.find(text, 0) for matcher in matchers):
                message = "The prompt has text that the operator of this server does not allow. Leave it out."
                raise InvalidRequest(message, param, "content_filter")


@functools.lru_cache(maxsize=256)
def rule_book(rules: tuple[TextRule, ...]) -> RuleBook:
    """Cached."""
    return RuleBook(rules)


def check_rules(rules: tuple[TextRule, ...], owner: str) -> None:
    """Raises StartupError, which names the owner: there are too many, or a pattern is not valid."""
    if len(rules) > MAX_RULES:
        cause = f"{owner} has {len(rules)} text_rules"
        raise StartupError(cause, f"at most {MAX_RULES}: join patterns by |")
    for rule in rules:
        if rule.pattern is None:
            continue
        try:
            _matchers([rule])
        except ValueError as error:
            cause = f"{owner} has a text rule whose pattern {rule.pattern!r} is not valid: {error}"
            fix = "write it as https://github.com/google/re2/wiki/Syntax says"
            raise StartupError(cause, fix) from error
    rule_book(rules)


def _matchers(rules: Sequence[TextRule]) -> tuple[Matcher, ...]:
    """Raises ValueError if RE2 does not accept a pattern."""
    found: list[Matcher] = [
        PatternMatcher(rule.pattern, rule.ignore_case) for rule in rules if rule.pattern is not None
    ]
    for ignores_case in (False, True):
        phrases = [one.phrase for one in rules if one.phrase is not None and one.ignore_case is ignores_case]
        if phrases:
            found.append(PhrasesMatcher(phrases, ignores_case))
    return tuple(found)


def _without_boundary(token: re.Match[str]) -> str:
    return "(?:)" if token[0] in (r"\b", r"\B") else token[0]


def _folded(text: str) -> str:
    """In lower case, character by character: the length stays the same."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    return "".join(one if len(one.lower()) != 1 else one.lower() for one in text)


class TextScreen:
    """Screens the text of one sequence, piece by piece.

    Attributes:
        is_hit: a rule has matched: no more text is released.
    """

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self.is_hit = False
        self._matchers = matchers
        self._text = ""  # the last released character, as context, and the withheld text
        self._num_out = 0  # 0 or 1: characters of _text that are released

    def push(self, text: str) -> str:
        """Returns what can be released now."""
        if not text or self.is_hit:
            return ""
        self._text += text
        length = len(self._text)
        hits = [span for matcher in self._matchers if (span := matcher.find(self._text, self._num_out)) is not None]
        # A match at the very end may be void when more text comes ($, \b): withhold it, up to HELD_CHARS
        if any(end < length or length - begin >= HELD_CHARS for begin, end in hits):
            return self._end_before(min(hits)[0])
        num_begun = max(matcher.num_begun(self._text, self._num_out) for matcher in self._matchers)
        return self._release(length - max(min(num_begun, HELD_CHARS), *(length - begin for begin, _ in hits), 0))

    def finish(self) -> str:
        """No more text comes. Returns what was withheld, up to a match."""
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

    Attributes: as Detokenizer's. Tokens of withheld text count as kept: they were sampled.
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

    @property
    def stopped_by(self) -> str | None:
        return None if self._screen.is_hit else self._inner.stopped_by

    @property
    def cut_text(self) -> str:
        return self._inner.cut_text

    @property
    def num_thought_tokens(self) -> int:
        return self._inner.num_thought_tokens

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
