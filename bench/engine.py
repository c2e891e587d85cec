"""The engine without HTTP: `python -m bench.engine --model DIR`. Prefill and decode speed, as shares of the limits.

Requests go through core.engine.Engine and the model's runner, in this process, one thread. The machine's ceilings are
measured in the same run, after the engine: its peak memory is then its own. A share of 1 would be a step in which
nothing is done but reading each weight, key and value once, or multiplying at the ceiling, whichever takes longer.
What can be read changes by the minute where neighbours share the memory: it is measured beside each decode.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.engine_runs import DecodeRun, EngineRuns, MemoryRun, PrefillRun, result_tables
from bench.limits import Limits, limit_tables, measure_limits
from bench.results import RESULTS_DIR, command_line, print_tables, write_result
from bench.work import ModelWork, Speed, work_of
from core.config import BLOCK_SIZE, QUANTIZE_SCHEMES, EngineConfig, ModelConfig, parse_model_config
from core.engine import Engine
from core.errors import StartupError
from core.scheduler import Scheduler
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, SamplingParams, StepDelivery, Submit
from gpu.device import DTYPES, MIN_PROBE_BYTES, choose_device, num_physical_cores
from gpu.kv_cache import bytes_per_token
from gpu.loading import load_runner
from gpu.memory_plan import MemoryPlan, weights_size_bytes
from gpu.runner import ModelRunner

CPU = torch.device("cpu")
PROMPTS = (128, 512, 4096)  # tokens
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (128, 1024, 4096, 8192)  # tokens, of each sequence
MAX_CASE_TOKENS = 32_768  # over all sequences of one case: their prompts are computed first
PREFILL_REPEATS = 3
DECODE_STEPS = 24
WARM_STEPS = 2
SPARE_TOKENS = 4  # of each sequence: drawn before it was paused, and in flight at the end
QUICK_PROMPTS, QUICK_BATCHES, QUICK_CONTEXTS, QUICK_STEPS = (32,), (1, 4), (32,), 2


@dataclass(frozen=True, slots=True)
class Cases:
    """What to measure. Decode: every batch with every context, as far as max_tokens over the batch allows."""

    prompts: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    num_steps: int
    num_repeats: int
    max_tokens: int = MAX_CASE_TOKENS

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(batch, context) pairs."""
        return [
            (batch, context)
            for batch, context in itertools.product(self.batches, self.contexts)
            if batch * context <= self.max_tokens
        ]

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


