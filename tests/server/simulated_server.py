"""The whole server in virtual time: real connections, app, generations, engine client, engine and scheduler.

Only the ends are simulated: the network (in memory), the model (a hash of the tokens it finds in its KV blocks) and
time. No thread, no socket, no clock: the same script gives the same bytes and the same steps.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import h11
import orjson
from msgspec import structs

from core.chat_template import ChatTemplate
from core.plan import BlockStore, RunnerLimits
from core.scheduler import Scheduler
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.tokenizer import Tokenizer
from core.turns import TurnMemory
from core.types import EngineStats, FinishReason, StepDelivery
from server.api.fields import GenerationDefaults
from server.api.models import ServedModel
from server.app import App, Readiness
from server.batches.runner import Batches
from server.batches.store import FileLimits, Quota, Store
from server.callers import Gate
from server.clock import Clock
from server.config import ServerConfig
from server.dashboard import live_of
from server.engine_client import EngineClient
from server.gate.admission import Admission, QueueLimits
from server.gate.cross_origin import CrossOrigin
from server.gate.tenants import Deadlines, Tenant
from server.generation import Generations, OwnBackend
from server.ledger.idempotency import Idempotency
from server.ledger.responses import Responses
from server.ledger.usage import NO_PRICES, Prices
from server.listening.clients import ClientRules
from server.loaded_engine import compiler_of
from server.observing.metrics import Metrics
from server.process import OpenLedger, opened
from server.prompts import PromptReader
from server.routes import find_route
from server.wire.limits import ConnectionLimits
from tests.core.chat_templates import CHATML
from tests.core.small_tokenizers import SPECIAL, byte_level
from tests.server.fakes import MemoryServer, MemoryTransport
from tests.server.inline_ledger import COMMIT_S, InlineWriter
from tests.server.simulated_engine import LogprobRunner, LoopClock, Schedule, SteppedEngine, at_once
from tests.server.virtual_loop import VirtualTimeLoop

MODEL = "small"
UNIX_S = 1_700_000_000.0
SERVER_DEADLINES = ServerConfig().deadlines
COST = CostModel(fixed_s=0.01, token_s=0.001)
TOKENIZER = Tokenizer(byte_level().to_str())
EOS_ID = SPECIAL.index("<|im_end|>")
VOCAB_SIZE = TOKENIZER.vocab_size
LIMITS = RunnerLimits(
    num_blocks=64, block_size=4, max_sequences=8, max_batch_tokens=16, max_model_len=200, vocab_size=VOCAB_SIZE
)


@dataclass
class Answer:
    """A response as h11's client reads it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool
    _events: list[Any] = field(default_factory=list, repr=False)
    _num_bytes_read: int = field(default=0, repr=False)  # of the body, that are in the events

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event; comments and [DONE] as texts. What has been read once is not read again."""
        blocks = self.body[self._num_bytes_read :].split(b"\n\n")[:-1]
        self._events += [_event(block.decode()) for block in blocks]
        self._num_bytes_read += sum(len(block) + 2 for block in blocks)
        return self._events

    def text(self, choice: int = 0) -> str:
        """What a chat or completion choice says, streamed or not."""
        if self.headers["content-type"] == "application/json":
            chosen = self.json["choices"][choice]
            return str(chosen["message"]["content"] if "message" in chosen else chosen["text"])
        choices = [c for event in self.events if isinstance(event, dict) for c in event.get("choices", ())]
        return "".join(_piece(c) for c in choices if c["index"] == choice)

    def finish_reason(self, choice: int = 0) -> str | None:
        if self.headers["content-type"] == "application/json":
            return self.json["choices"][choice]["finish_reason"]  # type: ignore[no-any-return]
        choices = [c for event in self.events if isinstance(event, dict) for c in event.get("choices", ())]
        reasons = [c["finish_reason"] for c in choices if c["index"] == choice and c["finish_reason"]]
        return reasons[-1] if reasons else None

    @property
    def usage(self) -> Any:
        if self.headers["content-type"] == "application/json":
            return self.json["usage"]
        return next(event["usage"] for event in self.events if isinstance(event, dict) and event.get("usage"))


def _event(block: str) -> Any:
    if block.startswith(":"):
        return block
    data = block.rsplit("data: ", 1)[1]
    return data if data == "[DONE]" else orjson.loads(data)


def _piece(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


def answers(received: bytes, method: str = "POST") -> list[Answer]:
    """The responses on one connection, the last one perhaps broken off."""
    client = h11.Connection(h11.CLIENT)
    client.receive_data(received)
    found: list[Answer] = []
    may_follow = True
    while client.trailing_data[0] and may_follow:
        client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
        client.send(h11.EndOfMessage())
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return found
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                found.append(Answer(event.status_code, headers, b"", False))
            elif isinstance(event, h11.Data):
                found[-1].body += bytes(event.data)
        found[-1].is_complete = True
        may_follow = client.our_state is h11.DONE
        if may_follow:
            client.start_next_cycle()
    return found


def request(method: str, path: str, body: Any = None, *lines: str) -> bytes:
    """A request's bytes. A body of JSON values is encoded, one of bytes is sent as it is."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = [f"{method} {path} HTTP/1.1", "Host: localhost", *lines]
    if body is not None:
        fields.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*fields, "", ""]).encode() + content


