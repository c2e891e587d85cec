"""A day of a large service on one simulated H200: `python -m bench.scale`. Real scheduler and engine, modelled steps.

Simulated time: the figures are the same wherever it runs, to the last digit. Two loads, both of 1,000 tenants:

- the rush: 10,000 streams, ten of each tenant, within one second;
- the day: arrivals rise and fall as over 24 hours in three time zones, some tenants asking a thousand times as often as
  others. At a hundredth of a day's requests, and of its 86,400 seconds: so many that the busiest hour nearly fills the
  device.

`--against FILE` compares the modelled steps with those that `python -m bench.engine` has measured (its --json FILE) for
a model of the same shape on that device.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from bench.kit import Flag, Found, run_bench
from bench.null_server import NullRunner
from bench.results import Cell, Table, read_result
from core.plan import RunnerLimits, StepPlan
from core.scheduler import Scheduler
from core.simulation import RequestTrace, RooflineCost, SimulatedClock, Simulation, StepCost
from core.types import Request, SamplingParams

KV_BYTES = 0.9 * 141e9 - 2 * 8.03e9  # of the H200's memory, without the weights
TOKEN_BYTES = 2 * 2 * 32 * 8 * 128  # of keys and values, as in RooflineCost
LIMITS = RunnerLimits(
    num_blocks=int(KV_BYTES / TOKEN_BYTES / 16),
    block_size=16,
    max_sequences=512,
    max_batch_tokens=8192,
    max_model_len=16_384,
    vocab_size=128_256,
)
DAY_S = 864.0  # a hundredth of a day
NUM_HOURS = 24


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths are log-uniform between both bounds.

    Args:
        streams: of the rush, of each tenant.
        mean_per_s: requests of the day, on average over all of it.
        system_prompt: tokens that a tenant's requests begin with.
    """

    num_tenants: int = 1000
    streams: int = 10
    mean_per_s: float = 20.0
    day_s: float = DAY_S
    system_prompt: int = 256
    prompt: tuple[int, int] = (32, 2048)
    output: tuple[int, int] = (32, 1024)
    seed: int = 5


QUICK = Load(num_tenants=10, streams=3, mean_per_s=1.0, day_s=24.0)


class TimedRunner(NullRunner):
    """Takes its time and samples always the same: no block and no token matters here."""

    def __init__(self, limits: RunnerLimits, cost: StepCost, clock: SimulatedClock) -> None:
        super().__init__(limits, (0,))
        self._cost = cost
        self._clock = clock

    def forward(self, plan: StepPlan) -> StepPlan:
        self._clock.advance(self._cost.step_s(plan))
        return plan


class _Requests:
    """Draws them. Prompts share a pool of numbers, or they would take more memory than all the rest."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._rng = random.Random(load.seed)
        self._ids = list(range(LIMITS.vocab_size))
        self._systems = [self._draw_ids(load.system_prompt) for _ in range(load.num_tenants)]
        self._num = 0

    def rush(self) -> list[Request]:
        tenants = [tenant for tenant in range(self._load.num_tenants) for _ in range(self._load.streams)]
        return [self._draw(tenant, self._rng.random()) for tenant in tenants]

    def day(self) -> list[Request]:
        """Tenant k asks k times as seldom as the first; those of each time zone at its hours."""
        load, rng = self._load, self._rng
        weights = [1 / (1 + tenant) for tenant in range(load.num_tenants)]
        requests, now, most_per_s = [], 0.0, load.mean_per_s * _busyness(13 / 24, 0)
        while (now := now + rng.expovariate(most_per_s)) < load.day_s:  # thinned to the hour's rate
            (tenant,) = rng.choices(range(load.num_tenants), weights)
            if rng.random() * most_per_s < load.mean_per_s * _busyness(now / load.day_s, tenant % 3):
                requests.append(self._draw(tenant, now))
        return requests

    def _draw(self, tenant: int, arrival_s: float) -> Request:
        self._num += 1
        prompt, output = (self._draw_length(bounds) for bounds in (self._load.prompt, self._load.output))
        return Request(
            request_id=str(self._num),
            prompt_ids=self._systems[tenant] + self._draw_ids(prompt),
            sampling=SamplingParams(max_tokens=output, seed=1, ignore_eos=True),
            arrival_s=arrival_s,
            tenant=f"t{tenant}",
            cache_domain=f"t{tenant}",
        )

    def _draw_length(self, bounds: tuple[int, int]) -> int:
        return round(math.exp(self._rng.uniform(*map(math.log, bounds))))

    def _draw_ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._ids, k=count))


def _busyness(share_of_day: float, zone: int) -> float:
    """How busy a time zone is, 1 on average: least at one at night, most at one in the afternoon, its time.

    Args:
        zone: 0, 1, 2: three hours behind one another.
    """
    hours = (share_of_day * 24 + (0, 3, 6)[zone]) % 24
    return 1 - 0.8 * math.cos(2 * math.pi * (hours - 1) / 24)


@dataclass(slots=True)
class _Watch:
    """What the engine is at, by bucket of simulated time: the longest queue, and each step's seconds and sequences."""

    bucket_s: float
    waiting: dict[int, int] = field(default_factory=dict)
    steps: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def look(self, scheduler: Scheduler, now: float) -> None:
        stats, bucket = scheduler.stats(), int(now / self.bucket_s)
        self.waiting[bucket] = max(self.waiting.get(bucket, 0), stats.num_waiting)
        self.steps.setdefault(bucket, []).append((stats.step_s, stats.num_running))


