"""A plan's columns to the tensors of one step: all indexes and masks, computed once, on the host. Thread: engine.

Tokens are put in an order of their own: first those that a sequence has drawn itself, longest context first, each
attending alone; then prompts, row by row, in tiles. A token's products have the same shapes whoever shares the step and
however its prompt was cut into chunks, so that it is rounded the same way.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import PENDING, StepPlan
from gpu.attention import Attending, AttentionKernels, RaggedRows
from gpu.attention_groups import GroupBuilder, IntArray, TokenRanges
from gpu.block_tables import BlockTables
from gpu.device import to_device
from gpu.kv_cache import num_blocks_for
from gpu.prompt_logprobs import scored_tokens


@dataclass(slots=True)
class PendingTokens:
    """Tokens of a batch that its plan leaves to the device."""

    tokens: Tensor  # [pending]: index into the batch's tokens
    slots: Tensor  # [pending]: whose last drawn token it is


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Rows of a step that draw, in the order of their logits."""

    rows: IntArray  # [sampled]: the plan's row
    slots: IntArray  # [sampled]
    positions: IntArray  # [sampled]: of the token that is drawn


@dataclass(slots=True)
class DeviceBatch:
    """One step's inputs. Tokens and rows are in the batch's order."""

    token_ids: Tensor  # [tokens]; PENDING until it was filled in
    pending: PendingTokens | None
    positions: Tensor  # [tokens], float32: what RoPE multiplies
    kv_slots: Tensor  # [tokens]: block * 16 + offset, where each token's keys and values go
    attending: dict[int | None, Attending]  # by the window of a layer
    # [sampled + scored]: whose logits are wanted: each sampling row's last, then those of targets; None: all, in order
    asked_tokens: Tensor | None
    sampled_rows: IntArray  # [sampled]: the plan's row
    sampled_slots: IntArray  # [sampled]
    sampled_positions: IntArray  # [sampled]: position of the token that is drawn
    cleared_blocks: Tensor | None  # [cleared]: get their first token, and not their last
    copy_sources: Tensor | None  # [copies]
    copy_targets: Tensor | None  # [copies]

    @property
    def sampled(self) -> SampledRows:
        return SampledRows(self.sampled_rows, self.sampled_slots, self.sampled_positions)


