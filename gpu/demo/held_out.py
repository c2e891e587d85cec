"""Whether a gate question shares a run of words with anything that training can ask.

Training composes its questions: any name, bare or wrapped, in any frame, another name beside it, parts of answers, a
sentence before and one after. None of those millions of texts is written out here. A run of words is held against the
patterns instead: word by word, a slot standing for whatever may fill it. The noise of training (words left out, typing
errors, respelled names) is not followed.

Owns no state but its index, and refuses nothing. In a contrast any two names may meet here, also those of one entry.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gpu.demo.glossary import TERM, Corpus, Gate, Question
from gpu.demo.prompts import OTHER_TERM, frames_of, parts_of

SHARED_RUN_WORDS = 6  # a gate question shares no run of this many words with a training question
PUNCTUATION = ".,:;?!()\"'`*-"

Run = tuple[str, ...]


class Slot(NamedTuple):
    """A place in a pattern for any text of its kind; before and after stand in the same word as that text."""

    kind: str
    before: str = ""
    after: str = ""


NAME = "name"  # any name of an entry, bare or wrapped
THING = "thing"  # a name, or a noun from outside the glossary
PART = "part"  # some words of an answer
OPENER, CLOSER = Slot("opener"), Slot("closer")
Symbol = str | Slot  # a pattern is a row of words and slots


@dataclass
class Fills:
    """Runs of up to SHARED_RUN_WORDS words in the texts that fill a slot, by the ends of a text that they reach."""

    whole: set[Run] = field(default_factory=set)
    heads: set[Run] = field(default_factory=set)
    tails: set[Run] = field(default_factory=set)
    inner: set[Run] = field(default_factory=set)

    def add(self, words: Run) -> None:
        self.whole.add(words)
        for length in range(1, min(len(words), SHARED_RUN_WORDS) + 1):
            self.heads.add(words[:length])
            self.tails.add(words[-length:])
        self.inner.update(runs_of(words))


class Compositions:
    """Every question that training can draw from a corpus, noise aside, as patterns and what fills their slots."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.followers: dict[tuple[Symbol, ...], set[Symbol]] = defaultdict(
            set
        )  # a part of a pattern -> what comes next
        for pattern in set(self._patterns()):
            for start in range(len(pattern)):
                for end in range(start, min(len(pattern), start + SHARED_RUN_WORDS)):
                    self.followers[pattern[start:end]].add(pattern[end])
        slots = [symbol for symbol in self.followers[()] if isinstance(symbol, Slot)]
        self.fills = {slot: self._fills(slot) for slot in slots}

    def have(self, run: Run) -> bool:
        """Whether some question has this run of SHARED_RUN_WORDS words."""
        return self._read_on(run, 0, ())

    def _read_on(self, run: Run, at: int, read: tuple[Symbol, ...]) -> bool:
        """Whether run[at:] can go on a pattern of which run[:at] was read as the symbols `read`."""
        if at == len(run):
            return True
        followers = self.followers.get(read, ())
        if run[at] in followers and self._read_on(run, at + 1, (*read, run[at])):
            return True
        return any(
            self._read_on(run, end, (*read, slot))
            for slot, fills in self.fills.items()
            if slot in followers
            for end in _ends(run, at, fills)
        )

    def _patterns(self) -> Iterator[tuple[Symbol, ...]]:
        corpus, frames = self.corpus, self.corpus.frames
        fixed = (text for entry in corpus.answered() for text in (*entry.phrasings, entry.term))
        yield from (_pattern(text, {}) for text in fixed)
        yield from (_pattern(text, {TERM: THING}) for text in (*frames_of(corpus), *frames.templates))
        yield from (_pattern(text, {TERM: NAME, OTHER_TERM: NAME}) for text in frames.contrasts)
        yield from (_pattern(text, {TERM: PART}) for text in frames.descriptions)

    def _fills(self, slot: Slot) -> Fills:
        fills = Fills()
        for text in self._texts[slot.kind]:
            fills.add(words_of(slot.before + text + slot.after))
        return fills

    @cached_property
    def _texts(self) -> dict[str, list[str]]:
        corpus, frames = self.corpus, self.corpus.frames
        bare = [name for entry in corpus.entries for name in entry.names]
        names = [*bare, *(wrapper.replace(TERM, name) for wrapper in frames.wrappers for name in bare)]
        return {
            NAME: names,
            THING: [*names, *corpus.nouns],
            PART: [part for entry in corpus.entries for part in parts_of(entry)],
            OPENER.kind: list(frames.openers),
            CLOSER.kind: list(frames.closers),
        }


def _ends(run: Run, at: int, fills: Fills) -> Iterator[int]:
    """Where a slot's text that reaches run[at] may end: whole inside the run, cut off at its edges."""
    starts = at == 0
    for end in range(at + 1, len(run)):
        if run[at:end] in (fills.tails if starts else fills.whole):
            yield end
    if run[at:] in (fills.inner if starts else fills.heads):
        yield len(run)


def _pattern(text: str, kinds: dict[str, str]) -> tuple[Symbol, ...]:
    """Words and slots of a text in which each key of kinds stands for any text of that kind."""
    symbols: list[Symbol] = [OPENER]
    for piece in text.split():
        mark = next((mark for mark in kinds if mark in piece), None)
        if mark is None:
            symbols += words_of(piece)
        else:
            before, after = piece.split(mark)
            symbols.append(Slot(kinds[mark], before.lstrip(PUNCTUATION), after.rstrip(PUNCTUATION)))
    return (*symbols, CLOSER)


def words_of(text: str) -> Run:
    """Lower-case words of a text, stripped of the punctuation around them."""
    stripped = (word.strip(PUNCTUATION) for word in text.lower().split())
    return tuple(word for word in stripped if word)


def runs_of(words: Run) -> Iterable[Run]:
    """Every SHARED_RUN_WORDS words in a row."""
    return (words[start : start + SHARED_RUN_WORDS] for start in range(len(words) - SHARED_RUN_WORDS + 1))


def shared_runs(corpus: Corpus, gate: Gate) -> Iterator[tuple[Question, str]]:
    """Each gate question that shares SHARED_RUN_WORDS words in a row with a training question, and those words."""
    compositions = Compositions(corpus)
    for question in (*gate.named, *gate.described):
        yield from ((question, " ".join(run)) for run in runs_of(words_of(question.text)) if compositions.have(run))
