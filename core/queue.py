"""Owns the order of waiting sequences, which running ones give way to them, and what tenants are charged.

Thread: engine. The order is by class, aged; within a class, requests whose first token is nearly due; then by tenant,
the least served first; within a tenant by place: arrival, less a bounded bonus for short prompts. Adding, removing and
finding the next take O(log n) comparisons, and one for each tenant over its share whose deadline is nearer than the
next one's.

A deadline only borrows from the tenant's own share: it stops counting once the tenant has had OVER_SHARE_S more than
another that waits. Otherwise a tenant that sets deadlines on all its requests would always precede one that sets none.

A class ages while it waits: each AGEING_S without an admission raise it by one, all but the top class even above the
top, and an admission resets it. So a waiting class precedes all others, in the queue and by preemption, after
AGEING_S x (TOP_CLASS + 1 - class) seconds at most. Of classes that ageing has made equal, the lower goes first,
having waited longer. Ageing raises the class, not the request: an old backlog of one tenant must not pass other
tenants' fresh requests of the same class; between those the tenants' counters decide.

Tenants' counters follow "Fairness in Serving Large Language Models" (arXiv:2401.00588), the virtual token counter: the
waiting tenant with the smallest counter goes first, and a tenant that was idle is raised to the least counter of those
that were not, so that no tenant saves up. Counters count seconds by the step-cost model, where the paper counts
weighted tokens; with a share of two, each second counts half (the paper's weighted VTC).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from core.plan import Flight
from core.sequence import OVER_SHARE_S, DueOrder, Place, Sequence, SequenceState, Tenant
from core.step_cost import StepCostModel
from core.types import TOP_CLASS

AGEING_S = 10.0
NEARLY_DUE_S = 1.0  # before the latest start that still gives the first token in time
WINDOW_S, LONGEST_S = 0.1, 10.0  # see Burst
_NEVER = math.inf, -math.inf

# Urgency of sequences that have work to do, smaller first: (-class, is not nearly due, tenant's counter, place)
Rank = tuple[int, bool, float, Place]

_PLACE: Callable[[Sequence], Place] = attrgetter("place")
_DUE_ORDER: Callable[[Sequence], DueOrder] = attrgetter("due_order")


def aged_class(priority: int, age_s: float) -> int:
    """At most one above the top; the top class does not age."""
    return max(priority, min(TOP_CLASS + (priority < TOP_CLASS), priority + int(age_s / AGEING_S)))


def rank(sequence: Sequence, level: int, now: float) -> Rank:
    """level: its aged class."""
    is_due = sequence.due_order[0] <= now + NEARLY_DUE_S
    return -level, not is_due, sequence.tenant.counter_s, sequence.place


def is_due_before(sequence: Sequence, other: Sequence, now: float) -> bool:
    """Whether it precedes another of its class because its first token is nearly due."""
    is_due = sequence.has_deadline and sequence.due_order[0] <= now + NEARLY_DUE_S
    return is_due and not (other.has_deadline and other.due_order < sequence.due_order)


class TenantHeap:
    """Tenants by counter. Counters only grow, so an outdated entry is corrected when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int, Tenant]] = []
        self._members: set[Tenant] = set()

    def add(self, tenant: Tenant) -> None:
        if tenant not in self._members:
            self._members.add(tenant)
            heapq.heappush(self._heap, self._entry(tenant))

    def least(self) -> Tenant | None:
        while self._heap:
            entry = self._heap[0]
            tenant = entry[3]
            if entry[0] == tenant.counter_s:
                return tenant
            heapq.heapreplace(self._heap, self._entry(tenant))
        return None

    def drop_least(self) -> None:
        self._members.remove(heapq.heappop(self._heap)[3])

    def _entry(self, tenant: Tenant) -> tuple[float, str, int, Tenant]:
        return tenant.counter_s, tenant.name, id(tenant), tenant  # a forgotten tenant may return as another object


