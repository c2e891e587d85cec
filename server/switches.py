"""What the real scheduler and engine would have done, by simulation, for the dashboard. Thread: loop.

POST /admin/simulate, for its tour: what a switch of the engine changes; steps take what the caller says. GET
/v1/requests/ID/why: what each cause has cost a request; steps take what was measured. Another thread runs them, one
call at a time, and lets others go first after each step.
"""

import asyncio
import enum
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from core.config import BLOCK_SIZE, INTER_TOKEN_TARGET
from core.drafts import MOST_DRAFTS
from core.errors import ErrorKind, InvalidRequest, ServiceError
from core.incident import Explanation, Machine, Outside, explain
from core.plan import RunnerLimits, SequenceStart
from core.simulation import CostModel, RequestTrace, Simulation, continuation, timed_rows
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, SamplingParams, StepDelivery
from server.app import Exchange, Operation, Route
from server.gate.admission import Admission, Place, QueueLimits
from server.gate.identity import Scope
from server.observing.accounting import RequestRecord, known_flight
from server.observing.timing import S_NS, Stage
from server.tenant_routes import body_of
from server.wire import sse

T = TypeVar("T")

VOCAB_SIZE = 1000
MOST_ANSWER_TOKENS, MOST_PROMPT_TOKENS = 2048, 32_768  # of all requests: both runs take a second or two
SHARED = 3 / 4  # of each prompt is the same text
WRONG_EVERY = 12  # of this many tokens that a request predicts of its answer, one is wrong


class Switch(enum.StrEnum):
    """What is on in the second run."""

    CONTINUOUS_BATCHING = "continuous_batching"  # off: a batch ends before the next one begins
    CHUNKED_PREFILL = "chunked_prefill"  # off: prompts are computed as fast as they fit, whatever others wait
    PREFIX_CACHE = "prefix_cache"  # off: no request finds what another has computed
    SPECULATION = "speculation"  # off: a step brings a sequence one token
    SECOND_REPLICA = "second_replica"  # off: one server has all requests
    CANCEL = "cancel"  # every second client leaves after a while
    SLOW_CLIENT = "slow_client"  # every second client reads nothing for as long, after a while
    OVERLOAD = "overload"  # off: all are let in, though those who have waited for a while for their first token leave


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What POST /admin/simulate takes.

    Args:
        answer_tokens: of the longest; the others have a quarter, a half and three quarters of it.
        gap_ms: between two requests.
        step_ms, token_ms: a step takes the first, and the second for each token that it computes.
        num_slots: sequences that run together.
        after_ms: from a request's arrival until its client leaves, or stops reading, or has no patience left.
    """

    switch: Switch
    num_requests: Annotated[int, Meta(ge=1, le=64)] = 16
    prompt_tokens: Annotated[int, Meta(ge=1, le=2048)] = 256
    answer_tokens: Annotated[int, Meta(ge=1, le=256)] = 48
    gap_ms: Annotated[float, Meta(ge=0, le=10_000)] = 20.0
    step_ms: Annotated[float, Meta(ge=0.01, le=1000)] = 10.0
    token_ms: Annotated[float, Meta(ge=0, le=100)] = 0.1
    num_slots: Annotated[int, Meta(ge=1, le=32)] = 8
    after_ms: Annotated[float, Meta(ge=0, le=60_000)] = 200.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run, in simulated milliseconds.

    Args:
        requests: of each its arrival, its first token (None: its client left before, or it was refused) and its end.
        mean_first_token_ms: from its arrival; this and the gaps are of those whose clients stay and read. None: no
            token came.
        num_refused: at once, by admission.
        num_late: whose clients have left before their first token.
        p95_gap_ms, longest_gap_ms: between two tokens of a sequence.
    """

    requests: list[tuple[float, float | None, float]]
    mean_first_token_ms: float | None
    p95_gap_ms: float
    longest_gap_ms: float
    whole_ms: float
    num_tokens: int
    num_steps: int
    num_cached_tokens: int
    num_refused: int = 0
    num_late: int = 0


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    off: Outcome
    on: Outcome


def compare(numbers: Numbers, on_step: Callable[[Any], None] = lambda scheduler: None) -> Comparison:
    """Run the requests without the switch and with it."""
    return Comparison(off=_run(numbers, False, on_step), on=_run(numbers, True, on_step))


