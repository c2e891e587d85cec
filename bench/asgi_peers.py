"""The FastAPI front end on other servers: `python -m bench.asgi_peers --server hypercorn --port 8001`.

For plain requests the application is not measured: /health is answered below it, by the least that ASGI allows.
"""

import argparse
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvloop

from bench.fastapi_peer import make_app
from bench.peer import add_peer_arguments

NUM_STREAMS = 256  # on one connection, at least
_STEP_RATE = "BENCH_STEP_RATE"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", b"15")],
}
_BODY = {"type": "http.response.body", "body": b'{"status":"ok"}'}


def with_health(app: Application) -> Application:
    """Answers GET /health itself."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == "/health":
            await send(dict(_START))
            await send(dict(_BODY))
        else:
            await app(scope, receive, send)

    return handle


def serve_uvicorn(app: Application, port: int, http: str) -> None:
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=port, loop="uvloop", http=http, access_log=False, log_level="error")


async def serve_hypercorn(app: Any, port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = None
    config.loglevel = "ERROR"
    config.h2_max_concurrent_streams = NUM_STREAMS
    await serve(app, config)


def serve_granian(port: int, step_rate: float) -> None:
    """In a worker process, which makes the application: inside a loop of ours, granian loses wake-ups."""
    from granian.constants import Interfaces, Loops
    from granian.http import HTTP2Settings
    from granian.server import Server

    os.environ[_STEP_RATE] = str(step_rate)
    Server(
        "bench.asgi_peers:make_served_app",
        factory=True,
        address="127.0.0.1",
        port=port,
        interface=Interfaces.ASGI,
        loop=Loops.uvloop,
        http2_settings=HTTP2Settings(max_concurrent_streams=NUM_STREAMS),
        log_enabled=False,
    ).serve()


def make_served_app() -> Application:
    """The application of granian's worker."""
    return _app(float(os.environ[_STEP_RATE]))


def _app(step_rate: float) -> Application:
    return with_health(make_app(1 / step_rate if step_rate else 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_peer_arguments(parser)
    parser.add_argument("--server", choices=("uvicorn", "uvicorn-h11", "hypercorn", "granian"), required=True)
    arguments = parser.parse_args()
    if arguments.server == "hypercorn":
        uvloop.run(serve_hypercorn(_app(arguments.step_rate), arguments.port))
    elif arguments.server == "granian":
        serve_granian(arguments.port, arguments.step_rate)
    else:
        serve_uvicorn(
            _app(arguments.step_rate), arguments.port, "h11" if arguments.server == "uvicorn-h11" else "httptools"
        )


if __name__ == "__main__":
    main()
