"""How the device's memory is divided: weights, the largest step, graphs, KV. From headers and settings alone, before
anything is loaded. Thread: engine, at start, or main, for an estimate.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import BLOCK_SIZE, EngineConfig, ModelConfig
from core.errors import NotEnoughMemory, StartupError
from gpu.attention import MAX_GATHERED_TOKENS
from gpu.checkpoint import Checkpoint, open_checkpoint
from gpu.device import DeviceChoice, choose_device, free_memory_bytes
from gpu.kernels.sizes import kernel_shape, why_no_attention
from gpu.kv_cache import bytes_per_block, bytes_per_token, num_blocks_for, num_blocks_within
from gpu.linear import can_gather, can_pack
from gpu.parameters import LayerWeights, empty_weights, layer_targets, matrices
from gpu.quant import DEVICE_SLAB_BYTES, SLAB_BYTES, can_quantize, floats, stored_bytes
from gpu.sampler import piece_rows
from gpu.scores import MAX_SCORES
from gpu.step_shapes import max_decodes, step_shapes
from gpu.streams import staged_bytes
from gpu.weights import PrequantizedMatrix, check_checkpoint, find_prequantized, prequantized_scheme

MIB, GIB = 1024**2, 1024**3
ROUNDING_TOKENS = 100  # of a proposed --max-model-len
# Of the room, what the KV cache may take unasked: the host's memory is others' too, a GPU's is there to be used, but
# for what torch's allocator loses between blocks.
SHARED_MEMORY_SHARE, OWN_MEMORY_SHARE = 0.5, 0.95
FIX_MARGIN = 0.02  # of the free memory, which what is proposed leaves: a minute later there may be less


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets how much, in bytes unless said otherwise.

    Args:
        checkpoint_bytes: of the files' tensors; weights_bytes: of the same in memory, as dtype or quantised.
        activation_bytes: of the largest step: an upper bound.
        graph_bytes: of CUDA graphs: an estimate before the start, and then as measured.
        num_blocks: for sequences; the cache holds one more.
        free_bytes: on the device, before anything is loaded.
        offload_bytes: of host memory; on a CPU from the same memory as all else, on a GPU beside it.
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
    offload_bytes: int = 0
    graph_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def total_bytes(self) -> int:
        """On the device."""
        on_device = self.weights_bytes + self.activation_bytes + self.graph_bytes + self.kv_bytes
        return on_device + self.offload_bytes * _is_shared(self.device)


def estimate(directory: Path, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """Plan the memory of a model's directory; reads headers only, and the head of a tied model that has one.

    Raises:
        BadCheckpoint: the directory's files, or tensors that are not those of its config.json.
        DeviceUnavailable: the device or dtype asked for.
        NotEnoughMemory: the weights, or the KV cache of one sequence of max_model_len, do not fit.
    """
    device = choose_device(engine)
    checkpoint = open_checkpoint(directory, model.packing)
    model = check_checkpoint(checkpoint, model)
    offload_slots(model, engine, device.dtype, free_memory_bytes(torch.device("cpu")))
    return plan_checkpoint(model, engine, device, checkpoint, free_memory_bytes(device.device))


def plan_checkpoint(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint, free_bytes: int
) -> MemoryPlan:
    """Of a model whose headers have been read; see plan_memory."""
    weights_bytes = weights_size_bytes(model, device.dtype, engine.quantize, device.device, checkpoint)
    return plan_memory(model, engine, device, checkpoint.size_bytes, free_bytes, weights_bytes)


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    device: DeviceChoice,
    checkpoint_bytes: int,
    free_bytes: int,
    weights_bytes: int | None = None,
    graph_bytes: int | None = None,
) -> MemoryPlan:
    """Divide free_bytes: weights first, then the largest step, then as much KV as is useful; see estimate.

    Args:
        weights_bytes: None: all of the model's, stored as its config.json says.
        graph_bytes: None: an estimate.
    """
    max_model_len = _max_model_len(model, engine)
    if weights_bytes is None:
        weights_bytes = weights_size_bytes(model, device.dtype, engine.quantize, device.device)
    activation_bytes = activation_size_bytes(model, engine, max_model_len, device)
    shared_bytes = engine.kv_offload_bytes * _is_shared(device)
    asked = _Asked(model, engine, max_model_len, device, free_bytes, weights_bytes + shared_bytes, graph_bytes)
    if asked.kv_room_bytes <= 0:
        needed_bytes = weights_bytes + activation_bytes + asked.graph_bytes
        unit = _unit_of(needed_bytes, shared_bytes, free_bytes)
        beside = f" beside --kv-offload-memory of {unit.show(shared_bytes)}" if shared_bytes else ""
        needed = unit.show(needed_bytes)
        cause = f"Weights and activations need {needed} as {device.dtype_name}{beside}, {unit.show(free_bytes)} free."
        raise NotEnoughMemory(cause, _ways_out(asked, unit))
    loading_bytes = loading_size_bytes(model, engine, device)
    if weights_bytes + loading_bytes > free_bytes:
        unit = _unit_of(weights_bytes, loading_bytes, free_bytes)
        cause = (
            f"Weights need {unit.show(weights_bytes)} as {device.dtype_name}, and {unit.show(loading_bytes)} more "
            f"while they load, {unit.show(free_bytes)} free."
        )
        raise NotEnoughMemory(cause, _smaller(engine, device.dtype))
    num_blocks = _num_blocks(asked)
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
        offload_bytes=engine.kv_offload_bytes,
        graph_bytes=asked.graph_bytes,
    )


def offload_slots(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, free_bytes: int) -> int:
    """How many blocks the host memory that is asked for holds; 0: none is asked for.

    Args:
        free_bytes: on the host.

    Raises:
        StartupError: it does not hold one, or is more than is free.
    """
    asked_bytes, block_bytes = engine.kv_offload_bytes, bytes_per_block(model, dtype)
    if 0 < asked_bytes < block_bytes:
        least = f"--kv-offload-memory of at least {-(-block_bytes // MIB)}MiB."
        raise StartupError("--kv-offload-memory has no room for a block of keys and values.", least)
    if asked_bytes > free_bytes:
        unit = _unit_of(asked_bytes, free_bytes)
        raise NotEnoughMemory(
            f"--kv-offload-memory asks for {unit.show(asked_bytes)}, {unit.show(free_bytes)} free.",
            f"--kv-offload-memory {unit.setting_between(1, free_bytes // 2, free_bytes)}, or less.",
        )
    return asked_bytes // block_bytes


def _is_shared(device: DeviceChoice) -> bool:
    """Whether host memory and the device's are one."""
    return device.device.type == "cpu"


