"""One tenant floods, eight light ones ask now and then: `python -m bench.fairness`. Simulated, and over real sockets.

What the light ones wait for their first tokens, with the flood and without it: in engine steps, the service that each
running sequence gets one of, and in simulated seconds, by the real scheduler; in seconds of the wall, by the whole
server. And the service that two tenants who both wanted more have had, at its furthest apart, against the bound of
"Fairness in Serving Large Language Models" (arXiv:2401.00588, theorem 4.4).
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.kit import Flag, Found, free_port, run_bench, running, serve_command
from bench.load import LoadConfig, LoadRun, run_on_fast_loop
from bench.results import Cell, Table
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.simulation import CostModel, RequestTrace, Simulation
from core.types import Request, SamplingParams

NUM_LIGHT = 8
LIMITS = RunnerLimits(
    num_blocks=4096, block_size=16, max_sequences=32, max_batch_tokens=256, max_model_len=2048, vocab_size=32_000
)


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals of the light ones; the flood comes at once. Lengths are uniform between both bounds.

    Args:
        requests_per_s: of each light tenant.
        greedy: requests of each of the two tenants whose service is compared.
    """

    requests_per_s: float = 0.15
    duration_s: float = 120.0
    flood: int = 800
    greedy: int = 150
    light_prompt: tuple[int, int] = (32, 128)
    light_output: tuple[int, int] = (16, 64)
    flood_prompt: tuple[int, int] = (64, 512)
    flood_output: tuple[int, int] = (64, 256)
    seed: int = 5

    def light_requests(self) -> list[Request]:
        rng = random.Random(self.seed)
        requests = []
        for tenant in range(NUM_LIGHT):
            arrival_s = rng.expovariate(self.requests_per_s)
            while arrival_s < self.duration_s:
                requests.append(_request(rng, f"light{tenant}", arrival_s, self.light_prompt, self.light_output))
                arrival_s += rng.expovariate(self.requests_per_s)
        return requests

    def flood_requests(self, tenant: str = "flood", count: int | None = None) -> list[Request]:
        rng = random.Random(tenant)
        shape = self.flood_prompt, self.flood_output
        return [_request(rng, tenant, 0.0, *shape) for _ in range(self.flood if count is None else count)]


def _request(
    rng: random.Random, tenant: str, arrival_s: float, prompt: tuple[int, int], output: tuple[int, int]
) -> Request:
    return Request(
        request_id=f"{tenant}-{rng.getrandbits(64)}",
        prompt_ids=tuple(rng.choices(range(LIMITS.vocab_size), k=rng.randint(*prompt))),
        sampling=SamplingParams(max_tokens=rng.randint(*output), seed=1),
        arrival_s=arrival_s,
        tenant=tenant,
    )


def _first_tokens(traces: Sequence[RequestTrace]) -> tuple[list[float], list[int]]:
    """Of the light ones: seconds and steps to the first token."""
    seconds, steps = [], []
    for trace in traces:
        if trace.request.tenant.startswith("light"):
            assert trace.first_token_s is not None
            assert trace.num_steps_to_first_token is not None
            seconds.append(trace.first_token_s - trace.request.arrival_s)
            steps.append(trace.num_steps_to_first_token)
    return seconds, steps


def measure_flood(load: Load, cost: CostModel) -> Table:
    rows: list[tuple[str | float, ...]] = []
    first: list[float] = []
    for name, flood in (("without", []), ("with", load.flood_requests())):
        simulation = Simulation(LIMITS, cost, [*load.light_requests(), *flood])
        seconds, steps = _first_tokens(simulation.run())
        figures = [float(np.percentile(values, q)) for values in (steps, seconds) for q in (50, 95)]
        first = first or figures
        ratios = figures[1] / first[1], figures[3] / first[3]
        rows.append((name, len(steps), *figures, *ratios, simulation.scheduler.stats().num_preemptions))
    columns = ("flood", "requests", "p50 steps", "p95 steps", "p50 s", "p95 s", "p95 steps ratio", "p95 s ratio")
    return Table("First tokens of eight light tenants, simulated", (*columns, "preemptions"), tuple(rows))


def measure_gap(load: Load, cost: CostModel) -> Table:
    """Two floods of different shapes, while both have requests in the queue. Steps cost nothing but their tokens.

    A token costs its time, and at most as much again for the blocks held meanwhile.
    """
    cost = replace(cost, fixed_s=0.0)
    furthest_s, num_steps = 0.0, 0

    def compare(scheduler: Scheduler) -> None:
        nonlocal furthest_s, num_steps
        served_s = [t.served_s for t in scheduler.shares.tenants() if scheduler.states.waiting.is_waiting(t.name)]
        if len(served_s) == 2:
            furthest_s, num_steps = max(furthest_s, max(served_s) - min(served_s)), num_steps + 1

    others = Load(flood_prompt=load.flood_output, flood_output=load.flood_prompt)
    requests = load.flood_requests("a", load.greedy) + others.flood_requests("b", load.greedy)
    Simulation(LIMITS, cost, requests, on_step=compare).run()
    longest = load.flood_prompt[1] + load.flood_output[1]
    num_running_tokens = min(LIMITS.num_blocks * LIMITS.block_size, LIMITS.max_sequences * longest)
    bound_s = 2 * (2 * cost.token_s) * num_running_tokens  # at least as much as the longest prompt's
    columns = ("steps", "furthest apart s", "bound s")
    return Table("Service of two tenants that both wait, at every step", columns, ((num_steps, furthest_s, bound_s),))


