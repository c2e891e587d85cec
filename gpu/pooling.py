"""Vectors of prompts, from their tokens' last hidden states: embeddings and scores. Thread: engine.

A prompt that comes in chunks has its sum kept by slot. Sums are in float64, so that they round alike in any chunks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array, StepPlan

Rows = Callable[[Tensor], Tensor]  # [some, hidden] -> [some, any]


@dataclass(frozen=True, slots=True)
class Pooled:
    """One step's vectors, on the host.

    Args:
        rows, slots: of the prompts that end with this step.
        vectors: of each, float32.
    """

    rows: list[int]
    slots: list[int]
    vectors: list[Tensor]

    def entries(self) -> Iterator[tuple[int, int, bytes | None]]:
        """(row, slot, its vector; None: it is not finite)."""
        for row, slot, vector in zip(self.rows, self.slots, self.vectors, strict=True):
            yield row, slot, vector.numpy().tobytes() if bool(vector.isfinite().all()) else None


@dataclass(slots=True)
class _Sum:
    """Of positions before `end`, and before the last chunk: a step that failed is computed again."""

    start: int
    before: Tensor
    end: int
    total: Tensor  # [hidden], float64


class Pooler:
    """
    Args:
        norm: the model's last.
        logits: of hidden states before that norm, float32.
        head: scores a vector; None: vectors are what is asked for.
    """

    def __init__(self, norm: Rows, logits: Rows, head: Rows | None = None) -> None:
        self._norm, self._logits, self._head = norm, logits, head
        self._sums: dict[int, _Sum] = {}  # by slot

    def pool(self, hidden: Tensor, plan: StepPlan) -> Pooled:
        """hidden: [tokens that pooled_tokens names, hidden], before the last norm."""
        counts = [len(tokens) for tokens in _tokens_of(plan, plan.starts)]
        parts = torch.split(hidden, counts)
        ending = [index for index, one in enumerate(plan.pooled_rows) if one.is_last]
        found: dict[int, Tensor] = {}
        by_logits = [index for index in ending if plan.pooled_rows[index].pooling.token_ids]
        if by_logits:
            logits = self._logits(torch.cat([parts[index] for index in by_logits]))
            for index, row in zip(by_logits, logits, strict=True):
                found[index] = row[list(plan.pooled_rows[index].pooling.token_ids)]
        others = [index for index in range(len(counts)) if index not in found]
        if others:
            normed = torch.split(self._norm(torch.cat([parts[index] for index in others])), [counts[i] for i in others])
            for index, states in zip(others, normed, strict=True):
                vector = self._vector(plan, index, states)
                if vector is not None:
                    found[index] = vector
        if self._head is not None and ending:
            scores = self._head(torch.stack([found[index] for index in ending]).to(hidden.dtype))
            found = dict(zip(ending, scores, strict=True))
        rows = [plan.pooled_rows[index].row for index in ending]
        return Pooled(rows, plan.slots[rows].tolist(), [found[index].to("cpu", torch.float32) for index in ending])

    def _vector(self, plan: StepPlan, index: int, states: Tensor) -> Tensor | None:
        """
        Args:
            states: [tokens of the row that count, hidden]

        Returns: None: more of the prompt is to come.
        """
        pooled = plan.pooled_rows[index]
        if pooled.pooling.kind != "mean":
            return states[0].float()
        slot, start = int(plan.slots[pooled.row]), int(plan.starts[pooled.row])
        known = self._sums.get(slot)
        if start == 0 or known is None:
            before = torch.zeros_like(states[0], dtype=torch.float64)
        else:
            before = known.total if start == known.end else known.before
        end, total = start + len(states), before + states.double().sum(0)
        self._sums[slot] = _Sum(start, before, end, total)
        if not pooled.is_last:
            return None
        return (total / end).float()


def pooled_tokens(plan: StepPlan, first_tokens: Int32Array) -> Int32Array:
    """Which of the plan's tokens its pooled rows are of, in their order. first_tokens: [rows], of each row."""
    parts = list(_tokens_of(plan, first_tokens))
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _tokens_of(plan: StepPlan, first_tokens: Int32Array) -> Iterator[Int32Array]:
    for one in plan.pooled_rows:
        first, length = int(first_tokens[one.row]), int(plan.lengths[one.row])
        kind = one.pooling.kind
        if kind == "mean":
            yield np.arange(first, first + length, dtype=np.int32)
        else:
            yield np.array([first if kind == "cls" else first + length - 1], np.int32)