def memory_needed(
    model: ModelConfig, engine: EngineConfig, device: DeviceChoice, checkpoint: Checkpoint | None = None
) -> int:
    """The least free memory that plan_memory takes, in bytes: weights, the largest step, one sequence's KV cache.

    On a CPU also what --kv-offload-memory asks for.

    Args:
        checkpoint: see weights_size_bytes.
    """
    max_model_len = _max_model_len(model, engine)
    kv_bytes = (num_blocks_for(max_model_len) + 1) * bytes_per_block(model, device.dtype)
    activation_bytes = activation_size_bytes(model, engine, max_model_len, device) + graphs_size_bytes(
        model, engine, device
    )
    weights_bytes = weights_size_bytes(model, device.dtype, engine.quantize, device.device, checkpoint)
    serving_bytes = activation_bytes + kv_bytes + engine.kv_offload_bytes * _is_shared(device)
    return weights_bytes + max(serving_bytes, loading_size_bytes(model, engine, device))


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked to fit beside what is taken: by the weights, and on a CPU by host memory for KV.

    Args:
        known_graph_bytes: None: an estimate.
    """

    model: ModelConfig
    engine: EngineConfig
    max_model_len: int
    device: DeviceChoice
    free_bytes: int
    taken_bytes: int
    known_graph_bytes: int | None

    @property
    def graph_bytes(self) -> int:
        if self.known_graph_bytes is not None:
            return self.known_graph_bytes
        return graphs_size_bytes(self.model, self.engine, self.device)

    @property
    def kv_room_bytes(self) -> int:
        """Beside what is taken, the largest step and graphs; may be negative."""
        activation_bytes = activation_size_bytes(self.model, self.engine, self.max_model_len, self.device)
        return self.free_bytes - self.taken_bytes - activation_bytes - self.graph_bytes

    @property
    def least_kv_bytes(self) -> int:
        """One sequence's, with the scratch block."""
        return (num_blocks_for(self.max_model_len) + 1) * bytes_per_block(self.model, self.device.dtype)

    @property
    def fits(self) -> bool:
        given = self.engine.kv_memory_bytes
        kv_bytes = self.least_kv_bytes if given is None else given
        return self.least_kv_bytes <= kv_bytes <= self.kv_room_bytes

    def with_margin(self) -> "_Asked":
        return replace(self, free_bytes=round(self.free_bytes * (1 - FIX_MARGIN)))

    def with_length(self, max_model_len: int) -> "_Asked":
        return replace(self, max_model_len=max_model_len)

    def without_kv_memory(self) -> "_Asked":
        return replace(self, engine=replace(self.engine, kv_memory_bytes=None))

    def with_sequences(self, max_sequences: int) -> "_Asked":
        return replace(self, engine=replace(self.engine, max_sequences=max_sequences))


