"""Where a model's thought begins and ends: in what its prompt ends with, and token by token in its answer.

The loop and the engine follow an answer by the same rules: stop strings and grammars begin where the thought ends. Its
text is parsed by core/answer_parts.py. No I/O. Thread: each follower its owner's.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from core.tool_formats import HARMONY, THOUGHTS, ThoughtMarkers

_WHITESPACE = b" \t\r\n"
_MESSAGE, _END = b"<|message|>", b"<|end|>"
_HEADER_BEGINS = (b"<|start|>", b"<|channel|>", b"assistant", b" to=")


class ThoughtStart(StrEnum):
    """What the end of the prompt says of the thought."""

    OPEN = "open"  # it has begun
    FREE = "free"  # the model may begin one
    CLOSED = "closed"  # there is none


def thought_start(name: str, prompt: str, turn: int | None = None) -> ThoughtStart:
    """
    Args:
        name: of THOUGHTS, or HARMONY.
        prompt: rendered.
        turn: where in it the text begins that the answer goes on with; None: the answer is a message of its own.
    """
    if name == HARMONY:
        return ThoughtStart.FREE if turn is None else ThoughtStart.CLOSED
    markers = THOUGHTS[name]
    if turn is None:
        end = prompt.rstrip()
        if end.endswith(markers.begin):
            return ThoughtStart.OPEN
        return ThoughtStart.CLOSED if end.endswith(markers.end) else ThoughtStart.FREE
    text, is_begun = prompt[turn:], prompt[:turn].rstrip().endswith(markers.begin)
    begun, ended = text.rfind(markers.begin), text.rfind(markers.end)
    return ThoughtStart.OPEN if begun > ended or (is_begun and ended < 0) else ThoughtStart.CLOSED


class ThoughtFollower(Protocol):
    """Follows one answer.

    Attributes:
        is_inside: the thought has begun.
        is_over: it has ended, or there was none.
        is_last: and no other may follow; until then its tokens are counted.
        num_tokens: of it, with its markers.
        is_header: the next token is one that says what follows it, not a text's; the answer's first may be either.
        tail: the end of the text, which may belong to a marker.
    """

    is_inside: bool
    is_over: bool
    is_header: bool
    num_tokens: int
    tail: bytes

    @property
    def is_thinking(self) -> bool:
        """The next token is one between the markers."""

    @property
    def is_last(self) -> bool: ...

    def push(self, token_id: int) -> bytes:
        """The next token, until it is over.

        Returns: what came behind the thought, with the token that ended it.
        """


class MarkedThought:
    """A thought between two markers, which may be cut into tokens in any way. Implements ThoughtFollower.

    Args:
        bytes_of: a token, special ones by name.
    """

    def __init__(self, markers: ThoughtMarkers, is_open: bool, bytes_of: Callable[[int], bytes]) -> None:
        self.is_inside = is_open
        self.is_over = self.is_header = False
        self.num_tokens = 0
        self.tail = b""
        self._begin, self._end = markers.begin.encode(), markers.end.encode()
        self._bytes_of = bytes_of
        self._num_seen = 0

    @property
    def is_thinking(self) -> bool:
        return self.is_inside and not self.is_over

    @property
    def is_last(self) -> bool:
        return self.is_over

    def push(self, token_id: int) -> bytes:
        self._num_seen += 1
        self.tail += self._bytes_of(token_id)
        if not self.is_inside:
            text = self.tail.lstrip(_WHITESPACE)
            if not text.startswith(self._begin):
                self.is_over = not self._begin.startswith(text)
                return self.tail if self.is_over else b""
            self.is_inside, self.tail = True, text[len(self._begin) :]
        self.num_tokens = self._num_seen
        before, end, after = self.tail.partition(self._end)
        self.is_over = bool(end)
        self.tail = b"" if end else before[-(len(self._end) - 1) :]
        return after


class HarmonyThought:
    """gpt-oss's: all before the first message of another channel than analysis. Implements ThoughtFollower.

    Args:
        only_final: before the first message of the channel final.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], only_final: bool = False) -> None:
        self.is_inside = False
        self.is_over = False
        self.num_tokens = 0
        self.tail = b""
        self.is_last = False
        self.is_thinking = False
        self._bytes_of = bytes_of
        self._only_final = only_final
        self.is_header = True
        self._num_in_header = 0

    def push(self, token_id: int) -> bytes:
        self.tail += self._bytes_of(token_id)
        if not self.is_header:
            self.num_tokens += self.is_thinking
            self.is_header = self.tail.endswith(_END)
            self.is_thinking &= not self.is_header
            self.tail = b"" if self.is_header else self.tail[-len(_END) :]
            return b""
        self._num_in_header += 1
        header, found, after = self.tail.partition(_MESSAGE)
        if not found:
            is_none = not any(self.tail.startswith(one[: len(self.tail)]) for one in _HEADER_BEGINS)
            if is_none and not self._only_final:  # a model may forget the header
                self.is_over = self.is_last = True
                self.is_header = False
                return self.tail
            return b""
        self.is_thinking = b"<|channel|>analysis" in header
        self.is_last = b"<|channel|>final" in header or b" to=functions." in header
        self.is_over |= b"<|channel|>final" in header if self._only_final else not self.is_thinking
        if self.is_thinking:
            self.is_inside = True
            self.num_tokens += self._num_in_header
        self.is_header, self._num_in_header, self.tail = False, 0, b""
        return after


def follower(
    name: str, start: ThoughtStart, bytes_of: Callable[[int], bytes], only_final: bool = False
) -> ThoughtFollower | None:
    """Of an answer; None: it has no thought.

    Args:
        name: of THOUGHTS, or HARMONY.
        bytes_of: a token, special ones by name.
        only_final: of Harmony, it is over where the channel final begins; otherwise where any but analysis does.
    """
    if start is ThoughtStart.CLOSED:
        return None
    if name == HARMONY:
        return HarmonyThought(bytes_of, only_final)
    return MarkedThought(THOUGHTS[name], start is ThoughtStart.OPEN, bytes_of)
