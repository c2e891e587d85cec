"""The dashboard: its files, and what a frame of its stream shows. Thread: loop.

The files hold no data, and everybody may have them. The stream needs the right `admin`.
"""

import asyncio
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from core.types import BlockMap, Watched
from server import __version__
from server.app import App, Exchange, Route
from server.gate.identity import Scope
from server.gate.tenants import Deadlines
from server.observing.accounting import RequestRecord, Ring
from server.observing.live import COLUMNS, History, Live, Source
from server.observing.metrics import resident_bytes
from server.observing.slo import MINIMA

DIRECTORY = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
SCRIPTS = ("page.js", "chart.js", "elements.js", "engine.js", "playground.js", "tenants.js", "tour.js", "uplot.js")
FILES = {"/dashboard": "index.html", "/docs": "docs.html"} | {  # by path
    f"/dashboard/{name}": name for name in ("page.css", "uplot.css", "docs.js", *SCRIPTS)
}
MAX_RUNNING = 64  # shown of those in progress: with 10 viewers they cost 1 % of a core
MAX_STEPS = 1024
MAX_PREEMPTED = 64
ASK_S = 1.0  # how often the engine is asked, while somebody looks
BLOCKS_A_SECOND = 16_384  # looked at by the engine: a larger pool is mapped less often
PROTECTION = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


async def show_live(exchange: Exchange) -> None:
    server, caller = exchange.server, exchange.known_caller
    await server.live.show(exchange.stream, lambda: not server.has_revoked(caller))


# Its files.


@cache
def _content(name: str) -> bytes:
    return (DIRECTORY / name).read_bytes()


async def show_file(exchange: Exchange, name: str) -> None:
    exchange.send(_content(name), media_type=MEDIA_TYPES[Path(name).suffix] + b"; charset=utf-8")


ROUTES: Mapping[str, dict[str, Route]] = {
    path: {"GET": Route(partial(show_file, name=name), None, needs_model=False, headers=PROTECTION)}
    for path, name in FILES.items()
} | {"/dashboard/live": {"GET": Route(show_live, Scope.ADMIN, needs_model=False, headers=PROTECTION)}}


# What a frame shows.


