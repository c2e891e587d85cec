"""Who may still join the queue: bounded in requests, tokens and bytes, and who can be served in time. Thread: loop.

All three are bounded for the server, and by share for each tenant (SharedRoom). Where there is no
room for one whose tenant has not had its share, others have to go: first those whose readers have stopped, then the
latest of a tenant that holds more than its part, which it could have as long as nobody else asked.

A request takes its place once its body is complete, and keeps it to its end. From when it is handed to the engine until
its first token it waits, in the line of its class and tenant: what stands before it there, and the step-cost model, say
when its first token can be expected. One that would come too late is refused at once: it would only have others wait,
be called off in the end, and have its client try again late.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.errors import ErrorKind, ServiceError
from core.queue import AGEING_S
from core.step_cost import StepWork, row_cost_s
from core.types import EngineStats, Request, Usage

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
NUMBER_EVERY_S = 0.1  # places in a line, and how long answers go on
ANSWER_RATE = 1 / 32  # of the newest answer in the mean of their lengths
MOST_PART = 0.75  # of a shared room, for one tenant while others ask
PATIENCE_S = 1.0  # with a reader that has stopped, before its request goes for any other
FIRST_GUESS_TOKENS = 128.0  # of an answer, until some have ended
LATE_SHARE = 0.1
MARGIN_STEP = 0.1
LEAST_MARGIN, MOST_MARGIN = 0.5, 3.0
DRAIN_WINDOW = 64  # departures that the drain rate is measured over
FORGET_EVERY_S = 1.0  # bookings that have passed


class SharedRoom:
    """Room that tenants share: for requests, for bytes, for tokens that wait.

    Alone, a tenant may hold all of it, and of one thing even more. While others hold some, it may hold MOST_PART of
    what they leave, so that there is always room for one who comes: a dynamic threshold, as switches bound the queues
    in a shared buffer (Choudhury and Hahne, 1998). What one tenant holds above MOST_PART it has borrowed: it counts for
    nothing in what the others may hold, and is theirs if they ask.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.total = 0.0
        self.held: dict[str, float] = {}

    def take(self, tenant: str, num: float) -> None:
        self.total += num
        self.held[tenant] = self.held.get(tenant, 0.0) + num

    def give(self, tenant: str, num: float) -> None:
        self.total -= num
        self.held[tenant] -= num
        if not self.held[tenant]:
            del self.held[tenant]

    def lacks(self, num: float) -> float:
        """How much must go first, whoever asks."""
        return self.total + num - self.capacity if self.total else 0.0

    def exceeds_share(self, tenant: str, num: float) -> bool:
        """Whether the tenant would hold too much, whatever others could be made to give back."""
        own = self.held.get(tenant, 0.0)
        others = self.total - own
        if not own or not others:
            return False
        borrower = self.borrower()
        if borrower not in (None, tenant):
            others -= self.held[borrower] - MOST_PART * self.capacity
        return own + num > MOST_PART * (self.capacity - others)

    def borrower(self) -> str | None:
        """The tenant that holds more than MOST_PART of all."""
        if self.total <= MOST_PART * self.capacity:
            return None
        tenant = max(self.held, key=self.held.__getitem__)
        return tenant if self.held[tenant] > MOST_PART * self.capacity else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """
    Args:
        max_requests: that wait or run.
        max_tokens: of prompts that wait for their first token; one prompt alone may have more.
        max_bytes: of bodies of requests that wait or run; one alone may have more.
    """

    max_requests: int
    max_tokens: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What the engine has room for.

    Args:
        max_batch_tokens: computed in one step.
        num_kv_tokens: that the KV cache holds.
        inter_token_target: see EngineConfig.
    """

    max_sequences: int
    max_batch_tokens: int
    num_kv_tokens: int
    inter_token_target: float | None


@dataclass(slots=True)
class Backlog:
    """Prompts that are to be computed.

    Args:
        num_sequences: that will hold a slot each.
        prompt_kv: KV tokens that the prompts' tiles read (StepWork).
    """

    num_requests: float = 0.0
    num_sequences: float = 0.0
    prompt_tokens: float = 0.0
    prompt_kv: float = 0.0

    def add(self, other: "Backlog", part: float = 1.0) -> None:
        self.num_requests += part * other.num_requests
        self.num_sequences += part * other.num_sequences
        self.prompt_tokens += part * other.prompt_tokens
        self.prompt_kv += part * other.prompt_kv


def backlog_of(num_prompt_tokens: int, num_sequences: int) -> Backlog:
    """One request's."""
    work = StepWork()
    work.add(0, num_prompt_tokens, num_prompt_tokens)
    return Backlog(1, num_sequences, num_prompt_tokens, work.prompt_kv)


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
    """Who asks, as far as it decides who goes before whom (core/queue.py).

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
            a class that waits go before them (core/queue.py).
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
        self._requests = SharedRoom(limits.max_requests)
        self._bytes = SharedRoom(limits.max_bytes)
        self._tokens = SharedRoom(limits.max_tokens)
        self._places: dict[Place, None] = {}  # in order
        self._paused: dict[Place, float] = {}  # since when, in order
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
        self._departures = DrainMeter()  # of places, while some are refused
        self._refused_s = -math.inf  # when one was, last
        self._bookings = Bookings()
        self.margin = Margin()

    @property
    def num_requests(self) -> int:
        """That wait, run or are paused."""
        return round(self._requests.total)

    @property
    def num_bytes(self) -> int:
        return round(self._bytes.total)

    @property
    def num_decoding(self) -> int:
        """Choices that have had their first token, and go on."""
        return len(self._answers)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody is served."""
        return not self._lines and self.num_decoding == 0

    def check(self, tenant: str, num_bytes: int) -> None:
        """Whether there is room for one more of the tenant's, or could be, as far as a request's head tells.

        Args:
            num_bytes: of its body, where that is known.

        Raises:
            ServiceError: overloaded.
        """
        self._victims(self._requests, tenant, 1)
        self._victims(self._tokens, tenant, 0)
        self._victims(self._bytes, tenant, num_bytes)

    def check_hope(self, asker: Asker, allowed_s: float) -> None:
        """Whether a request of one token could be in time: no other can be if that cannot.

        Raises:
            ServiceError: deadline_unattainable.
        """
        self.check_in_time(self.ahead_of(asker), backlog_of(1, 1), allowed_s)

    def enter(self, tenant: str, num_bytes: int) -> "Place":
        """A place for a request whose body is complete.

        Args:
            tenant: as whom its caller shares the machine with others.

        Raises:
            ServiceError: overloaded.
        """
        self.check(tenant, num_bytes)
        self._make_room(self._requests, tenant, 1)
        self._make_room(self._bytes, tenant, num_bytes)
        place = Place(self, tenant, num_bytes)
        self._requests.take(tenant, 1)
        self._bytes.take(tenant, num_bytes)
        self._places[place] = None
        return place

    def make_room_for_tokens(self, tenant: str, num: float) -> None:
        """Let prompts of so many wait.

        Raises:
            ServiceError: overloaded.
        """
        self._make_room(self._tokens, tenant, num)

    def _make_room(self, room: SharedRoom, tenant: str, num: float) -> None:
        """
        Raises:
            ServiceError: overloaded.
        """
        for victim in self._victims(room, tenant, num):
            victim.give_way(
                self._overloaded(victim.tenant, "is full, and gave this request's place to another's tenant")
            )

    def _victims(self, room: SharedRoom, tenant: str, num: float) -> list["Place"]:
        """Who has to go so that the tenant may have so much more of the room.

        Raises:
            ServiceError: overloaded: the tenant has its share, or all of them would not be enough.
        """
        if room.exceeds_share(tenant, num):
            shown = f"gives one tenant {MOST_PART:.0%} of the room that others leave: yours has "
            raise self._overloaded(tenant, shown + self._held(room, room.held[tenant], num))
        lacking = room.lacks(max(num, 1))
        victims: list[Place] = []
        if lacking <= 0:
            return victims
        for place in self._in_turn(room, tenant):
            freed = self._held_by(place, room)
            if freed:
                victims.append(place)
                lacking -= freed
                if lacking <= 0:
                    return victims
        raise self._overloaded(tenant, "has " + self._held(room, room.total, num))

    def _in_turn(self, room: SharedRoom, tenant: str) -> Iterator["Place"]:
        """Who goes for a request of the tenant's, as far as anybody does."""
        held, own = room.held, room.held.get(tenant, 0.0)
        late_s = self._clock() - PATIENCE_S
        for place, since_s in self._paused.items():
            if since_s <= late_s or held.get(place.tenant, 0.0) > own:
                yield place
        borrower = room.borrower()
        if borrower not in (None, tenant):
            theirs = [one for one in reversed(self._places) if one.tenant == borrower and one not in self._paused]
            yield from sorted((one for one in theirs if one.end is not None), key=lambda one: one.has_begun)

    def _held_by(self, place: "Place", room: SharedRoom) -> float:
        if room is self._requests:
            return 1
        return place.num_bytes if room is self._bytes else place.num_waiting_tokens

    def _held(self, room: SharedRoom, held: float, num: float) -> str:
        """How much is held of a room, and how much more was asked for, in words."""
        if room is self._requests:
            return f"{held:,.0f} requests in progress, of {room.capacity:,.0f} that it takes"
        what = "prompt tokens that wait" if room is self._tokens else "bytes of requests in progress"
        more = f", and this has {num:,.0f}" if num else ""
        return f"{held:,.0f} {what}, of {room.capacity:,.0f} that it takes{more}"

    def _overloaded(self, tenant: str, shown: str) -> ServiceError:
        """
        Args:
            shown: what the server has or does.
        """
        now_s = self._clock()
        is_first = now_s > self._refused_s + MOST_RETRY_S
        self._refused_s = now_s
        interval_s = None if is_first else self._departures.seconds_for(1, now_s)
        if interval_s is None:
            num_waiting = self._waiting.num_requests
            measured_s = self._meter.seconds_for(1, now_s) if num_waiting else None
            interval_s = measured_s or self._expected_end_s() or LEAST_RETRY_S
        retry_s = max(LEAST_RETRY_S, self._bookings.book(tenant, interval_s, now_s))
        if retry_s > MOST_RETRY_S:  # nobody waits longer, and they are not to come all at once
            retry_s = MOST_RETRY_S / 2 * (1 + retry_s / (MOST_RETRY_S / 2) % 1)
        message = f"The server {shown}. Try again in {math.ceil(retry_s)} s."
        return ServiceError(ErrorKind.UNAVAILABLE, message, "overloaded", retry_after_s=retry_s)

    def _retry_s(self, num_requests: float, otherwise_s: float) -> float:
        """Until so many have left the queue, as fast as they did of late.

        Args:
            otherwise_s: where nobody waits in it, or nothing was measured.
        """
        measured_s = self._meter.seconds_for(num_requests, self._clock()) if num_requests else None
        return min(max(otherwise_s if measured_s is None else measured_s, LEAST_RETRY_S), MOST_RETRY_S)

    # What places ask and tell.

    def pause(self, place: "Place") -> None:
        """Its reader has stopped."""
        self._paused[place] = self._clock()

    def resume(self, place: "Place") -> None:
        self._paused.pop(place, None)

    def release(self, place: "Place") -> None:
        """Others may have its room."""
        self._requests.give(place.tenant, 1)
        self._bytes.give(place.tenant, place.num_bytes)
        del self._places[place]
        self._paused.pop(place, None)
        now_s = self._clock()
        self._departures.note(now_s, is_empty=now_s > self._refused_s + MOST_RETRY_S)

    def ahead_of(self, asker: Asker, entry: _Entry | None = None, now_s: float = 0.0) -> Ahead:
        """What would be served before a request that came now.

        Of its own tenant, all; of another one of its class, what its share gives it meanwhile; of higher classes all,
        for as long as age lets them. One with a deadline passes those without (core/queue.py), and they pass the
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

    def add(self, asker: Asker, own: Backlog) -> _Entry:
        line = self._lines.setdefault((asker.priority, asker.tenant, asker.is_due), _Line(asker.share))
        line.share = asker.share
        entry = _Entry(line, asker, own)
        line.entries[entry] = None
        line.total.add(own)
        self._waiting.add(own)
        self._tokens.take(asker.tenant, own.prompt_tokens)
        return entry

    def remove(self, entry: _Entry) -> None:
        """It waits no more."""
        line = entry.line
        del line.entries[entry]
        line.total.add(entry.backlog, -1.0)
        self._waiting.add(entry.backlog, -1.0)
        self._tokens.give(entry.asker.tenant, entry.backlog.prompt_tokens)
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
    """One request's, from its complete body to its end: enter, admit, on_first_token, on_choice_end, leave.

    Attributes:
        end: breaks the request off, if others must have its place; None: it cannot be.
    """

    def __init__(self, admission: Admission, tenant: str, num_bytes: int) -> None:
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.end: Callable[[ServiceError], None] | None = None
        self._admission = admission
        self._is_released = False
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
        asker = Asker(first.priority, first.tenant, first.share, first.deadline_s is not None)
        expected_s = admission.check_in_time(admission.ahead_of(asker), backlogs[0], ttft_due_s - now_s)
        admission.make_room_for_tokens(first.tenant, sum(own.prompt_tokens for own in backlogs))
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
        self._release()
        self._stop_waiting()
        if self._num_begun and usage is not None:
            admission.note_answer(usage.num_completion_tokens / self._num_begun)
        for answer in self._answers.values():
            admission.end_answer(answer)
        self._tell_margin(now_s, has_come=False)

    @property
    def has_begun(self) -> bool:
        """Some of its answer has been said."""
        return self._num_begun > 0

    @property
    def num_waiting_tokens(self) -> float:
        """Of its prompts."""
        return sum(entry.backlog.prompt_tokens for entry in self._entries.values())

    def pause(self) -> None:
        """Its reader has stopped."""
        if not self._is_released:
            self._admission.pause(self)

    def resume(self) -> None:
        self._admission.resume(self)

    def give_way(self, error: ServiceError) -> None:
        """Break it off for another's sake. What it holds is free at once."""
        assert self.end is not None, "only who can be ended is asked to give way"
        self._stop_waiting()
        self._release()
        self.end(error)

    def _stop_waiting(self) -> None:
        for entry in self._entries.values():
            self._admission.remove(entry)
        self._entries = {}

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._admission.release(self)


