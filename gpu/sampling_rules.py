"""The definition of sampling, in torch: penalties, top-k/top-p/min-p, and noise. Thread: engine.

The kernels (cpu_kernels/sampling.py, kernels/sampling.py) transcribe this file operation by operation and sample the
same tokens: every step is a float32 operation that IEEE 754 rounds in one way, so no library's log or exp, and nothing
fused. A row goes through four stages, in this order:

1. adjust: repetition, frequency and presence penalties, logit_bias, then -inf for what the row may not sample: the stop
   ids before min_tokens. All further masks belong here.
2. lowest_kept: one number, the smallest logit that top-k, then top-p, then min-p keep. They compare logits before the
   temperature, which changes no order. Tokens tied with the last one kept are kept too; the largest logit always is.
   A row that asks for top-n-sigma, typical-p or XTC has kept_range instead, which no kernel of a GPU computes.
3. logit / temperature + Gumbel noise for every kept token. The noise depends on (seed, position, token id) alone.
4. The token with the largest sum; of equals, the first.

Top-p sums whole-number weights of WEIGHT_BITS, so that sums are exact in any order. The noise is counter-based (Salmon
et al., SC11, doi:10.1145/2063384.2063405): without state, so that rows may come, go and swap places. Its generator is
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose n-th output is a hash of key + n * GOLDEN.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]

LEAST_ALLOWED = -1e29  # a smaller logit is of a token that may not be sampled
NO_TOKEN = -1
LEAST_TEMPERATURE = 1e-30  # below it a logit's quotient is no float32

WEIGHT_BITS = 40  # a million tokens' weights add up to less than 2 ** 60; what is below 2 ** -40 of the largest is 0
LEAST_POWER = -126.0  # its weight is already 0
ROUNDER = 1.5 * 2**23  # added to a small float32 it rounds that to a whole number
# 2 ** x for x in -0.5..0.5 to 2e-7: Cephes' exp2f (Moshier), ascending from x ** 0
EXP2_TERMS = (
    1.0,
    6.931472028550421e-1,
    2.402264791363012e-1,
    5.550332471162809e-2,
    9.618437357674640e-3,
    1.339887440266574e-3,
    1.535336188319500e-4,
)
LOG2_E = 1.4426950408889634

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 40  # a rare token's chance of 1e-9 is still met
LARGEST_UNIFORM = 1 - 2**-24  # the float32 below 1
MOST_NOISE = 28.5  # no Gumbel number is larger: that of half of 2 ** -UNIFORM_BITS is 28.42
LN_2 = 0.6931471824645996  # float32
THREE_QUARTERS = 0x3F400000  # bits of float32 0.75: mantissas are taken from 0.75 to 1.5, where ln is small
# ln(1 + x) = 2 s + 2/3 s^3 + 2/5 s^5 + ..., s = x / (2 + x): to 1e-8 for x in -0.25..0.5
LN_TERMS = (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9)


def penalise(logits: Tensor, seen: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits with the penalties of tokens seen: repetition for prompt and output, the other two for the output alone.

    Args:
        logits: [rows, vocab]
        seen: int32 [rows, vocab]: 2 * how often in the output, + 1 if in the prompt.
        repetition, presence, frequency: [rows, 1]
    Sources: repetition, arXiv:1909.05858 section 4.1; presence and frequency, OpenAI's API reference.
    """
    counts = seen >> 1
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen > 0, repeated, logits) - frequency * counts - presence * (counts > 0)


