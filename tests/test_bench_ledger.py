"""bench.ledger for a few requests: every one is durable, and every load has its figures."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import ledger
from bench.results import read_result


@pytest.fixture
def _interpreter_restored() -> Iterator[None]:
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval_s)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("_interpreter_restored")
def test_each_load_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "NUM_SYNCS", 5)
    out = tmp_path / "ledger.json"
    assert ledger.main(["--requests", "20", "--directory", str(tmp_path), "--json", str(out)]) == 0
    (table,) = read_result(out).tables
    assert [row[0] for row in table.rows] == list(ledger.AT_ONCE)
    for name in ("commit", "disk"):
        p50, p99 = (table.columns.index(f"{name} {part} ms") for part in ("p50", "p99"))
        assert all(row[p50] <= row[p99] for row in table.rows)
