"""A plan's columns become a step: where each token goes, who attends together, what is padding, what is cleared."""

import numpy as np
import pytest
import torch

from core.config import BLOCK_SIZE, Sight
from core.plan import PENDING, SequenceStart, make_plan
from gpu.attention import (
    CONTEXT_STEP,
    MAX_GATHERED_TOKENS,
    TILE_TOKENS,
    DecodeGroup,
    PromptGroup,
    RaggedRows,
    padded_contexts,
)
from gpu.step_shapes import StepShape
from gpu.steps import BlockTables, inputs_in, lay_out, num_inputs, pack, rows_by_sight
from tests.gpu.built import SCRATCH, Builder
from tests.gpu.driver import GREEDY


def of_prompts(num_slots: int, num_tokens: int = 4096) -> list[SequenceStart]:
    """Starts of slots whose first tokens are a prompt's."""
    return [SequenceStart(slot, (1,), num_tokens, GREEDY, 0, ()) for slot in range(num_slots)]


def test_tokens_go_to_their_blocks_and_offsets() -> None:
    tables = [(3, 0, 9), (3, 1, 4)]
    plan = make_plan([(3, 14, [50, 51, 52, 53], True)], tables=tables, sequence_starts=of_prompts(4))
    batch = Builder().build(plan)
    assert batch.tokens.token_ids.tolist() == [50, 51, 52, 53]
    assert batch.tokens.positions.tolist() == [14, 15, 16, 17]
    assert batch.tokens.kv_slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]


def test_own_tokens_stand_first_longest_first_and_lead_back_to_the_plans_rows() -> None:
    """Slots 1 and 3 decode; slot 4 computes its last prompt token and two of its own, as after a preemption."""
    tables = [(slot, index, slot * 4 + index) for slot in range(5) for index in range(4)]
    starts = [SequenceStart(slot, (1,), length, GREEDY, 0, ()) for slot, length in enumerate((3, 5, 9, 30, 11))]
    rows = [(0, 0, [1, 2, 3], True), (1, 5, [4], True), (2, 0, [5, 6], False), (3, 40, [7], True)]
    rows.append((4, 10, [8, 9, 10], True))
    batch = Builder().build(make_plan(rows, tables=tables, sequence_starts=starts))
    assert batch.tokens.token_ids.tolist() == [7, 10, 9, 4, 1, 2, 3, 5, 6, 8]
    assert batch.tokens.positions.tolist() == [40, 12, 11, 5, 0, 1, 2, 0, 1, 10]
    sampled = batch.layout.sampled
    assert (sampled.rows.tolist(), sampled.slots.tolist()) == ([3, 4, 1, 0], [3, 4, 1, 0])
    assert sampled.positions.tolist() == [41, 13, 6, 3]
    assert batch.inputs.asked.tolist() == [0, 1, 3, 6]
    assert batch.inputs.offsets.tolist() == [0, 1, 2, 3, 4, 7, 9, 10]
    groups = batch.groups()
    assert [(type(group), group.first_token, group.end_token) for group in groups] == [
        (DecodeGroup, 0, 4),
        (PromptGroup, 4, 7),
        (PromptGroup, 7, 9),
        (PromptGroup, 9, 10),
    ]


def test_tables_grow_over_steps_and_are_forgotten_when_the_slot_starts_anew() -> None:
    builder = Builder()
    builder.build(make_plan([(0, 0, [1] * 16, True)], tables=[(0, 0, 7)]))
    (group,) = builder.build(make_plan([(0, 16, [1], True)], tables=[(0, 1, 8)])).groups()
    assert group.blocks.tolist() == [[7, 8, SCRATCH, SCRATCH]]
    assert builder.tables.of(0).tolist() == [7, 8]
    start = SequenceStart(0, (1,), 1, GREEDY, 0, ())
    builder.build(make_plan([(0, 0, [1], True)], tables=[(0, 0, 3)], sequence_starts=[start]))
    assert builder.tables.of(0).tolist() == [3]


