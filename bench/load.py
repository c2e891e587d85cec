"""Load generator for any server of OpenAI's chat or completions: `steploop bench serve`, `python -m bench.load`.

Closed loop (--concurrency N): N clients, each sends its next request when its last one has ended. Latencies then say
what N patient clients see; a slow server is asked less.

Open loop (--rate R): requests arrive by a seeded Poisson process whatever the server does, and every latency counts
from the *intended* arrival, so a request that waits for a stalled server, or for a free connection of ours, counts
against the server. So there is no coordinated omission; `send delay` shows how much of the wait was ours.

Requests always stream. TTFT ends with the first event that has text, inter-token times lie between such events of one
stream. Only loopback addresses are asked, unless --allow-remote says that the load is welcome there.
"""

import argparse
import asyncio
import dataclasses
import ipaddress
import itertools
import json
import os
import random
import shlex
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
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
from bench.results import RESULTS_DIR, Cell, Distribution, Table, command_line, print_tables, summarize, write_result
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
_TEXT = (
    "river stone window garden letter market silver engine paper copper summer winter bridge candle forest harbor "
    "island journey kitchen ladder mirror needle orange pencil quarter ribbon saddle temple valley wagon yellow anchor "
    "basket circle dragon elbow feather glove hammer insect jacket kettle lemon marble narrow ocean pocket quiet"
)
_WORDS = _TEXT.split()  # most vocabularies have each of them in one or two tokens

T = TypeVar("T")


class CannotRun(StartupError):
    """The run makes no sense or the server is not there."""

    exit_code = ExitCode.UNREACHABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One run: a closed loop of `concurrency` clients, or with `rate` an open loop.

    Args:
        rate: requests/s.
        num_requests, duration_s: the run ends with whichever comes first; what was sent is waited for.
        prompt_tokens: about so many per prompt, by the server's own count; wins over prompt and prompt_file.
        timeout_s: of one request, first to last byte.
        tls, server_name: which certificate the server must have, and for which name; tls None: in the clear.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
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
        fields = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "api_key"
        }
        fields["prompt_file"] = None if self.prompt_file is None else self.prompt_file.name
        is_verified = self.tls is not None and self.tls.verify_mode != ssl.CERT_NONE
        fields["tls"] = None if self.tls is None else "verified" if is_verified else "not verified"
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
    """Arrival times in seconds from the start, `rate` per second on average, without end."""
    source = random.Random(seed)
    return itertools.accumulate(iter(lambda: source.expovariate(rate), None))


