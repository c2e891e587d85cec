"""Which blocks each slot's sequence has, in order, as plans tell it: differences only. Thread: engine."""

from typing import Any

import numpy as np
import numpy.typing as npt

from core.plan import Int32Array, StepPlan
from gpu.kv_cache import num_blocks_for

IntArray = npt.NDArray[np.signedinteger[Any]]


class BlockTables:
    """Of all slots, on the host.

    Args:
        scratch_block: is where a sequence has no block yet.
    """

    def __init__(self, max_sequences: int, max_model_len: int, scratch_block: int) -> None:
        self.width = num_blocks_for(max_model_len)
        self.scratch_block = scratch_block
        self.blocks = np.full((max_sequences, self.width), scratch_block, dtype=np.int64)  # [slots, width]
        self.num_prompt_tokens = np.zeros(max_sequences, dtype=np.int64)  # [slots]
        self._changes: list[Int32Array] | None = None

    def grow(self, plan: StepPlan) -> None:
        """Reset the slots that start, and note the plan's new blocks."""
        for start in plan.sequence_starts:
            self.blocks[start.slot] = self.scratch_block
            self.num_prompt_tokens[start.slot] = start.num_prompt_tokens
        self.blocks[plan.table_slots, plan.table_positions] = plan.table_blocks
        if self._changes is not None and len(plan.table_slots):
            places = plan.table_slots * np.int32(self.width) + plan.table_positions
            self._changes.append(np.stack([places, plan.table_blocks]))

    def of(self, slot: int) -> IntArray:
        """The blocks of a slot, in order."""
        table = self.blocks[slot]
        found: IntArray = table[table != self.scratch_block]
        return found

    def keep_changes(self) -> None:
        """From now on, for who asks for them: a copy of the tables."""
        self._changes = []

    def take_changes(self) -> Int32Array:
        """Since it was asked before: (place in all tables end to end, its block now), [2, changes]; each place once."""
        assert self._changes is not None
        found = np.concatenate([np.empty((2, 0), np.int32), *self._changes], 1)
        self._changes = []
        _, lasts = np.unique(found[0, ::-1], return_index=True)
        return found[:, found.shape[1] - 1 - lasts]
