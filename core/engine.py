"""Drives the steps: inbox, plan, forward, sample, collect, apply, deliver. Thread: engine; it starts none.

Where the runner allows two steps in flight, the next one is planned and sent before the oldest is collected, so that
the device has work while the host reads and plans. What only a result shows (an end, a failed row) takes effect one
step late.

The engine never waits: step() says whether there was work, and its caller waits for the inbox. It turns faults into
ends of requests: of a row, of a step that raises (see SentSteps), of the device.
When idle it checks the scheduler's block and sequence accounting, and breaks if it is inconsistent. After IDLE_S
without a request, the runner may do work of its own in slices, between which the engine looks at the inbox.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from core.inspection import InconsistentAccounting, check_conservation, state_of
from core.plan import BlockStore, DeviceError, Runner, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import (
    NO_STORE,
    Cancel,
    ClearCache,
    EngineSnapshot,
    FinishReason,
    Inspect,
    Message,
    Pause,
    Resume,
    StepDelivery,
    Submit,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

Ticket = TypeVar("Ticket")
Result = TypeVar("Result")

IDLE_S = 60.0  # the load average that requests leave behind falls to a third in this time
_DEVICE_LOST = "The server's compute device failed. Try again once the server has restarted."
_STEP_FAILED = "The model failed to compute this request."
_ENGINE_FAULT = "The server's engine failed. Try again once the server has restarted."


class EngineBroken(Exception):
    """The engine cannot go on and every request has its terminal chunk: the process has nothing left to do."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A plan and the runner's ticket for it; None: the runner raised."""

    plan: StepPlan
    ticket: Any


