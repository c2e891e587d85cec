"""What is kept on disk from one start to the next: the user's cache directory, measured.json, compiled kernels.

A file that cannot be read, or is not what we write, is as none; one that cannot be written is done without. Imports
neither torch nor numba. Thread: engine (at start), or main.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

NOWHERE = Path(os.devnull)  # no directory: what is kept below it is not there, and cannot be written
NUMBA_VARIABLE = "NUMBA_CACHE_DIR"  # numba reads it when it is imported
KERNELS = Path(__file__).parent / "cpu_kernels"


def cache_home() -> Path:
    """The user's cache directory; NOWHERE for one without a home, as in a container with a number for a user.

    Source: XDG Base Directory Specification: a relative path is not valid, and ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # pathlib's word for it
        return NOWHERE


def measured_file() -> Path:
    return cache_home() / "steploop" / "measured.json"


def read_kept(path: Path, parse: Callable[[Any], Found]) -> dict[str, dict[str, Found]]:
    """Machine -> what was measured -> what was found: all of a file, or nothing.

    Args:
        parse: of JSON what was found; raises ValueError, TypeError or KeyError where it is not that.
    """
    try:
        content = json.loads(path.read_bytes())
        return {machine: {name: parse(found) for name, found in kept.items()} for machine, kept in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def write_kept(path: Path, content: Mapping[str, Mapping[str, Any]]) -> None:
    """Whole or not at all: others may read it, or write it too."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        os.replace(file.name, path)


@cache
def can_keep_kernels() -> bool:
    """Whether numba can keep what it compiles, made so where need be; to be asked before a kernel is imported.

    Beside the kernels' files, or in the user's cache, as numba itself looks for room. Where it finds none (installed
    by somebody else, and nobody's home) it refuses to compile at all: there it gets a directory of this user's alone
    among the temporary files.
    """
    named = os.environ.get(NUMBA_VARIABLE)
    usual = (KERNELS / "__pycache__", cache_home() / "numba")
    if any(map(_can_write, (*([Path(named)] if named else []), *usual))):
        return True
    own = _own_directory()
    if own is None:
        return False
    os.environ[NUMBA_VARIABLE] = str(own)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(own)
    return True


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _own_directory() -> Path | None:
    """The same at the next start; code is run from it, so that nobody else may have made it, or write there."""
    try:
        directory = Path(tempfile.gettempdir()) / f"steploop-numba-{os.geteuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return directory if is_own and _can_write(directory) else None
