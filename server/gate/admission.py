"""Who may still join the queue: bounded in requests, tokens and bytes, and who can be served in time. Thread: loop.

A request takes its place once its body is complete, and keeps it to its end. From when it is handed to the engine until
its first token it waits, in the line of its class and tenant: what stands before it there, and the step-cost model, say
when its first token can be expected. One that would come too late is refused at once: it would only have others wait,
be called off in the end, and have its client try again late.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import ErrorKind, ServiceError
from core.types import EngineStats, Request, Usage
from core.wait_estimate import (
    FIRST_GUESS_TOKENS,
    Backlog,
    DrainMeter,
    EngineRoom,
    Margin,
    backlog_of,
    expected_end_s,
    expected_ttft_s,
    tokens_left,
)
from core.waiting import AGEING_S
from server.gate.queue_limits import QueueLimits

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
NUMBER_EVERY_S = 0.1  # places in a line, and how long answers go on
ANSWER_RATE = 1 / 32  # of the newest answer in the mean of their lengths


@dataclass(slots=True, eq=False)
class _Line:
    """Those of a class and tenant that wait, with deadlines of their own or without."""

    share: int
    total: Backlog = field(default_factory=Backlog)
    entries: dict["_Entry", None] = field(default_factory=dict)  # in order
    _places: dict["_Entry", int] = field(default_factory=dict)  # numbered through, as they were a moment ago
    _numbered_s: float = -math.inf

    def place_of(self, entry: "_Entry", now_s: float) -> int:
        """How many of the line go before it. All are numbered at once, and seldom: many may ask."""
        if now_s >= self._numbered_s + NUMBER_EVERY_S or entry not in self._places:
            self._places = {one: i for i, one in enumerate(self.entries)}
            self._numbered_s = now_s
        return self._places[entry]


@dataclass(slots=True, eq=False)
class _Entry:
    """One prompt that waits."""

    line: _Line
    asker: "Asker"
    backlog: Backlog


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, as far as it decides who goes before whom (core/waiting.py).

    Args:
        is_due: it has a deadline for its first token that is not only the server's.
    """

    priority: int
    tenant: str
    share: int
    is_due: bool


@dataclass(slots=True)
class Ahead:
    """What is served before a request.

    Args:
        all: as far as the order of the moment tells.
        same_class: of these, those that are so whatever higher classes do.
        ageing_s: how long higher classes that wait can hold back the first of this one, and then the next: age lets
            a class that waits go before them (core/waiting.py).
    """

    all: Backlog = field(default_factory=Backlog)
    same_class: Backlog = field(default_factory=Backlog)
    ageing_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Answer:
    """A choice that has had its first token, and goes on.

    Args:
        begun_step: of the engine's steps, each of which gives it about one token.
    """

    begun_step: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """Where a request stands.

    Args:
        position: requests that go before it, as far as is seen now.
        expected_s: until its first token; None: nobody knows yet.
    """

    position: int
    expected_s: float | None


_Key = tuple[int, str, bool]  # (class, tenant, it has asked for a deadline)


