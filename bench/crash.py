"""Does the ledger keep its word? `python -m bench.crash --kills 10000`: kill -9 at random moments under load.

A real server on the null runner, forked from a process that has imported everything so that a restart costs
milliseconds, is asked by several clients at once and killed. Then its ledger is opened as the next server would.
What must hold:

- every request whose end a client has seen is settled, once, with the tokens that the client was told;
- every request whose first byte a client has seen is there;
- none is in progress, and none is billed more tokens than were asked for.

In every third life someone else holds the database's lock from a random moment on: what is settled is spilled then.
Several ledgers are filled at once, each by one server after the other, in processes of their own.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from bench.client import ConnectionPool, Exchange, Recorder, encode_request
from bench.kit import MODEL, Broken, Flag, Found, bench
from bench.null_server import Pace, load
from bench.results import Table
from server.config import ServerConfig
from server.ledger import ledger
from server.ledger.journal import open_journal
from server.ledger.store import LedgerRow, LedgerStore, RowState
from server.observing.logs import configure_logging
from server.process import Server

NUM_CLIENTS = 12
STEP_RATE = 1000.0  # of the null runner: a request takes a few to 40 ms
MAX_TOKENS = 40
MOST_BEGUN = 60  # answers, before the kill; then a moment of up to:
MOMENT_S = 0.02
LOCKED_S = 0.1  # the longest that the lock is held before the kill
CHECKPOINT_S = 0.02  # the server's five seconds, for lives as short as these
TIMEOUT_S = 60.0  # a busy machine is no failure
POLL_S = 0.001
SPILL_RECORDS = 64
LOCKED_EVERY = 3  # lives
LIVES = 5  # of one ledger
NUM_AT_ONCE = 2 * (os.cpu_count() or 1)  # half of a life is waiting: for the disk, for steps, for the moment


@dataclass(slots=True)
class Seen:
    """What the clients of all rounds have seen, by our request id."""

    acknowledged: dict[str, int] = field(default_factory=dict)  # completion tokens, as they were told
    begun: set[str] = field(default_factory=set)
    num_sent: int = 0


def fork_server(config: ServerConfig) -> tuple[int, int]:
    """A server that is ready when this returns: its process id and port."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        try:
            uvloop.run(_serve(config, tell))
        finally:
            os._exit(1)
    os.close(tell)
    port = os.read(told, 16)
    os.close(told)
    if not port:
        raise Broken(f"a server did not start: {os.waitpid(pid, 0)[1]}")
    return pid, int(port)


async def _serve(config: ServerConfig, tell: int) -> None:
    ledger.CHECKPOINT_S = CHECKPOINT_S

    def say_ready(lines: list[str]) -> None:
        os.write(tell, b"%d" % server.listener.port)

    server = Server(
        config,
        lambda inbox, deliver, stage: load(Pace(1 / STEP_RATE).wait, inbox, deliver, stage),
        say_ready,
    )
    await server.run()


def live_and_die(path: Path, rng: random.Random, seen: Seen, is_locked: bool) -> None:
    """One life of a server, from its start to its kill."""
    pid, port = fork_server(ServerConfig(port=0, ledger=path, max_queue=SPILL_RECORDS))
    try:
        uvloop.run(_ask_until_killed(path, pid, port, rng, seen, is_locked))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


async def _ask_until_killed(path: Path, pid: int, port: int, rng: random.Random, seen: Seen, is_locked: bool) -> None:
    clients = [asyncio.create_task(_ask(port, random.Random(rng.random()), seen)) for _ in range(NUM_CLIENTS)]
    num_awaited = len(seen.begun) + rng.randint(0, MOST_BEGUN)
    while len(seen.begun) < num_awaited and not all(client.done() for client in clients):
        await asyncio.sleep(POLL_S)
    lock = sqlite3.connect(path, isolation_level=None, timeout=TIMEOUT_S)
    if is_locked:
        lock.execute("BEGIN IMMEDIATE")
    await asyncio.sleep(rng.random() * (LOCKED_S if is_locked else MOMENT_S))
    os.kill(pid, signal.SIGKILL)
    lock.close()
    await asyncio.gather(*clients)


