"""A simulated runner that knows, for every position in every block, which tokens it was computed after."""

import numpy as np
import numpy.typing as npt

from core.plan import RunnerLimits, StepOutput, StepPlan
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import TokenLogprobs

_SPOILED = -1
_WRONG_LOGPROB = 1.0


class ChainCheckingRunner(SimulatedRunner):
    """Raises AssertionError when a row would read keys and values that were computed after other tokens than its own.

    A position's keys and values depend on its token and on all before it: so much is kept of each position, as a hash.
    A row that reads what was spoiled is misled: it spoils what it writes, and draws another token than it should, and
    what it tells of its prompt is wrong.
    """

    def __init__(self, limits: RunnerLimits, cost: CostModel, clock: SimulatedClock) -> None:
        super().__init__(limits, cost, clock)
        self._chains = np.full((limits.num_blocks, limits.block_size), _SPOILED, np.int64)
        self._host_chains = np.full((limits.num_host_blocks, limits.block_size), _SPOILED, np.int64)
        self._expected: dict[int, list[int]] = {}  # by slot: the hash after each of its tokens
        self.misled_rows: set[int] = set()  # of the last plan that was computed

    def forward(self, plan: StepPlan) -> StepPlan:
        ticket = super().forward(plan)
        for start in plan.sequence_starts:
            self._expected[start.slot] = _chain(0, start.token_ids)
        if plan.host_copies is not None:
            offloads, restores = plan.host_copies.offloads, plan.host_copies.restores
            self._host_chains[list(offloads)] = self._chains[list(offloads.values())]
            self._chains[list(restores)] = self._host_chains[list(restores.values())]
        self._chains[plan.copy_targets] = self._chains[plan.copy_sources]
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        token_ids, offset = self._known_ids(plan).tolist(), 0
        for slot, start, length in rows:
            expected = self._expected[slot]
            if len(expected) < start + length:
                last = expected[-1] if expected else 0
                expected += _chain(last, token_ids[offset : offset + length][len(expected) - start :])
            self._write(slot, start, expected[start : start + length])
            offset += length
        self.misled_rows.clear()
        for row, (slot, start, length) in enumerate(rows):  # a step writes all its keys and values before any are read
            found, expected = self._read(slot, start + length), self._expected[slot][: start + length]
            if _SPOILED in found:
                self.misled_rows.add(row)
            assert all(one in (other, _SPOILED) for one, other in zip(found, expected, strict=True))
        for row in self.misled_rows:
            self.spoil(plan, row)
        return ticket

    def sample(self, ticket: StepPlan) -> None:
        super().sample(ticket)
        for row in self.misled_rows:
            if ticket.samples[row]:
                self._last_drawn[ticket.slots[row]] += 1
                self.drawn_of(ticket)[int(ticket.samples[:row].sum())] += 1
            told = self.output_of(ticket).prompt_logprobs
            told[row] = [TokenLogprobs(one.token_id, _WRONG_LOGPROB) for one in told.get(row, [])]

    def drawn_of(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        token_ids: npt.NDArray[np.int32] = self.output_of(plan).token_ids
        return token_ids

    def output_of(self, plan: StepPlan) -> StepOutput:
        step = self._device._steps[-1]
        assert step.plan is plan
        assert step.output is not None
        return step.output

    def spoil(self, plan: StepPlan, row: int) -> None:
        """Whatever the row has written is lost."""
        slot, start, length = (column.tolist()[row] for column in (plan.slots, plan.starts, plan.lengths))
        self._write(slot, start, [_SPOILED] * length)

    def _write(self, slot: int, start: int, chain: list[int]) -> None:
        positions = np.arange(start, start + len(chain))
        self._chains[self._blocks(slot, positions), positions % self.limits.block_size] = chain

    def _read(self, slot: int, end: int) -> list[int]:
        positions = np.arange(end)
        found: list[int] = self._chains[self._blocks(slot, positions), positions % self.limits.block_size].tolist()
        return found

    def _blocks(self, slot: int, positions: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        return self._tables[slot, positions // self.limits.block_size]


def _chain(before: int, token_ids: tuple[int, ...] | list[int]) -> list[int]:
    chain = []
    for token_id in token_ids:
        before = hash((before, token_id)) >> 1
        chain.append(before)
    return chain
