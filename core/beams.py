"""Beam search: which continuations of a request's sequences go on, and which become its answers. Thread: engine.

The rules, and the rounding of scores to float32, are those of transformers' generate(num_beams=...): GenerationMixin's
_beam_search of version 5. A search decides; core/searches.py forks and ends the sequences.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from core.types import Beams, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that the model wrote, the stop id that ended it among them."""

    logprobs: tuple[TokenLogprobs, ...]
    reason: FinishReason
    score: np.float32


class _Step(NamedTuple):
    """What may come next, in the order of choice.

    Args:
        loss: minus its score, a float32.
        rank: of the beam that it continues.
    """

    loss: float
    rank: int
    token_id: int
    logprob: float


@dataclass(slots=True)
class BeamSearch:
    """One request's.

    Args:
        num_top: likeliest tokens that each step must tell of each beam.
        max_tokens: of an answer.
        num_shown: of the likeliest tokens, kept beside each token of an answer.
        forbidden: ids that are never taken.
        beams: indexes of the sequences that go on, best first.
        told: by index, the likeliest next tokens of those that have come back.
        num_tokens: so far, one a beam and step: its usage.
        answers: once it has ended, best first.
    """

    wishes: Beams
    stop_ids: Set[int]
    forbidden: Set[int]
    min_tokens: int
    max_tokens: int
    num_shown: int
    beams: list[int] = field(default_factory=lambda: [0])
    told: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_tokens: int = 0
    answers: list[Answer] = field(default_factory=list)
    _scores: list[float] = field(default_factory=lambda: [0.0])
    _written: list[tuple[TokenLogprobs, ...]] = field(default_factory=lambda: [()])

    @property
    def num_top(self) -> int:
        return self.wishes.width + len(self.stop_ids) + len(self.forbidden)

    @property
    def has_begun(self) -> bool:
        return bool(self._written[0])

    @property
    def is_ready(self) -> bool:
        """All beams have come back."""
        return len(self.told) == len(self.beams)

    def waits_for(self, index: int) -> bool:
        """Whether the sequence is a beam that has not come back."""
        return index in self.beams and index not in self.told

    def advance(self) -> list[tuple[int, int]]:
        """Choose by what was told.

        Returns: of the beams that go on, best first, the rank of the beam that each continues, and its next token. None
        of them: the search has ended. The caller sets `beams` to the sequences that take them, in this order.
        """
        width, length = self.wishes.width, len(self._written[0]) + 1
        self.num_tokens += width
        is_last, left_out = length == self.max_tokens, self.forbidden
        if length <= self.min_tokens:
            left_out = left_out | self.stop_ids
        some = [
            (rank, token_id, logprob)
            for rank, index in enumerate(self.beams)
            for token_id, logprob in self.told[index].top
            if token_id not in left_out
        ]
        scores = np.array(self._scores, np.float32)[[one[0] for one in some]]
        scores += np.array([one[2] for one in some], np.float32)
        found = [_Step(loss, *one) for loss, one in zip((-scores).tolist(), some, strict=True)]
        found.sort()
        tops = [self.told.pop(index).top[: self.num_shown] for index in self.beams]

        def written(step: _Step) -> tuple[TokenLogprobs, ...]:
            return (*self._written[step.rank], TokenLogprobs(step.token_id, step.logprob, tops[step.rank]))

        for step in found[:width]:
            has_stopped = step.token_id in self.stop_ids
            if has_stopped or is_last:
                reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
                self.answers.append(Answer(written(step), reason, -np.float32(step.loss) / self._divisor(length)))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[width:]
        going_on = [step for step in found if step.token_id not in self.stop_ids][:width]
        if is_last or not self._may_improve(-np.float32(going_on[0].loss), length):
            return []
        self._written = [written(step) for step in going_on]
        self._scores = [-step.loss for step in going_on]
        return [(step.rank, step.token_id) for step in going_on]

    def _may_improve(self, best: np.float32, length: int) -> bool:
        """Whether a beam may still become a better answer than the worst: an estimate, unless "never" asks for more."""
        wishes = self.wishes
        if len(self.answers) < wishes.width:
            return True
        if wishes.early_stopping is True:
            return False
        if wishes.early_stopping == "never" and wishes.length_penalty > 0:
            length = self.max_tokens
        return bool(best / self._divisor(length) > self.answers[-1].score)

    def _divisor(self, length: int) -> np.float32:
        return np.float32(length**self.wishes.length_penalty)
