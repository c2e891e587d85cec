"""CPU per streamed token of the whole front end, beside other servers: `python -m bench.frontend`.

Each server runs in a process of its own with a null model: one token per step for each of its streams, paced by
--step-rate or, unpaced, as soon as the last step is delivered. The client reads and does next to nothing (reader.py).
What counts is the server's CPU time between the first request and the last byte, less what the idle server takes; the
thread of the event loop is told apart from the others (steploop's engine thread plans every step; the peers have no
engine to speak of). Plain requests are GET /health, which the peers answer below FastAPI. The servers take turns within
each repetition, and the repetition with the median CPU is shown.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.front_ends import SERVERS, Case, HealthCase, Measured, RequestCase, StreamCase, measure
from bench.load_run import CannotRun
from bench.measures import percentile
from bench.results import Plot, Table, command_line, print_tables, write_result

PARTS = ("http1", "http2", "requests", "health")
HTTP1_SERVERS = ("steploop", "FastAPI + uvicorn", "uvloop, prepared bytes")
HTTP2_SERVERS = ("steploop", "FastAPI + hypercorn", "FastAPI + granian")
REQUEST_SERVERS = {
    False: ("steploop", "uvicorn with h11", "FastAPI + uvicorn"),
    True: ("steploop", "FastAPI + hypercorn", "FastAPI + granian"),
}
HTTP1_STREAMS = (1, 64, 256)
HTTP2_STREAMS = ((1, 1), (1, 16), (1, 64), (1, 256), (4, 256), (16, 256))  # connections, streams
MAX_TOKENS_PER_STREAM = 16_000  # the null model's context has room for them
PACED_S = 8.0
NUM_REQUESTS_AT_ONCE = 32
REQUESTS_S = 4.0
HEALTH_STREAMS, HEALTH_STEP_RATE, HEALTH_S = 256, 100.0, 10.0


def plan_cases(arguments: argparse.Namespace) -> list[Case]:
    """What is to be measured, part by part; of servers that were asked for."""
    cases: list[Case] = []
    for part in arguments.parts:
        if part == "http1":
            cases += _stream_cases(arguments, False, [(n, n) for n in HTTP1_STREAMS], HTTP1_SERVERS)
        elif part == "http2":
            cases += _stream_cases(arguments, True, HTTP2_STREAMS, HTTP2_SERVERS)
        elif part == "requests":
            cases += [
                RequestCase(server, is_http2, NUM_REQUESTS_AT_ONCE, REQUESTS_S)
                for is_http2, servers in REQUEST_SERVERS.items()
                for server in servers
            ]
        else:
            cases += [
                HealthCase(server, HEALTH_STREAMS, HEALTH_STEP_RATE, HEALTH_S)
                for server in ("steploop", "FastAPI + uvicorn")
            ]
    return [case for case in cases if case.server in arguments.servers]


def _stream_cases(
    arguments: argparse.Namespace, is_http2: bool, sizes: Sequence[tuple[int, int]], servers: Sequence[str]
) -> list[StreamCase]:
    cases = []
    for step_rate in arguments.step_rate:
        for num_connections, num_streams in sizes:
            if arguments.streams and num_streams not in arguments.streams:
                continue
            num_tokens = min(arguments.tokens // num_streams, MAX_TOKENS_PER_STREAM)
            if step_rate:
                num_tokens = min(num_tokens, int(PACED_S * step_rate))
            cases += [
                StreamCase(server, is_http2, num_connections, num_streams, max(1, num_tokens), step_rate)
                for server in servers
            ]
    return cases


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
            print(
                f"{number + 1}/{num_repeats} {case}: {measured.loop_us:.2f} us on the loop, "
                f"{measured.cpu_us:.2f} in all, {measured.per_s:,.0f}/s, client {measured.client_cpu:.0%}",
                file=sys.stderr,
            )
    return {case: median_run(found) for case, found in runs.items()}


def median_run(runs: Sequence[Measured]) -> Measured:
    """The one in the middle, by CPU, of an odd number."""
    assert len(runs) % 2, "of an even number none is in the middle"
    return sorted(runs, key=lambda run: run.cpu_us)[len(runs) // 2]


def result_tables(measured: dict[Case, Measured]) -> list[Table]:
    """One table per protocol and pace, one of plain requests, one of /health."""
    streams = {case: run for case, run in measured.items() if isinstance(case, StreamCase)}
    tables = [
        _stream_table(is_http2, step_rate, streams)
        for is_http2, step_rate in sorted({(case.is_http2, case.step_rate) for case in streams})
    ]
    requests = {case: run for case, run in measured.items() if isinstance(case, RequestCase)}
    if requests:
        tables.append(_request_table(requests))
    health = {case: run for case, run in measured.items() if isinstance(case, HealthCase)}
    if health:
        tables.append(_health_table(health))
    return tables


def _stream_table(is_http2: bool, step_rate: float, measured: dict[StreamCase, Measured]) -> Table:
    protocol = "HTTP/2" if is_http2 else "HTTP/1.1"
    pace = f"paced at {step_rate:g} steps/s" if step_rate else "as fast as it goes"
    rows = tuple(
        (
            case.server,
            case.num_streams,
            case.num_connections,
            run.per_s,
            run.loop_us,
            run.others_us,
            run.cpu_us,
            run.num_failed,
        )
        for case, run in measured.items()
        if (case.is_http2, case.step_rate) == (is_http2, step_rate)
    )
    columns = ("server", "streams", "connections", "tokens/s", "loop thread", "other threads", "CPU us/token", "failed")
    # On HTTP/2 the same number of streams is there on one connection and on many: no line goes through that
    plot = None if is_http2 else Plot("streams", "CPU us/token", "server")
    return Table(f"CPU of the server per streamed token, {protocol}, {pace}", columns, rows, plot)


def _request_table(measured: dict[RequestCase, Measured]) -> Table:
    rows = tuple(
        (
            case.server,
            "HTTP/2" if case.is_http2 else "HTTP/1.1",
            run.per_s,
            run.loop_us,
            run.others_us,
            run.client_cpu,
            run.num_failed,
        )
        for case, run in measured.items()
    )
    columns = ("server", "protocol", "requests/s", "loop us/request", "other threads", "client CPU", "failed")
    return Table(f"Plain requests, {NUM_REQUESTS_AT_ONCE} under way", columns, rows)


def _health_table(measured: dict[HealthCase, Measured]) -> Table:
    rows = tuple(
        (
            case.server,
            len(run.latencies_ms),
            *(percentile(run.latencies_ms, q) for q in (50.0, 99.0, 100.0)),
            run.loop_us,
            run.per_s,
            run.num_failed,
        )
        for case, run in measured.items()
    )
    columns = ("server", "requests", "p50 ms", "p99 ms", "max ms", "loop us/token", "tokens/s", "failed streams")
    title = f"GET /health beside {HEALTH_STREAMS} streams at {HEALTH_STEP_RATE:g} steps/s"
    return Table(title, columns, rows)


def _odd(value: str) -> int:
    number = int(value)
    if number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{number} has no middle: give an odd number")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 2 when no server got through."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.frontend", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--servers", nargs="+", choices=tuple(SERVERS), default=tuple(SERVERS))
    parser.add_argument("--streams", nargs="+", type=int, help="only cases of so many (default: all)")
    parser.add_argument("--tokens", type=int, default=200_000, help="per run, over all streams (default: %(default)s)")
    parser.add_argument("--step-rate", nargs="+", type=float, default=(0.0, 100.0), help="steps/s; 0: unpaced")
    parser.add_argument("--repeats", type=_odd, default=3, help="odd; the median is shown (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args(argv)
    cases = plan_cases(arguments)
    measured = measure_all(cases, arguments.repeats)
    if not measured:
        print("bench.frontend: no server got through.\nFix: run one alone and look", file=sys.stderr)
        return 2
    tables = result_tables(measured)
    print_tables(tables)
    if arguments.json is not None:
        config = {"parts": list(arguments.parts), "tokens": arguments.tokens, "repeats": arguments.repeats}
        details = {
            "runs": [{"case": msgspec.to_builtins(case), **_without_samples(run)} for case, run in measured.items()]
        }
        write_result(
            arguments.json, "frontend", command_line("python -m bench.frontend", argv), tables, config, details
        )
    return 0


def _without_samples(run: Measured) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(run)
    del fields["latencies_ms"]
    return fields


if __name__ == "__main__":
    sys.exit(main())
