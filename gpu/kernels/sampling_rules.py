"""gpu/noise.py's noise and gpu/filters.py's weights, and the search that both thresholds are: @triton.jit.

Operation by operation as there, so that a token is drawn to the last bit as by torch: divisions are rounded as IEEE 754
has it, and kernels that use these are launched with enable_fp_fusion=False. Thread: engine.
"""

import triton
import triton.language as tl

from gpu.filters import EXP2_TERMS
from gpu.filters import LEAST_POWER as _LEAST_POWER
from gpu.filters import ROUNDER as _ROUNDER
from gpu.filters import WEIGHT_BITS as _WEIGHT_BITS
from gpu.noise import (
    GOLDEN as _GOLDEN,
)
from gpu.noise import (
    LARGEST_UNIFORM as _LARGEST_UNIFORM,
)
from gpu.noise import (
    LN_2 as _LN_2,
)
from gpu.noise import (
    LN_TERMS,
)
from gpu.noise import (
    MIX_1 as _MIX_1,
)
from gpu.noise import (
    MIX_2 as _MIX_2,
)
from gpu.noise import (
    THREE_QUARTERS as _THREE_QUARTERS,
)
from gpu.noise import (
    UNIFORM_BITS as _UNIFORM_BITS,
)

GOLDEN, MIX_1, MIX_2 = tl.constexpr(_GOLDEN), tl.constexpr(_MIX_1), tl.constexpr(_MIX_2)
REST_BITS, UNIT = tl.constexpr(64 - _UNIFORM_BITS), tl.constexpr(2.0**-_UNIFORM_BITS)
LARGEST_UNIFORM = tl.constexpr(_LARGEST_UNIFORM)
LN_2, THREE_QUARTERS = tl.constexpr(_LN_2), tl.constexpr(_THREE_QUARTERS)
LN_0, LN_1, LN_2ND, LN_3, LN_4 = (tl.constexpr(term) for term in LN_TERMS)
LEAST_POWER, ROUNDER = tl.constexpr(_LEAST_POWER), tl.constexpr(_ROUNDER)
WEIGHT_BITS = tl.constexpr(_WEIGHT_BITS)
EXP2_0, EXP2_1, EXP2_2, EXP2_3, EXP2_4, EXP2_5, EXP2_6 = (tl.constexpr(term) for term in EXP2_TERMS)
BOUND_SLACK = tl.constexpr(1e-3)  # beyond what rounding makes of a bound


@triton.jit
def _mix(x):
    """SplitMix64's finalizer, of uint64."""
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def key_of(seed, position):
    """See noise.row_keys. seed, position: int64, scalars."""
    return _mix(seed.to(tl.uint64, bitcast=True) + _mix(position.to(tl.uint64, bitcast=True) * GOLDEN))


@triton.jit
def uniforms_of(key, tokens):
    """Above 0, below 1."""
    bits = _mix(key + tokens.to(tl.uint64) * GOLDEN) >> REST_BITS
    return tl.minimum((bits.to(tl.int64).to(tl.float32) + 0.5) * UNIT, LARGEST_UNIFORM)


@triton.jit
def _ln(exponent, part):
    """See noise._ln."""
    ratio = tl.math.div_rn(part, part + 2.0)
    square = ratio * ratio
    series = square * LN_4
    series = (series + LN_3) * square
    series = (series + LN_2ND) * square
    series = (series + LN_1) * square
    return (series + LN_0) * ratio + exponent.to(tl.float32) * LN_2


@triton.jit
def _exponent_of(x):
    return (x.to(tl.int32, bitcast=True) - THREE_QUARTERS) >> 23


@triton.jit
def _part_of(x, exponent):
    return (x.to(tl.int32, bitcast=True) - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def noise_of(uniforms):
    """See noise.gumbel_noise."""
    rest = 1.0 - uniforms
    exponent = _exponent_of(rest)
    part = tl.where(exponent == 0, -uniforms, _part_of(rest, exponent))
    rate = -_ln(exponent, part)
    exponent = _exponent_of(rate)
    return -_ln(exponent, _part_of(rate, exponent))


@triton.jit
def most_noise_of(uniforms):
    """What noise_of stays below, without a logarithm: an exponential number is at least its uniform one."""
    exponent = 127 - (uniforms.to(tl.int32, bitcast=True) >> 23)
    return exponent.to(tl.float32) * LN_2 + BOUND_SLACK


@triton.jit
def weigh(logits, top, slope):
    """See filters.weigh."""
    power = (logits - top) * slope
    power = tl.where(power > LEAST_POWER, power, LEAST_POWER)
    whole = (power + ROUNDER) - ROUNDER
    part = power - whole
    series = part * EXP2_6
    series = (series + EXP2_5) * part
    series = (series + EXP2_4) * part
    series = (series + EXP2_3) * part
    series = (series + EXP2_2) * part
    series = (series + EXP2_1) * part
    series = series + EXP2_0
    exponents = (whole.to(tl.int32) + WEIGHT_BITS) << 23
    return (series.to(tl.int32, bitcast=True) + exponents).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def needed_of(weight, top_p):
    """See filters.needed_of. Scalars: int64, float32."""
    needed = tl.math.ceil(weight.to(tl.float64) * top_p.to(tl.float64))
    return tl.maximum(needed, 1.0).to(tl.int64)


@triton.jit
def ordered_of(x):
    """A float32 as an int32 in the same order; 0.0 and -0.0 are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number_of(ordered):
    """The float32 that ordered_of gave. A scalar, int64 of that range."""
    bits = ordered.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def largest_reaching(ordered, weights, needed):
    """The largest of these numbers such that those not below it weigh at least as much as is needed; all together do.

    Args:
        ordered: int32 [some], of ordered_of.
        weights: int64 [some]; 0: is not there.
    """
    low = tl.min(tl.where(weights > 0, ordered, 0x7FFFFFFF), 0).to(tl.int64)
    high = tl.max(tl.where(weights > 0, ordered, -0x7FFFFFFF), 0).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        is_enough = tl.sum(tl.where(ordered >= middle, weights, 0), 0) >= needed
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle - 1)
    return number_of(low)
