"""Each way of sampling against a straightforward reference, and independence of rows and neighbours."""

import math

import numpy as np
import pytest
import torch

from core.plan import SequenceStart
from core.types import BANNED, SamplingParams
from gpu.attention import IntArray
from gpu.sampler import Masked, Sampled, Sampler, likeliest_at_once
from tests.gpu.sampling_cases import (
    PROMPT,
    FilterCase,
    assert_sampled_in_proportion,
    make_sampler,
    noise,
    sample_steps,
)

VOCAB = 50
GREEDY = {"temperature": 0.0}
LOGITS = tuple(noise(VOCAB, scale=2.0).tolist())


def sample(sampler: Sampler, logits: torch.Tensor, position: int = 3) -> Sampled:
    return sampler.sample(logits, np.arange(len(logits)), np.full(len(logits), position))


@pytest.mark.parametrize(
    "case",
    [
        FilterCase(LOGITS, temperature=0.5),
        FilterCase(LOGITS, temperature=1.7),
        FilterCase(LOGITS, top_k=1),
        FilterCase(LOGITS, top_p=0.8),
        FilterCase(LOGITS, min_p=0.1),
        FilterCase(LOGITS, top_k=20, top_p=0.95, min_p=0.05),
        FilterCase((3.0, 2.0, 2.0, 1.0), top_k=2),  # those tied with the last one kept are kept
    ],
    ids=lambda case: str(case.settings),
)
def test_tokens_are_sampled_with_the_probabilities_of_what_is_kept(case: FilterCase) -> None:
    assert_sampled_in_proportion(case)


def test_a_seeds_tokens_do_not_depend_on_row_slot_or_neighbours() -> None:
    """Alone, and in the last row of others with every feature; the greedy one takes the largest."""
    settings, logits = {"temperature": 1.3, "top_p": 0.95}, noise(5, VOCAB)
    others = ({"top_k": 3}, GREEDY, {"repetition_penalty": 1.5, "logit_bias": ((4, 9.0),)}, {"num_logprobs": 3})
    alone, crowd = make_sampler((settings,), VOCAB, seed=77), make_sampler((*others, settings), VOCAB, seed=77)
    for position in range(3, 40):
        together = sample(crowd, logits, position).token_ids
        assert together[4] == alone.sample(logits[4:], np.array([0]), np.array([position])).token_ids[0]
        assert together[1] == logits[1].argmax()


def test_positions_and_seeds_sample_different_tokens() -> None:
    steps = np.array(sample_steps(make_sampler(({}, {}), VOCAB), torch.zeros(2, VOCAB), 40))
    assert len(set(steps[:, 0].tolist())) > 15
    assert (steps[:, 0] != steps[:, 1]).sum() > 30


