"""Many connections, one flush each."""

from server.wire.connection import WriteBatch
from tests.server.virtual_loop import VirtualTimeLoop


class Dirty:
    """Counts its flushes, and may make another one dirty in its own."""

    def __init__(self, batch: WriteBatch, next_dirty: "Dirty | None" = None) -> None:
        self.num_flushes = 0
        self._batch = batch
        self._next_dirty = next_dirty

    def flush(self) -> None:
        self.num_flushes += 1
        if self._next_dirty is not None:
            self._batch.add(self._next_dirty)

    def break_down(self) -> None:
        raise AssertionError("nothing has failed")


def test_loop_flushes_what_nobody_else_does(loop: VirtualTimeLoop) -> None:
    batch = WriteBatch(loop)
    dirty = Dirty(batch)
    for expected in (1, 2):
        batch.add(dirty)
        assert dirty.num_flushes == expected - 1
        loop.settle()
        assert dirty.num_flushes == expected


def test_flush_all_writes_at_once_and_only_once(loop: VirtualTimeLoop) -> None:
    batch = WriteBatch(loop)
    dirty = Dirty(batch)
    batch.add(dirty)
    batch.flush_all()
    assert dirty.num_flushes == 1
    loop.settle()
    assert dirty.num_flushes == 1


def test_connection_made_dirty_by_a_flush_is_flushed_too(loop: VirtualTimeLoop) -> None:
    batch = WriteBatch(loop)
    second = Dirty(batch)
    batch.add(Dirty(batch, second))
    loop.settle()
    assert second.num_flushes == 1


class Faulty(Dirty):
    """Raises in its flush."""

    num_faults = 0

    def flush(self) -> None:
        super().flush()
        raise ZeroDivisionError

    def break_down(self) -> None:
        self.num_faults += 1


def test_connection_that_cannot_be_flushed_keeps_none_from_its_own(loop: VirtualTimeLoop) -> None:
    batch = WriteBatch(loop)
    before, faulty, behind = Dirty(batch), Faulty(batch), Dirty(batch)
    for _ in range(2):
        for dirty in (before, faulty, behind):
            batch.add(dirty)
        loop.settle()
    assert (before.num_flushes, faulty.num_faults, behind.num_flushes) == (2, 2, 2)
