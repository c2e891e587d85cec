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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.errors import StartupError
from core.plan import RunnerLimits
from core.simulation import CostModel, SimulatedClock, SimulatedRunner
from core.types import Pause
from server.config import ServerConfig
from server.wire.limits import ConnectionLimits
from tests.server.drawn_calls import TENANTS, draw_call, draw_tenants
from tests.server.fakes import MemoryTransport
from tests.server.fault_checks import LifeChecks, Tally, written
from tests.server.faulty_model import FaultyModel, Weather
from tests.server.recording_peers import Call, Http1Caller, Http2Caller
from tests.server.simulated_server import TOKENIZER, SimulatedServer

ADMIN_KEY = "operator"
STALL_S = 30.0
MEMORY_DISK = Path("/dev/shm")  # where there is one: no commit waits for a disk


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
            tenants=draw_tenants(rng),
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
            call = draw_call(self._rng, self._weather.bad, self._tally.events)
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
        active = list(self.server.generations.active)
        if not active:
            return
        request_id = self._rng.choice(active)
        owner = self.server.generations.active[request_id].tenant
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
        gate.prepare(ServerConfig(api_keys=(ADMIN_KEY,), tenants=draw_tenants(self._rng)))()
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
        checks = LifeChecks(server, self._calls, self._written_before, self._tally)
        checks.check_calls()
        checks.check_counters()
        usages = checks.usages()
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
        if self._ledger is not None:
            checks.check_ledger(self._ledger, usages)
        server.forget_history()
        self._calls.clear()  # or all of it would wait for the garbage collector