class BatchBuilder:
    """Builds batches, and keeps block tables between them.

    Args:
        scratch_block: pads tables.
        dtype: of the masks: the model's.
        windows: of the model's layers: how many tokens one sees, itself counted in; None: all before it.
        kernels: get the step's rows; None: torch gets groups.
    """

    def __init__(
        self,
        max_sequences: int,
        max_model_len: int,
        scratch_block: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int | None, ...] = (None,),
        kernels: AttentionKernels | None = None,
    ) -> None:
        self._kernels = kernels
        self._windows = windows
        self._max_model_len = max_model_len
        self._device = device
        self.tables = BlockTables(max_sequences, max_model_len, scratch_block)
        self._tables = self.tables.blocks  # [slots, blocks of a sequence]
        self._num_prompt_tokens = self.tables.num_prompt_tokens  # [slots]
        self._groups = GroupBuilder(self._tables, scratch_block, dtype, device)

    def blocks_of(self, slot: int) -> Tensor:
        """The blocks in a slot's table, in order."""
        return self._to_device(self.tables.of(slot))

    def build(self, plan: StepPlan) -> DeviceBatch:
        """Reset the slots that start, let tables grow, and lay out the step."""
        self.tables.grow(plan)
        ends = plan.starts + plan.lengths  # [rows]: context after this step
        row_of = np.repeat(np.arange(plan.num_rows), plan.lengths)  # [tokens]
        tokens_before = np.cumsum(plan.lengths) - plan.lengths  # [rows]
        positions = plan.starts[row_of] + np.arange(plan.num_tokens) - tokens_before[row_of]  # [tokens]
        order, num_own = self._token_order(plan, row_of, positions)
        slots, positions = plan.slots[row_of][order], positions[order]  # in the batch's order from here on
        num_others = np.bincount(row_of[order[num_own:]], minlength=plan.num_rows)  # [rows]
        extended = np.flatnonzero(num_others)
        others = (plan.slots[extended], plan.starts[extended], (plan.starts + num_others)[extended])
        place = np.empty_like(order)
        place[order] = np.arange(plan.num_tokens)
        token_ids = plan.token_ids[order]
        blocks = self._tables[slots, positions // BLOCK_SIZE]  # [tokens]
        sampled = np.flatnonzero(plan.samples)
        last_tokens = tokens_before + plan.lengths - 1  # [rows]
        has_copies = len(plan.copy_sources) > 0
        return DeviceBatch(
            token_ids=self._to_device(token_ids),
            pending=self._pending(token_ids, slots),
            positions=self._to_device(positions.astype(np.float32)),
            kv_slots=self._to_device(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            attending=self._attending((slots[:num_own], positions[:num_own] + 1), others, int(ends.max(initial=0))),
            asked_tokens=self._to_device(
                place[np.concatenate([last_tokens[sampled], scored_tokens(plan, tokens_before)])]
            ),
            sampled_rows=sampled,
            sampled_slots=plan.slots[sampled],
            sampled_positions=ends[sampled],
            cleared_blocks=self._cleared_blocks(plan),
            copy_sources=self._to_device(plan.copy_sources.astype(np.int64)) if has_copies else None,
            copy_targets=self._to_device(plan.copy_targets.astype(np.int64)) if has_copies else None,
        )

    def _pending(self, token_ids: IntArray, slots: IntArray) -> PendingTokens | None:
        tokens = np.flatnonzero(token_ids == PENDING)
        if not len(tokens):
            return None
        return PendingTokens(self._to_device(tokens), self._to_device(slots[tokens].astype(np.int64)))

    def _token_order(self, plan: StepPlan, row_of: IntArray, positions: IntArray) -> tuple[IntArray, int]:
        """Own tokens first, longest context first, then prompts as they come: (order, number of own tokens).

        Where the kernels want own tokens of a row together, they count as a prompt's.
        """
        is_own = positions >= self._num_prompt_tokens[plan.slots[row_of]]
        if self._kernels is not None and not self._kernels.are_own_tokens_alone:
            is_own &= plan.lengths[row_of] == 1
        own = np.flatnonzero(is_own)
        own = own[np.argsort(-positions[own], kind="stable")]
        return np.concatenate([own, np.flatnonzero(~is_own)]), len(own)

    def _attending(
        self, own: tuple[IntArray, IntArray], others: TokenRanges, longest: int
    ) -> dict[int | None, Attending]:
        """Window -> who attends together.

        Args:
            own: slots of own tokens, and the lengths of their contexts.
            longest: context of the step.
        """
        if self._kernels is None:
            return self._groups.build(own, others, self._windows, longest)
        rows = self._rows(own, others, self._kernels.index_dtype)
        return rows_by_window(rows, self._windows, self._max_model_len)

    def _rows(self, own: tuple[IntArray, IntArray], others: TokenRanges, dtype: torch.dtype) -> RaggedRows:
        """See _attending."""
        slots, starts, ends = others
        all_slots, all_ends = np.concatenate([own[0], slots]), np.concatenate([own[1], ends])
        lengths = np.concatenate([[0], np.ones_like(own[1]), ends - starts])
        width = num_blocks_for(int(all_ends.max(initial=0)))
        return RaggedRows(
            tables=self._to_device(self._tables[all_slots, :width]).to(dtype),
            ends=self._to_device(all_ends).to(dtype),
            offsets=self._to_device(np.cumsum(lengths)).to(dtype),
            num_decodes=len(own[0]),
            window=None,
        )

    def _cleared_blocks(self, plan: StepPlan) -> Tensor | None:
        blocks = fresh_blocks(plan, self.tables)
        return self._to_device(blocks) if len(blocks) else None

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def fresh_blocks(plan: StepPlan, tables: BlockTables) -> IntArray:
    """Blocks whose first token is written now but whose last is not: the rest still has another's content."""
    ends = plan.starts + plan.lengths
    last_block = (ends - 1) // BLOCK_SIZE
    is_fresh = (last_block * BLOCK_SIZE >= plan.starts) & (ends % BLOCK_SIZE != 0)
    found: IntArray = tables.blocks[plan.slots[is_fresh], last_block[is_fresh]]
    return found


def rows_by_window(
    rows: RaggedRows, windows: tuple[int | None, ...], max_model_len: int
) -> dict[int | None, Attending]:
    """By the window of a layer: those that hide nothing share their rows."""
    hiding = {window: window if window and window < max_model_len else None for window in windows}
    found: dict[int | None, Attending] = {window: replace(rows, window=window) for window in set(hiding.values())}
    return {window: found[hidden] for window, hidden in hiding.items()}
