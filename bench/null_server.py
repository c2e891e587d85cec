"""The real server around a model that computes nothing: `python -m bench.null_server --port N [--step-rate R]`.

Only the model is a stand-in. Unpaced, a step comes as soon as the event loop has delivered the last one (the engine
thread waits for it: engine_thread.MAX_DELIVERIES), so every token is a write of its own. --random serves a model with
random weights made on the device instead. Listens on loopback only.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from bench.kit import MODEL, PIECES
from core.chat_template import ChatTemplate
from core.config import EngineConfig
from core.engine import Engine
from core.plan import Int32Array, Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.tokenizer import Tokenizer
from core.types import StepDelivery
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import EngineFacts, LoadedEngine
from server.model_files import ModelFiles, read_model_files
from server.observing.logs import configure_logging
from server.process import serve

MAX_MODEL_LEN = 16_384
NUM_TOKENS = 256 * 1_024  # that many streams of that many tokens fit at once
LIMITS = RunnerLimits(
    num_blocks=NUM_TOKENS // 16,
    block_size=16,
    max_sequences=256,
    max_batch_tokens=4_096,
    max_model_len=MAX_MODEL_LEN,
    vocab_size=256 + len(PIECES),
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

Deliver = Callable[[StepDelivery], None]
Report = Callable[[str], None]


class Pace:
    """Steps at a steady rate, `interval_s` apart at least; a late step is not made up for."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_step_s = 0.0

    def wait(self) -> None:
        """Sleep until the next step is due."""
        now_s = time.monotonic()
        time.sleep(max(0.0, self._next_step_s - now_s))
        self._next_step_s = max(self._next_step_s, now_s) + self._interval_s


class NullRunner:
    """Samples the given ids in turn, by position: the same prompt length gives the same tokens. Thread: engine.

    Args:
        token_ids: none of them may end a sequence.
        wait_step: called for each step, returns when it is done.
    """

    def __init__(
        self, limits: RunnerLimits, token_ids: Sequence[int], wait_step: Callable[[], None] = lambda: None
    ) -> None:
        self.limits = limits
        self._token_ids = np.asarray(token_ids, dtype=np.int32)
        self._wait_step = wait_step

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, ticket: StepPlan, masks: Int32Array | None = None) -> None:
        """Nothing to start."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._wait_step()
        rows = ticket.samples.nonzero()[0].astype(np.int32)
        positions = ticket.starts[rows] + ticket.lengths[rows]
        return StepOutput(rows, self._token_ids[positions % len(self._token_ids)])


def null_tokenizer() -> Tokenizer:
    """Bytes for prompts; PIECES, which no merge makes, for answers."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {piece.replace(" ", "Ġ"): len(vocab) + i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend.to_str())


def load(wait_step: Callable[[], None], inbox: Inbox, deliver: Deliver, report_stage: Report) -> LoadedEngine:
    """An engine that computes nothing; `wait_step` returns when a step is done."""
    report_stage("making the null model")
    template = ChatTemplate({"default": TEMPLATE}, {}, MAX_MODEL_LEN)
    files = ModelFiles(Path(), {}, null_tokenizer(), template, {}, ())
    scheduler = Scheduler(LIMITS, (), seeds=lambda: 0)
    return _engine(scheduler, NullRunner(LIMITS, range(256, LIMITS.vocab_size), wait_step), files, inbox, deliver)


def load_random(
    config: dict[str, Any], engine: EngineConfig, inbox: Inbox, deliver: Deliver, _: Report
) -> LoadedEngine:
    """An engine over a model with this config.json and random weights, whose answers repeat themselves: no drafts."""
    from bench.engine import random_runner
    from bench.make_model import make_model_files

    with tempfile.TemporaryDirectory() as scratch:
        make_model_files(config, Path(scratch))
        files = read_model_files(Path(scratch), engine.max_model_len)
    runner = random_runner(files.config, engine)
    scheduler = Scheduler(
        runner.limits, files.eos_ids, lambda: 0, engine.has_prefix_cache, engine.inter_token_target, speculates=False
    )
    return _engine(scheduler, runner, files, inbox, deliver)


def _engine(
    scheduler: Scheduler, runner: Runner[Any], files: ModelFiles, inbox: Inbox, deliver: Deliver
) -> LoadedEngine:
    facts = EngineFacts(  # nobody reads this banner
        model_name=MODEL,
        is_demonstration=False,
        num_parameters=0,
        dtype="",
        device="none",
        device_reason="bench",
        kv_size_bytes=0,
        context_origin="the model's own",
        limits=runner.limits,
    )
    return LoadedEngine(Engine(scheduler, runner, time.monotonic, inbox, deliver), files, facts, scheduler.stats())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.null_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-rate", type=float, default=0.0, help="steps/s; 0: as fast as it goes")
    parser.add_argument("--random", type=json.loads, metavar="JSON", help="config.json of a model with random weights")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="of --random: EngineConfig")
    arguments = parser.parse_args()
    configure_logging("warning", "text")
    wait_step = Pace(1 / arguments.step_rate).wait if arguments.step_rate else lambda: None

    def start(inbox: Inbox, deliver: Deliver, stage: Report) -> LoadedEngine:
        if arguments.random is not None:
            return load_random(arguments.random, EngineConfig(**arguments.engine), inbox, deliver, stage)
        return load(wait_step, inbox, deliver, stage)

    return uvloop.run(serve(ServerConfig(port=arguments.port, drain_timeout_s=0.0), start))


if __name__ == "__main__":
    sys.exit(main())
