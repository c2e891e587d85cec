"""Where compiled kernels are kept by who may write neither beside them nor at home."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from gpu import cache_files
from gpu.cache_files import NUMBA_VARIABLE, compile_apart

has_room = cache_files.can_keep_kernels.__wrapped__
NOWHERE = Path(os.devnull)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of somebody who may write in this directory alone; what numba itself knows stays."""
    monkeypatch.setattr(cache_files, "KERNELS", NOWHERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(NOWHERE))
    monkeypatch.setenv(NUMBA_VARIABLE, str(NOWHERE / "named"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    return tmp_path


def own_directory(temporary: Path) -> Path:
    return temporary / f"steploop-numba-{os.geteuid()}"


def test_who_has_no_other_place_gets_one_for_himself_at_every_start(temporary: Path) -> None:
    for _ in range(2):
        assert has_room()
        assert os.environ[NUMBA_VARIABLE] == str(own_directory(temporary))
    assert own_directory(temporary).stat().st_mode & 0o777 == 0o700


def test_a_place_that_numba_finds_itself_is_left_to_it(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "home"))
    assert has_room()
    assert os.environ[NUMBA_VARIABLE] == str(NOWHERE / "named")
    assert not own_directory(temporary).exists()


def test_a_place_where_others_may_write_is_none(temporary: Path) -> None:
    own_directory(temporary).mkdir()
    own_directory(temporary).chmod(0o777)
    assert not has_room()


def test_a_link_that_another_has_laid_is_none(temporary: Path) -> None:
    (temporary / "elsewhere").mkdir(mode=0o700)
    own_directory(temporary).symlink_to(temporary / "elsewhere")
    assert not has_room()


def test_without_temporary_files_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(NOWHERE))
    assert not has_room()


def test_kernels_are_compiled_in_other_processes_once(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary))
    groups = [["vectors"], ["team"]]
    assert [compile_apart(groups, "one"), compile_apart(groups, "one"), compile_apart(groups[:1], "another")] == [
        2,
        0,
        1,
    ]
    assert not caplog.records
    assert [compile_apart([["no such module"]], "one") for _ in range(2)] == [1, 1]
    assert "no such module" in caplog.text


def test_kernels_that_are_kept_nowhere_are_compiled_where_they_are_used() -> None:
    assert compile_apart([["team"]], "one") == 0