def _num_blocks(asked: _Asked) -> int:
    """Blocks that are useful: all sequences at full length; by default within a part of the room, or one sequence's."""
    if not asked.fits:
        raise _kv_does_not_fit(asked)
    one_sequence = num_blocks_for(asked.max_model_len)
    if asked.engine.kv_memory_bytes is not None:
        return num_blocks_within(asked.engine.kv_memory_bytes, asked.model, asked.device.dtype)
    share = SHARED_MEMORY_SHARE if _is_shared(asked.device) else OWN_MEMORY_SHARE
    usual = num_blocks_within(int(asked.kv_room_bytes * share), asked.model, asked.device.dtype)
    return min(asked.engine.max_sequences * one_sequence, max(usual, one_sequence))


def _kv_does_not_fit(asked: _Asked) -> NotEnoughMemory:
    given, room, need = asked.engine.kv_memory_bytes, asked.kv_room_bytes, asked.least_kv_bytes
    if given is not None and given > room:
        unit = _unit_of(given, room)
        cause = f"KV cache: --kv-memory asks for {unit.show(given)}, {unit.show(room)} free beside the weights."
        return NotEnoughMemory(cause, _ways_out(asked, unit))
    has, gives = (room, "{} free") if given is None else (given, "--kv-memory gives {}")
    unit = _unit_of(need, has)
    short = f", {need - has} bytes too few" if unit.show(need) == unit.show(has) else ""
    cause = f"KV cache: need {unit.show(need)} for {asked.max_model_len} tokens, {gives.format(unit.show(has))}{short}."
    return NotEnoughMemory(cause, _ways_out(asked, unit))


def _ways_out(asked: _Asked, unit: "_Unit") -> str:
    """Settings that fit, each tried: with a margin, unless only what needs all that is free now fits at all."""
    ways = _settings_that_fit(asked.with_margin(), unit) or _settings_that_fit(asked, unit)
    return ", or ".join(ways) or _smaller(asked.engine, asked.device.dtype)


def _settings_that_fit(asked: _Asked, unit: "_Unit") -> list[str]:
    ways = []
    if longest := _longest(asked):
        ways.append(f"--max-model-len {longest}")
    if most := _most_sequences(asked):
        ways.append(f"--max-sequences {most}")
    if kv_memory := _kv_memory(asked, unit):
        ways.append(f"--kv-memory {kv_memory}")
    if not ways and (longest := _longest(asked.with_sequences(1))):
        ways.append(f"--max-sequences 1 --max-model-len {longest}")
    if not ways and (longest := _longest(asked.without_kv_memory())):
        ways.append(f"--max-model-len {longest} without --kv-memory")
    return ways


def _smaller(engine: EngineConfig, dtype: torch.dtype) -> str:
    ways = ["a smaller model"]
    if engine.kv_offload_bytes:
        ways.append("less --kv-offload-memory")
    if dtype == torch.float32:
        ways.append("--dtype bfloat16")
    if engine.quantize != "int4":
        ways.append("--quantize int4")
    return ", or ".join(ways)


def _longest(asked: _Asked) -> int:
    """The longest context that fits with its own activations, rounded down; 0: none. Memory grows with the length."""
    lengths = range(1, asked.max_model_len + 1)
    longest = bisect_left(lengths, True, key=lambda length: not asked.with_length(length).fits)
    return longest // ROUNDING_TOKENS * ROUNDING_TOKENS or longest


