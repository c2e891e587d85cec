"""Norms of queries and keys that run over the heads of all ranks (OLMo 2). Thread: engine."""

import torch
from torch import Tensor

from gpu.parallel.ranks import Ranks


def norm_heads(qkv: Tensor, weights: tuple[Tensor, Tensor], eps: float, ranks: Ranks) -> None:
    """RMSNorm in float32 of this rank's queries and keys, in place: the ranks add up their squares, in one sum.

    All ranks have as many heads; KV heads of which several have a copy count as often each, which leaves the mean.

    Args:
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        weights: [heads, head_dim] and [kv_heads, head_dim].
    """
    num_heads, num_kv_heads = len(weights[0]), len(weights[1])
    parts = qkv[:, : num_heads + num_kv_heads].split_with_sizes([num_heads, num_kv_heads], 1)
    squares = torch.stack([part.float().square().mean((1, 2)) for part in parts])  # [2, tokens]
    factors = ranks.sum(squares).div_(ranks.num_ranks).add_(eps).rsqrt_()
    for part, weight, factor in zip(parts, weights, factors, strict=True):
        part.copy_(part.float().mul_(factor.view(-1, 1, 1)).mul_(weight.float()))
