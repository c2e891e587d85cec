"""Who gives up slot and blocks when others need them. Thread: engine."""

from collections.abc import Callable, Iterable

from core.fairness import OVER_SHARE_S
from core.sequence import Place, Sequence


def victim_order(least_s: float) -> Callable[[Sequence], tuple[bool, int, bool, Place]]:
    """A key, largest for who goes first: the paused, the lowest class, tenants over their share, the latest arrival.

    Args:
        least_s: the least counter of all tenants that have requests.
    """
    limit_s = least_s + OVER_SHARE_S

    def key(sequence: Sequence) -> tuple[bool, int, bool, Place]:
        return sequence.is_paused, -sequence.level, sequence.tenant.counter_s > limit_s, sequence.place

    return key


def outranked(running: Iterable[Sequence], head: Sequence, level: int, least_s: float) -> list[Sequence]:
    """Running sequences that give way to one that waits, first those that go first.

    These are of another class, and were admitted as a lower one than that has become which waits; or they are of a
    tenant that is ahead of the other's. Age alone does not let a class preempt itself.

    Args:
        level: the class of the one that waits, aged.
    """
    tenants = {sequence.tenant for sequence in running if sequence.level <= level}
    giving_way = {tenant for tenant in tenants if tenant.gives_way_to(head.tenant)}
    lower = [
        s
        for s in running
        if (s.level < level and s.priority != head.priority) or (s.level <= level and s.tenant in giving_way)
    ]
    return sorted(lower, key=victim_order(least_s), reverse=True)
