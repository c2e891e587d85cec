"""CPU per streamed token of the whole front end, beside FastAPI + uvicorn and the floor: `python -m bench.frontend`.

Each server runs in a process of its own with a null model: one token per step for each of its streams, as fast as it
goes or paced by --step-rate. The client is this process. What counts is the server's user and system time between the
first request and the last byte, less what the idle server takes, over the tokens streamed; the thread of the event loop
is told apart from the others (steploop's engine thread plans every step; the peers have no engine to speak of). The
servers take turns within each repetition, and the repetition with the median CPU is shown.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.load_run import CannotRun, LoadConfig, LoadResult, run_load
from bench.peer import MODEL
from bench.process_cpu import CpuTimes, cpu_times
from bench.results import Plot, Table, command_line, print_tables, write_result
from bench.server_process import free_port, running

SERVERS = {
    "steploop": "bench.null_server",
    "FastAPI + uvicorn": "bench.fastapi_peer",
    "uvloop, prepared bytes": "bench.floor_server",
}
MAX_TOKENS_PER_STREAM = 16_000  # the null model's context has room for them
WARM_UP_TOKENS = 50  # per stream
IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: `num_streams` at once, `num_tokens` each. step_rate 0: as fast as it goes."""

    server: str
    num_streams: int
    num_tokens: int
    step_rate: float


class Measured(msgspec.Struct, frozen=True):
    """Microseconds of CPU per streamed token, less the idle share; and how fast they came.

    Args:
        user_us, system_us: of ticks of 10 ms, so coarse in short runs; loop_us and others_us are exact.
    """

    cpu_us: float
    user_us: float
    system_us: float
    loop_us: float
    others_us: float
    events_per_s: float
    num_events: int
    num_tokens: int
    client_cpu: float
    num_failed: int


@contextlib.contextmanager
def running_server(module: str, step_rate: float) -> Iterator[tuple[int, int]]:
    """A server of ours on a free loopback port, ended by its process id: (pid, port).

    Raises:
        CannotRun: it did not come up.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "--port", str(port), "--step-rate", str(step_rate)]
    with running(command, port) as pid:  # ready once /v1/models answers: then the model is loaded, too
        yield pid, port


def measure(case: Case) -> Measured:
    """Start the server, warm it up, watch it idle, load it.

    Raises:
        CannotRun: the server did not come up, or answered nothing.
    """
    with running_server(SERVERS[case.server], case.step_rate) as (pid, port):
        run_load(_load_of(case, port, WARM_UP_TOKENS))
        before_idle = cpu_times(pid)
        time.sleep(IDLE_S)
        before = cpu_times(pid)
        result = run_load(_load_of(case, port, case.num_tokens))
        used = cpu_times(pid) - before
        return _per_token(used, before - before_idle, result)


def _load_of(case: Case, port: int, num_tokens: int) -> LoadConfig:
    return LoadConfig(
        host="127.0.0.1",
        port=port,
        model=MODEL,
        concurrency=case.num_streams,
        num_requests=case.num_streams,
        max_tokens=num_tokens,
        ignore_eos=True,
    )


def _per_token(used: CpuTimes, idle: CpuTimes, result: LoadResult) -> Measured:
    if not result.num_tokens:
        raise CannotRun(f"The server streamed nothing: {result.failure_examples}.", "run it alone and look")

    def us(used_s: float, idle_s: float) -> float:
        return (used_s - idle_s / IDLE_S * result.duration_s) / result.num_tokens * 1e6

    return Measured(
        cpu_us=us(used.total_s, idle.total_s),
        user_us=us(used.user_s, idle.user_s),
        system_us=us(used.system_s, idle.system_s),
        loop_us=us(used.main_s, idle.main_s),
        others_us=us(used.other_s, idle.other_s),
        events_per_s=result.num_events / result.duration_s,
        num_events=result.num_events,
        num_tokens=result.num_tokens,
        client_cpu=result.client_cpu,
        num_failed=result.num_failed,
    )


def measure_all(cases: Sequence[Case], num_repeats: int) -> dict[Case, Measured]:
    """Each case `num_repeats` times, in turn, so that a disturbance meets all servers alike; of each the median."""
    runs: dict[Case, list[Measured]] = {case: [] for case in cases}
    for number in range(num_repeats):
        for case in cases:
            measured = measure(case)
            runs[case].append(measured)
            pace = f"{case.step_rate:g} steps/s" if case.step_rate else "unpaced"
            print(
                f"{number + 1}/{num_repeats} {case.server}, {case.num_streams} streams, {pace}: "
                f"{measured.cpu_us:.1f} us per token, {measured.events_per_s:,.0f} events/s",
                file=sys.stderr,
            )
    return {case: _median_run(found) for case, found in runs.items()}


def _median_run(runs: Sequence[Measured]) -> Measured:
    middle = statistics.median_low(run.cpu_us for run in runs)
    return next(run for run in runs if run.cpu_us == middle)


def result_tables(measured: dict[Case, Measured]) -> list[Table]:
    """One table per pace."""
    columns = ("server", "streams", "events/s", "CPU us/token", "loop thread", "other threads", "failed")
    tables = []
    for step_rate in sorted({case.step_rate for case in measured}):
        pace = f"paced at {step_rate:g} steps/s" if step_rate else "as fast as it goes"
        rows = tuple(
            (
                case.server,
                case.num_streams,
                run.events_per_s,
                run.cpu_us,
                run.loop_us,
                run.others_us,
                run.num_failed,
            )
            for case, run in measured.items()
            if case.step_rate == step_rate
        )
        plot = Plot("streams", "CPU us/token", "server")
        tables.append(Table(f"CPU of the server per streamed token, {pace}", columns, rows, plot))
    return tables


def plan_cases(arguments: argparse.Namespace) -> list[Case]:
    """Servers by streams by paces; paced runs are as long as unpaced ones have tokens, at most ten seconds."""
    cases = []
    for step_rate in arguments.step_rate:
        for num_streams in arguments.streams:
            num_tokens = min(arguments.tokens // num_streams, MAX_TOKENS_PER_STREAM)
            if step_rate:
                num_tokens = min(num_tokens, int(10 * step_rate))
            for server in arguments.servers:
                cases.append(Case(server, num_streams, max(1, num_tokens), step_rate))
    return cases


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 2 when a server did not come up."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.frontend", description=__doc__)
    parser.add_argument("--servers", nargs="+", choices=tuple(SERVERS), default=tuple(SERVERS))
    parser.add_argument("--streams", nargs="+", type=int, default=(1, 64, 256))
    parser.add_argument("--tokens", type=int, default=200_000, help="per run, over all streams (default: %(default)s)")
    parser.add_argument("--step-rate", nargs="+", type=float, default=(0.0, 50.0), help="steps/s; 0: unpaced")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args(argv)
    cases = plan_cases(arguments)
    try:
        measured = measure_all(cases, arguments.repeats)
    except CannotRun as error:
        print(f"bench.frontend: {error.cause}\nFix: {error.fix}", file=sys.stderr)
        return 2
    tables = result_tables(measured)
    print_tables(tables)
    if arguments.json is not None:
        config = {"tokens": arguments.tokens, "repeats": arguments.repeats}
        details = {
            "runs": [{"case": msgspec.to_builtins(case), **msgspec.to_builtins(run)} for case, run in measured.items()]
        }
        write_result(
            arguments.json, "frontend", command_line("python -m bench.frontend", argv), tables, config, details
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
