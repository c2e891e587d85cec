"""The real server over a model whose random weights are made on the device: `python -m bench.random_server llama-8b`.

All is as `steploop serve` has it, but for where the weights come from. Loopback alone.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

from bench.null_server import bench_facts
from bench.random_weights import random_runner, write_model_files
from core.config import EngineConfig
from core.engine import Engine
from core.errors import ExitCode
from core.scheduler import Scheduler
from core.types import StepDelivery
from server.commands.model_files import read_model_files
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from server.observing.logs import configure_logging
from server.process import serve


def load(
    config: Mapping[str, Any],
    engine: EngineConfig,
    inbox: Inbox,
    deliver: Callable[[StepDelivery], None],
    report_stage: Callable[[str], None],
) -> LoadedEngine:
    """As server.engine_loader.engine_loader, with random weights.

    Args:
        config: of config.json.
    """
    report_stage("making the weights")
    with tempfile.TemporaryDirectory() as scratch:
        runner = random_runner(write_model_files(config, Path(scratch)), engine)
        files = read_model_files(Path(scratch), engine.max_model_len)
    scheduler = Scheduler(
        runner.limits,
        files.eos_ids,
        seeds=lambda: 0,
        has_prefix_cache=engine.has_prefix_cache,
        inter_token_target=engine.inter_token_target,
    )
    loaded = Engine(scheduler, runner, time.monotonic, inbox, deliver)
    facts = bench_facts(runner.limits, str(runner.memory.device.device))
    return LoadedEngine(loaded, files, facts, scheduler.stats())


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.random_server", description=__doc__)
    parser.add_argument("--config", type=json.loads, required=True, metavar="JSON", help="of a config.json")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="fields of an EngineConfig")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    configure_logging("warning", "text")
    server, engine = ServerConfig(port=arguments.port, drain_timeout_s=0.0), EngineConfig(**arguments.engine)

    async def run() -> ExitCode:
        return await serve(server, lambda inbox, deliver, stage: load(arguments.config, engine, inbox, deliver, stage))

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
