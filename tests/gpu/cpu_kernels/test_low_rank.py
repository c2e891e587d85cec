"""The kernel adds what matmuls by A and B give, for any mixture of adapters, and the same bits in any company."""

import random

import numpy as np
import pytest
import torch

from gpu.cpu_kernels.support import NEEDED_FLAGS
from gpu.device import cpu_flags

if not cpu_flags() >= NEEDED_FLAGS:
    pytest.skip("needs a CPU with AVX2", allow_module_level=True)

from gpu.cpu_kernels.low_rank import LowRankKernel, PackedLowRank, PackedRowGroups

NUM_OUT, NUM_IN = 320, 96
# (ranks, outputs, ...) of the parts of fused matrices: B is zero elsewhere
PARTS = [((3, 320),), ((16, 320),), ((16, 192), (16, 64), (16, 64)), ((5, 100), (4, 220)), ((40, 320),), ((2, 64),)]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def product(parts: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    num_ranks = sum(ranks for ranks, _ in parts)
    up, rank, out = torch.zeros(NUM_OUT, num_ranks, dtype=torch.bfloat16), 0, 0
    for ranks, outputs in parts:
        up[out : out + outputs, rank : rank + ranks] = noise(outputs, ranks)
        rank, out = rank + ranks, out + outputs
    return noise(num_ranks, NUM_IN) / NUM_IN**0.5, up


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_are_torchs_and_rounded_the_same_in_any_company(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    kernel, dice = LowRankKernel(), random.Random(num_threads)
    products = [product(parts) for parts in PARTS]
    packed = [kernel.pack(*one) for one in products]
    assert all(isinstance(one, PackedLowRank) for one in packed)
    for num_rows in (1, 2, 7, 16, 75):
        wide, base = noise(num_rows, NUM_IN + 32), noise(num_rows, NUM_OUT)
        x = wide[:, :NUM_IN]  # rows need not follow one another
        of_rows = np.array([dice.randrange(-1, len(PARTS) + 1) for _ in range(num_rows)])
        numbers = [number for number in range(len(PARTS) + 1) if (of_rows == number).any()]
        found, want = base.clone(), base.float()
        if not numbers:
            continue
        groups = PackedRowGroups([np.flatnonzero(of_rows == number) for number in numbers])
        here = [packed[number] if number < len(PARTS) else None for number in numbers]  # the last has none here
        if any(here):
            kernel.add(found, x, here, groups)
        for row, number in enumerate(of_rows):
            if not 0 <= number < len(PARTS):
                assert torch.equal(found[row], base[row])
                continue
            down, up = products[number]
            want[row] += up.float() @ (down.float() @ x[row].float()).bfloat16().float()
            alone = base[row : row + 1].clone()
            kernel.add(alone, x[row : row + 1], [packed[number]], PackedRowGroups([np.array([0])]))
            assert torch.equal(alone[0], found[row])
        assert torch.allclose(found.float(), want, rtol=2.0**-6, atol=2e-2)


def test_other_shapes_and_types_are_torchs() -> None:
    kernel = LowRankKernel()
    for down, up in ((noise(4, 48), noise(64, 4)), (noise(4, 64), noise(96, 4)), (noise(4, 64).float(), noise(64, 4))):
        assert kernel.pack(down, up) is None
    assert kernel.pack(noise(4, 64), torch.zeros(64, 4, dtype=torch.bfloat16)) is not None
