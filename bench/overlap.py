"""What it saves to send a step before the last one is read: `python -m bench.overlap`. Real scheduler, modelled device.

Simulated time, an H200 with an 8B model as bench.scale has it: the figures are the same wherever it runs, to the last
digit. Each step takes the host so long to plan, to send and to tell; without overlap the device waits meanwhile.

- Decode: streams that only decode. Steps per second, and the share of the time in which the device computes.
- Arrivals: prompts that come in at random beside streams. A prompt waits for one step more, which was sent before it
  came; the streams get their tokens sooner.
"""

import argparse
import random
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result
from bench.scale import LIMITS
from core.plan import RunnerLimits, StepOutput, StepPlan
from core.simulation import RequestTrace, RooflineCost, SimulatedClock, SimulatedDevice, Simulation, StepCost
from core.types import Request, SamplingParams

MODES = {"off": 1, "on": 2}  # steps in flight


@dataclass(frozen=True, slots=True)
class Load:
    """
    Args:
        host_ms: of a step, by turns.
        batches: streams that decode.
        tokens: of each stream's answer.
        arrivals: prompts that come in, of so many tokens, at so many a second, beside so many streams.
    """

    host_ms: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    batches: tuple[int, ...] = (1, 64, 256, 512)
    context: int = 1024
    tokens: int = 300
    arrivals: int = 200
    arriving_per_s: float = 4.0
    beside: int = 64
    seed: int = 3


QUICK = Load(host_ms=(2.0,), batches=(1, 8), context=64, tokens=20, arrivals=4, beside=4)


class DeviceRunner:
    """A core.plan.Runner that takes its time and draws always the same: no block and no token matters here."""

    def __init__(self, limits: RunnerLimits, device: SimulatedDevice) -> None:
        self.limits = limits
        self._device = device

    def forward(self, plan: StepPlan) -> StepPlan:
        self._device.send(plan)
        return plan

    def sample(self, ticket: StepPlan) -> None:
        rows = np.flatnonzero(ticket.samples).astype(np.int32)
        self._device.draw(ticket, StepOutput(rows, np.zeros(len(rows), np.int32)))

    def collect(self, ticket: StepPlan) -> StepOutput:
        return self._device.wait(ticket)


class BusyCost:
    """A step's cost, added up."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._cost = RooflineCost()

    def step_s(self, plan: StepPlan) -> float:
        seconds = self._cost.step_s(plan)
        self.busy_s += seconds
        return seconds


def simulate(requests: list[Request], mode: str, host_s: float) -> tuple[list[RequestTrace], Simulation, float]:
    """Returns the traces, the simulation, and how long the device was busy."""
    busy = BusyCost()

    def make_runner(limits: RunnerLimits, cost: StepCost, clock: SimulatedClock) -> DeviceRunner:
        return DeviceRunner(limits, SimulatedDevice(cost, clock, host_s))

    simulation = Simulation(replace(LIMITS, max_in_flight=MODES[mode]), busy, requests, runner=make_runner)
    return simulation.run(), simulation, busy.busy_s


def measure_decode(load: Load) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for host_ms in load.host_ms:
        for batch in load.batches:
            requests = [_request(f"s{i}", 0.0, load.context, load.tokens) for i in range(batch)]
            rates, shares = [], []
            for mode in MODES:
                _, simulation, busy_s = simulate(requests, mode, host_ms / 1e3)
                rates.append(simulation.scheduler.stats().num_steps / simulation.clock.now)
                shares.append(busy_s / simulation.clock.now)
            rows.append((host_ms, batch, *rates, rates[1] / rates[0], *shares))
    columns = ("host ms", "streams", "steps/s", "overlapped", "ratio", "device busy", "overlapped")
    return Table(f"Decode of {load.tokens} tokens after {load.context}, simulated H200", columns, tuple(rows))


def measure_arrivals(load: Load) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for host_ms in load.host_ms:
        for mode in MODES:
            rng, now = random.Random(load.seed), 0.0
            requests = [_request(f"s{i}", 0.0, 128, 8 * load.tokens) for i in range(load.beside)]
            for i in range(load.arrivals):
                now += rng.expovariate(load.arriving_per_s)
                requests.append(_request(f"a{i}", now, load.context, 16))
            traces, _, _ = simulate(requests, mode, host_ms / 1e3)
            arrived = [trace for trace in traces if trace.request.request_id.startswith("a")]
            ttfts = [1e3 * ((trace.first_token_s or 0.0) - trace.request.arrival_s) for trace in arrived]
            gaps = [1e3 * gap for trace in traces if trace not in arrived for gap in trace.gaps_s]
            quantiles = [float(np.percentile(values, q)) for values in (ttfts, gaps) for q in (50, 99)]
            rows.append((host_ms, mode, *quantiles))
    columns = ("host ms", "overlap", "TTFT p50 ms", "p99 ms", "token to token p50 ms", "p99 ms")
    title = (
        f"Prompts of {load.context} tokens at {load.arriving_per_s:g}/s beside {load.beside} streams, simulated H200"
    )
    return Table(title, columns, tuple(rows))


def _request(name: str, arrival_s: float, num_prompt_tokens: int, max_tokens: int) -> Request:
    key = zlib.crc32(name.encode())
    return Request(
        request_id=name,
        prompt_ids=tuple((key + i * i) % LIMITS.vocab_size for i in range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        arrival_s=arrival_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, show, write. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m bench.overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/overlap.json")
    arguments = parser.parse_args(argv)
    load = QUICK if arguments.quick else Load()
    tables = [measure_decode(load), measure_arrivals(load)]
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "overlap.json")
    if path is not None:
        shown = {"cost": asdict(RooflineCost()), "load": asdict(load)}
        write_result(path, "overlap", command_line("python -m bench.overlap", argv), tables, shown)
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
