"""Paged attention against the textbook's, row by row."""

import math
import random

import pytest
import torch

from core.config import Sight
from core.plan import SequenceStart, make_plan
from gpu.attention import PLAIN, DecodeGroup, PromptGroup, TorchAttention
from gpu.kv_cache import LayerKV
from tests.gpu.built import Builder
from tests.gpu.driver import GREEDY

CPU = torch.device("cpu")
NUM_BLOCKS, HEAD_DIM = 40, 8
TORCH = TorchAttention(torch.float32, CPU)


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
        [(50, 40), (60, 70)],
    ],
    ids=str,
)
@pytest.mark.parametrize("num_prompt_tokens", [0, 35, 160])
def test_mixed_rows_attend_as_the_textbook_says(
    num_heads: int, num_kv_heads: int, rows: list[tuple[int, int]], window: int | None, num_prompt_tokens: int
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
        sequence_starts=[SequenceStart(slot, (1,), num_prompt_tokens, GREEDY, 0, ()) for slot in range(len(rows))],
    )
    batch = Builder(160, (None, window), scratch=NUM_BLOCKS).build(plan)
    query = torch.randn(plan.num_tokens, num_heads, HEAD_DIM, generator=generator)
    got = TORCH.attend(query, kv, batch.attending[Sight(window)], PLAIN)
    places = {slot: token for token, slot in enumerate(batch.tokens.kv_slots.tolist())}
    for row, (start, length) in enumerate(rows):
        context = both[:, tables[row]].flatten(1, 2)  # [2, context, kv_heads, dim]
        for position in range(start, start + length):
            end = position + 1
            token = places[tables[row][position // 16] * 16 + position % 16]
            first = max(0, end - window) if window else 0
            want = textbook(query[token], context[0, first:end], context[1, first:end])
            assert torch.allclose(got[token], want, atol=1e-5)


def test_groups_cover_the_tokens_in_order() -> None:
    rows = [(0, 3), (90, 1), (16, 17), (15, 1)]
    prompts = [9, 90, 20, 15]
    plan = make_plan(
        [(slot, start, [7] * length, False) for slot, (start, length) in enumerate(rows)],
        tables=[(slot, i, slot * 6 + i) for slot in range(4) for i in range(6)],
        sequence_starts=[SequenceStart(slot, (1,), length, GREEDY, 0, ()) for slot, length in enumerate(prompts)],
    )
    groups = Builder(160, scratch=NUM_BLOCKS).build(plan).groups()
    ranges = [(type(group), group.first_token, group.end_token) for group in groups]
    decodes = [(DecodeGroup, 0, 1), (DecodeGroup, 1, 15)]  # padded to 128 tokens, and to 64
    assert ranges == [*decodes, (PromptGroup, 15, 18), (PromptGroup, 18, 22)]
