"""Whether the engine still steps: it is asked for a beat, and owes it at its next step's end. Thread: loop.

Silence is counted in ticks of the loop, not by a clock: a process that was frozen (SIGSTOP, a suspended machine, a loop
that was busy itself) must not take its own sleep for the engine's.
"""

import enum
from collections import deque
from collections.abc import Callable

from core.types import EngineStats

MIN_SILENCE_S = 10.0  # that is never taken for a hang
NUM_STEPS_OF_SILENCE = 3  # predicted steps that are not, either
NUM_SILENCES_TO_DEATH = 3
FIRST_STEP_S = 100.0  # predicted while nothing has been measured: it may have to compile, and a prompt may fill it
RECENT_TICKS = 60  # whose longest steps count


class Pulse(enum.Enum):
    """How the engine does."""

    BEATING = enum.auto()
    SILENT = enum.auto()  # for too long: whoever can go elsewhere should
    LOST = enum.auto()  # it will not come back


class EngineWatch:
    """Asks for beats, and counts the ticks that pass without.

    Args:
        ask: makes the engine thread call back on_beat() once its step is over; at once when it is idle.
        tick_s: between calls of tick().
        max_batch_tokens: of a step.
    """

    def __init__(self, ask: Callable[[], None], tick_s: float, max_batch_tokens: int) -> None:
        self._ask = ask
        self._tick_s = tick_s
        self._max_batch_tokens = max_batch_tokens
        self._num_silent_ticks: int | None = None  # since a beat was asked for; None: none is owed
        self._num_tokens = 0  # computed since the start
        self._longest_s = 0.0  # step since the last tick
        self._recent_s: deque[float] = deque(maxlen=RECENT_TICKS)  # the longest step of each tick
        self._full_step_s = FIRST_STEP_S

    @property
    def silence_s(self) -> float:
        """For how long a beat has been owed."""
        return (self._num_silent_ticks or 0) * self._tick_s

    @property
    def max_silence_s(self) -> float:
        """What the engine may be busy with one step."""
        predicted_s = max(self._full_step_s, self._longest_s, *self._recent_s)
        return max(MIN_SILENCE_S, NUM_STEPS_OF_SILENCE * predicted_s)

    def on_beat(self) -> None:
        """The engine is between two steps."""
        self._num_silent_ticks = None

    def on_step(self, stats: EngineStats) -> None:
        """A step is over. What it took per token bounds what a full one takes: each has a fixed part besides."""
        num_tokens = stats.num_prompt_tokens + stats.num_generated_tokens
        num_new, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        self._longest_s = max(self._longest_s, stats.step_s)
        if num_new > 0:
            self._full_step_s = min(self._full_step_s, stats.step_s * self._max_batch_tokens / num_new)

    def tick(self) -> Pulse:
        self._recent_s.append(self._longest_s)
        self._longest_s = 0.0
        if self._num_silent_ticks is None:
            self._num_silent_ticks = 0
            self._ask()
            return Pulse.BEATING
        self._num_silent_ticks += 1
        if self.silence_s <= self.max_silence_s:
            return Pulse.BEATING
        return Pulse.SILENT if self.silence_s <= NUM_SILENCES_TO_DEATH * self.max_silence_s else Pulse.LOST
