"""The parts of a layer beside attention: MLP, experts and rotary position embedding (RoPE). Thread: engine.

An MLP is one, or several experts of which each token goes through a few. RoPE has its frequencies made at
start, its rotation once a step, and one multiplication a layer. The two numbers of a rotated pair lie side by side
(parameters.interleave_halves); dimensions that are not rotated have the frequency 0, so that a partial rotation costs
what a whole one does.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.config import ExpertsConfig, LatentConfig, RopeConfig
from gpu.attention import multiply_in_company
from gpu.linear import Linear
from gpu.parameters import BesideNorms, ExpertWeights, LatentWeights
from gpu.quant import Weight

Gated = Callable[[Tensor], Tensor]
"""[tokens, 2 * width], all of gate and then all of up, to [tokens, width]; without a gate from [tokens, width]. It may
write into its input."""
Block = Callable[[Tensor], Tensor]
"""[tokens, hidden], normed, to what a layer adds to them, [tokens, hidden]"""
MakeLinear = Callable[[Weight, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> the matmul with it"""

# gpt-oss's swiglu_alpha and swiglu_limit
SWIGLU_SLOPE = 1.702
SWIGLU_LIMIT = 7.0
LATENT_EPS = 1e-6  # of norms within latent attention, whatever rms_norm_eps: DeepSeek's modeling files


def silu_gated(gate_up: Tensor) -> Tensor:
    """SwiGLU (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_gated(gate_up: Tensor) -> Tensor:
    """GEGLU (arXiv:2002.05202), with GELU's tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_gated(gate_up: Tensor) -> Tensor:
    """gpt-oss's: both are bounded, the gate from above only, and 1 is added to up."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return torch.sigmoid(gate * SWIGLU_SLOPE).mul_(gate).mul_(up.add_(1))


def relu_squared(up: Tensor) -> Tensor:
    """Of an MLP without a gate (arXiv:2109.08668, section 3.1)."""
    return F.relu(up).square_()


def keep_largest(gated: Gated, sparsity: float) -> Gated:
    """Zero gates up to the quantile of a normal distribution like theirs, and bring the others down by it.

    Source: Gemma 3n's activation sparsity (transformers, modeling_gemma3n.py).
    """
    deviations = NormalDist().inv_cdf(sparsity)

    def sparsely(gate_up: Tensor) -> Tensor:
        gate = gate_up[:, : gate_up.shape[1] // 2]
        numbers = gate.float()
        mean = numbers.mean(-1, keepdim=True)
        deviation = (numbers - mean).square_().mean(-1, keepdim=True).sqrt_()
        gate.copy_(F.relu(numbers - (mean + deviation * deviations)))
        return gated(gate_up)

    return sparsely


GATED: dict[str, Gated] = {
    "relu2": relu_squared,
    "silu": silu_gated,
    "gelu_pytorch_tanh": gelu_gated,
    "clamped_swiglu": clamped_gated,
}


class Mlp:
    """One MLP.

    Args:
        gate_up: hidden -> 2 * intermediate, or without a gate to intermediate.
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
    """A router, and experts; each token goes through num_active of them, whatever its neighbours."""

    def __init__(
        self, config: ExpertsConfig, weights: ExpertWeights, gated: Gated, router: Linear, make: MakeLinear
    ) -> None:
        self._config = config
        self._router, self._choice_bias = router, weights.choice_bias
        self._share_scales = weights.share_scales
        self.experts = [
            Mlp(
                make(weights.gate_up[index], _row(weights.gate_up_bias, index)),
                make(weights.down[index], _row(weights.down_bias, index)),
                gated,
            )
            for index in range(config.num_experts)
        ]

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden], normed; also returned so. routed: what the router reads instead."""
        shares, chosen = shares_of(self._router(x if routed is None else routed), self._config, self._choice_bias)
        if self._share_scales is not None:
            shares = shares * self._share_scales[chosen]
        pairs = chosen.flatten()  # [tokens * active]: the expert of each (token, choice)
        order = pairs.argsort(stable=True)  # by expert
        inputs = x.index_select(0, order // self._config.num_active)  # [tokens * active, hidden]
        if self._config.scales_inputs:
            inputs = (inputs * shares.flatten()[order].unsqueeze(1)).to(x.dtype)
            shares = torch.ones_like(shares)
        outputs, first = [], 0
        for expert, count in zip(self.experts, pairs.bincount(minlength=len(self.experts)).tolist(), strict=True):
            if count:
                outputs.append(expert(inputs[first : first + count]))
                first += count
        added = torch.empty_like(inputs).index_copy_(0, order, torch.cat(outputs))  # by token again
        return torch.einsum("tah,ta->th", added.float().view(*chosen.shape, -1), shares).to(x.dtype)


class Norm(Protocol):
    """RMSNorm; see Operators.norm."""

    def __call__(self, x: Tensor, weight: Tensor, /) -> Tensor: ...


class BesideExperts:
    """A shared expert and experts, each with norms of its own; see ExpertsConfig.are_beside."""

    def __init__(self, experts: Experts, shared: Mlp, norms: BesideNorms, norm: Norm) -> None:
        self.experts, self._shared, self._norms, self._norm = experts.experts, shared, norms, norm
        self._choose, self._plain = experts, torch.ones_like(norms.shared)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], not normed; also returned so."""
        norm, norms = self._norm, self._norms
        added = norm(self._shared(norm(x, norms.shared)), norms.shared_post)
        found = self._choose(norm(x, norms.experts), norm(x, self._plain))
        return added + norm(found, norms.experts_post)


