"""Text to values and back: sizes, durations, counts, paths, as an operator writes them. Knows no option by name.

Any thread.
"""

import difflib
import math
import os
import pwd
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
LEAST_SIMILARITY = 0.65  # of a path's name to the one that may have been meant: of four letters, three are the same
LEAST_BEGINNING = 4  # letters of a name that stand for it
LEAST_OF_FEW = 0.2  # of a word to one of a few: who has mistyped one of these has most letters of none
SHOWN_MODELS = 5
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


# Names on a hub: as huggingface_hub's validate_repo_id has them, and git's for revisions
_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
GGUF_SUFFIX = ".gguf"
_OTLP_PATH = "/v1/traces"  # OTLP's own, where the endpoint names no path
_YES = ("true", "1", "yes", "on")
_NO = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on a hub: "org/name"; revision: a branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


class BadValueError(Exception):
    """A text that is not a value of the kind asked for.

    Args:
        expected: completes the sentence "it must be ...".
        proposal: a value that may have been meant.
    """

    def __init__(self, expected: str, proposal: str | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.proposal = proposal


class MissingPathError(BadValueError):
    """A path that leads nowhere, with what lies near it."""


def text_value(text: str) -> str:
    """Any text but none at all: an empty setting is more often a variable that was not filled in than a wish."""
    if not text.strip():
        raise BadValueError("not empty; leave the setting out to get its default")
    return text


def secret_value(text: str) -> str:
    """A key that can travel in a header: visible ASCII, no spaces (RFC 9110 §5.5)."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise BadValueError("not empty, of visible ASCII characters without spaces")
    return text


def otlp_endpoint(text: str) -> str:
    """A collector's URL; with OTLP's path where it names none.

    Raises:
        BadValueError: it is no http or https URL.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise BadValueError("a collector's URL, such as http://localhost:4318")
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_OTLP_PATH}"


def with_scheme(url: str) -> str:
    """A server's URL as it may be typed: HOST:PORT is http://HOST:PORT."""
    return url if "://" in url else f"http://{url}"


def choice_of(*names: str, **meant: str) -> Callable[[str], str]:
    """One of the names, exactly.

    Args:
        meant: words that are none of them, with the name that is proposed to who writes them.
    """
    words = {name: name for name in names} | meant

    def parse(text: str) -> str:
        if text not in names:
            word = nearest(text, words, LEAST_OF_FEW)
            near = nearest(text, words)
            hint = f"; did you mean {words[near]}?" if near else ""
            raise BadValueError(f"one of {', '.join(names)}{hint}", words[word] if word else None)
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """true or false, and the other words for them that are common in configurations."""
    word = text.strip().lower()
    if word not in _YES and word not in _NO:
        raise BadValueError("true or false")
    return word in _YES


def count_between(low: int, high: int) -> Callable[[str], int]:
    """A whole number within both bounds, included. Underscores and commas may part its digits."""

    def parse(text: str) -> int:
        digits = text.strip().replace("_", "").replace(",", "")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 18 and low <= int(digits) <= high):
            raise BadValueError(f"a whole number from {low:,} to {high:,}")
        return int(digits)

    return parse


def size_between(low: int, high: int) -> Callable[[str], int]:
    """Bytes, written as "2GiB", "512 MiB", "1.5GB" or a plain number of bytes."""

    def parse(text: str) -> int:
        expected = f"a size from {format_size(low)} to {format_size(high)}, such as 512MiB or 2GiB"
        match = _QUANTITY.fullmatch(text.strip())
        if match is None:
            raise BadValueError(expected)
        number, unit = match.groups()
        if unit and unit not in SIZE_UNITS:
            near = nearest(f"{unit[0].upper()}iB", SIZE_UNITS) or "GiB"
            raise BadValueError(f"{expected}: the unit {unit!r} is not known; {number}{near}?")
        size_bytes = math.floor(float(number) * SIZE_UNITS[unit or "B"])
        if not low <= size_bytes <= high:
            raise BadValueError(expected)
        return size_bytes

    return parse


