"""What it costs to hold answers to a form: `python -m bench.structured --model DIR`.

- Masks: how long it takes to find which tokens may come next, over answers that follow random schemas, every token that
  may come as likely as any other. That leads to more unusual states than a model's answers do. In CPU time of the
  thread, so that neighbours do not count. The vocabulary is byte-level BPE, trained once (a minute) on the sources and
  texts of Python and of the installed packages, and kept in ~/.cache.
- Between tokens: steps of a whole batch under one schema, beside steps of free text, in turns in the same process.
- First token: of requests whose grammar is new, cached, or none.
- Forced tokens: answers to a schema of long names, with and without --forced-tokens, in turns.
"""

import argparse
import os
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
from bench.load import CannotRun
from bench.results import Cell, Table, percentile, table_of
from core.constraints import GrammarSpec, json_schema
from core.grammar import Grammar, GrammarCompiler
from core.tokenizer import Tokenizer
from gpu.runner import ModelRunner
from server.loaded_engine import compiler_of
from tests.core.random_schemas import SchemaMaker

END = "<|end|>"
TEXT_BYTES = 150 * 10**6  # that the vocabulary is trained on
LONGEST_TEXT_BYTES = 2 * 10**6  # beyond, they are tables
SUFFIXES = {".py", ".md", ".rst", ".txt", ".h", ".js", ".html"}
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

ANSWER_TOKENS = 400  # at most, of answers with forced tokens
LONG_NAMES: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"the_{what}_of_the_{whose}_as_it_was_last_reported": {"type": "integer", "minimum": 0, "maximum": 999}
        for whose in ("first_customer", "second_customer", "warehouse")
        for what in ("identifier", "balance", "outstanding_amount", "number_of_deliveries")
    },
    "additionalProperties": False,
}
LONG_NAMES["required"] = list(LONG_NAMES["properties"])


def texts() -> Iterator[str]:
    """In an order that mixes the packages."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    paths = {path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()}
    num_bytes, found = 0, sorted(paths)
    random.Random(0).shuffle(found)
    for path in found:
        if path.stat().st_size < LONGEST_TEXT_BYTES:
            text = path.read_text(encoding="utf-8", errors="replace")
            num_bytes += len(text)
            yield text[: max(0, len(text) + TEXT_BYTES - num_bytes)]
            if num_bytes > TEXT_BYTES:
                return


@cache
def trained() -> bytes:
    """The largest vocabulary; the others are its beginnings.

    Raises:
        CannotRun: the texts have fewer words.
    """
    directory = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "steploop"
    kept = directory / f"bench-vocabulary-{max(VOCABULARIES)}-{TEXT_BYTES}.json"
    if kept.exists():
        return kept.read_bytes()
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(VOCABULARIES),
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    if tokenizer.get_vocab_size() < max(VOCABULARIES):
        cause = f"The texts of {sysconfig.get_paths()['purelib']} have {tokenizer.get_vocab_size()} words only."
        raise CannotRun(cause, "Install more packages (make bench).")
    directory.mkdir(parents=True, exist_ok=True)
    kept.write_text(tokenizer.to_str(), encoding="utf-8")
    return kept.read_bytes()


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
        cells["over 1 ms, %"] = 100 * sum(took_s > 1e-3 for took_s in masks_s) / len(masks_s)
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


def forced_times(streams: Streams, grammar: Grammar, num_streams: int) -> tuple[float, int]:
    """Seconds until all of the answers have ended, and their tokens."""
    started_s = time.perf_counter()
    names = [streams.submit(streams.prompt(PROMPT), ANSWER_TOKENS, 1.0, grammar=grammar) for _ in range(num_streams)]
    streams.run()
    return time.perf_counter() - started_s, sum(len(streams.tokens[name]) for name in names)


def measure_forced(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    grammar = compiler_for(arguments.model).compile(json_schema(LONG_NAMES, "schema"))
    kinds = {forces: Streams(runner, forces_tokens=forces) for forces in (True, False)}
    rows: list[dict[str, Cell]] = []
    for num_streams in (1, 8):
        gains, speeds = list[float](), dict[bool, list[float]]((forces, []) for forces in kinds)
        before = kinds[True].scheduler.stats()
        for _ in range(arguments.rounds):
            for forces, streams in kinds.items():
                took_s, num_tokens = forced_times(streams, grammar, num_streams)
                speeds[forces].append(num_tokens / took_s)
            gains.append(speeds[True][-1] / speeds[False][-1])
        after = kinds[True].scheduler.stats()
        num_generated = after.num_generated_tokens - before.num_generated_tokens
        num_forced = after.num_forced_tokens - before.num_forced_tokens
        cells: dict[str, Cell] = {"streams": num_streams, "forced of the tokens, %": 100 * num_forced / num_generated}
        names = {False: "off: tokens/s", True: "on: tokens/s"}
        cells |= {name: statistics.median(speeds[forces]) for forces, name in names.items()}
        rows.append(cells | {"gain p50": statistics.median(gains), "least": min(gains), "most": max(gains)})
    return table_of("Forced tokens, of answers to a schema of long names", rows)


def ratio(of_case: Sequence[float], took_s: dict[str, list[float]]) -> float:
    return statistics.median(one / free for one, free in zip(of_case, took_s["free text"], strict=True))


def _measure(arguments: argparse.Namespace) -> Found:
    tables = [measure_masks(arguments)] if "masks" in arguments.parts else []
    if set(arguments.parts) == {"masks"}:
        return Found(tables)
    longest = PROMPT + max(arguments.steps, ANSWER_TOKENS) + 32
    runner = open_model(arguments, NUM_ROWS * (longest + 32), max_model_len=longest, max_sequences=NUM_ROWS)
    if "steps" in arguments.parts:
        tables.append(measure_steps(runner, arguments))
    if "first" in arguments.parts:
        tables.append(measure_first_token(runner, arguments))
    if "forced" in arguments.parts:
        tables.append(measure_forced(runner, arguments))
    return Found(tables, shown_model(arguments, runner))


FLAGS = (
    *MODEL_FLAGS,
    Flag("--schemas", 200, "whose masks are timed", 4),
    Flag("--rounds", 8, "of free text and held answers in turns", 1),
    Flag("--steps", 32, "of each", 4),
    Flag("--parts", ("masks", "steps", "first", "forced"), "to measure", more={"nargs": "+"}),
)
main = bench("structured", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