class WithSharedExpert:
    """Experts, and one more that all tokens go through. gate: hidden -> 1, its sigmoid scales that one; None: it counts
    whole.
    """

    def __init__(self, experts: Block, shared: Mlp, gate: Linear | None) -> None:
        self._experts, self._shared, self._gate = experts, shared, gate

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden], normed; also returned so."""
        added = self._shared(x)
        if self._gate is not None:
            added = added * sigmoid(self._gate(x))
        return added.add_(self._experts(x))


def shares_of(scores: Tensor, config: ExpertsConfig, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(shares, float32, and experts) of each token's likeliest, [tokens, active] each.

    Args:
        scores: [tokens, experts], the router's.
        choice_bias: [experts].
    Source of groups: DeepSeek-V2 (arXiv:2405.04434), section 2.2.2; of the bias and sigmoids: DeepSeek-V3
    (arXiv:2412.19437), section 2.1.2.
    """
    scores = scores.float()
    likely = sigmoid(scores) if config.scoring == "sigmoid" else scores.softmax(-1)
    choosing = likely if choice_bias is None else likely + choice_bias
    if config.scales_inputs:  # a sigmoid of large scores is 1
        choosing = scores
    if config.num_active_groups < config.num_groups:
        choosing = _in_best_groups(choosing, config)
    shares, chosen = choosing.topk(config.num_active)
    if choice_bias is not None or config.scales_inputs:
        shares = likely.gather(1, chosen)
    if config.is_normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares if config.scale == 1 else shares * config.scale, chosen


def sigmoid(x: Tensor) -> Tensor:
    """The same bits in any company: torch's own computes what does not fill a vector by another function."""
    return torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0]


def _in_best_groups(choosing: Tensor, config: ExpertsConfig) -> Tensor:
    """The scores by which experts are chosen, -inf outside of the best groups: [tokens, experts]."""
    groups = choosing.view(len(choosing), config.num_groups, -1)
    of_groups = groups.topk(2 if config.has_choice_bias else 1).values.sum(-1)  # [tokens, groups]
    best = of_groups.topk(config.num_active_groups).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)


def _row(rows: Tensor | None, index: int) -> Tensor | None:
    return None if rows is None else rows[index]


