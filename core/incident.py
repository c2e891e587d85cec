"""Why a request was slow: its minute runs again by simulation, as it was and without each cause in turn.

A Course is what is recorded of a request while it runs: counts and times, no text and no token ids. `explain` runs the
courses of a minute on the real scheduler; a step takes what the step-cost model predicted at that time, times how much
longer steps took then (Pace). Where that run differs from what was measured by more than MOST_OFF, there is no verdict.
Drafts count as text that a grammar forces. Copies to the host and the loop's work are not simulated. Any thread; pure.
"""

import enum
import math
from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from core.plan import Int32Array, PlanBuilder, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.sequence import Sequence as EngineSequence
from core.simulation import CostModel, SimulatedClock, Simulation
from core.step_cost import Features, StepWork, predicted_s
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, SamplingParams, StepDelivery

MAX_COURSES = 2048  # that are kept
PREFIX_TOKENS, MAX_PREFIXES = 64, 512  # of a prompt, a digest for each so many tokens
LEADS_S = (60.0, 20.0, 5.0, 0.0)  # before the request came, at most: the longest that is small enough is run
SETTLING_S = 0.5  # before that, for those who decode: together they are no burst of prompts
MOST_TOKENS, MOST_PROMPT_TOKENS, MOST_STEPS = 40_000, 1_000_000, 20_000  # of one run
MOST_OFF, LEAST_OFF_S = 0.2, 0.02  # between the simulated time and the measured one
SHARE, FIRST_TOKEN_SHARE = 0.1, 0.5  # of the whole time, or of that to the first token: from this on a cause counts
_VOCABULARY = 2**30


class Cause(enum.StrEnum):
    """What may have made a request slow, beside its own work."""

    NEIGHBOURS_PROMPTS = "neighbours_prompts"  # other requests' prompts were computed
    PREEMPTION = "preemption"  # it, or others, lost KV blocks and computed them again
    QUOTA_PAUSES = "quota_pauses"
    SLOW_READER = "slow_reader"  # its client did not take its answer
    SLOW_STEPS = "slow_steps"  # steps took longer than the step-cost model predicts: another process, a compilation
    GRAMMAR = "grammar"  # it was compiled first
    COLD_CACHE = "cold_cache"  # its prompt began as an earlier one, and was not in the prefix cache any more


_WHAT = {
    Cause.NEIGHBOURS_PROMPTS: "the prompts of other requests, which were computed at the same time",
    Cause.PREEMPTION: "preemption: KV blocks ran short, and what was in them was computed again",
    Cause.QUOTA_PAUSES: "its quota, which paused it",
    Cause.SLOW_READER: "its client, which read slowly",
    Cause.SLOW_STEPS: "slow steps: something else kept the machine busy",
    Cause.GRAMMAR: "its grammar or schema, which had to be compiled first",
    Cause.COLD_CACHE: "a cold cache: its prompt began as an earlier one, and was computed again",
}


class Stall(NamedTuple):
    """A pause of a request, that has had so many tokens."""

    cause: Cause
    num_tokens: int
    took_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Course:
    """How one of the engine's requests went. Times are monotonic seconds.

    Args:
        owner: the id of the request as its client knows it, that may have several prompts.
        prefixes: a digest of the prompt up to each multiple of PREFIX_TOKENS.
        num_tokens: of all its sequences, so far.
        first_token_s: of the owner's first; None: none yet.
        ended_s: infinite: it goes on.
        step_tokens: that a step has brought a sequence, on average: more than one by drafts and forced text.
    """

    owner: str
    request_id: str
    submitted_s: float
    num_prompt_tokens: int
    num_sequences: int
    tenant: str
    share: int
    priority: int
    deadline_s: float | None
    prefixes: "array[int]"
    num_cached_tokens: int = 0
    num_tokens: int = 0
    first_token_s: float | None = None
    ended_s: float = math.inf
    step_tokens: float = 1.0
    stalls: list[Stall] = field(default_factory=list)

    @classmethod
    def of(cls, owner: str, request: Request, now_s: float) -> "Course":
        """Of a request that is submitted now."""
        return cls(
            owner=owner,
            request_id=request.request_id,
            submitted_s=now_s,
            num_prompt_tokens=len(request.prompt_ids),
            num_sequences=request.num_sequences,
            tenant=request.tenant,
            share=request.share,
            priority=request.priority,
            deadline_s=request.deadline_s,
            prefixes=_prefixes_of(request),
        )


