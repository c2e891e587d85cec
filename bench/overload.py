"""Why latency explodes under load, and here does not: `python -m bench.overload`. Real server code, simulated time.

Requests come open loop, at 0.2 to 3 times what the server can do, and each wants its first token within a deadline.
Beside the server as it is stands one that takes everybody: no deadlines, no bound on its queue. The app, the
generations, admission, the engine's client, engine and scheduler are the server's own; the sockets are left out, and
the steps of the model are as long as a cost model says. The same seed gives the same figures on any machine.
"""

import argparse
import asyncio
import itertools
import json
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.null_server import null_tokenizer
from bench.results import RESULTS_DIR, Plot, Table, command_line, print_tables, write_result
from bench.virtual_loop import VirtualTimeLoop
from core.chat_template import ChatTemplate
from core.config import INTER_TOKEN_TARGET
from core.engine import Engine
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import Message, StepDelivery
from core.wait_estimate import EngineRoom
from server.api.models import ServedModel
from server.api.surface import GenerationDefaults
from server.app import App
from server.app_state import Readiness
from server.clock import Clock
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.gate.admission import Admission
from server.gate.deadlines import ANY_TIME
from server.gate.gate import Gate
from server.gate.queue_limits import QueueLimits
from server.generation import Generations
from server.ledger.idempotency import Idempotency
from server.observing.metrics import Metrics
from server.prompts import PromptReader
from server.wire.messages import Headers, HttpRequest, ResponseHead, TextFrame, TextWriter
from server.wire.peer import Peer
from server.wire.stream import HttpStream
from server.wire.write_batch import WriteBatch

MODEL = "simulated"
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
LIMITS = RunnerLimits(
    num_blocks=2048, block_size=16, max_sequences=32, max_batch_tokens=256, max_model_len=2048, vocab_size=90
)  # the first 90 ids are ASCII: each says something
HEADERS = ((b"host", b"a"), (b"content-type", b"application/json"))


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
        rng = random.Random(self.seed)
        times: list[float] = []
        at_s = rng.expovariate(requests_per_s)
        while at_s < self.duration_s:
            times.append(at_s)
            at_s += rng.expovariate(requests_per_s)
        return times

    def bodies(self, has_deadline: bool) -> "Bodies":
        return Bodies(self, has_deadline)


class Bodies:
    """The requests' bodies, one after the other, without end."""

    def __init__(self, arrivals: Arrivals, has_deadline: bool) -> None:
        self._arrivals = arrivals
        self._random = random.Random(arrivals.seed + 1)
        self._deadlines = {"ttft_ms": arrivals.ttft_deadline_s * 1e3} if has_deadline else {}

    def next(self) -> tuple[bytes, int]:
        """A body, and the tokens of its prompt."""
        rng, arrivals = self._random, self._arrivals
        num_prompt_tokens = rng.randint(*arrivals.prompt)
        body = {
            "model": MODEL,
            "prompt": rng.choices(range(LIMITS.vocab_size), k=num_prompt_tokens),
            "max_tokens": rng.randint(*arrivals.output),
            "seed": 1,
            "ignore_eos": True,
            "stream": True,
            "deadlines": self._deadlines,
        }
        return json.dumps(body).encode(), num_prompt_tokens


class Client:
    """One request's client, in place of a connection. Implements server.stream.StreamCarrier.

    Attributes:
        first_text_s: when the first text came, from its request; None: none did.
        end_s: when the answer had ended, likewise.
    """

    def __init__(self, num_prompt_tokens: int, clock: Callable[[], float]) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.status = 0
        self.first_text_s: float | None = None
        self.end_s: float | None = None
        self.has_error = False
        self._clock = clock
        self._began_s = clock()

    @property
    def peer(self) -> Peer:
        return Peer()

    def start_body(self, stream: HttpStream) -> None:
        """It is there already."""

    def write_head(self, stream: HttpStream, head: ResponseHead) -> None:
        self.status = head.status

    def write_data(self, stream: HttpStream, data: bytes) -> None:
        self.has_error |= data.startswith(b'data: {"error"')
        if self.first_text_s is None and b'"text":' in data:
            self.first_text_s = self._clock() - self._began_s

    def text_writer(self, stream: HttpStream, frame: TextFrame) -> TextWriter:
        return partial(stream.send_text, frame)

    def write_end(self, stream: HttpStream, trailers: Headers) -> None:
        self.end_s = self._clock() - self._began_s

    def call_once_written(self, stream: HttpStream, callback: Callable[[float], None]) -> None:
        callback(self._clock())

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.end_s is not None and not self.has_error


