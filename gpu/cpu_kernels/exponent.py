"""2 ** x of sixteen numbers at once. Thread: any, without the GIL."""

import numpy as np
from numba import njit

from gpu.cpu_kernels.vectors import add, add_exponents, larger, multiply_add, smaller, spread, subtract

MOST_EXPONENT = np.float32(126.0)
# Added to a small number it leaves the nearest integer in the low bits: of 1.5 * 2 ** 23 these are zero.
ROUNDER = np.float32(1.5 * 2**23)
ONE = np.float32(1)
# 2 ** x for x in -0.5..0.5 to 5e-6, a thousandth of what bf16 rounds away; of 0 it is 1. Weighted least squares.
EXP2 = tuple(np.float32(value) for value in (0.69312419, 0.24024099, 0.05590642, 0.00958285))


@njit(cache=True)
def exp2_to_126(x):
    """2 ** x, of numbers up to 126; below -126 as of -126: beside any share that rounds away, or is all that counts."""
    x = larger(x, spread(-MOST_EXPONENT))
    whole = add(x, spread(ROUNDER))
    part = subtract(x, subtract(whole, spread(ROUNDER)))
    value = multiply_add(spread(EXP2[3]), part, spread(EXP2[2]))
    value = multiply_add(value, part, spread(EXP2[1]))
    value = multiply_add(value, part, spread(EXP2[0]))
    return add_exponents(multiply_add(value, part, spread(ONE)), whole)


@njit(cache=True)
def exp2(x):
    """2 ** x; beyond -126..126 as of those."""
    return exp2_to_126(smaller(x, spread(MOST_EXPONENT)))
