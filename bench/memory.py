"""What a server's memory comes to under a long mixed load: `python -m bench.memory`.

Prompts and answers of random lengths, one in four called off at a random moment, so that steps have every number of
rows there is. The promise: beside the KV cache, which is touched block by block, at most 150 MB more than at the start.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.kit import (
    DEMO_MODEL,
    MODEL,
    Flag,
    Found,
    cpu_times,
    free_port,
    resident_bytes,
    run_bench,
    running,
    serve_command,
)
from bench.load import run_on_fast_loop
from bench.raw_clients import http1_request
from bench.results import Cell, Table

NUM_LOOKS = 6
NUM_CLIENTS = 16
KV_BYTES = 256 * 10**6
PROMISED_BYTES = 150 * 10**6
MOST_PROMPT_TOKENS, MOST_TOKENS = 400, 24
CALLED_OFF = 0.25  # of the requests
CACHE_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Look:
    """Args: num_requests: answered or called off by then; took_s: since the first; cpu_s: of the server's process."""

    num_requests: int
    took_s: float
    cpu_s: float
    size_bytes: int


class Clients:
    """Callers on one loop, each with one request at a time.

    Args:
        vocab_size: prompts are random ids below it.
    """

    def __init__(self, port: int, vocab_size: int, seed: int = 0) -> None:
        self._port, self._vocab_size = port, vocab_size
        self._random = random.Random(seed)
        self._num_left = 0

    async def run(self, num_requests: int, end_s: float) -> int:
        """Returns how many were left when the time was up."""
        self._num_left = num_requests
        await asyncio.gather(*(self._take_turns(end_s) for _ in range(NUM_CLIENTS)))
        return self._num_left

    async def _take_turns(self, end_s: float) -> None:
        while self._num_left and time.monotonic() < end_s:
            self._num_left -= 1
            await self._request()

    async def _request(self) -> None:
        rng = self._random
        prompt = rng.choices(range(self._vocab_size), k=rng.randint(1, MOST_PROMPT_TOKENS))
        sampling = {"max_tokens": rng.randint(1, MOST_TOKENS), "temperature": rng.choice([0.0, 1.0]), "top_p": 0.95}
        body = {"model": MODEL, "prompt": prompt, "stream": True, "ignore_eos": True, **sampling}
        num_reads = rng.randrange(4) if rng.random() < CALLED_OFF else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(http1_request("POST", "/v1/completions", json.dumps(body).encode()))
        if num_reads is None:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the server answered {status!r}")
            await reader.readuntil(LAST_CHUNK)
        else:
            await asyncio.sleep(rng.random() * 0.01)
            received = b""
            while num_reads and not received.endswith(LAST_CHUNK):  # it may have ended before
                num_reads -= 1
                with suppress(ConnectionError):
                    received += await reader.read(65_536)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def measure(model: Path, num_requests: int, limit_s: float, capacity: str | None) -> list[Look]:
    """The first look is the start's; fewer follow where the time is up.

    Args:
        capacity: of oneDNN's primitive cache; None: as the server has it.
    """
    port = free_port()
    command = serve_command(port, "--model", str(model), "--served-model-name", MODEL)
    command += ["--kv-memory", f"{KV_BYTES // 1000**2}MB", "--max-model-len", str(MOST_PROMPT_TOKENS + MOST_TOKENS)]
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    environment = {} if capacity is None else {CACHE_VARIABLE: capacity}
    with running(command, port, environment=environment) as pid:
        clients, started_s = Clients(port, vocab_size), time.monotonic()
        start_s = cpu_times(pid).total_s
        looks = [Look(0, 0.0, 0.0, resident_bytes(pid))]
        for index in range(NUM_LOOKS):
            size = num_requests * (index + 1) // NUM_LOOKS - num_requests * index // NUM_LOOKS
            num_left = run_on_fast_loop(clients.run(size, started_s + limit_s))
            took_s, cpu_s = time.monotonic() - started_s, cpu_times(pid).total_s - start_s
            looks.append(Look(looks[-1].num_requests + size - num_left, took_s, cpu_s, resident_bytes(pid)))
            print(looks[-1], file=sys.stderr)
            if num_left:
                break
        return looks


def table_of(looks: Sequence[Look], name: str) -> Table:
    start_bytes = looks[0].size_bytes
    rows: list[tuple[Cell, ...]] = []
    for look in looks:
        is_kept = "yes" if look.size_bytes - start_bytes - KV_BYTES <= PROMISED_BYTES else "no"
        sizes = (round(size / 1e6) for size in (look.size_bytes, look.size_bytes - start_bytes))
        rows.append((look.num_requests, round(look.took_s), round(look.cpu_s), *sizes, is_kept))
    title = f"Resident memory under a mixed load, KV cache of {KV_BYTES // 10**6} MB, {name}"
    columns = ("requests", "seconds", "CPU seconds", "MB", "more than at the start", "KV + 150 MB kept")
    return Table(title, columns, tuple(rows))


def _measure(arguments: argparse.Namespace) -> Found:
    own = os.environ.get(CACHE_VARIABLE)
    runs = {own: "as the server has it" if own is None else f"{CACHE_VARIABLE}={own}"}
    if arguments.compare is not None:
        runs[arguments.compare] = f"{CACHE_VARIABLE}={arguments.compare}"
    asked = arguments.model, arguments.requests, arguments.limit
    return Found([table_of(measure(*asked, capacity), name) for capacity, name in runs.items()])


FLAGS = (
    Flag("--model", DEMO_MODEL, "a Hugging Face directory", more={"type": Path}),
    Flag("--requests", 36_000, "in all", 240),
    Flag("--limit", 1800.0, "seconds of each run"),
    Flag("--compare", None, f"a second run, with {CACHE_VARIABLE} of so many"),
)

if __name__ == "__main__":
    sys.exit(run_bench("memory", __doc__, _measure, FLAGS))
