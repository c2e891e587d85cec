"""A step's columns as a graph reads them: integers in one piece, at places that depend on its shape alone.

What is padding has no slot: it sees nothing, draws nothing, and belongs to no row. Thread: engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.plan import Int32Array, StepPlan
from gpu.batch import SampledRows
from gpu.block_tables import IntArray
from gpu.step_shapes import StepShape

NO_SLOT = -1  # of padding


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan of rows that decode, and of prompts.

    Args:
        own: rows whose one token their sequences drew last; they draw the next. Long contexts first: they take the
            longest.
        prompts: the others, in the plan's order.
    """

    plan: StepPlan
    own: IntArray
    prompts: IntArray

    @property
    def shape(self) -> StepShape:
        """Without padding."""
        return StepShape(len(self.own), len(self.prompts), int(self.plan.lengths[self.prompts].sum()))

    @property
    def drawn(self) -> IntArray:
        """Rows that draw, in the order of their logits."""
        return np.concatenate([self.own, self.prompts[self.plan.samples[self.prompts]]])

    @property
    def sampled(self) -> SampledRows:
        rows = self.drawn
        return SampledRows(rows, self.plan.slots[rows], (self.plan.starts + self.plan.lengths)[rows])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Parts of one piece of integers; without prompts, the first alone."""

    rows: Any  # [3, rows]: slot, the last new token's position, its id or < 0: what the slot drew last
    tokens: Any  # [3, prompt tokens]: of each its slot, its position, and its id or < 0
    offsets: Any  # [rows + 1]: where a row's tokens begin
    asked: Any  # [rows]: index of the token that a drawing row draws behind; any for padding
    drawn: Any  # [2, rows]: slots and positions of the tokens that are drawn


def num_inputs(shape: StepShape) -> int:
    return sum(_sizes(shape))


def _sizes(shape: StepShape) -> list[int]:
    rows = shape.num_rows
    return [3 * rows, 3 * shape.num_prompt_tokens, rows + 1, rows, 2 * rows] if shape.num_prompts else [3 * rows]


def inputs_in(piece: Tensor, shape: StepShape) -> StepInputs:
    """Views of a step's part of it."""
    parts = [*torch.split(piece[: num_inputs(shape)], _sizes(shape))]
    return _shaped(parts + [piece[:0]] * (5 - len(parts)))


def _shaped(parts: Sequence[Any]) -> StepInputs:
    rows, tokens, offsets, asked, drawn = parts
    return StepInputs(rows.reshape(3, -1), tokens.reshape(3, -1), offsets, asked, drawn.reshape(2, -1))


def step_inputs(known: KnownPlan | None, shape: StepShape) -> Int32Array:
    """In one piece.

    Args:
        known: None: all is padding.
        shape: that it is padded to.
    """
    piece = np.full(num_inputs(shape), NO_SLOT, dtype=np.int32)
    parts = np.split(piece, np.cumsum(_sizes(shape))[:-1])
    found = _shaped(parts + [piece[:0]] * (5 - len(parts)))
    if shape.num_prompts:
        found.offsets[:] = np.minimum(np.arange(shape.num_rows + 1), shape.num_decodes)
        found.asked[:] = 0
    if known is not None:
        _fill(found, known, shape)
    return piece


def _fill(inputs: StepInputs, known: KnownPlan, shape: StepShape) -> None:
    plan, own, prompts = known.plan, known.own, known.prompts
    tokens_before = np.cumsum(plan.lengths) - plan.lengths  # [rows of the plan]
    inputs.rows[:, : len(own)] = plan.slots[own], plan.starts[own], plan.token_ids[tokens_before[own]]
    if not shape.num_prompts:
        return
    lengths, ends = plan.lengths[prompts], (plan.starts + plan.lengths)[prompts]
    last = shape.num_decodes + np.cumsum(lengths)  # one past each prompt's tokens
    inputs.rows[:2, shape.num_decodes : shape.num_decodes + len(prompts)] = plan.slots[prompts], ends - 1
    inputs.offsets[shape.num_decodes + 1 :] = last[-1]
    inputs.offsets[shape.num_decodes + 1 : shape.num_decodes + 1 + len(prompts)] = last
    row = np.repeat(np.arange(len(prompts)), lengths)  # [prompt tokens]
    index = np.arange(len(row)) - (last - lengths - shape.num_decodes)[row]  # in its row
    of_plan = prompts[row]
    inputs.tokens[:, : len(row)] = (
        plan.slots[of_plan],
        plan.starts[of_plan] + index,
        plan.token_ids[tokens_before[of_plan] + index],
    )
    sampled = known.sampled
    inputs.asked[: len(sampled.rows)] = np.concatenate([np.arange(len(own)), last[plan.samples[prompts]] - 1])
    inputs.drawn[:, : len(sampled.rows)] = sampled.slots, sampled.positions