class LoadRun:
    """One run against one server. Thread: the generator's loop.

    Attributes:
        recorder: what all requests of the run add up to.
        prompts: there once `open` has returned.
    """

    def __init__(self, config: LoadConfig) -> None:
        self.config = config
        self.recorder = Recorder()
        self.prompts: Iterator[str] = iter(())
        self._pool = self._new_pool(self.recorder)
        self._headers = {"content-type": "application/json"}
        if config.api_key:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        host = config.server_name or config.host
        host = f"[{host}]" if ":" in host else host
        self._host = f"{host}:{config.port}"
        self._url = f"{'http' if config.tls is None else 'https'}://{self._host}"
        self._model = config.model or ""
        self._num_started = 0

    async def open(self) -> None:
        """Ask the server for its model and, where prompts have a given length, for how many tokens words are.

        Raises:
            CannotRun: there is no server, or it refuses what every request of the run would be.
        """
        if not self._model:
            self._model = await self._first_model()
        self.prompts = await self._make_prompts()

    async def close(self) -> None:
        await self._pool.close()

    async def measure(self) -> LoadResult:
        """Prepare, run the load, sum up.

        Raises:
            CannotRun: see open.
        """
        try:
            await self.open()
            start_s, cpu_start_s = time.monotonic(), time.process_time()
            if self.config.rate is not None:
                await self._run_open(self.config.rate, start_s)
            else:
                await self._run_closed(self.config.concurrency or 1, start_s)
            duration_s, cpu_s = time.monotonic() - start_s, time.process_time() - cpu_start_s
        finally:
            await self.close()
        recorder = self.recorder
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

    async def send(self, exchange: Exchange, prompt: str, max_tokens: int | None = None) -> None:
        """Stream one answer into `exchange`; needs `open`."""
        await self._pool.perform(self._request(prompt, max_tokens or self.config.max_tokens), exchange)

    def _request(self, prompt: str, max_tokens: int) -> bytes:
        config = self.config
        fields: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "stream": True}
        fields["stream_options"] = {"include_usage": True}
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

    async def _perform(self, prompt: str, intended_s: float) -> None:
        exchange = Exchange(intended_s)
        await self.send(exchange, prompt)
        self.recorder.add(exchange)

    async def _run_closed(self, concurrency: int, start_s: float) -> None:
        async def be_client() -> None:
            while self._may_start(time.monotonic() - start_s):
                await self._perform(next(self.prompts), time.monotonic())

        await asyncio.gather(*(be_client() for _ in range(concurrency)))

    async def _run_open(self, rate: float, start_s: float) -> None:
        slots = asyncio.Semaphore(MAX_OPEN_REQUESTS)

        async def be_request(prompt: str, intended_s: float) -> None:
            try:
                await self._perform(prompt, intended_s)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            for arrival_s in poisson_arrivals(rate, self.config.seed):
                if not self._may_start(arrival_s):
                    break
                prompt = next(self.prompts)
                await asyncio.sleep(max(0.0, start_s + arrival_s - time.monotonic()))
                await slots.acquire()
                tasks.create_task(be_request(prompt, start_s + arrival_s))

    def _may_start(self, elapsed_s: float) -> bool:
        """Whether another request belongs to the run; if so, it is counted."""
        if self._num_started >= self.config.num_requests or elapsed_s >= self.config.duration_s:
            return False
        self._num_started += 1
        return True

    async def _first_model(self) -> str:
        connection, _ = await self._ask_once(encode_request("GET", "/v1/models", self._host, self._headers))
        try:
            models = msgspec.json.decode(connection.body, type=_ModelList).data
        except (msgspec.DecodeError, msgspec.ValidationError):
            models = ()
        if not models:
            raise CannotRun("/v1/models names no model.", "name one with --model")
        return models[0].id

    async def _make_prompts(self) -> Iterator[str]:
        config = self.config
        if config.prompt_tokens is not None:
            calibration = []
            for num_words in CALIBRATION_WORDS:
                _, exchange = await self._ask_once(self._request(next(random_prompts(num_words, config.seed)), 1))
                calibration.append((num_words, exchange.num_prompt_tokens))
            return random_prompts(words_for_tokens(config.prompt_tokens, calibration), config.seed)
        if config.prompt_file is None:
            return itertools.repeat(config.prompt)
        fix = "give --prompt-file a text file, one prompt per line"
        try:
            lines = config.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise CannotRun(f"Prompts: {error}.", fix, ExitCode.CONFIGURATION) from error
        if prompts := [line.strip() for line in lines if line.strip()]:
            return itertools.cycle(prompts)
        raise CannotRun(f"There are no prompts in {config.prompt_file}.", fix, ExitCode.CONFIGURATION)

    async def _ask_once(self, request: bytes) -> tuple[Connection, Exchange]:
        """A request outside the measurement.

        Raises:
            CannotRun: it failed.
        """
        pool, exchange = self._new_pool(Recorder()), Exchange(time.monotonic())
        try:
            connection = await pool.perform(request, exchange)
        finally:
            await pool.close()
        if connection is None or exchange.failure is not None:
            raise _why_not(exchange, self._url)
        return connection, exchange

    def _new_pool(self, recorder: Recorder) -> ConnectionPool:
        config = self.config
        address = config.host, config.port
        return ConnectionPool(*address, recorder, config.timeout_s, config.tls, config.server_name)


def _why_not(exchange: Exchange, url: str) -> StartupError:
    kind, message = exchange.failure, exchange.message
    if kind == CERTIFICATE_REFUSED:
        return refused_certificate(url, message)
    if kind == CONNECT_FAILED:
        return CannotRun(f"No server at {url}: {message}.", "start one with `steploop serve`, or name it with --url")
    if kind == "http_401":
        return CannotRun(f"{url} wants a key.", "give it with --api-key or STEPLOOP_API_KEY")
    if kind == "http_503":
        return CannotRun(f"{url} is not ready: {message}", "wait until /ready answers 200")
    return CannotRun(f"{url} answered a first request with {kind}: {message}", "check --url, --endpoint and --model")


