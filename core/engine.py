"""Drives the steps: inbox, plan, forward, sample, collect, apply, deliver. Thread: engine; starts no other thread.

Where the runner allows two steps in flight, the next one is planned and sent before the oldest is collected, so that
the device has work while the host reads and plans. Whatever only a result shows (an end, a failed row) takes effect one
step late.

The engine never waits: step() returns whether there was work, and its caller waits for the inbox. Faults of a row, of
a step that raises (see SentSteps) or of the device end the requests concerned. When idle, the engine checks the
scheduler's block and sequence accounting, and raises if it is inconsistent. After IDLE_S without a request, the runner
may do its own work in slices; the engine checks the inbox between them.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np

from core.kv_cache import BlockChange, WindowBlocks
from core.plan import BlockStore, DeviceError, Int32Array, Runner, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.sequence import NO_SLOT, Sequence, SequenceState
from core.sequence_states import SequenceStates
from core.types import (
    NO_STORE,
    Cancel,
    ClearCache,
    EngineSnapshot,
    EngineState,
    FinishReason,
    Inspect,
    Message,
    Pause,
    QueueState,
    Resume,
    StepDelivery,
    Submit,
    TokenLogprobs,
    Watch,
)

logger = logging.getLogger(__name__)

Ticket = TypeVar("Ticket")
Result = TypeVar("Result")

IDLE_S = 60.0  # the load average that requests leave behind falls to a third in this time
_DEVICE_LOST = "The server's compute device failed. Try again once the server has restarted."
_STEP_FAILED = "The model failed to compute this request."
_ENGINE_FAULT = "The server's engine failed. Try again once the server has restarted."


class EngineBroken(Exception):
    """The engine cannot continue, and every request has its terminal chunk: the process can only end."""


@dataclass(slots=True)
class _Sent:
    """A plan and the runner's ticket for it; None: the runner raised."""

    plan: StepPlan
    ticket: Any
    is_sampled: bool


class SentSteps:
    """Sends plans to the runner and collects their outputs, in the same order.

    A step that raises while it is sent is computed again once the earlier ones have come back, and bisected to find
    the rows that raise. So is one that raises when it is collected, unless another was sent after it: that one may
    have read memory that was never written, and both are lost.

    A step with grammars is sampled only after the earlier steps were applied, because their tokens decide the masks.
    Meanwhile the device computes its logits.

    Args:
        runner: anything it raises except DeviceError is attributed to some rows.
        restart: Scheduler.restart.
        masks: Drafts.masks.
    """

    def __init__(
        self,
        runner: Runner[Any],
        restart: Callable[[StepPlan, range], StepPlan],
        masks: Callable[[StepPlan], Int32Array | None],
    ) -> None:
        self._runner = runner
        self._restart = restart
        self._masks = masks
        self._sent: deque[_Sent] = deque()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_failed(self) -> bool:
        """Whether the last one raised: nothing can be sent after it."""
        return bool(self._sent) and self._sent[-1].ticket is None

    def send(self, plan: StepPlan) -> None:
        """Raises DeviceError: the device is lost."""
        waits = bool(plan.masked_rows and self._sent)
        ticket = _attempt(self._runner.forward if waits else self._start, plan, plan.num_rows)
        self._sent.append(_Sent(plan, ticket, is_sampled=not waits))

    def sample_last(self) -> None:
        """Sample the newest step, if it waits for masks. Every step before it was applied.

        Raises:
            DeviceError: the device is lost.
        """
        if not self._sent or self._sent[-1].is_sampled or self._sent[-1].ticket is None:
            return
        last = self._sent[-1]
        last.is_sampled = True
        last.ticket = _attempt(lambda ticket: self._sample(last.plan, ticket), last.ticket, last.plan.num_rows)

    def collect(self) -> tuple[StepPlan, StepOutput] | None:
        """Wait for the oldest step. None: all that were sent are lost. Raises DeviceError: the device is lost."""
        oldest = self._sent.popleft()
        num_rows = oldest.plan.num_rows
        output = None if oldest.ticket is None else _attempt(self._runner.collect, oldest.ticket, num_rows)
        if output is not None:
            return oldest.plan, output
        if not self._sent:
            return oldest.plan, _joined(self._rerun(oldest.plan, range(num_rows)))
        while self._sent:  # wait for the others and discard their outputs
            sent = self._sent.popleft()
            if sent.ticket is not None and sent.is_sampled:
                _attempt(self._runner.collect, sent.ticket, sent.plan.num_rows)
        return None

    def forget(self) -> None:
        """Drop what was sent, without collecting it."""
        self._sent.clear()

    def _start(self, plan: StepPlan) -> Any:
        return self._sample(plan, self._runner.forward(plan))

    def _sample(self, plan: StepPlan, ticket: Any) -> Any:
        self._runner.sample(ticket, self._masks(plan))
        return ticket

    def _rerun(self, plan: StepPlan, rows: range) -> Iterator[tuple[int, StepOutput]]:
        """Compute these rows of a failed plan again; in halves, and halves of those, while they fail.

        Yields each part's first row and its output.
        """
        try:
            output = self._runner.collect(self._start(self._restart(plan, rows)))
        except DeviceError:
            raise
        except Exception as error:
            if len(rows) > 1:
                middle = rows.start + len(rows) // 2
                yield from self._rerun(plan, range(rows.start, middle))
                yield from self._rerun(plan, range(middle, rows.stop))
                return
            logger.error("row %d of the step caused the failure: %r", rows.start, error)
            output = StepOutput(np.empty(0, np.int32), np.empty(0, np.int32), failed_rows={0: _STEP_FAILED})
        yield rows.start, output


