"""Grammars for the embedded model's vocabulary."""

import json
from functools import cache
from pathlib import Path

from core.grammar import GrammarCompiler
from core.tokenizer import Tokenizer

MODEL = Path("gpu/demo/model")


@cache
def tokenizer() -> Tokenizer:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    return Tokenizer((MODEL / "tokenizer.json").read_bytes(), config)


@cache
def compiler() -> GrammarCompiler:
    known = tokenizer()
    assert known.eos_id is not None
    token_bytes = [known.bytes_of(i) for i in range(known.vocab_size)]
    return GrammarCompiler(token_bytes, known.special_ids, [known.eos_id], lambda text: known.encode(text, False))
