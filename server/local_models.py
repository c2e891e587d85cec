"""Which of this machine's models are awake, of those that are started when they are asked for. Thread: loop.

    request ─▶ Pool ─▶ LocalUpstream.connection ─ waits ─▶ LocalModels: plan ─▶ room ─▶ process ─▶ READY=1 ─▶ its socket

A process is `serve` on a Unix socket in a directory of ours, and an upstream as any other once it is ready.
server/own_processes.py starts it, and says what it tells of itself.

          asked for, planned, room           ready              unused for keep_alive, unloaded, or gives way
    ASLEEP ──── _start ────▶ LOADING ── _on_ready ──▶ AWAKE ──── _end ────▶ ENDING
      ▲                         │ fails, hangs          │ dies, hangs         │
      └─── _on_ended ───────────┴───────────────────────┴─────────────────────┘

What the awake models need by their plans is never more than the bound. The idle one that was used least lately gives
way; if none is idle, the busy one that was used least lately takes no more requests after its turn, and gives way when
those in it are over. A model that cannot be loaded refuses requests with the cause, until it is tried again.
"""

import asyncio
import enum
import logging
import math
import signal
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from core.errors import ErrorKind, ServiceError
from server.config import ServerConfig
from server.listening.sockets import Bind, UnixAddress
from server.own_processes import DEVICES, News, Plan, Processes, Refusal, shown_end
from server.upstream.connection import Connection, address_of
from server.upstream.exchange import ConnectionLost, UpstreamFault
from server.upstream.pool import PROBE_BYTES, Access, Pool, Slot, Upstream
from server.upstream.settings import ModelSettings, UpstreamSettings, keep_alive_of
from server.values import HubId, format_size

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, MOST_BACKOFF_S = 2.0, 60.0  # before a model that failed is loaded again
LEAST_TURN_S = 10.0  # that a busy model is awake before it gives way
NUM_LOADS_A_TURN = 3  # likewise, in times of its load
END_S = 20.0  # for a process to write its KV files and to end
# For a process to become ready: so many times what the last load took; until one has ended, by what is read.
NUM_LOADS_LATE, LEAST_LATE_S = 20, 60.0
FIRST_LATE_S, SLOWEST_READ = 300.0, 20e6  # kernels may be compiled; bytes a second
PLAN_LATE_S = 60.0  # to read the headers of files that are here
LEAST_RUN_S = 10.0  # a process that dies sooner, twice in a row, is not started again at once
TOLD_S = 5.0  # for the end of a process that takes no connections to be told
TIMER_S = 0.002  # by which timers may come early
WATCH_EVERY_S, WATCH_S, NUM_UNANSWERED = 5.0, 5.0, 3  # probes of a model that is awake; without an answer it is killed
SEE_LOG, PLANNING, WAITING = "see the log", "planning its memory", "waiting for memory"
STARTING = "starting what loads models, which compiles kernels the first time on a machine"
LEAST_LEFT_S = 0.1  # of a load that takes longer than the last


class ModelState(enum.Enum):
    """As llama-server names them."""

    ASLEEP = "unloaded"
    LOADING = "loading"
    AWAKE = "loaded"
    ENDING = "unloading"