def with_lines(data: bytes, *lines: str) -> bytes:
    """The request, with more header lines."""
    return data.replace(b"\r\n", "\r\n".join(["", *lines, ""]).encode(), 1)


def as_caller(data: bytes, key: str, *lines: str) -> bytes:
    return with_lines(data, f"x-api-key: {key}", *lines)


def keyed_tenant(name: str, *keys: str, **fields: Any) -> Tenant:
    """A tenant with these keys; without any, its name is its key."""
    digests = tuple(sha256(key.encode()).hexdigest() for key in keys or (name,))
    return Tenant(name=name, key_sha256=digests, **fields)


def chat(**fields: Any) -> bytes:
    """A chat request with a seed, unless the fields say otherwise."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "step"}], "seed": 7, "max_tokens": 12}
    return request("POST", "/v1/chat/completions", body | {"ignore_eos": True} | fields)


def completion(**fields: Any) -> bytes:
    body = {"model": MODEL, "prompt": "The engine", "seed": 7, "max_tokens": 12}
    return request("POST", "/v1/completions", body | {"ignore_eos": True} | fields)


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


class SimulatedServer:
    """One server, its engine, and the network before it.

    Args:
        runner: makes the model, on the limits, the cost model and the clock.
        schedule: when the loop gets each step's news.
        is_ready: the model is loaded.
        ledger: its file; None: there is none.
        first_id: of requests: r1, r2, ...
        store: of blocks beyond the end of the process.
        store_responses_s: how long responses are kept; None: none are.
        files: the directory of files and batches; None: there are none.
        keys_file: of keys; None: there is none.
    """

    def __init__(
        self,
        *,
        limits: RunnerLimits = LIMITS,
        cost: CostModel = COST,
        runner: Callable[[RunnerLimits, CostModel, SimulatedClock], SimulatedRunner] = LogprobRunner,
        schedule: Schedule = at_once,
        keys: tuple[str, ...] = (),
        tenants: tuple[Tenant, ...] = (),
        max_requests: int = 100,
        max_queue_tokens: int = 100_000,
        max_queue_bytes: int = 1_000_000,
        deadlines: Deadlines = SERVER_DEADLINES,
        connection_limits: ConnectionLimits | None = None,
        is_ready: bool = True,
        origins: tuple[str, ...] = (),
        clients: ClientRules | None = None,
        ledger: Path | None = None,
        prices: Prices = NO_PRICES,
        first_id: int = 1,
        store: BlockStore | None = None,
        store_responses_s: float | None = None,
        files: Path | None = None,
        keys_file: Path | None = None,
    ) -> None:
        self.loop = VirtualTimeLoop()
        self.limits = limits
        self.metrics = Metrics()
        self.metrics.model_name = MODEL
        self.readiness = Readiness(is_ready=is_ready)
        time = LoopClock(self.loop)
        clock = Clock(time, lambda: UNIX_S + time())
        self.scheduler = Scheduler(limits, (EOS_ID,), seeds=lambda: 1234)
        model = runner(limits, cost, time)
        self.engine = SteppedEngine(self.scheduler, model, self.loop, schedule, self._take, store)
        self.posted, self.delivered = self.engine.posted, self.engine.delivered
        self.ledger_writer = None if ledger is None else InlineWriter(ledger, self.loop)
        config = ServerConfig(
            api_keys=keys,
            keys_file=keys_file,
            tenants=tenants,
            prices=prices,
            ledger=ledger,
            store_responses_s=store_responses_s,
        )
        opening = self._open_ledger(config, clock)
        self.gate = Gate(config, clock, opening.used)
        numbers = itertools.count(first_id)
        self.app = App(
            find_route,
            self.readiness,
            self.gate,
            self.metrics,
            clock,
            lambda: f"r{next(numbers)}",
            CrossOrigin(origins),
        )
        self.network = MemoryServer(self.app.handle, connection_limits, self.loop, self.app.refuse, clients)
        self.app.listener = self.network.listener
        self.client = self._new_client()
        queue_limits = QueueLimits(max_requests=max_requests, max_tokens=max_queue_tokens, max_bytes=max_queue_bytes)
        self.generations = self._new_generations(clock, queue_limits, deadlines, opening)
        self.app.live = live_of(self.app, self.loop, deadlines)
        if is_ready:
            self.app.generations = self.generations
        if store_responses_s is not None and opening.ledger is not None:
            self.app.responses = Responses(opening.ledger, 100_000, 100_000, _inline)
            reader = self.generations.reader
            reader.defaults = structs.replace(reader.defaults, stores_responses=True)
        if files is not None:
            self.batches = self._open_batches(files, clock)

    def _open_ledger(self, config: ServerConfig, clock: Clock) -> OpenLedger:
        if self.ledger_writer is None:
            return OpenLedger(None, {}, Idempotency(clock.unix))
        return opened(self.ledger_writer.journal, self.ledger_writer, config, clock, self.loop)

    def _open_batches(self, directory: Path, clock: Clock) -> Batches:
        served = self.generations
        batches = Batches(
            Store(directory),
            FileLimits(100_000, Quota(10, 200_000)),
            _inline,
            self.app.handle,
            self.gate.identify_again,
            lambda: self.readiness.is_ready,
            lambda: self.limits.max_sequences,
            lambda: served.is_busy,
            clock.unix,
            self.loop,
        )
        self.app.batches, served.on_request = batches, batches.give_way
        batches.start()
        return batches

    def _new_client(self) -> EngineClient:
        return EngineClient(
            self.engine.post,
            self.network.listener.batch,
            self.loop.call_soon,
            self.loop.time,
            lambda: None,
            self.metrics.inter_token,
        )

    def _new_generations(
        self, clock: Clock, queue_limits: QueueLimits, deadlines: Deadlines, opening: OpenLedger
    ) -> Generations:
        limits = self.limits
        return Generations(
            OwnBackend(
                _reader(limits, clock),
                self.client,
                Admission(queue_limits, lambda: self.client.stats, self.loop.time),
            ),
            clock=clock,
            offload=_inline,
            metrics=self.metrics,
            max_body_bytes=100_000,
            deadlines=deadlines,
            idempotency=opening.idempotency,
            ledger=opening.ledger,
            limits=limits,
        )

    # The network's side.

    def connect(self, peer_reads: bool = True) -> MemoryTransport:
        return self.network.connect(peer_reads)

    def send(self, data: bytes, peer_reads: bool = True) -> MemoryTransport:
        """A new connection that has sent these bytes. Nothing has been computed yet."""
        transport = self.connect(peer_reads)
        transport.feed(data)
        self.loop.settle()
        return transport

    def ask(self, data: bytes, method: str = "POST") -> Answer:
        """The answer to one request on a connection of its own, once all is quiet."""
        transport = self.send(data)
        self.run()
        (answer,) = answers(bytes(transport.received), method)
        assert answer.is_complete
        transport.feed_eof()
        self.loop.settle()
        return answer

    # Time.

    def step(self) -> bool:
        """Let the engine compute one step, and the loop handle what comes of it. False: there was nothing to do."""
        has_stepped = self.engine.step()
        if self.engine.is_broken:
            self.loop.call_soon(self.client.fail, "The engine failed.")
        self.loop.settle()
        return has_stepped

    @property
    def is_broken(self) -> bool:
        """The device was lost."""
        return self.engine.is_broken

    def shut_engine_down(self, reason: FinishReason, error: str | None) -> None:
        """End every request from the engine's side."""
        self.engine.shutdown(reason, error)
        self.loop.settle()

    def run(self) -> None:
        """Step until the engine has nothing to compute, and all its news have been delivered."""
        self.loop.settle()
        while self._is_writing or self.engine.wants_step:
            if self.engine.wants_step:
                self.step()
            while not self.engine.has_work and self.engine.is_telling:
                self.loop.advance((self.loop.next_timer() or self.loop.time()) - self.loop.time())
            if not self.engine.has_work and self._is_writing:
                self.loop.advance(COMMIT_S)

    @property
    def _is_writing(self) -> bool:
        return self.ledger_writer is not None and self.ledger_writer.is_writing

    def run_for(self, seconds: float) -> None:
        """Let time pass, with the steps that it brings; the last one may end later."""
        end = self.loop.time() + seconds
        self.run_until(lambda: self.loop.time() >= end, end)

    def run_until(self, is_reached: Callable[[], bool], end: float = float("inf")) -> None:
        """Step, or jump to the next timer before `end`, until the condition holds."""
        self.loop.settle()
        while not is_reached():
            if self.engine.wants_step:
                self.step()
                continue
            when = min(self.loop.next_timer() or end, end)
            assert when != float("inf"), "nothing is left that could bring it about"
            self.loop.advance(when - self.loop.time())

    # What must hold.

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def terminals(self, request_id: str) -> int:
        """How many terminal chunks the engine has told of a request."""
        return self._terminals()[request_id]

    def _terminals(self) -> Counter[str]:
        chunks = (chunk for delivery in self.delivered for chunk in delivery.chunks)
        return Counter(chunk.request_id for chunk in chunks if chunk.is_terminal)

    def check_idle(self) -> None:
        """Nothing is held for anybody: no block, handle, answer, handler; each submit had its one terminal chunk."""
        pool = self.scheduler.pool
        assert (pool.num_used, pool.num_free) == (0, pool.num_blocks)
        assert (self.stats.num_waiting, self.stats.num_running, self.stats.num_paused) == (0, 0, 0)
        assert not self.client._handles
        assert not self.generations.active
        admission = self.generations.admission
        assert (admission.num_requests, admission.num_bytes, admission.num_decoding) == (0, 0, 0)
        assert admission.is_idle
        assert admission._tokens.total == 0
        assert self.network.listener.num_handlers == 0
        assert not any(account.num_active or account.num_reserved for account in self.gate.quotas.accounts)
        submitted = [message.request.request_id for message in self.posted if hasattr(message, "request")]
        assert len(set(submitted)) == len(submitted)
        assert self._terminals() == Counter(submitted)

    def forget_history(self) -> None:
        """Of what was posted and delivered, when all is quiet: a long run would keep it all."""
        self.posted.clear()
        self.delivered.clear()

    def close(self) -> None:
        """Run on to the end, then all peers leave, and nothing may be left of them."""
        self.run()
        self.network.listener.abort()
        self.run()
        self.check_idle()
        if self.app.batches is not None:
            self.loop.run_until_complete(self.app.batches.close())
        if self.generations.ledger is not None:
            self.generations.ledger.close()
        self.network.close()

    def _take(self, delivery: StepDelivery) -> None:
        """News of the engine, as Server.on_delivery has them."""
        try:
            self.metrics.observe_step(delivery.stats)
        finally:
            self.client.deliver(delivery)


