"""A plan's columns to the tensors of one step: all indexes and masks, computed once, on the host. Thread: engine.

Keeps the block table of every slot. Rows are put in an order of their own: decodes first, longest first, so that
rows which attend together are a range; `sampled_rows` leads back to the plan's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import StepPlan
from gpu.attention import AttentionGroup, DecodeRows, PrefillRow
from gpu.kv_cache import num_blocks_for

IntArray = npt.NDArray[np.signedinteger[Any]]
# A group of decodes costs about as much to start as this many padded tokens (about 50 µs against 0.1 µs a token,
# measured on one Zen core with 2 KV heads of 64).
GROUP_COST_TOKENS = 512
# Rows that decode together gather at most so many tokens of keys and values, unless one row alone has more: what memory
# a step takes then does not grow with the rows. Some 6 ms of work, against 50 µs for one more group.
MAX_GATHERED_TOKENS = 65_536


@dataclass(slots=True)
class DeviceBatch:
    """One step's inputs. Tokens and rows are in the batch's order."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], float32: what RoPE multiplies
    kv_slots: Tensor  # [tokens]: block * 16 + offset, where each token's keys and values go
    groups: dict[int | None, list[AttentionGroup]]  # by the window of a layer
    sampled_tokens: Tensor  # [sampled]: index of each sampling row's last token
    sampled_rows: IntArray  # [sampled]: the plan's row
    sampled_slots: IntArray  # [sampled]
    sampled_positions: IntArray  # [sampled]: position of the token that is drawn
    cleared_blocks: Tensor | None  # [cleared]: get their first token, and not their last
    copy_sources: Tensor | None  # [copies]
    copy_targets: Tensor | None  # [copies]


