"""What a request's clock costs, and whether it is right: `python -m bench.timing`.

- Each request's stages against a clock of the client's: both read CLOCK_MONOTONIC, so what the server's total
  leaves unexplained of the client's time is the kernel and the client itself.
- A scrape of /metrics while streams run: what it takes of the event loop, by the server's own gauge.
- The stamps of a delivery, alone: microseconds per token, by the rows of its slices.
"""

import argparse
import contextlib
import json
import socket
import sys
import threading
import time
import timeit
from collections.abc import Callable, Sequence

from bench.client import encode_request
from bench.kit import MODEL, Flag, Found, free_port, null_server_command, run_bench, running
from bench.results import Cell, Table, percentile
from server.engine_client import SLICE_ROWS, LoopWork

STEP_RATE = 200.0  # of the null model, per second
NUM_TOKENS = 50
NUM_STREAMS = 64
STREAM_TOKENS = 16_000  # of those that run while it is scraped: more than that takes
NUM_SCRAPES = 30
SCRAPE_PAUSE_S = 0.1
NUM_STAMPS = 200_000


def post(port: int, max_tokens: int, is_stream: bool) -> socket.socket:
    """A connection on which a generation has been asked for."""
    fields = {"model": MODEL, "prompt": "a" * 200, "max_tokens": max_tokens, "stream": is_stream, "ignore_eos": True}
    headers = {"connection": "close", "content-type": "application/json"}
    body = json.dumps(fields | {"timings": True}).encode()
    return _ask(port, encode_request("POST", "/v1/completions", "a", headers, body))


def _ask(port: int, request: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(request)
    return connection


def read_all(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def compare_clocks(port: int, num_requests: int, is_stream: bool) -> list[tuple[float, float]]:
    """Of each request the client's milliseconds, from its first byte sent to its last received, and the server's."""
    pairs = []
    for _ in range(num_requests):
        began_s = time.monotonic()
        received = read_all(post(port, NUM_TOKENS, is_stream))
        client_ms = (time.monotonic() - began_s) * 1e3
        told = received[received.rindex(b'"timings":') + len(b'"timings":') :]
        timings, _ = json.JSONDecoder().raw_decode(told.decode())
        pairs.append((client_ms, timings["total"]))
    return pairs


def scrape_under_load(port: int) -> list[float]:
    """Milliseconds of the loop that each page took."""
    streams = [post(port, STREAM_TOKENS, is_stream=True) for _ in range(NUM_STREAMS)]
    readers = [threading.Thread(target=_drain, args=(one,), daemon=True) for one in streams]
    for reader in readers:
        reader.start()
    found = []
    for _ in range(NUM_SCRAPES):
        time.sleep(SCRAPE_PAUSE_S)
        page = read_all(_ask(port, encode_request("GET", "/metrics", "a", {"connection": "close"}))).decode()
        (line,) = [line for line in page.splitlines() if line.startswith("steploop_scrape_seconds{")]
        found.append(float(line.rpartition(" ")[2]) * 1e3)
    for one in streams:
        with contextlib.suppress(OSError):  # it may be at its end already
            one.shutdown(socket.SHUT_RDWR)
    for reader in readers:
        reader.join()
    return found[1:]  # each page tells of the one before


def _drain(connection: socket.socket) -> None:
    """To the end, whoever makes it."""
    with contextlib.suppress(ConnectionResetError):
        read_all(connection)


def stamps_us() -> dict[int, float]:
    """Microseconds per token that the loop's stamps cost, by the rows of a slice."""
    work, clock = LoopWork(), time.monotonic

    def stamp() -> None:
        began_s = clock()
        work.num_tokens += 1
        work.busy_s += clock() - began_s

    return {rows: _least_s(stamp) / rows * 1e6 for rows in (1, 8, SLICE_ROWS)}


def _least_s(work: Callable[[], None]) -> float:
    return min(timeit.repeat(work, number=NUM_STAMPS, repeat=5)) / NUM_STAMPS


def _measure(arguments: argparse.Namespace) -> Found:
    port = free_port()
    with running(null_server_command(port, "--step-rate", str(STEP_RATE)), port):
        pairs = {kind: compare_clocks(port, arguments.requests, kind == "streamed") for kind in ("streamed", "whole")}
        scrapes = scrape_under_load(port)
    columns = ("kind", "client ms p50", "server ms p50", "unexplained ms p50", "p99", "server more, ms at most")
    rows = tuple(_compared(kind, found) for kind, found in pairs.items())
    figures = (len(scrapes), percentile(scrapes, 50), percentile(scrapes, 99), max(scrapes))
    scraped = f"A scrape while {NUM_STREAMS} streams run, ms of the event loop"
    return Found(
        [
            Table(f"A request of {NUM_TOKENS} tokens by the client's clock and by its own", columns, rows),
            Table(scraped, ("pages", "p50", "p99", "most"), (figures,)),
            Table("Stamps of the clock", ("rows of a slice", "us per token"), tuple(stamps_us().items())),
        ]
    )


def _compared(kind: str, pairs: Sequence[tuple[float, float]]) -> tuple[Cell, ...]:
    gaps = [client - server for client, server in pairs]
    clients, servers = zip(*pairs, strict=True)
    medians = (percentile(values, 50) for values in (clients, servers, gaps))
    return (kind, *medians, percentile(gaps, 99), max(0.0, -min(gaps)))


def main(argv: Sequence[str] | None = None) -> int:
    return run_bench("timing", __doc__, _measure, (Flag("--requests", 100, "of each kind", 5),), argv)


if __name__ == "__main__":
    sys.exit(main())
