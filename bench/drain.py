"""SIGTERM under load, again and again: `python -m bench.drain`. Nothing is timed; what is broken is counted.

Each round forks a real server (null runner, sockets, signals, threads) from a process that has imported everything,
loads it over HTTP/1.1 and HTTP/2, sends SIGTERM at a random moment, sometimes a second one, and goes on asking until it
is turned away. Every stream that has begun must come to its end or to an error event; every request that was sent
before the signal must be answered; HTTP/2 clients must hear two GOAWAYs, HTTP/1.1 ones `connection: close`. Some rounds
have clients beside them that stop in the midst of it: whose upload stops is told why, and for no one does the server
stay once the grace is over, or after a second signal.
"""

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from bench.drain_clients import (
    BROKEN,
    CLOSED,
    DONE,
    ENDLESS_TOKENS,
    PATH,
    REFUSED,
    TOLD,
    Http1Client,
    Http2Client,
    Round,
    RoundPlan,
)
from bench.drain_idlers import hear, stop_in_midst, upload_http1, upload_http2
from bench.load_run import run_on_fast_loop
from bench.peer import MODEL
from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result

NUM_ROUNDS = 1_000
NUM_AT_ONCE = 4
NUM_HTTP1 = 4  # clients, one request at a time each
NUM_HTTP2 = 2  # connections
ROUND_TIMEOUT_S = 30.0
CLIENT_CLOCK_S = 3_600.0  # the server's on heads, bodies and readers: none of them ends a round
UNREACHED_GRACE_S = 60.0  # likewise


def serve_in_child(pipe: Connection, plan: RoundPlan) -> None:
    """Be a server: tell the port once ready, end by the signal."""
    import uvloop

    from bench.null_server import load
    from server.config import ServerConfig
    from server.observing.logs import configure_logging
    from server.process import Server

    configure_logging("error", "text")
    config = ServerConfig(
        port=0,
        drain_timeout_s=plan.grace_s,
        head_timeout_s=CLIENT_CLOCK_S,
        body_timeout_s=CLIENT_CLOCK_S,
        stall_timeout_s=CLIENT_CLOCK_S,
    )

    async def main() -> int:
        server = Server(
            config,
            lambda inbox, deliver, stage: load(plan.step_rate, inbox, deliver, stage),
            lambda lines: pipe.send(server.listener.port),
        )
        server.install_signal_handlers()
        return await server.run()

    sys.exit(uvloop.run(main()))


async def upload(round_: Round, port: int, is_http2: bool) -> None:
    """Ask, but for the last byte of the body."""
    was_signalled = round_.is_signalled
    body = json.dumps({"model": MODEL, "prompt": [5, 6]}).encode()
    try:
        received = await (upload_http2 if is_http2 else upload_http1)(port, PATH, body)
    except OSError as error:
        received = repr(error).encode()
    is_told = b'"draining"' in received and (is_http2 or b"\r\nconnection: close" in received.lower())
    how = TOLD if is_told else CLOSED if was_signalled else BROKEN
    round_.end(how, f"an upload under way by HTTP/{2 if is_http2 else 1.1}: {received[-200:]!r}")


async def run_round(plan: RoundPlan) -> Round:
    """One server's life."""
    round_ = Round(plan)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serve_in_child, args=(theirs, plan), daemon=True)
    process.start()
    theirs.close()
    stopped: list[socket.socket] = []
    try:
        port = await asyncio.to_thread(ours.recv)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            clients = [
                *(Http1Client(round_, port, number).run() for number in range(NUM_HTTP1)),
                *(Http2Client(round_, port, number).run() for number in range(NUM_HTTP2)),
            ]
            if plan.has_idlers:
                body = json.dumps({"model": MODEL, "prompt": [5, 6], "max_tokens": ENDLESS_TOKENS, "stream": True})
                stopped += stop_in_midst(port, PATH, body.encode())
                clients += [upload(round_, port, is_http2) for is_http2 in (False, True)]
            await asyncio.gather(*clients, _signal(round_, process.pid or 0, port))
    except TimeoutError:
        round_.end(BROKEN, "the clients were not at their end in time")
    finally:
        ours.close()
        # In a thread only to wait: the exit code can be read once, and a start of another process reads it, too.
        await asyncio.to_thread(multiprocessing.connection.wait, [process.sentinel], ROUND_TIMEOUT_S)
        process.join(0)
        if process.exitcode != 0:
            round_.end(BROKEN, f"the server's exit code is {process.exitcode}")
            process.kill()
            process.join()
        process.close()
        for connection in stopped:
            connection.close()
    return round_


