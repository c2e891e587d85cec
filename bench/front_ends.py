"""The servers that bench/frontend.py compares, and what one run of each gives: processes, CPU per token and request."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import msgspec

from bench.load_run import CannotRun
from bench.process_cpu import CpuTimes, busiest, cpu_times
from bench.reader import Came, StreamLoad, drain
from bench.request_rate import RequestLoad, ask, latencies_s
from bench.server_process import free_port, running

SERVERS = {
    "steploop": ("bench.null_server",),
    "FastAPI + uvicorn": ("bench.asgi_peers", "--server", "uvicorn"),
    "uvicorn with h11": ("bench.asgi_peers", "--server", "uvicorn-h11"),
    "FastAPI + hypercorn": ("bench.asgi_peers", "--server", "hypercorn"),
    "FastAPI + granian": ("bench.asgi_peers", "--server", "granian"),
    "uvloop, prepared bytes": ("bench.floor_server",),
}
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


@dataclass(frozen=True, slots=True)
class RequestCase:
    """Plain requests, `num_at_once` under way."""

    server: str
    is_http2: bool
    num_at_once: int
    duration_s: float

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
    errors = subprocess.DEVNULL if name != "steploop" else None
    with running(command, port, errors=errors) as pid:
        yield pid, port


def measure(case: Case) -> Measured:
    """Start the server, warm it up, watch it idle, load it.

    Raises:
        CannotRun: the server did not come up, or answered nothing.
    """
    step_rate = 0.0 if isinstance(case, RequestCase) else case.step_rate
    with running_server(case.server, step_rate) as (pid, port):
        if isinstance(case, StreamCase):
            return _measure_streams(case, pid, port)
        if isinstance(case, RequestCase):
            return _measure_requests(case, pid, port)
        return _measure_health(case, pid, port)


def _measure_streams(case: StreamCase, pid: int, port: int) -> Measured:
    drain(_load_of(case, port, WARM_UP_TOKENS))
    pid = busiest(pid)
    idle = _idle(pid)
    before = cpu_times(pid)
    came = drain(_load_of(case, port, case.num_tokens))
    return _per_unit(cpu_times(pid) - before, idle, came)


def _load_of(case: StreamCase, port: int, num_tokens: int) -> StreamLoad:
    return StreamLoad(port, case.is_http2, case.num_connections, case.num_streams, num_tokens)


def _measure_requests(case: RequestCase, pid: int, port: int) -> Measured:
    ask(RequestLoad(port, case.is_http2, case.num_at_once, WARM_UP_S))
    pid = busiest(pid)
    idle = _idle(pid)
    before = cpu_times(pid)
    answered = ask(RequestLoad(port, case.is_http2, case.num_at_once, case.duration_s))
    return _per_unit(cpu_times(pid) - before, idle, answered)


def _measure_health(case: HealthCase, pid: int, port: int) -> Measured:
    """The streams are read by a process of their own: what is timed here must not wait for that."""
    num_tokens = int(case.step_rate * (case.duration_s + 2 * WARM_UP_S))
    load = StreamLoad(port, False, case.num_streams, case.num_streams, num_tokens)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        streams = pool.submit(drain, load)
        time.sleep(WARM_UP_S)
        before = cpu_times(pid)
        latencies = sorted(1e3 * latency_s for latency_s in latencies_s(port, case.duration_s))
        used = cpu_times(pid) - before
        came = streams.result()
    share = case.duration_s / came.duration_s  # of the streams' time, in which the CPU was measured
    meanwhile = msgspec.structs.replace(came, num_done=round(came.num_done * share), duration_s=case.duration_s)
    measured = _per_unit(used, CpuTimes(0.0, 0.0, 0.0, 0.0), meanwhile)
    return msgspec.structs.replace(measured, latencies_ms=tuple(latencies))


def _idle(pid: int) -> CpuTimes:
    before = cpu_times(pid)
    time.sleep(IDLE_S)
    return cpu_times(pid) - before


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
