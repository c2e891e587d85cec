"""Loads in which one client is in another's way: long prompts beside streams, a client that leaves, a stream cancelled.

Thread: the generator's loop. What a run of bench/load.py cannot say: when each request goes depends on what another one
has received. All raise CannotRun where a request fails.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgspec

from bench.cancel import close, read_request_id
from bench.client import ConnectionPool, Exchange, Recorder
from bench.load import CannotRun, LoadConfig, LoadRun
from bench.raw_clients import http1_request
from bench.results import Distribution, summarize

FIRST_EVENTS = 4  # of each stream, before anything is measured
CANCELLED_TOKENS = 400
LEAVE_AFTER_S = 0.5
POLL_S = 0.002


class Beside(msgspec.Struct, frozen=True):
    """Seconds between tokens of streams, alone and while long prompts come in; and these prompts' first tokens.

    Args:
        inter_token_s: from the first long prompt until each stream has gone on after the last one's first token.
        num_long_tokens: of the last one.
    """

    alone_s: Distribution
    inter_token_s: Distribution
    long_ttft_s: Distribution
    num_long_tokens: int


class Abandoned(msgspec.Struct, frozen=True):
    """The TTFT of a short prompt alone, and of one sent when a client has just left in the middle of a long prefill."""

    alone_s: float
    next_s: float


class _Load:
    """Prompts of a configuration, long ones beside them, and pools that are closed at the end."""

    def __init__(self, config: LoadConfig, short: Iterator[str], long: Iterator[str]) -> None:
        self.config, self.run = config, LoadRun(config)
        self.short, self.long = short, long
        self.pools: list[ConnectionPool] = []
        self.tasks: list[asyncio.Task[object]] = []

    def pool(self, recorder: Recorder | None = None) -> ConnectionPool:
        config = self.config
        self.pools.append(ConnectionPool(config.host, config.port, recorder or Recorder(), config.timeout_s))
        return self.pools[-1]

    def start(self, pool: ConnectionPool, prompt: str, max_tokens: int) -> Exchange:
        """Send it now, and go on."""
        exchange = Exchange(time.monotonic())
        request = self.run.request(prompt, max_tokens)
        self.tasks.append(asyncio.create_task(pool.perform(request, exchange)))
        return exchange

    async def ttft_s(self, pool: ConnectionPool, prompt: str) -> float:
        """Of a request of one token."""
        exchange = Exchange(time.monotonic())
        await pool.perform(self.run.request(prompt, 1), exchange)
        return _ttft_s(exchange)

    async def wait_all(self, exchanges: Sequence[Exchange], holds: Callable[[Exchange], bool]) -> None:
        """Until it holds for each, or the exchange has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_s):
                while not all(holds(exchange) or exchange.end_s for exchange in exchanges):
                    await asyncio.sleep(POLL_S)
        for exchange in exchanges:
            if exchange.failure is not None:
                raise CannotRun(
                    f"A request failed: {exchange.failure}: {exchange.message}.", "look at the server alone"
                )
        if not all(holds(exchange) or exchange.end_s for exchange in exchanges):
            raise CannotRun(f"The streams stood still for {self.config.timeout_s:g} s.", "look at the server alone")


@asynccontextmanager
async def _opened(config: LoadConfig, num_long: int = 0) -> AsyncIterator[_Load]:
    """With the model's name, which requests need. Long prompts begin like no short one."""
    config = replace(config, model=config.model or await LoadRun(config).first_model())
    short = await LoadRun(config).prompts()
    long = await LoadRun(replace(config, prompt_tokens=num_long, seed=config.seed + 1)).prompts() if num_long else short
    load = _Load(config, short, long)
    try:
        yield load
    finally:
        for pool in load.pools:
            await pool.close()
        await asyncio.gather(*load.tasks)


