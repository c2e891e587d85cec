"""The process's life: listen, load, serve, drain, exit. Thread: loop.

The port listens at once; while the engine loads on its thread, /health answers and everything else says 503 with the
stage. What is loaded, and how, is an argument (server/engine_loader.py): this file knows no model.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from core.errors import ErrorKind, ExitCode, ServiceError, StartupError
from core.types import StepDelivery
from server.app import App
from server.banner import BannerFacts, Endpoint, banner_lines, endpoints_of, is_public, public_addresses
from server.callers import Gate
from server.clock import Clock
from server.config import ServerConfig
from server.engine_client import EngineClient
from server.engine_thread import EngineThread
from server.exchange import Readiness
from server.gate.admission import Admission, QueueLimits
from server.gate.cross_origin import CrossOrigin
from server.gate.quota import DAY_S, UsedTokens
from server.generation import Generations
from server.ledger.idempotency import Idempotency
from server.ledger.journal import Journal, LedgerThread, Writer, open_journal
from server.ledger.ledger import MAX_SPILLED, Ledger
from server.ledger.store import MICRO
from server.ledger.usage import ANY_MODEL
from server.listening.listener import ALL_BUFFERED_BODY_BYTES, Listener, ListenerConfig
from server.listening.sockets import PassedSocket, allow_connections, shown_addresses, take_passed_sockets
from server.loaded_engine import LoadedEngine, LoadEngine, prompt_reader, server_card
from server.observing.logs import tell
from server.observing.metrics import LoopLag, Metrics, Standing
from server.observing.otel import TraceExporter
from server.supervision import EngineLost, ServiceManager, Supervision
from server.wire.limits import BUFFERED_BODY_BYTES
from server.wire.tls import ServerTls, server_tls

logger = logging.getLogger(__name__)

T = TypeVar("T")

SWITCH_INTERVAL_S = 1e-4  # how long a thread may keep the GIL from one that waits
# Collections stall every stream: what start made is frozen, and what lives long is looked at seldom. But the youngest
# are collected soon: of connections that end at once, by the thousand, 100,000 objects took 160 ms.
GC_THRESHOLDS = (5_000, 20, 5_000)
FAREWELL_S = 2.0  # for the last error events to leave
HURRIED_FAREWELL_S = 1.0  # likewise, for who has signalled twice
ENGINE_STOP_S = 10.0  # for the step that runs


class Server:
    """One serving process. Implements server.engine_thread.EngineEvents and server.supervision.Supervised.

    Args:
        load: makes the engine.
        announce: takes the banner's lines when the server is ready.
        passed: sockets that listen already, of socket activation.
        read_config: the configuration as it is now, for SIGHUP; None: it comes from no file.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: LoadEngine,
        announce: Callable[[list[str]], None],
        passed: Sequence[PassedSocket] = (),
        read_config: Callable[[], ServerConfig] | None = None,
    ) -> None:
        """
        Raises:
            StartupError: the certificate or the keys file is not fit, or an extra that is asked for is missing.
        """
        self._config = config
        self._read_config = read_config or (lambda: config)
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._readiness = Readiness()
        self._clock = Clock(time.monotonic, time.time)
        self._ledger, used_today, self._idempotency = open_ledger(config, self._clock, self._loop)
        self._metrics = Metrics(config.slo, self._clock.monotonic)
        self._metrics.standing = self._standing
        self._gate = Gate(config, self._clock, used_today)
        self._app = App(
            self._readiness,
            self._gate,
            self._metrics,
            self._clock,
            lambda: secrets.token_hex(16),
            CrossOrigin(config.cors_origins),
        )
        self._tracing = None if config.otlp_endpoint is None else TraceExporter(config.otlp_endpoint)
        if self._tracing is not None:
            self._app.export_to(self._tracing.put)
        self._tls = server_tls(config.tls_cert, config.tls_key, config.tls_client_ca, config.tls_client_auth)
        self.listener = Listener(self._app.handle, self._app.refuse, listener_config(config, self._tls, passed))
        self._app.state.listener = self.listener
        self._app.state.drain = self._drain
        self._engine_thread = EngineThread(
            lambda inbox, deliver: load(inbox, deliver, self._report_stage), self, self._loop
        )
        self._manager = ServiceManager(os.environ, os.getpid())
        self._supervision = Supervision(self, self._manager, self._loop)
        self._loop_lag = LoopLag(self._loop, self._clock.monotonic, self._metrics.loop_lag)
        self._client: EngineClient | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stopping: asyncio.Future[float] = self._loop.create_future()  # seconds of grace
        self._failure: BaseException | None = None
        self._had_terminal = False

    async def run(self) -> ExitCode:
        """Serve until stop() or the engine's end.

        Raises:
            StartupError: see start(); or the model cannot be loaded.
        """
        await self.start()
        try:
            return await self.wait_stopped()
        finally:
            self._ignore_signals()

    async def wait_stopped(self) -> ExitCode:
        """The rest of run(), for who has called start()."""
        grace_s = await self._stopping
        try:
            await self._shut_down(grace_s)
        finally:
            self._supervision.close()
            self._loop_lag.close()
            if self._tracing is not None:
                await self._tracing.close()
        if isinstance(self._failure, StartupError):
            raise self._failure
        return ExitCode.OK if self._failure is None else ExitCode.ENGINE

    async def start(self) -> None:
        """Listen, and begin to load.

        Raises:
            StartupError: an address cannot be had, or strangers could reach it.
        """
        await self.listener.start()
        try:
            self._gate.check_exposure([] if self._needs_certificate else public_addresses(self._endpoints))
        except StartupError:
            await self.listener.drain(0)
            raise
        logger.info("listening on %s, loading the model", shown_addresses(self.listener.sockets))
        self._gate.start()
        if self._ledger is not None:
            self._ledger.start()
        self._engine_thread.start()
        self._supervision.start()

    async def wait_ready(self) -> None:
        """
        Raises:
            StartupError: the model cannot be loaded.
        """
        await asyncio.shield(self._ready)

    def install_signal_handlers(self) -> None:
        """SIGTERM drains, SIGINT ends streams with an error event at once; so does any second one of them.

        SIGHUP reads certificates, tenants and keys again. Only where it comes because the terminal that the process was
        started from is gone, it drains, unless it was to be ignored (nohup).
        """
        self._had_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        self._loop.add_signal_handler(signal.SIGTERM, self.stop, self._config.drain_timeout_s)
        self._loop.add_signal_handler(signal.SIGINT, self.stop, 0.0)
        self._loop.add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        if self._had_terminal and not has_terminal():
            logger.info("the terminal is gone")
            self.stop(self._config.drain_timeout_s)
        else:
            self._supervision.reload(self._reload)

    def _ignore_signals(self) -> None:
        """One more SIGTERM finds a process that is at its end already, and must not change how it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if self._loop.remove_signal_handler(number):
                signal.signal(number, signal.SIG_IGN)

    def _reload(self) -> None:
        """
        Raises:
            StartupError: something of it is not fit; all stays as it was, but for who is no longer named.
        """
        try:
            self._reload_all()
        except StartupError:
            self._gate.revoke()
            raise
        finally:
            self._app.end_revoked()

    def _reload_all(self) -> None:
        """
        Raises:
            StartupError: something of it is not fit; all stays as it was.
        """
        config = self._read_config()
        apply = self._gate.prepare(config)
        if self._tls is not None:
            self._tls.reload()
            logger.info("the certificate is reloaded")
        apply()
        if self._client is not None:
            warn_of_models(config, self._metrics.model_name)

    def stop(self, grace_s: float) -> None:
        """Take no new requests, give those in progress grace_s. A second call gives them no more time.

        What has not ended by its error soon after that (a reader has stopped, half a head has come) is aborted.
        """
        if self._stopping.done():
            self.listener.hurry(HURRIED_FAREWELL_S)
            self._say_farewell()
        else:
            self._stopping.set_result(grace_s)

    def _drain(self) -> float:
        """As the first SIGTERM, and no more than that if asked again. Returns the seconds of grace."""
        grace_s = self._config.drain_timeout_s
        if not self._stopping.done():
            logger.info("the server drains and ends, as /admin/drain asks")
            self.stop(grace_s)
        return grace_s

    # What the engine thread tells.

    def on_ready(self, loaded: LoadedEngine) -> None:
        if self._stopping.done():
            return  # too late: nobody is to be served any more
        client = EngineClient(
            self._engine_thread.post,
            loaded.files.tokenizer.table,
            loaded.files.tokenizer.full_table,
            self.listener.batch,
            self._loop.call_soon,
            self._clock.monotonic,
            self._engine_thread.on_delivered,
            self._metrics.inter_token,
        )
        client.stats = loaded.stats  # until the first delivery
        self._client = client
        self._metrics.model_name = loaded.facts.model_name
        reader = prompt_reader(loaded, self._clock, self._config.request_limits)
        self._app.state.card = server_card(reader.cards[0], loaded, tuple(map(str, self._endpoints)))
        self._app.state.generations = Generations(
            reader=reader,
            engine=client,
            clock=self._clock,
            offload=self._offload,
            metrics=self._metrics,
            max_body_bytes=self._config.max_body_bytes,
            admission=Admission(self._queue_limits(), lambda: client.stats, time.monotonic),
            deadlines=self._config.deadlines,
            idempotency=self._idempotency,
            ledger=self._ledger,
        )
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._readiness.is_ready = True
        self._loop_lag.start()
        self._ready.set_result(None)
        self._supervision.on_ready(loaded.facts.limits.max_batch_tokens)
        warn_of_models(self._config, loaded.facts.model_name)
        gate, needs_certificate = self._gate, self._needs_certificate
        self._announce(
            banner_lines(
                BannerFacts(
                    loaded.facts, self._config, self._endpoints, gate.num_valid_keys, gate.is_shut, needs_certificate
                )
            )
        )

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

    def _queue_limits(self) -> QueueLimits:
        config = self._config
        return QueueLimits(
            max_requests=config.max_queue, max_tokens=config.max_queue_tokens, max_bytes=config.max_queue_bytes
        )

    def on_delivery(self, delivery: StepDelivery) -> None:
        assert self._client is not None, "nothing is delivered before the engine is ready"
        try:
            self._supervision.on_step(delivery.stats)
            self._metrics.observe_step(delivery.stats)
        finally:  # the engine waits for its end, and every request for its tokens
            self._client.deliver(delivery)

    def on_beat(self, gil_wait_s: float) -> None:
        self._metrics.gil_wait.observe(gil_wait_s)
        self._supervision.on_beat()

    def on_failed(self, error: BaseException) -> None:
        self._failure = error
        self._readiness.is_ready = False
        if self._client is None:
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: whoever waits still gets it
        else:
            logger.critical("the engine has failed, the server ends: %r", error, exc_info=error)
            self._client.fail("The engine failed. Try again once the server has restarted.")
        if not isinstance(error, StartupError) and self._client is None:
            logger.critical("the engine cannot be loaded: %r", error, exc_info=error)
        self.stop(0.0)

    def _offload(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._loop.run_in_executor(None, work)

    def _report_stage(self, stage: str) -> None:
        """Thread: engine. A string is handed over, nothing else."""
        self._loop.call_soon_threadsafe(self._set_stage, stage)

    def _set_stage(self, stage: str) -> None:
        self._readiness.stage = stage
        self._supervision.on_stage()

    # What supervision asks and tells.

    @property
    def num_in_progress(self) -> int:
        return self.listener.num_handlers

    @property
    def stage(self) -> str:
        return self._readiness.stage

    def ask_for_beat(self) -> None:
        self._engine_thread.ask_for_beat()

    @property
    def why_refusing(self) -> str | None:
        why = None if self._ledger is None else self._ledger.why_unavailable
        return None if why is None else f"the ledger takes no writes: {why}"

    def on_silence(self, is_silent: bool) -> None:
        self._readiness.is_stalled = is_silent

    @property
    def _endpoints(self) -> tuple[Endpoint, ...]:
        return endpoints_of(self.listener.sockets, self._tls is not None)

    @property
    def _needs_certificate(self) -> bool:
        """Wherever TLS is spoken; a bind in the clear asks nobody."""
        is_asked = all(one.has_tls or not is_public([one]) for one in self._endpoints)
        return self._tls is not None and self._tls.needs_certificate and is_asked

    # The end.

    async def _shut_down(self, grace_s: float) -> None:
        if self._readiness.is_ready:
            may = f"may take {grace_s:g} s more" if grace_s else "are broken off"
            logger.info("shutting down: requests in progress %s", may)
        self._readiness.is_draining = True
        self._supervision.on_stopping(self._failure if isinstance(self._failure, StartupError) else None)
        farewell = self._loop.call_later(grace_s, self._say_farewell)
        await self.listener.drain(grace_s + FAREWELL_S)
        farewell.cancel()
        if self._ledger is not None:
            self._ledger.close()
        self._engine_thread.stop()
        if self._client is None or isinstance(self._failure, EngineLost):
            return  # it is still loading, or hangs, which nothing can interrupt: the process ends without it
        if not self._engine_thread.wait_stopped(ENGINE_STOP_S):
            logger.warning("the engine's step has not ended after %g s", ENGINE_STOP_S)

    def _say_farewell(self) -> None:
        message = "The server is shutting down. Send the request again once it is back."
        self._app.fail_all(ServiceError(ErrorKind.UNAVAILABLE, message, "draining", retry_after_s=5))


async def serve(
    config: ServerConfig, load: LoadEngine, read_config: Callable[[], ServerConfig] | None = None
) -> ExitCode:
    """Run a server until it is told to stop.

    Args:
        read_config: see Server.

    Raises:
        StartupError: see Server.run.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    allow_connections(config.max_connections)
    passed = take_passed_sockets(os.environ, os.getpid())
    server = Server(config, load, lambda lines: tell(lines, sys.stdout), passed, read_config)
    server.install_signal_handlers()
    return await server.run()


