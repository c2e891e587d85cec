"""The table of routes: which handler a path has, by method, and what it asks of a request first. Thread: loop."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from urllib.parse import unquote

from core.errors import ErrorKind, ServiceError
from server.api.chat import ChatSurface
from server.api.completions import CompletionsSurface
from server.api.responses import ResponsesSurface
from server.api.surface import Surface
from server.app_state import AppState
from server.exchange import Exchange
from server.gate.identity import Scope
from server.handlers import models, operating, prompts, requests
from server.handlers.prompts import generating
from server.values import nearest

Handler = Callable[[AppState, Exchange], Awaitable[None]]

_SHOWN_CHARS = 200  # of what a client asked for, in errors that repeat it


@dataclass(frozen=True, slots=True)
class Route:
    """A handler, and what it asks of a request first.

    Args:
        scope: the right that the caller must have; None: anybody may ask, unknown to us.
        is_counted: it is work, which the caller's quotas bound.
        needs_tokens: of these quotas.
    """

    handler: Handler
    scope: Scope | None
    needs_model: bool = True
    is_counted: bool = False
    needs_tokens: bool = False


ASKS = Scope.INFERENCE


def _generation(surface: Surface) -> Route:
    return Route(generating(surface), ASKS, is_counted=True, needs_tokens=True)


ROUTES: dict[str, dict[str, Route]] = {
    "/v1/chat/completions": {"POST": _generation(ChatSurface())},
    "/v1/completions": {"POST": _generation(CompletionsSurface())},
    "/v1/responses": {"POST": _generation(ResponsesSurface())},
    "/v1/responses/input_tokens": {"POST": Route(prompts.count_input_tokens, ASKS, is_counted=True)},
    "/tokenize": {"POST": Route(prompts.tokenize_prompt, ASKS, is_counted=True)},
    "/detokenize": {"POST": Route(prompts.detokenize, ASKS, is_counted=True)},
    "/v1/models": {"GET": Route(models.list_models, ASKS)},
    "/tokenizer_info": {"GET": Route(prompts.show_tokenizer_info, ASKS)},
    "/version": {"GET": Route(models.show_version, ASKS)},
    "/model_info": {"GET": Route(models.show_model_info, ASKS)},
    "/server_info": {"GET": Route(models.show_server_info, ASKS)},
    "/v1/usage": {"GET": Route(requests.show_usage, Scope.USAGE)},
    "/health": {"GET": Route(operating.show_health, None, needs_model=False)},
    "/ping": dict.fromkeys(("GET", "POST"), Route(operating.show_health, None, needs_model=False)),
    "/ready": {"GET": Route(operating.show_readiness, None, needs_model=False)},
    "/metrics": {"GET": Route(operating.show_metrics, Scope.METRICS, needs_model=False)},
    "/admin/requests": {"GET": Route(requests.list_requests, Scope.ADMIN, needs_model=False)},
    "/admin/engine": {"GET": Route(operating.show_engine, Scope.ADMIN, needs_model=False)},
    "/admin/cache/clear": {"POST": Route(operating.clear_cache, Scope.ADMIN, needs_model=False)},
    "/admin/drain": {"POST": Route(operating.drain, Scope.ADMIN, needs_model=False)},
}
_SHOWN = [path for path in ROUTES if not path.startswith("/admin")]  # to whoever asks for a path that is not here
_LEAST_SIMILARITY = 0.8  # /v1/messages and /v1/usage, which are no slips of one another, have 0.75
# As clients ask whose base URL ends without /v1
ROUTES |= {
    path.removeprefix("/v1"): ROUTES[path]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models")
}
# Of paths that begin so; the rest is the handler's argument
PREFIXES: dict[str, dict[str, Route]] = {
    "/v1/models/": {"GET": Route(models.get_model, ASKS)},
    "/models/": {"GET": Route(models.get_model, ASKS)},
    "/admin/requests/": {
        "GET": Route(requests.show_request, Scope.ADMIN, needs_model=False),
        "DELETE": Route(requests.delete_request, Scope.ADMIN),
    },
    "/v1/requests/": {
        "GET": Route(requests.show_request, ASKS, needs_model=False),
        "DELETE": Route(requests.delete_request, ASKS),
    },
}


class MethodNotAllowed(ServiceError):
    """A path that is here, asked in a way that it does not take."""

    def __init__(self, path: str, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join("GET, HEAD" if name == "GET" else name for name in allowed)
        message = f"{path[:_SHOWN_CHARS]} does not take {method}. Allowed: {self.allowed}."
        super().__init__(ErrorKind.METHOD_NOT_ALLOWED, message, "method_not_allowed")


def find_route(path: str, method: str) -> tuple[Route, str]:
    """The route, and the argument that its prefix leaves, decoded.

    Raises:
        ServiceError: there is no such path.
        MethodNotAllowed: there is, but not for this.
    """
    methods, argument = ROUTES.get(path), ""
    if methods is None:
        for prefix, candidates in PREFIXES.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                methods, argument = candidates, unquote(path[len(prefix) :])
    if methods is None:
        raise _not_found(path[:_SHOWN_CHARS])
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        raise MethodNotAllowed(path, method, methods)
    return route, argument


def _not_found(path: str) -> ServiceError:
    likely = next((known for known in _SHOWN if path.rstrip("/").endswith(known.removeprefix("/v1"))), None)
    likely = likely or nearest(path, _SHOWN, _LEAST_SIMILARITY)
    meant = f"; did you mean {likely}?" if likely else "."
    message = f"There is no {path} here{meant} Known: {', '.join(sorted(_SHOWN))}."
    return ServiceError(ErrorKind.NOT_FOUND, message, "not_found")
