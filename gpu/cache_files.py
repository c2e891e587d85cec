"""Files kept from one start to the next: the user's cache directory, measured.json, compiled kernels.

What compiles keeps hundreds of MiB until its process ends: `compile_apart` does it in processes that do. They keep the
kernels' code in a directory of its own, too: a server computes with it and imports no numba (cpu_kernels/compiled.py).

A file that cannot be read, or has an unknown format, counts as missing; failing to write one is no error. Imports
neither torch nor numba. Thread: engine (at start), or main.
"""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

NOWHERE = Path(os.devnull)  # no directory: no file below it can exist or be written
NUMBA_VARIABLE = "NUMBA_CACHE_DIR"  # numba reads it when it is imported
KERNELS = Path(__file__).parent / "cpu_kernels"
CODE_PREFIX, MOST_UNUSED_S = "code-", 90 * 86_400
logger = logging.getLogger(__name__)


def cache_home() -> Path:
    """The user's cache directory; NOWHERE for a user without a home, as a bare user id in a container.

    Source: XDG Base Directory Specification: a relative path is invalid and ignored.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # pathlib: there is no home
        return NOWHERE


def measured_file() -> Path:
    return cache_home() / "steploop" / "measured.json"


def read_kept(path: Path, parse: Callable[[Any], Found]) -> dict[str, dict[str, Found]]:
    """A whole file, or nothing: machine -> name -> finding.

    Args:
        parse: makes a finding from JSON; raises ValueError, TypeError or KeyError if it is none.
    """
    try:
        content = json.loads(path.read_bytes())
        return {machine: {name: parse(found) for name, found in kept.items()} for machine, kept in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def write_kept(path: Path, content: Mapping[str, Mapping[str, Any]]) -> None:
    with suppress(OSError):
        replace_file(path, json.dumps(content, indent=1).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file atomically: other processes may read or write it. Raises OSError: it cannot be written."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


@cache
def can_keep_kernels() -> bool:
    """Whether numba has a directory for what it compiles; call it before a kernel is imported.

    Numba looks beside the kernels' files and in the user's cache. Where it may write to neither (installed by another
    user, no home) it would refuse to compile: it is given a private directory among the temporary files.
    """
    if any(map(_can_write, _kernel_directories())):
        return True
    own = _own_directory()
    if own is None:
        return False
    os.environ[NUMBA_VARIABLE] = str(own)
    if "numba" in sys.modules:
        sys.modules["numba"].config.CACHE_DIR = str(own)
    return True


def _kernel_directories() -> list[Path]:
    """Where numba keeps what it compiles: in the first one that it may write to."""
    named = os.environ.get(NUMBA_VARIABLE)
    return [*([Path(named)] if named else []), KERNELS / "__pycache__", cache_home() / "numba"]


uses_kept_code = False  # set by a server, which calls kernels alone; before one is imported
_kept: Path | None = None


def kept_code() -> Path | None:
    """Where the kernels' code is, for a process that only calls it; None: numba compiles or loads it in the process."""
    return _kept


def compile_apart(groups: Sequence[Sequence[str]], cpu: str) -> int:
    """Have kernels compiled that no earlier call has, each group in a process of its own, all at once.

    One that fails is told in the log, and compiled where it is used. Returns how many processes there were.

    Args:
        groups: arguments of `python -m gpu.cpu_kernels`.
        cpu: what code is compiled for.
    """
    global _kept
    directory = next(filter(_can_write, _kernel_directories()), None)
    if directory is None:
        return 0
    sources = [(path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(KERNELS.glob("*.py"))]
    told = sources, version("numba"), version("llvmlite"), sys.version, cpu
    code = directory / f"{CODE_PREFIX}{sha256(repr(told).encode()).hexdigest()[:32]}"
    _remove_unused(code)
    running, is_whole = [], True
    for group in groups:
        if not (marker := code / f"has-{'-'.join(group)}").exists():
            logger.info("compiling kernels for this CPU, once: %s", ", ".join(group))
            running.append((group, marker, _compile(code, group)))
    for group, marker, process in running:
        if process.wait() == 0:
            with suppress(OSError):
                marker.touch()
        else:
            is_whole = False
            logger.warning("%s: compiling them apart ended with %d", ", ".join(group), process.returncode)
    if uses_kept_code and is_whole and "numba" not in sys.modules:
        _kept = code
    return len(running)


def _remove_unused(code: Path) -> None:
    """Remove code that no start has used for long: of other versions and CPUs."""
    with suppress(OSError):
        for old in code.parent.glob(f"{CODE_PREFIX}*"):
            if old != code and old.stat().st_mtime < time.time() - MOST_UNUSED_S:
                shutil.rmtree(old, ignore_errors=True)
        os.utime(code)


def compile_missing(name: str) -> None:
    """Have more of the kept code compiled. name: see compile_apart."""
    assert _kept is not None
    logger.info("compiling kernels for this CPU, once: %s", name)
    _compile(_kept, [name]).wait()


def _compile(code: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STEPLOOP_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(KERNELS.parent.parent), *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "gpu.cpu_kernels", *names, "--keep", str(code)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)


def _can_write(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _own_directory() -> Path | None:
    """The same at every start. Code is run from it, so only this user may own it or write to it."""
    try:
        directory = Path(tempfile.gettempdir()) / f"steploop-numba-{os.geteuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return directory if is_own and _can_write(directory) else None
