"""Load generator for any server of OpenAI's chat or completions: `steploop bench serve`, `python -m bench.load`.

Closed loop (--concurrency N): N clients, each sends its next request when its last one has ended. Latencies then say
what N patient clients see; a slow server is asked less.

Open loop (--rate R): requests arrive by a seeded Poisson process whatever the server does, and every latency counts
from the arrival that was *intended*: a request that waits for a stalled server, or for a free connection of ours, waits
on the server's account. So there is no coordinated omission; `send delay` shows how much of it was ours.

Requests always stream. TTFT ends with the first event that bears text, inter-token times lie between such events of one
stream. Only loopback addresses are asked, unless --allow-remote says that the load is welcome there.
"""

import argparse
import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from bench.load_run import ENDPOINTS, CannotRun, LoadConfig, LoadResult, TlsTrust, run_load
from bench.measures import Distribution
from bench.prompts import DEFAULT_PROMPT
from bench.results import RESULTS_DIR, Table, command_line, print_tables, write_result
from core.errors import ExitCode
from server.cli import CommandParser
from server.commands.tls_trust import add_trust_flags, check_trust_flags
from server.values import with_scheme

DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def main(argv: Sequence[str]) -> int:
    """Run the load generator.

    Returns: an ExitCode: UNREACHABLE where requests failed.

    Raises:
        CannotRun: nothing could be measured, or its result could not be written.
        StartupError: the flags are not understood.
    """
    arguments = _parser().parse_args(argv)
    config = _config_of(arguments)
    if arguments.json is not None:
        check_result_file(arguments.json)
    try:
        result = run_load(config)
    except KeyboardInterrupt:
        print("interrupted, nothing written", file=sys.stderr)
        raise
    tables = result_tables(config, result)
    if result.num_done:  # what nothing was measured of is no table of dashes
        print_tables(tables)
    else:
        print(f"none of {result.num_failed} requests succeeded", file=sys.stderr)
    for kind, message in result.failure_examples.items():
        print(f"{kind}, for example: {message}", file=sys.stderr)
    if arguments.json is not None:
        details = {"result": msgspec.to_builtins(result)}
        write_result(
            arguments.json, "load", command_line("steploop bench serve", argv), tables, config.shown(), details
        )
        print(f"written to {arguments.json}")
    return ExitCode.UNREACHABLE if result.num_failed else ExitCode.OK


def _clients(number: int) -> str:
    return f"{number} client" if number == 1 else f"{number} clients"


def result_tables(config: LoadConfig, result: LoadResult) -> list[Table]:
    """What is shown and written: one row of throughput, a row per latency, a row per kind of failure."""
    load = f"{config.rate:g} requests/s, Poisson" if config.rate is not None else _clients(config.concurrency or 1)
    throughput = Table(
        "Throughput",
        ("load", "requests", "failed", "duration s", "requests/s", "tokens", "tokens/s", "prompt tokens", "client CPU"),
        (
            (
                load,
                result.num_done + result.num_failed,
                result.num_failed,
                result.duration_s,
                result.requests_per_s,
                result.num_tokens,
                result.tokens_per_s,
                result.num_prompt_tokens,
                f"{result.client_cpu:.0%} of a core",
            ),
        ),
    )
    latencies = Table(
        "Latency, ms",
        ("measure", "count", "mean", "p50", "p95", "p99", "max"),
        (
            _latency_row("time to first token", result.ttft_s),
            _latency_row("inter-token", result.inter_token_s),
            _latency_row("end to end", result.end_to_end_s),
            _latency_row("send delay", result.send_delay_s),
        ),
    )
    if not result.failures:
        return [throughput, latencies]
    return [throughput, latencies, Table("Failures", ("kind", "requests"), tuple(sorted(result.failures.items())))]


def _latency_row(name: str, values: Distribution) -> tuple[str | int | float | None, ...]:
    figures = (values.mean, values.p50, values.p95, values.p99, values.max)
    return (name, values.count, *(None if value is None else value * 1e3 for value in figures))


def loopback_address(url: str, is_remote_allowed: bool) -> tuple[str, int]:
    """The address and port to connect to.

    Raises:
        CannotRun: not a server's URL, no such host, or one that is not this machine and was not allowed.
    """
    parts = _parts_of(url)
    host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotRun(f"{host} is no known host: {error}.", "check --url") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # servers listen on 127.0.0.1 rather than on ::1
    address = str(found[0][4][0])
    if not is_remote_allowed and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise CannotRun(
            f"{host} is {address}, another machine, and a load test can be taken for an attack.",
            "--allow-remote, if its owner agrees",
            ExitCode.USAGE,
        )
    return address, port


