"""A tokenizer for a made-up model: byte-level BPE trained on this repository's own text, filled up to the size wanted.

The text here is enough for some thousand merges. The rest of a vocabulary are merges of two words that exist already:
rare in text, but each id the model draws says something, as with a real vocabulary.
"""

import itertools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_TRAINED = 8_000
MAX_TOKEN_CHARS = 24


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids; the same every time on the same text.

    Raises:
        ValueError: fewer ids than bytes and special tokens, or more than there are pairs of words.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {MIN_VOCAB_SIZE} bytes and special tokens")
    fields = json.loads(_train(min(vocab_size, MAX_TRAINED)).to_str())
    _fill_up(fields["model"], vocab_size)
    return Tokenizer.from_str(json.dumps(fields))


def local_texts() -> Iterator[str]:
    """The demonstration corpus, the documents and the source of this repository."""
    for file in sorted((ROOT / "gpu" / "demo" / "corpus").glob("*.toml")):
        yield from _strings(tomllib.loads(file.read_text(encoding="utf-8")))
    documents = sorted(ROOT.glob("*.md"))
    sources = sorted(path for layer in ("bench", "core", "gpu", "server") for path in (ROOT / layer).rglob("*.py"))
    for file in [*documents, *sources]:
        yield file.read_text(encoding="utf-8")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(_strings(item) for item in value.values())
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(_strings(item) for item in value)


def _train(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(local_texts(), trainer)
    return tokenizer


def _fill_up(model: dict[str, Any], vocab_size: int) -> None:
    """Add merges of two known words until there are `vocab_size` ids."""
    vocab: dict[str, int] = model["vocab"]
    merges: list[list[str]] = model["merges"]
    tails = [token for token in vocab if token.isascii() and token.isalpha() and len(token) > 1]
    heads = [f"Ġ{token}" for token in tails if f"Ġ{token}" in vocab] + tails  # Ġ: a space, in byte-level BPE
    for distance, (index, head) in itertools.product(range(len(tails)), enumerate(heads)):
        if len(vocab) == vocab_size:
            return
        tail = tails[(index + distance) % len(tails)]
        if head + tail not in vocab and len(head + tail) <= MAX_TOKEN_CHARS:
            vocab[head + tail] = len(vocab)
            merges.append([head, tail])
    if len(vocab) != vocab_size:
        raise ValueError(f"a vocabulary of {vocab_size} is more than the text here gives: {len(vocab)}")
