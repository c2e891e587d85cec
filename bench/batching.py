"""Static against continuous batching on the same Poisson arrivals, in the simulator: real scheduler, modelled time.

    python -m bench.batching

Static: a batch is taken from the queue when the engine is empty, and the next waits until its longest member has
ended. It is the kinder form: whoever has ended costs nothing any more, where padding would go on computing it.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.results import Plot, Table, command_line, print_tables, write_result
from core.config import INTER_TOKEN_TARGET
from core.plan import RunnerLimits
from core.simulation import CostModel, RequestTrace, Simulation
from core.types import Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "batching.json"
COST_SOURCE = (
    "linears of a 24-layer 0.5B bf16 body (715 MB), prepacked, two threads on two Zen 5 cores: measured 21.8 ms at 1 "
    "row, 28.8 at 16, 41.1 at 32, 199 at 256; fitted as fixed_s + token_s x tokens. Attention is left out."
)
LIMITS = RunnerLimits(
    num_blocks=4096, block_size=16, max_sequences=32, max_batch_tokens=256, max_model_len=2048, vocab_size=32_000
)


@dataclass(frozen=True)
class Load:
    """Poisson arrivals; prompt and output lengths are exponential with these means, within 1 and 4 times the mean."""

    requests_per_s: float
    num_requests: int = 600
    mean_prompt_tokens: int = 128
    mean_output_tokens: int = 96
    seed: int = 20

    def requests(self) -> list[Request]:
        rng = random.Random(self.seed)
        arrival_s, requests = 0.0, []
        for i in range(self.num_requests):
            arrival_s += rng.expovariate(self.requests_per_s)
            prompt_ids = tuple(rng.randrange(LIMITS.vocab_size) for _ in range(_length(rng, self.mean_prompt_tokens)))
            sampling = SamplingParams(max_tokens=_length(rng, self.mean_output_tokens), seed=i)
            requests.append(Request(request_id=str(i), prompt_ids=prompt_ids, sampling=sampling, arrival_s=arrival_s))
        return requests


@dataclass(frozen=True)
class Result:
    """One policy under one load. Seconds are simulated."""

    policy: str
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    latency_p50_s: float
    latency_p95_s: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float


@dataclass(frozen=True)
class Policy:
    """
    Args:
        num_may_enter: as the simulation's.
        inter_token_target: see EngineConfig; None: a step takes as much of the prompts as fits.
    """

    num_may_enter: Callable[[int], int]
    inter_token_target: float | None


def one_batch_at_a_time(num_inside: int) -> int:
    """Static batching: nobody enters before all have left."""
    return 0 if num_inside else LIMITS.max_sequences


def anyone(num_inside: int) -> int:
    """Continuous batching: the scheduler admits whoever there is a slot for, each step."""
    return sys.maxsize


POLICIES = {
    "static": Policy(one_batch_at_a_time, None),
    "continuous, unbounded": Policy(anyone, None),
    "continuous": Policy(anyone, INTER_TOKEN_TARGET),
}


def measure(policy: str, load: Load, cost: CostModel) -> Result:
    num_may_enter, target = POLICIES[policy].num_may_enter, POLICIES[policy].inter_token_target
    simulation = Simulation(LIMITS, cost, load.requests(), num_may_enter=num_may_enter, inter_token_target=target)
    traces = simulation.run()
    num_tokens = sum(len(tokens) for trace in traces for tokens in trace.token_ids.values())
    ttft = [_since_arrival(trace, trace.first_token_s) for trace in traces]
    latency = [_since_arrival(trace, trace.end_s) for trace in traces]
    gaps_s = [gap_s for trace in traces for gap_s in trace.gaps_s]
    duration_s = max(trace.end_s or 0.0 for trace in traces) - traces[0].request.arrival_s
    return Result(
        policy,
        load.requests_per_s,
        round(num_tokens / duration_s, 1),
        *(round(float(np.percentile(values, q)), 3) for values in (ttft, latency) for q in (50, 95)),
        *(round(1e3 * float(np.percentile(gaps_s, q)), 1) for q in (50, 99)),
    )


def result_table(results: list[Result]) -> Table:
    """One row per load and policy; the simulator's time is the cost model's."""
    columns = (
        "requests/s",
        "policy",
        "tokens/s",
        "TTFT p50 s",
        "TTFT p95 s",
        "latency p50 s",
        "latency p95 s",
        "inter-token p50 ms",
        "inter-token p99 ms",
    )
    rows = tuple(
        (
            r.requests_per_s,
            r.policy,
            r.output_tokens_per_s,
            r.ttft_p50_s,
            r.ttft_p95_s,
            r.latency_p50_s,
            r.latency_p95_s,
            r.inter_token_p50_ms,
            r.inter_token_p99_ms,
        )
        for r in results
    )
    plot = Plot("requests/s", "latency p95 s", "policy")
    return Table("Static against continuous batching, simulated", columns, rows, plot)


def _length(rng: random.Random, mean: int) -> int:
    return min(4 * mean, max(1, round(rng.expovariate(1 / mean))))


def _since_arrival(trace: RequestTrace, moment_s: float | None) -> float:
    assert moment_s is not None, f"request {trace.request.request_id} has not ended"
    return moment_s - trace.request.arrival_s


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Static against continuous batching, simulated.")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0, 5.0], help="requests per second")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    cost, loads = CostModel(), [Load(rate) for rate in arguments.rates]
    results = [measure(policy, load, cost) for load in loads for policy in POLICIES]
    tables = [result_table(results)]
    print_tables(tables)
    config = {
        "cost": asdict(cost) | {"source": COST_SOURCE},
        "limits": {name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__},
        "loads": [asdict(load) for load in loads],
    }
    write_result(arguments.json, "batching", command_line("python -m bench.batching", argv), tables, config)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