def test_penalties_change_the_logits_of_tokens_seen() -> None:
    """Prompt 1 2 3, output 3 4 4: repetition counts both, presence and frequency the output alone."""
    logits = noise(1, VOCAB)
    logits[0, :6] = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    settings = GREEDY | {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampler = make_sampler((settings,), VOCAB, token_ids=(*PROMPT, 3, 4, 4))
    adjusted = sampler._adjust(logits, np.array([0]), np.array([6]))
    assert adjusted[0, :6].tolist() == [1.0, 0.5, -2.0, 0.5 - 0.5 - 0.25, 0.5 - 0.5 - 0.5, 1.0]
    assert torch.equal(adjusted[0, 6:], logits[0, 6:])


def test_sampled_tokens_are_counted_until_the_slot_starts_anew() -> None:
    logits = torch.zeros(2, VOCAB)
    settings = GREEDY | {"presence_penalty": 1.0}
    sampler = make_sampler((settings, GREEDY), VOCAB, token_ids=PROMPT)
    assert sample_steps(sampler, logits, 4) == [[0, 0], [1, 0], [2, 0], [3, 0]]
    sampler.start(SequenceStart(0, PROMPT, 3, SamplingParams(max_tokens=9, **settings), seed=0, stop_ids=()))
    assert sample_steps(sampler, logits, 1) == [[0, 0]]


def test_logit_bias_is_added_and_stop_ids_are_forbidden_before_min_tokens() -> None:
    biased = (GREEDY | {"logit_bias": ((7, 1.0), (9, 2.0))}, GREEDY | {"logit_bias": ((0, -100.0),)})
    early = GREEDY | {"min_tokens": 2, "logit_bias": ((8, 5.0),)}
    sampler = make_sampler((*biased, early), VOCAB, stop_ids=(8, 0))
    assert sample_steps(sampler, torch.zeros(3, VOCAB), 4, first=3) == [[9, 1, 1], [9, 1, 1], [9, 1, 8], [9, 1, 8]]


def test_a_banned_token_is_no_part_of_top_n_sigma_and_comes_where_a_grammar_allows_nothing_else() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0, 3.0, *[0.0] * 60]])
    sampler = make_sampler(({"top_n_sigma": 1.0, "logit_bias": ((0, BANNED),)},), 64)
    assert {token for (token,) in sample_steps(sampler, logits, 40)} == {3}  # the deviation is 0.4, and not 6e28
    only = Masked(np.array([0]), np.array([[1, 0]], np.int32))
    for settings in (GREEDY, {}):
        sampler = make_sampler((settings | {"logit_bias": ((0, BANNED),)},), 64)
        assert sampler.sample(logits, np.array([0]), np.array([3]), only).token_ids.tolist() == [0]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = noise(3, VOCAB)
    settings = {"temperature": 0.1, "logit_bias": ((5, 100.0),), "num_logprobs": 2}
    requested = sample(make_sampler(({}, settings, {"num_logprobs": 0}), VOCAB), logits).logprobs
    assert requested is not None
    sampled, top, top_ids = requested.find()
    want = logits[1].log_softmax(-1)
    assert (requested.rows.tolist(), requested.num_top) == ([1, 2], [2, 0])
    assert torch.allclose(sampled[0], want[5])
    assert torch.allclose(top[0], want.topk(2).values)
    assert torch.equal(top_ids[0], want.topk(2).indices)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(bad: float) -> None:
    settings = ({"top_p": 0.9}, {"top_p": 0.9, "num_logprobs": 1}, {"top_p": 0.9})
    logits = noise(3, VOCAB)
    want = sample(make_sampler(settings, VOCAB), logits).token_ids
    logits[1, 7] = bad
    found = sample(make_sampler(settings, VOCAB), logits)
    assert found.is_finite.tolist() == [True, False, True]
    assert found.token_ids[[0, 2]].tolist() == want[[0, 2]].tolist()


def test_the_logits_given_are_not_changed() -> None:
    logits = noise(2, VOCAB)
    before = logits.clone()
    sample(make_sampler(({"top_k": 3, "repetition_penalty": 2.0}, {"logit_bias": ((1, 3.0),)}), VOCAB), logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("rare", [{"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5}])
def test_a_rare_sampler_costs_no_call_and_a_step_without_one_is_the_same_call(
    rare: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, list[int]]] = []

    def kernel(logits: torch.Tensor, slots: IntArray, _: IntArray, masked: object) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((logits.data_ptr(), slots.tolist()))
        assert masked is None
        return torch.full((len(slots),), 7), torch.ones(len(slots), dtype=torch.bool)

    sampler = make_sampler(({}, rare, {"top_k": 5}), VOCAB, lambda _: kernel)
    monkeypatch.setattr(Sampler, "_sample_rows", None)  # torch samples nothing
    logits, positions = noise(3, VOCAB), np.full(3, 5)
    for slots in ([0, 2], [0, 1, 2]):
        assert sampler.sample(logits[: len(slots)], np.array(slots), positions[: len(slots)]).token_ids.tolist()[0] == 7
    assert calls == [(logits.data_ptr(), [0, 2]), (logits.data_ptr(), [0, 1, 2])]


def test_a_device_lists_equal_tokens_by_id_as_a_cpu_does() -> None:
    found = noise(3, 400, scale=2.0).bfloat16().float()  # many are equal
    found[0, 7], found[0, 9], found[1] = 0.0, -0.0, -found[1].abs()
    found[2, 11] = float("-inf")
    for most in (1, 4, 399):
        want = found.sort(dim=1, descending=True, stable=True)
        values, ids = likeliest_at_once(found, most)
        assert torch.equal(values, want.values[:, :most])
        assert torch.equal(ids, want.indices[:, :most])
