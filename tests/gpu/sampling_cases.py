"""Logits and sampling settings that every sampler is tried with, and an oracle in float64 of what filters keep."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.sampler import MakeSampler, Sampler
from gpu.sampling_rules import lowest_kept, min_p_offset_of, slope_of

CPU = torch.device("cpu")
Fields = dict[str, Any]
# One request each, of every feature; prompt and output: PROMPT and OUTPUT, stop ids 5 and 6.
SETTINGS: tuple[Fields, ...] = (
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 2, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "num_logprobs": 0},
    {"temperature": 2.0, "top_k": 400, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.3},
    {"temperature": 1.0, "min_p": 0.2, "logit_bias": ((4, 8.0), (40, 9.0), (5, 20.0)), "min_tokens": 9},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2, "top_k": 3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": ((2, 9.0),), "num_logprobs": 0},
)
PROMPT, OUTPUT, STOP_IDS = (1, 2, 3), (3, 9), (5, 6)
NEXT = len(PROMPT + OUTPUT)  # the position of the first token sampled


def make_sampler(settings: tuple[Fields, ...], vocab: int, kernel: MakeSampler | None = None, **start: Any) -> Sampler:
    """Slot i has the i-th settings. start: fields of SequenceStart instead of those above."""
    sampler = Sampler(len(settings), vocab, start.pop("device", CPU), kernel)
    fields: Fields = {"token_ids": PROMPT + OUTPUT, "num_prompt_tokens": len(PROMPT), "stop_ids": STOP_IDS, **start}
    for slot, each in enumerate(settings):
        params = SamplingParams(max_tokens=100, **each)
        sampler.start(SequenceStart(slot, sampling=params, **{"seed": 2**64 - 1 - slot, **fields}))
    return sampler


def noise(*shape: int, scale: float = 1.0, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def sample_steps(sampler: Sampler, logits: Tensor, num_steps: int, first: int = NEXT) -> list[list[int]]:
    """Token ids of each step, of all slots."""
    slots = np.arange(len(logits))
    return [
        sampler.sample(logits, slots, np.full(len(logits), first + step)).token_ids.tolist()
        for step in range(num_steps)
    ]


def assert_sampled_in_proportion(case: "FilterCase", kernel: MakeSampler | None = None, count: int = 8_000) -> None:
    """At so many positions of one seed: the softmax of what is kept, within five standard deviations for each token."""
    sampler = make_sampler((case.settings,), len(case.logits), kernel, seed=1000)
    slots, positions = np.zeros(count, dtype=np.int64), np.arange(NEXT, NEXT + count)
    token_ids = sampler.sample(case.row.expand(count, -1).contiguous(), slots, positions).token_ids
    dropped = [token for token in range(len(case.logits)) if token not in case.kept]
    probs = (case.row[0] / case.temperature).index_fill(0, torch.tensor(dropped).long(), float("-inf")).softmax(-1)
    counts = torch.bincount(token_ids, minlength=len(case.logits))
    assert counts[dropped].sum() == 0
    assert ((counts - count * probs).abs() <= 5 * (count * probs * (1 - probs)).sqrt() + 1).all()


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
    def settings(self) -> Fields:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @property
    def filters(self) -> tuple[Tensor, ...]:
        """What lowest_kept takes beside the logits."""
        size = len(self.logits)
        factors = (self.top_p, slope_of(self.temperature), min_p_offset_of(self.min_p, self.temperature))
        top_k = torch.tensor([[self.top_k if 0 < self.top_k < size else size]])
        return top_k, *(torch.tensor([[factor]], dtype=torch.float32) for factor in factors)

    @property
    def kept(self) -> set[int]:
        """Token ids, by torch."""
        return set((self.row >= lowest_kept(self.row, *self.filters))[0].nonzero().flatten().tolist())


# Few different values: ties. -inf: forbidden. Large: one token is left.
VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("-inf"), 30.0, 1e-30]),
    st.floats(-20, 20, width=32),
    st.integers(-4, 4).map(float),
)


@st.composite
def filter_cases(draw: st.DrawFn) -> FilterCase:
    """Rows of up to some segments, with at least one finite number."""
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


MASS_ERROR = 1e-6  # a weight is off by 2e-7 of it and by 2 ** -40 of the largest


def assert_kept_is_right(case: FilterCase, kept: set[int]) -> None:
    """Whether these tokens are what top-k, then top-p, then min-p keep; at a boundary within MASS_ERROR of it."""
    logits = np.array(case.logits, dtype=np.float64)
    size, top = len(logits), logits.max()
    lowest = min(logits[list(kept)])
    assert kept == set(np.flatnonzero(logits >= lowest).tolist())  # the largest ones, with all that tie
    top_k = case.top_k if 0 < case.top_k < size else size
    limit_k = np.sort(logits)[::-1][top_k - 1]
    weights = np.where(logits >= limit_k, np.exp((logits - top) / np.float64(case.temperature)), 0)
    top_p = float(np.float32(case.top_p))
    least = top + case.temperature * np.log(case.min_p) if case.min_p > 0 else -np.inf

    def is_kept(value: float, slack: float) -> bool:
        """With a slack in its favour, or in its disfavour."""
        if value < limit_k:
            return False
        if top_p < 1 and weights[logits > value].sum() >= (top_p + slack) * weights.sum() and value < top:
            return False
        return value == top or value >= least - slack * max(1, abs(top), abs(least))

    assert is_kept(lowest, MASS_ERROR)
    dropped = logits[logits < lowest]
    assert not len(dropped) or not is_kept(dropped.max(), -MASS_ERROR)
