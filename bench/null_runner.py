"""A runner without a model: every sampling row gets a token at a constant cost. Thread: engine.

Behind it the server does all that it does for a real model, so what is measured is the server.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from core.plan import RunnerLimits, StepOutput, StepPlan


class Pace:
    """Steps at a steady rate. One that comes late is not made up for.

    Args:
        interval_s: from one step's tokens to the next one's, at least.
    """

    def __init__(
        self,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._next_step_s = 0.0

    def wait(self) -> None:
        """Sleep until the next step is due."""
        now_s = self._clock()
        if self._next_step_s > now_s:
            self._sleep(self._next_step_s - now_s)
        self._next_step_s = max(self._next_step_s, now_s) + self._interval_s


class NullRunner:
    """Draws the given ids in turn, by position: the same prompt length gives the same tokens.

    Args:
        token_ids: what is drawn; none of them may end a sequence.
        wait_step: called for each step, returns when it is done.
    """

    def __init__(
        self, limits: RunnerLimits, token_ids: Sequence[int], wait_step: Callable[[], None] = lambda: None
    ) -> None:
        self.limits = limits
        self._token_ids = np.asarray(token_ids, dtype=np.int32)
        self._wait_step = wait_step

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, ticket: StepPlan) -> None:
        pass

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._wait_step()
        rows = ticket.samples.nonzero()[0].astype(np.int32)
        positions = ticket.starts[rows] + ticket.lengths[rows]
        return StepOutput(rows, self._token_ids[positions % len(self._token_ids)])
