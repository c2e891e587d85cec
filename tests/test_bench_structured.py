"""bench.structured on the embedded model: its figures are of what they say; times do not matter here."""

from pathlib import Path

import pytest

from bench import structured
from bench.kit import DEMO_MODEL
from bench.results import read_result


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(structured, "VOCABULARIES", (400, 2000))
    monkeypatch.setattr(structured, "TEXT_BYTES", 200_000)
    monkeypatch.setattr(structured, "texts", lambda: [path.read_text() for path in sorted(Path("docs").glob("*.md"))])
    monkeypatch.setattr(structured, "NUM_ROWS", 8)
    out = tmp_path / "structured.json"
    assert structured.main(["--model", str(DEMO_MODEL), "--quick", "--threads", "1", "--json", str(out)]) == 0
    masks, steps, first, forced = read_result(out).tables
    assert [row[0] for row in masks.rows] == [400, 2000]
    assert len(steps.rows) == 2
    assert [row[0] for row in first.rows] == ["free text", "cached grammar", "new grammar"]
    assert [row[0] for row in forced.rows] == [1, 8]
    assert all(row[1] > 30 for row in forced.rows)
