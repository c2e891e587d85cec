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
import asyncio
import ipaddress
import itertools
import json
import os
import random
import shlex
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from bench.client import (
    CERTIFICATE_REFUSED,
    CONNECT_FAILED,
    Connection,
    ConnectionPool,
    Exchange,
    Recorder,
    encode_request,
)
from bench.results import RESULTS_DIR, Distribution, Table, command_line, print_tables, summarize, write_result
from core.errors import ExitCode, StartupError
from server.cli import CommandParser
from server.commands.tls_trust import add_trust_flags, check_trust_flags, client_context, refused_certificate
from server.values import with_scheme

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_OPEN_REQUESTS = 4_096  # of an open loop; later arrivals wait, and their clock runs
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROMPT = "What is a KV cache?"
CALIBRATION_WORDS = (16, 96)  # two lengths that calibrate words to tokens; both fit the smallest contexts served
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TEXT = """
river stone window garden letter market silver engine paper copper summer winter bridge candle forest harbor
island journey kitchen ladder mirror needle orange pencil quarter ribbon saddle temple valley wagon yellow
anchor basket circle dragon elbow feather glove hammer insect jacket kettle lemon marble narrow ocean pocket
quiet
"""
_WORDS = _TEXT.split()  # most vocabularies have each of them in one or two tokens

T = TypeVar("T")


