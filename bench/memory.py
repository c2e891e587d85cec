"""A server's resident memory under a long mixed load: `python -m bench.memory`.

Prompts and answers have random lengths, and one request in four is abandoned at a random moment, so that steps have
every number of rows there is. The promise: beside the KV cache, which is touched block by block, at most 150 MB more
than at the start.
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
    bench,
    cpu_times,
    free_port,
    resident_bytes,
    running,
    serve_command,
)
from bench.load import run_on_fast_loop
from bench.raw_clients import LAST_CHUNK, http1_request
from bench.results import Cell, Table, table_of

NUM_LOOKS = 6
NUM_CLIENTS = 16
KV_BYTES = 256 * 10**6
PROMISED_BYTES = 150 * 10**6
MOST_PROMPT_TOKENS, MOST_TOKENS = 400, 24
ABANDONED_SHARE = 0.25  # of the requests
CACHE_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@dataclass(frozen=True, slots=True)
class Look:
    """Args: num_requests: ended by then; took_s: since the first; cpu_s: of the server's process."""

    num_requests: int
    took_s: float
    cpu_s: float
    size_bytes: int


async def send_request(port: int, vocab_size: int, rng: random.Random) -> None:
    """One request with a prompt of random ids, read to its end or abandoned."""
    prompt = rng.choices(range(vocab_size), k=rng.randint(1, MOST_PROMPT_TOKENS))
    sampling = {"max_tokens": rng.randint(1, MOST_TOKENS), "temperature": rng.choice([0.0, 1.0]), "top_p": 0.95}
    body = {"model": MODEL, "prompt": prompt, "stream": True, "ignore_eos": True, **sampling}
    is_abandoned = rng.random() < ABANDONED_SHARE
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(http1_request("POST", "/v1/completions", json.dumps(body).encode()))
    if is_abandoned:
        await asyncio.sleep(rng.random() * 0.01)
        for _ in range(rng.randrange(4)):
            with suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(65_536), 1.0)  # the answer may have ended
    else:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status!r}")
        await reader.readuntil(b"\r\n" + LAST_CHUNK)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def measure(model: Path, num_requests: int, limit_s: float, capacity: str | None) -> list[Look]:
    """The first look is at the start; the others are evenly spread over the requests, or end with the time.

    Args:
        capacity: of oneDNN's primitive cache; None: as the server has it.
    """
    port, rng, num_sent, started_s = free_port(), random.Random(0), 0, time.monotonic()
    command = serve_command(port, "--model", str(model), "--served-model-name", MODEL)
    command += ["--kv-memory", f"{KV_BYTES // 1000**2}MB", "--max-model-len", str(MOST_PROMPT_TOKENS + MOST_TOKENS)]
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    environment = {} if capacity is None else {CACHE_VARIABLE: capacity}

    async def send_until(num_wanted: int) -> None:
        nonlocal num_sent

        async def be_client() -> None:
            nonlocal num_sent
            while num_sent < num_wanted and time.monotonic() < started_s + limit_s:
                num_sent += 1
                await send_request(port, vocab_size, rng)

        await asyncio.gather(*(be_client() for _ in range(NUM_CLIENTS)))

    with running(command, port, environment=environment) as pid:
        started_s, start_cpu_s = time.monotonic(), cpu_times(pid).total_s
        looks = [Look(0, 0.0, 0.0, resident_bytes(pid))]
        for number in range(1, NUM_LOOKS + 1):
            run_on_fast_loop(send_until(num_requests * number // NUM_LOOKS))
            took_s, cpu_s = time.monotonic() - started_s, cpu_times(pid).total_s - start_cpu_s
            looks.append(Look(num_sent, took_s, cpu_s, resident_bytes(pid)))
            print(looks[-1], file=sys.stderr)
            if took_s >= limit_s:
                break
        return looks


def table_of_looks(looks: Sequence[Look], name: str) -> Table:
    start_bytes = looks[0].size_bytes
    rows: list[dict[str, Cell]] = [
        {
            "requests": look.num_requests,
            "seconds": round(look.took_s),
            "CPU seconds": round(look.cpu_s),
            "MB": round(look.size_bytes / 1e6),
            "more than at the start": round((look.size_bytes - start_bytes) / 1e6),
            "KV + 150 MB kept": "yes" if look.size_bytes - start_bytes - KV_BYTES <= PROMISED_BYTES else "no",
        }
        for look in looks
    ]
    return table_of(f"Resident memory under a mixed load, KV cache of {KV_BYTES // 10**6} MB, {name}", rows)


def _measure(arguments: argparse.Namespace) -> Found:
    own = os.environ.get(CACHE_VARIABLE)
    runs = {own: "as the server has it" if own is None else f"{CACHE_VARIABLE}={own}"}
    if arguments.compare is not None:
        runs[arguments.compare] = f"{CACHE_VARIABLE}={arguments.compare}"
    asked = arguments.model, arguments.requests, arguments.limit
    return Found([table_of_looks(measure(*asked, capacity), name) for capacity, name in runs.items()])


FLAGS = (
    Flag("--model", DEMO_MODEL, "a Hugging Face directory", more={"type": Path}),
    Flag("--requests", 36_000, "in all", 240),
    Flag("--limit", 1800.0, "seconds of each run"),
    Flag("--compare", None, f"a second run, with {CACHE_VARIABLE} of so many"),
)
main = bench("memory", __doc__, _measure, FLAGS)

if __name__ == "__main__":
    sys.exit(main())
