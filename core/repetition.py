"""What a sequence's latest tokens do to its next one's logits: DRY, and penalties over a window, as in llama-server.

Both need the tokens on the host, so a sequence with them is not computed while it is in flight; each plan tells the
runner what applies to the token that it samples (TokenPenalties). Thread: engine; Breakers: any.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# A penalty never outweighs what a grammar forbids, nor leaves float32: its power stays below it.
MOST_PENALTY = 1e9
MOST_TAIL = 20  # tokens of a breaker behind its first one


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """What applies to the one token that a plan samples for a slot.

    Args:
        dry: token id -> what its logit falls by.
        counts: of the tokens in the window; None: there is no window, and the runner counts.
    """

    slot: int
    dry: dict[int, float]
    counts: dict[int, int] | None


@dataclass(frozen=True, slots=True)
class Breakers:
    """The tokens of DRY's sequence breakers: no repetition reaches back beyond one.

    Args:
        alone: tokens whose text contains a breaker.
        tails: by a token whose text ends with the beginning of a breaker: the tokens that complete it.
    """

    alone: frozenset[int] = frozenset()
    tails: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def num_behind(self, token_ids: Sequence[int], most: int) -> int:
        """How many of the last `most` tokens follow a breaker, all of them if there is none."""
        for behind in range(most):
            place = len(token_ids) - 1 - behind
            longest = 0 if token_ids[place] in self.alone else -1
            for tail in self.tails.get(token_ids[place], ()):
                if len(tail) > longest and tuple(token_ids[place + 1 : place + 1 + len(tail)]) == tail:
                    longest = len(tail)
            if longest >= 0:
                return behind - longest
        return most


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionRules:
    """What SamplingParams ask under these names, the breakers as tokens.

    Source of DRY: llama.cpp's src/llama-sampler.cpp, after its inventor's (github.com/p-e-w).
    """

    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    breakers: Breakers = Breakers()
    repeat_last_n: int = -1


class Repetition:
    """One sequence's."""

    def __init__(self, rules: RepetitionRules) -> None:
        self._rules = rules
        self._token_ids = np.empty(0, np.int32)  # [room]
        self._matches = np.empty(0, np.int32)  # [room]: how many tokens end alike at each and at the last; there 0
        self._num_tokens = 0

    def penalties(self, slot: int, token_ids: list[int]) -> TokenPenalties:
        """Of the token after these, which are the last call's and some more."""
        rules = self._rules
        counts = Counter(token_ids[-rules.repeat_last_n :]) if rules.repeat_last_n > 0 else None
        dry = self._dry(token_ids) if rules.dry_multiplier > 0 else {}
        return TokenPenalties(slot, dry, counts)

    def _dry(self, token_ids: list[int]) -> dict[int, float]:
        self._follow(token_ids)
        rules, num_tokens = self._rules, self._num_tokens
        allowed, last_n = rules.dry_allowed_length, rules.dry_penalty_last_n
        size = num_tokens if last_n < 0 else min(last_n, num_tokens)
        if size <= max(allowed, 1):
            return {}
        first = num_tokens - size  # of the window
        matches = np.minimum(self._matches[first : num_tokens - 1], np.arange(1, size))
        matches = matches.clip(max=rules.breakers.num_behind(token_ids, min(size, int(matches.max()) + MOST_TAIL)))
        ends = np.flatnonzero(matches >= allowed)
        longest: dict[int, int] = {}
        for token_id, length in zip(self._token_ids[first + 1 + ends].tolist(), matches[ends].tolist(), strict=True):
            longest[token_id] = max(length, longest.get(token_id, 0))
        return {
            token_id: self._penalty(length - allowed)
            for token_id, length in longest.items()
            if token_id not in rules.breakers.alone
        }

    def _penalty(self, num_over: int) -> float:
        try:
            return min(self._rules.dry_multiplier * self._rules.dry_base**num_over, MOST_PENALTY)
        except OverflowError:
            return MOST_PENALTY

    def _follow(self, token_ids: list[int]) -> None:
        """Bring the matches up to the last of these tokens."""
        known, num_tokens = self._num_tokens, len(token_ids)
        if num_tokens > len(self._matches):
            room = max(256, 2 * num_tokens)
            self._token_ids, self._matches = np.resize(self._token_ids, room), np.resize(self._matches, room)
        self._token_ids[known:num_tokens] = token_ids[known:]
        self._num_tokens = num_tokens
        if not known or num_tokens - known > 64:  # at once; else token by token
            self._matches[:num_tokens] = list(_matches_with_end(token_ids))[::-1]
            return
        for end in range(known, num_tokens):
            matches, is_same = self._matches, self._token_ids[:end] == self._token_ids[end]
            matches[1:end] = np.where(is_same[1:], matches[: end - 1] + 1, 0)
            matches[:1], matches[end] = is_same[:1], 0


def _matches_with_end(token_ids: list[int]) -> Iterator[int]:
    """For each place, from the last backwards: how many tokens end alike there and at the end; 0 at the end itself.

    The Z-algorithm on the reversed text (Gusfield, Algorithms on Strings, Trees and Sequences, section 1.3).
    """
    text = token_ids[::-1]
    lengths, left, right = [0] * len(text), 0, 0
    yield 0
    for place in range(1, len(text)):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < len(text) and text[length] == text[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
        yield length
