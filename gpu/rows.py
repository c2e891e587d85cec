"""Looks up a step's rows and tokens in tables that stay on the device, by torch's operators. Thread: engine.

kernels/rows.py has Triton's kernels, whose results have fixed addresses, so that a graph may hold them.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.kv_cache import LayerKV, zeros

NO_SLOT = -1  # of padding
MOST_STATES = 256  # of a slot's newest tokens


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's integers, sent by the host. Padding has no slot: it sees and samples nothing, and belongs to no row.

    Args:
        slots: [rows]
        ends: [rows], one past the last new token's position; 0: padding.
        offsets: [rows + 1]: where a row's tokens begin.
        asked: tokens whose hidden states are wanted: of rows that sample, then of prompts' targets; of padding any.
        sampled: [2, rows]: slots and positions of the tokens that are sampled.
        tokens: [3, tokens]: slot, position, and id, or < 0 for the token that the slot sampled last.
    """

    slots: Tensor
    ends: Tensor
    offsets: Tensor
    asked: Tensor
    sampled: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step's tokens read and where they write.

    Args:
        kv_slots: block * 16 + offset, where each token's keys and values go.
        window_slots: the same in window blocks; None: there are none.
    """

    token_ids: Tensor  # int64 [tokens]
    positions: Tensor  # float32 [tokens], for RoPE
    kv_slots: Tensor  # int64 [tokens]
    window_slots: Tensor | None = None  # int64 [tokens]

    def with_own_slots(self) -> "StepTokens":
        """The same, with copies of where keys and values go."""
        behind = None if self.window_slots is None else self.window_slots.clone()
        return replace(self, kv_slots=self.kv_slots.clone(), window_slots=behind)

    def slots_in(self, kv: LayerKV) -> Tensor:
        """Where they go in a layer's cache."""
        assert not kv.has_windows or self.window_slots is not None, "a layer has window blocks"
        return self.window_slots if kv.has_windows and self.window_slots is not None else self.kv_slots


@dataclass(frozen=True, slots=True)
class DeviceTables:
    """What stays on the device between steps.

    Args:
        blocks: [slots, blocks of a sequence], contiguous; with window blocks, these behind the others: twice as wide.
        last_tokens: int64 [slots]: what each slot sampled last.
        scratch: the block that pads tables and is never written; the next one is padding's: its keys and values go
            there, and are never read.
        scratch_window: the same of window blocks; None: there are none.
    """

    blocks: Tensor
    last_tokens: Tensor
    scratch: int
    scratch_window: int | None = None

    @property
    def width(self) -> int:
        """Blocks of a sequence."""
        return self.blocks.shape[1] // len(self.kinds)

    @property
    def of_kinds(self) -> list[Tensor]:
        """[slots, width] each."""
        return [self.blocks[:, first : first + self.width] for first in range(0, self.blocks.shape[1], self.width)]

    @property
    def kinds(self) -> list[int]:
        """The scratch blocks, of each kind."""
        return [self.scratch] if self.scratch_window is None else [self.scratch, self.scratch_window]


class LastStates:
    """Last hidden states of each slot's newest tokens, before the last norm, on a CPU: what gpu/mtp.py reads."""

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype) -> None:
        self._states = zeros((num_slots * MOST_STATES, width), dtype, torch.device("cpu"))
        self._positions = np.full((num_slots, MOST_STATES), NO_SLOT, np.int64)  # whose state is there

    def clear(self, slot: int) -> None:
        """Another sequence begins."""
        self._positions[slot] = NO_SLOT

    def put(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], states: Tensor) -> None:
        """slots, positions: [some], each pair once. states: [some, hidden]."""
        places = positions % MOST_STATES
        self._states.index_copy_(0, torch.from_numpy(slots * MOST_STATES + places), states)
        self._positions[slots, places] = positions

    def oldest(self, slot: int, end: int) -> int:
        """The first position from which on all states up to that before `end` are there; `end`: none are."""
        wanted = np.arange(max(0, end - MOST_STATES), end)
        missing = wanted[self._positions[slot, wanted % MOST_STATES] != wanted]
        return int(missing[-1]) + 1 if len(missing) else max(0, end - MOST_STATES)

    def of(self, slot: int, start: int, end: int) -> Tensor:
        """[end - start, hidden], all of which are there."""
        return self._states[slot * MOST_STATES + torch.arange(start, end) % MOST_STATES]


class RowOperators:
    """Torch's, which support no padding.

    Args:
        num_rows, num_tokens: of a step, at most.
    """

    def __init__(self, tables: DeviceTables, num_rows: int, num_tokens: int) -> None:
        self._tables = tables

    def tokens_of(self, inputs: StepInputs) -> StepTokens:
        """Look up the step's tokens."""
        tables = self._tables
        slots, positions, token_ids = inputs.tokens.long().unbind()  # [tokens] each
        token_ids = torch.where(token_ids < 0, tables.last_tokens.index_select(0, slots), token_ids)
        places = slots * tables.blocks.shape[1] + positions // BLOCK_SIZE
        offsets, blocks = positions % BLOCK_SIZE, tables.blocks.view(-1)
        kv_slots = blocks.index_select(0, places) * BLOCK_SIZE + offsets
        window_slots = None
        if tables.scratch_window is not None:
            window_slots = blocks.index_select(0, places + tables.width) * BLOCK_SIZE + offsets
        return StepTokens(token_ids, positions.float(), kv_slots, window_slots)

    def tables_of(self, inputs: StepInputs, num_blocks: int) -> list[Tensor]:
        """The rows' block tables, [rows, num_blocks], and those of window blocks, if there are any."""
        return [table[:, :num_blocks].index_select(0, inputs.slots) for table in self._tables.of_kinds]

    def change_tables(self, places: Tensor, blocks: Tensor) -> None:
        """Write blocks to the tables. places: indexes into all tables, end to end."""
        self._tables.blocks.view(-1).index_copy_(0, places.long(), blocks.to(self._tables.blocks.dtype))

    def clear_blocks(self, cache: Tensor, blocks: Tensor) -> None:
        """Zero whole blocks in all layers: an earlier owner's NaN must not reach the next.

        Args:
            cache: [layers, 2, blocks, 16, kv_heads, head_dim], contiguous.
            blocks: [cleared], at least one.
        """
        if cache.device.type != "cpu":
            cache.index_fill_(2, blocks.long(), 0)
            return
        for block in blocks.tolist():  # contiguous memory in each layer: index_fill_ takes three to seven times as long
            cache[:, :, block].zero_()
