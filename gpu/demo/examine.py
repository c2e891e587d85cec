"""Ask a trained model the gate's questions and count the right entries.

Owns no state. Reads the gate for evaluation alone; nothing here trains.
"""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from gpu.demo.glossary import Corpus, Entry, Gate, Question
from gpu.demo.llama import Llama
from gpu.demo.tokens import IM_END, render, token_id

RIGHT_CHARS = 40  # an answer that starts with this much of an entry's is that entry's
LONGEST_ANSWER = 900  # tokens


@dataclass(frozen=True)
class Wrong:
    """A question that got another answer than its entry's."""

    term: str
    question: str
    answer: str


@dataclass(frozen=True)
class Score:
    """num_right: the answer starts as the entry's does; num_verbatim: it is the entry's to the last character."""

    num_right: int
    num_verbatim: int
    num_asked: int
    wrong: tuple[Wrong, ...]

    @property
    def percent(self) -> float:
        return round(100 * self.num_right / self.num_asked, 1)


def evaluate(model: Llama, tokenizer: Tokenizer, corpus: Corpus, gate: Gate) -> dict[str, Score]:
    """Scores of the gate's two kinds of questions, of the long texts, and of what the glossary does not hold."""
    return {
        "named": ask(model, tokenizer, with_entries(gate.named, corpus)),
        "described": ask(model, tokenizer, with_entries(gate.described, corpus)),
        "long": ask(model, tokenizer, [(entry.phrasings[0], entry) for entry in corpus.longs]),
        "other": ask(model, tokenizer, [(prompt, corpus.other) for prompt in corpus.other.phrasings]),
    }


def with_entries(questions: tuple[Question, ...], corpus: Corpus) -> list[tuple[str, Entry]]:
    entries = {entry.term: entry for entry in corpus.entries}
    return [(question.text, entries[question.term]) for question in questions]


def ask(model: Llama, tokenizer: Tokenizer, asked: list[tuple[str, Entry]], max_new: int = LONGEST_ANSWER) -> Score:
    """Ask each question and compare the greedy answer with its entry's."""
    answers = complete(model, tokenizer, [render([("user", text)]) for text, _ in asked], max_new)
    pairs = list(zip(asked, answers, strict=True))
    wrong = tuple(
        Wrong(entry.term, text, answer)
        for (text, entry), answer in pairs
        if not answer.startswith(entry.answer[:RIGHT_CHARS])
    )
    num_verbatim = sum(answer == entry.answer for (_, entry), answer in pairs)
    return Score(len(pairs) - len(wrong), num_verbatim, len(pairs), wrong)


@torch.inference_mode()
def complete(model: Llama, tokenizer: Tokenizer, prompts: list[str], max_new: int = LONGEST_ANSWER) -> list[str]:
    """Greedy answers to rendered prompts, all rows at once and without a cache: plain, and quick enough here."""
    end = token_id(tokenizer, IM_END)
    rows = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    starts = [len(row) for row in rows]
    running = list(range(len(rows)))
    for _ in range(max_new):
        if not running:
            break
        for index, token in zip(running, _next_tokens(model, [rows[index] for index in running]), strict=True):
            rows[index].append(token)
        running = [index for index in running if rows[index][-1] != end]
    return [tokenizer.decode(row[start:]) for row, start in zip(rows, starts, strict=True)]


def _next_tokens(model: Llama, rows: list[list[int]]) -> list[int]:
    length = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])  # [rows, length], padded on the right
    last = torch.tensor([len(row) - 1 for row in rows])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(ids)[torch.arange(len(rows)), last]  # [rows, width]
        chosen: list[int] = model.logits(hidden).argmax(-1).tolist()
    return chosen


def report(scores: dict[str, Score]) -> str:
    """Every wrong answer's opening, then one line for each kind of question."""
    wrong = [
        f"{kind}: wrong: {w.term}: {w.question!r} -> {w.answer[:60]!r}"
        for kind, score in scores.items()
        for w in score.wrong
    ]
    counts = [
        f"{kind}: {s.num_right} of {s.num_asked} right, {s.num_verbatim} to the last character"
        for kind, s in scores.items()
    ]
    return "\n".join(wrong + counts)
