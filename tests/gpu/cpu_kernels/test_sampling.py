"""The kernel draws what torch draws, although it computes little of the noise."""

import numpy as np
import pytest
import torch

from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.noise import gumbel_noise, row_keys
from gpu.sampler import Sampler

pytest.importorskip("numba", reason="needs numba: pip install 'steploop[cpu]'")

from gpu.cpu_kernels.operators import _gumbel_argmax

VOCAB = 5_003  # not a whole number of chunks


def noisy(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return gumbel_noise(keys, torch.arange(logits.shape[1])) + logits


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_the_token_with_the_largest_noisy_logit_is_drawn(spread: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1)) * spread
    keys = torch.from_numpy(row_keys(np.arange(64, dtype=np.uint64), np.arange(64)).view(np.int64)).unsqueeze(1)
    drawn, sums = _gumbel_argmax(logits, keys), noisy(logits, keys)
    assert torch.allclose(sums.gather(1, drawn.unsqueeze(1)).squeeze(1), sums.max(1).values, atol=1e-5)
    assert len(set(drawn.tolist())) > 30


def test_what_is_dropped_is_never_drawn() -> None:
    logits = torch.full((8, VOCAB), float("-inf"))
    logits[torch.arange(8), torch.arange(8) * 600 + 5] = torch.arange(8.0) - 4
    keys = torch.from_numpy(row_keys(np.arange(8, dtype=np.uint64), np.arange(8)).view(np.int64)).unsqueeze(1)
    assert _gumbel_argmax(logits, keys).tolist() == [row * 600 + 5 for row in range(8)]


def test_a_sampler_draws_the_same_tokens_with_it() -> None:
    asked = (
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    )
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    slots, drawn = np.arange(len(asked)), []
    for kernel in (None, _gumbel_argmax):
        sampler = Sampler(len(asked), VOCAB, torch.device("cpu"), kernel)
        for slot, fields in enumerate(asked):
            params = SamplingParams(max_tokens=64, **fields)
            sampler.start(SequenceStart(slot, (1, 2, 3), 3, params, seed=slot, stop_ids=()))
        steps = [sampler.sample(logits, slots, np.full(len(asked), 3 + step)).token_ids.tolist() for step in range(40)]
        drawn.append(steps)
    assert drawn[0] == drawn[1]
    assert len({row[0] for row in drawn[0]}) > 10
