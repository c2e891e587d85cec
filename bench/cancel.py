"""How soon a generation that nobody wants any more has given everything back: `python -m bench.cancel`.

Clients call streams off in every way, at random moments of prefill and decode, while others run. Measured for each:
the time from just before the client's system call (for a stop string: from the end of the step that sampled its last
token) to the moment at which the engine has released the blocks, and what was computed for it after the bytes came.
The promise: within one step and 50 ms, at most two tokens. Against a null runner paced like a model, and a real one.
"""

import argparse
import asyncio
import itertools
import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.kit import DEMO_MODEL, MODEL, Flag, Found, free_port, null_server_command, run_bench, running
from bench.load import run_on_fast_loop
from bench.null_server import EngineRecord, RequestRecord
from bench.raw_clients import CANCEL, GOAWAY, OPENING, RST_STREAM, frame, http1_request, http2_request, request_head
from bench.results import Cell, Table, summarize

NUM_CLIENTS = 16
STEP_RATE = 100.0
SLACK_S = 0.050
MAX_WASTED_TOKENS = 2
PATH = "/v1/completions"
HTTP2_HEAD = request_head("POST", PATH)
CANCEL_CODE = CANCEL.to_bytes(4, "big")
RESET_ON_CLOSE = b"\1\0\0\0\0\0\0\0"  # SO_LINGER of no time


@dataclass
class CallOff:
    """One generation that was called off.

    Args:
        called_off_s: of the monotonic clock, which all processes share; None: the server finds it (a stop string).
    """

    kind: str
    seed: int
    called_off_s: float | None


@dataclass
class Clients:
    """Callers on one loop, who take turns in the ways of leaving.

    Args:
        prompts: tokens of a short one and of a long one.
        max_tokens: more than any of them waits for.
    """

    port: int
    num_per_kind: int
    num_at_once: int = NUM_CLIENTS
    model: str = MODEL
    prompts: tuple[int, int] = (5, 900)
    max_tokens: int = 400
    call_offs: list[CallOff] = field(default_factory=list)
    _seeds: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _random: random.Random = field(default_factory=lambda: random.Random(3))

    async def run(self) -> None:
        ways: dict[str, Callable[[str], Awaitable[None]]] = {
            "HTTP/1.1 end of connection": self._leave_http1,
            "HTTP/1.1 TCP reset": self._leave_http1,
            "DELETE": self._delete,
            "stop string": self._stop_string,
            "HTTP/2 RST_STREAM": self._leave_http2,
            "HTTP/2 GOAWAY": self._leave_http2,
            "HTTP/2 end of connection": self._leave_http2,
        }
        turns = [(kind, way) for kind, way in ways.items() for _ in range(self.num_per_kind)]
        self._random.shuffle(turns)

        async def take_turns() -> None:
            while turns:
                kind, way = turns.pop()
                await way(kind)

        await asyncio.gather(*(take_turns() for _ in range(self.num_at_once)))

    def _request(self, **fields: object) -> tuple[int, bytes]:
        """A seed and the body that bears it."""
        seed = next(self._seeds)
        prompt = [5] * self.prompts[self._random.random() < 0.25]
        body = {"model": self.model, "prompt": prompt, "seed": seed, "stream": True, "ignore_eos": True}
        return seed, json.dumps(body | {"max_tokens": self.max_tokens} | fields).encode()

    async def _wait_moment(self, reader: asyncio.StreamReader) -> None:
        """A few tokens, or a few milliseconds: while the prompt is computed, or before."""
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.random() * 0.02)
            return
        for _ in range(self._random.randrange(1, 12)):
            await reader.read(65_536)

    def _note(self, kind: str, seed: int) -> None:
        self.call_offs.append(CallOff(kind, seed, time.monotonic()))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)

    async def _leave_http1(self, kind: str) -> None:
        reader, writer = await self._connect()
        seed, body = self._request()
        writer.write(http1_request("POST", PATH, body))
        await self._wait_moment(reader)
        if "reset" in kind:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self._note(kind, seed)
        await close(writer)

    async def _delete(self, kind: str) -> None:
        reader, writer = await self._connect()
        seed, body = self._request()
        writer.write(http1_request("POST", PATH, body))
        request_id = await read_request_id(reader)
        for _ in range(self._random.randrange(8)):
            await reader.read(65_536)
        other_reader, other = await self._connect()
        self._note(kind, seed)
        other.write(http1_request("DELETE", f"/v1/requests/{request_id}"))
        await other_reader.readuntil(b"cancelled")
        await close(writer)
        await close(other)

    async def _stop_string(self, kind: str) -> None:
        reader, writer = await self._connect()
        seed, body = self._request(stop=["7", "e", "a", "t"])
        self.call_offs.append(CallOff(kind, seed, None))
        writer.write(http1_request("POST", PATH, body))
        await reader.readuntil(b"0\r\n\r\n")
        await close(writer)

    async def _leave_http2(self, kind: str) -> None:
        reader, writer = await self._connect()
        seed, body = self._request()
        writer.write(OPENING + http2_request(1, HTTP2_HEAD, body))
        await self._wait_moment(reader)
        self._note(kind, seed)
        if kind.endswith("RST_STREAM"):
            writer.write(frame(RST_STREAM, CANCEL_CODE, 0, 1))
            await asyncio.sleep(0.1)  # or the connection's end would do it
        elif kind.endswith("GOAWAY"):
            writer.write(frame(GOAWAY, bytes(4) + CANCEL_CODE))
            with suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
        await close(writer)


