"""What bench/engine.py measures of an engine, and its tables: speeds beside their limits, memory beside its plan."""

import msgspec

from bench.results import Plot, Table
from bench.work import ModelWork, Speed, decode_limit_s, prefill_limit_s

MIB = 1024**2


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
        peak: resident at most; Linux counts the files that were mapped while loading, too.
        anonymous: after all steps, without any file's pages.
    """

    weights: int
    kv: int
    activations: int
    before: int  # the process with torch imported, nothing loaded
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


def result_tables(
    runs: EngineRuns, work: ModelWork, speed: Speed, number_bytes: int, layer_bytes: float | None = None
) -> list[Table]:
    """Speeds beside their limits, and memory beside its plan.

    Args:
        number_bytes: of a weight, as it is computed with.
        layer_bytes: see ModelWork.bytes_read.
    """
    prefills = []
    for prefill in runs.prefills:
        limit_s = prefill_limit_s(work, speed, prefill.num_tokens, number_bytes)
        tokens = prefill.num_tokens
        prefills.append((tokens, tokens / prefill.seconds, tokens / limit_s, limit_s / prefill.seconds))
    decodes = []
    for run in runs.decodes:
        then = Speed(run.read_bytes_per_s or speed.read_bytes_per_s, speed.flops)
        limit_s = decode_limit_s(work, then, run.num_rows, run.context, number_bytes, layer_bytes)
        speeds = (run.num_rows / run.step_s, run.num_rows / limit_s, limit_s / run.step_s)
        read = then.read_bytes_per_s / 1e9
        decodes.append((run.num_rows, round(run.context), run.step_s * 1e3, read, *speeds))
    columns = ("batch", "context", "step ms", "read GB/s then", "tokens/s", "limit tokens/s", "share of limit")
    return [
        Table("Prefill of one prompt", ("tokens", "tokens/s", "limit tokens/s", "share of limit"), tuple(prefills)),
        Table("Decode", columns, tuple(decodes), Plot("context", "share of limit", "batch")),
        Table("Step cost, predicted against measured", ("p50 off %", "p90 off %"), (_percent(runs.cost_errors),)),
        _memory_table(runs.memory),
    ]


def _percent(shares: tuple[float, float]) -> tuple[float, float]:
    return 100 * shares[0], 100 * shares[1]


def _memory_table(memory: MemoryRun) -> Table:
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
    return Table("Memory, MiB", tuple(sizes), (tuple(size / MIB for size in sizes.values()),))
