"""numba's kernel samples what torch samples, to the last bit, although it looks at little of a row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.types import BANNED
from gpu.cpu_kernels.sampling import RowSampler, largest_reaching, noise_of, uniform_of
from gpu.sampling_rules import gumbel_noise
from tests.gpu.sampling_cases import (
    SETTINGS,
    Fields,
    FilterCase,
    assert_sampled_in_proportion,
    filter_cases,
    make_sampler,
    noise,
    sample_steps,
)

MORE_SETTINGS: tuple[Fields, ...] = (
    *SETTINGS,
    {"temperature": 2.0, "top_k": 3000, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": ((2, 9.0), (5, 10.0)), "min_tokens": 4},
    {"temperature": 1e-40, "top_p": 0.5},
    {"temperature": 3.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
    {"temperature": 1.5, "typical_p": 0.7, "top_k": 50, "num_logprobs": 1},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.01, "frequency_penalty": 2.0},
    {"temperature": 1.0, "top_n_sigma": 2.0, "logit_bias": ((4, 8.0), (5, 20.0), (6, BANNED)), "min_tokens": 9},
)


@pytest.mark.parametrize("vocab", [50, 5_003])  # less than a segment; segments and a rest
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_it_samples_the_same_tokens(vocab: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads share the rows."""
    logits = noise(len(MORE_SETTINGS), vocab, scale=scale)
    before, by_torch = logits.clone(), make_sampler(MORE_SETTINGS, vocab)
    want = sample_steps(by_torch, logits, 25)
    for num_threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        by_kernel = make_sampler(MORE_SETTINGS, vocab, RowSampler)
        assert sample_steps(by_kernel, logits, 25) == want
        assert torch.equal(by_kernel._settings.write_seen(), by_torch._settings.write_seen())
    assert torch.equal(logits, before)
    assert scale > 1 or len({row[1] for row in want}) > 10


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"top_k": 20, "top_p": 0.95, "min_p": 0.05}], ids=str)
def test_tokens_are_sampled_in_proportion(settings: Fields) -> None:
    assert_sampled_in_proportion(FilterCase(tuple(noise(60, scale=2.0).tolist()), **settings), RowSampler)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 200, 5_002])
@pytest.mark.parametrize(
    "asked", [{"top_p": 0.9}, {"typical_p": 0.5, "top_n_sigma": 1.0, "xtc_probability": 1.0}], ids=str
)
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(bad: float, at: int, asked: Fields) -> None:
    settings, logits = (asked,) * 3, noise(3, 5_003)
    want = sample_steps(make_sampler(settings, 5_003, RowSampler), logits, 1)[0]
    logits[1, at] = bad
    found = make_sampler(settings, 5_003, RowSampler).sample(logits, np.arange(3), np.full(3, 5))
    assert found.is_finite.tolist() == [True, False, True]
    assert found.token_ids[[0, 2]].tolist() == [want[0], want[2]]


RARE = st.fixed_dictionaries(
    {
        "typical_p": st.sampled_from([1.0, 0.999999, 0.9, 0.5, 1e-9]),
        "top_n_sigma": st.sampled_from([-1.0, 1e-3, 0.5, 1.0, 3.0]),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.0, 1e-12, 0.01, 0.1, 0.5]),
    }
)


@given(filter_cases(), st.just({}) | RARE)
def test_what_filters_keep_is_sampled_as_by_torch(case: FilterCase, rare: Fields) -> None:
    row, settings = case.row, (case.settings | rare,) * 16
    if not row.isfinite().all():
        row = row.masked_fill(row == float("-inf"), -1e30)  # a model's are finite; -inf is what min_tokens forbids
    rows, by_torch, by_kernel = row.expand(16, -1).contiguous(), settings, settings
    size, start = len(case.logits), {"token_ids": (0,), "num_prompt_tokens": 1, "stop_ids": ()}
    found = sample_steps(make_sampler(by_kernel, size, RowSampler, **start), rows, 1)
    assert found == sample_steps(make_sampler(by_torch, size, **start), rows, 1)


NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -3.25, 7.0, 7.5, -1e-30]) | st.floats(width=32, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1), st.data())
def test_the_search_finds_the_largest_number_that_enough_reach(numbers: list[float], data: st.DataObject) -> None:
    values = np.array(numbers, dtype=np.float32) + np.float32(0)
    weights = np.array(data.draw(st.lists(st.integers(0, 1 << 40), min_size=len(numbers), max_size=len(numbers))))
    weights[0] += 1
    needed = data.draw(st.integers(1, int(weights.sum())))
    want = max(value for value in values if weights[values >= value].sum() >= needed)
    assert largest_reaching(values, weights, needed) == want


def test_noise_is_torchs_to_the_last_bit() -> None:
    key, token_ids = 2**63 + 12345, np.arange(20_000)
    found = np.array([noise_of(np.float32(uniform_of(np.uint64(key), token))) for token in token_ids], dtype=np.float32)
    want = gumbel_noise(torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64)), torch.from_numpy(token_ids))
    assert np.array_equal(found, want.numpy())
