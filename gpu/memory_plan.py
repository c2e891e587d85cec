"""How the device's memory is divided, computed from headers and configuration, before anything is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import NotEnoughMemory, StartupError
from gpu.checkpoint import open_checkpoint
from gpu.device import DeviceChoice, choose_device, free_memory_bytes
from gpu.kv_cache import bytes_per_block, bytes_per_token, num_blocks_for, num_blocks_within
from gpu.linear import can_pack
from gpu.quantize import can_quantize, floats, operator_group_size, stored_bytes
from gpu.quantized_linear import SLAB_BYTES
from gpu.scores import MAX_SCORES
from gpu.tied_head import can_gather
from gpu.weights import empty_weights, keeps_packed, matrices

GIB = 1024**3
ROUNDING_TOKENS = 100  # of a proposed --max-model-len


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets how much, in bytes unless said otherwise.

    Args:
        checkpoint_bytes: of the files' tensors; weights_bytes: of the same in memory, as dtype or quantised.
        activation_bytes: of the largest step: an upper bound.
        num_blocks: for sequences; the cache holds one more.
        free_bytes: on the device, before anything is loaded.
    """

    device: DeviceChoice
    num_parameters: int
    checkpoint_bytes: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    num_blocks: int
    max_model_len: int
    free_bytes: int

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.activation_bytes + self.kv_bytes


