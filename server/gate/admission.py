"""Admission: limits on the requests in progress, and estimates of how long a request will wait. Thread: loop.

Three things are limited for the whole server and shared by its tenants: requests, bytes of their bodies, and prompt
tokens that wait for a first token (`SharedRoom`). On a full server, a request evicts others if its tenant is within its
share: first requests whose readers have stopped, then the newest of a tenant that has more than its share.

A request has a `Place` from its complete body to its end. It waits from its submission to the engine until its first
token. The scheduler's outlook (core/outlook.py) estimates that wait from the backlog ahead, which is counted here by
class and tenant, because many requests arrive between two reports of the scheduler. A request whose deadline cannot be
met is refused at once: if admitted, it would delay others, be cancelled in the end, and be retried late.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from core.errors import ErrorKind, ServiceError
from core.outlook import Backlog
from core.queue import AGEING_S
from core.step_cost import StepWork
from core.types import Demand, EngineStats

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
MAX_SHARE = 0.75  # of a room, for one tenant while others hold some of it
PATIENCE_S = 1.0  # a request whose reader has stopped for longer is evicted for any other
LATE_SHARE, MARGIN_STEP = 0.1, 0.1  # see Admission.note_wait
LEAST_MARGIN, MOST_MARGIN = 0.5, 3.0
NUM_DEPARTURES = 64  # the rate at which places come free is measured over so many
PRUNE_EVERY_S = 1.0  # retry times that have passed


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """
    Args:
        max_requests: waiting or running.
        max_tokens: of prompts that wait for a first token; a single prompt may have more.
        max_bytes: of the bodies of requests that wait or run; a single one may have more.
    """

    max_requests: int
    max_tokens: int
    max_bytes: int


class Contender(NamedTuple):
    """The properties of a request that decide its order in the queue (core/queue.py).

    Args:
        is_due: it has a deadline for its first token besides the server's.
    """

    priority: int
    tenant: str
    share: int
    is_due: bool


class QueueView(NamedTuple):
    """Where a request stands.

    Args:
        position: how many requests are ahead, as of now.
        expected_s: until its first token; None: not known yet.
        loading: the current stage of loading its model; None: it is loaded.
    """

    position: int
    expected_s: float | None
    loading: str | None = None


class Loading(Protocol):
    """A model that is loaded on request."""

    @property
    def stage(self) -> str: ...

    def expected_s(self) -> float | None:
        """Seconds until it is loaded: 0 if it is; None: not measured yet."""

    def begin(self) -> None:
        """Load it, even if no request waits for it."""


class SharedRoom:
    """A capacity that tenants share.

    A tenant alone may use all of it, and a single request even more. While others use some, it may use MAX_SHARE of
    what they leave, so that a newcomer always finds space: a dynamic threshold, as switches limit queues in a shared
    buffer (Choudhury and Hahne, 1998). What a tenant uses above MAX_SHARE is borrowed: it does not count against the
    others, who may evict it.

    Args:
        what: the unit, for messages.
    """

    def __init__(self, capacity: float, what: str = "") -> None:
        self.capacity = capacity
        self.what = what
        self.total = 0.0
        self.held: dict[str, float] = {}  # by tenant

    def take(self, tenant: str, num: float) -> None:
        """A negative number returns capacity."""
        self.total += num
        held = self.held.get(tenant, 0.0) + num
        if held:
            self.held[tenant] = held
        else:
            self.held.pop(tenant, None)

    def missing(self, num: float) -> float:
        """How much must be freed before `num` more fit."""
        return self.total + num - self.capacity if self.total else 0.0

    def exceeds_share(self, tenant: str, num: float) -> bool:
        """Whether `num` more would put the tenant above its share, whatever could be evicted."""
        own = self.held.get(tenant, 0.0)
        others = self.total - own
        if not own or not others:
            return False
        borrower = self.borrower()
        if borrower not in (None, tenant):
            others -= self.held[borrower] - MAX_SHARE * self.capacity
        return own + num > MAX_SHARE * (self.capacity - others)

    def borrower(self) -> str | None:
        """The tenant that uses more than MAX_SHARE of the capacity."""
        if self.total <= MAX_SHARE * self.capacity:
            return None
        tenant = max(self.held, key=self.held.__getitem__)
        return tenant if self.held[tenant] > MAX_SHARE * self.capacity else None


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting prompts of one class and tenant, with deadlines or without.

    Args:
        share: the tenant's, as of its latest request.
        total: sum of their work.
        serials: of the prompts, ascending.
    """

    share: int = 1
    total: Backlog = field(default_factory=Backlog)
    serials: list[int] = field(default_factory=list)

    def position(self, serial: int) -> int:
        return bisect_left(self.serials, serial)


