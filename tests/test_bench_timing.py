"""bench.timing, short: the server's clock never tells more than the client's, and each figure is there."""

from pathlib import Path

import pytest

from bench import timing
from bench.results import read_result


def test_server_accounts_for_no_more_than_the_client_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "STEP_RATE", 2000.0)
    monkeypatch.setattr(timing, "NUM_TOKENS", 5)
    monkeypatch.setattr(timing, "NUM_STREAMS", 3)
    monkeypatch.setattr(timing, "NUM_SCRAPES", 3)
    monkeypatch.setattr(timing, "SCRAPE_PAUSE_S", 0.0)
    monkeypatch.setattr(timing, "NUM_STAMPS", 100)
    out = tmp_path / "timing.json"
    assert timing.main(["--requests", "3", "--json", str(out)]) == 0
    requests, scrapes, stamps = read_result(out).tables
    assert [row[0] for row in requests.rows] == ["streamed", "whole"]
    assert [row[-1] for row in requests.rows] == [0.0, 0.0]  # one clock, read inside of what the client reads
    assert scrapes.rows[0][0] == 2
    assert len(stamps.rows) == 3
