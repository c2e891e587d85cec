"""Attention over block tables: rows of one new token together, longer rows each on its own. Thread: engine.

In torch, or by kernels where there are some (cpu_kernels/). Which rows go together, and their
masks, is decided once a step (batch.py), not here, once a layer.
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
class PrefillRow:
    """One row of several new tokens, as a kernel reads it.

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

    can_prefill: bool

    def decode(self, query: Tensor, kv: LayerKV, rows: DecodeRows, scale: float | None) -> Tensor: ...

    def prefill(self, query: Tensor, kv: LayerKV, row: PrefillRow, scale: float | None) -> Tensor: ...


@dataclass(slots=True)
class AttentionGroup:
    """Rows that attend together: several with one new token each, or one row with several.

    Args:
        first_token, end_token: their tokens, as a range of the batch's.
        num_rows: 1 where there are several new tokens.
        num_context: tokens of the longest row, the new ones counted in; those of blocks left behind a window not.
        blocks: [num_rows * blocks of the longest row], padded with the scratch block.
        mask: added to the scores, 0 or -inf. Of several rows [rows, 1, 1, context]; of one row with several tokens
            [tokens, context]. None: nothing is hidden, or is_causal says what.
        is_causal: the row's context is its new tokens alone.
        rows: for the kernels, which need neither blocks nor mask; None: torch attends.
    """

    first_token: int
    end_token: int
    num_rows: int
    num_context: int
    blocks: Tensor
    mask: Tensor | None
    is_causal: bool = False
    rows: DecodeRows | PrefillRow | None = None

    @property
    def is_decode(self) -> bool:
        return self.end_token - self.first_token == self.num_rows


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
    if group.rows is not None:
        assert kernels is not None
        if isinstance(group.rows, DecodeRows):
            return kernels.decode(query, kv, group.rows, scores.scale)
        return kernels.prefill(query, kv, group.rows, scores.scale)
    return (_decode if group.is_decode else _prefill)(query, kv, group, scores)


def _gather(kv: LayerKV, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the group's rows, each [rows, context, kv_heads, head_dim]."""
    both = kv.both.index_select(1, group.blocks)  # [2, rows * blocks, 16, kv_heads, head_dim]
    both = both.view(2, group.num_rows, -1, *both.shape[3:])[:, :, : group.num_context]
    return both[0], both[1]


def _decode(query: Tensor, kv: LayerKV, group: AttentionGroup, scores: Scores) -> Tensor:
    """One new token per row. The query heads of a KV head stand in the place of query tokens: they share its keys."""
    keys, values = _gather(kv, group)
    num_rows, _, num_kv_heads, head_dim = keys.shape
    grouped = query.view(num_rows, num_kv_heads, -1, head_dim)  # [rows, kv_heads, heads per kv, head_dim]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [rows, kv_heads, context, head_dim]
    if scores.are_plain:
        out = F.scaled_dot_product_attention(grouped, keys, values, group.mask, scale=scores.scale)
    else:
        mask = None if group.mask is None else group.mask.unsqueeze(1)
        out = attend(grouped.unsqueeze(3), keys, values, mask, False, scores)
    return out.reshape(num_rows, -1)  # [rows, heads * head_dim]


def _prefill(query: Tensor, kv: LayerKV, group: AttentionGroup, scores: Scores) -> Tensor:
    """One row with several new tokens. KV heads stand in the place of rows, so that keys are shared without a copy."""
    keys, values = _gather(kv, group)
    _, num_context, num_kv_heads, head_dim = keys.shape
    num_tokens = query.shape[0]
    per_kv = query.shape[1] // num_kv_heads
    query = query.view(num_tokens, num_kv_heads, per_kv, head_dim).permute(
        1, 2, 0, 3
    )  # [kv_heads, per_kv, tokens, dim]
    keys, values = keys[0].transpose(0, 1), values[0].transpose(0, 1)  # [kv_heads, context, dim]
    if scores.are_plain:
        shared = (num_kv_heads, per_kv, num_context, head_dim)
        out = F.scaled_dot_product_attention(
            query,
            keys.unsqueeze(1).expand(shared),
            values.unsqueeze(1).expand(shared),
            group.mask,
            is_causal=group.is_causal,
            scale=scores.scale,
        )
    else:
        out = attend(query, keys, values, group.mask, group.is_causal, scores)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, -1)  # [tokens, heads * head_dim]
