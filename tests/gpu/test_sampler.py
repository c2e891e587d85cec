"""Each way of drawing against a straightforward reference, and independence of rows and neighbours."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.sampler import Number, Sampled, Sampler

VOCAB = 50
CPU = torch.device("cpu")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)


def make_sampler(*asked: SamplingParams, vocab: int = VOCAB, **start: Any) -> Sampler:
    """Slot i for the i-th request; seeds 1000 + i."""
    sampler = Sampler(len(asked), vocab, CPU)
    for slot, each in enumerate(asked):
        fields = {"token_ids": (1, 2, 3), "num_prompt_tokens": 3, "seed": 1000 + slot, "stop_ids": (), **start}
        sampler.start(SequenceStart(slot=slot, sampling=each, **fields))
    return sampler


def random_logits(rows: int, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * scale


def draw(sampler: Sampler, logits: torch.Tensor, position: int = 3) -> Sampled:
    rows = logits.shape[0]
    return sampler.sample(logits, np.arange(rows), np.full(rows, position))


def draw_many(asked: SamplingParams, logits: torch.Tensor, count: int) -> torch.Tensor:
    """Counts of each token over positions 3..3+count of one sequence: [vocab]."""
    sampler = make_sampler(asked, vocab=logits.shape[0])
    slots, positions = np.zeros(count, dtype=np.int64), np.arange(3, 3 + count)
    drawn = sampler.sample(logits.expand(count, -1), slots, positions)
    return torch.bincount(drawn.token_ids, minlength=logits.shape[0])


def reference_kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """What top_k, then top_p, then min_p keep, one token at a time."""
    ordered = sorted(range(len(logits)), key=lambda token: -logits[token].item())
    kept = ordered[: top_k or None]
    weights = {token: math.exp(logits[token].item() - logits[kept[0]].item()) for token in kept}
    total, mass, result = sum(weights.values()), 0.0, set()
    for token in kept:
        if mass >= top_p:
            break
        if weights[token] >= min_p:
            result.add(token)
        mass += weights[token] / total
    return result


def assert_distributed_as(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Within five standard deviations, each token."""
    total = int(counts.sum())
    deviation = (total * probs * (1 - probs)).sqrt()
    assert ((counts - total * probs).abs() <= 5 * deviation + 1).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_with_the_softmaxs_probabilities(temperature: float) -> None:
    logits = random_logits(1)[0]
    counts = draw_many(params(temperature=temperature), logits, 8_000)
    assert_distributed_as(counts, (logits / temperature).softmax(-1))


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_what_the_reference_keeps_and_its_proportions(filters: dict[str, Any]) -> None:
    logits = random_logits(1)[0]
    kept = torch.tensor(sorted(reference_kept(logits, **filters)))
    counts = draw_many(params(**filters), logits, 4_000)
    probs = torch.zeros(VOCAB).index_copy_(0, kept, logits[kept].softmax(-1))
    assert counts[probs == 0].sum() == 0
    assert_distributed_as(counts, probs)


def test_tokens_tied_with_the_last_kept_are_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 1.0])
    counts = draw_many(params(top_k=2), logits, 1000)
    assert (counts[:3] > 0).all()
    assert counts[3] == 0


def test_a_greedy_row_takes_the_largest_logit_beside_noisy_ones() -> None:
    logits = random_logits(3)
    sampler = make_sampler(params(temperature=1.0), params(temperature=0.0), params(temperature=1.0, top_p=0.5))
    assert draw(sampler, logits).token_ids[1] == logits[1].argmax()


def test_a_seeds_tokens_do_not_depend_on_row_slot_or_neighbours() -> None:
    """Alone, and in the last row of others with every feature."""
    asked = params(temperature=1.3, top_p=0.95)
    logits = random_logits(5)
    alone = make_sampler(asked, seed=77)
    others = [params(top_k=3), params(temperature=0.0, logit_bias=((4, 9.0),)), params(repetition_penalty=1.5)]
    crowd = make_sampler(*others, params(num_logprobs=3), asked)
    crowd.start(SequenceStart(4, (1, 2, 3), 3, asked, seed=77, stop_ids=()))
    for position in range(3, 40):
        by_itself = alone.sample(logits[4:], np.array([0]), np.array([position])).token_ids[0]
        assert draw(crowd, logits, position).token_ids[4] == by_itself


