"""Grammars for the embedded model's vocabulary."""

import json
from functools import cache
from pathlib import Path

from core.grammar import GrammarCompiler
from core.tokenizer import Tokenizer
from server.loaded_engine import compiler_of

MODEL = Path("gpu/demo/model")


@cache
def tokenizer() -> Tokenizer:
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    return Tokenizer((MODEL / "tokenizer.json").read_bytes(), config)


@cache
def compiler() -> GrammarCompiler:
    return compiler_of(tokenizer(), [tokenizer().eos_id])  # type: ignore[list-item]