class WaitingQueue:
    """Sequences that wait for their blocks."""

    def __init__(self) -> None:
        self._classes: dict[int, _ClassQueue] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def is_waiting(self, tenant: str) -> bool:
        """Whether a tenant has a sequence here."""
        return any(tenant in queue.tenants for queue in self._classes.values())

    def add(self, sequence: Sequence, now: float) -> None:
        """now: when its class begins to age, if it is the class's first."""
        queue = self._classes.setdefault(sequence.priority, _ClassQueue())
        if not queue.tenants:
            queue.since_s = now
        queue.add(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, if it waits."""
        queue = self._classes.get(sequence.priority)
        if queue is not None and queue.remove(sequence):
            self._num_waiting -= 1

    def head(self, now: float) -> tuple[Sequence, int] | None:
        """The next sequence and its aged class; None when the queue is empty."""
        if not self._num_waiting:
            return None
        levels = [(aged_class(c, now - queue.since_s), -c) for c, queue in self._classes.items() if queue.tenants]
        level, priority = max(levels)
        return self._classes[-priority].head(now), level

    def admit(self, sequence: Sequence, now: float) -> None:
        """Take the head out: its class begins to age anew."""
        self.remove(sequence)
        self._classes[sequence.priority].since_s = now


class _ClassQueue:
    """The waiting sequences of one class.

    Attributes:
        tenants: by name, their sequences in order of place.
        since_s: when the class began to wait, or was last admitted from.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, list[Sequence]] = {}
        self.since_s = 0.0
        self._by_counter = TenantHeap()  # may hold tenants that do not wait any more
        self._due = _DueLines()

    def add(self, sequence: Sequence) -> None:
        insort(self.tenants.setdefault(sequence.tenant.name, []), sequence, key=_PLACE)
        self._by_counter.add(sequence.tenant)
        if sequence.has_deadline:
            self._due.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Returns whether it was there."""
        name = sequence.tenant.name
        waiting = self.tenants.get(name, [])
        i = bisect_left(waiting, sequence.place, key=_PLACE)
        if i == len(waiting) or waiting[i] is not sequence:
            return False
        del waiting[i]
        if not waiting:
            del self.tenants[name]
        if sequence.has_deadline:
            self._due.remove(sequence)
        return True

    def head(self, now: float) -> Sequence:
        """The next of at least one."""
        while (tenant := self._by_counter.least()) is not None:
            waiting = self.tenants.get(tenant.name)
            if waiting and waiting[0].tenant is tenant:
                return self._due.first(now + NEARLY_DUE_S, tenant.counter_s + OVER_SHARE_S) or waiting[0]
            self._by_counter.drop_least()
        raise AssertionError("no sequence of this class waits")


class _DueLines:
    """The waiting sequences of one class that have a deadline: by tenant, and by their latest start."""

    def __init__(self) -> None:
        self._tenants: dict[str, list[Sequence]] = {}
        self._firsts: list[Sequence] = []  # of each tenant

    def add(self, sequence: Sequence) -> None:
        line = self._tenants.setdefault(sequence.tenant.name, [])
        insort(line, sequence, key=_DUE_ORDER)
        if line[0] is sequence:
            if len(line) > 1:
                _take(self._firsts, line[1])
            insort(self._firsts, sequence, key=_DUE_ORDER)

    def remove(self, sequence: Sequence) -> None:
        line = self._tenants[sequence.tenant.name]
        is_first = line[0] is sequence
        _take(line, sequence)
        if is_first:
            _take(self._firsts, sequence)
        if not line:
            del self._tenants[sequence.tenant.name]
        elif is_first:
            insort(self._firsts, line[0], key=_DUE_ORDER)

    def first(self, end_s: float, limit_s: float) -> Sequence | None:
        """The earliest to start before end_s, of tenants whose counter is at most limit_s."""
        for sequence in self._firsts:
            if sequence.due_order[0] > end_s:
                return None
            if sequence.tenant.counter_s <= limit_s:
                return sequence
        return None


def _take(ordered: list[Sequence], sequence: Sequence) -> None:
    """Remove it from a list that is ordered by latest start."""
    del ordered[bisect_left(ordered, sequence.due_order, key=_DUE_ORDER)]


class TenantShares:
    """The tenants that have requests, and idle ones that may not return with a lower counter. O(log n) operations."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._by_counter = TenantHeap()
        self._floor_s = 0.0  # the least counter of tenants with requests, as last seen

    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._tenants.values())

    def enter(self, name: str, share: int = 1) -> Tenant:
        """A request of this tenant has arrived, and sets the tenant's share from now on."""
        floor_s = self.least_s()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, share, floor_s)
            self._by_counter.add(tenant)
        elif tenant.num_live == 0:
            tenant.counter_s = max(tenant.counter_s, floor_s)
        tenant.share = share
        tenant.num_live += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of this tenant has ended."""
        tenant.num_live -= 1

    def least_s(self) -> float:
        """The least counter of tenants with requests; without any, the greatest of those that had some.

        Idle tenants below it are forgotten: if they return, they are raised to it.
        """
        while (tenant := self._by_counter.least()) is not None:
            self._floor_s = max(self._floor_s, tenant.counter_s)
            if tenant.num_live:
                break
            self._by_counter.drop_least()
            del self._tenants[tenant.name]
        return self._floor_s


class Burst:
    """Decides which prompts the inter-token target does not bind: those that arrived together with the streams.

    The target protects a stream from prompts that came later. If it also protected the first of eight prompts that
    arrive at once from the other seven, these would wait for their first token about as long as the last one.

    A burst begins with the last step in which no sequence decodes. While it lasts, a prompt is exempt if it and all
    streams arrived within WINDOW_S of one another, and no stream is of a higher class. The burst ends once, later than
    WINDOW_S, a step computes none of its prompts, or after LONGEST_S; the next one needs a step without decodes first.
    So a stream gives way in its first LONGEST_S at most, and only to prompts that arrived with it and found room at
    once: a flood's prompts that wait for a slot are bound by the streams that hold it.

    Attributes:
        is_on: some prompt may be exempt. If not, look() is needed only before steps without decodes.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._began_s = 0.0
        self._is_computed = False  # some of its prompts, in the last step
        self._window = _NEVER  # arrivals of the prompts that this step's streams give way to
        self._priority = 0  # the lowest class of these

    def look(self, streams: Iterable[Sequence], now: float) -> None:
        """Update before a step's prompts are chosen. streams: the sequences that decode in it."""
        arrivals = [(sequence.arrival_s, sequence.priority) for sequence in streams]
        if not arrivals:
            self.is_on, self._began_s, self._is_computed, self._window = True, now, True, _NEVER
            return
        times_s, priorities = zip(*arrivals, strict=True)
        end_s = min(times_s) + WINDOW_S
        self.is_on = (self._is_computed or now <= end_s) and now <= self._began_s + LONGEST_S
        self._is_computed = False
        self._window = (max(times_s) - WINDOW_S, end_s) if self.is_on else _NEVER
        self._priority = max(priorities)

    def has(self, sequence: Sequence) -> bool:
        """Whether this step's streams give way to its prompt."""
        first_s, last_s = self._window
        return first_s <= sequence.arrival_s <= last_s and sequence.priority >= self._priority

    def compute(self) -> None:
        """One of its prompts is computed in this step."""
        self._is_computed = True


