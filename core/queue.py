"""Who waits, who of them is next, who gives way to it, and what tenants are charged. Thread: engine.

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

Tenants' counters follow "Fairness in Serving Large Language Models" (arXiv:2401.00588), the virtual token counter:
whoever waits with the smallest counter goes first, and who comes back from being idle is lifted to the least of those
that were not, so that nobody saves up. Counters count seconds by the step-cost model, where the paper counts weighted
tokens; of a tenant with a share of two, each counts half (there: weighted VTC).
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter

from core.plan import Flight
from core.sequence import OVER_SHARE_S, DueOrder, Place, Sequence, SequenceState, Tenant
from core.step_cost import StepCostModel
from core.types import TOP_CLASS

AGEING_S = 10.0
NEARLY_DUE_S = 1.0  # to the latest moment at which a prompt can start and have its first token in time
WINDOW_S, LONGEST_S = 0.1, 10.0  # see Burst
_NEVER = math.inf, -math.inf

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


class TenantShares:
    """All tenants that have requests, and those that may not come back with less than they had. O(log n) operations."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._heap: list[tuple[float, str]] = []  # each of them once, with a counter that it has had
        self._floor_s = 0.0  # the least counter of those that have requests, as last seen

    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._tenants.values())

    def enter(self, name: str, share: int = 1) -> Tenant:
        """A request of this tenant has come; its share is this from now on."""
        floor_s = self.least_s()
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, share, floor_s)
            heapq.heappush(self._heap, (floor_s, name))
        elif tenant.num_live == 0:
            tenant.counter_s = max(tenant.counter_s, floor_s)
        tenant.share = share
        tenant.num_live += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """A request of this tenant has ended."""
        tenant.num_live -= 1

    def least_s(self) -> float:
        """The least counter of those that have requests; with none, the greatest of those that had.

        Idle tenants with less are forgotten: if they come back, they are lifted to it.
        """
        heap = self._heap
        while heap:
            counter_s, name = heap[0]
            tenant = self._tenants[name]
            if tenant.counter_s > counter_s:
                heapq.heapreplace(heap, (tenant.counter_s, name))
                continue
            self._floor_s = max(self._floor_s, counter_s)
            if tenant.num_live:
                break
            heapq.heappop(heap)
            del self._tenants[name]
        return self._floor_s


class Burst:
    """Whom the streams of a step give way to: prompts that come together are computed like one batch.

    The inter-token target protects a stream from prompts that came later. Were it to protect the first of eight that
    come at once from the other seven, these would all wait for their first token about as long as the last one.

    A burst begins with the last step in which nobody decodes. While it lasts, a prompt is not bound by the target if it
    and each that decodes arrived within WINDOW_S of one another, and none of these is of a higher class. It is over
    once none of its prompts is computed in a step later than WINDOW_S, or after LONGEST_S; and until nobody decodes
    there is no other. So a stream gives way in its first LONGEST_S at most, and only to who arrived with it and finds
    room at once: those of a flood that wait for a slot are bound by the streams that hold it, and a stream that is
    there already is protected from every burst.

    Attributes:
        is_on: streams may give way. If not, look() is needed only where nobody decodes.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._began_s = 0.0
        self._is_computed = False  # some of its prompts, in the last step
        self._window = _NEVER  # when those arrived to whom this step's streams give way
        self._priority = 0  # and at least their class

    def look(self, streams: Iterable[Sequence], now: float) -> None:
        """Before the prompts of a step: these decode in it."""
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
        """Whether this step's streams, of which there are some, give way to it."""
        first_s, last_s = self._window
        return first_s <= sequence.arrival_s <= last_s and sequence.priority >= self._priority

    def compute(self) -> None:
        """A prompt of it is computed in this step."""
        self._is_computed = True


VictimOrder = tuple[bool, int, bool, int, Place]


def victim_order(least_s: float) -> Callable[[Sequence], VictimOrder]:
    """A key, largest for who goes first: the paused, the lowest class, tenants over their share, the latest arrival.

    Over its share is a tenant that has had much more than the one that has had least; then, whoever runs most.

    Args:
        least_s: the least counter of all tenants that have requests.
    """
    limit_s = least_s + OVER_SHARE_S

    def key(sequence: Sequence) -> VictimOrder:
        tenant = sequence.tenant
        return sequence.is_paused, -sequence.level, tenant.had_s > limit_s, tenant.num_running, sequence.place

    return key


