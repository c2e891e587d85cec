"""Random histories of everything that goes wrong at once, against the whole server in virtual time, from one seed each.

Tenants with quotas ask over HTTP/1.1 and HTTP/2, well and badly; some read slowly, some leave, some cancel by DELETE;
blocks run out; steps raise, out of memory, rows fail, some because of a request, some for nothing; the configuration is
reloaded, the cache cleared, the engine looked at, the ledger's disk hangs; and the device may be lost, after which a
new process takes over, with what the ledger knows.

After each life of a process nothing may be held for anybody, every request must have had exactly one end, and what was
streamed, billed, counted in the metrics, taken from the quotas and written down must be the same tokens, and the right
ones.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.detokenizer import Detokenizer
from core.errors import StartupError
from core.plan import DeviceError, RunnerLimits, SequenceStart, StepOutput, StepPlan
from core.sequence import sequence_seed
from core.simulation import CostModel, SimulatedClock, SimulatedRunner, continuation
from core.types import Pause, Request, Submit, Usage
from server.config import ServerConfig
from server.gate.quota import DayPool, Moment
from server.gate.tenants import Limits, Tenant
from server.ledger.records import LedgerRow, State
from server.wire.connection_limits import ConnectionLimits
from tests.server.fakes import MemoryTransport
from tests.server.inline_ledger import rows
from tests.server.recording_peers import Call, Http1Caller, Http2Caller
from tests.server.simulated_server import EOS_ID, MODEL, TOKENIZER, SimulatedServer

ADMIN_KEY = "operator"
SOMETIMES_KEY = "sometimes"  # of the first tenant, until a reload takes it away, and again after one that brings it
TENANTS = ("acme", "beta", "gamma")
RAISES_ID, FAILS_ID = 17, 19  # in a prompt: each step with its request raises; each row of it fails
QUIET_FORWARDS = 64  # after a step that raised, so that no fault by chance hits the search for the guilty row
STALL_S = 30.0
DAY_TOKENS = 10**9
MEMORY_DISK = Path("/dev/shm")  # where there is one: no commit waits for a disk


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad a history is: drawn from its seed.

    Args:
        raises, dies: chances of each step.
        reloads, looks, clears, leaves, cancels, hangs: chances of each turn.
    """

    raises: float
    dies: float
    reloads: float
    looks: float
    clears: float
    leaves: float
    cancels: float
    hangs: float
    bad: float
    slow: float

    @classmethod
    def draw(cls, rng: random.Random) -> "Weather":
        def chance(most: float) -> float:
            return rng.choice((0.0, rng.random() * most))

        return cls(
            raises=chance(0.02),
            dies=chance(0.003),
            reloads=chance(0.1),
            looks=chance(0.1),
            clears=chance(0.1),
            leaves=chance(0.5),
            cancels=chance(0.5),
            hangs=chance(0.1),
            bad=chance(0.3),
            slow=chance(0.3),
        )


class FaultyModel(SimulatedRunner):
    """Raises and fails by what it computes and by chance, and may be lost for good."""

    def __init__(
        self, limits: RunnerLimits, cost: CostModel, clock: SimulatedClock, rng: random.Random, weather: Weather
    ) -> None:
        super().__init__(limits, cost, clock)
        self._rng = rng
        self._weather = weather
        self._num_quiet = 0
        self._prompts: dict[int, tuple[int, ...]] = {}  # by slot
        self.faults: Counter[str] = Counter()

    def forward(self, plan: StepPlan) -> StepPlan:
        if self._rng.random() < self._weather.dies:
            self.faults["device lost"] += 1
            raise DeviceError("gone")
        self._prompts |= {start.slot: start.token_ids[: start.num_prompt_tokens] for start in plan.sequence_starts}
        if any(RAISES_ID in self._prompts[slot] for slot in plan.slots.tolist()):
            self._num_quiet = 0
            self.faults["guilty step"] += 1
            raise RuntimeError("an illegal value")
        self._num_quiet += 1
        if self._num_quiet > QUIET_FORWARDS and self._rng.random() < self._weather.raises:
            self._num_quiet = 0
            self.faults["step out of memory"] += 1
            raise MemoryError("out of memory on the device")
        return super().forward(plan)

    def collect(self, ticket: StepPlan) -> StepOutput:
        output = super().collect(ticket)
        if self._num_quiet > QUIET_FORWARDS and self._rng.random() < self._weather.raises:
            self._num_quiet = 0
            self.faults["result unreadable"] += 1
            raise MemoryError("out of memory on the host")
        for row, slot in enumerate(ticket.slots.tolist()):
            if FAILS_ID in self._prompts[slot]:
                self.faults["failed row"] += 1
                output.failed_rows[row] = "The logits are not finite."
        return output


