"""The real server, started by benches: `python -m bench.null_server --port N [--step-rate R] [--record FILE] ...`.

Around a null model everything is the server's own, and nothing is computed. Unpaced, steps come as fast as the loop
tells their news, as the peers' do: the engine's thread waits for it (engine_thread.MAX_DELIVERIES), and every token is
a write of its own. With --record the scheduler notes what it computes for whom, and when it lets go. --model computes a
model's steps instead, --random those of a model whose random weights are made on the device. Loopback alone.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
import uvloop
from tokenizers import decoders, models, pre_tokenizers

from bench.kit import MODEL, PIECES
from core.chat_template import ChatTemplate
from core.config import EngineConfig, parse_model_config
from core.engine import Engine
from core.plan import Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.tokenizer import Tokenizer
from core.types import FinishReason, Request, StepDelivery, TokenChunk
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


class Pace:
    """Steps at a steady rate. One that comes late is not made up for.

    Args:
        interval_s: from one step's tokens to the next one's, at least.
    """

    def __init__(
        self,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._next_step_s = 0.0

    def wait(self) -> None:
        """Sleep until the next step is due."""
        now_s = self._clock()
        if self._next_step_s > now_s:
            self._sleep(self._next_step_s - now_s)
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

    def sample(self, ticket: StepPlan) -> None:
        """Nothing to start."""

    def collect(self, ticket: StepPlan) -> StepOutput:
        self._wait_step()
        rows = ticket.samples.nonzero()[0].astype(np.int32)
        positions = ticket.starts[rows] + ticket.lengths[rows]
        return StepOutput(rows, self._token_ids[positions % len(self._token_ids)])


def null_tokenizer() -> Tokenizer:
    """Bytes, and PIECES, which no merge makes: prompts are bytes, answers are pieces."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {piece.replace(" ", "Ġ"): len(vocab) + i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend.to_str())


class StepRecord(msgspec.Struct, array_like=True):
    """One step, from its plan to its result; seconds of the monotonic clock."""

    begin_s: float
    end_s: float


class RowRecord(msgspec.Struct, array_like=True):
    """What one step computed for one request."""

    step: int  # index of its StepRecord
    num_tokens: int
    samples: bool  # a token was sampled


class RequestRecord(msgspec.Struct):
    """One request of one sequence, until what it held was given back."""

    rows: list[RowRecord] = []
    end_s: float = 0.0
    reason: str = ""
    num_kept: int = 0  # tokens that are billed


class EngineRecord(msgspec.Struct):
    """All that a server computed. `requests` by their seeds, which the client chooses."""

    steps: list[StepRecord] = []
    requests: dict[int, RequestRecord] = {}


class RecordingScheduler(Scheduler):
    """Writes down what it computes for whom, and when it lets go. Thread: engine."""

    def __init__(self, record: EngineRecord, limits: RunnerLimits, eos_ids: tuple[int, ...]) -> None:
        super().__init__(limits, eos_ids, seeds=lambda: 0)
        self._record = record
        self._seeds_by_id: dict[str, int] = {}

    def submit(self, request: Request) -> None:
        seed = request.sampling.seed
        if seed is not None:
            self._seeds_by_id[request.request_id] = seed
            self._record.requests[seed] = RequestRecord()
        super().submit(request)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            step = len(self._record.steps)
            self._record.steps.append(StepRecord(time.monotonic(), 0.0))
            sequences = self.in_flight[-1].sequences
            for sequence, length, samples in zip(sequences, plan.lengths, plan.samples, strict=True):
                seed = self._seeds_by_id.get(sequence.request_id)
                if seed is not None:
                    self._record.requests[seed].rows.append(RowRecord(step, int(length), bool(samples)))
        return plan

    def apply(self, plan: StepPlan, output: StepOutput, now: float) -> StepDelivery:
        self._record.steps[-1].end_s = time.monotonic()
        delivery = super().apply(plan, output, now)
        self._note_ends(delivery.chunks)
        return delivery

    def cancel(
        self, request_id: str, reason: FinishReason, index: int | None = None, num_tokens_kept: int | None = None
    ) -> None:
        super().cancel(request_id, reason, index, num_tokens_kept)
        self._note_ends(self.states.outbox.chunks)  # those that no step has to come back for

    def _note_ends(self, chunks: Iterable[TokenChunk]) -> None:
        """The news of these have just been made: what their sequences held has been given back."""
        for chunk in chunks:
            seed = self._seeds_by_id.get(chunk.request_id)
            if chunk.finish_reason is not None and seed is not None and not self._record.requests[seed].end_s:
                request = self._record.requests[seed]
                request.end_s, request.reason = time.monotonic(), chunk.finish_reason
                request.num_kept = chunk.num_sequence_tokens


