"""Rotary position embedding: frequencies at start, one rotation a step, one product a layer. Thread: engine.

A pair that turns lies side by side (weights.interleave_halves). Dimensions that do not turn have the frequency 0, so
that a part of a head costs what the whole costs.
"""

import math

import torch
from torch import Tensor

from core.config import RopeConfig


class Rope:
    """One embedding of a model: its angle per position, and its length."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        num_turned = config.rotary_dim(head_dim) // 2
        still = torch.zeros(head_dim // 2 - num_turned)
        frequencies = torch.cat([rope_frequencies(config, config.rotary_dim(head_dim)), still])
        lengths = torch.cat([torch.full((num_turned,), config.attention_factor), still + 1])
        self.inv_freq = frequencies.to(device)  # [head_dim / 2], radians per token
        self.lengths = lengths.to(device)  # [head_dim / 2]

    def rotation(self, positions: Tensor) -> Tensor:
        """What to multiply the pairs of each token by: [tokens, 1, head_dim / 2], complex64.

        Args:
            positions: [tokens], float32, absolute index in the sequence, from 0.
        """
        angles = torch.outer(positions, self.inv_freq).unsqueeze(1)  # [tokens, 1, head_dim / 2]
        return torch.polar(self.lengths, angles)


def apply_rope(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head of x by its token's position, in float32.

    Args:
        x: [tokens, heads, head_dim].
        rotation: [tokens, 1, head_dim / 2], complex: what to multiply the pairs by.
    Source: RoFormer (arXiv:2104.09864), section 3.4.2.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))  # [tokens, heads, head_dim / 2]
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def rope_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Radians per token, float32: [rotary_dim / 2].

    Source: "llama3" as in Llama 3.1's reference code (apply_scaling): wavelengths beyond original / low_freq_factor
    are stretched by factor, those below original / high_freq_factor kept, and in between blended.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return inv_freq
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "longrope":
        return inv_freq / torch.tensor(rope.factors)
    if rope.kind == "yarn":
        kept = _yarn_kept(rope, rotary_dim)
    else:
        turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the original context
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn_kept(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """How much of each frequency stays: 1 above beta_fast turns within the original context, 0 below beta_slow.

    Between them it falls linearly with the index of the pair. Source: YaRN (arXiv:2309.00071), section 3.2, and its
    reference code for the bounds.
    """

    def index_at(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = index_at(rope.beta_fast), index_at(rope.beta_slow)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001  # as the reference does, against a division by 0
    return 1 - ((torch.arange(rotary_dim // 2).float() - first) / width).clamp(0, 1)
