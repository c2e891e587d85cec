"""Long prompts among running streams: `python -m bench.mixed --model DIR`. What the streams notice, and the prompt.

Requests go through core.engine.Engine and the model's runner, in this process, without HTTP. Each policy has its own
scheduler over the same runner; prompts are random, so that no cache helps. "Prefill first" is what small engines do:
decodes are paused until the prompt is done.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from bench.engine import MODEL_FLAGS, Streams, open_model, shown_model
from bench.kit import Flag, Found, bench
from bench.results import Cell, Table, percentile, table_of
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
    """Counts are of tokens, unless they say otherwise.

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


class MixedBench:
    """Streams and prompts over one scheduler, stepped by hand."""

    def __init__(self, runner: ModelRunner, policy: Policy, cases: Cases, seed: int) -> None:
        self._policy, self._cases, self._rng = policy, cases, Random(seed)
        limits = replace(runner.limits, max_batch_tokens=policy.chunk or runner.limits.max_batch_tokens)
        target = policy.inter_token_target
        self.streams = Streams(runner, seed, limits, has_prefix_cache=False, inter_token_target=target)
        self._names: list[str] = []
        self._num_seen: dict[str, int] = {}

    def run(self, alone_s: float) -> dict[str, Cell]:
        """A row. The gaps are between two tokens of a stream; those without a long prompt show the machine's own."""
        cases, streams = self._cases, self.streams
        gaps_s, ttfts_s, net_s = list[float](), list[float](), list[float]()
        self._names = [
            streams.submit(streams.prompt(cases.stream_prompt), STREAM_TOKENS) for _ in range(cases.num_streams)
        ]
        streams.run_until(lambda: streams.have_all(self._names, 1))
        quiet_s = self._quiet_steps()
        self._prompt()
        first_s = self._new_gaps()
        while not streams.scheduler.step_cost.is_ready:  # short prompts among the streams, until it predicts
            short = streams.submit(streams.prompt(self._rng.randint(8, 64)), 1)
            streams.run_until(lambda short=short: streams.have_all([short], 1))  # type: ignore[misc]
            streams.step()
        for _ in range(cases.num_prompts):
            quiet_s += self._quiet_steps()
            ttft_s, prompt_s = self._prompt()
            gaps_s += self._new_gaps()
            quiet_s += self._quiet_steps()
            ttfts_s.append(ttft_s)
            net_s.append(prompt_s)
        error_p90 = streams.scheduler.step_cost.error_p90
        streams.cancel_all()
        median_s, prompt_s = statistics.median(quiet_s), statistics.median(net_s)
        quiet_p99, p99, first_p99 = (percentile(gaps, 99) or 0.0 for gaps in (quiet_s, gaps_s, first_s))
        return {
            "policy": self._policy.name,
            "quiet p50 ms": median_s * 1e3,
            "quiet p99 / p50": quiet_p99 / median_s,
            "p50 ms": statistics.median(gaps_s) * 1e3,
            "p99 ms": p99 * 1e3,
            "p99 / quiet p50": p99 / median_s,
            "first prompt: p99 / quiet p50": first_p99 / median_s,
            "TTFT s": statistics.median(ttfts_s),
            "net prefill s": prompt_s,
            "net / alone": prompt_s / alone_s,
            "cost error p90 %": 100 * error_p90,
        }

    def _quiet_steps(self) -> list[float]:
        self._new_gaps()
        for _ in range(self._cases.num_quiet_steps):
            self.streams.step()
        return self._new_gaps()[self._cases.num_streams :]  # the first step's began before

    def _prompt(self) -> tuple[float, float]:
        """A long prompt to its first token, and every stream one token further.

        Returns: seconds to it; and of its steps, less what their decodes alone would have taken, as predicted.
        """
        streams, net_s = self.streams, 0.0
        name = streams.submit(streams.prompt(self._cases.long_prompt), 1)
        if self._policy.pauses_streams:
            streams.pause(self._names)
        while not streams.tokens[name]:
            before_s = time.perf_counter()
            streams.step()
            plan = streams.clocked.plan
            assert plan is not None
            starts = plan.starts[plan.lengths == 1]
            decodes = StepWork(own_tokens=len(starts), own_kv=int(starts.sum()) + len(starts))
            net_s += time.perf_counter() - before_s - streams.scheduler.step_cost.predict(decodes)
        streams.resume(self._names)
        streams.step()
        return streams.ttft_s(name), net_s

    def _new_gaps(self) -> list[float]:
        """Between the streams' tokens that came since the last call, step by step."""
        gaps = []
        for name in self._names:
            times_s = self.streams.times_s[name]
            first = self._num_seen.get(name, 1)
            gaps += [(now, now - before) for before, now in pairwise(times_s[first - 1 :])]
            self._num_seen[name] = len(times_s)
        return [gap for _, gap in sorted(gaps)]


def measure(runner: ModelRunner, cases: Cases, policies: Sequence[Policy] = POLICIES) -> list[Table]:
    alone = MixedBench(runner, Policy("alone", None), cases, 0).streams
    alone_s = statistics.median(alone.prefill_s(cases.long_prompt) for _ in range(cases.num_alone))
    rows = []
    for seed, policy in enumerate(policies, 1):
        rows.append(MixedBench(runner, policy, cases, seed).run(alone_s))
        print(rows[-1], file=sys.stderr)
    title = f"{cases.num_streams} streams and prompts of {cases.long_prompt}, {alone_s:.2f} s alone and unchunked"
    return [table_of(title, rows)]


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
main = bench("mixed", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
