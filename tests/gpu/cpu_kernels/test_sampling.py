"""The kernel draws what torch draws, to the last bit, although it looks at little of a row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.cpu_kernels import sampling
from gpu.cpu_kernels.sampling import RowSampler
from gpu.sampler import Sampler
from gpu.sampling_rules import gumbel_noise
from tests.gpu.filter_cases import FilterCase, filter_cases
from tests.gpu.test_sampler import assert_distributed_as

CPU = torch.device("cpu")
STOP_IDS = (5, 6)
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 3000, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "logit_bias": ((4, 8.0), (40, 9.0), (5, 20.0)), "min_tokens": 9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logit_bias": ((2, 9.0), (5, 10.0)), "min_tokens": 4},
    {"temperature": 1e-40, "top_p": 0.5},
)


def make_sampler(asked: tuple[dict[str, Any], ...], vocab: int, uses_kernel: bool) -> Sampler:
    sampler = Sampler(len(asked), vocab, CPU, RowSampler if uses_kernel else None)
    for slot, fields in enumerate(asked):
        params = SamplingParams(max_tokens=64, **fields)
        sampler.start(SequenceStart(slot, (1, 2, 3, 3, 9), 3, params, seed=2**64 - 1 - slot, stop_ids=STOP_IDS))
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, num_steps: int) -> list[list[int]]:
    slots = np.arange(len(logits))
    return [
        sampler.sample(logits, slots, np.full(len(logits), 5 + step)).token_ids.tolist() for step in range(num_steps)
    ]


@pytest.mark.parametrize("vocab", [50, 5_003])  # less than a segment; segments and a rest
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_a_sampler_draws_the_same_tokens_with_it(vocab: int, spread: float) -> None:
    """However many threads share the rows."""
    logits = torch.randn(len(ASKED), vocab, generator=torch.Generator().manual_seed(2)) * spread
    before = logits.clone()
    by_torch = draw(make_sampler(ASKED, vocab, False), logits, 25)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert draw(make_sampler(ASKED, vocab, True), logits, 25) == by_torch
    assert torch.equal(logits, before)
    assert spread > 1 or len({row[0] for row in by_torch}) > 10


def test_seen_tokens_and_their_list_grow_alike() -> None:
    """A row with penalties draws many different tokens, and later one that it has drawn."""
    asked: tuple[dict[str, Any], ...] = ({"temperature": 3.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},)
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    by_torch, by_kernel = (make_sampler(asked, 300, uses_kernel) for uses_kernel in (False, True))
    assert draw(by_torch, logits, 64) == draw(by_kernel, logits, 64)
    seen, wanted = by_kernel._asked.seen, by_torch._asked.seen
    assert seen is not None
    assert wanted is not None
    assert torch.equal(seen, wanted)
    num_known = by_kernel._asked.addresses[0, sampling._NUM_KNOWN]
    assert sorted(by_kernel._asked.known_ids[0][:num_known].tolist()) == seen[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("fields", [{"temperature": 0.7}, {"top_k": 20, "top_p": 0.95, "min_p": 0.05}], ids=str)
def test_tokens_are_drawn_in_proportion(fields: dict[str, Any]) -> None:
    """8,000 positions of one seed, against the softmax of what is kept."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 2
    sampler = make_sampler((fields,), 60, uses_kernel=True)
    drawn = sampler.sample(logits.expand(8_000, -1), np.zeros(8_000, dtype=np.int64), np.arange(5, 8_005)).token_ids
    case = FilterCase(tuple(logits[0].tolist()), **fields)
    kept = logits[0] >= case.filters.lowest_kept(logits)[0]
    probs = (logits[0] / case.temperature).masked_fill(~kept, float("-inf")).softmax(-1)
    assert_distributed_as(torch.bincount(drawn, minlength=60), probs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 200, 5_002])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(bad: float, at: int) -> None:
    asked = ({"top_p": 0.9},) * 3
    logits = torch.randn(3, 5_003, generator=torch.Generator().manual_seed(4))
    want = draw(make_sampler(asked, 5_003, True), logits, 1)[0]
    broken = logits.clone()
    broken[1, at] = bad
    drawn = make_sampler(asked, 5_003, True).sample(broken, np.arange(3), np.full(3, 5))
    assert drawn.is_finite.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == [want[0], want[2]]


@given(filter_cases())
def test_nothing_is_drawn_that_torch_drops_and_each_draw_is_torchs(case: FilterCase) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=case.temperature, top_k=case.top_k, top_p=case.top_p, min_p=case.min_p
    )
    row, drawn = case.row, []
    if not row.isfinite().all():
        row = row.masked_fill(row == float("-inf"), -1e30)  # a model's are finite; -inf is what min_tokens forbids
    for choice in (None, RowSampler):
        sampler = Sampler(1, len(case.logits), CPU, choice)
        sampler.start(SequenceStart(0, (0,), 1, params, seed=1, stop_ids=()))
        rows = row.expand(16, -1).contiguous()
        drawn.append(sampler.sample(rows, np.zeros(16, dtype=np.int64), np.arange(1, 17)).token_ids.tolist())
    assert drawn[0] == drawn[1]


NUMBERS = st.sampled_from([0.0, -0.0, 1.5, -3.25, 7.0, 7.5, -1e-30]) | st.floats(width=32, allow_nan=False)


@given(st.lists(NUMBERS, min_size=1), st.data())
def test_the_search_finds_the_largest_number_that_enough_reach(numbers: list[float], data: st.DataObject) -> None:
    values = np.array(numbers, dtype=np.float32) + np.float32(0)
    weights = np.array(data.draw(st.lists(st.integers(0, 1 << 40), min_size=len(numbers), max_size=len(numbers))))
    weights[0] += 1
    needed = data.draw(st.integers(1, int(weights.sum())))
    want = max(value for value in values if weights[values >= value].sum() >= needed)
    room, bins = np.empty(len(values), np.uint32), np.empty(sampling.NUM_BINS, np.int64)
    assert sampling.largest_reaching(values, weights.copy(), len(values), needed, room, bins) == want


@pytest.mark.bits
def test_noise_is_torchs_to_the_last_bit() -> None:
    key, token_ids = 2**63 + 12345, np.arange(20_000)
    uniforms = [sampling._uniform(np.uint64(key), token) for token in token_ids]
    noise = np.array([sampling._noise(np.float32(uniform)) for uniform in uniforms], dtype=np.float32)
    want = gumbel_noise(torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64)), torch.from_numpy(token_ids))
    assert np.array_equal(noise, want.numpy())
