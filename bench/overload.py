"""Why latency explodes under load, and here does not: `python -m bench.overload`. Real server code, simulated time.

Requests come open loop, at 0.2 to 3 times what the server can do, and each wants its first token within a deadline.
Beside the server as it is stands one that takes everybody: no deadlines, no bound on its queue. All of the server is
the real one; the network is in memory, and the steps of the model are as long as a cost model says
(tests/server/simulated_server.py). The same seed gives the same figures on any machine.
"""

import argparse
import itertools
import json
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.client import encode_request
from bench.kit import Found, bench
from bench.load import poisson_arrivals
from bench.results import Cell, Plot, Table, percentile, table_of
from core.plan import RunnerLimits
from core.simulation import CostModel, SimulatedRunner
from server.config import ServerConfig
from server.gate.tenants import ANY_TIME
from tests.server.fakes import PEER, MemoryTransport
from tests.server.simulated_server import MODEL, SimulatedServer

LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
LIMITS = RunnerLimits(
    num_blocks=2048, block_size=16, max_sequences=32, max_batch_tokens=256, max_model_len=2048, vocab_size=90
)  # the first 90 ids are ASCII: each has text
UNBOUNDED: dict[str, Any] = {
    "max_requests": 10**9,
    "max_queue_tokens": 10**12,
    "max_queue_bytes": 10**12,
    "deadlines": ANY_TIME,
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Poisson; lengths are uniform between both bounds.

    Args:
        duration_s: in which they come; the server then serves whom it has taken.
        num_to_fill: requests that all come at once, to see how many a second the server can do.
    """

    duration_s: float = 300.0
    num_to_fill: int = 400
    ttft_deadline_s: float = 2.0
    prompt: tuple[int, int] = (64, 512)
    output: tuple[int, int] = (32, 96)
    seed: int = 11

    def times_s(self, requests_per_s: float) -> list[float]:
        times_s = poisson_arrivals(requests_per_s, self.seed)
        return list(itertools.takewhile(lambda at_s: at_s < self.duration_s, times_s))

    def bodies(self, has_deadline: bool) -> Iterator[tuple[bytes, int]]:
        """One after the other, without end: a body, and the tokens of its prompt."""
        rng = random.Random(self.seed + 1)
        deadlines = {"ttft_ms": self.ttft_deadline_s * 1e3} if has_deadline else {}
        while True:
            prompt = rng.choices(range(LIMITS.vocab_size), k=rng.randint(*self.prompt))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randint(*self.output), "seed": 1}
            body |= {"ignore_eos": True, "stream": True, "deadlines": deadlines}
            yield json.dumps(body).encode(), len(prompt)


class Client(MemoryTransport):
    """One request's connection.

    Attributes:
        first_text_s, end_s: from the request to its first text and to the end of its answer; None: not yet.
    """

    def __init__(self, server: SimulatedServer, body: bytes, num_prompt_tokens: int) -> None:
        connection = server.network.listener.admit(PEER)
        assert connection is not None, "the connection was refused"
        super().__init__(server.loop, connection)
        self.num_prompt_tokens = num_prompt_tokens
        self.status = 0
        self.first_text_s: float | None = None
        self.end_s: float | None = None
        self._clock, self._began_s = server.loop.time, server.loop.time()
        headers = {"content-type": "application/json", "connection": "close"}
        self.feed(encode_request("POST", "/v1/completions", "a", headers, body))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        now_s, data = self._clock() - self._began_s, bytes(data)
        if not self.status:
            self.status = int(data[9:12])
        if self.first_text_s is None and b'"text":' in data:
            self.first_text_s = now_s
        super().write(data)

    def close(self) -> None:
        self.end_s = self._clock() - self._began_s
        super().close()

    def is_good(self, deadline_s: float) -> bool:
        """Answered whole, and in time."""
        is_whole = b"data: [DONE]" in self.received and b'data: {"error"' not in self.received
        in_time = self.first_text_s is not None and self.first_text_s <= deadline_s
        return self.status == 200 and is_whole and in_time


def run_load(arrivals: Arrivals, cost: CostModel, times_s: Sequence[float], admits_all: bool) -> list[Client]:
    """What became of each request."""
    config = ServerConfig()
    bounds: dict[str, Any] = {"max_requests": config.max_queue, "max_queue_tokens": config.max_queue_tokens}
    bounds |= {"max_queue_bytes": config.max_queue_bytes, "deadlines": config.deadlines}
    options = UNBOUNDED if admits_all else bounds
    server = SimulatedServer(limits=LIMITS, cost=cost, runner=SimulatedRunner, **options)
    bodies, clients, num_ended = arrivals.bodies(not admits_all), list[Client](), 0

    def all_have_ended() -> bool:
        """Looks at each client until it has ended, and not again."""
        nonlocal num_ended
        while num_ended < len(clients) and clients[num_ended].end_s is not None:
            num_ended += 1
        return num_ended == len(times_s)

    for at_s in times_s:
        server.loop.call_at(at_s, lambda: clients.append(Client(server, *next(bodies))))
    server.run_until(all_have_ended)
    server.close()
    return clients


def capacity(arrivals: Arrivals, cost: CostModel) -> float:
    """Requests per second while there are always more."""
    clients = run_load(arrivals, cost, [0.0] * arrivals.num_to_fill, admits_all=True)
    ends_s = sorted(client.end_s for client in clients if client.end_s is not None)
    first, last = len(ends_s) // 10, len(ends_s) * 9 // 10
    return (last - first) / (ends_s[last] - ends_s[first])


def measure(arrivals: Arrivals, cost: CostModel, loads: Sequence[float]) -> list[Table]:
    requests_per_s, deadline = capacity(arrivals, cost), f"{arrivals.ttft_deadline_s:g} s"
    rows: list[dict[str, Cell]] = []
    for name, admits_all in (("steploop", False), ("everybody is taken", True)):
        found = [run_load(arrivals, cost, arrivals.times_s(load * requests_per_s), admits_all) for load in loads]
        goodputs = [sum(one.is_good(arrivals.ttft_deadline_s) for one in clients) for clients in found]
        for load, clients, num_good in zip(loads, found, goodputs, strict=True):
            admitted = [client for client in clients if client.status != 503]
            first_s = [client.first_text_s for client in admitted if client.first_text_s is not None]
            rows.append(
                {
                    "server": name,
                    "load / capacity": load,
                    "requests": len(clients),
                    "goodput requests/s": num_good / arrivals.duration_s,
                    "% of its best": 100 * num_good / max(goodputs),
                    "admitted %": 100 * len(admitted) / len(clients),
                    "their prompts' mean tokens": sum(one.num_prompt_tokens for one in admitted) / len(admitted),
                    "late %": 100 * (len(admitted) - num_good) / len(admitted),
                    "TTFT p50 s": percentile(first_s, 50),
                    "TTFT p99 s": percentile(first_s, 99),
                }
            )
    note = (
        f"Requests come in bursts: what of one cannot have its first token within {deadline} is refused, and the lull"
        " after it has nobody else to serve. So all of the capacity is used only where more come than it can serve; and"
        " as long prompts are refused first, more requests fit into it then."
    )
    p99 = "TTFT p99 s of the admitted"
    tails = [{name: row[name] for name in ("server", "load / capacity")} | {p99: row["TTFT p99 s"]} for row in rows]
    plot = Plot("load / capacity", "goodput requests/s", "server")
    return [
        table_of(f"Goodput: first token within {deadline}, and then all of it", rows, plot, note),
        table_of("Why latency explodes under load, and here does not", tails, Plot("load / capacity", p99, "server")),
    ]


def _measure(arguments: argparse.Namespace) -> Found:
    logging.getLogger("server").setLevel(logging.WARNING)  # a line for each request is not wanted here
    cost, arrivals = CostModel(), Arrivals(duration_s=30.0, num_to_fill=80) if arguments.quick else Arrivals()
    tables = measure(arrivals, cost, (0.5, 3.0) if arguments.quick else LOADS)
    return Found(tables, {"cost": asdict(cost), "arrivals": asdict(arrivals)})


main = bench("overload", __doc__, _measure)

if __name__ == "__main__":
    sys.exit(main())
