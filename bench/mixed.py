"""Long prompts among running streams: `python -m bench.mixed --model DIR`. What the streams notice, what the prompt.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. Each policy has its own
scheduler over the same runner; prompts are random, so that no cache helps. Prefill first is what small engines do: who
decodes is paused until the prompt is done.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
from core.config import BLOCK_SIZE, INTER_TOKEN_TARGET, EngineConfig, parse_model_config
from core.engine import Engine
from core.errors import StartupError
from core.plan import StepOutput, StepPlan
from core.scheduler import Scheduler
from core.step_cost import StepWork
from core.types import Cancel, FinishReason, Message, Pause, Request, Resume, SamplingParams, StepDelivery, Submit
from gpu.device import DTYPES, choose_device
from gpu.kv_cache import bytes_per_token
from gpu.loading import load_runner
from gpu.runner import ModelRunner, StepTicket

LONG_PROMPT = 4096  # tokens
NUM_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Policy:
    """How prompts are let in.

    Args:
        chunk: tokens of a step; None: whole prompts fit.
    """

    name: str
    chunk: int | None
    inter_token_target: float | None = None
    pauses_streams: bool = False


POLICIES = (
    Policy("sized by step cost", 512, INTER_TOKEN_TARGET),
    Policy("chunks of 512", 512),
    Policy("chunking off", None),
    Policy("prefill first", None, pauses_streams=True),
)


@dataclass(frozen=True, slots=True)
class Cases:
    """What to measure. Counts are of tokens, unless they say otherwise.

    Args:
        num_prompts: long ones, one after the other, while the streams run; one more before is measured apart.
        num_quiet_steps: before each of them, and after it.
    """

    num_streams: int = 8
    stream_prompt: int = 256
    long_prompt: int = LONG_PROMPT
    num_prompts: int = NUM_PROMPTS
    num_quiet_steps: int = 40
    num_alone: int = 3

    @property
    def max_model_len(self) -> int:
        return self.long_prompt + self.stream_prompt + 4096


QUICK = Cases(num_streams=2, stream_prompt=32, long_prompt=96, num_prompts=1, num_quiet_steps=4, num_alone=1)


@dataclass(slots=True)
class Run:
    """What one policy gave. Seconds.

    Args:
        quiet_gaps_s: between two tokens of a stream, without a long prompt: what the machine does to steps shows there.
        gaps_s: the same with one.
        first_gaps_s: likewise, with the first prompt of a scheduler's life.
        net_s: of each prompt: its steps, less what their decodes alone would have taken, as predicted.
        error_p90: of the step-cost model, over the last steps.
    """

    quiet_gaps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    net_s: list[float] = field(default_factory=list)
    error_p90: float = 0.0


class MixedBench:
    """Streams and prompts over one scheduler, stepped by hand."""

    def __init__(self, runner: ModelRunner, policy: Policy, cases: Cases, rng: random.Random) -> None:
        self._policy, self._cases, self._rng = policy, cases, rng
        self._runner = runner
        self._inbox: deque[Message] = deque()
        self._last_s: dict[str, float] = {}  # when a request's last token came
        self._gaps_s: list[float] = []
        self._num_requests = 0
        limits = replace(runner.limits, max_batch_tokens=policy.chunk or runner.limits.max_batch_tokens)
        self._scheduler = Scheduler(limits, (), lambda: 0, False, policy.inter_token_target)
        self._recorder = _Recorder(runner)
        self._engine = Engine(self._scheduler, self._recorder, time.perf_counter, self._inbox, self._take)

    def alone(self) -> float:
        """Seconds from a long prompt's submission to its first token, while nothing else runs."""
        started_s = time.perf_counter()
        name = self._submit(self._cases.long_prompt, 1)
        while name not in self._last_s:
            self._engine.step()
        return time.perf_counter() - started_s

    def run(self) -> Run:
        cases, result = self._cases, Run()
        streams = [self._submit(cases.stream_prompt, 4000) for _ in range(cases.num_streams)]
        self._step_until(streams)
        result.quiet_gaps_s += self._quiet_steps()
        self._prompt(streams)
        result.first_gaps_s = self._taken_gaps()
        self._learn()
        for _ in range(cases.num_prompts):
            result.quiet_gaps_s += self._quiet_steps()
            ttft_s, net_s = self._prompt(streams)
            result.gaps_s += self._taken_gaps()
            result.quiet_gaps_s += self._quiet_steps()
            result.ttfts_s.append(ttft_s)
            result.net_s.append(net_s)
        result.error_p90 = self._scheduler.step_cost.error_p90
        self._inbox.extend(Cancel(name, FinishReason.CANCELLED) for name in streams)
        while self._engine.step():
            pass
        return result

    def _learn(self) -> None:
        """Short prompts among the streams, until the step-cost model predicts."""
        while not self._scheduler.step_cost.is_ready:
            self._step_until([self._submit(self._rng.randint(8, 64), 1)])
            self._engine.step()

    def _quiet_steps(self) -> list[float]:
        self._taken_gaps()
        for _ in range(self._cases.num_quiet_steps):
            self._engine.step()
        return self._taken_gaps()[self._cases.num_streams :]  # the first step's began before

    def _prompt(self, streams: Sequence[str]) -> tuple[float, float]:
        """A long prompt to its first token, and every stream one token further: (seconds to it, net seconds)."""
        started_s, net_s = time.perf_counter(), 0.0
        name = self._submit(self._cases.long_prompt, 1)
        if self._policy.pauses_streams:
            self._inbox.extend(Pause(stream) for stream in streams)
        while name not in self._last_s:
            before_s = time.perf_counter()
            self._engine.step()
            net_s += time.perf_counter() - before_s - self._scheduler.step_cost.predict(self._recorder.decodes)
        ttft_s = self._last_s[name] - started_s
        self._inbox.extend(Resume(stream) for stream in streams)
        self._engine.step()
        return ttft_s, net_s

    def _step_until(self, names: Sequence[str]) -> None:
        while not self._last_s.keys() >= set(names):
            self._engine.step()

    def _submit(self, num_prompt: int, max_tokens: int) -> str:
        name = str(self._num_requests)
        self._num_requests += 1
        ids = tuple(self._rng.choices(range(self._runner.limits.vocab_size), k=num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._inbox.append(Submit(Request(request_id=name, prompt_ids=ids, sampling=sampling, arrival_s=0.0)))
        return name

    def _take(self, delivery: StepDelivery) -> None:
        now = time.perf_counter()
        for name in delivery.request_ids:
            if name in self._last_s:
                self._gaps_s.append(now - self._last_s[name])
            self._last_s[name] = now
        for chunk in delivery.chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id} failed: {chunk.error}")

    def _taken_gaps(self) -> list[float]:
        gaps_s, self._gaps_s = self._gaps_s, []
        return gaps_s


class _Recorder:
    """A runner that remembers what the last step's decodes were."""

    def __init__(self, runner: ModelRunner) -> None:
        self.limits = runner.limits
        self.decodes = StepWork()
        self._runner = runner

    def forward(self, plan: StepPlan) -> StepTicket:
        starts = plan.starts[plan.lengths == 1]
        self.decodes = StepWork(own_tokens=len(starts), own_kv=int(starts.sum()) + len(starts))
        return self._runner.forward(plan)

    def sample(self, ticket: StepTicket) -> None:
        self._runner.sample(ticket)

    def collect(self, ticket: StepTicket) -> StepOutput:
        return self._runner.collect(ticket)


def measure(runner: ModelRunner, cases: Cases, policies: Sequence[Policy] = POLICIES) -> list[Table]:
    rng = random.Random(0)
    alone = MixedBench(runner, Policy("alone", None), cases, rng)
    alone_s = statistics.median(alone.alone() for _ in range(cases.num_alone))
    rows = []
    for policy in policies:
        run = MixedBench(runner, policy, cases, rng).run()
        quiet_s, p99_s = statistics.median(run.quiet_gaps_s), float(np.percentile(run.gaps_s, 99))
        quiet_p99 = float(np.percentile(run.quiet_gaps_s, 99)) / quiet_s
        ttft_s, net_s = statistics.median(run.ttfts_s), statistics.median(run.net_s)
        first_p99 = float(np.percentile(run.first_gaps_s, 99)) / quiet_s
        times = quiet_s * 1e3, quiet_p99, statistics.median(run.gaps_s) * 1e3, p99_s * 1e3, p99_s / quiet_s, first_p99
        rows.append((policy.name, *times, ttft_s, net_s, net_s / alone_s, 100 * run.error_p90))
        print(f"{policy.name}: p99 {p99_s / quiet_s:.2f} x the quiet median", file=sys.stderr)
    title = f"{cases.num_streams} streams and prompts of {cases.long_prompt}, {alone_s:.2f} s alone and unchunked"
    gaps = "quiet p50 ms", "quiet p99 / p50", "p50 ms", "p99 ms", "p99 / quiet p50", "first prompt: p99 / quiet p50"
    prompt = "TTFT s", "net prefill s", "net / alone", "cost error p90 %"
    return [Table(title, ("policy", *gaps, *prompt), tuple(rows))]


def _open(directory: Path, cases: Cases, dtype: str, threads: int | None) -> ModelRunner:
    config = parse_model_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    engine = EngineConfig(device="cpu", dtype=dtype, threads=threads)
    num_kv_tokens = cases.long_prompt + cases.num_streams * (cases.stream_prompt + 4096) + 32 * BLOCK_SIZE
    engine = EngineConfig(
        device="cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=min(cases.max_model_len, config.max_position),
        max_sequences=cases.num_streams + 2,
        max_batch_tokens=max(512, cases.long_prompt + cases.num_streams),
        kv_memory_bytes=num_kv_tokens * bytes_per_token(config, choose_device(engine).dtype),
    )
    return load_runner(directory, config, engine, lambda done, total: None)


def _parser() -> argparse.ArgumentParser:
    names = [policy.name for policy in POLICIES]
    parser = argparse.ArgumentParser(prog="python -m bench.mixed", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="e.g. of bench.make_model")
    parser.add_argument("--threads", type=int, metavar="N", help="compute threads (default: as the server chooses)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto")
    parser.add_argument("--prompt", type=int, default=LONG_PROMPT, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, metavar="COUNT", help="default: %(default)s")
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/mixed.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 2 when the model cannot be loaded."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    cases = QUICK if arguments.quick else Cases(long_prompt=arguments.prompt, num_prompts=arguments.prompts)
    try:
        runner = _open(arguments.model, cases, arguments.dtype, arguments.threads)
    except StartupError as error:
        print(f"bench.mixed: {error.cause}\nFix: {error.fix}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        fix = "name a model directory; python -m bench.make_model makes one"
        print(f"bench.mixed: {error}\nFix: {fix}", file=sys.stderr)
        return 2
    tables = measure(runner, cases, [policy for policy in POLICIES if policy.name in arguments.policies])
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "mixed.json")
    if path is not None:
        device = runner.memory.device
        shown = {"model": arguments.model.resolve().name, "dtype": device.dtype_name, "threads": device.threads}
        write_result(path, "mixed", command_line("python -m bench.mixed", argv), tables, shown, {})
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
