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
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from bench.cancel import close
from bench.kit import MODEL, Flag, Found, run_bench
from bench.load import run_on_fast_loop
from bench.raw_clients import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_STREAM_ID,
    OPENING,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    frame,
    frames,
    http1_request,
    http2_request,
    request_head,
)
from bench.results import Cell, Table

NUM_AT_ONCE = 4
NUM_HTTP1 = 4  # clients, one request at a time each
NUM_HTTP2 = 2  # connections
NUM_STREAMS = 6  # at once on an HTTP/2 connection
ROUND_TIMEOUT_S = 30.0
CLIENT_CLOCK_S = 3_600.0  # the server's on heads, bodies and readers: none of them ends a round
UNREACHED_GRACE_S = 60.0  # likewise
ENDLESS_TOKENS = 15_000
MAX_LATE_ANSWERS = 2  # on one connection without `connection: close`: taken before the server had heard of its end
RECEIVE_BUFFER_BYTES = 4096
NO_WINDOW = (4).to_bytes(2, "big") + bytes(4)  # RFC 9113 §6.5.2: SETTINGS_INITIAL_WINDOW_SIZE 0
PATH = "/v1/completions"
HTTP2_HEAD = request_head("POST", PATH)

WAYS = DONE, TOLD, REFUSED, CLOSED, BROKEN = (
    "whole",
    "error event or 503",
    "REFUSED_STREAM",
    "sent late, closed unanswered",
    "broken",
)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What happens in one round.

    Args:
        grace_s: what the server gives its streams.
        step_rate: of the null runner, steps/s; 0: as fast as it goes.
        signal_after_s: under load.
        has_second: another SIGTERM follows.
        has_idlers: some clients do not move.
    """

    grace_s: float
    step_rate: float
    signal_after_s: float
    has_second: bool
    seed: int
    has_idlers: bool = False


@dataclass
class Round:
    """One server and its clients."""

    plan: RoundPlan
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_signalled: bool = False

    def end(self, how: str, detail: str = "") -> None:
        self.ends[how] += 1
        if how == BROKEN:
            self.faults.append(detail)

    def body(self, chance: random.Random) -> bytes:
        """A completion, streamed or whole; where the grace is short, many outlast it and the farewell after it."""
        outlasts = self.plan.grace_s < 1 and chance.random() < 0.5
        num_tokens = ENDLESS_TOKENS if outlasts else chance.randint(1, 120)
        fields = {"model": MODEL, "prompt": [5, 6], "ignore_eos": True, "max_tokens": num_tokens}
        return json.dumps(fields | {"stream": chance.random() < 0.7}).encode()


def _verdict(content: bytes) -> tuple[str, str]:
    """Of an answer that is framed to its end."""
    if content.startswith(b"{"):
        return (TOLD if b'"draining"' in content else DONE), ""
    if content.endswith(b"data: [DONE]\n\n"):
        return DONE, ""
    return (TOLD if b'"code":"draining"' in content else BROKEN), f"a stream's end: {content[-200:]!r}"


class Http1Client:
    """One request after the other, on one connection as long as the server keeps it, then on new ones."""

    def __init__(self, round_: Round, port: int, number: int) -> None:
        self._round = round_
        self._port = port
        self._chance = random.Random(round_.plan.seed * 100 + number)
        self._num_late = 0  # answers to requests sent after the signal that did not announce the end

    async def run(self) -> None:
        is_turned_away = False
        while not is_turned_away:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
            except OSError:
                assert self._round.is_signalled, "the server is gone before its signal"
                return
            try:
                is_turned_away = await self._use(reader, writer)
            finally:
                await close(writer)

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Ask until the connection ends; whether there was a refusal."""
        while True:
            was_signalled, received = self._round.is_signalled, b""
            writer.write(http1_request("POST", PATH, self._round.body(self._chance)))
            try:
                received = await reader.readuntil(b"\r\n\r\n")
                fields = received.lower()
                content = await _content(reader, fields)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                partial = received + getattr(error, "partial", b"")
                is_excused = was_signalled and not partial
                self._round.end(CLOSED if is_excused else BROKEN, f"HTTP/1.1: {partial[-200:]!r}")
                return was_signalled
            self._round.end(*_verdict(content))
            if b"\r\nconnection: close" in fields:
                return b'"draining"' in content
            self._num_late += was_signalled
            if self._num_late > MAX_LATE_ANSWERS:
                self._round.end(BROKEN, "HTTP/1.1: asked again and again after the signal, and never told to close")
                return True


