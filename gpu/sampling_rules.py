"""Gumbel noise, and what top_k, top_p and min_p keep: the rules that every sampler follows to the bit. Thread: engine.

Torch's way; the kernels (cpu_kernels/sampling.py, kernels/sampling.py) repeat it operation by operation, in float32
operations that IEEE 754 rounds in one way (no library's log or exp, nothing fused), and sample the same tokens.

What is kept of a row's adjusted logits, before the temperature, which changes no order, is one number: the smallest
logit that is kept.

- top_k: all from the k-th largest on, those tied with it included;
- top_p: of these, the largest whose weights make up at least the share p of all their weights. A weight is a whole
  number, 2 ** WEIGHT_BITS of the largest logit's, so that sums are exact: weigh() says how it is rounded;
- min_p: of these, all from the largest logit + temperature * ln(min_p) on.

The largest logit is always kept. Noise depends on nothing but its key: counter-based (Salmon et al., SC11,
doi:10.1145/2063384.2063405), without state, so that rows may come, go and swap places. The generator is SplitMix64
(Steele, Lea, Flood, OOPSLA 2014), whose n-th output is a hash of key + n * GOLDEN.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SHORTLIST = 256  # candidates sorted first; nearly always enough to decide
SHORTLIST_GROWTH = 16
SORTED_WHOLE = 4096  # vocabularies up to here are sorted whole: a second look would cost more

WEIGHED_AT_ONCE = 1 << 20  # logits: their weights take several times their memory

WEIGHT_BITS = 40  # a million tokens' weights add up to less than 2 ** 60; what is below 2 ** -40 of the largest is 0
LEAST_POWER = -126.0  # whose weight is 0 already
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
LEAST_TEMPERATURE = 1e-30  # below it a logit's quotient is no float32


@dataclass(slots=True)
class Filters:
    """What to keep of some rows.

    Args:
        top_k: [rows], int64, at least 1; the vocabulary's size for all.
        top_p: [rows, 1], float32; 1 or more for all.
        slope: [rows, 1], float32: see slope_of.
        least: [rows, 1], float32: what min_p keeps below the largest logit: see least_of.
    """

    top_k: Tensor
    top_p: Tensor
    slope: Tensor
    least: Tensor

    def lowest_kept(self, logits: Tensor, size: int = SHORTLIST) -> Tensor:
        """The smallest logit that is kept in each row: [rows, 1].

        Args:
            logits: [rows, vocab]
            size: of the shortlist; rows for which it is too short are tried again with a longer one.
        """
        vocab_size = logits.shape[1]
        if vocab_size <= max(size, SORTED_WHOLE):
            return self._lowest(logits.sort(descending=True).values, logits)[0]
        shortlist = logits.topk(size).values  # [rows, size]
        limits, is_too_short = self._lowest(shortlist, logits)
        too_short = is_too_short.nonzero().squeeze(1)
        if len(too_short):
            some = Filters(self.top_k[too_short], self.top_p[too_short], self.slope[too_short], self.least[too_short])
            limits[too_short] = some.lowest_kept(logits[too_short], size * SHORTLIST_GROWTH)
        return limits

    def _lowest(self, ordered: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(the smallest logit kept: [rows, 1], whether `ordered` is too short to tell: [rows]).

        Args:
            ordered: [rows, some], the largest logits, descending: enough of them, or all.
        """
        size, vocab_size = ordered.shape[1], logits.shape[1]
        top, end = ordered[:, :1], ordered[:, -1:]
        has_all = (self.top_k >= vocab_size).unsqueeze(1)  # [rows, 1]
        is_by_mass = self.top_p < 1
        limit_k = ordered.gather(1, (self.top_k - 1).clamp(max=size - 1).unsqueeze(1))
        limit_k = limit_k.masked_fill(has_all, float("-inf"))
        shares = weigh(ordered, top, self.slope).masked_fill_(ordered < limit_k, 0)  # [rows, some]
        total = shares.sum(-1, keepdim=True)
        if size < vocab_size:
            whole = (has_all & is_by_mass).squeeze(1).nonzero().squeeze(1)
            for some in torch.split(whole, max(1, WEIGHED_AT_ONCE // vocab_size)):
                total[some] = weigh(logits[some], top[some], self.slope[some]).sum(-1, keepdim=True)
        is_kept = shares.cumsum(-1) - shares < needed_of(total, self.top_p)
        last = (is_kept.sum(-1, keepdim=True) - 1).clamp_(min=0)  # what is kept is a prefix
        limit_p = ordered.gather(1, last).masked_fill(~is_by_mass, float("-inf"))
        limits = torch.maximum(torch.maximum(limit_k, limit_p), top + self.least)
        # Behind the shortlist may lie the k-th, what is tied with it and counts in the share, or the share's end ...
        is_beyond = ~has_all & (self.top_k > size).unsqueeze(1)
        is_beyond |= is_by_mass & (torch.where(has_all, limit_p, limit_k) <= end)
        return limits, (is_beyond & (top + self.least <= end)).squeeze(1)  # ... but not what min_p keeps


def weigh(logits: Tensor, top: Tensor, slope: Tensor) -> Tensor:
    """exp((logits - top) / temperature) * 2 ** WEIGHT_BITS, rounded down, in float32 operations of one rounding each.

    Args:
        logits: [rows, some], float32, no larger than top.
        top: [rows, 1], the row's largest logit.
        slope: [rows, 1]
    Returns:
        int64 [rows, some]
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
    """The weight that what is kept must have; as float64, which holds top_p of float32 and gives one product."""
    return (total.to(torch.float64) * top_p.to(torch.float64)).ceil_().clamp_(min=1).to(torch.int64)


def slope_of(temperature: float) -> np.float32:
    """How many powers of two a token's weight falls by, when its logit falls by one."""
    return np.float32(LOG2_E / max(temperature, LEAST_TEMPERATURE))


def least_of(min_p: float, temperature: float) -> np.float32:
    """How far below the largest logit min_p still keeps: at most 0."""
    return np.float32(temperature * np.log(min_p)) if min_p > 0 else np.float32(-np.inf)


UInt64Array = npt.NDArray[np.uint64]

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
SLACK = 1e-3  # more than noise by torch's logarithms differs from ours


def row_keys(seeds: UInt64Array, positions: npt.NDArray[Any]) -> UInt64Array:
    """One key per (seed, position of the token to draw): [rows]."""
    return _mix(seeds + _mix(positions.astype(np.uint64) * np.uint64(GOLDEN)))


def _mix(x: UInt64Array) -> UInt64Array:
    """SplitMix64's finalizer; arrays of uint64 wrap around silently."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, one per (key, token id), in the broadcast shape of both.

    Args:
        keys: int64, the bits of row_keys.
        token_ids: int64.
    """
    uniform = _uniforms(keys, token_ids)
    exponent, part = _parts(1 - uniform)
    part = torch.where(exponent == 0, -uniform, part)  # 1 - u rounds what a small u is
    return -_ln(*_parts(-_ln(exponent, part)))  # -log(-log(1 - u))


def near_gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """What gumbel_noise gives, by torch's logarithms: sooner, and to less than SLACK."""
    return _uniforms(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def gumbel_argmax(scaled: Tensor, keys: Tensor) -> Tensor:
    """Where each row is largest with its noise; of equals the first: [rows].

    Args:
        scaled: [rows, vocab], float32; -inf: never drawn.
        keys: [rows, 1], int64.
    """
    token_ids = torch.arange(scaled.shape[1], device=scaled.device)
    near = near_gumbel_noise(keys, token_ids).add_(scaled)  # [rows, vocab]
    rows, tokens = (near >= near.amax(-1, keepdim=True) - SLACK).nonzero(as_tuple=True)  # few
    sums = torch.full_like(near, float("-inf"))
    sums[rows, tokens] = gumbel_noise(keys[rows, 0], tokens) + scaled[rows, tokens]
    return sums.argmax(-1)


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
    """The int64 of the same bits: torch multiplies no uint64, and the product's low bits are the same."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