VictimOrder = tuple[bool, int, bool, int, Place]


def victim_order(least_s: float) -> Callable[[Sequence], VictimOrder]:
    """A sort key, largest for the first victim: the paused, the lowest class, tenants over their share, the latest.

    A tenant is over its share if it has had OVER_SHARE_S more than the least served. Then the tenant that runs most
    sequences gives one up.

    Args:
        least_s: the least counter of all tenants that have requests.
    """
    limit_s = least_s + OVER_SHARE_S

    def key(sequence: Sequence) -> VictimOrder:
        tenant = sequence.tenant
        return sequence.is_paused, -sequence.level, tenant.had_s > limit_s, tenant.num_running, sequence.place

    return key


def outranked(running: Iterable[Sequence], head: Sequence, level: int, least_s: float, now: float) -> list[Sequence]:
    """The running sequences that give way to the queue's head, first victim first.

    Either they are of another class and were admitted at a lower level than the head has reached by ageing, or their
    tenant is ahead of the head's. A class does not preempt itself by ageing alone. A sequence that would itself be the
    queue's next, before the head, does not give way: it would be admitted and preempted again without end.

    Args:
        level: the head's aged class.
    """
    tenants = {sequence.tenant for sequence in running if sequence.level <= level}
    giving_way = {tenant for tenant in tenants if tenant.gives_way_to(head.tenant)}
    lower = [
        s
        for s in running
        if (s.level < level and s.priority != head.priority)
        or (s.level <= level and s.tenant in giving_way and not is_due_before(s, head, now))
    ]
    return sorted(lower, key=victim_order(least_s), reverse=True)


def enough_of(
    candidates: Iterable[Sequence],
    num_slots: int,
    num_blocks: int,
    num_windows: int,
    slots_of: Callable[[Sequence], int],
) -> list[Sequence]:
    """The first candidates that together hold so many slots, blocks and window blocks; empty if all of them do not.

    Args:
        slots_of: how many slots a candidate holds, those for its waiting siblings included.
    """
    chosen = []
    for sequence in candidates:
        chosen.append(sequence)
        num_slots -= slots_of(sequence)
        num_blocks -= sequence.table.num_held
        num_windows -= sequence.table.num_seen
        if max(num_slots, num_blocks, num_windows) <= 0:
            return chosen
    return []