def lowest_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, slope: Tensor, min_p_offset: Tensor) -> Tensor:
    """The smallest logit that is kept in each row: [rows, 1].

    Args:
        logits: [rows, vocab]
        top_k: int64 [rows, 1], at least 1; the vocabulary's size for all.
        top_p: [rows, 1], of what top-k keeps; 1 for all.
        slope: [rows, 1]: see slope_of.
        min_p_offset: [rows, 1]: see min_p_offset_of.
    """
    ordered = logits.sort(descending=True).values
    top, limit_k = ordered[:, :1], ordered.gather(1, top_k - 1)
    weights = weigh(ordered, top, slope).masked_fill_(ordered < limit_k, 0)
    is_needed = weights.cumsum(-1) - weights < needed_of(weights.sum(-1, keepdim=True), top_p)  # a prefix
    last = (is_needed.sum(-1, keepdim=True) - 1).clamp_(min=0)
    limit_p = ordered.gather(1, last).masked_fill(top_p >= 1, float("-inf"))
    return torch.maximum(torch.maximum(limit_k, limit_p), top + min_p_offset)


@dataclass(frozen=True, slots=True)
class RareFilters:
    """Filters of one row that few ask for, as llama-server defines them.

    Args:
        sigmas: top-n-sigma: how many standard deviations below the largest logit is kept; at most 0: all.
        typical_p: 1: all.
        xtc_threshold: XTC drops what is at least so likely, but for the least likely of it; None: not this time.
    Sources: top-n-sigma, arXiv:2411.07641; typical-p, arXiv:2202.00666; XTC, llama.cpp's src/llama-sampler.cpp.
    """

    sigmas: float
    typical_p: float
    xtc_threshold: float | None


