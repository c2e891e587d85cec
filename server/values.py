"""Parses and formats values as operators write them: sizes, durations, counts, paths. Any thread."""

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

import msgspec

# What msgspec raises for JSON that somebody else wrote: a model, an upstream, a file's owner
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
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
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
LEAST_SIMILARITY = 0.65  # of a path's name to a proposed one: of four letters, three are the same
LEAST_BEGINNING = 4  # letters of a name that are enough to propose it
LEAST_OF_FEW = 0.2  # of a word to one of a few choices: a typing error keeps some letters
SHOWN_MODELS = 5
GGUF_SUFFIX = ".gguf"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*[A-Za-z]+)+|\d+(?:\.\d+)?")
# As huggingface_hub's validate_repo_id has names, and git has revisions
_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?", re.ASCII)
_OTLP_PATH = "/v1/traces"  # the OTLP specification's default
_YES = ("true", "1", "yes", "on")
_NO = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on a hub: "org/name"; revision: a branch, tag or commit."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """NAME=PATH."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


class BadValueError(Exception):
    """The text is not a value of the wanted kind.

    Args:
        expected: completes the sentence "it must be ...".
        proposal: a value that the operator may have meant.
    """

    def __init__(self, expected: str, proposal: str | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.proposal = proposal


class MissingPathError(BadValueError):
    """The path does not exist, or is of another kind."""


def text_value(text: str) -> str:
    """Any text but an empty one: that is most often a variable that was not filled in."""
    if not text.strip():
        raise BadValueError("not empty; leave the setting out to get its default")
    return text


def secret_value(text: str) -> str:
    """A key that can travel in a header: visible ASCII, no spaces (RFC 9110 §5.5)."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise BadValueError("not empty, of visible ASCII characters without spaces")
    return text


def otlp_endpoint(text: str) -> str:
    """An http or https URL of a collector; OTLP's path is the default."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise BadValueError("a collector's URL, such as http://localhost:4318")
    return text if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_OTLP_PATH}"


def with_scheme(url: str) -> str:
    """A URL from HOST:PORT or a URL."""
    return url if "://" in url else f"http://{url}"


def choice_of(*names: str, **meant: str) -> Callable[[str], str]:
    """One of the names, exactly.

    Args:
        meant: other words that operators write, with the name to propose.
    """
    words = {name: name for name in names} | meant
    if "off" in names:  # or the nearest to "no" were "on"
        words = dict.fromkeys(_YES, "on" if "on" in names else "auto") | dict.fromkeys((*_NO, "none"), "off") | words

    def parse(text: str) -> str:
        if text not in names:
            word = nearest(text, words, LEAST_OF_FEW)
            near = nearest(text, words)
            hint = f"; did you mean {words[near]}?" if near else ""
            raise BadValueError(f"one of {', '.join(names)}{hint}", words[word] if word else None)
        return text

    return parse


def yes_or_no(text: str) -> bool:
    """true or false, or another pair of words that is common in configurations."""
    word = text.strip().lower()
    if word not in _YES and word not in _NO:
        raise BadValueError("true or false")
    return word in _YES


def count_between(low: int, high: int) -> Callable[[str], int]:
    """A whole number from low to high, perhaps with underscores or commas between its digits."""

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


def seconds_of(text: str) -> float | None:
    """Of "500ms", "10s", "5min" or "5m", "1h30m" or a plain number of seconds; None: it is none of these."""
    parts = _QUANTITY.findall(text) if _DURATION.fullmatch(text.strip()) else [("", "?")]
    if any(unit not in _DURATION_UNITS for _, unit in parts):
        return None
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)


def duration_between(low_s: float, high_s: float) -> Callable[[str], float]:
    """Seconds, as seconds_of reads them."""

    def parse(text: str) -> float:
        duration_s = seconds_of(text)
        if duration_s is None or not low_s <= duration_s <= high_s:
            low, high = format_duration(low_s), format_duration(high_s)
            raise BadValueError(f"a duration from {low} to {high}, such as 500ms, 10s or 5min")
        return duration_s

    return parse


def factor_or_none(low: float, high: float) -> Callable[[str], float]:
    """A factor from low to high, or 0 for none."""

    def parse(text: str) -> float:
        match = _QUANTITY.fullmatch(text.strip())
        factor = float(match[1]) if match and not match[2] else -1.0
        if factor != 0 and not low <= factor <= high:
            raise BadValueError(f"a number from {low:g} to {high:g}, such as 1.6, or 0 for none")
        return factor

    return parse


