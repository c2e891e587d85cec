"""The server's life: listen, load, serve, reload, drain, exit. Thread: loop.

It listens at once. While the engine loads on its thread, /health answers, and everything else gets a 503 with the
loading stage. server/engine_loader.py decides what to load.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from core.errors import ErrorKind, ExitCode, ServiceError, StartupError
from core.types import EngineStats, StepDelivery
from server import __version__
from server.adapters import Adapters
from server.api.models import ServerCard
from server.app import App, Readiness
from server.banner import BannerFacts, Endpoint, banner_lines, endpoints_of, is_public, public_addresses
from server.batches.runner import Batches
from server.batches.store import FileLimits, Quota, Store
from server.callers import Gate, of_callers
from server.clock import Clock
from server.config import ServerConfig
from server.dashboard import live_of
from server.engine_client import EngineClient
from server.engine_thread import EngineThread, Inbox
from server.gate.admission import Admission, QueueLimits
from server.gate.cross_origin import CrossOrigin
from server.gate.quota import PERIOD_LIMITS, Used, period_of
from server.generation import AnyBackend, Backend, Generations, OwnBackend
from server.grammar_guard import MAX_AT_ONCE
from server.ledger.idempotency import Idempotency
from server.ledger.journal import Journal, LedgerThread, Writer, open_journal
from server.ledger.ledger import MAX_SPILLED, Ledger
from server.ledger.responses import Responses
from server.ledger.store import MICRO, Keep
from server.ledger.usage import ANY_MODEL
from server.listening.agent_check import AgentCheck
from server.listening.listener import ALL_BUFFERED_BODY_BYTES, Listener, ListenerConfig
from server.listening.sockets import PassedSocket, allow_connections, shown_addresses, take_passed_sockets
from server.loaded_engine import EngineFacts, LoadedEngine, LoadEngine, prompt_reader, server_card, token_counter
from server.local_models import LocalModels, LocalPool
from server.model_files import tasks_in
from server.observing.kv_events import kv_events_at
from server.observing.logs import tell
from server.observing.metrics import LoopLag, Metrics, Standing
from server.observing.otel import TraceExporter
from server.observing.recorder import Recorder
from server.own_processes import Processes, home_of_sockets
from server.relay import CountTokens, Relay
from server.routes import find_route
from server.supervision import EngineLost, ServiceManager, Supervision
from server.upstream.pool import Pool, access_to
from server.upstream.settings import ModelSettings, refuse_same_names
from server.wire.tls import ServerTls, server_tls

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_INTERVAL_S = 1e-4  # how long a thread may keep the GIL while another waits
# Garbage collections stall every stream: objects from start are frozen, and old generations seldom examined. The
# younger ones are collected often: 100,000 objects of short connections took 160 ms, 25,000 of a schema 10 ms.
GC_THRESHOLDS = (2_500, 4, 50_000)
FAREWELL_S = 2.0  # for clients to take the last error events
HURRIED_FAREWELL_S = 1.0  # likewise, after a second signal
ENGINE_STOP_S = 10.0  # for the running step to end
PREPARE_AFTER_S = 3.0  # what tries grammars out starts then: the first requests have the processor to themselves


class Server:
    """One serving process: start() → wait_ready() → reloads → stop() → wait_stopped().

    Implements server.engine_thread.EngineEvents and server.supervision.Supervised.

    Args:
        load: makes the engine; runs on the engine's thread.
        announce: called with the banner's lines when the server is ready.
        passed: listening sockets from systemd.
        read_config: reads the configuration again, on SIGHUP, with or without the settings of models; None: it
            cannot change.
        manager: hears how it goes; None: systemd, if it started the process.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: LoadEngine,
        announce: Callable[[list[str]], None],
        passed: Sequence[PassedSocket] = (),
        read_config: Callable[[bool], ServerConfig] | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        """Raises StartupError: a file named in the configuration cannot be used, or a needed extra is missing."""
        self._config = config
        self._read_config = read_config or (lambda finds_models: config)
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._readiness = Readiness()
        self._clock = Clock(time.monotonic, time.time)
        self._files = ThreadPoolExecutor(1, "files")
        self._ledger, used, self._idempotency = open_ledger(config, self._clock, self._loop)
        self._metrics = Metrics(config.slo, self._clock.monotonic)
        self._recorder: Recorder | None = None
        if config.record is not None:
            bounds = config.record_size_bytes, config.record_keep_s
            self._recorder = Recorder(config.record, config.record_bodies, *bounds, self._clock.unix)
        self._gate = Gate(config, self._clock, used)
        self._app = App(
            find_route,
            self._readiness,
            self._gate,
            self._metrics,
            self._clock,
            lambda: secrets.token_hex(16),
            CrossOrigin(config.cors_origins),
            metrics_need_key=not config.metrics_without_key,
        )
        self._app.request_limits = config.request_limits
        self._tracing = None if config.otlp_endpoint is None else TraceExporter(config.otlp_endpoint)
        self._local = (
            LocalModels(config, Processes(home_of_sockets(), self._loop), self._loop) if config.own_models else None
        )
        self._tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca, config.tls_client_auth)
        self.listener = Listener(self._app.handle, self._app.refuse, listener_config(config, self._tls, passed))
        self._agent = None if config.agent_check is None else AgentCheck(config.agent_check, self._app.agent_line)
        self._kv_events = kv_events_at(config.kv_events, config.kv_events_replay, config.has_engine)
        self._engine_thread = EngineThread(partial(self._load, load), self, self._loop)
        self._supervision = Supervision(
            self, self._readiness, manager or ServiceManager(os.environ, os.getpid()), self._loop
        )
        self._loop_lag = LoopLag(self._loop, self._clock.monotonic, self._metrics.loop_lag)
        self._compiling = ThreadPoolExecutor(MAX_AT_ONCE, "grammars")
        self._preparing: asyncio.TimerHandle | None = None  # what tries grammars out
        self._token_counters = {
            one.name: self._token_counter(one) for one in config.models if one.tokenizer is not None
        }
        self._upstream_pools = [Pool(one, self._loop, access_to(one)) for one in config.models if one.path is None]
        self._left_pools: list[Pool] = []  # of models that the list no longer has, until their requests have ended
        self._relays: dict[Pool, Relay] = {}
        self._relaying: asyncio.Task[None] | None = None  # where no engine is loaded: until upstreams have been asked
        self._client: EngineClient | None = None  # once the engine is loaded
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stopping: asyncio.Future[float] = self._loop.create_future()  # seconds of grace
        self._failure: BaseException | None = None  # the engine's
        self._served: set[str] = set()  # names of models, once they are
        self._had_terminal = False
        self._wire_metrics()
        self._wire_app()
        self._live = self._app.live = live_of(self._app, self._loop, config.deadlines)

    def _wire_metrics(self) -> None:
        """What the metrics read on each request for them."""
        metrics = self._metrics
        metrics.standing = self._standing
        metrics.recorder = self._recorder
        metrics.budgets = self._gate.quotas.budgets
        metrics.local_models = lambda: {} if self._local is None else self._local.models
        metrics.pools = lambda: {pool.settings.name: pool for pool in self._pools}
        metrics.upstreams = lambda: {
            f"{pool.settings.name} {one.place}": one for pool in self._pools for one in pool.upstreams
        }

    def _wire_app(self) -> None:
        """The app, with all that its routes use. Raises StartupError: the directory of files cannot be used."""
        app = self._app
        app.listener = self.listener
        app.drain = self._drain
        app.local_models = self._local
        app.offload = self._offload
        if self._tracing is not None:
            app.accounting.export = self._tracing.put
        if self._config.files is not None:
            app.batches = self._open_batches(self._config.files)

    # Start.

    async def run(self) -> ExitCode:
        """Serve until stop() or the engine's failure.

        Raises:
            StartupError: see start(); or the model cannot be loaded.
        """
        await self.start()
        try:
            return await self.wait_stopped()
        finally:
            self._ignore_signals()

    async def start(self) -> None:
        """Listen, and start to load the engine.

        Raises:
            StartupError: an address cannot be listened on, or other machines could use it without a key.
        """
        await self.listener.start()
        try:
            if self._agent is not None:
                await self._agent.start()
                logger.info("haproxy's agent-check is answered on port %d", self._agent.port)
            self._gate.check_exposure([] if self._needs_certificate else public_addresses(self._endpoints))
        except StartupError:
            await self.listener.drain(0)
            raise
        doing = "loading the model" if self._config.has_engine else "its models run elsewhere, or load on request"
        logger.info("listening on %s, %s", shown_addresses(self.listener.sockets), doing)
        self._live.start()
        self._gate.start()
        if self._ledger is not None:
            self._ledger.start()
        if self._recorder is not None:
            self._recorder.watch_age(self._loop)
        for pool in self._pools:
            pool.start()
        if self._local is not None:
            self._local.start()
        if self._config.has_engine:
            self._engine_thread.start()
        else:
            self._relaying = self._loop.create_task(self._begin_relaying())
        self._supervision.start()

    def install_signal_handlers(self) -> None:
        """SIGTERM drains. SIGINT ends all streams with an error event; so does a second SIGTERM. SIGHUP reloads.

        A SIGHUP because the process's terminal closed drains instead, unless SIGHUP is ignored (nohup).
        """
        self._had_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._loop.add_signal_handler(signal.SIGTERM, self.stop, self._config.drain_timeout_s)
        self._loop.add_signal_handler(signal.SIGINT, self.stop, 0.0)
        self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    async def wait_ready(self) -> None:
        """Raises StartupError: the model cannot be loaded."""
        await asyncio.shield(self._ready)

    def _report_stage(self, stage: str) -> None:
        """Thread: engine."""
        self._loop.call_soon_threadsafe(self._set_stage, stage)

    def _set_stage(self, stage: str) -> None:
        self._readiness.stage = stage
        self._supervision.on_stage()

    def _load(self, load: LoadEngine, inbox: Inbox, deliver: Callable[[StepDelivery], None]) -> LoadedEngine:
        """Thread: engine."""
        gc.disable()  # nearly all that loading makes stays: to look through it again and again took a fifth of the time
        try:
            loaded = load(inbox, deliver, self._report_stage)
        finally:
            gc.freeze()
            gc.enable()
        if self._kv_events is not None:
            loaded.engine.tell_blocks(self._kv_events.put)
        return loaded

    def on_ready(self, loaded: LoadedEngine) -> None:
        """The engine is loaded: serve generations."""
        if self._stopping.done():
            return
        try:
            self._begin_serving(loaded)
        except Exception as error:  # else whoever waits for the server waits for ever
            self.on_failed(error)

    def _begin_serving(self, loaded: LoadedEngine) -> None:
        """Raises StartupError: the model does not fit the configuration."""
        client = EngineClient(
            self._engine_thread.post,
            self.listener.batch,
            self._loop.call_soon,
            self._clock.monotonic,
            self._engine_thread.on_delivered,
            self._metrics.inter_token,
        )
        client.stats = loaded.stats  # until the first delivery
        self._client = client
        limits = loaded.facts.limits
        self._metrics.own_model = loaded.facts.model_name
        self._metrics.cache_config = {(limits.block_size, limits.num_blocks): 1}
        config = self._config
        stores = config.store_responses_s is not None
        reader = prompt_reader(loaded, self._clock, config.request_limits, config.tool_format, config.aliases, stores)
        if reader.turns is not None:
            reader.turns.keeps_answers = not config.deterministic
        reader.records = self._recorder is not None
        binds, speculates = tuple(map(str, self._endpoints)), config.speculation == "auto"
        self._app.card = server_card(reader.cards[0], loaded, binds, speculates)
        own = OwnBackend(reader, client, self._admission(lambda: client.stats))
        self._name_models(own)
        self._serve(own, loaded.facts)
        prepare = reader.make_compiler().prepare
        self._preparing = self._loop.call_later(PREPARE_AFTER_S, lambda: self._compiling.submit(prepare))
        if loaded.read_adapter is not None:
            given = config.max_loras, config.lora_dir, self._clock
            self._app.adapters = adapters = Adapters(self._app.served, loaded.read_adapter, *given)
            self._metrics.adapters = adapters.info
            if self._kv_events is not None:
                self._kv_events.adapters = adapters.names

    async def _begin_relaying(self) -> None:
        """Serve without an engine, once each upstream has been probed."""
        try:
            for pool in self._pools:
                await pool.wait_probed()
            self._name_models(None)
            self._serve(None, None)
            self._app.card = gateway_card(self._pools, self._app.served.backends, self._endpoints)
        except Exception as error:
            self.on_failed(error)

    def _name_models(self, own: OwnBackend | None) -> None:
        """The model's name in metrics, if there is only one model."""
        names = [pool.settings.name for pool in self._pools]
        names += [] if own is None else [own.reader.cards[0].id]
        self._metrics.model_name = names[0] if len(names) == 1 else None

    def _admission(self, stats: Callable[[], EngineStats]) -> Admission:
        config = self._config
        limits = QueueLimits(
            max_requests=config.max_queue, max_tokens=config.max_queue_tokens, max_bytes=config.max_queue_bytes
        )
        return Admission(limits, stats, time.monotonic)

    @property
    def _pools(self) -> list[Pool]:
        return [*self._upstream_pools, *(() if self._local is None else self._local.pools)]

    def _backends(self, own: OwnBackend | None) -> dict[str, AnyBackend]:
        """The models that upstreams serve, by each name."""
        found: dict[str, AnyBackend] = {}
        pools = {pool.settings.name: pool for pool in self._pools}
        self._relays = {pool: self._relays.get(pool) or self._relay(pool) for pool in pools.values()}
        for pool, relay in self._relays.items():
            relay.fallbacks = tuple(pools[name] for name in pool.settings.fallbacks if name in pools)
            found |= dict.fromkeys(pool.settings.names, Backend(relay, relay, relay.admission))
        if own is not None:
            refuse_same_names([*(card.id for card in own.reader.cards), *found], "the configuration")
        return found

    def _relay(self, pool: Pool) -> Relay:
        settings = pool.settings
        relay = Relay(pool, self._admission(EngineStats), self._clock, self._config.request_limits)
        relay.count = self._token_counters.pop(settings.name, None)
        if isinstance(pool, LocalPool):
            relay.admission.loading, pool.on_planned = pool, lambda length: relay.note(max_model_len=length)
            path, pooling = pool.process.model, pool.process.pooling
            if isinstance(path, Path):  # its files are here
                told = self._loop.run_in_executor(None, tasks_in, path, pooling)
                told.add_done_callback(lambda done: relay.note(tasks=done.result()))
        if settings.tokenizer is not None and relay.count is None:  # of a new list: until it is read, bytes are counted
            self._offload(partial(self._token_counter, settings)).add_done_callback(relay.take_counter)
        return relay

    def _token_counter(self, settings: ModelSettings) -> CountTokens:
        path, limits = Path(settings.tokenizer or ""), self._config.request_limits
        try:
            return token_counter(path, settings.max_model_len, self._clock, limits)
        except StartupError as error:
            cause = f"the tokenizer of the model {settings.name} cannot be used: {error.cause}"
            raise StartupError(cause, "tokenizer = DIRECTORY or FILE.gguf", error.exit_code) from error

    def _serve(self, own: OwnBackend | None, facts: EngineFacts | None) -> None:
        config = self._config
        self._app.generations = generations = Generations(
            own,
            clock=self._clock,
            offload=self._offload,
            offload_compiling=self._offload_compiling,
            metrics=self._metrics,
            max_body_bytes=config.max_body_bytes,
            deadlines=config.deadlines,
            idempotency=self._idempotency,
            ledger=self._ledger,
            others=self._backends(own),
            recorder=self._recorder,
            limits=None if facts is None else facts.limits,
        )
        if self._ledger is not None and config.store_responses_s is not None:
            most = config.store_responses_bytes, config.max_body_bytes
            self._app.responses = Responses(self._ledger, *most, self._offload)
        if self._app.batches is not None:
            generations.on_request = self._app.batches.give_way
            self._app.batches.start()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._readiness.is_ready = True
        self._loop_lag.start()
        self._ready.set_result(None)
        self._supervision.on_ready(1 if facts is None else facts.limits.max_batch_tokens)
        self._served = {card.id for backend in generations.backends for card in backend.reader.cards}
        warn_of_models(config, self._served)
        gate = self._gate
        shown = BannerFacts(
            facts,
            config,
            self._endpoints,
            tuple((one.name, len(one.upstreams)) for one in config.models),
            gate.num_valid_keys,
            gate.is_shut,
            self._needs_certificate,
        )
        self._announce(banner_lines(shown))

    def _open_batches(self, directory: Path) -> Batches:
        """Raises StartupError: the directory cannot be used."""
        config, app = self._config, self._app

        def num_slots() -> int | None:
            return None if app.served.own is None else app.served.reader.max_sequences

        return Batches(
            Store(directory),
            FileLimits(config.max_file_bytes, Quota(config.max_files, config.max_files_bytes)),
            lambda work: self._loop.run_in_executor(self._files, work),
            app.handle,
            self._gate.identify_again,
            lambda: self._readiness.is_ready and not self._readiness.is_draining,
            num_slots,
            lambda: app.served.is_busy,
            self._clock.unix,
            self._loop,
        )

    def _offload_compiling(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(self._compiling, work)

    def _offload(self, work: Callable[[], T], /) -> asyncio.Future[T]:
        return self._loop.run_in_executor(None, work)

    @property
    def _endpoints(self) -> tuple[Endpoint, ...]:
        return endpoints_of(self.listener.sockets, self._tls is not None)

    @property
    def _needs_certificate(self) -> bool:
        """Clients must show a certificate wherever other machines can connect."""
        is_asked = all(one.has_tls or not is_public([one]) for one in self._endpoints)
        return self._tls is not None and self._tls.needs_certificate and is_asked

    # While it serves: the engine's deliveries, and what metrics and supervision ask.

    def on_delivery(self, delivery: StepDelivery) -> None:
        assert self._client is not None, "nothing is delivered before the engine is ready"
        try:
            self._supervision.on_step(delivery.stats)
            self._metrics.observe_step(delivery.stats)
        finally:  # the engine waits for this delivery's end, and every request for its tokens
            self._client.deliver(delivery)

    def on_beat(self, gil_wait_s: float) -> None:
        self._metrics.gil_wait.observe(gil_wait_s)
        self._supervision.on_beat()

    def on_failed(self, error: BaseException) -> None:
        """The engine cannot be loaded, or failed: the process ends."""
        self._failure = self._failure or error
        self._readiness.is_ready = False
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it as retrieved; wait_ready() still raises it
            if not isinstance(error, StartupError):
                logger.critical("the server cannot start: %r", error, exc_info=error)
        else:
            logger.critical("the engine has failed, the server ends: %r", error, exc_info=error)
            if self._client is not None:
                self._client.fail("The engine failed. Try again once the server has restarted.")
        self.stop(0.0)

    def ask_for_beat(self) -> None:
        if self._config.has_engine:
            self._engine_thread.ask_for_beat()
        else:
            self._supervision.on_beat()

    @property
    def num_in_progress(self) -> int:
        return self.listener.num_handlers

    @property
    def why_refusing(self) -> str | None:
        why = None if self._ledger is None else self._ledger.why_unavailable
        return None if why is None else f"the ledger cannot be written: {why}"

    def _standing(self) -> Standing:
        ledger = self._ledger
        return Standing(
            ledger_is_up=None if ledger is None else ledger.why_unavailable is None,
            ledger_commit_age_s=None if ledger is None else ledger.commit_age_s,
            ledger_disk=None if ledger is None else ledger.disk,
            reload=self._supervision.last_reload,
            expiries={} if self._tls is None else self._tls.expiries,
            jwks_age_s=self._gate.jwks_age_s,
        )

    # Reload.

    def _hang_up(self) -> None:
        if self._had_terminal and not has_terminal():
            logger.info("the terminal is closed")
            self.stop(self._config.drain_timeout_s)
        else:
            self._supervision.reload(self._reload)

    def _reload(self) -> None:
        """Read certificates, tenants, keys and models again.

        Raises:
            StartupError: one of them cannot be used. Then nothing changes except that revocations apply; if only
                models cannot be used, everything else changes.
        """
        unread: StartupError | None = None
        try:
            try:
                config = self._read_config(True)
            except StartupError as error:
                config, unread = of_callers(self._read_config(False), self._config), error
            apply = self._gate.prepare(config)
            if self._tls is not None:
                self._tls.reload()
                logger.info("the certificate is reloaded")
            apply()
            try:
                if unread is not None:
                    raise unread
                self._take_models(config)
            except StartupError as error:
                logger.error("the models stay as they were: %s; %s", error.cause, error.fix)
            if self._served:
                warn_of_models(config, self._served)
        except StartupError:
            self._gate.revoke()
            raise
        finally:
            self._app.end_revoked()

    def _take_models(self, config: ServerConfig) -> None:
        """Apply changes of [[models]]. A first model with a path, and a changed --model, wait for the next start.

        Raises:
            StartupError: a name is that of the model in this process.
        """
        before, local, generations = self._config, self._local, self._app.generations
        is_other = config.has_engine != before.has_engine
        if is_other or (local is None and config.own_models):
            logger.warning("the first [[models]] with a path, or a change of --model, takes effect at the next start")
        if is_other:
            return
        own = None if generations is None else generations.own
        elsewhere = [one for one in config.models if one.path is None]
        taken = elsewhere if local is None else config.models
        if own is not None:
            names = (name for one in taken for name in one.names)
            refuse_same_names([*(card.id for card in own.reader.cards), *names], "the configuration")
        self._take_upstreams(elsewhere)
        if local is not None:
            local.take(config)
            local.begin()
        if generations is not None:
            self._name_models(own)
            generations.others = self._backends(own)
            self._served = {card.id for backend in generations.backends for card in backend.reader.cards}
            if own is None:
                self._app.card = gateway_card(self._pools, generations.backends, self._endpoints)

    def _take_upstreams(self, models: Sequence[ModelSettings]) -> None:
        """Raises StartupError: a file that [[models]] names cannot be used; nothing has changed."""
        accesses = [access_to(one) for one in models]
        known = {one.settings.name: one for one in self._upstream_pools if any(map(one.can_take, models))}
        pools = list[Pool]()
        for settings, access in zip(models, accesses, strict=True):
            pool = known.get(settings.name) or Pool(settings, self._loop, access)
            pool.take(settings, access)
            pool.start()
            pools.append(pool)
        gone = [one for one in self._upstream_pools if one not in pools]
        for pool in gone:
            pool.leave()
        self._left_pools = [*(one for one in self._left_pools if not one.has_left), *gone]
        self._upstream_pools = pools

    # Drain and end.

    def stop(self, grace_s: float) -> None:
        """Accept no new requests, and give those in progress grace_s. A second call ends them now.

        A connection that does not read its error soon after (a stalled reader, half a head) is aborted.
        """
        if self._stopping.done():
            self.listener.hurry(HURRIED_FAREWELL_S)
            self._say_farewell()
        else:
            self._stopping.set_result(grace_s)

    def _drain(self) -> float:
        """/admin/drain: like the first SIGTERM; repeated calls change nothing. Returns the grace period in seconds."""
        grace_s = self._config.drain_timeout_s
        if not self._stopping.done():
            logger.info("draining, then ending the server, by POST /admin/drain")
            self.stop(grace_s)
        return grace_s

    async def wait_stopped(self) -> ExitCode:
        """Wait for stop() or the engine's failure, and for the end. The rest of run(), after start()."""
        grace_s = await self._stopping
        try:
            await self._shut_down(grace_s)
        finally:
            self._supervision.close()
            self._live.close()
            self._loop_lag.close()
            if self._tracing is not None:
                await self._tracing.close()
            if self._kv_events is not None:
                self._kv_events.close()
        if isinstance(self._failure, StartupError):
            raise self._failure
        return ExitCode.OK if self._failure is None else ExitCode.ENGINE

    async def _shut_down(self, grace_s: float) -> None:
        if self._readiness.is_ready:
            may = f"may take {grace_s:g} s more" if grace_s else "are broken off"
            logger.info("shutting down: requests in progress %s", may)
        self._readiness.is_draining = True
        self._supervision.on_stopping(self._failure if isinstance(self._failure, StartupError) else None)
        farewell = self._loop.call_later(grace_s, self._say_farewell)
        await self.listener.drain(grace_s + FAREWELL_S)
        farewell.cancel()
        if self._agent is not None:
            self._agent.close()
        if self._relaying is not None:
            self._relaying.cancel()
        if self._preparing is not None:
            self._preparing.cancel()
        self._compiling.shutdown(wait=False, cancel_futures=True)
        for pool in (*self._pools, *self._left_pools):
            await pool.close()
        if self._app.batches is not None:
            await self._app.batches.close()
        if self._local is not None:
            await self._local.close()
        if self._ledger is not None:
            self._ledger.close()
        if self._recorder is not None:
            self._recorder.close()
        if not self._config.has_engine:
            return
        self._engine_thread.stop()
        if self._client is None or isinstance(self._failure, EngineLost):
            return  # it still loads, or hangs, and cannot be interrupted: the process ends without it
        if not self._engine_thread.wait_stopped(ENGINE_STOP_S):
            logger.warning("the engine's step has not ended after %g s", ENGINE_STOP_S)

    def _say_farewell(self) -> None:
        message = "The server is shutting down. Send the request again once it is back."
        self._app.fail_all(ServiceError(ErrorKind.UNAVAILABLE, message, "draining", retry_after_s=5))

    def _ignore_signals(self) -> None:
        """Ignore signals from now on: another SIGTERM must not change how an ending process ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if self._loop.remove_signal_handler(number):
                signal.signal(number, signal.SIG_IGN)


async def serve(
    config: ServerConfig,
    load: LoadEngine,
    read_config: Callable[[bool], ServerConfig] | None = None,
    manager: ServiceManager | None = None,
) -> ExitCode:
    """Run a server until it is told to stop. Arguments: see Server. Raises StartupError: see Server.run."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_connections(config.max_connections)
    passed = take_passed_sockets(os.environ, os.getpid())
    server = Server(config, load, lambda lines: tell(lines, sys.stdout), passed, read_config, manager)
    server.install_signal_handlers()
    return await server.run()


def has_terminal() -> bool:
    """The process has a controlling terminal: without one, open(2) of /dev/tty fails with ENXIO."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def listener_config(config: ServerConfig, tls: ServerTls | None, passed: Sequence[PassedSocket]) -> ListenerConfig:
    return ListenerConfig(
        binds=config.all_binds(passed),
        passed=passed,
        unix_mode=config.unix_mode,
        tls=tls,
        takes_upgrade=config.h2c_upgrade,
        max_connections=config.max_connections,
        clients=config.client_rules,
        buffered_body_bytes=max(ALL_BUFFERED_BODY_BYTES, config.max_body_bytes),
        handshake_s=config.handshake_timeout_s,
        notsent_bytes=config.max_unsent_bytes,
        connection=config.connection_limits,
    )


def gateway_card(pools: Sequence[Pool], backends: Sequence[AnyBackend], endpoints: Sequence[Endpoint]) -> ServerCard:
    """The description of a server without an engine, for routers."""
    return ServerCard(
        model=backends[0].reader.cards[0],
        model_type=None,
        architectures=(),
        version=__version__,
        max_sequences=sum(len(pool.upstreams) * pool.settings.max_requests for pool in pools),
        max_batch_tokens=0,
        num_kv_tokens=0,
        binds=tuple(map(str, endpoints)),
    )


def warn_of_models(config: ServerConfig, served: Set[str]) -> None:
    """Log models that the configuration names but that are not served."""
    names = ", ".join(sorted(served))
    hint = f"the one that is served is {names}" if len(served) == 1 else f"those that are served are {names}"
    for model, _ in config.prices.by_model:
        if model not in (*served, ANY_MODEL):
            logger.warning("[prices] has the model %r, and %s", model, hint)
    for tenant in config.tenants:
        for model in tenant.models or ():
            if model not in served:
                logger.warning("the tenant %s may use the model %r, and %s", tenant.name, model, hint)


class OpenLedger(NamedTuple):
    """
    Args:
        ledger: None: none is configured.
        used: its recorded usage of this day and month.
        idempotency: with the ledger's stored answers.
    """

    ledger: Ledger | None
    used: Used
    idempotency: Idempotency


def open_ledger(config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> OpenLedger:
    """Raises StartupError: see open_journal; or its directory cannot be created."""
    if config.ledger is None:
        if config.store_responses_s is not None:
            cause = "--store-responses needs a ledger to store responses in"
            raise StartupError(cause, "--ledger FILE")
        for name in PERIOD_LIMITS:
            if any(getattr(limits, name) for one in config.tenants for limits in (one.limits, one.key_limits)):
                logger.warning("without --ledger FILE, %s starts over at each start of the server", name)
        return OpenLedger(None, {}, Idempotency(clock.unix))
    try:
        journal = open_journal(config.ledger, min(config.max_queue, MAX_SPILLED))
    except StartupError as error:
        directory = config.ledger.absolute().parent
        if directory.is_dir():
            raise
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        cause = f"the ledger's directory {directory} does not exist and cannot be created: {reason}"
        raise StartupError(cause, "--ledger FILE, in a directory that this user can write", error.exit_code) from error
    return opened(journal, LedgerThread(journal, loop), config, clock, loop)


def opened(
    journal: Journal, writer: Writer, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop
) -> OpenLedger:
    """Read this day's and month's usage now: later the journal belongs to the writer thread."""
    begins_us = [period_of(int(clock.unix()), is_month)[0] * MICRO for is_month in (False, True)]
    used, answers = journal.store.used_since(*begins_us), journal.store.answers()
    assert config.ledger is not None
    kept_s = config.ledger_keep_s, config.store_responses_s or 0.0
    ledger = Ledger(config.ledger, writer, config.prices, clock.unix, loop, *kept_s)
    return OpenLedger(
        ledger, used, Idempotency(clock.unix, answers, lambda answer: ledger.write(Keep(answer)), ledger.forget)
    )
