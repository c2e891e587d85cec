"""A runner without a model: every sampling row gets a token at a constant cost. Thread: engine.

Behind it the server does all that it does for a real model, so what is measured is the server.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from core.plan import RunnerLimits, StepOutput, StepPlan


class NullRunner:
    """Draws the given ids in turn, by position: the same prompt length gives the same tokens.

    Args:
        token_ids: what is drawn; none of them may end a sequence.
        step_interval_s: time from one step's tokens to the next one's, at least; 0: as fast as the engine goes.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        token_ids: Sequence[int],
        step_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._token_ids = np.asarray(token_ids, dtype=np.int32)
        self._step_interval_s = step_interval_s
        self._clock = clock
        self._sleep = sleep
        self._next_step_s = 0.0

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, ticket: StepPlan) -> None:
        pass

    def collect(self, ticket: StepPlan) -> StepOutput:
        if self._step_interval_s:
            self._keep_pace()
        rows = np.flatnonzero(ticket.samples).astype(np.int32)
        positions = ticket.starts[rows] + ticket.lengths[rows]
        return StepOutput(rows, self._token_ids[positions % len(self._token_ids)])

    def _keep_pace(self) -> None:
        """Sleep until the step is due. A step that comes late is not made up for."""
        now_s = self._clock()
        if self._next_step_s > now_s:
            self._sleep(self._next_step_s - now_s)
        self._next_step_s = max(self._next_step_s, now_s) + self._step_interval_s