def _attempt(work: Callable[[Any], Result], argument: Any, num_rows: int) -> Result | None:
    """Returns None if it raised anything but DeviceError; bisecting then finds the rows that raise again.

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


def _joined(parts: Iterable[tuple[int, StepOutput]]) -> StepOutput:
    """Join the outputs of a plan's parts, given with their first rows."""
    rows, token_ids = list[Int32Array](), list[Int32Array]()
    logprobs, prompt_logprobs = dict[int, TokenLogprobs](), dict[int, list[TokenLogprobs]]()
    failed_rows, pooled, num_tokens = dict[int, str](), dict[int, bytes](), 0
    for first, output in parts:
        rows.append(output.rows + np.int32(first))
        token_ids.append(output.token_ids)
        logprobs |= {num_tokens + i: entry for i, entry in output.logprobs.items()}
        prompt_logprobs |= {first + row: told for row, told in output.prompt_logprobs.items()}
        failed_rows |= {first + row: cause for row, cause in output.failed_rows.items()}
        pooled |= {first + row: vector for row, vector in output.pooled.items()}
        num_tokens += len(output.token_ids)
    return StepOutput(np.concatenate(rows), np.concatenate(token_ids), logprobs, prompt_logprobs, failed_rows, pooled)


class Engine:
    """The scheduler and its runner, driven step by step.

    Args:
        runner: see SentSteps.
        clock: monotonic seconds.
        inbox: messages from the loop, oldest first. Only popped here, from the left.
        deliver: called with each step's output, and with events between steps.
        store: receives the cached blocks after the last step; None: they are dropped.
        check: called when idle; raises DeviceError if the device is lost. None: only the next step notices.
        idle_work: the runner's own work for an idle server, once after start and after each busy phase: each next() is
            a slice of some tens of ms. It is closed between slices when a request comes, and restarted next time.
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
        self._sent = SentSteps(runner, scheduler.restart, scheduler.drafts.masks)
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
                even those just submitted.
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
            self._drain_inbox()
            delivery = self._take_in(landed)
            self._sent.sample_last()
        except DeviceError as error:
            logger.critical("the device is lost: %s", error)
            self._break(_DEVICE_LOST, error)
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

    def tell_blocks(self, tell: Callable[[BlockChange], None]) -> None:
        """Call `tell`, on the engine thread, for each block that enters or leaves the prefix cache."""
        self._scheduler.pool.on_change = tell

    def wait_s(self) -> float | None:
        """How long the caller may wait for a message after step() returned False; None: without limit."""
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
        """After the last step, store the blocks that the next process can use. Results in flight are not delivered."""
        if self._store is None or self._broken is not None:
            return
        try:
            while self._sent:
                self._take_in(self._sent.collect())
                self._sent.sample_last()
        except DeviceError as error:
            logger.critical("the device is lost: %s", error)
            return
        self._store.keep(self._scheduler.offload_kept())

    def _drop_forgotten(self, is_asked: bool = False) -> None:
        """Tell the store which slots were dropped, at once: there may be no next step, and the process may be killed.

        Args:
            is_asked: retry failed deletions, even if there is nothing new to delete.
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
            logger.critical("the engine is idle and its accounting is inconsistent, a bug: %s", error)
            self._break(_ENGINE_FAULT, error)

    def _flush(self) -> None:
        delivery = self._scheduler.flush()
        if delivery is None and (self._inspect is not None or self._scheduler.watcher.has_news):
            delivery = StepDelivery([], [], [], [], self._scheduler.stats())
        if delivery is not None:
            self._tell(delivery)

    def _tell(self, delivery: StepDelivery) -> None:
        scheduler = self._scheduler
        watched = scheduler.watcher.take(scheduler.pool, scheduler.host, scheduler.states.running)
        store = NO_STORE if self._store is None else self._store.state
        if store.num_undeleted or store.num_unwritten:
            counts = {"num_undeleted_blocks": store.num_undeleted, "num_unwritten_blocks": store.num_unwritten}
            delivery = msgspec.structs.replace(delivery, stats=msgspec.structs.replace(delivery.stats, **counts))
        if self._inspect is not None:
            snapshot = EngineSnapshot(self._inspect.serial, state_of(self._scheduler, self._clock()), store)
            delivery = msgspec.structs.replace(delivery, snapshot=snapshot)
            self._inspect = None
        if watched is not None:
            delivery = msgspec.structs.replace(delivery, watched=watched)
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
                    self._scheduler.drafts.clear()
                    self._drop_forgotten(is_asked=True)
                case Inspect() as inspect:
                    self._inspect = inspect
                case Watch() as watch:
                    self._scheduler.watcher.begin(watch)


