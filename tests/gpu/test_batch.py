"""A plan's columns become tensors: where each token goes, who attends together, what is cleared."""

import numpy as np
import pytest
import torch

from core.config import BLOCK_SIZE
from core.plan import SequenceStart
from gpu.attention import (
    CONTEXT_STEP,
    MAX_GATHERED_TOKENS,
    TILE_TOKENS,
    DecodeGroup,
    PromptGroup,
    TorchAttention,
    padded_contexts,
)
from gpu.batch import BatchBuilder, DeviceBatch
from tests.gpu.driver import GREEDY, make_plan

SCRATCH = 100
CPU = torch.device("cpu")
TORCH = TorchAttention(torch.float32, CPU)


def of_prompts(num_slots: int, num_tokens: int = 4096) -> list[SequenceStart]:
    """Starts of slots whose first tokens are a prompt's."""
    return [SequenceStart(slot, (1,), num_tokens, GREEDY, 0, ()) for slot in range(num_slots)]


def make_builder(max_model_len: int = 4096) -> BatchBuilder:
    return BatchBuilder(8, max_model_len, SCRATCH, CPU, TORCH)


def groups_of(batch: DeviceBatch, window: int | None = None) -> list[DecodeGroup | PromptGroup]:
    """Who attends together, as torch's attention has it."""
    rows = batch.attending[window]
    assert rows.host is not None
    return TORCH.groups_of(rows.host, rows.num_decodes, rows.window)


def test_tokens_go_to_their_blocks_and_offsets() -> None:
    tables = [(3, 0, 9), (3, 1, 4)]
    plan = make_plan([(3, 14, [50, 51, 52, 53], True)], tables=tables, sequence_starts=of_prompts(4))
    batch = make_builder().build(plan)
    assert batch.token_ids.tolist() == [50, 51, 52, 53]
    assert batch.positions.tolist() == [14, 15, 16, 17]
    assert batch.kv_slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, 4 * 16, 4 * 16 + 1]


def test_own_tokens_stand_first_longest_first_and_lead_back_to_the_plans_rows() -> None:
    """Slots 1 and 3 decode; slot 4 computes its last prompt token and two of its own, as after a preemption."""
    tables = [(slot, index, slot * 4 + index) for slot in range(5) for index in range(4)]
    starts = [SequenceStart(slot, (1,), length, GREEDY, 0, ()) for slot, length in enumerate((3, 5, 9, 30, 11))]
    rows = [(0, 0, [1, 2, 3], True), (1, 5, [4], True), (2, 0, [5, 6], False), (3, 40, [7], True)]
    rows.append((4, 10, [8, 9, 10], True))
    batch = make_builder().build(make_plan(rows, tables=tables, sequence_starts=starts))
    assert batch.token_ids.tolist() == [7, 10, 9, 4, 1, 2, 3, 5, 6, 8]
    assert batch.positions.tolist() == [40, 12, 11, 5, 0, 1, 2, 0, 1, 10]
    assert batch.sampled_rows.tolist() == [0, 1, 3, 4]
    assert batch.sampled_slots.tolist() == [0, 1, 3, 4]
    assert batch.sampled_positions.tolist() == [3, 6, 41, 13]
    assert batch.asked_tokens is not None
    assert batch.asked_tokens.tolist() == [6, 3, 0, 1]
    groups = groups_of(batch)
    assert [(type(group), group.first_token, group.end_token) for group in groups] == [
        (DecodeGroup, 0, 4),
        (PromptGroup, 4, 7),
        (PromptGroup, 7, 9),
        (PromptGroup, 9, 10),
    ]


def test_tables_grow_over_steps_and_are_forgotten_when_the_slot_starts_anew() -> None:
    builder = make_builder()
    builder.build(make_plan([(0, 0, [1] * 16, True)], tables=[(0, 0, 7)]))
    (group,) = groups_of(builder.build(make_plan([(0, 16, [1], True)], tables=[(0, 1, 8)])))
    assert group.blocks.tolist() == [[7, 8, SCRATCH, SCRATCH]]
    assert builder.blocks_of(0).tolist() == [7, 8]
    start = SequenceStart(0, (1,), 1, GREEDY, 0, ())
    builder.build(make_plan([(0, 0, [1], True)], tables=[(0, 0, 3)], sequence_starts=[start]))
    assert builder.blocks_of(0).tolist() == [3]


