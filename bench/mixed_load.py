"""Loads in which one client is in another's way: a long prompt beside streams, and one whose client leaves.

Thread: the generator's loop. What a load run (bench/load_run.py) cannot say: when each request goes depends on what
another one has received.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from bench.client import ConnectionPool, Exchange, Recorder
from bench.load import CannotRun, LoadConfig, LoadRun
from bench.results import Distribution, summarize

STREAM_TOKENS = 2048  # of a stream that shall outlast the long prompt
FIRST_EVENTS = 4  # of each stream, before the long prompt goes
LEAVE_AFTER_S = 0.5
POLL_S = 0.002


class Stalled(msgspec.Struct, frozen=True):
    """Streams beside a long prompt, from when it is sent until each stream has gone on after its first token."""

    inter_token_s: Distribution
    long_ttft_s: float
    num_long_tokens: int


class Abandoned(msgspec.Struct, frozen=True):
    """The TTFT of a short prompt alone, and of one sent when a client has just left in the middle of a long prefill."""

    alone_s: float
    next_s: float


async def stall_streams(config: LoadConfig, num_streams: int, num_long: int) -> Stalled:
    """Open streams, then send one prompt of num_long tokens.

    Args:
        config: of the streams: its prompt_tokens, its server.

    Raises:
        CannotRun: a request failed.
    """
    run = LoadRun(config)
    prompts = await run.prompts()
    long_prompt = next(await LoadRun(_long(config, num_long)).prompts())
    recorder = Recorder()
    streams_pool, long_pool = _pool(config, recorder), _pool(config, Recorder())
    streams = [Exchange(time.monotonic()) for _ in range(num_streams)]
    requests = [run.request(next(prompts), STREAM_TOKENS) for _ in streams]
    tasks = [
        asyncio.create_task(streams_pool.perform(request, exchange))
        for request, exchange in zip(requests, streams, strict=True)
    ]
    try:
        await _wait_all(streams, lambda stream: stream.num_events >= FIRST_EVENTS, config.timeout_s)
        num_before = len(recorder.inter_token_s)
        long = Exchange(time.monotonic())
        await long_pool.perform(run.request(long_prompt, 1), long)
        counts = {id(stream): stream.num_events for stream in streams}
        await _wait_all(streams, lambda stream: stream.num_events > counts[id(stream)], config.timeout_s)
        gaps = recorder.inter_token_s[num_before:]
    finally:
        await _leave([streams_pool, long_pool], tasks)
    return Stalled(summarize(gaps), _ttft_s(long), long.num_prompt_tokens)


async def abandon_prefill(config: LoadConfig, num_long: int) -> Abandoned:
    """Leave a prompt of num_long tokens LEAVE_AFTER_S after it was sent, and at once send one of config's.

    Raises:
        CannotRun: a request failed.
    """
    run = LoadRun(config)
    prompts = await run.prompts()
    long_prompt = next(await LoadRun(_long(config, num_long)).prompts())
    pool, left_pool = _pool(config, Recorder()), _pool(config, Recorder())
    alone, after = Exchange(time.monotonic()), Exchange(0.0)
    tasks: list[asyncio.Task[object]] = []
    try:
        await pool.perform(run.request(next(prompts), 1), alone)
        tasks.append(asyncio.create_task(left_pool.perform(run.request(long_prompt, 1), Exchange(time.monotonic()))))
        await asyncio.sleep(LEAVE_AFTER_S)
        await left_pool.close()
        after.intended_s = time.monotonic()
        await pool.perform(run.request(next(prompts), 1), after)
    finally:
        await _leave([pool, left_pool], tasks)
    return Abandoned(_ttft_s(alone), _ttft_s(after))


def _long(config: LoadConfig, num_tokens: int) -> LoadConfig:
    """Another seed: its text begins like none of the short ones."""
    return replace(config, prompt_tokens=num_tokens, seed=config.seed + 1)


def _pool(config: LoadConfig, recorder: Recorder) -> ConnectionPool:
    return ConnectionPool(config.host, config.port, recorder, config.timeout_s)


async def _wait_all(streams: Sequence[Exchange], holds: Callable[[Exchange], bool], timeout_s: float) -> None:
    """Until it holds for each stream, or the stream has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not all(holds(stream) or stream.end_s for stream in streams):
                await asyncio.sleep(POLL_S)
    failed = next((stream for stream in streams if stream.failure is not None), None)
    if failed is not None:
        raise CannotRun(f"A stream failed: {failed.failure}: {failed.message}.", "look at the server alone")
    if not all(holds(stream) or stream.end_s for stream in streams):
        raise CannotRun(f"The streams stood still for {timeout_s:g} s.", "look at the server alone")


async def _leave(pools: Sequence[ConnectionPool], tasks: Sequence["asyncio.Task[object]"]) -> None:
    for pool in pools:
        await pool.close()
    await asyncio.gather(*tasks)


def _ttft_s(exchange: Exchange) -> float:
    if exchange.first_s is None:
        raise CannotRun(f"A request got no text: {exchange.failure}: {exchange.message}.", "look at the server alone")
    return exchange.first_s - exchange.intended_s
