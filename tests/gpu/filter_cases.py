"""Rows of logits and what may be asked of them, and an oracle in float64: for every way in which rows are filtered."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from gpu.sampling_rules import Filters, least_of, slope_of

MASS_ERROR = 1e-6  # a weight is off by 2e-7 of it and by 2 ** -40 of the largest


@dataclass(frozen=True)
class FilterCase:
    """One row, and what is asked of it."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def row(self) -> Tensor:
        return torch.tensor([self.logits], dtype=torch.float32)

    @property
    def filters(self) -> Filters:
        size = len(self.logits)
        return Filters(
            torch.tensor([self.top_k if 0 < self.top_k < size else size]),
            torch.tensor([[self.top_p if self.top_p < 1 else np.inf]], dtype=torch.float32),
            torch.tensor([[slope_of(self.temperature)]], dtype=torch.float32),
            torch.tensor([[least_of(self.min_p, self.temperature)]], dtype=torch.float32),
        )


# Few different values: ties. -inf: forbidden. Large: what is left is one token.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("-inf"), 30.0, 1e-30]),
    st.floats(-20, 20, width=32),
    st.integers(-4, 4).map(float),
)


@st.composite
def filter_cases(draw: st.DrawFn) -> FilterCase:
    """Rows of any length up to some segments', with at least one finite number."""
    if draw(st.booleans()):
        size, seed = draw(st.integers(1, 700)), draw(st.integers(0, 2**32 - 1))
        scale = draw(st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]))
        logits = tuple((np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32).tolist())
    else:
        logits = tuple(draw(st.lists(VALUES, min_size=1, max_size=40)))
    if all(value == float("-inf") for value in logits):
        logits = (*logits[1:], 0.5)
    return FilterCase(
        logits,
        temperature=draw(st.sampled_from([0.01, 0.7, 1.0, 2.0, 100.0])),
        top_k=draw(st.one_of(st.integers(0, 8), st.integers(0, 800))),
        top_p=draw(st.one_of(st.sampled_from([1e-9, 0.5, 0.9, 0.999999, 1.0]), st.floats(2.0**-20, 1.0, width=32))),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-12, 0.05, 0.5, 1.0])),
    )


def assert_is_what_is_asked(case: FilterCase, kept: set[int]) -> None:
    """Whether these tokens are what top_k, then top_p, then min_p keep; at a boundary within MASS_ERROR of it."""
    logits = np.array(case.logits, dtype=np.float64)
    size, top = len(logits), logits.max()
    lowest = min(logits[list(kept)])
    assert kept == set(np.flatnonzero(logits >= lowest).tolist())  # the largest ones, with all that tie
    top_k = case.top_k if 0 < case.top_k < size else size
    limit_k = np.sort(logits)[::-1][top_k - 1]
    weights = np.where(logits >= limit_k, np.exp((logits - top) / np.float64(case.temperature)), 0)
    top_p = float(np.float32(case.top_p))
    least = top + case.temperature * np.log(case.min_p) if case.min_p > 0 else -np.inf

    def is_asked(value: float, slack: float) -> bool:
        """Whether a logit is kept, to a slack in its favour, or in its disfavour."""
        if value < limit_k:
            return False
        if top_p < 1 and weights[logits > value].sum() >= (top_p + slack) * weights.sum() and value < top:
            return False
        return value == top or value >= least - slack * max(1, abs(top), abs(least))

    assert is_asked(lowest, MASS_ERROR)
    dropped = logits[logits < lowest]
    assert not len(dropped) or not is_asked(dropped.max(), -MASS_ERROR)
