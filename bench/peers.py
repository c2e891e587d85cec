"""The same weights and load through HTTP, one server after the other: `python -m bench.peers --model DIR`.

steploop, `transformers serve` with continuous batching, and llama.cpp's llama-server (`make peers` builds it). A server
that is not installed is said and left out. Compare only figures of one run on a quiet machine: the machine's ceilings
are measured first, and the share is of what they allow for this load (bench/work.py).

A fresh process for each part: closed loops of 1, 8 and 32 clients; a burst of 8 and Poisson arrivals at 0.7 of the
rate that 8 clients reached; 8 streams while a long prompt prefills; a client that leaves a long prefill.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from bench.kit import DidNotStart, free_port, running
from bench.limits import Limits, limit_tables, measure_limits
from bench.load import CannotRun, LoadConfig, LoadResult, run_load, run_on_fast_loop
from bench.mixed_load import Abandoned, Stalled, abandon_prefill, stall_streams
from bench.peer_servers import SERVERS, Missing, PeerServer, find_server
from bench.results import RESULTS_DIR, Plot, Table, command_line, print_tables, write_result
from bench.work import ModelWork, Speed, serving_limit_tokens_per_s, work_of
from core.errors import StartupError

T = TypeVar("T")

BF16_BYTES = 2
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 900.0
ARRIVAL_SHARE = 0.7  # of the rate that a closed loop reached
SHOWN_LOG_CHARS = 2_000
CLOSED, BURSTS, LONG, LEAVE = PARTS = ("closed", "bursts", "long", "leave")


@dataclass(frozen=True, slots=True)
class Load:
    """What every server is asked."""

    streams: tuple[int, ...] = (1, 8, 32)
    num_prompt: int = 253
    num_output: int = 64
    rounds: int = 4  # requests of each client, on average
    num_burst: int = 8
    num_bursts: int = 3
    num_arrivals: int = 24
    num_long: int = 4096

    @property
    def max_model_len(self) -> int:
        """Room for the long prompt, which is only about as long as asked, and for the streams beside it."""
        return 2 * max(self.num_long, 2048)


QUICK = Load(
    streams=(1, 2), num_prompt=80, num_output=4, rounds=1, num_burst=2, num_bursts=1, num_arrivals=2, num_long=300
)


class Bursts(msgspec.Struct, frozen=True):
    """Seconds.

    Args:
        prefill_all: until the last first token of a burst that asks for one token each: all its prompts computed.
        burst_ttft, steady_ttft: medians.
        steady_rate: requests per second that arrived.
    """

    prefill_all: float
    burst_ttft: float | None
    steady_ttft: float | None
    steady_rate: float


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did; None: that part failed, see failures."""

    closed: dict[int, LoadResult]  # by streams
    bursts: Bursts | None
    stalled: Stalled | None
    abandoned: Abandoned | None
    failures: tuple[str, ...]


