"""Noise that depends on nothing but its key: the same for a request whatever runs beside it. Thread: engine.

Counter-based (Salmon et al., SC11, doi:10.1145/2063384.2063405): no state, so that rows may come, go and swap places.
The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose n-th output is a hash of key + n * GOLDEN.

Its logarithms are spelled out here in float32 operations that IEEE 754 rounds in one way (no library's log, nothing
fused): numba's and Triton's kernels repeat them, and draw the same token to the last bit.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