def simulate(requests: list[Request], bucket_s: float) -> tuple[list[RequestTrace], _Watch, Simulation]:
    watch = _Watch(bucket_s)
    simulation = Simulation(
        LIMITS,
        RooflineCost(),
        requests,
        on_step=lambda scheduler: watch.look(scheduler, simulation.clock.now),
        runner=TimedRunner,
    )
    return simulation.run(), watch, simulation


def _percentiles(values: Sequence[float], *qs: int) -> list[float]:
    return [float(np.percentile(values, q)) for q in qs]


def measure_rush(load: Load) -> list[Table]:
    traces, watch, simulation = simulate(_Requests(load).rush(), bucket_s=1e9)
    stats, ttfts = simulation.scheduler.stats(), _ttfts(traces)
    by_tenant: dict[str, float] = {}  # when the tenant's last stream has ended
    for trace in traces:
        tenant = trace.request.tenant
        by_tenant[tenant] = max(by_tenant.get(tenant, 0.0), trace.end_s or 0.0)
    end_s = max(by_tenant.values())
    row: tuple[Cell, ...] = (
        *(len(traces), end_s, stats.num_generated_tokens / end_s, watch.waiting[0]),
        *_percentiles(ttfts, 50, 99, 100),
        *_percentiles([1e3 * seconds for seconds, _ in watch.steps[0]], 50, 99),
        *(end_s / min(by_tenant.values()), stats.num_preemptions),
    )
    columns = ("streams", "all done s", "tokens/s", "queue at most", "TTFT p50 s", "p99 s", "max s", "step p50 ms")
    more = ("p99 ms", "last tenant done / first", "preemptions")
    title = f"{len(traces):,} streams of {load.num_tenants:,} tenants at once, simulated H200"
    return [Table(title, (*columns, *more), (row,))]


def measure_day(load: Load) -> list[Table]:
    hour_s = load.day_s / NUM_HOURS
    traces, watch, simulation = simulate(_Requests(load).day(), hour_s)
    by_hour: dict[int, list[RequestTrace]] = {}
    for trace in traces:
        by_hour.setdefault(int(trace.request.arrival_s / hour_s), []).append(trace)
    rows: list[tuple[Cell, ...]] = []
    for hour in sorted(by_hour.keys() & watch.steps):
        steps_s, running = zip(*watch.steps[hour], strict=True)
        gaps_s = [gap_s for gap_s in map(_mean_gap_s, by_hour[hour]) if gap_s is not None]
        times_s = [*_percentiles(_ttfts(by_hour[hour]), 50, 99), *_percentiles(gaps_s, 50, 99)]
        times_ms = [1e3 * seconds for seconds in [*times_s, *_percentiles(steps_s, 99)]]
        busy = (float(np.mean(running)), watch.waiting[hour], sum(steps_s) / hour_s)
        rows.append((hour, len(by_hour[hour]) / hour_s, *times_ms, *busy))
    columns = ("hour", "requests/s", "TTFT p50 ms", "p99 ms", "token to token p50 ms", "p99 ms of means")
    more = ("step p99 ms", "running", "queue at most", "busy")
    stats = simulation.scheduler.stats()
    cached = stats.num_cache_hits / max(1, stats.num_cache_queries)
    total = (len(traces), stats.num_steps, stats.num_generated_tokens, cached, stats.num_preemptions)
    names = ("requests", "steps", "tokens", "prompt tokens cached", "preemptions")
    return [
        Table("A day at 1/100, simulated H200, hour by hour of arrival", (*columns, *more), tuple(rows)),
        Table("The whole day", names, (total,)),
    ]


def _ttfts(traces: Sequence[RequestTrace]) -> list[float]:
    assert all(trace.first_token_s is not None for trace in traces), "every request must be answered"
    return [(trace.first_token_s or 0.0) - trace.request.arrival_s for trace in traces]


def _mean_gap_s(trace: RequestTrace) -> float | None:
    """Between its tokens, its waits when it was preempted included."""
    assert trace.usage is not None
    if trace.first_token_s is None or trace.end_s is None or trace.usage.num_completion_tokens < 2:
        return None
    return (trace.end_s - trace.first_token_s) / (trace.usage.num_completion_tokens - 1)


def compare(path: Path) -> Table:
    """Decode steps of a result of bench.engine beside the model's.

    Raises:
        OSError, msgspec.ValidationError: the file is none of those.
    """
    cost = RooflineCost()
    rows = []
    for table in read_result(path).tables:
        if table.title == "Decode":
            at = {name: table.columns.index(name) for name in ("batch", "context", "step ms")}
            for row in table.rows:
                batch, context, step_ms = (float(row[at[name]] or 0) for name in at)
                modelled_ms = 1e3 * cost.seconds(int(batch), int(batch * context))
                rows.append((int(batch), int(context), step_ms, modelled_ms, modelled_ms / step_ms))
    return Table(
        "Decode steps, modelled against measured", ("batch", "context", "ms", "modelled ms", "ratio"), tuple(rows)
    )


def _measure(arguments: argparse.Namespace) -> Found:
    load = QUICK if arguments.quick else Load()
    tables = [] if arguments.against is None else [compare(arguments.against)]
    tables += measure_rush(load) + measure_day(load)
    return Found(tables, {"cost": asdict(RooflineCost()), "load": asdict(load)})


FLAGS = (Flag("--against", None, "a result of bench.engine to compare steps with", more={"type": Path}),)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("scale", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