def _prefixes_of(request: Request) -> "array[int]":
    """By Python's hash, whose strings have a secret of the process: 15 us for 2,000 tokens."""
    ids, digest, found = request.prompt_ids, hash(request.cache_root), array("q")
    for end in range(PREFIX_TOKENS, min(len(ids), PREFIX_TOKENS * MAX_PREFIXES) + 1, PREFIX_TOKENS):
        digest = hash((digest, ids[end - PREFIX_TOKENS : end]))
        found.append(digest)
    return found


class Pace(NamedTuple):
    """How far the engine was at a time, by its EngineStats, and how its step-cost model predicted."""

    at_s: float
    busy_s: float
    predicted_s: float
    fit: Features
    late_p90: float


class Machine:
    """What ran the requests.

    Args:
        paces: in order of time, at least one.
        inter_token_target: see EngineConfig.
    """

    def __init__(self, limits: RunnerLimits, inter_token_target: float | None, paces: Sequence[Pace]) -> None:
        self.limits, self.inter_token_target = limits, inter_token_target
        self._paces = paces
        self._ends_s = [one.at_s for one in paces[1:]]
        self._slowness = [_slowness(first, second) for first, second in pairwise(paces)]

    def end_s(self, work: StepWork, at_s: float, is_held_up: bool) -> float:
        """When a step ends.

        Args:
            at_s: when it begins.
            is_held_up: as steps of that time were, against what was predicted.
        """
        part = 1.0  # that is still to be computed
        for i in range(bisect_right(self._ends_s, at_s), len(self._ends_s)):
            took_s = predicted_s(self._paces[i].fit, work, self.limits.few_tokens)
            took_s *= self._slowness[i] if is_held_up else 1.0
            if at_s + part * took_s <= self._ends_s[i]:
                return at_s + part * took_s
            part -= (self._ends_s[i] - at_s) / took_s
            at_s = self._ends_s[i]
        return at_s + part * predicted_s(self._paces[-1].fit, work, self.limits.few_tokens)

    def pace_at(self, at_s: float) -> Pace:
        return self._paces[bisect_right(self._ends_s, at_s)]


def _slowness(first: Pace, second: Pace) -> float:
    spent_s, told_s = second.busy_s - first.busy_s, second.predicted_s - first.predicted_s
    return spent_s / told_s if spent_s > 0 and told_s > 0 else 1.0


class Outside(NamedTuple):
    """A request's seconds beside the engine's: before it was submitted, and after its last token.

    Args:
        grammar_s: of those before, until its grammar was compiled.
        last_flush_s: of those after, until the client had taken all.
    """

    before_s: float = 0.0
    grammar_s: float = 0.0
    after_s: float = 0.0
    last_flush_s: float = 0.0


class CauseCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one cause has cost.

    Args:
        first_token_cost_ms: of cost_ms, before the first token.
        counts: it is a tenth of the whole time, or half of that to the first token.
    """

    cause: Cause
    cost_ms: float
    first_token_cost_ms: float
    counts: bool


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request took so long. Times are its client's, from its first byte to its last.

    Args:
        verdict: in words.
        cause: the largest that counts; None: none does, or there is no verdict.
        has_verdict: the simulation is close enough to what was measured.
        simulated_ms: as it was, by simulation; None: it was not simulated.
        causes: the largest cost first.
        without_all_ms: without any of the causes.
        num_beside: other requests of the run.
        num_steps: of the run.
    """

    id: str
    verdict: str
    cause: Cause | None
    has_verdict: bool
    time_ms: float
    simulated_ms: float | None = None
    causes: tuple[CauseCost, ...] = ()
    without_all_ms: float | None = None
    num_beside: int = 0
    num_steps: int = 0


class _TooLong(Exception):
    """A run has more steps than may be simulated, or does not end."""


