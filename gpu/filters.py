"""What top_k, top_p and min_p keep of a row, as one number: the smallest logit that is kept. Thread: engine.

Torch's way, and the rule that the kernels (cpu_kernels/, kernels/) follow to the bit, whatever the order in which they
add. What is kept of a row's adjusted logits, before the temperature, which changes no order:

- top_k: all from the k-th largest on, those tied with it included;
- top_p: of these, the largest whose weights make up at least the share p of all their weights. A weight is a whole
  number, 2 ** WEIGHT_BITS of the largest logit's, so that sums are exact: weigh() says how it is rounded;
- min_p: of these, all from the largest logit + temperature * ln(min_p) on.

The largest logit is always kept.
"""

from dataclasses import dataclass

import numpy as np
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
