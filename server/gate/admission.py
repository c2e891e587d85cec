"""Who may still join the queue: bounded in requests, tokens and bytes, and who can be served in time. Thread: loop.

All three are bounded for the server, and by share for each tenant (SharedRoom). Where there is no room for one whose
tenant has not had its share, others have to go: first those whose readers have stopped, then the latest of a tenant
that holds more than its part, which it could have as long as nobody else asked.

A request takes its place once its body is complete, and keeps it to its end. From when it is handed to the engine until
its first token it waits. When that can be expected the scheduler says (core/outlook.py), if it is told what waits
before the request: that is counted here, by class and tenant, because many come between two words of the scheduler. One
that would come too late is refused at once: it would only have others wait, be called off in the end, and have its
client try again late.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.errors import ErrorKind, ServiceError
from core.outlook import Backlog
from core.queue import AGEING_S
from core.step_cost import StepWork
from core.types import EngineStats, Request

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
NUMBER_EVERY_S = 0.1  # places in a line
MOST_PART = 0.75  # of a shared room, for one tenant while others ask
PATIENCE_S = 1.0  # with a reader that has stopped, before its request goes for any other
LATE_SHARE, MARGIN_STEP = 0.1, 0.1  # see Margin
LEAST_MARGIN, MOST_MARGIN = 0.5, 3.0
DEPARTURES = 64  # that the rate at which places come free is measured over
FORGET_EVERY_S = 1.0  # bookings that have passed


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


class SharedRoom:
    """Room that tenants share: for requests, for bytes, for tokens that wait.

    Alone, a tenant may hold all of it, and of one thing even more. While others hold some, it may hold MOST_PART of
    what they leave, so that there is always room for one who comes: a dynamic threshold, as switches bound the queues
    in a shared buffer (Choudhury and Hahne, 1998). What one tenant holds above MOST_PART it has borrowed: it counts for
    nothing in what the others may hold, and is theirs if they ask.

    Args:
        what: is held, in words.
    """

    def __init__(self, capacity: float, what: str = "") -> None:
        self.capacity = capacity
        self.what = what
        self.total = 0.0
        self.held: dict[str, float] = {}

    def take(self, tenant: str, num: float) -> None:
        """Let it hold so much more; negative: less."""
        self.total += num
        held = self.held.get(tenant, 0.0) + num
        if held:
            self.held[tenant] = held
        else:
            self.held.pop(tenant, None)

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


@dataclass(slots=True, eq=False)
class _Line:
    """Those of a class and tenant that wait, with deadlines of their own or without.

    Args:
        asker: the latest.
    """

    asker: "Asker"
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


@dataclass(frozen=True, slots=True)
class QueueView:
    """Where a request stands.

    Args:
        position: requests that go before it, as far as is seen now.
        expected_s: until its first token; None: nobody knows yet.
    """

    position: int
    expected_s: float | None


class Admission:
    """The queue as the loop knows it.

    Args:
        stats: the engine's latest.
        clock: monotonic seconds.

    Attributes:
        num_decoding: choices that have had their first token, and go on.
    """

    def __init__(self, limits: QueueLimits, stats: Callable[[], EngineStats], clock: Callable[[], float]) -> None:
        self.num_decoding = 0
        self.margin = Margin()
        self._requests = SharedRoom(limits.max_requests, "requests in progress")
        self._bytes = SharedRoom(limits.max_bytes, "bytes of requests in progress")
        self._tokens = SharedRoom(limits.max_tokens, "prompt tokens that wait")
        self._places: dict[Place, None] = {}  # in order
        self._paused: dict[Place, float] = {}  # since when, in order
        self._stats = stats
        self._clock = clock
        self._lines: dict[tuple[int, str, bool], _Line] = {}  # by class, tenant, and whether it asks for a deadline
        self._departures_s: deque[float] = deque(maxlen=DEPARTURES)  # of places, while some are refused
        self._refused_s = -math.inf  # when one was, last
        self._bookings = Bookings()

    @property
    def num_requests(self) -> int:
        """That wait, run or are paused."""
        return round(self._requests.total)

    @property
    def num_bytes(self) -> int:
        return round(self._bytes.total)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody is served."""
        return not self._lines and self.num_decoding == 0

    # Room

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

    def enter(self, tenant: str, num_bytes: int) -> "Place":
        """A place for a request whose body is complete.

        Args:
            tenant: as whom its caller shares the machine with others.

        Raises:
            ServiceError: overloaded.
        """
        self.check(tenant, num_bytes)
        wanted = {self._requests: 1, self._bytes: num_bytes}
        for room, num in wanted.items():
            self._make_room(room, tenant, num)
        place = Place(self, tenant)
        for room, num in wanted.items():  # once there is all of it
            place.take(room, num)
        self._places[place] = None
        return place

    def release(self, place: "Place") -> None:
        """Others may have its room."""
        for room, num in place.held.items():
            room.take(place.tenant, -num)
        del self._places[place]
        self._paused.pop(place, None)
        now_s = self._clock()
        if now_s <= self._refused_s + MOST_RETRY_S:
            self._departures_s.append(now_s)

    def pause(self, place: "Place") -> None:
        """Its reader has stopped."""
        self._paused[place] = self._clock()

    def resume(self, place: "Place") -> None:
        self._paused.pop(place, None)

    def _make_room(self, room: SharedRoom, tenant: str, num: float) -> None:
        """Let others go until there is so much for the tenant. Raises ServiceError, overloaded: as _victims."""
        for victim in self._victims(room, tenant, num):
            shown = "is full, and gave this request's place to another's tenant"
            victim.give_way(self._overloaded(victim.tenant, shown))

    def _victims(self, room: SharedRoom, tenant: str, num: float) -> list["Place"]:
        """Who has to go so that the tenant may have so much more of the room.

        Raises ServiceError, overloaded: the tenant has its share, or all of them would not be enough.
        """
        if room.exceeds_share(tenant, num):
            shown = f"gives one tenant {MOST_PART:.0%} of the room that others leave: yours has "
            raise self._overloaded(tenant, shown + self._shown(room, room.held[tenant], num))
        lacking = room.lacks(max(num, 1))
        victims: list[Place] = []
        if lacking <= 0:
            return victims
        for place in self._in_turn(room, tenant):
            freed = place.held.get(room, 0.0)
            if freed:
                victims.append(place)
                lacking -= freed
                if lacking <= 0:
                    return victims
        raise self._overloaded(tenant, "has " + self._shown(room, room.total, num))

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

    def _shown(self, room: SharedRoom, held: float, num: float) -> str:
        """How much is held of a room, and how much more was asked for, in words."""
        more = f", and this has {num:,.0f}" if num and room is not self._requests else ""
        return f"{held:,.0f} {room.what}, of {room.capacity:,.0f} that it takes{more}"

    def _overloaded(self, tenant: str, shown: str) -> ServiceError:
        """A refusal that says what the server has or does, and when to come back."""
        now_s = self._clock()
        if now_s > self._refused_s + MOST_RETRY_S:  # what was measured is no measure for the next rush
            self._departures_s.clear()
        self._refused_s = now_s
        retry_s = max(LEAST_RETRY_S, self._bookings.book(tenant, self._interval_s(now_s), now_s))
        if retry_s > MOST_RETRY_S:  # nobody waits longer, and they are not to come all at once
            retry_s = MOST_RETRY_S / 2 * (1 + retry_s / (MOST_RETRY_S / 2) % 1)
        message = f"The server {shown}. Try again in {math.ceil(retry_s)} s."
        return ServiceError(ErrorKind.UNAVAILABLE, message, "overloaded", retry_after_s=retry_s)

    def _interval_s(self, now_s: float) -> float:
        """In which a place comes free: as of late, or as answers are expected to end."""
        departures_s, outlook = self._departures_s, self._stats().outlook
        if len(departures_s) > 1 and now_s > departures_s[0]:
            return (now_s - departures_s[0]) / (len(departures_s) - 1)
        return (outlook and outlook.end_s(self.num_decoding)) or LEAST_RETRY_S

    # Time

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
                num_fair = math.ceil((num_own + goes_first) * line.asker.share / asker.share)
                same_class.add(line.total, min(1.0, num_fair / num))
        ahead.all.add(same_class)
        return ahead

    def expected_s(self, ahead: Ahead, own: Backlog, factor: float) -> float | None:
        """Until the first token; None: it is not known.

        Args:
            factor: that the scheduler's word is multiplied with. What age guarantees is none of it.
        """
        outlook = self._stats().outlook
        if outlook is None:
            return None
        expected_s = factor * outlook.ttft_s(self.num_decoding, ahead.all, own)
        if not ahead.ageing_s:
            return expected_s
        last_s = factor * outlook.ttft_s(self.num_decoding, ahead.same_class, own)
        return min(expected_s, ahead.ageing_s * (1 + ahead.same_class.num_requests) + last_s)

    def check_hope(self, asker: Asker, allowed_s: float) -> None:
        """Whether a request of one token could be in time: no other can be if that cannot.

        Raises:
            ServiceError: deadline_unattainable.
        """
        self.check_in_time(asker, backlog_of(1, 1), allowed_s)

    def check_in_time(self, asker: Asker, own: Backlog, allowed_s: float) -> float | None:
        """
        Returns: in how many seconds the first token is expected; None: it is not known.

        Raises:
            ServiceError: deadline_unattainable.
        """
        factor = self.margin.factor
        if self.is_idle:
            # nobody is harmed by a try: only what could not be in time with all of its prompt cached is refused
            own, factor = backlog_of(1, 1), 1.0
        expected_s = self.expected_s(self.ahead_of(asker), own, factor)
        if expected_s is None or not 0 < allowed_s < expected_s:
            return expected_s  # what is late already is told so by its deadline
        retry_s = min(max(expected_s - allowed_s, LEAST_RETRY_S), MOST_RETRY_S)
        message = (
            f"The first token is expected in {_shown(expected_s)}, and its deadline is in {_shown(allowed_s)}."
            f" Allow more time, or try again in {math.ceil(retry_s)} s."
        )
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "deadline_unattainable", retry_after_s=retry_s)

    def view(self, entry: _Entry, now_s: float) -> QueueView:
        ahead = self.ahead_of(entry.line.asker, entry, now_s)
        return QueueView(round(ahead.all.num_requests), self.expected_s(ahead, entry.backlog, self.margin.factor))

    def add(self, place: "Place", asker: Asker, backlogs: list[Backlog]) -> list[_Entry]:
        """Let a request's prompts wait.

        Raises:
            ServiceError: overloaded.
        """
        num_tokens = sum(own.prompt_tokens for own in backlogs)
        self._make_room(self._tokens, asker.tenant, num_tokens)
        place.take(self._tokens, num_tokens)
        line = self._lines.setdefault((asker.priority, asker.tenant, asker.is_due), _Line(asker))
        line.asker = asker
        entries = [_Entry(line, own) for own in backlogs]
        for entry in entries:
            line.entries[entry] = None
            line.total.add(entry.backlog)
        return entries

    def remove(self, place: "Place", entry: _Entry) -> None:
        """It waits no more."""
        line = entry.line
        del line.entries[entry]
        line.total.add(entry.backlog, -1.0)
        if not line.entries:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}
        place.take(self._tokens, -entry.backlog.prompt_tokens)


