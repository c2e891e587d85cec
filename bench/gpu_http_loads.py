"""Requests whose moments depend on each other, through a server's port: what bench/load_run.py cannot send.

Thread: the generator's loop. Prompts that come in beside streams, a prompt that is sent again with another end, and
streams that are called off.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from bench.cancel import close
from bench.client import ConnectionPool, Exchange, Recorder
from bench.load import CannotRun, LoadConfig, LoadRun
from bench.raw_clients import http1_request
from bench.results import Distribution, summarize

STREAM_TOKENS = 1 << 13  # of a stream that outlasts what is measured beside it
FIRST_EVENTS = 4  # of each stream, before anything is measured
CANCELLED_TOKENS = 400
POLL_S = 0.002


class Beside(msgspec.Struct, frozen=True):
    """Seconds between tokens of streams, alone and while long prompts come in; and these prompts' first tokens."""

    alone_s: Distribution
    inter_token_s: Distribution
    long_ttft_s: Distribution
    num_long_tokens: int  # of the last one


async def send_beside(
    config: LoadConfig, num_streams: int, num_long: int, num_arrivals: int, every_s: float, max_tokens: int
) -> Beside:
    """Open streams, wait every_s, then send a prompt of about num_long tokens every so many seconds.

    Args:
        config: of the streams.
        max_tokens: of a stream, at most.

    Raises:
        CannotRun: a request failed.
    """
    run, config = await _known(config)
    prompts = await run.prompts()
    long_prompts = await LoadRun(replace(config, prompt_tokens=num_long, seed=config.seed + 1)).prompts()
    recorder, long_recorder = Recorder(), Recorder()
    pool, long_pool = _pool(config, recorder), _pool(config, long_recorder)
    streams = [Exchange(time.monotonic()) for _ in range(num_streams)]
    tasks = [asyncio.create_task(pool.perform(run.request(next(prompts), max_tokens), stream)) for stream in streams]
    longs = [Exchange(0.0) for _ in range(num_arrivals)]
    try:
        await _wait_until(lambda: all(_has_events(stream, FIRST_EVENTS) for stream in streams), config.timeout_s)
        num_first = len(recorder.inter_token_s)
        await asyncio.sleep(every_s)
        num_before, start_s = len(recorder.inter_token_s), time.monotonic()
        sent = []
        for number, long in enumerate(longs):
            await asyncio.sleep(max(0.0, start_s + number * every_s - time.monotonic()))
            long.intended_s = time.monotonic()
            sent.append(asyncio.create_task(long_pool.perform(run.request(next(long_prompts), 1), long)))
        await asyncio.gather(*sent)
        gaps = recorder.inter_token_s
        alone, beside = summarize(gaps[num_first:num_before]), summarize(gaps[num_before:])
        _refuse_failed([*longs, *streams])
    finally:
        await _leave([pool, long_pool], tasks)
    return Beside(alone, beside, summarize([_ttft_s(long) for long in longs]), longs[-1].num_prompt_tokens)


def _has_events(stream: Exchange, num_events: int) -> bool:
    return stream.num_events >= num_events or bool(stream.end_s)


async def send_again(config: LoadConfig, num_times: int) -> list[float]:
    """A prompt so many times, one after the other, with another end each time: seconds to each first token.

    Raises:
        CannotRun: a request failed.
    """
    run, config = await _known(config)
    text, pool = next(await run.prompts()), _pool(config, Recorder())
    exchanges = []
    try:
        for number in range(num_times):
            exchanges.append(Exchange(time.monotonic()))
            await pool.perform(run.request(f"{text} {number}", 1), exchanges[-1])
    finally:
        await pool.close()
    _refuse_failed(exchanges)
    return [_ttft_s(exchange) for exchange in exchanges]


async def call_off(config: LoadConfig, num_streams: int, num_called_off: int) -> list[float]:
    """Seconds from a DELETE of a stream that runs beside others to the end of its answer, one stream after the other.

    Raises:
        CannotRun: a stream ended before.
    """
    run, config = await _known(config)
    texts = await run.prompts()
    streams = []
    try:
        for _ in range(num_streams):
            streams.append(await asyncio.open_connection(config.host, config.port, limit=1 << 24))
            streams[-1][1].write(run.request(next(texts), CANCELLED_TOKENS))
        return [await _call_off(config, reader) for reader, _ in streams[:num_called_off]]
    finally:
        for _, writer in streams:
            await close(writer)


async def _call_off(config: LoadConfig, reader: asyncio.StreamReader) -> float:
    head = await reader.readuntil(b"\r\n\r\n")
    request_id = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
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


async def _known(config: LoadConfig) -> tuple[LoadRun, LoadConfig]:
    """With the model's name, which requests need."""
    named = replace(config, model=config.model or await LoadRun(config).first_model())
    return LoadRun(named), named


def _pool(config: LoadConfig, recorder: Recorder) -> ConnectionPool:
    return ConnectionPool(config.host, config.port, recorder, config.timeout_s)


async def _wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise CannotRun(f"The streams stood still for {timeout_s:g} s.", "look at the server alone") from error


def _refuse_failed(exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        if exchange.failure is not None:
            raise CannotRun(f"A request failed: {exchange.failure}: {exchange.message}.", "look at the server alone")


async def _leave(pools: Sequence[ConnectionPool], tasks: Sequence["asyncio.Task[object]"]) -> None:
    for pool in pools:
        await pool.close()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def _ttft_s(exchange: Exchange) -> float:
    if exchange.first_s is None:
        raise CannotRun(f"A request got no text: {exchange.failure}: {exchange.message}.", "look at the server alone")
    return exchange.first_s - exchange.intended_s
