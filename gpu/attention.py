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


@dataclass(slots=True)
class RaggedRows:
    """All rows of a step, as kernels read them: integers of their index_dtype, on the device.

    Rows of one token come first, in the order of the batch's tokens, which they are; then those of any number of new
    tokens. What a table holds beyond a row's end is never read.

    Args:
        num_decodes: rows of one token each.
        window: tokens that one sees, itself counted in; None: all before it.
        layout: the kernels' own, made by the first layer for those that share the rows.
    """

    tables: Tensor  # [rows, blocks of the longest]
    ends: Tensor  # [rows]: one past the last new token's position; 0: one that decodes sees nothing, and gets zeros
    offsets: Tensor  # [rows + 1]: where a row's new tokens begin among the batch's
    num_decodes: int
    window: int | None
    layout: object = None


class AttentionKernels(Protocol):
    """Attention of all rows at once, on one kind of device.

    Args:
        index_dtype: of a RaggedRows' tensors.
        are_own_tokens_alone: several tokens of a row that the sequence has drawn itself are rows of one token each, so
            that they are rounded as they were when they were drawn. False: they are one row, and share its keys.
        prompt_tile: see RunnerLimits.
    """

    index_dtype: torch.dtype
    are_own_tokens_alone: bool
    prompt_tile: int

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        """Have room for so many rows of such a context, so that it never grows. kv: a layer's."""
        ...

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        """query: [tokens, heads, head_dim], rotated; returns [tokens, heads * head_dim]."""
        ...


TILE_TOKENS = 64  # of a prompt attend at a time, from a multiple of it on


@dataclass(slots=True)
class DecodeGroup:
    """Tokens, one of a sequence's own each, that attend together.

    Args:
        first_token, end_token: as a range of the batch's.
        blocks: [tokens, blocks of a context], padded with the scratch block.
        mask: added to the scores, 0 or -inf: [tokens, 1, 1, context]; None: nothing is hidden.
    """

    first_token: int
    end_token: int
    blocks: Tensor
    mask: Tensor | None


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
    """

    first_token: int
    end_token: int
    blocks: Tensor
    tiles: list[PromptTile]


AttentionGroup = DecodeGroup | PromptGroup
Attending = list[AttentionGroup] | RaggedRows
"""A step's tokens: groups for torch, which cover them in order, without gaps; or rows for kernels"""


def paged_attention(
    query: Tensor,
    kv: LayerKV,
    attending: Attending,
    scores: Scores = PLAIN,
    kernels: AttentionKernels | None = None,
) -> Tensor:
    """Attend each new token to its sequence's context, itself included; keys and values are written already.

    Args:
        query: [tokens, heads, head_dim], rotated.
        scores: what the family does with them.
        kernels: for rows.
    Returns:
        [tokens, heads * head_dim]
    """
    if isinstance(attending, RaggedRows):
        assert kernels is not None
        return kernels.attend(query, kv, attending, scores)
    outputs = [_attend_group(query[group.first_token : group.end_token], kv, group, scores) for group in attending]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(query: Tensor, kv: LayerKV, group: AttentionGroup, scores: Scores) -> Tensor:
    if isinstance(group, PromptGroup):
        return _attend_prompt(query, kv, group, scores)
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
