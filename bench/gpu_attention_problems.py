"""Problems of attention over block tables; see gpu_problems.py."""

from itertools import pairwise
from typing import Any

import torch
from torch import Generator, Tensor

from bench.gpu_problems import BLOCK, Problem, noise
from gpu.attention import RaggedRows
from gpu.kv_cache import LayerKV
from gpu.scores import Scores

NOWHERE = 1 << 20  # a block that nobody has
SCORES_AT_ONCE = 1 << 26


def decode_attention(generator: Generator, dtype: torch.dtype, sequences: int, context: int, **shape: Any) -> Problem:
    """One new token of each sequence; contexts of several lengths, the longest as given. shape: of _attention."""
    lengths = [max(1, context - 7 * (place % 5)) for place in range(sequences)]
    return _attention(generator, dtype, [(length, 1) for length in lengths], **shape)


def extend_attention(
    generator: Generator, dtype: torch.dtype, prompts: int, tokens: int, decodes: int = 0, **shape: Any
) -> Problem:
    """Prompts, the last one's second half, in one launch with decodes. shape: of _attention."""
    rows = [(tokens, 1)] * decodes + [(tokens, tokens)] * (prompts - 1) + [(tokens, max(2, tokens // 2))]
    return _attention(generator, dtype, rows, **shape)


def _attention(
    generator: Generator,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    cap: float | None = None,
    sinks: bool = False,
) -> Problem:
    """What nobody may see is not a number.

    Args:
        rows: (context, new tokens), first those that decode.
        window, cap, sinks: see RaggedRows and Scores.
    """
    from gpu.kernels.attention import PagedAttention

    kernels = PagedAttention(None if generator.device.type == "cuda" else 3)
    scores = Scores(cap=cap, sinks=noise(generator, dtype, heads) if sinks else None)
    device = generator.device
    counts = [-(-end // BLOCK) for end, _ in rows]
    order = torch.randperm(sum(counts) + 2, generator=generator, device=device).tolist()
    both = torch.full((2, len(order), BLOCK, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    tables = torch.full((len(rows), max(counts) + 1), NOWHERE, dtype=torch.int32, device=device)
    contexts = []
    for row, ((end, _), count) in enumerate(zip(rows, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)], device=device)
        tables[row, :count] = blocks
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:end]
        both.flatten(1, 2)[:, slots] = noise(generator, dtype, 2, end, kv_heads, head_dim)
        contexts.append(slots)
    kv = LayerKV(both, both[0].flatten(0, 1), both[1].flatten(0, 1))
    offsets = [0]
    for _, num_new in rows:
        offsets.append(offsets[-1] + num_new)
    query = noise(generator, dtype, offsets[-1], heads, head_dim)
    ragged = RaggedRows(
        tables=tables,
        ends=torch.tensor([end for end, _ in rows], dtype=torch.int32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        num_decodes=sum(num_new == 1 for _, num_new in rows),
        window=window,
    )

    def reference() -> tuple[Tensor]:
        outs = [
            _textbook(query[first:last].float(), both.flatten(1, 2)[:, slots].float(), window, scores)
            for (first, last), slots in zip(pairwise(offsets), contexts, strict=True)
        ]
        return (torch.cat(outs),)

    num_pairs = sum(min(place, window or place) for end, num_new in rows for place in range(end - num_new + 1, end + 1))
    num_read = sum(min(end, num_new - 1 + (window or end)) for end, num_new in rows)
    kv_bytes = 2 * num_read * kv_heads * head_dim * dtype.itemsize
    return Problem(
        dtype,
        lambda: kernels.attend(query, kv, ragged, scores),
        reference,
        kv_bytes + 2 * query.nbytes,
        4.0 * num_pairs * heads * head_dim,
    )


def _textbook(query: Tensor, context: Tensor, window: int | None, scores: Scores) -> Tensor:
    """The last tokens of a context attend to it: [tokens, heads * head_dim].

    Args:
        query: [tokens, heads, head_dim].
        context: [2, context, kv_heads, head_dim]: keys and values.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_context, num_kv_heads = context.shape[1:3]
    per_kv = num_heads // num_kv_heads
    keys, values = context.repeat_interleave(per_kv, 2)
    positions = torch.arange(num_context, device=query.device)
    step, outs = max(1, SCORES_AT_ONCE // (num_heads * num_context)), []
    sinks = None if scores.sinks is None else scores.sinks.float().view(-1, 1, 1)
    for first in range(0, num_tokens, step):
        part = query[first : first + step]
        found = torch.einsum("thd,chd->htc", part, keys) * head_dim**-0.5
        if scores.cap is not None:
            found = scores.cap * torch.tanh(found / scores.cap)
        own = num_context - num_tokens + first + torch.arange(len(part), device=query.device)
        is_hidden = positions > own[:, None]
        if window is not None:
            is_hidden |= positions <= own[:, None] - window
        found.masked_fill_(is_hidden, float("-inf"))
        if sinks is not None:
            found = torch.cat([found, sinks.expand(-1, len(part), 1)], -1)
        shares = found.softmax(-1)[..., :num_context]
        outs.append(torch.einsum("htc,chd->thd", shares, values).flatten(1))
    return torch.cat(outs)
