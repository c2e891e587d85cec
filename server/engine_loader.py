"""The wiring: settings → the model's files, weights, KV cache and scheduler, as the engine thread loads them.

Here the server meets the engine that gpu/ computes; torch is imported on the engine thread, once the port listens.
"""

import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from core.config import ModelConfig
from core.engine import Engine
from core.plan import Runner
from core.scheduler import Scheduler
from core.types import StepDelivery
from server.commands.console import MIN_FETCHED_BYTES, MIN_LOADED_BYTES, byte_progress, count_progress
from server.commands.hub import cached, environment_hub, fetch
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import EngineFacts, LoadedEngine, LoadEngine
from server.memory_limits import as_memory_error, check_address_space
from server.model_files import ModelFiles, is_gguf, parse_config, read_model_files
from server.observing.logs import LoggedLines, LogHandler
from server.values import HubId

if TYPE_CHECKING:
    from gpu.parallel.runner import ParallelRunner
    from gpu.runner import ModelRunner

DEMO_DIRECTORY = Path(__file__).parent.parent / "gpu" / "demo" / "model"
DEMO_NAME = "steploop-demo"


def engine_loader(config: ServerConfig) -> LoadEngine:
    """What the engine thread runs first."""

    def load(
        inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
    ) -> LoadedEngine:
        try:
            return _load(config, inbox, deliver, report_stage)
        except Exception as error:
            refused = as_memory_error(error)
            if refused is None:
                raise
            raise refused from error

    return load


def _load(
    config: ServerConfig, inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
) -> LoadedEngine:
    report_stage("finding the model's files")
    path = model_path(config)
    report_stage("reading the model's files")
    files = read_model_files(path, config.max_model_len, config.chat_template, config.allow_special_in_content)
    model = parse_config(path, files.config)
    report_stage("importing torch")
    check_address_space()
    from gpu.parallel.runner import ParallelRunner

    report_stage("loading weights")
    engine = config.to_engine_config()
    runner = _load_runner(config, files, model)
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
    idle_work = None if isinstance(runner, ParallelRunner) else runner.idle_work
    computing: Runner[Any] = runner
    loaded = Engine(scheduler, computing, time.monotonic, inbox, deliver, runner.offload, check, idle_work)
    return LoadedEngine(loaded, files, facts, scheduler.stats())


def _load_runner(config: ServerConfig, files: ModelFiles, model: ModelConfig) -> "ModelRunner | ParallelRunner":
    from gpu.loading import load_runner
    from gpu.parallel.runner import load_parallel_runner

    engine = config.to_engine_config()
    with (
        byte_progress(_progress_stream(), "loading weights", MIN_LOADED_BYTES) as report_bytes,
        count_progress(_progress_stream(), "capturing CUDA graphs") as report_graphs,
    ):
        if engine.tensor_parallel == 1:
            return load_runner(files.path, model, engine, report_bytes, report_graphs)
        return load_parallel_runner(files.path, model, engine, report_bytes)


def model_path(config: ServerConfig, fetches: bool = True) -> Path:
    """The directory or GGUF file to serve, fetched where it is on a hub and not yet here.

    Args:
        fetches: else it is an error that it is not here.

    Raises:
        StartupError: see fetch and cached in server/commands/hub.py.
    """
    if isinstance(config.model, HubId):
        if not fetches:
            return cached(environment_hub(), config.model)
        with byte_progress(_progress_stream(), f"fetching {config.model}", MIN_FETCHED_BYTES) as report_bytes:
            return fetch(environment_hub(), config.model, report_bytes)
    return config.model or DEMO_DIRECTORY


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


def _progress_stream() -> TextIO:
    """A terminal's bar, or a server's log; without one, stderr."""
    is_logged = any(isinstance(handler, LogHandler) for handler in logging.getLogger().handlers)
    return (
        cast(TextIO, LoggedLines(logging.getLogger(__name__))) if is_logged and not sys.stderr.isatty() else sys.stderr
    )
