"""Filters keep what a plain float64 reading of them keeps; the noise is SplitMix64's, and Gumbel distributed."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpu.sampling_rules import (
    GOLDEN,
    LEAST_ALLOWED,
    MIX_1,
    MIX_2,
    MOST_NOISE,
    WEIGHT_BITS,
    RareFilters,
    gumbel_noise,
    kept_range,
    lowest_kept,
    needed_of,
    row_keys,
    slope_of,
    weigh,
)
from tests.gpu.sampling_cases import FilterCase, assert_kept_is_right, filter_cases, make_sampler, noise

CASES = (
    FilterCase((), top_k=7),
    FilterCase((), top_p=0.8),
    FilterCase((), top_p=1e-6),
    FilterCase((), min_p=0.1),
    FilterCase((), top_k=300, top_p=0.5),
    FilterCase((), top_k=20, top_p=0.95, min_p=0.05),
    FilterCase((), top_k=4000, top_p=0.999, temperature=0.5),
    FilterCase((), top_p=0.9, min_p=0.3),
)
WORD = (1 << 64) - 1
EULER = 0.5772156649


@given(filter_cases())
def test_what_is_kept_is_what_is_asked(case: FilterCase) -> None:
    assert_kept_is_right(case, case.kept)


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_rows_of_a_large_vocabulary_are_filtered_together_as_alone(scale: float) -> None:
    rows = noise(len(CASES), 5000, scale=scale)
    each = [replace(case, logits=tuple(row.tolist())) for case, row in zip(CASES, rows, strict=True)]
    columns = zip(*(case.filters for case in each), strict=True)
    limits = lowest_kept(rows, *(torch.cat(column) for column in columns))
    for case, row, limit in zip(each, rows, limits, strict=True):
        assert case.kept == set((row >= limit).nonzero().flatten().tolist())
        assert_kept_is_right(case, case.kept)


RARE = st.builds(
    RareFilters,
    sigmas=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    xtc_threshold=st.sampled_from([None, 0.0, 0.01, 0.1, 0.3]),
)


def kept_by_llama(case: FilterCase, rare: RareFilters) -> NDArray[np.bool_]:
    """llama.cpp's chain in float64, without its temperature; ties are kept as here."""
    logits = np.array(case.logits)

    def probs() -> NDArray[np.float64]:
        weights = np.exp(logits - logits.max())
        found: NDArray[np.float64] = weights / weights.sum()
        return found

    if rare.sigmas > 0:
        logits[logits < logits.max() - rare.sigmas * logits.std()] = -np.inf
    if 0 < case.top_k < len(logits):
        logits[logits < np.sort(logits)[-case.top_k]] = -np.inf
    if rare.typical_p < 1:
        p = probs()
        surprise = -np.log(p, where=p > 0, out=np.full(len(p), -np.inf))
        distance = np.abs(surprise - (p[p > 0] * surprise[p > 0]).sum())
        order = np.argsort(distance, kind="stable")
        last = order[min(int(np.searchsorted(np.cumsum(p[order]), rare.typical_p, side="right")), (p > 0).sum() - 1)]
        logits[distance > distance[last]] = -np.inf
    if case.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        last = order[np.searchsorted(np.cumsum(probs()[order]), case.top_p)]
        logits[logits < logits[last]] = -np.inf
    if case.min_p > 0:
        logits[logits < logits.max() + np.log(case.min_p)] = -np.inf
    if rare.xtc_threshold is not None:
        p = probs()
        likely = logits[(p >= rare.xtc_threshold) & (p > 0)]
        if len(likely) > 1:
            logits[logits > likely.min()] = -np.inf
    kept: NDArray[np.bool_] = logits > -np.inf
    return kept


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([5, 60, 300]),
    st.sampled_from([0, 3, 40]),
    st.booleans(),
    st.sampled_from([0.0, 0.05]),
    RARE,
)
def test_rare_filters_keep_what_llama_servers_keep(
    seed: int, size: int, top_k: int, has_top_p: bool, min_p: float, rare: RareFilters
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)
    case = FilterCase(tuple(logits.tolist()), top_k=top_k, top_p=0.875 if has_top_p else 1.0, min_p=min_p)
    top_k_row, *filters = case.filters
    low, high = kept_range(case.row, top_k_row, (filters[0], filters[1], filters[2]), rare)
    kept = ((case.row >= low) & (case.row <= high))[0].numpy()
    assert kept.tolist() == kept_by_llama(case, rare).tolist()


