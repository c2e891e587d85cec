"""How soon a generation that nobody wants any more has given everything back: `python -m bench.cancel`.

Clients call streams off in every way, at random moments of prefill and decode, while others run. Measured for each:
the time from just before the client's system call (for a stop string: from the end of the step that drew its last
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

from bench import http2_frames
from bench.http2_frames import CANCEL, GOAWAY, OPENING, RST_STREAM, frame
from bench.load_run import run_on_fast_loop
from bench.measures import summarize
from bench.peer import MODEL
from bench.recorded_server import EngineRecord, RequestRecord
from bench.results import RESULTS_DIR, Cell, Table, command_line, print_tables, write_result
from bench.server_process import free_port, running

DEMO_MODEL = Path(__file__).parent.parent / "gpu" / "demo" / "model"
NUM_PER_KIND = 200
NUM_CLIENTS = 16
LONG_PROMPT_TOKENS = 900
SLACK_S = 0.050
MAX_WASTED_TOKENS = 2
PATH = "/v1/completions"

HTTP2_HEAD = http2_frames.request_head("POST", PATH)
CANCEL_CODE = CANCEL.to_bytes(4, "big")


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
        max_tokens: more than any of them waits for.
    """

    port: int
    num_per_kind: int
    max_tokens: int
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
        await asyncio.gather(*(self._take_turns(turns) for _ in range(NUM_CLIENTS)))

    async def _take_turns(self, turns: list[tuple[str, Callable[[str], Awaitable[None]]]]) -> None:
        while turns:
            kind, way = turns.pop()
            await way(kind)

    def _request(self, **fields: object) -> tuple[int, bytes]:
        """A seed and the body that bears it."""
        seed = next(self._seeds)
        prompt = [5] * (LONG_PROMPT_TOKENS if self._random.random() < 0.25 else 5)
        body = {"model": MODEL, "prompt": prompt, "seed": seed, "stream": True, "ignore_eos": True}
        return seed, json.dumps(body | {"max_tokens": self.max_tokens} | fields).encode()

    async def _wait_moment(self, reader: asyncio.StreamReader) -> bytes:
        """A few tokens, or a few milliseconds: while the prompt is computed, or before."""
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.random() * 0.02)
            return b""
        received = b""
        for _ in range(self._random.randrange(1, 12)):
            received += await reader.read(65_536)
        return received

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
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._note(kind, seed)
        await close(writer)

    async def _delete(self, kind: str) -> None:
        reader, writer = await self._connect()
        other_reader, other = await self._connect()
        seed, body = self._request()
        writer.write(http1_request("POST", PATH, body))
        head = await reader.readuntil(b"\r\n\r\n")
        request_id = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
        for _ in range(self._random.randrange(8)):
            await reader.read(65_536)
        self._note(kind, seed)
        other.write(http1_request("DELETE", f"/v1/requests/{request_id}", b""))
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
        writer.write(OPENING + http2_frames.request(1, HTTP2_HEAD, body))
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


def http1_request(method: str, path: str, body: bytes) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call-off cost.

    Args:
        latency_s: until the blocks were free.
        step_s: the longest step that ran meanwhile; 0: none.
        num_wasted: tokens drawn after it.
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
    num_wasted = sum(row.draws for row in later)
    num_prompt = sum(row.num_tokens for row in later if row.num_tokens > 1 or not row.draws)
    return Outcome(call_off.kind, request.end_s - start_s, max(overlapping, default=0.0), num_wasted, num_prompt)


def _end_of_last_kept(request: RequestRecord, record: EngineRecord) -> float | None:
    draws = [row for row in request.rows if row.draws]
    if request.reason != "stop" or request.num_kept > len(draws):
        return None
    return record.steps[draws[request.num_kept - 1].step].end_s


def tables_of(outcomes: Sequence[Outcome], title: str) -> Table:
    """One row per kind, and one for all."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    rows: list[tuple[Cell, ...]] = []
    for kind in [*kinds, "all"]:
        chosen = [outcome for outcome in outcomes if kind in (outcome.kind, "all")]
        latency, excess = summarize([o.latency_s * 1e3 for o in chosen]), summarize([o.excess_s * 1e3 for o in chosen])
        within = sum(o.excess_s <= SLACK_S and o.num_wasted <= MAX_WASTED_TOKENS for o in chosen)
        wasted = [outcome.num_wasted for outcome in chosen]
        rows.append(
            (
                kind,
                len(chosen),
                *(round(value or 0.0, 2) for value in (latency.p50, latency.p99, latency.max)),
                *(round(value or 0.0, 2) for value in (excess.p99, excess.max)),
                round(sum(wasted) / len(wasted), 2),
                max(wasted),
                max(outcome.num_prompt_tokens for outcome in chosen),
                f"{within} of {len(chosen)}",
            )
        )
    columns = (
        "called off by",
        "count",
        "p50 ms",
        "p99 ms",
        "max ms",
        "beyond a step: p99 ms",
        "max ms beyond",
        "wasted tokens, mean",
        "max wasted",
        "max prompt tokens after",
        "one step + 50 ms, <= 2 tokens",
    )
    return Table(title=title, columns=columns, rows=tuple(rows))


def measure(model: Path | None, num_per_kind: int) -> list[Outcome]:
    """Run the server and the clients, and join what both have seen."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "record"
        command = [sys.executable, "-m", "bench.recorded_server", "--port", str(port), "--record", str(path)]
        if model is not None:
            command += ["--model", str(model)]
        clients = Clients(port, num_per_kind, max_tokens=400)
        with running(command, port):
            run_on_fast_loop(clients.run())
        record = msgspec.msgpack.decode(path.read_bytes(), type=EngineRecord)
    outcomes = [outcome_of(call_off, record) for call_off in clients.call_offs]
    return [outcome for outcome in outcomes if outcome is not None]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cancel", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="the real one (default: the embedded model)")
    parser.add_argument("--count", type=int, default=NUM_PER_KIND, help="of each kind")
    parser.add_argument("--json", type=Path, default=RESULTS_DIR / "cancel.json")
    arguments = parser.parse_args(argv)
    tables = [
        tables_of(measure(None, arguments.count), "Cancel to free blocks: null runner, 100 steps/s, 16 streams"),
        tables_of(measure(arguments.model, arguments.count), "Cancel to free blocks: a real model, 16 streams"),
    ]
    print_tables(tables)
    write_result(arguments.json, "cancel", command_line("python -m bench.cancel", argv), tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
