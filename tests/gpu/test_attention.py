"""Paged attention against the textbook's, row by row."""

import math
import random

import numpy as np
import pytest
import torch

from gpu.attention import paged_attention
from gpu.batch import BatchBuilder
from gpu.kv_cache import LayerKV
from tests.gpu.driver import make_plan

CPU = torch.device("cpu")
NUM_BLOCKS, HEAD_DIM = 40, 8


def textbook(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One token: query [heads, dim], keys and values [context, kv_heads, dim]; returns [heads * dim]."""
    per_kv = query.shape[0] // keys.shape[1]
    out = []
    for head, vector in enumerate(query):
        scores = keys[:, head // per_kv] @ vector / math.sqrt(HEAD_DIM)
        out.append(scores.softmax(0) @ values[:, head // per_kv])
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 16, 21])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(36, 1)],
        [(0, 20)],
        [(33, 19)],
        [(5, 1), (5, 1)],
        [(0, 3), (90, 1), (16, 17), (15, 1), (31, 1), (32, 2)],
    ],
    ids=str,
)
def test_mixed_rows_attend_as_the_textbook_says(
    num_heads: int, num_kv_heads: int, rows: list[tuple[int, int]], window: int | None
) -> None:
    """rows: (start, new tokens). Blocks hold noise beyond each row's context, which nobody may see."""
    generator = torch.Generator().manual_seed(len(rows))
    both = torch.randn(2, NUM_BLOCKS + 1, 16, num_kv_heads, HEAD_DIM, generator=generator)
    kv = LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))
    free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[free.pop() for _ in range(-(-(start + length) // 16))] for start, length in rows]
    plan = make_plan(
        [(slot, start, [7] * length, True) for slot, (start, length) in enumerate(rows)],
        tables=[(slot, i, block) for slot, table in enumerate(tables) for i, block in enumerate(table)],
    )
    batch = BatchBuilder(len(rows), 160, NUM_BLOCKS, torch.float32, CPU, (None, window)).build(plan)
    query = torch.randn(plan.num_tokens, num_heads, HEAD_DIM, generator=generator)
    got = paged_attention(query, kv, batch.groups[window])
    # A row's tokens lie together in the batch; its last one leads back to the row.
    for last, row in zip(batch.sampled_tokens.tolist(), batch.sampled_rows.tolist(), strict=True):
        start, length = rows[row]
        context = both[:, tables[row]].flatten(1, 2)  # [2, context, kv_heads, dim]
        for offset in range(length):
            end = start + offset + 1
            token = last - length + 1 + offset
            first = max(0, end - window) if window else 0
            want = textbook(query[token], context[0, first:end], context[1, first:end])
            assert torch.allclose(got[token], want, atol=1e-5)


def test_groups_cover_the_tokens_in_order() -> None:
    rows = [(0, 3), (90, 1), (16, 17), (15, 1)]
    plan = make_plan(
        [(slot, start, [7] * length, False) for slot, (start, length) in enumerate(rows)],
        tables=[(slot, i, slot * 6 + i) for slot in range(4) for i in range(6)],
    )
    groups = BatchBuilder(4, 160, NUM_BLOCKS, torch.float32, CPU).build(plan).groups[None]
    ranges = [(group.first_token, group.end_token) for group in groups]
    assert ranges == [(0, 2), (2, 5), (5, 22)]
    assert np.all([group.is_decode for group in groups] == np.array([True, False, False]))