Deliver = Callable[[StepDelivery], None]
Report = Callable[[str], None]


def load(
    step_rate: float,
    inbox: Inbox,
    deliver: Deliver,
    report_stage: Report,
    wait_step: Callable[[], None] | None = None,
    record: EngineRecord | None = None,
) -> LoadedEngine:
    """An engine that computes nothing.

    Args:
        wait_step: instead of step_rate: called for each step, returns when it is done.
    """
    report_stage("making the null model")
    if wait_step is None:
        wait_step = Pace(1 / step_rate).wait if step_rate else lambda: None
    template = ChatTemplate({"default": TEMPLATE}, {}, MAX_MODEL_LEN)
    files = ModelFiles(Path(), {}, null_tokenizer(), template, {}, ())
    return _engine(NullRunner(LIMITS, range(256, LIMITS.vocab_size), wait_step), files, inbox, deliver, record)


def _engine(
    runner: Runner[Any],
    files: ModelFiles,
    inbox: Inbox,
    deliver: Deliver,
    record: EngineRecord | None = None,
    config: EngineConfig | None = None,
) -> LoadedEngine:
    if record is not None:
        scheduler: Scheduler = RecordingScheduler(record, runner.limits, files.eos_ids)
    elif config is None:
        scheduler = Scheduler(runner.limits, files.eos_ids, seeds=lambda: 0)
    else:
        scheduler = Scheduler(
            runner.limits, files.eos_ids, lambda: 0, config.has_prefix_cache, config.inter_token_target
        )
    facts = EngineFacts(  # nobody reads its banner
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


def _load_model(path: Path, record: EngineRecord | None, inbox: Inbox, deliver: Deliver, _: Report) -> LoadedEngine:
    from gpu.loading import load_runner

    files = read_model_files(path, None, None)
    config = parse_model_config(files.config)
    return _engine(load_runner(files.path, config, EngineConfig(), lambda *_: None), files, inbox, deliver, record)


def _load_random(
    config: dict[str, Any], engine: EngineConfig, inbox: Inbox, deliver: Deliver, _: Report
) -> LoadedEngine:
    from bench.make_model import make_model_files
    from bench.stepped import random_runner

    with tempfile.TemporaryDirectory() as scratch:
        make_model_files(config, Path(scratch))
        files = read_model_files(Path(scratch), engine.max_model_len)
    return _engine(random_runner(files.config, engine), files, inbox, deliver, config=engine)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.null_server", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-rate", type=float, default=0.0, help="steps/s; 0: as fast as it goes")
    parser.add_argument("--record", type=Path, metavar="FILE", help="as MessagePack, written at the end")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--random", type=json.loads, metavar="JSON", help="of a config.json")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="of --random: EngineConfig")
    arguments = parser.parse_args()
    configure_logging("warning", "text")
    record = None if arguments.record is None else EngineRecord()

    def start(inbox: Inbox, deliver: Deliver, stage: Report) -> LoadedEngine:
        if arguments.model is not None:
            return _load_model(arguments.model, record, inbox, deliver, stage)
        if arguments.random is not None:
            return _load_random(arguments.random, EngineConfig(**arguments.engine), inbox, deliver, stage)
        return load(arguments.step_rate, inbox, deliver, stage, record=record)

    code = uvloop.run(serve(ServerConfig(port=arguments.port, drain_timeout_s=0.0), start))
    if record is not None:
        arguments.record.write_bytes(msgspec.msgpack.encode(record))
    return code


if __name__ == "__main__":
    sys.exit(main())