async def _signal(round_: Round, pid: int, port: int) -> None:
    await asyncio.sleep(round_.plan.signal_after_s)
    round_.is_signalled = True
    os.kill(pid, signal.SIGTERM)
    if round_.plan.has_second:
        if round_.plan.grace_s == UNREACHED_GRACE_S:
            await _wait_draining(port)  # the kernel makes one of two signals that come at once
        await asyncio.sleep(round_.plan.signal_after_s / 4)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


async def _wait_draining(port: int) -> None:
    while b'"draining"' not in await hear(port, b"GET /ready HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"):
        pass


def round_plans(num_rounds: int, seed: int) -> list[RoundPlan]:
    chance = random.Random(seed)
    plans = []
    for number in range(num_rounds):
        plan = RoundPlan(
            grace_s=chance.choice((0.0, 0.02, 10.0, 10.0)),
            step_rate=chance.choice((0.0, 500.0)),
            signal_after_s=chance.random() * 0.1,
            has_second=chance.random() < 0.2,
            seed=seed + number,
            has_idlers=chance.random() < 0.3,
        )
        if plan.has_idlers and plan.grace_s > 1:  # only a second signal is to end it
            plan = replace(plan, grace_s=UNREACHED_GRACE_S, has_second=True)
        plans.append(plan)
    return plans


def run_rounds(plans: Sequence[RoundPlan]) -> list[Round]:
    """Run them all, a few at a time: most of a round is waiting."""
    multiprocessing.set_forkserver_preload(["uvloop", "bench.null_server", "server.process"])

    async def main() -> list[Round]:
        turns = asyncio.Semaphore(NUM_AT_ONCE)

        async def take_turn(plan: RoundPlan) -> Round:
            async with turns:
                return await run_round(plan)

        return list(await asyncio.gather(*map(take_turn, plans)))

    return run_on_fast_loop(main())


def table_of(rounds: Sequence[Round]) -> Table:
    kinds = {"streams end (10 s)": 10.0, "until the second": UNREACHED_GRACE_S, "20 ms of grace": 0.02, "no grace": 0.0}
    ways = (DONE, TOLD, REFUSED, CLOSED, BROKEN)
    rows: list[tuple[Cell, ...]] = []
    for label, grace_s in kinds.items():
        chosen = [round_ for round_ in rounds if round_.plan.grace_s == grace_s]
        ends: Counter[str] = sum((round_.ends for round_ in chosen), Counter())
        rows.append((label, len(chosen), *(ends[way] for way in ways)))
    return Table(
        title="SIGTERM under load: requests and streams", columns=("grace", "SIGTERMs", *ways), rows=tuple(rows)
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.drain", description=__doc__)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "drain.json")
    arguments = parser.parse_args(argv)
    rounds = run_rounds(round_plans(arguments.rounds, arguments.seed))
    table = table_of(rounds)
    print_tables([table])
    for round_ in rounds:
        for fault in round_.faults:
            print(f"{round_.plan}: {fault}", file=sys.stderr)
    write_result(arguments.json, "drain", command_line("python -m bench.drain", argv), [table])
    return 1 if any(round_.faults for round_ in rounds) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