class CannotRun(StartupError):
    """The run makes no sense or the server is not there."""

    exit_code = ExitCode.UNREACHABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsTrust:
    """Which certificate a server must have.

    Args:
        server_name: that it must be for.
        ca_file: of who may have signed it, PEM; None: those that the system trusts.
        is_verified: False: any will do.
    """

    server_name: str
    ca_file: Path | None = None
    is_verified: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One run. Exactly one of `concurrency` and `rate` is set.

    Args:
        rate: requests/s.
        num_requests, duration_s: the run ends with whichever comes first; what was sent is waited for.
        prompt_tokens: about so many per prompt, by the server's own count; wins over prompt and prompt_file.
        timeout_s: of one request, first to last byte.
        tls: None: in the clear.
    """

    host: str
    port: int
    tls: TlsTrust | None = None
    endpoint: str = "chat"
    model: str | None = None
    api_key: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    num_requests: int = 100
    duration_s: float = 600.0
    prompt: str = DEFAULT_PROMPT
    prompt_file: Path | None = None
    prompt_tokens: int | None = None
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float | None = None
    seed: int = 0
    timeout_s: float = 300.0

    def shown(self) -> dict[str, Any]:
        """For the result file: without the key."""
        fields = asdict(self)
        del fields["api_key"]
        fields["prompt_file"] = None if self.prompt_file is None else self.prompt_file.name
        fields["tls"] = None if self.tls is None else "verified" if self.tls.is_verified else "not verified"
        return fields


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured. Times in seconds, from the intended arrival; inter_token_s between events.

    Args:
        duration_s: from the start to the last answer's end.
        num_tokens: output, as the server counts (or events, where it does not).
        num_repeated: requests sent again because a kept connection had been closed meanwhile.
        client_cpu: share of one core that the generator itself used: near 1, it was the bottleneck.
    """

    num_done: int
    num_failed: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    num_repeated: int
    duration_s: float
    num_events: int
    num_tokens: int
    num_prompt_tokens: int
    ttft_s: Distribution
    inter_token_s: Distribution
    end_to_end_s: Distribution
    send_delay_s: Distribution
    client_cpu: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_done / self.duration_s if self.duration_s else 0.0


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: tuple[_ModelCard, ...]


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Arrival times in seconds from the start, at `rate` per second on average; without end.

    The gaps of a Poisson process are exponential; the same seed gives the same times.
    """
    source = random.Random(seed)
    now_s = 0.0
    while True:
        now_s += source.expovariate(rate)
        yield now_s


class LoadRun:
    """One run against one server. Thread: the generator's loop."""

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self.recorder = Recorder()
        trust = config.tls
        self._tls = None if trust is None else client_context(trust.ca_file, trust.is_verified)
        self._pool = self._new_pool(self.recorder)
        self._headers = {"content-type": "application/json"}
        if config.api_key:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        host = config.host if config.tls is None else config.tls.server_name
        host = f"[{host}]" if ":" in host else host
        self._host = f"{host}:{config.port}"
        self._url = f"{'http' if config.tls is None else 'https'}://{self._host}"
        self._model = config.model or ""
        self._num_started = 0

    async def measure(self) -> LoadResult:
        """Look at the server, prepare the prompts, run the load, sum up.

        Raises:
            CannotRun: there is no server, or it refuses what every request of the run would be.
        """
        config = self._config
        try:
            if not self._model:
                self._model = await self.first_model()
            prompts = await self.prompts()
            start_s, cpu_start_s = time.monotonic(), time.process_time()
            if config.rate is not None:
                await self._run_open(config.rate, prompts, start_s)
            else:
                await self._run_closed(config.concurrency or 1, prompts, start_s)
            duration_s, cpu_s = time.monotonic() - start_s, time.process_time() - cpu_start_s
        finally:
            await self._pool.close()
        return _sum_up(self.recorder, duration_s, cpu_s)

    def request(self, prompt: str, max_tokens: int) -> bytes:
        """One request of this run, as it goes to the socket; needs the model's name (LoadConfig.model, or measure)."""
        config = self._config
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if config.ignore_eos:
            fields["ignore_eos"] = True
        if config.temperature is not None:
            fields["temperature"] = config.temperature
        body = json.dumps(fields).encode()
        return encode_request("POST", ENDPOINTS[config.endpoint], self._host, self._headers, body)

    async def _perform(self, request: bytes, intended_s: float) -> None:
        exchange = Exchange(intended_s)
        await self._pool.perform(request, exchange)
        self.recorder.add(exchange)

    async def _run_closed(self, concurrency: int, prompts: Iterator[str], start_s: float) -> None:
        async def be_client() -> None:
            while self._may_start(time.monotonic() - start_s):
                await self._perform(self.request(next(prompts), self._config.max_tokens), time.monotonic())

        await asyncio.gather(*(be_client() for _ in range(concurrency)))

    async def _run_open(self, rate: float, prompts: Iterator[str], start_s: float) -> None:
        slots = asyncio.Semaphore(MAX_OPEN_REQUESTS)

        async def be_request(request: bytes, intended_s: float) -> None:
            try:
                await self._perform(request, intended_s)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for arrival_s in poisson_arrivals(rate, self._config.seed):
                if not self._may_start(arrival_s):
                    break
                request = self.request(next(prompts), self._config.max_tokens)
                await asyncio.sleep(max(0.0, start_s + arrival_s - time.monotonic()))
                await slots.acquire()
                tasks.create_task(be_request(request, start_s + arrival_s))

    def _may_start(self, elapsed_s: float) -> bool:
        """Whether another request belongs to the run; if so, it is counted."""
        if self._num_started >= self._config.num_requests or elapsed_s >= self._config.duration_s:
            return False
        self._num_started += 1
        return True

    async def first_model(self) -> str:
        """Of those that the server names.

        Raises:
            CannotRun: there is no server, or it names none.
        """
        request = encode_request("GET", "/v1/models", self._host, self._headers)
        connection, _ = await self._ask_once(request)
        try:
            models = msgspec.json.decode(connection.body, type=_ModelList).data
        except (msgspec.DecodeError, msgspec.ValidationError):
            models = ()
        if not models:
            raise CannotRun("/v1/models names no model.", "name one with --model")
        return models[0].id

    async def prompts(self) -> Iterator[str]:
        """What the run asks; asks the server how many tokens words are, where prompts have a given length.

        Raises:
            CannotRun: the server refuses, or the file cannot be read.
        """
        config = self._config
        if config.prompt_tokens is not None:
            calibration = []
            for num_words in CALIBRATION_WORDS:
                _, exchange = await self._ask_once(self.request(next(random_prompts(num_words, config.seed)), 1))
                calibration.append((num_words, exchange.num_prompt_tokens))
            return random_prompts(words_for_tokens(config.prompt_tokens, calibration), config.seed)
        if config.prompt_file is not None:
            try:
                return _prompts_of_file(config.prompt_file)
            except (OSError, ValueError) as error:
                fix = "give --prompt-file a text file, one prompt per line"
                raise CannotRun(f"Prompts: {error}.", fix, ExitCode.CONFIGURATION) from error
        return itertools.repeat(config.prompt)

    async def _ask_once(self, request: bytes) -> tuple[Connection, Exchange]:
        """A request outside the measurement. What a pool's recorder gathers of its gaps is thrown away."""
        pool = self._new_pool(Recorder())
        exchange = Exchange(time.monotonic())
        try:
            connection = await pool.perform(request, exchange)
        finally:
            await pool.close()
        if connection is None or exchange.failure is not None:
            raise _why_not(exchange, self._url)
        return connection, exchange

    def _new_pool(self, recorder: Recorder) -> ConnectionPool:
        config = self._config
        server_name = None if config.tls is None else config.tls.server_name
        return ConnectionPool(config.host, config.port, recorder, config.timeout_s, self._tls, server_name)


