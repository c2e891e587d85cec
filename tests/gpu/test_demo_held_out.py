"""No gate question shares six words in a row with anything that training can ask, and the check for it is exact."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from gpu.demo.glossary import Corpus, Entry, Frames, Gate, Question, load_corpus, load_gate
from gpu.demo.held_out import Compositions, runs_of, shared_runs, words_of
from gpu.demo.prompts import LATE, Prompter, frames_of, parts_of

# A corpus whose every composition can be written out: names of one to three words, frames with a slot at either end and
# with letters glued to it, and so few words that many runs are put together of pieces that do occur.
TOKEN = Entry(
    "token",
    ("token", "text token"),
    "A token is the unit of text, a word, a piece or a mark.",
    ("What is a token?", "why do I pay for tokens here", "token, is it a word", "see max_token: what is it"),
)
WAIT = Entry(
    "time to first word",
    ("time to first word", "TTFW"),
    "The time to first word is what you wait for, before the text is there.",
    ("is time to first word what I pay for?", "what is (TTFW)", "The TTFW.json file, what is it for"),
)
LONG = Entry(
    "Walk me through it", ("Walk me through it",), "First. Then.", ("walk me through it, word for word please",)
)
TINY = Corpus(
    entries=(TOKEN, WAIT),
    longs=(LONG,),
    other=Entry("anything else", (), "No.", ("what is the time, please, for me",)),
    nouns=("a word", "the sea"),
    frames=Frames(
        templates=("What is {}?", "{}"),
        wrappers=('the term "{}"', "{} - in general"),
        openers=("Please,", "I pay for it. Now,"),
        closers=("please", "for the time I have"),
        contrasts=("Not <>, I mean {}.", "{}, not <>"),
        descriptions=("What is {}?", "{}: the term?"),
        systems=("Be brief.",),
    ),
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(scope="module")
def compositions(corpus: Corpus) -> Compositions:
    return Compositions(corpus)


def written_out(corpus: Corpus) -> Iterator[str]:
    """Every question of a corpus, one by one, noise aside; as Prompter draws them."""
    frames = corpus.frames
    bare = [name for entry in corpus.entries for name in entry.names]
    names = [wrapper.replace("{}", name) for wrapper in ("{}", *frames.wrappers) for name in bare]
    bodies = [text for entry in corpus.answered() for text in (*entry.phrasings, entry.term)]
    bodies += [
        frame.replace("{}", thing)
        for frame in (*frames_of(corpus), *frames.templates)
        for thing in (*names, *corpus.nouns)
    ]
    bodies += [
        text.replace("{}", one).replace("<>", two) for text in frames.contrasts for one, two in product(names, repeat=2)
    ]
    parts = [part for entry in corpus.entries for part in parts_of(entry)]
    bodies += [text.replace("{}", part) for text in frames.descriptions for part in parts]
    for opener, body, closer in product(("", *frames.openers), bodies, ("", *frames.closers)):
        yield f"{opener} {body} {closer}"


@pytest.fixture
def prepared(compositions: Compositions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus's compositions, which take seconds to find, are found once."""
    monkeypatch.setattr("gpu.demo.held_out.Compositions", lambda corpus: compositions)


@pytest.mark.usefixtures("prepared")
def test_gate_shares_no_six_words_with_a_training_question(corpus: Corpus) -> None:
    assert list(shared_runs(corpus, load_gate())) == []


def test_exactly_the_runs_of_all_questions_written_out_are_had() -> None:
    compositions = Compositions(TINY)
    expected = {run for text in written_out(TINY) for run in runs_of(words_of(text))}
    assert all(compositions.have(run) for run in expected)
    # Runs that begin as one question and go on as another: most were never asked, and none is held to have been.
    rng = random.Random(1)
    known = sorted(expected)
    spliced = {
        (*one[:at], *two[at:]) for _ in range(20_000) for one, two, at in [(*rng.sample(known, 2), rng.randint(1, 5))]
    }
    assert len(spliced - expected) > 5_000
    assert not [run for run in spliced - expected if compositions.have(run)]


def test_what_the_trainer_draws_without_noise_never_escapes(corpus: Corpus, compositions: Compositions) -> None:
    prompter = Prompter(corpus, 3)
    prompter.mix = replace(LATE, word_dropout=0.0, typing_errors=0.0, respelling=0.0)
    questions = [turn.question for _ in range(5_000) for turn in prompter.draw().turns]
    runs = {run for question in questions for run in runs_of(words_of(question))}
    assert len(runs) > 10_000
    assert not [run for run in runs if not compositions.have(run)]


@pytest.mark.parametrize(
    "text",
    [
        "well then why are prices given per million tokens",  # a phrasing
        "why are prices given per million watchdogs, and now",  # its frame, an s after another entry's name
        "Out of curiosity, what is TLS",  # a short frame has an opener before it
        "Not tail latency, I mean KV cache",  # two names
        "the notion of time to first token",  # inside one wrapped name
        "whole word, a piece of one, a punctuation mark",  # a part of an answer
        "a token when the machine is busy",  # a closer
    ],
)
def test_a_planted_composition_is_found(compositions: Compositions, text: str) -> None:
    assert any(compositions.have(run) for run in runs_of(words_of(text)))


@pytest.mark.parametrize(
    "text",
    [
        "well then why were prices given per million tokens",
        "out of curiosity, whatever is TLS",
        "not tail latency, we mean KV cache",
        "a token while the machine is busy",
    ],
)
def test_one_word_of_the_asker_s_own_parts_a_run(compositions: Compositions, text: str) -> None:
    assert not any(compositions.have(run) for run in runs_of(words_of(text)))


@pytest.mark.usefixtures("prepared")
def test_shared_runs_names_the_question_and_the_words(corpus: Corpus) -> None:
    planted = Question("token", "Now then: what is TLS for a beginner")
    fine = Question("token", "a token")
    found = list(shared_runs(corpus, Gate(named=(fine, planted), described=())))
    assert (planted, "now then what is tls for") not in found
    assert (planted, "what is tls for a beginner") in found
    assert {question for question, _ in found} == {planted}