async def read_request_id(reader: asyncio.StreamReader) -> str:
    """Of the answer whose head is to come."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call-off cost.

    Args:
        latency_s: until the blocks were free.
        step_s: the longest step that ran meanwhile; 0: none.
        num_wasted: tokens sampled after it.
        num_prompt_tokens: computed of the prompt after it.
    """

    kind: str
    latency_s: float
    step_s: float
    num_wasted: int
    num_prompt_tokens: int

    @property
    def excess_s(self) -> float:
        """Beyond one step."""
        return max(0.0, self.latency_s - self.step_s)


def outcome_of(call_off: CallOff, record: EngineRecord) -> Outcome | None:
    """None: it had ended by itself before, or never reached the engine."""
    request = record.requests.get(call_off.seed)
    if request is None or not request.end_s or request.reason not in ("cancelled", "stop"):
        return None
    start_s = call_off.called_off_s
    if start_s is None:
        start_s = _end_of_last_kept(request, record)
    if start_s is None or request.end_s <= start_s:
        return None
    later = [row for row in request.rows if record.steps[row.step].end_s > start_s]
    overlapping = [s.end_s - s.begin_s for s in record.steps if s.end_s > start_s and s.begin_s < request.end_s]
    num_wasted = sum(row.samples for row in later)
    num_prompt = sum(row.num_tokens for row in later if row.num_tokens > 1 or not row.samples)
    return Outcome(call_off.kind, request.end_s - start_s, max(overlapping, default=0.0), num_wasted, num_prompt)


def _end_of_last_kept(request: RequestRecord, record: EngineRecord) -> float | None:
    sampled = [row for row in request.rows if row.samples]
    if request.reason != "stop" or request.num_kept > len(sampled):
        return None
    return record.steps[sampled[request.num_kept - 1].step].end_s


def table_of(outcomes: Sequence[Outcome], title: str) -> Table:
    """One row per kind, and one for all."""
    rows: list[tuple[Cell, ...]] = []
    for kind in [*sorted({outcome.kind for outcome in outcomes}), "all"]:
        chosen = [outcome for outcome in outcomes if kind in (outcome.kind, "all")]
        latency, excess = summarize([o.latency_s * 1e3 for o in chosen]), summarize([o.excess_s * 1e3 for o in chosen])
        within = sum(o.excess_s <= SLACK_S and o.num_wasted <= MAX_WASTED_TOKENS for o in chosen)
        wasted = [outcome.num_wasted for outcome in chosen]
        times = (latency.p50, latency.p99, latency.max, excess.p99, excess.max)
        counts = (round(sum(wasted) / len(wasted), 2), max(wasted), max(o.num_prompt_tokens for o in chosen))
        rounded = (round(value or 0.0, 2) for value in times)
        rows.append((kind, len(chosen), *rounded, *counts, f"{within} of {len(chosen)}"))
    columns = ("called off by", "count", "p50 ms", "p99 ms", "max ms", "beyond a step: p99 ms", "max ms beyond")
    more = ("wasted tokens, mean", "max wasted", "max prompt tokens after", "one step + 50 ms, <= 2 tokens")
    return Table(title, (*columns, *more), tuple(rows))


def measure(model: Path | None, num_per_kind: int) -> list[Outcome]:
    """Run the server and the clients, and join what both have seen."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record"
        command = null_server_command(port, "--record", str(path), "--step-rate", str(STEP_RATE))
        clients = Clients(port, num_per_kind)
        with running(command + ([] if model is None else ["--model", str(model)]), port):
            run_on_fast_loop(clients.run())
        record = msgspec.msgpack.decode(path.read_bytes(), type=EngineRecord)
    outcomes = [outcome_of(call_off, record) for call_off in clients.call_offs]
    return [outcome for outcome in outcomes if outcome is not None]


def _measure(arguments: argparse.Namespace) -> Found:
    titles = {
        None: f"Cancel to free blocks: null runner, {STEP_RATE:g} steps/s, {NUM_CLIENTS} streams",
        arguments.model: f"Cancel to free blocks: a real model, {NUM_CLIENTS} streams",
    }
    return Found([table_of(measure(model, arguments.count), title) for model, title in titles.items()])


FLAGS = (
    Flag("--model", DEMO_MODEL, "the real one", more={"type": Path}),
    Flag("--count", 200, "of each kind", 8),
)

if __name__ == "__main__":
    sys.exit(run_bench("cancel", __doc__, _measure, FLAGS))
