"""The engine without HTTP: `python -m bench.engine --model DIR`. Prefill and decode speed, as shares of the limits.

`Streams` is an engine over a loaded model that its owner steps by hand, in this process; it notes when each token came.
Other benches use it, too. The machine's ceilings are measured in the same run, after the engine, so that the engine's
peak memory is its own. A share of 1 would be a step that only reads each weight, key and value once, or multiplies at
the ceiling, whichever takes longer. Where neighbours share the memory, what can be read changes by the minute: it is
measured beside each decode.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from bench.kit import Flag, Found, bench
from bench.limits import ModelWork, Speed, decode_limit_s, limit_tables, measure_limits, prefill_limit_s, work_of
from bench.make_model import draw_tensor
from bench.results import Cell, Plot, Table, table_of
from core.config import BLOCK_SIZE, QUANTIZE_SCHEMES, EngineConfig, ModelConfig
from core.config_json import parse_model_config
from core.engine import Engine
from core.plan import BlockStore, Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import (
    Adapter,
    Cancel,
    FinishReason,
    Message,
    Pause,
    Request,
    Resume,
    SamplingParams,
    StepDelivery,
    Submit,
)
from gpu.cpu_kernels.support import choose_for
from gpu.device import (
    DTYPES,
    MIN_PROBE_BYTES,
    apply_threads,
    free_memory_bytes,
    num_physical_cores,
)
from gpu.kv_cache import bytes_per_token, kv_dtype_of
from gpu.loading import FindOperators, load_runner, warm_up
from gpu.memory_plan import plan_memory, weights_size_bytes
from gpu.parameters import empty_weights
from gpu.runner import ModelRunner
from gpu.tune import find_operators
from server.model_files import parse_config, read_model_config

WARM_STEPS = 2
SPARE_TOKENS = 4  # of each sequence: sampled before it was paused, and in flight at the end

MODEL_FLAGS = (
    Flag("--model", None, "a directory, e.g. of bench.make_model", more={"type": Path, "required": True}),
    Flag("--threads", None, "compute threads (default: as the server chooses)", more={"type": int}),
    Flag("--dtype", "auto", "of weights", more={"choices": ("auto", *DTYPES)}),
)


class ClockedRunner:
    """A runner, and the seconds that its calls take: forward and sample send, collect waits."""

    def __init__(self, runner: Runner[Any]) -> None:
        self._runner = runner
        self.limits: RunnerLimits = runner.limits
        self.send_s = self.wait_s = 0.0

    def forward(self, plan: StepPlan) -> Any:
        started_s = time.perf_counter()
        ticket = self._runner.forward(plan)
        self.send_s += time.perf_counter() - started_s
        return ticket

    def sample(self, ticket: Any, *host_inputs: Any) -> None:
        started_s = time.perf_counter()
        self._runner.sample(ticket, *host_inputs)
        self.send_s += time.perf_counter() - started_s

    def collect(self, ticket: Any) -> StepOutput:
        started_s = time.perf_counter()
        output = self._runner.collect(ticket)
        self.wait_s += time.perf_counter() - started_s
        return output


class Streams:
    """Requests, greedy by default, and when each of their tokens came.

    Args:
        runner: stepped by this engine alone, as long as it counts on what is cached.
        store: host memory, and a directory, for blocks that are evicted.
        scheduling: further arguments of the scheduler.
    """

    def __init__(
        self,
        runner: Runner[Any],
        seed: int = 0,
        store: BlockStore | None = None,
        **scheduling: Any,
    ) -> None:
        self.clocked = ClockedRunner(runner)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.times_s: dict[str, list[float]] = defaultdict(list)
        self.sent_s: dict[str, float] = {}
        self.cached_tokens: dict[str, int] = {}  # of those that have ended
        self.num_open = 0
        self._inbox: deque[Message] = deque()
        self._random, self._vocab_size = Random(seed), runner.limits.vocab_size
        self.scheduler = Scheduler(runner.limits, (), lambda: 0, **{"speculates": False} | scheduling)
        self.engine = Engine(self.scheduler, self.clocked, time.monotonic, self._inbox, self._take, store)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Random, and with no other's beginning."""
        return tuple(self._random.choices(range(self._vocab_size), k=num_tokens))

    def submit(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        temperature: float = 0.0,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        **asked: Any,
    ) -> str:
        """
        Args:
            sampling: further fields of SamplingParams.
            asked: further fields of Request.
        """
        name = str(len(self.sent_s))
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **{"temperature": temperature} | dict(sampling))
        self.sent_s[name] = time.perf_counter()
        self.num_open += 1
        request = Request(request_id=name, prompt_ids=tuple(prompt_ids), sampling=params, arrival_s=time.monotonic())
        self._inbox.append(Submit(msgspec.structs.replace(request, **asked)))
        return name

    def cancel(self, *names: str) -> None:
        self._inbox.extend(Cancel(name, FinishReason.CANCELLED) for name in names)

    def pause(self, names: Sequence[str]) -> None:
        self._inbox.extend(Pause(name) for name in names)

    def resume(self, names: Sequence[str]) -> None:
        self._inbox.extend(Resume(name) for name in names)

    def step(self) -> bool:
        return self.engine.step()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """
        Raises:
            RuntimeError: the engine has nothing more to do before that.
        """
        while not is_done():
            if not self.engine.step() and not is_done():
                raise RuntimeError("the engine stands still, and not all that was waited for has come")

    def run(self) -> None:
        """Until all have ended, and nothing is left to do."""
        self.run_until(lambda: not self.num_open)
        while self.engine.step():
            pass

    def cancel_all(self) -> None:
        self.cancel(*(name for name in self.sent_s if name not in self.cached_tokens))
        self.run()

    def have_all(self, names: Sequence[str], num_tokens: int) -> bool:
        return all(len(self.tokens[name]) >= num_tokens for name in names)

    def ttft_s(self, name: str) -> float:
        return self.times_s[name][0] - self.sent_s[name]

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Of all of them, in one batch."""
        names = [self.submit(prompt, num_tokens) for prompt in prompts]
        self.run()
        return [self.tokens[name] for name in names]

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds from a prompt's submission to its first token, while nothing else runs."""
        name = self.submit(self.prompt(num_tokens), 1)
        self.run()
        return self.ttft_s(name)

    def decode_s(
        self, num_rows: int, context: int, num_steps: int, adapters: Sequence[Adapter | None] = (None,)
    ) -> tuple[float, float]:
        """Compute the prompts, then time so many steps of all rows: the median step, and the mean context of a row.

        Args:
            adapters: that the rows have in turn.

        Raises:
            RuntimeError: a step did not give each row its token, or there was less room than was planned.
        """
        num_preempted = self.scheduler.stats().num_preemptions
        num_tokens = WARM_STEPS + num_steps + SPARE_TOKENS
        turns = itertools.islice(itertools.cycle(adapters), num_rows)
        names = [self.submit(self.prompt(context), num_tokens, adapter=one) for one in turns]
        paused: set[str] = set()  # a sequence with a token is paused until the last one has its own
        while len(paused) < num_rows:
            self.step()
            started = {name for name in names if self.tokens[name]} - paused
            self.pause(sorted(started))
            paused |= started
        while self.step():  # nothing is in flight any more
            pass
        self.resume(names)
        steps_s = []
        for number in range(WARM_STEPS + num_steps):
            num_before, started_s = self._num_tokens(names), time.perf_counter()
            self.step()
            if number >= WARM_STEPS:
                steps_s.append(time.perf_counter() - started_s)
            if (num_new := self._num_tokens(names) - num_before) != num_rows:
                raise RuntimeError(f"a step gave {num_new} tokens instead of {num_rows}")
        self.cancel_all()
        if self.scheduler.stats().num_preemptions != num_preempted:
            raise RuntimeError("a sequence lost its blocks: there is less room than this bench has planned")
        return statistics.median(steps_s), context + 1 + WARM_STEPS + (num_steps - 1) / 2

    def _num_tokens(self, names: Sequence[str]) -> int:
        return sum(len(self.tokens[name]) for name in names)

    def _take(self, delivery: StepDelivery) -> None:
        now_s = time.perf_counter()
        for name, token_id in zip(delivery.request_ids, delivery.token_ids, strict=True):
            self.tokens[name].append(token_id)
            self.times_s[name].append(now_s)
        for chunk in delivery.chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id} failed: {chunk.error}")
            if chunk.usage is not None:
                self.cached_tokens[chunk.request_id] = chunk.usage.num_cached_tokens
                self.num_open -= 1


