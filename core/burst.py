"""Prompts that come together to an engine in which nobody streams: they are computed like one batch. Thread: engine.

The inter-token target protects a stream from prompts that came later. Were it to protect the first of eight that come
at once from the other seven, these would all wait for their first token about as long as the last one.

A burst begins with the last step in which nobody decodes. While it lasts, a prompt is not bound by the target if it
and each that decodes arrived within WINDOW_S of one another, and none of these is of a higher class. It is over once
none of its prompts is computed in a step later than WINDOW_S, or after LONGEST_S; and until nobody decodes there is no
other. So a stream gives way in its first LONGEST_S at most, and only to who arrived with it and finds room at once:
those of a flood that wait for a slot are bound by the streams that hold it, and a stream that is there already is
protected from every burst.
"""

import math
from collections.abc import Iterable

from core.sequence import Sequence

WINDOW_S = 0.1
LONGEST_S = 10.0
_NEVER = math.inf, -math.inf


class Burst:
    """Whom the streams of a step give way to.

    Attributes:
        is_on: streams may give way. If not, look() is needed only where nobody decodes.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._began_s = 0.0
        self._is_computed = False  # some of its prompts, in the last step
        self._window = _NEVER  # when those arrived to whom this step's streams give way
        self._priority = 0  # and at least their class

    def look(self, streams: Iterable[Sequence], now: float) -> None:
        """Before the prompts of a step: these decode in it."""
        arrivals = [(sequence.arrival_s, sequence.priority) for sequence in streams]
        if not arrivals:
            self.is_on, self._began_s, self._is_computed, self._window = True, now, True, _NEVER
            return
        times_s, priorities = zip(*arrivals, strict=True)
        end_s = min(times_s) + WINDOW_S
        self.is_on = (self._is_computed or now <= end_s) and now <= self._began_s + LONGEST_S
        self._is_computed = False
        self._window = (max(times_s) - WINDOW_S, end_s) if self.is_on else _NEVER
        self._priority = max(priorities)

    def has(self, sequence: Sequence) -> bool:
        """Whether this step's streams, of which there are some, give way to it."""
        first_s, last_s = self._window
        return first_s <= sequence.arrival_s <= last_s and sequence.priority >= self._priority

    def compute(self) -> None:
        """A prompt of it is computed in this step."""
        self._is_computed = True
