"""Who waits, and who of them is next. Thread: engine.

The order is by class, aged; within a class, requests whose first token is nearly due; then by tenant, the one that has
had least; within a tenant by place: arrival, less a bounded bonus for short prompts. Adding, removing and finding the
next take O(log n) comparisons, and one for each tenant over its share whose deadline is nearer than the next one's.

A deadline lends to its tenant, and gives nothing: it counts no more once the tenant has had OVER_SHARE_S more than
another that waits. Otherwise who sets deadlines on all requests would go before all who set none, for ever.

A class ages while it waits: each AGEING_S without an admission lift it by one, all but the top class even above that,
and an admission takes that back. So whatever higher classes do, a class that waits goes before them, in the queue and
by preemption, after AGEING_S x (TOP_CLASS + 1 - class) seconds: bound_s(). Of classes that age has made alike, the
lower goes first: it has waited longer for it. That lifts the class, not the request: an old backlog of one tenant must
not pass the fresh requests of others in the same class, which is what the counters decide.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter

from core.fairness import OVER_SHARE_S
from core.sequence import DueOrder, Place, Sequence

LOWEST_CLASS, TOP_CLASS = -4, 4
AGEING_S = 10.0
NEARLY_DUE_S = 1.0  # to the latest moment at which a prompt can start and have its first token in time

# Urgency among all that have work to do, smaller first: (-class, is not nearly due, tenant's counter, place)
Rank = tuple[int, bool, float, Place]

_PLACE: Callable[[Sequence], Place] = attrgetter("place")
_DUE_ORDER: Callable[[Sequence], DueOrder] = attrgetter("due_order")


def bound_s(priority: int) -> float:
    """How long a class can wait without an admission before it is preferred to all others."""
    return AGEING_S * (TOP_CLASS + 1 - priority)


def aged_class(priority: int, age_s: float) -> int:
    """One above the top at most; the top class stays what it is."""
    return max(priority, min(TOP_CLASS + (priority < TOP_CLASS), priority + int(age_s / AGEING_S)))


def rank(sequence: Sequence, level: int, now: float) -> Rank:
    """
    Args:
        level: its class, aged.
    """
    is_due = sequence.due_order[0] <= now + NEARLY_DUE_S
    return -level, not is_due, sequence.tenant.counter_s, sequence.place


def is_due_before(sequence: Sequence, other: Sequence, now: float) -> bool:
    """Whether it would go before another of its class because its first token is nearly due."""
    is_due = sequence.has_deadline and sequence.due_order[0] <= now + NEARLY_DUE_S
    return is_due and not (other.has_deadline and other.due_order < sequence.due_order)


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
        """
        Args:
            now: since when its class ages if nobody else of it waits.
        """
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
        """Who is next, and its aged class; None when nobody waits."""
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
    """The sequences of one class.

    Args:
        since_s: when it began to wait, or was last admitted from.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, list[Sequence]] = {}  # by place
        self.since_s = 0.0
        self._by_counter: list[tuple[float, str]] = []  # a heap of the tenants; counters may have grown since
        self._queued: set[str] = set()  # those in the heap
        self._due = _DueLines()

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        waiting = self.tenants.setdefault(tenant.name, [])
        insort(waiting, sequence, key=_PLACE)
        if tenant.name not in self._queued:
            self._queued.add(tenant.name)
            heapq.heappush(self._by_counter, (tenant.counter_s, tenant.name))
        if sequence.has_deadline:
            self._due.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        name = sequence.tenant.name
        waiting = self.tenants.get(name, [])
        i = bisect_left(waiting, sequence.place, key=_PLACE)
        if i == len(waiting) or waiting[i] is not sequence:
            return False
        del waiting[i]
        if not waiting:
            del self.tenants[name]  # its entry in the heap is dropped when it comes to the top
        if sequence.has_deadline:
            self._due.remove(sequence)
        return True

    def head(self, now: float) -> Sequence:
        """Who is next. Somebody must wait."""
        first = self._first()
        return self._due.first(now + NEARLY_DUE_S, first.tenant.counter_s + OVER_SHARE_S) or first

    def _first(self) -> Sequence:
        """Who is next if nothing is due."""
        while True:
            counter_s, name = self._by_counter[0]
            if name not in self.tenants:
                heapq.heappop(self._by_counter)
                self._queued.remove(name)
                continue
            first = self.tenants[name][0]
            if first.tenant.counter_s == counter_s:
                return first
            heapq.heapreplace(self._by_counter, (first.tenant.counter_s, name))


class _DueLines:
    """Those of a class that wait with a deadline: by tenant, and by when they have to start."""

    def __init__(self) -> None:
        self.tenants: dict[str, list[Sequence]] = {}
        self._firsts: list[Sequence] = []  # of each tenant

    def add(self, sequence: Sequence) -> None:
        line = self.tenants.setdefault(sequence.tenant.name, [])
        insort(line, sequence, key=_DUE_ORDER)
        if line[0] is sequence:
            if len(line) > 1:
                _take(self._firsts, line[1])
            insort(self._firsts, sequence, key=_DUE_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """One of them."""
        line = self.tenants[sequence.tenant.name]
        is_first = line[0] is sequence
        _take(line, sequence)
        if is_first:
            _take(self._firsts, sequence)
        if not line:
            del self.tenants[sequence.tenant.name]
        elif is_first:
            insort(self._firsts, line[0], key=_DUE_ORDER)

    def first(self, end_s: float, limit_s: float) -> Sequence | None:
        """Who has to start first, and before end_s, of those tenants whose counter is limit_s at most."""
        for sequence in self._firsts:
            if sequence.due_order[0] > end_s:
                return None
            if sequence.tenant.counter_s <= limit_s:
                return sequence
        return None


def _take(ordered: list[Sequence], sequence: Sequence) -> None:
    """Out of a list by when they have to start."""
    del ordered[bisect_left(ordered, sequence.due_order, key=_DUE_ORDER)]
