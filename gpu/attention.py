"""Attention over block tables: a sequence's own tokens together with others', prompts in tiles. Thread: engine.

In torch, or by kernels where there are some (cpu_kernels/). Who attends together, and the masks, is
decided once a step (batch.py), not here, once a layer. What torch computes has shapes that depend on a token's place
in its sequence alone: its kernels round sums differently for other shapes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.kv_cache import LayerKV
from gpu.scores import PLAIN, Scores, attend


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one new token each, as a kernel reads them: all int64."""

    tables: Tensor  # [rows, blocks of the longest]
    firsts: Tensor  # [rows]: the first position that is seen
    ends: Tensor  # [rows]: one past the last


@dataclass(frozen=True, slots=True)
class PromptRow:
    """New tokens of one row's prompt, as a kernel reads them.

    Args:
        table: int64 [blocks of the context].
        start: position of the first new token.
        window: tokens that one sees, itself counted in; None: all before it.
    """

    table: Tensor
    start: int
    window: int | None


class AttentionKernels(Protocol):
    """Both return [tokens, heads * head_dim].

    Args:
        query: [tokens, heads, head_dim], rotated; of decode one token a row.
        scale: of the scores; None: 1 / sqrt(head_dim).
    """

    def decode(self, query: Tensor, kv: LayerKV, rows: DecodeRows, scale: float | None) -> Tensor: ...

    def prefill(self, query: Tensor, kv: LayerKV, row: PromptRow, scale: float | None) -> Tensor: ...


TILE_TOKENS = 64  # of a prompt attend at a time, from a multiple of it on


@dataclass(slots=True)
class DecodeGroup:
    """Tokens, one of a sequence's own each, that attend together.

    Args:
        first_token, end_token: as a range of the batch's.
        blocks: [tokens, blocks of a context], padded with the scratch block.
        mask: added to the scores, 0 or -inf: [tokens, 1, 1, context]; None: nothing is hidden.
        rows: for the kernel, which needs no mask; None: torch attends.
    """

    first_token: int
    end_token: int
    blocks: Tensor
    mask: Tensor | None
    rows: DecodeRows | None = None


@dataclass(frozen=True, slots=True)
class PromptTile:
    """Tokens at places first to first + num_tokens of a tile of 64, and what the whole tile sees.

    Args:
        first_context, num_context: a range of the group's context.
        mask: added to the scores, 0 or -inf: [64, num_context].
    """

    first: int
    num_tokens: int
    first_context: int
    num_context: int
    mask: Tensor


@dataclass(slots=True)
class PromptGroup:
    """New tokens of one row's prompt.

    Args:
        first_token, end_token: as a range of the batch's.
        blocks: [blocks of the context], padded with the scratch block to the end of the last tile.
        tiles: in order, without gaps.
        row: for the kernel, which needs no tiles; None: torch attends.
    """

    first_token: int
    end_token: int
    blocks: Tensor
    tiles: list[PromptTile]
    row: PromptRow | None = None


AttentionGroup = DecodeGroup | PromptGroup


def paged_attention(
    query: Tensor,
    kv: LayerKV,
    groups: list[AttentionGroup],
    scores: Scores = PLAIN,
    kernels: AttentionKernels | None = None,
) -> Tensor:
    """Attend each new token to its sequence's context, itself included; keys and values are written already.

    Args:
        query: [tokens, heads, head_dim], rotated.
        groups: cover the tokens in order, without gaps.
        scores: what the family does with them.
        kernels: for the groups that have rows.
    Returns:
        [tokens, heads * head_dim]
    """
    outputs = [
        _attend_group(query[group.first_token : group.end_token], kv, group, scores, kernels) for group in groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(
    query: Tensor, kv: LayerKV, group: AttentionGroup, scores: Scores, kernels: AttentionKernels | None
) -> Tensor:
    if isinstance(group, PromptGroup):
        if group.row is None:
            return _attend_prompt(query, kv, group, scores)
        assert kernels is not None
        return kernels.prefill(query, kv, group.row, scores.scale)
    if group.rows is not None:
        assert kernels is not None
        return kernels.decode(query, kv, group.rows, scores.scale)
    return _decode(query, kv, group, scores)


def _gather(kv: LayerKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of blocks [rows, n], each [rows, kv_heads, n * 16, head_dim]."""
    both = kv.both.index_select(1, blocks.flatten())  # [2, rows * n, 16, kv_heads, head_dim]
    both = both.view(2, blocks.shape[0], -1, *both.shape[3:]).transpose(2, 3)
    return both[0], both[1]


def _decode(query: Tensor, kv: LayerKV, group: DecodeGroup, scores: Scores) -> Tensor:
    """The query heads of a KV head stand in the place of query tokens: they share its keys."""
    keys, values = _gather(kv, group.blocks)
    num_rows, num_kv_heads, _, head_dim = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, head_dim)  # [rows, kv_heads, heads per kv, head_dim]
    if scores.are_plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, group.mask, scale=scores.scale)
    else:
        mask = None if group.mask is None else group.mask.unsqueeze(1)
        out = attend(grouped.unsqueeze(3), keys, values, mask, scores)
    return out.reshape(num_rows, -1)  # [rows, heads * head_dim]


def _attend_prompt(query: Tensor, kv: LayerKV, group: PromptGroup, scores: Scores) -> Tensor:
    """KV heads stand in the place of rows, so that keys are shared without a copy."""
    keys, values = (both[0] for both in _gather(kv, group.blocks.unsqueeze(0)))  # [kv_heads, context, dim]
    num_tokens, num_heads, head_dim = query.shape
    query = query.view(num_tokens, keys.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, per_kv, tokens, dim]
    outputs, first = [], 0
    for tile in group.tiles:
        seen = slice(tile.first_context, tile.first_context + tile.num_context)
        part = query[:, :, first : first + tile.num_tokens]
        outputs.append(_attend_tile(part, keys[:, seen], values[:, seen], tile, scores))
        first += tile.num_tokens
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads * head_dim)


def _attend_tile(query: Tensor, keys: Tensor, values: Tensor, tile: PromptTile, scores: Scores) -> Tensor:
    """
    Args:
        query: [kv_heads, heads per kv, tokens of the tile that are new, head_dim].
        keys, values: [kv_heads, context, head_dim].
    Returns:
        as query.
    """
    missing = TILE_TOKENS - tile.num_tokens
    if missing:
        query = F.pad(query, (0, 0, tile.first, missing - tile.first))
    if scores.are_plain:
        shape = (*query.shape[:2], *keys.shape[1:])
        shared = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        out = F.scaled_dot_product_attention(query, *shared, tile.mask, scale=scores.scale)
    else:
        out = attend(query, keys, values, tile.mask, scores)
    return out[:, :, tile.first : tile.first + tile.num_tokens]