@contextmanager
def serving(**arguments: Any) -> Iterator[SimulatedServer]:
    """A server whose end is checked: nothing is held for anybody."""
    with closing(SimulatedServer(**arguments)) as server:
        yield server


def ask(data: bytes, method: str = "POST", **server: Any) -> Answer:
    """The answer to one request, of a server of its own."""
    with serving(**server) as simulated:
        return simulated.ask(data, method)


def the_answer(transport: MemoryTransport) -> Answer:
    (answer,) = answers(bytes(transport.received))
    return answer


def refusal_of(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


async def _inline(work: Callable[[], Any]) -> Any:
    return work()


def _reader(limits: RunnerLimits, clock: Clock) -> PromptReader:
    card = ServedModel(id=MODEL, created_s=int(UNIX_S), max_model_len=limits.max_model_len)
    return PromptReader(
        cards=(card,),
        tokenizer=TOKENIZER,
        chat_template=_template(limits.max_model_len),
        max_model_len=limits.max_model_len,
        max_sequences=min(limits.max_sequences, limits.max_batch_tokens),
        defaults=GenerationDefaults(vocab_size=limits.vocab_size),
        unix_clock=clock.unix,
        make_compiler=lambda: compiler_of(TOKENIZER, (EOS_ID,), most_tokens=limits.max_model_len),
        turns=TurnMemory(TOKENIZER),
    )


@functools.cache
def _template(context_limit: int) -> ChatTemplate:
    """Compiled once: it keeps nothing of what it renders."""
    return ChatTemplate({"default": CHATML}, {}, context_limit)
