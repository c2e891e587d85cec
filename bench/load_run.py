"""One run of load against one server, without command line or tables. Thread: the generator's loop.

How arrivals are made and what the latencies count from: bench/load.py.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.client import CERTIFICATE_REFUSED, CONNECT_FAILED, Connection, ConnectionPool, Exchange, Recorder
from bench.measures import Distribution, summarize
from bench.prompts import (
    CALIBRATION_WORDS,
    DEFAULT_PROMPT,
    ListedPrompts,
    PromptSource,
    RandomPrompts,
    prompts_of_file,
    words_for_tokens,
)
from bench.wire import encode_request
from core.errors import ExitCode, StartupError
from server.commands.tls_trust import client_context, refused_certificate

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MAX_OPEN_REQUESTS = 4_096  # of an open loop; later arrivals wait, and their clock runs

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
        self._recorder = Recorder()
        trust = config.tls
        self._tls = None if trust is None else client_context(trust.ca_file, trust.is_verified)
        self._pool = self._new_pool(self._recorder)
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
        return _sum_up(self._recorder, duration_s, cpu_s)

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
        self._recorder.add(exchange)

    async def _run_closed(self, concurrency: int, prompts: PromptSource, start_s: float) -> None:
        async def be_client() -> None:
            while self._may_start(time.monotonic() - start_s):
                await self._perform(self.request(prompts.next(), self._config.max_tokens), time.monotonic())

        await asyncio.gather(*(be_client() for _ in range(concurrency)))

    async def _run_open(self, rate: float, prompts: PromptSource, start_s: float) -> None:
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
                request = self.request(prompts.next(), self._config.max_tokens)
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

    async def prompts(self) -> PromptSource:
        """What the run asks; asks the server how many tokens words are, where prompts have a given length.

        Raises:
            CannotRun: the server refuses, or the file cannot be read.
        """
        config = self._config
        if config.prompt_tokens is not None:
            calibration = []
            for num_words in CALIBRATION_WORDS:
                _, exchange = await self._ask_once(self.request(RandomPrompts(num_words, config.seed).next(), 1))
                calibration.append((num_words, exchange.num_prompt_tokens))
            return RandomPrompts(words_for_tokens(config.prompt_tokens, calibration), config.seed)
        if config.prompt_file is not None:
            try:
                return prompts_of_file(config.prompt_file)
            except (OSError, ValueError) as error:
                fix = "give --prompt-file a text file, one prompt per line"
                raise CannotRun(f"Prompts: {error}.", fix, ExitCode.CONFIGURATION) from error
        return ListedPrompts([config.prompt])

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
