"""What ways of decoding cost: `python -m bench.decoding --model DIR`. In pairs, the plain way first in every other one.

Beams against n sampled answers of as many sequences. And eight plain streams beside one that asks for llama-server's
samplers, against the same beside one that asks for nothing: the time of a step, which is what a neighbour notices.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, table_of
from bench.speculative import interval
from core.types import Beams
from gpu.runner import ModelRunner

PLAIN: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "DRY": {"dry_multiplier": 0.8},
    "a window": {"repetition_penalty": 1.1, "repeat_last_n": 64},
    "penalties": {"repetition_penalty": 1.1},
    "typical-p": {"typical_p": 0.9},
    "top-n-sigma and XTC": {"top_n_sigma": 1.0, "xtc_probability": 0.5},
}


def pairs_of(arguments: argparse.Namespace, times_s: Any) -> dict[str, Cell]:
    """times_s: takes the pair's number and whether it is the plain one; returns seconds."""
    found = {True: list[float](), False: list[float]()}
    for number in range(arguments.pairs + 1):  # the first one warms up
        for is_plain in (number % 2 == 0, number % 2 == 1):
            one = times_s(number, is_plain)
            if number:
                found[is_plain].append(one)
    ratios = [other / plain for plain, other in zip(found[True], found[False], strict=True)]
    low, high = interval(ratios)
    plain, other = (1e3 * statistics.median(found[one]) for one in (True, False))
    return {"plain, ms": plain, "this, ms": other, "ratio": statistics.median(ratios), "from": low, "to": high}


def measure_beams(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for width in arguments.widths:
        streams = Streams(runner, has_prefix_cache=False)

        def answer_s(number: int, is_plain: bool, streams: Streams = streams, width: int = width) -> float:
            asked = {"num_sequences": width} if is_plain else {"num_sequences": width, "beams": Beams(width)}
            begin_s = time.perf_counter()
            streams.submit(streams.prompt(arguments.prompt), arguments.tokens, 1.0, **asked)
            streams.run()
            return time.perf_counter() - begin_s

        rows.append({"sequences": width, **pairs_of(arguments, answer_s)})
        print(rows[-1], file=sys.stderr)
    return table_of(f"{arguments.tokens} tokens with beams, and as many sampled answers", rows)


def measure_neighbours(runner: ModelRunner, arguments: argparse.Namespace) -> Table:
    rows: list[dict[str, Cell]] = []
    for name, asked in ASKED.items():
        streams = Streams(runner, has_prefix_cache=False)

        def step_s(number: int, is_plain: bool, streams: Streams = streams, asked: dict[str, Any] = asked) -> float:
            kinds = [PLAIN] * arguments.neighbours + [PLAIN if is_plain else PLAIN | asked]
            names = [streams.submit(streams.prompt(32), arguments.tokens, sampling=one) for one in kinds]
            streams.run()
            times_s = streams.times_s[names[0]]
            return (times_s[-1] - times_s[len(times_s) // 4]) / (len(times_s) * 3 // 4)

        rows.append({"beside": name, **pairs_of(arguments, step_s)})
        print(rows[-1], file=sys.stderr)
    return table_of(f"A step of {arguments.neighbours} plain streams beside one more", rows)


PARTS = {"beams": measure_beams, "neighbours": measure_neighbours}


def _measure(arguments: argparse.Namespace) -> Found:
    longest = max(arguments.prompt, 32) + arguments.tokens + 32
    num_sequences = max(arguments.neighbours + 1, *arguments.widths)
    runner = open_model(arguments, num_sequences * longest, max_model_len=longest, max_sequences=num_sequences)
    tables = [PARTS[part](runner, arguments) for part in arguments.parts]
    return Found(tables, shown_model(arguments, runner), name="-".join(["decoding", *arguments.parts]))


FLAGS = (
    *MODEL_FLAGS,
    Flag("--widths", (4, 8), "beams", (2,), more={"nargs": "+", "type": int}),
    Flag("--neighbours", 8, "plain streams", 2),
    Flag("--prompt", 256, "tokens", 32),
    Flag("--tokens", 96, "of each answer", 12),
    Flag("--pairs", 7, "of each case", 1),
    Flag("--parts", tuple(PARTS), "to measure", more={"nargs": "+", "choices": tuple(PARTS)}),
)
main = bench("decoding", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
