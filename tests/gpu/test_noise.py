"""The noise is SplitMix64's, and Gumbel distributed."""

import numpy as np
import torch

from gpu.sampling_rules import (
    GOLDEN,
    MIX_1,
    MIX_2,
    MOST_NOISE,
    SLACK,
    gumbel_argmax,
    gumbel_noise,
    near_gumbel_noise,
    row_keys,
)

WORD = (1 << 64) - 1
EULER = 0.5772156649


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
    noise = gumbel_noise(torch.tensor([[12345]]), torch.arange(1_000_000))
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - EULER) < 0.005
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.01
    assert abs((noise > 8).float().mean().item() - (1 - np.exp(-np.exp(-8)))) < 1e-4


def test_neighbouring_seeds_and_positions_share_no_noise() -> None:
    seeds, positions = np.repeat(np.arange(20, dtype=np.uint64), 20), np.tile(np.arange(20), 20)
    keys = torch.from_numpy(row_keys(seeds, positions).view(np.int64)).unsqueeze(1)
    noise = gumbel_noise(keys, torch.arange(500))  # [400, 500]
    correlation = torch.corrcoef(noise).fill_diagonal_(0)
    assert correlation.abs().max() < 0.27  # six standard deviations of 1 / sqrt(500)


def test_noise_is_the_logarithms_and_torchs_is_near_it() -> None:
    keys, token_ids = torch.tensor([[77]]), torch.arange(1_000_000)
    noise = gumbel_noise(keys, token_ids)
    assert (noise - near_gumbel_noise(keys, token_ids)).abs().max() < SLACK / 100
    assert noise.max() < MOST_NOISE


def test_the_argmax_is_of_the_exact_sums_and_of_equals_the_first() -> None:
    keys = torch.from_numpy(row_keys(np.arange(40, dtype=np.uint64), np.arange(40)).view(np.int64)).unsqueeze(1)
    scaled = torch.randn(40, 3000, generator=torch.Generator().manual_seed(1)) * 2
    sums = scaled + gumbel_noise(keys, torch.arange(3000))
    assert torch.equal(gumbel_argmax(scaled, keys), sums.argmax(-1))
    assert gumbel_argmax(torch.full((1, 9), float("-inf")), keys[:1]).tolist() == [0]