class EngineWatch:
    """What the engine tells while somebody looks: nothing else asks it, and it ends by itself.

    Attributes:
        steps, preempted, blocks: what was told lately; of blocks, the last map.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._asked_s = self._mapped_s = -math.inf
        self._map: BlockMap | None = None
        self.steps: Ring[Sequence[Any]] = Ring(MAX_STEPS)
        self.preempted: Ring[Sequence[Any]] = Ring(MAX_PREEMPTED)
        self.blocks: Ring[dict[str, Any]] = Ring(1)

    def look(self) -> None:
        """To be called at each tick."""
        now_s, generations = self._app.clock.monotonic(), self._app.generations
        own = None if generations is None else generations.own
        if own is not None and now_s >= self._asked_s + ASK_S:
            self._asked_s = now_s
            map_s = ASK_S * max(1, own.engine.stats.num_blocks / BLOCKS_A_SECOND)
            if tells_blocks := now_s >= self._mapped_s + map_s:
                self._mapped_s = now_s
            own.engine.watch(2 * ASK_S, tells_blocks, self._take)

    def _take(self, watched: Watched) -> None:
        unix_s = self._app.clock.unix() - self._app.clock.monotonic()
        for step in watched.steps:
            predicted_ms = None if step.predicted_s is None else round(step.predicted_s * 1e3, 3)
            tokens = step.num_prompt_tokens, step.num_own_tokens
            self.steps.put((round(step.at_s + unix_s, 3), *tokens, round(step.took_s * 1e3, 3), predicted_ms))
        for one in watched.preempted:
            self.preempted.put((round(one.at_s + unix_s, 3), one.request_id, one.index, one.cause, one.by))
        if watched.blocks is not None and watched.blocks != self._map:
            self._map = found = watched.blocks
            cells, host_cells = (b64encode(one).decode() for one in (found.cells, found.host_cells))
            shown = {"cells": cells, "host_cells": host_cells, "owners": found.owners}
            self.blocks.put(shown | {"num_host_slots": found.num_host_slots})


def live_of(app: App, loop: asyncio.AbstractEventLoop, deadlines: Deadlines) -> Live:
    """The stream of a server's dashboard.

    Args:
        deadlines: of requests whose tenants have none of their own: promises, where [slo] has no others.
    """
    recorder, clock = app.accounting.recorder, app.clock
    history = History(app.metrics, lambda: app.stats, clock.monotonic, clock.unix)
    watch = EngineWatch(app)
    slow: tuple[int, dict[str, Any]] = (-1, {})  # what takes milliseconds, renewed with each point

    def frame() -> dict[str, Any]:
        nonlocal slow
        watch.look()
        if slow[0] != history.points.num_ever:
            devices = [{"id": number, **one._asdict()} for number, one in app.metrics.devices.states().items()]
            slow = history.points.num_ever, {"promises": promises(app, deadlines, history), "devices": devices}
        requests = sorted(app.generating(), key=lambda one: one.timings.accepted_s)
        ready = app.readiness
        state = "draining" if ready.is_draining else ready.stage if not ready.is_ready else "ready"
        return {
            "version": __version__,
            "model": app.metrics.model_name,
            "state": "stalled" if state == "ready" and ready.is_stalled else state,
            **slow[1],
            "num_requests": len(requests),
            "requests": [shown_request(one, clock.monotonic()) for one in requests[:MAX_RUNNING]],
        }

    def ended(num_seen: int) -> tuple[int, list[dict[str, Any]]]:
        num_ever, flights = recorder.recent.since(num_seen)
        return num_ever, [shown_ended(one) for one in flights]

    sources: dict[str, Source] = {"ended": ended, "steps": watch.steps.since, "preempted": watch.preempted.since}
    return Live(history, frame, sources | {"blocks": watch.blocks.since}, lambda: app.readiness.is_draining, loop)


def promises(app: App, deadlines: Deadlines, history: History) -> list[dict[str, Any]]:
    """What [slo] promises, of the last 5 minutes; and the deadlines of tokens, of the last one."""
    states = app.metrics.slo.states(app.stats.num_waiting, resident_bytes())
    found = {name: (one.value, one.threshold, one.is_ok) for name, one in states.items() if one.threshold is not None}
    now = dict(zip(COLUMNS, history.now(), strict=True))
    for name, most_s in (("ttft_p95_ms", deadlines.ttft_s), ("inter_token_p95_ms", deadlines.inter_token_s)):
        if name not in found and most_s < math.inf:
            value = now[name]
            found[name] = (value, most_s * 1e3, value is None or value <= most_s * 1e3)
    return [
        {"name": name, "value": value, "threshold": threshold, "is_minimum": name in MINIMA, "is_ok": is_ok}
        for name, (value, threshold, is_ok) in found.items()
    ]


def shown_request(exchange: Exchange, now_s: float) -> dict[str, Any]:
    """One in progress: where it stands, and nothing of what it says."""
    timings, generation = exchange.timings, exchange.server.served.active[exchange.request_id]
    shown, first_s = generation.shown(), timings.first_token_s
    rate = None if first_s is None or now_s <= first_s else round(shown["num_tokens"] / (now_s - first_s), 1)
    return {
        "id": exchange.request_id,
        "tenant": exchange.tenant,
        "path": exchange.request.path,
        "state": "paused" if generation.is_paused else timings.stage,
        **shown,
        "tokens_per_s": rate,
        "age_s": round(now_s - timings.accepted_s, 1),
    }


def shown_ended(flight: RequestRecord) -> dict[str, Any]:
    record = flight.record
    return {
        "id": flight.request_id,
        "alias": flight.alias,
        "tenant": flight.tenant,
        "model": flight.model,
        "path": record.path,
        "started": round(flight.started_unix_s, 3),
        "status": record.status,
        "reason": record.error_code or record.finish_reason,
        "has_failed": flight.has_failed,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_tokens": record.num_completion_tokens,
        "ttft_ms": record.ttft_ms,
        "duration_ms": record.duration_ms,
    }
