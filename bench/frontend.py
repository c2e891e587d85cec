"""CPU per streamed token of the whole front end, beside other servers: `python -m bench.frontend`.

Each server runs in a process of its own with a null model: one token per step for each of its streams, paced by
--step-rate or, unpaced, as soon as the last step is delivered. The client reads and does next to nothing
(raw_clients.py). What counts is the server's CPU time between the first request and the last byte, less what the idle
server takes; the thread of the event loop is told apart from the others (steploop's engine thread plans every step; the
peers have no engine to speak of). Plain requests are GET /health, which the peers answer below FastAPI. The servers
take turns within each repetition, and the repetition with the median CPU is shown.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import msgspec

from bench.kit import CpuTimes, Flag, Found, busiest, cpu_times, free_port, run_bench, running
from bench.load import CannotRun
from bench.raw_clients import Came, RequestLoad, StreamLoad, ask, drain, latencies_s
from bench.results import Plot, Table, percentile

SERVERS = {
    "steploop": ("bench.null_server",),
    "FastAPI + uvicorn": ("bench.front_peers", "--server", "uvicorn"),
    "uvicorn with h11": ("bench.front_peers", "--server", "uvicorn-h11"),
    "FastAPI + hypercorn": ("bench.front_peers", "--server", "hypercorn"),
    "FastAPI + granian": ("bench.front_peers", "--server", "granian"),
    "uvloop, prepared bytes": ("bench.front_peers", "--server", "floor"),
}
PARTS = ("http1", "http2", "requests", "health")
HTTP1_SERVERS = ("steploop", "FastAPI + uvicorn", "uvloop, prepared bytes")
HTTP2_SERVERS = ("steploop", "FastAPI + hypercorn", "FastAPI + granian")
REQUEST_SERVERS = {False: ("steploop", "uvicorn with h11", "FastAPI + uvicorn"), True: HTTP2_SERVERS}
HTTP1_STREAMS = ((1, 1), (64, 64), (256, 256))  # connections, streams
HTTP2_STREAMS = ((1, 1), (1, 16), (1, 64), (1, 256), (4, 256), (16, 256))
MAX_TOKENS_PER_STREAM = 16_000  # the null model's context has room for them
PACED_S = 8.0
NUM_REQUESTS_AT_ONCE = 32
HEALTH_STREAMS, HEALTH_STEP_RATE = 256, 100.0
WARM_UP_TOKENS = 50  # per stream
WARM_UP_S = 1.0  # of plain requests
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamCase:
    """`num_streams` at once over `num_connections`, `num_tokens` each. step_rate 0: as fast as it goes."""

    server: str
    is_http2: bool
    num_connections: int
    num_streams: int
    num_tokens: int
    step_rate: float

    def __str__(self) -> str:
        pace = f"{self.step_rate:g} steps/s" if self.step_rate else "unpaced"
        return f"{self.server}, {self.num_streams} streams on {self.num_connections}, {pace}"

    def load(self, port: int, num_tokens: int) -> StreamLoad:
        return StreamLoad(port, self.is_http2, self.num_connections, self.num_streams, num_tokens)


@dataclass(frozen=True, slots=True)
class RequestCase:
    """Plain requests, `num_at_once` under way."""

    server: str
    is_http2: bool
    num_at_once: int
    duration_s: float
    step_rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.server}, plain requests over {'HTTP/2' if self.is_http2 else 'HTTP/1.1'}"


@dataclass(frozen=True, slots=True)
class HealthCase:
    """GET /health, one after the other, while streams run."""

    server: str
    num_streams: int
    step_rate: float
    duration_s: float

    def __str__(self) -> str:
        return f"{self.server}, /health beside {self.num_streams} streams"


Case = StreamCase | RequestCase | HealthCase


class Measured(msgspec.Struct, frozen=True):
    """One run: microseconds of CPU per token or request, less the idle share, and how fast they came.

    Args:
        user_us, system_us: of ticks of 10 ms, so coarse in short runs; loop_us and others_us are exact.
        latencies_ms: of a HealthCase, in ascending order.
    """

    cpu_us: float
    user_us: float
    system_us: float
    loop_us: float
    others_us: float
    per_s: float
    num_done: int
    num_failed: int
    client_cpu: float
    latencies_ms: tuple[float, ...] = ()


@contextlib.contextmanager
def running_server(name: str, step_rate: float) -> Iterator[tuple[int, int]]:
    """A server on a free loopback port, ended by its process id: (pid, port).

    Raises:
        CannotRun: it did not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", *SERVERS[name], "--port", str(port), "--step-rate", str(step_rate)]
    # Ready once /v1/models answers: then the model is loaded, too. Hypercorn tells at length of clients that leave.
    with running(command, port, errors=subprocess.DEVNULL if name != "steploop" else None) as pid:
        yield pid, port