def test_contexts_are_padded_with_scratch_and_masked() -> None:
    """Blocks that a slot has, but has not come to, are not read: nothing is known of what they hold."""
    tables = [(0, 0, 1), (0, 1, 2), (1, 0, 5), (1, 1, 6)]
    (group,) = Builder().build(make_plan([(0, 17, [1], True), (1, 3, [1], True)], tables=tables)).groups()
    assert group.blocks.tolist() == [[1, 2, SCRATCH, SCRATCH], [5, SCRATCH, SCRATCH, SCRATCH]]
    assert isinstance(group, DecodeGroup)
    assert group.mask is not None
    assert group.mask.shape == (2, 1, 1, 64)
    assert group.mask.isneginf().sum((1, 2, 3)).tolist() == [64 - 18, 64 - 4]


def test_rows_that_need_no_padding_need_no_mask() -> None:
    (group,) = Builder().build(make_plan([(0, 63, [1], True), (1, 63, [1], True)])).groups()
    assert isinstance(group, DecodeGroup)
    assert group.mask is None


@pytest.mark.parametrize(
    ("num_tokens", "padded"),
    [(1, 64), (64, 64), (65, 128), (200, 256), (257, 512), (512, 512), (513, 1024), (1030, 1536)],
)
def test_a_context_is_padded_to_what_its_own_length_says(num_tokens: int, padded: int) -> None:
    assert padded_contexts(np.array([num_tokens])).tolist() == [padded]