def _run(numbers: Numbers, is_on: bool, on_step: Callable[[Any], None]) -> Outcome:
    switch = numbers.switch
    cost = CostModel(numbers.step_ms / 1e3, numbers.token_ms / 1e3)
    num_each = -(-(numbers.prompt_tokens + numbers.answer_tokens) // BLOCK_SIZE)
    limits = RunnerLimits(
        num_blocks=2 * num_each * numbers.num_slots,  # prompts that were computed stay for a while
        block_size=BLOCK_SIZE,
        max_sequences=numbers.num_slots,
        max_batch_tokens=2048 + numbers.num_slots,
        max_model_len=numbers.prompt_tokens + numbers.answer_tokens,
        vocab_size=VOCAB_SIZE,
        max_drafts=MOST_DRAFTS if is_on and switch is Switch.SPECULATION else 0,
        timed_rows=timed_rows(lambda work: cost.fixed_s + cost.token_s * (work.prompt_tokens + work.own_tokens)),
    )
    whole_prompts = switch is Switch.CHUNKED_PREFILL and not is_on
    one_batch = switch is Switch.CONTINUOUS_BATCHING and not is_on
    requests = [
        _request(numbers, i, limits, is_on and switch is Switch.PREFIX_CACHE) for i in range(numbers.num_requests)
    ]
    num_replicas = 2 if is_on and switch is Switch.SECOND_REPLICA else 1
    make = partial(_Rush, patience_s=numbers.after_ms / 1e3, refuses=is_on) if switch is Switch.OVERLOAD else Simulation
    simulations = [
        make(
            replace(limits, max_batch_tokens=MOST_PROMPT_TOKENS + numbers.num_slots) if whole_prompts else limits,
            cost,
            requests[i::num_replicas],
            num_may_enter=lambda num: numbers.num_slots if not one_batch else 0 if num else numbers.num_slots,
            on_step=on_step,
            inter_token_target=None if whole_prompts else INTER_TOKEN_TARGET,
            messages=_messages(numbers) if is_on else (),
        )
        for i in range(num_replicas)
    ]
    traces = [trace for one in simulations for trace in one.run()]
    return _outcome(numbers, traces, sum(one.scheduler.stats().num_steps for one in simulations))


class _Rush(Simulation):
    """Clients who leave if their first token does not come in time, and perhaps the server's admission before them.

    Args:
        refuses: whom admission expects to be late; otherwise all are let in.
    """

    def __init__(self, *arguments: Any, patience_s: float, refuses: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._patience_s = patience_s
        bounds = QueueLimits(max_requests=sys.maxsize, max_tokens=sys.maxsize, max_bytes=sys.maxsize)
        self._admission = Admission(bounds, self.scheduler.stats, self.clock)
        self._allowed_s = patience_s if refuses else math.inf
        self._places: dict[str, Place] = {}  # of requests that go on

    def _admits(self, request: Request) -> bool:
        place = self._admission.enter(request.tenant, 0)
        try:
            place.admit((request,), self.clock() + self._allowed_s, self.clock())
        except ServiceError:
            place.leave(self.clock())
            return False
        self._places[request.request_id] = place
        return True

    def _take(self, delivery: StepDelivery) -> None:
        super()._take(delivery)
        now_s = self.clock()
        for name, place in list(self._places.items()):
            trace = self.traces[name]
            if not place.has_begun and now_s > trace.request.arrival_s + self._patience_s:
                self._inbox.append(Cancel(name, FinishReason.CANCELLED))
                trace.first_token_s = None  # if it has just come, nobody has read it
            elif trace.first_token_s is not None and not place.has_begun:
                place.on_first_token(0, now_s)
            if trace.end_s is not None:
                self._places.pop(name).leave(now_s)


def _request(numbers: Numbers, index: int, limits: RunnerLimits, shares: bool) -> Request:
    num_shared = int(SHARED * numbers.prompt_tokens)
    prompt = tuple((7 * i + (i >= num_shared) * 101 * index) % VOCAB_SIZE for i in range(numbers.prompt_tokens))
    sampling = SamplingParams(max_tokens=max(1, numbers.answer_tokens * (1 + index % 4) // 4), seed=index)
    predicted: tuple[int, ...] = ()
    if limits.max_drafts:
        answer = continuation(SequenceStart(0, prompt, len(prompt), sampling, index, ()), limits)
        predicted = tuple((one + (i % WRONG_EVERY == 0)) % VOCAB_SIZE for i, one in enumerate(answer, 1))
    return Request(
        request_id=str(index),
        prompt_ids=prompt,
        sampling=sampling,
        prediction_ids=predicted,
        arrival_s=index * numbers.gap_ms / 1e3,
        cache_salt="" if shares else str(index),
    )


def _messages(numbers: Numbers) -> list[tuple[float, Message]]:
    """What the engine is told on account of every second client."""
    found: list[tuple[float, Message]] = []
    for index in range(1, numbers.num_requests, 2):
        at_s, name = (index * numbers.gap_ms + numbers.after_ms) / 1e3, str(index)
        if numbers.switch is Switch.CANCEL:
            found.append((at_s, Cancel(name, FinishReason.CANCELLED)))
        elif numbers.switch is Switch.SLOW_CLIENT:
            found += [(at_s, Pause(name)), (at_s + numbers.after_ms / 1e3, Resume(name))]
    return found


def _outcome(numbers: Numbers, traces: list[RequestTrace], num_steps: int) -> Outcome:
    rows = []
    traces.sort(key=lambda one: int(one.request.request_id))
    for trace in traces:
        assert trace.end_s is not None, "it has ended"
        first_ms = None if trace.first_token_s is None else 1e3 * trace.first_token_s
        rows.append((1e3 * trace.request.arrival_s, first_ms, 1e3 * trace.end_s))
    step = 2 if numbers.switch in (Switch.CANCEL, Switch.SLOW_CLIENT) else 1
    firsts = [first - arrival for arrival, first, _ in rows[::step] if first is not None]
    gaps = sorted(gap for trace in traces[::step] for gap in trace.gaps_s) or [0.0]
    answered = [trace for trace in traces if trace.first_token_s is not None]
    num_refused = sum(trace.usage is None for trace in traces)
    usages = [trace.usage for trace in traces if trace.usage is not None]
    return Outcome(
        requests=rows,
        mean_first_token_ms=sum(firsts) / len(firsts) if firsts else None,
        p95_gap_ms=1e3 * gaps[int(0.95 * (len(gaps) - 1))],
        longest_gap_ms=1e3 * gaps[-1],
        whole_ms=max(end for _, _, end in rows),
        num_tokens=sum(len(times) for trace in answered for times in trace.token_times_s.values()),
        num_steps=num_steps,
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        num_refused=num_refused,
        num_late=len(traces) - len(answered) - num_refused,
    )


class _OneAtATime:
    """The simulations of all callers."""

    def __init__(self) -> None:
        self._is_running = False

    async def run(self, exchange: Exchange, simulate: Callable[[Callable[[Any], None]], T]) -> T:
        """simulate: is given what to call after each step."""
        if self._is_running:
            message = "Another simulation is running. Try again in a second."
            raise ServiceError(ErrorKind.RATE_LIMITED, message, "simulation_running", retry_after_s=1.0)
        self._is_running = True
        running = asyncio.ensure_future(exchange.server.offload(lambda: simulate(lambda scheduler: time.sleep(0))))
        running.add_done_callback(self._let_next)
        return await asyncio.shield(running)  # its thread goes on if the client leaves

    def _let_next(self, running: "asyncio.Future[Any]") -> None:
        self._is_running = False


_simulations = _OneAtATime()


async def simulate_switch(exchange: Exchange) -> None:
    numbers = await body_of(exchange, Numbers)
    for name, most in (("answer_tokens", MOST_ANSWER_TOKENS), ("prompt_tokens", MOST_PROMPT_TOKENS)):
        if numbers.num_requests * getattr(numbers, name) > most:
            raise InvalidRequest(f"num_requests times {name} must be at most {most}.", name)
    found = await _simulations.run(exchange, lambda on_step: compare(numbers, on_step))
    exchange.send(sse.json_line(msgspec.to_builtins(found)))


async def explain_request(exchange: Exchange, request_id: str, tenant: str | None) -> None:
    """Why a request of the tenant's (None: of any) took so long.

    Raises:
        ServiceError: it goes on; or nothing is known of it, or not how the engine ran it.
    """
    server = exchange.server
    if any(request_id == one.request_id and tenant in (None, one.tenant) for one in server.generating()):
        message = "The request is still in progress. Try again when it has ended."
        raise ServiceError(ErrorKind.CONFLICT, message, "request_in_progress")
    flight = known_flight(request_id, tenant, server.accounting.recorder)
    served, outlook = server.generations, server.stats.outlook
    paces = [] if served is None or served.own is None else served.own.engine.paces()
    courses = [] if served is None else served.courses()
    own = [one for one in courses if one.owner == flight.request_id]
    if served is None or served.limits is None or outlook is None or not (own and paces):
        message = "There is no record of how the engine ran this request: an upstream answered it, or it is too old."
        raise ServiceError(ErrorKind.NOT_FOUND, message, "request_not_kept")
    machine, now_s = Machine(served.limits, outlook.inter_token_target, paces), server.clock.monotonic()
    outside = _outside(flight, own[0].submitted_s, own[0].ended_s)
    name = flight.request_id
    found: Explanation = await _simulations.run(
        exchange, lambda on_step: explain(name, courses, machine, outside, now_s, on_step)
    )
    exchange.send(sse.json_line(msgspec.to_builtins(found)))


def _outside(flight: RequestRecord, submitted_s: float, ended_s: float) -> Outside:
    timings = flight.timings
    over_s = timings.accepted_s + timings.total_ns / S_NS
    grammar_s, flush_s = (timings.stages_ns().get(stage, 0) / S_NS for stage in (Stage.GRAMMAR, Stage.LAST_FLUSH))
    before_s, after_s = submitted_s - timings.accepted_s, max(0.0, over_s - ended_s)
    return Outside(before_s=before_s, grammar_s=grammar_s, after_s=after_s, last_flush_s=flush_s)


_EXAMPLE = {"switch": "prefix_cache", "num_requests": 16, "prompt_tokens": 512}
_OPERATION = Operation("What a switch of the engine changes, by simulation", Numbers, None, _EXAMPLE, Comparison)
ROUTES = {"/admin/simulate": {"POST": Route(simulate_switch, Scope.ADMIN, needs_model=False, operation=_OPERATION)}}