def model_config(path: Path) -> ModelConfig:
    """Of a Hugging Face directory or GGUF file.

    Raises:
        StartupError: there is no model.
    """
    return parse_config(path, read_model_config(path))


def open_model(arguments: argparse.Namespace, num_kv_tokens: int, **engine: Any) -> ModelRunner:
    """The model of MODEL_FLAGS, with room for so many tokens.

    Args:
        engine: further fields of EngineConfig.

    Raises:
        StartupError: as load_runner.
    """
    config = model_config(arguments.model)
    engine |= {"device": "cpu", "dtype": arguments.dtype, "threads": arguments.threads}
    asked = EngineConfig(**engine)
    token_bytes = bytes_per_token(config, kv_dtype_of(config, asked, choose_for(config, asked)))
    engine["max_model_len"] = min(engine["max_model_len"], config.max_position)
    memory_bytes = (num_kv_tokens + BLOCK_SIZE) * token_bytes
    return load_runner(arguments.model, config, EngineConfig(**engine, kv_memory_bytes=memory_bytes), lambda *_: None)


def shown_model(arguments: argparse.Namespace, runner: ModelRunner) -> dict[str, Any]:
    """For the result file."""
    device = runner.memory.device
    return {"model": arguments.model.resolve().name, "dtype": device.dtype_name, "threads": device.threads}


