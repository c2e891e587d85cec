"""The real server with a scheduler that writes down what it computes for whom, and when it lets go: `python -m
bench.recorded_server --port 8001 --record FILE`. What bench/cancel.py measures.

Requests are known by their seeds, which the client chooses. The record is written when the server is told to stop.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.null_runner import Pace
from bench.null_server import bench_facts, null_model
from core.config import EngineConfig, parse_model_config
from core.engine import Engine
from core.plan import Runner, RunnerLimits, StepOutput, StepPlan
from core.scheduler import Scheduler
from core.types import FinishReason, Request, StepDelivery, TokenChunk
from server.commands.model_files import ModelFiles, read_model_files
from server.config import ServerConfig
from server.engine_thread import Inbox
from server.loaded_engine import LoadedEngine
from server.observing.logs import configure_logging
from server.process import serve


class StepRecord(msgspec.Struct, array_like=True):
    """One step, from its plan to its result; seconds of the monotonic clock."""

    begin_s: float
    end_s: float


class RowRecord(msgspec.Struct, array_like=True):
    """What one step computed for one request."""

    step: int  # index of its StepRecord
    num_tokens: int
    draws: bool  # a token was drawn


class RequestRecord(msgspec.Struct):
    """One request of one sequence, until what it held was given back."""

    rows: list[RowRecord] = []
    end_s: float = 0.0
    reason: str = ""
    num_kept: int = 0  # tokens that are billed


class EngineRecord(msgspec.Struct):
    """All that a server computed. `requests` by their seeds."""

    steps: list[StepRecord] = []
    requests: dict[int, RequestRecord] = {}


class RecordingScheduler(Scheduler):
    """Thread: engine."""

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
            for sequence, length, draws in zip(sequences, plan.lengths, plan.samples, strict=True):
                seed = self._seeds_by_id.get(sequence.request_id)
                if seed is not None:
                    self._record.requests[seed].rows.append(RowRecord(step, int(length), bool(draws)))
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


def load(
    model: Path | None,
    step_rate: float,
    record: EngineRecord,
    inbox: Inbox,
    deliver: Callable[[StepDelivery], None],
    report_stage: Callable[[str], None],
) -> LoadedEngine:
    """An engine that keeps the record; without a model it computes nothing."""
    report_stage("loading")
    runner: Runner[Any]
    if model is None:
        files, runner = null_model(Pace(1 / step_rate).wait if step_rate else lambda: None)
    else:
        files, runner = _real_model(model)
    scheduler = RecordingScheduler(record, runner.limits, files.eos_ids)
    engine = Engine(scheduler, runner, time.monotonic, inbox, deliver)
    return LoadedEngine(engine, files, bench_facts(runner.limits, "recorded"), scheduler.stats())


def _real_model(path: Path) -> tuple[ModelFiles, Runner[Any]]:
    from gpu.loading import load_runner

    files = read_model_files(path, None, None)
    return files, load_runner(files.path, parse_model_config(files.config), EngineConfig(), lambda done, total: None)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True, help="where the record goes, as MessagePack")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; default: a null runner")
    parser.add_argument(
        "--step-rate", type=float, default=100.0, help="steps/s of the null runner; 0: as fast as it goes"
    )
    arguments = parser.parse_args(argv)
    configure_logging("warning", "text")
    record = EngineRecord()
    config = ServerConfig(port=arguments.port, drain_timeout_s=0.0)
    exit_code = uvloop.run(serve(config, lambda *engine: load(arguments.model, arguments.step_rate, record, *engine)))
    arguments.record.write_bytes(msgspec.msgpack.encode(record))
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
