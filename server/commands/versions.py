"""Checks library versions at start, and refuses those with known vulnerabilities. Thread: main."""

import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ExitCode, StartupError
from server import __version__

# The libraries that `doctor` lists.
LISTED = (
    "hpack",
    "uvloop",
    "msgspec",
    "orjson",
    "jinja2",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "torch",
    "numba",
    "joserfc",
    "google-re2",
    "httpx2",
    "rich",
)
NOT_EVERYWHERE = ("numba",)  # without wheels for some machines, where torch computes instead


@dataclass(frozen=True, slots=True)
class Floor:
    """The oldest version of a distribution that may serve, and the vulnerability of older ones."""

    distribution: str
    minimum: str
    reason: str


FLOORS = (
    Floor("hpack", "4.2.0", "CVE-2026-59980: a malformed integer is decoded in the square of its length"),
    Floor("jinja2", "3.1.6", "CVE-2025-27516: a chat template can leave the sandbox through the attr filter"),
)

VersionOf = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    """From the installed metadata, without importing the package; None: not installed."""
    from importlib import metadata  # takes 20 ms

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_floors(version_of: VersionOf = installed_version) -> None:
    """Raises StartupError: dependencies are missing or below their floors; it names all of them."""
    broken = [(floor, version_of(floor.distribution)) for floor in FLOORS]
    broken = [(floor, version) for floor, version in broken if not is_at_least(version, floor.minimum)]
    if not broken:
        return
    cause = "; ".join(f"{floor.distribution} is {version or 'missing'} ({floor.reason})" for floor, version in broken)
    wanted = " ".join(f"'{floor.distribution}>={floor.minimum}'" for floor, _ in broken)
    raise StartupError(cause, f"{sys.executable} -m pip install {wanted}", ExitCode.VERSION)


def is_at_least(version: str | None, minimum: str) -> bool:
    """Compare release numbers. A pre-release (0.16.0rc1, 0.16.0.dev2) is below its release, None below everything."""
    return version is not None and _sort_key(version) >= _sort_key(minimum)


def _sort_key(version: str) -> tuple[tuple[int, ...], bool]:
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", version)
    if match is None:
        return (), False
    release = [int(number) for number in match[1].split(".")]
    while release and release[-1] == 0:  # 3.1 and 3.1.0 are the same
        release.pop()
    is_final = re.match(r"[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)\d*", match[2], re.IGNORECASE) is None
    return tuple(release), is_final


def versions(version_of: VersionOf = installed_version) -> list[tuple[str, str]]:
    """(name, version) of ourselves, of Python and of LISTED; "missing" where there is none."""
    ours = [("steploop", __version__), ("python", f"{platform.python_version()} ({platform.platform()})")]
    return ours + [(name, version_of(name) or "missing") for name in LISTED]