async def send_beside(
    config: LoadConfig, num_streams: int, num_long: int, num_arrivals: int, every_s: float, max_tokens: int
) -> Beside:
    """Open streams, wait every_s, then send a prompt of about num_long tokens every so many seconds.

    Args:
        config: of the streams.
        max_tokens: of a stream, at most.
    """
    async with _opened(config, num_long) as load:
        recorder = Recorder()
        streams_pool, long_pool = load.pool(recorder), load.pool()
        streams = [load.start(streams_pool, next(load.short), max_tokens) for _ in range(num_streams)]
        await load.wait_all(streams, lambda stream: stream.num_events >= FIRST_EVENTS)
        num_first = len(recorder.inter_token_s)
        await asyncio.sleep(every_s)
        num_before, start_s, longs = len(recorder.inter_token_s), time.monotonic(), list[Exchange]()
        for number in range(num_arrivals):
            await asyncio.sleep(max(0.0, start_s + number * every_s - time.monotonic()))
            longs.append(load.start(long_pool, next(load.long), 1))
        await load.wait_all(longs, lambda long: bool(long.end_s))
        counts = {id(stream): stream.num_events for stream in streams}
        await load.wait_all(streams, lambda stream: stream.num_events > counts[id(stream)])
        gaps = recorder.inter_token_s
        alone, beside = summarize(gaps[num_first:num_before]), summarize(gaps[num_before:])
    return Beside(alone, beside, summarize([_ttft_s(long) for long in longs]), longs[-1].num_prompt_tokens)


async def abandon_prefill(config: LoadConfig, num_long: int) -> Abandoned:
    """Leave a prompt of num_long tokens LEAVE_AFTER_S after it was sent, and at once send one of config's."""
    async with _opened(config, num_long) as load:
        pool, left_pool = load.pool(), load.pool()
        alone_s = await load.ttft_s(pool, next(load.short))
        load.start(left_pool, next(load.long), 1)
        await asyncio.sleep(LEAVE_AFTER_S)
        await left_pool.close()
        return Abandoned(alone_s, await load.ttft_s(pool, next(load.short)))


async def send_again(config: LoadConfig, num_times: int) -> list[float]:
    """A prompt so many times, one after the other, with another end each time: seconds to each first token."""
    async with _opened(config) as load:
        text, pool = next(load.short), load.pool()
        return [await load.ttft_s(pool, f"{text} {number}") for number in range(num_times)]


async def call_off(config: LoadConfig, num_streams: int, num_called_off: int) -> list[float]:
    """Seconds from a DELETE of a stream among others to the end of its answer, one stream after the other."""
    async with _opened(config) as load:
        streams = []
        try:
            for _ in range(num_streams):
                streams.append(await asyncio.open_connection(config.host, config.port, limit=1 << 24))
                streams[-1][1].write(load.run.request(next(load.short), CANCELLED_TOKENS))
            return [await _call_off(config, reader) for reader, _ in streams[:num_called_off]]
        finally:
            for _, writer in streams:
                await close(writer)


async def _call_off(config: LoadConfig, reader: asyncio.StreamReader) -> float:
    request_id = await read_request_id(reader)
    await reader.readuntil(b"\n\n")  # an event: it runs
    other_reader, other = await asyncio.open_connection(config.host, config.port)
    started_s = time.monotonic()
    other.write(http1_request("DELETE", f"/v1/requests/{request_id}"))
    try:
        rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), config.timeout_s)
        ended_s = time.monotonic()
        await other_reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, TimeoutError) as error:
        raise CannotRun(f"A stream that was called off did not end: {error!r}.", "look at the server alone") from error
    finally:
        await close(other)
    if b"cancelled" not in rest:
        raise CannotRun(f"A stream ended before it was called off: {rest[-200:]!r}.", "let it ask for more tokens")
    return ended_s - started_s


def _ttft_s(exchange: Exchange) -> float:
    if exchange.first_s is None:
        raise CannotRun(f"A request got no text: {exchange.failure}: {exchange.message}.", "look at the server alone")
    return exchange.first_s - exchange.intended_s