@dataclass(frozen=True, slots=True)
class WallLoad:
    """Each tenant over its own key: light ones open loop, the flood closed loop for as long as they ask.

    Args:
        num_flooding: requests that the flood has open.
        max_sequences: that the server runs at once: fewer than there are.
        light, flood: (prompt, output): tokens of each request.
        warm_up_s: of both loads, before anything counts: the server learns what its steps cost.
    """

    requests_per_s: float = 1.0  # of each light tenant
    duration_s: float = 20.0
    warm_up_s: float = 4.0
    num_flooding: int = 64
    max_sequences: int = 32
    light: tuple[int, int] = (80, 40)
    flood: tuple[int, int] = (288, 160)


@contextmanager
def fair_server(load: WallLoad, model: Path | None) -> Iterator[int]:
    """A server with the tenants, each of whose key is its name, on the port that this gives."""
    names = ["flood", *(f"light{number}" for number in range(NUM_LIGHT))]
    tenants = [
        f'[[tenants]]\nname = "{name}"\nkey_sha256 = ["{sha256(name.encode()).hexdigest()}"]\n' for name in names
    ]
    with TemporaryDirectory() as directory:
        file, port = Path(directory) / "steploop.toml", free_port()
        file.write_text("\n".join(tenants), encoding="utf-8")
        flags = ("--config", str(file), "--served-model-name", "fair", "--max-sequences", str(load.max_sequences))
        with running(serve_command(port, *flags, *(() if model is None else ("--model", str(model)))), port, "/ready"):
            yield port


async def run_wall(load: WallLoad, port: int, duration_s: float, has_flood: bool) -> tuple[list[LoadRun], LoadRun]:
    """Until the last light request has its answer; then the flood is cut off."""

    def run(name: str, size: tuple[int, int], seed: int, **pace: float) -> LoadRun:
        asked = {"host": "127.0.0.1", "port": port, "model": "fair", "api_key": name, "ignore_eos": True, "seed": seed}
        sizes = {"prompt_tokens": size[0], "max_tokens": size[1], "num_requests": 10**9, "duration_s": duration_s}
        return LoadRun(LoadConfig(**asked, **sizes, **pace))  # type: ignore[arg-type]

    light = [run(f"light{i}", load.light, 100 + i, rate=load.requests_per_s) for i in range(NUM_LIGHT)]
    flood = run("flood", load.flood, 1, concurrency=load.num_flooding)
    flooding = asyncio.create_task(flood.measure()) if has_flood else None
    try:
        await asyncio.gather(*(one.measure() for one in light))
    finally:
        if flooding is not None:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
    return light, flood


def measure_wall(load: WallLoad, model: Path | None = None) -> Table:
    """A server for each of both: neither knows what the other's tenants have had."""
    rows: list[tuple[Cell, ...]] = []
    alone_s = 0.0
    for name, has_flood in (("without", False), ("with", True)):
        with fair_server(load, model) as port:
            run_on_fast_loop(run_wall(load, port, load.warm_up_s, has_flood=True))
            light, flood = run_on_fast_loop(run_wall(load, port, load.duration_s, has_flood))
        recorders = [one.recorder for one in light]
        if any(recorder.failures for recorder in recorders):
            raise RuntimeError(f"light requests failed: {[recorder.examples for recorder in recorders]}")
        ttfts_s = [ttft_s for recorder in recorders for ttft_s in recorder.ttft_s]
        p50_s, p95_s = (float(np.percentile(ttfts_s, q)) for q in (50, 95))
        alone_s = alone_s or p95_s
        rows.append((name, len(ttfts_s), flood.recorder.num_done, p50_s * 1e3, p95_s * 1e3, p95_s / alone_s))
    columns = ("flood", "light requests", "flood's", "p50 ms", "p95 ms", "p95 ratio")
    return Table("First tokens of eight light tenants, over sockets, wall time", columns, tuple(rows))


QUICK = Load(duration_s=10.0, flood=20, greedy=20)
QUICK_WALL = WallLoad(duration_s=2.0, warm_up_s=1.0, num_flooding=8, max_sequences=4)
PARTS = ("flood", "gap", "wall")


def _measure(arguments: argparse.Namespace) -> Found:
    load, wall = (QUICK, QUICK_WALL) if arguments.quick else (Load(), WallLoad())
    cost = CostModel()
    measures: dict[str, Callable[[], Table]] = {
        "flood": lambda: measure_flood(load, cost),
        "gap": lambda: measure_gap(load, cost),
        "wall": lambda: measure_wall(wall, arguments.model),
    }
    shown = {"cost": asdict(cost), "load": asdict(load), "wall": asdict(wall)}
    return Found([measures[part]() for part in arguments.parts], shown)


FLAGS = (
    Flag("--parts", PARTS, "to measure", more={"nargs": "+", "choices": PARTS}),
    Flag("--model", None, "of the wall's part (default: the embedded one)", more={"type": Path}),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("fairness", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
