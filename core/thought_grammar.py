"""Holds an answer that begins with a thought: the thought may be bounded, and a grammar begins where it ends.

Within the thought the model is free, but for what would leave no answer: its end, and tokens that have the thought's
end and the answer's beginning in one. Where the thought has as many tokens as it may, its end marker is forced. No I/O.
Thread: states the engine's.
"""

import copy
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.grammar import Grammar, GrammarState, Int32Array, allow, forbid
from core.thoughts import ThoughtFollower, ThoughtStart, follower
from core.token_bytes import TokenBytes
from core.tool_formats import HARMONY, THOUGHTS

MOST_BREAKS = 2  # line breaks between a thought and an answer that a grammar holds: models were trained to write them
MOST_ROLLED_BACK = 64
_NEWLINES = re.compile(rb"\n+")
_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


class ThoughtVocabulary:
    """What a model's thoughts begin and end with, as tokens. Made once.

    Args:
        name: of THOUGHTS, or HARMONY.
        token_bytes: of each id, special ones by name.
        encode: ids of a text, without special tokens around it.
        eos_ids: any of which ends an answer.
    """

    def __init__(
        self, name: str, token_bytes: Sequence[bytes], encode: Callable[[str], Sequence[int]], eos_ids: Sequence[int]
    ) -> None:
        self.name = name
        self.token_bytes = tokens = TokenBytes.of(token_bytes)
        self.encode = encode
        self.eos_ids = tuple(eos_ids)
        self.is_harmony = name == HARMONY
        self.begin, self.end = b"", b""
        self.begin_parts: list[tuple[int, bytes]] = []  # tokens of which its beginning may be made
        self.overruns: list[tuple[int, bytes]] = []  # tokens that may end it with more than line breaks behind
        self.breaks: list[tuple[int, int]] = []  # line breaks alone, with their number
        self.analysis_parts: list[int] = []  # tokens that begin the name of Harmony's channel of thoughts
        if self.is_harmony:
            parts = [b"analysis"[:num] for num in range(1, 9)]
            self.analysis_parts = [token_id for token_id, data in tokens.beginning_with(b"a").items() if data in parts]
            return
        self.begin, self.end = THOUGHTS[name].begin.encode(), THOUGHTS[name].end.encode()
        ends = b"|".join(re.escape(self.end[at:]) for at in range(len(self.end)))
        overrun = re.compile(b"(?:%b)\n*[^\n]|.*%b\n*[^\n]" % (ends, re.escape(self.end)), re.DOTALL)
        found = tokens.beginning_with(self.begin + self.end + b"\n")
        found |= {token_id: tokens[token_id] for token_id in tokens.containing(self.end)}
        for token_id, data in sorted(found.items()):
            if data in self.begin:
                self.begin_parts.append((token_id, data))
            if overrun.match(data):
                self.overruns.append((token_id, data))
            if _NEWLINES.fullmatch(data):
                self.breaks.append((token_id, len(data)))

    def follow(self, start: ThoughtStart, only_final: bool = False) -> ThoughtFollower:
        made = follower(self.name, start, self.bytes_of, only_final)
        assert made is not None, "the prompt has not closed it"
        return made

    def bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def end_after(self, tail: bytes) -> list[int]:
        """The tokens that end a thought whose text ends so, perhaps with the first of its end marker."""
        if self.is_harmony:
            return list(self.encode(_FINAL))
        num = next(num for num in range(len(self.end), -1, -1) if tail.endswith(self.end[:num]))
        return list(self.encode(self.end[num:].decode()))


@dataclass(frozen=True, slots=True)
class AfterThought:
    """What holds an answer and its thought. Shared by the sequences of a request.

    Args:
        answer: None: anything may come behind the thought.
            Of Harmony it holds the whole, its thoughts too.
        most_tokens: of the thought, between its markers; None: any number.
    """

    vocabulary: ThoughtVocabulary
    start_at: ThoughtStart
    answer: Grammar | None
    most_tokens: int | None = None

    def start(self) -> GrammarState:
        if self.answer is not None and self.vocabulary.is_harmony:
            return self.answer.start() if self.most_tokens is None else ChannelState(self, self.answer)
        return ThoughtState(self)