def test_positions_and_seeds_draw_different_tokens() -> None:
    logits = torch.zeros(2, VOCAB)
    sampler = make_sampler(params(), params())
    drawn = torch.stack([draw(sampler, logits, position).token_ids for position in range(3, 43)])  # [40, 2]
    assert drawn[:, 0].unique().numel() > 15
    assert (drawn[:, 0] != drawn[:, 1]).sum() > 30


def test_penalties_change_logits_of_what_was_said() -> None:
    """Prompt 1 2 3, output 3 4 4: repetition counts both, presence and frequency the output alone."""
    logits = random_logits(1)
    logits[0, :6] = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    asked = params(temperature=0.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = make_sampler(asked, token_ids=(1, 2, 3, 3, 4, 4))
    adjusted = sampler._adjust(logits, np.array([0]), np.array([6]), sampler._asked.numbers[:, Number.FEATURES])
    assert adjusted[0, :6].tolist() == [1.0, 0.5, -2.0, 0.5 - 0.5 - 0.25, 0.5 - 0.5 - 0.5, 1.0]
    assert torch.equal(adjusted[0, 6:], logits[0, 6:])


def test_drawn_tokens_are_counted_until_the_slot_starts_anew() -> None:
    logits = torch.zeros(2, VOCAB)
    asked = params(temperature=0.0, presence_penalty=1.0)
    sampler = make_sampler(asked, params(temperature=0.0))
    drawn = [draw(sampler, logits, position).token_ids.tolist() for position in range(3, 7)]
    assert drawn == [[0, 0], [1, 0], [2, 0], [3, 0]]
    sampler.start(SequenceStart(0, (1, 2, 3), 3, asked, seed=0, stop_ids=()))
    assert draw(sampler, logits).token_ids.tolist() == [0, 0]


def test_logit_bias_is_added() -> None:
    logits = torch.zeros(2, VOCAB)
    biased = params(temperature=0.0, logit_bias=((7, 1.0), (9, 2.0)))
    sampler = make_sampler(biased, params(temperature=0.0, logit_bias=((0, -100.0),)))
    assert draw(sampler, logits).token_ids.tolist() == [9, 1]


def test_stop_ids_are_not_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 5.0
    sampler = make_sampler(params(temperature=0.0, min_tokens=2), stop_ids=(8, 0))
    drawn = [draw(sampler, logits, position).token_ids.item() for position in range(3, 7)]
    assert drawn == [1, 1, 8, 8]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    asked = params(temperature=0.1, logit_bias=((5, 100.0),), num_logprobs=2)
    sampler = make_sampler(params(), asked, params(num_logprobs=0))
    asked_for = draw(sampler, logits).logprobs
    assert asked_for is not None
    sampled, top, top_ids = asked_for.find()
    want = logits[1].log_softmax(-1)
    assert asked_for.rows.tolist() == [1, 2]
    assert asked_for.num_top == [2, 0]
    assert torch.allclose(sampled[0], want[5])
    assert torch.allclose(top[0], want.topk(2).values)
    assert torch.equal(top_ids[0], want.topk(2).indices)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_and_harms_no_other(bad: float) -> None:
    logits = random_logits(3)
    asked = [params(top_p=0.9), params(top_p=0.9, num_logprobs=1), params(top_p=0.9)]
    want = draw(make_sampler(*asked), logits).token_ids
    broken = logits.clone()
    broken[1, 7] = bad
    drawn = draw(make_sampler(*asked), broken)
    assert drawn.is_finite.tolist() == [True, False, True]
    assert drawn.token_ids[[0, 2]].tolist() == want[[0, 2]].tolist()


def test_the_logits_given_are_not_changed() -> None:
    logits = random_logits(2)
    before = logits.clone()
    draw(make_sampler(params(top_k=3, repetition_penalty=2.0), params(logit_bias=((1, 3.0),))), logits)
    assert torch.equal(logits, before)
