"""Stand-ins that record what was asked of them. Nothing here decides anything."""

from collections import deque
from dataclasses import replace
from typing import Any

from core.config import INTER_TOKEN_TARGET
from core.drafts import DraftModel
from core.engine import Engine
from core.plan import Runner, RunnerLimits, SequenceStart, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.sequence import Sequence, sequence_seed
from core.simulation import CostModel, SimulatedClock, SimulatedRunner, continuation
from core.types import FinishReason, Message, Pooling, Request, SamplingParams, StepDelivery, TokenChunk, TokenLogprobs


class FakeClock(SimulatedClock):
    """Seconds that pass when the test says so."""


def raising_runner(error: Exception, at: int = 1) -> type[SimulatedRunner]:
    """A kind of runner that raises when it collects its at-th step, and never again."""

    class RaisingRunner(SimulatedRunner):
        num_collects = 0

        def collect(self, ticket: StepPlan) -> StepOutput:
            self.num_collects += 1
            if self.num_collects == at:
                raise type(error)(*error.args)  # a new one: a raised error keeps its frames
            return super().collect(ticket)

    return RaisingRunner


def engine_over(runner: Runner[Any], **limits: Any) -> "tuple[Scheduler, Engine, deque[Message], DeliveryLog]":
    """An engine over a real runner, with other limits than its own: to be stepped by hand."""
    runner.limits = replace(runner.limits, **limits)
    scheduler, inbox, log = Scheduler(runner.limits, (), seeds=lambda: 0), deque[Message](), DeliveryLog()
    return scheduler, Engine(scheduler, runner, FakeClock(), inbox, log), inbox, log


class DeliveryLog:
    """What the loop would have been given, by request."""

    def __init__(self) -> None:
        self.deliveries: list[StepDelivery] = []
        self.chunks: list[TokenChunk] = []
        self._chunks_of: dict[str, list[TokenChunk]] = {}
        self._tokens: dict[tuple[str, int], list[int]] = {}

    def __call__(self, delivery: StepDelivery) -> None:
        self.deliveries.append(delivery)
        columns = zip(delivery.request_ids, delivery.indexes, delivery.token_ids, strict=True)
        for request_id, index, token_id in columns:
            self._tokens.setdefault((request_id, index), []).append(token_id)
        for chunk in delivery.chunks:
            self._tokens.setdefault((chunk.request_id, chunk.index), []).extend(chunk.token_ids)
            self._chunks_of.setdefault(chunk.request_id, []).append(chunk)
        self.chunks += delivery.chunks

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return self._tokens.get((request_id, index), [])

    def chunks_of(self, request_id: str) -> list[TokenChunk]:
        return self._chunks_of.get(request_id, [])

    def prompt_logprobs(self, request_id: str) -> list[TokenLogprobs]:
        return [told for chunk in self.chunks_of(request_id) for told in chunk.prompt_logprobs]

    def terminals(self, request_id: str) -> list[TokenChunk]:
        return [chunk for chunk in self.chunks_of(request_id) if chunk.is_terminal]

    def terminal(self, request_id: str) -> TokenChunk:
        """The request's terminal chunk, which must be the only one and its last news."""
        (terminal,) = self.terminals(request_id)
        assert self.chunks_of(request_id)[-1] is terminal
        return terminal

    def finish_reason(self, request_id: str, index: int = 0) -> FinishReason | None:
        reasons = [chunk.finish_reason for chunk in self.chunks_of(request_id) if chunk.index == index]
        return reasons[-1] if reasons else None