def random_runner(
    config: Mapping[str, Any],
    engine: EngineConfig,
    find: FindOperators = find_operators,
    drawn_as: torch.dtype | None = None,
) -> ModelRunner:
    """A runner over a model of this config.json with random weights, ready to step. Sets torch's threads.

    Args:
        find: the operators it computes with.
        drawn_as: the format that the weights are drawn in; None: the one they are served in.

    Raises:
        StartupError: the device or its memory.
    """
    model = parse_model_config(dict(config))
    choice = choose_for(model, engine)
    apply_threads(choice)
    size_bytes = model.num_parameters * choice.dtype.itemsize
    memory = plan_memory(model, engine, choice, size_bytes, free_memory_bytes(choice.device))
    operators = find(model, choice)
    with torch.inference_mode():
        weights, targets = empty_weights(model, choice.dtype, choice.device)
        for name, target in targets.items():
            target.fill(draw_tensor(name, target.shape, drawn_as or choice.dtype, choice.device).to(choice.dtype))
    runner = ModelRunner(model, engine, memory, weights, operators)
    warm_up(runner)
    runner.open_graphs(lambda done, total: None)
    return runner


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


class ReadProbe:
    """How fast all cores can read memory just now, in the form that bench/limits.py mostly finds the fastest."""

    def __init__(self) -> None:
        self._numbers = torch.ones(MIN_PROBE_BYTES // 4)  # resident from here on
        self._num_threads = num_physical_cores()

    def bytes_per_s(self) -> float:
        """The best round. Torch's threads are changed: each step sets its own."""
        torch.set_num_threads(self._num_threads)
        best_s = float("inf")
        for _ in range(PROBE_ROUNDS):
            started_s = time.perf_counter()
            torch.dot(self._numbers, self._numbers)
            best_s = min(best_s, time.perf_counter() - started_s)
        return self._numbers.nbytes / best_s


class DecodeRun(msgspec.Struct, frozen=True):
    """Steps in which each row got one token, and nothing else happened.

    Args:
        context: tokens that each row attended to, the mean of the steps.
        step_s: the median.
        read_bytes_per_s: what the machine could read right before or after.
    """

    num_rows: int
    context: float
    step_s: float
    read_bytes_per_s: float


def status_bytes(line: str) -> int:
    """A line of this process's status, e.g. "VmHWM", the most that was ever resident (proc(5))."""
    text = Path("/proc/self/status").read_text().partition(f"\n{line}:")[2]
    return int(text.split()[0]) * 1024


def measure_prefills(streams: Streams, cases: Cases) -> dict[int, float]:
    """By the prompt's tokens: seconds from its submission to its first token, the median of the repeats."""
    return {
        num_tokens: statistics.median(streams.prefill_s(num_tokens) for _ in range(cases.num_repeats))
        for num_tokens in cases.prompts
    }


def measure_decodes(streams: Streams, cases: Cases, probe: ReadProbe) -> list[DecodeRun]:
    runs = []
    for num_rows, context in cases.decodes:
        read_before = probe.bytes_per_s()
        step_s, mean_context = streams.decode_s(num_rows, context, cases.num_steps)
        runs.append(DecodeRun(num_rows, mean_context, step_s, max(read_before, probe.bytes_per_s())))
        print(f"decode {num_rows} x {context}: {num_rows / step_s:,.1f} tokens/s", file=sys.stderr)
    return runs


def speed_tables(
    prefills: Mapping[int, float],
    decodes: Sequence[DecodeRun],
    work: ModelWork,
    speed: Speed,
    number_bytes: int,
    layer_bytes: float | None = None,
) -> list[Table]:
    """Speeds beside their limits.

    Args:
        number_bytes: of a weight, as it is computed with.
        layer_bytes: see ModelWork.bytes_read.
    """
    prefill_rows: list[dict[str, Cell]] = []
    for num_tokens, seconds in prefills.items():
        limit_s = prefill_limit_s(work, speed, num_tokens, number_bytes)
        rates = {"tokens/s": num_tokens / seconds, "limit tokens/s": num_tokens / limit_s}
        prefill_rows.append({"tokens": num_tokens, **rates, "share of limit": limit_s / seconds})
    decode_rows: list[dict[str, Cell]] = []
    for run in decodes:
        then = Speed(run.read_bytes_per_s, speed.flops)
        limit_s = decode_limit_s(work, then, run.num_rows, run.context, number_bytes, layer_bytes)
        cells = {"step ms": run.step_s * 1e3, "read GB/s then": run.read_bytes_per_s / 1e9}
        cells |= {"tokens/s": run.num_rows / run.step_s, "limit tokens/s": run.num_rows / limit_s}
        size: dict[str, Cell] = {"batch": run.num_rows, "context": round(run.context)}
        decode_rows.append(size | cells | {"share of limit": limit_s / run.step_s})
    plot = Plot("context", "share of limit", "batch")
    return [table_of("Prefill of one prompt", prefill_rows), table_of("Decode", decode_rows, plot)]


def _measure(arguments: argparse.Namespace) -> Found:
    cases = Cases(arguments.prompts, arguments.batches, arguments.contexts, max_tokens=arguments.max_tokens)
    if arguments.quick:
        cases = replace(cases, num_steps=2, num_repeats=1)
    probe, before = ReadProbe(), status_bytes("VmRSS")
    config, work = model_config(arguments.model), work_of(arguments.model)
    sizes = {"max_model_len": cases.max_model_len, "max_sequences": max(cases.batches)}
    asked = {"quantize": arguments.quantize, "kv_dtype": arguments.kv_dtype}
    runner = open_model(arguments, cases.num_kv_tokens, **asked, **sizes)
    streams, plan = Streams(runner), runner.memory
    work = replace(work, kv_width=plan.kv_bytes_per_token // plan.device.dtype.itemsize)
    prefills, decodes = measure_prefills(streams, cases), measure_decodes(streams, cases, probe)
    stats, peak, end = streams.scheduler.stats(), status_bytes("VmHWM"), status_bytes("RssAnon")
    held = before + plan.weights_bytes + plan.kv_bytes  # Linux counts the files that are mapped while loading, too
    memory = {"weights": plan.weights_bytes, "KV": plan.kv_bytes, "activations at most": plan.activation_bytes}
    memory |= {"peak beside weights and KV": peak - held, "end, without files": end - held}
    dtype = plan.device.dtype
    limits = measure_limits(dtype=dtype, is_quick=arguments.quick)
    settings = replace(plan.engine, quantize=None), plan.engine
    plain, stored = (weights_size_bytes(config, engine, plan.device) for engine in settings)
    layer_bytes = dtype.itemsize - (plain - stored) / (work.body + work.experts)
    errors: dict[str, Cell] = {
        "p50 off %": 100 * stats.step_cost_error_p50,
        "p90 off %": 100 * stats.step_cost_error_p90,
    }
    return Found(
        [
            *speed_tables(prefills, decodes, work, limits.speed, dtype.itemsize, layer_bytes),
            table_of("Step cost, predicted against measured", [errors]),
            table_of("Memory, MiB", [{name: size / MIB for name, size in memory.items()}]),
            *limit_tables(limits)[:1],
        ],
        shown_model(arguments, runner) | {"quantize": arguments.quantize or "none", "KV": arguments.kv_dtype},
        {"prefill": prefills, "decode": msgspec.to_builtins(decodes), "limits": msgspec.to_builtins(limits)},
        "-".join(["engine", arguments.model.resolve().name, *([arguments.quantize] if arguments.quantize else [])])
        + ("" if arguments.kv_dtype == "auto" else f"-kv-{arguments.kv_dtype}"),
    )


_SIZES = {"nargs": "+", "type": int}
FLAGS = (
    *MODEL_FLAGS,
    Flag("--quantize", None, "the layers' matrices, as the server does", more={"choices": QUANTIZE_SCHEMES}),
    Flag("--kv-dtype", "auto", "of keys and values, as the server does", more={"choices": ("auto", "int8")}),
    Flag("--prompts", Cases().prompts, "tokens", (32,), _SIZES),
    Flag("--batches", Cases().batches, "rows", (1, 4), _SIZES),
    Flag("--contexts", Cases().contexts, "tokens", (32,), _SIZES),
    Flag("--max-tokens", Cases().max_tokens, "batch times context at most"),
)
main = bench("engine", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
