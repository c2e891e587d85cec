"""bench.ledger for a few requests: every one is durable, and every load has its figures."""

from pathlib import Path

from bench import ledger
from bench.results import read_result


def test_each_load_has_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "ledger.json"
    assert ledger.main(["--requests", "20", "--directory", str(tmp_path), "--json", str(out)]) == 0
    (table,) = read_result(out).tables
    assert [row[0] for row in table.rows] == list(ledger.AT_ONCE)
    assert all(row[3] <= row[4] for row in table.rows)