class Admission:
    """The queue as the loop knows it.

    Args:
        stats: the engine's latest.
        clock: monotonic seconds.
    """

    def __init__(
        self, limits: QueueLimits, room: EngineRoom, stats: Callable[[], EngineStats], clock: Callable[[], float]
    ) -> None:
        self.num_requests = 0
        self.num_bytes = 0
        self._limits = limits
        self._room = room
        self._stats = stats
        self._clock = clock
        self._waiting = Backlog()
        self._lines: dict[_Key, _Line] = {}
        self._answers: dict[_Answer, None] = {}
        self._answer_tokens = FIRST_GUESS_TOKENS
        self._tokens_left = FIRST_GUESS_TOKENS  # of those that go on, as it was a moment ago
        self._first_left = math.inf  # of the one that has fewest until its max_tokens, as it was then
        self._counted_s = -math.inf
        self._meter = DrainMeter()
        self.margin = Margin()

    @property
    def num_decoding(self) -> int:
        """Choices that have had their first token, and go on."""
        return len(self._answers)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody is served."""
        return not self._lines and self.num_decoding == 0

    def check(self, num_bytes: int) -> None:
        """Whether there is room for one more, as far as a request's head tells.

        Args:
            num_bytes: of its body, where that is known.

        Raises:
            ServiceError: overloaded.
        """
        limits = self._limits
        if self.num_requests >= limits.max_requests:
            raise self._overloaded(f"has {limits.max_requests} requests in progress, as many as it takes")
        if self._waiting.prompt_tokens >= limits.max_tokens:
            raise self._overloaded_by_tokens()
        if self.num_bytes and self.num_bytes + num_bytes > limits.max_bytes:
            shown = f"takes {limits.max_bytes:,} bytes of requests at once: {self.num_bytes:,} are in progress"
            raise self._overloaded(shown + (f", and this has {num_bytes:,}" if num_bytes else ""))

    def check_hope(self, asker: Asker, allowed_s: float) -> None:
        """Whether a request of one token could be in time: no other can be if that cannot.

        Raises:
            ServiceError: deadline_unattainable.
        """
        self.check_in_time(self.ahead_of(asker), backlog_of(1, 1), allowed_s)

    def enter(self, num_bytes: int) -> "Place":
        """A place for a request whose body is complete.

        Raises:
            ServiceError: overloaded.
        """
        self.check(num_bytes)
        self.num_requests += 1
        self.num_bytes += num_bytes
        return Place(self, num_bytes)

    def _overloaded(self, shown: str) -> ServiceError:
        retry_s = self._retry_s(self._waiting.num_requests, self._expected_end_s() or LEAST_RETRY_S)
        message = f"The server {shown}. Try again in {math.ceil(retry_s)} s."
        return ServiceError(ErrorKind.UNAVAILABLE, message, "overloaded", retry_after_s=retry_s)

    def _overloaded_by_tokens(self, num_tokens: float = 0) -> ServiceError:
        """
        Args:
            num_tokens: of the one that is refused, where that is known.
        """
        shown = f"lets {self._limits.max_tokens:,} prompt tokens wait: {self._waiting.prompt_tokens:,.0f} do"
        return self._overloaded(shown + (f", and this has {num_tokens:,.0f}" if num_tokens else ""))

    def _retry_s(self, num_requests: float, otherwise_s: float) -> float:
        """Until so many have left the queue, as fast as they did of late.

        Args:
            otherwise_s: where nobody waits in it, or nothing was measured.
        """
        measured_s = self._meter.seconds_for(num_requests, self._clock()) if num_requests else None
        return min(max(otherwise_s if measured_s is None else measured_s, LEAST_RETRY_S), MOST_RETRY_S)

    # What places ask and tell.

    def ahead_of(self, asker: Asker, entry: _Entry | None = None, now_s: float = 0.0) -> Ahead:
        """What would be served before a request that came now.

        Of its own tenant, all; of another one of its class, what its share gives it meanwhile; of higher classes all,
        for as long as age lets them. One with a deadline passes those without (core/waiting.py), and they pass the
        others.

        Args:
            entry: it has come already, and this is it.
        """
        ahead = Ahead()
        same_class = ahead.same_class
        part = 1.0 if entry is None else entry.line.place_of(entry, now_s) / len(entry.line.entries)
        own = [self._lines.get((asker.priority, asker.tenant, due)) for due in (False, True)[asker.is_due :]]
        num_own = part * sum(line.total.num_requests for line in own if line is not None)
        for (priority, tenant, line_is_due), line in self._lines.items():
            num = line.total.num_requests
            goes_first = line_is_due or not asker.is_due
            if priority > asker.priority:
                ahead.all.add(line.total)
                ahead.ageing_s = max(ahead.ageing_s, AGEING_S * (priority - asker.priority))
            elif priority == asker.priority and tenant == asker.tenant:
                same_class.add(line.total, part if goes_first else 0.0)
            elif priority == asker.priority:
                num_fair = math.ceil((num_own + goes_first) * line.share / asker.share)
                same_class.add(line.total, min(1.0, num_fair / num))
        ahead.all.add(same_class)
        return ahead

    def _expected_s(self, ahead: Ahead, own: Backlog, factor: float) -> float | None:
        """Until the first token; None: it is not known.

        Args:
            factor: that the model's word is multiplied with. What age guarantees is none of it.
        """
        stats = self._stats()
        left = self._expected_left(stats.num_steps)
        expected_s = expected_ttft_s(self._room, stats, self.num_decoding, left, ahead.all, own)
        if expected_s is None or not ahead.ageing_s:
            return None if expected_s is None else factor * expected_s
        last_s = expected_ttft_s(self._room, stats, self.num_decoding, left, ahead.same_class, own)
        assert last_s is not None, "it is measured"
        return min(factor * expected_s, ahead.ageing_s * (1 + ahead.same_class.num_requests) + factor * last_s)

    def _expected_end_s(self) -> float | None:
        """Until an answer that goes on ends; None: it is not known."""
        stats = self._stats()
        left = self._expected_left(stats.num_steps)
        return expected_end_s(self._room, stats, self.num_decoding, left, self._first_left)

    def _expected_left(self, num_steps: int) -> float:
        """Tokens that answers which go on have yet to say, as the harmonic mean: how often one of them ends.

        All are counted at once, and seldom: many may ask.
        """
        now_s = self._clock()
        if now_s >= self._counted_s + NUMBER_EVERY_S:
            self._counted_s = now_s
            mean = self._answer_tokens
            lefts = [tokens_left(mean, num_steps - one.begun_step, one.max_tokens) for one in self._answers]
            self._tokens_left = len(lefts) / sum(1 / left for left in lefts) if lefts else mean
            most = (one.begun_step + one.max_tokens - num_steps for one in self._answers)
            self._first_left = max(1, min(most, default=1))
        return self._tokens_left

    def check_in_time(self, ahead: Ahead, own: Backlog, allowed_s: float) -> float | None:
        """
        Returns: in how many seconds the first token is expected; None: it is not known.

        Raises:
            ServiceError: deadline_unattainable.
        """
        is_idle = self.is_idle
        if (
            is_idle
        ):  # nobody is harmed by a try: only what could not be in time with all of its prompt cached is refused
            own = backlog_of(1, 1)
        expected_s = self._expected_s(ahead, own, 1.0 if is_idle else self.margin.factor)
        if expected_s is None or not 0 < allowed_s < expected_s:
            return expected_s  # what is late already is told so by its deadline
        too_long_s = expected_s - allowed_s
        retry_s = self._retry_s(ahead.all.num_requests * too_long_s / expected_s, too_long_s)
        message = (
            f"The first token is expected in {_shown(expected_s)}, and its deadline is in {_shown(allowed_s)}."
            f" Allow more time, or try again in {math.ceil(retry_s)} s."
        )
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "deadline_unattainable", retry_after_s=retry_s)

    def view(self, entry: _Entry, now_s: float) -> QueueView:
        ahead = self.ahead_of(entry.asker, entry, now_s)
        expected_s = self._expected_s(ahead, entry.backlog, self.margin.factor)
        return QueueView(round(ahead.all.num_requests), expected_s)

    def check_tokens(self, num_tokens: float) -> None:
        """
        Raises:
            ServiceError: overloaded.
        """
        num_waiting = self._waiting.prompt_tokens
        if num_waiting and num_waiting + num_tokens > self._limits.max_tokens:
            raise self._overloaded_by_tokens(num_tokens)

    def add(self, asker: Asker, own: Backlog) -> _Entry:
        line = self._lines.setdefault((asker.priority, asker.tenant, asker.is_due), _Line(asker.share))
        line.share = asker.share
        entry = _Entry(line, asker, own)
        line.entries[entry] = None
        line.total.add(own)
        self._waiting.add(own)
        return entry

    def remove(self, entry: _Entry) -> None:
        """It waits no more."""
        line = entry.line
        del line.entries[entry]
        line.total.add(entry.backlog, -1.0)
        self._waiting.add(entry.backlog, -1.0)
        if not line.entries:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}
        self._meter.note(self._clock(), is_empty=not self._lines)

    def begin_answer(self, max_tokens: int) -> _Answer:
        answer = _Answer(self._stats().num_steps, max_tokens)
        self._answers[answer] = None
        return answer

    def end_answer(self, answer: _Answer) -> None:
        del self._answers[answer]

    def note_answer(self, num_tokens: float) -> None:
        self._answer_tokens += ANSWER_RATE * (num_tokens - self._answer_tokens)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class Place:
    """One request's, from its complete body to its end: enter, admit, on_first_token, on_choice_end, leave."""

    def __init__(self, admission: Admission, num_bytes: int) -> None:
        self._admission = admission
        self._num_bytes = num_bytes
        self._num_choices = 1  # of each prompt
        self._entries: dict[int, _Entry] = {}  # that wait, by prompt
        self._expected_s = math.inf  # when its first token was to come, of which nobody has told the margin
        self._max_tokens = 1
        self._num_begun = 0  # choices that have had their first token
        self._answers: dict[int, _Answer] = {}  # of these, those that go on

    def admit(self, requests: list[Request], ttft_due_s: float, now_s: float) -> None:
        """Let it wait for the engine.

        Args:
            requests: one for each of its prompts.
            ttft_due_s: when the first token has to be there; infinite: whenever.

        Raises:
            ServiceError: overloaded or deadline_unattainable.
        """
        admission, first = self._admission, requests[0]
        backlogs = [backlog_of(len(one.prompt_ids), one.num_sequences) for one in requests]
        admission.check_tokens(sum(own.prompt_tokens for own in backlogs))
        asker = Asker(first.priority, first.tenant, first.share, first.deadline_s is not None)
        expected_s = admission.check_in_time(admission.ahead_of(asker), backlogs[0], ttft_due_s - now_s)
        if expected_s is not None and not admission.is_idle:
            self._expected_s = now_s + expected_s
        self._num_choices = first.num_sequences
        self._max_tokens = first.sampling.max_tokens
        self._entries = {i: admission.add(asker, own) for i, own in enumerate(backlogs)}

    def view(self, now_s: float) -> QueueView | None:
        """Where its first prompt stands; None: it waits no more."""
        entry = self._entries.get(0)
        return None if entry is None else self._admission.view(entry, now_s)

    def on_first_token(self, choice: int, now_s: float) -> None:
        self._tell_margin(now_s, has_come=True)
        entry = self._entries.pop(choice // self._num_choices, None)
        if entry is not None:
            self._admission.remove(entry)
        self._num_begun += 1
        self._answers[choice] = self._admission.begin_answer(self._max_tokens)

    def on_choice_end(self, choice: int) -> None:
        """Of a choice that has had its first token."""
        self._admission.end_answer(self._answers.pop(choice))

    def _tell_margin(self, now_s: float, has_come: bool) -> None:
        is_late = now_s > self._expected_s
        if self._expected_s < math.inf and (has_come or is_late):
            self._admission.margin.note(is_late)
            self._expected_s = math.inf

    def leave(self, usage: Usage | None, now_s: float) -> None:
        """The request is over. To be called once.

        Args:
            usage: None: it was never handed to the engine, or its task was cancelled.
        """
        admission = self._admission
        admission.num_requests -= 1
        admission.num_bytes -= self._num_bytes
        for entry in self._entries.values():
            admission.remove(entry)
        if self._num_begun and usage is not None:
            admission.note_answer(usage.num_completion_tokens / self._num_begun)
        for answer in self._answers.values():
            admission.end_answer(answer)
        self._tell_margin(now_s, has_come=False)