class ThoughtState(GrammarState):
    """One sequence's, through its thought and its answer."""

    def __init__(self, hold: AfterThought) -> None:
        self.num_accepted = 0
        self._hold = hold
        self._follower = hold.vocabulary.follow(hold.start_at)
        self._num_inside = 0  # tokens between the markers
        self._num_breaks = 0  # behind it, before the answer
        self._answer = None if hold.answer is None else hold.answer.start()
        # While it is open whether there is a thought, the tokens may also be the answer's
        self._may_be_answer = hold.start_at is ThoughtStart.FREE
        self._history: deque[tuple[Any, ...]] = deque(maxlen=MOST_ROLLED_BACK)

    @property
    def fault(self) -> str | None:
        return None if self._answer is None else self._answer.fault

    @property
    def is_free(self) -> bool:
        return self._follower.is_over and self._answer is None

    @property
    def is_complete(self) -> bool:
        is_over = self._follower.is_over or (self._may_be_answer and self.num_accepted == 0)
        return self._answer is None or (is_over and self._answer.is_complete)

    @property
    def has_ended(self) -> bool:
        return self._answer is not None and self._follower.is_over and self._answer.has_ended

    def fill_mask(self, mask: Int32Array) -> None:
        thought, answer, words = self._follower, self._answer, mask.view(np.uint32)
        if forced := self.forced():
            mask[:] = 0
            allow(words, forced[0])
        elif answer is None:
            mask[:] = -1
        elif thought.is_over:
            answer.fill_mask(mask)
            self._allow_breaks(words)
        elif self._may_be_answer:
            answer.fill_mask(mask)
            self._allow_begin(words)
        elif thought.is_inside:
            mask[:] = -1
            self._forbid_end(words)
        else:
            mask[:] = 0
            self._allow_begin(words)

    def forced(self) -> list[int]:
        thought = self._follower
        if thought.is_over:
            is_answering = self._answer is not None and (self._answer.num_accepted or not self._takes_breaks)
            return self._answer.forced() if self._answer is not None and is_answering else []
        if thought.is_thinking and self._hold.most_tokens is not None and self._num_inside >= self._hold.most_tokens:
            return self._hold.vocabulary.end_after(thought.tail)
        return []

    def accept(self, token_id: int) -> None:
        thought, answer = self._follower, self._answer
        num_answer = 0 if answer is None else answer.num_accepted
        copied = thought if thought.is_over else copy.copy(thought)
        self._history.append((copied, self._num_inside, self._num_breaks, answer, num_answer, self._may_be_answer))
        self.num_accepted += 1
        if thought.is_over:
            self._accept_behind(token_id)
            return
        was_inside = thought.is_inside
        self._num_inside += thought.is_thinking
        thought.push(token_id)
        if thought.is_inside and not was_inside:
            self._may_be_answer = False
            if self._hold.answer is not None and num_answer:  # what it has accepted was the marker
                self._answer = self._hold.answer.start()
        elif self._may_be_answer and answer is not None:
            self._may_be_answer = thought.is_over or answer.takes(token_id)
            if self._may_be_answer:
                answer.accept(token_id)

    def _accept_behind(self, token_id: int) -> None:
        if self._answer is None:
            return
        num = next((num for one, num in self._hold.vocabulary.breaks if one == token_id), 0)
        if num and self._takes_breaks and self._num_breaks + num <= MOST_BREAKS:
            self._num_breaks += num
        else:
            self._answer.accept(token_id)

    @property
    def _takes_breaks(self) -> bool:
        """Line breaks may come before the answer."""
        is_first = self._answer is not None and self._answer.num_accepted == 0
        return is_first and self._follower.is_inside and self._num_breaks < MOST_BREAKS

    def roll_back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            earlier = self._history.pop()
            self._follower, self._num_inside, self._num_breaks, self._answer, num_answer, self._may_be_answer = earlier
            if self._answer is not None and self._answer.num_accepted > num_answer:
                self._answer.roll_back(self._answer.num_accepted - num_answer)
        self.num_accepted -= num_tokens

    def _allow_breaks(self, words: Any) -> None:
        if self._takes_breaks:
            for token_id, num in self._hold.vocabulary.breaks:
                if self._num_breaks + num <= MOST_BREAKS:
                    allow(words, token_id)

    def _allow_begin(self, words: Any) -> None:
        vocabulary, begun = self._hold.vocabulary, self._follower.tail.lstrip()
        for token_id, data in vocabulary.begin_parts:
            if vocabulary.begin.startswith(begun + data):
                allow(words, token_id)

    def _forbid_end(self, words: Any) -> None:
        """Tokens that end the answer without the thought's end, or have both the thought's end and more."""
        vocabulary, tail = self._hold.vocabulary, self._follower.tail
        for token_id in vocabulary.eos_ids:
            forbid(words, token_id)
        for token_id, data in vocabulary.overruns:
            _, end, after = (tail + data).partition(vocabulary.end)
            if end and after.strip(b"\n"):
                forbid(words, token_id)


class ChannelState(GrammarState):
    """One sequence's of Harmony, whose grammar holds all of its messages: the budget of its thoughts."""

    def __init__(self, hold: AfterThought, answer: Grammar) -> None:
        self.num_accepted = 0
        self._vocabulary, self._most_tokens = hold.vocabulary, hold.most_tokens or 0
        self._follower = hold.vocabulary.follow(hold.start_at, only_final=True)
        self._num_inside = 0
        self._answer = answer.start()
        self._history: deque[tuple[ThoughtFollower, int]] = deque(maxlen=MOST_ROLLED_BACK)

    @property
    def fault(self) -> str | None:
        return self._answer.fault

    @property
    def is_complete(self) -> bool:
        return self._answer.is_complete

    @property
    def has_ended(self) -> bool:
        return self._answer.has_ended

    def takes(self, token_id: int) -> bool:
        return self._answer.takes(token_id)

    def fill_mask(self, mask: Int32Array) -> None:
        words, thought = mask.view(np.uint32), self._follower
        if end := self._forced_end():
            mask[:] = 0
            allow(words, end[0])
            return
        self._answer.fill_mask(mask)
        if self._is_used_up and thought.is_inside and thought.tail.endswith(b"<|channel|>"):
            for token_id in self._vocabulary.analysis_parts:
                forbid(words, token_id)

    @property
    def _is_used_up(self) -> bool:
        return self._num_inside >= self._most_tokens

    def _forced_end(self) -> list[int]:
        """Of a thought that is used up; a character that it has begun comes first: the grammar takes no part of one."""
        if not (self._is_used_up and self._follower.is_thinking):
            return []
        end = list(self._vocabulary.encode("<|end|>"))
        return end if self._answer.takes(end[0]) else []

    def forced(self) -> list[int]:
        return self._forced_end() or self._answer.forced()

    def accept(self, token_id: int) -> None:
        thought = self._follower
        self._history.append((thought if thought.is_over else copy.copy(thought), self._num_inside))
        self.num_accepted += 1
        self._answer.accept(token_id)
        if not thought.is_over:
            self._num_inside += thought.is_thinking
            thought.push(token_id)

    def roll_back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._follower, self._num_inside = self._history.pop()
        self._answer.roll_back(num_tokens)
        self.num_accepted -= num_tokens