def estimate(directory: Path, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """Plan the memory of a model's directory; reads the headers of its files only.

    Raises:
        BadCheckpoint: the directory's files.
        DeviceUnavailable: the device or dtype asked for.
        NotEnoughMemory: the weights, or the KV cache of one sequence of max_model_len, do not fit.
    """
    device = choose_device(engine)
    checkpoint_bytes = open_checkpoint(directory, model.packed).size_bytes
    return plan_memory(model, engine, device, checkpoint_bytes, free_memory_bytes(device.device))


def plan_memory(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint_bytes: int, free_bytes: int
) -> MemoryPlan:
    """Divide free_bytes: weights first, then the largest step, then as much KV as is useful; see estimate."""
    max_model_len = _max_model_len(model, engine)
    weights_bytes = weights_size_bytes(model, device.dtype, engine.quantize, device.device)
    activation_bytes = _activation_bytes(model, engine, max_model_len, device.dtype)
    room = free_bytes - weights_bytes - activation_bytes
    if room <= 0:
        raise NotEnoughMemory(
            f"Weights and activations need {_size(weights_bytes + activation_bytes)} as {device.dtype_name}, "
            f"{_size(free_bytes)} free.",
            _smaller(engine, device.dtype),
        )
    num_blocks = _num_blocks(model, engine, max_model_len, device.dtype, room)
    return MemoryPlan(
        device=device,
        num_parameters=model.num_parameters,
        checkpoint_bytes=checkpoint_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=bytes_per_token(model, device.dtype),
        kv_bytes=(num_blocks + 1) * bytes_per_block(model, device.dtype),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        free_bytes=free_bytes,
    )


def memory_needed(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """The least free memory that plan_memory takes, in bytes: weights, the largest step, one sequence's KV cache."""
    max_model_len = _max_model_len(model, engine)
    kv_bytes = (num_blocks_for(max_model_len) + 1) * bytes_per_block(model, device.dtype)
    activation_bytes = _activation_bytes(model, engine, max_model_len, device.dtype)
    return weights_size_bytes(model, device.dtype, engine.quantize, device.device) + activation_bytes + kv_bytes


def weights_size_bytes(model: ModelConfig, dtype: torch.dtype, quantize: str | None, device: torch.device) -> int:
    """Of all parameters in memory, ready to compute: in dtype, the layers' matrices quantised where they can be.

    A tied head that is prepacked is one more copy, unless the embedding's rows can be read from it.
    """
    size_bytes = model.num_parameters * dtype.itemsize
    ends = (model.vocab_size, model.hidden_size)
    if model.tie_embeddings and can_pack(dtype, device) and not can_gather(ends):
        size_bytes += math.prod(ends) * dtype.itemsize
    is_kept = keeps_packed(model, quantize)
    scheme = "int4" if is_kept else quantize
    if scheme is None:
        return size_bytes
    for layer in empty_weights(model, dtype, torch.device("meta")).layers:
        for owner, name in matrices(layer):
            matrix = floats(getattr(owner, name))
            num_in = matrix.shape[-1]
            group_size = operator_group_size(model.packed.group_size or num_in) if is_kept and model.packed else None
            if is_kept or can_quantize(scheme, num_in):
                stored = stored_bytes(tuple(matrix.shape), scheme, dtype, group_size)
                size_bytes += stored - matrix.numel() * dtype.itemsize
    return size_bytes


def _smaller(engine: EngineConfig, dtype: torch.dtype) -> str:
    ways = ["a smaller model"]
    if dtype == torch.float32:
        ways.append("--dtype bfloat16")
    if engine.quantize != "int4":
        ways.append("--quantize int4")
    return ", or ".join(ways)


def _max_model_len(model: ModelConfig, engine: EngineConfig) -> int:
    asked = engine.max_model_len
    if asked is None:
        return model.max_position
    if not 0 < asked <= model.max_position:
        raise StartupError(
            f"A context of {asked} tokens was asked for; the model was made for up to {model.max_position}.",
            f"--max-model-len {model.max_position}, or less.",
        )
    return asked


def _num_blocks(model: ModelConfig, engine: EngineConfig, max_model_len: int, dtype: torch.dtype, room: int) -> int:
    """Blocks that are useful: all sequences at full length; by default within half of the room, or one sequence's."""
    one_sequence = num_blocks_for(max_model_len)
    useful = engine.max_sequences * one_sequence
    available = room if engine.kv_memory_bytes is None else engine.kv_memory_bytes
    fitting = num_blocks_within(available, model, dtype)
    if available > room or fitting < one_sequence:
        raise _kv_does_not_fit(model, engine, max_model_len, dtype, available, room)
    if engine.kv_memory_bytes is not None:
        return fitting
    return min(useful, max(num_blocks_within(room // 2, model, dtype), one_sequence))


def _kv_does_not_fit(
    model: ModelConfig, engine: EngineConfig, max_model_len: int, dtype: torch.dtype, available: int, room: int
) -> NotEnoughMemory:
    if available > room:
        return NotEnoughMemory(
            f"KV cache: --kv-memory asks for {_size(available)}, {_size(room)} free beside the weights.",
            f"--kv-memory {room // 1024**2}MiB, or less.",
        )
    need = (num_blocks_for(max_model_len) + 1) * bytes_per_block(model, dtype)
    fitting = num_blocks_within(available, model, dtype) * BLOCK_SIZE
    proposed = fitting // ROUNDING_TOKENS * ROUNDING_TOKENS or fitting
    fix = f"--max-model-len {proposed}" if proposed else "a smaller model, or more memory"
    have = f"{_size(available)} free"
    if engine.kv_memory_bytes is not None:
        have = f"--kv-memory gives {_size(available)}"
        fix = f"{fix}, or --kv-memory {-(-need // 1024**2)}MiB"
    return NotEnoughMemory(f"KV cache: need {_size(need)} for {max_model_len} tokens, {have}.", fix)


def _activation_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, dtype: torch.dtype) -> int:
    """An upper bound: one layer's tensors of a full batch, the widest gather of keys and values, logits and noise."""
    widths = 4 * model.hidden_size + 4 * model.query_size + 6 * model.kv_size + 3 * model.intermediate_size
    one_layer = engine.max_batch_tokens * widths * dtype.itemsize
    masks = len(model.windows) + (model.windows != (None,))  # one per window, and one while a windowed one is made
    mask = masks * engine.max_batch_tokens * max_model_len * dtype.itemsize
    gathered = engine.max_sequences * max_model_len * 2 * model.kv_size * dtype.itemsize
    if engine.kv_memory_bytes is not None:
        gathered = min(gathered, engine.kv_memory_bytes // model.num_layers)
    logits = engine.max_sequences * model.vocab_size * 4 * 4  # float32: raw, adjusted, scaled, noise
    is_written_out = model.attention_cap is not None or model.has_sinks
    written_out = 3 * 4 * MAX_SCORES * is_written_out  # float32: products, and two steps on
    slabs = 4 * SLAB_BYTES if engine.quantize or model.packed else 0  # a part of a weight: bits, integers, floats
    return one_layer + mask + gathered + logits + written_out + slabs + _expert_activation_bytes(model, engine, dtype)


def _expert_activation_bytes(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """Each token once for each of its experts: in, out of all, in order again, and once as float32."""
    if model.experts is None:
        return 0
    copies = engine.max_batch_tokens * model.experts.num_active
    return copies * (
        model.hidden_size * (3 * dtype.itemsize + 4) + 3 * model.experts.intermediate_size * dtype.itemsize
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / 1024**2:.1f} MiB"