class Charges:
    """Charges tenants for engine time, by the step-cost model, and for KV blocks.

    A prompt is charged when it is admitted, as in arXiv:2401.00588, so that the next admission takes it into account. A
    step charges each row an equal part of its fixed time, and sampled tokens for themselves. Holding the whole cache
    for a second costs a second; blocks count in proportion.

    Per-row state is in plain floats on the sequence: faster than arrays for few rows, and no slower for hundreds.

    Args:
        num_blocks: of the whole cache.
    """

    def __init__(self, model: StepCostModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks

    def prepay(self, sequence: Sequence) -> None:
        """Charge a sequence that is being admitted for all it has to compute now."""
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        cost_s = self._model.prefill_s(start, end, sequence.num_prompt_tokens)
        sequence.prepaid_end = end
        sequence.prepaid_token_s = cost_s / (end - start)
        sequence.prepaid_s = cost_s
        sequence.tenant.charge(cost_s)
        sequence.tenant.prepaid_s += cost_s

    def refund(self, sequence: Sequence) -> None:
        """Return what was prepaid and came from the cache instead, or is not computed because it was preempted."""
        sequence.prepaid_end = 0
        sequence.tenant.refund(sequence.prepaid_s)
        sequence.prepaid_s = 0.0

    def charge_step(self, flight: Flight, running: Collection[Sequence], step_s: float) -> int:
        """Charge a step that took step_s, and divide that time among the sequences that were in it.

        Rows whose sequences had ended one step earlier are charged to their tenants too, as the device has computed
        them, but to no request's Cost.

        Args:
            running: the rows that still run, and the sequences that only held blocks.

        Returns: how many blocks they hold; a shared one counts for each holder.
        """
        rows = flight.sequences
        fixed_s, _, _, token_s, kv_s = self._model.coefficients_s
        fixed_s /= len(rows)
        block_s = (self._model.predict(flight.work) if self._model.is_ready else step_s) / self._num_blocks
        parts_s: list[float] = []  # of the step, as predicted
        held: list[int] = []  # blocks
        for sequence, start, length in zip(
            rows, flight.plan.starts.tolist(), flight.plan.lengths.tolist(), strict=True
        ):
            owed_s = part_s = fixed_s + length * (token_s + kv_s * start)
            if start < sequence.prepaid_end:
                owed_s, part_s = fixed_s, fixed_s + self._use_prepaid(sequence, start, length)
            table = sequence.table
            num_blocks = len(table.blocks) - table.num_dropped  # num_held inlined: for each row of each step
            parts_s.append(part_s)
            held.append(num_blocks)
            tenant = sequence.tenant
            owed_s += block_s * num_blocks
            if tenant.credit_s or tenant.share != 1:
                tenant.charge(owed_s)
            else:  # charge() inlined for most rows of most steps
                tenant.served_s += owed_s
                tenant.counter_s += owed_s
        num_held, predicted_s = sum(held), sum(parts_s)
        if predicted_s <= 0.0:
            parts_s, predicted_s = [1.0] * len(rows), len(rows)
        scale, num_running = step_s / predicted_s, 0
        is_running, is_finished = SequenceState.RUNNING, SequenceState.FINISHED
        for sequence, part_s, num_blocks in zip(rows, parts_s, held, strict=True):
            if sequence.state is is_running:
                num_running += 1
            elif sequence.state is is_finished:
                continue
            sequence.device_s += part_s * scale
            sequence.kv_block_s += num_blocks * step_s
        if len(running) > num_running:
            in_step = set(rows)
            for sequence in running:
                if sequence not in in_step:
                    num_blocks = sequence.table.num_held
                    num_held += num_blocks
                    sequence.kv_block_s += num_blocks * step_s
                    sequence.tenant.charge(num_blocks * block_s)
        return num_held

    def _use_prepaid(self, sequence: Sequence, start: int, length: int) -> float:
        """Use up what was prepaid for these positions. Returns their cost in seconds."""
        part_s = length * sequence.prepaid_token_s
        used_s = min(part_s, sequence.prepaid_s)
        sequence.prepaid_s -= used_s
        sequence.tenant.prepaid_s -= used_s
        if start + length >= sequence.prepaid_end:
            self.refund(sequence)
        return part_s
