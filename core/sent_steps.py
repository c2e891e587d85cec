"""Steps that were given to the runner, and what becomes of one that raises. Thread: engine.

A step that raises while it is sent is computed again once those before it have come back, then bisected to the rows
that raise. One that raises when it is collected is too, unless another was sent behind it: that one has read what may
never have been written, and both are lost.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from core.plan import DeviceError, Runner, StepOutput, StepPlan
from core.types import TokenLogprobs

logger = logging.getLogger(__name__)

Ticket = TypeVar("Ticket")

_STEP_FAILED = "The model failed to compute this request."


@dataclass(frozen=True, slots=True)
class _Sent(Generic[Ticket]):
    """
    Args:
        ticket: None: it raised.
    """

    plan: StepPlan
    ticket: Ticket | None


class SentSteps(Generic[Ticket]):
    """Sends plans and collects what they give, in the same order.

    Args:
        runner: anything it raises but DeviceError is taken for the fault of some rows.
        restart: makes a plan of some rows of the only plan that is in flight, see Scheduler.restart.
    """

    def __init__(self, runner: Runner[Ticket], restart: Callable[[StepPlan, range], StepPlan]) -> None:
        self._runner = runner
        self._restart = restart
        self._sent: deque[_Sent[Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_failed(self) -> bool:
        """The last one raised: nothing can be sent behind it."""
        return bool(self._sent) and self._sent[-1].ticket is None

    def send(self, plan: StepPlan) -> None:
        """
        Raises:
            DeviceError: the device is lost.
        """
        try:
            ticket = self._start(plan)
        except DeviceError:
            raise
        except Exception:  # whatever a model can raise: the rows that raise it again are the guilty ones
            logger.exception("a step of %d rows failed, trying again", plan.num_rows)
            ticket = None
        self._sent.append(_Sent(plan, ticket))

    def collect(self) -> tuple[StepPlan, StepOutput] | None:
        """The oldest, once it is done. None: all that were sent are lost.

        Raises:
            DeviceError: the device is lost.
        """
        oldest = self._sent.popleft()
        if oldest.ticket is not None:
            try:
                return oldest.plan, self._runner.collect(oldest.ticket)
            except DeviceError:
                raise
            except Exception:
                logger.exception("a step of %d rows failed, trying again", oldest.plan.num_rows)
        if self._sent:
            self._abandon()
            return None
        return oldest.plan, self._rerun(oldest.plan, range(oldest.plan.num_rows))

    def forget(self) -> None:
        """Nobody will ask what they give."""
        self._sent.clear()

    def _start(self, plan: StepPlan) -> Ticket:
        ticket = self._runner.forward(plan)
        self._runner.sample(ticket)
        return ticket

    def _abandon(self) -> None:
        """Wait for those that are left, whatever they give."""
        while self._sent:
            ticket = self._sent.popleft().ticket
            try:
                if ticket is not None:
                    self._runner.collect(ticket)
            except DeviceError:
                raise
            except Exception:
                logger.exception("a step failed behind one that had failed")

    def _rerun(self, plan: StepPlan, rows: range) -> StepOutput:
        try:
            output = self._runner.collect(self._start(self._restart(plan, rows)))
        except DeviceError:
            raise
        except Exception as error:
            return self._bisect(plan, rows, error)
        return StepOutput(
            rows=output.rows + np.int32(rows.start),
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs={row + rows.start: told for row, told in output.prompt_logprobs.items()},
            failed_rows={row + rows.start: cause for row, cause in output.failed_rows.items()},
        )

    def _bisect(self, plan: StepPlan, rows: range, error: Exception) -> StepOutput:
        """What rows that failed together give when computed in halves, and halves of those that fail again."""
        if len(rows) == 1:
            logger.error("row %d of the step is guilty: %r", rows.start, error)
            none = np.empty(0, np.int32)
            return StepOutput(rows=none, token_ids=none, failed_rows={rows.start: _STEP_FAILED})
        middle = rows.start + len(rows) // 2
        halves = range(rows.start, middle), range(middle, rows.stop)
        return _joined([self._rerun(plan, half) for half in halves])


def _joined(outputs: list[StepOutput]) -> StepOutput:
    """Outputs over the same plan's rows as one."""
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed_rows: dict[int, str] = {}
    offset = 0
    for output in outputs:
        logprobs |= {offset + i: entry for i, entry in output.logprobs.items()}
        prompt_logprobs |= output.prompt_logprobs
        failed_rows |= output.failed_rows
        offset += len(output.token_ids)
    return StepOutput(
        rows=np.concatenate([output.rows for output in outputs]),
        token_ids=np.concatenate([output.token_ids for output in outputs]),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        failed_rows=failed_rows,
    )
