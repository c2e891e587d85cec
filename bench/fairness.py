"""One tenant floods, eight light ones ask now and then: `python -m bench.fairness`. Simulated, and over real sockets.

What the light ones wait for their first tokens, with the flood and without it: in engine steps, the service that each
running sequence gets one of, and in simulated seconds, by the real scheduler; in seconds of the wall, by the whole
server (fairness_wall.py). And the service that two tenants who both wanted more have had, at its furthest apart,
against the bound of "Fairness in Serving Large Language Models" (arXiv:2401.00588, theorem 4.4).
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.fairness_wall import WallLoad, measure_wall
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
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


QUICK = Load(duration_s=10.0, flood=20, greedy=20)
QUICK_WALL = WallLoad(duration_s=2.0, warm_up_s=1.0, num_flooding=8, max_sequences=4)
PARTS = ("flood", "gap", "wall")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all of them")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of the wall's part (default: the embedded one)")
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/fairness.json")
    arguments = parser.parse_args(argv)
    load, wall = (QUICK, QUICK_WALL) if arguments.quick else (Load(), WallLoad())
    cost = CostModel()
    measures: dict[str, Callable[[], Table]] = {
        "flood": lambda: measure_flood(load, cost),
        "gap": lambda: measure_gap(load, cost),
        "wall": lambda: measure_wall(wall, arguments.model),
    }
    tables = [measures[part]() for part in arguments.parts]
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "fairness.json")
    if path is not None:
        shown = {"cost": asdict(cost), "load": asdict(load), "wall": asdict(wall)}
        write_result(path, "fairness", command_line("python -m bench.fairness", argv), tables, shown)
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
