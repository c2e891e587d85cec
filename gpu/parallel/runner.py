"""Computes steps on several devices: the Runner of core.plan, over ranks that are processes. Thread: engine.

This process is rank 0: it has the scheduler, samples all tokens and tells the others each plan, once a step and before
its own part of it. Where steps overlap, it shares the tokens that slots sampled last behind each step, on the devices:
the next plan asks for them before the host has read them. No step is sent by a graph: where one rank could not capture
a shape that another replays, they would wait for each other for ever.

A step that raises here is no longer the same step everywhere: unlike on one device it breaks the engine. The other
ranks end with this process (the kernel kills them, and their pipes end); one that ends before is a device that is lost.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import DeviceUnavailable, ExitCode, StartupError
from core.plan import DeviceError, StepOutput, StepPlan
from gpu.checkpoint import Checkpoint, Progress, open_checkpoint
from gpu.device import DeviceChoice, choose_device, free_memory_bytes
from gpu.linear import can_gather, can_pack
from gpu.loading import load_planned, time_rows, warm_up
from gpu.memory_plan import MemoryPlan, plan_memory, weights_size_bytes
from gpu.parallel.messages import Answer, Job, Load, Step, read_message, write_message
from gpu.parallel.ranks import Ranks, Shard, check_shards, head_rows_of, part_of
from gpu.runner import ModelRunner, StepTicket
from gpu.weights import check_checkpoint, prequantized_scheme

ROOT = Path(__file__).parent.parent.parent
END_S = 5.0  # for a process to end by itself


class Followers:
    """Ranks 1 to num_ranks - 1.

    Args:
        meeting: a descriptor that they get too, with the same number.
    """

    def __init__(self, num_ranks: int, meeting: int) -> None:
        # not the settings: there may be keys among them, and a rank is told what it needs
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STEPLOOP_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "gpu.parallel.follower"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[meeting],
                env={**inherited, "PYTHONPATH": path},
            )
            for _ in range(1, num_ranks)
        ]

    def tell(self, order_of: Callable[[int], Job | Load | Step]) -> None:
        """
        Args:
            order_of: rank -> what it is told.

        Raises:
            DeviceError: a rank is lost.
        """
        for rank, process in self._ranks():
            assert process.stdin is not None
            try:
                write_message(process.stdin, order_of(rank))
            except OSError as error:
                raise DeviceError(f"{self._end_of(rank, process)}") from error

    def answers(self) -> list[Answer]:
        """What each has to say, in the order of ranks.

        Raises:
            StartupError: one has refused, or ended.
        """
        found = []
        for rank, process in self._ranks():
            assert process.stdout is not None
            answer = read_message(process.stdout, Answer)
            if answer is None:
                cause = f"{self._end_of(rank, process)} while it was loading."
                raise StartupError(cause, "see what it has logged above, or --tensor-parallel 1.", ExitCode.DEVICE)
            if answer.refusal is not None:
                refusal = answer.refusal
                raise StartupError(f"Rank {rank}: {refusal.cause}", refusal.fix, refusal.exit_code)
            found.append(answer)
        return found

    def check(self) -> None:
        """
        Raises:
            DeviceError: one has ended.
        """
        for rank, process in self._ranks():
            if process.poll() is not None:
                raise DeviceError(self._end_of(rank, process))

    def end(self) -> None:
        """Have them end, and wait for it."""
        for _, process in self._ranks():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not read any more
                    pipe.close()

    def _ranks(self) -> "list[tuple[int, subprocess.Popen[bytes]]]":
        return list(enumerate(self.processes, start=1))

    def _end_of(self, rank: int, process: "subprocess.Popen[bytes]") -> str:
        """How it has ended, which its pipes may tell a moment before."""
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            return f"Rank {rank} (process {process.pid}) listens no more"
        return f"Rank {rank} (process {process.pid}) has ended by {f'signal {-code}' if code < 0 else f'code {code}'}"


@dataclass(frozen=True, slots=True)
class Room:
    """A rank's device before anything is loaded.

    Args:
        free_bytes: on it; on CPUs, which share their memory, of all ranks together.
    """

    shard: Shard
    engine: EngineConfig
    choice: DeviceChoice
    checkpoint: Checkpoint
    free_bytes: int


def find_room(path: Path, model: ModelConfig, engine: EngineConfig, rank: int) -> Room:
    """
    Raises:
        StartupError: the model, its files or the devices are not for so many ranks.
    """
    num_ranks = engine.tensor_parallel
    engine = replace(engine, graphs="off")  # see this file's beginning
    chosen = choose_device(engine)
    check_shards(model, num_ranks, prequantized_scheme(model, engine.quantize, chosen.device) is not None)
    choice = rank_choice(chosen, engine, rank)
    checkpoint = open_checkpoint(path, model.packing)
    model = check_checkpoint(checkpoint, model)
    return Room(Shard(model, rank, num_ranks), engine, choice, checkpoint, free_memory_bytes(choice.device))


def rank_choice(choice: DeviceChoice, engine: EngineConfig, rank: int) -> DeviceChoice:
    """A rank's own GPU, or its part of the CPU's threads.

    Raises:
        DeviceUnavailable: there are fewer GPUs than ranks.
    """
    num_ranks = engine.tensor_parallel
    reason = f"{choice.device_reason}; {num_ranks} ranks, of which each has what is told here"
    if choice.device.type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_devices < num_ranks:
            cause = f"--tensor-parallel {num_ranks}: {num_devices} CUDA devices were found."
            raise DeviceUnavailable(cause, f"--tensor-parallel {num_devices}, or less.")
        return replace(choice, device=torch.device("cuda", rank), device_reason=reason)
    threads = choice.threads if choice.are_threads_asked else max(1, choice.threads // num_ranks)
    return replace(choice, device_reason=reason, threads=threads, are_threads_asked=True)


def least_room(choice: DeviceChoice, free_bytes: list[int]) -> int:
    """What every rank has, of what each has found."""
    return min(free_bytes) // (len(free_bytes) if choice.device.type == "cpu" else 1)


def estimate_ranks(path: Path, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """The memory of each rank, by the first one's device; reads headers only. See gpu.memory_plan.estimate."""
    room = find_room(path, model, engine, rank=0)
    return plan_rank(room, least_room(room.choice, [room.free_bytes] * engine.tensor_parallel))