def backlog_of(num_prompt_tokens: int, num_sequences: int) -> Backlog:
    """One request's."""
    work = StepWork()
    work.add(0, num_prompt_tokens, num_prompt_tokens)
    return Backlog(1, num_sequences, num_prompt_tokens, work.prompt_kv)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class Place:
    """One request's, from its complete body to its end: enter, admit, on_first_token, on_choice_end, leave.

    Attributes:
        held: of each room.
        end: breaks the request off, if others must have its place; None: it cannot be.
        has_begun: some of its answer has been said.
    """

    def __init__(self, admission: Admission, tenant: str) -> None:
        self.tenant = tenant
        self.held: dict[SharedRoom, float] = {}
        self.end: Callable[[ServiceError], None] | None = None
        self.has_begun = False
        self._admission = admission
        self._is_released = False
        self._num_choices = 1  # of each prompt
        self._entries: dict[int, _Entry] = {}  # that wait, by prompt
        self._expected_s = math.inf  # when its first token was to come, of which nobody has told the margin
        self._num_decoding = 0  # choices that have had their first token, and go on

    def take(self, room: SharedRoom, num: float) -> None:
        """Hold so much more of a room; negative: give it back."""
        room.take(self.tenant, num)
        self.held[room] = self.held.get(room, 0.0) + num

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
        expected_s = admission.check_in_time(asker, backlogs[0], ttft_due_s - now_s)
        if expected_s is not None and not admission.is_idle:
            self._expected_s = now_s + expected_s
        self._num_choices = first.num_sequences
        self._entries = dict(enumerate(admission.add(self, asker, backlogs)))

    def view(self, now_s: float) -> QueueView | None:
        """Where its first prompt stands; None: it waits no more."""
        entry = self._entries.get(0)
        return None if entry is None else self._admission.view(entry, now_s)

    def on_first_token(self, choice: int, now_s: float) -> None:
        self._tell_margin(now_s, has_come=True)
        entry = self._entries.pop(choice // self._num_choices, None)
        if entry is not None:
            self._admission.remove(self, entry)
        self.has_begun = True
        self._count_decoding(1)

    def on_choice_end(self) -> None:
        """Of a choice that has had its first token."""
        self._count_decoding(-1)

    def leave(self, now_s: float) -> None:
        """The request is over. To be called once."""
        self._give_back()
        self._count_decoding(-self._num_decoding)
        self._tell_margin(now_s, has_come=False)

    def _count_decoding(self, change: int) -> None:
        self._num_decoding += change
        self._admission.num_decoding += change

    def _tell_margin(self, now_s: float, has_come: bool) -> None:
        is_late = now_s > self._expected_s
        if self._expected_s < math.inf and (has_come or is_late):
            self._admission.margin.note(is_late)
            self._expected_s = math.inf

    def pause(self) -> None:
        """Its reader has stopped."""
        if not self._is_released:
            self._admission.pause(self)

    def resume(self) -> None:
        self._admission.resume(self)

    def give_way(self, error: ServiceError) -> None:
        """Break it off for another's sake. What it holds is free at once."""
        assert self.end is not None, "only who can be ended is asked to give way"
        self._give_back()
        self.end(error)

    def _give_back(self) -> None:
        for entry in self._entries.values():
            self._admission.remove(self, entry)
        self._entries = {}
        if not self._is_released:
            self._is_released = True
            self._admission.release(self)
