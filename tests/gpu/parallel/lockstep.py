"""All ranks of a model in one process, each step of them in threads: what they add up is added in the ranks' order."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config import EngineConfig
from core.config_json import parse_model_config
from core.plan import Int32Array, StepOutput, StepPlan
from gpu.loading import load_planned
from gpu.parallel.ranks import Ranks
from gpu.parallel.runner import find_room, plan_rank
from gpu.runner import ModelRunner, StepTicket
from tests.gpu.conftest import ENGINE, no_progress
from tests.oracle import read_config


class Meeting:
    """Where the threads of a step wait for each other."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.parts: list[Any] = [None] * num_ranks
        self.num_sums = 0

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """Everybody's part."""
        self.parts[rank] = part.clone()
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()  # before the next call overwrites them
        return found


class ThreadRanks(Ranks):
    """In the place of a process group."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.num_ranks, self._meeting = rank, meeting.num_ranks, meeting

    def sum(self, x: Tensor) -> Tensor:
        self._meeting.num_sums += self.rank == 0
        return x.copy_(torch.stack(self._meeting.exchange(self.rank, x)).sum(0))

    def share(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x)[0])

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        parts = self._meeting.exchange(self.rank, x)
        return torch.zeros(len(x), num_columns) if self.rank else torch.cat(parts, 1)


class Lockstep:
    """Implements core.plan.Runner over the ranks of a directory's model."""

    def __init__(self, directory: Path, num_ranks: int, engine: EngineConfig = ENGINE) -> None:
        engine = replace(engine, tensor_parallel=num_ranks)
        model = parse_model_config(read_config(directory))
        self.meeting = Meeting(num_ranks)
        self.runners: list[ModelRunner] = []
        for rank in range(num_ranks):
            room = find_room(directory, model, engine, rank)
            ranks, memory = ThreadRanks(rank, self.meeting), plan_rank(room, 1 << 30)
            self.runners.append(load_planned(room.checkpoint, model, engine, memory, no_progress, room.shard, ranks))
        self.limits = self.runners[0].limits
        self._threads = ThreadPoolExecutor(num_ranks)
        self._others: list[StepTicket] = []  # of the step that was sent last

    def forward(self, plan: StepPlan) -> StepTicket:
        def step(runner: ModelRunner) -> StepTicket:
            try:
                return runner.forward(plan)
            except BaseException:
                self.meeting.barrier.abort()
                raise

        first, *self._others = self._threads.map(step, self.runners)
        return first

    def sample(self, ticket: StepTicket, masks: Int32Array | None = None) -> None:
        list(self._threads.map(ModelRunner.sample, self.runners, [ticket, *self._others], repeat(masks)))

    def collect(self, ticket: StepTicket) -> StepOutput:
        return self.runners[0].collect(ticket)