class BatchBuilder:
    """Builds batches, and keeps block tables between them.

    Args:
        scratch_block: pads tables.
        dtype: of the masks: the model's.
        windows: of the model's layers: how many tokens one sees, itself counted in; None: all before it.
        has_decode_kernel: decodes are one group, as DecodeRows.
        has_prefill_kernel: rows of several new tokens are PrefillRows.
    """

    def __init__(
        self,
        max_sequences: int,
        max_model_len: int,
        scratch_block: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int | None, ...] = (None,),
        has_decode_kernel: bool = False,
        has_prefill_kernel: bool = False,
    ) -> None:
        self._has_decode_kernel = has_decode_kernel
        self._has_prefill_kernel = has_prefill_kernel
        self._windows = windows
        self._scratch_block = scratch_block
        self._dtype = dtype
        self._device = device
        shape = (max_sequences, num_blocks_for(max_model_len))
        self._tables = np.full(shape, scratch_block, dtype=np.int64)  # [slots, blocks of a sequence]

    def blocks_of(self, slot: int) -> Tensor:
        """The blocks in a slot's table, in order."""
        table = self._tables[slot]
        return self._to_device(table[table != self._scratch_block])

    def build(self, plan: StepPlan) -> DeviceBatch:
        """Reset the slots that start, let tables grow, and lay out the step."""
        for start in plan.sequence_starts:
            self._tables[start.slot] = self._scratch_block
        self._tables[plan.table_slots, plan.table_positions] = plan.table_blocks
        ends = plan.starts + plan.lengths  # [rows]: context after this step
        order, num_decodes = _row_order(plan.lengths, ends)
        slots, starts, lengths, ends = plan.slots[order], plan.starts[order], plan.lengths[order], ends[order]
        tokens_before = np.cumsum(lengths) - lengths  # [rows]
        row_of = np.repeat(np.arange(len(order)), lengths)  # [tokens]
        offsets = np.arange(plan.num_tokens) - tokens_before[row_of]  # [tokens]: within the row
        positions = starts[row_of] + offsets  # [tokens]
        tokens_before_in_plan = (np.cumsum(plan.lengths) - plan.lengths)[order]
        blocks = self._tables[slots[row_of], positions // BLOCK_SIZE]  # [tokens]
        sampled = np.flatnonzero(plan.samples[order])
        has_copies = len(plan.copy_sources) > 0
        return DeviceBatch(
            token_ids=self._to_device(plan.token_ids[tokens_before_in_plan[row_of] + offsets]),
            positions=self._to_device(positions.astype(np.float32)),
            kv_slots=self._to_device(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            groups=self._groups(slots, starts, ends, num_decodes),
            sampled_tokens=self._to_device((tokens_before + lengths - 1)[sampled]),
            sampled_rows=order[sampled],
            sampled_slots=slots[sampled],
            sampled_positions=ends[sampled],
            cleared_blocks=self._cleared_blocks(slots, starts, ends),
            copy_sources=self._to_device(plan.copy_sources.astype(np.int64)) if has_copies else None,
            copy_targets=self._to_device(plan.copy_targets.astype(np.int64)) if has_copies else None,
        )

    def _groups(
        self, slots: IntArray, starts: IntArray, ends: IntArray, num_decodes: int
    ) -> dict[int | None, list[AttentionGroup]]:
        """Window -> who attends together; a window that no row has filled yet hides nothing."""
        found: dict[int | None, list[AttentionGroup]] = {}
        for window in self._windows:
            hiding = window if window is not None and ends.max(initial=0) > window else None
            if hiding not in found:
                found[hiding] = self._decode_groups(slots, ends, num_decodes, hiding) + self._prefill_groups(
                    slots, starts, ends, num_decodes, hiding
                )
            found[window] = found[hiding]
        return found

    def _decode_groups(
        self, slots: IntArray, ends: IntArray, num_decodes: int, window: int | None
    ) -> list[AttentionGroup]:
        """Rows [0, num_decodes), longest first, cut where padding would cost more than another group, or memory."""
        if self._has_decode_kernel:
            return [self._kernel_group(slots[:num_decodes], ends[:num_decodes], window)] if num_decodes else []
        groups: list[AttentionGroup] = []
        lengths = ends if window is None else np.minimum(ends, window)
        first = padding = 0
        for row in range(1, num_decodes + 1):
            if row < num_decodes:
                padding += int(lengths[first] - lengths[row])
                num_blocks = num_blocks_for(int(lengths[first])) + (window is not None)  # a window may begin in a block
                gathered = (row + 1 - first) * num_blocks * BLOCK_SIZE
                if padding <= GROUP_COST_TOKENS and gathered <= MAX_GATHERED_TOKENS:
                    continue
            groups.append(self._decode_group(first, row, slots[first:row], ends[first:row], window))
            first, padding = row, 0
        return groups

    def _kernel_group(self, slots: IntArray, ends: IntArray, window: int | None) -> AttentionGroup:
        longest = int(ends[0])
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        tables = self._to_device(self._tables[slots, : num_blocks_for(longest)])
        bounds = (self._to_device(bound.astype(np.int64)) for bound in (firsts, ends))
        rows = DecodeRows(tables, *bounds)
        return AttentionGroup(0, len(slots), len(slots), longest, tables, None, rows=rows)

    def _decode_group(
        self, first: int, end: int, slots: IntArray, ends: IntArray, window: int | None
    ) -> AttentionGroup:
        if window is not None:
            return self._windowed_decode_group(first, end, slots, ends, window)
        longest = int(ends[0])
        mask = None
        if ends[-1] != longest:
            mask = self._decode_mask(np.arange(longest) >= ends[:, None])
        blocks = self._to_device(self._tables[slots, : num_blocks_for(longest)].reshape(-1))
        return AttentionGroup(first, end, end - first, longest, blocks, mask)

    def _windowed_decode_group(
        self, first: int, end: int, slots: IntArray, ends: IntArray, window: int
    ) -> AttentionGroup:
        """Each row begins with the block in which its window does."""
        seen = np.maximum(ends - window, 0)  # [rows]: the first position that is seen
        first_blocks = seen // BLOCK_SIZE
        skipped = (first_blocks * BLOCK_SIZE)[:, None]
        longest = int((ends - skipped[:, 0]).max())
        positions = np.arange(longest) + skipped  # [rows, context]
        mask = self._decode_mask((positions < seen[:, None]) | (positions >= ends[:, None]))
        indexes = np.arange(num_blocks_for(longest)) + first_blocks[:, None]  # [rows, blocks]
        last = num_blocks_for(int(ends.max())) - 1
        blocks = self._tables[slots[:, None], np.minimum(indexes, last)]
        return AttentionGroup(first, end, end - first, longest, self._to_device(blocks.reshape(-1)), mask)

    def _decode_mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        """hidden: [rows, context]; returns [rows, 1, 1, context]."""
        mask = self._to_device(np.where(hidden, np.float32("-inf"), np.float32(0)))
        return mask.to(self._dtype).view(hidden.shape[0], 1, 1, hidden.shape[1])

    def _prefill_groups(
        self, slots: IntArray, starts: IntArray, ends: IntArray, num_decodes: int, window: int | None
    ) -> list[AttentionGroup]:
        """Rows from num_decodes on, each its own group; their tokens follow the decodes', one each."""
        groups, first_token = [], num_decodes
        for row in range(num_decodes, len(slots)):
            groups.append(self._prefill_group(first_token, int(slots[row]), int(starts[row]), int(ends[row]), window))
            first_token = groups[-1].end_token
        return groups

    def _prefill_group(self, first_token: int, slot: int, start: int, end: int, window: int | None) -> AttentionGroup:
        if self._has_prefill_kernel:
            table = self._to_device(self._tables[slot, : num_blocks_for(end)])
            row = PrefillRow(table, start, window)
            return AttentionGroup(first_token, first_token + end - start, 1, end, table, None, rows=row)
        is_hiding = window is not None and end > window
        first_block = max(0, start + 1 - window) // BLOCK_SIZE if window is not None and is_hiding else 0
        blocks = self._to_device(self._tables[slot, first_block : num_blocks_for(end)])
        num_tokens, num_skipped = end - start, first_block * BLOCK_SIZE
        is_causal = start == 0 and not is_hiding
        mask = None
        if not is_causal:
            mask = self._masked(num_tokens, end - num_skipped)
            mask.triu_(start - num_skipped + 1)  # token i of the chunk sees positions up to start + i
            if window is not None and is_hiding:  # and from start + i + 1 - window
                mask += self._masked(num_tokens, end - num_skipped).tril_(start - num_skipped - window)
        return AttentionGroup(
            first_token, first_token + num_tokens, 1, end - num_skipped, blocks, mask, is_causal=is_causal
        )

    def _masked(self, num_tokens: int, num_context: int) -> Tensor:
        return torch.full((num_tokens, num_context), float("-inf"), dtype=self._dtype, device=self._device)

    def _cleared_blocks(self, slots: IntArray, starts: IntArray, ends: IntArray) -> Tensor | None:
        """Blocks whose first token is written now but whose last is not: the rest still has another's content."""
        last_block = (ends - 1) // BLOCK_SIZE
        fresh = (last_block * BLOCK_SIZE >= starts) & (ends % BLOCK_SIZE != 0)
        if not fresh.any():
            return None
        return self._to_device(self._tables[slots[fresh], last_block[fresh]])

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        """On a CPU no copy is made, of a range of the tables neither: they change only after the step is computed."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _row_order(lengths: IntArray, ends: IntArray) -> tuple[IntArray, int]:
    """Decodes (one new token) first, longest first, then the rest as it came: (order, number of decodes)."""
    decodes = np.flatnonzero(lengths == 1)
    decodes = decodes[np.argsort(-ends[decodes], kind="stable")]
    return np.concatenate([decodes, np.flatnonzero(lengths != 1)]), len(decodes)
