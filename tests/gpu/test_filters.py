"""What torch's filters keep is what a plain float64 reading of top_k, top_p and min_p keeps, as sums are rounded."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from gpu.sampling_rules import SHORTLIST, SORTED_WHOLE, WEIGHT_BITS, Filters, needed_of, slope_of, weigh
from tests.gpu.filter_cases import FilterCase, assert_is_what_is_asked, filter_cases

CASES = (
    FilterCase((), top_k=1),
    FilterCase((), top_k=7),
    FilterCase((), top_p=0.8),
    FilterCase((), top_p=1e-6),
    FilterCase((), min_p=0.1),
    FilterCase((), top_k=SHORTLIST),
    FilterCase((), top_k=300, top_p=0.5),
    FilterCase((), top_k=20, top_p=0.95, min_p=0.05),
    FilterCase((), top_k=4000, top_p=0.999, temperature=0.5),
    FilterCase((), top_p=0.9, min_p=0.3),
)


def kept_of(case: FilterCase) -> set[int]:
    row = case.row
    return set((row >= case.filters.lowest_kept(row))[0].nonzero().flatten().tolist())


@given(filter_cases())
def test_what_is_kept_is_what_is_asked(case: FilterCase) -> None:
    assert_is_what_is_asked(case, kept_of(case))


@pytest.mark.parametrize("vocab", [SHORTLIST - 1, SORTED_WHOLE + 1000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])  # flat: a shortlist is too short; peaked: it is enough
def test_large_vocabularies_are_filtered_as_small_ones(vocab: int, scale: float) -> None:
    rows = np.random.default_rng(1).standard_normal((len(CASES), vocab)).astype(np.float32) * np.float32(scale)
    for case, row in zip(CASES, rows, strict=True):
        whole = replace(case, logits=tuple(row.tolist()))
        assert_is_what_is_asked(whole, kept_of(whole))


def test_rows_are_filtered_together_as_alone() -> None:
    rows = torch.randn(len(CASES), SORTED_WHOLE + 500, generator=torch.Generator().manual_seed(2)) * 2
    each = [replace(case, logits=tuple(row.tolist())) for case, row in zip(CASES, rows, strict=True)]
    columns = [[getattr(case.filters, name) for case in each] for name in ("top_k", "top_p", "slope", "least")]
    limits = Filters(*(torch.cat(column) for column in columns)).lowest_kept(rows)
    assert limits.flatten().tolist() == [case.filters.lowest_kept(case.row).item() for case in each]


def test_the_sum_of_a_shortlist_counts_ties_behind_it() -> None:
    """The 200 largest tie with 4,800 others: all are kept by top_k, and half of all by mass are all of them."""
    case = FilterCase((1.0,) * (SORTED_WHOLE + 904), top_k=200, top_p=0.5)
    assert len(kept_of(case)) == SORTED_WHOLE + 904


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_weights_are_exponentials(temperature: float) -> None:
    logits = torch.linspace(-30 * temperature, 0, 5000).unsqueeze(0)
    slope = torch.tensor([[slope_of(temperature)]])
    weights = weigh(logits, torch.zeros(1, 1), slope).double() * 2.0**-WEIGHT_BITS
    want = (logits.double() / temperature).exp()
    assert ((weights - want).abs() <= 3e-6 * want + 2.0**-WEIGHT_BITS).all()
    assert weigh(torch.tensor([[0.0, -math.inf]]), torch.zeros(1, 1), slope).tolist() == [[1 << WEIGHT_BITS, 0]]


def test_some_weight_is_always_needed() -> None:
    total = torch.tensor([[10], [1 << 58]])
    assert needed_of(total, torch.tensor([[1e-30], [0.5]])).flatten().tolist() == [1, 1 << 57]