@pytest.mark.parametrize(
    "rare", [RareFilters(1.0, 1.0, None), RareFilters(-1.0, 0.5, None), RareFilters(-1.0, 1.0, 0.1)]
)
def test_a_row_of_which_nothing_may_be_sampled_breaks_no_step(rare: RareFilters) -> None:
    """A grammar allows one token, which is a stop id before min_tokens."""
    row = torch.full((1, 40), LEAST_ALLOWED * 10)
    row[0, 7] = float("-inf")
    top_k, *filters = FilterCase((0.0,) * 40, top_k=0).filters
    low, high = kept_range(row, top_k, (filters[0], filters[1], filters[2]), rare)
    assert ((row >= low) & (row <= high)).any()


@pytest.mark.parametrize("probability", [0.2, 0.9])
def test_xtc_applies_as_often_as_it_is_asked(probability: float) -> None:
    """To the likelier half of two tokens that are both above its threshold."""
    settings = {"xtc_probability": probability, "xtc_threshold": 0.2, "temperature": 0.01}
    sampler = make_sampler((settings,), 3, seed=5)
    count = 4_000
    logits, positions = torch.tensor([[0.5, 0.0, -9.0]]).repeat(count, 1), np.arange(9, 9 + count)
    tokens = sampler.sample(logits, np.zeros(count, np.int64), positions).token_ids
    assert set(tokens.tolist()) == {0, 1}
    assert abs(float((tokens == 1).double().mean()) - probability) < 5 * math.sqrt(0.25 / count)


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


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * MIX_1) & WORD
    x = ((x ^ (x >> 27)) * MIX_2) & WORD
    return x ^ (x >> 31)


def test_keys_and_noise_are_those_of_splitmix64() -> None:
    seed, position, token_id = WORD - 5, 77, 4321
    key = mix((seed + mix(position * GOLDEN & WORD)) & WORD)
    keys = row_keys(np.array([seed], dtype=np.uint64), np.array([position]))
    assert keys.tolist() == [key]
    bits = mix((key + token_id * GOLDEN) & WORD) >> 24
    want = -np.log(-np.log1p(-(bits + 0.5) / 2**40))
    got = gumbel_noise(torch.from_numpy(keys.view(np.int64)), torch.tensor([token_id]))
    assert abs(got.item() - want) < 1e-5


def test_noise_has_the_mean_variance_and_tail_of_gumbels() -> None:
    sampled = gumbel_noise(torch.tensor([[12345]]), torch.arange(1_000_000))
    assert sampled.isfinite().all()
    assert sampled.max() < MOST_NOISE
    assert abs(sampled.mean().item() - EULER) < 0.005
    assert abs(sampled.var().item() - np.pi**2 / 6) < 0.01
    assert abs((sampled > 8).float().mean().item() - (1 - np.exp(-np.exp(-8)))) < 1e-4


def test_neighbouring_seeds_and_positions_share_no_noise() -> None:
    seeds, positions = np.repeat(np.arange(20, dtype=np.uint64), 20), np.tile(np.arange(20), 20)
    keys = torch.from_numpy(row_keys(seeds, positions).view(np.int64)).unsqueeze(1)
    correlation = torch.corrcoef(gumbel_noise(keys, torch.arange(500))).fill_diagonal_(0)
    assert correlation.abs().max() < 0.27  # six standard deviations of 1 / sqrt(500)