class Admission:
    """
    Args:
        stats: returns the engine's latest.
        clock: monotonic seconds.

    Attributes:
        num_decoding: choices that have had their first token and continue.
        margin: factor on estimates.
        loading: the load that its requests also wait for; None: the model is always loaded.
    """

    def __init__(self, limits: QueueLimits, stats: Callable[[], EngineStats], clock: Callable[[], float]) -> None:
        self.num_decoding = 0
        self.margin = 1.0
        self.loading: Loading | None = None
        self._requests = SharedRoom(limits.max_requests, "requests in progress")
        self._bytes = SharedRoom(limits.max_bytes, "bytes of requests in progress")
        self._tokens = SharedRoom(limits.max_tokens, "prompt tokens waiting")
        self._places: dict[Place, None] = {}  # in order of arrival
        self._paused: dict[Place, float] = {}  # since when, in order
        self._stats = stats
        self._clock = clock
        self._lines: dict[tuple[int, str, bool], _Line] = {}  # by class, tenant and whether they have deadlines
        self._num_queued = 0  # since the start: the next prompt's serial number
        self._departures_s: deque[float] = deque(maxlen=NUM_DEPARTURES)  # noted while requests are refused
        self._refused_s = -math.inf  # the last refusal
        self._retries_s: dict[str, float] = {}  # by tenant: the latest retry time of its refusals
        self._pruned_s = 0.0

    @property
    def num_requests(self) -> int:
        """Waiting, running or paused."""
        return round(self._requests.total)

    @property
    def num_bytes(self) -> int:
        return round(self._bytes.total)

    @property
    def is_idle(self) -> bool:
        """No request waits or decodes."""
        return not self._lines and self.num_decoding == 0

    # Room.

    def check(self, tenant: str, num_bytes: int) -> None:
        """Raise ServiceError (overloaded) if one more request of the tenant, with such a body, does not fit.

        Args:
            tenant: Caller.sharing_name.
        """
        self._victims(self._requests, tenant, 1)
        self._victims(self._tokens, tenant, 0)
        self._victims(self._bytes, tenant, num_bytes)

    def enter(self, tenant: str, num_bytes: int) -> "Place":
        """Give a place to a request whose body is complete. Raises ServiceError (overloaded)."""
        self.check(tenant, num_bytes)
        wanted = {self._requests: 1, self._bytes: num_bytes}
        for room, num in wanted.items():
            self._make_room(room, tenant, num)
        place = Place(self, tenant)
        for room, num in wanted.items():  # once there is room in both
            place.take(room, num)
        self._places[place] = None
        return place

    def release(self, place: "Place") -> None:
        for room, num in place.held.items():
            room.take(place.tenant, -num)
        del self._places[place]
        self._paused.pop(place, None)
        now_s = self._clock()
        if now_s <= self._refused_s + MOST_RETRY_S:
            self._departures_s.append(now_s)

    def set_paused(self, place: "Place", is_paused: bool) -> None:
        """Its reader has stopped, or reads again."""
        if is_paused:
            self._paused[place] = self._clock()
        else:
            self._paused.pop(place, None)

    def _make_room(self, room: SharedRoom, tenant: str, num: float) -> None:
        for victim in self._victims(room, tenant, num):
            victim.evict(self._overloaded(victim.tenant, "is full, and evicted this request for another tenant's"))

    def _victims(self, room: SharedRoom, tenant: str, num: float) -> list["Place"]:
        """The places to evict so that the tenant may use `num` more of a room.

        Raises ServiceError (overloaded): the tenant has its share, or evicting all of them would not be enough.
        """
        if room.exceeds_share(tenant, num):
            state = f"gives one tenant at most {MAX_SHARE:.0%} of what other tenants leave free: this one has"
            raise self._overloaded(tenant, f"{state} {self._shown(room, room.held[tenant], num)}")
        missing = room.missing(max(num, 1))
        victims: list[Place] = []
        for place in self._evictable(room, tenant) if missing > 0 else ():
            if freed := place.held.get(room, 0.0):
                victims.append(place)
                missing -= freed
                if missing <= 0:
                    break
        if missing > 0:
            raise self._overloaded(tenant, f"has {self._shown(room, room.total, num)}")
        return victims

    def _shown(self, room: SharedRoom, held: float, num: float) -> str:
        more = f", and this request has {num:,.0f}" if num and room is not self._requests else ""
        return f"{held:,.0f} of at most {room.capacity:,.0f} {room.what}{more}"

    def _evictable(self, room: SharedRoom, tenant: str) -> Iterator["Place"]:
        """The places that may be evicted for a request of the tenant's, first to last."""
        held, own = room.held, room.held.get(tenant, 0.0)
        late_s = self._clock() - PATIENCE_S
        for place, since_s in self._paused.items():
            if since_s <= late_s or held.get(place.tenant, 0.0) > own:
                yield place
        borrower = room.borrower()
        if borrower not in (None, tenant):
            theirs = [one for one in reversed(self._places) if one.tenant == borrower and one not in self._paused]
            yield from sorted((one for one in theirs if one.end is not None), key=lambda one: one.has_begun)

    def _overloaded(self, tenant: str, state: str) -> ServiceError:
        """`state` completes the sentence "The server ..."."""
        retry_s = self._retry_s(tenant)
        message = f"The server {state}. Try again in {math.ceil(retry_s)} s."
        return ServiceError(ErrorKind.UNAVAILABLE, message, "overloaded", retry_after_s=retry_s)

    def _retry_s(self, tenant: str) -> float:
        """Seconds until a place should be free for this refused request; each refusal gets its own time.

        A tenant's times are consecutive. Those of several tenants run in parallel, each at its share of the rate at
        which places become free: a tenant that is refused often, or retries early, delays only itself.
        """
        now_s = self._clock()
        if now_s > self._refused_s + MOST_RETRY_S:  # the rate of the last rush says nothing about this one
            self._departures_s.clear()
        self._refused_s = now_s
        if now_s >= self._pruned_s + PRUNE_EVERY_S:
            self._pruned_s = now_s
            self._retries_s = {name: last_s for name, last_s in self._retries_s.items() if last_s > now_s}
        last_s = max(now_s, self._retries_s.get(tenant, now_s))
        num_tenants = len(self._retries_s.keys() | {tenant})
        self._retries_s[tenant] = last_s + self._departure_interval_s(now_s) * num_tenants
        retry_s = max(LEAST_RETRY_S, self._retries_s[tenant] - now_s)
        if retry_s > MOST_RETRY_S:  # spread over the second half, so that they do not return all at once
            retry_s = MOST_RETRY_S / 2 * (1 + retry_s / (MOST_RETRY_S / 2) % 1)
        return retry_s

    def _departure_interval_s(self, now_s: float) -> float:
        """Seconds between two places becoming free: as measured recently, or as answers are expected to end."""
        departures_s, outlook = self._departures_s, self._stats().outlook
        if len(departures_s) > 1 and now_s > departures_s[0]:
            return (now_s - departures_s[0]) / (len(departures_s) - 1)
        return (outlook and outlook.end_s(self.num_decoding)) or LEAST_RETRY_S

    # Expected waits.

    def estimate(self, contender: Contender, own: Backlog, margin: float, waited_part: float = 1.0) -> QueueView:
        """Where a request stands.

        Ahead of it are its own tenant's requests; of another tenant in its class, as many as that tenant's share gives
        it meanwhile; and all of higher classes, for as long as ageing lets them. Requests with deadlines pass those
        without (core/queue.py).

        Args:
            margin: factor on the scheduler's estimate, but not on the bound that ageing guarantees.
            waited_part: the part of its tenant's line that is ahead of it; all of it for a new request.
        """
        ahead, same_class, ageing_s = Backlog(), Backlog(), 0.0
        own_lines = [self._lines.get((contender.priority, contender.tenant, due)) for due in (False, True)]
        num_own = waited_part * sum(len(one.serials) for one in own_lines[contender.is_due :] if one is not None)
        for (priority, tenant, line_is_due), line in self._lines.items():
            goes_first = line_is_due or not contender.is_due
            if priority > contender.priority:
                ahead.add(line.total)
                ageing_s = max(ageing_s, AGEING_S * (priority - contender.priority))
            elif priority == contender.priority and tenant == contender.tenant:
                same_class.add(line.total, waited_part if goes_first else 0.0)
            elif priority == contender.priority:
                num_fair = math.ceil((num_own + goes_first) * line.share / contender.share)
                same_class.add(line.total, min(1.0, num_fair / len(line.serials)))
        ahead.add(same_class)
        outlook, expected_s = self._stats().outlook, None
        if outlook is not None:
            expected_s = margin * outlook.ttft_s(self.num_decoding, ahead, own)
            if ageing_s:  # that long, higher classes can hold back the first of this class, then the next, and so on
                last_s = margin * outlook.ttft_s(self.num_decoding, same_class, own)
                expected_s = min(expected_s, ageing_s * (1 + same_class.num_requests) + last_s)
        loading_s = 0.0 if self.loading is None else self.loading.expected_s()
        if self.loading is None or loading_s == 0.0:
            return QueueView(round(ahead.num_requests), expected_s)
        if loading_s is not None:
            expected_s = loading_s + (expected_s or 0.0)
        return QueueView(round(ahead.num_requests), expected_s, self.loading.stage)

    def check_in_time(self, contender: Contender, allowed_s: float, own: Backlog | None = None) -> float | None:
        """Raise ServiceError (deadline_unattainable) if the first token would come too late.

        Args:
            own: its prompt; None: one token, the minimum, because its body is not read yet.

        Returns: in how many seconds it is expected; None: not known.
        """
        margin = self.margin
        if own is None or self.is_idle:
            own = LEAST_BACKLOG
        if self.is_idle:  # a try delays no one: refuse only what would be late even with its whole prompt cached
            margin = 1.0
        expected_s = self.estimate(contender, own, margin).expected_s
        if expected_s is None or not 0 < allowed_s < expected_s:
            return expected_s  # if it is late already, its own deadline tells it
        retry_s = min(max(expected_s - allowed_s, LEAST_RETRY_S), MOST_RETRY_S)
        if self.loading is not None:
            self.loading.begin()
        message = (
            f"The first token is expected in {_shown(expected_s)}, and its deadline is in {_shown(allowed_s)}."
            f" Allow more time, or try again in {math.ceil(retry_s)} s."
        )
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "deadline_unattainable", retry_after_s=retry_s)

    def note_wait(self, is_late: bool) -> None:
        """A first token came later than estimated, or not: move the margin so that one in ten is late.

        The estimate ignores later arrivals that go first, cached prefixes and the length of answers, and its error
        changes with the load. The margin rises by nine steps for a late token, and falls by one for each of the others.
        """
        step = MARGIN_STEP * (1 - LATE_SHARE) if is_late else -MARGIN_STEP * LATE_SHARE
        self.margin = min(max(self.margin * (1 + step), LEAST_MARGIN), MOST_MARGIN)

    def queue(self, place: "Place", contender: Contender, backlogs: list[Backlog]) -> tuple[_Line, dict[int, int]]:
        """Put a request's prompts into its line. Raises ServiceError (overloaded).

        Returns: the line, and each prompt's serial number there.
        """
        num_tokens = sum(own.prompt_tokens for own in backlogs)
        self._make_room(self._tokens, contender.tenant, num_tokens)
        place.take(self._tokens, num_tokens)
        line = self._lines.setdefault((contender.priority, contender.tenant, contender.is_due), _Line())
        line.share = contender.share
        for own in backlogs:
            line.total.add(own)
        serials = range(self._num_queued, self._num_queued + len(backlogs))
        line.serials += serials
        self._num_queued = serials.stop
        return line, dict(enumerate(serials))

    def dequeue(self, place: "Place", line: _Line, serial: int, backlog: Backlog) -> None:
        """A prompt no longer waits."""
        del line.serials[line.position(serial)]
        line.total.add(backlog, -1.0)
        if not line.serials:
            self._lines = {key: other for key, other in self._lines.items() if other is not line}
        place.take(self._tokens, -backlog.prompt_tokens)