@dataclass(slots=True, eq=False)
class LocalModel:
    """
    Args:
        entry: what the list says of it, but for keep_alive.
        config: of its process.
        keep_alive_s: after its last request; requests may change it.
        stays: it gives way to no other.

    Attributes:
        requests: that wait until it is awake; they hold a slot.
        others: who else waits for that.
        is_leaving: it takes no more requests, and ends when it has none.
        is_asked: it is to be loaded, though nobody waits.
        used_s: when a request of it last ended or began.
        turn_s: when it became awake.
        load_s: how long it took the last time.
    """

    settings: ModelSettings
    entry: tuple[ModelSettings, ServerConfig]
    config: ServerConfig
    keep_alive_s: float
    stays: bool
    path: Path
    pool: "LocalPool" = field(init=False)
    state: ModelState = ModelState.ASLEEP
    stage: str = ""  # of its load
    plan: Plan | None = None
    serial: int = 0
    pid: int | None = None
    is_leaving: bool = False
    is_asked: bool = False
    requests: list[asyncio.Future[None]] = field(default_factory=list)
    others: list[asyncio.Future[None]] = field(default_factory=list)
    used_s: float = 0.0
    begun_s: float = 0.0
    turn_s: float = 0.0
    load_s: float | None = None
    failure: ServiceError | None = None
    refusal: Refusal | None = None  # as its process has told it
    retry_s: float = 0.0
    backoff_s: float = FIRST_BACKOFF_S
    has_died_soon: bool = False
    killed_for: str = ""  # why this server, or the fork server's end, has killed it
    watch: asyncio.Task[None] | None = None
    num_loads: int = 0
    num_failures: int = 0
    timer: asyncio.TimerHandle | None = None  # until it sleeps, while awake; else until its process is late

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def upstream(self) -> Upstream:
        return self.pool.upstreams[0]

    @property
    def num_inside(self) -> int:
        """Requests that its process has."""
        return self.upstream.num_active - len(self.requests)

    @property
    def is_awake(self) -> bool:
        return self.state is ModelState.AWAKE

    @property
    def is_asleep(self) -> bool:
        return self.state is ModelState.ASLEEP

    @property
    def last_load_s(self) -> float:
        return self.load_s or 0.0

    @property
    def most_s(self) -> float:
        """That its process may take to plan, to load or to end; after that it hangs."""
        if self.state is ModelState.ENDING:
            return END_S
        if self.is_asleep:
            return math.inf if isinstance(self.config.model, HubId) else PLAN_LATE_S  # it may be fetched
        if self.load_s is None:
            return FIRST_LATE_S + self.needed_bytes / SLOWEST_READ
        return max(LEAST_LATE_S, NUM_LOADS_LATE * self.load_s)

    @property
    def expires_s(self) -> float:
        """When it sleeps if no request comes, on the loop's clock; inf: never."""
        return max(self.used_s, self.turn_s) + self.keep_alive_s

    @property
    def needed_bytes(self) -> int:
        return 0 if self.plan is None else self.plan.needed_bytes


@dataclass(slots=True, eq=False, kw_only=True)
class LocalUpstream(Upstream):
    """The one upstream of a local model: a connection to it waits until its process is ready."""

    models: "LocalModels"
    model: LocalModel

    @property
    def place(self) -> str:
        return "process"

    @property
    def is_up(self) -> bool:
        return self.model.is_awake

    async def connection(self, num_more: int = 0) -> Connection:
        models, model = self.models, self.model
        await models.wait_awake(model, model.requests)
        try:
            return await Upstream.connection(self, num_more)
        except UpstreamFault:  # its process has died, which is told soon
            await models.wait_ended(model)
            await models.wait_awake(model, model.requests)
            return await Upstream.connection(self, num_more)