def explain(
    owner: str,
    courses: Iterable[Course],
    machine: Machine,
    outside: Outside,
    now_s: float,
    on_step: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Explanation:
    """Run the minute of a request that is over as it was, and without each cause.

    Args:
        owner: see Course.
        courses: all that are kept, the owner's among them.
        now_s: when the courses were copied.
        on_step: called after each simulated step.
    """
    ordered = sorted(courses, key=attrgetter("submitted_s"))
    own = [one for one in ordered if one.owner == owner]
    engine_s = max(one.ended_s for one in own) - own[0].submitted_s
    time_s = outside.before_s + engine_s + outside.after_s
    found = Explanation(id=owner, verdict="", cause=None, has_verdict=False, time_ms=_ms(time_s))
    if not any(one.num_tokens for one in own):
        return msgspec.structs.replace(found, verdict="No verdict: it ended before its first token.")
    try:
        minute = _minute_of(own, ordered, machine, now_s, on_step)
        was = minute.run()
    except _TooLong:
        return msgspec.structs.replace(found, verdict="No verdict: too much ran at the same time to simulate it.")
    simulated_s, num_beside = time_s + was.end_s - engine_s, len(minute.courses) - len(own)
    found = msgspec.structs.replace(
        found, simulated_ms=_ms(simulated_s), num_beside=num_beside, num_steps=was.num_steps
    )
    if abs(was.end_s - engine_s) > max(LEAST_OFF_S, MOST_OFF * engine_s):
        verdict = (
            f"No verdict: it took {_shown(time_s)}, and {_shown(simulated_s)} by simulation. The difference comes "
            "from something that is not simulated: copies of blocks, or the event loop."
        )
        return msgspec.structs.replace(found, verdict=verdict)
    causes = sorted(_costs(minute, was, time_s, outside), key=lambda one: (-one.counts, -one.cost_ms))
    beside_s = outside.last_flush_s + outside.grammar_s
    least_s = simulated_s - was.end_s + minute.without(frozenset(Cause), was).end_s - beside_s
    return msgspec.structs.replace(
        found,
        verdict=_verdict(time_s, causes, own, num_beside),
        cause=causes[0].cause if causes[0].counts else None,
        has_verdict=True,
        causes=tuple(causes),
        without_all_ms=_ms(max(0.0, least_s)),
    )


def _minute_of(
    own: Sequence[Course],
    ordered: Sequence[Course],
    machine: Machine,
    now_s: float,
    on_step: Callable[[Scheduler], None],
) -> "_Minute":
    """Others that decoded when it came go on from there; if some still waited, all run from the first one's submit.

    Raises:
        _TooLong: it has too many tokens.
    """
    start_s, end_s = own[0].submitted_s, max(one.ended_s for one in own)
    lasting = [one for one in ordered if one.submitted_s < end_s]
    waiting = [one for one in lasting if one.submitted_s < start_s < one.ended_s and not _had_token(one, start_s)]
    first_s = min([start_s, *(one.submitted_s for one in waiting)])
    for lead_s in LEADS_S:
        since_s = max(first_s, start_s - lead_s)
        beside = [one for one in lasting if one.ended_s > since_s]
        minute = _Minute(lasting, beside, own, since_s - SETTLING_S, now_s, machine, on_step)
        if minute.is_small:
            return minute
    raise _TooLong


def _costs(minute: "_Minute", was: "_Run", time_s: float, outside: Outside) -> Iterator[CauseCost]:
    for cause in Cause:
        run = minute.without(frozenset((cause,)), was)
        flush_s = outside.last_flush_s if cause is Cause.SLOW_READER else 0.0
        grammar_s = outside.grammar_s if cause is Cause.GRAMMAR else 0.0
        cost_s = max(0.0, was.end_s - run.end_s + flush_s + grammar_s)
        first_s = max(0.0, was.first_s - run.first_s + grammar_s)
        counts = cost_s >= SHARE * time_s or first_s >= FIRST_TOKEN_SHARE * (outside.before_s + was.first_s)
        yield CauseCost(cause=cause, cost_ms=_ms(cost_s), first_token_cost_ms=_ms(first_s), counts=counts)


def _verdict(time_s: float, causes: Sequence[CauseCost], own: Sequence[Course], num_beside: int) -> str:
    whole = _shown(time_s)
    counting = [one for one in causes if one.counts]
    if not counting:
        num_prompt, num_own = sum(one.num_prompt_tokens for one in own), sum(one.num_tokens for one in own)
        company = f"beside {num_beside:,} other requests" if num_beside else "alone"
        return (
            f"No cause took a tenth of its {whole}: its own {num_prompt:,} prompt tokens and "
            f"{num_own:,} tokens take that long {company}."
        )
    return f"Of its {whole}, {'; and '.join(map(_part, counting))}."


def _part(cost: CauseCost) -> str:
    told = f"{_shown(cost.cost_ms / 1e3)} went to {_WHAT[cost.cause]}"
    first_ms = cost.first_token_cost_ms
    is_part = first_ms and first_ms >= SHARE * cost.cost_ms
    return f"{told}, {_shown(first_ms / 1e3)} of it before its first token" if is_part else told


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class _Run(NamedTuple):
    """One run: seconds from the request's submit to its first token and its end."""

    first_s: float
    end_s: float
    num_steps: int
    num_preemptions: int


class _Minute:
    """The courses from a time on, as requests of a simulation.

    Args:
        earlier: all that are kept, in order.
        courses: of these, those to run.
        own: those whose time is asked for.
    """

    def __init__(
        self,
        earlier: Sequence[Course],
        courses: Sequence[Course],
        own: Sequence[Course],
        from_s: float,
        now_s: float,
        machine: Machine,
        on_step: Callable[[Scheduler], None],
    ) -> None:
        self.courses = [_since(one, from_s, now_s) for one in courses]
        self._own = [one.request_id for one in own]
        self._start_s, self._from_s = own[0].submitted_s, from_s
        self._machine, self._on_step = machine, on_step
        self._known = {one.request_id: _num_known(one, earlier) for one in own}
        self._stalled_by = {stall.cause for one in own for stall in one.stalls}

    @property
    def is_small(self) -> bool:
        num_tokens = sum(one.num_tokens for one in self.courses)
        return num_tokens <= MOST_TOKENS and sum(one.num_prompt_tokens for one in self.courses) <= MOST_PROMPT_TOKENS

    def without(self, causes: frozenset[Cause], was: _Run) -> _Run:
        """The run without some causes; those that cannot have been are not run."""
        own, present = set(self._own), {Cause.SLOW_STEPS, *self._stalled_by}
        if was.num_preemptions:
            present.add(Cause.PREEMPTION)
        if any(one.request_id not in own for one in self.courses):
            present.add(Cause.NEIGHBOURS_PROMPTS)
        if any(self._known[one.request_id] > one.num_cached_tokens for one in self.courses if one.request_id in own):
            present.add(Cause.COLD_CACHE)
        try:
            return self.run(causes & present) if causes & present else was
        except _TooLong:
            return was

    def run(self, without: frozenset[Cause] = frozenset()) -> _Run:
        """Raises _TooLong: see there."""
        machine, own = self._machine, set(self._own)
        free = {one.request_id: one.num_cached_tokens for one in self.courses}
        if Cause.NEIGHBOURS_PROMPTS in without:
            free |= {one.request_id: one.num_prompt_tokens for one in self.courses if one.request_id not in own}
        if Cause.COLD_CACHE in without:
            free |= {name: max(free[name], num_known) for name, num_known in self._known.items()}
        stalls = {
            one.request_id: [stall for stall in one.stalls if one.request_id not in own or stall.cause not in without]
            for one in self.courses
        }
        preempts = Cause.PREEMPTION not in without
        simulation = _Replay(
            self._limits(preempts),
            machine,
            self._requests(),
            stalls,
            self._cancels(),
            partial(_ReplayScheduler, free=free, preempts=preempts, pace_at=machine.pace_at),
            self._on_step,
            partial(machine.end_s, is_held_up=Cause.SLOW_STEPS not in without),
            self._from_s,
        )
        traces = [simulation.traces[name] for name in self._own]
        steps = iter(range(MOST_STEPS))
        while any(trace.end_s is None for trace in traces):
            if next(steps, None) is None or not simulation.advance():
                raise _TooLong
        ends = [trace.end_s or 0.0 for trace in traces]
        late_s = max(_stalled_at_end_s(one, stalls[one.request_id]) for one in self.courses if one.request_id in own)
        firsts = [trace.first_token_s for trace in traces if trace.first_token_s is not None]
        stats = simulation.scheduler.stats()
        first_s = min(firsts, default=max(ends)) - self._start_s
        return _Run(first_s, max(ends) + late_s - self._start_s, stats.num_steps, stats.num_preemptions)

    def _limits(self, preempts: bool) -> RunnerLimits:
        limits = self._machine.limits
        num_each = -(-limits.max_model_len // limits.block_size)
        return replace(
            limits,
            num_blocks=limits.num_blocks if preempts else num_each * len(self.courses),
            vocab_size=32,  # of masks that nobody looks at
            num_host_blocks=0,
            max_drafts=0,
            num_kept_states=None,
            window=None,  # what layers see of a context costs next to no time, and the simulated one keeps all
            num_window_blocks=None,
            takes_whole_prompts=False,
            timed_rows=(),
        )

    def _requests(self) -> list[Request]:
        """With prompts of numbers: those that were found in the cache have those of the prompts that they began as."""
        fresh, numbers, requests = count(1), dict[int, int](), []
        for one in self.courses:
            ids: list[int] = []
            for i, digest in enumerate(one.prefixes, 1):
                if i * PREFIX_TOKENS > one.num_cached_tokens or digest not in numbers:
                    numbers[digest] = next(fresh)
                ids += [numbers[digest]] * PREFIX_TOKENS
            ids = ids[: one.num_prompt_tokens]
            ids += [next(fresh)] * (one.num_prompt_tokens - len(ids))
            num_each = -(-one.num_tokens // one.num_sequences)
            requests.append(
                Request(
                    request_id=one.request_id,
                    prompt_ids=tuple(ids),
                    sampling=SamplingParams(max_tokens=max(1, num_each), ignore_eos=True),
                    arrival_s=one.submitted_s,
                    num_sequences=one.num_sequences,
                    tenant=one.tenant,
                    share=one.share,
                    priority=one.priority,
                    deadline_s=one.deadline_s,
                    grammar=cast(Any, _Forces(one.step_tokens)) if one.step_tokens > 1 else None,
                )
            )
        return requests

    def _cancels(self) -> list[tuple[float, Message]]:
        """Of the requests that ended without a token."""
        ended = [one for one in self.courses if one.ended_s < math.inf and not one.num_tokens]
        return [(one.ended_s, Cancel(one.request_id, FinishReason.CANCELLED)) for one in ended]


def _had_token(course: Course, at_s: float) -> bool:
    return course.first_token_s is not None and course.first_token_s < at_s


def _since(course: Course, from_s: float, now_s: float) -> Course:
    """What there was of it from a time on: what it had computed before then is in the cache."""
    if course.submitted_s >= from_s:
        return course
    end_s = min(course.ended_s, now_s)
    if course.first_token_s is None or not _had_token(course, from_s) or end_s <= from_s:
        return replace(course, submitted_s=from_s)
    num_left = math.ceil(course.num_tokens * (end_s - from_s) / (end_s - course.first_token_s))
    num_before = course.num_tokens - num_left
    stalls = [stall._replace(num_tokens=stall.num_tokens - num_before) for stall in course.stalls]
    num_prompt = course.num_prompt_tokens + num_before // course.num_sequences
    return replace(
        course,
        submitted_s=from_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_prompt,
        num_tokens=num_left,
        stalls=[stall for stall in stalls if stall.num_tokens >= 0],
    )


def _num_known(course: Course, courses: Iterable[Course]) -> int:
    """How many of a prompt's first tokens an earlier request had computed before this one came."""
    earlier = [one for one in courses if one.first_token_s is not None and one.first_token_s <= course.submitted_s]
    known = {digest for one in earlier if one.owner != course.owner for digest in one.prefixes}
    num_units = next((i for i, digest in enumerate(course.prefixes) if digest not in known), len(course.prefixes))
    return min(num_units * PREFIX_TOKENS, course.num_prompt_tokens - 1)


def _stalled_at_end_s(course: Course, stalls: Iterable[Stall]) -> float:
    """The pause that it ended in, which no further token follows."""
    return max((stall.took_s for stall in stalls if stall.num_tokens >= course.num_tokens), default=0.0)


class _Forces:
    """In a grammar's place, and in its state's: so many tokens come in a step, of which the first is sampled."""

    is_free = has_ended = False
    fault = None

    def __init__(self, step_tokens: float) -> None:
        self._step_tokens = step_tokens
        self.num_accepted = self._num_steps = self._num_due = 0

    def start(self) -> "_Forces":
        return _Forces(self._step_tokens)

    def accept(self, token_id: int) -> None:
        self.num_accepted += 1

    def fill_mask(self, mask: Int32Array) -> None:
        pass

    def forced(self) -> list[int]:
        if self.num_accepted > self._num_due:  # by a sampled one
            self._num_steps += 1
            self._num_due = max(self.num_accepted, round(self._num_steps * self._step_tokens))
        return [0] * (self._num_due - self.num_accepted)


class _ReplayScheduler(Scheduler):
    """The scheduler, which predicts steps as it did then, of requests that need not compute all of their prompts.

    Args:
        free: by request, leading tokens of its prompt that cost nothing.
        preempts: False: nobody gives way; there are blocks for all.
    """

    def __init__(
        self, *arguments: Any, free: Mapping[str, int], preempts: bool, pace_at: Callable[[float], Pace], **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._free, self._preempts, self._pace_at = free, preempts, pace_at

    def plan(self, now: float) -> StepPlan | None:
        pace = self._pace_at(now)
        self.step_cost.recall(pace.fit, pace.late_p90)
        return super().plan(now)

    def _make_room(self, builder: PlanBuilder, now: float) -> None:
        if self._preempts:
            super()._make_room(builder, now)

    def _preempt_paused(self, builder: PlanBuilder, head: EngineSequence) -> bool:
        return self._preempts and super()._preempt_paused(builder, head)

    def _admit(self, builder: PlanBuilder, sequence: EngineSequence, level: int, num_reserved: int) -> bool:
        num_free = min(self._free[sequence.request_id], sequence.num_prompt_tokens - 1)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_free)
        return super()._admit(builder, sequence, level, num_reserved)


class _TimedRunner:
    """A core.plan.Runner whose steps take time and compute nothing: each token is one that nobody has had."""

    def __init__(self, limits: RunnerLimits, end_s: Callable[[StepWork, float], float], clock: SimulatedClock) -> None:
        self.limits = limits
        self._end_s, self._clock = end_s, clock
        self._prompts: dict[int, int] = {}  # tokens, by slot
        self._free_s = 0.0  # when the device has finished all steps
        self._ends_s: deque[float] = deque()
        self._next_id = _VOCABULARY // 2

    def forward(self, plan: StepPlan) -> StepPlan:
        self._prompts.update((start.slot, start.num_prompt_tokens) for start in plan.sequence_starts)
        work = StepWork(tile=self.limits.prompt_tile)
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for slot, start, length in rows:
            work.add(start, start + length, self._prompts[slot])
        self._free_s = self._end_s(work, max(self._free_s, self._clock()))
        self._ends_s.append(self._free_s)
        return plan

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        pass

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._clock.now = max(self._clock.now, self._ends_s.popleft())
        rows = np.flatnonzero(ticket.samples).astype(np.int32)
        ids = self._next_id + np.arange(len(rows), dtype=np.int32)
        self._next_id += len(rows)
        return StepOutput(rows, ids)


class _Replay(Simulation):
    """A simulation whose requests are paused once they have had so many tokens, by the request."""

    def __init__(
        self,
        limits: RunnerLimits,
        machine: Machine,
        requests: Iterable[Request],
        stalls: Mapping[str, Iterable[Stall]],
        messages: Iterable[tuple[float, Message]],
        scheduler: Callable[..., Scheduler],
        on_step: Callable[[Scheduler], None],
        end_s: Callable[[StepWork, float], float],
        from_s: float,
    ) -> None:
        super().__init__(
            limits,
            CostModel(),
            requests,
            on_step=on_step,
            runner=lambda limits, _, clock: _TimedRunner(limits, end_s, clock),
            inter_token_target=machine.inter_token_target,
            messages=messages,
            scheduler=scheduler,
        )
        self.clock.now = from_s
        self._stalls = {name: sorted(found, key=itemgetter(1)) for name, found in stalls.items() if found}

    def _take(self, delivery: StepDelivery) -> None:
        super()._take(delivery)
        for name in self._stalls.keys() & delivery.request_ids:
            stalls, took_s = self._stalls[name], 0.0
            num_tokens = sum(map(len, self.traces[name].token_ids.values()))
            while stalls and stalls[0].num_tokens <= num_tokens:
                took_s = max(took_s, stalls.pop(0).took_s)  # pauses at one place overlap
            if took_s:
                self._inbox.append(Pause(name))
                insort(self._messages, (self.clock.now + took_s, Resume(name)), key=itemgetter(0))
