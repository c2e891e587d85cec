"""Computes steps on several devices: the Runner of core.plan, over ranks that are processes. Thread: engine.

This process is rank 0: it has the scheduler, draws all tokens and tells the others each plan, once a step and before
its own part of it. They need no tokens drawn: a plan that is made once the last step's are known has them all, so no
step is sent before they are (--overlap off), and none by a graph: one rank's might have to be sent without.

A step that raises here is no longer the same step everywhere: unlike on one device it breaks the engine.
"""

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from core.config import EngineConfig, ModelConfig
from core.plan import DeviceError, StepOutput, StepPlan
from gpu.checkpoint import Progress
from gpu.loading import time_rows, warm_up
from gpu.parallel.followers import Followers
from gpu.parallel.loading import find_room, least_room, load_rank
from gpu.parallel.messages import Job, Load, Step
from gpu.runner import ModelRunner, StepTicket


@dataclass(slots=True)
class ParallelTicket:
    """A step on its way on all ranks."""

    plan: StepPlan
    own: StepTicket


class ParallelRunner:
    """All ranks of a model.

    Args:
        runner: this rank's.
    """

    offload = None

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._broken_slots: list[int] = []  # that the others have not heard of
        self.limits = runner.limits
        self.memory = runner.memory

    def forward(self, plan: StepPlan) -> ParallelTicket:
        """
        Raises:
            DeviceError: a rank is lost, or this one's step has failed.
        """
        step = Step(plan, tuple(self._broken_slots))
        self._broken_slots.clear()
        self._followers.tell(lambda rank: step)
        try:
            return ParallelTicket(plan, self._runner.forward(plan))
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(f"rank 0 has left a step that the others compute: {error!r}") from error

    def sample(self, ticket: ParallelTicket) -> None:
        self._runner.sample(ticket.own)

    def collect(self, ticket: ParallelTicket) -> StepOutput:
        output = self._runner.collect(ticket.own)
        self._broken_slots += [int(ticket.plan.slots[row]) for row in output.failed_rows]
        return output

    @property
    def processes(self) -> "list[subprocess.Popen[bytes]]":
        """Of the other ranks, in their order."""
        return self._followers.processes

    def end(self) -> None:
        """End the other ranks; they end with this process, too."""
        self._followers.end()

    def check(self) -> None:
        """
        Raises:
            DeviceError: a rank is lost.
        """
        self._followers.check()


def load_parallel_runner(path: Path, model: ModelConfig, engine: EngineConfig, progress: Progress) -> ParallelRunner:
    """Start the other ranks, and load the model on all of them; see gpu.loading.load_runner.

    Args:
        engine: tensor_parallel: ranks, at least two.

    Raises:
        StartupError: see load_runner; any rank's.
        DeviceError: a rank is lost.
    """
    room = find_room(path, model, engine, rank=0)
    meeting = os.memfd_create("ranks")
    followers = Followers(engine.tensor_parallel, meeting)
    try:
        followers.tell(lambda rank: Job(rank, str(path), model, room.engine, meeting))
        found = [room.free_bytes, *(answer.free_bytes for answer in followers.answers())]
        free_bytes = least_room(room.choice, found)
        followers.tell(lambda rank: Load(free_bytes))
        own = load_rank(room, free_bytes, meeting, progress)
        followers.answers()
        runner = ParallelRunner(own, followers)
        warm_up(runner)
        runner.limits = replace(runner.limits, timed_rows=time_rows(runner))
    except BaseException:
        followers.end()
        raise
    return runner