class FaultyRunner(SimulatedRunner):
    """The simulated runner, failing where it meets certain token ids.

    Args:
        raises_at: a step with one of these ids raises this, before anything of the step is done.
        fails_at: a row with one of these ids is reported as failed.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        clock: SimulatedClock,
        raises_at: dict[int, Exception] | None = None,
        fails_at: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(limits, CostModel(), clock)
        self.num_forwards = 0
        self._raises_at = raises_at or {}
        self._fails_at = fails_at

    def forward(self, plan: StepPlan) -> StepPlan:
        self.num_forwards += 1
        for token_id in plan.token_ids.tolist():
            if token_id in self._raises_at:
                raise self._raises_at[token_id]
        return super().forward(plan)

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        ends = ticket.lengths.cumsum()
        for row, (start, end) in enumerate(zip((ends - ticket.lengths).tolist(), ends.tolist(), strict=True)):
            if self._fails_at.intersection(ticket.token_ids[start:end].tolist()):
                output.failed_rows[row] = "logits are not finite"
        return output


class EngineUnderTest:
    """An engine on a simulated runner, with its inbox and all it delivers.

    Args:
        clock: the runner's, where it is given and time matters.
    """

    cost = CostModel()
    max_in_flight = 1  # steps, whatever the limits say

    def __init__(
        self,
        limits: RunnerLimits,
        eos_ids: tuple[int, ...] = (),
        runner: SimulatedRunner | None = None,
        has_prefix_cache: bool = True,
        inter_token_target: float | None = INTER_TOKEN_TARGET,
        clock: FakeClock | None = None,
        forces_tokens: bool = True,
        draft: DraftModel | None = None,
    ) -> None:
        self.clock = clock or FakeClock()
        self.limits = limits = replace(limits, max_in_flight=self.max_in_flight)
        self.eos_ids = eos_ids
        self.inbox: deque[Message] = deque()
        self.log = DeliveryLog()
        self.runner = runner or SimulatedRunner(limits, self.cost, self.clock)
        self.scheduler = Scheduler(
            limits,
            eos_ids,
            lambda: 1234,
            has_prefix_cache,
            inter_token_target,
            forces_tokens=forces_tokens,
            draft_model=draft,
        )
        self.engine = Engine(self.scheduler, self.runner, self.clock, self.inbox, self.log)

    def send(self, *messages: Message) -> None:
        self.inbox.extend(messages)

    def step(self, times: int = 1) -> bool:
        return [self.engine.step() for _ in range(times)][-1]

    def run(self) -> None:
        """Step until nothing can be computed any more."""
        while self.engine.step():
            pass

    def reference(self, request: Request, index: int = 0) -> list[int]:
        """What the request's sequence draws when alone, an ending stop id included."""
        return continuation(sequence_start(request, self.eos_ids, index), self.limits)


def sequence_start(request: Request, eos_ids: tuple[int, ...] = (), index: int = 0) -> SequenceStart:
    sampling = request.sampling
    assert sampling.seed is not None
    return SequenceStart(
        slot=0,
        token_ids=request.prompt_ids,
        num_prompt_tokens=len(request.prompt_ids),
        sampling=sampling,
        seed=sequence_seed(sampling.seed, index),
        stop_ids=sampling.stop_token_ids if sampling.ignore_eos else eos_ids + sampling.stop_token_ids,
    )


def sequences_of(scheduler: Scheduler, made: StepPlan) -> list[Sequence]:
    """Of the rows of a plan in flight."""
    return next(flight.sequences for flight in scheduler.in_flight if flight.plan is made)


def small_limits(
    num_blocks: int = 64,
    block_size: int = 4,
    max_sequences: int = 4,
    max_batch_tokens: int = 16,
    max_model_len: int = 200,
    vocab_size: int = 1000,
    num_host_blocks: int = 0,
) -> RunnerLimits:
    return RunnerLimits(
        num_blocks, block_size, max_sequences, max_batch_tokens, max_model_len, vocab_size, num_host_blocks
    )


def make_request(
    request_id: str = "a",
    num_prompt_tokens: int = 6,
    max_tokens: int = 5,
    *,
    prompt_ids: tuple[int, ...] | None = None,
    num_sequences: int = 1,
    arrival_s: float = 0.0,
    priority: int = 0,
    tenant: str = "local",
    deadline_s: float | None = None,
    cache_salt: str = "",
    pooling: Pooling | None = None,
    **sampling: object,
) -> Request:
    """A request whose prompt and seed follow from its id, unless given."""
    key = sum(request_id.encode())
    return Request(
        request_id=request_id,
        prompt_ids=prompt_ids or tuple((key + 7 * i) % 97 for i in range(num_prompt_tokens)),
        sampling=SamplingParams(**{"max_tokens": max_tokens, "seed": key, **sampling}),  # type: ignore[arg-type]
        arrival_s=arrival_s,
        num_sequences=num_sequences,
        priority=priority,
        tenant=tenant,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        pooling=pooling,
    )
