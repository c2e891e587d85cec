"""Computes steps on several devices: the Runner of core.plan, over ranks that are processes. Thread: engine.

This process is rank 0: it runs the scheduler, samples all tokens, and sends the others each plan before it computes its
own part. Where steps overlap, it shares each step's sampled tokens on the devices: the next plan refers to them before
the host has read them. CUDA graphs are off: if one rank could not capture a shape that another replays, they would wait
for each other for ever.

A step that raises on this rank breaks the engine, unlike on one device: the ranks no longer agree. The other ranks end
with this process (the kernel kills them, and their pipes end); one that ends earlier counts as a lost device.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import DeviceUnavailable
from core.plan import DeviceError, Int32Array, StepOutput, StepPlan
from gpu.checkpoint import Checkpoint, Progress, open_checkpoint
from gpu.cpu_kernels.support import choose_for
from gpu.device import DeviceChoice, apply_threads, free_memory_bytes
from gpu.linear import can_gather, can_pack
from gpu.loading import load_planned, time_rows, warm_up
from gpu.memory_plan import MemoryPlan, plan_memory, weights_size_bytes
from gpu.parallel.processes import Followers, Job, Load, Step
from gpu.parallel.ranks import Ranks, Shard, check_shards, head_rows_of, part_of
from gpu.runner import ModelRunner, StepTicket
from gpu.weights import check_checkpoint, prequantized_scheme


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
        StartupError: the model, its files or the devices do not allow so many ranks.
    """
    num_ranks = engine.tensor_parallel
    engine = replace(engine, graphs="off")  # see this module's docstring
    chosen = choose_for(model, engine)
    check_shards(model, num_ranks, prequantized_scheme(model, engine.quantize, chosen.device) is not None)
    choice = rank_choice(chosen, engine, rank)
    checkpoint = open_checkpoint(path, model.packing)
    model = check_checkpoint(checkpoint, model)
    return Room(Shard(model, rank, num_ranks), engine, choice, checkpoint, free_memory_bytes(choice.device))


def rank_choice(choice: DeviceChoice, engine: EngineConfig, rank: int) -> DeviceChoice:
    """A rank's own GPU, or its share of the CPU's threads.

    Raises:
        DeviceUnavailable: there are fewer GPUs than ranks.
    """
    num_ranks = engine.tensor_parallel
    reason = f"{choice.device_reason}; {num_ranks} ranks, each with what is shown here"
    if choice.device.type == "cuda":
        num_devices = torch.cuda.device_count()
        if num_devices < num_ranks:
            cause = f"--tensor-parallel {num_ranks}: {num_devices} CUDA devices were found."
            raise DeviceUnavailable(cause, f"--tensor-parallel {num_devices}, or less.")
        return replace(choice, device=torch.device("cuda", rank), device_reason=reason)
    threads = choice.threads if choice.are_threads_asked else max(1, choice.threads // num_ranks)
    return replace(choice, device_reason=reason, threads=threads, are_threads_asked=True)


def least_room(choice: DeviceChoice, free_bytes: list[int]) -> int:
    """Free memory that every rank has; ranks on a CPU share theirs."""
    return min(free_bytes) // (len(free_bytes) if choice.device.type == "cpu" else 1)


def estimate_ranks(path: Path, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """gpu.memory_plan.estimate for each rank, from the first one's device."""
    room = find_room(path, model, engine, rank=0)
    return plan_rank(room, least_room(room.choice, [room.free_bytes] * engine.tensor_parallel))


def plan_rank(room: Room, free_bytes: int) -> MemoryPlan:
    """The plan of every rank.

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
    """One rank's part, with the whole embedding and its rows of the LM head; of a tied head, a packed copy of them.

    Args:
        checkpoint: see weights_size_bytes.
    """
    part = part_of(whole, engine.tensor_parallel)
    size_bytes = weights_size_bytes(part, engine, choice, checkpoint)
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
        DeviceError: the others cannot be reached.
    """
    shard, device = room.shard, room.choice.device
    apply_threads(room.choice)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = plan_rank(room, free_bytes)
    ranks = Ranks(shard.rank, shard.num_ranks, device, meeting)
    return load_planned(room.checkpoint, shard.whole, room.engine, memory, progress, shard, ranks)


@dataclass(slots=True)
class ParallelTicket:
    """A step under way on all ranks."""

    plan: StepPlan
    own: StepTicket


class ParallelRunner:
    """All ranks of a model.

    Args:
        runner: this rank's.
        followers: the others, which end with this process.
    """

    offload = None

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self.followers = followers
        self._broken_slots: list[int] = []  # not sent to the others yet
        self.limits = runner.limits
        self.memory = runner.memory

    def forward(self, plan: StepPlan) -> ParallelTicket:
        """
        Raises:
            DeviceError: a rank is lost, or this one's step has failed.
        """
        step = Step(plan, tuple(self._broken_slots))
        self._broken_slots.clear()
        self.followers.tell(lambda rank: step)
        try:
            return ParallelTicket(plan, self._runner.forward(plan))
        except DeviceError:
            raise
        except Exception as error:
            raise DeviceError(f"rank 0 has failed in a step that the others compute: {error!r}") from error

    def sample(self, ticket: ParallelTicket, masks: Int32Array | None = None) -> None:
        self._runner.sample(ticket.own, masks)

    def collect(self, ticket: ParallelTicket) -> StepOutput:
        output = self._runner.collect(ticket.own)
        self._broken_slots += [int(ticket.plan.slots[row]) for row in output.failed_rows]
        return output


def load_parallel_runner(path: Path, model: ModelConfig, engine: EngineConfig, progress: Progress) -> ParallelRunner:
    """Start the other ranks, and load the model on all of them; see gpu.loading.load_runner.

    Args:
        engine: tensor_parallel is at least two.

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
