"""Tables grow by what plans tell, start anew with a slot, and tell a copy of theirs what has changed."""

import pytest

from core.plan import SequenceStart
from gpu.batch import BlockTables
from tests.gpu.driver import GREEDY, make_plan

SCRATCH = 99


def test_a_slots_blocks_are_its_sequences() -> None:
    tables = BlockTables(3, 60, SCRATCH)
    assert tables.width == 4
    tables.grow(make_plan([], tables=[(1, 0, 7), (2, 0, 5), (1, 1, 3)]))
    assert [tables.of(slot).tolist() for slot in range(3)] == [[], [7, 3], [5]]
    start = SequenceStart(1, (4, 5), 2, GREEDY, 0, ())
    tables.grow(make_plan([], tables=[(1, 0, 6)], sequence_starts=[start]))
    assert [tables.of(slot).tolist() for slot in range(3)] == [[], [6], [5]]
    assert tables.num_prompt_tokens.tolist() == [0, 2, 0]


def test_each_change_is_told_once_and_of_a_place_the_last() -> None:
    tables = BlockTables(3, 60, SCRATCH)
    tables.keep_changes()
    tables.grow(make_plan([], tables=[(1, 0, 7), (2, 3, 5)]))
    tables.grow(make_plan([], tables=[(1, 0, 8)]))
    places, blocks = tables.take_changes().tolist()
    assert dict(zip(places, blocks, strict=True)) == {4: 8, 11: 5}
    assert len(places) == 2
    assert tables.take_changes().shape == (2, 0)


def test_changes_that_nobody_takes_are_not_kept() -> None:
    tables = BlockTables(3, 60, SCRATCH)
    tables.grow(make_plan([], tables=[(1, 0, 7)]))
    with pytest.raises(AssertionError):
        tables.take_changes()
