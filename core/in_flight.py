"""Steps that were planned and have not come back: what they compute for whom. Thread: engine.

A sequence counts the steps that it is in (num_in_flight) and the tokens that these draw for it (num_pending): the next
plan goes on after them, before anybody knows them. What it holds it keeps until the last of its steps has landed.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from core.plan import StepPlan
from core.plan_builder import PlanBuilder
from core.sequence import Sequence
from core.step_cost import StepWork


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A step under way.

    Args:
        sequences: of the plan's rows, in order.
        other_rows: those that are no plain decodes (PlanBuilder).
        planned_s: monotonic.
        has_suspects: some of them were lost with a step that raised: nothing is sent behind this one, so that its rows
            can be computed again one by one.
    """

    plan: StepPlan
    sequences: list[Sequence]
    other_rows: list[int]
    work: StepWork
    planned_s: float
    has_suspects: bool


class InFlight:
    """The steps under way, oldest first.

    Args:
        max_steps: that may be.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._flights: deque[Flight] = deque()
        self._landed_s = 0.0  # when the last one came back

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def has_suspects(self) -> bool:
        return any(flight.has_suspects for flight in self._flights)

    def send(self, plan: StepPlan, builder: PlanBuilder, now: float, suspects: AbstractSet[Sequence]) -> None:
        """
        Args:
            suspects: those that were in a step that raised, and were not seen to be innocent since.
        """
        assert len(self._flights) < self._max_steps, "a step has to come back first"
        has_suspects = bool(suspects) and not suspects.isdisjoint(builder.sequences)
        self._flights.append(Flight(plan, builder.sequences, builder.other_rows, builder.work, now, has_suspects))

    def find(self, plan: StepPlan) -> Flight:
        return next(flight for flight in self._flights if flight.plan is plan)

    def land(self, now: float) -> tuple[Flight, float]:
        """The oldest has come back: its rows are no longer under way.

        Returns: it, and the seconds that it took: since it was planned, or since the one before it came back.
        """
        flight = self._flights.popleft()
        for sequence, samples in zip(flight.sequences, flight.plan.samples.tolist(), strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
        step_s = now - max(flight.planned_s, self._landed_s)
        self._landed_s = now
        return flight, step_s

    def written_blocks(self, block_size: int) -> set[int]:
        """Those that their rows write to, and what lies behind them."""
        found: set[int] = set()
        for flight in self._flights:
            for start, sequence in zip(flight.plan.starts.tolist(), flight.sequences, strict=True):
                found.update(sequence.table.blocks[start // block_size :])
        return found

    def abandon(self, now: float) -> list[Sequence]:
        """None of them will come back. Returns who was in them, each once."""
        self._landed_s = now
        found = dict.fromkeys(sequence for flight in self._flights for sequence in flight.sequences)
        for sequence in found:
            sequence.num_in_flight = sequence.num_pending = 0
        self._flights.clear()
        return list(found)


def blocks_reached(flights: Iterable[Flight], blocks: set[int]) -> set[int]:
    """These blocks, and those that steps under way copy them to."""
    reached = set(blocks)
    for flight in flights:
        copies = zip(flight.plan.copy_sources.tolist(), flight.plan.copy_targets.tolist(), strict=True)
        reached |= {target for source, target in copies if source in reached}
    return reached
