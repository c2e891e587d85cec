"""2 ** x of sixteen numbers at once. Thread: any, without the GIL."""

import math

import numpy as np
from numba import njit

from gpu.cpu_kernels.vectors import (
    larger,
    multiply,
    multiply_add,
    power_of_two,
    rounded,
    smaller,
    spread,
    subtract,
)

MOST_EXPONENT = np.float32(126.0)
# 2 ** x for x in -0.5..0.5, to 2e-7: Taylor's, ln(2) ** n / n!
EXP2 = tuple(np.float32(math.log(2) ** n / math.factorial(n)) for n in range(7))


@njit(cache=True)
def exp2(x):
    """2 ** x; beyond -126..126 as of those: rounds away, or is all that counts, beside any share or 1."""
    x = smaller(larger(x, spread(-MOST_EXPONENT)), spread(MOST_EXPONENT))
    whole = rounded(x)
    part = subtract(x, whole)
    value = spread(EXP2[6])
    value = multiply_add(value, part, spread(EXP2[5]))
    value = multiply_add(value, part, spread(EXP2[4]))
    value = multiply_add(value, part, spread(EXP2[3]))
    value = multiply_add(value, part, spread(EXP2[2]))
    value = multiply_add(value, part, spread(EXP2[1]))
    value = multiply_add(value, part, spread(EXP2[0]))
    return multiply(value, power_of_two(whole))