async def _content(reader: asyncio.StreamReader, fields: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in fields:
        return await reader.readexactly(int(fields.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    content = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return content


class Http2Client:
    """Several streams at once on one connection, new ones for those that end, until the connection ends."""

    def __init__(self, round_: Round, port: int, number: int) -> None:
        self._round = round_
        self._port = port
        self._chance = random.Random(round_.plan.seed * 100 + 50 + number)
        self._streams: dict[int, bytes] = {}  # id -> content so far
        self._sent_late: set[int] = set()  # after the signal
        self._goaways: list[int] = []
        self._next_stream_id = 1

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(OPENING)
        received = b""
        with suppress(ConnectionError):
            while True:
                self._ask(writer)
                data = await reader.read(65_536)
                if not data:
                    break
                received = self._take_frames(received + data, writer)
        await close(writer)
        for stream_id, content in self._streams.items():
            self._round.end(BROKEN, f"HTTP/2: the connection ended in stream {stream_id} after {content[-200:]!r}")
        if len(self._goaways) != 2 or self._goaways[0] != MAX_STREAM_ID or self._goaways[1] == MAX_STREAM_ID:
            self._round.end(BROKEN, f"HTTP/2: GOAWAYs for {self._goaways} instead of {MAX_STREAM_ID} and the last one")

    def _ask(self, writer: asyncio.StreamWriter) -> None:
        """Also after the first GOAWAY, which says only that another will follow; not after that."""
        while len(self._streams) < NUM_STREAMS and len(self._goaways) < 2:
            stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
            self._streams[stream_id] = b""
            if self._round.is_signalled:
                self._sent_late.add(stream_id)
            writer.write(http2_request(stream_id, HTTP2_HEAD, self._round.body(self._chance)))

    def _take_frames(self, received: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Returns what is no whole frame yet."""
        position = 0
        for kind, flags, stream_id, start, position in frames(received):
            payload = received[start:position]
            if kind == PING and not flags & ACK:
                writer.write(frame(PING, payload, ACK))
            elif kind == GOAWAY:
                self._take_goaway(int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big"))
            elif kind == RST_STREAM:
                self._take_reset(stream_id, int.from_bytes(payload, "big"))
            elif stream_id in self._streams:
                if kind == DATA:
                    self._streams[stream_id] += payload
                if flags & END_STREAM and kind in (DATA, HEADERS):
                    self._round.end(*_verdict(self._streams.pop(stream_id)))
        return received[position:]

    def _take_goaway(self, last_stream_id: int, code: int) -> None:
        self._goaways.append(last_stream_id)
        if code:
            self._round.end(BROKEN, f"HTTP/2: GOAWAY with code {code}")
        if last_stream_id != MAX_STREAM_ID:
            for stream_id in [stream_id for stream_id in self._streams if stream_id > last_stream_id]:
                self._take_reset(stream_id, REFUSED_STREAM)

    def _take_reset(self, stream_id: int, code: int) -> None:
        content = self._streams.pop(stream_id, None)
        if content is not None:
            is_refused = code == REFUSED_STREAM and not content and stream_id in self._sent_late
            self._round.end(REFUSED if is_refused else BROKEN, f"HTTP/2: reset with {code} after {content[-200:]!r}")


async def hear(port: int, sent: bytes) -> bytes:
    """What is said on a connection to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with suppress(ConnectionError):
        writer.write(sent)
        while data := await reader.read(65_536):
            received += data
    await close(writer)
    return received


async def upload(round_: Round, port: int, is_http2: bool) -> None:
    """A request whose body's last byte never comes."""
    was_signalled = round_.is_signalled
    body = json.dumps({"model": MODEL, "prompt": [5, 6]}).encode()
    sent = http1_request("POST", PATH, body)[:-1]
    if is_http2:
        sent = OPENING + frame(HEADERS, HTTP2_HEAD, END_HEADERS, 1) + frame(DATA, body[:-1], 0, 1)
    try:
        received = await hear(port, sent)
    except OSError as error:
        received = repr(error).encode()
    is_told = b'"draining"' in received and (is_http2 or b"\r\nconnection: close" in received.lower())
    how = TOLD if is_told else CLOSED if was_signalled else BROKEN
    round_.end(how, f"an upload under way by HTTP/{2 if is_http2 else 1.1}: {received[-200:]!r}")


def stop_in_midst(port: int) -> list[socket.socket]:
    """A socket that nobody reads, an HTTP/2 window that stays shut, half a head: to be closed by the caller."""
    fields = {"model": MODEL, "prompt": [5, 6], "max_tokens": ENDLESS_TOKENS, "stream": True}
    body = json.dumps(fields).encode()
    shut = PREFACE + frame(SETTINGS, NO_WINDOW) + http2_request(1, HTTP2_HEAD, body)
    sockets = []
    for sent in (http1_request("POST", PATH, body), shut, b"GET /hea"):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        sockets.append(connection)
    return sockets


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
                stopped += stop_in_midst(port)
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
    if not round_.plan.has_second:
        return
    if round_.plan.grace_s == UNREACHED_GRACE_S:  # the kernel makes one of two signals that come at once
        while b'"draining"' not in await hear(port, b"GET /ready HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"):
            pass
    await asyncio.sleep(round_.plan.signal_after_s / 4)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


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
    rows: list[tuple[Cell, ...]] = []
    for label, grace_s in kinds.items():
        chosen = [round_ for round_ in rounds if round_.plan.grace_s == grace_s]
        ends = sum((round_.ends for round_ in chosen), Counter[str]())
        rows.append((label, len(chosen), *(ends[way] for way in WAYS)))
    return Table("SIGTERM under load: requests and streams", ("grace", "SIGTERMs", *WAYS), tuple(rows))


def _measure(arguments: argparse.Namespace) -> Found:
    rounds = run_rounds(round_plans(arguments.rounds, arguments.seed))
    for round_ in rounds:
        for fault in round_.faults:
            print(f"{round_.plan}: {fault}", file=sys.stderr)
    return Found([table_of(rounds)], code=1 if any(round_.faults for round_ in rounds) else 0)


FLAGS = (Flag("--rounds", 1_000, "SIGTERMs", 20), Flag("--seed", 1, "of the moments"))

if __name__ == "__main__":
    sys.exit(run_bench("drain", __doc__, _measure, FLAGS))
