"""The process from its first line to its last, and the wiring: where the server meets the engine that gpu/ computes.

Also `python -m server`. Imported before anything is known of the command: whatever is heavy, each function imports.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from concurrent.futures import Future

    from core.errors import ExitCode, StartupError
    from core.plan import Runner
    from core.types import StepDelivery
    from server.config import ServerConfig
    from server.engine_thread import Inbox
    from server.loaded_engine import LoadEngine
    from server.process import Server

    Started = Future[tuple[asyncio.AbstractEventLoop, Server]]

REFUSED_MEMORY = (
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "bad_alloc",
)
MIN_ADDRESS_SPACE_BYTES = 1024**3  # torch and the embedded model map 0.7 GB
INTERRUPTED = 130  # as shells report SIGINT
DEMO_DIRECTORY = Path(__file__).parent.parent / "gpu" / "demo" / "model"
DEMO_NAME = "steploop-demo"


def run_process() -> NoReturn:
    """The `steploop` command: run what was typed, and end the process with its exit code.

    Until a command takes Ctrl-C for itself, it ends the process on the spot: a KeyboardInterrupt in the middle of an
    import may be swallowed there, or shown with a traceback.
    """
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    _open_standard_streams()
    from server.cli import main

    try:
        exit_code = main()
    except KeyboardInterrupt:  # while main() was already returning
        exit_code = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_process(exit_code)


def _open_standard_streams() -> None:
    """Those that are closed (`2>&-`) lead nowhere: no file of ours gets their number, and what is said there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def end_process(exit_code: int) -> NoReturn:
    """Leave, also when threads are still at work: the interpreter's own end under a thread in torch's C++ aborts.

    A group of ranks has such threads that are not Python's, and to leave it may mean to wait for one that is lost.
    """
    import threading

    ranks = sys.modules.get("gpu.parallel.ranks")
    if threading.active_count() == 1 and (ranks is None or not ranks.is_member()):
        sys.exit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def run_server(config: "ServerConfig", read_config: "Callable[[], ServerConfig]") -> "ExitCode":
    """Serve until told to stop.

    Args:
        read_config: the configuration as it is now, for SIGHUP.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import faulthandler

    import uvloop

    from gpu import limit_arenas
    from server.process import serve

    limit_arenas()
    faulthandler.enable(_unblocking(sys.stderr))  # a watchdog ends what hangs by SIGABRT: the log has the stacks
    return uvloop.run(serve(config, engine_loader(config), read_config))


def _unblocking(stream: TextIO) -> int | TextIO:
    """The same file, to write to without a wait for its reader; the stream where that cannot be had."""
    try:
        return os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # a socket's: journald's, which reads
        return stream


def start_in_thread(config: "ServerConfig") -> "tuple[str, Callable[[], None]]":
    """Serve in a thread of this process, for what runs in this one: no ledger. Returns when the model is loaded.

    Returns: the server's URL, and what stops it and waits for its end.

    Raises:
        StartupError: what is wrong, and what to do.
    """
    import contextlib
    import threading
    from concurrent.futures import Future
    from dataclasses import replace

    import uvloop

    from server.banner import base_url

    started: Started = Future()
    config = replace(config, ledger=None)  # a server's own may be open beside it
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


async def _serve_until_stopped(config: "ServerConfig", started: "Started") -> None:
    """Tells `started` of the server, or of why there is none."""
    import asyncio

    from server.process import Server

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


def _progress_stream() -> TextIO:
    """A terminal's bar, or a server's log; without one, stderr."""
    import logging

    from server.observing.logs import LoggedLines, LogHandler

    is_logged = any(isinstance(handler, LogHandler) for handler in logging.getLogger().handlers)
    return (
        cast(TextIO, LoggedLines(logging.getLogger(__name__))) if is_logged and not sys.stderr.isatty() else sys.stderr
    )


def model_path(config: "ServerConfig", fetches: bool = True) -> Path:
    """The directory or GGUF file to serve, fetched where it is on a hub and not yet here.

    Args:
        fetches: else it is an error that it is not here.

    Raises:
        StartupError: see server.commands.hub.fetch, and cached of hub_cache.
    """
    from server.commands.hub import fetch
    from server.commands.hub_cache import cached, environment_hub
    from server.commands.progress import MIN_FETCHED_BYTES, byte_progress
    from server.values import HubId

    if isinstance(config.model, HubId):
        if not fetches:
            return cached(environment_hub(), config.model)
        with byte_progress(_progress_stream(), f"fetching {config.model}", MIN_FETCHED_BYTES) as report_bytes:
            return fetch(environment_hub(), config.model, report_bytes)
    return config.model or DEMO_DIRECTORY


def check_address_space() -> None:
    """Before torch is imported, which would abort.

    Raises:
        StartupError: ulimit -v leaves too little for it.
    """
    import resource

    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < MIN_ADDRESS_SPACE_BYTES:
        raise _too_little_address_space(limit_bytes, f"torch needs {MIN_ADDRESS_SPACE_BYTES // 1024} KiB")


def as_memory_error(error: BaseException) -> "StartupError | None":
    """What ulimit -v has refused, in the words of the loader, torch or the interpreter; None: it was not that."""
    import resource

    from core.errors import StartupError

    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_refused = isinstance(error, MemoryError) or any(words in str(error) for words in REFUSED_MEMORY)
    if limit_bytes == resource.RLIM_INFINITY or isinstance(error, StartupError) or not is_refused:
        return None
    return _too_little_address_space(limit_bytes, str(error) or type(error).__name__)


def _too_little_address_space(limit_bytes: int, why: str) -> "StartupError":
    from core.errors import ExitCode, StartupError

    cause = f"The address space is limited to {limit_bytes // 1024} KiB (ulimit -v), which is too little: {why}"
    fix = "ulimit -v unlimited; to bound the memory, bound what is resident: MemoryMax= of a systemd unit, docker -m"
    return StartupError(cause, fix, ExitCode.MEMORY)


def engine_loader(config: "ServerConfig") -> "LoadEngine":
    """What the engine thread runs first: files, weights, KV cache, scheduler."""
    import random
    import time

    from core.engine import Engine
    from core.scheduler import Scheduler
    from server.commands.model_files import parse_config, read_model_files
    from server.commands.progress import MIN_LOADED_BYTES, byte_progress, count_progress
    from server.loaded_engine import EngineFacts, LoadedEngine

    def load(
        inbox: "Inbox", deliver: "Callable[[StepDelivery], None]", report_stage: "Callable[[str], None]"
    ) -> LoadedEngine:
        report_stage("finding the model's files")
        path = model_path(config)
        report_stage("reading the model's files")
        files = read_model_files(path, config.max_model_len, config.chat_template, config.allow_special_in_content)
        model = parse_config(path, files.config)
        report_stage("importing torch")
        check_address_space()
        from gpu.loading import load_runner
        from gpu.parallel.runner import ParallelRunner, load_parallel_runner
        from gpu.runner import ModelRunner

        engine = config.to_engine_config()
        report_stage("loading weights")
        runner: ModelRunner | ParallelRunner
        with (
            byte_progress(_progress_stream(), "loading weights", MIN_LOADED_BYTES) as report_bytes,
            count_progress(_progress_stream(), "capturing CUDA graphs") as report_graphs,
        ):
            if engine.tensor_parallel == 1:
                runner = load_runner(files.path, model, engine, report_bytes, report_graphs)
            else:
                runner = load_parallel_runner(files.path, model, engine, report_bytes)
        scheduler = Scheduler(
            runner.limits,
            files.eos_ids,
            seeds=lambda: random.SystemRandom().getrandbits(64),
            has_prefix_cache=engine.has_prefix_cache,
            inter_token_target=engine.inter_token_target,
            stored=() if runner.offload is None else runner.offload.stored,
        )
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
        check = runner.check if isinstance(runner, ParallelRunner) else None
        idle_work = runner.idle_work if isinstance(runner, ModelRunner) else None
        computing: Runner[Any] = runner
        loaded = Engine(scheduler, computing, time.monotonic, inbox, deliver, runner.offload, check, idle_work)
        return LoadedEngine(loaded, files, facts, scheduler.stats())

    def load_within_limits(
        inbox: "Inbox", deliver: "Callable[[StepDelivery], None]", report_stage: "Callable[[str], None]"
    ) -> LoadedEngine:
        try:
            return load(inbox, deliver, report_stage)
        except Exception as error:
            refused = as_memory_error(error)
            if refused is None:
                raise
            raise refused from error

    return load_within_limits


def served_name(config: "ServerConfig") -> str:
    from server.commands.model_files import is_gguf
    from server.values import HubId

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
    run_process()
