"""Who attends together where torch does: padded contexts, tiles of prompts, and their masks. Thread: engine.

A token's matmuls have the same shapes whoever shares the step and however its prompt was cut into chunks, so that it
is rounded the same way. Kernels need none of it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.config import BLOCK_SIZE
from gpu.attention import TILE_TOKENS, Attending, AttentionGroup, DecodeGroup, PromptGroup, PromptTile
from gpu.device import to_device
from gpu.kv_cache import num_blocks_for

IntArray = npt.NDArray[np.signedinteger[Any]]
TokenRanges = tuple[IntArray, IntArray, IntArray]
"""Slots, and the positions from which to which they compute tokens"""
# Own tokens attend over their context padded to one of a few lengths: the least, its doubles, then multiples of the
# last (as many keys as torch's attention takes at a time).
LEAST_CONTEXT = 64
CONTEXT_STEP = 512
# Own tokens that attend together gather at most so many tokens of keys and values, unless one alone has more: what
# memory a step takes then does not grow with the rows. Some 6 ms of work, against 50 µs for one more group.
MAX_GATHERED_TOKENS = 65_536


class GroupBuilder:
    """
    Args:
        tables: [slots, blocks of a sequence]: those of the BatchBuilder, as they change.
        scratch_block: pads them.
        dtype: of the masks: the model's.
    """

    def __init__(
        self, tables: npt.NDArray[np.int64], scratch_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tables = tables
        self._scratch_block = scratch_block
        self._dtype = dtype
        self._device = device

    def build(
        self,
        own: tuple[IntArray, IntArray],
        prompts: TokenRanges,
        windows: tuple[int | None, ...],
        longest: int,
    ) -> dict[int | None, Attending]:
        """Window -> groups, own tokens first; a window that no row has filled yet hides nothing.

        Args:
            own: slots, and the lengths of their contexts, longest first.
            longest: context of the step.
        """
        found: dict[int | None, Attending] = {}
        for window in windows:
            hiding = window if window is not None and longest > window else None
            if hiding not in found:
                groups: list[AttentionGroup] = [*self._decode_groups(*own, hiding)]
                found[hiding] = [*groups, *self._prompt_groups(len(own[0]), prompts, hiding)]
            found[window] = found[hiding]
        return found

    def _decode_groups(self, slots: IntArray, ends: IntArray, window: int | None) -> list[DecodeGroup]:
        """Own tokens, longest first, in groups of one padded length each, cut where they would gather too much."""
        if not len(slots):
            return []
        seen = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)  # the first position seen
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
            mask = self._on_device(np.where(hidden, np.float32("-inf"), np.float32(0))).to(self._dtype)[:, None, None]
        return DecodeGroup(first, first + len(slots), self._on_device(blocks), mask)

    def _context(self, slot: int, first_block: int, end: int, num_context: int) -> IntArray:
        """A slot's blocks from the first on, up to position `end`, padded: [num_context / 16]."""
        blocks = np.full(num_context // BLOCK_SIZE, self._scratch_block, dtype=np.int64)
        used = self._tables[slot, first_block : num_blocks_for(end)]
        blocks[: len(used)] = used
        return blocks

    def _prompt_groups(self, first_token: int, rows: TokenRanges, window: int | None) -> list[PromptGroup]:
        """Each row its own group; first_token: that of the first."""
        groups = []
        for slot, start, end in zip(*rows, strict=True):
            groups.append(self._prompt_group(first_token, int(slot), int(start), int(end), window))
            first_token = groups[-1].end_token
        return groups

    def _prompt_group(self, first_token: int, slot: int, start: int, end: int, window: int | None) -> PromptGroup:
        first_block = _first_seen_block(start // TILE_TOKENS * TILE_TOKENS, window)
        skipped = first_block * BLOCK_SIZE
        tile_starts = range(start // TILE_TOKENS * TILE_TOKENS, end, TILE_TOKENS)
        tiles = [self._tile(max(start, tile), min(end, tile + TILE_TOKENS), skipped, window) for tile in tile_starts]
        blocks = self._context(slot, first_block, end, tile_starts[-1] + TILE_TOKENS - skipped)
        return PromptGroup(first_token, first_token + end - start, self._on_device(blocks), tiles)

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

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def padded_contexts(num_tokens: IntArray) -> IntArray:
    """What contexts of so many tokens are padded to: of each length alone, whatever its neighbours."""
    doubles = LEAST_CONTEXT << np.arange((CONTEXT_STEP // LEAST_CONTEXT).bit_length())  # 64 to 512
    steps = -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP
    short = doubles[np.minimum(np.searchsorted(doubles, num_tokens), len(doubles) - 1)]
    return np.where(num_tokens <= CONTEXT_STEP, short, steps)


def _first_seen_block(position: int, window: int | None) -> int:
    """The block in which what a position sees begins."""
    return 0 if window is None else max(0, position + 1 - window) // BLOCK_SIZE
