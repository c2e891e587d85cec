"""The gated MLP of a layer: one, or several experts of which each token goes through a few. Thread: engine."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import ExpertsConfig
from gpu.expert_weights import ExpertWeights
from gpu.linear import Linear
from gpu.quantize import Weight

Gated = Callable[[Tensor], Tensor]
"""[tokens, 2 * width], all of gate and then all of up, to [tokens, width]; may write into it."""
Block = Callable[[Tensor], Tensor]
"""[tokens, hidden], normed, to what a layer adds to them, [tokens, hidden]"""
MakeLinear = Callable[[Weight, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> their product"""

# gpt-oss's swiglu_alpha and swiglu_limit
SWIGLU_SLOPE = 1.702
SWIGLU_LIMIT = 7.0


def silu_gated(gate_up: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_gated(gate_up: Tensor) -> Tensor:
    """GEGLU (arXiv:2002.05202), with GELU's tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_gated(gate_up: Tensor) -> Tensor:
    """gpt-oss's: both are bounded, the gate from above only, and up counts from 1."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return torch.sigmoid(gate * SWIGLU_SLOPE).mul_(gate).mul_(up.add_(1))


GATED: dict[str, Gated] = {
    "silu": silu_gated,
    "gelu_pytorch_tanh": gelu_gated,
    "clamped_swiglu": clamped_gated,
}


class Mlp:
    """One gated MLP.

    Args:
        gate_up: hidden -> 2 * intermediate.
        down: intermediate -> hidden.
    """

    def __init__(self, gate_up: Linear, down: Linear, gated: Gated) -> None:
        self.gate_up = gate_up
        self.down = down
        self._gated = gated

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        return self.down(self._gated(self.gate_up(x)))


class Experts:
    """A router, and experts of which each token goes through num_active, by itself: neighbours change nothing."""

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated, make: MakeLinear) -> None:
        self._num_active = config.num_active
        self._is_normalized = config.is_normalized
        self._router = make(weights.router, weights.router_bias)
        self.experts = [
            Mlp(
                make(weights.gate_up[index], _row(weights.gate_up_bias, index)),
                make(weights.down[index], _row(weights.down_bias, index)),
                gated,
            )
            for index in range(config.num_experts)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        shares, chosen = shares_of(self._router(x), self._num_active, self._is_normalized)
        pairs = chosen.flatten()  # [tokens * active]: the expert of each (token, choice)
        order = pairs.argsort(stable=True)  # by expert
        inputs = x.index_select(0, order // self._num_active)  # [tokens * active, hidden]
        outputs, first = [], 0
        for expert, count in zip(self.experts, pairs.bincount(minlength=len(self.experts)).tolist(), strict=True):
            if count:
                outputs.append(expert(inputs[first : first + count]))
                first += count
        added = torch.empty_like(inputs).index_copy_(0, order, torch.cat(outputs))  # by token again
        return torch.einsum("tah,ta->th", added.float().view(*chosen.shape, -1), shares).to(x.dtype)


def shares_of(scores: Tensor, num_active: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """(shares, float32, and experts) of each token's likeliest, [tokens, active] each. scores: [tokens, experts]"""
    shares, chosen = scores.float().softmax(-1).topk(num_active)
    if is_normalized:
        shares /= shares.sum(-1, keepdim=True)
    return shares, chosen


def _row(rows: Tensor | None, index: int) -> Tensor | None:
    return None if rows is None else rows[index]