class LoopClock(SimulatedClock):
    """The loop's time. To let it pass is to let the loop run."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop

    def __call__(self) -> float:
        return self._loop.time()

    def advance(self, seconds: float) -> None:
        self._loop.advance(seconds)


class Server:
    """The server on a virtual loop, and its engine.

    Args:
        admits_all: it has no deadlines and no bounds.
    """

    def __init__(self, cost: CostModel, admits_all: bool) -> None:
        self.loop = VirtualTimeLoop()
        time = LoopClock(self.loop)
        self._inbox: deque[Message] = deque()
        scheduler = Scheduler(LIMITS, (), lambda: 0)
        self._engine = Engine(scheduler, SimulatedRunner(LIMITS, cost, time), time, self._inbox, self._deliver)
        tokenizer = null_tokenizer()
        config, clock, metrics = ServerConfig(), Clock(time, time), Metrics()
        self._client = EngineClient(
            self._inbox.append,
            tokenizer.table,
            tokenizer.full_table,
            WriteBatch(self.loop),
            self.loop.call_soon,
            time,
            lambda: None,
            metrics.inter_token,
        )
        numbers = itertools.count(1)
        self._app = App(Readiness(is_ready=True), Gate(config, clock), metrics, clock, lambda: f"r{next(numbers)}")
        card = ServedModel(id=MODEL, created_s=0, max_model_len=LIMITS.max_model_len)
        template = ChatTemplate({"default": ""}, {}, LIMITS.max_model_len)
        room = EngineRoom(
            LIMITS.max_sequences,
            LIMITS.max_batch_tokens,
            LIMITS.num_blocks * LIMITS.block_size,
            INTER_TOKEN_TARGET,
        )
        unbounded = QueueLimits(max_requests=10**9, max_tokens=10**12, max_bytes=10**12)
        self._app.state.generations = Generations(
            reader=PromptReader(
                (card,),
                tokenizer,
                template,
                LIMITS.max_model_len,
                LIMITS.max_sequences,
                GenerationDefaults(vocab_size=LIMITS.vocab_size),
                clock.unix,
            ),
            engine=self._client,
            clock=clock,
            offload=_inline,
            metrics=metrics,
            max_body_bytes=config.max_body_bytes,
            admission=Admission(
                unbounded if admits_all else config.queue_limits, room, lambda: self._client.stats, time
            ),
            deadlines=ANY_TIME if admits_all else config.deadlines,
            idempotency=Idempotency(time),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, body: bytes, num_prompt_tokens: int) -> Client:
        client = Client(num_prompt_tokens, self.loop.time)
        stream = HttpStream(HttpRequest(1, "POST", "/v1/completions", "", HEADERS, True), client)
        stream.receive_body(body)
        stream.complete_body()
        task = self.loop.create_task(self._app.handle(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return client

    def run(self) -> None:
        """Until nobody comes and nobody is served any more."""
        self.loop.settle()
        while True:
            if self._engine.step():
                self.loop.settle()
                continue
            if not self._inbox:
                when = self.loop.next_timer()
                if when is None:
                    return
                self.loop.advance(when - self.loop.time())

    def _deliver(self, delivery: StepDelivery) -> None:
        self.loop.call_soon(self._client.deliver, delivery)


async def _inline(work: Callable[[], Any]) -> Any:
    return work()


def run_load(arrivals: Arrivals, cost: CostModel, times_s: Sequence[float], admits_all: bool) -> list[Client]:
    """What became of each request."""
    server, bodies = Server(cost, admits_all), arrivals.bodies(not admits_all)
    clients: list[Client] = []
    for at_s in times_s:
        server.loop.call_at(at_s, lambda: clients.append(server.send(*bodies.next())))
    server.run()
    server.loop.close()
    assert len(clients) == len(times_s)
    return clients


def capacity(arrivals: Arrivals, cost: CostModel) -> float:
    """Requests per second while there are always more."""
    clients = run_load(arrivals, cost, [0.0] * arrivals.num_to_fill, admits_all=True)
    ends_s = sorted(client.end_s for client in clients if client.end_s is not None)
    first, last = len(ends_s) // 10, len(ends_s) * 9 // 10
    return (last - first) / (ends_s[last] - ends_s[first])


def measure(arrivals: Arrivals, cost: CostModel, loads: Sequence[float]) -> list[Table]:
    requests_per_s = capacity(arrivals, cost)
    rows: list[tuple[str | float | None, ...]] = []
    for name, admits_all in (("steploop", False), ("everybody is taken", True)):
        figures = []
        for load in loads:
            clients = run_load(arrivals, cost, arrivals.times_s(load * requests_per_s), admits_all)
            figures.append(_figures(clients, arrivals))
        best = max(goodput for _, goodput, *_ in figures)
        for load, (num_requests, goodput, *others) in zip(loads, figures, strict=True):
            rows.append((name, load, num_requests, goodput, 100 * goodput / best, *others))
    columns = (
        "server",
        "load / capacity",
        "requests",
        "goodput requests/s",
        "% of its best",
        "admitted %",
        "their prompts' mean tokens",
        "late %",
        "TTFT p50 s",
        "TTFT p99 s",
    )
    deadline = f"{arrivals.ttft_deadline_s:g} s"
    return [
        Table(
            f"Goodput: first token within {deadline}, and then all of it",
            columns,
            tuple(rows),
            Plot("load / capacity", "goodput requests/s", "server"),
            f"Requests come in bursts: what of one cannot have its first token within {deadline} is refused, and the"
            " lull after it has nobody else to serve. So all of the capacity is used only where more come than it can"
            " serve; and as long prompts are refused first, more requests fit into it then.",
        ),
        Table(
            "Why latency explodes under load, and here does not",
            ("server", "load / capacity", "TTFT p99 s of the admitted"),
            tuple((row[0], row[1], row[-1]) for row in rows),
            Plot("load / capacity", "TTFT p99 s of the admitted", "server"),
        ),
    ]


def _figures(clients: Sequence[Client], arrivals: Arrivals) -> tuple[float, ...]:
    """
    Returns: requests, those in time per second, percent admitted, tokens of the prompts of these, percent of these that
        were late, TTFTs of those served.
    """
    admitted = [client for client in clients if client.status != 503]
    first_s = [client.first_text_s for client in admitted if client.first_text_s is not None]
    num_good = sum(
        client.is_whole and client.first_text_s is not None and client.first_text_s <= arrivals.ttft_deadline_s
        for client in admitted
    )
    return (
        len(clients),
        num_good / arrivals.duration_s,
        100 * len(admitted) / len(clients),
        sum(client.num_prompt_tokens for client in admitted) / len(admitted),
        100 * (len(admitted) - num_good) / len(admitted),
        *(float(np.percentile(first_s, q)) for q in (50, 99)),
    )


QUICK = Arrivals(duration_s=30.0, num_to_fill=80)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="see that it works; writes nothing unless --json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: bench/results/overload.json")
    arguments = parser.parse_args(argv)
    arrivals, loads = (QUICK, (0.5, 3.0)) if arguments.quick else (Arrivals(), LOADS)
    logging.getLogger("server").setLevel(logging.WARNING)  # a line for each request is not wanted here
    cost = CostModel()
    tables = measure(arrivals, cost, loads)
    print_tables(tables)
    path = arguments.json or (None if arguments.quick else RESULTS_DIR / "overload.json")
    if path is not None:
        shown = {"cost": asdict(cost), "arrivals": asdict(arrivals)}
        write_result(path, "overload", command_line("python -m bench.overload", argv), tables, shown)
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
