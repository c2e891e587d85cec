"""What a load run asks: one text again and again, the lines of a file, or made-up text of a given number of tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

DEFAULT_PROMPT = "What is a KV cache?"

# Two lengths that calibrate words to tokens; both fit the smallest contexts served.
CALIBRATION_WORDS = (16, 96)

# Common words, so that most vocabularies have each of them in one or two tokens.
_TEXT = """
river stone window garden letter market silver engine paper copper summer winter bridge candle forest harbor
island journey kitchen ladder mirror needle orange pencil quarter ribbon saddle temple valley wagon yellow
anchor basket circle dragon elbow feather glove hammer insect jacket kettle lemon marble narrow ocean pocket
quiet
"""
_WORDS = _TEXT.split()


class PromptSource(Protocol):
    """Gives the prompt of one request after the other, without end."""

    def next(self) -> str: ...


class ListedPrompts:
    """The given texts in turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        if not texts:
            raise ValueError("no prompts")
        self._texts = tuple(texts)
        self._position = 0

    def next(self) -> str:
        text = self._texts[self._position % len(self._texts)]
        self._position += 1
        return text


class RandomPrompts:
    """Different text each time, so that no prefix cache helps; the same texts for the same seed."""

    def __init__(self, num_words: int, seed: int) -> None:
        self._num_words = num_words
        self._random = random.Random(seed)

    def next(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._num_words))


def prompts_of_file(path: Path) -> ListedPrompts:
    """One prompt per line; empty lines are passed over.

    Raises:
        OSError: it cannot be read.
        ValueError: there is no prompt in it.
    """
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return ListedPrompts([line for line in lines if line])


def words_for_tokens(num_tokens: int, calibration: Sequence[tuple[int, int]]) -> int:
    """How many words make a prompt of about `num_tokens`, the server's template included.

    Args:
        calibration: two (words, tokens) pairs, as the server counted them.
    """
    (few_words, few_tokens), (many_words, many_tokens) = calibration
    tokens_per_word = (many_tokens - few_tokens) / (many_words - few_words)
    if tokens_per_word <= 0:  # the server reports no usage: what English text costs most vocabularies
        return max(1, round(num_tokens / 1.3))
    return max(1, round(few_words + (num_tokens - few_tokens) / tokens_per_word))
