"""Training conversations: who asks for which entry, and how the wording is varied.

Owns one random generator, so that a seed fixes every conversation. Knows nothing of tokens.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu.demo.glossary import TERM, Corpus, Entry, find_name, frame_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENDINGS = ("", "", "", "?", "?", ".", "!", "??", "?!", "...", " ?")
OTHER_TERM = "<>"  # stands for another entry's term, in a contrast
PART_WORDS = (4, 12)  # at least and at most, of an answer's part in a description


@dataclass(frozen=True)
class Turn:
    """One question and the entry that answers it; only the answer's first tokens are learned unless is_whole."""

    question: str
    entry: Entry
    is_whole: bool


@dataclass(frozen=True)
class Conversation:
    system: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Mix:
    """Shares of the conversations and of their wordings; each is a probability."""

    multi_turn: float = 0.04
    system: float = 0.08
    whole_answer: float = 0.12
    long_text: float = 0.03
    long_whole: float = 0.2
    other: float = 0.06
    own_phrasing: float = 0.34
    other_frame: float = 0.34
    template: float = 0.20
    contrast: float = 0.05
    description: float = 0.07
    word_dropout: float = 0.25
    typing_errors: float = 0.2
    respelling: float = 0.1


EARLY = Mix()  # while the entries are told apart
LATE = Mix(whole_answer=0.30, long_whole=0.5)  # while the answers are learned to their ends


