"""bench/sampling.py runs, and gives a figure for every kind of request."""

from pathlib import Path

from bench.results import read_result
from bench.sampling import REQUESTS, main


def test_every_request_is_measured_with_both_kinds_of_logits(tmp_path: Path) -> None:
    path = tmp_path / "sampling.json"
    assert main(["--quick", "--rows", "1", "2", "--vocabularies", "600", "--json", str(path)]) == 0
    tables = read_result(path).tables
    assert [table.title for table in tables] == [
        f"Drawing a step's tokens, {kind} logits" for kind in ("peaked", "flat")
    ]
    for table in tables:
        assert [row[:3] for row in table.rows] == [(name, 600, rows) for rows in (1, 2) for name in REQUESTS]
        assert all(isinstance(figure, float) and figure > 0 for row in table.rows for figure in row[3:])
