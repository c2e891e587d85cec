"""Power failures: whatever a disk has forgotten that was never synced, the ledger has every record it promised."""

import random
from pathlib import Path

import pytest

from server.ledger.store import Checkpoint, LedgerRow, LedgerStore, Reserve, RowState, Settle, Write
from tests.server.power_failure import Disk
from tests.server.test_ledger_journal import row as ledger_row

PATH = Path("/ledger.db")


def row(number: int, **fields: object) -> LedgerRow:
    return ledger_row(f"r{number}", created_us=number, updated_us=number, stages_ms="x" * 300, **fields)


def batches(rng: random.Random) -> list[list[Write]]:
    """As a server writes them: some begin, some come on, some end."""
    made: list[list[Write]] = []
    running: list[int] = []
    for number in range(60):
        running.append(number)
        batch: list[Write] = [Reserve(row(number))]
        if rng.random() < 0.3:
            batch.append(Checkpoint(tuple(row(i, completion_tokens=7) for i in running)))
        while running and rng.random() < 0.45:
            ended = running.pop(rng.randrange(len(running)))
            batch.append(Settle(row(ended, state=RowState.SETTLED, completion_tokens=ended)))
        made.append(batch)
    return made


def begun_in(writes: list[Write]) -> set[str]:
    return {write.row.request_id for write in writes if isinstance(write, Reserve)}


def settled_in(writes: list[Write]) -> dict[str, LedgerRow]:
    return {write.row.request_id: write.row for write in writes if isinstance(write, Settle)}


@pytest.mark.parametrize("seed", range(60))
def test_what_was_committed_outlives_a_power_failure(seed: int) -> None:
    rng = random.Random(seed)
    disk = Disk(rng.randint(30, 400), rng)
    store = LedgerStore(PATH, disk.connect)
    writes: list[Write] = []
    batch: list[Write] = []
    for batch in batches(rng):
        store.commit(batch)
        if disk.left is not None:  # while it was written
            break
        writes += batch
    else:
        disk.left = disk.after_power_failure(rng)
    left = disk.left
    for _ in range(3):  # it fails again soon after
        store = LedgerStore(PATH, left.connect)
        store.close_orphans()
        rows = store.rows()
        found = {one.request_id: one for one in rows}
        assert len(found) == len(rows)
        if found.keys() != begun_in(writes):  # the batch has got there, or has not
            writes += batch
        assert found.keys() == begun_in(writes)
        promised = settled_in(writes)
        assert {name: found[name] for name in promised} == promised
        assert {one.state for name, one in found.items() if name not in promised} <= {RowState.ABORTED}
        left = left.after_power_failure(rng)


def test_disk_forgets_what_is_not_synced() -> None:
    """The other tests would pass on a disk that kept everything."""
    disk = Disk()
    store = LedgerStore(PATH, disk.connect)
    store._database.execute("PRAGMA synchronous = OFF")
    store.commit([Settle(row(1, state=RowState.SETTLED))])
    assert [one.request_id for one in store.rows()] == ["r1"]
    after = LedgerStore(PATH, disk.after_power_failure(random.Random(3)).connect)
    assert after.rows() == []