def model_source(text: str) -> Path | HubId:
    """A directory, a GGUF file, or, if no such path exists, org/name[@revision] on a hub."""
    path = _expanded(text)
    if path.is_dir() or is_gguf(path):
        return path
    if path.exists():
        raise MissingPathError(
            f"a directory or a {GGUF_SUFFIX} file, and this is a file of another kind",
            str(path.parent) if _may_be_model(path.parent) else None,
        )
    match = _HUB_ID.fullmatch(text)
    is_path = match is None or Path(path.parts[0]).exists() or path.suffix.lower() == GGUF_SUFFIX
    if match is None or is_path or ".." in text or "--" in match[1]:
        raise _missing_model(path)
    return HubId(match[1], match[2])


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF by its name, or by its first bytes: Ollama's are named by their hashes."""
    if path.suffix.lower() == GGUF_SUFFIX or not os.path.isfile(path):
        return os.path.isfile(path)
    from core.gguf import MAGIC  # imports numpy, which few commands need

    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def near_models(path: Path) -> list[Path]:
    """Models with names like this missing path."""
    return names_near(path, _may_be_model)


def _may_be_model(path: Path) -> bool:
    return os.path.isfile(path / "config.json") or (path.suffix.lower() == GGUF_SUFFIX and os.path.isfile(path))


def models_in(directory: Path) -> list[Path]:
    """The models in a directory; none if it cannot be read."""
    try:
        return sorted(child for child in directory.iterdir() if _may_be_model(child))
    except OSError:
        return []


def show_models(directory: Path) -> str:
    """A clause for messages that names the models in a directory."""
    models = models_in(directory)
    if not models:
        return f"there is no model in {directory.absolute()}"
    more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
    return f"the models in {directory.absolute()}: {', '.join(map(str, models[:SHOWN_MODELS]))}{more}"


def _expanded(text: str) -> Path:
    """With the home directory for ~ or ~name."""
    try:
        return Path(text_value(text)).expanduser()
    except RuntimeError as error:  # pathlib's error for an unknown user
        name = text.partition("/")[0]
        raise BadValueError(f"a path that exists, and there is no home directory {name}") from error


def _path_value(kind: str, is_kind: Callable[[Path], bool], must_exist: bool) -> Callable[[str], Path]:
    def parse(text: str) -> Path:
        path = _expanded(text)
        if must_exist and not path.exists():
            raise _missing(kind, path, names_near(path, is_kind))
        if path.exists() and not is_kind(path):
            is_directory = path.is_dir()
            proposal = None if is_directory or not must_exist else str(path.parent)
            raise MissingPathError(f"{kind}, and this is {'a directory' if is_directory else 'a file'}", proposal)
        return path

    return parse


existing_directory = _path_value("a directory", os.path.isdir, must_exist=True)
existing_file = _path_value("a file", os.path.isfile, must_exist=True)


def named_directory(text: str) -> NamedPath:
    """NAME=PATH of a directory that exists."""
    name, equals, path = text.partition("=")
    if not name.strip() or not equals or not name.isprintable():
        raise BadValueError("NAME=PATH, such as sql=/var/lib/adapters/sql")
    return NamedPath(name, existing_directory(path))


directory_value = _path_value("a directory", os.path.isdir, must_exist=False)
file_value = _path_value("a file", lambda path: not path.is_dir(), must_exist=False)


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
    return next((part for part in reversed(path.parents) if not part.exists()), path)


def readable_fix(path: Path) -> str:
    """The command that lets this process read an existing file."""
    user = str(os.geteuid())
    with suppress(KeyError):  # in a container a user may have no name
        user = pwd.getpwuid(os.geteuid()).pw_name
    return f"let this process's user, {user}, read it: chown {user} {path} && chmod u+r {path}"


def names_near(path: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Up to three wanted paths that differ from this missing one in similar names, the most similar first.

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
    """Names that are similar to the word or begin with it, in any case; the most similar first."""
    folded = word.casefold()
    scores = {name: difflib.SequenceMatcher(None, name.casefold(), folded).ratio() for name in names}
    near = [
        name
        for name, score in scores.items()
        if score >= LEAST_SIMILARITY or (len(folded) >= LEAST_BEGINNING and name.casefold().startswith(folded))
    ]
    return sorted(near, key=scores.__getitem__, reverse=True)


def nearest(word: str, known: Iterable[str], least_similarity: float = 0.5) -> str | None:
    """The most similar known word, or None."""
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
    """In the largest unit that gives a whole number: 75 s, 1 min, 500 ms."""
    for unit, factor in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if duration_s >= factor and duration_s % factor == 0:
            return f"{duration_s / factor:.0f} {unit}"
    return f"{duration_s:g} s" if duration_s >= 1 else f"{duration_s * 1000:g} ms"


def format_count(number: float) -> str:
    """A count of parameters: 5.1M, 1.2B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def escape(text: str) -> str:
    """A client's text for a log line: everything but visible ASCII as a backslash escape."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "".join(
        character if "!" <= character <= "~" else character.encode("unicode_escape").decode().replace(" ", "\\x20")
        for character in text
    )