def _parts_of(url: str) -> SplitResult:
    """
    Raises:
        CannotRun: not a server's URL.
    """
    try:
        parts = urlsplit(with_scheme(url))
        is_port = parts.port is None or parts.port > 0  # reading it is what raises
    except ValueError as error:
        raise CannotRun(f"{url}: {error}.", f"give --url like {DEFAULT_URL}", ExitCode.USAGE) from error
    is_host = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and is_port
    if not is_host or parts.path.strip("/") not in ("", "v1") or parts.query:
        raise CannotRun(f"{url} is not http(s)://HOST:PORT.", f"give --url like {DEFAULT_URL}", ExitCode.USAGE)
    return parts


def _tls_of(arguments: argparse.Namespace) -> TlsTrust | None:
    parts = _parts_of(arguments.url)
    check_trust_flags(arguments)
    if parts.scheme != "https":
        return None
    return TlsTrust(server_name=parts.hostname or "", ca_file=arguments.ca_file, is_verified=not arguments.takes_any)


def check_result_file(path: Path) -> None:
    """Before the run, which may be long: a result that cannot be written is a run for nothing.

    Raises:
        CannotRun: no file can be written there. Directories are nobody's to make who only asked for a file; but for
            bench/results, where results are expected.
    """
    directory = path.parent
    if path.is_dir():
        cause, fix = f"--json {path} is a directory", f"name a file in it: --json {path / 'load.json'}"
    elif not directory.is_dir() and directory.resolve() != RESULTS_DIR.resolve():
        cause, fix = (
            f"--json {path}: there is no directory {directory}",
            f"make it first: mkdir -p {shlex.quote(str(directory))}",
        )
    elif directory.is_dir() and not os.access(path if path.exists() else directory, os.W_OK):
        cause, fix = f"--json {path} cannot be written", "name a file in a directory that you may write to"
    else:
        return
    raise CannotRun(cause, fix, ExitCode.USAGE)


def _config_of(arguments: argparse.Namespace) -> LoadConfig:
    host, port = loopback_address(arguments.url, arguments.allow_remote)
    is_closed = arguments.rate is None
    return LoadConfig(
        host=host,
        port=port,
        tls=_tls_of(arguments),
        endpoint=arguments.endpoint,
        model=arguments.model,
        api_key=arguments.api_key or os.environ.get("STEPLOOP_API_KEY"),
        concurrency=(arguments.concurrency or 1) if is_closed else None,
        rate=arguments.rate,
        num_requests=arguments.requests,
        duration_s=arguments.duration,
        prompt=arguments.prompt,
        prompt_file=arguments.prompt_file,
        prompt_tokens=arguments.prompt_tokens,
        max_tokens=arguments.max_tokens,
        ignore_eos=arguments.ignore_eos,
        temperature=arguments.temperature,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="steploop bench serve", description="Load an OpenAI-compatible server and measure its answers."
    )
    parser.add_argument("--url", default=DEFAULT_URL, help="default: %(default)s")
    parser.add_argument("--endpoint", choices=tuple(ENDPOINTS), default="chat")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key", help="default: $STEPLOOP_API_KEY")
    parser.add_argument("--allow-remote", action="store_true", help="ask a server that is not on this machine")
    add_trust_flags(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_whole, metavar="N", help="closed loop of N clients (default: 1)")
    load.add_argument("--rate", type=_positive, metavar="R", help="open loop: R requests/s, Poisson")
    parser.add_argument("--requests", type=_whole, default=100, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--duration", type=_positive, default=600.0, metavar="S", help="at most (default: %(default)s)")
    parser.add_argument("--timeout", type=_positive, default=300.0, metavar="S", help="of one request")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=DEFAULT_PROMPT, help="default: %(default)r")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt per line, in turn")
    prompt.add_argument("--prompt-tokens", type=_whole, metavar="N", help="random text of about N tokens each")
    parser.add_argument("--max-tokens", type=_whole, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--ignore-eos", action="store_true", help="generate --max-tokens, whatever the model says")
    parser.add_argument("--temperature", type=float, help="default: the server's")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and random prompts (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return parser


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    from server.cli import main as run_command

    sys.exit(run_command(["bench", "serve", *sys.argv[1:]]))
