"""Drives a runner by hand: sequences, their blocks, and plans as a scheduler would make them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.config import BLOCK_SIZE
from core.plan import Runner, SequenceStart, StepOutput, StepPlan, make_plan
from core.types import Adapter, SamplingParams

GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


@dataclass
class DrivenSequence:
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    adapter: Adapter | None = None
    num_computed: int = 0
    is_started: bool = False
    blocks: list[int] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Gives blocks out from a shuffled free list, so that tables are not in order."""

    def __init__(self, runner: Runner[Any]) -> None:
        self.runner = runner
        self.free_blocks = np.random.default_rng(0).permutation(runner.limits.num_blocks).tolist()
        self.free_slots = list(range(runner.limits.max_sequences))

    def add(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_ids: tuple[int, ...] = (),
        adapter: Adapter | None = None,
    ) -> DrivenSequence:
        slot = self.free_slots.pop()
        return DrivenSequence(slot, list(prompt_ids), len(prompt_ids), sampling, seed, stop_ids, adapter)

    def remove(self, sequence: DrivenSequence) -> None:
        """Give slot and blocks back, contents as they are; the next owner gets them first."""
        self.free_blocks.extend(sequence.blocks)
        self.free_slots.append(sequence.slot)

    def preempt(self, sequence: DrivenSequence) -> None:
        """Take the blocks away: all is computed anew, in whatever slot is next."""
        self.remove(sequence)
        sequence.slot, sequence.blocks = self.free_slots.pop(0), []
        sequence.num_computed, sequence.is_started = 0, False

    def step(self, lengths: Mapping[int, int] | None = None, *sequences: DrivenSequence) -> StepOutput:
        """Compute, of each sequence, the tokens not computed yet, or lengths[its slot] of them; keep what is drawn."""
        rows, tables, starts = [], [], []
        for sequence in sequences:
            if not sequence.is_started:
                starts.append(self._start(sequence))
            missing = len(sequence.token_ids) - sequence.num_computed
            length = min((lengths or {}).get(sequence.slot, missing), missing)
            end = sequence.num_computed + length
            while len(sequence.blocks) * BLOCK_SIZE < end:
                sequence.blocks.append(self.free_blocks.pop())
                tables.append((sequence.slot, len(sequence.blocks) - 1, sequence.blocks[-1]))
            new_ids = sequence.token_ids[sequence.num_computed : end]
            rows.append((sequence.slot, sequence.num_computed, new_ids, length == missing))
            sequence.num_computed = end
        output = self.run(make_plan(rows, tables=tables, sequence_starts=starts))
        for row, token_id in zip(output.rows.tolist(), output.token_ids.tolist(), strict=True):
            sequences[row].token_ids.append(token_id)
        return output

    def run(self, plan: StepPlan) -> StepOutput:
        ticket = self.runner.forward(plan)
        self.runner.sample(ticket)
        return self.runner.collect(ticket)

    def generate(self, num_tokens: int, *sequences: DrivenSequence) -> list[list[int]]:
        """Step until each has num_tokens of output; returns them."""
        while running := [sequence for sequence in sequences if len(sequence.output_ids) < num_tokens]:
            self.step(None, *running)
        return [sequence.output_ids for sequence in sequences]

    def _start(self, sequence: DrivenSequence) -> SequenceStart:
        sequence.is_started = True
        return SequenceStart(
            sequence.slot,
            tuple(sequence.token_ids),
            sequence.num_prompt_tokens,
            sequence.sampling,
            sequence.seed,
            sequence.stop_ids,
            sequence.adapter,
        )
