"""What drawing a step's tokens costs: `python -m bench.sampling`.

Rows of float32 logits of which a few stand out, as a trained model's do, or which are flat, as random weights give
them. For each kind of request: microseconds by numba's kernel and by torch, as ratios to a greedy argmax by torch of
the same rows, in the same run. Each figure is the best of rounds that take turns.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result
from core.plan import SequenceStart
from core.types import SamplingParams
from gpu.cpu_kernels.row_sampler import RowSampler
from gpu.sampler import Sampler, SamplerChoice

ROWS = (1, 8, 32)
VOCABULARIES = (32_000, 152_000)
REQUESTS = {
    "greedy": SamplingParams(max_tokens=4096, temperature=0.0),
    "temperature": SamplingParams(max_tokens=4096, temperature=0.8),
    "top_p 0.9, top_k 50": SamplingParams(max_tokens=4096, temperature=0.8, top_p=0.9, top_k=50),
    "top_p 0.9": SamplingParams(max_tokens=4096, temperature=0.8, top_p=0.9),
    "min_p 0.05": SamplingParams(max_tokens=4096, temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(max_tokens=4096, temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5),
}
COLUMNS = ("request", "vocabulary", "rows", "argmax us", "kernel us", "torch us", "kernel / argmax", "torch / kernel")
ROUNDS, QUICK_ROUNDS = 5, 1
FLAT_SPREAD = 0.7
PROMPT = tuple(range(512))
LIKELY_TOKENS = 40
LIKELY_SPREAD, SPREAD = 8.0, 2.0  # logits' standard deviations


def measure(kind: str, vocab_size: int, num_rows: int, rounds: int) -> list[tuple[Cell, ...]]:
    """One line for each of REQUESTS. kind: of logits, "peaked" or "flat"."""
    logits = likely_logits(num_rows, vocab_size)
    if kind == "flat":
        logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * FLAT_SPREAD
    lines: list[tuple[Cell, ...]] = []
    for name, params in REQUESTS.items():
        samplers = [started(choice, num_rows, vocab_size, params) for choice in (SamplerChoice(RowSampler), None)]
        best_us = [float("inf")] * 3
        for turn in range(rounds + 1):  # the first warms up
            taken_us = [_argmax_us(logits), *(_draw_us(sampler, logits, turn) for sampler in samplers)]
            if turn:
                best_us = [min(pair) for pair in zip(best_us, taken_us, strict=True)]
        argmax, kernel, by_torch = best_us
        lines.append((name, vocab_size, num_rows, argmax, kernel, by_torch, kernel / argmax, by_torch / kernel))
    return lines


def started(choice: SamplerChoice | None, num_rows: int, vocab_size: int, params: SamplingParams) -> Sampler:
    """A sampler on the CPU, whose slots all ask for the same."""
    sampler = Sampler(num_rows, vocab_size, torch.device("cpu"), choice)
    prompt = tuple(token_id % vocab_size for token_id in PROMPT)
    for slot in range(num_rows):
        sampler.start(SequenceStart(slot, prompt, len(prompt), params, seed=slot, stop_ids=()))
    return sampler


def likely_logits(num_rows: int, vocab_size: int) -> Tensor:
    """As a trained model's: a few tokens stand out: [rows, vocab]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * SPREAD
    likely = torch.randint(vocab_size, (num_rows, LIKELY_TOKENS), generator=generator)
    return logits.scatter_add_(1, likely, torch.randn(likely.shape, generator=generator).abs() * LIKELY_SPREAD)


def _argmax_us(logits: Tensor) -> float:
    started_s = time.perf_counter()
    logits.argmax(-1)
    return 1e6 * (time.perf_counter() - started_s)


def _draw_us(sampler: Sampler, logits: Tensor, turn: int) -> float:
    slots, positions = np.arange(len(logits)), np.full(len(logits), len(PROMPT) + turn)
    started_s = time.perf_counter()
    sampler.sample(logits, slots, positions)
    return 1e6 * (time.perf_counter() - started_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, metavar="N", default=list(ROWS))
    parser.add_argument("--vocabularies", nargs="+", type=int, metavar="N", default=list(VOCABULARIES))
    parser.add_argument("--threads", type=int, metavar="N", help="default: torch's")
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/sampling.json")
    arguments = parser.parse_args(argv)
    before, tables = torch.get_num_threads(), []
    try:
        torch.set_num_threads(arguments.threads or before)
        config = {"threads": torch.get_num_threads(), "spread": SPREAD, "flat_spread": FLAT_SPREAD}
        with torch.inference_mode():
            for kind in ("peaked", "flat"):
                lines = [
                    line
                    for vocab_size in arguments.vocabularies
                    for num_rows in arguments.rows
                    for line in measure(kind, vocab_size, num_rows, QUICK_ROUNDS if arguments.quick else ROUNDS)
                ]
                tables.append(Table(f"Drawing a step's tokens, {kind} logits", COLUMNS, tuple(lines)))
    finally:
        torch.set_num_threads(before)
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "sampling.json")
    if path is not None:
        write_result(path, "sampling", command_line("python -m bench.sampling", argv), tables, config)
        print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