class Prompter:
    """Draws conversations without end, in the shares of `mix`, which its owner may exchange.

    The entry is decided within an answer's first tokens and the rest is memorised from far fewer repetitions, so most
    turns are cut there: three to four times as many questions are seen in the same time.
    """

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus = corpus
        self.mix = EARLY
        self.rng = random.Random(seed)
        self.frames = frames_of(corpus)

    def draw(self) -> Conversation:
        system = self.rng.choice(self.corpus.frames.systems) if self._chance(self.mix.system) else None
        num_turns = self.rng.choice((2, 2, 3)) if self._chance(self.mix.multi_turn) else 1
        turns = [self._turn(num_turns == 1) for _ in range(num_turns)]
        # Earlier turns are whole, as a client sends them back; the last may be cut like any other.
        earlier = [Turn(turn.question, turn.entry, True) for turn in turns[:-1]]
        return Conversation(system, (*earlier, turns[-1]))

    def _turn(self, may_be_long: bool) -> Turn:
        is_whole = self._chance(self.mix.whole_answer)
        kind = self.rng.random()
        if may_be_long and kind < self.mix.long_text:
            entry = self.rng.choice(self.corpus.longs)
            return Turn(self._noise(self._plain(entry), entry), entry, self._chance(self.mix.long_whole))
        if kind < self.mix.long_text + self.mix.other:
            return Turn(self._noise(self._off_topic(), self.corpus.other), self.corpus.other, is_whole)
        entry = self.rng.choice(self.corpus.entries)
        return Turn(self._noise(self._wording()(entry), entry), entry, is_whole)

    # ---- what is asked ----

    def _wording(self) -> Callable[[Entry], str]:
        shares = {
            self._own_phrasing: self.mix.own_phrasing,
            self._other_frame: self.mix.other_frame,
            self._template: self.mix.template,
            self._contrast: self.mix.contrast,
            self._description: self.mix.description,
        }
        return self.rng.choices(list(shares), list(shares.values()))[0]

    def _plain(self, entry: Entry) -> str:
        return self.rng.choice((*entry.phrasings, entry.term))

    def _own_phrasing(self, entry: Entry) -> str:
        phrasing = self.rng.choice(entry.phrasings)
        frame = frame_of(phrasing, entry)
        if frame is not None and self._chance(0.3):
            return frame.replace(TERM, self._name(entry))
        return phrasing

    def _other_frame(self, entry: Entry) -> str:
        return self.rng.choice(self.frames).replace(TERM, self._name(entry))

    def _template(self, entry: Entry) -> str:
        return self.rng.choice(self.corpus.frames.templates).replace(TERM, self._name(entry))

    def _contrast(self, entry: Entry) -> str:
        distractor = self.rng.choice([e for e in self.corpus.entries if not _overlap(e, entry)])
        text = self.rng.choice(self.corpus.frames.contrasts)
        return text.replace(TERM, self._name(entry)).replace(OTHER_TERM, self._name(distractor))

    def _description(self, entry: Entry) -> str:
        words = unnamed_words(entry)
        length = self.rng.randint(*PART_WORDS)
        part = part_of(words, self.rng.choice(starts_of(words, length)), length)
        return self.rng.choice(self.corpus.frames.descriptions).replace(TERM, part)

    def _off_topic(self) -> str:
        if self._chance(0.5):
            return self.rng.choice(self.corpus.other.phrasings)
        frames = self.corpus.frames.templates if self._chance(0.5) else self.frames
        return self.rng.choice(frames).replace(TERM, self.rng.choice(self.corpus.nouns))

    def _name(self, entry: Entry) -> str:
        name = entry.term if self._chance(0.7) else self.rng.choice(entry.names)
        return self.rng.choice(self.corpus.frames.wrappers).replace(TERM, name) if self._chance(0.15) else name

    # ---- noise ----

    def _noise(self, text: str, entry: Entry) -> str:
        """Word dropout, typing errors, a sentence before or after, another end and case: each only sometimes."""
        span = find_name(text, entry) or (0, 0)
        before, name, after = text[: span[0]], text[span[0] : span[1]], text[span[1] :]
        if name and self._chance(self.mix.word_dropout):
            rate = self.rng.uniform(0.1, 0.6)
            before, after = self._drop_words(before, rate), self._drop_words(after, rate)
        if self._chance(self.mix.typing_errors):
            before, after = self._mistype(before, 0.15), self._mistype(after, 0.15)
        if self._chance(self.mix.respelling):
            name = self._respell(name)
        text = (before + name + after).strip()
        if self._chance(0.35):
            text = text.rstrip("?.! ") + self.rng.choice(ENDINGS)
        if self._chance(0.25):
            text = f"{self.rng.choice(self.corpus.frames.openers)} {text}"
        if self._chance(0.2):
            text = f"{text} {self.rng.choice(self.corpus.frames.closers)}"
        return self._recase(text) or entry.term

    def _drop_words(self, text: str, rate: float) -> str:
        return "".join(piece for piece in re.split(r"(\s+)", text) if piece.isspace() or not self._chance(rate))

    def _mistype(self, text: str, rate: float) -> str:
        pieces = re.split(r"(\s+)", text)
        return "".join(self._typo(piece) if len(piece) > 2 and self._chance(rate) else piece for piece in pieces)

    def _respell(self, name: str) -> str:
        how = self.rng.randrange(4)
        if how == 0:
            return name.replace("-", " ")
        if how == 1:
            return name.replace(" ", "-")
        if how == 2:
            return name.replace("-", "").replace(" ", "") if len(name) > 6 else name
        return self._typo(name) if len(name) > 5 else name

    def _typo(self, word: str) -> str:
        """Leave out, double, swap or replace one letter after the first."""
        at = self.rng.randrange(1, len(word))
        how = self.rng.randrange(4)
        if how == 0:
            return word[:at] + word[at + 1 :]
        if how == 1:
            return word[:at] + word[at] + word[at:]
        if how == 2:
            return word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]
        return word[:at] + self.rng.choice(LETTERS) + word[at + 1 :]

    def _recase(self, text: str) -> str:
        kind = self.rng.random()
        if kind < 0.30:
            return text.lower()
        if kind < 0.40:
            return text[:1].upper() + text[1:]
        if kind < 0.43:
            return text.upper()
        if kind < 0.46:
            return text.title()
        return text

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability


def _overlap(one: Entry, two: Entry) -> bool:
    """Whether a name of one entry stands inside a name of the other: to name both would not say which is meant."""
    return any(a.lower() in b.lower() or b.lower() in a.lower() for a in one.names for b in two.names)


def frames_of(corpus: Corpus) -> list[str]:
    """Every entry's phrasings with the term taken out; any other's goes there as well."""
    return [frame for e in corpus.entries for p in e.phrasings if (frame := frame_of(p, e)) is not None]


def unnamed_words(entry: Entry) -> list[str]:
    """The answer's words, with "it" for the entry's names."""
    answer = entry.answer
    for name in entry.names:
        answer = re.sub(rf"\b{re.escape(name)}s?\b", "it", answer, flags=re.IGNORECASE)
    return answer.split()


def starts_of(words: list[str], length: int) -> range:
    """Where a part of this many words may start: never at the first, which is often the name."""
    return range(1, max(1, len(words) - length) + 1)


def part_of(words: list[str], start: int, length: int) -> str:
    return " ".join(words[start : start + length]).strip(".,:;")


def parts_of(entry: Entry) -> Iterator[str]:
    """Every part of the answer that may stand in a description."""
    words = unnamed_words(entry)
    for length in range(PART_WORDS[0], PART_WORDS[1] + 1):
        yield from (part_of(words, start, length) for start in starts_of(words, length))
