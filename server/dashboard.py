"""The dashboard: its files, who may look, and what a frame of its stream shows. Thread: loop.

The files hold no data, and everybody may have them. The stream needs the right `admin`; where no keys are configured,
the operator's own browser on this machine has it, and nobody else.
"""

import asyncio
import math
import re
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from core.errors import ErrorKind, ServiceError
from server import __version__
from server.app import App, Exchange, Route
from server.gate.identity import LOCAL_CALLER, Scope
from server.gate.tenants import Deadlines
from server.observing.accounting import RequestRecord
from server.observing.live import COLUMNS, History, Live
from server.observing.metrics import resident_bytes
from server.observing.slo import MINIMA
from server.wire.messages import HttpRequest, Peer

DIRECTORY = Path(__file__).parent / "page"
MEDIA_TYPES = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}
FILES = {  # by path
    "/dashboard": "index.html",
    "/dashboard/page.css": "page.css",
    "/dashboard/page.js": "page.js",
    "/dashboard/chart.js": "chart.js",
}
MAX_RUNNING = 64  # shown of those in progress: with 10 viewers they cost 1 % of a core
MAX_ENDED = 100
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
_FORWARDING = re.compile(rb"forwarded|via|x-forwarded-.*|x-real-ip|(?:true|x|x-cluster|cf-connecting)-(?:client-)?ip")
_LOOPBACK_HOST = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?", re.IGNORECASE)


# Who may look.


def is_operators(request: HttpRequest, peer: Peer, trusts_proxies: bool) -> bool:
    """Whether a request without a key, to a server without keys, is of the operator's own browser on this machine.

    It is not where a proxy on this machine may have sent it; nor where a page of another site may have: by a name of
    its own that leads here (DNS rebinding), or across origins where CORS lets it.
    """
    if trusts_proxies or peer.address is None or not peer.address.is_loopback:
        return False
    hosts = [value for name, value in request.headers if name == b"host"]
    if len(hosts) != 1 or _LOOPBACK_HOST.fullmatch(hosts[0]) is None:
        return False
    if any(_FORWARDING.fullmatch(name) for name, _ in request.headers):
        return False
    origin, site = request.header(b"origin"), request.header(b"sec-fetch-site")
    is_own = origin is None or origin in (b"http://" + hosts[0], b"https://" + hosts[0])
    return is_own and site in (None, b"same-origin", b"none")


async def show_live(exchange: Exchange) -> None:
    server, caller = exchange.server, exchange.known_caller
    trusts_proxies = server.known_listener.gate.trusts_proxies
    if caller == LOCAL_CALLER and not is_operators(exchange.request, exchange.stream.peer, trusts_proxies):
        message = (
            "Without a key, the dashboard is for a browser on this machine, at http://127.0.0.1 or http://localhost "
            "and without a proxy. For others, its operator configures a key with the right 'admin' (docs/dashboard.md)."
        )
        raise ServiceError(ErrorKind.PERMISSION, message, "permission_denied")
    assert server.live is not None, "it comes with the app"
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
} | {
    "/dashboard/live": {"GET": Route(show_live, Scope.ADMIN, needs_model=False, headers=PROTECTION)},
}


# What a frame shows.


def live_of(app: App, loop: asyncio.AbstractEventLoop, deadlines: Deadlines) -> Live:
    """The stream of a server's dashboard.

    Args:
        deadlines: of requests whose tenants have none of their own: promises, where [slo] has no others.
    """
    recorder, clock = app.accounting.recorder, app.clock
    history = History(app.metrics, lambda: app.stats, clock.monotonic, clock.unix)

    promised: tuple[int, list[dict[str, Any]]] = (-1, [])

    def frame() -> dict[str, Any]:
        nonlocal promised
        if promised[0] != history.num_points:  # sorting five minutes of requests takes milliseconds
            promised = history.num_points, promises(app, deadlines, history)
        requests = sorted(app.generating(), key=lambda one: one.timings.accepted_s)
        ready = app.readiness
        state = "draining" if ready.is_draining else ready.stage if not ready.is_ready else "ready"
        return {
            "version": __version__,
            "model": app.metrics.model_name,
            "state": "stalled" if state == "ready" and ready.is_stalled else state,
            "promises": promised[1],
            "num_requests": len(requests),
            "requests": [shown_request(one, clock.monotonic()) for one in requests[:MAX_RUNNING]],
        }

    def ended(num_seen: int) -> tuple[int, list[dict[str, Any]]]:
        return recorder.num_kept, [shown_ended(one) for one in recorder.since(num_seen)[-MAX_ENDED:]]

    return Live(history, frame, ended, lambda: app.readiness.is_draining, loop)


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
    timings, view = exchange.timings, exchange.server.served.active[exchange.request_id].view()
    first_s = timings.first_token_s
    rate = None if first_s is None or now_s <= first_s else round(view.num_tokens / (now_s - first_s), 1)
    return {
        "id": exchange.request_id,
        "tenant": exchange.tenant,
        "model": view.model,
        "path": exchange.request.path,
        "state": "paused" if view.is_paused else timings.stage,
        "position": view.position,
        "num_prompt_tokens": view.num_prompt_tokens,
        "num_prefilled": view.num_prefilled,
        "num_tokens": view.num_tokens,
        "tokens_per_s": rate,
        "age_s": round(now_s - timings.accepted_s, 1),
    }


def shown_ended(flight: RequestRecord) -> dict[str, Any]:
    record = flight.record
    return {
        "id": flight.request_id,
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