def kept_range(
    logits: Tensor, top_k: Tensor, filters: tuple[Tensor, Tensor, Tensor], rare: RareFilters
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest logit of a row that are kept, [1, 1] each.

    By llama-server's chain: top-n-sigma, top-k, typical-p, top-p, min-p, XTC, each of what those before it keep. The
    probabilities of typical-p and XTC are those before the temperature, which that chain applies last.

    Args:
        logits: [1, vocab]
        top_k, filters: as lowest_kept takes them.
    """
    ordered = logits.sort(descending=True).values
    low, high = ordered.gather(1, top_k - 1), ordered[:, :1]
    if rare.sigmas > 0:
        low = torch.maximum(low, (high - rare.sigmas * _deviation(logits)).float())
    if rare.typical_p < 1:
        typical = logits[_are_typical(high - logits, _weigh_from(logits, high, low), rare.typical_p)]
        low, high = typical.amin().view(1, 1), typical.amax().view(1, 1)
    ordered = ordered[(ordered >= low) & (ordered <= high)].unsqueeze(0)
    low = torch.maximum(low, lowest_kept(ordered, top_k.clamp(max=ordered.shape[1]), *filters))
    if rare.xtc_threshold is not None:
        weights = _weigh_from(ordered, high, low)
        likely = ordered[(weights >= rare.xtc_threshold * weights.sum().double()) & (ordered >= low)]
        high = likely[-1].view(1, 1) if len(likely) else high
    return low, high


def _deviation(logits: Tensor) -> Tensor:
    """The standard deviation of a row's logits that may be sampled, 0 if none may: float64 [1, 1]."""
    values = logits[logits > LEAST_ALLOWED].double()
    mean = values.cumsum(0)[-1:] / len(values)  # sums in order, so that they round alike in any company
    return ((values - mean).square().cumsum(0)[-1:] / len(values)).sqrt().sum().view(1, 1)


def _weigh_from(logits: Tensor, top: Tensor, low: Tensor) -> Tensor:
    """The weights of a row's logits before the temperature, 0 below low. top: the largest."""
    return weigh(logits, top, torch.full_like(low, LOG2_E)).masked_fill_(logits < low, 0)


def _are_typical(below: Tensor, weights: Tensor, typical_p: float) -> Tensor:
    """Which of a row's tokens typical-p keeps: those whose surprise is nearest to the entropy. [1, vocab]

    Args:
        below: [1, vocab]: how far each logit is below the largest: surprise, but for a number that its mean has, too.
    """
    total, has_weight = int(weights.sum()), weights > 0
    mean = torch.where(has_weight, weights * below.double(), 0).cumsum(-1)[:, -1:] / total
    distance = torch.where(has_weight, (below - mean.float()).abs(), float("inf"))
    by_distance = distance.sort()
    reached = weights.gather(1, by_distance.indices).cumsum(-1)
    num_before = (
        reached < min(math.floor(total * typical_p) + 1, total)
    ).sum()  # more than the share, if there is more
    return has_weight & (distance <= by_distance.values[:, num_before])


def xtc_chance(key: np.uint64) -> float:
    """A uniform number of the row's key, of no token's noise: XTC applies where this is at most its probability."""
    return float(_uniforms(torch.tensor([key.astype(np.int64)]), torch.tensor([NO_TOKEN])))


def weigh(logits: Tensor, top: Tensor, slope: Tensor) -> Tensor:
    """exp((logits - top) / temperature) * 2 ** WEIGHT_BITS, rounded down: int64 [rows, some].

    Args:
        logits: [rows, some], float32, no larger than top.
        top: [rows, 1], the row's largest logit.
        slope: [rows, 1]
    """
    power = ((logits - top) * slope).clamp_(min=LEAST_POWER)
    whole = power + ROUNDER - ROUNDER
    part = power - whole
    series = part * EXP2_TERMS[-1]
    for term in EXP2_TERMS[-2:0:-1]:
        series = (series + term) * part
    series += EXP2_TERMS[0]
    exponents = (whole.to(torch.int32) + WEIGHT_BITS) << 23
    return (series.view(torch.int32) + exponents).view(torch.float32).to(torch.int64)


def needed_of(total: Tensor, top_p: Tensor) -> Tensor:
    """The weight that what is kept must reach. In float64, where total * top_p is rounded once."""
    return (total.to(torch.float64) * top_p.to(torch.float64)).ceil_().clamp_(min=1).to(torch.int64)


def slope_of(temperature: float) -> np.float32:
    """How many powers of two a token's weight falls by when its logit falls by one."""
    return np.float32(LOG2_E / max(temperature, LEAST_TEMPERATURE))


def min_p_offset_of(min_p: float, temperature: float) -> np.float32:
    """temperature * ln(min_p), at most 0: how far below the largest logit min-p still keeps."""
    return np.float32(temperature * np.log(min_p)) if min_p > 0 else np.float32(-np.inf)


def row_keys(seeds: UInt64Array, positions: npt.NDArray[Any]) -> UInt64Array:
    """One key per (seed, position of the token to sample): [rows]."""
    return _mix(seeds + _mix(positions.astype(np.uint64) * np.uint64(GOLDEN)))


def _mix(x: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer; arrays of uint64 wrap around silently."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, -log(-log(1 - u)): float32, one per (key, token id), in the broadcast shape of both.

    Args:
        keys: int64, the bits of row_keys.
        token_ids: int64.
    """
    uniform = _uniforms(keys, token_ids)
    exponent, part = _parts(1 - uniform)
    part = torch.where(exponent == 0, -uniform, part)  # 1 - u loses the low bits of a small u
    return -_ln(*_parts(-_ln(exponent, part)))


def _uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Above 0, below 1."""
    x = keys + token_ids * _signed(GOLDEN)
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_signed(MIX_1))
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_signed(MIX_2))
    x = x.bitwise_xor_(_shift(x, 31))
    return (_shift(x, 64 - UNIFORM_BITS).float() + 0.5).mul_(2.0**-UNIFORM_BITS).clamp_(max=LARGEST_UNIFORM)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, y) of x = 2 ** n * (1 + y), with y in -0.25..0.5. x: normal numbers above 0."""
    bits = x.view(torch.int32)
    exponent = (bits - THREE_QUARTERS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32) - 1


def _ln(exponent: Tensor, part: Tensor) -> Tensor:
    """ln(2 ** exponent * (1 + part))."""
    ratio = part / (part + 2)
    square = ratio * ratio
    series = square * LN_TERMS[-1]
    for term in LN_TERMS[-2:0:-1]:
        series = (series + term) * square
    return (series + LN_TERMS[0]) * ratio + exponent.float() * LN_2


def _signed(bits: int) -> int:
    """The int64 of the same bits: torch multiplies no uint64, and the low 64 bits of the result are the same."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
