"""A plan's columns to the tensors of one step: all indexes and masks, computed once, on the host. Thread: engine.

Keeps the block table of every slot. Tokens are put in an order of their own: first those that a sequence has drawn
itself, longest context first, each attending alone; then prompts, row by row, in tiles. A token's products have the
same shapes whoever shares the step and however its prompt was cut into chunks, so that it is rounded the same way.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from core.plan import PENDING, StepPlan
from gpu.attention import TILE_TOKENS, AttentionGroup, DecodeGroup, DecodeRows, PromptGroup, PromptRow, PromptTile
from gpu.kv_cache import num_blocks_for

IntArray = npt.NDArray[np.signedinteger[Any]]
# Own tokens attend over their context padded to one of a few lengths: the least, its doubles, then multiples of the
# last (as many keys as torch's attention takes at a time).
LEAST_CONTEXT = 64
CONTEXT_STEP = 512
# Own tokens that attend together gather at most so many tokens of keys and values, unless one alone has more: what
# memory a step takes then does not grow with the rows. Some 6 ms of work, against 50 µs for one more group.
MAX_GATHERED_TOKENS = 65_536


@dataclass(slots=True)
class PendingTokens:
    """Tokens of a batch that its plan leaves to the device."""

    tokens: Tensor  # [pending]: index into the batch's tokens
    slots: Tensor  # [pending]: whose last drawn token it is


@dataclass(slots=True)
class DeviceBatch:
    """One step's inputs. Tokens and rows are in the batch's order."""

    token_ids: Tensor  # [tokens]; PENDING until it was filled in
    pending: PendingTokens | None
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
        has_kernels: own tokens are one group, as DecodeRows, and prompts are PromptRows, without tiles.
    """

    def __init__(
        self,
        max_sequences: int,
        max_model_len: int,
        scratch_block: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: tuple[int | None, ...] = (None,),
        has_kernels: bool = False,
    ) -> None:
        self._has_kernels = has_kernels
        self._windows = windows
        self._scratch_block = scratch_block
        self._dtype = dtype
        self._device = device
        shape = (max_sequences, num_blocks_for(max_model_len))
        self._tables = np.full(shape, scratch_block, dtype=np.int64)  # [slots, blocks of a sequence]
        self._num_prompt_tokens = np.zeros(max_sequences, dtype=np.int64)  # [slots]

    def blocks_of(self, slot: int) -> Tensor:
        """The blocks in a slot's table, in order."""
        table = self._tables[slot]
        return self._to_device(table[table != self._scratch_block])

    def build(self, plan: StepPlan) -> DeviceBatch:
        """Reset the slots that start, let tables grow, and lay out the step."""
        for start in plan.sequence_starts:
            self._tables[start.slot] = self._scratch_block
            self._num_prompt_tokens[start.slot] = start.num_prompt_tokens
        self._tables[plan.table_slots, plan.table_positions] = plan.table_blocks
        ends = plan.starts + plan.lengths  # [rows]: context after this step
        row_of = np.repeat(np.arange(plan.num_rows), plan.lengths)  # [tokens]
        tokens_before = np.cumsum(plan.lengths) - plan.lengths  # [rows]
        positions = plan.starts[row_of] + np.arange(plan.num_tokens) - tokens_before[row_of]  # [tokens]
        order, num_own = self._token_order(plan.slots[row_of], positions)
        slots, positions = plan.slots[row_of][order], positions[order]  # in the batch's order from here on
        place = np.empty_like(order)
        place[order] = np.arange(plan.num_tokens)
        token_ids = plan.token_ids[order]
        blocks = self._tables[slots, positions // BLOCK_SIZE]  # [tokens]
        sampled = np.flatnonzero(plan.samples)
        has_copies = len(plan.copy_sources) > 0
        return DeviceBatch(
            token_ids=self._to_device(token_ids),
            pending=self._pending(token_ids, slots),
            positions=self._to_device(positions.astype(np.float32)),
            kv_slots=self._to_device(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            groups=self._groups(plan, slots[:num_own], positions[:num_own] + 1),
            sampled_tokens=self._to_device(place[(tokens_before + plan.lengths - 1)[sampled]]),
            sampled_rows=sampled,
            sampled_slots=plan.slots[sampled],
            sampled_positions=ends[sampled],
            cleared_blocks=self._cleared_blocks(plan.slots, plan.starts, ends),
            copy_sources=self._to_device(plan.copy_sources.astype(np.int64)) if has_copies else None,
            copy_targets=self._to_device(plan.copy_targets.astype(np.int64)) if has_copies else None,
        )

    def _pending(self, token_ids: IntArray, slots: IntArray) -> PendingTokens | None:
        tokens = np.flatnonzero(token_ids == PENDING)
        if not len(tokens):
            return None
        return PendingTokens(self._to_device(tokens), self._to_device(slots[tokens].astype(np.int64)))

    def _token_order(self, slots: IntArray, positions: IntArray) -> tuple[IntArray, int]:
        """Own tokens first, longest context first, then prompts as they come: (order, number of own tokens)."""
        is_own = positions >= self._num_prompt_tokens[slots]
        own = np.flatnonzero(is_own)
        own = own[np.argsort(-positions[own], kind="stable")]
        return np.concatenate([own, np.flatnonzero(~is_own)]), len(own)

    def _groups(self, plan: StepPlan, slots: IntArray, ends: IntArray) -> dict[int | None, list[AttentionGroup]]:
        """Window -> who attends together; a window that no row has filled yet hides nothing.

        Args:
            slots, ends: of own tokens: whose, and the length of its context.
        """
        longest = int((plan.starts + plan.lengths).max(initial=0))
        found: dict[int | None, list[AttentionGroup]] = {}
        for window in self._windows:
            hiding = window if window is not None and longest > window else None
            if hiding not in found:
                found[hiding] = [
                    *self._decode_groups(slots, ends, hiding),
                    *self._prompt_groups(plan, len(slots), hiding),
                ]
            found[window] = found[hiding]
        return found

    def _decode_groups(self, slots: IntArray, ends: IntArray, window: int | None) -> list[DecodeGroup]:
        """Own tokens, longest first, in groups of one padded length each, cut where they would gather too much."""
        if not len(slots):
            return []
        seen = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)  # the first position seen
        if self._has_kernels:
            return [self._kernel_group(slots, seen, ends)]
        contexts = padded_contexts(ends if window is None else np.minimum(ends, window + BLOCK_SIZE))
        groups: list[DecodeGroup] = []
        first = 0
        for token in range(1, len(slots) + 1):
            is_one_more = token < len(slots) and contexts[token] == contexts[first]
            if is_one_more and (token + 1 - first) * contexts[first] <= MAX_GATHERED_TOKENS:
                continue
            own = slice(first, token)
            groups.append(self._decode_group(first, slots[own], seen[own], ends[own], int(contexts[first])))
            first = token
        return groups

    def _kernel_group(self, slots: IntArray, seen: IntArray, ends: IntArray) -> DecodeGroup:
        tables = self._to_device(self._tables[slots, : num_blocks_for(int(ends[0]))])
        rows = DecodeRows(tables, self._to_device(seen.astype(np.int64)), self._to_device(ends.astype(np.int64)))
        return DecodeGroup(0, len(slots), tables, None, rows)

    def _decode_group(
        self, first: int, slots: IntArray, seen: IntArray, ends: IntArray, num_context: int
    ) -> DecodeGroup:
        """Each context begins with the block of the first position that is seen, and is num_context tokens long."""
        first_blocks = seen // BLOCK_SIZE
        blocks = np.stack([self._context(*row, num_context) for row in zip(slots, first_blocks, ends, strict=True)])
        positions = np.arange(num_context) + (first_blocks * BLOCK_SIZE)[:, None]  # [tokens, context]
        hidden = (positions < seen[:, None]) | (positions >= ends[:, None])
        mask = None
        if hidden.any():
            mask = self._to_device(np.where(hidden, np.float32("-inf"), np.float32(0))).to(self._dtype)[:, None, None]
        return DecodeGroup(first, first + len(slots), self._to_device(blocks), mask)

    def _context(self, slot: int, first_block: int, end: int, num_context: int) -> IntArray:
        """A slot's blocks from the first on, up to position `end`, padded: [num_context / 16]."""
        blocks = np.full(num_context // BLOCK_SIZE, self._scratch_block, dtype=np.int64)
        used = self._tables[slot, first_block : num_blocks_for(end)]
        blocks[: len(used)] = used
        return blocks

    def _prompt_groups(self, plan: StepPlan, first_token: int, window: int | None) -> list[PromptGroup]:
        """Rows that compute tokens of their prompts, each its own group; first_token: that of the first."""
        groups = []
        ends = np.minimum(plan.starts + plan.lengths, self._num_prompt_tokens[plan.slots])
        for row in np.flatnonzero(plan.starts < ends):
            groups.append(
                self._prompt_group(first_token, int(plan.slots[row]), int(plan.starts[row]), int(ends[row]), window)
            )
            first_token = groups[-1].end_token
        return groups

    def _prompt_group(self, first_token: int, slot: int, start: int, end: int, window: int | None) -> PromptGroup:
        if self._has_kernels:
            table = self._to_device(self._tables[slot, : num_blocks_for(end)])
            return PromptGroup(first_token, first_token + end - start, table, [], PromptRow(table, start, window))
        first_block = _first_seen_block(start // TILE_TOKENS * TILE_TOKENS, window)
        skipped = first_block * BLOCK_SIZE
        tile_starts = range(start // TILE_TOKENS * TILE_TOKENS, end, TILE_TOKENS)
        tiles = [self._tile(max(start, tile), min(end, tile + TILE_TOKENS), skipped, window) for tile in tile_starts]
        blocks = self._context(slot, first_block, end, tile_starts[-1] + TILE_TOKENS - skipped)
        return PromptGroup(first_token, first_token + end - start, self._to_device(blocks), tiles)

    def _tile(self, start: int, end: int, skipped: int, window: int | None) -> PromptTile:
        """Positions start to end, of one tile; context position 0 is position `skipped`."""
        tile_start = start // TILE_TOKENS * TILE_TOKENS
        first = _first_seen_block(tile_start, window) * BLOCK_SIZE
        num_context = tile_start + TILE_TOKENS - first
        mask = self._masked(num_context).triu_(tile_start - first + 1)  # token i sees up to tile_start + i
        if window is not None and num_context > window:  # and from tile_start + i + 1 - window on
            mask += self._masked(num_context).tril_(tile_start - first - window)
        return PromptTile(start - tile_start, end - start, first - skipped, num_context, mask)

    def _masked(self, num_context: int) -> Tensor:
        return torch.full((TILE_TOKENS, num_context), float("-inf"), dtype=self._dtype, device=self._device)

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


def padded_contexts(num_tokens: IntArray) -> IntArray:
    """What contexts of so many tokens are padded to: of each length alone, whatever its neighbours."""
    doubles = LEAST_CONTEXT << np.arange((CONTEXT_STEP // LEAST_CONTEXT).bit_length())  # 64 to 512
    steps = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
    short = doubles[np.minimum(np.searchsorted(doubles, num_tokens), len(doubles) - 1)]
    return np.where(num_tokens <= CONTEXT_STEP, short, steps)


def _first_seen_block(position: int, window: int | None) -> int:
    """The block in which what a position sees begins."""
    return 0 if window is None else max(0, position + 1 - window) // BLOCK_SIZE