class SentSteps:
    """Sends plans to the runner and collects their outputs, in the same order.

    A step that raises while it is sent is computed again once those before it have come back, and bisected to the rows
    that raise. So is one that raises when it is collected, unless another was sent behind it: that one has read what
    may never have been written, and both are lost.

    Args:
        runner: anything it raises but DeviceError is attributed to some rows.
        restart: Scheduler.restart.
    """

    def __init__(self, runner: Runner[Any], restart: Callable[[StepPlan, range], StepPlan]) -> None:
        self._runner = runner
        self._restart = restart
        self._sent: deque[_Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_failed(self) -> bool:
        """Whether the last one raised: nothing can be sent behind it."""
        return bool(self._sent) and self._sent[-1].ticket is None

    def send(self, plan: StepPlan) -> None:
        """
        Raises:
            DeviceError: the device is lost.
        """
        self._sent.append(_Sent(plan, _attempt(self._start, plan, plan.num_rows)))

    def collect(self) -> tuple[StepPlan, StepOutput] | None:
        """Wait for the oldest step. None: all that were sent are lost.

        Raises:
            DeviceError: the device is lost.
        """
        oldest = self._sent.popleft()
        num_rows = oldest.plan.num_rows
        output = None if oldest.ticket is None else _attempt(self._runner.collect, oldest.ticket, num_rows)
        if output is not None:
            return oldest.plan, output
        if not self._sent:
            return oldest.plan, self._rerun(oldest.plan, range(num_rows))
        while self._sent:  # wait for the others and discard their outputs
            sent = self._sent.popleft()
            if sent.ticket is not None:
                _attempt(self._runner.collect, sent.ticket, sent.plan.num_rows)
        return None

    def forget(self) -> None:
        """Never collect what was sent."""
        self._sent.clear()

    def _start(self, plan: StepPlan) -> Any:
        ticket = self._runner.forward(plan)
        self._runner.sample(ticket)
        return ticket

    def _rerun(self, plan: StepPlan, rows: range) -> StepOutput:
        """Compute these rows of a failed plan again; in halves, and halves of those, while they fail."""
        try:
            output = self._runner.collect(self._start(self._restart(plan, rows)))
        except DeviceError:
            raise
        except Exception as error:
            if len(rows) > 1:
                middle = rows.start + len(rows) // 2
                return _joined(
                    [self._rerun(plan, half) for half in (range(rows.start, middle), range(middle, rows.stop))]
                )
            logger.error("row %d of the step is guilty: %r", rows.start, error)
            none = np.empty(0, np.int32)
            return StepOutput(rows=none, token_ids=none, failed_rows={rows.start: _STEP_FAILED})
        return StepOutput(
            rows=output.rows + np.int32(rows.start),
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs={row + rows.start: told for row, told in output.prompt_logprobs.items()},
            failed_rows={row + rows.start: cause for row, cause in output.failed_rows.items()},
        )


def _attempt(work: Callable[[Any], Result], argument: Any, num_rows: int) -> Result | None:
    """None: it raised, whatever a model can raise. The rows that raise again when bisected are the guilty ones.

    Raises:
        DeviceError: the device is lost.
    """
    try:
        return work(argument)
    except DeviceError:
        raise
    except Exception:
        logger.exception("a step of %d rows failed, trying again", num_rows)
        return None


def _joined(outputs: list[StepOutput]) -> StepOutput:
    """One output of those over parts of a plan's rows."""
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


class Engine:
    """The scheduler and its runner, driven step by step.

    Args:
        runner: see SentSteps.
        clock: monotonic seconds.
        inbox: messages of the loop, oldest first. Only popped here, from the left.
        deliver: called with the news of each step, and with news that needs no step.
        store: is given the cached blocks when no more steps come; None: they are forgotten.
        check: called when idle; raises DeviceError if the device is lost. None: the next step will raise.
        idle_work: the runner's own work for an idle server, once after start and after each busy phase: each next() is
            a slice of some tens of ms. It is closed between two slices when a step comes, and begun anew next time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Ticket],
        clock: Callable[[], float],
        inbox: deque[Message],
        deliver: Callable[[StepDelivery], None],
        store: BlockStore | None = None,
        check: Callable[[], None] | None = None,
        idle_work: Callable[[], Generator[None]] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._sent = SentSteps(runner, scheduler.restart)
        self._clock = clock
        self._inbox = inbox
        self._deliver = deliver
        self._store = store
        self._check = check
        self._idle_work = idle_work
        self._idling: Generator[bool] | None = None
        self._idle_since: float | None = None  # None once idle work has begun
        self._broken: str | None = None  # the error for its clients
        self._inspect: Inspect | None = None  # not answered yet

    def step(self) -> bool:
        """Run one step if there is something to compute, or a slice of idle work. False: see wait_s().

        Raises:
            EngineBroken: the device is lost, or the accounting is inconsistent; all requests have been answered,
                also those just submitted.
        """
        self._drain_inbox()
        if self._broken is not None:
            self._break(self._broken)
        try:
            self._send()
            if not self._sent:
                self._flush()
                self._check_accounting()
                if self._check is not None:
                    self._check()
                return self._work_idle()
            landed = self._sent.collect()
        except DeviceError as error:
            logger.critical("the device is lost: %s", error)
            self._break(_DEVICE_LOST, error)
        self._drain_inbox()
        delivery = self._take_in(landed)
        self._drop_forgotten()  # by rows that failed
        self._tell(delivery)
        return True

    def _send(self) -> None:
        """Plan and start as many steps as may be in flight."""
        for _ in range(self._scheduler.limits.max_in_flight - len(self._sent)):
            if self._sent.has_failed:
                return
            plan = self._scheduler.plan(self._clock())
            if plan is None:
                return
            self._stop_idling()
            self._sent.send(plan)

    def wait_s(self) -> float | None:
        """How long the caller may wait for a message after step() returned False; None: for ever."""
        if self._idle_since is None:
            return None
        return max(0.0, self._idle_since + IDLE_S - self._clock())

    def _work_idle(self) -> bool:
        """Do a slice of idle work. False: none was due."""
        if self._scheduler.has_requests:  # paused ones
            self._stop_idling()
            return False
        if self._idling is None:
            self._idling = self._idle()
        return next(self._idling)

    def _idle(self) -> Generator[bool]:
        """The idle engine's states: waiting, working, done. Yields whether it did a slice."""
        if self._idle_work is not None:
            self._idle_since = self._clock()
            while self._clock() < self._idle_since + IDLE_S:
                yield False
            try:
                with closing(self._idle_work()) as slices:
                    for _ in slices:
                        yield True
            except DeviceError:
                raise
            except Exception:  # no request depends on it
                logger.exception("work of the idle engine failed")
            self._idle_since = None
        while True:
            yield False

    def _stop_idling(self) -> None:
        if self._idling is not None:
            self._idling.close()
        self._idling = self._idle_since = None

    def _take_in(self, landed: tuple[StepPlan, StepOutput] | None) -> StepDelivery:
        if landed is None:
            return self._scheduler.lose_in_flight(self._clock())
        return self._scheduler.apply(*landed, self._clock())

    def shutdown(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request with a terminal chunk, also those in the inbox.

        Args:
            error: the cause for the clients, with FinishReason.ERROR.
        """
        self._drain_inbox()
        self._sent.forget()
        self._scheduler.end_all(reason, error)
        self._flush()

    def close(self) -> None:
        """Store what the next process can use, when no more steps come. Results in flight are not delivered."""
        if self._store is None or self._broken is not None:
            return
        try:
            while self._sent:
                self._take_in(self._sent.collect())
        except DeviceError as error:
            logger.critical("the device is lost: %s", error)
            return
        self._store.keep(self._scheduler.offload_kept())

    def _drop_forgotten(self, is_asked: bool = False) -> None:
        """Tell the store which slots were forgotten, at once: no step may come, and the process may be killed.

        Args:
            is_asked: retry earlier deletions that failed, even if nothing new is to be deleted.
        """
        slots = self._scheduler.host.take_dropped()
        if (slots or is_asked) and self._store is not None:
            self._store.drop(slots)

    def _break(self, message: str, cause: Exception | None = None) -> NoReturn:
        self._broken = message
        self.shutdown(FinishReason.ERROR, message)
        raise EngineBroken(message) from cause

    def _check_accounting(self) -> None:
        try:
            check_conservation(self._scheduler)
        except InconsistentAccounting as error:
            logger.critical("the engine is idle and its accounting is inconsistent, a fault in this program: %s", error)
            self._break(_ENGINE_FAULT, error)

    def _flush(self) -> None:
        delivery = self._scheduler.flush()
        if delivery is None and self._inspect is not None:
            delivery = StepDelivery([], [], [], [], self._scheduler.stats())
        if delivery is not None:
            self._tell(delivery)

    def _tell(self, delivery: StepDelivery) -> None:
        store = NO_STORE if self._store is None else self._store.state
        if store.num_undeleted or store.num_unwritten:
            counts = {"num_undeleted_blocks": store.num_undeleted, "num_unwritten_blocks": store.num_unwritten}
            delivery = msgspec.structs.replace(delivery, stats=msgspec.structs.replace(delivery.stats, **counts))
        if self._inspect is not None:
            snapshot = EngineSnapshot(self._inspect.serial, state_of(self._scheduler, self._clock()), store)
            delivery = msgspec.structs.replace(delivery, snapshot=snapshot)
            self._inspect = None
        self._deliver(delivery)

    def _drain_inbox(self) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case Submit(request):
                    self._scheduler.submit(request)
                case Cancel(request_id, reason, index, num_tokens_kept):
                    self._scheduler.cancel(request_id, reason, index, num_tokens_kept)
                case Pause(request_id):
                    self._scheduler.pause(request_id)
                case Resume(request_id):
                    self._scheduler.resume(request_id)
                case ClearCache():
                    self._scheduler.pool.clear()
                    self._drop_forgotten(is_asked=True)
                case Inspect() as inspect:
                    self._inspect = inspect
