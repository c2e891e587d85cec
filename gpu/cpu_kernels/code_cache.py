"""Where numba keeps what it has compiled. Imports no numba. Thread: engine (at start), or main.

Beside the kernels' files, or in the user's cache, as numba itself looks for room. Where it finds none (installed by
somebody else, and nobody's home) it refuses to compile at all: there it gets a directory of this user's alone among the
temporary files.
"""

import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

from gpu.measured_file import cache_home

VARIABLE = "NUMBA_CACHE_DIR"  # numba reads it when it is imported


@cache
def has_room() -> bool:
    """Whether compiled code can be kept, made so where need be; to be asked before a kernel is imported."""
    named = os.environ.get(VARIABLE)
    usual = (Path(__file__).parent / "__pycache__", cache_home() / "numba")
    if any(map(_can_write, (*([Path(named)] if named else []), *usual))):
        return True
    own = _own_directory()
    if own is None:
        return False
    os.environ[VARIABLE] = str(own)
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