async def _ask(port: int, rng: random.Random, seen: Seen) -> None:
    """One client: one request after the other, until the server is gone."""
    pool = ConnectionPool("127.0.0.1", port, Recorder(), TIMEOUT_S)
    while True:
        body = {"model": MODEL, "prompt": "x" * rng.randint(1, 50), "max_tokens": rng.randint(1, MAX_TOKENS)}
        if rng.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"content-type": "application/json"}
        exchange = Exchange(time.monotonic())
        seen.num_sent += 1
        data = encode_request("POST", "/v1/completions", "localhost", headers, json.dumps(body).encode())
        connection = await pool.perform(data, exchange)
        head = None if connection is None else connection.response.head
        if connection is None or head is None:
            break
        if head.status == 200:
            request_id = head.headers[b"x-request-id"].decode()
            seen.begun.add(request_id)
            if exchange.failure is None and connection.response.is_complete:
                whole = json.loads(connection.body)["usage"]["completion_tokens"] if connection.body else None
                seen.acknowledged[request_id] = whole or exchange.num_tokens
        if not connection.is_reusable:
            break
        if head.status != 200:
            await asyncio.sleep(0.005)  # refused while the database is locked
    await pool.close()


def check(path: Path, seen: Seen) -> list[LedgerRow]:
    """The ledger's rows.

    Raises:
        Broken: they are not what the clients have seen.
    """
    store = LedgerStore(path)
    rows = store.rows()
    store.close()
    by_id = {row.request_id: row for row in rows}
    if len(by_id) != len(rows):
        raise Broken(f"{len(rows) - len(by_id)} records are doubled")
    for request_id, num_tokens in seen.acknowledged.items():
        row = by_id.get(request_id)
        if row is None or row.state != RowState.SETTLED or row.completion_tokens != num_tokens:
            raise Broken(f"{request_id} was acknowledged with {num_tokens} tokens, and the ledger has {row}")
    if missing := seen.begun - by_id.keys():
        raise Broken(f"{len(missing)} requests were answered and are not in the ledger, such as {missing.pop()}")
    for row in rows:
        if row.state == RowState.RESERVED:
            raise Broken(f"an orphan is left: {row}")
        if row.completion_tokens > MAX_TOKENS:
            raise Broken(f"more is billed than was asked for: {row}")
    if len(rows) > seen.num_sent:
        raise Broken(f"{len(rows)} records of {seen.num_sent} requests")
    return rows


def live_on_one_ledger(directory: Path, seed: int, num_kills: int, number: int) -> Counter[str]:
    """The lives of one ledger, checked after each. Returns what was seen in them.

    Args:
        num_kills: of all ledgers together.
        number: of this one.

    Raises:
        Broken: see check().
    """
    rng = random.Random(f"{seed} {number}")
    path, seen, rows = directory / f"ledger-{number}.db", Seen(), []
    lives = range(num_kills)[number * LIVES : (number + 1) * LIVES]
    for life in lives:
        live_and_die(path, rng, seen, is_locked=life % LOCKED_EVERY == 0)
        open_journal(path, SPILL_RECORDS).close()  # as the next server does before it listens
        rows = check(path, seen)
    for old in directory.glob(f"{path.name}*"):
        old.unlink()
    num_aborted = sum(row.state == RowState.ABORTED for row in rows)
    return Counter(kills=len(lives), requests=len(rows), acknowledged=len(seen.acknowledged), aborted=num_aborted)


def run(num_kills: int, seed: int, num_at_once: int, directory: Path) -> Counter[str]:
    """Kill so often, check each time, and count what was seen.

    Raises:
        Broken: see check().
    """
    socket.getaddrinfo("127.0.0.1", 0)  # imports what each server would
    gc.collect()
    gc.freeze()  # a server's own collection at its start would copy every page of what it has inherited
    live = partial(live_on_one_ledger, directory, seed, num_kills)
    numbers = range(-(-num_kills // LIVES))
    totals = Counter[str]()
    with ProcessPoolExecutor(num_at_once, multiprocessing.get_context("fork")) as pool:
        try:
            for found in pool.map(live, numbers):
                totals += found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return totals


def _measure(arguments: argparse.Namespace) -> Found:
    configure_logging("critical", "text")
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = run(arguments.kills, arguments.seed, arguments.at_once, Path(directory))
    duration_s = round(time.monotonic() - begin_s)
    seen = ", ".join(f"{count:,} {name}" for name, count in found.items())
    print(f"{duration_s} s: {seen}; none lost, none doubled, no orphan")
    columns = (*found, "lost", "doubled", "orphans", "s")  # of one that is lost no result is written
    title = "kill -9 under load: what clients had seen, and what the ledgers had"
    return Found([Table(title, columns, ((*found.values(), 0, 0, 0, duration_s),))])


FLAGS = (
    Flag("--kills", 1_000, "how often", 10),
    Flag("--seed", 1, "of the moments; the machine's timing is its own"),
    Flag("--at-once", NUM_AT_ONCE, "servers"),
)

main = bench("crash", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
