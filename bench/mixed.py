"""Long prompts among running streams: `python -m bench.mixed --model DIR`. What the streams notice, what the prompt.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. Each policy has its own
scheduler over the same runner; prompts are random, so that no cache helps. Prefill first is what small engines do: who
decodes is paused until the prompt is done.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import numpy as np

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, run_bench
from bench.results import Cell, Table
from core.config import BLOCK_SIZE, INTER_TOKEN_TARGET
from core.step_cost import StepWork
from gpu.runner import ModelRunner

STREAM_TOKENS = 4000


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

    long_prompt: int
    num_prompts: int
    num_streams: int = 8
    stream_prompt: int = 256
    num_quiet_steps: int = 40
    num_alone: int = 3


@dataclass(slots=True)
class Run:
    """What one policy gave. Seconds.

    Args:
        quiet_gaps_s: between two tokens of a stream, without a long prompt: what the machine does to steps shows there.
        gaps_s: the same with one; first_gaps_s: with the first prompt of a scheduler's life.
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

    def __init__(self, runner: ModelRunner, policy: Policy, cases: Cases, seed: int) -> None:
        self._policy, self._cases, self._rng = policy, cases, Random(seed)
        limits = replace(runner.limits, max_batch_tokens=policy.chunk or runner.limits.max_batch_tokens)
        target = policy.inter_token_target
        self._streams = Streams(runner, seed, limits, has_prefix_cache=False, inter_token_target=target)
        self._names: list[str] = []
        self._num_seen: dict[str, int] = {}

    def alone_s(self) -> float:
        """Seconds from a long prompt's submission to its first token, while nothing else runs."""
        return statistics.median(self._streams.prefill_s(self._cases.long_prompt) for _ in range(self._cases.num_alone))

    def run(self) -> Run:
        cases, result, streams = self._cases, Run(), self._streams
        self._names = [
            streams.submit(streams.prompt(cases.stream_prompt), STREAM_TOKENS) for _ in range(cases.num_streams)
        ]
        streams.run_until(lambda: streams.have_all(self._names, 1))
        result.quiet_gaps_s += self._quiet_steps()
        self._prompt()
        result.first_gaps_s = self._new_gaps()
        while not streams.scheduler.step_cost.is_ready:  # short prompts among the streams, until it predicts
            short = streams.submit(streams.prompt(self._rng.randint(8, 64)), 1)
            streams.run_until(lambda short=short: streams.have_all([short], 1))  # type: ignore[misc]
            streams.step()
        for _ in range(cases.num_prompts):
            result.quiet_gaps_s += self._quiet_steps()
            ttft_s, net_s = self._prompt()
            result.gaps_s += self._new_gaps()
            result.quiet_gaps_s += self._quiet_steps()
            result.ttfts_s.append(ttft_s)
            result.net_s.append(net_s)
        result.error_p90 = streams.scheduler.step_cost.error_p90
        streams.cancel_all()
        return result

    def _quiet_steps(self) -> list[float]:
        self._new_gaps()
        for _ in range(self._cases.num_quiet_steps):
            self._streams.step()
        return self._new_gaps()[self._cases.num_streams :]  # the first step's began before

    def _prompt(self) -> tuple[float, float]:
        """A long prompt to its first token, and every stream one token further: (seconds to it, net seconds)."""
        streams, net_s = self._streams, 0.0
        name = streams.submit(streams.prompt(self._cases.long_prompt), 1)
        if self._policy.pauses_streams:
            streams.pause(self._names)
        while not streams.tokens[name]:
            before_s = time.perf_counter()
            streams.step()
            net_s += time.perf_counter() - before_s - streams.scheduler.step_cost.predict(self._decodes())
        streams.resume(self._names)
        streams.step()
        return streams.ttft_s(name), net_s

    def _decodes(self) -> StepWork:
        """Of the last step."""
        plan = self._streams.clocked.plan
        assert plan is not None
        starts = plan.starts[plan.lengths == 1]
        return StepWork(own_tokens=len(starts), own_kv=int(starts.sum()) + len(starts))

    def _new_gaps(self) -> list[float]:
        """Between the streams' tokens that came since the last call, step by step."""
        gaps = []
        for name in self._names:
            times_s = self._streams.times_s[name]
            first = self._num_seen.get(name, 1)
            gaps += [(now, now - before) for before, now in pairwise(times_s[first - 1 :])]
            self._num_seen[name] = len(times_s)
        return [gap for _, gap in sorted(gaps)]


def measure(runner: ModelRunner, cases: Cases, policies: Sequence[Policy] = POLICIES) -> list[Table]:
    alone_s = MixedBench(runner, Policy("alone", None), cases, 0).alone_s()
    rows: list[tuple[Cell, ...]] = []
    for seed, policy in enumerate(policies, 1):
        run = MixedBench(runner, policy, cases, seed).run()
        quiet_s, median_s = statistics.median(run.quiet_gaps_s), statistics.median(run.gaps_s)
        all_gaps = (run.quiet_gaps_s, run.gaps_s, run.first_gaps_s)
        quiet_p99, p99, first_p99 = (float(np.percentile(gaps, 99)) / quiet_s for gaps in all_gaps)
        ttft_s, net_s = statistics.median(run.ttfts_s), statistics.median(run.net_s)
        times = (quiet_s * 1e3, quiet_p99, median_s * 1e3, p99 * quiet_s * 1e3, p99, first_p99)
        rows.append((policy.name, *times, ttft_s, net_s, net_s / alone_s, 100 * run.error_p90))
        print(f"{policy.name}: p99 {p99:.2f} x the quiet median", file=sys.stderr)
    title = f"{cases.num_streams} streams and prompts of {cases.long_prompt}, {alone_s:.2f} s alone and unchunked"
    gaps = ("quiet p50 ms", "quiet p99 / p50", "p50 ms", "p99 ms", "p99 / quiet p50", "first prompt: p99 / quiet p50")
    prompt = ("TTFT s", "net prefill s", "net / alone", "cost error p90 %")
    return [Table(title, ("policy", *gaps, *prompt), tuple(rows))]


def _measure(arguments: argparse.Namespace) -> Found:
    cases = Cases(arguments.prompt, arguments.prompts)
    if arguments.quick:
        cases = replace(cases, num_streams=2, stream_prompt=32, num_quiet_steps=4, num_alone=1)
    runner = open_model(
        arguments,
        cases.long_prompt + cases.num_streams * (cases.stream_prompt + 4096) + 32 * BLOCK_SIZE,
        max_model_len=cases.long_prompt + cases.stream_prompt + 4096,
        max_sequences=cases.num_streams + 2,
        max_batch_tokens=max(512, cases.long_prompt + cases.num_streams),
    )
    tables = measure(runner, cases, [policy for policy in POLICIES if policy.name in arguments.policies])
    return Found(tables, shown_model(arguments, runner))


_NAMES = tuple(policy.name for policy in POLICIES)
FLAGS = (
    *MODEL_FLAGS,
    Flag("--prompt", 4096, "tokens of a long one", 96),
    Flag("--prompts", 2, "how many", 1),
    Flag("--policies", _NAMES, "to compare", more={"nargs": "+", "choices": _NAMES}),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("mixed", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