@dataclass(slots=True)
class Tally:
    """What has happened in some histories, so that a test can tell that they were eventful."""

    num_requests: int = 0  # for completions
    num_asked: int = 0  # of all kinds
    num_steps: int = 0
    num_preemptions: int = 0
    num_restored_blocks: int = 0  # from host memory
    events: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.num_requests += other.num_requests
        self.num_asked += other.num_asked
        self.num_steps += other.num_steps
        self.num_preemptions += other.num_preemptions
        self.num_restored_blocks += other.num_restored_blocks
        self.events += other.events
        self.statuses += other.statuses


class FaultHistory:
    """One history: lives of a server, one after the other, until all requests have been asked."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._weather = Weather.draw(self._rng)
        self.tally = Tally()

    def run(self, num_requests: int) -> Tally:
        with TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as directory:
            ledger = Path(directory, "ledger.db") if self._rng.random() < 0.5 else None
            while self.tally.num_requests < num_requests:
                life = _Life(self._rng, self._weather, self.tally, ledger)
                life.run(num_requests)
                life.end()
        return self.tally


class _Life:
    """One process, from its start until it is stopped or its device is lost."""

    def __init__(self, rng: random.Random, weather: Weather, tally: Tally, ledger: Path | None) -> None:
        """
        Args:
            ledger: its file, which outlives it; None: it keeps none.
        """
        self._rng = rng
        self._weather = weather
        self._tally = tally
        self._ledger = ledger
        self._written_before = written(ledger)
        self._limits = RunnerLimits(
            num_blocks=rng.choice((24, 48, 200)),
            block_size=4,
            max_sequences=rng.choice((4, 8)),
            max_batch_tokens=rng.choice((8, 32)),
            max_model_len=96,
            vocab_size=TOKENIZER.vocab_size,
            num_host_blocks=rng.choice((0, 6, 60)),
            max_in_flight=rng.choice((1, 2)),
        )
        self.server = SimulatedServer(
            limits=self._limits,
            cost=CostModel(fixed_s=0.01, token_s=0.0005),
            runner=self._make_model,
            keys=(ADMIN_KEY,),
            tenants=self._draw_tenants(),
            max_requests=rng.choice((12, 100)),
            connection_limits=ConnectionLimits(unsent_bytes=2048, stall_s=STALL_S),
            ledger=ledger,
            first_id=tally.num_asked + 1,
        )
        self.server.loop.set_exception_handler(lambda loop, context: self._faults.append(context))
        self._callers: list[Http1Caller | Http2Caller] = []  # connections that are open
        self._calls: list[Call] = []
        self._faults: list[dict[str, Any]] = []  # that nobody has caught

    def _make_model(self, limits: RunnerLimits, cost: CostModel, clock: SimulatedClock) -> SimulatedRunner:
        self._model = FaultyModel(limits, cost, clock, self._rng, self._weather)
        return self._model

    # What happens

    def run(self, num_requests: int) -> None:
        """Turns of requests, trouble and a step, until so many have been asked in all, or the device is lost."""
        while self._tally.num_requests < num_requests and not self.server.is_broken:
            self._let_come()
            self._make_trouble()
            for _ in range(self._rng.randrange(1, 5)):
                if not self.server.step():
                    self.server.run_for(0.05)

    def _let_come(self) -> None:
        for caller in self._callers:
            caller.look()
            if isinstance(caller, Http1Caller) and all(call.is_over for call in caller.calls):
                caller.leave("eof")
            if caller.transport.is_closing():
                caller.finish()
        self._callers = [caller for caller in self._callers if not caller.transport.is_closing()]
        num_open = sum(not call.is_over for caller in self._callers for call in caller.calls)
        for _ in range(self._rng.randrange(6) if num_open < 32 else 0):
            call = self._draw_call()
            self._calls.append(call)
            self._tally.num_requests += 1
            self._caller_for(call).ask(call)

    def _make_trouble(self) -> None:
        rng, weather = self._rng, self._weather
        for chance, happen in (
            (weather.leaves, self._leave),
            (weather.cancels, self._delete),
            (weather.reloads, self._reload),
            (weather.looks, self._look),
            (weather.clears, self._clear_cache),
            (weather.slow, self._read_some),
            (weather.hangs if self._ledger else 0.0, self._hang_disk),
        ):
            if rng.random() < chance:
                if rng.random() < 0.5:
                    happen()
                else:  # in mid-step
                    self.server.loop.call_later(rng.random() * 0.02, happen)

    def _leave(self) -> None:
        """Somebody resets a stream, or goes with all its requests."""
        caller = self._rng.choice(self._callers) if self._callers else None
        if caller is None or caller.is_over:
            return
        streams = [call for call in caller.calls if not call.is_over]
        if isinstance(caller, Http2Caller) and streams and self._rng.random() < 0.7:
            caller.reset(self._rng.choice(streams))
            self._tally.events["stream reset"] += 1
        else:
            self._tally.events["left"] += any(not call.is_over for call in caller.calls)
            caller.leave(self._rng.choice(("eof", "reset")))

    def _delete(self) -> None:
        active = list(self.server.lifecycle.active)
        if not active:
            return
        request_id = self._rng.choice(active)
        owner, _ = self.server.lifecycle.active[request_id]
        key = self._rng.choice((owner, owner, *TENANTS))
        answer = self._operate("DELETE", f"/v1/requests/{request_id}", key)
        answer.may_be = (200, 404)
        if key == owner:
            for call in self._calls:
                call.may_be_cancelled |= call.request_id == request_id or call.request_id is None
        self._tally.events["DELETE"] += 1

    def _reload(self) -> None:
        """As SIGHUP does: all that is read anew is prepared first, and then put in force; or refused whole."""
        gate = self.server.gate
        if self._rng.random() < 0.2:
            before = gate.directory
            try:
                gate.prepare(ServerConfig())
            except StartupError:
                self._tally.events["reload refused"] += 1
            assert gate.directory is before
            return
        gate.prepare(ServerConfig(api_keys=(ADMIN_KEY,), tenants=self._draw_tenants()))()
        self._tally.events["reload"] += 1

    def _look(self) -> None:
        self._operate("GET", "/admin/engine", ADMIN_KEY).may_be = (200, 500)
        self._tally.events["looked"] += 1

    def _clear_cache(self) -> None:
        self._operate("POST", "/admin/cache/clear", ADMIN_KEY).may_be = (200, 500)
        self._tally.events["cache cleared"] += 1

    def _read_some(self) -> None:
        for caller in self._callers[-8:]:
            if not caller.transport.is_lost:
                caller.transport.peer_read(self._rng.choice((100, 3000)))

    def _hang_disk(self) -> None:
        """Nothing is written down for a while; then all of it at once."""
        writer = self.server.ledger_writer
        assert writer is not None

        def go_on() -> None:
            writer.is_stuck = False
            writer.commit()

        if not writer.is_stuck:
            writer.is_stuck = True
            self.server.loop.call_later(self._rng.random(), go_on)
            self._tally.events["disk hung"] += 1

    def _operate(self, method: str, path: str, key: str) -> Call:
        call = Call(method=method, path=path, key=key, body=None)
        self._calls.append(call)
        caller = Http1Caller(self.server.network.dial())  # the loop may be running
        self._callers.append(caller)
        caller.ask(call)
        return call

    # Who asks for what

    def _draw_tenants(self) -> tuple[Tenant, ...]:
        return tuple(self._draw_tenant(name) for name in TENANTS)

    def _draw_tenant(self, name: str) -> Tenant:
        rng = self._rng
        keys = [name] + [SOMETIMES_KEY] * (name == TENANTS[0] and rng.random() < 0.5)
        return Tenant(
            name=name,
            share=rng.choice((1, 1, 3)),
            tenant_class=rng.choice(("standard", "standard", "batch", "interactive")),
            cache_domain=rng.choice((None, "common")),
            cached_token_discount=50,
            limits=Limits(
                tokens_per_day=DAY_TOKENS,
                tokens_per_minute=rng.choice((None, 2_000)),
                requests_per_minute=rng.choice((None, None, 100)),
                concurrent_requests=rng.choice((None, None, 6)),
            ),
            key_sha256=tuple(sha256(key.encode()).hexdigest() for key in keys),
        )

    def _caller_for(self, call: Call) -> Http1Caller | Http2Caller:
        reads = self._rng.random() >= self._weather.slow
        open_ones = [c for c in self._callers[-8:] if isinstance(c, Http2Caller) and not c.is_over]
        if open_ones and self._rng.random() < 0.5:
            return self._rng.choice(open_ones)
        transport: MemoryTransport = self.server.connect(reads)
        window = 2**30 if reads else self._rng.choice((2**30, 1500))
        is_http1 = self._rng.random() < 0.5
        self._callers.append(Http1Caller(transport) if is_http1 else Http2Caller(transport, window))
        return self._callers[-1]

    def _draw_call(self) -> Call:
        rng, pick = self._rng, self._rng.choice
        prompt = [5, 6, 7, 8] * pick((0, 1, 4)) + [pick((40, 41, 42)) for _ in range(pick((1, 3, 8, 30)))]
        fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "seed": rng.randrange(1000)}
        fields |= {"max_tokens": rng.randint(1, 40), "n": pick((1, 1, 1, 2, 3)), "ignore_eos": pick((True, False))}
        fields |= {"stop": pick((None, None, "e", ["t", " a"])), "priority": pick((-2, 0, 0, 1))}
        if pick((True, True, False)):
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        key = pick((*TENANTS, *TENANTS, SOMETIMES_KEY))
        call = Call(method="POST", path="/v1/completions", key=key, body=fields)
        if rng.random() < self._weather.bad:
            self._spoil(call, fields)
        if key == SOMETIMES_KEY:
            call.may_be += (401,)
        return call

    def _spoil(self, call: Call, fields: dict[str, Any]) -> None:
        """Make a request that cannot succeed."""
        how: dict[str, tuple[Callable[[], None], tuple[int, ...]]] = {
            "prompt that raises": (lambda: fields["prompt"].append(RAISES_ID), (500,)),
            "prompt that fails": (lambda: fields["prompt"].append(FAILS_ID), (500,)),
            "prompt too long": (lambda: fields.update(prompt=[5] * 96), (400,)),
            "unknown model": (lambda: fields.update(model="large"), (404,)),
            "bad field": (lambda: fields.update(max_tokens="many"), (400,)),
            "wrong key": (lambda: setattr(call, "key", "nobody"), (401,)),
            "body that breaks off": (lambda: setattr(call, "is_cut", True), (408,)),
        }
        name = self._rng.choice(list(how))
        spoil, statuses = how[name]
        spoil()
        call.must_be = statuses
        self._tally.events[name] += 1

    # The end, and what must hold then

    def end(self) -> None:
        """All that is in progress ends; then everybody leaves. Checks all that must hold."""
        server = self.server
        for caller in self._callers:
            if self._rng.random() < 0.5:
                caller.transport.peer_reads = True
                caller.transport.peer_read()
        server.run_for(STALL_S + 31.0)  # who does not read is cut off, so is who does not send
        for caller in self._callers:
            caller.finish()
        server.run()
        assert not self._faults
        assert server.is_broken == bool(self._model.faults["device lost"]), "the engine broke, or not, for nothing"
        server.check_idle()
        self._check_calls()
        self._check_counters()
        usages = self._usages()
        for caller in self._callers:
            caller.leave("reset")
        server.run()
        assert server.network.listener.num_open == 0, "connections are left over"
        tally, stats = self._tally, server.stats
        tally.num_asked += len(self._calls)
        tally.num_steps += stats.num_steps
        tally.num_preemptions += stats.num_preemptions
        tally.num_restored_blocks += stats.num_restored_blocks
        tally.events += self._model.faults
        tally.events["paused"] += sum(isinstance(message, Pause) for message in server.posted)
        server.close()
        self._check_ledger(usages)
        server.forget_history()
        self._calls.clear()  # or all of it would wait for the garbage collector

    def _check_calls(self) -> None:
        tokens = self._delivered_tokens()
        requests = {m.request.request_id: m.request for m in self.server.posted if isinstance(m, Submit)}
        for request in requests.values():
            self._check_tokens(request, tokens)
        for call in self._calls:
            answer = call.answer
            if call.is_slow and not call.has_left and (answer is None or not answer.is_complete):
                self._tally.events["stalled"] += 1
            if answer is None:
                assert call.has_left or call.is_slow or self.server.is_broken, f"no answer to {call}"
                continue
            self._tally.statuses[answer.status] += 1
            call.check_one_end(self.server.is_broken)
            if call.is_whole and answer.status == 200 and call.path == "/v1/completions":
                request = requests[answer.headers["x-request-id"]]
                self._check_text(call, request, tokens)

    def _delivered_tokens(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for delivery in self.server.delivered:
            for place in zip(delivery.request_ids, delivery.indexes, delivery.token_ids, strict=True):
                found.setdefault(place[:2], []).append(place[2])
        return found

    def _check_tokens(self, request: Request, tokens: dict[tuple[str, int], list[int]]) -> None:
        """Whatever became of it: its tokens are those that it would have drawn alone."""
        sampling = request.sampling
        assert sampling.seed is not None
        for index in range(request.num_sequences):
            drawn = tokens.get((request.request_id, index), [])
            if drawn:
                start = SequenceStart(
                    slot=0,
                    token_ids=request.prompt_ids,
                    num_prompt_tokens=len(request.prompt_ids),
                    sampling=sampling,
                    seed=sequence_seed(sampling.seed, index),
                    stop_ids=() if sampling.ignore_eos else (EOS_ID,),
                )
                alone = continuation(start, self._limits)[: len(drawn)]
                assert drawn == alone, f"{drawn} instead of {alone} of sequence {index} of {request}"

    def _check_text(self, call: Call, request: Request, tokens: dict[tuple[str, int], list[int]]) -> None:
        """The client has read what was drawn, up to its stop string."""
        assert call.answer is not None
        num_kept = 0
        for index in range(request.num_sequences):
            detokenizer = Detokenizer(TOKENIZER.table, request.sampling.stop, continues_text=True)
            text = detokenizer.push(tokens.get((request.request_id, index), [])) + detokenizer.finish()
            assert call.answer.text(index) == text
            num_kept += detokenizer.num_tokens_kept
            reason = call.answer.finish_reason(index)
            assert reason in ("stop", "length")
            if reason == "stop" and not detokenizer.is_stopped:
                num_kept += 1  # an ending id has no text
        assert call.answer.usage["completion_tokens"] == num_kept
        assert call.answer.usage["prompt_tokens"] == len(request.prompt_ids)

    def _check_counters(self) -> None:
        """Engine, metrics and quotas have counted the same tokens."""
        server = self.server
        usages = self._usages()
        metrics = server.metrics
        assert metrics.num_generation_tokens == sum(u.num_completion_tokens for u in usages.values())
        assert metrics.num_prompt_tokens == sum(u.num_prompt_tokens for u in usages.values())
        owners = {m.request.request_id: m.request.tenant for m in server.posted if isinstance(m, Submit)}
        now = Moment(round(server.loop.time() * 1e9), 0)
        for name in TENANTS:
            billed = [_cost(usage) for request_id, usage in usages.items() if owners[request_id] == name]
            account = server.gate.quotas._accounts.get((name, None))
            used = 0
            if account is not None:
                (pool,) = (pool for pool in account.tokens if isinstance(pool, DayPool))
                before = sum(row.counted_tokens for row in self._written_before.values() if row.tenant == name)
                used = pool.capacity - pool.available(now) - before
            assert used == sum(billed), f"the quota of {name} has counted {used}, its answers {sum(billed)}"

    def _check_ledger(self, usages: dict[str, Usage]) -> None:
        """Each request is written down once, as it was billed; who did not come to the engine, for nothing."""
        if self._ledger is None:
            return
        found = written(self._ledger)
        assert found.items() >= self._written_before.items()
        assert found.keys() >= usages.keys()
        for request_id in found.keys() - self._written_before.keys():
            row, usage = found[request_id], usages.get(request_id, Usage(0, 0, 0))
            assert row.state is State.SETTLED
            counts = row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.counted_tokens
            billed = usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens, _cost(usage)
            assert counts == billed, f"{row} instead of {usage}"

    def _usages(self) -> dict[str, Usage]:
        """What each request was billed, by its terminal chunk."""
        chunks = (chunk for delivery in self.server.delivered for chunk in delivery.chunks)
        return {chunk.request_id: chunk.usage for chunk in chunks if chunk.usage is not None}


def _cost(usage: Usage) -> int:
    return usage.num_prompt_tokens + usage.num_completion_tokens - usage.num_cached_tokens * 50 // 100


def written(ledger: Path | None) -> dict[str, LedgerRow]:
    """What is written down of each request."""
    return {} if ledger is None or not ledger.exists() else {row.request_id: row for row in rows(ledger)}