class LocalPool(Pool):
    """Of one local model. Its process tells when it is ready, and when it has ended."""

    def __init__(
        self, settings: ModelSettings, loop: asyncio.AbstractEventLoop, models: "LocalModels", model: LocalModel
    ) -> None:
        self._models, self._model = models, model
        super().__init__(settings, loop, Access())
        self.on_planned: Callable[[int], None] = lambda max_model_len: None

    def _upstream(self, settings: UpstreamSettings, tls: ssl.SSLContext | None) -> LocalUpstream:
        at, of, model = address_of(settings.url, tls, self._protocols), self._models, self._model
        return LocalUpstream(settings, at, is_healthy=True, has_been_asked=True, why_out="", models=of, model=model)

    @property
    def process(self) -> ServerConfig:
        return self._model.config

    def start(self) -> None:
        pass

    @property
    def silence_tells(self) -> bool:
        """Its process is watched, and killed if it hangs: only then can its requests be sent again."""
        return False

    async def answers(self) -> bool:
        """Whether its process does, whatever it says."""
        try:
            async with asyncio.timeout(WATCH_S):
                await self.ask(self.upstreams[0], self.settings.health, PROBE_BYTES)
        except (TimeoutError, UpstreamFault, ServiceError):
            return False
        return True

    def error_of(self, fault: UpstreamFault) -> ServiceError:
        what = (
            "has ended. Send the request again: it is being restarted"
            if isinstance(fault, ConnectionLost)
            else f"failed: {fault}"
        )
        message = f"The process of this model {what}."  # which may be a fallback, or have been asked for by an alias
        return ServiceError(ErrorKind.UPSTREAM, message, "upstream_error")

    def keep(self, keep_alive_s: float) -> None:
        """As a request asks, until another does."""
        if not self._model.stays:
            self._model.keep_alive_s = keep_alive_s

    # Loading of server/gate/admission.py.

    @property
    def stage(self) -> str:
        return self._models.stage_of(self._model)

    def expected_s(self) -> float | None:
        model, now_s = self._model, self._loop.time()
        if model.state is ModelState.AWAKE and not model.is_leaving:
            return 0.0
        if model.load_s is None:
            return None
        begun_s = model.begun_s if model.state is ModelState.LOADING else now_s
        return max(LEAST_LEFT_S, begun_s + model.load_s - now_s)

    def begin(self) -> None:
        self._models.want(self._model)

    # Slots.

    @property
    def num_running(self) -> int:
        return self._model.num_inside

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._model.requests)

    def take_slot(self, *arguments: Any) -> Slot:
        slot = super().take_slot(*arguments)
        self._models.on_used(self._model)
        return slot

    def release(self, slot: Slot) -> None:
        super().release(slot)
        self._models.on_used(self._model)


