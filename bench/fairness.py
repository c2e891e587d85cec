"""One tenant floods, eight light ones ask now and then: `python -m bench.fairness`. Simulated, and over real sockets.

What the light tenants wait for their first tokens, with the flood and without it: in engine steps, the service that
each running sequence gets one of, and in simulated seconds, by the real scheduler; in seconds of the wall, by the whole
server. And how far apart the service of two tenants gets that both want more, against the bound of "Fairness in Serving
Large Language Models" (arXiv:2401.00588, theorem 4.4).
"""

import argparse
import asyncio
import random
import sys
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.kit import Flag, Found, bench, free_port, running, serve_command
from bench.load import LoadConfig, LoadRun, poisson_arrivals, run_on_fast_loop
from bench.results import Cell, Table, percentile, table_of
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.simulation import CostModel, Simulation
from core.types import Request, SamplingParams

NUM_LIGHT = 8
LIMITS = RunnerLimits(
    num_blocks=4096, block_size=16, max_sequences=32, max_batch_tokens=256, max_model_len=2048, vocab_size=32_000
)
Lengths = tuple[int, int]  # uniform between both


@dataclass(frozen=True, slots=True)
class Load:
    """Simulated Poisson arrivals of the light tenants; the flood comes at once.

    Args:
        requests_per_s: of each light tenant.
        greedy: requests of each of the two tenants whose service is compared.
    """

    requests_per_s: float = 0.15
    duration_s: float = 120.0
    flood: int = 800
    greedy: int = 150
    light_prompt: Lengths = (32, 128)
    light_output: Lengths = (16, 64)
    flood_prompt: Lengths = (64, 512)
    flood_output: Lengths = (64, 256)
    seed: int = 5

    def light_requests(self) -> list[Request]:
        rng, found = random.Random(self.seed), []
        for tenant in range(NUM_LIGHT):
            times_s = poisson_arrivals(self.requests_per_s, rng.getrandbits(64))
            for arrival_s in takewhile(lambda at_s: at_s < self.duration_s, times_s):
                found.append(_request(rng, f"light{tenant}", arrival_s, self.light_prompt, self.light_output))
        return found


def _request(rng: random.Random, tenant: str, arrival_s: float, prompt: Lengths, output: Lengths) -> Request:
    return Request(
        request_id=f"{tenant}-{rng.getrandbits(64)}",
        prompt_ids=tuple(rng.choices(range(LIMITS.vocab_size), k=rng.randint(*prompt))),
        sampling=SamplingParams(max_tokens=rng.randint(*output), seed=1),
        arrival_s=arrival_s,
        tenant=tenant,
    )


def _flood(tenant: str, count: int, prompt: Lengths, output: Lengths) -> list[Request]:
    rng = random.Random(tenant)
    return [_request(rng, tenant, 0.0, prompt, output) for _ in range(count)]


def measure_flood(load: Load, cost: CostModel) -> Table:
    rows: list[dict[str, Cell]] = []
    alone: list[float] = []
    for name, count in (("without", 0), ("with", load.flood)):
        flood = _flood("flood", count, load.flood_prompt, load.flood_output)
        simulation = Simulation(LIMITS, cost, [*load.light_requests(), *flood])
        light = [trace for trace in simulation.run() if trace.request.tenant != "flood"]
        steps = [float(trace.num_steps_to_first_token or 0) for trace in light]
        seconds = [(trace.first_token_s or 0.0) - trace.request.arrival_s for trace in light]
        p50_steps, p95_steps, p50_s, p95_s = (percentile(of, q) or 0.0 for of in (steps, seconds) for q in (50, 95))
        alone = alone or [p95_steps, p95_s]
        figures = {"p50 steps": p50_steps, "p95 steps": p95_steps, "p50 s": p50_s, "p95 s": p95_s}
        figures |= {"p95 steps ratio": p95_steps / alone[0], "p95 s ratio": p95_s / alone[1]}
        rows.append({"flood": name, "requests": len(light), **figures})
    return table_of("First tokens of eight light tenants, simulated", rows)


