"""Attention written out against torch's own, and its parts against the whole."""

import pytest
import torch
import torch.nn.functional as F

import gpu.attention
from gpu.attention import PLAIN, Scores, attend_by_scores

KV_HEADS, PER_KV, TOKENS, HEAD_DIM = 2, 3, 11, 8


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


QUERY = random(KV_HEADS, PER_KV, TOKENS, HEAD_DIM)
KEYS, VALUES = random(2, KV_HEADS, TOKENS, HEAD_DIM, seed=1)


@pytest.mark.parametrize("max_scores", [1, 200, 10_000])
def test_plain_scores_give_what_torch_gives_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch, max_scores: int
) -> None:
    monkeypatch.setattr(gpu.attention, "MAX_SCORES", max_scores)
    shared = (KV_HEADS, PER_KV, TOKENS, HEAD_DIM)
    keys, values = KEYS.unsqueeze(1).expand(shared), VALUES.unsqueeze(1).expand(shared)
    want = F.scaled_dot_product_attention(QUERY, keys, values, is_causal=True)
    hidden = torch.full((TOKENS, TOKENS), float("-inf")).triu_(1)
    assert torch.allclose(attend_by_scores(QUERY, KEYS, VALUES, hidden, PLAIN), want, atol=1e-6)
    one_row = hidden[-1:]
    want = F.scaled_dot_product_attention(QUERY, keys, values)
    assert torch.allclose(attend_by_scores(QUERY, KEYS, VALUES, one_row, PLAIN), want, atol=1e-6)


def test_a_cap_bounds_the_scores() -> None:
    """Scores of 1000 and 0 under a cap of 2 are shares of e^2 to 1."""
    query, keys = torch.ones(1, 1, 1, 1), torch.tensor([[[1000.0], [0.0]]])
    values = torch.tensor([[[1.0], [0.0]]])
    got = attend_by_scores(query, keys, values, None, Scores(scale=1.0, cap=2.0))
    assert got.item() == pytest.approx(torch.tensor([2.0, 0.0]).softmax(0)[0].item())


def test_a_sink_takes_its_share() -> None:
    query, keys, values = torch.zeros(1, 2, 1, 4), torch.zeros(1, 3, 4), torch.ones(1, 3, 4)
    got = attend_by_scores(query, keys, values, None, Scores(sinks=torch.tensor([0.0, float("-inf")])))
    assert got[0, :, 0, 0].tolist() == pytest.approx([0.75, 1.0])
