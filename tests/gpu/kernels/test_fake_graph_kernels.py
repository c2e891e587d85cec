"""Fake CUDA graphs replay launches of interpreted kernels."""

import torch

from gpu.kernels.rows import embed_rows, scatter_rows
from tests.gpu.fake_cuda_graphs import open_recorder


def test_a_kernels_launch_is_replayed(device: torch.device) -> None:
    with torch.inference_mode():
        table, out = torch.arange(12.0, device=device).view(4, 3), torch.zeros(5, 3, device=device)
        token_ids, slots = torch.tensor([3, 0], device=device), torch.tensor([1, 4], device=device)
        graph = open_recorder(device).capture(lambda: scatter_rows(out, slots, embed_rows(table, token_ids)))
        token_ids.copy_(torch.tensor([2, 1]))
        out.zero_()
        graph.replay()
        assert out.tolist() == [[0.0] * 3, [6.0, 7.0, 8.0], [0.0] * 3, [0.0] * 3, [3.0, 4.0, 5.0]]
