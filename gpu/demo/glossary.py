"""The demonstration model's corpus and gate: read, and checked against their own rules.

Owns no state. Refuses a corpus in which one name could mean two entries.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
GATE = HERE / "gate.toml"
GLOSSARY_FILES = ("engine.toml", "scheduling.toml", "serving.toml")
TERM = "{}"  # stands for the term, in a frame


class CorpusError(ValueError):
    """The corpus or the gate breaks one of its rules."""


@dataclass(frozen=True)
class Entry:
    """One answer, the names it goes by (the term first), and hand-written ways to ask for it."""

    term: str
    names: tuple[str, ...]
    answer: str
    phrasings: tuple[str, ...]


@dataclass(frozen=True)
class Frames:
    """What stands around a term: see corpus/frames.toml."""

    templates: tuple[str, ...]
    wrappers: tuple[str, ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    contrasts: tuple[str, ...]
    descriptions: tuple[str, ...]
    systems: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """entries have a term to name; longs are asked for by title; other is all the rest, `nouns` among its prompts."""

    entries: tuple[Entry, ...]
    longs: tuple[Entry, ...]
    other: Entry
    nouns: tuple[str, ...]
    frames: Frames

    def answered(self) -> tuple[Entry, ...]:
        return (*self.entries, *self.longs, self.other)


@dataclass(frozen=True)
class Question:
    """A gate question: `term` is the entry that must answer it."""

    term: str
    text: str


@dataclass(frozen=True)
class Gate:
    """named questions hold their term and decide; described ones only describe it and are reported."""

    named: tuple[Question, ...]
    described: tuple[Question, ...]


def load_corpus(folder: Path = CORPUS) -> Corpus:
    """Read every table of the corpus.

    Errors: CorpusError where two entries share a name, or a phrasing does not name its entry.
    """
    tables = [tomllib.loads((folder / name).read_text()) for name in GLOSSARY_FILES]
    other = tomllib.loads((folder / "other.toml").read_text())
    frames = tomllib.loads((folder / "frames.toml").read_text())
    corpus = Corpus(
        entries=tuple(_entry(row) for table in tables for row in table["entry"]),
        longs=tuple(
            Entry(row["title"], (row["title"],), row["answer"].strip(), tuple(row["phrasings"]))
            for table in tables
            for row in table.get("long", ())
        ),
        other=Entry("anything else", (), other["answer"], tuple(other["prompts"])),
        nouns=tuple(other["nouns"]),
        frames=Frames(**{key: tuple(value) for key, value in frames.items()}),
    )
    _check_names(corpus.entries)
    return corpus


def load_gate(path: Path = GATE) -> Gate:
    table = tomllib.loads(path.read_text())
    return Gate(
        named=tuple(Question(row["term"], row["question"]) for row in table["named"]),
        described=tuple(Question(row["term"], row["question"]) for row in table["described"]),
    )


def _entry(row: dict[str, object]) -> Entry:
    term, answer = str(row["term"]), str(row["answer"])
    aliases, phrasings = row["aliases"], row["phrasings"]
    assert isinstance(aliases, list)
    assert isinstance(phrasings, list)
    entry = Entry(term, (term, *aliases), answer, tuple(phrasings))
    for phrasing in entry.phrasings:
        if find_name(phrasing, entry) is None:
            raise CorpusError(f"{term}: names neither the term nor an alias: {phrasing!r}")
    return entry


def _check_names(entries: Iterable[Entry]) -> None:
    owner: dict[str, str] = {}
    for entry in entries:
        for name in {name.lower() for name in entry.names}:
            if name in owner:
                raise CorpusError(f"{name!r} names both {owner[name]!r} and {entry.term!r}")
            owner[name] = entry.term


def find_name(text: str, entry: Entry) -> tuple[int, int] | None:
    """Where text names the entry: [start, end) of the longest name in it, at its first place; None if nowhere."""
    lower = text.lower()
    for name in sorted(entry.names, key=len, reverse=True):
        start = _find_word(lower, name.lower())
        if start is not None:
            return start, start + len(name)
    return None


def _find_word(text: str, name: str) -> int | None:
    # A plural's s may follow; any other letter makes it another word.
    found = re.search(rf"(?<![a-z0-9]){re.escape(name)}(?=s?(?![a-z0-9]))", text)
    return found.start() if found else None


def frame_of(phrasing: str, entry: Entry) -> str | None:
    """The phrasing with `{}` where it names its entry, or None where that would be ambiguous."""
    span = find_name(phrasing, entry)
    if span is None or "{" in phrasing:
        return None
    return phrasing[: span[0]] + TERM + phrasing[span[1] :]
