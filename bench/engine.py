"""The engine without HTTP: `python -m bench.engine --model DIR`. Prefill and decode speed, as shares of the limits.

Requests go through core.engine.Engine and the model's runner, in this process, one thread. The machine's ceilings are
measured in the same run, after the engine: its peak memory is then its own. A share of 1 would be a step in which
nothing is done but reading each weight, key and value once, or multiplying at the ceiling, whichever takes longer.
What can be read changes by the minute where neighbours share the memory: it is measured beside each decode.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bench.kit import Flag, Found, run_bench
from bench.limits import (
    ModelWork,
    Speed,
    decode_limit_s,
    limit_tables,
    measure_limits,
    prefill_limit_s,
    work_of,
)
from bench.results import Cell, Plot, Table
from bench.stepped import MODEL_FLAGS, WARM_STEPS, Streams, model_config, open_model, shown_model
from core.config import BLOCK_SIZE, QUANTIZE_SCHEMES, ModelConfig
from gpu.device import MIN_PROBE_BYTES, num_physical_cores
from gpu.memory_plan import weights_size_bytes
from gpu.runner import ModelRunner

MIB = 1024**2
PROBE_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Cases:
    """What to measure. Decode: every batch with every context, as far as max_tokens over the batch allows."""

    prompts: Sequence[int] = (128, 512, 4096)  # tokens
    batches: Sequence[int] = (1, 4, 8, 16, 32)
    contexts: Sequence[int] = (128, 1024, 4096, 8192)  # tokens, of each sequence
    num_steps: int = 24
    num_repeats: int = 3
    max_tokens: int = 32_768  # over all sequences of one case: their prompts are computed first

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(batch, context) pairs."""
        pairs = itertools.product(self.batches, self.contexts)
        return [(batch, context) for batch, context in pairs if batch * context <= self.max_tokens]

    @property
    def num_kv_tokens(self) -> int:
        """Room for the largest case, its output and partly filled blocks included."""
        per_row = self.num_steps + WARM_STEPS + 2 * BLOCK_SIZE
        cases = [(1, prompt) for prompt in self.prompts] + self.decodes
        return max(batch * (context + per_row) for batch, context in cases)

    @property
    def max_model_len(self) -> int:
        longest = max([*self.prompts, *(context for _, context in self.decodes)])
        return longest + self.num_steps + WARM_STEPS + 2


class PrefillRun(msgspec.Struct, frozen=True):
    """One prompt alone, from its submission to its first token; the median of the repeats."""

    num_tokens: int
    seconds: float


class DecodeRun(msgspec.Struct, frozen=True):
    """Steps in which each row got one token, and nothing else happened.

    Args:
        context: tokens that each row attended to, the mean of the steps.
        step_s: the median.
        read_bytes_per_s: what the machine could read right before or after; None: it was not measured.
    """

    num_rows: int
    context: float
    step_s: float
    read_bytes_per_s: float | None = None


class MemoryRun(msgspec.Struct, frozen=True):
    """Bytes: what the plan said, and what the process had.

    Args:
        before: the process with torch imported, nothing loaded.
        peak: resident at most; Linux counts the files that were mapped while loading, too.
        anonymous: after all steps, without any file's pages.
    """

    weights: int
    kv: int
    activations: int
    before: int
    peak: int
    anonymous: int


class EngineRuns(msgspec.Struct, frozen=True):
    """All that was measured of one engine.

    Args:
        cost_errors: p50 and p90, over the last steps, of what the step-cost model was off by: shares.
    """

    prefills: tuple[PrefillRun, ...]
    decodes: tuple[DecodeRun, ...]
    memory: MemoryRun
    cost_errors: tuple[float, float] = (0.0, 0.0)


class ReadProbe:
    """How fast memory can be read just now: by all cores, in the form that bench/limits.py mostly finds the fastest."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes  # resident from here on
        self._numbers = torch.ones(size_bytes // 4)
        self._num_threads = num_physical_cores()

    def bytes_per_s(self) -> float:
        """The best round. Torch's threads are changed: each step sets its own."""
        torch.set_num_threads(self._num_threads)
        best_s = float("inf")
        for _ in range(PROBE_ROUNDS):
            started_s = time.perf_counter()
            torch.dot(self._numbers, self._numbers)
            best_s = min(best_s, time.perf_counter() - started_s)
        return self.size_bytes / best_s


