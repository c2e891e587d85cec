"""CPU per streamed token of the whole front end, beside other servers: `python -m bench.frontend`.

Each server runs in a process of its own with a null model: one token per step for each of its streams, paced by
--step-rate or, unpaced, as soon as the last step is delivered. What counts is the server's CPU time between the first
request and the last byte, less what the idle server takes. The thread of the event loop is shown apart from the others:
steploop's engine thread plans every step, the peers have no engine to speak of. Plain requests are GET /health, which
the peers answer below FastAPI. Servers take turns within each repetition; the repetition with the median CPU is shown.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from bench.kit import CpuTimes, Flag, Found, bench, busiest, cpu_times, free_port, running
from bench.load import CannotRun
from bench.raw_clients import Came, Load, run
from bench.results import Plot, Table

SERVERS = {
    "steploop": ("bench.null_server",),
    "FastAPI + uvicorn": ("bench.front_peers", "--server", "uvicorn"),
    "FastAPI + granian": ("bench.front_peers", "--server", "granian"),
    "uvloop, prepared bytes": ("bench.front_peers", "--server", "floor"),
}
STREAMED = {  # is_http2: servers, (connections, streams)
    False: (("steploop", "FastAPI + uvicorn", "uvloop, prepared bytes"), ((1, 1), (64, 64), (256, 256))),
    True: (
        ("steploop", "FastAPI + granian"),
        ((1, 1), (1, 16), (1, 64), (1, 256), (4, 256), (16, 256)),
    ),
}
REQUESTED = {False: ("steploop", "FastAPI + uvicorn"), True: STREAMED[True][0]}
PARTS = ("http1", "http2", "requests")
MAX_TOKENS_PER_STREAM = 16_000  # the null model's context has room for them
PACED_S = 8.0
NUM_REQUESTS_AT_ONCE = 32
WARM_UP_TOKENS = 50  # per stream
WARM_UP_S = 1.0  # of plain requests
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One server under one load.

    Args:
        part: of PARTS.
        num_tokens: of each stream.
        step_rate: 0: as fast as it goes.
        duration_s: of plain requests.
    """

    part: str
    server: str
    num_connections: int
    num_streams: int
    is_http2: bool = False
    num_tokens: int = 0
    step_rate: float = 0.0
    duration_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.part}, {self.server}, {self.num_streams} on {self.num_connections}, {self.step_rate:g} steps/s"

    def load(self, port: int, num_tokens: int, duration_s: float) -> Load:
        return Load(port, self.is_http2, self.num_connections, self.num_streams, num_tokens, duration_s)


class Measured(msgspec.Struct, frozen=True):
    """One run: microseconds of CPU per token or request, less the idle share, and how fast they came."""

    cpu_us: float
    loop_us: float
    others_us: float
    per_s: float
    num_done: int
    num_failed: int
    client_cpu: float


