"""Ends answers that are late. Thread: loop.

What passes its deadline is ended as everything else that is called off: its blocks are free with the step that runs.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

from core.errors import ErrorKind, ServiceError
from server.backend import ChoiceClock
from server.deadline import RESOLUTION_S, DeadlineTimer
from server.gate.deadlines import Deadlines, OwnDeadlineExceeded
from server.observing.timing import StageClock


class DeadlineWatch:
    """Ends an answer that is late. One timer, which is looked at when it fires: nothing is done per token.

    Args:
        clocks: of the choices.
        num_untold: by choice, how many tokens have come since that say nothing yet: half a character, or what may
            become a stop string. When they came is not known: while they grow, the choice gets its time anew.
        is_withheld: nothing may be said yet: what has been drawn is no first token to who waits for it.
        fail: breaks the answer off; called once, with a deadline_exceeded.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        timings: StageClock,
        clocks: Sequence[ChoiceClock],
        num_untold: Callable[[int], int],
        is_withheld: Callable[[], bool],
        fail: Callable[[ServiceError], None],
    ) -> None:
        self._deadlines = deadlines
        self._timings = timings
        self._clocks = clocks
        self._num_untold = num_untold
        self._is_withheld = is_withheld
        self._fail = fail
        self._ended: set[int] = set()  # choices
        self._held_since_s: float | None = None
        self._excused: dict[int, tuple[float, float]] = {}  # choice -> (its last text, what does not count since then)
        self._seen: dict[int, tuple[float, int]] = {}  # choice -> (its last text, untold tokens when it was looked at)
        self._is_closed = False
        self._num_talking = 0  # choices that have begun and not ended
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer(self._loop, self._next_due, self._on_due)

    def arm(self) -> None:
        """To be called when the requests are submitted, and when what was withheld may be said."""
        self._timer.arm()

    def begin(self) -> None:
        """A choice says its first. Its next is due after those of others that talk already: the timer looks by itself.

        A request may have thousands of choices, and each look goes through all of them.
        """
        self._num_talking += 1
        if self._num_talking == 1:
            self._timer.arm()

    def drop(self, choice: int) -> None:
        """The choice has ended: nobody waits for its next token."""
        self._ended.add(choice)
        self._num_talking -= self._clocks[choice].last_s is not None

    def hold(self, now_s: float) -> None:
        """It is paused: the time from here to release() is its reader's."""
        self._held_since_s = now_s

    def release(self, now_s: float) -> None:
        held_since_s, self._held_since_s = self._held_since_s, None
        assert held_since_s is not None, "release() comes after hold()"
        for choice, last_s in self._talking():
            before_s = self._excused_s(choice, last_s)
            self._excused[choice] = last_s, before_s + now_s - max(held_since_s, last_s)
        self.arm()

    def close(self) -> None:
        """Watch no longer. Idempotent."""
        self._is_closed = True
        self._timer.cancel()

    def _talking(self) -> list[tuple[int, float]]:
        """The choices that have begun and not ended, each with when its last text came."""
        last = ((choice, clock.last_s) for choice, clock in enumerate(self._clocks))
        return [(choice, at_s) for choice, at_s in last if at_s is not None and choice not in self._ended]

    def _excused_s(self, choice: int, last_s: float) -> float:
        since_s, excused_s = self._excused.get(choice, (last_s, 0.0))
        return excused_s if since_s == last_s else 0.0

    def _first_due(self) -> tuple[float, str, str]:
        """The deadline that comes first, its name, and what is to be said when it has passed."""
        head_s, limits = self._timings.arrived_s, self._deadlines
        dues = [(head_s + limits.total_s, "total_s", f"The answer was not complete after {limits.total_s:g} s")]
        if self._timings.first_token_s is None or self._is_withheld():
            dues.append((head_s + limits.ttft_s, "ttft_s", f"No token came within {limits.ttft_s:g} s"))
        elif self._held_since_s is None:
            gap = f"The next token did not come within {limits.inter_token_s:g} s"
            for choice, last_s in self._talking():
                due_s = last_s + limits.inter_token_s + self._excused_s(choice, last_s)
                dues.append((due_s, "inter_token_s", gap))
        return min(dues)

    def _next_due(self) -> float | None:
        if self._is_closed:
            return None
        due_s, _, _ = self._first_due()
        return due_s if due_s < math.inf else None

    def _excuse_silent(self, now_s: float) -> None:
        """Who would be late now, but has drawn tokens that say nothing yet."""
        for choice, last_s in self._talking():
            num_untold = self._num_untold(choice)
            late_s = last_s + self._deadlines.inter_token_s + self._excused_s(choice, last_s)
            if num_untold and late_s <= now_s + RESOLUTION_S and self._seen.get(choice) != (last_s, num_untold):
                self._seen[choice] = last_s, num_untold
                self._excused[choice] = last_s, now_s - last_s

    def _on_due(self) -> None:
        now_s = self._loop.time()
        if self._held_since_s is None:
            self._excuse_silent(now_s)
        due_s, name, what = self._first_due()
        if due_s > now_s + RESOLUTION_S:
            return
        self.close()
        message = f"{what}, the request's deadline. Allow more time, ask for less, or try when the server is less busy."
        # Who reads slowly, or has emptied its quota, is late by itself
        is_ours = name not in self._deadlines.asked and self._held_since_s is None
        error_type = OwnDeadlineExceeded if is_ours else ServiceError
        self._fail(error_type(ErrorKind.DEADLINE_EXCEEDED, message, "deadline_exceeded"))
