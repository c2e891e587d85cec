"""Rows under a mask sample what it allows, as if the rest had no chance; others do not notice."""

import numpy as np
import pytest
import torch

from gpu.cpu_kernels.sampling import RowSampler
from gpu.sampler import FORBIDDEN, MakeSampler, Masked
from tests.gpu.sampling_cases import NEXT, SETTINGS, make_sampler, noise

VOCAB = 1_003


def masks_of(allowed: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, ids] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("kernel", [None, RowSampler], ids=["torch", "numba"])
def test_masked_rows_sample_as_if_the_rest_had_no_chance(kernel: MakeSampler | None) -> None:
    settings = tuple({**one, "min_tokens": 0} for one in SETTINGS)
    count = len(settings)
    slots = np.arange(count)
    masked_rows = np.array([0, 3, 4, 8, 9])
    allowed = [[7], [1, 5, 900, 1_002], list(range(0, VOCAB, 3)), [0, 31, 32, 33, 64], list(range(500))]
    with_masks, without, by_logits = (make_sampler(settings, VOCAB, kernel) for _ in range(3))
    for step in range(20):
        logits, positions = noise(count, VOCAB, scale=3.0, seed=step), np.full(count, NEXT + step)
        forbidden = torch.ones(count, VOCAB, dtype=torch.bool)
        forbidden[[row for row in range(count) if row not in masked_rows]] = False
        for row, ids in zip(masked_rows.tolist(), allowed, strict=True):
            forbidden[row, ids] = False
        expected = by_logits.sample(logits.masked_fill(forbidden, FORBIDDEN), slots, positions).token_ids
        found = with_masks.sample(logits.clone(), slots, positions, Masked(masked_rows, masks_of(allowed)))
        assert found.is_finite.all()
        assert found.token_ids.tolist() == expected.tolist()
        for row, ids in zip(masked_rows.tolist(), allowed, strict=True):
            assert int(found.token_ids[row]) in ids
        free = without.sample(logits, slots, positions).token_ids
        alone = [row for row in range(count) if row not in masked_rows]
        assert found.token_ids[alone].tolist() == free[alone].tolist()


@pytest.mark.parametrize("kernel", [None, RowSampler], ids=["torch", "numba"])
def test_logprobs_are_of_the_models_own_logits(kernel: MakeSampler | None) -> None:
    logits = noise(2, VOCAB, scale=3.0)
    best = logits.argmax(-1)
    sampler = make_sampler(({"temperature": 0.0, "num_logprobs": 2},) * 2, VOCAB, kernel)
    masked = Masked(np.array([1]), masks_of([[7]]))
    sampled = sampler.sample(logits.clone(), np.arange(2), np.full(2, NEXT), masked)
    assert sampled.token_ids.tolist() == [int(best[0]), 7]
    assert sampled.logprobs is not None
    of_tokens, top, ids = sampled.logprobs.find()
    expected = logits.log_softmax(-1)
    assert torch.allclose(of_tokens, torch.stack([expected[0, best[0]], expected[1, 7]]))
    assert torch.allclose(top, expected.topk(2).values)
    assert ids[:, 0].tolist() == best.tolist()
