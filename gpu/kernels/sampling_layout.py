"""What sampling's kernels share: where a row lies, what its slot asks for, and how logits are read: @triton.jit.

Thread: engine.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu.sampling_slots import ADJUSTED as _ADJUSTED
from gpu.sampling_slots import Factor, Feature, Number

SEGMENT = tl.constexpr(128)  # tokens
NOISE, FILTERS, PENALTIES = (tl.constexpr(int(f)) for f in (Feature.NOISE, Feature.FILTERS, Feature.PENALTIES))
BIAS, MIN_TOKENS = tl.constexpr(int(Feature.BIAS)), tl.constexpr(int(Feature.MIN_TOKENS))
LOGPROBS, ADJUSTED = tl.constexpr(int(Feature.LOGPROBS)), tl.constexpr(int(_ADJUSTED))
FEATURES, TOP_K, SEED, FREE_FROM, NUM_BIASES, NUM_STOP_IDS = (tl.constexpr(int(n)) for n in Number)
INVERSE, SLOPE, TOP_P, LEAST, REPETITION, PRESENCE, FREQUENCY = (tl.constexpr(int(f)) for f in Factor)
NUM_NUMBERS, NUM_FACTORS = tl.constexpr(len(Number)), tl.constexpr(len(Factor))
NUM_LOGPROBS = tl.constexpr(3)  # of a row: see sampler.DrawRows
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MINUS_INFINITY = tl.constexpr(float("-inf"))


class Row(NamedTuple):
    """A row of logits, and what its slot asks for.

    Args:
        logits: [vocab], as the model gives them.
        scratch: float32 [vocab]: adjusted, where the slot asks for it.
        maxima: float32 [segments], of what is drawn from.
        numbers, factors: [Number], [Factor], of the slot.
        features: Feature's bits, of the slot.
        position: of the token to draw.
        vocab_size: tokens.
    """

    logits: Any
    scratch: Any
    maxima: Any
    numbers: Any
    factors: Any
    features: Any
    position: Any
    vocab_size: Any


@triton.jit
def load_logits(row, tokens, mask):
    """What is drawn from, as float32; -inf where masked."""
    if (row.features & ADJUSTED) != 0:
        value = tl.load(row.scratch + tokens, mask=mask, other=MINUS_INFINITY)
    else:
        value = tl.load(row.logits + tokens, mask=mask, other=MINUS_INFINITY).to(tl.float32)
    return value
