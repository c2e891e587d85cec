"""The wiring: the one place where the server meets the engine that gpu/ computes. Also `python -m server`."""

import asyncio
import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from core.config import parse_model_config
from core.engine import Engine
from core.errors import ExitCode
from core.scheduler import Scheduler
from core.types import StepDelivery
from server.banner import base_url
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.hub import environment_hub, fetch
from server.model_files import is_gguf, read_model_files
from server.process import EngineFacts, LoadedEngine, LoadEngine, Server, serve
from server.progress import MIN_FETCHED_BYTES, MIN_LOADED_BYTES, byte_progress
from server.values import HubId

DEMO_DIRECTORY = Path(__file__).parent.parent / "gpu" / "demo" / "model"
DEMO_NAME = "steploop-demo"


def run_server(config: ServerConfig) -> ExitCode:
    """Serve until told to stop.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import uvloop

    return uvloop.run(serve(config, engine_loader(config)))


Started = Future[tuple[asyncio.AbstractEventLoop, Server]]


def start_in_thread(config: ServerConfig) -> tuple[str, Callable[[], None]]:
    """Serve in a thread of this process, for what runs in this one. Returns when the model is loaded.

    Returns: the server's URL, and what stops it and waits for its end.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import uvloop

    started: Started = Future()
    # daemon: Ctrl-C while it loads must not have to wait for it
    thread = threading.Thread(
        target=lambda: uvloop.run(_serve_until_stopped(config, started)), name="loop", daemon=True
    )
    thread.start()
    loop, server = started.result()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: a broken engine has ended the server already
            loop.call_soon_threadsafe(server.stop, 0.0)
        thread.join()

    return base_url(config.host, server.listener.port), stop


async def _serve_until_stopped(config: ServerConfig, started: Started) -> None:
    """Tells `started` of the server, or of why there is none."""
    try:
        server = Server(config, engine_loader(config), lambda lines: None)
        await server.start()
        try:
            await server.wait_ready()
        except Exception:
            await server.wait_stopped()  # it has stopped itself: leave no socket behind
            raise
    except Exception as error:
        started.set_exception(error)
        return
    started.set_result((asyncio.get_running_loop(), server))
    await server.wait_stopped()


def model_path(config: ServerConfig, is_offline: bool = False) -> Path:
    """The directory or GGUF file to serve, fetched where it is on a hub and not yet here.

    Args:
        is_offline: fetch nothing.

    Raises:
        StartupError: see server.hub.fetch.
    """
    if isinstance(config.model, HubId):
        with byte_progress(sys.stderr, f"fetching {config.model}", MIN_FETCHED_BYTES) as report_bytes:
            return fetch(environment_hub(is_offline), config.model, report_bytes)
    return config.model or DEMO_DIRECTORY


def engine_loader(config: ServerConfig) -> LoadEngine:
    """What the engine thread runs first: files, weights, KV cache, scheduler."""

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        report_stage("finding the model's files")
        path = model_path(config)
        report_stage("reading the model's files")
        files = read_model_files(path, config.max_model_len, config.chat_template)
        model = parse_model_config(files.config)
        report_stage("importing torch")
        from gpu.runner import load_runner

        report_stage("loading weights")
        with byte_progress(sys.stderr, "loading weights", MIN_LOADED_BYTES) as report_bytes:
            runner = load_runner(files.path, model, config.to_engine_config(), report_bytes)
        scheduler = Scheduler(runner.limits, files.eos_ids, lambda: random.SystemRandom().getrandbits(64))
        memory = runner.memory
        facts = EngineFacts(
            model_name=served_name(config),
            is_demonstration=config.model is None,
            num_parameters=memory.num_parameters,
            dtype=memory.device.dtype_name,
            device=str(memory.device.device),
            device_reason=memory.device.device_reason,
            kv_size_bytes=memory.kv_bytes,
            context_origin=config.context_origin,
            limits=runner.limits,
        )
        return LoadedEngine(Engine(scheduler, runner, time.monotonic, inbox, deliver), files, facts)

    return load


def served_name(config: ServerConfig) -> str:
    if config.served_model_name is not None:
        return config.served_model_name
    match config.model:
        case None:
            return DEMO_NAME
        case HubId(repo=repo):
            return repo
        case path:
            return path.stem if is_gguf(path) else path.resolve().name


if __name__ == "__main__":
    from server.cli import main

    sys.exit(main())
