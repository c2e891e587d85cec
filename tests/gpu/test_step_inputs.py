"""A step's columns lie where a graph of its shape reads them, and all else is padding."""

import numpy as np
import torch

from core.plan import PENDING
from gpu.device_steps import KnownPlan, inputs_in, num_inputs, step_inputs
from gpu.step_shapes import StepShape
from tests.gpu.driver import make_plan

# Slot 4 decodes at 9, slot 2 computes 3 of a prompt and draws, slot 0 decodes at 20 what it drew last, slot 1 computes
# two of a prompt, the second of which it drew itself.
PLAN = make_plan([(4, 9, [70], True), (2, 16, [5, 6, 7], True), (0, 20, [PENDING], True), (1, 2, [8, PENDING], False)])
KNOWN = KnownPlan(PLAN, own=np.array([2, 0]), prompts=np.array([1, 3]))


def test_a_plans_shape_and_its_rows_that_draw() -> None:
    assert KNOWN.shape == StepShape(2, 2, 5)
    assert KNOWN.drawn.tolist() == [2, 0, 1]
    sampled = KNOWN.sampled
    assert (sampled.slots.tolist(), sampled.positions.tolist()) == ([0, 4, 2], [21, 10, 19])


def test_decodes_are_rows_and_nothing_else() -> None:
    plan = make_plan([(4, 9, [70], True), (0, 20, [PENDING], True)])
    shape = StepShape(3)
    found = step_inputs(KnownPlan(plan, np.array([1, 0]), np.array([], int)), shape)
    assert found.reshape(3, 3).tolist() == [[0, 4, -1], [20, 9, -1], [-1, 70, -1]]
    views = inputs_in(torch.from_numpy(np.append(found, [99, 99])), shape)
    assert views.rows.tolist() == found.reshape(3, 3).tolist()
    assert views.tokens.numel() == views.offsets.numel() == 0


def test_prompts_lie_behind_as_many_decodes_as_the_shape_has() -> None:
    shape = StepShape(num_decodes=3, num_prompts=3, num_prompt_tokens=7)
    views = inputs_in(torch.from_numpy(step_inputs(KNOWN, shape)), shape)
    assert views.rows.tolist() == [[0, 4, -1, 2, 1, -1], [20, 9, -1, 18, 3, -1], [-1, 70, -1, -1, -1, -1]]
    assert views.tokens.tolist() == [
        [2, 2, 2, 1, 1, -1, -1],
        [16, 17, 18, 2, 3, -1, -1],
        [5, 6, 7, 8, PENDING, -1, -1],
    ]
    assert views.offsets.tolist() == [0, 1, 2, 3, 6, 8, 8]
    assert views.asked[:3].tolist() == [0, 1, 5]
    assert all(0 <= index < shape.num_tokens for index in views.asked.tolist())
    assert views.drawn.tolist() == [[0, 4, 2, -1, -1, -1], [21, 10, 19, -1, -1, -1]]


def test_padding_alone_asks_for_nothing_and_reads_no_further_than_it_may() -> None:
    shape = StepShape(2, 2, 4)
    found = step_inputs(None, shape)
    assert len(found) == num_inputs(shape)
    views = inputs_in(torch.from_numpy(found), shape)
    assert (views.rows[0] == -1).all()
    assert (views.tokens[0] == -1).all()
    assert (views.drawn[0] == -1).all()
    assert views.offsets.tolist() == [0, 1, 2, 2, 2]
    assert views.asked.tolist() == [0] * 4
