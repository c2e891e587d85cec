"""A plan's columns become tensors: where each token goes, who attends together, what is cleared."""

import pytest
import torch

from core.config import BLOCK_SIZE
from core.plan import SequenceStart
from gpu.batch import GROUP_COST_TOKENS, MAX_GATHERED_TOKENS, BatchBuilder
from tests.gpu.driver import GREEDY, make_plan

SCRATCH = 100


def make_builder(max_model_len: int = 4096) -> BatchBuilder:
    return BatchBuilder(8, max_model_len, SCRATCH, torch.float32, torch.device("cpu"))


def test_tokens_go_to_their_blocks_and_offsets() -> None:
    plan = make_plan([(3, 14, [50, 51, 52, 53], True)], tables=[(3, 0, 9), (3, 1, 4)])
    batch = make_builder().build(plan)
    assert batch.token_ids.tolist() == [50, 51, 52, 53]
    assert batch.positions.tolist() == [14, 15, 16, 17]
    assert batch.kv_slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]


def test_decodes_stand_first_longest_first_and_lead_back_to_the_plans_rows() -> None:
    tables = [(slot, index, slot * 4 + index) for slot in range(4) for index in range(4)]
    rows = [(0, 0, [1, 2, 3], True), (1, 5, [4], True), (2, 0, [5, 6], False), (3, 40, [7], True)]
    batch = make_builder().build(make_plan(rows, tables=tables))
    assert batch.token_ids.tolist() == [7, 4, 1, 2, 3, 5, 6]
    assert batch.sampled_rows.tolist() == [3, 1, 0]
    assert batch.sampled_slots.tolist() == [3, 1, 0]
    assert batch.sampled_positions.tolist() == [41, 6, 3]
    assert batch.sampled_tokens.tolist() == [0, 1, 4]


def test_tables_grow_over_steps_and_are_forgotten_when_the_slot_starts_anew() -> None:
    builder = make_builder()
    builder.build(make_plan([(0, 0, [1] * 16, True)], tables=[(0, 0, 7)]))
    assert builder.build(make_plan([(0, 16, [1], True)], tables=[(0, 1, 8)])).groups[None][0].blocks.tolist() == [7, 8]
    assert builder.blocks_of(0).tolist() == [7, 8]
    start = SequenceStart(0, (1,), 1, GREEDY, 0, ())
    builder.build(make_plan([(0, 0, [1], True)], tables=[(0, 0, 3)], sequence_starts=[start]))
    assert builder.blocks_of(0).tolist() == [3]


def test_shorter_rows_of_a_group_are_padded_with_scratch_and_masked() -> None:
    tables = [(0, 0, 1), (0, 1, 2), (1, 0, 5)]
    (group,) = make_builder().build(make_plan([(0, 17, [1], True), (1, 3, [1], True)], tables=tables)).groups[None]
    assert group.blocks.tolist() == [1, 2, 5, SCRATCH]
    assert group.mask is not None
    assert group.mask.shape == (2, 1, 1, 18)
    assert group.mask.isneginf().sum((1, 2, 3)).tolist() == [0, 14]


def test_rows_of_equal_length_need_no_mask() -> None:
    (group,) = make_builder().build(make_plan([(0, 3, [1], True), (1, 3, [1], True)])).groups[None]
    assert group.mask is None


def test_rows_of_very_different_length_are_not_padded_together() -> None:
    rows = [(slot, start, [1], True) for slot, start in enumerate((3 * GROUP_COST_TOKENS, 10, 12, 11))]
    groups = make_builder().build(make_plan(rows)).groups[None]
    assert [(group.num_rows, group.num_context) for group in groups] == [(1, 3 * GROUP_COST_TOKENS + 1), (3, 13)]


@pytest.mark.parametrize("window", [None, MAX_GATHERED_TOKENS // 4 - 40])
def test_rows_that_decode_together_gather_no_more_than_the_limit(window: int | None) -> None:
    length = MAX_GATHERED_TOKENS // 3 - 15
    builder = BatchBuilder(8, length, SCRATCH, torch.float32, torch.device("cpu"), (window,))
    groups = builder.build(make_plan([(slot, length - 1, [1], True) for slot in range(8)])).groups[window]
    assert all(group.blocks.numel() * BLOCK_SIZE <= MAX_GATHERED_TOKENS for group in groups)
    assert [group.num_rows for group in groups] == ([3, 3, 2] if window is None else [4, 4])


def test_a_row_longer_than_the_limit_is_gathered_alone() -> None:
    builder = make_builder(2 * MAX_GATHERED_TOKENS)
    rows = [(slot, length - 1, [1], True) for slot, length in enumerate((2 * MAX_GATHERED_TOKENS, 9, 9))]
    groups = builder.build(make_plan(rows)).groups[None]
    assert [group.num_rows for group in groups] == [1, 2]


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
    batch = make_builder().build(make_plan(rows, tables=tables))
    assert batch.cleared_blocks is not None
    assert sorted(batch.cleared_blocks.tolist()) == [11, 31, 41]
    assert make_builder().build(make_plan(rows[:1], tables=tables)).cleared_blocks is None


def test_copies_pass_through() -> None:
    batch = make_builder().build(make_plan([(0, 3, [1], True)], copies=[(4, 5), (6, 7)]))
    assert batch.copy_sources is not None
    assert batch.copy_targets is not None
    assert (batch.copy_sources.tolist(), batch.copy_targets.tolist()) == ([4, 6], [5, 7])


def test_blocks_behind_a_window_are_not_gathered() -> None:
    builder = BatchBuilder(8, 4096, SCRATCH, torch.float32, torch.device("cpu"), (None, 20))
    tables = [(slot, index, slot * 10 + index) for slot in range(2) for index in range(5)]
    groups = builder.build(make_plan([(0, 69, [1], True), (1, 60, [1] * 9, True)], tables=tables)).groups
    assert [group.blocks.tolist() for group in groups[None]] == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert [group.blocks.tolist() for group in groups[20]] == [[3, 4], [12, 13, 14]]
    assert [group.num_context for group in groups[20]] == [22, 37]


def test_a_window_that_no_row_fills_takes_what_full_attention_takes() -> None:
    builder = BatchBuilder(8, 4096, SCRATCH, torch.float32, torch.device("cpu"), (None, 20))
    groups = builder.build(make_plan([(0, 19, [1], True), (1, 0, [1] * 20, True)])).groups
    assert groups[20] is groups[None]