class LocalModels:
    """Which models are loaded. Implements ProcessEvents.

    Args:
        config: the server's, with own_models.
    """

    def __init__(self, config: ServerConfig, processes: Processes, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._processes = processes
        bound = config.models_memory_bytes
        self._bounds = {} if bound is None else dict.fromkeys(DEVICES, bound)  # bytes; else free at the first plan
        self._serials = 0
        self._by_serial: dict[int, LocalModel] = {}  # plans and processes in progress
        self._wanted: dict[LocalModel, None] = {}  # to be loaded, in this order
        self._is_closing = False
        self._turn_timer = loop.call_soon(lambda: None)
        self._ended: asyncio.Event = asyncio.Event()
        self._num_added = 0
        self._gone: set[LocalModel] = set()  # that the list no longer has, until their requests have ended
        self.models: dict[str, LocalModel] = {}  # by name
        self.take(config)

    def take(self, config: ServerConfig) -> None:
        """Take the list's models. One whose entry has changed is another, which is loaded once the old one has ended.

        Those that the list no longer has end with their requests.
        """
        of_processes, before = iter(config.own_models), self.models
        self.models = {}
        for settings in (one for one in config.models if one.path is not None):
            process, known = next(of_processes), before.get(settings.name)
            keep_alive_s = config.keep_alive_s if settings.keep_alive is None else keep_alive_of(settings.keep_alive)
            if known is None or known.entry != (structs.replace(settings, keep_alive=None), process):
                self._add(settings, process, keep_alive_s, known)
                continue
            self.models[settings.name] = before.pop(settings.name)
            if known.settings.keep_alive != settings.keep_alive:
                known.settings, known.keep_alive_s, known.stays = settings, keep_alive_s, keep_alive_s == math.inf
                self._let_sleep(known)
        for model in before.values():
            model.keep_alive_s, model.stays, model.is_asked = 0.0, False, False
            if not model.is_asleep or model.requests or model.others:
                self._gone.add(model)
                self._let_sleep(model)

    @property
    def pools(self) -> list[LocalPool]:
        return [model.pool for model in self.models.values()]

    @property
    def _all(self) -> list[LocalModel]:
        return [*self.models.values(), *self._gone]

    def _add(
        self, settings: ModelSettings, process: ServerConfig, keep_alive_s: float, before: LocalModel | None
    ) -> None:
        """before: the model of that name before its entry changed, whose counters go on."""
        path = self._processes.home / f"{self._num_added}.sock"
        self._num_added += 1
        entry = structs.replace(settings, keep_alive=None), process
        at = UpstreamSettings(url=f"unix:{path}")
        there = structs.replace(
            settings, path=None, keep_alive=None, settings={}, upstreams=(at,), trusted=True, protocol="h2"
        )
        process = replace(process, binds=(Bind(UnixAddress(str(path))),))
        model = LocalModel(settings, entry, process, keep_alive_s, keep_alive_s == math.inf, path)
        model.pool = LocalPool(there, self._loop, self, model)
        self.models[settings.name] = model
        if before is not None:
            model.num_loads, model.num_failures = before.num_loads, before.num_failures
            model.pool.num_retries = before.pool.num_retries
            was, now = before.upstream, model.upstream
            now.num_requests, now.num_failures = was.num_requests, was.num_failures

    def start(self) -> None:
        self._processes.start(self)
        self.begin()

    def begin(self) -> None:
        """Load those that always stay."""
        for model in self.models.values():
            if model.stays:
                self.want(model)

    # What others ask.

    @property
    def states(self) -> Mapping[str, str]:
        """By name, as llama-server says them."""
        return {name: model.state.value for name, model in self.models.items()}

    def stage_of(self, model: LocalModel) -> str:
        """What those who wait for it wait for."""
        if model.state is ModelState.LOADING:
            return model.stage
        if not self._processes.is_ready:
            return STARTING
        return PLANNING if model.plan is None else WAITING

    def find(self, name: str) -> LocalModel | None:
        """By any of its names."""
        return next((one for one in self.models.values() if name in one.settings.names), None)

    async def load(self, model: LocalModel) -> None:
        """Returns once it is awake. Raises ServiceError: it cannot be loaded."""
        await self.wait_awake(model, model.others)

    async def unload(self, model: LocalModel) -> None:
        """Returns once its process has ended. Raises ServiceError: it has requests, or is being loaded."""
        if model.state is ModelState.LOADING or model.num_inside or model.requests:
            what = "is being loaded" if model.state is ModelState.LOADING else "has requests in progress"
            message = f"The model {model.name} {what}. Unload it when it is idle."
            raise ServiceError(ErrorKind.CONFLICT, message, "model_busy")
        if model.state is ModelState.AWAKE:
            self._end(model)
        await self.wait_ended(model)

    # Requests.

    async def wait_awake(self, model: LocalModel, waiting: list[asyncio.Future[None]]) -> None:
        if model.state is ModelState.AWAKE and not model.is_leaving:
            return
        self._check(model)
        woken: asyncio.Future[None] = self._loop.create_future()
        waiting.append(woken)
        try:
            self._want(model)
            await woken
        finally:
            if woken in waiting:
                waiting.remove(woken)

    async def wait_ended(self, model: LocalModel) -> None:
        """Until its process has ended, or seems to go on."""
        limit_s = 2 * END_S if model.state is ModelState.ENDING else TOLD_S
        await self._wait_ends(limit_s, lambda: model.state in (ModelState.AWAKE, ModelState.ENDING))

    async def _wait_ends(self, limit_s: float, goes_on: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while goes_on():
                    self._ended.clear()
                    await self._ended.wait()

    def _check(self, model: LocalModel) -> None:
        """Raises ServiceError: it could not be loaded lately, or the server ends."""
        if self._is_closing:
            raise ServiceError(ErrorKind.UNAVAILABLE, "The server is shutting down.", "draining", retry_after_s=5)
        left_s = model.retry_s - self._loop.time()
        if model.failure is not None and left_s > 0:
            error = model.failure
            whole = error.for_operator
            raise ServiceError(error.kind, error.message, error.code, retry_after_s=left_s, for_operator=whole)

    def on_used(self, model: LocalModel) -> None:
        """A request of it has begun or ended."""
        model.used_s = self._loop.time()
        self._let_sleep(model)
        if self._wanted:
            Context().run(self._advance)

    def _let_sleep(self, model: LocalModel) -> None:
        """In keep_alive_s, if it is awake and no request comes."""
        if model.is_awake:
            self._set_timer(model, math.inf if model.upstream.num_active else model.expires_s, self._end_idle)

    def _clear_timer(self, model: LocalModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _set_timer(self, model: LocalModel, due_s: float, call: Callable[[LocalModel], None]) -> None:
        self._clear_timer(model)
        if due_s < math.inf:
            model.timer = Context().run(self._loop.call_at, due_s, call, model)

    def _end_idle(self, model: LocalModel) -> None:
        if not model.upstream.num_active:
            is_gone = model in self._gone
            why = "its entry has changed or is gone" if is_gone else f"unused for {model.keep_alive_s:g} s"
            logger.info("the model %s %s: %s", model.name, "ends" if is_gone else "sleeps", why)
            self._end(model)

    # Which models are awake.

    def want(self, model: LocalModel) -> None:
        """Load it, though nobody waits for it."""
        model.is_asked = model.state is ModelState.ASLEEP and self._loop.time() >= model.retry_s
        if model.is_asked:
            self._want(model)

    def _want(self, model: LocalModel) -> None:
        if model.state is not ModelState.LOADING:
            if model not in self._wanted:
                why = "" if self._processes.is_ready else f": {STARTING}"
                logger.info("the model %s is requested%s", model.name, why)
                self._wanted[model] = None
            Context().run(self._advance)  # what it logs and begins is of no single request

    def _advance(self) -> None:
        """Load what is wanted, in order, as far as there is room. What is still planned, or fetched, is passed over."""
        for model in list(self._wanted):
            if self._is_closing:
                return
            if not (model.requests or model.others or model.is_asked):  # nobody waits any more
                del self._wanted[model]
            elif model.state is ModelState.AWAKE:  # nobody needs its room any more
                del self._wanted[model]
                model.is_leaving = False
                self._wake(model, None)
            elif model.name in (one.name for one in self._all if one is not model and not one.is_asleep):
                continue  # the one of that name before it still runs
            elif model.plan is None:
                if model.serial not in self._by_serial:
                    self._processes.plan(self._next_serial(model), model.config, self._bounds)
                    self._set_limit(model)
            elif model.state is ModelState.ASLEEP and self._has_room(model, model.plan):
                del self._wanted[model]
                self._start(model)
            elif model in self._wanted:  # it has not been refused
                return

    def _has_room(self, model: LocalModel, plan: Plan) -> bool:
        """Whether it may be loaded now. If not, others are made to give way."""
        bound = self._bounds[plan.device]
        beside = [one for one in self._all if one.state is not ModelState.ASLEEP and one is not model]
        beside = [one for one in beside if one.plan is not None and one.plan.device == plan.device]
        missing = plan.needed_bytes + sum(one.needed_bytes for one in beside) - bound
        if missing <= 0:
            return True
        missing -= sum(one.needed_bytes for one in beside if one.state is ModelState.ENDING)
        now_s = self._loop.time()
        awake = [one for one in beside if one.state is ModelState.AWAKE and not one.stays]
        awake.sort(key=lambda one: (one.num_inside > 0, one.used_s))
        for one in awake:
            if missing <= 0:
                return False
            turn_s = max(LEAST_TURN_S, NUM_LOADS_A_TURN * (one.load_s or 0.0))
            if not one.num_inside:
                logger.info("the model %s sleeps: %s needs its memory", one.name, model.name)
                self._end(one)
            elif (left_s := one.turn_s + turn_s - now_s) <= TIMER_S:
                one.is_leaving = True
            else:
                self._turn_timer.cancel()
                self._turn_timer = self._loop.call_later(left_s, self._advance)
            missing -= one.needed_bytes
        if missing > 0 and not any(one.state is ModelState.LOADING for one in beside):
            kept = format_size(bound - sum(one.needed_bytes for one in beside))
            cause = f"it needs {format_size(plan.needed_bytes)}, but the models that never stop leave {kept}"
            self._fail(model, Refusal(cause, "raise --models-memory, or set keep_alive for those models"))
        return False

    def _start(self, model: LocalModel) -> None:
        assert model.plan is not None
        model.state, model.stage, model.begun_s = ModelState.LOADING, "starting its process", self._loop.time()
        model.refusal = model.pid = None
        model.is_leaving = model.is_asked = False
        model.num_loads += 1
        logger.info("loading the model %s: %s", model.name, format_size(model.needed_bytes))
        config = replace(model.config, kv_memory_bytes=model.plan.kv_bytes)
        self._processes.serve(self._next_serial(model), config)
        self._set_limit(model)

    def _next_serial(self, model: LocalModel) -> int:
        self._serials += 1
        model.serial, self._by_serial[self._serials] = self._serials, model
        return self._serials

    def _end(self, model: LocalModel) -> None:
        """Ask its process to end; it takes no more requests."""
        model.state, model.is_leaving = ModelState.ENDING, False
        for connection in model.upstream.connections:
            connection.close()
        self._kill(model, signal.SIGTERM)
        self._set_limit(model)

    def _set_limit(self, model: LocalModel) -> None:
        """Kill its process if what it begins now takes too long."""
        self._set_timer(model, self._loop.time() + model.most_s, self._kill_late)

    def _kill_late(self, model: LocalModel) -> None:
        if not self._processes.is_ready:  # it may compile kernels for minutes
            self._set_limit(model)
            return
        done = {ModelState.ASLEEP: "planned", ModelState.LOADING: "loaded"}.get(model.state, "ended")
        model.killed_for = f"it hung, and was killed: it was not {done} after {model.most_s:g} s"
        if model.state is ModelState.ENDING:
            logger.error("the process of the model %s: %s", model.name, model.killed_for)
        elif model.state is ModelState.LOADING:
            model.load_s = None  # the next load has longer
        if model.pid is None:
            self._processes.kill_server()  # it has not even begun
        self._kill(model, signal.SIGKILL)

    def _kill(self, model: LocalModel, number: signal.Signals) -> None:
        if model.pid is not None:
            self._processes.kill(model.pid, number)

    # What processes tell.

    def on_news(self, news: News) -> None:
        model = self._by_serial.get(news.serial)
        if model is None:  # a plan, told already, whose process has ended
            return
        if isinstance(news.told, int):
            model.pid = news.told
            if model.state is ModelState.ENDING:
                self._kill(model, signal.SIGTERM)
            return
        if isinstance(news.told, Refusal) and model.state is not ModelState.ASLEEP:  # its end follows
            model.refusal = news.told
            return
        if news.told is None and news.status is None:
            self._on_stage(model, news)
            return
        del self._by_serial[news.serial]
        self._clear_timer(model)
        if isinstance(news.told, Plan):
            model.plan = news.told
            self._bounds.setdefault(news.told.device, news.told.free_bytes)
            model.pool.on_planned(news.told.max_model_len)
        elif model.state is ModelState.ASLEEP:  # it was planned
            self._fail(
                model,
                news.told
                or Refusal(
                    f"the process that planned its memory ended: {self._why_ended(model, news.status or 0)}", SEE_LOG
                ),
            )
        else:
            self._on_ended(model, news.status or 0)
        self._advance()

    def _on_stage(self, model: LocalModel, news: News) -> None:
        if model.state is ModelState.LOADING:
            model.stage = (news.stage or model.stage).removeprefix("Loading: ")
            if news.is_ready:
                self._on_ready(model)

    def on_lost(self) -> None:
        lost, self._by_serial = self._by_serial, {}
        for serial, model in lost.items():
            self._by_serial[serial] = model
            model.killed_for = (
                model.killed_for or "the process that starts models has ended, and with it all its models"
            )
            self.on_news(News(serial, status=signal.SIGKILL))

    def _on_ready(self, model: LocalModel) -> None:
        now_s = self._loop.time()
        model.state, model.turn_s, model.load_s = ModelState.AWAKE, now_s, now_s - model.begun_s
        model.failure, model.backoff_s = None, FIRST_BACKOFF_S
        logger.info("the model %s is loaded: %.1f s", model.name, model.load_s)
        self._processes.keep(model.config)
        self._wake(model, None)
        self._let_sleep(model)
        model.watch = self._loop.create_task(self._watch(model), context=Context())
        self._advance()

    async def _watch(self, model: LocalModel) -> None:
        """Kill its process if it hangs: those in it are told, and the next request starts it anew."""
        num_unanswered = 0
        while num_unanswered < NUM_UNANSWERED:
            await asyncio.sleep(WATCH_EVERY_S)
            if not model.is_awake:  # it ends, or is killed if it does not
                return
            num_unanswered = 0 if await model.pool.answers() else num_unanswered + 1
        if model.is_awake:
            model.killed_for = f"it hung, and was killed: {NUM_UNANSWERED} probes in a row had no answer"
            self._kill(model, signal.SIGKILL)

    def _why_ended(self, model: LocalModel, status: int) -> str:
        why, model.killed_for = model.killed_for or shown_end(status), ""
        return why

    def _wake(self, model: LocalModel, error: ServiceError | None) -> None:
        for waiting in (model.requests, model.others):
            woken, waiting[:] = waiting[:], []
            for one in woken:
                if one.done():
                    continue
                if error is None:
                    one.set_result(None)
                else:
                    one.set_exception(error)

    def _on_ended(self, model: LocalModel, status: int) -> None:
        """Its process has ended."""
        was, model.state, model.pid = model.state, ModelState.ASLEEP, None
        for connection in model.upstream.connections:
            connection.abort()
        if model.watch is not None:
            model.watch.cancel()
            model.watch = None
        is_own_end, why = not model.killed_for, self._why_ended(model, status)
        model.path.unlink(missing_ok=True)
        self._ended.set()
        if was is ModelState.LOADING:
            refusal = model.refusal or Refusal(f"its process ended: {why}", SEE_LOG)
            self._fail(model, refusal)
        elif was is ModelState.AWAKE:
            model.num_failures += 1
            logger.error("the process of the model %s has ended: %s", model.name, why)
            is_soon = is_own_end and self._loop.time() < model.turn_s + LEAST_RUN_S
            has_died_soon, model.has_died_soon = model.has_died_soon, is_soon
            if has_died_soon and is_soon:
                self._fail(model, Refusal(f"its process dies again and again: {why}", SEE_LOG))
        if model.requests or model.others:
            self._want(model)
        else:
            self._gone.discard(model)

    def _fail(self, model: LocalModel, refusal: Refusal) -> None:
        """It cannot be loaded: those who wait are told, and it is not tried again for a while."""
        self._wanted.pop(model, None)
        model.is_asked = False
        model.num_failures += 1
        model.plan = None  # its files may change
        model.retry_s = self._loop.time() + model.backoff_s
        model.failure = ServiceError(
            ErrorKind.UNAVAILABLE,
            f"This model cannot be loaded: {refusal.kind or refusal.cause}. Try again later, or tell the operator.",
            "model_not_loaded",
            retry_after_s=model.backoff_s,
            for_operator=f"The model {model.name} cannot be loaded: {refusal}",
        )
        logger.error(
            "the model %s cannot be loaded; tried again in %g s at the soonest: %s",
            model.name,
            model.backoff_s,
            refusal,
        )
        model.backoff_s = min(MOST_BACKOFF_S, 2 * model.backoff_s)
        self._gone.discard(model)
        self._wake(model, model.failure)

    async def close(self) -> None:
        """End all processes, and wait for that."""
        self._is_closing = True
        for model in self._all:
            self._clear_timer(model)
            if model.state in (ModelState.AWAKE, ModelState.LOADING):
                self._end(model)
        limit_s = END_S if self._processes.is_ready else 0.0  # none has begun
        await self._wait_ends(limit_s, lambda: not all(one.is_asleep for one in self._all))
        self._turn_timer.cancel()
        await self._processes.close()
