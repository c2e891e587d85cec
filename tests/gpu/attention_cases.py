"""A step's rows over a cache of their own, and the textbook's attention, against which every kernel is held."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gpu.attention import PLAIN, AttentionKernels, RaggedRows, Scores
from gpu.kv_cache import SCALE_BYTES, LayerKV, blockwise

NOWHERE = 1 << 20  # a block that no row has
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """A step's rows over a cache of their own.

    Args:
        contexts: tables of blocks, one per row.
    """

    query: torch.Tensor
    kv: LayerKV
    rows: RaggedRows
    contexts: list[list[int]]

    def attend(self, kernels: AttentionKernels, scores: Scores = PLAIN) -> torch.Tensor:
        return kernels.attend(self.query, self.kv, replace(self.rows, layout=None), scores)

    def in_pairs(self) -> "Case":
        """The same, over a cache that CPU kernels read."""
        stored = blockwise(torch.zeros_like(self.kv.both), is_paired=True)
        for slot in torch.randperm(len(self.kv.keys)).split(7):  # in any order and company
            stored.write(slot, self.kv.keys[slot], self.kv.values[slot])
        return replace(self, kv=stored)

    def in_8_bits(self, is_paired: bool) -> tuple["Case", "Case"]:
        """The same over a cache in 8 bits, and over the numbers that this stands for."""
        shape, device = self.kv.both.shape, self.query.device
        both = torch.zeros((*shape[:-1], shape[-1] + SCALE_BYTES), dtype=torch.int8, device=device)
        stored = blockwise(both, is_paired)
        for slot in torch.randperm(len(self.kv.keys)).split(7):  # in any order and company
            stored.write(slot, self.kv.keys[slot], self.kv.values[slot])
        floats = torch.stack(
            stored.read(torch.arange(shape[1], device=device).unsqueeze(1), torch.float32)
        )  # [2, blocks, heads, 16, dim]
        plain = floats.transpose(2, 3).contiguous()
        exact = LayerKV(plain, plain[0].flatten(0, 1), plain[1].flatten(0, 1))
        return replace(self, kv=stored), replace(self, kv=exact)

    def alone(self, row: int) -> "Case":
        """One of its rows."""
        first, end = self.rows.offsets.tolist()[row : row + 2]
        rows = replace(
            self.rows,
            tables=self.rows.tables[row : row + 1],
            ends=self.rows.ends[row : row + 1],
            offsets=self.rows.offsets[row : row + 2] - first,
            num_decodes=int(row < self.rows.num_decodes),
            layout=None,
        )
        return Case(self.query[first:end], self.kv, rows, self.contexts[row : row + 1])

    def chunk(self, start: int, end: int) -> "Case":
        """New tokens start to end of its only row, as a prompt's chunk."""
        rows = replace(
            self.rows,
            ends=torch.full_like(self.rows.ends, end),
            offsets=torch.tensor([0, end - start]).to(self.rows.offsets),
            num_decodes=0,
            layout=None,
        )
        return Case(self.query[start:end], self.kv, rows, self.contexts)

    def assert_each_row_is_the_same_alone(self, kernels: AttentionKernels, whole: torch.Tensor) -> None:
        """To the last bit, twice: with the same layout."""
        for row, tokens in enumerate(pairwise(self.rows.offsets.tolist())):
            alone = self.alone(row)
            for _ in range(2):
                found = kernels.attend(alone.query, alone.kv, alone.rows, PLAIN)
                assert torch.equal(found, whole[slice(*tokens)])

    def want(self, scores: Scores = PLAIN) -> torch.Tensor:
        """As the textbook says, in float32: [tokens, heads * head_dim]."""
        out = torch.zeros(self.query.shape, device=self.query.device)
        offsets = self.rows.offsets.tolist()
        for row, end in enumerate(self.rows.ends.tolist()):
            for token in range(offsets[row], offsets[row + 1]):
                position = end - offsets[row + 1] + token
                if position >= 0:
                    out[token] = self._want_token(token, self.contexts[row], position, scores)
        return out.flatten(1)

    def _want_token(self, token: int, table: list[int], position: int, scores: Scores) -> torch.Tensor:
        vectors = self.query[token].float()  # [heads, head_dim]
        first = 0 if self.rows.window is None else max(0, position + 1 - self.rows.window)
        per_kv = len(vectors) // self.kv.keys.shape[1]
        context = self.kv.both[:, table].flatten(1, 2)[:, first : position + 1]
        keys, values = context.float().repeat_interleave(per_kv, 2)
        found = torch.einsum("hd,chd->hc", vectors, keys) * (scores.scale or vectors.shape[1] ** -0.5)
        if scores.cap is not None:
            found = scores.cap * (found / scores.cap).tanh()
        if scores.sinks is not None:
            found = torch.cat([found, scores.sinks.float()[:, None]], 1)
        return torch.einsum("hc,chd->hd", found.softmax(1)[:, : len(keys)], values)


def make_case(
    rows: Sequence[tuple[int, int]],
    num_kv_heads: int,
    per_kv: int,
    head_dim: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    unseen: float = float("nan"),
    index_dtype: torch.dtype = torch.int32,
) -> Case:
    """Queries lie beside keys, as in the model.

    Args:
        rows: (end, new tokens); first those of one token.
        unseen: the numbers of blocks beyond a row's end.
    """
    generator = torch.Generator().manual_seed(len(rows) + head_dim)
    num_blocks = sum(-(-end // 16) for end, _ in rows)
    free = random.Random(num_blocks).sample(range(num_blocks + 2), num_blocks)
    both = torch.full((2, num_blocks + 3, 16, num_kv_heads, head_dim), unseen)
    contexts = [[free.pop() for _ in range(-(-end // 16))] for end, _ in rows]
    tables = torch.full((len(rows), max(map(len, contexts)) + 1), NOWHERE, dtype=index_dtype)
    for row, ((end, _), context) in enumerate(zip(rows, contexts, strict=True)):
        tables[row, : len(context)] = torch.tensor(context)
        slots = torch.tensor(context, dtype=torch.int64).repeat_interleave(16)[:end], torch.arange(end) % 16
        both[:, *slots] = torch.randn(2, end, num_kv_heads, head_dim, generator=generator)
    both = both.to(device, dtype)
    lengths = torch.tensor([0, *(length for _, length in rows)], dtype=index_dtype)
    ragged = RaggedRows(
        tables.to(device),
        torch.tensor([end for end, _ in rows], dtype=index_dtype, device=device),
        lengths.cumsum(0, dtype=index_dtype).to(device),
        next((row for row, (_, length) in enumerate(rows) if length != 1), len(rows)),
        window,
    )
    query = torch.randn(int(lengths.sum()), num_kv_heads * (per_kv + 2), head_dim, generator=generator)
    query = query.to(device, dtype)[:, : num_kv_heads * per_kv]
    return Case(query, LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1)), ragged, contexts)


def assert_near(got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> None:
    """least: of the tolerance, which is the format's."""
    assert got.shape == want.shape
    tolerance = max(least, TOLERANCE[got.dtype])
    assert torch.allclose(got.float(), want, atol=tolerance, rtol=tolerance)