class InconsistentAccounting(Exception):
    """Two counts of blocks, slots or sequences differ: a bug, after which no answer can be trusted."""


def check_conservation(scheduler: Scheduler) -> None:
    """Check that every block, slot and sequence is in one place. O(live sequences and their blocks).

    Raises:
        InconsistentAccounting: it names the counts that differ.
    """
    states, pool = scheduler.states, scheduler.pool
    held = {block for sequence in states.running for block in sequence.table.held}
    live = [s for group in states.groups.values() for s in group.sequences if s.state is not SequenceState.FINISHED]
    num_occupied = sum(sequence is not None for sequence in states.occupants)
    num_published = pool.num_kept + sum(map(pool.is_published, held))
    seen = {one for s in states.running for one in s.table.windows[s.table.num_unseen :]}
    windows = pool.windows or WindowBlocks(0)
    seen.discard(windows.no_block)
    claims = {
        "blocks that are used, and held by sequences": (pool.num_used, len(held)),
        "window blocks that are used, and held by sequences": (windows.num_used, len(seen)),
        "blocks that are published, and kept or held": (pool.num_published, num_published),
        "sequences that run, of all that live": (
            len(states.running),
            sum(s.state is SequenceState.RUNNING for s in live),
        ),
        "slots in all, and taken or free": (len(states.occupants), num_occupied + len(states.free_slots)),
        "slots that are taken, and had": (num_occupied, sum(s.slot != NO_SLOT for s in live)),
        "sequences in the queue, of all that live": (len(states.waiting), len(_waiting(states))),
        "requests that are paused": (states.num_paused, sum(group.is_paused for group in states.groups.values())),
        "requests that tenants have": (len(states.groups), sum(t.num_live for t in scheduler.shares.tenants())),
    }
    wrong = [f"{claim}: {one} and {other}" for claim, (one, other) in claims.items() if one != other]
    if wrong:
        raise InconsistentAccounting("; ".join(wrong))