@contextlib.contextmanager
def running_server(name: str, step_rate: float) -> Iterator[tuple[int, int]]:
    """A server on a free loopback port, ended by its process id: (pid, port).

    Raises:
        CannotRun: it did not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", *SERVERS[name], "--port", str(port), "--step-rate", str(step_rate)]
    with running(command, port, errors=subprocess.DEVNULL if name != "steploop" else None) as pid:
        yield pid, port


def measure(case: Case) -> Measured:
    """Start the server, warm it up, watch it idle, load it.

    Raises:
        CannotRun: the server did not come up, or answered nothing.
    """
    with running_server(case.server, case.step_rate) as (pid, port):
        run(case.load(port, WARM_UP_TOKENS if case.num_tokens else 0, WARM_UP_S))
        pid = busiest(pid)
        before = cpu_times(pid)
        time.sleep(IDLE_S)
        idle, before = cpu_times(pid) - before, cpu_times(pid)
        came = run(case.load(port, case.num_tokens, case.duration_s))
        return _per_unit(cpu_times(pid) - before, idle, came)


def _per_unit(used: CpuTimes, idle: CpuTimes, came: Came) -> Measured:
    if not came.num_done:
        raise CannotRun(f"The server answered nothing; {came.num_failed} failed.", "run it alone and look")

    def us(used_s: float, idle_s: float) -> float:
        return (used_s - idle_s / IDLE_S * came.duration_s) / came.num_done * 1e6

    return Measured(
        cpu_us=us(used.total_s, idle.total_s),
        loop_us=us(used.main_s, idle.main_s),
        others_us=us(used.other_s, idle.other_s),
        per_s=came.num_done / came.duration_s,
        num_done=came.num_done,
        num_failed=came.num_failed,
        client_cpu=came.client_cpu,
    )


def plan_cases(arguments: argparse.Namespace) -> list[Case]:
    """What to measure, part by part, of the servers asked for."""
    duration_s, cases = 0.5 if arguments.quick else 4.0, list[Case]()
    for is_http2, (servers, sizes) in STREAMED.items():
        part = "http2" if is_http2 else "http1"
        for step_rate in arguments.step_rate:
            for num_connections, num_streams in sizes:
                most = min(MAX_TOKENS_PER_STREAM, int(PACED_S * step_rate) or MAX_TOKENS_PER_STREAM)
                num_tokens = max(1, min(int(arguments.tokens) // num_streams, most))
                if not arguments.streams or num_streams in arguments.streams:
                    size = (num_connections, num_streams, is_http2, num_tokens, step_rate)
                    cases += [Case(part, server, *size) for server in servers]
    for is_http2 in REQUESTED:
        connections = 1 if is_http2 else NUM_REQUESTS_AT_ONCE
        for server in REQUESTED[is_http2]:
            cases.append(Case("requests", server, connections, NUM_REQUESTS_AT_ONCE, is_http2, duration_s=duration_s))
    return [case for case in cases if case.part in arguments.parts and case.server in arguments.servers]


def measure_all(cases: Sequence[Case], num_repeats: int) -> dict[Case, Measured]:
    """Each case `num_repeats` times, in turn, so that a disturbance meets all servers alike; of each the median.

    A case that a server does not get through is reported and left out.
    """
    runs: dict[Case, list[Measured]] = {case: [] for case in cases}
    for number in range(num_repeats):
        for case in tuple(runs):
            try:
                measured = measure(case)
            except (CannotRun, OSError) as error:
                print(f"{case}: left out. {error}", file=sys.stderr)
                del runs[case]
                continue
            runs[case].append(measured)
            shown = f"{measured.loop_us:.2f} us on the loop, {measured.cpu_us:.2f} in all, {measured.per_s:,.0f}/s"
            print(f"{number + 1}/{num_repeats} {case}: {shown}, client {measured.client_cpu:.0%}", file=sys.stderr)
    return {case: median_run(found) for case, found in runs.items()}


def median_run(runs: Sequence[Measured]) -> Measured:
    """The run in the middle by CPU, of an odd number."""
    assert len(runs) % 2, "an even number has no middle"
    return sorted(runs, key=lambda run: run.cpu_us)[len(runs) // 2]


def result_tables(measured: dict[Case, Measured]) -> list[Table]:
    """One table per protocol and pace, one of plain requests, one of /health."""
    cpu = ("loop thread", "other threads")
    tables = []
    for part, is_http2, rate in sorted({(c.part, c.is_http2, c.step_rate) for c in measured if c.num_tokens}):
        rows = tuple(
            (c.server, c.num_streams, c.num_connections, r.per_s, r.loop_us, r.others_us, r.cpu_us, r.num_failed)
            for c, r in measured.items()
            if (c.part, c.step_rate) == (part, rate)
        )
        pace = f"paced at {rate:g} steps/s" if rate else "as fast as it goes"
        title = f"CPU of the server per streamed token, {_protocol(is_http2)}, {pace}"
        # On HTTP/2 the same number of streams may be on one connection or on many: no line goes through that
        plot = None if is_http2 else Plot("streams", "CPU us/token", "server")
        columns = ("server", "streams", "connections", "tokens/s", *cpu, "CPU us/token", "failed")
        tables.append(Table(title, columns, rows, plot))
    if requests := [(c, r) for c, r in measured.items() if c.part == "requests"]:
        figures = tuple(
            (c.server, _protocol(c.is_http2), r.per_s, r.loop_us, r.others_us, r.cpu_us, r.num_failed)
            for c, r in requests
        )
        named = ("server", "protocol", "requests/s", *cpu, "CPU us/request", "failed")
        tables.append(Table(f"GET /health, {NUM_REQUESTS_AT_ONCE} under way", named, figures))
    return tables


def _protocol(is_http2: bool) -> str:
    return "HTTP/2" if is_http2 else "HTTP/1.1"


def _odd(value: str) -> int:
    number = int(value)
    if number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{number} has no middle: give an odd number")
    return number


def _measure(arguments: argparse.Namespace) -> Found:
    measured = measure_all(plan_cases(arguments), arguments.repeats)
    if not measured:
        raise CannotRun("No server got through.", "run one alone and look")
    config = {"parts": list(arguments.parts), "tokens": arguments.tokens, "repeats": arguments.repeats}
    runs = [{"case": msgspec.to_builtins(case), **msgspec.to_builtins(found)} for case, found in measured.items()]
    return Found(result_tables(measured), config, {"runs": runs})


FLAGS = (
    Flag("--parts", PARTS, "of all", more={"nargs": "+", "choices": PARTS}),
    Flag("--servers", tuple(SERVERS), "to compare", more={"nargs": "+", "choices": tuple(SERVERS)}),
    Flag("--streams", (), "only cases of so many", (1, 64), {"nargs": "+", "type": int}),
    Flag("--tokens", 200_000, "per run, over all streams", 6_400),
    Flag("--step-rate", (0.0, 100.0), "steps/s; 0: unpaced", (0.0,), {"nargs": "+", "type": float}),
    Flag("--repeats", 3, "odd; the median is shown", 1, {"type": _odd}),
)


main = bench("frontend", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
