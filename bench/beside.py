"""Loads in which one client is in another's way: long prompts beside streams, and a client that leaves.

Thread: the generator's loop. When each request goes depends on what another one has received, which a run of
bench/load.py cannot say. All raise CannotRun where a request fails.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import msgspec

from bench.client import Exchange
from bench.load import CannotRun, LoadConfig, LoadRun
from bench.results import Distribution, summarize

FIRST_EVENTS = 4  # of each stream, before anything is measured
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


class _Requests:
    """Requests of one configuration that run side by side."""

    def __init__(self, config: LoadConfig) -> None:
        self.run = LoadRun(config)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, max_tokens: int) -> Exchange:
        """Send one now, and go on."""
        exchange = Exchange(time.monotonic())
        self._tasks.append(asyncio.create_task(self.run.send(exchange, next(self.run.prompts), max_tokens)))
        return exchange

    async def ttft_s(self) -> float:
        """Of a request of one token."""
        exchange = Exchange(time.monotonic())
        await self.run.send(exchange, next(self.run.prompts), 1)
        return _ttft_s(exchange)

    async def wait_all(self, exchanges: Sequence[Exchange], holds: Callable[[Exchange], bool]) -> None:
        """Until it holds for each, or the exchange has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.run.config.timeout_s):
                while not all(holds(exchange) or exchange.end_s for exchange in exchanges):
                    await asyncio.sleep(POLL_S)
        for exchange in exchanges:
            if exchange.failure is not None:
                raise CannotRun(f"A request failed: {exchange.failure}: {exchange.message}.", _LOOK)
        if not all(holds(exchange) or exchange.end_s for exchange in exchanges):
            raise CannotRun(f"The streams stood still for {self.run.config.timeout_s:g} s.", _LOOK)

    async def close(self) -> None:
        await self.run.close()
        await asyncio.gather(*self._tasks)


_LOOK = "look at the server alone"


@asynccontextmanager
async def _opened(*configs: LoadConfig) -> AsyncIterator[list[_Requests]]:
    async with AsyncExitStack() as stack:
        opened = [_Requests(config) for config in configs]
        for requests in opened:
            stack.push_async_callback(requests.close)
            await requests.run.open()
        yield opened


def _long(config: LoadConfig, num_tokens: int) -> LoadConfig:
    """Prompts that begin like no short one."""
    return replace(config, prompt_tokens=num_tokens, seed=config.seed + 1)


async def send_beside(
    config: LoadConfig, num_streams: int, num_long: int, num_arrivals: int, every_s: float, max_tokens: int
) -> Beside:
    """Open streams, wait every_s, then send a prompt of about num_long tokens every so many seconds.

    Args:
        config: of the streams.
        max_tokens: of a stream, at most.
    """
    async with _opened(config, _long(config, num_long)) as (short, long):
        gaps = short.run.recorder.inter_token_s
        streams = [short.start(max_tokens) for _ in range(num_streams)]
        await short.wait_all(streams, lambda stream: stream.num_events >= FIRST_EVENTS)
        num_first = len(gaps)
        await asyncio.sleep(every_s)
        num_before, start_s, arrivals = len(gaps), time.monotonic(), list[Exchange]()
        for number in range(num_arrivals):
            await asyncio.sleep(max(0.0, start_s + number * every_s - time.monotonic()))
            arrivals.append(long.start(1))
        await long.wait_all(arrivals, lambda arrival: bool(arrival.end_s))
        counts = {id(stream): stream.num_events for stream in streams}
        await short.wait_all(streams, lambda stream: stream.num_events > counts[id(stream)])
        alone, beside = summarize(gaps[num_first:num_before]), summarize(gaps[num_before:])
    return Beside(alone, beside, summarize([_ttft_s(one) for one in arrivals]), arrivals[-1].num_prompt_tokens)


async def abandon_prefill(config: LoadConfig, num_long: int) -> Abandoned:
    """Leave a prompt of num_long tokens LEAVE_AFTER_S after it was sent, and at once send one of config's."""
    async with _opened(config, _long(config, num_long)) as (short, long):
        alone_s = await short.ttft_s()
        long.start(1)
        await asyncio.sleep(LEAVE_AFTER_S)
        await long.close()
        return Abandoned(alone_s, await short.ttft_s())


def _ttft_s(exchange: Exchange) -> float:
    if exchange.first_s is None:
        raise CannotRun(f"A request got no text: {exchange.failure}: {exchange.message}.", _LOOK)
    return exchange.first_s - exchange.intended_s