def state_of(scheduler: Scheduler, now: float) -> EngineState:
    """The engine's state, for operators.

    Args:
        now: monotonic seconds, as requests' arrivals.
    """
    states, pool, work, step_cost = scheduler.states, scheduler.pool, scheduler.last_work, scheduler.step_cost
    held = {block for sequence in states.running for block in sequence.table.held}
    fixed_s, prompt_token_s, prompt_kv_token_s, decoded_token_s, decoded_kv_token_s = step_cost.coefficients_s
    return {
        "queues": _queues(states, now),
        "running": [
            {
                "request_id": sequence.request_id,
                "index": sequence.index,
                "tenant": sequence.tenant.name,
                "priority": sequence.priority,
                "num_prompt_tokens": sequence.num_prompt_tokens,
                "num_tokens": len(sequence.token_ids),
                "num_computed_tokens": sequence.num_computed_tokens,
                "num_blocks": sequence.table.num_held,
                "is_paused": sequence.is_paused,
            }
            for sequence in states.running
        ],
        "last_step": {
            "num_prompt_tokens": work.prompt_tokens,
            "num_prompt_kv_tokens": round(work.prompt_kv),
            "num_decoded_tokens": work.own_tokens,
            "num_decoded_kv_tokens": work.own_kv,
            "predicted_s": step_cost.predict(work) if step_cost.is_ready else None,
            "measured_s": scheduler.stats().step_s,
        },
        "blocks": {
            "num_tokens_each": scheduler.limits.block_size,
            "num_all": pool.num_blocks,
            "num_held": pool.num_used,
            "num_shared": sum(map(pool.is_shared, held)),
            "num_cached": pool.num_kept,
            "num_empty": pool.num_free - pool.num_kept,
        },
        "step_cost": {
            "is_ready": step_cost.is_ready,
            "fixed_s": fixed_s,
            "prompt_token_s": prompt_token_s,
            "prompt_kv_token_s": prompt_kv_token_s,
            "decoded_token_s": decoded_token_s,
            "decoded_kv_token_s": decoded_kv_token_s,
            "error_p50": step_cost.error_p50,
            "error_p90": step_cost.error_p90,
        },
        "tenants": [
            {
                "name": tenant.name,
                "share": tenant.share,
                "counter_s": tenant.counter_s,
                "served_s": tenant.served_s,
                "num_requests": tenant.num_live,
                "num_running": tenant.num_running,
            }
            for tenant in scheduler.shares.tenants()
        ],
    }


def _queues(states: SequenceStates, now: float) -> list[QueueState]:
    """The waiting sequences, by class and tenant, the highest class first."""
    lines: dict[tuple[int, str], list[Sequence]] = {}
    for sequence in _waiting(states):
        lines.setdefault((-sequence.priority, sequence.tenant.name), []).append(sequence)
    return [
        {
            "priority": -below,
            "tenant": tenant,
            "num_sequences": len(members),
            "num_tokens": sum(len(s.token_ids) - s.num_computed_tokens for s in members),
            "oldest_s": now - min(s.arrival_s for s in members),
        }
        for (below, tenant), members in sorted(lines.items())
    ]


def _waiting(states: SequenceStates) -> list[Sequence]:
    """The sequences that should be in the queue."""
    return [
        sequence
        for group in states.groups.values()
        for sequence in group.sequences
        if sequence.state is SequenceState.WAITING and not group.is_paused and sequence.index not in group.unforked
    ]
