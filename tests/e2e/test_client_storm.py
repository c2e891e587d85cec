"""A short one of tests.e2e.client_storm, which says what must hold."""

from pathlib import Path

import pytest

from tests.e2e.client_storm import run_storm

NUM_REQUESTS = 250


@pytest.mark.slow
def test_well_behaved_requests_are_whole_whatever_runs_beside_them(tmp_path: Path) -> None:
    storm = run_storm(tmp_path, NUM_REQUESTS, seed=1)
    assert set(storm.told) == {"whole"}
    assert storm.told["whole"] >= NUM_REQUESTS
    assert storm.done["200 streams with shut windows"] >= 1