def plan_rank(room: Room, free_bytes: int) -> MemoryPlan:
    """The same for every rank.

    Args:
        free_bytes: see least_room.

    Raises:
        NotEnoughMemory: see plan_memory.
    """
    whole, engine, choice = room.shard.whole, room.engine, room.choice
    part = part_of(whole, engine.tensor_parallel)
    weights_bytes = rank_weights_bytes(whole, engine, choice, room.checkpoint)
    plan = plan_memory(part, engine, choice, room.checkpoint.size_bytes, free_bytes, weights_bytes)
    return replace(plan, num_parameters=whole.num_parameters)


def rank_weights_bytes(
    whole: ModelConfig, engine: EngineConfig, choice: DeviceChoice, checkpoint: Checkpoint | None = None
) -> int:
    """Of one rank: its part, with the embedding and its rows of the head; of a tied one, a packed copy of these.

    Args:
        checkpoint: see weights_size_bytes.
    """
    part = part_of(whole, engine.tensor_parallel)
    size_bytes = weights_size_bytes(part, choice.dtype, engine.quantize, choice.device, checkpoint)
    shape = (whole.vocab_size, whole.hidden_size)
    ends_bytes = math.prod(shape) * choice.dtype.itemsize
    head_bytes = head_rows_of(whole, engine.tensor_parallel) * whole.hidden_size * choice.dtype.itemsize
    if not whole.tie_embeddings:
        return size_bytes - ends_bytes + head_bytes
    if not can_pack(choice.dtype, choice.device):
        return size_bytes
    return size_bytes + head_bytes - (0 if can_gather(shape) else ends_bytes)


def load_rank(room: Room, free_bytes: int, meeting: int, progress: Progress) -> ModelRunner:
    """Meet the other ranks and load this one's part.

    Args:
        free_bytes: see plan_rank.
        meeting: see Ranks.

    Raises:
        StartupError: see gpu.loading.load_runner.
        DeviceError: the others are not there.
    """
    shard, device = room.shard, room.choice.device
    torch.set_num_threads(room.choice.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = plan_rank(room, free_bytes)
    ranks = Ranks(shard.rank, shard.num_ranks, device, meeting)
    return load_planned(room.checkpoint, shard.whole, room.engine, memory, progress, shard, ranks)


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