def outranked(running: Iterable[Sequence], head: Sequence, level: int, least_s: float, now: float) -> list[Sequence]:
    """Running sequences that give way to one that waits, first those that go first.

    These are of another class, and were admitted as a lower one than that has become which waits; or they are of a
    tenant that is ahead of the other's. Age alone does not let a class preempt itself. Nobody gives way who would be
    the queue's next, before the one that it gave way to: it would be admitted and preempted again, and never end.

    Args:
        level: the class of the one that waits, aged.
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
    candidates: Iterable[Sequence], num_slots: int, num_blocks: int, slots_of: Callable[[Sequence], int]
) -> list[Sequence]:
    """The first of them that together hold so many slots and blocks; nobody if all of them do not.

    Args:
        slots_of: how many one holds, for siblings that wait for it too.
    """
    chosen = []
    for sequence in candidates:
        chosen.append(sequence)
        num_slots -= slots_of(sequence)
        num_blocks -= len(sequence.table)
        if num_slots <= 0 and num_blocks <= 0:
            return chosen
    return []


class Charges:
    """What tenants are charged for: engine time, by the step-cost model, and KV blocks.

    A prompt is charged when it is admitted, as in arXiv:2401.00588: the next admission knows of it. A step charges each
    row an equal part of its fixed time, and sampled tokens for themselves. Blocks count by the part of the cache that
    they are: to hold all of it for a second costs a second.

    What differs by the row lies on its sequence, in plain floats: few rows cost a fraction of what the same takes in
    arrays, and hundreds no more, for each has its tenant to be charged.

    Args:
        num_blocks: that there are.
    """

    def __init__(self, model: StepCostModel, num_blocks: int) -> None:
        self._model = model
        self._num_blocks = num_blocks

    def prepay(self, sequence: Sequence) -> None:
        """Charge for all that an admitted sequence, which has its slot and does not run yet, has to compute now."""
        start, end = sequence.num_computed_tokens, len(sequence.token_ids)
        cost_s = self._model.prefill_s(start, end, sequence.num_prompt_tokens)
        sequence.prepaid_end = end
        sequence.prepaid_token_s = cost_s / (end - start)
        sequence.prepaid_s = cost_s
        sequence.tenant.charge(cost_s)
        sequence.tenant.prepaid_s += cost_s

    def refund(self, sequence: Sequence) -> None:
        """Give back what was charged ahead and came from the cache instead, or is not computed as it gives way."""
        sequence.prepaid_end = 0
        sequence.tenant.refund(sequence.prepaid_s)
        sequence.prepaid_s = 0.0

    def charge_step(self, flight: Flight, running: Collection[Sequence], step_s: float) -> int:
        """Charge a step that took step_s, and attribute it to the sequences that were in it.

        Rows that were computed for nothing, because their sequences had ended one step earlier, are charged to their
        tenants all the same, as the device has computed them. No request's Cost has them.

        Args:
            running: all that may be computed: some of the rows, and those that only hold blocks.

        Returns: how many blocks they hold; a shared one counts for each.
        """
        rows = flight.sequences
        fixed_s, _, _, token_s, kv_s = self._model.coefficients_s
        fixed_s /= len(rows)
        sampled_s = fixed_s + token_s
        block_s = (self._model.predict(flight.work) if self._model.is_ready else step_s) / self._num_blocks
        parts_s: list[float] = []  # of the step, as predicted
        held: list[int] = []  # blocks
        for sequence, start, length in zip(
            rows, flight.plan.starts.tolist(), flight.plan.lengths.tolist(), strict=True
        ):
            owed_s = part_s = sampled_s + kv_s * start
            if start < sequence.prepaid_end:
                owed_s, part_s = fixed_s, fixed_s + self._use_prepaid(sequence, start, length)
            num_blocks = len(sequence.table.blocks)
            parts_s.append(part_s)
            held.append(num_blocks)
            tenant = sequence.tenant
            owed_s += block_s * num_blocks
            if tenant.credit_s or tenant.share != 1:
                tenant.charge(owed_s)
            else:  # what charge() comes to for most rows of most steps
                tenant.served_s += owed_s
                tenant.counter_s += owed_s
        num_held = sum(held)
        predicted_s = sum(parts_s)
        num_running = _attribute(rows, parts_s, predicted_s, held, step_s)
        if len(running) > num_running:
            num_held += self._charge_bystanders(running, set(rows), block_s, step_s)
        return num_held

    def _use_prepaid(self, sequence: Sequence, start: int, length: int) -> float:
        """Of what was charged when it was admitted, these positions' part is used now. Returns it, in seconds."""
        part_s = length * sequence.prepaid_token_s
        used_s = min(part_s, sequence.prepaid_s)
        sequence.prepaid_s -= used_s
        sequence.tenant.prepaid_s -= used_s
        if start + length >= sequence.prepaid_end:
            self.refund(sequence)
        return part_s

    def _charge_bystanders(
        self, running: Collection[Sequence], rows: set[Sequence], block_s: float, step_s: float
    ) -> int:
        """Charge those who only hold blocks. Returns how many."""
        num_held = 0
        for sequence in running:
            if sequence not in rows:
                num_blocks = len(sequence.table.blocks)
                num_held += num_blocks
                sequence.kv_block_s += num_blocks * step_s
                sequence.tenant.charge(num_blocks * block_s)
        return num_held


def _attribute(rows: Seq[Sequence], parts_s: Seq[float], predicted_s: float, held: Seq[int], step_s: float) -> int:
    """Divide what the step took among its sequences: by the parts, equally where these are nothing.

    The part of one that had ended before is nobody's.

    Args:
        predicted_s: all parts together.
        held: blocks of each.

    Returns: how many of them run.
    """
    running, finished, num_running = SequenceState.RUNNING, SequenceState.FINISHED, 0
    if predicted_s <= 0.0:
        parts_s, predicted_s = [1.0] * len(rows), len(rows)
    scale = step_s / predicted_s
    for sequence, part_s, num_blocks in zip(rows, parts_s, held, strict=True):
        if sequence.state is running:
            num_running += 1
        elif sequence.state is finished:
            continue
        sequence.device_s += part_s * scale
        sequence.kv_block_s += num_blocks * step_s
    return num_running
