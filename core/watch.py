"""What somebody who watches the engine is told: its steps, who was preempted and why, and who has which block.

Thread: engine. Nothing is noted, and no block is looked at, unless a Watch has asked for it. Of prompts, it tells no
content: a prefix is known by the number of its first block.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from core.kv_cache import BlockPool, HostBlocks, Root
from core.sequence import Sequence
from core.step_cost import StepCostModel, StepWork
from core.types import BlockMap, Preempted, PreemptionCause, StepTrace, Watch, Watched

MAX_PREEMPTED = 16  # told of one step
STATES = ("free", "cached", "used", "shared", "paused", "offloaded")  # in the low OWNER_BIT bits of a cell of BlockMap
FREE, CACHED, USED, SHARED, PAUSED, OFFLOADED = range(6)
OWNER_BIT = 3
MAX_OWNERS = 2 ** (16 - OWNER_BIT) - 1
OTHERS = (0, "others")  # owner 0


class Watcher:
    """Notes what is told with the next delivery, until the time that the last Watch gave."""

    def __init__(self) -> None:
        self._until_s = -math.inf
        self._preempted: list[Preempted] = []
        self._steps: list[StepTrace] = []
        self._wants_blocks = False

    def begin(self, watch: Watch) -> None:
        self._until_s = watch.until_s
        self._wants_blocks |= watch.tells_blocks

    def on_preempted(self, now: float, victim: Sequence, cause: PreemptionCause, by: str) -> None:
        """by: the request that takes its place."""
        if now < self._until_s and len(self._preempted) < MAX_PREEMPTED:
            self._preempted.append(Preempted(now, victim.request_id, victim.index, cause, by))

    def on_step(self, now: float, work: StepWork, step_s: float, step_cost: StepCostModel) -> None:
        """A step has come back, of which the model has not learned yet."""
        if now < self._until_s:
            predicted_s = step_cost.predict(work) if step_cost.is_ready else None
            self._steps.append(StepTrace(now, work.prompt_tokens, work.own_tokens, step_s, predicted_s))

    @property
    def has_news(self) -> bool:
        return bool(self._steps or self._preempted or self._wants_blocks)

    def take(self, pool: BlockPool, host: HostBlocks, running: Iterable[Sequence]) -> Watched | None:
        """What there is to tell; None: nothing."""
        if not (self._steps or self._preempted or self._wants_blocks):  # as has_news, without a call for each step
            return None
        blocks = block_map(pool, host, running) if self._wants_blocks else None
        found = Watched(self._steps, self._preempted, blocks)
        self._steps, self._preempted, self._wants_blocks = [], [], False
        return found


def block_map(pool: BlockPool, host: HostBlocks, running: Iterable[Sequence]) -> BlockMap:
    """Who has which block: O(blocks), some 0.2 us each."""
    references, roots = pool.holdings()
    on_host = host.roots()
    numbers: dict[Root | str | None, int] = {None: 0}
    for root in dict.fromkeys([*roots, *on_host]):
        numbers.setdefault(root, len(numbers))
    owners = np.array([numbers[root] for root in roots], np.int64)
    num_held = np.array(references, np.int64)
    num_paused = np.zeros_like(num_held)
    for sequence in running:
        if sequence.is_paused:
            num_paused[sequence.table.blocks] += 1
        own = sequence.table.blocks[sequence.table.num_published :]
        tenant = sequence.tenant.name.partition(" ")[0]  # behind a blank: its client's network
        owners[own] = numbers.setdefault(tenant, len(numbers))
    states = np.where(num_held > 1, SHARED, np.where(num_held == 1, USED, np.where(owners > 0, CACHED, FREE)))
    states[(num_held > 0) & (num_paused >= num_held)] = PAUSED
    owners[states == FREE] = 0
    shown = [OTHERS, *map(_shown, list(numbers)[1 : MAX_OWNERS + 1])]
    host_owners = np.array([numbers[root] for root in on_host], np.int64)
    return BlockMap(_cells(owners, states), _cells(host_owners, OFFLOADED), host.num_slots, shown)


def _cells(owners: npt.NDArray[np.int64], states: npt.NDArray[np.int64] | int) -> bytes:
    known = np.where(owners > MAX_OWNERS, 0, owners)
    return (known << OWNER_BIT | states).astype("<u2").tobytes()


def _shown(owner: Root | str | None) -> tuple[int, str]:
    """The number of a prefix, 0 for blocks that nobody else can find, and whose it is; without anybody's salt."""
    if isinstance(owner, Root):
        return owner.serial, owner.domain.partition("\0")[0].removeprefix("tenant:")
    return 0, owner or ""
