"""Requests, what their clients do by the tokens they get, and what becomes of them: the same whatever the timing."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from core.engine import Engine
from core.plan import Runner
from core.scheduler import Scheduler
from core.simulation import SimulatedClock
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, Submit, TokenLogprobs
from tests.fakes import DeliveryLog

Names = dict[tuple[str, int], int]  # (request id, sequence's index) -> a number of tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """
    Args:
        requests: with the number of steps after which each comes.
        stops_after: sequences that end by what their first tokens say, as with a stop string.
        leaves_after: sequences whose client is gone once it has so many tokens.
        pauses: requests that are paused after so many steps, and resumed after so many.
    """

    requests: list[tuple[int, Request]]
    stops_after: Names = field(default_factory=dict)
    leaves_after: Names = field(default_factory=dict)
    pauses: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a client has of a sequence in the end."""

    token_ids: list[int]
    reason: FinishReason | None
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a request, whatever the timing; of a prompt that failed, how much was computed is the timing's."""

    endings: list[Ending]
    num_completion_tokens: int
    num_prompt_tokens: int | None


class WorkloadRun:
    """One workload on one engine, step by step until all has ended.

    Args:
        on_step: called after each.
    """

    def __init__(
        self,
        workload: Workload,
        scheduler: Scheduler,
        runner: Runner[Any],
        clock: SimulatedClock,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._workload = workload
        self._on_step = on_step
        self._inbox: deque[Message] = deque()
        self._log = DeliveryLog()
        self._engine = Engine(scheduler, runner, clock, self._inbox, self._log)
        self._left = {**workload.stops_after, **workload.leaves_after}

    def run(self) -> dict[str, Outcome]:
        coming = deque(sorted(self._workload.requests, key=lambda one: one[0]))
        num_steps = 0
        while True:
            while coming and coming[0][0] <= num_steps:
                self._inbox.append(Submit(coming.popleft()[1]))
            self._pause_and_resume(num_steps)
            is_busy = self._engine.step()
            num_steps += 1
            self._leave()
            self._on_step()
            is_paused = any(num_steps <= end for _, end in self._workload.pauses.values())
            if not (is_busy or coming or is_paused or self._inbox):
                return {request.request_id: self._outcome(request) for _, request in self._workload.requests}

    def _pause_and_resume(self, num_steps: int) -> None:
        for request_id, (start, end) in self._workload.pauses.items():
            if num_steps == start:
                self._inbox.append(Pause(request_id))
            elif num_steps == end:
                self._inbox.append(Resume(request_id))

    def _leave(self) -> None:
        """As the handle does on the loop: by the tokens that have come, and once."""
        for name, num_tokens in list(self._left.items()):
            if len(self._log.tokens(*name)) >= num_tokens:
                del self._left[name]
                reason = FinishReason.STOP if name in self._workload.stops_after else FinishReason.CANCELLED
                self._inbox.append(Cancel(name[0], reason, name[1], num_tokens))

    def _outcome(self, request: Request) -> Outcome:
        request_id = request.request_id
        endings = [self._ending(request_id, index) for index in range(request.num_sequences)]
        usage = self._log.terminal(request_id).usage
        assert usage is not None
        has_failed = any(ending.reason is FinishReason.ERROR for ending in endings)
        num_prompt_tokens = None if has_failed else usage.num_prompt_tokens
        num_tokens = sum(self._num_counted(request_id, index) for index in range(request.num_sequences))
        assert num_tokens <= usage.num_completion_tokens
        return Outcome(endings, num_tokens, num_prompt_tokens)

    def _num_counted(self, request_id: str, index: int) -> int:
        """As the handle counts: without tokens that came together with the last one that its client took."""
        limit = {**self._workload.stops_after, **self._workload.leaves_after}.get((request_id, index))
        counts = [
            c.num_sequence_tokens for c in self._log.chunks_of(request_id) if c.index == index and c.finish_reason
        ]
        return counts[-1] if limit is None else min(counts[-1], limit)

    def _ending(self, request_id: str, index: int) -> Ending:
        name = (request_id, index)
        limit = {**self._workload.stops_after, **self._workload.leaves_after}.get(name)
        token_ids = self._log.tokens(*name)[:limit]
        reason = self._log.finish_reason(*name)
        if limit is not None and len(token_ids) == limit:  # it may have ended by itself at the same token
            reason = None
        chunks = [c for c in self._log.chunks if (c.request_id, c.index) == name and c.logprobs]
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()][:limit]
        return Ending(token_ids, reason, logprobs)
