"""What was measured at earlier starts, in files of the user's cache: machine -> what was measured -> what was found.

A file that cannot be read, or is not what we write, is as none; one that cannot be written is done without.
Thread: engine (at start).
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


NOWHERE = Path(os.devnull)  # no directory: what is kept below it is not there, and cannot be written


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


def measured_file(name: str) -> Path:
    return cache_home() / "steploop" / name


def read_kept(path: Path, parse: Callable[[Any], Found]) -> dict[str, dict[str, Found]]:
    """All of a file, or nothing.

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