def test_rows_attend_together_where_they_are_padded_alike() -> None:
    rows = [(slot, start, [1], True) for slot, start in enumerate((3 * CONTEXT_STEP, 10, 12, 300))]
    groups = Builder().build(make_plan(rows)).groups()
    assert [group.blocks.shape for group in groups] == [(1, 4 * CONTEXT_STEP // BLOCK_SIZE), (1, 32), (2, 4)]


@pytest.mark.parametrize("window", [None, MAX_GATHERED_TOKENS // 4 - 40])
def test_rows_that_decode_together_gather_no_more_than_the_limit(window: int | None) -> None:
    length = MAX_GATHERED_TOKENS // 3 - CONTEXT_STEP
    builder = Builder(length, (window,))
    groups = builder.build(make_plan([(slot, length - 1, [1], True) for slot in range(8)])).groups(window)
    assert all(group.blocks.numel() * BLOCK_SIZE <= MAX_GATHERED_TOKENS for group in groups)
    assert [len(group.blocks) for group in groups] == ([3, 3, 2] if window is None else [4, 4])


def test_a_row_longer_than_the_limit_is_gathered_alone() -> None:
    builder = Builder(2 * MAX_GATHERED_TOKENS)
    rows = [(slot, length - 1, [1], True) for slot, length in enumerate((2 * MAX_GATHERED_TOKENS, 9, 9))]
    groups = builder.build(make_plan(rows)).groups()
    assert [len(group.blocks) for group in groups] == [1, 2]


def test_a_prompt_is_cut_where_a_tile_ends_wherever_its_chunk_does() -> None:
    """The tile that two chunks share has the same context and the same mask in both."""
    builder = Builder()
    tables = [(0, index, index) for index in range(10)]
    begun = builder.build(make_plan([(0, 0, [1] * 70, False)], tables=tables, sequence_starts=of_prompts(1)))
    (before,), (after,) = begun.groups(), builder.build(make_plan([(0, 70, [1] * 80, False)])).groups()
    assert isinstance(before, PromptGroup)
    assert isinstance(after, PromptGroup)
    assert [(tile.first, tile.num_tokens, tile.num_context) for tile in before.tiles] == [(0, 64, 64), (0, 6, 128)]
    assert [(tile.first, tile.num_tokens, tile.num_context) for tile in after.tiles] == [(6, 58, 128), (0, 22, 192)]
    assert torch.equal(before.tiles[1].mask, after.tiles[0].mask)
    assert before.blocks.tolist() == [0, 1, 2, 3, 4, SCRATCH, SCRATCH, SCRATCH]
    assert after.blocks.tolist() == [*range(10), SCRATCH, SCRATCH]
    assert len(after.tiles[0].mask) == TILE_TOKENS


def test_only_blocks_begun_and_not_filled_are_cleared() -> None:
    """A filled block is overwritten whole; one begun earlier, or shared by copy on write, has content to keep."""
    tables = [(slot, index, slot * 10 + index) for slot in range(6) for index in range(3)]
    rows = [
        (0, 0, [1] * 16, False),  # fills its block
        (1, 0, [1] * 17, False),  # fills one, begins another
        (2, 5, [1] * 3, False),  # begun earlier
        (3, 15, [1] * 2, False),  # ends one, begins another
        (4, 16, [1], True),  # begins one
        (5, 15, [1], True),  # ends one
    ]
    block_tables, plan = BlockTables(8, 4096, SCRATCH), make_plan(rows, tables=tables)
    block_tables.grow(plan)
    assert sorted(block_tables.fresh_blocks(plan).tolist()) == [11, 31, 41]
    assert not len(block_tables.fresh_blocks(make_plan(rows[:1])))


def test_blocks_behind_a_window_are_not_gathered() -> None:
    builder = Builder(windows=(None, 20))
    tables = [(slot, index, slot * 10 + index) for slot in range(2) for index in range(10)]
    starts = [SequenceStart(0, (1,), 5, GREEDY, 0, ()), *of_prompts(2)[1:]]
    plan = make_plan([(0, 69, [1], True), (1, 140, [1] * 9, True)], tables=tables, sequence_starts=starts)
    built = builder.build(plan)
    own, prompt = built.groups()
    assert own.blocks.tolist() == [[0, 1, 2, 3, 4, *[SCRATCH] * 3]]
    assert prompt.blocks.tolist() == [*range(10, 20), SCRATCH, SCRATCH]
    own, prompt = built.groups(20)
    assert own.blocks.tolist() == [[3, 4, SCRATCH, SCRATCH]]
    assert prompt.blocks.tolist() == [16, 17, 18, 19, SCRATCH, SCRATCH]  # from 109 = 128 + 1 - 20 on


def test_a_window_that_no_row_fills_takes_what_full_attention_takes() -> None:
    builder = Builder(windows=(None, 20))
    built = builder.build(make_plan([(0, 19, [1], True), (1, 0, [1] * 20, True)]))
    shapes = [[group.blocks.tolist() for group in built.groups(window)] for window in (None, 20)]
    assert shapes[0] == shapes[1]


def test_tables_that_are_copied_change_as_they_grow_each_place_once() -> None:
    tables = BlockTables(3, 64, SCRATCH)
    plan = make_plan([], tables=[(2, 1, 7), (0, 3, 8), (2, 1, 9)])
    places, blocks = tables.changes(plan)
    assert dict(zip(places.tolist(), blocks.tolist(), strict=True)) == {2 * 4 + 1: 9, 3: 8}
    assert len(places) == 2
    tables.grow(plan)
    assert [tables.of(slot).tolist() for slot in range(3)] == [[8], [], [9]]
    assert [len(part) for part in tables.changes(make_plan([]))] == [0, 0]


TOGETHER = [(0, 10, [1, 2, 3], True), (1, 20, [4, 5], True), (2, 30, [6], True), (3, 30, [7], False)]


@pytest.mark.parametrize("are_alone", [False, True])
def test_own_tokens_of_a_row_are_together_or_alone_as_the_kernels_want(are_alone: bool) -> None:
    """Slot 0 computes its last prompt token and two of its own, as after a preemption; slot 1 two of its own; slot 3
    one that is not its last."""
    starts = [SequenceStart(slot, (1,), length, GREEDY, 0, ()) for slot, length in enumerate((11, 3, 9, 9))]
    layout = Builder(are_own_alone=are_alone).build(make_plan(TOGETHER, sequence_starts=starts)).layout
    if are_alone:
        assert (layout.num_own, layout.ends.tolist()) == (6, [31, 31, 22, 21, 13, 12, 11])
        assert layout.sampled.rows.tolist() == [2, 1, 0]
        assert layout.asked is not None
        assert layout.asked.tolist() == [0, 2, 4]
    else:
        assert (layout.num_own, layout.ends.tolist()) == (1, [31, 13, 22, 31])
        assert layout.lengths.tolist() == [3, 2, 1]


def test_a_prompts_last_token_is_no_row_that_decodes() -> None:
    """It is rounded as in a longer chunk."""
    plan = make_plan([(0, 10, [1], True)], sequence_starts=[SequenceStart(0, (1,), 11, GREEDY, 0, ())])
    assert Builder(are_own_alone=False).build(plan).layout.num_own == 0


def test_windows_share_all_but_what_they_hide() -> None:
    """Whatever the step's lengths: a graph is captured once for all."""
    rows = RaggedRows(torch.zeros(1, 1), torch.ones(1), torch.arange(2), num_decodes=1, window=None)
    attending = rows_by_sight(rows, (Sight(), Sight(20), Sight(4096), Sight(chunk=4096)), 4096)
    whole, windowed = attending[Sight()], attending[Sight(20)]
    assert attending[Sight(4096)] is attending[Sight(chunk=4096)] is whole  # no context is longer
    assert windowed.window == 20
    assert windowed.tables is whole.tables


# Slot 4 decodes at 9, slot 2 computes 3 of a prompt and samples, slot 0 decodes at 20 what it sampled last, slot 1
# computes two of a prompt, the second of which it sampled itself.
PADDED = make_plan(
    [(4, 9, [70], True), (2, 16, [5, 6, 7], True), (0, 20, [PENDING], True), (1, 2, [8, PENDING], False)]
)
PROMPTS = np.array([20, 3, 19, 0, 9])


def test_what_is_pending_is_what_the_slot_sampled_last() -> None:
    starts = [SequenceStart(slot, (1,), int(length), GREEDY, 0, ()) for slot, length in enumerate(PROMPTS)]
    builder = Builder()
    builder.tables.grow(make_plan([], sequence_starts=starts))
    assert builder.build(PADDED).tokens.token_ids.tolist() == [1000, 70, 1001, 5, 6, 7, 8]


def test_decodes_alone_ask_for_all_their_rows_and_padding_is_nobodys() -> None:
    plan, shape = make_plan([(4, 9, [70], True), (0, 20, [PENDING], True)]), StepShape(3)
    layout = lay_out(plan, PROMPTS, are_own_alone=False)
    assert (layout.shape, layout.asked) == (StepShape(2), None)
    found = inputs_in(torch.from_numpy(pack(layout, shape, 0)), shape, 0)
    assert (found.slots.tolist(), found.ends.tolist()) == ([0, 4, -1], [21, 10, 0])
    assert found.offsets.tolist() == [0, 1, 2, 3]
    assert found.tokens.tolist() == [[0, 4, -1], [20, 9, -1], [-1, 70, -1]]
    assert found.sampled.tolist() == [[0, 4, -1], [21, 10, -1]]


def test_prompts_lie_behind_as_many_decodes_as_the_shape_has() -> None:
    layout, shape = lay_out(PADDED, PROMPTS, False), StepShape(num_decodes=3, num_prompts=3, num_prompt_tokens=7)
    assert layout.shape == StepShape(2, 2, 5)
    found = inputs_in(torch.from_numpy(pack(layout, shape, shape.num_rows)), shape, shape.num_rows)
    assert (found.slots.tolist(), found.ends.tolist()) == ([0, 4, -1, 2, 1, -1], [21, 10, 0, 19, 4, 0])
    assert found.tokens.tolist() == [
        [0, 4, -1, 2, 2, 2, 1, 1, -1, -1],
        [20, 9, -1, 16, 17, 18, 2, 3, -1, -1],
        [-1, 70, -1, 5, 6, 7, 8, PENDING, -1, -1],
    ]
    assert found.offsets.tolist() == [0, 1, 2, 3, 6, 8, 8]
    assert found.asked.tolist() == [0, 1, 5, 0, 0, 0]
    assert found.sampled.tolist() == [[0, 4, 2, -1, -1, -1], [21, 10, 19, -1, -1, -1]]


def test_padding_alone_asks_for_nothing() -> None:
    shape = StepShape(2, 2, 4)
    piece = torch.from_numpy(pack(None, shape, 4))
    assert len(piece) == num_inputs(shape, 4)
    found = inputs_in(piece, shape, 4)
    assert all((part[0] == -1).all() for part in (found.sampled, found.tokens))
    assert (found.ends.tolist(), found.offsets.tolist(), found.asked.tolist()) == ([0] * 4, [0, 1, 2, 2, 2], [0] * 4)
