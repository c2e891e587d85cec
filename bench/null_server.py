"""The real server around a null runner: `python -m bench.null_server --port 8001`. What bench/frontend.py measures.

Unpaced, steps come as fast as the loop tells their news, as the peers' do: the engine's thread waits for it
(engine_thread.MAX_DELIVERIES), and every token is a write of its own.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from bench.null_runner import NullRunner, Pace
from bench.peer import MODEL, PIECES, peer_arguments
from core.chat_template import ChatTemplate
from core.engine import Engine
from core.errors import ExitCode
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.tokenizer import Tokenizer
from core.types import StepDelivery
from server.commands.model_files import GenerationDefaults, ModelFiles
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import EngineFacts, LoadedEngine
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


def null_tokenizer() -> Tokenizer:
    """Bytes, and PIECES, which no merge makes: prompts are bytes, answers are pieces."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {piece.replace(" ", "Ġ"): len(vocab) + i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend.to_str())


def null_model(wait_step: Callable[[], None]) -> tuple[ModelFiles, NullRunner]:
    """What the server reads of a model, and what computes nothing for it; wait_step is called in every step."""
    template = ChatTemplate({"default": TEMPLATE}, {}, MAX_MODEL_LEN)
    files = ModelFiles(Path(), {}, null_tokenizer(), template, GenerationDefaults(), ())
    return files, NullRunner(LIMITS, range(256, LIMITS.vocab_size), wait_step)


def bench_facts(limits: RunnerLimits, device: str) -> EngineFacts:
    """Of a server that is measured: nobody reads its banner."""
    return EngineFacts(
        model_name=MODEL,
        is_demonstration=False,
        num_parameters=0,
        dtype="",
        device=device,
        device_reason="bench",
        kv_size_bytes=0,
        context_origin="the model's own",
        limits=limits,
    )


def load(
    step_rate: float,
    inbox: Inbox,
    deliver: Callable[[StepDelivery], None],
    report_stage: Callable[[str], None],
    wait_step: Callable[[], None] | None = None,
) -> LoadedEngine:
    """An engine that computes nothing.

    Args:
        wait_step: instead of step_rate: called for each step, returns when it is done.
    """
    report_stage("making the null model")
    if wait_step is None and step_rate:
        wait_step = Pace(1 / step_rate).wait
    files, runner = null_model(wait_step or (lambda: None))
    scheduler = Scheduler(LIMITS, (), lambda: 0)
    engine = Engine(scheduler, runner, time.monotonic, inbox, deliver)
    return LoadedEngine(engine, files, bench_facts(LIMITS, "none: a null runner"), scheduler.stats())


def main() -> int:
    arguments = peer_arguments(__doc__)
    configure_logging("warning", "text")
    config = ServerConfig(port=arguments.port, drain_timeout_s=0.0)

    async def run() -> ExitCode:
        return await serve(config, lambda inbox, deliver, stage: load(arguments.step_rate, inbox, deliver, stage))

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
