"""The real server around a null runner: `python -m bench.null_server --port 8001`. What bench/frontend.py measures."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from bench.null_runner import NullRunner
from bench.peer import MODEL, PIECES, peer_arguments
from core.chat_template import ChatTemplate
from core.engine import Engine
from core.plan import RunnerLimits
from core.scheduler import Scheduler
from core.tokenizer import Tokenizer
from core.types import StepDelivery
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.logs import configure_logging
from server.model_files import GenerationDefaults, ModelFiles
from server.process import EngineFacts, LoadedEngine, serve

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


def load(
    step_rate: float, inbox: Inbox, deliver: Callable[[StepDelivery], None], report_stage: Callable[[str], None]
) -> LoadedEngine:
    """An engine that computes nothing."""
    report_stage("making the null model")
    runner = NullRunner(LIMITS, range(256, LIMITS.vocab_size), 1 / step_rate if step_rate else 0.0)
    files = ModelFiles(
        path=Path(),
        config={},
        tokenizer=null_tokenizer(),
        chat_template=ChatTemplate({"default": TEMPLATE}, {}, MAX_MODEL_LEN),
        defaults=GenerationDefaults(),
        eos_ids=(),
    )
    facts = EngineFacts(
        model_name=MODEL,
        is_demonstration=False,
        num_parameters=0,
        dtype="none",
        device="none",
        device_reason="a null runner",
        kv_size_bytes=0,
        context_origin="the null runner's",
        limits=LIMITS,
    )
    engine = Engine(Scheduler(LIMITS, (), lambda: 0), runner, time.monotonic, inbox, deliver)
    return LoadedEngine(engine, files, facts)


def main() -> int:
    arguments = peer_arguments(__doc__)
    configure_logging("warning", "text")
    config = ServerConfig(port=arguments.port, drain_timeout_s=0.0)
    return uvloop.run(serve(config, lambda inbox, deliver, stage: load(arguments.step_rate, inbox, deliver, stage)))


if __name__ == "__main__":
    sys.exit(main())