def expected_ttft_s(
    room: EngineRoom, stats: EngineStats, num_decoding: int, answer_tokens: float, ahead: Backlog, own: Backlog
) -> float | None:
    """Seconds from now to the first token of a request; None while too few steps were measured.

    Args:
        num_decoding: sequences that have had their first token.
        answer_tokens: that one of these has yet to say, on average (tokens_left).
        ahead: what is served before it, prompts that are half computed included.
    """
    if stats.step_cost_s is None:
        return None
    load = _Load(room, stats, num_decoding, ahead, own)
    both = Backlog()
    both.add(ahead)
    both.add(own)
    return max(load.prefill_s(both), load.room_s(answer_tokens) + load.prefill_s(own))


def expected_end_s(
    room: EngineRoom, stats: EngineStats, num_decoding: int, answer_tokens: float, most_tokens: float
) -> float | None:
    """Seconds from now until one of the sequences that decode ends; None: none does, or too few steps were measured.

    Args:
        answer_tokens: that one of these has yet to say, on average (tokens_left).
        most_tokens: after which the first has as many as it may.
    """
    if stats.step_cost_s is None or not num_decoding:
        return None
    load = _Load(room, stats, num_decoding, Backlog(), Backlog())
    return load.decode_s(num_decoding) * min(answer_tokens / num_decoding, most_tokens)