def test_contexts_are_padded_with_scratch_and_masked() -> None:
    """Blocks that a slot has, but has not come to, are not read: nothing is known of what they hold."""
    tables = [(0, 0, 1), (0, 1, 2), (1, 0, 5), (1, 1, 6)]
    (group,) = groups_of(make_builder().build(make_plan([(0, 17, [1], True), (1, 3, [1], True)], tables=tables)))
    assert group.blocks.tolist() == [[1, 2, SCRATCH, SCRATCH], [5, SCRATCH, SCRATCH, SCRATCH]]
    assert isinstance(group, DecodeGroup)
    assert group.mask is not None
    assert group.mask.shape == (2, 1, 1, 64)
    assert group.mask.isneginf().sum((1, 2, 3)).tolist() == [64 - 18, 64 - 4]


def test_rows_that_need_no_padding_need_no_mask() -> None:
    (group,) = groups_of(make_builder().build(make_plan([(0, 63, [1], True), (1, 63, [1], True)])))
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
    groups = groups_of(make_builder().build(make_plan(rows)))
    assert [group.blocks.shape for group in groups] == [(1, 4 * CONTEXT_STEP // BLOCK_SIZE), (1, 32), (2, 4)]


@pytest.mark.parametrize("window", [None, MAX_GATHERED_TOKENS // 4 - 40])
def test_rows_that_decode_together_gather_no_more_than_the_limit(window: int | None) -> None:
    length = MAX_GATHERED_TOKENS // 3 - CONTEXT_STEP
    builder = BatchBuilder(8, length, SCRATCH, CPU, TORCH, (window,))
    groups = groups_of(builder.build(make_plan([(slot, length - 1, [1], True) for slot in range(8)])), window)
    assert all(group.blocks.numel() * BLOCK_SIZE <= MAX_GATHERED_TOKENS for group in groups)
    assert [len(group.blocks) for group in groups] == ([3, 3, 2] if window is None else [4, 4])


def test_a_row_longer_than_the_limit_is_gathered_alone() -> None:
    builder = make_builder(2 * MAX_GATHERED_TOKENS)
    rows = [(slot, length - 1, [1], True) for slot, length in enumerate((2 * MAX_GATHERED_TOKENS, 9, 9))]
    groups = groups_of(builder.build(make_plan(rows)))
    assert [len(group.blocks) for group in groups] == [1, 2]


def test_a_prompt_is_cut_where_a_tile_ends_wherever_its_chunk_does() -> None:
    """The tile that two chunks share has the same context and the same mask in both."""
    builder = make_builder()
    tables = [(0, index, index) for index in range(10)]
    begun = builder.build(make_plan([(0, 0, [1] * 70, False)], tables=tables, sequence_starts=of_prompts(1)))
    (before,), (after,) = groups_of(begun), groups_of(builder.build(make_plan([(0, 70, [1] * 80, False)])))
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
    builder = BatchBuilder(8, 4096, SCRATCH, CPU, TORCH, (None, 20))
    tables = [(slot, index, slot * 10 + index) for slot in range(2) for index in range(10)]
    starts = [SequenceStart(0, (1,), 5, GREEDY, 0, ()), *of_prompts(2)[1:]]
    plan = make_plan([(0, 69, [1], True), (1, 140, [1] * 9, True)], tables=tables, sequence_starts=starts)
    batch = builder.build(plan)
    own, prompt = groups_of(batch)
    assert own.blocks.tolist() == [[0, 1, 2, 3, 4, *[SCRATCH] * 3]]
    assert prompt.blocks.tolist() == [*range(10, 20), SCRATCH, SCRATCH]
    own, prompt = groups_of(batch, 20)
    assert own.blocks.tolist() == [[3, 4, SCRATCH, SCRATCH]]
    assert prompt.blocks.tolist() == [16, 17, 18, 19, SCRATCH, SCRATCH]  # from 109 = 128 + 1 - 20 on


def test_a_window_that_no_row_fills_takes_what_full_attention_takes() -> None:
    builder = BatchBuilder(8, 4096, SCRATCH, CPU, TORCH, (None, 20))
    batch = builder.build(make_plan([(0, 19, [1], True), (1, 0, [1] * 20, True)]))
    shapes = [[group.blocks.tolist() for group in groups_of(batch, window)] for window in (None, 20)]
    assert shapes[0] == shapes[1]
