"""Security floors: what is too old to serve with."""

import sys

import pytest

from core.errors import ExitCode, StartupError
from server.commands.versions import FLOORS, LISTED, check_floors, installed_version, is_at_least, versions


def test_versions_compare_as_releases() -> None:
    for version in ("0.16.0", "0.16", "0.16.0.post1", "1.0", "0.16.1+cpu", "0.100.0"):
        assert is_at_least(version, "0.16.0")
    for version in ("0.15.9", "0.9", "0.16.0rc1", "0.16.0.dev3", "unknown", None):
        assert not is_at_least(version, "0.16.0")


def test_what_is_installed_here_may_serve() -> None:
    check_floors()


@pytest.mark.parametrize("found", ["4.1.0", None])
def test_below_a_floor_start_is_refused_with_reason_and_command(found: str | None) -> None:
    with pytest.raises(StartupError) as caught:
        check_floors(lambda name: found if name == "hpack" else installed_version(name))
    error = caught.value
    assert error.exit_code == ExitCode.VERSION
    assert f"hpack is {found or 'missing'}" in error.cause
    assert "CVE-2026-59980" in error.cause
    assert error.fix == f"{sys.executable} -m pip install 'hpack>=4.2.0'"


def test_all_broken_floors_are_named_at_once() -> None:
    with pytest.raises(StartupError) as caught:
        check_floors(lambda name: None)
    assert all(floor.distribution in caught.value.cause for floor in FLOORS)


def test_listing_says_missing_for_what_is_not_there() -> None:
    listed = dict(versions(lambda name: None if name == "torch" else "1.0"))
    assert listed["torch"] == "missing"
    assert listed["hpack"] == "1.0"
    assert set(LISTED) | {"steploop", "python"} == set(listed)
