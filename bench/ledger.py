"""What the ledger costs the event loop, and how long a commit takes: `python -m bench.ledger`.

The server's own objects and its real thread, on the disk of --directory. Requests, so many at once, are each reserved
and settled, one after the other, and wait for both. The loop's time is its thread's CPU time, less that of a bare loop
that turns as often. Where one request is alone, most of it is the loop's thread being woken out of its sleep, twice.

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
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench.kit import Flag, Found, bench
from bench.results import Cell, percentile, table_of
from core.types import Cost, Usage
from server.ledger.journal import DURABLE_S, LedgerThread, open_journal
from server.ledger.ledger import End, Ledger
from server.ledger.store import LedgerRow
from server.ledger.usage import ModelPrice, Prices
from server.process import GC_THRESHOLDS, SWITCH_INTERVAL_S

AT_ONCE = (1, 16, 64, 256)
SYNCED_BYTES = 6 * 4096  # pages of the write-ahead log that a lone settlement takes
NUM_SYNCS = 100
MODEL = "m"
PRICES = Prices(((MODEL, ModelPrice(50_000, 10_000, 200_000)),))
USAGE = Usage(200, 100, 64)
END = End(USAGE, Cost(0.1, 2.0), "length", 200, None, {"receive": 0.2, "prepare": 1.5, "generate": 93.25, "total": 95})

Serve = Callable[[int], Awaitable[None]]  # the number of the request


async def run_requests(serve: Serve, num_requests: int, num_at_once: int) -> float:
    """Returns the loop thread's CPU time, in seconds."""
    numbers = iter(range(num_requests))

    async def work() -> None:
        for number in numbers:
            await serve(number)

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


async def measure(directory: Path, num_requests: int, num_at_once: int) -> dict[str, Cell]:
    """A row of the table."""
    alone_s = sync_alone(directory)
    loop = asyncio.get_running_loop()
    latencies_s: list[float] = []

    async def turn_twice(number: int) -> None:
        """Waits for two turns of the loop, as a request waits for two writes."""
        for _ in range(2):
            done = loop.create_future()
            loop.call_soon(done.set_result, None)
            await done

    thread = LedgerThread(open_journal(directory / f"{num_at_once}.db", num_at_once), loop)
    ledger = Ledger(directory / f"{num_at_once}.db", thread, PRICES, time.time, loop)

    async def wait(write: Callable[[Callable[[bool], None]], None]) -> None:
        durable: asyncio.Future[bool] = loop.create_future()
        begin_s = time.perf_counter()
        write(durable.set_result)
        if not await durable:
            raise OSError("the ledger could not be written")
        latencies_s.append(time.perf_counter() - begin_s)

    async def book(number: int) -> None:
        entry = ledger.open(LedgerRow(f"{number:032x}", None, "acme", "sl-1", MODEL, "/v1/chat/completions"), _count)
        await wait(lambda tell: entry.reserve(712, _no_progress, tell))
        await wait(lambda tell: entry.settle(END, tell))

    load = num_requests, num_at_once
    bare_s = await run_requests(turn_twice, *load)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    loop_s = await run_requests(book, *load)
    rate = num_requests / (time.perf_counter() - begin_s)
    thread_s = time.process_time() - begin_cpu_s - loop_s
    ledger.close()
    us = 1e6 / num_requests
    cells: dict[str, Cell] = {"loop us": round((loop_s - bare_s) * us, 1), "its thread us": round(thread_s * us, 1)}
    for name, seconds in (("commit", latencies_s), ("disk", alone_s)):
        cells |= {f"{name} p{q} ms": round((percentile(seconds, q) or 0.0) * 1e3, 2) for q in (50, 99)}
    return {"at once": num_at_once} | cells | {"requests/s": round(rate)}


def _count(usage: Usage) -> int:
    return usage.num_prompt_tokens + usage.num_completion_tokens


def _no_progress() -> Usage:
    return Usage(0, 0)


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
    title = "The ledger: CPU time a request, and until a write is durable"
    return Found([table_of(title, rows)], {"requests": arguments.requests})


FLAGS = (
    Flag("--requests", 3000, "of each load", 100),
    Flag("--directory", None, "whose disk is written to (default: a temporary one)", more={"type": Path}),
)
main = bench("ledger", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