def backlog_of(num_prompt_tokens: int, num_sequences: int) -> Backlog:
    """Of one prompt."""
    work = StepWork()
    work.add(0, num_prompt_tokens, num_prompt_tokens)
    return Backlog(1, num_sequences, num_prompt_tokens, work.prompt_kv)


LEAST_BACKLOG = backlog_of(1, 1)


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class Place:
    """One request's place, from its complete body to its end: enter, admit, on_first_token, on_choice_end, leave.

    Attributes:
        held: its use of each room.
        end: ends the request to make space for another; None: it cannot be evicted yet.
        has_begun: its first token has come.
        num_decoding: choices that have had their first token and continue.
    """

    _line: _Line  # these three: once it is admitted
    _contender: Contender
    _backlogs: list[Backlog]  # by prompt

    def __init__(self, admission: Admission, tenant: str) -> None:
        self.tenant = tenant
        self.held: dict[SharedRoom, float] = {}
        self.end: Callable[[ServiceError], None] | None = None
        self.has_begun = False
        self.num_decoding = 0
        self._admission = admission
        self._is_released = False
        self._num_choices = 1  # of each prompt
        self._waiting: dict[int, int] = {}  # prompts without a first token, with their serial numbers
        self._expected_s = math.inf  # when the first token was expected; infinite: unknown, or the margin has it

    def take(self, room: SharedRoom, num: float) -> None:
        """Use this much more of a room; negative: less."""
        room.take(self.tenant, num)
        self.held[room] = self.held.get(room, 0.0) + num

    def admit(self, requests: Sequence[Demand], ttft_due_s: float, now_s: float) -> None:
        """Queue the request for the engine. Raises ServiceError: overloaded or deadline_unattainable.

        Args:
            requests: one for each of its prompts.
            ttft_due_s: when its first token is due; infinite: no deadline.
        """
        admission, first = self._admission, requests[0]
        self._backlogs = [backlog_of(one.num_prompt_tokens, one.num_sequences) for one in requests]
        self._contender = Contender(first.priority, first.tenant, first.share, first.deadline_s is not None)
        expected_s = admission.check_in_time(self._contender, ttft_due_s - now_s, self._backlogs[0])
        if expected_s is not None and not admission.is_idle:
            self._expected_s = now_s + expected_s
        self._num_choices = first.num_sequences
        self._line, self._waiting = admission.queue(self, self._contender, self._backlogs)

    @property
    def position(self) -> int | None:
        """Its first prompt's serial number in its line; None: it no longer waits."""
        return self._line.position(self._waiting[0]) if 0 in self._waiting else None

    def view(self) -> QueueView | None:
        """Where its first prompt stands; None: it no longer waits."""
        if self.position is None:
            return None
        part = self.position / len(self._line.serials)
        return self._admission.estimate(self._contender, self._backlogs[0], self._admission.margin, part)

    def on_first_token(self, choice: int, now_s: float) -> None:
        self._note_wait(now_s, has_come=True)
        self._dequeue(choice // self._num_choices)
        self.has_begun = True
        self._count_decoding(1)

    def on_choice_end(self) -> None:
        """A choice that had its first token has ended."""
        self._count_decoding(-1)

    def leave(self, now_s: float) -> None:
        """The request is over. To be called once."""
        self._release()
        self._count_decoding(-self.num_decoding)
        self._note_wait(now_s, has_come=False)
        self.end = None

    def set_paused(self, is_paused: bool) -> None:
        """Its reader has stopped, or reads again."""
        if not self._is_released:
            self._admission.set_paused(self, is_paused)

    def evict(self, error: ServiceError) -> None:
        """End the request in favour of another one. Its resources are free at once."""
        assert self.end is not None, "only a request that can be ended is evicted"
        self._release()
        self.end(error)

    def _count_decoding(self, change: int) -> None:
        self.num_decoding += change
        self._admission.num_decoding += change

    def _note_wait(self, now_s: float, has_come: bool) -> None:
        is_late = now_s > self._expected_s
        if self._expected_s < math.inf and (has_come or is_late):
            self._admission.note_wait(is_late)
            self._expected_s = math.inf

    def _dequeue(self, prompt: int) -> None:
        serial = self._waiting.pop(prompt, None)
        if serial is not None:
            self._admission.dequeue(self, self._line, serial, self._backlogs[prompt])

    def _release(self) -> None:
        for prompt in list(self._waiting):
            self._dequeue(prompt)
        if not self._is_released:
            self._is_released = True
            self._admission.release(self)
