"""What it costs to hold answers to a form: `python -m bench.structured --model DIR`.

- Masks: how long it takes to find which tokens may come next, over answers that follow random schemas, every token that
  may come as likely as any other. That leads to more unusual states than a model's answers do. In CPU time of the
  thread, so that neighbours do not count. The vocabulary is byte-level BPE trained on Python's standard library; where
  that has too few words, random pairs of its words make the others.
- Between tokens: steps of a whole batch under one schema, beside steps of free text, in turns in the same process.
- First token: of requests whose grammar is new, cached, or none.
"""

import argparse
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, pre_tokenizers, trainers

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, percentile, table_of
from core.constraints import GrammarSpec, json_schema
from core.grammar import Grammar, GrammarCompiler
from core.tokenizer import Tokenizer
from gpu.runner import ModelRunner
from server.loaded_engine import compiler_of
from tests.core.random_schemas import SchemaMaker

END = "<|end|>"
TEXT_BYTES = 25 * 10**6  # that the vocabulary is trained on
VOCABULARIES = (32_000, 151_936)
MOST_TOKENS = 200  # of an answer whose masks are timed
NUM_ROWS = 32
PROMPT = 64  # tokens
WARM_TOKENS = 3  # of each row, before steps are timed
# Unbounded: an answer goes on as long as is measured
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"id": {"type": "integer"}, "name": {"type": "string"}, "kind": {"enum": ["first", "second"]}},
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    },
}


def texts() -> Iterator[str]:
    """Sources of the standard library, some megabytes of them."""
    num_bytes = 0
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts):
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes += len(text)
        if num_bytes > TEXT_BYTES:
            return
        yield text


