"""Noise that depends on nothing but its key: the same for a request whatever runs beside it. Thread: engine.

Counter-based (Salmon et al., SC11, doi:10.1145/2063384.2063405): no state, so that rows may come, go and swap places.
The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose n-th output is a hash of key + n * GOLDEN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

UInt64Array = npt.NDArray[np.uint64]
GumbelArgmax = Callable[[Tensor, Tensor], Tensor]
"""(float32 [rows, vocab], int64 [rows, 1], the bits of row_keys) -> where each row is largest with its noise, [rows]"""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 40  # a rare token's chance of 1e-9 is still met
LARGEST_UNIFORM = 1 - 2**-24  # the float32 below 1


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
    x = keys + token_ids * _signed(GOLDEN)
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_signed(MIX_1))
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_signed(MIX_2))
    x = x.bitwise_xor_(_shift(x, 31))
    uniform = (_shift(x, 64 - UNIFORM_BITS).float() + 0.5).mul_(2.0**-UNIFORM_BITS).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - u))


def _signed(bits: int) -> int:
    """The int64 of the same bits: torch multiplies no uint64, and the product's low bits are the same."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical shift to the right: torch's is arithmetic."""
    return (x >> count).bitwise_and_((1 << (64 - count)) - 1)