def measure(case: Case) -> Measured:
    """Start the server, warm it up, watch it idle, load it.

    Raises:
        CannotRun: the server did not come up, or answered nothing.
    """
    with running_server(case.server, case.step_rate) as (pid, port):
        if isinstance(case, HealthCase):
            return _measure_health(case, pid, port)

        def load(is_warm_up: bool) -> Came:
            if isinstance(case, StreamCase):
                return drain(case.load(port, WARM_UP_TOKENS if is_warm_up else case.num_tokens))
            return ask(RequestLoad(port, case.is_http2, case.num_at_once, WARM_UP_S if is_warm_up else case.duration_s))

        load(is_warm_up=True)
        pid = busiest(pid)
        before = cpu_times(pid)
        time.sleep(IDLE_S)
        idle, before = cpu_times(pid) - before, cpu_times(pid)
        came = load(is_warm_up=False)
        return _per_unit(cpu_times(pid) - before, idle, came)


def _measure_health(case: HealthCase, pid: int, port: int) -> Measured:
    """The streams are read by a process of their own: what is timed here must not wait for that."""
    num_tokens = int(case.step_rate * (case.duration_s + 2 * WARM_UP_S))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        streams = pool.submit(drain, StreamLoad(port, False, case.num_streams, case.num_streams, num_tokens))
        time.sleep(WARM_UP_S)
        before = cpu_times(pid)
        latencies = sorted(1e3 * latency_s for latency_s in latencies_s(port, case.duration_s))
        used = cpu_times(pid) - before
        came = streams.result()
    share = case.duration_s / came.duration_s  # of the streams' time, in which the CPU was measured
    meanwhile = msgspec.structs.replace(came, num_done=round(came.num_done * share), duration_s=case.duration_s)
    measured = _per_unit(used, CpuTimes(0.0, 0.0, 0.0, 0.0), meanwhile)
    return msgspec.structs.replace(measured, latencies_ms=tuple(latencies))


def _per_unit(used: CpuTimes, idle: CpuTimes, came: Came) -> Measured:
    if not came.num_done:
        raise CannotRun(f"The server answered nothing; {came.num_failed} failed.", "run it alone and look")

    def us(used_s: float, idle_s: float) -> float:
        return (used_s - idle_s / IDLE_S * came.duration_s) / came.num_done * 1e6

    return Measured(
        cpu_us=us(used.total_s, idle.total_s),
        user_us=us(used.user_s, idle.user_s),
        system_us=us(used.system_s, idle.system_s),
        loop_us=us(used.main_s, idle.main_s),
        others_us=us(used.other_s, idle.other_s),
        per_s=came.num_done / came.duration_s,
        num_done=came.num_done,
        num_failed=came.num_failed,
        client_cpu=came.client_cpu,
    )


def plan_cases(arguments: argparse.Namespace) -> list[Case]:
    """What is to be measured, part by part; of servers that were asked for."""
    duration_s = 0.5 if arguments.quick else 4.0
    by_part: dict[str, list[Case]] = {
        "http1": _stream_cases(arguments, False, HTTP1_STREAMS, HTTP1_SERVERS),
        "http2": _stream_cases(arguments, True, HTTP2_STREAMS, HTTP2_SERVERS),
        "requests": [
            RequestCase(server, is_http2, NUM_REQUESTS_AT_ONCE, duration_s)
            for is_http2, servers in REQUEST_SERVERS.items()
            for server in servers
        ],
        "health": [
            HealthCase(server, HEALTH_STREAMS, HEALTH_STEP_RATE, 2.5 * duration_s)
            for server in ("steploop", "FastAPI + uvicorn")
        ],
    }
    return [case for part in arguments.parts for case in by_part[part] if case.server in arguments.servers]