def memory_bytes(line: str) -> int:
    """A line of this process's status, e.g. "VmHWM", the most that was ever resident (proc(5))."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{line}:"):
            return int(text.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {line}")


def measure(runner: ModelRunner, cases: Cases, probe: ReadProbe, before: int) -> EngineRuns:
    """
    Args:
        before: bytes that the process had before anything but the probe was loaded.
    """
    streams = Streams(runner)
    prefills, decodes = [], []
    for num_tokens in cases.prompts:
        seconds = statistics.median(streams.prefill_s(num_tokens) for _ in range(cases.num_repeats))
        prefills.append(PrefillRun(num_tokens, seconds))
        print(f"prefill {num_tokens}: {num_tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    for num_rows, context in cases.decodes:
        read_before = probe.bytes_per_s()
        step_s, mean_context = streams.decode_s(num_rows, context, cases.num_steps)
        decodes.append(DecodeRun(num_rows, mean_context, step_s, max(read_before, probe.bytes_per_s())))
        print(f"decode {num_rows} x {context}: {num_rows / step_s:,.1f} tokens/s", file=sys.stderr)
    plan, stats = runner.memory, streams.scheduler.stats()
    peak, anonymous = (memory_bytes(line) - probe.size_bytes for line in ("VmHWM", "RssAnon"))
    memory = MemoryRun(plan.weights_bytes, plan.kv_bytes, plan.activation_bytes, before, peak, anonymous)
    return EngineRuns(tuple(prefills), tuple(decodes), memory, (stats.step_cost_error_p50, stats.step_cost_error_p90))


def result_tables(
    runs: EngineRuns, work: ModelWork, speed: Speed, number_bytes: int, layer_bytes: float | None = None
) -> list[Table]:
    """Speeds beside their limits, and memory beside its plan.

    Args:
        number_bytes: of a weight, as it is computed with.
        layer_bytes: see ModelWork.bytes_read.
    """
    prefills: list[tuple[Cell, ...]] = []
    for prefill in runs.prefills:
        tokens, limit_s = prefill.num_tokens, prefill_limit_s(work, speed, prefill.num_tokens, number_bytes)
        prefills.append((tokens, tokens / prefill.seconds, tokens / limit_s, limit_s / prefill.seconds))
    decodes: list[tuple[Cell, ...]] = []
    for run in runs.decodes:
        then = Speed(run.read_bytes_per_s or speed.read_bytes_per_s, speed.flops)
        limit_s = decode_limit_s(work, then, run.num_rows, run.context, number_bytes, layer_bytes)
        speeds = (run.num_rows / run.step_s, run.num_rows / limit_s, limit_s / run.step_s)
        decodes.append((run.num_rows, round(run.context), run.step_s * 1e3, then.read_bytes_per_s / 1e9, *speeds))
    memory = runs.memory
    planned = memory.weights + memory.kv
    sizes = {
        "weights": memory.weights,
        "KV": memory.kv,
        "activations at most": memory.activations,
        "before loading": memory.before,
        "peak": memory.peak,
        "peak - weights - KV": memory.peak - planned,
        "end, no files, - both": memory.anonymous - planned,
    }
    errors = tuple(100 * share for share in runs.cost_errors)
    columns = ("batch", "context", "step ms", "read GB/s then", "tokens/s", "limit tokens/s", "share of limit")
    return [
        Table("Prefill of one prompt", ("tokens", "tokens/s", "limit tokens/s", "share of limit"), tuple(prefills)),
        Table("Decode", columns, tuple(decodes), Plot("context", "share of limit", "batch")),
        Table("Step cost, predicted against measured", ("p50 off %", "p90 off %"), (errors,)),
        Table("Memory, MiB", tuple(sizes), (tuple(size / MIB for size in sizes.values()),)),
    ]


def _layer_bytes(config: ModelConfig, work: ModelWork, dtype: torch.dtype, quantize: str | None) -> float:
    """Of a number in the layers' matrices."""
    plain, stored = (weights_size_bytes(config, dtype, scheme, torch.device("cpu")) for scheme in (None, quantize))
    return dtype.itemsize - (plain - stored) / (work.body + work.experts)


def _measure(arguments: argparse.Namespace) -> Found:
    cases = Cases(
        arguments.prompts,
        arguments.batches,
        arguments.contexts,
        num_steps=2 if arguments.quick else Cases().num_steps,
        num_repeats=1 if arguments.quick else Cases().num_repeats,
        max_tokens=arguments.max_tokens,
    )
    before, probe = memory_bytes("VmRSS"), ReadProbe(MIN_PROBE_BYTES)
    config, work = model_config(arguments.model), work_of(arguments.model)
    sizes = {"max_model_len": cases.max_model_len, "max_sequences": max(cases.batches)}
    runner = open_model(arguments, cases.num_kv_tokens, quantize=arguments.quantize, **sizes)
    runs, dtype = measure(runner, cases, probe, before), runner.memory.device.dtype
    limits = measure_limits(dtype=dtype, is_quick=arguments.quick)
    layer_bytes = _layer_bytes(config, work, dtype, arguments.quantize)
    tables = result_tables(runs, work, limits.speed, dtype.itemsize, layer_bytes)
    parts = {"prefill": runs.prefills, "decode": runs.decodes, "memory": runs.memory, "limits": limits}
    return Found(
        tables + limit_tables(limits, has_probes=False),
        shown_model(arguments, runner) | {"quantize": arguments.quantize or "none"},
        {name: msgspec.to_builtins(value) for name, value in parts.items()},
        "-".join(["engine", arguments.model.resolve().name, *([arguments.quantize] if arguments.quantize else [])]),
    )


_SIZES = {"nargs": "+", "type": int}
FLAGS = (
    *MODEL_FLAGS,
    Flag("--quantize", None, "the layers' matrices, as the server does", more={"choices": QUANTIZE_SCHEMES}),
    Flag("--prompts", Cases().prompts, "tokens", (32,), _SIZES),
    Flag("--batches", Cases().batches, "rows", (1, 4), _SIZES),
    Flag("--contexts", Cases().contexts, "tokens", (32,), _SIZES),
    Flag("--max-tokens", Cases().max_tokens, "batch times context at most"),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("engine", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