def _why_not(exchange: Exchange, url: str) -> StartupError:
    if exchange.failure == CERTIFICATE_REFUSED:
        return refused_certificate(url, exchange.message)
    if exchange.failure == CONNECT_FAILED:
        return CannotRun(
            f"No server at {url}: {exchange.message}.", "start one with `steploop serve`, or name it with --url"
        )
    if exchange.failure == "http_401":
        return CannotRun(f"{url} wants a key.", "give it with --api-key or STEPLOOP_API_KEY")
    if exchange.failure == "http_503":
        return CannotRun(f"{url} is not ready: {exchange.message}", "wait until /ready answers 200")
    return CannotRun(
        f"{url} answered a first request with {exchange.failure}: {exchange.message}",
        "check --url, --endpoint and --model",
    )


def _sum_up(recorder: Recorder, duration_s: float, cpu_s: float) -> LoadResult:
    return LoadResult(
        num_done=recorder.num_done,
        num_failed=recorder.failures.total(),
        failures=dict(recorder.failures),
        failure_examples=recorder.examples,
        num_repeated=recorder.num_repeated,
        duration_s=duration_s,
        num_events=recorder.num_events,
        num_tokens=recorder.num_tokens,
        num_prompt_tokens=recorder.num_prompt_tokens,
        ttft_s=summarize(recorder.ttft_s),
        inter_token_s=summarize(recorder.inter_token_s),
        end_to_end_s=summarize(recorder.end_to_end_s),
        send_delay_s=summarize(recorder.send_delay_s),
        client_cpu=cpu_s / duration_s if duration_s else 0.0,
    )


def run_load(config: LoadConfig) -> LoadResult:
    """Measure on a loop of its own: uvloop's, where it is installed.

    Raises:
        CannotRun: as LoadRun.measure.
    """
    return run_on_fast_loop(LoadRun(config).measure())


def run_on_fast_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop, or on asyncio's own loop where uvloop is not installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def random_prompts(num_words: int, seed: int) -> Iterator[str]:
    """Different text each time, so that no prefix cache helps; the same texts for the same seed."""
    source = random.Random(seed)
    while True:
        yield " ".join(source.choices(_WORDS, k=num_words))


def _prompts_of_file(path: Path) -> Iterator[str]:
    """One prompt per line, in turn; empty lines are passed over.

    Raises:
        OSError: it cannot be read.
        ValueError: there is no prompt in it.
    """
    prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError("no prompts")
    return itertools.cycle(prompts)


def words_for_tokens(num_tokens: int, calibration: Sequence[tuple[int, int]]) -> int:
    """How many words make a prompt of about `num_tokens`, the server's template included.

    Args:
        calibration: two (words, tokens) pairs, as the server counted them.
    """
    (few_words, few_tokens), (many_words, many_tokens) = calibration
    tokens_per_word = (many_tokens - few_tokens) / (many_words - few_words)
    if tokens_per_word <= 0:  # the server reports no usage: what English text costs most vocabularies
        return max(1, round(num_tokens / 1.3))
    return max(1, round(few_words + (num_tokens - few_tokens) / tokens_per_word))


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