class Latent:
    """What latent attention computes around the cache: see LatentConfig.

    The matrices that would make every cached token's keys and values multiply the queries and what was attended to
    instead, which gives the same scores and outputs: all heads attend over the cached vectors themselves.
    """

    def __init__(self, config: LatentConfig, weights: LatentWeights, make: MakeLinear) -> None:
        self._config = config
        self._query_norm, self._norm = weights.query_norm, weights.norm
        self._query_up = None if weights.query_up is None else make(weights.query_up, None)
        up = weights.up.view(-1, config.plain_dim + config.value_dim, config.rank)
        self._key_up = up[:, : config.plain_dim].contiguous()  # [heads, plain_dim, rank]
        self._value_up = up[:, config.plain_dim :].transpose(1, 2).contiguous()  # [heads, rank, value_dim]

    def queries_and_cached(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: [tokens, query_rank or all query heads, and what is cached], of the layer's first matrix.
            rotation: see Rope; of rope_dim.
        Returns:
            queries over what is cached, [tokens, heads, rank + rope_dim]; what is cached, [tokens, 1, rank + rope_dim].
        """
        config = self._config
        query, vector, key = x.split_with_sizes(
            [x.shape[1] - config.rank - config.rope_dim, config.rank, config.rope_dim], 1
        )
        if self._query_up is not None and self._query_norm is not None:
            query = self._query_up(_latent_norm(query, self._query_norm))
        query = query.reshape(len(x), -1, config.plain_dim + config.rope_dim)
        plain, turning = query.split_with_sizes([config.plain_dim, config.rope_dim], 2)
        over_vectors = multiply_in_company(plain.transpose(0, 1), self._key_up).transpose(0, 1)
        turned = apply_rope(torch.cat([turning, key.unsqueeze(1)], 1), rotation)  # [tokens, heads + 1, rope_dim]
        cached = torch.cat([_latent_norm(vector, self._norm).unsqueeze(1), turned[:, -1:]], 2)
        return torch.cat([over_vectors, turned[:, :-1]], 2), cached

    def values(self, attended: Tensor) -> Tensor:
        """attended: [tokens, heads * rank]; returns [tokens, heads * value_dim]."""
        by_head = attended.view(len(attended), -1, self._config.rank).transpose(0, 1)
        return multiply_in_company(by_head, self._value_up).transpose(0, 1).reshape(len(attended), -1)


def _latent_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, LATENT_EPS)


class Rope:
    """One position embedding of a model: the frequency and the length of each pair's factor."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        num_rotated = config.rotary_dim(head_dim) // 2
        unrotated = torch.zeros(head_dim // 2 - num_rotated)
        frequencies = torch.cat([rope_frequencies(config, config.rotary_dim(head_dim)), unrotated])
        if config.kind == "proportional":
            frequencies[int(config.turning * head_dim // 2) :] = 0
        lengths = torch.cat([torch.full((num_rotated,), config.attention_factor), unrotated + 1])
        self.inv_freq = frequencies.to(device)  # [head_dim / 2], radians per token
        self.lengths = lengths.to(device)  # [head_dim / 2]
        self._kind, self._growth, self._offset = config.kind, config.query_growth, config.query_offset
        self._original = config.original_max_position

    def rotation(self, positions: Tensor) -> Tensor | None:
        """The factors of each token's pairs: [tokens, 1, head_dim / 2], complex64; None: nothing turns.

        Args:
            positions: [tokens], float32, absolute index in the sequence, from 0.
        """
        if self._kind == "none":
            return None
        angles = torch.outer(positions, self.inv_freq).unsqueeze(1)  # [tokens, 1, head_dim / 2]
        return torch.polar(self.lengths, angles)

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """The factor of each token's queries: [tokens, 1, 1]; None: 1. positions: see rotation.

        Source: Llama 4's attention temperature (llama-models, models/llama4/model.py).
        """
        if not self._growth:
            return None
        turns = positions.add(self._offset).div_(self._original).floor_()
        return (1 + self._growth * torch.log1p(turns)).view(-1, 1, 1)


def apply_rope(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head of x by its token's position, in float32.

    Args:
        x: [tokens, heads, head_dim].
        rotation: [tokens, 1, head_dim / 2], complex: the factors of the pairs.
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
    if rope.kind in ("default", "none"):
        return inv_freq
    if rope.kind in ("linear", "proportional"):
        return inv_freq / rope.factor
    if rope.kind == "longrope":
        return inv_freq / torch.tensor(rope.factors)
    if rope.kind == "yarn":
        unscaled = _yarn_unscaled(rope, rotary_dim)
    else:
        turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the original context
        width = max(rope.high_freq_factor - rope.low_freq_factor, 1e-30)  # Llama 4 Scout's are the same: nothing blends
        unscaled = ((turns - rope.low_freq_factor) / width).clamp(0, 1)
    return (1 - unscaled) * inv_freq / rope.factor + unscaled * inv_freq


def _yarn_unscaled(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """The share of each frequency that is not stretched: 1 above beta_fast turns, 0 below beta_slow.

    Turns are within the original context. Between the two the share falls linearly with the index of the pair. Source:
    YaRN (arXiv:2309.00071), section 3.2, and its reference code for the bounds.
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
