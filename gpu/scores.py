"""Attention step by step, for capped scores and sinks, which torch's own attention lacks. Thread: engine."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# From so many rows on, MKL and oneDNN add each row's numbers in the same order, however many there are.
LEAST_ROWS = 4
# float32 scores at a time, and twice as many temporary numbers: a long prompt's chunk is cut to this.
MAX_SCORES = 4 * 1024**2


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How the dot products of queries and keys become scores.

    Args:
        scale: their factor; None: 1 / sqrt(head_dim).
        cap: scores become cap * tanh(score / cap); None: they are not capped.
        sinks: [heads], one more score for each, which takes its share and adds no value; None: none.
    """

    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None

    @property
    def are_plain(self) -> bool:
        """Whether torch's own attention computes them."""
        return self.cap is None and self.sinks is None


PLAIN = Scores()


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Softmax of the scores, in float32, times the values, some tokens at a time.

    Args:
        query: [..., kv_heads, heads per kv, tokens, head_dim].
        keys, values: [..., kv_heads, context, head_dim].
        mask: added to the scores [..., kv_heads, heads per kv, tokens, context]; broadcast.
    Returns:
        as query.
    """
    *rows, per_kv, num_tokens, _ = query.shape
    num_context = keys.shape[-2]
    step = max(1, MAX_SCORES // (torch.Size(rows).numel() * per_kv * num_context))
    outputs = []
    for first in range(0, num_tokens, step):
        end = min(first + step, num_tokens)
        hidden = mask[..., first:end, :] if mask is not None and mask.shape[-2] > 1 else mask
        shares = _shares(query[..., first:end, :], keys, hidden, scores)
        part = _matmul(
            shares.to(values.dtype).flatten(-3, -2), values
        )  # [..., kv_heads, heads per kv * tokens, head_dim]
        outputs.append(part.view(*rows, per_kv, end - first, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)


def _shares(query: Tensor, keys: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """[..., kv_heads, heads per kv, tokens, context], float32; with its sink, each token's sum to 1."""
    found = _matmul(query.flatten(-3, -2), keys.transpose(-1, -2))  # heads that share keys act as more tokens
    found = found.float().mul_(scores.scale or query.shape[-1] ** -0.5).view(*query.shape[:-1], -1)
    if scores.cap is not None:
        found = found.div_(scores.cap).tanh_().mul_(scores.cap)
    if mask is not None:
        found += mask
    if scores.sinks is None:
        return found.softmax(-1)
    sinks = scores.sinks.float().view(*query.shape[-4:-2], 1, 1).expand(*found.shape[:-1], 1)
    shares = torch.cat([found, sinks], -1).softmax(-1)
    return shares[..., :-1]


def _matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix, each row the same to the last bit in any company."""
    num_rows = rows.shape[-2]
    if num_rows >= LEAST_ROWS:
        return rows @ matrix
    return (F.pad(rows, (0, 0, 0, LEAST_ROWS - num_rows)) @ matrix)[..., :num_rows, :]
