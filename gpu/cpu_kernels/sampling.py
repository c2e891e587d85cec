"""Draws by Gumbel noise without computing most of it: the kernel. Thread: any, without the GIL.

The noise is -log(E) of an exponential number E, which is at least the uniform number u it is made of: a token can only
win if its logit - log(u) is above the best so far, and u's exponent bounds that without a logarithm. Few tokens of a
vocabulary pass, and only theirs is computed (noise.py says what).
"""

import math

import numpy as np
from numba import njit

from gpu.noise import GOLDEN, LARGEST_UNIFORM, MIX_1, MIX_2, UNIFORM_BITS

CHUNK = 256  # tokens bounded at a time
LN_2 = np.float32(math.log(2))
SLACK = np.float32(1e-3)  # beyond what rounding makes of a bound
MINUS_INFINITY = np.float32(-np.inf)
HALF = np.float32(0.5)
UNIT = np.float32(2.0**-UNIFORM_BITS)
LARGEST = np.float32(LARGEST_UNIFORM)
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_30, _27, _31, _REST = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(64 - UNIFORM_BITS)
_EXPONENT = np.uint32(23)


@njit(cache=True, nogil=True)
def _bound_chunk(logits, key, first, uniforms, bits, bounds):
    """Uniform numbers of some tokens, and what their logits with noise stay below; returns the largest bound."""
    top = MINUS_INFINITY
    for index in range(len(logits)):
        x = key + np.uint64(first + index) * _GOLDEN
        x = (x ^ (x >> _30)) * _MIX_1
        x = (x ^ (x >> _27)) * _MIX_2
        x = x ^ (x >> _31)
        uniforms[index] = min((np.float32(np.int64(x >> _REST)) + HALF) * UNIT, LARGEST)
    for index in range(len(logits)):
        exponent = np.float32(127) - np.float32(np.int32(bits[index] >> _EXPONENT))
        bounds[index] = logits[index] + exponent * LN_2 + SLACK
        top = max(top, bounds[index])
    return top


# Compiled when it is imported, as the others are: before weights come, and not in the first step.
@njit("void(float32[:, ::1], uint64[::1], int64[::1])", cache=True, nogil=True)
def gumbel_argmax(logits, keys, out):
    """The token of each row whose logit with noise is the largest.

    Args:
        logits: float32 [rows, vocab]; -inf: never drawn.
        keys: uint64 [rows], of row_keys.
        out: int64 [rows], written.
    """
    uniforms, bounds = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    bits = uniforms.view(np.uint32)
    for row in range(len(logits)):
        best, token = MINUS_INFINITY, 0
        for first in range(0, logits.shape[1], CHUNK):
            some = logits[row, first : first + CHUNK]
            if _bound_chunk(some, keys[row], first, uniforms, bits, bounds) <= best:
                continue
            for index in range(len(some)):
                if bounds[index] > best:
                    value = some[index] - np.float32(math.log(-math.log1p(-uniforms[index])))
                    if value > best:
                        best, token = value, first + index
        out[row] = token
