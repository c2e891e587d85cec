"""The flood over real sockets: the server as a process, on the wall's clock. What bench/fairness.py shows beside steps.

Eight light tenants ask open loop, each over its own key; the flood keeps so many requests open at once, closed loop,
for as long as they do. Requests wait for their tenants' turns in the engine's own queue.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.client import ConnectionPool, Exchange, Recorder, encode_request
from bench.kit import free_port, running
from bench.load import poisson_arrivals, run_on_fast_loop
from bench.results import Table

MODEL = "fair"
FLOOD = "flood"
FIRST_ID, END_ID = 300, 1000  # of the embedded model's vocabulary: words
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class WallLoad:
    """Poisson arrivals of each light one. Lengths are in tokens, uniform between both bounds.

    Args:
        requests_per_s: of each light tenant.
        num_flooding: requests that the flood has open.
        max_sequences: that the server runs at once: fewer than there are.
        warm_up_s: of both loads, before anything counts: the server learns what its steps cost.
    """

    num_light: int = 8
    requests_per_s: float = 1.0
    duration_s: float = 20.0
    warm_up_s: float = 4.0
    num_flooding: int = 64
    max_sequences: int = 32
    light_prompt: tuple[int, int] = (32, 128)
    light_output: tuple[int, int] = (16, 64)
    flood_prompt: tuple[int, int] = (64, 512)
    flood_output: tuple[int, int] = (64, 256)
    seed: int = 5


class WallRun:
    """One load on one server. Thread: the generator's loop."""

    def __init__(self, load: WallLoad, port: int) -> None:
        self._load = load
        self._host = f"127.0.0.1:{port}"
        self._rng = random.Random(load.seed)
        self.light, self.flood = Recorder(), Recorder()
        self._light_pool = ConnectionPool("127.0.0.1", port, self.light, TIMEOUT_S)
        self._flood_pool = ConnectionPool("127.0.0.1", port, self.flood, TIMEOUT_S)

    async def run(self, duration_s: float, has_flood: bool) -> None:
        """Until the last light request has its answer; then the flood is cut off."""
        start_s = time.monotonic()
        num_flooding = self._load.num_flooding if has_flood else 0
        floods = [asyncio.create_task(self._flood()) for _ in range(num_flooding)]
        try:
            await asyncio.gather(*(self._ask_lightly(i, start_s, duration_s) for i in range(self._load.num_light)))
        finally:
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            await self._light_pool.close()
            await self._flood_pool.close()

    async def _flood(self) -> None:
        load = self._load
        while True:
            exchange = Exchange(time.monotonic())
            await self._flood_pool.perform(self._request(FLOOD, load.flood_prompt, load.flood_output), exchange)
            self.flood.add(exchange)

    async def _ask_lightly(self, number: int, start_s: float, duration_s: float) -> None:
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            for arrival_s in poisson_arrivals(load.requests_per_s, load.seed * 100 + number):
                if arrival_s >= duration_s:
                    break
                request = self._request(f"light{number}", load.light_prompt, load.light_output)
                await asyncio.sleep(max(0.0, start_s + arrival_s - time.monotonic()))
                tasks.create_task(self._perform(request, start_s + arrival_s))

    async def _perform(self, request: bytes, intended_s: float) -> None:
        exchange = Exchange(intended_s)
        await self._light_pool.perform(request, exchange)
        self.light.add(exchange)

    def _request(self, tenant: str, prompt: tuple[int, int], output: tuple[int, int]) -> bytes:
        rng = self._rng
        body = {
            "model": MODEL,
            "prompt": rng.choices(range(FIRST_ID, END_ID), k=rng.randint(*prompt)),
            "max_tokens": rng.randint(*output),
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"content-type": "application/json", "authorization": f"Bearer {tenant}"}
        return encode_request("POST", "/v1/completions", self._host, headers, json.dumps(body).encode())


def configuration(load: WallLoad) -> str:
    """The server's file: each tenant's key is its name."""
    names = [FLOOD, *(f"light{i}" for i in range(load.num_light))]
    tables = [f'[[tenants]]\nname = "{name}"\nkey_sha256 = ["{sha256(name.encode()).hexdigest()}"]' for name in names]
    return "\n\n".join(tables) + "\n"


@contextmanager
def fair_server(load: WallLoad, model: Path | None) -> Iterator[int]:
    """A server with the tenants, on the port that this gives.

    Args:
        model: None: the embedded one.
    """
    with TemporaryDirectory() as directory:
        file, port = Path(directory) / "steploop.toml", free_port()
        file.write_text(configuration(load), encoding="utf-8")
        command = [sys.executable, "-m", "server", "serve", "--config", str(file), "--port", str(port)]
        command += ["--served-model-name", MODEL, "--max-sequences", str(load.max_sequences), "--log-level", "warning"]
        if model is not None:
            command += ["--model", str(model)]
        with running(command, port, "/ready"):
            yield port


def measure_wall(load: WallLoad, model: Path | None = None) -> Table:
    """A server for each of both: neither knows what the other's tenants have had."""
    rows: list[tuple[str | float, ...]] = []
    alone_s = 0.0
    for name, has_flood in (("without", False), ("with", True)):
        with fair_server(load, model) as port:
            run_on_fast_loop(WallRun(load, port).run(load.warm_up_s, has_flood=True))
            run = WallRun(load, port)
            run_on_fast_loop(run.run(load.duration_s, has_flood))
        if run.light.failures or not run.light.ttft_s:
            raise RuntimeError(f"light requests failed: {dict(run.light.failures)}, {run.light.examples}")
        p50_s, p95_s = (float(np.percentile(run.light.ttft_s, q)) for q in (50, 95))
        alone_s = alone_s or p95_s
        rows.append((name, run.light.num_done, run.flood.num_done, p50_s * 1e3, p95_s * 1e3, p95_s / alone_s))
    columns = ("flood", "light requests", "flood's", "p50 ms", "p95 ms", "p95 ratio")
    return Table("First tokens of eight light tenants, over sockets, wall time", columns, tuple(rows))
