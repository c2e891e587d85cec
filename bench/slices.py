"""How many rows a slice of a delivery should have: `python -m bench.slices`. What engine_client.SLICE_ROWS costs, and
engine_client.SLICE_CONNECTIONS: where each row makes a connection of its own write, either ends the slice.

The sizes take turns of TURN_S within one server under one load, so that what disturbs the machine meets them all alike;
of each size the median turn is shown, in microseconds of the loop thread's CPU per token.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import uvloop

from bench import null_server
from bench.reader import StreamLoad, drain
from bench.results import Cell, Table, command_line, print_tables, write_result
from core.types import StepDelivery
from server import engine_client
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from server.observing.logs import configure_logging
from server.process import SWITCH_INTERVAL_S, Server

SIZES = (16, 32, 64, 128, 256)
LOADS = ((False, 64, 64), (False, 256, 256), (True, 1, 64), (True, 4, 256))  # HTTP/2, connections, streams
TURN_S = 0.15
SETTLE_S = 0.02  # after a size has changed
WARM_UP_TOKENS = 50  # of each stream
NUM_TOKENS = 15_000  # of each stream: more than the turns take


class _Counter:
    """Tokens handed to the loop. Written by the engine's thread, read by the loop's."""

    num_tokens = 0


async def measure(is_http2: bool, num_connections: int, num_streams: int, num_turns: int) -> dict[int, float]:
    """Microseconds per token by size."""
    loop = asyncio.get_running_loop()
    counter = _Counter()

    def load(inbox: Inbox, deliver: Callable[[StepDelivery], None], stage: Callable[[str], None]) -> LoadedEngine:
        def count(delivery: StepDelivery) -> None:
            counter.num_tokens += len(delivery.request_ids)
            deliver(delivery)

        return null_server.load(0.0, inbox, count, stage)

    server = Server(ServerConfig(port=0, log_level="warning", drain_timeout_s=0.0), load, lambda lines: None)
    await server.start()
    await server.wait_ready()
    turns: dict[int, list[float]] = {size: [] for size in SIZES}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        streams = StreamLoad(server.listener.port, is_http2, num_connections, num_streams, NUM_TOKENS)
        reading = loop.run_in_executor(pool, drain, streams)
        while counter.num_tokens < WARM_UP_TOKENS * num_streams and not reading.done():
            await asyncio.sleep(SETTLE_S)
        for _ in range(num_turns):
            for size in SIZES:
                engine_client.SLICE_ROWS = engine_client.SLICE_CONNECTIONS = size
                await asyncio.sleep(SETTLE_S)
                num_before, cpu_before_s = counter.num_tokens, time.thread_time()
                await asyncio.sleep(TURN_S)
                cpu_s, num_tokens = time.thread_time() - cpu_before_s, counter.num_tokens - num_before
                if num_tokens:  # else the machine was busy elsewhere
                    turns[size].append(cpu_s / num_tokens * 1e6)
        server.stop(0.0)
        await server.wait_stopped()
        await reading
    return {size: statistics.median(found) for size, found in turns.items()}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.slices", description=__doc__)
    parser.add_argument("--turns", type=int, default=15, help="of each size (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    arguments = parser.parse_args(argv)
    configure_logging("warning", "text")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    rows: list[tuple[Cell, ...]] = []
    for is_http2, num_connections, num_streams in LOADS:
        found = uvloop.run(measure(is_http2, num_connections, num_streams, arguments.turns))
        protocol = "HTTP/2" if is_http2 else "HTTP/1.1"
        rows.append((protocol, num_streams, num_connections, *found.values()))
    columns = ("protocol", "streams", "connections", *(f"{size} rows" for size in SIZES))
    tables = [Table("Loop thread, us per token, by the size of a slice", columns, tuple(rows))]
    print_tables(tables)
    if arguments.json is not None:
        command = command_line("python -m bench.slices", argv)
        write_result(arguments.json, "slices", command, tables, {"turns": arguments.turns}, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
