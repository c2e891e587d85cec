"""One rank's part of a model: how much memory it gets, and how it comes there. Thread: engine (at start)."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import DeviceUnavailable
from gpu.checkpoint import Checkpoint, Progress, open_checkpoint
from gpu.device import DeviceChoice, apply_threads, choose_device, free_memory_bytes
from gpu.kept_matrices import kept_scheme
from gpu.linear import can_gather, can_pack
from gpu.loading import load_planned
from gpu.memory_plan import MemoryPlan, plan_memory
from gpu.memory_sizes import weights_size_bytes
from gpu.parallel.ranks import Ranks
from gpu.parallel.shards import Shard, check_shards, head_rows_of, part_of
from gpu.runner import ModelRunner
from gpu.weights import check_checkpoint


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
    engine = replace(engine, overlap="off", graphs="off")  # see gpu.parallel.runner
    chosen = choose_device(engine)
    check_shards(model, num_ranks, kept_scheme(model, engine.quantize, chosen.device) is not None)
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
    apply_threads(room.choice)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = plan_rank(room, free_bytes)
    ranks = Ranks(shard.rank, shard.num_ranks, device, meeting)
    return load_planned(room.checkpoint, shard.whole, room.engine, memory, progress, shard, ranks)