def tokens_left(mean_tokens: float, num_said: int, num_allowed: int) -> float:
    """How many more an answer is expected to have that has said so many.

    As many as any, while its length is nothing out of the common: lengths are taken to be spread exponentially. One of
    over twice the mean shows that it is not of their kind: it then goes on for about as long as it has, or to its end.
    Never less than the mean, even where num_allowed is near: it serves to say how often one of all ends, and the next
    one in its place has all of its own to say.

    Args:
        mean_tokens: of answers that have ended.
        num_allowed: its max_tokens.
    """
    return max(mean_tokens, min(num_said - mean_tokens, num_allowed - num_said))


class _Load:
    """The engine while it works off what is ahead and the request itself."""

    def __init__(self, room: EngineRoom, stats: EngineStats, num_decoding: int, ahead: Backlog, own: Backlog) -> None:
        assert stats.step_cost_s is not None
        self._coefficients_s = stats.step_cost_s
        self._room = room
        self._num_decoding = num_decoding
        # What is found in the cache is not computed: as much of these prompts as of those before
        self._miss_ratio = 1 - stats.num_cache_hits / stats.num_cache_queries if stats.num_cache_queries else 1.0
        kv_share = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        self._kv_of_one = kv_share * room.num_kv_tokens / max(1, stats.num_running)
        self._num_coming = ahead.num_sequences + own.num_sequences
        self._coming_tokens = ahead.prompt_tokens + own.prompt_tokens

    def decode_s(self, num_sequences: float) -> float:
        """A step in which so many decode, the KV being what it is now."""
        fixed, _, _, token_s, kv_s = self._coefficients_s
        return fixed + num_sequences * token_s + self._num_decoding * self._kv_of_one * kv_s

    def _full_step_s(self) -> float:
        """A step with as much of prompts in it as the inter-token target allows."""
        num_soon = min(self._num_decoding + self._num_coming, self._room.max_sequences)
        return (self._room.inter_token_target or 1.0) * self.decode_s(num_soon)

    def prefill_s(self, backlog: Backlog) -> float:
        work = StepWork(round(backlog.prompt_tokens * self._miss_ratio), round(backlog.prompt_kv * self._miss_ratio))
        work_s = row_cost_s(self._coefficients_s, work)
        num_steps = 1 + work.prompt_tokens / max(1, self._room.max_batch_tokens - self._num_decoding)
        beside_s = self.decode_s(self._num_decoding)
        if self._num_decoding and self._room.inter_token_target is not None:
            num_steps = max(num_steps, work_s / (self._full_step_s() - beside_s))
        return work_s + num_steps * beside_s

    def room_s(self, answer_tokens: float) -> float:
        """Until there are slots and blocks for all."""
        num_missing = self._num_decoding + self._num_coming - self._room.max_sequences
        if self._kv_of_one:
            free_tokens = self._room.num_kv_tokens - self._num_decoding * self._kv_of_one
            num_missing = max(num_missing, (self._coming_tokens - free_tokens) / self._kv_of_one)
        if num_missing <= 0 or not self._num_decoding:
            return 0.0
        # Those that come and find room decode by then, and end as well
        num_full = max(self._num_decoding, self._num_decoding + self._num_coming - num_missing)
        return num_missing * answer_tokens * self._full_step_s() / num_full


