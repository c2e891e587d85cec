"""For operators and what watches the server: health, readiness, metrics, the engine, the drain. Thread: loop."""

import logging

from core.errors import ErrorKind, ServiceError
from core.types import EngineStats
from server.api import models
from server.app_state import AppState
from server.exchange import Exchange
from server.ledger.ledger import PROBE_S
from server.observing.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)


async def show_health(state: AppState, exchange: Exchange) -> None:
    exchange.send(b'{"status":"ok"}')


async def show_readiness(state: AppState, exchange: Exchange) -> None:
    state.readiness.check()
    if state.readiness.is_stalled:  # requests may still wait for it; a balancer had better look elsewhere
        message = "The engine has been busy with one step for too long."
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "stalled", retry_after_s=5)
    why = None if (ledger := state.served.ledger) is None else ledger.why_unavailable
    if why is not None:  # every generation would be refused
        message = f"The billing ledger is unavailable: {why}."
        raise ServiceError(ErrorKind.UNAVAILABLE, message, "ledger_unavailable", retry_after_s=PROBE_S)
    exchange.send(b'{"status":"ready"}')


async def show_metrics(state: AppState, exchange: Exchange) -> None:
    stats = state.generations.engine.stats if state.generations is not None else EngineStats()
    listener = state.known_listener
    body = state.metrics.render(stats, listener.num_open, listener.num_accepted, listener.refusals.counts)
    exchange.send(body, media_type=CONTENT_TYPE)


async def show_engine(state: AppState, exchange: Exchange) -> None:
    engine = state.loaded_engine
    snapshot = await engine.inspect()
    exchange.send(models.engine_reply(snapshot, engine.stats))


async def clear_cache(state: AppState, exchange: Exchange) -> None:
    await state.loaded_engine.clear_cache()
    logger.info("the prefix cache is cleared, as /admin/cache/clear asks")
    exchange.send(models.CACHE_CLEARED)


async def drain(state: AppState, exchange: Exchange) -> None:
    assert state.drain is not None, "the process has said how it ends before it listens"
    grace_s = state.drain()
    num_others = state.known_listener.num_handlers - 1
    exchange.send(models.drain_reply(grace_s, num_others), status=202)