def has_terminal() -> bool:
    """The process is controlled by one, which is there: open(2) of it is ENXIO otherwise."""
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
        connection=replace(
            config.connection_limits,
            buffered_body_bytes=max(BUFFERED_BODY_BYTES, config.max_body_bytes),
            head_s=config.head_timeout_s,
            body_s=config.body_timeout_s,
            idle_s=config.idle_timeout_s,
            stall_s=config.stall_timeout_s,
        ),
    )


def warn_of_models(config: ServerConfig, served: str) -> None:
    """Log what is said of models that are not here.

    Args:
        served: the name of the one that is.
    """
    hint = f"the one that is served is {served}"
    for model, _ in config.prices.by_model:
        if model not in (served, ANY_MODEL):
            logger.warning("[prices] has the model %r, and %s", model, hint)
    for tenant in config.tenants:
        for model in tenant.models or ():
            if model != served:
                logger.warning("the tenant %s may use the model %r, and %s", tenant.name, model, hint)


class OpenLedger(NamedTuple):
    """
    Args:
        ledger: None: none is configured.
        used_today: what it knows of the day.
        idempotency: with the answers that it has.
    """

    ledger: Ledger | None
    used_today: UsedTokens
    idempotency: Idempotency


def open_ledger(config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop) -> OpenLedger:
    """The ledger that is configured, and what is made of it.

    Raises:
        StartupError: see open_journal.
    """
    if config.ledger is None:
        if any(one.limits.tokens_per_day or one.key_limits.tokens_per_day for one in config.tenants):
            logger.warning("without --ledger FILE, tokens_per_day begins anew with each start of the server")
        return OpenLedger(None, {}, Idempotency(clock.unix))
    journal = open_journal(config.ledger, min(config.max_queue, MAX_SPILLED))
    return opened(journal, LedgerThread(journal, loop), config, clock, loop)


def opened(
    journal: Journal, writer: Writer, config: ServerConfig, clock: Clock, loop: asyncio.AbstractEventLoop
) -> OpenLedger:
    """What is read of the journal is read now: it is the writer's from then on."""
    midnight_s = int(clock.unix()) // DAY_S * DAY_S
    used_today, answers = journal.store.used_since(midnight_s * MICRO), journal.store.answers()
    assert config.ledger is not None
    ledger = Ledger(config.ledger, writer, config.prices, clock.unix, loop, config.ledger_keep_s)
    return OpenLedger(ledger, used_today, Idempotency(clock.unix, answers, ledger.keep, ledger.forget))