class PeerBench:
    """One server under all loads."""

    def __init__(self, server: PeerServer, load: Load, log: IO[bytes], parts: Sequence[str] = PARTS) -> None:
        self._server = server
        self._parts = parts
        self._load = load
        self._log = log
        self._seed = 0
        self._failures: list[str] = []
        self._starts = True

    def measure(self) -> Answers:
        """Every part, in turn; a part that fails is written down, and the others go on, if the server starts at all."""
        closed = self._part(CLOSED, "closed loops", self._closed_loops) or {}
        eight = closed.get(self._load.num_burst)
        return Answers(
            closed=closed,
            bursts=self._part(BURSTS, "bursts", lambda port: self._bursts(port, eight)),
            stalled=self._part(LONG, "streams beside a long prompt", self._stall),
            abandoned=self._part(LEAVE, "a client that leaves", self._abandon),
            failures=tuple(self._failures),
        )

    def _part(self, part: str, name: str, measure: Callable[[int], T]) -> T | None:
        if not self._starts or part not in self._parts:
            return None
        print(f"{self._server.name}: {name}", file=sys.stderr)
        try:
            with self._running() as port:
                return measure(port)
        except CannotRun as error:
            self._starts = not isinstance(error, DidNotStart)
            self._failures.append(f"{self._server.name}, {name}: {error.cause}")
            print(f"{self._failures[-1]}\n{self._log_end()}", file=sys.stderr)
            return None

    @contextlib.contextmanager
    def _running(self) -> Iterator[int]:
        """A fresh process, warm: it has answered two clients at once."""
        port, server = free_port(), self._server
        command = server.command_at(port)
        with running(command, port, server.ready_path, START_TIMEOUT_S, server.environment, self._log):
            self._run(port, concurrency=2, num_requests=2, max_tokens=4)
            yield port

    def _closed_loops(self, port: int) -> dict[int, LoadResult]:
        found = {}
        for num_streams in self._load.streams:
            result = self._run(port, concurrency=num_streams, num_requests=num_streams * self._load.rounds)
            print(f"{self._server.name}: {num_streams} streams, {result.tokens_per_s:.1f} tokens/s", file=sys.stderr)
            found[num_streams] = result
        return found

    def _bursts(self, port: int, closed: LoadResult | None) -> Bursts:
        size = self._load.num_burst
        prefills, ttfts = [], []
        for _ in range(self._load.num_bursts):
            prefills.append(self._run(port, concurrency=size, num_requests=size, max_tokens=1).ttft_s.max or 0.0)
            ttfts.append(self._run(port, concurrency=size, num_requests=size).ttft_s.p50 or 0.0)
        closed = closed or self._run(port, concurrency=size, num_requests=size * self._load.rounds)
        rate = ARRIVAL_SHARE * closed.requests_per_s
        steady = self._run(port, rate=rate, num_requests=self._load.num_arrivals)
        return Bursts(statistics.median(prefills), statistics.median(ttfts), steady.ttft_s.p50, rate)

    def _stall(self, port: int) -> Stalled:
        config = self._config(port, concurrency=1)
        return run_on_fast_loop(stall_streams(config, self._load.num_burst, self._load.num_long))

    def _abandon(self, port: int) -> Abandoned:
        return run_on_fast_loop(abandon_prefill(self._config(port, concurrency=1), self._load.num_long))

    def _run(
        self,
        port: int,
        num_requests: int,
        concurrency: int | None = None,
        rate: float | None = None,
        max_tokens: int | None = None,
    ) -> LoadResult:
        config = self._config(port, concurrency, rate, num_requests, max_tokens)
        result = run_load(config)
        if result.num_failed:
            raise CannotRun(f"{result.num_failed} requests failed: {result.failure_examples}.", "look at it alone")
        return result

    def _config(
        self,
        port: int,
        concurrency: int | None = None,
        rate: float | None = None,
        num_requests: int = 1,
        max_tokens: int | None = None,
    ) -> LoadConfig:
        """Greedy, and no two runs on a server with the same prompts: none is found in a cache."""
        self._seed += 2  # a long prompt takes the next one: bench/mixed_load.py
        return LoadConfig(
            host="127.0.0.1",
            port=port,
            model=self._server.model,
            concurrency=concurrency,
            rate=rate,
            num_requests=num_requests,
            prompt_tokens=self._load.num_prompt,
            max_tokens=max_tokens or self._load.num_output,
            ignore_eos=self._server.ignores_eos,
            temperature=0.0,
            seed=self._seed,
            timeout_s=REQUEST_TIMEOUT_S,
        )

    def _log_end(self) -> str:
        self._log.flush()
        text = Path(self._log.name).read_bytes()[-SHOWN_LOG_CHARS:]
        return text.decode(errors="replace")


def result_tables(answers: dict[str, Answers], load: Load, work: ModelWork, speed: Speed) -> list[Table]:
    """Throughput, bursts, and who is in whose way."""
    return [_closed_table(answers, load, work, speed), _burst_table(answers, load), _mixed_table(answers, load)]


def _closed_table(answers: dict[str, Answers], load: Load, work: ModelWork, speed: Speed) -> Table:
    rows = []
    for name, answer in answers.items():
        for num_streams, result in answer.closed.items():
            limit = serving_limit_tokens_per_s(work, speed, num_streams, load.num_prompt, load.num_output, BF16_BYTES)
            times_ms = (_ms(result.ttft_s.p50), _ms(result.ttft_s.p99), _ms(result.inter_token_s.p50))
            share = result.tokens_per_s / limit
            rows.append((name, num_streams, result.tokens_per_s, share, *times_ms, result.num_tokens))
    columns = ("server", "streams", "tokens/s", "share of limit", "TTFT p50 ms", "p99", "inter-token p50 ms", "tokens")
    title = f"Closed loop, {load.num_prompt} tokens in, {load.num_output} out"
    return Table(title, columns, tuple(rows), Plot("streams", "tokens/s", "server"))