class ReadProbe:
    """How fast memory can be read just now: by all cores, in the form that bench/limits.py mostly finds the fastest."""

    ROUNDS = 4

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes  # resident from here on
        self._numbers = torch.ones(size_bytes // 4)
        self._num_threads = num_physical_cores()

    def bytes_per_s(self) -> float:
        """The best round. Torch's threads are changed: each step sets its own."""
        torch.set_num_threads(self._num_threads)
        best_s = float("inf")
        for _ in range(self.ROUNDS):
            started_s = time.perf_counter()
            torch.dot(self._numbers, self._numbers)
            best_s = min(best_s, time.perf_counter() - started_s)
        return self.size_bytes / best_s


class EngineBench:
    """An engine over a model, stepped by hand."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self._inbox: deque[Message] = deque()
        self._started: set[str] = set()  # requests that have a token
        self._num_new_tokens = 0  # of the last step
        self._random = random.Random(seed)
        self._vocab_size = runner.limits.vocab_size
        self._num_requests = 0
        self._scheduler = Scheduler(runner.limits, (), lambda: 0)
        self._engine = Engine(self._scheduler, runner, time.monotonic, self._inbox, self._take)

    @property
    def cost_errors(self) -> tuple[float, float]:
        stats = self._scheduler.stats()
        return stats.step_cost_error_p50, stats.step_cost_error_p90

    def prefill(self, num_tokens: int) -> float:
        """Seconds from a prompt's submission to its first token."""
        started_s = time.perf_counter()
        name = self._submit(num_tokens, 1)
        while name not in self._started:
            self._engine.step()
        seconds = time.perf_counter() - started_s
        self._settle()
        return seconds

    def decode(self, num_rows: int, context: int, num_steps: int) -> DecodeRun:
        """Compute the prompts, then time so many steps of all rows."""
        names = [self._submit(context, WARM_STEPS + num_steps + SPARE_TOKENS) for _ in range(num_rows)]
        self._start_all(names)
        times_s = []
        for number in range(WARM_STEPS + num_steps):
            started_s = time.perf_counter()
            self._engine.step()
            if number >= WARM_STEPS:
                times_s.append(time.perf_counter() - started_s)
            if self._num_new_tokens != num_rows:
                raise RuntimeError(f"a step gave {self._num_new_tokens} tokens instead of {num_rows}")
        self._inbox.extend(Cancel(name, FinishReason.CANCELLED) for name in names)
        self._settle()
        mean_context = context + 1 + WARM_STEPS + (num_steps - 1) / 2
        return DecodeRun(num_rows, mean_context, statistics.median(times_s))

    def _start_all(self, names: Sequence[str]) -> None:
        """Step until each has one token: who has it is paused until the last one has, and nothing is in flight."""
        paused: set[str] = set()
        while len(paused) < len(names):
            self._engine.step()
            self._inbox.extend(Pause(name) for name in self._started - paused)
            paused |= self._started
        while self._engine.step():
            pass
        self._inbox.extend(Resume(name) for name in names)

    def _submit(self, num_prompt: int, max_tokens: int) -> str:
        """A greedy request over random tokens: no two prompts have a prefix in common."""
        name = str(self._num_requests)
        self._num_requests += 1
        prompt_ids = tuple(self._random.choices(range(self._vocab_size), k=num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(request_id=name, prompt_ids=prompt_ids, sampling=sampling, arrival_s=time.monotonic())
        self._inbox.append(Submit(request))
        return name

    def _take(self, delivery: StepDelivery) -> None:
        self._num_new_tokens = len(delivery.token_ids)
        self._started.update(delivery.request_ids)
        if delivery.stats.num_preemptions:
            raise RuntimeError("a sequence lost its blocks: there is less room than this bench has planned")
        for chunk in delivery.chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id} failed: {chunk.error}")

    def _settle(self) -> None:
        while self._engine.step():
            pass
        self._started.clear()


def open_engine(
    directory: Path, config: ModelConfig, cases: Cases, dtype: str, threads: int | None, quantize: str | None = None
) -> ModelRunner:
    """Load the model with room for the largest case, and no more.

    Raises:
        StartupError: as load_runner.
    """
    engine = EngineConfig(device="cpu", dtype=dtype, threads=threads)
    kv_bytes = (cases.num_kv_tokens + BLOCK_SIZE) * bytes_per_token(config, choose_device(engine).dtype)
    engine = EngineConfig(
        device="cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=cases.max_model_len,
        max_sequences=max(cases.batches),
        kv_memory_bytes=kv_bytes,
        quantize=quantize,
    )
    return load_runner(directory, config, engine, lambda done, total: None)


def memory_bytes(line: str) -> int:
    """A line of this process's status, e.g. "VmHWM", the most that was ever resident (proc(5))."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{line}:"):
            return int(text.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {line}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="e.g. of bench.make_model")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: as the server chooses)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--quantize", choices=QUANTIZE_SCHEMES, help="the layers' matrices, as the server does")
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, metavar="TOKENS")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, metavar="ROWS")
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS, metavar="TOKENS")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_CASE_TOKENS, help="batch times context at most (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/engine-MODEL.json")
    return parser


def _cases_of(arguments: argparse.Namespace) -> Cases:
    if arguments.quick:
        return Cases(QUICK_PROMPTS, QUICK_BATCHES, QUICK_CONTEXTS, QUICK_STEPS, 1)
    return Cases(
        arguments.prompts, arguments.batches, arguments.contexts, DECODE_STEPS, PREFILL_REPEATS, arguments.max_tokens
    )


def _measure(runner: ModelRunner, cases: Cases, probe: ReadProbe, before: int) -> EngineRuns:
    """
    Args:
        before: bytes that the process had before anything but the probe was loaded.
    """
    bench = EngineBench(runner)
    prefills = []
    for num_tokens in cases.prompts:
        seconds = statistics.median(bench.prefill(num_tokens) for _ in range(cases.num_repeats))
        prefills.append(PrefillRun(num_tokens, seconds))
        print(f"prefill {num_tokens}: {num_tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    decodes = []
    for num_rows, context in cases.decodes:
        read_before = probe.bytes_per_s()
        run = bench.decode(num_rows, context, cases.num_steps)
        run = msgspec.structs.replace(run, read_bytes_per_s=max(read_before, probe.bytes_per_s()))
        decodes.append(run)
        print(f"decode {num_rows} x {context}: {num_rows / run.step_s:,.1f} tokens/s", file=sys.stderr)
    memory = _memory_of(runner.memory, before, probe.size_bytes)
    return EngineRuns(tuple(prefills), tuple(decodes), memory, bench.cost_errors)


def _memory_of(plan: MemoryPlan, before: int, probe_bytes: int) -> MemoryRun:
    """The process's memory, without the probe's."""
    peak, anonymous = memory_bytes("VmHWM") - probe_bytes, memory_bytes("RssAnon") - probe_bytes
    return MemoryRun(plan.weights_bytes, plan.kv_bytes, plan.activation_bytes, before, peak, anonymous)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 2 when the model cannot be loaded."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    directory: Path = arguments.model
    cases = _cases_of(arguments)
    before = memory_bytes("VmRSS")
    probe = ReadProbe(MIN_PROBE_BYTES)
    try:
        config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
        work = work_of(directory)
        runner = open_engine(directory, config, cases, arguments.dtype, arguments.threads, arguments.quantize)
    except StartupError as error:
        print(f"bench.engine: {error.cause}\nFix: {error.fix}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(
            f"bench.engine: {error}\nFix: name a model directory; python -m bench.make_model makes one", file=sys.stderr
        )
        return 2
    device = runner.memory.device
    runs = _measure(runner, cases, probe, before)
    limits = measure_limits(dtype=device.dtype, is_quick=arguments.quick)
    speed = Speed(limits.read_bytes_per_s, limits.flops)
    layer_bytes = _layer_bytes(config, work, device.dtype, arguments.quantize)
    tables = result_tables(runs, work, speed, device.dtype.itemsize, layer_bytes)
    tables += limit_tables(limits, has_probes=False)
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / f"engine-{_name(arguments)}.json")
    if path is not None:
        shown = {
            "model": directory.resolve().name,
            "dtype": device.dtype_name,
            "quantize": arguments.quantize or "none",
            "threads": device.threads,
        }
        details = _details(runs, limits)
        write_result(path, "engine", command_line("python -m bench.engine", argv), tables, shown, details)
        print(f"written to {path}")
    return 0


def _details(runs: EngineRuns, limits: Limits) -> dict[str, Any]:
    parts = {"prefill": runs.prefills, "decode": runs.decodes, "memory": runs.memory, "limits": limits}
    return {name: msgspec.to_builtins(value) for name, value in parts.items()}


def _name(arguments: argparse.Namespace) -> str:
    name: str = arguments.model.resolve().name
    return name if arguments.quantize is None else f"{name}-{arguments.quantize}"


def _layer_bytes(config: ModelConfig, work: ModelWork, dtype: torch.dtype, quantize: str | None) -> float:
    """Of a number in the layers' matrices."""
    plain, stored = (weights_size_bytes(config, dtype, scheme, CPU) for scheme in (None, quantize))
    saved = plain - stored
    return dtype.itemsize - saved / (work.body + work.experts)


if __name__ == "__main__":
    sys.exit(main())
