"""What the ledger costs the event loop, and how long a commit takes: `python -m bench.ledger`.

The server's own objects and its real thread, on the disk of --directory. So many requests at once are each reserved and
settled, one after the other, and wait for both. The loop's time is its thread's CPU time, less that of a bare loop
that turns as often; of it, what rows, prices and calls take is measured with a writer that writes nothing. The rest is
being told: where one request is alone, that wakes the loop's thread out of its sleep, twice. What that takes whoever
does it is the limit, measured with timers.

Beside each load the disk alone: as much as a lone commit writes, and fdatasync. A write may be that much and DURABLE_S
late.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import uvloop

from bench.kit import Flag, Found, run_bench
from bench.results import Table
from core.types import Cost, Usage
from server.ledger.journal import DURABLE_S, LedgerThread, Tell, Writer, Written, open_journal
from server.ledger.ledger import End, Ledger, Subject
from server.ledger.store import Write
from server.ledger.usage import ModelPrice, Prices
from server.process import GC_THRESHOLDS, SWITCH_INTERVAL_S

AT_ONCE = (1, 16, 64, 256)
SYNCED_BYTES = 6 * 4096  # pages of the write-ahead log that a lone settlement takes
NUM_SYNCS = 100
MODEL = "m"
PRICES = Prices(((MODEL, ModelPrice(50_000, 10_000, 200_000)),))
USAGE = Usage(200, 100, 64)
END = End(USAGE, Cost(0.1, 2.0), "length", 200, None, {"receive": 0.2, "prepare": 1.5, "generate": 93.25, "total": 95})


class NoWriter:
    """Implements Writer, and writes nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._written = Written([True], None)

    def submit(self, write: Write, tell: Tell) -> None:
        self._loop.call_soon(tell, True, self._written)

    def close(self) -> None:
        pass


class Bystander:
    """Measures a bare loop in the ledger's place: two turns of it a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def serve(self, number: int) -> None:
        for _ in range(2):
            done = self._loop.create_future()
            self._loop.call_soon(done.set_result, None)
            await done


class Sleeper:
    """Measures a loop that wakes twice for a request, by timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def serve(self, number: int) -> None:
        for _ in range(2):
            done = self._loop.create_future()
            self._loop.call_later(DURABLE_S, done.set_result, None)
            await done


class Client:
    """Reserves and settles, and notes how long each took to be durable."""

    def __init__(self, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        self.latencies_s: list[float] = []
        self._ledger = ledger
        self._loop = loop

    async def serve(self, number: int) -> None:
        subject = Subject(f"{number:032x}", None, "acme", "sl-1", MODEL, "/v1/chat/completions", _count)
        entry = self._ledger.open(subject)
        await self._wait(lambda tell: entry.reserve(712, _no_progress, tell))
        await self._wait(lambda tell: entry.settle(END, tell))

    async def _wait(self, write: Callable[[Callable[[bool], None]], None]) -> None:
        durable: asyncio.Future[bool] = self._loop.create_future()
        begin_s = time.perf_counter()
        write(durable.set_result)
        if not await durable:
            raise OSError("the ledger could not be written")
        self.latencies_s.append(time.perf_counter() - begin_s)


def _count(usage: Usage) -> int:
    return usage.num_prompt_tokens + usage.num_completion_tokens


def _no_progress() -> Usage:
    return Usage(0, 0)


async def run_requests(served: Client | Bystander | Sleeper, num_requests: int, num_at_once: int) -> float:
    """Returns the loop thread's CPU time, in seconds."""
    numbers = iter(range(num_requests))

    async def work() -> None:
        for number in numbers:
            await served.serve(number)

    begin_s = time.thread_time()
    await asyncio.gather(*(work() for _ in range(num_at_once)))
    return time.thread_time() - begin_s


def sync_alone(directory: Path) -> list[float]:
    """Seconds that the disk takes for what a commit asks of it, as often as commits come."""
    found = []
    file = os.open(directory / "alone", os.O_CREAT | os.O_RDWR)
    for number in range(NUM_SYNCS):
        os.pwrite(file, b"x" * SYNCED_BYTES, number * SYNCED_BYTES)
        begin_s = time.perf_counter()
        os.fdatasync(file)
        found.append(time.perf_counter() - begin_s)
        time.sleep(DURABLE_S)
    os.close(file)
    return found


async def measure(directory: Path, num_requests: int, num_at_once: int) -> tuple[int | float, ...]:
    """A row of the table."""
    alone_s = sync_alone(directory)
    loop = asyncio.get_running_loop()
    bare_s = await run_requests(Bystander(loop), num_requests, num_at_once)
    sleeper_s = await run_requests(Sleeper(loop), num_requests, num_at_once)
    path = directory / f"{num_at_once}.db"

    def ledger_with(writer: Writer) -> Ledger:
        return Ledger(path, writer, PRICES, time.time, loop)

    empty_s = await run_requests(Client(ledger_with(NoWriter(loop)), loop), num_requests, num_at_once)
    ledger = ledger_with(LedgerThread(open_journal(path, num_at_once), loop))
    client = Client(ledger, loop)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    loop_s = await run_requests(client, num_requests, num_at_once)
    rate = num_requests / (time.perf_counter() - begin_s)
    thread_s = time.process_time() - begin_cpu_s - loop_s
    ledger.close()
    us = 1e6 / num_requests
    return (
        num_at_once,
        *(round(cpu_s * us, 1) for cpu_s in (loop_s - bare_s, empty_s - bare_s, sleeper_s - bare_s, thread_s)),
        *_p50_and_p99_ms(client.latencies_s),
        *_p50_and_p99_ms(alone_s),
        round(rate),
    )


def _p50_and_p99_ms(latencies_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(np.percentile(latencies_s, q)) * 1e3, 2) for q in (50, 99))


def _measure(arguments: argparse.Namespace) -> Found:
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # this and what follows as the server does
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for num_at_once in AT_ONCE:
            num_requests = max(num_at_once, arguments.requests // (10 if num_at_once == 1 else 1))
            rows.append(uvloop.run(measure(Path(directory), num_requests, num_at_once)))
    times = ("loop us", "of it rows and calls us", "two timers us", "its thread us")
    waits = ("commit p50 ms", "commit p99 ms", "disk p50 ms", "disk p99 ms")
    title, columns = "The ledger: CPU time a request, and until a write is durable", ("at once", *times, *waits)
    return Found([Table(title, (*columns, "requests/s"), tuple(rows))], {"requests": arguments.requests})


FLAGS = (
    Flag("--requests", 3000, "of each load", 100),
    Flag("--directory", None, "whose disk is written to (default: a temporary one)", more={"type": Path}),
)


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("ledger", __doc__, _measure, FLAGS, argv)


if __name__ == "__main__":
    sys.exit(main())