def _burst_table(answers: dict[str, Answers], load: Load) -> Table:
    rows = []
    for name, answer in answers.items():
        if (bursts := answer.bursts) is not None:
            shares = (_share(bursts.burst_ttft, bursts.prefill_all), _share(bursts.steady_ttft, bursts.prefill_all))
            figures = (_ms(bursts.prefill_all), _ms(bursts.burst_ttft), shares[0])
            rows.append((name, *figures, bursts.steady_rate, _ms(bursts.steady_ttft), shares[1]))
    size = load.num_burst
    columns = (
        "server",
        f"prefill of all {size} ms",
        "burst TTFT p50 ms",
        "share of it",
        "arrivals/s",
        "their TTFT p50 ms",
        "share",
    )
    return Table(f"A burst of {size}, and Poisson arrivals", columns, tuple(rows))


def _mixed_table(answers: dict[str, Answers], load: Load) -> Table:
    rows = []
    for name, answer in answers.items():
        stalled, left = answer.stalled, answer.abandoned
        gaps = (None, None) if stalled is None else (stalled.inter_token_s.p50, stalled.inter_token_s.p99)
        long_ttft = None if stalled is None else stalled.long_ttft_s
        short = (None, None) if left is None else (left.alone_s, left.next_s)
        rows.append((name, *(_ms(seconds) for seconds in (gaps[0], gaps[1], long_ttft, *short))))
    columns = ("server", "inter-token p50", "p99", "TTFT of the long prompt", "short TTFT alone", "after one left")
    title = f"{load.num_burst} streams while {load.num_long} tokens prefill; a client leaves such a prefill; ms"
    return Table(title, columns, tuple(rows))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _share(seconds: float | None, whole_s: float) -> float | None:
    return None if seconds is None or not whole_s else seconds / whole_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="of bench.make_model")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--threads", type=int, metavar="N", help="of each server (default: its own choice)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the load (default: all)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=Load().rounds,
        metavar="N",
        help="requests of each client in a closed loop (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/peers-MODEL.json")
    return parser


def _measure_all(arguments: argparse.Namespace, load: Load) -> tuple[dict[str, Answers], list[Missing]]:
    answers: dict[str, Answers] = {}
    missing: list[Missing] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.servers:
            server = find_server(name, arguments.model, arguments.threads, load.max_model_len, Path(scratch))
            if isinstance(server, Missing):
                missing.append(server)
                print(f"{name} is left out: {server.reason}", file=sys.stderr)
                continue
            with (Path(scratch) / "log").open("wb") as log:
                answers[name] = PeerBench(server, load, log, arguments.parts).measure()
    return answers, missing


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code: 1 when a part failed, 2 when the model cannot be read."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    load = QUICK if arguments.quick else replace(Load(), rounds=arguments.rounds)
    try:
        work = work_of(arguments.model)
        limits = measure_limits(is_quick=arguments.quick)
        answers, missing = _measure_all(arguments, load)
    except StartupError as error:
        print(f"bench.peers: {error.cause}\nFix: {error.fix}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"bench.peers: {error}\nFix: python -m bench.make_model makes a model directory", file=sys.stderr)
        return 2
    tables = result_tables(answers, load, work, Speed(limits.read_bytes_per_s, limits.flops))
    tables += limit_tables(limits, has_probes=False)
    if missing:
        tables.append(Table("Left out", ("server", "why"), tuple((peer.name, peer.reason) for peer in missing)))
    print_tables(tables)
    _write(arguments, argv, tables, answers, limits)
    return 1 if any(answer.failures for answer in answers.values()) else 0


def _write(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    tables: Sequence[Table],
    answers: dict[str, Answers],
    limits: Limits,
) -> None:
    name = arguments.model.resolve().name
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / f"peers-{name}.json")
    if path is not None:
        details = {"answers": msgspec.to_builtins(answers, str_keys=True), "limits": msgspec.to_builtins(limits)}
        shown = {"model": name, "threads": arguments.threads}
        write_result(path, "peers", command_line("python -m bench.peers", argv), tables, shown, details)
        print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