def _stream_cases(
    arguments: argparse.Namespace, is_http2: bool, sizes: Sequence[tuple[int, int]], servers: Sequence[str]
) -> list[Case]:
    def num_tokens(num_streams: int, step_rate: float) -> int:
        most = PACED_S * step_rate if step_rate else MAX_TOKENS_PER_STREAM
        return max(1, min(int(arguments.tokens) // num_streams, MAX_TOKENS_PER_STREAM, int(most)))

    return [
        StreamCase(server, is_http2, num_connections, num_streams, num_tokens(num_streams, step_rate), step_rate)
        for step_rate in arguments.step_rate
        for num_connections, num_streams in sizes
        if not arguments.streams or num_streams in arguments.streams
        for server in servers
    ]


def measure_all(cases: Sequence[Case], num_repeats: int) -> dict[Case, Measured]:
    """Each case `num_repeats` times, in turn, so that a disturbance meets all servers alike; of each the median.

    A case that a server did not get through is said, and left out.
    """
    runs: dict[Case, list[Measured]] = {case: [] for case in cases}
    for number in range(num_repeats):
        for case in tuple(runs):
            try:
                measured = measure(case)
            except CannotRun as error:
                print(f"{case}: left out. {error.cause}", file=sys.stderr)
                del runs[case]
                continue
            runs[case].append(measured)
            told = f"{measured.loop_us:.2f} us on the loop, {measured.cpu_us:.2f} in all, {measured.per_s:,.0f}/s"
            print(f"{number + 1}/{num_repeats} {case}: {told}, client {measured.client_cpu:.0%}", file=sys.stderr)
    return {case: median_run(found) for case, found in runs.items()}


def median_run(runs: Sequence[Measured]) -> Measured:
    """The one in the middle, by CPU, of an odd number."""
    assert len(runs) % 2, "of an even number none is in the middle"
    return sorted(runs, key=lambda run: run.cpu_us)[len(runs) // 2]


def result_tables(measured: dict[Case, Measured]) -> list[Table]:
    """One table per protocol and pace, one of plain requests, one of /health."""
    streams = {case: run for case, run in measured.items() if isinstance(case, StreamCase)}
    tables = []
    for is_http2, step_rate in sorted({(case.is_http2, case.step_rate) for case in streams}):
        rows = tuple(
            (c.server, c.num_streams, c.num_connections, r.per_s, r.loop_us, r.others_us, r.cpu_us, r.num_failed)
            for c, r in streams.items()
            if (c.is_http2, c.step_rate) == (is_http2, step_rate)
        )
        pace = f"paced at {step_rate:g} steps/s" if step_rate else "as fast as it goes"
        title = f"CPU of the server per streamed token, {_protocol(is_http2)}, {pace}"
        columns = ("server", "streams", "connections", "tokens/s", "loop thread", "other threads", "CPU us/token")
        # On HTTP/2 the same number of streams is there on one connection and on many: no line goes through that
        plot = None if is_http2 else Plot("streams", "CPU us/token", "server")
        tables.append(Table(title, (*columns, "failed"), rows, plot))
    requests = tuple(
        (c.server, _protocol(c.is_http2), r.per_s, r.loop_us, r.others_us, r.client_cpu, r.num_failed)
        for c, r in measured.items()
        if isinstance(c, RequestCase)
    )
    if requests:
        columns = ("server", "protocol", "requests/s", "loop us/request", "other threads", "client CPU", "failed")
        tables.append(Table(f"Plain requests, {NUM_REQUESTS_AT_ONCE} under way", columns, requests))
    health = tuple(
        (c.server, len(ms), *(percentile(ms, q) for q in (50.0, 99.0, 100.0)), r.loop_us, r.per_s, r.num_failed)
        for c, r in measured.items()
        if isinstance(c, HealthCase)
        for ms in [r.latencies_ms]
    )
    if health:
        columns = ("server", "requests", "p50 ms", "p99 ms", "max ms", "loop us/token", "tokens/s")
        title = f"GET /health beside {HEALTH_STREAMS} streams at {HEALTH_STEP_RATE:g} steps/s"
        tables.append(Table(title, (*columns, "failed streams"), health))
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
    runs = [
        {"case": msgspec.to_builtins(case), **msgspec.to_builtins(run), "latencies_ms": []}
        for case, run in measured.items()
    ]
    return Found(result_tables(measured), config, {"runs": runs})


FLAGS = (
    Flag("--parts", PARTS, "of all", more={"nargs": "+", "choices": PARTS}),
    Flag("--servers", tuple(SERVERS), "to compare", more={"nargs": "+", "choices": tuple(SERVERS)}),
    Flag("--streams", (), "only cases of so many", (1, 64), {"nargs": "+", "type": int}),
    Flag("--tokens", 200_000, "per run, over all streams", 6_400),
    Flag("--step-rate", (0.0, 100.0), "steps/s; 0: unpaced", (0.0,), {"nargs": "+", "type": float}),
    Flag("--repeats", 3, "odd; the median is shown", 1, {"type": _odd}),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("frontend", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