def duration_between(low_s: float, high_s: float) -> Callable[[str], float]:
    """Seconds, written as "500ms", "10s", "5min", "1h" or a plain number of seconds."""

    def parse(text: str) -> float:
        match = _QUANTITY.fullmatch(text.strip())
        number, unit = match.groups() if match else ("", "?")
        duration_s = float(number) * DURATION_UNITS[unit or "s"] if (unit or "s") in DURATION_UNITS else -1.0
        if not low_s <= duration_s <= high_s:
            low, high = format_duration(low_s), format_duration(high_s)
            raise BadValueError(f"a duration from {low} to {high}, such as 500ms, 10s or 5min")
        return duration_s

    return parse


def factor_or_none(low: float, high: float) -> Callable[[str], float]:
    """How many times something: within both bounds, included, or 0, which stands for none."""

    def parse(text: str) -> float:
        match = _QUANTITY.fullmatch(text.strip())
        factor = float(match[1]) if match and not match[2] else -1.0
        if factor != 0 and not low <= factor <= high:
            raise BadValueError(f"a number from {low:g} to {high:g}, such as 1.6, or 0 for none")
        return factor

    return parse


def model_source(text: str) -> Path | HubId:
    """A directory, a GGUF file, or org/name[@revision] on a hub where no such path exists."""
    path = _expanded(text)
    if path.is_dir() or (path.is_file() and path.suffix == GGUF_SUFFIX):
        return path
    if path.exists():
        raise MissingPathError(
            f"a directory or a {GGUF_SUFFIX} file, and this is a file of another kind",
            str(path.parent) if _may_be_model(path.parent) else None,
        )
    match = _HUB_ID.fullmatch(text)
    is_path = match is None or Path(path.parts[0]).exists() or path.suffix == GGUF_SUFFIX
    if match is None or is_path or ".." in text or "--" in match[1]:
        raise _missing_model(path)
    return HubId(match[1], match[2])


def near_models(path: Path) -> list[Path]:
    """What --model could name here and has a name like this one, which leads nowhere."""
    return names_near(path, _may_be_model)


def _may_be_model(path: Path) -> bool:
    return os.path.isfile(path / "config.json") or (path.suffix == GGUF_SUFFIX and os.path.isfile(path))


def models_in(directory: Path) -> list[Path]:
    """What --model could name there; none where the directory cannot be read."""
    try:
        return sorted(child for child in directory.iterdir() if _may_be_model(child))
    except OSError:
        return []


def show_models(directory: Path) -> str:
    """A clause that names the models of a directory, as --model takes them."""
    models = models_in(directory)
    if not models:
        return f"there is no model in {directory.absolute()}"
    more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
    return f"the models in {directory.absolute()}: {', '.join(map(str, models[:SHOWN_MODELS]))}{more}"


def _expanded(text: str) -> Path:
    """With the home directory that ~ or ~name stands for."""
    try:
        return Path(text_value(text)).expanduser()
    except RuntimeError as error:  # pathlib's word for a home that no user has
        name = text.partition("/")[0]
        raise BadValueError(f"a path that exists, and there is no home directory {name}") from error


def existing_directory(text: str) -> Path:
    path = _expanded(text)
    if not path.exists():
        raise _missing("a directory", path, names_near(path, os.path.isdir))
    if not path.is_dir():
        raise MissingPathError("a directory, and this is a file", str(path.parent))
    return path


def file_value(text: str) -> Path:
    """The path of a file, there or not."""
    path = _expanded(text)
    if path.is_dir():
        raise MissingPathError("a file, and this is a directory")
    return path


def directory_value(text: str) -> Path:
    """The path of a directory, there or not."""
    path = _expanded(text)
    if path.exists() and not path.is_dir():
        raise MissingPathError("a directory, and this is a file")
    return path


