"""Who has had how much: a virtual counter per tenant, in engine seconds. Thread: engine; SharedRoom: any.

After "Fairness in Serving Large Language Models" (arXiv:2401.00588), the virtual token counter: whoever waits with the
smallest counter goes first, and who comes back from being idle is lifted to the least of those that were not, so that
nobody saves up. Counters count seconds by the step-cost model, where the paper counts weighted tokens; of a tenant with
a share of two, each counts half (there: weighted VTC).
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

# Of engine time that one tenant has had more than another, before it gives way though it runs no more than one sequence
# more: less would have them take turns too often, each time computing anew what was in the blocks.
OVER_SHARE_S = 2.0
MOST_PART = 0.75  # of a shared room, for one tenant while others ask


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account.

    Args:
        share: weight against others: counter and credit count engine time divided by it.
        counter_s: engine time it has had, and lifts. Never falls, so that queues by it stay in order.
        served_s: engine time it has had, undivided.
        credit_s: was charged and not used: later charges take it first.
        prepaid_s: was charged and is not used yet, undivided.
        num_live: requests that wait or run.
        num_running: sequences that hold blocks.
    """

    name: str
    share: int = 1
    counter_s: float = 0.0
    served_s: float = 0.0
    credit_s: float = 0.0
    prepaid_s: float = 0.0
    num_live: int = 0
    num_running: int = 0

    @property
    def had_s(self) -> float:
        """The counter less what was charged ahead."""
        return self.counter_s - self.credit_s - self.prepaid_s / self.share

    def charge(self, seconds: float) -> None:
        self.served_s += seconds
        seconds /= self.share
        if self.credit_s:
            used_s = min(self.credit_s, seconds)
            self.credit_s -= used_s
            seconds -= used_s
        self.counter_s += seconds

    def refund(self, seconds: float) -> None:
        """Some of what was prepaid was not computed after all."""
        self.prepaid_s -= seconds
        self.served_s -= seconds
        self.credit_s += seconds / self.share

    def gives_way_to(self, other: "Tenant") -> bool:
        """Whether a running sequence of this tenant gives way to a waiting one of the other's.

        Where it runs at least two more, both come nearer to each other: they cannot take turns for nothing.
        """
        if self.num_running > other.num_running + 1:
            return self.counter_s > other.counter_s
        return self.had_s > other.counter_s + OVER_SHARE_S

    def those_giving_way(self, others: "Iterable[Tenant]") -> "set[Tenant]":
        """Those of them that give way to a waiting sequence of this tenant's."""
        over_s, num_running = self.counter_s + OVER_SHARE_S, self.num_running + 1  # few have more of either
        return {
            other
            for other in others
            if (other.counter_s > over_s or other.num_running > num_running) and other.gives_way_to(self)
        }


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