@cache
def trained() -> bytes:
    """The largest vocabulary; the others are its beginnings."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(VOCABULARIES),
        min_frequency=1,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    fields = msgspec.json.decode(tokenizer.to_str())
    _fill(fields["model"], max(VOCABULARIES))
    return msgspec.json.encode(fields)


def _fill(model: dict[str, Any], vocab_size: int) -> None:
    """Add pairs of trained words until there are so many."""
    words, rng = [word for word in model["vocab"] if word != END], random.Random(0)
    while len(model["vocab"]) < vocab_size:
        left, right = rng.choice(words), rng.choice(words)
        if left + right not in model["vocab"]:
            model["vocab"][left + right] = len(model["vocab"])
            model["merges"].append([left, right])


def tokenizer_of(vocab_size: int) -> Tokenizer:
    fields = msgspec.json.decode(trained())
    model, num_bytes = fields["model"], len(pre_tokenizers.ByteLevel.alphabet())
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < vocab_size}
    model["merges"] = model["merges"][: vocab_size - num_bytes - 1]
    return Tokenizer(msgspec.json.encode(fields), {"eos_token": END})


def mask_times_s(grammar: Grammar, eos_id: int, rng: random.Random) -> Iterator[float]:
    """Of each token of a random answer."""
    state, mask = grammar.start(), np.zeros(grammar.num_words, np.int32)
    for _ in range(MOST_TOKENS):
        started_s = time.thread_time()
        state.fill_mask(mask)
        yield time.thread_time() - started_s
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
        token_id = int(rng.choice(allowed))
        if token_id == eos_id:
            return
        state.accept(token_id)


def measure_masks(arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for vocab_size in VOCABULARIES:
        tokenizer = tokenizer_of(vocab_size)
        assert tokenizer.eos_id is not None
        started_s = time.thread_time()
        compiler = compiler_of(tokenizer, [tokenizer.eos_id])
        prepared_s, masks_s, compiled_s = time.thread_time() - started_s, list[float](), list[float]()
        for seed in range(arguments.schemas):
            rng = random.Random(seed)
            spec = json_schema(SchemaMaker(rng, is_bounded=seed % 2 == 0).schema(), "schema")
            started_s = time.thread_time()
            grammar = compiler.compile(spec)
            compiled_s.append(time.thread_time() - started_s)
            masks_s += mask_times_s(grammar, tokenizer.eos_id, rng)
        cells: dict[str, Cell] = {"vocabulary": tokenizer.vocab_size, "masks": len(masks_s)}
        for q in (50, 90, 99, 99.9):
            cells[f"p{q:g} ms"] = (percentile(masks_s, q) or 0.0) * 1e3
        cells |= {"compile p50 ms": statistics.median(compiled_s) * 1e3, "compile max ms": max(compiled_s) * 1e3}
        rows.append(cells | {"vocabulary prepared s": prepared_s})
    return table_of(f"Masks of answers to {arguments.schemas} random schemas", rows)


@cache
def compiler_for(directory: Path) -> GrammarCompiler:
    source = (directory / "tokenizer.json").read_bytes()
    config = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
    tokenizer = Tokenizer(source, config)
    assert tokenizer.eos_id is not None
    return compiler_of(tokenizer, [tokenizer.eos_id])


def time_steps(streams: Streams, grammar: Grammar | None, num_steps: int) -> list[float]:
    """Seconds of each step of NUM_ROWS rows."""
    names = [
        streams.submit(streams.prompt(PROMPT), num_steps + WARM_TOKENS + 8, 1.0, grammar=grammar)
        for _ in range(NUM_ROWS)
    ]
    while not streams.have_all(names, WARM_TOKENS):
        streams.step()
    found = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        streams.step()
        found.append(time.perf_counter() - started_s)
    streams.cancel_all()
    return found


def measure_steps(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    """Forced tokens are off: each step gives each row one token. The fastest quarter is disturbed least."""
    grammar = compiler_for(arguments.model).compile(json_schema(SCHEMA, "schema"))
    streams, free, held = Streams(runner, forces_tokens=False), list[float](), list[float]()
    time_steps(streams, grammar, arguments.steps)
    for _ in range(arguments.rounds):
        free += time_steps(streams, None, arguments.steps)
        held += time_steps(streams, grammar, arguments.steps)
    rows: list[dict[str, Cell]] = []
    for q in (25, 50):
        free_s, held_s = (percentile(steps, q) or 0.0 for steps in (free, held))
        cells: dict[str, Cell] = {"free text ms": free_s * 1e3, "held ms": held_s * 1e3, "ratio": held_s / free_s}
        rows.append({f"a step of {NUM_ROWS} rows": f"p{q}", "steps of each": len(free), **cells})
    return table_of("Between tokens, all rows under one schema beside free text", rows)


def new_spec(number: int) -> GrammarSpec:
    """A schema as SCHEMA, that nobody has sent."""
    properties = {**SCHEMA["items"]["properties"], f"note{number}": {"type": "string"}}  # type: ignore[index]
    return json_schema({"type": "object", "properties": properties, "required": list(properties)}, "schema")


def measure_first_token(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    compiler, streams = compiler_for(arguments.model), Streams(runner)
    cached = compiler.compile(new_spec(-1))
    took_s: dict[str, list[float]] = {"free text": [], "cached grammar": [], "new grammar": []}
    for number in range(arguments.rounds * 2):
        for name, of_case in took_s.items():
            prompt, started_s = streams.prompt(PROMPT), time.perf_counter()
            grammar = compiler.compile(new_spec(number)) if name == "new grammar" else None
            grammar = cached if name == "cached grammar" else grammar
            asked = streams.submit(prompt, 1, 1.0, grammar=grammar)
            streams.run()
            of_case.append(streams.times_s[asked][0] - started_s)
    rows: list[dict[str, Cell]] = [
        {"case": name, "TTFT p50 ms": statistics.median(of_case) * 1e3, "of free text": ratio(of_case, took_s)}
        for name, of_case in took_s.items()
    ]
    return table_of(f"Time to the first token of a prompt of {PROMPT}", rows)


def ratio(of_case: Sequence[float], took_s: dict[str, list[float]]) -> float:
    return statistics.median(one / free for one, free in zip(of_case, took_s["free text"], strict=True))


def _measure(arguments: argparse.Namespace) -> Found:
    tables = [measure_masks(arguments)] if "masks" in arguments.parts else []
    if set(arguments.parts) == {"masks"}:
        return Found(tables)
    longest = PROMPT + arguments.steps + 32
    runner = open_model(arguments, NUM_ROWS * (longest + 32), max_model_len=longest, max_sequences=NUM_ROWS)
    if "steps" in arguments.parts:
        tables.append(measure_steps(runner, arguments))
    if "first" in arguments.parts:
        tables.append(measure_first_token(runner, arguments))
    return Found(tables, shown_model(arguments, runner))


FLAGS = (
    *MODEL_FLAGS,
    Flag("--schemas", 200, "whose masks are timed", 4),
    Flag("--rounds", 8, "of free text and held answers in turns", 1),
    Flag("--steps", 32, "of each", 4),
    Flag("--parts", ("masks", "steps", "first"), "to measure", more={"nargs": "+"}),
)
main = bench("structured", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