def measure_gap(load: Load, cost: CostModel) -> Table:
    """Two floods of different shapes, while both have requests in the queue. Steps cost nothing but their tokens.

    A token costs its time, and at most as much again for the blocks held meanwhile.
    """
    furthest_s, num_steps = 0.0, 0

    def compare(scheduler: Scheduler) -> None:
        nonlocal furthest_s, num_steps
        served_s = [t.served_s for t in scheduler.shares.tenants() if scheduler.states.waiting.is_waiting(t.name)]
        if len(served_s) == 2:
            furthest_s, num_steps = max(furthest_s, max(served_s) - min(served_s)), num_steps + 1

    shapes = {"a": (load.flood_prompt, load.flood_output), "b": (load.flood_output, load.flood_prompt)}
    requests = [request for name, shape in shapes.items() for request in _flood(name, load.greedy, *shape)]
    Simulation(LIMITS, replace(cost, fixed_s=0.0), requests, on_step=compare).run()
    longest = load.flood_prompt[1] + load.flood_output[1]
    num_running_tokens = min(LIMITS.num_blocks * LIMITS.block_size, LIMITS.max_sequences * longest)
    bound_s = 2 * (2 * cost.token_s) * num_running_tokens  # at least as much as the longest prompt's
    row: dict[str, Cell] = {"steps": num_steps, "furthest apart s": furthest_s, "bound s": bound_s}
    return table_of("Service of two tenants that both wait, at every step", [row])


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
    """A fresh server without the flood and with it. Each tenant's key is its name."""
    rows: list[dict[str, Cell]] = []
    alone_s = 0.0
    names = ["flood", *(f"light{number}" for number in range(NUM_LIGHT))]
    tenant = '[[tenants]]\nname = "{}"\nkey_sha256 = ["{}"]\n'
    for name, has_flood in (("without", False), ("with", True)):
        with TemporaryDirectory() as directory:
            file, port = Path(directory) / "steploop.toml", free_port()
            file.write_text("\n".join(tenant.format(one, sha256(one.encode()).hexdigest()) for one in names))
            flags = ["--config", str(file), "--served-model-name", "fair", "--max-sequences", str(load.max_sequences)]
            flags += [] if model is None else ["--model", str(model)]
            with running(serve_command(port, *flags), port, "/ready"):
                run_on_fast_loop(run_wall(load, port, load.warm_up_s, has_flood=True))
                light, flood = run_on_fast_loop(run_wall(load, port, load.duration_s, has_flood))
        if failures := [one.recorder.examples for one in light if one.recorder.failures]:
            raise RuntimeError(f"light requests failed: {failures}")
        ttfts_s = [ttft_s for one in light for ttft_s in one.recorder.ttft_s]
        p50_s, p95_s = (percentile(ttfts_s, q) or 0.0 for q in (50, 95))
        alone_s = alone_s or p95_s
        counts: dict[str, Cell] = {"light requests": len(ttfts_s), "flood's": flood.recorder.num_done}
        figures = {"p50 ms": p50_s * 1e3, "p95 ms": p95_s * 1e3, "p95 ratio": p95_s / alone_s}
        rows.append({"flood": name, **counts, **figures})
    return table_of("First tokens of eight light tenants, over sockets, wall time", rows)


QUICK = Load(duration_s=10.0, flood=20, greedy=20)
QUICK_WALL = WallLoad(duration_s=2.0, warm_up_s=1.0, num_flooding=8, max_sequences=4)
PARTS = ("flood", "gap", "wall")


def _measure(arguments: argparse.Namespace) -> Found:
    load, wall = (QUICK, QUICK_WALL) if arguments.quick else (Load(), WallLoad())
    cost, tables = CostModel(), []
    if "flood" in arguments.parts:
        tables.append(measure_flood(load, cost))
    if "gap" in arguments.parts:
        tables.append(measure_gap(load, cost))
    if "wall" in arguments.parts:
        tables.append(measure_wall(wall, arguments.model))
    return Found(tables, {"cost": asdict(cost), "load": asdict(load), "wall": asdict(wall)})


FLAGS = (
    Flag("--parts", PARTS, "to measure", more={"nargs": "+", "choices": PARTS}),
    Flag("--model", None, "of the wall's part (default: the embedded one)", more={"type": Path}),
)
main = bench("fairness", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
