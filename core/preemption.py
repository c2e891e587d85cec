"""Who gives up slot and blocks when others need them. Thread: engine."""

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter

from core.fairness import OVER_SHARE_S
from core.sequence import Place, Sequence
from core.waiting import is_due_before

VictimOrder = tuple[bool, int, bool, int, Place]

_COUNTER_S: Callable[[Sequence], float] = attrgetter("tenant.counter_s")
_NUM_RUNNING: Callable[[Sequence], int] = attrgetter("tenant.num_running")
_CLASS: Callable[[Sequence], tuple[int, int]] = attrgetter("priority", "level")


class RunningBounds:
    """What none of the running sequences exceeds. By it alone most steps see that nobody gives way to the queue's head.

    Whatever anybody is charged raises most_s, and who stops lowers nothing. Once that does not tell any more, fit()
    looks at each of them: after OVER_SHARE_S of charges at the soonest, where all have had the same.

    Attributes:
        most_s: no tenant's counter is larger.
        most_running: no tenant runs more.
        least_levels: by class, nobody of it was admitted as a lower one.
    """

    def __init__(self) -> None:
        self.most_s = 0.0
        self.most_running = 0
        self.least_levels: dict[int, int] = {}

    def include(self, sequence: Sequence) -> None:
        """It has begun to run."""
        self.most_s = max(self.most_s, sequence.tenant.counter_s)
        self.most_running = max(self.most_running, sequence.tenant.num_running)
        self._lower(sequence.priority, sequence.level)

    def fit(self, running: Collection[Sequence]) -> None:
        """These are all that run."""
        self.most_s = max(map(_COUNTER_S, running), default=0.0)
        self.most_running = max(map(_NUM_RUNNING, running), default=0)
        self.least_levels = {}
        for priority, level in set(map(_CLASS, running)):
            self._lower(priority, level)

    def rule_out(self, head: Sequence, level: int) -> bool:
        """Whether certainly nobody gives way to this one that waits.

        Args:
            level: its class, aged.
        """
        tenant = head.tenant
        return (
            self.most_s <= tenant.counter_s + OVER_SHARE_S
            and self.most_running <= tenant.num_running + 1
            and all(least >= level or priority == head.priority for priority, least in self.least_levels.items())
        )

    def _lower(self, priority: int, level: int) -> None:
        self.least_levels[priority] = min(level, self.least_levels.get(priority, level))


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
    giving_way = head.tenant.those_giving_way(tenants)
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
