"""Engines with one step in flight and with two."""

import pytest

from tests.fakes import EngineUnderTest


@pytest.fixture(params=[1, 2], ids=["one", "overlap"])
def steps_in_flight(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of every engine under test that is made."""
    count: int = request.param
    monkeypatch.setattr(EngineUnderTest, "max_in_flight", count)
    return count
