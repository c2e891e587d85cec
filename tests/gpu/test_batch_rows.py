"""What kernels get of a plan: all rows of the step at once."""

import pytest
import torch
from torch import Tensor

from core.plan import SequenceStart
from gpu.attention import RaggedRows
from gpu.batch import BatchBuilder
from gpu.kv_cache import LayerKV
from gpu.scores import Scores
from tests.gpu.driver import GREEDY, make_plan

SCRATCH = 100
TABLES = [(slot, index, slot * 10 + index) for slot in range(5) for index in range(4)]


class Kernels:
    """Asked for what they want, and never to attend."""

    def __init__(self, index_dtype: torch.dtype, are_own_tokens_alone: bool) -> None:
        self.index_dtype = index_dtype
        self.are_own_tokens_alone = are_own_tokens_alone
        self.prompt_tile = 64

    def reserve(self, num_decodes: int, context: int, num_heads: int, kv: LayerKV) -> None:
        raise AssertionError("a builder reserves nothing")

    def attend(self, query: Tensor, kv: LayerKV, rows: RaggedRows, scores: Scores) -> Tensor:
        raise AssertionError("a builder computes nothing")


def make_builder(are_alone: bool, windows: tuple[int | None, ...] = (None,)) -> BatchBuilder:
    kernels = Kernels(torch.int64 if are_alone else torch.int32, are_alone)
    return BatchBuilder(8, 4096, SCRATCH, torch.device("cpu"), kernels, windows)


def rows_of(builder: BatchBuilder, rows: list[tuple[int, int, list[int], bool]], prompts: list[int]) -> RaggedRows:
    starts = [SequenceStart(slot, (1,), length, GREEDY, 0, ()) for slot, length in enumerate(prompts)]
    found = builder.build(make_plan(rows, tables=TABLES, sequence_starts=starts)).attending[None]
    assert isinstance(found, RaggedRows)
    return found


def test_rows_of_one_own_token_come_first_longest_first_then_prompts() -> None:
    plan = [(0, 0, [1, 2, 3], True), (1, 5, [4], True), (2, 0, [5, 6], False), (3, 40, [7], True)]
    rows = rows_of(make_builder(are_alone=False), plan, [3, 5, 9, 30])
    assert rows.num_decodes == 2
    assert rows.tables.tolist() == [[30, 31, 32], [10, 11, 12], [0, 1, 2], [20, 21, 22]]
    assert rows.ends.tolist() == [41, 6, 3, 2]
    assert rows.offsets.tolist() == [0, 1, 2, 5, 7]
    assert rows.window is None
    assert {rows.tables.dtype, rows.ends.dtype, rows.offsets.dtype} == {torch.int32}


@pytest.mark.parametrize("are_alone", [False, True])
def test_own_tokens_of_a_row_are_together_or_alone_as_the_kernels_want(are_alone: bool) -> None:
    """Slot 0 computes its last prompt token and two of its own, as after a preemption; slot 1 two of its own."""
    rows = rows_of(make_builder(are_alone), [(0, 10, [1, 2, 3], True), (1, 20, [4, 5], True)], [11, 3])
    if are_alone:
        assert rows.num_decodes == 4
        assert rows.ends.tolist() == [22, 21, 13, 12, 11]
        assert rows.offsets.tolist() == [0, 1, 2, 3, 4, 5]
        assert rows.tables.dtype == torch.int64
    else:
        assert rows.num_decodes == 0
        assert rows.ends.tolist() == [13, 22]
        assert rows.offsets.tolist() == [0, 3, 5]


def test_a_prompts_last_token_is_no_row_that_decodes() -> None:
    """It is rounded as in a longer chunk."""
    rows = rows_of(make_builder(are_alone=False), [(0, 10, [1], True)], [11])
    assert rows.num_decodes == 0


def test_windows_share_all_but_what_they_hide() -> None:
    """Whatever the step's lengths: a graph is captured once for all."""
    attending = make_builder(False, (None, 20, 4096)).build(make_plan([(0, 3, [1], True)], tables=TABLES)).attending
    whole, windowed = attending[None], attending[20]
    assert isinstance(whole, RaggedRows)
    assert isinstance(windowed, RaggedRows)
    assert attending[4096] is whole  # no context is longer
    assert windowed.window == 20
    assert windowed.tables is whole.tables
