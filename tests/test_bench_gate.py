"""bench.gate for one turn: each check is one that succeeds or is refused as it should be, and has its figure."""

from pathlib import Path

import pytest

from bench import gate
from bench.results import read_result


def test_each_check_has_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TURN_S", 0.0001)
    out = tmp_path / "gate.json"
    assert gate.main(["--turns", "1", "--json", str(out)]) == 0
    (table,) = read_result(out).tables
    assert len(table.rows) == 13
    assert all(isinstance(us, float) and us > 0 for _, us in table.rows)
