"""What ways of decoding cost: `python -m bench.decoding --model DIR`. In pairs, the plain way first in every other one.

Beams against n answers of as many sequences, sampled and greedy. Eight plain streams beside one that asks for
llama-server's samplers, against the same beside one that asks for nothing: the time of a step, which is what a
neighbour notices. As many streams with --deterministic and without, with the weights in each format (a GGUF file's: as
stored). The ratios are this over plain, of the time and of the CPU time, which other processes disturb less.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from bench.speculative import interval
from core.config import QUANTIZE_SCHEMES
from core.types import Beams
from gpu.runner import ModelRunner

AS_STORED = "as stored"
PLAIN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "DRY": {"dry_multiplier": 0.8},
    "a window": {"repetition_penalty": 1.1, "repeat_last_n": 64},
    "penalties": {"repetition_penalty": 1.1},
    "typical-p": {"typical_p": 0.9},
    "top-n-sigma and XTC": {"top_n_sigma": 1.0, "xtc_probability": 0.5},
}


def pairs_of(num_pairs: int, times_s: Callable[[int, bool], float]) -> dict[str, Cell]:
    """times_s: takes the pair's number and whether it is the plain one; returns seconds."""
    found, cpu = ({True: list[float](), False: list[float]()} for _ in range(2))
    for number in range(num_pairs + 1):  # the first one warms up
        for is_plain in (number % 2 == 0, number % 2 == 1):
            begin_s = time.process_time()
            one = times_s(number, is_plain)
            if number:
                found[is_plain].append(one)
                cpu[is_plain].append(time.process_time() - begin_s)
    ratios, cpu_ratios = ([o / p for p, o in zip(each[True], each[False], strict=True)] for each in (found, cpu))
    low, high = interval(ratios)
    plain, other = (1e3 * statistics.median(found[one]) for one in (True, False))
    cells: dict[str, Cell] = {"plain, ms": plain, "this, ms": other, "ratio": statistics.median(ratios)}
    return cells | {"from": low, "to": high, "CPU ratio": statistics.median(cpu_ratios)}


def measure_beams(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for width, (name, plain) in itertools.product(arguments.widths, {"sampled": 1.0, "greedy": 0.0}.items()):
        streams = Streams(runner, has_prefix_cache=False)

        def answer_s(
            number: int, is_plain: bool, streams: Streams = streams, width: int = width, plain: float = plain
        ) -> float:
            asked: dict[str, Any] = {} if is_plain else {"beams": Beams(width)}
            begin_s, temperature = time.perf_counter(), plain if is_plain else 0.0
            prompt = streams.prompt(arguments.prompt)
            streams.submit(prompt, arguments.tokens, temperature, num_sequences=width, **asked)
            streams.run()
            return time.perf_counter() - begin_s

        rows.append({"sequences": width, "against": name, **pairs_of(arguments.pairs, answer_s)})
        print(rows[-1], file=sys.stderr)
    return table_of(f"{arguments.tokens} tokens with beams, and as many answers without", rows)


def measure_neighbours(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for name, asked in ASKED.items():
        streams = Streams(runner, has_prefix_cache=False)

        def step_s(number: int, is_plain: bool, streams: Streams = streams, asked: dict[str, Any] = asked) -> float:
            return _step_s(streams, arguments, PLAIN if is_plain else PLAIN | asked)

        rows.append({"beside": name, **pairs_of(arguments.pairs, step_s)})
        print(rows[-1], file=sys.stderr)
    return table_of(f"A step of {arguments.neighbours} plain streams beside one more", rows)


def measure_deterministic(_: ModelRunner, arguments: argparse.Namespace) -> Table:
    """A start each, too: what --deterministic promises is checked there."""
    rows: list[dict[str, Cell]] = []
    for scheme in arguments.schemes:
        streams: dict[bool, Streams] = {}
        starts: dict[str, Cell] = {}
        for is_plain, start in ((True, "start, s"), (False, "this start, s")):
            begin_s = time.perf_counter()
            quantize = None if scheme == AS_STORED else scheme
            runner = _open(arguments, quantize=quantize, deterministic=not is_plain)
            starts[start] = time.perf_counter() - begin_s
            streams[is_plain] = Streams(runner, has_prefix_cache=False)

        def step_s(number: int, is_plain: bool, streams: dict[bool, Streams] = streams) -> float:
            return _step_s(streams[is_plain], arguments, PLAIN)

        rows.append({"weights": scheme, **starts, **pairs_of(arguments.pairs, step_s)})
        print(rows[-1], file=sys.stderr)
    return table_of(f"A step of {arguments.neighbours + 1} streams with --deterministic, and without", rows)


def _step_s(streams: Streams, arguments: argparse.Namespace, last: dict[str, Any]) -> float:
    """The time of a step with the neighbours and one more."""
    kinds = [PLAIN] * arguments.neighbours + [last]
    names = [streams.submit(streams.prompt(32), arguments.tokens, sampling=one) for one in kinds]
    streams.run()
    times_s = streams.times_s[names[0]]
    return (times_s[-1] - times_s[len(times_s) // 4]) / (len(times_s) * 3 // 4)


PARTS = {"beams": measure_beams, "neighbours": measure_neighbours, "deterministic": measure_deterministic}


def _open(arguments: argparse.Namespace, **engine: Any) -> ModelRunner:
    longest = max(arguments.prompt, 32) + arguments.tokens + 32
    num_sequences = max(arguments.neighbours + 1, *arguments.widths)
    sizes = {"max_model_len": longest, "max_sequences": num_sequences}
    return open_model(arguments, num_sequences * longest, **sizes, **engine)


def _measure(arguments: argparse.Namespace) -> Found:
    runner = _open(arguments)
    tables = [PARTS[part](runner, arguments) for part in arguments.parts]
    return Found(tables, shown_model(arguments, runner), name="-".join(["decoding", *arguments.parts]))


FLAGS = (
    *MODEL_FLAGS,
    Flag("--widths", (4, 8), "beams", (2,), more={"nargs": "+", "type": int}),
    Flag("--neighbours", 8, "plain streams", 2),
    Flag("--prompt", 256, "tokens", 32),
    Flag("--tokens", 96, "of each answer", 12),
    Flag("--pairs", 7, "of each case", 1),
    Flag(
        "--schemes",
        (AS_STORED, "int8", "fp8", "int4"),
        "of weights, for --deterministic",
        more={"nargs": "+", "choices": (AS_STORED, *QUANTIZE_SCHEMES)},
    ),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("decoding", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
