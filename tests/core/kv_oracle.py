"""A simulated runner that knows, for every position in every block, which tokens it was computed after."""

import itertools

import numpy as np
import numpy.typing as npt

from core.plan import PENDING, Int32Array, RunnerLimits, StepOutput, StepPlan
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import Submit, TokenLogprobs, Usage
from tests.fakes import EngineUnderTest, FakeClock, make_request

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
        self._chains = [[_SPOILED] * limits.block_size for _ in range(limits.num_blocks)]
        self._window_chains = [[_SPOILED] * limits.block_size for _ in range(limits.num_window_blocks or 0)]
        self._host_chains = [[_SPOILED] * limits.block_size for _ in range(limits.num_host_blocks)]
        self._expected: dict[int, list[int]] = {}  # by slot: the hash after each of its tokens
        self._ids: dict[int, list[int]] = {}  # by slot: its tokens
        self.misled_rows: set[int] = set()  # of the last plan that was computed
        self._live: dict[int, list[list[int]]] = {}  # by slot: its recurrent states, each the tokens before it, a hash
        self._kept = [_SPOILED] * (limits.num_kept_states or 0)
        self._drafted: set[int] = set()  # slots whose last row had drafts

    def forward(self, plan: StepPlan) -> StepPlan:
        ticket = super().forward(plan)
        for start in plan.sequence_starts:
            self._expected[start.slot], self._ids[start.slot] = _chain(0, start.token_ids), list(start.token_ids)
            self._drafted.discard(start.slot)
        if plan.host_copies is not None:
            for slot, block in plan.host_copies.offloads.items():
                self._host_chains[slot] = self._chains[block][:]
            for block, slot in plan.host_copies.restores.items():
                self._chains[block] = self._host_chains[slot][:]
        sources = [self._chain_of(block)[:] for block in plan.copy_sources.tolist()]
        for block, chain in zip(plan.copy_targets.tolist(), sources, strict=True):
            self._chain_of(block)[:] = chain
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True))
        token_ids, offset = plan.token_ids.tolist(), 0
        for row, (slot, start, length) in enumerate(rows):
            expected = self._expected[slot]
            if slot in self._drafted:
                del expected[start:], self._ids[slot][start:]
            self._drafted.discard(slot)
            if row in plan.num_drafts:
                self._drafted.add(slot)
            if len(expected) < start + length:
                last = expected[-1] if expected else 0
                new = token_ids[offset : offset + length][len(expected) - start :]
                new = [self._last_sampled[slot] if one == PENDING else one for one in new]
                expected += _chain(last, new)
                self._ids[slot] += new
            self._write(slot, start, expected[start : start + length])
            offset += length
        self.misled_rows.clear()
        for row, (slot, start, length) in enumerate(rows):  # a step writes all its keys and values before any are read
            for found in self._read(slot, start, start + length):
                expected = self._expected[slot][: start + length]
                expected = expected[len(expected) - len(found) :]
                if _SPOILED in found:
                    self.misled_rows.add(row)
                assert all(one in (other, _SPOILED) for one, other in zip(found, expected, strict=True))
        if self.limits.num_kept_states is not None:
            self._compute_states(plan, rows)
        for row in self.misled_rows:
            self.spoil(plan, row)
        return ticket

    def _compute_states(self, plan: StepPlan, rows: list[tuple[int, int, int]]) -> None:
        assert not {save.kept for save in plan.state_saves} & set(plan.state_reads.values())
        for row, (slot, start, length) in enumerate(rows):
            source, expected, before = plan.state_reads.get(slot), [0, *self._expected[slot]], list[list[int]]()
            if source is not None and source >= 0:
                found = self._kept[source]
            elif source is None and start == 0:
                found = 0
            else:
                (entry,) = (one for one in self._live[slot if source is None else ~source] if one[0] == start)
                found, before = entry[1], [entry] if source is None else []
            assert found in (expected[start], _SPOILED)
            is_spoiled = found == _SPOILED
            self._live[slot] = [*before, [start + length, _SPOILED if is_spoiled else expected[start + length]]]
            if is_spoiled:
                self.misled_rows.add(row)
            for save in plan.state_saves:
                if save.row == row:
                    assert start <= save.position < start + length
                    assert save.position % self.limits.block_size == 0 < save.position
                    assert save.position in (start, min(save.position, self._starts[slot].num_prompt_tokens))
                    self._kept[save.kept] = _SPOILED if is_spoiled else expected[save.position]

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        super().sample(ticket, masks)
        for row in self.misled_rows:
            if ticket.samples[row]:
                self._last_sampled[ticket.slots[row]] += 1
                self.drawn_of(ticket)[int(ticket.samples[:row].sum())] += 1
            told = self.output_of(ticket).prompt_logprobs
            told[row] = [TokenLogprobs(one.token_id, _WRONG_LOGPROB) for one in told.get(row, [])]

    def drawn_of(self, plan: StepPlan) -> npt.NDArray[np.int32]:
        token_ids: npt.NDArray[np.int32] = self.output_of(plan).token_ids
        return token_ids

    def output_of(self, plan: StepPlan) -> StepOutput:
        step = self._steps[-1]
        assert step.plan is plan
        assert step.output is not None
        return step.output

    def spoil(self, plan: StepPlan, row: int) -> None:
        """Whatever the row has written is lost."""
        slot, start, length = (column.tolist()[row] for column in (plan.slots, plan.starts, plan.lengths))
        self._write(slot, start, [_SPOILED] * length)
        if slot in self._live:
            self._live[slot][-1][1] = _SPOILED
        for save in plan.state_saves:
            if save.row == row:
                self._kept[save.kept] = _SPOILED

    def _write(self, slot: int, start: int, links: list[int]) -> None:
        size = self.limits.block_size
        for position, link in enumerate(links, start):
            self._chains[self._tables[slot][position // size]][position % size] = link
            if self.limits.num_window_blocks is not None:
                window_block = self._window_tables[slot][position // size]
                assert 0 <= window_block < self.limits.num_window_blocks, "a row writes where it has no window block"
                self._window_chains[window_block][position % size] = link

    def _chain_of(self, block: int) -> list[int]:
        return self._chains[block] if block >= 0 else self._window_chains[~block]

    def _read(self, slot: int, start: int, end: int) -> list[list[int]]:
        """What a row of the tokens `start` to `end` sees: all, its window, or both, in layers that differ."""
        size, window = self.limits.block_size, self.limits.window
        first = 0 if window is None else max(0, start + 1 - window)

        def read(table: list[int], chains: list[list[int]], first: int) -> list[int]:
            blocks = table[first // size : -(-end // size)]
            found = list(itertools.chain.from_iterable(chains[block] for block in blocks))
            return found[first % size : end - first // size * size]

        if self.limits.num_window_blocks is None:
            return [read(self._tables[slot], self._chains, first)]
        behind = read(self._window_tables[slot], self._window_chains, first)
        return [read(self._tables[slot], self._chains, 0), behind]

    def _prefix(self, slot: int, length: int) -> memoryview:
        if self.limits.window is None or self.limits.num_window_blocks is not None:
            return super()._prefix(slot, length)
        return memoryview(np.array(self._ids[slot][:length], np.int32))


def _chain(before: int, token_ids: tuple[int, ...] | list[int]) -> list[int]:
    links = []
    for token_id in token_ids:
        before = hash((before, token_id)) >> 1
        links.append(before)
    return links


def checked_engine(limits: RunnerLimits) -> EngineUnderTest:
    return EngineUnderTest(limits, runner=ChainCheckingRunner(limits, EngineUnderTest.cost, FakeClock()))


def ask(name: str, prompt: tuple[int, ...], **fields: object) -> Submit:
    """The same seed for all: the same prompt gets the same tokens."""
    return Submit(make_request(name, prompt_ids=prompt, **{"seed": 1, **fields}))  # type: ignore[arg-type]


def usage(under_test: EngineUnderTest, name: str) -> Usage:
    found = under_test.log.terminal(name).usage
    assert found is not None
    return found