class Margin:
    """What estimates are multiplied with, so that one in ten of those told comes later than that.

    Who comes later and goes first, how far prompts are computed already, how long answers will be: the model does not
    know, and what it leaves out changes with the load. Each first token moves the factor a little: up by nine steps
    where it came late, down by one where it did not.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def note(self, is_late: bool) -> None:
        step = MARGIN_STEP * (1 - LATE_SHARE) if is_late else -MARGIN_STEP * LATE_SHARE
        self.factor = min(max(self.factor * (1 + step), LEAST_MARGIN), MOST_MARGIN)


class DrainMeter:
    """How fast requests leave the queue while somebody waits in it."""

    def __init__(self) -> None:
        self._left_s: deque[float] = deque(maxlen=DRAIN_WINDOW)

    def note(self, now: float, is_empty: bool) -> None:
        """One has left.

        Args:
            is_empty: nobody waits any more: what was measured is no measure for the next rush.
        """
        if is_empty:
            self._left_s.clear()
        else:
            self._left_s.append(now)

    def seconds_for(self, num_requests: float, now: float) -> float | None:
        """Until so many more have left; None where too few have."""
        if len(self._left_s) < 2 or now <= self._left_s[0]:
            return None
        return num_requests * (now - self._left_s[0]) / (len(self._left_s) - 1)


class Bookings:
    """When to come back, for those who are refused: each has a time of its own, as room comes free.

    A tenant's follow one another. Several tenants' go on side by side, each at its part of the rate: who is refused
    often, and comes back early, puts off nobody but itself.
    """

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}  # by tenant, of those that are to come
        self._forgot_s = 0.0

    def book(self, tenant: str, interval_s: float, now: float) -> float:
        """Seconds from now.

        Args:
            interval_s: in which there is room for one more.
        """
        if now >= self._forgot_s + FORGET_EVERY_S:
            self._forgot_s = now
            self._last_s = {name: last_s for name, last_s in self._last_s.items() if last_s > now}
        last_s = max(now, self._last_s.get(tenant, now))
        self._last_s[tenant] = last_s + interval_s * len(self._last_s.keys() | {tenant})
        return self._last_s[tenant] - now
