"""How bad a random history is, and a model that fails accordingly: by what it computes, by chance, and for good."""

import random
from collections import Counter
from dataclasses import dataclass

from core.plan import DeviceError, RunnerLimits, StepOutput, StepPlan
from core.simulation import CostModel, SimulatedClock, SimulatedRunner

RAISES_ID, FAILS_ID = 17, 19  # in a prompt: each step with its request raises; each row of it fails
QUIET_FORWARDS = 64  # after a step that raised, so that no fault by chance hits the search for the guilty row


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad a history is: drawn from its seed.

    Args:
        raises, dies: chances of each step.
        reloads, looks, clears, leaves, cancels, hangs: chances of each turn.
    """

    raises: float
    dies: float
    reloads: float
    looks: float
    clears: float
    leaves: float
    cancels: float
    hangs: float
    bad: float
    slow: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Weather":
        def chance(most: float) -> float:
            return rng.choice((0.0, rng.random() * most))

        return cls(
            raises=chance(0.02),
            dies=chance(0.003),
            reloads=chance(0.1),
            looks=chance(0.1),
            clears=chance(0.1),
            leaves=chance(0.5),
            cancels=chance(0.5),
            hangs=chance(0.1),
            bad=chance(0.3),
            slow=chance(0.3),
        )


class FaultyModel(SimulatedRunner):
    """Raises and fails by what it computes and by chance, and may be lost for good."""

    def __init__(
        self, limits: RunnerLimits, cost: CostModel, clock: SimulatedClock, rng: random.Random, weather: Weather
    ) -> None:
        super().__init__(limits, cost, clock)
        self._rng = rng
        self._weather = weather
        self._num_quiet = 0
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot
        self.faults: Counter[str] = Counter()

    def forward(self, plan: StepPlan) -> StepPlan:
        if self._rng.random() < self._weather.dies:
            self.faults["device lost"] += 1
            raise DeviceError("gone")
        self._prompts |= {start.slot: start.token_ids[: start.num_prompt_tokens] for start in plan.sequence_starts}
        if any(RAISES_ID in self._prompts[slot] for slot in plan.slots.tolist()):
            self._num_quiet = 0
            self.faults["guilty step"] += 1
            raise RuntimeError("an illegal value")
        self._num_quiet += 1
        if self._num_quiet > QUIET_FORWARDS and self._rng.random() < self._weather.raises:
            self._num_quiet = 0
            self.faults["step out of memory"] += 1
            raise MemoryError("out of memory on the device")
        return super().forward(plan)

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        if self._num_quiet > QUIET_FORWARDS and self._rng.random() < self._weather.raises:
            self._num_quiet = 0
            self.faults["result unreadable"] += 1
            raise MemoryError("out of memory on the host")
        for row, slot in enumerate(ticket.slots.tolist()):
            if FAILS_ID in self._prompts[slot]:
                self.faults["failed row"] += 1
                output.failed_rows[row] = "The logits are not finite."
        return output
