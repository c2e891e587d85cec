"""Problems of attention over block tables and of sampling; see gpu_problems.py. Also BUILDERS, with all of both files.

Their kernels are looked up when a case asks for them: one that this tree does not have is left out, and said to be.
"""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from bench.gpu_problems import BLOCK, LAYER_BUILDERS, NotHere, Problem, noise
from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.kv_cache import LayerKV
from gpu.scores import PLAIN

NOWHERE = 1 << 20  # a block that nobody has
SCORES_AT_ONCE = 1 << 26
# By turns: what requests of a server ask for
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
)


def _module(name: str) -> Any:
    """
    Raises:
        NotHere: this tree has no such file.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise NotHere(f"{name.replace('.', '/')}.py is not in this tree") from error


def decode_attention(
    generator: Generator, dtype: torch.dtype, sequences: int, context: int, heads: int, kv_heads: int, head_dim: int
) -> Problem:
    """One new token of each sequence; contexts of several lengths, the longest as given."""
    lengths = [max(1, context - 7 * (place % 5)) for place in range(sequences)]
    return _attention(generator, dtype, [(length, 1) for length in lengths], heads, kv_heads, head_dim)


def extend_attention(
    generator: Generator,
    dtype: torch.dtype,
    prompts: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    decodes: int = 0,
) -> Problem:
    """Prompts, the last one's second half, in one launch with decodes."""
    rows = [(tokens, 1)] * decodes + [(tokens, tokens)] * (prompts - 1) + [(tokens, max(2, tokens // 2))]
    return _attention(generator, dtype, rows, heads, kv_heads, head_dim)


def _attention(
    generator: Generator, dtype: torch.dtype, rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int
) -> Problem:
    """rows: (context, new tokens), first those that decode. What nobody may see is not a number."""
    attention = _module("gpu.attention")
    kernels = _module("gpu.kernels.paged_attention").PagedAttention(None if generator.device.type == "cuda" else 3)
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
    ragged = attention.RaggedRows(
        tables=tables,
        ends=torch.tensor([end for end, _ in rows], dtype=torch.int32, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        num_decodes=sum(num_new == 1 for _, num_new in rows),
        window=None,
    )

    def reference() -> tuple[Tensor]:
        outs = [
            _textbook(query[first:last].float(), both.flatten(1, 2)[:, slots].float())
            for (first, last), slots in zip(pairwise(offsets), contexts, strict=True)
        ]
        return (torch.cat(outs),)

    num_pairs = sum(num_new * end - num_new * (num_new - 1) // 2 for end, num_new in rows)
    kv_bytes = 2 * sum(end for end, _ in rows) * kv_heads * head_dim * dtype.itemsize
    return Problem(
        dtype,
        lambda: kernels.attend(query, kv, ragged, PLAIN),
        reference,
        kv_bytes + 2 * query.nbytes,
        4.0 * num_pairs * heads * head_dim,
    )


def _textbook(query: Tensor, context: Tensor) -> Tensor:
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
    for first in range(0, num_tokens, step):
        part = query[first : first + step]
        scores = torch.einsum("thd,chd->htc", part, keys) * head_dim**-0.5
        own = num_context - num_tokens + first + torch.arange(len(part), device=query.device)
        scores.masked_fill_(positions[None, None] > own[None, :, None], float("-inf"))
        outs.append(torch.einsum("htc,chd->thd", scores.softmax(-1), values).flatten(1))
    return torch.cat(outs)


def sample(generator: Generator, dtype: torch.dtype, rows: int, vocab: int) -> Problem:
    """To the token what torch draws."""
    launcher_module = _module("gpu.kernels.device_sampler")
    slots_module, sampler_module = _module("gpu.sampling_slots"), _module("gpu.sampler")
    device = generator.device
    logits = 4 * noise(generator, dtype, rows, vocab)
    asked = slots_module.SamplingSlots(rows, vocab, device)
    by_torch = sampler_module.Sampler(rows, vocab, device)
    for slot in range(rows):
        params = SamplingParams(max_tokens=8, **ASKED[slot % len(ASKED)])
        start = SequenceStart(slot, (1, 2, 3), 3, params, seed=slot + 1, stop_ids=(2,))
        asked.start(start)
        by_torch.start(start)
    kernel = launcher_module.DeviceSampler(asked)
    slots, positions = np.arange(rows), np.full(rows, 5)
    kernel.place(slots, positions)
    return Problem(
        dtype,
        lambda: kernel.launch(logits),
        lambda: (by_torch.sample(logits.float(), slots, positions).token_ids,),
        logits.nbytes,
        outputs=lambda _: (kernel.token_ids[:rows],),
        tolerance=0.0,
    )


BUILDERS: dict[str, Callable[..., Problem]] = {
    **LAYER_BUILDERS,
    "decode_attention": decode_attention,
    "extend_attention": extend_attention,
    "sample": sample,
}