def _most_sequences(asked: _Asked) -> int:
    """At the length asked for; 0: not even one."""
    counts = range(1, asked.engine.max_sequences + 1)
    return bisect_left(counts, True, key=lambda count: not asked.with_sequences(count).fits)


def _kv_memory(asked: _Asked, unit: "_Unit") -> str | None:
    """A size near what was asked for; None: none was, or nothing fits at this length."""
    given = asked.engine.kv_memory_bytes
    return None if given is None else unit.setting_between(asked.least_kv_bytes, given, asked.kv_room_bytes)


@dataclass(frozen=True, slots=True)
class _Unit:
    """That all sizes of a message are told in.

    Args:
        steps: of the sizes that are proposed, within one unit.
    """

    name: str
    num_bytes: int
    steps: int

    def show(self, size_bytes: int) -> str:
        size = size_bytes / self.num_bytes
        return f"{size:.1f} {self.name}" if size >= 1 or size_bytes <= 0 else f"{size:.2g} {self.name}"

    def setting_between(self, least: int, wanted: int, most: int) -> str | None:
        """The value of a flag, of so many bytes as wanted, or of the nearest that fit; None: none do."""
        step = self.num_bytes / self.steps
        first, last = math.ceil(least / step), math.floor(most / step)
        if first > last:
            return None if self is _MIB else _MIB.setting_between(least, wanted, most)
        return f"{min(max(round(wanted / step), first), last) / self.steps:g}{self.name}"


_MIB, _GIB = _Unit("MiB", MIB, 1), _Unit("GiB", GIB, 100)


def _unit_of(*sizes: int) -> _Unit:
    """The one that fits the largest."""
    return _GIB if max(sizes) >= GIB else _MIB


# Of a graph: a generous guess at what the driver keeps of a kernel that it will launch. It is for estimates, before
# anything is loaded: what is true is found out at start (step_graphs.py).
GRAPH_NODE_BYTES, GRAPH_NODES_A_LAYER, GRAPH_NODES = 8 * 1024, 16, 32


def weights_size_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
) -> int:
    """Of all parameters in memory, ready to compute: in dtype, the layers' matrices quantised where they can be.

    A tied head that is prepacked is one more copy, unless the embedding's rows can be read from it.

    Args:
        checkpoint: which matrices it stores quantised; None: all that its config.json says are.
    """
    size_bytes = model.num_parameters * dtype.itemsize
    ends = (model.vocab_size, model.hidden_size)
    if model.tie_embeddings and can_pack(dtype, device) and not can_gather(ends):
        size_bytes += math.prod(ends) * dtype.itemsize
    scheme = prequantized_scheme(model, quantize, device)
    if quantize is None and scheme is None:
        return size_bytes
    for index, layer in enumerate(empty_weights(model, dtype, torch.device("meta")).layers):
        kept = {} if scheme is None else find_prequantized(model, layer, layer_targets(model, index, layer), checkpoint)
        size_bytes += sum(_added_bytes(layer, kept, scheme, dtype, quantize))
    return size_bytes


def _added_bytes(
    layer: LayerWeights,
    kept: dict[str, PrequantizedMatrix],
    scheme: str | None,
    dtype: torch.dtype,
    quantize: str | None,
) -> Iterator[int]:
    """Of a layer's matrices, what storing each as integers or 8-bit floats adds: a negative number.

    Args:
        scheme: of those that are kept.
        quantize: others to this.
    """
    for owner, field in matrices(layer):
        shape = tuple(floats(getattr(owner, field)).shape)
        plain_bytes = math.prod(shape) * dtype.itemsize
        if scheme is not None and field in kept:
            group_size = kept[field].group_size
            yield stored_bytes(shape, scheme, dtype, group_size) - plain_bytes
        elif quantize is not None and can_quantize(quantize, shape[-1]):
            yield stored_bytes(shape, quantize, dtype) - plain_bytes


def loading_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """Beside the weights, until they are all there: slices on their way, and a layer that is not quantised yet."""
    size_bytes = staged_bytes(device.device)
    if engine.quantize is not None or prequantized_scheme(model, None, device.device) is not None:
        layers = empty_weights(model, device.dtype, torch.device("meta")).layers
        size_bytes += max(sum(floats(getattr(*matrix)).nbytes for matrix in matrices(layer)) for layer in layers)
    return size_bytes