def existing_file(text: str) -> Path:
    path = _expanded(text)
    if not path.exists():
        raise _missing("a file", path, names_near(path, os.path.isfile))
    if not path.is_file():
        raise MissingPathError("a file, and this is a directory")
    return path


def _missing(kind: str, path: Path, near: list[Path]) -> MissingPathError:
    expected = f"{kind} that exists"
    if near:
        return MissingPathError(f"{expected}; near it: {', '.join(map(str, near))}", str(near[0]))
    missing = _where_it_ends(path)
    return MissingPathError(expected if missing == path else f"{expected}; {missing.parent} exists, {missing} does not")


def _missing_model(path: Path) -> MissingPathError:
    error = _missing(f"org/name, a {GGUF_SUFFIX} file or a directory", path, near_models(path))
    if error.proposal is not None:
        return error
    return MissingPathError(f"{error.expected}; {show_models(_where_it_ends(path).parent)}")


def _where_it_ends(path: Path) -> Path:
    """The first part of a missing path that is missing."""
    while not path.parent.exists() and path.parent != path.parent.parent:
        path = path.parent
    return path


def readable_fix(path: Path) -> str:
    """What lets this process read a file that is there."""
    user = str(os.geteuid())
    with suppress(KeyError):  # a container may run as any number
        user = pwd.getpwuid(os.geteuid()).pw_name
    return f"let the user {user}, as which this runs, read it: chown {user} {path} && chmod u+r {path}"


def names_near(path: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """The wanted paths that are this missing one with other names for its parts, the likeliest first.

    Args:
        is_wanted: never raises (os.path's functions rather than Path's).
    """
    missing = _where_it_ends(path)
    rest = path.relative_to(missing)
    try:
        names = sorted(child.name for child in missing.parent.iterdir())
    except OSError:
        return []
    found: list[Path] = []
    for name in _names_like(missing.name, names):
        near = missing.parent / name / rest
        if is_wanted(near):
            found.append(near)
        elif rest.parts and (missing.parent / name).is_dir():
            found += names_near(near, is_wanted)
    return found[:3]


def _names_like(word: str, names: Iterable[str]) -> list[str]:
    """Those that look like it, or begin with it, whatever the case; the likeliest first."""
    folded = word.casefold()
    scores = {name: difflib.SequenceMatcher(None, name.casefold(), folded).ratio() for name in names}
    near = [
        name
        for name, score in scores.items()
        if score >= LEAST_SIMILARITY or (len(folded) >= LEAST_BEGINNING and name.casefold().startswith(folded))
    ]
    return sorted(near, key=scores.__getitem__, reverse=True)


def nearest(word: str, known: Iterable[str], least_similarity: float = 0.5) -> str | None:
    """The known word that looks most like this one, or None when none does."""
    by_folded = {name.casefold().replace("_", "-"): name for name in known}
    matches = difflib.get_close_matches(word.casefold().replace("_", "-"), by_folded, n=1, cutoff=least_similarity)
    return by_folded[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def format_size(size_bytes: float) -> str:
    """Binary units, three digits at most: 512 MiB, 2.5 GiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= SIZE_UNITS[unit]:
            size = size_bytes / SIZE_UNITS[unit]
            return f"{size:.0f} {unit}" if size >= 100 or size == int(size) else f"{size:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_duration(duration_s: float) -> str:
    """In the largest unit that it is a whole number of: 75 s, 1 min, 500 ms."""
    for unit, factor in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if duration_s >= factor and duration_s % factor == 0:
            return f"{duration_s / factor:.0f} {unit}"
    return f"{duration_s:g} s" if duration_s >= 1 else f"{duration_s * 1000:g} ms"


def format_count(number: float) -> str:
    """5.1M, 1.2B: as parameters are counted."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def escape(text: str) -> str:
    """What a client chose, fit for one line: everything but visible ASCII as a backslash escape."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(
        character if "!" <= character <= "~" else character.encode("unicode_escape").decode().replace(" ", "\\x20")
        for character in text
    )