def run_load(config: LoadConfig) -> LoadResult:
    """Measure on a loop of its own.

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


def result_tables(config: LoadConfig, result: LoadResult) -> list[Table]:
    """What is shown and written: one row of throughput, a row per latency, a row per kind of failure."""
    num_clients = config.concurrency or 1
    clients = f"{num_clients} client{'s' * (num_clients > 1)}"
    throughput: dict[str, Cell] = {
        "load": clients if config.rate is None else f"{config.rate:g} requests/s, Poisson",
        "requests": result.num_done + result.num_failed,
        "failed": result.num_failed,
        "duration s": result.duration_s,
        "requests/s": result.requests_per_s,
        "tokens": result.num_tokens,
        "tokens/s": result.tokens_per_s,
        "prompt tokens": result.num_prompt_tokens,
        "client CPU": f"{result.client_cpu:.0%} of a core",
    }
    latencies = {
        "time to first token": result.ttft_s,
        "inter-token": result.inter_token_s,
        "end to end": result.end_to_end_s,
        "send delay": result.send_delay_s,
    }
    rows = []
    for name, values in latencies.items():
        figures = (values.mean, values.p50, values.p95, values.p99, values.max)
        rows.append((name, values.count, *(None if value is None else value * 1e3 for value in figures)))
    tables = [
        Table("Throughput", tuple(throughput), (tuple(throughput.values()),)),
        Table("Latency, ms", ("measure", "count", "mean", "p50", "p95", "p99", "max"), tuple(rows)),
    ]
    if result.failures:
        tables.append(Table("Failures", ("kind", "requests"), tuple(sorted(result.failures.items()))))
    return tables


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
        cause = f"{host} is {address}, another machine, and a load test can be taken for an attack."
        raise CannotRun(cause, "--allow-remote, if its owner agrees", ExitCode.USAGE)
    return address, port


def _parts_of(url: str) -> SplitResult:
    """
    Raises:
        CannotRun: not a server's URL.
    """
    fix = f"give --url like {DEFAULT_URL}"
    try:
        parts = urlsplit(with_scheme(url))
        is_port = parts.port is None or parts.port > 0  # reading it is what raises
    except ValueError as error:
        raise CannotRun(f"{url}: {error}.", fix, ExitCode.USAGE) from error
    is_host = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and is_port
    if not is_host or parts.path.strip("/") not in ("", "v1") or parts.query:
        raise CannotRun(f"{url} is not http(s)://HOST:PORT.", fix, ExitCode.USAGE)
    return parts


def check_result_file(path: Path) -> None:
    """Before the run, which may be long: a result that cannot be written makes it useless.

    Raises:
        CannotRun: no file can be written there. No directory is made but bench/results, where results are expected.
    """
    directory = path.parent
    if path.is_dir():
        cause, fix = f"--json {path} is a directory", f"name a file in it: --json {path / 'load.json'}"
    elif not directory.is_dir() and directory.resolve() != RESULTS_DIR.resolve():
        fix = f"make it first: mkdir -p {shlex.quote(str(directory))}"
        cause = f"--json {path}: there is no directory {directory}"
    elif directory.is_dir() and not os.access(path if path.exists() else directory, os.W_OK):
        cause, fix = f"--json {path} cannot be written", "name a file in a directory that you may write to"
    else:
        return
    raise CannotRun(cause, fix, ExitCode.USAGE)


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
    if result.num_done:  # otherwise the tables would hold nothing but dashes
        print_tables(tables)
    else:
        print(f"none of {result.num_failed} requests succeeded", file=sys.stderr)
    for kind, message in result.failure_examples.items():
        print(f"{kind}, for example: {message}", file=sys.stderr)
    if arguments.json is not None:
        command, details = command_line("steploop bench serve", argv), {"result": msgspec.to_builtins(result)}
        write_result(arguments.json, "load", command, tables, config.shown(), details)
        print(f"written to {arguments.json}")
    return ExitCode.UNREACHABLE if result.num_failed else ExitCode.OK


def _config_of(arguments: argparse.Namespace) -> LoadConfig:
    asked = vars(arguments)
    url, ca_file, takes_any = (asked.pop(name) for name in ("url", "ca_file", "takes_any"))
    host, port = loopback_address(url, asked.pop("allow_remote"))
    check_trust_flags(argparse.Namespace(url=url, ca_file=ca_file, takes_any=takes_any))
    if _parts_of(url).scheme == "https":
        asked |= {"tls": client_context(ca_file, not takes_any), "server_name": _parts_of(url).hostname}
    asked["api_key"] = asked["api_key"] or os.environ.get("STEPLOOP_API_KEY")
    fields = {name: value for name, value in asked.items() if name in LoadConfig.__slots__}
    return LoadConfig(host=host, port=port, **fields)


def _parser() -> argparse.ArgumentParser:
    """The flags' destinations are LoadConfig's fields."""
    parser = CommandParser(
        prog="steploop bench serve", description="Load an OpenAI-compatible server and measure its answers."
    )
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help="default: %(default)s")
    add("--endpoint", choices=tuple(ENDPOINTS), default="chat")
    add("--model", help="default: the first of /v1/models")
    add("--api-key", help="default: $STEPLOOP_API_KEY")
    add("--allow-remote", action="store_true", help="ask a server that is not on this machine")
    add_trust_flags(parser)
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=_whole, metavar="N", help="closed loop of N clients (default: 1)")
    load.add_argument("--rate", type=_positive, metavar="R", help="open loop: R requests/s, Poisson")
    at_most = "at most (default: %(default)s)"
    add("--requests", dest="num_requests", type=_whole, default=100, metavar="N", help=at_most)
    add("--duration", dest="duration_s", type=_positive, default=600.0, metavar="S", help=at_most)
    add("--timeout", dest="timeout_s", type=_positive, default=300.0, metavar="S", help="of one request")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=DEFAULT_PROMPT, help="default: %(default)r")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt per line, in turn")
    prompt.add_argument("--prompt-tokens", type=_whole, metavar="N", help="random text of about N tokens each")
    add("--max-tokens", type=_whole, default=128, metavar="N", help="default: %(default)s")
    add("--ignore-eos", action="store_true", help="generate --max-tokens, whatever the model says")
    add("--temperature", type=float, help="default: the server's")
    add("--seed", type=int, default=0, help="of arrivals and random prompts (default: %(default)s)")
    add("--debug", action="store_true", help="show tracebacks")
    add("--json", type=Path, metavar="FILE", help="write the result there")
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