def activation_size_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """An upper bound: one layer's tensors of a full batch, the widest gather of keys and values, logits and noise."""
    dtype = device.dtype
    scored_rows = min(piece_rows(model.vocab_size), engine.max_batch_tokens)
    one_layer = engine.max_batch_tokens * _layer_width(model) * dtype.itemsize
    masks = len(model.windows) + (model.windows != (None,))  # one per window, and one while a windowed one is made
    mask = masks * engine.max_batch_tokens * max_model_len * dtype.itemsize
    longest = num_blocks_for(max_model_len) * BLOCK_SIZE
    gathered_tokens = min(engine.max_sequences * longest, max(longest, MAX_GATHERED_TOKENS))
    gathered = gathered_tokens * 2 * model.kv_size * dtype.itemsize
    # Of rows that draw: raw, adjusted, scaled, noise; of a piece of prompts beside them: of the head, raw, logarithms
    logits = 4 * model.vocab_size * max(4 * engine.max_sequences, engine.max_sequences + 3 * scored_rows)  # float32
    is_written_out = model.attention_cap is not None or model.has_sinks
    written_out = 3 * 4 * MAX_SCORES * is_written_out  # float32: products, and two steps on
    slab_bytes = SLAB_BYTES if device.device.type == "cpu" else DEVICE_SLAB_BYTES
    slabs = 4 * slab_bytes if engine.quantize or model.packing else 0  # a part of a weight: bits, integers, floats
    experts = _expert_activation_bytes(model, engine.max_batch_tokens, dtype)
    decoding = _decoding_bytes(model, engine, max_model_len, device)
    return one_layer + mask + gathered + logits + written_out + slabs + experts + decoding


def _layer_width(model: ModelConfig) -> int:
    """Numbers of one token, of all tensors of a layer."""
    return 4 * model.hidden_size + 4 * model.query_size + 6 * model.kv_size + 3 * model.intermediate_size


def _decoding_bytes(model: ModelConfig, engine: EngineConfig, max_model_len: int, device: DeviceChoice) -> int:
    """Where rows stay on the device: what splits of a context have found, until they are merged; tables, of the tokens
    that slots have seen too; logits.
    """
    if not _may_have_device_rows(model, device):
        return 0
    rows, width = max_decodes(engine), num_blocks_for(max_model_len)
    shape = kernel_shape(model.num_heads, model.num_kv_heads, model.head_dim, device.dtype)
    splits = rows * shape.splits_of(width * BLOCK_SIZE) * model.num_heads * (model.head_dim + 2) * 4  # float32
    tables = (engine.max_sequences + rows) * width * 4  # of slots and of rows, int32
    return splits + tables + (engine.max_sequences + rows) * model.vocab_size * 4


def _may_have_device_rows(model: ModelConfig, device: DeviceChoice) -> bool:
    """Whether the model's decodes may be graphs; an old device without kernels has room to spare."""
    return device.device.type == "cuda" and why_no_attention(model, device.dtype) is None


def graphs_size_bytes(model: ModelConfig, engine: EngineConfig, device: DeviceChoice) -> int:
    """What graphs share, a block for their padding, and the driver's part of each."""
    if engine.graphs == "off" or not _may_have_device_rows(model, device):
        return 0
    shapes, dtype = step_shapes(model, engine), device.dtype
    rows, tokens = max_decodes(engine), max(shape.num_tokens for shape in shapes.largest)
    pool = (tokens * _layer_width(model) + rows * model.vocab_size) * dtype.itemsize
    nodes = GRAPH_NODES + GRAPH_NODES_A_LAYER * model.num_layers
    driver = len(shapes.in_order) * nodes * GRAPH_NODE_BYTES
    return pool + _expert_activation_bytes(model, tokens, dtype) + bytes_per_block(model, dtype) + driver


def _expert_activation_bytes(model: ModelConfig, num_tokens: int, dtype: torch.dtype) -> int:
    """Each token once for each of its experts: in, out of all, in order again, and once as float32."""
    if model.experts is None:
        return 0
    copies = num_tokens * model.experts.num_active
    return copies * (
        model.hidden_size * (3 * dtype.itemsize + 4) + 3 * model.experts.intermediate_size * dtype.itemsize
    )
